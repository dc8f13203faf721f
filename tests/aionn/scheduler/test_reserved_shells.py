"""Frames of reserved streams in the event loop's shell, and in the queue of a driver with its clients."""

import random

import anyio
import pytest

from aionn.errors import InvalidArgument, MissedDeadline
from aionn.hal import Priority
from aionn.scheduler.bandwidth import BandwidthServer, Label
from aionn.scheduler.dispatcher import PREEMPTED_MAX, Dispatcher
from aionn.scheduler.job import NEVER_NS, RESERVED, JobState
from aionn.scheduler.plain_policy import PlainPolicy
from aionn.scheduler.reservations.calls import ReservedCall
from tests.aionn.scheduler.test_shared_slots import Bench, Noted

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH


def make_server(*, slot=0, period=1000, deadline=500, duration=10):
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
    frame = shell.enter(priority=LOW, reserved=make_server())
    shell.dispatcher.release(first)
    assert (frame.state, high.state) == (JobState.RUNNING, JobState.WAITING)
    shell.dispatcher.release(frame)
    assert high.state is JobState.RUNNING
    shell.dispatcher.release(high)


def test_frames_preempt_each_other_beyond_the_limit_of_best_effort():
    shell = Shell(can_preempt=True)
    jobs = [shell.enter(priority=priority) for priority in (LOW, MEDIUM, HIGH)]
    jobs += [
        shell.enter(deadline=400 - 10 * i, reserved=make_server(deadline=400 - 10 * i)) for i in range(6)
    ]
    assert jobs[-1].state is JobState.RUNNING and len(jobs) > 2 * PREEMPTED_MAX
    for job in reversed(jobs):
        assert job.state is JobState.RUNNING
        shell.dispatcher.release(job)
    assert shell.dispatcher.explain() == "slot 0: free"


def test_time_of_a_frame_is_what_it_held_the_slot_for():
    shell = Shell(can_preempt=True)
    reserved = make_server()
    frame = shell.enter(reserved=reserved)
    shell.now = 4
    other = shell.enter(deadline=100, reserved=make_server(deadline=100))
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
    reserved = make_server(slot=1)
    for _ in range(4):
        frame = shell.enter(reserved=reserved)
        assert frame.state is JobState.RUNNING and frame.rank == RESERVED
        assert "slot 1" in shell.dispatcher.explain().splitlines()[1]
        shell.now += 10
        shell.dispatcher.release(frame)
        shell.now += 990
    assert shell.dispatcher.statistics().started == shell.dispatcher.statistics().entered == 4


@pytest.mark.parametrize("is_idle", [True, False])
@pytest.mark.parametrize("room_ns", [5, None])
def test_early_frame_that_reserved_ones_cannot_wait_for_is_rejected_also_where_its_slot_is_idle(
    is_idle, room_ns
):
    shell, reserved = Shell(), make_server()
    shell.dispatcher.limit_best_effort(room_ns)
    reserved.may_run_lower = False
    frame = shell.enter(reserved=reserved)
    if is_idle:
        shell.dispatcher.release(frame)
    with pytest.raises(MissedDeadline, match="reserved no time"):
        shell.enter(reserved=reserved)
    assert reserved.counts[Label.EARLY] == 1


def test_priority_inheritance_does_not_move_a_frame():
    shell = Shell()
    shell.enter()
    frame = shell.enter(reserved=make_server())
    key = frame.key
    shell.dispatcher.hasten(frame, HIGH, 1)
    assert frame.key == key
    assert not shell.dispatcher.change_priority(frame, HIGH)


def test_cancelled_frame_leaves_no_backlog():
    shell = Shell()
    first = shell.enter()
    frame = shell.enter(reserved=make_server())
    shell.dispatcher.leave(frame)
    assert frame.state is JobState.ENDED
    shell.dispatcher.release(first)
    assert shell.enter(deadline=15).state is JobState.RUNNING


@pytest.mark.aionn(virtual_time=True)
async def test_frame_behind_one_without_a_budget_gets_its_slot_then():
    """The budget ends while nothing else happens: the frame that waits sees to it."""

    def now_ns():
        return int(anyio.current_time() * 1e9)

    ms = 1_000_000
    dispatcher = Dispatcher(1, now=now_ns, can_preempt=True)
    long = dispatcher.enter(
        priority=MEDIUM,
        deadline_ns=now_ns() + 10_001 * ms,
        server=make_server(period=20_000 * ms, deadline=10_000 * ms, duration=5 * ms),
    )
    frame = dispatcher.enter(
        priority=MEDIUM,
        deadline_ns=now_ns() + 20_001 * ms,
        server=make_server(period=30_000 * ms, deadline=20_000 * ms, duration=5 * ms),
    )
    with anyio.fail_after(5):
        await dispatcher.wait(frame)
    assert long.frame.label is Label.OVERRAN and frame.frame.label is None
    dispatcher.release(frame)
    dispatcher.release(long)


@pytest.mark.aionn(virtual_time=True)
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
        server=make_server(period=20_000 * ms, deadline=10_000 * ms, duration=9_990 * ms),
    )
    with anyio.fail_after(5), pytest.raises(MissedDeadline):
        await dispatcher.wait(frame)
    dispatcher.release(held)


def test_frame_is_sent_immediately_where_the_device_orders_it_and_holds_no_slot():
    shell = Shell()
    shell.dispatcher.passes_frames = True
    best = shell.enter()
    reserved = make_server()
    frames = [shell.enter(reserved=reserved), shell.enter(reserved=make_server())]
    assert all(frame.state is JobState.RUNNING and frame.is_launched for frame in frames)
    early = shell.enter(reserved=reserved)
    assert early.state is JobState.WAITING, "it is best effort"
    assert shell.dispatcher.explain().count("at the device: ") == 2 and shell.dispatcher.busy_count == 1
    shell.now = 400
    shell.dispatcher.leave(frames[0])
    shell.dispatcher.release(frames[1])
    assert reserved.debt_ns == 0 and frames[0].frame.label is None, "it has waited there, perhaps"
    with pytest.raises(InvalidArgument):
        shell.dispatcher.release(frames[1])
    shell.dispatcher.release(best)
    assert early.state is JobState.RUNNING
    shell.dispatcher.release(early)
    assert shell.dispatcher.explain() == "slot 0: free"


# --- The queue of a driver ------------------------------------------------------------------------------------------


class Reserved(Bench):
    """A device with reserved streams."""

    def frame(self, name, *, server=None, room=NEVER_NS, **more):
        server = make_server(**more) if server is None else server
        job = self.jobs[name] = Noted(self.log, name, MEDIUM, self.now_ns + server.deadline_ns, owner=name)
        job.call = ReservedCall(server, room)
        self.slots.enter_reserved(job, job.call)
        return job


def test_all_frames_are_seen_and_go_by_their_deadlines_before_high():
    bench = Reserved()
    bench.enter("holder")
    bench.enter("high", HIGH)
    for deadline in (500, 300, 400, 200):
        bench.frame(f"d{deadline}", deadline=deadline)
    assert bench.run_all() == ["holder", "d200", "d300", "d400", "d500", "high"]


def test_frame_preempts_and_takes_the_slot_of_its_reservation_alone():
    bench = Reserved(2, can_preempt=True)
    first, second = bench.enter("first"), bench.enter("second")
    frame = bench.frame("frame", slot=1)
    assert (first.preemptions, second.preemptions) == (0, 1)
    bench.slots.release(first)
    assert bench.log[-1] == ("second", 1) and frame.slot is None
    bench.slots.suspend(second)
    assert frame.slot == 1 and second.slot == 0


def test_free_slot_is_not_given_to_a_frame_of_another_one():
    bench = Reserved(2)
    held = bench.frame("held", slot=1)
    waiting = bench.frame("waiting", slot=1, deadline=600)
    assert (held.slot, waiting.slot) == (1, None) and bench.slots.held_count == 1
    other = bench.enter("other")
    assert other.slot == 0
    bench.slots.release(held)
    assert waiting.slot == 1


def test_budget_is_counted_over_suspensions():
    bench = Reserved(can_preempt=True)
    server = make_server(duration=10)
    frame = bench.frame("frame", server=server)
    bench.now_ns = 4
    bench.frame("sooner", deadline=100)
    assert frame.preemptions == 1
    bench.slots.suspend(frame)
    bench.now_ns = 20
    bench.slots.release(bench.jobs["sooner"])
    bench.now_ns = 27
    bench.slots.release(frame)
    assert frame.frame.label is Label.OVERRAN and server.debt_ns == 1


def test_early_frame_is_best_effort_or_rejected():
    bench = Reserved()
    server = make_server()
    bench.frame("first", server=server)
    early = bench.frame("early", server=server)
    assert early.rank == int(MEDIUM) and server.counts[Label.EARLY] == 1
    server.may_run_lower = False
    with pytest.raises(MissedDeadline, match="has reserved no time for it"):
        bench.frame("rejected", server=server)
    del bench.jobs["rejected"]
    assert bench.run_all() == ["first", "early"]


def test_report_has_the_label_and_the_time_that_the_frame_had_its_slot_for():
    bench = Reserved()
    server = make_server(duration=10)
    for took, label in ((10, ""), (25, "overran")):
        came_ns = bench.now_ns
        frame = bench.frame(f"took{took}", server=server)
        bench.now_ns += took
        bench.slots.release(frame)
        bench.now_ns += 7
        report = frame.call.report(bench.now_ns)
        assert (report.label, report.arrived_ns, report.ended_ns) == (label, came_ns, came_ns + took)
        assert report.answered_ns == came_ns + took + 7 and report.blocked_ns == report.missing_ns == 0
        bench.now_ns += 1000
    assert report.held_ns == 25 and not report.is_by_other
    paying = bench.frame("paying", server=server)
    assert paying.call.report(bench.now_ns).label == "overran" and not paying.frame.is_reserved


@pytest.mark.parametrize("is_planned", [False, True])
def test_overrun_is_reported_whether_or_not_others_have_waited(is_planned):
    bench = Reserved()
    frame = bench.frame("frame", duration=10)
    if is_planned:
        bench.enter("waits")
    bench.now_ns = 11
    bench.slots.release(frame)
    assert frame.call.report(bench.now_ns).label == "overran"


@pytest.mark.parametrize("owner", ["frame", "another"])
@pytest.mark.parametrize("is_still_there", [False, True])
def test_lost_frame_says_that_another_client_has_blocked_it(owner, is_still_there):
    bench = Reserved()
    bench.enter("long", owner=owner)
    frame = bench.frame("frame", deadline=100, room=50)
    bench.now_ns = 200
    if is_still_there:
        bench.enter("decides", LOW)
    else:
        bench.slots.release(bench.jobs["long"])
    assert ("frame", None) in bench.log, "it is started without a slot, to fail"
    report = frame.call.report(bench.now_ns)
    assert (report.label, report.is_by_other) == ("blocked", owner == "another")
    assert report.ended_ns == report.held_ns == 0, "it never had the slot"
    assert report.blocked_ns >= report.missing_ns > 0


def test_frame_behind_one_that_overran_is_blocked_by_its_client():
    bench = Reserved()
    first = bench.frame("first", deadline=90, duration=10)
    second = bench.frame("second", deadline=100, duration=10)
    bench.now_ns = 95
    bench.slots.release(first)
    assert second.slot == 0
    bench.now_ns = 104
    bench.slots.release(second)
    report = second.call.report(bench.now_ns)
    assert (report.label, report.is_by_other) == ("blocked", True)
    assert first.call.report(bench.now_ns).label == "overran"


def test_frame_that_waits_no_longer_than_admission_allows_has_no_label():
    bench = Reserved()
    bench.enter("short", owner="another")
    frame = bench.frame("frame", deadline=100, room=50)
    bench.now_ns = 40
    bench.slots.release(bench.jobs["short"])
    bench.now_ns = 50
    bench.slots.release(frame)
    assert frame.call.report(bench.now_ns).label == ""


def test_look_lets_a_frame_without_a_budget_be_preempted():
    bench = Reserved(can_preempt=True)
    long = bench.frame("long", deadline=100, duration=10)
    bench.frame("later", deadline=500)
    bench.now_ns = 11
    assert long.preemptions == 0
    bench.slots.look()
    assert long.preemptions == 1


def test_policy_without_a_class_for_frames_has_them_as_best_effort():
    bench = Reserved(policy=PlainPolicy())
    bench.enter("holder", HIGH)
    frame = bench.frame("frame")
    bench.enter("high", HIGH)
    assert frame.call.report(bench.now_ns) is None and bench.run_all() == ["holder", "high", "frame"]


def test_withdrawal_makes_waiting_frames_best_effort():
    bench = Reserved()
    bench.enter("holder")
    frames = [bench.frame(f"f{i}") for i in range(3)]
    bench.slots.withdraw_reserved()
    assert all(frame.rank == int(MEDIUM) and frame.frame.label is Label.WITHDRAWN for frame in frames)
    assert sorted(bench.run_all()) == ["f0", "f1", "f2", "holder"]


def test_frame_that_leaves_is_not_started():
    bench = Reserved()
    holder = bench.enter("holder")
    frame = bench.frame("frame")
    assert frame.rank == RESERVED
    bench.slots.leave(frame)
    bench.slots.release(holder)
    assert bench.log == [("holder", 0)] and bench.slots.waiting_count == 0


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_every_job_starts_once_for_each_suspension(seed):
    source = random.Random(seed)
    bench = Reserved(2, can_preempt=True)
    servers = [make_server(slot=i % 2, deadline=100 + 40 * i, period=200) for i in range(5)]
    suspended = dict.fromkeys(range(150), 0)
    left = set()
    for number in range(150):
        bench.now_ns += source.randrange(30)
        if source.random() < 0.6:
            bench.frame(number, server=source.choice(servers))
        else:
            bench.enter(number, source.choice((LOW, MEDIUM, HIGH)), owner=source.randrange(3))
        for name, job in list(bench.jobs.items()):
            if job.slot is not None and job.is_preempted:
                bench.slots.suspend(job)
                suspended[name] += 1
            elif job.slot is not None and source.random() < 0.4:
                bench.slots.release(job)
            elif job.slot is None and source.random() < 0.01 and not any(n == name for n, _ in bench.log):
                bench.slots.leave(job)
                left.add(name)
        held = [job.slot for job in bench.jobs.values() if job.slot is not None]
        assert len(held) == len(set(held)) == bench.slots.held_count
    bench.run_all()
    starts = [name for name, _ in bench.log]
    assert all(starts.count(name) == 1 + suspended[name] for name in range(150) if name not in left)
