"""Pictures of cameras that compress them: Motion JPEG, decoded by PyAV.

Owns the check of a picture's header. Refuses to own the decoder (`aionn/media/reduction.py`), and PyAV's loading
(`aionn/media/pyav.py`).

Invariant: no picture is decoded whose header does not have the size that the driver declared; a damaged length field could
    otherwise
ask for gigabytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aionn.errors import DeviceUnavailable
from aionn.media.live.capture import CorruptItem
from aionn.media.pyav import RgbScaler, load
from aionn.media.reduction import JpegDecoder

__all__ = ["JpegConverter", "can_decode_jpeg", "jpeg_size"]

FILL_BYTES_MAX = 64
"""Fill bytes before a marker: cameras write at most a few, and a damaged picture may have millions."""

SEGMENTS_MAX = 64
"""Segments before the frame header of a JPEG picture; cameras write fewer than ten."""

FRAME_HEADERS = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""Markers of a frame header, which has the size (ITU-T T.81, table B.1)."""


def can_decode_jpeg() -> bool:
    """Whether PyAV is installed and has the decoder."""
    try:
        load("camera")
    except DeviceUnavailable:
        return False
    return True


def jpeg_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """``(width, height)`` of a JPEG picture by its header; None if it has none."""
    if bytes(data[:2]) != b"\xff\xd8":
        return None
    place = 2
    for _ in range(SEGMENTS_MAX):
        end = min(place + FILL_BYTES_MAX, len(data) - 1)
        while place < end and data[place] == 0xFF and data[place + 1] == 0xFF:
            place += 1
        if place + 9 > len(data) or data[place] != 0xFF or data[place + 1] == 0xFF:
            return None
        if data[place + 1] in FRAME_HEADERS:
            return int.from_bytes(data[place + 7 : place + 9]), int.from_bytes(data[place + 5 : place + 7])
        place += 2 + max(2, int.from_bytes(data[place + 2 : place + 4]))
    return None


class JpegConverter:
    """Decodes pictures of one size to uint8 ``[height, width, 3]``.

    Args:
        captured_size: ``(width, height)`` that every picture must have.
        size: ``(width, height)`` of the result.
        where: Begins messages.

    Raises:
        DeviceUnavailable: PyAV is not installed.
    """

    def __init__(self, captured_size: tuple[int, int], size: tuple[int, int], where: str) -> None:
        self._av = load(where)
        self._captured_size = captured_size
        self._size = size
        self._scale = RgbScaler(self._av)
        self._decoder = JpegDecoder(self._av, captured_size, size)

    def convert(self, buffer: memoryview, used: int) -> npt.NDArray[np.uint8]:
        """Decodes one picture.

        Raises:
            CorruptItem: It cannot be decoded, or has another size than was declared.
        """
        data = bytes(buffer[:used])
        found = jpeg_size(data)
        if found != self._captured_size:
            raise CorruptItem(f"a picture of {found} instead of {self._captured_size}")
        try:
            pictures = self._decoder.decode(self._av.Packet(data))
        except self._av.error.FFmpegError as error:
            raise CorruptItem(str(error)) from error
        if not pictures or getattr(pictures[-1], "is_corrupt", False):
            raise CorruptItem("the decoder made no picture of it")
        pixels: npt.NDArray[np.uint8] = np.array(self._scale(pictures[-1], *self._size))
        return pixels
