"""The arguments of one conformance test: pools, a request, and a look at what was written and what was not.

Owns the pools' layout: inputs in one pool, outputs in another, each argument aligned, a guard behind each output.

Invariants:
1. Before every computation all bytes of the output pool hold ``FILL``, so that nothing old can pass for a result.
2. Afterwards the bytes between the outputs must still hold it, and the input pool what it held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from aionn.conformance.computing import Breach
from aionn.conformance.cts import CtsOperand, CtsTest
from aionn.hal import (
    PREFERRED_ALIGNMENT_BYTES,
    DataLocation,
    Memory,
    OperandType,
    OutputShape,
    Request,
    RequestArgument,
    is_scalar_type,
    operand_dtype,
)

__all__ = ["TestArguments"]

FILL = 0xA5
"""No float, integer or boolean that a test expects all through."""

ELEMENT_COUNT_MAX = 1 << 31
"""More elements than any output that is reported may have; the product of hostile extents stays in Python's integers."""


class TestArguments:
    """The request of one test, to be computed any number of times.

    Args:
        test: Gives the inputs, and by its expectation the sizes of the outputs; an empty output has one byte.
        short_bytes: How many bytes the first output's buffer is too short.
    """

    __test__ = False  # Not a class of tests, whatever pytest thinks of its name.

    def __init__(self, test: CtsTest, *, short_bytes: int = 0) -> None:
        main = test.main
        self._outputs = [main.operands[i] for i in main.output_indexes]
        inputs = [main.operands[i] for i in main.input_indexes]
        input_locations, input_bytes = _layout(0, [len(o.data or b"") for o in inputs])
        sizes = [max(1, _size_bytes(o)) for o in self._outputs]
        sizes[0] -= short_bytes
        self._locations, output_bytes = _layout(1, sizes)
        self._input_pool = Memory.create(input_bytes)
        try:
            self._output_pool = Memory.create(output_bytes)
        except BaseException:
            self._input_pool.close()
            raise
        for operand, location in zip(inputs, input_locations, strict=True):
            end = location.offset + location.length
            self._input_pool.array[location.offset : end] = np.frombuffer(operand.data or b"", np.uint8)
        self._inputs_before = self._input_pool.array.tobytes()
        self.request = Request(
            inputs=tuple(
                RequestArgument(location=location) if location.length else RequestArgument(has_no_value=True)
                for location in input_locations
            ),
            outputs=tuple(RequestArgument(location=location) for location in self._locations),
            pools=(self._input_pool, self._output_pool),
        )

    def reset(self) -> None:
        """Makes the output pool ready for a computation."""
        self._output_pool.array[:] = FILL

    def outputs(self, shapes: Sequence[OutputShape]) -> list[npt.NDArray[Any]]:
        """Copies of the outputs, in the shapes that were reported; none reported means the model's.

        Raises:
            Breach: The shapes do not fit the buffers, or something else was written.
        """
        if shapes and len(shapes) != len(self._outputs):
            raise Breach(f"{len(self._outputs)} output shapes", f"{len(shapes)}")
        reported = [s.dimensions for s in shapes] or [o.dimensions for o in self._outputs]
        self._check_untouched()
        return [
            self._output(index, operand, location, dimensions)
            for index, (operand, location, dimensions) in enumerate(
                zip(self._outputs, self._locations, reported, strict=True)
            )
        ]

    def _output(
        self, index: int, operand: CtsOperand, location: DataLocation, dimensions: tuple[int, ...]
    ) -> npt.NDArray[Any]:
        code = OperandType[operand.type]
        dtype = operand_dtype(code)
        count = 1 if is_scalar_type(code) else math.prod(dimensions)
        if not 0 <= count * dtype.itemsize <= min(location.length, ELEMENT_COUNT_MAX):
            raise Breach(
                f"output {index} within its {location.length} bytes",
                f"sufficient, of shape {list(dimensions)}",
            )
        buffer = self._output_pool.array[location.offset : location.offset + count * dtype.itemsize]
        return buffer.copy().view(dtype).reshape(() if is_scalar_type(code) else dimensions)

    def _check_untouched(self) -> None:
        if self._input_pool.array.tobytes() != self._inputs_before:
            raise Breach("inputs as they were", "other bytes in the pool of the inputs")
        start = 0
        for location in (*self._locations, DataLocation(1, self._output_pool.size_bytes, 0)):
            changed = np.flatnonzero(self._output_pool.array[start : location.offset] != FILL)
            if changed.size:
                place = start + int(changed[0])
                raise Breach(
                    "writes to the outputs alone", f"another byte {place} in the pool of the outputs"
                )
            start = location.offset + location.length

    def close(self) -> None:
        """Closes the pools. Idempotent."""
        self._input_pool.close()
        self._output_pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _size_bytes(operand: CtsOperand) -> int:
    code = OperandType[operand.type]
    count = 1 if is_scalar_type(code) else math.prod(operand.dimensions)
    return count * operand_dtype(code).itemsize


def _layout(pool_index: int, sizes: Sequence[int]) -> tuple[list[DataLocation], int]:
    """Locations for areas of the given sizes, and the size of the pool, guard behind the last included."""
    locations, end = [], 0
    for size in sizes:
        if size == 0:
            locations.append(DataLocation())
            continue
        locations.append(DataLocation(pool_index, end, size))
        end += (size // PREFERRED_ALIGNMENT_BYTES + 1) * PREFERRED_ALIGNMENT_BYTES
    return locations, end + PREFERRED_ALIGNMENT_BYTES
