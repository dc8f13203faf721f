"""Jobs that pass through free slots without a policy: what others see of them, and when there is more to decide."""

from __future__ import annotations

import anyio
import pytest

from aionn.errors import InvalidArgument, MissedDeadline
from aionn.hal import Priority
from aionn.scheduler.dispatcher import PASSING_PAUSE, Dispatcher
from aionn.scheduler.estimates import SURE_COUNT
from aionn.scheduler.job import JobState, TaskJob

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH
MODEL = "model"


class Clock:
    """The time of a test, in nanoseconds."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def dispatcher(clock: Clock) -> Dispatcher:
    return Dispatcher(1, now=clock, can_preempt=True)


def passed(dispatcher: Dispatcher, again: TaskJob | None = None, priority: Priority = MEDIUM) -> TaskJob:
    job = dispatcher.pass_through(again, priority, None, MODEL, None)
    assert job is not None
    return job


def test_one_that_no_other_job_has_met_serves_again(dispatcher: Dispatcher, clock: Clock) -> None:
    first = passed(dispatcher)
    assert first.state is JobState.RUNNING and dispatcher.busy_count == 1
    clock.now += 70
    assert dispatcher.release(first) == clock.now
    assert dispatcher.busy_count == 0
    clock.now += 5
    assert passed(dispatcher, first) is first and first.started_ns == clock.now
    dispatcher.release(first)
    assert passed(dispatcher, first, HIGH) is not first, "it has another class"
    statistics = dispatcher.statistics()
    assert (statistics.entered, statistics.started, statistics.waiting) == (3, 3, 0)


def test_its_durations_are_learnt_as_those_of_others(dispatcher: Dispatcher, clock: Clock) -> None:
    job = None
    for _ in range(SURE_COUNT):
        job = passed(dispatcher, job)
        clock.now += 500
        dispatcher.release(job)
    job = passed(dispatcher, job)
    clock.now += 1
    dispatcher.release(job, outcome="failed")
    assert dispatcher.least_ns(MODEL) == 500
    passed(dispatcher, job)
    clock.now += 10
    with pytest.raises(MissedDeadline, match="even an idle device needs 500 ns"):
        dispatcher.enter(priority=MEDIUM, deadline_ns=clock.now + 400, model=MODEL)


@pytest.mark.parametrize("outcome", ["ended", "late", "failed"])
def test_one_that_runs_is_preempted_as_any_other(dispatcher: Dispatcher, clock: Clock, outcome: str) -> None:
    job = passed(dispatcher, priority=LOW)
    clock.now += 10
    urgent = dispatcher.enter(priority=HIGH, deadline_ns=None, model=MODEL)
    assert urgent.state is JobState.RUNNING and urgent.has_preempted
    assert job.state is JobState.WAITING and job.was_preempted
    dispatcher.release(urgent)
    assert job.state is JobState.RUNNING, "the device continues with it"
    dispatcher.release(job, outcome=outcome)  # type: ignore[arg-type]
    assert passed(dispatcher, job) is not job, "a policy has seen it"


async def test_others_wait_for_it(clock: Clock) -> None:
    dispatcher = Dispatcher(1, now=clock)
    job = passed(dispatcher)
    assert "slot 0: <Job" in dispatcher.explain()
    other = dispatcher.enter(priority=HIGH, deadline_ns=None, model=MODEL)
    assert other.state is JobState.WAITING
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dispatcher.wait, other)
        await anyio.wait_all_tasks_blocked()
        assert dispatcher.pass_through(None, HIGH, None, MODEL, None) is None, "another waits"
        dispatcher.release(job)
    assert other.state is JobState.RUNNING
    assert dispatcher.pass_through(None, HIGH, None, MODEL, None) is None, "the slot is held"
    dispatcher.release(other)
    with pytest.raises(InvalidArgument, match="not held"):
        dispatcher.release(job)


def test_none_passes_while_time_is_reserved(dispatcher: Dispatcher) -> None:
    job = passed(dispatcher)
    dispatcher.limit_best_effort(10**6)
    dispatcher.release(job)
    assert dispatcher.pass_through(job, MEDIUM, None, MODEL, None) is None
    dispatcher.limit_best_effort(None)
    dispatcher.release(passed(dispatcher, job))


def test_low_job_does_not_pass_where_a_slot_is_kept_from_it_and_others_keep_that_slot(clock: Clock) -> None:
    dispatcher = Dispatcher(2, now=clock, keeps_slot=True)
    assert dispatcher.pass_through(None, LOW, None, MODEL, None) is None
    job = passed(dispatcher)
    dispatcher.release(job)
    low = [dispatcher.enter(priority=LOW, deadline_ns=None, model=MODEL) for _ in range(2)]
    assert [each.state for each in low] == [JobState.RUNNING, JobState.WAITING]


def test_jobs_pass_through_all_slots_and_leave_them_in_any_order(clock: Clock) -> None:
    dispatcher = Dispatcher(2, now=clock)
    first, second = passed(dispatcher), passed(dispatcher)
    assert first is not second and dispatcher.busy_count == 2
    assert dispatcher.pass_through(None, MEDIUM, None, MODEL, None) is None, "no slot is free"
    clock.now += 40
    dispatcher.release(first)
    assert passed(dispatcher, first) is first and dispatcher.busy_count == 2
    clock.now += 10
    dispatcher.release(second)
    dispatcher.release(first)
    assert dispatcher.busy_count == 0 and dispatcher.expected_ns(MODEL) >= 50
    assert dispatcher.statistics().started == 3


def test_job_that_waits_beside_two_that_pass_gets_the_slot_of_the_first_that_ends(clock: Clock) -> None:
    dispatcher = Dispatcher(2, now=clock)
    first, second = passed(dispatcher), passed(dispatcher)
    other = dispatcher.enter(priority=HIGH, deadline_ns=None, model=MODEL)
    assert other.state is JobState.WAITING and "slot 1: <Job" in dispatcher.explain()
    dispatcher.release(second)
    assert other.state is JobState.RUNNING
    dispatcher.release(other)
    dispatcher.release(first)
    assert dispatcher.busy_count == 0 and dispatcher.statistics().entered == 3


def test_after_a_job_that_waited_some_do_not_pass_beside_others(clock: Clock) -> None:
    dispatcher = Dispatcher(2, now=clock)
    running = [passed(dispatcher), passed(dispatcher)]
    waiting = dispatcher.enter(priority=MEDIUM, deadline_ns=None, model=MODEL)
    for job in (*running, waiting):
        dispatcher.release(job)
    job = passed(dispatcher)
    for _ in range(PASSING_PAUSE):
        assert dispatcher.pass_through(None, MEDIUM, None, MODEL, None) is None
    dispatcher.release(passed(dispatcher))
    dispatcher.release(job)


def test_none_passes_beside_one_that_is_late(clock: Clock) -> None:
    dispatcher = Dispatcher(2, now=clock)
    late = dispatcher.pass_through(None, MEDIUM, clock.now + 10, MODEL, None)
    assert late is not None
    clock.now += 10
    assert dispatcher.pass_through(None, MEDIUM, None, MODEL, None) is None, "the policy ends it first"


def test_one_that_is_cancelled_leaves_the_slot(dispatcher: Dispatcher) -> None:
    job = passed(dispatcher)
    dispatcher.leave(job)
    assert dispatcher.busy_count == 0
    dispatcher.release(passed(dispatcher))


def test_one_with_a_deadline_passes_where_an_idle_device_ends_it_in_time(
    dispatcher: Dispatcher, clock: Clock
) -> None:
    job = dispatcher.pass_through(None, MEDIUM, clock.now + 300, MODEL, 200)
    assert job is not None
    clock.now += 400
    dispatcher.release(job, outcome="late")
    assert dispatcher.pass_through(job, MEDIUM, clock.now + 300, MODEL, 200) is None, (
        "it takes 400 ns at least"
    )
    assert dispatcher.pass_through(job, MEDIUM, clock.now + 10**6, MODEL, 200) is job
    assert job.deadline_ns == clock.now + 10**6
    urgent = dispatcher.enter(priority=MEDIUM, deadline_ns=clock.now + 300, model="another")
    assert urgent.state is JobState.RUNNING and job.urgent_ns == job.deadline_ns, "it would be late otherwise"
