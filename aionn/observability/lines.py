"""Lines on standard output and standard error that no work depends on.

Owns how they are written: the reader of a pipe may be gone or stopped, and the disk full. A write that waits would keep the event
loop, and with it all clients of a served device, from its work.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
from typing import Any

__all__ = ["never_wait_for_readers", "write_if_taken"]


def write_if_taken(fd: int, line: bytes) -> bool:
    """Writes a line if the stream takes it now, and otherwise drops it.

    Args:
        fd: Of a stream that programs and users read.
        line: Of which the first ``PIPE_BUF`` bytes are written: a pipe that takes more takes these without waiting.

    Returns:
        Whether something was written.
    """
    with contextlib.suppress(OSError):
        stream = select.poll()
        stream.register(fd, select.POLLOUT)
        if stream.poll(0):
            return os.write(fd, line[: select.PIPE_BUF]) > 0
    return False


class _DroppingFile(io.FileIO):
    """A pipe that takes what it has room for; the rest of a write is dropped."""

    def write(self, data: Any, /) -> int:
        """Source: ``io.FileIO``, which returns None where nothing was written."""
        super().write(data)
        return memoryview(data).nbytes


def never_wait_for_readers() -> None:
    """Has every write of this process to a pipe on standard output or standard error fail where it would wait: also those of native
    code, such as an engine's messages and the stacks of a device that hangs.

    The pipe is opened again: O_NONBLOCK belongs to the open file, which other processes share. Python's own stream would keep what
    was not written, and make the exit status 120 for it at the end: what a pipe does not take is dropped.
    """
    for fd, name in ((1, "stdout"), (2, "stderr")):
        with contextlib.suppress(OSError):
            if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                continue
            opened = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.dup2(opened, fd)
            finally:
                os.close(opened)
            file, encoding = _DroppingFile(fd, "wb", closefd=False), getattr(sys, name).encoding
            setattr(sys, name, io.TextIOWrapper(file, encoding, "backslashreplace", write_through=True))
