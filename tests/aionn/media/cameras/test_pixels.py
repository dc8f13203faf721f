"""Conversion of every uncompressed format, against the definition, at every alignment."""

import numpy as np
import pytest

from aionn.media.cameras.pixels import (
    BYTES_PER_PIXEL,
    Colours,
    Geometry,
    PixelConverter,
    colours_of,
    nearest,
)
from aionn.media.live.capture import CorruptItem

FORMATS = sorted(BYTES_PER_PIXEL)


def defined(y, u, v, colours):
    """Red, green and blue by the recommendation, in floating point."""
    kr, kb = (0.2126, 0.0722) if colours.is_709 else (0.299, 0.114)
    if colours.is_full:
        level, blue, red = y / 255, (u - 128) / 255, (v - 128) / 255
    else:
        level, blue, red = (y - 16) / 219, (u - 128) / 224, (v - 128) / 224
    r = level + 2 * (1 - kr) * red
    b = level + 2 * (1 - kb) * blue
    g = (level - kr * r - kb * b) / (1 - kr - kb)
    return np.clip(np.stack([r, g, b], axis=-1) * 255, 0, 255)


def encoded(pixel_format, y, u, v, stride):
    """A picture as a driver writes it; ``u`` and ``v`` have half the width, and for NV12 half the height as well."""
    height, width = y.shape
    rows = []
    for row in range(height):
        line = np.zeros(width + width % 2, np.uint8)
        line[:width] = y[row]
        packed = np.zeros(stride, np.uint8)
        if pixel_format in ("YUYV", "UYVY"):
            at_y, at_u, at_v = (0, 1, 3) if pixel_format == "YUYV" else (1, 0, 2)
            packed[at_y : 2 * line.size : 2] = line
            packed[at_u : 2 * line.size : 4] = u[row]
            packed[at_v : 2 * line.size : 4] = v[row]
        else:
            packed[:width] = y[row]
        rows.append(packed)
    if pixel_format == "NV12":
        for row in range((height + 1) // 2):
            packed = np.zeros(stride, np.uint8)
            packed[0 : 2 * u.shape[1] : 2], packed[1 : 2 * u.shape[1] : 2] = u[row], v[row]
            rows.append(packed)
    return np.concatenate(rows).tobytes()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("colours", [Colours(a, b) for a in (False, True) for b in (False, True)], ids=str)
@pytest.mark.parametrize("pixel_format", ["YUYV", "UYVY", "NV12"])
@pytest.mark.parametrize("size", [(2, 2), (16, 8), (17, 9), (1, 1), (5, 4)])
def test_colours_are_those_of_the_recommendation(pixel_format, size, colours):
    random = np.random.default_rng(3)
    width, height = size
    half = (width + 1) // 2
    tall = (height + 1) // 2 if pixel_format == "NV12" else height
    y = random.integers(0, 256, (height, width), np.uint8)
    u, v = (random.integers(0, 256, (tall, half), np.uint8) for _ in range(2))
    geometry = Geometry(pixel_format, width, height, Geometry(pixel_format, width, height, 0).row_bytes + 6)
    data = encoded(pixel_format, y, u, v, geometry.stride)
    found = PixelConverter(geometry, size, colours).convert(memoryview(data), len(data))
    rows = np.arange(height) // 2 if pixel_format == "NV12" else np.arange(height)
    wide_u, wide_v = (plane[rows][:, np.arange(width) // 2].astype(float) for plane in (u, v))
    expected = defined(y.astype(float), wide_u, wide_v, colours)
    assert found.shape == (height, width, 3) and found.dtype == np.uint8
    np.testing.assert_allclose(found, expected, atol=0.52)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("pixel_format", FORMATS)
@pytest.mark.parametrize("size", [(96, 96), (3, 200), (64, 48), (1, 1), (333, 7)])
def test_scaling_takes_the_nearest_pixel(pixel_format, size):
    random = np.random.default_rng(4)
    geometry = Geometry(pixel_format, 64, 48, 64 * BYTES_PER_PIXEL[pixel_format])
    data = memoryview(random.integers(0, 256, geometry.least_bytes, np.uint8).tobytes())
    whole = PixelConverter(geometry, (64, 48), Colours()).convert(data, len(data))
    scaled = PixelConverter(geometry, size, Colours()).convert(data, len(data))
    np.testing.assert_array_equal(scaled, whole[nearest(48, size[1])][:, nearest(64, size[0])])
    assert scaled.flags.c_contiguous and scaled.flags.owndata | (scaled.base is not None)


def test_red_is_first_in_both_orders_of_bytes():
    for pixel_format, order in (("RGB3", [0, 1, 2]), ("BGR3", [2, 1, 0])):
        data = bytes(range(12))
        found = PixelConverter(Geometry(pixel_format, 2, 2, 6), (2, 2), Colours()).convert(
            memoryview(data), 12
        )
        np.testing.assert_array_equal(found, np.arange(12, dtype=np.uint8).reshape(2, 2, 3)[:, :, order])


@pytest.mark.parametrize("pixel_format", FORMATS)
def test_picture_that_is_not_whole_is_not_converted(pixel_format):
    geometry = Geometry(pixel_format, 16, 8, 16 * BYTES_PER_PIXEL[pixel_format])
    data = memoryview(bytes(geometry.least_bytes))
    converter = PixelConverter(geometry, (4, 4), Colours())
    converter.convert(data, len(data))
    for buffer, used in ((data, len(data) - 1), (data[:-1], len(data)), (data, 0)):
        with pytest.raises(CorruptItem):
            converter.convert(buffer, used)


@pytest.mark.parametrize("pixel_format", FORMATS)
def test_result_shares_no_memory_with_the_buffer(pixel_format):
    geometry = Geometry(pixel_format, 16, 8, 16 * BYTES_PER_PIXEL[pixel_format])
    buffer = bytearray(geometry.least_bytes)
    found = PixelConverter(geometry, (16, 8), Colours()).convert(memoryview(buffer), len(buffer))
    before = found.copy()
    buffer[:] = b"\xff" * len(buffer)
    np.testing.assert_array_equal(found, before)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((8, 0, 0), Colours(False, False)),
        ((3, 0, 0), Colours(True, False)),
        ((7, 0, 0), Colours(False, True)),
        ((7, 0, 2), Colours(False, False)),
        ((8, 2, 1), Colours(True, True)),
        ((3, 1, 0), Colours(False, False)),
    ],
)
def test_defaults_of_the_driver_are_those_of_its_colour_space(numbers, expected):
    assert colours_of(*numbers) == expected
