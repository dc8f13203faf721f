"""Quality of service: preference, priority, deadlines, loop timeouts, and the fences that an execution waits for.

Owns the words and the limits. A deadline is an absolute time in nanoseconds of CLOCK_MONOTONIC (the HIDL interfaces' clock), None
without a deadline; a duration is in nanoseconds, None without one.

Source: ``ExecutionPreference`` (1.1), ``Priority`` and ``OptionalTimePoint`` (1.3), ``LoopTimeoutDurationNs`` (1.3).
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Sequence

from aionn.errors import InvalidArgument, MissedDeadline, class_text, shown
from fences import FenceStatus, SyncFence

__all__ = [
    "LOOP_TIMEOUT_DEFAULT_NS",
    "LOOP_TIMEOUT_MAX_NS",
    "TIME_MAX_NS",
    "ExecutionPreference",
    "Priority",
    "check_deadline_ns",
    "check_duration_ns",
    "check_fences",
    "duration_text",
    "effective_loop_timeout_ns",
    "passed_before_start",
    "wrong_deadline",
]

LOOP_TIMEOUT_DEFAULT_NS = 2_000_000_000
"""Default limit of a WHILE; the spec's number."""

LOOP_TIMEOUT_MAX_NS = 15_000_000_000
"""The most that a WHILE may take; longer wishes are clamped to it; the spec's number."""

LATE_NS_MAX = 60_000_000_000
"""A deadline that passed longer ago is hardly late work: 0, which is meant as none, or a time of another clock."""

TIME_MAX_NS = 2**63 - 1
"""The end of time: times and durations fit a signed 64-bit integer, as on the HAL's wire."""


class ExecutionPreference(enum.IntEnum):
    """The aim of a compilation."""

    LOW_POWER = 0
    FAST_SINGLE_ANSWER = 1
    SUSTAINED_SPEED = 2


class Priority(enum.IntEnum):
    """The class of an execution among those that wait for one device."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2


def check_deadline_ns(deadline_ns: int | None, *, where: str) -> int | None:
    """Returns the deadline when it is legal.

    Raises:
        InvalidArgument: It is not an integer, is negative, or does not fit 64 bits.
    """
    if deadline_ns is None or _is_time(deadline_ns):
        return deadline_ns
    raise InvalidArgument(f"{where}: {wrong_deadline(deadline_ns)}")


def wrong_deadline(value: object) -> str:
    """The one message about a deadline that is not one; advice may follow."""
    return f"deadline: expected nanoseconds on the monotonic clock or None, got {shown(value)}"


def check_duration_ns(duration_ns: int | None, *, where: str) -> int | None:
    """Returns the duration when it is legal.

    Raises:
        InvalidArgument: It is not an integer, is negative, or does not fit 64 bits.
    """
    if duration_ns is None or _is_time(duration_ns):
        return duration_ns
    raise InvalidArgument(
        f"{where}: expected a duration in nanoseconds of at least 0 or None, got {shown(duration_ns)}"
    )


def _is_time(value_ns: object) -> bool:
    return isinstance(value_ns, int) and 0 <= value_ns <= TIME_MAX_NS


def check_fences(
    wait_for: Sequence[SyncFence], *, where: str, may_have_failed: bool = False
) -> tuple[SyncFence, ...]:
    """Returns the fences to wait for when an execution may be launched behind them.

    Args:
        wait_for: The fences.
        where: Whose they are, for the message.
        may_have_failed: Whether the receiver of the fences checks that instead.

    Raises:
        InvalidArgument: It is not a list, or one is not a fence, or has failed already.
    """
    try:
        fences = tuple(wait_for)
    except TypeError:
        raise InvalidArgument(
            f"{where}: expected a list of fences, got {class_text(wait_for)}; write [fence]"
        ) from None
    for index, fence in enumerate(fences):
        if not isinstance(fence, SyncFence):
            advice = "; write net.execute_fenced(...).fence" if inspect.iscoroutine(fence) else ""
            raise InvalidArgument(
                f"{where}, fence {index}: expected a SyncFence, got {class_text(fence)}{advice}"
            )
        if not may_have_failed and fence.status == FenceStatus.FAILED:
            raise InvalidArgument(f"{where}, fence {index}: has failed already: {fence.error}")
    return fences


def effective_loop_timeout_ns(loop_timeout_ns: int | None) -> int:
    """The time that a WHILE may take: the default when None, never more than the maximum."""
    return LOOP_TIMEOUT_DEFAULT_NS if loop_timeout_ns is None else min(loop_timeout_ns, LOOP_TIMEOUT_MAX_NS)


def duration_text(ns: int) -> str:
    """A duration for people: three digits and a unit, such as ``33 ms``."""
    for unit, size in (("days", 86_400 * 10**9), ("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns // size} {unit}"
    return f"{ns} ns"


def passed_before_start(where: str, late_ns: int) -> MissedDeadline:
    """The error of work that was asked for when its deadline had passed; asking again does not help.

    Args:
        where: The place that the message names.
        late_ns: The time since the deadline.
    """
    message = f"{where}: the deadline had passed before the start, too late by {duration_text(late_ns)}"
    if late_ns > LATE_NS_MAX:
        message += "; None means no deadline, aionn.after(seconds) is one from now"
    return MissedDeadline(message, transient=False)
