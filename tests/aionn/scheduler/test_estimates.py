"""Durations learnt from timings."""

import random

import pytest

from aionn.errors import InvalidArgument
from aionn.scheduler.estimates import KEYS_MAX, Estimates


def test_default_holds_until_something_is_seen():
    estimates = Estimates()
    assert estimates.duration_ns("a", 7) == 7
    estimates.observe("a", 100)
    assert estimates.duration_ns("a", 7) == 100
    assert estimates.duration_ns("b", 7) == 7


def test_estimate_is_the_quantile_of_the_window():
    source = random.Random(3)
    values = [source.randrange(1000) for _ in range(200)]
    estimates = Estimates(quantile=0.9, window=50)
    for seen, value in enumerate(values, 1):
        estimates.observe("a", value)
        recent = sorted(values[max(0, seen - 50) : seen])
        not_above = sum(v <= estimates.duration_ns("a", 0) for v in recent)
        assert not_above >= 0.9 * len(recent)
        assert estimates.duration_ns("a", 0) in [max(1, v) for v in recent]


def test_quantile_is_no_mean():
    estimates = Estimates(quantile=0.95)
    for _ in range(15):
        estimates.observe("a", 10)
    estimates.observe("a", 1000)
    assert estimates.duration_ns("a", 0) == 1000


def test_old_timings_are_forgotten():
    estimates = Estimates(window=4)
    for value in (900, 5, 5, 5, 5):
        estimates.observe("a", value)
    assert estimates.duration_ns("a", 0) == 5
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
