"""Bounded reading of the files under /proc and /sys, and of limits."""

from __future__ import annotations

import os
import resource

__all__ = ["TEXT_BYTES_MAX", "read_text", "soft_limit"]

TEXT_BYTES_MAX = 1 << 18
"""Bytes read of one file: in the largest, /proc/mounts of a machine with thousands of containers, the needed lines are early."""


def read_text(path: str) -> str:
    """The first ``TEXT_BYTES_MAX`` bytes of a file; empty if it is absent or cannot be read."""
    try:
        # Without O_NONBLOCK, a pipe in the place of a file would block without end.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return ""
    parts: list[bytes] = []
    left = TEXT_BYTES_MAX
    try:
        while left > 0 and (part := os.read(fd, left)):
            parts.append(part)
            left -= len(part)
    except OSError:
        pass
    finally:
        os.close(fd)
    return b"".join(parts).decode(errors="replace")


def soft_limit(kind: int) -> int | None:
    """A soft limit of this process, ``resource.RLIM_INFINITY`` for none; None where a sandbox refuses to read it."""
    try:
        return resource.getrlimit(kind)[0]
    except OSError:
        return None
