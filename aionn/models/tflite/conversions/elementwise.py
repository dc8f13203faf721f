"""Operators that work element by element: arithmetic, activations, comparisons, choice, changes of type.

Owns their HAL forms and the compositions of those that the HAL lacks. Broadcasting that SELECT does not do is written out.

Source: the TensorFlow Lite operators' documentation and reference kernels; the contracts in ``aionn.ops``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from aionn.hal import FusedActivation, OperandType, OperationType
from aionn.models.tflite.conversions.layers import requantize_to, with_activation
from aionn.models.tflite.graph import Convert, Inexpressible, Shape, SubgraphWriter, is_known
from aionn.models.tflite.schema import TensorType, TfliteOperator
from aionn.ops.numerics.fixed_point import quantized_range

__all__ = [
    "add_n",
    "arithmetic",
    "broadcast_to",
    "broadcasted",
    "by_table",
    "cast",
    "ceil",
    "chain",
    "cos",
    "direct",
    "elu",
    "floor_div",
    "floor_mod",
    "gelu",
    "leaky_relu",
    "log_softmax",
    "relu",
    "relu_0_to_1",
    "right_shift",
    "round_",
    "select",
    "sign",
    "softmax",
    "square",
    "squared_difference",
]

_PLAIN = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16, OperandType.TENSOR_INT32)


def direct(kind: OperationType) -> Convert:
    """An operation with the same inputs and outputs as the operator."""

    def convert(g: SubgraphWriter, op: TfliteOperator) -> None:
        inputs = g.inputs(op)
        g.emit(kind, inputs, [g.output(op, position) for position in range(len(op.outputs))])

    return convert


def arithmetic(kind: OperationType, table: str | None) -> Convert:
    """ADD, SUB, MUL or DIV with its fused activation; ``table`` is None for an operator without options."""

    def convert(g: SubgraphWriter, op: TfliteOperator) -> None:
        a, b = g.input(op, 0), g.input(op, 1)
        output = g.output(op)

        def emit(target: int, activation: int) -> None:
            is_whole = kind == OperationType.DIV and g.type_of(a) == OperandType.TENSOR_INT32
            if is_whole and activation == FusedActivation.NONE:
                _truncated_quotient(g, a, b, target)
            else:
                g.emit(kind, [a, b, g.int32(activation)], [target])

        if table is None:
            emit(output, FusedActivation.NONE)
        else:
            with_activation(g, op, table, output, emit)

    return convert


def _binary(g: SubgraphWriter, kind: OperationType, a: int, b: int, output: int) -> int:
    """Writes ADD, SUB, MUL or DIV without an activation."""
    g.emit(kind, [a, b, g.int32(FusedActivation.NONE)], [output])
    return output


def _truncated_quotient(g: SubgraphWriter, a: int, b: int, output: int) -> None:
    """A quotient of integers rounded towards 0: the HAL's, which is rounded down, plus 1 where it is negative and not exact."""
    floor = _binary(g, OperationType.DIV, a, b, g.like(output))
    rest = _binary(
        g, OperationType.SUB, a, _binary(g, OperationType.MUL, floor, b, g.like(output)), g.like(output)
    )
    zero = _number(g, output, 0)
    is_below, is_rounded, both = (
        g.temporary(OperandType.TENSOR_BOOL8, g.dimensions(output)) for _ in range(3)
    )
    g.emit(OperationType.LESS, [floor, zero], [is_below])
    g.emit(OperationType.NOT_EQUAL, [rest, zero], [is_rounded])
    g.emit(OperationType.LOGICAL_AND, [is_below, is_rounded], [both])
    above = _binary(g, OperationType.ADD, floor, _number(g, output, 1), g.like(output))
    g.emit(OperationType.SELECT, [both, above, floor], [output])


def _number(g: SubgraphWriter, like: int, value: float) -> int:
    """A constant of shape [1] of a plain operand's type."""
    return g.full(OperandType(g.type_of(like)), (1,), value)


def _need_plain(g: SubgraphWriter, index: int, *kinds: OperandType) -> None:
    allowed = kinds or _PLAIN
    if g.type_of(index) not in allowed:
        names = " or ".join(kind.name for kind in allowed)
        raise Inexpressible(f"composed for {names} alone, got {OperandType(g.type_of(index)).name}")


def relu(kind: OperationType, activation: FusedActivation) -> Convert:
    """RELU, RELU1 or RELU6; with another scale in the result, a rescaling convolution with the activation fused."""

    def convert(g: SubgraphWriter, op: TfliteOperator) -> None:
        data = g.input(op, 0)
        output = g.output(op)
        a, b = g.operands[data], g.operands[output]
        if (a.scale, a.zero_point) == (b.scale, b.zero_point):
            g.emit(kind, [data], [output])
        else:
            requantize_to(g, data, output, activation)

    return convert


def relu_0_to_1(g: SubgraphWriter, op: TfliteOperator) -> None:
    """RELU1 and then RELU."""
    data = g.input(op, 0)
    middle = g.like(data)
    g.emit(OperationType.RELU1, [data], [middle])
    g.emit_to(op, OperationType.RELU, [middle])


def leaky_relu(g: SubgraphWriter, op: TfliteOperator) -> None:
    """PRELU with one alpha. Quantised, alpha is its scale times a stored 1 or -1: that gives the reference kernel's multiplier."""
    data = g.input(op, 0)
    alpha = op.option("LeakyReluOptions", "alpha")
    if not g.is_quantized(data):
        g.emit_to(op, OperationType.PRELU, [data, _number(g, data, alpha)])
        return
    if alpha == 0:
        requantize_to(g, data, g.output(op), FusedActivation.RELU)
        return
    stored, zero_point = (1, 0) if alpha > 0 else (0, 1)
    slope = g.full(OperandType(g.type_of(data)), (1,), stored, scale=abs(alpha), zero_point=zero_point)
    g.emit_to(op, OperationType.PRELU, [data, slope])


def elu(g: SubgraphWriter, op: TfliteOperator) -> None:
    """ELU with alpha 1."""
    data = g.input(op, 0)
    g.emit_to(op, OperationType.ELU, [data, g.real(1.0, data)])


def softmax(g: SubgraphWriter, op: TfliteOperator) -> None:
    """SOFTMAX along the last axis."""
    data = g.input(op, 0)
    g.emit_to(op, OperationType.SOFTMAX, [data, g.real(op.option("SoftmaxOptions", "beta"), data)])


def log_softmax(g: SubgraphWriter, op: TfliteOperator) -> None:
    """LOG_SOFTMAX along the last axis with beta 1."""
    data = g.input(op, 0)
    g.emit_to(op, OperationType.LOG_SOFTMAX, [data, g.real(1.0, data), g.int32(-1)])


def square(g: SubgraphWriter, op: TfliteOperator) -> None:
    """MUL of the value with itself."""
    data = g.input(op, 0)
    _binary(g, OperationType.MUL, data, data, g.output(op))


def squared_difference(g: SubgraphWriter, op: TfliteOperator) -> None:
    """SUB and then MUL of the difference with itself."""
    a, b = g.input(op, 0), g.input(op, 1)
    _need_plain(g, a)
    output = g.output(op)
    difference = _binary(g, OperationType.SUB, a, b, g.like(output))
    _binary(g, OperationType.MUL, difference, difference, output)


def ceil(g: SubgraphWriter, op: TfliteOperator) -> None:
    """-FLOOR(-x)."""
    data = g.input(op, 0)
    below, floor = g.like(data), g.like(data)
    g.emit(OperationType.NEG, [data], [below])
    g.emit(OperationType.FLOOR, [below], [floor])
    g.emit_to(op, OperationType.NEG, [floor])


def cos(g: SubgraphWriter, op: TfliteOperator) -> None:
    """1 - 2 * SIN(x / 2) ** 2: halving is exact, so that large arguments lose nothing."""
    x = g.input(op, 0)
    _need_plain(g, x, OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
    half = _binary(g, OperationType.MUL, x, _number(g, x, 0.5), g.like(x))
    sine = g.like(x)
    g.emit(OperationType.SIN, [half], [sine])
    square_ = _binary(g, OperationType.MUL, sine, sine, g.like(x))
    double = _binary(g, OperationType.MUL, square_, _number(g, x, 2.0), g.like(x))
    _binary(g, OperationType.SUB, _number(g, x, 1.0), double, g.output(op))


def round_(g: SubgraphWriter, op: TfliteOperator) -> None:
    """To the nearest whole number, halves to even: 2 ** 23 is added to the magnitude, which drops its fraction, and taken off."""
    x = g.input(op, 0)
    _need_plain(g, x, OperandType.TENSOR_FLOAT32)
    whole = _number(g, x, 2.0**23)
    magnitude, negative = g.like(x), g.like(x)
    g.emit(OperationType.ABS, [x], [magnitude])
    above = _binary(g, OperationType.ADD, magnitude, whole, g.like(x))
    rounded = _binary(g, OperationType.SUB, above, whole, g.like(x))
    g.emit(OperationType.NEG, [rounded], [negative])
    is_negative = g.temporary(OperandType.TENSOR_BOOL8, g.dimensions(x))
    g.emit(OperationType.LESS, [x, _number(g, x, 0.0)], [is_negative])
    signed = g.like(x)
    g.emit(OperationType.SELECT, [is_negative, negative, rounded], [signed])
    # From 2 ** 23 on every float is a whole number already.
    has_fraction = g.temporary(OperandType.TENSOR_BOOL8, g.dimensions(x))
    g.emit(OperationType.LESS, [magnitude, whole], [has_fraction])
    g.emit_to(op, OperationType.SELECT, [has_fraction, signed, x])


def floor_div(g: SubgraphWriter, op: TfliteOperator) -> None:
    """DIV, which floors integers; of floats FLOOR afterwards."""
    a, b = g.input(op, 0), g.input(op, 1)
    _need_plain(g, a)
    output = g.output(op)
    if g.type_of(a) == OperandType.TENSOR_INT32:
        _binary(g, OperationType.DIV, a, b, output)
        return
    quotient = _binary(g, OperationType.DIV, a, b, g.like(output))
    g.emit(OperationType.FLOOR, [quotient], [output])


def floor_mod(g: SubgraphWriter, op: TfliteOperator) -> None:
    """a - floor(a / b) * b; of floats moved by b where the rounded quotient was one off."""
    a, b = g.input(op, 0), g.input(op, 1)
    _need_plain(g, a)
    output = g.output(op)
    is_real = g.type_of(a) != OperandType.TENSOR_INT32
    quotient = _binary(g, OperationType.DIV, a, b, g.like(output))
    if is_real:
        whole = g.like(output)
        g.emit(OperationType.FLOOR, [quotient], [whole])
        quotient = whole
    product = _binary(g, OperationType.MUL, quotient, b, g.like(output))
    if not is_real:
        _binary(g, OperationType.SUB, a, product, output)
        return
    rest = _binary(g, OperationType.SUB, a, product, g.like(output))
    # A remainder on the wrong side of 0 is below it for a positive divisor: rest * b < 0.
    signs = _binary(g, OperationType.MUL, rest, b, g.like(output))
    is_wrong = g.temporary(OperandType.TENSOR_BOOL8, g.dimensions(output))
    g.emit(OperationType.LESS, [signs, _number(g, output, 0)], [is_wrong])
    moved = _binary(g, OperationType.ADD, rest, b, g.like(output))
    g.emit(OperationType.SELECT, [is_wrong, moved, rest], [output])


def right_shift(g: SubgraphWriter, op: TfliteOperator) -> None:
    """DIV, which floors integers, by the power of 2 of a constant shift."""
    a = g.input(op, 0)
    _need_plain(g, a, OperandType.TENSOR_INT32)
    shifts = g.value_of(op, 1)
    if (
        shifts is None
        or shifts.dtype.kind != "i"
        or shifts.size == 0
        or not ((shifts >= 0) & (shifts < 31)).all()
    ):
        raise Inexpressible("a shift must be a constant from 0 to 30")
    _binary(
        g,
        OperationType.DIV,
        a,
        g.int32s(1 << (shifts.reshape(shifts.shape or (1,)).astype(np.int64))),
        g.output(op),
    )


def add_n(g: SubgraphWriter, op: TfliteOperator) -> None:
    """A chain of ADDs."""
    total, others = g.input(op, 0), g.inputs(op)[1:]
    _need_plain(g, total)
    output = g.output(op)
    if not others:
        g.emit(OperationType.CAST, [total], [output])
    for index, other in enumerate(others):
        target = output if index == len(others) - 1 else g.like(output)
        total = _binary(g, OperationType.ADD, total, other, target)


def gelu(g: SubgraphWriter, op: TfliteOperator) -> None:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))), or x / 2 * (1 + erf(x / sqrt(2))); a table of 8-bit integers."""
    is_approximate = bool(op.integer("GeluOptions", "approximate"))
    x = g.input(op, 0)
    if g.is_quantized(x):
        by_table(g, op, _gelu_approximate if is_approximate else _gelu_exact)
        return
    kinds = (
        (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
        if is_approximate
        else (OperandType.TENSOR_FLOAT32,)
    )
    _need_plain(g, x, *kinds)

    def mul(a: int, b: int) -> int:
        return _binary(g, OperationType.MUL, a, b, g.like(x))

    if is_approximate:
        cube = mul(mul(mul(x, x), x), _number(g, x, 0.044715))
        inner = mul(_binary(g, OperationType.ADD, x, cube, g.like(x)), _number(g, x, math.sqrt(2 / math.pi)))
        curve = g.like(x)
        g.emit(OperationType.TANH, [inner], [curve])
    else:
        curve = _erf(g, mul(x, _number(g, x, math.sqrt(0.5))))
    above = _binary(g, OperationType.ADD, curve, _number(g, x, 1.0), g.like(x))
    _binary(g, OperationType.MUL, mul(x, _number(g, x, 0.5)), above, g.output(op))


_ERF_ABOVE = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05, -7.34990630326855e-04,
    -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
_ERF_BELOW = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02,
)  # fmt: skip
"""The error function from -4 to 4 as x * P(x ** 2) / Q(x ** 2): as exact as float32 holds it. Highest powers first."""


def _erf(g: SubgraphWriter, x: int) -> int:
    low, clamped = g.like(x), g.like(x)
    g.emit(OperationType.MAXIMUM, [x, _number(g, x, -4.0)], [low])
    g.emit(OperationType.MINIMUM, [low, _number(g, x, 4.0)], [clamped])
    square_ = _binary(g, OperationType.MUL, clamped, clamped, g.like(x))

    def polynomial(coefficients: Sequence[float]) -> int:
        total = _number(g, x, coefficients[0])
        for coefficient in coefficients[1:]:
            product = _binary(g, OperationType.MUL, square_, total, g.like(x))
            total = _binary(g, OperationType.ADD, product, _number(g, x, coefficient), g.like(x))
        return total

    above = _binary(g, OperationType.MUL, clamped, polynomial(_ERF_ABOVE), g.like(x))
    return _binary(g, OperationType.DIV, above, polynomial(_ERF_BELOW), g.like(x))


def _gelu_approximate(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _gelu_exact(x: float) -> float:
    return 0.5 * x * math.erfc(x * -math.sqrt(0.5))


def by_table(g: SubgraphWriter, op: TfliteOperator, function: Callable[[float], float]) -> None:
    """GATHER from a table with the result for each of the 256 values of 8 bits, which QUANTIZE and CAST make an index."""
    data = g.input(op, 0)
    output = g.output(op)
    source, target = g.operands[data], g.operands[output]
    if source.type != target.type:
        raise Inexpressible("a result of another type than the input's")
    low, high = quantized_range(target.type)
    steps = np.arange(low, high + 1, dtype=np.float64)
    # float32 as the reference kernels fill their tables; halves are rounded away from zero.
    with np.errstate(all="ignore"):
        reals = (np.float32(source.scale) * (steps - source.zero_point).astype(np.float32)).tolist()
        results = np.array([function(x) for x in reals], dtype=np.float32) * (1 / np.float32(target.scale))
    results = np.nan_to_num(results.astype(np.float64))
    rounded = np.copysign(np.floor(np.abs(results) + 0.5), results) + target.zero_point
    stored = np.clip(rounded, low, high)
    kind = OperandType(target.type)
    table = g.constant(kind, stored, scale=target.scale, zero_point=target.zero_point)
    indices = data
    if kind == OperandType.TENSOR_QUANT8_ASYMM_SIGNED:
        # The same numbers counted from the least one: unsigned, with the zero point moved along.
        floats = g.temporary(OperandType.TENSOR_FLOAT32, source.dimensions)
        g.emit(OperationType.DEQUANTIZE, [data], [floats])
        unsigned = OperandType.TENSOR_QUANT8_ASYMM
        indices = g.temporary(
            unsigned, source.dimensions, scale=source.scale, zero_point=source.zero_point - low
        )
        g.emit(OperationType.QUANTIZE, [floats], [indices])
    places = g.temporary(OperandType.TENSOR_INT32, source.dimensions)
    g.emit(OperationType.CAST, [indices], [places])
    g.emit(OperationType.GATHER, [table, g.int32(0), places], [output])


def sign(g: SubgraphWriter, op: TfliteOperator) -> None:
    """SELECT between 1, -1 and the value itself, which is then 0 or no number."""
    data = g.input(op, 0)
    _need_plain(g, data)
    kind, shape = OperandType(g.type_of(data)), g.dimensions(data)
    zero = _number(g, data, 0)
    is_negative = g.temporary(OperandType.TENSOR_BOOL8, shape)
    g.emit(OperationType.LESS, [data, zero], [is_negative])
    lower = g.like(data)
    g.emit(OperationType.SELECT, [is_negative, g.full(kind, shape, -1), data], [lower])
    is_positive = g.temporary(OperandType.TENSOR_BOOL8, shape)
    g.emit(OperationType.GREATER, [data, zero], [is_positive])
    g.emit_to(op, OperationType.SELECT, [is_positive, g.full(kind, shape, 1), lower])


def broadcasted(g: SubgraphWriter, index: int, shape: Shape) -> int:
    """The value repeated to a shape; itself where it has it."""
    operand = g.operands[index]
    if operand.dimensions == shape:
        return index
    if not is_known(shape) or not is_known(operand.dimensions) or len(operand.dimensions) > len(shape):
        raise Inexpressible(f"shape {list(operand.dimensions)} to be repeated to {list(shape)}")
    own = (1,) * (len(shape) - len(operand.dimensions)) + operand.dimensions
    if any(extent not in (1, wide) for extent, wide in zip(own, shape, strict=True)):
        raise Inexpressible(f"shape {list(operand.dimensions)} does not repeat to {list(shape)}")
    kind = OperandType(operand.type)
    if operand.is_constant:
        value = g.model.value(operand)
        g.model.check_budget(math.prod(shape) * value.itemsize)
        wide_value = np.broadcast_to(value, shape)
        return g.constant(kind, wide_value, scale=operand.scale, zero_point=operand.zero_point)
    result = g.like(index, shape)
    if kind == OperandType.TENSOR_BOOL8:
        # TILE takes no booleans; a disjunction with false broadcasts.
        g.emit(OperationType.LOGICAL_OR, [index, g.full(kind, shape, 0)], [result])
        return result
    multiples = [wide // extent for extent, wide in zip(own, shape, strict=True)]
    g.emit(OperationType.TILE, [g.reshaped(index, own), g.int32s(multiples)], [result])
    return result


def broadcast_to(g: SubgraphWriter, op: TfliteOperator) -> None:
    """TILE, or a constant; booleans by LOGICAL_OR with false."""
    data = g.input(op, 0)
    described = g.describe_output(op)
    shape = described.dimensions
    if not is_known(shape):
        shape = tuple(g.integers_of(op, 1, "shape"))
    g.bind(op, 0, broadcasted(g, data, shape))


def select(g: SubgraphWriter, op: TfliteOperator) -> None:
    """SELECT; inputs of other shapes are repeated to the output's first."""
    condition, a, b = (g.input(op, position) for position in range(3))
    output = g.output(op)
    shape = g.dimensions(output)
    if len({g.dimensions(i) for i in (condition, a, b)}) > 1:
        rows = g.dimensions(condition)
        if op.code == SELECT_CODE and len(rows) == 1 < len(shape) and rows != (1,):
            raise Inexpressible("a condition that chooses rows")
        condition, a, b = (broadcasted(g, i, shape) for i in (condition, a, b))
    g.emit(OperationType.SELECT, [condition, a, b], [output])


SELECT_CODE = 64
"""The older SELECT, whose condition of rank 1 chooses rows; SELECT_V2 broadcasts it."""


def cast(g: SubgraphWriter, op: TfliteOperator) -> None:
    """CAST; from INT8 by DEQUANTIZE, to and from booleans by NOT_EQUAL and SELECT."""
    data = g.input(op, 0)
    is_wide = g.output_tensor(op).type == TensorType.INT64
    if is_wide and g.type_of(data) not in (OperandType.TENSOR_INT32, OperandType.TENSOR_BOOL8):
        raise Inexpressible("numbers that may need 64 bits")
    output = g.output(op)
    source, target = g.operands[data], g.operands[output]
    if source.type == target.type:
        g.emit(OperationType.CAST, [data], [output])
    elif target.type == OperandType.TENSOR_BOOL8:
        _need_plain(g, data)
        g.emit(OperationType.NOT_EQUAL, [data, _number(g, data, 0)], [output])
    elif source.type == OperandType.TENSOR_BOOL8:
        _need_plain(g, output)
        kind, shape = OperandType(target.type), source.dimensions
        g.emit(OperationType.SELECT, [data, g.full(kind, shape, 1), g.full(kind, shape, 0)], [output])
    elif source.type == OperandType.TENSOR_QUANT8_ASYMM_SIGNED:
        if (source.scale, source.zero_point) != (1.0, 0):
            raise Inexpressible("the stored numbers of an INT8 tensor with a scale")
        _from_int8(g, data, output)
    else:
        g.emit(OperationType.CAST, [data], [output])


def _from_int8(g: SubgraphWriter, data: int, output: int) -> None:
    """Plain numbers of 8 bits: with scale 1 and zero point 0 the real value is the number."""
    kind = g.type_of(output)
    if kind in (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16):
        g.emit(OperationType.DEQUANTIZE, [data], [output])
        return
    reals = g.temporary(OperandType.TENSOR_FLOAT32, g.dimensions(data))
    g.emit(OperationType.DEQUANTIZE, [data], [reals])
    g.emit(OperationType.CAST, [reals], [output])


def chain(g: SubgraphWriter, kind: OperationType, parts: Sequence[int]) -> list[int]:
    """Running sums: the first part, and each further part added to the sum before it."""
    sums = [parts[0]]
    for part in parts[1:]:
        sums.append(_binary(g, kind, sums[-1], part, g.like(part)))
    return sums
