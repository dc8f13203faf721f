"""The way of a frame to the queue of a served device and back to its application, and whether that was the cause of its loss.

Owns the times of that way, which are measured at both ends, and the decision by them. Pure: all times are arguments, on the
monotonic clock of the machine that both ends run on.

Invariants:
1. Only measured time counts, and each part of it once: the way there beyond ``WAY_NS``, the time in the device's process after the
   slot was left, the time until the application reads the answer.
2. A cause is found only where these parts, with the time for which others have kept the slot, are as long as the frame was late.
"""

from __future__ import annotations

from typing import NamedTuple

from aionn.hal.callers import FrameReport
from aionn.scheduler.bandwidth import Label

__all__ = ["WAY_NS", "FrameWay", "cause_of_loss", "label_at_queue"]

WAY_NS = 1_000_000
"""Time that frames may take from their application to the queue of the device, beside their jitter: twice the median of 0.57 ms
that it was on a machine whose processors were all busy. Admission counts with it, as with jitter. The way back is a part of the
duration, which the application measures."""


class FrameWay(NamedTuple):
    """The measured times of a frame.

    Attributes:
        sent_ns: When the application began to send it.
        read_ns: When the application read the answer.
        report: Of the process of the device.
    """

    sent_ns: int
    read_ns: int
    report: FrameReport

    @property
    def late_there_ns(self) -> int:
        """The time of the way to the queue that admission has not counted with."""
        return max(0, self.report.arrived_ns - self.sent_ns - WAY_NS)

    @property
    def unserved_ns(self) -> int:
        """The time that the process of the device took too long for: the frame, and its answer."""
        report = self.report
        answering_ns = max(0, report.answered_ns - report.ended_ns) if report.ended_ns > 0 else 0
        return self.late_there_ns + answering_ns

    @property
    def unread_ns(self) -> int:
        """The time from the answer until the application read it."""
        return max(0, self.read_ns - max(self.report.answered_ns, self.sent_ns))


def cause_of_loss(way: FrameWay, *, deadline_ns: int, duration_ns: int, stalled_ns: int) -> Label | None:
    """The cause for which a frame that kept its promises has no result at its deadline; None where what was measured is shorter.

    Args:
        way: Its times.
        deadline_ns: Its deadline.
        duration_ns: Its reserved device time: one that was not executed, or not to its end, would have needed the rest of that.
        stalled_ns: The time for which the machine did not run the application's event loop since the frame came.
    """
    report = way.report
    unread_ns = way.unread_ns
    if report.missing_ns > 0:
        # Rejected while it waited, by what it lacked then: when that is read has no part in it.
        missing_ns, unread_ns = report.missing_ns, 0
    else:
        is_whole = 0 < report.ended_ns <= deadline_ns  # Nothing ends an execution before its deadline.
        rest_ns = 0 if is_whole else max(0, duration_ns - report.held_ns)
        missing_ns = way.read_ns + rest_ns - deadline_ns
    if missing_ns <= 0:
        return None
    parts = {
        Label.UNSERVED: way.unserved_ns,
        Label.UNREAD: unread_ns,
        Label.BLOCKED: max(0, report.blocked_ns),
    }
    # A stall of the loop is a part of the time in which the answer was not read.
    if stalled_ns >= missing_ns and stalled_ns >= max(parts[Label.UNSERVED], parts[Label.BLOCKED]):
        return Label.STALLED
    if sum(parts.values()) < missing_ns:
        return None
    return max(parts, key=parts.__getitem__)


def label_at_queue(label: Label, *, is_way_late: bool) -> Label:
    """The label of a frame that the queue of the device has given ``label``, and that had kept its promises when it was sent.

    Both ends judge arrivals by the same rule. So where a frame came as promised, and to the queue too early after others or too
    late, its way or theirs took longer than was counted with: ``is_way_late``.
    """
    return Label.UNSERVED if is_way_late and label in (Label.EARLY, Label.DELAYED) else label
