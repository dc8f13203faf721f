"""Pools: MAX_POOL_2D, AVERAGE_POOL_2D and L2_POOL_2D; elementwise operations of slices where the HAL has no such pool.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aionn.hal import FusedActivation, OperandType, OperationType
from aionn.models.builder import Value
from aionn.models.onnx.conversions.layers import Window, check_image, from_image, image_of
from aionn.models.onnx.formula import Formula, activated
from aionn.models.onnx.operator import Convert, Operator
from aionn.models.onnx.tensors import RANK_MAX, Array, Inexpressible, Tensor, stored_shape
from aionn.models.onnx.writer import GraphWriter

__all__ = ["global_pool", "pool"]

PLACES_MAX = 64
"""Most elements of a window that is computed by operations for each of them."""


class _Pool(NamedTuple):
    """The attributes of a pool.

    Attributes:
        window: The window.
        counts_padding: Whether an average counts padding as zeros.
        rounds_up: Whether the number of outputs is rounded up.
        p: The order of a norm; 0 for other pools.
        places: Whether the places of the largest elements are results.
        by_columns: Whether these count a column of the image first.
    """

    window: Window
    counts_padding: bool
    rounds_up: bool
    p: int
    places: bool
    by_columns: bool


def pool(kind: OperationType) -> Convert:
    """MAX_POOL_2D, AVERAGE_POOL_2D or L2_POOL_2D; slices of the image where the HAL has no such pool."""

    def convert(g: GraphWriter, op: Operator) -> Tensor | Sequence[Tensor]:
        x = op.input(0)
        is_largest = kind == OperationType.MAX_POOL_2D
        if not (is_largest and x.dtype in ("uint8", "int8") and x.rank in (3, 4)):
            check_image(op, x)
        kernel = op.integers("kernel_shape")
        if kernel is None or len(kernel) != x.rank - 2:
            op.refuse("attribute 'kernel_shape'", f"{x.rank - 2} extents", kernel)
        window = Window(op, kernel, x.shape[2:])
        of = _Pool(
            window,
            bool(op.integer("count_include_pad", 0)),
            bool(op.integer("ceil_mode", 0)),
            _order(op) if kind == OperationType.L2_POOL_2D else 0,
            op.wants(1),
            bool(op.integer("storage_order", 0)),
        )
        image = image_of(g, x)
        beyond = _beyond(image, of)
        if of.places or (is_largest and window.dilations != [1, 1]):
            return _largest(g, op, x, image, of)
        averages_beyond = not of.p and of.counts_padding and any(window.pads) and any(beyond)
        if window.dilations != [1, 1] or averages_beyond:
            value = _summed(g, image, of)
        elif of.p not in (0, 2):
            power = _power(_wide(g, image), of.p).value
            value = _pooled(g, power, of, OperationType.AVERAGE_POOL_2D, beyond)
            value = _narrow(_root(Formula(g, value) * math.prod(window.kernel), of.p), image)
        else:
            fused = op.activation if kind != OperationType.L2_POOL_2D else FusedActivation.NONE
            value = _pooled(g, image, of, kind, beyond, fused)
            if of.p:
                value = (Formula(g, value) * math.sqrt(math.prod(window.kernel))).value
            if fused:
                return from_image(g, x, value)
        return from_image(g, x, activated(g, value, op.activation))

    return convert


def _order(op: Operator) -> int:
    p = op.integer("p", 2)
    if p < 1:
        op.refuse("attribute 'p'", "1 or more", p)
    return p


def _wide(g: GraphWriter, image: Value) -> Formula:
    """An image in float32: powers and sums of float16 are soon beyond its numbers."""
    f = Formula(g, image)
    return f.cast(g.described("float32")) if image.operand.type == OperandType.TENSOR_FLOAT16 else f


def _narrow(x: Formula, image: Value) -> Value:
    """A result in the type of the image."""
    return x.value if x.value.operand.type == image.operand.type else x.cast(image.operand).value


def _power(x: Formula, p: int) -> Formula:
    """The sizes to the power of the order of a norm."""
    if p == 2:
        return x * x
    return abs(x) if p == 1 else abs(x).power(p)


def _root(x: Formula, p: int) -> Formula:
    if p == 2:
        return x.sqrt()
    return x if p == 1 else x.power(1 / p)


def _pooled(
    g: GraphWriter,
    image: Value,
    of: _Pool,
    kind: OperationType,
    beyond: list[int],
    fused: FusedActivation = FusedActivation.NONE,
) -> Value:
    window, pads = of.window, list(of.window.pads)
    if (of.counts_padding or of.p) and any(pads):
        # The padding counts as zeros; elements that are only there to round up do not.
        table = np.array([[0, 0], [pads[0], pads[2]], [pads[1], pads[3]], [0, 0]], np.int32)
        image = g.emit(OperationType.PAD_V2, [image, g.constant_value(table), g.scalar(0.0, image)])
        pads = [0, 0, 0, 0]
    if of.p and any(beyond):
        table = np.array([[0, 0], [0, beyond[0]], [0, beyond[1]], [0, 0]], np.int32)
        image = g.emit(OperationType.PAD_V2, [image, g.constant_value(table), g.scalar(0.0, image)])
        beyond = [0, 0]
    window.pads = [pads[0], pads[1], pads[2] + beyond[0], pads[3] + beyond[1]]
    return g.emit(kind, [image, *window.arguments(), window.kernel[1], window.kernel[0], int(fused)])


def _beyond(image: Value, of: _Pool) -> list[int]:
    """For both axes the padding at the end that rounds the number of outputs up."""
    window, found = of.window, []
    for axis, count in enumerate(_counts(image, of)):
        reached = (count - 1) * window.strides[axis] + window.reach[axis]
        extent = image.operand.dimensions[1 + axis]
        found.append(max(0, reached - (extent + window.pads[axis] + window.pads[axis + 2])))
    return found


def _counts(image: Value, of: _Pool) -> list[int]:
    """Numbers of outputs of both axes. No window begins in the padding at the end."""
    window, counts = of.window, []
    for axis, extent in enumerate(image.operand.dimensions[1:3]):
        stride, before, after = window.strides[axis], window.pads[axis], window.pads[axis + 2]
        room = extent + before + after - window.reach[axis]
        count = (-(-room // stride) if of.rounds_up else room // stride) + 1
        if of.rounds_up and (count - 1) * stride >= extent + before:
            count -= 1
        counts.append(count)
    return counts


# Slices


def _slices(g: GraphWriter, image: Value, of: _Pool, fill: float) -> list[Value]:
    """For each place of the window the elements there of all windows."""
    window, counts = of.window, _counts(image, of)
    if math.prod(window.kernel) > PLACES_MAX:
        raise Inexpressible(f"a pool with dilation, or another rare one, of more than {PLACES_MAX} elements")
    if min(counts) < 1:
        raise Inexpressible("a value without elements")
    n, h, w, c = image.operand.dimensions
    reached = [(m - 1) * s + r for m, s, r in zip(counts, window.strides, window.reach, strict=True)]
    ends = [max(0, reached[axis] - extent - window.pads[axis]) for axis, extent in enumerate((h, w))]
    widths = [[0, 0], [window.pads[0], ends[0]], [window.pads[1], ends[1]], [0, 0]]
    if np.any(widths):
        is_real = image.operand.type in (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
        number = g.scalar(fill, image) if is_real else int(fill)
        image = g.emit(OperationType.PAD_V2, [image, g.constant_value(np.array(widths, np.int32)), number])
    steps = g.int32s([1, *window.strides, 1])
    spans = [(m - 1) * s + 1 for m, s in zip(counts, window.strides, strict=True)]
    found = []
    for y, x in _places(window):
        begin, end = g.int32s([0, y, x, 0]), g.int32s([n, y + spans[0], x + spans[1], c])
        found.append(g.emit(OperationType.STRIDED_SLICE, [image, begin, end, steps, 0, 0, 0]))
    return found


def _places(window: Window) -> list[tuple[int, int]]:
    """The offset of each element of a window, in rows."""
    (rows, columns), (down, across) = window.kernel, window.dilations
    return [(y * down, x * across) for y in range(rows) for x in range(columns)]


def _largest(g: GraphWriter, op: Operator, x: Tensor, image: Value, of: _Pool) -> list[Tensor]:
    """The largest elements, and their places in ``x``: the first of equal ones."""
    least = {"uint8": 0.0, "int8": -128.0}.get(x.dtype, -math.inf)
    slices = [Formula(g, value) for value in _slices(g, image, of, least)]
    best = slices[0]
    if not of.places:
        for one in slices[1:]:
            best = best.maximum(one)
        return [from_image(g, x, activated(g, best.value, op.activation))]
    numbers = [Formula(g, g.constant_value(array)) for array in _numbers(g, image, of)]
    found = numbers[0]
    for one, place in zip(slices[1:], numbers[1:], strict=True):
        is_larger = one.greater(best)
        found = is_larger.where(place, found, found)
        best = best.maximum(one)
    result = from_image(g, x, activated(g, best.value, op.activation))
    return [result, from_image(g, x, found.value, "int64", (0, x.size - 1))]


def _numbers(g: GraphWriter, image: Value, of: _Pool) -> list[Array]:
    """For each place of the window the numbers of the elements there in the whole value, of all windows."""
    n, h, w, c = image.operand.dimensions
    window, counts = of.window, _counts(image, of)
    g.charge(4 * n * c * math.prod(counts) * math.prod(window.kernel))
    planes = np.arange(n * c, dtype=np.int32).reshape(n, 1, 1, c) * (h * w)
    arrays = []
    for y, x in _places(window):
        rows, columns = (
            np.clip(np.arange(count) * stride + offset - pad, 0, extent - 1).astype(np.int32)
            for count, stride, offset, pad, extent in zip(
                counts, window.strides, (y, x), window.pads[:2], (h, w), strict=True
            )
        )
        within = columns * h + rows[:, None] if of.by_columns else rows[:, None] * w + columns
        arrays.append(planes + within[None, :, :, None])
    return arrays


def _summed(g: GraphWriter, image: Value, of: _Pool) -> Value:
    """An average or a norm: the sum of all places."""
    slices = [Formula(g, value) for value in _slices(g, _wide(g, image).value, of, 0.0)]
    terms = [_power(one, of.p) if of.p else one for one in slices]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    if of.p:
        total = _root(total, of.p)
    else:
        total = total / Formula(g, g.constant_value(_weights(image, of)))
    return _narrow(total, image)


def _weights(image: Value, of: _Pool) -> Array:
    """The number of elements that each average counts: those of the image, and those of the padding if it counts."""
    window, factors = of.window, []
    for axis, (count, extent) in enumerate(
        zip(_counts(image, of), image.operand.dimensions[1:3], strict=True)
    ):
        offsets = np.arange(window.kernel[axis]) * window.dilations[axis] - window.pads[axis]
        places = np.arange(count)[:, None] * window.strides[axis] + offsets
        low, high = (-window.pads[axis], extent + window.pads[axis + 2]) if of.counts_padding else (0, extent)
        factors.append(((places >= low) & (places < high)).sum(1))
    weights: Array = factors[0][:, None] * factors[1]
    return weights.astype(np.float32).reshape(1, *map(len, factors), 1)


# The whole image


def global_pool(kind: OperationType) -> Convert:
    """MEAN, REDUCE_MAX, or a norm, over all spatial axes."""

    def convert(g: GraphWriter, op: Operator) -> Tensor:
        x = op.input(0)
        if x.rank < 3:
            op.refuse("input 0", "an image", list(x.shape))
        p = _order(op) if kind == OperationType.REDUCE_SUM else 0
        shape = (*x.shape[:2], *(1,) * (x.rank - 2))
        if x.rank > RANK_MAX:
            value = g.reshaped(g.form(x), (*x.shape[:2], math.prod(x.shape[2:])))
            result = _global(Formula(g, value), kind, [2], p)
            return g.tensor(g.reshaped(result.value, stored_shape(shape)), x.dtype, shape)
        places = [place for place, axis in enumerate(x.order) if axis >= 2]
        result = _global(Formula(g, g.form(x, x.order)), kind, places, p)
        return g.tensor(result.value, x.dtype, shape, order=x.order)

    return convert


def _global(x: Formula, kind: OperationType, axes: list[int], p: int) -> Formula:
    return _root(_power(x, p).reduced(kind, axes), p) if p else x.reduced(kind, axes)
