"""Cancellation by ``asyncio.Task.cancel``, which the shields of anyio do not stop, at the times that matter to closing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tests.support.fork_server import ForkServer

__all__ = ["NATIVE_COUNTS", "cancelled_natively", "child_processes"]

NATIVE_COUNTS = (1, 2, 1000)
"""Numbers of cancellations of a closing: once, again before it has ended, and in each turn of the loop until it has."""

WATCHDOG_S = 30.0
"""Limit of the time until a cancelled call ends."""


async def cancelled_natively(work: Coroutine[Any, Any, Any] | asyncio.Task[Any], count: int) -> None:
    """Runs work in a task, unless it is one, and cancels it so many times, once in each turn of the loop from its first pause on.

    Raises:
        AssertionError: It did not end in time, or not by its cancellation.
        Exception: It ended by this instead.
    """
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    assert not task.done(), "it ended without a pause"
    for _ in range(count):
        task.cancel()
        await asyncio.sleep(0)
        if task.done():
            break
    done, _ = await asyncio.wait([task], timeout=WATCHDOG_S)
    assert done, f"it did not end within {WATCHDOG_S:g} s of its cancellation"
    if not task.cancelled():
        task.result()
        raise AssertionError("it ended as if it had not been cancelled")


READINGS_MAX = 16
"""Readings of the kernel's list of children until two agree: a process that starts and reaps others all the time must not make its
reader wait without a limit, and no test changes its children during each of so many."""


def child_processes() -> set[int]:
    """The processes of this one that run, or have ended and are not reaped, but for those that fork processes for tests."""
    before = None
    # While another child is reaped, or the thread that started it ends, the kernel's list can miss one.
    for _ in range(READINGS_MAX):
        now = _listed_children()
        if now == before:
            break
        before = now
    return now - ForkServer.pids


def _listed_children() -> set[int]:
    pids: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            pids.update(int(pid) for pid in path.read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # The thread has ended by now.
    return pids
