"""Scheduling classes, and the numbers that the kernel takes for them.

Pure. Two scales: priorities of SCHED_RR where real-time scheduling is permitted, nice values where only those are.

Source: sched(7). Threads of interrupts run at 50 (SCHED_FIFO), RealtimeKit grants 20 at most: all of ours stay below both.
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
"""Between two of our priorities, where the limit leaves room: the user's own threads fit between them."""

PRIORITY_MIN = 3
"""Lowest limit that leaves room for MEDIUM, HIGH and the watchdog above both."""


class SchedulingClass(enum.IntEnum):
    """How urgent the work of a thread is; named as the HAL's priorities are."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2


NICE_BY_CLASS = {SchedulingClass.MEDIUM: -10, SchedulingClass.HIGH: -15}
"""Nice values where real-time scheduling is not permitted. Five steps are a factor of 3 in the share of a processor."""


class Priorities(msgspec.Struct, frozen=True):
    """Priorities of SCHED_RR.

    Attributes:
        medium: Of MEDIUM threads.
        high: Of HIGH threads, above ``medium``.
        watchdog: Of the watchdog, above both.
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
        limit: Highest priority permitted, 0 for none.

    Returns:
        None where fewer than ``PRIORITY_MIN`` are permitted.
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
    # Where less is permitted the classes still differ: MEDIUM takes two thirds of what HIGH takes.
    return max(wanted, -(room if scheduling_class is SchedulingClass.HIGH else 2 * room // 3))
