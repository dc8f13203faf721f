"""RTSP from GStreamer's server with H.264, whose process is stopped, continued, killed and started again.

Source: the documentation of gst-rtsp-server. It needs the packages python3-gi, gir1.2-gst-rtsp-server-1.0, gstreamer1.0-rtsp and
gstreamer1.0-plugins-base, -good and -ugly of the distribution, for the Python of the distribution.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import anyio
import pytest

from aionn.media import Reconnection, network
from tests.support.media.slow_model import AnswerAges, slow_answers

pytestmark = pytest.mark.long

PYTHON = Path("/usr/bin/python3")
SOON = Reconnection(first_s=0.1, most_s=0.5)
START_S_MAX = 60
LIMIT_S = 150
SECONDS = float(os.environ.get("AIONN_STREAM_S", "20"))
"""The length of the stream to a slow model."""

RATE = 30
"""Pictures of the server in a second."""

SERVER = """
import sys
import gi
gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer
Gst.init(None)
if Gst.ElementFactory.find("x264enc") is None or Gst.ElementFactory.find("rtph264pay") is None:
    sys.exit("GStreamer has no x264enc or no rtph264pay")
if sys.argv[1] == "check":
    sys.exit()
server = GstRtspServer.RTSPServer()
server.set_address("127.0.0.1")
server.set_service(sys.argv[1])
factory = GstRtspServer.RTSPMediaFactory()
factory.set_launch(
    "( videotestsrc is-live=true ! video/x-raw,width=320,height=240,framerate=30/1"
    " ! x264enc tune=zerolatency speed-preset=ultrafast key-int-max=15 ! rtph264pay name=pay0 pt=96 )"
)
factory.set_shared(True)
server.get_mount_points().add_factory("/main", factory)
server.attach(None)
print(server.get_bound_port(), flush=True)
GLib.MainLoop().run()
"""


@pytest.fixture(scope="module", autouse=True)
def has_server():
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}")
    done = subprocess.run(
        [PYTHON, "-c", SERVER, "check"], capture_output=True, text=True, timeout=START_S_MAX, check=False
    )
    if done.returncode:
        pytest.skip(f"no RTSP server of GStreamer: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture
def watchdog():
    """In place of that of the package, whose limit is a minute."""


@contextlib.contextmanager
def serving(port=0):
    """Yields the process and its port."""
    process = subprocess.Popen([PYTHON, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def run(body):
    return asyncio.run(asyncio.wait_for(body(), LIMIT_S + SECONDS))


async def after_gap(source):
    async for frame in source:
        if frame.follows_gap:
            return frame


@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_server_that_is_stopped_and_killed_is_found_again(transport):
    async def body():
        with serving() as (process, port):
            options = {"size": (96, 96), "transport": transport, "reconnect": SOON}
            async with network(f"rtsp://127.0.0.1:{port}/main", **options) as source:
                for _ in range(30):
                    frame = await anext(source)
                assert frame.data.shape == (96, 96, 3) and frame.data.any()
                process.send_signal(signal.SIGSTOP)
                while source.health().state == "live":
                    await anyio.sleep(0.05)
                process.send_signal(signal.SIGCONT)
                await after_gap(source)
                process.kill()
                process.wait()
                while source.health().state == "live":
                    await anyio.sleep(0.05)
                with serving(port):
                    await after_gap(source)
                    return source.statistics()

    assert run(body).reconnections >= 2


def test_answers_stay_fresh_at_twice_the_rate_of_the_model():
    async def body():
        with serving() as (_, port):
            # The sender's clock is that of this machine, so that all that waits anywhere is in the age.
            options = {"size": (96, 96), "clock": "sender"}
            async with (
                network(f"rtsp://127.0.0.1:{port}/main", **options) as source,
                slow_answers(source, 2 / RATE) as results,
            ):
                ages, arrivals = AnswerAges(SECONDS), 0
                ends_s = time.monotonic() + SECONDS
                async for result in results:
                    if result.item.clock == "sender":
                        ages.add((result.finished_ns - result.item.captured_at_ns) / 1e9)
                    else:
                        arrivals += 1  # Before the first report of the sender's clock.
                    if time.monotonic() >= ends_s:
                        return ages, arrivals, source.statistics()

    ages, arrivals, account = run(body)
    print(
        f"{ages}; 95 % within {ages.quantile(0.95) * 1e3:.0f} ms; {arrivals} before the first report; {account}"
    )
    assert ages.growth_s() <= 1 / RATE
    assert max(ages.medians()) < 0.5
    assert account.reconnections == 0
    assert account.dropped > account.delivered / 2
