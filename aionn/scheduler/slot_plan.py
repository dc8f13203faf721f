"""The plan of one slot: which jobs it will run in which order, and how much later each may become.

Owns the sums that make a query cheap: when would a job end that is placed here, and would it make another one late? Times are
relative to the moment at which the slot turns to the first of the plan, so that nothing is rewritten when that moment moves.

Invariants:
1. Jobs are in the order of their keys.
2. ``slack_ns(i)`` is the latest moment at which the slot may turn to the plan's first job so that job i still ends in time.
3. A plan holds at most ``PLAN_MAX`` jobs, so every question costs a bounded time.

Source: earliest deadline first is optimal on one slot for jobs that are all there (Jackson 1955); slack as Moore and Hodgson 1968.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import msgspec

from aionn.hal import duration_text
from aionn.scheduler.job import DeviceSlot, Job

__all__ = ["PLAN_MAX", "Displacement", "Key", "Place", "Price", "SlotPlan", "place_text"]

PLAN_MAX = 48
"""Most jobs that a slot plans ahead: enough for those that compete for the same time, and some microseconds to look through."""

Key = tuple[int, int, int]
"""``(minus the rank, urgency, number)``: the least goes first, and no two jobs are equal."""


class Place(msgspec.Struct, frozen=True, gc=False):
    """The result of planning a job on a slot. Some are made for each decision: a struct is made in half the time of a named tuple.

    Attributes:
        end_ns: When the job would end.
        is_harmless: Whether no other job becomes late.
        position: The job's position in the plan.
        duration_ns: The duration of the job there.
        preempts: Whether the job that runs there is preempted.
    """

    end_ns: int
    is_harmless: bool
    position: int
    duration_ns: int
    preempts: bool


class Price(NamedTuple):
    """The cost of a place for other jobs, compared field by field.

    The rank comes before the number of jobs, so that any number of LOW jobs is lost before one MEDIUM job is.

    Attributes:
        is_any_lost: Whether any job loses its plan.
        highest_rank: The highest rank of those.
        are_several: Whether several do.
        lost_count: Number of lost jobs; a job that has run counts as a thousand, since its device time is lost with it.
        extra_ns: The device time that is needed in addition.
    """

    is_any_lost: bool
    highest_rank: int
    are_several: bool
    lost_count: int
    extra_ns: int


class Displacement(NamedTuple):
    """A way to plan a job at the cost of others.

    Attributes:
        price: Its cost; the least is taken.
        slot: The slot of the job.
        victim: The job that leaves the slot's plan; None where the plan is repaired after the job was forced into it.
        other: The slot that the victim moves to; None where it loses its plan.
    """

    price: Price
    slot: DeviceSlot
    victim: Job | None
    other: DeviceSlot | None


class SlotPlan:
    """Jobs in order, with running sums.

    Attributes:
        keys: Of the jobs, ascending.
        jobs: In order.
    """

    __slots__ = ("_offset", "_slacks", "_sums", "keys", "jobs")

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.jobs: list[Job] = []
        self._sums: list[int] = []
        self._slacks: list[int] = []
        self._offset = 0

    def __len__(self) -> int:
        return len(self.jobs)

    def before_ns(self, position: int) -> int:
        """The total duration of the jobs before a position."""
        return self._sums[position - 1] - self._offset if position else 0

    def duration_ns(self, position: int) -> int:
        """The duration of a job on this slot."""
        return self._sums[position] - (self._sums[position - 1] if position else self._offset)

    def slack_ns(self, first: int, last: int) -> int:
        """The least slack of the jobs from ``first`` up to, not including, ``last``; there must be one."""
        return min(self._slacks[first:last]) + self._offset

    def first_late(self, urgent_count: int, urgent_ns: int, rest_ns: int) -> int:
        """The first job that ends too late, -1 if none does.

        Args:
            urgent_count: Number of the first jobs that preempt the one that runs.
            urgent_ns: When the slot turns to those.
            rest_ns: The time at which it would begin the other jobs without the preempting ones.
        """
        for position, slack_ns in enumerate(self._slacks):
            if slack_ns + self._offset < (urgent_ns if position < urgent_count else rest_ns):
                return position
        return -1

    def is_late_between(self, count: int, sooner_ns: int, later_ns: int) -> bool:
        """Whether one of the first ``count`` jobs ends in time if the slot turns to them sooner, but not if it does later."""
        # A loop, which takes half the time of ``any``: it runs for every busy slot in each decision.
        low_ns, high_ns = sooner_ns - self._offset, later_ns - self._offset
        for slack_ns in self._slacks[:count]:  # noqa: SIM110
            if low_ns <= slack_ns < high_ns:
                return True
        return False

    def insert(self, position: int, job: Job, duration_ns: int) -> None:
        """Inserts a job at its place in the order."""
        sums, slacks = self._sums, self._slacks
        if not sums:
            # The usual case where there is little to do: nothing to shift.
            self.keys.append(job.key)
            self.jobs.append(job)
            sums.append(duration_ns)
            slacks.append(job.deadline_ns - duration_ns)
            return
        end = (sums[position - 1] if position else self._offset) + duration_ns
        self.keys.insert(position, job.key)
        self.jobs.insert(position, job)
        sums[position:] = [end, *[s + duration_ns for s in sums[position:]]]
        slacks[position:] = [job.deadline_ns - end, *[r - duration_ns for r in slacks[position:]]]

    def remove(self, job: Job) -> None:
        """Removes a job; it must be here."""
        if len(self.jobs) == 1 and self.jobs[0] is job:
            self.keys.clear()
            self.jobs.clear()
            self._sums.clear()
            self._slacks.clear()
            self._offset = 0
            return
        position = bisect_left(self.keys, job.key)
        assert self.jobs[position] is job, "the plan has the position of each job"
        duration_ns = self.duration_ns(position)
        del self.keys[position], self.jobs[position]
        sums, slacks = self._sums, self._slacks
        if position == 0:
            # The sums of the remaining jobs are unchanged, only their origin moves.
            self._offset = sums[0]
            del sums[0], slacks[0]
            return
        sums[position:] = [s - duration_ns for s in sums[position + 1 :]]
        slacks[position:] = [r + duration_ns for r in slacks[position + 1 :]]


def place_text(place: Place | None, now_ns: int) -> str:
    """The result of planning a job on a slot, in words."""
    if place is None:
        return "could not end in time, or cannot run it"
    text = f"would end in {duration_text(place.end_ns - now_ns)}, behind {place.position}"
    text += ", preempting the job that runs" if place.preempts else ""
    return text if place.is_harmless else text + ", making another late"
