"""A microphone over a real PipeWire: the digits recording is played into a sink that plays to nobody, and heard by its monitor."""

import asyncio
import json
import os
import shutil
import tempfile
import time
import wave
from pathlib import Path

import numpy as np
import pytest

from aionn.media import Reconnection, SourceUnavailable, list_microphones, log_mel, microphone
from tests.aionn.media.test_accuracy import Model
from tests.sound.assembling import SoundServer, missing

pytestmark = pytest.mark.long

DATA = Path(__file__).resolve().parents[2] / "examples/data"
SOON = Reconnection(first_s=0.1, most_s=0.5)
LIMIT_S = 150
HOP_S = 0.1


@pytest.fixture
def server(monkeypatch):
    named = os.environ.get("AIONN_SOUND")
    folder = Path(named) if named else None
    reason = missing(folder)
    if reason is not None or folder is None:
        pytest.skip(str(reason))
    runtime = Path(tempfile.mkdtemp(prefix="aionn-"))  # Short: the path of a socket has 107 bytes at most.
    try:
        with SoundServer(folder, runtime) as started:
            for name in ("LD_LIBRARY_PATH", "PULSE_SERVER", "XDG_RUNTIME_DIR"):
                monkeypatch.setenv(name, started.environment[name])
            monkeypatch.setenv("PATH", f"{folder / 'root' / 'usr' / 'bin'}:{os.environ['PATH']}")
            yield started
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


def run(body):
    async def limited():
        async with asyncio.timeout(LIMIT_S):
            return await body()

    return asyncio.run(limited())


def recording():
    with wave.open(str(DATA / "digits.wav")) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        return file.readframes(file.getnframes())


def words_found(times_s, answers, truth):
    """The most words that are right for one constant delay between the recording and the windows."""
    best = 0
    for delay_s in np.arange(-0.5, 4.0, 0.05):
        found = 0
        for word in truth["words"]:
            middle_s = (word["start_s"] + word["end_s"]) / 2 + delay_s
            near = answers[np.abs(times_s - middle_s) <= 0.2]
            if len(near):
                likeliest = near[near.max(1).argmax()]
                found += likeliest.max() > 0.5 and truth["classes"][1 + likeliest.argmax()] == word["word"]
        best = max(best, found)
    return best


def test_words_are_heard_live(server):
    pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
    truth = json.loads((DATA / "digits.json").read_text())
    model = Model(DATA / "digits_float.tflite")
    samples = recording()
    seconds = len(samples) / 32_000

    async def body():
        times_s, answers = [], []
        async with microphone("aionn.monitor", hop_s=HOP_S, keep="all", queue_windows_max=64) as windows:
            await anext(windows)
            begun_s = time.monotonic()
            with server.playing(samples):
                async for window in windows:
                    centre_s = window.captured_at_ns / 1e9 - 0.5 - begun_s
                    times_s.append(centre_s)
                    answers.append(model.probabilities(log_mel(window.samples))[1:])
                    if centre_s > seconds + 4:
                        return np.array(times_s), np.array(answers), windows.statistics()

    times_s, answers, account = run(body)
    found = words_found(times_s, answers, truth)
    print(f"{found} of {len(truth['words'])} words, {len(times_s)} windows, {account}")
    assert found >= 29
    assert account.reconnections == 0


def test_server_that_is_killed_and_comes_back_is_found_again(server):
    async def body():
        async with microphone("aionn.monitor", reconnect=SOON) as windows:
            await anext(windows)
            await asyncio.to_thread(server.kill)
            while windows.health().state == "live":
                await asyncio.sleep(0.05)
            reason = windows.health().reason
            await asyncio.to_thread(server.start)
            async for window in windows:
                if window.follows_gap:
                    return window, reason, windows.statistics()

    window, reason, account = run(body)
    assert account.reconnections >= 1
    assert "parec ended" in reason
    assert window.samples.shape == (16_000,)


def test_sound_that_was_lost_while_the_loop_was_busy_is_a_gap_and_the_next_window_is_fresh(server):
    async def body():
        async with microphone("aionn.monitor", hop_s=HOP_S) as windows:
            for _ in range(5):
                await anext(windows)
            time.sleep(6.0)  # The pipe holds two seconds: the recorder waits, and the server drops.
            gaps, ages_s = 0, []
            for _ in range(40):
                window = await anext(windows)
                gaps += window.follows_gap
                ages_s.append((time.monotonic_ns() - window.captured_at_ns) / 1e9)
            return gaps, ages_s, windows.statistics()

    gaps, ages_s, account = run(body)
    print(gaps, [round(age, 2) for age in ages_s], account)
    assert gaps >= 1
    assert min(ages_s[-5:]) < 1.0


def test_microphones_of_the_server_are_listed(server):
    found = {one.name for one in run(list_microphones)}
    assert "aionn.monitor" in found


def test_device_that_the_server_lacks_is_an_error_in_its_words(server):
    async def body():
        with pytest.raises(SourceUnavailable, match="parec ended"):
            async with microphone("no-such-device", reconnect=None) as windows:
                await anext(windows)

    run(body)
