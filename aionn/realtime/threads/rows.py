"""The rows of the table of threads, what the table keeps of each thread, and the interface of the watchdog that it uses."""

from __future__ import annotations

import enum
from typing import Protocol

import msgspec

from aionn.realtime.priorities import SchedulingClass
from aionn.realtime.threads.kernel import ThreadState

__all__ = ["Guard", "Held", "State", "ThreadRow"]


class Guard(Protocol):
    """The watchdog's interface: it monitors real-time threads."""

    def watch(self, pid: int, tid: int, name: str) -> bool:
        """Monitors a thread from now on; False means that it cannot."""

    def forget(self, pid: int, tid: int) -> None:
        """Stops monitoring a thread."""

    def take_put_back(self) -> list[tuple[int, int, int, int]]:
        """The threads put back since the last call: process, thread, the nanoseconds that it ran without a pause, and whether
        it may be a real-time thread again after some seconds (1) or not (0)."""

    def take_rested(self) -> list[tuple[int, int]]:
        """The threads that may be real-time threads again since the last call: process and thread."""


class State(enum.StrEnum):
    """The state of a thread in the table."""

    REALTIME = "real time"
    NICE = "nice"
    ORDINARY = "ordinary"
    REFUSED = "refused"
    OWN = "its own"
    PUT_BACK = "put back"
    GONE = "gone"


class ThreadRow(msgspec.Struct, frozen=True):
    """A thread in the table.

    Attributes:
        tid: Its number in the kernel.
        name: Its purpose, for people.
        scheduling_class: The requested class.
        state: Its state. ``ORDINARY``: the class is LOW. ``REFUSED``: the machine does not permit the class. ``OWN``: the thread
            had a policy of its own that is at least as high, and keeps it. ``PUT_BACK``: it ran for too long and was made ordinary;
            the reason states whether it gets its class again.
        policy: Its current policy in the kernel.
        priority: Its priority under SCHED_RR or SCHED_FIFO, otherwise 0.
        nice: Its nice value.
        slack_ns: Its timer slack; None if it cannot be read.
        reason: The reason why it does not have the requested class; empty if it has.
        slice_ns: Its slice, in place of the kernel's: for an ordinary thread above LOW. None if it has the kernel's.
        slice_reason: The reason why an ordinary thread above LOW has the kernel's slice; empty for all others.
        times_put_back: Number of times that the watchdog put it back since it was granted a class.
    """

    tid: int
    name: str
    scheduling_class: SchedulingClass
    state: State
    policy: str
    priority: int
    nice: int
    slack_ns: int | None
    reason: str = ""
    slice_ns: int | None = None
    slice_reason: str = ""
    times_put_back: int = 0


class Held(msgspec.Struct):
    """A granted thread, with its state before."""

    name: str
    before: ThreadState
    scheduling_class: SchedulingClass
    state: State
    reason: str
    is_watched: bool = False
    has_slice: bool = False
    slice_reason: str = ""
    times_put_back: int = 0
