"""One camera that is open and streams: the requests to the driver, and its buffers.

Owns the order of the requests, and the check of every answer. Refuses to own the choice of a format (`negotiation.py`), the
words of errors (`problems.py`), waiting and reconnection (`aionn/media/live`).

Invariants:
1. ``dequeue`` and ``requeue`` never wait: the descriptor is opened with O_NONBLOCK.
2. A number of the driver is used as an index or a length after it was checked alone.
3. A failed ``open_camera`` leaves no descriptor and no mapping.

Source: the kernel's documentation "Video for Linux API", streaming I/O (memory mapping).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aionn.media.cameras import videodev
from aionn.media.cameras.controls import ControlValue, set_controls
from aionn.media.cameras.device import VideoDevice, capability_of, offers_of
from aionn.media.cameras.jpeg import JpegConverter, can_decode_jpeg
from aionn.media.cameras.negotiation import EDGE_MAX, Choice, Offer, Wish, choose
from aionn.media.cameras.pixels import Geometry, PixelConverter, colours_of
from aionn.media.cameras.problems import lost
from aionn.media.cameras.system import System
from aionn.media.live.capture import Grab, SourceUnavailable
from aionn.media.live.clock import MediaClock, driver_time
from aionn.media.records import Frame

__all__ = ["NO_CONTROLS", "CameraCapture", "Setting", "open_camera", "set_up"]

BUFFERS_MIN = 4
"""One that the driver fills, one that waits, one that is converted, and one in reserve; each further one is a frame of delay."""

BUFFER_BYTES_MAX = 1 << 30
"""A larger buffer is a mistake of the driver: 16,384 x 16,384 pixels of YUYV are half of it."""

NO_CONTROLS: Final[Mapping[str, ControlValue]] = MappingProxyType({})

Pixels = npt.NDArray[np.uint8]


class _Converter(Protocol):
    def convert(self, buffer: memoryview, used: int) -> Pixels: ...


class CameraCapture:
    """A camera that streams. Made by `open_camera`.

    Args:
        device: The open device.
        buffers: Its mapped buffers.
        converter: Makes frames of them; None where a subclass does.
        period_ns: Time between two frames; None if the driver names none.
        description: Of the format, for messages and lists.
    """

    is_immediate = False
    clock: MediaClock | None = None

    def __init__(
        self,
        device: VideoDevice,
        buffers: list[mmap.mmap],
        converter: _Converter | None,
        period_ns: int | None,
        description: str,
    ) -> None:
        self._device = device
        self._buffers = buffers
        self._converter = converter
        self._period_ns = period_ns
        self.description = description

    @property
    def name(self) -> str:
        """The device, for messages."""
        return f"camera {self._device.path}"

    @property
    def depth(self) -> int:
        """Number of buffers."""
        return len(self._buffers)

    @property
    def period_ns(self) -> int | None:
        """By the rate that the driver has set. In the dark a camera may be slower."""
        return self._period_ns

    def fileno(self) -> int:
        """The device."""
        return self._device.fd

    def dequeue(self, now_ns: int) -> Grab | None:
        """See `aionn.media.live.capture.Capture`."""
        entry = self._dequeued(videodev.MEMORY_MMAP)
        if entry is None:
            return None
        if entry.index >= len(self._buffers):
            raise SourceUnavailable(
                f"{self.name}: expected one of {len(self._buffers)} buffers, got number {entry.index}; the driver is at fault"
            )
        entry.bytesused = min(entry.bytesused, len(self._buffers[entry.index]))
        return self._grab(entry, now_ns)

    def _dequeued(self, memory: int) -> videodev.Buffer | None:
        """The next filled buffer; None if none waits."""
        entry = videodev.Buffer(type=videodev.VIDEO_CAPTURE, memory=memory)
        try:
            self._device.system.ioctl(self._device.fd, videodev.DQBUF, entry)
        except OSError as e:
            if e.errno == errno.EAGAIN:
                return None
            raise lost(e, self._device.path) from e
        return entry

    def _grab(self, entry: videodev.Buffer, now_ns: int) -> Grab:
        stamp_ns = entry.timestamp.tv_sec * 1_000_000_000 + entry.timestamp.tv_usec * 1_000
        clock = entry.flags & videodev.BUF_FLAG_TIMESTAMP_MASK
        captured = driver_time(stamp_ns, clock == videodev.BUF_FLAG_TIMESTAMP_MONOTONIC, now_ns)
        is_corrupt = bool(entry.flags & videodev.BUF_FLAG_ERROR) or entry.bytesused == 0
        return Grab(entry.index, captured, entry.sequence, is_corrupt, entry.bytesused)

    def requeue(self, grab: Grab) -> None:
        """See `aionn.media.live.capture.Capture`."""
        with contextlib.suppress(OSError):  # A camera that is gone is noticed by the next dequeue.
            self._device.system.ioctl(self._device.fd, videodev.QBUF, _buffer(grab.slot))

    def convert(self, grab: Grab) -> Frame:
        """See `aionn.media.live.capture.Capture`."""
        assert self._converter is not None
        with memoryview(self._buffers[grab.slot]) as view:
            return self._frame(grab, self._converter.convert(view, grab.content))

    def _frame(self, grab: Grab, data: Pixels) -> Frame:
        captured = grab.captured
        return Frame(
            data,
            captured.at_ns,
            grab.index,
            grab.time_s,
            clock=captured.clock,
            uncertainty_ns=captured.uncertainty_ns,
            lost_before=grab.lost_before,
            follows_gap=grab.follows_gap,
        )

    def close(self) -> None:
        """See `aionn.media.live.capture.Capture`."""
        system, fd = self._device.system, self._device.fd
        with contextlib.suppress(OSError):
            system.ioctl(fd, videodev.STREAMOFF, ctypes.c_int(videodev.VIDEO_CAPTURE))
        _release(self._buffers)
        with contextlib.suppress(OSError):
            system.close(fd)


def _release(buffers: list[mmap.mmap]) -> None:
    while buffers:
        buffers.pop().close()


def _buffer(index: int) -> videodev.Buffer:
    return videodev.Buffer(index=index, type=videodev.VIDEO_CAPTURE, memory=videodev.MEMORY_MMAP)


class Setting(NamedTuple):
    """The settings that a camera has accepted.

    Attributes:
        choice: The format, size and rate that were asked for.
        pix: The format as the driver has set it.
        period_ns: Time between two frames; None if the driver names none.
    """

    choice: Choice
    pix: videodev.PixFormat
    period_ns: int | None

    @property
    def description(self) -> str:
        """For messages."""
        rate = "?" if self.period_ns is None else f"{1e9 / self.period_ns:.3g}"
        return f"{self.choice.format} {self.pix.width}x{self.pix.height} at {rate} per s"


def open_camera(
    system: System,
    path: str,
    wish: Wish,
    size: tuple[int, int] | None,
    *,
    buffers: int,
    input_index: int | None,
    controls: Mapping[str, ControlValue] = NO_CONTROLS,
) -> CameraCapture:
    """Opens a camera and starts its stream. It may block for as long as the driver does.

    Args:
        system: The system calls.
        path: The device.
        wish: See `choose`.
        size: ``(width, height)`` of the frames; None leaves the camera's.
        buffers: Number of buffers to ask for, at least `BUFFERS_MIN`.
        input_index: Input to select, of a card that has several; None leaves it.
        controls: Values of controls, by name.

    Raises:
        SourceUnavailable: It cannot be opened, offers nothing that can be converted, or answers with nonsense.
        InvalidArgument: It has no such control, or the value is out of its range.
    """
    device = VideoDevice(system, path)
    mapped: list[mmap.mmap] = []
    try:
        setting = set_up(device, wish, input_index, controls)
        choice, pix, period_ns = setting
        converter = _converter(path, choice, pix, size)
        _map_buffers(device, buffers, _bytes_needed(choice, pix), mapped)
        for index in range(len(mapped)):
            device.ask(videodev.QBUF, _buffer(index), "queueing a buffer")
        device.ask(videodev.STREAMON, ctypes.c_int(videodev.VIDEO_CAPTURE), "starting to stream")
        return CameraCapture(device, mapped, converter, period_ns, setting.description)
    except BaseException:
        _release(mapped)
        system.close(device.fd)
        raise


def set_up(
    device: VideoDevice, wish: Wish, input_index: int | None, controls: Mapping[str, ControlValue]
) -> Setting:
    """Sets input, controls, format and rate. Raises as `open_camera`."""
    capability_of(device)
    if input_index is not None:
        device.ask(videodev.S_INPUT, ctypes.c_int(input_index), f"selecting input {input_index}")
    if controls:
        set_controls(device, controls)
    offers = offers_of(device)
    choice = choose(offers, wish, can_decode_jpeg=can_decode_jpeg())
    if choice is None:
        raise _nothing_usable(device.path, offers, wish)
    pix = _set_format(device, choice)
    return Setting(choice, pix, _set_rate(device, choice.rate or wish.rate))


def _nothing_usable(path: str, offers: list[Offer], wish: Wish) -> SourceUnavailable:
    names = ", ".join(dict.fromkeys(offer.format for offer in offers)) or "none"
    remedy = "MJPG needs PyAV: pip install 'aionn[media]'" if "MJPG" in names else "no other can be converted"
    expected = wish.format or "YUYV, UYVY, NV12, GREY, RGB3, BGR3 or MJPG"
    return SourceUnavailable(
        f"camera {path}: expected the format {expected}, got {names}; {remedy}", is_permanent=True
    )


def _set_format(device: VideoDevice, choice: Choice) -> videodev.PixFormat:
    """Sets the format; returns what the driver made of it."""
    form = videodev.Format(type=videodev.VIDEO_CAPTURE)
    pix: videodev.PixFormat = form.fmt.pix
    pix.width, pix.height = choice.size
    pix.pixelformat = videodev.fourcc(choice.format)
    pix.field = videodev.FIELD_NONE
    device.ask(videodev.S_FMT, form, f"setting {choice.format} {choice.size[0]}x{choice.size[1]}")
    name = videodev.fourcc_name(pix.pixelformat).replace("JPEG", "MJPG")
    if name != choice.format or not (0 < pix.width <= EDGE_MAX and 0 < pix.height <= EDGE_MAX):
        raise SourceUnavailable(
            f"camera {device.path}: expected {choice.format} {choice.size[0]}x{choice.size[1]}, got {name} "
            f"{pix.width}x{pix.height}; the "
            "driver does not keep to its own list",
            is_permanent=True,
        )
    return pix


def _geometry(choice: Choice, pix: videodev.PixFormat) -> Geometry:
    bare = Geometry(choice.format, pix.width, pix.height, 0).row_bytes
    # Drivers that fill in no stride, or a wrong one, have rows without padding.
    return Geometry(choice.format, pix.width, pix.height, max(bare, pix.bytesperline))


def _bytes_needed(choice: Choice, pix: videodev.PixFormat) -> int:
    """The least length of a buffer; of a compressed picture it is not known."""
    return 1 if choice.format == "MJPG" else _geometry(choice, pix).least_bytes


def _converter(
    path: str, choice: Choice, pix: videodev.PixFormat, size: tuple[int, int] | None
) -> _Converter:
    captured = pix.width, pix.height
    if choice.format == "MJPG":
        return JpegConverter(captured, size or captured, f"camera {path}")
    colours = colours_of(pix.colorspace, pix.ycbcr_enc, pix.quantization)
    return PixelConverter(_geometry(choice, pix), size or captured, colours)


def _set_rate(device: VideoDevice, rate: float) -> int | None:
    """Asks for a rate; returns the period that the driver set, None if it names none."""
    parameters = videodev.StreamParameters(type=videodev.VIDEO_CAPTURE)
    try:
        device.system.ioctl(device.fd, videodev.G_PARM, parameters)
        if parameters.parm.capture.capability & videodev.CAP_TIMEPERFRAME:
            parameters.parm.capture.timeperframe.numerator = 1000
            parameters.parm.capture.timeperframe.denominator = round(rate * 1000)
            device.system.ioctl(device.fd, videodev.S_PARM, parameters)
    except OSError as e:
        if e.errno not in (errno.ENOTTY, errno.EINVAL, errno.ENODATA):
            raise device.problem(e, "setting the rate") from e
        return None
    period = parameters.parm.capture.timeperframe
    if not period.numerator or not period.denominator:
        return None
    return int(period.numerator * 1_000_000_000 // period.denominator)


def _map_buffers(device: VideoDevice, count: int, needed: int, mapped: list[mmap.mmap]) -> None:
    wanted = videodev.RequestBuffers(count=count, type=videodev.VIDEO_CAPTURE, memory=videodev.MEMORY_MMAP)
    device.ask(videodev.REQBUFS, wanted, f"requesting {count} buffers")
    if not 2 <= wanted.count <= 64:
        raise SourceUnavailable(
            f"camera {device.path}: expected 2 to 64 buffers, got {wanted.count}; the driver has too little memory, or is at fault"
        )
    for index in range(wanted.count):
        entry = _buffer(index)
        device.ask(videodev.QUERYBUF, entry, f"asking for buffer {index}")
        if not needed <= entry.length <= BUFFER_BYTES_MAX:
            raise SourceUnavailable(
                f"camera {device.path}: expected a buffer of {needed} to {BUFFER_BYTES_MAX} bytes, got "
                f"{entry.length}; the driver is at "
                "fault"
            )
        try:
            mapped.append(device.system.map(device.fd, entry.length, entry.m.offset))
        except (OSError, ValueError) as e:
            raise SourceUnavailable(f"camera {device.path}: buffer {index} cannot be mapped: {e}") from e
