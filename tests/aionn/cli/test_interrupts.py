"""Ctrl-C and SIGTERM at any moment: one sentence, exit code 130 or 143, no traceback, no process left; a stream reports so far.

The signal comes at a chosen event of the interpreter: the n-th import, or the start of a driver process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aionn.cli.commands import app

RUN_S_MAX = 60

INTERRUPTED_AT = """
import os, signal, sys
event, number, times = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
del sys.argv[1:4]
seen = 0

def hook(name, arguments):
    global seen
    if name == event:
        seen += 1
        if seen == number:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

from aionn.cli import interrupts
guard = interrupts.guard

def guarded():
    guard()
    sys.addaudithook(hook)

interrupts.guard = guarded
from aionn.cli.main import main
main()
"""


def interrupted(
    event: str, number: int, times: int, *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT, event, str(number), str(times), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
        # A shell's background job has SIGINT ignored, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


COMMANDS = [name for name in app if not name.startswith("-")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_subcommand_is_interrupted_while_it_is_imported(command: str) -> None:
    ended = interrupted("import", 30, 1, command)
    assert (ended.returncode, ended.stderr) == (130, "aionn: interrupted\n")


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("times", "number"),
    [
        *[(1, 1), (2, 1), (1, 100), (2, 200), (1, 400)],
        *(pytest.param(*p, marks=pytest.mark.long) for p in [(2, 100), (1, 200), (2, 400)]),
    ],
)
def test_any_import_can_be_interrupted(number: int, times: int) -> None:
    ended = interrupted("import", number, times, "devices")
    assert (ended.returncode, ended.stderr) == (130, "aionn: interrupted\n")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("command", ["devices", "run", pytest.param("inspect", marks=pytest.mark.long)])
@pytest.mark.thorough
def test_command_is_interrupted_while_it_starts_a_driver_process(
    command: str, times: int, example_data: Path
) -> None:
    files = [] if command == "devices" else [example_data / "digits_float.tflite"]
    ended = interrupted("subprocess.Popen", 1, times, command, *files)
    assert (ended.returncode, ended.stderr) == (130, "aionn: interrupted\n")


@pytest.mark.thorough
def test_ignored_signal_stays_ignored() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT, "import", "100", "1", "env"],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout


@pytest.mark.forked("any")
def test_driver_process_takes_no_notice_of_the_signal() -> None:
    code = """
import os, signal, aionn.blocking
with aionn.blocking.open(drivers=["reference"]) as runtime:
    runtime.status("reference")
    pid = runtime.devices[0].pid
    os.kill(pid, signal.SIGINT)
    print(runtime.status("reference").name, runtime.devices[0].pid == pid)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
        env=os.environ,
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("AVAILABLE True\n", "", 0)


REPORTS_AFTER = """
import os, signal, sys
number, place, name, count = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
del sys.argv[1:5]
import importlib
module, _, owner = place.partition(":")
owner = getattr(importlib.import_module(module), owner) if owner else importlib.import_module(module)
method, seen = getattr(owner, name), 0

def counting(self, *arguments, **options):
    global seen
    seen += 1
    if seen == count:
        os.kill(os.getpid(), number)
    return method(self, *arguments, **options)

setattr(owner, name, counting)
from aionn.cli.main import main
main()
"""
"""The command gets the signal when a method is called for the n-th time."""


def signalled(
    number: int, place: str, name: str, count: int, *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    hooked = [str(number), place, name, str(count)]
    return subprocess.run(
        [sys.executable, "-c", REPORTS_AFTER, *hooked, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


STREAM = "aionn.watch:WatchedStream"
ENDS = [(signal.SIGINT, 130, "aionn: interrupted"), (signal.SIGTERM, 143, "aionn: terminated")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("number", "code", "sentence"), ENDS)
@pytest.mark.parametrize("command", ["stream", "watch", pytest.param("demo", marks=pytest.mark.thorough)])
def test_endless_command_reports_what_it_has_so_far(
    command: str, number: int, code: int, sentence: str, example_data: Path
) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    arguments: dict[str, tuple[str | Path, ...]] = {
        "stream": (example_data / "shapes_int8.tflite", "--source", "pattern:", "--device", "reference"),
        "watch": ("pattern:", "--watch-at", ":0"),
        "demo": ("--device", "reference"),
    }
    name = "add_item" if command == "watch" else "add"
    ended = signalled(number, STREAM, name, 3, command, *arguments[command], "--json")
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.splitlines()[-1] == sentence and "Traceback" not in ended.stderr
    (line,) = ended.stdout.splitlines()
    report = json.loads(line)
    counts = report.get("video", report)
    total = counts["on_time"] + counts["late"] + counts["dropped"]
    assert total >= 1 and counts["latency_ms"].keys() == {"p50", "p99", "max"}


@pytest.mark.thorough
def test_report_for_people_precedes_the_sentence(example_data: Path) -> None:
    model = example_data / "shapes_int8.tflite"
    arguments = ("stream", model, "--source", "pattern:", "--device", "reference")
    ended = signalled(signal.SIGINT, STREAM, "add", 3, *arguments)
    assert ended.returncode == 130
    assert ended.stdout.startswith(f"pattern: through {model} on reference: ")


@pytest.mark.thorough
def test_second_signal_ends_a_command_that_reports(example_data: Path) -> None:
    # The report asks for these figures; the signal is the second one then, and the process ends without it.
    code = REPORTS_AFTER.replace("os.kill(os.getpid(), number)", "os.kill(os.getpid(), number); arm()")
    code = code.replace(
        "setattr(owner",
        "def arm():\n    from aionn.cli.commands import stream\n"
        "    stream.presented_count = lambda _: os.kill(os.getpid(), number)\n\nsetattr(owner",
    )
    model = example_data / "shapes_int8.tflite"
    hooked = (str(signal.SIGTERM), STREAM, "add", "3")
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            *hooked,
            "stream",
            str(model),
            "--source",
            "pattern:",
            "--device",
            "reference",
        ],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (143, "")
    assert ended.stderr.splitlines()[-1] == "aionn: terminated"


@pytest.mark.parametrize("suite", ["vts", "random"])
@pytest.mark.thorough
def test_conformance_reports_the_tests_that_were_done(suite: str) -> None:
    place, name = {
        "vts": ("aionn.conformance.vts.run", "run_case"),
        "random": ("aionn.conformance.suite:Tally", "add"),
    }[suite]
    more = ("--seeds", "200", "--jobs", "1") if suite == "random" else ()
    ended = signalled(
        signal.SIGINT, place, name, 3, "conformance", "reference", "--suite", suite, *more, "--json"
    )
    assert ended.returncode == 130, ended.stderr
    report = json.loads(ended.stdout)
    assert 1 <= report["passed"] < 200


@pytest.mark.thorough
def test_soak_ends_in_order(example_data: Path) -> None:
    ended = signalled(
        signal.SIGTERM,
        "aionn.benchmarking.stress.soak:_Soak",
        "_state",
        2,
        *("stress", "--soak", "1", "--in-process", "--device", "reference", "--json"),
    )
    assert ended.returncode == 143, ended.stderr
    report = json.loads(ended.stdout)
    assert report["success"] and report["seconds"] < 60 and report["counts"]["right"] > 0
    assert not report["is_growth_judged"]


@pytest.mark.parametrize("is_imported", [True, False])
def test_end_at_once_kills_driver_processes(is_imported: bool) -> None:
    """One that hangs would not notice the end of its client. A signal may come while the module of driver processes is imported."""
    code = """
import sys, types
from aionn.cli import interrupts
supervisor = sys.modules["aionn.service.client.supervisor"] = types.ModuleType("supervisor")
if sys.argv[1] == "True":
    supervisor.kill_all = lambda: print("killed", flush=True)
interrupts.end_at_once()
"""
    command = [sys.executable, "-c", code, str(is_imported)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (130, "killed\n" if is_imported else "")
    assert ended.stderr == "aionn: interrupted\n"
