"""The task in which a runtime's executions and connections live.

A task group of anyio must be left by the task that entered it. A runtime may well be opened by one task and closed by another: each
async fixture of pytest-asyncio does that. So the group lives in a task of its own, which needs raw asyncio: anyio knows no task
without a group.

Invariants:
1. ``aclose`` returns when every task has ended.
2. A task that fails ends the others: that is our bug, and ``aclose`` raises it.
"""

from __future__ import annotations

import asyncio

import anyio
import anyio.abc

__all__ = ["Background"]


class Background:
    """A task group in a task of its own.

    Attributes:
        tasks: Where to start tasks; valid from ``start`` to ``aclose``.
    """

    def __init__(self) -> None:
        self.tasks: anyio.abc.TaskGroup
        self._stop = anyio.Event()
        self._host: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the group."""
        started = anyio.Event()
        self._host = asyncio.create_task(self._run(started), name="aionn-runtime")
        with anyio.CancelScope(
            shield=True
        ):  # One loop turn; a host without anybody to stop it must not come about.
            await started.wait()

    async def _run(self, started: anyio.Event) -> None:
        async with anyio.create_task_group() as self.tasks:
            started.set()
            await self._stop.wait()
            self.tasks.cancel_scope.cancel()

    async def aclose(self) -> None:
        """Cancels what runs and waits for its end. Idempotent.

        Raises:
            BaseExceptionGroup: A task had failed.
        """
        if self._host is None:
            return
        host, self._host = self._host, None
        self._stop.set()
        with anyio.CancelScope(shield=True):
            await host
