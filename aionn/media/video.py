"""Video files as sources of frames.

Owns decoding a file and scaling its frames. Refuses to own pace and queues (`source.py`).

Invariants:
1. All calls of PyAV happen in the source's worker thread, the import of PyAV included.
2. A file that ends before the length of its header is an error, never a short video.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from typing import Any, Literal

from aionn.media.arguments import checked_path, checked_size, one_of
from aionn.media.pacing import Keep, checked_queue_max
from aionn.media.pyav import RgbScaler, load, open_container, whole_packets
from aionn.media.records import Frame
from aionn.media.source import Source

__all__ = ["Interpolation", "video_file"]

Interpolation = Literal["fast_bilinear", "bilinear", "bicubic", "area", "lanczos", "point"]
INTERPOLATIONS: tuple[Interpolation, ...] = (
    "fast_bilinear",
    "bilinear",
    "bicubic",
    "area",
    "lanczos",
    "point",
)


def video_file(
    path: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    pace: bool = True,
    keep: Keep = "latest",
    queue_frames_max: int = 4,
    interpolation: Interpolation = "fast_bilinear",
    now: Callable[[], int] = time.monotonic_ns,
) -> Source[Frame]:
    """The frames of a video file, as a camera would give them: ``async with video_file(path) as frames: async for frame in
    frames``.

    Frame i is presented at its own time after the first, which is presented when the file is open. Decoding and scaling happen
    ahead, in a worker thread. Rotation marks in the file are not followed.

    Args:
        path: A file that FFmpeg can read; its first video stream is taken.
        size: ``(width, height)`` to scale to, without regard to the proportions; None leaves the size of the file.
        pace: False presents the frames as fast as they are decoded and taken, and drops none.
        keep: Items for a slow consumer: the ``"latest"`` frame, the ``"oldest"`` ones, or ``"all"``, which holds the source back;
            it then catches up as fast as the consumer takes (`SourceStatistics.held_back`).
        queue_frames_max: Number of frames that wait for the consumer under ``"all"`` and ``"oldest"``.
        interpolation: swscale's method. The default gives the best answers on the shapes video at the lowest price; it looks at
            few neighbours, so ``"bilinear"`` or ``"area"`` are better for pictures with fine patterns that shrink by much.
        now: The time in ns; it must agree with the event loop's clock.

    Returns:
        A source of `Frame`, uint8 ``[height, width, 3]`` RGB. Entering it raises `InvalidArgument` when the file is missing, is not
        a media file or has no video, and `DeviceUnavailable` without PyAV; iterating raises `InvalidArgument` where the file is
        damaged or cut short.

    Raises:
        InvalidArgument: An argument is out of range.
    """
    where = "aionn.media.video_file"
    if size is not None:
        size = checked_size(size, f"{where}: size")
    checked_queue_max(queue_frames_max, "queue_frames_max", where)
    interpolation = one_of(interpolation, INTERPOLATIONS, f"{where}: interpolation")
    frames = _frames(checked_path(path, f"{where}: path"), size, interpolation, where)
    return Source(frames, name=where, pace=pace, keep=keep, queue_max=queue_frames_max, now=now)


def _frames(
    path: str, size: tuple[int, int] | None, interpolation: str, where: str
) -> Generator[tuple[int, Frame], None, None]:
    scale = RgbScaler(load(where), interpolation)
    with open_container(path, "video", where) as (container, stream):
        index = 0
        clock = _MediaClock(stream)
        for packet in whole_packets(container, stream, path, where):
            for picture in packet.decode():
                width, height = size or (picture.width, picture.height)
                offset_ns = clock.offset_ns(picture.pts, index)
                yield offset_ns, Frame(scale(picture, width, height), 0, index, offset_ns / 1e9)
                index += 1


class _MediaClock:
    """The times of frames, from 0, never backwards."""

    def __init__(self, stream: Any) -> None:
        self._time_base = stream.time_base
        # Raw streams have no time stamps; 25 frames/s is FFmpeg's own default for a stream without a rate.
        self._rate = stream.average_rate or 25
        self._origin: int | None = None
        self._last_ns = 0

    def offset_ns(self, pts: int | None, index: int) -> int:
        if pts is None or self._time_base is None:
            offset_ns = int(index * 1_000_000_000 / self._rate)
        else:
            self._origin = pts if self._origin is None else self._origin
            offset_ns = int((pts - self._origin) * self._time_base * 1_000_000_000)
        self._last_ns = max(self._last_ns, offset_ns)
        return self._last_ns
