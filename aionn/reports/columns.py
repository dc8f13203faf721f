"""Columns of tables, in a page or a terminal: which ones hold numbers; pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["counted", "number_columns"]

_NUMBER = re.compile(r"[-+]?[0-9][0-9.,]*(e[-+]?[0-9]+)?( ?(%|ms|s|MB|bytes))?|n/a|-|")


def number_columns(rows: Sequence[Sequence[str]], count: int) -> list[bool]:
    """Whether each of ``count`` columns holds nothing but numbers, with or without a unit; such columns are aligned right."""
    return [bool(rows) and all(_NUMBER.fullmatch(row[index]) for row in rows) for index in range(count)]


def counted(count: int, singular: str, plural: str = "") -> str:
    """A count and its noun; the plural is the singular with an s unless it is given."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"
