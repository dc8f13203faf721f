"""Functions of single elements, with broadcasting.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aionn.drivers.onnx_reference.arrays import Array, check_room, numbers, wide
from aionn.errors import InvalidArgument
from aionn.models.onnx.extension.narrow import NARROW, carrier_of, rounded
from aionn.models.onnx.schema import DataType

__all__ = ["KERNELS"]


def _unary(function: Callable[[Array], Any]) -> Callable[..., Array]:
    """A kernel of a function that is computed in at least 32 bits."""

    def kernel(x: Array, *, consumed_inputs: Any = None) -> Array:
        return np.asarray(function(wide(x)))

    return kernel


def aligned(a: Array, b: Array, axis: int | None, broadcast: int) -> tuple[Array, Array]:
    """The inputs of versions before 7, in which the second one's axes begin at ``axis`` of the first one's."""
    if broadcast and axis is not None and b.ndim < a.ndim:
        axis += a.ndim if axis < 0 else 0
        b = b.reshape((*b.shape, *[1] * (a.ndim - axis - b.ndim)))
    return a, b


def _binary(function: Callable[[Array, Array], Any]) -> Callable[..., Array]:
    def kernel(
        a: Array, b: Array, *, axis: int | None = None, broadcast: int = 0, consumed_inputs: Any = None
    ) -> Array:
        return np.asarray(function(*aligned(a, b, axis, broadcast)))

    return kernel


def _variadic(function: Callable[[Array, Array], Any]) -> Callable[..., Array]:
    def kernel(*inputs: Array, consumed_inputs: Any = None) -> Array:
        result = inputs[0]
        for array in inputs[1:]:
            result = np.asarray(function(result, array))
        return result

    return kernel


def mean(*inputs: Array, consumed_inputs: Any = None) -> Array:
    total = np.asarray(sum(wide(array) for array in inputs[1:]) + wide(inputs[0]))
    return total / len(inputs)


def divided(a: Array, b: Array) -> Array:
    """Whole numbers are divided towards 0."""
    if a.dtype.kind not in "iu":
        return np.asarray(a / b)
    if (b == 0).any():
        raise InvalidArgument("Div: expected no division of whole numbers by 0")
    quotient, rest = np.floor_divide(a, b), np.remainder(a, b)
    return np.asarray(quotient + ((rest != 0) & ((a < 0) != (b < 0))).astype(a.dtype))


def mod(a: Array, b: Array, *, fmod: int = 0) -> Array:
    if a.dtype.kind in "iu" and (b == 0).any():
        raise InvalidArgument("Mod: expected no division of whole numbers by 0")
    return np.asarray(np.fmod(a, b) if fmod else np.mod(a, b))


def power(
    a: Array, b: Array, *, axis: int | None = None, broadcast: int = 0, consumed_inputs: Any = None
) -> Array:
    """The result has the type of the base."""
    a, b = aligned(a, b, axis, broadcast)
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        if (b < 0).any():
            return np.trunc(np.power(a.astype(np.float64), b.astype(np.float64))).astype(a.dtype)
        return np.asarray(np.power(a, b.astype(a.dtype)))
    return np.power(a.astype(np.float64), b.astype(np.float64)).astype(a.dtype)


def bit_shift(a: Array, b: Array, *, direction: str) -> Array:
    """A shift by the width of the type or more gives 0, and -1 for negative numbers that are shifted to the right."""
    if direction not in ("LEFT", "RIGHT"):
        raise InvalidArgument(f"attribute 'direction': expected LEFT or RIGHT, got {direction!r:.40}")
    bits = a.dtype.itemsize * 8
    shift = np.minimum(b, bits - 1).astype(a.dtype)
    moved = np.left_shift(a, shift) if direction == "LEFT" else np.right_shift(a, shift)
    sign = np.where(a < 0, -1, 0).astype(a.dtype) if direction == "RIGHT" else np.zeros((), a.dtype)
    return np.where(b >= bits, sign, moved)


def clip(x: Array, low: Array | None = None, high: Array | None = None, *, min: Any = None, max: Any = None,
         consumed_inputs: Any = None) -> Array:  # fmt: skip
    lower = low if low is not None else min
    upper = high if high is not None else max
    if lower is not None:
        x = np.maximum(x, np.asarray(lower, x.dtype))
    return np.asarray(x if upper is None else np.minimum(x, np.asarray(upper, x.dtype)))


_erf = np.vectorize(math.erf, otypes=[np.float64])


def erf(x: Array) -> Array:
    return _erf(x.astype(np.float64)) if x.size else x


def gelu(x: Array, *, approximate: str = "none") -> Array:
    y = x.astype(np.float64)
    if approximate == "tanh":
        return np.asarray(0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))))
    if approximate != "none":
        raise InvalidArgument(f"attribute 'approximate': expected none or tanh, got {approximate!r:.40}")
    return 0.5 * y * (1 + _erf(y / math.sqrt(2))) if y.size else y


def softplus(x: Array) -> Array:
    y = wide(x)
    return np.logaddexp(y, np.zeros((), y.dtype))


def sigmoid(x: Array) -> Array:
    y = wide(x)
    positive = 1 / (1 + np.exp(-np.abs(y)))
    return np.where(y >= 0, positive, 1 - positive)


def swish(x: Array, *, alpha: float = 1.0) -> Array:
    return wide(x) * sigmoid(np.asarray(np.float32(alpha) * wide(x)))


def mish(x: Array) -> Array:
    return wide(x) * np.tanh(softplus(x))


def elu(x: Array, *, alpha: float = 1.0, consumed_inputs: Any = None) -> Array:
    y = wide(x)
    return np.where(y > 0, y, alpha * np.expm1(np.minimum(y, 0)))


def celu(x: Array, *, alpha: float = 1.0) -> Array:
    y = wide(x)
    return np.maximum(y, 0) + np.minimum(0, alpha * np.expm1(np.minimum(y, 0) / alpha))


def selu(x: Array, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875,
         consumed_inputs: Any = None) -> Array:  # fmt: skip
    return gamma * elu(x, alpha=alpha)


def leaky_relu(x: Array, *, alpha: float = 0.01, consumed_inputs: Any = None) -> Array:
    y = wide(x)
    return np.where(y >= 0, y, np.float32(alpha) * y)


def prelu(x: Array, slope: Array, *, consumed_inputs: Any = None) -> Array:
    if slope.ndim == 1 and x.ndim > 1 and slope.size == x.shape[1] != x.shape[-1]:
        slope = slope.reshape((-1, *[1] * (x.ndim - 2)))
    return np.where(x >= 0, x, slope * x)


def hard_sigmoid(x: Array, *, alpha: float = 0.2, beta: float = 0.5, consumed_inputs: Any = None) -> Array:
    return np.asarray(np.clip(np.float32(alpha) * wide(x) + np.float32(beta), 0, 1))


def hard_swish(x: Array) -> Array:
    return wide(x) * hard_sigmoid(x, alpha=1 / 6)


def thresholded_relu(x: Array, *, alpha: float = 1.0) -> Array:
    return np.where(x > alpha, x, np.zeros((), x.dtype))


def shrink(x: Array, *, bias: float = 0.0, lambd: float = 0.5) -> Array:
    y = x.astype(np.float64)
    return np.where(y < -lambd, y + bias, np.where(y > lambd, y - bias, 0))


def swiglu(a: Array, b: Array, *, alpha: float = 1.0) -> Array:
    return swish(a, alpha=alpha) * wide(b)


def is_inf(x: Array, *, detect_negative: int = 1, detect_positive: int = 1) -> Array:
    return (np.isposinf(x) & bool(detect_positive)) | (np.isneginf(x) & bool(detect_negative))


def where(condition: Array, yes: Array, no: Array) -> Array:
    return np.where(condition, yes, no)


def cast(
    x: Array, *, kind: DataType, to: int | None = None, saturate: int = 1, round_mode: str = "up"
) -> Array:
    return converted(x, kind, saturates=bool(saturate))


def cast_like(x: Array, like: Array, *, kind: DataType, saturate: int = 1, round_mode: str = "up") -> Array:
    return converted(x, kind, saturates=bool(saturate))


def converted(x: Array, kind: DataType, *, saturates: bool) -> Array:
    """Floats become whole numbers by cutting towards 0; numbers that such a type cannot hold give any result, as ONNX permits."""
    if kind in NARROW and carrier_of(kind).kind == "f":
        source = (
            np.where(np.isinf(x), np.copysign(1e300, x), x) if saturates and kind != DataType.BFLOAT16 else x
        )
        return rounded(source, kind, saturates=saturates and kind != DataType.BFLOAT16)
    return x.astype(carrier_of(kind))


def bit_cast(x: Array, *, out: np.dtype[Any], to: int) -> Array:
    """The same bytes under another type of the same size."""
    if out.itemsize != x.dtype.itemsize:
        raise InvalidArgument(f"BitCast: expected a type of {x.dtype.itemsize} bytes, got {out}")
    return np.ascontiguousarray(x).view(out).reshape(x.shape)


def identity(x: Array) -> Array:
    return x


def sign(x: Array) -> Array:
    return np.sign(x)


def shape_of(x: Array, *, start: int = 0, end: int | None = None) -> Array:
    return np.array(x.shape[start:end], np.int64)


def size_of(x: Array) -> Array:
    return np.array(x.size, np.int64)


def range_(start: Array, limit: Array, step: Array, *, stash_type: int = 1) -> Array:
    if not step.reshape(-1)[0]:
        raise InvalidArgument("Range: expected a step other than 0")
    first, last, distance = (value.reshape(()).item() for value in (start, limit, step))
    count = max(0, math.ceil((last - first) / distance))
    if count > 1 << 28:
        raise InvalidArgument(f"Range: expected at most {1 << 28} numbers, got {count}")
    return np.asarray((first + np.arange(count) * distance).astype(start.dtype))


def constant_of_shape(shape: Array, *, value: Array | None = None) -> Array:
    number = np.zeros((), np.float32) if value is None else value.reshape(())
    return np.full(check_room(numbers(shape), number.itemsize), number)


KERNELS: dict[str, Callable[..., Any]] = {
    "Abs": _unary(np.abs),
    "Acos": _unary(np.arccos),
    "Acosh": _unary(np.arccosh),
    "Add": _binary(np.add),
    "And": _binary(np.logical_and),
    "Asin": _unary(np.arcsin),
    "Asinh": _unary(np.arcsinh),
    "Atan": _unary(np.arctan),
    "Atanh": _unary(np.arctanh),
    "BitCast": bit_cast,
    "BitShift": bit_shift,
    "BitwiseAnd": _binary(np.bitwise_and),
    "BitwiseNot": _unary(np.bitwise_not),
    "BitwiseOr": _binary(np.bitwise_or),
    "BitwiseXor": _binary(np.bitwise_xor),
    "Cast": cast,
    "CastLike": cast_like,
    "Ceil": _unary(np.ceil),
    "Celu": celu,
    "Clip": clip,
    "ConstantOfShape": constant_of_shape,
    "Cos": _unary(np.cos),
    "Cosh": _unary(np.cosh),
    "Div": _binary(divided),
    "Elu": elu,
    "Equal": _binary(np.equal),
    "Erf": erf,
    "Exp": _unary(np.exp),
    "Floor": _unary(np.floor),
    "Gelu": gelu,
    "Greater": _binary(np.greater),
    "GreaterOrEqual": _binary(np.greater_equal),
    "HardSigmoid": hard_sigmoid,
    "HardSwish": hard_swish,
    "Identity": identity,
    "IsInf": is_inf,
    "IsNaN": _unary(np.isnan),
    "LeakyRelu": leaky_relu,
    "Less": _binary(np.less),
    "LessOrEqual": _binary(np.less_equal),
    "Log": _unary(np.log),
    "Max": _variadic(np.maximum),
    "Mean": mean,
    "Min": _variadic(np.minimum),
    "Mish": mish,
    "Mod": mod,
    "Mul": _binary(np.multiply),
    "Neg": _unary(np.negative),
    "Not": _unary(np.logical_not),
    "Or": _binary(np.logical_or),
    "PRelu": prelu,
    "Pow": power,
    "Range": range_,
    "Reciprocal": _unary(np.reciprocal),
    "Relu": _unary(lambda x: np.maximum(x, np.zeros((), x.dtype))),
    "Round": _unary(np.rint),
    "Selu": selu,
    "Shape": shape_of,
    "Shrink": shrink,
    "Sigmoid": sigmoid,
    "Sign": sign,
    "Sin": _unary(np.sin),
    "Sinh": _unary(np.sinh),
    "Size": size_of,
    "Softplus": softplus,
    "Softsign": _unary(lambda x: x / (1 + np.abs(x))),
    "Sqrt": _unary(np.sqrt),
    "Sub": _binary(np.subtract),
    "Sum": _variadic(np.add),
    "SwiGLU": swiglu,
    "Swish": swish,
    "Tan": _unary(np.tan),
    "Tanh": _unary(np.tanh),
    "ThresholdedRelu": thresholded_relu,
    "Where": where,
    "Xor": _binary(np.logical_xor),
}
"""The kernels by operator."""
