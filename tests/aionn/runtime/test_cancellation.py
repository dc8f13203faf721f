"""Every public coroutine of the runtime, cancelled at every one of its steps: nothing is left, and the next call works.

A step is one time that the coroutine gives control back to the event loop. ``Steps`` counts them and cancels at the k-th, so that
no test sleeps to hit a moment. The ordinary run takes a seeded sample of the steps, ``--long`` takes all. As a script this file
does the same on uvloop, in a process of its own, since uvloop keeps a pipe as long as its process lives.
"""

from __future__ import annotations

import _thread
import argparse
import asyncio
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import aionn
import aionn.blocking
from aionn.platform.loops import finish
from aionn.runtime.memory.arguments import AREAS_KEPT_MAX
from aionn.runtime.runtime import Isolation
from aionn.service.client.device import RemoteDevice
from aionn.testing.models import identity
from fences import FenceStatus
from tests.support.cancellation import child_processes

pytestmark = pytest.mark.forked("any")

ONE = np.ones(1, np.float32)
LIMIT_S = 20.0
"""How long what is cancelled, and what is left of it, may take to end."""

STEPS_MAX = 400
"""Steps of the longest case, far from reached: a coroutine that never ends is a failure and no endless test."""

SAMPLE = 1
"""Steps of each case in the ordinary run, beside the first and the last."""

WAYS = ["native", "native twice", "scope", "scope and native"]


class Steps:
    """Awaits a coroutine and calls ``cancel`` whenever it has given control back for one of these times, counted from 1."""

    def __init__(
        self, work: Coroutine[Any, Any, Any], at: Sequence[int], cancel: Callable[[int], object]
    ) -> None:
        self._work = work
        self._at = frozenset(at)
        self._cancel = cancel
        self.count = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        send: Callable[[], Any] = lambda: self._work.send(None)  # noqa: E731
        while True:
            try:
                yielded = send()
            except StopIteration as end:
                return end.value
            self.count += 1
            if self.count in self._at:
                self._cancel(self.count)
            try:
                yield yielded
            except BaseException as e:
                thrown = e
                send = lambda thrown=thrown: self._work.throw(thrown)  # type: ignore[misc]  # noqa: E731
            else:
                send = lambda: self._work.send(None)  # noqa: E731


class Bench:
    """A runtime, and what the cases use."""

    def __init__(
        self, runtime: aionn.Runtime, net: aionn.Compilation, burst: aionn.Burst, isolation: Isolation
    ) -> None:
        self.runtime = runtime
        self.isolation: Isolation = isolation
        self.net = net
        self.burst = burst
        self.reusable = net.reusable()
        self.memory = aionn.SharedMemory.from_array(ONE)

    async def warm(self) -> None:
        """Has the driver process keep all memories for requests that the compilation keeps.

        It keeps a memory from its second use until that was idle for ten seconds, and which memories a case uses for the second
        time depends on when its executions end: without this each case would wait for those seconds.
        """
        for _ in range(2):
            await self.reusable.execute()
            async with anyio.create_task_group() as tasks:
                for _ in range(AREAS_KEPT_MAX):
                    tasks.start_soon(self.net.execute, [-ONE])

    async def works(self) -> None:
        """The next calls work."""
        assert (await self.net.execute([-ONE])).outputs[0] == -1
        assert (await self.burst.execute([-ONE])).outputs[0] == -1

    def left(self) -> list[object]:
        """What is under way."""
        device, burst = self.runtime.devices[0], self.burst
        left: list[object] = [*self.runtime.background._executions]
        buffers = burst.statistics()
        if (buffers.free, buffers.waiting, buffers.streams) != (buffers.total, 0, 0):
            left.append(buffers)
        if "slot 0: free" not in device.dispatcher.explain():
            left.append(device.dispatcher.explain())
        if list(self.runtime._compilations) != [self.net]:
            left.append("a compilation")
        if set(self.net._bursts) != {burst}:
            left.append("a burst")
        left += [f"process {pid}" for pid in child_processes() - {device.pid}]
        return left

    def held(self) -> list[int]:
        """Descriptors and mappings of shared memory, here and in the driver process."""
        pid = self.runtime.devices[0].pid
        return [_held_by(os.getpid()), *([] if pid is None else [_held_by(pid)])]


def _held_by(pid: int) -> int:
    with open(f"/proc/{pid}/maps") as file:
        mappings = sum("/memfd:" in line for line in file)
    return len(os.listdir(f"/proc/{pid}/fd")) + mappings


async def numbers() -> AsyncIterator[Any]:
    for number in range(1, 5):
        yield -number * ONE


async def execute(bench: Bench) -> None:
    await bench.net.execute([-ONE])


async def execute_by_deadline(bench: Bench) -> None:
    await bench.net.execute([-ONE], deadline=aionn.after(60), measure=True)


async def execute_fenced(bench: Bench) -> None:
    first = bench.net.execute_fenced([-ONE])
    await bench.net.execute_fenced([-ONE], wait_for=[first.fence], duration=60)


async def wait_for_a_fence(bench: Bench) -> None:
    await bench.net.execute_fenced([-ONE]).fence


async def execute_in_a_burst(bench: Bench) -> None:
    await bench.burst.execute([-ONE])


async def execute_in_a_burst_by_deadline(bench: Bench) -> None:
    await bench.burst.execute([-ONE], deadline=aionn.after(60))


async def execute_in_a_full_burst(bench: Bench) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(bench.burst.execute, [-ONE])
        await bench.burst.execute([-ONE])


async def stream(bench: Bench) -> None:
    async with bench.burst.stream(numbers()) as results:
        async for _ in results:
            pass


async def stream_by_deadline(bench: Bench) -> None:
    async with bench.burst.stream(numbers(), deadline=lambda item: aionn.after(60)) as results:
        async for _ in results:
            pass


async def execute_again(bench: Bench) -> None:
    bench.reusable.inputs[0][...] = -1
    try:
        await bench.reusable.execute()
    except aionn.InvalidArgument as e:
        assert "under way" in str(e)  # The one that was cancelled before.


async def open_a_burst(bench: Bench) -> None:
    async with bench.net.burst() as burst:
        await burst.execute([-ONE])


async def compile_and_drop(bench: Bench) -> None:
    net = await bench.runtime.compile(identity())
    await net.execute([-ONE])


async def compile_and_close(bench: Bench) -> None:
    async with await bench.runtime.compile(identity()) as net, net.burst() as burst:
        await burst.execute([-ONE])


async def use_memories(bench: Bench) -> None:
    async with await bench.runtime.allocate(inputs=[(bench.net, 0)]) as memory:
        await bench.runtime.copy(bench.memory, memory)
        await bench.net.execute([memory])
        await memory.read()


async def ask(bench: Bench) -> None:
    await bench.runtime.supported_operations(identity())
    await bench.runtime.devices[0].status()


async def open_and_close(bench: Bench) -> None:
    async with aionn.open(drivers=["reference"], isolation=bench.isolation) as runtime:
        await runtime.device("reference").status()


async def open_and_close_with_work_under_way(bench: Bench) -> None:
    async with aionn.open(drivers=["reference"], isolation=bench.isolation) as runtime:
        net = await runtime.compile(identity())
        burst = await net.burst().__aenter__()
        async with closed(burst.stream(numbers())) as results:
            await anext(results)
            execution = net.execute_fenced([-ONE])
            await runtime.aclose()
        assert execution.fence.status != FenceStatus.PENDING


async def close_a_burst_with_work_under_way(bench: Bench) -> None:
    burst = await bench.net.burst(slots=3).__aenter__()
    executing = [asyncio.create_task(burst.execute([-ONE])) for _ in range(4)]
    results = burst.stream(numbers())
    try:
        await anext(results)
    finally:
        try:
            await burst.aclose()
        finally:
            buffers = burst.statistics()
            assert (buffers.total, buffers.streams) == (0, 0)
            await finish(ended(executing))


async def close_a_compilation_with_work_under_way(bench: Bench) -> None:
    net = await bench.runtime.compile(identity())
    try:
        bursts = [await net.burst().__aenter__() for _ in range(2)]
        execution = net.execute_fenced([-ONE])
        await bursts[0].execute([-ONE])
    finally:
        await net.aclose()
    with contextlib.suppress(aionn.Error):  # Its device forgot it.
        await execution


async def end_a_stream(bench: Bench) -> None:
    results = bench.burst.stream(numbers())
    try:
        await anext(results)
    finally:
        await results.aclose()
        assert bench.burst.statistics().streams == 0


async def start_and_end_a_driver_process(bench: Bench) -> None:
    if bench.isolation == "in_process":
        return
    device = RemoteDevice("reference", "other", bench.runtime.tasks)
    try:
        await device.connect()
        prepared = await device.prepare_model(identity())
        burst = await prepared.configure_execution_burst()
        await prepared.aclose()  # And the burst with it, which must not be dropped before.
        assert burst.state.name == "CLOSED"
    finally:
        await device.aclose()
        assert device.pid is None


async def ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Waits for tasks, whatever becomes of them."""
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def closed(results: aionn.Stream[Any]) -> AsyncIterator[aionn.Stream[Any]]:
    """Ends a stream that may have been ended with its burst."""
    try:
        yield results
    finally:
        await results.aclose()


CASES = [
    execute,
    execute_by_deadline,
    execute_fenced,
    wait_for_a_fence,
    execute_in_a_burst,
    execute_in_a_burst_by_deadline,
    execute_in_a_full_burst,
    stream,
    stream_by_deadline,
    execute_again,
    open_a_burst,
    compile_and_drop,
    compile_and_close,
    use_memories,
    ask,
    open_and_close,
    open_and_close_with_work_under_way,
    close_a_burst_with_work_under_way,
    close_a_compilation_with_work_under_way,
    end_a_stream,
    start_and_end_a_driver_process,
]

Case = Callable[[Any], Coroutine[Any, Any, None]]


class Outcome(NamedTuple):
    """How a cancelled coroutine ended.

    Attributes:
        count: Its steps.
        was_cancelled: Whether it was cancelled before it came to its end.
    """

    count: int
    was_cancelled: bool


async def cancelled_at(work: Coroutine[Any, Any, None], step: int, way: str) -> Outcome:
    """Runs a coroutine in a task of its own and cancels it at a step, and at the one after that where the way says so."""
    at = [step, step + 1] if way in ("native twice", "scope and native") else [step]
    steps: list[Steps] = []
    asked = False

    async def drive() -> None:
        task = asyncio.current_task()
        assert task is not None

        def cancel(count: int) -> None:
            nonlocal asked
            asked = True
            if way.startswith("native") or count != step:
                task.cancel()
            else:
                scope.cancel()

        with anyio.CancelScope() as scope:
            steps.append(Steps(work, at, cancel))
            await steps[0]

    task = asyncio.create_task(drive())
    done, _ = await asyncio.wait({task}, timeout=LIMIT_S)
    if not done:
        task.print_stack()
        raise AssertionError(f"it hangs after its cancellation at step {step}, {way}")
    if not task.cancelled():
        error = task.exception()
        # An error of its own is no fault where what it used was given up; a group wraps it.
        if error is not None and not _is_of_ours(error):
            raise error
    return Outcome(steps[0].count, asked)


def _is_of_ours(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_of_ours(e) for e in error.exceptions)
    return isinstance(error, aionn.Error | asyncio.CancelledError)


async def until(condition: Callable[[], bool], told: Callable[[], object]) -> None:
    with anyio.move_on_after(LIMIT_S):
        while not condition():
            await anyio.sleep(0.001)
    assert condition(), told()


def steps_of(total: int, seed: int, *, is_long: bool) -> Iterator[int]:
    """Which steps are taken of a coroutine with so many."""
    everything = range(1, total + 1)
    if is_long or total <= SAMPLE + 2:
        yield from everything
        return
    # None where a device in this process answers at once.
    yield from sorted({1, total, *random.Random(seed).sample(everything, SAMPLE)})


async def check_case(bench: Bench, case: Case, way: str, *, is_long: bool) -> None:
    """Cancels a case at its steps, and looks after each."""
    total = (await cancelled_at(case(bench), STEPS_MAX, way)).count
    assert total < STEPS_MAX
    await until(lambda: not bench.left(), bench.left)
    await bench.works()
    await bench.warm()
    gc.collect()
    before = bench.held()
    tasks = len(asyncio.all_tasks())
    for step in steps_of(total, seed=total, is_long=is_long):
        await cancelled_at(case(bench), step, way)
        where = f"{case.__name__}, {way}, step {step} of {total}"
        gc.collect(0)
        await until(lambda: not bench.left(), lambda: f"{where}: left {bench.left()}")  # noqa: B023
        await until(lambda: len(asyncio.all_tasks()) <= tasks, lambda: f"{where}: {asyncio.all_tasks()}")  # noqa: B023
        with anyio.fail_after(LIMIT_S):
            await bench.works()
    gc.collect()

    def is_freed() -> bool:
        return all(now <= then for now, then in zip(bench.held(), before, strict=True))

    await until(is_freed, lambda: f"{case.__name__}, {way}: held {before} before, {bench.held()} now")


async def check_cases(cases: Sequence[Case], way: str, isolation: Isolation, *, is_long: bool) -> None:
    """Checks cases in one runtime."""
    async with aionn.open(drivers=["reference"], isolation=isolation) as runtime:
        net = await runtime.compile(identity())
        async with net.burst() as burst:
            bench = Bench(runtime, net, burst, isolation)
            await bench.works()
            for case in cases:
                await check_case(bench, case, way, is_long=is_long)
            bench.memory.close()


def test_steps_forward_what_is_sent_and_thrown() -> None:
    async def main() -> None:
        seen: list[object] = []

        async def work() -> str:
            await anyio.lowlevel.checkpoint()
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                seen.append("cancelled")
            await anyio.lowlevel.checkpoint()
            return "done"

        task = asyncio.current_task()
        assert task is not None
        steps = Steps(work(), [2], lambda count: task.cancel())
        assert await steps == "done"
        assert (seen, steps.count) == (["cancelled"], 3)
        task.uncancel()

    asyncio.run(main())


@pytest.mark.sampled(16)
@pytest.mark.parametrize("isolation", ["in_process", "process"])
@pytest.mark.parametrize("way", WAYS)
async def test_nothing_is_left_whatever_step_is_cancelled(
    isolation: Isolation, way: str, request: pytest.FixtureRequest
) -> None:
    is_long = request.config.getoption("--long")
    # In the ordinary run each way takes its share of the cases: the half of them, through a driver process a quarter.
    step = 2 if isolation == "in_process" else len(WAYS)
    cases = CASES if is_long else CASES[WAYS.index(way) % step :: step]
    await check_cases(cases, way, isolation, is_long=is_long)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("isolation", ["in_process", "process"])
@pytest.mark.parametrize("deadline", [None, lambda item: aionn.after(60)], ids=["direct", "by deadline"])
async def test_cancelled_stream_does_not_block_the_only_slot(isolation: Isolation, deadline: Any) -> None:
    # The exception, which is kept, refers to the stream: it is neither ended nor dropped.
    async with aionn.open(drivers=["reference"], isolation=isolation) as runtime:
        net = await runtime.compile(identity())
        cancelled = 0
        for delivered in (0, 1, 2):
            for step in range(1, 6):
                async with net.burst(slots=1) as burst:
                    results = burst.stream(numbers(), deadline=deadline)
                    for _ in range(delivered):
                        await anext(results)
                    task = asyncio.ensure_future(_next_cancelled_at(results, step))
                    await asyncio.wait([task])
                    if not task.cancelled():
                        break
                    with pytest.raises(asyncio.CancelledError) as kept:
                        await task
                    with anyio.fail_after(LIMIT_S):
                        assert (await burst.execute([-ONE])).outputs[0] == -1
                        # And it goes on where it was.
                        assert (await anext(results)).outputs[0] == -1 - delivered
                    cancelled += 1
                    del kept
        assert cancelled >= 3


async def _next_cancelled_at(results: aionn.Stream[Any], step: int) -> None:
    task = asyncio.current_task()
    assert task is not None
    await Steps(results.__anext__(), [step], lambda count: task.cancel())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell has its background jobs ignore SIGINT, and what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("isolation", ["in_process", "process"])
@pytest.mark.parametrize("what", ["compilation", "runtime"])
def test_closing_that_is_interrupted_in_a_thread_leaves_nothing(
    isolation: Isolation, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = child_processes()
    with aionn.blocking.open(drivers=["reference"], isolation=isolation) as runtime:
        net = runtime.compile(identity())
        net.execute([-ONE])
        closing: Any = runtime if what == "runtime" else net
        inner: Any = runtime._runtime if what == "runtime" else net._compilation
        aclose = inner.aclose

        async def interrupted() -> None:
            # In the loop's thread, while the main thread waits for the call.
            await Steps(aclose(), [1], lambda _: _thread.interrupt_main())

        monkeypatch.setattr(inner, "aclose", interrupted)
        with pytest.raises(KeyboardInterrupt):
            closing.close()
            threading.Event().wait(LIMIT_S)  # The closing may be quicker than the signal.
        if what == "compilation":
            again = runtime.compile(identity())
            assert again.execute([-ONE]).outputs[0] == -1
            assert list(runtime._runtime._compilations) == [again._compilation]
    assert child_processes() == before


@pytest.mark.sampled(2)
@pytest.mark.forked("any")
@pytest.mark.parametrize("isolation", ["in_process", "process"])
@pytest.mark.thorough
def test_nothing_is_left_on_uvloop(isolation: str, repository: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("uvloop", reason="the cases run on uvloop too, which is not installed here")
    command = [sys.executable, "-W", "error", __file__, "--isolation", isolation]
    if request.config.getoption("--long"):
        command.append("--long")
    done = subprocess.run(
        command,
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing left\n", "")


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser()
    parser.add_argument("--isolation", default="in_process")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--asyncio", action="store_true")
    parser.add_argument("--case", default="")
    parser.add_argument("--way", default="")
    asked = parser.parse_args()

    async def check() -> None:
        for way in [asked.way] if asked.way else WAYS:
            cases = [case for case in CASES if asked.case in ("", case.__name__)]
            if not asked.case and not asked.long:
                # Through a driver process each case costs more, and each way takes one in three of its share.
                step = len(WAYS) * (3 if asked.isolation == "process" else 1)
                cases = cases[WAYS.index(way) * step // len(WAYS) :: step]
            await check_cases(cases, way, asked.isolation, is_long=asked.long)

    factory = None if asked.asyncio else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(check())
    print("nothing left")


if __name__ == "__main__":
    main()
