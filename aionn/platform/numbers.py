"""Numbers that an application gives, and durations in seconds among them.

Owns the types that are accepted as a number, and the one message about a duration that makes no sense. Refuses to own deadlines,
which are absolute times: see ``aionn.runtime.clock``.
"""

from __future__ import annotations

import datetime
import operator
import sys
from numbers import Integral, Real
from typing import Final

from aionn.errors import InvalidArgument, shown

__all__ = ["DAY_S", "MEANT_S_MAX", "MEANT_S_MIN", "POSITIVE_S_MIN", "checked_seconds", "number_of"]

DAY_S: Final = 86_400.0
"""The longest duration of an execution or a deadline, in seconds: none takes a day, and nanoseconds taken for seconds are longer
from 0.1 ms on."""

MEANT_S_MIN: Final = 1e-4
"""Shorter durations are hardly meant where a number is taken for another unit: 33,000 may be microseconds as well."""

MEANT_S_MAX: Final = 3_600.0
"""Longer durations are hardly meant either: such a number is a time of a clock."""

POSITIVE_S_MIN: Final = 1e-9
"""The least duration above 0: times are whole nanoseconds."""


def number_of(value: object) -> int | float | None:
    """Python's number for one of any class; None for anything else, and for a fraction that no float can hold."""
    if isinstance(value, bool):
        return None
    try:
        if isinstance(value, Integral):
            return operator.index(value)
        return float(value) if isinstance(value, Real) else None
    except OverflowError:
        return None


def checked_seconds(
    value: object, where: str, *, least: float = 0, most: float | None = DAY_S, advice: str = ""
) -> float:
    """Returns a duration in seconds, as Python's number, if it is within its range.

    Args:
        value: The argument.
        where: The function and the argument; begins the message.
        least: The shortest one, which is permitted; ``POSITIVE_S_MIN`` excludes 0 alone.
        most: The longest one, which is permitted; None permits every finite number.
        advice: Ends the message about a duration that is too long and looks like no other unit.

    Raises:
        InvalidArgument: It is not a number of seconds, or is outside of the range. The message suggests a duration where the number
            looks like one in nanoseconds, or in milliseconds where the range ends within an hour.
    """
    number = number_of(value)
    # Written so that a NaN fails as well.
    if number is not None and least <= number <= (sys.float_info.max if most is None else most):
        return number
    low = "above 0" if least == POSITIVE_S_MIN else f"of at least {least:g}"
    high = "" if most is None else f" and at most {most:g}{' (a day)' if most == DAY_S else ''}"
    if isinstance(value, datetime.timedelta):
        advice = "write its total_seconds()"
    elif number is None or most is None or not number > most:
        advice = ""
    else:
        advice = _other_unit(number, most) or advice
    raise InvalidArgument(
        f"{where}: expected a number of seconds {low}{high}, got {shown(value)}{advice and f'; {advice}'}"
    )


def _other_unit(number: float, most: float) -> str:
    """The duration that a number which is too large looks like; empty for none."""
    units = [("nanoseconds", 1e9)] if most > MEANT_S_MAX else [("milliseconds", 1e3), ("nanoseconds", 1e9)]
    for unit, in_a_second in units:
        # Multiplied: a whole number of 400 digits has no quotient.
        if MEANT_S_MIN * in_a_second <= number <= min(most, MEANT_S_MAX) * in_a_second:
            return f"did you mean {number / in_a_second:g}? It looks like {unit}"
    return ""
