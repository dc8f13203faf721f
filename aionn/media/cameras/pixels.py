"""From a camera's pixels to red, green, blue, at the size that a model takes.

Owns the arithmetic of the uncompressed formats. Refuses to own compressed ones (`jpeg.py`) and the buffers.

Scaling takes the nearest pixel and happens before the conversion, so that the cost depends on the size of the result.

Invariants:
1. The result is an array of its own; it shares no memory with the buffer.
2. No byte outside of the buffer is read: the geometry is checked when the converter is made.

Source: ITU-R BT.601 and BT.709; the kernel's documentation of colour spaces for what a driver's "default" means.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.media.cameras.negotiation import PixelFormat
from aionn.media.live.capture import CorruptItem

__all__ = ["Colours", "Geometry", "PixelConverter", "colours_of", "nearest"]

Bytes = npt.NDArray[np.uint8]

COLORSPACE_REC709, COLORSPACE_JPEG, COLORSPACE_DCI_P3 = 3, 7, 12
YCBCR_709, YCBCR_XV709 = 2, 4
QUANTIZATION_FULL, QUANTIZATION_LIMITED = 1, 2

FRACTION_BITS: Final = 13
"""Bits after the point of the coefficients: products of 8 bits stay far below 32, and the error below a thousandth of a level."""

BLOCK_PIXELS: Final = 20_480
"""Pixels that are converted together, so that what is between stays in a processor's cache: 32 rows of 640 took a sixth of the time
that 480 rows took."""

BYTES_PER_PIXEL: dict[str, int] = {"YUYV": 2, "UYVY": 2, "NV12": 1, "GREY": 1, "RGB3": 3, "BGR3": 3}
"""In a row of the first plane."""

PACKED: dict[str, tuple[int, int, int]] = {"YUYV": (0, 1, 3), "UYVY": (1, 0, 2)}
"""Where brightness, blue and red difference are in a group of four bytes, which is two pixels."""


class Colours(msgspec.Struct, frozen=True):
    """The conversion of brightness and colour differences to red, green and blue: the coefficients of BT.601 or BT.709.

    Attributes:
        is_709: BT.709, else BT.601.
        is_full: Levels of 0 to 255; else 16 to 235 (240 for the differences).
    """

    is_709: bool = False
    is_full: bool = False

    @property
    def coefficients(self) -> tuple[float, float, float, float, float]:
        """``(brightness, red, green by blue, green by red, blue)``."""
        red, green_blue, green_red, blue = (
            (1.5748, -0.187324, -0.468124, 1.8556) if self.is_709 else (1.402, -0.344136, -0.714136, 1.772)
        )
        if self.is_full:
            return 1.0, red, green_blue, green_red, blue
        scale = 255 / 224
        return 255 / 219, red * scale, green_blue * scale, green_red * scale, blue * scale


def colours_of(colorspace: int, ycbcr_enc: int, quantization: int) -> Colours:
    """The coefficients that a driver's three numbers mean, 0 being "default"."""
    by_space = colorspace in (COLORSPACE_REC709, COLORSPACE_DCI_P3)
    is_709 = ycbcr_enc in (YCBCR_709, YCBCR_XV709) or (ycbcr_enc == 0 and by_space)
    is_full = quantization == QUANTIZATION_FULL or (quantization == 0 and colorspace == COLORSPACE_JPEG)
    return Colours(is_709, is_full)


class Geometry(msgspec.Struct, frozen=True):
    """A picture in a buffer.

    Attributes:
        format: Its pixel format.
        width: In pixels.
        height: In rows.
        stride: Bytes from one row to the next.
    """

    format: PixelFormat
    width: int
    height: int
    stride: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that hold pixels."""
        width = self.width + self.width % 2 if self.format in ("YUYV", "UYVY", "NV12") else self.width
        return width * BYTES_PER_PIXEL[self.format]

    @property
    def rows(self) -> int:
        """Rows of all planes."""
        return self.height + (self.height + 1) // 2 if self.format == "NV12" else self.height

    @property
    def least_bytes(self) -> int:
        """Bytes from the first pixel to the last."""
        return self.stride * (self.rows - 1) + self.row_bytes


def nearest(size: int, wanted: int) -> npt.NDArray[np.intp]:
    """For each of ``wanted`` places the pixel of ``size`` whose centre is nearest."""
    return np.minimum(((np.arange(wanted) + 0.5) * size / wanted).astype(np.intp), size - 1)


class PixelConverter:
    """Converts buffers of one geometry to uint8 ``[height, width, 3]``.

    Args:
        geometry: The picture in the buffer; ``stride`` is at least ``row_bytes``.
        size: ``(width, height)`` of the result.
        colours: The meaning of brightness and differences.
    """

    def __init__(self, geometry: Geometry, size: tuple[int, int], colours: Colours) -> None:
        assert geometry.stride >= geometry.row_bytes
        self._geometry = geometry
        width, height = size
        self._rows = nearest(geometry.height, height)
        self._columns = nearest(geometry.width, width)
        scale = 1 << FRACTION_BITS
        self._coefficients = tuple(round(c * scale) for c in colours.coefficients)
        self._black = 0 if colours.is_full else 16
        self._block_rows = max(1, BLOCK_PIXELS // width)
        self._has_pairs = width == geometry.width and width % 2 == 0

    def convert(self, buffer: memoryview, used: int) -> Bytes:
        """Converts one picture.

        Args:
            buffer: The whole buffer.
            used: Bytes that the driver has filled.

        Raises:
            CorruptItem: The picture is not whole.
        """
        geometry = self._geometry
        if used < geometry.least_bytes or len(buffer) < geometry.least_bytes:
            raise CorruptItem(f"{used} bytes instead of {geometry.least_bytes}")
        raw = np.frombuffer(buffer, np.uint8, geometry.least_bytes)
        shape, strides = (geometry.rows, geometry.row_bytes), (geometry.stride, 1)
        # The last row may end before its stride does.
        pixels = np.lib.stride_tricks.as_strided(raw, shape, strides, writeable=False)
        if geometry.format == "GREY":
            grey = pixels[self._rows][:, self._columns]
            return np.repeat(grey[:, :, None], 3, axis=2)
        if geometry.format in ("RGB3", "BGR3"):
            colours = pixels[self._rows].reshape(len(self._rows), geometry.width, 3)[:, self._columns]
            return np.ascontiguousarray(colours if geometry.format == "RGB3" else colours[:, :, ::-1])
        rgb = np.empty((len(self._rows), len(self._columns), 3), np.uint8)
        for first in range(0, len(rgb), self._block_rows):
            rows = self._rows[first : first + self._block_rows]
            self._fill(rgb[first : first + len(rows)], *self._components(pixels, rows))
        return rgb

    def _components(self, pixels: Bytes, rows: npt.NDArray[np.intp]) -> tuple[Bytes, Bytes, Bytes]:
        """Brightness and differences of some rows; the differences for each pixel, or for each pair at the camera's own width."""
        geometry, columns = self._geometry, self._columns
        picked = pixels[rows]
        if geometry.format == "NV12":
            chroma = pixels[geometry.height + rows // 2]
            if self._has_pairs:
                return picked, chroma[:, 0::2], chroma[:, 1::2]
            pairs = columns // 2 * 2
            return picked[:, columns], chroma[:, pairs], chroma[:, pairs + 1]
        at_y, at_u, at_v = PACKED[geometry.format]
        if self._has_pairs:
            return picked[:, at_y::2], picked[:, at_u::4], picked[:, at_v::4]
        groups = columns // 2 * 4
        return picked[:, columns * 2 + at_y], picked[:, groups + at_u], picked[:, groups + at_v]

    def _fill(self, rgb: Bytes, y: Bytes, u: Bytes, v: Bytes) -> None:
        """Converts some rows into their place."""
        by_y, red_v, green_u, green_v, blue_u = self._coefficients
        groups = u.shape[1]
        level = y.astype(np.int32)
        level -= self._black
        level *= by_y
        level += 1 << FRACTION_BITS - 1  # Half a level, before the bits after the point are cut off.
        level = level.reshape(len(y), groups, -1)
        blue, red = u.astype(np.int32) - 128, v.astype(np.int32) - 128
        target = rgb.reshape(len(y), groups, -1, 3)
        for channel, difference in enumerate((red * red_v, blue * green_u + red * green_v, blue * blue_u)):
            value = level + difference[:, :, None]
            value >>= FRACTION_BITS
            target[..., channel] = np.clip(value, 0, 255, out=value)
