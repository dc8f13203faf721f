"""The real-time scheduling of a runtime: its event loop's thread, the memory of its bursts, Python's collector, and a report.

Owns what ``aionn.open(realtime=...)`` does in the application's process, and what ``Runtime.realtime`` reports. ``aionn.realtime``
has the means; ``aionn.service.host.threads`` is the counterpart in driver processes.

Invariants:
1. When a runtime has closed, or could not be opened, the thread of its event loop is as it was before, however often its task was
   cancelled; with two runtimes in one loop, when the second has closed.
2. Real time that is required and not permitted fails the opening. Everything else that a machine does not permit is reported.
3. With ``off`` nothing is changed, and nothing is started.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from aionn.errors import DeviceUnavailable
from aionn.platform.real_work import real_work
from aionn.realtime import Collection, CollectorMode, Mode, PageLocks, RunLimit, Scheduling, SchedulingClass
from aionn.realtime.memory import LockedRow
from aionn.realtime.scheduling import close_shared, current, open_shared
from aionn.realtime.threads import State, ThreadRow

__all__ = ["ProcessThreads", "RealtimeReport", "RuntimeRealtime"]

_logger = logging.getLogger("aionn.manager")


class ProcessThreads(msgspec.Struct, frozen=True):
    """The threads of one process.

    Attributes:
        process: ``application``, or the name of the device whose driver process it is.
        pid: Its number; None where no process runs.
        rows: A row for each thread that asked for a class.
        not_locked: The reason why the memory of the process is not locked as a whole; empty if it is, None if that was not tried.
    """

    process: str
    pid: int | None
    rows: tuple[ThreadRow, ...]
    not_locked: str | None = None


class RealtimeReport(msgspec.Struct, frozen=True):
    """The scheduling and memory that the machine granted a runtime.

    Attributes:
        mode: The setting.
        is_realtime: Whether HIGH and MEDIUM threads may run under SCHED_RR: not after the end of the watchdog's process.
        permission: One sentence: the permission, or why real time is not permitted and the remedy; empty with ``off``.
        processes: The threads of this process, then of each driver process.
        memory: A row for each range of this process's memory that bursts use.
    """

    mode: Mode
    is_realtime: bool
    permission: str
    processes: tuple[ProcessThreads, ...] = ()
    memory: tuple[LockedRow, ...] = ()


class _LoopThreads:
    """The threads of event loops that have a class, with the number of their runtimes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count: dict[int, int] = {}

    def acquire(self, scheduling: Scheduling) -> ThreadRow | None:
        """Gives the calling thread the class HIGH."""
        tid = threading.get_native_id()
        row = scheduling.acquire(SchedulingClass.HIGH, "event loop")
        with self._lock:
            self._count[tid] = self._count.get(tid, 0) + 1
        return row

    def give_back(self, scheduling: Scheduling, tid: int) -> None:
        """Gives the class back if this was the thread's last runtime."""
        with self._lock:
            left = self._count.pop(tid) - 1
            if left:
                self._count[tid] = left
                return
        scheduling.give_back(tid)

    def clear(self) -> None:
        """Forgets all: in a forked child."""
        self.__init__()  # type: ignore[misc]


_loop_threads = _LoopThreads()
os.register_at_fork(after_in_child=_loop_threads.clear)


class _KernelLimit:
    """RLIMIT_RTTIME of this process while a runtime uses real time that was opened in the main thread, which alone calls this."""

    def __init__(self) -> None:
        self._limit = RunLimit(_put_back_all)
        self._users = 0

    def open(self) -> None:
        """Sets it for one more runtime, which calls ``close`` once."""
        self._users += 1
        if self._users == 1 and (reason := self._limit.open()):
            _logger.debug("RLIMIT_RTTIME is not set: %s", reason)

    def close(self) -> None:
        """Restores the limit that was before if this was the last runtime."""
        if not self._users:
            return  # A forked child closes a runtime of its parent.
        self._users -= 1
        if not self._users:
            self._limit.close()

    def clear(self) -> None:
        """Forgets all: in a forked child."""
        self._limit, self._users = RunLimit(_put_back_all), 0


def _put_back_all() -> None:
    scheduling = current()
    if scheduling is not None:
        scheduling.put_back_all("RLIMIT_RTTIME: a thread ran for too long and the watchdog did not act")


_kernel_limit = _KernelLimit()
os.register_at_fork(after_in_child=_kernel_limit.clear)


class RuntimeRealtime:
    """The real-time scheduling of one runtime.

    Args:
        mode: The setting.
        collector: The setting of Python's garbage collector.

    Attributes:
        scheduling: Grants threads their classes; None with ``off``, and while the runtime is not open.
        locks: Keeps memory of bursts; None with ``off``.
    """

    def __init__(self, mode: Mode, collector: CollectorMode) -> None:
        self._mode = mode
        self._collection = Collection(collector)
        self.scheduling: Scheduling | None = None
        self.locks = None if mode is Mode.OFF else PageLocks()
        self._loop_tid: int | None = None
        self._has_limit = False

    async def open(self) -> None:
        """Opens the process's scheduling and acquires the class HIGH for the thread of the event loop.

        To be awaited in a task that nothing cancels; ``close`` must follow, also when this raises. With RealtimeKit it blocks the
        loop for up to a second.

        Raises:
            DeviceUnavailable: Real time is required and not permitted; the message has the remedy.
        """
        if self._mode is Mode.OFF:
            return
        with real_work("starting the watchdog over real-time threads"):
            # A limiter of its own: the loop's other threads may all be busy.
            self.scheduling = await anyio.to_thread.run_sync(
                open_shared, self._mode, limiter=anyio.CapacityLimiter(1)
            )
        row = _loop_threads.acquire(self.scheduling)
        self._loop_tid = threading.get_native_id()
        if self._mode is Mode.REQUIRED and row is not None and row.state not in (State.REALTIME, State.OWN):
            raise DeviceUnavailable(f"real time is required: the thread of the event loop: {row.reason}")
        if self.scheduling.is_realtime and threading.current_thread() is threading.main_thread():
            self._has_limit = True
            _kernel_limit.open()

    def compiled(self) -> None:
        """Keeps the collector out of the way, now that a model and its importer are there. The first time it blocks the loop for 10
        to 30 ms."""
        self._collection.open()

    def give_back(self) -> None:
        """Restores the thread of the event loop and the collector. Idempotent; does not block."""
        self._collection.close()
        if self._has_limit:
            self._has_limit = False
            _kernel_limit.close()
        if self._loop_tid is not None and self.scheduling is not None:
            tid, self._loop_tid = self._loop_tid, None
            _loop_threads.give_back(self.scheduling, tid)

    async def close(self) -> None:
        """Restores everything. To be awaited in a task that nothing cancels. Idempotent."""
        self.give_back()
        if self.locks is not None:
            self.locks.close()
        if self.scheduling is None:
            return
        self.scheduling = None
        with real_work("ending the watchdog over real-time threads"):
            left = await anyio.to_thread.run_sync(close_shared, limiter=anyio.CapacityLimiter(1))
        for line in left:
            _logger.warning("a thread was not restored completely: %s", line)

    def keep(self, array: Any, name: str) -> None:
        """Keeps memory of a burst in memory, as far as RLIMIT_MEMLOCK permits. On any thread."""
        if self.locks is not None:
            self.locks.keep(array, name)

    def release(self, array: Any) -> None:
        """Undoes ``keep``."""
        if self.locks is not None:
            self.locks.release(array)

    def report(self, others: Sequence[ProcessThreads]) -> RealtimeReport:
        """The report, with the threads of other processes."""
        scheduling = self.scheduling
        if scheduling is None or scheduling.permission is None:
            return RealtimeReport(self._mode, False, "")
        here = ProcessThreads("application", os.getpid(), tuple(scheduling.table()))
        memory = () if self.locks is None else tuple(self.locks.report())
        return RealtimeReport(
            self._mode, scheduling.is_realtime, scheduling.sentence, (here, *others), memory
        )
