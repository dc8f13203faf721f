"""Looking for a result before its reader sleeps.

Owns the window in which a queue is polled, and the pauses of that.
"""

from __future__ import annotations

import anyio.lowlevel

import fmq

__all__ = ["Polling"]

POLLED_MAX = 8
"""Most results in a row that are found by looking for them: then other tasks of the loop have a turn."""

POLLING_PAUSE_MAX = 64
"""Most executions that are not looked for after one that took longer than the polling window: 1 after the first, twice as many
after each further one. So one that was disturbed costs the next ones little, and a model that is too long costs the loop little."""


class Polling:
    """The polling of one burst's results, which blocks the event loop during the window.

    Args:
        results: The queue; its owner keeps it open.
        window_ns: The longest time in which one execution looks for its result.

    Attributes:
        is_turn_due: Whether other tasks of the loop have a turn before the next result is looked for.
    """

    def __init__(self, results: fmq.MessageQueue, window_ns: int) -> None:
        self._results = results
        self._window_ns = window_ns
        self._pause = 0
        self._next_pause = 1
        self._found = 0
        self.is_turn_due = False

    async def look_after_turn(self) -> bytes | None:
        """As ``look``, when other tasks of the loop have had a turn. Cancelled, it has taken nothing."""
        self._found = 0
        self.is_turn_due = False
        if not self._pause:
            await anyio.lowlevel.checkpoint()
        return self.look()

    def look(self) -> bytes | None:
        """The result if it is here within the window; None immediately if the execution before took longer."""
        if self._pause:
            self._pause -= 1
            self._found = 0
            return None
        try:
            payload = self._results.read_message_blocking(self._window_ns)
        except fmq.Error:
            return None  # Reading reports the reason.
        if payload is None:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, POLLING_PAUSE_MAX)
            self._found = 0
        else:
            self._next_pause = 1
            self._found += 1
            self.is_turn_due = self._found >= POLLED_MAX
        return payload
