"""Where signal times come from, and the checks of times that callers give.

Owns: the process-wide clock. Refuses to own: a loop's clock, which nothing in this package reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fences.state import TIME_NS_MAX

Clock = Callable[[], int]
"""Gives a time in ns."""

SECONDS_MAX = 3_600.0
"""A float up to an hour in the place of nanoseconds is taken for seconds in the advice of an error."""

_clock: Clock = time.monotonic_ns


def set_clock(clock: Clock) -> Clock:
    """Set where signal times come from when the caller gives none, for the whole process; returns the clock before.

    Args:
        clock: Gives the time in ns. The first one is ``time.monotonic_ns``; a loop with virtual time sets its own.
    """
    global _clock
    before, _clock = _clock, clock
    return before


def now_ns() -> int:
    """The time by the clock that signal times come from, in ns."""
    return _clock()


def the_clock() -> Clock:
    """The clock itself, for a loop that asks it often."""
    return _clock


def checked_int(value: int, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what}: expected an int, got {type(value).__name__}")
    return value


def checked_duration(value_ns: int, what: str) -> int:
    expected = f"{what}: expected nanoseconds of at least 0 or None"
    if isinstance(value_ns, bool) or not isinstance(value_ns, int):
        is_seconds = isinstance(value_ns, float) and 0 < value_ns <= SECONDS_MAX
        advice = f"; seconds are round({value_ns!r} * 1e9)" if is_seconds else ""
        raise TypeError(f"{expected}, got {value_ns!r}{advice}")
    if value_ns < 0:
        raise ValueError(f"{expected}, got {value_ns}")
    return value_ns


def checked_time(at_ns: int) -> int:
    if not 0 <= checked_int(at_ns, "at_ns") <= TIME_NS_MAX:
        raise ValueError(f"at_ns: expected 0..{TIME_NS_MAX}, got {at_ns}")
    return at_ns
