"""Tables, sentences and progress in terminals of any width, in files and in pipes."""

from __future__ import annotations

import io
import os
import pty
import random
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
from rich.cells import cell_len

from aionn.reports.terminal import (
    fitting_widths,
    live_lines,
    print_line,
    print_table,
    printable,
    progress_bar,
    report_line,
    table_lines,
)
from tests.support.processes.terminal import shown_on_terminal

WORDS = [
    "AIONN_BURST_CONTROLLER_POLLING_US",
    "burst_controller_polling_us",
    "TENSOR_QUANT8_ASYMM_SIGNED",
    "x",
    "[red]",
    ":warning:",
    "'aionn[litert]'",
    "[/bold]",
    "between-two-operations",
    "p50 ms",
    "12.5 ms",
    "\u5f62\u72b6",
]
WIDTHS = (60, 80, 120)


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def in_terminal(width: int, program: str, *, columns: bool = True) -> str:
    """Standard output and standard error of a program on a terminal of that width."""
    return shown_on_terminal([sys.executable, "-c", program], width=width if columns else None)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def drawn_rows(seed: int) -> list[list[str]]:
    chosen = random.Random(seed)
    return [[" ".join(chosen.choices(WORDS, k=chosen.randint(1, 4))) for _ in range(4)] for _ in range(3)]


@pytest.mark.parametrize("width", [20, 40, *WIDTHS, 200])
@pytest.mark.parametrize("seed", range(5))
def test_table_breaks_no_word(
    width: int, seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    rows = drawn_rows(seed)
    print_table("a title", ("name", "option", "set to", "meaning"), rows)
    shown = capsys.readouterr().out
    words = shown.split()
    for row in rows:
        for cell in row:
            for word in cell.split():
                assert word in words
    if width >= 60:
        assert all(cell_len(line) <= width for line in shown.splitlines())
    assert all(line == line.rstrip() for line in shown.splitlines())


@pytest.mark.parametrize("seed", range(5))
def test_table_in_a_pipe_has_a_line_for_each_row(
    seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    rows = drawn_rows(seed)
    print_table("a title", ("name", "option", "set to", "meaning"), rows, least=("option",))
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title == "a title"
    for line, row in zip(lines, rows, strict=True):
        assert re.sub(" +", " ", line) == " ".join(row)


def test_widths_break_no_word_and_fill_no_more_than_there_is() -> None:
    rows = [["name", "long text of words"], ["abcdef", "a"]]
    assert fitting_widths(rows, 80) == [6, 18]
    assert fitting_widths(rows, 16) == [6, 8]
    assert fitting_widths(rows, 12) is None
    assert fitting_widths(rows, None) == [6, 18]


def columns_of(lines: Sequence[str]) -> list[str]:
    return lines[1].split()


def test_narrow_terminal_loses_the_least_columns_first_and_names_them() -> None:
    heads = ("device", "count", "p50", "p99")
    rows = [("accelerator", 100, 1.25, 10.5), ("reference", 7, 2.0, 20.25)]
    least = ("count", "p50")
    assert columns_of(table_lines("t", heads, rows, 80, least=least)) == list(heads)
    lines = table_lines("t", heads, rows, 26, least=least)
    assert columns_of(lines) == ["device", "p50", "p99"]
    assert "count" in " ".join(lines[-2:]) and "not shown" in " ".join(lines[-2:])
    lines = table_lines("t", heads, rows, 20, least=least)
    assert columns_of(lines) == ["device", "p99"]
    assert "count, p50" in " ".join(" ".join(lines).split())
    # The rest does not fit without them either: nothing is left out, and rows become records.
    records = table_lines("t", heads, rows, 14, least=least)
    assert [line.split() for line in records[1:6]] == [
        ["accelerator"],
        ["count", "100"],
        ["p50", "1.25"],
        ["p99", "10.50"],
        ["reference"],
    ]


def test_empty_column_goes_before_any_other_and_is_not_missed() -> None:
    heads = ("device", "against", "p50")
    rows = [("accelerator", "", 1.25)]
    assert columns_of(table_lines("t", heads, rows, 80)) == list(heads)
    lines = table_lines("t", heads, rows, 20, least=("p50",))
    assert columns_of(lines) == ["device", "p50"] and len(lines) == 3


def test_numbers_are_aligned_right_and_wide_letters_count_twice() -> None:
    lines = table_lines("t", ("name", "ms"), [("\u5f62\u72b6", 1.5), ("round", 10.25)], 40)
    assert lines[1:] == ["name      ms", "\u5f62\u72b6    1.50", "round  10.25"]


def test_table_without_rows_has_its_heads() -> None:
    assert table_lines("t", ("name", "ms"), [], 40) == ["t", "name  ms"]


@pytest.mark.parametrize("width", WIDTHS)
def test_sentence_has_whole_words_on_a_terminal_and_one_line_elsewhere(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    chosen = random.Random(width)
    text = "reason: " + " ".join(chosen.choices(WORDS, k=40))
    terminal, file = Terminal(), io.StringIO()
    print_line(text, stream=terminal)
    print_line(text, stream=file)
    assert file.getvalue() == f"{text}\n"
    lines = terminal.getvalue().splitlines()
    assert len(lines) > 3 and all(cell_len(line) <= width for line in lines)
    assert " ".join(lines).split() == text.split()


def test_number_and_unit_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    print_line("compiled it in 35.1 ms; from cache in 5 s", stream=terminal)
    assert terminal.getvalue().splitlines() == ["compiled it in", "  35.1 ms; from", "  cache in 5 s"]


def test_no_text_is_taken_for_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    install = "pip install 'aionn[litert]' [red]not red[/red] :warning: [link=x]y"
    print_line(install, lead="[bold]lead[/bold]")
    print_table(install, (install, "b"), [(install, install)])
    out = capsys.readouterr().out
    assert out.count(install) == 5 and out.startswith("[bold]lead[/bold] pip")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\nb", "a b"),
        ("a\rb", "a\\rb"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\udcff", "\\udcff"),
        ("gr\u00fcn \u5f62", "gr\u00fcn \u5f62"),
    ],
)
def test_control_characters_are_written_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    file = io.StringIO()
    print_line(text, stream=file)
    assert file.getvalue() == f"{shown}\n"


def test_letters_that_the_encoding_lacks_are_escaped() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
    print_line("gr\u00fcn", stream=stream)
    stream.seek(0)
    assert stream.read() == "gr\\xfcn\n"


def test_lines_are_replaced_on_a_terminal_alone() -> None:
    # The captured streams of a test are no terminals.
    with live_lines() as show_lines, progress_bar("bench", is_wanted=False) as show:
        assert show_lines is None and show is None


def test_progress_in_a_pipe_is_a_line_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    with open(reading) as lines, open(writing, "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        # The thread of the work waits for the lines: another one writes them.
        with progress_bar("suite on npu", line_s=0.01) as show:
            assert show is not None
            assert lines.readline() == "suite on npu, 0 s\n"
            show("suite on npu: 3/4, 1 failed", 3, 4)
            while (line := lines.readline()).startswith("suite on npu, "):
                pass
            assert re.fullmatch(r"suite on npu: 3/4, 1 failed \(75%\), \d+ s\n", line)
        monkeypatch.undo()


@pytest.mark.parametrize("reader", ["gone", "stopped", "full disk", "reading"])
def test_line_about_work_is_dropped_where_it_is_not_taken(reader: str) -> None:
    reading, writing = os.pipe()
    if reader == "gone":
        os.close(reading)
    elif reader == "stopped":
        os.set_blocking(writing, False)
        while True:
            try:
                os.write(writing, bytes(4096))
            except BlockingIOError:
                break
        os.set_blocking(writing, True)
    elif reader == "full disk":
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), writing)
    with open(writing, "w", encoding="ascii") as stream:  # Closing fails if something is left in the buffer.
        report_line("gr\u00fcn", lead="serving:", stream=stream)
        if reader == "reading":
            assert os.read(reading, 100) == b"serving: gr\\xfcn\n"
    if reader != "gone":
        os.close(reading)


@pytest.mark.parametrize("shows", ["bar", "lines"])
def test_progress_ends_quietly_with_its_terminal(shows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    main, terminal = pty.openpty()
    with open(terminal, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        if shows == "bar":
            with progress_bar("bench") as show:
                assert show is not None
                os.close(main)
                show("bench", 1, 2)
        else:
            with live_lines() as show_lines:
                assert show_lines is not None
                os.close(main)
                show_lines(lambda width: ["a line"])
        monkeypatch.undo()
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())


PROGRAM = """
import sys
from aionn.reports.terminal import live_lines, print_line, print_table, progress_bar
with progress_bar("[red] suite") as show:
    show("suite [a]: 3/4, 1 failed", 3, 4)
with progress_bar("hidden", is_wanted=False) as show:
    assert show is None
with live_lines() as show:
    show(lambda width: [f"[live] {width}"])
print_line("is the rest", lead="[lead]")
print_table("title", ("a", "b"), [("[x]", 1)])
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("width", WIDTHS)
def test_terminal_gets_bold_leads_and_its_width(width: int) -> None:
    shown = in_terminal(width, PROGRAM)
    assert "suite [a]: 3/4, 1 failed" in plain(shown) and f"[live] {width}" in plain(shown)
    assert "\x1b[1m[lead]\x1b[0m is the rest\n" in shown and "\x1b[1mtitle\x1b[0m\n" in shown
    assert plain(shown).endswith("[lead] is the rest\ntitle\na    b\n[x]  1\n")


def test_pipe_gets_neither_colours_nor_a_bar() -> None:
    program = PROGRAM.replace("    show(lambda", "    assert show is None\n    0 and show(lambda")
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert (ended.stdout, ended.stderr) == (
        "[lead] is the rest\ntitle\na    b\n[x]  1\n",
        "",
    )


@pytest.mark.parametrize("width", range(30, 100))
def test_no_line_of_a_table_is_wider_than_its_terminal(width: int) -> None:
    heads = ("stream", "per s", "on time", "late", "dropped", "p50 ms", "p99 ms", "recognised")
    rows = [
        ("video", "30.0", 588, 12, 0, "11.2 ms", "41.9 ms", "nothing 100%"),
        ("audio", "8.2", 295, 15, 66, "13.3 ms", "", "-"),
    ]
    for least in ((), ("p50 ms", "per s", "recognised")):
        lines = table_lines("streams of the demo", heads, rows, width, least=least)
        assert max(map(cell_len, lines)) <= width
