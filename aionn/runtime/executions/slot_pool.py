"""The frame buffers of a burst: memory for one frame each, and the order of those that wait for one.

Owns how many users a buffer has, and which waiter gets a buffer that becomes free. ``burst`` makes the buffers; executions and the
streams of a burst take and leave them.

Invariants:
1. A buffer is taken again only when its last user has left it: the device, the execution, the consumer of a stream's result.
2. Waiters get buffers in the order in which they began to wait, except those that have no use for one now.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from aionn.errors import InvalidArgument, MissedDeadline
from aionn.hal import ExecutionResult, passed_before_start
from aionn.platform.loops import running_loop
from aionn.runtime.background import Background, Waiter
from aionn.runtime.clock import now_ns
from aionn.runtime.executions.job import JobOwner
from aionn.runtime.executions.stepping import Step
from aionn.runtime.memory.arguments import RequestArea

__all__ = ["FrameBuffer", "BurstStatistics", "SlotPool", "Waiting", "nothing"]


class FrameBuffer:
    """Memory for one frame, and how many still use it.

    Attributes:
        identifier: Its number in the burst, by which devices remember its memory.
        identifiers: The same, as requests name it.
        area: The memory.
        users: Number of users; 0 for one that is free.
        steps: The steps that are executed over the memory.
        owner: The common part of its executions.
        inputs: Keys of the inputs in the memory.
        views: Views of these.
        leave: Called at the end of each of its executions.
        successor: The one that is used in its place once its last user leaves it; None for itself.
        retire: Called then, once.
        checked: By step, the answer that was checked last: frames without timings give the same object again.
    """

    __slots__ = (
        "area",
        "checked",
        "identifier",
        "identifiers",
        "inputs",
        "leave",
        "owner",
        "retire",
        "steps",
        "successor",
        "users",
        "views",
    )

    def __init__(
        self, identifier: int, area: RequestArea, step_count: int, owner: JobOwner, inputs: Sequence[int]
    ) -> None:
        self.identifier = identifier
        self.identifiers = (identifier,)
        self.area = area
        self.users = 0
        self.steps: Sequence[Step] = ()
        self.owner = owner
        self.inputs = inputs
        self.views = tuple([area.view(key) for key in inputs])
        self.leave: Callable[[object], None] = nothing
        self.successor: FrameBuffer | None = None
        self.retire: Callable[[], None] = nothing
        self.checked: list[ExecutionResult | None] = [None] * step_count


def nothing(job: object = None) -> None:
    """Nothing is to be done."""


class Waiting(Protocol):
    """One that waits for a buffer: an execution, or a stream with an item."""

    def wants(self) -> bool:
        """Whether it has a use for one now; otherwise the next in the order gets it."""
        ...

    def take(self, buffer: FrameBuffer) -> None:
        """Takes one over immediately: called by the task that leaves it."""
        ...


class _WaitingExecution:
    """An execution that waits for a buffer.

    Attributes:
        waiter: Wakes its task.
        taken: The buffer that it has got; None before.
    """

    __slots__ = ("taken", "waiter")

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter
        self.taken: FrameBuffer | None = None

    def wants(self) -> bool:
        return True

    def take(self, buffer: FrameBuffer) -> None:
        self.taken = buffer
        self.waiter.wake()


class Lender(Protocol):
    """A stream, which holds buffers of results that were not requested yet."""

    def spare(self) -> bool:
        """Leaves one such buffer. Returns whether it could."""
        ...


class BurstStatistics(NamedTuple):
    """The buffers of a burst.

    Attributes:
        total: Number of buffers; 0 while the burst is not open.
        free: Number of those without a user.
        waiting: Number of executions and streams that wait for one.
        streams: Number of streams that have not ended.
    """

    total: int
    free: int
    waiting: int
    streams: int


class SlotPool:
    """The buffers of one burst.

    Args:
        background: Where the runtime's tasks live.
        slots: Number of buffers that it will have.

    Attributes:
        slots: See above.
        lenders: The streams that have not ended.
    """

    def __init__(self, background: Background, slots: int) -> None:
        self.slots = slots
        self.lenders: set[Lender] = set()
        self._background = background
        self._buffers: Sequence[FrameBuffer] = ()
        self._free: list[FrameBuffer] = []
        self._waiting: deque[Waiting] = deque()
        # Executions that wait: streams leave buffers that they can spare for them.
        self._demand: set[Waiter] = set()
        self._closed = False

    def open(self, buffers: Sequence[FrameBuffer]) -> None:
        """Has it give these buffers from now on."""
        self._buffers = buffers
        # The first is taken first: a burst that is used by one alone keeps to one memory, which the caches know.
        self._free = [*buffers[::-1]]

    def replace(self, buffers: Sequence[FrameBuffer]) -> None:
        """Has it give these buffers from now on. A present one that is in use stays until its last user leaves it.

        Args:
            buffers: One for each present one.
        """
        for old, new in zip(self._buffers, buffers, strict=True):
            old.successor = new
        self._buffers = buffers
        self._free = [_last(buffer) for buffer in self._free]

    def close(self) -> None:
        """Gives no more buffers: executions that wait are rejected. A device that hangs never leaves the one that it has."""
        self._closed = True
        for waiter in self._demand:
            waiter.wake()

    def clear(self) -> None:
        """Forgets the buffers of a closed burst."""
        self._buffers = ()

    def statistics(self) -> BurstStatistics:
        """Counts of now."""
        return BurstStatistics(len(self._buffers), len(self._free), len(self._waiting), len(self.lenders))

    def take_free(self) -> FrameBuffer | None:
        """A free buffer, None if all are in use; the caller must leave it.

        Raises:
            InvalidArgument: The burst is not open.
        """
        free = self._free
        if self._closed or not free or running_loop() is not self._background.home.loop:
            self._check_open()
            return None
        buffer = free.pop()
        buffer.users = 1
        return buffer

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("burst: closed; use it inside its async with, or call net.burst() again")
        if not self._buffers:
            raise InvalidArgument("burst: not open; use it with async with")
        self._background.home.check("burst")

    async def take(self, deadline_ns: int | None) -> FrameBuffer:
        """Waits for a buffer, but not beyond the deadline; the caller must leave it.

        Raises:
            MissedDeadline: No buffer was free in time.
            InvalidArgument: The burst is not open, or was closed during the call.
        """
        buffer = self.take_free()
        if buffer is not None:
            return buffer
        background = self._background
        if deadline_ns is not None and (late_ns := now_ns() - deadline_ns) >= 0:
            raise passed_before_start("burst", late_ns)
        waiter = background.waiter()
        waiting = _WaitingExecution(waiter)
        timer = None if deadline_ns is None else background.at(deadline_ns, waiter.wake)
        self.wait(waiting)
        self._demand.add(waiter)
        try:
            self._reclaim()
            await waiter.future
            if self._closed:
                raise InvalidArgument("burst: closed while an execution waited for a free slot")
        except BaseException:
            if waiting.taken is not None:
                self.leave(waiting.taken)
            raise
        finally:
            self._demand.discard(waiter)
            self.stop_waiting(waiting)
            if timer is not None:
                timer.cancel()
        if waiting.taken is None:
            raise MissedDeadline("burst: the deadline passed while waiting for a free slot", transient=True)
        return waiting.taken

    def wait(self, waiting: Waiting) -> None:
        """Has it take the next buffer that becomes free, in the task that leaves that one."""
        self._waiting.append(waiting)

    def stop_waiting(self, waiting: Waiting) -> None:
        """Takes ``wait`` back. Idempotent."""
        for index, other in enumerate(self._waiting):
            if other is waiting:
                del self._waiting[index]
                return

    def leave(self, buffer: FrameBuffer, job: object = None) -> None:
        """One user less; the last one gives the buffer to the next that waits.

        Args:
            buffer: The buffer that was used.
            job: The execution that used it; not needed, but what an execution ends with is called with it.
        """
        buffer.users -= 1
        if buffer.users:
            if self._demand:
                self._reclaim()  # The device may have finished what a stream can spare.
            return
        if buffer.successor is not None:
            buffer = _last(buffer)
        if self._waiting:
            for index, waiting in enumerate(self._waiting):
                if waiting.wants():
                    del self._waiting[index]
                    buffer.users = 1
                    waiting.take(buffer)
                    return
        self._free.append(buffer)

    def give_back(self, buffer: FrameBuffer, *, is_collected: bool) -> None:
        """As ``leave``, from any thread.

        Args:
            buffer: The buffer that its user leaves.
            is_collected: Whether the garbage collector calls, which interrupts anything: it is left in the loop's next turn.
        """
        leave = functools.partial(self.leave, buffer)
        if is_collected:
            self._background.call_soon(leave)
        else:
            self._background.run_in_loop(leave)

    def _reclaim(self) -> None:
        """Makes a stream leave the buffer of a result that its consumer has not requested yet, if there is one."""
        for lender in tuple(self.lenders):
            if lender.spare():
                return

    def note_spare(self) -> None:
        """A stream has a finished item: its buffer is spared for an execution that waits, if there is one."""
        if self._demand:
            self._reclaim()

    def offer_free(self) -> None:
        """Offers a free buffer to those that wait: one of them can use it now."""
        if self._waiting and self._free:
            buffer = self._free.pop()
            buffer.users = 1
            self.leave(buffer)


def _last(buffer: FrameBuffer) -> FrameBuffer:
    """The buffer that is used in place of a free one; those before it end."""
    while buffer.successor is not None:
        buffer.retire()
        buffer = buffer.successor
    return buffer
