"""An execution in the process of a served device, as a frame of a reservation: from its host to the queue of the device, and back.

Owns the words between both: the driver in between passes nothing on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar

from aionn.hal.callers import FrameReport
from aionn.platform.stalls import Stalls, ThreadStalls, ThreadTimes, times_of_this_thread
from aionn.scheduler.bandwidth import BandwidthServer, Frame, Label

__all__ = ["ExecutingStalls", "ReservedCall", "reserved_call"]


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


class _Own(threading.local):
    """By thread, its stalls; None before its first frame."""

    stalls: ThreadStalls | None = None


class ExecutingStalls:
    """The stalls of the threads that execute the frames of a reservation, each of which asks about itself, while it executes one;
    and those of the processors. To be asked under the lock of the device's queue.

    Args:
        number: The number of the reservation.
        processors: The stalls of the processors.
        times: Gives the counters of the calling thread.
    """

    def __init__(
        self,
        number: int,
        processors: Stalls,
        times: Callable[[], ThreadTimes | None] = times_of_this_thread,
    ) -> None:
        self._number = number
        self._processors = processors
        self._times = times
        self._own = _Own()

    def look(self, now_ns: int) -> None:
        """See ``Stalls.look``."""
        self._processors.look(now_ns)
        stalls = self._of_this_thread()
        if stalls is not None:
            stalls.look(now_ns)

    def since(self, then_ns: int, now_ns: int, began_ns: int | None = None) -> int:
        """See ``Stalls.since``. A thread that executes no frame of the reservation is not counted: the frame waits for it."""
        stolen_ns = self._processors.since(then_ns, now_ns)
        stalls = self._of_this_thread()
        return stolen_ns if stalls is None else max(stolen_ns, stalls.since(then_ns, now_ns))

    def _of_this_thread(self) -> ThreadStalls | None:
        call = reserved_call.get()
        if call is None or call.server.number != self._number:
            return None
        if self._own.stalls is None:
            # It has a processor whenever it asks.
            self._own.stalls = ThreadStalls(self._times, lambda: False)
        return self._own.stalls
