"""The answers to the tabs of a page: the newest figures and pictures, made once for all of them.

Owns the sharing. Nothing runs in the background: the first tab that waits for something newer makes it, and the rest wait for that
one. So a page that is closed costs nothing, and ten tabs cost one encoding.

Invariants:
1. A picture is encoded once, however many tabs wait for it, and only if one does.
2. A tab gets the newest picture and none that is older than one that it had: a slow tab misses pictures, and delays no other.
3. Nothing is queued: a tab has one answer under way at most.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import DeviceUnavailable, Error
from aionn.runtime.clock import now_ns
from aionn.watch.collector import STREAMS_MAX, Collector
from aionn.watch.jpeg import JpegEncoder
from aionn.watch.streams import Shot

__all__ = ["Feed", "LocalUpstream", "Newest", "TabRequest", "Upstream", "framed"]

PICTURE_S = 1 / 15
"""Least time between two pictures: movement looks smooth from about 12 a second on, and each costs an encoding."""

FIGURES_S = 0.5
"""Least time between two snapshots: a person reads no faster."""

ANSWER_S_MAX = 1.0
"""An answer comes after this time without a new picture, so that figures come while a source is lost."""

POLL_S = 0.01
"""Interval in which a stream of another loop or thread is asked whether it has delivered; only while a tab waits."""

_T = TypeVar("_T")


class TabRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of what a tab has, sent when it has drawn it.

    Attributes:
        stream: The stream whose pictures it shows; -1 for none, as in a tab that is hidden.
        picture: Number of the last picture that it got of this stream, 0 for none.
        figures: Number of the last snapshot that it got.
    """

    stream: int = -1
    picture: int = 0
    figures: int = 0


class Upstream(Protocol):
    """Where figures and pictures come from."""

    async def figures(self) -> bytes:
        """A ``Snapshot`` as JSON."""
        ...

    async def picture(self, stream: int) -> tuple[npt.NDArray[np.uint8], Shot]:
        """The next picture of a stream; waits until there is one."""
        ...


class Newest(Generic[_T]):
    """The newest value of a kind, made when one of its readers waits for it.

    Args:
        make: Makes a value; cancelled with the reader that waits for it.
        period_s: Least time between two values.

    Attributes:
        number: Of the newest value; 0 before the first.
        value: The newest value; None before the first.
    """

    def __init__(self, make: Callable[[], Awaitable[_T]], period_s: float) -> None:
        self._make = make
        self._period_s = period_s
        self._next_s = 0.0
        self._is_being_made = False
        self._changed: anyio.Event | None = None
        self.number = 0
        self.value: _T | None = None

    async def newer(self, after: int) -> None:
        """Waits until the newest value has a higher number than ``after``; a number that was never given counts as 0."""
        after = after if after <= self.number else 0
        while self.number <= after:
            if self._is_being_made:
                self._changed = self._changed or anyio.Event()
                await self._changed.wait()
                continue
            self._is_being_made = True
            try:
                await anyio.sleep(max(0.0, self._next_s - time.monotonic()))
                self.value = await self._make()
                self.number += 1
                self._next_s = time.monotonic() + self._period_s
            finally:
                # A reader that was cancelled leaves the making to the next one.
                self._is_being_made = False
                changed, self._changed = self._changed, None
                if changed is not None:
                    changed.set()

    async def at_most_old(self, age_s: float) -> None:
        """Waits for a value unless the newest one was made within ``age_s``."""
        if not self.number or time.monotonic() - (self._next_s - self._period_s) > age_s:
            await self.newer(self.number)


class _Encoded(msgspec.Struct, frozen=True):
    """A picture as it is sent: what belongs to it, as JSON, and the JPEG file."""

    shot: bytes
    captured_ns: int
    jpeg: bytes


class Feed:
    """Answers the tabs.

    Args:
        upstream: Where figures and pictures come from.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._figures: Newest[bytes] = Newest(upstream.figures, FIGURES_S)
        self._pictures: dict[int, Newest[_Encoded]] = {}
        self._problem = ""

    async def snapshot(self) -> bytes:
        """A snapshot as JSON that is at most ``FIGURES_S`` old."""
        await self._figures.at_most_old(FIGURES_S)
        assert self._figures.value is not None
        return self._figures.value

    async def answer(self, request: TabRequest) -> bytes:
        """The figures and the picture that are newer than those of a tab; comes within about ``ANSWER_S_MAX``."""
        pictures = self._of(request.stream)
        with anyio.move_on_after(ANSWER_S_MAX):
            if pictures is None:
                await self._figures.newer(request.figures)
            else:
                await self._figures.at_most_old(FIGURES_S)
                await pictures.newer(request.picture)
        parts: dict[str, Any] = {}
        figures = self._figures
        if figures.value is not None and figures.number != request.figures:
            parts |= {"figures": msgspec.Raw(figures.value), "number": figures.number}
        jpeg = b""
        if pictures is not None and pictures.value is not None and pictures.number != request.picture:
            shown = pictures.value
            jpeg = shown.jpeg
            parts |= {"stream": request.stream, "picture": pictures.number, "shot": msgspec.Raw(shown.shot)}
            parts["age_ms"] = round(max(0, now_ns() - shown.captured_ns) / 1e6, 1)
        if self._problem:
            parts["problem"] = self._problem
        return framed(msgspec.json.encode(parts), jpeg)

    def _of(self, stream: int) -> Newest[_Encoded] | None:
        if not 0 <= stream < STREAMS_MAX or self._problem:
            return None
        pictures = self._pictures.get(stream)
        if pictures is None:
            try:
                encoder = JpegEncoder()
            except DeviceUnavailable as e:
                self._problem = str(e)
                return None
            pictures = Newest(lambda: self._encoded(stream, encoder), PICTURE_S)
            self._pictures[stream] = pictures
        return pictures

    async def _encoded(self, stream: int, encoder: JpegEncoder) -> _Encoded:
        pixels, shot = await self._upstream.picture(stream)
        try:
            jpeg = await anyio.to_thread.run_sync(encoder.encode, pixels)
        except Error as e:
            self._problem = str(e)
            jpeg = b""
        return _Encoded(msgspec.json.encode(shot), shot.captured_ns, jpeg)


def framed(header: bytes, body: bytes) -> bytes:
    """A message of the page: the header's length in four bytes, the header, and the body."""
    return len(header).to_bytes(4, "big") + header + body


class LocalUpstream:
    """Figures and pictures of a collector in this process, whose streams may run in another loop or thread.

    Args:
        collector: Has the streams.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def figures(self) -> bytes:
        """See ``Upstream``."""
        return msgspec.json.encode(self._collector.snapshot())

    async def picture(self, stream: int) -> tuple[npt.NDArray[np.uint8], Shot]:
        """See ``Upstream``."""
        delivered: list[tuple[npt.NDArray[np.uint8], Shot]] = []
        while stream >= len(self._collector.streams):
            await anyio.sleep(ANSWER_S_MAX)
        watched = self._collector.streams[stream]
        watched.request_picture(lambda pixels, shot: delivered.append((pixels.copy(), shot)))
        try:
            # An event would have to be set in this loop from another one's thread; a list may be read in any.
            while not delivered:
                await anyio.sleep(POLL_S)
        finally:
            if not delivered:
                watched.request_picture(None)
        return delivered[0]
