"""Trace files: begun and finished for a runtime, and added up by layer and phase.

Owns who traces (an option, or the variable ``AIONN_TRACE``), the end of the file, and the table. How sections are written is in
``aionn.observability.tracing``.

Invariants:
1. A finished file is one JSON array that trace viewers open; one that was cut off by a crash can still be added up, and so can one
   with lines that a full disk cut off.
2. A row's number is time that the layer itself took: what a lower layer took is that layer's. Negative numbers are gaps in the
   measurement, and are shown.

Source: the per-layer table of the NN HAL's systrace parser.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from aionn.errors import InvalidArgument
from aionn.observability.tracing import (
    LAYERS,
    PHASES,
    TRACE_VARIABLE,
    is_of_parent,
    is_tracing,
    start_tracing,
    stop_tracing,
    trace_path,
)
from aionn.platform.files import read_regular

__all__ = [
    "COLUMNS",
    "TraceSummary",
    "begin_trace",
    "end_trace",
    "read_trace",
    "summarize",
    "summarize_applications",
]

COLUMNS = {
    "Initialization": ("PI",),
    "Preparation": ("PP",),
    "Compilation": ("PC",),
    "I/O": ("PIO",),
    "Compute": ("PE", "PCO", "PTR"),
    "Results": ("PR",),
    "Ex. total": ("PE", "PCO", "PTR", "PIO", "PR"),
    "Termination": ("PT",),
    "Total": tuple(PHASES),
}
"""The phases that each column adds up."""

EVENTS_MAX = 4_000_000
"""Most events that are read: beyond any trace that a viewer opens."""

FILE_BYTES_MAX = 1 << 30
"""So many events take less."""


LINE_BYTES_MAX = 1 << 16
"""Longest line that is looked for at the end of a file."""


def begin_trace(path: str | os.PathLike[str] | None, *, process: str = "application") -> bool:
    """Starts tracing if that is asked for, by the argument or by the variable.

    Args:
        path: The file; None takes the variable's.
        process: The name of this process in the trace.

    Returns:
        Whether ``end_trace`` ends it. A trace of the variable ends with the process: there may be several runtimes, but one trace.

    Raises:
        InvalidArgument: The file cannot be written, or the process traces to another file already.
    """
    if path is not None:
        start_tracing(path, process=process)
        return True
    asked = os.environ.get(TRACE_VARIABLE)
    if asked and not is_tracing() and not is_of_parent(asked):
        start_tracing(asked, process=process)
        atexit.register(end_trace, os.path.abspath(asked))
    return False


def end_trace(path: str | os.PathLike[str]) -> None:
    """Stops tracing and finishes the file, when no other process writes to it any more; nothing if this process does not trace to
    it, such as a forked child.
    """
    if trace_path() != os.path.abspath(os.fsdecode(path)):
        return
    stop_tracing()
    try:
        with open(path, "r+b") as file:
            start = max(0, file.seek(0, os.SEEK_END) - LINE_BYTES_MAX)
            file.seek(start)
            end = file.read().rfind(b",\n")  # The rest was cut off.
            if end >= 0:
                file.seek(start + end)
                file.truncate()
                file.write(b"\n]\n")
    except OSError:
        pass  # Viewers open an unfinished file as well.


class _Event(msgspec.Struct):
    """The fields of an event that matter here."""

    name: str
    ph: str
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0


_DECODER = msgspec.json.Decoder(_Event)


class TraceSummary(msgspec.Struct, frozen=True):
    """Where the time went.

    Attributes:
        executions: Number of executions.
        processes: Number of processes that took part.
        wall_ms: From the first section's start to the last one's end.
        rows: By layer's name and column's name, milliseconds; None where nothing was measured.
        application: The application's name for this part; empty for the whole trace.
    """

    executions: int
    processes: int
    wall_ms: float
    rows: Mapping[str, Mapping[str, float | None]]
    application: str = ""


def read_trace(path: str | os.PathLike[str]) -> list[_Event]:
    """The events of a trace file, finished or not.

    Raises:
        InvalidArgument: It cannot be read, or is not a trace.
    """
    text = read_regular(path, "trace", FILE_BYTES_MAX).strip()
    if text.startswith(b"[") and not text.endswith(b"]"):
        # Cut off: the last line may be half a line.
        text = text[: text.rfind(b"}") + 1] + b"]"
    try:
        events = msgspec.json.decode(text, type=list[_Event])
    except (msgspec.MsgspecError, RecursionError) as e:
        events = _whole_lines(text)
        if not events:
            raise InvalidArgument(
                f"trace {os.fspath(path)}: expected a JSON array of trace events: {e}"
            ) from e
    if len(events) > EVENTS_MAX:
        raise InvalidArgument(
            f"trace {os.fspath(path)}: expected at most {EVENTS_MAX} events, got {len(events)}"
        )
    return events


def _whole_lines(text: bytes) -> list[_Event]:
    """The events of the lines that are whole: where the disk was full, lines of one process follow a part of another's."""
    events = []
    for line in text.splitlines()[1:]:
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            events.append(_DECODER.decode(line.rstrip(b",]")))
    return events


class _Open:
    """A section of a lane that has not ended yet."""

    __slots__ = ("dur", "end", "inside", "mark")

    def __init__(self, event: _Event, mark: tuple[str, str]) -> None:
        self.mark = mark
        self.end = event.ts + event.dur
        self.dur = event.dur
        self.inside = 0.0


def _mark(name: str) -> tuple[str, str] | None:
    """``(layer, phase)`` of a section's name; None for an event of another source."""
    if not name.startswith("[NN_"):
        return None
    layer, _, phase = name[4:].partition("]")[0].partition("_")
    return (layer, phase) if layer in LAYERS and phase in PHASES else None


def summarize_applications(
    events: Sequence[_Event], *, total_times: bool = False
) -> tuple[TraceSummary, ...]:
    """One summary for each part that the application marked as a whole (``LA_PO``), in the order of their starts.

    Args:
        events: Of a trace.
        total_times: See ``summarize``.
    """
    parts = sorted((e for e in events if e.ph == "X" and _mark(e.name) == ("LA", "PO")), key=lambda e: e.ts)
    return tuple(
        msgspec.structs.replace(
            summarize(
                [e for e in events if part.ts <= e.ts < part.ts + max(part.dur, 1e-9)],
                total_times=total_times,
            ),
            application=part.name.partition("]")[2] or "application",
        )
        for part in parts
    )


def summarize(events: Iterable[_Event], *, total_times: bool = False) -> TraceSummary:
    """Adds up a trace by layer and phase.

    Args:
        events: Of a trace.
        total_times: Whether a layer's time includes what lower layers took inside of it; then rows do not add up.
    """
    own: dict[tuple[str, str], float] = {}
    lanes: dict[tuple[int, int], list[_Event]] = {}
    for event in events:
        if event.ph == "X" and _mark(event.name) is not None:
            lanes.setdefault((event.pid, event.tid), []).append(event)
    executions = 0
    for lane in lanes.values():
        stack: list[_Open] = []
        for event in sorted(lane, key=lambda e: (e.ts, -e.dur)):
            mark = _mark(event.name)
            assert mark is not None, "filtered above"
            while stack and stack[-1].end <= event.ts:
                _end(stack.pop(), own)
            if total_times:
                pass
            elif stack:
                stack[-1].inside += event.dur
            elif mark[0] in ("LD", "LC"):
                # A driver's thread or process works while a section of the runtime's side waits for it.
                waiting = ("LI", mark[1] if mark[1] in ("PI", "PC", "PT") else "PE")
                own[waiting] = own.get(waiting, 0.0) - event.dur
            # One that waits for its turn inside of its section is still one.
            executions += mark == ("LR", "PE") and all(outer.mark != mark for outer in stack)
            stack.append(_Open(event, mark))
        while stack:
            _end(stack.pop(), own)
    every = [event for lane in lanes.values() for event in lane]
    wall_us = max((e.ts + e.dur for e in every), default=0.0) - min((e.ts for e in every), default=0.0)
    return TraceSummary(executions, len({pid for pid, _ in lanes}), wall_us / 1000, _rows(own))


def _end(section: _Open, own: dict[tuple[str, str], float]) -> None:
    own[section.mark] = own.get(section.mark, 0.0) + section.dur - section.inside


def _rows(own: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float | None]]:
    rows: dict[str, dict[str, float | None]] = {}
    for layer, name in LAYERS.items():
        if any(key[0] == layer for key in own):
            rows[name] = {
                column: _sum([us for (who, phase), us in own.items() if who == layer and phase in phases])
                for column, phases in COLUMNS.items()
            }
    rows["Total"] = {
        column: _sum([us for (_, phase), us in own.items() if phase in phases])
        for column, phases in COLUMNS.items()
    }
    return rows


def _sum(values_us: list[float]) -> float | None:
    return sum(values_us) / 1000 if values_us else None
