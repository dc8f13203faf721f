"""The clock of another machine: bounds hold whatever the network does, and are as narrow as the best exchange."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from aionn.fleet.clocks import DRIFT_PPM, ClockOffset, RoundTrip

MS = 1_000_000


def exchange(
    clock: ClockOffset, at_ns: int, offset_ns: int, up_ns: int, down_ns: int, busy_ns: int = 0
) -> int:
    """One exchange; returns when it was over."""
    received_ns = at_ns + up_ns + offset_ns
    replied_ns = received_ns + busy_ns
    returned_ns = at_ns + up_ns + busy_ns + down_ns
    clock.exchange(at_ns, received_ns, replied_ns, returned_ns)
    return returned_ns


@given(
    offset_ns=st.integers(-(10**12), 10**12),
    delays=st.lists(
        st.tuples(st.integers(0, 20 * MS), st.integers(0, 20 * MS), st.integers(0, 100 * MS)),
        min_size=1,
        max_size=40,
    ),
)
def test_difference_is_within_the_bounds_whatever_the_delays_are(
    offset_ns: int, delays: list[tuple[int, int, int]]
) -> None:
    clock, now_ns = ClockOffset(), 10**9
    for up_ns, down_ns, busy_ns in delays:
        now_ns = exchange(clock, now_ns, offset_ns, up_ns, down_ns, busy_ns) + 7
        low_ns, high_ns = clock.bounds_ns(now_ns)
        assert low_ns <= offset_ns <= high_ns


@given(
    seed=st.integers(0, 10_000),
    drift_ppm=st.floats(-DRIFT_PPM * 0.99, DRIFT_PPM * 0.99),
    offset_ns=st.integers(-(10**10), 10**10),
)
def test_drifting_clock_stays_within_the_bounds(seed: int, drift_ppm: float, offset_ns: int) -> None:
    rng, clock, now_ns = random.Random(seed), ClockOffset(), 10**9

    def there(own_ns: int) -> int:
        return own_ns + offset_ns + round(own_ns * drift_ppm / 1e6)

    for _ in range(60):
        arrived_ns = now_ns + rng.randrange(20 * MS)
        returned_ns = arrived_ns + rng.randrange(20 * MS)
        clock.exchange(now_ns, there(arrived_ns), there(arrived_ns), returned_ns)
        now_ns = returned_ns + rng.randrange(2_000 * MS)
        low_ns, high_ns = clock.bounds_ns(now_ns)
        assert low_ns - 1 <= there(now_ns) - now_ns <= high_ns + 1
        assert clock.earliest_ns(now_ns, now_ns) <= there(now_ns) + 1


@given(own_ns=st.integers(0, 10**12), drift_ppm=st.floats(-DRIFT_PPM, DRIFT_PPM))
def test_duration_on_the_other_clock_is_never_longer(own_ns: int, drift_ppm: float) -> None:
    there_ns = ClockOffset.duration_ns(own_ns)
    assert there_ns / (1 + drift_ppm / 1e6) <= own_ns * (1 + 1e-7) + 1
    assert there_ns >= own_ns * (1 - DRIFT_PPM / 1e6) - 1


def test_bounds_are_as_narrow_as_the_best_round_trip() -> None:
    clock, now_ns = ClockOffset(), 0
    for round_trip_ms in (40, 2, 30, 25):
        now_ns = exchange(clock, now_ns, 10**9, round_trip_ms * MS // 2, round_trip_ms * MS // 2)
    assert clock.uncertainty_ns(now_ns) <= 2 * MS + 2 * 100 * MS * DRIFT_PPM // 10**6


def test_bounds_widen_by_the_drift_until_they_are_renewed() -> None:
    clock = ClockOffset()
    now_ns = exchange(clock, 0, 0, MS, MS)
    assert clock.uncertainty_ns(now_ns) == 2 * MS
    assert clock.uncertainty_ns(now_ns + 10**9) == 2 * MS + 2 * DRIFT_PPM * 1000
    later_ns = exchange(clock, now_ns + 10**9, 0, MS, MS)
    assert clock.uncertainty_ns(later_ns) == 2 * MS


def test_clock_that_was_changed_is_learnt_anew() -> None:
    clock = ClockOffset()
    now_ns = exchange(clock, 0, 0, MS, MS)
    now_ns = exchange(clock, now_ns, 5 * 10**9, MS, MS)  # The other machine was not suspended, this one was.
    low_ns, high_ns = clock.bounds_ns(now_ns)
    assert low_ns <= 5 * 10**9 <= high_ns


def test_exchange_that_cannot_have_happened_is_ignored() -> None:
    clock = ClockOffset()
    now_ns = exchange(clock, 0, 0, MS, MS)
    before = clock.bounds_ns(now_ns)
    clock.exchange(now_ns, 0, 10**12, now_ns + 1)
    assert clock.bounds_ns(now_ns) == before


def test_round_trip_is_smoothed_and_has_an_upper_estimate() -> None:
    trip = RoundTrip()
    for _ in range(50):
        trip.measured(MS)
    assert trip.mean_ns == MS and trip.upper_ns < 1.1 * MS
    trip.measured(20 * MS)
    assert MS < trip.mean_ns < 4 * MS and trip.upper_ns > 15 * MS


def test_rate_is_that_of_transfers_without_the_round_trip() -> None:
    trip = RoundTrip()
    trip.measured(2 * MS)
    trip.transferred(1_000_000, 12 * MS)
    assert trip.bytes_per_s == 1e8
