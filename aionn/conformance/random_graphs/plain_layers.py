"""Plain definitions of the operations that combine neighbouring elements.

Owns ``DEFINITIONS`` of these operations; see ``plain``. Convolutions and pooling go through the window place by place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aionn.conformance.random_graphs.plain import Array, Definition, PlainCall, activated
from aionn.hal import OperandType, OperationType

__all__ = ["DEFINITIONS"]


# --- windows


@dataclass(frozen=True, slots=True)
class _Windows:
    """The arguments of an operation on windows, whichever form they have.

    Attributes:
        pads: left, right, top, bottom; None for a scheme.
        is_same: The scheme SAME; else VALID.
        strides: In height and width.
        dilations: In height and width.
        is_nchw: The layout.
        extras: The integers between the strides and the activation.
        activation: The fused activation.
    """

    pads: tuple[int, int, int, int] | None
    is_same: bool
    strides: tuple[int, int]
    dilations: tuple[int, int]
    is_nchw: bool
    extras: tuple[int, ...]
    activation: int

    def padding(self, axis: int, size: int, window: int) -> tuple[int, int]:
        """Elements before and after on axis 0 (height) or 1 (width)."""
        if self.pads is not None:
            left, right, top, bottom = self.pads
            return (top, bottom) if axis == 0 else (left, right)
        if not self.is_same:
            return 0, 0
        stride = self.strides[axis]
        reach = (window - 1) * self.dilations[axis] + 1
        total = max((math.ceil(size / stride) - 1) * stride + reach - size, 0)
        return total // 2, total - total // 2


def _windows(call: PlainCall, first: int, *, extras: int) -> _Windows:
    """Reads the arguments from input ``first`` on: padding, strides, ``extras``, activation, layout, dilations."""
    # The explicit form has three numbers more; a boolean follows the activation.
    is_explicit = False
    for shift, explicit in ((0, False), (3, True)):
        after = first + 3 + shift + extras + 1
        kinds = [operand.type for operand in call.operands]
        ends = len(kinds) == after
        if ends or (after < len(kinds) and kinds[after] == OperandType.BOOL):
            is_explicit = explicit
            break
    count = 6 if is_explicit else 3
    numbers = [call.integer(index) for index in range(first, first + count + extras + 1)]
    after = first + count + extras + 1
    pads = (numbers[0], numbers[1], numbers[2], numbers[3]) if is_explicit else None
    width_stride, height_stride = numbers[count - 2], numbers[count - 1]
    dilations = (1, 1)
    if len(call) > after + 1:
        dilations = (call.integer(after + 2), call.integer(after + 1))
    return _Windows(
        pads,
        not is_explicit and numbers[0] == 1,
        (height_stride, width_stride),
        dilations,
        len(call) > after and call.flag(after),
        tuple(numbers[count : count + extras]),
        numbers[count + extras],
    )


def _nhwc(x: Array, is_nchw: bool) -> Array:
    return np.moveaxis(x, 1, -1) if is_nchw else x


def _back(x: Array, is_nchw: bool) -> Array:
    return np.moveaxis(x, -1, 1) if is_nchw else x


def _places(x: Array, window: tuple[int, int], arguments: _Windows, filler: float) -> list[list[Array]]:
    """For each place of the window, the elements that all windows have there: [batch, out height, out width, depth]."""
    pads = [arguments.padding(axis, x.shape[1 + axis], window[axis]) for axis in (0, 1)]
    padded = np.pad(x, ((0, 0), *pads, (0, 0)), constant_values=filler)
    counts = []
    for axis in (0, 1):
        reach = (window[axis] - 1) * arguments.dilations[axis] + 1
        counts.append((padded.shape[1 + axis] - reach) // arguments.strides[axis] + 1)

    def taken(axis: int, place: int) -> slice:
        start = place * arguments.dilations[axis]
        return slice(start, start + (counts[axis] - 1) * arguments.strides[axis] + 1, arguments.strides[axis])

    return [[padded[:, taken(0, i), taken(1, j)] for j in range(window[1])] for i in range(window[0])]


def _bias(call: PlainCall) -> Array:
    """The bias as real numbers: integers count in products of the scales of input and filter."""
    bias = call.tensor(2)
    if call.operands[2].type != OperandType.TENSOR_INT32:
        return bias
    quant = call.operands[1].channel_quant
    scale = call.operands[0].scale * np.array(quant.scales if quant else call.operands[1].scale)
    return np.asarray(bias * scale)


def _convolution(call: PlainCall) -> list[Array]:
    arguments = _windows(call, 3, extras=0)
    x, filters = _nhwc(call.tensor(0), arguments.is_nchw), call.tensor(1)
    places = _places(x, (filters.shape[1], filters.shape[2]), arguments, 0)
    total = _bias(call) + sum(
        part @ filters[:, i, j].T for i, row in enumerate(places) for j, part in enumerate(row)
    )
    return [_back(activated(np.asarray(total), arguments.activation), arguments.is_nchw)]


def _depthwise_convolution(call: PlainCall) -> list[Array]:
    arguments = _windows(call, 3, extras=1)
    x, filters = _nhwc(call.tensor(0), arguments.is_nchw), call.tensor(1)
    places = _places(x, (filters.shape[1], filters.shape[2]), arguments, 0)
    # Channel c * multiplier + m is input channel c with filter c * multiplier + m.
    total = _bias(call) + sum(
        np.repeat(part, arguments.extras[0], axis=3) * filters[0, i, j]
        for i, row in enumerate(places)
        for j, part in enumerate(row)
    )
    return [_back(activated(np.asarray(total), arguments.activation), arguments.is_nchw)]


def _grouped_convolution(call: PlainCall) -> list[Array]:
    arguments = _windows(call, 3, extras=1)
    (groups,) = arguments.extras
    x, filters = _nhwc(call.tensor(0), arguments.is_nchw), call.tensor(1)
    results = []
    for own, own_filters in zip(np.split(x, groups, axis=3), np.split(filters, groups), strict=True):
        places = _places(own, (filters.shape[1], filters.shape[2]), arguments, 0)
        results.append(
            sum(part @ own_filters[:, i, j].T for i, row in enumerate(places) for j, part in enumerate(row))
        )
    total = np.concatenate([np.asarray(result) for result in results], axis=3) + _bias(call)
    return [_back(activated(total, arguments.activation), arguments.is_nchw)]


def _transpose_convolution(call: PlainCall) -> list[Array]:
    has_shape = call.operands[3].type == OperandType.TENSOR_INT32
    if has_shape:
        is_same, first = call.integer(4) == 1, 5
    else:
        first = 7
    width_stride, height_stride = call.integer(first), call.integer(first + 1)
    activation, is_nchw = call.integer(first + 2), call.flag(first + 3)
    x, filters = _nhwc(call.tensor(0), is_nchw), call.tensor(1)
    count, filter_height, filter_width, _ = filters.shape
    batch, height, width, _ = x.shape
    # Everything that is written, before the padding is cut off.
    full_height = (height - 1) * height_stride + filter_height
    full_width = (width - 1) * width_stride + filter_width
    full = np.zeros(
        (batch, max(full_height, height * height_stride), max(full_width, width * width_stride), count)
    )
    for i in range(filter_height):
        for j in range(filter_width):
            rows = slice(i, i + (height - 1) * height_stride + 1, height_stride)
            columns = slice(j, j + (width - 1) * width_stride + 1, width_stride)
            full[:, rows, columns] += x @ filters[:, i, j].T
    if has_shape:
        shape = call.integers(3)
        out_height, out_width = (shape[2], shape[3]) if is_nchw else (shape[1], shape[2])
        top = max(full_height - out_height, 0) // 2 if is_same else 0
        left = max(full_width - out_width, 0) // 2 if is_same else 0
    else:
        left, right, top, bottom = (call.integer(index) for index in range(3, 7))
        out_height, out_width = full_height - top - bottom, full_width - left - right
    cut = full[:, top : top + out_height, left : left + out_width] + _bias(call)
    return [_back(activated(cut, activation), is_nchw)]


def _pooling(kind: str) -> Definition:
    def defined(call: PlainCall) -> list[Array]:
        arguments = _windows(call, 1, extras=2)
        width, height = arguments.extras
        x = _nhwc(call.tensor(0), arguments.is_nchw)
        # NaN marks padding, which takes no part.
        parts = np.stack([part for row in _places(x, (height, width), arguments, np.nan) for part in row])
        if kind == "max":
            result = np.nanmax(parts, axis=0)
        elif kind == "average":
            result = np.nanmean(parts, axis=0)
        else:
            result = np.sqrt(np.nanmean(parts**2, axis=0))
        return [_back(activated(result, arguments.activation), arguments.is_nchw)]

    return defined


# --- products


def _fully_connected(call: PlainCall) -> list[Array]:
    x, filters = call.tensor(0), call.tensor(1)
    total = x.reshape(-1, filters.shape[1]) @ filters.T + _bias(call)
    return [activated(total, call.integer(3))]


def _batch_matmul(call: PlainCall) -> list[Array]:
    a, b = call.tensor(0), call.tensor(1)
    a = np.swapaxes(a, -1, -2) if call.flag(2) else a
    b = np.swapaxes(b, -1, -2) if call.flag(3) else b
    return [np.einsum("...ij,...jk->...ik", a, b)]


# --- normalisation


def _softmax(call: PlainCall) -> list[Array]:
    axis = call.integer(2) if len(call) > 2 else -1
    x = call.tensor(0) * call.number(1)
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return [powers / powers.sum(axis=axis, keepdims=True)]


def _log_softmax(call: PlainCall) -> list[Array]:
    axis = call.integer(2)
    x = call.tensor(0) * call.number(1)
    x = x - x.max(axis=axis, keepdims=True)
    return [x - np.log(np.exp(x).sum(axis=axis, keepdims=True))]


def _l2_normalization(call: PlainCall) -> list[Array]:
    x, axis = call.tensor(0), call.integer(1) if len(call) > 1 else -1
    norm = np.sqrt((x**2).sum(axis=axis, keepdims=True))
    return [x / np.maximum(norm, 1e-6)]


def _local_response_normalization(call: PlainCall) -> list[Array]:
    axis = call.integer(5) if len(call) > 5 else -1
    x = np.moveaxis(call.tensor(0), axis, -1)
    radius, bias, alpha, beta = call.integer(1), call.number(2), call.number(3), call.number(4)
    result = np.empty_like(x)
    for place in range(x.shape[-1]):
        window = x[..., max(place - radius, 0) : place + radius + 1]
        result[..., place] = x[..., place] / (bias + alpha * (window**2).sum(axis=-1)) ** beta
    return [np.moveaxis(result, -1, axis)]


def _instance_normalization(call: PlainCall) -> list[Array]:
    is_nchw = call.flag(4)
    x = _nhwc(call.tensor(0), is_nchw)
    gamma, beta, epsilon = call.number(1), call.number(2), call.number(3)
    mean, variance = x.mean(axis=(1, 2), keepdims=True), x.var(axis=(1, 2), keepdims=True)
    return [_back((x - mean) * gamma / np.sqrt(variance + epsilon) + beta, is_nchw)]


# --- resizing


def _resized_sizes(call: PlainCall, height: int, width: int) -> tuple[int, int]:
    if call.operands[1].type == OperandType.INT32:
        return call.integer(2), call.integer(1)
    single = np.float32
    return (
        math.floor(single(height) * single(call.number(2))),
        math.floor(single(width) * single(call.number(1))),
    )


def _resize(axis_of: Callable[[Array, int, int, bool, bool], Array]) -> Definition:
    """One axis after the other: ``axis_of(image, axis, size, align, half)``."""

    def defined(call: PlainCall) -> list[Array]:
        is_nchw, align, half = call.flag(3), call.flag(4), call.flag(5)
        x = _nhwc(call.tensor(0), is_nchw)
        height, width = _resized_sizes(call, x.shape[1], x.shape[2])
        x = axis_of(x, 1, height, align, half)
        return [_back(axis_of(x, 2, width, align, half), is_nchw)]

    return defined


def _step(size: int, out: int, align: bool) -> np.float32:
    """Input pixels an output pixel; in float32, for it decides which pixel is taken."""
    return (
        np.float32(size - 1) / np.float32(out - 1)
        if align and out > 1
        else np.float32(size) / np.float32(out)
    )


def _bilinear_axis(x: Array, axis: int, out: int, align: bool, half: bool) -> Array:
    size, parts = x.shape[axis], []
    step = _step(size, out, align)
    for index in range(out):
        place = (index + 0.5) * float(step) - 0.5 if half else index * float(step)
        place = min(max(place, 0.0), size - 1.0)
        first = int(place)
        second = min(first + 1, size - 1)
        share = place - first
        parts.append(np.take(x, first, axis=axis) * (1 - share) + np.take(x, second, axis=axis) * share)
    return np.stack(parts, axis=axis)


def _nearest_axis(x: Array, axis: int, out: int, align: bool, half: bool) -> Array:
    size = x.shape[axis]
    step = _step(size, out, align)
    places = []
    for index in range(out):
        place = (np.float32(index) + np.float32(0.5)) * step if half else np.float32(index) * step
        whole = math.floor(float(place) + 0.5) if align else math.floor(place)
        places.append(min(whole, size - 1))
    return np.take(x, places, axis=axis)


# --- regions


def _regions(call: PlainCall) -> Array:
    """Regions in pixels of the feature map, in float32."""
    scales = [np.float32(1) / np.float32(call.number(index)) for index in (6, 5, 6, 5)]
    return call.tensor(1).astype(np.float32) * np.array(scales, dtype=np.float32)


def _interpolated(image: Array, y: float, x: float) -> Array:
    height, width, _ = image.shape
    y, x = min(y, height - 1.0), min(x, width - 1.0)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    dy, dx = y - top, x - left
    upper = image[top, left] * (1 - dx) + image[top, right] * dx
    lower = image[bottom, left] * (1 - dx) + image[bottom, right] * dx
    return np.asarray(upper * (1 - dy) + lower * dy)


def _region_loop(
    call: PlainCall, layout_index: int, value: Callable[[Array, Sequence[float], int, int, int, int], Array]
) -> list[Array]:
    is_nchw = call.flag(layout_index)
    images = _nhwc(call.tensor(0), is_nchw)
    height, width = call.integer(3), call.integer(4)
    result = np.empty((len(call.tensor(1)), height, width, images.shape[3]))
    for index, (region, batch) in enumerate(zip(_regions(call), call.integers(2), strict=True)):
        corners = [float(corner) for corner in region]
        for i in range(height):
            for j in range(width):
                result[index, i, j] = value(images[batch], corners, i, j, height, width)
    return [_back(result, is_nchw)]


def _roi_align(call: PlainCall) -> list[Array]:
    def value(image: Array, corners: Sequence[float], i: int, j: int, height: int, width: int) -> Array:
        x1, y1, x2, y2 = corners
        # float32 decides the number of samples where it is not given.
        step_y = float(np.float32(max(np.float32(y2) - np.float32(y1), np.float32(1))) / np.float32(height))
        step_x = float(np.float32(max(np.float32(x2) - np.float32(x1), np.float32(1))) / np.float32(width))
        rows, columns = call.integer(7) or math.ceil(step_y), call.integer(8) or math.ceil(step_x)
        samples = [
            _interpolated(
                image, y1 + step_y * (i + (a + 0.5) / rows), x1 + step_x * (j + (b + 0.5) / columns)
            )
            for a in range(rows)
            for b in range(columns)
        ]
        return np.asarray(np.mean(samples, axis=0))

    return _region_loop(call, 9, value)


def _roi_pooling(call: PlainCall) -> list[Array]:
    def edges(start: float, end: float, index: int, count: int, size: int) -> tuple[int, int]:
        first = math.floor(start + 0.5)
        step = np.float32(max(math.floor(end + 0.5) - first + 1, 1)) / np.float32(count)
        begin = np.float32(step * np.float32(index)) + np.float32(first)
        past = np.float32(step * np.float32(index + 1)) + np.float32(first)
        return min(math.floor(begin), size), min(math.ceil(past), size)

    def value(image: Array, corners: Sequence[float], i: int, j: int, height: int, width: int) -> Array:
        x1, y1, x2, y2 = corners
        top, bottom = edges(y1, y2, i, height, image.shape[0])
        left, right = edges(x1, x2, j, width, image.shape[1])
        part = image[top:bottom, left:right].reshape(-1, image.shape[2])
        return np.asarray(part.max(axis=0)) if len(part) else np.zeros(image.shape[2])

    return _region_loop(call, 7, value)


def _heatmap(call: PlainCall) -> list[Array]:
    heatmaps, boxes = _nhwc(call.tensor(0), call.flag(2)), call.tensor(1)
    count, size, _, keypoint_count = heatmaps.shape
    scores = np.empty((count, keypoint_count))
    keypoints = np.empty((count, keypoint_count, 2))
    for index in range(count):
        x1, y1, x2, y2 = boxes[index]
        for keypoint in range(keypoint_count):
            heat = heatmaps[index, :, :, keypoint]
            row, column = divmod(int(heat.argmax()), size)
            dx, dy, scores[index, keypoint] = _parabola_top(heat, row, column)
            keypoints[index, keypoint] = (
                x1 + (column + dx + 0.5) / size * (x2 - x1),
                y1 + (row + dy + 0.5) / size * (y2 - y1),
            )
    return [scores, keypoints]


def _parabola_top(heat: Array, row: int, column: int) -> tuple[float, float, float]:
    """Offset in x and y of the top of the parabola through the 3x3 scores around a maximum, and its height."""
    # Beyond the border it is mirrored at the outermost pixels.
    grid = np.pad(heat, 1, mode="reflect")[row : row + 3, column : column + 3]
    gradient = np.array([grid[1, 2] - grid[1, 0], grid[2, 1] - grid[0, 1]]) / 2
    mixed = (grid[2, 2] - grid[2, 0] - grid[0, 2] + grid[0, 0]) / 4
    curvature_x = grid[1, 0] - 2 * grid[1, 1] + grid[1, 2]
    curvature_y = grid[0, 1] - 2 * grid[1, 1] + grid[2, 1]
    hessian = np.array([[curvature_x, mixed], [mixed, curvature_y]])
    if abs(np.linalg.det(hessian)) < 1e-5 + 1e-5 * curvature_x * curvature_y:
        return 0.0, 0.0, float(grid[1, 1])
    offset = np.linalg.solve(hessian, -gradient)
    offset = offset * min(1.0, 1.5 / max(float(np.abs(offset).max()), 1e-30))
    height = grid[1, 1] + gradient @ offset + offset @ hessian @ offset / 2
    return float(offset[0]), float(offset[1]), float(height)


O = OperationType  # noqa: E741 - the table below has one on every line

DEFINITIONS: dict[OperationType, Definition] = {
    O.CONV_2D: _convolution,
    O.DEPTHWISE_CONV_2D: _depthwise_convolution,
    O.GROUPED_CONV_2D: _grouped_convolution,
    O.TRANSPOSE_CONV_2D: _transpose_convolution,
    O.AVERAGE_POOL_2D: _pooling("average"),
    O.L2_POOL_2D: _pooling("l2"),
    O.MAX_POOL_2D: _pooling("max"),
    O.FULLY_CONNECTED: _fully_connected,
    O.BATCH_MATMUL: _batch_matmul,
    O.SOFTMAX: _softmax,
    O.LOG_SOFTMAX: _log_softmax,
    O.L2_NORMALIZATION: _l2_normalization,
    O.LOCAL_RESPONSE_NORMALIZATION: _local_response_normalization,
    O.INSTANCE_NORMALIZATION: _instance_normalization,
    O.RESIZE_BILINEAR: _resize(_bilinear_axis),
    O.RESIZE_NEAREST_NEIGHBOR: _resize(_nearest_axis),
    O.ROI_ALIGN: _roi_align,
    O.ROI_POOLING: _roi_pooling,
    O.HEATMAP_MAX_KEYPOINT: _heatmap,
}
