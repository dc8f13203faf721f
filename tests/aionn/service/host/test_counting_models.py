"""What a client's models count as in its memory: the count of large ones takes threads, one at a time, and processes take turns."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import anyio
import anyio.lowlevel
import msgspec
import pytest

from aionn.hal import Model, Subgraph
from aionn.hal.callers import Connection
from aionn.service.host import model_sizes
from aionn.testing import models

WAIT_S = 20.0
MODELS = 20
LARGE = models.identity((4,), operations=model_sizes.COUNTED_ON_LOOP_MAX)
LARGER = models.identity((4,), operations=model_sizes.COUNTED_ON_LOOP_MAX + 1)


async def test_large_models_are_counted_one_at_a_time_and_processes_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, entered, may_end = model_sizes._structure_bytes, threading.Event(), threading.Event()
    threads: list[int] = []
    order: list[int] = []

    def halting(graphs: Sequence[Subgraph]) -> int:
        threads.append(threading.get_ident())
        order.append(len(graphs[0].operations) - model_sizes.COUNTED_ON_LOOP_MAX)
        entered.set()
        assert may_end.wait(WAIT_S)
        return count(graphs)

    monkeypatch.setattr(model_sizes, "_structure_bytes", halting)
    counted: list[int] = []

    async def one(model: Model, process: str, client: int) -> None:
        counted.append(await model_sizes.model_bytes(model, Connection(process, client)))

    async with anyio.create_task_group() as tasks:
        for number in range(MODELS):
            tasks.start_soon(one, LARGE, "flood", number)
        try:
            while not entered.is_set():
                await anyio.lowlevel.checkpoint()
            tasks.start_soon(one, LARGER, "other", 0)
            await anyio.wait_all_tasks_blocked()
            assert model_sizes._countings.waiting_count == MODELS
            assert len(threads) == 1
        finally:
            may_end.set()
    assert threading.get_ident() not in threads
    assert order == [0, 0, 1] + [0] * (MODELS - 2)
    sizes = {count((model.main,)) + len(model.operand_values) for model in (LARGE, LARGER)}
    assert len(counted) == MODELS + 1 and set(counted) == sizes


def test_data_of_operands_counts() -> None:
    main = LARGE.main
    wide = msgspec.structs.replace(main.operands[0], extension_data=bytes(1000))
    more = msgspec.structs.replace(main, operands=(wide, *main.operands[1:]))
    assert model_sizes._structure_bytes([more]) == model_sizes._structure_bytes([main]) + 1000
