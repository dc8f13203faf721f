"""The waits of the tasks and of the consumer of a live source: for its next change, and for an item that is about to come.

Owns these waits. It is raw asyncio: an event of anyio costs several times as much, and cannot be cleared, so that each item of a
source would use up several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Changes", "Expectation"]


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


class Expectation:
    """A consumer that has work to do as soon as an item has come, and at a time in any case."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._then: Callable[[], object] | None = None

    def begin(self, then: Callable[[], object], limit_ns: int) -> bool:
        """Begins to wait for an item, unless it does already; returns whether it waits.

        Args:
            then: Called in a turn of the loop after the item has come, or when the limit has passed.
            limit_ns: Time from now; with 0 no wait begins.
        """
        if self._timer is None and limit_ns:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(limit_ns / 1e9, self.end)
        if self._timer is not None:
            self._then = then
        return self._timer is not None

    def end(self) -> None:
        """The item has come, or no further one comes. Nothing happens if none is expected."""
        then, self._then = self._then, None
        timer, self._timer = self._timer, None
        if then is None or timer is None:
            return
        timer.cancel()
        asyncio.get_running_loop().call_soon(then)
