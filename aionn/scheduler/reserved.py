"""The reserved frames that wait for their slots, and the decision about them: earliest deadline first on each slot.

Owns the class of reserved jobs. It decides before best effort does, and leaves it the slots for which no reserved frame waits. Here
an earlier deadline preempts at the next boundary even where both jobs would end in time: to wait until one would be late spends the
slack that frames need which come later, and admission has counted with it.

Invariants:
1. A frame waits for the slot of its reservation alone.
2. No frame is displaced, and nothing overtakes it but frames of its slot with earlier deadlines.
3. A frame is aborted only where it cannot end by its own deadline any more.
4. A frame that has used its budget leaves the class at the next decision, whether it waits or runs.

Source: earliest deadline first is optimal on one slot (Dertouzos 1974); ``aionn.scheduler.admission`` counts one piece without a
boundary as blocking.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from aionn.scheduler.bandwidth import Label
from aionn.scheduler.job import (
    NEVER_NS,
    RESERVED,
    Abort,
    Action,
    DeviceSlot,
    Job,
    JobState,
    Preempt,
    Reason,
    Start,
)
from aionn.scheduler.slot_plan import Key

__all__ = ["ReservedQueue"]


class ReservedQueue:
    """The waiting reserved frames of some slots.

    Args:
        slots: All slots of all devices; ``backlog_ns`` of each is the device time that its waiting frames need.
    """

    def __init__(self, slots: Sequence[DeviceSlot]) -> None:
        self._slots = slots
        self._waiting: list[list[tuple[Key, Job]]] = [[] for _ in slots]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def slot_of(self, job: Job) -> DeviceSlot:
        """The slot that a reserved job runs on."""
        assert job.frame is not None, "a reserved job has a frame"
        return self._slots[job.frame.server.slot]

    def add(self, job: Job, now_ns: int) -> Reason | None:
        """Admits a frame; returns the reason for a rejection. One that comes back from its slot is never rejected."""
        slot = self.slot_of(job)
        if not job.has_run:
            if job.deadline_ns <= now_ns:
                return Reason.EXPIRED
            if now_ns + _needed_ns(job, slot) > job.deadline_ns:
                return Reason.IMPOSSIBLE
        insort(self._waiting[slot.index], (job.key, job))
        self._count += 1
        slot.backlog_ns += job.durations_ns[slot.device]
        return None

    def remove(self, job: Job) -> None:
        """Removes a waiting frame, to its slot or permanently. One that does not wait is ignored."""
        slot = self.slot_of(job)
        waiting = self._waiting[slot.index]
        position = bisect_left(waiting, (job.key,))
        if position < len(waiting) and waiting[position][1] is job:
            del waiting[position]
            self._count -= 1
            slot.backlog_ns -= job.durations_ns[slot.device]

    def ahead_ns(self, job: Job) -> int:
        """The budgets of the frames that wait for the slot of a frame and go before it, whether it waits or not."""
        waiting = self._waiting[self.slot_of(job).index]
        ahead = waiting[: bisect_left(waiting, (job.key,))]
        return sum(other.frame.left_ns for _, other in ahead if other.frame is not None)

    def withdraw(self, slot: DeviceSlot) -> list[Job]:
        """Removes all frames that wait for a slot, and makes them best effort; returns them in order."""
        found = [job for _, job in self._waiting[slot.index]]
        self._waiting[slot.index].clear()
        self._count -= len(found)
        slot.backlog_ns = 0
        for job in found:
            assert job.frame is not None, "a reserved job has a frame"
            job.frame.leave_class(Label.WITHDRAWN)
            job.leave_reserved()
        return found

    def next_wake_ns(self) -> int:
        """When something may have to be decided though nothing happens: a frame becomes late, or one that runs has used its
        budget."""
        wake_ns = NEVER_NS
        for slot, waiting in zip(self._slots, self._waiting, strict=True):
            for _, job in waiting:
                wake_ns = min(wake_ns, job.deadline_ns - _needed_ns(job, slot) + 1)
            running = slot.job
            if running is not None and running.rank == RESERVED and running.frame is not None:
                exhausted_ns = running.frame.exhausted_ns()
                if exhausted_ns is not None:
                    wake_ns = min(wake_ns, exhausted_ns + 1)
        return wake_ns

    def decide(self, now_ns: int, slots: Sequence[DeviceSlot], actions: list[Action]) -> list[DeviceSlot]:
        """Appends the actions for reserved frames; returns the slots about which best effort decides.

        The caller of the policy removes started and aborted jobs.
        """
        rest = []
        for slot in slots:
            running = slot.job
            frame = running.frame if running is not None and running.rank == RESERVED else None
            if running is not None and frame is not None and frame.exhaust(now_ns):
                frame.is_reserved = False
                running.leave_reserved()
            first = self._first(slot, now_ns, actions) if self._waiting[slot.index] else None
            if first is None or not slot.is_up:
                rest.append(slot)
            elif running is None:
                actions.append(Start(first, slot))
            elif running.state is JobState.RUNNING:
                if running.deadline_ns <= now_ns:
                    actions.append(Abort(running, Reason.OVERRAN))
                elif first.key < running.key and slot.has_boundaries and not slot.is_stopping:
                    actions.append(Preempt(slot, first))
        return rest

    def _first(self, slot: DeviceSlot, now_ns: int, actions: list[Action]) -> Job | None:
        """The first frame that can end in time; aborts those that cannot."""
        first = None
        for _, job in self._waiting[slot.index]:
            if now_ns + _needed_ns(job, slot) > job.deadline_ns:
                reason = Reason.EXPIRED if job.deadline_ns <= now_ns else Reason.TOO_LATE
                actions.append(Abort(job, reason))
            elif first is None:
                first = job
        return first


def _needed_ns(job: Job, slot: DeviceSlot) -> int:
    """The device time without which a frame is certain to be late, or its budget, where it is expected to need more."""
    assert job.frame is not None, "a reserved job has a frame"
    durations_ns = job.durations_ns if job.least_ns is None else job.least_ns
    return min(durations_ns[slot.device], job.frame.left_ns)
