"""Calls and replies over one Unix socket, in both directions at once.

Owns the socket, the numbers of calls, who waits for which reply, and what happens when the peer goes away. What is said is in
``protocol``; what a call does is the handler's.

Invariants:
1. Every call that was sent is answered by its reply, or by DEAD_OBJECT once the peer is gone; nobody waits for ever.
2. The handler never sees more than ``CALLS_AT_ONCE_MAX`` calls at once; the peer's further calls wait in the socket.
3. Descriptors that come with a message are closed when it was handled or refused.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.abc

from aionn.errors import DeadObject, Error, GeneralFailure, InvalidArgument, error_for_status, status_of
from aionn.service.protocol import (
    DESCRIPTORS_MAX,
    INLINE_BYTES_MAX,
    Call,
    CallBody,
    CancelCall,
    Done,
    Failed,
    Message,
    Reply,
    ReplyBody,
    decode,
    encode,
)

__all__ = ["CALLS_AT_ONCE_MAX", "Channel", "Handler"]

CALLS_AT_ONCE_MAX = 4096
"""Calls of one peer that are worked on at once: more than any client of ours keeps in flight, and a bound for the others."""

_DATAGRAM_BYTES_MAX = INLINE_BYTES_MAX + 1024
_R = TypeVar("_R")

Handler = Callable[[CallBody, "Channel"], Awaitable[ReplyBody]]
"""Answers a call of the peer; an ``Error`` that it raises becomes a ``Failed`` reply."""


class Channel:
    """One end of a connection.

    Args:
        sock: A connected SOCK_SEQPACKET Unix socket; owned by this object from now on.
        handler: Answers the peer's calls.
        peer_name: How errors name the other end.
    """

    def __init__(self, sock: socket.socket, handler: Handler, *, peer_name: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._handler = handler
        self._peer_name = peer_name
        self._next_id = 1
        self._pending: dict[int, tuple[anyio.Event, list[ReplyBody]]] = {}
        self._handled: dict[int, anyio.CancelScope] = {}
        self._send_lock = anyio.Lock()
        self._why_dead: str | None = None
        self._limiter = anyio.CapacityLimiter(CALLS_AT_ONCE_MAX)

    @property
    def is_alive(self) -> bool:
        """Whether calls can still succeed."""
        return self._why_dead is None

    async def run(self) -> None:
        """Reads until the peer goes away or the task is cancelled; then fails every pending call and closes the socket."""
        try:
            async with anyio.create_task_group() as tasks:
                await self._read_all(tasks)
                tasks.cancel_scope.cancel()
        finally:
            self.close(f"{self._peer_name} is gone")

    async def _read_all(self, tasks: anyio.abc.TaskGroup) -> None:
        while self._why_dead is None:
            try:
                payload, fds = await self._receive()
            except OSError:
                return
            if not payload:
                return
            try:
                message = decode(payload, fds)
            except Error as e:
                self.close(f"{self._peer_name} sent what is no message: {e}")
                return
            finally:
                for fd in fds:
                    os.close(fd)
            if isinstance(message, Reply):
                self._resolve(message)
            elif isinstance(message.body, CancelCall):
                self._cancel_handled(message.body.call)
            else:
                await self._limiter.acquire_on_behalf_of(message)
                tasks.start_soon(self._handle, message)

    async def _receive(self) -> tuple[bytes, list[int]]:
        size = DESCRIPTORS_MAX * array.array("i").itemsize
        while True:
            try:
                # Without MSG_CMSG_CLOEXEC a child forked at this moment would inherit the descriptors.
                payload, ancillary, flags, _ = self._sock.recvmsg(
                    _DATAGRAM_BYTES_MAX, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC
                )
                break
            except BlockingIOError:
                await anyio.wait_readable(self._sock)
        fds = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            for fd in fds:
                os.close(fd)
            self.close(f"{self._peer_name} sent a message that was cut off")
            return b"", []
        return payload, list(fds)

    async def _handle(self, call: Call) -> None:
        try:
            reply: ReplyBody
            with anyio.CancelScope() as scope:
                self._handled[call.id] = scope
                reply = await self._answer(call)
            if scope.cancelled_caught:
                reply = Failed(status_of(GeneralFailure()), "the caller cancelled the call")
            try:
                await self._send(Reply(call.id, reply))
            except DeadObject:
                pass
            except Error as e:
                await self._send(Reply(call.id, Failed(e.status, str(e))))
        finally:
            self._handled.pop(call.id, None)
            self._limiter.release_on_behalf_of(call)

    async def _answer(self, call: Call) -> ReplyBody:
        try:
            return await self._handler(call.body, self)
        except Error as e:
            return Failed(e.status, str(e))
        except Exception as e:
            return Failed(status_of(e), f"{type(e).__name__}: {e}")

    def _cancel_handled(self, call_id: int) -> None:
        scope = self._handled.get(call_id)
        if scope is not None:
            scope.cancel()

    def _resolve(self, reply: Reply) -> None:
        pending = self._pending.pop(reply.id, None)
        if pending is not None:  # A reply that nobody waits for any more is ignored.
            event, box = pending
            box.append(reply.body)
            event.set()

    async def call(self, body: CallBody, expected: type[_R]) -> _R:
        """Sends a call and returns its reply.

        Cancellation tells the peer that the reply is not wanted; its effect, if any, has happened or will.

        Raises:
            DeadObject: The peer is gone, or goes before it answers.
            Error: The peer's answer is a failure.
        """
        call_id = self._next_id
        self._next_id += 1
        event = anyio.Event()
        box: list[ReplyBody] = []
        self._pending[call_id] = (event, box)
        try:
            await self._send(Call(call_id, body))
            try:
                await event.wait()
            except BaseException:
                self._cancel_at_peer(call_id)
                raise
        finally:
            self._pending.pop(call_id, None)
        if not box:
            raise DeadObject(self._why_dead or f"{self._peer_name} is gone")
        reply = box[0]
        if isinstance(reply, Failed):
            raise _error_of(reply)
        if not isinstance(reply, expected):
            self.close(f"{self._peer_name} answered {type(body).__name__} with {type(reply).__name__}")
            raise DeadObject(self._why_dead or "")
        return reply

    async def tell(self, body: CallBody) -> None:
        """Sends a call whose only reply can be ``Done``. Raises as ``call``."""
        await self.call(body, Done)

    def _cancel_at_peer(self, call_id: int) -> None:
        # Without waiting: this runs while the caller is being cancelled. A full socket loses the wish, not the correctness.
        payload, _, _ = encode(Call(0, CancelCall(call_id)))
        try:
            self._sock.send(payload)
        except OSError:
            pass

    async def _send(self, message: Message) -> None:
        payload, fds, keep = encode(message)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        async with self._send_lock:
            while True:
                if self._why_dead is not None:
                    raise DeadObject(self._why_dead)
                try:
                    self._sock.sendmsg([payload], ancillary)
                    break
                except BlockingIOError:
                    await anyio.wait_writable(self._sock)
                except OSError as e:
                    self.close(f"{self._peer_name} is gone: {e.strerror}")
        del keep  # Memories and descriptors had to live until here: the kernel has its own references now.

    def close(self, why: str) -> None:
        """Ends the connection: pending and later calls raise DEAD_OBJECT with this reason. Idempotent."""
        if self._why_dead is not None:
            return
        self._why_dead = why
        pending, self._pending = self._pending, {}
        for event, _ in pending.values():
            event.set()
        try:
            # Wakes the reading task, which may not be the caller.
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def release(self) -> None:
        """Closes the descriptor itself; call it when ``run`` has ended or never began."""
        self.close(f"the connection to {self._peer_name} was closed")
        self._sock.close()


def _error_of(failed: Failed) -> Error:
    try:
        return error_for_status(failed.status, failed.message)
    except ValueError:
        return InvalidArgument(f"the peer answered a failure with status NONE: {failed.message}")
