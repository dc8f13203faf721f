"""Child processes whose limits are set before they try something: what they print as JSON comes back.

A child ends for certain: the kernel kills it when one of its real-time threads runs for too long without a pause, and the parent
when it has waited long enough.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHILD_S = 60
"""How long a child may take on a busy machine; it works for milliseconds."""

RTTIME_US = 700_000
"""What a real-time thread of a child may run without a pause before the kernel kills the child."""

UNPRIVILEGED = 77
"""Exit code of a child that could not be given its limits."""

BEGIN = f"""
import ctypes, json, os, resource, sys, threading, time
resource.setrlimit(resource.RLIMIT_RTTIME, ({RTTIME_US}, {RTTIME_US}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def say(**found):
    print(json.dumps(found), flush=True)

def limit(kind, value):
    try:
        resource.setrlimit(kind, (value, value))
    except (ValueError, PermissionError):  # A container's root without CAP_SYS_RESOURCE.
        sys.exit({UNPRIVILEGED})

def drop(rtprio=0, nice=0, memlock=None):
    "Takes limits, then another user: with it go all capabilities."
    limit(resource.RLIMIT_RTPRIO, rtprio)
    limit(resource.RLIMIT_NICE, 20 - nice if nice else 0)
    if memlock is not None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)

def refuse(number, errno):
    "A seccomp filter that answers one system call with an errno."
    libc = ctypes.CDLL(None, use_errno=True)
    class Step(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]
    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.POINTER(Step))]
    allow, answer = Step(0x06, 0, 0, 0x7FFF0000), Step(0x06, 0, 0, 0x50000 | errno)
    steps = (Step * 4)(Step(0x20, 0, 0, 0), Step(0x15, 0, 1, number), answer, allow)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(Filter(4, steps)), 0, 0) == 0, ctypes.get_errno()
"""

SET_SCHEDULER = {"x86_64": 144, "aarch64": 119}.get(platform.machine(), 0)
"""The number of the system call sched_setscheduler."""

SET_ATTRIBUTES, GET_ATTRIBUTES = {"x86_64": (314, 315), "aarch64": (274, 275)}.get(platform.machine(), (0, 0))
"""The numbers of sched_setattr and sched_getattr."""

LIMITS = {"x86_64": 302, "aarch64": 261}.get(platform.machine(), 0)
"""The number of the system call prlimit64, by which the C library reads and sets limits."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a child limits and capabilities")


def without_sys_nice(*others: str) -> list[str]:
    """A command that starts a child of this user without CAP_SYS_NICE and others, such as ``ipc_lock``."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    names = ",".join(f"-{name}" for name in ("sys_nice", *others))
    return ["setpriv", f"--inh-caps={names}", f"--bounding-set={names}"]


def run_child(
    code: str,
    *,
    before: Sequence[str] = (),
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What a child prints by ``say``, all calls together.

    Args:
        code: Python, behind ``BEGIN``.
        before: A command that starts the child.
        arguments: Its ``sys.argv[1:]``.
        environment: Variables in addition to this process's.
    """
    told = finished_child(code, before=before, arguments=arguments, environment=environment)
    if told.returncode == UNPRIVILEGED:
        pytest.skip("not even root may raise the limits of real-time priorities and nice values here")
    assert told.returncode == 0, told.stderr
    found: dict[str, Any] = {}
    for line in told.stdout.splitlines():
        found |= json.loads(line)
    return found


def finished_child(
    code: str,
    *,
    before: Sequence[str] = (),
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """A child that has ended, in whatever way."""
    return subprocess.run(
        [*before, sys.executable, "-c", BEGIN + code, *arguments],
        cwd=ROOT,
        env={**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/nonexistent", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=CHILD_S,
    )


OPEN = """
import asyncio, gc
import numpy as np
import aionn
from aionn.errors import DeviceUnavailable
RR, FLAG = os.SCHED_RR, os.SCHED_RESET_ON_FORK
MODEL = "examples/data/digits_int8.tflite"
X = np.zeros((1, 49, 40, 1), np.int8)

def state(tid=0):
    "Policy without the flag, priority, nice value and timer slack of a thread of this process."
    tid = tid or threading.get_native_id()
    return [os.sched_getscheduler(tid) & ~FLAG, os.sched_getparam(tid).sched_priority, os.getpriority(os.PRIO_PROCESS, tid),
            open(f"/proc/{tid}/timerslack_ns").read().strip()]

def rows(report):
    return {process.process: {row.name: [row.state, row.policy, row.priority] for row in process.rows}
            for process in report.processes}
"""
"""The beginning of a child that opens runtimes."""

TRY = """
async def main():
    try:
        async with aionn.open(drivers=["reference"], realtime="required") as runtime:
            say(required=True)
    except DeviceUnavailable as e:
        say(required=str(e))
    before = state()
    async with aionn.open(drivers=["reference"], realtime="if_permitted") as runtime:
        net = await runtime.compile(MODEL, priority="high")
        async with net.burst() as burst:
            result = await burst.execute([X])
            report = await runtime.realtime()
            nice = [os.getpriority(os.PRIO_PROCESS, row.tid) for each in report.processes for row in each.rows]
        say(outputs=len(result.outputs), rows=rows(report), permission=report.permission, slack=state()[3], nice=nice,
            memory=[[row.is_touched, row.is_locked, row.reason] for row in report.memory],
            not_locked=report.processes[1].not_locked)
    say(same=state() == before)
asyncio.run(main())
"""
"""A runtime with ``required``, then one with ``if_permitted`` that executes, and what the machine granted."""
