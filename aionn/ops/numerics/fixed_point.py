"""Fixed-point arithmetic of quantised operations, exact to the last bit.

The only home of integer multipliers, rounding and requantisation. All functions work on whole arrays in 64-bit integers, so that
no step can overflow where the spec's 32-bit arithmetic does not.

Invariants:
1. ``multiply_by_quantized_multiplier`` equals the spec's two-step rounding: a doubling high product rounded half up
   (saturating), then a rounding right shift, half away from zero.
2. Nothing here knows an operation.

Source: the gemmlowp fixed-point primitives that the NN HAL's CPU operations and TensorFlow Lite's reference kernels use.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.hal import FusedActivation, Operand, OperandType, operand_dtype

__all__ = [
    "Requantization",
    "activation_range",
    "dequantize",
    "exp_on_negative_values",
    "float_activation",
    "multiply_by_quantized_multiplier",
    "multipliers_of",
    "one_over_one_plus_x",
    "quantize",
    "quantize_multiplier",
    "quantized_range",
    "requantize",
    "rounding_divide_by_pot",
    "saturating_rounding_doubling_high_mul",
    "saturating_round_cast",
]

Int64Array = npt.NDArray[np.int64]


def quantize_multiplier(real: float) -> tuple[int, int]:
    """A positive real number as ``m * 2**(shift - 31)`` with ``m`` in [2**30, 2**31), or (0, 0) when it is too small.

    Returns:
        ``(m, shift)``; a positive shift multiplies.
    """
    if real == 0.0:
        return 0, 0
    fraction, shift = math.frexp(real)
    multiplier = math.floor(fraction * (1 << 31) + 0.5)
    if multiplier == 1 << 31:
        multiplier //= 2
        shift += 1
    if shift < -31:
        return 0, 0
    return multiplier, shift


def multipliers_of(reals: npt.ArrayLike) -> tuple[Int64Array, Int64Array]:
    """``quantize_multiplier`` of every entry: arrays of multipliers and of shifts, of the same shape."""
    values = np.asarray(reals, dtype=np.float64)
    pairs = [quantize_multiplier(float(v)) for v in values.reshape(-1)]
    multipliers = np.array([m for m, _ in pairs], dtype=np.int64).reshape(values.shape)
    shifts = np.array([s for _, s in pairs], dtype=np.int64).reshape(values.shape)
    return multipliers, shifts


def saturating_rounding_doubling_high_mul(a: npt.ArrayLike, b: npt.ArrayLike) -> Int64Array:
    """The high half of ``2 * a * b`` of 32-bit integers, rounded to nearest, half up; saturates at -2**31 squared.

    The spec nudges negative products by ``1 - 2**30`` and truncates; that is the floor with a nudge of ``2**30`` for either sign.
    """
    product = np.asarray(a, dtype=np.int64) * np.asarray(b, dtype=np.int64)
    high: Int64Array = np.minimum((product + (1 << 30)) >> 31, (1 << 31) - 1)
    return high


def rounding_divide_by_pot(x: npt.ArrayLike, exponent: npt.ArrayLike) -> Int64Array:
    """``x / 2**exponent`` rounded to nearest, half away from zero."""
    values = np.asarray(x, dtype=np.int64)
    exponents = np.asarray(exponent, dtype=np.int64)
    mask = (np.int64(1) << exponents) - 1
    threshold = (mask >> 1) + (values < 0)
    return (values >> exponents) + ((values & mask) > threshold)


def multiply_by_quantized_multiplier(
    x: npt.ArrayLike, multiplier: npt.ArrayLike, shift: npt.ArrayLike
) -> Int64Array:
    """``x * multiplier * 2**(shift - 31)`` with the spec's rounding. Arguments broadcast."""
    shifts = np.asarray(shift, dtype=np.int64)
    left = np.asarray(x, dtype=np.int64) << np.maximum(shifts, 0)
    return rounding_divide_by_pot(
        saturating_rounding_doubling_high_mul(left, multiplier), np.maximum(-shifts, 0)
    )


class Requantization:
    """32-bit sums of products as quantised values: bias, multiplier with the spec's two roundings, zero point, bounds.

    Equal to ``multiply_by_quantized_multiplier(sums + bias, ...) + zero_point``, clipped, in few passes: with the first rounding
    ``high = (sum * m + 2**30) >> 31`` (half up: what the doubling high product amounts to for either sign), the second,
    ``(high + 2**(e-1) - (high < 0)) >> e``, joins it in one shift by ``31 + e`` because a floor of a floor is one floor.

    Args:
        reals: The real multiplier of each channel, or one for all.
        bias: Added to the sums: one per channel.
        zero_point: The output's.
        low: Least result.
        high: Largest result.
        repeats: Number of repetitions of the channels in one row of the sums; long rows are quicker.
        rounds_once: Rounds half up after the shift alone.
    """

    __slots__ = ("_away", "_half", "_high", "_low", "_multiplier", "_nudge", "_shift", "_zero_point")

    def __init__(
        self,
        reals: npt.ArrayLike,
        bias: npt.NDArray[Any],
        zero_point: int,
        low: int,
        high: int,
        *,
        repeats: int = 1,
        rounds_once: bool = False,
    ) -> None:
        channels = np.broadcast_to(np.asarray(reals, dtype=np.float64), bias.shape)
        multiplier, exponent = multipliers_of(channels)
        # A left shift, which the spec applies before the product, shortens the right shift after it.
        right = np.maximum(-exponent, 0)
        left = np.clip(exponent, 0, 30)
        nudge = bias.astype(np.int64) * multiplier
        nudge += np.int64(1) << (30 - left + (right if rounds_once else 0))
        half = np.where(right > 0, np.int64(1) << (30 + right), 0)
        self._low, self._high, self._zero_point = low - zero_point, high - zero_point, zero_point
        self._multiplier = np.tile(multiplier, repeats)
        self._shift = np.tile(31 - left + right, repeats)
        self._away: Int64Array | None = None
        self._half: Int64Array | None = None
        if rounds_once:
            self._nudge = np.tile(nudge, repeats)
        elif low >= zero_point:
            # Negative results end at the lower bound, however they are rounded.
            self._nudge = np.tile(nudge + half, repeats)
        else:
            self._nudge = np.tile(nudge, repeats)
            self._half = np.tile(half, repeats)
            self._away = np.tile(np.where(right > 0, -(np.int64(1) << 31), 0), repeats)

    def __call__(self, sums: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Writes the results.

        Args:
            sums: Integers in any element type; the last axis has the channels (times ``repeats``).
            out: Of the same shape; its element type holds the bounds.
        """
        wide = sums.astype(np.int64)
        # Sum and bias fit 32 bits together. Where one alone does not, overflows here and in the nudge cancel: int64 wraps.
        wide *= self._multiplier
        wide += self._nudge
        if self._away is not None and self._half is not None:
            away = wide >> 63
            away &= self._away
            wide += away
            wide += self._half
        wide >>= self._shift
        np.maximum(wide, self._low, out=wide)
        np.minimum(wide, self._high, out=wide)
        if self._zero_point:
            wide += self._zero_point
        np.copyto(out, wide, casting="unsafe")


def quantized_range(operand_type: int) -> tuple[int, int]:
    """Least and largest value of a quantised type's element."""
    info = np.iinfo(operand_dtype(operand_type).name)
    return int(info.min), int(info.max)


def saturating_round_cast(values: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Rounds to nearest, half away from zero (C's ``round``, not numpy's half to even), saturates, and casts to an integer type."""
    info = np.iinfo(np.dtype(dtype).name)
    rounded: npt.NDArray[Any] = np.trunc(values + np.copysign(0.5, values))
    return rounded.clip(info.min, info.max).astype(dtype)


def quantize(values: npt.NDArray[Any], operand: Operand) -> npt.NDArray[Any]:
    """Real values as quantised values of an operand's type, scale and zero point: ``round(x / scale) + zero_point``, saturated.

    Computed in float32 as the spec's kernels do; ``round`` is half away from zero.
    """
    scaled = np.asarray(values, dtype=np.float32) / np.float32(operand.scale)
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    # x + 0.5 is inexact for the largest float32 below 0.5: the sum rounds up to 1.
    rounded = np.where(np.abs(scaled) < np.float32(0.5), np.float32(0), rounded)
    low, high = quantized_range(operand.type)
    shifted = rounded.astype(np.float64) + operand.zero_point
    # In this order a NaN becomes the largest value, as it does in the spec's kernels.
    return np.fmax(np.fmin(shifted, high), low).astype(operand_dtype(operand.type))


def dequantize(array: npt.NDArray[Any], operand: Operand) -> npt.NDArray[np.float32]:
    """Quantised values as float32: ``(q - zero_point) * scale``, per channel where the type is."""
    if operand.type == OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL:
        assert operand.channel_quant is not None, "the validator demands channel_quant of this type"
        shape = [1] * array.ndim
        shape[operand.channel_quant.channel_dim] = -1
        scales = np.asarray(operand.channel_quant.scales, dtype=np.float32).reshape(shape)
        return array.astype(np.float32) * scales
    shifted = array.astype(np.int32) - np.int32(operand.zero_point)
    return shifted.astype(np.float32) * np.float32(operand.scale)


def requantize(array: npt.NDArray[Any], source: Operand, target: Operand) -> npt.NDArray[Any]:
    """Quantised values of one operand in another's type, scale and zero point, saturated.

    The real value is computed in float32; its quotient by the scale, the zero point and the rounding, half away from zero, in
    float64.
    """
    low, high = quantized_range(target.type)
    scaled = dequantize(array, source).astype(np.float64) / target.scale + target.zero_point
    scaled = np.clip(scaled, low, high)
    return np.copysign(np.floor(np.abs(scaled) + 0.5), scaled).astype(operand_dtype(target.type))


def activation_range(activation: int, operand: Operand) -> tuple[int, int]:
    """The quantised bounds that a fused activation leaves of an output operand's range."""
    low, high = quantized_range(operand.type)

    def quantized(real: float) -> int:
        # float32 division and C's round, as the spec's kernels compute it.
        ratio = float(np.float32(real) / np.float32(operand.scale))
        return operand.zero_point + int(math.copysign(math.floor(abs(ratio) + 0.5), ratio))

    match FusedActivation(activation):
        case FusedActivation.NONE:
            return low, high
        case FusedActivation.RELU:
            return max(low, quantized(0.0)), high
        case FusedActivation.RELU1:
            return max(low, quantized(-1.0)), min(high, quantized(1.0))
        case FusedActivation.RELU6:
            return max(low, quantized(0.0)), min(high, quantized(6.0))


def float_activation(values: npt.NDArray[Any], activation: int) -> npt.NDArray[Any]:
    """Applies a fused activation to real values."""
    match FusedActivation(activation):
        case FusedActivation.NONE:
            return values
        case FusedActivation.RELU:
            return values.clip(0)
        case FusedActivation.RELU1:
            return values.clip(-1, 1)
        case FusedActivation.RELU6:
            return values.clip(0, 6)


_EXP_FACTORS = (1672461947, 1302514674, 790015084, 290630308, 39332535, 720401, 242)
"""exp(-2**k) for k from -2 to 4, with 31 fractional bits."""


def exp_on_negative_values(x: npt.ArrayLike, integer_bits: int) -> Int64Array:
    """exp(x) for x <= 0 as the spec's kernels approximate it.

    A polynomial covers [-1/4, 0); the rest of x is taken apart into powers of two, each with its factor.

    Args:
        x: Fixed-point numbers with ``integer_bits`` integer bits (5 at most) and 31 - ``integer_bits`` fractional bits.
        integer_bits: See ``x``.

    Returns:
        Fixed-point numbers with 31 fractional bits; 1 is 2**31 - 1.
    """
    values = np.asarray(x, dtype=np.int64)
    fraction_bits = 31 - integer_bits
    quarter = np.int64(1) << (fraction_bits - 2)
    in_quarter = (values & (quarter - 1)) - quarter
    result = _exp_in_last_quarter(in_quarter << integer_bits)
    remainder = in_quarter - values
    for exponent, factor in zip(range(-2, integer_bits), _EXP_FACTORS, strict=False):
        is_set = (remainder & (np.int64(1) << (fraction_bits + exponent))) != 0
        result = np.where(is_set, saturating_rounding_doubling_high_mul(result, factor), result)
    return np.where(values == 0, (1 << 31) - 1, result)


def _exp_in_last_quarter(x: Int64Array) -> Int64Array:
    """exp on [-1/4, 0), 31 fractional bits: a Taylor polynomial around -1/8."""
    product = saturating_rounding_doubling_high_mul
    exp_minus_eighth, third = 1895147668, 715827883
    y = x + (1 << 28)
    y2 = product(y, y)
    y3 = product(y2, y)
    y4 = product(y2, y2)
    inner = product(rounding_divide_by_pot(y4, 2) + y3, third) + y2
    return exp_minus_eighth + product(exp_minus_eighth, y + rounding_divide_by_pot(inner, 1))


def one_over_one_plus_x(x: npt.ArrayLike) -> Int64Array:
    """1 / (1 + x) for x in [0, 1] by three steps of Newton and Raphson; argument and result have 31 fractional bits."""
    product = saturating_rounding_doubling_high_mul
    least, largest = -(1 << 31), (1 << 31) - 1
    half_denominator = (np.asarray(x, dtype=np.int64) + largest + 1) >> 1
    # 48/17 and -32/17 with 29 fractional bits: the best linear start.
    estimate = 1515870810 + product(half_denominator, -1010580540)
    for _ in range(3):
        error = (1 << 29) - product(half_denominator, estimate)
        estimate = estimate + np.clip(product(estimate, error) << 2, least, largest)
    return (estimate << 1).clip(least, largest)
