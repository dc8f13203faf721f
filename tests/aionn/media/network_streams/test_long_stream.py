"""RTSP at twice the rate of the model for half an hour: nothing queues up, and every disturbance is survived."""

import asyncio
import os
import random
import time

import anyio
import pytest

from aionn.media import Reconnection, network
from tests.support.media.media_server import media_server
from tests.support.media.rtsp_server import CLOCK_HZ, PICTURES_SDP, Picture, mpeg_picture, rtsp

pytestmark = pytest.mark.long

SECONDS = float(os.environ.get("AIONN_STREAM_S", "1800"))
"""The length of the stream; half an hour by default."""

PERIOD_S = 0.02
SOON = Reconnection(first_s=0.05, most_s=0.5)
DISTURBANCES = ("loss", "pause", "jump", "size", "cut", "silence")
CALM_S = 10.0
SIZES = ((64, 48), (96, 64))


@pytest.fixture
def watchdog():
    """In place of that of the package, whose limit is a minute."""


def test_delay_stays_bounded_at_twice_the_rate_of_the_model_through_every_disturbance(monkeypatch):
    monkeypatch.setattr("aionn.media.live.silence.SILENCE_S_MIN", 2.0)
    rng = random.Random(1)
    sent: list[float] = []
    injected: list[str] = []

    async def play(writer, number):
        size, jump, next_s, index = SIZES[number % 2], 0, time.monotonic() + CALM_S, 0
        begun_s = time.monotonic()
        while True:
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + CALM_S
                kind = DISTURBANCES[len(injected) % len(DISTURBANCES)]
                injected.append(kind)
                if kind == "pause":
                    await asyncio.sleep(0.7)
                elif kind == "jump":
                    jump += rng.choice((-1, 1)) * 1800 * CLOCK_HZ
                elif kind == "size":
                    size = SIZES[1 - SIZES.index(size)]
                elif kind == "cut":
                    writer.transport.abort()
                    return
                elif kind == "silence":
                    await asyncio.sleep(600)
                    return  # The client has left long ago: nothing more is injected for it.
            lost = injected and injected[-1] == "loss" and rng.random() < 0.2
            # The level is the number modulo 50, four levels apart, so that the encoder does not change it.
            level = len(sent) % 50 * 4 + 20
            sent.append(time.monotonic())
            stamp = round((time.monotonic() - begun_s) * CLOCK_HZ) + jump + 4000 * CLOCK_HZ
            yield b"" if lost else Picture(mpeg_picture(level, *size), stamp)
            index += 1
            await asyncio.sleep(max(0.0, begun_s + index * PERIOD_S - time.monotonic()))

    async def body():
        ages_s, behind = [], []
        async with (
            media_server(rtsp(play, sdp=PICTURES_SDP)) as port,
            network(
                f"rtsp://127.0.0.1:{port}/main", size=(32, 24), reconnect=SOON, open_s_max=60.0
            ) as source,
        ):
            ends_s = time.monotonic() + SECONDS
            while time.monotonic() < ends_s:
                frame = await anext(source)
                number = round((float(frame.data.mean()) - 20) / 4)
                behind.append((len(sent) - 1 - number) % 50)
                ages_s.append((time.monotonic_ns() - frame.captured_at_ns) / 1e9)
                await anyio.sleep(2 * PERIOD_S)
            return ages_s, behind, source.statistics()

    ages_s, behind, account = asyncio.run(asyncio.wait_for(body(), SECONDS + 60))
    print(f"{len(ages_s)} frames, {len(injected)} disturbances, {account}")
    late = sorted(ages_s[len(ages_s) // 2 :])
    early = sorted(ages_s[: len(ages_s) // 2])
    print(
        f"age: median {early[len(early) // 2] * 1e3:.1f} ms in the first half, {late[len(late) // 2] * 1e3:.1f} ms after, "
        f"95 % within {late[int(len(late) * 0.95)] * 1e3:.1f} ms"
    )
    # As old at the end as at the beginning; and most frames are among the newest that were sent.
    assert late[len(late) // 2] < early[len(early) // 2] + 0.1
    assert late[int(len(late) * 0.95)] < 1.0
    newest = sorted(behind[len(behind) // 2 :])
    assert newest[len(newest) // 2] < 20
    # Pictures of another size are scaled to the wanted one; the others end the connection.
    ending = [kind for kind in injected if kind in ("cut", "silence")]
    assert len(ending) - 1 <= account.reconnections <= len(ending) + 2
    assert set(DISTURBANCES) <= set(injected)
