"""Terminals: tables, sentences and progress, at any width, in a file and in a pipe.

Owns every character that the commands write for people. No text is taken for markup: a name in square brackets is printed whole.

Invariants:
1. No word is broken. A table that is too wide loses its least columns and names them; if that is not enough, rows become records.
2. A sentence is one line in a file or a pipe, so that programs can read it; a terminal gets it in lines of whole words.
3. Progress is drawn on standard error where that is a terminal; elsewhere it is a line from time to time.
4. A control character is written as its escape sequence in Python: a name in a file cannot command the terminal.
5. A line about work in progress is dropped where it cannot be written: neither ``report_line`` nor progress fails for that.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO, cast

from rich.cells import cell_len

from aionn.errors import GeneralFailure
from aionn.observability.lines import write_if_taken
from aionn.reports.columns import number_columns

__all__ = [
    "PROGRESS_FIRST_S",
    "ShowProgress",
    "fitting_widths",
    "live_lines",
    "print_line",
    "print_table",
    "printable",
    "progress_bar",
    "table_lines",
    "report_line",
    "unlimited_console",
    "write_out",
]

GAP = 2
"""Blanks between two columns."""

WIDTH_UNKNOWN = 80
"""Width of a terminal that does not know its own."""

COLUMNS_UNLIMITED = 10_000
"""Width of a file that no text of ours reaches: the longest help of an option has some 300 characters."""

WIDTH_MIN = 20
"""Least width that is respected: a narrower terminal breaks words by itself."""

PROGRESS_LINE_S = 10.0
"""Time between two lines about progress in a file or a pipe: long work does not look like a hang, and an hour has 360 lines."""

PROGRESS_FIRST_S = 1.0
"""Time until the first of these lines: most mistakes are found sooner, and their sentence is the only line."""

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"

_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of characters that are not printed as they are: controls, directions, surrogates, line separators."""

_WORD = re.compile(r"[-+]?\d[\d.,]* (?:ms|s|MB|bytes|%)(?!\w)\S*|\S+")
"""A word; a number and its unit are one."""

ShowProgress = Callable[[str, float, float | None], None]
"""Shows a text, and how much is done of how much in all; None for a total that is not known yet."""


def print_line(
    text: str, *, lead: str = "", indent: str = "  ", wraps: bool = True, stream: TextIO | None = None
) -> None:
    """Prints a sentence; a terminal gets it in lines of whole words.

    Args:
        text: The sentence.
        lead: Bold text before it, on a terminal.
        indent: Begins each line but the first.
        wraps: False for one line whatever its length, so that a command in it can be copied.
        stream: Where to; None for standard output.
    """
    out = sys.stdout if stream is None else stream
    write_out(out, _sentence(text, lead, indent, wraps, out))


def report_line(text: str, *, lead: str = "", wraps: bool = True, stream: TextIO | None = None) -> None:
    """Prints a sentence about work that continues whether or not it is read: what the stream does not take now is dropped.

    Args:
        text: As for ``print_line``.
        lead: As for ``print_line``.
        wraps: As for ``print_line``.
        stream: Where to; None for standard output.
    """
    out = sys.stdout if stream is None else stream
    sentence = _sentence(text, lead, "  ", wraps, out)
    try:
        fd = out.fileno()
    except OSError:
        out.write(sentence)  # A stream in memory.
        return
    # Beside the stream's buffer, which would keep what was not written and fail with it when the process ends.
    write_if_taken(fd, sentence.encode(out.encoding))


def _sentence(text: str, lead: str, indent: str, wraps: bool, out: TextIO) -> str:
    lead, whole = printable(lead), printable(f"{lead} {text}" if lead and text else lead + text)
    lines = _filled(whole, _terminal_width(out), indent) if wraps and out.isatty() else [whole]
    if lead and lines[0].startswith(lead) and _has_styles(out):
        lines[0] = f"{BOLD}{lead}{PLAIN}{lines[0][len(lead) :]}"
    return _text(out, lines)


def print_table(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    least: Sequence[str] = (),
) -> None:
    """Prints a table that fits the terminal, or ``COLUMNS`` where that variable is set; a file gets its full width.

    Args:
        title: The line above it.
        heads: Names of the columns.
        rows: The cells; floats get two decimals.
        least: Heads of the columns that may be left out, the first one first.
    """
    out = sys.stdout
    width = _terminal_width(out) if out.isatty() or os.environ.get("COLUMNS") else None
    lines = table_lines(title, heads, rows, width, least=least)
    if _has_styles(out):
        lines[0] = f"{BOLD}{lines[0]}{PLAIN}"
    write_out(out, _text(out, lines))


def table_lines(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[object]],
    width: int | None,
    *,
    least: Sequence[str] = (),
) -> list[str]:
    """The lines of a table, see ``print_table``.

    Args:
        title: The line above it.
        heads: Names of the columns.
        rows: The cells; floats get two decimals.
        width: Of the terminal; None means no limit.
        least: Heads of the columns that may be left out.
    """
    texts = [
        [printable(f"{cell:.2f}" if isinstance(cell, float) else str(cell)) for cell in row] for row in rows
    ]
    shown = list(range(len(heads)))
    # Columns without a cell are not missed. The first column names the rows.
    empty = [heads[i] for i in shown[1:] if texts and not any(row[i] for row in texts)]
    left_out: list[str] = []
    top = [printable(title)] if width is None else _filled(printable(title), width, "  ")
    for name in (None, *dict.fromkeys((*empty, *least))):
        if name is not None:
            shown = [i for i in shown if heads[i] != name]
            left_out += [name] if name not in empty else []
        cells = [[row[i] for i in shown] for row in (list(heads), *texts)]
        widths = fitting_widths(cells, width)
        if widths is not None:
            note = f"not shown in {width} columns: {', '.join(left_out)}" if left_out else ""
            lines = _aligned(cells[0], cells[1:], widths)
            return [*top, *lines, *(_filled(note, width or len(note), "  ") if note else ())]
    return [*top, *_records(heads, texts, width or WIDTH_UNKNOWN)]


def fitting_widths(rows: Sequence[Sequence[str]], width: int | None) -> list[int] | None:
    """The widths of a table's columns with ``GAP`` between them that break no word; None if no widths do.

    Args:
        rows: The cells, the heads among them.
        width: Of the terminal; None means no limit.
    """
    columns = list(zip(*rows, strict=True))
    most = [max(map(cell_len, column)) for column in columns]
    if width is None:
        return most
    words = [max(max(map(cell_len, _WORD.findall(cell)), default=0) for cell in column) for column in columns]
    left = width - GAP * (len(words) - 1) - sum(words)
    if left < 0:
        return None
    wanted = [b - a for a, b in zip(words, most, strict=True)]
    share = min(1.0, left / max(1, sum(wanted)))
    return [max(1, a + int(more * share)) for a, more in zip(words, wanted, strict=True)]


def _aligned(heads: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Rows of columns; a row takes as many lines as its longest cell."""
    is_number = number_columns(rows, len(heads))
    lines = []
    for row in (heads, *rows):
        cells = [_filled(cell, width) for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells), default=0)):
            line = (
                _padded(cell[number] if number < len(cell) else "", width, right)
                for cell, width, right in zip(cells, widths, is_number, strict=True)
            )
            lines.append((" " * GAP).join(line).rstrip())
    return lines


def _records(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Rows over several lines each: the first cell on a line of its own, below it each other one behind its head."""
    size = max(map(cell_len, heads))
    indent = " " * (2 + size + GAP)
    lines = []
    for first, *rest in rows:
        lines += _filled(first, width)
        for head, cell in zip(heads[1:], rest, strict=True):
            if cell:
                parts = _filled(cell, max(WIDTH_MIN, width - len(indent)))
                lines.append(f"  {_padded(head, size)}{' ' * GAP}{parts[0]}")
                lines += [indent + part for part in parts[1:]]
    return lines


def printable(text: str) -> str:
    """The text with escape sequences for control characters; line ends become blanks."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        " " if c == "\n" else repr(c)[1:-1] if unicodedata.category(c) in _ESCAPED else c for c in text
    )


def _padded(text: str, width: int, right: bool = False) -> str:
    blanks = " " * max(0, width - cell_len(text))
    return blanks + text if right else text + blanks


def _filled(text: str, width: int, indent: str = "") -> list[str]:
    """The text in lines of whole words; a word that is longer than a line has one to itself. At least one line."""
    if cell_len(text) <= width:
        return [text]
    lines, line, end = [], "", 0
    for word in _WORD.finditer(text):
        gap = text[end : word.start()]
        if line.strip() and cell_len(line) + cell_len(gap) + cell_len(word[0]) > width:
            lines.append(line)
            line, gap = indent, ""
        line += gap + word[0]
        end = word.end()
    return [*lines, line]


def _terminal_width(stream: TextIO) -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return max(WIDTH_MIN, int(columns))
    try:
        found = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        found = 0
    return max(WIDTH_MIN, found) if found else WIDTH_UNKNOWN


def _has_styles(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") not in (None, "", "dumb")


def _text(stream: TextIO, lines: Sequence[str]) -> str:
    text = "\n".join(lines) + "\n"
    encoding = getattr(stream, "encoding", None) or "utf-8"
    # A name may have characters that the locale's encoding lacks.
    return text.encode(encoding, "backslashreplace").decode(encoding)


def write_out(stream: TextIO, text: str) -> None:
    """Writes a text to standard output or standard error.

    Raises:
        BrokenPipeError: Its reader has gone.
        GeneralFailure: It takes no more, as on a full disk. In both cases everything else that is written goes nowhere.
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError as e:
        # Python writes the rest of the buffer at the end of the process, and reports the failure once more.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())
        if isinstance(e, BrokenPipeError):
            raise
        name = stream.name.strip("<>")
        raise GeneralFailure(f"{name}: expected a stream that can be written: {e.strerror}") from e


def unlimited_console(file: TextIO) -> Any:
    """A console of rich for a file or a pipe, in which no text is broken."""
    from rich.console import Console

    return Console(file=file, width=COLUMNS_UNLIMITED, highlight=False, markup=False, emoji=False)


class _Screen:
    """Standard error for progress, which is not drawn any more where the terminal is gone.

    Args:
        stream: Standard error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        """Writes a text, if that is possible."""
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        """Sends what was written, if that is possible."""
        with contextlib.suppress(OSError):
            self._stream.flush()


@contextlib.contextmanager
def progress_bar(
    text: str, *, is_wanted: bool = True, line_s: float = PROGRESS_LINE_S
) -> Iterator[ShowProgress | None]:
    """A bar on standard error while the block runs; where that is not a terminal, lines from time to time.

    Args:
        text: Shown first.
        is_wanted: False shows nothing, and gives None.
        line_s: The time between two lines.
    """
    if not is_wanted:
        yield None
        return
    if not sys.stderr.isatty():
        with _progress_lines(text, line_s) as show_line:
            yield show_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    screen = Console(file=cast("TextIO", _Screen(sys.stderr)), highlight=False, markup=False, emoji=False)
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(printable(text), total=None)

        def show(text: str, done: float, total: float | None) -> None:
            bar.update(task, description=printable(text), completed=done, total=total)

        yield show


@contextlib.contextmanager
def _progress_lines(text: str, line_s: float) -> Iterator[ShowProgress]:
    """Lines with the last progress while the block runs, also while that holds its thread; none if it ends, or fails, soon."""
    latest, ended = text, threading.Event()

    def show(text: str, done: float, total: float | None) -> None:
        nonlocal latest
        latest = f"{text} ({done / total:.0%})" if total else text

    def write() -> None:
        began_s, wait_s = time.monotonic(), min(PROGRESS_FIRST_S, line_s)
        while not ended.wait(wait_s):
            report_line(f"{latest}, {time.monotonic() - began_s:.0f} s", stream=sys.stderr)
            wait_s = line_s

    writer = threading.Thread(target=write, daemon=True, name="aionn-progress")
    writer.start()
    try:
        yield show
    finally:
        ended.set()
        writer.join()


@contextlib.contextmanager
def live_lines() -> Iterator[Callable[[Callable[[int], Sequence[str]]], None] | None]:
    """Lines on standard error that each call replaces while the block runs; None if that is not a terminal.

    The call takes a function that makes the lines for a width.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    screen = Console(file=cast("TextIO", _Screen(sys.stderr)), highlight=False, markup=False, emoji=False)
    with Live(console=screen, auto_refresh=False, transient=True) as live:

        def show(lines: Callable[[int], Sequence[str]]) -> None:
            live.update(Text("\n".join(lines(screen.width)), no_wrap=True), refresh=True)

        yield show
