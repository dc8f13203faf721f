"""Microphones: a recorder that is a real subprocess, a PortAudio in Python, pipes and sockets."""

import asyncio
import os
import socket
import stat
import sys
import threading
import time

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.media import Reconnection, SourceUnavailable, microphone, raw_audio
from aionn.media.microphones.recorders import open_portaudio
from aionn.media.microphones.samples import SampleLayout, mono
from aionn.media.windows import WindowPlan

SOON = Reconnection(first_s=0.02, most_s=0.1)
SHORT = {"window_s": 0.1, "hop_s": 0.05}
RATE = 16_000


def tone(samples, start=0):
    """A ramp that shows where in the sound a sample is, as 16-bit integers."""
    return ((np.arange(start, start + samples) % 30_000) + 1).astype("<i2")


def recorder(folder, body):
    """A program named ``parec`` that runs Python."""
    program = folder / "parec"
    program.write_text(f"#!{sys.executable}\nimport sys, time, os, array\nout = sys.stdout.buffer\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


STEADY = """
n = 0
while True:
    out.write(array.array("h", [(n + i) % 30000 + 1 for i in range(320)]).tobytes()); out.flush()
    n += 320
    time.sleep(0.01)
"""


@pytest.fixture
def parec(tmp_path, monkeypatch):
    """Replaces the recorder of this machine by a program."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return lambda body: recorder(tmp_path, body)


def test_windows_of_the_recorder_come_in_order_with_their_times(really, parec, tmp_path):
    parec(f"open({str(tmp_path / 'arguments')!r}, 'w').write(' '.join(sys.argv[1:]))\n" + STEADY)

    async def body():
        async with microphone("mic", **SHORT, keep="all") as windows:
            return [await anext(windows) for _ in range(5)], time.monotonic_ns()

    windows, now_ns = really(body)
    assert [window.index for window in windows] == list(range(5))
    for window in windows:
        expected = tone(1600, window.index * 800).astype(np.float32) / 32768
        np.testing.assert_allclose(window.samples, expected, atol=1e-6)
    stamps = [window.captured_at_ns for window in windows]
    assert stamps == sorted(stamps) and stamps[-1] <= now_ns
    assert {window.clock for window in windows} == {"arrival"}
    arguments = (tmp_path / "arguments").read_text().split()
    assert "--rate=16000" in arguments and "--channels=1" in arguments and "--device=mic" in arguments
    assert "--property=node.dont-reconnect=true" in arguments


def test_recorder_that_ends_is_an_error_with_its_own_words(really, parec):
    parec("sys.stderr.write('Connection failure: Connection refused'); sys.exit(1)")

    async def body():
        async with microphone(**SHORT, reconnect=None) as windows:
            with pytest.raises(SourceUnavailable, match=r"Connection refused; .*--sources.*synthetic_audio"):
                await anext(windows)

    really(body)


def test_recorder_that_ends_is_started_again(really, parec):
    parec(STEADY.replace("while True:", "while n < 3200:"))

    async def body():
        async with microphone(**SHORT, reconnect=SOON) as windows:
            gaps = 0
            async for window in windows:
                gaps += window.follows_gap
                if gaps == 2:
                    return windows.statistics()

    assert really(body).reconnections >= 2


def test_recorder_that_falls_silent_is_started_again(really, parec, monkeypatch):
    monkeypatch.setattr("aionn.media.live.silence.SILENCE_S_MIN", 0.2)
    parec(STEADY.replace("while True:", "while n < 3200:") + "time.sleep(60)")

    async def body():
        async with microphone(**SHORT, reconnect=SOON) as windows:
            async for window in windows:
                if window.follows_gap:
                    return windows.health().reason

    assert "is silent" in really(body)


def test_recorder_that_ignores_the_request_to_end_is_killed(really, parec):
    parec("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STEADY)

    async def body():
        async with microphone(**SHORT) as windows:
            await anext(windows)

    really(body)


def test_missing_recorder_is_an_error_with_the_remedy(really, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))

    async def body():
        with pytest.raises(
            SourceUnavailable, match=r"such as pulseaudio-utils; .*'portaudio'; .*audio_file"
        ) as raised:
            async with microphone():
                pass
        assert raised.value.is_permanent

    really(body)


@pytest.mark.parametrize("turns", range(6))
def test_cancelled_opening_leaves_no_recorder(really, parec, turns):
    parec(STEADY)

    async def body():
        async def use():
            async with microphone(**SHORT) as windows:
                await anext(windows)
                await anyio.sleep(20)

        task = asyncio.create_task(use())
        for _ in range(turns):
            await asyncio.sleep(0.004)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    really(body)


class FakeSounddevice:
    """PortAudio in Python: a thread that calls back, every 20 ms or faster."""

    def __init__(self, fails=None, blocks=1000):
        self.fails, self.blocks = fails, blocks
        self.opened = self.closed = 0

    def query_devices(self):
        inputs = [{"name": f"Card {number}", "max_input_channels": 1} for number in range(10)]
        return [{"name": "Loudspeaker", "max_input_channels": 0}, *inputs]

    def RawInputStream(self, *, samplerate, channels, dtype, blocksize, device, callback):
        if self.fails == "open":
            raise RuntimeError("Invalid sample rate [PaErrorCode -9997]")
        self.opened += 1
        assert (channels, dtype) == (1, "int16")
        self.callback, self.blocksize = callback, blocksize
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self._run)
        return self

    class Status:
        input_overflow = True

        def __bool__(self):
            return self.input_overflow

    def _run(self):
        for number in range(self.blocks):
            block = tone(self.blocksize, number * self.blocksize)
            status = self.Status() if self.fails == "overflow" and number == 30 else None
            self.callback(memoryview(block.tobytes()), self.blocksize, None, status)
            if self.ends.wait(0.002):
                return
        self.ends.wait(20)

    def start(self):
        if self.fails == "start":
            raise RuntimeError("Device unavailable [PaErrorCode -9985]")
        self.thread.start()

    def close(self):
        self.closed += 1
        self.ends.set()
        if self.thread.ident is not None:
            self.thread.join()


def installed(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "sounddevice", module)


def test_windows_of_portaudio_come_in_order(really, monkeypatch):
    module = FakeSounddevice()
    installed(monkeypatch, module)

    async def body():
        async with microphone(**SHORT, recorder="portaudio", keep="all") as windows:
            return [await anext(windows) for _ in range(10)]

    for window in really(body):
        expected = tone(1600, window.index * 800).astype(np.float32) / 32768
        np.testing.assert_allclose(window.samples, expected, atol=1e-6)
    assert (module.opened, module.closed) == (1, 1)


def test_overflow_of_portaudio_starts_a_new_window_after_the_gap(really, monkeypatch):
    installed(monkeypatch, FakeSounddevice("overflow"))

    async def body():
        async with microphone(**SHORT, recorder="portaudio", keep="all") as windows:
            async for window in windows:
                if window.follows_gap:
                    return window

    window = really(body)
    assert np.all(np.diff(window.samples[1:]) > 0)


def test_pipe_of_portaudio_that_is_full_counts_a_gap_and_blocks_no_callback():
    module = FakeSounddevice(blocks=0)
    capture = open_portaudio(None, WindowPlan.of(0.1, 0.05, RATE, "test"), module)
    try:
        block = tone(320).tobytes()
        for _ in range(300):
            module.callback(memoryview(block), 320, None, None)
        grabs = []
        while (grab := capture.dequeue(time.monotonic_ns())) is not None:
            grabs.append(grab)
        assert grabs and grabs[0].follows_gap
        assert capture._overruns() > 50
    finally:
        capture.close()


@pytest.mark.parametrize("fails", ["open", "start"])
def test_device_of_portaudio_that_cannot_be_opened_is_an_error(really, monkeypatch, fails):
    module = FakeSounddevice(fails)
    installed(monkeypatch, module)

    async def body():
        with pytest.raises(SourceUnavailable, match=r"microphone 7 \(PortAudio\): .*PaErrorCode") as raised:
            async with microphone(7, recorder="portaudio"):
                pass

        return str(raised.value)

    message = really(body)
    assert module.closed == module.opened
    assert (
        "PortAudio has 1 'Card 0', 2 'Card 1'," in message
        and "'Card 7' and 2 more; aionn.media.audio_file" in message
    )
    assert "Loudspeaker" not in message


def test_missing_sounddevice_is_an_error_with_the_remedy(really, monkeypatch):
    installed(monkeypatch, None)

    async def body():
        with pytest.raises(DeviceUnavailable, match=r"pip install 'aionn\[microphone\]'.*synthetic_audio"):
            async with microphone(recorder="portaudio"):
                pass

    really(body)


@pytest.mark.parametrize("kind", ["fifo", "pipe", "socket"])
def test_raw_samples_come_from_pipes_and_sockets(really, tmp_path, kind):
    async def body():
        path = tmp_path / "samples"
        if kind == "fifo":
            os.mkfifo(path)
            source, writing = path, None
        elif kind == "pipe":
            source, writing = os.pipe()
        else:
            one, other = socket.socketpair()
            source, writing = one.detach(), other.detach()
        try:
            async with raw_audio(source, **SHORT, keep="all") as windows:
                if writing is None:
                    writing = os.open(path, os.O_WRONLY)
                data = tone(4000).tobytes()
                for place in range(0, len(data), 777):  # Not at the borders of samples.
                    os.write(writing, data[place : place + 777])
                    await anyio.lowlevel.checkpoint()
                return [await anext(windows) for _ in range(4)]
        finally:
            for fd in (writing, source):
                if isinstance(fd, int):
                    os.close(fd)

    for window in really(body):
        expected = tone(1600, window.index * 800).astype(np.float32) / 32768
        np.testing.assert_allclose(window.samples, expected, atol=1e-6)


def test_named_pipe_outlives_its_writers(really, tmp_path):
    path = tmp_path / "samples"
    os.mkfifo(path)

    async def body():
        async with raw_audio(path, **SHORT, keep="all") as windows:
            for _ in range(3):
                path.write_bytes(tone(1600).tobytes())
                await anext(windows)

    really(body)


def test_end_of_a_pipe_is_an_error_after_its_samples(really):
    async def body():
        reading, writing = os.pipe()
        async with raw_audio(reading, **SHORT, keep="all") as windows:
            os.close(reading)
            os.write(writing, tone(2000).tobytes())
            os.close(writing)
            assert (await anext(windows)).index == 0
            with pytest.raises(SourceUnavailable, match="the writer has closed it"):
                await anext(windows)

    really(body)


@pytest.mark.parametrize("kind", ["missing", "file", "folder", "closed"])
def test_anything_but_a_pipe_is_an_error(really, tmp_path, kind):
    target = {"missing": tmp_path / "x", "file": tmp_path / "f", "folder": tmp_path, "closed": 9999}[kind]
    (tmp_path / "f").write_bytes(bytes(100))

    async def body():
        with pytest.raises(SourceUnavailable, match="expected a pipe"):
            async with raw_audio(target):
                pass

    really(body)


def test_flood_of_samples_is_read_in_bounded_pieces_and_the_loop_stays_alive(really):
    async def body():
        reading, writing = os.pipe()
        stops = threading.Event()
        data = tone(30_000).tobytes()

        def flood():
            while not stops.is_set():
                try:
                    os.write(writing, data)
                except OSError:
                    return

        thread = threading.Thread(target=flood)
        async with raw_audio(reading, **SHORT) as windows:
            thread.start()
            turns = 0
            for _ in range(50):
                await anext(windows)
                assert len(windows._capture._windows) < 100
                turns += 1
            stops.set()
        os.close(reading)
        thread.join(5)
        os.close(writing)
        return turns

    assert really(body) == 50


def test_samples_that_come_much_too_late_leave_a_gap(really):
    async def body():
        reading, writing = os.pipe()
        try:
            async with raw_audio(reading, **SHORT, keep="all") as windows:
                os.write(writing, tone(2400).tobytes())
                first = [await anext(windows) for _ in range(2)]
                await anyio.sleep(0.5)
                os.write(writing, tone(2400, 10_000).tobytes())
                return first, await anext(windows)
        finally:
            os.close(reading)
            os.close(writing)

    first, after = really(body)
    assert not any(window.follows_gap for window in first)
    assert after.follows_gap
    assert np.all(np.diff(after.samples) > 0)


@pytest.mark.parametrize(
    ("sample_format", "channels"), [("s16le", 1), ("s16le", 3), ("f32le", 1), ("f32le", 2)]
)
def test_channels_are_mixed_and_levels_are_in_range(sample_format, channels):
    layout = SampleLayout.of(sample_format, channels, RATE, "test")
    scale = 32768 if sample_format == "s16le" else 1
    values = np.array([[-1.0] * channels, [0.5] * channels, [0.25] + [0.0] * (channels - 1)])
    data = (values * scale).astype("<i2" if sample_format == "s16le" else "<f4").tobytes()
    np.testing.assert_allclose(mono(data, layout), [-1.0, 0.5, 0.25 / channels], atol=1e-4)


def test_floats_that_are_not_numbers_become_silence():
    data = np.array([np.nan, np.inf, -np.inf, 1e30, 0.5], "<f4").tobytes()
    np.testing.assert_array_equal(mono(data, SampleLayout("f32le", 1, RATE)), np.float32([0, 1, -1, 1, 0.5]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: microphone(3),
        lambda: microphone(recorder="tape"),
        lambda: microphone(window_s=0),
        lambda: microphone(sample_rate_hz=10**9),
        lambda: microphone(keep="some"),
        lambda: raw_audio("x", channels=0),
        lambda: raw_audio("x", channels=65),
        lambda: raw_audio("x", sample_format="u8"),
        lambda: raw_audio("x", hop_s=float("nan")),
    ],
)
def test_impossible_argument_is_rejected(make):
    with pytest.raises(InvalidArgument, match=r"aionn\.media\.(microphone|raw_audio)"):
        make()
