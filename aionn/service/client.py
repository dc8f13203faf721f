"""A device in another process: the driver contract, spoken over a channel.

Owns the connection's client side: the process (started when first needed, started again after it died), handles, and bursts' queues.

Invariants:
1. An object belongs to the process that made it. When that process is gone every pending call on it raises DEAD_OBJECT, and so does every
   later one; a new process knows nothing of it.
2. A driver that comes back different (name, version, level, type, capabilities) is refused.

Source: the recovery rules of the NN HAL's resilient wrappers.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.abc

import fmq
from aionn.burst.controller import QUEUE_BYTES, BurstController
from aionn.errors import (
    DeadObject,
    DeviceUnavailable,
    Error,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    ResourceExhausted,
    status_of,
)
from aionn.hal import (
    NO_TIMING,
    Buffer,
    BufferDesc,
    BufferRole,
    CacheFiles,
    DeviceInfo,
    DeviceStatus,
    Execution,
    ExecutionCallback,
    ExecutionPreference,
    ExecutionResult,
    FencedExecution,
    FencedTiming,
    Model,
    PreparedModel,
    Priority,
    Request,
    ResendingExecution,
)
from aionn.service.channel import Channel
from aionn.service.protocol import (
    PROTOCOL_VERSION,
    CallBody,
    ConfigureBurst,
    ConfigureBurstReply,
    EndBurst,
    Execute,
    ExecuteFenced,
    ExecuteFencedReply,
    ExecuteReply,
    ExecutionInfoReply,
    FreeMemorySlot,
    FreePreparedModel,
    GetExecutionInfo,
    GetMemories,
    GetMemoriesReply,
    GetStatus,
    Hello,
    HelloReply,
    PrepareModel,
    PrepareModelReply,
    QueueHandle,
    ReplyBody,
    RequestOnWire,
    StatusReply,
    SupportedOperations,
    SupportedOperationsReply,
)
from aionn.service.supervisor import DriverProcess
from fences import FenceStatus, SyncFence

__all__ = ["RemoteDevice"]

START_S_MAX = 30.0
"""How long a driver process may take until it answers: a large engine loads for seconds on a slow disk."""

FREE_S_MAX = 1.0
"""How long freeing an object waits for a driver that does not answer; the end of its process frees everything."""


class _Connection:
    """One driver process and the channel to it."""

    def __init__(self, process: DriverProcess, device_name: str) -> None:
        self.process = process
        self.channel = Channel(
            process.socket, self._handle, peer_name=f"the driver process of {device_name} (pid {process.pid})"
        )
        self.bursts: dict[int, BurstController] = {}
        self.ended = anyio.Event()

    async def run(self) -> None:
        """Runs until the process is gone, then ends everything that belonged to it and reaps the process."""
        try:
            await self.channel.run()
        finally:
            for burst in self.bursts.values():
                burst.peer_died(f"the driver process (pid {self.process.pid}) is gone")
            self.channel.release()
            await self.process.aclose()
            self.ended.set()

    async def _handle(self, body: CallBody, channel: Channel) -> ReplyBody:
        if isinstance(body, GetMemories) and body.burst in self.bursts:
            return GetMemoriesReply(tuple(self.bursts[body.burst].memories(body.slots)))
        raise InvalidArgument(f"client: answers no {type(body).__name__}")


class RemoteDevice:
    """A ``hal.Device`` whose driver runs in a process of its own.

    Args:
        driver: Registered name of the driver.
        name: The device's name.
        tasks: Where the connection's tasks run; the device must be closed before this task group ends.
        info: What is known of the device already; None asks the process, by ``connect``.
    """

    def __init__(
        self, driver: str, name: str, tasks: anyio.abc.TaskGroup, *, info: DeviceInfo | None = None
    ) -> None:
        self._driver = driver
        self._name = name
        self._tasks = tasks
        self._info = info
        self._connection: _Connection | None = None
        self._connecting = anyio.Lock()
        self._closed = False

    @property
    def info(self) -> DeviceInfo:
        """See ``Device``.

        Raises:
            DeviceUnavailable: The device was never asked: call ``connect`` first.
        """
        if self._info is None:
            raise DeviceUnavailable(f"device {self._name!r}: not connected yet")
        return self._info

    @property
    def pid(self) -> int | None:
        """The driver process, None when none runs."""
        connection = self._connection
        return connection.process.pid if connection is not None and connection.channel.is_alive else None

    async def connect(self) -> None:
        """Starts the driver process unless it runs.

        Raises:
            DeviceUnavailable: It cannot be started, does not answer in time, or is not the device that it was.
        """
        await self._connected()

    async def _connected(self) -> _Connection:
        async with self._connecting:
            if self._closed:
                raise DeviceUnavailable(f"device {self._name!r}: closed")
            if self._connection is None or not self._connection.channel.is_alive:
                self._connection = await self._start()
            return self._connection

    async def _start(self) -> _Connection:
        connection = _Connection(await DriverProcess.start(self._driver, self._name), self._name)
        self._tasks.start_soon(connection.run)
        try:
            with anyio.fail_after(START_S_MAX):
                hello = await connection.channel.call(Hello(PROTOCOL_VERSION), HelloReply)
        except TimeoutError:
            connection.channel.close("it did not answer")
            raise DeviceUnavailable(f"device {self._name!r}: no answer within {START_S_MAX:g} s") from None
        except Error as e:
            connection.channel.close(f"it refused: {e}")
            raise DeviceUnavailable(f"device {self._name!r}: its process does not serve: {e}") from e
        except BaseException:
            connection.channel.close("its start was cancelled")
            raise
        if self._info is not None and hello.info != self._info:
            connection.channel.close("it is not the device that it was")
            raise DeviceUnavailable(
                f"device {self._name!r}: the new driver process differs from the one before"
            )
        self._info = hello.info
        return connection

    async def status(self) -> DeviceStatus:
        """See ``Device``."""
        connection = await self._connected()
        return (await connection.channel.call(GetStatus(), StatusReply)).status

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        """See ``Device``."""
        connection = await self._connected()
        reply = await connection.channel.call(SupportedOperations(model), SupportedOperationsReply)
        if len(reply.supported) != len(model.main.operations):
            raise GeneralFailure(
                f"device {self._name!r}: {len(model.main.operations)} operations, but {len(reply.supported)} answers"
            )
        return reply.supported

    async def prepare_model(
        self,
        model: Model,
        *,
        preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER,
        priority: Priority = Priority.MEDIUM,
        deadline_ns: int | None = None,
        cache: CacheFiles | None = None,
    ) -> RemotePreparedModel:
        """See ``Device``."""
        connection = await self._connected()
        reply = await connection.channel.call(
            PrepareModel(model, preference, priority, deadline_ns), PrepareModelReply
        )
        return RemotePreparedModel(connection, reply.prepared)

    async def prepare_model_from_cache(
        self, cache: CacheFiles, *, priority: Priority = Priority.MEDIUM, deadline_ns: int | None = None
    ) -> PreparedModel:
        """See ``Device``."""
        raise GeneralFailure(f"device {self._name!r}: does not cache compilations")

    async def allocate(
        self,
        description: BufferDesc,
        prepared_models: Sequence[PreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> Buffer:
        """See ``Device``."""
        raise GeneralFailure(f"device {self._name!r}: has no device memories")

    async def aclose(self) -> None:
        """Ends the driver process. Pending calls raise DEAD_OBJECT. Idempotent."""
        self._closed = True
        connection = self._connection
        if connection is not None:
            connection.channel.close(f"device {self._name!r} was closed")
            await connection.ended.wait()


class RemotePreparedModel:
    """A prepared model in a driver process."""

    def __init__(self, connection: _Connection, handle: int) -> None:
        self._connection = connection
        self._channel = connection.channel
        self._handle = handle
        self._closed = False

    async def execute_synchronously(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> ExecutionResult:
        """See ``PreparedModel``."""
        body = Execute(self._handle, RequestOnWire.of(request), measure, deadline_ns, loop_timeout_ns)
        return (await self._channel.call(body, ExecuteReply)).result

    async def execute(
        self,
        request: Request,
        callback: ExecutionCallback,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> ErrorStatus:
        """See ``PreparedModel``. The execution is over when this returns; the callback comes from the caller's thread."""
        try:
            result = await self.execute_synchronously(
                request, measure=measure, deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
            )
        except Error as e:
            callback(status_of(e), (), NO_TIMING)
            # A deadline that has passed is no launch failure.
            return ErrorStatus.NONE if isinstance(e, MissedDeadline) else status_of(e)
        enough = result.output_sufficient_size
        status = ErrorStatus.NONE if enough else ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
        callback(status, result.output_shapes, result.timing)
        return ErrorStatus.NONE

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
        body = ExecuteFenced(
            self._handle,
            RequestOnWire.of(request),
            tuple(wait_for),
            measure,
            deadline_ns,
            loop_timeout_ns,
            duration_ns,
        )
        reply = await self._channel.call(body, ExecuteFencedReply)
        launched = _RemoteLaunch(self._channel, reply.execution, reply.fence)
        return FencedExecution(reply.fence, launched.get_execution_info)

    async def configure_execution_burst(self) -> BurstController:
        """See ``PreparedModel``. The driver's end runs on a thread of its own in the driver process."""
        try:
            requests = fmq.MessageQueue.create(1, QUEUE_BYTES)
            try:
                results = fmq.MessageQueue.create(1, QUEUE_BYTES)
            except BaseException:
                requests.close()
                raise
        except OSError as e:
            raise ResourceExhausted(f"burst: no memory or descriptor for its queues: {e.strerror}") from e
        try:
            reply = await self._channel.call(
                ConfigureBurst(
                    self._handle,
                    QueueHandle(requests.descriptor, requests.fds),
                    QueueHandle(results.descriptor, results.fds),
                ),
                ConfigureBurstReply,
            )
        except BaseException:
            requests.close()
            results.close()
            raise
        handle = reply.burst
        bursts = self._connection.bursts

        async def free_slot(slot: int) -> None:
            await self._channel.tell(FreeMemorySlot(handle, slot))

        async def end() -> None:
            bursts.pop(handle, None)
            await self._channel.tell(EndBurst(handle))

        controller = BurstController(requests, results, free_slot=free_slot, end=end)
        bursts[handle] = controller
        if not self._channel.is_alive:
            controller.peer_died("the driver process is gone")
        return controller

    async def create_reusable_execution(
        self, request: Request, *, measure: bool = False, loop_timeout_ns: int | None = None
    ) -> Execution:
        """See ``PreparedModel``."""
        return ResendingExecution(self, request, measure, loop_timeout_ns)

    async def aclose(self) -> None:
        """See ``PreparedModel``."""
        if not self._closed:
            self._closed = True
            with anyio.move_on_after(FREE_S_MAX, shield=True):
                try:
                    await self._channel.tell(FreePreparedModel(self._handle))
                except DeadObject:
                    pass  # The process is gone, and what it held with it.


class _RemoteLaunch:
    """Information about a fenced execution in a driver process."""

    def __init__(self, channel: Channel, handle: int, fence: SyncFence | None) -> None:
        self._channel = channel
        self._handle = handle
        self._fence = fence
        self._known: tuple[ErrorStatus, FencedTiming] | None = None

    async def get_execution_info(self) -> tuple[ErrorStatus, FencedTiming]:
        """Asks the driver; the answer after completion is kept, and the driver forgets the execution."""
        if self._known is not None:
            return self._known
        finished = self._fence is None or self._fence.status != FenceStatus.PENDING
        reply = await self._channel.call(GetExecutionInfo(self._handle, last=finished), ExecutionInfoReply)
        if finished:
            self._known = (reply.status, reply.timing)
        return reply.status, reply.timing
