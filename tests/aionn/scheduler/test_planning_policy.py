"""Decisions: pure, so each claim is a call with a time, a ready queue and slots."""

import pytest

from aionn.errors import InvalidArgument
from aionn.hal import TIME_MAX_NS, Priority
from aionn.scheduler.job import NEVER_NS, Abort, DeviceSlot, JobState, Preempt, Reason, Start
from aionn.scheduler.planned_queue import AGE_NS, PlannedQueue
from tests.aionn.scheduler.table import Table, starts

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH


def test_priority_goes_before_deadline_before_arrival():
    table = Table()
    for priority, deadline in ((LOW, 900), (MEDIUM, 800), (MEDIUM, 700), (HIGH, 1000), (MEDIUM, 700)):
        table.add(10, priority=priority, deadline=deadline)
    assert table.order() == [3, 2, 4, 1, 0]


def test_no_deadline_goes_last_in_its_class():
    table = Table()
    table.add(10)
    table.add(10, deadline=TIME_MAX_NS - 1)
    table.add(10, priority=LOW, deadline=500)
    assert table.order() == [1, 0, 2]


def test_deadline_in_the_past_is_refused_at_once():
    table = Table()
    table.now = 100
    for deadline in (0, 99, 100):
        assert table.queue.add(table.job(10, deadline=deadline), 100) is Reason.EXPIRED
    assert table.decide() == []


def test_deadline_that_an_idle_device_cannot_keep_is_impossible():
    table = Table()
    assert table.queue.add(table.job(10, deadline=9), 0) is Reason.IMPOSSIBLE
    assert table.queue.add(table.job(10, deadline=10), 0) is None


def test_expired_job_is_given_up_before_it_is_sorted():
    table = Table()
    table.add(100, priority=HIGH)
    table.decide()
    late = table.add(10, priority=MEDIUM, deadline=105)
    fine = table.add(10, priority=MEDIUM, deadline=1000)
    table.end()
    actions = table.decide(now=110)
    assert [(a.job, a.reason) for a in actions if isinstance(a, Abort)] == [(late, Reason.EXPIRED)]
    assert starts(actions) == [(fine.number, 0)]


def test_job_that_cannot_end_in_time_any_more_is_told_before_its_deadline():
    table = Table()
    table.add(100, priority=HIGH)
    table.decide()
    late = table.add(10, deadline=105)
    assert table.queue.next_wake_ns() == 96
    assert table.decide(now=95) == []
    actions = table.decide(now=96)
    assert [(a.job, a.reason) for a in actions] == [(late, Reason.TOO_LATE)]


def test_running_job_that_overruns_is_aborted_at_its_deadline():
    table = Table()
    job = table.add(10, deadline=50)
    table.decide()
    assert table.decide(now=49) == []
    assert table.decide(now=50) == [Abort(job, Reason.OVERRAN)]


def test_high_preempts_lower_job():
    table = Table()
    low = table.add(100, priority=LOW)
    table.decide()
    high = table.add(10, priority=HIGH)
    assert table.decide(now=5) == [Preempt(table.slots[0], high)]
    assert low.state is JobState.RUNNING


def test_high_preempts_nothing_where_another_slot_is_free():
    table = Table(devices=[0, 0])
    table.add(100, priority=LOW)
    table.decide()
    high = table.add(10, priority=HIGH)
    assert table.decide(now=5) == [Start(high, table.slots[1])]


def test_medium_preempts_low_only_where_it_would_be_late():
    table = Table()
    table.add(100, priority=LOW)
    table.decide()
    table.add(10, priority=MEDIUM, deadline=200)
    assert table.decide(now=5) == []
    urgent = table.add(10, priority=MEDIUM, deadline=50)
    assert table.decide(now=5) == [Preempt(table.slots[0], urgent)]


@pytest.mark.parametrize(
    ("deadline", "duration", "preempts"),
    [(120, 10, True), (105, 60, False), (105, 40, True)],
    ids=["both are kept", "about as much is left", "far more is left"],
)
def test_equals_preempt_where_both_are_kept_or_far_more_is_left(deadline, duration, preempts):
    table = Table()
    table.add(100, deadline=deadline)
    table.decide()
    urgent = table.add(duration, deadline=80)
    assert table.decide(now=5) == ([Preempt(table.slots[0], urgent)] if preempts else [])


def test_medium_preempts_low_that_is_lost_by_it():
    table = Table()
    low = table.add(100, priority=LOW, deadline=105)
    table.decide()
    medium = table.add(10, deadline=50)
    assert table.decide(now=5) == [Preempt(table.slots[0], medium)]
    assert table.queue.is_planned_on(medium, table.slots[0]) and low.state is JobState.RUNNING


def test_any_planned_job_that_cannot_wait_preempts_not_the_first_alone():
    table = Table()
    table.add(60, priority=LOW)
    table.decide()
    first = table.add(10, deadline=75)
    assert table.decide() == []
    # Behind the first it would end at 80.
    table.add(10, deadline=78)
    assert table.decide() == [Preempt(table.slots[0], first)]


def test_low_goes_before_medium_only_where_it_would_be_lost_and_medium_is_not():
    for medium_deadline, low_deadline, order in ((100, 100, [1, 2]), (100, 35, [2, 1]), (75, 35, [1])):
        table = Table()
        table.add(20, priority=HIGH)
        table.decide()
        table.add(50, priority=MEDIUM, deadline=medium_deadline)
        table.add(10, priority=LOW, deadline=low_deadline)
        table.end()
        assert table.order() == order


def test_low_goes_before_no_high_and_before_nothing_without_a_deadline():
    for priority, deadline in ((HIGH, 100), (MEDIUM, None)):
        table = Table()
        table.add(20, priority=HIGH)
        table.decide()
        first = table.add(50, priority=priority, deadline=deadline)
        table.add(10, priority=LOW, deadline=35)
        table.end()
        assert table.order() == [first.number]


def test_low_that_went_ahead_is_displaced_to_medium():
    table = Table()
    table.add(20, priority=HIGH)
    table.decide()
    spared = table.add(50, priority=MEDIUM, deadline=100)
    low = table.add(10, priority=LOW, deadline=35)
    assert "goes before MEDIUM jobs that have time to spare, on slot 0" in table.queue.explain(low, 0)
    urgent = table.add(30, priority=MEDIUM, deadline=90)
    table.end()
    assert table.order() == [urgent.number, spared.number]


def test_device_that_cannot_be_interrupted_is_left_alone():
    table = Table()
    table.slots[0].can_preempt = False
    table.add(100, priority=LOW)
    table.decide()
    table.add(10, priority=HIGH)
    assert table.decide(now=5) == []


def test_slot_is_chosen_by_expected_finish():
    table = Table(devices=[0, 1])
    assert starts([*(table.add(50, 20),)] and table.decide()) == [(0, 1)]
    table.add(50, 20)
    # Behind the first on the quick device it ends at 40, on the slow one at 50.
    assert table.decide() == []
    third = table.add(50, 20)
    assert starts(table.decide()) == [(third.number, 0)]


def test_slot_that_cannot_run_a_job_never_gets_it():
    table = Table(devices=[0, 1])
    job = table.add(NEVER_NS, 20)
    other = table.add(NEVER_NS, 20)
    assert starts(table.decide()) == [(job.number, 1)]
    assert other.state is JobState.WAITING


def test_slot_that_is_down_gets_nothing():
    table = Table(devices=[0, 1])
    table.slots[1].is_up = False
    job = table.add(50, 20)
    assert starts(table.decide()) == [(job.number, 0)]


def test_longest_is_displaced_when_not_all_fit():
    table = Table()
    table.add(10, priority=HIGH, deadline=10)
    table.decide()
    long = table.add(50, deadline=90)
    shorts = [table.add(20, deadline=95) for _ in range(4)]
    table.end()
    done = table.order()
    assert done == [job.number for job in shorts]
    assert long.state is JobState.ENDED


def test_lower_classes_suspend_to_higher():
    table = Table()
    lows = [table.add(30, priority=LOW, deadline=100) for _ in range(3)]
    high = table.add(40, priority=HIGH, deadline=100)
    done = table.order()
    assert done[0] == high.number
    assert len(done) == 3 and set(done[1:]) < {job.number for job in lows}


def test_follower_lends_its_urgency():
    table = Table()
    table.add(10, deadline=200)
    before = table.add(10, deadline=500, urgent=100)
    assert table.order()[0] == before.number


def test_old_job_goes_ahead_of_newer_medium():
    table = Table()
    table.add(10, priority=MEDIUM)
    table.decide()
    old = table.add(10, priority=LOW)
    table.now = AGE_NS
    newer = [table.add(10, priority=MEDIUM, deadline=AGE_NS + 1000) for _ in range(3)]
    high = table.add(10, priority=HIGH)
    table.end(now=AGE_NS)
    done = table.order()
    assert done == [high.number, old.number, *(job.number for job in newer)]


def test_priority_can_change_while_it_waits():
    table = Table()
    table.add(10)
    table.decide()
    first, second = table.add(10), table.add(10, priority=LOW)
    assert table.queue.change_priority(second, HIGH, 0)
    table.end()
    assert table.order() == [second.number, first.number]
    assert not table.queue.change_priority(second, LOW, table.now)


def test_full_room_refuses():
    table = Table(waiting_max=2)
    table.add(10)
    table.add(10)
    assert table.queue.add(table.job(10, priority=HIGH), 0) is Reason.FULL


def test_full_room_displaces_the_last_in_the_order():
    table = Table(waiting_max=2, on_full="displace")
    table.add(10, priority=MEDIUM)
    last = table.add(10, priority=LOW)
    assert table.queue.add(table.job(10, priority=LOW), 0) is Reason.FULL
    high = table.add(10, priority=HIGH)
    actions = table.decide()
    assert [(a.job, a.reason) for a in actions if isinstance(a, Abort)] == [(last, Reason.FULL)]
    assert starts(actions) == [(high.number, 0)]


def test_unknown_policy_when_full_is_refused():
    with pytest.raises(InvalidArgument, match="refuse or displace, got 'wait'"):
        PlannedQueue([DeviceSlot(0, 0)], on_full="wait")
    with pytest.raises(InvalidArgument, match="at least 1"):
        PlannedQueue([DeviceSlot(0, 0)], waiting_max=0)


@pytest.mark.slow
@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_thousands_wait_and_high_still_comes_first(count):
    table = Table(slots=2, devices=[0, 0])
    for _ in range(count):
        table.add(10, priority=LOW)
    table.decide()
    high = table.add(10, priority=HIGH, deadline=1000)
    assert any(isinstance(a, Preempt) and a.by is high for a in table.decide(now=1))
    assert table.queue.statistics().waiting == count - 1


def test_decision_is_a_function_of_its_arguments():
    def run():
        table = Table(devices=[0, 1])
        seen = []
        for step in range(60):
            priority = Priority(step * 7 % 3)
            job = table.job(10 + step % 7, 20 - step % 5, priority=priority, deadline=table.now + 40 + step)
            table.queue.add(job, table.now)
            seen.append([repr(a) for a in table.decide()])
            for slot in table.slots:
                if slot.job is not None and slot.ends_ns <= table.now + 6:
                    table.end(slot.index, now=table.now)
            table.now += 5
        return seen

    assert run() == run()


def test_explain_tells_place_slots_and_last_decision():
    table = Table()
    table.add(100, deadline=1000)
    table.decide()
    table.add(10, deadline=500)
    job = table.add(10, deadline=600)
    text = table.queue.explain(job, 0)
    assert "1 of 2 go before it; planned on slot 0" in text
    assert "slot 0 (device 0): would end in 120 ns, behind 1" in text
    started = table.slots[0].job
    assert "0 ns ago: the first in its plan starts, on slot 0" in table.queue.explain(started, 0)
    assert text.startswith("<Job 2: MEDIUM, deadline in 600 ns, waiting>")
    assert table.queue.explain(job, 2600).startswith("<Job 2: MEDIUM, deadline 2 us ago, waiting>")
    assert "ns ago: the first" not in (later := table.queue.explain(started, 3_000_000))
    assert "3 ms ago: the first in its plan starts" in later


def test_statistics_add_up():
    table = Table()
    for deadline in (50, 60, 70, 15):
        table.queue.add(table.job(20, deadline=deadline), 0)
    table.order()
    table.decide(now=1000)
    counts = table.queue.statistics()
    assert counts.entered == 4 and counts.rejected == 1
    assert counts.waiting == 0 and counts.started + sum(counts.aborted.values()) == 3
