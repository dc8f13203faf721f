"""The rows of the benchmarks: turns, ratios and verdicts."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks.rows import Options, Report, alternate, at_least, at_most, compare, options, single


def test_contenders_take_turns_forwards_and_backwards() -> None:
    turns: list[str] = []
    blocks = alternate({name: lambda name=name: turns.append(name) or 1.0 for name in "ABC"}, 3)  # type: ignore[misc]
    assert "".join(turns) == "ABCCBAABC"
    assert blocks == {name: [1.0] * 3 for name in "ABC"}


@pytest.mark.parametrize(
    ("goal", "ours", "met"),
    [
        (at_most(0.5), [1.0] * 9, True),
        (at_most(0.5), [2.0] * 9, False),
        (at_most(0.5), [1.0] * 5 + [9.0] * 4, False),  # the worse end of the interval counts
        (at_least(2), [8.0] * 9, True),
        (at_least(2), [8.0] * 5 + [1.0] * 4, False),
    ],
)
def test_a_goal_is_met_by_the_worse_end_of_the_interval(goal: object, ours: list[float], met: bool) -> None:
    row = compare("figure", "us", ours, "peer", [3.0] * 9, goal)  # type: ignore[arg-type]
    assert row.met is met


def test_a_line_of_json_has_the_agreed_fields(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(Options(json=True, quick=True))
    report.add(compare("figure", "us", [1.0], "peer", [4.0], at_most(0.25)), single("alone", "1", [3.0]))
    report.note("a remark")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {
        "name": "figure",
        "value": 1.0,
        "unit": "us",
        "peer": "peer",
        "peer_value": 4.0,
        "ratio": 0.25,
        "goal": "<= 0.25",
        "met": True,
    }
    assert lines[1]["peer"] is None and lines[1]["met"] is None


def test_the_table_fits_its_width(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(Options(json=False, quick=True))
    report.add(compare("figure", "us", [1.0, 2.0], "peer", [4.0], at_most(0.25)))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].endswith("NOT MET")
    assert all(len(line) <= 160 for line in lines)


def test_help_of_a_benchmark_has_its_own_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--only", default="", help="devices with this name")
    monkeypatch.setattr("sys.argv", ["benchmark", "--only", "a", "--json"])
    assert own.parse_known_args()[0].only == "a"
    assert options("A text.\n\nMore.", own) == Options(json=True, quick=False)
    monkeypatch.setattr("sys.argv", ["benchmark", "--help"])
    own.parse_known_args()
    with pytest.raises(SystemExit, match="0"):
        options("A text.\n\nMore.", own)
    shown = capsys.readouterr().out
    assert "A text." in shown and "More." not in shown
    assert all(text in shown for text in ("--only", "devices with this name", "--quick"))
