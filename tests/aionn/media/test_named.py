"""Sources by a name that a person types."""

import sys

import pytest

from aionn.errors import InvalidArgument
from aionn.media import LiveSource, Source, SourceUnavailable, named_source, network, shown_name


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("0", LiveSource, "media.camera"),
        ("/dev/video3", LiveSource, "media.camera"),
        ("camera:C920", LiveSource, "media.camera"),
        ("microphone:", LiveSource, "media.microphone"),
        ("microphone:alsa_input.usb", LiveSource, "media.microphone"),
        ("rtsp://user:pw@camera/main", LiveSource, "media.network"),
        ("pattern:", Source, "synthetic_video"),
        ("clip.mp4", Source, "video_file"),
        ("a:b.mp4", Source, "video_file"),
    ],
)
def test_name_means_a_source(name, kind, words):
    source = named_source(name)
    assert type(source) is kind
    assert words in repr(source)
    assert "pw" not in repr(source)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("patern:", "got 'patern:'; did you mean pattern:?"),
        ("pattern", "got 'pattern'; did you mean pattern:?"),
        ("mic", "got 'mic'; did you mean microphone:?"),
        ("replya:a.rec", "got 'replya:a.rec'; did you mean replay:a.rec?"),
        ("rtsp:/user:secret@host", "got '***@host'; an address has :// in it"),
        ("user:secret@host/main", "got 'host/main'; an address has :// in it"),
        ("rtsp:user:secret@host", "got 'host'; an address has :// in it"),
        ("camra:user:secret@host", "got 'host'; an address has :// in it"),
    ],
)
def test_misspelt_name_is_no_video_file(name, advice):
    with pytest.raises(InvalidArgument) as caught:
        named_source(name)
    assert "an address or a video file" in str(caught.value)
    assert str(caught.value).endswith(advice)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "camera:", "pattern:x", "file:///etc/passwd", "gopher://x"])
def test_name_that_means_nothing_is_rejected(name):
    with pytest.raises(InvalidArgument):
        named_source(name)


def test_pattern_moves_at_its_rate_without_an_end(virtually):
    async def body(now):
        from aionn.media import synthetic_video
        from aionn.media.named import PATTERN_FRAMES

        start_ns = now()
        async with synthetic_video(frames=PATTERN_FRAMES, now=now) as frames:
            async for frame in frames:
                if frame.index == 300:
                    return now() - start_ns

    assert virtually(body) == pytest.approx(10_000_000_000, rel=0.01)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("rtsp://user:pw@camera:554/main?key=x#y", "rtsp://camera:554/main"),
        ("rtsp://us@er:p@w@camera/main", "rtsp://camera/main"),
        ("http://camera", "http://camera"),
        ("0", "0"),
        ("clip.mp4", "clip.mp4"),
    ],
)
def test_credentials_are_not_shown(name, shown):
    assert shown_name(name) == shown


@pytest.mark.thorough
@pytest.mark.forked("none")
def test_network_without_pyav_is_an_error_with_the_remedy(really, monkeypatch, tmp_path):
    (tmp_path / "av.py").write_text("raise ImportError('not here')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    async def body():
        with pytest.raises(SourceUnavailable, match=r"needs PyAV.*pip install 'aionn\[media\]'") as raised:
            async with network("rtsp://127.0.0.1:1/x"):
                pass
        assert raised.value.is_permanent

    really(body)
