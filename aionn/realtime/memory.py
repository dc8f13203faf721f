"""Memory without page faults during frames: ranges are touched, and locked as far as RLIMIT_MEMLOCK permits.

Invariants:
1. No call fails because a limit is too small: the range is touched and can be used, and the report lists it as not locked.
2. ``release`` and ``close`` unlock the ranges that ``keep`` locked, and no range that other code locked.

Facts: the kernel counts a page once however often a process locks it, and unlocks it at the first munlock. Two ranges may share a
page, so ranges are recorded as whole pages. A shared page that one process has locked stays in memory for all processes; each of
them still has to map it, which touching does.

Source: mlock(2), madvise(2) (MADV_POPULATE_WRITE, Linux 5.14), getrusage(2).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import threading
from typing import Any

import msgspec
import numpy as np

from aionn.realtime.reading import read_text, soft_limit

__all__ = ["LockedRow", "PageFaults", "PageLocks"]

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT = 1, 2, 4
PAGE = mmap.PAGESIZE
RANGES_MAX = 65_536
"""Most ranges: about the kernel's limit of mappings (vm.max_map_count), since each locked range is a mapping of its own."""

_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("mlock", "munlock"):
    getattr(_libc, _name).argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mlockall.argtypes = (ctypes.c_int,)


class LockedRow(msgspec.Struct, frozen=True):
    """A range in the report.

    Attributes:
        name: The contents, for people.
        bytes: Size of its whole pages.
        is_touched: Whether its pages are mapped.
        is_locked: Whether its pages stay in memory.
        reason: The reason why it is not locked; empty if it is.
    """

    name: str
    bytes: int
    is_touched: bool
    is_locked: bool
    reason: str = ""


class PageFaults(msgspec.Struct, frozen=True):
    """Page faults so far.

    Attributes:
        minor: Faults that the kernel resolved in memory: some microseconds each.
        major: Faults that waited for a disk: milliseconds each.
    """

    minor: int
    major: int

    @classmethod
    def now(cls, *, of_thread: bool = False) -> PageFaults:
        """The counters of this process, or of the calling thread alone."""
        usage = resource.getrusage(resource.RUSAGE_THREAD if of_thread else resource.RUSAGE_SELF)
        return cls(usage.ru_minflt, usage.ru_majflt)

    def __sub__(self, earlier: PageFaults) -> PageFaults:
        return PageFaults(self.minor - earlier.minor, self.major - earlier.major)


def whole_pages(address: int, size: int, page: int = PAGE) -> tuple[int, int]:
    """The pages that hold a range, as an address and a size."""
    begin = address // page * page
    return begin, (address + size + page - 1) // page * page - begin


def explain_refusal(number: int, limit_bytes: int | None, locked_bytes: int, size: int) -> str:
    """The reason why a range could not be locked, as a sentence.

    Args:
        number: The errno of mlock.
        limit_bytes: RLIMIT_MEMLOCK; a negative number means no limit, None that it cannot be read.
        locked_bytes: Bytes that this process has locked already.
        size: Bytes of the range.
    """
    if (
        number in (errno.ENOMEM, errno.EPERM, errno.EAGAIN)
        and limit_bytes is not None
        and 0 <= limit_bytes < locked_bytes + size
    ):
        return f"RLIMIT_MEMLOCK is {limit_bytes} bytes, {locked_bytes} are locked, {size} more were requested"
    if number == errno.ENOSYS:
        return "a seccomp filter or the sandbox answers mlock with ENOSYS"
    return f"mlock failed with {errno.errorcode.get(number, number)}"


class PageLocks:
    """The ranges of this process that are kept in memory. May be used from any thread."""

    def __init__(self) -> None:
        """Keeps no range yet."""
        self._rows: dict[tuple[int, int], tuple[LockedRow, Any]] = {}
        self._lock = threading.Lock()
        self._is_everything = False

    def keep(self, buffer: Any, name: str) -> LockedRow:
        """Touches the pages of a buffer and locks them. Blocks for as long as that takes: a millisecond for 10 MB.

        Args:
            buffer: Any contiguous object with the buffer protocol; kept alive until it is released. Its contents do not change.
            name: The contents, for the report.

        Returns:
            The row of the report. If the machine does not permit a lock, the row has the reason, and no exception is raised.

        Raises:
            TypeError: The object has no buffer, or its buffer is not contiguous.
        """
        address, size, keep_alive = _place(buffer)
        begin, length = whole_pages(address, size)
        with self._lock:
            known = self._rows.get((begin, length))
            if known is not None:
                return known[0]
            if size == 0 or len(self._rows) >= RANGES_MAX:
                reason = "it is empty" if size == 0 else f"{RANGES_MAX} ranges are kept already"
                return LockedRow(name, size, False, False, reason)
            is_touched = _touch(begin, length, keep_alive)
            locked = _locked_bytes()
            number = 0 if _libc.mlock(begin, length) == 0 else ctypes.get_errno()
            reason = (
                explain_refusal(number, soft_limit(resource.RLIMIT_MEMLOCK), locked, length) if number else ""
            )
            row = LockedRow(name, length, is_touched, not number, reason)
            self._rows[begin, length] = row, keep_alive
            return row

    def release(self, buffer: Any) -> None:
        """Unlocks the pages of a buffer; has no effect on a buffer that is not kept."""
        address, size, _ = _place(buffer)
        key = whole_pages(address, size)
        with self._lock:
            self._release(key)

    def keep_everything(self) -> str:
        """Locks all memory that this process has mapped or will map, each page when it is first used, code and libraries included.

        Under memory pressure the kernel reclaims pages of code first, and reads them from a disk when they are needed again. This
        needs CAP_IPC_LOCK or no limit: under a limit, a later allocation would fail.

        Returns:
            The reason why it was not done; empty if it was.
        """
        with self._lock:
            if self._is_everything:
                return ""
            soft = soft_limit(resource.RLIMIT_MEMLOCK)
            if soft is None:
                return "RLIMIT_MEMLOCK cannot be read"
            if soft != resource.RLIM_INFINITY and not _may_lock():
                return f"RLIMIT_MEMLOCK is {soft} bytes, expected no limit or CAP_IPC_LOCK"
            if _locked_bytes() and not self._rows:
                # ``close`` calls munlockall, which would unlock that memory as well.
                return "other code in this process has locked memory"
            if _libc.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT):
                return f"mlockall failed with {errno.errorcode.get(ctypes.get_errno(), 'an error')}"
            self._is_everything = True
            return ""

    def report(self) -> list[LockedRow]:
        """The rows of all kept ranges."""
        with self._lock:
            return [row for row, _ in self._rows.values()]

    def close(self) -> None:
        """Unlocks all kept ranges. May be called again."""
        with self._lock:
            if self._is_everything:
                _libc.munlockall()
                self._is_everything = False
            for key in list(self._rows):
                self._release(key)

    def _release(self, key: tuple[int, int]) -> None:
        row, keep_alive = self._rows.pop(key, (None, None))
        if row is not None and row.is_locked:
            begin, length = key
            if not self._is_everything:
                _libc.munlock(begin, length)
                # The first or last page may belong to another kept range as well, which must stay locked.
                for (other, size), (neighbour, _) in self._rows.items():
                    if neighbour.is_locked and other < begin + length and begin < other + size:
                        _libc.mlock(other, size)
        del keep_alive


def _place(buffer: Any) -> tuple[int, int, Any]:
    """Address and size in bytes of a buffer, and an object whose reference prevents the buffer from moving."""
    view = memoryview(buffer)
    if not view.contiguous:
        raise TypeError("expected a contiguous buffer, got one with gaps")
    if not view.nbytes:
        return 0, 0, view
    # numpy gives the address of read-only memory, for which ctypes raises an exception.
    array = np.frombuffer(view.cast("B") if view.ndim != 1 or view.format != "B" else view, np.uint8)
    return int(array.__array_interface__["data"][0]), view.nbytes, array


def _touch(begin: int, length: int, array: Any) -> bool:
    advice = MADV_POPULATE_WRITE if array.flags.writeable else MADV_POPULATE_READ
    if _libc.madvise(begin, length, advice) == 0:
        return True
    # An older kernel, or a range with read-only pages. Reading a page of shared memory maps it permanently.
    int(array[::PAGE].sum()) + int(array[-1])
    return True


def _may_lock() -> bool:
    for line in read_text("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.partition(":")[2], 16) >> 14 & 1)
    return os.geteuid() == 0


def _locked_bytes() -> int:
    """The bytes that this process has locked, from the kernel's counter."""
    for line in read_text("/proc/self/status").splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) * 1024
    return 0
