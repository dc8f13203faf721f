"""The plain policy: priority, deadline, arrival; each waiting job preempts at most one of a lower priority."""

import random

import pytest

from aionn.hal import Priority
from aionn.scheduler.job import Abort, Preempt, Reason, Start
from aionn.scheduler.plain_policy import PlainPolicy
from tests.aionn.scheduler.table import Table, starts

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH


def table_of(slots=1):
    return Table(slots, [0] * slots, policy=PlainPolicy())


def test_jobs_start_by_priority_then_deadline_then_arrival():
    table = table_of()
    table.add(10, priority=LOW, deadline=5000)
    table.add(10)
    table.add(10, deadline=9000)
    table.add(10, deadline=8000)
    table.add(10)
    table.add(10, priority=HIGH)
    assert table.order() == [5, 3, 2, 1, 4, 0]


def test_job_starts_though_its_duration_does_not_fit_before_its_deadline():
    table = table_of()
    table.add(1000, deadline=10)
    assert starts(table.decide(9)) == [(0, 0)]


def test_expired_job_is_aborted_and_the_next_one_starts():
    table = table_of()
    late, other = table.add(10, priority=HIGH, deadline=100), table.add(10, priority=LOW)
    assert table.decide(100) == [Abort(late, Reason.EXPIRED), Start(other, table.slots[0])]
    assert table.queue.add(table.job(10, deadline=100), 100) is Reason.EXPIRED


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_each_waiting_job_preempts_one_lower_job_the_lowest_and_latest_first(count):
    table = table_of(4)
    for priority in (LOW, MEDIUM, LOW, HIGH):
        table.add(100, priority=priority)
    table.decide()
    found = []
    for _ in range(count):
        table.add(10, priority=HIGH)
        found += [action.slot.job.number for action in table.decide() if isinstance(action, Preempt)]
    # Those that run, lowest and latest first; the HIGH one is never among them.
    slot_of = {slot.job.number: slot.index for slot in table.slots}
    assert len(found) == len(set(found)) == min(count, 3)
    assert [table.slots[slot_of[number]].job.rank for number in found] == [LOW, LOW, MEDIUM][:count]
    assert found[:2] == sorted(found[:2], reverse=True)


def test_equals_do_not_preempt_each_other_whatever_their_deadlines():
    table = table_of()
    table.add(10**6, deadline=10**9)
    table.decide()
    table.add(10, deadline=20)
    assert table.decide() == []


def test_slot_that_cannot_stop_is_not_preempted():
    table = table_of()
    table.slots[0].can_preempt = False
    table.add(100, priority=LOW)
    table.decide()
    table.add(10, priority=HIGH)
    assert table.decide() == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(10))
def test_every_start_is_the_first_of_a_sorted_list(seed):
    source = random.Random(seed)
    table = table_of(source.randrange(1, 4))
    waiting = []
    for now in range(300):
        deadline = source.choice((None, now + source.randrange(1, 50)))
        waiting.append(table.add(10, priority=source.choice(list(Priority)), deadline=deadline))
        if source.random() < 0.3 and table.slots[0].job is not None:
            table.end(0, now)
        for action in table.decide(now):
            if isinstance(action, Abort):
                assert action.job.deadline_ns <= now
                waiting.remove(action.job)
            elif isinstance(action, Start):
                waiting.sort(key=lambda job: (-job.priority, job.deadline_ns, job.number))
                assert waiting.pop(0) is action.job
        assert all(job.deadline_ns > now for job in waiting)
    assert len(table.queue) == len(waiting)
