"""The wait for the next attempt to open a lost source.

Owns that wait alone. `reconnection.py` decides when an attempt is due.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from aionn.media.live.capture import Arrivals
from aionn.media.live.readable import until_readable

__all__ = ["ARRIVAL_S", "until_attempt"]

ARRIVAL_S = 0.05
"""Pause after a device has come: udev gives it to its group some milliseconds later, and it has several nodes."""


async def until_attempt(
    due_ns: int, now: Callable[[], int], arrivals: Callable[[], Arrivals | None] | None
) -> None:
    """Waits until the next attempt is due, or a device has come.

    Args:
        due_ns: When it is due.
        now: The time in ns of CLOCK_MONOTONIC.
        arrivals: Begins to watch for devices that come; None where nothing reports them.
    """
    watch = None if arrivals is None else arrivals()
    try:
        while (left_ns := due_ns - now()) > 0:
            left_s = max(left_ns, 1_000) / 1e9
            if watch is None:
                await anyio.sleep(left_s)
            elif await until_readable(watch.fileno(), left_s) and watch.news():
                await anyio.sleep(min(left_s, ARRIVAL_S))
                return
    finally:
        if watch is not None:
            watch.close()
