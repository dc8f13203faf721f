"""Waiting for a time without a timer of the event loop.

Owns a timer of the kernel (timerfd) that the loop watches. A pending timer of asyncio's loop makes each of its waits compute and
set a time-out, in each frame of a burst. Waits of seconds beside executions use a timer of the kernel instead.

Source: timerfd_create(2), which Python has from 3.13 on.
"""

from __future__ import annotations

import ctypes
import os
import time

import anyio

__all__ = ["sleep_beside_executions"]

NS = 1e-9

CLOCKS_S_MAX = 0.01
"""Difference of the loop's clock to CLOCK_MONOTONIC up to which it is the same clock: uvloop has milliseconds of it."""

_TFD_NONBLOCK, _TFD_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_CLOCK_MONOTONIC = 1


class _Times(ctypes.Structure):
    """``struct itimerspec``: the interval, 0 for one expiration, and the time until that, each in seconds and nanoseconds."""

    _fields_ = [
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    ]


_libc = ctypes.CDLL(None, use_errno=True)


def _timer(seconds: float) -> int:
    """The descriptor of a timer that expires once.

    Raises:
        OSError: No descriptor is left.
    """
    fd: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    whole_s, ns = divmod(round(seconds / NS), 10**9)
    times = _Times(0, 0, whole_s, ns)
    if _libc.timerfd_settime(fd, 0, ctypes.byref(times), None):
        number = ctypes.get_errno()
        os.close(fd)
        raise OSError(number, os.strerror(number))
    return fd


async def sleep_beside_executions(seconds: float) -> None:
    """As ``anyio.sleep``, for waits of seconds while executions may run. Under a virtual clock, or where no descriptor is left, it
    sets a timer of the loop."""
    # A time of 0 would disarm the timer.
    if seconds > NS and abs(anyio.current_time() - time.monotonic()) < CLOCKS_S_MAX:
        try:
            await _sleep(seconds)
            return
        except OSError:
            pass  # No descriptor is left, or the loop has no room to watch one.
    await anyio.sleep(seconds)


async def _sleep(seconds: float) -> None:
    fd = _timer(seconds)
    try:
        await anyio.wait_readable(fd)
    finally:
        os.close(fd)
