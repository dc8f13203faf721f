"""Policies of others, to compare with on the same arrivals.

Owns FIFO, EDF, EDF with early abort (with and without preemption), a priority FIFO with timeout as serving systems have it, and a
planner that refuses before running. Each chooses a slot on arrival by the least backlog and keeps a queue per slot, as those
systems do.

Source: the rules of each as documented; none of their code. ``EDF`` is optimal for one preemptive slot that is not overloaded
(Liu and Layland 1973, Dertouzos 1974); Triton's dynamic batcher rejects on queue timeout; Clockwork plans executions one after
another on predicted times and refuses what cannot make it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Literal

from aionn.errors import InvalidArgument
from aionn.hal import Priority
from aionn.scheduler.job import NEVER_NS, Abort, Action, DeviceSlot, Job, Preempt, Reason, Start
from aionn.scheduler.planning_policy import PlanPolicy
from aionn.scheduler.ready_queue import Policy

__all__ = ["POLICIES", "BacklogPolicy", "PolicyName", "policy_named"]

_Key = tuple[int, int, int]


class SlotQueues:
    """A queue per slot, ordered by a policy's key; the slot is chosen on arrival and kept."""

    def __init__(self, policy: BacklogPolicy, slots: Sequence[DeviceSlot]) -> None:
        self._policy = policy
        self._slots = slots
        self.ordered: list[list[tuple[_Key, Job]]] = [[] for _ in slots]
        self._slot_of: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self.ordered)

    def add(self, job: Job, now_ns: int) -> Reason | None:
        """Puts a job into the queue of the slot that would end it first."""
        index = self._slot_of.get(job.number)
        if index is None:
            index, ends_ns = self._least_backlog(job, now_ns)
            if self._policy.plans and ends_ns > job.deadline_ns:
                return Reason.TOO_LATE
            self._slot_of[job.number] = index
        insort(self.ordered[index], (self._policy.key(job), job))
        return None

    def _least_backlog(self, job: Job, now_ns: int) -> tuple[int, int]:
        best, best_ns = -1, NEVER_NS + 1
        for slot in self._slots:
            duration_ns = job.durations_ns[slot.device]
            if duration_ns == NEVER_NS:
                continue
            ends_ns = max(now_ns, slot.ends_ns if slot.job is not None else 0) + duration_ns
            ends_ns += sum(w.durations_ns[slot.device] for _, w in self.ordered[slot.index])
            if ends_ns < best_ns:
                best, best_ns = slot.index, ends_ns
        return best, best_ns

    def remove(self, job: Job) -> None:
        """Takes a job out of its queue."""
        queue = self.ordered[self._slot_of[job.number]]
        del queue[bisect_left(queue, (self._policy.key(job), job))]

    def next_wake_ns(self) -> int:
        """Never: these policies decide when something happens."""
        return NEVER_NS


class BacklogPolicy:
    """A queue per slot under a rule.

    Args:
        name: Its name.
        by_priority: Whether HIGH goes before MEDIUM before LOW.
        high_first: Whether HIGH goes before all others, and these among themselves whatever their class.
        by_deadline: Whether the earliest deadline goes first; else the first to come.
        aborts: ``never``; ``timeout``: what waited past its deadline; ``early``: what cannot end in time any more.
        preempts: Whether an earlier one in the order preempts the job that runs.
        plans: Whether what would end too late behind those that wait is refused on arrival.
    """

    def __init__(
        self,
        name: str,
        *,
        by_priority: bool = False,
        high_first: bool = False,
        by_deadline: bool = False,
        aborts: str = "never",
        preempts: bool = False,
        plans: bool = False,
    ) -> None:
        self.name = name
        self.plans = plans
        self._by_priority = by_priority
        self._high_first = high_first
        self._by_deadline = by_deadline
        self._aborts = aborts
        self._preempts = preempts

    def key(self, job: Job) -> _Key:
        """The order: the least goes first."""
        rank = -job.priority if self._by_priority else 0
        if self._high_first:
            rank = -int(job.priority == Priority.HIGH)
        return (
            rank,
            job.urgent_ns if self._by_deadline else 0,
            job.number,
        )

    def make_queue(self, slots: Sequence[DeviceSlot]) -> SlotQueues:
        """An empty queue for each slot."""
        return SlotQueues(self, slots)

    def decide(self, now_ns: int, queue: SlotQueues, slots: Sequence[DeviceSlot]) -> list[Action]:
        """Starts the first of each free slot's queue; aborts and preempts according to the rule."""
        actions: list[Action] = []
        for slot in slots:
            waiting = queue.ordered[slot.index]
            if not waiting or not slot.is_up:
                continue
            if slot.job is None:
                for _, job in waiting:
                    reason = self._gives_up(job, slot, now_ns)
                    if reason is None:
                        actions.append(Start(job, slot))
                        break
                    actions.append(Abort(job, reason))
            elif self._preempts and slot.can_preempt and not slot.is_stopping:
                key, job = waiting[0]
                if key < self.key(slot.job) and self._gives_up(job, slot, now_ns) is None:
                    actions.append(Preempt(slot, job))
        return actions

    def _gives_up(self, job: Job, slot: DeviceSlot, now_ns: int) -> Reason | None:
        if self._aborts == "timeout" and now_ns > job.deadline_ns:
            return Reason.EXPIRED
        if self._aborts == "early" and now_ns + job.durations_ns[slot.device] > job.deadline_ns:
            return Reason.TOO_LATE
        return None


PolicyName = Literal[
    "plan",
    "fifo",
    "edf",
    "edf-abort-whole",
    "edf-abort",
    "edf-abort-priority",
    "edf-abort-high",
    "triton-like",
    "clockwork-like",
]
"""The names of ``POLICIES``, for type checkers, and for the completion of the shell."""

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        PlanPolicy(),
        BacklogPolicy("fifo"),
        BacklogPolicy("edf", by_deadline=True, preempts=True),
        BacklogPolicy("edf-abort-whole", by_deadline=True, aborts="early"),
        BacklogPolicy("edf-abort", by_deadline=True, aborts="early", preempts=True),
        BacklogPolicy(
            "edf-abort-priority", by_priority=True, by_deadline=True, aborts="early", preempts=True
        ),
        BacklogPolicy("edf-abort-high", high_first=True, by_deadline=True, aborts="early", preempts=True),
        BacklogPolicy("triton-like", by_priority=True, aborts="timeout"),
        BacklogPolicy("clockwork-like", by_deadline=True, aborts="early", plans=True),
    )
}
"""By name; ours is ``plan``."""


def policy_named(name: str) -> Policy:
    """A policy.

    Raises:
        InvalidArgument: No entry has that name.
    """
    try:
        return POLICIES[name]
    except KeyError:
        raise InvalidArgument(f"policy: expected one of {', '.join(POLICIES)}; got {name!r}") from None
