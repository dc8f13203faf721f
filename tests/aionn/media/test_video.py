"""Video files: what comes out, what is refused, and that nothing is left open."""

import sys
import threading

import anyio
import numpy as np
import pytest

import aionn.media
from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.media import video_file
from aionn.media.pyav import RgbScaler

av = pytest.importorskip("av", reason="PyAV, the extra `media`, is not installed")


def collected(source, limit=10_000):
    async def collect():
        items = []
        async with source as opened:
            async for item in opened:
                items.append(item)
                if len(items) == limit:
                    break
        return items

    return collect


def write_video(path, frames=30, fps=30, size=(64, 48), first_pts=0, options=None):
    """Each frame has one grey level, 8 more than the one before."""
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 1_000_000
        for index in range(frames):
            picture = np.full((size[1], size[0], 3), 8 * index % 256, np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = first_pts + index
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def test_every_frame_comes_with_its_number_and_place(really, data):
    frames = really(collected(video_file(data / "shapes.mp4", size=(96, 80), pace=False)))
    assert [frame.index for frame in frames] == list(range(600))
    np.testing.assert_allclose([frame.time_s for frame in frames], np.arange(600) / 30, atol=1e-6)
    for frame in frames[::100]:
        assert frame.data.shape == (80, 96, 3)
        assert frame.data.dtype == np.uint8
        assert frame.data.flags.c_contiguous
    assert repr(frames[30]) == "Frame(index=30, time_s=1.000, 96x80)"


def test_frames_are_rgb_in_the_order_of_the_file_and_do_not_share_pixels(really, tmp_path):
    path = write_video(tmp_path / "grey.mp4")
    frames = really(collected(video_file(path, pace=False)))
    assert [frame.data.shape for frame in frames] == [(48, 64, 3)] * 30
    levels = [float(frame.data.mean()) for frame in frames]
    np.testing.assert_allclose(levels, [8 * index for index in range(30)], atol=4)


def test_first_frame_is_at_zero_wherever_the_file_begins(really, tmp_path):
    path = write_video(tmp_path / "late.mkv", frames=4, first_pts=90)
    frames = really(collected(video_file(path, pace=False)))
    # Matroska counts in milliseconds.
    assert [round(frame.time_s, 4) for frame in frames] == [0.0, 0.033, 0.067, 0.1]


def test_colours_are_in_their_places(really, tmp_path):
    path = tmp_path / "red.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 64, 64, "yuv420p", 1_000_000
        picture = np.zeros((64, 64, 3), np.uint8)
        picture[:, :32] = (220, 30, 30)
        picture[:, 32:] = (30, 30, 220)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    (frame,) = really(collected(video_file(path, size=(32, 16), pace=False)))
    np.testing.assert_allclose(frame.data[:, 3:13].mean((0, 1)), (220, 30, 30), atol=12)
    np.testing.assert_allclose(frame.data[:, 19:29].mean((0, 1)), (30, 30, 220), atol=12)


def test_frames_do_not_come_before_their_time(really, data):
    async def body():
        async with video_file(data / "shapes.mp4", size=(32, 32), keep="all") as frames:
            seen = []
            async for frame in frames:
                seen.append((frame, aionn.media.source.time.monotonic_ns()))
                if frame.index == 12:
                    break
        return seen

    seen = really(body)
    start_ns = seen[0][0].captured_at_ns
    for frame, taken_ns in seen:
        assert frame.captured_at_ns <= taken_ns
        # The first one may itself have been handed out late, by a timer's grain at the most.
        assert frame.captured_at_ns - start_ns >= frame.index * 33_333_333 - 1_000_000


def test_decoding_happens_in_another_thread(really, data, monkeypatch):
    threads = set()
    reformatter = av.video.reformatter.VideoReformatter

    class Watched:  # PyAV's own class cannot be derived from.
        def __init__(self):
            self.inner = reformatter()

        def reformat(self, *arguments, **options):
            threads.add(threading.current_thread())
            return self.inner.reformat(*arguments, **options)

    monkeypatch.setattr(av.video.reformatter, "VideoReformatter", Watched)
    really(collected(video_file(data / "shapes.mp4", size=(8, 8), pace=False), limit=10))
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("is_old", [False, True], ids=["this PyAV", "one without the argument"])
def test_pictures_are_scaled_on_the_thread_of_the_caller_alone(monkeypatch, is_old):
    calls = []
    reformatter = av.video.reformatter.VideoReformatter

    class Watched:
        def __init__(self):
            self.inner = reformatter()

        def reformat(self, *arguments, **options):
            if is_old and "threads" in options:
                raise TypeError("reformat() got an unexpected keyword argument 'threads'")
            calls.append(options.get("threads"))
            return self.inner.reformat(*arguments, **options)

    monkeypatch.setattr(av.video.reformatter, "VideoReformatter", Watched)
    scale = RgbScaler(av)
    picture = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 77, np.uint8), format="rgb24")
    for _ in range(2):
        pixels = scale(picture, 32, 24)
        assert pixels.shape == (24, 32, 3) and abs(pixels.astype(int) - 77).max() <= 3
    assert calls == [None if is_old else 1] * 2


@pytest.mark.parametrize("limit", [1, 7])
def test_leaving_early_closes_the_file(really, data, limit):
    assert len(really(collected(video_file(data / "shapes.mp4", size=(8, 8)), limit=limit))) == limit


def test_cancelling_while_entering_closes_the_file(really, data):
    async def body():
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with video_file(data / "shapes.mp4"):
                raise AssertionError("entered")

    really(body)


@pytest.mark.parametrize(
    ("method", "error_max"),
    # The first and the last look at single pixels: they are coarse when a picture shrinks by ten, as here.
    [("fast_bilinear", 12), ("bilinear", 6), ("bicubic", 6), ("area", 6), ("lanczos", 6), ("point", 12)],
)
def test_every_interpolation_gives_the_same_picture_roughly(really, data, method, error_max):
    source = video_file(data / "shapes.mp4", size=(24, 24), pace=False, interpolation=method)
    plain = video_file(data / "shapes.mp4", pace=False)
    (scaled,) = really(collected(source, limit=1))
    (full,) = really(collected(plain, limit=1))
    averaged = full.data.reshape(24, 10, 24, 10, 3).mean((1, 3))
    assert np.abs(averaged - scaled.data).mean() < error_max


def test_missing_file_is_refused_in_one_sentence(really, tmp_path):
    async def body():
        with pytest.raises(InvalidArgument) as caught:
            async with video_file(tmp_path / "none.mp4"):
                raise AssertionError("entered")
        return str(caught.value)

    path = str(tmp_path / "none.mp4")
    expected = f"aionn.media.video_file: expected a media file at {path!r}, got: No such file or directory"
    assert really(body) == expected


@pytest.mark.parametrize("content", [b"", b"# A heading\n" * 200, bytes(range(256)) * 40])
def test_what_is_no_media_file_is_refused(really, tmp_path, content):
    path = tmp_path / "strange.mp4"
    path.write_bytes(content)

    async def body():
        with pytest.raises(
            InvalidArgument, match=r"strange\.mp4' to hold video, got no media file, or one cut"
        ):
            async with video_file(path):
                raise AssertionError("entered")

    really(body)


def test_directory_and_address_are_refused(really, tmp_path):
    async def body():
        with pytest.raises(InvalidArgument, match="got a directory"):
            async with video_file(tmp_path):
                raise AssertionError("entered")
        with pytest.raises(InvalidArgument, match="got: No such file"):
            async with video_file("http://localhost/video.mp4"):
                raise AssertionError("entered")
        with pytest.raises(InvalidArgument, match="null"):
            async with video_file("a\0b"):
                raise AssertionError("entered")

    really(body)


def test_file_without_video_is_refused_with_what_it_has(really, data):
    async def body():
        with pytest.raises(InvalidArgument, match=r"digits\.wav' to hold video, got audio"):
            async with video_file(data / "digits.wav"):
                raise AssertionError("entered")

    really(body)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lost", [0.5, 0.1, 1])
def test_truncated_file_gives_what_is_there_then_an_error(really, tmp_path, lost):
    whole = write_video(tmp_path / "whole.mp4", frames=120, options={"movflags": "faststart"})
    path = tmp_path / "cut.mp4"
    size_bytes = whole.stat().st_size
    path.write_bytes(whole.read_bytes()[: size_bytes - (lost if lost == 1 else int(size_bytes * lost))])

    async def body():
        indices = []
        async with video_file(path, pace=False) as frames:
            with pytest.raises(InvalidArgument, match=r"cut\.mp4' to hold .*cut short") as caught:
                async for frame in frames:
                    indices.append(frame.index)
        return indices, str(caught.value)

    indices, message = really(body)
    assert indices == list(range(len(indices)))
    # This codec decodes without delay: every packet that was whole came out as a frame.
    assert 10 < len(indices) < 120
    assert f"to hold 120 packets of video, as its header declares, got {len(indices)};" in message
    assert "\n" not in message


def test_file_cut_before_its_table_is_refused_at_once(really, data, tmp_path):
    path = tmp_path / "cut.mp4"
    path.write_bytes((data / "shapes.mp4").read_bytes()[:3_000])

    async def body():
        with pytest.raises(InvalidArgument, match="no media file, or one cut short"):
            async with video_file(path):
                raise AssertionError("entered")

    really(body)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (0, 4)}, r"size: expected width and height of 1 to 16384, got \(0, 4\)"),
        ({"size": (4, 20_000)}, "size: expected"),
        ({"keep": "some"}, "keep: expected one of all, latest, oldest, got 'some'"),
        ({"queue_frames_max": 0}, "queue_frames_max: expected 1 to 1024, got 0"),
        ({"interpolation": "nearest"}, "interpolation: expected one of fast_bilinear, .*, got 'nearest'"),
    ],
)
def test_arguments_out_of_range_are_refused_before_anything_is_opened(options, message):
    with pytest.raises(InvalidArgument, match=f"aionn.media.video_file: {message}"):
        video_file("nowhere.mp4", **options)


def test_without_pyav_the_error_says_what_to_install(really, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)

    async def body():
        with pytest.raises(DeviceUnavailable, match=r"video_file: needs PyAV.*pip install 'aionn\[media\]'"):
            async with video_file(data / "shapes.mp4"):
                raise AssertionError("entered")

    really(body)
