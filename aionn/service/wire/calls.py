"""The calls of a connection while they are in progress, in both directions, and the answers that stand for what went wrong.

Owns their state alone; the channel moves it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import anyio

from aionn.errors import (
    Error,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    error_for_status,
    status_of,
    with_driver_traceback,
)
from aionn.service.wire.large import InMemory, in_memory
from aionn.service.wire.outbox import Outgoing
from aionn.service.wire.protocol import CallBody, Failed, GetMemories, Reply, ReplyBody, read_envelope
from aionn.service.wire.repetition import RecallMemories

__all__ = [
    "Handled",
    "Pending",
    "Refusal",
    "answer_to",
    "descriptors_max",
    "error_of",
    "not_wanted",
    "too_many_under_way",
]


REPLY_DESCRIPTORS_MAX = 8
"""Descriptors that may come with a reply, beside one for each memory that was asked for: a fence, or a memory that the reply is in.
Each takes some 40 microseconds of the event loop."""


def descriptors_max(body: CallBody) -> int:
    """Limit of the descriptors that come with the answer to a call."""
    match body:
        case GetMemories():
            return REPLY_DESCRIPTORS_MAX + len(body.slots)
        case RecallMemories():
            return REPLY_DESCRIPTORS_MAX + len(body.identifiers)
        case _:
            return REPLY_DESCRIPTORS_MAX


class Pending:
    """A call that the peer has not answered yet.

    Attributes:
        call_id: Its number.
        what: The name of the call, for errors.
        outgoing: Its message; None until that was encoded.
        reply: The answer; None until then, and where the peer is gone.
        is_over: Whether the answer is here, or the peer is gone.
        on_over: Called when it is over; keeps until then what must stay as long as the peer works on it.
        descriptors_max: Limit of the descriptors that come with the answer.
    """

    __slots__ = ("_waiter", "call_id", "descriptors_max", "is_over", "on_over", "outgoing", "reply", "what")

    def __init__(self, call_id: int, body: CallBody) -> None:
        self.call_id = call_id
        self.what = type(body).__name__
        self.descriptors_max = descriptors_max(body)
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


class Handled:
    """A call of the peer that is worked on."""

    __slots__ = ("inline_bytes", "large_bytes", "scope")

    def __init__(self, large_bytes: int, inline_bytes: int) -> None:
        self.large_bytes = large_bytes
        self.inline_bytes = inline_bytes
        self.scope = anyio.CancelScope()


class Refusal(NamedTuple):
    """Stands for a call that could not be taken: its answer."""

    reply: Reply


def answer_to(payload: bytes, failed: Failed) -> Reply | Refusal | None:
    """The handling of a message whose descriptors are lost: a call is rejected, a reply is taken for a failure."""
    stands_for: InMemory | None = None
    with suppress(InvalidArgument):
        stands_for = in_memory(payload)
    envelope = read_envelope(payload) if stands_for is None else (stands_for.is_call, stands_for.id)
    if envelope is None:
        return None
    is_call, number = envelope
    return Refusal(Reply(number, failed)) if is_call else Reply(number, failed)


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
        return with_driver_traceback(error_for_status(failed.status, failed.message), failed.traceback)
    except ValueError:
        return GeneralFailure(f"the peer answered a failure with status NONE: {failed.message}")
