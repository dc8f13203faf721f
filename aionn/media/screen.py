"""The picture of a screen as a source: an X display, read by FFmpeg in a process of its own.

Owns the arguments and the reasons why there is no such picture. Refuses to own the process (`aionn/media/network_streams`), the
queue and reconnection (`aionn/media/live`).

Source: FFmpeg's documentation of ``x11grab``; X(7) for the names of displays. The screen of a Wayland session is given out by a
portal with a dialogue, by PipeWire, which no package that is used here reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from aionn.errors import InvalidArgument
from aionn.media.arguments import (
    SIZE_MAX,
    checked_flag,
    checked_number,
    checked_size,
    checked_text,
    checked_whole,
    checked_wholes,
)
from aionn.media.live.capture import Capture, SourceUnavailable
from aionn.media.live.reconnection import Reconnection
from aionn.media.live.source import LiveSource
from aionn.media.network_streams.capture import VideoCapture
from aionn.media.network_streams.messages import Start
from aionn.media.network_streams.opening import DECODER_BYTES_MAX, READ_S_MAX, SLOTS, StreamOpener
from aionn.media.pacing import Keep, checked_keep
from aionn.media.records import Frame

__all__ = ["screen"]

OPEN_S_MAX: Final = 10.0
"""Opening takes a second, most of it the start of the process."""

RATE_MAX: Final = 1000.0
"""Above the rate of every screen."""

QUEUE_MAX: Final = 64
"""Frames that may wait: each is a buffer of the size of the frames."""

RECONNECTION: Final = Reconnection(most_s=2.0)
"""A display whose server is started again is there within seconds."""

_DISPLAY = re.compile(
    r"(?:[A-Za-z0-9_.-]{1,200}|\[[0-9A-Fa-f:.]{2,45}\]|/[^:\s]{1,200})?:[0-9]{1,5}(?:\.[0-9]{1,3})?"
)
"""``:0``, ``:0.1``, ``host:0``; no characters that FFmpeg would take for an offset or a protocol."""


def screen(
    display: str | None = None,
    *,
    size: tuple[int, int] | None = None,
    rate: float = 30.0,
    region: tuple[int, int, int, int] | None = None,
    has_pointer: bool = True,
    keep: Keep = "latest",
    queue_frames_max: int = 4,
    reconnect: Reconnection | None = RECONNECTION,
) -> LiveSource[Frame]:
    """The picture of an X display: ``async with screen() as frames: async for frame in frames``.

    ``captured_at_ns`` is the arrival, smoothed by the grabber's time stamps. Needs PyAV. In a Wayland session only a display of
    X programs can be read (XWayland), on which other programs are not seen.

    Args:
        display: Its name, such as ``":0"``; None takes the variable ``DISPLAY``.
        size: ``(width, height)`` to scale to, without regard to the proportions; None leaves the size of the picture.
        rate: Frames per second.
        region: ``(left, top, width, height)`` of the part that is read, in pixels; None reads the whole screen.
        has_pointer: Whether the pointer is in the picture.
        keep: Items for a slow consumer: the ``"latest"`` frame, the ``"oldest"`` ones, or ``"all"``, which slows the grabber.
        queue_frames_max: Number of frames that wait for the consumer under ``"all"`` and ``"oldest"``, at most 64.
        reconnect: When a display that was lost is opened again; None ends the source with the error.

    Returns:
        A source of `Frame`, uint8 ``[height, width, 3]`` RGB. Entering it raises `SourceUnavailable` where there is no display,
        it does not admit this user, PyAV is missing or is built without ``x11grab``, or the region is not on the screen.

    Raises:
        InvalidArgument: An argument is out of range.
    """
    where = "aionn.media.screen"
    if size is not None:
        size = checked_size(size, f"{where}: size")
    if display is not None and not _DISPLAY.fullmatch(
        checked_text(display, f"{where}: display", may_be_empty=True)
    ):
        raise InvalidArgument(
            f"{where}: display: expected a name such as ':0' or 'host:0.0', got {display[:80]!r}"
        )
    rate = checked_number(rate, 0.1, RATE_MAX, f"{where}: rate")
    keep = checked_keep(keep, where)
    queue_frames_max = checked_whole(queue_frames_max, 1, QUEUE_MAX, f"{where}: queue_frames_max")
    options = {
        "framerate": f"{rate:g}",
        "draw_mouse": str(int(checked_flag(has_pointer, f"{where}: has_pointer"))),
        # There is nothing to find out: FFmpeg would look at pictures for up to 5 s, and deliver these first.
        "fflags": "nobuffer",
        "analyzeduration": "1",
        **_region_options(region, f"{where}: region"),
    }
    slots = SLOTS if keep == "latest" else queue_frames_max + 3
    opener = _ScreenOpener(display, size, options, slots, drops=keep != "all")
    return LiveSource(opener, name=where, keep=keep, queue_max=queue_frames_max, reconnect=reconnect)


def _region_options(region: tuple[int, int, int, int] | None, where: str) -> dict[str, str]:
    if region is None:
        return {}
    left, top, *size = checked_wholes(region, "left, top, width, height", where)
    left = checked_whole(left, 0, SIZE_MAX - 1, f"{where}: left")
    top = checked_whole(top, 0, SIZE_MAX - 1, f"{where}: top")
    width, height = checked_size(size, where)
    return {"grab_x": str(left), "grab_y": str(top), "video_size": f"{width}x{height}"}


class _ScreenOpener:
    """Opens a display, again and again, by the name that ``DISPLAY`` has then."""

    limit_s = OPEN_S_MAX + 5.0  # The process ends by its own limit first, with a better reason.

    def __init__(
        self,
        display: str | None,
        size: tuple[int, int] | None,
        options: Mapping[str, str],
        slots: int,
        *,
        drops: bool,
    ) -> None:
        self._display = display
        self._start: dict[str, Any] = {
            "kind": "video",
            "size": size,
            "sample_rate_hz": 16_000,
            "options": dict(options),
            "format": "x11grab",
            "open_s_max": OPEN_S_MAX,
            "read_s_max": READ_S_MAX,
            "slots": slots,
            "drops": drops,
            "memory_bytes_max": DECODER_BYTES_MAX,
        }
        self._opener: StreamOpener[Frame] | None = None
        self._is_cancelled = False

    def open(self) -> Capture[Frame]:
        """See `aionn.media.live.capture.Opener`."""
        display = self._display if self._display is not None else _display_of(os.environ)
        opener = self._opener = StreamOpener(
            Start(url=display, **self._start), VideoCapture, name=f"screen {display}"
        )
        if self._is_cancelled:
            opener.cancel()
        try:
            return opener.open()
        except SourceUnavailable as e:
            if e.is_permanent:
                raise
            raise SourceUnavailable(
                f"{e}; expected an X server at {display} that admits this user, and the region on its screen "
                "(`xdpyinfo`, `xhost +si:localuser:USER`)"
            ) from e

    def cancel(self) -> None:
        """See `aionn.media.live.capture.Opener`."""
        self._is_cancelled = True
        if self._opener is not None:
            self._opener.cancel()


def _display_of(environment: Mapping[str, str]) -> str:
    """The display that the environment names.

    Raises:
        SourceUnavailable: It names none, or one that cannot be read.
    """
    display = environment.get("DISPLAY", "")
    if _DISPLAY.fullmatch(display):
        return display
    if display:
        raise SourceUnavailable(
            f"screen: DISPLAY: expected a name such as ':0', got {display[:80]!r}", is_permanent=True
        )
    if environment.get("WAYLAND_DISPLAY"):
        raise SourceUnavailable(
            "screen: expected an X display, got a Wayland session without one, whose picture is given out by a portal that this "
            "source does not use: log in to an X11 session, or give `network` the address of a program that shares the screen",
            is_permanent=True,
        )
    raise SourceUnavailable(
        "screen: expected an X display, got no variable DISPLAY: run it within an X session, name the display "
        "(`screen(':0')`), or start a virtual one (`Xvfb :77`)",
        is_permanent=True,
    )
