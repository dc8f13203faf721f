"""One device's slots for several clients: a policy's decisions, and turns among clients whose jobs are equal.

Owns the only queue of a driver process: its shells, ``aionn.drivers.kit.gate`` for threads and ``aionn.drivers.kit.loop_gate`` for
tasks, sleep and wake, and make one call at a time. Of each client and class the policy sees as many jobs as the device has slots,
the most urgent ones; the rest wait behind them. So a flood of one client delays another client's job of the same class by one job,
not by all of them, and a HIGH job of any client is considered immediately. Pure: no thread, no lock, no waiting.

Invariants:
1. No more than ``slot_count`` jobs hold a slot concurrently.
2. Every job that entered is started exactly once, unless it left before: with a slot, or without one when its deadline has come. A
   suspended job is started again.
3. No job overtakes by being on another path: while one waits, the policy decides about every other one.
4. At most ``waiting_max`` jobs wait, suspended ones among them; of one client, or of the connections of a process, about half of
   what others leave at most.
5. Frames of reserved streams are all seen by the policy, whatever their client, and run on the slots of their reservations. A
   policy without a class for them has them as best effort.
6. A job that gives its turn to those of other processes is started again after as many of its class as there are processes that
   wait then, whatever deadlines those have that come later, and before all others of its process and class.
7. A preemption is withdrawn when the job that preempts gets another slot, or leaves, before the other one is suspended.

Source: round robin among flows of equal rank, as in fair queueing (Nagle 1987); priority and deadline go before it. A flow may have
as many places as are free, as in queues with dynamic thresholds (Choudhury and Hahne 1998).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable

from aionn.errors import MissedDeadline, ResourceExhausted
from aionn.hal import Priority
from aionn.hal.callers import Connection
from aionn.scheduler.blocking import Blocking
from aionn.scheduler.estimates import Estimates
from aionn.scheduler.job import (
    NEVER_NS,
    RESERVED,
    UNPLANNED,
    Action,
    ClientJob,
    DeviceSlot,
    Job,
    JobState,
    Preempt,
    Reason,
    Start,
)
from aionn.scheduler.planned_queue import WAITING_MAX, PlannedQueue
from aionn.scheduler.planning_policy import PlanPolicy
from aionn.scheduler.ready_queue import Policy
from aionn.scheduler.reservations.calls import ReservedCall
from aionn.scheduler.slot_plan import Key

__all__ = ["SharedSlots"]

FIRST_NS = 0
"""The urgency of a job that has given its turn and has waited for it: before all deadlines of its class."""


class _Behind:
    """Jobs of one client and class that wait behind the shown ones, the most urgent first; connections of it take turns.

    Each job has the number of a round, in which no other job of its connection is.

    Jobs that have left stay here until they come to the front or outnumber the rest, so that cancelling many jobs takes a time in
    proportion to their number.
    """

    __slots__ = ("_count", "_heap", "_last", "_round")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], ClientJob]] = []
        self._count = 0
        self._round = 0
        self._last: dict[
            Hashable, int
        ] = {}  # The last round of each connection that has a job in the present one or later.

    def __len__(self) -> int:
        return self._count

    def push(self, job: ClientJob) -> None:
        job._is_behind = True
        round_ = self._round
        if job.number == UNPLANNED:  # One that was shown before has had its turn.
            round_ = self._last[job.owner] = max(round_, self._last.get(job.owner, -1) + 1)
        deadline_ns, arrival = job.urgency()
        heapq.heappush(self._heap, ((deadline_ns, round_, arrival), job))
        self._count += 1

    def pop(self) -> ClientJob:
        (_, round_, _), job = heapq.heappop(self._heap)
        while not job._is_behind:
            (_, round_, _), job = heapq.heappop(self._heap)
        self._round = max(self._round, round_)
        if len(self._last) > 2 * len(self._heap) + 1:
            self._last = {owner: last for owner, last in self._last.items() if last >= self._round}
        job._is_behind = False
        self._count -= 1
        return job

    def discard(self, job: ClientJob) -> None:
        job._is_behind = False
        self._count -= 1
        if 2 * self._count < len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1]._is_behind]
            heapq.heapify(self._heap)


class SharedSlots:
    """See the module.

    Args:
        slot_count: Number of jobs that may hold a slot concurrently.
        name: Named in errors.
        now: The clock of the deadlines.
        can_preempt: Whether the holders look at ``is_preempted`` at boundaries.
        waiting_max: Most that may wait.
        policy: The order of the jobs that are shown to it; None for the policy that plans, as in the application.
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
        self._holders: list[ClientJob | None] = [None] * slot_count
        self._preempted_for: list[ClientJob | None] = [None] * slot_count
        self._policy: Policy = PlanPolicy(waiting_max=waiting_max) if policy is None else policy
        self._queue = self._policy.make_queue(self._slots)
        self._blocking = Blocking(self._slots)
        self._estimates = Estimates()
        self._numbers = itertools.count()
        self._arrivals = itertools.count()
        self._queued: dict[int, ClientJob] = {}  # All jobs in the queue, by number: shown and suspended ones.
        self._shown: dict[tuple[Hashable, Priority], list[ClientJob]] = {}
        self._behind: dict[tuple[Hashable, Priority], _Behind] = {}
        self._behind_count = 0
        self._suspended: dict[Hashable, int] = {}
        self._given: dict[int, ClientJob] = {}  # Those that have given their turn and wait, by number.

    @property
    def waiting_count(self) -> int:
        """Number of waiting jobs."""
        return len(self._queued) + self._behind_count

    @property
    def held_count(self) -> int:
        """Number of held slots."""
        return len(self._holders) - self._holders.count(None)

    def acquire_nowait(self, job: ClientJob) -> bool:
        """Gives a job a slot if one is free and no job waits; False otherwise. ``start`` is not called."""
        # The usual case of a device that keeps up: no policy could decide otherwise, so none is asked.
        if self._queued or self._behind_count or None not in self._holders:
            return False
        job.slot = self._holders.index(None)
        self._holders[job.slot] = job
        job._since_ns = self._now()
        return True

    def adopt(self, job: ClientJob, slot: int, since_ns: int) -> None:
        """Gives a job the slot in which it has run since a time, without this queue: no job held or awaited a slot then."""
        assert self._holders[slot] is None, "a slot has one holder"
        job.slot = slot
        self._holders[slot] = job
        job._since_ns = since_ns

    def enter(self, job: ClientJob) -> None:
        """Admits a job; it is started when it gets a slot, perhaps before this returns.

        Raises:
            ResourceExhausted: Too many wait already, or too many of this owner.
        """
        if self.acquire_nowait(job):
            job.start()
            return
        self._check_room(job)
        now_ns = self._now()
        if job.deadline_ns <= now_ns:
            # Before it takes a place: it would send another job behind, and then show none of its client.
            job.start()
            return
        self._plan_holders()
        job._arrival = next(self._arrivals)
        self._show_or_store(job, now_ns)
        self._decide(now_ns)

    def _check_room(self, job: ClientJob) -> None:
        waiting = self.waiting_count
        if 2 * waiting <= self._waiting_max:
            return
        own = 0 if job.owner is None else self._waiting_of(_process(job))
        free = self._waiting_max - waiting
        if not free or own > free:
            of = f", {own} of this client's process" if own else ""
            raise ResourceExhausted(f"{self._name}: {waiting} executions wait already{of}", transient=True)

    def _waiting_of(self, process: Hashable) -> int:
        groups = [(process, priority) for priority in Priority]
        return self._suspended.get(process, 0) + sum(
            len(self._shown.get(group, ())) + len(self._behind.get(group, ())) for group in groups
        )

    def enter_reserved(self, job: ClientJob, call: ReservedCall) -> None:
        """Admits a frame of a reserved stream, as ``enter``; ``call`` has it then. One with a label is best effort, unless it is
        delayed.

        Raises:
            MissedDeadline: Its reservation does not cover it, and as best effort it would delay reserved frames for too long.
            ResourceExhausted: The same, for a job without a deadline.
        """
        if not isinstance(self._queue, PlannedQueue):
            self.enter(job)
            return
        now_ns, server = self._now(), call.server
        deadline_ns = None if job.deadline_ns == NEVER_NS else job.deadline_ns
        frame = job.frame = call.frame = server.arrive(now_ns, deadline_ns)
        if frame.is_rejected:
            error = ResourceExhausted if deadline_ns is None else MissedDeadline
            raise error(f"{self._name}: {Reason.UNRESERVED.value}", transient=True)
        if not frame.is_reserved:
            self.enter(job)
            return
        if not self._queued and not self._behind_count and self._holders[server.slot] is None:
            # As in ``acquire_nowait``, on its own slot.
            job.slot = server.slot
            self._holders[server.slot] = job
            job._since_ns = now_ns
            self._blocking.starts(frame, self._slots[server.slot], now_ns)
            frame.start(now_ns)
            job.start()
            return
        self._plan_holders()
        self._blocking.waits(frame, call.room_ns)
        self._plan(job, now_ns)
        if self._queue.add(job, now_ns) is None:
            self._queued[job.number] = job
            self._decide(now_ns)
        else:
            job.state = JobState.ENDED
            job.start()

    def look(self) -> None:
        """Decides again: a frame that runs has used its budget."""
        if self._queued:
            self._decide(self._now())

    def _end_frame(self, job: ClientJob, slot: DeviceSlot, now_ns: int) -> None:
        """A frame leaves its slot for good, or is rejected while it waits: with the label of a cause, where it is lost."""
        frame = job.frame
        assert frame is not None, "a frame of a reservation"
        if job.slot is not None:
            frame.stop(now_ns, can_preempt=slot.has_boundaries)
            self._blocking.ended(frame, slot, job.owner)
        elif (
            job.rank == RESERVED
            and isinstance(self._queue, PlannedQueue)
            and self._queue.reserved is not None
        ):
            ahead_ns = self._queue.reserved.ahead_ns(job)
            self._blocking.rejects(frame, job.shortest_ns, job.deadline_ns, now_ns, ahead_ns=ahead_ns)
        owner = self._blocking.owners[slot.index]
        frame.is_by_other = owner is not None and _process_of(owner) != _process(job)
        frame.lost(now_ns, now_ns - job.deadline_ns)

    def withdraw_reserved(self) -> None:
        """Makes all reserved frames that wait best effort: the reservations have ended with the device."""
        if isinstance(self._queue, PlannedQueue):
            now_ns = self._now()
            for slot in self._slots:
                self._queue.withdraw(slot, now_ns)
            self._decide(now_ns)

    def leave(self, job: ClientJob) -> bool:
        """Cancels a waiting job; it will not be started. Others are ignored.

        Returns:
            Whether it waited.
        """
        if self._queued.get(job.number) is job:
            self._remove(job)
            job.state = JobState.ENDED
            self._unshow(job)
            self._decide(self._now())
        elif job._is_behind:
            self._behind[_group(job)].discard(job)
            self._behind_count -= 1
        else:
            return False
        return True

    def release(self, job: ClientJob) -> None:
        """Gives a slot back; a job that was started without any is ignored."""
        if job.slot is None:
            return
        if job.number == UNPLANNED:
            # No job has waited since it began, so no policy has seen it.
            if job.frame is not None:
                self._end_frame(job, self._slots[job.slot], self._now())
            self._holders[job.slot] = None
            job.slot = None
            return
        now_ns = self._now()
        if job.frame is not None:
            self._end_frame(job, self._slots[job.slot], now_ns)
        self._free(job)
        job.state = JobState.ENDED
        if job.model is not None and job._since_ns:
            self._estimates.observe(job.model, max(0, now_ns - job._since_ns))
        if self._queued or self._behind_count:
            self._decide(now_ns)

    def suspend(self, job: ClientJob) -> None:
        """Takes the slot of a preempted job for the more urgent one; the preempted one is started again later."""
        assert job.is_preempted, "only a preempted job is suspended"
        now_ns = self._now()
        left_ns = self._free(job).ends_ns - now_ns
        job._since_ns = 0  # A timing in pieces does not give the whole duration.
        job.durations_ns = (max(1, left_ns),)
        job.least_ns = (1,)
        job.state = JobState.WAITING
        self._queue.add(job, now_ns)
        self._queued[job.number] = job
        process = _process(job)
        self._suspended[process] = self._suspended.get(process, 0) + 1
        job._is_suspended = True
        self._decide(now_ns)

    def others_wait(self, job: ClientJob) -> bool:
        """Whether a job of another process waits that has at least the priority of this one, which holds a slot."""
        process = _process(job)
        return any(
            other.priority >= job.priority and _process(other) != process for other in self._queued.values()
        )

    def give_turn(self, job: ClientJob) -> None:
        """Takes the slot of a job that has worked for long, for those of other processes; it is started again after one of each.

        With one slot, where ``others_wait``. It is the last of its priority then, whatever its deadline is, so that no client keeps
        its turn by early deadlines. When as many jobs have started as there were processes, it is the first, so that none is kept
        from its turn by them either.
        """
        assert len(self._slots) == 1, "turns are for one slot"
        now_ns, group = self._now(), _group(job)
        self._free(job)
        # No other job of its process goes before it: each would be begun, and would give its turn to the next one.
        behind = self._behind.setdefault(group, _Behind())
        for other in self._shown.pop(group, ()):
            self._remove(other)
            behind.push(other)
            self._behind_count += 1
        job.deadline_ns = NEVER_NS
        self._plan(job, now_ns)
        job.has_run = job.has_given_turn = True
        process = _process(job)
        others = {_process(other) for other in self._queued.values() if other.priority == job.priority}
        job.turns_ahead = len(others - {process})
        if not job.turns_ahead:
            job.sort_into(job.rank, FIRST_NS)  # Those of higher priorities go before it all the same.
        self._queue.add(job, now_ns)
        self._queued[job.number] = self._given[job.number] = job
        self._shown[group] = [job]
        self._decide(now_ns)

    def suspended_of(self, job: ClientJob) -> int:
        """Number of suspended jobs of the process whose job this is."""
        return self._suspended.get(_process(job), 0)

    def _free(self, job: ClientJob) -> DeviceSlot:
        assert job.slot is not None, "only a holder's slot is freed"
        slot = self._slots[job.slot]
        if job.frame is not None:
            job.frame.stop(self._now(), can_preempt=slot.has_boundaries)
        self._holders[slot.index] = self._preempted_for[slot.index] = None
        slot.job = job.slot = None
        slot.is_stopping = job.is_preempted = False
        return slot

    def forget(self, model: Hashable) -> None:
        """Drops what was learnt of a model that never comes again. From any thread, also from a finaliser."""
        self._estimates.forget(model)

    @property
    def learnt_count(self) -> int:
        """Of how many models something was learnt."""
        return len(self._estimates.keys())

    # --- The jobs that the policy sees --------------------------------------------------------------------------------------------

    def _plan_holders(self) -> None:
        """Shows the policy the jobs that took their slots while none waited, in the order in which they did."""
        unplanned = [job for job in self._holders if job is not None and job.number == UNPLANNED]
        for job in sorted(unplanned, key=lambda job: job._since_ns):
            assert job.slot is not None, "a holder has a slot"
            self._plan(job, job._since_ns)
            job.state = JobState.RUNNING
            job.has_run = True
            slot = self._slots[job.slot]
            slot.job = job
            slot.ends_ns = job._since_ns + job.durations_ns[0]

    def _plan(self, job: ClientJob, now_ns: int) -> None:
        expected_ns = 1 if job.model is None else self._estimates.duration_ns(job.model, 1)
        job.plan(next(self._numbers), now_ns, expected_ns)

    def _show_or_store(self, job: ClientJob, now_ns: int) -> None:
        group = _group(job)
        shown = self._shown.setdefault(group, [])
        if len(shown) < len(self._slots):
            self._show(job, now_ns)
            return
        last = max(shown, key=ClientJob.urgency)
        if job.urgency() < last.urgency():
            self._remove(last)
            shown.remove(last)
            self._show(job, now_ns)
            job = last
        self._behind.setdefault(group, _Behind()).push(job)
        self._behind_count += 1

    def _show(self, job: ClientJob, now_ns: int) -> None:
        # The number is given here and not on arrival: jobs of several clients that are equal otherwise run in the order in which
        # they were shown. A flood's next job is shown after the other clients' first ones, so the clients take turns.
        self._plan(job, now_ns)
        if self._queue.add(job, now_ns) is None:
            self._queued[job.number] = job
            self._shown.setdefault(_group(job), []).append(job)
            return
        # Its deadline has come: a started job checks that first.
        job.state = JobState.ENDED
        job.start()

    def _remove(self, job: ClientJob) -> None:
        self._queue.remove(job)
        del self._queued[job.number]
        self._given.pop(job.number, None)
        if job._is_suspended:
            job._is_suspended = False
            process = _process(job)
            self._suspended[process] -= 1
            if not self._suspended[process]:
                del self._suspended[process]

    def _unshow(self, job: ClientJob) -> None:
        """Shows the next job of the client and class of one that has left the queue."""
        group = _group(job)
        shown = self._shown.get(group)
        if shown is None or job not in shown:
            return  # It was suspended, and shown before that.
        shown.remove(job)
        behind = self._behind.get(group)
        now_ns = self._now()
        while behind and len(shown) < len(self._slots):
            self._behind_count -= 1
            self._show(behind.pop(), now_ns)
        if not behind:
            self._behind.pop(group, None)
            if not shown:
                self._shown.pop(group, None)

    # --- Decisions ----------------------------------------------------------------------------------------------------------------

    def _decide(self, now_ns: int) -> None:
        has_started = True
        while has_started:
            has_started = False
            self._withdraw_preemptions()
            for action in self._policy.decide(now_ns, self._queue, self._slots):
                if self._trace is not None:
                    self._trace(now_ns, action)
                if isinstance(action, Preempt):
                    self._preempt(action.slot, action.by)
                    continue
                job = action.job
                assert isinstance(job, ClientJob), "the queue holds what entered"
                if isinstance(action, Start):
                    self._start(job, action.slot, now_ns)
                    has_started = True  # Others are shown now, and slots may be left.
                elif job.state is JobState.RUNNING:
                    # Its shell looks at its deadline at the next boundary; until then it holds its slot.
                    job.state = JobState.ENDED
                else:
                    self._remove(job)
                    job.state = JobState.ENDED
                    if job.frame is not None:
                        self._end_frame(job, self._slots[job.frame.server.slot], now_ns)
                    self._unshow(job)
                    job.start()
                    has_started = True
            if not has_started and self._queued and None in self._holders:
                has_started = self._start_first(now_ns)

    def _start_first(self, now_ns: int) -> bool:
        """Starts the first best-effort job in the queue on a free slot, whatever its expected duration; whether there is one.

        A policy that plans leaves a job waiting that it expects to be late, as other jobs may be lost by it. Here the rejection of
        such a job is left to its deadline, and no event may come that would cause another decision: a free slot must not wait.
        """
        # Reserved frames are started by the policy as soon as their slots are free.
        first = min((job for job in self._queued.values() if job.rank < RESERVED), key=_key, default=None)
        if first is not None:
            self._start(first, self._slots[self._holders.index(None)], now_ns)
        return first is not None

    def _start(self, job: ClientJob, slot: DeviceSlot, now_ns: int) -> None:
        self._remove(job)
        job.state = JobState.RUNNING
        slot.job = job
        if job.frame is not None:
            self._blocking.starts(job.frame, slot, now_ns)
            job.frame.start(now_ns)
        slot.ends_ns = now_ns + job.durations_ns[0]
        self._holders[slot.index] = job
        job.slot = slot.index
        if not job.has_run:
            job._since_ns = now_ns
        job.has_run = True
        if self._given:
            self._count_turn(job, now_ns)
        self._unshow(job)
        job.start()

    def _count_turn(self, started: ClientJob, now_ns: int) -> None:
        for job in self._given.values():
            if job.priority == started.priority and job.turns_ahead:
                job.turns_ahead -= 1
                if not job.turns_ahead:
                    self._queue.remove(job)
                    job.sort_into(job.rank, FIRST_NS)
                    self._queue.add(job, now_ns)

    def _preempt(self, slot: DeviceSlot, by: Job) -> None:
        job = self._holders[slot.index]
        assert job is not None, "only a job that runs is preempted"
        assert isinstance(by, ClientJob), "the queue holds what entered"
        slot.is_stopping = job.is_preempted = True
        self._preempted_for[slot.index] = by
        job.preempt()

    def _withdraw_preemptions(self) -> None:
        """Lets holders continue whose slots are not needed any more, since the job that needed one got another slot, or left.

        The policy is asked afterwards, and preempts again where another job needs the slot. The simpler rule, to suspend a holder
        that was preempted once in any case, would have it start again immediately where no job takes its place.
        """
        for index, by in enumerate(self._preempted_for):
            if by is not None and self._queued.get(by.number) is not by:
                job = self._holders[index]
                assert job is not None, "the end of a holder ends its preemption"
                self._preempted_for[index] = None
                self._slots[index].is_stopping = job.is_preempted = False


def _group(job: ClientJob) -> tuple[Hashable, Priority]:
    """The jobs that have one turn together."""
    return _process(job), job.priority


def _process(job: ClientJob) -> Hashable:
    owner = job.owner
    return owner.process if isinstance(owner, Connection) else owner


def _process_of(owner: Hashable) -> Hashable:
    return owner.process if isinstance(owner, Connection) else owner


def _key(job: Job) -> Key:
    return job.key
