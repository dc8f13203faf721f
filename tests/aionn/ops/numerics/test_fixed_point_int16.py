"""Claims about the 16-bit fixed-point functions: equal to the published ones for every argument."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from aionn.ops.numerics.fixed_point_int16 import (
    INTEGER_BITS_MAX,
    inverse_sqrt,
    logistic_int16,
    multiply_int16,
    saturate_int16,
    shift_left_int16,
    tanh_int16,
)

EVERY = np.arange(-(1 << 15), 1 << 15, dtype=np.int64)

# SHA-256, first 16 digits, of the published functions' results for all 16-bit arguments in ascending order, as little-endian int16;
# by number of integer bits.
TANH = "7dfff607d0ea23f2 fb776c014fac7629 ad9e4552d55f09f5 6d2c95677d4eb6e2 22e8b026529f3977 4aad698c1ba273d4 fd771a11c73c2d13"
LOGISTIC = "2dd9789ac393e1a4 01edfb3e65720bfd 9aa6e67c580b5aee 44168980e98373fc 7d0e8269063ca58d 1c3304a5c571951f e4944dff81f861b0"

# The published inverse square root: value, multiplier, shift.
INVERSE_SQRT = [
    (0, 2147483647, 0),
    (1, 2147483647, 0),
    (4, 1073741828, 0),
    (54, 292235517, 0),
    (335, 234659133, -1),
    (3709, 282092433, -3),
    (25983, 213159749, -4),
    (167161, 336157144, -6),
    (1622318, 215810132, -7),
    (15094349, 283004035, -9),
    (87628868, 234912554, -10),
    (993570162, 279055471, -12),
]


def digest(values: np.ndarray) -> str:
    return hashlib.sha256(values.astype("<i2").tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("integer_bits", range(INTEGER_BITS_MAX + 1))
def test_functions_equal_the_published_ones_everywhere(integer_bits: int) -> None:
    assert digest(tanh_int16(EVERY, integer_bits)) == TANH.split()[integer_bits]
    assert digest(logistic_int16(EVERY, integer_bits)) == LOGISTIC.split()[integer_bits]


@pytest.mark.parametrize("integer_bits", range(INTEGER_BITS_MAX + 1))
def test_functions_are_close_to_the_real_ones(integer_bits: int) -> None:
    real = EVERY / (1 << (15 - integer_bits))
    assert np.abs(tanh_int16(EVERY, integer_bits) - np.tanh(real) * 32768).max() < 13
    assert np.abs(logistic_int16(EVERY, integer_bits) - 32768 / (1 + np.exp(-real))).max() < 7


@pytest.mark.parametrize(("value", "multiplier", "shift"), INVERSE_SQRT)
def test_inverse_sqrt_equals_the_published_one(value: int, multiplier: int, shift: int) -> None:
    assert inverse_sqrt(value) == (multiplier, shift)


def test_inverse_sqrt_is_close_to_the_real_one() -> None:
    for value in (2, 3, 7, 1000, (1 << 29) - 1, 1 << 29, (1 << 31) - 1):
        multiplier, shift = inverse_sqrt(value)
        assert 0 <= multiplier < 1 << 31
        assert math.isclose(multiplier * 2.0 ** (shift - 31), value**-0.5, rel_tol=1e-5)


def test_product_rounds_half_up_and_saturates() -> None:
    assert multiply_int16(-32768, -32768) == 32767
    assert multiply_int16(1, 1 << 14) == 1
    assert multiply_int16(-1, 1 << 14) == 0
    assert multiply_int16(-3, 1 << 14) == -1
    assert multiply_int16(32767, 32767) == 32766


def test_shift_saturates_on_either_side() -> None:
    values = np.array([-32768, -8193, -8192, 8191, 8192, 3])
    assert shift_left_int16(values, 2).tolist() == [-32768, -32768, -32768, 32764, 32767, 12]
    assert saturate_int16(np.array([-40000, 40000, 5])).tolist() == [-32768, 32767, 5]
