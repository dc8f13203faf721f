"""The slice of an ordinary thread: the time that the kernel's fair scheduler lets it run before the next one.

From Linux 6.12 on a thread may set its own slice without any privilege. A thread with a shorter slice gets an earlier virtual
deadline when it wakes, so that it runs before busy programs, which have the kernel's slice of some milliseconds; its share of the
processors stays the same. Older kernels ignore the attribute, and report a slice of 0 for each thread, which distinguishes them
without an attempt.

The C library of many systems has no function for these two system calls, so that they are called by number.

Source: sched_setattr(2); ``__setparam_fair`` and ``get_params`` of the kernel, which take and report the slice as
``sched_runtime``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator

__all__ = [
    "SLICE_NS",
    "Attributes",
    "read_attributes",
    "restore_slice",
    "serving_in_short_slices",
    "set_slice",
    "take_serving_slice",
]

SLICE_NS = 100_000
"""The slice of threads above LOW: the shortest that the kernel grants."""

RESET_ON_FORK = 1
"""SCHED_FLAG_RESET_ON_FORK in ``sched_flags``."""

_LAYOUT = struct.Struct("=IIQiIQQQII")
"""``struct sched_attr``: size, policy, flags, nice value, priority, runtime, deadline, period, and two clamps of utilization."""

_SET, _GET = (
    {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}.get(platform.machine(), (0, 0))
    if struct.calcsize("P") == 8
    else (0, 0)
)
"""Numbers of the two system calls; 0 where they are not known."""

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


class _Serving:
    """Whether the threads of this process that serve others have short slices."""

    is_short = False


_serving = _Serving()


class Attributes:
    """The scheduling attributes of a thread, as the kernel reports them.

    Args:
        values: The fields of ``struct sched_attr``.

    Attributes:
        policy: The policy, without the flag SCHED_RESET_ON_FORK.
        nice: The nice value under the ordinary policy.
        slice_ns: The slice under the ordinary policy; 0 if the kernel is older than Linux 6.12, or under another policy.
    """

    def __init__(self, values: tuple[int, ...]) -> None:
        _, self.policy, self.flags, self.nice, self.priority, runtime, *_ = values
        self.slice_ns = runtime if self.policy == os.SCHED_OTHER else 0


def read_attributes(tid: int) -> Attributes:
    """The scheduling attributes of a thread; 0 means the calling thread.

    Raises:
        ProcessLookupError: It has ended.
        OSError: The system call is refused, by a seccomp filter for example.
    """
    room = ctypes.create_string_buffer(_LAYOUT.size)
    _call(_GET, tid, room, _LAYOUT.size, 0)
    return Attributes(_LAYOUT.unpack(room.raw))


def set_slice(tid: int, slice_ns: int, *, resets_on_fork: bool = False) -> None:
    """Sets the slice of a thread under SCHED_OTHER; no effect under another policy. Its nice value stays.

    Args:
        tid: The thread; 0 means the calling thread.
        slice_ns: The slice; 0 means the kernel's. The kernel limits it to 0.1 to 100 ms.
        resets_on_fork: Whether its new threads and processes get the kernel's slice from now on, instead of this one.

    Raises:
        ProcessLookupError: It has ended.
        OSError: The system call is refused.
    """
    now = read_attributes(tid)
    if now.policy != os.SCHED_OTHER:
        return
    # The nice value is repeated, since the call sets both; a lower one than the present one would need a privilege.
    flags = now.flags | (RESET_ON_FORK if resets_on_fork else 0)
    new = _LAYOUT.pack(_LAYOUT.size, now.policy, flags, now.nice, now.priority, slice_ns, 0, 0, 0, 0)
    _call(_SET, tid, new, 0)


def restore_slice(tid: int, slice_ns: int) -> None:
    """Restores the slice that ``read_attributes`` reported before; no effect under another policy than SCHED_OTHER.

    The kernel does not report whether a slice is its own one or was set. So its own one is tried first: a thread that had it
    follows later changes of the kernel's setting, as before.

    Raises:
        ProcessLookupError: The thread has ended.
        OSError: The system call is refused.
    """
    if not slice_ns or read_attributes(tid).slice_ns in (0, slice_ns):
        return
    set_slice(tid, 0)
    if read_attributes(tid).slice_ns != slice_ns:
        set_slice(tid, slice_ns)


@contextlib.contextmanager
def serving_in_short_slices() -> Iterator[None]:
    """Within this context the calling thread has a short slice, and so has each thread that calls ``take_serving_slice``.

    For a process that serves several clients without real time: the event loop and the threads of executions then run before its
    own thread that prepares a model, and before programs that compute without a pause.

    A rejected addition: a higher nice value for the thread that prepares models. It holds the interpreter's lock when other
    programs take its processor, and the loop then waits for both: beside two busy programs on two processors, the 99th
    percentile of a client's latency doubled with 10.
    """
    _serving.is_short = True
    before_ns = take_serving_slice()
    try:
        yield
    finally:
        _serving.is_short = False
        with contextlib.suppress(OSError):
            restore_slice(0, before_ns)


def take_serving_slice() -> int:
    """Gives the calling thread a short slice within ``serving_in_short_slices``, otherwise none; its threads and processes do not
    inherit it. No effect where the kernel has no slices, on a thread under another policy than SCHED_OTHER, and on one with a
    negative nice value, which its threads and processes would not inherit either.

    Returns:
        The slice that it had before; 0 where it was not changed.
    """
    if not _serving.is_short:
        return 0
    # Refused by a sandbox: the thread serves with the slice that it has.
    with contextlib.suppress(OSError):
        now = read_attributes(0)
        if now.slice_ns and now.nice >= 0:
            set_slice(0, SLICE_NS, resets_on_fork=True)
            return now.slice_ns
    return 0


def _call(number: int, tid: int, *arguments: object) -> None:
    if not number:
        raise OSError(errno.ENOSYS, "the number of the system call is not known for this processor")
    if _syscall(ctypes.c_long(number), ctypes.c_long(tid), *arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
