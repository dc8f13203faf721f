"""The cause of the loss of a frame of a served device, by the times that both ends have measured."""

from __future__ import annotations

from typing import Any

import pytest

from aionn.hal.callers import FrameReport
from aionn.scheduler.bandwidth import Label
from aionn.scheduler.reservations.ways import FrameWay, cause_of_loss, label_at_queue

MS = 1_000_000
DURATION_NS = 5 * MS
DEADLINE_NS = 33 * MS


def way(
    *,
    arrived: float = 0.5,
    ended: float = 6.0,
    answered: float | None = None,
    read: float | None = None,
    **more: Any,
) -> FrameWay:
    """A frame that was sent at 0; times in milliseconds."""
    answered = max(arrived, ended) if answered is None else answered
    times = (round(each * MS) for each in (arrived, ended, answered))
    read_ns = round((answered if read is None else read) * MS)
    arrived_ns, ended_ns, answered_ns = times
    more = {name: round(value * MS) for name, value in more.items()}
    held_ns = more.pop("held", DURATION_NS)
    return FrameWay(
        0,
        read_ns,
        FrameReport("", held_ns, arrived_ns=arrived_ns, ended_ns=ended_ns, answered_ns=answered_ns, **more),
    )


def cause(found: FrameWay, stalled: float = 0) -> Label | None:
    return cause_of_loss(
        found, deadline_ns=DEADLINE_NS, duration_ns=DURATION_NS, stalled_ns=round(stalled * MS)
    )


def test_frame_that_the_process_took_late_is_unserved_and_the_way_that_is_counted_with_explains_nothing() -> (
    None
):
    assert cause(way(arrived=29, ended=34)) is Label.UNSERVED
    assert cause(way(arrived=2.0, ended=34.0)) is Label.UNSERVED, "late by 1 ms, and 1 ms more than the way"
    assert cause(way(arrived=1.9, ended=34.0)) is None
    assert way(arrived=1.0).late_there_ns == 0 and way(arrived=1.5).late_there_ns == MS // 2
    assert way(arrived=-1.0).late_there_ns == 0, "the way is never counted as time won"


def test_answer_that_the_process_gave_late_is_unserved() -> None:
    assert cause(way(ended=30, answered=34)) is Label.UNSERVED
    assert cause(way(ended=33.5, answered=33.9)) is None, "it had ended after the deadline"


def test_answer_that_was_there_in_time_is_unread() -> None:
    assert cause(way(ended=6, read=34)) is Label.UNREAD
    assert cause(way(ended=33, read=33.5)) is Label.UNREAD
    assert cause(way(ended=6, read=33)) is None, "it is not late"


def test_parts_of_the_way_count_together_by_the_longest() -> None:
    # Late by 4 ms: 3 there, 2 back.
    assert cause(way(arrived=4, ended=35, read=37)) is Label.UNSERVED
    assert cause(way(arrived=3, ended=34, read=37)) is Label.UNREAD
    assert cause(way(arrived=2, ended=36, read=37)) is None
    assert cause(way(arrived=2, ended=36, read=37, blocked_ns=2)) is Label.BLOCKED


def test_stall_of_the_loop_is_a_part_of_what_was_unread_and_goes_before_it() -> None:
    late = way(ended=6, read=38)
    assert cause(late, stalled=5) is Label.STALLED and cause(late, stalled=4.9) is Label.UNREAD
    there = way(arrived=30, ended=35)
    assert cause(there, stalled=2) is Label.UNSERVED, "29 ms there are longer"
    assert cause(there, stalled=29) is Label.STALLED


def test_frame_that_was_not_executed_lacks_its_duration_too() -> None:
    # It came 31 ms after it was sent, and was rejected: with 29 ms less on its way it would have been in time.
    assert cause(way(arrived=31, ended=0, held=0)) is Label.UNSERVED
    # It came in time, and the device was not free.
    assert cause(way(arrived=2, ended=0, answered=29.5, held=0)) is None
    # Ended at its deadline, before its end.
    assert cause(way(arrived=3, ended=33.5, held=3)) is None
    assert cause(way(arrived=4, ended=33.5, held=3)) is Label.UNSERVED


def test_frame_that_was_rejected_while_it_waited_lacks_what_its_queue_says() -> None:
    for arrived, found in ((7.9, None), (8.0, Label.UNSERVED)):
        rejected = way(arrived=arrived, ended=0, answered=20, read=60, held=0, missing_ns=7)
        assert cause(rejected) is found, "when its rejection is read has no part in it"
    assert cause(way(arrived=2, ended=0, answered=20, held=0, missing_ns=7, blocked_ns=6)) is Label.BLOCKED


@pytest.mark.parametrize("label", [Label.EARLY, Label.DELAYED])
def test_arrival_that_the_way_has_moved_is_unserved(label: Label) -> None:
    assert label_at_queue(label, is_way_late=True) is Label.UNSERVED
    assert label_at_queue(label, is_way_late=False) is label


@pytest.mark.parametrize("label", [each for each in Label if each not in (Label.EARLY, Label.DELAYED)])
def test_way_changes_no_other_label(label: Label) -> None:
    assert label_at_queue(label, is_way_late=True) is label


@pytest.mark.parametrize("time", [0, -(2**63), 2**64 - 1])
@pytest.mark.parametrize(
    "field", ["held_ns", "arrived_ns", "ended_ns", "answered_ns", "blocked_ns", "missing_ns"]
)
def test_times_that_a_hostile_process_sends_are_numbers_like_others(field: str, time: int) -> None:
    report = FrameReport("", **{"held_ns": DURATION_NS, field: time})
    found = cause_of_loss(
        FrameWay(0, 34 * MS, report), deadline_ns=DEADLINE_NS, duration_ns=DURATION_NS, stalled_ns=0
    )
    assert found is None or found in Label
