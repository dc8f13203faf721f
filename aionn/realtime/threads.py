"""Scheduling of single threads: granted by class, told in a table, and given back exactly.

A thread is named by its number in the kernel (``threading.get_native_id``), since those of an engine's pool are none of Python's.

Invariants:
1. What a thread was before is read before anything is changed, and set again by ``give_back``: policy, priority, nice value, timer
slack.
   One exception, which the kernel makes: without CAP_SYS_NICE a process may not clear SCHED_RESET_ON_FORK. The flag stays, and does
   nothing to an ordinary thread whose nice value is not negative.
2. No call fails because the machine refuses: the thread stays what it was, and the table says why.
3. A thread runs under SCHED_RR only while the watchdog knows of it.

Facts about the kernel: SCHED_RESET_ON_FORK counts for new threads as well as for new processes, so that an engine's pool, which its
first execution may start, has to be granted by itself (see ``threads_here``). From Linux 6.13 on the timer slack of a real-time
thread is 0 and cannot be set; it is set back after the policy for that reason.

Source: sched(7), sched_setscheduler(2), prctl(2) for the timer slack, whose file in /proc needs no library call.
"""

from __future__ import annotations

import enum
import errno
import os
import threading
from typing import Protocol

import msgspec

from aionn.realtime.permission import Permission, Way
from aionn.realtime.priorities import SchedulingClass, nice_of
from aionn.realtime.reading import read_text
from aionn.realtime.realtimekit import Offer, make_realtime

__all__ = ["Guard", "State", "ThreadRow", "Threads", "threads_here"]

SLACK_NS = 1
"""Timer slack of threads that wait: the least, as 0 stands for the default of 50 microseconds."""

ROWS_MAX = 4096
"""Most threads in one table: more than an engine's pool has on the largest machine. What calls in a loop by mistake ends there."""

POLICY_NAMES = {
    os.SCHED_OTHER: "SCHED_OTHER",
    os.SCHED_FIFO: "SCHED_FIFO",
    os.SCHED_RR: "SCHED_RR",
    os.SCHED_BATCH: "SCHED_BATCH",
    os.SCHED_IDLE: "SCHED_IDLE",
    6: "SCHED_DEADLINE",
}
REALTIME = (os.SCHED_FIFO, os.SCHED_RR)
ORDINARY = os.sched_param(0)
DEADLINE = 6
"""SCHED_DEADLINE, which Python 3.11 has no name for."""


class Guard(Protocol):
    """What looks after real-time threads; the watchdog."""

    def watch(self, pid: int, tid: int, name: str) -> bool:
        """Looks after a thread from now on; False where that is impossible."""

    def forget(self, pid: int, tid: int) -> None:
        """Looks after a thread no longer."""

    def take_put_back(self) -> list[tuple[int, int, int]]:
        """Threads that were put back since the last call: process, thread, and what it ran without a pause in nanoseconds."""


class State(enum.StrEnum):
    """What became of a thread."""

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
        tid: Its number.
        name: What it does, for people.
        scheduling_class: What was asked for.
        state: What became of it. ``ORDINARY``: of LOW, or where nothing is permitted. ``OWN``: it had a real-time policy of its own
            that is at least as urgent, which stays. ``PUT_BACK``: the watchdog saw it run for too long.
        policy: Of the kernel, now.
        priority: Of SCHED_RR or SCHED_FIFO, otherwise 0.
        nice: Its nice value.
        slack_ns: Its timer slack; None where it cannot be read.
        reason: Why it is not what was asked for; empty if it is.
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


class _Before(msgspec.Struct, frozen=True):
    """What a thread was."""

    policy: int
    priority: int
    nice: int
    slack_ns: int | None
    started: str


class _Held(msgspec.Struct):
    """A thread that was granted something."""

    name: str
    before: _Before
    scheduling_class: SchedulingClass
    state: State
    reason: str
    is_watched: bool = False


class Threads:
    """The threads of this process that were granted a class. May be used from any thread."""

    def __init__(self, permission: Permission, guard: Guard | None, offer: Offer | None = None) -> None:
        """Makes an empty table.

        Args:
            permission: What this process may do.
            guard: What looks after real-time threads; None lets no thread have SCHED_RR.
            offer: RealtimeKit's, where ``permission`` is by it.
        """
        self.permission = permission
        self._guard = guard
        self._offer = offer
        self._held: dict[int, _Held] = {}
        # A handler of a signal may call ``put_back_all`` while this thread is in another call.
        self._lock = threading.RLock()

    def acquire(self, scheduling_class: SchedulingClass, name: str, tid: int | None = None) -> ThreadRow:
        """Grants a thread what this process may give to its class, or another class than before.

        Blocks for some hundred microseconds, by RealtimeKit for a second at most.

        Args:
            scheduling_class: How urgent its work is.
            name: What it does, for the table and the watchdog's line.
            tid: The thread; None for the one that calls. Timer slack of another can be set only with CAP_SYS_NICE.

        Returns:
            What it is now. No exception where the machine refuses.
        """
        tid = threading.get_native_id() if tid is None else tid
        with self._lock:
            held = self._held.get(tid)
            try:
                if held is None or held.before.started != _started(tid):
                    if held is None and len(self._held) >= ROWS_MAX:
                        return self._row(
                            tid,
                            _Held(
                                name,
                                _read(tid),
                                scheduling_class,
                                State.REFUSED,
                                f"the table holds {ROWS_MAX} threads",
                            ),
                        )
                    held = self._held[tid] = _Held(name, _read(tid), scheduling_class, State.ORDINARY, "")
                held.name, held.scheduling_class = name, scheduling_class
                held.is_watched = False  # Told again: the watchdog may be another one by now.
                held.state, held.reason = self._grant(tid, held)
                if scheduling_class is not SchedulingClass.LOW:
                    _set_slack(tid, SLACK_NS)
            except ProcessLookupError:
                self._held.pop(tid, None)
                before = _Before(os.SCHED_OTHER, 0, 0, None, "")
                held = _Held(name, before, scheduling_class, State.GONE, "the thread has ended")
            return self._row(tid, held)

    def change(self, tid: int, scheduling_class: SchedulingClass) -> bool:
        """Another class for a thread that was granted one: a system call of some microseconds, for the path of an execution.

        By RealtimeKit a thread keeps the class that it was acquired with: each raise is a question to another process, which
        answers a few of them in a minute.

        Returns:
            Whether it has that class now. False also for a thread that the watchdog put back: it must be acquired again.
        """
        with self._lock:
            held = self._held.get(tid)
            if held is None or held.state is State.PUT_BACK:
                return False
            if held.scheduling_class is scheduling_class and not held.reason:
                return True
            if self._offer is not None:
                return False
            held.scheduling_class = scheduling_class
            try:
                held.state, held.reason = self._grant(tid, held)
            except ProcessLookupError:
                held.state, held.reason = State.GONE, "the thread has ended"
            return not held.reason

    def give_back(self, tid: int | None = None) -> str:
        """Makes a thread what it was before. One that has none, or has ended, is left alone.

        Args:
            tid: The thread; None for the one that calls.

        Returns:
            What could not be set back; empty for nothing.
        """
        tid = threading.get_native_id() if tid is None else tid
        with self._lock:
            held = self._held.pop(tid, None)
            if held is None:
                return ""
            try:
                left = _restore(tid, held.before)
            except ProcessLookupError:
                left = ""
            # The watchdog looks until the thread is an ordinary one.
            if self._guard is not None:
                self._guard.forget(os.getpid(), tid)
            return left

    def close(self) -> list[str]:
        """Gives all threads back.

        Returns:
            A line for each thread of which something could not be set back.
        """
        with self._lock:
            names = {tid: held.name for tid, held in self._held.items()}
        return [f"{name} ({tid}): {left}" for tid, name in names.items() if (left := self.give_back(tid))]

    def put_back(self, tid: int, reason: str) -> None:
        """Makes a real-time thread ordinary at once and notes why; for what notices that a thread does not yield."""
        with self._lock:
            held = self._held.get(tid)
            if held is not None and held.state is State.REALTIME:
                try:
                    _set_ordinary(tid)
                except OSError as e:
                    reason = f"{reason}; {_failed('sched_setscheduler', e)}"
                held.state, held.reason = State.PUT_BACK, reason

    def put_back_all(self, reason: str) -> None:
        """Makes every real-time thread ordinary at once and notes why."""
        for tid in list(self._held):
            self.put_back(tid, reason)

    def table(self) -> list[ThreadRow]:
        """Every thread that was granted something, as the kernel has it now."""
        with self._lock:
            self._note_put_back()
            return [self._row(tid, held) for tid, held in self._held.items()]

    def _note_put_back(self) -> None:
        if self._guard is None:
            return
        for pid, tid, ran_ns in self._guard.take_put_back():
            held = self._held.get(tid) if pid == os.getpid() else None
            if held is not None:
                held.state = State.PUT_BACK
                held.reason = f"it ran {ran_ns // 1_000_000} ms without a pause"

    def _grant(self, tid: int, held: _Held) -> tuple[State, str]:
        """Sets what the class is here; the lock is held."""
        before, wanted = held.before, held.scheduling_class
        policy = before.policy & ~os.SCHED_RESET_ON_FORK
        if policy == DEADLINE:
            return State.OWN, "it runs under SCHED_DEADLINE, which stays"
        if wanted is SchedulingClass.LOW:
            return self._grant_low(tid, before)
        if (priorities := self.permission.priorities) is not None:
            priority = priorities.of(wanted)
            if policy in REALTIME and before.priority >= priority:
                return State.OWN, f"it has {POLICY_NAMES[policy]} {before.priority} of its own, which stays"
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
                return State.REFUSED, _failed("setpriority", e)
            return State.NICE, ""
        return State.REFUSED, str(self.permission)

    def _grant_low(self, tid: int, before: _Before) -> tuple[State, str]:
        """LOW is the ordinary class, with the nice value that the thread had before."""
        policy = before.policy & ~os.SCHED_RESET_ON_FORK
        try:
            if self.permission.priorities is not None or policy in REALTIME:
                ordinary = os.SCHED_OTHER if policy in REALTIME else policy
                # The flag stays until the thread is given back: clearing it needs CAP_SYS_NICE.
                os.sched_setscheduler(tid, ordinary | os.SCHED_RESET_ON_FORK, ORDINARY)
            else:
                os.setpriority(os.PRIO_PROCESS, tid, before.nice)
        except ProcessLookupError:
            raise
        except OSError as e:
            return State.REFUSED, _failed("setting the ordinary class", e)
        return State.ORDINARY, ""

    def _grant_realtime(self, tid: int, held: _Held, priority: int) -> tuple[State, str]:
        if self._guard is None:
            return State.REFUSED, "no watchdog looks after real-time threads"
        if not held.is_watched:
            if not self._guard.watch(os.getpid(), tid, held.name):
                return State.REFUSED, "the watchdog does not look after it"
            held.is_watched = True
        try:
            os.sched_setscheduler(tid, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
            return State.REALTIME, ""
        except ProcessLookupError:
            raise
        except OSError as e:
            reason = _failed("sched_setscheduler", e)
        if self._offer is not None:
            # RealtimeKit grants a thread, not a process: each raise is asked for.
            refused = make_realtime(self._offer, os.getpid(), tid, priority)
            if refused is None:
                return State.REALTIME, ""
            reason = f"RealtimeKit: {refused.sentence}"
        return State.REFUSED, reason

    @staticmethod
    def _row(tid: int, held: _Held) -> ThreadRow:
        state = held.state
        try:
            if _started(tid) != held.before.started:
                raise ProcessLookupError
            now = _read(tid)
        except ProcessLookupError:
            now, state = held.before, State.GONE
        policy = now.policy & ~os.SCHED_RESET_ON_FORK
        reason = held.reason
        if state is State.REALTIME and policy not in REALTIME:
            # Somebody else: the watchdog, RealtimeKit's own, an administrator.
            state, reason = State.PUT_BACK, reason or "something put it back"
        name = POLICY_NAMES.get(policy, str(policy))
        return ThreadRow(
            tid, held.name, held.scheduling_class, state, name, now.priority, now.nice, now.slack_ns, reason
        )


def threads_here() -> set[int]:
    """The threads of this process; those that an engine started are the difference between two calls."""
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return {threading.get_native_id()}


def _read(tid: int) -> _Before:
    """What a thread is now.

    Raises:
        ProcessLookupError: It has ended.
    """
    slack = read_text(f"/proc/{tid}/timerslack_ns").strip()
    return _Before(
        os.sched_getscheduler(tid),
        os.sched_getparam(tid).sched_priority,
        os.getpriority(os.PRIO_PROCESS, tid),
        int(slack) if slack.isdecimal() else None,
        _started(tid),
    )


def _restore(tid: int, before: _Before) -> str:
    """Sets a thread back, and says what could not be."""
    if _started(tid) != before.started:
        raise ProcessLookupError(errno.ESRCH, "another thread has its number")
    problems = []
    param = os.sched_param(before.priority)
    if (
        os.sched_getscheduler(tid) != before.policy
        or os.sched_getparam(tid).sched_priority != before.priority
    ):
        try:
            os.sched_setscheduler(tid, before.policy, param)
        except PermissionError:
            try:
                os.sched_setscheduler(tid, before.policy | os.SCHED_RESET_ON_FORK, param)
            except ProcessLookupError:
                raise
            except OSError as e:
                problems.append(_failed("sched_setscheduler", e))
    if os.getpriority(os.PRIO_PROCESS, tid) != before.nice:
        try:
            os.setpriority(os.PRIO_PROCESS, tid, before.nice)
        except ProcessLookupError:
            raise
        except OSError as e:
            problems.append(_failed("setpriority", e))
    if before.slack_ns and not _set_slack(tid, before.slack_ns):
        problems.append("its timer slack can be set only by itself or with CAP_SYS_NICE")
    return "; ".join(problems)


def _set_ordinary(tid: int) -> None:
    # With the flag that it has: clearing it needs CAP_SYS_NICE.
    flag = os.sched_getscheduler(tid) & os.SCHED_RESET_ON_FORK
    os.sched_setscheduler(tid, os.SCHED_OTHER | flag, ORDINARY)


def _set_slack(tid: int, slack_ns: int) -> bool:
    """Sets the timer slack of a thread; whether it has it now."""
    path = f"/proc/{tid}/timerslack_ns"
    if read_text(path).strip() == str(slack_ns):
        return True
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, str(slack_ns).encode())
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _started(tid: int) -> str:
    """When a thread of this process began, in ticks since the machine did; numbers of threads are used again.

    Raises:
        ProcessLookupError: There is no such thread here.
    """
    # The name before it may hold blanks and brackets.
    fields = read_text(f"/proc/self/task/{tid}/stat").rpartition(")")[2].split()
    if len(fields) < 20:
        raise ProcessLookupError(errno.ESRCH, f"no thread {tid} in this process")
    return fields[19]


def _failed(call: str, error: OSError) -> str:
    return f"{call} failed with {errno.errorcode.get(error.errno or 0, str(error.errno))}"
