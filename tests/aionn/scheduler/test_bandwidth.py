"""The server of one reserved stream: which frames keep its terms, and what each may use."""

import random
from itertools import pairwise

from aionn.scheduler.bandwidth import BandwidthServer, Label


def server(*, period=100, deadline=80, jitter=0, duration=10, piece=4):
    return BandwidthServer(
        1,
        slot=0,
        period_ns=period,
        deadline_ns=deadline,
        jitter_ns=jitter,
        duration_ns=duration,
        piece_ns=piece,
    )


def test_frames_a_period_apart_are_reserved_until_capture_plus_deadline():
    found = server()
    frames = [found.arrive(at, at + 80) for at in (5, 105, 230)]
    assert all(frame.is_reserved and frame.label is None for frame in frames)
    assert [frame.urgent_ns for frame in frames] == [85, 185, 310]


def test_early_frame_is_best_effort_and_does_not_push_back_the_next():
    found = server()
    found.arrive(0, 80)
    early = found.arrive(99, 179)
    assert (early.label, early.is_reserved) == (Label.EARLY, False)
    assert found.arrive(100, 180).is_reserved
    assert found.counts[Label.EARLY] == 1 and found.frame_count == 3


def test_source_twice_as_fast_keeps_half_of_its_frames():
    found = server()
    frames = [found.arrive(at, at + 80) for at in range(0, 2000, 50)]
    assert [frame.is_reserved for frame in frames] == [True, False] * 20


def test_jitter_lets_frames_come_closer_but_not_more_often():
    source = random.Random(5)
    for _ in range(20):
        found = server(jitter=40)
        arrivals = [k * 100 + source.randrange(41) for k in range(200)]
        assert all(found.arrive(at, k * 100 + 80).label is None for k, at in enumerate(arrivals))
    found = server(jitter=40)
    burst = [found.arrive(at, at + 80) for at in (40, 100, 160, 220, 280)]
    assert [frame.is_reserved for frame in burst] == [True, True, False, True, False]


def test_reserved_frames_are_always_a_sequence_that_admission_tested():
    """Whatever comes: deadlines at least a period apart, and each at most deadline and at least deadline - jitter after its
    arrival."""
    source = random.Random(9)
    for _ in range(30):
        found = server(jitter=30)
        now, urgent = 0, []
        for _ in range(100):
            now += source.choice((0, 1, 20, 70, 100, 130, 400))
            frame = found.arrive(now, None)
            if frame.is_reserved:
                assert 80 - 30 <= frame.urgent_ns - now <= 80
                urgent.append(frame.urgent_ns)
        assert all(b - a >= 100 for a, b in pairwise(urgent))


def test_frame_that_was_captured_long_ago_is_delayed_and_sorted_no_earlier():
    found = server(jitter=10)
    frame = found.arrive(50, 50 - 20 + 80)
    assert (frame.label, frame.is_reserved, frame.urgent_ns) == (Label.DELAYED, True, 120)
    assert found.arrive(150, 150 - 10 + 80).label is None


def test_budget_counts_pieces_and_an_exact_frame_does_not_overrun():
    found = server()
    frame = found.arrive(0, 80)
    assert frame.exhausted_ns() is None
    frame.start(0)
    assert frame.exhausted_ns() == 10
    frame.stop(6, can_preempt=True)
    frame.start(20)
    assert frame.exhausted_ns() == 24
    frame.stop(24, can_preempt=True)
    assert frame.is_reserved and frame.label is None and frame.left_ns == 0


def test_frame_beyond_its_budget_leaves_the_class_once():
    found = server()
    frame = found.arrive(0, 80)
    frame.start(0)
    frame.stop(11, can_preempt=True)
    assert (frame.is_reserved, frame.label) == (False, Label.OVERRAN)
    frame.leave_class()
    assert found.counts[Label.OVERRAN] == 1 and found.debt_ns == 1


def test_overrun_that_could_not_be_stopped_is_paid_for():
    found = server()
    reserved = []
    for k in range(12):
        frame = found.arrive(100 * k, 100 * k + 80)
        reserved.append(frame.is_reserved)
        frame.start(100 * k)
        frame.stop(100 * k + (15 if frame.is_reserved else 0), can_preempt=False)
    # Each takes half a budget too much: every third pays, so that the share is kept.
    assert reserved == [True, True, False] * 4


def test_withdrawn_stream_is_best_effort():
    found = server()
    found.is_withdrawn = True
    frame = found.arrive(0, 80)
    assert (frame.label, frame.is_reserved) == (Label.WITHDRAWN, False)
    found.is_withdrawn = False
    assert found.arrive(10, 90).is_reserved


def test_change_keeps_what_came():
    found = server()
    found.arrive(0, 80)
    found.change(period_ns=200, deadline_ns=90, jitter_ns=0, duration_ns=5, piece_ns=1)
    assert found.arrive(50, 140).label is Label.EARLY
    frame = found.arrive(100, 190)
    assert frame.is_reserved and frame.urgent_ns == 190 and frame.left_ns == 5
    assert found.arrive(299, 389).label is Label.EARLY


def test_time_beyond_the_budget_counts_up_to_a_boundary_where_there_are_some():
    for can_preempt, debt in ((True, 4), (False, 25)):
        found = server()
        frame = found.arrive(0, 80)
        frame.start(0)
        frame.stop(35, can_preempt=can_preempt)
        assert found.debt_ns == debt


def test_frame_without_a_reservation_is_rejected_where_it_would_delay_reserved_ones():
    found = server()
    found.may_run_lower = False
    assert not found.arrive(0, 80).is_rejected
    early = found.arrive(1, 81)
    assert early.is_rejected and early.label is Label.EARLY
    found.is_withdrawn = True
    assert not found.arrive(200, 280).is_rejected
