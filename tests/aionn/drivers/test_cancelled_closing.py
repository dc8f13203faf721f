"""A device that is closed by a task that is cancelled has ended what runs, and its threads, before the cancellation is raised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aionn.drivers.kit.threads.calls import run_on_gate
from aionn.drivers.reference import ReferenceDevice
from aionn.drivers.simulated.driver import SimulatedDevice
from aionn.hal import Priority
from fences import SyncFence
from tests.support.cancellation import NATIVE_COUNTS, WATCHDOG_S, cancelled_natively


@pytest.mark.parametrize("count", NATIVE_COUNTS)
async def test_device_on_the_loop_awaits_its_tasks(count: int) -> None:
    device = SimulatedDevice("phone-npu")
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append("ended")

    outcome: list[Any] = []
    device.start(work(), outcome.append)
    await asyncio.sleep(0)
    await cancelled_natively(device.aclose(), count)
    assert ended == ["ended"]
    assert not device._tasks


@pytest.mark.parametrize("count", NATIVE_COUNTS)
async def test_device_with_threads_joins_them(count: int) -> None:
    before = set(threading.enumerate())
    device = ReferenceDevice()
    began, go_on = SyncFence("began"), threading.Event()

    def run(_: Callable[[], bool]) -> None:
        began.signal()
        assert go_on.wait(WATCHDOG_S)

    work = asyncio.create_task(run_on_gate(device.gate, Priority.MEDIUM, None, run))
    await began
    is_closed = False

    async def end_work() -> bool:
        for _ in range(20):
            await asyncio.sleep(0)
        was_closed = is_closed
        go_on.set()
        return was_closed

    ending = asyncio.create_task(end_work())
    await cancelled_natively(device.aclose(), count)
    is_closed = True
    assert set(threading.enumerate()) <= before
    assert not await ending, "it was closed before its work had ended"
    await work
