"""Finds the convolution that rounds as TensorFlow Lite's mean of 8-bit integers does.

The reference kernel divides its 31-bit multiplier by the number of elements and keeps what is left, up to one bit less precise than
the multiplier of a convolution, which is always normalised. The result of both is a step function of the sum; some of their steps
lie at different sums. A larger weight and a bias move the convolution's steps between the sums.

Owns the search for weight, scale and bias with which both step functions are equal for every sum that can occur, checked at every
step; nothing is left to chance. Where none is found the plain filter of ones is used, whose results differ by at most 1.

Source: ``QuantizedMeanOrSum`` of TensorFlow Lite's reference kernels; CONV_2D's quantisation rule.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aionn.hal import Operand, OperandType
from aionn.ops.fixed_point import (
    multiply_by_quantized_multiplier,
    quantize_multiplier,
    quantized_range,
)

__all__ = ["MeanFilter", "mean_filter"]

SUMS_MAX = 1 << 21
"""Means over more possible sums take the plain filter: the search must stay within milliseconds."""

WEIGHT_MAX = 127

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


def mean_filter(source: Operand, target: Operand, count: int) -> MeanFilter:
    """The filter for a mean over ``count`` elements from one 8-bit quantisation to another."""
    plain = MeanFilter(1, float(np.float32(1.0 / count)), 0, is_exact=False)
    low, high = quantized_range(source.type)
    if (high - low) * count > SUMS_MAX:
        return plain
    sums = np.arange(
        (low - source.zero_point) * count, (high - source.zero_point) * count + 1, dtype=np.int64
    )
    multiplier, shift = _reference_multiplier(source, target, count)
    bounds = quantized_range(target.type)

    def clipped(values: _Sums) -> _Sums:
        return np.clip(values + target.zero_point, *bounds)

    wanted = clipped(multiply_by_quantized_multiplier(sums, multiplier, shift))
    # Both functions never fall, so they are equal everywhere when they are on both sides of each step and at the ends.
    steps = np.flatnonzero(np.diff(wanted))
    places = np.unique(np.concatenate([[0, len(sums) - 1], steps, steps + 1]))
    sums, wanted = sums[places], wanted[places]

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
    for weight in range(WEIGHT_MAX, 1, -1):
        scale = float(np.float32(real * float(target.scale) / float(source.scale) / weight))
        # The coarser first rounding of the reference moves its steps by half a unit of the product.
        shifted = round(weight * 2.0**30 / multiplier) if multiplier else 0
        # Upwards for positive sums, downwards for negative ones.
        for bias in (shifted, -shifted, shifted - 1, 1 - shifted, shifted + 1, -shifted - 1, 0):
            candidate = MeanFilter(weight, scale, bias, is_exact=True)
            if scale > 0 and is_equal(candidate):
                return candidate
    return plain


def _reference_multiplier(source: Operand, target: Operand, count: int) -> tuple[int, int]:
    multiplier, shift = quantize_multiplier(float(source.scale) / float(target.scale))
    places = min(count.bit_length() - 1, 32, 31 + shift)
    return (multiplier << max(places, 0)) // count, shift - max(places, 0)
