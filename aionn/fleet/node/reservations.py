"""The reservations of one client of a node: in the ledger of the served device, beside those of all its other clients.

Owns the numbers by which the client calls them, which outlive a connection to the device's process: one that ended there is never
taken for another. The ledger decides (``aionn.service.host.reservations``), and frees all of them when the client is gone.

Invariants:
1. A number is never used again. One that the client never had is its mistake; one that has ended makes its frames best effort.
2. The client has no more than ``HELD_MAX`` numbers here at a time: the ledger holds less for one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import msgspec

from aionn.errors import InvalidArgument, NotAdmitted, ResourceExhausted
from aionn.hal.callers import FrameReport
from aionn.service.client.reservations import ServedLedger, ServedReservation
from aionn.service.wire.protocol import Done, ReplyBody
from aionn.service.wire.scheduling_messages import (
    AskedTime,
    Change,
    Move,
    MoveReply,
    Refusal,
    Release,
    Reserve,
    ReserveReply,
    Room,
    Withdrawn,
)

__all__ = ["NodeFrame", "NodeReservations"]

HELD_MAX = 1024
"""Reservations of a client: as many as a ledger has."""


class NodeFrame:
    """A frame of a reservation on its way through the node; see ``aionn.hal.callers.ReservedFrame``.

    Attributes:
        reservation: The number of the reservation on the connection to the device's process.
        report: Of the queue of the device; None before, and for a frame without a report.
    """

    __slots__ = ("report", "reservation")

    def __init__(self, reservation: int) -> None:
        self.reservation = reservation
        self.report: FrameReport | None = None

    def sent(self, now_ns: int) -> None:
        """See ``ReservedFrame``: the client has measured that."""

    def reported(self, report: FrameReport, now_ns: int) -> None:
        """See ``ReservedFrame``."""
        self.report = report


class NodeReservations:
    """See the module.

    Args:
        ledger: On the client's connection to the device's process.
        slots: The number of slots of the device.
        notify: Sends a notice to the client.
    """

    def __init__(self, ledger: ServedLedger, slots: int, notify: Callable[[Withdrawn | Room], None]) -> None:
        self._ledger = ledger
        self._slots = slots
        self._notify = notify
        self._numbers = itertools.count(1)
        self._last = 0
        self._held: dict[int, ServedReservation] = {}
        ledger.on_room = lambda room_ns: notify(Room(room_ns))

    async def handle(self, body: Reserve | Change | Move | Release) -> ReplyBody:
        """Answers a call about reservations.

        Raises:
            InvalidArgument: A value is illegal, or the client has no such reservation.
            Error: The device's process is gone.
        """
        match body:
            case Reserve():
                return await self._reserve(body.asked, None)
            case Change():
                return await self._reserve(body.asked, body.reservation)
            case Move():
                return MoveReply(await self._ledger.moved(self._of(body.reservation), body.phase_ns))
            case Release():
                found = self._held.pop(body.reservation, None)
                if found is not None:
                    self._ledger.release(found)
                return Done()

    async def _reserve(self, asked: AskedTime, number: int | None) -> ReserveReply:
        old = None if number is None else self._of(number)
        if len(self._held) >= HELD_MAX:
            raise ResourceExhausted(f"node: expected at most {HELD_MAX} reservations of one client")
        try:
            found = await self._ledger.reserve(asked, old, slot_count=self._slots)
        except NotAdmitted as e:
            return ReserveReply(refusal=Refusal(str(e), e.reason, e.would_fit))
        is_new = found is not old
        if is_new:
            self._last = number = next(self._numbers)
            if not found.end:
                self._held[number] = found
                found.on_end = partial(self._ended, number)
        assert number is not None, "it is new, or was there"
        reply = ReserveReply(msgspec.structs.replace(found.reserved, reservation=number, is_new=is_new))
        if is_new and found.end:
            self._notify(Withdrawn(number, found.end))
        return reply

    def _of(self, number: int) -> ServedReservation:
        found = self._held.get(number)
        if found is None:
            raise InvalidArgument(f"node: this client has no reservation {number}")
        return found

    def _ended(self, number: int, why: str) -> None:
        """The ledger has ended it, or its process is gone."""
        if self._held.pop(number, None) is not None:
            self._notify(Withdrawn(number, why))

    def frame(self, number: int) -> NodeFrame | None:
        """A frame of a reservation; None where that has ended.

        Raises:
            InvalidArgument: The client never had it.
        """
        found = self._held.get(number)
        if found is None and not 0 < number <= self._last:
            raise InvalidArgument(f"node: this client has no reservation {number}")
        return None if found is None or found.end else NodeFrame(found.reserved.reservation)
