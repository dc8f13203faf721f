"""From a request to arrays: the places of the inputs and outputs of an execution.

Owns the binding of locations to views of pool memory, and of tokens to device memories. ``aionn.validation`` checks requests;
binding calls it first.

Invariants:
1. A view never reaches outside of the area that the request names.
2. Locations are read once, from the request itself, which is private memory; pools are shared with the client and only hold values.
3. A driver sees images as any other argument: as the tensors that they are by the rule of ``images``.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aionn.drivers.kit.extensions import check_extension_size
from aionn.drivers.kit.images import check_image, read_image, write_image
from aionn.drivers.kit.memories import DeviceMemory, MemoryTable, Role
from aionn.errors import GeneralFailure, InvalidArgument
from aionn.hal import (
    BufferToken,
    ExtensionOperandType,
    Memory,
    MemoryKind,
    Model,
    Operand,
    OperandType,
    OutputShape,
    Request,
    RequestArgument,
    check_deadline_ns,
    check_duration_ns,
    combine_dimensions,
    is_extension_operand_type,
    is_scalar_type,
    operand_dtype,
    operand_size_bytes,
)
from aionn.validation import check_field_types, validate_request

__all__ = [
    "Arguments",
    "MemoryArea",
    "OutputArea",
    "address_of",
    "bind",
    "check_times",
    "engine_memory",
    "fits_in_place",
]

Array = npt.NDArray[Any]

ALIGNMENT_BYTES = 64
"""The alignment of a value that an engine uses in place: LiteRT's own, and a line of the processor's cache."""

READ_PAST_BYTES = 128
"""Number of bytes behind an input that must be mapped for it to be used in place: XNNPACK states that it reads so far. ONNX Runtime
states no bound; vector instructions of its kernels may load a whole register."""


class OutputArea:
    """Where one output goes.

    Attributes:
        operand: The model's output operand.
        dimensions: Its shape according to model and request; 0 or empty where unknown.
        buffer: The bytes that may be written, ``[length]`` uint8.
    """

    __slots__ = ("_before", "buffer", "dimensions", "operand")

    def __init__(self, operand: Operand, dimensions: tuple[int, ...], buffer: npt.NDArray[np.uint8]) -> None:
        self.operand = operand
        self.dimensions = dimensions
        self.buffer = buffer
        self._before: tuple[npt.NDArray[np.uint8], Array, OutputShape] | None = None

    def store(self, array: Array) -> OutputShape:
        """Writes the output if it fits, and returns its actual shape."""
        if self._before is not None:
            # The frames of a stream differ in their values alone.
            buffer, into, shape = self._before
            if buffer is self.buffer and array.shape == into.shape and array.dtype == into.dtype:
                into[...] = array
                return shape
        size_bytes = array.nbytes
        if size_bytes > self.buffer.nbytes:
            return OutputShape(array.shape, is_sufficient=False)
        if size_bytes:
            # An extension's values are bytes to all code but the extension.
            is_extension = is_extension_operand_type(self.operand.type)
            dtype = array.dtype if is_extension else operand_dtype(self.operand.type)
            # frombuffer, unlike ndarray.view, takes any alignment.
            into = np.frombuffer(self.buffer, dtype=dtype, count=array.size).reshape(array.shape)
            np.copyto(into, array, casting="no")
            self._before = self.buffer, into, OutputShape(array.shape)
        return OutputShape(array.shape)


class ImageArea(OutputArea):
    """An output that goes into an image: the driver writes a tensor without gaps, whose values are the image's when it succeeds.

    Attributes:
        image: The image.
    """

    __slots__ = ("image",)

    def __init__(self, operand: Operand, dimensions: tuple[int, ...], image: Memory) -> None:
        self.image = image
        super().__init__(
            operand, dimensions, np.zeros(operand_size_bytes(operand.type, dimensions), np.uint8)
        )

    def written(self) -> None:
        """The execution succeeded: the image gets its values."""
        write_image(self.image, self.buffer)


class MemoryArea(OutputArea):
    """An output that goes into a device memory.

    Attributes:
        memory: The device memory.
    """

    __slots__ = ("memory",)

    def __init__(self, operand: Operand, dimensions: tuple[int, ...], memory: DeviceMemory) -> None:
        self.memory = memory
        known_bytes = 0 if memory.size_bytes else _known_size_bytes(operand, dimensions, memory)
        super().__init__(operand, dimensions, memory.writable(known_bytes))

    def store(self, array: Array) -> OutputShape:
        """As ``OutputArea.store``; a memory whose shape was not known makes room for the result."""
        if array.nbytes > self.buffer.nbytes and not self.memory.size_bytes:
            fresh = self.memory.writable(array.nbytes)
            self.memory.failed(self.buffer)
            self.buffer = fresh
        return super().store(array)


def _known_size_bytes(operand: Operand, dimensions: tuple[int, ...], memory: DeviceMemory) -> int:
    shape = combine_dimensions(memory.operand.dimensions, dimensions)
    assert shape is not None, "checked before"
    return operand_size_bytes(operand.type, shape)


class MemoryInput(NamedTuple):
    """An input that comes from a device memory.

    Attributes:
        memory: The device memory.
        shape: Its complete shape according to model and request.
    """

    memory: DeviceMemory
    shape: tuple[int, ...]


class ImageInput(NamedTuple):
    """An input that comes from an image.

    Attributes:
        image: The image.
        shape: Its complete shape according to model and request.
    """

    image: Memory
    shape: tuple[int, ...]


class Arguments:
    """The bound arguments of one execution.

    Attributes:
        outputs: Where the results go.
    """

    __slots__ = ("_arrays", "_inputs", "_is_over", "_is_plain", "outputs")

    def __init__(
        self,
        inputs: Sequence[Array | MemoryInput | ImageInput | None],
        outputs: Sequence[OutputArea | MemoryUse],
    ) -> None:
        self._inputs = inputs
        # Whether all are views of shared memory, which never change: the arguments of a burst.
        special = (MemoryInput, ImageInput, MemoryUse, ImageArea)
        self._is_plain = not any(isinstance(value, special) for value in (*inputs, *outputs))
        self._arrays = tuple(i for i in inputs if not isinstance(i, special)) if self._is_plain else ()
        self.outputs: Sequence[OutputArea] = ()
        self._is_over = False
        areas: list[OutputArea] = []
        try:
            for output in outputs:
                areas.append(MemoryArea(*output) if isinstance(output, MemoryUse) else output)
        except BaseException:
            self.outputs = areas
            self.fail()
            raise
        self.outputs = areas

    @property
    def is_plain(self) -> bool:
        """Whether all of them are views of shared memory, the same ones at each execution."""
        return self._is_plain

    def inputs(self) -> list[Array | None]:
        """Views of shared memory and of device memories as they are now; rank 0 for scalars, None for an input that is left out.

        Raises:
            GeneralFailure: A device memory is uninitialised.
            InvalidArgument: A device memory holds another shape than the request's.
        """
        if self._is_plain:
            return [*self._arrays]
        arrays: list[Array | None] = []
        for given in self._inputs:
            if isinstance(given, MemoryInput):
                arrays.append(given.memory.readable(given.shape))
            elif isinstance(given, ImageInput):
                arrays.append(read_image(given.image, given.shape))
            else:
                arrays.append(given)
        return arrays

    def settle(self, shapes: Sequence[OutputShape], *, is_sufficient: bool) -> None:
        """The execution ended without an error: ``succeed``, or ``fail`` where an output did not fit.

        Raises:
            GeneralFailure: A result does not fit, and an output is a device memory; or as ``succeed``. ``fail`` is
                the caller's then.
        """
        if is_sufficient:
            if self._is_plain:
                self._is_over = True
            else:
                self.succeed(shapes)
        elif any(isinstance(area, MemoryArea) for area in self.outputs):
            raise GeneralFailure(
                "execution: a result does not fit, and one of the outputs is a device memory"
            )
        else:
            self.fail()

    def succeed(self, shapes: Sequence[OutputShape]) -> None:
        """The execution wrote its outputs: images get their values, and the device memories among them are initialised. Those once:
        later calls leave them alone.

        Raises:
            GeneralFailure: A result does not fit its memory's allocation; all of them are uninitialised then.
        """
        for area in self.outputs:
            if isinstance(area, ImageArea):
                area.written()
        if self._is_over:
            return
        self._is_over = True
        areas = zip(self.outputs, shapes, strict=True)
        written = [(area, shape) for area, shape in areas if isinstance(area, MemoryArea)]
        for index, (area, shape) in enumerate(written):
            try:
                area.memory.written(area.buffer, shape.dimensions)
            except GeneralFailure:
                for before, _ in written[:index]:
                    before.memory.failed()
                for behind, _ in written[index + 1 :]:
                    behind.memory.failed(behind.buffer)
                raise

    def give_back(self) -> None:
        """There is no execution: device memories stay as they are, and what was taken for them is given back."""
        for area in self.outputs:
            if isinstance(area, MemoryArea) and not self._is_over:
                area.memory.unused(area.buffer)
        self._is_over = True

    def fail(self) -> None:
        """The execution failed: what its device memories hold means nothing. Also after ``succeed``, which it takes back."""
        for area in self.outputs:
            if isinstance(area, MemoryArea):
                area.memory.failed(None if self._is_over else area.buffer)
        self._is_over = True


class MemoryUse(NamedTuple):
    """An output before its memory is taken: what ``MemoryArea`` is made of."""

    operand: Operand
    dimensions: tuple[int, ...]
    memory: DeviceMemory


def bind(
    model: Model,
    request: Request,
    *,
    allow_unspecified_outputs: bool = True,
    memories: MemoryTable | None = None,
    prepared: int = 0,
    is_ready: bool = True,
    extension_types: Mapping[int, ExtensionOperandType] | None = None,
    takes_images: bool = False,
) -> Arguments:
    """Checks a request and maps it.

    Args:
        model: The model.
        request: Its arguments.
        allow_unspecified_outputs: See ``validate_request``.
        memories: The device's memories; None for a device without.
        prepared: Identity of the prepared model in the memories' roles.
        is_ready: Whether the execution may start now; if not, what device memories hold is looked at when it starts.
        extension_types: The extension operand types that the device knows, by the model's codes.
        takes_images: Whether the driver takes images.

    Raises:
        InvalidArgument: The request does not fit the model, an output's memory cannot be written, a token is unknown or not
            meant for this use, or an image is not the operand's tensor.
        GeneralFailure: A pool is of a kind that this driver cannot use, or a device memory is uninitialised.
    """
    try:
        for index, pool in enumerate(request.pools):
            if isinstance(pool, Memory) and pool.kind == MemoryKind.HARDWARE_BUFFER and not takes_images:
                raise GeneralFailure(f"request, pool {index}: this driver takes no images")
            if isinstance(pool, BufferToken) and memories is None:
                raise GeneralFailure(f"request, pool {index}: this driver has no device memories")
        shapes = validate_request(model, request, allow_unspecified_outputs=allow_unspecified_outputs)
    except (AttributeError, TypeError, ValueError):
        # The types are checked after a failure alone, since every execution comes here.
        check_field_types(request, Request, "request")
        raise
    main = model.main
    found = _memories_of(request, memories)
    types = extension_types or {}
    inputs: list[Array | MemoryInput | ImageInput | None] = []
    for index, (argument, operand, shape) in enumerate(zip(request.inputs, main.inputs, shapes, strict=True)):
        memory = None if argument.has_no_value else found.get(argument.location.pool_index)
        if argument.has_no_value:
            inputs.append(None)
        elif (image := _image_of(request, argument)) is not None:
            check_image(image, operand, shape or (), f"request, input {index}")
            inputs.append(ImageInput(image, shape or ()))
        elif memory is None:
            length = argument.location.length
            check_extension_size(types, operand, shape or (), length, f"request, input {index}")
            inputs.append(_input(request, argument, operand, shape or ()))
        else:
            _check_role(memory, Role(prepared, False, index), f"request, input {index}")
            if is_ready:
                memory.readable(shape or ())
            inputs.append(MemoryInput(memory, shape or ()))
    outputs: list[OutputArea | MemoryUse] = []
    for index, (argument, operand) in enumerate(zip(request.outputs, main.outputs, strict=True)):
        dimensions = combine_dimensions(operand.dimensions, argument.dimensions) or ()
        memory = None if argument.has_no_value else found.get(argument.location.pool_index)
        if (image := _image_of(request, argument)) is not None:
            check_image(image, operand, dimensions, f"request, output {index}")
            _check_writable(image.array, index)
            outputs.append(ImageArea(operand, dimensions, image))
        elif memory is None:
            length = argument.location.length
            check_extension_size(types, operand, dimensions, length, f"request, output {index}")
            area = OutputArea(operand, dimensions, _area(request, argument))
            _check_writable(area.buffer, index)
            outputs.append(area)
        else:
            _check_role(memory, Role(prepared, True, index), f"request, output {index}")
            memory.check_output(dimensions)
            outputs.append(MemoryUse(operand, dimensions, memory))
    return Arguments(inputs, outputs)


def _image_of(request: Request, argument: RequestArgument) -> Memory | None:
    if argument.has_no_value:
        return None
    pool = request.pools[argument.location.pool_index]
    return pool if isinstance(pool, Memory) and pool.kind == MemoryKind.HARDWARE_BUFFER else None


def _check_writable(array: npt.NDArray[np.uint8], index: int) -> None:
    if not array.flags.writeable:
        raise InvalidArgument(f"request, output {index}: expected memory that can be written")


def _memories_of(request: Request, memories: MemoryTable | None) -> dict[int, DeviceMemory]:
    tokens = {index: p.token for index, p in enumerate(request.pools) if isinstance(p, BufferToken)}
    if not tokens:
        return {}
    assert memories is not None, "refused before"
    return {index: memories.memory(token) for index, token in tokens.items()}


def _check_role(memory: DeviceMemory, role: Role, where: str) -> None:
    if role not in memory.roles:
        raise InvalidArgument(f"{where}: {memory} was not allocated for this use")


def _area(request: Request, argument: RequestArgument) -> npt.NDArray[np.uint8]:
    if argument.has_no_value:
        return np.empty(0, dtype=np.uint8)
    pool = request.pools[argument.location.pool_index]
    assert not isinstance(pool, BufferToken), "resolved before"
    location = argument.location
    return pool.array[location.offset : location.offset + location.length]


def _input(request: Request, argument: RequestArgument, operand: Operand, shape: tuple[int, ...]) -> Array:
    area = _area(request, argument)
    if is_extension_operand_type(operand.type) or operand.type == OperandType.OEM:
        # Only the extension or vendor can interpret the bytes of its values.
        view = area.view()
        view.flags.writeable = False
        return view
    array = np.frombuffer(area, dtype=operand_dtype(operand.type))
    array = array.reshape(() if is_scalar_type(operand.type) else shape)
    array.flags.writeable = False
    return array


def check_times(deadline_ns: int | None, loop_timeout_ns: int | None) -> None:
    """Refuses a deadline or a loop time-out that is negative or does not fit 64 bits.

    Raises:
        InvalidArgument: One of them is illegal.
    """
    check_deadline_ns(deadline_ns, where="execution")
    check_duration_ns(loop_timeout_ns, where="execution, loop time-out")


def engine_memory(dtype: npt.DTypeLike, shape: Sequence[int]) -> Array:
    """Zeros that an engine can use in place."""
    kind = np.dtype(dtype)
    size_bytes = kind.itemsize * int(np.prod(shape))
    raw = np.zeros(size_bytes + READ_PAST_BYTES + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -address_of(raw) % ALIGNMENT_BYTES
    return raw[start : start + size_bytes].view(kind).reshape(shape)


def address_of(array: Array) -> int:
    """The address of an array's first value."""
    address: int = array.__array_interface__["data"][0]
    return address


def fits_in_place(array: Array, dtype: npt.DTypeLike, shape: Sequence[int], *, is_input: bool) -> bool:
    """Whether an engine can use an array in place of memory of its own.

    Args:
        array: The client's; of an output its bytes, perhaps more than it needs.
        dtype: The value's, in the engine.
        shape: The value's, in the engine.
        is_input: Whether the engine reads it.
    """
    kind = np.dtype(dtype)
    if not array.flags.c_contiguous or address_of(array) % ALIGNMENT_BYTES:
        return False
    if not is_input:
        return array.nbytes >= kind.itemsize * int(np.prod(shape))
    if array.dtype != kind or array.shape != shape:
        return False
    return _mapped_behind_bytes(array) >= READ_PAST_BYTES


def _mapped_behind_bytes(array: Array) -> int:
    """Number of bytes behind an array that are certainly mapped: those of its pool, and the rest of the page where that ends."""
    whole = array
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        if isinstance(base, np.ndarray):
            whole = base
        base = base.base if isinstance(base, np.ndarray) else base.obj
    end = -(-(address_of(whole) + whole.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    return end - (address_of(array) + array.nbytes)
