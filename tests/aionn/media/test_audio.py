"""Sound files: what comes out, by the standard library and by PyAV, and what is refused."""

import struct
import sys
import wave

import numpy as np
import pytest

from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.media import audio_file


def collected(source):
    async def collect():
        async with source as windows:
            return [window async for window in windows]

    return collect


def write_wav(path, samples, rate=16_000, width=2):
    """``samples`` float ``[n]`` or ``[n, channels]``."""
    samples = np.atleast_2d(np.asarray(samples, np.float64).T).T
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        scaled = np.round(samples * (2 ** (8 * width - 1) - 1)).astype("<i4")
        file.writeframes(scaled.astype("<i2").tobytes() if width == 2 else scaled.tobytes())
    return path


def tone(hertz, seconds, rate=16_000, amplitude=0.5):
    return amplitude * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def without_pyav(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)


def test_windows_of_a_wav_file_are_its_samples_without_pyav(really, data, monkeypatch):
    without_pyav(monkeypatch)
    with wave.open(str(data / "digits.wav")) as file:
        whole = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    windows = really(collected(audio_file(data / "digits.wav", pace=False)))
    assert len(windows) == (whole.size - 16_000) // 1_600 + 1
    for index, window in enumerate(windows):
        assert (window.index, window.start_s) == (index, index / 10)
        assert window.samples.dtype == np.float32
        np.testing.assert_array_equal(window.samples, whole[index * 1_600 : index * 1_600 + 16_000])
    assert repr(windows[3]) == "AudioWindow(index=3, start_s=0.300, samples=16000)"


def test_window_comes_when_its_last_sample_is_captured(virtually, data, monkeypatch):
    without_pyav(monkeypatch)

    async def body(now):
        start_ns = now()
        moments = []
        async with audio_file(data / "digits.wav", now=now, keep="all") as windows:
            async for window in windows:
                moments.append(window.captured_at_ns - start_ns)
                if window.index == 20:
                    return moments

    moments = virtually(body)
    for index, moment_ns in enumerate(moments):
        assert moment_ns >= 1_000_000_000 + index * 100_000_000


def test_channels_are_averaged(really, tmp_path, monkeypatch):
    without_pyav(monkeypatch)
    left, right = tone(440, 1.0), tone(990, 1.0, amplitude=0.25)
    path = write_wav(tmp_path / "stereo.wav", np.stack((left, right), 1))
    (window,) = really(collected(audio_file(path, pace=False)))
    np.testing.assert_allclose(window.samples, (left + right) / 2, atol=1e-4)


def test_full_scale_stays_within_one(really, tmp_path):
    path = tmp_path / "full.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(struct.pack("<2h", -32768, 32767) * 8_000)
    (window,) = really(collected(audio_file(path, pace=False)))
    assert (window.samples.min(), window.samples.max()) == (-1.0, np.float32(32767 / 32768))


def test_sound_shorter_than_a_window_gives_none(really, tmp_path):
    path = write_wav(tmp_path / "short.wav", tone(440, 0.99))
    assert really(collected(audio_file(path, pace=False))) == []
    assert len(really(collected(audio_file(path, pace=False, window_s=0.5)))) == 5


def test_other_rates_are_resampled_to_the_same_tone(really, tmp_path):
    pytest.importorskip("av", reason="PyAV, the extra `media`, is not installed")
    path = write_wav(tmp_path / "cd.wav", tone(1_000, 2.0, rate=44_100), rate=44_100)
    windows = really(collected(audio_file(path, pace=False)))
    assert len(windows) == 11
    spectrum = np.abs(np.fft.rfft(windows[5].samples))
    assert spectrum.argmax() == 1_000
    assert np.sqrt(np.mean(windows[5].samples ** 2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.01)


@pytest.mark.parametrize("width", [4])
def test_other_sample_formats_go_through_pyav(really, tmp_path, width):
    pytest.importorskip("av", reason="PyAV, the extra `media`, is not installed")
    samples = tone(440, 1.0)
    path = write_wav(tmp_path / "wide.wav", samples, width=width)
    (window,) = really(collected(audio_file(path, pace=False)))
    np.testing.assert_allclose(window.samples, samples, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "codec"), [("sound.flac", "flac"), ("sound.mp4", "aac"), ("sound.mkv", "ac3")]
)
def test_compressed_sound_is_read(really, tmp_path, name, codec):
    av = pytest.importorskip("av", reason="PyAV, the extra `media`, is not installed")
    path = tmp_path / name
    left = tone(1_000, 2.0, 48_000)
    samples = np.stack((left, np.zeros_like(left)))
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=48_000, layout="stereo")
        if codec == "flac":
            sound = av.AudioFrame.from_ndarray(
                (samples.T.reshape(1, -1) * 32767).astype(np.int16), format="s16", layout="stereo"
            )
        else:
            sound = av.AudioFrame.from_ndarray(samples.astype(np.float32), format="fltp", layout="stereo")
        sound.sample_rate = 48_000
        container.mux(stream.encode(sound))
        container.mux(stream.encode(None))
    windows = really(collected(audio_file(path, pace=False, hop_s=0.5)))
    assert len(windows) == 3
    assert np.abs(np.fft.rfft(windows[1].samples)).argmax() == 1_000
    assert np.sqrt(np.mean(windows[1].samples ** 2)) == pytest.approx(0.25 / np.sqrt(2), rel=0.05)


def test_decoded_sound_stays_within_one_where_the_codec_overshoots(really, tmp_path):
    av = pytest.importorskip("av", reason="PyAV, the extra `media`, is not installed")
    path = tmp_path / "loud.mp4"
    square = np.sign(tone(250, 2.0)).astype(np.float32)[None]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        sound = av.AudioFrame.from_ndarray(square, format="fltp", layout="mono")
        sound.sample_rate = 16_000
        container.mux(stream.encode(sound))
        container.mux(stream.encode(None))
    windows = really(collected(audio_file(path, pace=False)))
    assert max(np.abs(window.samples).max() for window in windows) == 1.0


def test_truncated_compressed_sound_gives_an_error(really, tmp_path):
    av = pytest.importorskip("av", reason="PyAV, the extra `media`, is not installed")
    whole, path = tmp_path / "whole.mp4", tmp_path / "cut.mp4"
    with av.open(str(whole), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        sound = av.AudioFrame.from_ndarray(
            tone(440, 4.0).astype(np.float32)[None], format="fltp", layout="mono"
        )
        sound.sample_rate = 16_000
        container.mux(stream.encode(sound))
        container.mux(stream.encode(None))
    path.write_bytes(whole.read_bytes()[:-2_000])

    async def body():
        with pytest.raises(
            InvalidArgument, match=r"cut\.mp4' to hold \d+ packets of audio, as its header declares"
        ):
            async with audio_file(path, pace=False) as windows:
                async for _ in windows:
                    pass

    really(body)


def test_truncated_wav_gives_what_is_there_then_an_error(really, data, tmp_path):
    path = tmp_path / "cut.wav"
    path.write_bytes((data / "digits.wav").read_bytes()[:100_001])

    async def body():
        count = 0
        async with audio_file(path, pace=False) as windows:
            with pytest.raises(InvalidArgument) as caught:
                async for _ in windows:
                    count += 1
        return count, str(caught.value)

    count, message = really(body)
    samples = (100_001 - 44) // 2
    assert count == (samples - 16_000) // 1_600 + 1
    assert message == (
        f"aionn.media.audio_file: expected {str(path)!r} to hold 623352 samples, as its header declares, got {samples}; "
        "the file is cut short"
    )


def test_wav_of_unknown_length_is_read_to_its_end(really, data, tmp_path):
    content = bytearray((data / "digits.wav").read_bytes()[:64_044])
    assert content[36:40] == b"data"
    content[4:8] = content[40:44] = b"\xff\xff\xff\xff"
    path = tmp_path / "pipe.wav"
    path.write_bytes(content)
    assert len(really(collected(audio_file(path, pace=False)))) == 11


@pytest.mark.parametrize("content", [b"", b"RIFF", b"RIFF\x24\0\0\0WAVEfmt ", b"# A heading\n" * 200])
def test_what_is_no_sound_is_refused(really, tmp_path, content):
    pytest.importorskip("av", reason="PyAV, the extra `media`, is not installed")
    path = tmp_path / "strange.wav"
    path.write_bytes(content)

    async def body():
        with pytest.raises(InvalidArgument, match=r"audio_file: expected '.*strange\.wav' to hold audio"):
            async with audio_file(path):
                raise AssertionError("entered")

    really(body)


def test_missing_file_and_file_without_sound_are_refused(really, data, tmp_path):
    pytest.importorskip("av", reason="PyAV, the extra `media`, is not installed")

    async def body():
        with pytest.raises(
            InvalidArgument, match=r"expected a media file at .*, got: No such file or directory"
        ):
            async with audio_file(tmp_path / "none.wav"):
                raise AssertionError("entered")
        with pytest.raises(InvalidArgument, match=r"shapes\.mp4' to hold audio, got video"):
            async with audio_file(data / "shapes.mp4"):
                raise AssertionError("entered")

    really(body)


def test_without_pyav_the_error_says_what_to_install(really, tmp_path, monkeypatch):
    without_pyav(monkeypatch)
    path = write_wav(tmp_path / "cd.wav", tone(1_000, 1.0, rate=44_100), rate=44_100)

    async def body():
        with pytest.raises(DeviceUnavailable, match=r"audio_file: needs PyAV.*pip install 'aionn\[media\]'"):
            async with audio_file(path):
                raise AssertionError("entered")

    really(body)
