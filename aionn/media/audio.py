"""Sound files as sources of windows.

Owns reading a file as mono float32 at one rate. Refuses to own the cutting into windows (`windows.py`), pace and queues
(`source.py`).

Invariants:
1. A 16-bit PCM WAV file that has the wanted rate needs the standard library only; everything else goes through PyAV.
2. All reading happens in the source's worker thread.
3. A file that ends before the length of its header is an error, never a short recording.
"""

from __future__ import annotations

import contextlib
import os
import time
import wave
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument
from aionn.media.arguments import checked_path
from aionn.media.pacing import Keep, checked_queue_max
from aionn.media.pyav import check_file, load, open_container, whole_packets
from aionn.media.records import AudioWindow
from aionn.media.source import Source
from aionn.media.windows import WindowCutter, WindowPlan

__all__ = ["audio_file"]

Samples = npt.NDArray[np.float32]

# Writers to a pipe cannot know the length and leave (nearly) the greatest number: 0xFFFFFFFF, less the header or an odd byte.
WAV_BYTES_UNKNOWN = 0xFFFF_FF00


def audio_file(
    path: str | os.PathLike[str],
    *,
    window_s: float = 1.0,
    hop_s: float = 0.1,
    sample_rate_hz: int = 16_000,
    pace: bool = True,
    keep: Keep = "latest",
    queue_windows_max: int = 4,
    now: Callable[[], int] = time.monotonic_ns,
) -> Source[AudioWindow]:
    """Overlapping windows of a sound file, as a microphone would give them.

    Window k starts ``k * hop_s`` into the file and is presented when its last sample would have been captured, so the first one
    comes ``window_s`` after opening. The rest that fills no window is left out.

    Args:
        path: A WAV file, or any file that FFmpeg can read; its first audio stream is taken, and its channels are mixed into one.
        window_s: Length of a window, rounded to whole samples.
        hop_s: Distance between the starts of neighbours, rounded to whole samples; beyond ``window_s`` it leaves gaps.
        sample_rate_hz: The rate of the windows; a file with another rate is resampled.
        pace: False presents the windows as fast as they are read and taken, and drops none.
        keep: Items for a slow consumer: the ``"latest"`` window, the ``"oldest"`` ones, or ``"all"``, which holds the source back.
        queue_windows_max: Number of windows that wait for the consumer under ``"all"`` and ``"oldest"``.
        now: The time in ns; it must agree with the event loop's clock.

    Returns:
        A source of `AudioWindow`, float32 ``[window_s * sample_rate_hz]`` in [-1, 1]. Entering or iterating it raises
        `InvalidArgument` when the file is missing, holds no sound, is damaged or cut short, and `DeviceUnavailable` when it needs
        PyAV, which is not there.

    Raises:
        InvalidArgument: An argument is out of range.
    """
    where = "aionn.media.audio_file"
    plan = WindowPlan.of(window_s, hop_s, sample_rate_hz, where)
    checked_queue_max(queue_windows_max, "queue_windows_max", where)
    windows = windows_of(_blocks(checked_path(path, f"{where}: path"), plan, where), plan)
    return Source(windows, name=where, pace=pace, keep=keep, queue_max=queue_windows_max, now=now)


def windows_of(
    blocks: Generator[Samples, None, None], plan: WindowPlan
) -> Generator[tuple[int, AudioWindow], None, None]:
    """Cuts blocks into windows with their due times; closes the generator of the blocks at the end."""
    cutter = WindowCutter(plan)
    with contextlib.closing(blocks):
        for block in blocks:
            for index, samples in cutter.push(block):
                yield plan.captured_after_ns(index), AudioWindow(samples, 0, index, plan.start_s(index))


def _blocks(path: str, plan: WindowPlan, where: str) -> Generator[Samples, None, None]:
    check_file(path, where)
    with _open_pcm16(path, plan.sample_rate_hz, where) as reader:
        if reader is not None:
            yield from _wav_blocks(path, reader, plan.hop_samples, where)
            return
    yield from _pyav_blocks(path, plan.sample_rate_hz, where)


@contextlib.contextmanager
def _open_pcm16(path: str, sample_rate_hz: int, where: str) -> Iterator[wave.Wave_read | None]:
    """Yields a reader if the file is 16-bit PCM WAV at the rate, None for any other file."""
    with contextlib.ExitStack() as opened:
        reader = None
        try:
            reader = opened.enter_context(wave.open(path, "rb"))
        except OSError as error:
            raise InvalidArgument(f"{where}: expected to read {path!r}, got: {error.strerror}") from error
        except (wave.Error, EOFError):  # Not WAV, or of a kind that the standard library does not read.
            pass
        plain = reader is not None and reader.getsampwidth() == 2 and reader.getframerate() == sample_rate_hz
        yield reader if plain else None


def _wav_blocks(
    path: str, reader: wave.Wave_read, block_samples: int, where: str
) -> Generator[Samples, None, None]:
    channels = reader.getnchannels()
    promised = reader.getnframes()
    read = 0
    while data := reader.readframes(block_samples):
        # A file that was cut within a sample: the pieces of it are not used.
        whole = len(data) // (2 * channels) * channels
        pcm = np.frombuffer(data, "<i2", whole).reshape(-1, channels)
        read += len(pcm)
        if channels == 1:
            yield pcm[:, 0].astype(np.float32) / np.float32(32768)
        else:
            yield pcm.mean(axis=1, dtype=np.float32) / np.float32(32768)
    if read < promised and promised * 2 * channels < WAV_BYTES_UNKNOWN:
        raise InvalidArgument(
            f"{where}: expected {path!r} to hold {promised} samples, as its header declares, got {read}; the file is cut short"
        )


def _pyav_blocks(path: str, sample_rate_hz: int, where: str) -> Generator[Samples, None, None]:
    av = load(where)
    with open_container(path, "audio", where) as (container, stream):
        # The layout stays: swresample mixes floats without scaling, so that two loud channels would be clipped.
        resampler = av.AudioResampler(format="fltp", rate=sample_rate_hz)
        for packet in whole_packets(container, stream, path, where):
            for sound in packet.decode():
                for part in resampler.resample(sound):
                    yield _mono(part)
        for part in resampler.resample(None):
            yield _mono(part)


def _mono(part: Any) -> Samples:
    # Lossy codecs and the resampler's filter overshoot a little.
    samples: Samples = part.to_ndarray().mean(axis=0).clip(-1.0, 1.0)
    return samples
