"""Tests that run in the emulated machine: a microphone of the kernel's driver snd-aloop, whose other end plays.

A tone is played into one end of the loop and recorded from the other one, by PortAudio and by a program that writes into a pipe.
"""

import asyncio
import contextlib
import ctypes.util
import os
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from aionn.media import Reconnection, SourceUnavailable, microphone, raw_audio
from tests.guest.assembling import environment

FOLDER = Path(os.environ["AIONN_GUEST"])
PROGRAMS = FOLDER / "root/usr/bin"
LIBRARIES = FOLDER / "root/usr/lib/x86_64-linux-gnu"
PLAYED, RECORDED = "hw:Loopback,0,0", "hw:Loopback,1,0"
RATE, TONE_HZ = 16_000, 440.0
SOON = Reconnection(first_s=0.1, most_s=1.0)
LIMIT_S = 120
WINDOWS_MAX = 60


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr("aionn.media.live.source.SILENCE_S_MIN", 15.0)
    monkeypatch.setattr("aionn.media.live.source.FIRST_ITEM_S_MAX", 60.0)
    monkeypatch.setattr("aionn.media.microphones.opening._SoundOpener.limit_s", 60.0)


@pytest.fixture
def device(monkeypatch):
    """Number of the recording end in PortAudio's list."""
    usual = ctypes.util.find_library

    def find(name):
        return str(LIBRARIES / "libportaudio.so.2") if name == "portaudio" else usual(name)

    monkeypatch.setattr("ctypes.util.find_library", find)
    sys.modules.pop("sounddevice", None)
    sounddevice = pytest.importorskip(
        "sounddevice", reason="sounddevice, the extra `microphone`, is not installed"
    )
    found = [
        number
        for number, one in enumerate(sounddevice.query_devices())
        if "Loopback" in one["name"] and ",1)" in one["name"] and one["max_input_channels"]
    ]
    assert found, sounddevice.query_devices()
    return found[0]


@contextlib.contextmanager
def playing(tmp_path, rate=RATE):
    """A tone is played for minutes into the other end."""
    path = tmp_path / "tone.wav"
    times_s = np.arange(rate * 100) / rate
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.sin(2 * np.pi * TONE_HZ * times_s) * 12_000).astype("<i2").tobytes())
    process = subprocess.Popen(
        [PROGRAMS / "aplay", "-q", "-D", PLAYED, path], env=environment(FOLDER), stdin=subprocess.DEVNULL
    )
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


def loudest_hz(window):
    spectrum = np.abs(np.fft.rfft(window.samples * np.hanning(window.samples.size)))
    return float(spectrum[1:].argmax() + 1) * RATE / window.samples.size, float(np.abs(window.samples).max())


async def until_the_tone(windows):
    for _ in range(WINDOWS_MAX):
        window = await anext(windows)
        hz, peak = loudest_hz(window)
        if peak > 0.2 and abs(hz - TONE_HZ) <= 4:
            return window, windows.statistics()
    raise AssertionError(f"no tone in {WINDOWS_MAX} windows, the last one has {hz:.0f} Hz and {peak:.3f}")


def test_tone_in_the_loop_of_the_kernel_comes_by_a_pipe_until_the_recorder_ends(tmp_path):
    command = [
        PROGRAMS / "arecord", "-q", "-D", RECORDED, "-t", "raw", "-f", "S16_LE", "-r", str(RATE), "-c", "1",
    ]  # fmt: skip

    async def body():
        with playing(tmp_path):
            recorder = subprocess.Popen(command, env=environment(FOLDER), stdout=subprocess.PIPE)
            try:
                assert recorder.stdout is not None
                async with raw_audio(recorder.stdout.fileno()) as windows:
                    found = await until_the_tone(windows)
                    recorder.kill()
                    with pytest.raises(SourceUnavailable, match="closed"):
                        while True:
                            await anext(windows)
                    return found
            finally:
                recorder.kill()
                recorder.wait()
                recorder.stdout.close()

    window, _ = run(body)
    assert window.samples.shape == (RATE,)


def test_tone_in_the_loop_of_the_kernel_comes_by_portaudio(device, tmp_path):
    async def body():
        with playing(tmp_path):
            async with microphone(device, recorder="portaudio", reconnect=SOON) as windows:
                return await until_the_tone(windows)

    window, account = run(body)
    assert window.samples.shape == (RATE,) and window.clock == "arrival"
    assert account.presented == account.delivered + account.dropped + account.queued


def test_rate_that_the_device_does_not_have_is_an_error(device, tmp_path):
    async def body():
        # The end that plays sets the rate of both.
        with playing(tmp_path, rate=48_000):
            await asyncio.sleep(5)
            with pytest.raises(SourceUnavailable, match="expected 16000 samples per s"):
                async with microphone(device, recorder="portaudio", reconnect=None):
                    pass

    run(body)
