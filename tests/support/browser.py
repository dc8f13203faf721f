"""A page in headless Chromium: its console output, the visible parts of its plots, and what a reader could not read.

Owns one Chromium process and the words of its DevTools protocol that a test of a page needs, over a pair of pipes: no port, no
further package. Refuses to click and type; a test of an application needs a real driver for that.

Invariants:
1. Every wait ends: what Chromium does not answer in ``timeout_s`` is a ``BrowserError``.
2. The process and its profile are gone when the block is left.

Source: the DevTools protocol (messages end with a zero byte; descriptor 3 is read by Chromium, 4 is written).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

__all__ = [
    "Browser",
    "BrowserError",
    "OpenPage",
    "SeenPage",
    "Window",
    "find_browser",
    "open_browser",
    "see_page",
]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
    "--window-size=1200,900",
)

_LOOK = """
(() => {
  const seen = element => { const r = element.getBoundingClientRect(); return r.width >= 1 && r.height >= 1; };
  const plots = [...document.querySelectorAll('svg, canvas')].filter(seen);
  const marks = svg => [...svg.querySelectorAll('rect, path, circle, line, polyline')].filter(seen).length;
  const cut = [], crossing = [], pale = [], broken = [], width = document.documentElement.clientWidth;
  const rgb = text => (text.match(/[0-9.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].reduce((sum, value, i) => { const v = value / 255;
    return sum + [.2126, .7152, .0722][i] * (v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); }, 0);
  const SHOWN = {visibilityProperty: true, opacityProperty: true, checkVisibilityCSS: true, checkOpacity: true};
  const isInScrolledBox = element => {
    for (let e = element; e && e !== document.body; e = e.parentElement)
      if (e.matches('.scrolled') || ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)) return true;
    return false;
  };
  const paper = element => {
    for (let e = element; e; e = e.parentElement) {
      const box = e.tagName === 'g' && e.querySelector(':scope > rect');
      const colour = rgb(getComputedStyle(box || e)[box ? 'fill' : 'backgroundColor']);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode, parent = node.parentElement, style = getComputedStyle(parent);
    if (!node.data.trim() || !parent.checkVisibility(SHOWN) || parent.tagName === 'title') continue;
    const isDrawn = parent instanceof SVGElement, ink = rgb(isDrawn ? style.fill : style.color);
    const [a, b] = [light(ink), light(paper(parent))].sort((x, y) => y - x), got = (a + .05) / (b + .05);
    if (got < 4.5) pale.push(`${node.data.trim()}: ${got.toFixed(2)}`);
    const range = document.createRange();
    for (const word of node.data.matchAll(/[^\\s/.-]+/g)) {
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      const boxes = [...range.getClientRects()];
      if (word[0].length <= 36 && new Set(boxes.map(box => Math.round(box.top))).size > 1) broken.push(word[0]);
      // A menu that waits beside the window is not cut: only a word that is partly in it is.
      const isCut = box => box.left < width && box.right > 0 && (box.left < -.5 || box.right > width + .5);
      if (boxes.some(isCut) && !isInScrolledBox(parent)) cut.push(word[0]);
    }
  }
  for (const plot of plots) {
    const labels = [...plot.querySelectorAll(':scope > text, :scope > g > text')].map(e => [e, e.getBoundingClientRect()]);
    labels.forEach(([e, r], i) => labels.slice(0, i).forEach(([other, o]) => {
      if (r.left < o.right - 1 && o.left < r.right - 1 && r.top < o.bottom - 3 && o.top < r.bottom - 3)
        crossing.push(`${other.textContent} and ${e.textContent}`);
    }));
  }
  return JSON.stringify({
    title: document.title,
    text: document.body.innerText,
    plots: plots.map(marks),
    width: document.documentElement.scrollWidth,
    cut, crossing, pale, broken,
    paper: paper(document.body),
  });
})()
"""


class Window(NamedTuple):
    """A window: its size in pixels, and whether its reader wants a dark page."""

    width: int = 1200
    height: int = 900
    is_dark: bool = False


WINDOW = Window()
"""The window of a desktop, light."""


class BrowserError(Exception):
    """Chromium died, or did not answer in time."""


class SeenPage(msgspec.Struct, frozen=True):
    """The visible parts.

    Attributes:
        title: Of the document.
        text: As a reader sees it.
        plots: Of each visible plot, how many marks (bars, lines, points) are visible in it.
        width: How wide the page is in pixels: more than the window must be scrolled sideways.
        paper: Red, green and blue of the page's background.
        cut: Words that reach beyond the window, and are not in a box that is scrolled by itself.
        crossing: Pairs of labels of a drawing that overlap.
        pale: Texts whose contrast with what is behind them is below 4.5, and that contrast.
        broken: Words of at most 36 letters that are broken across lines; a hyphen, a slash and a full stop end a word.
        requests: Addresses that it fetched, beside itself.
        console: Errors and warnings on its console, and exceptions that were not caught.
    """

    title: str
    text: str
    plots: list[int]
    width: int
    paper: list[float] = []
    cut: list[str] = []
    crossing: list[str] = []
    pale: list[str] = []
    broken: list[str] = []
    requests: list[str] = []
    console: list[str] = []


def find_browser() -> str | None:
    """The path of a Chromium, or None without one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def see_page(
    path: Path, window: Window = WINDOW, *, timeout_s: float = 60.0, browser: str | None = None
) -> SeenPage:
    """Opens a file in Chromium and looks at it.

    Raises:
        BrowserError: There is no browser, it died, or it did not answer in time.
    """
    with open_browser(timeout_s=timeout_s, browser=browser) as opened:
        (page,) = opened.see(path, [window])
    return page


class Browser:
    """A Chromium that runs, and looks at one page after the other."""

    def __init__(self, talk: _Talk, timeout_s: float) -> None:
        self._talk = talk
        self._timeout_s = timeout_s

    def see(self, path: Path, windows: Sequence[Window]) -> list[SeenPage]:
        """Opens a file in one window after the other, and looks at it in each.

        Raises:
            BrowserError: The browser died, or did not answer in time.
        """
        self._talk.limit(self._timeout_s)
        return [_look(self._talk, path, window) for window in windows]

    def open(self, address: str, window: Window = WINDOW) -> OpenPage:
        """Opens a page in a tab that stays open; the limit counts for all that is asked of it.

        Raises:
            BrowserError: The browser died, or did not answer in time.
        """
        self._talk.limit(self._timeout_s)
        return OpenPage(self._talk, address, window)


@contextlib.contextmanager
def open_browser(*, timeout_s: float = 60.0, browser: str | None = None) -> Iterator[Browser]:
    """Starts a Chromium, whose start takes longer than most looks, and ends it.

    Args:
        timeout_s: Limit of the looks at one file.
        browser: Its program; None for the one on the PATH.

    Raises:
        BrowserError: There is none.
    """
    program = browser or find_browser()
    if program is None:
        raise BrowserError(f"expected one of {', '.join(NAMES)} on PATH, got none")
    with _started(program, timeout_s) as talk:
        yield Browser(talk, timeout_s)


class OpenPage:
    """A page in a tab.

    Args:
        talk: The browser.
        address: The page's.
        window: Its window.
    """

    def __init__(self, talk: _Talk, address: str, window: Window) -> None:
        self._talk = talk
        self._address = address
        self._target = talk.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = talk.ask("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.show_in(window)
        talk.forget_events()
        self.ask("Page.navigate", url=address)
        talk.wait_for("Page.loadEventFired")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A request of the protocol for this tab."""
        return self._talk.ask(method, session=self._session, **parameters)

    def show_in(self, window: Window) -> None:
        """Changes the window and the reader's setting."""
        size = {"width": window.width, "height": window.height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        setting = {"name": "prefers-color-scheme", "value": "dark" if window.is_dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[setting])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in JavaScript; a promise is awaited."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise BrowserError(f"{self._address}: {expression[:60]}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_until(self, condition: str) -> None:
        """Waits until an expression in JavaScript is true."""
        # In the page, so that the wait costs one request; the limit is that of the browser.
        self.evaluate(
            f"new Promise(done => {{ const look = () => {{ if ({condition}) done(true); else setTimeout(look, 20); }}; look(); }})"
        )

    def look(self) -> SeenPage:
        """The visible parts now, and all requests and complaints so far, of all tabs."""
        page = msgspec.json.decode(self.evaluate(_LOOK), type=SeenPage)
        requests = [n for n in self._talk.requests() if n != self._address and not n.startswith("data:")]
        return msgspec.structs.replace(page, requests=requests, console=self._talk.complaints())

    def save_picture(self, path: Path) -> None:
        """Writes the whole page as a PNG file."""
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        """Closes the tab."""
        self._talk.ask("Target.closeTarget", targetId=self._target)


def _look(talk: _Talk, path: Path, window: Window) -> SeenPage:
    page = OpenPage(talk, path.resolve().as_uri(), window)
    seen = page.look()
    page.close()
    return seen


class _Talk:
    """Requests, answers and events of the protocol."""

    def __init__(self, read_fd: int, write_fd: int, end_s: float) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._end_s = end_s
        self._sent = 0
        self._rest = b""
        self._events: list[dict[str, Any]] = []

    def limit(self, timeout_s: float) -> None:
        """Answers are expected within this time from now on."""
        self._end_s = time.monotonic() + timeout_s

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        try:
            os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        except OSError as e:
            raise BrowserError(f"{method}: the browser is gone: {e.strerror}") from e
        while True:
            answer = self._receive(method)
            if answer.get("id") == self._sent:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error'].get('message')}")
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(answer)

    def wait_for(self, event: str) -> None:
        while not any(found.get("method") == event for found in self._events):
            self._events.append(self._receive(event))

    def forget_events(self) -> None:
        """Leaves the events of an earlier page out of what is reported of the next one."""
        self._events.clear()

    def requests(self) -> list[str]:
        return [
            event["params"]["request"]["url"]
            for event in self._events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        found = []
        for event in self._events:
            parameters = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    found.append(f"exception: {parameters['exceptionDetails'].get('text')}")
                case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                    words = " ".join(str(a.get("value", a.get("description"))) for a in parameters["args"])
                    found.append(f"{parameters['type']}: {words}")
                case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                    found.append(f"{parameters['entry']['level']}: {parameters['entry']['text']}")
        return found

    def _receive(self, what: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left_s = self._end_s - time.monotonic()
            if left_s <= 0 or not select.select([self._read_fd], [], [], left_s)[0]:
                raise BrowserError(f"{what}: no answer from the browser in time")
            part = os.read(self._read_fd, 1 << 16)
            if not part:
                raise BrowserError(f"{what}: the browser ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded


@contextlib.contextmanager
def _started(program: str, timeout_s: float) -> Iterator[_Talk]:
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # The two ends get the numbers that Chromium expects in a shell between us: Python runs no code of ours after its fork.
    wrapper = f'exec 3<&{to_read} 4>&{from_write}; exec "$@"'
    try:
        with tempfile.TemporaryDirectory(prefix="aionn-browser-", ignore_cleanup_errors=True) as profile:
            command = ["/bin/bash", "-c", wrapper, "sh", program, *OPTIONS, f"--user-data-dir={profile}"]
            process = subprocess.Popen(
                command,
                pass_fds=(to_read, from_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            os.close(to_read)
            os.close(from_write)
            to_read = from_write = -1
            try:
                yield _Talk(from_read, to_write, time.monotonic() + timeout_s)
            finally:
                # The whole session: Chromium is a family of processes.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
    finally:
        for fd in (to_read, to_write, from_read, from_write):
            if fd >= 0:
                os.close(fd)
