"""Synthetic sources: the same for the same seed, and something to see and hear."""

import subprocess
import sys

import numpy as np
import pytest

from aionn.errors import InvalidArgument
from aionn.media import synthetic_audio, synthetic_video


def run(virtually, make):
    async def body(now):
        async with make(now) as source:
            return [item async for item in source]

    return virtually(body)


def test_video_is_the_same_for_the_same_seed_whatever_the_pace(virtually):
    options = {"size": (40, 30), "frames": 20, "fps": 10.0}
    first = run(virtually, lambda now: synthetic_video(**options, seed=3, now=now))
    second = run(virtually, lambda now: synthetic_video(**options, seed=3, pace=False, now=now))
    other = run(virtually, lambda now: synthetic_video(**options, seed=4, pace=False, now=now))
    assert len(first) == 20
    assert all(np.array_equal(a.data, b.data) for a, b in zip(first, second))
    assert not any(np.array_equal(a.data, b.data) for a, b in zip(first, other))
    assert [frame.time_s for frame in first] == [index / 10 for index in range(20)]
    assert first[0].data.shape == (30, 40, 3)


def test_shapes_move_and_cover_a_part_of_the_picture(virtually):
    frames = run(virtually, lambda now: synthetic_video(frames=60, pace=False, now=now))
    for before, after in zip(frames[::10], frames[10::10]):
        changed = (before.data != after.data).any(2).mean()
        assert 0.001 < changed < 0.5


def test_smallest_picture_works(virtually):
    (frame,) = run(virtually, lambda now: synthetic_video(size=(1, 1), frames=1, now=now))
    assert frame.data.shape == (1, 1, 3)


def test_audio_is_the_same_for_the_same_seed_and_does_not_depend_on_its_length(virtually):
    short = run(virtually, lambda now: synthetic_audio(duration_s=1.3, seed=5, now=now))
    long = run(virtually, lambda now: synthetic_audio(duration_s=3.0, seed=5, pace=False, now=now))
    assert (len(short), len(long)) == (4, 21)
    assert all(np.array_equal(a.samples, b.samples) for a, b in zip(short, long))
    assert short[0].samples.dtype == np.float32
    assert max(np.abs(window.samples).max() for window in long) <= 1.0


def test_audio_holds_one_tone_in_each_half_second(virtually):
    windows = run(virtually, lambda now: synthetic_audio(duration_s=4.0, window_s=0.5, hop_s=0.5, now=now))
    peaks = [np.abs(np.fft.rfft(window.samples)) for window in windows]
    for spectrum in peaks:
        assert spectrum.max() > 50 * np.median(spectrum)
    assert len({int(spectrum.argmax()) for spectrum in peaks}) > 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: synthetic_video(fps=0), "synthetic_video: fps: expected 0.001 to 100000, got 0"),
        (lambda: synthetic_video(fps=float("nan")), "synthetic_video: fps: expected"),
        (lambda: synthetic_video(frames=-1), "synthetic_video: frames: expected 0 or more, got -1"),
        (lambda: synthetic_video(size=(0, 1)), "synthetic_video: size: expected"),
        (
            lambda: synthetic_audio(duration_s=-1),
            "synthetic_audio: duration_s: expected a number of seconds of at least 0 and at most 1e\\+15, got -1",
        ),
        (lambda: synthetic_audio(duration_s=float("inf")), "synthetic_audio: duration_s: expected"),
        (lambda: synthetic_audio(queue_windows_max=0), "synthetic_audio: queue_windows_max: expected"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(InvalidArgument, match=f"aionn.media.{message}"):
        make()


def test_import_loads_no_pyav():
    program = "import sys, aionn.media; sys.exit('av' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
