"""Lowering of arithmetic, comparisons, activations, changes of type, reductions and normalisations.

Source: the contracts in ``aionn.ops``; TensorFlow Lite's kernels for what they accept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.litert.graph import Graph, Value
from aionn.hal import Operation, OperationType

__all__ = ["RULES", "reduce_axes", "reshaped"]

Rule = Callable[[Graph, Operation], None]


def direct(name: str, *, options: str | None = None, one_scale: bool = False) -> Rule:
    """The operator with the same inputs and outputs."""

    def rule(g: Graph, op: Operation) -> None:
        inputs = [g.input(op, position) for position in range(len(op.inputs))]
        outputs = [g.output(op, position) for position in range(len(op.outputs))]
        if one_scale:
            g.same_quantization(*inputs, *outputs)
        g.emit(name, inputs, outputs, options)

    return rule


def arithmetic(name: str, options: str) -> Rule:
    """ADD, SUB, MUL, DIV with a fused activation, which has the HAL's number."""

    def rule(g: Graph, op: Operation) -> None:
        a, b = g.input(op, 0), g.input(op, 1)
        activation = g.scalar(op, 2)
        if name == "DIV" and a.dtype == "int32":
            # LiteRT's DIV truncates, the HAL's rounds down.
            g.emit("FLOOR_DIV", [a, b], g.output(op))
            return
        if name in ("ADD", "SUB") and a.is_quantized:
            g.check_ratio(max(a.scale, b.scale), g.output(op))
        g.emit(name, [a, b], g.output(op), options, fusedActivationFunction=activation)

    return rule


_SCHEMA_TYPES = {"float32": 0, "int32": 2, "uint8": 3, "bool": 6, "int8": 9}
"""The schema's numbers of element types."""


def converted(g: Graph, value: Value, dtype: str) -> Value:
    """The stored numbers as float32 or int32, which have all of them."""
    if value.constant is not None:
        return g.constant(value.constant.astype(dtype))
    target = g.temporary(dtype, value.shape)
    types = {"inDataType": _SCHEMA_TYPES[value.dtype], "outDataType": _SCHEMA_TYPES[dtype]}
    g.emit("CAST", [value], target, "CastOptions", **types)
    return target


def _real(g: Graph, value: Value) -> Value:
    """The real number that a quantised value stands for, rounded once. LiteRT's DEQUANTIZE is kernels that round differently."""
    stored = converted(g, value, "float32")
    if stored.constant is not None:
        return g.constant((stored.constant - np.float32(value.zero_point)) * np.float32(value.scale))
    moved, real = g.like(stored), g.like(stored)
    g.emit("SUB", [stored, g.real(value.zero_point)], moved, "SubOptions")
    g.emit("MUL", [moved, g.real(value.scale)], real, "MulOptions")
    return real


def comparison(name: str) -> Rule:
    """Comparisons. Quantised values are compared as the real numbers they stand for, booleans as 0 and 1.

    Of one scale and zero point the stored numbers have the same order. LiteRT's own kernels for quantised values round them to
    1/256 first, and end the process at some scales.
    """

    def rule(g: Graph, op: Operation) -> None:
        a, b = g.input(op, 0), g.input(op, 1)
        if a.is_quantized and a.quantization == b.quantization:
            a, b = (converted(g, value, "int32") for value in (a, b))
        elif a.is_quantized:
            a, b = (_real(g, value) for value in (a, b))
        elif a.dtype == "bool" and name not in ("EQUAL", "NOT_EQUAL"):
            a, b = (converted(g, value, "int32") for value in (a, b))
        g.emit(name, [a, b], g.output(op))

    return rule


def extremum(name: str) -> Rule:
    """MAXIMUM, MINIMUM: inputs get the output's scale first."""

    def rule(g: Graph, op: Operation) -> None:
        output = g.output(op)
        inputs = [g.requantized(g.input(op, i), output) for i in range(2)]
        g.emit(name, inputs, output, "MaximumMinimumOptions")

    return rule


def select(g: Graph, op: Operation) -> None:
    """SELECT: both values get the output's scale first."""
    output = g.output(op)
    values = [g.requantized(g.input(op, i), output) for i in (1, 2)]
    g.emit("SELECT", [g.input(op, 0), *values], output, "SelectOptions")


def activation(name: str) -> Rule:
    """RELU, RELU1, RELU6."""
    return direct(name, one_scale=True)


def elu(g: Graph, op: Operation) -> None:
    """ELU with alpha 1; with another by its formula."""
    x, alpha, output = g.input(op, 0), g.scalar(op, 1), g.output(op)
    if alpha == 1:
        g.emit("ELU", [x], output)
        return
    below, curve, scaled, above = g.like(x), g.like(x), g.like(x), g.like(x)
    zero = g.real(0.0)
    # elu(x) is x where x is positive: alpha scales its part below 0.
    g.emit("MINIMUM", [x, zero], below, "MaximumMinimumOptions")
    g.emit("ELU", [below], curve)
    g.emit("MUL", [curve, g.real(alpha)], scaled, "MulOptions")
    g.emit("MAXIMUM", [x, zero], above, "MaximumMinimumOptions")
    g.emit("ADD", [above, scaled], output, "AddOptions")


def softmax(g: Graph, op: Operation) -> None:
    """SOFTMAX along any axis."""
    beta = g.scalar(op, 1)

    def write(data: Value, output: Value) -> None:
        g.emit("SOFTMAX", [data], output, "SoftmaxOptions", beta=beta)

    g.last_axis(g.optional(op, 2, -1), g.input(op, 0), g.output(op), write)


def log_softmax(g: Graph, op: Operation) -> None:
    """LOG_SOFTMAX along any axis; another beta is multiplied before."""
    beta = g.scalar(op, 1)

    def write(data: Value, output: Value) -> None:
        if beta != 1:
            scaled = g.like(data)
            g.emit("MUL", [data, g.real(beta)], scaled, "MulOptions")
            data = scaled
        g.emit("LOG_SOFTMAX", [data], output, "LogSoftmaxOptions")

    g.last_axis(g.scalar(op, 2), g.input(op, 0), g.output(op), write)


def l2_normalization(g: Graph, op: Operation) -> None:
    """L2_NORMALIZATION along any axis."""

    def write(data: Value, output: Value) -> None:
        g.emit("L2_NORMALIZATION", [data], output, "L2NormOptions")

    g.last_axis(g.optional(op, 1, -1), g.input(op, 0), g.output(op), write)


def local_response_normalization(g: Graph, op: Operation) -> None:
    """LOCAL_RESPONSE_NORMALIZATION along any axis; LiteRT's kernel takes rank 4 alone."""
    radius = g.scalar(op, 1)
    bias, alpha, beta = (g.scalar(op, position) for position in (2, 3, 4))

    def write(data: Value, output: Value) -> None:
        shape = g.known(data)
        target = output
        if len(shape) > 4:
            raise Unsupported("a rank above 4")
        if len(shape) < 4:
            wide = (1,) * (4 - len(shape)) + shape
            data, target = reshaped(g, data, wide), g.like(output, wide)
        g.emit(
            "LOCAL_RESPONSE_NORMALIZATION", [data], target, "LocalResponseNormalizationOptions",
            radius=radius, bias=bias, alpha=alpha, beta=beta,
        )  # fmt: skip
        if target is not output:
            g.emit("RESHAPE", [target, g.int32s(shape)], output, "ReshapeOptions", newShape=list(shape))

    g.last_axis(g.optional(op, 5, -1), g.input(op, 0), g.output(op), write)


def reshaped(g: Graph, value: Value, shape: tuple[int, ...]) -> Value:
    """The value in another shape, all of it known."""
    if value.shape == shape:
        return value
    target = g.like(value, shape)
    g.emit("RESHAPE", [value, g.int32s(shape)], target, "ReshapeOptions", newShape=list(shape))
    return target


def instance_normalization(g: Graph, op: Operation) -> None:
    """By its formula: means over height and width."""
    gamma, beta, epsilon = (g.scalar(op, position) for position in (1, 2, 3))

    def write(data: Value, output: Value) -> None:
        small = (data.shape[0], 1, 1, data.shape[3]) if len(data.shape) == 4 else ()
        axes = g.int32s([1, 2])
        mean, variance, spread, rate = (g.like(data, small) for _ in range(4))
        centred, square, scaled = (g.like(data) for _ in range(3))
        g.emit("MEAN", [data, axes], mean, "ReducerOptions", keepDims=True)
        g.emit("SUB", [data, mean], centred, "SubOptions")
        g.emit("MUL", [centred, centred], square, "MulOptions")
        g.emit("MEAN", [square, axes], variance, "ReducerOptions", keepDims=True)
        g.emit("ADD", [variance, g.real(epsilon)], spread, "AddOptions")
        g.emit("RSQRT", [spread], rate)
        factor = g.like(data, small)
        g.emit("MUL", [rate, g.real(gamma)], factor, "MulOptions")
        g.emit("MUL", [centred, factor], scaled, "MulOptions")
        g.emit("ADD", [scaled, g.real(beta)], output, "AddOptions")

    g.in_nhwc(bool(g.scalar(op, 4)), g.input(op, 0), g.output(op), write)


def reduction(name: str) -> Rule:
    """REDUCE_* and MEAN along constant axes."""

    def rule(g: Graph, op: Operation) -> None:
        data, output = g.input(op, 0), g.output(op)
        if name in ("REDUCE_MAX", "REDUCE_MIN"):
            g.same_quantization(data, output)
        keep = g.scalar(op, 2) > 0
        axes = sorted({axis % g.rank(data) for axis in g.integers(op, 1)})
        if not axes:
            raise Unsupported("a reduction along no axis")
        reduce_axes(g, name, data, axes, output, is_kept=keep)

    return rule


def reduce_axes(
    g: Graph, name: str, data: Value, axes: Sequence[int], output: Value, *, is_kept: bool
) -> None:
    """A reduction along different axes. Where none is left the HAL's result has shape [1] and LiteRT's rank 0, hence a RESHAPE."""
    target = output
    if len(axes) == g.rank(data) and not is_kept:
        is_kept = True
        if len(axes) > 1:
            target = g.like(output, (1,) * len(axes))
    g.emit(name, [data, g.int32s(axes)], target, "ReducerOptions", keepDims=is_kept)
    if target is not output:
        g.emit("RESHAPE", [target, g.int32s([1])], output, "ReshapeOptions", newShape=[1])


def arg_extremum(name: str, options: str) -> Rule:
    """ARGMAX, ARGMIN along a constant axis."""

    def rule(g: Graph, op: Operation) -> None:
        data, axis = g.input(op, 0), g.scalar(op, 1)
        if g.rank(data) == 1:
            # Of a list the HAL's result has shape [1] and LiteRT's rank 0; of a row both have shape [1].
            data, axis = reshaped(g, data, (1, *g.known(data))), 1
        # 2 is the schema's INT32.
        g.emit(name, [data, g.int32(axis)], g.output(op), options, outputType=2)

    return rule


def cast(g: Graph, op: Operation) -> None:
    """CAST of the stored numbers. LiteRT's kernel has undefined results out of range, so floats are clamped before."""
    data, output = g.input(op, 0), g.output(op)
    if data.dtype == output.dtype:
        if data.is_quantized and data.quantization != output.quantization:
            raise Unsupported("a copy of stored numbers to another scale")
        g.emit(
            "RESHAPE", [data, g.int32s(g.known(data))], output, "ReshapeOptions", newShape=list(data.shape)
        )
        return
    if output.dtype == "uint8" and data.dtype in ("float32", "int32"):
        kind = np.dtype(data.dtype).type
        low, high = g.constant(np.asarray(0, dtype=kind)), g.constant(np.asarray(255, dtype=kind))
        above, within = g.like(data), g.like(data)
        g.emit("MAXIMUM", [data, low], above, "MaximumMinimumOptions")
        g.emit("MINIMUM", [above, high], within, "MaximumMinimumOptions")
        data = within
    g.emit(
        "CAST",
        [data],
        output,
        "CastOptions",
        inDataType=_SCHEMA_TYPES[data.dtype],
        outDataType=_SCHEMA_TYPES[output.dtype],
    )


def quantize(g: Graph, op: Operation) -> None:
    """QUANTIZE of floats."""
    g.emit("QUANTIZE", [g.input(op, 0)], g.output(op), "QuantizeOptions")


def dequantize(g: Graph, op: Operation) -> None:
    """DEQUANTIZE."""
    g.emit("DEQUANTIZE", [g.input(op, 0)], g.output(op), "DequantizeOptions")


def prelu(g: Graph, op: Operation) -> None:
    """PRELU, whose kernel in LiteRT broadcasts alpha alone; LEAKY_RELU in the form that the importer gives it."""
    data, alpha, output = g.input(op, 0), g.input(op, 1), g.output(op)
    slope = _slope(alpha)
    if slope is not None:
        g.emit("LEAKY_RELU", [data], output, "LeakyReluOptions", alpha=slope)
        return
    if data.shape and output.shape and 0 not in output.shape and data.shape != output.shape:
        raise Unsupported("an input that is repeated to alpha's shape")
    g.emit("PRELU", [data, alpha], output)


def _slope(alpha: Value) -> float | None:
    """The alpha of a LEAKY_RELU: one number, quantised as its scale times 1 or -1."""
    if alpha.constant is None or alpha.shape != (1,):
        return None
    (stored,) = alpha.constant.tolist()
    if not alpha.is_quantized:
        return float(stored)
    return alpha.scale * (stored - alpha.zero_point) if abs(stored - alpha.zero_point) == 1 else None


RULES: Mapping[OperationType, Rule] = {
    OperationType.ADD: arithmetic("ADD", "AddOptions"),
    OperationType.SUB: arithmetic("SUB", "SubOptions"),
    OperationType.MUL: arithmetic("MUL", "MulOptions"),
    OperationType.DIV: arithmetic("DIV", "DivOptions"),
    OperationType.POW: direct("POW", options="PowOptions"),
    OperationType.MAXIMUM: extremum("MAXIMUM"),
    OperationType.MINIMUM: extremum("MINIMUM"),
    OperationType.ABS: direct("ABS"),
    OperationType.EXP: direct("EXP"),
    OperationType.FLOOR: direct("FLOOR"),
    OperationType.LOG: direct("LOG"),
    OperationType.NEG: direct("NEG"),
    OperationType.RSQRT: direct("RSQRT"),
    OperationType.SIN: direct("SIN"),
    OperationType.SQRT: direct("SQRT"),
    OperationType.EQUAL: comparison("EQUAL"),
    OperationType.NOT_EQUAL: comparison("NOT_EQUAL"),
    OperationType.LESS: comparison("LESS"),
    OperationType.LESS_EQUAL: comparison("LESS_EQUAL"),
    OperationType.GREATER: comparison("GREATER"),
    OperationType.GREATER_EQUAL: comparison("GREATER_EQUAL"),
    OperationType.LOGICAL_AND: direct("LOGICAL_AND"),
    OperationType.LOGICAL_OR: direct("LOGICAL_OR"),
    OperationType.LOGICAL_NOT: direct("LOGICAL_NOT"),
    OperationType.SELECT: select,
    OperationType.RELU: activation("RELU"),
    OperationType.RELU1: activation("RELU_N1_TO_1"),
    OperationType.RELU6: activation("RELU6"),
    OperationType.LOGISTIC: direct("LOGISTIC"),
    OperationType.TANH: direct("TANH"),
    OperationType.HARD_SWISH: direct("HARD_SWISH"),
    OperationType.ELU: elu,
    OperationType.PRELU: prelu,
    OperationType.SOFTMAX: softmax,
    OperationType.LOG_SOFTMAX: log_softmax,
    OperationType.L2_NORMALIZATION: l2_normalization,
    OperationType.LOCAL_RESPONSE_NORMALIZATION: local_response_normalization,
    OperationType.INSTANCE_NORMALIZATION: instance_normalization,
    OperationType.MEAN: reduction("MEAN"),
    OperationType.REDUCE_SUM: reduction("SUM"),
    OperationType.REDUCE_PROD: reduction("REDUCE_PROD"),
    OperationType.REDUCE_MAX: reduction("REDUCE_MAX"),
    OperationType.REDUCE_MIN: reduction("REDUCE_MIN"),
    OperationType.REDUCE_ALL: reduction("REDUCE_ALL"),
    OperationType.REDUCE_ANY: reduction("REDUCE_ANY"),
    OperationType.ARGMAX: arg_extremum("ARG_MAX", "ArgMaxOptions"),
    OperationType.ARGMIN: arg_extremum("ARG_MIN", "ArgMinOptions"),
    OperationType.CAST: cast,
    OperationType.QUANTIZE: quantize,
    OperationType.DEQUANTIZE: dequantize,
}
