"""The watch page in a browser: it moves, can be read on a phone and on a wide screen, light and dark, and complains of nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import anyio
import numpy as np
import pytest

from aionn.media import Frame, Health, LiveStatistics
from aionn.runtime.clock import now_ns
from aionn.watch import Collector, Finding, WatchPage
from aionn.watch.collector import DeviceFigures
from tests.support.browser import Window, find_browser, open_browser

pytest.importorskip("uvicorn", reason="uvicorn and websockets are not installed")
pytest.importorskip("av", reason="PyAV is not installed")

WINDOWS = [Window(width, is_dark=is_dark) for width in (360, 1400) for is_dark in (False, True)]
PAPER = {False: [255, 255, 255], True: [20, 23, 27]}
SERVED = DeviceFigures("litert-cpu", 1234, 1, 2, 100, 3, {"expired": 4}, 5, 6, clients=7)
START_S_MAX = 60

needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium on PATH")


class _Camera:
    """A live source that was lost for a long reason."""

    def statistics(self) -> LiveStatistics:
        return LiveStatistics(
            presented=100,
            delivered=90,
            dropped=9,
            queued=1,
            held_back=0,
            late=0,
            lost=3,
            corrupt=1,
            reconnections=2,
        )

    def health(self) -> Health:
        return Health(
            "waiting", now_ns(), "stream rtsp://camera.local/main: <b>the server is silent</b>", 1, 2
        )


@pytest.fixture
def watched() -> Iterator[str]:
    """The address of a page whose stream moves, in a thread: the browser is awaited by this one."""
    started, address, stop = threading.Event(), [""], threading.Event()

    async def run() -> None:
        collector = Collector("shapes_int8.tflite on <i>litert-cpu</i>")
        video = collector.add_stream("video", within_ns=33_000_000, source=_Camera())
        audio = collector.add_stream("audio", within_ns=100_000_000)
        collector.add_device_figures(lambda: SERVED)
        async with WatchPage(collector, port=0) as page:
            address[0] = page.url
            started.set()
            for index in range(1_000_000):
                if stop.is_set():
                    return
                at_ns = now_ns()
                # The latency changes from second to second, so that its line is not flat.
                captured_ns = at_ns - 5_000_000 * (1 + at_ns // 1_000_000_000 % 5)
                frame = Frame(np.full((48, 64, 3), index % 256, np.uint8), captured_ns, index, 0.0)
                video._placed[id(frame)] = captured_ns + 1_000_000
                found = [Finding("cat & <b>dog</b>", 0.9, (0.1, 0.1, 0.6, 0.7)), Finding("other", 0.5)]
                for stream in (video, audio):
                    status = ("on_time", "late", "dropped")[index % 3]
                    stream.add_item(frame, status, at_ns, found, device_ns=1_000_000)  # type: ignore[arg-type]
                await anyio.sleep(0.02)

    thread = threading.Thread(target=anyio.run, args=(run,))
    thread.start()
    try:
        assert started.wait(START_S_MAX), "it did not start"
        yield address[0]
    finally:
        stop.set()
        thread.join(START_S_MAX)


@pytest.mark.slow
@needs_browser
def test_page_moves_and_can_be_read(watched: str) -> None:
    with open_browser(timeout_s=100) as browser:
        page = browser.open(watched)
        page.wait_until("Number(document.getElementById('picture').dataset.picture) >= 2")
        lines = "[...document.querySelectorAll('#plots polyline')]"
        page.wait_until(f"{lines}.length === 4 && {lines}.every(line => line.points.length >= 3)")
        page.evaluate("window.before = document.getElementById('picture').toDataURL()")
        page.wait_until("document.getElementById('picture').toDataURL() !== window.before")
        for window in WINDOWS:
            page.show_in(window)
            seen = page.look()
            where = f"{window.width} pixels, {'dark' if window.is_dark else 'light'}"
            assert seen.width <= window.width, f"{where}: the page is {seen.width} wide"
            assert (seen.cut, seen.broken, seen.crossing, seen.pale) == ([], [], [], []), where
            assert seen.paper == PAPER[window.is_dark], where
            assert sum(marks > 0 for marks in seen.plots) >= 4, where
            assert seen.console == [] and all(name.startswith("ws://127.0.0.1:") for name in seen.requests)
            assert (
                "cat & <b>dog</b> 90 %" in seen.text.replace("\xa0", " ")
                and "the server is silent" in seen.text
            )
            assert "Nothing comes from video: stream rtsp://camera.local/main: <b>the server" in seen.text
            assert "shapes_int8.tflite on <i>litert-cpu</i>" in seen.text
            assert "on arrival: 3; expired: 4" in seen.text.replace("\xa0", " ")
        assert page.evaluate("document.querySelector('#devices thead').textContent").startswith(
            "deviceclients"
        )
        check_names(page)
        # The keyboard reaches the controls, and a page that is paused asks for nothing.
        page.evaluate("document.getElementById('pause').focus()")
        for kind in ("keyDown", "keyUp"):
            page.ask(
                "Input.dispatchKeyEvent", type=kind, key=" ", code="Space", text=" ", windowsVirtualKeyCode=32
            )
        assert page.evaluate("document.getElementById('state').textContent") == "paused"
        assert page.evaluate("document.getElementById('pause').getAttribute('aria-pressed')") == "true"


def check_names(page) -> None:  # type: ignore[no-untyped-def]
    """Every control, picture and table has a name in the tree that screen readers use."""
    nodes = page.ask("Accessibility.getFullAXTree")["nodes"]
    named = {}
    for node in nodes:
        role = node.get("role", {}).get("value")
        if not node.get("ignored") and role in ("button", "checkbox", "combobox", "image", "img", "table"):
            named.setdefault(role, []).append(node.get("name", {}).get("value", ""))
    assert all(all(names) for names in named.values()), named
    assert named["button"] == ["Pause"] and named["checkbox"] and named["combobox"]
    pictures = named.get("image", []) + named.get("img", [])
    assert any(name.startswith("Newest frame: ") for name in pictures)
    assert sum(name.startswith(("Latency of ", "Results of ")) for name in pictures) == 4
    assert len(named["table"]) >= 3
