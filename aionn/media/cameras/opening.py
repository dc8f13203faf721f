"""The functions for users: a camera as a source, and the list of cameras.

Owns their arguments. Refuses to own anything else.
"""

from __future__ import annotations

from aionn.errors import InvalidArgument
from aionn.media.cameras.capture import BUFFERS_MIN, CameraCapture, open_camera
from aionn.media.cameras.listing import CameraInfo, Identity, find_cameras, identity_of, resolve
from aionn.media.cameras.negotiation import PixelFormat, Wish, checked_wish
from aionn.media.cameras.system import System
from aionn.media.live.reconnection import Reconnection
from aionn.media.live.source import LiveSource
from aionn.media.live.worker import Worker
from aionn.media.pacing import Keep
from aionn.media.records import Frame
from aionn.media.video import checked_size

__all__ = ["camera", "list_cameras"]

OPEN_S_MAX = 10.0
"""Opening a camera and starting its stream takes up to some seconds, where its USB port has to wake up."""

QUEUE_MAX = 28
"""Frames that may wait: the kernel has at most 32 buffers for a stream, and four are in use."""

RECONNECTION = Reconnection(most_s=2.0)
"""A camera that is plugged in again is found within 2 s; looking for one costs a system call."""


class _CameraOpener:
    """Opens one camera, again and again, although it may have another number then."""

    limit_s = OPEN_S_MAX

    def __init__(
        self,
        system: System,
        name: str | int,
        wish: Wish,
        size: tuple[int, int] | None,
        buffers: int,
        input_index: int | None,
    ) -> None:
        self._system = system
        self._name = name
        self._wish = wish
        self._size = size
        self._buffers = buffers
        self._input_index = input_index
        self._identity: Identity | None = None

    def open(self) -> CameraCapture:
        """See `aionn.media.live.capture.Opener`."""
        path = resolve(self._system, self._name, self._identity)
        if self._identity is None:
            self._identity = identity_of(self._system, path)
        return open_camera(
            self._system, path, self._wish, self._size, buffers=self._buffers, input_index=self._input_index
        )

    def cancel(self) -> None:
        """See `aionn.media.live.capture.Opener`. A system call cannot be interrupted."""


def camera(
    name: str | int = 0,
    *,
    size: tuple[int, int] | None = None,
    rate: float | None = None,
    capture_size: tuple[int, int] | None = None,
    pixel_format: PixelFormat | None = None,
    keep: Keep = "latest",
    queue_frames_max: int = 4,
    reconnect: Reconnection | None = RECONNECTION,
    input_index: int | None = None,
    system: System | None = None,
) -> LiveSource[Frame]:
    """The frames of a camera: ``async with camera() as frames: async for frame in frames``.

    ``captured_at_ns`` is the driver's own stamp where it declares one of CLOCK_MONOTONIC (`Frame.clock` is then ``"driver"``);
    for USB
    cameras that is the start of the exposure. Under ``keep="latest"`` older frames are dropped before they are converted.

    Args:
        name: A number (0 is ``/dev/video0``), a path, or a part of the camera's name, which finds it at whatever number it has.
        size: ``(width, height)`` of the frames, scaled to without regard to the proportions; None leaves the size of the
            camera. Scaling takes the nearest pixel, and costs the less, the smaller the size is.
        rate: Frames per second to ask for; the next higher one that the camera has is taken, 30 by default.
        capture_size: The least size to ask the camera for; by default ``size``, or 640 x 480.
        pixel_format: Takes this format and no other; by default the best one for size and rate.
        keep: What a slow consumer gets: the ``"latest"`` frame, the ``"oldest"`` ones, or ``"all"``; then the camera itself loses
            frames while ``queue_frames_max`` wait, which are counted (`LiveStatistics.lost`).
        queue_frames_max: How many frames wait for the consumer under ``"all"`` and ``"oldest"``, at most 28.
        reconnect: When a camera that was unplugged is opened again; None ends the source with the error.
        input_index: Input to select, of a card that has several; None leaves it.
        system: The system calls; for tests.

    Returns:
        A source of `Frame`, uint8 ``[height, width, 3]`` RGB. Entering it raises `SourceUnavailable` when the camera is
        absent, busy,
        not permitted, or has no format that can be converted; iterating raises it when it is lost and not opened again.

    Raises:
        InvalidArgument: An argument is out of range.
    """
    where = "aionn.media.camera"
    if size is not None:
        size = checked_size(size, where)
    wish = checked_wish(capture_size or size, rate, pixel_format, where)
    if not 1 <= queue_frames_max <= QUEUE_MAX:
        raise InvalidArgument(f"{where}: queue_frames_max: expected 1 to {QUEUE_MAX}, got {queue_frames_max}")
    if (isinstance(name, int) and name < 0) or name == "":
        raise InvalidArgument(f"{where}: name: expected a number from 0, a path or a name, got {name!r}")
    buffers = BUFFERS_MIN if keep == "latest" else max(BUFFERS_MIN, queue_frames_max + 2)
    opener = _CameraOpener(system or System(), name, wish, size, buffers, input_index)
    return LiveSource(opener, name=where, keep=keep, queue_max=queue_frames_max, reconnect=reconnect)


async def list_cameras(*, system: System | None = None) -> list[CameraInfo]:
    """The cameras of this machine. Each is opened shortly, without starting it.

    Raises:
        SourceUnavailable: A driver does not answer within `OPEN_S_MAX`.
    """
    chosen = system or System()
    worker = Worker("aionn-cameras")
    try:
        return await worker.run(
            lambda: find_cameras(chosen), limit_s=OPEN_S_MAX, what="aionn.media.list_cameras"
        )
    finally:
        await worker.aclose(_nothing, OPEN_S_MAX)


def _nothing() -> None:
    """The worker has nothing to close."""
