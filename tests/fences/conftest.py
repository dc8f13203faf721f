"""What every test of fences gets: a watchdog, a check that nothing stays behind, and the event loops to run on."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

try:
    import uvloop
except ImportError:
    uvloop = None
else:
    uvloop.new_event_loop().close()  # The first loop of all opens a pipe for the life of the process.

WATCHDOG_S = 90
"""Far above the slowest test, far below the patience of a CI job."""


def _descriptors() -> dict[int, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # The descriptor that listed the directory.
            continue
    return found


def _children() -> list[str]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No descriptor, thread or process outlives a test; a test that hangs ends the run with every thread's trace."""
    gc.collect()
    descriptors, threads, children = _descriptors(), set(threading.enumerate()), _children()
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    left = {number: what for number, what in _descriptors().items() if descriptors.get(number) != what}
    assert not left, f"descriptors left open: {left}"
    assert set(threading.enumerate()) <= threads
    assert _children() == children


@pytest.fixture(params=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """Makes an event loop of each kind."""
    if request.param == "uvloop":
        if uvloop is None:
            pytest.skip("uvloop is not installed")
        return uvloop.new_event_loop
    return asyncio.new_event_loop


@pytest.fixture
def run(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine to its end on a fresh loop of each kind."""

    def run_once(main: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(main)

    return run_once
