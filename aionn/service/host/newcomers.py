"""Newcomers at a shared socket: each gets a place, waits for one that is being freed, or is rejected with the reason.

Owns the newcomers that wait. ``admission`` decides; the host accepts connections and serves clients.

Invariants:
1. No more than ``REFUSALS_MAX`` newcomers wait or get a reason concurrently, ``REFUSALS_PER_USER_MAX`` of one user and
   ``REFUSALS_PER_PROCESS_MAX`` of one process, none for longer than ``FREED_S_MAX`` and ``REFUSAL_S_MAX``; further ones get the
   reason immediately, and their connections are closed.
2. The connection of a newcomer without a place is closed, and no descriptor that came over it stays. Others have their turns
   while it is closed.
3. A place that becomes free belongs to the newcomer that has waited longest, of those that it lets in.
4. A place that is given to another client before its own is served ends the connection as well.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import anyio.abc

from aionn.errors import DeviceUnavailable
from aionn.service.host.admission import (
    FOREIGN_PID,
    FREED_S_MAX,
    Admission,
    Credentials,
    NoPlace,
    Place,
    Reports,
)
from aionn.service.wire.protocol import Failed, Reply, encode, read_envelope
from aionn.service.wire.received import HangUps, close_in_turns, has_unread, payload_of
from aionn.service.wire.sizes import INLINE_BYTES_MAX

__all__ = ["FIRST_CALL", "Newcomers", "send_reason"]

REFUSALS_MAX = 64
"""Clients without a place that wait for one, or for their first call to be answered, concurrently; the server waits for no more."""

REFUSALS_PER_USER_MAX = REFUSALS_MAX // 2
"""Those of one user: half of all, so that the newcomers of one user leave room for those of others."""

REFUSALS_PER_PROCESS_MAX = REFUSALS_PER_USER_MAX // 2
"""Those of one process: it leaves room for other processes of its user."""

REFUSAL_S_MAX = 1.0
"""Limit of the time until a rejected client sends a call that can be answered."""

GONE_LOOK_S = 1.0
"""Interval between looks for clients that are gone while a message of theirs is worked on: a large one of a flood takes minutes."""

FIRST_CALL = 1
"""The number that clients of ours give their first call, Hello: the answer to it may come before the call."""

_logger = logging.getLogger("aionn.service")


class _Newcomer:
    """One without a place.

    Attributes:
        sock: Its connection.
        client: Its process and user.
        why: Why it has no place.
        is_decided: Set when it is served, is rejected or has left.
        is_served: Whether it has got a place; then ``serve_one`` owns its connection.
        has_left: Whether it has closed its end.
    """

    def __init__(self, sock: socket.socket, client: Credentials, why: str) -> None:
        self.sock = sock
        self.client = client
        self.why = why
        self.is_decided = anyio.Event()
        self.is_served = self.has_left = False


class Newcomers:
    """Gives newcomers a place, or rejects them.

    Args:
        admission: The places.
        tasks: Where clients are served.
        serve_one: Serves a client with a place and owns its connection; calls ``ends`` before that is closed, and ``leave``.
        next_turn: Awaited between parts of closing a rejected connection; others have turns in it.
    """

    def __init__(
        self,
        admission: Admission,
        tasks: anyio.abc.TaskGroup,
        serve_one: Callable[[socket.socket, Credentials, Place], Coroutine[Any, Any, None]],
        next_turn: Callable[[], Awaitable[None]],
    ) -> None:
        self.admission = admission
        self._silences = Reports()
        self._tasks = tasks
        self._serve_one = serve_one
        self._next_turn = next_turn
        # In the order in which they came: those that wait, and all that have no place.
        self._waiting: dict[_Newcomer, int] = {}
        self._without_place: dict[_Newcomer, None] = {}
        self._closed = anyio.Event()
        self._hang_ups = HangUps()
        self._watched: dict[Place, int] = {}

    def ends(self, place: Place) -> None:
        """The connection of a client is over, and its objects are being freed. Idempotent."""
        self._forget(place)
        self.admission.ends(place, anyio.current_time())

    def leave(self, place: Place) -> None:
        """Frees a place, for the newcomer that has waited longest, of those that it lets in."""
        self._forget(place)
        self.admission.leave(place)
        if self._waiting:
            self._hang_ups.look()
        for newcomer in list(self._waiting):
            try:
                admitted = self.admission.admit(newcomer.client, anyio.current_time())
            except NoPlace as e:
                newcomer.why = str(e)
                if not e.is_being_freed:
                    self._end_wait(newcomer)
            else:
                self._end_wait(newcomer)
                newcomer.is_served = True
                self._begin(newcomer.sock, newcomer.client, admitted)

    async def end_those_gone(self) -> None:
        """Ends connections of clients that are gone, also where messages are unread or worked on. Until it is cancelled."""
        while True:
            await anyio.sleep(GONE_LOOK_S)
            self._hang_ups.look()

    async def receive(self, sock: socket.socket, client: Credentials) -> None:
        """Serves a newcomer, or has it wait or refused in a task of its own; owns its connection. Ends when the next may come."""
        is_taken = False
        try:
            while True:
                try:
                    place = self._admit(client)
                except NoPlace as e:
                    if self._has_room(client):
                        is_taken = True
                        self._keep(_Newcomer(sock, client, str(e)), is_being_freed=e.is_being_freed)
                        return
                    if not any(newcomer.has_left for newcomer in self._without_place):
                        self._report(client, str(e))
                        _end(sock, str(e))
                        return
                else:
                    is_taken = True
                    self._begin(sock, client, place)
                    return
                await self._closed.wait()
        finally:
            if not is_taken:
                await close_in_turns(sock, self._next_turn)

    def _admit(self, client: Credentials) -> Place:
        """A place. Raises as ``Admission.admit``, after the connections of clients that are gone have ended."""
        try:
            return self.admission.admit(client, anyio.current_time())
        except NoPlace:
            self._hang_ups.look()
        return self.admission.admit(client, anyio.current_time())

    def _has_room(self, client: Credentials) -> bool:
        """Whether one more newcomer may wait or get the reason."""
        of_user = [newcomer.client for newcomer in self._without_place if newcomer.client.uid == client.uid]
        if (
            client.pid != FOREIGN_PID
            and sum(each.process == client.process for each in of_user) >= REFUSALS_PER_PROCESS_MAX
        ):
            return False
        return len(self._without_place) < REFUSALS_MAX and len(of_user) < REFUSALS_PER_USER_MAX

    def _begin(self, sock: socket.socket, client: Credentials, place: Place) -> None:
        # Another newcomer may come before the task begins.
        place.has_sent = lambda: has_unread(sock)
        place.on_displaced = lambda why: _end(sock, why)
        place.on_silence = lambda: self._was_silent(client)
        self._watched[place] = self._hang_ups.watch(sock, lambda: place.on_gone())
        self._tasks.start_soon(self._serve_one, sock, client, place)

    def _forget(self, place: Place) -> None:
        number = self._watched.pop(place, None)
        if number is not None:
            self._hang_ups.forget(number)

    def _keep(self, newcomer: _Newcomer, *, is_being_freed: bool) -> None:
        def leaves() -> None:
            newcomer.has_left = True
            self._end_wait(newcomer)

        self._without_place[newcomer] = None
        if is_being_freed:
            self._waiting[newcomer] = self._hang_ups.watch(newcomer.sock, leaves)
        else:
            newcomer.is_decided.set()
        self._tasks.start_soon(self._await_decision, newcomer)

    def _end_wait(self, newcomer: _Newcomer) -> None:
        number = self._waiting.pop(newcomer, None)
        if number is not None:
            self._hang_ups.forget(number)
        newcomer.is_decided.set()

    async def _await_decision(self, newcomer: _Newcomer) -> None:
        """Waits for the places of clients that are gone, and rejects the newcomer where none is free in time."""
        try:
            with anyio.move_on_after(FREED_S_MAX):
                await newcomer.is_decided.wait()
            self._end_wait(newcomer)
            if not newcomer.is_served and not newcomer.has_left:
                self._report(newcomer.client, newcomer.why)
                await _reject_newcomer(newcomer.sock, newcomer.why, self._next_turn)
        except Exception:
            # One newcomer's end, however it comes, does not affect others.
            _logger.exception("refusing a client (%s) failed", newcomer.client)
        finally:
            self._end_wait(newcomer)
            try:
                if not newcomer.is_served:
                    await close_in_turns(newcomer.sock, self._next_turn)
            finally:
                del self._without_place[newcomer]
                self._closed.set()
                self._closed = anyio.Event()

    def _was_silent(self, client: Credentials) -> None:
        """Notes that a connection of a client was ended since it has not sent Hello."""
        count = self._silences.report(anyio.current_time())
        if count:
            _logger.warning(
                "ended the connection of a client (%s), the last of %d that sent no Hello in time",
                client,
                count,
            )

    def _report(self, client: Credentials, why: str) -> None:
        count = self.admission.report(anyio.current_time())
        if count:
            _logger.warning("refused a client (%s), the last of %d refusals: %s", client, count, why)


async def _reject_newcomer(sock: socket.socket, why: str, next_turn: Callable[[], Awaitable[None]]) -> None:
    """Answers the client's first call with the reason why it is not served."""
    call = FIRST_CALL  # Its number as a rule, where the call does not come in time, or waits too long for its turn.
    with anyio.move_on_after(REFUSAL_S_MAX):
        sock.setblocking(False)
        try:
            await anyio.wait_readable(sock)
            envelope = read_envelope(await payload_of(sock, INLINE_BYTES_MAX, next_turn))
        except OSError:
            return
        if envelope is not None:
            call = envelope[1]
    send_reason(sock, call, why)


def _end(sock: socket.socket, why: str) -> None:
    """Sends a client the reason why it is not served, or not any more, and ends its connection, which is closed then."""
    send_reason(sock, FIRST_CALL, why)
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # It is gone.


def send_reason(sock: socket.socket, call: int, why: str) -> None:
    """Answers a call of a client that is not served, or not any more, if there is room for it in the socket."""
    error = DeviceUnavailable(why)
    payload, _, _ = encode(Reply(call, Failed(error.status, why)))
    try:
        sock.send(payload, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        pass  # It is gone, or does not read.
