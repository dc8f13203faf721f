"""Lowering of arithmetic, comparisons, activations and changes of type.

Source: the contracts in ``aionn.ops``; the operators of ONNX and the engines' kernels for what they accept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from aionn.drivers.kit.arguments import Array
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.onnx.graph import Graph
from aionn.drivers.kit.onnx.value import Order, Value, moved
from aionn.hal import Operand, OperandType, Operation, OperationType
from aionn.ops import CONTRACTS, Call, Tensor
from aionn.ops.numerics.fixed_point import activation_range, requantize

__all__ = ["RULES", "Rule", "requantized", "stored_numbers", "table_of"]

Rule = Callable[[Graph, Operation], None]


def stored_numbers(value: Value) -> Array:
    """The 256 numbers that the HAL stores for a value's, in the order of the value's bytes."""
    numbers = np.arange(256, dtype=np.uint8)
    return moved(numbers) if value.is_moved else numbers.view(value.dtype)


def table_of(g: Graph, value: Value, op: Operation, inputs: list[Tensor | None]) -> Array:
    """The results of an operation's own kernel for ``stored_numbers``, as numbers of the output's value."""
    outputs = [g.model.main.operands[index] for index in op.outputs]
    with np.errstate(all="ignore"):
        (table,) = CONTRACTS[OperationType(op.type)].execute(Call(inputs, outputs))
    return moved(table) if g.output(op).is_moved else np.asarray(table)


# Arithmetic


def arithmetic(op_type: str) -> Rule:
    """ADD, SUB, MUL, DIV with a fused activation."""

    def rule(g: Graph, op: Operation) -> None:
        pair, output = [g.input(op, 0), g.input(op, 1)], g.output(op)
        activation = g.scalar(op, 2)
        order = g.common_order(*pair)
        if output.dtype == "int32":
            if activation:
                raise Unsupported("a fused activation of integers")
            names = g.names(pair, order)
            if op_type == "Div" and not g.dialect.has_wide_numbers:
                raise Unsupported("integers, which the engine divides as floats of 32 bits")
            result = _floor_divided(g, *names) if op_type == "Div" else g.emit(op_type, names)
            g.set(output, result, order)
            return
        is_merged = output.is_quantized and not g.dialect.has_separate_constants
        names = (
            g.exact_reals(pair, order)
            if is_merged and any(value.constant is not None for value in pair)
            else g.reals(pair, order)
        )
        g.set_real(output, g.activated(g.emit(op_type, names), activation), order)

    return rule


def _floor_divided(g: Graph, a: str, b: str) -> str:
    """Integers divided and rounded down, which float64 does exactly; 0 where the divisor is, at which a kernel for integers ends
    the process.
    """
    zero = g.constant(0, "int32")
    is_zero = g.emit("Equal", [b, zero])
    divisor = g.cast(g.emit("Where", [is_zero, g.constant(1, "int32"), b]), "float64")
    quotient = g.emit("Floor", [g.emit("Div", [g.cast(a, "float64"), divisor])])
    # Through int64: -2**31 / -1 does not fit 32 bits, and wraps around.
    whole = g.cast(g.cast(quotient, "int64"), "int32")
    return g.emit("Where", [is_zero, zero, whole])


def power(g: Graph, op: Operation) -> None:
    """POW."""
    pair = [g.input(op, 0), g.input(op, 1)]
    order = g.common_order(*pair)
    g.set(g.output(op), g.emit("Pow", g.reals(pair, order)), order)


def requantized(g: Graph, value: Value, like: Value, order: Order | None) -> str:
    """The stored numbers in another value's quantisation, by the contracts' own function."""
    name = g.name(value, order)
    if not value.is_quantized or value.has_quantization_of(like):
        return name
    source, target = (
        Operand(OperandType.TENSOR_QUANT8_ASYMM, (), v.scale, v.zero_point) for v in (value, like)
    )
    return g.looked_up(name, value.dtype, requantize(np.arange(256, dtype=np.uint8), source, target))


def _is_bound(value: Value) -> bool:
    """Whether a value is one number, which engines see through broadcasting."""
    return value.constant is not None and bool(np.all(value.constant == value.constant.flat[0]))


def extremum(op_type: str) -> Rule:
    """MAXIMUM, MINIMUM: quantised inputs get the output's scale first."""

    def rule(g: Graph, op: Operation) -> None:
        pair, output = [g.input(op, 0), g.input(op, 1)], g.output(op)
        order = g.common_order(*pair)
        if output.dtype == "int32" and not g.dialect.has_exact_integers and any(map(_is_bound, pair)):
            raise Unsupported("integers with a bound, which the engine may compute as floats")
        if not output.is_quantized:
            g.set(output, g.emit(op_type, g.names(pair, order)), order)
            return
        stored = [
            g.cast(requantized(g, value, output, order if value.rank == len(order) else None), "int32")
            for value in pair
        ]
        g.set(output, g.cast(g.emit(op_type, stored), output.dtype), order)

    return rule


def select(g: Graph, op: Operation) -> None:
    """SELECT: quantised values get the output's scale first."""
    condition, output = g.input(op, 0), g.output(op)
    values = [g.input(op, 1), g.input(op, 2)]
    order = g.common_order(condition, *values)
    names = [requantized(g, value, output, order) for value in values]
    g.set(output, g.emit("Where", [g.name(condition, order), *names]), order)


def comparison(op_type: str, *, is_negated: bool = False) -> Rule:
    """Comparisons. Quantised values are compared as the real numbers that they stand for, booleans as 0 and 1."""

    def rule(g: Graph, op: Operation) -> None:
        pair = [g.input(op, 0), g.input(op, 1)]
        order = g.common_order(*pair)
        names = g.exact_reals(pair, order) if pair[0].is_quantized else g.names(pair, order)
        if pair[0].dtype == "bool" and op_type != "Equal":
            names = [g.cast(name, "int32") for name in names]
        if pair[0].dtype == "int32" and not g.dialect.has_exact_integers:
            if op_type != "Equal":
                raise Unsupported("integers, which the engine compares as floats")
            # A difference, which wraps around, is 0 as a float only where it is 0.
            names = [g.emit("Sub", names), g.constant(0, "int32")]
        result = g.emit(op_type, names)
        g.set(g.output(op), g.emit("Not", [result]) if is_negated else result, order)

    return rule


def logical(op_type: str) -> Rule:
    """LOGICAL_AND, LOGICAL_OR, LOGICAL_NOT."""

    def rule(g: Graph, op: Operation) -> None:
        values = [g.input(op, i) for i in range(len(op.inputs))]
        order = g.common_order(*values)
        g.set(g.output(op), g.emit(op_type, g.names(values, order)), order)

    return rule


# Functions of one value


def unary(*op_types: str) -> Rule:
    """A function of each element, for floats and what else the engine's kernel takes."""

    def rule(g: Graph, op: Operation) -> None:
        data, output = g.input(op, 0), g.output(op)
        if data.is_quantized:
            by_table(g, op)
            return
        order = g.common_order(data)
        name = g.name(data, order)
        for op_type in op_types:
            name = g.emit(op_type, [name])
        g.set(output, name, order)

    return rule


def by_table(g: Graph, op: Operation) -> None:
    """A function of each stored 8-bit number, computed for all 256 by the reference's kernel."""
    data, output = g.input(op, 0), g.output(op)
    tensors: list[Tensor | None] = [Tensor(g.operand(op, 0), stored_numbers(data))]
    for position in range(1, len(op.inputs)):
        array = g.known.value(op.inputs[position])
        if array is None:
            raise Unsupported(f"input {position}, a parameter, is not constant")
        tensors.append(Tensor(g.operand(op, position), array, is_constant=True))
    order = g.common_order(data)
    g.set(output, g.looked_up(g.name(data, order), data.dtype, table_of(g, data, op, tensors)), order)


def relu(activation: int) -> Rule:
    """RELU, RELU1, RELU6: of quantised values the stored numbers are clipped."""

    def rule(g: Graph, op: Operation) -> None:
        data, output = g.input(op, 0), g.output(op)
        order = g.common_order(data)
        if not data.is_quantized:
            g.set(output, g.activated(g.name(data, order), activation), order)
            return
        bounds = activation_range(activation, g.operand(op, 0))
        limits = [g.constant(bound + 128 * data.is_moved, data.dtype) for bound in bounds]
        g.set(output, g.emit("Clip", [g.name(data, order), *limits]), order)

    return rule


def hard_swish(g: Graph, op: Operation) -> None:
    """HARD_SWISH; of quantised values by a table, since the HAL rounds each step."""
    data, output = g.input(op, 0), g.output(op)
    if data.is_quantized:
        by_table(g, op)
        return
    order = g.common_order(data)
    name = g.name(data, order)
    factor = g.emit("HardSigmoid", [name], alpha=1 / 6, beta=0.5)
    g.set(output, g.emit("Mul", [name, factor]), order)


def elu(g: Graph, op: Operation) -> None:
    """ELU."""
    data, alpha = g.input(op, 0), float(g.scalar(op, 1))
    if alpha < 0:
        raise Unsupported("a negative alpha, which the HAL clips")
    order = g.common_order(data)
    g.set(g.output(op), g.emit("Elu", [g.name(data, order)], alpha=alpha), order)


def prelu(g: Graph, op: Operation) -> None:
    """PRELU; the data may be broadcast as well as alpha."""
    data, alpha, output = g.input(op, 0), g.input(op, 1), g.output(op)
    order = g.common_order(data, alpha)
    values, slopes = g.reals([data, alpha], order)
    # OpenVINO makes a PRelu a part of the reduction that computes its slopes.
    if data.shape != output.shape or (alpha.constant is None and not g.dialect.has_computed_slopes):
        product = g.emit("Mul", [values, slopes])
        is_positive = g.emit("GreaterOrEqual", [values, g.constant(0, "float32")])
        g.set_real(output, g.emit("Where", [is_positive, values, product]), order)
        return
    g.set_real(output, g.emit("PRelu", [values, slopes]), order)


# Changes of type


def cast(g: Graph, op: Operation) -> None:
    """CAST of the stored numbers; those that do not fit saturate, and NaN becomes 0."""
    data, output = g.input(op, 0), g.output(op)
    order = g.common_order(data)
    name = g.name(data, order)
    is_half = g.model.main.operands[op.outputs[0]].type == OperandType.TENSOR_FLOAT16
    if data.dtype == output.dtype:
        name = g.emit("Identity", [name])
    elif output.dtype == "float32":
        name = g.cast(name, "float32")
    else:
        name = _saturated(g, name, data.dtype, output.dtype)
    if is_half and g.operand(op, 0).type != OperandType.TENSOR_FLOAT16:
        name = g.cast(g.cast(name, "float16"), "float32")
    g.set(output, name, order)


def _saturated(g: Graph, name: str, source: str, target: str) -> str:
    if np.can_cast(source, target):
        return g.cast(name, target)
    info = np.iinfo(target)
    wide = source
    if source == "float32":
        name = g.emit("Where", [g.emit("IsNaN", [name]), g.constant(0, "float32"), name])
        if target == "int32" and not g.dialect.has_wide_numbers:
            return _saturated_narrow(g, name)
        if target == "int32":  # float32 does not have the largest int32.
            name, wide = g.cast(name, "float64"), "float64"
    limits = [g.constant(bound, wide) for bound in (info.min, info.max)]
    return g.cast(g.emit("Clip", [name, *limits]), target)


def _saturated_narrow(g: Graph, name: str) -> str:
    """Floats as int32 without wider numbers: the largest float below 2**31 is 128 less than that."""
    whole = g.cast(
        g.emit("Clip", [name, *(g.constant(bound, "float32") for bound in (-(2.0**31), 2.0**31 - 128))]),
        "int32",
    )
    is_beyond = g.emit("GreaterOrEqual", [name, g.constant(2.0**31, "float32")])
    return g.emit("Where", [is_beyond, g.constant(2**31 - 1, "int32"), whole])


def quantize(g: Graph, op: Operation) -> None:
    """QUANTIZE."""
    data = g.input(op, 0)
    order = g.common_order(data)
    g.set_real(g.output(op), g.name(data, order), order)


def dequantize(g: Graph, op: Operation) -> None:
    """DEQUANTIZE. An output of its own: the form for an operation's input may be fused into that."""
    data = g.input(op, 0)
    order = g.common_order(data)
    g.set(g.output(op), g.real(data, order), order)


RULES: Mapping[OperationType, Rule] = {
    OperationType.ADD: arithmetic("Add"),
    OperationType.SUB: arithmetic("Sub"),
    OperationType.MUL: arithmetic("Mul"),
    OperationType.DIV: arithmetic("Div"),
    OperationType.POW: power,
    OperationType.MAXIMUM: extremum("Max"),
    OperationType.MINIMUM: extremum("Min"),
    OperationType.ABS: unary("Abs"),
    OperationType.EXP: unary("Exp"),
    OperationType.FLOOR: unary("Floor"),
    OperationType.LOG: unary("Log"),
    OperationType.NEG: unary("Neg"),
    OperationType.RSQRT: unary("Sqrt", "Reciprocal"),
    OperationType.SIN: unary("Sin"),
    OperationType.SQRT: unary("Sqrt"),
    OperationType.EQUAL: comparison("Equal"),
    OperationType.NOT_EQUAL: comparison("Equal", is_negated=True),
    OperationType.LESS: comparison("Less"),
    OperationType.LESS_EQUAL: comparison("LessOrEqual"),
    OperationType.GREATER: comparison("Greater"),
    OperationType.GREATER_EQUAL: comparison("GreaterOrEqual"),
    OperationType.LOGICAL_AND: logical("And"),
    OperationType.LOGICAL_OR: logical("Or"),
    OperationType.LOGICAL_NOT: logical("Not"),
    OperationType.SELECT: select,
    OperationType.RELU: relu(1),
    OperationType.RELU1: relu(2),
    OperationType.RELU6: relu(3),
    OperationType.LOGISTIC: unary("Sigmoid"),
    OperationType.TANH: unary("Tanh"),
    OperationType.HARD_SWISH: hard_swish,
    OperationType.ELU: elu,
    OperationType.PRELU: prelu,
    OperationType.CAST: cast,
    OperationType.QUANTIZE: quantize,
    OperationType.DEQUANTIZE: dequantize,
}
