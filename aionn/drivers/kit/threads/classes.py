"""Scheduling classes of a device's threads, where real time is in use: while they wait, and during an execution.

A thread of a device waits under the class HIGH, so that the most urgent job begins immediately. While the driver computes, the
thread has the class of the job: LOW jobs run in the ordinary class, and so does everything that is not an execution. Threads that
an engine starts are unknown to Python; they are found by comparing the threads of the process before and after.

Without real time each of these functions costs a tenth of a microsecond.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aionn.hal import Priority
from aionn.realtime import Scheduling, SchedulingClass, current
from aionn.realtime.threads import threads_here

__all__ = ["EngineThreads", "class_of_priority", "running_as", "serving"]

_CLASS_BY_PRIORITY = {
    Priority.LOW: SchedulingClass.LOW,
    Priority.MEDIUM: SchedulingClass.MEDIUM,
    Priority.HIGH: SchedulingClass.HIGH,
}

LOOKS_MAX = 4
"""Executions of a prepared model after which new threads are looked for: an engine starts its pool with the first one of each
slot, and looking takes some 20 microseconds."""


def class_of_priority(priority: Priority) -> SchedulingClass:
    """The class of jobs of a priority."""
    return _CLASS_BY_PRIORITY[priority]


@contextmanager
def serving(name: str, scheduling_class: SchedulingClass = SchedulingClass.HIGH) -> Iterator[None]:
    """Has the calling thread wait under a class, and gives the class back at the end.

    Args:
        name: The thread's purpose, for people.
        scheduling_class: The class.
    """
    scheduling = current()
    if scheduling is None:
        yield
        return
    scheduling.acquire(scheduling_class, name)
    try:
        yield
    finally:
        scheduling.give_back()


@contextmanager
def running_as(scheduling: Scheduling, scheduling_class: SchedulingClass) -> Iterator[None]:
    """Has the calling thread compute under a class, and then wait under its own again. No effect on a thread without a class."""
    tid = threading.get_native_id()
    before = scheduling.class_of(tid)
    if before is None or before is scheduling_class:
        yield
        return
    scheduling.change(tid, scheduling_class)
    try:
        yield
    finally:
        scheduling.change(tid, before)


class EngineThreads:
    """The threads that an engine starts for one prepared model.

    Args:
        name: Names them in the table.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._looks_left = LOOKS_MAX

    @contextmanager
    def found(self, scheduling_class: SchedulingClass) -> Iterator[None]:
        """Gives a class to the threads that an engine starts within this context: those that Python does not know."""
        scheduling = current()
        if scheduling is None or not self._looks_left:
            yield
            return
        self._looks_left -= 1
        before = threads_here()
        try:
            yield
        finally:
            known = {thread.native_id for thread in threading.enumerate()}
            for tid in sorted(threads_here() - before - known):
                scheduling.acquire(scheduling_class, self._name, tid)
