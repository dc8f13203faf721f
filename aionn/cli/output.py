"""What commands print and write: JSON for programs, tables for people, and files of reports."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from aionn.errors import InvalidArgument

__all__ = [
    "check_writable",
    "console",
    "percentile",
    "print_json",
    "print_table",
    "suite_progress",
    "write_report",
]


def console() -> Console:
    """Where tables go: standard output, at most as wide as the terminal."""
    return Console(file=sys.stdout, soft_wrap=False, highlight=False)


def print_json(value: Any) -> None:
    """One JSON object on one line."""
    print(msgspec.json.encode(value).decode(), flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table that fits the terminal; columns whose cells are all numbers are aligned right."""
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        numbers = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    console().print(table)


def suite_progress(*, disable: bool) -> Progress:
    """A bar for a suite: how many of its tests were made, and how many failed, by the task's field ``failed``."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        console=console(),
        transient=True,
        disable=disable,
    )


def check_writable(*paths: Path | None) -> None:
    """Demands files that can be written, for before the work that they report; leaves none that was not there.

    Raises:
        InvalidArgument: One of them cannot; None is no file.
    """
    for path in paths:
        if path is None:
            continue
        try:
            is_new = not path.exists()
            # Opened: the rights of a file say nothing of a file system that is read-only.
            # A pipe that nobody reads is refused instead of waited for.
            os.close(
                os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            )
            if is_new:
                # Behind a link to nothing it is the link's target that was made.
                path.resolve().unlink()
        except OSError as e:
            raise _unwritable(path, e) from e


def write_report(path: Path, text: str) -> None:
    """Writes a report into a file, over what is there.

    Raises:
        InvalidArgument: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise _unwritable(path, e) from e


def _unwritable(path: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(f"{path}: expected a file that can be written: {error.strerror}")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed; NaN-free: 0 where there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
