"""Executions in the caller's own task: what is left when the caller goes away, and what a log tells."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import numpy as np
import pytest

import aionn
from aionn.conformance.vts.models import endless_model
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import qos

ONE = np.ones(1, np.float32)
LIMIT_S = 30.0


@pytest.fixture
async def runtime(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[aionn.Runtime]:
    """No loop ends by its own time-out here."""
    monkeypatch.setattr(qos, "LOOP_TIMEOUT_DEFAULT_NS", 3600 * 10**9)
    async with aionn.open(devices=[ReferenceDevice("reference")]) as opened:
        yield opened


@pytest.fixture(params=["execute", "burst"])
async def execute(
    runtime: aionn.Runtime, request: pytest.FixtureRequest
) -> AsyncIterator[Callable[[object], Awaitable[aionn.Result]]]:
    net = await runtime.compile(endless_model())
    if request.param == "execute":
        yield lambda value: net.execute([value])
        return
    async with net.burst(slots=1) as burst:
        yield lambda value: burst.execute([value])


async def test_no_task_is_made(execute: Callable[[object], Awaitable[aionn.Result]]) -> None:
    await execute(-ONE)
    made: list[object] = []
    loop = asyncio.get_running_loop()

    def factory(loop: asyncio.AbstractEventLoop, work: object, **told: object) -> asyncio.Task[object]:
        made.append(work)
        return asyncio.Task(work, loop=loop, **told)  # type: ignore[arg-type]

    loop.set_task_factory(factory)
    try:
        await execute(-ONE)
    finally:
        loop.set_task_factory(None)
    assert made == []


async def test_cancelled_one_asks_the_device_to_stop_and_holds_it_until_it_has(
    runtime: aionn.Runtime, execute: Callable[[object], Awaitable[aionn.Result]]
) -> None:
    dispatcher = runtime.devices[0].dispatcher
    with anyio.move_on_after(0.05) as scope:
        await execute(ONE)
    assert scope.cancelled_caught
    assert "free" not in dispatcher.explain(), "the device has not answered yet"
    with anyio.fail_after(LIMIT_S):
        np.testing.assert_array_equal((await execute(-ONE)).outputs[0], -ONE)
    assert "free" in dispatcher.explain()


async def test_memory_of_a_cancelled_one_comes_back(runtime: aionn.Runtime) -> None:
    net = await runtime.compile(endless_model())
    for _ in range(3):
        with anyio.move_on_after(0.02):
            await net.execute([ONE])
    with anyio.fail_after(LIMIT_S):
        await net.execute([-ONE])
    assert 1 <= len(net._areas) <= 3


async def test_ends_are_logged(
    execute: Callable[[object], Awaitable[aionn.Result]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "aionn.execution"):
        await execute(-ONE)
    assert any("on reference, priority MEDIUM: NONE" in record.message for record in caplog.records)
