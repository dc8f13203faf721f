"""Descriptors that came from another process: which of them can be used without waiting for a process behind their file, and the
closing of those whose closing can take long.

Owns the decision, and the threads that close. The decision reads tables of the kernel, and nothing that a file system in user space
(FUSE) or a file server answers: such an answer can take as long as that process likes, for fstat(2), read(2) and close(2) alike.

The last closing of a memory frees its pages, 0.6 s for each GiB. That of an inotify instance takes up to 20 ms, and the removal of
50,000 record locks, which any file can have, 50 ms. That of a network socket whose owner asked to linger (SO_LINGER) waits for its
peer, for as long as the owner likes, and so does that of a Unix socket with such a socket in an unread message.

Invariants:
1. No descriptor of a kind that is not known here is taken for usable, and no file of a mount that this process does not see.
2. A descriptor is open during its check, so that its mount's number is not given to another mount.
3. One thread closes memories, and at most ``OTHERS_MAX`` close all else; further descriptors wait, open. A closing that never
   ends keeps no memory open.
4. No closing waits for the peer of a socket for longer than ``LINGERING_S`` and what a signal takes.
5. ``close_apart`` can be called by a finaliser: it waits for no lock.

Source: F_GET_SEALS and F_GETLK in fcntl(2); proc_pid_fd(5), proc_pid_fdinfo(5), proc_pid_mountinfo(5); FUSE_FLUSH in fuse(4);
SO_LINGER in socket(7); SIGEV_THREAD_ID in timer_create(2).
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import ctypes
import fcntl
import os
import signal
import stat
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aionn.platform.kernel_timer import Times
from aionn.platform.memory_turns import memory_turn

__all__ = [
    "LOCAL_TYPES",
    "OTHERS_MAX",
    "QUICK_BYTES_MAX",
    "QUICK_COUNT_MAX",
    "Kinds",
    "close_apart",
    "close_memory",
    "closing_threads",
    "is_quick",
    "kinds_of",
    "waiting_to_be_closed",
]

OTHERS_MAX = 64
"""Threads that close descriptors of other things than memory: some of them may wait for a process that answers late or never, for
as long as it lives."""

LINGERING_S = 0.005
"""Time for which a closing may wait for the peer of a socket. All else that is closed here is closed sooner as a rule."""

QUICK_BYTES_MAX = 1 << 20
"""Memory that is freed in place: a fraction of a millisecond."""

QUICK_COUNT_MAX = 8
"""More descriptors than these are closed by the thread without a look at each."""

LOCAL_TYPES = {
    *("bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "ntfs3", "overlay", "ramfs"),
    *("tmpfs", "vfat", "xfs", "zfs"),
}
"""Types of file systems that the kernel itself answers for, on a device or in memory."""

KERNEL_TYPES = {
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "devtmpfs",
    "mqueue",
    "proc",
    "sysfs",
    "tracefs",
}
"""Types of file systems without files of users: those of the kernel's tables and devices."""

TRIES_MAX = 1000
"""Tries to close where no memory is left for it: a shortage that lasts for longer ends the process before."""

TRY_S = 0.01
"""Pause between two of them."""

IDLE_S = 0.5
"""Time for which a thread waits for more work before it ends: to start one takes as long as many closings."""

_libc = ctypes.PyDLL(None)
"""Functions of C that keep the interpreter's lock: for calls that never wait in the kernel."""

_EVENTFD = "anon_inode:[eventfd]"
_SOCKET = "socket:["
_LOCK = struct.Struct("hhqqi4x")
_ANY_LOCK = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_RELEASE_S = 0.001
_RELEASES_MAX = 20


class Kinds(NamedTuple):
    """The descriptors of a message that cannot be used.

    Attributes:
        foreign: Files of file systems that are not local, or that this process does not see.
        useless: The kind of each descriptor of another kind, in a word.
    """

    foreign: set[int]
    useless: dict[int, str]


def kinds_of(fds: Sequence[int]) -> Kinds:
    """The descriptors that are not shared memory, sockets, eventfds, or regular files of a local file system.

    Sockets are left to the caller. Takes a microsecond for shared memory, and some tenths of a millisecond where there are files.

    Args:
        fds: Open descriptors.
    """
    kinds = Kinds(set(), {})
    files = []
    for fd in fds:
        if _seals_of(fd) is not None:
            continue
        target = _target(fd)
        if target.startswith("/"):
            files.append(fd)
        elif target != _EVENTFD and not target.startswith(_SOCKET):
            # Files have paths; other objects of the kernel have the name of their kind, perhaps a number behind it.
            kinds.useless[fd] = target.removeprefix("anon_inode:").partition(":")[0].strip("[]") or "nothing"
    if files:
        types = _types_of_mounts()
        for fd in files:
            _look_at_file(fd, types, kinds)
    return kinds


def _look_at_file(fd: int, types: dict[str, str], kinds: Kinds) -> None:
    mount, flags = _mount_and_flags(fd)
    kind = types.get(mount)
    if flags & os.O_PATH:
        kinds.useless[fd] = "a path without a file"
    elif kind in KERNEL_TYPES:
        kinds.useless[fd] = f"a file of {kind}"
    elif kind not in LOCAL_TYPES:
        kinds.foreign.add(fd)
    elif not _is_regular(fd):
        kinds.useless[fd] = "no regular file"


def is_quick(fd: int) -> bool:
    """Whether a usable descriptor is certainly closed in some microseconds: an eventfd or a small memory, without record locks. A
    memory stays small only if it is sealed against growing. A socket may have another one in an unread message, as a fence may.
    """
    seals = _seals_of(fd)
    try:
        if seals is None:
            is_small = _target(fd) == _EVENTFD
        else:
            status = os.fstat(fd)
            # Pages beyond the end of the file are not part of its size.
            is_small = (
                bool(seals & fcntl.F_SEAL_GROW)
                and max(status.st_size, 512 * status.st_blocks) <= QUICK_BYTES_MAX
            )
        return is_small and _LOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, _ANY_LOCK))[0] == fcntl.F_UNLCK
    except OSError:
        return False


class _Job:
    """Work of a closing thread.

    Args:
        fds: Are closed.
        mapping: An object whose end unmaps memory, or None. It is released when no one else has it, or after some milliseconds.
        on_closed: Called in the thread, with the processor time in ns that it took.
        others: The threads that close all but memory; None to close all here.
        used_ns: Processor time that it took elsewhere.
    """

    __slots__ = ("_fds", "_left", "_mapping", "_on_closed", "_others", "_used_ns")

    def __init__(
        self,
        fds: Sequence[int],
        mapping: object,
        on_closed: Callable[[int], object],
        others: _Threads | None,
        used_ns: int = 0,
    ) -> None:
        self._fds = sorted(set(fds))
        self._left: list[int] = []
        self._mapping = mapping
        self._on_closed = on_closed
        self._others = others
        self._used_ns = used_ns

    @property
    def count(self) -> int:
        """Number of descriptors."""
        return len(self._fds)

    def do(self) -> None:
        """Closes. May be called again where no memory was left for it: what is closed is not closed again."""
        began_ns = time.thread_time_ns()
        if self._others is not None and not self._left:
            left = [fd for fd in self._fds if _seals_of(fd) is None]
            self._fds, self._left = sorted(set(self._fds).difference(left)), left
        if not self._left and self._mapping is not None:
            self._release_mapping()
        # Closings of all but memory may take as long as another process likes: they never have a turn.
        if self._others is None or not self._fds:
            _close_ranges(self._fds)
        else:
            with memory_turn():
                _close_ranges(self._fds)
        self._used_ns += time.thread_time_ns() - began_ns
        if self._left and self._others is not None:
            self._others.put(_Job(self._left, self._mapping, self._on_closed, None, self._used_ns))
        else:
            on_closed, self._on_closed = self._on_closed, _nothing  # Called once, also where it fails.
            on_closed(self._used_ns)

    def _release_mapping(self) -> None:
        for _ in range(_RELEASES_MAX):
            if sys.getrefcount(self._mapping) <= 2:  # Of this object, and of the call.
                break
            time.sleep(_RELEASE_S)
        self._mapping = None


def _close_ranges(ordered: list[int]) -> None:
    """Closes, and removes from the list what is closed."""
    # Each call releases the interpreter's lock, for which another thread may let it wait. Descriptors of one message are neighbours
    # as a rule.
    while ordered:
        begin = len(ordered) - 1
        while begin and ordered[begin - 1] == ordered[begin] - 1:
            begin -= 1
        os.closerange(ordered[begin], ordered[-1] + 1)
        del ordered[begin:]


class _Event(ctypes.Structure):
    """``struct sigevent``."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_char * 44),
    ]


_SIGNAL = signal.SIGRTMAX - 3
_SIGEV_THREAD_ID = 4
_DEFAULT = 0

_libc.signal.restype = ctypes.c_void_p
_libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p


def _takes_signal() -> bool:
    """Has the signal call a function that does nothing, unless this process uses it otherwise."""
    # Not by Python: a handler of Python can be set by the main thread alone, and wakes it each time.
    ours = ctypes.cast(_libc.abs, ctypes.c_void_p).value
    before = _libc.signal(_SIGNAL, ours)
    if before not in (None, _DEFAULT, ours):
        _libc.signal(_SIGNAL, before)
        return False
    return True


class _Limit:
    """Has a thread get a signal every ``LINGERING_S`` while it closes, which ends the kernel's wait for the peer of a socket. Where
    there is no timer left, it waits.
    """

    __slots__ = ("_each", "_event", "_is_made", "_never", "_timer")

    def __init__(self) -> None:
        each_ns = int(LINGERING_S * 1e9)
        self._each, self._never = Times(0, each_ns, 0, each_ns), Times()
        self._event = _Event(None, _SIGNAL, _SIGEV_THREAD_ID, 0)
        self._timer = ctypes.c_void_p()
        self._is_made = False

    def begin(self) -> None:
        """In the thread, before it closes."""
        if not _takes_signal():
            return
        if not self._is_made:
            self._event.thread = _thread.get_native_id()
            made = _libc.timer_create(
                time.CLOCK_MONOTONIC, ctypes.byref(self._event), ctypes.byref(self._timer)
            )
            self._is_made = made == 0
        self._set(self._each)

    def end(self) -> None:
        """After that."""
        self._set(self._never)

    def _set(self, times: Times) -> None:
        if self._is_made:
            _libc.timer_settime(self._timer, 0, ctypes.byref(times), None)

    def remove(self) -> None:
        """Before the thread ends: a timer is for one thread."""
        if self._is_made:
            self._is_made = False
            _libc.timer_delete(self._timer)


class _Place:
    """Room for a thread. Made before any thread is, so that no shortage of memory loses it.

    Attributes:
        wake: Released where there is work for the thread that waits in this place.
        limit: For what its thread closes; None for memory alone.
        thread: The kernel's number of its thread; 0 without one.
    """

    __slots__ = ("limit", "thread", "wake")

    def __init__(self, limit: _Limit | None) -> None:
        self.wake = _thread.allocate_lock()
        self.wake.acquire()
        self.limit = limit
        self.thread = 0

    def close(self, job: _Job) -> None:
        """Does a job, and tries again for a while where no memory is left."""
        # An error would end the thread, and its place would be lost: all later descriptors would stay open.
        for _ in range(TRIES_MAX):
            try:
                self._close(job)
            except MemoryError:
                time.sleep(TRY_S)
            else:
                return

    def _close(self, job: _Job) -> None:
        if self.limit is None:
            job.do()
            return
        try:
            self.limit.begin()
            job.do()
        finally:
            self.limit.end()

    def waits(self) -> bool:
        """Waits for work; returns whether there was some."""
        with contextlib.suppress(MemoryError):
            return self.wake.acquire(timeout=IDLE_S)
        return False

    def leave(self) -> None:
        """Before the thread ends."""
        self.thread = 0
        if self.limit is not None:
            with contextlib.suppress(MemoryError):
                self.limit.remove()


class _Threads:
    """Threads that close, started when there is work, and ended some time after the last one.

    Args:
        count: Most of them.
        is_limited: Whether what they close may wait for the peer of a socket.

    Attributes:
        places: The room for all of them.
        jobs: Those that no thread has begun.
    """

    # Each step is one operation of a C type: a finaliser may come between any two, and call ``put``. A place is in ``_free``, in
    # ``_waiting`` or with a thread that closes.

    def __init__(self, count: int, *, is_limited: bool) -> None:
        self._count, self._is_limited = count, is_limited
        self.reset()

    def reset(self) -> None:
        """Forgets threads and jobs: the child of a ``fork`` has none of the threads."""
        # The child's descriptors of such jobs stay open, as all do that it does not close.
        self.places = tuple(_Place(_Limit() if self._is_limited else None) for _ in range(self._count))
        self._free = collections.deque(self.places)
        self._waiting: collections.deque[_Place] = collections.deque()
        self.jobs: collections.deque[_Job] = collections.deque()

    def is_idle(self) -> bool:
        """Whether nothing is to be closed, and no thread closes."""
        return not self.jobs and len(self._waiting) + len(self._free) == self._count

    def put(self, job: _Job) -> None:
        self.jobs.append(job)
        try:
            # The thread that waited last, so that further ones end where there is little work.
            self._waiting.pop().wake.release()
        except IndexError:
            self._start()

    def _start(self) -> None:
        with contextlib.suppress(IndexError):
            place = self._free.popleft()
            try:
                _thread.start_new_thread(self._work, (place,))
            except (MemoryError, RuntimeError):  # No thread is left.
                self._do_all(place)
                self._end(place)

    def _work(self, place: _Place) -> None:
        place.thread = _thread.get_native_id()
        while True:
            self._do_all(place)
            self._waiting.append(place)
            # A job that came before that found no thread waiting.
            if self.jobs or not place.waits():
                try:
                    self._waiting.remove(place)
                except ValueError:
                    # It has work, and is woken now. The wait ends also if an exception of a signal came in between.
                    place.wake.acquire(timeout=IDLE_S)
                    continue
                if not self.jobs:
                    break
        self._end(place)

    def _do_all(self, place: _Place) -> None:
        with contextlib.suppress(IndexError):
            while True:
                place.close(self.jobs.popleft())

    def _end(self, place: _Place) -> None:
        place.leave()
        self._free.append(place)
        # Looked at again when the place is free: a job that came before found none.
        if self.jobs:
            self._start()


_memories = _Threads(1, is_limited=False)
_others = _Threads(OTHERS_MAX, is_limited=True)
os.register_at_fork(after_in_child=_memories.reset)
os.register_at_fork(after_in_child=_others.reset)


def _nothing(used_ns: int) -> None:
    pass


def close_apart(
    fds: Sequence[int], on_closed: Callable[[int], object] = _nothing, *, mapping: object = None
) -> None:
    """Closes descriptors in a thread; here where no thread is left.

    Args:
        fds: The descriptors, given to this call.
        on_closed: Called in that thread when all of them are closed, with the processor time in ns that it took.
        mapping: The object that has mapped them, and has no other user from now on; released first.
    """
    _memories.put(_Job(fds, mapping, on_closed, _others))


def closing_threads() -> set[int]:
    """The kernel's numbers of the threads that close, which Python's ``threading`` does not know; 0 is among them."""
    return {place.thread for threads in (_memories, _others) for place in threads.places}


def waiting_to_be_closed() -> int:
    """Number of descriptors that wait for the thread that closes memories; those of the closing in progress are not among them."""
    return sum(job.count for job in tuple(_memories.jobs))


def close_memory(fd: int, mapping: object, on_closed: Callable[[int], object] = _nothing) -> None:
    """Closes a shared memory: here if that is quick, else by ``close_apart``, whose arguments these are."""
    if is_quick(fd):
        os.close(fd)
        on_closed(0)
    else:
        close_apart([fd], on_closed, mapping=mapping)


def _seals_of(fd: int) -> int | None:
    """The seals of a file in shared memory; None of all else."""
    # fcntl.fcntl releases the interpreter's lock, and waits for it again beside a busy event loop: 240 times for one message.
    seals: int = _libc.fcntl(fd, fcntl.F_GET_SEALS)
    return seals if seals >= 0 else None


def _is_regular(fd: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        return False  # Its device is at fault.


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _mount_and_flags(fd: int) -> tuple[str, int]:
    """The number of a file's mount, empty where it cannot be read, and the flags with which it was opened."""
    mount, flags = "", 0
    for line in _lines(f"/proc/self/fdinfo/{fd}"):
        name, _, value = line.partition(":")
        if name == "mnt_id":
            mount = value.strip()
        elif name == "flags":
            flags = int(value, 8)
    return mount, flags


def _types_of_mounts() -> dict[str, str]:
    """The types of the file systems that this process sees mounted, by the numbers of the mounts."""
    found = {}
    for line in _lines("/proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        found[mount.partition(" ")[0]] = file_system.partition(" ")[0]
    return found


def _lines(path: str) -> list[str]:
    """The lines of a file of the kernel; none where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().split("\n")
    except OSError:
        return []
