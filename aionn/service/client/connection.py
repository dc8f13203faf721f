"""One connection to a driver process: its channel, and everything whose end depends on it.

Owns the notifications of the process's end, to bursts, launched executions and pending calls; and the watch for a process that does
not answer.

Invariants:
1. Every callback that was registered comes exactly once: with its result, or with DEAD_OBJECT when the process is gone.
2. A process that answers nothing for ``hang_after_s`` while something is expected of it is killed.
3. A forked child has no connection of its parent's: its copies of the sockets are closed immediately, so that it cannot send to the
   parent's driver process, and that process sees the parent's end although the child lives.

Source: the death handling of callbacks in the NN HAL's support code.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import anyio
import anyio.abc

from aionn.burst.controller import BurstController
from aionn.errors import DeviceUnavailable, Error, ErrorStatus, InvalidArgument, status_of
from aionn.hal import NO_TIMING, ExecutionCallback, OutputShape, Timing
from aionn.platform.files import check_socket_path
from aionn.platform.loops import finish
from aionn.service.wire.channel import Channel
from aionn.service.wire.protocol import (
    DESCRIPTORS_WITH_MESSAGE_MAX,
    AllocateReply,
    BurstEnded,
    CallBody,
    ConfigureBurstReply,
    Done,
    EndBurst,
    ExecuteFencedReply,
    ForgetExecution,
    FreeBuffer,
    FreePreparedModel,
    GetMemories,
    GetMemoriesReply,
    Launch,
    LaunchReply,
    Notify,
    Ping,
    PrepareModelReply,
    ReplyBody,
)
from aionn.service.wire.repetition import (
    CreateExecutionReply,
    ForgetMemory,
    MemoryIdentifiers,
    RecallMemories,
)
from aionn.service.wire.scheduling_messages import Release, ReserveReply, Room, Withdrawn

__all__ = ["Connection", "Peer", "ServedSocket"]

CONNECT_S_MAX = 5.0
"""Limit of the time until a served socket accepts."""

LAST_MESSAGES_S = 0.1
"""Time for which a process's messages are still read after its end, if another process keeps its socket open."""

_ANSWERED = frozenset(
    kind.__name__ for kind in (GetMemories, BurstEnded, RecallMemories, Notify, Withdrawn, Room)
)
"""The calls of a driver process."""

_logger = logging.getLogger("aionn.service")


class Peer(Protocol):
    """The driver process at the other end."""

    @property
    def pid(self) -> int: ...

    @property
    def socket(self) -> socket.socket: ...

    def kill(self) -> None:
        """Ends it immediately, if this process started it."""
        ...

    async def log_output(self) -> None:
        """Logs what it writes to its standard error, if that is ours to read, until it ends."""
        ...

    async def wait(self) -> object:
        """Waits for its end; without end if that cannot be observed."""
        ...

    async def aclose(self) -> None: ...


class ServedSocket:
    """A driver process that was started by another user or process: see ``aionn serve``.

    Attributes:
        pid: Its process id.
        socket: The connection.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid: int = struct.unpack("3i", credentials)[0]

    @classmethod
    async def connect(cls, path: str) -> ServedSocket:
        """Connects to a socket in the file system.

        Raises:
            DeviceUnavailable: No process serves there, or its permissions refuse this user.
        """
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        except OSError as e:
            raise DeviceUnavailable(f"socket {path}: no descriptor to connect with: {e.strerror}") from e
        try:
            check_socket_path(path)
            with anyio.fail_after(CONNECT_S_MAX):
                while True:
                    try:
                        sock.connect(path)
                        return cls(sock)
                    except BlockingIOError:
                        # Its backlog is full. A Unix socket does not report that change.
                        await anyio.sleep(0.01)
        except (OSError, TimeoutError, ValueError) as e:
            sock.close()
            raise DeviceUnavailable(
                f"socket {path}: cannot connect: {e or 'no process accepts connections'}"
            ) from e
        except BaseException:
            sock.close()
            raise

    def kill(self) -> None:
        """Does nothing: the process serves others, too."""

    async def log_output(self) -> None:
        """Does nothing: its standard error belongs to its parent."""

    async def wait(self) -> None:
        """Never returns: the socket reports its end."""
        await anyio.sleep_forever()

    async def aclose(self) -> None:
        """Does nothing: the channel closes the socket."""


def _freed_by(reply: ReplyBody) -> CallBody | None:
    """The call that frees an object of the driver process whose caller has left."""
    match reply:
        case PrepareModelReply():
            return FreePreparedModel(reply.prepared)
        case AllocateReply():
            return FreeBuffer(reply.buffer)
        case ConfigureBurstReply():
            return EndBurst(reply.burst)
        case CreateExecutionReply() | ExecuteFencedReply():
            return ForgetExecution(reply.execution)
        case ReserveReply():
            reserved = reply.reserved
            return None if reserved is None or not reserved.is_new else Release(reserved.reservation)
    return None


class Connection:
    """One driver process and the channel to it.

    Args:
        peer: The process.
        device_name: Names it in errors.
        tasks: Where launches run.
        hang_after_s: See the module's invariant 2; None means no watch.

    Attributes:
        peer: See above.
        channel: Calls and replies.
        bursts: Open bursts by handle; a burst that is dropped vanishes from here.
        identifiers: The memories of requests that the process remembers.
        ended: Set when the process is gone and reaped.
        is_serving: To be set when the process has answered for the first time.
        on_notice: Called with each notice about reservations, and with None when the process is gone; None if nothing is reserved.
    """

    def __init__(
        self, peer: Peer, device_name: str, tasks: anyio.abc.TaskGroup, *, hang_after_s: float | None = None
    ) -> None:
        self.peer = peer
        self.channel = Channel(
            peer.socket,
            self._handle,
            peer_name=f"the driver process of {device_name} (pid {peer.pid})",
            freed_by=_freed_by,
            answered=_ANSWERED,
        )
        self.bursts: weakref.WeakValueDictionary[int, BurstController] = weakref.WeakValueDictionary()
        channel = self.channel
        self.identifiers = MemoryIdentifiers(lambda identifier: channel.post(ForgetMemory(identifier)))
        self.ended = anyio.Event()
        self.is_serving = anyio.Event()
        self.on_notice: Callable[[Withdrawn | Room | None], None] | None = None
        self._tasks = tasks
        self._hang_after_s = hang_after_s
        self._callbacks: dict[int, ExecutionCallback] = {}
        self._launches = itertools.count(1)
        self._has_begun = False
        _connections.add(self)

    async def run(self) -> None:
        """Runs until the process is gone, then ends everything that belonged to it and reaps the process. To be run once, as a
        task; does nothing where ``aclose`` came first."""
        if self._has_begun:
            return
        self._has_begun = True
        # Not in the group below: the last words come after the channel has ended.
        self._tasks.start_soon(self.peer.log_output)
        try:
            async with anyio.create_task_group() as tasks:
                if self._hang_after_s is not None:
                    tasks.start_soon(self._watch, self._hang_after_s)
                tasks.start_soon(self._wait_for_end)
                await self.channel.run()
                tasks.cancel_scope.cancel()
        finally:
            await self._end()

    @property
    def is_own(self) -> bool:
        """Whether this process has started the driver process."""
        return not isinstance(self.peer, ServedSocket)

    def is_quiet(self) -> bool:
        """Whether nothing is under way: no call, no launched execution, and no open burst, in which there may be one any time."""
        return not (self.channel.pending_count or self._callbacks or self.bursts)

    async def _end(self) -> None:
        # First: frames that end with the process are those of reservations that have ended.
        on_notice, self.on_notice = self.on_notice, None
        if on_notice is not None:
            on_notice(None)
        for burst in list(self.bursts.values()):
            burst.peer_died(f"the driver process (pid {self.peer.pid}) is gone")
        for launch in list(self._callbacks):
            self._finish(launch, ErrorStatus.DEAD_OBJECT)
        self.identifiers.close()
        self.channel.release()
        try:
            await self.peer.aclose()
        finally:
            self.ended.set()

    async def aclose(self, why: str) -> None:
        """Ends the connection with this reason and waits until the process is reaped. Idempotent."""
        self.channel.close(why)
        if self._has_begun:
            await finish(self.ended.wait())
        else:
            # A task that was cancelled before its first turn runs no ``finally``.
            self._has_begun = True
            await self._end()

    async def _wait_for_end(self) -> None:
        # As a rule the socket reports it first. But a process that the driver has forked may have a copy of it.
        await self.peer.wait()
        with anyio.move_on_after(LAST_MESSAGES_S):
            await self.ended.wait()
        self.channel.close(f"the driver process (pid {self.peer.pid}) has ended")

    async def _watch(self, hang_after_s: float) -> None:
        await self.is_serving.wait()  # A start takes longer than a call, and has a limit of its own.
        while True:
            await anyio.sleep(hang_after_s / 2)
            try:
                with anyio.fail_after(hang_after_s):
                    await self.channel.command(Ping())
            except TimeoutError:
                self.peer.kill()
                self.channel.close(
                    f"the driver process (pid {self.peer.pid}) answered nothing for {hang_after_s:g} s"
                )
                return
            except Error:
                return

    async def _handle(self, body: CallBody, channel: Channel) -> ReplyBody:
        if isinstance(body, GetMemories):
            _check_count(len(body.slots))
            burst = self.bursts.get(body.burst)
            if burst is not None:
                return GetMemoriesReply(tuple(burst.memories(body.slots)))
        if isinstance(body, BurstEnded):
            burst = self.bursts.get(body.burst)
            if burst is not None:
                burst.peer_died(f"the driver ended the burst: {body.why}")
            return Done()
        if isinstance(body, RecallMemories):
            _check_count(len(body.identifiers))
            return GetMemoriesReply(self.identifiers.memories(body.identifiers))
        if isinstance(body, Withdrawn | Room):
            if self.on_notice is not None:
                self.on_notice(body)
            return Done()
        if isinstance(body, Notify):
            self._finish(body.launch, body.status, body.output_shapes, body.timing)
            return Done()
        raise InvalidArgument(f"client: answers no {type(body).__name__}")

    async def launch(self, body: Launch, callback: ExecutionCallback) -> ErrorStatus:
        """Launches an execution; the callback comes exactly once, also when the caller of this is cancelled."""
        number = body.launch
        self._callbacks[number] = callback
        launched = anyio.Event()
        status = ErrorStatus.DEAD_OBJECT

        async def send() -> None:
            nonlocal status
            try:
                status = (await self.channel.call(body, LaunchReply)).status
            except Error as e:
                status = status_of(e)
            finally:
                if status != ErrorStatus.NONE:
                    self._finish(number, status)
                launched.set()

        # A task of its own: a caller that is cancelled in the middle must not leave it undecided whether there will be a callback.
        self._tasks.start_soon(send)
        await launched.wait()
        return status

    def next_launch(self) -> int:
        """A number for a launch that no other has."""
        return next(self._launches)

    def _finish(
        self,
        launch: int,
        status: ErrorStatus,
        shapes: Sequence[OutputShape] = (),
        timing: Timing = NO_TIMING,
    ) -> None:
        callback = self._callbacks.pop(launch, None)
        if callback is None:
            return  # The first notice counts; later ones are ignored.
        try:
            callback(status, tuple(shapes), timing)
        except Exception:
            _logger.exception("the callback of an execution raised")


def _check_count(count: int) -> None:
    """Refuses a question for more memories than an answer can carry, before they are looked up."""
    if count > DESCRIPTORS_WITH_MESSAGE_MAX:
        raise InvalidArgument(
            f"client: expected a question for at most {DESCRIPTORS_WITH_MESSAGE_MAX} memories, got {count}"
        )


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_in_child() -> None:
    for connection in list(_connections):
        # The number alone: notifying the event loop would change the parent's epoll set, which both share.
        connection.peer.socket.close()
    _connections.clear()


os.register_at_fork(after_in_child=_close_in_child)
