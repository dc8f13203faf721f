"""JPEG pictures decoded at a fraction of their size: which fraction, its pixels, and what cannot be reduced."""

from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("av", reason="PyAV, the extra `media`, is not installed")

import av

from aionn.media.cameras.jpeg import JpegConverter
from aionn.media.pyav import RgbScaler
from aionn.media.reduction import JpegDecoder, halvings
from tests.support.media.media_server import jpeg


@pytest.mark.parametrize(
    ("size", "wanted", "count"),
    [
        ((640, 480), None, 0),
        ((640, 480), (640, 480), 0),
        ((640, 480), (320, 240), 0),
        ((640, 480), (161, 10), 0),
        ((640, 480), (160, 120), 2),
        ((640, 480), (96, 96), 2),
        ((640, 480), (80, 60), 3),
        ((640, 480), (80, 61), 2),
        ((640, 480), (1, 1), 3),
        ((65, 49), (16, 12), 2),
        ((65, 49), (17, 12), 0),
        ((64, 48), (96, 96), 0),
    ],
)
def test_picture_is_reduced_as_far_as_it_covers_the_wanted_size(size, wanted, count):
    assert halvings(size, wanted) == count


def scene(width, height):
    """A picture that varies slowly, so that a JPEG of it has nearly its values."""
    x, y = np.linspace(0, 1, width), np.linspace(0, 1, height)[:, None]
    return np.stack([40 + 170 * x + 0 * y, 40 + 170 * y + 0 * x, 200 - 90 * x - 60 * y], axis=-1).astype(
        np.uint8
    )


def encoded(picture, codec="mjpeg", pixels="yuvj420p"):
    height, width = picture.shape[:2]
    encoder = av.CodecContext.create(codec, "w")
    encoder.width, encoder.height, encoder.pix_fmt = width, height, pixels
    encoder.framerate, encoder.time_base = Fraction(30), Fraction(1, 30)
    frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=pixels)
    packets = [*encoder.encode(frame), *encoder.encode(None)]
    return bytes(packets[0])


def decoded(decoder, data):
    (picture,) = decoder.decode(av.Packet(data))
    return picture


@pytest.mark.parametrize("pixels", ["yuvj420p", "yuvj422p", "yuvj444p"])
@pytest.mark.parametrize("size", [(640, 480), (322, 242), (161, 121)])
@pytest.mark.parametrize("count", [2, 3])
def test_reduced_pixels_are_the_means_of_the_pixels_that_they_stand_for(size, pixels, count):
    width, height = size
    # Of one colour: those of several pixels are stored together, and have a mean of their own.
    grey = np.repeat(scene(width, height).mean(axis=2, keepdims=True).astype(np.uint8), 3, axis=2)
    data = encoded(grey, pixels=pixels)
    edge = 1 << count
    columns, rows = width // edge, height // edge
    picture = decoded(JpegDecoder(av, size, (columns, rows)), data)
    assert (picture.width, picture.height) == (-(-width // edge), -(-height // edge))
    found = RgbScaler(av)(picture, picture.width, picture.height)[:rows, :columns].astype(float)
    whole = RgbScaler(av)(decoded(JpegDecoder(av, size, None), data), width, height).astype(float)
    means = whole[: rows * edge, : columns * edge].reshape(rows, edge, columns, edge, 3).mean(axis=(1, 3))
    assert np.abs(found - means).max() < 3
    assert np.abs(found - means).mean() < 1.5


def test_size_that_changes_is_followed_and_every_picture_covers_the_wanted_size():
    decoder = JpegDecoder(av, (640, 480), (96, 96))
    sizes = []
    for size in [(640, 480), (128, 96), (128, 96), (1280, 960), (64, 48), (640, 480)]:
        picture = decoded(decoder, jpeg(100, *size))
        assert decoder.size == size
        sizes.append((picture.width, picture.height))
        np.testing.assert_allclose(RgbScaler(av)(picture, 8, 8), 100, atol=3)
    assert sizes == [(160, 120), (128, 96), (128, 96), (160, 120), (64, 48), (160, 120)]


def test_picture_that_cannot_be_reduced_is_decoded_at_its_full_size():
    data = encoded(scene(64, 48), "ljpeg", "yuvj444p")
    decoder = JpegDecoder(av, (64, 48), (16, 12))
    picture = decoded(decoder, data)
    assert (picture.width, picture.height) == (64, 48)
    assert np.abs(RgbScaler(av)(picture, 64, 48).astype(int) - scene(64, 48)).max() < 16
    assert decoded(decoder, data).width == 64


def test_damaged_picture_changes_nothing_for_the_next_ones():
    decoder = JpegDecoder(av, (640, 480), (96, 96))
    good = jpeg(90, 640, 480)
    for damaged in (bytes(5000), good[: good.index(b"\xff\xc0") + 12], b"\xff\xd8\xff\xd9"):
        with pytest.raises(av.error.FFmpegError):
            decoder.decode(av.Packet(damaged))
        assert decoded(decoder, good).width == 160


def test_camera_that_compresses_has_the_same_picture_reduced():
    picture = scene(640, 480)
    data = memoryview(encoded(picture))
    found = JpegConverter((640, 480), (96, 72), "test").convert(data, len(data))
    assert found.shape == (72, 96, 3)
    np.testing.assert_allclose(found.astype(float), scene(96, 72), atol=8)
