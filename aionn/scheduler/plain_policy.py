"""The plain policy: priority, then earliest deadline, then arrival, and no plan.

Owns that order. Simulated devices use it: the planning policy of the application is judged on them, so they must not plan
themselves, and a device whose driver is simple behaves like this.

Invariants:
1. A free slot runs the first job in the order, whatever its duration; no job is rejected before its deadline.
2. A job preempts only jobs of a lower priority: the lowest first, and of those the latest. Each waiting job preempts at most one.

Source: what drivers of the NN HAL do with priority and deadline; earliest deadline first within a class (Jackson 1955).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import islice

from aionn.hal import Priority
from aionn.scheduler.job import NEVER_NS, Abort, Action, DeviceSlot, Job, JobState, Preempt, Reason, Start
from aionn.scheduler.slot_plan import Key

__all__ = ["PlainPolicy", "PlainQueue"]


class PlainQueue:
    """Waiting jobs in order."""

    def __init__(self) -> None:
        self._ordered: list[tuple[Key, Job]] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Job]:
        return (job for _, job in self._ordered)

    def add(self, job: Job, now_ns: int) -> Reason | None:
        """See ``ReadyQueue``."""
        if not job.has_run and job.deadline_ns <= now_ns:
            return Reason.EXPIRED
        insort(self._ordered, (job.key, job))
        return None

    def remove(self, job: Job) -> None:
        """See ``ReadyQueue``."""
        position = bisect_left(self._ordered, (job.key,))
        assert self._ordered[position][1] is job, "the queue has each waiting job once"
        del self._ordered[position]

    def next_wake_ns(self) -> int:
        """Never: the first in the order changes only when a job comes or ends."""
        return NEVER_NS

    def expired(self, now_ns: int) -> list[Job]:
        """The jobs whose deadline has come: the first ones of each class."""
        found: list[Job] = []
        for priority in sorted(Priority, reverse=True):
            for position in range(bisect_left(self._ordered, ((-priority,),)), len(self._ordered)):
                job = self._ordered[position][1]
                if job.rank != priority or job.deadline_ns > now_ns:
                    break
                found.append(job)
        return found


class PlainPolicy:
    """See the module."""

    name = "plain"

    def make_queue(self, slots: Sequence[DeviceSlot]) -> PlainQueue:
        """See ``Policy``."""
        return PlainQueue()

    def decide(self, now_ns: int, queue: PlainQueue, slots: Sequence[DeviceSlot]) -> list[Action]:
        """See ``Policy``."""
        expired = queue.expired(now_ns)
        actions: list[Action] = [Abort(job, Reason.EXPIRED) for job in expired]
        # No more jobs than slots can start or preempt.
        first = list(islice((job for job in queue if job.deadline_ns > now_ns), len(slots)))
        free = [slot for slot in slots if slot.job is None and slot.is_up]
        actions += [Start(job, slot) for job, slot in zip(first, free, strict=False)]
        actions += _preemptions(first[len(free) :], slots)
        return actions


def _preemptions(waiting: Sequence[Job], slots: Sequence[DeviceSlot]) -> list[Preempt]:
    """The slots that stop for the first of the waiting jobs."""
    running = [
        (slot.job.rank, -slot.job.number, slot)
        for slot in slots
        if slot.job is not None and slot.can_preempt and slot.job.state is JobState.RUNNING
    ]
    victims = sorted((victim for victim in running if not victim[2].is_stopping), key=lambda v: v[:2])
    # Each slot that stops already does so for one of the first jobs: only the rest may stop others.
    rest = waiting[len(running) - len(victims) :]
    actions: list[Preempt] = []
    for job, (rank, _, slot) in zip(rest, victims, strict=False):
        # The waiting jobs have falling ranks and the victims rising ones: no later pair fits where this one does not.
        if rank >= job.rank:
            break
        actions.append(Preempt(slot, job))
    return actions
