"""Scheduling of single threads: granted by class, listed in a table, and restored exactly.

A thread is identified by its number in the kernel (``threading.get_native_id``), since the threads of an engine's pool are unknown
to Python.

Invariants:
1. The state of a thread (policy, priority, nice value, slice, timer slack) is read before it is changed, and ``give_back`` restores
   it. The kernel makes one exception: without CAP_SYS_NICE a process may not clear SCHED_RESET_ON_FORK. The flag stays, and has no
   effect on an ordinary thread whose nice value is not negative.
2. No call fails because the machine does not permit it: the thread keeps its state, and the table has the reason.
3. A thread runs under SCHED_RR only while the watchdog monitors it. If the watchdog has ended, ``lose_guard`` makes all threads
   ordinary that this table had made real-time threads.
4. A thread of the class LOW has the slice that it had before.
5. A thread that was put back is ordinary until the watchdog reports that it has rested, or until it is acquired again.

SCHED_RESET_ON_FORK applies to new threads as well as to new processes, so the threads of an engine's pool, which the first
execution may start, must be granted one by one (see ``threads_here``).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from aionn.realtime.permission import Permission, Way
from aionn.realtime.priorities import SchedulingClass, nice_of
from aionn.realtime.realtimekit import Offer, make_realtime
from aionn.realtime.threads.kernel import (
    DEADLINE,
    ORDINARY,
    POLICY_NAMES,
    REALTIME,
    ThreadState,
    failed,
    is_realtime,
    read_state,
    restore,
    sched_setscheduler,
    set_ordinary,
    set_policy,
    set_slack,
    start_time,
)
from aionn.realtime.threads.rows import Guard, Held, State, ThreadRow
from aionn.realtime.threads.slices import SLICE_NS, read_attributes, restore_slice, set_slice
from aionn.realtime.watching import REST_NS

__all__ = ["Threads", "threads_here"]

_logger = logging.getLogger("aionn.manager")
_T = TypeVar("_T")

SLACK_NS = 1
"""Timer slack of granted threads: the least, since 0 means the default of 50 microseconds."""

ROWS_MAX = 4096
"""Most threads in one table: more than an engine's pool has on the largest machine. It bounds calls in an erroneous loop."""


LINES_MAX = 64
"""Most lines that wait to be logged: one for each thread that got real time again since the last report was read."""


class Threads:
    """The threads of this process that were granted a class. May be used from any thread."""

    def __init__(self, permission: Permission, guard: Guard | None, offer: Offer | None = None) -> None:
        """Makes an empty table.

        Args:
            permission: The scheduling that this process may use.
            guard: The watchdog; None means that no thread gets SCHED_RR.
            offer: The limits of RealtimeKit; None if ``permission`` does not come from it.
        """
        self.permission = permission
        self._guard = guard
        self._no_guard = "there is no watchdog to monitor real-time threads"
        self._offer = offer
        self._held: dict[int, Held] = {}
        self._said: list[str] = []
        # A signal handler may call ``put_back_all`` while this thread holds the lock.
        self._lock = threading.RLock()

    def acquire(self, scheduling_class: SchedulingClass, name: str, tid: int | None = None) -> ThreadRow:
        """Grants a thread the scheduling that this process may give to a class; the thread may have another class already.

        Blocks for some hundred microseconds; with RealtimeKit for at most a second.

        Args:
            scheduling_class: The class of the thread's jobs.
            name: The thread's purpose, for the table and the watchdog's messages.
            tid: The thread; None means the calling thread. Setting the timer slack of another thread needs CAP_SYS_NICE.

        Returns:
            Its row of the table. If the machine does not permit the class, the row has the reason, and no exception is raised.
        """
        tid = threading.get_native_id() if tid is None else tid
        with self._lock:
            held = self._held.get(tid)
            try:
                if held is None or held.before.started != start_time(tid):
                    if len(self._held) >= ROWS_MAX:
                        self._forget_ended()
                    if held is None and len(self._held) >= ROWS_MAX:
                        return self._row(
                            tid,
                            Held(
                                name,
                                read_state(tid),
                                scheduling_class,
                                State.REFUSED,
                                f"the table holds {ROWS_MAX} threads",
                            ),
                        )
                    held = self._held[tid] = Held(name, read_state(tid), scheduling_class, State.ORDINARY, "")
                held.name, held.scheduling_class = name, scheduling_class
                held.is_watched = (
                    False  # So that ``_grant`` registers it again: another connection may have taken it over.
                )
                held.slice_reason = ""
                self._note_reports()  # Those about this thread end with the grant.
                self._grant(tid, held)
                self._note_reports()  # The grant may have read some about other threads.
                if scheduling_class is not SchedulingClass.LOW:
                    set_slack(tid, SLACK_NS)
            except ProcessLookupError:
                return self._without(tid, name, scheduling_class, State.GONE, "the thread has ended")
            except OSError as e:
                return self._without(
                    tid, name, scheduling_class, State.REFUSED, failed("reading its state", e)
                )
            return self._row(tid, held)

    def _without(
        self, tid: int, name: str, scheduling_class: SchedulingClass, state: State, reason: str
    ) -> ThreadRow:
        """The row of a thread whose state cannot be read, which is not kept."""
        self._held.pop(tid, None)
        policy = POLICY_NAMES[os.SCHED_OTHER]
        return ThreadRow(tid, name, scheduling_class, state, policy, 0, 0, None, reason)

    def change(self, tid: int, scheduling_class: SchedulingClass) -> bool:
        """Gives a granted thread another class: a system call of some microseconds, for use on the path of an execution.

        With RealtimeKit a thread keeps the class of ``acquire``, or becomes LOW for good: each other change would be a call to
        another process, which answers only a few of them in a minute.

        Returns:
            Whether it has that class now. False also for a thread that was put back: it gets the class with its next real time.
        """
        held = self._held.get(tid)
        if held is None or (held.state is State.PUT_BACK and self._note_class(held, scheduling_class)):
            return False
        if held.scheduling_class is scheduling_class and not held.reason:
            return True
        if self._offer is not None:
            return scheduling_class is SchedulingClass.LOW and self._lower(tid, held)
        priorities = self.permission.priorities
        try:
            if priorities is None or not held.is_watched or held.has_slice:
                return self._change_slowly(tid, held, scheduling_class)
            # Without the lock, which a thread that has just become ordinary could hold while other programs run.
            if held.state is State.REALTIME and not is_realtime(tid):
                self.put_back(tid, "the watchdog or another process made it ordinary")
                return False
            return self._switch(tid, held, scheduling_class, priorities.of(scheduling_class))
        except ProcessLookupError:
            held.state, held.reason = State.GONE, "the thread has ended"
            return False

    def _note_class(self, held: Held, scheduling_class: SchedulingClass) -> bool:
        """Keeps the class of a thread that was put back; False if it has got real time again in the meantime."""
        with self._lock:
            if held.state is State.PUT_BACK:
                held.scheduling_class = scheduling_class
            return held.state is State.PUT_BACK

    def call_as_low(self, call: Callable[..., _T], arguments: tuple[Any, ...]) -> _T:
        """Calls a function that releases the interpreter's lock, with the calling thread in the class LOW.

        As ``change`` before and after, but as an ordinary thread it runs no more Python than the two calls need: if it lost its
        processor to other programs with the interpreter's lock, all threads of the process would wait.
        """
        tid = threading.get_native_id()
        held, priorities = self._held.get(tid), self.permission.priorities
        if (
            held is None
            or priorities is None
            or not held.is_watched
            or held.has_slice
            or self._offer is not None
        ):
            return self._call_slowly(held, call, arguments)
        before = held.scheduling_class
        priority = priorities.of(before)
        if priority and held.state is State.REALTIME and not is_realtime(tid):
            self.put_back(tid, "the watchdog or another process made it ordinary")
        if held.state is State.PUT_BACK:
            return self._call_slowly(held, call, arguments)
        if not priority or held.state is not State.REALTIME:
            return call(*arguments)
        ordinary = held.before.policy & ~os.SCHED_RESET_ON_FORK
        low = (os.SCHED_OTHER if ordinary in REALTIME else ordinary) | os.SCHED_RESET_ON_FORK
        high, zero, number = os.SCHED_RR | os.SCHED_RESET_ON_FORK, ctypes.c_int(0), ctypes.c_int(priority)
        param, param_before = ctypes.byref(zero), ctypes.byref(number)
        held.scheduling_class, held.state = SchedulingClass.LOW, State.ORDINARY
        sched_setscheduler(0, low, param)
        try:
            return call(*arguments)
        finally:
            is_refused = sched_setscheduler(0, high, param_before) != 0
            held.scheduling_class, held.state = before, State.REALTIME
            if is_refused:
                held.state = State.REFUSED
                held.reason = f"sched_setscheduler: {os.strerror(ctypes.get_errno())}"
            if self._held.get(tid) is not held:
                # It was given back during the call.
                restore(tid, held.before)
            elif not held.is_watched:
                self._end_realtime(tid, held)

    def _call_slowly(self, held: Held | None, call: Callable[..., _T], arguments: tuple[Any, ...]) -> _T:
        if held is None:
            return call(*arguments)
        tid, before = threading.get_native_id(), held.scheduling_class
        self.change(tid, SchedulingClass.LOW)
        try:
            return call(*arguments)
        finally:
            self.change(tid, before)

    def _lower(self, tid: int, held: Held) -> bool:
        """Makes a thread LOW, for which no permission is needed."""
        with self._lock:
            if self._held.get(tid) is not held:
                return False
            try:
                self._take_slice(tid, held)
                held.state, held.reason = self._grant_low(tid, held.before)
            except ProcessLookupError:
                held.state, held.reason = State.GONE, "the thread has ended"
            held.scheduling_class = SchedulingClass.LOW
            return not held.reason

    def _change_slowly(self, tid: int, held: Held, scheduling_class: SchedulingClass) -> bool:
        with self._lock:
            if self._held.get(tid) is not held:
                return False
            held.scheduling_class = scheduling_class
            self._grant(tid, held)
            return not held.reason

    def _switch(self, tid: int, held: Held, scheduling_class: SchedulingClass, priority: int) -> bool:
        """Changes between classes of a monitored thread."""
        ordinary = (
            os.SCHED_OTHER if held.before.policy & ~os.SCHED_RESET_ON_FORK in REALTIME else held.before.policy
        )
        policy = os.SCHED_RR if priority else ordinary
        held.scheduling_class = scheduling_class
        held.state = State.REALTIME if priority else State.ORDINARY
        number = set_policy(tid, policy | os.SCHED_RESET_ON_FORK, priority)
        if number == errno.ESRCH:
            raise ProcessLookupError(number, "the thread has ended")
        held.reason = ""
        if number:
            held.state = State.REFUSED
            held.reason = f"sched_setscheduler failed with {errno.errorcode.get(number, number)}"
        if self._held.get(tid) is not held:
            # It was given back during the change.
            restore(tid, held.before)
            return False
        if not held.is_watched:
            self._end_realtime(tid, held)
        return not held.reason

    def class_of(self, tid: int) -> SchedulingClass | None:
        """The class of a granted thread; None if it was not granted one. Takes no lock: for use on the path of an execution."""
        held = self._held.get(tid)
        return None if held is None else held.scheduling_class

    def give_back(self, tid: int | None = None) -> str:
        """Restores the state of a thread. Has no effect on a thread that was not granted a class or has ended.

        Args:
            tid: The thread; None means the calling thread.

        Returns:
            The parts that could not be restored; empty if all were.
        """
        tid = threading.get_native_id() if tid is None else tid
        with self._lock:
            held = self._held.pop(tid, None)
            if held is None:
                return ""
            try:
                left = restore(tid, held.before)
            except ProcessLookupError:
                left = ""
            # Only now, so that the watchdog monitors the thread for as long as it is a real-time thread.
            if self._guard is not None:
                self._guard.forget(os.getpid(), tid)
            return left

    def close(self) -> list[str]:
        """Restores all threads.

        Returns:
            A line for each thread that could not be restored completely.
        """
        with self._lock:
            names = {tid: held.name for tid, held in self._held.items()}
        return [f"{name} ({tid}): {left}" for tid, name in names.items() if (left := self.give_back(tid))]

    def put_back(self, tid: int, reason: str) -> None:
        """Makes a real-time thread ordinary immediately and records the reason; for code that detects a thread that does not
        yield."""
        with self._lock:
            held = self._held.get(tid)
            if held is not None and held.state is State.REALTIME:
                try:
                    set_ordinary(tid)
                except OSError as e:
                    reason = f"{reason}; {failed('sched_setscheduler', e)}"
                held.state, held.reason = State.PUT_BACK, reason

    def put_back_all(self, reason: str) -> None:
        """Makes every real-time thread ordinary immediately and records the reason."""
        for tid in list(self._held):
            self.put_back(tid, reason)

    def lose_guard(self, reason: str) -> list[str]:
        """Makes every real-time thread ordinary, since the watchdog has ended, and grants SCHED_RR to none from now on.

        Args:
            reason: The reason that the table has for each thread that does not get its class from now on.

        Returns:
            The names of the threads that were real-time threads.
        """
        with self._lock:
            self._note_reports()
            self._guard, self._no_guard = None, reason
            found = []
            # First all of them: a thread that is changing its own class looks at this after the change, without the lock.
            for held in self._held.values():
                held.is_watched = False
            for tid, held in self._held.items():
                if held.state is State.REALTIME:
                    found.append(held.name)
                if held.state is not State.OWN:
                    self._end_realtime(tid, held)
            return found

    def _end_realtime(self, tid: int, held: Held) -> None:
        """Makes a thread ordinary that nothing monitors any longer."""
        with self._lock:
            if self._held.get(tid) is not held:
                return
            try:
                if is_realtime(tid):
                    set_ordinary(tid)
                    if held.state is not State.PUT_BACK:
                        self._grant(tid, held)
            except ProcessLookupError:
                held.state, held.reason = State.GONE, "the thread has ended"
            except OSError as e:
                held.reason = failed("sched_setscheduler", e)

    def renew_lock(self) -> None:
        """In a forked child, which has none of the threads that may have held it."""
        self._lock = threading.RLock()

    def table(self) -> list[ThreadRow]:
        """The rows of all granted threads, with their current state in the kernel."""
        with self._lock:
            self._note_reports()
            return [self._row(tid, held) for tid, held in self._held.items()]

    def _forget_ended(self) -> None:
        """Drops the rows of threads that have ended: those of an engine's pool end without giving anything back."""
        for tid, held in list(self._held.items()):
            try:
                has_ended = start_time(tid) != held.before.started
            except ProcessLookupError:
                has_ended = True
            if has_ended:
                del self._held[tid]

    def note_reports(self) -> None:
        """Records what the watchdog has reported, gives real time again to the threads that may have it, and logs this."""
        guard = self._guard
        if guard is None:
            return
        # Without the lock: the main thread may be stopped in a call to the guard by a signal whose handler needs it.
        put_back, rested = guard.take_put_back(), guard.take_rested()
        with self._lock:
            self._note(put_back, rested)
            said, self._said = self._said, []
        for line in said:
            _logger.warning("%s", line)

    def _note_reports(self) -> None:
        """As ``note_reports``, with the lock, so that the lines are left to the next call of that."""
        if self._guard is not None:
            self._note(self._guard.take_put_back(), self._guard.take_rested())

    def _note(self, put_back: list[tuple[int, int, int, int]], rested: list[tuple[int, int]]) -> None:
        for pid, tid, ran_ns, is_for_now in put_back:
            held = self._held.get(tid) if pid == os.getpid() else None
            if held is not None:
                held.state, held.times_put_back = State.PUT_BACK, held.times_put_back + 1
                later = (
                    f"gets real time again after {REST_NS / 1e9:g} s without that"
                    if is_for_now
                    else "stays ordinary"
                )
                held.reason = f"it ran {ran_ns // 1_000_000} ms without a pause, and {later}"
        for pid, tid in rested:
            held = self._held.get(tid) if pid == os.getpid() else None
            if held is not None and held.state is State.PUT_BACK:
                self._give_again(tid, held)

    def _give_again(self, tid: int, held: Held) -> None:
        """Gives a thread its class again that was put back and has rested."""
        try:
            if start_time(tid) != held.before.started:
                raise ProcessLookupError
            self._grant(tid, held)
        except ProcessLookupError:
            held.state, held.reason = State.GONE, "the thread has ended"
        except OSError as e:
            held.state, held.reason = State.REFUSED, failed("reading its state", e)
        said = f"is not a real-time thread again: {held.reason}" if held.reason else "gets real time again"
        line = f"the thread {held.name!r} ({tid} of process {os.getpid()}) {said}"
        self._said = [*self._said, line][-LINES_MAX:]

    def _grant(self, tid: int, held: Held) -> None:
        """Applies the requested class; the caller holds the lock."""
        if held.scheduling_class is SchedulingClass.LOW or self.permission.priorities is not None:
            # Before the change: the kernel keeps the slice of a thread under SCHED_RR, and uses it again afterwards.
            self._take_slice(tid, held)
        held.state, held.reason = self._grant_class(tid, held)
        if held.scheduling_class is not SchedulingClass.LOW and held.state in (State.NICE, State.REFUSED):
            self._give_slice(tid, held)

    @staticmethod
    def _give_slice(tid: int, held: Held) -> None:
        """Gives an ordinary thread a short slice, which needs no permission. A changed nice value leaves it."""
        if held.has_slice or held.slice_reason:
            return
        if held.before.nice < 0:
            # SCHED_RESET_ON_FORK, which keeps the slice from new threads, would take this value from them, also later.
            held.slice_reason = f"it keeps the kernel's slice with its own nice value {held.before.nice}"
            return
        try:
            now = read_attributes(tid)
            if now.policy != os.SCHED_OTHER:
                held.slice_reason = f"{POLICY_NAMES.get(now.policy, now.policy)} has no slices"
            elif not now.slice_ns:
                held.slice_reason = "the kernel has no slices of single threads; Linux 6.12 and newer have"
            else:
                set_slice(tid, SLICE_NS, resets_on_fork=True)
                held.has_slice = True
        except ProcessLookupError:
            raise
        except OSError as e:
            held.slice_reason = failed("sched_setattr", e)

    @staticmethod
    def _take_slice(tid: int, held: Held) -> None:
        """Restores the slice of a thread."""
        if not held.has_slice:
            return
        try:
            restore_slice(tid, held.before.slice_ns)
            held.has_slice = False
        except ProcessLookupError:
            raise
        except OSError as e:
            held.slice_reason = failed("sched_setattr", e)

    def _grant_class(self, tid: int, held: Held) -> tuple[State, str]:
        """Applies the policy or the nice value of the requested class."""
        before, wanted = held.before, held.scheduling_class
        policy = before.policy & ~os.SCHED_RESET_ON_FORK
        if policy == DEADLINE:
            return State.OWN, "it keeps its own policy SCHED_DEADLINE"
        if wanted is SchedulingClass.LOW:
            return self._grant_low(tid, before)
        if (priorities := self.permission.priorities) is not None:
            priority = priorities.of(wanted)
            if policy in REALTIME and before.priority >= priority:
                return State.OWN, f"it keeps its own policy {POLICY_NAMES[policy]} {before.priority}"
            return self._grant_realtime(tid, held, priority)
        if self.permission.way is Way.NICE:
            nice = nice_of(wanted, self.permission.nice_lowest)
            if before.nice <= nice or policy in REALTIME:
                return State.OWN, ""
            try:
                os.setpriority(os.PRIO_PROCESS, tid, nice)
            except ProcessLookupError:
                raise
            except OSError as e:
                return State.REFUSED, failed("setpriority", e)
            # Threads and processes that it starts are not to inherit the value. Refused, the value holds all the same.
            if not before.policy & os.SCHED_RESET_ON_FORK:
                set_policy(tid, before.policy | os.SCHED_RESET_ON_FORK, 0)
            return State.NICE, ""
        return State.REFUSED, "real-time scheduling is not permitted"

    def _grant_low(self, tid: int, before: ThreadState) -> tuple[State, str]:
        """Gives a thread the class LOW: the ordinary policy, with the nice value that the thread had before."""
        policy = before.policy & ~os.SCHED_RESET_ON_FORK
        try:
            if self.permission.priorities is not None or policy in REALTIME:
                ordinary = os.SCHED_OTHER if policy in REALTIME else policy
                # The flag is kept, since clearing it needs CAP_SYS_NICE.
                os.sched_setscheduler(tid, ordinary | os.SCHED_RESET_ON_FORK, ORDINARY)
            else:
                os.setpriority(os.PRIO_PROCESS, tid, before.nice)
        except ProcessLookupError:
            raise
        except OSError as e:
            return State.REFUSED, failed("setting the ordinary class", e)
        return State.ORDINARY, ""

    def _grant_realtime(self, tid: int, held: Held, priority: int) -> tuple[State, str]:
        if self._guard is None:
            return State.REFUSED, self._no_guard
        if not held.is_watched:
            if not self._guard.watch(os.getpid(), tid, held.name):
                return State.REFUSED, "the watchdog cannot monitor it"
            held.is_watched = True
        try:
            os.sched_setscheduler(tid, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
            return State.REALTIME, ""
        except ProcessLookupError:
            raise
        except OSError as e:
            reason = failed("sched_setscheduler", e)
        if self._offer is not None:
            # RealtimeKit grants single threads, not a process, so it is asked for each thread.
            refused = make_realtime(self._offer, os.getpid(), tid, priority)
            if refused is None:
                return State.REALTIME, ""
            reason = f"RealtimeKit: {refused.sentence}"
        return State.REFUSED, reason

    @staticmethod
    def _row(tid: int, held: Held) -> ThreadRow:
        state = held.state
        try:
            if start_time(tid) != held.before.started:
                raise ProcessLookupError
            now = read_state(tid)
        except ProcessLookupError:
            now, state = held.before, State.GONE
        policy = now.policy & ~os.SCHED_RESET_ON_FORK
        reason = held.reason
        if state is State.REALTIME and policy not in REALTIME:
            # Another process changed it: a watchdog, that of RealtimeKit, or an administrator.
            state, reason = State.PUT_BACK, reason or "another process made it ordinary"
        name = POLICY_NAMES.get(policy, str(policy))
        return ThreadRow(
            tid,
            held.name,
            held.scheduling_class,
            state,
            name,
            now.priority,
            now.nice,
            now.slack_ns,
            reason,
            now.slice_ns if held.has_slice else None,
            held.slice_reason,
            held.times_put_back,
        )


def threads_here() -> set[int]:
    """The threads of this process; the difference between two calls gives the threads that an engine started."""
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return {threading.get_native_id()}
