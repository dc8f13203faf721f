"""Lines on standard output and standard error that no work depends on."""

from __future__ import annotations

import contextlib
import os
import select

__all__ = ["write_if_taken"]


def write_if_taken(fd: int, line: bytes) -> None:
    """Writes a line if the stream takes it now, and otherwise drops it: the reader of a pipe may be gone or stopped, the disk full.

    Args:
        fd: Of a stream that programs and users read.
        line: Of which the first ``PIPE_BUF`` bytes are written: a pipe that takes more takes these without waiting.
    """
    with contextlib.suppress(OSError):
        stream = select.poll()
        stream.register(fd, select.POLLOUT)
        if stream.poll(0):
            os.write(fd, line[: select.PIPE_BUF])
