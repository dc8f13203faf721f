"""The ledger of a served device: its clients compete in it, and no client names or keeps what is another's."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from aionn.drivers.reference import ReferenceDevice
from aionn.errors import DeviceUnavailable, InvalidArgument, NotAdmitted
from aionn.hal.device import Device
from aionn.scheduler.ledger import SILENCE_NS, Ledger
from aionn.scheduler.reservations.ways import WAY_NS
from aionn.service.host import reservations as host
from aionn.service.host.admission import ClientLimits
from aionn.service.host.reservations import ServedReservations
from aionn.service.wire.peers import Peer
from aionn.service.wire.protocol import Done
from aionn.service.wire.scheduling_messages import (
    AskedTime,
    Change,
    Move,
    MoveReply,
    Release,
    Reserve,
    ReserveReply,
    Withdrawn,
)

MS = 1_000_000
LIMIT_S = 20.0

HALF = AskedTime(
    name="gate",
    period_ns=10 * MS,
    deadline_ns=10 * MS,
    jitter_ns=0,
    duration_ns=5 * MS,
    blocker="",
    blocker_ns=0,
)
"""Half of a slot, so that one fits beside another on no slot of which 95 % may be reserved."""


def one_slot() -> Device:
    device = ReferenceDevice()
    device.info = msgspec.structs.replace(device.info, slots=1)
    return device


@pytest.fixture
def alone(serving: Any) -> Callable[..., Any]:
    """Makes a served device with one slot, all of which a process may reserve unless stated otherwise."""

    async def make(share: float = 1.0, **options: Any) -> Any:
        return await serving(
            one_slot(), limits=ClientLimits(reserved_share=share, reserved_share_per_user=1.0), **options
        )

    return make


@asynccontextmanager
async def clients_of(served: Any, count: int = 2) -> AsyncIterator[list[Any]]:
    clients = [served.client() for _ in range(count)]
    try:
        for client in clients:
            await client.connect()
        yield clients
    finally:
        for client in clients:
            await client.aclose()


def reserving(client: Any, asked: AskedTime = HALF) -> Any:
    return client.ledger.reserve(asked, slot_count=1)


async def admitted(client: Any, asked: AskedTime = HALF) -> Any:
    """A reservation as soon as there is room for it."""
    with anyio.fail_after(LIMIT_S):
        while True:
            try:
                return await reserving(client, asked)
            except NotAdmitted:
                await anyio.sleep(0.002)


async def test_second_client_is_refused_with_a_counter_offer_until_the_first_releases(alone: Any) -> None:
    often = msgspec.structs.replace(HALF, period_ns=4 * MS, deadline_ns=20 * MS, duration_ns=1_900_000)
    async with clients_of(await alone()) as (first, second):
        held = await reserving(first)
        with pytest.raises(
            NotAdmitted, match=r'stream "gate" on reference/0: the reserved streams take 0.500'
        ) as e:
            await reserving(second, often)
        assert not e.value.transient and e.value.reason in str(e.value)
        assert e.value.would_fit.period_ns is not None
        longer = msgspec.structs.replace(often, period_ns=e.value.would_fit.period_ns)
        offered = await reserving(second, longer)
        second.ledger.release(offered)
        first.ledger.release(held)
        found = await admitted(second)
        assert found.reserved.slot == 0 and found.reserved.slack_ns == 5 * MS - WAY_NS


async def test_client_that_leaves_takes_its_reservations_with_it(alone: Any) -> None:
    async with clients_of(await alone()) as (first, second):
        await reserving(first)
        with pytest.raises(NotAdmitted):
            await reserving(second)
        await first.aclose()
        await admitted(second)


async def test_names_of_other_clients_are_left_out(alone: Any) -> None:
    short = msgspec.structs.replace(
        HALF, name="secret", period_ns=100 * MS, deadline_ns=60 * MS, duration_ns=50 * MS
    )
    async with clients_of(await alone()) as (first, second):
        await reserving(first, short)
        with pytest.raises(NotAdmitted) as e:
            await reserving(second, msgspec.structs.replace(HALF, duration_ns=4 * MS))
        text = f"{e.value} {e.value.reason} {e.value.would_fit}"
        assert "(of another client)" in text and "gate" in text and "secret" not in text
        assert all(character.isprintable() for character in text)


async def test_numbers_of_others_and_invented_ones_are_errors_of_the_one_who_names_them(alone: Any) -> None:
    async with clients_of(await alone()) as (first, second):
        held = await reserving(first)
        number = held.reserved.reservation
        channel = second._connection.channel
        for wrong in (number, 0, -1, 77, 2**63):
            with pytest.raises(InvalidArgument, match=f"this client has no reservation {wrong}"):
                await channel.call(Change(wrong, HALF), ReserveReply)
            with pytest.raises(InvalidArgument, match=f"this client has no reservation {wrong}"):
                await channel.call(Move(wrong, 5), MoveReply)
            await channel.call(Release(wrong), Done)
        with pytest.raises(NotAdmitted):
            await reserving(second)  # It is still held.
        with pytest.raises(InvalidArgument, match=f"reservation {number} has no phase"):
            await first._connection.channel.call(Move(number, 5), MoveReply)


ODD: dict[str, list[Any]] = {
    "name": ["", "x" * 81, "a\x01b", "a\nb", b"gate", 5, None],
    "period_ns": [0, -1, 86_400 * 10**9 + 1, 2**64 - 1, 0.01, "10", None, True, math.nan],
    "deadline_ns": [0, -1, 86_400 * 10**9 + 1, 2**64 - 1, 0.01, "10", None],
    "jitter_ns": [-1, 10 * MS, 2**64 - 1, 0.5, "0", None],
    "duration_ns": [0, -1, 86_400 * 10**9 + 1, 2**64 - 1, 0.005, None],
    "phase_ns": [-1, 2**64 - 1, 1.5, "0"],
    "tolerance_ns": [-1, 1, 2**64 - 1, 0.5, None],
    "chooses_phase": [True, 1, None],
    "blocker": ["x" * 81, "a\x03b", 7, None],
    "blocker_ns": [-1, 86_400 * 10**9 + 1, 2**64 - 1, 0.5, None],
}


async def test_odd_value_of_any_field_is_an_error_of_that_call_alone(alone: Any) -> None:
    assert set(ODD) == set(AskedTime.__struct_fields__)
    async with clients_of(await alone()) as (client, other):
        held = await reserving(client, msgspec.structs.replace(HALF, duration_ns=MS))
        channel = client._connection.channel
        for field, values in ODD.items():
            for value in values:
                asked = AskedTime(**{**msgspec.structs.asdict(HALF), field: value})
                for call in (Reserve(asked), Change(held.reserved.reservation, asked)):
                    with pytest.raises(InvalidArgument):
                        await channel.call(call, ReserveReply)
        for phase_ns in (-1, 2**64 - 1, 0.5, None):
            with pytest.raises(InvalidArgument):
                await channel.call(Move(held.reserved.reservation, phase_ns), MoveReply)
        for number in ("1", None, 1.5):
            with pytest.raises(InvalidArgument):
                await channel.call(Release(number), Done)
        await reserving(client)  # The connection, and the first reservation, are there.
        with pytest.raises(NotAdmitted):
            await reserving(other)


async def test_process_holds_no_more_than_its_share(alone: Any) -> None:
    async with clients_of(await alone(share=0.75)) as (first, second):  # Of one process.
        held = await reserving(first)
        third = msgspec.structs.replace(HALF, duration_ns=3 * MS)
        with pytest.raises(NotAdmitted, match=r"hold a share of 0.500 of a slot and may hold 0.750"):
            await reserving(second, third)
        first.ledger.release(held)
        await admitted(second, third)


async def test_process_has_a_bounded_number_of_reservations(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "OF_PROCESS_MAX", 3)
    little = msgspec.structs.replace(HALF, duration_ns=1000)
    async with clients_of(await alone()) as (first, second):
        held = [await reserving(first, little) for _ in range(2)]
        await reserving(second, little)
        with pytest.raises(NotAdmitted, match="this process has 3 reservations already"):
            await reserving(second, little)
        first.ledger.release(held[0])
        await admitted(second, little)


async def test_processes_of_a_user_hold_no_more_than_the_share_of_users() -> None:
    shared = ServedReservations("npu", 1, share=0.75, user_share=0.8)
    channel: Any = None
    clients = [shared.client(f"pid {i}", Peer(), i, user=user) for i, user in enumerate((1000, 1000, 1001))]

    async def asked(client: Any, duration_ns: int) -> Any:
        return await client.handle(Reserve(msgspec.structs.replace(HALF, duration_ns=duration_ns)), channel)

    assert (await asked(clients[0], 6 * MS)).reserved is not None
    refusal = (await asked(clients[1], 3 * MS)).refusal
    assert (
        "all processes of the user 1000 hold a share of 0.600 of a slot and may hold 0.800" in refusal.message
    )
    refusal = (await asked(clients[0], 2 * MS)).refusal
    assert (
        'the streams of this process ("gate") hold a share of 0.600 of a slot and may hold 0.750'
        in refusal.message
    )
    own = (await asked(clients[1], 2 * MS)).reserved.reservation
    assert (await asked(clients[2], MS)).reserved is not None
    less = Change(own, msgspec.structs.replace(HALF, duration_ns=MS))
    assert not (await clients[1].handle(less, channel)).reserved.is_new
    more = Change(own, HALF)
    assert "of the user" in (await clients[1].handle(more, channel)).refusal.message


async def test_processes_of_a_user_have_a_bounded_number_of_reservations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "OF_USER_MAX", 3)
    little = Reserve(msgspec.structs.replace(HALF, duration_ns=1000))
    shared, channel = ServedReservations("npu", 1, share=1.0), None
    replies: list[Any] = []
    for process, user in enumerate((1000, 1000, 1000, 1000, 1001)):
        client = shared.client(f"pid {process}", Peer(), process, user=user)
        replies.append(await client.handle(little, channel))  # type: ignore[arg-type]
    assert [reply.reserved is not None for reply in replies] == [True, True, True, False, True]
    assert "the processes of this user have 3 reservations already" in replies[3].refusal.message


async def test_storm_of_reservations_and_releases_leaves_nothing(alone: Any) -> None:
    async with clients_of(await alone(), 3) as clients:

        async def storm(client: Any) -> None:
            for _ in range(25):
                try:
                    held = await reserving(client)
                except NotAdmitted:
                    continue
                client.ledger.release(held)
                client._connection.channel.post(Release(held.reserved.reservation))  # Once more.

        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as tasks:
                for client in clients[:2] * 2:
                    tasks.start_soon(storm, client)
        await admitted(clients[2])


async def test_event_loop_does_not_wait_for_a_decision(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released, admit = threading.Event(), threading.Event(), Ledger.admit

    def slow(self: Ledger, *arguments: Any, **more: Any) -> Any:
        begun.set()
        assert released.wait(LIMIT_S)
        return admit(self, *arguments, **more)

    async with clients_of(await alone()) as (first, second):
        little = msgspec.structs.replace(HALF, duration_ns=MS)
        held = await reserving(second, little)
        monkeypatch.setattr(Ledger, "admit", slow)
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await reserving(first))

        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                while not begun.is_set():
                    await anyio.sleep(0.002)
                await second.status()
                await second._connection.channel.call(Release(held.reserved.reservation), Done)
                await second.aclose()
                assert not answers
                released.set()
        assert len(answers) == 1


async def test_cancelled_question_leaves_no_reservation(alone: Any) -> None:
    async with clients_of(await alone()) as (first, second):
        for turns in range(8):
            task = asyncio.ensure_future(reserving(first))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=LIMIT_S)
            if not task.cancelled():
                first.ledger.release(task.result())
        with anyio.fail_after(LIMIT_S):
            await admitted(second)


async def test_change_needs_room_beside_the_old_terms_and_less_replaces_them(alone: Any) -> None:
    async with clients_of(await alone()) as (client, _):
        held = await reserving(client)
        with pytest.raises(NotAdmitted):
            await client.ledger.reserve(msgspec.structs.replace(HALF, duration_ns=6 * MS), held, slot_count=1)
        less = await client.ledger.reserve(
            msgspec.structs.replace(HALF, duration_ns=3 * MS), held, slot_count=1
        )
        assert less is held and not held.reserved.is_new
        more = await client.ledger.reserve(
            msgspec.structs.replace(HALF, duration_ns=4 * MS), held, slot_count=1
        )
        assert more is not held and more.reserved.is_new


async def test_phases_are_chosen_and_moved_by_the_server(alone: Any) -> None:
    phased = msgspec.structs.replace(
        HALF, deadline_ns=6 * MS, duration_ns=4 * MS, phase_ns=0, tolerance_ns=200_000, chooses_phase=True
    )
    async with clients_of(await alone()) as (first, second):
        mine, theirs = await reserving(first, phased), await reserving(second, phased)
        distance_ns = (mine.reserved.phase_ns - theirs.reserved.phase_ns) % (10 * MS)
        assert 4 * MS <= distance_ns <= 6 * MS
        answers: list[bool] = []
        for phase_ns in (mine.reserved.phase_ns, theirs.reserved.phase_ns + 100_000):
            before = len(answers)
            second.ledger.move(theirs, phase_ns, answers.append)
            with anyio.fail_after(LIMIT_S):
                while len(answers) == before:
                    await anyio.sleep(0.002)
        assert answers == [False, True]


async def test_own_best_effort_counts_and_that_of_others_does_not(alone: Any) -> None:
    async with clients_of(await alone()) as (first, second):
        slow = msgspec.structs.replace(HALF, blocker="enhance", blocker_ns=8 * MS)
        with pytest.raises(NotAdmitted, match='an operation of "enhance" may occupy'):
            await reserving(first, slow)
        await reserving(second)


async def test_holders_get_the_limit_of_best_effort(alone: Any) -> None:
    async with clients_of(await alone()) as (first, second):
        rooms_ns: list[int] = []
        first.ledger.on_room = rooms_ns.append
        await reserving(first)
        await admitted(second, msgspec.structs.replace(HALF, duration_ns=3 * MS))
        with anyio.fail_after(LIMIT_S):
            while not rooms_ns or rooms_ns[-1] != 2 * MS - WAY_NS:
                await anyio.sleep(0.002)


async def test_silent_reservation_ends_when_others_need_its_time_and_a_used_one_stays() -> None:
    clock = [10**15]
    shared = ServedReservations("npu", 1, share=1.0, now=lambda: clock[0])
    notices: list[Withdrawn] = []

    class Channel:
        post = staticmethod(notices.append)
        begin = staticmethod(lambda notice: None)

    channel: Any = Channel()
    first, second = (shared.client(f"pid {i}", Peer(), i) for i in range(2))
    answer: Any = await first.handle(Reserve(HALF), channel)
    number = answer.reserved.reservation

    async def is_admitted() -> bool:
        reply: Any = await second.handle(Reserve(HALF), channel)
        return reply.reserved is not None

    clock[0] += SILENCE_NS
    with first.executing(number):
        pass  # A frame.
    assert not await is_admitted()
    with first.executing(number):
        clock[0] += SILENCE_NS
        assert not await is_admitted(), "a frame of it is in progress"
    clock[0] += SILENCE_NS - 1
    assert not await is_admitted()
    clock[0] += 1
    assert await is_admitted()
    await shared._send_notices()
    assert Withdrawn(number, "silent") in notices
    with pytest.raises(InvalidArgument, match="has no reservation"):
        await first.handle(Change(number, HALF), channel)
    with first.executing(number) as report:
        assert report() is None  # It is executed all the same: its client may not have read the notice.
    assert shared.counts()["silent"] == 1


async def test_client_that_reserves_everything_and_sends_nothing_keeps_others_out_for_half_a_minute() -> None:
    clock = [10**15]
    shared = ServedReservations("npu", 1, share=0.75, now=lambda: clock[0])
    notices: list[Any] = []

    class Channel:
        post = staticmethod(notices.append)
        begin = staticmethod(lambda notice: None)

    channel: Any = Channel()
    greedy, other = (shared.client(f"pid {i}", Peer(), i) for i in range(2))

    async def is_admitted(client: Any, duration_ns: int) -> bool:
        asked = msgspec.structs.replace(HALF, duration_ns=duration_ns)
        return (await client.handle(Reserve(asked), channel)).reserved is not None

    count = 0
    while await is_admitted(greedy, 400_000):
        count += 1
    assert count == 18, "three quarters of the time"
    assert await is_admitted(other, MS), "the rest is for others"
    assert not await is_admitted(other, 5 * MS)
    with other.executing(1):
        pass
    clock[0] += SILENCE_NS - 1
    assert not await is_admitted(other, 5 * MS)
    with other.executing(1):
        pass
    clock[0] += 1
    assert await is_admitted(other, 5 * MS)
    await shared._send_notices()
    ended = [notice for notice in notices if isinstance(notice, Withdrawn)]
    assert sorted(notice.reservation for notice in ended) == list(range(1, count + 1))
    assert {notice.why for notice in ended} == {"silent"} and shared.counts()["silent"] == count


async def test_process_that_ends_admits_nothing_new() -> None:
    shared = ServedReservations("npu", 1, share=1.0)
    client = shared.client(None, Peer(), 0)

    async def others(body: Any, channel: Any) -> Any:
        raise AssertionError("it is a call about reservations")

    handle = client.before(others, lambda: True, lambda: True)
    with pytest.raises(DeviceUnavailable, match="SIGTERM"):
        await handle(Reserve(HALF), None)  # type: ignore[arg-type]
    assert isinstance(await handle(Release(1), None), Done)  # type: ignore[arg-type]


async def test_process_of_one_application_keeps_no_ledger(background: Any) -> None:
    from aionn.service.client.device import RemoteDevice

    device = RemoteDevice("reference", "reference", background.tasks)
    assert device.ledger is None
    await device.connect()
    with pytest.raises(InvalidArgument, match="answers no Reserve"):
        await device._connection.channel.call(Reserve(HALF), ReserveReply)  # type: ignore[union-attr]
    await device.aclose()
