"""The next jobs of each slot, and the early rejections: a function of the time, the waiting jobs, and the slots.

Owns the decision. Refuses to own its execution: the shells (the event loop's dispatcher, the simulator) apply the actions, each
in its own time. Nothing here reads a clock or waits, so the same code decides in real and in virtual time.

Invariants:
1. Expired jobs are rejected before anything is ordered; a job that runs past its deadline is aborted.
2. HIGH preempts lower classes at the next boundary; MEDIUM and equals preempt only where they would be late otherwise.
   Reserved frames go before all of them (``aionn.scheduler.reserved``), on their slots; the rest is for best effort.
3. A free slot runs the first job of its plan, or one of another slot that it would end sooner; unless it is kept from LOW jobs
   (``PlannedQueue.low_left``), and the job is one of these.

Source: earliest deadline first within a class is optimal if all deadlines are feasible; priorities after the NN HAL 1.3.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from aionn.scheduler.job import NEVER_NS, Abort, Action, DeviceSlot, Job, JobState, Preempt, Reason, Start
from aionn.scheduler.planned_queue import HIGH, LOW, PlannedQueue

__all__ = ["PlanPolicy", "decide", "start_immediately"]

HELP_MAX = 8
"""Number of jobs of a slot that a free slot examines."""


def decide(now_ns: int, queue: PlannedQueue, slots: Sequence[DeviceSlot]) -> list[Action]:
    """The actions to take now.

    Args:
        now_ns: The time.
        queue: The jobs that wait.
        slots: All slots; those that are down get nothing.

    Returns:
        Actions in the order in which they are to be applied. The caller takes started and aborted jobs out of the queue.
    """
    actions: list[Action] = []
    reserved = queue.reserved
    if reserved is not None:
        slots = reserved.decide(now_ns, slots, actions)
        for action in actions:
            if type(action) is Start:
                queue.started(
                    action.job, action.slot, now_ns, "the reserved frame with the earliest deadline, on slot"
                )
    if not queue.slot_of:
        for slot in slots:
            running = slot.job
            if running is not None and running.deadline_ns <= now_ns and running.state is JobState.RUNNING:
                actions.append(Abort(running, Reason.OVERRAN))
        return actions
    if reserved is None and len(queue.slot_of) == 1:
        sole = _start_sole(now_ns, queue, slots)
        if sole is not None:
            return [sole]
    # The order matters: rejections first, since a job that is certain to be late must take no slot; then ageing, which changes the
    # order; then standby, since the rejected ones have left room; starts before preemptions, since a free slot makes one
    # unnecessary; and help for other slots last, since a slot's own plan goes first.
    gone: set[int] = set()
    for job, reason in queue.too_late(now_ns):
        actions.append(Abort(job, reason))
        gone.add(job.number)
    queue.age(now_ns)
    if queue.standby:
        queue.retry(now_ns)
    idle: list[DeviceSlot] = []
    busy: list[DeviceSlot] = []
    plans = queue.plans
    for slot in slots:
        if slot.job is not None:
            busy.append(slot)
        elif slot.is_up and not (plans[slot.index].jobs and _start(now_ns, queue, slot, gone, actions)):
            idle.append(slot)
    # After the starts: what could not start in time on its slot may be planned anew on one that is busy.
    for slot in busy:
        running = slot.job
        if running is None or running.state is not JobState.RUNNING:
            continue
        if running.deadline_ns <= now_ns:
            actions.append(Abort(running, Reason.OVERRAN))
        elif plans[slot.index].jobs and not slot.is_stopping and slot.can_preempt:
            _preempt(now_ns, queue, slot, running, gone, actions)
    if idle and len(gone) < len(queue.slot_of):
        for slot in idle:
            helped = _help(now_ns, queue, slot, gone)
            if helped is not None:
                queue.started(
                    helped, slot, now_ns, "started on a free slot that ends it sooner than its own, slot"
                )
                queue.low_left -= helped.rank == LOW
                gone.add(helped.number)
                actions.append(Start(helped, slot))
    return actions


def _start_sole(now_ns: int, queue: PlannedQueue, slots: Sequence[DeviceSlot]) -> Start | None:
    """The usual case, in a third of the time: a single job waits, and its slot is free. None where there is more to decide."""
    if queue.is_due(now_ns):
        return None
    for index in queue.slot_of.values():
        slot = slots[index]
        if index < 0 or slot.job is not None or not slot.is_up:
            return None
        job = queue.plans[index].jobs[0]
        if now_ns + job.durations_ns[slot.device] > job.deadline_ns:
            return None
        if queue.low_left <= 0 and job.rank == LOW:
            return None
    for other in slots:
        running = other.job
        if running is not None and running.deadline_ns <= now_ns:
            return None
    queue.started(job, slot, now_ns, "the first in its plan starts, on slot")
    return Start(job, slot)


def start_immediately(
    now_ns: int, queue: PlannedQueue, slots: Sequence[DeviceSlot], job: Job
) -> Start | None:
    """The result of adding a job to the queue and deciding, if no job waits and a slot is free, in a third of the time.

    For slots of one device. None, and nothing has happened, where there is more to decide.
    """
    if queue.slot_of or queue.is_due(now_ns):
        return None
    if job.frame is not None and job.frame.is_rejected:
        return None
    if queue.reserved is not None:
        if len(queue.reserved):
            return None
        if job.rank > HIGH:
            slot = queue.reserved.slot_of(job)
            if (
                slot.job is not None
                or not slot.is_up
                or now_ns + job.durations_ns[slot.device] > job.deadline_ns
            ):
                return None
            queue.pass_through(job, slot, now_ns)
            return Start(job, slot)
    elif job.rank > HIGH:
        return None
    free: DeviceSlot | None = None
    for slot in slots:
        if slot.job is None:
            if free is None and slot.is_up:
                free = slot
        elif slot.job.deadline_ns <= now_ns:
            return None
    if free is None or now_ns + job.durations_ns[free.device] > job.deadline_ns:
        return None
    queue.pass_through(job, free, now_ns)
    return Start(job, free)


def _start(now_ns: int, queue: PlannedQueue, slot: DeviceSlot, gone: set[int], actions: list[Action]) -> bool:
    # The first of the plan is not always the one that starts: those before it may have taken longer than expected. To start it all
    # the same would use device time for a job that is expected to end late.
    for job in queue.plans[slot.index].jobs[:]:
        if job.number in gone or (queue.low_left <= 0 and job.rank == LOW):
            continue
        if now_ns + job.durations_ns[slot.device] > job.deadline_ns:
            # Those before it took longer than expected: it leaves this plan for another, or goes to standby.
            if queue.is_planned_on(job, slot):
                queue.replan(job, now_ns)
            continue
        if not queue.is_planned_on(job, slot):
            continue
        why = "the first in its plan starts, on slot"
        if job.rank < HIGH:
            # A plan is made for one slot: without a look at the plans of other slots, LOW could start here while HIGH waits there.
            other = _more_urgent(now_ns, queue, slot, gone, job)
            if other is not None:
                job, why = other, "started on a free slot that ends it sooner than its own, slot"
        queue.started(job, slot, now_ns, why)
        queue.low_left -= job.rank == LOW
        gone.add(job.number)
        actions.append(Start(job, slot))
        return True
    return False


def _preempt(
    now_ns: int, queue: PlannedQueue, slot: DeviceSlot, running: Job, gone: set[int], actions: list[Action]
) -> None:
    plan = queue.plans[slot.index]
    first = next((job for job in plan.jobs if job.number not in gone), None)
    # Only jobs in the plan of this slot count: others were planned elsewhere because they end sooner there, or preempt no job.
    if first is None or not first.key < running.key:
        return
    if not first.rank == HIGH > running.rank:
        # Any of those that go before what runs may be the one that cannot wait for it, not the first alone.
        ahead_count = bisect_left(plan.keys, running.key)
        if not plan.is_late_between(ahead_count, now_ns, max(now_ns, slot.ends_ns)):
            return
    queue.note(running, now_ns, "preempted for job", first.number)
    actions.append(Preempt(slot, first))


def _more_urgent(now_ns: int, queue: PlannedQueue, slot: DeviceSlot, gone: set[int], than: Job) -> Job | None:
    """A HIGH or overdue job that waits for another slot though this free one ends it sooner; it goes before a slot's own."""
    limit_ns = now_ns - queue.age_ns
    best: Job | None = None
    for other in queue.slots:
        keys = queue.plans[other.index].keys
        if not keys or other is slot or not (keys[0] < than.key):
            continue
        if keys[0][0] != -HIGH and keys[0][1] >= limit_ns:
            continue
        for job in _candidates(now_ns, queue, slot, other, gone):
            if not job.key < than.key or (job.rank < HIGH and job.urgent_ns >= limit_ns):
                break
            if best is None or job.key < best.key:
                best = job
            break
    return best


def _help(now_ns: int, queue: PlannedQueue, slot: DeviceSlot, gone: set[int]) -> Job | None:
    """A job planned on another slot that this free one would end sooner; of several the one with the least additional cost."""
    best: Job | None = None
    least = 0.0
    for other in queue.slots:
        if other is slot or not queue.plans[other.index].jobs:
            continue
        for job in _candidates(now_ns, queue, slot, other, gone):
            ratio = job.durations_ns[slot.device] / job.durations_ns[other.device]
            if best is None or ratio < least:
                best, least = job, ratio
    return best


def _candidates(
    now_ns: int, queue: PlannedQueue, slot: DeviceSlot, other: DeviceSlot, gone: set[int]
) -> Iterator[Job]:
    """Jobs of another slot's plan that a free slot ends in time and sooner, in their order; the first few alone are looked at."""
    plan = queue.plans[other.index]
    is_busy = other.job is not None or not other.is_up or other.backlog_ns > 0
    turns_ns = (max(now_ns, other.ends_ns) if other.job is not None else now_ns) + other.backlog_ns
    for position in range(0 if is_busy else 1, min(HELP_MAX, len(plan))):
        job = plan.jobs[position]
        ends_ns = now_ns + job.durations_ns[slot.device]
        if job.durations_ns[slot.device] == NEVER_NS or job.number in gone or ends_ns > job.deadline_ns:
            continue
        if queue.low_left <= 0 and job.rank == LOW:
            continue
        if not other.is_up or ends_ns <= turns_ns + plan.before_ns(position + 1):
            yield job


class PlanPolicy:
    """``decide`` with its queue, as shells take it.

    Args:
        waiting_max: Most jobs that may wait; None for the queue's own bound.
        on_full: ``refuse`` or ``displace``, as for ``PlannedQueue``.
    """

    name = "plan"

    def __init__(self, *, waiting_max: int | None = None, on_full: str = "refuse") -> None:
        self._waiting_max = waiting_max
        self._on_full = on_full

    def make_queue(self, slots: Sequence[DeviceSlot]) -> PlannedQueue:
        """An empty ready queue for slots."""
        if self._waiting_max is None:
            return PlannedQueue(slots, on_full=self._on_full)
        return PlannedQueue(slots, waiting_max=self._waiting_max, on_full=self._on_full)

    decide = staticmethod(decide)
