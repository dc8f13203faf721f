"""Work that is finished whatever happens to the task that asks for it: closing, reaping, giving back.

Owns the one answer to native cancellation. ``asyncio.Task.cancel`` passes a shielded scope of anyio, and it may come any number of
times: from ``asyncio.timeout``, from a task group of asyncio, from Ctrl-C, from ``asyncio.run`` when its main task has ended. So
the work runs in a task that nobody else has a reference to.

Invariants:
1. Work that was begun ends by itself; nobody cancels it.
2. Who was cancelled while waiting learns of it when the work has ended, and never before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

__all__ = ["finish"]

_T = TypeVar("_T")


async def finish(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs work in a task of its own and waits for its end, however often the caller is cancelled meanwhile.

    Args:
        work: It must end in bounded time by itself.

    Returns:
        What it returns.

    Raises:
        asyncio.CancelledError: The caller was cancelled meanwhile; the work has ended. What it returned is lost, and a failure of
            it is the context of this error.
        Exception: What the work raised.
    """
    task = asyncio.get_running_loop().create_task(work, name="aionn-finish")
    # asyncio.run cancels whatever asyncio.all_tasks knows once its main task has ended; who waits here keeps the loop alive then.
    asyncio._unregister_task(task)
    cancelled: asyncio.CancelledError | None = None
    # The shield is for the cancellations of anyio, which would come again in each turn of the loop.
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as e:
                cancelled = e
    try:
        return task.result()
    finally:
        if cancelled is not None:
            raise cancelled
