"""Pictures as JPEG, for the page.

Owns the encoder of PyAV. One call takes 0.2 to 0.7 ms at 640 x 480, so it belongs into a thread or another process.
"""

from __future__ import annotations

import fractions
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.errors import GeneralFailure
from aionn.media.pyav import load

__all__ = ["JpegEncoder"]

QUANTISER = 5
"""FFmpeg's scale from 2 (best) to 31: at 5 the eye sees no blocks, and a picture of 640 x 480 has some 30 kB."""


class JpegEncoder:
    """Encodes pictures of any size; used by one thread at a time.

    Raises:
        DeviceUnavailable: PyAV is not installed.
    """

    def __init__(self) -> None:
        self._av = load("watch")
        self._reformatter = self._av.video.reformatter.VideoReformatter()
        self._encoder: Any = None
        self._size = (0, 0)

    def encode(self, pixels: npt.NDArray[np.uint8]) -> bytes:
        """The picture as a JPEG file.

        Args:
            pixels: uint8 ``[height, width, 3]``, red, green, blue; rows may have gaps.

        Raises:
            GeneralFailure: FFmpeg rejects it.
        """
        height, width, _ = pixels.shape
        try:
            if self._size != (width, height):
                self._encoder, self._size = self._made(width, height), (width, height)
            frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            converted = self._reformatter.reformat(frame, format="yuvj420p")
            converted.pts = None
            packets = self._encoder.encode(converted)
        except self._av.error.FFmpegError as e:
            self._size = (0, 0)
            raise GeneralFailure(f"watch: a picture of {width}x{height} cannot be encoded: {e}") from e
        return b"".join(bytes(packet) for packet in packets)

    def _made(self, width: int, height: int) -> Any:
        encoder = self._av.CodecContext.create("mjpeg", "w")
        encoder.width, encoder.height = width, height
        encoder.pix_fmt = "yuvj420p"
        encoder.time_base = fractions.Fraction(1, 30)
        encoder.thread_count = 1  # Of several threads each would hold a picture back.
        encoder.options = {"qmin": str(QUANTISER), "qmax": str(QUANTISER)}
        return encoder
