"""Scheduling of single threads.

``table.py`` grants and restores them, ``rows.py`` has the rows of that table, ``kernel.py`` reads and changes the state of a
thread in the kernel, ``slices.py`` its slice under the ordinary policy.
"""

from __future__ import annotations

from aionn.realtime.threads.rows import Guard, State, ThreadRow
from aionn.realtime.threads.table import Threads, threads_here

__all__ = ["Guard", "State", "ThreadRow", "Threads", "threads_here"]
