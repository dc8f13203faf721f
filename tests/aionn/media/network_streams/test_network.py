"""Network streams over real sockets: servers that stall, cut, lie, and come back."""

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import anyio
import numpy as np
import pytest

from aionn.errors import InvalidArgument
from aionn.media import Reconnection, SourceUnavailable, network, network_audio
from tests.support.media.media_server import (
    HEAD,
    jpeg,
    media_server,
    mpegts,
    multipart,
    pictures,
    reads_request,
    wav,
)

pytestmark = pytest.mark.slow

SOON = Reconnection(first_s=0.02, most_s=0.1)
ENDLESS = 10**6


async def camera_server(reader, writer, number):
    await reads_request(reader)
    writer.write(HEAD)
    await pictures(writer, ENDLESS)


def pid_of(source):
    return source._capture._process._process.pid


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_pictures_of_an_http_camera_come_with_their_arrival(really):
    async def body():
        async with (
            media_server(camera_server) as port,
            network(f"http://127.0.0.1:{port}/cam", size=(32, 24)) as source,
        ):
            frames = [await anext(source) for _ in range(10)]
            now_ns = time.monotonic_ns()
            account = source.statistics()
        return frames, now_ns, account

    frames, now_ns, account = really(body)
    assert [frame.data.shape for frame in frames] == [(24, 32, 3)] * 10
    levels = [round(float(frame.data.mean())) for frame in frames]
    assert levels == sorted(levels) and levels[-1] > levels[0]
    stamps = [frame.captured_at_ns for frame in frames]
    assert stamps == sorted(stamps) and stamps[-1] <= now_ns
    # Motion JPEG has no time stamps: those that FFmpeg computes are not used.
    assert {(frame.clock, frame.uncertainty_ns) for frame in frames} == {("arrival", 0)}
    assert account.presented == account.delivered + account.dropped + account.queued


def test_transport_stream_is_decoded_and_its_clock_used(really):
    data = mpegts(90)

    async def behaviour(reader, writer, number):
        await reads_request(reader)
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: video/mp2t\r\n\r\n")
        for place in range(0, len(data), 188 * 4):
            writer.write(data[place : place + 188 * 4])
            await writer.drain()
            await asyncio.sleep(0.01)
        await asyncio.sleep(20)

    async def body():
        async with (
            media_server(behaviour) as port,
            network(f"http://127.0.0.1:{port}/a.ts", keep="all") as source,
        ):
            return [await anext(source) for _ in range(20)]

    frames = really(body)
    assert [frame.index for frame in frames] == list(range(20))
    levels = [float(frame.data.mean()) for frame in frames]
    np.testing.assert_allclose(levels, [4 * index for index in range(20)], atol=8)


def test_all_delivers_every_frame_of_a_fast_server_in_bounded_memory(really):
    data = mpegts(300)

    async def behaviour(reader, writer, number):
        await reads_request(reader)
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        await writer.drain()

    async def body():
        async with media_server(behaviour) as port:
            source = network(f"http://127.0.0.1:{port}/a.ts", keep="all", reconnect=None)
            async with source:
                count = 0
                with pytest.raises(SourceUnavailable, match="the server ended the stream"):
                    async for frame in source:
                        assert frame.index == count
                        count += 1
                        if count == 1:
                            await anyio.sleep(0.5)
                return count, source.statistics()

    count, account = really(body)
    assert count == 300
    assert (account.dropped, account.lost) == (0, 0)


def test_lost_server_is_connected_again_in_every_way_of_losing_it(really, impatient):
    """Each connection is lost in another way: cut, silent, in the middle of a picture, garbage, at the end."""

    async def behaviour(reader, writer, number):
        await reads_request(reader)
        if number == 4:
            writer.write(b"HTTP/1.0 503 Busy\r\n\r\n")
            return
        writer.write(HEAD)
        await pictures(writer, ENDLESS if number == 6 else 15)
        if number == 1:
            writer.transport.abort()
        elif number == 2:
            await asyncio.sleep(20)
        elif number == 3:
            writer.write(multipart(jpeg(9))[:200])
            await writer.drain()
            await asyncio.sleep(20)
        elif number == 5:
            writer.write(os.urandom(100_000))
            await writer.drain()

    async def body():
        async with (
            media_server(behaviour) as port,
            network(f"http://127.0.0.1:{port}/cam", reconnect=SOON) as source,
        ):
            gaps = 0
            reasons = set()
            async for frame in source:
                if frame.follows_gap:
                    gaps += 1
                    reasons.add(source.health().reason.partition(": ")[2])
                if gaps == 4:
                    return reasons, source.statistics()

    reasons, account = really(body)
    assert account.reconnections == 4
    assert len(reasons) >= 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "HTTPNotFoundError"),
        (b"HTTP/1.0 401 No\r\nWWW-Authenticate: Basic realm=x\r\n\r\n", "HTTPUnauthorizedError"),
        (
            b"HTTP/1.0 200 OK\r\nContent-Length: 6000\r\n\r\n" + b"hello " * 1000,
            "sends no media that FFmpeg knows",
        ),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", "the server ended the connection"),
        (b"", "cannot be opened"),
        (b"\x00" * 4096, "cannot be opened"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + os.urandom(65_536), "cannot be opened"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 99999999999\r\n\r\n", "cannot be opened"),
    ],
    ids=["missing", "password", "page", "cut", "nothing", "zeros", "noise", "liar"],
)
def test_server_without_a_stream_is_an_error_that_names_the_fault(really, answer, words):
    async def behaviour(reader, writer, number):
        await reads_request(reader)
        writer.write(answer)

    async def body():
        async with media_server(behaviour) as port:
            with pytest.raises(SourceUnavailable, match=words) as raised:
                async with network(f"http://secret:pass@127.0.0.1:{port}/cam?key=abc", open_s_max=5):
                    pass
        text = str(raised.value)
        assert "127.0.0.1" in text
        assert not any(secret in text for secret in ("secret", "pass@", "abc"))

    really(body)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["silent", "headers", "redirects", "half", "slow"])
def test_server_that_never_gets_to_the_point_is_bounded_in_time(really, kind):
    async def behaviour(reader, writer, number):
        await reads_request(reader)
        if kind == "headers":
            writer.write(b"HTTP/1.0 200 OK\r\n")
            while True:
                writer.write(b"X-Junk: " + b"y" * 4000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
        if kind == "redirects":
            port = writer.get_extra_info("sockname")[1]
            writer.write(b"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1:%d/%d\r\n\r\n" % (port, number))
            return
        if kind == "half":
            writer.write(HEAD + multipart(jpeg())[:100])
            await writer.drain()
        if kind == "slow":
            for byte in HEAD + multipart(jpeg()):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.05)
        await asyncio.sleep(20)

    async def body():
        async with media_server(behaviour) as port:
            started_s = time.monotonic()
            with pytest.raises(SourceUnavailable):
                async with network(f"http://127.0.0.1:{port}/cam", open_s_max=1.5):
                    pass
            assert time.monotonic() - started_s < 10

    really(body)


def test_redirect_to_a_file_of_this_machine_is_not_followed(really, tmp_path):
    (tmp_path / "a.ts").write_bytes(mpegts(30))

    async def behaviour(reader, writer, number):
        await reads_request(reader)
        if number == 1:
            writer.write(b"HTTP/1.0 302 Found\r\nLocation: file://%s/a.ts\r\n\r\n" % str(tmp_path).encode())
        else:
            writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: application/vnd.apple.mpegurl\r\n\r\n")
            writer.write(
                b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://%s/a.ts\n" % str(tmp_path).encode()
            )

    async def body():
        async with media_server(behaviour) as port:
            for name in ("a.ts", "a.m3u8"):
                with pytest.raises(SourceUnavailable):
                    async with network(f"http://127.0.0.1:{port}/{name}", open_s_max=1.5):
                        pass

    really(body)


def test_picture_of_enormous_size_is_not_decoded(really):
    head = bytearray(jpeg())
    place = head.index(b"\xff\xc0")
    head[place + 5 : place + 9] = (65_000).to_bytes(2) * 2

    async def behaviour(reader, writer, number):
        await reads_request(reader)
        writer.write(HEAD)
        for _ in range(50):
            writer.write(multipart(bytes(head)))
        await writer.drain()
        await asyncio.sleep(20)

    async def body():
        async with media_server(behaviour) as port:
            with pytest.raises(SourceUnavailable):
                async with network(f"http://127.0.0.1:{port}/cam", open_s_max=2, reconnect=None) as source:
                    await anext(source)

    really(body)


def test_stream_whose_size_changes_is_opened_again_with_the_new_size(really):
    async def behaviour(reader, writer, number):
        await reads_request(reader)
        writer.write(HEAD)
        if number == 1:
            await pictures(writer, 20)
        while True:
            writer.write(multipart(jpeg(50, 128, 96)))
            await writer.drain()
            await asyncio.sleep(0.02)

    async def body():
        async with (
            media_server(behaviour) as port,
            network(f"http://127.0.0.1:{port}/cam", reconnect=SOON) as source,
        ):
            shapes = []
            async for frame in source:
                if frame.data.shape not in shapes:
                    shapes.append(frame.data.shape)
                if len(shapes) == 2:
                    return shapes, source.health().reason

    shapes, reason = really(body)
    assert shapes == [(48, 64, 3), (96, 128, 3)]
    assert "the size changed from 64x48 to 128x96" in reason


def test_stream_of_a_wanted_size_goes_on_when_its_own_size_changes(really):
    async def behaviour(reader, writer, number):
        await reads_request(reader)
        writer.write(HEAD)
        for turn in range(ENDLESS):
            writer.write(multipart(jpeg(50, 128 if turn % 4 else 64, 96)))
            await writer.drain()
            await asyncio.sleep(0.02)

    async def body():
        async with (
            media_server(behaviour) as port,
            network(f"http://127.0.0.1:{port}/cam", size=(40, 30)) as source,
        ):
            for _ in range(12):
                assert (await anext(source)).data.shape == (30, 40, 3)
            return source.statistics()

    assert really(body).reconnections == 0


def test_process_ends_with_the_source_whatever_the_server_does(really):
    async def behaviour(reader, writer, number):
        await reads_request(reader)
        writer.write(HEAD)
        await pictures(writer, 20)
        await asyncio.sleep(20)

    async def body():
        async with media_server(behaviour) as port:
            async with network(f"http://127.0.0.1:{port}/cam") as source:
                await anext(source)
                pid = pid_of(source)
                started_s = time.monotonic()
            assert is_gone(pid)
            assert time.monotonic() - started_s < 5

    really(body)


def test_process_that_is_killed_is_replaced(really):
    async def body():
        async with (
            media_server(camera_server) as port,
            network(f"http://127.0.0.1:{port}/cam", reconnect=SOON) as source,
        ):
            await anext(source)
            os.kill(pid_of(source), signal.SIGKILL)
            async for frame in source:
                if frame.follows_gap:
                    return source.health().reason

    assert "the process that decodes ended" in really(body)


def test_process_that_hangs_is_replaced(really, impatient):
    async def body():
        async with (
            media_server(camera_server) as port,
            network(f"http://127.0.0.1:{port}/cam", reconnect=SOON) as source,
        ):
            await anext(source)
            pid = pid_of(source)
            os.kill(pid, signal.SIGSTOP)
            async for frame in source:
                if frame.follows_gap:
                    break
            assert is_gone(pid)
            return source.health().reason

    assert "is silent" in really(body)


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3, 0.6])
def test_cancelled_opening_ends_its_process_soon(really, delay_s):
    async def behaviour(reader, writer, number):
        await asyncio.sleep(20)

    async def body():
        async with media_server(behaviour) as port:

            async def use():
                async with network(f"http://127.0.0.1:{port}/cam", open_s_max=60):
                    pass

            task = asyncio.create_task(use())
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            started_s = time.monotonic()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - started_s < 5

    really(body)


def test_absent_server_is_an_error_and_is_waited_for_if_the_policy_says_so(really):
    async def body():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}/cam"
        with pytest.raises(SourceUnavailable, match="ConnectionRefusedError"):
            async with network(url):
                pass
        policy = Reconnection(first_s=0.02, most_s=0.1, from_start=True)
        async with network(url, reconnect=policy) as source:
            while source.health().failures < 2:
                await anyio.sleep(0.01)
            async with media_server(camera_server, port):
                await anext(source)

    really(body)


def test_address_with_a_password_is_not_on_any_command_line(really):
    async def body():
        async with (
            media_server(camera_server) as port,
            network(f"http://user:hunter2@127.0.0.1:{port}/cam") as source,
        ):
            await anext(source)
            command = Path(f"/proc/{pid_of(source)}/cmdline").read_bytes()
            assert b"hunter2" not in command
            assert "hunter2" not in repr(source)

    really(body)


def test_address_space_of_the_process_is_limited(really):
    async def body():
        async with media_server(camera_server) as port, network(f"http://127.0.0.1:{port}/cam") as source:
            limits = Path(f"/proc/{pid_of(source)}/limits").read_text()
        line = next(line for line in limits.splitlines() if line.startswith("Max address space"))
        assert int(line.split()[3]) == 4 << 30

    really(body)


def test_sound_of_a_stream_comes_in_windows(really):
    data = mpegts(90, sound=True)

    async def behaviour(reader, writer, number):
        await reads_request(reader)
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: video/mp2t\r\n\r\n" + data)
        await writer.drain()
        await asyncio.sleep(20)

    async def body():
        async with media_server(behaviour) as port:
            url = f"http://127.0.0.1:{port}/a.ts"
            async with network_audio(url, window_s=0.5, hop_s=0.25, keep="all") as source:
                return [await anext(source) for _ in range(6)]

    windows = really(body)
    assert [window.index for window in windows] == list(range(6))
    for window in windows[1:]:
        assert window.samples.shape == (8000,) and window.samples.dtype == np.float32
        spectrum = np.abs(np.fft.rfft(window.samples))
        assert abs(spectrum.argmax() * 2 - 440) <= 4
        assert 0.3 < np.abs(window.samples).max() <= 1.0


def test_format_that_this_pyav_lacks_is_an_error_with_the_remedy(really):
    async def body():
        with pytest.raises(SourceUnavailable, match=r"the format 'pigeons'.*pip install") as raised:
            async with network("http://127.0.0.1:1/cam", format="pigeons"):
                pass
        assert raised.value.is_permanent

    really(body)


def test_stream_without_the_wanted_kind_is_an_error(really):
    async def body():
        async with media_server(camera_server) as port:
            with pytest.raises(SourceUnavailable, match="expected audio, the stream holds video") as raised:
                async with network_audio(f"http://127.0.0.1:{port}/cam"):
                    pass
            assert raised.value.is_permanent

        async def sound(reader, writer, number):
            await reads_request(reader)
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + wav())

        async with media_server(sound) as port:
            with pytest.raises(SourceUnavailable):
                async with network(f"http://127.0.0.1:{port}/a.wav", open_s_max=3):
                    pass

    really(body)


@pytest.mark.parametrize(
    "arguments",
    [
        {"url": "file:///etc/passwd"},
        {"url": "/dev/video0"},
        {"url": ""},
        {"url": "rtsp://"},
        {"url": "http://:99999/"},
        {"url": "concat:a|b"},
        {"url": "http://a b/"},
        {"url": "http://a/\n"},
        {"url": "http://" + "a" * 5000},
        {"transport": "pigeon"},
        {"open_s_max": float("nan")},
        {"open_s_max": 0},
        {"size": (0, 0)},
        {"keep": "some"},
        {"queue_frames_max": 0},
    ],
    ids=lambda arguments: str(arguments)[:40],
)
def test_impossible_argument_is_rejected(arguments):
    with pytest.raises(InvalidArgument, match=r"aionn\.media\.network"):
        network(**{"url": "rtsp://user:hunter2@camera/", **arguments})
