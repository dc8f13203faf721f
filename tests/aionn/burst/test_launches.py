"""Launches of a burst: when they are done, who reads their results, and what is sent."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from aionn.burst.session import BurstState
from aionn.errors import DeadObject, GeneralFailure, InvalidArgument
from aionn.hal import ExecutionResult, Memory, OutputShape, Request
from tests.aionn.burst.both_ends import ANSWER_S_MAX, Ends, doubling


class Held:
    """An executor of a burst that works until it is let go.

    Attributes:
        begun: Released once for each execution that has begun.
        go: Lets them end.
    """

    def __init__(self, ends: Ends) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Event()
        self._ends = ends
        ends.execute = self._execute

    def _execute(self, request: Request, measure: bool) -> ExecutionResult:
        self.begun.release()
        assert self.go.wait(ANSWER_S_MAX)
        return self._ends._double(request, measure)

    async def has_begun(self) -> None:
        assert await anyio.to_thread.run_sync(self.begun.acquire, True, ANSWER_S_MAX)


async def test_launch_is_done_when_the_device_is_although_its_caller_has_left(
    ends: Ends, memory: Memory
) -> None:
    held = Held(ends)
    launches: list[Any] = []
    launch_of = ends.controller.launch

    def launch(*arguments: Any, **options: Any) -> Any:
        launches.append(launch_of(*arguments, **options))
        return launches[-1]

    ends.controller.launch = launch  # type: ignore[method-assign]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends.controller.execute_synchronously, doubling(memory), [0])
        await held.has_begun()
        tasks.cancel_scope.cancel()
    (left,) = launches
    with anyio.move_on_after(0.02) as scope:
        await left.done
    assert scope.cancelled_caught and left.is_cancelled and not left.is_done, (
        "the device has not answered yet"
    )
    held.go.set()
    with anyio.fail_after(ANSWER_S_MAX):
        await left.done
    assert left.is_done and ends.controller.state == BurstState.IDLE
    assert left.outcome() == ExecutionResult(True, (OutputShape((1,)),))


async def test_launch_has_an_outcome_for_each_way_to_wait(ends: Ends, memory: Memory) -> None:
    for _ in range(3):
        launch = ends.controller.launch(doubling(memory), [0])
        with pytest.raises(RuntimeError, match="no outcome before it is done"):
            launch.outcome()
        async with anyio.create_task_group() as tasks:
            results: list[ExecutionResult] = []

            async def wait(launch: Any, results: list[ExecutionResult]) -> None:
                results.append(await launch)

            for _ in range(2):
                tasks.start_soon(wait, launch, results)
            await launch.done
        assert results == [launch.outcome()] * 2


async def test_launch_after_a_cancelled_one_is_sent_when_that_is_done(ends: Ends, memory: Memory) -> None:
    held = Held(ends)
    first = ends.controller.launch(doubling(memory), [0])
    with pytest.raises(InvalidArgument, match="cannot send while in flight"):
        ends.controller.launch(doubling(memory), [0])
    await held.has_begun()
    first.cancel()
    second = ends.controller.launch(doubling(memory), [0])
    assert not ends.requests.wait_readable(1, 0), "it waits here, not in the queue"
    held.go.set()
    with anyio.fail_after(ANSWER_S_MAX):
        assert (await second).output_sufficient_size
    assert first.is_done and ends.executed == 2


async def test_launch_that_is_cancelled_while_it_waits_is_never_sent(ends: Ends, memory: Memory) -> None:
    held = Held(ends)
    first = ends.controller.launch(doubling(memory), [-1])
    await held.has_begun()
    first.cancel()
    for _ in range(3):
        waiting = ends.controller.launch(doubling(memory), [-1])
        waiting.cancel()
        with pytest.raises(GeneralFailure, match="cancelled before it was sent"):
            await waiting
    held.go.set()
    with anyio.fail_after(ANSWER_S_MAX):
        await first.done
        await ends.controller.execute_synchronously(doubling(memory), [-1])
    assert ends.executed == 2
    assert ends.asked == [[0], [0]] and ends.freed == [0, 0], "slots of what was never sent are free again"


async def test_death_ends_launches_without_a_waiter(ends: Ends, memory: Memory) -> None:
    held = Held(ends)
    sent = ends.controller.launch(doubling(memory), [0])
    await held.has_begun()
    sent.cancel()
    waiting = ends.controller.launch(doubling(memory), [0])
    ends.controller.peer_died("unplugged")
    held.go.set()
    for launch in (sent, waiting):
        assert launch.is_done
        with pytest.raises(DeadObject, match="unplugged"):
            launch.outcome()


async def test_task_that_stops_waiting_does_not_cancel_its_launch(ends: Ends, memory: Memory) -> None:
    held = Held(ends)
    launch = ends.controller.launch(doubling(memory), [0])
    await held.has_begun()
    with anyio.move_on_after(0.02) as scope:
        await launch
    assert scope.cancelled_caught and not launch.is_cancelled
    assert ends.controller.state == BurstState.IN_FLIGHT
    held.go.set()
    with anyio.fail_after(ANSWER_S_MAX):
        assert (await launch).output_sufficient_size


async def test_launch_that_failed_is_freed_with_its_error(ends: Ends, memory: Memory) -> None:
    """Without the garbage collector: an error refers to the frames that it was raised through, and these to the launch."""

    def fail(request: Request, measure: bool) -> ExecutionResult:
        raise GeneralFailure("planted")

    launches: list[weakref.ref[Any]] = []

    async def execute() -> ExecutionResult:
        launch = ends.controller.launch(doubling(memory), [0])
        launches.append(weakref.ref(launch))
        return await launch

    ends.execute = fail
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(GeneralFailure, match="GENERAL_FAILURE"):
            await execute()
        assert launches[0]() is None
    finally:
        gc.enable()


async def test_burst_that_ends_forgets_the_launch_that_it_has_sent(ends: Ends, memory: Memory) -> None:
    """A launch refers to its burst: a burst that refers to it would keep its queues until the garbage collector finds both."""
    held = Held(ends)
    launch = ends.controller.launch(doubling(memory), [0])
    await held.has_begun()
    launch.cancel()
    sent = weakref.ref(launch)
    gc.collect()
    gc.disable()
    try:
        ends.controller.peer_died("unplugged")
        held.go.set()
        with anyio.fail_after(ANSWER_S_MAX):
            await launch.done
        del launch
        await anyio.lowlevel.checkpoint()
        assert sent() is None
    finally:
        gc.enable()
