"""Finds the convolution that rounds as TensorFlow Lite's mean of 8-bit integers does.

The reference kernel divides its 31-bit multiplier by the number of elements and keeps what is left, up to one bit less precise than
the multiplier of a convolution, which is always normalised. The result of both is a step function of the sum; some of their steps
are at different sums. A larger weight and a bias move the convolution's steps between the sums.

Owns the search for weight, scale and bias with which both step functions are equal for every sum that can occur, checked at every
step; nothing is left to chance. Where none is found the plain filter of ones is used, whose results differ by at most 1.

Source: ``QuantizedMeanOrSum`` of TensorFlow Lite's reference kernels; CONV_2D's quantisation rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aionn.hal import Operand, OperandType
from aionn.ops.numerics.fixed_point import (
    multiply_by_quantized_multiplier,
    quantize_multiplier,
    quantized_range,
)

__all__ = ["MeanFilter", "mean_filter", "plain_filter"]

WEIGHT_MAX = 127
"""The largest weight of both 8-bit types. Weights are tried down to its half: smaller ones move the steps more coarsely."""

_Sums = npt.NDArray[np.int64]


class MeanFilter(NamedTuple):
    """A filter whose every weight is the same.

    Attributes:
        weight: The stored weight.
        scale: Its scale.
        bias: Added to the weighted sum.
        is_exact: Whether the result equals the reference kernel's for every input.
    """

    weight: int
    scale: float
    bias: int
    is_exact: bool


def plain_filter(count: int) -> MeanFilter:
    """Ones with the scale 1 / count: at most one step away from the reference kernel's result."""
    return MeanFilter(1, float(np.float32(1.0 / count)), 0, is_exact=False)


def mean_filter(source: Operand, target: Operand, count: int) -> MeanFilter:
    """The filter for a mean over ``count`` elements from one 8-bit quantisation to another."""
    plain = plain_filter(count)
    low, high = quantized_range(source.type)
    ends = (low - source.zero_point) * count, (high - source.zero_point) * count
    if max(map(abs, ends)) * WEIGHT_MAX >= 2**31:
        # The weighted sums would not fit 32 bits.
        return plain
    multiplier, shift = _reference_multiplier(source, target, count)
    bounds = quantized_range(target.type)

    def clipped(values: _Sums) -> _Sums:
        return np.clip(values + target.zero_point, *bounds)

    def reference(sums: _Sums) -> _Sums:
        return clipped(multiply_by_quantized_multiplier(sums, multiplier, shift))

    # Both functions never fall, so they are equal everywhere when they are on both sides of each step and at the ends.
    steps = _steps(reference, ends, np.arange(bounds[0] + 1, bounds[1] + 1, dtype=np.int64))
    sums = np.unique(np.concatenate([np.array(ends, dtype=np.int64), steps, steps - 1]))
    sums = sums[(sums >= ends[0]) & (sums <= ends[1])]
    wanted = reference(sums)

    def is_equal(candidate: MeanFilter) -> bool:
        product = float(source.scale) * candidate.scale
        if source.type == OperandType.TENSOR_QUANT8_ASYMM:
            # The scale of unsigned data times unsigned weights is rounded to float32.
            product = float(np.float32(product))
        m, s = quantize_multiplier(product / float(target.scale))
        got = multiply_by_quantized_multiplier(sums * candidate.weight + candidate.bias, m, s)
        return bool(np.array_equal(clipped(got), wanted))

    if is_equal(plain):
        return plain._replace(is_exact=True)
    real = multiplier * 2.0 ** (shift - 31)
    for weight in range(WEIGHT_MAX, WEIGHT_MAX // 2, -1):
        scale = float(np.float32(real * float(target.scale) / float(source.scale) / weight))
        # The coarser first rounding of the reference moves its steps by half a unit of the product.
        shifted = round(weight * 2.0**30 / multiplier) if multiplier else 0
        # Upwards for positive sums, downwards for negative ones.
        for bias in (shifted, -shifted, shifted - 1, 1 - shifted, shifted + 1, -shifted - 1, 0):
            candidate = MeanFilter(weight, scale, bias, is_exact=True)
            if scale > 0 and is_equal(candidate):
                return candidate
    return plain


def _steps(function: Callable[[_Sums], _Sums], ends: tuple[int, int], values: _Sums) -> _Sums:
    """For each value the least sum at which the rising function reaches it, by bisection; one past the end where it never does."""
    low = np.full(values.shape, ends[0], dtype=np.int64)
    high = np.full(values.shape, ends[1] + 1, dtype=np.int64)
    while (low < high).any():
        middle = (low + high) >> 1
        is_reached = function(middle) >= values
        high = np.where(is_reached, middle, high)
        low = np.where(is_reached, low, np.minimum(middle + 1, high))
    return high


def _reference_multiplier(source: Operand, target: Operand, count: int) -> tuple[int, int]:
    multiplier, shift = quantize_multiplier(float(source.scale) / float(target.scale))
    places = min(count.bit_length() - 1, 32, 31 + shift)
    return (multiplier << max(places, 0)) // count, shift - max(places, 0)
