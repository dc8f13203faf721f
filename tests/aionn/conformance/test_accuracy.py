"""Claims about the judgement of results: nothing escapes it by size or type."""

from __future__ import annotations

import numpy as np
import pytest

from aionn.conformance.accuracy import Criteria, judge
from aionn.hal import OperandType

F32, F16 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16
Q8, I32, BOOL8 = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_INT32, OperandType.TENSOR_BOOL8


def floats(*values: float, dtype: type = np.float32) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.array(values, dtype=dtype)


@pytest.mark.parametrize("criteria", list(Criteria))
def test_equal_results_agree(criteria: Criteria) -> None:
    values = np.linspace(-3, 3, 50).astype(np.float32)
    assert judge(0, F32, values, values, criteria) is None


@pytest.mark.parametrize(("value", "got"), [(5000.0, 5001.0), (1e30, 1.1e30), (101.0, 102.0)])
def test_large_numbers_are_judged(value: float, got: float) -> None:
    difference = judge(2, F32, floats(value), floats(got), Criteria.STRICT)
    assert difference is not None
    stored = float(np.float32(value))
    assert str(difference).startswith(f"output 2, element [0]: expected {stored!r} within")


def test_float16_is_judged() -> None:
    expected, got = floats(1.0, dtype=np.float16), floats(1.25, dtype=np.float16)
    for criteria in Criteria:
        assert judge(0, F16, expected, got, criteria) is not None


def test_worst_element_is_named() -> None:
    difference = judge(
        0, F32, np.zeros((2, 3)), np.array([[0, 0, 1], [0, 7, 0]], np.float32), Criteria.MEDIUM
    )
    assert difference is not None
    assert difference.index == (1, 1)


def test_shapes_must_be_equal() -> None:
    difference = judge(0, F32, np.zeros((2, 3)), np.zeros((3, 2), np.float32), Criteria.MEDIUM)
    assert difference is not None
    assert str(difference) == "output 0, shape: expected [2, 3], got [3, 2]"


def test_expected_nan_allows_anything_and_an_unexpected_one_nothing() -> None:
    assert judge(0, F32, floats(np.nan), floats(3.0), Criteria.STRICT) is None
    assert judge(0, F32, floats(3.0), floats(np.nan), Criteria.STRICT) is not None


def test_infinity_must_be_met_or_nearly_so() -> None:
    largest = float(np.finfo(np.float16).max)

    def is_right(expected: float, got: float) -> bool:
        wanted, came = floats(expected, dtype=np.float16), floats(got, dtype=np.float16)
        return judge(0, F16, wanted, came, Criteria.STRICT) is None

    assert is_right(np.inf, np.inf)
    assert is_right(np.inf, largest)
    assert is_right(-largest, -np.inf)
    assert not is_right(np.inf, -np.inf)
    assert not is_right(np.inf, 100.0)
    assert not is_right(100.0, np.inf)


def test_bias_is_judged_where_every_element_is_within_its_limit() -> None:
    expected = np.zeros(20)
    difference = judge(0, F32, expected, np.full(20, 5e-6, np.float32), Criteria.MEDIUM)
    assert difference is not None
    assert difference.what == "bias"
    assert judge(0, F32, expected[:9], np.full(9, 5e-6, np.float32), Criteria.MEDIUM) is None


def test_mean_squared_difference_is_judged() -> None:
    signs = np.tile([1, -1], 10)
    difference = judge(0, Q8, np.full(20, 100), (100 + 2 * signs).astype(np.uint8), Criteria.MEDIUM)
    assert difference is not None
    assert difference.what == "mean squared difference"


def test_unsigned_numbers_do_not_wrap_in_the_difference() -> None:
    assert judge(0, Q8, np.array([0], np.uint8), np.array([1], np.uint8), Criteria.STRICT) is None
    assert judge(0, Q8, np.array([0], np.uint8), np.array([255], np.uint8), Criteria.RELAXED) is not None


def test_integers_may_differ_by_one() -> None:
    assert judge(0, I32, np.array([7]), np.array([8], np.int32), Criteria.STRICT) is None
    assert judge(0, I32, np.array([7]), np.array([9], np.int32), Criteria.LARGE_GRAPH) is not None


def test_a_tenth_of_booleans_may_differ() -> None:
    expected = np.zeros(20, np.bool_)
    got = expected.copy()
    got[:2] = True
    assert judge(0, BOOL8, expected, got, Criteria.STRICT) is None
    got[2] = True
    assert judge(0, BOOL8, expected, got, Criteria.STRICT) is not None


def test_exact_judgement_demands_equal_integers_and_booleans() -> None:
    large = np.array([2**31 - 1, 5], np.int32)
    assert judge(0, I32, large, large - 1, Criteria.EDGE) is None
    difference = judge(0, I32, large, large - 1, Criteria.EDGE, is_exact=True)
    assert difference is not None
    assert "exactly" in difference.expected and difference.index == (0,)
    assert judge(0, I32, large, large, Criteria.EDGE, is_exact=True) is None
    truths = np.array([True, False] * 10)
    assert judge(0, BOOL8, truths, np.array([False, False] * 10), Criteria.EDGE, is_exact=True) is not None


def test_exact_judgement_demands_nan_in_its_places_and_the_sign_of_zero_where_asked() -> None:
    expected = floats(np.nan, -0.0)
    assert judge(0, F32, expected, floats(3.0, -0.0), Criteria.EDGE, is_exact=True) is not None
    assert judge(0, F32, expected, floats(np.nan, 0.0), Criteria.EDGE, is_exact=True) is None
    signed = judge(0, F32, expected, floats(np.nan, 0.0), Criteria.EDGE, is_exact=True, is_zero_signed=True)
    assert signed is not None
    assert signed.index == (1,)


def test_exact_judgement_leaves_steps_of_quantised_values_to_the_criteria() -> None:
    stored = np.array([0, 255], np.uint8)
    near = np.array([2, 253], np.uint8)
    assert judge(0, Q8, stored, near, Criteria.EDGE, is_exact=True) is None
    assert judge(0, Q8, stored, near + 1, Criteria.EDGE, is_exact=True) is not None
