"""Claims about fixed-point arithmetic: against C's definition one number at a time, and against real functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aionn.hal import FusedActivation, Operand, OperandType
from aionn.ops.numerics.fixed_point import (
    Requantization,
    activation_range,
    exp_on_negative_values,
    multiply_by_quantized_multiplier,
    one_over_one_plus_x,
    quantize,
    quantize_multiplier,
    saturating_rounding_doubling_high_mul,
)

REALS = [0.99999, 0.75, 0.5, 0.3333, 0.25, 0.0031, 1e-5, 2**-20, 1e-9]


def test_multiplier_has_31_bits_and_an_exponent() -> None:
    assert quantize_multiplier(0.5) == (1 << 30, 0)
    assert quantize_multiplier(1.0) == (1 << 30, 1)
    assert quantize_multiplier(1.0 - 2.0**-40) == (1 << 30, 1)
    assert quantize_multiplier(0.0) == (0, 0)
    assert quantize_multiplier(2.0**-33) == (0, 0)


@pytest.mark.parametrize("real", REALS)
def test_product_equals_the_definition_in_c(bench: Any, real: float) -> None:
    rng = np.random.default_rng(2)
    numbers = np.concatenate(
        [rng.integers(-(2**31), 2**31, 200), rng.integers(-600, 600, 200), np.arange(-8, 9) << 8]
    )
    multiplier, shift = quantize_multiplier(real)
    expected = [bench.fixed_point_product(int(x), multiplier, shift) for x in numbers]
    assert multiply_by_quantized_multiplier(numbers, multiplier, shift).tolist() == expected


def test_the_least_number_squared_saturates() -> None:
    assert saturating_rounding_doubling_high_mul(-(2**31), -(2**31)) == 2**31 - 1


@pytest.mark.sampled(6)
@pytest.mark.parametrize("real", [*REALS, 1.0, 1.7, 3.9, 200.0])
@pytest.mark.parametrize(
    ("low", "high", "zero_point"), [(-128, 127, 3), (-128, 127, -128), (0, 255, 255), (10, 90, 10)]
)
def test_requantization_equals_the_steps_one_by_one(
    real: float, low: int, high: int, zero_point: int
) -> None:
    rng = np.random.default_rng(3)
    span = int(min(400 / real, 2**22)) + 1
    sums = np.concatenate([rng.integers(-span, span, 600), np.arange(-200, 200)]).reshape(-1, 4)
    bias = rng.integers(-50, 50, 4).astype(np.int32)
    reals = real * np.array([1, 0.9, 0.7, 0.51])
    expected = np.empty(sums.shape, int)
    for channel in range(4):
        multiplier, shift = quantize_multiplier(reals[channel])
        product = multiply_by_quantized_multiplier(sums[:, channel] + bias[channel], multiplier, shift)
        expected[:, channel] = np.clip(product + zero_point, low, high)
    out = np.empty(sums.shape, np.int16)
    Requantization(reals, bias, zero_point, low, high)(sums.astype(np.float32), out)
    np.testing.assert_array_equal(out, expected)
    wide = np.empty((len(sums) // 2, 8), np.int16)
    Requantization(reals, bias, zero_point, low, high, repeats=2)(sums.reshape(-1, 8), wide)
    np.testing.assert_array_equal(wide.reshape(out.shape), expected)


@pytest.mark.parametrize("real", REALS[:-1])
def test_requantization_that_rounds_once_is_the_nearest_integer(real: float) -> None:
    rng = np.random.default_rng(4)
    sums = rng.integers(-int(400 / real), int(400 / real) + 1, 1000)
    multiplier, shift = quantize_multiplier(real)
    out = np.empty((1000, 1), np.int16)
    Requantization(real, np.array([5]), 7, -500, 500, rounds_once=True)(sums[:, None], out)
    halves = [((int(s) + 5) * multiplier + (1 << (30 - shift))) >> (31 - shift) for s in sums]
    assert out[:, 0].tolist() == [min(max(h + 7, -500), 500) for h in halves]


def test_both_roundings_differ_from_one_where_they_should() -> None:
    # 128 times it is a little less than a half: rounded to 128 / 256 first, it becomes a half, which is rounded up.
    multiplier_of_two_to_minus_8 = 2.0**-8 * (1 - 2.0**-20)
    out = np.empty((1, 1), np.int16)
    Requantization(multiplier_of_two_to_minus_8, np.array([0]), 0, -9, 9)(np.array([[128]]), out)
    assert out[0, 0] == 1
    Requantization(multiplier_of_two_to_minus_8, np.array([0]), 0, -9, 9, rounds_once=True)(
        np.array([[128]]), out
    )
    assert out[0, 0] == 0


def test_exponential_is_close_to_the_real_one_and_1_at_0() -> None:
    x = -np.concatenate([np.arange(0, 1 << 21, 997), np.arange(0, 1 << 31, 9999991)])
    result = exp_on_negative_values(x, 5) / 2.0**31
    np.testing.assert_allclose(result, np.exp(x / 2.0**26), atol=3e-7)
    assert exp_on_negative_values(0, 5) == 2**31 - 1


def test_reciprocal_is_close_to_the_real_one() -> None:
    x = np.arange(0, 1 << 31, 9999991)
    np.testing.assert_allclose(one_over_one_plus_x(x) / 2.0**31, 1 / (1 + x / 2.0**31), atol=2e-8)


def test_quantize_rounds_halves_away_from_zero_and_saturates() -> None:
    operand = Operand(OperandType.TENSOR_QUANT8_ASYMM_SIGNED, (), 0.5, 1)
    values = np.array([0.25, -0.25, 0.75, -0.75, 1e30, -1e30, math.inf, -math.inf, 0.249999985], np.float32)
    assert quantize(values, operand).tolist() == [2, 0, 3, -1, 127, -128, 127, -128, 1]


def test_quantize_gives_the_largest_value_for_nan() -> None:
    assert quantize(np.array([np.nan], np.float32), Operand(OperandType.TENSOR_QUANT8_ASYMM, (), 0.5, 1)) == [
        255
    ]


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (FusedActivation.NONE, (0, 255)),
        (FusedActivation.RELU, (100, 255)),
        (FusedActivation.RELU1, (90, 110)),
        (FusedActivation.RELU6, (100, 160)),
    ],
)
def test_activation_bounds_follow_the_output_quantisation(activation: int, expected: tuple[int, int]) -> None:
    assert activation_range(activation, Operand(OperandType.TENSOR_QUANT8_ASYMM, (), 0.1, 100)) == expected


def test_sums_beyond_32_bits_cancel_against_their_bias() -> None:
    # What the zero point adds to a sum of stored products is taken off with the bias.
    offsets = np.array([2**36, -(2**36)])
    out = np.empty((1, 2), np.int16)
    Requantization(0.9, -offsets, 0, -500, 500)((offsets + 100)[None, :], out)
    assert out.tolist() == [[90, 90]]
