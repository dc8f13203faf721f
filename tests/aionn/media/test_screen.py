"""The picture of an X display: by FFmpeg, from a small X server on a real socket and from Xvfb where it is installed."""

import os
import shutil
import subprocess
import time

import pytest

pytest.importorskip("av", reason="PyAV, the extra `media`, is not installed")

from aionn.errors import InvalidArgument
from aionn.media import Reconnection, SourceUnavailable, named_source, screen
from tests.support.media.media_server import media_server
from tests.support.media.x_server import display_of, x_display

SOON = Reconnection(first_s=0.02, most_s=0.1)


@pytest.mark.slow
def test_pictures_of_a_display_come_with_their_times(really):
    async def body():
        async with media_server(x_display()) as port, screen(display_of(port), size=(32, 24)) as source:
            frames = [await anext(source) for _ in range(5)]
            return frames, time.monotonic_ns(), repr(source)

    frames, now_ns, shown = really(body)
    assert [frame.data.shape for frame in frames] == [(24, 32, 3)] * 5
    levels = [int(frame.data[0, 0, 0]) for frame in frames]
    assert levels == sorted(set(levels))
    assert all((frame.data == level).all() for frame, level in zip(frames, levels))
    stamps = [frame.captured_at_ns for frame in frames]
    assert stamps == sorted(stamps) and now_ns - 10**10 < stamps[0] and stamps[-1] <= now_ns
    assert {frame.clock for frame in frames} == {"arrival"}
    assert "live" in shown


@pytest.mark.slow
def test_part_of_the_screen_is_read(really):
    async def body():
        async with media_server(x_display()) as port:
            async with screen(display_of(port), region=(8, 4, 20, 10), has_pointer=False) as source:
                assert (await anext(source)).data.shape == (10, 20, 3)
            with pytest.raises(SourceUnavailable, match="the region on its screen"):
                async with screen(display_of(port), region=(60, 4, 20, 10)):
                    pass

    really(body)


@pytest.mark.slow
@pytest.mark.parametrize("then", ["cut", "silent"])
def test_display_that_is_lost_is_opened_again(really, impatient, then):
    async def body():
        server = x_display(pictures=10, then=then)
        async with media_server(server) as port, screen(display_of(port), reconnect=SOON) as source:
            async for frame in source:
                if frame.follows_gap:
                    return source.statistics()

    assert really(body).reconnections == 1


@pytest.mark.slow
def test_display_that_does_not_admit_the_user_is_an_error_with_the_remedy(really):
    async def body():
        async with media_server(x_display(is_admitted=False)) as port:
            with pytest.raises(SourceUnavailable, match=r"screen 127.*xhost \+si:localuser") as raised:
                async with screen(display_of(port)):
                    pass
            assert not raised.value.is_permanent

    really(body)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "no variable DISPLAY: .*Xvfb"),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "a Wayland session without one"),
        ({"DISPLAY": "file:///etc/passwd"}, "expected a name such as ':0'"),
    ],
    ids=["nothing", "wayland", "nonsense"],
)
def test_session_without_an_x_display_is_an_error_with_the_remedy(really, monkeypatch, environment, words):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    async def body():
        with pytest.raises(SourceUnavailable, match=words) as raised:
            async with named_source("screen:"):
                pass
        assert raised.value.is_permanent

    really(body)


@pytest.mark.slow
def test_display_of_this_machine_is_read(really, tmp_path):
    program = shutil.which("Xvfb")
    if program is None:
        pytest.skip("Xvfb is not installed")
    reading, writing = os.pipe()
    server = subprocess.Popen(
        [program, "-displayfd", str(writing), "-screen", "0", "320x240x24", "-nolisten", "tcp"],
        pass_fds=(writing,),
        stderr=subprocess.DEVNULL,
    )
    os.close(writing)
    try:
        number = int(os.read(reading, 20))

        async def body():
            async with screen(f":{number}") as source:
                return [await anext(source) for _ in range(3)]

        frames = really(body)
    finally:
        os.close(reading)
        server.terminate()
        server.wait(20)
    assert [frame.data.shape for frame in frames] == [(240, 320, 3)] * 3


@pytest.mark.parametrize(
    "arguments",
    [
        {"display": "screen"},
        {"display": ":0+10,10"},
        {"display": "file:///etc/passwd:0"},
        {"display": ":0\n"},
        {"display": ""},
        {"rate": 0},
        {"rate": float("nan")},
        {"size": (0, 5)},
        {"region": (-1, 0, 5, 5)},
        {"region": (0, 0, 0, 5)},
        {"keep": "some"},
        {"queue_frames_max": 65},
    ],
    ids=str,
)
def test_impossible_argument_is_rejected(arguments):
    with pytest.raises(InvalidArgument, match=r"aionn\.media\.screen"):
        screen(**arguments)
