"""Slopes of made-up series: known growth is found, noise and steps of a warm-up are not taken for growth."""

from __future__ import annotations

import random

import pytest

from aionn.benchmarking.stress.slopes import BLOCKS_MIN, WARM_UP_SHARE, slope_of
from aionn.errors import InvalidArgument

TIMES_S = [5.0 * i for i in range(240)]


def test_exact_growth_is_found_with_an_interval_of_no_width() -> None:
    slope = slope_of("objects", TIMES_S, [7 + t / 36 for t in TIMES_S], 10)
    assert slope.per_hour == pytest.approx(100)
    assert (slope.low, slope.high) == (pytest.approx(100), pytest.approx(100))
    assert slope.first < slope.last
    assert not slope.is_steady


def test_what_stays_the_same_is_steady() -> None:
    slope = slope_of("descriptors", TIMES_S, [12.0] * len(TIMES_S), 0)
    assert (slope.per_hour, slope.low, slope.high, slope.is_steady) == (0, 0, 0, True)


def test_growth_before_the_end_of_the_warm_up_does_not_count() -> None:
    warm = int(len(TIMES_S) * WARM_UP_SHARE)
    values = [min(i, warm) * 1000.0 for i in range(len(TIMES_S))]
    assert slope_of("kB", TIMES_S, values, 0).is_steady


@pytest.mark.thorough
def test_interval_holds_the_true_slope_about_as_often_as_it_says() -> None:
    source, held = random.Random(1), 0
    for _ in range(400):
        values = [50 * t / 3600 + source.gauss(0, 30) for t in TIMES_S]
        slope = slope_of("objects", TIMES_S, values, 0)
        assert slope.low is not None and slope.high is not None
        held += slope.low <= 50 <= slope.high
    assert 0.90 * 400 <= held <= 0.99 * 400


def test_noise_alone_is_seldom_called_growth_and_growth_beyond_it_always() -> None:
    source, called = random.Random(2), 0
    for _ in range(400):
        noise = [source.gauss(0, 30) for _ in TIMES_S]
        called += not slope_of("objects", TIMES_S, noise, 0).is_steady
        grown = [value + 600 * t / 3600 for value, t in zip(noise, TIMES_S, strict=True)]
        assert not slope_of("objects", TIMES_S, grown, 50).is_steady
    assert called <= 0.05 * 400


def test_growth_below_the_bound_does_not_matter() -> None:
    values = [t / 3600 for t in TIMES_S]
    assert slope_of("threads", TIMES_S, values, 2).is_steady
    assert not slope_of("threads", TIMES_S, values, 0.5).is_steady


def test_what_shrinks_is_steady() -> None:
    assert slope_of("kB", TIMES_S, [-t for t in TIMES_S], 0).is_steady


def test_too_few_samples_tell_no_slope() -> None:
    slope = slope_of("kB", TIMES_S[: BLOCKS_MIN - 1], [1, 2, 3], 0)
    assert (slope.per_hour, slope.low, slope.high, slope.is_steady) == (None, None, None, True)


@pytest.mark.parametrize(
    ("times", "values", "bound"),
    [
        ([], [], 0),
        ([1.0], [1.0, 2.0], 0),
        ([1.0, 1.0], [1.0, 2.0], 0),
        ([1.0], [1.0], -1),
        ([1.0], [1.0], float("nan")),
    ],
)
def test_senseless_samples_are_refused(times: list[float], values: list[float], bound: float) -> None:
    with pytest.raises(InvalidArgument, match="slope of kB"):
        slope_of("kB", times, values, bound)
