"""Frames of reserved streams in the event loop's shell."""

import anyio
import pytest

from aionn.errors import MissedDeadline
from aionn.hal import Priority
from aionn.scheduler.bandwidth import BandwidthServer, Label
from aionn.scheduler.dispatcher import PREEMPTED_MAX, Dispatcher
from aionn.scheduler.job import RESERVED, JobState

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH


def server(*, slot=0, period=1000, deadline=500, duration=10):
    return BandwidthServer(
        1,
        slot=slot,
        period_ns=period,
        deadline_ns=deadline,
        jitter_ns=0,
        duration_ns=duration,
        piece_ns=duration,
    )


class Shell:
    """A dispatcher whose clock is set by hand."""

    def __init__(self, slots=1, **settings):
        self.now = 0
        self.dispatcher = Dispatcher(slots, now=lambda: self.now, **settings)

    def enter(self, *, deadline=500, priority=MEDIUM, reserved=None, expected=10):
        return self.dispatcher.enter(
            priority=priority,
            deadline_ns=self.now + deadline,
            model="m",
            declared_ns=expected,
            server=reserved,
        )


def test_frame_goes_before_best_effort_of_any_priority():
    shell = Shell()
    first = shell.enter()
    high = shell.enter(priority=HIGH, deadline=100)
    frame = shell.enter(priority=LOW, reserved=server())
    shell.dispatcher.release(first)
    assert (frame.state, high.state) == (JobState.RUNNING, JobState.WAITING)
    shell.dispatcher.release(frame)
    assert high.state is JobState.RUNNING
    shell.dispatcher.release(high)


def test_frames_preempt_each_other_beyond_the_limit_of_best_effort():
    shell = Shell(can_preempt=True)
    jobs = [shell.enter(priority=priority) for priority in (LOW, MEDIUM, HIGH)]
    jobs += [shell.enter(deadline=400 - 10 * i, reserved=server(deadline=400 - 10 * i)) for i in range(6)]
    assert jobs[-1].state is JobState.RUNNING and len(jobs) > 2 * PREEMPTED_MAX
    for job in reversed(jobs):
        assert job.state is JobState.RUNNING
        shell.dispatcher.release(job)
    assert shell.dispatcher.explain() == "slot 0: free"


def test_time_of_a_frame_is_what_it_held_the_slot_for():
    shell = Shell(can_preempt=True)
    reserved = server()
    frame = shell.enter(reserved=reserved)
    shell.now = 4
    other = shell.enter(deadline=100, reserved=server(deadline=100))
    shell.now = 20
    shell.dispatcher.release(other)
    assert frame.frame.left_ns == 6
    shell.now = 26
    shell.dispatcher.release(frame)
    assert reserved.counts[Label.OVERRAN] == 0
    shell.now = 1000
    long = shell.enter(reserved=reserved)
    shell.now = 1011
    shell.dispatcher.release(long)
    assert long.frame.label is Label.OVERRAN and reserved.debt_ns == 1


def test_frame_that_starts_immediately_is_counted_as_one_that_waits():
    shell = Shell(2)
    reserved = server(slot=1)
    for _ in range(4):
        frame = shell.enter(reserved=reserved)
        assert frame.state is JobState.RUNNING and frame.rank == RESERVED
        assert "slot 1" in shell.dispatcher.explain().splitlines()[1]
        shell.now += 10
        shell.dispatcher.release(frame)
        shell.now += 990
    assert shell.dispatcher.statistics().started == shell.dispatcher.statistics().entered == 4


def test_priority_inheritance_does_not_move_a_frame():
    shell = Shell()
    shell.enter()
    frame = shell.enter(reserved=server())
    key = frame.key
    shell.dispatcher.hasten(frame, HIGH, 1)
    assert frame.key == key
    assert not shell.dispatcher.change_priority(frame, HIGH)


def test_cancelled_frame_leaves_no_backlog():
    shell = Shell()
    first = shell.enter()
    frame = shell.enter(reserved=server())
    shell.dispatcher.leave(frame)
    assert frame.state is JobState.ENDED
    shell.dispatcher.release(first)
    assert shell.enter(deadline=15).state is JobState.RUNNING


async def test_frame_behind_one_without_a_budget_gets_its_slot_then():
    """The budget ends while nothing else happens: the frame that waits sees to it."""

    def now_ns():
        return int(anyio.current_time() * 1e9)

    ms = 1_000_000
    dispatcher = Dispatcher(1, now=now_ns, can_preempt=True)
    long = dispatcher.enter(
        priority=MEDIUM,
        deadline_ns=now_ns() + 10_001 * ms,
        server=server(period=20_000 * ms, deadline=10_000 * ms, duration=5 * ms),
    )
    frame = dispatcher.enter(
        priority=MEDIUM,
        deadline_ns=now_ns() + 20_001 * ms,
        server=server(period=30_000 * ms, deadline=20_000 * ms, duration=5 * ms),
    )
    with anyio.fail_after(5):
        await dispatcher.wait(frame)
    assert long.frame.label is Label.OVERRAN and frame.frame.label is None
    dispatcher.release(frame)
    dispatcher.release(long)


async def test_frame_that_becomes_late_is_reported_before_its_deadline():
    def now_ns():
        return int(anyio.current_time() * 1e9)

    ms = 1_000_000
    dispatcher = Dispatcher(1, now=now_ns)
    held = dispatcher.enter(priority=MEDIUM, deadline_ns=None)
    frame = dispatcher.enter(
        priority=MEDIUM,
        deadline_ns=now_ns() + 10_001 * ms,
        model="m",
        declared_ns=9_990 * ms,
        server=server(period=20_000 * ms, deadline=10_000 * ms, duration=9_990 * ms),
    )
    with anyio.fail_after(5), pytest.raises(MissedDeadline):
        await dispatcher.wait(frame)
    dispatcher.release(held)
