"""Threads that an engine starts are found among those of the process: its own, and no others."""

from __future__ import annotations

import _thread
import os
import threading

import pytest

from aionn.drivers.kit.threads import classes
from aionn.drivers.kit.threads.classes import EngineThreads
from aionn.platform import descriptors
from aionn.realtime import SchedulingClass

WAIT_S_MAX = 10.0


class Noting:
    """Real time in use that notes whom it gives a class."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def acquire(self, scheduling_class: SchedulingClass, name: str, tid: int) -> None:
        self.given.append(tid)


def test_threads_of_python_and_those_that_close_descriptors_are_no_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noting = Noting()
    monkeypatch.setattr(classes, "current", lambda: noting)
    monkeypatch.setattr(descriptors, "IDLE_S", WAIT_S_MAX)
    monkeypatch.setattr(descriptors, "_memories", descriptors._Threads(1, is_limited=False))
    has_begun, may_end = threading.Semaphore(0), threading.Event()
    engines: list[int] = []

    def compute() -> None:
        engines.append(threading.get_native_id())
        has_begun.release()
        may_end.wait(WAIT_S_MAX)

    def wait() -> None:
        has_begun.release()
        may_end.wait(WAIT_S_MAX)

    python = threading.Thread(target=wait)
    with EngineThreads("engine").found(SchedulingClass.HIGH):
        descriptors.close_apart([os.memfd_create("closed")], lambda _: has_begun.release())
        python.start()
        _thread.start_new_thread(compute, ())
        for _ in range(3):
            assert has_begun.acquire(timeout=WAIT_S_MAX)
    may_end.set()
    python.join()
    assert noting.given == engines
