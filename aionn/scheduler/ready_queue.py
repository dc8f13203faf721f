"""The interface between shells and policies: the queue of the jobs that wait, and the function that decides about them.

Owns what every policy has in common, so that a shell or the simulator can run any of them. ``planning_policy`` plans ahead,
``plain_policy`` keeps an order.

Invariants:
1. Neither a queue nor a policy reads a clock or waits; the same calls give the same decisions.
2. A policy has no state of its own; its queues have all of it. So one policy serves any number of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from aionn.scheduler.job import Action, DeviceSlot, Job, Reason

__all__ = ["Policy", "QueueStatistics", "ReadyQueue"]


class QueueStatistics(msgspec.Struct, frozen=True):
    """Counts of passed and of waiting jobs.

    Attributes:
        waiting: Number of jobs that wait now.
        planned: Number of those that are planned on a slot.
        entered: Number of jobs that came.
        rejected: Number of those that were rejected on arrival.
        started: Starts, after a preemption counted again.
        moved: Number of jobs that changed their slot for another's sake.
        displaced: Number of jobs that lost their plan to another.
        retried: Number of jobs that were planned after standby.
        aged: Number of jobs that went ahead because of their age.
        aborted: Number of waiting jobs that were rejected, by reason.
    """

    waiting: int
    planned: int
    entered: int
    rejected: int
    started: int
    moved: int
    displaced: int
    retried: int
    aged: int
    aborted: dict[str, int]


class ReadyQueue(Protocol):
    """The waiting jobs, in the policy's form."""

    def add(self, job: Job, now_ns: int) -> Reason | None:
        """Admits a job; returns the reason for a rejection. A job that has run is never rejected."""
        ...

    def remove(self, job: Job) -> None:
        """Removes a waiting job, which starts or leaves."""
        ...

    def next_wake_ns(self) -> int:
        """When something may have to be decided though nothing happens; ``NEVER_NS`` for never."""
        ...

    def __len__(self) -> int: ...


class Policy(Protocol):
    """A function of the time, the waiting jobs and the slots."""

    @property
    def name(self) -> str: ...

    def make_queue(self, slots: Sequence[DeviceSlot]) -> ReadyQueue:
        """An empty queue for slots."""
        ...

    def decide(self, now_ns: int, queue: Any, slots: Sequence[DeviceSlot]) -> list[Action]:
        """The actions to take now, in the order in which they are to be applied. The caller removes started and aborted jobs."""
        ...
