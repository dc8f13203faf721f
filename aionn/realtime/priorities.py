"""Scheduling classes, and the numbers that the kernel uses for them.

Pure. There are two scales: priorities of SCHED_RR where real-time scheduling is permitted, nice values where only those are
permitted.

Source: sched(7). Threads of interrupts run at 50 (SCHED_FIFO), RealtimeKit grants at most 20: all priorities here are below both.
"""

from __future__ import annotations

import enum

import msgspec

__all__ = [
    "DISTANCE",
    "NICE_BY_CLASS",
    "PRIORITY_MIN",
    "Priorities",
    "SchedulingClass",
    "nice_of",
    "priorities_within",
]

DISTANCE = 5
"""Distance between two of these priorities if the limit permits: an application's own threads fit between them."""

PRIORITY_MIN = 3
"""Lowest limit that leaves room for MEDIUM, HIGH and the watchdog above both."""


class SchedulingClass(enum.IntEnum):
    """The class of a thread's jobs; the names are those of the HAL's priorities."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2


NICE_BY_CLASS = {SchedulingClass.MEDIUM: -10, SchedulingClass.HIGH: -15}
"""Nice values where real-time scheduling is not permitted. Five steps are a factor of 3 in the share of a processor."""


class Priorities(msgspec.Struct, frozen=True):
    """Priorities of SCHED_RR.

    Attributes:
        medium: The priority of MEDIUM threads.
        high: The priority of HIGH threads, above ``medium``.
        watchdog: The priority of the watchdog, above both.
    """

    medium: int
    high: int
    watchdog: int

    def of(self, scheduling_class: SchedulingClass) -> int:
        """The priority of a class; 0 for LOW, which runs under the ordinary class."""
        return (0, self.medium, self.high)[scheduling_class]


def priorities_within(limit: int) -> Priorities | None:
    """The priorities that fit below a limit, at equal distances.

    Args:
        limit: Highest priority permitted; 0 means none.

    Returns:
        None if the limit is below ``PRIORITY_MIN``.
    """
    if limit < PRIORITY_MIN:
        return None
    step = min(DISTANCE, limit // 3)
    return Priorities(step, 2 * step, 3 * step)


def nice_of(scheduling_class: SchedulingClass, lowest: int) -> int:
    """The nice value of a class where only nice values are permitted.

    Args:
        scheduling_class: MEDIUM or HIGH; LOW keeps the thread's own.
        lowest: Smallest nice value permitted.
    """
    wanted = NICE_BY_CLASS[scheduling_class]
    room = max(0, -lowest)
    # Under a smaller limit the classes still differ: MEDIUM gets two thirds of the reduction that HIGH gets.
    return max(wanted, -(room if scheduling_class is SchedulingClass.HIGH else 2 * room // 3))
