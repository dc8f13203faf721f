"""What commands print: JSON for programs, tables for people."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

__all__ = ["console", "percentile", "print_json", "print_table"]


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


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed; NaN-free: 0 where there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
