"""The event loop's shell: slots are exclusive, held and given back, whoever is cancelled or late."""

import contextlib
import random
import re

import anyio
import pytest

from aionn.errors import InvalidArgument, MissedDeadline, ResourceExhausted
from aionn.hal import Priority
from aionn.observability.tracing import start_tracing, stop_tracing
from aionn.scheduler.bandwidth import BandwidthServer
from aionn.scheduler.dispatcher import PREEMPTED_MAX, PROBE_EVERY, Dispatcher
from aionn.scheduler.estimates import SURE_COUNT
from aionn.scheduler.job import NEVER_NS, Abort, JobState, Preempt, Start
from tests.aionn.scheduler.table import acquire

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH


def now_ns():
    return int(anyio.current_time() * 1e9)


@pytest.fixture
def dispatcher():
    return Dispatcher(1, now=now_ns)


async def hold(dispatcher, order, name, *, priority=MEDIUM, deadline_ns=None):
    job = await acquire(dispatcher, priority=priority, deadline_ns=deadline_ns)
    order.append(name)
    await anyio.lowlevel.checkpoint()
    dispatcher.release(job)


async def test_slots_go_by_priority_then_deadline(dispatcher):
    order = []
    first = await acquire(dispatcher, priority=LOW, deadline_ns=None)
    far = now_ns() + 10**12
    async with anyio.create_task_group() as tasks:
        for name, priority, deadline in (
            ("low", LOW, None),
            ("later", MEDIUM, far + 1),
            ("sooner", MEDIUM, far),
            ("high", HIGH, None),
        ):

            async def one(name=name, priority=priority, deadline=deadline):
                await hold(dispatcher, order, name, priority=priority, deadline_ns=deadline)

            tasks.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        dispatcher.release(first)
    assert order == ["high", "sooner", "later", "low"]


async def test_slot_is_held_until_it_is_released(dispatcher):
    first = await acquire(dispatcher, priority=LOW, deadline_ns=None)
    with anyio.move_on_after(0.02) as scope:
        await acquire(dispatcher, priority=HIGH, deadline_ns=None)
    assert scope.cancelled_caught
    dispatcher.release(first)
    dispatcher.release(await acquire(dispatcher, priority=LOW, deadline_ns=None))
    assert dispatcher.statistics().waiting == 0


async def test_release_of_a_slot_that_is_not_held_is_refused(dispatcher):
    job = await acquire(dispatcher, priority=LOW, deadline_ns=None)
    dispatcher.release(job)
    waiting = [dispatcher.enter(priority=LOW, deadline_ns=None) for _ in range(2)][1]
    for not_held in (job, waiting):
        with pytest.raises(InvalidArgument, match="not held"):
            dispatcher.release(not_held)


async def test_past_deadline_is_a_persistent_miss(dispatcher):
    with pytest.raises(MissedDeadline) as caught:
        await acquire(dispatcher, priority=HIGH, deadline_ns=now_ns())
    assert not caught.value.transient


async def test_waiter_is_told_when_its_deadline_comes(dispatcher):
    holder = await acquire(dispatcher, priority=LOW, deadline_ns=None)
    with pytest.raises(MissedDeadline, match=r"passed while the execution waited for the device$") as caught:
        await acquire(dispatcher, priority=HIGH, deadline_ns=now_ns() + 200_000_000)
    assert caught.value.transient
    dispatcher.release(holder)


async def learn(dispatcher, clock, *durations_ns, model="m"):
    """Lets executions of a model take their time."""
    for duration_ns in durations_ns:
        job = await acquire(dispatcher, priority=HIGH, deadline_ns=None, model=model)
        clock[0] += duration_ns
        dispatcher.release(job)


async def test_learnt_duration_makes_a_deadline_impossible():
    clock = [0]
    dispatcher = Dispatcher(1, now=lambda: clock[0])
    await learn(dispatcher, clock, 1000, 1200, 1300, 1100)
    with pytest.raises(
        MissedDeadline, match=r"needs 1 us, and 999 ns are left .* too late by 1 ns"
    ) as caught:
        dispatcher.enter(priority=HIGH, deadline_ns=clock[0] + 999, model="m")
    assert not caught.value.transient
    dispatcher.leave(dispatcher.enter(priority=HIGH, deadline_ns=clock[0] + 1000, model="m"))


async def test_declared_duration_is_believed_before_anything_ran():
    dispatcher = Dispatcher(1, now=lambda: 0)
    for _ in range(100):
        with pytest.raises(MissedDeadline) as caught:
            dispatcher.enter(priority=HIGH, deadline_ns=999, model="m", declared_ns=1000)
        assert not caught.value.transient
    assert dispatcher.enter(priority=HIGH, deadline_ns=1000, model="m", declared_ns=1000)


@pytest.mark.parametrize("declared_ns", [-(2**63), -1, 0, 2**62, 2**63 - 1, 2**64 - 1])
async def test_duration_that_cannot_be_makes_nothing_late_that_has_no_deadline(declared_ns):
    now_ns = 10**18
    dispatcher = Dispatcher(1, now=lambda: now_ns)
    first = await acquire(dispatcher, priority=HIGH, deadline_ns=None, model="m", declared_ns=declared_ns)
    second = dispatcher.enter(priority=HIGH, deadline_ns=None, model="n", declared_ns=declared_ns)
    assert 0 < dispatcher.least_ns("m", declared_ns) <= 86_400 * 10**9
    dispatcher.release(first)
    await dispatcher.wait(second)
    dispatcher.release(second)


async def test_one_slow_execution_turns_nobody_away():
    clock = [0]
    dispatcher = Dispatcher(1, now=lambda: clock[0])
    await learn(dispatcher, clock, 100_000, 1000, 1000, 1000, 90_000)
    for _ in range(3):
        job = await acquire(dispatcher, priority=HIGH, deadline_ns=clock[0] + 1500, model="m")
        dispatcher.release(job)


async def test_estimate_is_put_to_the_test_now_and_then():
    clock = [0]
    dispatcher = Dispatcher(1, now=lambda: clock[0])
    await learn(dispatcher, clock, *[5000] * 8)
    refused = 0
    while not dispatcher.counts()["probed"]:
        try:
            job = await acquire(dispatcher, priority=HIGH, deadline_ns=clock[0] + 2000, model="m")
        except MissedDeadline:
            refused += 1
    clock[0] += 1000
    dispatcher.release(job)
    assert refused == PROBE_EVERY - 1
    dispatcher.release(await acquire(dispatcher, priority=HIGH, deadline_ns=clock[0] + 2000, model="m"))


async def test_execution_that_was_broken_off_took_at_least_so_long():
    clock = [0]
    dispatcher = Dispatcher(1, now=lambda: clock[0])
    for _ in range(4):
        job = await acquire(dispatcher, priority=HIGH, deadline_ns=clock[0] + 1000, model="m")
        clock[0] += 1010
        dispatcher.release(job, outcome="late")
    with pytest.raises(MissedDeadline, match=r"needs 1.01 us, and 1 us are left .* too late by 10 ns"):
        dispatcher.enter(priority=HIGH, deadline_ns=clock[0] + 1000, model="m")
    job = await acquire(dispatcher, priority=HIGH, deadline_ns=None, model="m")
    clock[0] += 1
    dispatcher.release(job, outcome="failed")
    assert dispatcher.least_ns("m") == 1010, "how long a failure takes says nothing"


async def test_waiter_is_told_before_its_deadline_when_it_cannot_be_kept():
    clock = [0]
    dispatcher = Dispatcher(1, now=lambda: clock[0])
    await learn(dispatcher, clock, *[1000] * 4)
    holder = await acquire(dispatcher, priority=HIGH, deadline_ns=None)
    waiting = dispatcher.enter(priority=HIGH, deadline_ns=clock[0] + 1500, model="m")
    clock[0] += 501
    other = dispatcher.enter(priority=LOW, deadline_ns=None)
    with pytest.raises(MissedDeadline) as caught:
        await dispatcher.wait(waiting)
    assert caught.value.transient
    dispatcher.leave(other)
    dispatcher.release(holder)


@pytest.mark.aionn(virtual_time=True)
async def test_waiter_is_told_at_the_last_moment_at_which_it_could_start():
    dispatcher = Dispatcher(1, now=now_ns)
    for _ in range(SURE_COUNT):
        job = await acquire(dispatcher, priority=HIGH, deadline_ns=None, model="m")
        await anyio.sleep(1)
        dispatcher.release(job)
    holder = await acquire(dispatcher, priority=HIGH, deadline_ns=None)
    started_ns = now_ns()
    with pytest.raises(MissedDeadline, match="cannot end in time any more") as caught:
        await acquire(dispatcher, priority=HIGH, deadline_ns=started_ns + 3 * 10**9, model="m")
    assert caught.value.transient
    assert 0 < now_ns() - started_ns - 2 * 10**9 < 1000
    dispatcher.release(holder)


async def test_queued_time_is_from_arrival_to_start():
    clock = [5000]
    dispatcher = Dispatcher(1, now=lambda: clock[0])
    holder = dispatcher.enter(priority=LOW, deadline_ns=None)
    clock[0] = 7000
    job = dispatcher.enter(priority=LOW, deadline_ns=None)
    clock[0] = 7300
    assert dispatcher.release(holder) == 7300
    assert (
        holder.started_ns - holder.arrival_ns,
        job.started_ns - job.arrival_ns,
    ) == (0, 300)


async def test_overrun_is_told_although_nobody_waits():
    clock, traced = [0], []
    dispatcher = Dispatcher(2, now=lambda: clock[0], trace=lambda at_ns, action: traced.append(action))
    late = dispatcher.enter(priority=HIGH, deadline_ns=100)
    other = dispatcher.enter(priority=HIGH, deadline_ns=None)
    clock[0] = 100
    dispatcher.release(other)
    assert [action.job for action in traced if isinstance(action, Abort)] == [late]


@pytest.mark.parametrize("slot_count", [1, 2])
async def test_freed_slot_is_tried_by_job_with_less_time_than_it_is_expected_to_take(slot_count):
    clock = [0]
    dispatcher = Dispatcher(slot_count, now=lambda: clock[0])
    await learn(dispatcher, clock, 1000, 3000, 3000, 3000)
    holders = [dispatcher.enter(priority=HIGH, deadline_ns=None) for _ in range(slot_count)]
    waiting = dispatcher.enter(priority=HIGH, deadline_ns=clock[0] + 10_000, model="m")
    clock[0] += 8000
    dispatcher.release(holders[0])
    assert waiting.state is JobState.RUNNING


async def test_time_beside_what_it_interrupts_counts_at_most():
    clock = [0]
    dispatcher = Dispatcher(1, now=lambda: clock[0], can_preempt=True)
    await learn(dispatcher, clock, *[1000] * SURE_COUNT)
    expected_ns = dispatcher.expected_ns("m")

    async def preempt(duration_ns, **outcome):
        low = dispatcher.enter(priority=LOW, deadline_ns=None, model="low")
        high = await acquire(dispatcher, priority=HIGH, deadline_ns=None, model="m")
        clock[0] += duration_ns
        dispatcher.release(high, **outcome)
        dispatcher.release(low)

    for duration_ns, outcome in ((5000, "ended"), (900, "late"), (5000, "late")):
        await preempt(duration_ns, outcome=outcome)
        assert dispatcher.least_ns("m") == 1000 and dispatcher.expected_ns("m") == expected_ns
    await preempt(900)
    assert dispatcher.least_ns("m") == 900
    assert dispatcher.least_ns("low", 7) == 7, "what was preempted says nothing of its duration"
    # Without a job to preempt the same time counts.
    await learn(dispatcher, clock, 5000)
    assert dispatcher.expected_ns("m") >= 5000


async def test_explain_tells_who_waits_in_their_order(dispatcher):
    dispatcher.enter(priority=LOW, deadline_ns=None)
    jobs = [dispatcher.enter(priority=priority, deadline_ns=None) for priority in (LOW, HIGH, MEDIUM)]
    text = dispatcher.explain()
    places = [text.index(f"<Job {job.number}: ") for job in (jobs[1], jobs[2], jobs[0])]
    assert places == sorted(places)
    dispatcher.hasten(jobs[0], HIGH, dispatcher._now() + 70_000_000)
    text = dispatcher.explain(jobs[0])
    lent = r"<Job \d: LOW, raised to HIGH, no deadline, as urgent as with a deadline in \d+.* ms, waiting>"
    assert re.match(lent, text)
    assert re.search(r"\d \w+ ago: lent the urgency of one that waits for it$", text)


async def test_decisions_are_sections_of_a_trace(tmp_path):
    dispatcher = Dispatcher(1, now=lambda: 0, can_preempt=True)
    start_tracing(tmp_path / "trace.json", process="test")
    try:
        low = dispatcher.enter(priority=LOW, deadline_ns=None)
        dispatcher.enter(priority=HIGH, deadline_ns=None)
    finally:
        stop_tracing()
    dispatcher.release(low)
    text = (tmp_path / "trace.json").read_text()
    assert text.count("scheduler: start <Job 0") == text.count("scheduler: start <Job 1") == 1
    assert text.count("scheduler: preempt <Job 0") == 1


async def test_more_urgent_job_is_sent_beside_what_it_interrupts():
    traced = []
    dispatcher = Dispatcher(
        1, now=now_ns, can_preempt=True, trace=lambda at_ns, action: traced.append(action)
    )
    low = await acquire(dispatcher, priority=LOW, deadline_ns=None)
    with anyio.fail_after(20):
        high = await acquire(dispatcher, priority=HIGH, deadline_ns=None)
    assert "preempted at the device: <Job 0" in dispatcher.explain()
    medium = dispatcher.enter(priority=MEDIUM, deadline_ns=None)
    dispatcher.release(high)
    assert medium.state is JobState.RUNNING
    dispatcher.release(medium)
    assert low.state is JobState.RUNNING
    dispatcher.release(low)
    kinds = [type(action).__name__ for action in traced]
    assert kinds == ["Start", "Preempt", "Start", "Start", "Start"]
    assert dispatcher.counts()["preempted"] == 1 and dispatcher.statistics().waiting == 0


async def test_interrupted_job_may_end_first():
    dispatcher = Dispatcher(1, now=now_ns, can_preempt=True)
    low = await acquire(dispatcher, priority=LOW, deadline_ns=None)
    high = await acquire(dispatcher, priority=HIGH, deadline_ns=None)
    dispatcher.release(low)
    assert high.state is JobState.RUNNING
    dispatcher.release(high)
    dispatcher.release(await acquire(dispatcher, priority=LOW, deadline_ns=None))


async def test_few_stand_interrupted_at_once():
    clock = [0]
    dispatcher = Dispatcher(1, now=lambda: clock[0], can_preempt=True)
    jobs = []
    for number in range(20):
        deadline_ns = 10**9 - number * 10**6
        jobs.append(dispatcher.enter(priority=Priority(min(number, 2)), deadline_ns=deadline_ns))
    begun = [job for job in jobs if job.has_run]
    assert len(begun) <= 1 + PREEMPTED_MAX
    while begun:
        for job in begun:
            dispatcher.release(job)
        begun = [job for job in jobs if job.has_run and job.state is JobState.RUNNING]
    assert all(job.state is JobState.ENDED for job in jobs)


async def test_device_that_cannot_stop_is_sent_nothing_more():
    dispatcher = Dispatcher(1, now=now_ns)
    low = await acquire(dispatcher, priority=LOW, deadline_ns=None)
    high = dispatcher.enter(priority=HIGH, deadline_ns=None)
    assert high.state is JobState.WAITING
    dispatcher.release(low)
    dispatcher.release(high)


async def test_job_that_overran_keeps_its_slot_and_is_told_once():
    clock, traced = [0], []
    dispatcher = Dispatcher(1, now=lambda: clock[0], trace=lambda at_ns, action: traced.append(action))
    late = await acquire(dispatcher, priority=HIGH, deadline_ns=100)
    clock[0] = 200
    others = [dispatcher.enter(priority=HIGH, deadline_ns=None) for _ in range(3)]
    assert all(job.state is JobState.WAITING for job in others)
    assert sum(isinstance(action, Abort) for action in traced) == 1
    assert dispatcher.counts()["overran"] == 1
    dispatcher.release(late, outcome="late")
    assert others[0].state is JobState.RUNNING


async def test_job_is_hastened_while_it_waits_and_while_it_runs():
    dispatcher = Dispatcher(1, now=lambda: 0, can_preempt=True)
    low = dispatcher.enter(priority=LOW, deadline_ns=None)
    first, second = (dispatcher.enter(priority=LOW, deadline_ns=None) for _ in range(2))
    dispatcher.hasten(second, MEDIUM, 1000)
    assert second.state is JobState.WAITING
    dispatcher.hasten(low, HIGH, NEVER_NS)
    high = dispatcher.enter(priority=HIGH, deadline_ns=None)
    assert high.state is JobState.WAITING, "what runs for a HIGH job is not preempted by it"
    dispatcher.release(low)
    dispatcher.release(high)
    assert second.state is JobState.RUNNING and first.state is JobState.WAITING
    dispatcher.release(second)
    dispatcher.hasten(second, HIGH, 0)  # Too late to matter.
    dispatcher.release(first)


async def test_cancelled_waiter_leaves_and_a_cancelled_holder_keeps():
    dispatcher = Dispatcher(1, now=now_ns)
    holder = await acquire(dispatcher, priority=LOW, deadline_ns=None)
    order = []
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            tasks.start_soon(hold, dispatcher, order, "second")
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            await acquire(dispatcher, priority=HIGH, deadline_ns=None)
        assert dispatcher.statistics().waiting == 1
        dispatcher.release(holder)
    assert order == ["second"]


async def test_turn_that_comes_with_the_cancellation_is_given_back():
    dispatcher = Dispatcher(1, now=now_ns)
    holder = await acquire(dispatcher, priority=LOW, deadline_ns=None)

    async def wait(scope):
        with scope:
            dispatcher.release(await acquire(dispatcher, priority=HIGH, deadline_ns=None))

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        tasks.start_soon(wait, scope)
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        dispatcher.release(holder)
    dispatcher.release(await acquire(dispatcher, priority=LOW, deadline_ns=None))


async def test_full_room_refuses_or_displaces():
    dispatcher = Dispatcher(1, now=now_ns, waiting_max=1)
    await acquire(dispatcher, priority=LOW, deadline_ns=None)
    dispatcher.enter(priority=LOW, deadline_ns=None)
    with pytest.raises(ResourceExhausted) as caught:
        dispatcher.enter(priority=HIGH, deadline_ns=None)
    assert caught.value.transient
    dispatcher = Dispatcher(1, now=now_ns, waiting_max=1, on_full="displace")
    await acquire(dispatcher, priority=LOW, deadline_ns=None)
    lower = dispatcher.enter(priority=LOW, deadline_ns=None)
    dispatcher.enter(priority=HIGH, deadline_ns=None)
    with pytest.raises(ResourceExhausted):
        await dispatcher.wait(lower)


async def test_unknown_priority_is_refused(dispatcher):
    with pytest.raises(InvalidArgument, match="expected a Priority, got 7"):
        dispatcher.enter(priority=7, deadline_ns=None)


async def test_priority_changes_while_waiting(dispatcher):
    holder = await acquire(dispatcher, priority=LOW, deadline_ns=None)
    first = dispatcher.enter(priority=MEDIUM, deadline_ns=None)
    second = dispatcher.enter(priority=LOW, deadline_ns=None)
    assert dispatcher.change_priority(second, HIGH)
    dispatcher.release(holder)
    await dispatcher.wait(second)
    assert "MEDIUM" in dispatcher.explain() and "slot 0: <Job 2" in dispatcher.explain()
    dispatcher.release(second)
    await dispatcher.wait(first)
    dispatcher.release(first)


async def test_every_action_is_traced():
    traced = []
    dispatcher = Dispatcher(2, now=now_ns, trace=lambda at_ns, action: traced.append(action))
    jobs = [await acquire(dispatcher, priority=LOW, deadline_ns=None) for _ in range(2)]
    assert [action.job for action in traced if isinstance(action, Start)] == jobs
    for job in jobs:
        dispatcher.release(job)


def played(seed, slot_count, can_preempt):
    """A random game of arrivals, departures and ends; what was decided, and what was counted."""
    generator = random.Random(seed)
    clock, traced, jobs = [1000], [], []

    def trace(at_ns, action):
        job = action.by if isinstance(action, Preempt) else action.job
        traced.append((at_ns, type(action).__name__, job.number))

    dispatcher = Dispatcher(slot_count, now=lambda: clock[0], can_preempt=can_preempt, trace=trace)
    for _ in range(60):
        clock[0] += generator.choice((0, 5, 40, 400))
        held = [job for job in jobs if job.state is JobState.RUNNING]
        waiting = [job for job in jobs if job.state is JobState.WAITING]
        what = generator.random()
        if what < 0.5:
            deadline = generator.choice((None, clock[0] + generator.randrange(1, 300)))
            model, priority = generator.choice((None, "quick", "slow")), generator.choice((LOW, MEDIUM, HIGH))
            with contextlib.suppress(MissedDeadline, ResourceExhausted):
                jobs.append(dispatcher.enter(priority=priority, deadline_ns=deadline, model=model))
        elif what < 0.9 and held:
            dispatcher.release(generator.choice(held))
        elif waiting:
            dispatcher.leave(generator.choice(waiting))
    return traced, dispatcher.statistics(), dispatcher.explain()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("can_preempt", [False, True])
@pytest.mark.parametrize("slot_count", [1, 2, 3])
@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 100), marks=pytest.mark.long)], ids=str)
def test_what_starts_at_once_is_what_deciding_would_start(monkeypatch, slot_count, can_preempt, seeds):
    games = [played(seed, slot_count, can_preempt) for seed in seeds]
    assert any(statistics.started > statistics.rejected for _, statistics, _ in games)
    monkeypatch.setattr("aionn.scheduler.dispatcher.start_immediately", lambda *arguments: None)
    assert [played(seed, slot_count, can_preempt) for seed in seeds] == games


async def test_forgotten_model_leaves_neither_durations_nor_refusals(dispatcher):
    for _ in range(SURE_COUNT):
        job = await acquire(dispatcher, priority=MEDIUM, deadline_ns=None, model="a")
        await anyio.sleep(0.001)
        dispatcher.release(job)
    with pytest.raises(MissedDeadline):
        dispatcher.enter(priority=MEDIUM, deadline_ns=now_ns() + 100_000, model="a")
    assert dispatcher.learnt_count == 1
    dispatcher.forget("a")
    assert dispatcher.learnt_count == 0
    assert dispatcher.least_ns("a") == 1


def limited(slot_count=1, *, can_preempt=False, room_ns=100):
    dispatcher = Dispatcher(slot_count, now=lambda: 0, can_preempt=can_preempt)
    dispatcher.limit_best_effort(room_ns)
    return dispatcher


def test_best_effort_that_reserved_frames_cannot_wait_for_is_rejected():
    dispatcher = limited()
    with pytest.raises(
        ResourceExhausted, match="longer than the reserved frames of the device can wait"
    ) as caught:
        dispatcher.enter(priority=HIGH, deadline_ns=None, model="long", declared_ns=101)
    assert caught.value.transient
    with pytest.raises(MissedDeadline) as missed:
        dispatcher.enter(priority=HIGH, deadline_ns=10**9, model="long", declared_ns=101)
    assert missed.value.transient
    dispatcher.release(dispatcher.enter(priority=HIGH, deadline_ns=None, model="short", declared_ns=70))
    dispatcher.release(dispatcher.enter(priority=HIGH, deadline_ns=None))
    dispatcher.limit_best_effort(None)
    dispatcher.release(dispatcher.enter(priority=HIGH, deadline_ns=None, model="long", declared_ns=101))


def test_long_best_effort_is_tried_now_and_then():
    now = 0
    dispatcher = Dispatcher(1, now=lambda: now)
    job = dispatcher.enter(priority=LOW, deadline_ns=None, model="a")
    now = 1000
    dispatcher.release(job)
    dispatcher.limit_best_effort(100)
    for _ in range(PROBE_EVERY - 1):
        with pytest.raises(ResourceExhausted):
            dispatcher.enter(priority=LOW, deadline_ns=None, model="a")
    dispatcher.release(dispatcher.enter(priority=LOW, deadline_ns=None, model="a"))


def test_device_gets_no_job_beside_another_while_time_is_reserved():
    dispatcher = limited(can_preempt=True)
    first = dispatcher.enter(priority=LOW, deadline_ns=None)
    second = dispatcher.enter(priority=HIGH, deadline_ns=None)
    assert second.state is JobState.WAITING
    dispatcher.limit_best_effort(None)
    third = dispatcher.enter(priority=HIGH, deadline_ns=None)
    assert second.state is JobState.RUNNING and third.state is JobState.WAITING
    for job in (second, third, first):
        dispatcher.release(job)
    assert dispatcher.explain() == "slot 0: free"


async def test_frame_that_takes_longer_than_reserved_waits_without_asking_again_and_again(monkeypatch):
    """Its budget could end in time, what it is known to take could not: nothing is to be decided in between."""
    ms = 1_000_000
    dispatcher = Dispatcher(1, now=now_ns)
    held = dispatcher.enter(priority=MEDIUM, deadline_ns=None)
    budget = BandwidthServer(
        1, slot=0, period_ns=10**9, deadline_ns=30 * ms, jitter_ns=0, duration_ns=ms, piece_ns=ms
    )
    frame = dispatcher.enter(
        priority=MEDIUM, deadline_ns=now_ns() + 30 * ms, model="m", declared_ns=29 * ms, server=budget
    )
    decisions = []
    decide = dispatcher._decide
    monkeypatch.setattr(dispatcher, "_decide", lambda at_ns: (decisions.append(at_ns), decide(at_ns)))
    with pytest.raises(MissedDeadline):
        await dispatcher.wait(frame)
    assert len(decisions) <= 3
    dispatcher.release(held)
