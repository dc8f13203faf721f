"""A driver process that answers what was not asked: the caller gets an error, and nothing that came along stays."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from aionn.errors import DeadObject, ErrorStatus, GeneralFailure
from aionn.hal import (
    BufferDesc,
    DataLocation,
    ExecutionPreference,
    Memory,
    OperandType,
    OperationType,
    Priority,
    Request,
    RequestArgument,
)
from aionn.models.builder import GraphBuilder
from aionn.service.client.connection import Connection
from aionn.service.client.device import RemoteDevice
from aionn.service.client.prepared import RemotePreparedModel
from aionn.service.wire.protocol import (
    AllocateReply,
    BurstEnded,
    Call,
    CallBody,
    ConfigureBurstReply,
    CopyTo,
    Done,
    EndBurst,
    ExecuteFencedReply,
    Failed,
    FreeBuffer,
    GetStatus,
    Message,
    PrepareModel,
    Reply,
    ReplyBody,
    StatusReply,
    decode,
    encode,
)
from aionn.service.wire.repetition import ComputeFenced
from fences import SyncFence

WAIT_S_MAX = 20.0


class Impostor:
    """The other end of a connection, in this process.

    Attributes:
        socket: The connection's.
        pid: Says whose it is.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs.setblocking(False)

    def kill(self) -> None: ...

    async def log_output(self) -> None: ...

    async def wait(self) -> None:
        await anyio.sleep_forever()

    async def aclose(self) -> None:
        self.theirs.close()

    def send(self, message: Message) -> None:
        payload, fds, keep = encode(message)
        socket.send_fds(self.theirs, [payload], fds)
        del keep

    async def receive(self) -> Message:
        with anyio.fail_after(WAIT_S_MAX):
            while True:
                try:
                    payload, fds, _, _ = socket.recv_fds(self.theirs, 1 << 16, 253)
                except BlockingIOError:
                    await anyio.wait_readable(self.theirs)
                    continue
                try:
                    return decode(payload, fds)
                finally:
                    for fd in fds:
                        os.close(fd)

    async def answer_next(self, kind: str, body: ReplyBody) -> None:
        """Answers the next call of a kind; those before it are ignored."""
        while True:
            call = await self.receive()
            if isinstance(call, Call) and type(call.body).__name__ == kind:
                self.send(Reply(call.id, body))
                return


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, Impostor]]:
    impostor = Impostor()
    async with anyio.create_task_group() as tasks:
        connection = Connection(impostor, "test", tasks)
        tasks.start_soon(connection.run)
        try:
            yield connection, impostor
        finally:
            await connection.aclose("the test is over")


async def test_fence_in_an_answer_of_another_kind_is_closed() -> None:
    fence = SyncFence()
    async with connected() as (connection, impostor), anyio.create_task_group() as tasks:
        tasks.start_soon(impostor.answer_next, "GetStatus", ExecuteFencedReply(1, fence))
        with pytest.raises(DeadObject, match="ExecuteFencedReply"):
            await connection.channel.call(GetStatus(), StatusReply)
    fence.close()


async def test_failure_that_is_none_is_the_drivers_fault() -> None:
    async with connected() as (connection, impostor), anyio.create_task_group() as tasks:
        tasks.start_soon(impostor.answer_next, "GetStatus", Failed(ErrorStatus.NONE, "it worked"))
        with pytest.raises(GeneralFailure, match="it worked"):
            await connection.channel.call(GetStatus(), StatusReply)


async def test_two_bursts_with_one_number_are_refused() -> None:
    async with connected() as (connection, impostor), anyio.create_task_group() as tasks:
        prepared = RemotePreparedModel(connection, 1)
        tasks.start_soon(impostor.answer_next, "ConfigureBurst", ConfigureBurstReply(5))
        first = await prepared.configure_execution_burst()
        tasks.start_soon(impostor.answer_next, "ConfigureBurst", ConfigureBurstReply(5))
        with pytest.raises(GeneralFailure, match="two bursts"):
            await prepared.configure_execution_burst()
        assert connection.bursts[5] is first
        connection.channel.close("it died")
        await connection.ended.wait()
        await first.aclose()
        await prepared.aclose()


@pytest.mark.parametrize("end", ["answer", "refusal", "process"])
async def test_launch_of_a_closed_burst_is_done_when_the_process_says_that_the_burst_has_ended(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aionn.service.client.prepared.FREE_S_MAX", 0.0)
    monkeypatch.setattr("aionn.burst.controller.END_S_MAX", 0.0)
    async with connected() as (connection, impostor):
        launch = await _closed_during(connection, impostor)
        asked = await impostor.receive()
        assert isinstance(asked, Call) and isinstance(asked.body, EndBurst)
        assert not launch.is_done and 5 in connection.bursts, "the device may be at work"
        if end == "process":
            connection.channel.close("it died")
        elif end == "answer":
            impostor.send(Reply(asked.id, Done()))
        else:
            impostor.send(Reply(asked.id, Failed(ErrorStatus.GENERAL_FAILURE, "no")))
            impostor.send(Call(7, BurstEnded(5, "corrupt")))
        with anyio.fail_after(WAIT_S_MAX), pytest.raises(DeadObject):
            await launch
        queues = launch._burst._requests, launch._burst._results
        assert all(queue.closed for queue in queues)


async def _closed_during(connection: Connection, impostor: Impostor) -> Any:
    """A launch in flight in a burst that was closed."""
    prepared = RemotePreparedModel(connection, 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(impostor.answer_next, "ConfigureBurst", ConfigureBurstReply(5))
        burst = await prepared.configure_execution_burst()
    memory = Memory.create(64)
    launch = burst.launch(Request((), (RequestArgument(location=DataLocation(0, 0, 4)),), (memory,)), [0])
    await burst.aclose()
    return launch


@pytest.mark.parametrize("token", [0, -1])
async def test_token_that_names_nothing_is_refused_and_the_memory_freed(
    token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected() as (connection, impostor), anyio.create_task_group() as tasks:

        async def connected_already(self: RemoteDevice) -> Connection:
            return connection

        monkeypatch.setattr(RemoteDevice, "_connected", connected_already)
        device = RemoteDevice("reference", "test", tasks)
        tasks.start_soon(impostor.answer_next, "Allocate", AllocateReply(3, token))
        with pytest.raises(GeneralFailure, match="positive token"):
            await device.allocate(BufferDesc(), [], [], [])
        freed = await impostor.receive()
        assert isinstance(freed, Call) and freed.body == FreeBuffer(3)


def _with_fence() -> CallBody:
    fence = SyncFence()
    fence.fileno()
    return ComputeFenced(1, (fence,), None, None)


def _with_memory() -> CallBody:
    return CopyTo(1, Memory.create(64))


def _large() -> CallBody:
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (4,))
    model = graph.build([graph.result(OperationType.ADD, [a, a, graph.constant(0)], a)])
    model = msgspec.structs.replace(model, operand_values=bytes(1 << 20))
    return PrepareModel(model, ExecutionPreference.LOW_POWER, Priority.MEDIUM, None)


@pytest.mark.parametrize("make", [_with_fence, _with_memory, _large])
async def test_what_comes_with_calls_that_nobody_answers_is_not_looked_at(
    make: Callable[[], CallBody], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("nothing of it may be decoded")

    body = make()
    async with connected() as (connection, impostor):
        with monkeypatch.context() as patched:
            impostor.send(Call(7, body))
            patched.setattr("aionn.service.wire.channel.decode_inline", forbidden)
            patched.setattr("aionn.service.wire.channel.read_parts", forbidden)
            with anyio.fail_after(WAIT_S_MAX):
                while not connection.channel.received_count:
                    await anyio.lowlevel.checkpoint()
        reply = await impostor.receive()
        assert isinstance(reply, Reply) and reply.id == 7 and isinstance(reply.body, Failed)
        assert connection.channel.is_alive
    if isinstance(body, ComputeFenced):
        body.wait_for[0].close()
