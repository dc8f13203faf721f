"""Executions that a client has given up: answered when the device is done with them, not before.

Owns which execution of a client is under way at the driver, and how to wait for the end of one that was cancelled. Refuses to own
how a device is told to stop: that is the cancellation of the driver's coroutine.

Invariants:
1. The answer to an execution that was cancelled says that the device touches the request's memory no more.
2. Where a driver cannot say when that is, its coroutine is not cancelled at all: its own answer says it.
3. A device that never gets done with it counts as one that hangs, as if nothing had been cancelled.

A cancelled call of a driver "gives up waiting; the device may go on" (``aionn.hal.device``), hence the second wait.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from aionn.hal import PreparedModel, Request
from aionn.service.progress import Progress

__all__ = ["Settling", "at_once"]


async def at_once() -> None:
    """Nothing is left of the call."""


class Settling:
    """The executions of one client that are under way.

    Args:
        progress: Is told of the wait: the device works meanwhile.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        # By the identity of the call's body, which its caller keeps: by value it would be hashed with all that it says.
        self._under_way: dict[int, tuple[PreparedModel, Request]] = {}

    @contextmanager
    def execution(self, body: object, prepared: PreparedModel, request: Request) -> Iterator[None]:
        """The driver's part of a call."""
        self._under_way[id(body)] = prepared, request
        try:
            yield
        finally:
            del self._under_way[id(body)]

    def settle_of(self, body: object) -> Callable[[], Awaitable[None]] | None:
        """What is to be awaited once a call is cancelled, before it is answered; None for one that must not be cancelled."""
        under_way = self._under_way.get(id(body))
        if under_way is None:
            return at_once
        prepared, request = under_way
        return None if prepared.settle is None else functools.partial(self._settle, prepared.settle, request)

    async def _settle(self, settle: Callable[[Request], Awaitable[None]], request: Request) -> None:
        with self._progress.work():
            await settle(request)
