"""Plans of the slots: places, displacement, and explanations."""

from __future__ import annotations

import random

import pytest

from aionn.hal import Priority
from aionn.scheduler.job import NEVER_NS, Abort, JobState, Preempt
from aionn.scheduler.slot_plan import PLAN_MAX, Place
from tests.aionn.scheduler.table import Table, starts

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH


@pytest.mark.parametrize(
    ("running", "priority", "deadline", "place"),
    [
        (LOW, HIGH, None, (10, True, 0, 10, True)),
        (HIGH, HIGH, 500, (110, True, 0, 10, False)),
        (HIGH, HIGH, 110, (110, True, 0, 10, False)),
        (HIGH, HIGH, 109, (10, True, 0, 10, True)),
        (MEDIUM, MEDIUM, 109, (10, True, 0, 10, True)),
        (LOW, MEDIUM, 500, (110, True, 0, 10, False)),
        (LOW, MEDIUM, 109, (10, True, 0, 10, True)),
        (HIGH, MEDIUM, 500, (110, True, 0, 10, False)),
        (HIGH, MEDIUM, 109, None),
    ],
)
def test_place_preempts_a_lower_class_for_high_and_others_only_to_be_in_time(
    running, priority, deadline, place
):
    table = Table()
    table.add(100, priority=running)
    table.decide()
    job = table.job(10, priority=priority, deadline=deadline)
    found = table.queue.place_on(job, table.slots[0], 0)
    assert found == (None if place is None else Place(*place))


def test_full_plan_takes_what_goes_before_its_last_and_the_last_stands_by():
    table = Table()
    table.add(10)
    table.decide()
    jobs = [table.add(10, deadline=100_000 + number) for number in range(PLAN_MAX)]
    assert table.queue.standby == []
    job = table.add(10, deadline=100_000 + PLAN_MAX // 2)
    assert table.queue.is_planned_on(job, table.slots[0])
    assert [waiting for _, waiting in table.queue.standby] == [jobs[-1]]
    later = table.add(10, deadline=200_000)
    assert [waiting for _, waiting in table.queue.standby] == [jobs[-1], later]
    table.end()
    half = PLAN_MAX // 2 + 1
    assert table.order() == [w.number for w in (*jobs[:half], job, *jobs[half:], later)]


def test_full_plan_takes_what_ends_there_sooner_than_elsewhere():
    table = Table(devices=[0, 1])
    for durations in ((10, NEVER_NS), (NEVER_NS, 50_000)):
        table.add(*durations, priority=HIGH)
    table.decide()
    jobs = [table.add(10, NEVER_NS, deadline=100_000 + number) for number in range(PLAN_MAX)]
    job = table.add(10, 10, deadline=jobs[PLAN_MAX // 2].deadline_ns)
    assert table.queue.is_planned_on(job, table.slots[0])


def test_high_is_planned_before_another_that_what_runs_stops_for():
    table = Table()
    table.add(100, priority=LOW)
    table.decide()
    first = table.add(10, priority=HIGH, deadline=50)
    assert table.decide() == [Preempt(table.slots[0], first)]
    second = table.add(10, priority=HIGH, deadline=30)
    assert [table.queue.is_planned_on(job, table.slots[0]) for job in (first, second)] == [True, True]


def test_shorter_equals_do_not_suspend_to_a_longer_one():
    table = held()
    shorts = [table.add(20, deadline=185) for _ in range(4)]
    long = table.add(50, deadline=180)
    table.end()
    assert table.order() == [job.number for job in shorts]
    assert long.state is JobState.ENDED


def held(slots=1):
    """A table whose slots, all of one device, run HIGH jobs that end at 100."""
    table = Table(devices=[0] * slots)
    assert [table.add(100, priority=HIGH) for _ in range(slots)] and len(table.decide()) == slots
    return table


@pytest.mark.parametrize("lowest", [0, 1])
def test_what_loses_its_place_is_of_the_least_class_wherever_that_waits(lowest):
    table = Table(devices=[0, 1])
    durations = [(30, NEVER_NS), (NEVER_NS, 30)]
    for one in durations:
        table.add(*one, priority=HIGH)
    table.decide()
    mediums = [table.add(*durations[1 - lowest], deadline=90 + number) for number in range(2)]
    lows = [table.add(*durations[lowest], priority=LOW, deadline=90 + number) for number in range(2)]
    high = table.add(60, 60, priority=HIGH, deadline=90)
    assert table.queue.is_planned_on(high, table.slots[lowest])
    assert [table.queue.slot_of[job.number] for job in lows] == [-1, -1]
    assert [table.queue.slot_of[job.number] for job in mediums] == [1 - lowest] * 2


def test_what_waits_is_displaced_rather_than_what_runs():
    table = Table(devices=[0, 1])
    table.add(110, NEVER_NS, priority=LOW, deadline=115)
    table.add(NEVER_NS, 100, priority=HIGH)
    table.decide()
    waiting = table.add(NEVER_NS, 50, priority=LOW, deadline=150)
    table.add(50, 50, priority=MEDIUM, deadline=150)
    assert table.queue.slot_of[waiting.number] == -1
    assert table.decide() == []


def test_what_never_ran_is_displaced_rather_than_what_did():
    table = held()
    returned = table.job(30, priority=LOW, deadline=160)
    returned.has_run = True
    assert table.queue.add(returned, 0) is None
    fresh = table.add(30, priority=LOW, deadline=161)
    table.add(30, deadline=160)
    assert table.queue.is_planned_on(returned, table.slots[0])
    assert table.queue.slot_of[fresh.number] == -1


def test_job_with_just_enough_time_has_lower_ones_suspend():
    table = held()
    low = table.add(30, priority=LOW, deadline=130)
    job = table.add(30, deadline=130)
    assert table.queue.is_planned_on(job, table.slots[0])
    assert table.queue.slot_of[low.number] == -1
    table = Table()
    table.add(30, priority=LOW, deadline=30)
    job = table.add(30, deadline=30)
    assert starts(table.decide()) == [(job.number, 0)]


def test_free_slot_helps_others_in_their_order():
    table = held(slots=2)
    jobs = [table.add(10) for _ in range(6)]
    order = []
    table.end(slot=1, now=5)
    for _ in jobs:
        order += [number for number, _ in starts(table.decide())]
        table.end(slot=1)
    own = [job.number for job in jobs if job.number in order[:3]]
    assert order == [*own, *(job.number for job in jobs if job.number not in own)]


def test_free_slot_helps_a_busy_one_where_it_ends_sooner_though_it_is_slower():
    for helped_ns, helps in ((105, True), (106, False)):
        table = Table(devices=[0, 1])
        table.add(100, NEVER_NS, priority=HIGH)
        table.add(NEVER_NS, 1000, priority=HIGH)
        table.decide()
        job = table.add(10, helped_ns)
        table.end(slot=1, now=5)
        assert starts(table.decide()) == [(job.number, 1)] * helps


@pytest.mark.parametrize(("deadline", "goes_on"), [(140, True), (139, False)])
def test_interrupted_job_goes_on_while_what_is_left_of_it_can_end_in_time(deadline, goes_on):
    table = Table()
    low = table.add(100, priority=LOW, deadline=deadline)
    table.decide()
    table.now = 10
    high = table.add(40, priority=HIGH)
    assert table.decide() == [Preempt(table.slots[0], high)]
    table.suspend(table.slots[0])
    table.decide()
    assert table.end() is high
    assert table.now == 50
    table.decide()
    assert low.state is (JobState.RUNNING if goes_on else JobState.ENDED)


def test_low_goes_before_no_medium_without_a_deadline_whatever_else_waits():
    table = held()
    table.add(10, deadline=1000)
    table.add(10)
    low = table.add(10, priority=LOW, deadline=115)
    assert table.queue.slot_of[low.number] == -1


def test_low_that_went_ahead_runs_as_low():
    table = Table()
    table.add(20, priority=HIGH)
    table.decide()
    table.add(50, deadline=120)
    low = table.add(40, priority=LOW, deadline=65)
    table.end()
    assert starts(table.decide()) == [(low.number, 0)]
    medium = table.add(10, deadline=66)
    assert table.decide() == [Preempt(table.slots[0], medium)]


def test_jobs_that_are_planned_anew_on_a_free_slot_keep_their_order():
    table = Table(devices=[0, 1])
    table.add(1000, NEVER_NS, priority=HIGH)
    table.add(NEVER_NS, 50, priority=HIGH)
    table.decide()
    first, second = (table.add(10, 50, deadline=200) for _ in range(2))
    table.end(slot=0, now=160)
    table.end(slot=1, now=160)
    assert (starts(table.decide()) + starts(table.decide()))[:1] == [(first.number, 0)]
    assert second.state is JobState.WAITING


def test_explain_counts_those_that_go_before_wherever_they_wait():
    table = Table(devices=[0, 1])
    assert "waits" not in table.queue.explain(table.job(10, 10), 0)
    table.add(10, 10)
    table.add(10, 10)
    table.decide()
    jobs = [table.add(10, NEVER_NS, deadline=1000 + number) for number in range(PLAN_MAX)]
    jobs += [table.add(NEVER_NS, 10, deadline=2000), table.add(10, NEVER_NS, deadline=3000)]
    count = len(jobs)
    assert f"0 of {count} go before it; planned on slot 0" in table.queue.explain(jobs[0], 0)
    text = table.queue.explain(jobs[-1], 0)
    assert f"{count - 1} of {count} go before it; it is on standby, no slot has room for it" in text
    assert "slot 1 (device 1): could not end in time, or cannot run it" in text


def late(table):
    """Jobs that their plan would end too late, counted anew from what runs."""
    found = []
    for slot, plan in zip(table.slots, table.queue.plans, strict=True):
        passed, running = 0, slot.job
        rest = table.now if running is None else max(table.now, slot.ends_ns)
        assert [job.key for job in plan.jobs] == plan.keys == sorted(plan.keys)
        for job in plan.jobs:
            passed += job.durations_ns[slot.device]
            preempts = running is not None and slot.can_preempt and job.rank == HIGH > running.rank
            if (table.now if preempts else rest) + passed > job.deadline_ns:
                found.append(job)
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("can_preempt", [False, True])
@pytest.mark.parametrize("devices", [[0], [0, 0], [0, 1, 1]])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_what_is_planned_ends_in_time_and_no_slot_idles(devices, can_preempt, seed):
    source = random.Random(seed)
    table = Table(devices=devices)
    for slot in table.slots:
        slot.can_preempt = can_preempt
    jobs, given_up = [], []
    for _ in range(150):
        ends = [slot.ends_ns for slot in table.slots if slot.job is not None]
        table.now = min([table.now + source.choice((0, 3, 20)), *ends])
        for slot in table.slots:
            if slot.job is not None and slot.ends_ns <= table.now:
                assert table.end(slot.index, table.now).deadline_ns >= table.now
        if source.random() < 0.5:
            durations = [source.randrange(1, 60 * len(devices)) for _ in range(max(devices) + 1)]
            deadline = None if source.random() < 0.3 else table.now + source.randrange(20, 300)
            job = table.job(*durations, priority=source.choice(list(Priority)), deadline=deadline)
            late_before = late(table)
            if table.queue.add(job, table.now) is None:
                jobs.append(job)
            # Where a job can be preempted, what cannot wait counts as late until that is decided.
            assert can_preempt or set(late(table)) <= set(late_before)
        while actions := table.decide():
            for action in actions:
                if isinstance(action, Abort):
                    given_up.append(action.job)
                    assert table.now + min(action.job.durations_ns) > action.job.deadline_ns
                elif isinstance(action, Preempt):
                    job = action.slot.job
                    assert job.rank < action.by.rank or job.key > action.by.key
                    table.suspend(action.slot)
        # A free slot may start a HIGH job of another's plan before its own.
        assert len(devices) > 1 or late(table) == []
        waiting = [job for job in jobs if job.state is JobState.WAITING]
        assert {job.number for job in waiting} == set(table.queue.slot_of)
        if len(set(devices)) == 1 and any(slot.job is None for slot in table.slots):
            assert waiting == [], "a slot idles while somebody waits"
    assert given_up and table.queue.statistics().displaced


def test_jobs_that_have_ended_are_not_kept_until_a_deadline_far_ahead():
    table = Table()
    for _ in range(100):
        for _ in range(3):
            table.add(10, deadline=10**15)
        table.order()
    assert len(table.queue) == 0
    assert len(table.queue._latest) < 10


def test_job_that_waits_is_rejected_when_it_is_late_after_many_others_have_ended():
    table = Table()
    table.add(10, priority=HIGH)
    table.decide()
    late = table.add(10, deadline=1000, priority=LOW)
    for _ in range(100):
        job = table.add(10, deadline=10**15)
        table.queue.remove(job)
        job.state = JobState.ENDED
    assert len(table.queue._latest) < 10
    assert table.queue.too_late(990) == []
    assert [job for job, _ in table.queue.too_late(991)] == [late]
