"""An application that ends without closing its blocking runtime ends at once, however it does, and its driver process with it.

Each case is an application of its own. A forked child may do nothing with its parent's runtime, and is told so at once.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.forked("any")

RUN_S_MAX = 60
"""Far more than an application takes that starts a driver process; one that hangs at its end hangs for ever."""

GONE_S_MAX = 30

OPEN = """
import os, signal, sys, threading
import numpy as np
import aionn.blocking
from aionn.hal import OperationType
from aionn.testing.models import chain
from fences import SyncFence

runtime = aionn.blocking.open(drivers=["reference"], isolation=sys.argv[1]).__enter__()
net = runtime.compile(chain([OperationType.RELU], (2,)))
x = np.ones(2, np.float32)
net.execute([x])
print(runtime.devices[0].pid or 0, flush=True)

def tell(call):
    def run():
        try:
            call()
            print("ended")
        except aionn.Error as e:
            print(type(e).__name__)
    return run

def blocks():
    yield x
    threading.Event().wait()
"""

WORK = {
    "nothing": "",
    "execution": """
execution = net.execute_fenced([x], wait_for=[SyncFence("never")])
threading.Thread(target=tell(execution.result)).start()
""",
    "execution_of_a_pool": """
from concurrent.futures import ThreadPoolExecutor
execution = net.execute_fenced([x], wait_for=[SyncFence("never")])
ThreadPoolExecutor(1).submit(tell(execution.result))
""",
    "stream_whose_source_blocks": """
results = net.burst().__enter__().stream(blocks())
next(results)
threading.Thread(target=tell(lambda: list(results))).start()
""",
}

END = {
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise ValueError('of the application')", 1),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); signal.pause()", -signal.SIGTERM),
    "os._exit": ("os._exit(4)", 4),
}


def _run(code: str, isolation: str = "process") -> tuple[int, list[str], str]:
    """Exit code, lines of the output and of the errors of an application; its driver process is gone."""
    with subprocess.Popen(
        [sys.executable, "-c", code, isolation], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        driver = int(process.stdout.readline())
        pidfd = os.pidfd_open(driver) if driver and Path(f"/proc/{driver}").exists() else -1
        try:
            out, errors = process.communicate(timeout=RUN_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            if pidfd >= 0:
                readable, _, _ = select.select([pidfd], [], [], GONE_S_MAX)
                os.close(pidfd)
    assert pidfd < 0 or readable, "the driver process outlives its application"
    return process.returncode, out.splitlines(), errors


@pytest.mark.sampled(4)
@pytest.mark.parametrize("work", WORK)
def test_interpreter_ends_with_an_open_runtime(work: str) -> None:
    code, lines, errors = _run(OPEN + WORK[work])
    assert (code, errors) == (0, "")
    if work.startswith("execution"):
        assert lines == ["ExecutionCancelled"]


def test_interpreter_ends_with_an_open_runtime_in_the_same_process() -> None:
    code, _, errors = _run(OPEN + WORK["stream_whose_source_blocks"], "in_process")
    assert (code, errors) == (0, "")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("end", END)
def test_application_ends_as_it_asks_for_with_a_stream_under_way(end: str) -> None:
    words, expected = END[end]
    code, _, errors = _run(OPEN + WORK["stream_whose_source_blocks"] + words)
    assert code == expected
    assert ("of the application" in errors) == (end == "exception")


FORK = """
import time

def child(call):
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            call()
            os._exit(0)
        except aionn.InvalidArgument as e:
            os._exit(7 if "forked" in str(e) else 8)
        finally:
            os._exit(9)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status))
"""


def test_forked_child_is_refused_and_the_parent_goes_on() -> None:
    calls = [
        "runtime.close",
        "lambda: runtime.status('reference')",
        "lambda: net.execute([x])",
        "net.close",
        "net.burst",
    ]
    code, lines, errors = _run(
        OPEN
        + FORK
        + "".join(f"child({call})\n" for call in calls)
        + "net.execute([x])\nprint(len(runtime.devices), runtime.devices[0].pid is not None)\n"
    )
    assert (code, errors) == (0, "")
    assert lines == ["7"] * len(calls) + ["1 True"]


def test_forked_child_that_leaves_keeps_its_exit_code_and_the_parent_goes_on() -> None:
    code, lines, errors = _run(
        OPEN
        + """
pid = os.fork()
if pid == 0:
    try:
        sys.exit(5)
    except SystemExit as e:
        runtime.__exit__(type(e), e, None)
        raise
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status))
net.execute([x])
with net.burst() as burst:
    burst.execute([x])
"""
    )
    assert (code, lines, errors) == (0, ["5"], "")


@pytest.mark.parametrize("was_open", [True, False])
def test_runtime_is_not_opened_while_the_interpreter_ends(was_open: bool) -> None:
    program = """
import atexit, sys, aionn, aionn.blocking

@atexit.register
def late():
    try:
        aionn.blocking.open(drivers=["reference"], isolation="in_process").start()
    except aionn.InvalidArgument as e:
        print(e, file=sys.stderr)
"""
    begin = OPEN if was_open else "print(0, flush=True)"
    code, _, errors = _run(begin + program)
    assert (code, errors) == (0, "aionn.blocking: a runtime cannot be opened while the interpreter ends\n")


def test_driver_process_ends_with_the_parent_though_a_forked_child_lives() -> None:
    code, lines, _ = _run(
        OPEN
        + """
import select
driver = os.pidfd_open(runtime.devices[0].pid)
if os.fork() == 0:
    readable, _, _ = select.select([driver], [], [], 20)
    os.write(1, b"ended" if readable else b"lives")
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    assert (code, lines) == (-signal.SIGKILL, ["ended"])
