"""A runtime that is cancelled while it opens or closes leaves nothing: no task, no process.

With ``asyncio.Task.cancel``, which the shields of anyio do not stop, in each turn of the loop.
"""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Coroutine
from typing import Any

import anyio.lowlevel
import pytest

import aionn
from aionn.hal import OperationType
from aionn.runtime.background import Background
from aionn.service.client.supervisor import DriverProcess
from aionn.testing.models import chain
from tests.support.cancellation import child_processes

TURNS_MAX = 60
"""More turns than opening and closing take in this process."""


def _run_and_collect(main: Coroutine[Any, Any, None]) -> None:
    """Runs to the end of a loop that may cancel tasks before they have begun."""
    with warnings.catch_warnings():
        # In a task of anyio's nobody awaits the coroutine then (4.16). That lies in a cycle: it would warn in another test.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        asyncio.run(main)
        gc.collect()


async def _cancel_until_done(task: asyncio.Task[None]) -> None:
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [1, 2, 5])
async def test_native_cancellation_in_any_turn_leaves_no_task(count: int) -> None:
    async def use() -> None:
        async with aionn.open(drivers=["reference"], isolation="in_process"):
            pass

    before = asyncio.all_tasks()
    for turn in range(TURNS_MAX):
        task = asyncio.create_task(use())
        for _ in range(turn):
            await asyncio.sleep(0)
        for _ in range(count):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([task])
        assert asyncio.all_tasks() == before, f"cancelled in turn {turn}"


async def test_native_cancellation_in_every_turn_of_closing_leaves_no_process() -> None:
    before, tasks = child_processes(), asyncio.all_tasks()
    runtime = aionn.open(drivers=["reference"])
    await runtime.__aenter__()
    async with await runtime.compile(chain([OperationType.RELU], (2,))) as net, net.burst():
        closing = asyncio.create_task(runtime.aclose())
        await asyncio.sleep(0)
        await _cancel_until_done(closing)
    assert child_processes() == before
    assert asyncio.all_tasks() == tasks


async def test_native_cancellation_in_every_turn_of_a_start_leaves_no_process() -> None:
    before = child_processes()

    async def start() -> None:
        await DriverProcess.start("reference", "reference")

    task = asyncio.create_task(start())
    await asyncio.sleep(0)
    await _cancel_until_done(task)
    assert task.cancelled()
    assert child_processes() == before


def test_runtime_that_nobody_closed_ends_with_the_loop() -> None:
    before = child_processes()

    async def main() -> None:
        runtime = await aionn.open(drivers=["reference"]).__aenter__()
        await runtime.device("reference").status()

    asyncio.run(main())
    assert child_processes() == before


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4])
def test_loop_that_ends_during_a_start_leaves_no_process(turns: int) -> None:
    # asyncio.run cancels every task at its end, also those that have not begun.
    before = child_processes()

    async def main() -> None:
        runtime = await aionn.open(drivers=["reference"]).__aenter__()
        starting = asyncio.create_task(runtime.device("reference").status())
        while child_processes() == before:
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not starting.done()

    _run_and_collect(main())
    assert child_processes() == before


@pytest.mark.sampled(4)
@pytest.mark.parametrize("turns", range(8))
def test_loop_that_ends_while_a_connection_begins_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    before, make, has_process = child_processes(), DriverProcess.__init__, False

    def making(self: DriverProcess, *arguments: Any) -> None:
        nonlocal has_process
        has_process = True
        make(self, *arguments)

    monkeypatch.setattr(DriverProcess, "__init__", making)

    async def main() -> None:
        runtime = await aionn.open(drivers=["reference"]).__aenter__()
        starting = asyncio.create_task(runtime.device("reference").status())
        while not has_process:
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not starting.done()

    _run_and_collect(main())
    assert child_processes() == before


async def test_fault_in_a_task_of_the_runtimes_own_is_raised_by_its_closing() -> None:
    async def fails() -> None:
        raise RuntimeError("planted")

    background = Background()
    await background.start()
    background.tasks.start_soon(fails)
    await anyio.lowlevel.checkpoint()
    with pytest.raises(BaseExceptionGroup) as raised:
        await background.aclose()
    assert "planted" in repr(raised.value.exceptions)


async def test_host_that_was_cancelled_is_no_fault() -> None:
    background = Background()
    await background.start()
    assert background._host is not None
    background._host.cancel()
    await background.aclose()
