"""The enforcement of a reservation: which frames keep what the stream promised, and how much device time each may use.

Owns the rules for one stream. A frame that keeps them is reserved, with a deadline for the order and a budget; any other frame is
best effort, with a label. So a stream that sends too many frames, or whose frames take longer than declared, harms itself alone.
Pure: ``now`` is an argument.

Invariants:
1. The captures that reserved frames count from are at least a period apart, and each frame comes at most the jitter after its own:
   whatever a source does, its reserved frames are a sequence that admission has tested.
2. A reserved frame uses no more device time in the reserved class than its budget, and up to the next boundary. The time beyond
   the budget is a debt, which later frames of the stream pay for by being best effort.
3. A label is the first promise that was broken. A frame that broke none and is lost gets a label only for a cause that was
   measured and that is long enough to have lost it; one that is lost without a label is a defect of the scheduler.
4. A frame that comes late moves the captures that are counted from for itself alone: the next one that comes as promised pays for
   that as best effort, and those after it are reserved as if nothing had happened.

Source: constant bandwidth server (Abeni, Buttazzo 1998), one for each stream, whose budget is that of one frame; the test of
arrivals is the generic cell rate algorithm (ITU-T I.371) with the period and the jitter.
"""

from __future__ import annotations

import enum
from typing import Protocol

from aionn.platform.stalls import NO_STALLS, Stalls

__all__ = ["Arrivals", "BandwidthServer", "Frame", "Label"]


class Label(enum.Enum):
    """The reason for which a frame of a reserved stream is not guaranteed."""

    EARLY = "early"
    """It came sooner after the frames before it than the period and the jitter allow."""
    DELAYED = "delayed"
    """It came later after its capture than the jitter allows, so that its deadline is nearer than was promised, or pays for one
    that did; or no buffer was free for it, since the consumer has them."""
    OVERRAN = "overran"
    """It took longer than the stream's duration, or pays for one that did."""
    WITHDRAWN = "withdrawn"
    """The device failed, or is down, or the reservation has ended."""
    STALLED = "stalled"
    """The machine did not run the event loop, or the thread that executes the frame, for as long as the frame came late, overran or
    was late at least: other threads had its processor, or the virtual machine was stopped."""
    BLOCKED = "blocked"
    """It was lost because an execution before it kept the slot for longer than was counted with."""
    UNSERVED = "unserved"
    """The process of a served device took it, or answered it, later than was counted with, for as long as it was late at least; or
    for so long that it came too early or too late to the queue of the device."""
    UNREAD = "unread"
    """Its answer was there, and the event loop of the application read it later, for as long as it was late at least."""


class Frame:
    """A frame of a reserved stream, from its arrival to its end.

    Attributes:
        server: The server of its stream.
        label: The promise that was broken first; None where all were kept.
        has_budget: Whether it belonged to the reserved class when it came.
        is_reserved: Whether it belongs to the reserved class now.
        is_rejected: Whether it may not run: it is not reserved, and as best effort it could delay reserved frames for too long.
        urgent_ns: The deadline that it is sorted by.
        left_ns: The rest of its budget.
        since_ns: The time at which it got its slot; None while it has none.
        arrived_ns: When it came.
        has_waited: Whether it waited for its slot.
        blocked_ns: Time by which executions before it have kept its slot for longer than was counted with.
        missing_ns: The time that it lacked when it was rejected while it waited, if those before it take what is counted with; 0
            for one that was not rejected.
        held_ns: The time for which it has had its slot.
        stalled_ns: The part of that beyond its budget for which the machine did not run the threads.
        ended_ns: When it left its slot, the last time; 0 before.
        is_by_other: Whether the last execution that kept its slot for too long is another client's; known in the queue of a driver
            alone.
    """

    __slots__ = (
        "arrived_ns",
        "blocked_ns",
        "ended_ns",
        "has_budget",
        "has_waited",
        "held_ns",
        "is_by_other",
        "is_rejected",
        "is_reserved",
        "label",
        "left_ns",
        "missing_ns",
        "server",
        "since_ns",
        "stalled_ns",
        "urgent_ns",
    )

    def __init__(
        self, server: BandwidthServer, label: Label | None, arrived_ns: int, urgent_ns: int | None = None
    ) -> None:
        self.server = server
        self.label: Label | None = None
        self.arrived_ns = arrived_ns
        self.has_waited = self.is_by_other = False
        self.blocked_ns = self.missing_ns = self.held_ns = self.stalled_ns = self.ended_ns = 0
        self.is_reserved = self.has_budget = urgent_ns is not None
        self.is_rejected = not (self.is_reserved or server.may_run_lower or server.is_withdrawn)
        self.urgent_ns = 0 if urgent_ns is None else urgent_ns
        self.left_ns = server.duration_ns
        self.since_ns: int | None = None
        if label is not None:
            self.note(label)

    def note(self, label: Label) -> None:
        """Labels it, and counts that, unless it has a label."""
        if self.label is None:
            self.label = label
            self.server.counts[label] += 1

    def described(self) -> str:
        """Its class and its label, in words."""
        text = f"of reservation {self.server.number}, " + ("reserved" if self.is_reserved else "best effort")
        return text if self.label is None else f"{text} since {self.label.value}"

    def start(self, now_ns: int) -> None:
        """It got a slot."""
        self.since_ns = now_ns
        if self.has_budget:
            self.server.stalls.look(now_ns)

    def stop(self, now_ns: int, *, can_preempt: bool) -> None:
        """It left its slot: it has ended, or it was preempted.

        Args:
            now_ns: The time.
            can_preempt: Whether the device stops at boundaries.
        """
        if self.since_ns is None:
            return
        began_ns, self.since_ns = self.since_ns, None
        self.ended_ns = now_ns
        self.left_ns -= now_ns - began_ns
        self.held_ns += now_ns - began_ns
        if not self.has_budget:
            return
        if self.left_ns < 0:
            excess_ns = -self.left_ns
            stalled_ns = self.server.stalls.since(began_ns, now_ns)
            self.leave_class(Label.STALLED if stalled_ns >= excess_ns else Label.OVERRAN)
            # A device with boundaries takes at most one piece too much from other frames. Nothing is owed for what the machine
            # took.
            self.stalled_ns = min(excess_ns, stalled_ns)
            owed_ns = excess_ns - self.stalled_ns
            self.server.debt_ns += min(owed_ns, self.server.piece_ns) if can_preempt else owed_ns
        self.server.stalls.look(now_ns)

    def exhausted_ns(self) -> int | None:
        """The last moment at which it may still run in the reserved class; None while it does not run."""
        return None if self.since_ns is None else self.since_ns + self.left_ns

    def exhaust(self, now_ns: int) -> bool:
        """Whether it runs beyond its budget; then it is to leave its class, and has a label as soon as no stall explains that: how
        long it takes in the end is not known yet."""
        exhausted_ns = self.exhausted_ns()
        if exhausted_ns is None or now_ns <= exhausted_ns:
            return False
        if self.label is None:
            assert self.since_ns is not None, "it runs"
            if self.server.stalls.since(self.since_ns, now_ns, self.since_ns) < now_ns - exhausted_ns:
                self.note(Label.OVERRAN)
        return True

    def leave_class(self, label: Label = Label.OVERRAN) -> None:
        """It is best effort from now on."""
        self.is_reserved = False
        self.note(label)

    def lost(self, now_ns: int, late_ns: int) -> None:
        """It has no result at its deadline: if it broke no promise, it gets the label of a cause that was measured.

        Args:
            now_ns: The time.
            late_ns: By how much it was late, for one that still runs by how much so far; for one that was rejected while it waited
                its ``missing_ns`` counts. With neither above 0 it was not lost by being late.
        """
        missing_ns = self.missing_ns or late_ns
        if self.label is not None or missing_ns <= 0:
            return
        exhausted_ns = self.exhausted_ns()
        if exhausted_ns is not None:
            missing_ns = max(missing_ns, exhausted_ns - (now_ns - late_ns))
        stalled_ns = self.server.stalls.since(self.arrived_ns, now_ns, self.since_ns)
        if max(stalled_ns, self.blocked_ns) >= missing_ns:
            self.note(Label.STALLED if stalled_ns >= self.blocked_ns else Label.BLOCKED)


class Arrivals(Protocol):
    """Decides about a frame when it arrives: a server, or a record of what its server decided."""

    def arrive(self, now_ns: int, deadline_ns: int | None) -> Frame:
        """See ``BandwidthServer.arrive``."""
        ...


class BandwidthServer:
    """The state of a reserved stream.

    Args:
        number: The number of the reservation.
        slot: The index of the slot that its frames run on.
        period_ns: Least time between captures.
        deadline_ns: From capture to end.
        jitter_ns: Longest time from capture to arrival.
        duration_ns: Device time of a frame.
        piece_ns: The longest time in it without a boundary.

    Attributes:
        debt_ns: Device time beyond the budgets of frames, until others have paid for it.
        may_run_lower: Whether frames that are not reserved may run as best effort, see ``Ledger.may_run_lower``.
        is_withdrawn: Whether the reservation has ended, or its slot is down: no frame is reserved then.
        frame_count: Number of frames that came.
        counts: Number of those with each label.
        stalls: Times during which the machine did not run the event loop, or the threads that execute the frames.
    """

    __slots__ = (
        "_late",
        "_next_ns",
        "counts",
        "deadline_ns",
        "debt_ns",
        "duration_ns",
        "frame_count",
        "is_withdrawn",
        "jitter_ns",
        "may_run_lower",
        "number",
        "period_ns",
        "piece_ns",
        "slot",
        "stalls",
    )

    def __init__(
        self,
        number: int,
        *,
        slot: int,
        period_ns: int,
        deadline_ns: int,
        jitter_ns: int,
        duration_ns: int,
        piece_ns: int,
    ) -> None:
        self.number = number
        self.slot = slot
        self.debt_ns = 0
        self.is_withdrawn = False
        self.may_run_lower = True
        self.frame_count = 0
        self.counts = dict.fromkeys(Label, 0)
        self.stalls: Stalls = NO_STALLS
        self._next_ns: int | None = None
        # The label and the own capture of the last reserved frame, where it came late.
        self._late: tuple[Label, int] | None = None
        self.change(
            period_ns=period_ns,
            deadline_ns=deadline_ns,
            jitter_ns=jitter_ns,
            duration_ns=duration_ns,
            piece_ns=piece_ns,
        )

    def change(
        self, *, period_ns: int, deadline_ns: int, jitter_ns: int, duration_ns: int, piece_ns: int
    ) -> None:
        """Takes other terms, which demand no more than those before: frames that came are counted as they were."""
        self.period_ns = period_ns
        self.deadline_ns = deadline_ns
        self.jitter_ns = jitter_ns
        self.duration_ns = duration_ns
        self.piece_ns = piece_ns

    def arrive(self, now_ns: int, deadline_ns: int | None) -> Frame:
        """A frame of the stream arrives.

        Args:
            now_ns: The time.
            deadline_ns: The frame's own, absolute; None means that of the reservation alone.
        """
        self.frame_count += 1
        if self.is_withdrawn:
            return Frame(self, Label.WITHDRAWN, now_ns)
        self.stalls.look(now_ns)
        own_ns = None if deadline_ns is None else deadline_ns - self.deadline_ns
        # The earliest capture that this frame can have had: later frames are judged by it, so that no jitter is counted twice.
        captured_ns = now_ns - self.jitter_ns
        is_moved = self._next_ns is not None and self._next_ns > captured_ns
        if is_moved:
            assert self._next_ns is not None, "frames have come"
            captured_ns = self._next_ns
        if self._late is not None and is_moved and own_ns is not None:
            # It came as promised, and only the lateness of the one before it leaves it no capture of its own.
            cause, late_ns = self._late
            comes_as_promised = own_ns >= now_ns - self.jitter_ns and own_ns >= late_ns + self.period_ns
            if comes_as_promised and own_ns < captured_ns and (captured_ns > now_ns or self.may_run_lower):
                return Frame(self, cause, now_ns)
        if captured_ns > now_ns:
            return Frame(self, Label.EARLY, now_ns)
        self._next_ns = captured_ns + self.period_ns
        urgent_ns = captured_ns + self.deadline_ns
        label = self._lateness(own_ns, captured_ns, now_ns)
        if self.debt_ns > 0 and self.debt_ns >= self.duration_ns:
            self.debt_ns -= self.duration_ns
            return Frame(self, Label.OVERRAN, now_ns)
        return Frame(self, label, now_ns, urgent_ns)

    def _lateness(self, own_ns: int | None, captured_ns: int, now_ns: int) -> Label | None:
        """The label of a frame that comes later after its capture than was promised, which is kept for those after it."""
        if own_ns is None or own_ns >= captured_ns:
            self._late = None
            return None
        late_ns = now_ns - self.jitter_ns - own_ns
        label = Label.DELAYED
        if late_ns > 0:
            if self.stalls.since(own_ns, now_ns) >= late_ns:
                label = Label.STALLED
        elif self._late is not None:
            # It came as promised: the moved captures are the cause.
            label = self._late[0]
        self._late = label, own_ns
        return label

    def miss(self, label: Label | None, now_ns: int) -> Frame:
        """A frame of the stream had no buffer until its deadline, and never arrives; the label is that of the cause."""
        self.frame_count += 1
        return Frame(self, Label.WITHDRAWN if self.is_withdrawn else label, now_ns)
