"""Messages that wait for room in a socket: calls, answers and notices, in one order.

Owns the order in which messages leave, and what has not left yet. The channel defines their content.

Invariants:
1. Messages leave in the order in which they were put.
2. A message leaves whole, or is reported as failed, or the connection has ended.
3. Descriptors of a waiting message are duplicates: the owner of the originals may close them.
"""

from __future__ import annotations

import array
import collections
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from aionn.errors import ResourceExhausted
from aionn.service.wire.handles import Descriptor

__all__ = ["Outbox", "Outgoing"]

WAITING_MAX = 1 << 16
"""Limit of waiting messages; more than a client may hold objects of one kind. A peer that leaves so many unread has ended."""

SENT_PER_TURN_MAX = 16
"""Messages that leave before other tasks of the loop get their turn: some tens of microseconds."""

UNWATCHED_S = 0.01
"""Interval between tries of the socket while the event loop has no room to watch it."""

DESCRIPTOR_WEIGHT_BYTES = 16 << 10
"""The weight of a waiting descriptor: a process has some thousand of them, and gigabytes of memory. The answers in a memory of
their own are at most a few times as large.
"""


class Outgoing:
    """An encoded message on its way.

    Args:
        payload: The datagram.
        fds: The descriptors that go beside it.
        keep: Objects that own the descriptors; dropped once the message has left.
        on_over: Called once it has left (with None), could not leave (with why), or the connection has ended (with None).

    Attributes:
        size_bytes: The size that it counts as while it waits.
    """

    __slots__ = ("fds", "keep", "on_over", "payload", "size_bytes")

    def __init__(
        self,
        payload: bytes,
        fds: Sequence[int] = (),
        keep: Any = None,
        on_over: Callable[[OSError | None], None] | None = None,
    ) -> None:
        self.payload = payload
        self.fds = fds
        self.keep = keep
        self.size_bytes = len(payload) + DESCRIPTOR_WEIGHT_BYTES * len(fds)
        self.on_over = on_over

    def finish(self, why: OSError | None = None) -> None:
        """Releases its resources, and notifies the sender."""
        self.keep, self.fds = None, ()
        on_over, self.on_over = self.on_over, None
        if on_over is not None:
            on_over(why)


class Outbox:
    """The sending half of a connection.

    Args:
        sock: A socket that does not block.
        on_dead: Called with the reason when nothing more can be sent.
    """

    def __init__(self, sock: socket.socket, on_dead: Callable[[str], None]) -> None:
        self._sock = sock
        self._on_dead = on_dead
        self._waiting: collections.deque[Outgoing] = collections.deque()
        self._wake = anyio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, outgoing: Outgoing) -> bool:
        """Sends a message, immediately or when there is room. In the event loop's thread.

        Returns:
            Whether it is over already.

        Raises:
            ResourceExhausted: It has to wait, and no descriptor is left to keep what goes with it.
        """
        if self._closed:
            outgoing.finish()
            return True
        if not self._waiting and self._try(outgoing):
            return True
        if outgoing.fds:
            try:
                own = [Descriptor(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)) for fd in outgoing.fds]
            except OSError as e:
                raise ResourceExhausted(
                    f"message: no descriptor is left to keep it until there is room: {e.strerror}",
                    transient=True,
                ) from e
            outgoing.keep, outgoing.fds = own, [descriptor.fd for descriptor in own]
        self._append(outgoing)
        self._wake.set()
        return False

    def post(self, payload: bytes) -> None:
        """Sends a message without descriptors, immediately or in its turn. From any thread, also from a finaliser.

        A message that has to wait leaves after those that wait already; without any, with the next message in either direction.
        """
        if self._closed:
            return
        if not self._waiting:
            try:
                # One datagram: it cannot get mixed with what another thread sends.
                self._sock.send(payload, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                pass
            except OSError:
                return  # The connection ends, and what the notice is about ends with it.
        self._append(Outgoing(payload))

    def _append(self, outgoing: Outgoing) -> None:
        if len(self._waiting) >= WAITING_MAX:
            # A lost message would leave both ends with different ideas of what there is. From any thread: the reading task closes.
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._waiting.append(outgoing)

    def withdraw(self, outgoing: Outgoing) -> bool:
        """Takes back a message that has not left yet; False for one that has."""
        try:
            self._waiting.remove(outgoing)
        except ValueError:
            return False
        outgoing.on_over = None
        outgoing.finish()
        return True

    def wake(self) -> None:
        """Tries what waits. A notice of another thread may have found no room, and has no waiter."""
        if self._waiting:
            self._wake.set()

    async def run(self) -> None:
        """Sends what waits whenever there is room, until the task is cancelled or the connection has ended."""
        while not self._closed:
            self._wake = anyio.Event()
            while self._waiting and not self._closed:
                if self._send_some():
                    await anyio.lowlevel.checkpoint()
                else:
                    await self._wait_writable()
            if not self._closed:
                await self._wake.wait()

    def _send_some(self) -> bool:
        for _ in range(SENT_PER_TURN_MAX):
            if not self._waiting:
                break
            outgoing = self._waiting[0]
            if not self._try(outgoing):
                return False
            # The connection may have ended by that, and nothing waits any more.
            if self._waiting and self._waiting[0] is outgoing:
                self._waiting.popleft()
        return True

    def _try(self, outgoing: Outgoing) -> bool:
        """Whether the message is over: it has left, could not leave, or the connection has ended."""
        ancillary = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", outgoing.fds))] if outgoing.fds else []
        )
        try:
            self._sock.sendmsg([outgoing.payload], ancillary)
        except BlockingIOError:
            return False
        except OSError as e:
            if e.errno == errno.ETOOMANYREFS:
                outgoing.finish(e)
                return True
            self._on_dead(os.strerror(e.errno or 0))
        outgoing.finish()
        return True

    async def _wait_writable(self) -> None:
        try:
            await anyio.wait_writable(self._sock)
        except OSError:
            await anyio.sleep(UNWATCHED_S)

    def close(self) -> None:
        """Drops what waits; nothing more is sent. Idempotent."""
        self._closed = True
        self._wake.set()
        while self._waiting:
            self._waiting.popleft().finish()
