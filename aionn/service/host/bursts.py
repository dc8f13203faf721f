"""The bursts of one client of a driver process: each a thread that listens.

Owns their table, how such a thread executes and asks the client for memories, and how it is ended. ``burst.server`` owns the
content of the queues.

Invariants:
1. Ending a burst waits neither for an answer of the client nor in a worker thread.
2. A burst's share of the client's quota is released when its thread is done, and its model is not freed before that.
3. While the process drains, a client that does not answer the question for the memories of its own request is waited for no
   longer than one that does not read its answers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import anyio.from_thread

from aionn.burst.server import Answer, BurstServer, Reserving
from aionn.burst.server import Execute as BurstExecute
from aionn.burst.session import POLLING_US_MAX
from aionn.errors import DeadObject, Error, InvalidArgument, ResourceExhausted
from aionn.hal import ExecutionResult, Memory, PreparedModel, Priority, Request
from aionn.platform.loops import finish, wait_from_thread
from aionn.realtime import SchedulingClass, current
from aionn.realtime.threads.slices import take_serving_slice
from aionn.service.host.draining import UNREAD_NS_MAX
from aionn.service.host.metrics import HostFigures
from aionn.service.progress import Progress
from aionn.service.wire.channel import Channel
from aionn.service.wire.peers import Peer
from aionn.service.wire.protocol import (
    BurstEnded,
    ConfigureBurst,
    ConfigureBurstReply,
    GetMemories,
    GetMemoriesReply,
)
from aionn.service.wire.quotas import Account
from aionn.service.wire.sizes import shortened
from fences import SyncFence

__all__ = ["QUEUE_BYTES_MAX", "Bursts"]

QUEUE_BYTES_MAX = 1 << 20
"""Largest memory of a burst's queue, some sixteen times that of our clients: mapping it takes a fraction of a millisecond."""

_T = TypeVar("_T")


def _nothing() -> None:
    pass


class _Burst:
    """A burst of the client.

    Attributes:
        prepared: Handle of the prepared model.
        server: Has the thread that listens.
        stopped: Signalled when that thread is done.
        queue_bytes: Size of its queues.
        descriptors: Number of those that its queues have open.
        asking: The last question for memories; None before the first.
        asked_ns: When it was asked, while the thread waits for its answer; None otherwise.
    """

    __slots__ = ("asked_ns", "asking", "descriptors", "prepared", "queue_bytes", "server", "stopped")

    def __init__(
        self, prepared: int, server: BurstServer, stopped: SyncFence, queue_bytes: int, descriptors: int
    ) -> None:
        self.prepared = prepared
        self.server = server
        self.stopped = stopped
        self.queue_bytes = queue_bytes
        self.descriptors = descriptors
        self.asking: anyio.CancelScope | None = None
        self.asked_ns: int | None = None


class Bursts:
    """One client's bursts.

    Args:
        portal: Runs coroutines for their threads.
        account: The client's.
        progress: Is notified of the work that the device does.
        peer: The client's process: their questions count as its use of the loop.

    Attributes:
        figures: Counts their executions; None counts none.
        reserving: See ``BurstServer``.
    """

    def __init__(
        self, portal: anyio.from_thread.BlockingPortal, account: Account, progress: Progress, peer: Peer
    ) -> None:
        self._portal = portal
        self._account = account
        self._progress = progress
        self._peer = peer
        self.figures: HostFigures | None = None
        self.reserving: Reserving | None = None
        self._handles = itertools.count(1)
        self._bursts: dict[int, _Burst] = {}
        self._ending: dict[int, _Burst] = {}
        self._why_draining: str | None = None

    def drain(self, why: str) -> None:
        """Rejects the requests that are read from now on, with this reason, also in bursts that are still made. Idempotent."""
        self._why_draining = why
        for burst in self._bursts.values():
            burst.server.drain(why)

    def under_way(self) -> list[int | None]:
        """The deadlines of the requests that are being served; None for one without."""
        found: list[int | None] = []
        for burst in (*self._bursts.values(), *self._ending.values()):
            is_serving, deadline_ns = burst.server.under_way()
            if not is_serving:
                continue
            if burst.asked_ns is not None:
                limit_ns = burst.asked_ns + UNREAD_NS_MAX
                deadline_ns = limit_ns if deadline_ns is None else min(deadline_ns, limit_ns)
            found.append(deadline_ns)
        return found

    async def end_reading(self) -> None:
        """Has the threads end that execute nothing, and waits for them. Each answers a request that it has just read; it would come
        too late after the end of the connection. The bursts are there until they are ended."""
        idle = [burst for burst in self._bursts.values() if not burst.server.under_way()[0]]
        for burst in idle:
            burst.server.begin_stop()
        for burst in idle:
            await burst.stopped

    def has_unread(self) -> bool:
        """Whether the client has not read a result yet."""
        return any(burst.server.has_unread() for burst in self._bursts.values())

    def configure(
        self, body: ConfigureBurst, prepared: PreparedModel, priority: Priority, channel: Channel
    ) -> ConfigureBurstReply:
        """Starts a burst; returns its handle and its thread.

        Args:
            body: The client's message.
            prepared: The model.
            priority: That of the model, for the scheduling class of the burst's thread.
            channel: To the client.

        Raises:
            InvalidArgument: The polling window is too long, or the queues are invalid.
            ResourceExhausted: A quota or ``QUEUE_BYTES_MAX`` would be exceeded, or no thread, memory or descriptor is left.
        """
        if not 0 <= body.polling_us <= POLLING_US_MAX:
            raise InvalidArgument(
                f"burst: expected a polling window of at most {POLLING_US_MAX} microseconds, got {body.polling_us}"
            )
        queue_bytes = descriptors = 0
        for queue in (body.requests, body.results):
            # Attaching gives the memory all its pages, here in the event loop.
            if queue.size_bytes > QUEUE_BYTES_MAX:
                raise ResourceExhausted(
                    f"burst: expected a queue of at most {QUEUE_BYTES_MAX} bytes, got {queue.size_bytes}",
                    transient=False,
                )
            if not queue.is_small:
                raise InvalidArgument("burst: expected a queue in small memory that is sealed and not locked")
            queue_bytes += queue.size_bytes
            descriptors += queue.attached_descriptors
        with (
            self._account.taking("bursts"),
            self._account.taking("memory_bytes", queue_bytes),
            self._account.taking_descriptors(descriptors),
        ):
            handle, server, stopped = self._start(body, prepared, priority, channel)
        self._bursts[handle] = _Burst(body.prepared, server, stopped, queue_bytes, descriptors)
        if self._why_draining is not None:
            server.drain(self._why_draining)
        return ConfigureBurstReply(handle, server.thread_id)

    def _start(
        self, body: ConfigureBurst, prepared: PreparedModel, priority: Priority, channel: Channel
    ) -> tuple[int, BurstServer, SyncFence]:
        """The handle, the server, and what is signalled when its thread is done."""
        requests = body.requests.attach(spin_ns=1000 * body.polling_us)
        try:
            results = body.results.attach()
        except Error:
            requests.close()
            raise
        handle = next(self._handles)

        def get_memories(slots: Sequence[int]) -> Sequence[Memory]:
            return self._from_thread(lambda: self._ask_for_memories(channel, handle, tuple(slots)))

        def on_started() -> None:
            scheduling = current()
            if scheduling is None:
                take_serving_slice()
            else:
                scheduling.acquire(SchedulingClass(priority), f"burst {handle}")

        def on_end(why: str) -> None:
            self._portal.start_task_soon(self._report_end, channel, handle, why)

        bind, execute = self._executor(prepared)
        if self.figures is not None:
            execute = _counted(execute, self.figures, priority)
        # Figures count each execution as it begins and ends, by Python.
        has_native = prepared.execute_bound is not None and self.figures is None
        native = prepared.native if has_native else None
        stopped = SyncFence("end of a burst")

        def on_stopped() -> None:
            self._peer.bursts.discard(server)
            unwatch()
            scheduling = current()
            if scheduling is not None:
                scheduling.give_back()
            stopped.signal()

        server = BurstServer(
            requests,
            results,
            bind=bind,
            native=native,
            reserving=self.reserving,
            execute=execute,
            get_memories=get_memories,
            on_started=on_started,
            turns=self._peer.packet_turns(),
            on_end=on_end,
            on_stopped=on_stopped,
            name=f"aionn-burst-{handle}",
        )
        unwatch = _nothing if native is None else self._progress.watch(server.native_activity)
        self._peer.bursts.add(server)
        try:
            server.start()
        except RuntimeError as e:
            self._peer.bursts.discard(server)
            unwatch()
            server.stop()
            raise ResourceExhausted(f"burst: no thread is left for it: {e}", transient=True) from e
        return handle, server, stopped

    def _executor(self, prepared: PreparedModel) -> tuple[Callable[[Request], object] | None, BurstExecute]:
        """The execution of a burst's thread: with arguments bound once if the driver can, otherwise by the loop."""
        progress = self._progress
        run = prepared.execute_bound
        if run is not None:

            def watched(*asked: Any) -> ExecutionResult:
                with progress.work():
                    return run(*asked)

            return prepared.bind, watched if progress.is_watching else run

        def by_loop(request: Request, measure: bool, *limits: Any) -> ExecutionResult:
            deadline_ns, loop_timeout_ns, _ = limits
            with progress.work():
                return self._from_thread(
                    lambda: prepared.execute_synchronously(
                        request, measure=measure, deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
                    )
                )

        return None, by_loop

    def _from_thread(self, ask: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Awaits in the event loop, for the thread of a burst."""
        return wait_from_thread(
            self._portal,
            lambda: self._peer.charged(ask()),
            "burst: the connection ended before the event loop had answered",
        )

    async def _ask_for_memories(
        self, channel: Channel, handle: int, slots: tuple[int, ...]
    ) -> Sequence[Memory]:
        """For the thread of a burst: the client's memories for its slots.

        Raises:
            DeadObject: The burst ended during the wait, or the client is gone.
            Error: The client's answer.
        """
        burst = self._bursts.get(handle)
        if burst is not None:
            burst.asked_ns = time.monotonic_ns()
            try:
                with anyio.CancelScope() as burst.asking:
                    return (await channel.call(GetMemories(handle, slots), GetMemoriesReply)).memories
            finally:
                burst.asked_ns = None
        raise DeadObject("burst: it was ended while its client was asked for memories")

    async def _report_end(self, channel: Channel, handle: int, why: str) -> None:
        """Ends a burst that cannot continue; its client is notified immediately."""
        await self.end(handle)
        with suppress(Error):
            await channel.command(BurstEnded(handle, shortened(why)))

    def free_slot(self, handle: int, slot: int) -> None:
        """The client dropped a memory.

        Raises:
            InvalidArgument: There is no such burst.
        """
        burst = self._bursts.get(handle)
        if burst is None:
            raise InvalidArgument(f"service: no burst has the handle {handle}")
        burst.server.free_slot(slot)

    async def end(self, handle: int) -> None:
        """Ends a burst and waits until its thread is done; an unknown handle is ignored."""
        burst = self._bursts.pop(handle, None)
        if burst is not None:
            self._ending[handle] = burst
            if burst.asking is not None:
                burst.asking.cancel()  # The client may never answer.
            burst.server.begin_stop()
            await finish(self._stopped(handle, burst))  # No other code could end it any more.
        elif (ending := self._ending.get(handle)) is not None:
            await ending.stopped

    async def _stopped(self, handle: int, burst: _Burst) -> None:
        await burst.stopped
        # Not before: what it takes is there until then.
        del self._ending[handle]
        self._account.give_back("bursts")
        self._account.give_back("memory_bytes", burst.queue_bytes)
        self._account.give_back_descriptors(burst.descriptors)

    async def end_of(self, prepared: int) -> None:
        """Ends the bursts of a prepared model."""
        bursts = [*self._bursts.items(), *self._ending.items()]
        for handle in [handle for handle, burst in bursts if burst.prepared == prepared]:
            await self.end(handle)

    def rest(self, idle_s: float) -> int:
        """Gives back the memories of bursts that were not used for ``idle_s``; returns how many bursts there were."""
        return sum(burst.server.rest(idle_s) for burst in self._bursts.values())

    async def aclose(self) -> None:
        """Ends all bursts."""
        for handle in (*self._bursts, *self._ending):
            await self.end(handle)


def _counted(execute: BurstExecute, figures: HostFigures, priority: Priority) -> BurstExecute:
    """An execution that is counted."""

    def counted(
        bound: Any, measure: bool, deadline_ns: int | None, loop_timeout_ns: int | None, answer: Answer
    ) -> ExecutionResult:
        with figures.executing(priority, deadline_ns):
            return execute(bound, measure, deadline_ns, loop_timeout_ns, answer)

    return counted
