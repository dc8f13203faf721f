"""Memory of the application's own that executions read and write in place: shared memory, and memories of devices.

Owns what an application holds, which uses a device memory is for, and copies between memories. How a request names them is in
``arguments``.

Invariants:
1. Values that an execution reads from or writes to such a memory are not copied by the runtime.
2. A device memory is used in the roles that it was made for, and never sent to another device.
3. A device memory holds a value after a successful write, and none after a failed one.

Source: memory objects of the NN HAL's runtime (``ANeuralNetworksMemory``, ``MemoryDesc``); ``allocate`` and ``IBuffer`` of the HAL.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument, class_text
from aionn.hal import (
    Buffer,
    BufferToken,
    DataLocation,
    Memory,
    MemoryKind,
    combine_dimensions,
    operand_size_bytes,
    whole_number,
)
from aionn.platform.process_bound import InThisProcess
from aionn.runtime.memory.arguments import Binding, TensorSpec
from aionn.runtime.memory.images import ImageMemory, check_array, check_like, fitted
from aionn.runtime.memory.mapped import MappedMemory, given_memory

if TYPE_CHECKING:  # The plan imports this package first, for its request memory.
    from aionn.runtime.placement.plan import Plan

__all__ = [
    "DeviceMemory",
    "OwnMemory",
    "SharedMemory",
    "bind",
    "copy",
    "extents_of",
    "image_view",
]

Array = npt.NDArray[Any]


class SharedMemory(MappedMemory):
    """An array in memory that driver processes map as well. Close it, or use it with ``with``.

    Attributes:
        memory: The memory itself.
        array: The values; the next execution reads the values written here.
    """

    def __init__(self, memory: Memory, dtype: npt.DTypeLike, shape: Sequence[int], offset: int = 0) -> None:
        kind = _element_type(dtype)
        shape = _extents(shape)
        offset = whole_number(offset, "offset")
        size_bytes = kind.itemsize * math.prod(shape)
        if offset < 0 or size_bytes <= 0 or offset + size_bytes > memory.size_bytes:
            raise InvalidArgument(
                f"memory: expected {size_bytes} bytes at {offset} to fit into {memory.size_bytes} bytes"
            )
        values = memory.array[offset : offset + size_bytes].view(kind).reshape(shape)
        super().__init__(memory, values)
        self._location = DataLocation(0, offset, size_bytes)

    @classmethod
    def create(cls, shape: Sequence[int], dtype: npt.DTypeLike) -> Self:
        """Makes zeroed memory.

        Args:
            shape: Extents of at least 1; empty for one value.
            dtype: Of the values.

        Raises:
            InvalidArgument: An extent is below 1 or no integer, or ``dtype`` is not a type, or one of references.
            ResourceExhausted: It does not fit into what the machine, or the process's control group, has left; persistent if it
                never could. Nothing is allocated then.
        """
        shape = _extents(shape)
        kind = _element_type(dtype)
        return cls(Memory.create(math.prod(shape) * kind.itemsize), kind, shape)

    @classmethod
    def from_array(cls, array: Array) -> Self:
        """Makes memory with a copy of an array.

        Raises:
            InvalidArgument: It is not an array, has no elements, or has elements that are references.
            ResourceExhausted: As for ``create``.
        """
        check_array(array, "array")
        made = cls.create(array.shape, array.dtype)
        made.array[...] = array
        return made

    @classmethod
    def from_fd(
        cls,
        fd: int,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        *,
        offset: int = 0,
        is_file: bool = False,
        writable: bool = True,
    ) -> Self:
        """Maps memory of another process; the descriptor is duplicated.

        Args:
            fd: A sealed memfd, or a file with ``is_file``.
            shape: Of the values.
            dtype: Of the values.
            offset: Where they begin, in bytes.
            is_file: Whether it is an ordinary file. It must not be shortened while it is used.
            writable: False maps it read-only; executions cannot write to it then.

        Raises:
            InvalidArgument: The descriptor cannot be used so, or the values do not fit into it.
        """
        kind = MemoryKind.MMAP_FD if is_file else MemoryKind.ASHMEM
        memory = given_memory(fd, kind, writable=writable)
        try:
            return cls(memory, dtype, shape, offset)
        except BaseException:
            memory.close()
            raise

    async def write(self, values: Array) -> None:
        """Copies values in.

        Raises:
            InvalidArgument: Another shape or type.
        """
        check_like(values, self.array.shape, self.array.dtype, "memory")
        self.array[...] = values

    def binding(self, spec: TensorSpec, *, is_output: bool, where: str) -> Binding:
        """Its argument in a request, as an input or output of this description."""
        if self.memory.is_closed:
            raise InvalidArgument(f"{where}: the memory is closed")
        if is_output and not self.array.flags.writeable:
            raise InvalidArgument(f"{where}: the memory is read-only")
        check_like(self.array, spec.dimensions, spec.dtype, where)
        return Binding(self.memory, self._location, self.array.shape, self.array)


class DeviceMemory(InThisProcess):
    """Memory that a device manages. Close it with ``aclose``.

    Attributes:
        device: The device's name.
        spec: Type and shape of what it holds.
    """

    def __init__(
        self, device: str, buffer: Buffer, spec: TensorSpec, roles: frozenset[tuple[object, bool, int]]
    ) -> None:
        self.device = device
        self.spec = spec
        self._buffer = buffer
        self._roles = roles
        self._closed = False

    def __repr__(self) -> str:
        return f"<DeviceMemory {self.spec} on {self.device}, {'closed' if self._closed else 'open'}>"

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise InvalidArgument(f"{where}: the device memory is closed")

    async def write(self, values: Array) -> None:
        """Copies values in.

        Raises:
            InvalidArgument: Another shape or type.
        """
        self._check_open("write")
        check_like(values, self.spec.dimensions, self.spec.dtype, "write")
        staging = Memory.create(max(values.nbytes, 1))
        try:
            staging.array[: values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            await self._buffer.copy_from(staging, values.shape)
        finally:
            staging.close()

    async def read(self) -> Array:
        """A copy of the values.

        Raises:
            GeneralFailure: It holds none.
            InvalidArgument: Its shape is not known.
        """
        self._check_open("read")
        size_bytes = operand_size_bytes(self.spec.type, self.spec.dimensions)
        if not size_bytes:
            raise InvalidArgument(f"read: expected a memory of known shape, got {self.spec}")
        staging = Memory.create(size_bytes)
        try:
            await self._buffer.copy_to(staging)
            return staging.array.view(self.spec.dtype).reshape(self.spec.dimensions).copy()
        finally:
            staging.close()

    def binding(
        self, spec: TensorSpec, *, is_output: bool, where: str, role: tuple[object, bool, int]
    ) -> Binding:
        """Its argument in a request, in a role."""
        self._check_open(where)
        if role not in self._roles:
            raise InvalidArgument(f"{where}: the device memory was not made for this use")
        shape = combine_dimensions(spec.dimensions, self.spec.dimensions)
        assert shape is not None, "the driver combined them before"
        return Binding(BufferToken(self._buffer.token), DataLocation(), shape, None, self._buffer)

    async def aclose(self) -> None:
        """Frees it at the device. Idempotent."""
        self._closed = True
        await self._buffer.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


OwnMemory = SharedMemory | DeviceMemory | ImageMemory
"""A memory that an application may pass instead of an array."""


def _element_type(dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        kind = np.dtype(dtype)
    except Exception as e:  # Numpy chooses the class: a text may be a wrong type in several ways.
        raise InvalidArgument(f"dtype: expected an element type of numpy's, got {dtype!r}: {e}") from e
    if kind.hasobject:
        raise InvalidArgument(
            f"dtype: expected values that other processes can read, got references ({kind})"
        )
    return kind


def extents_of(shape: Sequence[int], where: str) -> tuple[int, ...]:
    """The extents of a shape that an application passes, in Python's numbers.

    Raises:
        InvalidArgument: It is not a sequence of whole numbers.
    """
    try:
        return tuple(operator.index(extent) for extent in shape)
    except TypeError:
        raise InvalidArgument(f"{where}: expected a sequence of integers, got {shape!r}") from None


def _extents(shape: Sequence[int]) -> tuple[int, ...]:
    extents = extents_of(shape, "shape")
    for extent in extents:
        if extent < 1:
            raise InvalidArgument(f"shape: expected extents of at least 1, got {extent}")
    return extents


def image_view(plan: Plan, index: int, value: Any, where: str) -> Array | None:
    """The pixels of an image that cannot be bound, since one of the devices that read the input takes none; else None.

    Raises:
        InvalidArgument: It does not fit.
    """
    if not isinstance(value, ImageMemory) or _takes_images(plan, index, is_output=False):
        return None
    if value.memory.is_closed:
        raise InvalidArgument(f"{where}: the image is closed")
    return value.view(plan.inputs[index], where)


def _takes_images(plan: Plan, index: int, *, is_output: bool) -> bool:
    main = plan.model.main
    key = (main.output_indexes if is_output else main.input_indexes)[index]
    return all(step.device.info.takes_images for step, _, _ in plan.uses(key))


def bind(plan: Plan, identity: object, is_output: bool, index: int, memory: Any, where: str) -> Binding:
    """The binding of an application's memory to an input or output of the compilation of a plan.

    Args:
        plan: The plan that the compilation executes.
        identity: The compilation's, which a device memory knows its uses by.
        is_output: Whether ``index`` is that of an output.
        index: Of the input or output.
        memory: The application's.
        where: Begins every message.

    Raises:
        InvalidArgument: It does not fit.
    """
    spec = (plan.outputs if is_output else plan.inputs)[index]
    if isinstance(memory, ImageMemory) and not _takes_images(plan, index, is_output=is_output):
        raise InvalidArgument(
            f"{where}: a device that uses it takes no images; pass an array or SharedMemory"
        )
    if isinstance(memory, SharedMemory | ImageMemory):
        return memory.binding(spec, is_output=is_output, where=where)
    if isinstance(memory, DeviceMemory):
        role = (identity, is_output, index)
        return memory.binding(spec, is_output=is_output, where=where, role=role)
    raise InvalidArgument(
        f"{where}: expected a SharedMemory, DeviceMemory or ImageMemory, got {class_text(memory)}"
    )


async def copy(source: OwnMemory, destination: OwnMemory) -> None:
    """Copies from memory to memory; to itself is nothing. Between an image and another memory, extents of 1 do not count.

    Raises:
        InvalidArgument: Type or shape differ, or one is not a memory.
        GeneralFailure: The source holds no value.
    """
    for what, memory in (("source", source), ("destination", destination)):
        if not isinstance(memory, OwnMemory):
            raise InvalidArgument(
                f"copy, {what}: expected a SharedMemory, DeviceMemory or ImageMemory, got {class_text(memory)}"
            )
    if source is destination:
        return
    values = await source.read()
    if isinstance(source, ImageMemory):
        shape = (
            destination.spec.dimensions if isinstance(destination, DeviceMemory) else destination.array.shape
        )
        values = fitted(values, shape)
    await destination.write(values)
