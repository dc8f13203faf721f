"""The state of a thread in the kernel: read, changed, and restored exactly.

A thread is identified by its number in the kernel (``threading.get_native_id``), since the threads of an engine's pool are unknown
to Python.

Fact about the kernel: from Linux 6.13 on the timer slack of a real-time thread is 0 and cannot be set; for that reason it is
restored after the policy.

Source: sched(7), sched_setscheduler(2), prctl(2) for the timer slack, whose file in /proc needs no library call.
"""

from __future__ import annotations

import ctypes
import errno
import os

import msgspec

from aionn.realtime.reading import read_text
from aionn.realtime.threads.slices import read_attributes, restore_slice

__all__ = [
    "DEADLINE",
    "ORDINARY",
    "POLICY_NAMES",
    "REALTIME",
    "ThreadState",
    "failed",
    "is_realtime",
    "read_state",
    "restore",
    "sched_setscheduler",
    "set_ordinary",
    "set_policy",
    "set_slack",
    "start_time",
]

DEADLINE = 6
"""SCHED_DEADLINE; Python 3.11 has no name for it."""

POLICY_NAMES = {
    os.SCHED_OTHER: "SCHED_OTHER",
    os.SCHED_FIFO: "SCHED_FIFO",
    os.SCHED_RR: "SCHED_RR",
    os.SCHED_BATCH: "SCHED_BATCH",
    os.SCHED_IDLE: "SCHED_IDLE",
    DEADLINE: "SCHED_DEADLINE",
}
REALTIME = (os.SCHED_FIFO, os.SCHED_RR)

_libc = ctypes.CDLL(None, use_errno=True)
sched_setscheduler = _libc.sched_setscheduler
"""The function of the C library; ``set_policy`` calls it and reads its errno."""

sched_setscheduler.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
ORDINARY = os.sched_param(0)


class ThreadState(msgspec.Struct, frozen=True):
    """The state of a thread in the kernel.

    Attributes:
        policy: Its policy, with the flag SCHED_RESET_ON_FORK if it is set.
        priority: Its priority under SCHED_RR or SCHED_FIFO, otherwise 0.
        nice: Its nice value.
        slack_ns: Its timer slack; None if it cannot be read.
        slice_ns: Its slice under SCHED_OTHER; 0 under another policy, with Linux before 6.12, and if it cannot be read.
        started: See ``start_time``.
    """

    policy: int
    priority: int
    nice: int
    slack_ns: int | None
    slice_ns: int
    started: str


def read_state(tid: int) -> ThreadState:
    """The current state of a thread in the kernel.

    Raises:
        ProcessLookupError: It has ended.
    """
    slack = read_text(f"/proc/{tid}/timerslack_ns").strip()
    return ThreadState(
        os.sched_getscheduler(tid),
        os.sched_getparam(tid).sched_priority,
        os.getpriority(os.PRIO_PROCESS, tid),
        int(slack) if slack.isdecimal() else None,
        _read_slice(tid),
        start_time(tid),
    )


def _read_slice(tid: int) -> int:
    try:
        return read_attributes(tid).slice_ns
    except ProcessLookupError:
        raise
    except OSError:
        return 0


def restore(tid: int, before: ThreadState) -> str:
    """Restores a thread. Returns the parts that could not be restored; empty if all were."""
    if start_time(tid) != before.started:
        raise ProcessLookupError(errno.ESRCH, "its number belongs to another thread now")
    problems = []
    param = os.sched_param(before.priority)
    if (
        os.sched_getscheduler(tid) != before.policy
        or os.sched_getparam(tid).sched_priority != before.priority
    ):
        try:
            os.sched_setscheduler(tid, before.policy, param)
        except ProcessLookupError:
            raise
        except OSError:  # It is not permitted, or a sandbox has no such system call.
            try:
                os.sched_setscheduler(tid, before.policy | os.SCHED_RESET_ON_FORK, param)
            except ProcessLookupError:
                raise
            except OSError as e:
                problems.append(failed("sched_setscheduler", e))
    if os.getpriority(os.PRIO_PROCESS, tid) != before.nice:
        try:
            os.setpriority(os.PRIO_PROCESS, tid, before.nice)
        except ProcessLookupError:
            raise
        except OSError as e:
            problems.append(failed("setpriority", e))
    try:
        restore_slice(tid, before.slice_ns)
    except ProcessLookupError:
        raise
    except OSError as e:
        problems.append(failed("sched_setattr", e))
    if before.slack_ns and not set_slack(tid, before.slack_ns):
        problems.append("its timer slack can be set only by itself or with CAP_SYS_NICE")
    return "; ".join(problems)


def is_realtime(tid: int) -> bool:
    """Whether a thread runs under SCHED_RR or SCHED_FIFO."""
    return os.sched_getscheduler(tid) & ~os.SCHED_RESET_ON_FORK in REALTIME


def set_policy(tid: int, policy: int, priority: int) -> int:
    """As ``os.sched_setscheduler``, without the interpreter's lock; returns the errno, 0 for success.

    A thread that makes itself ordinary may lose the processor to other programs within the call. With the interpreter's lock it
    would stop every other thread of this process.
    """
    if sched_setscheduler(tid, policy, ctypes.byref(ctypes.c_int(priority))) == 0:
        return 0
    return ctypes.get_errno()


def set_ordinary(tid: int) -> None:
    """Gives a thread the ordinary policy."""
    # The flag is kept, since clearing it needs CAP_SYS_NICE.
    flag = os.sched_getscheduler(tid) & os.SCHED_RESET_ON_FORK
    os.sched_setscheduler(tid, os.SCHED_OTHER | flag, ORDINARY)


def set_slack(tid: int, slack_ns: int) -> bool:
    """Sets the timer slack of a thread. Returns whether the thread has it now."""
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


def start_time(tid: int) -> str:
    """The start time of a thread of this process, in ticks since the machine started. It distinguishes threads with the same
    number, since the kernel uses numbers again.

    Raises:
        ProcessLookupError: This process has no such thread.
    """
    # The thread's name, an earlier field, may hold blanks and brackets.
    fields = read_text(f"/proc/self/task/{tid}/stat").rpartition(")")[2].split()
    if len(fields) < 20:
        raise ProcessLookupError(errno.ESRCH, f"no thread {tid} in this process")
    return fields[19]


def failed(call: str, error: OSError) -> str:
    """The reason for people: a system call, and the name of its errno."""
    return f"{call} failed with {errno.errorcode.get(error.errno or 0, str(error.errno))}"
