"""The frames of a reservation in this application, from their arrival at the dispatcher to their end.

Owns the label of a frame: that of its arrival, that which a served device has reported, or the cause of its loss, which is known
when that has answered. Pure: ``now`` is an argument.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

from aionn.hal import duration_text
from aionn.hal.callers import FrameReport
from aionn.runtime.guarantees.granted import number_of, take_report
from aionn.scheduler.bandwidth import BandwidthServer, Frame, Label
from aionn.scheduler.ledger import Reservation
from aionn.scheduler.reservations.event_loop import NO_LOOP_COST, LoopCost
from aionn.scheduler.reservations.ways import FrameWay, cause_of_loss
from aionn.service.client.reservations import ServedReservation

__all__ = ["FrameArrival", "Held", "Measured", "OnLoop", "described"]

FOLLOWERS_MAX = 1024
"""Frames without a buffer that get the label of one whose cause is not known yet: 30 frames/s for half a minute, in which a device
that does not answer keeps all buffers of a stream; after that its reservation is silent."""


class Measured(NamedTuple):
    """The device time of a frame, as measured.

    Attributes:
        duration_ns: The quantile of the estimates with their margin.
        timings: The number of timings.
        has_stalls: Whether the time is in it for which the machine did not run the threads.
        loop: The processor time of the event loop's thread for an execution.
    """

    duration_ns: int
    timings: int
    has_stalls: bool = False
    loop: LoopCost = NO_LOOP_COST


class OnLoop(NamedTuple):
    """The time of the event loop that a stream holds.

    Attributes:
        number: Its number in the ledger of the loop.
        cost: The parts of a frame that it was admitted with.
        measured: Those of an execution, as measured.
    """

    number: int
    cost: LoopCost
    measured: LoopCost


class Held:
    """A reservation in force, or one that has ended.

    Attributes:
        reservation: The admitted reservation.
        measured: The timings that it relies on.
        model: The key of the model that its frames execute.
        server: Decides about its frames.
        in_progress: Number of frames that the device, or the dispatcher, has.
        lost_count: Number of those of them that were lost.
        lost: The label of the last one of these; None without one.
        end: Why it ended: ``released``, ``withdrawn`` (the device has failed), ``silent`` (no frame came, and others asked for the
            time), ``astray`` (the source has left its phase, and there is no room where it is now); empty while it is in force.
        grant: The reservation in the ledger of a served device; None on other devices, and when it has ended.
        is_asking: Whether that was asked for another phase, and has not answered.
        by_others: Number of its frames that executions of other applications have blocked.
        on_loop: Its time of the event loop; None where that does not count.
        undecided: Frames that were lost, and whose cause is known when the served device has answered, in their order.
        is_way_late: Whether the last frame took longer to the queue of a served device than was counted with, or paid for one.
    """

    __slots__ = (
        "by_others",
        "end",
        "grant",
        "in_progress",
        "is_asking",
        "is_way_late",
        "lost",
        "lost_count",
        "measured",
        "model",
        "on_loop",
        "reservation",
        "server",
        "undecided",
    )

    def __init__(self, reservation: Reservation, measured: Measured, model: Hashable) -> None:
        self.reservation = reservation
        self.measured = measured
        self.model = model
        self.server: BandwidthServer = reservation.server()
        self.in_progress = self.lost_count = self.by_others = 0
        self.lost: Label | None = None
        self.on_loop: OnLoop | None = None
        self.end = ""
        self.grant: ServedReservation | None = None
        self.is_asking = self.is_way_late = False
        self.undecided: dict[FrameArrival, None] = {}


class Arrivals(Protocol):
    """The reservations of a device, as their frames need them: ``DeviceReservations``."""

    def seen(self, held: Held, now_ns: int) -> None: ...

    def look(self, held: Held, now_ns: int, deadline_ns: int | None) -> None: ...

    def overran(self, held: Held, held_ns: int) -> None: ...

    def took(self, held: Held, frame: Frame, *, is_whole: bool) -> None: ...

    def frame_ended(self, held: Held) -> None: ...


class FrameArrival:
    """The arrival of one frame at the dispatcher, what its server decides then, and the cause if it is lost.

    Attributes:
        held: Its reservation.
        frame: The decision; None before the arrival.
    """

    __slots__ = (
        "_deadline_ns",
        "_followers",
        "_has_ended",
        "_is_lost",
        "_lost_ns",
        "_owner",
        "_report",
        "_sent_ns",
        "frame",
        "held",
    )

    def __init__(self, owner: Arrivals, held: Held) -> None:
        self._owner = owner
        self.held = held
        self.frame: Frame | None = None
        self._is_lost = self._has_ended = False
        self._sent_ns: int | None = None
        self._lost_ns = self._deadline_ns = 0
        self._report: FrameWay | None = None
        self._followers: list[Frame] = []
        held.in_progress += 1

    def label(self, now_ns: int) -> Label | None:
        """The promise that was broken first; None where all were kept. A frame that the device still has may have overrun."""
        frame = self.frame
        if frame is None:
            return None
        frame.exhaust(now_ns)
        return frame.label

    @property
    def has_overrun(self) -> bool:
        """Whether it took longer than its duration, or pays for one that did, also where the machine caused that."""
        frame = self.frame
        return frame is not None and (
            frame.label is Label.OVERRAN or (frame.has_budget and frame.left_ns < 0)
        )

    def lost(self, now_ns: int, late_ns: int) -> None:
        """The frame has no result at its deadline: where it broke no promise, it gets the label of the cause that was measured;
        on a served device with the answer of that, which measures as well.

        Args:
            now_ns: The time.
            late_ns: By how much it was late.
        """
        frame, held = self.frame, self.held
        if frame is None:
            return
        frame.exhaust(now_ns)
        self._lost_ns, self._deadline_ns = now_ns, now_ns - late_ns
        is_answered = self._has_ended or self._sent_ns is None
        if is_answered:
            self._decide(now_ns)
        if not (self._has_ended or self._is_lost):
            self._is_lost = True
            held.lost_count += 1
            held.lost = frame.label
            if not is_answered and frame.label is None:
                held.undecided[self] = None

    def _decide(self, now_ns: int) -> None:
        """The frame was lost, and everything is known that is ever measured."""
        frame, held, way = self.frame, self.held, self._report
        assert frame is not None, "it was lost after its arrival"
        if way is None:
            frame.lost(now_ns, now_ns - self._deadline_ns)
        elif frame.label is None:
            cause = cause_of_loss(
                way,
                deadline_ns=self._deadline_ns,
                duration_ns=frame.server.duration_ns,
                stalled_ns=frame.server.stalls.since(frame.arrived_ns, now_ns),
            )
            if cause is not None:
                frame.note(cause)
                held.by_others += cause is Label.BLOCKED and way.report.is_by_other
        self._decided()

    def _decided(self) -> None:
        """The label of a lost frame is that of the frames without a buffer which it has kept one from."""
        held, label = self.held, None if self.frame is None else self.frame.label
        held.undecided.pop(self, None)
        if self._is_lost and held.lost_count:
            held.lost = label
        if label is not None:
            for frame in self._followers:
                frame.note(label)
        self._followers.clear()

    def withdrawn(self) -> None:
        """The device has failed with the frame, which was lost before."""
        if self.frame is not None:
            self.frame.note(Label.WITHDRAWN)
        self._decided()

    def never_came(self, now_ns: int) -> None:
        """No buffer was free for the frame until its deadline. If the device still has one that was lost, that is the cause;
        otherwise the consumer has them."""
        held = self.held
        self.frame = held.server.miss(held.lost if held.lost_count else Label.DELAYED, now_ns)
        if held.undecided and self.frame.label is None:
            first = next(iter(held.undecided))
            if len(first._followers) < FOLLOWERS_MAX:
                first._followers.append(self.frame)

    def arrive(self, now_ns: int, deadline_ns: int | None) -> Frame:
        """See ``BandwidthServer.arrive``."""
        held = self.held
        self._owner.seen(held, now_ns)
        self._owner.look(held, now_ns, deadline_ns)
        self.frame = held.server.arrive(now_ns, deadline_ns)
        return self.frame

    @property
    def reservation(self) -> int:
        """See ``ReservedFrame``; 0 where the device executes it as best effort."""
        return number_of(self.frame, self.held.grant)

    def sent(self, now_ns: int) -> None:
        """See ``ReservedFrame``."""
        self._sent_ns = now_ns

    def reported(self, report: FrameReport, now_ns: int) -> None:
        """See ``ReservedFrame``."""
        frame, held = self.frame, self.held
        if frame is None or self._sent_ns is None:
            return
        self._report = way = FrameWay(self._sent_ns, now_ns, report)
        is_late_there = way.late_there_ns > 0
        label = take_report(frame, report, is_way_late=is_late_there or held.is_way_late)
        # Frames after it may pay for its way.
        held.is_way_late = is_late_there or (held.is_way_late and label is Label.UNSERVED)
        if label is Label.OVERRAN:
            self._owner.overran(held, max(0, report.held_ns))
        held.by_others += label is Label.BLOCKED and report.is_by_other
        if self._is_lost:
            self._decide(now_ns)

    def ended(self) -> None:
        """Neither the dispatcher nor the device has the frame any more."""
        frame = self.frame
        if frame is not None and frame.has_budget and frame.ended_ns:
            self._owner.took(self.held, frame, is_whole=not self._is_lost)
        self.held.in_progress -= 1
        self._has_ended = True
        if self in self.held.undecided:
            self._decide(self._lost_ns)  # There is no report: nothing was measured after the loss.
        if self._is_lost:
            self.held.lost_count -= 1
            if not self.held.lost_count:
                self.held.lost = None
        self._owner.frame_ended(self.held)


def described(held: Held) -> str:
    """A reservation with the counts of its frames, in a line of text."""
    reservation, server = held.reservation, held.server
    terms = reservation.terms
    others = f" ({held.by_others} by executions of other applications)" if held.by_others else ""
    loop = (
        "" if held.on_loop is None else f" and {duration_text(held.on_loop.cost.total_ns)} of the event loop"
    )
    labels = ", ".join(
        f"{count} {label.value}{others if label is Label.BLOCKED else ''}"
        for label, count in server.counts.items()
        if count
    )
    return (
        f'reserved on {reservation.slot_name}: stream "{terms.name}", {duration_text(reservation.cost.duration_ns)}{loop} every'
        f" {duration_text(terms.period_ns)} within {duration_text(terms.deadline_ns)}; {server.frame_count} frames"
        f"{', ' + labels if labels else ''}{'; ' + held.end if held.end else ''}"
    )
