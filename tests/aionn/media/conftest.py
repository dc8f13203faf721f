"""Shared by the tests of the media package: the media, a virtual clock, a check that nothing is left behind."""

import asyncio
import contextlib
import os
import pathlib
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting for a timer takes no time; its ``now_ns`` is the clock to inject."""

    def __init__(self) -> None:
        self._virtual_ns = 5_000_000_000
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._virtual_ns / 1e9

    def now_ns(self) -> int:
        return self._virtual_ns

    def jump(self, timeout_s: float) -> None:
        # Rounded up: a clock that stands just before a timer's time would never fire it.
        self._virtual_ns += round(timeout_s * 1e9) + 1


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:  # No timer is set: only a thread can wake us. The limit is the watchdog.
            ready = super().select(20.0)
            assert ready, "nothing can ever happen in this loop again"
            return ready
        ready = super().select(0)
        if not ready and timeout > 0:
            self._loop.jump(timeout)
        return ready


def open_descriptors() -> set[tuple[str, str]]:
    """Number and target of each; the one that reads the list is gone when its target is asked for."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


@pytest.fixture
def data() -> pathlib.Path:
    """The folder of the small models and media."""
    folder = pathlib.Path(__file__).parents[3] / "examples" / "data"
    assert folder.is_dir(), "examples/data is part of the repository"
    return folder


@pytest.fixture
def virtually() -> Callable[[Callable[[Callable[[], int]], Coroutine[Any, Any, T]]], T]:
    """Runs ``body(now)`` in virtual time and returns its result."""

    def run(body: Callable[[Callable[[], int]], Coroutine[Any, Any, T]]) -> T:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            return runner.run(body(loop.now_ns))

    return run


@pytest.fixture
def really() -> Callable[[Callable[[], Coroutine[Any, Any, T]]], T]:
    """Runs ``body()`` in real time under a watchdog, then checks that no descriptor and no thread is left."""

    def run(body: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async def watched() -> T:
            async with asyncio.timeout(30):
                return await body()

        descriptors, threads = open_descriptors(), set(threading.enumerate())
        result = asyncio.run(watched())
        assert open_descriptors() - descriptors == set()
        left = [thread for thread in threading.enumerate() if thread not in threads]
        for (
            thread
        ) in left:  # anyio tells its idle threads to end when the loop ends, but does not wait for it.
            thread.join(5)
        assert [thread for thread in left if thread.is_alive()] == []
        return result

    return run


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live source is lost after tenths of a second of silence."""
    monkeypatch.setattr("aionn.media.live.silence.SILENCE_S_MIN", 0.3)
    monkeypatch.setattr("aionn.media.live.silence.SILENCE_S_DEFAULT", 0.3)
    monkeypatch.setattr("aionn.media.live.silence.FIRST_ITEM_S_MAX", 3.0)


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """Fails where a test waits for long outside of asyncio; one that hangs ends the run, with the stacks of all threads."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 60
