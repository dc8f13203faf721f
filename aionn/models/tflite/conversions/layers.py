"""Layers with weights, pooling, means and changes of quantisation: the operators whose HAL form depends on the quantisation.

Owns how their arguments become HAL arguments, and the exact integer compositions where the HAL has no direct form:
a mean whose output has another scale, a fully connected layer with scales per channel, and a change of scale between integers.

Invariant: for integer types the compositions compute the same sums and the same fixed-point multiplication as TensorFlow Lite's
reference kernels.

Source: the TensorFlow Lite operators' documentation and reference kernels; the contracts in ``aionn.ops``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from aionn.hal import ChannelQuant, FusedActivation, Operand, OperandType, OperationType, Padding
from aionn.hal.windows import Window, window_values
from aionn.models.tflite.graph import (
    OPERAND_RANK_MAX,
    Convert,
    Inexpressible,
    Shape,
    SubgraphWriter,
    is_known,
    stored_shape,
)
from aionn.models.tflite.rounding import MeanFilter, mean_filter, plain_filter
from aionn.models.tflite.schema import ActivationFunctionType, TensorType, TfliteOperator
from aionn.models.tflite.tables import OPTIONS

__all__ = [
    "average_pool_2d",
    "batch_matmul",
    "conv_2d",
    "depthwise_conv_2d",
    "dequantize",
    "fully_connected",
    "pool_2d",
    "quantize",
    "reduce_mean",
    "reduce_sum",
    "reduction_axes",
    "requantize_to",
    "slide",
    "transpose_conv",
    "window_of",
    "with_activation",
]

_ACTIVATION = "fused_activation_function"

_FLOAT_RANGE = (float(np.finfo(np.float32).min), float(np.finfo(np.float32).max))

UNITS_MAX = 64
"""Most units that become operations of their own; a larger layer becomes one convolution, whose results may be one step apart."""


def window_of(g: SubgraphWriter, op: TfliteOperator, table: str, extra: Sequence[int] = ()) -> Window:
    """The window of an operator's options, without an activation; a kind of options that has no dilations has 1, 1."""
    # The file counts SAME and VALID from 0, the HAL from 1.
    code = op.integer(table, "padding") + 1
    if code not in tuple(Padding):
        g.refuse(op, "padding", "0 (SAME) or 1 (VALID)", code - 1)
    has_dilation = "dilation_w_factor" in OPTIONS[table][1]
    return Window(
        scheme=Padding(code),
        strides=(op.integer(table, "stride_w"), op.integer(table, "stride_h")),
        extra=tuple(extra),
        dilations=(op.integer(table, "dilation_w_factor"), op.integer(table, "dilation_h_factor"))
        if has_dilation
        else (1, 1),
    )


def slide(
    g: SubgraphWriter,
    op: TfliteOperator,
    table: str,
    kind: OperationType,
    inputs: Sequence[int],
    window: Window,
    output: int,
) -> None:
    """Writes a HAL operation with its window arguments and the operator's fused activation.

    Args:
        g: Where to.
        op: Has the activation among its options.
        table: Its kind of options.
        kind: The HAL's operation.
        inputs: The operands before the window arguments.
        window: The values of these.
        output: Where the activated result goes.
    """

    def emit(target: int, activation: int) -> None:
        values = window_values(kind, window._replace(activation=activation))
        arguments = [g.boolean(v) if isinstance(v, bool) else g.int32(v) for v in values]
        g.emit(kind, [*inputs, *arguments], [target])

    with_activation(g, op, table, output, emit)


def with_activation(
    g: SubgraphWriter,
    op: TfliteOperator,
    table: str,
    output: int,
    emit: Callable[[int, int], None],
) -> None:
    """Writes an operation with the operator's fused activation.

    Args:
        g: Where to.
        op: Has the activation among its options.
        table: Its kind of options.
        output: Where the activated result goes.
        emit: Writes the operation to an operand with a HAL activation code.
    """
    activation = op.integer(table, _ACTIVATION)
    if activation in tuple(FusedActivation):
        emit(output, activation)
    elif activation == ActivationFunctionType.TANH and not g.is_quantized(output):
        raw = g.like(output)
        emit(raw, FusedActivation.NONE)
        g.emit(OperationType.TANH, [raw], [output])
    else:
        raise Inexpressible(f"fused activation {activation}")


def _weights(g: SubgraphWriter, op: TfliteOperator, position: int, data: int) -> int:
    """The operand of weights; weights of a smaller type than float data become floats first."""
    index = g.input(op, position)
    operand = g.operands[index]
    if g.type_of(data) != OperandType.TENSOR_FLOAT32 or operand.type == OperandType.TENSOR_FLOAT32:
        return index
    floats = g.temporary(OperandType.TENSOR_FLOAT32, operand.dimensions)
    half = operand.type == OperandType.TENSOR_FLOAT16
    g.emit(OperationType.CAST if half else OperationType.DEQUANTIZE, [index], [floats])
    return floats


def _bias(g: SubgraphWriter, op: TfliteOperator, position: int, data: int, weights: int, count: int) -> int:
    """The operand of a bias with ``count`` entries; zeros where the operator has none."""
    operand, filter_ = g.operands[data], g.operands[weights]
    is_float = not g.is_quantized(data)
    kind = OperandType(operand.type) if is_float else OperandType.TENSOR_INT32
    # float32 arithmetic, as all checks of it compute it; 0 where the filter has scales per channel.
    scale = 0.0 if is_float else float(np.float32(operand.scale) * np.float32(filter_.scale))
    if not g.has(op, position):
        return g.zeros(kind, (count,), scale=scale)
    tensor = g.input_tensor(op, position)
    if is_float and tensor.scales and tensor.type in (TensorType.INT32, TensorType.INT64):
        # The bias of 16-bit activations, which are floats here.
        stored = g.value_of(op, position)
        if stored is None:
            raise Inexpressible("a bias of whole numbers must be a constant")
        if stored.ndim != 1:
            g.refuse(op, f"input {position}", "a bias of rank 1", f"shape {list(stored.shape)}")
        with np.errstate(over="ignore"):
            reals = (stored.astype(np.float64) * np.array(tensor.scales)).astype(np.float32)
        return g.constant(kind, reals)
    if is_float:
        return _weights(g, op, position, data)
    if tensor.type != TensorType.INT32:
        raise Inexpressible(f"a bias of type {tensor.type.name}")
    return g.constant_view(tensor, Operand(kind, tensor.shape, scale))


def conv_2d(g: SubgraphWriter, op: TfliteOperator) -> None:
    """CONV_2D, or GROUPED_CONV_2D where the filter has fewer channels than the input."""
    table = "Conv2DOptions"
    data = g.input(op, 0)
    filter_ = _weights(g, op, 1, data)
    _check_channel_axis(g, filter_, 0)
    in_shape, filter_shape = g.dimensions(data), g.dimensions(filter_)
    _check_rank(g, op, 4, data, filter_)
    bias = _bias(g, op, 2, data, filter_, filter_shape[0])
    window = window_of(g, op, table)
    kind = OperationType.CONV_2D
    groups = in_shape[3] // filter_shape[3] if in_shape[3] and filter_shape[3] else 1
    if groups > 1:
        if window.dilations != (1, 1):
            raise Inexpressible("a grouped convolution with dilation")
        kind, window = OperationType.GROUPED_CONV_2D, window._replace(extra=(groups,))
    slide(g, op, table, kind, [data, filter_, bias], window, g.output(op))


def depthwise_conv_2d(g: SubgraphWriter, op: TfliteOperator) -> None:
    """DEPTHWISE_CONV_2D; the depth multiplier follows from the shapes, as in TensorFlow Lite's kernels."""
    table = "DepthwiseConv2DOptions"
    data = g.input(op, 0)
    filter_ = _weights(g, op, 1, data)
    _check_channel_axis(g, filter_, 3)
    _check_rank(g, op, 4, data, filter_)
    depth_in, depth_out = g.dimensions(data)[3], g.dimensions(filter_)[3]
    if not depth_in or depth_out % depth_in:
        g.refuse(op, "input 1", f"a multiple of {depth_in} channels", f"shape {list(g.dimensions(filter_))}")
    bias = _bias(g, op, 2, data, filter_, depth_out)
    window = window_of(g, op, table, (depth_out // depth_in,))
    slide(g, op, table, OperationType.DEPTHWISE_CONV_2D, [data, filter_, bias], window, g.output(op))


def _check_channel_axis(g: SubgraphWriter, filter_: int, axis: int) -> None:
    quant = g.operands[filter_].channel_quant
    if quant is not None and quant.channel_dim != axis:
        raise Inexpressible(f"filter scales along axis {quant.channel_dim} instead of {axis}")


def _check_rank(g: SubgraphWriter, op: TfliteOperator, rank: int, *operands: int) -> None:
    for position, index in enumerate(operands):
        if len(g.dimensions(index)) != rank:
            g.refuse(op, f"input {position}", f"rank {rank}", f"shape {list(g.dimensions(index))}")


def transpose_conv(g: SubgraphWriter, op: TfliteOperator) -> None:
    """TRANSPOSE_CONV_2D in its form with implicit padding; the output's shape must be known."""
    table = "TransposeConvOptions"
    data = g.input(op, 2)
    filter_ = _weights(g, op, 1, data)
    _check_channel_axis(g, filter_, 0)
    output = g.output(op)
    shape: Sequence[int] = g.dimensions(output)
    if not is_known(tuple(shape)):
        shape = g.integers_of(op, 0, "output shape")
    bias = _bias(g, op, 3, data, filter_, g.dimensions(filter_)[0])
    inputs = [data, filter_, bias, g.int32s(shape)]
    slide(g, op, table, OperationType.TRANSPOSE_CONV_2D, inputs, window_of(g, op, table), output)


def pool_2d(kind: OperationType) -> Convert:
    """AVERAGE_POOL_2D, MAX_POOL_2D or L2_POOL_2D with implicit padding."""

    def convert(g: SubgraphWriter, op: TfliteOperator) -> None:
        table = "Pool2DOptions"
        size = [op.integer(table, name) for name in ("filter_width", "filter_height")]
        window = window_of(g, op, table, size)
        slide(g, op, table, kind, [g.input(op, 0)], window, g.output(op))

    return convert


average_pool_2d = pool_2d(OperationType.AVERAGE_POOL_2D)


def fully_connected(g: SubgraphWriter, op: TfliteOperator) -> None:
    """FULLY_CONNECTED; one for each unit where the weights have scales per channel, which the HAL has for convolutions alone."""
    table = "FullyConnectedOptions"
    if op.integer(table, "weights_format"):
        raise Inexpressible("shuffled weights")
    data = g.input(op, 0)
    weights = _weights(g, op, 1, data)
    shape = g.dimensions(weights)
    if len(shape) != 2 or not is_known(shape):
        g.refuse(op, "input 1", "a matrix of weights", f"shape {list(shape)}")
    units, depth = shape
    output = g.output(op)
    if g.operands[weights].channel_quant is not None:
        if units <= UNITS_MAX:
            _fully_connected_by_units(g, op, table, data, output, (units, depth))
        else:
            _fully_connected_per_channel(g, op, table, data, output, (units, depth))
        return
    bias = _bias(g, op, 2, data, weights, units)
    if len(g.dimensions(data)) < 2:
        data = g.reshaped(data, (-1, depth))

    def emit(target: int, activation: int) -> None:
        out_shape = g.dimensions(target)
        if len(out_shape) == 2:
            g.emit(OperationType.FULLY_CONNECTED, [data, weights, bias, g.int32(activation)], [target])
            return
        batch = math.prod(out_shape[:-1])
        matrix = g.like(target, (batch, units))
        g.emit(OperationType.FULLY_CONNECTED, [data, weights, bias, g.int32(activation)], [matrix])
        g.reshape(matrix, target)

    with_activation(g, op, table, output, emit)


def _unit_scales(g: SubgraphWriter, op: TfliteOperator) -> ChannelQuant:
    quant = g.describe(g.input_tensor(op, 1)).channel_quant
    assert quant is not None, "the caller looked"
    if quant.channel_dim != 0:
        raise Inexpressible(f"weight scales along axis {quant.channel_dim} instead of 0")
    return quant


def _fully_connected_by_units(
    g: SubgraphWriter, op: TfliteOperator, table: str, data: int, output: int, shape: tuple[int, int]
) -> None:
    """A FULLY_CONNECTED for each unit, with the unit's scale, side by side: rounded once, as the operator is."""
    units, depth = shape
    scales = _unit_scales(g, op).scales
    if g.has(op, 2) and g.input_tensor(op, 2).type != TensorType.INT32:
        raise Inexpressible(f"a bias of type {g.input_tensor(op, 2).type.name}")
    weights = g.value_of(op, 1)
    biases = g.value_of(op, 2) if g.has(op, 2) else np.zeros(units, np.int32)
    if weights is None or biases is None:
        raise Inexpressible("weights and a bias per channel must be constants")
    if biases.shape != (units,):
        g.refuse(op, "input 2", f"shape {[units]}", f"shape {list(biases.shape)}")
    if len(g.dimensions(data)) < 2:
        data = g.reshaped(data, (-1, depth))
    data_scale = np.float32(g.operands[data].scale)

    def emit(target: int, activation: int) -> None:
        out_shape = g.dimensions(target)
        batch = out_shape[0] if len(out_shape) == 2 else math.prod(out_shape[:-1])
        columns = []
        for unit, scale in enumerate(scales):
            row = g.constant(OperandType.TENSOR_QUANT8_ASYMM_SIGNED, weights[unit : unit + 1], scale=scale)
            bias_scale = float(data_scale * np.float32(scale))
            bias = g.constant(OperandType.TENSOR_INT32, biases[unit : unit + 1], scale=bias_scale)
            columns.append(g.like(target, (batch, 1)))
            arguments = [data, row, bias, g.int32(activation)]
            g.emit(OperationType.FULLY_CONNECTED, arguments, [columns[-1]])
        matrix = target if len(out_shape) == 2 else g.like(target, (batch, units))
        g.emit(OperationType.CONCATENATION, [*columns, g.int32(1)], [matrix])
        if matrix != target:
            g.reshape(matrix, target)

    with_activation(g, op, table, output, emit)


def _fully_connected_per_channel(
    g: SubgraphWriter, op: TfliteOperator, table: str, data: int, output: int, shape: tuple[int, int]
) -> None:
    """A 1 x 1 CONV_2D: two roundings, so that results may be one step apart, but a single operation for any number of units."""
    units, depth = shape
    tensor = g.input_tensor(op, 1)
    quant = _unit_scales(g, op)
    described = Operand(
        OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL,
        (units, 1, 1, depth),
        channel_quant=ChannelQuant(quant.scales, 0),
    )
    filter_ = g.constant_view(tensor, described)
    bias = _bias(g, op, 2, data, filter_, units)
    pixels = g.reshaped(data, (-1, 1, 1, depth))
    one, valid = g.int32(1), g.int32(Padding.VALID)

    def emit(target: int, activation: int) -> None:
        wide = g.like(target, (g.dimensions(pixels)[0], 1, 1, units))
        g.emit(OperationType.CONV_2D, [pixels, filter_, bias, valid, one, one, g.int32(activation)], [wide])
        g.reshape(wide, target)

    with_activation(g, op, table, output, emit)


def batch_matmul(g: SubgraphWriter, op: TfliteOperator) -> None:
    """BATCH_MATMUL; with RESHAPE and GATHER where the ranks or the batches of both sides differ, or have more than four axes."""
    table = "BatchMatMulOptions"
    flags = [op.integer(table, name) for name in ("adj_x", "adj_y")]
    data = g.input(op, 0)
    sides = [data, _weights(g, op, 1, data)]
    shapes = [g.input_tensor(op, position).dimensions for position in (0, 1)]
    if len(shapes[0]) == len(shapes[1]) <= OPERAND_RANK_MAX and shapes[0][:-2] == shapes[1][:-2]:
        g.emit_to(op, OperationType.BATCH_MATMUL, [*sides, *(g.boolean(bool(flag)) for flag in flags)])
        return
    # An open extent of the file may be known here, but not of a stored shape with other axes.
    shapes = [
        g.dimensions(side) if len(shape) <= OPERAND_RANK_MAX else shape
        for side, shape in zip(sides, shapes, strict=True)
    ]
    if not all(is_known(shape) and len(shape) >= 2 for shape in shapes):
        raise Inexpressible(f"matrices of shapes {[list(shape) for shape in shapes]}")
    try:
        batch = np.broadcast_shapes(shapes[0][:-2], shapes[1][:-2])
    except ValueError:
        g.refuse(op, "inputs", "batches that repeat to each other", [list(shape) for shape in shapes])
    count = math.prod(batch)
    matrices = [s[-2:][::-1] if flag else s[-2:] for s, flag in zip(shapes, flags, strict=True)]
    rows, columns = matrices[0][0], matrices[1][1]
    if math.prod(shapes[1][:-2]) == 1 and not flags[0]:
        # The same right side for every batch: its rows are those of one matrix.
        sides = [
            g.reshaped(sides[0], (count * rows, shapes[0][-1])),
            g.reshaped(sides[1], shapes[1][-2:]),
        ]
        found: Shape = (count * rows, columns)
    else:
        sides = [_repeated(g, side, shape, batch) for side, shape in zip(sides, shapes, strict=True)]
        found = (count, rows, columns)
    output = g.describe_output(op)
    product = g.add(msgspec.structs.replace(output, dimensions=found))
    g.emit(OperationType.BATCH_MATMUL, [*sides, *(g.boolean(bool(flag)) for flag in flags)], [product])
    g.bind(op, 0, g.reshaped(product, stored_shape((*batch, rows, columns))))


def _repeated(g: SubgraphWriter, side: int, shape: Shape, batch: Shape) -> int:
    """Matrices of every batch, ``[count, rows, columns]``, repeated over the axes of the batch that they lack."""
    rest = shape[-2:]
    value = g.reshaped(side, (math.prod(shape[:-2]), *rest))
    own = (1,) * (len(batch) - len(shape[:-2])) + shape[:-2]
    if own == batch:
        return value
    g.model.check_budget(8 * math.prod(batch))
    places = np.broadcast_to(np.arange(math.prod(own)).reshape(own), batch).reshape(-1)
    wide = g.like(value, (len(places), *rest))
    g.emit(OperationType.GATHER, [value, g.int32(0), g.int32s(places)], [wide])
    return wide


def reduce_mean(g: SubgraphWriter, op: TfliteOperator) -> None:
    """MEAN; a DEPTHWISE_CONV_2D with a filter of ones where the output has another scale, which the HAL's MEAN forbids."""
    _reduce(g, op, OperationType.MEAN)


def reduce_sum(g: SubgraphWriter, op: TfliteOperator) -> None:
    """REDUCE_SUM of floats; of 8-bit integers a DEPTHWISE_CONV_2D with a filter of ones."""
    _reduce(g, op, OperationType.REDUCE_SUM)


def _reduce(g: SubgraphWriter, op: TfliteOperator, kind: OperationType) -> None:
    is_mean = kind == OperationType.MEAN
    data = g.input(op, 0)
    rank = len(g.dimensions(data))
    axes = reduction_axes(g, op, rank)
    keep = bool(op.integer("ReducerOptions", "keep_dims"))
    output = g.output(op)
    if not axes:
        g.emit(OperationType.CAST, [data], [output])
        return
    a, b = g.operands[data], g.operands[output]
    if a.type != b.type:
        raise Inexpressible("a result of another type than the input's")
    is_same = (a.scale, a.zero_point) == (b.scale, b.zero_point)
    if not g.is_quantized(data) or (is_mean and is_same):
        flag = g.int32(int(keep)) if is_mean else g.boolean(keep)
        g.emit(kind, [data, g.int32s(axes), flag], [output])
        return
    if axes != list(range(axes[0], axes[0] + len(axes))):
        raise Inexpressible(f"a change of scale over the axes {axes}, which are not neighbours")
    shape = g.dimensions(data)
    if 0 in shape[axes[0] :]:
        raise Inexpressible(f"a change of scale over shape {list(shape)}, which must be known")
    count = math.prod(shape[axes[0] : axes[-1] + 1])
    depth = math.prod(shape[axes[-1] + 1 :])
    pixels = g.reshaped(data, (-1, count, 1, depth))
    summed = g.like(output, (g.dimensions(pixels)[0], 1, 1, depth))
    if not is_mean:
        rule = MeanFilter(1, 1.0, 0, is_exact=True)
    elif g.model.searches_left > 0:
        g.model.searches_left -= 1
        rule = mean_filter(a, b, count)
    else:
        rule = plain_filter(count)
    filter_ = g.full(OperandType(a.type), (1, count, 1, depth), rule.weight, scale=rule.scale)
    _depthwise(g, pixels, filter_, depth, summed, bias=rule.bias)
    g.reshape(summed, output)


def reduction_axes(g: SubgraphWriter, op: TfliteOperator, rank: int) -> list[int]:
    """The axes of a reduction: sorted, each once, none negative."""
    axes = set()
    for axis in g.integers_of(op, 1, "axes"):
        if not -rank <= axis < rank:
            g.refuse(op, "input 1 (axes)", f"axes from {-rank} to {rank - 1}", axis)
        axes.add(axis % rank)
    return sorted(axes)


def _depthwise(
    g: SubgraphWriter,
    pixels: int,
    filter_: int,
    depth: int,
    output: int,
    *,
    activation: int = FusedActivation.NONE,
    bias: int = 0,
) -> None:
    """A depthwise convolution whose filter is as large as the input's pixels, with one bias for all channels."""
    a, f = g.operands[pixels], g.operands[filter_]
    bias_scale = float(np.float32(a.scale) * np.float32(f.scale))
    biases = g.full(OperandType.TENSOR_INT32, (depth,), bias, scale=bias_scale)
    one, valid = g.int32(1), g.int32(Padding.VALID)
    arguments = [pixels, filter_, biases, valid, one, one, one, g.int32(activation)]
    g.emit(OperationType.DEPTHWISE_CONV_2D, arguments, [output])


def quantize(g: SubgraphWriter, op: TfliteOperator) -> None:
    """QUANTIZE of floats; of integers a change of scale (see ``requantize_to``)."""
    data = g.input(op, 0)
    tensor = g.output_tensor(op)
    if tensor.type == TensorType.INT16:
        _to_16_bits(g, op, data, tensor.scales)
        return
    output = g.output(op)
    if not g.is_quantized(data):
        g.emit(OperationType.QUANTIZE, [data], [output])
    else:
        requantize_to(g, data, output)


def _to_16_bits(g: SubgraphWriter, op: TfliteOperator, data: int, scales: Sequence[float]) -> None:
    """Reals held within the range of the 16 bits that they stand for."""
    output = g.describe_output(op)
    if g.is_quantized(data):
        reals = g.temporary(OperandType.TENSOR_FLOAT32, g.dimensions(data))
        g.emit(OperationType.DEQUANTIZE, [data], [reals])
        data = reals
    info, low = np.iinfo(np.int16), g.temporary(OperandType.TENSOR_FLOAT32, output.dimensions)
    least, most = (
        g.full(OperandType.TENSOR_FLOAT32, (1,), float(np.clip(bound * scales[0], *_FLOAT_RANGE)))
        for bound in (info.min, info.max)
    )
    g.emit(OperationType.MAXIMUM, [data, least], [low])
    g.emit_to(op, OperationType.MINIMUM, [low, most])


def dequantize(g: SubgraphWriter, op: TfliteOperator) -> None:
    """DEQUANTIZE; CAST where the file only widens float16; nothing for 16 bits, which are reals already."""
    data = g.input(op, 0)
    if g.input_tensor(op, 0).type == TensorType.INT16:
        g.bind(op, 0, data)
        return
    half = g.type_of(data) == OperandType.TENSOR_FLOAT16
    g.emit_to(op, OperationType.CAST if half else OperationType.DEQUANTIZE, [data])


def requantize_to(
    g: SubgraphWriter, source: int, target: int, activation: int = FusedActivation.NONE
) -> None:
    """Writes a value with another scale, zero point or 8-bit type: exact in integers.

    Between the 8-bit types with one scale, through floats, which is exact; to another scale by a depthwise convolution with the
    1 x 1 filter [1], whose fixed-point multiplication is TensorFlow Lite's.
    """
    a, b = g.operands[source], g.operands[target]
    if not (g.is_quantized(source) and g.is_quantized(target)):
        raise Inexpressible("a change of scale needs 8-bit types on both sides")
    if a.type != b.type:
        if activation != FusedActivation.NONE:
            raise Inexpressible("an activation between different 8-bit types")
        shift = 128 if b.type == OperandType.TENSOR_QUANT8_ASYMM else -128
        is_shift = a.scale == b.scale and a.zero_point + shift == b.zero_point
        moved = (
            target
            if is_shift
            else g.temporary(b.type, a.dimensions, scale=a.scale, zero_point=a.zero_point + shift)
        )
        reals = g.temporary(OperandType.TENSOR_FLOAT32, a.dimensions)
        g.emit(OperationType.DEQUANTIZE, [source], [reals])
        g.emit(OperationType.QUANTIZE, [reals], [moved])
        if is_shift:
            return
        source = moved
    if activation == FusedActivation.NONE and (a.scale, g.operands[source].zero_point) == (
        b.scale,
        b.zero_point,
    ):
        g.emit(OperationType.CAST, [source], [target])
        return
    pixels = g.reshaped(source, (1, -1, 1, 1))
    scaled = g.like(target, (1, g.dimensions(pixels)[1], 1, 1))
    filter_ = g.full(OperandType(b.type), (1, 1, 1, 1), 1, scale=1.0)
    _depthwise(g, pixels, filter_, 1, scaled, activation=activation)
    g.reshape(scaled, target)
