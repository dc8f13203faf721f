"""The programs beside which ``benchmarks.busy`` measures: what eats the processors, and how it is ended."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["LOADS", "beside", "has_stress_ng"]

BUSY = "while True: pass"

WRITING = """
import os, sys
with open(sys.argv[1], "wb", buffering=0) as file:
    while True:
        file.seek(0)
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())
"""
"""As ``stress-ng --io``: waits for the disk again and again."""

TOUCHING = """
import mmap, sys
size = int(sys.argv[1])
while True:
    with mmap.mmap(-1, size) as memory:
        for place in range(0, size, mmap.PAGESIZE):
            memory[place] = 1
"""
"""As ``stress-ng --vm``: maps memory, touches each page of it and returns it."""

RECLAIMING = """
import mmap, time
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")
STEP = 16 << 20
LEAST_KB = 64 << 10
def scanned():
    with open("/proc/vmstat") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("pgscan_kswapd ", "pgscan_direct ")))
def available_kb():
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
held, before = [], scanned()
while True:
    # Private: of a program that it kills, the kernel takes such pages back immediately, and kills no other one before.
    memory = mmap.mmap(-1, STEP, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for place in range(0, STEP, mmap.PAGESIZE):
        memory[place] = 1
    held.append(memory)
    now = scanned()
    if now != before or available_kb() < LEAST_KB:
        for _ in range(min(16, len(held))):
            held.pop(0).close()
    before = now
"""
"""Takes memory until the kernel looks for pages to reclaim, returns some of it, and again. If memory ends all the same, the kernel
kills this program first."""

KEEPING = """
import ctypes, signal, subprocess, sys, time
RESTARTS_MAX = 10_000
libc = ctypes.CDLL(None)
def end_with_parent():
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
for _ in range(RESTARTS_MAX):
    status = subprocess.call([sys.executable, "-S", "-c", *sys.argv[1:]], preexec_fn=end_with_parent)
    if status != -signal.SIGKILL:
        sys.exit(f"the program of the load ended with status {status}")
    time.sleep(0.01)
"""
"""Runs a program, and starts it again whenever the kernel has killed it. It holds no memory itself, so that the kernel kills the
program and not this one. An end of the program by itself ends this one too; so do ten thousand restarts, within two minutes at the
earliest."""

VM_BYTES = 256 << 20
"""Memory of each of two workers. stress-ng is asked for 1 GiB together with more; half of that leaves room on a small machine."""

STRESS_NG = ("stress-ng", "--cpu", "8", "--io", "2", "--vm", "2", "--vm-bytes", "1G", "--quiet")


def has_stress_ng() -> bool:
    """Whether the program is installed."""
    return shutil.which(STRESS_NG[0]) is not None


def _python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-S", "-c", code, *arguments]


def _stress(folder: str) -> list[list[str]]:
    if has_stress_ng():
        return [[*STRESS_NG, "--temp-path", folder]]
    return [
        *([_python(BUSY)] * 8),
        *(_python(WRITING, f"{folder}/{number}") for number in range(2)),
        *([_python(TOUCHING, str(VM_BYTES))] * 2),
    ]


LOADS = {
    "idle": lambda folder: [],
    "four busy loops": lambda folder: [_python(BUSY)] * 4,
    "stress": _stress,
    "reclaim": lambda folder: [_python(KEEPING, RECLAIMING)],
}
"""By name, the command lines of a load; the argument is a folder for its files."""


PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """Has the kernel end a load when the benchmark is killed."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextmanager
def beside(name: str) -> Iterator[Callable[[], None]]:
    """Runs a load, in sessions of their own, and ends it.

    Yields:
        A function that raises ``ChildProcessError`` if a program of the load has ended, so that the last measurement was not taken
        beside it.
    """
    with tempfile.TemporaryDirectory() as folder:
        running: list[subprocess.Popen[bytes]] = []

        def check() -> None:
            if any(process.poll() is not None for process in running):
                raise ChildProcessError(f"a program of the load {name!r} ended by itself")

        try:
            for command in LOADS[name](folder):
                running.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        start_new_session=True,
                        preexec_fn=_end_with_parent,
                    )
                )
            yield check
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            for process in running:
                process.wait()
