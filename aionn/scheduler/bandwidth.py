"""The enforcement of a reservation: which frames keep what the stream promised, and how much device time each may use.

Owns the rules for one stream. A frame that keeps them is reserved, with a deadline for the order and a budget; any other frame is
best effort, with a label. So a stream that sends too many frames, or whose frames take longer than declared, harms itself alone.
Pure: ``now`` is an argument.

Invariants:
1. The captures that reserved frames count from are at least a period apart, and each frame comes at most the jitter after its own:
   whatever a source does, its reserved frames are a sequence that admission has tested.
2. A reserved frame uses no more device time in the reserved class than its budget, and up to the next boundary. The time beyond
   the budget is a debt, which later frames of the stream pay for by being best effort.
3. A label is the first promise that was broken; a frame without a label that is lost is a defect of the scheduler.

Source: constant bandwidth server (Abeni, Buttazzo 1998), one for each stream, whose budget is that of one frame; the test of
arrivals is the generic cell rate algorithm (ITU-T I.371) with the period and the jitter.
"""

from __future__ import annotations

import enum
from typing import Protocol

__all__ = ["Arrivals", "BandwidthServer", "Frame", "Label"]


class Label(enum.Enum):
    """The reason for which a frame of a reserved stream is not guaranteed."""

    EARLY = "early"
    """It came sooner after the frames before it than the period and the jitter allow."""
    DELAYED = "delayed"
    """It came later after its capture than the jitter allows, so that its deadline is nearer than was promised."""
    OVERRAN = "overran"
    """It took longer than the stream's duration, or pays for one that did."""
    WITHDRAWN = "withdrawn"
    """The device failed, or is down, or the reservation has ended."""


class Frame:
    """A frame of a reserved stream, from its arrival to its end.

    Attributes:
        server: The server of its stream.
        label: The promise that was broken first; None where all were kept.
        is_reserved: Whether it belongs to the reserved class now.
        is_rejected: Whether it may not run: it is not reserved, and as best effort it could delay reserved frames for too long.
        urgent_ns: The deadline that it is sorted by.
        left_ns: What is left of its budget.
        since_ns: The time at which it got its slot; None while it has none.
    """

    __slots__ = (
        "_has_budget",
        "is_rejected",
        "is_reserved",
        "label",
        "left_ns",
        "server",
        "since_ns",
        "urgent_ns",
    )

    def __init__(self, server: BandwidthServer, label: Label | None, urgent_ns: int) -> None:
        self.server = server
        self.label: Label | None = None
        self.is_reserved = self._has_budget = label is None or label is Label.DELAYED
        self.is_rejected = not (self.is_reserved or server.may_run_lower or server.is_withdrawn)
        self.urgent_ns = urgent_ns
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

    def stop(self, now_ns: int, *, can_preempt: bool) -> None:
        """It left its slot: it has ended, or it was preempted.

        Args:
            now_ns: The time.
            can_preempt: Whether the device stops at boundaries.
        """
        if self.since_ns is None:
            return
        self.left_ns -= now_ns - self.since_ns
        self.since_ns = None
        if self.left_ns < 0 and self._has_budget:
            self.leave_class()
            # A device with boundaries takes at most one piece too much from other frames.
            excess_ns = -self.left_ns
            self.server.debt_ns += min(excess_ns, self.server.piece_ns) if can_preempt else excess_ns

    def exhausted_ns(self) -> int | None:
        """The last moment at which it may still run in the reserved class; None while it does not run."""
        return None if self.since_ns is None else self.since_ns + self.left_ns

    def leave_class(self, label: Label = Label.OVERRAN) -> None:
        """It is best effort from now on."""
        self.is_reserved = False
        self.note(label)


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
    """

    __slots__ = (
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
        self._next_ns: int | None = None
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
            return Frame(self, Label.WITHDRAWN, 0)
        # The earliest capture that this frame can have had: later frames are judged by it, so that no jitter is counted twice.
        captured_ns = now_ns - self.jitter_ns
        if self._next_ns is not None and self._next_ns > captured_ns:
            captured_ns = self._next_ns
        if captured_ns > now_ns:
            return Frame(self, Label.EARLY, 0)
        self._next_ns = captured_ns + self.period_ns
        if self.debt_ns > 0 and self.debt_ns >= self.duration_ns:
            self.debt_ns -= self.duration_ns
            return Frame(self, Label.OVERRAN, 0)
        urgent_ns = captured_ns + self.deadline_ns
        is_delayed = deadline_ns is not None and deadline_ns < urgent_ns
        return Frame(self, Label.DELAYED if is_delayed else None, urgent_ns)
