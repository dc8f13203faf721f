"""What an execution is asked for counts on every way to execute: deadline, priority, measuring, what the result tells."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.drivers.simulated.profiles import Draw
from aionn.errors import ErrorStatus
from aionn.hal import NO_TIMING
from aionn.runtime.executions.reusable import ReusableExecution
from aionn.runtime.telemetry import Report, structure_digest
from aionn.testing import SimulatedDevice, VirtualClock, models, run, scripted

X = np.array([1.5, -2.5, 3.0, 4.0], np.float32)
MS = 1_000_000
RUN_MS = 20

Way = Callable[..., Awaitable[aionn.Result]]


async def execute(net: aionn.Compilation, **options: Any) -> aionn.Result:
    return await net.execute([X], **options)


async def execute_fenced(net: aionn.Compilation, **options: Any) -> aionn.Result:
    return await net.execute_fenced([X], **options)


async def execute_again(net: aionn.Compilation, *, measure: bool = False, **options: Any) -> aionn.Result:
    again = net.reusable(measure=measure)
    again.inputs[0][...] = X
    return await again.execute(**options)


async def execute_in_a_burst(net: aionn.Compilation, **options: Any) -> aionn.Result:
    async with net.burst() as burst:
        return await burst.execute([X], **options)


async def one() -> AsyncIterator[Any]:
    yield X


async def stream(net: aionn.Compilation, **options: Any) -> aionn.Result:
    """A stream of one item; with a deadline, what is dropped has missed it."""
    deadline = options.pop("deadline", None)
    limit = None if deadline is None else lambda item: deadline
    async with net.burst() as burst:
        async for result in burst.stream(one(), deadline=limit, **options):
            if result.status != "on_time":
                raise aionn.MissedDeadline(f"stream: {result.status}", transient=True)
            return aionn.Result(result.outputs, result.timing)
    raise AssertionError("the stream gave nothing")


EXECUTIONS = [
    pytest.param(execute, id="execute"),
    pytest.param(execute_fenced, id="execute_fenced"),
    pytest.param(execute_again, id="execute_again"),
    pytest.param(execute_in_a_burst, id="burst"),
]
STREAMS = [pytest.param(stream, id="stream")]
every_execution = pytest.mark.parametrize("way", EXECUTIONS)
every_way = pytest.mark.parametrize("way", EXECUTIONS + STREAMS)


def npu(**options: Any) -> SimulatedDevice:
    options = {"run_time_s": RUN_MS / 1000, "results": "zeros", "preemption": "none", **options}
    return SimulatedDevice("npu", **options)


def play(
    main: Callable[[aionn.Runtime, VirtualClock], Awaitable[None]], *devices: Any, **options: Any
) -> None:
    clock = VirtualClock()

    async def all_of_it() -> None:
        async with aionn.open(devices=devices, **options) as runtime:
            await main(runtime, clock)

    run(all_of_it, clock=clock)


def slow() -> Any:
    while True:
        yield Draw(factor=2.0)


@every_way
def test_caller_is_told_at_the_deadline_though_the_device_is_busy_with_it(way: Way) -> None:
    async def main(runtime: aionn.Runtime, clock: VirtualClock) -> None:
        net = await runtime.compile(models.identity((4,)))
        with pytest.raises(aionn.MissedDeadline) as missed:
            await way(net, deadline=clock.after(0.025))
        told.append(clock.now_ns)
        assert missed.value.transient

    told: list[int] = []
    # Twice as slow as its driver says.
    play(main, npu(script=slow()))
    # Closing a burst waits for the device.
    assert told == [40 * MS if way in (execute_in_a_burst, stream) else 25 * MS]


@every_way
def test_work_that_cannot_be_done_in_time_is_not_begun(way: Way) -> None:
    device = npu()

    async def main(runtime: aionn.Runtime, clock: VirtualClock) -> None:
        net = await runtime.compile(models.identity((4,)))
        with pytest.raises(aionn.MissedDeadline):
            await way(net, deadline=clock.after(0.015))
        assert device.statistics().started == 0

    play(main, device)


@pytest.mark.sampled(4)
@every_way
@pytest.mark.parametrize("asked", ["execution", "compilation"])
def test_high_priority_overtakes_what_waits(way: Way, asked: str) -> None:
    async def main(runtime: aionn.Runtime, clock: VirtualClock) -> None:
        medium = await runtime.compile(models.identity((4,)))
        options = {} if asked == "execution" else {"priority": "high"}
        high = await runtime.compile(models.identity((4,)), **options)
        ended = []

        async def note(name: str, awaited: Awaitable[object]) -> None:
            await awaited
            ended.append(name)

        async with anyio.create_task_group() as tasks:
            for name in ("first", "second", "third"):
                tasks.start_soon(note, name, medium.execute([X]))
            await anyio.sleep(0.001)
            options = {"priority": "high"} if asked == "execution" else {}
            await note("high", way(high, **options))
        assert ended == ["first", "high", "second", "third"]

    play(main, npu())


@every_way
def test_low_priority_of_an_execution_counts_before_its_compilations(way: Way) -> None:
    async def main(runtime: aionn.Runtime, clock: VirtualClock) -> None:
        medium = await runtime.compile(models.identity((4,)))
        high = await runtime.compile(models.identity((4,)), priority="high")
        ended = []

        async def note(name: str, awaited: Awaitable[object]) -> None:
            await awaited
            ended.append(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(note, "first", medium.execute([X]))
            await anyio.sleep(0.001)
            tasks.start_soon(note, "low", way(high, priority="low"))
            await anyio.sleep(0.001)
            tasks.start_soon(note, "medium", medium.execute([X]))
        assert ended == ["first", "medium", "low"]

    play(main, npu())


@every_way
def test_timing_is_given_where_it_is_asked_for(way: Way) -> None:
    async def main(runtime: aionn.Runtime, clock: VirtualClock) -> None:
        net = await runtime.compile(models.identity((4,)))
        assert (await way(net)).timing == NO_TIMING
        timing = (await way(net, measure=True)).timing
        assert timing.time_on_device_ns == timing.time_in_driver_ns == RUN_MS * MS

    play(main, npu())


@every_execution
@pytest.mark.parametrize("has_listener", [False, True])
def test_result_tells_device_wait_and_duration(way: Way, has_listener: bool) -> None:
    async def main(runtime: aionn.Runtime, clock: VirtualClock) -> None:
        net = await runtime.compile(models.identity((4,)))
        results = []

        async def second() -> None:
            results.append(await way(net))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(net.execute, [X])
            await anyio.sleep(0.005)
            tasks.start_soon(second)
        (result,) = results
        assert (result.device, result.queued_ns, result.total_ns) == ("npu", 15 * MS, 35 * MS)
        assert result.status is ErrorStatus.NONE and result.dependencies_ns == 0

    play(main, npu(), telemetry=[lambda report: None] if has_listener else [])


@every_way
def test_failure_goes_on_at_the_reference_device(way: Way) -> None:
    async def main(runtime: aionn.Runtime, clock: VirtualClock) -> None:
        net = await runtime.compile(models.identity((4,)), allow_fallback=True)
        assert net.devices == ("npu",)
        result = await way(net)
        np.testing.assert_array_equal(result.outputs[0], np.floor(X))

    fast = npu(script=scripted({0: "persistent"}), rates={"float32": 1e12})
    play(main, fast, drivers=["reference"], isolation="in_process")


@pytest.mark.sampled(4)
@every_way
@pytest.mark.parametrize(("fault", "status"), [(None, ErrorStatus.NONE), (0, ErrorStatus.GENERAL_FAILURE)])
def test_listener_is_told_of_each_execution(way: Way, fault: int | None, status: ErrorStatus) -> None:
    reports: list[Report] = []
    digests = []

    async def main(runtime: aionn.Runtime, clock: VirtualClock) -> None:
        net = await runtime.compile(models.identity((4,)))
        digests.append(structure_digest(net.model))
        try:
            await way(net, measure=True)
        except aionn.GeneralFailure:
            assert fault is not None

    device = npu(script=scripted({} if fault is None else {fault: "persistent"}))
    play(main, device, telemetry=[reports.append])
    compiled, executed = reports
    assert (compiled.kind, executed.kind) == ("compilation", "execution")
    assert executed.status is status and executed.model == digests[0]
    if fault is None:
        assert executed.took_ns == RUN_MS * MS and executed.on_device_ns == RUN_MS * MS
    else:
        assert executed.took_ns == RUN_MS * MS // 2 and executed.on_device_ns is None


def test_computation_that_was_given_up_does_not_hide_the_next_one() -> None:
    async def refused(again: ReusableExecution) -> None:
        await anyio.sleep(0.001)
        with pytest.raises(aionn.InvalidArgument, match="under way"):
            await again.execute()

    async def main(runtime: aionn.Runtime, clock: VirtualClock) -> None:
        net = await runtime.compile(models.identity((4,)))
        again = net.reusable()
        again.inputs[0][...] = X
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(net.execute, [X])
            await anyio.sleep(0.001)
            with pytest.raises(aionn.MissedDeadline):
                await again.execute(deadline=clock.after(0.030))
            tasks.start_soon(refused, again)
            await again.execute()  # What was given up has not ended yet: it ends in the loop's next turn.

    play(main, npu())


@pytest.mark.parametrize("way", EXECUTIONS)
def test_executions_of_one_class_start_in_the_order_in_which_they_were_asked_for(way: Way) -> None:
    """An execution in the caller's own task does not overtake one that was asked for before and has a task of its own."""

    async def main(runtime: aionn.Runtime, clock: VirtualClock) -> None:
        net = await runtime.compile(models.identity((4,)))
        first, second = net.execute_fenced([X]), net.execute_fenced([X])
        await way(net)
        assert clock.now == pytest.approx(3 * RUN_MS / 1000)
        assert (await first).total_ns == RUN_MS * 1_000_000
        assert (await second).total_ns == 2 * RUN_MS * 1_000_000

    play(main, npu())


def test_executions_that_never_began_delay_no_later_one() -> None:
    async def main(runtime: aionn.Runtime, clock: VirtualClock) -> None:
        net = await runtime.compile(models.identity((4,)))
        gone = net.execute_fenced([X])
        gone.cancel()
        with pytest.raises(aionn.ExecutionCancelled):
            await gone
        await net.execute([X])
        assert net._background.starting_count == 0
        assert clock.now == pytest.approx(RUN_MS / 1000)

    play(main, npu())
