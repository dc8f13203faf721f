"""The dispatcher's slot that is kept from LOW jobs while a device has more urgent work."""

import random

import anyio
import pytest

from aionn.errors import MissedDeadline
from aionn.hal import Priority
from aionn.scheduler.dispatcher import KEPT_NS, Dispatcher
from aionn.scheduler.job import NEVER_NS, JobState

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH


def now_ns():
    return int(anyio.current_time() * 1e9)


def running(*jobs):
    return [job.state is JobState.RUNNING for job in jobs]


def test_low_jobs_leave_a_slot_to_more_urgent_ones_for_some_time():
    clock = [0]
    dispatcher = Dispatcher(2, now=lambda: clock[0], keeps_slot=True)

    def enter(priority):
        return dispatcher.enter(priority=priority, deadline_ns=None)

    first, second, third = enter(LOW), enter(LOW), enter(LOW)
    assert running(first, second, third) == [True, True, False]  # Nothing more urgent has come.
    high = enter(HIGH)
    dispatcher.release(first)
    assert running(high, third) == [True, False]
    dispatcher.release(high)
    assert running(second, third) == [True, False]  # The other slot stays free.
    clock[0] += 1000
    medium = enter(MEDIUM)
    assert running(medium, third) == [True, False]
    dispatcher.release(second)
    assert running(third) == [True]  # They go on, one at a time.
    dispatcher.release(medium)
    clock[0] += KEPT_NS
    assert running(enter(LOW), enter(LOW)) == [True, False]


def test_low_job_with_lent_urgency_takes_the_slot_that_is_kept():
    clock = [0]
    dispatcher = Dispatcher(2, now=lambda: clock[0], keeps_slot=True)
    dispatcher.release(dispatcher.enter(priority=HIGH, deadline_ns=None))
    jobs = [dispatcher.enter(priority=LOW, deadline_ns=None) for _ in range(3)]
    assert running(*jobs) == [True, False, False]
    dispatcher.hasten(jobs[2], HIGH, NEVER_NS)
    assert running(*jobs) == [True, False, True]


async def test_low_job_that_is_kept_waiting_is_told_before_its_deadline():
    dispatcher = Dispatcher(2, now=now_ns, keeps_slot=True)
    dispatcher.release(dispatcher.enter(priority=HIGH, deadline_ns=None))
    dispatcher.enter(priority=LOW, deadline_ns=None)
    late = dispatcher.enter(priority=LOW, deadline_ns=now_ns() + 20_000_000)
    with pytest.raises(MissedDeadline):
        await dispatcher.wait(late)
    assert dispatcher.statistics().waiting == 0


@pytest.mark.parametrize(("slot_count", "can_preempt"), [(1, False), (2, True)])
def test_no_slot_is_kept_where_there_is_one_or_low_jobs_yield(slot_count, can_preempt):
    dispatcher = Dispatcher(slot_count, now=lambda: 0, can_preempt=can_preempt, keeps_slot=True)
    dispatcher.release(dispatcher.enter(priority=HIGH, deadline_ns=None))
    assert running(*(dispatcher.enter(priority=LOW, deadline_ns=None) for _ in range(slot_count))) == (
        [True] * slot_count
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("slot_count", [2, 3])
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 50), marks=pytest.mark.long)], ids=str)
def test_with_a_kept_slot_no_job_is_lost_and_low_jobs_never_hold_all(slot_count, seeds):
    for seed in seeds:
        generator = random.Random(seed)
        clock = [0]
        dispatcher = Dispatcher(slot_count, now=lambda clock=clock: clock[0], keeps_slot=True)
        jobs, urgent_ns = [], -KEPT_NS
        for _ in range(100):
            clock[0] += generator.choice((0, 1000, KEPT_NS // 8, KEPT_NS))
            held = [job for job in jobs if job.state is JobState.RUNNING]
            before = {job.number for job in held}
            if generator.random() < 0.55:
                priority = generator.choice((LOW, LOW, LOW, MEDIUM, HIGH))
                urgent_ns = urgent_ns if priority is LOW else clock[0]
                jobs.append(dispatcher.enter(priority=priority, deadline_ns=None))
            elif held:
                dispatcher.release(generator.choice(held))
            held = [job for job in jobs if job.state is JobState.RUNNING]
            waiting = [job for job in jobs if job.state is JobState.WAITING]
            assert not any(job.rank > LOW for job in waiting) or len(held) == slot_count
            begun = [job for job in held if job.number not in before and job.rank == LOW]
            low_count = sum(job.rank == LOW for job in held)  # One that has aged may take the kept slot.
            assert not begun or clock[0] - urgent_ns >= KEPT_NS or low_count < slot_count
            assert not waiting or held  # Its end starts one of them.
        while held := [job for job in jobs if job.state is JobState.RUNNING]:
            dispatcher.release(held[0])
        assert {job.state for job in jobs} == {JobState.ENDED}
