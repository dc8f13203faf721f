"""What executions cost the event loop: never held for long, nothing left per link of a chain."""

from __future__ import annotations

import os
import time
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import aionn
from aionn.hal import OperationType
from aionn.testing.models import chain
from fences import SyncFence

HOLD_NS_MAX = 1_000_000
LINKS = 1000


class Watchdog:
    """Runs in every turn of the loop, and notes how much processor time the loop's thread took since the last one.

    Processor time, not wall time: what other threads and processes take away is not the loop's doing.
    """

    def __init__(self) -> None:
        self.longest_ns = 0
        self.turns = 0

    async def watch(self) -> None:
        last_ns = time.thread_time_ns()
        while True:
            await anyio.lowlevel.checkpoint()
            now_ns = time.thread_time_ns()
            self.longest_ns = max(self.longest_ns, now_ns - last_ns)
            last_ns = now_ns
            self.turns += 1


@pytest.mark.parametrize("isolation", ["process", "in_process"])
async def test_loop_is_never_held_while_a_large_model_runs(shared: Path, isolation: str) -> None:
    path = shared / "models" / "mobilenet_v2_1.0_224_int8.tflite"
    if not path.exists():
        pytest.skip("the shared models are not beside the repository")
    value = np.zeros((1, 224, 224, 3), np.int8)
    async with aionn.open(drivers=["reference"], isolation=isolation) as runtime:
        net = await runtime.compile(path)
        await net.execute([value])
        async with net.burst() as burst:
            await burst.execute([value])
            watchdog = Watchdog()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watchdog.watch)
                for _ in range(1 if isolation == "in_process" else 5):
                    await net.execute([value])
                    await burst.execute([value])
                tasks.cancel_scope.cancel()
    assert watchdog.turns > 100
    assert watchdog.longest_ns < HOLD_NS_MAX


async def test_chain_of_fenced_executions_over_two_devices() -> None:
    """Each link waits for the one before, on the other device; the last signals after all, and no link takes a descriptor."""
    from aionn.drivers.reference import ReferenceDevice

    order: list[int] = []
    devices = [ReferenceDevice("left"), ReferenceDevice("right")]
    async with aionn.open(devices=devices) as runtime:
        nets = [
            await runtime.compile(chain([OperationType.RELU], (1,)), devices=name)
            for name in ("left", "right")
        ]
        for net in nets:
            await net.execute([np.zeros(1, np.float32)])
        before = len(os.listdir("/proc/self/fd"))
        start = SyncFence("start")
        links: list[aionn.Execution] = []
        fence = start
        for index in range(LINKS):
            x = np.array([index], np.float32)
            link = nets[index % 2].execute_fenced([x], wait_for=[fence])
            link.fence.add_callback(lambda _, index=index: order.append(index))
            links.append(link)
            fence = link.fence
        await anyio.lowlevel.checkpoint()
        assert len(os.listdir("/proc/self/fd")) == before
        assert order == []
        start.signal()
        results = [await link for link in links]
    assert order == list(range(LINKS))
    assert [float(r.outputs[0][0]) for r in results] == list(map(float, range(LINKS)))
    assert {r.device for r in results} == {"left", "right"}


async def test_failed_link_fails_all_that_wait_for_it() -> None:
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(chain([OperationType.RELU], (1,)))
        start = SyncFence("start")
        links = []
        fence = start
        for _ in range(100):
            links.append(net.execute_fenced([np.zeros(1, np.float32)], wait_for=[fence]))
            fence = links[-1].fence
        links[50].cancel()
        start.signal()
        for link in links[:50]:
            await link
        for link in links[50:]:
            with pytest.raises(aionn.GeneralFailure, match=r"cancelled|a fence that it waits for has failed"):
                await link
