"""The time in which the machine did not run threads, as the kernel measures it.

Owns the kernel's counters and a few readings of each. The first counter is the time that a thread was ready and had no processor,
since other threads had it, or since the kernel did not leave a system call for it. The second is the time that the hypervisor took
from a processor, which the first one lacks while the thread sleeps. Work of a thread is in neither, nor is the wait for a lock:
neither is ever taken for the machine's doing.

The counters of a thread are added to when it gets a processor. So if it is ready while it is asked for, the time that it has had no
processor follows from the processor time that it lacks.

Source: proc(5): ``schedstat`` of a thread (time on processors, time ready without one, in nanoseconds), its state in ``stat``, and
the column ``steal`` of ``/proc/stat``.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

__all__ = [
    "AGE_NS",
    "NO_STALLS",
    "READINGS_MAX",
    "TICK_NS",
    "AllStalls",
    "LoopStalls",
    "Reading",
    "Stalls",
    "ThreadReading",
    "ThreadStalls",
    "ThreadTimes",
    "read_counters",
    "read_times",
    "stalls_of_processors",
    "stalls_of_this_thread",
    "stalls_of_thread",
    "times_of_this_thread",
    "waited_since",
]

AGE_NS = 10_000_000
"""Age up to which a reading is taken for the beginning of a measurement: the kernel counts stolen time in steps of this length as
a rule, and reading both counters takes some 13 us."""

TICK_NS = 10_000_000
"""Longest time for which the processor time of a thread that runs is not counted yet: a tick of the slowest kernels, of 100 Hz."""

READINGS_MAX = 64
"""Readings that are kept: most of a second of them, longer than a frame is under way as a rule. Before the first that is kept,
nothing is known, and nothing is counted."""

STAT_BYTES_MAX = 1 << 14
"""Length of the part of ``/proc/stat`` that is read: the lines of some 200 processors, which come first."""


class Stalls(Protocol):
    """The measured time in which the machine did not run something."""

    def look(self, now_ns: int) -> None:
        """Takes a reading, to be the beginning of a later measurement."""
        ...

    def since(self, then_ns: int, now_ns: int, began_ns: int | None = None) -> int:
        """The time since shortly before ``then_ns``, as far as it is certain; 0 where nothing is measured.

        Args:
            then_ns: Where it begins.
            now_ns: Now.
            began_ns: Since then, not before ``then_ns``, there is work that has not ended; None: there may be no work.
        """
        ...


class _NoStalls:
    """Nothing is measured."""

    def look(self, now_ns: int) -> None:
        pass

    def since(self, then_ns: int, now_ns: int, began_ns: int | None = None) -> int:
        return 0


NO_STALLS: Stalls = _NoStalls()
"""For a clock that no machine delays."""


class AllStalls:
    """Several measurements of one time, of which the longest counts: a thread waits while its processor is stolen.

    Args:
        parts: The measurements.
    """

    def __init__(self, parts: Sequence[Stalls]) -> None:
        self._parts = tuple(parts)

    def look(self, now_ns: int) -> None:
        """See ``Stalls.look``."""
        for part in self._parts:
            part.look(now_ns)

    def since(self, then_ns: int, now_ns: int, began_ns: int | None = None) -> int:
        """See ``Stalls.since``."""
        return max((part.since(then_ns, now_ns, began_ns) for part in self._parts), default=0)


# --- A thread and all processors ---


class Reading(NamedTuple):
    """The counters at a time.

    Attributes:
        at_ns: The time.
        waited_ns: Time for which the thread was ready without a processor.
        stolen_ns: Time for which the hypervisor did not run a processor, by its number.
    """

    at_ns: int
    waited_ns: int
    stolen_ns: Mapping[int, int]


class LoopStalls:
    """The stalls of a thread that asks for them itself, and of the processors that it may use.

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

    def since(self, then_ns: int, now_ns: int, began_ns: int | None = None) -> int:
        """See ``Stalls.since``. Of both counters the one that grew more, and of the processors the one that lacked most; of what it
        grew by since a reading that is older than ``AGE_NS`` before ``then_ns`` only what cannot have been before that."""
        first = next((reading for reading in reversed(self._readings) if reading.at_ns <= then_ns), None)
        if first is None:
            return 0
        waited_ns, stolen_ns = self._read()
        grown_ns = waited_ns - first.waited_ns
        for processor, later_ns in stolen_ns.items():
            grown_ns = max(grown_ns, later_ns - first.stolen_ns.get(processor, later_ns))
        return _certain_ns(grown_ns, first.at_ns, then_ns, now_ns)


def _certain_ns(grown_ns: int, first_ns: int, then_ns: int, now_ns: int) -> int:
    """Of what a counter grew by since a reading, the part that cannot have been earlier than ``AGE_NS`` before ``then_ns``."""
    begins_ns = max(first_ns, then_ns - AGE_NS)
    return max(0, min(grown_ns - (begins_ns - first_ns), now_ns - begins_ns))


def read_counters(schedstat: bytes, stat: bytes) -> tuple[int, dict[int, int]]:
    """The counters in two texts of the kernel, the second one perhaps cut; 0 and nothing for what cannot be read."""
    times = read_times(schedstat)
    tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    stolen = {}
    for line in stat[: stat.rfind(b"\n") + 1].split(b"\n")[1:]:
        columns = line.split()
        if not columns or not columns[0].startswith(b"cpu") or not columns[0][3:].isdigit():
            break
        has_steal = len(columns) > 8 and columns[8].isdigit()
        stolen[int(columns[0][3:])] = int(columns[8]) * tick_ns if has_steal else 0
    return 0 if times is None else times.waited_ns, stolen


class _Counters:
    """The kernel's counters for the thread that makes this object, and the processors that it may run on.

    Their files are opened when they are first read: a server without a reservation keeps no descriptor for them.

    Args:
        counts_thread: Whether the thread's own counter is read.
    """

    def __init__(self, *, counts_thread: bool) -> None:
        self._thread = threading.get_native_id()
        self._counts_thread = counts_thread
        self._files: list[int | None] = []
        self._opening = threading.Lock()

    def __call__(self) -> tuple[int, Mapping[int, int]]:
        if not self._files:
            with self._opening:
                if not self._files:
                    own = (
                        _opened(f"/proc/self/task/{self._thread}/schedstat") if self._counts_thread else None
                    )
                    self._files = [own, _opened("/proc/stat")]
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


def stalls_of_this_thread() -> LoopStalls:
    """The stalls of the calling thread, and of the processors that it may use."""
    return LoopStalls(_Counters(counts_thread=True))


def stalls_of_processors() -> LoopStalls:
    """The stalls of the processors that the calling thread may use."""
    return LoopStalls(_Counters(counts_thread=False))


# --- A thread that another one asks about ---


class ThreadTimes(NamedTuple):
    """The counters of a thread.

    Attributes:
        ran_ns: Time for which it had a processor.
        waited_ns: Time for which it was ready without one.
    """

    ran_ns: int
    waited_ns: int


class ThreadReading(NamedTuple):
    """The counters of a thread at a time."""

    at_ns: int
    times: ThreadTimes


class ThreadStalls:
    """The stalls of one thread, which other threads may ask for.

    Args:
        read: Gives its counters; None where they cannot be read any more.
        is_ready: Whether it is ready, with a processor or without.
    """

    def __init__(self, read: Callable[[], ThreadTimes | None], is_ready: Callable[[], bool]) -> None:
        self._read = read
        self._is_ready = is_ready
        self._readings: deque[ThreadReading] = deque(maxlen=READINGS_MAX)

    def look(self, now_ns: int) -> None:
        """See ``Stalls.look``."""
        if not self._readings or now_ns - self._readings[-1].at_ns >= AGE_NS:
            times = self._read()
            if times is not None:
                self._readings.append(ThreadReading(now_ns, times))

    def since(self, then_ns: int, now_ns: int, began_ns: int | None = None) -> int:
        """See ``Stalls.since``. While there is work, a thread that is ready may have had no processor until now."""
        first = next((reading for reading in reversed(self._readings) if reading.at_ns <= then_ns), None)
        if first is None:
            return 0
        # Before the counters: those of a thread that gets a processor in between have its wait.
        ready_ns = began_ns if began_ns is not None and self._is_ready() else None
        times = self._read()
        if times is None:
            return 0
        return waited_since(first, times, then_ns=then_ns, now_ns=now_ns, ready_ns=ready_ns)


def waited_since(
    first: ThreadReading, last: ThreadTimes, *, then_ns: int, now_ns: int, ready_ns: int | None
) -> int:
    """The time for which a thread had no processor since shortly before a time, as far as it is certain.

    Args:
        first: A reading not after ``then_ns``.
        last: The counters now.
        then_ns: The time.
        now_ns: Now.
        ready_ns: Since then it has work to do, and it is ready now: some of its wait may not be in its counters yet. None: it
            may have slept.
    """
    counted_ns = _certain_ns(last.waited_ns - first.times.waited_ns, first.at_ns, then_ns, now_ns)
    if ready_ns is None:
        return counted_ns
    ran_ns = last.ran_ns - first.times.ran_ns + TICK_NS
    return max(counted_ns, now_ns - ready_ns - ran_ns)


def read_times(schedstat: bytes) -> ThreadTimes | None:
    """The counters in a text of the kernel; None for one that has none."""
    numbers = schedstat.split()
    if len(numbers) < 2 or not (numbers[0].isdigit() and numbers[1].isdigit()):
        return None
    return ThreadTimes(int(numbers[0]), int(numbers[1]))


def times_of_this_thread() -> ThreadTimes | None:
    """The counters of the calling thread. Opens its file each time: a process has many such threads, and a descriptor for each
    would be missing elsewhere."""
    fd = _opened("/proc/thread-self/schedstat")
    try:
        return read_times(_read(fd))
    finally:
        if fd is not None:
            os.close(fd)


class _OtherThread:
    """The counters of a thread, perhaps of another process."""

    def __init__(self, thread: int) -> None:
        self._stat = f"/proc/{thread}/stat"
        self._fd = _opened(f"/proc/{thread}/schedstat")

    def __call__(self) -> ThreadTimes | None:
        return read_times(_read(self._fd))

    def is_ready(self) -> bool:
        fd = _opened(self._stat)
        try:
            # The state follows the name, which may have brackets and blanks.
            return _read(fd).rpartition(b")")[2].lstrip().startswith(b"R")
        finally:
            if fd is not None:
                os.close(fd)

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


def stalls_of_thread(thread: int) -> ThreadStalls:
    """The stalls of a thread, by its number in the kernel; of one that cannot be read, nothing is ever counted."""
    times = _OtherThread(thread)
    return ThreadStalls(times, times.is_ready)


def _opened(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _read(fd: int | None) -> bytes:
    try:
        return b"" if fd is None else os.pread(fd, STAT_BYTES_MAX, 0)
    except OSError:
        return b""  # The kernel was built without it, or the thread has ended.
