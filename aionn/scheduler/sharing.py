"""One device's slots for several clients: a policy's decisions, and turns among clients whose jobs are equal.

Owns the only queue of a driver process: its shells, ``aionn.drivers.kit.gate`` for threads and ``aionn.drivers.kit.loop_gate`` for
tasks, sleep and wake, and make one call at a time. Each owner shows the policy as many jobs of a class as the device has slots, the
most urgent ones; the rest wait behind them. So a flood of one client delays another client's job of the same class by one job, not
by all of them, and a HIGH job of any client is considered immediately. Pure: no thread, no lock, no waiting.

Invariants:
1. No more than ``slot_count`` claims hold a slot concurrently.
2. Every claim that entered is started exactly once, unless it left before: with a slot, or without one when its time is over.
3. No claim overtakes by being on another path: while one waits, every other one is decided on.
4. At most ``waiting_max`` claims wait.
5. A holder gives way only while the job that needs its slot waits; a preemption whose job got another slot, or left, is withdrawn.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable

from aionn.errors import ResourceExhausted
from aionn.hal import Priority
from aionn.scheduler.estimates import Estimates
from aionn.scheduler.job import NEVER_NS, Action, DeviceSlot, Job, JobState, Preempt, Start
from aionn.scheduler.planner import WAITING_MAX
from aionn.scheduler.policy import PlanPolicy
from aionn.scheduler.ready_queue import Policy

__all__ = ["Claim", "SharedSlots"]


class Claim:
    """One job that wants a slot.

    Args:
        priority: Its class.
        deadline_ns: Absolute; None means no deadline.
        owner: Whose it is.
        model: What its duration is learnt by; None to learn nothing.

    Attributes:
        is_wanted_back: Whether its slot is wanted for more urgent job: give way at the next boundary.
        slot: Which slot it holds; None means no slot.
    """

    __slots__ = (
        "_is_behind",
        "_key",
        "_number",
        "_since_ns",
        "_job",
        "is_wanted_back",
        "model",
        "owner",
        "priority",
        "slot",
    )

    def __init__(
        self,
        priority: Priority,
        deadline_ns: int | None,
        *,
        owner: Hashable = None,
        model: Hashable = None,
    ) -> None:
        self.priority = priority
        self.owner = owner
        self.model = model
        self.is_wanted_back = False
        self.slot: int | None = None
        self._key = NEVER_NS if deadline_ns is None else deadline_ns
        self._is_behind = False
        self._number = 0
        self._since_ns = 0
        self._job: Job | None = None

    def start(self) -> None:
        """Called when its turn has come: with a slot, or, where its deadline came first, without one. Must be quick."""

    def interrupt(self) -> None:
        """Called when its slot is wanted back. Must be quick."""


class _Behind:
    """Claims of one client and class that wait behind the shown ones, the most urgent first.

    Claims that have left stay here until they come to the front or outnumber the rest, so that cancelling many claims takes a time
    in proportion to their number.
    """

    __slots__ = ("_count", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Claim]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, claim: Claim) -> None:
        claim._is_behind = True
        heapq.heappush(self._heap, (*_urgency(claim), claim))
        self._count += 1

    def pop(self) -> Claim:
        claim = heapq.heappop(self._heap)[2]
        while not claim._is_behind:
            claim = heapq.heappop(self._heap)[2]
        claim._is_behind = False
        self._count -= 1
        return claim

    def discard(self, claim: Claim) -> None:
        claim._is_behind = False
        self._count -= 1
        if 2 * self._count < len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2]._is_behind]
            heapq.heapify(self._heap)


class SharedSlots:
    """See the module.

    Args:
        slot_count: Number of claims that may hold a slot concurrently.
        name: Named in errors.
        now: The clock of the deadlines.
        can_preempt: Whether holders give way at boundaries.
        waiting_max: Most that may wait.
        policy: The order of the claims that are shown to it; None for the policy that plans, as in the application.
        trace: Called with the time and every action.
    """

    def __init__(
        self,
        slot_count: int,
        *,
        name: str,
        now: Callable[[], int],
        can_preempt: bool = False,
        waiting_max: int = WAITING_MAX,
        policy: Policy | None = None,
        trace: Callable[[int, Action], None] | None = None,
    ) -> None:
        self._name = name
        self._now = now
        self._waiting_max = waiting_max
        self._trace = trace
        self._slots = [DeviceSlot(index, 0, can_preempt=can_preempt) for index in range(slot_count)]
        self._holders: list[Claim | None] = [None] * slot_count
        self._preempted_for: list[Job | None] = [None] * slot_count
        self._policy: Policy = PlanPolicy(waiting_max=waiting_max) if policy is None else policy
        self._queue = self._policy.make_queue(self._slots)
        self._estimates = Estimates()
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}  # All that are in the queue.
        self._shown: dict[tuple[Hashable, Priority], list[Claim]] = {}
        self._behind: dict[tuple[Hashable, Priority], _Behind] = {}
        self._behind_count = 0

    @property
    def waiting_count(self) -> int:
        """Number of waiting claims."""
        return len(self._jobs) + self._behind_count

    @property
    def held_count(self) -> int:
        """Number of held slots."""
        return len(self._holders) - self._holders.count(None)

    def take_at_once(self, claim: Claim) -> bool:
        """Gives a claim a slot if one is free and no claim waits; False otherwise. ``start`` is not called."""
        if self._jobs or self._behind_count or None not in self._holders:
            return False
        claim.slot = self._holders.index(None)
        self._holders[claim.slot] = claim
        claim._since_ns = self._now()
        return True

    def enter(self, claim: Claim) -> None:
        """Takes a claim in; it is started when its turn comes, perhaps before this returns.

        Raises:
            ResourceExhausted: Too many wait already.
        """
        if self.take_at_once(claim):
            claim.start()
            return
        if self.waiting_count >= self._waiting_max:
            raise ResourceExhausted(
                f"{self._name}: {self._waiting_max} executions wait already", transient=True
            )
        now_ns = self._now()
        if claim._key <= now_ns:
            # Before it takes a place: it would send another claim behind, and then show none of its group.
            claim.start()
            return
        self._see_holders()
        claim._number = next(self._numbers)
        self._show_or_store(claim, now_ns)
        self._decide(now_ns)

    def leave(self, claim: Claim) -> None:
        """Cancels a waiting claim; it will not be started. Others are ignored."""
        job = claim._job
        if claim.slot is not None:
            return
        if job is not None and job.state is JobState.WAITING:
            self._take_out(job)
            job.state = JobState.ENDED
            self._unshow(claim)
            self._decide(self._now())
        elif claim._is_behind:
            self._behind[claim.owner, claim.priority].discard(claim)
            self._behind_count -= 1

    def give_back(self, claim: Claim) -> None:
        """Gives a slot back; one that was started without any is ignored."""
        slot, job = claim.slot, claim._job
        if slot is None:
            return
        claim.slot = None
        claim.is_wanted_back = False
        lane = self._slots[slot]
        self._holders[slot] = None
        lane.job = None
        lane.is_stopping = False
        self._preempted_for[slot] = None
        if job is None:
            return  # No job has waited since.
        now_ns = self._now()
        job.state = JobState.ENDED
        if claim.model is not None and claim._since_ns:
            self._estimates.observe(claim.model, max(0, now_ns - claim._since_ns))
        if self._jobs or self._behind_count:
            self._decide(now_ns)

    def forget(self, model: Hashable) -> None:
        """Drops what was learnt of a model that never comes again. From any thread, also from a finaliser."""
        self._estimates.forget(model)

    @property
    def learnt_count(self) -> int:
        """Of how many models something was learnt."""
        return len(self._estimates.keys())

    def give_way(self, claim: Claim) -> None:
        """Lets the more urgent one have the slot; the claim is started again when its turn comes."""
        slot, job = claim.slot, claim._job
        assert slot is not None and job is not None, "only a holder whose slot is wanted back gives way"
        now_ns = self._now()
        lane = self._slots[slot]
        claim.slot = None
        claim.is_wanted_back = False
        claim._since_ns = 0  # A timing in pieces does not give the whole duration.
        self._holders[slot] = None
        lane.job = None
        lane.is_stopping = False
        self._preempted_for[slot] = None
        job.durations_ns = (max(1, lane.ends_ns - now_ns),)
        job.least_ns = (1,)
        job.state = JobState.WAITING
        self._queue.add(job, now_ns)
        self._jobs[job.number] = job
        self._decide(now_ns)

    # --- What the policy sees -----------------------------------------------------------------------------------------------------

    def _see_holders(self) -> None:
        """Makes jobs of the claims that took their slots while none waited, in the order in which they did."""
        held = [
            (claim._since_ns, lane.index, claim)
            for lane, claim in zip(self._slots, self._holders, strict=True)
            if claim
        ]
        for _, index, claim in sorted(held, key=lambda entry: entry[:2]):
            if claim._job is None:
                lane = self._slots[index]
                job = self._job_of(claim, claim._since_ns)
                job.state = JobState.RUNNING
                job.has_run = True
                lane.job = job
                lane.ends_ns = claim._since_ns + job.durations_ns[0]

    def _job_of(self, claim: Claim, now_ns: int) -> Job:
        expected_ns = 1 if claim.model is None else self._estimates.duration_ns(claim.model, 1)
        claim._job = Job(
            next(self._numbers),
            priority=claim.priority,
            deadline_ns=claim._key,
            arrival_ns=now_ns,
            durations_ns=(expected_ns,),
            least_ns=(1,),
            item=claim,
        )
        return claim._job

    def _show_or_store(self, claim: Claim, now_ns: int) -> None:
        group = (claim.owner, claim.priority)
        shown = self._shown.setdefault(group, [])
        if len(shown) >= len(self._slots):
            last = max(shown, key=_urgency)
            if _urgency(claim) < _urgency(last):
                assert last._job is not None, "a claim that is shown has a job"
                self._take_out(last._job)
                shown.remove(last)
                last._job = None
                claim, last = last, claim
                self._show(last, now_ns)
            self._behind.setdefault(group, _Behind()).push(claim)
            self._behind_count += 1
            return
        self._show(claim, now_ns)

    def _show(self, claim: Claim, now_ns: int) -> None:
        job = self._job_of(claim, now_ns)
        if self._queue.add(job, now_ns) is None:
            self._jobs[job.number] = job
            self._shown.setdefault((claim.owner, claim.priority), []).append(claim)
            return
        # Its deadline has come: a started job checks that first.
        job.state = JobState.ENDED
        claim.start()

    def _take_out(self, job: Job) -> None:
        self._queue.remove(job)
        del self._jobs[job.number]

    def _unshow(self, claim: Claim) -> None:
        """One leaves the queue: the next of its owner and class is shown."""
        group = (claim.owner, claim.priority)
        shown = self._shown.get(group)
        if shown is None or claim not in shown:
            return  # It had given way, and was shown before that.
        shown.remove(claim)
        behind = self._behind.get(group)
        now_ns = self._now()
        while behind and len(shown) < len(self._slots):
            self._behind_count -= 1
            self._show(behind.pop(), now_ns)
        if not behind:
            self._behind.pop(group, None)
            if not shown:
                self._shown.pop(group, None)

    def _decide(self, now_ns: int) -> None:
        has_started = True
        while has_started:
            has_started = False
            self._withdraw_preemptions()
            for action in self._policy.decide(now_ns, self._queue, self._slots):
                if self._trace is not None:
                    self._trace(now_ns, action)
                if isinstance(action, Start):
                    self._start(action.job, action.slot, now_ns)
                    has_started = True  # Others are shown now, and slots may be left.
                elif isinstance(action, Preempt):
                    self._ask_back(action.slot, action.by)
                elif action.job.state is JobState.RUNNING:
                    # It looks at its deadline itself, at its next boundary.
                    action.job.state = JobState.ENDED
                else:
                    self._take_out(action.job)
                    action.job.state = JobState.ENDED
                    self._unshow(action.job.item)
                    action.job.item.start()
                    has_started = True
            if not has_started and self._jobs and None in self._holders:
                has_started = self._start_first(now_ns)

    def _start_first(self, now_ns: int) -> bool:
        """Starts the first that waits, whatever is expected of it: no event may come that would have it decided on again."""
        lane = next(lane for lane in self._slots if lane.job is None)
        # Of all that are in the queue, not only of those shown: a job that gave way is in the queue alone.
        self._start(min(self._jobs.values(), key=lambda job: job.key), lane, now_ns)
        return True

    def _start(self, job: Job, lane: DeviceSlot, now_ns: int) -> None:
        claim: Claim = job.item
        self._take_out(job)
        job.state = JobState.RUNNING
        lane.job = job
        lane.ends_ns = now_ns + job.durations_ns[0]
        self._holders[lane.index] = claim
        claim.slot = lane.index
        if not job.has_run:
            claim._since_ns = now_ns
        job.has_run = True
        self._unshow(claim)
        claim.start()

    def _ask_back(self, lane: DeviceSlot, by: Job) -> None:
        assert lane.job is not None, "only a job that runs is interrupted"
        claim: Claim = lane.job.item
        lane.is_stopping = True
        self._preempted_for[lane.index] = by
        claim.is_wanted_back = True
        claim.interrupt()

    def _withdraw_preemptions(self) -> None:
        """Lets holders continue whose slots are not needed any more, since the job that needed one got another slot, or left."""
        for lane, by, claim in zip(self._slots, self._preempted_for, self._holders, strict=True):
            # The policy is asked afterwards, and preempts again where another job needs the slot.
            if by is not None and by.state is not JobState.WAITING:
                self._preempted_for[lane.index] = None
                if claim is not None and lane.is_stopping:
                    lane.is_stopping = claim.is_wanted_back = False


def _urgency(claim: Claim) -> tuple[int, int]:
    return claim._key, claim._number
