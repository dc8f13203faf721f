"""``aionn watch``: a camera, a network stream or a file in a browser, without a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
from cyclopts import Parameter

from aionn.cli import interrupts
from aionn.cli.numbers import DEADLINE_MS_MAX, numbers
from aionn.cli.output import print_json
from aionn.cli.watched_streams import (
    dropped_count,
    latency_of,
    presented_count,
    print_recording,
    recording_report,
    recording_to,
    served_page,
    show_live,
)
from aionn.media import has_sound, named_source, shown_name
from aionn.reports.terminal import print_line
from aionn.runtime.clock import now_ns, to_ns
from aionn.watch import Collector

__all__ = ["watch"]

SECONDS_MAX = 31_622_400
"""A leap year, as for deadlines."""


def watch(
    source: str = "pattern:",
    /,
    *,
    seconds: Annotated[float | None, numbers(0, SECONDS_MAX, "seconds", is_open=True)] = None,
    deadline_ms: Annotated[float, numbers(0, DEADLINE_MS_MAX, "ms")] = 33.0,
    keep: Literal["latest", "all", "oldest"] = "latest",
    watch_at: str = "",
    record: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Show a camera, a network stream or a video in a browser: the picture, its age, losses and the source's health.

    aionn stream MODEL --source SOURCE --watch shows it with the answers of a model.

    Args:
        source: 0 or /dev/video0, a camera; camera:NAME; microphone:; rtsp://... or another address; screen:, this display;
            replay:FILE, a recording; a video file; pattern:, a test picture.
        seconds: Ends after so long; by default it ends with its source, or by Ctrl-C, with its report.
        deadline_ms: A picture is on time if it is here this long after its capture.
        keep: The frames that a slow machine gets: the latest one, all of them, or the oldest.
        watch_at: HOST:PORT of the page, 127.0.0.1:8470 by default; another host lets other machines connect.
        record: A new file for the items that are shown, with their times; replay:FILE presents them again.
        json: Print one JSON object at the end.
    """
    report = interrupts.run(
        _watch,
        source,
        seconds,
        to_ns(deadline_ms / 1e3, what="--deadline-ms"),
        keep,
        watch_at,
        record,
        not json,
    )
    if json:
        print_json(report)
    else:
        _print(report)
    return 0


async def _watch(
    name: str, seconds: float | None, within_ns: int, keep: Any, at: str, record: Path | None, live: bool
) -> dict[str, Any]:
    is_sound = has_sound(name)
    source: Any = named_source(name, keep=keep)
    collector = Collector(f"aionn watch {shown_name(name)}")
    stream = collector.add_stream("audio" if is_sound else "video", within_ns=within_ns, source=source)
    finished = anyio.Event()
    async with (
        recording_to(record) as recorder,
        served_page(collector, at),
        anyio.create_task_group() as tasks,
    ):
        if live:
            tasks.start_soon(lambda: show_live(collector, finished=finished.is_set))
        try:
            with (
                interrupts.ends_early(),
                anyio.move_on_after(math.inf if seconds is None else seconds),
            ):
                async with source as items:
                    async for item in items if recorder is None else recorder.through(items):
                        arrived_ns = now_ns()
                        is_late = arrived_ns > item.captured_at_ns + within_ns
                        stream.add_item(item, "late" if is_late else "on_time", arrived_ns)
        finally:
            finished.set()
    return {
        "source": shown_name(name),
        "items": presented_count(stream),
        "on_time": stream.figures.counts["on_time"],
        "late": stream.figures.counts["late"],
        "dropped": dropped_count(stream),
        "latency_ms": latency_of(stream),
        **recording_report(record, recorder),
    }


def _print(report: dict[str, Any]) -> None:
    print_line(
        f"{report['items']} items, {report['on_time']} on time, {report['late']} late, {report['dropped']} dropped, "
        f"age {report['latency_ms']}",
        lead=report["source"],
    )
    print_recording(report)
