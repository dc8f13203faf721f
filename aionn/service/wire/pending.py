"""Calls that wait for their answer, and the answers that stand for failures."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from aionn.errors import Error, ErrorStatus, GeneralFailure, error_for_status, status_of
from aionn.service.wire.outbox import Outgoing
from aionn.service.wire.protocol import Failed, ReplyBody

__all__ = ["Pending", "error_of", "not_wanted", "too_many_under_way"]


class Pending:
    """A call that the peer has not answered yet.

    Attributes:
        call_id: Its number.
        what: The name of the call, for errors.
        outgoing: Its message; None until that was encoded.
        reply: The answer; None until then, and where the peer is gone.
        is_over: Whether the answer is here, or the peer is gone.
        on_over: Called when it is over; keeps until then what must stay as long as the peer works on it.
    """

    __slots__ = ("_waiter", "call_id", "is_over", "on_over", "outgoing", "reply", "what")

    def __init__(self, call_id: int, what: str) -> None:
        self.call_id = call_id
        self.what = what
        self.outgoing: Outgoing | None = None
        self.reply: ReplyBody | None = None
        self.is_over = False
        self.on_over: Callable[[Pending], None] | None = None
        self._waiter: anyio.Event | None = None

    def finish(self, reply: ReplyBody | None) -> None:
        """Wakes the task that waits for it."""
        self.reply = reply
        self.is_over = True
        if self._waiter is not None:
            self._waiter.set()
        on_over, self.on_over = self.on_over, None
        if on_over is not None:
            on_over(self)

    async def over(self) -> None:
        """Waits until it is over."""
        if not self.is_over:
            if self._waiter is None:
                self._waiter = anyio.Event()
            await self._waiter.wait()


def not_wanted() -> Failed:
    """The answer to a call that was cancelled."""
    return Failed(status_of(GeneralFailure()), "the caller cancelled the call")


def too_many_under_way() -> Failed:
    """The answer to a call, or instead of an answer, that cannot be sent."""
    status = ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    return Failed(status, "message: too many descriptors are under way between processes")


def error_of(failed: Failed) -> Error:
    """The error that a failed call raises."""
    try:
        return error_for_status(failed.status, failed.message)
    except ValueError:
        return GeneralFailure(f"the peer answered a failure with status NONE: {failed.message}")
