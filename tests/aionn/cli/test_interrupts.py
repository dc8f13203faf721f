"""Ctrl-C at any moment: one sentence, exit code 130, no traceback, no process left.

The signal comes at a chosen event of the interpreter: the n-th import, or the start of a driver process.
"""

from __future__ import annotations

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
def test_command_is_interrupted_while_it_starts_a_driver_process(
    command: str, times: int, example_data: Path
) -> None:
    files = [] if command == "devices" else [example_data / "digits_float.tflite"]
    ended = interrupted("subprocess.Popen", 1, times, command, *files)
    assert (ended.returncode, ended.stderr) == (130, "aionn: interrupted\n")


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
