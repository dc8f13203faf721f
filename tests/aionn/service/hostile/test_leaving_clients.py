"""Clients that leave, or stop answering, in the middle of something: what was theirs goes, and nobody else waits for them."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

import fmq
from aionn.burst.packets import encode_request
from aionn.errors import MissedDeadline
from aionn.hal import ExecutionPreference, Priority
from aionn.service.host import process as host
from aionn.service.wire.handles import PoolOnWire, QueueHandle, RequestOnWire
from aionn.service.wire.protocol import (
    Call,
    ConfigureBurst,
    ConfigureBurstReply,
    Done,
    EndBurst,
    Execute,
    ExecuteFenced,
    GetMemories,
    Launch,
    PrepareModel,
    PrepareModelReply,
    RecallMemories,
    Reply,
    decode,
    encode,
)
from aionn.service.wire.sizes import FENCES_MAX
from fences import FenceStatus, SyncFence

SETTLED_S_MAX = 10.0


async def settled(is_so: Any) -> None:
    """Waits for what another task or thread brings about."""
    with anyio.fail_after(SETTLED_S_MAX):
        while not is_so():
            await anyio.sleep(0.005)


def listeners() -> int:
    return sum(thread.name.startswith("aionn-burst-") for thread in threading.enumerate())


@asynccontextmanager
async def busy(device: Any) -> AsyncIterator[None]:
    """The device does somebody else's work."""
    slot = device.gate.slot(2, None)
    await anyio.to_thread.run_sync(slot.__enter__)
    try:
        yield
    finally:
        slot.__exit__(None, None, None)


async def prepare(raw: Any, model: Any) -> int:
    body = PrepareModel(model, ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None)
    reply = await raw.ask(2, body)
    assert isinstance(reply, PrepareModelReply)
    return reply.prepared


@asynccontextmanager
async def asking_burst(raw: Any, prepared: int, work: Any) -> AsyncIterator[int]:
    """A burst whose thread waits for its client to say what a slot stands for; gives its handle."""
    with fmq.MessageQueue.create(1, 1 << 12) as requests, fmq.MessageQueue.create(1, 1 << 12) as results:
        queues = [QueueHandle(queue.descriptor, queue.fds) for queue in (requests, results)]
        reply = await raw.ask(3, ConfigureBurst(prepared, queues[0], queues[1]))
        assert isinstance(reply, ConfigureBurstReply)
        assert requests.write_message(encode_request(work.request, [0], measure=False))
        question = decode(await raw.receive(), [])
        assert isinstance(question, Call) and isinstance(question.body, GetMemories)
        yield reply.burst


async def test_burst_that_waits_for_its_client_is_ended_without_the_answer(served: Any, small: Any) -> None:
    before = listeners()
    raw = await served.raw().hello()
    async with asking_burst(raw, await prepare(raw, small.sum_model()), small.Sum()) as burst:
        assert listeners() == before + 1
        raw.sock.send(encode(Call(4, EndBurst(burst)))[0])
        # The question is taken back, and the call is answered.
        bodies = [decode(await raw.receive(), []) for _ in range(2)]
        assert [b.body for b in bodies if isinstance(b, Reply)] == [Done()]
        await settled(lambda: listeners() == before)
    raw.close()


@pytest.mark.parametrize("is_ending", [False, True])
async def test_client_that_leaves_while_its_burst_waits_for_it_leaves_nothing(
    served: Any, small: Any, is_ending: bool
) -> None:
    before = listeners()
    raw = await served.raw().hello()
    async with asking_burst(raw, await prepare(raw, small.sum_model()), small.Sum()) as burst:
        if is_ending:
            raw.sock.send(encode(Call(4, EndBurst(burst)))[0])
        raw.close()
        await settled(lambda: listeners() == before)


async def test_ending_a_burst_that_executes_takes_no_worker_thread(served: Any, small: Any) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    workers = anyio.to_thread.current_default_thread_limiter()
    async with anyio.create_task_group() as tasks, busy(served.device):
        tasks.start_soon(burst.execute_synchronously, small.Sum().request, [0])
        await settled(lambda: served.device.gate.waiting_count == 1)
        ending = anyio.Event()

        async def end() -> None:
            ending.set()
            await client._connection.channel.command(EndBurst(next(iter(client._connection.bursts))))

        tasks.start_soon(end)
        await ending.wait()
        await prepared.connection.channel.command(
            EndBurst(0)
        )  # By its answer the call before it was taken up.
        assert workers.borrowed_tokens == 0
    await burst.aclose()
    await client.aclose()


def descriptor_count() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapping_count() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:aionn")


@contextmanager
def no_garbage_collection() -> Iterator[Counter[int]]:
    """No collection happens by itself; counts those that are asked for, by generation."""
    asked: Counter[int] = Counter()

    def note(phase: str, details: dict[str, int]) -> None:
        if phase == "start":
            asked[details["generation"]] += 1

    gc.disable()
    gc.callbacks.append(note)
    try:
        yield asked
    finally:
        gc.callbacks.remove(note)
        gc.enable()


async def test_fences_of_a_client_that_left_are_given_up(served: Any, small: Any) -> None:
    raw = await served.raw().hello()
    prepared = await prepare(raw, small.sum_model())
    fences = [SyncFence() for _ in range(FENCES_MAX)]
    raw_only = descriptor_count()
    for fence in fences:
        fence.fileno()
    exported = descriptor_count()
    work = small.Sum()
    body = ExecuteFenced(prepared, RequestOnWire.of(work.request), tuple(fences), False, None, None, None)
    payload, fds, keep = encode(Call(3, body))
    socket.send_fds(raw.sock, [payload], fds)
    del keep
    raw.sock.setblocking(False)
    await anyio.wait_readable(raw.sock)
    assert descriptor_count() >= exported + len(fences)
    raw.close()
    await settled(lambda: descriptor_count() < exported + 2)
    assert all(fence.status == FenceStatus.PENDING for fence in fences)  # They are the client's.
    for fence in fences:
        fence.close()
    assert descriptor_count() <= raw_only + 2


async def test_client_that_is_cut_off_leaves_nothing_for_the_garbage_collector(
    served: Any, small: Any
) -> None:
    raw = await served.raw().hello()
    prepared = await prepare(raw, small.sum_model())
    descriptors, mappings = descriptor_count(), mapping_count()
    with no_garbage_collection():
        async with busy(served.device):
            for number in range(3, 8):
                body = Execute(prepared, RequestOnWire.of(small.Sum().request), False, None, None)
                payload, fds, keep = encode(Call(number, body))
                socket.send_fds(raw.sock, [payload], fds)
                del body, keep
            await settled(lambda: served.device.gate.waiting_count == 5)
            assert mapping_count() >= mappings + 5
            raw.close()
        await settled(lambda: mapping_count() <= mappings and descriptor_count() < descriptors)


async def test_execution_that_fails_leaves_nothing_for_the_garbage_collector(served: Any, small: Any) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    mappings = mapping_count()
    with no_garbage_collection():
        for _ in range(5):
            with pytest.raises(MissedDeadline):
                await prepared.execute_synchronously(small.Sum().request, deadline_ns=1)
        await settled(lambda: mapping_count() <= mappings)
    await client.aclose()


async def test_clients_that_are_cut_off_cost_one_collection_together(
    served: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "ABANDONED_S", 0.0)
    clients = []
    for _ in range(20):
        raw = await served.raw().hello()
        clients.append((raw, await prepare(raw, small.sum_model())))
    with no_garbage_collection() as collections:
        async with busy(served.device):
            for raw, prepared in clients:
                body = Execute(prepared, RequestOnWire.of(small.Sum().request), False, None, None)
                payload, fds, keep = encode(Call(3, body))
                socket.send_fds(raw.sock, [payload], fds)
                del body, keep
            await settled(lambda: served.device.gate.waiting_count == len(clients))
            for raw, _ in clients:
                raw.close()
            (await served.raw().hello()).close()  # By its answer the others' ends were noticed.
        await settled(lambda: collections[2] > 0)
        assert collections[2] == 1


@pytest.mark.parametrize("leaves", ["a launched execution", "a question to itself"])
async def test_client_that_goes_in_the_middle_of_something_is_collected_after(
    served: Any, small: Any, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    monkeypatch.setattr(host, "ABANDONED_S", 0.0)
    raw = await served.raw().hello()
    prepared = await prepare(raw, small.sum_model())
    request = RequestOnWire.of(small.Sum().request)
    with no_garbage_collection() as collections:
        async with busy(served.device):
            if leaves == "a launched execution":
                await raw.ask(3, Launch(1, prepared, request, False, None, None))
            else:
                unknown = msgspec.structs.replace(request, pools=(PoolOnWire(None, 0, 99),))
                payload, _, _ = encode(Call(3, Execute(prepared, unknown, False, None, None)))
                raw.sock.send(payload)
                question = decode(await raw.receive(), [])
                assert isinstance(question, Call) and isinstance(question.body, RecallMemories)
            raw.close()
            await settled(lambda: collections[2] > 0)
