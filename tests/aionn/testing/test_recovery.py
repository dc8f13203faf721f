"""Recovery of simulated devices under virtual time: which execution waits for how long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy as np

import aionn
from aionn.testing import SimulatedDevice, VirtualClock, models, run, scripted

X = np.ones(4, np.float32)
MS = 1_000_000


def test_frames_of_a_stream_are_lost_and_dropped_and_go_on_at_the_same_times_each_run() -> None:
    assert trial() == trial()


def trial() -> list[tuple[str, float]]:
    clock = VirtualClock()
    device = SimulatedDevice("npu", run_time_s=0.010, results="zeros", script=scripted({2: "death"}))
    ends: list[tuple[str, float]] = []

    async def frames() -> AsyncIterator[Any]:
        for _ in range(8):
            await anyio.sleep(0.020)
            yield X

    async def main() -> None:
        async with aionn.open(devices=[device], isolation="in_process") as runtime:
            net = await runtime.compile(models.identity((4,)), recover=True)
            async with net.burst(slots=2) as burst:
                stream = burst.stream(frames(), deadline=lambda item: clock.after(0.015))
                ends.extend([(r.status, round(r.finished_ns / MS, 3)) async for r in stream])
            assert net.recoveries == 1

    run(main, clock=clock)
    statuses = [status for status, _ in ends]
    assert statuses == ["on_time", "on_time", "lost", *["on_time"] * 5]
    return ends
