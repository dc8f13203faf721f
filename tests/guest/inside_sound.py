"""Tests that run in the emulated machine: a sound card of snd-aloop, which hears by PortAudio exactly what is played into it.

Source: the kernel's documentation of snd-aloop: the second device of the card records what the first one plays, sample by sample.
"""

import asyncio
import contextlib
import itertools
import os
import subprocess
import time
import wave
from pathlib import Path

import numpy as np
import pytest

from aionn.media import SourceUnavailable, microphone
from tests.guest.assembling import environment

pytestmark = pytest.mark.long
"""The watchdog of ordinary tests is shorter than what an emulated processor takes on a busy machine; each test has its limit."""

RECORDING = Path(__file__).resolve().parents[2] / "examples/data/digits.wav"
PLAYED, HEARD = "hw:0,0", "hw:0,1"
RATE = 16_000
LIMIT_S = 240
TIMES = 20
"""So often the recording is played, unless the test has ended before: a slow machine loses most of the first ones."""
WINDOW = {"window_s": 0.5, "hop_s": 0.25, "recorder": "portaudio"}
DIFFERENCE_MAX = 1.5 / 32_768
"""The samples of a window are 16-bit integers, divided."""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    folder = Path(os.environ["AIONN_GUEST"])
    (library,) = folder.glob("root/usr/lib/*/libportaudio.so.2")
    # The module looks for the library when it is imported, and only where libraries are installed.
    monkeypatch.setattr("ctypes.util.find_library", lambda name: str(library))
    monkeypatch.setattr("aionn.media.live.silence.SILENCE_S_MIN", 10.0)
    monkeypatch.setattr("aionn.media.live.silence.FIRST_ITEM_S_MAX", 30.0)
    monkeypatch.setattr("aionn.media.microphones.opening.OPEN_S_MAX", 60.0)
    monkeypatch.setattr("aionn.media.microphones.opening._SoundOpener.limit_s", 60.0)


def recorded():
    with wave.open(str(RECORDING)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32_768


@contextlib.contextmanager
def playing():
    """The recording is played into the card while the block runs, however slow the emulated machine is."""
    folder = Path(os.environ["AIONN_GUEST"])
    command = [
        folder / "root/usr/bin/aplay",
        "-q",
        "-D",
        PLAYED,
        "--buffer-time=500000",
        *[RECORDING] * TIMES,
    ]
    process = subprocess.Popen(command, env=environment(folder))
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run(body):
    async def limited():
        async with asyncio.timeout(LIMIT_S):
            return await body()

    return asyncio.run(limited())


def place_of(samples, whole):
    """The place of a window in the recording, sample by sample; None if it is not a part of it."""
    length = 1 << (whole.size + samples.size).bit_length()
    spectrum = np.fft.rfft(whole, length) * np.conj(np.fft.rfft(samples, length))
    place = int(np.fft.irfft(spectrum, length)[: whole.size - samples.size + 1].argmax())
    is_there = np.abs(whole[place : place + samples.size] - samples).max() <= DIFFERENCE_MAX
    return place if is_there else None


def test_sound_is_heard_sample_by_sample_and_its_places_agree_with_the_times_of_capture():
    whole = recorded()

    async def body():
        places = []
        with playing():
            async with microphone(HEARD, **WINDOW, keep="all", queue_windows_max=64) as windows:
                async for window in windows:
                    loud = window.samples.std() > 0.01  # Of silence every place is right.
                    place = place_of(window.samples, whole) if loud else None
                    if place is not None:
                        places.append((place, window.index, window.captured_at_ns, window.follows_gap))
                    if len(places) == 12:
                        return places, windows.statistics()

    places, account = run(body)
    assert account.corrupt == 0
    # Neighbours are as far apart in the recording as in the stream, unless sound was lost between them, which is marked.
    neighbours = [
        (b[0] - a[0], b[2] - a[2]) for a, b in itertools.pairwise(places) if b[1] == a[1] + 1 and not b[3]
    ]
    assert neighbours
    assert [distance for distance, _ in neighbours] == [RATE // 4] * len(neighbours)
    # By the clock of the emulated machine: the hop of 0.25 s, within what its processor delays.
    assert 0.1 < np.median([taken_ns for _, taken_ns in neighbours]) / 1e9 < 1.0


def test_sound_that_was_lost_while_the_loop_was_busy_is_a_gap_and_the_next_window_is_fresh():
    async def body():
        with playing():
            async with microphone(HEARD, **WINDOW) as windows:
                for _ in range(3):
                    await anext(windows)
                time.sleep(5.0)  # The pipe holds two seconds.
                async for window in windows:
                    if window.follows_gap:
                        return time.monotonic_ns() - window.captured_at_ns

    assert run(body) < 3e9


def test_rate_that_the_card_does_not_have_and_card_in_use_are_errors_that_name_the_fault():
    async def body():
        with pytest.raises(SourceUnavailable, match=r"expected 5000 samples per s.*sample rate"):
            async with microphone(HEARD, **WINDOW, sample_rate_hz=5_000, reconnect=None):
                pass
        async with microphone(HEARD, **WINDOW):
            with pytest.raises(SourceUnavailable, match=r"\(PortAudio\)"):
                async with microphone(HEARD, **WINDOW, reconnect=None):
                    pass
        with pytest.raises(SourceUnavailable, match="no-such-card"):
            async with microphone("no-such-card", **WINDOW, reconnect=None):
                pass

    run(body)
