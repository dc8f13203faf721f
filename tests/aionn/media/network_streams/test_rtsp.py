"""RTSP over a server in Python: opened, lost in every way and opened again, and fresh frames after a pause of the event loop."""

import asyncio
import base64
import threading
import time

import pytest

from aionn.media import Reconnection, SourceUnavailable, network
from tests.support.media.media_server import media_server, mpegts, reads_request
from tests.support.media.rtsp_server import rtsp, transport_packets

pytestmark = pytest.mark.slow

SOON = Reconnection(first_s=0.02, most_s=0.1)
SECONDS = 3.0


async def whole(writer, number):
    data = mpegts(90)
    while True:
        async for piece in transport_packets(data, SECONDS):
            yield piece


def url_of(port, user=""):
    return f"rtsp://{user}127.0.0.1:{port}/main"


def test_frames_of_a_camera_come(really):
    async def body():
        async with media_server(rtsp(whole)) as port, network(url_of(port), size=(32, 24)) as source:
            frames = [await anext(source) for _ in range(10)]
            return frames, source.statistics()

    frames, account = really(body)
    assert [frame.data.shape for frame in frames] == [(24, 32, 3)] * 10
    assert account.presented == account.delivered + account.dropped + account.queued


def test_password_is_sent_and_a_wrong_one_is_an_error_that_does_not_show_it(really):
    right = b"Basic " + base64.b64encode(b"user:right")

    async def body():
        async with media_server(rtsp(whole, requires=right)) as port:
            async with network(url_of(port, "user:right@")) as source:
                await anext(source)
            with pytest.raises(SourceUnavailable, match="HTTPUnauthorizedError") as raised:
                async with network(url_of(port, "user:wrong@")):
                    pass
            assert raised.value.is_permanent
            assert "wrong" not in str(raised.value) and "user" not in str(raised.value)

    really(body)


@pytest.mark.parametrize(
    "method",
    [b"DESCRIBE", *(pytest.param(m, marks=pytest.mark.thorough) for m in (b"OPTIONS", b"SETUP", b"PLAY"))],
)
def test_server_that_falls_silent_while_opening_is_bounded(really, method):
    async def body():
        async with media_server(rtsp(whole, silent_at=method)) as port:
            started_s = time.monotonic()
            with pytest.raises(SourceUnavailable):
                async with network(url_of(port), open_s_max=1.5):
                    pass
            assert time.monotonic() - started_s < 10

    really(body)


def test_lost_packets_damage_some_frames_and_end_nothing(really):
    async def lossy(writer, number):
        count = 0
        async for piece in whole(writer, number):
            count += 1
            yield b"" if count % 25 == 7 else piece

    async def body():
        async with media_server(rtsp(lossy)) as port, network(url_of(port)) as source:
            for _ in range(40):
                await anext(source)
            return source.statistics()

    assert really(body).reconnections == 0


@pytest.mark.parametrize(
    "way",
    [
        "cut",
        pytest.param("silent", marks=pytest.mark.thorough),
        *(pytest.param(way, marks=pytest.mark.long) for way in ("teardown", "garbage")),
    ],
)
def test_lost_camera_is_opened_again(really, monkeypatch, way):
    monkeypatch.setattr("aionn.media.live.silence.SILENCE_S_MIN", 0.4)

    async def failing(writer, number):
        started_s = time.monotonic()
        async for piece in whole(writer, number):
            yield piece
            if number == 1 and time.monotonic() - started_s > 2.0:
                if way == "cut":
                    writer.transport.abort()
                elif way == "silent":
                    await asyncio.sleep(20)
                elif way == "garbage":
                    writer.write(b"\x00\xff" * 50_000)
                    await writer.drain()
                return

    async def body():
        async with media_server(rtsp(failing)) as port, network(url_of(port), reconnect=SOON) as source:
            async for frame in source:
                if frame.follows_gap:
                    return source.statistics(), source.health()

    account, health = really(body)
    assert account.reconnections >= 1
    assert health.state == "live"


@pytest.mark.thorough
def test_server_that_starts_again_and_waits_for_its_camera_is_not_given_up(really):
    """It knows no stream at first, then one without content, and then the camera's."""

    async def cut(writer, number):
        started_s = time.monotonic()
        async for piece in whole(writer, number):
            yield piece
            if number == 1 and time.monotonic() - started_s > 1.0:
                writer.transport.abort()
                return

    async def behaviour(reader, writer, number):
        if number == 2:
            await reads_request(reader)
            writer.write(b"RTSP/1.0 404 Not Found\r\nCSeq: 1\r\n\r\n")
        elif number == 3:
            await rtsp(cut, sdp=b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=test\r\nt=0 0\r\n")(
                reader, writer, number
            )
        else:
            await rtsp(cut)(reader, writer, number)

    async def body():
        async with media_server(behaviour) as port, network(url_of(port), reconnect=SOON) as source:
            async for frame in source:
                if frame.follows_gap:
                    return source.statistics(), source.health()

    account, health = really(body)
    assert (account.reconnections, health.state) == (1, "live")


@pytest.mark.thorough
def test_frame_is_fresh_after_the_loop_was_busy_for_a_second():
    """The server has a loop of its own, so that it continues during the pause."""
    port = 0
    ready, ends = threading.Event(), threading.Event()

    def serve():
        async def run():
            nonlocal port
            async with media_server(rtsp(whole)) as port:
                ready.set()
                while not ends.is_set():
                    await asyncio.sleep(0.01)

        asyncio.run(run())

    async def body():
        ages_ms = []
        async with network(url_of(port)) as source:
            for _ in range(20):
                await anext(source)
            for _ in range(3):
                time.sleep(1.0)
                frame = await anext(source)
                ages_ms.append((time.monotonic_ns() - frame.captured_at_ns) / 1e6)
                for _ in range(10):
                    await anext(source)
        return ages_ms

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(20)
        ages_ms = asyncio.run(asyncio.wait_for(body(), 40))
    finally:
        ends.set()
        thread.join(10)
    # Without the rule for stale frames it is a second; the machine may be slow.
    assert min(ages_ms) < 500
