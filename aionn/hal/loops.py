"""The event loop that objects belong to.

Owns the refusal of a call from elsewhere: another event loop, a thread without one, a forked child. What such a call waits for
comes in the loop of the object, so it would wait for ever.
"""

from __future__ import annotations

import asyncio
import os

from aionn.errors import InvalidArgument

__all__ = ["Home"]


class Home:
    """The loop that runs where this is made, and its process."""

    __slots__ = ("_loop", "_pid")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()

    def check(self, where: str) -> None:
        """Refuses a call from elsewhere. Costs less than a tenth of a microsecond where there is nothing to refuse.

        Raises:
            InvalidArgument: Another loop runs here, or none.
        """
        # In a forked child no loop counts as running until it runs one of its own.
        if asyncio._get_running_loop() is not self._loop:
            raise InvalidArgument(f"{where}: {self._elsewhere()}")

    def _elsewhere(self) -> str:
        expected = f"expected the event loop in which it was opened ({self._loop!r})"
        if os.getpid() != self._pid:
            return (
                f"{expected}, got a child (pid {os.getpid()}) that was forked from its process (pid {self._pid}): what it needs "
                f"must be opened there"
            )
        running = asyncio._get_running_loop()
        got = "none: threads use aionn.blocking" if running is None else repr(running)
        return f"{expected}, got {got}"
