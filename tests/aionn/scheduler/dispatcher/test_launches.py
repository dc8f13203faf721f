"""A job that gets its slot is launched when its task resumes; until then another job may take the slot, and it waits as before."""

import asyncio
import contextlib
import random

import anyio
import numpy as np
import pytest

import aionn
from aionn.errors import MissedDeadline
from aionn.hal import Priority
from aionn.scheduler.dispatcher import Dispatcher
from aionn.scheduler.job import JobState
from aionn.testing import SimulatedDevice, models
from aionn.testing.clock import VirtualClockLoop
from tests.aionn.scheduler.table import acquire

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH
MS = 1_000_000

TURNS_MAX = 2_000
"""Turns of the loop at one virtual time; a task that never sleeps needs more."""


class WatchedLoop(VirtualClockLoop):
    """A loop in virtual time that ends where its time stands still."""

    at_s = -1.0
    turns = 0

    def _run_once(self):
        super()._run_once()
        if self.time() != self.at_s:
            self.at_s, self.turns = self.time(), 0
        self.turns += 1
        assert self.turns <= TURNS_MAX, f"something spins at {self.at_s} s"


def run(main, *args):
    with asyncio.Runner(loop_factory=lambda: WatchedLoop(None)) as runner:
        return runner.run(main(*args))


def now_ns():
    return round(anyio.current_time() * 1e9)


class Device:
    """A dispatcher, and what its jobs have launched."""

    def __init__(self, slot_count):
        self.slot_count = slot_count
        self.dispatcher = Dispatcher(slot_count, now=now_ns, can_preempt=True)
        self.launched = []
        self.ends = []

    async def execute(self, name, priority, duration_ms, *, deadline_ms=None, declared_ms=None):
        """Runs for so long, also while it is preempted."""
        deadline_ns = None if deadline_ms is None else now_ns() + deadline_ms * MS
        least_ns = 1 if declared_ms is None else declared_ms * MS
        try:
            job = await acquire(
                self.dispatcher,
                priority=priority,
                deadline_ns=deadline_ns,
                model=None if declared_ms is None else object(),
                declared_ns=least_ns,
            )
        except MissedDeadline:
            assert now_ns() + least_ns > deadline_ns, f"{name} is rejected early"
            self.ends.append((name, "rejected", now_ns() // MS))
            return
        self.launched.append(job)
        preempted_count = self.dispatcher.explain().count("preempted at the device")
        assert len(self.launched) <= self.slot_count + preempted_count, f"{name} has no slot"
        try:
            await anyio.sleep_until((now_ns() + duration_ms * MS) / 1e9)
            self.ends.append((name, "ended", now_ns() // MS))
        finally:
            self.launched.remove(job)
            self.dispatcher.release(job)

    def assert_idle(self):
        assert self.dispatcher.busy_count == 0 and self.dispatcher.statistics().waiting == 0
        assert self.dispatcher.explain() == "\n".join(f"slot {i}: free" for i in range(self.slot_count))
        assert not self.dispatcher._jobs, "it keeps jobs that have ended"


@pytest.mark.parametrize("deadline_ms", [None, 20])
def test_job_that_loses_its_slot_before_its_launch_waits_as_before(deadline_ms):
    async def main():
        device = Device(1)

        async def twice():
            await device.execute("first", HIGH, 2)
            await device.execute("second", HIGH, 2)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(twice)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(lambda: device.execute("medium", MEDIUM, 2, deadline_ms=deadline_ms))
            tasks.start_soon(lambda: device.execute("low", LOW, 2, deadline_ms=15))
        device.assert_idle()
        assert device.dispatcher.counts()["preempted"] == 0, "the device had none of those that waited"
        return device.ends

    assert run(main) == [
        ("first", "ended", 2),
        ("second", "ended", 4),
        ("medium", "ended", 6),
        ("low", "ended", 8),
    ]


@pytest.mark.parametrize("deadline_s", [None, 20.0])
def test_execution_that_loses_its_slot_before_its_launch_is_not_sent_to_the_device(deadline_s):
    ends = []

    async def main():
        device = SimulatedDevice("npu", run_time_s=2.0, results="zeros")
        async with aionn.open(devices=[device]) as runtime:
            net = await runtime.compile(models.identity((1,), operations=4))

            async def execute(name, priority, within_s, times=1):
                deadline = None if within_s is None else aionn.after(within_s)
                for _ in range(times):
                    await net.execute([np.zeros(1, np.float32)], priority=priority, deadline=deadline)
                    ends.append((name, round(anyio.current_time() - began_s)))

            began_s = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(execute, "high", "high", None, 2)
                await anyio.sleep(0.1)
                tasks.start_soon(execute, "medium", "medium", deadline_s)
                tasks.start_soon(execute, "low", "low", 15.0)
            return device.statistics()

    statistics = run(main)
    assert ends == [("high", 2), ("high", 4), ("medium", 6), ("low", 8)]
    assert (statistics.started, statistics.preempted) == (4, 0)


def lost():
    """A dispatcher on which a job got its slot from a HIGH one, and lost it to another before its launch."""
    clock = [0]
    dispatcher = Dispatcher(1, now=lambda: clock[0], can_preempt=True)
    high = dispatcher.enter(priority=HIGH, deadline_ns=None)
    job = dispatcher.enter(priority=MEDIUM, deadline_ns=1000, model="m", declared_ns=100)
    dispatcher.release(high)
    assert job.state is JobState.RUNNING
    high = dispatcher.enter(priority=HIGH, deadline_ns=None)
    assert high.state is JobState.RUNNING and job.state is JobState.WAITING
    return clock, dispatcher, high, job


async def test_lost_slot_leaves_no_trace_in_the_next_start():
    clock, dispatcher, high, job = lost()
    assert "preempted at the device" not in dispatcher.explain()
    clock[0] = 500
    dispatcher.release(high)
    await dispatcher.wait(job)
    clock[0] = 550
    dispatcher.release(job)
    assert job.started_ns == 500
    assert dispatcher.expected_ns("m", 100) < 100, "its duration is learnt as that of any other"


async def test_job_that_lost_its_slot_is_rejected_when_it_cannot_end_in_time():
    clock, dispatcher, high, job = lost()
    clock[0] = 901
    dispatcher.enter(priority=LOW, deadline_ns=None)
    assert job.state is JobState.ENDED
    with pytest.raises(MissedDeadline):
        await dispatcher.wait(job)
    dispatcher.release(high)


async def test_job_that_lost_its_slot_can_be_cancelled():
    _, dispatcher, high, job = lost()
    dispatcher.leave(job)
    assert job.state is JobState.ENDED and dispatcher.statistics().waiting == 0
    dispatcher.release(high)
    assert dispatcher.busy_count == 0


async def test_job_that_takes_the_slot_of_another_also_preempts_what_that_one_preempted():
    dispatcher = Dispatcher(1, now=lambda: 0, can_preempt=True)
    low = dispatcher.enter(priority=LOW, deadline_ns=None)
    waiting = dispatcher.enter(priority=LOW, deadline_ns=None, model="m", declared_ns=100)
    dispatcher.change_priority(waiting, HIGH)
    assert (waiting.state, waiting.has_preempted) == (JobState.RUNNING, True)
    second = dispatcher.enter(priority=HIGH, deadline_ns=50, model="n", declared_ns=10)
    assert (second.state, second.has_preempted) == (JobState.RUNNING, True)
    assert (waiting.state, waiting.has_preempted, waiting.was_preempted) == (JobState.WAITING, False, False)
    assert dispatcher.counts()["preempted"] == 1
    for job in (second, low):
        dispatcher.release(job)
    dispatcher.leave(waiting)
    assert dispatcher.busy_count == 0


@pytest.mark.parametrize("slot_count", [1, 2])
@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 200), marks=pytest.mark.long)], ids=str)
@pytest.mark.thorough
def test_whatever_happens_at_the_same_time_none_launches_without_a_slot_or_is_rejected_early(
    seeds, slot_count
):
    for seed in seeds:
        try:
            run(play, random.Random(seed), slot_count)
        except BaseException as e:
            e.add_note(f"seed {seed}")
            raise


async def play(rng, slot_count):
    """Tasks that execute one job after another; small whole numbers make much of it happen at the same time."""
    device = Device(slot_count)

    async def executing(name, scope):
        with scope:
            for number in range(rng.randrange(2, 8)):
                with contextlib.ExitStack() as stack:
                    if rng.random() < 0.2:
                        stack.enter_context(anyio.move_on_after(rng.randrange(6) / 1000))
                    await device.execute(
                        f"{name}.{number}",
                        rng.choice([LOW, MEDIUM, HIGH]),
                        rng.randrange(4),
                        deadline_ms=rng.choice([None, 1, 3, 6, 12, 30]),
                        declared_ms=rng.choice([None, 1, 2, 3]),
                    )
                if rng.random() < 0.3:
                    await anyio.sleep_until((now_ns() + rng.randrange(4) * MS) / 1e9)

    async with anyio.create_task_group() as tasks:
        scopes = [anyio.CancelScope() for _ in range(rng.randrange(3, 9))]
        for name, scope in enumerate(scopes):
            tasks.start_soon(executing, name, scope)
        for scope in scopes:
            if rng.random() < 0.3:
                await anyio.sleep_until((now_ns() + rng.randrange(4) * MS) / 1e9)
                scope.cancel()
    device.assert_idle()
