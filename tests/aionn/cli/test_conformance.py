"""``aionn conformance``: one JSON object for programs, tables and progress for people, an exit code for scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from aionn.cli.commands import conformance as conformance_command
from aionn.conformance.cts import run
from aionn.conformance.support import unsupported_reason
from aionn.conformance.vts import case
from aionn.errors import InvalidArgument
from tests.support.conformance_data import vector_test, write_tests
from tests.support.processes.terminal import shown_on_terminal

pytestmark = pytest.mark.forked("any")

RUN_S_MAX = 60
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two tests that are right, and one whose expectation is wrong."""
    outputs = {"relu_one": 2.0, "relu_two": 2.0, "wrong": 3.0}
    tests = [vector_test("RELU", [[-1, 0, 2]], [0, 0, last], name=name) for name, last in outputs.items()]
    write_tests(tmp_path / "relu.msgpack.gz", tests)
    return tmp_path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "aionn", "conformance", *map(str, arguments)]


def aionn(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        env={**os.environ, "COLUMNS": "100"},
        check=False,
    )


def sentences(errors: str) -> list[str]:
    """The lines of standard error that are not about progress, which a busy machine has in any test."""
    return [line for line in errors.splitlines() if not re.fullmatch(r"\w+ on .*, \d+ s", line)]


def test_missing_data_are_reported_with_the_suites_that_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance_command, "default_data", lambda: None)
    with pytest.raises(
        InvalidArgument, match=r"how-to/conformance-data.md .*--suite vts and --suite random need none$"
    ):
        conformance_command.conformance("reference")


def test_both_suites_use_the_same_words_for_what_a_device_does_not_support() -> None:
    for suite in (case, run):
        assert vars(suite)["unsupported_reason"] is unsupported_reason


def test_json_is_one_object_with_counts_and_failures(data: Path) -> None:
    finished = aionn("reference", "--suite", "cts", "--data", data, "--isolation", "in_process", "--json")
    assert (finished.returncode, finished.stderr) == (1, "")
    (line,) = finished.stdout.splitlines()
    report = json.loads(line)
    assert (report["passed"], report["failed"], report["skipped"], report["expected_failures"]) == (
        2,
        1,
        0,
        0,
    )
    assert report["by_operation"] == {
        "RELU": {"passed": 2, "failed": 1, "skipped": 0, "expected_failures": 0}
    }
    assert report["by_check"]["general"]["failed"] == 1
    assert report["seconds"] > 0
    assert report["failures"] == [
        {
            "test": "wrong",
            "check": "general",
            "mode": "sync",
            "operation": "operation 0 (RELU)",
            "operand": 1,
            "index": [2],
            "expected": "3.0",
            "got": "2.0",
            "tolerance": "1e-05 + 5.96046e-07*|x|",
        }
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["sync", "async", "burst", "fenced"])
def test_filter_mode_and_check_choose_what_is_run(data: Path, mode: str, aionn_here: Command) -> None:
    options = ("--filter", "relu_", "--mode", mode, "--check", "general", "--jobs", "1", "--json")
    finished = aionn_here("conformance", "reference", "--data", data, *options)
    assert (finished.returncode, finished.stderr) == (0, "")
    report = json.loads(finished.stdout)
    assert (report["passed"], report["failed"]) == (2, 0)
    assert list(report["by_check"]) == ["general"]


def test_people_are_told_the_failure_and_the_counts(data: Path) -> None:
    finished = aionn("reference", "--data", data, "--isolation", "in_process", "--jobs", "1")
    assert finished.returncode == 1
    text = " ".join(finished.stdout.split())
    assert "RELU 2 1 0 0" in text
    assert (
        "FAILED wrong, general sync: operation 0 (RELU), operand 1, element [2]: expected 3.0, got 2.0"
        in text
    )
    assert "2 passed, 1 failed, 0 skipped, 0 failed as expected, in" in text
    assert "\x1b" not in finished.stdout, "no progress where nobody watches"


def test_progress_is_shown_on_a_terminal(data: Path) -> None:
    shown = shown_on_terminal(
        command("reference", "--data", data, "--isolation", "in_process", "--jobs", "1"),
        width=100,
        status=1,
        limit_s=RUN_S_MAX,
        is_output_shown=False,
    )
    assert "cts on reference" in shown and "3/3" in shown


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("reference", "--data", "nowhere"), "no *.msgpack.gz files in nowhere"),
        (("nothing", "--data", "{data}"), "driver 'nothing': expected one of"),
        (("reference", "--data", "{data}", "--filter", "x"), "has 'x' in its name"),
        (("reference", "--data", "{data}", "--jobs", "0"), "--jobs: expected from 1"),
        (("reference", "--data", "{data}", "--time-limit", "0"), "--time-limit: expected more than 0"),
        (("reference", "--data", "{data}", "--junit", "x.xml"), "--junit: expected only with --suite vts"),
        (
            ("reference", "--suite", "vts", "--mode", "burst"),
            "--mode: expected only with --suite cts or random",
        ),
        (("reference", "--suite", "random", "--seeds", "0"), "--seeds: expected from 1"),
        (("reference", "--suite", "random", "--first", "-1"), "--first: expected from 0"),
        (
            ("reference", "--suite", "random", "-k", "x y"),
            "a set's name, got 'x y'; there are CHAIN_TENSOR_FLOAT",
        ),
        (("nothing", "--suite", "random", "--seeds", "1"), "driver 'nothing': expected one of"),
        (
            ("reference", "--suite", "random", "--keep", "/dev/null/x"),
            "--keep: expected a folder that can be",
        ),
        (("reference", "--suite", "vts", "-k", "x y"), "no case has 'x y' in its name; there are cases of"),
        (("reference", "--suite", "vts", "--html", "{data}"), "expected a file that can be written: Is a"),
        (
            ("reference", "--suite", "vts", "--junit", "{data}/a/b"),
            "a file that can be written: its folder does not exist",
        ),
        (("edge1/reference", "--suite", "vts"), "the device of a node is tested with --fleet ADDRESS"),
        (("reference", "--fleet", "127.0.0.1:1"), "--fleet: expected a device NODE/DEVICE"),
        (("edge1/reference", "--fleet", "other:1"), "--fleet: 'other:1' leads to another machine"),
        (
            ("edge1/reference", "--fleet", "127.0.0.1:1", "--isolation", "in_process"),
            "--isolation: the device of a node runs in processes of that node",
        ),
        (("nowhere:Device", "--suite", "vts"), "cannot be loaded: ModuleNotFoundError"),
        (("json:dumps", "--suite", "vts", "--data", "{data}"), "driver 'json:dumps' makes no device"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    data: Path, options: tuple[str, ...], words: str, aionn_here: Command
) -> None:
    finished = aionn_here("conformance", *(option.format(data=data) for option in options))
    assert finished.returncode == 2
    assert words in finished.stderr and len(sentences(finished.stderr)) == 1
    assert finished.stdout == ""


def test_unknown_mode_is_refused(data: Path, aionn_here: Command) -> None:
    finished = aionn_here("conformance", "reference", "--data", data, "--mode", "warp")
    assert finished.returncode != 0 and "warp" in finished.stdout + finished.stderr


# A driver's author


MODULE = """
from aionn.drivers import skeleton

class NpuDevice(skeleton.SkeletonDevice):
    pass

def refuses(name):
    raise OSError("not plugged in")

def ends(name):
    raise SystemExit(3)
"""


@pytest.fixture
def author(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, aionn_here: Command) -> Command:
    """Runs the command on a driver that is only a module, with few data; its lists are the argument ``lists``."""

    def run(target: str, *arguments: str | Path, lists: str = "") -> subprocess.CompletedProcess[str]:
        (tmp_path / "acme.py").write_text(MODULE + lists)
        monkeypatch.delitem(sys.modules, "acme", raising=False)
        return aionn_here("conformance", f"acme:{target}", "--suite", "vts", "--data", data, *arguments)

    monkeypatch.syspath_prepend(tmp_path)
    return run


@pytest.mark.parametrize("isolation", [pytest.param("process", marks=pytest.mark.long), "in_process"])
def test_driver_that_is_only_a_module_gets_a_legal_name_and_all_reports(
    author: Command, tmp_path: Path, isolation: str
) -> None:
    junit, html = tmp_path / "report.xml", tmp_path / "report.html"
    options = ("-k", "basics", "--isolation", isolation, "--json", "--junit", junit, "--html", html)
    finished = author("NpuDevice", *options)
    assert (finished.returncode, finished.stderr) == (0, "")
    report = json.loads(finished.stdout)
    assert report["failed"] == 0 and report["passed"] >= 8
    cases = ElementTree.parse(junit).getroot().iter("testcase")
    assert len(list(cases)) == report["passed"] + report["skipped"]
    assert "basics" in html.read_text()


@pytest.mark.parametrize("isolation", ["process", "in_process"])
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("refuses", "makes no device: OSError: not plugged in"),
        pytest.param("ends", "makes no device: SystemExit: 3", marks=pytest.mark.long),
        ("absent", "has no attribute 'absent'"),
    ],
)
def test_driver_that_cannot_be_made_is_told_in_one_sentence(
    author: Command, target: str, words: str, isolation: str
) -> None:
    finished = author(target, "-k", "basics", "--isolation", isolation)
    assert finished.returncode == 2
    assert words in finished.stderr and len(sentences(finished.stderr)) == 1


def test_lists_of_the_drivers_module_are_strict(
    author: Command,
) -> None:
    options = ("-k", "basics", "--isolation", "in_process", "--json")
    lists = """
UNSUPPORTED = {"basics/preference*": "has none", "WHILE": "no loops"}
EXPECTED_FAILURES = {"basics/status_is_available": "not yet", "LSTM": "wrong"}
"""
    finished = author("NpuDevice", *options, lists=lists)
    report = json.loads(finished.stdout)
    assert (finished.returncode, report["failed"]) == (1, 1)
    assert report["skip_reasons"]["has none"] >= 1
    (failure,) = report["failures"]
    assert (failure["case"], failure["got"]) == ("basics/status_is_available", "success")
    for wrong in ("UNSUPPORTED = ['x']", "EXPECTED_FAILURES = {'x/*': 1}", "EXPECTED_FAILURES = {1: 'x'}"):
        finished = author("NpuDevice", *options, lists=wrong)
        assert finished.returncode == 2
        assert "expected patterns and the reasons for them" in finished.stderr
        assert len(sentences(finished.stderr)) == 1


def test_random_graphs_are_run_by_number_and_reported(aionn_here: Command) -> None:
    finished = aionn_here(
        "conformance", "reference", "--suite", "random", "--seeds", "5", "--first", "7", "--isolation", "in_process", "--jobs", "1"
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert "graphs 7 to 11" in finished.stdout
    assert "5 passed, 0 failed" in finished.stdout
