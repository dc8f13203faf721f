"""The time of deadlines: integer nanoseconds on the event loop's clock.

On a real loop that is CLOCK_MONOTONIC, which driver processes share; under a virtual clock it is the virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator

import anyio

from aionn.errors import InvalidArgument, MissedDeadline
from aionn.hal import TIME_MAX_NS

__all__ = ["after", "missed_at", "now_ns", "to_ns"]


def now_ns() -> int:
    """The time now: the running loop's, or CLOCK_MONOTONIC outside of a loop."""
    try:
        # Rounded: seconds as a float are seldom exact, and a nanosecond lost here would miss an exact deadline.
        return round(asyncio.get_running_loop().time() * 1e9)
    except RuntimeError:  # Called from a thread without a loop.
        return time.monotonic_ns()


def to_ns(seconds: float, *, what: str) -> int:
    """A duration in seconds as nanoseconds; larger than 64 bits saturates.

    Raises:
        InvalidArgument: It is negative or no number.
    """
    if not isinstance(seconds, int | float) or math.isnan(seconds) or seconds < 0:
        raise InvalidArgument(f"{what}: expected seconds of at least 0, got {seconds!r}")
    return min(round(seconds * 1e9), TIME_MAX_NS) if math.isfinite(seconds) else TIME_MAX_NS


def after(seconds: float) -> int:
    """The deadline ``seconds`` from now: absolute nanoseconds, as every ``deadline=`` expects.

    Raises:
        InvalidArgument: ``seconds`` is negative or no number.
    """
    return min(now_ns() + to_ns(seconds, what="after"), TIME_MAX_NS)


@contextlib.contextmanager
def missed_at(deadline_ns: int | None, what: str) -> Iterator[None]:
    """Ends its body at a deadline, wherever that waits; None means no deadline.

    Raises:
        MissedDeadline: The deadline passed.
    """
    if deadline_ns is None:
        yield
        return
    if now_ns() >= deadline_ns:
        raise MissedDeadline(f"{what}: the deadline had passed before the start", transient=False)
    with anyio.CancelScope(deadline=deadline_ns / 1e9) as scope:
        yield
    if scope.cancelled_caught:
        raise MissedDeadline(f"{what}: the deadline passed", transient=True)
