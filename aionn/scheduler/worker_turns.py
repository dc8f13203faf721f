"""A few threads beside the event loop, for calls that take long: processes wait for them in turns.

Owns who is next. The processes at the other ends take turns, and connections of a process take turns at those of the process, as
at the device: ``aionn.scheduler.shared_slots`` has the order.

Invariants:
1. No more than ``count`` calls of an event loop run concurrently.
2. A call that is the only one of its process waits for those that run, and for ``count`` of each other process at most, whatever
   the number of their calls and connections.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from aionn.errors import ResourceExhausted
from aionn.hal import Priority
from aionn.scheduler.job import ClientJob
from aionn.scheduler.plain_policy import PlainPolicy
from aionn.scheduler.shared_slots import SharedSlots

__all__ = ["BESIDE_MAX", "WorkerTurns"]

BESIDE_MAX = min(40, max(4, len(os.sched_getaffinity(0))))
"""Calls of drivers beside a loop, where each process may use all threads: more than cores finish none earlier, and those of other
processes wait for them. Four where there are fewer cores, so that a short call does not wait for each long one."""

_R = TypeVar("_R")


class _Call(ClientJob):
    """A call of a task, which sleeps until it is started."""

    __slots__ = ("started",)

    def __init__(self, owner: Hashable) -> None:
        super().__init__(Priority.MEDIUM, None, owner=owner)
        self.started = anyio.Event()

    def start(self) -> None:
        self.started.set()


class _Threads:
    """The threads of one event loop."""

    def __init__(self, name: str, count: int) -> None:
        self.slots = SharedSlots(count, name=name, now=time.monotonic_ns, policy=PlainPolicy())
        # A call with a slot never waits for it: anyio wants one, and its own is for all that use threads.
        self.limiter = anyio.CapacityLimiter(count)


class WorkerTurns:
    """See the module. Every event loop has threads of its own.

    Args:
        name: Named in errors.
        count: Number of calls that run concurrently.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._of_loop: anyio.lowlevel.RunVar[_Threads] = anyio.lowlevel.RunVar(f"aionn-{name}")

    @property
    def waiting_count(self) -> int:
        """Number of calls that wait in this event loop."""
        return self._threads().slots.waiting_count

    async def run(self, owner: Hashable, call: Callable[..., _R], *arguments: object) -> _R:
        """Calls on a thread when the owner's turn comes, and returns what that returns. Cancelled before, it never calls; cancelled
        later, it continues to the end of the call, which may use what others would close.

        Args:
            owner: The client, or its ``Connection``; None where there is but one.
            call: The function to call.
            arguments: Its arguments.

        Raises:
            ResourceExhausted: No thread is left, or too many calls wait.
        """
        threads, job, has_begun = self._threads(), _Call(owner), False

        def begin() -> _R:
            nonlocal has_begun
            has_begun = True
            return call(*arguments)

        threads.slots.enter(job)
        try:
            await job.started.wait()
            return await anyio.to_thread.run_sync(begin, limiter=threads.limiter)
        except RuntimeError as e:
            if has_begun:
                raise  # An error of the call.
            raise ResourceExhausted(f"{self._name}: no thread is left: {e}", transient=True) from e
        finally:
            threads.slots.leave(job)
            threads.slots.release(job)

    def _threads(self) -> _Threads:
        threads = self._of_loop.get(None)
        if threads is None:
            threads = _Threads(self._name, self._count)
            self._of_loop.set(threads)
        return threads
