"""The arguments of one conformance test: in guarded pools, or each in a device memory of its own.

Owns the requests of a test, and the values that the device reports and writes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.conformance.computing import Breach, closing
from aionn.conformance.cts.data import CtsOperand, CtsTest, operand_bytes
from aionn.conformance.requests import FILL, GuardedRequest
from aionn.errors import GeneralFailure
from aionn.hal import (
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

ELEMENT_COUNT_MAX = 1 << 31
"""More elements than any output that is reported may have; the product of hostile extents stays in Python's integers."""


class TestArguments(GuardedRequest):
    """The request of one test, to be computed any number of times.

    Args:
        test: Gives the inputs, and by its expectation the sizes of the outputs; an empty output has one byte.
        short_bytes: Number of bytes by which the first output's buffer is too short.
        kind: Of both memories.
    """

    __test__ = False  # Not a class of tests, whatever pytest thinks of its name.

    def __init__(self, test: CtsTest, *, short_bytes: int = 0, kind: MemoryKind = MemoryKind.ASHMEM) -> None:
        main = test.main
        self._outputs = [main.operands[i] for i in main.output_indexes]
        sizes = [max(1, operand_bytes(o)) for o in self._outputs]
        sizes[0] -= short_bytes
        super().__init__([main.operands[i].data or b"" for i in main.input_indexes], sizes, kind)

    def outputs(self, shapes: Sequence[OutputShape]) -> list[npt.NDArray[Any]]:
        """Copies of the outputs, in the shapes that were reported; none reported means the model's.

        Raises:
            Breach: The shapes do not fit the buffers, or something else was written.
        """
        if shapes and len(shapes) != len(self._outputs):
            raise Breach(f"{len(self._outputs)} output shapes", f"{len(shapes)}")
        reported = [s.dimensions for s in shapes] or [o.dimensions for o in self._outputs]
        stray = self.stray()
        if stray is not None:
            raise Breach("writes to the outputs alone", f"another value in {stray}")
        return [
            self._output(index, operand, dimensions)
            for index, (operand, dimensions) in enumerate(zip(self._outputs, reported, strict=True))
        ]

    def _output(self, index: int, operand: CtsOperand, dimensions: tuple[int, ...]) -> npt.NDArray[Any]:
        code, written = OperandType[operand.type], self.written(index)
        dtype = operand_dtype(code)
        count = 1 if is_scalar_type(code) else math.prod(dimensions)
        if not 0 <= count * dtype.itemsize <= min(len(written), ELEMENT_COUNT_MAX):
            raise Breach(
                f"output {index} within its {len(written)} bytes",
                f"sufficient, of shape {list(dimensions)}",
            )
        values = written[: count * dtype.itemsize].copy().view(dtype)
        return values.reshape(() if is_scalar_type(code) else dimensions)


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
