"""The arguments of one conformance test: pools, a request, and a look at what was written and what was not.

Owns the pools' layout: inputs in one pool, outputs in another, each argument aligned, a guard behind each output.

Invariants:
1. Before every computation all bytes of the output pool hold ``FILL``, so that nothing old can pass for a result.
2. Afterwards the bytes between the outputs must still hold it, and the input pool what it held.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from aionn.conformance.computing import Breach, closing
from aionn.conformance.cts.data import CtsOperand, CtsTest, operand_bytes
from aionn.errors import GeneralFailure
from aionn.hal import (
    PREFERRED_ALIGNMENT_BYTES,
    Buffer,
    BufferDesc,
    BufferRole,
    BufferToken,
    DataLocation,
    Device,
    Memory,
    MemoryKind,
    OperandType,
    OutputShape,
    PreparedModel,
    Request,
    RequestArgument,
    is_scalar_type,
    operand_dtype,
)

__all__ = ["DeviceArguments", "NoMemories", "TestArguments", "device_arguments"]

FILL = 0xA5
"""No float, integer or boolean that a test expects all through."""

ELEMENT_COUNT_MAX = 1 << 31
"""More elements than any output that is reported may have; the product of hostile extents stays in Python's integers."""


class TestArguments:
    """The request of one test, to be computed any number of times.

    Args:
        test: Gives the inputs, and by its expectation the sizes of the outputs; an empty output has one byte.
        short_bytes: How many bytes the first output's buffer is too short.
        kind: Of both memories.
    """

    __test__ = False  # Not a class of tests, whatever pytest thinks of its name.

    def __init__(self, test: CtsTest, *, short_bytes: int = 0, kind: MemoryKind = MemoryKind.ASHMEM) -> None:
        main = test.main
        self._outputs = [main.operands[i] for i in main.output_indexes]
        inputs = [main.operands[i] for i in main.input_indexes]
        input_locations, input_bytes = _layout(0, [len(o.data or b"") for o in inputs])
        sizes = [max(1, operand_bytes(o)) for o in self._outputs]
        sizes[0] -= short_bytes
        self._locations, output_bytes = _layout(1, sizes)
        self._input_pool = Memory.create(input_bytes, kind=kind)
        try:
            self._output_pool = Memory.create(output_bytes, kind=kind)
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


class NoMemories(Exception):
    """The device refuses the very first memory: it has none of its own."""


class DeviceArguments:
    """The request of one test with every argument in a device memory of its own; made by ``device_arguments``.

    Attributes:
        request: The request.
    """

    def __init__(self, test: CtsTest) -> None:
        self._outputs = [test.main.operands[i] for i in test.main.output_indexes]
        self._buffers: list[Buffer] = []
        self.request = Request((), (), ())

    async def allocate(self, test: CtsTest, device: Device, prepared: PreparedModel) -> None:
        """Allocates the memories and fills those of the inputs."""
        inputs = [test.main.operands[i] for i in test.main.input_indexes]
        arguments = []
        for index, operand in enumerate(inputs):
            if not operand.data:
                arguments.append(RequestArgument(has_no_value=True))
                continue
            arguments.append(RequestArgument(location=DataLocation(len(self._buffers))))
            buffer = await self._buffer(device, prepared, operand, [BufferRole(0, index)], [])
            with _memory(operand) as source:
                source.array[:] = np.frombuffer(operand.data, np.uint8)
                await buffer.copy_from(source, operand.dimensions)
        first = len(self._buffers)
        for index, operand in enumerate(self._outputs):
            await self._buffer(device, prepared, operand, [], [BufferRole(0, index)])
        self.request = Request(
            inputs=tuple(arguments),
            outputs=tuple(
                RequestArgument(location=DataLocation(first + index)) for index in range(len(self._outputs))
            ),
            pools=tuple(BufferToken(buffer.token) for buffer in self._buffers),
        )

    async def _buffer(
        self,
        device: Device,
        prepared: PreparedModel,
        operand: CtsOperand,
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> Buffer:
        description = BufferDesc(operand.dimensions)
        try:
            buffer = await device.allocate(description, [prepared], input_roles, output_roles)
        except GeneralFailure as e:
            if self._buffers:
                raise
            raise NoMemories(str(e)) from e
        self._buffers.append(buffer)
        return buffer

    async def outputs(self) -> list[npt.NDArray[Any]]:
        """Copies of the outputs, in the shapes that the test expects."""
        arrays = []
        buffers = self._buffers[len(self._buffers) - len(self._outputs) :]
        for operand, buffer in zip(self._outputs, buffers, strict=True):
            code = OperandType[operand.type]
            with _memory(operand) as destination:
                destination.array[:] = FILL
                await buffer.copy_to(destination)
                flat = destination.array.copy().view(operand_dtype(code))
            arrays.append(flat.reshape(() if is_scalar_type(code) else operand.dimensions))
        return arrays

    async def aclose(self) -> None:
        """Frees the memories. Idempotent."""
        while self._buffers:
            await self._buffers.pop().aclose()


@contextlib.asynccontextmanager
async def device_arguments(
    test: CtsTest, device: Device, prepared: PreparedModel
) -> AsyncIterator[DeviceArguments]:
    """Puts the arguments of a test into device memories.

    Raises:
        NoMemories: The device has none.
        Error: As ``Device.allocate`` and ``Buffer.copy_from``.
    """
    arguments = DeviceArguments(test)
    async with closing(arguments):
        await arguments.allocate(test, device, prepared)
        yield arguments


@contextlib.contextmanager
def _memory(operand: CtsOperand) -> Iterator[Memory]:
    memory = Memory.create(operand_bytes(operand))
    try:
        yield memory
    finally:
        memory.close()


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
