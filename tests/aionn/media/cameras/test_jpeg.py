"""Pictures of cameras that compress: decoded, and rejected by their header before a decoder sees them."""

import numpy as np
import pytest

pytest.importorskip("av", reason="PyAV, the extra `media`, is not installed")

from aionn.media import camera
from aionn.media.cameras.jpeg import JpegConverter, jpeg_size
from aionn.media.live.capture import CorruptItem
from tests.support.media.fake_camera import Listed
from tests.support.media.media_server import jpeg


def test_size_is_read_from_the_header():
    assert jpeg_size(jpeg(128, 64, 48)) == (64, 48)
    assert jpeg_size(jpeg(128, 322, 18)) == (322, 18)


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8" + b"\xff" * 1000, bytes(1000)]
)
def test_data_without_a_header_have_no_size(data):
    assert jpeg_size(data) is None


def test_size_of_any_bytes_ends_soon():
    random = np.random.default_rng(7)
    for length in range(0, 400, 3):
        jpeg_size(b"\xff\xd8" + random.integers(0, 256, length, np.uint8).tobytes())
    jpeg_size(b"\xff\xd8" + b"\xff\xe0\x00\x02" * 100_000)


class Counted(bytes):
    """Bytes that count how often they are looked at."""

    reads = 0

    def __getitem__(self, place):
        self.reads += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("rest", [b"", b"\xff\xc0\x00\x11\x08\x00\x30\x00\x40\x03"], ids=["none", "header"])
def test_picture_of_fill_bytes_costs_the_loop_no_time(rest):
    data = Counted(b"\xff\xd8" + b"\xff" * 1_000_000 + rest)
    assert jpeg_size(data) is None
    assert data.reads < 1_000


def test_a_few_fill_bytes_are_skipped():
    good = jpeg(128, 322, 18)
    assert jpeg_size(good[:2] + b"\xff" * 20 + good[2:]) == (322, 18)


def test_picture_is_decoded_and_scaled():
    data = memoryview(jpeg(200))
    found = JpegConverter((64, 48), (10, 8), "test").convert(data, len(data))
    assert found.shape == (8, 10, 3)
    np.testing.assert_allclose(found, 200, atol=3)


def damaged():
    good = bytearray(jpeg())
    place = good.index(b"\xff\xc0")
    enormous = bytearray(good)
    enormous[place + 5 : place + 9] = b"\xff\xff\xff\xff"
    cut = good[: place + 12]
    noise = bytearray(good)
    noise[place + 20 :] = (
        np.random.default_rng(1).integers(0, 256, len(good) - place - 20, np.uint8).tobytes()
    )
    return {
        "enormous": enormous,
        "cut": cut,
        "other size": jpeg(1, 32, 16),
        "empty": b"",
        "noise": noise,
        "zeros": bytes(5000),
    }


@pytest.mark.parametrize("kind", ["enormous", "cut", "other size", "empty", "zeros"])
def test_damaged_picture_is_left_out_and_the_next_one_decoded(kind):
    converter = JpegConverter((64, 48), (64, 48), "test")
    data = memoryview(damaged()[kind])
    with pytest.raises(CorruptItem):
        converter.convert(data, len(data))
    good = memoryview(jpeg(90))
    np.testing.assert_allclose(converter.convert(good, len(good)), 90, atol=3)


def test_noise_does_no_harm():
    converter = JpegConverter((64, 48), (64, 48), "test")
    data = memoryview(damaged()["noise"])
    try:
        assert converter.convert(data, len(data)).shape == (48, 64, 3)
    except CorruptItem:
        pass
    good = memoryview(jpeg(90))
    np.testing.assert_allclose(converter.convert(good, len(good)), 90, atol=3)


def test_camera_that_compresses_is_read(really, system):
    system.camera.listed = [Listed("MJPG", 64, 48)]

    async def body():
        async with camera(system=system, size=(32, 24), keep="all") as source:
            levels = []
            for level in (10, 120, 240):
                system.camera.fill(jpeg(level))
                levels.append(float((await anext(source)).data.mean()))
                system.camera.fill(jpeg(level)[:50])
            return levels, source.statistics()

    levels, account = really(body)
    np.testing.assert_allclose(levels, [10, 120, 240], atol=3)
    assert account.corrupt >= 2
