"""Requests of the conformance suites, and of tests that call a device directly.

Owns the check that a device writes its outputs alone: inputs in one pool, outputs in another, and guards around the outputs.

Invariants:
1. Before every computation all bytes of the output pool have the value ``FILL``, so that nothing old can pass for a result.
2. Afterwards the bytes between the outputs must still have it, and the input pool its contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from aionn.hal import (
    PREFERRED_PADDING_BYTES,
    DataLocation,
    Memory,
    MemoryKind,
    Model,
    Request,
    RequestArgument,
)
from aionn.hal.pooled_request import PooledRequest, place_values

__all__ = ["FILL", "GuardedRequest", "request_for"]

FILL = 0xA5
"""No float, integer or boolean that a test expects all through."""


def request_for(model: Model, inputs: Sequence[npt.NDArray[Any]]) -> Request:
    """A request with these inputs, and room for outputs of the shapes that the model states.

    Raises:
        InvalidArgument: An output's shape is not known, or the number of inputs is wrong.
    """
    pooled = PooledRequest(model, [array.shape for array in inputs])
    pooled.write(inputs)
    return pooled.request


class GuardedRequest:
    """A request, to be executed any number of times, with guards before and behind each output. Close it.

    Args:
        inputs: The bytes of each input; an empty one is left out.
        output_sizes: Of the outputs, in bytes.
        kind: Of both memories.

    Attributes:
        request: The request: inputs in pool 0, outputs in pool 1.
        input_pool: The memory of the inputs.
        output_pool: The memory of the outputs.
    """

    def __init__(
        self, inputs: Sequence[bytes], output_sizes: Sequence[int], kind: MemoryKind = MemoryKind.ASHMEM
    ) -> None:
        places, input_bytes = place_values(map(len, inputs))
        self._locations, output_bytes = place_values(
            output_sizes, pool_index=1, guard_bytes=PREFERRED_PADDING_BYTES
        )
        self.input_pool = Memory.create(input_bytes, kind=kind)
        try:
            self.output_pool = Memory.create(output_bytes, kind=kind)
        except BaseException:
            self.input_pool.close()
            raise
        for data, location in zip(inputs, places, strict=True):
            end = location.offset + location.length
            self.input_pool.array[location.offset : end] = np.frombuffer(data, np.uint8)
        self._inputs_before = self.input_pool.array.tobytes()
        self.request = Request(
            inputs=tuple(
                RequestArgument(location=location) if location.length else RequestArgument(has_no_value=True)
                for location in places
            ),
            outputs=tuple(RequestArgument(location=location) for location in self._locations),
            pools=(self.input_pool, self.output_pool),
        )
        self.reset()

    def reset(self) -> None:
        """Fills the pool of the outputs, for the next computation."""
        self.output_pool.array[:] = FILL

    def written(self, index: int) -> npt.NDArray[np.uint8]:
        """A view of the bytes of an output."""
        location = self._locations[index]
        return self.output_pool.array[location.offset : location.offset + location.length]

    def stray(self) -> str | None:
        """The place of a changed byte that belongs to no output; None without one."""
        if self.input_pool.array.tobytes() != self._inputs_before:
            return "the pool of the inputs"
        start = 0
        for location in (*self._locations, DataLocation(1, self.output_pool.size_bytes, 0)):
            changed = np.flatnonzero(self.output_pool.array[start : location.offset] != FILL)
            if changed.size:
                return f"byte {start + int(changed[0])} of the pool of the outputs"
            start = location.offset + location.length
        return None

    def close(self) -> None:
        """Closes the pools. Idempotent."""
        self.input_pool.close()
        self.output_pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
