"""Lowering of what moves, cuts, joins, repeats, looks up or resizes.

Source: the contracts in ``aionn.ops``; the operators of ONNX and the engines' kernels for what they accept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from aionn.drivers.kit.arguments import Array
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.onnx.elementwise import Rule, stored_numbers, table_of
from aionn.drivers.kit.onnx.graph import NCHW, Graph
from aionn.drivers.kit.onnx.layers import image
from aionn.drivers.kit.onnx.value import Order, Value
from aionn.hal import Operand, OperandType, Operation, OperationType
from aionn.ops import Tensor

__all__ = ["RULES"]


INDEX_BYTES = 40
"""Bytes of an index in a list of them: the number, and its object in Python."""


def to_shape(g: Graph, op: Operation) -> None:
    """RESHAPE, SQUEEZE, EXPAND_DIMS: the shape of the output is known."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    g.set(output, g.reshaped(g.name(data), output.shape))


def transpose(g: Graph, op: Operation) -> None:
    """TRANSPOSE, which writes nothing before a reader asks for the order. Without one a matrix is transposed."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    order = tuple(g.integers(op, 1)) if g.has(op, 1) else (1, 0)
    output.forms.update(g.view(data, order).forms)


def reverse(g: Graph, op: Operation) -> None:
    """REVERSE along one axis."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    (axis,) = g.integers(op, 1)
    order = g.common_order(data)
    g.set(output, reversed_(g, g.name(data, order), order.index(axis), data.shape[axis]), order)


def reversed_(g: Graph, name: str, axis: int, extent: int) -> str:
    """The elements in reverse order along an axis."""
    lists = [g.int64s([number]) for number in (extent - 1, -extent - 1, axis, -1)]
    return g.emit("Slice", [name, *lists])


def channel_shuffle(g: Graph, op: Operation) -> None:
    """CHANNEL_SHUFFLE: Reshape, Transpose, Reshape."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    shape, groups, axis = data.shape, g.scalar(op, 1), g.scalar(op, 2) % data.rank
    split = (math.prod(shape[:axis]), groups, shape[axis] // groups, math.prod(shape[axis + 1 :]))
    turned = g.emit("Transpose", [g.reshaped(g.name(data), split)], perm=[0, 2, 1, 3])
    g.set(output, g.reshaped(turned, shape))


# Parts


def sliced(g: Graph, data: Value, ranges: Sequence[range]) -> str:
    """The elements at the indexes of each axis."""
    axes = [axis for axis, taken in enumerate(ranges) if taken != range(data.shape[axis])]
    name = g.name(data)
    if not axes:
        return g.emit("Identity", [name])
    starts = [ranges[axis].start for axis in axes]
    # The end of a range that runs down to the first element is -1, which ONNX counts from the end.
    ends = [n if (n := ranges[axis].stop) >= 0 else n - data.shape[axis] for axis in axes]
    steps = [ranges[axis].step for axis in axes]
    return g.emit("Slice", [name, *(g.int64s(numbers) for numbers in (starts, ends, axes, steps))])


def slice_(g: Graph, op: Operation) -> None:
    """SLICE."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    begins = g.integers(op, 1)
    ranges = [range(begin, begin + size) for begin, size in zip(begins, output.shape, strict=True)]
    g.set(output, sliced(g, data, ranges))


def strided_slice(g: Graph, op: Operation) -> None:
    """STRIDED_SLICE; axes that go are taken out by a Reshape."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    begins, ends, strides = (g.integers(op, position) for position in (1, 2, 3))
    begin_mask, end_mask, shrink_mask = (g.scalar(op, position) for position in (4, 5, 6))
    ranges = []
    for axis, extent in enumerate(data.shape):
        bit = 1 << axis
        begin = None if begin_mask & bit else begins[axis]
        end = None if end_mask & bit else ends[axis]
        if shrink_mask & bit and begin is not None and end == begin + 1 == 0:
            end = None  # From -1 to 0 is the last element.
        taken = range(*slice(begin, end, strides[axis]).indices(extent))
        if shrink_mask & bit and (strides[axis] < 0 or len(taken) != 1):
            raise Unsupported("an axis that goes without having one element")
        ranges.append(taken)
    part = sliced(g, data, ranges)
    g.set(output, g.reshaped(part, output.shape) if shrink_mask else part)


def split(g: Graph, op: Operation) -> None:
    """SPLIT into equal parts."""
    data = g.input(op, 0)
    outputs = [g.output(op, i) for i in range(len(op.outputs))]
    g.same_quantization(data, *outputs)
    order = g.common_order(data)
    axis = order.index(g.scalar(op, 1) % data.rank)
    names = g.emit_all("Split", [g.name(data, order)], len(outputs), axis=axis, num_outputs=len(outputs))
    for output, name in zip(outputs, names, strict=True):
        g.set(output, name, order)


# Joining


def concatenation(g: Graph, op: Operation) -> None:
    """CONCATENATION; quantised values get the output's scale first, as its contract rounds them."""
    output = g.output(op)
    parts = [g.input(op, i) for i in range(len(op.inputs) - 1)]
    axis = g.scalar(op, len(parts))
    order = g.common_order(*parts)
    names = [_joinable(g, op, position, order) for position in range(len(parts))]
    if output.rank == 1 and not g.dialect.has_joined_vectors:
        columns = [g.reshaped(name, (*part.shape, 1)) for name, part in zip(names, parts, strict=True)]
        g.set(output, g.reshaped(g.emit("Concat", columns, axis=0), output.shape), order)
        return
    g.set(output, g.emit("Concat", names, axis=order.index(axis)), order)


def _joinable(g: Graph, op: Operation, position: int, order: Order) -> str:
    part, output = g.input(op, position), g.output(op)
    name = g.name(part, order)
    if not part.is_quantized or part.has_quantization_of(output):
        return name
    axis = Tensor(Operand(OperandType.INT32), np.zeros((), np.int32), is_constant=True)
    table = table_of(g, part, op, [Tensor(g.operand(op, position), stored_numbers(part)), axis])
    return g.looked_up(name, part.dtype, table)


def pack(g: Graph, op: Operation) -> None:
    """PACK: each part gets the new axis, and they are joined along it."""
    output, axis = g.output(op), g.scalar(op, 0)
    parts = [g.input(op, i) for i in range(1, len(op.inputs))]
    g.same_quantization(*parts, output)
    shape = (*output.shape[:axis], 1, *output.shape[axis + 1 :])
    names = [g.reshaped(g.name(part), shape) for part in parts]
    g.set(output, g.emit("Concat", names, axis=axis))


def tile(g: Graph, op: Operation) -> None:
    """TILE."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    g.set(output, g.emit("Tile", [g.name(data), g.int64s(g.integers(op, 1))]))


# Edges


def padded(
    g: Graph, data: Value, name: str, order: Order, pairs: Sequence[Sequence[int]], fill: float
) -> str:
    """The elements amid others; ``pairs`` are in the order of the value's own axes."""
    before, after = ([pairs[axis][side] for axis in order] for side in (0, 1))
    return g.emit("Pad", [name, g.int64s([*before, *after]), g.constant(fill, data.dtype)])


def pad(g: Graph, op: Operation) -> None:
    """PAD amid zeros, PAD_V2 amid another number."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    amounts = g.integers(op, 1)
    pairs = list(zip(amounts[::2], amounts[1::2], strict=True))
    fill = data.zero_point
    if op.type == OperationType.PAD_V2:
        fill = g.scalar(op, 2) + 128 * data.is_moved
    order = g.common_order(data)
    g.set(output, padded(g, data, g.name(data, order), order, pairs, fill), order)


def mirror_pad(g: Graph, op: Operation) -> None:
    """MIRROR_PAD: along each axis the elements at the indexes that the mirror shows."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    amounts = g.integers(op, 1)
    edge = 0 if g.scalar(op, 2) == 0 else 1  # Reflection leaves the edge out.
    name = g.name(data)
    for axis, extent in enumerate(data.shape):
        before, after = amounts[2 * axis : 2 * axis + 2]
        if before or after:
            g.known.charge(INDEX_BYTES * (before + extent + after))
            indexes = np.arange(-before, extent + after)
            indexes = np.where(indexes < 0, -indexes - edge, indexes)
            indexes = np.where(indexes >= extent, 2 * (extent - 1) + edge - indexes, indexes)
            name = g.emit("Gather", [name, g.int64s(indexes.tolist())], axis=axis)
    g.set(output, name)


# Blocks


def _moved(
    g: Graph,
    op: Operation,
    data: Value,
    name: str,
    split_shape: Sequence[int],
    order: Sequence[int],
    *,
    is_nchw: bool,
) -> None:
    """Sets the output to an image [batch, height, width, depth] whose axes are split and permuted."""
    output = g.output(op)
    g.same_quantization(data, output)
    turned = g.emit("Transpose", [g.reshaped(name, split_shape)], perm=list(order))
    shape = [output.shape[axis] for axis in (0, 2, 3, 1)] if is_nchw else output.shape
    g.set(output, g.reshaped(turned, shape), (0, 2, 3, 1) if is_nchw else None)


def batch_to_space_nd(g: Graph, op: Operation) -> None:
    """BATCH_TO_SPACE_ND."""
    is_nchw = bool(g.optional(op, 2, False))
    data = image(g, g.input(op, 0), is_nchw)
    (rows, columns), (batch, height, width, depth) = g.integers(op, 1), data.shape
    shape = (rows, columns, batch // (rows * columns), height, width, depth)
    _moved(g, op, data, g.name(data), shape, (2, 3, 0, 4, 1, 5), is_nchw=is_nchw)


def space_to_batch_nd(g: Graph, op: Operation) -> None:
    """SPACE_TO_BATCH_ND."""
    is_nchw = bool(g.optional(op, 3, False))
    data = image(g, g.input(op, 0), is_nchw)
    (rows, columns), amounts = g.integers(op, 1), g.integers(op, 2)
    pairs = [(0, 0), tuple(amounts[:2]), tuple(amounts[2:]), (0, 0)]
    batch, height, width, depth = (extent + sum(pair) for extent, pair in zip(data.shape, pairs, strict=True))
    name = g.name(data)
    if any(amounts):
        name = padded(g, data, name, data.plain, pairs, data.zero_point)
    shape = (batch, height // rows, rows, width // columns, columns, depth)
    _moved(g, op, data, name, shape, (2, 4, 0, 1, 3, 5), is_nchw=is_nchw)


def depth_to_space(g: Graph, op: Operation) -> None:
    """DEPTH_TO_SPACE."""
    is_nchw = bool(g.optional(op, 2, False))
    data, block = image(g, g.input(op, 0), is_nchw), g.scalar(op, 1)
    batch, height, width, depth = data.shape
    shape = (batch, height, width, block, block, depth // (block * block))
    _moved(g, op, data, g.name(data), shape, (0, 1, 3, 2, 4, 5), is_nchw=is_nchw)


def space_to_depth(g: Graph, op: Operation) -> None:
    """SPACE_TO_DEPTH."""
    is_nchw = bool(g.optional(op, 2, False))
    data, block = image(g, g.input(op, 0), is_nchw), g.scalar(op, 1)
    batch, height, width, depth = data.shape
    shape = (batch, height // block, block, width // block, block, depth)
    _moved(g, op, data, g.name(data), shape, (0, 1, 3, 2, 4, 5), is_nchw=is_nchw)


# Resizing


def resize_nearest(g: Graph, op: Operation) -> None:
    """RESIZE_NEAREST_NEIGHBOR: rows and columns at indexes that are known."""
    is_nchw, align, half = (bool(g.optional(op, position, False)) for position in (3, 4, 5))
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    down = 2 if is_nchw else 1
    name = g.name(data)
    for axis in (down, down + 1):
        g.known.charge(INDEX_BYTES * max(data.shape[axis], output.shape[axis]))
        indexes = _nearest(data.shape[axis], output.shape[axis], align=align, half=half)
        if not np.array_equal(indexes, np.arange(data.shape[axis])):
            name = g.emit("Gather", [name, g.int64s(indexes.tolist())], axis=axis)
    g.set(output, name)


def _nearest(in_extent: int, out_extent: int, *, align: bool, half: bool) -> Array:
    """The source index of each output index along an axis, computed in float32 as the HAL's are."""
    if align and out_extent > 1:
        scale = np.float32(in_extent - 1) / np.float32(out_extent - 1)
    else:
        scale = np.float32(in_extent) / np.float32(out_extent)
    position = (np.arange(out_extent, dtype=np.float32) + np.float32(0.5 if half else 0.0)) * scale
    source = np.floor(position.astype(np.float64) + (0.5 if align else 0.0))
    return np.clip(source.astype(np.int64), 0, in_extent - 1)


def resize_bilinear(g: Graph, op: Operation) -> None:
    """RESIZE_BILINEAR; of stored numbers, which the HAL truncates where they are unsigned and rounds where they are signed."""
    is_nchw, align, half = (bool(g.optional(op, position, False)) for position in (3, 4, 5))
    data, output = image(g, g.input(op, 0), is_nchw), g.output(op)
    g.same_quantization(data, output)
    name = g.name(data, NCHW)
    if data.is_quantized:
        name = g.cast(name, "float32")
    order = output.plain if is_nchw else NCHW
    mode = "align_corners" if align else "half_pixel" if half else "asymmetric"
    size = g.int64s([output.shape[axis] for axis in order])
    name = g.emit("Resize", [name, "", "", size], mode="linear", coordinate_transformation_mode=mode)
    if data.is_moved:
        name = g.emit("Floor", [g.emit("Add", [name, g.constant(0.5, "float32")])])
    if data.is_quantized:
        name = g.cast(name, data.dtype)
    g.set(output, name, order)


# Looking up


def gather(g: Graph, op: Operation) -> None:
    """GATHER."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    axis = g.scalar(op, 1) % data.rank
    g.set(output, _gathered(g, data, g.input(op, 2), axis))


def embedding_lookup(g: Graph, op: Operation) -> None:
    """EMBEDDING_LOOKUP."""
    values, output = g.input(op, 1), g.output(op)
    g.same_quantization(values, output)
    g.set(output, _gathered(g, values, g.input(op, 0), 0))


def _gathered(g: Graph, data: Value, indexes: Value, axis: int) -> str:
    """The slices at indexes. A negative one is illegal for the HAL, and counts from the end for ONNX."""
    name, extent = g.name(indexes), data.shape[axis]
    if indexes.constant is None:
        name = g.index_within(name, extent)
    elif indexes.constant.min() < 0 or indexes.constant.max() >= extent:
        raise Unsupported("an index out of range")
    return g.emit("Gather", [g.name(data), name], axis=axis)


def topk_v2(g: Graph, op: Operation) -> None:
    """TOPK_V2 with a constant k, of the reversed values: of equal ones the HAL names the larger index first, ONNX the smaller."""
    data, values, indexes = g.input(op, 0), g.output(op, 0), g.output(op, 1)
    g.same_quantization(data, values)
    last, extent = data.rank - 1, data.shape[-1]
    name = g.name(data)
    if data.is_quantized:
        name = g.cast(name, "int32")
    elif data.dtype == "int32" and not g.dialect.has_exact_integers:
        raise Unsupported("integers, which the engine sorts as floats")
    turned = reversed_(g, name, last, extent)
    best, places = g.emit_all("TopK", [turned, g.int64s([g.scalar(op, 1)])], 2, axis=last)
    g.set(values, g.cast(best, data.dtype) if data.is_quantized else best)
    g.set(indexes, g.emit("Sub", [g.constant(extent - 1, "int32"), g.cast(places, "int32")]))


RULES: Mapping[OperationType, Rule] = {
    OperationType.RESHAPE: to_shape,
    OperationType.SQUEEZE: to_shape,
    OperationType.EXPAND_DIMS: to_shape,
    OperationType.TRANSPOSE: transpose,
    OperationType.REVERSE: reverse,
    OperationType.CHANNEL_SHUFFLE: channel_shuffle,
    OperationType.SLICE: slice_,
    OperationType.STRIDED_SLICE: strided_slice,
    OperationType.SPLIT: split,
    OperationType.CONCATENATION: concatenation,
    OperationType.PACK: pack,
    OperationType.TILE: tile,
    OperationType.PAD: pad,
    OperationType.PAD_V2: pad,
    OperationType.MIRROR_PAD: mirror_pad,
    OperationType.BATCH_TO_SPACE_ND: batch_to_space_nd,
    OperationType.SPACE_TO_BATCH_ND: space_to_batch_nd,
    OperationType.DEPTH_TO_SPACE: depth_to_space,
    OperationType.SPACE_TO_DEPTH: space_to_depth,
    OperationType.RESIZE_BILINEAR: resize_bilinear,
    OperationType.RESIZE_NEAREST_NEIGHBOR: resize_nearest,
    OperationType.GATHER: gather,
    OperationType.EMBEDDING_LOOKUP: embedding_lookup,
    OperationType.TOPK_V2: topk_v2,
}
