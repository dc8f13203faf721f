"""A node: accepts connections, and gives each to the client that it belongs to.

Owns the clients, and the connections that have not greeted. Places are given by ``aionn.service.host.admission``, by the same rule
as at a Unix socket: at a limit the connection that has waited longest without a word loses its place.

Invariants:
1. A connection that has not greeted has a place, a limit of time, and nothing else: no memory beyond its first frame, no device.
2. A data connection belongs to a client by a secret of 128 bits that the node gave to the client's control connection.
3. A generation is given once in the life of a machine's boot: it contains the time at which the node started.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence

import anyio
import anyio.abc

from aionn.errors import Error, InvalidArgument
from aionn.fleet.framing import PRELUDE
from aionn.fleet.messages import GREETING_LIMITS, Figures, Hello, Refused, decode_from_client, framed
from aionn.fleet.node.quotas import ClientAccount, ClientQuotas, Names
from aionn.fleet.node.session import OpenDevice, Session
from aionn.fleet.tls import client_name, name_of_address
from aionn.fleet.wire import Wire, tune
from aionn.service.host.admission import FOREIGN_PID, Admission, ClientLimits, Credentials, NoPlace, Place

__all__ = ["Node", "check_name"]

NAME_CHARACTERS_MAX = 64

SECRET_BYTES = 16

ACCEPT_AGAIN_S = 0.1
"""Pause after a connection could not be accepted: descriptors or memory are short, and may be free later."""

_logger = logging.getLogger("aionn.service")


def check_name(name: str) -> None:
    """Checks the name of a node.

    Raises:
        InvalidArgument: It is empty, too long or not printable, or contains a slash.
    """
    if not name or len(name) > NAME_CHARACTERS_MAX or not name.isprintable() or "/" in name:
        raise InvalidArgument(
            f"node: expected a name of 1 to {NAME_CHARACTERS_MAX} printable characters without /, got {name!r}"
        )


class Node:
    """A node.

    Args:
        name: By which clients call its devices: ``<name>/<device>``.
        open_device: Opens a client's connection to the local device.
        tasks: Where clients are served.
        limits: Limits of the connections that have not greeted, and of clients; see ``ClientLimits``: an address stands for a user.
        quotas: Limits of clients by name; see ``quotas_of``.
        now: The clock of deadlines, in nanoseconds.
    """

    def __init__(
        self,
        name: str,
        open_device: OpenDevice,
        tasks: anyio.abc.TaskGroup,
        *,
        limits: ClientLimits | None = None,
        quotas: Mapping[str, ClientQuotas] | None = None,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._name = name
        self._open_device = open_device
        self._tasks = tasks
        self._limits = limits or ClientLimits()
        self._names = Names(quotas or {})
        self._now = now
        self._admission = Admission(self._limits)
        self._numbers = itertools.count()
        self._addresses: dict[str, int] = {}
        self._present: dict[Place, str] = {}
        self._sessions: dict[bytes, Session] = {}
        # 63 bits: other languages' integers are signed.
        self._generations = itertools.count((time.time_ns() & ((1 << 62) - 1)) + 1)

    def now(self) -> int:
        """Its clock, in nanoseconds."""
        return self._now()

    @property
    def figures(self) -> Figures:
        """Its load."""
        sessions = list(self._sessions.values())
        return Figures(
            len(sessions), sum(len(s.connections) for s in sessions), sum(s.executing for s in sessions)
        )

    async def serve(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        """Accepts connections until it is cancelled.

        Args:
            listener: Listens, and does not block.
            context: See ``tls.node_context``; None without encryption.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as e:
                _logger.warning("node %s: a connection cannot be accepted now: %s", self._name, e)
                await anyio.sleep(ACCEPT_AGAIN_S)
                continue
            try:
                place = self._admit(
                    name_of_address(str(address[0])) if isinstance(address, tuple) else "here"
                )
            except NoPlace as e:
                self._reject(sock, str(e), is_plain=context is None)
                continue
            self._tasks.start_soon(self._receive, sock, context, place)

    def _admit(self, address: str) -> Place:
        # Admission counts users by number. An address that comes again keeps its number while one of its connections has a place.
        number = self._addresses.get(address)
        if number is None:
            number = next(self._numbers)
        place = self._admission.admit(Credentials(FOREIGN_PID, number), anyio.current_time())
        self._addresses[address] = number
        self._present[place] = address
        return place

    def _reject(self, sock: socket.socket, why: str, *, is_plain: bool) -> None:
        count = self._admission.report(anyio.current_time())
        if count:
            _logger.warning("node %s: refused a connection, the last of %d: %s", self._name, count, why)
        with sock:
            if is_plain:
                try:
                    sock.send(
                        PRELUDE + framed(Refused(why, is_full=True)),
                        socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL,
                    )
                except OSError:
                    pass  # It is gone, or does not read.

    async def _receive(self, sock: socket.socket, context: ssl.SSLContext | None, place: Place) -> None:
        wire = self.newcomer(place, sock if context is None else None)
        try:
            tune(sock)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: wire,
                sock,
                ssl=context,
                ssl_handshake_timeout=None if context is None else self._limits.hello_s,
            )
        except (OSError, TimeoutError) as e:
            _logger.info("node %s: a connection was not made: %s", self._name, e)
            sock.close()
            wire.abort("it was not made")

    def newcomer(self, place: Place | None = None, sock: socket.socket | None = None) -> Wire:
        """The node's end of a new connection, to be given to its transport.

        Args:
            place: Its place; None gives it one.
            sock: See ``Wire``.
        """
        wire = Wire(GREETING_LIMITS, sock=sock, gives_reasons=True)
        _Newcomer(self, wire, self._admit("here") if place is None else place, self._limits.hello_s)
        return wire

    def greeted(self, newcomer: _Newcomer, hello: Hello, received_ns: int) -> None:
        """A connection has greeted: a data connection goes to its client, another one is a new client.

        Raises:
            InvalidArgument: A data connection without a client, or of a model that does not exist.
            ResourceExhausted: There are too many clients, or data connections, of this name or this client.
        """
        greeting = hello.sent_ns, received_ns
        if hello.role == "data":
            session = self._sessions.get(hello.secret)
            if session is None:
                raise InvalidArgument("node: a data connection of a client that is not connected")
            session.serve_data(newcomer.wire, hello.prepared, greeting)
            self.left(newcomer.place)
            return
        account = self._names.joined(newcomer.wire.peer_name(client_name))
        self._admission.greeted(newcomer.place)
        session = Session(
            newcomer.wire,
            self._open_device,
            now=self._now,
            node=self._name,
            generation=next(self._generations),
            secret=secrets.token_bytes(SECRET_BYTES),
            greeting=greeting,
            figures=lambda: self.figures,
            account=account,
        )
        self._tasks.start_soon(self._run, session, newcomer.place, account)

    async def _run(self, session: Session, place: Place, account: ClientAccount) -> None:
        self._sessions[session.secret] = session
        try:
            await session.run()
        except Exception:
            # One client's end, however it comes, does not affect others.
            _logger.exception("node %s: serving a client (%s) failed", self._name, account.name)
        finally:
            del self._sessions[session.secret]
            self._names.left(account)
            self.left(place)

    def left(self, place: Place) -> None:
        """A place is free."""
        self._admission.leave(place)
        address = self._present.pop(place, None)
        # A machine may connect from any number of addresses, of IPv6 and of the loopback network.
        if address is not None and address not in self._present.values():
            del self._addresses[address]


class _Newcomer:
    """A connection that has not greeted.

    Attributes:
        wire: The connection.
        place: Its place.
    """

    def __init__(self, node: Node, wire: Wire, place: Place, hello_s: float) -> None:
        self.wire = wire
        self.place = place
        self._node = node
        self._hello: Hello | None = None
        self._received_ns = 0
        self._has_sent = False
        wire.owner = self
        place.has_sent = lambda: self._has_sent
        place.on_displaced = lambda why: wire.close(why, with_reason=True)
        words = f"node: expected a greeting within {hello_s:g} s"
        self._timer = asyncio.get_running_loop().call_later(
            hello_s, lambda: wire.close(words, with_reason=True)
        )

    def on_heard(self) -> None:
        """See ``WireOwner``."""

    def on_head(self, head: bytes, body_bytes: int) -> Sequence[memoryview]:
        """See ``WireOwner``."""
        self._received_ns = self._node.now()
        message = decode_from_client(head)
        if not isinstance(message, Hello):
            raise InvalidArgument(f"node: expected a greeting, got {type(message).__name__}")
        self._hello = message
        return ()

    def on_body(self) -> None:
        """See ``WireOwner``."""
        assert self._hello is not None, "the head was one"
        self._has_sent = True
        self._timer.cancel()
        try:
            self._node.greeted(self, self._hello, self._received_ns)
        except Error as e:
            self.wire.refuse(e)

    def on_lost(self, why: str) -> None:
        """See ``WireOwner``."""
        self._timer.cancel()
        self._node.left(self.place)
        _logger.info("a connection ended before it greeted: %s", why)
