"""Descriptors that came from another process: which of them can be used without waiting for a process behind their file, and the
closing of others.

Owns the decision, and the threads that close. The decision reads tables of the kernel, and nothing that a file system in user space
(FUSE) or a file server answers: such an answer can take as long as that process likes, for fstat(2), read(2) and close(2) alike.

Invariants:
1. No descriptor of a kind that is not known here is taken for usable, and no file of a mount that this process does not see.
2. A descriptor is open during its check, so that its mount's number is not given to another mount.
3. At most ``CLOSING_MAX`` threads close; what comes beyond them waits, open.

Source: F_GET_SEALS in fcntl(2); proc_pid_fd(5), proc_pid_fdinfo(5), proc_pid_mountinfo(5); FUSE_FLUSH in fuse(4).
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Sequence

from aionn.errors import ResourceExhausted
from aionn.platform.threads import start_thread

__all__ = ["LOCAL_TYPES", "close_apart", "unusable"]

CLOSING_MAX = 64
"""Threads that close concurrently: some of them may wait for a process that answers late or never, for as long as it lives."""

LOCAL_TYPES = {
    *("bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "ntfs3", "overlay", "ramfs"),
    *("tmpfs", "vfat", "xfs", "zfs"),
}
"""Types of file systems that the kernel itself answers for, on a device or in memory."""

_EVENTFD = "anon_inode:[eventfd]"
_SOCKET = "socket:["


def unusable(fds: Sequence[int]) -> set[int]:
    """The descriptors that are not shared memory, sockets, eventfds, or regular files of a local file system.

    Sockets are left to the caller. Takes a microsecond for shared memory, and some tenths of a millisecond where there are files.

    Args:
        fds: Open descriptors.
    """
    files = [fd for fd in fds if not _is_memory(fd)]
    targets = {fd: _target(fd) for fd in files}
    files = [fd for fd in files if targets[fd] != _EVENTFD and not targets[fd].startswith(_SOCKET)]
    if not files:
        return set()
    local = _local_mounts()
    return {fd for fd in files if not (_mount_of(fd) in local and _is_regular(fd))}


def _nothing() -> None:
    pass


_closing: collections.deque[tuple[Sequence[int], Callable[[], object]]] = collections.deque()
_places = threading.Semaphore(CLOSING_MAX)


def close_apart(fds: Sequence[int], on_closed: Callable[[], object] = _nothing) -> None:
    """Closes descriptors in a thread; here where no thread is left.

    Args:
        fds: The descriptors, given to this call.
        on_closed: Called in that thread when all of them are closed.
    """
    _closing.append((fds, on_closed))
    if _places.acquire(blocking=False):
        try:
            start_thread(
                threading.Thread(target=_close_all, name="aionn-closing", daemon=True), "descriptors"
            )
        except ResourceExhausted:
            _close_all()


def _close_all() -> None:
    # Looked at again when the place is free: one that came before that found no place.
    while True:
        with contextlib.suppress(IndexError):
            while True:
                fds, on_closed = _closing.popleft()
                for fd in fds:
                    with contextlib.suppress(OSError):
                        os.close(fd)
                on_closed()
        _places.release()
        if not _closing or not _places.acquire(blocking=False):
            return


def _is_memory(fd: int) -> bool:
    """Whether it is a file in shared memory; these alone have seals."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


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


def _mount_of(fd: int) -> str | None:
    """The number of a file's mount; None where it cannot be read."""
    for line in _lines(f"/proc/self/fdinfo/{fd}"):
        name, _, value = line.partition(":")
        if name == "mnt_id":
            return value.strip()
    return None


def _local_mounts() -> set[str]:
    """The numbers of this process's mounts with local file systems."""
    found = set()
    for line in _lines("/proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        if file_system.partition(" ")[0] in LOCAL_TYPES:
            found.add(mount.partition(" ")[0])
    return found


def _lines(path: str) -> list[str]:
    """The lines of a file of the kernel; none where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().split("\n")
    except OSError:
        return []
