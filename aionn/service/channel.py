"""Calls and replies over one Unix socket, in both directions at once.

Owns the socket, the numbers of calls, who waits for which reply, and what happens when the peer goes away. What is said is in
``protocol``; what a call does is the handler's.

Invariants:
1. Every call that was sent is answered by its reply, or by DEAD_OBJECT once the peer is gone; nobody waits for ever.
2. The handler never sees more than ``CALLS_AT_ONCE_MAX`` calls at once, nor much more than ``BYTES_AT_ONCE_MAX`` of calls that are
   not small; the peer's further calls wait in the socket.
3. Descriptors that come with a message are closed when it was handled or refused.
4. A message whose descriptors cannot be taken because none is left here is answered with RESOURCE_EXHAUSTED, one whose memories
   cannot be used with GENERAL_FAILURE, and the connection goes on; one that was cut off for any other reason, or is no message,
   ends the connection.
"""

from __future__ import annotations

import array
import collections
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import anyio
import anyio.abc

from aionn.errors import (
    DeadObject,
    Error,
    GeneralFailure,
    InvalidArgument,
    ResourceExhausted,
    error_for_status,
    status_of,
)
from aionn.service.protocol import (
    DESCRIPTORS_MAX,
    INLINE_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    Call,
    CallBody,
    CancelCall,
    Done,
    ExecuteFencedReply,
    Failed,
    Message,
    Reply,
    ReplyBody,
    decode,
    encode,
    large_size_bytes,
    read_envelope,
)

__all__ = ["CALLS_AT_ONCE_MAX", "Channel", "Handler", "Pending", "SettleOf"]

CALLS_AT_ONCE_MAX = 4096
"""Calls of one peer that are worked on at once: more than any client of ours keeps in flight, and a bound for the others."""

BYTES_AT_ONCE_MAX = MESSAGE_BYTES_MAX
"""Size of calls that are worked on at once: one of the largest size, or many small ones."""

LATER_MAX = 1 << 16
"""Notices that wait for room in the socket; more than a client may hold objects of one kind."""

_DATAGRAM_BYTES_MAX = INLINE_BYTES_MAX + 1024
_R = TypeVar("_R")

Handler = Callable[[CallBody, "Channel"], Awaitable[ReplyBody]]
"""Answers a call of the peer; an ``Error`` that it raises becomes a ``Failed`` reply."""

SettleOf = Callable[[CallBody], Callable[[], Awaitable[None]] | None]
"""What to wait for after a call of the peer was cancelled and before it is answered; None for one that must not be cancelled."""


class Pending:
    """A call that the peer has not answered yet.

    Attributes:
        over: Set when the answer is here, or the peer is gone.
        reply: The answer; None until then, and where the peer is gone.
        on_over: Called when it is over; keeps until then what must stay as long as the peer works on it.
    """

    __slots__ = ("on_over", "over", "reply")

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.reply: ReplyBody | None = None
        self.on_over: Callable[[], None] | None = None

    def finish(self, reply: ReplyBody | None) -> None:
        """Wakes who waits for it."""
        self.reply = reply
        self.over.set()
        on_over, self.on_over = self.on_over, None
        if on_over is not None:
            on_over()


class Channel:
    """One end of a connection.

    Args:
        sock: A connected SOCK_SEQPACKET Unix socket; owned by this object from now on.
        handler: Answers the peer's calls.
        peer_name: How errors name the other end.
        sealed_only: See ``protocol.decode``.
        settle_of: Asked when the peer cancels a call; None cancels all of them, and answers at once.

    Attributes:
        received_count: How many messages came from the peer.
        was_cut_off: Whether the connection ended before calls of the peer were answered.
    """

    def __init__(
        self,
        sock: socket.socket,
        handler: Handler,
        *,
        peer_name: str,
        sealed_only: bool = False,
        settle_of: SettleOf | None = None,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._handler = handler
        self._peer_name = peer_name
        self._sealed_only = sealed_only
        self._next_id = 1
        self._settle_of = settle_of
        self._pending: dict[int, Pending] = {}
        self._handled: dict[int, _Handled] = {}
        self._send_lock = anyio.Lock()
        self._why_dead: str | None = None
        self._later: collections.deque[CallBody] = collections.deque(maxlen=LATER_MAX)
        self._handled_bytes = 0
        self._room = anyio.Event()
        self.received_count = 0
        self.was_cut_off = False
        self._limiter = anyio.CapacityLimiter(CALLS_AT_ONCE_MAX)

    @property
    def is_alive(self) -> bool:
        """Whether calls can still succeed."""
        return self._why_dead is None

    @property
    def pending_count(self) -> int:
        """How many calls wait for their reply."""
        return len(self._pending)

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
            size_bytes = 0
            try:
                payload, fds, is_short = await self._receive()
            except OSError:
                return
            if not payload:
                return
            try:
                if is_short:
                    raise ResourceExhausted(
                        "no descriptor is left to take those of the message", transient=True
                    )
                size_bytes = large_size_bytes(payload)
                await self._wait_for_room(size_bytes)
                message: Message | _Refusal = decode(payload, fds, sealed_only=self._sealed_only)
            except (GeneralFailure, ResourceExhausted) as e:
                failed = _answer_to(payload, Failed(e.status, f"{e} (process {os.getpid()})"))
                if failed is None:
                    self.close(f"a message of {self._peer_name} cannot be taken: {e}")
                    return
                message = failed
            except Error as e:
                self.close(f"{self._peer_name} sent what is no message: {e}")
                return
            finally:
                for fd in fds:
                    os.close(fd)
            self.received_count += 1
            await self._take(message, size_bytes, tasks)
            del message  # Its memories are not kept until the next one comes.

    async def _wait_for_room(self, size_bytes: int) -> None:
        while size_bytes and self._handled_bytes and self._handled_bytes + size_bytes > BYTES_AT_ONCE_MAX:
            self._room = anyio.Event()
            await self._room.wait()

    async def _take(self, message: Message | _Refusal, size_bytes: int, tasks: anyio.abc.TaskGroup) -> None:
        if isinstance(message, Reply):
            self._resolve(message)
        elif isinstance(message, _Refusal):
            tasks.start_soon(self._send_reply, message.reply)
        elif isinstance(message.body, CancelCall):
            self._cancel_handled(message.body.call)
        else:
            borrower = object()  # A message itself would be hashed, with all the constants of its model.
            await self._limiter.acquire_on_behalf_of(borrower)
            self._handled_bytes += size_bytes
            # Known before its task begins: the peer may have cancelled it by then.
            self._handled[message.id] = handled = _Handled(message.body)
            tasks.start_soon(self._handle, message, size_bytes, borrower, handled)

    async def _receive(self) -> tuple[bytes, list[int], bool]:
        """A datagram, its descriptors, and whether some of those were lost because none is left in this process."""
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
            # Asked before they are closed: the received ones are what fills the table.
            is_short = not flags & socket.MSG_TRUNC and _no_descriptor_is_left()
            if not is_short:
                for fd in fds:
                    os.close(fd)
                self.close(f"{self._peer_name} sent a message that was cut off")
                return b"", [], False
            return payload, list(fds), True
        return payload, list(fds), False

    async def _handle(self, call: Call, size_bytes: int, borrower: object, handled: _Handled) -> None:
        try:
            reply: ReplyBody
            with handled.scope:
                reply = await self._answer(call)
            if handled.scope.cancelled_caught:
                reply = await self._settled(handled)
            await self._send_reply(Reply(call.id, reply))
        except anyio.get_cancelled_exc_class():
            self.was_cut_off = True
            raise
        finally:
            if self._handled.get(call.id) is handled:
                del self._handled[call.id]
            self._limiter.release_on_behalf_of(borrower)
            self._handled_bytes -= size_bytes
            self._room.set()

    async def _send_reply(self, reply: Reply) -> None:
        try:
            await self._send(reply)
        except DeadObject:
            pass
        except Error as e:
            try:
                await self._send(Reply(reply.id, Failed(e.status, str(e))))
            except DeadObject:
                pass

    async def _answer(self, call: Call) -> ReplyBody:
        try:
            return await self._handler(call.body, self)
        except Error as e:
            return Failed(e.status, str(e))
        except Exception as e:
            return Failed(status_of(e), f"{type(e).__name__}: {e}")

    def _cancel_handled(self, call_id: int) -> None:
        handled = self._handled.get(call_id)
        if handled is None or handled.scope.cancel_called:
            return
        if self._settle_of is not None:
            handled.settle = self._settle_of(handled.body)
            if handled.settle is None:
                return
        handled.scope.cancel()

    async def _settled(self, handled: _Handled) -> ReplyBody:
        """The answer to a call that was cancelled, when nothing of it runs any more."""
        try:
            if handled.settle is not None:
                await handled.settle()
        except Exception as e:
            return Failed(status_of(e), f"{type(e).__name__}: {e}")
        return Failed(status_of(GeneralFailure()), "the caller cancelled the call")

    def _resolve(self, reply: Reply) -> None:
        pending = self._pending.pop(reply.id, None)
        if pending is not None:
            pending.finish(reply.body)
        elif isinstance(reply.body, ExecuteFencedReply) and reply.body.fence is not None:
            # A reply that nobody waits for any more is ignored, and what came with it is given back.
            reply.body.fence.close()

    async def call(
        self, body: CallBody, expected: type[_R], *, left: Callable[[Pending], None] | None = None
    ) -> _R:
        """Sends a call and returns its reply.

        Cancellation tells the peer that the reply is not wanted; its effect, if any, has happened or will. ``left`` is then told of
        the call, if it is with the peer, so that one can wait until it is over.

        Raises:
            DeadObject: The peer is gone, or goes before it answers.
            Error: The peer's answer is a failure.
        """
        call_id = self._next_id
        self._next_id += 1
        pending = self._pending[call_id] = Pending()
        is_left = False
        try:
            await self._send(Call(call_id, body))
            try:
                await pending.over.wait()
            except BaseException:
                self._cancel_at_peer(call_id)
                if left is not None and not pending.over.is_set():
                    is_left = True  # Its answer, or the end of the peer, takes it out.
                    left(pending)
                raise
        finally:
            if not is_left:
                self._pending.pop(call_id, None)
        reply = pending.reply
        if reply is None:
            raise DeadObject(self._why_dead or f"{self._peer_name} is gone")
        if isinstance(reply, Failed):
            raise _error_of(reply)
        if not isinstance(reply, expected):
            self.close(f"{self._peer_name} answered {type(body).__name__} with {type(reply).__name__}")
            raise DeadObject(self._why_dead or "")
        return reply

    async def tell(self, body: CallBody) -> None:
        """Sends a call whose only reply can be ``Done``. Raises as ``call``."""
        await self.call(body, Done)

    def post(self, body: CallBody) -> None:
        """Sends a call whose reply nobody wants, at once or with the next message; from any thread, also from a finaliser."""
        if self._why_dead is not None:
            return
        payload, _, _ = encode(Call(0, body))
        try:
            # One datagram: it cannot get mixed with what another thread sends.
            self._sock.send(payload, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._later.append(body)
        except OSError:
            pass  # The connection ends, and what the notice is about ends with it.

    def _post_later(self) -> None:
        for _ in range(len(self._later)):
            self.post(self._later.popleft())

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
                    self._post_later()
                    break
                except BlockingIOError:
                    await self._wait_writable()
                except OSError as e:
                    if e.errno == errno.ETOOMANYREFS:
                        raise ResourceExhausted(
                            "message: too many descriptors are under way between processes", transient=True
                        ) from e
                    self.close(f"{self._peer_name} is gone: {e.strerror}")
        del keep  # Memories and descriptors had to live until here: the kernel has its own references now.

    async def _wait_writable(self) -> None:
        try:
            await anyio.wait_writable(self._sock)
        except OSError as e:
            raise ResourceExhausted(f"message: the socket cannot be watched: {e.strerror}") from e

    def close(self, why: str) -> None:
        """Ends the connection: pending and later calls raise DEAD_OBJECT with this reason. Idempotent."""
        if self._why_dead is not None:
            return
        self._why_dead = why
        pending, self._pending = self._pending, {}
        for call in pending.values():
            call.finish(None)
        try:
            # Wakes the reading task, which may not be the caller.
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def release(self) -> None:
        """Closes the descriptor itself; call it when ``run`` has ended or never began."""
        self.close(f"the connection to {self._peer_name} was closed")
        self._sock.close()


class _Handled:
    """A call of the peer that is worked on."""

    __slots__ = ("body", "scope", "settle")

    def __init__(self, body: CallBody) -> None:
        self.body = body
        self.scope = anyio.CancelScope()
        self.settle: Callable[[], Awaitable[None]] | None = None


class _Refusal(NamedTuple):
    """Stands for a call that could not be taken: its answer."""

    reply: Reply


def _answer_to(payload: bytes, failed: Failed) -> Reply | _Refusal | None:
    """What becomes of a message whose descriptors are lost: a call is refused, a reply is taken for a failure."""
    envelope = read_envelope(payload)
    if envelope is None:
        return None
    is_call, number = envelope
    return _Refusal(Reply(number, failed)) if is_call else Reply(number, failed)


def _no_descriptor_is_left() -> bool:
    try:
        os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as e:
        return e.errno in (errno.EMFILE, errno.ENFILE)
    return False


def _error_of(failed: Failed) -> Error:
    try:
        return error_for_status(failed.status, failed.message)
    except ValueError:
        return InvalidArgument(f"the peer answered a failure with status NONE: {failed.message}")
