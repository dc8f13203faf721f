"""The functions for users: a camera as a source, and the list of cameras.

Owns their arguments. Refuses to own anything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self, TypeVar

import anyio

from aionn.errors import InvalidArgument, shortages_raised, shown
from aionn.media.arguments import checked_path, checked_size, checked_whole
from aionn.media.cameras.capture import BUFFERS_MIN, CameraCapture, open_camera
from aionn.media.cameras.controls import (
    CameraControl,
    ControlValue,
    checked_values,
    controls_of,
    set_controls,
)
from aionn.media.cameras.device import VideoDevice
from aionn.media.cameras.hotplug import DeviceWatch
from aionn.media.cameras.in_place import CaptureMemory, in_place_format, open_in_place
from aionn.media.cameras.listing import (
    CameraInfo,
    Identity,
    find_cameras,
    identity_of,
    naming_others,
    resolve,
)
from aionn.media.cameras.negotiation import PixelFormat, Wish, checked_wish
from aionn.media.cameras.system import System, checked_system
from aionn.media.live.attempts import ARRIVAL_S
from aionn.media.live.capture import SourceUnavailable
from aionn.media.live.readable import until_readable
from aionn.media.live.reconnection import Reconnection
from aionn.media.live.source import LiveSource
from aionn.media.live.worker import Worker
from aionn.media.network_streams.addresses import masked
from aionn.media.pacing import Keep, OneConsumer, checked_keep
from aionn.media.records import Frame
from aionn.platform.process_bound import InThisProcess

__all__ = ["CameraWatch", "camera", "camera_controls", "list_cameras", "set_camera_controls"]

OPEN_S_MAX = 10.0
"""Opening a camera and starting its stream takes up to some seconds, where its USB port has to wake up."""

QUEUE_MAX = 28
"""Frames that may wait: the kernel has at most 32 buffers for a stream, and four are in use."""

NUMBER_MAX = 2**20 - 1
"""Linux has 20 bits for the number of a device among those of its kind."""

INPUT_MAX = 2**31 - 1
"""The kernel's number of an input is an int."""

RECONNECTION = Reconnection(most_s=2.0)
"""A camera that is plugged in again is reported by the kernel; one that returns at the same node, as some do after an error, is
found within 2 s."""

WATCH_S = 3600.0
"""Longest wait for a change, after which it is waited for again."""

_T = TypeVar("_T")


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
        controls: Mapping[str, ControlValue],
        memory: CaptureMemory | None,
    ) -> None:
        self._system = system
        self._name = name
        self._wish = wish
        self._size = size
        self._buffers = buffers
        self._input_index = input_index
        self._controls = controls
        self._memory = memory
        self._identity: Identity | None = None
        self._was_open = False

    def open(self) -> CameraCapture:
        """See `aionn.media.live.capture.Opener`."""
        path = resolve(self._system, self._name, self._identity)
        if self._identity is None:
            self._identity = identity_of(self._system, path)
        try:
            # Not after it was open: a search would open all other cameras at each attempt.
            with contextlib.nullcontext() if self._was_open else naming_others(self._system):
                capture = self._open(path)
        except SourceUnavailable as e:
            if self._was_open and isinstance(e.__cause__, PermissionError):
                # udev gives a device that is plugged in to its group a moment after it has appeared.
                raise SourceUnavailable(str(e)) from e.__cause__
            raise
        self._was_open = True
        return capture

    def _open(self, path: str) -> CameraCapture:
        if self._memory is not None:
            return open_in_place(
                self._system,
                path,
                self._wish,
                self._memory,
                input_index=self._input_index,
                controls=self._controls,
            )
        return open_camera(
            self._system,
            path,
            self._wish,
            self._size,
            buffers=self._buffers,
            input_index=self._input_index,
            controls=self._controls,
        )

    def arrivals(self) -> DeviceWatch | None:
        """Watches for devices that come; None where the kernel does not offer that, and only time shows."""
        with contextlib.suppress(OSError):
            return self._system.watch_devices()
        return None

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
    controls: Mapping[str, ControlValue] | None = None,
    into: CaptureMemory | None = None,
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
        keep: Items for a slow consumer: the ``"latest"`` frame, the ``"oldest"`` ones, or ``"all"``; then the camera itself loses
            frames while ``queue_frames_max`` wait, which are counted (`LiveStatistics.lost`).
        queue_frames_max: Number of frames that wait for the consumer under ``"all"`` and ``"oldest"``, at most 28.
        reconnect: When a camera that was unplugged is opened again; None ends the source with the error.
        input_index: Input to select, of a card that has several; None leaves it.
        controls: Values of controls by name, such as ``{"auto_exposure": "Manual Mode", "exposure_time_absolute": 100}``; set in
            this order whenever the camera is opened, also after it was plugged in again. `camera_controls` lists them.
        into: Memory that the driver fills in place, such as the slots of a burst (``Burst.lend``): no pixel is copied. Format and
            size are those of the memory; ``size`` and ``capture_size`` must be left out. The application gives each frame back
            with ``into.release(frame)``. None converts each frame into an array of its own.
        system: The system calls; for tests.

    Returns:
        A source of `Frame`, uint8 ``[height, width, 3]`` RGB. Entering it raises `SourceUnavailable` when the camera is
        absent, busy, not permitted, or has no format that can be converted; iterating raises it when it is lost and not opened
        again.

    Raises:
        InvalidArgument: An argument is out of range.
    """
    where = "aionn.media.camera"
    name = _checked_name(name, where)
    if size is not None:
        size = checked_size(size, f"{where}: size")
    if capture_size is not None:
        capture_size = checked_size(capture_size, f"{where}: capture_size")
    if into is not None:
        if not isinstance(into, CaptureMemory):
            raise InvalidArgument(f"{where}: into: expected an aionn.media.CaptureMemory, got {shown(into)}")
        if size is not None or capture_size is not None:
            raise InvalidArgument(f"{where}: expected either into or a size, got both; the memory has a size")
        pixel_format, capture_size = in_place_format(into, pixel_format, where), into.size
    wish = checked_wish(capture_size or size, rate, pixel_format, where)
    keep = checked_keep(keep, where)
    queue_frames_max = checked_whole(queue_frames_max, 1, QUEUE_MAX, f"{where}: queue_frames_max")
    if input_index is not None:
        input_index = checked_whole(input_index, 0, INPUT_MAX, f"{where}: input_index")
    values = {} if controls is None else checked_values(controls, f"{where}: controls")
    chosen = _checked_system(system, where)
    buffers = BUFFERS_MIN if keep == "latest" else max(BUFFERS_MIN, queue_frames_max + 2)
    opener = _CameraOpener(chosen, name, wish, size, buffers, input_index, values, into)
    return LiveSource(
        opener,
        name=where,
        keep=keep,
        queue_max=queue_frames_max,
        reconnect=reconnect,
        unused=None if into is None else into.release,
        is_held=None if into is None else into.is_held,
        arrivals=opener.arrivals,
    )


async def list_cameras(*, system: System | None = None) -> list[CameraInfo]:
    """The cameras of this machine. Each is opened shortly, without starting it.

    Raises:
        SourceUnavailable: A driver does not answer within `OPEN_S_MAX`.
    """
    where = "aionn.media.list_cameras"
    chosen = _checked_system(system, where)
    return await _asked(lambda: find_cameras(chosen), where)


async def camera_controls(name: str | int = 0, *, system: System | None = None) -> list[CameraControl]:
    """The controls of a camera, with their ranges and present values; it may be streaming.

    Args:
        name: As for `camera`.
        system: The system calls; for tests.

    Raises:
        InvalidArgument: An argument is out of range.
        SourceUnavailable: It cannot be opened, or does not answer within `OPEN_S_MAX`.
    """
    where = "aionn.media.camera_controls"
    checked, chosen = _checked_name(name, where), _checked_system(system, where)
    return await _asked(lambda: _with_device(chosen, checked, controls_of), where)


async def set_camera_controls(
    name: str | int, values: Mapping[str, ControlValue], *, system: System | None = None
) -> list[CameraControl]:
    """Sets controls of a camera, in the given order, and returns all of them afterwards; it may be streaming.

    A camera forgets them when it is unplugged: ``camera(controls=...)`` sets them at each opening. Cancelled, they may or may not
    be set.

    Args:
        name: As for `camera`.
        values: By name: a number, a truth value, or the text of a menu's entry.
        system: The system calls; for tests.

    Raises:
        InvalidArgument: There is no such control, it cannot be set, or the value is out of its range. Those before it are set.
        SourceUnavailable: The camera cannot be opened, the driver rejects a value, or does not answer within `OPEN_S_MAX`.
    """
    where = "aionn.media.set_camera_controls"
    checked, chosen = _checked_name(name, where), _checked_system(system, where)
    wanted = checked_values(values, f"{where}: values")

    def run(device: VideoDevice) -> list[CameraControl]:
        set_controls(device, wanted)
        return controls_of(device)

    return await _asked(lambda: _with_device(chosen, checked, run), where)


def _checked_name(name: object, where: str) -> str | int:
    if isinstance(name, str) and "://" in name:
        raise InvalidArgument(
            f"{where}: name: expected a number, a path or a name, got the address {masked(name)!r}; use aionn.media.network"
        )
    if isinstance(name, str) and name:
        return checked_path(name, f"{where}: name")
    expected = f"a number from 0 to {NUMBER_MAX}, or a path or a name as text"
    return checked_whole(name, 0, NUMBER_MAX, f"{where}: name", expected=expected)


def _checked_system(system: object, where: str) -> System:
    return System() if system is None else checked_system(system, where)


def _with_device(system: System, name: str | int, run: Callable[[VideoDevice], _T]) -> _T:
    with naming_others(system):
        device = VideoDevice(system, resolve(system, name, None))
    try:
        return run(device)
    finally:
        system.close(device.fd)


async def _asked(run: Callable[[], _T], what: str) -> _T:
    """The result of a call that may block, in a thread, within `OPEN_S_MAX`."""
    worker = Worker("aionn-cameras")
    try:
        with shortages_raised(what):
            return await worker.run(run, limit_s=OPEN_S_MAX, what=what)
    finally:
        await worker.aclose(_nothing, OPEN_S_MAX)


class CameraWatch(InThisProcess):
    """The cameras of this machine, now and whenever one is plugged in or unplugged: ``async with CameraWatch() as changes: async
    for cameras in changes``. The kernel reports the changes (inotify); nothing is asked again and again.

    Args:
        system: The system calls; for tests.
    """

    INSTEAD = "open one in the other process; its items can be copied and pickled"

    def __init__(self, *, system: System | None = None) -> None:
        self._system = _checked_system(system, "aionn.media.CameraWatch")
        self._watch: DeviceWatch | None = None
        self._cameras: list[CameraInfo] | None = None
        self._is_due = True
        self._consumer = OneConsumer()
        self._wait: anyio.CancelScope | None = None

    def __repr__(self) -> str:
        return f"<CameraWatch {'closed' if self._watch is None else 'open'}>"

    async def __aenter__(self) -> Self:
        """Begins to watch.

        Raises:
            SourceUnavailable: The kernel does not report changes.
        """
        try:
            self._watch = self._system.watch_devices()
        except OSError as e:
            raise SourceUnavailable(
                f"aionn.media.CameraWatch: expected the kernel to report changes of /dev, got {e}"
            ) from e
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends it, also for a consumer that waits in another task."""
        watch, self._watch = self._watch, None
        if self._wait is not None:
            self._wait.cancel()  # The wait closes the descriptor, which the loop watches until then.
        elif watch is not None:
            watch.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[CameraInfo]:
        """The cameras: first those of now, then each list that differs from the last one. Cancelling loses nothing.

        Raises:
            InvalidArgument: It is not open, or another consumer waits.
            StopAsyncIteration: Another task has left its block during the wait.
            SourceUnavailable: A driver does not answer within `OPEN_S_MAX`.
        """
        if self._watch is None:
            raise InvalidArgument("aionn.media.CameraWatch: expected to be iterated inside its `async with`")
        self._consumer.check("aionn.media.CameraWatch")
        with self._consumer:
            while True:
                while not self._is_due:
                    await self._until_news(self._watch)
                if self._cameras is not None:
                    await anyio.sleep(ARRIVAL_S)
                cameras = await list_cameras(system=self._system)
                # Not before: a call that is cancelled leaves the change to the next one. Later changes are read then.
                self._is_due = False
                if cameras != self._cameras:
                    self._cameras = cameras
                    return cameras

    async def _until_news(self, watch: DeviceWatch | None) -> None:
        """Waits for a change, which makes the list due.

        Raises:
            StopAsyncIteration: The block was left.
        """
        try:
            if watch is not None:
                with anyio.CancelScope() as self._wait:
                    await until_readable(watch.fileno(), WATCH_S)
        finally:
            self._wait = None
            if self._watch is None and watch is not None:
                watch.close()
        if self._watch is None:
            raise StopAsyncIteration
        self._is_due = self._watch.news()


def _nothing() -> None:
    """The worker has nothing to close."""
