"""Times of capture: from drivers' stamps, and from media with clocks of their own."""

import numpy as np
import pytest

from aionn.media.live.clock import BUCKETS_MAX, CaptureTime, MediaClock, driver_time, sender_time

MS = 1_000_000
S = 1_000_000_000
NOW = 1_000 * S


def test_stamp_of_the_driver_is_taken_where_it_is_of_our_clock():
    captured = driver_time(NOW - 40 * MS, True, NOW)
    assert (captured.at_ns, captured.clock, captured.uncertainty_ns) == (NOW - 40 * MS, "driver", 0)


def test_stamp_ahead_of_the_clock_is_set_back_and_the_difference_is_uncertain():
    captured = driver_time(NOW + 29 * MS, True, NOW)
    assert (captured.at_ns, captured.uncertainty_ns) == (NOW, 29 * MS)


@pytest.mark.parametrize("stamp_ns", [0, NOW - 11 * S, NOW + 2 * S, -5, 2**62])
def test_stamp_of_another_clock_is_replaced_by_the_arrival(stamp_ns):
    assert driver_time(stamp_ns, True, NOW).clock == "arrival"
    assert driver_time(stamp_ns, True, NOW).at_ns == NOW


def test_stamp_of_an_undeclared_clock_is_not_taken():
    assert driver_time(NOW - MS, False, NOW).clock == "arrival"


ARRIVED = CaptureTime(NOW - 5 * MS, "arrival", 5 * MS)


def test_clock_of_the_sender_shows_the_delay_that_the_arrival_hides():
    captured = sender_time(NOW - 400 * MS, ARRIVED, NOW)
    assert (captured.at_ns, captured.clock, captured.uncertainty_ns) == (NOW - 400 * MS, "sender", 400 * MS)


def test_clock_of_the_sender_that_is_ahead_is_set_back_to_the_arrival():
    captured = sender_time(NOW + 300 * MS, ARRIVED, NOW)
    assert (captured.at_ns, captured.clock, captured.uncertainty_ns) == (NOW, "sender", 300 * MS)


@pytest.mark.parametrize("stamp_ns", [0, NOW - 11 * S, NOW + 2 * S, -5, 2**62, -(2**62)])
def test_clock_of_a_sender_that_cannot_be_right_is_not_believed(stamp_ns):
    assert sender_time(stamp_ns, ARRIVED, NOW) is ARRIVED


def observed(
    clock, count, *, start_ns=NOW, period_ns=40 * MS, jitter_ns=0, drift_ppm=0.0, media_ns=0, seed=1
):
    """Items of a sender whose clock is slower by ``drift_ppm``: the time of capture against the truth."""
    random = np.random.default_rng(seed)
    errors = []
    for index in range(count):
        true_ns = start_ns + index * period_ns
        stamp_ns = media_ns + int(index * period_ns * (1 - drift_ppm / 1e6))
        arrival_ns = true_ns + int(random.exponential(jitter_ns)) if jitter_ns else true_ns
        captured = clock.observe(stamp_ns, arrival_ns)
        assert captured.at_ns <= arrival_ns
        errors.append(captured.at_ns - true_ns)
    return errors


def test_jitter_of_the_network_is_taken_out():
    errors = observed(MediaClock(), 1000, jitter_ns=20 * MS)
    assert max(errors[100:]) - min(errors[100:]) < 2 * MS


def test_delay_is_that_of_the_last_item():
    clock = MediaClock()
    observed(clock, 50)
    clock.observe(50 * 40 * MS, NOW + 50 * 40 * MS + 7 * MS)
    assert clock.delay_ns == 7 * MS


@pytest.mark.parametrize("drift_ppm", [-200.0, -50.0, 0.0, 50.0, 200.0])
def test_drift_is_estimated(drift_ppm):
    clock = MediaClock()
    errors = observed(clock, 1500, drift_ppm=drift_ppm, jitter_ns=MS)
    found = clock.drift_ppm()
    assert found is not None and found == pytest.approx(drift_ppm, abs=15)
    # Within the window of the smallest delays a clock drifts by some milliseconds; it does not add up.
    assert abs(errors[-1]) < 10 * MS


def test_drift_is_unknown_in_the_beginning():
    clock = MediaClock()
    observed(clock, 20)
    assert clock.drift_ppm() is None


def test_clock_that_goes_back_or_jumps_ahead_is_anchored_anew():
    for jump_ns in (-500 * S, 500 * S):
        clock = MediaClock()
        observed(clock, 100, media_ns=1000 * S)
        errors = observed(clock, 100, start_ns=NOW + 4 * S, media_ns=1004 * S + jump_ns)
        assert clock.anchorings == 1
        assert errors == [0] * 100


def test_queue_on_the_way_shows_as_a_delay():
    clock = MediaClock()
    observed(clock, 100)
    for index in range(100, 200):
        clock.observe(index * 40 * MS, NOW + index * 40 * MS + (index - 100) * 30 * MS)
    assert clock.delay_ns > 2_500 * MS
    assert clock.anchorings == 0


def test_memory_is_bounded():
    clock = MediaClock()
    observed(clock, 20_000, period_ns=100 * MS)
    assert len(clock._buckets) <= BUCKETS_MAX


def test_pause_of_minutes_forgets_the_seconds_before_it():
    clock = MediaClock()
    observed(clock, 100)
    clock.observe(4 * S, NOW + 300 * S)
    assert clock.delay_ns == 0
