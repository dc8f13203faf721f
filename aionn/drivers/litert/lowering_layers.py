"""Lowering of convolutions, pooling, FULLY_CONNECTED and BATCH_MATMUL.

Owns the two forms of padding, the layouts, and the mixed 8-bit types that LiteRT's kernels do not take.

Source: the contracts in ``aionn.ops``; TensorFlow Lite's kernels for what they accept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.litert.flatbuffer_writer import Quantization
from aionn.drivers.litert.graph import Graph, Value
from aionn.drivers.litert.lowering_elementwise import reshaped
from aionn.hal import Operation, OperationType, Padding
from aionn.hal.windows import Window, read_window, same_padding, window_arguments

__all__ = ["RULES"]

Rule = Callable[[Graph, Operation], None]


def window(g: Graph, op: Operation) -> Window:
    """The window arguments of an operation; they must be constant."""
    types = [g.operand(op, i).type for i in range(len(op.inputs))]
    return read_window(window_arguments(op.type, types), lambda i: g.scalar(op, i))


def scheme_of(g: Graph, data: Value, w: Window, size: tuple[int, int]) -> Padding | None:
    """SAME or VALID for a window of ``size`` (width, height) over an NHWC image; None if the padding is neither."""
    if w.scheme is not None:
        return w.scheme
    left, right, top, bottom = w.explicit
    if not any(w.explicit):
        return Padding.VALID
    _, height, width, _ = g.known(data)
    across = same_padding(width, size[0], w.strides[0], w.dilations[0])
    down = same_padding(height, size[1], w.strides[1], w.dilations[1])
    return Padding.SAME if (across, down) == ((left, right), (top, bottom)) else None


def _options(w: Window, scheme: Padding, *, has_dilation: bool = False) -> dict[str, int]:
    """The window's fields of an operator's options. The schema counts the padding schemes from 0."""
    fields = {
        "padding": scheme - 1,
        "strideW": w.strides[0],
        "strideH": w.strides[1],
        "fusedActivationFunction": w.activation,
    }
    if has_dilation:
        fields |= {"dilationWFactor": w.dilations[0], "dilationHFactor": w.dilations[1]}
    return fields


def padded(g: Graph, data: Value, explicit: Sequence[int], fill: Value | None = None) -> Value:
    """The image amid zeros, or amid another value."""
    left, right, top, bottom = explicit
    if min(explicit) < 0:
        raise Unsupported("negative padding")
    n, h, w, c = g.known(data)
    target = g.like(data, (n, h + top + bottom, w + left + right, c))
    amounts = g.constant(np.asarray([[0, 0], [top, bottom], [left, right], [0, 0]], dtype=np.int32))
    if fill is None:
        g.emit("PAD", [data, amounts], target, "PadOptions")
    else:
        g.emit("PADV2", [data, amounts, fill], target, "PadV2Options")
    return target


def _eight_bits(data: Value, filter_: Value) -> str | None:
    """The 8-bit type in which LiteRT can compute; None for other types.

    LiteRT's kernels take scales per channel, and zero points of 0 alone, with signed values; any zero point with unsigned ones.
    """
    if not data.is_quantized:
        return None
    assert filter_.quantization is not None
    if len(filter_.quantization.scales) > 1:
        return "int8"
    if filter_.dtype == "int8" and filter_.zero_point != 0:
        return "uint8"
    return "int8" if filter_.dtype == "int8" else "uint8"


def weighted(
    g: Graph,
    data: Value,
    filter_: Value,
    output: Value,
    write: Callable[[Value, Value, Value], None],
) -> None:
    """Lets ``write`` compute from data and filter of a type that LiteRT takes together."""
    dtype = _eight_bits(data, filter_)
    if dtype is None:
        write(data, filter_, output)
        return
    assert filter_.quantization is not None
    g.check_ratio(data.scale * max(filter_.quantization.scales), output)
    data, filter_ = g.moved(data, dtype), g.moved(filter_, dtype)
    g.moved_output(output, dtype, lambda target: write(data, filter_, target))


def bias_of(g: Graph, op: Operation, data: Value, filter_: Value) -> Value:
    """The bias, input 2. If the filter has scales per channel the HAL's bias has none, and XNNPACK requires them."""
    bias = g.input(op, 2)
    if bias.constant is None or filter_.quantization is None or len(filter_.quantization.scales) == 1:
        return bias
    scales = np.float32(data.scale) * np.asarray(filter_.quantization.scales, dtype=np.float32)
    return g.constant(bias.constant, Quantization(tuple(float(s) for s in scales)))


def conv_2d(g: Graph, op: Operation) -> None:
    """CONV_2D."""
    _dense(g, op, window(g, op), groups=1)


def grouped_conv_2d(g: Graph, op: Operation) -> None:
    """CONV_2D with fewer filter channels; where LiteRT's kernels have no groups, one CONV_2D per group."""
    w = window(g, op)
    _dense(g, op, w, groups=w.extra[0])


def _dense(g: Graph, op: Operation, w: Window, groups: int) -> None:
    filter_ = g.input(op, 1)
    bias = bias_of(g, op, g.input(op, 0), filter_)

    def write(image: Value, out: Value) -> None:
        size = (g.known(filter_)[2], g.known(filter_)[1])
        scheme = scheme_of(g, image, w, size)
        if scheme is None:
            image, scheme = padded(g, image, w.explicit), Padding.VALID

        def conv(data: Value, weights: Value, biases: Value, target: Value) -> None:
            g.emit(
                "CONV_2D", [data, weights, biases], target, "Conv2DOptions", **_options(w, scheme, has_dilation=True)
            )  # fmt: skip

        def whole(data: Value, weights: Value, target: Value) -> None:
            if groups == 1:
                conv(data, weights, bias, target)
            else:
                _by_groups(g, data, weights, bias, target, groups, conv)

        weighted(g, image, filter_, out, whole)

    g.in_nhwc(w.is_nchw, g.input(op, 0), g.output(op), write)


def _by_groups(
    g: Graph,
    data: Value,
    weights: Value,
    bias: Value,
    target: Value,
    groups: int,
    conv: Callable[[Value, Value, Value, Value], None],
) -> None:
    """One convolution for each group, and CONCATENATION: LiteRT's fast kernels have no groups for every type."""
    shape, depth = g.known(data), g.known(weights)[0]
    if shape[3] % groups or depth % groups:
        raise Unsupported(f"{groups} groups that do not divide the channels")
    each = depth // groups
    results = []
    all_parts = (_split(g, data, 3, groups), _split(g, weights, 0, groups), _split(g, bias, 0, groups))
    for part, part_weights, part_bias in zip(*all_parts, strict=True):
        out_shape = (*target.shape[:3], each) if len(target.shape) == 4 else (0, 0, 0, each)
        result = g.like(target, out_shape)
        conv(part, part_weights, part_bias, result)
        results.append(result)
    g.emit("CONCATENATION", results, target, "ConcatenationOptions", axis=3)


def _split(g: Graph, value: Value, axis: int, count: int) -> list[Value]:
    """The value in equal parts along an axis."""
    shape = g.known(value)
    each = shape[axis] // count
    if value.constant is None:
        if value.quantization is not None and len(value.quantization.scales) > 1:
            raise Unsupported("groups of a filter with scales per channel that is not constant")
        parts = [g.like(value, (*shape[:axis], each, *shape[axis + 1 :])) for _ in range(count)]
        g.emit("SPLIT", [g.int32(axis), value], parts, "SplitOptions", numSplits=count)
        return parts
    parts = []
    for index, array in enumerate(np.split(value.constant, count, axis)):
        quantization = value.quantization
        if quantization is not None and len(quantization.scales) > 1:
            rows = slice(index * each, (index + 1) * each)
            quantization = quantization._replace(scales=quantization.scales[rows])
        parts.append(g.constant(array, quantization))
    return parts


def depthwise_conv_2d(g: Graph, op: Operation) -> None:
    """DEPTHWISE_CONV_2D."""
    w = window(g, op)
    filter_ = g.input(op, 1)
    bias = bias_of(g, op, g.input(op, 0), filter_)

    def write(image: Value, out: Value) -> None:
        size = (g.known(filter_)[2], g.known(filter_)[1])
        scheme = scheme_of(g, image, w, size)
        if scheme is None:
            image, scheme = padded(g, image, w.explicit), Padding.VALID

        def conv(data: Value, weights: Value, target: Value) -> None:
            g.emit(
                "DEPTHWISE_CONV_2D", [data, weights, bias], target, "DepthwiseConv2DOptions",
                depthMultiplier=w.extra[0], **_options(w, scheme, has_dilation=True),
            )  # fmt: skip

        weighted(g, image, filter_, out, conv)

    g.in_nhwc(w.is_nchw, g.input(op, 0), g.output(op), write)


def transpose_conv_2d(g: Graph, op: Operation) -> None:
    """TRANSPOSE_CONV; explicit padding is cut off a larger result."""
    w = window(g, op)
    filter_ = g.input(op, 1)
    bias = bias_of(g, op, g.input(op, 0), filter_)
    shape = None if w.scheme is None else g.integers(op, 3)

    def write(image: Value, out: Value) -> None:
        n, height, width, _ = g.known(image)
        depth, high, wide, _ = g.known(filter_)
        full = (n, (height - 1) * w.strides[1] + high, (width - 1) * w.strides[0] + wide, depth)
        left, right, top, bottom = w.explicit
        wanted = (n, full[1] - top - bottom, full[2] - left - right, depth)
        if w.scheme == Padding.SAME:
            assert shape is not None
            # The shape is in the operation's layout.
            wanted = (n, shape[2], shape[3], depth) if w.is_nchw else (n, shape[1], shape[2], depth)
        before = (0, top, left, 0)
        raw = (n, wanted[1] + top, wanted[2] + left, depth)

        def conv(data: Value, weights: Value, target: Value) -> None:
            result = target if raw == wanted else g.like(target, raw)
            g.emit(
                "TRANSPOSE_CONV", [g.int32s(raw), weights, data, bias], result, "TransposeConvOptions",
                **_options(w, w.scheme or Padding.VALID),
            )  # fmt: skip
            if result is not target:
                g.emit("SLICE", [result, g.int32s(before), g.int32s(wanted)], target, "SliceOptions")

        weighted(g, image, filter_, out, conv)

    g.in_nhwc(w.is_nchw, g.input(op, 0), g.output(op), write)


def pool(name: str) -> Rule:
    """AVERAGE_POOL_2D, MAX_POOL_2D, L2_POOL_2D."""

    def rule(g: Graph, op: Operation) -> None:
        w = window(g, op)
        size = (w.extra[0], w.extra[1])

        def write(image: Value, out: Value) -> None:
            g.same_quantization(image, out)
            scheme = scheme_of(g, image, w, size)
            if scheme is None:
                if name != "MAX_POOL_2D":
                    raise Unsupported("explicit padding that is neither SAME nor VALID")
                kind = np.dtype(image.dtype)
                lowest = np.finfo(kind).min if kind.kind == "f" else np.iinfo(kind).min
                fill = g.constant(np.asarray(lowest, dtype=kind), image.quantization)
                image, scheme = padded(g, image, w.explicit, fill), Padding.VALID
            g.emit(
                name, [image], out, "Pool2DOptions",
                filterWidth=size[0], filterHeight=size[1], **_options(w, scheme),
            )  # fmt: skip

        g.in_nhwc(w.is_nchw, g.input(op, 0), g.output(op), write)

    return rule


def fully_connected(g: Graph, op: Operation) -> None:
    """FULLY_CONNECTED; data of a higher rank become a matrix first, whatever their last extent is."""
    data, weights, bias, output = g.input(op, 0), g.input(op, 1), g.input(op, 2), g.output(op)
    activation = g.scalar(op, 3)
    if len(data.shape) != 2:
        data = reshaped(g, data, _matrix(g, data, weights))

    def write(x: Value, w: Value, target: Value) -> None:
        g.emit(
            "FULLY_CONNECTED",
            [x, w, bias],
            target,
            "FullyConnectedOptions",
            fusedActivationFunction=activation,
        )

    weighted(g, data, weights, output, write)


def _matrix(g: Graph, data: Value, weights: Value) -> tuple[int, int]:
    depth = g.known(weights)[1]
    count = int(np.prod(g.known(data)))
    return count // depth, depth


def batch_matmul(g: Graph, op: Operation) -> None:
    """BATCH_MATMUL."""
    a, b = g.input(op, 0), g.input(op, 1)
    if a.dtype == "int32":
        raise Unsupported("LiteRT multiplies no matrices of int32")
    if a is b:
        # Where both factors are the result of one TRANSPOSE, LiteRT 2.3 computes the product with the transposed factor.
        shape = g.known(b)
        b = g.like(a)
        g.emit("RESHAPE", [a, g.int32s(shape)], b, "ReshapeOptions", newShape=list(shape))
    g.emit(
        "BATCH_MATMUL", [a, b], g.output(op), "BatchMatMulOptions",
        adjX=bool(g.scalar(op, 2)), adjY=bool(g.scalar(op, 3)),
    )  # fmt: skip


RULES: Mapping[OperationType, Rule] = {
    OperationType.CONV_2D: conv_2d,
    OperationType.GROUPED_CONV_2D: grouped_conv_2d,
    OperationType.DEPTHWISE_CONV_2D: depthwise_conv_2d,
    OperationType.TRANSPOSE_CONV_2D: transpose_conv_2d,
    OperationType.AVERAGE_POOL_2D: pool("AVERAGE_POOL_2D"),
    OperationType.MAX_POOL_2D: pool("MAX_POOL_2D"),
    OperationType.L2_POOL_2D: pool("L2_POOL_2D"),
    OperationType.FULLY_CONNECTED: fully_connected,
    OperationType.BATCH_MATMUL: batch_matmul,
}
