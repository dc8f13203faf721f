"""A file system in user space with one file, whose answers may be withheld: what a client may mount and hand to a server."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from pathlib import Path

LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, INTERRUPT, BATCH_FORGET = (
    1,
    2,
    3,
    14,
    15,
    18,
    25,
    26,
    36,
    42,
)
FILE_BYTES = 4096
WITHHELD_S_MAX = 15.0
"""After this time all questions are answered: a thread that waits for an answer cannot be ended."""

_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


class FileServer:
    """Mounts a file system with the file ``file``, by fuse(4).

    Attributes:
        file: The path of the file.
        withheld: The kinds of questions that are not answered until ``release``.
        seen: The kinds of all questions.

    Raises:
        OSError: The process may not mount.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "file"
        self.withheld: set[int] = set()
        self.seen: list[int] = []
        self._folder = os.fsencode(folder)
        self._waiting: list[tuple[int, int, int]] = []
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
        if _libc.mount(b"aionn-test", self._folder, b"fuse", 0, options):
            os.close(self._fd)
            raise OSError(ctypes.get_errno(), "mount")
        self._watchdog = threading.Timer(WITHHELD_S_MAX, self.release)
        self._watchdog.daemon = True
        self._watchdog.start()
        self._thread = threading.Thread(target=self._serve, name="file server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                question = os.read(self._fd, 1 << 18)
            except OSError:
                return  # It was unmounted.
            _, kind, number, node = struct.unpack_from("<IIQQ", question)
            self.seen.append(kind)
            if kind in self.withheld:
                self._waiting.append((kind, number, node))
            else:
                self._answer(kind, number, node)

    def _answer(self, kind: int, number: int, node: int) -> None:
        node, mode = (1, 0o40755) if node == 1 and kind != LOOKUP else (2, 0o100644)
        attributes = struct.pack("<6Q10I", node, FILE_BYTES, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
        if kind in (FORGET, INTERRUPT, BATCH_FORGET):
            return
        found = {
            INIT: struct.pack("<4I2H2I2H8I", 7, 31, 0, 0, 12, 12, 1 << 17, 1, 32, *(0,) * 9),
            LOOKUP: struct.pack("<4Q2I", 2, 0, 0, 0, 0, 0) + attributes,
            GETATTR: struct.pack("<Q2I", 0, 0, 0) + attributes,
            OPEN: struct.pack("<Q2I", 1, 0, 0),
            READ: bytes(FILE_BYTES),
        }
        data = found.get(kind, b"")
        # The kernel withdraws a question when the folder is unmounted.
        with contextlib.suppress(FileNotFoundError):
            os.write(self._fd, struct.pack("<IiQ", 16 + len(data), 0, number) + data)

    def release(self) -> None:
        """Answers all questions from now on."""
        self.withheld = set()
        while self._waiting:
            self._answer(*self._waiting.pop())

    def close(self) -> None:
        """Unmounts; questions that wait fail."""
        self._watchdog.cancel()
        self._watchdog.join()
        self.release()
        _libc.umount2(self._folder, _MNT_DETACH)
        self._thread.join()
        os.close(self._fd)
