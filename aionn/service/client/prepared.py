"""Objects of a driver process: prepared models, device memories, fenced executions, by their handles.

Owns the client's side of each object's life: it is freed at the driver when it is closed, and also when it is dropped.

Invariants:
1. An object belongs to the process that made it; once that is gone, every call raises DEAD_OBJECT.
2. A handle is freed once.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

import anyio

import fmq
from aionn.burst.controller import QUEUE_BYTES, BurstController
from aionn.burst.session import POLLING_US_MAX
from aionn.errors import (
    DeadObject,
    Error,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    ResourceExhausted,
)
from aionn.hal import (
    BufferDefaults,
    ExecutionCallback,
    ExecutionResult,
    FencedExecution,
    FencedTiming,
    LaunchBase,
    Memory,
    PreparedModelByLaunch,
    PreparedModelDefaults,
    Priority,
    Request,
    check_fences,
)
from aionn.hal.callers import ReservedFrame, frame_of_launch
from aionn.platform.loops import finish, finish_all
from aionn.service.client.connection import Connection
from aionn.service.wire.calls import Pending, error_of
from aionn.service.wire.channel import Channel
from aionn.service.wire.handles import QueueHandle, RequestOnWire
from aionn.service.wire.protocol import (
    CallBody,
    ConfigureBurst,
    ConfigureBurstReply,
    CopyFrom,
    CopyTo,
    Done,
    EndBurst,
    Execute,
    ExecuteFenced,
    ExecuteFencedReply,
    ExecuteReply,
    ExecutionInfoReply,
    Failed,
    ForgetExecution,
    FreeBuffer,
    FreeMemorySlot,
    FreePreparedModel,
    GetExecutionInfo,
    Launch,
)
from aionn.service.wire.repetition import Compute, ComputeFenced, CreateExecution, CreateExecutionReply
from aionn.service.wire.scheduling_messages import ExecuteReserved, ExecuteReservedReply
from aionn.service.wire.sizes import FENCES_MAX
from aionn.validation import check_field_types
from fences import FenceStatus, SyncFence, merge

__all__ = ["RemoteBuffer", "RemoteExecution", "RemoteLaunch", "RemotePreparedModel"]

FREE_S_MAX = 1.0
"""Limit of the wait of freeing an object for a driver that does not answer; the end of its process frees everything."""

UNANSWERED_MAX = 2
"""Number of objects in a row whose freeing a process may leave unanswered; later ones are not waited for. Closing hundreds of
objects of a process would otherwise take minutes.
"""

_unanswered: weakref.WeakKeyDictionary[Channel, int] = weakref.WeakKeyDictionary()
"""By connection, how many that are."""


class _Owned:
    """A handle that is freed at the driver with its owner, by a call or by the garbage collector."""

    def __init__(self, owner: object, channel: Channel, free: CallBody) -> None:
        self._channel = channel
        self._free = free
        self._finalizer = weakref.finalize(owner, channel.post, free)

    @property
    def is_alive(self) -> bool:
        return self._finalizer.alive

    async def aclose(self) -> None:
        """Frees the handle and waits until it is free, but not for a driver that hangs. Idempotent."""
        if self._finalizer.detach() is not None:
            await finish(self._free_at_driver())

    async def _free_at_driver(self) -> None:
        if _unanswered.get(self._channel, 0) >= UNANSWERED_MAX:
            self._channel.post(self._free)
            return
        with anyio.move_on_after(FREE_S_MAX) as limit:
            try:
                await self._channel.command(self._free)
            except DeadObject:
                pass  # The process is gone, and what it held with it.
            except BaseException:
                self._channel.post(self._free)  # It may not have been sent. Freed twice is freed.
                raise
        self._count(was_late=limit.cancelled_caught)

    def _count(self, *, was_late: bool) -> None:
        _unanswered[self._channel] = _unanswered.get(self._channel, 0) + 1 if was_late else 0

    async def ended(self) -> None:
        """Frees the handle and waits until it is free, as long as the process lives. Only the first call waits.

        Raises:
            DeadObject: The process is gone, or goes before it answers.
            Error: Its answer is a failure.
        """
        if self._finalizer.detach() is None:
            return
        pending = self._channel.begin(self._free)
        with anyio.move_on_after(FREE_S_MAX):
            await pending.over()
        if not pending.is_over:
            self._count(was_late=True)
            await pending.over()
        self._channel.reply(pending, Done)
        self._count(was_late=False)


class RemotePreparedModel(PreparedModelByLaunch, PreparedModelDefaults):
    """A prepared model in a driver process.

    Attributes:
        connection: The process that it belongs to.
        handle: Its number there.
    """

    takes_priority = True

    def __init__(self, connection: Connection, handle: int, expected_duration_ns: int | None = None) -> None:
        self.expected_duration_ns = expected_duration_ns
        self.connection = connection
        self.handle = handle
        self._channel = connection.channel
        self._owned = _Owned(self, connection.channel, FreePreparedModel(handle))
        self._bursts: weakref.WeakSet[BurstController] = weakref.WeakSet()

    @property
    def is_gone(self) -> bool:
        """See ``PreparedModel``."""
        return not self._channel.is_alive

    def _check_open(self) -> None:
        if not self._owned.is_alive:
            raise InvalidArgument("execution: the prepared model is closed")

    def _on_wire(self, request: Request) -> RequestOnWire:
        try:
            return RequestOnWire.of(request, self.connection.identifiers.on_wire)
        except (AttributeError, TypeError, ValueError):
            # The types are checked after a failure alone, since every execution comes here. The driver process names fields that it
            # cannot decode.
            check_field_types(request, Request, "request")
            raise

    def launch(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        priority: Priority | None = None,
    ) -> RemoteLaunch:
        """See ``PreparedModel``. It is done when the driver has answered, or its process is gone."""
        self._check_open()
        asked = self.handle, self._on_wire(request), measure, deadline_ns, loop_timeout_ns, priority
        frame = frame_of_launch.get()
        if frame is None:
            return RemoteLaunch(self._channel, self._channel.begin(Execute(*asked)), request)
        frame.sent(time.monotonic_ns())
        pending = self._channel.begin(ExecuteReserved(frame.reservation, *asked))
        return RemoteLaunch(self._channel, pending, request, frame)

    async def execute(
        self,
        request: Request,
        callback: ExecutionCallback,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        priority: Priority | None = None,
    ) -> ErrorStatus:
        """See ``PreparedModel``. The callback comes in the event loop's thread."""
        launch = self.connection.next_launch()
        on_wire = self._on_wire(request)
        body = Launch(launch, self.handle, on_wire, measure, deadline_ns, loop_timeout_ns, priority)
        return await self.connection.launch(body, callback)

    async def execute_fenced(
        self,
        request: Request,
        wait_for: Sequence[SyncFence],
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        duration_ns: int | None = None,
    ) -> FencedExecution:
        """See ``PreparedModel``."""
        self._check_open()
        body = ExecuteFenced(
            self.handle,
            self._on_wire(request),
            _fences(wait_for),
            measure,
            deadline_ns,
            loop_timeout_ns,
            duration_ns,
        )
        return _launched(self._channel, await self._channel.call(body, ExecuteFencedReply))

    async def configure_execution_burst(
        self, *, controller_polling_us: int = 0, server_polling_us: int = 0
    ) -> BurstController:
        """See ``PreparedModel``. The driver's end runs on a thread of its own in the driver process."""
        for window_us in (controller_polling_us, server_polling_us):
            if not 0 <= window_us <= POLLING_US_MAX:
                raise InvalidArgument(
                    f"burst: expected a polling window of at most {POLLING_US_MAX} microseconds, got {window_us}"
                )
        self._check_open()
        try:
            requests = fmq.MessageQueue.create(1, QUEUE_BYTES)
            try:
                results = fmq.MessageQueue.create(1, QUEUE_BYTES, spin_ns=1000 * controller_polling_us)
            except BaseException:
                requests.close()
                raise
        except OSError as e:
            raise ResourceExhausted(f"burst: no memory or descriptor for its queues: {e.strerror}") from e
        try:
            try:
                body = ConfigureBurst(
                    self.handle,
                    QueueHandle(requests.descriptor, requests.fds),
                    QueueHandle(results.descriptor, results.fds),
                    server_polling_us,
                )
            except OSError as e:
                raise ResourceExhausted(f"burst: no descriptor for its queues: {e.strerror}") from e
            reply = await self._channel.call(body, ConfigureBurstReply)
            handle = reply.burst
            if handle in self.connection.bursts:
                # Otherwise one of both would miss the process's end.
                raise GeneralFailure(f"burst: the driver process gave the number {handle} to two bursts")
        except BaseException:
            requests.close()
            results.close()
            raise
        # The process of a served device may number its threads otherwise.
        thread_id = reply.thread if self.connection.is_own and reply.thread > 0 else None
        return self._burst(handle, requests, results, 1000 * controller_polling_us, thread_id)

    def _burst(
        self,
        handle: int,
        requests: fmq.MessageQueue,
        results: fmq.MessageQueue,
        polling_ns: int,
        thread_id: int | None,
    ) -> BurstController:
        channel, bursts = self._channel, self.connection.bursts

        async def free_slot(slot: int) -> None:
            await channel.command(FreeMemorySlot(handle, slot))

        async def end() -> None:
            try:
                await owned.ended()
            except DeadObject:
                pass  # The burst has ended with its process.
            # Not before: the process's end is the end of an execution that may run.
            bursts.pop(handle, None)

        controller = BurstController(
            requests,
            results,
            free_slot=free_slot,
            end=end,
            is_hanging=lambda: _unanswered.get(channel, 0) >= UNANSWERED_MAX,
            model=self,
            polling_ns=polling_ns,
            thread_id=thread_id,
        )
        owned = _Owned(controller, channel, EndBurst(handle))
        bursts[handle] = controller
        self._bursts.add(controller)
        if not channel.is_alive:
            controller.peer_died("the driver process is gone")
        return controller

    async def create_reusable_execution(
        self, request: Request, *, measure: bool = False, loop_timeout_ns: int | None = None
    ) -> RemoteExecution:
        """See ``PreparedModel``. The driver keeps the request."""
        self._check_open()
        body = CreateExecution(self.handle, self._on_wire(request), measure, loop_timeout_ns)
        reply = await self._channel.call(body, CreateExecutionReply)
        return RemoteExecution(self, self._channel, reply.execution)

    async def aclose(self) -> None:
        """See ``PreparedModel``. Its bursts end with it: the driver would answer them no more."""
        await finish(self._close())

    async def _close(self) -> None:
        try:
            await finish_all([burst.aclose for burst in self._bursts])
        finally:
            await self._owned.aclose()


class RemoteLaunch(LaunchBase):
    """An execution at a driver process.

    Args:
        channel: The connection.
        pending: The call.
        request: Kept until the launch is done: the memories that it names must exist for the driver process until then.
        frame: The frame of a reservation that it is; None for best effort.
    """

    def __init__(
        self, channel: Channel, pending: Pending, request: Request, frame: ReservedFrame | None = None
    ) -> None:
        self._channel = channel
        self._frame = frame
        self._pending = pending
        self._request: Request | None = request
        pending.on_over = self._answered
        if pending.is_over:
            self._answered(pending)  # It could not be sent.

    def _answered(self, pending: Pending) -> None:
        self._request = None
        try:
            if self._frame is None:
                self.finish(self._channel.reply(pending, ExecuteReply).result)
            else:
                self.finish(self._result_of(self._frame, pending))
        except Error as e:
            self.finish(e.with_traceback(None))

    def _result_of(self, frame: ReservedFrame, pending: Pending) -> ExecutionResult:
        reply = self._channel.reply(pending, ExecuteReservedReply)
        if reply.report is not None:
            frame.reported(reply.report, time.monotonic_ns())
        if reply.result is None:
            raise error_of(Failed(reply.status, reply.message, traceback=reply.traceback))
        return reply.result

    def _ask_to_stop(self) -> None:
        self._channel.cancel(self._pending)


class RemoteExecution:
    """A reusable execution in a driver process; the prepared model lives as long as this does."""

    def __init__(self, prepared: RemotePreparedModel, channel: Channel, handle: int) -> None:
        self._prepared = prepared
        self._channel = channel
        self._handle = handle
        self._owned = _Owned(self, channel, ForgetExecution(handle))

    async def execute_synchronously(self, *, deadline_ns: int | None = None) -> ExecutionResult:
        """See ``Execution``."""
        return (await self._channel.call(Compute(self._handle, deadline_ns), ExecuteReply)).result

    async def execute_fenced(
        self, wait_for: Sequence[SyncFence], *, deadline_ns: int | None = None, duration_ns: int | None = None
    ) -> FencedExecution:
        """See ``Execution``."""
        body = ComputeFenced(self._handle, _fences(wait_for), deadline_ns, duration_ns)
        return _launched(self._channel, await self._channel.call(body, ExecuteFencedReply))


class RemoteBuffer(BufferDefaults):
    """A device memory in a driver process.

    Attributes:
        token: Its name in requests; positive.
    """

    def __init__(self, channel: Channel, handle: int, token: int) -> None:
        self.token = token
        self._channel = channel
        self._handle = handle
        self._owned = _Owned(self, channel, FreeBuffer(handle))

    def _check_open(self) -> None:
        if not self._owned.is_alive:
            raise InvalidArgument(f"device memory {self.token}: the buffer is closed")

    async def copy_to(self, destination: Memory) -> None:
        """See ``Buffer``."""
        self._check_open()
        await self._channel.command(CopyTo(self._handle, destination))

    async def copy_from(self, source: Memory, dimensions: Sequence[int]) -> None:
        """See ``Buffer``."""
        self._check_open()
        await self._channel.command(CopyFrom(self._handle, source, tuple(dimensions)))

    async def aclose(self) -> None:
        """See ``Buffer``."""
        await self._owned.aclose()


def _fences(wait_for: Sequence[SyncFence]) -> tuple[SyncFence, ...]:
    # Only fences can be encoded; the driver rejects failed ones.
    fences = check_fences(wait_for, where="fenced execution", may_have_failed=True)
    return fences if len(fences) <= FENCES_MAX else (merge(fences, "all that a fenced execution waits for"),)


def _launched(channel: Channel, reply: ExecuteFencedReply) -> FencedExecution:
    launched = _RemoteLaunch(channel, reply.execution, reply.fence)
    return FencedExecution(reply.fence, launched.get_execution_info)


class _RemoteLaunch:
    """Information about a fenced execution in a driver process."""

    def __init__(self, channel: Channel, handle: int, fence: SyncFence | None) -> None:
        self._channel = channel
        self._handle = handle
        self._fence = fence
        self._known: tuple[ErrorStatus, FencedTiming] | None = None
        self._finalizer = weakref.finalize(self, channel.post, ForgetExecution(handle))

    async def get_execution_info(self) -> tuple[ErrorStatus, FencedTiming]:
        """Asks the driver; the answer after completion is kept, and the driver forgets the execution."""
        if self._known is not None:
            return self._known
        finished = self._fence is None or self._fence.status != FenceStatus.PENDING
        reply = await self._channel.call(GetExecutionInfo(self._handle, last=finished), ExecutionInfoReply)
        if finished:
            self._known = (reply.status, reply.timing)
            self._finalizer.detach()
        return reply.status, reply.timing
