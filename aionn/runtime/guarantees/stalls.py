"""The time in which the machine did not run the event loop, as the kernel measures it.

Owns two counters and a few readings of them. The first is the time that the loop's thread was ready and had no processor, since
other threads had it. The second is the time that the hypervisor took from a processor, which the first one lacks while the loop
sleeps. Work of the application or of aionn in the loop is in neither, so that it is never taken for the machine's doing.

Source: proc(5): ``schedstat`` of a thread (the second number, in nanoseconds) and the column ``steal`` of ``/proc/stat``.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from aionn.runtime.clock import now_ns
from aionn.scheduler.bandwidth import NO_STALLS, Stalls

__all__ = ["LoopStalls", "Reading", "read_counters", "stalls_of_loop"]

AGE_NS = 10_000_000
"""Age up to which a reading is taken for the beginning of a measurement: the kernel counts stolen time in steps of this length as
a rule, and reading both counters takes some 13 us."""

READINGS_MAX = 64
"""Readings that are kept: most of a second of them, longer than a frame is under way as a rule. Before the first that is kept,
nothing is known, and nothing is counted."""

STAT_BYTES_MAX = 1 << 14
"""Length of the part of ``/proc/stat`` that is read: the lines of some 200 processors, which come first."""

REAL_CLOCK_NS = 1_000_000_000
"""Farther from CLOCK_MONOTONIC the loop's clock is a virtual one, which no machine delays."""


class Reading(NamedTuple):
    """The counters at a time.

    Attributes:
        at_ns: The time.
        waited_ns: Time for which the loop's thread was ready without a processor.
        stolen_ns: Time for which the hypervisor did not run a processor, by its number.
    """

    at_ns: int
    waited_ns: int
    stolen_ns: Mapping[int, int]


class LoopStalls:
    """See the module; ``aionn.scheduler.bandwidth.Stalls`` has the methods.

    Args:
        read: Gives the counters: the time that the thread waited, and the stolen time by processor.
    """

    def __init__(self, read: Callable[[], tuple[int, Mapping[int, int]]]) -> None:
        self._read = read
        self._readings: deque[Reading] = deque(maxlen=READINGS_MAX)

    def look(self, now_ns: int) -> None:
        """See ``Stalls.look``."""
        if not self._readings or now_ns - self._readings[-1].at_ns >= AGE_NS:
            self._readings.append(Reading(now_ns, *self._read()))

    def since(self, then_ns: int, now_ns: int) -> int:
        """See ``Stalls.since``. Of both counters the one that grew more, and of the processors the one that lacked most; of what it
        grew by since a reading that is older than ``AGE_NS`` before ``then_ns`` only what cannot have been before that."""
        first = next((reading for reading in reversed(self._readings) if reading.at_ns <= then_ns), None)
        if first is None:
            return 0
        waited_ns, stolen_ns = self._read()
        grown_ns = waited_ns - first.waited_ns
        for processor, later_ns in stolen_ns.items():
            grown_ns = max(grown_ns, later_ns - first.stolen_ns.get(processor, later_ns))
        begins_ns = max(first.at_ns, then_ns - AGE_NS)
        return max(0, min(grown_ns - (begins_ns - first.at_ns), now_ns - begins_ns))


def read_counters(schedstat: bytes, stat: bytes) -> tuple[int, dict[int, int]]:
    """The counters in two texts of the kernel, the second one perhaps cut; 0 and nothing for what cannot be read."""
    numbers = schedstat.split()
    waited_ns = int(numbers[1]) if len(numbers) > 1 and numbers[1].isdigit() else 0
    tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    stolen = {}
    for line in stat[: stat.rfind(b"\n") + 1].split(b"\n")[1:]:
        columns = line.split()
        if not columns or not columns[0].startswith(b"cpu") or not columns[0][3:].isdigit():
            break
        has_steal = len(columns) > 8 and columns[8].isdigit()
        stolen[int(columns[0][3:])] = int(columns[8]) * tick_ns if has_steal else 0
    return waited_ns, stolen


class _Counters:
    """The kernel's counters for the thread that makes this object, and the processors that it may run on."""

    def __init__(self) -> None:
        self._thread = threading.get_native_id()
        self._files = [_opened("/proc/thread-self/schedstat"), _opened("/proc/stat")]

    def __call__(self) -> tuple[int, Mapping[int, int]]:
        schedstat, stat = (_read(fd) for fd in self._files)
        waited_ns, stolen_ns = read_counters(schedstat, stat)
        try:
            allowed = os.sched_getaffinity(self._thread)
        except OSError:
            return waited_ns, {}  # The thread has ended.
        return waited_ns, {processor: stolen_ns[processor] for processor in allowed if processor in stolen_ns}

    def __del__(self) -> None:
        for fd in self._files:
            if fd is not None:
                os.close(fd)


def _opened(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _read(fd: int | None) -> bytes:
    try:
        return b"" if fd is None else os.pread(fd, STAT_BYTES_MAX, 0)
    except OSError:
        return b""  # The kernel was built without it.


def stalls_of_loop() -> Stalls:
    """The stalls of the calling thread, which runs the event loop; under a virtual clock, nothing is ever counted."""
    if abs(now_ns() - time.monotonic_ns()) > REAL_CLOCK_NS:
        return NO_STALLS
    return LoopStalls(_Counters())
