"""In a process that serves several clients, the threads that serve have short slices, and the one that prepares models has not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from aionn.realtime.threads.slices import SLICE_NS, read_attributes
from aionn.runtime.background import Background
from aionn.service.client.device import RemoteDevice
from tests.aionn.realtime.children import run_child
from tests.aionn.realtime.test_slices import SLICES, has_slices
from tests.aionn.service.reservations.served_process import LIMIT_S, until_served
from tests.aionn.service.sums import Sum, sum_model

pytestmark = pytest.mark.skipif(not has_slices(), reason="slices of single threads need Linux 6.12")

THREADS = (
    SLICES
    + """
from aionn.drivers.kit.gate import SlotGate
from aionn.hal import Priority
from aionn.realtime.threads.slices import serving_in_short_slices

def on_gate(executes):
    gate, found = SlotGate(1, name="gate", executes=executes), []
    gate.submit(Priority.MEDIUM, None, lambda: found.append(slice_of()))
    gate.close()
    return found[0]

def on_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(slice_of()))
    thread.start()
    thread.join()
    return found[0]

def slices():
    return [slice_of(), on_gate(True), on_gate(False), on_thread()]
"""
)


def test_executing_threads_have_short_slices_and_others_the_kernels() -> None:
    code = """
before = slices()
with serving_in_short_slices():
    during = slices()
say(same=before == slices() == [ORDINARY_NS] * 4, during=[each == ORDINARY_NS for each in during], short=during[:2])
"""
    assert run_child(THREADS + code) == {
        "same": True,
        "during": [False, False, True, True],
        "short": [SLICE_NS, SLICE_NS],
    }


def test_slice_of_a_threads_own_comes_back() -> None:
    code = """
set_slice(0, 5_000_000)
with serving_in_short_slices():
    during = slice_of()
say(during=during, after=slice_of())
"""
    assert run_child(THREADS + code) == {"during": SLICE_NS, "after": 5_000_000}


def test_threads_whose_process_raised_them_keep_their_slice() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may lower nice values without a limit")
    code = """
os.setpriority(os.PRIO_PROCESS, me, -5)
with serving_in_short_slices():
    say(same=slices() == [ORDINARY_NS] * 4, nice=os.getpriority(os.PRIO_PROCESS, me))
"""
    assert run_child(THREADS + code) == {"same": True, "nice": -5}


def slices(pid: int) -> dict[int, int]:
    """The slices of a process's threads."""
    return {int(name): read_attributes(int(name)).slice_ns for name in os.listdir(f"/proc/{pid}/task")}


async def test_loop_bursts_and_executions_of_a_served_device_have_short_slices(
    tmp_path: Path, background: Background
) -> None:
    command = [sys.executable, "-m", "aionn", "serve", "reference", "--socket", "s", "--quiet"]
    paths = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    case = Sum()
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}) as server:
        try:
            path = await until_served(tmp_path)
            with anyio.fail_after(LIMIT_S):
                client = RemoteDevice("reference", "reference", background.tasks, path=path)
                prepared = await client.prepare_model(sum_model())
                await prepared.execute_synchronously(case.request)
                before = slices(server.pid)
                burst = await prepared.configure_execution_burst()
                await burst.execute_synchronously(case.request, [0])
                after = slices(server.pid)
                await burst.aclose()
                await client.aclose()
        finally:
            server.kill()
    case.memory.close()
    own_ns = read_attributes(0).slice_ns
    assert SLICE_NS in [after[tid] for tid in after.keys() - before.keys()]
    assert before.pop(server.pid) == SLICE_NS
    # A thread that executes, and the one that prepares.
    assert {SLICE_NS, own_ns} <= set(before.values())
