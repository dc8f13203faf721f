"""Descriptors that a peer sends: whatever they are, closing them keeps nobody waiting."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aionn.errors import DeadObject, Error, GeneralFailure
from aionn.hal import Memory
from aionn.platform.descriptors import (
    LINGERING_S,
    QUICK_BYTES_MAX,
    QUICK_COUNT_MAX,
    close_apart,
    waiting_to_be_closed,
)
from aionn.service.wire import load, received
from aionn.service.wire.calls import REPLY_DESCRIPTORS_MAX
from aionn.service.wire.channel import Channel
from aionn.service.wire.handles import fence_from_wire
from aionn.service.wire.peers import Peers
from aionn.service.wire.protocol import (
    Done,
    Failed,
    GetMemories,
    GetMemoriesReply,
    Ping,
    Reply,
    decode,
    encode,
)
from aionn.service.wire.quotas import Account, Quotas
from aionn.service.wire.received import (
    DRAINED_WEIGHT,
    close_charged,
    close_received,
    close_unread,
    drain,
    have_strange_sockets,
)
from aionn.service.wire.repetition import RecallMemories
from fences import SyncFence
from fences.descriptor import NAME_PREFIX
from fences.state import state_of

LINGER_S = 60
WAITED_S_MAX = 20.0
"""Far below what a closing that waits would take."""


def pending_fence() -> tuple[int, socket.socket]:
    """The importing end of a fence of a peer, for which no other descriptor stands, and the other end."""
    importing, sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    importing.bind(NAME_PREFIX + b"%d/%s" % (os.getpid(), os.urandom(12).hex().encode()))
    return importing.detach(), sending


class Lingering:
    """Makes sockets whose closing waits: their peer reads nothing."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._peers: list[socket.socket] = []

    def make(self) -> int:
        client = socket.create_connection(self._listener.getsockname())
        self._peers.append(self._listener.accept()[0])
        client.setblocking(False)
        try:
            while True:
                client.send(bytes(1 << 16))
        except BlockingIOError:
            pass
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
        return client.detach()

    def send(self, sock: socket.socket, payload: bytes) -> None:
        """Sends one, and keeps none."""
        fd = self.make()
        socket.send_fds(sock, [payload], [fd])
        os.close(fd)

    def close(self) -> None:
        for sock in (*self._peers, self._listener):
            sock.close()


@pytest.fixture
def lingering() -> Iterator[Lingering]:
    made = Lingering()
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


async def test_fences_with_lingering_sockets_in_their_packets_keep_nobody_waiting(
    lingering: Lingering,
) -> None:
    peer = Peers().of("process")
    for count in (1, QUICK_COUNT_MAX + 1):
        fence, sending = pending_fence()
        with sending:
            lingering.send(sending, b"record")
        fds = [*(os.eventfd(0) for _ in range(count - 1)), fence]
        peer.held.add(len(fds))
        began_s = time.monotonic()
        with anyio.fail_after(LINGER_S / 2):
            closed = close_charged(fds, peer)
            assert closed is not None
            await closed
        assert time.monotonic() - began_s < WAITED_S_MAX
        assert peer.held.count == 0


async def test_fence_of_a_client_is_closed_without_waiting_for_what_is_in_its_packet(
    lingering: Lingering,
) -> None:
    account = Account(Quotas(descriptors=1))
    fd, sending = pending_fence()
    fence = fence_from_wire(fd, state_of(None), sealed_only=True, account=account)
    os.close(fd)
    with sending:
        lingering.send(sending, b"record")
    assert account.taken("descriptors") == 1
    began_s = time.monotonic()
    fence.close()
    assert time.monotonic() - began_s < WAITED_S_MAX
    with anyio.fail_after(WAITED_S_MAX):
        while account.taken("descriptors"):
            await anyio.sleep(LINGERING_S)


async def test_sockets_of_others_are_told_from_fences_and_files(lingering: Lingering) -> None:
    fd = lingering.make()
    others = [*os.pipe(), os.eventfd(0), os.open("/dev/null", os.O_RDONLY)]
    with SyncFence() as fence:
        assert not have_strange_sockets([*others, fence.fileno()])
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert have_strange_sockets([*others, ours.fileno()])
        assert have_strange_sockets([*others, fence.fileno(), fd])
    began_s = time.monotonic()
    await close_received([fd], anyio.lowlevel.checkpoint)
    assert time.monotonic() - began_s < WAITED_S_MAX
    for other in others:
        os.close(other)


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM, socket.SOCK_DGRAM])
async def test_sockets_inside_of_sockets_are_closed_at_once(lingering: Lingering, kind: int) -> None:
    fd = lingering.make()
    for _ in range(3):
        outer, inner = socket.socketpair(socket.AF_UNIX, kind)
        inner.send(b"first")
        socket.send_fds(inner, [b"second"], [fd])
        os.close(fd)
        inner.close()
        fd = outer.detach()
    assert have_strange_sockets([fd])
    began_s = time.monotonic()
    await close_received([fd], anyio.lowlevel.checkpoint)
    assert time.monotonic() - began_s < WAITED_S_MAX


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
async def test_connections_that_nobody_accepted_are_closed_at_once(lingering: Lingering, kind: int) -> None:
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind("")  # The kernel chooses a name.
    listener.listen()
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, kind) as connection:
            connection.connect(listener.getsockname())
            lingering.send(connection, b"unread")
    fd = listener.detach()
    assert have_strange_sockets([fd])
    began_s = time.monotonic()
    await close_received([fd], anyio.lowlevel.checkpoint)
    assert time.monotonic() - began_s < WAITED_S_MAX


def test_closing_a_socket_closes_what_nobody_has_read_also_behind_empty_messages(
    lingering: Lingering, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    for payload in (b"", b"x", b"", b"y" * 100):
        theirs.send(payload)
        lingering.send(theirs, payload)
    began_s = time.monotonic()
    close_unread(ours)
    assert time.monotonic() - began_s < WAITED_S_MAX


@pytest.mark.parametrize(
    ("count", "descriptors", "turns"),
    [(160, 0, 10), (10, DRAINED_WEIGHT - 1, 10), (3, 4 * DRAINED_WEIGHT, 12)],
)
async def test_others_have_a_turn_after_some_unread_messages_and_not_after_each(
    pair: tuple[socket.socket, socket.socket], count: int, descriptors: int, turns: int
) -> None:
    ours, theirs = pair
    with closing(socket.create_server(("127.0.0.1", 0))) as anything:
        for _ in range(count):
            socket.send_fds(theirs, [b"ping"], [anything.fileno()] * descriptors)
    ours.shutdown(socket.SHUT_RDWR)
    taken = 0

    async def next_turn() -> None:
        nonlocal taken
        taken += 1

    await drain(ours, next_turn)
    assert taken == turns
    assert ours.recv(1) == b""


async def test_others_have_turns_while_messages_in_sockets_in_messages_are_closed() -> None:
    """Each of many sockets that come with one message may be full of messages."""
    outer = []
    for _ in range(10):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for _ in range(DRAINED_WEIGHT):
            theirs.send(b"unread")
        theirs.close()
        outer.append(ours.detach())
    turns = 0

    async def next_turn() -> None:
        nonlocal turns
        turns += 1
        await anyio.lowlevel.checkpoint()

    assert have_strange_sockets(outer)
    await close_received(outer, next_turn)
    assert turns == 10
    for fd in outer:
        with pytest.raises(OSError):
            os.fstat(fd)


DEPTH = 500
"""Deeper than Python's calls may be, where each socket takes two or three of them."""


async def test_sockets_nested_deeper_than_calls_are_closed_with_turns_for_others(
    lingering: Lingering,
) -> None:
    """The kernel limits the depth of what is sent: a sender that begins with the outermost socket is not limited."""
    outermost, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for _ in range(DEPTH):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(inner, [b"x"], [ours.fileno()])
        ours.close()
        inner.close()
        inner = theirs
    lingering.send(inner, b"innermost")
    inner.close()
    turns, before = 0, len(os.listdir("/proc/self/fd"))

    async def next_turn() -> None:
        nonlocal turns
        turns += 1
        await anyio.lowlevel.checkpoint()

    began_s = time.monotonic()
    await close_received([outermost.detach()], next_turn)
    assert time.monotonic() - began_s < WAITED_S_MAX
    with anyio.fail_after(WAITED_S_MAX):
        # A thread closes the innermost one, which is no Unix socket.
        while len(os.listdir("/proc/self/fd")) != before - 1:
            await anyio.sleep(LINGERING_S)
    assert turns >= DEPTH // DRAINED_WEIGHT


async def test_others_have_turns_while_connections_that_nobody_accepted_are_closed() -> None:
    count = 4 * DRAINED_WEIGHT
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # The kernel chooses a name.
    listener.listen(count)
    for _ in range(count):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(listener.getsockname())
    turns = 0

    async def next_turn() -> None:
        nonlocal turns
        turns += 1

    await close_received([listener.detach()], next_turn)
    assert turns == count // DRAINED_WEIGHT


async def test_descriptors_that_cannot_be_looked_at_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of a file in a network's file system that is gone."""
    stale, ours, theirs = os.open("/dev/null", os.O_RDONLY), *socket.socketpair()
    fstat = os.fstat

    def failing(fd: int) -> os.stat_result:
        if fd == stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(fd)

    monkeypatch.setattr(os, "fstat", failing)
    fds = [stale, ours.detach(), theirs.detach()]
    assert have_strange_sockets(fds)
    await close_received(fds, anyio.lowlevel.checkpoint)
    monkeypatch.undo()
    with anyio.fail_after(WAITED_S_MAX):
        while any(os.path.exists(f"/proc/self/fd/{fd}") for fd in fds):
            await anyio.sleep(0.001)  # The file is closed by a thread.


@pytest.mark.parametrize("is_native", [True, False])
async def test_closing_in_turns_that_is_cancelled_leaves_no_descriptor(
    pair: tuple[socket.socket, socket.socket], is_native: bool
) -> None:
    ours, theirs = pair
    for _ in range(4 * DRAINED_WEIGHT):
        theirs.send(b"unread")
    fd = ours.detach()
    is_waiting, is_over = anyio.Event(), anyio.Event()

    async def next_turn() -> None:
        is_waiting.set()
        await is_over.wait()

    async with anyio.create_task_group() as tasks:
        task = asyncio.get_running_loop().create_task(close_received([fd], next_turn)) if is_native else None
        if task is None:
            tasks.start_soon(close_received, [fd], next_turn)
        await is_waiting.wait()
        if task is None:
            tasks.cancel_scope.cancel()
            is_over.set()
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    with pytest.raises(OSError):
        os.fstat(fd)


async def done(body: Any, channel: Channel) -> Any:
    return Done()


@pytest.mark.parametrize("first", [encode(Reply(99, Done()))[0], b"\xc1"], ids=["a message", "no message"])
async def test_lingering_sockets_end_the_connection_at_once(
    lingering: Lingering, pair: tuple[socket.socket, socket.socket], first: bytes
) -> None:
    ours, theirs = pair
    channel = Channel(ours, done, peer_name="the peer")
    lingering.send(theirs, first)
    for _ in range(3):
        lingering.send(theirs, encode(Reply(99, Done()))[0])
    began_s = time.monotonic()
    with anyio.fail_after(2 * LINGER_S):
        await channel.run()
    channel.release()
    assert time.monotonic() - began_s < WAITED_S_MAX
    assert not channel.is_alive


async def test_descriptors_of_an_empty_message_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    channel = Channel(ours, done, peer_name="the peer")
    reading, writing = os.pipe()
    socket.send_fds(theirs, [b""], [writing] * 9)
    os.close(writing)
    with anyio.fail_after(WAITED_S_MAX):
        await channel.run()
        os.set_blocking(reading, False)
        await anyio.wait_readable(reading)  # No end of the pipe is left that could be written to.
    assert os.read(reading, 1) == b""
    os.close(reading)
    channel.release()


async def test_more_descriptors_than_a_message_may_carry_end_the_connection(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    channel = Channel(ours, done, peer_name="the peer")
    null = os.open("/dev/null", os.O_RDONLY)
    socket.send_fds(theirs, [encode(Reply(99, Done()))[0]], [null] * 253)
    os.close(null)
    with anyio.fail_after(WAITED_S_MAX):
        await channel.run()
    channel.release()
    assert not channel.is_alive and channel.received_count == 0


async def test_unread_descriptors_are_closed_with_turns_for_others(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    channel = Channel(ours, done, peer_name="the peer")
    null = os.open("/dev/null", os.O_RDONLY)
    theirs.send(b"\xc1")
    count = 20
    for _ in range(count):
        socket.send_fds(theirs, [b""], [null] * 16)
    os.close(null)
    turns = 0
    async with anyio.create_task_group() as tasks:

        async def turn() -> None:
            nonlocal turns
            while True:
                await anyio.lowlevel.checkpoint()
                turns += not channel.is_alive

        tasks.start_soon(turn)
        with anyio.fail_after(WAITED_S_MAX):
            await channel.run()
        tasks.cancel_scope.cancel()
    assert turns >= count
    channel.release()


async def _answered(body: Any, expected: Any, reply: Any, *, number: int | None = None) -> tuple[Any, int]:
    """What a call returns or raises, and how many memories were imported, where the peer answers so."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    imported, from_fd = 0, Memory.from_fd

    def counting(*arguments: Any, **named: Any) -> Memory:
        nonlocal imported
        imported += 1
        return from_fd(*arguments, **named)

    async def never(body: Any, channel: Channel) -> Done:
        raise AssertionError

    channel = Channel(ours, never, peer_name="the peer")
    outcome: Any = None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Memory, "from_fd", counting)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(channel.run)

            async def ask() -> None:
                nonlocal outcome
                try:
                    outcome = await channel.call(body, expected)
                except Error as e:
                    outcome = e

            async with anyio.create_task_group() as asking:
                asking.start_soon(ask)
                await anyio.wait_readable(theirs)
                call = decode(theirs.recv(1 << 16), [])
                payload, fds, keep = encode(Reply(call.id if number is None else number, reply))
                socket.send_fds(theirs, [payload], fds)
                if number is not None:
                    theirs.send(encode(Reply(call.id, Failed(GeneralFailure().status, "")))[0])
                del keep
            tasks.cancel_scope.cancel()
    channel.release()
    theirs.close()
    return outcome, imported


MEMORIES = 100


@pytest.mark.parametrize("more", [0, REPLY_DESCRIPTORS_MAX, REPLY_DESCRIPTORS_MAX + 1])
@pytest.mark.parametrize("kind", [GetMemories, RecallMemories])
async def test_reply_with_more_descriptors_than_were_asked_for_ends_the_connection_unread(
    kind: Any, more: int
) -> None:
    asked = tuple(range(MEMORIES))
    body = GetMemories(1, asked) if kind is GetMemories else RecallMemories(asked)
    with closing(Memory.create(4096)) as memory:
        reply = GetMemoriesReply((memory,) * (MEMORIES + more))
        outcome, imported = await _answered(body, GetMemoriesReply, reply)
    if more <= REPLY_DESCRIPTORS_MAX:
        assert len(outcome.memories) == imported == MEMORIES + more
    else:
        assert isinstance(outcome, DeadObject) and "descriptors" in str(outcome) and imported == 0


async def test_reply_that_nothing_waits_for_is_not_read_if_it_has_many_descriptors() -> None:
    with closing(Memory.create(4096)) as memory:
        for count in (REPLY_DESCRIPTORS_MAX, REPLY_DESCRIPTORS_MAX + 1):
            reply = GetMemoriesReply((memory,) * count)
            outcome, imported = await _answered(Ping(), Done, reply, number=99)
            assert isinstance(outcome, GeneralFailure)
            assert imported == (count if count <= REPLY_DESCRIPTORS_MAX else 0)


class Occupied:
    """Keeps the thread that closes memories occupied."""

    def __init__(self) -> None:
        self._free, begun = threading.Event(), threading.Event()

        def on_closed(_: int) -> None:
            begun.set()
            self._free.wait(WAITED_S_MAX)

        close_apart([os.memfd_create("occupied", os.MFD_ALLOW_SEALING)], on_closed)
        assert begun.wait(WAITED_S_MAX)

    def close(self) -> None:
        self._free.set()


async def _until(is_so: Any) -> None:
    with anyio.fail_after(WAITED_S_MAX):
        while not is_so():
            await anyio.sleep(0.001)


def _open_count() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("connections", "messages", "count"), [(20, 1, 10), (4, 8, 10), (4, 8, 3)])
async def test_a_process_that_sends_descriptors_faster_than_they_are_closed_waits(
    monkeypatch: pytest.MonkeyPatch, connections: int, messages: int, count: int
) -> None:
    """Half messages, on connection after connection: what is to be closed fills no table of descriptors."""
    monkeypatch.setattr(load, "HELD_MAX", 20)
    monkeypatch.setattr(received, "WAITING_MAX", 20)
    large = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.truncate(large, QUICK_BYTES_MAX + 1)
    peer, channels, ends = Peers().of(1), [], []
    for _ in range(connections):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for _ in range(messages):
            socket.send_fds(theirs, [b"half"], [large] * count)
        channels.append(Channel(ours, done, peer_name="the peer", sealed_only=True, peer=peer))
        ends.append(theirs)
    before = _open_count()
    with closing(Occupied()) as occupied, anyio.fail_after(WAITED_S_MAX):
        async with anyio.create_task_group() as tasks:
            for channel in channels:
                tasks.start_soon(channel.run)
            await _until(lambda: waiting_to_be_closed() >= count)
            for _ in range(100):
                await anyio.sleep(0.001)
                # A message is beyond each of both limits.
                assert _open_count() - before <= 20 + 20 + 2 * count
            occupied.close()
        await _until(lambda: not waiting_to_be_closed() and _open_count() <= before)
    assert peer.held.count == 0
    for channel in channels:
        channel.release()
    for end in ends:
        end.close()
    os.close(large)
