"""Frames that are lost though they kept their promises: labelled with a cause that was measured, and with no other."""

import pytest

from aionn.hal import Priority
from aionn.scheduler.bandwidth import BandwidthServer, Label
from aionn.scheduler.dispatcher import Dispatcher
from aionn.scheduler.job import JobState

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH
ROOM = 20


class Measured:
    """Stalls of the event loop at given times."""

    def __init__(self):
        self.stalls = []
        self.looks = [0]

    def look(self, now_ns):
        self.looks.append(now_ns)

    def since(self, then_ns, now_ns, began_ns=None):
        first = max((at for at in self.looks if at <= then_ns), default=None)
        if first is None:
            return 0
        return sum(length for at, length in self.stalls if first <= at <= now_ns)


def server(*, slot=0, period=1000, deadline=60, jitter=0, duration=10, stalls=None):
    found = BandwidthServer(
        1,
        slot=slot,
        period_ns=period,
        deadline_ns=deadline,
        jitter_ns=jitter,
        duration_ns=duration,
        piece_ns=duration,
    )
    if stalls is not None:
        found.stalls = stalls
    return found


class Shell:
    """A dispatcher with reservations, whose clock is set by hand."""

    def __init__(self):
        self.now = 0
        self.dispatcher = Dispatcher(1, now=lambda: self.now)
        self.dispatcher.limit_best_effort(ROOM)

    def enter(self, reserved=None, *, deadline=60, expected=10):
        return self.dispatcher.enter(
            priority=MEDIUM,
            deadline_ns=self.now + deadline,
            model="m" if reserved is None else "frames",
            declared_ns=expected,
            server=reserved,
        )

    def decide_at(self, now, job):
        """Something happens then: the queue looks at what waits."""
        self.now = now
        self.dispatcher.change_priority(job, HIGH)

    def release(self, job):
        """It gives its slot back, and nothing is learnt of its duration."""
        self.dispatcher.release(job, outcome="failed")

    def lose(self, job):
        """The shell of the stream reports a frame without a result."""
        job.frame.exhaust(self.now)
        job.frame.lost(self.now, self.now - job.deadline_ns)
        return job.frame.label


def test_frame_behind_best_effort_that_takes_too_long_was_blocked():
    shell = Shell()
    shell.enter(deadline=5000)
    shell.now = 5
    frame = shell.enter(server())
    shell.decide_at(56, frame)
    assert frame.state is JobState.ENDED
    assert (frame.frame.missing_ns, frame.frame.blocked_ns) == (56 + 10 - 65, 56 - ROOM)
    assert shell.lose(frame) is Label.BLOCKED


def test_best_effort_within_what_is_counted_with_explains_no_loss():
    """Admission promised that such an execution does no harm: the loss is a defect, and has no label."""
    shell = Shell()
    shell.enter(deadline=5000)
    shell.now = 5
    frame = shell.enter(server(deadline=15), deadline=15)
    shell.decide_at(ROOM, frame)
    assert frame.state is JobState.ENDED and frame.frame.blocked_ns == 0
    assert shell.lose(frame) is None


def test_stall_explains_no_more_than_its_length_of_what_a_waiting_frame_lacks():
    """It is rejected when its last possible start has passed, and lacks what those before it may still take."""
    for stall, label in ((1, None), (9, None), (10, Label.STALLED)):
        stalls, shell = Measured(), Shell()
        shell.enter(deadline=5000)
        shell.now = 5
        frame = shell.enter(server(deadline=15, stalls=stalls), deadline=15)
        stalls.stalls.append((8, stall))
        shell.decide_at(11, frame)
        assert frame.state is JobState.ENDED
        assert frame.frame.missing_ns == ROOM + 10 - 20
        assert shell.lose(frame) is label


def test_waiting_frame_lacks_the_time_of_the_frames_before_it():
    shell = Shell()
    shell.enter(server())
    shell.enter(server(deadline=50), deadline=50)
    last = shell.enter(server(deadline=55), deadline=55)
    shell.decide_at(46, last)
    assert last.state is JobState.ENDED and last.frame.missing_ns == 46 + 10 - 55
    shell = Shell()
    shell.enter(server(duration=30), expected=1)
    second = shell.enter(server(deadline=50, duration=35), deadline=50, expected=5)
    last = shell.enter(server(deadline=55, duration=40), deadline=55, expected=40)
    shell.decide_at(16, last)
    assert (second.state, last.state) == (JobState.WAITING, JobState.ENDED)
    assert last.frame.missing_ns == 30 + 35 + 40 - 55


def test_frame_that_runs_at_its_deadline_is_late_by_what_is_left_of_its_budget():
    for stall, label in ((4, None), (5, Label.STALLED)):
        stalls = Measured()
        frame = server(stalls=stalls).arrive(0, 60)
        frame.start(55)
        stalls.stalls.append((30, stall))
        frame.lost(61, 1)
        assert frame.label is label


def test_frame_without_a_result_before_its_deadline_has_no_cause():
    stalls = Measured()
    frame = server(stalls=stalls).arrive(0, 60)
    frame.start(0)
    stalls.stalls.append((3, 50))
    frame.lost(55, -5)
    assert frame.label is None


def test_excess_that_is_shorter_than_the_lateness_explains_nothing():
    shell = Shell()
    long = shell.enter(deadline=5000)
    shell.now = 5
    frame = shell.enter(server())
    shell.now = ROOM + 3
    shell.release(long)
    assert frame.frame.blocked_ns == 3
    shell.now = 70
    job_frame = frame.frame
    job_frame.left_ns = 100  # It runs within its budget.
    assert shell.lose(frame) is None


def test_frames_behind_one_that_overran_were_blocked_down_the_line():
    shell = Shell()
    first = shell.enter(server())
    second, third = (
        shell.enter(server(deadline=61), deadline=61),
        shell.enter(server(deadline=62), deadline=62),
    )
    shell.now = 45
    shell.release(first)
    assert first.frame.label is Label.OVERRAN and second.state is JobState.RUNNING
    shell.now = 55
    shell.release(second)
    assert second.frame.label is None and third.state is JobState.ENDED
    assert third.frame.blocked_ns == 35 and shell.lose(third) is Label.BLOCKED


def test_time_that_was_lost_before_the_slot_was_idle_blocks_nobody():
    shell = Shell()
    long = shell.enter(deadline=5000)
    shell.now = 5
    waits = shell.enter(server())
    shell.now = 40
    shell.dispatcher.leave(waits)
    shell.release(long)
    shell.now = 100
    alone = shell.enter(server())
    assert alone.frame.blocked_ns == 0
    shell.release(alone)
    short = shell.enter(deadline=5000)
    shell.now = 105
    frame = shell.enter(server())
    shell.now = 110
    shell.release(short)
    assert frame.frame.blocked_ns == 0


def test_frame_that_comes_when_its_slot_is_free_is_blocked_by_nothing_that_was():
    shell = Shell()
    long = shell.enter(deadline=5000)
    shell.now = 5
    waits = shell.enter(server())
    shell.dispatcher.leave(waits)
    shell.release(long)
    shell.now = 1000
    alone = shell.enter(server(), expected=100)  # It does not start at once: it is expected to end late.
    assert alone.state is JobState.RUNNING and alone.frame.blocked_ns == 0
    shell.now = 1000 + 45
    shell.release(alone)
    shell.now = 2000
    late = shell.enter(server(), expected=100)
    assert late.frame.blocked_ns == 0


def test_frame_that_runs_as_best_effort_may_take_what_best_effort_may():
    shell, found = Shell(), server(period=100)
    shell.release(shell.enter(found))
    shell.now = 1
    early = shell.enter(found)
    assert early.frame.label is Label.EARLY and early.state is JobState.RUNNING
    shell.now = 2
    frame = shell.enter(server())
    shell.now = 1 + ROOM + 3
    shell.release(early)
    assert frame.state is JobState.RUNNING and frame.frame.blocked_ns == 3


def test_loop_that_the_machine_did_not_run_is_the_cause_if_that_is_long_enough():
    for stall, label in ((36, Label.STALLED), (1, Label.BLOCKED), (0, Label.BLOCKED)):
        stalls, shell = Measured(), Shell()
        shell.enter(deadline=5000)
        shell.now = 5
        frame = shell.enter(server(stalls=stalls))
        stalls.stalls.append((20, stall))
        shell.decide_at(56, frame)
        assert shell.lose(frame) is label


def test_overrun_is_labelled_by_its_whole_length():
    """The decision at the end of the budget takes the class; what the machine took until then says nothing of the rest."""
    for release, label in ((45, Label.OVERRAN), (12, Label.STALLED)):
        stalls, shell = Measured(), Shell()
        found = server(stalls=stalls)
        first, second = shell.enter(found), shell.enter(server(stalls=stalls))
        stalls.stalls.append((3, 2))
        shell.decide_at(11, second)
        assert not first.frame.is_reserved
        shell.now = release
        shell.release(first)
        assert first.frame.label is label
        assert [found.counts[each] for each in (Label.STALLED, Label.OVERRAN)] == [
            label is Label.STALLED,
            label is Label.OVERRAN,
        ]


def test_time_that_the_machine_took_before_a_frame_ran_pays_for_no_overrun():
    stalls = Measured()
    found = server(stalls=stalls)
    frame = found.arrive(0, 60)
    stalls.stalls.append((5, 50))
    frame.start(40)
    assert frame.exhaust(51) and frame.label is Label.OVERRAN
    frame.stop(95, can_preempt=False)
    assert (frame.label, found.debt_ns) == (Label.OVERRAN, 45)


@pytest.mark.parametrize(
    ("stalled_ns", "label", "debt_ns"),
    [(50, Label.STALLED, 0), (10, Label.OVERRAN, 35), (0, Label.OVERRAN, 45)],
)
def test_overrun_is_that_of_the_machine_if_its_stall_is_as_long(stalled_ns: int, label: Label, debt_ns: int):
    stalls = Measured()
    found = server(stalls=stalls)
    frame = found.arrive(0, 60)
    frame.start(0)
    stalls.stalls.append((3, stalled_ns))
    frame.stop(55, can_preempt=False)
    assert (frame.label, found.debt_ns) == (label, debt_ns)


def test_frame_that_the_machine_brought_late_is_not_called_delayed():
    for stall, label in ((70, Label.STALLED), (30, Label.DELAYED)):
        stalls = Measured()
        found = server(period=100, deadline=100, jitter=10, stalls=stalls)
        assert found.arrive(0, 100).label is None
        stalls.stalls.append((150, stall))
        late = found.arrive(170, 100 + 100)
        assert late.label is label and late.is_reserved


def test_one_late_frame_costs_the_next_its_reservation_and_none_after_that():
    found = server(period=100, deadline=100, jitter=10)
    found.arrive(0, 100)
    assert found.arrive(130, 200).label is Label.DELAYED
    frames = [found.arrive(at, at + 100) for at in range(200, 1000, 100)]
    assert [frame.label for frame in frames] == [Label.DELAYED] + [None] * 7
    assert [frame.is_reserved for frame in frames] == [False] + [True] * 7


def test_source_that_is_always_late_stays_reserved_and_one_that_lies_gains_nothing():
    found = server(period=100, deadline=100, jitter=10)
    frames = [found.arrive(at + 30, at + 100) for at in range(0, 800, 100)]
    assert all(frame.label is Label.DELAYED and frame.is_reserved for frame in frames)
    found = server(period=100, deadline=100, jitter=10)
    reserved = [
        found.arrive(at, capture + 100).is_reserved for at, capture in [(0, 0), (50, 0), (60, 300), (70, 500)]
    ]
    assert reserved == [True, False, False, False]


def test_late_frame_is_not_moved_where_best_effort_may_not_run():
    found = server(period=100, deadline=100, jitter=10)
    found.may_run_lower = False
    found.arrive(0, 100)
    found.arrive(118, 200)
    frame = found.arrive(209, 300)
    assert (frame.label, frame.is_reserved, frame.is_rejected) == (Label.DELAYED, True, False)


def test_cause_of_a_late_frame_is_that_of_those_after_it_where_best_effort_may_not_run():
    stalls = Measured()
    found = server(period=100, deadline=100, jitter=10, stalls=stalls)
    found.may_run_lower = False
    found.arrive(0, 100)
    stalls.stalls.append((110, 8))
    assert found.arrive(118, 200).label is Label.STALLED
    assert found.arrive(209, 300).label is Label.STALLED
    assert found.arrive(309, 400).label is Label.STALLED
    assert found.arrive(425, 500).label is Label.DELAYED, "it is late itself"
