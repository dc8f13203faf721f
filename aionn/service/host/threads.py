"""The threads of a driver process under the scheduling that its application lends, and the process's memory.

Owns the process's end of that scheduling: the control thread, which runs the event loop, the limit for the case that the
watchdog has died, and locked memory. Other threads acquire their class themselves when they start.

Invariants:
1. Only the client for which the process was started can lend it a scheduling, once.
2. No permission of the machine that is missing prevents the process from serving.
"""

from __future__ import annotations

import socket

from aionn.errors import InvalidArgument
from aionn.realtime import PageLocks, RunLimit, Scheduling, SchedulingClass, current
from aionn.realtime.scheduling import Lent, adopt, close_shared
from aionn.service.wire.protocol import Done
from aionn.service.wire.scheduling_messages import THREADS_MAX, GetThreads, JoinScheduling, ThreadsReply

__all__ = ["HostThreads"]


class HostThreads:
    """The scheduling of a driver process.

    Args:
        may_join: Whether a client may lend one: not where the process serves several.
        watchdog: An inherited connection to the watchdog, owned by this object; None means that no thread may be a real-time
            thread.
    """

    def __init__(self, *, may_join: bool, watchdog: socket.socket | None = None) -> None:
        self._may_join = may_join
        self._watchdog = watchdog
        self._has_joined = False
        self._locks = PageLocks()
        self._limit = RunLimit(None)
        self._not_locked: str | None = None

    def handle(self, body: JoinScheduling | GetThreads) -> Done | ThreadsReply:
        """Handles a client's message. Raises as ``join`` does."""
        if isinstance(body, GetThreads):
            return self.report()
        self.join(body.lent)
        return Done()

    def join(self, lent: Lent) -> None:
        """Uses what the application lends; for the thread of the event loop, which gets the class HIGH.

        Blocks for some milliseconds; with RealtimeKit for a second at most.

        Raises:
            InvalidArgument: The process serves several clients, or has joined already.
        """
        if not self._may_join or self._has_joined:
            raise InvalidArgument(
                "service: expected a process that was started for this client and has no scheduling yet"
            )
        self._has_joined = True
        end, self._watchdog = self._watchdog, None
        scheduling = Scheduling.join(lent, end)
        adopt(scheduling)
        # Before the first thread is a real-time thread. The kernel then ends this process, which is started again.
        self._limit.open()
        scheduling.acquire(SchedulingClass.HIGH, "control")
        self._not_locked = self._locks.keep_everything()

    def report(self) -> ThreadsReply:
        """The present state of the threads."""
        scheduling = current()
        rows = [] if scheduling is None else scheduling.table()
        return ThreadsReply(tuple(rows[:THREADS_MAX]), self._not_locked)

    def close(self) -> None:
        """Restores every thread. Idempotent."""
        if self._watchdog is not None:
            self._watchdog.close()
        if self._has_joined:
            self._has_joined = False
            close_shared()
            self._limit.close()
            self._locks.close()
