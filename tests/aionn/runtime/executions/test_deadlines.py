"""Every wait on the way of an execution ends at its deadline: each is blocked in turn, for good."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import numpy as np
import pytest

import aionn
import fmq
import fmq.aio
from aionn.conformance.vts.models import endless_model
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import uniform_capabilities
from aionn.runtime.background import Background
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.executions import plan_in_use
from aionn.runtime.placement import caching, planning
from aionn.runtime.placement import fallback as fallback_module
from aionn.service.client.device import RemoteDevice
from aionn.service.wire.protocol import Ping
from aionn.testing.models import identity
from fences import SyncFence
from tests.aionn.scheduler.table import acquire

ONE = np.ones(1, np.float32)
LIMIT_S = 8.0
"""Far beyond the deadlines, and well before anything else ends: a loop's time-out is set to 15 s."""


class Bench:
    """A runtime with a driver process, and what is executed there."""

    def __init__(self, runtime: aionn.Runtime, net: aionn.Compilation, burst: aionn.Burst) -> None:
        self.runtime = runtime
        self.net = net
        self.burst = burst

    @property
    def device(self) -> RuntimeDevice:
        return self.runtime.devices[0]

    @property
    def connection(self) -> Any:
        hal = self.device.hal
        assert isinstance(hal, RemoteDevice)
        return hal._connection

    @contextlib.contextmanager
    def stopped(self) -> Any:
        """The driver process does not run meanwhile."""
        pid = self.device.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with aionn.open(drivers=["reference"]) as runtime:
        net = await runtime.compile(endless_model())
        async with net.burst(slots=1) as burst:
            yield Bench(runtime, net, burst)


Call = Callable[[Bench, int], Awaitable[object]]


async def execute(bench: Bench, deadline: int) -> object:
    return await bench.net.execute([-ONE], deadline=deadline)


async def execute_fenced(bench: Bench, deadline: int) -> object:
    return await bench.net.execute_fenced([-ONE], deadline=deadline)


async def execute_after_a_fence(bench: Bench, deadline: int) -> object:
    return await bench.net.execute_fenced([-ONE], wait_for=[SyncFence.signalled()], deadline=deadline)


async def execute_in_a_burst(bench: Bench, deadline: int) -> object:
    return await bench.burst.execute([-ONE], deadline=deadline)


async def execute_again(bench: Bench, deadline: int) -> object:
    again = bench.net.reusable()
    again.inputs[0][...] = -1
    return await again.execute(deadline=deadline)


CALLS: list[Call] = [execute, execute_fenced, execute_after_a_fence, execute_in_a_burst, execute_again]


async def told_at_the_deadline(call: Call, bench: Bench) -> None:
    deadline = aionn.after(0.05)
    with anyio.fail_after(LIMIT_S), pytest.raises(aionn.MissedDeadline):
        await call(bench, deadline)
    assert aionn.after(0) >= deadline - 1_000_000


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
async def test_wait_for_the_devices_slot(bench: Bench, call: Call) -> None:
    work = await acquire(bench.device.dispatcher, priority=aionn.Priority.HIGH, deadline_ns=None)
    await told_at_the_deadline(call, bench)
    bench.device.dispatcher.release(work)
    assert (await bench.net.execute([-ONE])).outputs[0] == -1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
async def test_wait_for_a_driver_process_that_is_stopped(bench: Bench, call: Call) -> None:
    with bench.stopped():
        await told_at_the_deadline(call, bench)
    with anyio.fail_after(LIMIT_S):
        assert (await bench.net.execute([-ONE])).outputs[0] == -1


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "call", [c for c in CALLS if c is not execute_in_a_burst], ids=lambda call: call.__name__
)
async def test_wait_for_room_in_the_drivers_socket(bench: Bench, call: Call) -> None:
    channel = bench.connection.channel
    with bench.stopped():
        while not len(channel._outbox):
            channel.post(Ping())
        await told_at_the_deadline(call, bench)
    with anyio.fail_after(LIMIT_S):
        assert (await bench.net.execute([-ONE])).outputs[0] == -1


async def test_wait_for_fences(bench: Bench) -> None:
    never = SyncFence()

    async def call(bench: Bench, deadline: int) -> object:
        return await bench.net.execute_fenced([-ONE], wait_for=[never], deadline=deadline)

    await told_at_the_deadline(call, bench)
    assert never.waiter_count == 0
    execution = bench.net.execute_fenced([-ONE], wait_for=[never])
    await anyio.lowlevel.checkpoint()
    assert never.waiter_count == 1
    execution.cancel()
    with pytest.raises(aionn.errors.ExecutionCancelled):
        await execution
    await anyio.lowlevel.checkpoint()
    assert never.waiter_count == 0
    never.signal()


async def test_wait_for_a_slot_of_the_burst(bench: Bench) -> None:
    async def one() -> AsyncIterator[Any]:
        yield -ONE

    async with bench.burst.stream(one()) as results:
        await anext(results)  # It has the only slot until the next result is asked for.
        await told_at_the_deadline(execute_in_a_burst, bench)
    assert (await bench.burst.execute([-ONE])).outputs[0] == -1


@pytest.mark.parametrize("call", [execute, execute_fenced], ids=lambda call: call.__name__)
async def test_wait_until_memory_is_filled(bench: Bench, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    async def for_ever(fill: object) -> Any:
        await anyio.sleep_forever()

    monkeypatch.setattr(plan_in_use, "NEW_BYTES_IN_LOOP_MAX", -1)
    monkeypatch.setattr(plan_in_use, "COPIED_BYTES_IN_LOOP_MAX", -1)
    monkeypatch.setattr(plan_in_use, "_on_thread", for_ever)
    await told_at_the_deadline(call, bench)


async def test_wait_for_the_fallback_to_be_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = anyio.Event()

    async def for_ever(self: object, step: int) -> Any:
        asked.set()
        await anyio.sleep_forever()

    monkeypatch.setattr(fallback_module.Fallback, "prepared", for_ever)

    def fail(*args: Any, **told: Any) -> Any:
        raise aionn.GeneralFailure("broken")

    first = ReferenceDevice("first")
    first.info = msgspec.structs.replace(first.info, capabilities=uniform_capabilities(0.5, 0.5))
    async with aionn.open(drivers=["reference"], isolation="in_process", devices=[first]) as runtime:
        net = await runtime.compile(identity(), allow_fallback=True)
        (step,) = net._plan.steps
        assert step.device.name == "first"
        monkeypatch.setattr(step.prepared, "launch", fail)
        with anyio.fail_after(LIMIT_S), pytest.raises(aionn.MissedDeadline):
            await net.execute([-ONE], deadline=aionn.after(0.1))
        assert asked.is_set()


async def test_compilation_waits_for_a_stopped_driver_process_until_its_deadline(bench: Bench) -> None:
    with bench.stopped(), anyio.fail_after(LIMIT_S), pytest.raises(aionn.MissedDeadline) as missed:
        await bench.runtime.compile(endless_model(), deadline=aionn.after(0.1))
    assert missed.value.transient
    with anyio.fail_after(LIMIT_S):
        net = await bench.runtime.compile(endless_model(), deadline=aionn.after(60))
        assert (await net.execute([-ONE])).outputs[0] == -1


async def test_compilation_waits_for_a_restart_until_its_deadline(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hal = bench.device.hal
    assert isinstance(hal, RemoteDevice)
    pid = bench.device.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with anyio.fail_after(LIMIT_S):
        while bench.device.pid is not None:
            await anyio.lowlevel.checkpoint()

    async def for_ever() -> None:
        await anyio.sleep_forever()

    with monkeypatch.context() as patched:
        patched.setattr(hal, "_pause", for_ever)
        with anyio.fail_after(LIMIT_S), pytest.raises(aionn.MissedDeadline):
            await bench.runtime.compile(endless_model(), deadline=aionn.after(0.05))
    net = await bench.runtime.compile(endless_model(), deadline=aionn.after(60))
    assert (await net.execute([-ONE])).outputs[0] == -1


@pytest.mark.parametrize("is_cached", [False, True])
async def test_compilation_ends_at_its_deadline_while_a_file_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, digits: Path, is_cached: bool
) -> None:
    """The import of a large file takes seconds, and so does its digest where the disk is slow."""
    free, left = threading.Event(), threading.Event()
    module, name = (caching, "_digest") if is_cached else (planning, "load_file")
    real = getattr(module, name)

    def reading(*arguments: Any) -> Any:
        free.wait(3 * LIMIT_S)
        left.set()
        return real(*arguments)

    monkeypatch.setattr(module, name, reading)
    cache_dir = tmp_path / "cache" if is_cached else None
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        with anyio.fail_after(LIMIT_S), pytest.raises(aionn.MissedDeadline):
            await runtime.compile(digits, cache_dir=cache_dir, deadline=aionn.after(0.05))
        assert not left.is_set()
        free.set()
        net = await runtime.compile(digits, cache_dir=cache_dir)
        assert await anyio.to_thread.run_sync(left.wait, LIMIT_S)
        await net.aclose()


class Reading:
    """A launch that ends with a message that never comes."""

    is_done = False

    def __init__(self, queue: fmq.MessageQueue) -> None:
        self._queue = queue

    def __await__(self) -> Any:
        return fmq.aio.read_message(self._queue).__await__()


async def test_deadline_in_one_turn_with_a_cancelled_scope_leaves_that_to_the_scope() -> None:
    """A wait for a queue is no future, so anyio cancels it although the deadline has: asyncio raises one error for both."""
    background, loop = Background(), asyncio.get_running_loop()
    await background.start()
    with fmq.MessageQueue.create(1, 1 << 12) as queue:
        passed_s = loop.time() - 1
        for scope_first in (False, True):
            with anyio.fail_after(LIMIT_S), anyio.CancelScope() as scope:
                # Both have passed, so the next turn calls them, in the order of their times.
                loop.call_at(passed_s - (0.5 if scope_first else -0.5), scope.cancel)
                launch: Any = Reading(queue)
                await background.in_time(int(passed_s * 1e9), launch, lambda: "late")
            assert scope.cancelled_caught
            task = asyncio.current_task()
            assert task is not None and task.cancelling() == 0
    await background.aclose()
