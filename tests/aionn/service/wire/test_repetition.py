"""What was said once: memories that the driver process remembers, reusable executions that it keeps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest

from aionn.errors import DeadObject, InvalidArgument, ResourceExhausted
from aionn.hal import DataLocation, Memory, Request, RequestArgument
from aionn.service.host import process as host
from aionn.service.host.session import Session
from aionn.service.wire.handles import PoolOnWire, RequestOnWire
from aionn.service.wire.protocol import (
    Call,
    Execute,
    ExecuteReply,
    ExecutionPreference,
    Failed,
    GetMemoriesReply,
    PrepareModel,
    PrepareModelReply,
    Priority,
    Reply,
    decode,
    encode,
)
from aionn.service.wire.quotas import Account, Quotas
from aionn.service.wire.repetition import MemoryIdentifiers, RecallMemories, RememberedMemories
from fences import SyncFence

SETTLED_S_MAX = 30.0


async def settled(is_so: Any) -> None:
    with anyio.fail_after(SETTLED_S_MAX):
        while not is_so():
            gc.collect()
            await anyio.sleep(0.005)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Session]]:
    """The driver's side of the connections, in the order in which they came."""
    made: list[Session] = []

    class Noted(Session):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            made.append(self)

    monkeypatch.setattr(host, "Session", Noted)
    yield made
    made.clear()


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the memories that were mapped from descriptors."""
    sizes: list[int] = []
    import_one = Memory.from_fd.__func__  # type: ignore[attr-defined]

    def from_fd(cls: type[Memory], fd: int, **more: Any) -> Memory:
        memory: Memory = import_one(cls, fd, **more)
        sizes.append(memory.size_bytes)
        return memory

    monkeypatch.setattr(Memory, "from_fd", classmethod(from_fd))
    return sizes


def pools_of(session: Session) -> int:
    return session.account.taken("pools")


async def test_memory_of_repeated_requests_is_mapped_no_more_than_twice(
    served: Any, small: Any, sessions: list[Session], imports: list[int]
) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    work = small.Sum()
    for value in range(20):
        work.values[1] = value
        if value % 3 == 2:
            launched = await prepared.execute_fenced(work.request, [])
            await launched.fence
            launched.fence.close()
        else:
            await prepared.execute_synchronously(work.request)
        assert work.is_right
    assert imports == [work.memory.size_bytes] * 2  # The first time it might have been for once alone.
    assert pools_of(sessions[0]) == 1
    await client.aclose()


async def test_memory_that_is_used_once_is_not_remembered(
    served: Any, small: Any, sessions: list[Session]
) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    for _ in range(3):
        await prepared.execute_synchronously(small.Sum().request)
    assert pools_of(sessions[0]) == 0
    await client.aclose()


@pytest.mark.parametrize("how", ["close", "drop"])
async def test_memory_is_forgotten_when_it_is_closed_or_dropped(
    served: Any, small: Any, sessions: list[Session], how: str
) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    work, other = small.Sum(), small.Sum()
    for _ in range(3):
        await prepared.execute_synchronously(work.request)
        await prepared.execute_synchronously(other.request)
    assert pools_of(sessions[0]) == 2
    if how == "close":
        work.memory.close()
        with pytest.raises(InvalidArgument):
            await prepared.execute_synchronously(work.request)
    else:
        del work
    await settled(lambda: pools_of(sessions[0]) == 1)
    await prepared.execute_synchronously(other.request)
    assert other.is_right
    await client.aclose()


async def test_other_memory_is_not_taken_for_one_that_is_gone(served: Any, small: Any) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    for value in range(60):  # Objects and descriptors get the addresses and numbers of those before them.
        work = small.Sum()
        work.values[1] = value
        for _ in range(3):
            work.values[2] = -1
            await prepared.execute_synchronously(work.request)
            assert work.is_right
        if value % 2:
            work.memory.close()
    await client.aclose()


async def test_more_memories_than_the_quota_are_served_too(
    serving: Any, small: Any, sessions: list[Session]
) -> None:
    served = await serving(pools=2)
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    works = [small.Sum() for _ in range(5)]
    for _ in range(4):
        for work in works:
            work.values[2] = -1
            await prepared.execute_synchronously(work.request)
            assert work.is_right
            assert pools_of(sessions[0]) <= 2
    assert pools_of(sessions[0]) == 2
    await client.aclose()


async def test_idle_memories_are_given_back_and_asked_for_again(
    serving: Any, small: Any, sessions: list[Session], imports: list[int]
) -> None:
    served = await serving(idle_s=0.05)
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    work = small.Sum()
    for _ in range(3):
        await prepared.execute_synchronously(work.request)
    await settled(lambda: pools_of(sessions[0]) == 0)
    imported = len(imports)
    work.values[0] += 1
    async with anyio.create_task_group() as tasks:  # Two at once both ask.
        for _ in range(2):
            tasks.start_soon(prepared.execute_synchronously, work.request)
    assert work.is_right and len(imports) == imported + 2
    await client.aclose()


async def test_end_of_the_connection_lets_go_of_everything(
    served: Any, small: Any, sessions: list[Session]
) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    work = small.Sum()
    for _ in range(3):
        await prepared.execute_synchronously(work.request)
    execution = await prepared.create_reusable_execution(work.request)
    await client.aclose()
    await settled(lambda: pools_of(sessions[0]) == 0)
    await settled(lambda: sessions[0].account.taken("reusable") == 0)
    with pytest.raises(DeadObject):
        await execution.execute_synchronously()
    assert work.memory._at_close == []
    again = served.client()  # What was remembered there means nothing here.
    await (await again.prepare_model(small.sum_model())).execute_synchronously(work.request)
    await again.aclose()


# A client that names what it never gave


class Asked:
    """A client that answers the driver's question as it likes."""

    def __init__(self, raw: Any, small: Any) -> None:
        self.raw = raw
        self.small = small

    async def prepare(self) -> None:
        model = self.small.sum_model()
        body = PrepareModel(model, ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None)
        reply = await self.raw.ask(2, body)
        assert isinstance(reply, PrepareModelReply)
        self.handle = reply.prepared

    async def execute(self, work: Any, identifier: int, answer: Any) -> Any:
        on_wire = RequestOnWire.of(work.request, lambda memory: PoolOnWire(None, 0, identifier))
        self.raw.sock.send(encode(Call(5, Execute(self.handle, on_wire, False, None, None)))[0])
        question = decode(await self.raw.receive(), [])
        assert isinstance(question, Call) and question.body == RecallMemories((identifier,))
        payload, fds, keep = encode(Reply(question.id, answer))
        import socket

        socket.send_fds(self.raw.sock, [payload], fds) if fds else self.raw.sock.send(payload)
        del keep
        reply = decode(await self.raw.receive(), [])
        assert isinstance(reply, Reply) and reply.id == 5
        return reply.body


async def test_unknown_identifier_is_asked_for_and_a_wrong_answer_is_refused(served: Any, small: Any) -> None:
    asked = Asked(await served.raw().hello(), small)
    await asked.prepare()
    work = small.Sum()
    none = await asked.execute(work, 7, GetMemoriesReply(()))
    assert isinstance(none, Failed) and none.status == InvalidArgument.status
    refused = await asked.execute(work, 7, Failed(InvalidArgument.status, "no such memory"))
    assert isinstance(refused, Failed) and refused.status == InvalidArgument.status
    right = await asked.execute(work, 7, GetMemoriesReply((work.memory,)))
    assert isinstance(right, ExecuteReply) and work.is_right
    small_one = await asked.execute(work, 8, GetMemoriesReply((Memory.create(4),)))
    assert isinstance(small_one, Failed) and small_one.status == InvalidArgument.status
    asked.raw.close()


async def test_forgotten_while_asked_for_is_not_kept() -> None:
    remembered = RememberedMemories(Account(Quotas()))
    memories, unknown = remembered.take([PoolOnWire(None, 0, 3), PoolOnWire(None, 9), PoolOnWire(None, 0, 4)])
    assert memories == [None, None, None] and unknown == [3, 4]
    with remembered.question(unknown):
        remembered.forget(3)
        remembered.learn(unknown, [Memory.create(1), Memory.create(1)])
    assert len(remembered) == 1
    assert remembered.take([PoolOnWire(None, 0, 3)])[1] == [3]


def test_identifiers_are_never_used_again_and_are_bounded() -> None:
    forgotten: list[int] = []
    identifiers = MemoryIdentifiers(forgotten.append)
    memories = [Memory.create(1) for _ in range(5)]
    assert [identifiers.on_wire(m).identifier for m in memories] == [-1] * 5
    assert [identifiers.on_wire(m).identifier for m in memories] == [-1] * 5  # Nobody remembers anything.
    identifiers.limit = 3
    assert [identifiers.on_wire(m).identifier for m in memories] == [0, 1, 2, 3, 4]
    assert forgotten == [0, 1] and len(identifiers) == 3
    assert identifiers.on_wire(memories[4]) == PoolOnWire(None, 0, 4)
    assert identifiers.on_wire(memories[0]).identifier == 5
    memories[3].close()
    memories.pop()
    gc.collect()
    assert forgotten == [0, 1, 2, 3, 4]
    with pytest.raises(InvalidArgument, match="identifier 3"):
        identifiers.memories([5, 3])
    assert identifiers.memories([5]) == (memories[0],)
    identifiers.close()
    assert len(identifiers) == 0 and forgotten == [0, 1, 2, 3, 4]


# Reusable executions


async def test_request_of_a_reusable_execution_is_sent_once(
    served: Any, small: Any, imports: list[int], sessions: list[Session]
) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    work = small.Sum()
    execution = await prepared.create_reusable_execution(work.request, measure=True)
    for value in range(10):
        work.values[0] = value
        result = await execution.execute_synchronously()
        assert work.is_right and result.timing.time_in_driver_ns is not None
    with SyncFence("start") as start:
        work.values[2] = -1
        launched = await execution.execute_fenced([start])
        with pytest.raises(InvalidArgument, match="outstanding"):
            await execution.execute_synchronously()
        start.signal()
        await launched.fence
    assert work.is_right and len(imports) == 1
    launched.fence.close()
    assert sessions[0].account.taken("reusable") == 1
    del execution
    await settled(lambda: sessions[0].account.taken("reusable") == 0)
    await client.aclose()


async def test_request_of_a_reusable_execution_is_checked_when_it_is_made(serving: Any, small: Any) -> None:
    served = await serving(reusable=1)
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    work = small.Sum()
    argument = RequestArgument(False, DataLocation(0, 40, 400))
    wrong = Request(work.request.inputs, (argument,), work.request.pools)
    with pytest.raises(InvalidArgument):
        await prepared.create_reusable_execution(wrong)
    execution = await prepared.create_reusable_execution(work.request)
    with pytest.raises(ResourceExhausted, match="reusable"):
        await prepared.create_reusable_execution(work.request)
    await execution.execute_synchronously()
    np.testing.assert_array_equal(work.values[2], work.values[0] + work.values[1])
    await prepared.aclose()
    with pytest.raises(InvalidArgument, match="no reusable execution"):
        await execution.execute_synchronously()
    await client.aclose()


def test_nothing_is_remembered_where_the_driver_process_remembers_nothing() -> None:
    identifiers, memory = MemoryIdentifiers(lambda identifier: None), Memory.create(64)
    assert identifiers.limit == 0
    assert [identifiers.on_wire(memory) for _ in range(3)] == [PoolOnWire(memory)] * 3
    assert len(identifiers) == 0
    memory.close()
