"""Disturbances that a source lives through without a new connection, and delay that does not grow however long it runs."""

import asyncio
import time

import anyio
import pytest

from aionn.media import Reconnection, network
from tests.support.media.media_server import HEAD, jpeg, media_server, mpegts, multipart, reads_request
from tests.support.media.rtsp_server import rtsp, transport_packets

pytestmark = pytest.mark.slow

SOON = Reconnection(first_s=0.02, most_s=0.1)
CLOCKS_S = {"back": (3600, 0), "ahead": (0, 3600)}
"""Where the clock of the medium begins before the jump and after it."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("jump", CLOCKS_S)
def test_clock_that_jumps_is_a_gap_and_no_loss(really, jump):
    before_s, after_s = CLOCKS_S[jump]

    async def behaviour(reader, writer, number):
        await reads_request(reader)
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: video/mp2t\r\n\r\n")
        for start_s in (before_s, after_s):
            async for piece in transport_packets(mpegts(24, start_s=start_s), 0.8):
                writer.write(piece)
                await writer.drain()
        await asyncio.sleep(20)

    async def body():
        stamps, gaps = [], 0
        async with (
            media_server(behaviour) as port,
            network(f"http://127.0.0.1:{port}/a.ts", keep="all", reconnect=None) as source,
        ):
            while gaps == 0 or len(stamps) < 30:
                frame = await anext(source)
                gaps += frame.follows_gap
                stamps.append(frame.captured_at_ns)
                assert frame.captured_at_ns <= time.monotonic_ns()
            return stamps, gaps, source.statistics()

    stamps, gaps, account = really(body)
    assert (gaps, account.reconnections) == (1, 0)
    # A jump of an hour shows in no time of capture.
    assert max(stamps) - min(stamps) < 60e9


def test_pause_of_the_sender_is_no_loss_and_leaves_no_delay(really, monkeypatch):
    monkeypatch.setattr("aionn.media.live.silence.SILENCE_S_MIN", 10.0)

    async def behaviour(reader, writer, number):
        await reads_request(reader)
        writer.write(HEAD)
        for turn in range(10**6):
            writer.write(multipart(jpeg(turn % 256)))
            await writer.drain()
            await asyncio.sleep(0.7 if turn == 10 else 0.02)

    async def body():
        async with media_server(behaviour) as port, network(f"http://127.0.0.1:{port}/cam") as source:
            for _ in range(15):
                frame = await anext(source)
            return frame, source.statistics()

    frame, account = really(body)
    assert account.reconnections == 0 and not frame.follows_gap


@pytest.mark.parametrize(
    "damage",
    [
        "zeros",
        pytest.param("noise", marks=pytest.mark.thorough),
        *(pytest.param(way, marks=pytest.mark.long) for way in ("cut", "empty", "text")),
    ],
)
def test_corrupt_picture_among_good_ones_ends_nothing(really, damage):
    good = jpeg(200)
    middle = len(good) // 2
    bad = {
        "zeros": good[:middle] + bytes(len(good) - middle),
        "cut": good[:middle],
        "noise": bytes(range(256)) * 4,
        "empty": b"",
        "text": b"<html>not a picture</html>",
    }[damage]

    async def behaviour(reader, writer, number):
        await reads_request(reader)
        writer.write(HEAD)
        for turn in range(10**6):
            writer.write(multipart(bad if turn % 4 == 3 else good))
            await writer.drain()
            await asyncio.sleep(0.01)

    async def body():
        async with (
            media_server(behaviour) as port,
            network(f"http://127.0.0.1:{port}/cam", format="mpjpeg", reconnect=SOON) as source,
        ):
            levels = [float((await anext(source)).data.mean()) for _ in range(40)]
            return levels, source.statistics()

    levels, account = really(body)
    assert account.reconnections == 0
    assert sum(abs(level - 200) < 8 for level in levels) >= 20


@pytest.mark.thorough
def test_rtsp_stream_whose_size_changes_is_opened_again_with_the_new_size(really):
    async def play(writer, number):
        if number == 1:
            async for piece in transport_packets(mpegts(30), 1.0):
                yield piece
        while True:
            async for piece in transport_packets(mpegts(60, 128, 96), 2.0):
                yield piece

    async def body():
        shapes = []
        async with (
            media_server(rtsp(play)) as port,
            network(f"rtsp://127.0.0.1:{port}/main", reconnect=SOON) as source,
        ):
            async for frame in source:
                if frame.data.shape not in shapes:
                    shapes.append(frame.data.shape)
                if len(shapes) == 2:
                    return shapes, frame, source.statistics()

    shapes, frame, account = really(body)
    assert shapes == [(48, 64, 3), (96, 128, 3)]
    assert frame.follows_gap and account.reconnections == 1


@pytest.mark.parametrize("seconds", [1.5, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_delay_does_not_grow_at_twice_the_rate_of_the_consumer(seconds):
    """200 pictures a second to a consumer that takes 100 of them."""
    sent = 0

    async def behaviour(reader, writer, number):
        nonlocal sent
        await reads_request(reader)
        writer.write(HEAD)
        begun_s = time.monotonic()
        while True:
            writer.write(multipart(jpeg(sent % 128 * 2)))
            sent += 1
            await writer.drain()
            await asyncio.sleep(max(0.0, begun_s + sent * 0.005 - time.monotonic()))

    async def body():
        behind = []
        async with media_server(behaviour) as port, network(f"http://127.0.0.1:{port}/cam") as source:
            ends_s = time.monotonic() + seconds
            while time.monotonic() < ends_s:
                level = round(float((await anext(source)).data.mean()) / 2)
                behind.append((sent - 1 - level) % 128)
                await anyio.sleep(0.01)
            return behind, source.statistics()

    behind, account = asyncio.run(asyncio.wait_for(body(), seconds + 25))
    # Pictures that the newest one of the sender is ahead of the one that is taken: some are on the way, at any time as many.
    last = sorted(behind[len(behind) // 2 :])
    assert last[len(last) // 2] < 40, behind
    assert account.reconnections == 0
