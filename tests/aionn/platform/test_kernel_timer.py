"""Waits without a timer of the event loop."""

from __future__ import annotations

import asyncio
import os
import time

import anyio
import anyio.lowlevel
import pytest

from aionn.platform import kernel_timer
from aionn.platform.kernel_timer import sleep_beside_executions
from aionn.testing import VirtualClock
from aionn.testing.clock import run

WATCHDOG_S = 30


async def timers() -> int:
    return len(asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]


async def test_a_wait_sets_no_timer_of_the_loop_and_takes_its_time() -> None:
    descriptors = sorted(os.listdir("/proc/self/fd"))
    began_s = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sleep_beside_executions, 0.02)
        before = await timers()
        await anyio.lowlevel.checkpoint()
        assert await timers() == before
    assert time.monotonic() - began_s >= 0.02
    assert sorted(os.listdir("/proc/self/fd")) == descriptors


async def test_a_cancelled_wait_leaves_no_descriptor() -> None:
    descriptors = sorted(os.listdir("/proc/self/fd"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sleep_beside_executions, 3600.0)
        await anyio.lowlevel.checkpoint()
        assert len(os.listdir("/proc/self/fd")) == len(descriptors) + 1
        tasks.cancel_scope.cancel()
    assert sorted(os.listdir("/proc/self/fd")) == descriptors


async def test_without_a_descriptor_it_waits_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(seconds: float) -> int:
        raise OSError("planted")

    monkeypatch.setattr(kernel_timer, "_timer", full)
    began_s = time.monotonic()
    await sleep_beside_executions(0.01)
    assert time.monotonic() - began_s >= 0.01
    await sleep_beside_executions(0.0)


def test_virtual_time_passes_for_it() -> None:
    clock = VirtualClock()

    async def main() -> float:
        await sleep_beside_executions(3600.0)
        return clock.now

    assert run(main, clock=clock) == 3600.0
