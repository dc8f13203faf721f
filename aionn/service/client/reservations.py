"""The ledger of a served device, for the streams of this application: the device's process decides, since others may use it.

Owns the calls about reservations, and the notices of their end. ``aionn.service.host.reservations`` is the other end.

Invariants:
1. Each reservation ends once: by ``release``, by a notice, or with its connection.
2. A reservation whose caller has left before the answer is released.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from aionn.burst.packets import RESERVATION_MAX
from aionn.errors import Error, GeneralFailure, InvalidArgument, NotAdmitted
from aionn.service.wire.protocol import CallBody, ReplyBody
from aionn.service.wire.scheduling_messages import (
    AskedTime,
    Change,
    Move,
    MoveReply,
    Release,
    Reserve,
    Reserved,
    ReserveReply,
    Room,
    Withdrawn,
)

__all__ = ["LedgerConnection", "ServedLedger", "ServedReservation"]

ENDS = frozenset({"silent", "withdrawn"})
"""The reasons for which a server may end a reservation; any other one counts as ``withdrawn``."""


_R = TypeVar("_R", bound=ReplyBody)


class LedgerChannel(Protocol):
    """Carries calls about reservations; see ``aionn.service.wire.channel``."""

    async def call(self, body: CallBody, expected: type[_R]) -> _R: ...

    def post(self, body: CallBody) -> None: ...


class LedgerConnection(Protocol):
    """A connection to the process that has the ledger, directly or by the node between.

    Attributes:
        channel: Carries the calls.
        on_notice: Called with each notice about reservations, and with None when the process is gone.
    """

    @property
    def channel(self) -> LedgerChannel: ...

    on_notice: Callable[[Withdrawn | Room | None], None] | None


class ServedReservation:
    """A reservation in the ledger of a served device.

    Attributes:
        reserved: The server's answer.
        end: Why it has ended: ``released``, ``silent``, ``withdrawn``; empty while it is in force.
        on_end: Called with the reason when the server, or the end of the connection, ends it.
        way_ns: The longest way of a frame over a network that it was asked for with, as jitter.
    """

    __slots__ = ("connection", "end", "on_end", "reserved", "way_ns")

    def __init__(self, connection: LedgerConnection, reserved: Reserved) -> None:
        self.connection = connection
        self.reserved = reserved
        self.end = ""
        self.on_end: Callable[[str], None] | None = None
        self.way_ns = 0

    def ended(self, why: str) -> None:
        """It has ended, not by ``release``."""
        if not self.end:
            self.end = why
            on_end, self.on_end = self.on_end, None
            if on_end is not None:
                on_end(why)


class ServedLedger:
    """See the module.

    Args:
        connected: Returns the connection to the device's process, which it makes first unless there is one.
        start: Starts work that is not waited for, and that does not raise.

    Attributes:
        on_room: Called with the longest best-effort execution that the reserved frames of all applications can wait for.
    """

    def __init__(
        self,
        connected: Callable[[], Awaitable[LedgerConnection]],
        start: Callable[[Callable[[], Coroutine[Any, Any, None]]], object],
    ) -> None:
        self._connected = connected
        self._start = start
        self._connection: LedgerConnection | None = None
        self._held: dict[int, ServedReservation] = {}
        self.on_room: Callable[[int], None] | None = None

    async def reserve(
        self, asked: AskedTime, old: ServedReservation | None = None, *, slot_count: int
    ) -> ServedReservation:
        """Asks for time.

        Args:
            asked: The stream.
            old: The reservation that it changes, which the caller releases; None, or one that has ended, for a new stream.
            slot_count: The number of slots of the device.

        Returns:
            A reservation; ``old`` itself where its terms were replaced, since the new ones demand no more.

        Raises:
            NotAdmitted: There is no room.
            DeadObject: The process is gone.
            Error: Any other answer.
        """
        connection = self._on(await self._connected())
        if old is None or old.end or old.connection is not connection:
            return await self._ask(connection, Reserve(asked), None, slot_count)
        try:
            return await self._ask(connection, Change(old.reserved.reservation, asked), old, slot_count)
        except InvalidArgument:
            if not old.end:
                raise
            # The server has ended it, and the notice came before this answer.
            return await self._ask(connection, Reserve(asked), None, slot_count)

    def _on(self, connection: LedgerConnection) -> LedgerConnection:
        if connection is not self._connection:
            self._end_all()
            self._connection = connection
            connection.on_notice = self._notice
        return connection

    async def _ask(
        self,
        connection: LedgerConnection,
        call: Reserve | Change,
        old: ServedReservation | None,
        slot_count: int,
    ) -> ServedReservation:
        reply = await connection.channel.call(call, ReserveReply)
        reserved, refusal = reply.reserved, reply.refusal
        if reserved is None:
            if refusal is None:
                raise GeneralFailure("reservation: the server answered neither yes nor no")
            raise NotAdmitted(refusal.message, reason=refusal.reason, would_fit=refusal.would_fit)
        found = ServedReservation(connection, reserved)
        has_phase = call.asked.phase_ns is not None
        is_old = old is not None and reserved.reservation == old.reserved.reservation
        if (
            not 0 <= reserved.slot < slot_count
            or not 0 < reserved.reservation <= RESERVATION_MAX
            or (reserved.phase_ns is not None) != has_phase
            or is_old == reserved.is_new
        ):
            self.release(found)
            raise GeneralFailure(f"reservation: expected time of one of {slot_count} slots, got {reserved}")
        if is_old:
            assert old is not None, "it has the number"
            old.reserved = reserved
            return old
        self._held[reserved.reservation] = found
        return found

    def release(self, reservation: ServedReservation) -> None:
        """Ends a reservation. Idempotent."""
        if reservation.end:
            return
        reservation.end = "released"
        number = reservation.reserved.reservation
        if self._held.get(number) is reservation:
            del self._held[number]
        reservation.connection.channel.post(Release(number))

    def move(self, reservation: ServedReservation, phase_ns: int, moved: Callable[[bool], None]) -> None:
        """Asks for another phase, and calls ``moved`` with the answer."""

        async def ask() -> None:
            moved(await self.moved(reservation, phase_ns))

        self._start(ask)

    @staticmethod
    async def moved(reservation: ServedReservation, phase_ns: int) -> bool:
        """Asks for another phase; returns whether it has that now."""
        call = Move(reservation.reserved.reservation, phase_ns)
        try:
            return (await reservation.connection.channel.call(call, MoveReply)).has_moved
        except Error:
            return False  # It has ended.

    def begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begins work that must not raise, and does not wait for it."""
        self._start(work)

    def _notice(self, notice: Withdrawn | Room | None) -> None:
        """From the server; None when the connection has ended."""
        match notice:
            case None:
                self._end_all()
            case Withdrawn():
                found = self._held.pop(notice.reservation, None)
                if found is not None:
                    found.ended(notice.why if notice.why in ENDS else "withdrawn")
            case Room():
                if self.on_room is not None:
                    self.on_room(max(0, notice.room_ns))

    def _end_all(self) -> None:
        held, self._held = self._held, {}
        for reservation in held.values():
            reservation.ended("withdrawn")
