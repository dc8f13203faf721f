"""Elementwise operators: functions of one value, arithmetic, comparisons, selections.

Each conversion takes the writer and the operator and returns the operator's outputs. Whole numbers of 64 bits are computed in 32
only where the bounds of the inputs prove that the result fits.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from aionn.hal import FusedActivation, OperationType
from aionn.models.builder import Value
from aionn.models.onnx.formula import Formula, activated, aligned, expanded
from aionn.models.onnx.operator import Convert, Operator
from aionn.models.onnx.tensors import INT32, Inexpressible, Shape, Tensor, stored_shape
from aionn.models.onnx.writer import GraphWriter

__all__ = ["arithmetic", "cast", "clip", "compare", "composed", "direct", "divide", "logical", "modulo", "power", "prelu", "relu",
           "same", "select", "swiglu", "variadic"]  # fmt: skip

Limits = tuple[int, int]


def need_float(tensor: Tensor) -> None:
    if not tensor.is_float:
        raise Inexpressible(f"values of type {tensor.dtype}")


def narrowed(tensor: Tensor, limits: Limits) -> Limits:
    """The bounds of a computed whole number.

    Raises:
        Inexpressible: Its type has 64 bits, and its bounds exceed 32 bits.
    """
    if tensor.dtype != "int64":
        return INT32
    if limits[0] < INT32[0] or limits[1] > INT32[1]:
        raise Inexpressible("arithmetic on INT64 whose results may not fit 32 bits")
    return limits


def same(g: GraphWriter, op: Operator) -> Tensor:
    """The input itself."""
    return op.input(0)


def direct(kind: OperationType, *others: str) -> Convert:
    """One operation with one input: of floats, and of the other given types."""

    def convert(g: GraphWriter, op: Operator) -> Tensor:
        x = op.input(0)
        if not x.is_float and x.dtype not in others:
            raise Inexpressible(f"values of type {x.dtype}")
        low, high = x.limits
        limits = None
        if kind == OperationType.NEG:
            limits = narrowed(x, (-high, -low)) if x.dtype in ("int32", "int64") else None
        elif kind == OperationType.ABS and x.dtype in ("int32", "int64"):
            least = 0 if low <= 0 <= high else min(abs(low), abs(high))
            limits = narrowed(x, (least, max(abs(low), abs(high))))
        return _like(g, x, g.emit(kind, [g.form(x, x.order)]), limits)

    return convert


def _like(
    g: GraphWriter, x: Tensor, value: Value | Formula, limits: Limits | None = None, dtype: str | None = None
) -> Tensor:
    result = value.value if isinstance(value, Formula) else value
    return g.tensor(result, dtype or x.dtype, x.shape, order=x.order, limits=limits)


def composed(formula: Callable[[Formula, Operator], Formula], *, is_wide: bool = False) -> Convert:
    """A formula of one float value; ``is_wide`` computes that of float16 in float32."""

    def convert(g: GraphWriter, op: Operator) -> Tensor:
        x = op.input(0)
        need_float(x)
        f = Formula(g, g.form(x, x.order))
        if is_wide and x.dtype == "float16":
            return _like(g, x, formula(f.cast(g.described("float32")), op).cast(g.described("float16")))
        return _like(g, x, formula(f, op))

    return convert


def relu(g: GraphWriter, op: Operator) -> Tensor:
    x = op.input(0)
    if x.is_float:
        return _like(g, x, g.emit(OperationType.RELU, [g.form(x, x.order)]))
    if x.dtype in ("int32", "int64", "int8"):
        limits = (max(0, x.limits[0]), max(0, x.limits[1]))
        return _like(g, x, Formula(g, g.form(x, x.order)).maximum(0), limits)
    raise Inexpressible(f"values of type {x.dtype}")


# Formulas of one value


def ceil(x: Formula, op: Operator) -> Formula:
    return -((-x).floor())


def reciprocal(x: Formula, op: Operator) -> Formula:
    return 1 / x


def cosine(x: Formula, op: Operator) -> Formula:
    half = (x * 0.5).sin()
    return 1 - half * half * 2


def tangent(x: Formula, op: Operator) -> Formula:
    return x.sin() / cosine(x, op)


def hyperbolic_sine(x: Formula, op: Operator) -> Formula:
    # Near 0 a difference of exponentials loses all digits, so it is computed from t = tanh(x / 2): sinh(x) = 2 t / (1 - t * t).
    # Beyond 1 that formula loses digits, so the difference is used.
    t = (x * 0.5).tanh()
    near = 2 * t / (1 - t * t)
    far = _half_exponential(x) - _half_exponential(-x)
    return abs(x).less(1).where(near, far, x)


def hyperbolic_cosine(x: Formula, op: Operator) -> Formula:
    return _half_exponential(x) + _half_exponential(-x)


def _half_exponential(x: Formula) -> Formula:
    """exp(x) / 2 as exp(x - 1) * (e / 2), since exp(x) overflows before its half does; from 1 on the difference is exact."""
    return (x - 1).exp() * (math.e / 2)


def softplus(x: Formula, op: Operator | None = None) -> Formula:
    return ((-abs(x)).exp() + 1).log() + x.maximum(0)


def softsign(x: Formula, op: Operator) -> Formula:
    return x / (abs(x) + 1)


def mish(x: Formula, op: Operator) -> Formula:
    return x * softplus(x).tanh()


def swish(x: Formula, op: Operator) -> Formula:
    alpha = op.real("alpha", 1.0)
    return x * (x if alpha == 1 else x * alpha).sigmoid()


def elu(x: Formula, op: Operator) -> Formula:
    return _elu(x, op.real("alpha", 1.0))


def _elu(x: Formula, alpha: float) -> Formula:
    return Formula(x.g, x.g.emit(OperationType.ELU, [x.value, x.g.scalar(alpha, x.value)]))


def selu(x: Formula, op: Operator) -> Formula:
    alpha, gamma = op.real("alpha", 1.6732632423543772), op.real("gamma", 1.0507009873554805)
    return _elu(x, alpha) * gamma


def celu(x: Formula, op: Operator) -> Formula:
    alpha = op.real("alpha", 1.0)
    return x.maximum(0) + _elu((x / alpha).minimum(0), 1.0) * alpha


def hard_sigmoid(x: Formula, op: Operator) -> Formula:
    return (x * op.real("alpha", 0.2) + op.real("beta", 0.5)).maximum(0).minimum(1)


def leaky_relu(x: Formula, op: Operator) -> Formula:
    alpha = x.g.like(op.real("alpha", 0.01), x.value)
    return Formula(x.g, x.g.emit(OperationType.PRELU, [x.value, alpha]))


def thresholded_relu(x: Formula, op: Operator) -> Formula:
    return x.greater(op.real("alpha", 1.0)).where(x, 0, x)


def shrink(x: Formula, op: Operator) -> Formula:
    lambd, bias = op.real("lambd", 0.5), op.real("bias", 0.0)
    inner = x.greater(lambd).where(x - bias, 0, x)
    return x.less(-lambd).where(x + bias, inner, x)


def sign(x: Formula, op: Operator) -> Formula:
    return x.greater(0).where(1, x.less(0).where(-1, x, x), x)


def round_(x: Formula, op: Operator) -> Formula:
    """Rounds halves to even: adding 2 ** 23, from which on all floats are whole numbers, drops the fraction."""
    size = abs(x)
    rounded = (size + 2.0**23) - 2.0**23
    whole = size.less(2.0**23).where(rounded, size, x)
    return x.less(0).where(-whole, whole, x)


_ERF_ABOVE = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05, -7.34990630326855e-04,
    -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
_ERF_BELOW = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02,
)  # fmt: skip
"""Coefficients of the error function from -4 to 4 as x * P(x ** 2) / Q(x ** 2), exact to float32. Highest powers first."""


def erf(x: Formula, op: Operator | None = None) -> Formula:
    near = x.maximum(-4).minimum(4)
    square = near * near

    def polynomial(coefficients: Sequence[float]) -> Formula:
        total = square * coefficients[0] + coefficients[1]
        for coefficient in coefficients[2:]:
            total = square * total + coefficient
        return total

    return near * polynomial(_ERF_ABOVE) / polynomial(_ERF_BELOW)


def gelu(x: Formula, op: Operator) -> Formula:
    approximate = op.text("approximate", "none")
    if approximate == "tanh":
        curve = ((x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)).tanh()
    elif approximate == "none":
        curve = erf(x * math.sqrt(0.5))
    else:
        op.refuse("attribute 'approximate'", "none or tanh", approximate)
    return x * 0.5 * (curve + 1)


def quick_gelu(x: Formula, op: Operator) -> Formula:
    return x * (x * op.real("alpha", 1.702)).sigmoid()


def is_nan(g: GraphWriter, op: Operator) -> Tensor:
    x = op.input(0)
    need_float(x)
    f = Formula(g, g.form(x, x.order))
    return _like(g, x, f.differs(f), dtype="bool")


def is_inf(g: GraphWriter, op: Operator) -> Tensor:
    x = op.input(0)
    need_float(x)
    f = Formula(g, g.form(x, x.order))
    wanted = op.integer("detect_negative", 1), op.integer("detect_positive", 1)
    if wanted == (0, 0):
        return _like(g, x, f.less(-math.inf), dtype="bool")
    found = {(1, 1): abs(f), (0, 1): f, (1, 0): -f}[bool(wanted[0]), bool(wanted[1])]
    return _like(g, x, found.equal(math.inf), dtype="bool")


# Several values


def _old_broadcast(op: Operator, tensors: list[Tensor], g: GraphWriter) -> list[Tensor]:
    """Reshape the second value for versions before 7, in which the attribute ``axis`` aligned its axes with those of the first."""
    if op.version >= 7:
        return tensors
    op.integer("broadcast", 0)
    op.ignore("consumed_inputs")
    a, b = tensors
    axis = op.integer("axis", a.rank - b.rank)
    if b.rank == 0 or b.rank >= a.rank:
        return [a, b]
    shape = b.shape + (1,) * (a.rank - op.axis(axis, a.rank) - b.rank)
    return [a, _with_shape(g, b, shape)]


def _with_shape(g: GraphWriter, x: Tensor, shape: Shape) -> Tensor:
    """The same elements in a shape of as many elements."""
    if x.shape == shape:
        return x
    if x.array is not None:
        return g.constant(x.array.reshape(shape), x.dtype)
    return g.tensor(g.reshaped(g.form(x), stored_shape(shape)), x.dtype, shape, limits=x.limits)


def arithmetic(kind: OperationType) -> Convert:
    """ADD, SUB and MUL."""

    def convert(g: GraphWriter, op: Operator) -> Tensor:
        a, b = _old_broadcast(op, [op.input(0), op.input(1)], g)
        if not a.is_float and a.dtype not in ("int32", "int64"):
            raise Inexpressible(f"values of type {a.dtype}")
        limits = narrowed(a, _limits(kind, a.limits, b.limits)) if not a.is_float else None
        both = aligned(g, op, [a, b])
        fused = op.activation if a.is_float else FusedActivation.NONE
        value = g.emit(kind, [*both.values, int(fused)])
        if fused != op.activation:
            value = activated(g, value, op.activation)
        return both.tensor(value, a.dtype, limits)

    return convert


def _limits(kind: OperationType, a: Limits, b: Limits) -> Limits:
    if kind == OperationType.ADD:
        return a[0] + b[0], a[1] + b[1]
    if kind == OperationType.SUB:
        return a[0] - b[1], a[1] - b[0]
    products = [x * y for x in a for y in b]
    return min(products), max(products)


def divide(g: GraphWriter, op: Operator) -> Tensor:
    """DIV; quotients of whole numbers are corrected, since ONNX rounds towards 0 and the HAL rounds down."""
    a, b = _old_broadcast(op, [op.input(0), op.input(1)], g)
    both = aligned(g, op, [a, b])
    if a.is_float:
        return both.tensor(g.emit(OperationType.DIV, [*both.values, int(op.activation)]), a.dtype)
    if a.dtype not in ("int32", "int64"):
        raise Inexpressible(f"values of type {a.dtype}")
    size = max(abs(a.limits[0]), abs(a.limits[1]))
    limits = narrowed(a, (-size, size))
    x, y = both.formulas()
    quotient = x / y
    if a.limits[0] < 0 or b.limits[0] < 0:
        quotient = quotient + _rounds_up(x, y, quotient)
    elif a.dtype == "int64":
        limits = (0, a.limits[1])
    return both.tensor(activated(g, quotient.value, op.activation), a.dtype, limits)


def _rounds_up(x: Formula, y: Formula, quotient: Formula) -> Formula:
    """1 where an exact quotient is negative and not whole, so that rounding down differs from rounding towards 0, else 0."""
    rest = (x - quotient * y).differs(0)
    negative = x.less(0).differs(y.less(0))
    return rest.both(negative).where(1, 0, quotient)


def swiglu(g: GraphWriter, op: Operator) -> Tensor:
    """The first value times the LOGISTIC of alpha times itself, times the second value; that of float16 in float32."""
    a, b = op.input(0), op.input(1)
    need_float(a)
    both = aligned(g, op, [a, b])
    x, y = both.formulas()
    if a.dtype != "float16":
        return both.tensor(swish(x, op) * y, a.dtype)
    wide = g.described("float32")
    product = swish(x.cast(wide), op) * y.cast(wide)
    return both.tensor(product.cast(g.described("float16")), a.dtype)


def modulo(g: GraphWriter, op: Operator) -> Tensor:
    """x - floor(x / y) * y of whole numbers, or the remainder with the sign of x if ``fmod`` is set."""
    a, b = op.input(0), op.input(1)
    is_c = bool(op.integer("fmod", 0))
    if a.dtype not in ("int32", "int64"):
        raise Inexpressible(f"values of type {a.dtype}")
    both = aligned(g, op, [a, b])
    x, y = both.formulas()
    quotient = x / y
    if is_c and (a.limits[0] < 0 or b.limits[0] < 0):
        quotient = quotient + _rounds_up(x, y, quotient)
    size = max(abs(b.limits[0]), abs(b.limits[1]))
    return both.tensor(x - quotient * y, a.dtype, narrowed(a, (-size, size)) if a.dtype == "int64" else None)


def power(g: GraphWriter, op: Operator) -> Tensor:
    a, b = _old_broadcast(op, [op.input(0), op.input(1)], g)
    need_float(a)
    if not b.is_float and b.dtype not in ("int32", "int64"):
        raise Inexpressible(f"exponents of type {b.dtype}")
    both = aligned(g, op, [a, b])
    x, y = both.values
    if y.operand.type != x.operand.type:
        y = g.emit(OperationType.CAST, [y], x.operand)
    return both.tensor(g.emit(OperationType.POW, [x, y]), a.dtype)


def variadic(kind: OperationType, *, is_mean: bool = False) -> Convert:
    """A chain of ADD, MAXIMUM or MINIMUM."""

    def convert(g: GraphWriter, op: Operator) -> Tensor:
        tensors = op.given()
        op.ignore("consumed_inputs")
        first = tensors[0]
        numbers = ("int32", "int64", "uint8", "int8") if kind != OperationType.ADD else ()
        if not first.is_float and first.dtype not in numbers:
            raise Inexpressible(f"values of type {first.dtype}")
        all_ = aligned(g, op, tensors)
        total, *rest = all_.formulas()
        is_fused = len(tensors) == 2 and kind == OperationType.ADD and not is_mean
        for one in rest:
            if is_fused:
                total = Formula(g, g.emit(kind, [total.value, one.value, int(op.activation)]))
            else:
                total = total._binary(kind, one)
        if not is_fused:
            total = Formula(g, activated(g, total.value, op.activation))
        if is_mean and rest:
            total = total / len(tensors)
        lows, highs = [t.limits[0] for t in tensors], [t.limits[1] for t in tensors]
        choose = max if kind == OperationType.MAXIMUM else min
        return all_.tensor(total, first.dtype, (choose(lows), choose(highs)))

    return convert


def compare(kind: OperationType) -> Convert:
    """A comparison."""

    def convert(g: GraphWriter, op: Operator) -> Tensor:
        a, b = _old_broadcast(op, [op.input(0), op.input(1)], g)
        both = aligned(g, op, [a, b])
        return both.tensor(g.emit(kind, both.values, g.truth), "bool")

    return convert


def logical(kind: OperationType) -> Convert:
    """An operation of truth values."""

    def convert(g: GraphWriter, op: Operator) -> Tensor:
        a, b = _old_broadcast(op, [op.input(0), op.input(1)], g)
        both = aligned(g, op, [a, b])
        for tensor in (a, b):
            if tensor.dtype != "bool":
                op.refuse("types", "truth values", tensor.dtype)
        return both.tensor(g.emit(kind, both.values, g.truth), "bool")

    return convert


def select(g: GraphWriter, op: Operator) -> Tensor:
    """SELECT; its inputs must have the same shape, so they are repeated to it first."""
    condition, yes, no = op.input(0), op.input(1), op.input(2)
    all_ = aligned(g, op, [condition, yes, no])
    values = [expanded(g, t, all_.shape, all_.order) for t in (condition, yes, no)]
    limits = (min(yes.limits[0], no.limits[0]), max(yes.limits[1], no.limits[1]))
    if yes.dtype == "bool":
        # SELECT takes no truth values: (condition AND yes) OR (NOT condition AND no) is the same.
        inverse = g.emit(OperationType.LOGICAL_NOT, [values[0]])
        sides = [
            g.emit(OperationType.LOGICAL_AND, [values[0], values[1]]),
            g.emit(OperationType.LOGICAL_AND, [inverse, values[2]]),
        ]
        value = g.emit(OperationType.LOGICAL_OR, sides)
    else:
        value = g.emit(OperationType.SELECT, values, g.described(yes.dtype))
    return g.tensor(value, yes.dtype, all_.shape, order=all_.order, limits=limits)


def clip(g: GraphWriter, op: Operator) -> Tensor:
    """RELU, RELU1 or RELU6 for their limits, else MAXIMUM and MINIMUM."""
    x = op.input(0)
    if not x.is_float and x.dtype not in ("int32", "int64", "uint8", "int8"):
        raise Inexpressible(f"values of type {x.dtype}")
    f = Formula(g, g.form(x, x.order))
    op.ignore("consumed_inputs")
    if op.version < 11:
        low, high = op.real("min", -math.inf), op.real("max", math.inf)
        activation = ACTIVATIONS.get((low, high))
        if activation is not None:
            return _like(g, x, g.emit(activation, [f.value]))
        f = f if low == -math.inf else f.maximum(low)
        return _like(g, x, f if high == math.inf else f.minimum(high))
    bounds = [op.input(p) if op.has(p) else None for p in (1, 2)]
    arrays = [None if b is None else b.array for b in bounds]
    if x.is_float and all(b is None or a is not None for a, b in zip(arrays, bounds, strict=True)):
        low, high = (
            default if array is None else float(array.reshape(()))
            for array, default in zip(arrays, (-math.inf, math.inf), strict=True)
        )
        activation = ACTIVATIONS.get((low, high))
        if activation is not None:
            return _like(g, x, g.emit(activation, [f.value]))
    low_high = list(x.limits)
    for position, bound in enumerate(bounds):
        if bound is None:
            continue
        if bound.size != 1:
            op.refuse(f"input {position + 1}", "one number", list(bound.shape))
        is_beyond = bound.limits[1] <= x.limits[0] if position == 0 else bound.limits[0] >= x.limits[1]
        if not x.is_float and is_beyond:
            continue  # A bound beyond the value's own range, such as the largest number of 64 bits, has no effect.
        other = Formula(g, g.reshaped(g.form(bound), (1,)))
        f = f.maximum(other) if position == 0 else f.minimum(other)
        pick = max if position == 0 else min
        low_high = [pick(low_high[0], bound.limits[0]), pick(low_high[1], bound.limits[1])]
    return _like(g, x, f, (min(low_high), max(low_high)))


ACTIVATIONS = {
    (0.0, math.inf): OperationType.RELU,
    (-1.0, 1.0): OperationType.RELU1,
    (0.0, 6.0): OperationType.RELU6,
}
"""Operations that clip to a range, by the range."""


def prelu(g: GraphWriter, op: Operator) -> Tensor:
    x, slope = op.input(0), op.input(1)
    need_float(x)
    if op.version < 7 and slope.rank == 1 and slope.size > 1 and x.rank > 1:
        slope = _with_shape(g, slope, slope.shape + (1,) * (x.rank - 2))  # One slope for each channel.
    both = aligned(g, op, [x, slope])
    if both.shape != x.shape:
        op.refuse("slope", f"a shape that broadcasts to {list(x.shape)}", list(slope.shape))
    return both.tensor(g.emit(OperationType.PRELU, both.values), x.dtype)


# Types


def cast(g: GraphWriter, op: Operator, target: str, source: Tensor | None = None) -> Tensor:
    """CAST where the HAL's result equals that of ONNX; NOT_EQUAL to truth values, and SELECT from them."""
    x = op.input(0) if source is None else source
    if x.dtype == target:
        return x
    if "bfloat16" in (x.dtype, target) and target in ("bfloat16", "float32", "float64"):
        if x.array is not None:
            return g.constant(g.rounded(x.array, target), target)
        if target == "bfloat16":
            raise Inexpressible("values that are rounded to BFLOAT16")
        return _renamed(g, x, target)  # float32 holds them already.
    value = g.form(x, x.order)
    g.check_plain(value)
    like = g.described(target)
    if target == "bool":
        return _like(g, x, g.as_truth(value), dtype="bool")
    if x.dtype == "bool":
        return _like(g, x, g.selected(value, like, 1, 0, value.operand.dimensions), (0, 1), target)
    if target in ("int32", "int64") and x.dtype in ("int32", "int64", "uint8", "int8"):
        if x.dtype in ("int32", "int64"):
            return _renamed(g, x, target)
        limits = (0, 255) if x.dtype == "uint8" else (-128, 127)
        if x.dtype == "int8":
            value = g.emit(OperationType.DEQUANTIZE, [value], g.described("float32"))
        return _like(g, x, g.emit(OperationType.CAST, [value], like), limits, target)
    if target == "int64":
        raise Inexpressible("a cast of floats to INT64, which may not fit 32 bits")
    if target in ("uint8", "int8"):
        return _like(g, x, _to_bytes(g, x, target), dtype=target)
    if x.dtype == "int8":
        return _like(g, x, g.emit(OperationType.DEQUANTIZE, [value], like), dtype=target)
    return _like(g, x, g.emit(OperationType.CAST, [value], like), dtype=target)


def _renamed(g: GraphWriter, x: Tensor, target: str) -> Tensor:
    """The same numbers with another declared width: both widths are held in 32 bits."""
    if x.array is not None:
        g.charge(8 * x.size)
        return g.constant(x.array.astype(target))
    result = Tensor(target, x.shape, order=x.order, limits=x.limits)
    result.forms = x.forms
    return result


def _to_bytes(g: GraphWriter, x: Tensor, target: str) -> Value | Formula:
    low, high = (0, 255) if target == "uint8" else (-128, 127)
    f = Formula(g, g.form(x, x.order))
    if not x.is_float and (x.limits[0] < low or x.limits[1] > high or x.dtype in ("uint8", "int8")):
        raise Inexpressible(f"a cast of {x.dtype} to {target}, whose numbers wrap around")
    if target == "uint8":
        return f.cast(g.described("uint8"))
    whole = f.cast(g.described("int32")).cast(g.described("float32"))
    return g.emit(OperationType.QUANTIZE, [whole.value], g.described("int8"))
