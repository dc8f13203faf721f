"""RTSP at twice the rate of the model for half an hour: nothing queues up, and every disturbance is survived."""

import asyncio
import os
import random
import time

import pytest

from aionn.media import Reconnection, network
from tests.support.media.media_server import media_server
from tests.support.media.rtsp_server import CLOCK_HZ, PICTURES_SDP, Picture, mpeg_picture, rtsp
from tests.support.media.slow_model import AnswerAges, slow_answers

pytestmark = pytest.mark.long

SECONDS = float(os.environ.get("AIONN_STREAM_S", "1800"))
"""The length of the stream; half an hour by default."""

PERIOD_S = 0.02
SOON = Reconnection(first_s=0.05, most_s=0.5)
DISTURBANCES = ("loss", "pause", "jump", "size", "cut", "silence")
CALM_S = 10.0
SIZES = ((64, 48), (96, 64))

NUMBERS = 10_000
"""A picture shows the last four digits of its number, which come again after 200 s."""


@pytest.fixture
def watchdog():
    """In place of that of the package, whose limit is a minute."""


def numbered(number, size):
    """A picture of four stripes, whose grey levels are the digits."""
    first, *further = (20 + 24 * int(digit) for digit in f"{number % NUMBERS:04}")
    return mpeg_picture(first, *size, *further)


def number_of(pixels, newest):
    """The number of a picture of 96 x 96 pixels, by the number of the newest one that was sent."""
    stripes = (pixels[:, first + 6 : first + 18].mean() for first in range(0, 96, 24))
    shown = int("".join(str(round((stripe - 20) / 24)) for stripe in stripes))
    return newest - (newest - shown) % NUMBERS


def test_delay_stays_bounded_at_twice_the_rate_of_the_model_through_every_disturbance(monkeypatch):
    monkeypatch.setattr("aionn.media.live.silence.SILENCE_S_MIN", 2.0)
    rng = random.Random(1)
    sent_ns: list[int] = []
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
            picture = numbered(len(sent_ns), size)
            sent_ns.append(time.monotonic_ns())
            stamp = round((time.monotonic() - begun_s) * CLOCK_HZ) + jump + 4000 * CLOCK_HZ
            yield b"" if lost else Picture(picture, stamp)
            index += 1
            await asyncio.sleep(max(0.0, begun_s + index * PERIOD_S - time.monotonic()))

    async def body():
        async with media_server(rtsp(play, sdp=PICTURES_SDP)) as port:
            options = {"size": (96, 96), "reconnect": SOON, "open_s_max": 60.0}
            async with (
                network(f"rtsp://127.0.0.1:{port}/main", **options) as source,
                slow_answers(source, 2 * PERIOD_S) as results,
            ):
                # From the sending, which the clock of the arrival cannot see: what waits in sockets is in it.
                ages, numbers = AnswerAges(SECONDS), []
                ends_s = time.monotonic() + SECONDS
                async for result in results:
                    numbers.append(number_of(result.item.data, len(sent_ns) - 1))
                    ages.add((result.finished_ns - sent_ns[numbers[-1]]) / 1e9)
                    if time.monotonic() >= ends_s:
                        return ages, numbers, source.statistics()

    ages, numbers, account = asyncio.run(asyncio.wait_for(body(), SECONDS + 60))
    print(f"{len(injected)} disturbances, {len(sent_ns)} pictures sent, {account}")
    print(f"{ages}; 95 % within {ages.quantile(0.95) * 1e3:.0f} ms")
    # No picture twice, none before an earlier one; and answers are as old at the end as at the beginning.
    assert numbers == sorted(set(numbers))
    assert ages.growth_s() <= PERIOD_S
    assert max(ages.medians()) < 0.5 and ages.quantile(0.95) < 1.0
    # Pictures of another size are scaled to the wanted one; the others end the connection.
    ending = [kind for kind in injected if kind in ("cut", "silence")]
    assert len(ending) - 1 <= account.reconnections <= len(ending) + 2
    assert set(DISTURBANCES) <= set(injected)
