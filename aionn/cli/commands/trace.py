"""``aionn trace``: the content of a trace file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import cyclopts
import msgspec
from cyclopts import Parameter

from aionn.cli.output import print_json
from aionn.reports.columns import counted
from aionn.reports.terminal import print_table
from aionn.runtime.traces import COLUMNS, TraceSummary, read_trace, summarize, summarize_applications

__all__ = ["trace"]

_HEADS = {
    "Initialization": "init",
    "Preparation": "prep",
    "Compilation": "compile",
    "I/O": "I/O",
    "Compute": "compute",
    "Results": "results",
    "Ex. total": "exec",
    "Termination": "end",
    "Total": "total",
}
"""Heads that fit into 80 columns; ``exec`` is all of an execution: I/O, compute and results."""

LEAST = ("end", "init", "prep", "results", "I/O")
"""The columns that a narrow terminal loses: what happens once comes first, then parts of ``exec``."""

trace = cyclopts.App(
    name="trace", help="Summarise a trace file that AIONN_TRACE or aionn.open(trace=...) wrote."
)


@trace.command
def summary(
    file: Path,
    /,
    *,
    per_execution: Annotated[bool, Parameter(negative=())] = False,
    total_times: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Add up a trace: milliseconds that each layer took itself, by phase; a table for each part that the application marked.

    The column exec is all of an execution: I/O, compute and results.

    Args:
        file: The trace.
        per_execution: Divide by the number of executions.
        total_times: Count what lower layers took inside of a layer as well; rows do not add up then.
        json: Print one JSON object instead of a table.
    """
    events = read_trace(file)
    found = summarize(events, total_times=total_times)
    applications = summarize_applications(events, total_times=total_times)
    if json:
        print_json({**msgspec.to_builtins(found), "applications": applications})
        return 0
    for part in applications or (found,):
        _print(part, per_execution)
    return 0


def _print(found: TraceSummary, per_execution: bool) -> None:
    count = max(found.executions, 1) if per_execution else 1
    rows = [
        (layer, *("n/a" if (ms := cells[column]) is None else _figure(ms / count) for column in COLUMNS))
        for layer, cells in found.rows.items()
    ]
    print_table(
        f"{found.application}{': ' if found.application else ''}{counted(found.executions, 'execution')}, "
        f"{counted(found.processes, 'process', 'processes')}, {found.wall_ms:.1f} ms; "
        f"milliseconds{' per execution' if per_execution else ''}",
        ("layer", *(_HEADS[column] for column in COLUMNS)),
        rows,
        least=LEAST,
    )


def _figure(ms: float) -> str:
    """Four digits: what is measured varies by more than the fifth."""
    decimals = 3 if ms < 10 else 2 if ms < 100 else 1 if ms < 1000 else 0
    return f"{ms:.{decimals}f}"
