"""Calls and replies over one Unix socket, in both directions concurrently.

Owns the socket, the numbers of calls, who waits for which reply, and what happens when the peer goes away. ``protocol`` defines the
messages; the handler executes calls.

Invariants:
1. Every call that was sent is answered by its reply, or by DEAD_OBJECT once the peer is gone; no caller waits without end.
2. No more than ``CALLS_AT_ONCE_MAX`` calls of the peer are worked on or have an answer that the peer has not read, nor much more
   than ``BYTES_AT_ONCE_MAX``, ``INLINE_BYTES_AT_ONCE_MAX`` and ``OWED_BYTES_MAX`` of them; the peer's further messages wait in
   the socket.
3. Other tasks of the loop get their turn after ``TURN_WEIGHT`` of the peer's messages; after each message where the peer
   has other connections as well, or does not wait for its answers while other processes are served (``peers``).
4. Where the connection ends, no turn of the loop ends more than ``TURN_WEIGHT`` of its calls in either direction, and their number
   does not matter to other tasks.
5. Descriptors that come with a message are closed when it was handled or refused.
6. A message for which no descriptor or memory is left is answered with RESOURCE_EXHAUSTED, one whose memories cannot be used with
   GENERAL_FAILURE, and the connection continues; one that was cut off for another reason, or is not a message, ends it. A call
   with values of wrong types is answered with INVALID_ARGUMENT: an application chose them.
7. No descriptor that the peer sends, read or not, makes a closing wait in the event loop, and the peer's next message waits for it.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Awaitable, Callable, Set
from itertools import islice
from typing import Any, TypeVar

import anyio
import anyio.abc

from aionn.errors import (
    DeadObject,
    Error,
    GeneralFailure,
    InvalidArgument,
    ResourceExhausted,
    shortage_of,
    status_of,
    traceback_of,
    words_of,
)
from aionn.hal.callers import Connection
from aionn.platform.loops import Home, is_cancelled
from aionn.scheduler.worker_turns import WorkerTurns
from aionn.service.wire.calls import (
    REPLY_DESCRIPTORS_MAX,
    Handled,
    Pending,
    Refusal,
    answer_to,
    error_of,
    not_wanted,
    too_many_under_way,
)
from aionn.service.wire.large import check_answered, in_memory, in_turns, read_parts
from aionn.service.wire.load import Load
from aionn.service.wire.outbox import Outbox, Outgoing
from aionn.service.wire.peers import Peer
from aionn.service.wire.protocol import (
    DESCRIPTORS_MAX,
    Call,
    CallBody,
    CancelCall,
    Done,
    ExecuteFencedReply,
    ExecuteReply,
    Failed,
    Message,
    Reply,
    ReplyBody,
    decode_inline,
    decode_parts,
    encode,
    has_large_model,
    read_envelope,
)
from aionn.service.wire.quotas import Account
from aionn.service.wire.received import (
    close_charged,
    close_kept,
    close_unread,
    drain,
    have_strange_sockets,
    keeping,
    local_only,
    no_descriptor_is_left,
    receive,
)
from aionn.service.wire.sizes import INLINE_BYTES_MAX, SMALL_BYTES_MAX, WrongTypes, shortened
from fences import SyncFence, first

__all__ = ["Channel", "Handler"]

TURN_WEIGHT = 8
"""Messages that are taken before other tasks of the loop get their turn, calls excepted: one each. Some tens of microseconds."""

TURN_WEIGHT_BYTES = 1 << 10
"""A message counts as one more for each so many bytes."""

TURN_WEIGHT_DESCRIPTORS = 4
"""A message counts as one more for each so many descriptors, each of which is looked at and closed."""

STRUCTURE_WEIGHT = 8
"""The weight of a byte of a large message's parts: the objects of operands and operations take some ten times as much."""

COPIES_AT_ONCE_MAX = 2
"""Large messages of all connections that are copied concurrently: each takes a thread, and a core."""

_DATAGRAM_BYTES_MAX = INLINE_BYTES_MAX + 1024
_copies = WorkerTurns("copies of messages", COPIES_AT_ONCE_MAX)
_R = TypeVar("_R")

Handler = Callable[[CallBody, "Channel"], Awaitable[ReplyBody]]
"""Answers a call of the peer; an ``Error`` that it raises becomes a ``Failed`` reply. Cancelled when the peer cancels the call,
which is answered when it has returned."""


class Channel:
    """One end of a connection.

    Args:
        sock: A connected SOCK_SEQPACKET Unix socket; owned by this object from now on.
        handler: Answers the peer's calls.
        peer_name: Name of the other end in errors.
        sealed_only: See ``protocol.decode``.
        account: See ``protocol.decode``.
        freed_by: The call that frees what a reply gives, for replies without a waiter; None without one.
        peer: The process at the other end, which may have other connections; None for one that has none.
        answered: The kinds of calls that the handler answers, None for all; of others nothing large and no descriptor is read.

    Attributes:
        has_received: Whether a message came from the peer.
        received_count: Number of the peer's messages that were read.
        ended: Signalled when the connection has ended.
        was_cut_off: Whether the connection ended before calls of the peer were answered.
    """

    def __init__(
        self,
        sock: socket.socket,
        handler: Handler,
        *,
        peer_name: str,
        sealed_only: bool = False,
        account: Account | None = None,
        freed_by: Callable[[ReplyBody], CallBody | None] | None = None,
        peer: Peer | None = None,
        answered: Set[str] | None = None,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._handler = handler
        self._peer_name = peer_name
        self._sealed_only = sealed_only
        self._account = account
        self._next_id = 1
        self._home = Home()
        self._freed_by = freed_by
        self._peer = Peer() if peer is None else peer
        self._answered = answered
        self._pending: dict[int, Pending] = {}
        self._handled: dict[int, Handled] = {}
        self._why_dead: str | None = None
        self._outbox = Outbox(sock, lambda why: self.close(f"{peer_name} is gone: {why}"))
        self._turn_left, self._has_waited = TURN_WEIGHT, True
        self._load = Load()
        self._room, self._over = anyio.Event(), anyio.Event()
        self.received_count, self.ended = 0, SyncFence("connection")
        self._is_running = self.has_received = self.was_cut_off = False

    @property
    def is_alive(self) -> bool:
        """Whether calls can still succeed."""
        return self._why_dead is None

    @property
    def pending_count(self) -> int:
        """Number of calls that wait for their reply."""
        return len(self._pending)

    @property
    def load(self) -> tuple[int, int]:
        """The load of this end for the peer: calls in progress, and answers that it has not read."""
        return self._load.worked_on, self._load.owed

    async def run(self) -> None:
        """Reads until the peer goes away or the task is cancelled; then fails every pending call and closes the socket."""
        self._peer.loads.append(self._load)
        self._is_running = True
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._outbox.run)
                tasks.start_soon(self._end_calls)
                try:
                    await self._read_all(tasks)
                finally:
                    # Before the handlers are waited for: one may wait, shielded, for what only an answer of the peer can end.
                    self.close(f"{self._peer_name} is gone")
                await self._cancel_all_handled()
                while self._pending:
                    await self._peer.next_turn_of_leaving()  # They end in a task of their own.
                tasks.cancel_scope.cancel()
        finally:
            self._is_running = False
            self._peer.loads.remove(self._load)
            self.close(f"{self._peer_name} is gone")
            self._fail_calls(len(self._pending))
            with anyio.CancelScope(shield=True):
                await drain(self._sock, self._peer.next_turn_of_leaving)

    async def _end_calls(self) -> None:
        """Fails the pending calls when the connection has ended, a few in each turn of the loop; all of them if it is cancelled."""
        try:
            await self._over.wait()
            while self._pending:
                self._fail_calls(TURN_WEIGHT)
                await self._peer.next_turn_of_leaving()
        finally:
            self._fail_calls(len(self._pending))

    def _fail_calls(self, count: int) -> None:
        for number in list(islice(self._pending, count)):
            self._pending.pop(number).finish(None)

    async def _cancel_all_handled(self) -> None:
        """Cancels the calls of the peer, a few in each turn of the loop: each continues in the next one."""
        for place, handled in enumerate(list(self._handled.values()), 1):
            handled.scope.cancel()
            if place % TURN_WEIGHT == 0:
                await self._peer.next_turn_of_leaving()

    async def _read_all(self, tasks: anyio.abc.TaskGroup) -> None:
        while self._why_dead is None:
            try:
                payload, fds, is_short = await self._receive()
            except OSError:
                return
            if not payload:
                close_charged(fds, self._peer)  # An empty message ends the connection, too.
                return
            self.has_received = True
            message: Message | Refusal | None
            try:
                with keeping(fds, self._peer, self.ended):
                    await self._take_turn(payload, fds)
                    message, size_bytes = await self._decoded(payload, fds, is_short)
            except (GeneralFailure, MemoryError, ResourceExhausted) as e:
                why = f"{shortage_of(e, 'message') or e} (process {os.getpid()})"
                failed = answer_to(payload, Failed(status_of(e), shortened(why)))
                if failed is None:
                    self.close(f"a message of {self._peer_name} cannot be taken: {why}")
                    return
                message, size_bytes = failed, 0
            except WrongTypes as e:
                answer = answer_to(payload, Failed(e.status, shortened(str(e))))
                if not isinstance(answer, Refusal):
                    self.close(f"{self._peer_name} sent an invalid message: {shortened(str(e))}")
                    return
                message, size_bytes = answer, 0
            except Error as e:
                self.close(f"{self._peer_name} sent an invalid message: {shortened(str(e))}")
                return
            finally:
                closed = close_charged(fds, self._peer) if fds else None
            self.received_count += 1
            if message is not None:
                await self._take(message, size_bytes, len(payload), tasks)
            del message  # Its memories are not kept until the next one comes.
            self._outbox.wake()
            if closed is not None:
                await first([closed, self.ended])
                await anyio.sleep(self._peer.pause_after_closing_ns() / 1e9)

    async def _take_turn(self, payload: bytes, fds: list[int]) -> None:
        """Lets other tasks go first when this connection has had its turn."""
        self._peer.received(has_waited=self._has_waited)
        if self._turn_left <= 0 or self._peer.takes_turns:
            await self._peer.next_turn()
            self._turn_left = TURN_WEIGHT
        self._turn_left -= 1 + len(payload) // TURN_WEIGHT_BYTES + len(fds) // TURN_WEIGHT_DESCRIPTORS

    async def _decoded(self, payload: bytes, fds: list[int], is_short: bool) -> tuple[Message | None, int]:
        """A message, None for one without a waiter; and its size, if it is in memory of its own."""
        if is_short:
            raise ResourceExhausted("no descriptor is left to take those of the message", transient=True)
        stands_for = in_memory(payload)
        if self._answered is not None and (fds or stands_for is not None):
            check_answered(payload, stands_for, self._answered)
        if stands_for is None:
            if len(payload) > SMALL_BYTES_MAX or len(fds) > REPLY_DESCRIPTORS_MAX:
                envelope = read_envelope(payload)
                if self._is_unexpected(envelope):
                    return None, 0
                self._check_descriptors(envelope, fds)
            return decode_inline(payload, fds, sealed_only=self._sealed_only, account=self._account), 0
        if self._is_unexpected((stands_for.is_call, stands_for.id)):
            return None, 0
        self._check_descriptors((stands_for.is_call, stands_for.id), fds)
        size_bytes = STRUCTURE_WEIGHT * stands_for.size_bytes + stands_for.values_bytes
        await self._wait_for_room(lambda: self._load.has_room_for_large(size_bytes))
        structure, values = await self._in_thread(read_parts, stands_for, fds)
        steps = decode_parts(
            stands_for, structure, values, fds, sealed_only=self._sealed_only, account=self._account
        )
        return await in_turns(steps, self._peer.next_turn), size_bytes

    async def _in_thread(self, call: Callable[..., _R], *arguments: Any) -> _R:
        """Operations that take long without the interpreter's lock: copies of large messages, whose descriptors are in use then."""
        return await _copies.run(Connection(self._peer, self), call, *arguments)

    def _is_unexpected(self, envelope: tuple[bool, int] | None) -> bool:
        """Whether a message is a reply without a waiter: its descriptors are released unread."""
        return envelope is not None and not envelope[0] and envelope[1] not in self._pending

    def _check_descriptors(self, envelope: tuple[bool, int] | None, fds: list[int]) -> None:
        """Refuses a reply with more descriptors than can be of use, before each of them takes its time."""
        if len(fds) <= REPLY_DESCRIPTORS_MAX or envelope is None or envelope[0]:
            return
        limit = self._pending[envelope[1]].descriptors_max
        if len(fds) > limit:
            raise InvalidArgument(f"reply: expected at most {limit} descriptors, got {len(fds)}")

    async def _wait_for_room(self, has_room: Callable[[], bool]) -> None:
        while not has_room() and self._why_dead is None:
            self._room = anyio.Event()
            await self._room.wait()

    async def _take(
        self, message: Message | Refusal, large_bytes: int, inline_bytes: int, tasks: anyio.abc.TaskGroup
    ) -> None:
        if isinstance(message, Reply):
            self._resolve(message)
        elif isinstance(message, Refusal):
            await self._wait_for_room(self._load.has_room)
            self._answer_with(message.reply)
        elif isinstance(message.body, CancelCall):
            self._cancel_handled(message.body.call)
        else:
            await self._wait_for_room(self._load.has_room)
            self._turn_left = 0  # Its task begins in this turn.
            # Known before its task begins: the peer may have cancelled it by then.
            self._handled[message.id] = handled = Handled(large_bytes, inline_bytes)
            self._load.begin(large_bytes, inline_bytes)
            tasks.start_soon(self._handle, message, handled)

    async def _receive(self) -> tuple[bytes, list[int], bool]:
        """A datagram, its descriptors, and whether some of those were lost because none is left in this process."""
        payload, fds, flags, self._has_waited = await receive(
            self._sock, _DATAGRAM_BYTES_MAX, self._peer, self.ended
        )
        if self._has_waited:
            self._turn_left = TURN_WEIGHT
        if fds and self._sealed_only:
            count = len(fds)
            try:
                fds = await local_only(fds, self._account, self._peer, self.ended)
            except BaseException as e:
                self._peer.held.closed(count)
                if not isinstance(e, Error):
                    raise
                self.close(f"{self._peer_name} sent a message that cannot be taken: {e}")
                return b"", [], False
        if fds and have_strange_sockets(fds):
            self.close(f"{self._peer_name} sent a socket that does not belong to a fence")
            await close_kept(fds, self._peer)
            return b"", [], False
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(fds) > DESCRIPTORS_MAX:
            # Asked before they are closed: the received ones fill the table.
            is_short = flags & socket.MSG_CTRUNC and not flags & socket.MSG_TRUNC and no_descriptor_is_left()
            if not is_short:
                close_charged(fds, self._peer)
                self.close(f"{self._peer_name} sent a message that was cut off")
                return b"", [], False
            return payload, fds, True
        return payload, fds, False

    async def _handle(self, call: Call, handled: Handled) -> None:
        number = call.id
        try:
            reply: ReplyBody
            with handled.scope:
                try:
                    reply = await self._peer.charged(self._answer(call))
                except anyio.get_cancelled_exc_class() as e:
                    # The event loop's own frames keep this error in a cycle, and its frames what the call was about: memories,
                    # fences.
                    traceback.clear_frames(e.__traceback__)
                    raise
            if handled.scope.cancelled_caught:
                reply = not_wanted()
            elif isinstance(reply, ExecuteReply):
                self._peer.executed()
        except anyio.get_cancelled_exc_class() as e:
            self.was_cut_off = True
            traceback.clear_frames(e.__traceback__)
            del call
            raise
        finally:
            if self._handled.get(number) is handled:
                del self._handled[number]
            self._load.end(handled.large_bytes, handled.inline_bytes)
            self._room.set()
        self._answer_with(Reply(number, reply))

    def _answer_with(self, reply: Reply) -> None:
        """Sends an answer, immediately or when the peer reads; it counts until then."""
        if self._why_dead is not None:
            self.was_cut_off = True
            return
        try:
            outgoing = _outgoing(encode(reply))
            self._owe(outgoing, reply)
        except Error as e:
            outgoing = _outgoing(encode(Reply(reply.id, Failed(e.status, shortened(str(e))))))
            self._owe(outgoing, reply)

    def _owe(self, outgoing: Outgoing, reply: Reply) -> None:
        self._load.owe(outgoing.size_bytes)

        def over(why: OSError | None) -> None:
            self._load.owe(-outgoing.size_bytes)
            self._room.set()
            if why is not None:
                self._answer_with(Reply(reply.id, too_many_under_way()))

        outgoing.on_over = over
        try:
            self._outbox.put(outgoing)
        except ResourceExhausted:
            outgoing.on_over = None
            over(None)
            raise

    async def _answer(self, call: Call) -> ReplyBody:
        try:
            return await self._handler(call.body, self)
        except Exception as e:
            words = str(e) if isinstance(e, Error) else words_of(e, "service")
            return Failed(status_of(e), shortened(words), traceback=traceback_of(e))
        except anyio.get_cancelled_exc_class() as e:
            if is_cancelled():
                raise
            # Raised further, it would end the connection.
            return Failed(status_of(e), shortened(words_of(e, "service")))

    def _cancel_handled(self, call_id: int) -> None:
        handled = self._handled.get(call_id)
        if handled is not None:
            handled.scope.cancel()

    def _resolve(self, reply: Reply) -> None:
        pending = self._pending.pop(reply.id, None)
        if pending is not None:
            pending.finish(reply.body)
        else:
            self._give_back(reply.body)

    def _give_back(self, reply: ReplyBody) -> None:
        """Ignores a reply without a waiter: its descriptors, and the objects that the peer made, are released."""
        if isinstance(reply, ExecuteFencedReply) and reply.fence is not None:
            reply.fence.close()
        freeing = None if self._freed_by is None else self._freed_by(reply)
        if freeing is not None:
            self.post(freeing)

    async def call(self, body: CallBody, expected: type[_R]) -> _R:
        """Sends a call and returns its reply.

        Cancellation notifies the peer that the reply is not wanted; its effect, if any, has happened or will.

        Raises:
            DeadObject: The peer is gone, or goes before it answers.
            InvalidArgument: Another event loop runs here than the one in which the channel was made.
            Error: The peer's answer is a failure.
        """
        pending = self._open(body)
        try:
            call = Call(pending.call_id, body)
            self._send(
                pending, await self._in_thread(encode, call) if has_large_model(call) else encode(call)
            )
            await pending.over()
        except BaseException:
            self._pending.pop(pending.call_id, None)
            if pending.reply is not None:
                self._give_back(pending.reply)  # It came in the same turn of the loop.
            elif not pending.is_over:
                self._withdraw(pending)
            raise
        return self.reply(pending, expected)

    def begin(self, body: CallBody) -> Pending:
        """Sends a call and does not wait. The answer, or the end of the peer, ends the returned call.

        Raises:
            DeadObject: The peer is gone.
            InvalidArgument: As for ``call``.
            ResourceExhausted: It has to wait for room, and no descriptor is left to keep what goes with it.
        """
        pending = self._open(body)
        try:
            # Without a pause: what is posted from now on, that a memory is forgotten for example, leaves after it.
            self._send(pending, encode(Call(pending.call_id, body)))
        except BaseException:
            self._pending.pop(pending.call_id, None)
            raise
        return pending

    def cancel(self, pending: Pending) -> None:
        """Notifies the peer that the reply to a call is not wanted. The call ends with its answer all the same, or immediately
        where it had not left.
        """
        if not pending.is_over and self._withdraw(pending):
            self._pending.pop(pending.call_id, None)
            pending.finish(not_wanted())

    def _open(self, body: CallBody) -> Pending:
        self._home.check(self._peer_name)
        call_id = self._next_id
        self._next_id += 1
        pending = self._pending[call_id] = Pending(call_id, body)
        return pending

    def _send(self, pending: Pending, encoded: tuple[bytes, list[int], list[Any]]) -> None:
        def over(why: OSError | None) -> None:
            if why is not None:
                self._pending.pop(pending.call_id, None)
                pending.finish(too_many_under_way())

        if self._why_dead is not None:
            raise DeadObject(self._why_dead)
        pending.outgoing = outgoing = _outgoing(encoded, over)
        self._outbox.put(outgoing)

    def _withdraw(self, pending: Pending) -> bool:
        """Takes back a call that has not left; otherwise notifies the peer that the reply is not wanted."""
        if pending.outgoing is None or self._outbox.withdraw(pending.outgoing):
            return True
        self.post(CancelCall(pending.call_id))
        return False

    def reply(self, pending: Pending, expected: type[_R]) -> _R:
        """The reply to a call that is over. Raises as ``call``; an answer of the wrong type ends the connection."""
        reply = pending.reply
        if reply is None:
            raise DeadObject(self._why_dead or f"{self._peer_name} is gone")
        if isinstance(reply, Failed):
            raise error_of(reply)
        if not isinstance(reply, expected):
            self._give_back(reply)
            self.close(f"{self._peer_name} answered {pending.what} with {type(reply).__name__}")
            raise DeadObject(self._why_dead or "")
        return reply

    async def command(self, body: CallBody) -> None:
        """Sends a call whose only reply can be ``Done``. Raises as ``call``."""
        await self.call(body, Done)

    def post(self, body: CallBody) -> None:
        """Sends a call whose reply is not wanted, immediately or in its turn; from any thread, also from a finaliser."""
        if self._why_dead is None:
            payload, _, _ = encode(Call(0, body))
            self._outbox.post(payload)

    def close(self, why: str) -> None:
        """Ends the connection: pending and later calls raise DEAD_OBJECT with this reason. Idempotent."""
        if self._why_dead is not None:
            return
        self._why_dead = why
        self.was_cut_off |= self._load.owed > 0
        self._outbox.close()
        self._room.set()
        self.ended.signal()
        self._over.set()
        if not self._is_running:
            self._fail_calls(len(self._pending))
        try:
            # Wakes the reading task, which may not be the caller.
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def release(self) -> None:
        """Closes the descriptor itself; call it when ``run`` has ended or never began."""
        self.close(f"the connection to {self._peer_name} was closed")
        close_unread(self._sock)


def _outgoing(
    encoded: tuple[bytes, list[int], list[Any]], on_over: Callable[[OSError | None], None] | None = None
) -> Outgoing:
    payload, fds, keep = encoded
    return Outgoing(payload, fds, keep, on_over)
