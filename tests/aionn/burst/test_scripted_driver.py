"""A driver's end that a test writes by hand: what closes, dies or fails while an execution runs, and when its launch is done."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import fmq
from aionn.burst import controller as controller_module
from aionn.burst import outcomes
from aionn.burst.controller import BurstController
from aionn.burst.packets import encode_result, result_of
from aionn.burst.session import BurstState
from aionn.errors import DeadObject, GeneralFailure
from aionn.hal import ExecutionResult, Memory, OutputShape
from tests.aionn.burst.both_ends import ANSWER_S_MAX, doubling

RESULT = ExecutionResult(True, (OutputShape((1,)),))
TURNS = 20
"""Turns of the loop after which everything that needs no other event has happened."""


class Driver:
    """The driver's end: it answers when a test has it do so.

    Attributes:
        controller: The client's end.
        ending, freeing: Set when the client has asked for it.
        ended, freed: Let the answer come.
        end_error, free_error: The answer, where it is a failure.
        slots: Those whose freeing was answered.
    """

    def __init__(self) -> None:
        self.requests = fmq.MessageQueue.create(1, 1 << 12)
        self.results = fmq.MessageQueue.create(1, 1 << 12)
        self.read = fmq.MessageQueue.attach(self.requests.descriptor, self.requests.fds)
        self.write = fmq.MessageQueue.attach(self.results.descriptor, self.results.fds)
        self.ending, self.ended = anyio.Event(), anyio.Event()
        self.freeing, self.freed = anyio.Event(), anyio.Event()
        self.end_error: Exception | None = None
        self.free_error: Exception | None = None
        self.slots: list[int] = []
        self.controller = BurstController(self.requests, self.results, free_slot=self._free, end=self._end)

    async def _free(self, slot: int) -> None:
        self.freeing.set()
        await self.freed.wait()
        if self.free_error is not None:
            raise self.free_error
        self.slots.append(slot)

    async def _end(self) -> None:
        self.ending.set()
        await self.ended.wait()
        if self.end_error is not None:
            raise self.end_error

    def answer(self) -> None:
        """Executes the next request."""
        assert self.read.read_message() is not None, "there is a request"
        assert self.write.write_message(encode_result(result_of(RESULT)))

    @property
    def is_closed(self) -> bool:
        """Whether the client's end has closed both queues."""
        return self.requests.closed and self.results.closed


@pytest.fixture
async def driver(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Driver]:
    monkeypatch.setattr(controller_module, "END_S_MAX", 0.0)
    scripted = Driver()
    yield scripted
    scripted.ended.set()
    scripted.freed.set()
    await scripted.controller.aclose()
    await turns()
    assert scripted.is_closed
    scripted.read.close()
    scripted.write.close()


async def turns() -> None:
    for _ in range(TURNS):
        await anyio.lowlevel.checkpoint()


async def done(launch: Any) -> Any:
    """The outcome of a launch that must end."""
    with anyio.fail_after(ANSWER_S_MAX):
        await launch.done
    return launch.outcome()


# Closing


async def test_launch_of_a_closed_burst_is_done_with_its_result(driver: Driver, memory: Memory) -> None:
    launch = driver.controller.launch(doubling(memory), [0])
    await driver.controller.aclose()
    await turns()
    assert driver.ending.is_set() and not launch.is_done and not driver.is_closed, "the device may be at work"
    driver.answer()
    assert await done(launch) == RESULT
    assert not driver.is_closed
    driver.ended.set()
    await turns()
    assert driver.is_closed


async def test_launch_that_the_driver_never_read_is_done_with_the_drivers_end(
    driver: Driver, memory: Memory
) -> None:
    launch = driver.controller.launch(doubling(memory), [0])
    await driver.controller.aclose()
    await turns()
    assert not launch.is_done
    driver.ended.set()
    with pytest.raises(DeadObject, match="it was closed"):
        await done(launch)
    assert driver.is_closed


@pytest.mark.parametrize("is_written", [True, False])
async def test_death_during_the_closing_ends_the_launch_and_closes_the_queues(
    driver: Driver, memory: Memory, is_written: bool
) -> None:
    launch = driver.controller.launch(doubling(memory), [0])
    await driver.controller.aclose()
    if is_written:
        driver.answer()
    driver.controller.peer_died("unplugged")
    assert launch.is_done and driver.is_closed
    if is_written:
        assert launch.outcome() == RESULT
    else:
        with pytest.raises(DeadObject, match="unplugged"):
            launch.outcome()


async def test_launch_of_a_driver_that_fails_to_end_is_done_with_its_result(
    driver: Driver, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    driver.end_error = GeneralFailure("no")
    driver.ended.set()
    launch = driver.controller.launch(doubling(memory), [0])
    await driver.controller.aclose()
    await turns()
    assert not launch.is_done and "cannot end it" in caplog.text
    driver.answer()
    assert await done(launch) == RESULT
    await turns()
    assert driver.is_closed


async def test_launch_that_waits_is_done_when_its_burst_is_closed(driver: Driver, memory: Memory) -> None:
    first = driver.controller.launch(doubling(memory), [0])
    first.cancel()
    second = driver.controller.launch(doubling(memory), [-1])
    await driver.controller.aclose()
    assert second.is_done and not first.is_done, "only one was sent"
    driver.answer()
    await done(first)
    assert driver.read.read_message() is None


async def test_burst_in_which_nothing_runs_is_closed_although_its_driver_hangs(driver: Driver) -> None:
    await driver.controller.aclose()
    assert driver.ending.is_set() and driver.is_closed


async def test_burst_that_is_dead_is_ended_at_a_driver_that_lives(driver: Driver) -> None:
    driver.controller.peer_died("the driver ended the burst")
    driver.ended.set()
    await driver.controller.aclose()
    assert driver.ending.is_set()


# Slots


async def test_result_that_was_read_outlives_the_driver_that_frees_its_slot(
    driver: Driver, memory: Memory
) -> None:
    launch = driver.controller.launch(doubling(memory), [-1])
    _ = launch.done
    await turns()
    driver.answer()
    with anyio.fail_after(ANSWER_S_MAX):
        await driver.freeing.wait()
    assert not launch.is_done
    driver.free_error = DeadObject("gone")
    driver.controller.peer_died("unplugged")
    driver.freed.set()
    assert await done(launch) == RESULT
    with pytest.raises(DeadObject, match="unplugged"):
        driver.controller.launch(doubling(memory), [0])


@pytest.mark.parametrize("error", [GeneralFailure("no"), DeadObject("no"), MemoryError("no")])
async def test_driver_that_cannot_free_a_slot_ends_its_burst(
    driver: Driver, memory: Memory, error: Exception
) -> None:
    driver.freed.set()
    driver.free_error = error
    launch = driver.controller.launch(doubling(memory), [-1])
    driver.answer()
    assert await done(launch) == RESULT
    assert not driver.controller._slots._memory_by_slot, "the memory is free"
    with pytest.raises(DeadObject, match="the driver cannot free a memory slot: no"):
        driver.controller.launch(doubling(memory), [-1])


async def test_slot_of_a_released_memory_is_not_used_before_the_driver_forgot_it(
    driver: Driver, memory: Memory
) -> None:
    launch = driver.controller.launch(doubling(memory), [5])
    driver.answer()
    await done(launch)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(driver.controller.release_memory_resource, 5)
        await driver.freeing.wait()
        other = Memory.create(64)
        launch = driver.controller.launch(doubling(other), [6])
        assert driver.controller.memories([1]) == [other]
        driver.freed.set()
    driver.answer()
    await done(launch)
    assert driver.slots == [0]


async def test_release_that_is_cancelled_frees_the_slot_all_the_same(driver: Driver, memory: Memory) -> None:
    launch = driver.controller.launch(doubling(memory), [5])
    driver.answer()
    await done(launch)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(driver.controller.release_memory_resource, 5)
        await driver.freeing.wait()
        tasks.cancel_scope.cancel()
    driver.freed.set()
    await turns()
    assert driver.slots == [0] and not driver.controller._slots._memory_by_slot


# Reading


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
async def test_reading_that_fails_is_tried_again(
    driver: Driver, memory: Memory, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    failures = 0

    class Failing:
        def __init__(self, queue: fmq.MessageQueue) -> None:
            self._right = right(queue)

        def __await__(self) -> Generator[Any, None, bytes]:
            nonlocal failures
            if failures < 3:
                failures += 1
                raise error
            return (yield from self._right.__await__())

    right = fmq.aio.message_reader
    monkeypatch.setattr(fmq.aio, "message_reader", Failing)
    monkeypatch.setattr(controller_module, "UNWATCHED_S", 0.0)
    first = driver.controller.launch(doubling(memory), [0])
    first.cancel()
    second = driver.controller.launch(doubling(memory), [1])
    await turns()
    assert failures == 3 and not first.is_done, "the device may be at work"
    driver.answer()
    assert await done(first) == RESULT
    driver.answer()
    assert await done(second) == RESULT


async def test_result_whose_decoding_fails_unexpectedly_ends_its_launch(
    driver: Driver, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(payload: bytes) -> Any:
        raise RuntimeError("planted")

    launch = driver.controller.launch(doubling(memory), [0])
    with monkeypatch.context() as patched:
        patched.setattr(outcomes, "decode_result", decode)
        driver.answer()
        with pytest.raises(GeneralFailure, match="planted"):
            await done(launch)
    launch = driver.controller.launch(doubling(memory), [0])
    driver.answer()
    assert await done(launch) == RESULT


async def test_launch_that_cannot_be_sent_in_its_turn_ends(
    driver: Driver, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(payload: bytes) -> bool:
        raise MemoryError("planted")

    first = driver.controller.launch(doubling(memory), [0])
    first.cancel()
    second = driver.controller.launch(doubling(memory), [-1])
    with monkeypatch.context() as patched:
        patched.setattr(driver.requests, "write_message", write)
        driver.answer()
        with pytest.raises(GeneralFailure, match="planted"):
            await done(second)
    assert first.is_done and driver.controller.state == BurstState.IDLE
