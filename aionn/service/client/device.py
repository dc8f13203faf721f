"""A device in another process: the driver contract, spoken over a channel.

Owns the device's side of the connection: which process it is (started when first needed, started again after it died, or served by
another process at a socket), and that it stays the same device.

Invariants:
1. An object belongs to the process that made it. When that process is gone every pending call on it raises DEAD_OBJECT, and so does
   every later one; a new process knows nothing of it.
2. A driver that comes back different (name, version, level, type, capabilities) is refused.
3. A driver is started at most once per call, and after it has died several times in a row, only after a pause. A spare process
   that waits already is used instead; where it does not serve, a start follows.

Source: the recovery rules of the NN HAL's resilient wrappers.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence

import anyio
import anyio.abc

from aionn.drivers import registry
from aionn.errors import (
    DeadObject,
    DeviceUnavailable,
    Error,
    GeneralFailure,
    InvalidArgument,
    ResourceExhausted,
)
from aionn.hal import (
    CACHE_TOKEN_BYTES,
    Buffer,
    BufferDesc,
    BufferRole,
    CacheFiles,
    DeviceInfo,
    DeviceStatus,
    ExecutionPreference,
    Model,
    PreparedModel,
    Priority,
)
from aionn.platform.loops import Home
from aionn.realtime import Scheduling
from aionn.service.client.connection import Connection, Peer, ServedSocket
from aionn.service.client.prepared import RemoteBuffer, RemotePreparedModel
from aionn.service.client.reservations import ServedLedger
from aionn.service.client.spare import Spare
from aionn.service.client.supervisor import DriverProcess
from aionn.service.progress import check_hang_after_s
from aionn.service.wire.handles import CacheOnWire
from aionn.service.wire.protocol import (
    PROTOCOL_VERSION,
    Allocate,
    AllocateReply,
    Done,
    FreeBuffer,
    GetStatus,
    Hello,
    HelloReply,
    PrepareModel,
    PrepareModelFromCache,
    PrepareModelReply,
    StatusReply,
    SupportedOperations,
    SupportedOperationsReply,
)
from aionn.service.wire.scheduling_messages import GetThreads, JoinScheduling, ThreadsReply
from aionn.validation import check_allocation, check_device_info, check_field_types

__all__ = ["RemoteDevice"]

START_S_MAX = 30.0
"""Limit of the time until a driver process answers: a large engine loads for seconds on a slow disk."""

SHORT_LIFE_S = 1.0
"""A process that died sooner than this after its start counts towards the pause before the next start."""

PAUSE_S_MIN = 0.05
PAUSE_S_MAX = 5.0
"""The pause before the second start in a row of a driver that died right after its start; it doubles with each further one, up to
the maximum.
"""

POOLS_MAX = 4096
"""Most memories that a driver process is asked to remember, whatever it offers."""

_logger = logging.getLogger("aionn.service")


@contextlib.contextmanager
def _started_again_by_the_next_call() -> Iterator[None]:
    """A death that the device itself gets over: the same call may succeed at another time."""
    try:
        yield
    except DeadObject as e:
        e.transient = True
        raise


class RemoteDevice:
    """A ``hal.Device`` whose driver runs in a process of its own.

    Args:
        driver: Registered name of the driver; or the path of a socket where it is served, see ``path``.
        name: The device's name.
        tasks: Where the connection's tasks run; the device must be closed before this task group ends.
        info: The description of the device where it is known already; None asks the process, by ``connect``.
        path: A socket that ``aionn serve`` made; the device then belongs to another process. None starts a process.
        hang_after_s: A process that does not answer for so long is killed, and a device that makes no progress for so long ends
            its process itself; None waits without a limit.
        spare: Whether a spare process is kept once the device has served for a while: when its process dies, the next call need
            not wait until one has started.
        scheduling: The scheduling of the threads of each process that is started for this device; None if real time is off.

    Attributes:
        starts: Number of processes that have served.
        ledger: The reservations of a served device; None where no other application uses it.
    """

    def __init__(
        self,
        driver: str,
        name: str,
        tasks: anyio.abc.TaskGroup,
        *,
        info: DeviceInfo | None = None,
        path: str | os.PathLike[str] | None = None,
        hang_after_s: float | None = None,
        spare: bool = False,
        scheduling: Scheduling | None = None,
    ) -> None:
        check_hang_after_s(hang_after_s, where=f"device {name!r}: hang_after_s")
        self._driver = driver
        self._name = name
        self._tasks = tasks
        self._home = Home()
        self._info = info
        self._path = None if path is None else os.fspath(path)
        self._hang_after_s = hang_after_s
        self._has_spares = spare and path is None
        self._spare: Spare | None = None
        self._scheduling = scheduling if path is None else None
        self._connection: Connection | None = None
        self._connecting = anyio.Lock()
        self._started_s: float | None = None
        self._short_lives = 0
        self._closed = False
        self.starts = 0
        self.ledger = None if path is None else ServedLedger(self._connected, tasks.start_soon)

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
    def spare_pid(self) -> int | None:
        """The process that replaces the driver process when it dies, None when none is ready."""
        return None if self._spare is None else self._spare.pid

    @property
    def pid(self) -> int | None:
        """The driver process, None when none runs."""
        connection = self._connection
        return connection.peer.pid if connection is not None and connection.channel.is_alive else None

    @property
    def has_died(self) -> bool:
        """Whether its process is gone, and none has been needed since."""
        return self._connection is not None and not self._connection.channel.is_alive

    async def connect(self) -> None:
        """Starts the driver process unless it runs.

        Raises:
            DeviceUnavailable: It cannot be started, does not answer in time, or is not the device that it was.
        """
        await self._connected()

    async def _connected(self) -> Connection:
        self._home.check(f"device {self._name!r}")
        async with self._connecting:
            if self._closed:
                raise DeviceUnavailable(f"device {self._name!r}: closed")
            if self._connection is None or not self._connection.channel.is_alive:
                self._connection = await self._start()
            return self._connection

    async def _open(self) -> Peer:
        if self._path is not None:
            return await ServedSocket.connect(self._path)
        return await DriverProcess.start(
            self._driver, self._name, hang_after_s=self._hang_after_s, scheduling=self._scheduling
        )

    async def _pause(self) -> None:
        """Waits before a start that follows on several short lives."""
        if self._started_s is not None and anyio.current_time() - self._started_s < SHORT_LIFE_S:
            self._short_lives += 1
        else:
            self._short_lives = 0
        if self._short_lives > 1:
            await anyio.sleep(min(PAUSE_S_MAX, PAUSE_S_MIN * 2 ** (self._short_lives - 2)))

    async def _start(self) -> Connection:
        known = self._started_s, self._short_lives
        try:
            await self._pause()
            self._started_s = anyio.current_time()
            return await self._started()
        except anyio.get_cancelled_exc_class():
            # The process ended because its caller did: that is not a fault of the driver.
            self._started_s, self._short_lives = known
            raise

    async def _started(self) -> Connection:
        spare, self._spare = self._spare, None
        process = None if spare is None else await spare.take()
        connection = None
        if process is not None:
            try:
                connection = await self._serve(process)
            except DeviceUnavailable as e:
                _logger.debug("the spare process (pid %d) does not serve: %s", process.pid, e)
        if connection is None:
            connection = await self._serve(await self._open())
        if self._has_spares and not self._closed:
            self._spare = Spare(
                self._driver,
                self._name,
                self._hang_after_s,
                is_quiet=connection.is_quiet,
                is_serving=lambda: connection.channel.is_alive,
                scheduling=self._scheduling,
            )
            self._tasks.start_soon(self._spare.keep)
        return connection

    async def _serve(self, peer: Peer) -> Connection:
        connection = Connection(peer, self._name, self._tasks, hang_after_s=self._hang_after_s)
        try:
            # Not ``start``, which would never return if asyncio cancelled the task before it has begun (anyio 4.16). Whether it has
            # is for ``connection.aclose`` to know.
            self._tasks.start_soon(connection.run)
            with anyio.fail_after(START_S_MAX):
                hello = await connection.channel.call(Hello(PROTOCOL_VERSION), HelloReply)
        except TimeoutError:
            connection.channel.close("it did not answer")
            raise DeviceUnavailable(f"device {self._name!r}: no answer within {START_S_MAX:g} s") from None
        except Error as e:
            connection.channel.close(f"it refused: {e}")
            if self._path is not None and isinstance(e, DeviceUnavailable):
                raise DeviceUnavailable(f"socket {self._path}: refused: {e}") from e
            words = f"device {self._name!r}: its process does not serve: {e}"
            raise (
                ResourceExhausted(words) if isinstance(e, ResourceExhausted) else DeviceUnavailable(words)
            ) from e
        except BaseException:
            await connection.aclose("its start was cancelled")
            raise
        try:
            check_device_info(hello.info)
        except InvalidArgument as e:
            connection.channel.close("its DeviceInfo is invalid")
            raise DeviceUnavailable(f"device {self._name!r}: {e}") from e
        if self._info is not None and hello.info != self._info:
            connection.channel.close("it differs from the device before")
            raise DeviceUnavailable(
                f"device {self._name!r}: the new driver process differs from the one before"
            )
        self._info = hello.info
        connection.identifiers.limit = min(hello.pools, POOLS_MAX)
        connection.is_serving.set()
        self.starts += 1
        if self._scheduling is not None:
            await self._lend(connection, self._scheduling)
        return connection

    async def _lend(self, connection: Connection, scheduling: Scheduling) -> None:
        """Lends the process this one's scheduling. Without it the process serves on ordinary threads."""
        if scheduling.lent is None:
            return
        try:
            with anyio.fail_after(START_S_MAX):
                await connection.channel.call(JoinScheduling(scheduling.lent), Done)
        except (Error, TimeoutError) as e:
            _logger.warning("device %r: the threads of its process are ordinary: %s", self._name, e)
        except BaseException:
            await connection.aclose("its start was cancelled")
            raise

    async def threads(self) -> ThreadsReply:
        """The scheduling that the threads of its process have; empty where no process runs. Starts none."""
        connection = self._connection
        if connection is None or not connection.channel.is_alive:
            return ThreadsReply(())
        return await connection.channel.call(GetThreads(), ThreadsReply)

    async def status(self) -> DeviceStatus:
        """See ``Device``."""
        connection = await self._connected()
        with _started_again_by_the_next_call():
            return (await connection.channel.call(GetStatus(), StatusReply)).status

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        """See ``Device``."""
        if self._path is None and not registry.may_support(self._driver, model):
            return (False,) * len(model.main.operations)  # No process is started for that answer.
        connection = await self._connected()
        with _started_again_by_the_next_call():
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
        try:
            preference, priority = ExecutionPreference(preference), Priority(priority)
        except ValueError as e:
            raise InvalidArgument(f"prepare_model: {e}") from e
        on_wire = None
        if cache is not None:
            try:
                check_field_types(cache, CacheFiles, "cache")
                on_wire = CacheOnWire.of(cache)
            except InvalidArgument:
                pass  # Invalid cache arguments never fail a preparation: nothing is cached then.
        body = PrepareModel(model, preference, priority, deadline_ns, on_wire)
        with _started_again_by_the_next_call():
            reply = await connection.channel.call(body, PrepareModelReply)
        return RemotePreparedModel(connection, reply.prepared, reply.expected_duration_ns)

    async def prepare_model_from_cache(
        self, cache: CacheFiles, *, priority: Priority = Priority.MEDIUM, deadline_ns: int | None = None
    ) -> PreparedModel:
        """See ``Device``."""
        check_field_types(cache, CacheFiles, "cache")
        if len(cache.token) != CACHE_TOKEN_BYTES:
            raise InvalidArgument(
                f"prepare_model_from_cache: expected a token of {CACHE_TOKEN_BYTES} bytes, got {len(cache.token)}"
            )
        connection = await self._connected()
        body = PrepareModelFromCache(CacheOnWire.of(cache), Priority(priority), deadline_ns)
        with _started_again_by_the_next_call():
            reply = await connection.channel.call(body, PrepareModelReply)
        return RemotePreparedModel(connection, reply.prepared, reply.expected_duration_ns)

    async def allocate(
        self,
        description: BufferDesc,
        prepared_models: Sequence[PreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> Buffer:
        """See ``Device``."""
        check_allocation(description, prepared_models, input_roles, output_roles)
        connection = await self._connected()
        handles = []
        for index, prepared in enumerate(prepared_models):
            if isinstance(prepared, RemotePreparedModel) and prepared.is_gone:
                raise DeadObject(f"allocate, model {index}: the driver process that prepared it is gone")
            if not isinstance(prepared, RemotePreparedModel) or prepared.connection is not connection:
                raise InvalidArgument(f"allocate, model {index}: expected a prepared model of {self._name!r}")
            handles.append(prepared.handle)
        body = Allocate(description, tuple(handles), tuple(input_roles), tuple(output_roles))
        reply = await connection.channel.call(body, AllocateReply)
        if reply.token <= 0:
            connection.channel.post(FreeBuffer(reply.buffer))
            raise GeneralFailure(f"allocate: expected a positive token of the device, got {reply.token}")
        return RemoteBuffer(connection.channel, reply.buffer, reply.token)

    async def aclose(self) -> None:
        """Ends the driver process. Pending calls raise DEAD_OBJECT. Idempotent."""
        self._closed = True
        connection, spare = self._connection, self._spare
        try:
            if connection is not None:
                await connection.aclose(f"device {self._name!r} was closed")
        finally:
            if spare is not None:
                await spare.aclose()
