"""Measures the delays of this machine: late timers, wake-ups across processors, and gaps that this process does not cause.

The method is that of cyclictest and hwlatdetect, in Python: the interpreter adds a microsecond or two. The threads run with the
class HIGH, under the watchdog; the thread that never waits pauses for ``SPIN_NS`` after every ``SPIN_NS``.

``measure`` blocks for the whole time: do not call it on the thread of an event loop.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from aionn.realtime.checks import steal_share
from aionn.realtime.collector import Collection, CollectorMode
from aionn.realtime.findings import Distribution, Gaps, Measured
from aionn.realtime.permission import Permission
from aionn.realtime.priorities import SchedulingClass
from aionn.realtime.reading import read_text
from aionn.realtime.scheduling import Mode, Scheduling

__all__ = ["measure"]

INTERVAL_NS = 1_000_000
"""Length of a timer's sleep: the default of cyclictest."""

SPIN_NS = 10_000_000
"""Time that the thread that never waits runs before it pauses: far below the watchdog's budget."""

GAP_FLOOR_NS = 100_000
"""The shortest gap that counts: interrupts of the kernel's own are shorter."""

TIMES_MAX = 1_000_000
"""Most samples of one kind that are kept: a quarter of an hour of timers."""

WAKE_S = 1.0
"""Longest wait for one wake-up across processors; the measurement continues without the sample."""


def measure(seconds: float, permission: Permission) -> Measured:
    """Measure for some seconds: half of them timers, a quarter wake-ups, a quarter gaps.

    Args:
        seconds: Length of the measurement.
        permission: The scheduling that this process may use.
    """
    scheduling = Scheduling.open(Mode.IF_PERMITTED, permission=permission)
    collection = Collection(CollectorMode.DISABLED)
    collection.open()
    stat = read_text("/proc/stat")
    processors = sorted(os.sched_getaffinity(0))
    timers: list[int] = []
    gaps: list[int] = []
    states: list[str] = []
    looked = [0]

    def as_high(work: Callable[[], None]) -> None:
        row = scheduling.acquire(SchedulingClass.HIGH, "aionn doctor")
        states.append("ordinary" if row is None or row.state in ("refused", "ordinary") else row.policy)
        try:
            work()
        finally:
            scheduling.give_back()

    try:
        share_ns = int(seconds * 1e9 / 2 / len(processors))
        for processor in processors:
            _in_thread(lambda p=processor: as_high(lambda: _sleep(p, share_ns, timers)))  # type: ignore[misc]
        wakes = _wakes(processors, int(seconds * 1e9 / 4), as_high) if len(processors) > 1 else None
        _in_thread(lambda: as_high(lambda: looked.append(_spin(int(seconds * 1e9 / 4), gaps))))
    finally:
        collection.close()
        scheduling.close()
    return Measured(
        seconds,
        states[0] if states else "ordinary",
        Distribution.of(timers),
        None if wakes is None else Distribution.of(wakes),
        Gaps.of(gaps, GAP_FLOOR_NS / 1e3, sum(looked)),
        steal_share(stat, read_text("/proc/stat")),
    )


def _in_thread(work: Callable[[], None]) -> None:
    """Runs a function in a thread of its own, so that its processor and class do not change the caller's thread."""
    thread = threading.Thread(target=work, name="aionn-doctor", daemon=True)
    thread.start()
    thread.join()


def _sleep(processor: int, duration_ns: int, late: list[int]) -> None:
    os.sched_setaffinity(0, {processor})
    end_ns = time.monotonic_ns() + duration_ns
    while (now_ns := time.monotonic_ns()) < end_ns and len(late) < TIMES_MAX:
        select.select((), (), (), INTERVAL_NS / 1e9)
        late.append(max(0, time.monotonic_ns() - now_ns - INTERVAL_NS))


def _wakes(
    processors: list[int], duration_ns: int, as_high: Callable[[Callable[[], None]], None]
) -> list[int]:
    """Half of the time of each round trip between the first processor and the last, in nanoseconds."""
    there, back = os.eventfd(0, os.EFD_CLOEXEC), os.eventfd(0, os.EFD_CLOEXEC)
    end_ns = time.monotonic_ns() + duration_ns
    found: list[int] = []

    def answer() -> None:
        os.sched_setaffinity(0, {processors[-1]})
        while os.eventfd_read(there) < OVER:
            os.eventfd_write(back, 1)

    def ask() -> None:
        os.sched_setaffinity(0, {processors[0]})
        try:
            while (now_ns := time.monotonic_ns()) < end_ns and len(found) < TIMES_MAX:
                os.eventfd_write(there, 1)
                if not select.select((back,), (), (), WAKE_S)[0]:
                    continue
                os.eventfd_read(back)
                found.append((time.monotonic_ns() - now_ns) // 2)
                # Both threads sleep between samples; otherwise the wake-up would find the processor awake.
                select.select((), (), (), INTERVAL_NS / 1e9)
        finally:
            os.eventfd_write(there, OVER)

    threads = [
        threading.Thread(target=as_high, args=(work,), name="aionn-doctor", daemon=True)
        for work in (answer, ask)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(there)
    os.close(back)
    return found


OVER = 1 << 32
"""Value written into the event counter to end the answering thread: larger than the sum of all requests."""


def _spin(duration_ns: int, gaps: list[int]) -> int:
    """Appends the gaps of the clock that exceed ``GAP_FLOOR_NS``. Returns the measured time in nanoseconds."""
    looked_ns = 0
    end_ns = time.monotonic_ns() + duration_ns
    while (begin_ns := time.monotonic_ns()) < end_ns and len(gaps) < TIMES_MAX:
        before_ns = begin_ns
        while before_ns - begin_ns < SPIN_NS:
            now_ns = time.monotonic_ns()
            if now_ns - before_ns > GAP_FLOOR_NS:
                gaps.append(now_ns - before_ns)
            before_ns = now_ns
        looked_ns += before_ns - begin_ns
        select.select((), (), (), SPIN_NS / 1e9)
    return looked_ns
