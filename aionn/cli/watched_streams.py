"""A source through a burst, watched: what ``demo``, ``stream`` and ``watch`` have in common.

Owns the live table, and the page where it is asked for. ``aionn.watch`` counts.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import numpy as np

from aionn.errors import InvalidArgument
from aionn.media import AudioWindow, Frame, LiveSource, Recorder, Source, record
from aionn.reports.terminal import PROGRESS_FIRST_S, live_lines, print_line, report_line, table_lines
from aionn.runtime.clock import now_ns
from aionn.runtime.executions.burst import Burst
from aionn.runtime.memory.arguments import Array, TensorSpec
from aionn.runtime.memory.real_values import Writer
from aionn.watch import Collector, Finding, WatchedStream, WatchPage, best_class, postprocessed_boxes
from aionn.watch.collector import milliseconds
from aionn.watch.server import PORT

__all__ = [
    "Describe",
    "Latency",
    "classifier",
    "dropped_count",
    "latency_of",
    "presented_count",
    "print_recording",
    "recording_report",
    "recording_to",
    "served_page",
    "show_live",
    "stream_and_count",
    "warm_up",
    "watch_address",
]

REFRESH_S = 0.25
"""Interval between two drawings of the live table: short enough to look alive, long enough that no frame misses its deadline."""

LINE_S = 60.0
"""Interval between two lines about a stream in a file or a pipe: it may run for days, and a log should not consist of its lines."""

DETECTOR_OUTPUTS = 4
"""Outputs of a detector that ends in ``TFLite_Detection_PostProcess``."""

_I = TypeVar("_I", Frame, AudioWindow)

Describe = Callable[[Sequence[Array]], tuple[Finding, ...]]
"""From a model's outputs to its answer, the most certain finding first."""


class Latency(msgspec.Struct, frozen=True):
    """Latencies from capture to result in milliseconds; None without a result."""

    p50: float | None = None
    p99: float | None = None
    max: float | None = None

    def __str__(self) -> str:
        shown = [f"{milliseconds(value)} ms" if value is not None else "-" for value in (self.p50, self.p99)]
        return f"p50 {shown[0]}, p99 {shown[1]}"


def latency_of(stream: WatchedStream) -> Latency:
    """From capture to result, of all results."""
    found = stream.figures.latency
    return Latency(found.p50, found.p99, found.max)


def presented_count(stream: WatchedStream) -> int:
    """Number of items that the source presented."""
    return 0 if stream.source is None else stream.source.statistics().presented


def dropped_count(stream: WatchedStream) -> int:
    """Number of items without an answer: dropped at the source, or at their deadline."""
    at_source = 0 if stream.source is None else stream.source.statistics().dropped
    return at_source + stream.figures.counts["dropped"]


def classifier(outputs: Sequence[TensorSpec], labels: Sequence[str]) -> Describe:
    """The meaning of a model's outputs: boxes of a detector with the usual four outputs, else the best class of the first one."""
    shapes = [spec.dimensions for spec in outputs]
    if len(shapes) == DETECTOR_OUTPUTS and len(shapes[0]) == 3 and shapes[0][2] == 4:
        return lambda found: postprocessed_boxes(found, labels)
    spec = outputs[0]

    def describe(found: Sequence[Array]) -> tuple[Finding, ...]:
        scores = found[0]
        return (
            (best_class(scores, labels, scale=spec.scale, zero_point=spec.zero_point),) if scores.size else ()
        )

    return describe


async def warm_up(burst: Burst, spec: TensorSpec) -> None:
    """One execution on zeros, so that the first frame does not pay for what is done once."""
    await burst.execute([np.zeros(spec.dimensions, dtype=spec.dtype)])


async def stream_and_count(
    stream: WatchedStream,
    source: Source[_I] | LiveSource[_I],
    burst: Burst,
    *,
    into: Writer,
    describe: Describe,
    within_ns: int,
    on_late: Any,
    measure: bool,
    recorder: Recorder | None = None,
    on_answer: Callable[[_I, Finding], None] | None = None,
) -> None:
    """Streams a source through a burst and counts every result.

    Args:
        stream: Counts.
        source: Entered and left here.
        burst: Executes.
        into: See ``Burst.stream``.
        describe: The meaning of the outputs.
        within_ns: An item is on time if its result is there so long after its capture.
        on_late: See ``Burst.stream``.
        measure: Whether the times by stage are wanted, which the page shows.
        recorder: Records the items that are read from the source; None records nothing.
        on_answer: Called with each item that has a result, and its first finding.
    """
    async with source as items:
        stream.source = source
        results = burst.stream(
            items if recorder is None else recorder.through(items),
            into=stream.writer(into) if measure else into,
            deadline=lambda item: item.captured_at_ns + within_ns,
            on_late=on_late,
            measure=measure,
        )
        async for result in results:
            findings = describe(result.outputs) if result.outputs else ()
            stream.add(result, findings)
            if on_answer is not None and findings:
                on_answer(result.item, findings[0])


@contextlib.asynccontextmanager
async def served_page(collector: Collector, at: str | None) -> AsyncIterator[WatchPage | None]:
    """The page while the block runs, its address printed on standard error; None means that none is wanted.

    Args:
        collector: Has the figures.
        at: ``HOST:PORT``, either may be left out; None means no page.

    Raises:
        InvalidArgument: The port is used, or the address is not one of this machine.
        DeviceUnavailable: A package is missing.
    """
    if at is None:
        yield None
        return
    host, port = parsed_address(at)
    async with WatchPage(collector, host=host, port=port) as page:
        report_line(page.url, lead="watch:", wraps=False, stream=sys.stderr)
        yield page


@contextlib.asynccontextmanager
async def recording_to(path: Path | None) -> AsyncIterator[Recorder | None]:
    """A recorder while the block runs; None means that nothing is recorded.

    Raises:
        InvalidArgument: The file exists, or cannot be created.
    """
    if path is None:
        yield None
        return
    async with record(path) as recorder:
        yield recorder


def recording_report(path: Path | None, recorder: Recorder | None) -> dict[str, Any]:
    """The part of a command's report about a recording; empty without one."""
    if recorder is None:
        return {}
    counts = recorder.statistics()
    return {
        "recording": {
            "file": str(path),
            "items": counts.written,
            "bytes": counts.bytes,
            "left_out": counts.left_out + counts.queued,
            "problem": counts.problem,
        }
    }


def print_recording(report: dict[str, Any]) -> None:
    """Prints that part; nothing where it is missing."""
    found = report.get("recording")
    if found is None:
        return
    problem = f"; it ended early: {found['problem']}" if found["problem"] else ""
    print_line(
        f"{found['items']} items, {found['bytes'] / 1e6:.1f} MB, {found['left_out']} left out{problem}",
        lead=f"recorded to {found['file']}",
    )


def watch_address(is_wanted: bool, at: str | None) -> str | None:
    """The text of ``--watch-at``, or ``""`` for its default where ``--watch`` alone is given; None means no page.

    Raises:
        InvalidArgument: It is not an address.
    """
    if at is not None:
        parsed_address(at)
    return at if at is not None else "" if is_wanted else None


def parsed_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, ``HOST``, ``:PORT`` or ``PORT``; ``127.0.0.1`` and 8470 where they are left out.

    Raises:
        InvalidArgument: It has another form.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise InvalidArgument(f"--watch-at: expected HOST:PORT such as 127.0.0.1:{PORT}, got {text!r}")
    alone, host, port = found["alone"], found["host"], found["port"]
    return host or "127.0.0.1", int(alone or port or PORT)


_ADDRESS = re.compile(
    r"(?P<alone>[0-9]{1,5})|(?P<host>[^:\[\]]*|\[[0-9a-fA-F:.]+\])(?::(?P<port>[0-9]{1,5}))?"
)


HEADS = ("stream", "per s", "on time", "late", "dropped", "p50 ms", "p99 ms", "recognised", "certain")

LEAST = ("p50 ms", "per s", "certain", "recognised", "p99 ms")
"""The columns that a narrow terminal loses; the counts stay."""


def _lines(title: str, collector: Collector, width: int) -> list[str]:
    rows = []
    for stream in collector.snapshot().streams:
        dropped = stream.dropped + (stream.source.dropped if stream.source is not None else 0)
        first = stream.findings[0] if stream.findings else None
        rows.append(
            (
                stream.name,
                f"{stream.per_second:.1f}",
                stream.on_time,
                stream.late,
                dropped,
                milliseconds(stream.latency.p50),
                milliseconds(stream.latency.p99),
                "-" if first is None else first.label,
                "-" if first is None else f"{first.score:.0%}",
            )
        )
    return table_lines(title, HEADS, rows, width, least=LEAST)


def _sentence(collector: Collector) -> str:
    """The counts of the streams so far, for a line in a file."""
    parts = []
    for stream in collector.snapshot().streams:
        dropped = stream.dropped + (stream.source.dropped if stream.source is not None else 0)
        latency = Latency(stream.latency.p50, stream.latency.p99, stream.latency.max)
        counts = f"{stream.on_time} on time, {stream.late} late, {dropped} dropped"
        parts.append(f"{stream.name} {stream.per_second:.1f} per s, {counts}, {latency}")
    return "; ".join(parts)


async def show_live(collector: Collector, *, finished: Callable[[], bool]) -> None:
    """Draws the streams until ``finished``; where standard error is not a terminal, prints a line each minute."""
    started_ns, next_s = now_ns(), PROGRESS_FIRST_S
    with live_lines() as show:
        while not finished():
            passed_s = (now_ns() - started_ns) / 1e9
            if show is not None:
                show(partial(_lines, f"{collector.title}   {passed_s:5.1f} s", collector))
            elif passed_s >= next_s:
                report_line(f"{collector.title}, {passed_s:.0f} s: {_sentence(collector)}", stream=sys.stderr)
                next_s = (passed_s // LINE_S + 1) * LINE_S
            await anyio.sleep(REFRESH_S)
