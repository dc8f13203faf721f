"""Compilations with ``recover`` after the death of their driver process: real processes that are killed, or that end themselves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.hal import Burst, PreparedModel
from aionn.runtime.executions.results import StreamStatistics
from aionn.runtime.recovery.prepared import RecoveringBurst, RecoveringPreparedModel
from aionn.runtime.recovery.states import PREPARATIONS_MAX, RecoveryState
from aionn.service.client.device import RemoteDevice
from tests.support.mortal_driver import DIES, doubled_model

Values = npt.NDArray[np.float32]
ONE = np.ones(1, np.float32)
LIMIT_S = 60
MORTAL = {"mortal": "tests.support.mortal_driver:MortalDevice"}


@pytest.fixture
async def runtime() -> AsyncIterator[aionn.Runtime]:
    async with aionn.open(drivers=MORTAL, spare_processes=False) as opened:
        yield opened


@pytest.fixture
async def net(runtime: aionn.Runtime) -> aionn.Compilation:
    return await runtime.compile(doubled_model(), recover=True)


async def kill(runtime: aionn.Runtime) -> None:
    """Kills the driver process, and returns when everything that belonged to it knows."""
    hal = runtime.device("mortal").hal
    assert isinstance(hal, RemoteDevice) and hal.pid is not None and hal._connection is not None
    os.kill(hal.pid, signal.SIGKILL)
    with anyio.fail_after(LIMIT_S):
        await hal._connection.ended.wait()


async def first(values: list[float], pause: Callable[[float], Any] | None = None) -> AsyncIterator[Values]:
    for value in values:
        if pause is not None:
            await pause(value)
        yield np.full(1, value, np.float32)


@pytest.mark.parametrize("recover", [False, True])
async def test_closing_a_burst_under_an_execution_is_not_a_death(
    runtime: aionn.Runtime, recover: bool
) -> None:
    net = await runtime.compile(doubled_model(), recover=recover)
    ends = set()
    with anyio.fail_after(LIMIT_S):
        for turns in range(PREPARATIONS_MAX + 1):
            async with net.burst() as burst:
                executions = [asyncio.create_task(burst.execute([ONE])) for _ in range(2)]
                for _ in range(turns + 1):
                    await anyio.lowlevel.checkpoint()
            for execution in executions:
                try:
                    ends.add(float((await execution).outputs[0][0]))
                except aionn.InvalidArgument as e:
                    assert str(e).startswith("burst: closed")
        assert (await net.execute([ONE])).outputs[0] == 2
    assert ends == {2} and net.recoveries == 0


async def test_execution_after_a_death_waits_for_the_new_process(
    runtime: aionn.Runtime, net: aionn.Compilation
) -> None:
    assert (await net.execute([ONE])).outputs[0] == 2
    pid = runtime.device("mortal").pid
    await kill(runtime)
    with anyio.fail_after(LIMIT_S):
        assert (await net.execute([ONE])).outputs[0] == 2
    assert runtime.device("mortal").pid not in (None, pid)
    assert net.recoveries == 1


async def test_execution_under_way_is_not_repeated_and_the_next_one_succeeds(net: aionn.Compilation) -> None:
    with anyio.fail_after(LIMIT_S):
        with pytest.raises(aionn.DeadObject) as dead:
            await net.execute([DIES * ONE])
        assert dead.value.transient
        assert (await net.execute([ONE])).outputs[0] == 2
    assert net.recoveries == 1


async def test_without_recover_an_object_stays_dead(runtime: aionn.Runtime) -> None:
    net = await runtime.compile(doubled_model())
    with anyio.fail_after(LIMIT_S):
        for value in (DIES, 1):
            with pytest.raises(aionn.DeadObject) as dead:
                await net.execute([value * ONE])
            assert not dead.value.transient
    assert net.recoveries == 0


async def test_burst_is_opened_again(runtime: aionn.Runtime, net: aionn.Compilation) -> None:
    async with net.burst(slots=2) as burst:
        with anyio.fail_after(LIMIT_S):
            assert (await burst.execute([ONE])).outputs[0] == 2
            await kill(runtime)
            assert (await burst.execute([2 * ONE])).outputs[0] == 4
            with pytest.raises(aionn.DeadObject) as dead:
                await burst.execute([DIES * ONE])
            assert dead.value.transient
            assert (await burst.execute([3 * ONE])).outputs[0] == 6
    assert net.recoveries == 2


async def test_burst_that_is_opened_after_a_death_waits_for_the_new_process(
    runtime: aionn.Runtime, net: aionn.Compilation
) -> None:
    await kill(runtime)
    with anyio.fail_after(LIMIT_S):
        async with net.burst(slots=2) as burst:
            assert (await burst.execute([ONE])).outputs[0] == 2
    assert net.recoveries == 1


async def test_burst_that_was_opened_in_a_process_that_dies_meanwhile_is_opened_in_the_next_one(
    runtime: aionn.Runtime, net: aionn.Compilation, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_at, opened = RecoveringBurst.open_at, 0

    async def open_and_die(burst: RecoveringBurst, prepared: PreparedModel) -> Burst:
        nonlocal opened
        opened += 1
        made = await open_at(burst, prepared)
        if opened == 1:
            await kill(runtime)
            assert (await net.execute([ONE])).outputs[0] == 2, (
                "reports the death, and waits until all is ready"
            )
        return made

    monkeypatch.setattr(RecoveringBurst, "open_at", open_and_die)
    with anyio.fail_after(LIMIT_S):
        async with net.burst() as burst:
            assert (await burst.execute([ONE])).outputs[0] == 2
    assert net.recoveries == 1 and opened == 2, "one death, one preparation"


@pytest.mark.thorough
async def test_driver_that_dies_of_every_opening_is_abandoned(
    runtime: aionn.Runtime, net: aionn.Compilation, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_at = RecoveringBurst.open_at

    async def die_first(burst: RecoveringBurst, prepared: PreparedModel) -> Burst:
        await kill(runtime)
        return await open_at(burst, prepared)

    monkeypatch.setattr(RecoveringBurst, "open_at", die_first)
    with anyio.fail_after(LIMIT_S), pytest.raises(aionn.DeadObject) as dead:
        async with net.burst():
            pass
    assert dead.value.transient and "while a burst was opened" in str(dead.value)
    with anyio.fail_after(LIMIT_S), pytest.raises(aionn.DeadObject, match="abandoned") as dead:
        async with net.burst():
            pass
    assert not dead.value.transient and net.recoveries == PREPARATIONS_MAX


@pytest.mark.parametrize("slots", [1, 3])
async def test_stream_continues_with_a_gap_that_is_reported(net: aionn.Compilation, slots: int) -> None:
    values = [1.0, 2.0, DIES, 4.0, 5.0]
    async with net.burst(slots=slots) as burst:
        with anyio.fail_after(LIMIT_S):
            stream = burst.stream(first(values))
            results = [(r.status, float(r.item[0]), [float(o[0]) for o in r.outputs]) async for r in stream]
    statuses = [status for status, _, _ in results]
    assert [item for _, item, _ in results] == values, "in the order of the source, and none is missing"
    assert statuses[2] == "lost" and statuses[-1] == "on_time" and set(statuses) == {"lost", "on_time"}
    for status, item, outputs in results:
        assert outputs == ([] if status == "lost" else [2 * item])
    assert stream.statistics() == StreamStatistics(
        on_time=statuses.count("on_time"), late=0, dropped=0, lost=statuses.count("lost")
    )


async def test_frames_that_are_late_for_the_new_process_are_dropped(net: aionn.Compilation) -> None:
    async with net.burst() as burst:
        await burst.execute([ONE])
        deadlines = iter([60.0, 0.001, 60.0])
        stream = burst.stream(first([DIES, 2.0, 3.0]), deadline=lambda item: aionn.after(next(deadlines)))
        with anyio.fail_after(LIMIT_S):
            statuses = [result.status async for result in stream]
    assert statuses[0] == "lost" and statuses[2] == "on_time"
    assert statuses[1] in ("dropped", "lost"), "lost where it was sent beside the one that killed the driver"


async def test_execution_that_waits_for_the_new_process_can_miss_its_deadline_and_be_cancelled(
    runtime: aionn.Runtime, net: aionn.Compilation, monkeypatch: pytest.MonkeyPatch
) -> None:
    (step,) = net._plan.steps
    prepared = step.prepared
    assert isinstance(prepared, RecoveringPreparedModel)
    prepare, may_prepare = prepared._prepare, anyio.Event()

    async def prepare_later() -> Any:
        await may_prepare.wait()
        return await prepare()

    monkeypatch.setattr(prepared, "_prepare", prepare_later)
    await kill(runtime)
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(net.execute, [ONE])
            while not prepared._waiting:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert not prepared._waiting, "it does not wait for the device any more"
        with pytest.raises(aionn.MissedDeadline):
            await net.execute([ONE], deadline=aionn.after(0.01))
        assert prepared.state is RecoveryState.PREPARING
        assert not prepared._waiting, "nor does this one"
        may_prepare.set()
        assert (await net.execute([ONE])).outputs[0] == 2
    assert net.recoveries == 1


async def test_driver_that_dies_of_every_input_is_abandoned(net: aionn.Compilation) -> None:
    with anyio.fail_after(LIMIT_S):
        for _ in range(PREPARATIONS_MAX):
            with pytest.raises(aionn.DeadObject) as dead:
                await net.execute([DIES * ONE])
            assert dead.value.transient
        with pytest.raises(aionn.DeadObject) as dead:
            await net.execute([DIES * ONE])
        assert not dead.value.transient
        with pytest.raises(
            aionn.DeadObject,
            match=r"mortal: .* abandoned after 6 tries \(at most 6 in a minute\).*compile again$",
        ) as dead:
            await net.execute([ONE])
        assert not dead.value.transient
    assert net.recoveries == PREPARATIONS_MAX


@pytest.mark.long
async def test_stream_of_a_driver_that_is_abandoned_ends_with_the_error(net: aionn.Compilation) -> None:
    async def killers() -> AsyncIterator[Values]:
        while True:
            yield DIES * ONE

    async with net.burst(slots=1) as burst:
        statuses = []
        with anyio.fail_after(LIMIT_S), pytest.raises(aionn.DeadObject) as dead:
            async for result in burst.stream(killers()):
                statuses.append(result.status)
    assert statuses == ["lost"] * PREPARATIONS_MAX and not dead.value.transient


async def test_compilation_that_is_closed_while_it_is_prepared_leaves_nothing(
    runtime: aionn.Runtime, net: aionn.Compilation
) -> None:
    await kill(runtime)
    async with anyio.create_task_group() as tasks:
        ends = []

        async def execute() -> None:
            with pytest.raises(aionn.DeadObject) as dead:
                await net.execute([ONE])
            ends.append(str(dead.value))

        tasks.start_soon(execute)
        with anyio.fail_after(LIMIT_S):
            (step,) = net._plan.steps
            assert isinstance(step.prepared, RecoveringPreparedModel)
            while step.prepared.state is not RecoveryState.PREPARING:
                await anyio.lowlevel.checkpoint()
            await net.aclose()
    assert ends and "closed" in ends[0]


async def test_device_memory_of_the_process_that_died_is_refused(
    runtime: aionn.Runtime, net: aionn.Compilation
) -> None:
    memory = await runtime.allocate(inputs=[(net, 0)])
    assert isinstance(memory, aionn.DeviceMemory)
    await memory.write(3 * ONE)
    assert (await net.execute([memory])).outputs[0] == 6
    await kill(runtime)
    with anyio.fail_after(LIMIT_S):
        for _ in range(2):
            with pytest.raises(aionn.DeadObject, match="allocate it again") as dead:
                await net.execute([memory])
            assert not dead.value.transient or net.recoveries == 0
        assert (await net.execute([ONE])).outputs[0] == 2
        again = await runtime.allocate(inputs=[(net, 0)])
        assert isinstance(again, aionn.DeviceMemory)
        await again.write(4 * ONE)
        assert (await net.execute([again])).outputs[0] == 8


async def test_device_memory_can_be_allocated_before_another_execution_has_noticed_the_death(
    runtime: aionn.Runtime, net: aionn.Compilation
) -> None:
    await kill(runtime)
    with anyio.fail_after(LIMIT_S):
        memory = await runtime.allocate(inputs=[(net, 0)])
        assert isinstance(memory, aionn.DeviceMemory)
        await memory.write(3 * ONE)
        assert (await net.execute([memory])).outputs[0] == 6
    assert net.recoveries == 1


async def test_device_memory_can_be_allocated_again_while_the_model_is_prepared(
    runtime: aionn.Runtime, net: aionn.Compilation
) -> None:
    memory = await runtime.allocate(inputs=[(net, 0)])
    await kill(runtime)
    with anyio.fail_after(LIMIT_S):
        with pytest.raises(aionn.DeadObject, match="allocate it again"):
            await net.execute([memory])
        again = await runtime.allocate(inputs=[(net, 0)])
        assert isinstance(again, aionn.DeviceMemory)
        await again.write(3 * ONE)
        assert (await net.execute([again])).outputs[0] == 6
    assert net.recoveries == 1


@pytest.mark.parametrize("has_noticed", [False, True])
async def test_device_memory_of_several_compilations_can_be_allocated_before_each_has_noticed_the_death(
    runtime: aionn.Runtime, net: aionn.Compilation, has_noticed: bool
) -> None:
    other = await runtime.compile(doubled_model(), recover=True)
    await kill(runtime)
    with anyio.fail_after(LIMIT_S):
        if has_noticed:
            assert (await net.execute([ONE])).outputs[0] == 2
        memory = await runtime.allocate(inputs=[(net, 0), (other, 0)])
        assert isinstance(memory, aionn.DeviceMemory)
        await memory.write(3 * ONE)
        for each in (net, other):
            assert (await each.execute([memory])).outputs[0] == 6
    assert net.recoveries == other.recoveries == 1


async def test_device_memory_of_several_compilations_waits_for_deaths_during_the_allocation(
    runtime: aionn.Runtime, net: aionn.Compilation, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await runtime.compile(doubled_model(), recover=True)
    hal = runtime.device("mortal").hal
    allocate, asked = hal.allocate, 0

    async def die_first(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            await kill(runtime)
        return await allocate(*arguments)

    monkeypatch.setattr(hal, "allocate", die_first)
    with anyio.fail_after(LIMIT_S):
        assert isinstance(await runtime.allocate(inputs=[(net, 0), (other, 0)]), aionn.DeviceMemory)
    assert asked == 2 and net.recoveries == other.recoveries == 1


async def test_asynchronous_execution_after_a_death_waits_for_the_new_process() -> None:
    async with aionn.open(drivers=MORTAL, spare_processes=False, execution_path="async") as runtime:
        net = await runtime.compile(doubled_model(), recover=True)
        assert (await net.execute([ONE])).outputs[0] == 2
        await kill(runtime)
        with anyio.fail_after(LIMIT_S):
            assert (await net.execute([ONE])).outputs[0] == 2
            with pytest.raises(aionn.DeadObject) as dead:
                await net.execute([DIES * ONE])
            assert dead.value.transient, "it was under way, and is not repeated"
            assert (await net.execute([ONE])).outputs[0] == 2
        assert net.recoveries == 2


async def test_driver_that_dies_while_it_prepares_can_be_asked_again() -> None:
    drivers = {"mortal": "tests.support.mortal_driver:DiesWhilePreparing"}
    async with aionn.open(drivers=drivers, spare_processes=False) as runtime:
        with anyio.fail_after(LIMIT_S), pytest.raises(aionn.DeadObject) as dead:
            await runtime.compile(doubled_model())
    assert dead.value.transient
