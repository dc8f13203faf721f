"""A model that a node has prepared, as the driver contract shows it.

Owns the data connections of the model and the order of the executions that wait for one. Checks, forms of execution and bursts are
those of all drivers (``aionn.drivers.kit``).

Invariants:
1. A prepared model has as many data connections as the device has slots, or one for each of its bursts where these are more: frames
   of reservations are ordered at the node, and none waits here for the answer of another. They are opened when they are needed, and
   stay open.
2. Executions that wait for a data connection are ordered by priority, then deadline, then arrival. One whose deadline passes leaves
   immediately.
3. A prepared model belongs to one control connection; when that is lost every call raises DEAD_OBJECT, for good.
"""

from __future__ import annotations

import heapq
import itertools
from typing import cast
from weakref import WeakSet

from aionn.drivers.kit.arguments import Arguments, check_times
from aionn.drivers.kit.checked import CheckedDevice
from aionn.drivers.kit.launching import BoundRequests, DirectBurst, LaunchingPreparedModel
from aionn.errors import DeadObject, Error, InvalidArgument, ResourceExhausted, general_failure_of
from aionn.fleet.control import ControlConnection
from aionn.fleet.data_connection import BoundArguments, DataConnection, DataState, NodeLaunch
from aionn.hal import (
    TIME_MAX_NS,
    Launch,
    Model,
    PreparedModel,
    PreparedModelDefaults,
    Priority,
    Request,
)
from aionn.hal.callers import frame_of_launch
from aionn.platform.loops import begin
from aionn.service.wire.protocol import FreePreparedModel

__all__ = ["NodeBurst", "NodePreparedModel"]

WAITING_MAX = 1024
"""Executions that wait for a data connection; a runtime sends no more than the device has slots."""

FRAME_RANK = int(max(Priority)) + 1
"""Frames of reservations go before best effort of any priority."""

BOUND_MAX = 64
"""Requests whose checks are kept: more than the slots that a burst of the runtime has."""


class NodePreparedModel(LaunchingPreparedModel):
    """A prepared model at a node.

    Args:
        device: The device that prepared it.
        model: The model, validated.
        priority: Relative to other prepared models of the device.
        control: The connection that it belongs to.
        handle: Its number at the node.
        expected_duration_ns: Of an execution, as the node's driver declares it.
        connections_max: Number of slots of the device.
    """

    def __init__(
        self,
        device: CheckedDevice,
        model: Model,
        priority: Priority,
        control: ControlConnection,
        handle: int,
        expected_duration_ns: int | None,
        connections_max: int,
    ) -> None:
        super().__init__(device, model, priority)
        self.expected_duration_ns = expected_duration_ns
        self._control = control
        self._handle = handle
        self._connections_max = connections_max
        self._connections: set[DataConnection] = set()
        self._bursts: WeakSet[NodeBurst] = WeakSet()
        self._waiting: list[tuple[int, int, int, NodeLaunch]] = []
        self._arrivals = itertools.count()
        self._bound: BoundRequests[BoundArguments] = BoundRequests(BOUND_MAX)

    @property
    def is_gone(self) -> bool:
        """See ``PreparedModel``."""
        return not self._control.is_alive

    def launch(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        priority: Priority | None = None,
    ) -> Launch:
        """See ``PreparedModel``."""
        return self.launched(request, measure, deadline_ns, loop_timeout_ns, priority, in_burst=False)

    def launched(
        self,
        request: Request,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        priority: Priority | None,
        *,
        in_burst: bool,
    ) -> Launch:
        """As ``launch``. A request that was checked before is not checked again: requests do not change."""
        check_times(deadline_ns, loop_timeout_ns)
        self.check_usable()
        bound = self._bound.find(request)
        if bound is None:
            arguments = self.bind(request)
            bound = BoundArguments(self.model, arguments)
            self._bound.keep(request, arguments, bound)
        return self._enter(bound, measure, deadline_ns, loop_timeout_ns, priority, in_burst)

    def begin(
        self,
        arguments: Arguments,
        *,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        priority: Priority | None,
    ) -> Launch:
        """See the base class."""
        bound = BoundArguments(self.model, arguments)
        return self._enter(bound, measure, deadline_ns, loop_timeout_ns, priority, False)

    def _enter(
        self,
        bound: BoundArguments,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        priority: Priority | None,
        in_burst: bool,
    ) -> Launch:
        if not self._control.is_alive:
            raise DeadObject(f"node {self._control.address.text}: {self._control.why_lost}")
        frame = frame_of_launch.get()
        self.begin_run()
        launch = NodeLaunch(
            bound,
            measure=measure,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            priority=priority,
            in_burst=in_burst,
            frame=frame,
            left=self._left,
        )
        if deadline_ns is not None:
            launch.watch(self._control.now)
            if launch.is_done:
                return launch
        for connection in self._connections:
            if connection.state is DataState.IDLE:
                connection.submit(launch)
                return launch
        if len(self._waiting) >= WAITING_MAX:
            launch.end(
                ResourceExhausted(
                    f"{self.device.info.name}: more than {WAITING_MAX} executions wait", transient=True
                )
            )
        else:
            rank = int(self.priority if priority is None else priority) if frame is None else FRAME_RANK
            last = TIME_MAX_NS if deadline_ns is None else deadline_ns
            heapq.heappush(self._waiting, (-rank, last, next(self._arrivals), launch))
            self._open_connection()
        return launch

    @property
    def _limit(self) -> int:
        """Most data connections; see the module's invariant 1."""
        most = max(1, self._control.welcome.data_connections)
        return min(max(self._connections_max, len(self._bursts)), most)

    def _left(self, launch: NodeLaunch) -> None:
        """An execution has ended. One that waited stays in the queue, which ignores it when its turn comes."""
        self.end_run()

    def _open_connection(self) -> None:
        """Opens one more connection, unless there are enough, or one is being opened for each execution that waits."""
        opening = sum(connection.state is DataState.OPENING for connection in self._connections)
        if len(self._connections) < self._limit and opening < len(self._waiting):
            connection = DataConnection(
                self._control, self._handle, self._connection_idle, self._connection_gone
            )
            self._connections.add(connection)
            begin(self._open(connection), "aionn-fleet-data")

    async def _open(self, connection: DataConnection) -> None:
        try:
            await connection.open()
        except Exception as e:
            # Other connections continue; without one, the waiting executions have waited for this one.
            error = e if isinstance(e, Error) else general_failure_of(e, "data")
            self._connections.discard(connection)
            if not self._connections:
                self._fail_waiting(error)

    def _connection_idle(self, connection: DataConnection) -> None:
        while self._waiting and connection.state is DataState.IDLE:
            launch = heapq.heappop(self._waiting)[-1]
            if not launch.is_done:
                connection.submit(launch)

    def _connection_gone(self, connection: DataConnection, why: str) -> None:
        was_open = connection in self._connections
        self._connections.discard(connection)
        if was_open and not self._connections and not self._control.is_alive:
            self._fail_waiting(DeadObject(f"node {self._control.address.text}: {why}"))
        elif self._waiting and self._control.is_alive:
            self._open_connection()

    def _fail_waiting(self, error: Error) -> None:
        waiting, self._waiting = self._waiting, []
        for *_, launch in waiting:
            launch.end(error)

    async def configure_execution_burst(
        self, *, controller_polling_us: int = 0, server_polling_us: int = 0
    ) -> NodeBurst:
        """See ``PreparedModel``. Each burst has a data connection while it executes; one more is opened here, where there are not
        enough.

        Raises:
            DeadObject: The node is lost.
            Error: The node refuses, and there is no connection.
        """
        self.check_usable()
        burst = NodeBurst(self)
        self._bursts.add(burst)
        if len(self._connections) < self._limit and self._control.is_alive:
            connection = DataConnection(
                self._control, self._handle, self._connection_idle, self._connection_gone
            )
            self._connections.add(connection)
            try:
                await connection.open()
            except BaseException as e:
                self._connections.discard(connection)
                if not isinstance(e, Error) or not self._connections:
                    raise
        if not self._control.is_alive:
            raise DeadObject(f"node {self._control.address.text}: {self._control.why_lost}")
        return burst

    async def aclose(self) -> None:
        """See ``PreparedModel``. Executions that wait for a data connection fail."""
        await super().aclose()
        self._fail_waiting(InvalidArgument("execution: the prepared model is closed"))

    def release(self) -> None:
        """See the base class: frees the model at the node, and ends its data connections."""
        self._control.post(FreePreparedModel(self._handle))
        self._bound.clear()
        for connection in list(self._connections):
            begin(connection.aclose("the prepared model was closed"), "aionn-fleet-data-end")


class _InBurst(PreparedModelDefaults):
    """A prepared model as its burst launches on it."""

    def __init__(self, prepared: NodePreparedModel) -> None:
        self._prepared = prepared

    def launch(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        priority: Priority | None = None,
    ) -> Launch:
        """See ``PreparedModel``."""
        return self._prepared.launched(
            request, measure, deadline_ns, loop_timeout_ns, priority, in_burst=True
        )


class NodeBurst(DirectBurst):
    """A burst of a device of a node: its executions are those of a burst at the node.

    Args:
        prepared: The prepared model that it executes.
    """

    def __init__(self, prepared: NodePreparedModel) -> None:
        super().__init__(cast(PreparedModel, _InBurst(prepared)))
