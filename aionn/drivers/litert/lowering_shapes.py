"""Lowering of what moves, cuts, joins, repeats, looks up or resizes.

Source: the contracts in ``aionn.ops``; TensorFlow Lite's kernels for what they accept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.litert.flatbuffer_writer import Array
from aionn.drivers.litert.graph import Graph, Value
from aionn.drivers.litert.lowering_elementwise import reshaped
from aionn.hal import OperandType, Operation, OperationType

__all__ = ["RULES"]

Rule = Callable[[Graph, Operation], None]


def reshape(g: Graph, op: Operation) -> None:
    """RESHAPE; the shape may come from another operation."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    shape = g.input(op, 1)
    values = {} if shape.constant is None else {"newShape": [int(v) for v in shape.constant.reshape(-1)]}
    g.emit("RESHAPE", [data, shape], output, "ReshapeOptions", **values)


def _to_shape(g: Graph, data: Value, output: Value, shape: tuple[int, ...]) -> None:
    g.same_quantization(data, output)
    g.emit("RESHAPE", [data, g.int32s(shape)], output, "ReshapeOptions", newShape=list(shape))


def squeeze(g: Graph, op: Operation) -> None:
    """RESHAPE to the shape without the axes."""
    data = g.input(op, 0)
    shape = g.known(data)
    axes = {a % len(shape) for a in g.integers(op, 1)} if g.has(op, 1) else set(range(len(shape)))
    left = tuple(e for i, e in enumerate(shape) if not (i in axes and e == 1))
    _to_shape(g, data, g.output(op), left or (1,))


def expand_dims(g: Graph, op: Operation) -> None:
    """EXPAND_DIMS."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    g.emit("EXPAND_DIMS", [data, g.int32(g.scalar(op, 1))], output, "ExpandDimsOptions")


def transpose(g: Graph, op: Operation) -> None:
    """TRANSPOSE; without an order a matrix is transposed."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    order = g.input(op, 1) if g.has(op, 1) else g.int32s([1, 0])
    g.emit("TRANSPOSE", [data, order], output, "TransposeOptions")


def reverse(g: Graph, op: Operation) -> None:
    """REVERSE_V2."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    g.emit("REVERSE_V2", [data, g.input(op, 1)], output, "ReverseV2Options")


def fill(g: Graph, op: Operation) -> None:
    """FILL with a constant number."""
    output = g.output(op)
    number = g.constant(np.asarray(g.scalar(op, 1), dtype=output.dtype))
    g.emit("FILL", [g.input(op, 0), number], output, "FillOptions")


def channel_shuffle(g: Graph, op: Operation) -> None:
    """RESHAPE, TRANSPOSE, RESHAPE."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    shape = g.known(data)
    groups, axis = g.scalar(op, 1), g.scalar(op, 2) % len(shape)
    before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    split = reshaped(g, data, (before, groups, shape[axis] // groups, after))
    _to_shape(g, g.transposed(split, (0, 2, 1, 3)), output, shape)


def slice_(g: Graph, op: Operation) -> None:
    """SLICE."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    g.emit("SLICE", [data, g.input(op, 1), g.input(op, 2)], output, "SliceOptions")


def strided_slice(g: Graph, op: Operation) -> None:
    """STRIDED_SLICE; where an axis goes, its one element is taken, and a RESHAPE takes the axis away.

    LiteRT takes the first of any number of elements along such an axis, and its result has rank 0 where no axis is left.
    """
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    begin_mask, end_mask, shrink_mask = (g.scalar(op, position) for position in (4, 5, 6))
    if not shrink_mask:
        g.emit(
            "STRIDED_SLICE", [data, *(g.input(op, i) for i in (1, 2, 3))], output, "StridedSliceOptions",
            beginMask=begin_mask, endMask=end_mask,
        )  # fmt: skip
        return
    shape = g.known(data)
    begins, ends, strides = (g.integers(op, position) for position in (1, 2, 3))
    kept = []
    for axis, extent in enumerate(shape):
        bit = 1 << axis
        if not shrink_mask & bit:
            begin = None if begin_mask & bit else begins[axis]
            end = None if end_mask & bit else ends[axis]
            kept.append(len(range(*slice(begin, end, strides[axis]).indices(extent))))
            continue
        begins[axis] = _only_index(g, op, axis, extent)
        ends[axis], strides[axis] = begins[axis] + 1, 1
        begin_mask, end_mask = begin_mask & ~bit, end_mask & ~bit
    counts = iter(kept)
    taken = [1 if shrink_mask >> axis & 1 else next(counts) for axis in range(len(shape))]
    part = g.like(data, taken)
    g.emit(
        "STRIDED_SLICE", [data, *(g.int32s(v) for v in (begins, ends, strides))], part, "StridedSliceOptions",
        beginMask=begin_mask, endMask=end_mask,
    )  # fmt: skip
    _to_shape(g, part, output, tuple(kept) or (1,))


def _only_index(g: Graph, op: Operation, axis: int, extent: int) -> int:
    """The index of the one element along an axis that goes away."""
    begin, end, stride = (g.integers(op, position)[axis] for position in (1, 2, 3))
    begin_mask, end_mask = (g.scalar(op, position) >> axis & 1 for position in (4, 5))
    is_open = end_mask or (begin, end, begin_mask) == (-1, 0, 0)  # From -1 to 0 is the last element.
    indexes = range(*slice(None if begin_mask else begin, None if is_open else end, stride).indices(extent))
    if stride <= 0 or len(indexes) != 1:
        raise Unsupported("an axis that goes away without having one element")
    return indexes[0]


def split(g: Graph, op: Operation) -> None:
    """SPLIT."""
    data = g.input(op, 0)
    outputs = [g.output(op, i) for i in range(len(op.outputs))]
    g.same_quantization(data, *outputs)
    g.emit("SPLIT", [g.int32(g.scalar(op, 1)), data], outputs, "SplitOptions", numSplits=g.scalar(op, 2))


def concatenation(g: Graph, op: Operation) -> None:
    """CONCATENATION; signed values of other scales are requantised first, unsigned ones by LiteRT's kernel."""
    output = g.output(op)
    parts = [g.input(op, i) for i in range(len(op.inputs) - 1)]
    if output.dtype == "int8":
        parts = [g.requantized(part, output) for part in parts]
    g.emit("CONCATENATION", parts, output, "ConcatenationOptions", axis=g.scalar(op, len(op.inputs) - 1))


def pack(g: Graph, op: Operation) -> None:
    """PACK."""
    parts = [g.input(op, i) for i in range(1, len(op.inputs))]
    output = g.output(op)
    g.same_quantization(*parts, output)
    g.emit("PACK", parts, output, "PackOptions", valuesCount=len(parts), axis=g.scalar(op, 0))


def tile(g: Graph, op: Operation) -> None:
    """TILE."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    g.emit("TILE", [data, g.input(op, 1)], output, "TileOptions")


def pad(g: Graph, op: Operation) -> None:
    """PAD."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    g.emit("PAD", [data, g.input(op, 1)], output, "PadOptions")


def pad_v2(g: Graph, op: Operation) -> None:
    """PADV2 with a constant number."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    number = g.constant(np.asarray(g.scalar(op, 2), dtype=data.dtype), data.quantization)
    g.emit("PADV2", [data, g.input(op, 1), number], output, "PadV2Options")


def mirror_pad(g: Graph, op: Operation) -> None:
    """MIRROR_PAD; the modes have the HAL's numbers."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    g.emit("MIRROR_PAD", [data, g.input(op, 1)], output, "MirrorPadOptions", mode=g.scalar(op, 2))


def batch_to_space_nd(g: Graph, op: Operation) -> None:
    """BATCH_TO_SPACE_ND without crops."""
    blocks = g.input(op, 1)
    crops = g.constant(np.zeros((2, 2), dtype=np.int32))

    def write(data: Value, output: Value) -> None:
        g.same_quantization(data, output)
        g.emit("BATCH_TO_SPACE_ND", [data, blocks, crops], output, "BatchToSpaceNDOptions")

    g.in_nhwc(bool(g.optional(op, 2, False)), g.input(op, 0), g.output(op), write)


def space_to_batch_nd(g: Graph, op: Operation) -> None:
    """SPACE_TO_BATCH_ND."""
    blocks, amounts = g.input(op, 1), g.input(op, 2)

    def write(data: Value, output: Value) -> None:
        g.same_quantization(data, output)
        g.emit("SPACE_TO_BATCH_ND", [data, blocks, amounts], output, "SpaceToBatchNDOptions")

    g.in_nhwc(bool(g.optional(op, 3, False)), g.input(op, 0), g.output(op), write)


def space_depth(name: str, options: str) -> Rule:
    """DEPTH_TO_SPACE, SPACE_TO_DEPTH."""

    def rule(g: Graph, op: Operation) -> None:
        block = g.scalar(op, 1)

        def write(data: Value, output: Value) -> None:
            g.same_quantization(data, output)
            g.emit(name, [data], output, options, blockSize=block)

        g.in_nhwc(bool(g.optional(op, 2, False)), g.input(op, 0), g.output(op), write)

    return rule


def resize(name: str, options: str) -> Rule:
    """RESIZE_BILINEAR, RESIZE_NEAREST_NEIGHBOR to a constant size or by a constant factor."""

    def rule(g: Graph, op: Operation) -> None:
        width, height = g.scalar(op, 1), g.scalar(op, 2)
        is_factor = g.operand(op, 1).type != OperandType.INT32
        flags = {
            "alignCorners": bool(g.optional(op, 4, False)),
            "halfPixelCenters": bool(g.optional(op, 5, False)),
        }

        def write(data: Value, output: Value) -> None:
            g.same_quantization(data, output)
            size = [height, width]
            if is_factor:
                shape = g.known(data)
                size = [math.floor(shape[1] * np.float32(height)), math.floor(shape[2] * np.float32(width))]
            if name == "RESIZE_NEAREST_NEIGHBOR" and data.is_quantized and not any(flags.values()):
                batches, high, wide, depth = g.known(data)
                g.folded.charge(8 * sum(size))
                rows, columns = _nearest(high, size[0]), _nearest(wide, size[1])
                if not (rows[1] and columns[1]):
                    middle = g.like(data, (batches, size[0], wide, depth))
                    g.emit("GATHER", [data, g.constant(rows[0])], middle, "GatherOptions", axis=1)
                    g.emit("GATHER", [middle, g.constant(columns[0])], output, "GatherOptions", axis=2)
                    return
            g.emit(name, [data, g.int32s(size)], output, options, **flags)

        g.in_nhwc(bool(g.optional(op, 3, False)), g.input(op, 0), g.output(op), write)

    return rule


def _nearest(in_extent: int, out_extent: int) -> tuple[Array, bool]:
    """The source index of each output index along an axis, and whether LiteRT's kernel for 8-bit values takes the same.

    It counts in steps of in / out, rounded to the next 1/65536, which run past a pixel's edge in large images.
    """
    places = np.arange(out_extent, dtype=np.int64)
    exact = np.floor(places.astype(np.float32) * (np.float32(in_extent) / np.float32(out_extent)))
    exact = np.minimum(exact.astype(np.int64), in_extent - 1)
    theirs = np.minimum(places * ((in_extent << 16) // out_extent + 1) >> 16, in_extent - 1)
    return exact.astype(np.int32), np.array_equal(exact, theirs)


def gather(g: Graph, op: Operation) -> None:
    """GATHER along a constant axis."""
    data, output = g.input(op, 0), g.output(op)
    g.same_quantization(data, output)
    g.emit("GATHER", [data, g.input(op, 2)], output, "GatherOptions", axis=g.scalar(op, 1))


def embedding_lookup(g: Graph, op: Operation) -> None:
    """EMBEDDING_LOOKUP."""
    values, output = g.input(op, 1), g.output(op)
    g.same_quantization(values, output)
    g.emit("EMBEDDING_LOOKUP", [g.input(op, 0), values], output)


def hashtable_lookup(g: Graph, op: Operation) -> None:
    """HASHTABLE_LOOKUP."""
    g.emit("HASHTABLE_LOOKUP", [g.input(op, i) for i in range(3)], [g.output(op, 0), g.output(op, 1)])


def topk_v2(g: Graph, op: Operation) -> None:
    """TOPK_V2 with a constant k, of the reversed values: of equal ones the HAL names the larger index first, LiteRT the smaller."""
    data, values, indexes = g.input(op, 0), g.output(op, 0), g.output(op, 1)
    g.same_quantization(data, values)
    if g.rank(data) == 0 or not data.shape[-1]:
        raise Unsupported("a last extent that is not known before execution")
    last = g.int32s([len(data.shape) - 1])
    turned, places = g.like(data), g.like(indexes)
    g.emit("REVERSE_V2", [data, last], turned, "ReverseV2Options")
    g.emit("TOPK_V2", [turned, g.int32(g.scalar(op, 1))], [values, places], "TopKV2Options")
    g.emit("SUB", [g.int32(data.shape[-1] - 1), places], indexes, "SubOptions")


def lsh_projection(g: Graph, op: Operation) -> None:
    """LSH_PROJECTION, dense or sparse with offsets, which the schema calls SPARSE (1)."""
    if g.operand(op, 0).type != OperandType.TENSOR_FLOAT32:
        raise Unsupported("hash functions of float16, whose bytes count")
    kinds = {2: 2, 3: 1}
    kind = g.scalar(op, 3)
    if kind not in kinds:
        raise Unsupported("the deprecated sparse form without offsets")
    if g.operand(op, 1).type == OperandType.TENSOR_FLOAT16:
        raise Unsupported("an input of float16, whose bytes count")
    inputs = [g.input(op, 0), g.input(op, 1)]
    if kind == 2:
        inputs.append(g.input(op, 2))
    g.emit("LSH_PROJECTION", inputs, g.output(op), "LSHProjectionOptions", type=kinds[kind])


RULES: Mapping[OperationType, Rule] = {
    OperationType.RESHAPE: reshape,
    OperationType.SQUEEZE: squeeze,
    OperationType.EXPAND_DIMS: expand_dims,
    OperationType.TRANSPOSE: transpose,
    OperationType.REVERSE: reverse,
    OperationType.FILL: fill,
    OperationType.CHANNEL_SHUFFLE: channel_shuffle,
    OperationType.SLICE: slice_,
    OperationType.STRIDED_SLICE: strided_slice,
    OperationType.SPLIT: split,
    OperationType.CONCATENATION: concatenation,
    OperationType.PACK: pack,
    OperationType.TILE: tile,
    OperationType.PAD: pad,
    OperationType.PAD_V2: pad_v2,
    OperationType.MIRROR_PAD: mirror_pad,
    OperationType.BATCH_TO_SPACE_ND: batch_to_space_nd,
    OperationType.SPACE_TO_BATCH_ND: space_to_batch_nd,
    OperationType.DEPTH_TO_SPACE: space_depth("DEPTH_TO_SPACE", "DepthToSpaceOptions"),
    OperationType.SPACE_TO_DEPTH: space_depth("SPACE_TO_DEPTH", "SpaceToDepthOptions"),
    OperationType.RESIZE_BILINEAR: resize("RESIZE_BILINEAR", "ResizeBilinearOptions"),
    OperationType.RESIZE_NEAREST_NEIGHBOR: resize("RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighborOptions"),
    OperationType.GATHER: gather,
    OperationType.EMBEDDING_LOOKUP: embedding_lookup,
    OperationType.HASHTABLE_LOOKUP: hashtable_lookup,
    OperationType.TOPK_V2: topk_v2,
    OperationType.LSH_PROJECTION: lsh_projection,
}
