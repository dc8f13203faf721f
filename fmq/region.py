"""Memory that two processes share: making it, demanding that a peer's cannot shrink, mapping it.

Owns memfd creation, seals, the check of descriptors from outside, and mappings. Does not interpret their content.

Invariants:
1. Memory made here is sealed against shrinking and growing and has its pages: a shortage is an OSError here, never a
   SIGBUS later. Memory that cannot fit is rejected before it gets the first of them.
2. Memory from outside is mapped only if it is sealed the same way, of ordinary pages, and as large as it must be.
3. A mapping lives as long as a view of it does, so a late access to a closed queue's view touches mapped memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat

from fmq.available import check_available
from fmq.errors import InvalidDescriptor

__all__ = ["check_eventfd", "check_memory", "create_memory", "duplicate", "has_huge_pages", "map_memory"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create_memory(name: str, size_bytes: int) -> int:
    """A new sealed memory with all its pages; the caller owns the descriptor.

    Raises:
        OSError: No memory or no descriptors left; a `MemoryShortage` before any page is given where it cannot fit.
    """
    check_available(size_bytes)
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def duplicate(fd: int) -> int:
    """A close-on-exec duplicate, owned by the caller.

    Raises:
        InvalidDescriptor: `fd` is not an open descriptor.
        OSError: No descriptors left.
    """
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    except (OSError, OverflowError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != errno.EBADF:
            raise
        raise InvalidDescriptor(f"descriptor {fd}: expected an open file descriptor, got none") from error


def check_memory(fd: int, needed_bytes: int) -> None:
    """Refuses what is not memory of ordinary pages, not sealed against shrinking and growing, or too small; gives it all its pages.

    Raises:
        InvalidDescriptor: With what was expected and what came.
        OSError: The pages that are missing cannot be given; a `MemoryShortage` before any is where they cannot fit.
    """
    status = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        kind = stat.filemode(status.st_mode)
        raise InvalidDescriptor(
            f"descriptor {fd}: expected sealed memory (a memfd), got a file of mode {kind}"
        ) from None
    if seals & _SEALS != _SEALS:
        raise InvalidDescriptor(
            f"descriptor {fd}: expected memory sealed against shrinking and growing (0x6), got seals 0x{seals:x}"
        )
    if status.st_size < needed_bytes:
        raise InvalidDescriptor(
            f"descriptor {fd}: expected at least {needed_bytes} bytes, got {status.st_size}"
        )
    if has_huge_pages(fd):
        raise InvalidDescriptor(
            f"descriptor {fd}: expected memory of ordinary pages, got huge ones, which a hole takes away"
        )
    missing_bytes = needed_bytes - status.st_blocks * 512
    if missing_bytes > 0:
        check_available(missing_bytes)
        try:
            os.posix_fallocate(fd, 0, needed_bytes)
        except OSError as error:
            # A read-only or write-sealed memory cannot be given pages; reading its holes needs none of ours.
            if error.errno not in (errno.EBADF, errno.EPERM):
                raise


def has_huge_pages(fd: int) -> bool:
    """Whether memory consists of pages of the system's pool of huge pages (MFD_HUGETLB).

    Its owner can make a hole in it, seals or not, and use the page elsewhere: with none left in the pool, every process that
    touches the hole is ended by SIGBUS. A hole in memory of ordinary pages is filled again.
    """
    return os.fstatvfs(fd).f_bsize > mmap.PAGESIZE


def check_eventfd(fd: int) -> None:
    """Refuses a descriptor that is not an eventfd: writing to anything else could block or do harm.

    Raises:
        InvalidDescriptor: With what came.
    """
    target = os.readlink(f"/proc/self/fd/{fd}")
    if target != "anon_inode:[eventfd]":
        raise InvalidDescriptor(f"descriptor {fd}: expected an eventfd, got {target}")


def map_memory(fd: int, size_bytes: int, *, may_be_readonly: bool) -> tuple[mmap.mmap, bool]:
    """Maps checked memory, with its pages in place.

    Args:
        fd: Stays the caller's; the mapping does not need it.
        size_bytes: From the start of the memory.
        may_be_readonly: Whether to map read-only if writing is not permitted.

    Returns:
        The mapping, and whether it is read-only.

    Raises:
        InvalidDescriptor: Writing is not permitted and needed.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    try:
        return mmap.mmap(fd, size_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE), False
    except PermissionError as error:
        if not may_be_readonly:
            raise InvalidDescriptor(
                f"descriptor {fd}: expected memory that may be written, got {error}"
            ) from error
    return mmap.mmap(fd, size_bytes, flags, mmap.PROT_READ), True
