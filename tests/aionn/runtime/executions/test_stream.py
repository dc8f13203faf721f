"""Streams: what is left when somebody goes away, who waits for whom, and what an error ends."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

import aionn
from aionn.burst.controller import BurstController
from aionn.conformance.vts.models import endless_model
from aionn.runtime.executions.results import StreamStatistics

Values = npt.NDArray[np.float32]
ONE = np.ones(1, np.float32)
LIMIT_S = 30


@pytest.fixture(params=["direct", "deadlines"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Both ways that frames can take."""
    return {} if request.param == "direct" else {"deadline": lambda item: aionn.after(60)}


@pytest.fixture
def runtime(shared_runtime: aionn.Runtime) -> aionn.Runtime:
    """Each test closes its burst, and looks at what is left of it."""
    return shared_runtime


@pytest_asyncio.fixture(loop_scope="module")
async def net(runtime: aionn.Runtime) -> AsyncIterator[aionn.Compilation]:
    """Gives back a negative number, and never ends for a positive one but by its time-out."""
    async with await runtime.compile(endless_model()) as net:
        yield net


async def numbers(count: int, first: int = 1) -> AsyncIterator[Values]:
    for number in range(first, first + count):
        yield -number * ONE


def tasks_of_streams() -> list[str]:
    names = [getattr(t.get_coro(), "__qualname__", "") for t in asyncio.all_tasks()]
    return [name for name in names if name.startswith("StreamPump.")]


async def settled(burst: aionn.Burst, runtime: aionn.Runtime) -> None:
    """Waits until nothing of a stream is left."""

    def left() -> list[object]:
        held = [] if "free" in runtime.devices[0].dispatcher.explain() else ["the device"]
        buffers = burst.statistics()
        is_unused = (buffers.free, buffers.waiting, buffers.streams) == (buffers.total, 0, 0)
        return [*tasks_of_streams(), *([] if is_unused else [buffers]), *held]

    with anyio.move_on_after(LIMIT_S):
        while left():
            await anyio.sleep(0.001)
    assert left() == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
async def test_results_are_those_of_their_items(
    net: aionn.Compilation, runtime: aionn.Runtime, slots: int, options: dict[str, Any]
) -> None:
    async with net.burst(slots=slots) as burst:
        stream = burst.stream(numbers(50), **options)
        seen = []
        async for result in stream:
            assert result.status == "on_time" and not result.outputs[0].flags.writeable
            assert result.outputs[0] == result.item
            seen.append(float(-result.item[0]))
        assert seen == list(range(1, 51))
        assert stream.statistics() == StreamStatistics(50, 0, 0)
        await settled(burst, runtime)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", ["cancelled", "dropped", "left", "read", "closed"])
async def test_nothing_is_left_of_a_stream(
    net: aionn.Compilation, runtime: aionn.Runtime, way: str, options: dict[str, Any]
) -> None:
    async with net.burst(slots=3) as burst:
        stream = burst.stream(numbers(6 if way == "read" else 10_000), **options)
        async for result in stream:
            if way != "read" and float(result.item[0]) <= -4:
                break
        if way == "cancelled":
            stream.cancel()
            stream.cancel()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        elif way == "dropped":
            del stream
        elif way == "left":
            stream.cancel()
            async for _ in burst.stream(numbers(10_000), **options):
                break
        elif way == "closed":
            await burst.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert not tasks_of_streams()
            return
        await settled(burst, runtime)
        assert (await burst.execute([-ONE])).outputs[0] == -1


async def test_stream_that_is_dropped_in_a_cycle_ends_when_it_is_collected(
    net: aionn.Compilation, runtime: aionn.Runtime
) -> None:
    async with net.burst() as burst:
        stream = burst.stream(numbers(10_000))
        await anext(stream)
        cycle: list[object] = [stream]
        cycle.append(cycle)
        del stream, cycle
        await anyio.to_thread.run_sync(gc.collect)
        await settled(burst, runtime)


async def test_stream_that_was_never_read_leaves_nothing(
    net: aionn.Compilation, runtime: aionn.Runtime, options: dict[str, Any]
) -> None:
    async with net.burst() as burst:
        burst.stream(numbers(3), **options)
        await settled(burst, runtime)


async def test_ending_at_any_turn_leaves_nothing(
    net: aionn.Compilation, runtime: aionn.Runtime, options: dict[str, Any]
) -> None:
    async with net.burst(slots=2) as burst:
        for turns in range(14):
            stream = burst.stream(numbers(10_000), **options)

            async def consume(stream: aionn.Stream[Values] = stream) -> None:
                async for _ in stream:
                    pass

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(consume)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                stream.cancel()
            await settled(burst, runtime)
            assert (await burst.execute([-ONE])).outputs[0] == -1


async def test_consumer_that_is_cancelled_loses_no_result(
    net: aionn.Compilation, options: dict[str, Any]
) -> None:
    async with net.burst(slots=2) as burst:
        stream = burst.stream(numbers(40), **options)
        seen: list[float] = []
        cancelled = 0
        while len(seen) < 40:
            with anyio.move_on_after(0) as scope:
                seen.append(float((await anext(stream)).outputs[0][0]))
            if scope.cancelled_caught:
                cancelled += 1
                await anyio.sleep(0.001)
        assert seen == [float(-n) for n in range(1, 41)]
        assert cancelled
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_device_that_works_holds_its_slots_when_a_stream_ends(
    net: aionn.Compilation, runtime: aionn.Runtime
) -> None:
    async def endless() -> AsyncIterator[Values]:
        yield -ONE
        yield ONE
        await anyio.sleep_forever()

    async with net.burst(slots=2) as burst:
        stream = burst.stream(endless())
        await anext(stream)
        while "free" in runtime.devices[0].dispatcher.explain():
            await anyio.sleep(0.001)
        stream.cancel()
        buffers = burst.statistics()
        assert buffers.free < buffers.total, "the device has not answered yet"
        await settled(burst, runtime)


async def test_slow_source_does_not_delay_results(net: aionn.Compilation, options: dict[str, Any]) -> None:
    go = anyio.Event()

    async def camera() -> AsyncIterator[Values]:
        yield -ONE
        yield -2 * ONE
        await go.wait()
        yield -3 * ONE

    async with net.burst(slots=3) as burst:
        stream = burst.stream(camera(), **options)
        with anyio.fail_after(LIMIT_S):
            assert [float((await anext(stream)).outputs[0][0]) for _ in range(2)] == [-1, -2]
            # An execution beside a stream that waits for its source: the stream keeps no slot for what may come.
            assert (await burst.execute([-7 * ONE])).outputs[0] == -7
        go.set()
        assert [float(r.outputs[0][0]) async for r in stream] == [-3]


async def test_source_may_have_scopes_of_its_own(net: aionn.Compilation, options: dict[str, Any]) -> None:
    tasks_seen = set()

    async def scoped() -> AsyncIterator[Values]:
        async with anyio.create_task_group():
            with anyio.fail_after(10):
                for number in range(1, 9):
                    tasks_seen.add(asyncio.current_task())
                    await anyio.lowlevel.checkpoint()
                    yield -number * ONE

    async with net.burst(slots=2) as burst:
        assert len([r async for r in burst.stream(scoped(), **options)]) == 8
    assert len(tasks_seen) == 1


async def test_no_more_items_are_taken_than_there_are_slots(
    net: aionn.Compilation, options: dict[str, Any]
) -> None:
    taken = 0

    async def counted() -> AsyncIterator[Values]:
        nonlocal taken
        while True:
            taken += 1
            yield -ONE

    async with net.burst(slots=3) as burst:
        stream = burst.stream(counted(), **options)
        for given in range(1, 6):
            await anext(stream)
            await anyio.sleep(0.02)
            assert taken <= given + 3, "one waits for a slot"


async def test_error_of_the_source_comes_after_results_that_are_not_here_yet(
    net: aionn.Compilation, runtime: aionn.Runtime, options: dict[str, Any]
) -> None:
    async def breaks() -> AsyncIterator[Values]:
        for _ in range(3):
            yield -ONE
        raise OSError("unplugged")

    async with net.burst(slots=4) as burst:
        stream = burst.stream(breaks(), **options)
        for _ in range(3):
            await anext(stream)
        with pytest.raises(OSError, match="unplugged"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await settled(burst, runtime)


@pytest.mark.parametrize("at", [0, 1, 4])
async def test_writer_that_raises_ends_the_stream_after_its_results(
    net: aionn.Compilation, runtime: aionn.Runtime, at: int, options: dict[str, Any]
) -> None:
    def write(item: int, view: Values) -> None:
        if item == at:
            raise ValueError("no picture")
        view[...] = -item - 1

    async def counted() -> AsyncIterator[int]:
        for number in range(100):
            yield number

    async with net.burst(slots=2) as burst:
        stream = burst.stream(counted(), into=write, **options)
        seen = []
        with pytest.raises(ValueError, match="no picture"):
            async for result in stream:
                seen.append(result.item)
        assert seen == list(range(at))
        await settled(burst, runtime)


async def test_error_of_the_device_comes_at_its_item_and_ends_the_stream(
    net: aionn.Compilation,
    runtime: aionn.Runtime,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch, execute, calls, is_counted = (
        BurstController.launch,
        BurstController.execute_synchronously,
        0,
        False,
    )

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls >= 4:
            raise aionn.GeneralFailure("broken")

    def failing_launch(*args: Any, **told: Any) -> Any:
        nonlocal is_counted
        if not is_counted:
            count()
        is_counted = False
        return launch(*args, **told)

    async def failing_execute(*args: Any, **told: Any) -> Any:
        nonlocal is_counted
        count()
        is_counted = True  # It launches a request for the first time.
        try:
            return await execute(*args, **told)
        finally:
            is_counted = False

    monkeypatch.setattr(BurstController, "launch", failing_launch)
    monkeypatch.setattr(BurstController, "execute_synchronously", failing_execute)
    async with net.burst(slots=3) as burst:
        stream = burst.stream(numbers(100), **options)
        seen = []
        with pytest.raises(aionn.GeneralFailure, match="broken"):
            async for result in stream:
                seen.append(float(-result.item[0]))
        assert seen == [1, 2, 3]
        await settled(burst, runtime)


async def test_failed_frame_falls_back_where_that_is_allowed(
    digits: Path, silence: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ai_edge_litert")

    async def source() -> AsyncIterator[Values]:
        for _ in range(4):
            yield silence

    async with aionn.open(drivers=["litert-cpu", "reference"]) as runtime:
        net = await runtime.compile(digits, allow_fallback=True)
        async with net.burst(slots=2) as burst:
            expected = (await burst.execute([silence])).outputs[0]

            def fail(*args: Any, **told: Any) -> Any:
                raise aionn.GeneralFailure("broken")

            monkeypatch.setattr(BurstController, "launch", fail)
            monkeypatch.setattr(BurstController, "execute_synchronously", fail)
            stream = burst.stream(source())
            count = 0
            async for result in stream:
                np.testing.assert_allclose(result.outputs[0], expected, atol=1e-5)
                count += 1
            assert count == 4
            await settled(burst, runtime)


async def test_two_streams_share_a_burst(net: aionn.Compilation, runtime: aionn.Runtime) -> None:
    async with net.burst(slots=3) as burst:
        seen: dict[str, list[float]] = {"a": [], "b": []}

        async def consume(name: str, first: int, **options: Any) -> None:
            async for result in burst.stream(numbers(30, first), **options):
                seen[name].append(float(-result.outputs[0][0]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: consume("a", 1))
            tasks.start_soon(lambda: consume("b", 100, deadline=lambda item: aionn.after(60)))
        assert seen == {"a": list(range(1, 31)), "b": list(range(100, 130))}
        await settled(burst, runtime)


async def test_second_consumer_is_refused(net: aionn.Compilation) -> None:
    async def never() -> AsyncIterator[Values]:
        await anyio.sleep_forever()
        yield ONE

    async with net.burst() as burst, anyio.create_task_group() as tasks:
        stream = burst.stream(never())
        tasks.start_soon(anext, stream)
        await anyio.lowlevel.checkpoint()
        with pytest.raises(aionn.InvalidArgument, match="one consumer"):
            await anext(stream)
        tasks.cancel_scope.cancel()


async def test_results_are_told_when_they_were_here(net: aionn.Compilation) -> None:
    async with net.burst(slots=2) as burst:
        stream = burst.stream(numbers(2))
        start_ns = aionn.now_ns()
        first = await anext(stream)
        while tasks_of_streams():
            await anyio.sleep(0.001)
        here_ns = aionn.now_ns()
        await anyio.sleep(0.01)
        second = await anext(stream)
        assert start_ns < first.finished_ns <= here_ns
        assert start_ns < second.finished_ns <= here_ns


async def test_execution_that_is_cancelled_while_it_waits_for_a_slot_leaves_the_queue(
    net: aionn.Compilation, runtime: aionn.Runtime
) -> None:
    async with net.burst(slots=1) as burst:
        stream = burst.stream(numbers(2))
        await anext(stream)
        with anyio.move_on_after(0.01) as scope:
            await burst.execute([-ONE])
        assert scope.cancelled_caught
        await anext(stream)
        stream.cancel()
        await settled(burst, runtime)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("way", ["body", "waiting", "break", "fail_after", "result"])
async def test_stream_that_is_broken_off_and_kept_leaves_slots_for_executions(
    net: aionn.Compilation, runtime: aionn.Runtime, way: str, options: dict[str, Any]
) -> None:
    kept: list[object] = []
    seen: list[float] = []
    stopped = anyio.Event()

    async def source() -> AsyncIterator[Values]:
        async for number in numbers(40):
            if way == "waiting" and number[0] == -2:
                stopped.set()
                await go_on.wait()
            yield number

    async def consume(stream: aionn.Stream[Values]) -> None:
        async for result in stream:
            kept.append(result)
            seen.append(float(result.outputs[0][0]))
            if way == "break":
                return
            if way != "waiting":
                stopped.set()
                await anyio.sleep_forever()

    go_on = anyio.Event()
    async with net.burst(slots=2) as burst:
        stream = burst.stream(source(), **options)
        with anyio.fail_after(LIMIT_S):
            if way == "fail_after":
                with pytest.raises(TimeoutError) as caught, anyio.fail_after(0.05):
                    await consume(stream)
                kept.append(caught.value)
            else:
                task = asyncio.create_task(consume(stream))
                if way != "break":
                    await stopped.wait()
                    task.cancel()
                try:
                    await task
                except asyncio.CancelledError as e:
                    kept.append(e)
            go_on.set()
            for number in (100, 101, 102):
                assert (await burst.execute([-number * ONE])).outputs[0] == -number
            async with anyio.create_task_group() as tasks:
                for number in (103, 104, 105):
                    tasks.start_soon(burst.execute, [-number * ONE])
            with pytest.raises(aionn.MissedDeadline):
                await burst.execute([ONE], deadline=aionn.after(0.05))
            # It goes on where it was, and what was copied meanwhile is right.
            seen += [float(r.outputs[0][0]) async for r in stream]
            assert seen == [float(-n) for n in range(1, 41)]
        await settled(burst, runtime)


async def test_stream_ends_with_its_scope(
    net: aionn.Compilation, runtime: aionn.Runtime, options: dict[str, Any]
) -> None:
    async with net.burst() as burst:
        async with burst.stream(numbers(10_000), **options) as stream:
            kept = await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await settled(burst, runtime)
        assert (await burst.execute([-ONE])).outputs[0] == -1
        assert kept.item[0] == -1


async def test_spared_results_stay_read_only_and_in_order(
    net: aionn.Compilation, runtime: aionn.Runtime, options: dict[str, Any]
) -> None:
    async with net.burst(slots=3) as burst:
        stream = burst.stream(numbers(60), **options)
        seen = []
        async for result in stream:
            assert not result.outputs[0].flags.writeable
            seen.append(float(result.outputs[0][0]))
            with anyio.fail_after(LIMIT_S):
                assert (await burst.execute([-1000 * ONE])).outputs[0] == -1000
            assert result.outputs[0] == seen[-1], "its slot is the consumer's"
        assert seen == [float(-n) for n in range(1, 61)]
        await settled(burst, runtime)


async def test_item_that_waits_for_a_slot_is_dropped_at_its_deadline(
    net: aionn.Compilation, runtime: aionn.Runtime
) -> None:
    async with net.burst(slots=1) as burst:
        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as tasks:
                # The driver's own time-out ends it after two seconds; the only slot is its own until then.
                tasks.start_soon(burst.execute, [ONE])
                while burst.statistics().free:
                    await anyio.lowlevel.checkpoint()
                stream = burst.stream(numbers(3), deadline=lambda item: aionn.after(0.02))
                seen = [(r.status, r.outputs, float(r.item[0])) async for r in stream]
                assert seen == [("dropped", (), -1.0), ("dropped", (), -2.0), ("dropped", (), -3.0)]
                assert "free" not in runtime.devices[0].dispatcher.explain(), "the device still works"
                tasks.cancel_scope.cancel()
        await settled(burst, runtime)


async def test_no_more_items_are_dropped_ahead_than_there_are_slots(net: aionn.Compilation) -> None:
    taken = 0

    async def counted() -> AsyncIterator[Values]:
        nonlocal taken
        async for number in numbers(10_000):
            taken += 1
            yield number

    async with net.burst(slots=2) as burst:
        with anyio.fail_after(LIMIT_S):
            stream = burst.stream(counted(), deadline=lambda item: aionn.after(0.001))
            await anext(stream)
            for _ in range(200):
                await anyio.lowlevel.checkpoint()
            await anyio.sleep(0.05)
            # One is with the consumer, one on its way, one is read and waits for its place.
            assert taken <= 4


@pytest.mark.forked("any")
def test_stream_on_uvloop(digits: Path, repository: Path) -> None:
    pytest.importorskip("uvloop")
    # In a process of its own: uvloop keeps a pipe for signals as long as its process lives.
    script = """if True:
        import asyncio, sys, aionn, numpy as np, uvloop

        async def source():
            for _ in range(20):
                yield np.zeros((1, 49, 40, 1), np.float32)

        async def main():
            async with aionn.open(drivers=["reference"]) as runtime:
                net = await runtime.compile(sys.argv[1])
                async with net.burst(slots=3) as burst:
                    print(len([result async for result in burst.stream(source())]))

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
        """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(digits)],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("20\n", "")


@pytest.mark.thorough
async def test_dropped_stream_ends_at_once_though_items_were_late(
    net: aionn.Compilation, runtime: aionn.Runtime
) -> None:
    async with net.burst(slots=1) as burst:
        gc.collect()
        gc.disable()  # What an error keeps alive in a cycle would be collected some day.
        try:
            stream = burst.stream(numbers(10_000), deadline=lambda item: 1)
            assert (await anext(stream)).status == "dropped"
            del stream
            with anyio.fail_after(LIMIT_S):
                assert (await burst.execute([-ONE])).outputs[0] == -1
            await settled(burst, runtime)
        finally:
            gc.enable()
