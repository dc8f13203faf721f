"""A source with scopes open while it gives items, or one that does not end: whatever becomes of it, only its own stream ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.drivers.reference import ReferenceDevice
from aionn.runtime.background import SOURCE_CANCELS_MAX, SOURCE_END_S_MAX
from aionn.runtime.executions.stream import UNPLACED_MAX
from aionn.testing import SimulatedDevice, VirtualClock, run
from aionn.testing.models import identity

Values = npt.NDArray[np.float32]
ONE = np.ones(1, np.float32)
LIMIT_S = 30


class Bench:
    """What a source does for a test.

    Attributes:
        end: Has the scope of the source end.
        left: Whether the source was left in the task that entered its scope.
    """

    def __init__(self) -> None:
        self.end: Callable[[], object] = lambda: None
        self.left: list[bool] = []


async def plain(bench: Bench) -> AsyncIterator[Values]:
    task = asyncio.current_task()
    assert task is not None
    bench.end = task.cancel
    try:
        for number in range(1, 10_000):
            yield -number * ONE
    finally:
        bench.left.append(asyncio.current_task() is task)


def scoped(scope: Callable[[Bench], Any]) -> Callable[[Bench], AsyncIterator[Values]]:
    """A source that has a scope open; it gives one item more after the scope, where that ends in silence."""

    async def source(bench: Bench) -> AsyncIterator[Values]:
        task = asyncio.current_task()
        number = 0
        try:
            async with scope(bench):
                while True:
                    number += 1
                    yield -number * ONE
            yield -(number + 1) * ONE
        finally:
            bench.left.append(asyncio.current_task() is task)

    return source


class move_on:
    """``anyio.move_on_after``; ``fail_after`` with an error at its end."""

    fails = False

    def __init__(self, bench: Bench) -> None:
        self._scope = anyio.fail_after(3600) if self.fails else anyio.move_on_after(3600)
        self._bench = bench

    async def __aenter__(self) -> None:
        scope = self._scope.__enter__()

        def end() -> None:
            scope.deadline = anyio.current_time()

        self._bench.end = end

    async def __aexit__(self, *error: Any) -> bool | None:
        return self._scope.__exit__(*error)


class fail_after(move_on):
    fails = True


class anyio_group:
    """A task group of anyio with a task that fails."""

    def __init__(self, bench: Bench) -> None:
        self._fail = asyncio.Event()
        self._group = anyio.create_task_group()
        bench.end = self._fail.set

    async def _child(self) -> None:
        await self._fail.wait()
        raise KeyError("child")

    async def __aenter__(self) -> None:
        await self._group.__aenter__()
        self._group.start_soon(self._child)

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._group.__aexit__(*error)


class asyncio_group(anyio_group):
    """A task group of asyncio with a task that fails."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self._native = asyncio.TaskGroup()

    async def __aenter__(self) -> None:
        await self._native.__aenter__()
        self._native.create_task(self._child())

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._native.__aexit__(*error)


def timeout(bench: Bench) -> asyncio.Timeout:
    limit = asyncio.timeout(3600)
    bench.end = lambda: limit.reschedule(asyncio.get_running_loop().time())
    return limit


SOURCES: dict[str, tuple[Callable[[Bench], AsyncIterator[Values]], type[BaseException] | None]] = {
    "plain": (plain, aionn.GeneralFailure),
    "move_on": (scoped(move_on), None),
    "fail_after": (scoped(fail_after), TimeoutError),
    "anyio_group": (scoped(anyio_group), ExceptionGroup),
    "timeout": (scoped(timeout), TimeoutError),
    "asyncio_group": (scoped(asyncio_group), ExceptionGroup),
}
"""By kind: the source, and the error of its consumer when its scope ends it."""

WAYS = ["break", "raise", "into", "deadline", "cancelled", "dropped", "source"]


async def waits_for_a_buffer(burst: aionn.Burst) -> None:
    while not burst.statistics().waiting:
        await anyio.lowlevel.checkpoint()


async def leave(burst: aionn.Burst, bench: Bench, kind: str, way: str) -> None:
    """Reads one result of a stream, and leaves it while its source waits for a buffer, with its scope open."""

    def into(item: Values, view: Values) -> None:
        if way == "into" and item[0] == -2:
            raise KeyError("into")
        view[...] = item

    def deadline(item: Values) -> int:
        if way == "deadline" and item[0] == -2:
            raise KeyError("deadline")
        return aionn.after(60)

    source, error = SOURCES[kind]
    stream = burst.stream(source(bench), into=into, deadline=deadline if way == "deadline" else None)
    assert (await anext(stream)).outputs[0] == -1
    if way in ("into", "deadline"):
        with pytest.raises(KeyError, match=way):
            await anext(stream)
        return
    await waits_for_a_buffer(burst)
    if way == "dropped":
        del stream
    elif way == "source":
        bench.end()
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        assert (await anext(stream)).outputs[0] == -2, "it was given before"
        if error is None:
            assert (await anext(stream)).outputs[0] == -3
        else:
            with pytest.raises(error):
                await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    elif way == "cancelled":
        with anyio.CancelScope() as scope:
            async with stream:
                scope.cancel()
                await anyio.lowlevel.checkpoint()
    elif way == "raise":
        with pytest.raises(ZeroDivisionError):
            async with stream:
                raise ZeroDivisionError
    else:
        async with stream:
            pass


async def check(kind: str, way: str) -> None:
    with anyio.fail_after(LIMIT_S):
        async with aionn.open(devices=[ReferenceDevice("reference")]) as runtime:
            net = await runtime.compile(identity())
            async with net.burst(slots=1) as burst, net.burst() as other:
                bench, going_on = Bench(), other.stream(plain(Bench()))
                assert (await anext(going_on)).outputs[0] == -1
                await leave(burst, bench, kind, way)
                while burst.statistics() != (1, 1, 0, 0) or not bench.left:
                    await anyio.lowlevel.checkpoint()
                assert bench.left == [True]
                assert (await burst.execute([-ONE])).outputs[0] == -1
                assert (await net.execute([-ONE])).outputs[0] == -1
                for number in range(2, 9):
                    assert (await anext(going_on)).outputs[0] == -number
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.sampled(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SOURCES)
async def test_only_the_stream_of_a_source_with_a_scope_ends(kind: str, way: str) -> None:
    await check(kind, way)


@pytest.mark.forked("any")
@pytest.mark.thorough
def test_only_the_stream_of_a_source_with_a_scope_ends_on_uvloop(repository: Path) -> None:
    pytest.importorskip("uvloop")
    # In a process of its own: uvloop keeps a pipe for signals as long as its process lives.
    command = [sys.executable, "-W", "error", "-m", "tests.aionn.runtime.executions.test_scoped_sources"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "checked\n", "")


async def test_wait_for_a_buffer_is_one_coroutine_of_its_own() -> None:
    async with aionn.open(devices=[ReferenceDevice("reference")]) as runtime:
        net = await runtime.compile(identity())
        async with net.burst(slots=1) as burst, burst.stream(plain(Bench())) as stream:
            await anext(stream)
            await waits_for_a_buffer(burst)
            task = stream._pump._source._task
            assert task is not None
            awaited: Any = task.get_coro()
            names = []
            while asyncio.iscoroutine(awaited):
                names.append(awaited.__name__)
                awaited = awaited.cr_await
            # Each of them is begun and ended once for an item, since an item of a fast source always waits.
            assert names[-2:] == ["_take_items", "_place_waiting"]


async def test_items_that_wait_while_scopes_of_their_source_end_are_limited() -> None:
    scopes: list[anyio.CancelScope] = []

    async def source() -> AsyncIterator[Values]:
        while True:
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                while True:
                    yield -ONE

    async with aionn.open(devices=[ReferenceDevice("reference")]) as runtime:
        net = await runtime.compile(identity())
        async with net.burst(slots=1) as burst, burst.stream(source()) as stream:
            await anext(stream)
            await waits_for_a_buffer(burst)
            with anyio.fail_after(LIMIT_S):
                for count in range(1, UNPLACED_MAX + 1):
                    scopes[-1].cancel()
                    while len(scopes) == count:
                        await anyio.lowlevel.checkpoint()
                    if count == UNPLACED_MAX:
                        break
                    await waits_for_a_buffer(burst)
                results = [await anext(stream) for _ in range(UNPLACED_MAX)]
                assert len(results) == UNPLACED_MAX
                with pytest.raises(aionn.GeneralFailure, match="after cancellations of its own scopes"):
                    await anext(stream)


@pytest.mark.parametrize("way", ["waits", "is closed"])
def test_source_that_does_not_end_is_left_to_itself(way: str) -> None:
    clock = VirtualClock()
    reported: list[str] = []

    async def main() -> None:
        loop, over, cancelled = asyncio.get_running_loop(), asyncio.Event(), 0
        loop.set_exception_handler(lambda _, context: reported.append(context["message"]))

        async def stay() -> None:
            nonlocal cancelled
            while not over.is_set():
                try:
                    await over.wait()
                except asyncio.CancelledError:
                    cancelled += 1

        async def source() -> AsyncIterator[Values]:
            try:
                yield ONE
                if way == "waits":
                    await stay()
                yield ONE
                yield ONE
            finally:
                await stay()

        async with aionn.open(devices=[SimulatedDevice("npu", run_time_s=0.001, results="zeros")]) as runtime:
            net = await runtime.compile(identity())
            async with net.burst(slots=1) as burst, burst.stream(source()) as stream:
                await anext(stream)
                await anyio.sleep(0.01)
            begun_s = clock.now
        assert SOURCE_END_S_MAX <= clock.now - begun_s <= 3 * SOURCE_END_S_MAX
        assert cancelled == SOURCE_CANCELS_MAX + (way == "waits")
        over.set()
        await anyio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1

    run(main, clock=clock)
    assert reported == ["aionn: the source of a stream does not end, and is left to itself"]


async def test_source_has_time_to_close_what_it_opened() -> None:
    closed: list[str] = []

    async def source() -> AsyncIterator[Values]:
        try:
            while True:
                yield -ONE
        finally:
            await anyio.sleep(0.01)
            closed.append("camera")

    async with aionn.open(devices=[ReferenceDevice("reference")]) as runtime:
        net = await runtime.compile(identity())
        async with net.burst(slots=1) as burst, burst.stream(source()) as stream:
            await anext(stream)
            await waits_for_a_buffer(burst)
    assert closed == ["camera"]


async def test_consumer_is_told_that_tasks_of_its_stream_were_cancelled() -> None:
    async def source() -> AsyncIterator[Values]:
        yield -ONE
        await anyio.sleep_forever()

    async with aionn.open(devices=[ReferenceDevice("reference")]) as runtime:
        net = await runtime.compile(identity())
        async with net.burst() as burst:
            stream = burst.stream(source())
            await anext(stream)
            for worker in stream._pump._workers:
                worker.cancel()
            for _ in range(2):
                with pytest.raises(aionn.GeneralFailure, match="a task of its own"):
                    async for _result in stream:
                        pass
            assert (await burst.execute([-ONE])).outputs[0] == -1


@pytest.mark.parametrize("is_waiting", [True, False])
@pytest.mark.parametrize("what", ["burst", "compilation", "runtime"])
async def test_consumer_is_told_that_another_task_closed_what_its_stream_needs(
    what: str, is_waiting: bool
) -> None:
    go = anyio.Event()

    async def source() -> AsyncIterator[Values]:
        yield -ONE
        await anyio.sleep_forever()

    async def consume(stream: aionn.Stream[Values]) -> str:
        await anext(stream)
        if not is_waiting:
            await go.wait()
        with pytest.raises(aionn.InvalidArgument) as told:
            await anext(stream)
        return str(told.value)

    async with aionn.open(devices=[ReferenceDevice("reference")]) as runtime:
        net = await runtime.compile(identity())
        async with net.burst() as burst:
            stream = burst.stream(source())
            consumer = asyncio.create_task(consume(stream))
            while not stream.statistics().on_time:
                await anyio.lowlevel.checkpoint()
            await {"burst": burst, "compilation": net, "runtime": runtime}[what].aclose()
            go.set()
            with anyio.fail_after(LIMIT_S):
                assert await consumer == "stream: its burst was closed, and results are missing"
            with pytest.raises(StopAsyncIteration):  # The task that closed it knows.
                await anext(stream)


def main() -> None:
    import uvloop

    async def all_of_it() -> None:
        for number, kind in enumerate(
            SOURCES
        ):  # Each kind ends in one of the ways; on asyncio all of them do.
            await check(kind, list(WAYS)[number % len(WAYS)])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(all_of_it())
    print("checked")


if __name__ == "__main__":
    main()
