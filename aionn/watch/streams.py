"""A stream that is watched: its figures, its source, and the newest picture for a page that asks for one.

Owns the reading of clocks and of items; ``figures`` counts. While no page asks, a picture costs one comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.media import Health, LiveStatistics, SourceStatistics
from aionn.runtime.clock import now_ns
from aionn.watch.detections import Finding, plain_findings
from aionn.watch.figures import FINDINGS_MAX, Outcome, SourceFigures, StreamFigures, StreamSnapshot

if TYPE_CHECKING:
    from aionn.runtime.executions.results import StreamResult
    from aionn.runtime.memory.real_values import Writer

__all__ = ["PICTURE_SIDE_MAX", "Deliver", "Shot", "WatchedStream", "reduced"]

PICTURE_SIDE_MAX = 640
"""Longest side of a picture on the page: enough for a screen beside the plots, and 1.2 MB at most."""

PLACED_MAX = 1024
"""Items between their buffer and their result: a burst has at most 64 buffers. More are items of streams that were broken off."""


class Shot(msgspec.Struct, frozen=True):
    """The description of a picture.

    Attributes:
        index: Number of the item in its source.
        captured_ns: When it was captured.
        latency_ms: From its capture to its result.
        status: Its outcome.
        findings: The model's answer.
    """

    index: int
    captured_ns: int
    latency_ms: float
    status: str
    findings: tuple[Finding, ...] = ()


Deliver = Callable[[npt.NDArray[np.uint8], Shot], None]
"""Takes a picture, uint8 ``[height, width, 3]``; copies it before it returns."""


class _Counts(Protocol):
    """A source that counts; ``health`` is there for live sources."""

    def statistics(self) -> SourceStatistics: ...


def reduced(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A view of a picture with every n-th pixel, so that no side is longer than ``PICTURE_SIDE_MAX``."""
    step = -(-max(pixels.shape[:2]) // PICTURE_SIDE_MAX)
    return pixels if step <= 1 else pixels[::step, ::step]


class WatchedStream:
    """Counts a stream's results. Made by ``Collector.add_stream``.

    Args:
        name: Shown.
        within_ns: An item is on time if its result is there so long after its capture; None without deadlines.
        source: Counts what happens before the stream; None if nothing does.

    Attributes:
        figures: The counts.
        source: See above; may be set when the source is open.
    """

    def __init__(self, name: str, *, within_ns: int | None, source: _Counts | None) -> None:
        self.figures = StreamFigures(name, within_ns=within_ns)
        self.source = source
        self._placed: dict[int, int] = {}
        self._deliver: Deliver | None = None

    @property
    def name(self) -> str:
        """The stream's name."""
        return self.figures.name

    def writer(self, write: Writer) -> Writer:
        """The writer, so that the time of its call is noted: then the stages of items are measured."""
        placed = self._placed

        def write_and_note(item: Any, view: Any) -> None:
            if len(placed) >= PLACED_MAX:
                placed.clear()
            placed[id(item)] = now_ns()
            write(item, view)

        return write_and_note

    def add(self, result: StreamResult[Any], findings: Sequence[Finding] = ()) -> None:
        """Counts a result of ``Burst.stream``.

        Args:
            result: It; its item has ``captured_at_ns``, and ``data`` if it is a picture.
            findings: The model's answer, the most certain one first.
        """
        self.add_item(
            result.item,
            result.status,
            result.finished_ns,
            findings,
            device_ns=result.timing.time_on_device_ns,
        )

    def add_item(
        self,
        item: Any,
        status: Outcome,
        finished_ns: int,
        findings: Sequence[Finding] = (),
        *,
        device_ns: int | None = None,
    ) -> None:
        """Counts an item of a stream that is not a burst's; see ``StreamFigures.add``."""
        captured_ns, finished_ns = int(item.captured_at_ns), int(finished_ns)
        placed_ns = self._placed.pop(id(item), None)
        self.figures.add(
            status,
            captured_ns,
            finished_ns,
            placed_ns=placed_ns,
            device_ns=device_ns,
            findings=findings,
        )
        if self._deliver is not None or not self.figures.has_pictures:
            self._show(item, status, finished_ns, findings)

    def request_picture(self, deliver: Deliver | None) -> None:
        """Has ``deliver`` called with the next picture, once; None takes that back. May be called in any thread."""
        self._deliver = deliver

    def _show(self, item: Any, status: Outcome, finished_ns: int, findings: Sequence[Finding]) -> None:
        pixels = getattr(item, "data", None)
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 3:
            return
        if pixels.shape[2] != 3 or not pixels.size:
            return
        self.figures.has_pictures = True
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            captured_ns = int(item.captured_at_ns)
            latency_ms = round((finished_ns - captured_ns) / 1e6, 2)
            found = plain_findings(findings, FINDINGS_MAX)
            shot = Shot(int(getattr(item, "index", 0)), captured_ns, latency_ms, status, found)
            deliver(reduced(pixels), shot)

    def snapshot(self, at_ns: int) -> StreamSnapshot:
        """The figures now."""
        source = None if self.source is None else _source_figures(self.source, at_ns)
        return self.figures.snapshot(at_ns, source)


def _source_figures(source: _Counts, at_ns: int) -> SourceFigures:
    counts = source.statistics()
    figures = SourceFigures(
        presented=counts.presented,
        delivered=counts.delivered,
        dropped=counts.dropped,
        queued=counts.queued,
    )
    if not isinstance(counts, LiveStatistics):
        return figures
    read_health: Callable[[], Health] | None = getattr(source, "health", None)
    health = None if read_health is None else read_health()
    return msgspec.structs.replace(
        figures,
        state="" if health is None else health.state,
        since_s=0.0 if health is None else round(max(0, at_ns - health.since_ns) / 1e9, 1),
        reason="" if health is None else health.reason,
        lost=counts.lost,
        corrupt=counts.corrupt,
        reconnections=counts.reconnections,
        delay_ms=round(counts.delay_ns / 1e6, 1),
    )
