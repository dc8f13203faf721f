"""The terms of a stream with a guarantee, as an application states them: seconds as floats.

Owns their check, the usual mistakes in the unit, and the values that are assumed where none is stated.
"""

from __future__ import annotations

import datetime
import math
from numbers import Integral
from typing import Any

from aionn.errors import InvalidArgument
from aionn.hal import TIME_MAX_NS
from aionn.platform.numbers import POSITIVE_S_MIN, checked_seconds
from aionn.scheduler.admission import STREAM_NAME_CHARACTERS_MAX, StreamTerms
from aionn.scheduler.reservations.windows import phase_tolerance_ns

__all__ = [
    "JITTER_SHARE",
    "Seconds",
    "at_phase",
    "changed_terms",
    "check_guarantee",
    "in_progress_max",
    "stated_terms",
]

PLAIN_S_MAX = 10.0
"""Longest period or deadline that a plain number may state: the usual rates, from 15 frames/s, and periods in milliseconds, from
10 ms, are longer, and few streams have less than six frames a minute."""

Seconds = float | datetime.timedelta
"""A period, a deadline or a jitter: seconds, or a timedelta, which has its unit."""

JITTER_SHARE = 0.1
"""The jitter that is assumed where none is stated, as a share of the shorter of period and deadline: an event loop delivers the
frames of a camera some tenths of a millisecond early or late, and without jitter every second of them would count as early."""


def check_guarantee(guarantee: Any, phase_ns: Any = None) -> None:
    """Raises ``InvalidArgument`` for anything but True, False, ``best`` and ``phased``, and for a phase without the last one."""
    if not isinstance(guarantee, bool) and not (
        isinstance(guarantee, str) and guarantee in ("best", "phased")
    ):
        raise InvalidArgument(
            f'stream, guarantee: expected True, False, "best" or "phased", got {guarantee!r}'
        )
    if phase_ns is not None and guarantee != "phased":
        raise InvalidArgument('stream: phase_ns is a term of guarantee="phased"')


def stated_terms(name: str, period: Any, deadline: Any, jitter: Any) -> StreamTerms:
    """The terms of a new stream.

    Args:
        name: Named in messages.
        period: Least seconds between the captures of two frames.
        deadline: Seconds from a frame's capture to its result; None means the period.
        jitter: Longest time in seconds from a frame's capture to its arrival; None means ``JITTER_SHARE``.

    Raises:
        InvalidArgument: One is missing, is not a number of seconds, is not positive (the jitter: negative) or is longer than a day,
            or the jitter leaves nothing of the deadline; or a number of more than ``PLAIN_S_MAX`` seconds, which looks like a
            rate or like milliseconds, and is a ``datetime.timedelta`` if it is meant.
    """
    if not isinstance(name, str) or not 0 < len(name) <= STREAM_NAME_CHARACTERS_MAX:
        raise InvalidArgument(
            f"stream, name: expected a text of 1 to {STREAM_NAME_CHARACTERS_MAX} characters, got {name!r}"
        )
    if period is None:
        raise InvalidArgument(
            "stream, period: a guarantee needs the least seconds between two frames, as period=1/30"
        )
    period_ns = _ns("period", period, POSITIVE_S_MIN)
    if callable(deadline):
        raise InvalidArgument(
            "stream, deadline: expected the seconds from a frame's capture to its result, as deadline=0.03, and got a function: the"
            " deadlines of a stream with a guarantee count from the captures"
        )
    deadline_ns = period_ns if deadline is None else _ns("deadline", deadline, POSITIVE_S_MIN)
    if jitter is None:
        jitter_ns = math.floor(JITTER_SHARE * min(period_ns, deadline_ns))
    else:
        jitter_ns = _ns("jitter", jitter, 0)
    _check_jitter(jitter_ns, deadline_ns)
    return StreamTerms(name=name, period_ns=period_ns, deadline_ns=deadline_ns, jitter_ns=jitter_ns)


def changed_terms(old: StreamTerms, period: Any, deadline: Any, jitter: Any) -> StreamTerms:
    """The terms of a stream that changes; None keeps a value.

    Raises:
        InvalidArgument: As for ``stated_terms``.
    """
    period_ns = old.period_ns if period is None else _ns("period", period, POSITIVE_S_MIN)
    deadline_ns = old.deadline_ns if deadline is None else _ns("deadline", deadline, POSITIVE_S_MIN)
    jitter_ns = old.jitter_ns if jitter is None else _ns("jitter", jitter, 0)
    _check_jitter(jitter_ns, deadline_ns)
    terms = StreamTerms(name=old.name, period_ns=period_ns, deadline_ns=deadline_ns, jitter_ns=jitter_ns)
    return terms if old.phase_ns is None else at_phase(terms, old.phase_ns)


def at_phase(terms: StreamTerms, phase_ns: Any) -> StreamTerms:
    """The terms of a stream whose captures are whole periods away from ``phase_ns``.

    Raises:
        InvalidArgument: It is not a time of the monotonic clock, or jitter and tolerance leave nothing of the period or deadline.
    """
    is_integer = isinstance(phase_ns, Integral) and not isinstance(phase_ns, bool)
    if not is_integer or not 0 <= phase_ns <= TIME_MAX_NS:
        is_long = is_integer and abs(phase_ns) > TIME_MAX_NS
        raise InvalidArgument(
            "stream, phase_ns: expected the time of a capture in nanoseconds on the monotonic clock, as captured_at_ns of a frame,"
            f" got {'a number of 19 digits or more' if is_long else repr(phase_ns)}"
        )
    tolerance_ns = phase_tolerance_ns(terms.period_ns, terms.jitter_ns)
    width_ns, shorter_ns = terms.jitter_ns + 2 * tolerance_ns, min(terms.deadline_ns, terms.period_ns)
    if width_ns >= shorter_ns:
        raise InvalidArgument(
            f'stream, jitter: with guarantee="phased" its frames may come within {width_ns / 1e9:g} s (the jitter, and'
            f" {tolerance_ns / 1e9:g} s before and after it for the drift of clocks); expected less than"
            f" {shorter_ns / 1e9:g} s, the shorter of period and deadline"
        )
    return StreamTerms(
        name=terms.name,
        period_ns=terms.period_ns,
        deadline_ns=terms.deadline_ns,
        jitter_ns=terms.jitter_ns,
        phase_ns=int(phase_ns),
        tolerance_ns=tolerance_ns,
    )


def in_progress_max(terms: StreamTerms) -> int:
    """The most frames of a stream between their arrivals and their deadlines: the buffers that it needs, besides that of the
    result that its consumer looks at."""
    return -(-terms.deadline_ns // terms.period_ns)


def _ns(field: str, value: Any, least_s: float) -> int:
    is_meant = isinstance(value, datetime.timedelta)
    seconds = checked_seconds(value.total_seconds() if is_meant else value, f"stream, {field}", least=least_s)
    if seconds > PLAIN_S_MAX and not is_meant and field != "jitter":  # That has the deadline as its limit.
        rate = f"a rate ({field}=1/{seconds:g}) or " if field == "period" else ""
        raise InvalidArgument(
            f"stream, {field}: expected a number of seconds, and {seconds:g} looks like {rate}milliseconds"
            f" ({field}={seconds / 1e3:g}); write {field}=datetime.timedelta(seconds={seconds:g}) if it is meant"
        )
    # Down, since a source rounds its times one by one; the thousandth is for 0.056, which is a little less than that as a float.
    return math.floor(seconds * 1e9 + 1e-3)


def _check_jitter(jitter_ns: int, deadline_ns: int) -> None:
    if jitter_ns >= deadline_ns:
        raise InvalidArgument(
            f"stream, jitter: expected less than the deadline of {deadline_ns / 1e9:g} s, got {jitter_ns / 1e9:g} s"
        )
