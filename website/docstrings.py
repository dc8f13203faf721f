"""Docstrings as reStructuredText: the signs of formulas and globs that it would read as marks are escaped.

The docstrings of this project are plain text with names in double or single backquotes, and sections in Google's form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["escaped", "prepare_docstring", "with_lists_apart"]

_CODE = re.compile(r"(``.+?``|`[^`]+`)")
_ENTRY = re.compile(r"(?:\d+\.|-) ")
_SIGNS = re.compile(r"(\*|(?<=\w)_(?!\w)|\|)")


def escaped(line: str) -> str:
    """A line with asterisks, bars and final underscores escaped outside of code; a vendor's ``ort-*`` is not emphasis."""
    parts = _CODE.split(line)
    parts[::2] = [_SIGNS.sub(r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def with_lists_apart(lines: Sequence[str]) -> list[str]:
    """The lines with an empty one before each list that follows a paragraph immediately, as reStructuredText requires."""
    apart: list[str] = []
    for line in lines:
        begins = _ENTRY.match(line) is not None
        if (
            begins
            and apart
            and apart[-1].strip()
            and not (_ENTRY.match(apart[-1]) or apart[-1].startswith(" "))
        ):
            apart.append("")
        apart.append(line)
    return apart


def prepare_docstring(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Called by autodoc for each docstring, before its sections are read; changes the lines in place."""
    is_literal = False
    for index, line in enumerate(lines):
        if is_literal and line.strip() and not line.startswith(" "):
            is_literal = False
        if not is_literal:
            lines[index] = escaped(line)
        if line.rstrip().endswith("::"):
            is_literal = True
    lines[:] = with_lists_apart(lines)
