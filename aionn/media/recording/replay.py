"""Recordings as sources: items at the times at which they were captured, counted from the first.

Owns the times. Refuses to own the form of the file (`items.py`) and the presentation (`aionn/media/source.py`).

Invariant: the times never go back, and no item comes later than `LENGTH_NS_MAX`, whatever the file holds.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator
from typing import Any, Final

import msgspec
import numpy as np

from aionn.errors import InvalidArgument
from aionn.media.arguments import checked_path, checked_size
from aionn.media.cameras.pixels import nearest
from aionn.media.pacing import Keep, checked_queue_max
from aionn.media.recording.items import ItemReader, Kind
from aionn.media.records import AudioWindow, Frame
from aionn.media.source import Source
from aionn.platform.files import open_regular

__all__ = ["recorded_kind", "replay", "replay_audio"]

_logger = logging.getLogger("aionn.media")

LENGTH_NS_MAX: Final = 31_622_400 * 1_000_000_000
"""A leap year, as for other times that a caller names; an item that is later is damaged."""


def replay(
    path: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    pace: bool = True,
    keep: Keep = "latest",
    queue_frames_max: int = 4,
    now: Callable[[], int] = time.monotonic_ns,
) -> Source[Frame]:
    """The frames of a recording, at the times at which they were captured: ``async with replay("gate.rec") as frames``.

    Each frame has the pixels, ``index``, ``time_s``, ``lost_before`` and ``follows_gap`` that were recorded; its
    ``captured_at_ns`` is the time at which it is presented now. A file that ends in the middle of an item, since its writer
    was killed, is replayed up to the item before, and that is logged.

    Args:
        path: A file that `record` wrote.
        size: ``(width, height)`` to scale to, by the nearest pixel; None leaves the recorded size.
        pace: False presents the frames as fast as they are read and taken, and drops none.
        keep: As in `video_file`.
        queue_frames_max: As in `video_file`.
        now: As in `video_file`; with the clock of ``aionn.testing`` the recording is replayed in virtual time.

    Returns:
        A source of `Frame`. Entering it raises `InvalidArgument` when the file is missing, is not a recording, or holds sound;
        iterating raises it where the file is damaged.

    Raises:
        InvalidArgument: An argument is out of range.
    """
    where = "aionn.media.replay"
    if size is not None:
        size = checked_size(size, f"{where}: size")
    checked_queue_max(queue_frames_max, "queue_frames_max", where)
    items = _items(checked_path(path, f"{where}: path"), "frames", size, where)
    return Source(items, name=where, pace=pace, keep=keep, queue_max=queue_frames_max, now=now)


def replay_audio(
    path: str | os.PathLike[str],
    *,
    pace: bool = True,
    keep: Keep = "latest",
    queue_windows_max: int = 4,
    now: Callable[[], int] = time.monotonic_ns,
) -> Source[AudioWindow]:
    """The windows of sound of a recording, at the times at which they were captured. See `replay`.

    Args:
        path: A file that `record` wrote.
        pace: As in `replay`.
        keep: As in `replay`.
        queue_windows_max: As in `audio_file`.
        now: As in `replay`.

    Raises:
        InvalidArgument: An argument is out of range.
    """
    where = "aionn.media.replay_audio"
    checked_queue_max(queue_windows_max, "queue_windows_max", where)
    items = _items(checked_path(path, f"{where}: path"), "windows", None, where)
    return Source(items, name=where, pace=pace, keep=keep, queue_max=queue_windows_max, now=now)


def recorded_kind(path: str | os.PathLike[str]) -> Kind:
    """The items of a recording.

    Raises:
        InvalidArgument: The file is missing, or is not a recording.
    """
    name = f"recording {os.fsdecode(path)}"
    with open_regular(path, "recording") as file:
        return ItemReader(file, name).kind


def _items(
    path: str, kind: Kind, size: tuple[int, int] | None, where: str
) -> Generator[tuple[int, Any], None, None]:
    name = f"recording {path}"
    with open_regular(path, "recording") as file:
        reader = ItemReader(file, name)
        if reader.kind != kind:
            other = "replay" if reader.kind == "frames" else "replay_audio"
            raise InvalidArgument(
                f"{where}: {name}: expected {kind}, got {reader.kind}; use aionn.media.{other}"
            )
        first_ns: int | None = None
        offset_ns = 0
        while (item := reader.read()) is not None:
            first_ns = item.captured_at_ns if first_ns is None else first_ns
            offset_ns = max(offset_ns, item.captured_at_ns - first_ns)
            if offset_ns > LENGTH_NS_MAX:
                raise InvalidArgument(
                    f"{name}: expected item {reader.count - 1} within {LENGTH_NS_MAX // 10**9} s of the first, got "
                    f"{offset_ns // 10**9} s: it is damaged"
                )
            if isinstance(item, Frame):
                item = msgspec.structs.replace(item, data=_scaled(item.data, size))
            yield offset_ns, msgspec.structs.replace(item, clock="presented", uncertainty_ns=0)
        if reader.is_cut:
            _logger.warning(
                "%s: ends in the middle of item %d; the items before are whole", name, reader.count
            )


def _scaled(pixels: Any, size: tuple[int, int] | None) -> Any:
    height, width = pixels.shape[:2]
    if size is None or size == (width, height):
        return pixels
    return np.ascontiguousarray(pixels[nearest(height, size[1])][:, nearest(width, size[0])])
