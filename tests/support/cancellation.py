"""Cancellation by ``asyncio.Task.cancel``, which the shields of anyio do not stop, at the times that matter to closing."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from typing import Any

from aionn.benchmarking.stress.samples import child_pids
from tests.support.processes.fork_server import ForkServer

__all__ = ["NATIVE_COUNTS", "SLEEPING", "cancelled_natively", "child_processes"]

NATIVE_COUNTS = (1, 2, 1000)
"""Numbers of cancellations of a closing: once, again before it has ended, and in each turn of the loop until it has."""

SLEEPING = (sys.executable, "-S", "-c", "import time; time.sleep(3600)")
"""A command that does nothing until it is ended. Not ``sleep``, which a system may lack."""

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


def child_processes() -> set[int]:
    """The processes of this one that run, or have ended and are not reaped, but for those that fork processes for tests."""
    return child_pids(os.getpid()) - ForkServer.pids
