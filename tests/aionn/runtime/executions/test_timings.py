"""Measured from the launch and from the last fence: what counts where, in virtual time."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import numpy as np
import pytest

import aionn
from aionn import blocking
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import NO_TIMING, Timing
from aionn.testing import SimulatedDevice, VirtualClock, models, run
from fences import SyncFence, merge

X = np.array([1.5, -2.5, 3.0, 4.0], np.float32)
MS = 1_000_000
RUN_MS = 20


def play(main: Callable[[aionn.Compilation], Awaitable[None]]) -> None:
    """Runs it over a device that takes RUN_MS for everything."""

    async def all_of_it() -> None:
        device = SimulatedDevice("npu", run_time_s=RUN_MS / 1000, results="zeros")
        async with aionn.open(devices=[device]) as runtime:
            await main(await runtime.compile(models.identity((4,))))

    run(all_of_it, clock=VirtualClock(start_s=3.0))  # Not at 0, where a difference is a sum.


def times_ms(result: aionn.Result) -> tuple[list[float], list[float], float]:
    """On the device and in the driver from the launch; the same from the last fence; the wait for the fences."""
    pairs = []
    for timing in (result.timing, result.fenced):
        assert timing.time_on_device_ns is not None and timing.time_in_driver_ns is not None
        pairs.append([timing.time_on_device_ns / MS, timing.time_in_driver_ns / MS])
    return pairs[0], pairs[1], result.dependencies_ns / MS


def test_time_from_the_launch_has_the_wait_for_the_last_fence_in_it() -> None:
    async def main(net: aionn.Compilation) -> None:
        fences = [SyncFence("camera"), SyncFence("gyroscope")]
        execution = net.execute_fenced([X], wait_for=fences, measure=True)
        await anyio.sleep(0.003)
        fences[1].signal()
        await anyio.sleep(0.004)
        fences[0].signal()
        assert times_ms(await execution) == ([RUN_MS, RUN_MS + 7], [RUN_MS, RUN_MS], 7)

    play(main)


@pytest.mark.parametrize("has_signalled", [False, True])
def test_without_a_wait_both_are_equal(has_signalled: bool) -> None:
    async def main(net: aionn.Compilation) -> None:
        fence = SyncFence("earlier")
        fence.signal()
        execution = net.execute_fenced([X], wait_for=[fence] if has_signalled else [], measure=True)
        assert times_ms(await execution) == ([RUN_MS, RUN_MS], [RUN_MS, RUN_MS], 0)
        result = await net.execute([X], measure=True)
        assert times_ms(result) == ([RUN_MS, RUN_MS], [RUN_MS, RUN_MS], 0)

    play(main)


def test_waiting_for_the_slot_is_in_neither() -> None:
    async def main(net: aionn.Compilation) -> None:
        holder = net.execute_fenced([X])
        fence = SyncFence("camera")
        execution = net.execute_fenced([X], wait_for=[fence], measure=True)
        await anyio.sleep(0.005)
        fence.signal()
        result = await execution
        assert times_ms(result) == ([RUN_MS, RUN_MS + 5], [RUN_MS, RUN_MS], 5)
        assert (result.queued_ns, result.total_ns) == (RUN_MS * MS, 2 * RUN_MS * MS)
        await holder

    play(main)


def test_chain_counts_what_each_waited_for() -> None:
    async def main(net: aionn.Compilation) -> None:
        first = net.execute_fenced([X], measure=True)
        second = net.execute_fenced([X], wait_for=[merge([first.fence])], measure=True)
        third = net.execute_fenced([X], wait_for=[second.fence], measure=True)
        waited = [times_ms(await execution) for execution in (first, second, third)]
        assert waited == [([RUN_MS, RUN_MS * n], [RUN_MS, RUN_MS], RUN_MS * (n - 1)) for n in (1, 2, 3)]

    play(main)


def test_unmeasured_has_no_timings_but_the_wait() -> None:
    async def main(net: aionn.Compilation) -> None:
        fence = SyncFence("camera")
        execution = net.execute_fenced([X], wait_for=[fence])
        await anyio.sleep(0.005)
        fence.signal()
        result = await execution
        assert result.timing == result.fenced == NO_TIMING and result.dependencies_ns == 5 * MS

    play(main)


def test_device_that_tells_one_time_has_only_that() -> None:
    assert aionn.Result((), Timing(3, None), dependencies_ns=5).fenced == Timing(3, None)
    assert aionn.Result((), Timing(None, 8), dependencies_ns=5).fenced == Timing(None, 3)


def test_blocking_result_has_both(digits: Path) -> None:
    silence = np.zeros((1, 49, 40, 1), np.float32)
    with (
        blocking.open(drivers=["reference"], isolation="in_process") as runtime,
        runtime.compile(digits) as net,
    ):
        first = net.execute_fenced([silence])
        second = net.execute_fenced([silence], wait_for=[first.fence], measure=True).result()
        launched, fenced = second.timing, second.fenced
        assert launched.time_on_device_ns == fenced.time_on_device_ns
        assert launched.time_in_driver_ns is not None and fenced.time_in_driver_ns is not None
        assert launched.time_in_driver_ns - fenced.time_in_driver_ns == second.dependencies_ns


async def test_what_was_learnt_of_a_compilation_goes_with_it() -> None:
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        (device,) = runtime.devices
        assert isinstance(device.hal, ReferenceDevice)
        gate = device.hal.gate

        async def use() -> None:
            async with await runtime.compile(models.identity((4,))) as net:
                async with anyio.create_task_group() as tasks:
                    for _ in range(4):  # The driver learns from what had to wait.
                        tasks.start_soon(net.execute, [X])
                async with net.burst() as burst:
                    await burst.execute([X])
                assert dispatcher.learnt_count == 2

        dispatcher = device.dispatcher
        for _ in range(3):
            await use()
            gc.collect()
            assert (dispatcher.learnt_count, gate.learnt_count) == (0, 0)


async def test_driver_forgets_how_long_a_prepared_model_took() -> None:
    device = ReferenceDevice()
    try:
        prepared = await device.prepare_model(models.identity((4,)))
        device.gate._slots._estimates.observe(prepared.identity, 1000)
        assert device.gate.learnt_count == 1
        await prepared.aclose()
        del prepared
        gc.collect()
        assert device.gate.learnt_count == 0
    finally:
        await device.aclose()
