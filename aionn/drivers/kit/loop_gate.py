"""A device's slots for the tasks of an event loop: the counterpart of ``gate``, which serves threads.

Owns the sleeping and waking of tasks, and their deadlines while they wait. All jobs wait in one queue, whichever client they work
for: ``aionn.scheduler.shared_slots`` with the driver's policy orders it, as in ``gate``.

Invariants:
1. No more than ``slot_count`` jobs have a slot concurrently; a cancelled or late one never keeps one.
2. The queue is bounded, in all by ``scheduler.planned_queue.WAITING_MAX`` and for each client's process: further jobs are rejected
   with RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

from collections.abc import Hashable

import anyio

from aionn.errors import MissedDeadline
from aionn.hal import Priority
from aionn.interpreter import RunControl
from aionn.scheduler.job import ClientJob
from aionn.scheduler.ready_queue import Policy
from aionn.scheduler.reservations.calls import reserved_call
from aionn.scheduler.shared_slots import SharedSlots

__all__ = ["LoopControl", "LoopGate", "left_s", "loop_now_ns"]


def loop_now_ns() -> int:
    """The running loop's time in nanoseconds: CLOCK_MONOTONIC, or a virtual clock's."""
    return round(anyio.current_time() * 1e9)


def left_s(time_ns: int | None) -> float | None:
    """Seconds until then, as anyio's time-outs want them; None means no limit."""
    return None if time_ns is None else max(0.0, (time_ns - loop_now_ns()) / 1e9)


class LoopJob(ClientJob):
    """A job of a task. The task sleeps on ``woken`` while the job waits, and on ``interrupted`` while the device computes."""

    __slots__ = ("interrupted", "woken")

    def __init__(
        self, priority: Priority, deadline_ns: int | None, *, owner: Hashable, model: Hashable
    ) -> None:
        super().__init__(priority, deadline_ns, owner=owner, model=model)
        self.woken = anyio.Event()
        self.interrupted = anyio.Event()

    def start(self) -> None:
        self.woken.set()

    def preempt(self) -> None:
        self.interrupted.set()


class LoopControl(RunControl):
    """The conditions that may end or preempt an execution, and its slot.

    Args:
        gate: The device's slots.
        priority: Against other jobs.
        deadline_ns: Absolute; None means no deadline.
        loop_timeout_ns: The limit for each WHILE.
        owner: The client; equals of several owners take turns.
        model: The key by which its duration is learnt; None to learn nothing.

    Attributes:
        job: Its place in the device's queue.
        reserved: The frame of a reservation that it is, by the context in which it was made; None for best effort.
    """

    __slots__ = ("_gate", "_has_begun", "_was_cancelled", "job", "reserved")

    def __init__(
        self,
        gate: LoopGate,
        *,
        priority: Priority = Priority.MEDIUM,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        owner: Hashable = None,
        model: Hashable = None,
    ) -> None:
        super().__init__(
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            is_cancelled=lambda: self._was_cancelled,
            now=loop_now_ns,
        )
        self.job = LoopJob(priority, deadline_ns, owner=owner, model=model)
        self.reserved = reserved_call.get()
        self._gate = gate
        self._has_begun = False
        self._was_cancelled = False

    @property
    def slot(self) -> int | None:
        """The number of the slot that the job has; None while it waits."""
        return self.job.slot

    @property
    def was_cancelled(self) -> bool:
        """Whether the caller was cancelled. May be read by any thread."""
        return self._was_cancelled

    @property
    def must_stop(self) -> bool:
        """Whether the job must stop at its next boundary: its caller was cancelled, or it is preempted."""
        return self._was_cancelled or self.job.is_preempted

    def cancel(self) -> None:
        """Records that the caller was cancelled. The job ends where the device can stop, and immediately while it waits."""
        self._was_cancelled = True
        self._gate.leave(self.job)
        self.job.woken.set()
        self.job.interrupted.set()

    async def sleep_until(self, time_ns: int) -> bool:
        """Sleeps until then and returns True; returns False as soon as the job must stop."""
        if self.must_stop:
            return False
        self.job.interrupted = anyio.Event()
        with anyio.move_on_after(left_s(time_ns)) as scope:
            await self.job.interrupted.wait()
        return scope.cancelled_caught

    async def pause_if_preempted(self) -> None:
        """Gives the slot to the job that preempted this one, and waits for a slot again. Without effect where none did.

        Raises:
            MissedDeadline: The deadline passed while waiting.
            GeneralFailure: The caller was cancelled.
        """
        if self.job.is_preempted:
            await self._gate.pause(self)

    def check_start(self, name: str) -> None:
        """Raises as ``check``, with a persistent ``MissedDeadline`` while the execution has not begun."""
        if not self._has_begun and self.deadline_ns is not None and self.now() >= self.deadline_ns:
            raise MissedDeadline(f"{name}: the deadline passed before the execution's start", transient=False)
        self.check()

    def begin(self) -> None:
        """Records that the execution has begun: from now on a missed deadline is transient."""
        self._has_begun = True


class LoopGate:
    """A device's slots, for the tasks of one event loop.

    Args:
        slot_count: Number of executions that run concurrently.
        name: Names the device in errors.
        policy: The order of the jobs.
        can_preempt: Whether the driver calls ``pause_if_preempted`` between operations, or anywhere.
    """

    def __init__(self, slot_count: int, *, name: str, policy: Policy, can_preempt: bool) -> None:
        self._name = name
        self._slots = SharedSlots(
            slot_count, name=name, now=loop_now_ns, can_preempt=can_preempt, policy=policy
        )

    async def acquire(self, control: LoopControl) -> None:
        """Waits for a slot. The caller gives it back with ``release``.

        Raises:
            MissedDeadline: The deadline passed: persistent if the execution has not begun, transient if it had.
            GeneralFailure: The caller was cancelled.
            ResourceExhausted: Too many jobs wait already.
        """
        control.check_start(self._name)
        if control.reserved is None:
            self._slots.enter(control.job)
        else:
            self._slots.enter_reserved(control.job, control.reserved)
        await self._wait(control)
        control.begin()

    async def _wait(self, control: LoopControl) -> None:
        job = control.job
        try:
            while job.slot is None:
                # The queue also wakes a job without a slot, when its deadline has come: the check raises then.
                control.check_start(self._name)
                with anyio.move_on_after(left_s(control.deadline_ns)):
                    await job.woken.wait()
            control.check_start(self._name)
        except BaseException:
            self.leave(job)
            self.release(control)
            raise

    async def pause(self, control: LoopControl) -> None:
        """Gives a preempted job's slot to the more urgent one, and waits for a slot again. Raises as ``acquire``."""
        control.job.woken = anyio.Event()
        self._slots.suspend(control.job)
        await self._wait(control)

    def leave(self, job: LoopJob) -> None:
        """Removes a job that waits. Others are ignored."""
        self._slots.leave(job)

    def release(self, control: LoopControl) -> None:
        """Gives a slot back; the next in the order gets it. Without effect for a job that has none."""
        self._slots.release(control.job)

    def forget(self, model: Hashable) -> None:
        """Drops what was learnt of a model that never comes again."""
        self._slots.forget(model)
