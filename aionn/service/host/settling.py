"""Executions that a client has cancelled: answered when the device is done with them, not before.

Owns which execution of a client is under way at the driver, and how to wait for the end of one that was cancelled. Refuses to own
the request to stop a device: that is the cancellation of the driver's coroutine.

Invariants:
1. The answer to a cancelled execution means that the device no longer touches the request's memory.
2. If a driver cannot report that, its coroutine is not cancelled: its own answer reports it.
3. A device that never gets done with it counts as one that hangs, as if nothing had been cancelled.

The cancellation of a driver's call ends the call's wait only, and the device may continue (``aionn.hal.device``), hence the second
wait.
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
        progress: Is notified of the wait, during which the device works.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        # By the identity of the call's body, which its caller keeps: by value it would be hashed with all its data.
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
        """The wait between the cancellation of a call and its answer; None for one that must not be cancelled."""
        under_way = self._under_way.get(id(body))
        if under_way is None:
            return at_once
        prepared, request = under_way
        return None if prepared.settle is None else functools.partial(self._settle, prepared.settle, request)

    async def _settle(self, settle: Callable[[Request], Awaitable[None]], request: Request) -> None:
        with self._progress.work():
            await settle(request)
