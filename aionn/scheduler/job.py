"""The words of scheduling: a job, a device slot that runs it, and the actions that a decision consists of.

Owns the records that policies read and shells keep: they are plain data without behaviour, so that a policy can be a function of
them.

Invariants:
1. A job is in one state at a time: waiting, running, or ended; only a shell changes it, by applying actions.
2. A slot runs one job at a time. A device has one or several.

Source: the lifecycle of an execution in the NN HAL 1.3 (priority, deadline, missed deadlines transient and persistent).
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Sequence

import anyio
import msgspec

from aionn.errors import MissedDeadline, ResourceExhausted
from aionn.hal import TIME_MAX_NS, Priority, duration_text, passed_before_start
from aionn.scheduler.bandwidth import Frame

__all__ = [
    "EXPLAINED_MAX",
    "NEVER_NS",
    "RESERVED",
    "UNPLANNED",
    "Abort",
    "Action",
    "ClientJob",
    "DeviceSlot",
    "Preempt",
    "Reason",
    "Start",
    "TaskJob",
    "Job",
    "JobState",
    "deadline_text",
    "described",
    "error_of",
    "held_text",
    "job_text",
    "new_task_job",
    "unplanned_job",
]

NEVER_NS = TIME_MAX_NS
"""A duration on a device that cannot run the job, and a deadline that does not come."""

EXPLAINED_MAX = 16
"""Number of waiting jobs that an explanation lists."""

RESERVED = int(Priority.HIGH) + 1
"""The rank of frames of reserved streams: above all priorities, which are best effort."""


class JobState(enum.Enum):
    """The state of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Reason(enum.Enum):
    """The reason for a rejection or an abort."""

    EXPIRED = "its deadline has come"
    TOO_LATE = "it cannot end in time any more"
    IMPOSSIBLE = "even an idle device could not end it in time"
    DISPLACED = "others that wait fill the time until its deadline"
    OVERRAN = "it ran past its deadline"
    FULL = "too many wait"
    TOO_LONG = "it takes longer than the reserved frames of the device can wait"
    UNRESERVED = "its stream has reserved no time for it, and as best effort it would delay reserved frames for too long"
    CANCELLED = "cancelled by the caller"


class Job:
    """One execution or preparation, as a policy sees it. Shells add what they need in classes of their own.

    Attributes:
        number: Order of arrival.
        priority: Its class, as the caller or a follower asked for it.
        deadline_ns: Absolute; ``NEVER_NS`` for none.
        arrival_ns: When it came.
        durations_ns: Per device, what is left of it there, as expected; ``NEVER_NS`` where it cannot run.
        least_ns: Per device, what no execution takes less than, for where the time left is too short for ``durations_ns``; None
            where both are the same.
        shortest_ns: The least of these: with less time left than that it is certain to be late.
        urgent_ns: The time by which it is sorted within its class: its deadline, or the time from a follower's deadline if that is
            sooner.
        rank: The class that it is sorted into: its priority, or more once it has aged; ``RESERVED`` for a reserved frame.
        key: Its place in the order; the least goes first.
        device: The device that holds its intermediate results; -1 before its first start.
        state: Where it is.
        has_run: Whether it was ever started.
        frame: The frame of its stream's reservation; None for a job without a reservation.
        owner: The client that it belongs to, where there are several; None otherwise.
    """

    __slots__ = (
        "arrival_ns",
        "deadline_ns",
        "device",
        "durations_ns",
        "frame",
        "has_run",
        "key",
        "least_ns",
        "number",
        "priority",
        "rank",
        "shortest_ns",
        "state",
        "urgent_ns",
    )

    owner: Hashable = None

    def __init__(
        self,
        number: int,
        *,
        priority: Priority,
        deadline_ns: int | None,
        arrival_ns: int,
        durations_ns: Sequence[int],
        least_ns: Sequence[int] | None = None,
        urgent_ns: int | None = None,
    ) -> None:
        self.number = number
        self.priority = priority
        self.deadline_ns = NEVER_NS if deadline_ns is None else deadline_ns
        self.arrival_ns = arrival_ns
        self.durations_ns = durations_ns
        self.least_ns = least_ns
        self.shortest_ns = min(durations_ns if least_ns is None else least_ns)
        self.urgent_ns = self.deadline_ns if urgent_ns is None else min(urgent_ns, self.deadline_ns)
        self.rank = int(priority)
        self.key = (-self.rank, self.urgent_ns, number)
        self.device = -1
        self.state = JobState.WAITING
        self.has_run = False
        self.frame: Frame | None = None

    def reserve(self, frame: Frame) -> None:
        """Makes it a frame of a reserved stream, before it enters a queue."""
        self.frame = frame
        if frame.is_reserved:
            self.sort_into(RESERVED, frame.urgent_ns)

    def leave_reserved(self) -> None:
        """Sorts it into its priority's class, since its frame is not reserved any more. It must not be in a queue at that time."""
        self.sort_into(int(self.priority), self.deadline_ns)

    def sort_into(self, rank: int, urgent_ns: int) -> None:
        """Gives it another place in the order. It must not be in a queue at that time."""
        self.rank = rank
        self.urgent_ns = urgent_ns
        self.key = (-rank, urgent_ns, self.number)

    def key_in(self, rank: int) -> tuple[int, int, int]:
        """Its place in the order if it were in a class."""
        return (-rank, self.urgent_ns, self.number)

    def __repr__(self) -> str:
        deadline = "none" if self.deadline_ns == NEVER_NS else f"{self.deadline_ns} ns"
        frame = "" if self.frame is None else f", {self.frame.described()}"
        return f"<Job {self.number}: {self.priority.name}, deadline {deadline}, {self.state.value}{frame}>"


class TaskJob(Job):
    """A job of a task, which sleeps on ``event`` while the job waits.

    Its states, without and with ``is_launched``: waiting without, it is in the queue alone; running without, it has a slot and its
    task has not resumed yet; running with, it is at the device; waiting with, it is preempted there. One that has ended may still
    have a slot, or be preempted there. One that loses its slot before its launch waits as before: the device does not have it.

    Attributes:
        declared_ns: The duration that its driver declares, of one that passes through; None if it declares none.
        is_launched: Whether its task has taken its slot, so that the device has the job.
        model: The key by which its duration is learnt.
        passing: The slot that it passes through now; None where it does not, or a policy has seen it.
        reason: The reason for its rejection, if it was rejected while it waited.
        started_ns: The time of its first start, or of its last one before it was launched.
        has_preempted: Whether it was sent to the device beside a job that it preempts there.
        is_unplanned: Whether it passes through a free slot and no policy has seen it, so that it can serve again. It counts as
            running all the time.
        was_preempted: Whether it waited at the device for another job, so that its timing carries no information.
    """

    __slots__ = (
        "declared_ns",
        "event",
        "has_preempted",
        "is_launched",
        "is_unplanned",
        "model",
        "passing",
        "reason",
        "started_ns",
        "was_preempted",
    )

    # Set by ``new_task_job``, not by a constructor: forwarding nine arguments takes a tenth of the time that a start takes.
    declared_ns: int | None
    event: anyio.Event | None
    model: Hashable
    passing: DeviceSlot | None
    reason: Reason | None
    started_ns: int
    has_preempted: bool
    is_launched: bool
    is_unplanned: bool
    was_preempted: bool

    def wake(self) -> None:
        """Wakes the task that waits for the job, if one does."""
        if self.event is not None:
            self.event.set()

    def plan(self, arrival_ns: int, expected_ns: int, least_ns: int) -> None:
        """Makes one that runs unplanned a job that a policy can compare with others."""
        self.is_unplanned = False
        self.arrival_ns = arrival_ns
        self.sort_into(self.rank, self.deadline_ns)
        self.durations_ns = (expected_ns,)
        self.least_ns = None if least_ns == expected_ns else (least_ns,)
        self.shortest_ns = least_ns


def new_task_job(
    number: int,
    priority: Priority,
    deadline_ns: int | None,
    now_ns: int,
    model: Hashable,
    expected_ns: int,
    least_ns: int,
    urgent_ns: int | None = None,
) -> TaskJob:
    """A job that has not started, of a model with these durations."""
    job = TaskJob(
        number,
        priority=priority,
        deadline_ns=deadline_ns,
        arrival_ns=now_ns,
        durations_ns=(expected_ns,),
        least_ns=None if least_ns == expected_ns else (least_ns,),
        urgent_ns=urgent_ns,
    )
    job.model = model
    job.declared_ns = job.event = job.reason = job.passing = None
    job.started_ns = 0
    job.has_preempted = job.is_launched = job.was_preempted = job.is_unplanned = False
    return job


def unplanned_job(number: int, priority: Priority, model: Hashable) -> TaskJob:
    """A job that passes through a free slot: its times and durations are set when it does."""
    job = new_task_job(number, priority, None, 0, model, 1, 1)
    job.is_unplanned = job.is_launched = True
    job.state = JobState.RUNNING
    return job


class DeviceSlot:
    """One slot of a device.

    Attributes:
        index: Its number among all slots.
        device: Index of its device.
        job: The job that runs; None when free.
        ends_ns: When the running job is expected to end.
        is_stopping: Whether the running job was asked to stop at its next boundary.
        can_preempt: Whether best-effort jobs may be preempted for each other: a shell may limit what waits at the device.
        has_boundaries: Whether the device can preempt jobs between operations.
        is_up: Whether the device lives.
        backlog_ns: The device time that the reserved frames which wait for it need.
    """

    __slots__ = (
        "backlog_ns",
        "can_preempt",
        "device",
        "ends_ns",
        "has_boundaries",
        "index",
        "is_stopping",
        "is_up",
        "job",
    )

    def __init__(self, index: int, device: int, *, can_preempt: bool = True) -> None:
        self.index = index
        self.device = device
        self.job: Job | None = None
        self.ends_ns = 0
        self.is_stopping = False
        self.can_preempt = self.has_boundaries = can_preempt
        self.is_up = True
        self.backlog_ns = 0

    def rest_ns(self, now_ns: int) -> int:
        """The time from which it is free for best effort, unless the job that runs is preempted."""
        is_busy = self.job is not None and self.job.state is not JobState.ENDED
        return (self.ends_ns if is_busy and self.ends_ns > now_ns else now_ns) + self.backlog_ns

    def __repr__(self) -> str:
        runs = "down" if not self.is_up else "free" if self.job is None else f"runs {self.job!r}"
        return f"<DeviceSlot {self.index} of device {self.device}: {runs}>"


class Start(msgspec.Struct, frozen=True, gc=False):
    """Run a waiting job on a free slot."""

    job: Job
    slot: DeviceSlot


class Preempt(msgspec.Struct, frozen=True, gc=False):
    """Stop a slot's job at its next boundary, for another's sake; the rest of it waits again."""

    slot: DeviceSlot
    by: Job


class Abort(msgspec.Struct, frozen=True, gc=False):
    """Abort a job, running or not; a running one leaves its slot at the next boundary."""

    job: Job
    reason: Reason


Action = Start | Preempt | Abort


def described(action: Action) -> str:
    """An action, in words."""
    match action:
        case Start():
            return f"start {action.job} on slot {action.slot.index}"
        case Preempt():
            return f"preempt {action.slot.job} for {action.by}"
        case Abort():
            return f"abort {action.job}: {action.reason.value}"


def deadline_text(deadline_ns: int | None, now_ns: int) -> str:
    """A deadline from now, for people; None and ``NEVER_NS`` mean no deadline."""
    if deadline_ns is None or deadline_ns == NEVER_NS:
        return "no deadline"
    left_ns = deadline_ns - now_ns
    return (
        f"deadline in {duration_text(left_ns)}" if left_ns >= 0 else f"deadline {duration_text(-left_ns)} ago"
    )


def job_text(job: Job, now_ns: int) -> str:
    """A job as in its ``repr``, with its deadline from now, and the class and urgency that followers or its age have raised."""
    rank = Priority(job.rank).name if job.rank < RESERVED else job.priority.name
    raised = "" if rank == job.priority.name else f", raised to {rank}"
    urgent = (
        ""
        if job.urgent_ns == job.deadline_ns
        else f", as urgent as with a {deadline_text(job.urgent_ns, now_ns)}"
    )
    frame = "" if job.frame is None else f", {job.frame.described()}"
    return (
        f"<Job {job.number}: {job.priority.name}{raised}, {deadline_text(job.deadline_ns, now_ns)}{urgent}, "
        f"{job.state.value}{frame}>"
    )


def held_text(
    slots: Sequence[DeviceSlot], preempted: Iterable[Job], passed: Iterable[Job], now_ns: int
) -> list[str]:
    """The jobs that have slots of a device, and those that are there without one, in lines of text."""
    lines = [
        f"slot {slot.index}: {'free' if slot.job is None else job_text(slot.job, now_ns)}" for slot in slots
    ]
    lines += [f"preempted at the device: {job_text(job, now_ns)}" for job in preempted]
    return lines + [f"at the device: {job_text(job, now_ns)}" for job in passed]


def error_of(
    job: Job, reason: Reason, now_ns: int, *, has_waited: bool
) -> MissedDeadline | ResourceExhausted:
    """The error of a job that is rejected, after it has waited or on arrival."""
    if reason is Reason.FULL:
        return ResourceExhausted(f"scheduler: {reason.value}", transient=True)
    if reason is Reason.TOO_LONG:
        message = f"scheduler: {reason.value}: {duration_text(job.durations_ns[0])}"
        has_deadline = job.deadline_ns != NEVER_NS
        return MissedDeadline(message) if has_deadline else ResourceExhausted(message, transient=True)
    if reason is Reason.IMPOSSIBLE:
        needed, left_ns = job.shortest_ns, job.deadline_ns - now_ns
        message = (
            f"scheduler: even an idle device needs {duration_text(needed)}, and {duration_text(max(0, left_ns))} are left"
            f" before the deadline: too late by {duration_text(needed - left_ns)}"
        )
        return MissedDeadline(message, transient=False)
    if reason is Reason.EXPIRED and not has_waited:
        return passed_before_start("scheduler", now_ns - job.deadline_ns)
    if reason is Reason.EXPIRED:
        return MissedDeadline(
            "scheduler: the deadline passed while the execution waited for the device", transient=True
        )
    return MissedDeadline(f"scheduler: {reason.value}", transient=True)


UNPLANNED = -1
"""The number of a job that no policy has seen yet."""


class ClientJob(Job):
    """A job of one of several clients. A shell's own class wakes the thread or the task that waits for it.

    A job that gets a free slot on arrival is never compared with others, so the attributes of ``Job`` that a policy reads are set
    only when a job has to wait.

    Args:
        priority: Its class.
        deadline_ns: Absolute; None means no deadline.
        owner: The client, or its ``Connection``.
        model: The key by which its duration is learnt; None to learn nothing.

    Attributes:
        has_given_turn: Whether it has begun and given its slot to others: see ``SharedSlots.give_turn``.
        is_preempted: Whether a more urgent job needs its slot: it must call ``SharedSlots.suspend`` at its next boundary.
        slot: The index of the slot that it holds; None means no slot.
        turns_ahead: Of one that has given its turn, the number of others that may still start before it.
    """

    __slots__ = (
        "_arrival",
        "_is_behind",
        "_is_suspended",
        "_since_ns",
        "has_given_turn",
        "is_preempted",
        "model",
        "owner",
        "slot",
        "turns_ahead",
    )

    def __init__(
        self,
        priority: Priority,
        deadline_ns: int | None,
        *,
        owner: Hashable = None,
        model: Hashable = None,
    ) -> None:
        self.number = UNPLANNED
        self.priority = priority
        self.deadline_ns = NEVER_NS if deadline_ns is None else deadline_ns
        self.owner = owner
        self.model = model
        self.is_preempted = False
        self.has_given_turn = False
        self.turns_ahead = 0
        self.frame = None
        self.slot: int | None = None
        self._arrival = 0
        self._is_behind = False
        self._is_suspended = False
        self._since_ns = 0

    def plan(self, number: int, now_ns: int, expected_ns: int) -> None:
        """Makes it a job that a policy can compare with others."""
        frame = self.frame
        # A driver rejects no job before its deadline, so the least duration is 1 ns whatever was learnt.
        super().__init__(
            number,
            priority=self.priority,
            deadline_ns=self.deadline_ns,
            arrival_ns=now_ns,
            durations_ns=(expected_ns,),
            least_ns=(1,),
        )
        if frame is not None:
            self.reserve(frame)

    def urgency(self) -> tuple[int, int]:
        """Its place among the jobs of its client and class."""
        return (-1 if self.has_given_turn else self.deadline_ns), self._arrival

    def start(self) -> None:
        """Called when it starts: with a slot, or, where its deadline came first, without one. Must be quick."""

    def preempt(self) -> None:
        """Called when ``is_preempted`` has become True. Must be quick."""
