"""The system calls of a camera: the lowest layer, which tests replace.

Owns the calls, and the check that an argument has them. Refuses to own any decision.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from pathlib import Path

from aionn.errors import InvalidArgument, shown
from aionn.media.cameras.hotplug import DeviceWatch

__all__ = ["System", "checked_system"]

PROCESSES_MAX = 10_000
"""Processes that are searched for the one that uses a camera: a desktop has hundreds."""

NODES_MAX = 256
"""Video devices that are listed; the kernel numbers no more (VIDEO_NUM_DEVICES)."""


class System:
    """The calls on the running kernel."""

    def open(self, path: str) -> int:
        """Opens a device for reading and writing; it never waits for a frame."""
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        """Closes a descriptor."""
        os.close(fd)

    def ioctl(self, fd: int, request: int, argument: ctypes.Structure | ctypes.c_int) -> None:
        """Makes a request; the kernel fills in the argument.

        Raises:
            OSError: The kernel refuses the request.
        """
        while True:
            try:
                fcntl.ioctl(fd, request, argument, True)
            except InterruptedError:
                continue
            return

    def map(self, fd: int, length: int, offset: int) -> mmap.mmap:
        """Maps a buffer of the driver."""
        return mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)

    def watch_devices(self) -> DeviceWatch:
        """Watches for devices that come and go.

        Raises:
            OSError: The kernel does not offer that.
        """
        return DeviceWatch()

    def video_nodes(self) -> list[str]:
        """Paths of the video devices, by their numbers."""
        names = []
        with os.scandir("/dev") as entries:
            for entry in entries:
                if entry.name.startswith("video") and entry.name[5:].isdecimal():
                    names.append(entry.name)
        return [f"/dev/{name}" for name in sorted(names, key=lambda name: int(name[5:]))[:NODES_MAX]]

    def stable_names(self) -> dict[str, str]:
        """Names that survive a reconnection, by the path that each leads to; empty where udev makes none."""
        found: dict[str, str] = {}
        for folder in ("/dev/v4l/by-path", "/dev/v4l/by-id"):  # The latter wins: it survives another socket.
            try:
                names = sorted(os.listdir(folder))[:NODES_MAX]
            except OSError:
                continue
            for name in names:
                found[os.path.realpath(f"{folder}/{name}")] = f"{folder}/{name}"
        return found

    def users_of(self, path: str, fd: int = -1) -> list[str]:
        """Programs that have a device open, as ``name (pid n)``; those of other users may not be visible.

        Args:
            path: The device.
            fd: The caller's descriptor of it, which does not count.
        """
        users = []
        target = os.path.realpath(path)
        own = f"/proc/{os.getpid()}/fd/{fd}"
        for entry in sorted(os.listdir("/proc"))[:PROCESSES_MAX]:
            if not entry.isdecimal():
                continue
            try:
                links = [str(link) for link in Path(f"/proc/{entry}/fd").iterdir()]
                if any(_leads_to(target, link) for link in links if link != own):
                    is_this = int(entry) == os.getpid()
                    name = "this program" if is_this else Path(f"/proc/{entry}/comm").read_text().strip()
                    users.append(f"{name} (pid {entry})")
            except OSError:
                continue
        return users


def _leads_to(target: str, link: str) -> bool:
    try:
        return os.readlink(link) == target
    except OSError:  # The descriptor was closed in the meantime, as the one of this listing.
        return False


def checked_system(system: object, where: str) -> System:
    """Returns the argument ``system`` of a function for users, else raises `InvalidArgument`."""
    if not isinstance(system, System):
        raise InvalidArgument(f"{where}: system: expected the system calls of a camera, got {shown(system)}")
    return system
