"""The device time of a frame: measured before its stream is admitted, by some executions on the device, and learnt from frames.

Owns the bounds of the measurement, and the rule for stalls, the times for which the machine did not run the threads. The
measurement runs as best effort of the highest class, in memory of the burst with whatever it holds.

Rare stalls are not device time: counted for each of the frames that come together, one of them would refuse most streams, while it
delays the slot once. A frame that is lost by one is ``stalled``. Where they are not rare, other programs have the processors, and
the device gives no more time than they leave: then stalls count.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import Literal

from aionn.platform.stalls import NO_STALLS, Stalls
from aionn.runtime.clock import now_ns
from aionn.runtime.executions.results import Result
from aionn.runtime.guarantees.arrivals import Measured
from aionn.scheduler.estimates import COLD_COUNT, Estimates

__all__ = [
    "COLD_EXECUTIONS",
    "TIMINGS_MIN",
    "WARM_UP_EXECUTIONS",
    "WARM_UP_NS",
    "DeviceTimes",
    "measure",
    "stalled_within",
]

TIMINGS_MIN = 16
"""Timings from which on what was learnt is relied on: the margin for how little is known is 7 % then."""

WARM_UP_EXECUTIONS = 16
"""Timings of a warm-up: as many as ``TIMINGS_MIN``."""

COLD_EXECUTIONS = COLD_COUNT
"""Executions before them that do not count."""

WARM_UP_NS = 2_000_000_000
"""Time after which no further execution is begun, as long as two were timed: models of more than 100 ms would take too long."""

WARM_UP_EXECUTIONS_MIN = 2
"""Timings of a warm-up whatever the time: with fewer, no margin means anything."""

RARE = 0.875
"""Stalls are rare if this share of the executions is without: two of sixteen may have one."""

STALLED_SHARE = 0.1
"""An execution is without a stall if that is shorter than this share of the device time: each thread waits for some microseconds
when it wakes."""


class DeviceTimes:
    """The device times of models."""

    def __init__(self) -> None:
        self._held = Estimates()
        self._net = Estimates()
        self._stalled = Estimates(quantile=RARE)

    def observe(self, key: Hashable, held_ns: int, stalled_ns: int, *, is_whole: bool = True) -> None:
        """Learns from an execution.

        Args:
            key: The model.
            held_ns: The time for which it had its slot.
            stalled_ns: The time within that for which the machine did not run the threads, as far as it is certain.
            is_whole: Whether it was executed to its end.
        """
        limit: Literal["none", "at_least"] = "none" if is_whole else "at_least"
        self._held.observe(key, held_ns, limit)
        self._net.observe(key, max(0, held_ns - stalled_ns), limit)
        self._stalled.observe(key, stalled_ns)

    def observe_excused(self, key: Hashable, held_ns: int, stalled_ns: int) -> None:
        """Learns from a frame that exceeded its budget by a stall of that length: its device time was the budget at most."""
        self._held.observe(key, held_ns)
        self._stalled.observe(key, stalled_ns)

    def count(self, key: Hashable) -> int:
        """Number of executions whose device time counts now."""
        return self._net.count(key)

    def measured(self, key: Hashable) -> Measured:
        """The 0.99 quantile of a model, with margin: without stalls, if they are rare."""
        duration_ns = self._net.duration_ns(key, 1)
        if self._stalled.duration_ns(key, 1) > STALLED_SHARE * duration_ns:
            duration_ns = self._held.duration_ns(key, 1)
        return Measured(duration_ns, self.count(key))

    def forget(self, key: Hashable) -> None:
        """Drops a model that is never asked for again. From any thread, also from a finaliser."""
        for estimates in (self._held, self._net, self._stalled):
            estimates.forget(key)


async def measure(
    execute: Callable[[], Awaitable[Result]],
    stalls: Callable[[], Stalls] = lambda: NO_STALLS,
    observe: Callable[[int, int], None] | None = None,
) -> Measured:
    """Executes up to ``COLD_EXECUTIONS + WARM_UP_EXECUTIONS`` times, one after the other.

    Args:
        execute: Executes a frame once.
        stalls: Gives the stalls of the threads that execute, without a reading: so none of an execution counts for the next. By
            default none is measured.
        observe: Called with the time on the slot and the stall of each execution that counts; None where they are not needed.

    Raises:
        Error: As ``execute``.
    """
    times = DeviceTimes()
    end_ns = now_ns() + WARM_UP_NS
    for number in range(COLD_EXECUTIONS + WARM_UP_EXECUTIONS):
        stalled, began_ns = stalls(), now_ns()
        stalled.look(began_ns)
        result = await execute()
        ended_ns = now_ns()
        if number < COLD_EXECUTIONS:
            continue
        held_ns = result.total_ns - result.queued_ns
        stalled_ns = stalled_within(held_ns, ended_ns - began_ns, stalled.since(began_ns, ended_ns))
        times.observe("", held_ns, stalled_ns)
        if observe is not None:
            observe(held_ns, stalled_ns)
        if now_ns() > end_ns and times.count("") >= WARM_UP_EXECUTIONS_MIN:
            break
    return times.measured("")


def stalled_within(held_ns: int, whole_ns: int, stalled_ns: int) -> int:
    """The part of a stall that was certainly within the time on a slot.

    Args:
        held_ns: The time on the slot.
        whole_ns: The time from before it until after it, for which the stall was measured.
        stalled_ns: The stall.
    """
    return max(0, min(held_ns, stalled_ns - max(0, whole_ns - held_ns)))
