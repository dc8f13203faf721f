"""Files of reports: whether they can be written is found before the work, and leaves nothing behind."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from aionn.cli.commands.env import env
from aionn.cli.commands.trace import _HEADS, _figure
from aionn.cli.output import check_writable, print_json, write_report
from aionn.errors import InvalidArgument
from aionn.reports.terminal import fitting_widths
from aionn.runtime.settings import VARIABLES
from aionn.runtime.traces import COLUMNS


def test_names_of_files_that_are_not_text_can_be_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"file": "we\udcffird", "more": [{"name": "\u00e9\udc80"}, 1.5, float("nan"), None, True]}
    print_json(report)
    expected = {**report, "more": [{"name": "\u00e9\udc80"}, 1.5, None, None, True]}
    assert json.loads(capsys.readouterr().out) == expected
    write_report(tmp_path / "page.html", "we\udcffird")
    assert (tmp_path / "page.html").read_text() == "we\\udcffird"


def test_check_leaves_files_as_they_were(tmp_path: Path) -> None:
    old, new, link = tmp_path / "old.html", tmp_path / "new.html", tmp_path / "link.html"
    old.write_text("kept")
    link.symlink_to("target.html")
    check_writable(old, None, new, link)
    assert old.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "old.html"]
    assert link.is_symlink()


def test_same_sentence_before_and_after_the_work(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "page.html", "its folder does not exist"),
    ):
        for attempt in (check_writable, lambda path: write_report(path, "text")):
            with pytest.raises(
                InvalidArgument, match=f"{path}: expected a file that can be written: {reason}"
            ):
                attempt(path)


def test_report_is_written_over_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    for text in ("a longer report: \N{MICRO SIGN}s", "short"):
        write_report(path, text)
        assert path.read_text(encoding="utf-8") == text


def test_disk_that_is_full_loses_no_report(tmp_path: Path) -> None:
    path, link = tmp_path / "page.html", tmp_path / "link.html"
    write_report(path, "the old one")
    path.chmod(0o640)
    link.symlink_to(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(
            InvalidArgument, match=f"{link}: expected a file that can be written: File too large"
        ):
            write_report(link, "x" * (1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "the old one"
    write_report(link, "the new one")
    assert (path.read_text(), path.stat().st_mode & 0o777, link.is_symlink()) == ("the new one", 0o640, True)
    assert sorted(other.name for other in tmp_path.iterdir()) == ["link.html", "page.html"]


def test_report_goes_to_what_is_no_file() -> None:
    write_report(Path("/dev/null"), "read by none")
    with pytest.raises(
        InvalidArgument, match="/dev/full: expected a file that can be written: No space left"
    ):
        write_report(Path("/dev/full"), "read by none")


def test_environment_can_be_copied_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    env()
    words = capsys.readouterr().out.split()
    for variable in VARIABLES:
        assert variable.name in words and (not variable.option or variable.option in words)


@pytest.mark.parametrize(
    ("ms", "told"), [(0.0521, "0.052"), (11.978, "11.98"), (137.466, "137.5"), (2389.578, "2390")]
)
def test_times_of_a_trace_have_four_digits(ms: float, told: str) -> None:
    assert _figure(ms) == told


def test_heads_of_a_trace_fit_into_80_columns() -> None:
    heads = ["layer", *(_HEADS[column] for column in COLUMNS)]
    assert fitting_widths([heads, ["Runtime", *["12345"] * len(COLUMNS)]], 80) is not None
