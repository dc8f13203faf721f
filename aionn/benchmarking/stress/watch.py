"""Keeping an eye on many parties of one event loop: a pause that holds all of them, and a watch for what hangs.

Owns no work of its own; the work of a soak is in ``soak``.

Invariants:
1. A pause holds no party in the middle of its work, and none for longer than the other parties need to reach it.
2. An episode that takes too long is reported with the stacks of all tasks and threads and cancelled, also while the event loop is
   blocked.
"""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import anyio
import anyio.lowlevel

__all__ = ["MESSAGES_MAX", "Pause", "Watch", "stacks"]

MESSAGES_MAX = 20
"""Failures and hangs that are reported with a text; further ones are counted."""

DEPTH_MAX = 100
"""Frames of a task that are reported."""

LOOK_S_MAX = 1.0
"""Longest time between two looks of the watch."""


class Pause:
    """Holds all parties between two pieces of work."""

    def __init__(self) -> None:
        self._party_count = 0
        self._waiting_count = 0
        self._is_wanted = False
        self._came = anyio.Event()
        self._is_over = anyio.Event()

    @asynccontextmanager
    async def party(self) -> AsyncIterator[None]:
        """Takes part: no pause begins before this party has reached ``pass_through``, or has ended."""
        self._party_count += 1
        try:
            yield
        finally:
            self._party_count -= 1
            self._came.set()

    async def pass_through(self) -> None:
        """Waits while a pause is wanted."""
        if not self._is_wanted:
            return
        self._waiting_count += 1
        self._came.set()
        try:
            await self._is_over.wait()
        finally:
            self._waiting_count -= 1

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Waits until all parties pause, and lets them continue at the end."""
        # A party that the pause before released and that has not run since then still counts as waiting.
        while self._waiting_count:
            await anyio.lowlevel.checkpoint()
        self._is_wanted, self._is_over = True, anyio.Event()
        try:
            while self._waiting_count < self._party_count:
                self._came = anyio.Event()
                await self._came.wait()
            yield
        finally:
            self._is_wanted = False
            self._is_over.set()


class Watch:
    """A thread that looks at how long each piece of work takes, and whether the loop continues.

    Args:
        limit_s: Time that a piece of work may take.
        on_stuck: Is called, from the watch's thread, with a hang that cannot be cancelled, and with a blocked loop.

    Attributes:
        hangs: The hangs that were found, as text with the stacks of all tasks and threads; at most ``MESSAGES_MAX``.
    """

    def __init__(self, limit_s: float, on_stuck: Callable[[str], None]) -> None:
        self._limit_s = limit_s
        self._on_stuck = on_stuck
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[int, tuple[str, float, anyio.CancelScope]] = {}
        self._reported: set[tuple[int, float]] = set()
        self._over = threading.Event()
        self._is_stuck = False
        self._heartbeat_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="aionn-soak-watch", daemon=True)
        self.hangs: list[str] = []
        self._thread.start()

    def heartbeat(self) -> None:
        """To be called by the loop now and then."""
        self._heartbeat_s = time.monotonic()

    def begin(self, who: int, what: str, scope: anyio.CancelScope) -> None:
        """A piece of work begins."""
        self._under_way[who] = (what, time.monotonic(), scope)

    def end(self, who: int) -> None:
        """It is over."""
        self._under_way.pop(who, None)

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(min(LOOK_S_MAX, self._limit_s / 4)):
            now_s = time.monotonic()
            for who, (what, began_s, scope) in list(self._under_way.items()):
                if now_s - began_s > self._limit_s and (who, began_s) not in self._reported:
                    self._reported.add((who, began_s))
                    self._report(f"{what} took more than {self._limit_s:g} s")
                    self._loop.call_soon_threadsafe(scope.cancel)
                elif now_s - began_s > 2 * self._limit_s:
                    self._stuck(f"{what} took more than {2 * self._limit_s:g} s, and cannot be cancelled")
            if now_s - self._heartbeat_s > self._limit_s:
                self._stuck(f"the event loop was blocked for more than {self._limit_s:g} s")

    def _stuck(self, what: str) -> None:
        if not self._is_stuck:
            self._is_stuck = True
            self._report(what)
            self._on_stuck(self.hangs[-1])

    def _report(self, what: str) -> None:
        if len(self.hangs) < MESSAGES_MAX:
            self.hangs.append(f"HANG: {what}\n{stacks(self._loop)}")


def stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Where each task of a loop and each thread of the process is, as text. From any thread."""
    text = io.StringIO()
    for task in asyncio.all_tasks(loop):
        text.write(f"task {task.get_name()}:\n")
        for frame in _awaited(task.get_coro()):
            text.writelines(traceback.format_stack(frame, limit=1))
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        text.write(f"thread {names.get(ident, ident)}:\n")
        traceback.print_stack(frame, file=text)
    return text.getvalue()


def _awaited(running: Any) -> Iterator[FrameType]:
    """The frames of a coroutine and of what it awaits, from the outside to the inside."""
    for _ in range(DEPTH_MAX):
        for kind, awaited in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            frame = getattr(running, f"{kind}_frame", None)
            if frame is not None:
                yield frame
                running = getattr(running, awaited)
                break
        else:
            return
