"""The accepted calls of the clients of a served device: calls in progress, and the rejection of new ones while it drains.

Owns the record of each call that may last beyond the first SIGTERM, and the shell around ``draining``. ``session`` answers the
calls; a process that serves one application alone has no such record.

Invariants:
1. A call that was read before the drain began is answered, as far as the limits of the drain allow; one that would begin something
   and is read later gets ``DeviceUnavailable`` with the reason.
2. A preparation ends with that error when the drain begins, since nothing could execute its model.
"""

from __future__ import annotations

import fcntl
import itertools
import socket
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc

from aionn.errors import DeviceUnavailable
from aionn.hal import DeviceStatus, Priority
from aionn.service.host.draining import DRAIN_S_MAX, UNREAD_NS_MAX, DrainState, DrainTable
from aionn.service.host.metrics import HostFigures
from aionn.service.wire.protocol import (
    Allocate,
    CallBody,
    ConfigureBurst,
    CopyFrom,
    CopyTo,
    Execute,
    ExecuteFenced,
    GetStatus,
    Hello,
    Launch,
    PrepareModel,
    PrepareModelFromCache,
    ReplyBody,
    StatusReply,
    SupportedOperations,
)
from aionn.service.wire.repetition import Compute, ComputeFenced, CreateExecution

if TYPE_CHECKING:
    from aionn.service.host.session import Session
    from aionn.service.wire.channel import Channel

__all__ = ["ENDING", "AcceptedCalls", "Drain"]

ENDING: Final = "the device's process is ending (SIGTERM): it accepts nothing new"
"""The reason that clients get."""

LOOK_S: Final = 0.002
"""Pause between two looks at what is under way: an executing thread does not wake the event loop for that, as it would for each
frame while nothing drains."""

_PREPARATIONS = SupportedOperations | PrepareModel | PrepareModelFromCache
_STAYING = Launch | ExecuteFenced | ComputeFenced
"""The executions that are under way beyond the end of their call."""

_Executing = Execute | Compute | CopyTo | CopyFrom | Launch | ExecuteFenced | ComputeFenced
_BEGINNINGS = Hello | Allocate | ConfigureBurst | CreateExecution | _PREPARATIONS

_NOTHING = nullcontext()

_COUNT = struct.Struct("i")


class _Preparation:
    """A preparation under way.

    Attributes:
        scope: Ends it.
        over: Set when it has ended, or is not waited for any more.
        reply: Its answer; None without one.
        error: Why it failed; None if it did not.
    """

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.over = anyio.Event()
        self.reply: ReplyBody | None = None
        self.error: Exception | None = None


class AcceptedCalls:
    """The calls of one client.

    Args:
        session: Answers them.
        sock: The connection.
        tasks: Where preparations run.
        figures: Counts its executions; None counts none.
    """

    def __init__(
        self,
        session: Session,
        sock: socket.socket,
        tasks: anyio.abc.TaskGroup,
        figures: HostFigures | None = None,
    ) -> None:
        self._session = session
        self._tasks = tasks
        self._figures = figures
        self._sock = sock
        self._numbers = itertools.count()
        self._deadlines: dict[int, int | None] = {}
        self._staying_ns: int | None = 0
        self._preparing: set[_Preparation] = set()
        self._why: str | None = None

    async def handle(self, body: CallBody, channel: Channel) -> ReplyBody:
        """Answers one call. Raises as ``Session.handle``.

        Raises:
            DeviceUnavailable: The device drains, and the call would begin something.
        """
        why = self._why
        if why is not None:
            if isinstance(body, GetStatus):
                return StatusReply(DeviceStatus.OFFLINE)
            if isinstance(body, _BEGINNINGS | _Executing):
                raise DeviceUnavailable(why)
        if isinstance(body, _Executing):
            with self._executing(body), self._counting(body):
                return await self._session.handle(body, channel)
        if isinstance(body, _PREPARATIONS):
            return await self._prepare(body, channel)
        return await self._session.handle(body, channel)

    @contextmanager
    def _executing(self, body: _Executing) -> Iterator[None]:
        number, deadline_ns = (
            next(self._numbers),
            None if isinstance(body, CopyTo | CopyFrom) else body.deadline_ns,
        )
        self._deadlines[number] = deadline_ns
        if isinstance(body, _STAYING):
            before_ns = self._staying_ns if self._session.account.taken("executions") else 0
            self._staying_ns = (
                None if deadline_ns is None or before_ns is None else max(before_ns, deadline_ns)
            )
        try:
            yield
        finally:
            del self._deadlines[number]

    def _counting(self, body: CallBody) -> AbstractContextManager[None]:
        if self._figures is None or not isinstance(body, Execute | Compute):
            return _NOTHING
        priority = body.priority if isinstance(body, Execute) else None
        return self._figures.executing(Priority.MEDIUM if priority is None else priority, body.deadline_ns)

    async def _prepare(self, body: CallBody, channel: Channel) -> ReplyBody:
        """Answers a preparation, or ends it when the drain begins: then the answer does not wait for an engine that compiles on."""
        preparation = _Preparation()

        async def prepare() -> None:
            try:
                with preparation.scope:
                    preparation.reply = await self._session.handle(body, channel)
            except Exception as e:
                preparation.error = e
            finally:
                preparation.over.set()

        self._preparing.add(preparation)
        self._tasks.start_soon(prepare)
        try:
            await preparation.over.wait()
        except BaseException:
            preparation.scope.cancel()
            with anyio.CancelScope(shield=True):
                await preparation.over.wait()
            raise
        finally:
            self._preparing.discard(preparation)
        if preparation.reply is not None:
            return preparation.reply
        error, preparation.error = preparation.error, None
        try:
            raise DeviceUnavailable(ENDING) if error is None else error
        finally:
            del error  # It refers to this frame.

    def drain(self, why: str) -> None:
        """Rejects what would begin something from now on, and ends the preparations. Idempotent."""
        self._why = why
        for preparation in self._preparing:
            preparation.scope.cancel()
            preparation.over.set()
        self._session.bursts.drain(why)
        self._session.memories.end_questions(UNREAD_NS_MAX / 1e9)

    async def end_reading(self) -> None:
        """See ``Bursts.end_reading``."""
        await self._session.bursts.end_reading()

    def under_way(self) -> list[int | None]:
        """The deadlines of the executions that have not ended; None for one without."""
        deadlines = [*self._deadlines.values(), *self._session.bursts.under_way()]
        # Of executions whose call has ended the latest deadline is known, but not which of them have ended.
        if self._session.account.taken("executions") > 0:
            deadlines.append(self._staying_ns)
        return deadlines

    def has_unread(self) -> bool:
        """Whether the client has not read an answer yet."""
        if self._session.bursts.has_unread():
            return True
        try:
            return bool(_COUNT.unpack(fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(_COUNT.size)))[0])
        except (OSError, ValueError):
            return False  # It is gone.


class Drain:
    """The end of the process in order, for all clients of a device.

    Args:
        limit_s: Limit of the wait for executions without a deadline.
        figures: Counts clients and executions; None counts none.
    """

    def __init__(self, limit_s: float = DRAIN_S_MAX, figures: HostFigures | None = None) -> None:
        self._figures = figures
        self._table = DrainTable(int(limit_s * 1e9))
        self._clients: dict[Session, AcceptedCalls] = {}
        self._requested = anyio.Event()
        self._ended = anyio.Event()

    @property
    def state(self) -> DrainState:
        """Where the process is."""
        return self._table.state

    @property
    def is_requested(self) -> bool:
        """Whether the drain has begun."""
        return self._requested.is_set()

    def terminate(self) -> DrainState:
        """SIGTERM came. May be called by a signal handler of the loop's thread, which then calls ``wake`` in the loop."""
        return self._table.terminate(time.monotonic_ns())

    def wake(self) -> None:
        """Begins the drain that was requested. Idempotent."""
        self._requested.set()

    async def requested(self) -> None:
        """Waits until the drain begins."""
        await self._requested.wait()

    def enter(self, session: Session, sock: socket.socket, tasks: anyio.abc.TaskGroup) -> AcceptedCalls:
        """The calls of a client until ``leave``; see ``AcceptedCalls`` for the arguments."""
        calls = AcceptedCalls(session, sock, tasks, self._figures)
        session.bursts.figures = self._figures
        self._clients[session] = calls
        if self._figures is not None:
            self._figures.clients += 1
        if self._requested.is_set():
            calls.drain(ENDING)
        return calls

    def leave(self, session: Session) -> None:
        """A client is not served any more."""
        del self._clients[session]
        if self._figures is not None:
            self._figures.clients -= 1

    async def over(self) -> None:
        """Drains, and returns when ``state`` is a last one."""
        for calls in self._clients.values():
            calls.drain(ENDING)
        while self._look() is DrainState.DRAINING:
            await anyio.sleep(LOOK_S)
        if self.state is DrainState.DRAINED:
            # A thread of a burst may have read a request that nothing shows yet: its answer comes before the connection ends.
            with anyio.move_on_after(UNREAD_NS_MAX / 1e9):
                for calls in list(self._clients.values()):
                    await calls.end_reading()
        self._ended.set()

    async def ended(self) -> None:
        """Waits until the drain is over."""
        await self._ended.wait()

    def _look(self) -> DrainState:
        under_way = [deadline for calls in self._clients.values() for deadline in calls.under_way()]
        has_unread = not under_way and any(calls.has_unread() for calls in self._clients.values())
        return self._table.look(time.monotonic_ns(), under_way, has_unread=has_unread)
