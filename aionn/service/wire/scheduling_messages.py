"""The messages about the scheduling of a driver process: of its threads (``aionn.realtime``), of the time that streams of its
clients have reserved, and of frames of these streams. See ``protocol`` for their way.

Numbers in messages about reservations are integers of any size: the server checks them where it uses them, so that a wrong one is
an error of that call.
"""

from __future__ import annotations

import msgspec

from aionn.errors import ErrorStatus, WouldFit
from aionn.hal import ExecutionResult, Priority
from aionn.hal.callers import FrameReport
from aionn.realtime import ThreadRow
from aionn.realtime.scheduling import Lent
from aionn.service.wire.handles import RequestOnWire

__all__ = [
    "THREADS_MAX",
    "AskedTime",
    "Change",
    "ExecuteReserved",
    "ExecuteReservedReply",
    "GetThreads",
    "JoinScheduling",
    "Move",
    "MoveReply",
    "Refusal",
    "Release",
    "Reserve",
    "ReserveReply",
    "Reserved",
    "Room",
    "SchedulingCall",
    "SchedulingReply",
    "ThreadsReply",
    "Withdrawn",
]

THREADS_MAX = 64
"""Most rows of one answer about threads: some 300 bytes each, with a reason. Most driver processes have five."""


class JoinScheduling(msgspec.Struct, frozen=True, tag=True):
    """The permission of the application for the threads of its driver process. Only a process that was started for this client
    accepts it; it has inherited the connection to the watchdog, since a socket never comes with a message.
    """

    lent: Lent


class GetThreads(msgspec.Struct, frozen=True, tag=True):
    """What did the threads of the driver process get?"""


class ThreadsReply(msgspec.Struct, frozen=True, tag=True):
    """Rows of the first threads, and the reason why the memory of the process is not locked; None if real time is off there."""

    rows: tuple[ThreadRow, ...]
    not_locked: str | None = None


class AskedTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time that a stream asks for.

    Attributes:
        name: The stream's name, for messages.
        period_ns: See ``StreamTerms``, as for the next four.
        deadline_ns: See there.
        jitter_ns: See there.
        phase_ns: See there.
        tolerance_ns: See there.
        chooses_phase: Whether the server may choose another phase.
        duration_ns: The device time of a frame, which is one piece.
        blocker: The client's model with the longest best-effort executions, which its own streams are tested with; empty for none.
        blocker_ns: The duration of those.
    """

    name: str
    period_ns: int
    deadline_ns: int
    jitter_ns: int
    duration_ns: int
    phase_ns: int | None = None
    tolerance_ns: int = 0
    chooses_phase: bool = False
    blocker: str = ""
    blocker_ns: int = 0


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Reserves time of a served device, beside what its other clients have reserved."""

    asked: AskedTime


class Change(msgspec.Struct, frozen=True, tag=True):
    """Reserves time for new terms; the old reservation is there until it is released. Terms that demand no more replace the old
    ones."""

    reservation: int
    asked: AskedTime


class Reserved(msgspec.Struct, frozen=True):
    """Reserved time.

    Attributes:
        reservation: Its number, never used again.
        is_new: Whether a reservation was made; False where terms have replaced those of an old one.
        slot: The index of the device slot.
        phase_ns: Its phase; None if it has none.
        slack_ns: The time that is left at the tightest point.
        at_ns: That point.
    """

    reservation: int
    is_new: bool
    slot: int
    phase_ns: int | None
    slack_ns: int
    at_ns: int


class Refusal(msgspec.Struct, frozen=True):
    """The contents of ``NotAdmitted``."""

    message: str
    reason: str
    would_fit: WouldFit


class ReserveReply(msgspec.Struct, frozen=True, tag=True):
    """The reserved time, or the refusal; the other one is None."""

    reserved: Reserved | None = None
    refusal: Refusal | None = None


class Move(msgspec.Struct, frozen=True, tag=True):
    """Gives a reservation another phase, where it fits there."""

    reservation: int
    phase_ns: int


class MoveReply(msgspec.Struct, frozen=True, tag=True):
    """Whether the reservation has the phase now."""

    has_moved: bool


class Release(msgspec.Struct, frozen=True, tag=True):
    """Ends a reservation; one that has ended is ignored."""

    reservation: int


class Withdrawn(msgspec.Struct, frozen=True, tag=True):
    """From the server: a reservation has ended, for the reason of ``why``."""

    reservation: int
    why: str


class Room(msgspec.Struct, frozen=True, tag=True):
    """From the server, to a client that has reservations: the longest best-effort execution that the reserved frames of all clients
    can wait for."""

    room_ns: int


class ExecuteReserved(msgspec.Struct, frozen=True, tag=True):
    """``Execute``, for a frame of a reservation. A message of its own, so that those of best effort are no longer."""

    reservation: int
    prepared: int
    request: RequestOnWire
    measure: bool
    deadline_ns: int | None
    loop_timeout_ns: int | None
    priority: Priority | None = None


class ExecuteReservedReply(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The result, or without one the error; and the report about the frame, where there is one."""

    result: ExecutionResult | None = None
    status: ErrorStatus = ErrorStatus.NONE
    message: str = ""
    traceback: str = ""
    report: FrameReport | None = None


SchedulingCall = (
    JoinScheduling | GetThreads | Reserve | Change | Move | Release | Withdrawn | Room | ExecuteReserved
)

SchedulingReply = ThreadsReply | ReserveReply | MoveReply | ExecuteReservedReply
