"""A Video4Linux driver in Python, below everything of aionn: the system calls of a camera, with the states of the kernel's.

A buffer is filled only while it is queued and the stream is on; the descriptor is an eventfd that is readable while filled
buffers wait.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from aionn.media.cameras import videodev
from aionn.media.cameras.hotplug import DeviceWatch
from aionn.media.cameras.system import System

__all__ = ["FakeCamera", "FakeControl", "FakeSystem", "FakeWatch", "Listed"]


class Listed(msgspec.Struct, frozen=True):
    """A format with one size and its rates."""

    format: str
    width: int
    height: int
    rates: tuple[int, ...] = (30,)


class FakeControl(msgspec.Struct):
    """A control, with its answers."""

    title: str
    kind: int = videodev.CTRL_INTEGER
    minimum: int = 0
    maximum: int = 255
    step: int = 1
    default: int = 128
    value: int = 128
    flags: int = 0
    menu: dict[int, str | int] = {}
    failing: int = 0


class FakeCamera:
    """One camera. What it does wrong is set by its attributes.

    Attributes:
        listed: What it offers.
        failing: ``request: errno`` of requests that fail.
        returned_size: What S_FMT returns instead of what was asked for.
        size_image: Length of a buffer instead of the right one.
        stride: Bytes of a row instead of the right number.
        buffers_given: The most buffers that it has.
        controls: By their numbers.
        takes_memory: Whether it fills memory of the application (user pointers).
        addresses: Of the buffers of the application, by number.
        blocks_open: Opening waits for it, if set.
    """

    def __init__(self, card: str = "Fake Camera", bus: str = "usb-1") -> None:
        self.card, self.bus = card, bus
        self.listed = [Listed("YUYV", 64, 48), Listed("YUYV", 640, 480)]
        self.failing: dict[int, int] = {}
        self.returned_size: tuple[int, int] | None = None
        self.returned_format: str | None = None
        self.size_image: int | None = None
        self.stride: int | None = None
        self.buffers_given = 32
        self.capabilities = videodev.CAP_VIDEO_CAPTURE | videodev.CAP_STREAMING
        self.stamp_flags = videodev.BUF_FLAG_TIMESTAMP_MONOTONIC
        self.blocks_open: threading.Event | None = None
        self.blocks_close: threading.Event | None = None
        self.is_plugged = True
        self.controls: dict[int, FakeControl] = {}
        self.format = ("", 0, 0)
        self.period = (1, 30)
        self.is_streaming = False
        self.sequence = 0
        self.takes_memory = True
        self.memory, self.count, self.size = videodev.MEMORY_MMAP, 0, 0
        self.addresses: dict[int, int] = {}
        self.maps: list[mmap.mmap] = []
        self.queued: deque[int] = deque()
        self.done: deque[videodev.Buffer] = deque()
        self.fd = -1
        self.opened = self.filled = 0
        self.lock = threading.Lock()
        self.dequeued_in: set[threading.Thread] = set()

    # What the test does

    def fill(
        self,
        data: bytes | None = None,
        *,
        used: int | None = None,
        flags: int = 0,
        age_ns: int = 0,
        index: int | None = None,
    ) -> bool:
        """Captures one picture; returns whether there was a buffer for it. Every picture has its number."""
        with self.lock:
            if not self.is_streaming:
                return False
            sequence, self.sequence = self.sequence, (self.sequence + 1) & 0xFFFF_FFFF
            is_own = self.memory == videodev.MEMORY_MMAP
            if not self.queued or (is_own and self.maps[self.queued[0]].closed):
                return False
            slot = self.queued.popleft()
            content = bytes([sequence % 256]) * self.size if data is None else data
            if is_own:
                self.maps[slot][: len(content)] = content
            else:
                ctypes.memmove(self.addresses[slot], content, len(content))
            stamp_ns = time.monotonic_ns() - age_ns
            entry = videodev.Buffer(
                index=slot if index is None else index,
                flags=flags | self.stamp_flags,
                sequence=sequence,
                bytesused=len(content) if used is None else used,
            )
            entry.timestamp.tv_sec, entry.timestamp.tv_usec = stamp_ns // 10**9, stamp_ns % 10**9 // 1000
            self.done.append(entry)
            self.filled += 1
            os.eventfd_write(self.fd, 1)
            return True

    def unplug(self) -> None:
        """Pulls the plug: the descriptor reports an error without end, and the device is gone."""
        with self.lock:
            self.is_plugged = False
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1 << 20)

    def plug(self) -> None:
        """Puts the plug back."""
        self.is_plugged = True

    @property
    def holds_nothing(self) -> bool:
        """Whether every descriptor is closed and every buffer unmapped."""
        return self.fd == -1 and all(memory.closed for memory in self.maps)

    # What the kernel does

    def answer(self, request: int, argument: ctypes.Structure | ctypes.c_int) -> None:
        """Answers a request."""
        if not self.is_plugged:
            raise OSError(errno.ENODEV, "No such device")
        if request in self.failing:
            raise OSError(self.failing[request], os.strerror(self.failing[request]))
        ANSWERS[request](self, argument)

    def query(self, capability: videodev.Capability) -> None:
        capability.driver, capability.card, capability.bus_info = (
            b"fake",
            self.card.encode(),
            self.bus.encode(),
        )
        capability.capabilities = self.capabilities | videodev.CAP_DEVICE_CAPS
        capability.device_caps = self.capabilities

    def name_format(self, entry: videodev.FormatDescription) -> None:
        names = list(dict.fromkeys(one.format for one in self.listed))
        entry.pixelformat = videodev.fourcc(_entry(names, entry.index))

    def name_size(self, entry: videodev.FrameSize) -> None:
        sizes = [(o.width, o.height) for o in self.listed if videodev.fourcc(o.format) == entry.pixel_format]
        entry.type = videodev.TYPE_DISCRETE
        entry.size.discrete.width, entry.size.discrete.height = _entry(sizes, entry.index)

    def name_rate(self, entry: videodev.FrameInterval) -> None:
        rates = [
            rate
            for one in self.listed
            if (videodev.fourcc(one.format), one.width, one.height)
            == (entry.pixel_format, entry.width, entry.height)
            for rate in one.rates
        ]
        entry.type = videodev.TYPE_DISCRETE
        entry.interval.discrete.numerator, entry.interval.discrete.denominator = 1, _entry(rates, entry.index)

    def set_format(self, form: videodev.Format) -> None:
        pix = form.fmt.pix
        if self.returned_size is not None:
            pix.width, pix.height = self.returned_size
        if self.returned_format is not None:
            pix.pixelformat = videodev.fourcc(self.returned_format)
        self.format = videodev.fourcc_name(pix.pixelformat), pix.width, pix.height
        per_pixel = {"YUYV": 2, "UYVY": 2, "RGB3": 3, "BGR3": 3}.get(self.format[0], 1)
        pix.bytesperline = pix.width * per_pixel if self.stride is None else self.stride
        rows = pix.height * 3 // 2 if self.format[0] == "NV12" else pix.height
        pix.sizeimage = self.size_image or max(1, min(pix.width * per_pixel * rows, 1 << 26))
        self.size = pix.sizeimage

    def get_rate(self, parameters: videodev.StreamParameters) -> None:
        capture = parameters.parm.capture
        capture.capability = videodev.CAP_TIMEPERFRAME
        capture.timeperframe.numerator, capture.timeperframe.denominator = self.period

    def set_rate(self, parameters: videodev.StreamParameters) -> None:
        asked = parameters.parm.capture.timeperframe
        self.period = asked.numerator, asked.denominator

    def give_buffers(self, wanted: videodev.RequestBuffers) -> None:
        if wanted.memory == videodev.MEMORY_USERPTR and not self.takes_memory:
            raise OSError(errno.EINVAL, "Invalid argument")
        wanted.count = min(wanted.count, self.buffers_given)
        self.memory, self.count, self.addresses = wanted.memory, wanted.count, {}
        self.maps, self.queued, self.done = [], deque(), deque()

    def describe_buffer(self, entry: videodev.Buffer) -> None:
        entry.length, entry.m.offset = self.size, entry.index * mmap.PAGESIZE * 1024

    def queue(self, entry: videodev.Buffer) -> None:
        with self.lock:
            assert entry.memory == self.memory
            assert entry.index not in self.queued and 0 <= entry.index < self.count
            if self.memory == videodev.MEMORY_USERPTR:
                assert entry.length >= self.size
                self.addresses[entry.index] = entry.m.userptr
            self.queued.append(entry.index)

    def dequeue(self, entry: videodev.Buffer) -> None:
        self.dequeued_in.add(threading.current_thread())
        with self.lock:
            if not self.done:
                raise OSError(errno.EAGAIN, "again")
            os.eventfd_read(self.fd)
            ctypes.memmove(ctypes.byref(entry), ctypes.byref(self.done.popleft()), ctypes.sizeof(entry))

    def name_control(self, query: videodev.QueryControl) -> None:
        after = query.id & ~videodev.CTRL_FLAG_NEXT
        number = min((n for n in self.controls if n > after), default=None)
        if number is None:
            raise OSError(errno.EINVAL, "Invalid argument")
        control = self.controls[number]
        query.id, query.type, query.flags = number, control.kind, control.flags
        query.name = control.title.encode()
        query.minimum, query.maximum, query.step = control.minimum, control.maximum, control.step
        query.default_value = control.default

    def name_choice(self, entry: videodev.QueryMenu) -> None:
        control = self.controls[entry.id]
        if entry.index not in control.menu:
            raise OSError(errno.EINVAL, "Invalid argument")
        text = control.menu[entry.index]
        if isinstance(text, int):
            entry.entry.value = text
        else:
            entry.entry.name = text.encode()

    def get_control(self, entry: videodev.Control) -> None:
        entry.value = self.controls[entry.id].value

    def set_control(self, entry: videodev.Control) -> None:
        control = self.controls[entry.id]
        if control.failing:
            raise OSError(control.failing, os.strerror(control.failing))
        control.value = entry.value

    def start(self, kind: ctypes.c_int) -> None:
        self.is_streaming = True

    def stop(self, kind: ctypes.c_int) -> None:
        self.is_streaming = False

    def select(self, index: ctypes.c_int) -> None:
        if index.value:
            raise OSError(errno.EINVAL, "Invalid argument")


def _entry(values: list[Any], index: int) -> Any:
    if index >= len(values):
        raise OSError(errno.EINVAL, "Invalid argument")
    return values[index]


ANSWERS: dict[int, Callable[[FakeCamera, Any], None]] = {
    videodev.QUERYCAP: FakeCamera.query,
    videodev.ENUM_FMT: FakeCamera.name_format,
    videodev.ENUM_FRAMESIZES: FakeCamera.name_size,
    videodev.ENUM_FRAMEINTERVALS: FakeCamera.name_rate,
    videodev.S_FMT: FakeCamera.set_format,
    videodev.G_PARM: FakeCamera.get_rate,
    videodev.S_PARM: FakeCamera.set_rate,
    videodev.S_INPUT: FakeCamera.select,
    videodev.QUERYCTRL: FakeCamera.name_control,
    videodev.QUERYMENU: FakeCamera.name_choice,
    videodev.G_CTRL: FakeCamera.get_control,
    videodev.S_CTRL: FakeCamera.set_control,
    videodev.REQBUFS: FakeCamera.give_buffers,
    videodev.QUERYBUF: FakeCamera.describe_buffer,
    videodev.QBUF: FakeCamera.queue,
    videodev.DQBUF: FakeCamera.dequeue,
    videodev.STREAMON: FakeCamera.start,
    videodev.STREAMOFF: FakeCamera.stop,
}


class FakeWatch(DeviceWatch):
    """Reports that a device has come or gone when the test says so."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def announce(self) -> None:
        """Something has changed."""
        os.eventfd_write(self._fd, 1)

    def news(self) -> bool:
        try:
            return os.eventfd_read(self._fd) > 0
        except BlockingIOError:
            return False


class FakeSystem(System):
    """A machine with cameras by their paths."""

    def __init__(self, cameras: dict[str, FakeCamera] | None = None) -> None:
        self.cameras = {"/dev/video0": FakeCamera()} if cameras is None else cameras
        self.by_fd: dict[int, FakeCamera] = {}
        self.users: list[str] = []
        self.forbidden: set[str] = set()
        self.watch: FakeWatch | None = None
        self.has_watch = True

    @property
    def camera(self) -> FakeCamera:
        """The first camera."""
        return next(iter(self.cameras.values()))

    def open(self, path: str) -> int:
        camera = self.cameras.get(path)
        if path in self.forbidden:
            raise OSError(errno.EACCES, "Permission denied")
        if camera is None:
            raise OSError(errno.ENOENT, "No such file or directory")
        if camera.blocks_open is not None:
            camera.blocks_open.wait(20)
        if not camera.is_plugged:
            raise OSError(errno.ENODEV, "No such device")
        fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.by_fd[fd] = camera
        camera.fd = fd
        camera.opened += 1
        return fd

    def close(self, fd: int) -> None:
        camera = self.by_fd.pop(fd)
        if camera.blocks_close is not None:
            camera.blocks_close.wait(20)
        with camera.lock:
            camera.is_streaming = False
            if camera.fd == fd:
                camera.fd = -1
        os.close(fd)

    def ioctl(self, fd: int, request: int, argument: ctypes.Structure | ctypes.c_int) -> None:
        self.by_fd[fd].answer(request, argument)

    def watch_devices(self) -> FakeWatch:
        if not self.has_watch:
            raise OSError(errno.EMFILE, "Too many open files")
        self.watch = FakeWatch()
        return self.watch

    def announce(self) -> None:
        """The kernel reports a change of ``/dev``."""
        if self.watch is not None and self.watch.fileno() >= 0:
            self.watch.announce()

    def map(self, fd: int, length: int, offset: int) -> mmap.mmap:
        memory = mmap.mmap(-1, length)
        self.by_fd[fd].maps.append(memory)
        return memory

    def video_nodes(self) -> list[str]:
        return list(self.cameras)

    def stable_names(self) -> dict[str, str]:
        return {}

    def users_of(self, path: str, fd: int = -1) -> list[str]:
        return self.users
