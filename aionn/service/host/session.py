"""One client of a driver process: its objects, its account, and the answers to its calls.

Owns the client's tables: prepared models, device memories, fenced and reusable executions; bursts are in ``bursts``. No client sees
another's: a handle is a number in one client's table.

Invariants:
1. Everything that a client made is freed when its connection ends; its running executions are abandoned.
2. A handle is checked at every use and never used twice.
3. The objects of a client never exceed its quotas.
4. The event loop of this process runs no device code: blocking devices have threads of their own.
"""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.abc
import anyio.from_thread

from aionn.errors import Error, ErrorStatus, GeneralFailure, InvalidArgument, ResourceExhausted, status_of
from aionn.hal import (
    Buffer,
    BufferDefaults,
    Device,
    Execution,
    FencedExecution,
    OutputShape,
    PreparedModel,
    PreparedModelDefaults,
    Priority,
    Request,
    Timing,
    ask_to_stop,
    check_abilities,
    check_launch,
)
from aionn.hal.callers import Connection, Sharer, account_of_call, client_of_call, sharer_of_call
from aionn.hal.pieces import pace_of_call
from aionn.platform.loops import finish
from aionn.service.host.bursts import Bursts
from aionn.service.host.client_fences import ClientFences
from aionn.service.host.model_sizes import model_bytes
from aionn.service.host.threads import HostThreads
from aionn.service.progress import Progress
from aionn.service.wire.channel import Channel
from aionn.service.wire.handles import RequestOnWire, cache_key
from aionn.service.wire.peers import Peer
from aionn.service.wire.protocol import (
    PROTOCOL_VERSION,
    Allocate,
    AllocateReply,
    CallBody,
    ConfigureBurst,
    CopyFrom,
    CopyTo,
    Done,
    EndBurst,
    Execute,
    ExecuteFenced,
    ExecuteFencedReply,
    ExecuteReply,
    ExecutionInfoReply,
    ForgetExecution,
    FreeBuffer,
    FreeMemorySlot,
    FreePreparedModel,
    GetExecutionInfo,
    GetMemoriesReply,
    GetStatus,
    Hello,
    HelloReply,
    Launch,
    LaunchReply,
    Notify,
    Ping,
    PrepareModel,
    PrepareModelFromCache,
    PrepareModelReply,
    ReplyBody,
    StatusReply,
    SupportedOperations,
    SupportedOperationsReply,
)
from aionn.service.wire.quotas import Account, Quotas
from aionn.service.wire.repetition import (
    Compute,
    ComputeFenced,
    CreateExecution,
    CreateExecutionReply,
    ForgetMemory,
    RecallMemories,
    RememberedMemories,
)
from aionn.service.wire.scheduling_messages import GetThreads, JoinScheduling
from fences import FenceError, FenceStatus, SyncFence, first, merge

__all__ = ["Session"]

_T = TypeVar("_T")

_logger = logging.getLogger("aionn.service")

OUTCOME_DESCRIPTORS = 2
"""Descriptors of a fence that is sent while it is pending: both ends of its socket pair."""

FREED_PER_TURN = 8
"""Objects of a client that has gone that are freed before other tasks of the loop get their turn. A fence or a fenced execution
takes some tens of microseconds, and a client may have thousands."""


class _Prepared(NamedTuple):
    model: PreparedModel
    priority: Priority
    memory_bytes: int


class _Reusable(NamedTuple):
    prepared: int
    execution: Execution


class _Buffer(NamedTuple):
    buffer: Buffer
    memory_bytes: int


class Session:
    """One client's objects and the answers to its calls.

    Args:
        device: The device to serve.
        portal: Runs coroutines for the threads of bursts.
        tasks: Where launched executions wait for their end.
        quotas: The client's quotas.
        progress: Is notified of the work that the device does.
        on_hello: Called when the client has sent Hello.
        peer: The client's process, beside which others may be served; None for one that is alone.
        threads: The scheduling of this process; None if it cannot be lent one.

    Attributes:
        greeted: Set when the client has sent Hello, or never will.
        closed: Set when nothing more is taken.
        bursts: Its bursts.
        memories: Those of its requests.
    """

    def __init__(
        self,
        device: Device,
        portal: anyio.from_thread.BlockingPortal,
        tasks: anyio.abc.TaskGroup,
        *,
        quotas: Quotas,
        progress: Progress,
        on_hello: Callable[[], None] | None = None,
        peer: Peer | None = None,
        threads: HostThreads | None = None,
    ) -> None:
        self._device = device
        self._portal = portal
        self._tasks = tasks
        self._progress = progress
        self.account = Account(quotas)
        self.greeted = anyio.Event()
        self.closed = anyio.Event()
        self._on_hello = on_hello
        self._peer = Peer() if peer is None else peer
        self._threads = HostThreads(may_join=False) if threads is None else threads
        self._handles = itertools.count(1)
        self._prepared: dict[int, _Prepared] = {}
        self._buffers: dict[int, _Buffer] = {}
        self.bursts = Bursts(portal, self.account, progress, self._peer)
        self._fenced: dict[int, FencedExecution] = {}
        self._fences = ClientFences(tasks, self.account, self._peer)
        # Only its client could finish them: while they are pending, each keeps a descriptor and an execution.
        self._awaited: weakref.WeakSet[SyncFence] = weakref.WeakSet()
        self._reusable: dict[int, _Reusable] = {}
        self.memories = RememberedMemories(self.account)

    async def handle(self, body: CallBody, channel: Channel) -> ReplyBody:
        """Answers one call. Raises ``Error`` for what becomes a failed reply."""
        if not self.greeted.is_set() and not isinstance(body, Hello):
            raise InvalidArgument(f"service: expected Hello first, got {type(body).__name__}")
        client_of_call.set(Connection(self._peer, self))  # Each call has a task of its own.
        account_of_call.set(self.account)
        share = self.account.share
        sharer_of_call.set(None if share is None else Sharer(share.user, share.process))
        pace_of_call.set(self._peer.pace(self._progress.moved_on))
        match body:
            case Hello():
                return self._hello(body)
            case Ping():
                return Done()
            case JoinScheduling() | GetThreads():
                return self._threads.handle(body)
            case GetStatus():
                return StatusReply(await self._device.status())
            case SupportedOperations():
                # Many may wait for their turn, with all their data.
                size_bytes = await model_bytes(body.model, Connection(self._peer, self))
                held = self.account.holding("memory_bytes", size_bytes)
                with held, self._progress.work(), self._peer.preparing():
                    return SupportedOperationsReply(await self._device.supported_operations(body.model))
            case PrepareModel() | PrepareModelFromCache():
                return await self._prepare(body)
            case FreePreparedModel():
                return await self._free_prepared(body.prepared)
            case Allocate() | CopyTo() | CopyFrom() | FreeBuffer():
                return await self._handle_buffer(body)
            case ConfigureBurst():
                owned = _find(self._prepared, body.prepared, "prepared model")
                return self.bursts.configure(body, owned.model, owned.priority, channel)
            case ForgetMemory():
                self.memories.forget(body.identifier)
                return Done()
            case FreeMemorySlot():
                self.bursts.free_slot(body.burst, body.slot)
                return Done()
            case EndBurst():
                await self.bursts.end(body.burst)
                return Done()
            case _:
                return await self._handle_execution(body, channel)

    async def _handle_execution(self, body: CallBody, channel: Channel) -> ReplyBody:
        match body:
            case Execute():
                return await self._execute(body, channel)
            case Launch():
                return await self._launch(body, channel)
            case ExecuteFenced() | ComputeFenced():
                return await self._execute_fenced(body, channel)
            case CreateExecution():
                return await self._create_execution(body, channel)
            case Compute():
                return await self._compute(body)
            case GetExecutionInfo():
                return await self._execution_info(body)
            case ForgetExecution():
                return self._forget_execution(body.execution)
            case _:
                raise InvalidArgument(f"service: a driver answers no {type(body).__name__}")

    def _hello(self, body: Hello) -> HelloReply:
        if body.version != PROTOCOL_VERSION:
            raise InvalidArgument(
                f"service: expected protocol version {PROTOCOL_VERSION}, got {body.version}: the two ends differ"
            )
        self.greeted.set()
        if self._on_hello is not None:
            self._on_hello()
        return HelloReply(PROTOCOL_VERSION, os.getpid(), self._device.info, self.account.limit("pools"))

    # Prepared models

    async def _prepare(self, body: PrepareModel | PrepareModelFromCache) -> PrepareModelReply:
        if isinstance(body, PrepareModel):
            memory_bytes = await model_bytes(body.model, Connection(self._peer, self))
        else:
            # The restored model is as large as the files.
            memory_bytes = body.cache.size_bytes
        with self.account.taking("prepared_models"), self.account.taking("memory_bytes", memory_bytes):
            with self._progress.work(), self._peer.preparing():
                prepared = await self._prepare_by(body, memory_bytes)
            check_abilities(prepared, PreparedModelDefaults, self._device.info.name)
            prepared.owner = Connection(
                self._peer, self
            )  # Equals take turns: processes, then their connections.
            handle = next(self._handles)
            self._prepared[handle] = _Prepared(prepared, body.priority, memory_bytes)
        return PrepareModelReply(handle, prepared.expected_duration_ns)

    async def _prepare_by(self, body: PrepareModel | PrepareModelFromCache, size_bytes: int) -> PreparedModel:
        share = self.account.share
        key = None if share is None else cache_key(share.user)
        if isinstance(body, PrepareModelFromCache):
            return await self._device.prepare_model_from_cache(
                body.cache.files(size_bytes, key), priority=body.priority, deadline_ns=body.deadline_ns
            )
        return await self._device.prepare_model(
            body.model,
            preference=body.preference,
            priority=body.priority,
            deadline_ns=body.deadline_ns,
            cache=None if body.cache is None else body.cache.files(key=key),
        )

    @contextmanager
    def _executing(self) -> Iterator[None]:
        """One execution under way."""
        with self.account.holding("executions"), self._progress.work():
            yield

    async def _free_prepared(self, handle: int) -> Done:
        owned = self._prepared.pop(handle, None)
        if owned is not None:
            await finish(self._close_prepared(handle, owned))  # No other code could free it any more.
        return Done()

    async def _close_prepared(self, handle: int, owned: _Prepared) -> None:
        await self.bursts.end_of(handle)
        for execution in [number for number, e in self._reusable.items() if e.prepared == handle]:
            self._forget_execution(execution)
        self.account.give_back("prepared_models")
        self.account.give_back("memory_bytes", owned.memory_bytes)
        await owned.model.aclose()

    def _prepared_model(self, handle: int) -> PreparedModel:
        return _find(self._prepared, handle, "prepared model").model

    # Device memories

    async def _handle_buffer(self, body: Allocate | CopyTo | CopyFrom | FreeBuffer) -> ReplyBody:
        match body:
            case Allocate():
                return await self._allocate(body)
            case CopyTo():
                await _find(self._buffers, body.buffer, "buffer").buffer.copy_to(body.destination)
            case CopyFrom():
                buffer = _find(self._buffers, body.buffer, "buffer").buffer
                await buffer.copy_from(body.source, body.dimensions)
            case FreeBuffer():
                await self._free_buffer(body.buffer)
        return Done()

    async def _allocate(self, body: Allocate) -> AllocateReply:
        models = [self._prepared_model(handle) for handle in body.prepared]
        with self.account.taking("buffers"):
            buffer = await self._device.allocate(
                body.description, models, body.input_roles, body.output_roles
            )
            check_abilities(buffer, BufferDefaults, self._device.info.name)
            memory_bytes = int(buffer.size_bytes)
            try:
                self.account.take("memory_bytes", memory_bytes)
            except ResourceExhausted:
                await buffer.aclose()
                raise
        handle = next(self._handles)
        self._buffers[handle] = _Buffer(buffer, memory_bytes)
        return AllocateReply(handle, buffer.token)

    async def _free_buffer(self, handle: int) -> None:
        owned = self._buffers.pop(handle, None)
        if owned is not None:
            self.account.give_back("buffers")
            self.account.give_back("memory_bytes", owned.memory_bytes)
            await finish(owned.buffer.aclose())

    # Executions

    async def _request(self, on_wire: RequestOnWire, channel: Channel) -> Request:
        """A request with the memories that its pools stand for; asks the client for those that are not remembered."""
        memories, unknown = self.memories.take(on_wire.pools)
        if unknown:
            with self.memories.question(unknown):
                reply = await channel.call(RecallMemories(tuple(unknown)), GetMemoriesReply)
                self.memories.learn(unknown, reply.memories)
            answered = dict(zip(unknown, reply.memories, strict=True))
            for index, pool in enumerate(on_wire.pools):
                if memories[index] is None:
                    memories[index] = answered.get(pool.identifier)
        return on_wire.request(memories)

    async def _execute(self, body: Execute, channel: Channel) -> ExecuteReply:
        prepared = self._prepared_model(body.prepared)
        request = await self._request(body.request, channel)
        with self._executing():
            launch = prepared.launch(
                request,
                measure=body.measure,
                deadline_ns=body.deadline_ns,
                loop_timeout_ns=body.loop_timeout_ns,
                **_class_of(body, prepared),
            )
            check_launch(launch, self._device.info.name)
            try:
                return ExecuteReply(await launch)
            except BaseException:
                ask_to_stop(launch)
                if not launch.is_done:
                    # The answer to a cancelled call means that the device is done with it. It counts as work until then.
                    done = first([launch.done, channel.ended])
                    with anyio.CancelScope(shield=True):
                        await done
                raise

    async def _create_execution(self, body: CreateExecution, channel: Channel) -> CreateExecutionReply:
        prepared = self._prepared_model(body.prepared)
        with self.account.taking("reusable"):
            request = await self._request(body.request, channel)
            execution = await prepared.create_reusable_execution(
                request, measure=body.measure, loop_timeout_ns=body.loop_timeout_ns
            )
            self._prepared_model(body.prepared)  # It may have been freed during the wait.
        handle = next(self._handles)
        self._reusable[handle] = _Reusable(body.prepared, execution)
        return CreateExecutionReply(handle)

    async def _compute(self, body: Compute) -> ExecuteReply:
        execution = _find(self._reusable, body.execution, "reusable execution").execution
        with self._executing():
            return ExecuteReply(await execution.execute_synchronously(deadline_ns=body.deadline_ns))

    async def _launch(self, body: Launch, channel: Channel) -> LaunchReply:
        prepared = self._prepared_model(body.prepared)
        request = await self._request(body.request, channel)
        self.account.take("executions")
        done = SyncFence("launched execution")
        outcome: list[Notify] = []

        def callback(status: ErrorStatus, shapes: Sequence[OutputShape], timing: Timing) -> None:
            # From any thread, and from a driver that does it twice: the first counts.
            outcome.append(Notify(body.launch, status, tuple(shapes), timing))
            done.try_signal()

        async def notify() -> None:
            try:
                with self._progress.work():
                    await done
                await channel.command(outcome[0])
            except Error:
                pass  # The client is gone, or does not know the launch: there is no one to notify.
            finally:
                self.account.give_back("executions")
                if outcome and outcome[0].status is ErrorStatus.NONE:
                    self._peer.executed()

        self._tasks.start_soon(notify)
        try:
            status = await prepared.execute(
                request,
                callback,
                measure=body.measure,
                deadline_ns=body.deadline_ns,
                loop_timeout_ns=body.loop_timeout_ns,
                **_class_of(body, prepared),
            )
        except Exception as e:
            callback(status_of(e), (), Timing())  # No other one comes, whatever a driver raises.
            raise
        return LaunchReply(status)

    async def _execute_fenced(
        self, body: ExecuteFenced | ComputeFenced, channel: Channel
    ) -> ExecuteFencedReply:
        wait_for: list[SyncFence] = []
        try:
            with (
                self.account.taking("fenced"),
                self.account.taking("executions"),
                self.account.taking_descriptors(OUTCOME_DESCRIPTORS),
            ):
                for fence in body.wait_for:
                    wait_for.append(self._fences.take(fence))
                launched = await self._launch_fenced(body, wait_for, channel)
                outcome = launched.fence
                if outcome is not None and not isinstance(outcome, SyncFence):
                    raise GeneralFailure(
                        f"{self._device.info.name}: expected a SyncFence or None as the fence of the driver's "
                        f"fenced execution, got a {type(outcome).__name__}"
                    )
                handle = next(self._handles)
                self._fenced[handle] = launched
        except BaseException:
            # They came for this call, and nothing waits for them now.
            for fence in wait_for:
                self._fences.give_back(fence)
            for fence in body.wait_for[len(wait_for) :]:
                fence.close()
            raise
        self._awaited.update(wait_for)
        account, peer, leave = self.account, self._peer, self._fences.leave
        if outcome is None:
            leave(wait_for)
            peer.executed()
            account.give_back("executions")
            account.give_back_descriptors(OUTCOME_DESCRIPTORS)
        else:
            if self._progress.is_watching:
                self._tasks.start_soon(self._watch_fenced, wait_for, outcome)
            outcome.add_callback(lambda _: account.give_back("executions"))
            outcome.add_callback(lambda fence: _count_success(peer, fence))
            outcome.add_callback(lambda _: leave(wait_for))
            # A driver may drop it unfinished: that closes its descriptors, and calls nothing.
            over = account.count_descriptors_until_dropped(outcome, OUTCOME_DESCRIPTORS)
            outcome.add_callback(lambda _: over())
        return ExecuteFencedReply(handle, outcome)

    async def _launch_fenced(
        self, body: ExecuteFenced | ComputeFenced, wait_for: Sequence[SyncFence], channel: Channel
    ) -> FencedExecution:
        # A driver that waits in the call for fences of others does not hang.
        is_ready = all(fence.status != FenceStatus.PENDING for fence in wait_for)
        if isinstance(body, ComputeFenced):
            execution = _find(self._reusable, body.execution, "reusable execution").execution
            with self._progress.work() if is_ready else nullcontext():
                return await execution.execute_fenced(
                    wait_for, deadline_ns=body.deadline_ns, duration_ns=body.duration_ns
                )
        prepared = self._prepared_model(body.prepared)
        request = await self._request(body.request, channel)
        with self._progress.work() if is_ready else nullcontext():
            return await prepared.execute_fenced(
                request,
                wait_for,
                measure=body.measure,
                deadline_ns=body.deadline_ns,
                loop_timeout_ns=body.loop_timeout_ns,
                duration_ns=body.duration_ns,
            )

    async def _watch_fenced(self, wait_for: Sequence[SyncFence], fence: SyncFence) -> None:
        """Counts a fenced execution as work of the device from when it may start; until then it waits for others."""
        ready = merge(wait_for)
        fence.add_callback(lambda _: ready.close())
        with suppress(FenceError):
            await ready
        with self._progress.work(), suppress(FenceError):
            await fence

    async def _execution_info(self, body: GetExecutionInfo) -> ExecutionInfoReply:
        status, timing = await _find(self._fenced, body.execution, "fenced execution").get_execution_info()
        if body.last:
            self._forget_execution(body.execution)
        return ExecutionInfoReply(status, timing)

    def _forget_execution(self, handle: int) -> Done:
        if self._fenced.pop(handle, None) is not None:
            self.account.give_back("fenced")
        if self._reusable.pop(handle, None) is not None:
            self.account.give_back("reusable")
        return Done()

    def rest(self, idle_s: float) -> int:
        """Gives back the memories of requests and bursts that were not used for ``idle_s``; the next use takes them again.

        Returns:
            Number of memories of requests, and of bursts.
        """
        return self.memories.rest(idle_s) + self.bursts.rest(idle_s)

    async def aclose(self) -> None:
        """Frees everything that the client made, and abandons what it left running."""
        self.greeted.set()
        self.closed.set()
        await self._in_turns(list(self._prepared.values()), _abandon)
        # The launch has no waiter any more: it fails and ends.
        await self._in_turns([*self._fences.end(), *self._awaited], SyncFence.close)
        await self._in_turns(list(self._fenced), self._fenced.pop)
        self.memories.clear()
        # In reverse: bursts first. An object that cannot be freed, by a fault of the driver, does not keep the rest.
        async with AsyncExitStack() as stack:
            for handle in self._prepared:
                stack.push_async_callback(self._free_prepared, handle)
            for handle in self._buffers:
                stack.push_async_callback(self._free_buffer, handle)
            stack.push_async_callback(self.bursts.aclose)

    async def _in_turns(self, objects: Iterable[_T], free: Callable[[_T], object]) -> None:
        """Frees what a client may have many of, a few in each turn of the loop."""
        for place, each in enumerate(objects, 1):
            free(each)
            if place % FREED_PER_TURN == 0:
                await self._peer.next_turn_of_leaving()


def _count_success(peer: Peer, fence: SyncFence) -> None:
    if fence.status is FenceStatus.SIGNALLED:
        peer.executed()


def _abandon(owned: _Prepared) -> None:
    """Abandons the executions of a model. A fault of the driver does not keep the rest from being freed."""
    try:
        owned.model.abandon()
    except (Exception, anyio.get_cancelled_exc_class()):
        _logger.exception("a prepared model cannot be abandoned")


def _find(table: dict[int, _T], handle: int, what: str) -> _T:
    try:
        return table[handle]
    except KeyError:
        raise InvalidArgument(f"service: no {what} has the handle {handle}") from None


def _class_of(body: Execute | Launch, prepared: PreparedModel) -> dict[str, Any]:
    """The ``priority`` argument, for drivers that accept one per execution."""
    return {"priority": body.priority} if body.priority is not None and prepared.takes_priority else {}
