"""Memory pools: shared memory by descriptor, mapped once, closed with the last reference.

Owns creation, sealing, import and mapping. Does not know what lies in a pool.

Invariants:
1. A pool that we create has its space allocated at creation (shortage is an exception then, never SIGBUS later) and is sealed
   against shrinking and growing.
2. A pool of kind ``ashmem`` that comes from elsewhere must carry those seals and be as large as declared.
3. Descriptors are close-on-exec. A pool's descriptor and mapping go when its last reference goes, or at ``close``.

Source: ``Memory`` of the NN HAL (kinds ashmem, mmap_fd, hardware_buffer_blob, hardware_buffer); sealing: memfd_create(2).
"""

from __future__ import annotations

import enum
import errno
import fcntl
import mmap
import os
import weakref
from typing import Self

import numpy as np
import numpy.typing as npt

from aionn.errors import GeneralFailure, InvalidArgument, ResourceExhausted

__all__ = ["PREFERRED_ALIGNMENT_BYTES", "PREFERRED_PADDING_BYTES", "Memory", "MemoryKind"]

PREFERRED_ALIGNMENT_BYTES = 64
"""Alignment that values in request pools should have; the spec's number, and a cache line."""

PREFERRED_PADDING_BYTES = 64
"""Padding that values in request pools should have; the spec's number."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEALS_NEEDED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MemoryKind(enum.StrEnum):
    """The spec's names of memory kinds."""

    ASHMEM = "ashmem"
    MMAP_FD = "mmap_fd"
    HARDWARE_BUFFER_BLOB = "hardware_buffer_blob"
    HARDWARE_BUFFER = "hardware_buffer"


class Memory:
    """A pool of shared memory.

    Make one with ``Memory.create`` or ``Memory.from_fd``. The descriptor belongs to this object; it is duplicated on import and
    may be sent to other processes, which then share the bytes.

    Attributes:
        kind: The spec's kind.
        size_bytes: Size of the pool.
        offset: Where it starts in the file behind the descriptor.
    """

    __slots__ = ("__weakref__", "_array", "_fd", "_finalizer", "kind", "offset", "size_bytes")

    def __init__(self, fd: int, array: npt.NDArray[np.uint8], kind: MemoryKind, offset: int = 0) -> None:
        self._fd = fd
        self._array = array
        self.kind = kind
        self.size_bytes = array.nbytes
        self.offset = offset
        # The mapping itself goes with the last array that views it: numpy keeps the mmap object alive.
        self._finalizer = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, size_bytes: int, *, kind: MemoryKind = MemoryKind.ASHMEM, name: str = "aionn") -> Self:
        """Makes a pool, zeroed, allocated and sealed.

        Args:
            size_bytes: At least 1.
            kind: ``ASHMEM`` or ``HARDWARE_BUFFER_BLOB``: both are memfd-backed here.
            name: Shows in /proc/<pid>/maps.

        Raises:
            InvalidArgument: Illegal size or kind.
            ResourceExhausted: No memory or no descriptor is left.
        """
        if size_bytes <= 0:
            raise InvalidArgument(f"memory: size must be at least 1 byte, got {size_bytes}")
        if kind not in (MemoryKind.ASHMEM, MemoryKind.HARDWARE_BUFFER_BLOB):
            raise InvalidArgument(f"memory: can create ashmem or hardware_buffer_blob, got {kind}")
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as e:
            raise ResourceExhausted(f"memory: no descriptor for {size_bytes} bytes: {e.strerror}") from e
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, _map(fd, size_bytes, 0, writable=True), kind)
        except OSError as e:
            os.close(fd)
            raise ResourceExhausted(f"memory: cannot allocate {size_bytes} bytes: {e.strerror}") from e

    @classmethod
    def from_fd(
        cls,
        fd: int,
        *,
        size_bytes: int | None = None,
        offset: int = 0,
        kind: MemoryKind = MemoryKind.ASHMEM,
        writable: bool = True,
    ) -> Self:
        """Imports a descriptor, which is duplicated: the caller keeps and closes its own.

        Args:
            fd: A sealed memfd for ``ASHMEM`` and ``HARDWARE_BUFFER_BLOB``; any file that can be mapped for ``MMAP_FD``.
            size_bytes: Declared size; None takes what the file has after ``offset``.
            offset: Where the pool starts, a multiple of the page size.
            kind: The spec's kind.
            writable: False maps read-only.

        Raises:
            InvalidArgument: No such file, not sealed, too small, or illegal numbers.
            ResourceExhausted: No descriptor or no address space is left.
            GeneralFailure: It cannot be mapped.
        """
        try:
            file_bytes = os.fstat(fd).st_size
        except OSError as e:
            raise InvalidArgument(f"memory: descriptor {fd} cannot be used: {e.strerror}") from e
        if size_bytes is None:
            size_bytes = file_bytes - offset
        if offset < 0 or offset % mmap.PAGESIZE or size_bytes <= 0:
            raise InvalidArgument(
                f"memory: expected a page-aligned offset and a positive size, got offset {offset}, size {size_bytes}"
            )
        if offset + size_bytes > file_bytes:
            raise InvalidArgument(
                f"memory: declared {size_bytes} bytes at offset {offset}, but the file has {file_bytes}"
            )
        if kind != MemoryKind.MMAP_FD:
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError:
                seals = 0
            if seals & _SEALS_NEEDED != _SEALS_NEEDED:
                raise InvalidArgument(
                    f"memory: a pool of kind {kind} must be a memfd sealed against shrinking and growing"
                )
        try:
            own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError as e:
            raise ResourceExhausted(f"memory: no descriptor left to import a pool: {e.strerror}") from e
        try:
            return cls(own, _map(own, size_bytes, offset, writable=writable), kind, offset)
        except (OSError, ValueError) as e:
            os.close(own)
            # mmap needs a descriptor of its own: the limit may be met here as well as one call earlier.
            short = isinstance(e, OSError) and e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
            error = ResourceExhausted if short else GeneralFailure
            raise error(f"memory: cannot map {size_bytes} bytes: {e}") from e

    @property
    def is_closed(self) -> bool:
        return not self._finalizer.alive

    def fileno(self) -> int:
        """The pool's descriptor, still owned by the pool.

        Raises:
            ValueError: The pool is closed.
        """
        if self.is_closed:
            raise ValueError("memory: the pool is closed")
        return self._fd

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The whole pool as a writable ``[size_bytes]`` uint8 array (read-only if imported so).

        Views stay valid after ``close``; the pages are given back when the last of them goes.
        """
        return self._array

    def close(self) -> None:
        """Closes the descriptor. Arrays that view the pool stay valid."""
        self._finalizer()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"fd {self._fd}"
        return f"<Memory {self.kind} {self.size_bytes} bytes, {state}>"


def _map(fd: int, size_bytes: int, offset: int, *, writable: bool) -> npt.NDArray[np.uint8]:
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    # mmap duplicates the descriptor for itself; trackfd=False (3.13) would save it, but 3.11 lacks the argument.
    return np.frombuffer(mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, prot, offset=offset), dtype=np.uint8)
