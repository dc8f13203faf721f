"""Images of the application's own that executions read and write in place.

Owns the ways to make one, and how its pixels are the value of an input or output. ``aionn.hal.memory`` defines the layout of
pixels, ``aionn.drivers.kit.images`` their use by drivers.

Invariants:
1. Bytes between rows, and the X byte of a pixel that has one, are neither read nor written.
2. Making an image of an array or a frame copies its pixels once; using it copies nothing here.

Source: ``ANeuralNetworksMemory_createFromAHardwareBuffer`` of the NN HAL's runtime, for formats other than BLOB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument, class_text
from aionn.hal import (
    DataLocation,
    HardwareBufferDesc,
    HardwareBufferFormat,
    Memory,
    MemoryKind,
    OperandType,
    combine_dimensions,
    dimensions_are_known,
    whole_number,
)
from aionn.runtime.memory.arguments import Binding, TensorSpec, check_unmasked
from aionn.runtime.memory.mapped import MappedMemory, given_memory

__all__ = ["ImageMemory", "check_array", "check_like", "fitted"]

Array = npt.NDArray[Any]

_FRAME_FORMATS = {
    "gray": HardwareBufferFormat.R8_UNORM,
    "gray8": HardwareBufferFormat.R8_UNORM,
    "rgb24": HardwareBufferFormat.R8G8B8_UNORM,
    "rgba": HardwareBufferFormat.R8G8B8A8_UNORM,
    "rgb0": HardwareBufferFormat.R8G8B8X8_UNORM,
}
"""FFmpeg's names of what a hardware buffer can hold."""

_ARRAY_FORMATS = {
    1: HardwareBufferFormat.R8_UNORM,
    3: HardwareBufferFormat.R8G8B8_UNORM,
    4: HardwareBufferFormat.R8G8B8A8_UNORM,
}


class ImageMemory(MappedMemory):
    """Pixels in memory that driver processes map as well: rows that may have gaps between them. Close it, or use it with ``with``.

    An input or output of type TENSOR_QUANT8_ASYMM and shape ``[layers, height, width, channels]`` can be one; extents of 1 may be
    left out or put in. A device that takes no images (``DeviceInfo.takes_images``) is given a copy as its input, and cannot
    write into one.

    Args:
        memory: Of kind ``hardware_buffer``; closed with this object.

    Attributes:
        memory: The memory itself.
        description: The layout of its pixels.
        array: The values, ``[layers, height, width, channels]`` uint8; the next execution reads the values written here.
    """

    def __init__(self, memory: Memory) -> None:
        if memory.image is None:
            raise InvalidArgument(f"image: expected memory of kind hardware_buffer, got {memory.kind}")
        super().__init__(memory, memory.pixels)
        self.description = memory.image

    @classmethod
    def create(
        cls,
        width: int,
        height: int,
        *,
        format: HardwareBufferFormat = HardwareBufferFormat.R8G8B8_UNORM,
        layers: int = 1,
        stride: int = 0,
    ) -> Self:
        """Makes a black image.

        Args:
            width: Pixels of a row.
            height: Rows.
            format: The format of a pixel; not ``BLOB``, which is ``SharedMemory``.
            layers: Images behind each other.
            stride: Pixels from row to row; 0 for ``width``.

        Raises:
            InvalidArgument: No image can be so.
            ResourceExhausted: No memory is left.
        """
        description = HardwareBufferDesc(
            whole_number(width, "image, width"),
            whole_number(height, "image, height"),
            whole_number(layers, "image, layers"),
            _format_of(format),
            whole_number(stride, "image, stride"),
        )
        return cls(Memory.create_hardware_buffer(description))

    @classmethod
    def from_array(cls, array: Array, *, format: HardwareBufferFormat | None = None, stride: int = 0) -> Self:
        """Makes an image with a copy of an array.

        Args:
            array: uint8 ``[height, width]``, ``[height, width, channels]`` or ``[layers, height, width, channels]``.
            format: The format of a pixel; None takes the one of that many channels without an X byte.
            stride: Pixels from row to row; 0 for the width.

        Raises:
            InvalidArgument: No image is so.
            ResourceExhausted: No memory is left.
        """
        check_array(array, "image")
        values = array[..., None] if array.ndim == 2 else array
        values = values[None] if values.ndim == 3 else values
        if values.ndim != 4 or values.dtype != np.uint8 or values.shape[3] not in _ARRAY_FORMATS:
            raise InvalidArgument(
                f"image: expected uint8 pixels of 1, 3 or 4 channels, got {array.dtype} {list(array.shape)}"
            )
        layers, height, width, channel_count = values.shape
        kind = _ARRAY_FORMATS[channel_count] if format is None else _format_of(format)
        made = cls.create(width, height, format=kind, layers=layers, stride=stride)
        try:
            check_like(values, made.array.shape, made.array.dtype, "image")
        except InvalidArgument:
            made.close()
            raise
        made.array[...] = values
        return made

    @classmethod
    def from_frame(cls, frame: Any, *, stride: int = 0) -> Self:
        """Makes an image with a copy of a decoded video frame: one copy, row by row, without a conversion.

        Args:
            frame: An ``av.VideoFrame``, or what has its ``width``, ``height``, ``format.name`` and ``planes``, of format ``gray``,
                ``rgb24``, ``rgba`` or ``rgb0``.
            stride: Pixels from row to row; 0 for the width.

        Raises:
            InvalidArgument: Another format; ``frame.reformat(format="rgb24")`` makes it one of these.
            ResourceExhausted: No memory is left.
        """
        kind = _FRAME_FORMATS.get(frame.format.name)
        if kind is None:
            raise InvalidArgument(
                f"image: expected a frame of format {', '.join(_FRAME_FORMATS)}, got {frame.format.name}"
            )
        made = cls.create(frame.width, frame.height, format=kind, stride=stride)
        (plane,) = frame.planes
        pixel_bytes, channel_count = made.description.pixel_bytes, made.description.channel_count
        rows = np.frombuffer(plane, np.uint8)[: frame.height * plane.line_size].reshape(frame.height, -1)
        pixels = rows[:, : frame.width * pixel_bytes].reshape(frame.height, frame.width, pixel_bytes)
        made.array[0] = pixels[..., :channel_count]
        return made

    @classmethod
    def from_fd(cls, fd: int, description: HardwareBufferDesc, *, writable: bool = True) -> Self:
        """Maps an image of another process; the descriptor, a sealed memfd, is duplicated.

        Raises:
            InvalidArgument: The descriptor cannot be used so, or the image does not fit into it.
        """
        return cls(given_memory(fd, MemoryKind.HARDWARE_BUFFER, writable=writable, image=description))

    async def write(self, values: Array) -> None:
        """Copies values in.

        Raises:
            InvalidArgument: Another type, or a shape that differs in more than extents of 1.
        """
        shape = self.array.shape
        check_like(fitted(values, shape), shape, self.array.dtype, "image")
        self.array[...] = values.reshape(shape)

    def binding(self, spec: TensorSpec, *, is_output: bool, where: str) -> Binding:
        """Its argument in a request, as an input or output of this description."""
        if self.memory.is_closed:
            raise InvalidArgument(f"{where}: the image is closed")
        if is_output and not self.array.flags.writeable:
            raise InvalidArgument(f"{where}: the image is read-only")
        view = self.view(spec, where)
        return Binding(self.memory, DataLocation(), view.shape, view)

    def view(self, spec: TensorSpec, where: str) -> Array:
        """The pixels in the shape that an input or output of this description has.

        Raises:
            InvalidArgument: It has another type or shape.
        """
        if spec.type != OperandType.TENSOR_QUANT8_ASYMM:
            raise InvalidArgument(f"{where}: expected TENSOR_QUANT8_ASYMM for an image, got {spec}")
        shape = spec.dimensions if dimensions_are_known(spec.type, spec.dimensions) else self.array.shape
        view = fitted(self.array, shape)
        check_like(view, spec.dimensions, spec.dtype, where)
        return view


def fitted(values: Array, shape: Sequence[int]) -> Array:
    """The same values with extents of 1 put in and left out; as they were where that gives another shape."""
    same = [e for e in values.shape if e != 1] == [e for e in shape if e != 1]
    return values.reshape(tuple(shape)) if same else values


def _format_of(value: HardwareBufferFormat) -> HardwareBufferFormat:
    try:
        return HardwareBufferFormat(value)
    except ValueError:
        names = ", ".join(f.name for f in HardwareBufferFormat)
        raise InvalidArgument(f"image, format: expected one of {names}, got {value!r}") from None


def check_array(values: object, where: str) -> None:
    """Refuses what is neither an array nor a number of numpy's, and an array with masked elements.

    Raises:
        InvalidArgument: It is something else, or has masked elements.
    """
    if not isinstance(values, np.ndarray | np.generic):
        raise InvalidArgument(f"{where}: expected an array, got {class_text(values)} (see numpy.asarray)")
    check_unmasked(values, where)


def check_like(values: Array, shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> None:
    """Refuses values of another type or shape; extents of ``shape`` that are 0, and all of an empty one, are open.

    Raises:
        InvalidArgument: They are.
    """
    check_array(values, where)
    if values.dtype != dtype or (
        shape and (values.ndim != len(shape) or combine_dimensions(shape, values.shape) is None)
    ):
        raise InvalidArgument(
            f"{where}: expected {dtype} of shape {list(shape)}, got {values.dtype} {list(values.shape)}"
        )
