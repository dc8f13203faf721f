"""The time of deadlines: integer nanoseconds on the event loop's clock.

On a real loop that is CLOCK_MONOTONIC, which driver processes share; under a virtual clock it is the virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import math
import time
from collections.abc import Callable, Iterator
from numbers import Integral

import anyio

from aionn.errors import InvalidArgument, MissedDeadline
from aionn.hal import TIME_MAX_NS, check_deadline_ns, duration_text, passed_before_start, wrong_deadline
from aionn.platform.loops import running_loop
from aionn.platform.numbers import DAY_S, MEANT_S_MAX, MEANT_S_MIN, checked_seconds, number_of

__all__ = [
    "after",
    "check_deadline",
    "clock_of_loop",
    "duration_to_ns",
    "missed_at",
    "mistake_in",
    "now_ns",
    "to_ns",
]

PAST_NS_MAX = 60_000_000_000
"""A deadline that passed longer ago, and before this process started, is a mistake: nothing that waits is delivered so late."""

DURATION_MIN = 2
"""Smaller numbers are not taken for durations: 0 and 1 are deadlines that have passed."""

CLOCK_S_MIN = 60.0
"""Seconds as a float that are larger than a minute, and within a minute of a clock, are that clock's, and no duration."""

_USE = "use aionn.after(seconds)"
_NO_LIMIT = "None means no deadline, aionn.after(seconds) is one from now"
_A_DEADLINE = "a deadline, which aionn.after(seconds) makes, is not a duration"

_time_of_asyncio = asyncio.BaseEventLoop.time
_STARTED_NS = time.monotonic_ns()
_AHEAD_NS_MAX = round(DAY_S * 1e9)

_last_plausible_ns = _STARTED_NS + _AHEAD_NS_MAX
"""Deadlines from the start of this process to here are plausible without a look at the clock, which moves it on."""


def now_ns() -> int:
    """The time now: the running loop's, or CLOCK_MONOTONIC outside of a loop."""
    loop = running_loop()
    if loop is None or type(loop).time is _time_of_asyncio:
        # The same clock, without a call of Python: several times in each execution.
        return time.monotonic_ns()
    # Rounded: seconds as a float are seldom exact, and a nanosecond lost here would miss an exact deadline.
    return round(loop.time() * 1e9)


def clock_of_loop() -> Callable[[], int]:
    """The function that gives the time as ``now_ns`` does, for calls in the running loop alone: the kernel's where it can be."""
    loop = running_loop()
    is_real = loop is not None and type(loop).time is _time_of_asyncio
    return time.monotonic_ns if is_real else now_ns


def to_ns(seconds: float, *, what: str) -> int:
    """A duration in seconds as nanoseconds; larger than 64 bits saturates.

    Raises:
        InvalidArgument: It is negative or no number.
    """
    return TIME_MAX_NS if _is_infinite(seconds) else _rounded(checked_seconds(seconds, what, most=None))


def duration_to_ns(seconds: float, *, what: str) -> int:
    """As ``to_ns``, for the longest time that an execution may take. Infinity means no limit.

    Raises:
        InvalidArgument: Also for more than ``DAY_S``: nanoseconds or a deadline, as a rule.
    """
    return (
        TIME_MAX_NS if _is_infinite(seconds) else _rounded(checked_seconds(seconds, what, advice=_A_DEADLINE))
    )


def after(seconds: float) -> int:
    """The deadline ``seconds`` from now: absolute nanoseconds, as every ``deadline=`` expects. Infinity is the end of time.

    Raises:
        InvalidArgument: ``seconds`` is negative or not a number, or more than ``DAY_S``: nanoseconds, as a rule.
    """
    if type(seconds) is float and 0.0 <= seconds <= DAY_S:
        return now_ns() + round(seconds * 1e9)  # As below, for each frame of a stream.
    if _is_infinite(seconds):
        return TIME_MAX_NS
    return now_ns() + _rounded(checked_seconds(seconds, "after", advice="None means no deadline"))


def _is_infinite(seconds: object) -> bool:
    return number_of(seconds) == math.inf


def _rounded(seconds: float) -> int:
    return round(float(seconds) * 1e9) if seconds < TIME_MAX_NS // 10**9 else TIME_MAX_NS


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
    as_given = wrong_deadline(deadline_ns)
    if isinstance(deadline_ns, datetime.timedelta):
        return f"{as_given}; {_meant(deadline_ns.total_seconds())}"
    if callable(deadline_ns):
        return f"{as_given}; a function is for streams, write deadline=aionn.after(seconds)"
    if not isinstance(deadline_ns, Integral) and (seconds := number_of(deadline_ns)) is not None:
        return _mistake_in_seconds(seconds, now, wall_ns, real_ns)
    if isinstance(deadline_ns, bool) or not isinstance(deadline_ns, int) or deadline_ns < 0:
        return f"{as_given}; {_USE}"
    if deadline_ns == TIME_MAX_NS:
        return None
    if deadline_ns > TIME_MAX_NS:
        return f"{as_given}, which is more than 2**63 - 1; {_NO_LIMIT}"
    if abs(deadline_ns - wall_ns) <= _AHEAD_NS_MAX:
        return f"{as_given}, which looks like time.time_ns(), another clock; {_USE}"
    if deadline_ns - now > _AHEAD_NS_MAX:
        ahead = duration_text(deadline_ns - now)
        return f"{as_given}, which is {ahead} ahead, more than a day; {_NO_LIMIT}"
    is_real = abs(now - real_ns) <= PAST_NS_MAX
    is_long_past = deadline_ns < started_ns and now - deadline_ns > PAST_NS_MAX
    if is_real and is_long_past and DURATION_MIN <= deadline_ns <= _AHEAD_NS_MAX:
        return f"{as_given}, which looks like a duration; {_meant(deadline_ns / 1e9)}"
    return None


def _mistake_in_seconds(seconds: float, now: int, wall_ns: int, real_ns: int) -> str:
    """The mistake that a float is in the place of a deadline."""
    as_given = wrong_deadline(seconds)
    for clock, now_s in (("time.time()", wall_ns / 1e9), ("time.monotonic()", real_ns / 1e9)):
        if seconds > CLOCK_S_MIN and abs(seconds - now_s) <= CLOCK_S_MIN:
            return f"{as_given}, which looks like {clock} in seconds; {_USE}"
    if 0 < seconds <= MEANT_S_MAX:
        return f"{as_given}, which looks like seconds from now; did you mean aionn.after({seconds:g})?"
    if abs(seconds - now) <= _AHEAD_NS_MAX:
        return f"{as_given}, a float; write int(...)"
    return f"{as_given}; {_meant(seconds / 1e9)}"


def _meant(seconds: float) -> str:
    """The advice for a duration in the place of a deadline."""
    is_plausible = MEANT_S_MIN <= seconds <= MEANT_S_MAX
    return f"did you mean aionn.after({seconds:g})?" if is_plausible else _USE


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
