"""The places of windows over an image: padding, stride and dilation, shared by convolution and pooling.

Owns the checks of their arguments (``aionn.hal.windows`` has the places of these), the resulting extents, and the padding,
channels-last layout and blocks of images. Computes no operation.

Invariants:
1. Images inside of a kernel are [batch, height, width, depth], whatever the layout of the operand.
2. A block's working memory is bounded by ``BLOCK_ELEMENTS``, or by one row of the output where that is more.

Source: ``calculateExplicitPadding`` and ``computeOutSize`` of the NN HAL's CPU operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument, ResourceExhausted
from aionn.hal import FusedActivation, OperandType, Padding
from aionn.hal.windows import WindowArguments, same_padding
from aionn.ops.signature import Array, Call, Check, Shape

__all__ = [
    "BLOCK_ELEMENTS",
    "Axis",
    "blocks",
    "check_activation",
    "check_window",
    "check_working_bytes",
    "image_shape",
    "laid_out",
    "pad_image",
    "transposed_axes",
    "window_axes",
]

BLOCK_ELEMENTS = 1 << 16
"""Elements of a block's largest temporary: with 8 bytes each they fit into a second-level cache."""

WORKING_BYTES_MAX = 1 << 28
"""Bytes that a kernel may always use for a padded image, however small the image is: huge dilations and strides need more."""

WORKING_RATIO_MAX = 8
"""Multiple of the bytes of its image or output that a kernel may use beyond ``WORKING_BYTES_MAX``."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A window's way along one axis of an image.

    Attributes:
        extent: Of the image.
        window: Taps of the window.
        stride: From one output to the next.
        dilation: From one tap to the next.
        before: Padding in front of the first pixel.
        after: Padding behind the last.
        count: Outputs.
    """

    extent: int
    window: int
    stride: int
    dilation: int
    before: int
    after: int
    count: int

    @property
    def padded(self) -> int:
        """The extent with padding."""
        return self.before + self.extent + self.after

    @property
    def is_plain(self) -> bool:
        """Whether output and image correspond pixel for pixel."""
        return (self.window, self.stride, self.before, self.after) == (1, 1, 0, 0)

    def valid_taps(self) -> npt.NDArray[np.int64]:
        """Number of taps of each output inside the image, padding not counted. Meant for a dilation of 1."""
        starts = np.arange(self.count) * self.stride - self.before
        return np.minimum(starts + self.window, self.extent) - np.maximum(starts, 0)


_ACTIVATIONS = frozenset(map(int, FusedActivation))


def check_activation(check: Check, index: int) -> None:
    """Demands a fused activation's enumerator where the model fixes the value."""
    value = check.constant(index)
    if value is not None and value.item() not in _ACTIVATIONS:
        check.refuse(f"input {index}", "a fused activation from 0 to 3", value.item())


def check_window(check: Check, arguments: WindowArguments, *, may_crop: bool = False) -> None:
    """Checks types of window arguments and the values that the model fixes. A layout flag or dilations need level 3.

    Args:
        check: The operation.
        arguments: Their places.
        may_crop: Whether explicit padding on the right and at the bottom may be negative.
    """
    for index in arguments.indexes:
        is_flag = index == arguments.is_nchw
        check.input_type(index, (OperandType.BOOL if is_flag else OperandType.INT32,))
    if arguments.is_nchw is not None or arguments.dilation is not None:
        check.needs(3)
    if len(arguments.padding) == 1:
        _check_value(
            check, arguments.padding[0], 1, "an implicit padding of 1 (SAME) or 2 (VALID)", Padding.VALID
        )
    else:
        for index in arguments.padding[::2] if may_crop else arguments.padding:
            _check_value(check, index, 0, "padding of at least 0")
    for index in arguments.stride:
        _check_value(check, index, 1, "a stride of at least 1")
    for index in arguments.dilation or ():
        _check_value(check, index, 1, "a dilation of at least 1")
    check_activation(check, arguments.activation)


def _check_value(check: Check, index: int, least: int, expected: str, most: int | None = None) -> None:
    array = check.constant(index)
    if array is not None:
        value = array.item()
        if value < least or (most is not None and value > most):
            check.refuse(f"input {index}", expected, value)


def image_shape(array: Array, is_nchw: bool) -> tuple[int, int, int, int]:
    """Batch, height, width and depth of an image operand.

    Raises:
        InvalidArgument: It is not an image, or an extent other than the batch is 0.
    """
    if array.ndim != 4:
        raise InvalidArgument(f"input 0: expected rank 4, got shape {list(array.shape)}")
    batch, height, width, depth = array.shape
    if is_nchw:
        depth, height, width = array.shape[1:]
    if 0 in (height, width, depth):
        raise InvalidArgument(f"input 0: expected only the batch to be 0, got shape {list(array.shape)}")
    return batch, height, width, depth


def window_axes(
    call: Call, arguments: WindowArguments, height: int, width: int, window_height: int, window_width: int
) -> tuple[Axis, Axis]:
    """The window's way down and across an image.

    Raises:
        InvalidArgument: An argument is illegal, or the window does not fit.
    """
    stride_width, stride_height = (_at_least(call, i, 1, "stride") for i in arguments.stride)
    dilation_width = dilation_height = 1
    if arguments.dilation is not None:
        dilation_width, dilation_height = (_at_least(call, i, 1, "dilation") for i in arguments.dilation)
    if len(arguments.padding) == 1:
        scheme = call.scalar(arguments.padding[0])
        if scheme not in (Padding.SAME, Padding.VALID):
            call.refuse(f"input {arguments.padding[0]}: expected an implicit padding of 1 or 2, got {scheme}")
        left = right = top = bottom = 0
        if scheme == Padding.SAME:
            left, right = same_padding(width, window_width, stride_width, dilation_width)
            top, bottom = same_padding(height, window_height, stride_height, dilation_height)
    else:
        left, right, top, bottom = (_at_least(call, i, 0, "padding") for i in arguments.padding)
    return (
        _axis("height", height, window_height, stride_height, dilation_height, top, bottom),
        _axis("width", width, window_width, stride_width, dilation_width, left, right),
    )


def transposed_axes(
    call: Call,
    arguments: WindowArguments,
    image: tuple[int, int],
    output: tuple[int, int],
    window: tuple[int, int],
) -> tuple[Axis, Axis]:
    """The way down and across of a window that spreads each pixel over the output: ``count`` is the output's extent.

    Args:
        call: The operation.
        arguments: The places of its window arguments.
        image: Height and width of the input.
        output: Height and width that implicit SAME padding must lead to.
        window: Height and width of the filter.

    Raises:
        InvalidArgument: An argument is illegal, or nothing is left of the output.
    """
    stride_width, stride_height = (_at_least(call, i, 1, "stride") for i in arguments.stride)
    left = right = top = bottom = 0
    if len(arguments.padding) == 4:
        left, top = (_at_least(call, i, 0, "padding") for i in arguments.padding[::2])
        right, bottom = (call.scalar(i) for i in arguments.padding[1::2])
    else:
        scheme = call.scalar(arguments.padding[0])
        if scheme not in (Padding.SAME, Padding.VALID):
            call.refuse(f"input {arguments.padding[0]}: expected an implicit padding of 1 or 2, got {scheme}")
        if scheme == Padding.SAME:
            top, bottom = _spread_padding(output[0], window[0], stride_height)
            left, right = _spread_padding(output[1], window[1], stride_width)
    axes = []
    for name, extent, size, stride, before, after in (
        ("height", image[0], window[0], stride_height, top, bottom),
        ("width", image[1], window[1], stride_width, left, right),
    ):
        count = (extent - 1) * stride + size - before - after
        if size < 1 or count < 1:
            raise InvalidArgument(
                f"output: expected a {name} of at least 1, got {count} with a window of {size}"
            )
        axes.append(Axis(extent, size, stride, 1, before, after, count))
    return axes[0], axes[1]


def _spread_padding(output: int, window: int, stride: int) -> tuple[int, int]:
    needed = (-(-output // stride) - 1) * stride + window - output
    before = max(needed, 0) // 2
    # Less than nothing is cut off behind where the last stride does not reach the end.
    return before, needed - before


def _at_least(call: Call, index: int, least: int, what: str) -> int:
    value: int = call.scalar(index)
    if value < least:
        call.refuse(f"input {index}: expected a {what} of at least {least}, got {value}")
    return value


def _axis(name: str, extent: int, window: int, stride: int, dilation: int, before: int, after: int) -> Axis:
    span = (window - 1) * dilation + 1
    if window < 1:
        raise InvalidArgument(f"window: expected a {name} of at least 1, got {window}")
    if max(before, after) >= span:
        raise InvalidArgument(
            f"padding: expected less than the window's {name} of {span}, got {before}, {after}"
        )
    count = (before + extent + after - span) // stride + 1
    if count < 1:
        raise InvalidArgument(
            f"window: expected a {name} of at most {before + extent + after}, got {span} with dilation"
        )
    return Axis(extent, window, stride, dilation, before, after, count)


def laid_out(shape: Shape, is_nchw: bool) -> Shape:
    """A shape [batch, height, width, depth] in the operand's layout."""
    batch, height, width, depth = shape
    return (batch, depth, height, width) if is_nchw else shape


def pad_image(
    image: Array,
    down: Axis,
    across: Axis,
    fill: float,
    dtype: npt.DTypeLike,
    *,
    phase: int = 0,
    phases: int = 1,
) -> Array:
    """An image in another element type with padding around it.

    Args:
        image: [batch, height, width, depth].
        down: Padding above and below.
        across: Padding left and right.
        fill: The value of padding.
        dtype: The result's element type.
        phase: First padded column that is taken.
        phases: Distance of the columns that are taken. A stride becomes contiguous that way.

    Returns:
        [batch, padded height, columns, depth], contiguous; the image itself where nothing is to be done.

    Raises:
        ResourceExhausted: The padding is out of proportion.
    """
    batch, height, _, depth = image.shape
    check_working_bytes("padded image", (batch, down.padded, across.padded, depth), dtype, image.size)
    if (
        phases == 1
        and image.dtype == dtype
        and image.flags.c_contiguous
        and not (down.before or down.after or across.before or across.after)
    ):
        return image
    columns = -(-(across.padded - phase) // phases)
    first = max(-((phase - across.before) // phases), 0)
    source = image[:, :, phase + first * phases - across.before :: phases]
    padded = np.empty((batch, down.padded, columns, depth), dtype=dtype)
    bottom, right = down.before + height, first + source.shape[2]
    padded[:, : down.before] = fill
    padded[:, bottom:] = fill
    padded[:, down.before : bottom, :first] = fill
    padded[:, down.before : bottom, right:] = fill
    padded[:, down.before : bottom, first:right] = source
    return padded


def check_working_bytes(what: str, shape: Shape, dtype: npt.DTypeLike, served: int) -> None:
    """Refuses temporaries out of proportion to the ``served`` elements of the image or output that they are for.

    Raises:
        ResourceExhausted: They are too large; persistent.
    """
    element_bytes = np.dtype(dtype).itemsize
    limit = max(WORKING_BYTES_MAX, WORKING_RATIO_MAX * served * element_bytes)
    if math.prod(shape) * element_bytes > limit:
        raise ResourceExhausted(
            f"{what}: expected at most {limit} bytes, got shape {list(shape)}", transient=False
        )


def blocks(batch: int, rows: int, row_elements: int) -> Iterator[tuple[slice, slice]]:
    """Cuts [batch, rows] into pieces of about ``BLOCK_ELEMENTS``: whole images together, or rows of one image."""
    images = BLOCK_ELEMENTS // max(rows * row_elements, 1)
    if images:
        for first in range(0, batch, images):
            yield slice(first, min(first + images, batch)), slice(0, rows)
        return
    step = max(BLOCK_ELEMENTS // max(row_elements, 1), 1)
    for image in range(batch):
        for first in range(0, rows, step):
            yield slice(image, image + 1), slice(first, min(first + step, rows))
