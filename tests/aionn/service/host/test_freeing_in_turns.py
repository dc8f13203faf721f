"""The objects of a client that has gone are freed a few at a time: their number does not matter to other clients."""

from __future__ import annotations

import itertools
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from aionn.drivers.reference import ReferenceDevice
from aionn.errors import InvalidArgument
from aionn.hal import ExecutionPreference, Priority
from aionn.service.host.session import FREED_PER_TURN, Session
from aionn.service.progress import Progress
from aionn.service.wire.handles import RequestOnWire
from aionn.service.wire.protocol import PROTOCOL_VERSION, ExecuteFenced, Hello, PrepareModel
from aionn.service.wire.quotas import Quotas
from fences import SyncFence

EXECUTIONS = 60
FENCES = 4


async def test_fences_and_fenced_executions_are_freed_a_few_in_each_turn_of_the_loop(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, turn_of_fence, close = 0, dict[SyncFence, int](), SyncFence.close
    left: list[int] = []
    kept: list[SyncFence] = []

    def closed(fence: SyncFence) -> None:
        if fence in kept:
            turn_of_fence.setdefault(fence, turn)
        close(fence)

    async def count(session: Session) -> None:
        nonlocal turn
        while session._fenced:
            turn += 1
            left.append(len(session._fenced))
            await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(SyncFence, "close", closed)
    channel: Any = None
    device = ReferenceDevice()
    async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
        quotas = Quotas(executions=EXECUTIONS, fenced=EXECUTIONS)
        session = Session(device, portal, tasks, quotas=quotas, progress=Progress(None))
        await session.handle(Hello(PROTOCOL_VERSION), channel)
        prepare = PrepareModel(
            small.sum_model(), ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None
        )
        reply: Any = await session.handle(prepare, channel)
        request = RequestOnWire.of(small.Sum().request)
        for _ in range(EXECUTIONS):
            fences = tuple(SyncFence("hostile") for _ in range(FENCES))
            kept.extend(fences)
            await session.handle(
                ExecuteFenced(reply.prepared, request, fences, False, None, None, None), channel
            )
        tasks.start_soon(count, session)
        await session.aclose()
        with pytest.raises(InvalidArgument):
            session._prepared_model(reply.prepared)
    await device.aclose()
    turns = list(turn_of_fence.values())
    assert len(turns) == EXECUTIONS * FENCES
    assert max(turns.count(number) for number in set(turns)) <= FREED_PER_TURN
    assert max(before - after for before, after in itertools.pairwise(left)) <= FREED_PER_TURN
