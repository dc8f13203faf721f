"""An event that tasks await until the next change.

Owns the tasks that wait. It is raw asyncio: an event of anyio costs several times as much, and cannot be cleared, so that each
item of a source would use up several.
"""

from __future__ import annotations

import asyncio

__all__ = ["Changes"]


class Changes:
    """Wakes every task that waits, at each change; a change that none waits for costs nothing."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Waits for the next change."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            if future in self._waiting:
                self._waiting.remove(future)  # Cancelled.

    def announce(self) -> None:
        """Wakes them."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)
