"""Scheduling classes of a device's threads, where real time is in use: while they wait, and during an execution.

A thread of a device waits under the class HIGH, so that the most urgent job begins immediately, and the thread of a burst under the
class of its model. While the driver computes, the thread has the class of the job: LOW jobs run in the ordinary class, and so does
everything that is not an execution. Threads that an engine starts are unknown to Python; they are found by comparing the threads of
the process before and after.

The thread of a LOW burst runs Python for some tens of microseconds of each execution. If other programs took its processor from it
there, it would keep the interpreter's lock, and HIGH jobs of the process would wait for both. So it has the class MEDIUM except
while the engine computes, if the process also has models above LOW; a process with LOW models alone uses no real-time scheduling
for them. This needs a driver that marks the calls of its engine (``engine_call``): Python that computes without an engine must not
run before other programs.

Without real time each of these functions costs a tenth of a microsecond, and ``engine_call`` nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from aionn.hal import Priority
from aionn.platform.descriptors import closing_threads
from aionn.realtime import Scheduling, SchedulingClass, current
from aionn.realtime.threads import threads_here
from aionn.realtime.threads.slices import take_serving_slice

__all__ = [
    "EngineThreads",
    "class_of_priority",
    "computing",
    "count_model",
    "engine_call",
    "running_as",
    "serving",
]

_T = TypeVar("_T")

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


class _ModelsAboveLow:
    """The number of this process's prepared models above LOW."""

    count = 0

    def forget(self) -> None:
        self.count -= 1


_above_low = _ModelsAboveLow()


def count_model(prepared: object, priority: Priority) -> None:
    """Counts a prepared model until it is dropped, for the class of LOW bursts."""
    if priority > Priority.LOW:
        _above_low.count += 1
        weakref.finalize(prepared, _above_low.forget).atexit = False


@contextmanager
def serving(name: str, scheduling_class: SchedulingClass = SchedulingClass.HIGH) -> Iterator[None]:
    """Has the calling thread wait under a class, and gives the class back at the end.

    Args:
        name: The thread's purpose, for people.
        scheduling_class: The class.
    """
    scheduling = current()
    if scheduling is None:
        take_serving_slice()
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


class _Calls(threading.local):
    """By thread, whether it calls its engine in the class LOW; otherwise in its own."""

    are_low = False


_calls = _Calls()


@contextmanager
def computing(scheduling: Scheduling, job_class: SchedulingClass) -> Iterator[None]:
    """As ``running_as``, for a driver that calls its engine by ``engine_call``: a LOW job has its class only there."""
    tid = threading.get_native_id()
    before = scheduling.class_of(tid)
    if job_class is not SchedulingClass.LOW or before is None:
        with running_as(scheduling, job_class):
            yield
        return
    if before is SchedulingClass.LOW:
        if not _above_low.count:
            yield
            return
        # The thread of a LOW burst: it keeps this class until the models above LOW are gone.
        scheduling.change(tid, SchedulingClass.MEDIUM)
    _calls.are_low = True
    try:
        yield
    finally:
        _calls.are_low = False
        if before is SchedulingClass.MEDIUM and not _above_low.count:
            scheduling.change(tid, SchedulingClass.LOW)


def engine_call(call: Callable[..., _T]) -> Callable[..., _T]:
    """The way to call a function of an engine that releases the interpreter's lock while it computes.

    Args:
        call: The function. Without real time it is returned as it is.
    """
    if current() is None:
        return call

    def call_as_low(*arguments: Any) -> _T:
        scheduling = current()
        if not _calls.are_low or scheduling is None:
            return call(*arguments)
        return scheduling.call_as_low(call, arguments)

    return call_as_low


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
            started = threads_here() - before
            # Afterwards: a thread of Python that starts in between is among these.
            known = {thread.native_id for thread in threading.enumerate()}
            for tid in sorted(started - known - closing_threads()):
                scheduling.acquire(scheduling_class, self._name, tid)
