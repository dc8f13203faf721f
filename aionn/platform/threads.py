"""Starting threads where a limit of the process or of the machine may be reached.

Source: RLIMIT_NPROC and RLIMIT_AS in getrlimit(2); Python has no exception of its own for them.
"""

from __future__ import annotations

import threading

from aionn.errors import shortages_raised

__all__ = ["start_thread"]


def start_thread(thread: threading.Thread, where: str) -> None:
    """Starts a thread.

    Args:
        thread: One that was not started.
        where: Begins the message of an error.

    Raises:
        ResourceExhausted: There is no room for it (transient). It never ran, and must not be joined.
    """
    with shortages_raised(where):
        thread.start()
