"""Executions in the caller's own task: what is left when the caller goes away, and what a log tells."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.conformance.vts.models import endless_model
from aionn.drivers.reference import ReferenceDevice, ReferencePreparedModel
from aionn.hal import ExecutionResult, Launch, LaunchBase, Model, OperandType, OperationType, outcome_of, qos
from aionn.models.builder import GraphBuilder
from aionn.runtime.background import Background
from aionn.runtime.executions import burst as burst_module
from aionn.runtime.executions import opened_plan
from aionn.runtime.executions.job import ExecutionJob
from aionn.runtime.executions.opened_plan import job_of

ONE = np.ones(1, np.float32)
LIMIT_S = 30.0


def doubling_model() -> Model:
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_FLOAT32, (1,))
    return g.build([g.result(OperationType.ADD, [x, x, 0], x)])


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


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The arguments of each job that a burst makes."""
    made: list[object] = []

    def counted(*arguments: Any) -> ExecutionJob:
        made.append(arguments)
        return job_of(*arguments)

    for module in (burst_module, opened_plan):
        monkeypatch.setattr(module, "job_of", counted)
    return made


@pytest.fixture(params=["in process", "driver process"])
async def doubling(request: pytest.FixtureRequest) -> AsyncIterator[aionn.Burst]:
    devices = [ReferenceDevice("reference")] if request.param == "in process" else None
    drivers = [] if devices else ["reference"]
    async with aionn.open(drivers=drivers, devices=devices or []) as opened:
        net = await opened.compile(doubling_model(), devices="reference")
        async with net.burst(slots=2) as burst:
            yield burst


async def test_executions_on_an_idle_device_make_no_job(
    doubling: aionn.Burst, jobs: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        await doubling.execute([ONE])
    jobs.clear()
    for deadline in (None, aionn.after(60), None):
        result = await doubling.execute([3 * ONE], deadline=deadline)
        assert result.outputs[0].tolist() == [6.0] and result.total_ns > 0 and not result.fallback
    assert jobs == []
    await doubling.execute([ONE], measure=True)
    with caplog.at_level(logging.DEBUG, logger="aionn.execution"):
        await doubling.execute([ONE])
    assert len(jobs) == 2, "what is measured or logged needs one"


async def test_executions_beside_a_direct_one_all_give_their_results(doubling: aionn.Burst) -> None:
    async with anyio.create_task_group() as tasks:
        results: list[float] = []

        async def one(value: float, priority: aionn.Priority) -> None:
            result = await doubling.execute([value * ONE], priority=priority)
            results.append(float(result.outputs[0][0]))

        for value, priority in ((1.0, "low"), (2.0, "high"), (3.0, "medium")):
            tasks.start_soon(one, value, aionn.Priority[priority.upper()])
    assert sorted(results) == [2.0, 4.0, 6.0]


async def test_driver_that_dies_ends_a_direct_execution_and_leaves_the_burst_free(
    jobs: list[object],
) -> None:
    async with aionn.open(drivers=["reference"]) as opened:
        net = await opened.compile(endless_model(), devices="reference")
        async with net.burst(slots=1) as burst:
            for _ in range(3):
                await burst.execute([-ONE])
            jobs.clear()
            (device,) = (each for each in opened.devices if each.pid)
            async with anyio.create_task_group() as tasks:

                async def run() -> None:
                    with pytest.raises(aionn.DeadObject):
                        await burst.execute([ONE])

                tasks.start_soon(run)
                while not device.dispatcher.busy_count:
                    await anyio.lowlevel.checkpoint()
                assert jobs == []
                assert device.pid is not None
                os.kill(device.pid, signal.SIGKILL)
            assert len(jobs) == 1 and device.dispatcher.busy_count == 0
            assert burst.statistics().free == 1


async def test_deadlines_that_are_kept_set_no_timer_of_the_loop(doubling: aionn.Burst) -> None:
    loop = asyncio.get_running_loop()
    set_at: list[float] = []

    def call_at(when: float, *arguments: Any, **options: Any) -> asyncio.TimerHandle:
        set_at.append(when)
        return asyncio.BaseEventLoop.call_at(loop, when, *arguments, **options)  # type: ignore[arg-type]

    for _ in range(3):
        await doubling.execute([ONE], deadline=aionn.after(60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_at", call_at)
        for _ in range(3):
            assert (await doubling.execute([ONE], deadline=aionn.after(60))).outputs[0] == 2
    assert set_at == []


@pytest.fixture
async def background() -> AsyncIterator[Background]:
    made = Background()
    await made.start()
    yield made
    await made.aclose()


class Scripted(LaunchBase):
    """A launch of a burst, as ``execute_synchronously`` waits for it."""

    async def execution(self) -> ExecutionResult:
        return await outcome_of(self)

    def in_flight(self) -> Launch | None:
        return None if self.is_done else self


async def test_direct_execution_that_is_cancelled_in_the_turn_of_its_deadline_is_cancelled(
    background: Background,
) -> None:
    passed_ns, launch = time.monotonic_ns(), Scripted()
    with anyio.fail_after(LIMIT_S), anyio.CancelScope() as scope:
        background.at(passed_ns - 1, scope.cancel)
        await background.in_time_directly(passed_ns, launch.execution(), launch.in_flight, str)
    task = asyncio.current_task()
    assert scope.cancelled_caught and launch.is_cancelled
    assert task is not None and task.cancelling() == 0


@pytest.mark.parametrize("is_end_first", [True, False])
async def test_direct_execution_that_ends_in_the_turn_of_its_deadline_gives_its_result(
    background: Background, is_end_first: bool
) -> None:
    passed_ns, launch, result = time.monotonic_ns(), Scripted(), ExecutionResult()
    with anyio.fail_after(LIMIT_S):
        background.at(passed_ns - 1 if is_end_first else passed_ns + 1, lambda: launch.finish(result))
        execution = launch.execution()
        assert await background.in_time_directly(passed_ns, execution, launch.in_flight, str) is result
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_direct_execution_that_does_not_end_misses_its_deadline(background: Background) -> None:
    launch = Scripted()
    with anyio.fail_after(LIMIT_S), pytest.raises(aionn.MissedDeadline, match="late"):
        await background.in_time_directly(
            time.monotonic_ns() + 10**7, launch.execution(), launch.in_flight, lambda: "late"
        )
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_deadline_ends_a_direct_execution_though_the_device_continues(
    runtime: aionn.Runtime, jobs: list[object]
) -> None:
    net = await runtime.compile(endless_model())
    (device,) = runtime.devices
    async with net.burst(slots=2) as burst:
        for _ in range(3):
            await burst.execute([-ONE])
        jobs.clear()
        with (
            anyio.fail_after(LIMIT_S),
            pytest.raises(aionn.MissedDeadline, match="deadline passed"),
        ):
            await burst.execute([ONE], deadline=aionn.after(0.05))
        assert len(jobs) == 1
        with anyio.fail_after(LIMIT_S):
            while device.dispatcher.busy_count:
                await anyio.sleep(0.001)
            assert (await burst.execute([-ONE])).outputs[0] == -1
        assert burst.statistics().free == 2


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ("result", None),
        ("failure", aionn.GeneralFailure),
        ("cancellation", asyncio.CancelledError),
        ("deadline", aionn.MissedDeadline),
    ],
)
async def test_direct_execution_whose_burst_was_closed_ends_and_keeps_its_slot_until_the_device_is_done(
    end: str, outcome: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch, jobs: list[object]
) -> None:
    started, done = threading.Event(), threading.Event()
    run = ReferencePreparedModel.run

    def held(self: ReferencePreparedModel, *arguments: Any) -> Any:
        started.set()
        assert done.wait(LIMIT_S)
        if end == "failure":
            raise RuntimeError("as the test wants")
        return run(self, *arguments)

    monkeypatch.setattr(burst_module, "CLOSE_S_MAX", 0.0)
    async with aionn.open(devices=[ReferenceDevice("reference")]) as opened:
        net = await opened.compile(doubling_model())
        dispatcher = opened.devices[0].dispatcher
        async with net.burst(slots=1) as burst:
            for _ in range(3):
                await burst.execute([ONE])
            jobs.clear()
            monkeypatch.setattr(ReferencePreparedModel, "run", held)
            limit = aionn.after(0.3) if end == "deadline" else None
            task = asyncio.create_task(burst.execute([3 * ONE], deadline=limit))
            while not started.is_set() and not task.done():
                await anyio.sleep(0.001)
        try:
            if end == "cancellation":
                task.cancel()
            if end in ("result", "failure"):
                assert not task.done() and jobs == []
                done.set()
            await asyncio.wait([task], timeout=LIMIT_S)
            assert done.is_set() or not started.is_set() or dispatcher.busy_count == 1
        finally:
            done.set()
        if outcome is None:
            assert task.result().outputs[0].tolist() == [6.0]
        else:
            with pytest.raises(outcome):
                await task
        monkeypatch.setattr(ReferencePreparedModel, "run", run)
        with anyio.fail_after(LIMIT_S):
            while dispatcher.busy_count:
                await anyio.sleep(0.001)
            assert (await net.execute([ONE])).outputs[0] == 2


async def test_direct_execution_that_is_closed_where_no_loop_runs_leaves_its_launch_to_the_device(
    runtime: aionn.Runtime, jobs: list[object]
) -> None:
    net = await runtime.compile(endless_model())
    (device,) = runtime.devices
    async with net.burst(slots=1) as burst:
        for _ in range(3):
            await burst.execute([-ONE])
        jobs.clear()
        execution = burst.execute([ONE])
        execution.send(None)
        assert jobs == [] and device.dispatcher.busy_count == 1
        # As the collector closes the task of a loop that has ended.
        await anyio.to_thread.run_sync(execution.close)
        with anyio.fail_after(LIMIT_S):
            while device.dispatcher.busy_count:
                await anyio.sleep(0.001)
            assert (await burst.execute([-ONE])).outputs[0] == -1


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
