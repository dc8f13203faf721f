"""Timelines: monotonic, constant in size, failing for good."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc

import pytest

import fences
from fences import FenceError, FenceStateError, FenceStatus, Timeline
from fences.timeline import POINT_MAX


def test_fences_are_signalled_when_their_points_are_reached():
    timeline = Timeline("t")
    row = [timeline.fence(point) for point in (5, 1, 3)]
    timeline.advance(3, at_ns=30)
    assert [fence.status for fence in row] == [
        FenceStatus.PENDING,
        FenceStatus.SIGNALLED,
        FenceStatus.SIGNALLED,
    ]
    assert [fence.signal_time_ns for fence in row] == [None, 30, 30]
    assert (timeline.value, timeline.pending_count) == (3, 1)
    timeline.advance(5)
    assert row[0].status is FenceStatus.SIGNALLED and timeline.pending_count == 0


def test_waiters_run_in_the_order_of_points_with_all_fences_finished():
    timeline = Timeline()
    seen = []
    row = {point: timeline.fence(point) for point in (9, 2, 5, 7)}
    for point, fence in row.items():
        fence.add_callback(lambda _, point=point: seen.append((point, row[7].status)))
    timeline.advance(8)
    assert seen == [(2, FenceStatus.SIGNALLED), (5, FenceStatus.SIGNALLED), (7, FenceStatus.SIGNALLED)]


def test_same_pending_point_is_the_same_fence():
    timeline = Timeline()
    assert timeline.fence(4) is timeline.fence(4)
    assert timeline.pending_count == 1


def test_point_passed_is_a_signalled_fence():
    timeline = Timeline(value=10)
    timeline.advance(12, at_ns=99)
    assert timeline.fence(11).signal_time_ns == 99
    assert timeline.fence(0).status is FenceStatus.SIGNALLED
    assert timeline.pending_count == 0


@pytest.mark.parametrize("point", [0, 4, 5])
def test_advance_to_a_point_not_ahead_is_refused_and_changes_nothing(point):
    timeline = Timeline("t", value=5)
    fence = timeline.fence(6)
    with pytest.raises(FenceStateError, match=f"t to {point}: expected more than its value, 5"):
        timeline.advance(point)
    assert (timeline.value, fence.status) == (5, FenceStatus.PENDING)


@pytest.mark.parametrize(
    "point, error", [(-1, ValueError), (2**64, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_bad_points_are_refused(point, error):
    timeline = Timeline()
    for call in (timeline.fence, timeline.advance, lambda each: Timeline(value=each)):
        with pytest.raises(error):
            call(point)
    assert (timeline.value, timeline.pending_count) == (0, 0)


def test_last_point_of_64_bits_can_be_reached():
    timeline = Timeline(value=POINT_MAX - 1)
    fence = timeline.fence(POINT_MAX)
    timeline.advance(POINT_MAX)
    assert fence.status is FenceStatus.SIGNALLED


def test_failure_reaches_points_ahead_and_later_ones_but_none_passed():
    timeline = Timeline("camera", value=3)
    ahead = timeline.fence(4)
    timeline.fail(OSError("unplugged"), at_ns=8)
    for fence in (ahead, timeline.fence(5), timeline.fence(10**9)):
        assert (fence.error.origin, fence.error.at_ns) == ("camera", 8)
        assert isinstance(fence.error.__cause__, OSError)
    assert timeline.fence(3).status is FenceStatus.SIGNALLED
    assert timeline.error.origin == "camera"
    with pytest.raises(FenceStateError):
        timeline.advance(4)
    with pytest.raises(FenceStateError):
        timeline.fail("again")
    assert (timeline.value, timeline.error.message) == (3, "OSError: unplugged")


def test_time_comes_from_the_timelines_own_clock():
    timeline = Timeline(clock=lambda: 1234)
    fence = timeline.fence(1)
    timeline.advance(1)
    assert fence.signal_time_ns == 1234


def test_closed_point_fence_is_forgotten_and_can_be_asked_for_again():
    timeline = Timeline("t")
    fence, other = timeline.fence(4), timeline.fence(6)
    fence.close()
    assert fence.error.origin == "t at 4" and timeline.pending_count == 1
    again = timeline.fence(4)
    assert again is not fence
    timeline.advance(6)
    assert (again.status, other.status) == (FenceStatus.SIGNALLED, FenceStatus.SIGNALLED)


def test_advancing_inside_a_waiter_keeps_the_order():
    timeline = Timeline()
    seen = []
    timeline.fence(1).add_callback(lambda _: timeline.advance(2))
    timeline.fence(1).add_callback(lambda _: seen.append(1))
    timeline.fence(2).add_callback(lambda _: seen.append(2))
    timeline.advance(1)
    assert seen == [1, 2]


@pytest.mark.parametrize("points", [500_000, pytest.param(1_000_000, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_signalled_points_keep_constant_state(points):
    timeline = Timeline()
    timeline.advance(1)
    gc.collect()
    tracemalloc.start()
    # In steps of five; now and then a fence is asked for, far enough ahead to be pending for a while.
    for point in range(2, points + 2, 5):
        if point % 1000 == 2:
            timeline.fence(point + 500)
        timeline.advance(point, 0)
    # What fences allocated: meanwhile a thread of the process may have received a message of another tests' process.
    own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"{fences.__path__[0]}/*")])
    tracemalloc.stop()
    assert timeline.pending_count <= 1
    assert sum(trace.size for trace in own.traces) < 4096


def test_fences_asked_for_while_another_thread_advances_all_finish():
    timeline = Timeline()
    row = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=lambda: [timeline.advance(point) for point in range(1, 3001)])
        thread.start()
        for point in range(1, 3001):
            row.append(timeline.fence(point))
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert {fence.status for fence in row} == {FenceStatus.SIGNALLED}
    assert timeline.pending_count == 0


def test_repr_shows_value_and_failure():
    timeline = Timeline("t", value=2)
    timeline.fence(3)
    assert repr(timeline) == "<t: at 2, 1 points pending>"
    timeline.fail("x")
    assert "failed at 't': x" in repr(timeline)


def test_awaiting_points_in_a_loop(run):
    async def main():
        import asyncio

        timeline = Timeline("t")
        asyncio.get_running_loop().call_soon(timeline.advance, 7)
        await timeline.fence(7)
        asyncio.get_running_loop().call_soon(timeline.fail, "over")
        with pytest.raises(FenceError, match="t: over"):
            await fences.merge([timeline.fence(8), timeline.fence(9)])

    run(main())


def test_closed_points_are_dropped_together():
    timeline = Timeline("line")
    points = [timeline.fence(point) for point in range(1, 1001)]
    copies = 0
    before = timeline._heap
    for count, fence in enumerate(points, 1):
        fence.close()
        assert timeline.pending_count == 1000 - count
        assert len(timeline._heap) <= 2 * timeline.pending_count
        if timeline._heap is not before:
            before = timeline._heap
            copies += 1
    assert copies <= 11, "the heap is copied when it has halved"


def test_point_that_was_closed_and_asked_for_again_is_signalled_once():
    timeline = Timeline("line")
    kept = [timeline.fence(point) for point in (1, 3)]
    timeline.fence(2).close()
    again = timeline.fence(2)
    timeline.advance(2)
    assert [fence.status for fence in (kept[0], again, kept[1])] == [
        FenceStatus.SIGNALLED,
        FenceStatus.SIGNALLED,
        FenceStatus.PENDING,
    ]
    timeline.fail("over")
    assert kept[1].status == FenceStatus.FAILED and timeline.pending_count == 0
