"""Sources that need no file, no device and no library: moving shapes, and tones over noise.

Owns what they show. Refuses to own pace and queues (`source.py`).

Invariants:
1. The same arguments give the same pixels and samples, on every machine and whatever the pace.
2. One step costs well below a millisecond at ordinary sizes, so no thread is used and the virtual clock can drive these sources.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

import numpy as np
import numpy.typing as npt

from aionn.media.arguments import checked_number, checked_size, checked_whole
from aionn.media.audio import windows_of
from aionn.media.pacing import Keep, checked_queue_max
from aionn.media.records import AudioWindow, Frame
from aionn.media.source import Source
from aionn.media.windows import WindowPlan
from aionn.platform.numbers import checked_seconds

__all__ = ["synthetic_audio", "synthetic_video"]

Samples = npt.NDArray[np.float32]

SHAPES = 3
TONE_S = 0.5

# 32 million years: the number of samples is still a number.
DURATION_S_MAX = 1e15


def synthetic_video(
    *,
    size: tuple[int, int] = (96, 96),
    fps: float = 30.0,
    frames: int = 300,
    seed: int = 0,
    pace: bool = True,
    keep: Keep = "latest",
    queue_frames_max: int = 4,
    now: Callable[[], int] = time.monotonic_ns,
) -> Source[Frame]:
    """A disc and two rectangles that wander over a shaded ground.

    Args:
        size: ``(width, height)``.
        fps: Frames per second of the medium.
        frames: Their number.
        seed: Chooses colours, sizes and ways; 0 or more.
        pace: As in `video_file`.
        keep: As in `video_file`.
        queue_frames_max: As in `video_file`.
        now: As in `video_file`.

    Raises:
        InvalidArgument: An argument is out of range.
    """
    where = "aionn.media.synthetic_video"
    width, height = checked_size(size, f"{where}: size")
    fps = checked_number(fps, 0.001, 100_000, f"{where}: fps")
    frames = checked_whole(frames, 0, None, f"{where}: frames")
    seed = checked_whole(seed, 0, None, f"{where}: seed")
    checked_queue_max(queue_frames_max, "queue_frames_max", where)
    items = _frames(width, height, fps, frames, seed)
    return Source(
        items, name=where, pace=pace, keep=keep, queue_max=queue_frames_max, now=now, blocking=False
    )


def synthetic_audio(
    *,
    duration_s: float = 10.0,
    seed: int = 0,
    window_s: float = 1.0,
    hop_s: float = 0.1,
    sample_rate_hz: int = 16_000,
    pace: bool = True,
    keep: Keep = "latest",
    queue_windows_max: int = 4,
    now: Callable[[], int] = time.monotonic_ns,
) -> Source[AudioWindow]:
    """Pure tones of half a second, between 100 Hz and a quarter of the sample rate, over faint noise.

    Args:
        duration_s: Length of the medium, up to `DURATION_S_MAX`.
        seed: Chooses the tones and the noise; 0 or more.
        window_s: As in `audio_file`.
        hop_s: As in `audio_file`.
        sample_rate_hz: As in `audio_file`.
        pace: As in `audio_file`.
        keep: As in `audio_file`.
        queue_windows_max: As in `audio_file`.
        now: As in `audio_file`.

    Raises:
        InvalidArgument: An argument is out of range.
    """
    where = "aionn.media.synthetic_audio"
    plan = WindowPlan.of(window_s, hop_s, sample_rate_hz, where)
    samples = checked_seconds(duration_s, f"{where}: duration_s", most=DURATION_S_MAX) * plan.sample_rate_hz
    seed = checked_whole(seed, 0, None, f"{where}: seed")
    checked_queue_max(queue_windows_max, "queue_windows_max", where)
    windows = windows_of(_tones(round(samples), plan.sample_rate_hz, seed), plan)
    return Source(
        windows, name=where, pace=pace, keep=keep, queue_max=queue_windows_max, now=now, blocking=False
    )


def _frames(
    width: int, height: int, fps: float, frames: int, seed: int
) -> Generator[tuple[int, Frame], None, None]:
    random = np.random.default_rng(seed)
    ground = np.empty((height, width, 3), np.uint8)
    ground[:] = np.linspace(40, 90, width, dtype=np.uint8)[None, :, None]
    colours = random.integers(100, 256, (SHAPES, 3), np.uint8)
    side = max(1, min(width, height) // 4)
    starts = random.random((SHAPES, 2))
    speeds = random.uniform(0.1, 0.5, (SHAPES, 2))  # Crossings of the picture per second.
    across = (np.arange(side) - (side - 1) / 2) ** 2
    disc = (across[:, None] + across[None, :]) <= (side / 2) ** 2
    for index in range(frames):
        data = ground.copy()
        # There and back again: a triangle wave in 0 ... 1.
        places = np.abs((starts + speeds * (index / fps)) % 2.0 - 1.0)
        for shape in range(SHAPES):
            left = int(places[shape, 0] * (width - side))
            top = int(places[shape, 1] * (height - side))
            if shape == 0:
                data[top : top + side, left : left + side][disc] = colours[shape]
            else:
                data[top : top + side, left : left + max(1, side // shape)] = colours[shape]
        yield int(index * 1_000_000_000 / fps), Frame(data, 0, index, index / fps)


def _tones(samples: int, sample_rate_hz: int, seed: int) -> Generator[Samples, None, None]:
    length = max(1, round(TONE_S * sample_rate_hz))
    time_s = np.arange(length) / sample_rate_hz
    for number, start in enumerate(range(0, samples, length)):
        # Seeded by its number, so that each tone is the same however long the medium is.
        random = np.random.default_rng((seed, number))
        frequency_hz = random.uniform(100.0, max(100.0, sample_rate_hz / 4))
        tone = 0.5 * np.sin(2 * np.pi * frequency_hz * time_s) + random.normal(0.0, 0.01, length)
        yield tone[: samples - start].astype(np.float32)
