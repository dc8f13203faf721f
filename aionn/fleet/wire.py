"""One stream connection of a client or a node, in the event loop.

Owns the transport: bytes are read to their place by ``framing``, frames are sent in one piece, and the end of the connection is
reported once, with the reason. ``SimulatedLink`` provides transports as well, so that all of this also runs in virtual time.

Invariants:
1. ``on_lost`` is called exactly once for a connection that was made, however it ends, and nothing is reported after it.
2. The peer of a connection that ends by a broken rule gets the reason first, if it can understand it.
3. A node does not read a client that does not read: what waits to be sent is bounded by the answers of one exchange.

Source: ``asyncio.BufferedProtocol``, which reads into memory of its owner, over TCP and TLS alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from aionn.errors import Error, ResourceExhausted, words_of
from aionn.fleet.framing import HTTP_ANSWER, PRELUDE, ForeignProtocol, FrameLimits, FrameReader
from aionn.fleet.messages import Refused, framed

__all__ = ["JOINED_BYTES_MAX", "Wire", "WireOwner", "tune", "words_of_loss"]

JOINED_BYTES_MAX = 16 << 10
"""Largest body that is copied behind its head, where both cannot be sent by one call of the kernel."""

PARTS_MAX = 512
"""Parts that are sent by one call of the kernel, which takes 1,024."""

READ_BYTES_MAX = 1 << 20
"""Bytes of one connection that are read in one turn of the event loop: a fraction of a millisecond, and a frame as a rule."""

UNACKNOWLEDGED_MS = 10_000
"""Time after which the kernel ends a connection whose bytes the other machine does not acknowledge: a path that swallows large
packets, or a machine that has lost its network. A node that is silent for less is noticed by its missing heartbeats."""

CLOSE_S_MAX = 0.25
"""Time for which the last words of a connection may wait to be sent."""


class WireOwner(Protocol):
    """The owner of a connection, notified in the thread of the event loop."""

    def on_head(self, head: bytes, body_bytes: int) -> Sequence[memoryview] | None:
        """See ``FrameReader``. An ``Error`` that it raises ends the connection."""
        ...

    def on_body(self) -> None:
        """See ``FrameReader``. An ``Error`` that it raises ends the connection."""
        ...

    def on_heard(self) -> None:
        """Bytes came."""
        ...

    def on_lost(self, why: str) -> None:
        """The connection is over."""
        ...


class Wire(asyncio.BufferedProtocol):
    """A connection.

    Args:
        limits: The largest frame that is read.
        sock: The socket, where the connection is not encrypted; None for TLS and in virtual time. Head and body are then sent by
            one call of the kernel.
        gives_reasons: Whether a peer that breaks a rule gets the reason: a node does, a client does not.

    Attributes:
        owner: Assigned before the connection is made.
        reader: The reader of frames.
        is_lost: Whether it is over.
    """

    owner: WireOwner

    def __init__(
        self, limits: FrameLimits, *, sock: socket.socket | None = None, gives_reasons: bool = False
    ) -> None:
        self.reader = FrameReader(limits, self._head, self._body)
        self.is_lost = False
        self._sock = sock
        self._gives_reasons = gives_reasons
        self._transport: asyncio.Transport | None = None
        self._why = ""
        self._pauses: set[str] = set()
        self._ended = asyncio.get_running_loop().create_future()
        self._drained: asyncio.Future[None] | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)  # Those of uvloop are of no class of asyncio.
        if self.is_lost:
            stream.abort()  # It ended while the connection was being made.
            return
        self._transport = stream
        stream.write(PRELUDE)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.owner.on_heard()
        try:
            is_in_body = self.reader.received(nbytes)
            if is_in_body and self._sock is not None and not self._pauses:
                self._read_body(self._sock)
        except Error as e:
            self._break(e)

    def _read_body(self, sock: socket.socket) -> None:
        """Reads the present bytes of a body, without a turn of the event loop for each piece."""
        left = READ_BYTES_MAX
        is_in_body = True
        while is_in_body and left > 0:
            try:
                count = sock.recv_into(self.reader.buffer())
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                return  # The transport reports it.
            if not count:
                return
            left -= count
            is_in_body = self.reader.received(count)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reader.end()
        if self.is_lost:
            return
        self.is_lost = True
        self._sock = None
        why = self._why or words_of_loss(exc)
        self._wake()
        if not self._ended.done():
            self._ended.set_result(None)
        self.owner.on_lost(why)

    def pause_writing(self) -> None:
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()
            if self._gives_reasons:
                self.pause_reading("congested")

    def resume_writing(self) -> None:
        if self._drained is not None:
            self._wake()
            self.resume_reading("congested")

    def _wake(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # The owner's side

    @property
    def is_congested(self) -> bool:
        """Whether the peer does not read what was sent."""
        return self._drained is not None

    def send(self, head: bytes, body: Sequence[memoryview] = ()) -> None:
        """Sends a frame, or as much of it as fits now, and the rest when there is room. Without effect where the connection is
        over.

        Args:
            head: As from ``framed``.
            body: Its parts. Read before this returns, or copied.
        """
        transport = self._transport
        if transport is None or self.is_lost or transport.is_closing():
            return
        if not body:
            transport.write(head)
            return
        parts = [memoryview(head), *body]
        if len(parts) > PARTS_MAX:
            parts = [memoryview(b"".join(parts))]
        sock = self._sock
        if sock is not None and not transport.get_write_buffer_size():
            try:
                sent = sock.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as e:
                self.close(words_of_loss(e))
                return
            if sent == sum([part.nbytes for part in parts]):
                return
            parts = _behind(parts, sent)
        elif sum(part.nbytes for part in body) <= JOINED_BYTES_MAX:
            parts = [memoryview(b"".join(parts))]
        for part in parts:
            transport.write(part)

    def peer_name(self, name: Callable[[asyncio.BaseTransport], str]) -> str:
        """The name of the peer, by a function of its transport."""
        assert self._transport is not None, "asked while it is connected"
        return name(self._transport)

    async def drain(self) -> None:
        """Waits until most of what was sent has left, or the connection is over."""
        if self._drained is not None:
            await asyncio.shield(self._drained)

    def pause_reading(self, why: str) -> None:
        """Reads no more while there is this reason. Idempotent."""
        self._pauses.add(why)
        transport = self._transport
        if transport is not None and not transport.is_closing() and transport.is_reading():
            transport.pause_reading()

    def resume_reading(self, why: str) -> None:
        """This reason is gone. Idempotent."""
        self._pauses.discard(why)
        transport = self._transport
        if self._pauses:
            return
        if transport is not None and not transport.is_closing() and not transport.is_reading():
            transport.resume_reading()

    def place(self, places: Sequence[memoryview]) -> None:
        """See ``FrameReader.place``."""
        self.resume_reading("no place")
        try:
            self.reader.place(places)
        except Error as e:
            self._break(e)

    def refuse(self, error: Error) -> None:
        """Ends the connection, and gives the peer the reason. Idempotent."""
        self.close(str(error), with_reason=True, is_full=isinstance(error, ResourceExhausted))

    def close(self, why: str, *, with_reason: bool = False, is_full: bool = False) -> None:
        """Ends the connection. Idempotent.

        Args:
            why: The reason, for ``on_lost``.
            with_reason: Whether the peer gets the reason as well.
            is_full: See ``Refused``.
        """
        transport = self._transport
        self._why = self._why or why
        self.reader.end()
        if transport is None:
            self.connection_lost(None)  # It was never made.
            return
        if transport.is_closing():
            return
        if with_reason:
            transport.write(framed(Refused(why, is_full)))
        transport.close()
        asyncio.get_running_loop().call_later(CLOSE_S_MAX, self._abort)

    def abort(self, why: str) -> None:
        """Ends the connection, and discards what waits to be sent: the peer does not read. Idempotent."""
        self._why = self._why or why
        self.reader.end()
        if self._transport is None:
            self.connection_lost(None)
        else:
            self._transport.abort()

    async def ended(self) -> None:
        """Waits until the connection is over."""
        await asyncio.shield(self._ended)

    def _abort(self) -> None:
        if not self.is_lost and self._transport is not None:
            self._transport.abort()

    def _break(self, error: Error) -> None:
        if isinstance(error, ForeignProtocol):
            if error.is_http and self._gives_reasons and self._transport is not None:
                self._transport.write(HTTP_ANSWER)
            self.close(str(error))
        else:
            self.close(str(error), with_reason=self._gives_reasons)

    def _head(self, head: bytes, body_bytes: int) -> Sequence[memoryview] | None:
        places = self.owner.on_head(head, body_bytes)
        if places is None:
            self.pause_reading("no place")
        return places

    def _body(self) -> None:
        self.owner.on_body()


def _behind(parts: Sequence[memoryview], sent: int) -> list[memoryview]:
    """The rest of parts of which so many bytes were sent."""
    left = []
    for part in parts:
        if sent < part.nbytes:
            left.append(part[sent:])
        sent = max(0, sent - part.nbytes)
    return left


def words_of_loss(error: BaseException | None) -> str:
    """The reason why a connection has ended; None where the other end closed it in order.

    It is reset, or written to in vain, where the other end closed it before it had read all, such as a node that rejects a client.
    """
    if error is None or isinstance(error, ConnectionResetError | BrokenPipeError):
        return "the other end closed the connection"
    return words_of(error, "connection")


def tune(sock: socket.socket) -> None:
    """Sets the options of a TCP connection: no delay of small messages, and an end for a peer that is gone without a word."""
    options: tuple[tuple[int, int, Any], ...] = (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNACKNOWLEDGED_MS // 1000),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS),
    )
    os.set_inheritable(sock.fileno(), False)
    for level, option, value in options:
        with contextlib.suppress(OSError):  # A socket of another family, in tests.
            sock.setsockopt(level, option, value)
