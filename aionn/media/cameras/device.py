"""An open video device, and the questions about what it is and what it offers.

Owns the descriptor and the enumerations. Refuses to own a stream (`capture.py`) and the choice (`negotiation.py`).

Invariant: every enumeration is bounded, whatever the driver answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
from collections.abc import Iterator

from aionn.media.cameras import videodev
from aionn.media.cameras.negotiation import EDGE_MAX, Offer
from aionn.media.cameras.problems import problem
from aionn.media.cameras.system import System
from aionn.media.live.capture import SourceUnavailable

__all__ = ["NotACamera", "VideoDevice", "capability_of", "offers_of", "shown_text"]

FORMATS_MAX = 64
"""Formats that are asked for; drivers have up to some thirty."""

SIZES_MAX = 256
"""Sizes of a format, and rates of a size, that are asked for; webcams have up to some twenty."""


class NotACamera(SourceUnavailable):
    """The device is a video device, and captures no pictures."""


class VideoDevice:
    """The descriptor, and requests whose errors have words."""

    def __init__(self, system: System, path: str) -> None:
        self.system = system
        self.path = path
        self.fd = -1
        try:
            self.fd = system.open(path)
        except OSError as e:
            raise self.problem(e, "opening it") from e

    def ask(self, request: int, argument: ctypes.Structure | ctypes.c_int, what: str) -> None:
        """Makes a request; an error of the kernel is raised as `SourceUnavailable`."""
        try:
            self.system.ioctl(self.fd, request, argument)
        except OSError as e:
            raise self.problem(e, what) from e

    def offers(self, request: int, argument: ctypes.Structure) -> bool:
        """Makes a request that enumerates; returns whether there is such an entry."""
        try:
            self.system.ioctl(self.fd, request, argument)
        except OSError as e:
            # EINVAL ends an enumeration; ENOTTY and ENODATA mean that the driver has none.
            if e.errno in (errno.EINVAL, errno.ENOTTY, errno.ENODATA):
                return False
            raise self.problem(e, "listing its formats") from e
        return True

    def problem(self, error: OSError, what: str) -> SourceUnavailable:
        """The error in words, with the programs that use a busy camera."""
        users: list[str] = []
        if error.errno == errno.EBUSY:
            with contextlib.suppress(OSError):
                users = self.system.users_of(self.path, self.fd)
        return problem(error, self.path, what, users)


def shown_text(name: bytes) -> str:
    """A name that a device has chosen, as it may be shown: nothing in it moves a terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in name.decode(errors="replace"))


def capability_of(device: VideoDevice) -> videodev.Capability:
    """The names and abilities of a device.

    Raises:
        NotACamera: It does not capture, or does not stream.
        SourceUnavailable: It does not answer.
    """
    capability = videodev.Capability()
    device.ask(videodev.QUERYCAP, capability, "asking what it is")
    has_own = capability.capabilities & videodev.CAP_DEVICE_CAPS
    abilities = capability.device_caps if has_own else capability.capabilities
    needed = videodev.CAP_VIDEO_CAPTURE | videodev.CAP_STREAMING
    if abilities & needed != needed:
        raise NotACamera(
            f"camera {device.path}: expected a device that captures and streams pictures, got one with abilities "
            f"{abilities:#x}; webcams "
            "have a second node, for metadata: use the first (`aionn devices --sources`)",
            is_permanent=True,
        )
    return capability


def offers_of(device: VideoDevice) -> list[Offer]:
    """Everything that a camera offers, in the order of its driver."""
    offers: list[Offer] = []
    for index in range(FORMATS_MAX):
        entry = videodev.FormatDescription(index=index, type=videodev.VIDEO_CAPTURE)
        if not device.offers(videodev.ENUM_FMT, entry):
            break
        name = videodev.fourcc_name(entry.pixelformat)
        is_emulated = bool(entry.flags & videodev.FMT_FLAG_EMULATED)
        if name == "JPEG":
            name = "MJPG"  # The same, from older drivers.
        offers += _sizes(device, name, entry.pixelformat, is_emulated)
    return offers


def _sizes(device: VideoDevice, name: str, pixelformat: int, is_emulated: bool) -> Iterator[Offer]:
    for index in range(SIZES_MAX):
        entry = videodev.FrameSize(index=index, pixel_format=pixelformat)
        if not device.offers(videodev.ENUM_FRAMESIZES, entry):
            if index == 0:  # The driver lists no sizes: any may be asked for.
                yield Offer(name, (1, 1), (EDGE_MAX, EDGE_MAX), is_emulated=is_emulated)
            return
        if entry.type == videodev.TYPE_DISCRETE:
            size = entry.size.discrete.width, entry.size.discrete.height
            rates = _rates(device, pixelformat, size)
            yield Offer(name, size, size, rates=rates, is_emulated=is_emulated)
            continue
        steps = entry.size.stepwise
        smallest = max(1, steps.min_width), max(1, steps.min_height)
        rates = _rates(device, pixelformat, smallest)
        largest, step = (steps.max_width, steps.max_height), (steps.step_width, steps.step_height)
        yield Offer(name, smallest, largest, step, rates, is_emulated)
        return


def _rates(device: VideoDevice, pixelformat: int, size: tuple[int, int]) -> tuple[float, ...]:
    rates: list[float] = []
    for index in range(SIZES_MAX):
        entry = videodev.FrameInterval(index=index, pixel_format=pixelformat, width=size[0], height=size[1])
        if not device.offers(videodev.ENUM_FRAMEINTERVALS, entry):
            break
        is_range = entry.type != videodev.TYPE_DISCRETE
        steps = entry.interval.stepwise
        for fraction in (steps.min, steps.max) if is_range else (entry.interval.discrete,):
            if fraction.numerator and fraction.denominator:
                rates.append(fraction.denominator / fraction.numerator)
        if is_range:
            break
    return tuple(rates)
