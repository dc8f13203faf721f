"""The time of deadlines: integer nanoseconds on the event loop's clock.

On a real loop that is CLOCK_MONOTONIC, which driver processes share; under a virtual clock it is the virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import math
import time
from collections.abc import Iterator
from numbers import Integral, Real

import anyio

from aionn.errors import InvalidArgument, MissedDeadline
from aionn.hal import TIME_MAX_NS, check_deadline_ns, duration_text, passed_before_start

__all__ = ["after", "check_deadline", "duration_to_ns", "missed_at", "mistake_in", "now_ns", "to_ns"]

AHEAD_S_MAX = 86_400.0
"""The farthest deadline, in seconds from now: no execution takes a day, and nanoseconds taken for seconds are longer from 0.1 ms
on. ``2**63 - 1`` is the end of time, and allowed.
"""

PAST_NS_MAX = 60_000_000_000
"""A deadline that passed longer ago, and before this process started, is a mistake: nothing that waits is delivered so late."""

DURATION_MIN = 2
"""Smaller numbers are not taken for durations: 0 and 1 are deadlines that have passed."""

DURATION_NS_MIN = 100_000
"""Smaller durations are hardly meant as nanoseconds: 33 may be milliseconds, 33,000 microseconds."""

CLOCK_S_MIN = 60.0
"""Seconds as a float that are larger than a minute, and within a minute of a clock, are that clock's, and no duration."""

_STARTED_NS = time.monotonic_ns()
_AHEAD_NS_MAX = round(AHEAD_S_MAX * 1e9)

_last_plausible_ns = _STARTED_NS + _AHEAD_NS_MAX
"""Deadlines from the start of this process to here are plausible without a look at the clock, which moves it on."""


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
    if not isinstance(seconds, Real) or not seconds >= 0:
        advice = "; write its total_seconds()" if isinstance(seconds, datetime.timedelta) else ""
        raise InvalidArgument(f"{what}: expected seconds of at least 0, got {seconds!r}{advice}")
    return round(float(seconds) * 1e9) if seconds < TIME_MAX_NS // 10**9 else TIME_MAX_NS


def duration_to_ns(seconds: float, *, what: str) -> int:
    """As ``to_ns``, for the longest time that an execution may take. Infinity means no limit.

    Raises:
        InvalidArgument: Also for more than ``AHEAD_S_MAX``: nanoseconds or a deadline, as a rule.
    """
    duration_ns = to_ns(seconds, what=what)
    if duration_ns > _AHEAD_NS_MAX and seconds != math.inf:
        advice = f"; did you mean {seconds / 1e9:g}?" if seconds < 1e9 * AHEAD_S_MAX else ""
        raise InvalidArgument(
            f"{what}: expected at most {AHEAD_S_MAX:g} seconds (a day), got {seconds!r}{advice}"
        )
    return duration_ns


def after(seconds: float) -> int:
    """The deadline ``seconds`` from now: absolute nanoseconds, as every ``deadline=`` expects. Infinity is the end of time.

    Raises:
        InvalidArgument: ``seconds`` is negative or not a number, or more than ``AHEAD_S_MAX``: nanoseconds, as a rule.
    """
    duration_ns = to_ns(seconds, what="after")
    if duration_ns > _AHEAD_NS_MAX and seconds != math.inf:
        looks_like_ns = seconds >= DURATION_NS_MIN
        advice = _did_you_mean(min(seconds, TIME_MAX_NS)) if looks_like_ns else "None means no deadline"
        raise InvalidArgument(
            f"after: expected at most {AHEAD_S_MAX:g} seconds (a day), got {seconds!r}; {advice}"
        )
    return min(now_ns() + duration_ns, TIME_MAX_NS)


def check_deadline(deadline_ns: int | None, *, where: str) -> int | None:
    """Returns the deadline that an application gave, as an int, when it is plausible. Costs two comparisons for one that is.

    Raises:
        InvalidArgument: It is not a time, or a mistake; see ``mistake_in``.
    """
    if deadline_ns is None:
        return None
    if type(deadline_ns) is int and _STARTED_NS <= deadline_ns <= _last_plausible_ns:
        return deadline_ns
    return _looked_at(deadline_ns, where)


def _looked_at(deadline_ns: int, where: str) -> int:
    global _last_plausible_ns
    if isinstance(deadline_ns, Integral):  # Sums with an integer of numpy are integers of numpy.
        deadline_ns = deadline_ns if isinstance(deadline_ns, bool) else int(deadline_ns)
    now, real_ns = now_ns(), time.monotonic_ns()
    mistake = mistake_in(deadline_ns, now, wall_ns=time.time_ns(), real_ns=real_ns, started_ns=_STARTED_NS)
    if mistake is not None:
        raise InvalidArgument(f"{where}: {mistake}")
    check_deadline_ns(deadline_ns, where=where)
    _last_plausible_ns = real_ns + _AHEAD_NS_MAX
    return deadline_ns


def mistake_in(deadline_ns: object, now: int, *, wall_ns: int, real_ns: int, started_ns: int) -> str | None:
    """The usual mistake that a deadline is, and what to write instead; None for a deadline that may be meant.

    Args:
        deadline_ns: The application's argument.
        now: The time on the clock of deadlines.
        wall_ns: ``time.time_ns()``.
        real_ns: CLOCK_MONOTONIC. Where it differs from ``now``, time is virtual and begins anywhere: the past is not judged.
        started_ns: CLOCK_MONOTONIC when this process started.
    """
    use = "use aionn.after(seconds)"
    as_given = f"deadline: expected nanoseconds on the monotonic clock, got {deadline_ns!r}"
    if isinstance(deadline_ns, datetime.timedelta):
        return f"{as_given}; {_did_you_mean(deadline_ns.total_seconds() * 1e9)}"
    if callable(deadline_ns):
        return f"{as_given}; a function is for streams, write deadline=aionn.after(seconds)"
    if isinstance(deadline_ns, bool) or not isinstance(deadline_ns, int | float):
        return f"{as_given}; {use}"
    if deadline_ns == TIME_MAX_NS:
        return None
    if isinstance(deadline_ns, float):
        for clock, seconds in (("time.time()", wall_ns / 1e9), ("time.monotonic()", real_ns / 1e9)):
            if deadline_ns > CLOCK_S_MIN and abs(deadline_ns - seconds) <= CLOCK_S_MIN:
                return f"{as_given}, which looks like {clock} in seconds; {use}"
        # More than a day of seconds: nanoseconds.
        return f"{as_given}, a float; write int(...)" if deadline_ns > AHEAD_S_MAX else None
    if abs(deadline_ns - wall_ns) <= _AHEAD_NS_MAX:
        return f"{as_given}, which looks like time.time_ns(), another clock; {use}"
    if deadline_ns - now > _AHEAD_NS_MAX:
        ahead = duration_text(deadline_ns - now)
        return f"{as_given}, which is {ahead} ahead, more than a day; None means no deadline, and {use}"
    is_real = abs(now - real_ns) <= PAST_NS_MAX
    is_long_past = deadline_ns < started_ns and now - deadline_ns > PAST_NS_MAX
    if is_real and is_long_past and DURATION_MIN <= deadline_ns <= _AHEAD_NS_MAX:
        advice = use if deadline_ns < DURATION_NS_MIN else _did_you_mean(deadline_ns)
        return f"{as_given}, which looks like a duration; {advice}"
    return None


def _did_you_mean(ns: float) -> str:
    return f"did you mean aionn.after({ns / 1e9:g})?"


@contextlib.contextmanager
def missed_at(deadline_ns: int | None, what: str) -> Iterator[None]:
    """Ends its body at a deadline, wherever that waits; None means no deadline.

    Raises:
        MissedDeadline: The deadline passed.
    """
    if deadline_ns is None:
        yield
        return
    late_ns = now_ns() - deadline_ns
    if late_ns >= 0:
        raise passed_before_start(what, late_ns)
    with anyio.CancelScope(deadline=deadline_ns / 1e9) as scope:
        yield
    if scope.cancelled_caught:
        raise MissedDeadline(f"{what}: the deadline passed", transient=True)
