"""The tolerance of two results, and their difference.

Owns the named criteria of the random graph tests and the judgement by them: each element, the mean difference (bias) and the mean
squared difference. Knows no model.

Invariants:
1. Nothing is left out of the judgement because of its size or type. An expected NaN allows anything, as its place in a model has no
   defined value, if the judgement is not exact. An expected infinity demands the same infinity, or a finite number from the
   outermost part of the type's range.
2. Bias and squared difference are judged where at least ``ELEMENTS_MIN`` elements are finite; those of floats are relative to the
   expected value where that is beyond 1.

Source: the accuracy criteria of the NN HAL's random graph tests. Theirs skip every float16 element and every float32 element beyond
100; these do not. Their limit of 1 for single float16 elements of all but the simplest operations, which so was never tried, is
0.05 here, and 0.1 for large graphs.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.hal import OPERAND_TYPE_PROPERTIES, OperandType

__all__ = ["Criteria", "Difference", "Limit", "judge"]

ELEMENTS_MIN = 10
"""Fewer elements have no meaningful mean."""

_BOOL_SHARE = 0.1
"""Booleans may differ in this share of the elements, rounded up: rounding decides a comparison of nearly equal numbers."""

_NEAR_OVERFLOW = 0.98
"""From this share of the largest number on, a result may be finite where infinity is expected."""

Array = npt.NDArray[Any]


class Limit(msgspec.Struct, frozen=True, array_like=True):
    """Limits for one kind of type; None is not judged.

    Attributes:
        bias: Of the magnitude of the mean difference.
        mse: Of the mean squared difference.
        atol: Of the difference of one element, beside ``rtol``.
        rtol: As a share of the expected element.
    """

    bias: float | None
    mse: float | None
    atol: float
    rtol: float = 0.0


class Criteria(enum.Enum):
    """Limits by kind of type, in the order float32, float16, quantised; int32 may differ by 1, booleans in a tenth."""

    STRICT = (Limit(1e-7, 1e-10, 1e-6, 1e-6), Limit(1e-4, 1e-8, 1e-3, 1e-3), Limit(0.1, 0.1, 1))
    """Operations that only move, select or compare."""

    MEDIUM = (Limit(1e-6, 1e-8, 1e-5, 1e-5), Limit(1e-3, 1e-5, 1e-2, 1e-2), Limit(1.2, 1.2, 2))
    """One step of arithmetic."""

    RELAXED = (Limit(3e-5, 1e-6, 1e-3, 1e-3), Limit(5e-3, 1e-3, 5e-2, 5e-2), Limit(1.5, 1.5, 10))
    """Transcendental functions and sums."""

    CONVOLUTION = (Limit(4e-4, 1e-5, 2e-2, 2e-2), Limit(5e-2, 1e-2, 5e-2, 5e-2), Limit(1.5, 1.5, 10))
    """Sums over windows that may be large."""

    EDGE = (Limit(None, None, 1e-3, 1e-3), Limit(None, None, 5e-2, 5e-2), Limit(None, None, 2))
    """Single operations on values at the edges of their types: every element by itself, for the means are of the edges."""

    SMALL_GRAPH = (Limit(4e-4, 1e-5, 1e-2, 1e-2), Limit(5e-2, 1e-2, 5e-2, 5e-2), Limit(2.0, 2.0, 12))
    """A few operations."""

    LARGE_GRAPH = (Limit(1e-2, 1e-4, 1e-1, 1e-1), Limit(1e-1, 5e-2, 1e-1, 1e-1), Limit(2.0, 2.0, 12))
    """Many operations."""

    def limit(self, type: OperandType) -> Limit:
        """The limits for an operand type."""
        float32, float16, quantized = self.value
        if type in (OperandType.TENSOR_FLOAT32, OperandType.FLOAT32):
            return float32
        if type in (OperandType.TENSOR_FLOAT16, OperandType.FLOAT16):
            return float16
        if OPERAND_TYPE_PROPERTIES[type].is_quantized:
            return quantized
        return Limit(None, None, 1)


class Difference(msgspec.Struct, frozen=True):
    """A difference that the criteria do not allow.

    Attributes:
        output: Index of the output.
        what: The exceeded limit: ``element``, ``bias``, ``mean squared difference``, ``share of differing elements``, ``shape``.
        index: The worst element; empty where the difference is of the whole.
        expected: Expected value, shape or limit.
        got: The actual values.
    """

    output: int
    what: str
    index: tuple[int, ...]
    expected: str
    got: str

    def __str__(self) -> str:
        place = f"output {self.output}, {self.what}" + (f" {list(self.index)}" if self.index else "")
        return f"{place}: expected {self.expected}, got {self.got}"


def judge(
    output: int,
    type: OperandType,
    expected: Array,
    got: Array,
    criteria: Criteria,
    *,
    is_exact: bool = False,
    is_zero_signed: bool = False,
) -> Difference | None:
    """Compares one output with what is expected; None when it is close enough.

    Args:
        output: Its index, for the message.
        type: Its operand type.
        expected: The expected values, in the operand's type or wider.
        got: The values in the operand's type.
        criteria: The tolerances.
        is_exact: Whether integers and booleans must be equal, and NaN must be in the same places.
        is_zero_signed: Whether a zero must have the sign that is expected.
    """
    if expected.shape != got.shape:
        return Difference(output, "shape", (), f"{list(expected.shape)}", f"{list(got.shape)}")
    if is_exact:
        unequal = _not_equal(output, type, expected, got, is_zero_signed=is_zero_signed)
        if unequal is not None:
            return unequal
    if type in (OperandType.TENSOR_BOOL8, OperandType.BOOL):
        count, allowed = int(np.count_nonzero(expected != got)), int(np.ceil(_BOOL_SHARE * got.size))
        if count <= allowed:
            return None
        what = "share of differing elements"
        return Difference(output, what, (), f"at most {allowed} of {got.size}", str(count))
    limit = criteria.limit(type)
    wide_expected, wide_got = expected.astype(np.float64), got.astype(np.float64)
    is_float = got.dtype.kind == "f"
    is_right = np.isnan(wide_expected)
    is_finite = np.isfinite(wide_expected) & np.isfinite(wide_got)
    if is_float:
        largest = float(np.finfo(got.dtype).max) * _NEAR_OVERFLOW
        # One side of the largest number and the other beyond it, with the same sign.
        is_right |= (
            ~is_finite
            & (np.minimum(np.abs(wide_expected), np.abs(wide_got)) >= largest)
            & (np.sign(wide_expected) == np.sign(wide_got))
        )
    with np.errstate(invalid="ignore", over="ignore"):
        difference = wide_got - wide_expected
        excess = np.abs(difference) - (limit.atol + limit.rtol * np.abs(wide_expected))
    is_right |= is_finite & (excess <= 0)
    if not is_right.all():
        worst = np.where(is_right, -np.inf, np.where(np.isnan(excess), np.inf, excess))
        index = tuple(int(i) for i in np.unravel_index(int(np.argmax(worst)), got.shape))
        near = f"{float(wide_expected[index])!r} within {limit.atol:g} + {limit.rtol:g}*|x|"
        return Difference(output, "element", index, near, repr(float(wide_got[index])))
    return _judge_means(output, difference[is_finite], wide_expected[is_finite], is_float, limit)


def _not_equal(
    output: int, type: OperandType, expected: Array, got: Array, *, is_zero_signed: bool
) -> Difference | None:
    """The first element that must be equal and is not: an integer, a boolean, a NaN, the sign of a zero."""
    if got.dtype.kind == "f":
        wrong = np.isnan(expected) != np.isnan(got)
        if is_zero_signed:
            wrong |= (expected == 0) & (got == 0) & (np.signbit(expected) != np.signbit(got))
    elif OPERAND_TYPE_PROPERTIES[type].is_quantized:
        return None
    else:
        wrong = expected != got
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return Difference(output, "element", index, f"exactly {expected[index]!r}", repr(got[index]))


def _judge_means(
    output: int, difference: Array, expected: Array, is_float: bool, limit: Limit
) -> Difference | None:
    if difference.size < ELEMENTS_MIN or limit.bias is None or limit.mse is None:
        return None
    if is_float:
        difference = difference / np.maximum(1.0, np.abs(expected))
    bias, mse = float(difference.mean()), float(np.square(difference).mean())
    if abs(bias) > limit.bias:
        return Difference(output, "bias", (), f"at most {limit.bias:g}", f"{bias:g}")
    if mse > limit.mse:
        return Difference(output, "mean squared difference", (), f"at most {limit.mse:g}", f"{mse:g}")
    return None
