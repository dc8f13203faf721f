"""A forked process is as an executed one, but for its command line and what it has imported."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aionn.platform.python_process import python_command, python_environment
from tests.support.cancellation import child_processes
from tests.support.processes.fork_server import EXECUTE, OWN_SOCKET_MIN, ForkedStarts, ForkServer

TOLD = """
import gc, json, os, pathlib, resource, signal, sys, threading

def main(arguments):
    if arguments == ["exit"]:
        sys.exit("no")
    if arguments == ["abort"]:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
    fds = {int(fd): os.get_inheritable(int(fd)) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    print(json.dumps({
        "arguments": [arguments, sys.argv, sys.orig_argv, __name__, sys.modules["__main__"].__name__],
        "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
        "folder": os.getcwd(),
        "path": sys.path,
        "flags": list(sys.flags),
        "parent": os.getppid(),
        "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        "descriptors": sorted(fds.items()),
        "passed": os.read(int(arguments[0]), 9).decode(),
        "standard": [sys.stdin.read(), sys.stdout.line_buffering, sys.stdout.encoding, sys.stderr.errors],
        "limits": [resource.getrlimit(limit) for limit in range(15)],
        "signals": [repr(signal.getsignal(n)) for n in range(1, 32)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "threads": [threading.current_thread() is threading.main_thread(), threading.active_count()],
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
        "status": [line for line in status if line.startswith(("Umask", "Cap", "SigB", "SigC", "SigI", "Threads"))],
        "gc": [gc.isenabled(), gc.get_threshold()],
        "interval": sys.getswitchinterval(),
        "warnings": [sys.warnoptions, sys.stdout.write_through, getattr(sys.modules["__main__"], "__file__", None)],
    }))
    sys.stderr.write("last words")
"""


def environment() -> dict[str, str]:
    """A process with more than one thread cannot be forked."""
    return {**python_environment(), "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture(params=["product"])
def forking(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ForkedStarts]:
    (tmp_path / "told.py").write_text(TOLD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(subprocess.Popen, "_execute_child", EXECUTE)  # Not by the server of other tests.
    server = ForkServer(["anyio", "numpy"], environment())
    starts = ForkedStarts(server, lambda: request.param)
    yield starts
    starts.end()
    server.close()


def told(
    *arguments: str, command: list[str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    read, written = os.pipe()
    os.write(written, b"something")
    try:
        return subprocess.run(
            [*(command or python_command("told")), *(arguments or [str(read)])],
            env=environment(),
            pass_fds=[read],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **options,
        )
    finally:
        os.close(read)
        os.close(written)


@pytest.mark.parametrize("options", [{"start_new_session": True}, {"process_group": 0}, {}], ids=str)
@pytest.mark.thorough
def test_forked_process_is_as_an_executed_one(
    forking: ForkedStarts, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AIONN_LOG", "model")
    monkeypatch.chdir(tmp_path)
    forked = told(**options)
    forking.end()
    executed = told(**options)
    assert forking.count == 1
    assert (forked.returncode, forked.stderr) == (executed.returncode, executed.stderr) == (0, "last words")
    assert json.loads(forked.stdout) == json.loads(executed.stdout)


@pytest.mark.parametrize("forking", ["any"], indirect=True)
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("-c", []),
        ("-m", ["-P"]),
        ("script", ["-u", "-W", "error"]),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("-c", ["-P", "-W", "error"]), ("-m", ["-u"]), ("script", ["-P"]))
        ),
    ],
)
@pytest.mark.thorough
def test_forked_program_is_as_an_executed_one(
    forking: ForkedStarts, form: str, options: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{TOLD}\nif __name__ == '__main__': main(sys.argv[1:])")
    program = {
        "-c": ["-c", "import sys; from told import main; main(sys.argv[1:])"],
        "-m": ["-m", "script"],
        "script": [str(script)],
    }[form]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    forked = told(command=[sys.executable, *options, *program])
    forking.end()
    executed = told(command=[sys.executable, *options, *program])
    assert forking.count == 1
    assert (forked.returncode, forked.stderr) == (executed.returncode, executed.stderr) == (0, "last words")
    # Whether an interpreter is safe, and whether it warns, is fixed when it starts.
    found, expected = json.loads(forked.stdout), json.loads(executed.stdout)
    assert found["descriptors"].pop() == [OWN_SOCKET_MIN, False]
    assert {**found, "flags": None} == {**expected, "flags": None}


STARTS = """
import json, os, subprocess, sys
from pathlib import Path
from aionn.platform.python_process import python_command

fd = int(sys.argv[1])
pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
with subprocess.Popen(python_command("told", str(fd)), pass_fds=[fd], start_new_session=True, **pipes) as process:
    is_forked = b"fork_server" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    out, err = process.communicate()
found = json.loads(out)
found["parent"] = found["parent"] == os.getpid()
print(json.dumps([is_forked, process.returncode, err, found]))
"""


@pytest.mark.parametrize("forking", ["any"], indirect=True)
def test_process_of_a_forked_program_is_as_one_of_an_executed_program(
    forking: ForkedStarts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    forked = told(command=[sys.executable, "-W", "error", "-c", STARTS])
    forking.end()
    executed = told(command=[sys.executable, "-W", "error", "-c", STARTS])
    assert forking.count == 1
    assert (forked.returncode, forked.stderr) == (executed.returncode, executed.stderr) == (0, "")
    found, expected = json.loads(forked.stdout), json.loads(executed.stdout)
    assert (found.pop(0), expected.pop(0)) == (True, False)
    assert found == expected


def test_limits_that_do_not_count_at_the_start_are_those_of_the_process_that_starts(
    forking: ForkedStarts,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if soft else 4096, hard))
    try:
        forked = told()
        forking.end()
        executed = told()
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    assert forking.count == 1
    assert json.loads(forked.stdout)["limits"] == json.loads(executed.stdout)["limits"]


def test_end_of_a_forked_process_is_its_parents_to_see(forking: ForkedStarts) -> None:
    before = child_processes()
    ended = told("exit")
    assert (ended.returncode, ended.stderr) == (1, "no\n")
    assert told("abort").returncode == -signal.SIGABRT
    assert forking.count == 2
    assert child_processes() == before


@pytest.mark.parametrize("what", ["variable", "limit", "command"])
def test_process_that_a_fork_cannot_give_is_executed(
    forking: ForkedStarts, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "variable":
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if what == "limit":
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        if what == "command":
            subprocess.run(["sh", "-c", ":"], check=True)
        else:
            assert told("exit").returncode == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert forking.count == 0
