"""Fixed-point functions on 16-bit integers: products, the logistic function, tanh; and the inverse square root of integers.

Owns what the integer LSTMs compute their gates with. A number with ``integer_bits`` has ``15 - integer_bits`` fractional bits.
Every step rounds to 16 bits, so the functions differ from those of ``aionn.ops.numerics.fixed_point``, which round to 32.

Invariants:
1. Results equal those of the spec's kernels for each of the 65536 arguments, to the last bit.
2. Logistic and tanh are looked up: a table per number of integer bits, computed once.

Source: gemmlowp's fixed-point functions and the inverse square root of TensorFlow Lite's integer layer normalisation, which the NN
HAL's CPU operations use.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.ops.numerics.fixed_point import (
    Int64Array,
    rounding_divide_by_pot,
    saturating_rounding_doubling_high_mul,
)

__all__ = [
    "INT16_MAX",
    "INT16_MIN",
    "INTEGER_BITS_MAX",
    "inverse_sqrt",
    "logistic_int16",
    "multiply_int16",
    "saturate_int16",
    "shift_left_int16",
    "tanh_int16",
]

INT16_MIN, INT16_MAX = -(1 << 15), (1 << 15) - 1
INTEGER_BITS_MAX = 6
"""The most integer bits that ``tanh_int16`` takes; the spec's kernels know no more."""

_EXP_FACTORS = (25520, 19875, 12055, 4435, 600, 11, 0)
"""exp(-2**k) for k from -2 to 4, with 15 fractional bits."""
_EXP_MINUS_EIGHTH, _THIRD = 28918, 10923
_DIVISION_START = (23130, -15420)
"""48/17 and -32/17 with 13 fractional bits: the best linear start of the division."""


def saturate_int16(x: npt.NDArray[Any]) -> Int64Array:
    """Clips to the range of 16 bits."""
    clipped: Int64Array = np.clip(x, INT16_MIN, INT16_MAX).astype(np.int64, copy=False)
    return clipped


def shift_left_int16(x: Int64Array, count: int) -> Int64Array:
    """``x * 2**count``, saturated."""
    return saturate_int16(x << count)


def multiply_int16(a: npt.ArrayLike, b: npt.ArrayLike) -> Int64Array:
    """The high half of ``2 * a * b`` of 16-bit integers, rounded to nearest, half up; -2**15 squared saturates.

    As fixed-point numbers: their product, the integer bits of both added.
    """
    product = np.asarray(a, dtype=np.int64) * np.asarray(b, dtype=np.int64)
    high: Int64Array = np.minimum((product + (1 << 14)) >> 15, INT16_MAX)
    return high


def _exp_on_negative_values(x: Int64Array, integer_bits: int) -> Int64Array:
    """exp(x) for x <= 0; the result has 15 fractional bits, 1 is 2**15 - 1."""
    fraction_bits = 15 - integer_bits
    quarter = 1 << (fraction_bits - 2)
    in_quarter = (x & (quarter - 1)) - quarter
    # A Taylor polynomial around -1/8 covers the last quarter before 0.
    y = (in_quarter << integer_bits) + (1 << 12)
    y2 = multiply_int16(y, y)
    y3, y4 = multiply_int16(y2, y), multiply_int16(y2, y2)
    inner = multiply_int16(rounding_divide_by_pot(y4, 2) + y3, _THIRD) + y2
    terms = multiply_int16(_EXP_MINUS_EIGHTH, y + rounding_divide_by_pot(inner, 1))
    result = saturate_int16(_EXP_MINUS_EIGHTH + terms)
    # The rest of x is taken apart into powers of two, each with its factor.
    remainder = in_quarter - x
    for exponent, factor in zip(range(-2, min(integer_bits, 5)), _EXP_FACTORS, strict=False):
        is_set = remainder & (1 << (fraction_bits + exponent)) != 0
        result = np.where(is_set, multiply_int16(result, factor), result)
    if integer_bits > 5:
        result = np.where(x < -(1 << (20 - integer_bits)), 0, result)
    return np.where(x == 0, INT16_MAX, result)


def _inverse_of_half_sum(x: Int64Array) -> Int64Array:
    """2 / (1 + x) for x in [0, 1] by three steps of Newton and Raphson; 15 fractional bits in, 13 out."""
    half_denominator = (x + INT16_MAX + 1) >> 1
    estimate = _DIVISION_START[0] + multiply_int16(half_denominator, _DIVISION_START[1])
    for _ in range(3):
        error = (1 << 13) - multiply_int16(half_denominator, estimate)
        estimate = estimate + shift_left_int16(multiply_int16(estimate, error), 2)
    return estimate


@functools.lru_cache(maxsize=2 * (INTEGER_BITS_MAX + 1))
def _table(function: str, integer_bits: int) -> npt.NDArray[np.int16]:
    """The function of every 16-bit integer, in ascending order."""
    x = np.arange(INT16_MIN, INT16_MAX + 1, dtype=np.int64)
    if function == "tanh":
        # tanh(x) = 2 / (1 + exp(-2x)) - 1; a further integer bit doubles the argument.
        power = _exp_on_negative_values(-np.abs(x), integer_bits + 1)
        positive = shift_left_int16(_inverse_of_half_sum(power) - (1 << 13), 2)
        values = np.sign(x) * positive
    else:
        power = _exp_on_negative_values(-np.abs(x), integer_bits)
        positive = shift_left_int16(_inverse_of_half_sum(power), 1)
        values = np.where(x > 0, positive, INT16_MAX - positive)
        values = np.where(x == 0, 1 << 14, values)
    table = values.astype(np.int16)
    table.flags.writeable = False
    return table


def _looked_up(function: str, integer_bits: int, x: npt.NDArray[Any]) -> Int64Array:
    values: Int64Array = _table(function, integer_bits)[x - INT16_MIN].astype(np.int64)
    return values


def logistic_int16(x: npt.NDArray[Any], integer_bits: int) -> Int64Array:
    """1 / (1 + exp(-x)).

    Args:
        x: 16-bit fixed-point numbers with ``integer_bits`` integer bits.
        integer_bits: From 0 to ``INTEGER_BITS_MAX``.

    Returns:
        Fixed-point numbers with 15 fractional bits.
    """
    return _looked_up("logistic", integer_bits, x)


def tanh_int16(x: npt.NDArray[Any], integer_bits: int) -> Int64Array:
    """The hyperbolic tangent; arguments and result as those of ``logistic_int16``."""
    return _looked_up("tanh", integer_bits, x)


def inverse_sqrt(value: int) -> tuple[int, int]:
    """``1 / sqrt(value)`` of a 32-bit integer as ``m * 2**(shift - 31)``, for ``multiply_by_quantized_multiplier``.

    0 counts as 1, whose result is the largest ``m``.

    Returns:
        ``(m, shift)``; the shift is 0 or negative.
    """
    if value <= 1:
        return (1 << 31) - 1, 0
    right_shift = 11
    while value >= 1 << 29:
        value //= 4
        right_shift += 1
    pairs = (31 - value.bit_length()) // 2 - 1
    right_shift -= pairs
    value <<= 2 * pairs
    # From here on 32-bit numbers with 3 integer bits: Newton and Raphson from 1 on, five steps.
    half, least, largest = rounding_divide_by_pot(value >> 1, 1), -(1 << 31), (1 << 31) - 1
    product = saturating_rounding_doubling_high_mul
    estimate = np.asarray(1 << 28, dtype=np.int64)
    for _ in range(5):
        cube = np.clip(product(product(estimate, estimate), estimate) << 6, least, largest)
        difference = product((1 << 28) + (1 << 27), estimate) - product(half, cube)
        estimate = np.clip(difference << 3, least, largest)
    half_sqrt_2 = 1518500250
    result = int(product(estimate, half_sqrt_2))
    return (result << max(-right_shift, 0)), -max(right_shift, 0)
