"""``aionn trace``: what a trace file says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from aionn.cli.output import print_json, print_table
from aionn.runtime.traces import COLUMNS, read_trace, summarize

__all__ = ["trace"]

trace = cyclopts.App(
    name="trace", help="Look into a trace file, as AIONN_TRACE or aionn.open(trace=...) make them."
)


@trace.command
def summary(
    file: Path,
    /,
    *,
    per_execution: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Add up a trace: milliseconds that each layer took itself, by phase.

    Args:
        file: The trace.
        per_execution: Divide by the number of executions.
        json: Print one JSON object instead of a table.
    """
    found = summarize(read_trace(file))
    if json:
        print_json(found)
        return 0
    count = max(found.executions, 1) if per_execution else 1
    rows = [
        (layer, *("n/a" if (ms := cells[column]) is None else f"{ms / count:.3f}" for column in COLUMNS))
        for layer, cells in found.rows.items()
    ]
    print_table(
        f"{found.executions} executions, {found.processes} processes, {found.wall_ms:.1f} ms; "
        f"milliseconds{' per execution' if per_execution else ''}",
        ("layer", *COLUMNS),
        rows,
    )
    return 0
