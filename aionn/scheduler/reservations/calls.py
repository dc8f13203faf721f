"""An execution in the process of a served device, as a frame of a reservation: from its host to the queue of the device, and back.

Owns the words between both: the driver in between passes nothing on.
"""

from __future__ import annotations

from contextvars import ContextVar

from aionn.hal.callers import FrameReport
from aionn.scheduler.bandwidth import BandwidthServer, Frame, Label

__all__ = ["ReservedCall", "reserved_call"]


class ReservedCall:
    """One execution.

    Attributes:
        server: The server of the reservation.
        room_ns: The longest best-effort execution that admission allows on its slot.
        frame: The decision of the server; None until the execution has come to the queue of the device, and where that knows no
            reservations.
    """

    __slots__ = ("frame", "room_ns", "server")

    def __init__(self, server: BandwidthServer, room_ns: int) -> None:
        self.server = server
        self.room_ns = room_ns
        self.frame: Frame | None = None

    def report(self, now_ns: int) -> FrameReport | None:
        """The report for the client, after the execution, immediately before it is answered; None where the queue of the device
        knows no reservations."""
        frame = self.frame
        if frame is None:
            return None
        return FrameReport(
            "" if frame.label is None else frame.label.value,
            frame.held_ns,
            frame.is_by_other and (frame.label is None or frame.label is Label.BLOCKED),
            arrived_ns=frame.arrived_ns,
            ended_ns=frame.ended_ns,
            answered_ns=now_ns,
            blocked_ns=frame.blocked_ns,
            missing_ns=max(0, frame.missing_ns),
        )


reserved_call: ContextVar[ReservedCall | None] = ContextVar("reserved_call", default=None)
"""The frame that the execution is which is about to enter the queue of the device; None for best effort."""
