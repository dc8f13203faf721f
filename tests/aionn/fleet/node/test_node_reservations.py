"""A client's reservations at a node: its numbers, their end, and numbers that it never had."""

from __future__ import annotations

import msgspec
import pytest

from aionn.errors import InvalidArgument, NotAdmitted
from aionn.fleet.node.quotas import Names, quotas_of
from aionn.fleet.node.reservations import NodeReservations
from aionn.service.client.reservations import ServedLedger, ServedReservation
from aionn.service.wire.scheduling_messages import (
    AskedTime,
    Change,
    Release,
    Reserve,
    Reserved,
    ReserveReply,
    Room,
    Withdrawn,
)

ASKED = AskedTime(name="gate", period_ns=100, deadline_ns=100, jitter_ns=0, duration_ns=10)


class FakeLedger(ServedLedger):
    """Grants until it is full, with numbers of its own; a change replaces terms that demand less."""

    def __init__(self) -> None:
        self.given: list[ServedReservation] = []
        self.released: list[ServedReservation] = []
        self.room = 3

    async def reserve(
        self, asked: AskedTime, old: ServedReservation | None = None, *, slot_count: int
    ) -> ServedReservation:
        if old is not None and asked.duration_ns < ASKED.duration_ns:
            return old
        if not self.room:
            raise NotAdmitted("no room")
        self.room -= 1
        number = 70 + len(self.given)
        self.given.append(ServedReservation(None, Reserved(number, True, 0, None, 5, 6)))  # type: ignore[arg-type]
        return self.given[-1]

    def release(self, reservation: ServedReservation) -> None:
        self.released.append(reservation)


class Client:
    """A client of the node.

    Attributes:
        notices: Those that it was sent.
    """

    def __init__(self, *quotas: str) -> None:
        self.ledger = FakeLedger()
        self.notices: list[Withdrawn | Room] = []
        self.names = Names(quotas_of(quotas))
        self.account = self.names.joined("gate")
        self.reservations = NodeReservations(self.ledger, 1, self.notices.append, self.account)

    async def reserve(self, call: Reserve | Change) -> Reserved:
        reply = await self.reservations.handle(call)
        assert isinstance(reply, ReserveReply) and reply.reserved is not None
        return reply.reserved


async def test_a_client_calls_its_reservations_by_numbers_of_the_node() -> None:
    client = Client()
    first, second = [await client.reserve(Reserve(ASKED)) for _ in range(2)]
    assert (first.reservation, second.reservation) == (1, 2)
    frame = client.reservations.frame(2)
    assert frame is not None and frame.reservation == 71
    less = await client.reserve(
        Change(2, AskedTime(name="gate", period_ns=100, deadline_ns=100, jitter_ns=0, duration_ns=1))
    )
    assert (less.reservation, less.is_new) == (2, False)
    more = await client.reserve(Change(2, ASKED))
    assert (more.reservation, more.is_new) == (3, True)
    refused = await client.reservations.handle(Reserve(ASKED))
    assert isinstance(refused, ReserveReply) and refused.refusal is not None
    assert refused.refusal.message == "no room"


async def test_a_reservation_that_has_ended_makes_frames_best_effort() -> None:
    client = Client()
    for _ in range(2):
        await client.reserve(Reserve(ASKED))
    client.ledger.given[0].ended("silent")
    assert client.notices == [Withdrawn(1, "silent")]
    assert client.reservations.frame(1) is None
    await client.reservations.handle(Release(2))
    await client.reservations.handle(Release(2))
    await client.reservations.handle(Release(99))
    assert client.ledger.released == [client.ledger.given[1]]
    assert client.reservations.frame(2) is None


@pytest.mark.parametrize("number", [0, -1, 2, 1 << 70])
async def test_a_number_that_the_client_never_had_is_its_mistake(number: int) -> None:
    client = Client()
    await client.reserve(Reserve(ASKED))
    with pytest.raises(InvalidArgument, match="no reservation"):
        client.reservations.frame(number)
    with pytest.raises(InvalidArgument, match="no reservation"):
        await client.reservations.handle(Change(number, ASKED))


async def test_the_room_for_best_effort_is_passed_on() -> None:
    client = Client()
    assert client.ledger.on_room is not None
    client.ledger.on_room(5)
    assert client.notices == [Room(5)]


async def test_what_a_name_holds_is_given_back_however_a_reservation_ends() -> None:
    client = Client("gate:reserved-share=0.2")
    other = client.names.joined("gate")
    await client.reserve(Reserve(ASKED))
    await client.reserve(Reserve(ASKED))
    refused = await client.reservations.handle(Reserve(ASKED))
    assert isinstance(refused, ReserveReply) and refused.refusal is not None
    assert "of gate hold a share of 0.200 of a slot" in refused.refusal.message
    assert client.ledger.room == 1, "the ledger was not asked"
    client.ledger.given[0].ended("silent")
    other.release(other.reserve(ASKED, 1))
    half = msgspec.structs.replace(ASKED, duration_ns=5)
    await client.reserve(Change(2, half))
    other.release(other.reserve(msgspec.structs.replace(ASKED, duration_ns=15), 1))
    await client.reservations.handle(Release(2))
    other.release(other.reserve(msgspec.structs.replace(ASKED, duration_ns=20), 1))
    client.ledger.room = 0
    refused = await client.reservations.handle(Reserve(ASKED))
    assert isinstance(refused, ReserveReply) and refused.refusal is not None
    assert refused.refusal.message == "no room"
    other.release(other.reserve(msgspec.structs.replace(ASKED, duration_ns=20), 1))
