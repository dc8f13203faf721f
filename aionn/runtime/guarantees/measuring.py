"""The device time of a frame, measured before its stream is admitted: some executions on the device, as a quantile with margin.

Owns the bounds of the measurement. It runs as best effort of the highest class, in memory of the burst with whatever it holds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aionn.runtime.clock import now_ns
from aionn.runtime.executions.results import Result
from aionn.runtime.guarantees.arrivals import Measured
from aionn.scheduler.estimates import COLD_COUNT, Estimates

__all__ = ["COLD_EXECUTIONS", "TIMINGS_MIN", "WARM_UP_EXECUTIONS", "WARM_UP_NS", "measure"]

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


async def measure(execute: Callable[[], Awaitable[Result]]) -> Measured:
    """Executes up to ``COLD_EXECUTIONS + WARM_UP_EXECUTIONS`` times, one after the other.

    Args:
        execute: Executes a frame once.

    Raises:
        Error: As ``execute``.
    """
    estimates = Estimates(window=WARM_UP_EXECUTIONS)
    end_ns = now_ns() + WARM_UP_NS
    for number in range(COLD_EXECUTIONS + WARM_UP_EXECUTIONS):
        result = await execute()
        if number < COLD_EXECUTIONS:
            continue
        estimates.observe("", result.total_ns - result.queued_ns)
        if now_ns() > end_ns and estimates.count("") >= WARM_UP_EXECUTIONS_MIN:
            break
    return Measured(estimates.duration_ns("", 1), estimates.count(""))
