"""Descriptors that a server opens for a client, for bursts and fenced executions: as many count as are open, and no longer."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import anyio.from_thread
import pytest

import fmq
from aionn.burst.server import BurstServer
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import InvalidArgument, ResourceExhausted
from aionn.hal import ExecutionPreference, Priority
from aionn.service.host.session import Session
from aionn.service.progress import Progress
from aionn.service.wire.handles import QueueHandle, RequestOnWire
from aionn.service.wire.protocol import (
    PROTOCOL_VERSION,
    ConfigureBurst,
    EndBurst,
    ExecuteFenced,
    FreePreparedModel,
    Hello,
    PrepareModel,
)
from aionn.service.wire.quotas import Quotas, Share, SharedDescriptors
from fences import FenceError, SyncFence
from tests.aionn.service.closing import until_closed

ANSWER_S_MAX = 30.0
COUNT = 1200
OF_A_BURST = 8
OF_AN_OUTCOME = 2


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def fenced(prepared: int, work: Any, wait_for: SyncFence) -> ExecuteFenced:
    return ExecuteFenced(prepared, RequestOnWire.of(work.request), (wait_for,), False, None, None, None)


class Client:
    """A client whose calls are handled in this process, and what it takes from a server's descriptors."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.shared = SharedDescriptors(COUNT)
        session.account.share = Share(self.shared, "user", "process")
        self.prepared = 0
        self._before = 0

    async def ask(self, body: Any) -> Any:
        channel: Any = None
        return await self.session.handle(body, channel)

    async def prepare(self, model: Any) -> None:
        await self.ask(Hello(PROTOCOL_VERSION))
        body = PrepareModel(model, ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None)
        self.prepared = (await self.ask(body)).prepared

    def begin_count(self) -> None:
        gc.collect()
        until_closed()
        self._before = open_descriptors()

    def counted(self) -> int:
        """Those that count, which are those that are open since ``begin_count``, for the connection and for its process."""
        gc.collect()
        until_closed()
        count = self.session.account.taken("descriptors")
        assert open_descriptors() - self._before == count
        with self.shared._lock:
            self.shared._settle()
            assert self.shared._shares.taken == count
        return count

    async def launch(self, work: Any, wait_for: SyncFence) -> SyncFence:
        """The outcome of a fenced execution, as it is sent."""
        reply = await self.ask(fenced(self.prepared, work, wait_for))
        assert isinstance(reply.fence, SyncFence)
        _, number = reply.fence.export()
        assert number is not None
        os.close(number)
        return reply.fence


@contextlib.asynccontextmanager
async def connected(small: Any) -> AsyncIterator[Client]:
    device = ReferenceDevice()
    async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
        session = Session(device, portal, tasks, quotas=Quotas(), progress=Progress(None))
        made = Client(session)
        await made.prepare(small.sum_model())
        yield made
        await session.aclose()
    await device.aclose()


@contextlib.contextmanager
def queues(*, has_own_ring: bool = False) -> Iterator[tuple[QueueHandle, QueueHandle]]:
    with contextlib.ExitStack() as stack:
        ring = None
        if has_own_ring:
            with fmq.MessageQueue.create(1, 1 << 12) as other:
                ring = os.dup(other.fds[0])
            stack.callback(os.close, ring)
        made = [stack.enter_context(fmq.MessageQueue.create(1, 1 << 12, ring_fd=ring)) for _ in range(2)]
        requests, results = (QueueHandle(queue.descriptor, queue.fds) for queue in made)
        yield requests, results


@pytest.mark.parametrize("how", ["ended", "model freed", "connection ended"])
@pytest.mark.parametrize("has_own_ring", [False, True])
async def test_burst_counts_what_it_has_open_until_it_ends(small: Any, has_own_ring: bool, how: str) -> None:
    async with connected(small) as client:
        with queues(has_own_ring=has_own_ring) as pair:
            client.begin_count()
            burst = (await client.ask(ConfigureBurst(client.prepared, *pair))).burst
            # For each queue a ring of its own is one more descriptor, and one more mapping.
            assert client.counted() == OF_A_BURST + (4 if has_own_ring else 0)
            match how:
                case "ended":
                    await client.ask(EndBurst(burst))
                case "model freed":
                    await client.ask(FreePreparedModel(client.prepared))
                case _:
                    await client.session.aclose()
            assert client.counted() == 0


def no_thread(server: BurstServer) -> None:
    raise RuntimeError("planted")


async def test_burst_that_cannot_start_counts_nothing(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(small) as client:
        with queues() as (requests, results):
            client.begin_count()
            memory, reader, _ = results.fds
            wrong = QueueHandle(results.descriptor, (memory, reader, memory))
            with pytest.raises(InvalidArgument, match="cannot be used"):
                await client.ask(ConfigureBurst(client.prepared, requests, wrong))
            del wrong
            assert client.counted() == 0
            with monkeypatch.context() as patch:
                patch.setattr(BurstServer, "start", no_thread)
                with pytest.raises(ResourceExhausted, match="no thread"):
                    await client.ask(ConfigureBurst(client.prepared, requests, results))
            assert client.counted() == 0


async def test_burst_for_which_too_few_are_left_counts_nothing_and_opens_nothing(small: Any) -> None:
    async with connected(small) as client:
        with queues() as (requests, results):
            client.begin_count()
            with pytest.raises(
                ResourceExhausted, match="this process has 296 and its user 296 of 1200"
            ) as caught:
                for _ in range(COUNT):
                    await client.ask(ConfigureBurst(client.prepared, requests, results))
            assert caught.value.transient
            assert client.counted() == OF_A_BURST * client.session.account.taken("bursts")
            await client.ask(EndBurst(1))
            await client.ask(ConfigureBurst(client.prepared, requests, results))
            await client.session.aclose()
            assert client.counted() == 0


async def test_fenced_execution_counts_both_ends_of_its_fence_while_it_is_pending(small: Any) -> None:
    async with connected(small) as client:
        account = client.session.account
        gates, works = [SyncFence() for _ in range(3)], [small.Sum() for _ in range(3)]
        client.begin_count()
        outcomes = [await client.launch(*each) for each in zip(works, gates, strict=True)]
        assert client.counted() == 3 * OF_AN_OUTCOME
        gates[0].signal()
        with anyio.fail_after(ANSWER_S_MAX):
            await outcomes[0]
        assert works[0].is_right and client.counted() == 2 * OF_AN_OUTCOME
        gates[1].fail("planted")
        with anyio.fail_after(ANSWER_S_MAX), pytest.raises(FenceError):
            await outcomes[1]
        assert client.counted() == OF_AN_OUTCOME
        assert account.taken("fenced") == 3
        await client.session.aclose()
        with anyio.fail_after(ANSWER_S_MAX), pytest.raises(FenceError):
            await outcomes[2]
        assert client.counted() == 0


async def test_fenced_execution_that_cannot_start_counts_nothing(small: Any) -> None:
    async with connected(small) as client:
        body = fenced(client.prepared + 1, small.Sum(), SyncFence())
        with pytest.raises(InvalidArgument, match="no prepared model"):
            await client.ask(body)
        assert client.session.account.taken("descriptors") == 0


async def test_fenced_execution_that_may_begin_at_once_counts_nothing_when_it_is_over(small: Any) -> None:
    async with connected(small) as client:
        reply = await client.ask(fenced(client.prepared, small.Sum(), SyncFence.signalled()))
        if reply.fence is not None:
            with anyio.fail_after(ANSWER_S_MAX):
                await reply.fence
        assert client.session.account.taken("descriptors") == 0
