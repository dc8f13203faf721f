"""Newcomers at a shared socket: each gets a place, waits for one that is being freed, or is rejected with the reason.

Owns the newcomers that wait. ``admission`` decides; the host accepts connections and serves clients.

Invariants:
1. No more than ``REFUSALS_MAX`` newcomers wait or get a reason concurrently, none for longer than ``FREED_S_MAX`` and
   ``REFUSAL_S_MAX``; the connections of further ones are closed.
2. The connection of a newcomer without a place is closed, and no descriptor that came over it stays.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.abc

from aionn.errors import DeviceUnavailable
from aionn.service.host.admission import Admission, Credentials, NoPlace, Place
from aionn.service.wire.protocol import Failed, Reply, encode, read_envelope
from aionn.service.wire.received import close_unread, payload_of
from aionn.service.wire.sizes import INLINE_BYTES_MAX

__all__ = ["Newcomers", "tell_why"]

REFUSALS_MAX = 32
"""Clients without a place that wait for one, or get the reason, concurrently; the connections of further ones are closed without a
message."""

FREED_S_MAX = 5.0
"""Limit of the wait for the place of a client that is gone. Its objects are freed in a fraction of a second, or in some seconds
where many clients leave beside others that are served."""

REFUSAL_S_MAX = 1.0
"""Limit of the time until a rejected client sends a call that can be answered."""

_logger = logging.getLogger("aionn.service")


class Newcomers:
    """Gives newcomers a place, or rejects them.

    Args:
        admission: The places.
        tasks: Where clients are served.
        serve_one: Serves a client with a place; calls ``leave``.
    """

    def __init__(
        self,
        admission: Admission,
        tasks: anyio.abc.TaskGroup,
        serve_one: Callable[[socket.socket, Credentials, Place], Coroutine[Any, Any, None]],
    ) -> None:
        self.admission = admission
        self._tasks = tasks
        self._serve_one = serve_one
        self._without_place = anyio.CapacityLimiter(REFUSALS_MAX)
        self._freed = anyio.Event()

    def leave(self, place: Place) -> None:
        """Frees a place."""
        self.admission.leave(place)
        self._freed.set()
        self._freed = anyio.Event()

    def receive(self, sock: socket.socket, client: Credentials) -> None:
        """Serves a newcomer, or has it wait or refused in a task of its own."""
        try:
            place = self.admission.admit(client)
        except NoPlace as e:
            if self._without_place.available_tokens:
                self._tasks.start_soon(self._wait, sock, client, str(e), e.is_being_freed)
            else:
                self._report(client, str(e))
                close_unread(sock)
        else:
            self._tasks.start_soon(self._serve_one, sock, client, place)

    async def _wait(self, sock: socket.socket, client: Credentials, why: str, is_being_freed: bool) -> None:
        """Waits for the places of clients that are gone, and rejects the client where none is free in time."""
        place = None
        async with self._without_place:
            try:
                with anyio.move_on_after(FREED_S_MAX):
                    while place is None and is_being_freed:
                        await self._freed.wait()
                        try:
                            place = self.admission.admit(client)
                        except NoPlace as e:
                            why, is_being_freed = str(e), e.is_being_freed
                if place is None:
                    self._report(client, why)
                    await _tell_newcomer(sock, why)
            finally:
                if place is None:
                    close_unread(sock)
        if place is not None:
            self._tasks.start_soon(self._serve_one, sock, client, place)

    def _report(self, client: Credentials, why: str) -> None:
        count = self.admission.report(anyio.current_time())
        if count:
            _logger.warning("refused a client (%s), the last of %d refusals: %s", client, count, why)


async def _tell_newcomer(sock: socket.socket, why: str) -> None:
    """Answers the client's first call with the reason why it is not served."""
    with anyio.move_on_after(REFUSAL_S_MAX):
        sock.setblocking(False)
        try:
            await anyio.wait_readable(sock)
            envelope = read_envelope(payload_of(sock, INLINE_BYTES_MAX))
        except OSError:
            return
        if envelope is not None:
            tell_why(sock, envelope[1], why)


def tell_why(sock: socket.socket, call: int, why: str) -> None:
    """Answers a call of a client that is not served, or not any more, if there is room for it in the socket."""
    error = DeviceUnavailable(why)
    payload, _, _ = encode(Reply(call, Failed(error.status, why)))
    try:
        sock.send(payload, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        pass  # It is gone, or does not read.
