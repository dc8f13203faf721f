"""Times of capture by the clock of the sender: over RTSP with the sender's reports, with clocks that are right, wrong and set."""

import asyncio
import itertools
import logging
import time

import pytest

from aionn.errors import InvalidArgument
from aionn.media import Reconnection, network, network_audio
from tests.support.media.media_server import media_server
from tests.support.media.rtsp_server import (
    CLOCK_HZ,
    PICTURES_SDP,
    Picture,
    SenderReport,
    mpeg_picture,
    rtsp,
)

pytestmark = pytest.mark.slow

SOON = Reconnection(first_s=0.02, most_s=0.1)
PERIOD_S = 0.04
STAMP_0 = 123_456_789
SIZE = 64, 48


class Camera:
    """A sender whose pictures are stamped when they are captured, and sent ``delay_s`` later."""

    def __init__(self, *, delay_s=0.0, clock_ahead_s=0.0, reports=True):
        self.delay_s = delay_s
        self.clock_ahead_s = clock_ahead_s
        self.reports = reports
        self.begun_s = 0.0

    async def play(self, writer, number):
        self.begun_s = time.monotonic()
        clock_s = time.time() + self.clock_ahead_s
        for index in range(10**6):
            stamp = STAMP_0 + round(index * PERIOD_S * CLOCK_HZ)
            if self.reports and index % 25 == 0:
                yield SenderReport(clock_s + index * PERIOD_S, stamp)
            left_s = self.begun_s + index * PERIOD_S + self.delay_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
            yield Picture(mpeg_picture(index % 200 + 20), stamp)

    def behaviour(self):
        return rtsp(self.play, sdp=PICTURES_SDP)


async def frames_of(camera, count, **options):
    async with (
        media_server(camera.behaviour()) as port,
        network(f"rtsp://127.0.0.1:{port}/main", size=SIZE, keep="all", **options) as source,
    ):
        return [await anext(source) for _ in range(count)]


def test_times_are_those_of_the_sender_and_show_the_delay_on_the_way(really):
    camera = Camera(delay_s=0.3)
    frames = really(lambda: frames_of(camera, 40, clock="sender"))
    by_sender = [frame for frame in frames if frame.clock == "sender"]
    assert len(by_sender) >= 20
    for frame in by_sender:
        # Each picture has its number as its level, some levels apart through the encoder.
        since_ns = frame.captured_at_ns - camera.begun_s * 1e9
        index = since_ns / (PERIOD_S * 1e9)
        assert abs(index - round(index)) < 0.25, "the time is that of a picture of the sender"
        level = (round(float(frame.data.mean())) - 20) % 200
        assert abs(level - round(index) % 200) <= 3
        # The delay of 0.3 s is on the way: the distance to the arrival is at least that.
        assert frame.uncertainty_ns >= 0.28e9
    steps = [b.captured_at_ns - a.captured_at_ns for a, b in itertools.pairwise(by_sender)]
    assert all(abs(step / (PERIOD_S * 1e9) - round(step / (PERIOD_S * 1e9))) < 0.05 for step in steps)


@pytest.mark.parametrize("ahead_s", [-3600.0, pytest.param(240.0, marks=pytest.mark.long)])
def test_sender_whose_clock_is_wrong_is_not_believed_and_logged_once(really, caplog, ahead_s):
    with caplog.at_level(logging.WARNING, logger="aionn.manager"):
        frames = really(lambda: frames_of(Camera(clock_ahead_s=ahead_s), 20, clock="sender"))
    assert {frame.clock for frame in frames} == {"arrival"}
    (record,) = caplog.records
    assert "the sender's clock" in record.message and f"{ahead_s:.1f} s ahead"[:4] in record.message


def test_sender_without_reports_gives_the_arrival(really):
    frames = really(lambda: frames_of(Camera(reports=False), 15, clock="sender"))
    assert {frame.clock for frame in frames} == {"arrival"}


@pytest.mark.long
def test_arrival_is_the_default_although_the_sender_reports(really):
    frames = really(lambda: frames_of(Camera(delay_s=0.3), 15))
    assert {frame.clock for frame in frames} == {"arrival"}


@pytest.mark.parametrize("jump_s", [-3600, pytest.param(3600, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_time_stamps_that_jump_are_a_gap_and_no_loss(really, jump_s):
    async def play(writer, number):
        for index in range(10**6):
            stamp = STAMP_0 + 3600 * CLOCK_HZ + round(index * PERIOD_S * CLOCK_HZ)
            stamp += jump_s * CLOCK_HZ if index >= 40 else 0
            yield Picture(mpeg_picture(20 + index % 200), stamp)
            await asyncio.sleep(PERIOD_S)

    async def body():
        gaps, stamps = 0, []
        async with (
            media_server(rtsp(play, sdp=PICTURES_SDP)) as port,
            network(f"rtsp://127.0.0.1:{port}/main", size=SIZE, keep="all", reconnect=SOON) as source,
        ):
            while gaps == 0 or len(stamps) < 50:
                frame = await anext(source)
                gaps += frame.follows_gap
                stamps.append(frame.captured_at_ns)
            return gaps, stamps, source.statistics()

    gaps, stamps, account = really(body)
    assert (gaps, account.reconnections) == (1, 0)
    assert max(stamps) - min(stamps) < 60e9, "a jump of an hour shows in no time of capture"


def test_impossible_clock_is_rejected():
    for make in (network, network_audio):
        with pytest.raises(InvalidArgument, match="expected arrival or sender, got 'ntp'"):
            make("rtsp://127.0.0.1/x", clock="ntp")
