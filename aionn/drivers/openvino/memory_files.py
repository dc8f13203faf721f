"""Files in memory, by which OpenVINO gets and gives large models while other threads of the process run.

Owns the copies. OpenVINO copies the bytes of a model that it is given, and of one that it exports, several times with the
interpreter's lock; it reads a path, and the system copies to a file in memory and back, without it.

Source: OpenVINO's Python API; memfd_create(2).
"""

from __future__ import annotations

import io
import os
from typing import Any

from aionn.hal.memory import write_all

__all__ = ["MemoryFile"]

READ_BYTES_MAX = 0x7FFFF000
"""Most bytes of one call of read(2)."""


class MemoryFile(io.BytesIO):
    """A file in memory, to be written and then read. OpenVINO exports only to a ``BytesIO``; its own memory stays empty.

    Raises:
        MemoryError: There is no memory, or no descriptor, left.
    """

    def __init__(self) -> None:
        super().__init__()
        self._place = self._size_bytes = 0
        self._error: MemoryError | None = None
        self._fd = -1
        try:
            self._fd = os.memfd_create("aionn-openvino", os.MFD_CLOEXEC)
        except OSError as e:
            raise MemoryError(f"a file in memory: {e.strerror}") from e

    @property
    def path(self) -> str:
        """The path by which this process opens it, until it is closed."""
        return f"/proc/self/fd/{self._fd}"

    def write(self, data: Any) -> int:
        """Writes all of it at the current place."""
        view = memoryview(data).cast("B")
        try:
            write_all(self._fd, view, self._place)
        except OSError as e:
            # A stream of C++ that writes loses an exception.
            self._error = MemoryError(f"a file in memory: {e.strerror}")
            raise self._error from e
        self._place += len(view)
        self._size_bytes = max(self._size_bytes, self._place)
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Changes the current place, and returns it."""
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size_bytes}
        self._place = max(0, starts[whence] + offset)
        return self._place

    def content(self) -> bytes:
        """All of it. Raises ``MemoryError`` where a write has failed."""
        if self._error is not None:
            raise self._error
        parts = [
            os.pread(self._fd, min(READ_BYTES_MAX, self._size_bytes - start), start)
            for start in range(0, self._size_bytes, READ_BYTES_MAX)
        ]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Gives the memory back."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        super().close()
