"""Bytes of hundreds of megabytes, joined while other threads run.

Owns the copy. ``bytes.join`` keeps the interpreter's lock where a part is not ``bytes``, which is some tenths of a second for a
large model; the system copies to a file in memory and back without it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["joined"]

LARGE_BYTES = 16 << 20
"""Joined by the system from this size on. A smaller copy takes a few milliseconds."""


def joined(parts: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """The parts one after the other. Raises ``MemoryError``."""
    size_bytes = sum(memoryview(part).nbytes for part in parts)
    if size_bytes < LARGE_BYTES:
        return b"".join(parts)
    try:
        fd = os.memfd_create("aionn-joined", os.MFD_CLOEXEC)
    except OSError:
        # Without a descriptor the copy by Python is as right, and slower for other threads.
        return b"".join(parts)
    try:
        for part in parts:
            left = memoryview(part).cast("B")
            while left:
                left = left[os.write(fd, left) :]
        data = os.pread(fd, size_bytes, 0)
    except OSError as e:
        raise MemoryError(f"{size_bytes} bytes: {e.strerror}") from e
    finally:
        os.close(fd)
    return data if len(data) == size_bytes else b"".join(parts)
