"""One client of a node: its control connection, its objects, its data connections.

Owns the client's life at the node. It has a connection of its own to the local device, so that the device's process knows it as a
client of its own, with its own quotas and turns; whatever it had ends with its connection.

Invariants:
1. While the client has work here, it gets a heartbeat every ``HEARTBEAT_NS``, which no computation delays: this process has none.
2. Memory for what a client sends is counted before it is allocated, by the name of the client (``aionn.fleet.node.quotas``).
3. No more than ``CALLS_MAX`` calls of a client are in progress; further ones are not read.
4. Calls on threads, those of data connections included, take turns with those of other clients.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.abc

from aionn.errors import (
    Error,
    ErrorStatus,
    InvalidArgument,
    ResourceExhausted,
    general_failure_of,
    status_of,
)
from aionn.fleet.carrying import beside_loop, carry, decoded, destinations, memories_for
from aionn.fleet.liveness import HEARTBEAT_NS
from aionn.fleet.messages import (
    CONTROL_LIMITS,
    Carried,
    Figures,
    GetFigures,
    Heartbeat,
    Probe,
    ProbeReply,
    Welcome,
    check_parts,
    decode_from_client,
    framed,
)
from aionn.fleet.node.data_connection import IN_LOOP_BYTES_MAX, DataConnection, ServedModel
from aionn.fleet.node.quotas import ClientAccount
from aionn.fleet.node.reservations import NodeFrame, NodeReservations
from aionn.fleet.wire import Wire
from aionn.hal import Device, Memory
from aionn.platform.loops import finish, finish_all
from aionn.service.client.device import RemoteDevice
from aionn.service.wire.protocol import (
    Call,
    CallBody,
    CancelCall,
    Done,
    Failed,
    FreePreparedModel,
    GetStatus,
    Ping,
    PrepareModel,
    PrepareModelReply,
    Reply,
    ReplyBody,
    StatusReply,
    SupportedOperations,
    SupportedOperationsReply,
)
from aionn.service.wire.scheduling_messages import Change, Move, Release, Reserve, Room, Withdrawn
from aionn.service.wire.sizes import TEXT_CHARACTERS_MAX

__all__ = ["DATA_CONNECTIONS_MAX", "OpenDevice", "Session"]

CALLS_MAX = 16
"""Calls of one client in progress. Models are prepared one at a time by the device anyway."""

DATA_CONNECTIONS_MAX = 32
"""Data connections of one client, as many as the bursts of one client of the socket by default."""

SILENT_S_MAX = 30.0
"""A client from which nothing comes for so long is gone: it sends a probe every few seconds."""

_logger = logging.getLogger("aionn.service")

OpenDevice = Callable[[anyio.abc.TaskGroup], Awaitable[Device]]
"""Opens a connection to the local device, whose tasks run in the group that it gets."""


class Session:
    """A client of the node.

    Args:
        wire: Its control connection, on which it has sent Hello.
        open_device: Opens its connection to the local device.
        now: The node's clock, in nanoseconds.
        node: The node's name.
        generation: Of this connection.
        secret: For data connections.
        greeting: When Hello was sent, on the client's clock, and when it came, on this one.
        figures: Gives the load of the node.
        account: Its holdings, within the quotas of its name.

    Attributes:
        generation: See above.
        secret: See above.
        account: See above.
        data_connections: Its data connections.
        models: Its prepared models.
    """

    def __init__(
        self,
        wire: Wire,
        open_device: OpenDevice,
        *,
        now: Callable[[], int],
        node: str,
        generation: int,
        secret: bytes,
        greeting: tuple[int, int],
        figures: Callable[[], Figures],
        account: ClientAccount,
    ) -> None:
        self.generation = generation
        self.secret = secret
        self.account = account
        self.connections: set[DataConnection] = set()
        self.models: dict[int, ServedModel] = {}
        self._wire = wire
        self._open_device = open_device
        self.now = self._now = now
        self._node = node
        self._greeting = greeting
        self._figures = figures
        self._device: Device | None = None
        self._reservations: NodeReservations | None = None
        self._room: Room | None = None  # One that the client could not be sent yet.
        self._tasks: anyio.abc.TaskGroup | None = None
        self._handles = itertools.count(1)
        self._calls: dict[int, anyio.CancelScope] = {}
        self._in_progress = 0
        self._carried: tuple[bytes, list[Memory]] = b"", []
        self._heard_ns = now()
        self._over = anyio.Event()
        wire.owner = self
        wire.reader.limits = CONTROL_LIMITS

    def frame(self, reservation: int) -> NodeFrame | None:
        """See ``DataOwner``."""
        if self._reservations is None:
            raise InvalidArgument(f"node: this client has no reservation {reservation}")
        return self._reservations.frame(reservation)

    @property
    def is_busy(self) -> bool:
        """Whether the client waits for an answer, or sends something."""
        return (
            self._in_progress > 0
            or self._wire.reader.is_within
            or any(connection.is_busy for connection in self.connections)
        )

    @property
    def executing(self) -> int:
        """Data connections with work."""
        return sum(connection.is_busy for connection in self.connections)

    async def run(self) -> None:
        """Serves the client until its connection is over, then frees what it had."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                try:
                    self._device = device = await self._open_device(tasks)
                    if isinstance(device, RemoteDevice) and device.ledger is not None:
                        self._reservations = NodeReservations(
                            device.ledger, device.info.slots, self._notify, self.account
                        )
                    self._welcome(device)
                    await self._heartbeat()
                except Error as e:
                    self._wire.close(str(e), with_reason=True)
                finally:
                    await finish(self._close())
                    tasks.cancel_scope.cancel()
        finally:
            self._tasks = None

    def _welcome(self, device: Device) -> None:
        sent_ns, received_ns = self._greeting
        welcome = Welcome(
            sent_ns,
            received_ns,
            self._now(),
            self.generation,
            self.secret,
            self._node,
            device.info,
            DATA_CONNECTIONS_MAX,
            self._reservations is not None,
        )
        self._wire.send(framed(welcome))

    async def _heartbeat(self) -> None:
        while not self._over.is_set():
            with anyio.move_on_after(HEARTBEAT_NS / 1e9):
                await self._over.wait()
            if self._room is not None:
                self._notify(self._room)
            if self.is_busy and not self._wire.is_congested:
                self._wire.send(framed(Heartbeat()))
            if self._now() - self._heard_ns > SILENT_S_MAX * 1e9:
                self._wire.abort(f"the client was silent for {SILENT_S_MAX:g} s")

    def _notify(self, notice: Withdrawn | Room) -> None:
        """Sends a notice about reservations. Of those about the room, a client that does not read gets the last one."""
        if isinstance(notice, Room):
            self._room = notice if self._wire.is_congested else None
            if self._room is not None:
                return
        self._wire.send(framed(notice))

    async def _close(self) -> None:
        for connection in list(self.connections):
            connection.close("the control connection is over")
        for scope in list(self._calls.values()):
            scope.cancel()
        self._wire.abort("the session has ended")
        self._close_carried()
        models, self.models = self.models, {}
        await finish_all([model.prepared.aclose for model in models.values()])
        if self._device is not None:
            await self._device.aclose()

    # Data connections

    def serve_data(self, wire: Wire, handle: int, greeting: tuple[int, int]) -> None:
        """Serves a further connection of this client, for the executions of one of its models.

        Raises:
            InvalidArgument: There is no such model.
            ResourceExhausted: The client, or those of its name, have too many data connections.
        """
        model = self.models.get(handle)
        if model is None or self._tasks is None:
            raise InvalidArgument(f"data connection: there is no prepared model {handle}")
        if len(self.connections) >= DATA_CONNECTIONS_MAX:
            raise ResourceExhausted(
                f"data connection: expected at most {DATA_CONNECTIONS_MAX} of one client", transient=True
            )
        self.account.take("connections")
        connection = DataConnection(self, wire, model, greeting)
        self.connections.add(connection)
        self._tasks.start_soon(self._run_data, connection)

    async def _run_data(self, connection: DataConnection) -> None:
        try:
            await connection.run()
        except Exception:
            # One connection's end, however it comes, does not affect others.
            _logger.exception("serving a data connection failed")
        finally:
            connection.close("the data connection has ended")
            self.connections.discard(connection)
            self.account.give_back("connections")

    # Calls

    def heard(self) -> None:
        """See ``DataOwner``."""
        self._heard_ns = self._now()

    def on_heard(self) -> None:
        """See ``WireOwner``."""
        self._heard_ns = self._now()

    def on_head(self, head: bytes, body_bytes: int) -> Sequence[memoryview] | None:
        """See ``WireOwner``."""
        received_ns = self._now()
        message = decode_from_client(head)
        if self._device is None:
            raise InvalidArgument("node: expected nothing before the greeting was answered")
        if isinstance(message, Carried):
            return self._carried_begins(message, body_bytes)
        if body_bytes:
            raise InvalidArgument(f"node: expected {type(message).__name__} without a body")
        if isinstance(message, Probe):
            self._wire.send(framed(ProbeReply(message.sent_ns, received_ns, self._now())))
        elif isinstance(message, GetFigures):
            self._wire.send(framed(self._figures()))
        else:
            raise InvalidArgument(f"node: {type(message).__name__} does not belong to the control connection")
        return ()

    def _carried_begins(self, message: Carried, body_bytes: int) -> Sequence[memoryview] | None:
        check_parts(message.parts, body_bytes)
        self.account.take("memory_bytes", body_bytes)
        self._carried = message.payload, []
        if body_bytes <= IN_LOOP_BYTES_MAX:
            self._carried = message.payload, memories_for(message.parts)
            return destinations(self._carried[1])
        assert self._tasks is not None, "the session runs"
        self._tasks.start_soon(self._make_room, message)
        return None

    async def _make_room(self, message: Carried) -> None:
        try:
            memories = await beside_loop(self, memories_for, message.parts)
        except Error as e:
            self._wire.close(str(e), with_reason=True)
            return
        self._carried = message.payload, memories
        self._wire.place(destinations(memories))

    def on_body(self) -> None:
        """See ``WireOwner``."""
        payload, memories = self._carried
        if not payload:
            return
        self._carried = b"", []
        assert self._tasks is not None, "the session runs"
        self._in_progress += 1
        if self._in_progress >= CALLS_MAX:
            self._wire.pause_reading("calls")
        self._tasks.start_soon(self._answer, payload, memories)

    def on_lost(self, why: str) -> None:
        """See ``WireOwner``."""
        self._over.set()

    def _close_carried(self) -> None:
        _, memories = self._carried
        self._carried = b"", []
        for memory in memories:
            memory.close()

    async def _answer(self, payload: bytes, memories: list[Memory]) -> None:
        contents = _Contents(self.account, sum(memory.size_bytes for memory in memories))
        try:
            try:
                call = await self._decoded(payload, memories)
            finally:
                for memory in memories:
                    memory.close()
            if call is not None:
                await self._reply(Reply(call.id, await self._reply_to(call, contents)))
        finally:
            contents.give_back()
            self._in_progress -= 1
            self._wire.resume_reading("calls")

    async def _reply_to(self, call: Call, contents: _Contents) -> ReplyBody:
        if call.id in self._calls:
            return Failed(ErrorStatus.INVALID_ARGUMENT, f"node: call {call.id} is in progress already")
        self._calls[call.id] = scope = anyio.CancelScope()
        reply: ReplyBody = Failed(ErrorStatus.GENERAL_FAILURE, "node: the call was withdrawn")
        try:
            with scope:
                reply = await self._handled(call.body, contents)
        except Error as e:
            reply = Failed(status_of(e), str(e)[:TEXT_CHARACTERS_MAX])
        except Exception as e:
            _logger.exception("answering a call of a client failed")
            reply = Failed(
                ErrorStatus.GENERAL_FAILURE, str(general_failure_of(e, "node"))[:TEXT_CHARACTERS_MAX]
            )
        finally:
            del self._calls[call.id]
        return reply

    async def _decoded(self, payload: bytes, memories: list[Memory]) -> Call | None:
        try:
            message = await decoded(payload, memories, self)
            if not isinstance(message, Call):
                raise InvalidArgument("node: expected a call, got a reply")
        except Error as e:
            self._wire.close(str(e), with_reason=True)
            return None
        return message

    async def _reply(self, reply: Reply) -> None:
        head, contents, keep = await carry(reply, self)
        self._wire.send(head, contents)
        del keep

    async def _handled(self, body: CallBody, contents: _Contents) -> ReplyBody:
        device = self._device
        assert device is not None, "calls come after the greeting"
        match body:
            case GetStatus():
                return StatusReply(await device.status())
            case SupportedOperations():
                return SupportedOperationsReply(await device.supported_operations(body.model))
            case PrepareModel():
                return await self._prepared(device, body, contents)
            case FreePreparedModel():
                model = self.models.pop(body.prepared, None)
                if model is not None:
                    self.account.give_back("models")  # Now, so that the next call may prepare another one.
                    for connection in list(model.connections):
                        connection.close("its prepared model was closed")
                    await model.prepared.aclose()
                    self.account.give_back("memory_bytes", model.contents_bytes)
                return Done()
            case CancelCall():
                scope = self._calls.get(body.call)
                if scope is not None:
                    scope.cancel()
                return Done()
            case Ping():
                return Done()
            case Reserve() | Change() | Move() | Release() if self._reservations is not None:
                return await self._reservations.handle(body)
        raise InvalidArgument(f"node: {type(body).__name__} is not served over a network")

    async def _prepared(self, device: Device, body: PrepareModel, contents: _Contents) -> ReplyBody:
        self.account.take("models")
        try:
            prepared = await device.prepare_model(
                body.model, preference=body.preference, priority=body.priority
            )
        except BaseException:
            self.account.give_back("models")
            raise
        handle = next(self._handles)
        self.models[handle] = ServedModel(prepared, body.model.main.outputs, contents.keep())
        return PrepareModelReply(handle, prepared.expected_duration_ns)


class _Contents:
    """The contents of a call, which count until it is answered; those of a model that was prepared, until it is closed."""

    def __init__(self, account: ClientAccount, size_bytes: int) -> None:
        self._account = account
        self._size_bytes = size_bytes

    def keep(self) -> int:
        """Lets them count on; the caller gives them back. Returns their size in bytes."""
        size_bytes, self._size_bytes = self._size_bytes, 0
        return size_bytes

    def give_back(self) -> None:
        """Ends their count, unless they are kept."""
        self._account.give_back("memory_bytes", self.keep())
