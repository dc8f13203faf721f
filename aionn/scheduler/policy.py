"""Who runs next, on which lane, and who is told early that it cannot be done: a function of the time, what waits, and the lanes.

Owns the decision. Refuses to own its execution: the shells (the event loop's dispatcher, the simulator) apply the actions, each
in its own time. Nothing here reads a clock or waits, so the same code decides in real and in virtual time.

Invariants:
1. Expired work is given up before anything is ordered; work that runs past its deadline is aborted.
2. HIGH interrupts lower classes at the next boundary; MEDIUM and equals interrupt only where they would be late otherwise.
3. A free lane runs the first of its plan, or helps out another lane where that ends a work sooner.
4. A long work is not begun while shorter ones of its class are being lost for want of time.

Source: earliest deadline first within a class is optimal where all can be met; priorities after the NN HAL 1.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from aionn.scheduler.queue import HIGH, WaitingRoom
from aionn.scheduler.work import NEVER_NS, Abort, Action, Lane, Preempt, Reason, Start, Work, WorkState

__all__ = ["PlanPolicy", "decide"]

HELP_MAX = 8
"""How many works of a lane are looked at by one that is free."""

HOLD_WINDOW = 8
"""Over how many of its own durations a long work looks back at what was lost."""

LONG_RATIO = 2
"""From how many times the duration of what was lost a work counts as long."""


def decide(now_ns: int, room: WaitingRoom, lanes: Sequence[Lane]) -> list[Action]:
    """What to do now.

    Args:
        now_ns: The time.
        room: What waits.
        lanes: All lanes; those that are down get nothing.

    Returns:
        Actions in the order in which they are to be applied. The caller takes started and aborted works out of the room.
    """
    actions: list[Action] = []
    if not room.lane_of:
        for lane in lanes:
            running = lane.work
            if running is not None and running.deadline_ns <= now_ns and running.state is WorkState.RUNNING:
                actions.append(Abort(running, Reason.OVERRAN))
        return actions
    gone: set[int] = set()
    for work, reason in room.too_late(now_ns):
        actions.append(Abort(work, reason))
        gone.add(work.number)
    room.age(now_ns)
    if room.standby:
        room.retry(now_ns)
    idle: list[Lane] = []
    plans = room.plans
    for lane in lanes:
        running = lane.work
        if running is None:
            if lane.is_up and not (plans[lane.index].works and _start(now_ns, room, lane, gone, actions)):
                idle.append(lane)
        elif running.state is WorkState.RUNNING:
            if running.deadline_ns <= now_ns:
                actions.append(Abort(running, Reason.OVERRAN))
            elif plans[lane.index].works and not lane.is_stopping and lane.can_preempt:
                _preempt(now_ns, room, lane, running, gone, actions)
    if idle and len(gone) < len(room.lane_of):
        for lane in idle:
            helped = _help(now_ns, room, lane, gone)
            if helped is not None:
                room.started(
                    helped, lane, now_ns, "started on a free lane that ends it sooner than its own, lane"
                )
                gone.add(helped.number)
                actions.append(Start(helped, lane))
    return actions


def _start(now_ns: int, room: WaitingRoom, lane: Lane, gone: set[int], actions: list[Action]) -> bool:
    for work in room.plans[lane.index].works[:]:
        if work.number in gone or (room.drops and _is_held(now_ns, room, work, lane)):
            continue
        if now_ns + work.durations_ns[lane.device] > work.deadline_ns:
            # Those before it took longer than expected: it leaves this plan for another, or stands by.
            if room.is_planned_on(work, lane):
                room.replan(work, now_ns)
            continue
        if not room.is_planned_on(work, lane):
            continue
        why = "the first in its plan starts, on lane"
        if any(keys[0][0] < -work.rank for plan in room.plans if (keys := plan.keys)):
            # Work of a higher class waits for another lane: it goes first where it ends sooner here.
            higher = _help(now_ns, room, lane, gone, above=work.rank)
            if higher is not None:
                work, why = higher, "started on a free lane that ends it sooner than its own, lane"
        room.started(work, lane, now_ns, why)
        gone.add(work.number)
        actions.append(Start(work, lane))
        return True
    return False


def _preempt(
    now_ns: int, room: WaitingRoom, lane: Lane, running: Work, gone: set[int], actions: list[Action]
) -> None:
    plan = room.plans[lane.index]
    first = next((work for work in plan.works if work.number not in gone), None)
    if first is None or not first.key < running.key:
        return
    if not first.rank == HIGH > running.rank:
        duration_ns = first.durations_ns[lane.device]
        is_late_behind = max(now_ns, lane.ends_ns) + duration_ns > first.deadline_ns
        if not is_late_behind or now_ns + duration_ns > first.deadline_ns:
            return
    room.note(running, now_ns, "interrupted for work", first.number)
    actions.append(Preempt(lane, first))


def _is_held(now_ns: int, room: WaitingRoom, work: Work, lane: Lane) -> bool:
    """Whether a long work should not be begun: shorter ones that this lane could have run were lost, half its time or more."""
    if work.has_run or work.deadline_ns == NEVER_NS:
        return False
    duration_ns = work.durations_ns[lane.device]
    since_ns = now_ns - HOLD_WINDOW * duration_ns
    lost_ns = 0
    for at_ns, rank, durations_ns in room.drops:
        if at_ns >= since_ns and rank >= work.rank and durations_ns[lane.device] * LONG_RATIO <= duration_ns:
            lost_ns += durations_ns[lane.device]
    return lost_ns * LONG_RATIO >= duration_ns


def _help(now_ns: int, room: WaitingRoom, lane: Lane, gone: set[int], above: int = -1) -> Work | None:
    """A work of a class above one, planned on another lane, that this free lane ends sooner; of several the one that costs
    least more than there."""
    best: Work | None = None
    least = 0.0
    for other in room.lanes:
        plan = room.plans[other.index]
        if other is lane or not plan.works:
            continue
        busy = other.work is not None or not other.is_up
        turns_ns = max(now_ns, other.ends_ns) if other.work is not None else now_ns
        for position in range(0 if busy else 1, min(HELP_MAX, len(plan))):
            work = plan.works[position]
            if work.rank <= above:
                break
            duration_ns = work.durations_ns[lane.device]
            if duration_ns == NEVER_NS or work.number in gone or now_ns + duration_ns > work.deadline_ns:
                continue
            ends_ns = turns_ns + plan.before_ns(position + 1)
            if other.is_up and now_ns + duration_ns > ends_ns:
                continue
            ratio = duration_ns / plan.duration_ns(position)
            if best is None or ratio < least:
                best, least = work, ratio
    return best


class PlanPolicy:
    """``decide`` with a room, as shells take it.

    Args:
        waiting_max: Most works that may wait; None for the room's own bound.
        on_full: ``refuse`` or ``displace``, as for ``WaitingRoom``.
    """

    name = "plan"

    def __init__(self, *, waiting_max: int | None = None, on_full: str = "refuse") -> None:
        self._waiting_max = waiting_max
        self._on_full = on_full

    def make_queue(self, lanes: Sequence[Lane]) -> WaitingRoom:
        """An empty waiting room for lanes."""
        if self._waiting_max is None:
            return WaitingRoom(lanes, on_full=self._on_full)
        return WaitingRoom(lanes, waiting_max=self._waiting_max, on_full=self._on_full)

    decide = staticmethod(decide)
