"""The pure parts of the benchmark of capacity: the cameras of a run, its counts, and the search for the largest number."""

import itertools

import pytest

from benchmarks.capacity.cameras import (
    KEPT,
    PERIOD_NS,
    Tally,
    captures,
    is_kept,
    kept_count,
    largest,
    make_cameras,
)

BEGIN_NS = 7_000_000_123


def cameras(count, seconds=0.5):
    return make_cameras(count, 2, BEGIN_NS, warm_ns=100_000_000, seconds=seconds)


@pytest.mark.parametrize("limit", range(12))
def test_search_finds_the_limit_from_every_guess(limit):
    for guess in (-3, 0, *range(1, 13), 99):
        asked = []
        found = largest(lambda n, asked=asked: not asked.append(n) and n <= limit, guess, 11)
        assert found == limit
        assert len(asked) == len(set(asked)) and all(1 <= n <= 11 for n in asked)


def test_search_asks_few_numbers_where_the_guess_is_near():
    asked = []
    assert largest(lambda n: not asked.append(n) and n <= 103, 100, 256) == 103
    assert len(asked) <= 6


def test_search_below_a_far_too_large_guess_ends():
    asked = []
    assert largest(lambda n: not asked.append(n) and n <= 3, 256, 256) == 3
    assert len(asked) <= 16


def test_counted_frames_are_the_captures_in_the_window():
    made = cameras(9)
    found = list(captures(made))
    assert found == sorted(found)
    for number, camera in enumerate(made):
        own = [captured for captured, n in found if n == number]
        assert sum(camera.counts(captured) for captured in own) == camera.counted()
        assert all(b - a == PERIOD_NS for a, b in itertools.pairwise(own))
        assert own[0] == camera.begin_ns and own[-1] < camera.end_ns


def test_captures_of_the_largest_run_are_in_the_order_of_time():
    found = [captured for captured, _ in captures(cameras(256, seconds=0.1))]
    assert found == sorted(found)


def test_cameras_keep_their_phases_whatever_their_number_is():
    assert cameras(12)[:5] == cameras(5)
    assert {camera.model for camera in cameras(5)} == {0, 1}
    assert all(0 <= camera.begin_ns - BEGIN_NS < PERIOD_NS for camera in cameras(200))


def test_camera_gives_the_newest_frame_and_none_twice():
    camera = cameras(1)[0]
    assert camera.newest(camera.begin_ns - 1, 0) == 0
    assert camera.newest(camera.due_ns(4), 2) == 4
    assert camera.newest(camera.due_ns(4) - 1, 2) == 3
    assert camera.newest(camera.due_ns(2), 3) == 3


def test_streams_are_kept_together_and_one_by_one():
    whole, torn = Tally(1000, 1000), Tally(1000, round(1000 * KEPT) - 1)
    assert is_kept([whole, torn])  # All together are above the limit.
    assert not is_kept([torn])
    assert kept_count([whole, torn]) == 1
    assert not is_kept([whole, Tally(1000, 1000, is_admitted=False)])
    assert is_kept([Tally(1000, round(1000 * KEPT))])
