"""Descriptors of messages that are in the way of others: who is read next, and what is rejected."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import anyio
import pytest

from aionn.errors import ErrorStatus
from aionn.hal import ExecutionPreference, Priority
from aionn.platform.descriptors import Kinds
from aionn.service.wire import load, peers, received
from aionn.service.wire.channel import Channel
from aionn.service.wire.large import in_memory
from aionn.service.wire.load import HELD_MAX, Held
from aionn.service.wire.peers import Peers
from aionn.service.wire.protocol import Call, Done, Failed, Ping, PrepareModel, Reply, decode, encode
from aionn.testing.models import identity
from fences import SyncFence

WAITED_S_MAX = 20.0
"""A watchdog."""


async def done(body: Any, channel: Channel) -> Done:
    return Done()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await anyio.sleep(0.001)


def _open_count() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_one_process_that_holds_descriptors_leaves_room_for_the_others() -> None:
    of_all = Held(most=8 * HELD_MAX)
    one, other, new = (Held(of_all) for _ in range(3))
    assert one.has_room(is_suspect=True)
    one.add(HELD_MAX + 1)
    assert not one.has_room(is_suspect=False)
    assert other.has_room(is_suspect=True)
    several = [Held(of_all) for _ in range(3)]
    for held in several:
        held.add(HELD_MAX)
    other.add(1)
    assert not other.has_room(is_suspect=False)
    assert not new.has_room(is_suspect=True)
    assert new.has_room(is_suspect=False)
    for held in several:
        held.closed(HELD_MAX)
    assert other.has_room(is_suspect=True)
    assert other.count == 1


async def test_large_message_that_waits_with_descriptors_keeps_no_other_process_from_being_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for a call of the same connection, for as long as its process likes; then it is rejected."""
    monkeypatch.setattr(load, "BYTES_AT_ONCE_MAX", 1)
    monkeypatch.setattr(peers, "NEWCOMER_NS", 0)
    monkeypatch.setattr(peers, "HELD_PART", 1 << 40)
    processes = Peers()
    assert processes._turns.held._most == 0

    async def never(body: Any, channel: Channel) -> Any:
        await anyio.sleep_forever()

    model = identity((4,), operations=200)
    ours, theirs, good_ours, good = (
        *socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET),
        *socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET),
    )
    hostile = Channel(ours, never, peer_name="the peer", sealed_only=True, peer=processes.of(1))
    other = Channel(good_ours, done, peer_name="the other", sealed_only=True, peer=processes.of(2))
    good.setblocking(False)
    theirs.setblocking(False)
    with anyio.fail_after(WAITED_S_MAX):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hostile.run)
            tasks.start_soon(other.run)
            for number in (1, 2):
                body = PrepareModel(model, ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None)
                payload, fds, _keep = encode(Call(number, body))
                assert in_memory(payload) is not None
                socket.send_fds(theirs, [payload], fds * 20 if number == 2 else fds)
                await _until(lambda: hostile.load[0] == 1)
            await _until(lambda: processes.of(1).held.count == 20)
            good.send(encode(Call(1, Ping()))[0])
            await anyio.wait_readable(good)
            assert decode(good.recv(1 << 16), []) == Reply(1, Done())
            await anyio.wait_readable(theirs)
            refused = decode(theirs.recv(1 << 16), [])
            assert isinstance(refused, Reply)
            assert refused.id == 2
            assert isinstance(refused.body, Failed)
            assert refused.body.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
            assert hostile.is_alive
            tasks.cancel_scope.cancel()
    hostile.release()
    other.release()
    for end in (theirs, good):
        end.close()


def test_process_that_waits_longest_is_read_next_and_one_that_is_suspect_is_not() -> None:
    of_all = Held(most=1000)
    holding, first, second, late, suspect = (Held(of_all) for _ in range(5))
    holding.add(1001)
    suspect.waits(0, is_suspect=True)
    first.waits(1, is_suspect=False)
    second.waits(2, is_suspect=False)
    holding.closed(100)
    assert first.has_room(is_suspect=False)
    assert not second.has_room(is_suspect=False)
    assert not late.has_room(is_suspect=False)
    assert not suspect.has_room(is_suspect=True)
    first.waits_no_more()
    assert second.has_room(is_suspect=False)
    second.waits(3, is_suspect=True)  # It floods by now.
    assert late.has_room(is_suspect=False)


def test_only_as_many_messages_are_rejected_as_are_in_the_way_and_the_largest_first() -> None:
    of_all = Held(most=400)
    holding, waiting, later = (Held(of_all) for _ in range(3))
    rejected: list[int] = []

    def reject(count: int) -> None:
        rejected.append(count)

    with ExitStack() as messages:
        for count in (1, 2, 240, 200, 90):
            holding.add(count)
            messages.enter_context(holding.keeping(count, partial(reject, count)))
        for now_ns in (0, load.STARVED_NS_MAX):
            waiting.waits(now_ns, is_suspect=False)
            later.waits(now_ns, is_suspect=False)
        assert not rejected
        now_ns = load.STARVED_NS_MAX + 1
        later.waits(now_ns, is_suspect=False)
        assert not rejected
        waiting.waits(now_ns, is_suspect=False)
        assert rejected == [240, 200]
        waiting.waits(now_ns + 1, is_suspect=False)  # Those are being closed.
        waiting.waits_no_more()
        later.waits(now_ns + 1, is_suspect=False)
        assert rejected == [240, 200]
        holding.closed(440)
        later.waits(now_ns + load.REJECTED_CLOSING_NS, is_suspect=False)
        assert rejected == [240, 200]
        assert later.has_room(is_suspect=True)


def test_process_whose_flood_is_over_is_not_suspect_though_it_has_no_further_backlog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until then it is not read while others have many descriptors here."""
    monkeypatch.setattr(peers, "NEWCOMER_NS", 0)
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(peers.time, "monotonic_ns", lambda: now_ns)
    peer = Peers().of(1)
    peer.connects_or_leaves()
    peer._charge(peers.FLOOD_NS_MAX)
    assert peer.is_suspect
    now_ns += peers.BACKLOG_NS + peers.FORGOTTEN_PART * peers.FLOOD_NS_MAX
    assert not peer.is_suspect


async def test_message_that_waits_for_its_turn_with_descriptors_is_rejected_where_others_are_not_read(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood's turn may come after seconds."""
    monkeypatch.setattr(peers, "NEWCOMER_NS", 0)
    monkeypatch.setattr(peers, "HELD_PART", 1 << 40)
    processes = Peers()
    hostile, other = processes.of(1), processes.of(2)
    ours, theirs = pair
    channel = Channel(ours, done, peer_name="the peer", sealed_only=True, peer=hostile)
    theirs.setblocking(False)
    memory = os.memfd_create("memory", os.MFD_ALLOW_SEALING)
    with anyio.fail_after(WAITED_S_MAX):
        async with hostile._turn, anyio.create_task_group() as tasks:
            hostile.loads.append(load.Load())  # Of another connection.
            tasks.start_soon(channel.run)
            socket.send_fds(theirs, [encode(Call(7, Ping()))[0]], [memory])
            await _until(lambda: hostile.held.count == 1)
            assert not other.may_send_descriptors
            for now_ns in (0, load.STARVED_NS_MAX + 1):
                other.held.waits(now_ns, is_suspect=False)
            await anyio.wait_readable(theirs)
            refused = decode(theirs.recv(1 << 16), [])
            assert isinstance(refused, Reply)
            assert refused.id == 7
            assert isinstance(refused.body, Failed)
            assert refused.body.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
            assert hostile.is_suspect
            await _until(lambda: not hostile.held.count)
            tasks.cancel_scope.cancel()
    other.held.waits_no_more()
    channel.release()
    os.close(memory)


async def test_strange_sockets_are_closed_without_pauses_where_others_are_not_read(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "NEWCOMER_NS", 0)
    monkeypatch.setattr(peers, "HELD_PART", 1 << 40)
    processes = Peers()
    hostile, other = processes.of(1), processes.of(2)
    ours, theirs = pair
    channel = Channel(ours, done, peer_name="the peer", sealed_only=True, peer=hostile)
    before = _open_count()
    with anyio.fail_after(WAITED_S_MAX):
        async with anyio.create_task_group() as tasks:
            async with hostile._turn:
                tasks.start_soon(channel.run)
                socket.send_fds(theirs, [b"half"], [theirs.fileno()] * 100)
                await _until(lambda: hostile.held.count == 100)
                for now_ns in (0, load.STARVED_NS_MAX + 1):
                    other.held.waits(now_ns, is_suspect=False)
                await _until(lambda: not hostile.held.count)
                assert hostile.is_suspect
            tasks.cancel_scope.cancel()
    other.held.waits_no_more()
    channel.release()
    assert _open_count() <= before


async def test_connection_that_ends_does_not_wait_for_another_of_its_process_that_may_not_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "HELD_MAX", -1)
    peer, channels, ends, over = Peers().of(1), [], [], []

    async def run(channel: Channel) -> None:
        await channel.run()
        over.append(channel)

    for _ in range(2):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channels.append(Channel(ours, done, peer_name="the peer", sealed_only=True, peer=peer))
        ends.append(theirs)
    with anyio.fail_after(WAITED_S_MAX):
        async with anyio.create_task_group() as tasks:
            for channel in channels:
                tasks.start_soon(run, channel)
            await _until(lambda: peer.room.statistics().tasks_waiting == 1)
            channels[1].close("it has ended")
            await _until(lambda: bool(over))
            assert over == channels[1:]
            tasks.cancel_scope.cancel()
    for channel, end in zip(channels, ends, strict=True):
        channel.release()
        end.close()


async def test_message_that_waits_with_descriptors_ends_with_its_connection(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood's turns for a large message may last for minutes, and its process may have been killed."""
    monkeypatch.setattr(peers, "NEWCOMER_NS", 0)
    peer = Peers().of(1)
    ours, theirs = pair
    channel = Channel(ours, done, peer_name="the peer", sealed_only=True, peer=peer)
    memory = os.memfd_create("memory", os.MFD_ALLOW_SEALING)
    held_by_others = peer._turn
    with anyio.fail_after(WAITED_S_MAX):
        async with anyio.create_task_group() as tasks:
            async with held_by_others:
                peer.loads.append(load.Load())  # Of another connection.
                tasks.start_soon(channel.run)
                socket.send_fds(theirs, [encode(Call(7, Ping()))[0]], [memory])
                await _until(lambda: peer.held.count == 1)
                channel.close("the client is gone")
                await _until(lambda: not peer.held.count)
            assert not peer.is_suspect
            tasks.cancel_scope.cancel()
    channel.release()
    os.close(memory)


async def test_wait_for_the_closing_of_a_file_of_others_ends_where_others_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread may be busy, and the file's server slow; the other descriptors of the message stay open for that time."""
    monkeypatch.setattr(peers, "NEWCOMER_NS", 0)
    monkeypatch.setattr(peers, "HELD_PART", 1 << 40)
    monkeypatch.setattr(received, "FOREIGN_S_MAX", 2 * WAITED_S_MAX)
    processes = Peers()
    hostile, other = processes.of(1), processes.of(2)
    foreign, local = os.open(os.devnull, os.O_RDONLY), os.eventfd(0)
    never_closed: list[int] = []
    monkeypatch.setattr(received, "kinds_of", lambda fds: Kinds({foreign}, {}))
    monkeypatch.setattr(received, "close_apart", lambda fds, on_closed: never_closed.extend(fds))
    hostile.held.add(2)
    taken: list[int] = []

    async def take() -> None:
        with SyncFence("connection") as ended:
            taken.extend(await received.local_only([local, foreign], None, hostile, ended))

    with anyio.fail_after(WAITED_S_MAX):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take)
            await _until(lambda: bool(never_closed))
            await anyio.wait_all_tasks_blocked()
            for now_ns in (0, load.STARVED_NS_MAX + 1):
                other.held.waits(now_ns, is_suspect=False)
    other.held.waits_no_more()
    assert taken[0] == local and os.path.samestat(os.fstat(taken[1]), os.stat(os.devnull))
    assert never_closed == [foreign]
    assert hostile.is_suspect
    for fd in (*taken, foreign):
        os.close(fd)
