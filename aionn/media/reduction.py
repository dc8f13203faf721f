"""JPEG pictures decoded at a fraction of their size, for consumers that want smaller ones.

Owns the choice of the fraction, and the decoder that follows the size of the pictures. Refuses to own the scaling to the exact
size, and PyAV's loading (`pyav.py`).

JPEG stores blocks of 8 x 8 pixels as frequencies. The lowest of them are the same block at a quarter or an eighth of its
size, for a part of the time, and as a mean of the pixels, which a scaler that looks at few neighbours only approaches.

Invariants:
1. A decoded picture covers the wanted size, if the picture itself does.
2. A picture is left out only if it cannot be decoded at its full size either.

Source: ITU-T T.81; FFmpeg's option ``lowres``, which rejects lossless pictures and rare subsamplings.
"""

from __future__ import annotations

from typing import Any

__all__ = ["JpegDecoder", "halvings"]

HALVINGS_MAX = 3
"""An eighth: one pixel of a block of 8 x 8."""

HALVINGS_MIN = 2
"""FFmpeg makes halves without vector instructions, in 1.5 times the time of the whole pictures; quarters take 0.65 of it."""


def halvings(size: tuple[int, int], wanted: tuple[int, int] | None) -> int:
    """Number of times that a picture is halved, so that it still covers the wanted size: 0, 2 or 3.

    Args:
        size: ``(width, height)`` of the picture.
        wanted: ``(width, height)`` that is to be covered; None leaves pictures as they are.
    """
    if wanted is None:
        return 0
    count = 0
    while count < HALVINGS_MAX and all(edge >> count + 1 >= least for edge, least in zip(size, wanted)):
        count += 1
    return count if count >= HALVINGS_MIN else 0


class JpegDecoder:
    """Decodes JPEG pictures, reduced as far as they then cover a wanted size.

    Args:
        av: The module of PyAV.
        size: ``(width, height)`` of the pictures as they are announced; another size is followed.
        wanted: ``(width, height)`` that a decoded picture is to cover; None decodes every picture at its full size.

    Attributes:
        size: ``(width, height)`` of the last picture before its reduction.
    """

    def __init__(self, av: Any, size: tuple[int, int], wanted: tuple[int, int] | None) -> None:
        self._av = av
        self._wanted = wanted
        self.size = size
        self._decoder = self._made()

    def _made(self) -> Any:
        """A decoder for pictures of the present size."""
        decoder = self._av.CodecContext.create("mjpeg", "r")
        decoder.thread_count = 1
        self._halvings = halvings(self.size, self._wanted)
        decoder.options.update(lowres=str(self._halvings))
        return decoder

    def decode(self, packet: Any) -> list[Any]:
        """Decodes one packet; None returns what the decoder still holds.

        Raises:
            av.error.FFmpegError: It cannot be decoded.
        """
        pictures = self._pictures(packet)
        size = self._decoder.coded_width, self._decoder.coded_height
        if pictures and size != self.size:
            self.size = size
            needed = halvings(self.size, self._wanted)
            if needed != self._halvings:
                self._decoder = self._made()
                # One that is smaller than those before was reduced too much.
                pictures = self._pictures(packet) if packet is not None else pictures
        return pictures

    def _pictures(self, packet: Any) -> list[Any]:
        try:
            return list(self._decoder.decode(packet))
        except self._av.error.FFmpegError:
            wanted = self._wanted
            if not self._halvings or packet is None:
                self._decoder = self._made()  # It may hold a part of what it could not decode.
                raise
            self._wanted = None
            self._decoder = self._made()
            try:
                pictures = list(self._decoder.decode(packet))
            except self._av.error.FFmpegError:
                self._wanted = wanted  # The picture is damaged.
                self._decoder = self._made()
                raise
            return pictures  # FFmpeg cannot reduce pictures of this kind.
