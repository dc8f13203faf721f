"""What a client's models count as in its memory: the count of large ones takes threads, and no more than one at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import anyio
import anyio.lowlevel
import pytest

from aionn.hal import Subgraph
from aionn.service.host import session
from aionn.testing import models

WAIT_S = 20.0
MODELS = 20
LARGE = models.identity((4,), operations=session.COUNTED_ON_LOOP_MAX)


async def test_large_models_are_counted_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    count, entered, may_end = session._structure_bytes, threading.Event(), threading.Event()
    threads: list[int] = []

    def halting(graphs: Sequence[Subgraph]) -> int:
        threads.append(threading.get_ident())
        entered.set()
        assert may_end.wait(WAIT_S)
        return count(graphs)

    monkeypatch.setattr(session, "_structure_bytes", halting)
    counted: list[int] = []

    async def one() -> None:
        counted.append(await session._model_bytes(LARGE))

    async with anyio.create_task_group() as tasks:
        for _ in range(MODELS):
            tasks.start_soon(one)
        try:
            while not entered.is_set():
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            limiter = session._countings.get()
            assert limiter.borrowed_tokens == 1 and limiter.statistics().tasks_waiting == MODELS - 1
            assert len(threads) == 1
        finally:
            may_end.set()
    assert threading.get_ident() not in threads
    assert counted == MODELS * [count((LARGE.main,)) + len(LARGE.operand_values)]
