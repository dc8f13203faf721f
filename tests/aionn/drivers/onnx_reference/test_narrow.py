"""Element types that numpy lacks: the numbers that they have, and the rounding to them."""

from __future__ import annotations

import numpy as np
import pytest

from aionn.models.onnx.extension.narrow import NARROW, carrier_of, rounded
from aionn.models.onnx.schema import DataType
from tests.aionn.drivers.onnx_reference.building import same


def test_upper_half_of_a_float32_is_a_bfloat16() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1000, np.uint32)
    values = bits.view(np.float32)
    finite = values[np.isfinite(values)]
    # Round half to even on the bits.
    whole = finite.view(np.uint32).astype(np.uint64)
    expected = ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(rounded(finite, DataType.BFLOAT16), expected)


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (DataType.FLOAT8E4M3FN, [1.0625, 1.1875, 2**-10, 3 * 2**-11, 440], [1, 1.25, 0, 2**-9, 448]),
        (DataType.FLOAT8E5M2, [1.125, 1.375, 2**-17, 3 * 2**-17, 50000], [1, 1.5, 0, 2**-15, 49152]),
        (DataType.FLOAT8E4M3FNUZ, [239.0, 2**-11, 3 * 2**-11], [240, 0, 2**-9]),
        (DataType.FLOAT8E5M2FNUZ, [2**-18, 3 * 2**-18], [0, 2**-16]),
        (DataType.FLOAT4E2M1, [0.25, 0.75, 2.5, 3.5, 5, -99], [0, 1, 2, 4, 4, -6]),
    ],
)
def test_halves_are_rounded_to_even(kind, given, expected) -> None:
    same(rounded(np.array(given), kind), expected)


@pytest.mark.parametrize("kind", [kind for kind in NARROW if carrier_of(kind).kind == "f"])
def test_rounding_twice_changes_nothing(kind) -> None:
    values = np.random.default_rng(2).normal(size=500) * 2.0 ** np.arange(-25, 25).repeat(10)
    once = rounded(values, kind, saturates=True)
    np.testing.assert_array_equal(rounded(once, kind), once)
    assert np.abs(once).max() == min(NARROW[kind].largest, np.abs(once).max())


def test_numbers_beyond_the_largest_one() -> None:
    large = np.array([1e9, -1e9, np.inf, np.nan])
    same(rounded(large, DataType.FLOAT8E4M3FN)[:2], [np.nan, np.nan])
    same(rounded(large, DataType.FLOAT8E5M2), [np.inf, -np.inf, np.inf, np.nan])
    same(rounded(large, DataType.FLOAT8E5M2, saturates=True)[:2], [57344, -57344])


def test_whole_numbers_keep_their_lowest_bits() -> None:
    values = np.array([-9, -8, -1, 7, 8, 17])
    assert rounded(values, DataType.INT4).tolist() == [7, -8, -1, 7, -8, 1]
    assert rounded(values, DataType.UINT4).tolist() == [7, 8, 15, 7, 8, 1]
    assert rounded(values, DataType.INT2).tolist() == [-1, 0, -1, -1, 0, 1]
    assert rounded(values, DataType.UINT2).tolist() == [3, 0, 3, 3, 0, 1]
