"""Output of commands: JSON for programs, tables for people, and files of reports."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from aionn.errors import InvalidArgument

__all__ = [
    "check_writable",
    "console",
    "fitting_widths",
    "print_json",
    "print_records",
    "print_table",
    "suite_progress",
    "write_report",
]


GAP = 2
"""Blanks between two columns."""

_NUMBER = re.compile(r"[-+]?[0-9][0-9.,]*%?|n/a|-|")


def console() -> Console:
    """Where tables and sentences go: standard output. Sentences are not cut into lines, so that a path in one can be copied."""
    return Console(file=sys.stdout, soft_wrap=True, highlight=False)


def print_json(value: Any) -> None:
    """One JSON object on one line."""
    print(msgspec.json.encode(value).decode(), flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table that fits the terminal; columns whose cells are all numbers are aligned right.

    No word is broken: if the words do not fit beside each other, each row takes several lines.
    """
    screen = console()
    texts = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = fitting_widths([columns, *texts], screen.width)
    if widths is None:
        print_records(title, columns, texts)
        return
    # Texts, since a string in square brackets would be taken for a style.
    table = Table(title=Text(title), title_justify="left", header_style="bold", box=None, pad_edge=False)
    for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
        numbers = bool(texts) and all(_NUMBER.fullmatch(row[index]) for row in texts)
        table.add_column(Text(column), justify="right" if numbers else "left", width=width)
    for row in texts:
        table.add_row(*map(Text, row))
    screen.print(table, soft_wrap=False)


def fitting_widths(rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """The widths of a table's columns with ``GAP`` between them that break no word; None if no widths do.

    Args:
        rows: The cells, the heads among them.
        width: Of the terminal.
    """
    least = [
        max(max(map(len, cell.split()), default=0) for cell in column) for column in zip(*rows, strict=True)
    ]
    most = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = width - GAP * (len(least) - 1) - sum(least)
    if left < 0:
        return None
    wanted = [b - a for a, b in zip(least, most, strict=True)]
    share = min(1.0, left / max(1, sum(wanted)))
    return [max(1, a + int(more * share)) for a, more in zip(least, wanted, strict=True)]


def print_records(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows over several lines each: the first cell on a line of its own, below it each other one behind its head."""
    screen = console()
    screen.print(title, style="italic", markup=False)
    size = max(map(len, heads))
    for first, *rest in rows:
        screen.print(_filled(first, screen.width), style="bold", markup=False)
        for head, cell in zip(heads[1:], rest, strict=True):
            indent = " " * (2 + size + GAP)
            if cell:
                lead = f"  {head:{size}}{' ' * GAP}"
                screen.print(_filled(cell, max(screen.width, 2 * len(indent)), lead, indent), markup=False)


def _filled(text: str, width: int, lead: str = "", indent: str = "") -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=lead,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


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
    """Checks that files can be written, before the work that they report; creates none that did not exist.

    Raises:
        InvalidArgument: One of them cannot; None means no file.
    """
    for path in paths:
        if path is None:
            continue
        try:
            is_new = not path.exists()
            # The file is opened, since its rights do not show that a file system is read-only. A pipe without a reader is rejected
            # and not waited for.
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
