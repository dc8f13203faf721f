"""How many heaps the C library makes for the threads of a process that lasts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aionn.service.client.supervisor import StartConditions

COUNT = """
import ctypes, os, threading

def count():
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    reader, writer = os.pipe()
    file = ctypes.c_void_p(libc.fdopen(writer, b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)
    return os.read(reader, 1 << 16).count(b"<heap nr=")

def hold():
    held = bytearray(10_000)
    started.wait()

threads = [threading.Thread(target=hold) for _ in range(4)]
started = threading.Barrier(len(threads))
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(count())
"""

needs_glibc = pytest.mark.skipif(
    os.confstr("CS_GNU_LIBC_VERSION") is None, reason="the C library is not glibc"
)


def heaps(environment: dict[str, str], before: str = "") -> int:
    done = subprocess.run(
        [sys.executable, "-c", before + COUNT], env=environment, capture_output=True, check=True, timeout=60
    )
    return int(done.stdout)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for variable in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(variable, raising=False)
    return dict(os.environ)


@needs_glibc
def test_threads_of_a_driver_process_share_one_heap(environment: dict[str, str]) -> None:
    assert heaps(environment) > 1  # What the C library does by default.
    assert heaps(dict(StartConditions.now("reference", "reference", None).environment)) == 1


@needs_glibc
def test_threads_of_a_command_share_one_heap(environment: dict[str, str]) -> None:
    before = "from aionn.cli.heap import use_one_heap; use_one_heap()"
    assert heaps(environment, before) == 1
    assert heaps({**environment, "MALLOC_ARENA_MAX": "4"}, before) > 1
