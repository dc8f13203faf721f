"""Cameras that are plugged in and unplugged, noticed by inotify: no library of udev, and nothing is asked again and again.

Owns the descriptor of inotify and the reading of its events. Refuses to own what is done about them.

Source: inotify(7).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

__all__ = ["FOLDERS", "DeviceWatch"]

FOLDERS = ("/dev", "/dev/v4l", "/dev/v4l/by-id", "/dev/v4l/by-path")
"""Where the devices and their stable names are. Those below ``/dev/v4l`` come with the first camera."""

ATTRIB, MOVED_FROM, MOVED_TO, CREATE, DELETE, Q_OVERFLOW = 0x4, 0x40, 0x80, 0x100, 0x200, 0x4000
MASK = ATTRIB | MOVED_FROM | MOVED_TO | CREATE | DELETE
"""``ATTRIB`` as well: udev gives a device to its group a moment after it has appeared."""

NAMES = (b"video", b"v4l")
"""Beginnings of the names in ``/dev`` that concern cameras."""

EVENTS_BYTES = 4096
"""Bytes of one read: at least one event, whose name has up to 255 bytes."""

READS_MAX = 64
"""Reads in one turn of the loop: the kernel keeps 16,384 events at most, and drops further ones with a mark."""

_EVENT = struct.Struct("iIII")


class DeviceWatch:
    """Watches folders for devices that come and go. Close it.

    Args:
        folders: Those that do not exist yet are watched when they come, if their parent is among them.

    Raises:
        OSError: The kernel has no inotify, or the user has too many instances.
    """

    def __init__(self, folders: Sequence[str] = FOLDERS) -> None:
        self._folders = tuple(folders)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd < 0:
            raise _error("inotify_init1")
        self._roots: set[int] = set()
        try:
            self._watch_folders()
            if not self._roots:
                raise FileNotFoundError(errno.ENOENT, "no folder to watch", self._folders[0])
        except BaseException:
            os.close(self._fd)
            raise

    def fileno(self) -> int:
        """Readable when something has changed in a folder."""
        return self._fd

    def news(self) -> bool:
        """Reads what has changed; returns whether a camera may have come or gone. It never waits."""
        is_news = False
        for _ in range(READS_MAX):
            try:
                data = os.read(self._fd, EVENTS_BYTES)
            except BlockingIOError:
                break
            is_news = any(self._concerns_cameras(*event) for event in _events(data)) or is_news
        if is_news:
            self._watch_folders()
        return is_news

    def close(self) -> None:
        """Ends the watch. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _concerns_cameras(self, watch: int, mask: int, name: bytes) -> bool:
        return bool(mask & Q_OVERFLOW) or watch not in self._roots or name.startswith(NAMES)

    def _watch_folders(self) -> None:
        for index, folder in enumerate(self._folders):
            # Adding a folder again gives the same number.
            watch = int(self._libc.inotify_add_watch(self._fd, os.fsencode(folder), MASK))
            if watch < 0:
                if ctypes.get_errno() in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
                    continue
                raise _error(f"inotify_add_watch {folder}")
            if index == 0:
                self._roots.add(watch)


def _events(data: bytes) -> list[tuple[int, int, bytes]]:
    """``(watch, mask, name)`` of each event."""
    events, place = [], 0
    while place + _EVENT.size <= len(data):
        watch, mask, _, length = _EVENT.unpack_from(data, place)
        place += _EVENT.size
        events.append((watch, mask, data[place : place + length].rstrip(b"\0")))
        place += length
    return events


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)
