"""Lowering of convolutions, pooling, FULLY_CONNECTED, BATCH_MATMUL, softmax, normalisations and reductions.

Owns the windows, and the layouts: images are NCHW for ONNX. Quantised layers are their real numbers between DequantizeLinear and
QuantizeLinear, which engines fuse into layers of integers.

Source: the contracts in ``aionn.ops``; the operators of ONNX and the engines' kernels for what they accept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.onnx.elementwise import Rule
from aionn.drivers.kit.onnx.graph import NCHW, NHWC, Graph
from aionn.drivers.kit.onnx.value import Value
from aionn.hal import Operation, OperationType, Padding
from aionn.hal.windows import Window, read_window, same_padding, window_arguments

__all__ = ["RULES", "image", "set_image"]

Pads = tuple[int, int, int, int]
"""Top, left, bottom, right: ONNX's order."""


def image(g: Graph, value: Value, is_nchw: bool) -> Value:
    """A value as an image with the axes batch, height, width, depth."""
    if value.rank != 4:
        raise Unsupported("an image of a rank other than 4")
    return g.view(value, NHWC) if is_nchw else value


def set_image(g: Graph, output: Value, name: str, is_nchw: bool) -> None:
    """States that an output's real numbers are an ONNX image."""
    g.set_real(output, name, output.plain if is_nchw else NCHW)


def window(g: Graph, op: Operation) -> Window:
    """The window arguments of an operation; they must be constant."""
    types = [g.operand(op, i).type for i in range(len(op.inputs))]
    return read_window(window_arguments(op.type, types), lambda i: g.scalar(op, i))


def pads_of(w: Window, shape: Sequence[int], size: tuple[int, int]) -> Pads:
    """The padding of a window of ``size`` (width, height) over an image of a shape NHWC."""
    if w.scheme == Padding.SAME:
        top, bottom = same_padding(shape[1], size[1], w.strides[1], w.dilations[1])
        left, right = same_padding(shape[2], size[0], w.strides[0], w.dilations[0])
        return top, left, bottom, right
    left, right, top, bottom = w.explicit
    return top, left, bottom, right


FACTORS_MAX = 16
"""Of a product that is written as that many multiplications."""

# Convolutions


def bias_of(g: Graph, op: Operation, data: Value, filter_: Value) -> str:
    """The real numbers of the bias, input 2. A quantised one has the scale of data times filter."""
    bias = g.input(op, 2)
    if bias.dtype == "float32":
        return g.name(bias)
    scales = (filter_.scale,) if filter_.channels is None else filter_.channels.scales
    products = np.float32(data.scale) * np.asarray(scales, dtype=np.float32)
    if filter_.channels is None:
        return g.emit("DequantizeLinear", [g.name(bias), g.constant(products[0], "float32")])
    return g.emit("DequantizeLinear", [g.name(bias), g.constant(products)], axis=0)


def _conv(
    g: Graph, op: Operation, w: Window, filter_order: tuple[int, ...], groups: int, size: tuple[int, int]
) -> None:
    data, filter_, output = image(g, g.input(op, 0), w.is_nchw), g.input(op, 1), g.output(op)
    pads = pads_of(w, data.shape, size)
    extents = [(size[i] - 1) * w.dilations[i] + 1 for i in (1, 0)]
    fits = all(extent <= whole for extent, whole in zip(extents, data.shape[1:3], strict=True))
    depth_out = output.shape[1] if w.is_nchw else output.shape[3]
    is_simple = fits and (groups == 1 or groups == data.shape[3] == depth_out)
    if g.dialect.has_all_windows or is_simple or not output.is_quantized:
        name, weights = g.real(data, NCHW), g.real(filter_, filter_order)
    else:
        name, weights = g.exact_real(data, NCHW), g.real_constant(filter_, filter_order)
    shape, strides = [data.shape[i] for i in NCHW], [w.strides[1], w.strides[0]]
    if not g.dialect.has_all_windows:
        if not fits:
            name, shape, pads = _padded(g, name, shape, pads)
        name, pads, strides = _without_rest(g, name, shape, pads, extents, strides)
    result = g.emit(
        "Conv",
        [name, weights, bias_of(g, op, data, filter_)],
        kernel_shape=[size[1], size[0]],
        strides=strides,
        pads=list(pads),
        dilations=[w.dilations[1], w.dilations[0]],
        group=groups,
    )
    set_image(g, output, g.activated(result, w.activation), w.is_nchw)


def _padded(g: Graph, name: str, shape: Sequence[int], pads: Pads) -> tuple[str, list[int], Pads]:
    """Real numbers NCHW with zeros around them, their shape, and the padding that is left. Engines make a Pad a part of the
    convolution behind it, but not a Concat.
    """
    extents = list(shape)
    for axis, before, after in ((2, pads[0], pads[2]), (3, pads[1], pads[3])):
        g.known.charge(4 * (before + after) * math.prod(extents[:axis]) * math.prod(extents[axis + 1 :]))
        parts = [
            g.constant(np.zeros([*extents[:axis], count, *extents[axis + 1 :]], np.float32))
            for count in (before, after)
        ]
        extents[axis] += before + after
        if before or after:
            written = [*parts[:1] * (before > 0), name, *parts[1:] * (after > 0)]
            name = g.emit("Concat", written, axis=axis)
    return name, extents, (0, 0, 0, 0)


def _without_rest(
    g: Graph, name: str, shape: Sequence[int], pads: Pads, extents: Sequence[int], strides: Sequence[int]
) -> tuple[str, Pads, list[int]]:
    """An image NCHW, padding and strides of windows of these extents: along an axis that has one window nothing is left behind it,
    and its stride is 1.
    """
    before, after, found = list(pads[:2]), list(pads[2:]), list(strides)
    for i, axis in enumerate((2, 3)):
        rest = shape[axis] + before[i] + after[i] - extents[i]
        if found[i] == 1 or rest >= found[i]:
            continue
        found[i] = 1
        unread = max(rest - after[i], 0)
        after[i] -= rest - unread
        if unread:
            bounds = [g.int64s([number]) for number in (0, shape[axis] - unread, axis)]
            name = g.emit("Slice", [name, *bounds])
    return name, (before[0], before[1], after[0], after[1]), found


def _size(filter_: Value) -> tuple[int, int]:
    """Width and height of a filter."""
    if filter_.rank != 4:
        raise Unsupported("a filter of a rank other than 4")
    return filter_.shape[2], filter_.shape[1]


def conv_2d(g: Graph, op: Operation) -> None:
    """CONV_2D: filter [depth out, height, width, depth in]."""
    _conv(g, op, window(g, op), NCHW, 1, _size(g.input(op, 1)))


def grouped_conv_2d(g: Graph, op: Operation) -> None:
    """GROUPED_CONV_2D."""
    w = window(g, op)
    _conv(g, op, w, NCHW, w.extra[0], _size(g.input(op, 1)))


def depthwise_conv_2d(g: Graph, op: Operation) -> None:
    """DEPTHWISE_CONV_2D: filter [1, height, width, depth out], as many groups as the data has channels."""
    w = window(g, op)
    filter_, data = g.input(op, 1), image(g, g.input(op, 0), w.is_nchw)
    depth_out = filter_.shape[-1]
    if depth_out != data.shape[3] * w.extra[0]:
        raise Unsupported("a depth multiplier that does not fit")
    _conv(g, op, w, (3, 0, 1, 2), data.shape[3], _size(filter_))


def transpose_conv_2d(g: Graph, op: Operation) -> None:
    """TRANSPOSE_CONV_2D: filter [depth out, height, width, depth in]."""
    w = window(g, op)
    data, filter_, output = image(g, g.input(op, 0), w.is_nchw), g.input(op, 1), g.output(op)
    size = _size(filter_)
    target = [output.shape[i] for i in NHWC] if w.is_nchw else output.shape
    left, _, top, _ = w.explicit
    before = (top, left)
    if w.scheme == Padding.SAME:
        needed = [
            (-(-target[1 + i] // w.strides[1 - i]) - 1) * w.strides[1 - i] + size[1 - i] - target[1 + i]
            for i in (0, 1)
        ]
        before = (max(needed[0], 0) // 2, max(needed[1], 0) // 2)
    full = [(data.shape[1 + i] - 1) * w.strides[1 - i] + size[1 - i] for i in (0, 1)]
    # The rest behind the wanted part; less than 0 is more output, which the last stride does not reach.
    after = [full[i] - before[i] - target[1 + i] for i in (0, 1)]
    extra = [max(-n, 0) for n in after]
    if any(n >= s for n, s in zip(extra, (w.strides[1], w.strides[0]), strict=True)):
        raise Unsupported("negative padding of more than a stride")
    weights_of = g.real if g.dialect.has_transposed_integers else g.real_constant
    result = g.emit(
        "ConvTranspose",
        [g.real(data, NCHW), weights_of(filter_, (3, 0, 1, 2)), bias_of(g, op, data, filter_)],
        kernel_shape=[size[1], size[0]],
        strides=[w.strides[1], w.strides[0]],
        pads=[before[0], before[1], max(after[0], 0), max(after[1], 0)],
        output_padding=extra,
    )
    set_image(g, output, g.activated(result, w.activation), w.is_nchw)


# Pooling


def pool(op_type: str, *, has_squares: bool = False) -> Rule:
    """AVERAGE_POOL_2D, MAX_POOL_2D, L2_POOL_2D. Padding never counts."""

    def rule(g: Graph, op: Operation) -> None:
        w = window(g, op)
        data, output = image(g, g.input(op, 0), w.is_nchw), g.output(op)
        g.same_quantization(data, output)
        size = (w.extra[0], w.extra[1])
        attributes: dict[str, Any] = {
            "kernel_shape": [size[1], size[0]],
            "strides": [w.strides[1], w.strides[0]],
            "pads": list(pads_of(w, data.shape, size)),
        }
        order = output.plain if w.is_nchw else NCHW
        if op_type == "MaxPool" and data.is_quantized and w.activation == 0:
            g.set(output, g.emit(op_type, [g.name(data, NCHW)], **attributes), order)
            return
        name = g.real(data, NCHW)
        if has_squares:
            name = g.emit("Mul", [name, name])
        name = g.emit(op_type, [name], **attributes)
        if has_squares:
            name = g.emit("Sqrt", [name])
        g.set_real(output, g.activated(name, w.activation), order)

    return rule


# Products of matrices


def fully_connected(g: Graph, op: Operation) -> None:
    """FULLY_CONNECTED; data of a higher rank become a matrix first, whatever their last extent is."""
    data, weights, output = g.input(op, 0), g.input(op, 1), g.output(op)
    depth = weights.shape[1]
    if data.rank != 2 or data.shape[1] != depth:
        matrix = g.like(data, (math.prod(data.shape) // depth, depth))
        g.set(matrix, g.reshaped(g.name(data), matrix.shape))
        data = matrix
    result = g.emit("Gemm", [g.real(data), g.real(weights), bias_of(g, op, data, weights)], transB=1)
    g.set_real(output, g.activated(result, g.scalar(op, 3)))


def batch_matmul(g: Graph, op: Operation) -> None:
    """BATCH_MATMUL."""
    output = g.output(op)
    if output.dtype == "int32" and not g.dialect.has_wide_numbers:
        raise Unsupported("integers, whose products the engine computes as floats")
    pair = []
    for position in (0, 1):
        value = g.input(op, position)
        if g.scalar(op, position + 2):
            axes = value.plain
            value = g.view(value, (*axes[:-2], axes[-1], axes[-2]))
        pair.append(value)
    names = [g.name(v) if output.dtype == "int32" else g.real(v) for v in pair]
    result = g.emit("MatMul", names)
    if output.dtype == "int32":
        g.set(output, result)
    else:
        g.set_real(output, result)


# Along an axis


def softmax(op_type: str, axis_position: int) -> Rule:
    """SOFTMAX, LOG_SOFTMAX along any axis."""

    def rule(g: Graph, op: Operation) -> None:
        data, beta = g.input(op, 0), g.scalar(op, 1)
        axis = g.optional(op, axis_position, -1) % data.rank
        name = g.real(data)
        if beta != 1:
            name = g.emit("Mul", [name, g.constant(beta, "float32")])
        g.set_real(g.output(op), g.emit(op_type, [name], axis=axis))

    return rule


def l2_normalization(g: Graph, op: Operation) -> None:
    """L2_NORMALIZATION: divided by the length, or by a small number where that is less."""
    data = g.input(op, 0)
    axis = g.optional(op, 1, -1) % data.rank
    # A zero that is not exact may be as long as the small number.
    name = g.exact_real(data) if data.is_quantized else g.real(data)
    length = g.emit("ReduceL2", [name, g.int64s([axis])], keepdims=1)
    divisor = g.emit("Max", [length, g.constant(1e-6, "float32")])
    g.set_real(g.output(op), g.emit("Div", [name, divisor]))


def local_response_normalization(g: Graph, op: Operation) -> None:
    """LOCAL_RESPONSE_NORMALIZATION along any axis, which a RESHAPE makes the second one."""
    data, radius = g.input(op, 0), g.scalar(op, 1)
    bias, alpha, beta = (float(g.scalar(op, position)) for position in (2, 3, 4))
    axis = g.optional(op, 5, -1) % data.rank
    shape = data.shape
    size = 2 * radius + 1
    four = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]), 1)
    name = g.reshaped(g.name(data), four)
    factor = 1.0
    if bias != 1 and not g.dialect.has_lrn_bias:
        if bias <= 0:
            raise Unsupported("a bias that is not positive")
        # A bias before the power is a factor behind it.
        alpha, factor, bias = alpha / bias, bias**-beta, 1.0
    # ONNX divides alpha by the size of the window.
    name = g.emit("LRN", [name], alpha=alpha * size, beta=beta, bias=bias, size=size)
    if factor != 1:
        name = g.emit("Mul", [name, g.constant(factor, "float32")])
    g.set(g.output(op), g.reshaped(name, shape))


def instance_normalization(g: Graph, op: Operation) -> None:
    """INSTANCE_NORMALIZATION."""
    gamma, beta, epsilon = (float(g.scalar(op, position)) for position in (1, 2, 3))
    is_nchw = bool(g.scalar(op, 4))
    data, output = image(g, g.input(op, 0), is_nchw), g.output(op)
    depth = data.shape[3]
    if data.shape[1] * data.shape[2] == 1 and epsilon > 0:
        # Each element is its own mean, and has no variance. ONNX Runtime's CUDA kernel gives NaN for several such images.
        name = g.name(data, NCHW)
        result = g.emit("Add", [g.emit("Sub", [name, name]), g.constant(beta, "float32")])
        set_image(g, output, result, is_nchw)
        return
    g.known.charge(8 * depth)
    factors = [g.constant(np.full(depth, number, np.float32)) for number in (gamma, beta)]
    result = g.emit("InstanceNormalization", [g.name(data, NCHW), *factors], epsilon=epsilon)
    set_image(g, output, result, is_nchw)


# Reductions


def reduction(op_type: str) -> Rule:
    """REDUCE_* and MEAN along constant axes."""

    def rule(g: Graph, op: Operation) -> None:
        data, output = g.input(op, 0), g.output(op)
        is_kept = g.scalar(op, 2) > 0
        axes = sorted({axis % data.rank for axis in g.integers(op, 1)})
        order = g.common_order(data)
        if data.dtype == "bool":
            name = g.cast(g.name(data, order), "int32")
        elif op_type in ("ReduceMax", "ReduceMin") and data.is_quantized:
            g.same_quantization(data, output)
            name = g.name(data, order)
        else:
            name = g.real(data, order)
        places = [order.index(axis) for axis in axes]
        if places == [2, 3] and op_type == "ReduceMean" and data.rank == 4 and not data.is_quantized:
            # Engines have a faster kernel for it, which adds the elements of all channels in one order.
            name = g.emit("GlobalAveragePool", [name])
            if not is_kept:
                name = g.reshaped(name, tuple(data.shape[axis] for axis in order[:2]))
        elif axes:
            name = g.emit(op_type, [name, g.int64s(places)], keepdims=int(is_kept))
        if is_kept or not axes:
            left = order
        else:
            kept = [axis for axis in order if axis not in axes]
            left = tuple(sorted(kept).index(axis) for axis in kept)
        if not left:  # The HAL's result has shape [1].
            name, left = g.reshaped(name, (1,)), (0,)
        if data.dtype == "bool":
            g.set(output, g.cast(name, "bool"), left)
        elif data.is_quantized and op_type != "ReduceMean":
            g.set(output, name, left)
        else:
            g.set_real(output, name, left)

    return rule


def product(g: Graph, op: Operation) -> None:
    """REDUCE_PROD along constant axes. An engine without ``Dialect.has_products_in_turn`` multiplies pieces one after another."""
    data = g.input(op, 0)
    axes = sorted({axis % data.rank for axis in g.integers(op, 1)})
    count = math.prod(data.shape[axis] for axis in axes)
    if g.dialect.has_products_in_turn or count == 1:
        reduction("ReduceProd")(g, op)
        return
    if count > FACTORS_MAX:
        raise Unsupported("many factors, whose product may overflow in parts")
    kept = tuple(axis for axis in range(data.rank) if axis not in axes)
    others = math.prod(data.shape[axis] for axis in kept)
    name = g.reshaped(g.real(data, (*axes, *kept)), (count, others))
    result, *factors = g.emit_all("Split", [name], count, axis=0, num_outputs=count)
    for factor in factors:
        result = g.emit("Mul", [result, factor])
    output = g.output(op)
    g.set_real(output, g.reshaped(result, output.shape))


def arg_extremum(op_type: str) -> Rule:
    """ARGMAX, ARGMIN: of equal elements the first counts."""

    def rule(g: Graph, op: Operation) -> None:
        data, output = g.input(op, 0), g.output(op)
        axis = g.scalar(op, 1) % data.rank
        # Of one value the HAL's result has shape [1].
        places = g.emit(op_type, [g.name(data)], axis=axis, keepdims=int(data.rank == 1))
        g.set(output, g.cast(places, "int32"))

    return rule


RULES: Mapping[OperationType, Rule] = {
    OperationType.CONV_2D: conv_2d,
    OperationType.GROUPED_CONV_2D: grouped_conv_2d,
    OperationType.DEPTHWISE_CONV_2D: depthwise_conv_2d,
    OperationType.TRANSPOSE_CONV_2D: transpose_conv_2d,
    OperationType.AVERAGE_POOL_2D: pool("AveragePool"),
    OperationType.MAX_POOL_2D: pool("MaxPool"),
    OperationType.L2_POOL_2D: pool("AveragePool", has_squares=True),
    OperationType.FULLY_CONNECTED: fully_connected,
    OperationType.BATCH_MATMUL: batch_matmul,
    OperationType.SOFTMAX: softmax("Softmax", 2),
    OperationType.LOG_SOFTMAX: softmax("LogSoftmax", 2),
    OperationType.L2_NORMALIZATION: l2_normalization,
    OperationType.LOCAL_RESPONSE_NORMALIZATION: local_response_normalization,
    OperationType.INSTANCE_NORMALIZATION: instance_normalization,
    OperationType.MEAN: reduction("ReduceMean"),
    OperationType.REDUCE_SUM: reduction("ReduceSum"),
    OperationType.REDUCE_PROD: product,
    OperationType.REDUCE_MAX: reduction("ReduceMax"),
    OperationType.REDUCE_MIN: reduction("ReduceMin"),
    OperationType.REDUCE_ALL: reduction("ReduceMin"),
    OperationType.REDUCE_ANY: reduction("ReduceMax"),
    OperationType.ARGMAX: arg_extremum("ArgMax"),
    OperationType.ARGMIN: arg_extremum("ArgMin"),
}
