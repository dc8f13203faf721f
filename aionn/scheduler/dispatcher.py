"""The event loop's shell around the policy: wait for a slot of a device, hold it, give it back.

Owns the waiting of tasks and the learning of durations; ``aionn.scheduler.planning_policy`` decides which job gets a slot.

Invariants:
1. No more than ``slot_count`` slots are held concurrently. Where the device can preempt jobs between operations, a more urgent
   job is sent to it beside the one that it preempts, which then holds no slot until its device continues with it.
2. A waiter that will be late fails as soon as that is certain, not when it would be started.
3. A cancelled waiter leaves the queue; a cancelled holder gives its slot back only by ``release``.
4. A slot is held until its holder gives it back, also by a job that runs past its deadline.
5. No estimate rejects jobs permanently: now and then one is admitted to test whether the estimate still holds, also where jobs
   are rejected because reserved frames cannot wait for them.
6. If a slot is kept from LOW jobs, they hold at most all slots but one for some time after each job above LOW.
7. While time is reserved, no job is sent to the device beside another: a device knows no reserved frames, and would run them by
   its own order. Where it knows them (``passes_frames``), it gets reserved frames immediately; they hold no slot here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import anyio
from msgspec.structs import replace

from aionn.errors import InvalidArgument
from aionn.hal import Priority, check_deadline_ns
from aionn.observability.tracing import is_tracing, section
from aionn.scheduler.bandwidth import Arrivals
from aionn.scheduler.blocking import Blocking
from aionn.scheduler.estimates import Estimates, believed_ns
from aionn.scheduler.job import (
    EXPLAINED_MAX,
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
    TaskJob,
    described,
    error_of,
    held_text,
    new_task_job,
    unplanned_job,
)
from aionn.scheduler.planned_queue import WAITING_MAX, PlannedQueue
from aionn.scheduler.planning_policy import PlanPolicy, start_immediately
from aionn.scheduler.ready_queue import QueueStatistics

__all__ = ["Dispatcher", "Outcome", "TaskJob"]

PROBE_EVERY = 16
"""Of the jobs that a learnt duration alone would reject, one in this number is tried: devices become faster again."""

PREEMPTED_MAX = 2
"""Number of preempted jobs per slot that may wait at the device: one of each lower class."""

KEPT_NS = 1_000_000_000
"""Time after a job above LOW for which one slot is kept from LOW jobs: longer than the period of most streams. A device without
such jobs has all of its slots for LOW ones."""

PASSING_PAUSE = 16
"""Jobs that do not pass through beside others after one that had to wait: where more are asked for than there are slots, the policy
has to see all of them, and to pass first costs more than to enter."""

OWN = "a dispatcher has only jobs that it made itself"

Outcome = Literal["ended", "late", "failed"]
"""The end of an execution at the device: with results, stopped at its deadline, or with a duration that carries no information."""


class Dispatcher:
    """The slots of one device, for the tasks of one event loop.

    Args:
        slot_count: Number of executions that the device can run concurrently.
        now: The clock of the deadlines, the same as the loop's.
        can_preempt: Whether the device preempts what runs for more urgent jobs, between operations or anywhere, and continues
            it afterwards.
        keeps_slot: Whether one slot is kept from LOW jobs while the device has more urgent work, see ``KEPT_NS``: for devices on
            which LOW jobs take several times as long beside other programs, as they do in the ordinary scheduling class. No effect
            on a device with one slot, or where ``can_preempt``.
        estimates: Where durations are learnt; None for a new place.
        waiting_max: Most that may wait.
        on_full: ``refuse`` or ``displace``: what happens to a new one, or to the last in the order, when too many wait.
        trace: Called with the time and every action.

    Attributes:
        passes_frames: Whether the process of the device orders the reserved frames of all of its clients itself.
    """

    def __init__(
        self,
        slot_count: int,
        *,
        now: Callable[[], int],
        can_preempt: bool = False,
        keeps_slot: bool = False,
        estimates: Estimates | None = None,
        waiting_max: int = WAITING_MAX,
        on_full: str = "refuse",
        trace: Callable[[int, Action], None] | None = None,
    ) -> None:
        self._now = now
        self._can_preempt = can_preempt
        self._slots = [DeviceSlot(index, 0, can_preempt=can_preempt) for index in range(slot_count)]
        self._policy = PlanPolicy(waiting_max=waiting_max, on_full=on_full)
        self._queue = self._policy.make_queue(self._slots)
        self._estimates = Estimates() if estimates is None else estimates
        self._trace = trace
        self._numbers = itertools.count()
        self._jobs: dict[int, TaskJob] = {}
        self._preempted: dict[int, Job] = {}
        self.passes_frames = False
        self._passed: dict[int, Job] = {}
        self._taken: set[int] = set()
        self._rejections: dict[Hashable, int] = {}
        self._keeps_slot = keeps_slot and slot_count > 1 and not can_preempt
        self._start_immediately = self._start_unless_kept if self._keeps_slot else start_immediately
        self._least_passing: int = Priority.MEDIUM if self._keeps_slot else Priority.LOW
        self._preempts_without_reservations = can_preempt
        self._room_ns = NEVER_NS
        self._blocking = Blocking(self._slots)
        self._urgent_ns = -KEPT_NS
        self._passing_count = self._pause = 0
        self._passed_count = 0
        self._counts = dict.fromkeys(("preempted", "overran", "probed"), 0)

    def enter(
        self,
        *,
        priority: Priority,
        deadline_ns: int | None,
        model: Hashable = None,
        declared_ns: int | None = None,
        urgent_ns: int | None = None,
        server: Arrivals | None = None,
    ) -> TaskJob:
        """Asks for a slot; ``wait`` waits for it.

        Args:
            priority: Its class.
            deadline_ns: Absolute; None means no deadline.
            model: The key by which durations are learnt; None to learn nothing and to expect no duration.
            declared_ns: The duration that its driver declares, used until enough was learnt; None if it declares none.
            urgent_ns: The deadline that one who waits for this job leaves it, where that is sooner than its own.
            server: The server of the reservation that this is a frame of; ``job.frame`` then has the label. None for best effort.

        Raises:
            InvalidArgument: There is no such priority, or a time is not an integer of 64 bits or is negative.
            MissedDeadline: The deadline has passed, or even an idle device could not keep it (both persistent).
            ResourceExhausted: Too many wait already.
        """
        if not isinstance(priority, Priority):
            raise InvalidArgument(f"scheduler: expected a Priority, got {priority!r}")
        check_deadline_ns(deadline_ns, where="scheduler")
        self._plan_unplanned()
        now_ns = self._now()
        expected_ns = least_ns = 1
        if model is not None:
            declared_ns = believed_ns(declared_ns)
            expected_ns, least_ns = self._estimates.durations_ns(model, declared_ns)
            expected_ns = max(expected_ns, least_ns)
            if deadline_ns is not None and deadline_ns > now_ns and now_ns + least_ns > deadline_ns:
                least_ns = self._probe(model, least_ns)
        number = next(self._numbers)
        job = new_task_job(number, priority, deadline_ns, now_ns, model, expected_ns, least_ns, urgent_ns)
        if server is not None:
            job.reserve(server.arrive(now_ns, deadline_ns))
            if self.passes_frames and job.rank == RESERVED:
                job.state, job.started_ns = JobState.RUNNING, now_ns
                job.is_launched = job.has_run = True
                self._passed[job.number] = job
                return job
        start = self._start_immediately(now_ns, self._queue, self._slots, job)
        if start is not None:
            self._jobs[job.number] = job
            if self._trace is not None or is_tracing():
                self._record(start, now_ns)
            self._start(job, start.slot, now_ns)
            job.is_launched = True
            return job
        if job.frame is None:
            if expected_ns > self._room_ns and self._probe(model, expected_ns) > 1:
                raise error_of(job, Reason.TOO_LONG, now_ns, has_waited=False)
        elif job.rank == RESERVED:
            self._blocking.waits(job.frame, self._room_ns)
        reason = self._queue.add(job, now_ns)
        if reason is not None:
            raise error_of(job, reason, now_ns, has_waited=False)
        self._pause, self._jobs[job.number] = PASSING_PAUSE, job
        self._decide(now_ns)
        job.is_launched = job.state is JobState.RUNNING
        return job

    def pass_through(
        self,
        again: TaskJob | None,
        priority: Priority,
        deadline_ns: int | None,
        model: Hashable,
        declared_ns: int | None,
    ) -> TaskJob | None:
        """As ``enter``, for a job that a free slot ends in time while none waits: no policy could decide otherwise, so that none is
        asked unless a job comes, while it runs, that does not pass. Returns None where there is more to decide. ``again``, the job
        that this call has returned before for the same model, serves again if no policy has seen it.
        """
        if self._jobs or priority < self._least_passing:
            return None
        now_ns, free = self._now(), None
        for slot in self._slots:
            running = slot.job
            if running is None:
                free = free or slot
            elif self._pause or running.deadline_ns <= now_ns:
                if self._pause:
                    self._pause -= 1
                return None
        if deadline_ns is None:
            deadline_ns = NEVER_NS
        elif now_ns + max(self._estimates.durations_ns(model, believed_ns(declared_ns))) > deadline_ns:
            return None
        if free is None:
            return None
        if again is None or not again.is_unplanned or again.priority is not priority:
            again = unplanned_job(next(self._numbers), priority, model)
        again.declared_ns, again.deadline_ns, again.started_ns = declared_ns, deadline_ns, now_ns
        free.job, again.passing = again, free
        self._passing_count += 1
        if self._keeps_slot:
            self._urgent_ns = now_ns
        return again

    def _plan_unplanned(self) -> None:
        """Shows the policy the jobs that pass through, since another one has come or is asked about."""
        if not self._passing_count:
            return
        self._passing_count = 0
        for slot in self._slots:
            if (job := slot.job) is None:
                continue
            assert isinstance(job, TaskJob) and job.passing is slot, OWN
            job.passing, started_ns = None, job.started_ns
            self._jobs[job.number] = job
            expected_ns, least_ns = self._estimates.durations_ns(job.model, believed_ns(job.declared_ns))
            job.plan(started_ns, max(expected_ns, least_ns), least_ns)
            self._queue.pass_through(job, slot, started_ns)
            self._start(job, slot, started_ns)

    def limit_best_effort(self, room_ns: int | None) -> None:
        """Sets the limits that hold while time is reserved: best-effort jobs that take longer than ``room_ns`` are rejected, and
        running jobs are not preempted.

        Args:
            room_ns: The longest best-effort job that no reserved frame would be lost by; None where nothing is reserved any more.
        """
        self._plan_unplanned()
        self._room_ns = NEVER_NS if room_ns is None else room_ns
        can_preempt = self._preempts_without_reservations and room_ns is None
        if can_preempt != self._can_preempt:
            self._can_preempt = can_preempt
            for slot in self._slots:
                slot.can_preempt = slot.has_boundaries = can_preempt
        self._least_passing = Priority.MEDIUM if self._keeps_slot else Priority.LOW
        self._start_immediately = self._start_unless_kept if self._keeps_slot else start_immediately
        if room_ns is not None:
            self._least_passing, self._start_immediately = RESERVED, self._start_unless_long

    def _start_unless_long(
        self, now_ns: int, queue: PlannedQueue, slots: Sequence[DeviceSlot], job: Job
    ) -> Start | None:
        """As ``start_immediately``, for a device with reservations."""
        if job.frame is None and job.durations_ns[0] > self._room_ns:
            return None
        start = self._start_unless_kept if self._keeps_slot else start_immediately
        return start(now_ns, queue, slots, job)

    def _probe(self, model: Hashable, least_ns: int) -> int:
        """The estimate of a job that would be rejected: the learnt one, or zero if it is to be tried."""
        if not self._estimates.count(model):
            return least_ns  # Its driver declares it, and knows.
        count = self._rejections[model] = self._rejections.get(model, 0) + 1
        if count % PROBE_EVERY:
            return least_ns
        self._counts["probed"] += 1
        return 1

    def forget(self, model: Hashable) -> None:
        """Drops what was learnt of a model that never comes again. From any thread, also from a finaliser."""
        self._estimates.forget(model)
        self._rejections.pop(model, None)

    @property
    def learnt_count(self) -> int:
        """Of how many models something was learnt."""
        return len(self._rejections.keys() | self._estimates.keys())

    def least_ns(self, model: Hashable, declared_ns: int | None = None) -> int:
        """The least duration of an execution, as far as is known; see ``enter`` for the arguments."""
        return 0 if model is None else self._estimates.least_ns(model, believed_ns(declared_ns))

    def expected_ns(self, model: Hashable, declared_ns: int | None = None) -> int:
        """The expected duration of an execution; see ``enter`` for the arguments."""
        return 0 if model is None else self._estimates.duration_ns(model, believed_ns(declared_ns))

    async def wait(self, job: TaskJob) -> None:
        """Waits for the slot that ``enter`` asked for. The caller must give it back with ``release``; a cancelled one never has it.

        Raises:
            MissedDeadline: It became certain that the deadline will be missed, or it passed (transient).
            ResourceExhausted: Others displaced it because too many wait.
        """
        if job.state is JobState.WAITING:
            try:
                await self._wait(job)
            except BaseException:
                # The job may have been started in the same turn of the loop as the cancellation: then the slot is given back here.
                self.leave(job)
                raise
        if job.reason is not None:
            raise error_of(job, job.reason, self._now(), has_waited=True)
        job.is_launched = True

    async def _wait(self, job: TaskJob) -> None:
        while job.state is JobState.WAITING:
            # A new one for each round: the job may have been started, which sets it, and have lost its slot before this task ran.
            event = job.event = anyio.Event()
            if job.deadline_ns == NEVER_NS:
                await event.wait()
                continue
            # One nanosecond after the last moment at which it could start; at least a turn of the loop.
            limit_ns = job.deadline_ns - job.shortest_ns + 1
            if job.rank == RESERVED:
                # A frame that runs may use up its budget before; and this one is not late as long as its own budget could suffice,
                # though it is known to take longer.
                limit_ns = self._queue.next_wake_ns()
            with anyio.move_on_after(max(0.0, (limit_ns - self._now()) / 1e9)) as scope:
                await event.wait()
            if scope.cancelled_caught and job.state is JobState.WAITING:
                self._decide(max(self._now(), limit_ns))

    def leave(self, job: TaskJob) -> None:
        """Cancels the request of ``enter``, whether it waits or has its slot. Idempotent."""
        if self._slot_of(job) is not None or job.number in self._preempted or job.number in self._passed:
            self.release(job, outcome="failed")
        elif job.state is JobState.WAITING:
            self._queue.note(job, self._now(), "cancelled by its caller")
            self._queue.remove(job)
            self._end(job)
            self._decide(self._now())

    def release(self, job: TaskJob, *, outcome: Outcome = "ended") -> int:
        """Gives a slot back; the next in the order gets it.

        Args:
            job: Whose slot.
            outcome: Learns the duration of its model from the time that it was held.

        Returns:
            When that was, on the dispatcher's clock.

        Raises:
            InvalidArgument: It has no slot, or gave it back already.
        """
        now_ns = self._now()
        passing = job.passing
        if passing is not None:
            passing.job = job.passing = None
            self._passing_count -= 1
            self._passed_count += 1
            self._learn(job, now_ns, outcome)
            return now_ns
        slot = self._slot_of(job)
        if slot is not None:
            self._learn(job, now_ns, outcome)
            slot.job = None
            if job.frame is not None:
                job.frame.stop(now_ns, can_preempt=slot.has_boundaries)
                self._blocking.ended(job.frame, slot)
        elif self._passed.pop(job.number, None) is not None:
            pass  # It had no slot here.
        elif self._preempted.pop(job.number, None) is None:
            raise InvalidArgument("scheduler: a slot was given back that is not held")
        else:
            self._queue.remove(job)  # The device was done with it before it was preempted.
        job.state = JobState.ENDED
        self._jobs.pop(job.number, None)
        if self._jobs:  # Otherwise nothing waits, and nothing runs here.
            self._decide(now_ns)
        return now_ns

    def _learn(self, job: TaskJob, now_ns: int, outcome: Outcome) -> None:
        if job.model is None or outcome == "failed" or job.was_preempted:
            return
        held_ns = max(0, now_ns - job.started_ns)
        if not job.has_preempted:
            self._estimates.observe(job.model, held_ns, "none" if outcome == "ended" else "at_least")
        elif outcome == "ended":
            # Part of it went by until the job that it preempts came to a boundary.
            self._estimates.observe(job.model, held_ns, "at_most")

    def _slot_of(self, job: Job) -> DeviceSlot | None:
        for slot in self._slots:
            if slot.job is job:
                return slot
        return None

    def change_priority(self, job: Job, priority: Priority) -> bool:
        """Changes the class of a waiting job; False if it does not wait any more."""
        if not isinstance(priority, Priority):
            raise InvalidArgument(f"scheduler: expected a Priority, got {priority!r}")
        now_ns = self._now()
        changed = self._queue.change_priority(job, priority, now_ns)
        self._decide(now_ns)
        return changed

    def hasten(self, job: Job, priority: Priority, urgent_ns: int) -> None:
        """Raises the class and the urgency of a job to those of one that waits for it, where they are higher.

        Args:
            job: Whether it waits or has its slot.
            priority: The class of the other.
            urgent_ns: When it must be done for the other to be in time; ``NEVER_NS`` for no matter when.
        """
        rank, urgent_ns = max(job.rank, int(priority)), min(job.urgent_ns, urgent_ns)
        is_same = rank == RESERVED or (rank, urgent_ns) == (job.rank, job.urgent_ns)
        if is_same or job.state is JobState.ENDED:
            return
        now_ns = self._now()
        if job.state is JobState.RUNNING:
            job.sort_into(rank, urgent_ns)
            return
        self._queue.sort_into(job, now_ns, rank=rank, urgent_ns=urgent_ns)
        self._queue.note(job, now_ns, "lent the urgency of one that waits for it")
        self._decide(now_ns)

    def _decide(self, now_ns: int) -> None:
        queue = self._queue
        if not queue.slot_of and (queue.reserved is None or not len(queue.reserved)):
            for slot in self._slots:
                if slot.job is not None:
                    break
            else:
                return  # Nothing waits and nothing runs. A loop, since a generator takes as long as all the rest of a release.
        has_looked_again = False
        for left_count in range(1 + PREEMPTED_MAX * len(self._slots), -1, -1):
            has_preempted = False
            if self._can_preempt:
                # Not in the last rounds, which start what others were preempted for.
                may_preempt = left_count > 1 and len(self._preempted) < PREEMPTED_MAX * len(self._slots)
                for slot in self._slots:
                    slot.can_preempt = may_preempt
            if self._keeps_slot:  # In the loop: what was just started counts.
                self._queue.low_left = self._low_left(now_ns)
            for action in self._policy.decide(now_ns, self._queue, self._slots):
                self._apply(action, now_ns)
                has_preempted = has_preempted or isinstance(action, Preempt)
            is_idle = len(queue) > 0 and any(slot.job is None for slot in self._slots)
            if not has_preempted and (not is_idle or has_looked_again):
                return
            # Again: there is a free slot for the one that it was taken for, or for what was planned anew just now.
            has_looked_again = not has_preempted

    def _start_unless_kept(
        self, now_ns: int, queue: PlannedQueue, slots: Sequence[DeviceSlot], job: Job
    ) -> Start | None:
        """As ``start_immediately``, for a device with a slot that is kept from LOW jobs."""
        if job.priority > Priority.LOW:
            self._urgent_ns = now_ns
        elif self._low_left(now_ns) <= 0:
            return None
        return start_immediately(now_ns, queue, slots, job)

    def _low_left(self, now_ns: int) -> int:
        """The number of LOW jobs that may start now. One that may not starts when another one has ended, at the latest."""
        if now_ns - self._urgent_ns >= KEPT_NS:
            return len(self._slots)
        held = sum(slot.job is not None and slot.job.priority == Priority.LOW for slot in self._slots)
        return len(self._slots) - 1 - held

    def _record(self, action: Action, now_ns: int) -> None:
        if self._trace is not None:
            self._trace(now_ns, action)
        if is_tracing():
            with section("LR_PE", f"scheduler: {described(action)}"):
                pass  # A moment, and no stretch.

    def _apply(self, action: Action, now_ns: int) -> None:
        self._record(action, now_ns)
        if isinstance(action, Start):
            job = action.job
            assert isinstance(job, TaskJob), OWN
            self._queue.remove(job)
            self._start(job, action.slot, now_ns)
        elif isinstance(action, Preempt):
            self._preempt(action.slot, now_ns)
        else:
            self._abort(action, now_ns)

    def _start(self, job: TaskJob, slot: DeviceSlot, now_ns: int) -> None:
        job.state = JobState.RUNNING
        slot.job = job
        slot.ends_ns = now_ns + job.durations_ns[0]
        if job.frame is not None:
            self._blocking.starts(job.frame, slot, now_ns)
            job.frame.start(now_ns)
        if self._preempted and self._preempted.pop(job.number, None) is not None:
            self._taken.discard(slot.index)
            return  # Its task waits for the device, which continues with it.
        job.has_run = True
        job.device = 0
        job.started_ns = now_ns
        if self._taken:
            job.has_preempted = slot.index in self._taken
            self._taken.discard(slot.index)
        if job.event is not None:
            job.wake()

    def _preempt(self, slot: DeviceSlot, now_ns: int) -> None:
        """Yields the slot to another job: the device notices that job's arrival, and this job waits at the device."""
        job = slot.job
        assert isinstance(job, TaskJob), OWN
        slot.job = None
        if job.frame is not None:
            job.frame.stop(now_ns, can_preempt=True)
        job.state = JobState.WAITING
        if not job.is_launched:
            if job.has_preempted:  # The other job takes its place beside the one that it preempted.
                job.has_preempted = False
                self._taken.add(slot.index)
            self._queue.add(job, now_ns)
            job.has_run = False  # Not before: what comes back is not rejected.
            return
        self._counts["preempted"] += 1
        job.was_preempted = True
        job.durations_ns = (max(1, slot.ends_ns - now_ns),)
        job.least_ns = (1,)  # Only the device knows the progress.
        job.shortest_ns = 1
        self._preempted[job.number] = job
        self._taken.add(slot.index)
        self._queue.add(job, now_ns)

    def _abort(self, action: Abort, now_ns: int) -> None:
        job = action.job
        assert isinstance(job, TaskJob), OWN
        if job.state is JobState.RUNNING:
            # The execution notifies the caller, and its slot stays held until the device is done.
            self._counts["overran"] += 1
            job.state = JobState.ENDED
        elif job.state is JobState.WAITING:
            self._queue.remove(job)
            if job.frame is not None and job.rank == RESERVED:
                assert self._queue.reserved is not None, "it waited there"
                ahead_ns = self._queue.reserved.ahead_ns(job)
                self._blocking.rejects(job.frame, job.shortest_ns, job.deadline_ns, now_ns, ahead_ns=ahead_ns)
            if job.number in self._preempted:
                job.state = JobState.ENDED  # The device still has it: it ends when the device has answered.
                return
            job.reason = action.reason
            self._end(job)
            job.wake()

    def _end(self, job: Job) -> None:
        job.state = JobState.ENDED
        self._jobs.pop(job.number, None)

    def statistics(self) -> QueueStatistics:
        """Counts of the ready queue and of what ran."""
        self._plan_unplanned()
        found, passed = self._queue.statistics(), self._passed_count
        return replace(found, entered=found.entered + passed, started=found.started + passed)

    @property
    def busy_count(self) -> int:
        """Number of slots that a job holds; of frames that the device orders, one counts for each slot at most."""
        return min(sum(s.job is not None for s in self._slots) + len(self._passed), len(self._slots))

    def counts(self) -> dict[str, int]:
        """Numbers of jobs that were ``preempted`` for others, that ``overran`` their deadline at the device, and that were
        ``probed``: begun although an estimate spoke against it."""
        return dict(self._counts)

    def explain(self, job: Job | None = None) -> str:
        """The state of a job with the reason, or the jobs that hold the slots and the first waiting ones, in lines of text."""
        self._plan_unplanned()
        now_ns = self._now()
        if job is not None:
            return self._queue.explain(job, now_ns)
        lines = held_text(self._slots, self._preempted.values(), self._passed.values(), now_ns)
        waiting = sorted((w for w in self._jobs.values() if w.state is JobState.WAITING), key=lambda w: w.key)
        lines += [self._queue.explain(w, now_ns) for w in waiting[:EXPLAINED_MAX]]
        return "\n".join(lines)
