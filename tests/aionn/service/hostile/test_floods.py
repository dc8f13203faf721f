"""A peer that sends without end, or reads nothing: what this end does for it is bounded, and everybody else has their turn."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from aionn.errors import DeadObject, GeneralFailure, InvalidArgument
from aionn.hal import Memory, MemoryKind, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.service.wire import channel as channel_module
from aionn.service.wire import load as load_module
from aionn.service.wire import outbox as outbox_module
from aionn.service.wire.channel import TURN_WEIGHT, TURN_WEIGHT_BYTES, Channel
from aionn.service.wire.peers import Peer
from aionn.service.wire.protocol import (
    Call,
    CancelCall,
    CopyTo,
    Done,
    Failed,
    GetMemoriesReply,
    Message,
    Ping,
    Reply,
    SupportedOperations,
    decode,
    encode,
)
from aionn.service.wire.repetition import ForgetMemory
from aionn.service.wire.sizes import TEXT_CHARACTERS_MAX

WAIT_S_MAX = 20.0


async def done(body: Any, channel: Channel) -> Any:
    return Done()


@asynccontextmanager
async def channel_and_peer(
    handler: Any = done, process: Peer | None = None
) -> AsyncIterator[tuple[Channel, socket.socket]]:
    """A channel, and the bare socket of its peer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    channel = Channel(ours, handler, peer_name="the peer", sealed_only=True, peer=process)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.run)
        yield channel, theirs
        tasks.cancel_scope.cancel()
    channel.release()
    theirs.close()


async def until(holds: Callable[[], bool]) -> int:
    """How many turns of the loop it took."""
    turns = 0
    with anyio.fail_after(WAIT_S_MAX):
        while not holds():
            await anyio.lowlevel.checkpoint()
            turns += 1
    return turns


def send(sock: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    payload, own, keep = encode(message)
    socket.send_fds(sock, [payload], [*own, *fds])
    del keep


async def receive(sock: socket.socket) -> Message:
    with anyio.fail_after(WAIT_S_MAX):
        while True:
            try:
                return decode(sock.recv(1 << 16), [])
            except BlockingIOError:
                await anyio.wait_readable(sock)


async def flood(channel: Channel, peer: socket.socket, message: Message) -> int:
    """Sends a message again and again until the channel reads no further; how often that was."""
    sent, received = 0, -1
    with anyio.fail_after(WAIT_S_MAX):
        while channel.received_count != received:
            received = channel.received_count
            try:
                while True:
                    send(peer, message)
                    sent += 1
            except BlockingIOError:
                pass
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
    return sent


@pytest.fixture
def file_memory(tmp_path: Path) -> Memory:
    """Memory that a shared device rejects."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        return Memory.from_fd(file.fileno(), size_bytes=4096, kind=MemoryKind.MMAP_FD)


def messages(file_memory: Memory) -> dict[str, Message]:
    """Messages that cost their sender next to nothing."""
    return {
        "call": Call(7, Ping()),
        "rejected": Call(7, CopyTo(1, file_memory)),
        "cancel": Call(0, CancelCall(99)),
        "reply": Reply(99, Done()),
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["call", "rejected", "cancel", "reply"])
async def test_other_tasks_have_their_turn_whatever_is_said(kind: str, file_memory: Memory) -> None:
    message, count = messages(file_memory)[kind], 128
    async with channel_and_peer() as (channel, peer):
        for _ in range(count):
            send(peer, message)
        turns = await until(lambda: channel.received_count == count)
        assert turns >= count // (1 if kind == "call" else TURN_WEIGHT) - 1


async def _turns_with_connections(count: int, message: Message, processes: list[Peer]) -> int:
    """How many turns of the loop it takes until so many connections, of processes in turn, have had a message each."""
    async with AsyncExitStack() as stack:
        ends = [
            await stack.enter_async_context(channel_and_peer(process=processes[i % len(processes)]))
            for i in range(count)
        ]
        for _, peer in ends:
            send(peer, message)
        return await until(lambda: all(channel.received_count for channel, _ in ends))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["call", "rejected", "cancel", "reply"])
async def test_connections_of_one_process_have_one_turn_together(kind: str, file_memory: Memory) -> None:
    message, count = messages(file_memory)[kind], 48
    one = await _turns_with_connections(count, message, [Peer()])
    many = await _turns_with_connections(count, message, [Peer() for _ in range(count)])
    assert one >= count - 1 and many < count / 4


async def test_process_whose_other_connections_are_gone_is_not_slowed_down() -> None:
    process, message, count = Peer(), Reply(99, Done()), 128
    async with channel_and_peer(process=process) as (channel, peer):
        async with channel_and_peer(process=process):
            for _ in range(count):
                send(peer, message)
            assert await until(lambda: channel.received_count == count) > count / 2
        for _ in range(count):
            send(peer, message)
        assert await until(lambda: channel.received_count == 2 * count) <= count // TURN_WEIGHT + 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_one_process", [True, False])
async def test_parts_of_large_models_of_one_process_are_decoded_in_turn(
    monkeypatch: pytest.MonkeyPatch, is_one_process: bool
) -> None:
    """Each part takes as long as a whole message. None is decoded before all models are there: their memories are copied in two
    threads, and how soon is for the machine to say."""
    graph, count, begun, decoded = GraphBuilder(), 8, 0, 0
    last = a = graph.input(OperandType.TENSOR_FLOAT32, (4,))
    for _ in range(1000):
        last = graph.result(OperationType.ADD, [last, a, graph.constant(0)], a)
    call = Call(7, SupportedOperations(graph.build([last])))
    decode_parts = channel_module.decode_parts

    def counting(*arguments: Any, **more: Any) -> Generator[None, None, Message]:
        nonlocal begun, decoded
        parts = decode_parts(*arguments, **more)
        begun += 1
        while begun < count:
            yield
        while True:
            try:
                next(parts)
            except StopIteration as e:
                return e.value
            decoded += 1
            yield

    monkeypatch.setattr(channel_module, "decode_parts", counting)
    one, most = Peer(), 0
    async with AsyncExitStack() as stack:
        ends = [
            await stack.enter_async_context(channel_and_peer(process=one if is_one_process else Peer()))
            for _ in range(count)
        ]
        for _, peer in ends:
            send(peer, call)
        with anyio.fail_after(WAIT_S_MAX):
            while not all(channel.received_count for channel, _ in ends):
                before = decoded
                await anyio.lowlevel.checkpoint()
                most = max(most, decoded - before)
    # The first part is decoded where the copy came, and of all but the last model that is before the parts are counted.
    assert most <= 2 if is_one_process else most == count


@pytest.mark.parametrize("text_bytes", [0, TURN_WEIGHT_BYTES, 2 * TURN_WEIGHT_BYTES])
async def test_larger_messages_leave_the_turn_to_others_sooner(text_bytes: int) -> None:
    count = 32  # As many as a socket holds.
    message = Reply(99, Failed(GeneralFailure().status, "x" * text_bytes))
    turns_expected = count * (1 + text_bytes // TURN_WEIGHT_BYTES) / TURN_WEIGHT
    async with channel_and_peer() as (channel, peer):
        for _ in range(count):
            send(peer, message)
        turns = await until(lambda: channel.received_count == count)
        assert turns_expected - 1 <= turns <= 1.5 * turns_expected + 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["call", "rejected"])
async def test_peer_that_reads_no_answers_is_read_no_further(
    kind: str, file_memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 32
    monkeypatch.setattr(load_module, "CALLS_AT_ONCE_MAX", limit)
    async with channel_and_peer() as (channel, peer):
        tasks_before = len(asyncio.all_tasks())
        sent = 0
        with anyio.fail_after(WAIT_S_MAX):
            # A thread closes the file of each that is rejected, and the next one waits for that.
            while sum(channel.load) < limit:
                sent += await flood(channel, peer, messages(file_memory)[kind])
        sent += await flood(channel, peer, messages(file_memory)[kind])
        assert sum(channel.load) == limit
        assert len(asyncio.all_tasks()) <= tasks_before + 2
        for _ in range(sent):
            reply = await receive(peer)
            assert isinstance(reply, Reply) and reply.id == 7
        await until(lambda: channel.load == (0, 0))


async def test_answers_that_are_not_read_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "OWED_BYTES_MAX", 64 << 10)

    async def explain(body: Any, channel: Channel) -> Any:
        raise InvalidArgument("x" * TEXT_CHARACTERS_MAX)

    async with channel_and_peer(explain) as (channel, peer):
        sent = await flood(channel, peer, Call(7, Ping()))
        assert 0 < channel.load[1] <= (64 << 10) / TEXT_CHARACTERS_MAX + 1
        for _ in range(sent):
            await receive(peer)


async def test_descriptors_of_answers_that_are_not_read_are_bounded() -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory = Memory.create(1)

    async def answer(body: Any, channel: Channel) -> Any:
        return GetMemoriesReply((memory,) * 8)

    async with channel_and_peer(answer) as (channel, peer):
        sent = await flood(channel, peer, Call(7, Ping()))
        most = load_module.OWED_BYTES_MAX // outbox_module.DESCRIPTOR_WEIGHT_BYTES
        assert len(os.listdir("/proc/self/fd")) <= before + 10 + most + 8
        answered: list[bytes] = []
        with anyio.fail_after(WAIT_S_MAX):
            while len(answered) < sent:
                try:
                    payload, fds, _, _ = socket.recv_fds(peer, 1 << 16, 16)
                except BlockingIOError:
                    await anyio.wait_readable(peer)
                    continue
                for fd in fds:
                    os.close(fd)
                answered.append(payload)
    memory.close()


async def test_text_of_an_error_is_cut_before_it_is_sent() -> None:
    async def explain(body: Any, channel: Channel) -> Any:
        raise GeneralFailure("no " * 10**6)

    async def break_down(body: Any, channel: Channel) -> Any:
        raise RuntimeError("é" * 10**6)

    for handler in (explain, break_down):
        async with channel_and_peer(handler) as (_, peer):
            send(peer, Call(7, Ping()))
            reply = await receive(peer)
            assert isinstance(reply, Reply) and isinstance(reply.body, Failed)
            assert len(reply.body.message) < 2 * TEXT_CHARACTERS_MAX
            assert "more characters" in reply.body.message


async def fill(channel: Channel, tasks: anyio.abc.TaskGroup) -> int:
    """Calls until the socket holds no more; how many there are, the last of which waits."""
    count = 0

    async def call() -> None:
        await channel.command(Ping())

    while len(channel._outbox) == 0:
        tasks.start_soon(call)
        count += 1
        await anyio.lowlevel.checkpoint()
    return count


async def test_no_notice_is_lost_and_none_overtakes_a_call() -> None:
    async with channel_and_peer() as (channel, peer), anyio.create_task_group() as tasks:
        calls = await fill(channel, tasks)
        numbers = list(range(1000))
        for number in numbers[:500]:
            channel.post(ForgetMemory(number))

        def post() -> None:
            for number in numbers[500:]:
                channel.post(ForgetMemory(number))

        thread = threading.Thread(target=post)
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
        order = []
        for _ in range(calls + len(numbers)):
            message = await receive(peer)
            assert isinstance(message, Call)
            order.append(message.body)
        assert order == [Ping()] * calls + [ForgetMemory(number) for number in numbers]
        tasks.cancel_scope.cancel()


async def test_notice_of_a_thread_that_found_no_room_leaves_with_the_next_message() -> None:
    async with channel_and_peer() as (channel, peer):
        payload = encode(Call(0, Ping()))[0]
        with pytest.raises(BlockingIOError):
            while True:
                channel._sock.send(payload)  # As if sent long ago.
        thread = threading.Thread(target=channel.post, args=(ForgetMemory(1),))
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
        with pytest.raises(BlockingIOError):
            while True:
                peer.recv(1 << 16)
        send(peer, Reply(99, Done()))
        message = await receive(peer)
        assert isinstance(message, Call) and message.body == ForgetMemory(1)


async def test_peer_that_leaves_too_many_notices_unread_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "WAITING_MAX", 10)
    async with channel_and_peer() as (channel, _), anyio.create_task_group() as tasks:
        failed = []

        async def call() -> None:
            try:
                await channel.command(Ping())
            except DeadObject as e:
                failed.append(e)

        tasks.start_soon(call)
        await anyio.lowlevel.checkpoint()
        for number in range(10_000):
            channel.post(ForgetMemory(number))
        await until(lambda: bool(failed))
        assert not channel.is_alive


async def test_cancelled_call_that_found_no_room_is_never_sent() -> None:
    async with channel_and_peer() as (channel, peer), anyio.create_task_group() as tasks:
        calls = await fill(channel, tasks) - 1
        waiting = len(channel._outbox)
        for _ in range(50):
            with anyio.move_on_after(0):
                await channel.command(CopyTo(1, Memory.create(8)))
        assert len(channel._outbox) == waiting
        for _ in range(calls + waiting):
            message = await receive(peer)
            assert isinstance(message, Call) and message.body == Ping()
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        tasks.cancel_scope.cancel()


async def test_memory_of_a_call_that_waits_may_be_closed() -> None:
    async with channel_and_peer() as (channel, peer), anyio.create_task_group() as tasks:
        calls = await fill(channel, tasks)
        memory = Memory.create(5000)
        tasks.start_soon(channel.command, CopyTo(1, memory))
        await anyio.lowlevel.checkpoint()
        memory.close()
        other = os.open("/dev/null", os.O_RDONLY)  # It may have the number of the closed one.
        for _ in range(calls):
            await receive(peer)
        await until(lambda: len(channel._outbox) == 0)
        _, fds, _, _ = socket.recv_fds(peer, 1 << 16, 4)
        assert [os.fstat(fd).st_size for fd in fds] == [5000]
        for fd in (other, *fds):
            os.close(fd)
        tasks.cancel_scope.cancel()


async def test_reply_that_nobody_waits_for_is_not_decoded() -> None:
    async with channel_and_peer() as (channel, peer):
        payload = encode(Reply(99, Failed(InvalidArgument.status, "x" * 5000)))[0]
        peer.send(payload[:-1] + b"\xff")  # No text of UTF-8.
        await until(lambda: channel.received_count == 1)
        assert channel.is_alive
