"""The class of reserved frames in the policy: pure, each claim a call with a time, a queue and slots."""

from aionn.hal import Priority
from aionn.scheduler.bandwidth import BandwidthServer, Label
from aionn.scheduler.job import NEVER_NS, RESERVED, Abort, JobState, Preempt, Reason, Start
from aionn.scheduler.planned_queue import AGE_NS
from aionn.scheduler.planning_policy import PlanPolicy, start_immediately
from tests.aionn.scheduler.table import Table, starts

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH


class Reserved(Table):
    """A table whose jobs may be frames of reserved streams."""

    def __init__(self, slots=1, **settings):
        super().__init__(slots, policy=PlanPolicy(**settings))

    def server(self, *, slot=0, period=1000, deadline=100, jitter=0, duration=10, piece=1):
        return BandwidthServer(
            1,
            slot=slot,
            period_ns=period,
            deadline_ns=deadline,
            jitter_ns=jitter,
            duration_ns=duration,
            piece_ns=piece,
        )

    def frame(self, *durations, deadline=100, slot=0, duration=None, priority=MEDIUM, server=None):
        """A frame that arrives now, of a stream of its own unless a server is given; the deadline is relative."""
        if server is None:
            duration = duration or durations[slot]
            server = self.server(slot=slot, deadline=deadline, duration=duration)
        job = self.job(*durations, deadline=self.now + deadline, priority=priority)
        job.reserve(server.arrive(self.now, self.now + deadline))
        assert self.queue.add(job, self.now) is None
        return job

    def decide(self, now=None):
        actions = super().decide(now)
        for action in actions:
            if isinstance(action, Start) and action.job.frame is not None:
                action.job.frame.start(self.now)
        return actions

    def end(self, slot=0, now=None):
        job = super().end(slot, now)
        if job.frame is not None:
            job.frame.stop(self.now, can_preempt=self.slots[slot].has_boundaries)
        return job

    def suspend(self, slot):
        if slot.job.frame is not None:
            slot.job.frame.stop(self.now, can_preempt=slot.has_boundaries)
        super().suspend(slot)


def test_earliest_deadline_goes_first_whatever_the_priority():
    table = Reserved()
    for deadline, priority in ((90, HIGH), (70, LOW), (80, MEDIUM)):
        table.frame(10, deadline=deadline, priority=priority)
    assert table.order() == [1, 2, 0]


def test_reserved_frame_preempts_what_runs_though_both_would_end_in_time():
    table = Reserved()
    for priority in (LOW, MEDIUM, HIGH):
        best_effort = table.add(40, priority=priority, deadline=table.now + 10_000)
        table.decide()
        frame = table.frame(10, deadline=1000)
        assert table.decide() == [Preempt(table.slots[0], frame)]
        table.suspend(table.slots[0])
        table.decide()
        assert table.end() is frame
        table.decide()
        assert table.end() is best_effort


def test_earlier_deadline_preempts_a_reserved_frame_and_a_later_one_does_not():
    table = Reserved()
    table.frame(40, deadline=500)
    table.decide()
    table.frame(10, deadline=600)
    assert table.decide(now=1) == []
    first = table.frame(10, deadline=300)
    assert table.decide(now=2) == [Preempt(table.slots[0], first)]
    assert table.decide(now=3) == []  # It is stopping already.


def test_device_without_boundaries_is_not_asked_to_stop():
    table = Reserved()
    table.slots[0].can_preempt = table.slots[0].has_boundaries = False
    table.add(40)
    table.decide()
    frame = table.frame(10, deadline=90)
    assert table.decide() == []
    table.end()
    assert starts(table.decide()) == [(frame.number, 0)]


def test_frame_waits_for_its_own_slot_though_another_is_free():
    table = Reserved(slots=2)
    running = table.frame(10, 10, slot=1)
    table.decide()
    assert table.slots[1].job is running
    table.frame(10, 10, slot=1, deadline=200)
    assert table.decide() == []
    best_effort = table.add(10, 10)
    assert starts(table.decide()) == [(best_effort.number, 0)]


def test_best_effort_starts_on_no_slot_for_which_a_frame_waits():
    table = Reserved()
    table.add(10, priority=HIGH, deadline=20)
    frame = table.frame(10, deadline=90)
    assert starts(table.decide()) == [(frame.number, 0)]


def test_best_effort_is_planned_behind_reserved_frames():
    table = Reserved(slots=2)
    table.frame(50, 50, deadline=90)
    table.frame(40, 40, deadline=95)
    table.decide()
    table.add(30, 30)
    table.decide()
    # Slot 0 ends its frames after 90, slot 1 what runs there after 30.
    waiting = table.add(10, 10, deadline=45)
    assert table.decide() == []
    assert table.queue.slot_of[waiting.number] == 1


def test_arrival_of_a_frame_replans_best_effort_that_would_be_late():
    table = Reserved(slots=2)
    for _ in range(2):
        table.add(20, 20, priority=HIGH)
    table.decide()
    planned = table.add(10, 10, deadline=35)
    assert table.queue.slot_of[planned.number] == 0
    table.slots[0].can_preempt = table.slots[0].has_boundaries = False
    table.frame(20, 20, deadline=90)
    assert table.queue.slot_of[planned.number] == 1


def test_nothing_of_any_age_overtakes_a_frame():
    table = Reserved()
    old = table.add(10)
    table.queue.remove(old)
    table.queue.add(old, 0)
    table.now = AGE_NS + 1
    frame = table.frame(10, deadline=90)
    assert starts(table.decide()) == [(frame.number, 0)]
    assert old.state is JobState.WAITING


def test_running_frame_keeps_its_place_however_old_it_is():
    table = Reserved()
    frame = table.frame(10, deadline=3 * AGE_NS, duration=3 * AGE_NS)
    table.decide()
    table.add(10)
    table.decide(now=2 * AGE_NS)
    assert frame.rank == RESERVED and frame.urgent_ns == 3 * AGE_NS


def test_frames_are_not_displaced_and_a_full_queue_takes_them():
    table = Reserved(waiting_max=1)
    table.add(10, priority=HIGH)
    frames = [table.frame(1, deadline=900 + i) for i in range(60)]
    assert all(table.queue.reserved is not None and frame.state is JobState.WAITING for frame in frames)
    assert len(table.queue) == 61
    assert table.order()[:60] == [frame.number for frame in frames]


def test_frame_is_aborted_only_when_it_cannot_end_in_time():
    table = Reserved()
    table.slots[0].can_preempt = table.slots[0].has_boundaries = False
    table.add(95)
    table.decide()
    frame = table.frame(10, deadline=100)
    assert table.queue.next_wake_ns() == 91
    assert table.decide(now=90) == []
    assert table.decide(now=91) == [Abort(frame, Reason.TOO_LATE)]
    assert len(table.queue) == 0 and table.slots[0].backlog_ns == 0


def test_frame_that_has_used_its_budget_leaves_the_class_when_another_waits():
    table = Reserved()
    long = table.frame(40, deadline=500, duration=10)
    table.decide()
    other = table.frame(10, deadline=600)
    assert table.queue.next_wake_ns() == 11
    assert table.decide(now=10) == []
    assert table.decide(now=11) == [Preempt(table.slots[0], other)]
    assert long.frame.label is Label.OVERRAN and long.rank == int(MEDIUM)
    table.suspend(table.slots[0])
    table.decide()
    assert table.end() is other
    assert starts(table.decide()) == [(long.number, 0)]
    assert other.frame.label is None


def test_frame_that_comes_back_without_a_budget_is_best_effort():
    table = Reserved()
    long = table.frame(40, deadline=500, duration=10)
    table.decide()
    first = table.frame(10, deadline=300)
    assert table.decide(now=9) == [Preempt(table.slots[0], first)]
    table.now = 15  # The boundary comes after the budget has been used.
    table.suspend(table.slots[0])
    assert long.rank == int(MEDIUM) and long.number in table.queue.slot_of


def test_rejected_frame_is_answered_immediately():
    table = Reserved()
    server = table.server()
    server.may_run_lower = False
    table.frame(10, server=server)
    early = table.job(10, deadline=100)
    early.reserve(server.arrive(5, 105))
    assert table.queue.add(early, 5) is Reason.UNRESERVED
    late = table.job(10, deadline=9)
    late.reserve(table.server().arrive(0, 9))
    assert table.queue.add(late, 0) is Reason.IMPOSSIBLE


def test_early_frame_is_best_effort_of_its_priority():
    table = Reserved()
    server = table.server()
    table.frame(10, server=server)
    table.now = 1
    early = table.frame(10, server=server, priority=HIGH)
    assert early.rank == int(HIGH) and early.frame.label is Label.EARLY
    assert table.order() == [0, 1]


def test_withdrawn_slot_makes_its_waiting_frames_best_effort():
    table = Reserved(slots=2)
    table.frame(10, 10, deadline=900)
    table.decide()
    waiting = table.frame(10, 10, deadline=950)
    table.end()
    table.slots[0].is_up = False
    table.queue.withdraw(table.slots[0], table.now)
    assert waiting.frame.label is Label.WITHDRAWN and table.slots[0].backlog_ns == 0
    assert starts(table.decide()) == [(waiting.number, 1)]


def test_frame_that_leaves_the_queue_leaves_no_backlog():
    table = Reserved()
    table.slots[0].can_preempt = table.slots[0].has_boundaries = False
    table.add(40)
    table.decide()
    frames = [table.frame(10, deadline=500 + i) for i in range(3)]
    assert table.slots[0].backlog_ns == 30
    table.queue.remove(frames[1])
    table.queue.remove(frames[1])
    assert table.slots[0].backlog_ns == 20 and len(table.queue) == 2
    assert "reservation 1, reserved>" in table.queue.explain(frames[0], table.now)
    table.queue.withdraw(table.slots[0], table.now)
    assert "reservation 1, best effort since withdrawn>" in table.queue.explain(frames[0], table.now)


def test_without_reservations_the_queue_has_no_part_for_them():
    table = Reserved()
    table.add(10)
    table.decide()
    assert table.queue.reserved is None and table.queue.next_wake_ns() == NEVER_NS


def test_limit_of_best_effort_preemptions_is_not_one_of_reserved_frames():
    table = Reserved()
    table.add(40)
    table.decide()
    table.slots[0].can_preempt = False
    frame = table.frame(10, deadline=90)
    assert table.decide() == [Preempt(table.slots[0], frame)]


def test_quick_start_decides_as_the_decision_does():
    table = Reserved(slots=2)

    def quick(is_frame, slot=1):
        job = table.job(10, 10, deadline=table.now + 100)
        if is_frame:
            job.reserve(table.server(slot=slot).arrive(table.now, table.now + 100))
        start = start_immediately(table.now, table.queue, table.slots, job)
        return start and start.slot.index

    assert quick(is_frame=True) is None  # The first one: nothing is known of reservations yet.
    table.frame(10, 10, slot=1)
    table.decide()
    assert quick(is_frame=True) is None and quick(is_frame=True, slot=0) == 0 and quick(is_frame=False) == 0
    table.end(slot=1)
    assert quick(is_frame=True) == 1
    table.frame(10, 10, slot=1)
    assert quick(is_frame=False) is None and quick(is_frame=True, slot=0) is None


def test_quick_start_leaves_a_frame_that_is_rejected_to_the_queue():
    table = Reserved()
    server = table.server()
    server.may_run_lower = False
    server.arrive(table.now, table.now + 100)
    job = table.job(10, deadline=table.now + 100)
    job.reserve(server.arrive(table.now, table.now + 100))
    assert job.frame.is_rejected and job.rank == int(MEDIUM)
    assert start_immediately(table.now, table.queue, table.slots, job) is None
    assert table.queue.add(job, table.now) is Reason.UNRESERVED
