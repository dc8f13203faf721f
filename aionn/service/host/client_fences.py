"""The fences of a client for which its executions wait: a few begin in each turn of the loop, however many fences are signalled.

Owns the watch of their sockets, and a fence of this process in the place of each, which executions wait for.

A process can signal, or fail, the fences of thousands of executions by one call. If the loop watched the socket of each, it
would begin all of these executions in one turn: a fifth of a second for a thousand.

Invariants:
1. At most ``FENCES_PER_TURN`` executions get the outcome of a fence in a turn of the loop. Where there are more, that is a
   backlog of the process.
2. Each socket is watched once.
3. A fence has no more in its place than executions wait for it, and some that have just ended.

Both without the first ``DIRECT_MAX`` fences of a client that is served alone, for which the loop itself waits.
"""

from __future__ import annotations

import collections
import os
import select
from collections.abc import Iterable

import anyio
import anyio.abc

from aionn.errors import ResourceExhausted
from aionn.service.wire.peers import Peer
from aionn.service.wire.quotas import Account
from fences import FenceError, FenceStatus, SyncFence

__all__ = ["ClientFences"]

UNWATCHED_S = 0.01
"""Interval before the next look while the event loop has no room to watch them; it doubles with each look."""

UNWATCHED_S_MAX = 0.64
"""The longest such interval. The kernel looks at all watches of a socket before it rejects one, which takes 0.1 ms; the owner of a
socket can have hundreds of them, and reject those of all its clients."""

FENCES_PER_TURN = 8
"""Fences that are read, and executions that begin, before other tasks have a turn: an execution takes a fifth of a millisecond.
An application signals fewer together for a frame."""

DIRECT_MAX = 64
"""Executions of a client that is served alone whose fences the loop watches one by one, which is 0.1 ms quicker: they begin in one
turn, within 13 ms. Further ones begin in turns."""


class _Watched:
    """A fence of the client.

    Attributes:
        fence: It.
        owns: The fences of this process in its place, one for each execution.
    """

    __slots__ = ("fence", "owns")

    def __init__(self, fence: SyncFence) -> None:
        self.fence = fence
        self.owns: dict[SyncFence, None] = {}


class ClientFences:
    """The fences of one client.

    Args:
        tasks: Where they are read.
        account: The client's: the watch takes one descriptor.
        peer: The client's process: reading them counts as its use of the loop.
    """

    def __init__(self, tasks: anyio.abc.TaskGroup, account: Account, peer: Peer) -> None:
        self._tasks = tasks
        self._account = account
        self._peer = peer
        self._scope = anyio.CancelScope()
        self._watch: select.epoll | None = None
        self._by_number: dict[int, _Watched] = {}
        self._by_socket: dict[int, _Watched] = {}
        self._by_own: dict[SyncFence, _Watched] = {}
        self._direct: set[SyncFence] = set()
        self._left: collections.deque[SyncFence] = collections.deque()
        self._finished: collections.deque[tuple[SyncFence, FenceError | None, int | None]] = (
            collections.deque()
        )

    def take(self, fence: SyncFence) -> SyncFence:
        """The fence that an execution waits for in the place of this one, which belongs to this object from now on: it is closed
        when it has finished. One that no other process finishes stands for itself, and so do the first ``DIRECT_MAX`` of a client
        that is served alone.

        Raises:
            ResourceExhausted: No descriptor is left, or the kernel watches no more.
        """
        self._give_back_left()
        if not fence.imported:
            return fence
        if self._peer.is_alone and len(self._direct) < DIRECT_MAX:
            self._direct.add(fence)
            try:
                fence.add_callback(self._direct.discard)
            except OSError as e:
                self._direct.discard(fence)
                raise _unwatched(e) from e
            return fence
        number = fence.fileno()
        # The kernel watches one socket some hundred times at most: the executions behind one fence have one watch together.
        socket = os.fstat(number).st_ino
        watched = self._by_socket.get(socket)
        if watched is not None:
            fence.close()
        else:
            try:
                self._opened().register(number, select.EPOLLIN)
            except OSError as e:
                raise _unwatched(e) from e
            self._by_number[number] = self._by_socket[socket] = watched = _Watched(fence)
        own = SyncFence("fence of the client")
        watched.owns[own] = None
        self._by_own[own] = watched
        return own

    def _opened(self) -> select.epoll:
        if self._watch is None:
            with self._account.taking_descriptors(1):
                self._watch = select.epoll()
            self._tasks.start_soon(self._run, self._watch)
        return self._watch

    async def _run(self, watch: select.epoll) -> None:
        try:
            with watch, self._scope:
                await self._peer.charged(self._read_all(watch))
        finally:
            self._account.give_back_descriptors(1)

    async def _read_all(self, watch: select.epoll) -> None:
        interval_s = UNWATCHED_S
        while True:
            try:
                await anyio.wait_readable(watch.fileno())
                interval_s = UNWATCHED_S
            except OSError:
                await anyio.sleep(interval_s)
                interval_s = min(2 * interval_s, UNWATCHED_S_MAX)
            for number, _ in watch.poll(0, FENCES_PER_TURN):
                watched = self._by_number.get(number)
                if watched is not None:  # It is None after the end.
                    self._read(watched)
            while self._finish_some():
                await self._peer.next_turn_of_many()

    def _read(self, watched: _Watched) -> None:
        fence = watched.fence
        if fence.status is FenceStatus.PENDING:
            return
        self._finished.extend((own, fence.error, fence.signal_time_ns) for own in watched.owns)
        self._forget(watched)

    def _finish_some(self) -> bool:
        """Whether as many as a turn does were there."""
        for _ in range(FENCES_PER_TURN):
            if not self._finished:
                return False
            own, error, at_ns = self._finished.popleft()
            if error is None:
                own.try_signal(at_ns)
            else:
                own.try_fail(error)
        return True

    def _forget(self, watched: _Watched) -> None:
        number = watched.fence.fileno()
        del self._by_number[number], self._by_socket[os.fstat(number).st_ino]
        for own in watched.owns:
            del self._by_own[own]
        assert self._watch is not None, "it watches"
        # Closing it would not end that: the client has the same socket.
        self._watch.unregister(number)
        watched.fence.close()

    def leave(self, owns: Iterable[SyncFence]) -> None:
        """An execution that waited for these, which ``take`` returned, is over, perhaps by its deadline. From any thread."""
        self._left.extend(owns)

    def _give_back_left(self) -> None:
        # Several for each one that is taken, so that they do not add up.
        for _ in range(FENCES_PER_TURN):
            if not self._left:
                return
            self.give_back(self._left.popleft())

    def give_back(self, own: SyncFence) -> None:
        """An execution does not wait for what ``take`` returned after all."""
        if own in self._direct:
            own.remove_callback(self._direct.discard)
            self._direct.discard(own)
        watched = self._by_own.pop(own, None)
        if watched is not None:
            del watched.owns[own]
            if not watched.owns:
                self._forget(watched)
        own.close()

    def end(self) -> list[SyncFence]:
        """Reads no more of them. Returns all of them, and those in their place: they are to be closed."""
        self._scope.cancel()
        fences = [watched.fence for watched in self._by_number.values()]
        fences += [*self._by_own, *(own for own, _, _ in self._finished)]
        for table in (self._by_number, self._by_socket, self._by_own, self._finished, self._left):
            table.clear()
        return fences


def _unwatched(error: OSError) -> ResourceExhausted:
    return ResourceExhausted(f"fence: it cannot be watched: {error.strerror}", transient=True)
