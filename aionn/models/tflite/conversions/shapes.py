"""Operators that move, cut, join and repeat elements, or choose along an axis.

Owns their HAL forms. Where a value has the output's shape already, nothing is written and the output is the input's operand.

Source: the TensorFlow Lite operators' documentation and reference kernels; the contracts in ``aionn.ops``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aionn.hal import FusedActivation, OperandType, OperationType
from aionn.models.tflite.conversions.elementwise import broadcasted, chain
from aionn.models.tflite.conversions.layers import reduction_axes, with_activation
from aionn.models.tflite.graph import Convert, Inexpressible, SubgraphWriter, is_known
from aionn.models.tflite.schema import ActivationFunctionType, TensorType, TfliteOperator

__all__ = [
    "arg_extremum",
    "axis_of",
    "batch_to_space_nd",
    "concatenation",
    "cumsum",
    "expand_dims",
    "fill",
    "l2_normalization",
    "local_response_normalization",
    "lsh_projection",
    "mirror_pad",
    "one_hot",
    "pack",
    "pad",
    "pad_v2",
    "parts_of",
    "reduce",
    "reshape",
    "resize",
    "reverse",
    "space_depth",
    "space_to_batch_nd",
    "split",
    "split_v",
    "tile",
    "topk_v2",
    "transpose",
    "unpack",
    "zeros_like",
]

PARTS_MAX = 256
"""Most parts that a composition cuts a value into, so that one operator cannot grow the model without bound."""


def axis_of(g: SubgraphWriter, op: TfliteOperator, axis: int, rank: int) -> int:
    """An axis of a rank, counted from the front. Rejects an invalid one."""
    if not -rank <= axis < rank:
        g.refuse(op, "axis", f"{-rank} to {rank - 1}", axis)
    return axis % rank


def reshape(g: SubgraphWriter, op: TfliteOperator) -> None:
    """RESHAPE to the output's shape, to the constant shape, or to the shape that is known only at run time."""
    data = g.input(op, 0)
    described = g.describe_output(op)
    if is_known(described.dimensions) and described.dimensions == g.dimensions(data):
        g.bind(op, 0, data)
        return
    output = g.output(op)
    if is_known(described.dimensions) or not g.has(op, 1):
        g.reshape(data, output)
        return
    shape = g.value_of(op, 1)
    target = g.input(op, 1) if shape is None or shape.size == 0 else g.int32s(shape.reshape(-1))
    g.emit(OperationType.RESHAPE, [data, target], [output])


def expand_dims(g: SubgraphWriter, op: TfliteOperator) -> None:
    """EXPAND_DIMS."""
    data = g.input(op, 0)
    if g.input_tensor(op, 0).dimensions == ():
        # A value of shape [] is one of shape [1] already.
        g.bind(op, 0, data)
        return
    g.emit_to(op, OperationType.EXPAND_DIMS, [data, g.int32(g.integer_of(op, 1, "axis"))])


def transpose(g: SubgraphWriter, op: TfliteOperator) -> None:
    """TRANSPOSE; RESHAPE where only axes of extent 1 move; GATHER of integers."""
    data = g.input(op, 0)
    shape = g.dimensions(data)
    order = g.integers_of(op, 1, "permutation")
    if sorted(order) != list(range(len(shape))):
        g.refuse(op, "input 1 (permutation)", f"a permutation of {len(shape)} axes", order)
    moving = [axis for axis in order if shape[axis] != 1]
    output = g.output(op)
    if moving == sorted(moving) and is_known(g.dimensions(output)):
        g.reshape(data, output)
        return
    if g.type_of(data) == OperandType.TENSOR_INT32:
        _transpose_integers(g, data, order, output)
        return
    g.emit(OperationType.TRANSPOSE, [data, g.int32s(order)], [output])


def _transpose_integers(g: SubgraphWriter, data: int, order: Sequence[int], output: int) -> None:
    """GATHER of all elements in their new order."""
    shape = g.dimensions(data)
    if not is_known(shape):
        raise Inexpressible(f"integers of shape {list(shape)}, of which every extent must be known")
    count = math.prod(shape)
    g.model.check_budget(8 * count)
    places = np.arange(count).reshape(shape).transpose(order).reshape(-1)
    moved = g.like(data, (count,))
    g.emit(OperationType.GATHER, [g.reshaped(data, (count,)), g.int32(0), g.int32s(places)], [moved])
    g.reshape(moved, output)


def split(g: SubgraphWriter, op: TfliteOperator) -> None:
    """SPLIT."""
    data = g.input(op, 1)
    axis = g.int32(g.integer_of(op, 0, "axis"))
    outputs = [g.output(op, position) for position in range(len(op.outputs))]
    g.emit(OperationType.SPLIT, [data, axis, g.int32(len(outputs))], outputs)


def split_v(g: SubgraphWriter, op: TfliteOperator) -> None:
    """A SLICE for each part."""
    data = g.input(op, 0)
    rank = len(g.dimensions(data))
    sizes = g.integers_of(op, 1, "sizes")
    axis = axis_of(g, op, g.integer_of(op, 2, "axis"), rank)
    if len(sizes) != len(op.outputs):
        g.refuse(op, "input 1 (sizes)", f"{len(op.outputs)} sizes", f"{len(sizes)}")
    if sizes.count(-1) == 1:
        extent = g.dimensions(data)[axis]
        if not extent:
            raise Inexpressible("a size of -1 of an unknown extent")
        sizes[sizes.index(-1)] = extent - sum(sizes) - 1
    begin = 0
    for position, size in enumerate(sizes):
        begins, extents = [0] * rank, [-1] * rank
        begins[axis], extents[axis] = begin, size
        g.emit_to(op, OperationType.SLICE, [data, g.int32s(begins), g.int32s(extents)], position)
        begin += size


def unpack(g: SubgraphWriter, op: TfliteOperator) -> None:
    """SPLIT and then RESHAPE of each part."""
    data = g.input(op, 0)
    shape = g.dimensions(data)
    axis = axis_of(g, op, op.integer("UnpackOptions", "axis"), len(shape))
    parts = parts_of(g, data, axis, len(op.outputs))
    for position, part in enumerate(parts):
        wanted = g.describe_output(op, position).dimensions
        if is_known(wanted) and wanted == g.dimensions(part):
            g.bind(op, position, part)
        else:
            g.reshape(part, g.output(op, position))


def parts_of(g: SubgraphWriter, data: int, axis: int, count: int) -> list[int]:
    """The value cut into parts of extent 1 along an axis."""
    if count > PARTS_MAX:
        raise Inexpressible(f"{count} parts, more than {PARTS_MAX}")
    shape = g.dimensions(data)
    if shape[axis] not in (0, count):
        raise Inexpressible(f"{count} parts of shape {list(shape)} along axis {axis}")
    if count == 1 and shape[axis] == 1:
        return [data]
    operand = g.operands[data]
    if operand.is_constant:
        kind = OperandType(operand.type)
        return [
            g.constant(kind, part, scale=operand.scale, zero_point=operand.zero_point)
            for part in np.split(g.model.value(operand), count, axis)
        ]
    part_shape = (*shape[:axis], 1, *shape[axis + 1 :])
    parts = [g.like(data, part_shape) for _ in range(count)]
    g.emit(OperationType.SPLIT, [data, g.int32(axis), g.int32(count)], parts)
    return parts


def pack(g: SubgraphWriter, op: TfliteOperator) -> None:
    """PACK; of single numbers without a rank, the list that PACK makes with one axis less."""
    inputs = g.inputs(op)
    axis = op.integer("PackOptions", "axis")
    if g.input_tensor(op, 0).dimensions == ():
        output = g.output(op)
        packed = g.like(output, (len(inputs), 1))
        g.emit(OperationType.PACK, [g.int32(0), *inputs], [packed])
        g.reshape(packed, output)
        return
    rank = len(g.dimensions(inputs[0])) if inputs else 0
    g.emit_to(op, OperationType.PACK, [g.int32(axis_of(g, op, axis, rank + 1)), *inputs])


def concatenation(g: SubgraphWriter, op: TfliteOperator) -> None:
    """CONCATENATION; of integers and booleans PACK of parts of extent 1, and RESHAPE."""
    table = "ConcatenationOptions"
    inputs = g.inputs(op)
    output = g.output(op)
    axis = axis_of(g, op, op.integer(table, "axis"), len(g.dimensions(output)))

    def emit(target: int, activation: int) -> None:
        if g.type_of(target) == OperandType.TENSOR_INT32:
            _pack_parts(g, op, inputs, axis, target)
        elif activation:
            raw = g.like(target)
            g.emit(OperationType.CONCATENATION, [*inputs, g.int32(axis)], [raw])
            g.emit(_ACTIVATIONS[ActivationFunctionType(activation)], [raw], [target])
        else:
            g.emit(OperationType.CONCATENATION, [*inputs, g.int32(axis)], [target])

    with_activation(g, op, table, output, emit)


_ACTIVATIONS = {
    ActivationFunctionType.RELU: OperationType.RELU,
    ActivationFunctionType.RELU_N1_TO_1: OperationType.RELU1,
    ActivationFunctionType.RELU6: OperationType.RELU6,
}


def _pack_parts(g: SubgraphWriter, op: TfliteOperator, inputs: Sequence[int], axis: int, target: int) -> None:
    parts: list[int] = []
    for index in inputs:
        shape = g.dimensions(index)
        if len(shape) <= axis or not is_known(shape):
            raise Inexpressible(f"integers of shape {list(shape)} in a concatenation")
        if len(parts) + shape[axis] > PARTS_MAX:
            raise Inexpressible(f"integers in more than {PARTS_MAX} parts")
        parts += parts_of(g, index, axis, shape[axis])
    if not parts:
        g.refuse(op, "inputs", "at least one", "none")
    shape = g.dimensions(parts[0])
    packed = g.like(target, (*shape[:axis], len(parts), *shape[axis:]))
    g.emit(OperationType.PACK, [g.int32(axis), *parts], [packed])
    g.reshape(packed, target)


def tile(g: SubgraphWriter, op: TfliteOperator) -> None:
    """TILE."""
    g.emit_to(op, OperationType.TILE, [g.input(op, 0), g.input(op, 1)])


def reverse(g: SubgraphWriter, op: TfliteOperator) -> None:
    """A REVERSE for each axis."""
    data = g.input(op, 0)
    rank = len(g.dimensions(data))
    axes = [axis_of(g, op, axis, rank) for axis in g.integers_of(op, 1, "axes")]
    if not axes or len(axes) > rank:
        raise Inexpressible(f"{len(axes)} axes")
    output = g.output(op)
    for position, axis in enumerate(axes):
        target = output if position == len(axes) - 1 else g.like(data)
        g.emit(OperationType.REVERSE, [data, g.int32s([axis])], [target])
        data = target


def pad(g: SubgraphWriter, op: TfliteOperator) -> None:
    """PAD."""
    g.emit_to(op, OperationType.PAD, [g.input(op, 0), g.input(op, 1)])


def pad_v2(g: SubgraphWriter, op: TfliteOperator) -> None:
    """PAD_V2; the value must be a constant."""
    data = g.input(op, 0)
    value = g.value_of(op, 2)
    if value is None or value.size != 1:
        raise Inexpressible("input 2 (value) must be a constant number")
    number = value.reshape(()).item()
    tensor = g.input_tensor(op, 2)
    if tensor.type == TensorType.INT16 and tensor.scales:
        number *= tensor.scales[0]
    quantized = g.is_quantized(data)
    if quantized:
        a, b = g.operands[data], g.operands[g.input(op, 2)]
        if (a.scale, a.zero_point) != (b.scale, b.zero_point):
            raise Inexpressible("a value with another scale")
    fill_value = g.int32(int(number)) if quantized else g.real(number, data)
    g.emit_to(op, OperationType.PAD_V2, [data, g.input(op, 1), fill_value])


def mirror_pad(g: SubgraphWriter, op: TfliteOperator) -> None:
    """MIRROR_PAD; the modes have the HAL's numbers."""
    mode = g.int32(op.integer("MirrorPadOptions", "mode"))
    g.emit_to(op, OperationType.MIRROR_PAD, [g.input(op, 0), g.input(op, 1), mode])


def space_depth(kind: OperationType, table: str) -> Convert:
    """SPACE_TO_DEPTH or DEPTH_TO_SPACE."""

    def convert(g: SubgraphWriter, op: TfliteOperator) -> None:
        g.emit_to(op, kind, [g.input(op, 0), g.int32(op.integer(table, "block_size"))])

    return convert


def space_to_batch_nd(g: SubgraphWriter, op: TfliteOperator) -> None:
    """SPACE_TO_BATCH_ND."""
    g.emit_to(op, OperationType.SPACE_TO_BATCH_ND, [g.input(op, p) for p in range(3)])


def batch_to_space_nd(g: SubgraphWriter, op: TfliteOperator) -> None:
    """BATCH_TO_SPACE_ND, and SLICE for the crops."""
    data = g.input(op, 0)
    blocks = g.integers_of(op, 1, "block shape")
    crops = g.integers_of(op, 2, "crops")
    output = g.output(op)
    if not any(crops):
        g.emit(OperationType.BATCH_TO_SPACE_ND, [data, g.int32s(blocks)], [output])
        return
    shape, wanted = g.dimensions(data), g.dimensions(output)
    if len(blocks) != 2 or len(crops) != 4 or len(shape) != 4 or not (is_known(shape) and is_known(wanted)):
        raise Inexpressible(f"crops with shape {list(shape)}")
    if min(blocks) < 1 or shape[0] % (blocks[0] * blocks[1]):
        g.refuse(op, "input 1 (block shape)", f"blocks that divide {shape[0]} batches", blocks)
    whole = g.like(
        data,
        (shape[0] // (blocks[0] * blocks[1]), shape[1] * blocks[0], shape[2] * blocks[1], shape[3]),
    )
    g.emit(OperationType.BATCH_TO_SPACE_ND, [data, g.int32s(blocks)], [whole])
    begins = [0, crops[0], crops[2], 0]
    g.emit(OperationType.SLICE, [whole, g.int32s(begins), g.int32s(wanted)], [output])


def resize(kind: OperationType, table: str) -> Convert:
    """RESIZE_BILINEAR or RESIZE_NEAREST_NEIGHBOR to a constant size."""

    def convert(g: SubgraphWriter, op: TfliteOperator) -> None:
        if g.value_of(op, 1) is None:
            raise Inexpressible(
                "a size that is known at run time only: no operation makes a number of a tensor"
            )
        size = g.integers_of(op, 1, "size")
        if len(size) != 2:
            g.refuse(op, "input 1 (size)", "height and width", f"{len(size)} numbers")
        flags = [g.boolean(bool(op.integer(table, n))) for n in ("align_corners", "half_pixel_centers")]
        g.emit_to(op, kind, [g.input(op, 0), g.int32(size[1]), g.int32(size[0]), g.boolean(False), *flags])

    return convert


def reduce(kind: OperationType) -> Convert:
    """REDUCE_MAX, REDUCE_MIN, REDUCE_PROD, REDUCE_ALL or REDUCE_ANY along constant axes."""

    def convert(g: SubgraphWriter, op: TfliteOperator) -> None:
        data = g.input(op, 0)
        axes = reduction_axes(g, op, len(g.dimensions(data)))
        keep = bool(op.integer("ReducerOptions", "keep_dims"))
        if not axes:
            g.emit_to(op, OperationType.CAST, [data])
            return
        g.emit_to(op, kind, [data, g.int32s(axes), g.boolean(keep)])

    return convert


def arg_extremum(kind: OperationType) -> Convert:
    """ARGMAX or ARGMIN along a constant axis."""

    def convert(g: SubgraphWriter, op: TfliteOperator) -> None:
        g.emit_to(op, kind, [g.input(op, 0), g.int32(g.integer_of(op, 1, "axis"))])

    return convert


def topk_v2(g: SubgraphWriter, op: TfliteOperator) -> None:
    """TOPK_V2 with a constant k, of the reversed values: of equal ones the file names the smaller index first, the HAL the larger.

    Where the last extent is not known, the values stay as they are and equal ones have the HAL's order.
    """
    count = g.int32(g.integer_of(op, 1, "k"))
    data, values, indexes = g.input(op, 0), g.output(op, 0), g.output(op, 1)
    shape = g.dimensions(data)
    if not shape or not shape[-1]:
        g.emit(OperationType.TOPK_V2, [data, count], [values, indexes])
        return
    turned, places = g.like(data), g.like(indexes)
    g.emit(OperationType.REVERSE, [data, g.int32s([len(shape) - 1])], [turned])
    g.emit(OperationType.TOPK_V2, [turned, count], [values, places])
    g.emit(OperationType.SUB, [g.int32s([shape[-1] - 1]), places, g.int32(FusedActivation.NONE)], [indexes])


def l2_normalization(g: SubgraphWriter, op: TfliteOperator) -> None:
    """L2_NORMALIZATION along the last axis."""
    data = g.input(op, 0)

    def emit(target: int, activation: int) -> None:
        if activation:
            raise Inexpressible(f"fused activation {activation}")
        g.emit(OperationType.L2_NORMALIZATION, [data], [target])

    with_activation(g, op, "L2NormOptions", g.output(op), emit)


def local_response_normalization(g: SubgraphWriter, op: TfliteOperator) -> None:
    """LOCAL_RESPONSE_NORMALIZATION along the last axis."""
    table = "LocalResponseNormalizationOptions"
    data = g.input(op, 0)
    numbers = [g.real(op.option(table, name), data) for name in ("bias", "alpha", "beta")]
    radius = g.int32(op.integer(table, "radius"))
    g.emit_to(op, OperationType.LOCAL_RESPONSE_NORMALIZATION, [data, radius, *numbers])


def lsh_projection(g: SubgraphWriter, op: TfliteOperator) -> None:
    """LSH_PROJECTION; the file's SPARSE (1) is the HAL's 3, which also adds the offset of each hash."""
    kinds = {1: 3, 2: 2}
    kind = op.integer("LSHProjectionOptions", "type")
    if kind not in kinds:
        g.refuse(op, "type", "1 (SPARSE) or 2 (DENSE)", kind)
    weight = g.input(op, 2) if g.has(op, 2) else g.omitted(OperandType.TENSOR_FLOAT32)
    inputs = [g.input(op, 0), g.input(op, 1), weight, g.int32(kinds[kind])]
    g.emit_to(op, OperationType.LSH_PROJECTION, inputs)


def cumsum(g: SubgraphWriter, op: TfliteOperator) -> None:
    """SPLIT, a chain of ADDs in the reference kernel's order, and CONCATENATION (PACK and RESHAPE of integers)."""
    table = "CumsumOptions"
    data = g.input(op, 0)
    shape = g.dimensions(data)
    if g.is_quantized(data) or not is_known(shape):
        raise Inexpressible(f"a running sum of shape {list(shape)} of {OperandType(g.type_of(data)).name}")
    axis = axis_of(g, op, g.integer_of(op, 1, "axis"), len(shape))
    parts = parts_of(g, data, axis, shape[axis])
    if op.integer(table, "reverse"):
        parts.reverse()
    if op.integer(table, "exclusive"):
        zeros = g.zeros(OperandType(g.type_of(data)), g.dimensions(parts[0]))
        parts = [zeros, *parts[:-1]]
    sums = chain(g, OperationType.ADD, parts)
    if op.integer(table, "reverse"):
        sums.reverse()
    output = g.output(op)
    if g.type_of(data) == OperandType.TENSOR_INT32:
        _pack_parts(g, op, sums, axis, output)
    elif len(sums) == 1:
        g.emit(OperationType.CAST, sums, [output])
    else:
        g.emit(OperationType.CONCATENATION, [*sums, g.int32(axis)], [output])


def fill(g: SubgraphWriter, op: TfliteOperator) -> None:
    """A constant where shape and value are; else FILL, whose value must be a constant."""
    value = g.value_of(op, 1)
    if value is None or value.size != 1:
        raise Inexpressible("input 1 (value) must be a constant number")
    described = g.describe_output(op)
    kind, number = OperandType(described.type), value.reshape(()).item()
    if is_known(described.dimensions):
        g.bind(
            op,
            0,
            g.full(
                kind, described.dimensions, number, scale=described.scale, zero_point=described.zero_point
            ),
        )
        return
    output = g.output(op)
    scalar = g.int32(int(number)) if kind == OperandType.TENSOR_INT32 else g.real(number, output)
    g.emit(OperationType.FILL, [g.input(op, 0), scalar], [output])


def zeros_like(g: SubgraphWriter, op: TfliteOperator) -> None:
    """A constant; the shape must be known."""
    operand = g.operands[g.input(op, 0)]
    kind = OperandType(operand.type)
    g.bind(op, 0, g.zeros(kind, operand.dimensions, scale=operand.scale, zero_point=operand.zero_point))


def one_hot(g: SubgraphWriter, op: TfliteOperator) -> None:
    """EQUAL with 0, 1, 2 ... along the new axis, and SELECT between the two constant values."""
    indices = g.input(op, 0)
    output = g.output(op)
    shape = g.dimensions(output)
    if not is_known(shape):
        raise Inexpressible("the output's shape must be known")
    rank = len(shape)
    axis = axis_of(g, op, op.integer("OneHotOptions", "axis"), rank)
    depth = g.integer_of(op, 1, "depth")
    if depth != shape[axis]:
        g.refuse(op, "input 1 (depth)", shape[axis], depth)
    g.model.check_budget(8 * depth)
    steps = np.arange(depth).reshape([depth if i == axis else 1 for i in range(rank)])
    if rank > 1:
        wide = g.like(indices, (*shape[:axis], 1, *shape[axis + 1 :]))
        g.emit(OperationType.EXPAND_DIMS, [indices, g.int32(axis)], [wide])
        indices = wide
    is_here = g.temporary(OperandType.TENSOR_BOOL8, shape)
    g.emit(OperationType.EQUAL, [indices, g.int32s(steps)], [is_here])
    on, off = (broadcasted(g, g.input(op, position), shape) for position in (2, 3))
    g.emit(OperationType.SELECT, [is_here, on, off], [output])
