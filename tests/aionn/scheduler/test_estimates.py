"""Durations learnt from timings."""

import math
import random

import pytest

from aionn.errors import InvalidArgument
from aionn.scheduler.estimates import KEYS_MAX, MARGIN, SURE_COUNT, Estimates


def test_default_holds_until_something_is_seen():
    estimates = Estimates()
    assert estimates.duration_ns("a", 1000) == 1300
    estimates.observe("a", 100)
    assert 100 < estimates.duration_ns("a", 1000) < 130
    assert estimates.duration_ns("b", 1000) == 1300


def test_estimate_lies_above_the_quantile_by_a_shrinking_margin():
    source = random.Random(3)
    values = [source.randrange(1, 1_000_000) for _ in range(200)]
    estimates = Estimates(quantile=0.9, window=50)
    for seen, value in enumerate(values, 1):
        estimates.observe("a", value)
        recent = sorted(values[max(0, seen - 50) : seen])
        quantile = next(v for v in recent if sum(w <= v for w in recent) >= 0.9 * len(recent))
        margin = MARGIN / (1 + len(recent)) ** 0.5
        assert estimates.duration_ns("a", 0) == int(quantile * (1 + margin))


def test_few_noisy_executions_take_longer_than_expected():
    source = random.Random(5)
    estimates, longer = Estimates(), 0
    for _ in range(3000):
        duration = int(1e6 * math.exp(source.gauss(0.0, 0.1)))
        longer += duration > estimates.duration_ns("a", 1_000_000)
        estimates.observe("a", duration)
    assert longer <= 3000 * 0.01


def test_quantile_is_no_mean():
    estimates = Estimates(quantile=0.95)
    for _ in range(15):
        estimates.observe("a", 10)
    estimates.observe("a", 1000)
    assert estimates.duration_ns("a", 0) >= 1000


def test_quantile_of_one_is_the_longest():
    estimates = Estimates(quantile=1.0)
    for value in (10, 10, 500, 10):
        estimates.observe("a", value)
    assert estimates.duration_ns("a", 0) >= 500


@pytest.mark.parametrize(
    ("limit", "duration", "counts"),
    [
        ("at_least", 99, False),
        ("at_least", 100, True),
        ("at_least", 500, True),
        ("at_most", 50, True),
        ("at_most", 300, True),
        ("at_most", 301, False),
        ("none", 50, True),
        ("none", 500, True),
    ],
)
def test_limit_counts_only_where_it_does_not_say_less_than_is_known(limit, duration, counts):
    estimates = Estimates()
    for value in (100, 200, 300):
        estimates.observe("a", value)
    estimates.observe("a", duration, limit=limit)
    assert estimates.count("a") == 3 + counts


def test_limit_is_the_first_that_is_known():
    estimates = Estimates()
    estimates.observe("a", 100, limit="at_least")
    estimates.observe("b", 100, limit="at_most")
    assert estimates.count("a") == estimates.count("b") == 1


def test_least_is_the_default_until_enough_was_seen():
    estimates = Estimates()
    assert estimates.least_ns("a", 1000) == 1000
    for seen in range(SURE_COUNT):
        assert estimates.least_ns("a", 1000) == 1000, seen
        estimates.observe("a", 70 - seen)
    assert estimates.least_ns("a", 1000) == 70 - SURE_COUNT + 1
    assert estimates.least_ns("a", 0) > 0


def test_old_timings_are_forgotten():
    estimates = Estimates(window=4)
    for value in (900, 5, 5, 5, 5):
        estimates.observe("a", value)
    assert estimates.duration_ns("a", 0) < 10
    assert estimates.count("a") == 4


def test_zero_counts_as_the_least_time():
    estimates = Estimates()
    estimates.observe("a", 0)
    assert estimates.duration_ns("a", 0) == 1
    assert estimates.duration_ns("b", 0) == 1


def test_negative_duration_is_refused():
    with pytest.raises(InvalidArgument, match="at least 0 ns, got -1"):
        Estimates().observe("a", -1)


@pytest.mark.parametrize(("quantile", "window"), [(0.0, 1), (1.1, 1), (0.5, 0)])
def test_impossible_settings_are_refused(quantile, window):
    with pytest.raises(InvalidArgument):
        Estimates(quantile=quantile, window=window)


def test_memory_is_bounded():
    estimates = Estimates(window=1)
    for key in range(KEYS_MAX + 10):
        estimates.observe(key, 5)
    assert estimates.count(0) == 0
    assert estimates.count(KEYS_MAX + 9) == 1


def test_forgotten_pair_is_as_one_that_was_never_seen():
    estimates = Estimates()
    estimates.observe("a", 100)
    estimates.observe("b", 100)
    estimates.forget("a")
    estimates.forget("never seen")
    assert list(estimates.keys()) == ["b"]
    assert estimates.duration_ns("a", 1000) == 1300


def test_warm_duration_leaves_out_the_first_timings_as_long_as_they_are_among_those_that_count():
    estimates = Estimates(window=5)
    assert estimates.warm_ns("a", 1000) == 1300
    for duration, longest in (
        (900, 900),
        (800, 900),
        (100, 100),
        (120, 120),
        (110, 120),
        (90, 120),
        (95, 120),
        (70, 120),
        (80, 110),
    ):
        estimates.observe("a", duration)
        assert longest <= estimates.warm_ns("a", 1) <= 1.3 * longest, duration
    assert estimates.duration_ns("a", 1) == estimates.warm_ns("a", 1)


def test_warm_duration_has_the_margin_of_the_timings_that_count():
    estimates = Estimates()
    for duration in (500, 400, *[100] * 8):
        estimates.observe("a", duration)
    assert estimates.warm_ns("a", 1) == int(100 * (1 + MARGIN / 3))
