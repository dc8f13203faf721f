"""A device's slots for the threads of its driver: the counterpart of ``loop_gate``, which serves tasks.

Owns the slots' lock, the sleeping and waking of threads, and the threads that run jobs. A burst's listener thread takes a slot and
runs on itself; other jobs are run by the gate's own threads. All of them wait in one queue, whichever client they work for:
``aionn.scheduler.shared_slots`` orders it by the policy of the application.

Invariants:
1. No more than ``slot_count`` jobs run concurrently.
2. A slot that becomes free goes to the first in the order; no job overtakes by being on another path.
3. Calls without the interpreter's lock (``fmq.Answers``) take slots only while no other job holds one or waits. The first other
   job closes their way: from then on each call that still runs is a job like any other, until it is released.
4. The queue is bounded, in all by ``scheduler.planned_queue.WAITING_MAX`` and for each client's process: further jobs are rejected
   with RESOURCE_EXHAUSTED.
5. Frames of reservations (``scheduler.reservations.calls``) enter the same queue, which knows their class.
6. A preempted job keeps its thread, which sleeps until the job is started again; others run on threads of their own. Where
   ``SUSPENDED_MAX`` jobs of a client's process sleep in this way, a further one runs to its end. So does one that would give its
   turn to others while ``TURNS_MAX`` jobs sleep.
7. A withdrawn job keeps no place. One that sleeps after it has given its turn is woken without a slot, to end.

The queue of the runtime's dispatcher orders the jobs of one application; this one orders what several clients sent.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import TypeVar

from aionn.drivers.kit.threads.classes import serving
from aionn.errors import DeviceUnavailable, ResourceExhausted
from aionn.hal import Priority
from aionn.interpreter import RunControl
from aionn.platform.threads import start_thread
from aionn.scheduler.job import ClientJob
from aionn.scheduler.reservations.calls import ReservedCall, reserved_call
from aionn.scheduler.shared_slots import SharedSlots
from fmq import Permit, Slots

__all__ = ["GateControl", "SlotGate", "SubmittedJob"]

SUSPENDED_MAX = 16
"""Most jobs of one process that are suspended, each with a thread: a class preempts lower ones, of which one job is suspended for
each slot, as a rule. Without a limit a client could have thousands: each is preempted, and then a more urgent one of its class
is started before it is."""

TURNS_MAX = 768
"""Most jobs that sleep because they have given their turns to those of other processes, each with a thread: one of each class for
as many processes as a server has clients by default. With fewer, the jobs of further processes would each run to their end while
all others wait."""

SPARE_MAX = 8
"""Threads that are kept although no job needs them now: to start one takes as long as some pieces of a job."""

_T = TypeVar("_T")


class ThreadJob(ClientJob):
    """A job of a thread, which sleeps until it is started."""

    __slots__ = ("_started", "away_ns")

    def __init__(
        self, priority: Priority, deadline_ns: int | None, *, owner: Hashable, model: Hashable
    ) -> None:
        super().__init__(priority, deadline_ns, owner=owner, model=model)
        self._started: threading.Lock | None = None
        self.away_ns = 0

    def start(self) -> None:
        if self._started is not None:
            self._started.release()

    def prepare_to_sleep(self) -> threading.Lock:
        """The lock that ``start`` releases; to be called with the gate's lock held, before the job can be started."""
        self._started = started = threading.Lock()
        started.acquire()
        return started


class SubmittedJob(ThreadJob):
    """A job that any thread of the gate can begin."""

    __slots__ = ("_begins", "call", "ended")

    def __init__(
        self,
        priority: Priority,
        deadline_ns: int | None,
        call: Callable[[], None],
        begins: queue.SimpleQueue[SubmittedJob | None],
        *,
        owner: Hashable,
        model: Hashable,
    ) -> None:
        super().__init__(priority, deadline_ns, owner=owner, model=model)
        self.call: Callable[[], None] | None = call
        self.ended: Callable[[], None] | None = None
        self._begins = begins

    @property
    def has_begun(self) -> bool:
        """Whether a job that waits has begun, so that its thread sleeps."""
        return self._started is not None

    def start(self) -> None:
        if self._started is not None:
            self._started.release()
        else:
            self._begins.put(self)


class _Running(threading.local):
    """By thread, the job that it runs with a slot; None for a thread without one."""

    job: ThreadJob | None = None
    since_ns = 0
    """Since when it works without having given its turn to others."""


class SlotGate:
    """A device's slots.

    Args:
        slot_count: Number of jobs that may run concurrently.
        name: Names the threads.
        now: The clock of the deadlines.
        can_preempt: Whether jobs can be preempted between operations: they must look at a ``GateControl`` there.
        executes: Whether jobs are executions, for which the threads wait under the class HIGH where real time is in use; otherwise
            they are ordinary threads.
    """

    def __init__(
        self,
        slot_count: int,
        *,
        name: str,
        now: Callable[[], int] = time.monotonic_ns,
        can_preempt: bool = False,
        executes: bool = True,
    ) -> None:
        self._lock = threading.Lock()
        self._slots = SharedSlots(slot_count, name=name, now=now, can_preempt=can_preempt)
        self._slot_count = slot_count
        self._name = name
        self._now = now
        self._running = _Running()
        self._executes = executes
        self._paused_count = 0
        self._native: Slots | None = None
        self._native_owners: dict[Hashable, tuple[Priority, Hashable]] = {}
        self._native_jobs: dict[int, ThreadJob] = {}
        self._begins: queue.SimpleQueue[SubmittedJob | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __str__(self) -> str:
        return self._name

    @property
    def has_slot(self) -> bool:
        """Whether the calling thread runs a job with a slot, and not one whose deadline has come, or that was withdrawn."""
        job = self._running.job
        return job is not None and job.slot is not None

    @property
    def waiting_count(self) -> int:
        """Number of jobs that wait for a slot."""
        return self._slots.waiting_count

    def forget(self, model: Hashable) -> None:
        """Drops what was learnt of a model that never comes again."""
        # Without the lock, which the thread that a finaliser interrupts may hold; dropping is one operation of a dict.
        self._slots.forget(model)
        self._native_owners.pop(model, None)

    @property
    def learnt_count(self) -> int:
        """Of how many models something was learnt."""
        return self._slots.learnt_count

    def slot(
        self,
        priority: Priority,
        deadline_ns: int | None,
        *,
        owner: Hashable = None,
        model: Hashable = None,
    ) -> _CallerJob:
        """A slot for the calling thread, as a context manager; entering blocks until the job is started, or its deadline comes.

        Args:
            priority: Against others.
            deadline_ns: Absolute; None means no deadline.
            owner: The client; equals of several owners take turns.
            model: The key by which its duration is learnt; None to learn nothing.
        """
        job = _CallerJob(priority, deadline_ns, owner=owner, model=model)
        job.gate = self
        return job

    def submit(
        self,
        priority: Priority,
        deadline_ns: int | None,
        call: Callable[[], None],
        *,
        owner: Hashable = None,
        model: Hashable = None,
        ended: Callable[[], None] | None = None,
    ) -> SubmittedJob:
        """Runs ``call`` on one of the gate's threads when the job is started. It must not raise. See ``slot`` for the arguments.

        Args:
            ended: Called on the same thread when the slot was given back; None calls nothing.

        Returns:
            The job, for ``withdraw``.

        Raises:
            MissedDeadline: Its reservation does not cover the frame, see ``SharedSlots.enter_reserved``.
            ResourceExhausted: Too many jobs wait already, or no thread can be started to run it.
            DeviceUnavailable: The gate is closed.
        """
        job = SubmittedJob(priority, deadline_ns, call, self._begins, owner=owner, model=model)
        job.ended = ended
        reserved = reserved_call.get()
        with self._lock:
            self._check_open()
            shortage = self._start_threads()
            if shortage is not None and len(self._threads) <= self._paused_count:
                raise shortage  # It would never begin.
            self._close_native()
            self._enter(job, reserved)
        return job

    def withdraw(self, job: SubmittedJob) -> bool:
        """Ends the wait of a job that is not wanted any more, so that what it holds is free while others have the slots. One that
        has given its turn continues without a slot, and must end then.

        Returns:
            Whether it had not begun, and never begins.
        """
        with self._lock:
            if not self._slots.leave(job):
                return False
            if job.has_begun:
                job.start()
                return False
        job.call = job.ended = None
        return True

    def _enter(self, job: ThreadJob, reserved: ReservedCall | None) -> None:
        """Called with the lock held."""
        if reserved is None:
            self._slots.enter(job)
        else:
            self._slots.enter_reserved(job, reserved)

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceUnavailable(f"{self._name}: the device is closed")

    def _start_threads(self) -> ResourceExhausted | None:
        """As many as can run concurrently, beside those that sleep in the middle of their job. Called with the lock held.

        Returns:
            Why there are fewer; None where there are enough.
        """
        for _ in range(self._slot_count + self._paused_count - len(self._threads)):
            thread = threading.Thread(target=self._work, name=f"aionn-{self._name}", daemon=True)
            try:
                start_thread(thread, self._name)
            except ResourceExhausted as e:
                return e
            self._threads.append(thread)
        return None

    def _work(self) -> None:
        if not self._executes:
            self._serve()
            return
        with serving(f"{self._name} worker"):
            self._serve()

    def _serve(self) -> None:
        while (job := self._begins.get()) is not None:
            call, job.call = job.call, None
            ended, job.ended = job.ended, None
            assert call is not None, "a job is begun once"
            self._running.job, self._running.since_ns = job, self._now()
            try:
                call()
            finally:
                self._running.job = None
                self._release(job)
                if ended is not None:
                    ended()
                # They hold arguments and results; this thread may wait for the next one without end.
                del call, job, ended
            if self._leaves():
                return

    def _leaves(self) -> bool:
        """Whether the calling thread, which has no job, is to end: many were needed while jobs slept."""
        if len(self._threads) <= self._slot_count + SPARE_MAX:
            return False
        with self._lock:
            leaves = not self._closed and (
                len(self._threads) > self._slot_count + self._paused_count + SPARE_MAX
            )
            if leaves:
                self._threads.remove(threading.current_thread())
        return leaves

    def _release(self, job: ThreadJob) -> None:
        with self._lock:
            self._slots.release(job)
            if self._closed:
                self._end_threads()
            elif self._native is not None:
                self._open_native(self._native)

    # --- Calls without the interpreter's lock ---------------------------------------------------------------------------------

    def permit(self, model: int, priority: Priority, *, owner: Hashable = None) -> Permit:
        """A permit for calls of a prepared model that take their slots by themselves. See ``slot`` for the arguments.

        Raises:
            DeviceUnavailable: The gate is closed.
        """
        with self._lock:
            self._check_open()
            if self._native is None:
                self._native = Slots(self._slot_count)
                self._open_native(self._native)
            self._native_owners[model] = priority, owner
            return Permit(self._native, model)

    def release_native(self, slot: int) -> None:
        """Releases the slot of a call that ended after its way was closed."""
        self._release(self._native_jobs.pop(slot))

    def _open_native(self, native: Slots) -> None:
        """Lets calls take slots again if no other job holds one or waits. Called with the lock held."""
        if self._slots.held_count == 0 and self._slots.waiting_count == 0:
            native.open()

    def _close_native(self) -> None:
        """Lets no call take a slot any more; those that run are jobs of the queue from now on. Called with the lock held."""
        if self._native is None:
            return
        for slot in self._native.close():
            model, began_ns = self._native.holder(slot)
            priority, owner = self._native_owners.get(model, (Priority.MEDIUM, None))
            self._native_jobs[slot] = job = ThreadJob(priority, None, owner=owner, model=model or None)
            self._slots.adopt(job, slot, began_ns or self._now())

    def control(
        self,
        *,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        is_cancelled: Callable[[], bool] | None,
    ) -> GateControl:
        """The conditions that may end or preempt the job of the calling thread, which holds a slot. See ``RunControl`` for the
        arguments.
        """
        return GateControl(
            self,
            self._running.job,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            is_cancelled=is_cancelled,
        )

    def _pause(self, job: ThreadJob) -> None:
        """Lets a more urgent job run, on another thread, and sleeps until the preempted one is started again."""
        began_ns = self._now()
        if self._sleep(
            job,
            lambda: job.is_preempted and self._slots.suspended_of(job) < SUSPENDED_MAX,
            self._slots.suspend,
        ):
            job.away_ns += self._now() - began_ns

    def give_turn_after(self, turn_ns: int) -> None:
        """Lets the jobs of other processes go first, once the job of this thread has had the only slot for so long, and sleeps
        until it is started again. To be called between short pieces of its work.
        """
        running, now_ns = self._running, self._now()
        job = running.job
        # Without the lock: one that comes now waits for a piece more.
        if job is None or not self._slots.waiting_count or now_ns - running.since_ns < turn_ns:
            return
        running.since_ns = (
            now_ns  # Where it cannot give its turn it has one more, and does not look after each piece.
        )

        def gives() -> bool:
            return job.slot is not None and self._paused_count < TURNS_MAX and self._slots.others_wait(job)

        if self._sleep(job, gives, self._slots.give_turn):
            running.since_ns = self._now()

    def _sleep(
        self, job: ThreadJob, is_due: Callable[[], bool], give_slot: Callable[[ThreadJob], None]
    ) -> bool:
        """Gives the slot of this thread's job to others, and sleeps until it is started again. Returns whether it did.

        Args:
            job: The job.
            is_due: Called with the lock held; without effect where it returns False.
            give_slot: Called with the lock held.
        """
        with self._lock:
            if not is_due():
                return False
            self._paused_count += 1
            if self._start_threads() is not None:
                # There is no thread for the other job: it waits.
                self._paused_count -= 1
                return False
            started = job.prepare_to_sleep()
            give_slot(job)
        started.acquire()
        with self._lock:
            self._paused_count -= 1
        return True

    def look(self) -> None:
        """Decides again: a frame of a reservation has used its budget, and others may wait for its slot."""
        with self._lock:
            self._slots.look()

    @property
    def has_ended(self) -> bool:
        """Whether no thread of the gate runs."""
        return not any(thread.is_alive() for thread in self._threads)

    def begin_close(self) -> None:
        """Rejects new jobs, and lets the threads end once all running and waiting jobs have ended. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close_native()
                self._end_threads()

    def close(self) -> None:
        """Rejects new jobs, lets running jobs end, and joins the threads. Waiting jobs are run first. Idempotent."""
        self.begin_close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _end_threads(self) -> None:
        """Lets the threads end if nothing holds a slot or waits for one any more. Called with the lock held."""
        if self._slots.held_count == 0 and self._slots.waiting_count == 0:
            for _ in self._threads:
                self._begins.put(None)


class GateControl(RunControl):
    """The conditions that may end or preempt a job that holds a slot of a gate; to be checked on the thread that holds it.

    Attributes:
        away_ns: The time for which it was preempted.
    """

    __slots__ = ("_gate", "_job")

    def __init__(
        self,
        gate: SlotGate,
        job: ThreadJob | None,
        *,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        is_cancelled: Callable[[], bool] | None,
    ) -> None:
        RunControl.__init__(
            self,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            is_cancelled=is_cancelled,
            now=gate._now,
        )
        self._gate = gate
        self._job = job

    @property
    def away_ns(self) -> int:
        return 0 if self._job is None else self._job.away_ns

    @property
    def priority(self) -> Priority | None:
        """The priority of the job; None on a thread without a slot."""
        return None if self._job is None else self._job.priority

    @property
    def slot(self) -> int | None:
        """The index of the job's slot; None on a thread without one."""
        return None if self._job is None else self._job.slot

    def check(self) -> None:
        """See ``RunControl``; pauses first if a more urgent job needs the slot."""
        job = self._job
        if job is not None:
            frame = job.frame
            if frame is not None and frame.is_reserved and self._gate._now() > (frame.exhausted_ns() or 0):
                self._gate.look()
            if job.is_preempted:
                self._gate._pause(job)
        RunControl.check(self)


class _CallerJob(ThreadJob):
    """A job of the calling thread, which holds a slot within its context."""

    __slots__ = ("gate",)

    gate: SlotGate

    def __enter__(self) -> None:
        gate = self.gate
        reserved = reserved_call.get()
        started: threading.Lock | None = None
        with gate._lock:
            gate._check_open()
            if gate._native is not None:
                gate._close_native()
            if reserved is not None or not gate._slots.acquire_nowait(self):
                started = self.prepare_to_sleep()
                gate._enter(self, reserved)
        if started is not None:
            started.acquire()
        gate._running.job = self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        gate = self.gate
        gate._running.job = None
        gate._release(self)
