"""Counts of durations: the buckets, and what is exposed of them."""

from __future__ import annotations

import itertools
import random

import pytest

from aionn.observability.durations import (
    BUCKETS,
    EXPOSED_NS,
    LEAST_NS,
    Durations,
    SignedDurations,
    bucket_of,
)


def test_buckets_are_in_the_order_of_the_durations_and_at_most_a_quarter_wide() -> None:
    assert [bucket_of(ns) for ns in range(4, 17)] == [8, 9, 10, 11, 12, 12, 13, 13, 14, 14, 15, 15, 16]
    assert bucket_of((1 << 64) - 1) < BUCKETS
    for bits in range(3, 63):
        for quarter in range(4):
            first = (4 + quarter) << (bits - 2)
            following = (5 + quarter) << (bits - 2)
            assert bucket_of(first) == bucket_of(following - 1) == bucket_of(following) - 1
            assert 1.14 < following / first <= 1.25


def test_bounds_are_a_factor_of_one_and_a_half_apart_at_most() -> None:
    assert list(EXPOSED_NS) == sorted(set(EXPOSED_NS))
    assert all(after / before <= 1.5 for before, after in itertools.pairwise(EXPOSED_NS))
    assert EXPOSED_NS[0] == 16384 and 12e9 < EXPOSED_NS[-1] < 14e9


@pytest.mark.parametrize("seed", range(5))
def test_cumulative_counts_are_exact_at_every_bound(seed: int) -> None:
    numbers = random.Random(seed)
    durations, given = Durations(), [int(2 ** numbers.uniform(0, 40)) for _ in range(500)]
    signed, both = SignedDurations(), [numbers.choice((-1, 1)) * ns for ns in given]
    for ns in given:
        durations.add(ns)
    for ns in both:
        signed.add(ns)
    for bound, count in durations.cumulative():
        assert count == sum(ns < bound for ns in given)
    assert durations.count == signed.count == 500
    assert durations.total_ns == sum(max(ns, LEAST_NS) for ns in given)
    bounds = list(signed.cumulative())
    assert [bound for bound, _ in bounds] == sorted(bound for bound, _ in bounds)
    for bound, count in bounds:
        assert count == sum(ns <= bound if bound < 0 else ns < max(bound, 1) for ns in both)


def test_copy_does_not_change_and_negative_durations_count_as_the_least() -> None:
    durations = Durations()
    durations.add(-5)
    kept = durations.copy()
    durations.add(1000)
    assert (kept.count, kept.total_ns) == (1, LEAST_NS) and durations.count == 2
