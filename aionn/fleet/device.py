"""A device of another node, as a ``Device`` of the driver contract.

Owns which connection is in use: made when it is first needed, made again after it was lost, and that the node behind it has the
same device. It has no device memories and no cache files: both stay where the device is.

Invariants:
1. An object belongs to the connection that made it. When that is lost every pending call on it raises DEAD_OBJECT, and so does
   every later one; a new connection knows nothing of it.
2. A node that comes back with another device is refused.
3. A node is called at most once per call, and after failures only after a pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import anyio
import anyio.to_thread
import msgspec

from aionn.drivers.kit.checked import CheckedDevice
from aionn.errors import DeadObject, DeviceUnavailable, GeneralFailure, InvalidArgument, MissedDeadline
from aionn.fleet.addresses import NodeAddress
from aionn.fleet.carrying import portable
from aionn.fleet.connecting import Connector, TcpConnector
from aionn.fleet.control import ControlConnection
from aionn.fleet.liveness import Reconnection
from aionn.fleet.messages import Figures
from aionn.fleet.prepared import NodePreparedModel
from aionn.hal import (
    CacheFileCounts,
    CacheFiles,
    DeviceInfo,
    DeviceStatus,
    ExecutionPreference,
    Model,
    PreparedModel,
    Priority,
)
from aionn.platform.loops import Home, begin, finish
from aionn.service.client.reservations import ServedLedger, ServedReservation
from aionn.service.wire.protocol import (
    GetStatus,
    PrepareModel,
    PrepareModelReply,
    StatusReply,
    SupportedOperations,
    SupportedOperationsReply,
)
from aionn.service.wire.scheduling_messages import AskedTime
from aionn.validation import check_device_info

__all__ = ["NodeDevice", "NodeDeviceInfo"]


class NodeDeviceInfo(DeviceInfo, frozen=True):
    """The description of a device of another node.

    Attributes:
        name: ``<node>/<device>``.
        location: ``remote``.
        address: Of the node.
        round_trip_ns: Of a small message, when the node was first reached. ``NodeDevice.round_trip_ns`` is the present one.
    """

    location: str = "remote"
    address: str = ""
    round_trip_ns: int = 0


WAY_CHANGE = 2
"""A way that has become longer by more than this factor counts for a reservation that changes."""


class NodeLedger(ServedLedger):
    """The ledger of a device of a node. A frame's way there is jitter, as the ledger sees it."""

    async def reserve(
        self, asked: AskedTime, old: ServedReservation | None = None, *, slot_count: int
    ) -> ServedReservation:
        """See the base class."""
        connection = await self._connected()
        assert isinstance(connection, ControlConnection), "of a node"
        way_ns = connection.way_ns
        if old is not None and old.way_ns <= way_ns <= WAY_CHANGE * old.way_ns:
            # Terms that demand no more are to replace the old ones, whatever the last frames took.
            way_ns = old.way_ns
        shorter_ns = asked.deadline_ns if asked.phase_ns is None else min(asked.deadline_ns, asked.period_ns)
        most_ns = max(asked.jitter_ns, shorter_ns - 2 * asked.tolerance_ns - 1)
        jitter_ns = min(asked.jitter_ns + way_ns, most_ns)
        asked = msgspec.structs.replace(asked, jitter_ns=jitter_ns)
        found = await super().reserve(asked, old, slot_count=slot_count)
        found.way_ns = way_ns
        return found


class NodeDevice(CheckedDevice):
    """A device of another node. Made by ``connect``.

    Args:
        address: Of the node.
        connector: Makes the connections; None for TCP.
        now: The clock of deadlines, in nanoseconds.

    Attributes:
        info: See ``Device``; known once the node was reached.
        connections: Number of control connections that were made.
    """

    info: NodeDeviceInfo

    def __init__(
        self,
        address: NodeAddress,
        connector: Connector | None = None,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._closed = False
        self._address = address
        self._connector = TcpConnector(address) if connector is None else connector
        self.now = now
        self._control: ControlConnection | None = None
        self._connecting = anyio.Lock()
        self._reconnection = Reconnection()
        self._home = Home()
        self._loop = asyncio.get_running_loop()
        self._is_described = False
        self.connections = 0
        self._ledger: NodeLedger | None = None

    async def connect(self) -> None:
        """Connects unless it is connected; ``info`` is known from then on.

        Raises:
            DeviceUnavailable: The node cannot be reached, refuses, or has another device than before.
        """
        await self._connected()

    @property
    def ledger(self) -> ServedLedger | None:
        """The reservations of the streams of all applications, at the node; None where the device there has no ledger."""
        control = self._control
        if self._ledger is None and control is not None and control.welcome.keeps_reservations:
            self._ledger = NodeLedger(self._connected, lambda work: begin(work(), "aionn-fleet-ledger"))
        return self._ledger

    @property
    def round_trip_ns(self) -> int:
        """The smoothed round trip of small messages; 0 before the first."""
        return 0 if self._control is None else self._control.round_trip.mean_ns

    @property
    def clock_uncertainty_ns(self) -> int:
        """By so much a deadline is early at the node, at most; 0 before the first exchange."""
        control = self._control
        return (
            0 if control is None or not control.clock.is_known else control.clock.uncertainty_ns(self.now())
        )

    @property
    def bytes_per_s(self) -> float:
        """The smoothed rate of large transfers; 0 before the first."""
        return 0.0 if self._control is None else self._control.round_trip.bytes_per_s

    @property
    def has_died(self) -> bool:
        """Whether the node is lost, and was not needed since."""
        return self._control is not None and not self._control.is_alive

    async def figures(self) -> Figures:
        """The load of the node.

        Raises:
            DeadObject: It is lost before it has answered.
            DeviceUnavailable: It cannot be reached.
        """
        return await (await self._connected()).figures()

    async def _connected(self) -> ControlConnection:
        self._home.check(f"node {self._address.text}")
        async with self._connecting:
            self.check_open()
            if self._control is not None and self._control.is_alive:
                return self._control
            pause_ns = self._reconnection.pause_ns(self.now())
            if pause_ns:
                await anyio.sleep(pause_ns / 1e9)
            try:
                self._control = await self._opened()
            except DeviceUnavailable:
                self._reconnection.failed(self.now())
                raise
            self._reconnection.succeeded()
            self.connections += 1
            return self._control

    async def _opened(self) -> ControlConnection:
        control = ControlConnection(self._address, self._connector, self.now)
        await control.open()
        try:
            info = self._described(control)
        except BaseException:
            await finish(control.aclose())
            raise
        if not self._is_described:
            self._is_described = True
            super().__init__(info)
        return control

    def _described(self, control: ControlConnection) -> NodeDeviceInfo:
        """The device of a node.

        Raises:
            DeviceUnavailable: Its description is invalid, or it is another device than before.
        """
        welcome, address = control.welcome, self._address
        assert welcome.info is not None, "the connection has checked it"
        try:
            check_device_info(welcome.info)
            described = NodeDeviceInfo(
                **msgspec.structs.asdict(welcome.info),
                address=address.text,
                round_trip_ns=control.round_trip.mean_ns,
            )
            name = f"{welcome.node}/{welcome.info.name}"
            info = msgspec.structs.replace(described, name=name, cache_files=CacheFileCounts())
            check_device_info(info)
        except InvalidArgument as e:
            raise DeviceUnavailable(f"node {address.text}: {e}") from e
        if self._is_described:
            restricted = msgspec.structs.replace(
                info, extensions=self.info.extensions, round_trip_ns=self.info.round_trip_ns
            )
            if restricted != self.info:
                raise DeviceUnavailable(
                    f"node {address.text}: it came back with another device: expected {self.info.name} {self.info.version}, got "
                    f"{info.name} {info.version}"
                )
        return info

    def check_open(self) -> None:
        """Refuses a call that comes too late.

        Raises:
            DeviceUnavailable: The device is closed.
        """
        if self._closed:
            raise DeviceUnavailable(f"node {self._address.text}: the device is closed")

    def supports(self, model: Model) -> Sequence[bool]:
        """See the base class: the node answers that, see ``supported_operations``."""
        return (True,) * len(model.main.operations)

    def call_at(self, time_ns: int, function: Callable[[], None]) -> Callable[[], None]:
        """See ``Timers``."""
        timer = asyncio.get_running_loop().call_later(max(0, time_ns - self.now()) / 1e9, function)
        return timer.cancel

    def call(self, function: Callable[[], None]) -> None:
        """See ``Timers``: in the event loop of the device."""
        if self._home.is_here:
            function()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    async def status(self) -> DeviceStatus:
        """See ``Device``. OFFLINE where the node cannot be reached."""
        try:
            control = await self._connected()
            return (await control.call(GetStatus(), StatusReply)).status
        except (DeadObject, DeviceUnavailable):
            return DeviceStatus.OFFLINE

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        """See ``Device``."""
        control = await self._connected()
        # A large model takes milliseconds to check: not on the event loop.
        known = await anyio.to_thread.run_sync(self._checked_support, model)
        sent = await anyio.to_thread.run_sync(portable, model)
        reply = await control.call(SupportedOperations(sent), SupportedOperationsReply)
        if len(reply.supported) != len(known):
            raise GeneralFailure(
                f"{self.info.name}: {len(known)} operations, but {len(reply.supported)} answers"
            )
        return tuple(a and b for a, b in zip(known, reply.supported, strict=True))

    async def prepare_model(
        self,
        model: Model,
        *,
        preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER,
        priority: Priority = Priority.MEDIUM,
        deadline_ns: int | None = None,
        cache: CacheFiles | None = None,
    ) -> NodePreparedModel:
        """See ``Device``. Nothing is cached: a compilation stays where the device is."""
        preference, priority = self._check_terms(preference, priority, deadline_ns, "prepare_model")
        self._check_time_left(deadline_ns, self.now(), "prepare_model")
        control = await self._connected()
        await anyio.to_thread.run_sync(self._checked_support, model)
        sent = await anyio.to_thread.run_sync(portable, model)
        left_s = None if deadline_ns is None else max(0.0, (deadline_ns - self.now()) / 1e9)
        with anyio.move_on_after(left_s) as limit:
            # The deadline stays here: an absolute time means nothing at the node, and this one ends the call there as well.
            reply = await control.call(PrepareModel(sent, preference, priority, None), PrepareModelReply)
        if limit.cancelled_caught:
            raise MissedDeadline("prepare_model: the deadline passed while preparing", transient=True)
        return NodePreparedModel(
            self, model, priority, control, reply.prepared, reply.expected_duration_ns, self.info.slots
        )

    async def prepare_model_from_cache(
        self, cache: CacheFiles, *, priority: Priority = Priority.MEDIUM, deadline_ns: int | None = None
    ) -> PreparedModel:
        """See ``Device``. Raises ``GeneralFailure``: nothing is cached."""
        where = "prepare_model_from_cache"
        self.check_open()
        self._check_terms(ExecutionPreference.FAST_SINGLE_ANSWER, priority, deadline_ns, where)
        self._held_to_load(cache)
        raise AssertionError("a device without cache files refuses them")

    async def aclose(self) -> None:
        """See ``Device``. Running and waiting executions raise DEAD_OBJECT. Idempotent."""
        self._closed = True
        if self._is_described:
            self.end_fenced()
        control = self._control
        if control is not None:
            await finish(control.aclose())
