"""What lists of numbers say, and how outputs are compared."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aionn.benchmarking.accuracy import compare_outputs
from aionn.benchmarking.figures import BUCKETS, spread_of, verdict
from aionn.hal import Operand, OperandType

FLOAT = Operand(OperandType.TENSOR_FLOAT32, (1, 3))
BYTES = Operand(OperandType.TENSOR_QUANT8_ASYMM_SIGNED, (1, 3), 0.5, -1)


@pytest.mark.parametrize(
    ("count", "told"),
    [(9, ()), (10, ("p50",)), (49, ("p50",)), (50, ("p50", "p90")), (500, ("p50", "p90", "p99"))],
)
def test_quantile_is_told_where_enough_samples_lie_beyond(count: int, told: tuple[str, ...]) -> None:
    spread = spread_of(range(count))
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        wanted = float(np.quantile(range(count), share)) if name in told else None
        assert getattr(spread, name) == wanted


def test_histogram_counts_everything_and_outliers_in_the_last_bar() -> None:
    values = [1.0] * 150 + [2.0] * 49 + [1000.0]
    spread = spread_of(values)
    assert len(spread.histogram) == BUCKETS
    assert sum(spread.histogram) == spread.count == 200
    assert spread.limit == 2.0
    assert spread.histogram[0] == 150
    assert spread.histogram[-1] == 50
    assert (spread.min, spread.max) == (1.0, 1000.0)


def test_equal_numbers_have_a_histogram_too() -> None:
    spread = spread_of([4.0, 4.0])
    assert spread.histogram[0] == 2
    assert spread.deviation == 0


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_nothing_and_no_numbers_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="expected at least one number, all finite"):
        spread_of(values)


@pytest.mark.parametrize(
    ("value", "told"), [(1.02, "worse"), (1.005, "same"), (0.995, "same"), (0.9, "better")]
)
def test_verdict_takes_a_percent_for_nothing(value: float, told: str) -> None:
    assert verdict(value, 1.0) == told


def test_equal_answers_are_identical() -> None:
    answers = [[np.array([[0.5, 0.25, 0.25]], dtype=np.float32)]] * 3
    found = compare_outputs(answers, answers, [FLOAT])
    assert (found.samples, found.identical, found.top1_agreement) == (3, 3, 1.0)
    assert (found.mean_square_error, found.largest_error) == (0.0, 0.0)


def test_errors_are_real_numbers() -> None:
    ours = [[np.array([[4, 0, 0]], dtype=np.int8)], [np.array([[0, 9, 0]], dtype=np.int8)]]
    theirs = [[np.array([[2, 0, 0]], dtype=np.int8)], [np.array([[0, 9, 10]], dtype=np.int8)]]
    found = compare_outputs(ours, theirs, [BYTES])
    assert found.identical == 0
    assert found.largest_error == 5.0
    assert found.mean_square_error == pytest.approx((1.0 + 25.0) / 6)
    assert found.top1_agreement == 0.5


def test_missing_numbers_on_one_side_alone_are_an_infinite_error() -> None:
    nan, one = np.array([[np.nan, 1, np.inf]], np.float32), np.array([[1, 1, np.inf]], np.float32)
    assert compare_outputs([[nan]], [[nan]], [FLOAT]).largest_error == 0
    assert compare_outputs([[nan]], [[one]], [FLOAT]).largest_error == math.inf


def test_one_number_has_no_top() -> None:
    single = [[np.array([[1.0]], dtype=np.float32)]]
    assert (
        compare_outputs(single, single, [Operand(OperandType.TENSOR_FLOAT32, (1, 1))]).top1_agreement is None
    )
