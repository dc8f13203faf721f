"""The labels of frames that were sent to a served device, by stamped records: at their loss, at the answer, and at its absence."""

from __future__ import annotations

from typing import Any

from aionn.hal.callers import FrameReport
from aionn.runtime.guarantees.arrivals import FOLLOWERS_MAX, FrameArrival, Measured
from aionn.runtime.guarantees.reservations import DeviceReservations
from aionn.scheduler.admission import StreamTerms
from aionn.scheduler.bandwidth import Frame, Label
from aionn.scheduler.dispatcher import Dispatcher
from aionn.scheduler.estimates import Estimates

MS = 1_000_000
DEADLINE_NS = 30 * MS


class Stream:
    """A stream of 5 ms every 100 ms, within 30 ms, on a device of its own."""

    def __init__(self) -> None:
        estimates = Estimates()
        dispatcher = Dispatcher(1, now=lambda: 0, can_preempt=False, estimates=estimates)
        self.reservations = DeviceReservations("npu", 1, dispatcher, estimates)
        terms = StreamTerms(name="gate", period_ns=100 * MS, deadline_ns=DEADLINE_NS, jitter_ns=10 * MS)
        self.held = self.reservations.admit(terms, Measured(5 * MS, 16), "m", now_ns=0)

    def send(self, number: int) -> Sent:
        """A frame that is captured, comes and is sent."""
        return Sent(FrameArrival(self.reservations, self.held), number * 100 * MS)

    def without_buffer(self, now_ns: int) -> Frame:
        arrival = FrameArrival(self.reservations, self.held)
        arrival.never_came(now_ns)
        arrival.ended()
        assert arrival.frame is not None
        return arrival.frame

    def counts(self) -> dict[str, int]:
        return {label.value: count for label, count in self.held.server.counts.items() if count}


class Sent:
    """A frame that was sent; times in milliseconds since then."""

    def __init__(self, arrival: FrameArrival, now_ns: int) -> None:
        self.arrival = arrival
        self.at_ns = now_ns
        self.frame = arrival.arrive(now_ns, now_ns + DEADLINE_NS)
        arrival.sent(now_ns)

    def lost(self, at: float) -> Sent:
        """There was no result at its deadline."""
        now_ns = self.at_ns + round(at * MS)
        self.arrival.lost(now_ns, now_ns - self.at_ns - DEADLINE_NS)
        return self

    def answered(
        self,
        label: str = "",
        *,
        arrived: float = 0.5,
        ended: float = 6,
        read: float | None = None,
        **more: Any,
    ) -> Sent:
        read = ended if read is None else read
        arrived_ns, ended_ns, read_ns = (self.at_ns + round(each * MS) for each in (arrived, ended, read))
        report = FrameReport(
            label, 5 * MS, arrived_ns=arrived_ns, ended_ns=ended_ns, answered_ns=ended_ns, **more
        )
        self.arrival.reported(report, read_ns)
        self.arrival.ended()
        return self


def test_frame_that_is_answered_in_time_has_no_label() -> None:
    stream = Stream()
    assert stream.send(0).answered().frame.label is None and stream.counts() == {}
    assert stream.send(1).answered(arrived=15, ended=20).frame.label is None, "a way that lost nothing"


def test_cause_of_a_frame_that_its_deadline_has_dropped_is_known_with_the_answer() -> None:
    stream = Stream()
    sent = stream.send(0).lost(30.1)
    assert sent.frame.label is None and list(stream.held.undecided) == [sent.arrival]
    sent.answered(arrived=27, ended=32)
    assert sent.frame.label is Label.UNSERVED and not stream.held.undecided and not stream.held.lost_count
    assert "1 frames, 1 unserved" in stream.reservations.lines()[0]
    assert stream.reservations.labels[Label.UNSERVED] == 1


def test_frame_whose_answer_was_read_late_is_unread() -> None:
    stream = Stream()
    assert stream.send(0).answered(read=31).lost(31).frame.label is Label.UNREAD
    assert stream.counts() == {"unread": 1}


def test_lateness_that_nothing_measured_explains_has_no_label() -> None:
    stream = Stream()
    assert stream.send(0).lost(30.1).answered(ended=40).frame.label is None and stream.counts() == {}
    assert not stream.held.undecided


def test_cause_of_a_lost_frame_is_that_of_those_that_it_kept_a_buffer_from() -> None:
    stream = Stream()
    sent = stream.send(0).lost(30.1)
    frames = [stream.without_buffer(sent.at_ns + 200 * MS + each) for each in range(FOLLOWERS_MAX + 1)]
    assert {frame.label for frame in frames} == {None}
    sent.answered(arrived=250, ended=256)
    assert {frame.label for frame in frames[:-1]} == {Label.UNSERVED} and frames[-1].label is None
    assert stream.without_buffer(500 * MS).label is Label.DELAYED, "the device has none any more"


def test_frame_that_the_device_never_answers_is_withdrawn_with_those_behind_it() -> None:
    stream = Stream()
    sent = stream.send(0).lost(30.1)
    behind = stream.without_buffer(200 * MS)
    stream.reservations.withdraw()
    sent.arrival.ended()
    assert sent.frame.label is behind.label is Label.WITHDRAWN and stream.counts() == {"withdrawn": 2}


def test_arrival_that_the_way_has_moved_is_unserved_for_the_frames_that_pay_for_it_too() -> None:
    stream = Stream()
    labels = [
        stream.send(number).answered(label, arrived=arrived, ended=arrived + 5).frame.label
        for number, (label, arrived) in enumerate(
            [("", 0.5), ("delayed", 12), ("delayed", 0.5), ("early", 0.5), ("", 0.5), ("delayed", 0.5)]
        )
    ]
    unserved = Label.UNSERVED
    assert labels == [None, unserved, unserved, unserved, None, Label.DELAYED]


def test_labels_of_the_device_that_the_way_does_not_explain_are_taken_as_they_are() -> None:
    stream = Stream()
    assert stream.send(0).answered("overran", arrived=12, ended=30).frame.label is Label.OVERRAN
    blocked = stream.send(1).lost(30.1).answered("blocked", ended=50, is_by_other=True)
    assert blocked.frame.label is Label.BLOCKED and stream.held.by_others == 1
    assert "1 blocked (1 by executions of other applications)" in stream.reservations.lines()[0]
    assert stream.send(2).answered("unheard of").frame.label is None


def test_frame_that_came_early_is_early_whatever_its_way_was() -> None:
    stream = Stream()
    stream.send(0)
    arrival = FrameArrival(stream.reservations, stream.held)
    arrival.arrive(MS, MS + DEADLINE_NS)
    early = Sent(FrameArrival(stream.reservations, stream.held), 2 * MS)
    early.lost(31).answered(arrived=29, ended=34)
    assert early.frame.label is Label.EARLY
