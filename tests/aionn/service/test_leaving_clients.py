"""Clients that leave, or stop answering, in the middle of something: what was theirs goes, and nobody else waits for them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

import fmq
from aionn.burst.packets import encode_request
from aionn.hal import ExecutionPreference, Priority
from aionn.service.handles import QueueHandle
from aionn.service.protocol import (
    Call,
    ConfigureBurst,
    ConfigureBurstReply,
    Done,
    EndBurst,
    GetMemories,
    PrepareModel,
    PrepareModelReply,
    Reply,
    decode,
    encode,
)

SETTLED_S_MAX = 10.0


async def settled(is_so: Any) -> None:
    """Waits for what another task or thread brings about."""
    with anyio.fail_after(SETTLED_S_MAX):
        while not is_so():
            await anyio.sleep(0.005)


def listeners() -> int:
    return sum(thread.name.startswith("aionn-burst-") for thread in threading.enumerate())


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
    gate = served.device.gate.slot(2, None)
    workers = anyio.to_thread.current_default_thread_limiter()
    await anyio.to_thread.run_sync(gate.__enter__)  # The device is busy with somebody else's work.
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(burst.execute_synchronously, small.Sum().request, [0])
        await settled(lambda: served.device.gate.waiting_count == 1)
        ending = anyio.Event()

        async def end() -> None:
            ending.set()
            await client._connection.channel.tell(EndBurst(next(iter(client._connection.bursts))))

        tasks.start_soon(end)
        await ending.wait()
        await prepared.connection.channel.tell(EndBurst(0))  # By its answer the call before it was taken up.
        assert workers.borrowed_tokens == 0
        gate.__exit__(None, None, None)
    await burst.aclose()
    await client.aclose()
