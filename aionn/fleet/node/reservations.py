"""The reservations of one client of a node: in the ledger of the served device, beside those of all its other clients.

Owns the numbers by which the client calls them, which outlive a connection to the device's process: one that ended there is never
taken for another. The ledger decides (``aionn.service.host.reservations``), and frees all of them when the client is gone.

Invariants:
1. A number is never used again. One that the client never had is its mistake; one that has ended makes its frames best effort.
2. The client holds no more than the quotas of its name (``aionn.fleet.node.quotas``), which are tested before the ledger is asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import msgspec

from aionn.errors import InvalidArgument, NotAdmitted
from aionn.fleet.node.quotas import ClientAccount, share_ppm
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
        account: Of the client.
    """

    def __init__(
        self,
        ledger: ServedLedger,
        slots: int,
        notify: Callable[[Withdrawn | Room], None],
        account: ClientAccount,
    ) -> None:
        self._ledger = ledger
        self._slots = slots
        self._account = account
        self._notify = notify
        self._numbers = itertools.count(1)
        self._last = 0
        self._held: dict[int, ServedReservation] = {}
        self._shares: dict[int, int] = {}  # Of those that are held, in millionths of a slot.
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
                found = self._dropped(body.reservation)
                if found is not None:
                    self._ledger.release(found)
                return Done()

    async def _reserve(self, asked: AskedTime, number: int | None) -> ReserveReply:
        old = None if number is None else self._of(number)
        old_share = 0 if number is None else self._shares[number]
        new_share = share_ppm(asked)
        # The ledger replaces terms by others that demand no more, which then need no room beside the old ones.
        is_taken = old is None or new_share > old_share
        try:
            if is_taken:
                self._account.reserve(asked, self._slots)
            try:
                found = await self._ledger.reserve(asked, old, slot_count=self._slots)
            except BaseException:
                if is_taken:
                    self._account.release(new_share)
                raise
            is_new = found is not old
            if is_new and not is_taken:
                self._take_for(found, asked)
        except NotAdmitted as e:
            return ReserveReply(refusal=Refusal(str(e), e.reason, e.would_fit))
        if is_new:
            self._last = number = next(self._numbers)
            if found.end:
                self._account.release(new_share)
            else:
                self._held[number], self._shares[number] = found, new_share
                found.on_end = partial(self._ended, number)
        elif number in self._shares:
            self._account.change(self._shares[number], new_share)
            self._shares[number] = new_share
        assert number is not None, "it is new, or was there"
        reply = ReserveReply(msgspec.structs.replace(found.reserved, reservation=number, is_new=is_new))
        if is_new and found.end:
            self._notify(Withdrawn(number, found.end))
        return reply

    def _take_for(self, found: ServedReservation, asked: AskedTime) -> None:
        """Takes for a reservation that the ledger has made beside an old one."""
        try:
            self._account.reserve(asked, self._slots)
        except NotAdmitted:
            self._ledger.release(found)
            raise

    def _of(self, number: int) -> ServedReservation:
        found = self._held.get(number)
        if found is None:
            raise InvalidArgument(f"node: this client has no reservation {number}")
        return found

    def _ended(self, number: int, why: str) -> None:
        """The ledger has ended it, or its process is gone."""
        if self._dropped(number) is not None:
            self._notify(Withdrawn(number, why))

    def _dropped(self, number: int) -> ServedReservation | None:
        found = self._held.pop(number, None)
        if found is not None:
            self._account.release(self._shares.pop(number))
        return found

    def frame(self, number: int) -> NodeFrame | None:
        """A frame of a reservation; None where that has ended.

        Raises:
            InvalidArgument: The client never had it.
        """
        found = self._held.get(number)
        if found is None and not 0 < number <= self._last:
            raise InvalidArgument(f"node: this client has no reservation {number}")
        return None if found is None or found.end else NodeFrame(found.reserved.reservation)
