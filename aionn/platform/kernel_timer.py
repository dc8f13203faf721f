"""Waiting for a time without a timer of the event loop.

Owns timers of the kernel (timerfd) that the loop watches: one for each wait of seconds beside executions, and one for all calls of
a ``SharedTimer``, such as those at the deadlines of executions. A pending timer of asyncio's loop makes each of its waits compute
and set a time-out, in each frame of a burst.

Invariants:
1. A call comes at its time or after it, never before.
2. The shared timer is set for the earliest time that it was asked for, or for an earlier one: a call that is taken back, and one at
   a later time, make no system call.
3. Calls that were taken back are at most as many as those that are due, and ``CANCELLED_MAX``.

Source: timerfd_create(2), which Python has from 3.13 on.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import time
from asyncio import BaseEventLoop
from collections.abc import Callable
from heapq import heapify, heappop, heappush

import anyio

__all__ = ["CallTable", "SharedTimer", "TimedCall", "Times", "goes_by_kernel", "sleep_beside_executions"]

NS = 1e-9

CLOCKS_S_MAX = 0.01
"""Difference of the loop's clock to CLOCK_MONOTONIC up to which it is the same clock: uvloop has milliseconds of it."""

CANCELLED_MAX = 64
"""Calls that were taken back and are kept in a table all the same: to leave them out takes some microseconds then."""

_TFD_NONBLOCK, _TFD_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1

_NEVER_NS = 1 << 63


class Times(ctypes.Structure):
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
    fd = _new_timer()
    try:
        _set_timer(fd, round(seconds / NS), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def _new_timer() -> int:
    fd: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def _set_timer(fd: int, time_ns: int, flags: int) -> None:
    """Has a timer expire once; never for 0. Its descriptor is not readable before."""
    whole_s, ns = divmod(time_ns, 10**9)
    times = Times(0, 0, whole_s, ns)
    if _libc.timerfd_settime(fd, flags, ctypes.byref(times), None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


async def sleep_beside_executions(seconds: float) -> None:
    """As ``anyio.sleep``, for waits of seconds while executions may run. Under a virtual clock, or where no descriptor is left, it
    sets a timer of the loop."""
    # A time of 0 would disarm the timer.
    if seconds > NS and goes_by_kernel(asyncio.get_running_loop()):
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


class TimedCall:
    """A call at a time, as ``asyncio.TimerHandle`` is one.

    Attributes:
        call: The function to call; None once it was called or taken back.
    """

    __slots__ = ("_table", "call")

    def __init__(self, table: CallTable, call: Callable[[], object]) -> None:
        self._table = table
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Takes it back. Idempotent, and without effect once it was called."""
        if self.call is not None:
            self.call = None
            heap = self._table.heap
            if heap[-1][2] is self:
                heap.pop()  # The last one is above no other. Executions one after the other leave nothing.
            else:
                self._table.note_cancelled()


class CallTable:
    """Calls by their times, without a clock. Calls at the same time come in the order in which they were added.

    Attributes:
        heap: The calls with their times and numbers, and some that were taken back.
    """

    __slots__ = ("_cancelled_count", "_numbers", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, TimedCall]] = []
        self._numbers = itertools.count()
        self._cancelled_count = 0

    def __len__(self) -> int:
        return len(self.heap)

    def add(self, time_ns: int, call: Callable[[], object]) -> TimedCall:
        """Adds a call."""
        timed = TimedCall(self, call)
        heappush(self.heap, (time_ns, next(self._numbers), timed))
        return timed

    def note_cancelled(self) -> None:
        """A call that stays in the table was taken back."""
        heap = self.heap
        self._cancelled_count += 1
        if self._cancelled_count > CANCELLED_MAX and 2 * self._cancelled_count > len(heap):
            heap[:] = [entry for entry in heap if entry[2].call is not None]
            heapify(heap)
            self._cancelled_count = 0

    def first_ns(self) -> int | None:
        """The time of the first call; None without one."""
        heap = self.heap
        while heap:
            if heap[0][2].call is not None:
                return heap[0][0]
            heappop(heap)
            self._cancelled_count -= 1
        return None

    def take_due(self, now_ns: int) -> Callable[[], object] | None:
        """Takes the first call whose time has come; None without one."""
        first_ns = self.first_ns()
        if first_ns is None or first_ns > now_ns:
            return None
        timed = heappop(self.heap)[2]
        call, timed.call = timed.call, None
        return call


def goes_by_kernel(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the clock of a loop is CLOCK_MONOTONIC: not that of a virtual one, which would wait for a timer of the kernel."""
    if isinstance(loop, BaseEventLoop):
        return type(loop).time is BaseEventLoop.time
    return abs(loop.time() - time.monotonic()) < CLOCKS_S_MAX


class SharedTimer:
    """Calls at times of CLOCK_MONOTONIC in the thread of an event loop, by one timer of the kernel for all of them.

    Args:
        loop: The loop, which runs the caller; ``goes_by_kernel`` holds for it.

    Raises:
        OSError: No descriptor is left, or the loop has no room to watch one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._fd = -1
        self._is_ending = False
        self._loop = loop
        self._table = CallTable()
        self._set_ns = _NEVER_NS
        self._fd = _new_timer()
        try:
            loop.add_reader(self._fd, self._expired)
        except BaseException:
            self._close()
            raise

    def at(self, time_ns: int, call: Callable[[], object]) -> TimedCall:
        """Calls at a time, or soon after it; ``cancel`` of the result takes that back."""
        timed = self._table.add(time_ns, call)
        if time_ns < self._set_ns:
            self._set(time_ns)
        return timed

    def _set(self, time_ns: int) -> None:
        # A time of 0 would stop the timer; one that has passed expires immediately.
        _set_timer(self._fd, max(time_ns, 1), _TFD_TIMER_ABSTIME)
        self._set_ns = time_ns

    def _expired(self) -> None:
        table, now_ns = self._table, time.monotonic_ns()
        try:
            while (call := table.take_due(now_ns)) is not None:
                call()
        finally:
            first_ns = table.first_ns()
            if self._fd >= 0:
                if first_ns is not None:
                    self._set(first_ns)
                elif self._is_ending:
                    self.close()
                else:
                    _set_timer(self._fd, 0, 0)
                    self._set_ns = _NEVER_NS

    def close(self) -> None:
        """Stops watching the timer, after the last call that was asked for. Idempotent; in the thread of the loop."""
        if self._fd >= 0 and not self._loop.is_closed():
            if self._table.first_ns() is not None:
                self._is_ending = True
                return
            self._loop.remove_reader(self._fd)
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self._close()
