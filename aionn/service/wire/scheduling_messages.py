"""The messages about the scheduling of a driver process's threads; see ``protocol`` for their way, and ``aionn.realtime``."""

from __future__ import annotations

import msgspec

from aionn.realtime import ThreadRow
from aionn.realtime.scheduling import Lent

__all__ = ["THREADS_MAX", "GetThreads", "JoinScheduling", "ThreadsReply"]

THREADS_MAX = 64
"""Most rows of one answer about threads: some 300 bytes each, with a reason. Most driver processes have five."""


class JoinScheduling(msgspec.Struct, frozen=True, tag=True):
    """The permission of the application for the threads of its driver process. Only a process that was started for this client
    accepts it; it has inherited the connection to the watchdog, since a socket never comes with a message.
    """

    lent: Lent


class GetThreads(msgspec.Struct, frozen=True, tag=True):
    """What did the threads of the driver process get?"""


class ThreadsReply(msgspec.Struct, frozen=True, tag=True):
    """Rows of the first threads, and the reason why the memory of the process is not locked; None if real time is off there."""

    rows: tuple[ThreadRow, ...]
    not_locked: str | None = None
