"""The event loops that fences are tested on. That nothing stays behind is checked for all tests by the conftest above."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

try:
    import uvloop
except ImportError:
    uvloop = None
else:
    uvloop.new_event_loop().close()  # The first loop of all opens a pipe for the life of the process.


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
