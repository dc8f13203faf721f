"""A client's connection for the executions of one prepared model, one at a time.

Owns the states of the connection and the way of values: inputs are sent from the memory of the request, outputs are read into it.

Invariants:
1. An execution that was sent is never sent again, on no path: the work may have run.
2. A launch is done when this process touches the memory of its request no more: its result is there, or the node is lost, or its
   deadline has passed and what still comes for it is discarded.
3. At the deadline the caller is notified by a timer of this process, whatever the network does. A result that comes later is
   discarded, also where the timer has not fired yet.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import socket
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt

from aionn.drivers.kit.arguments import Arguments
from aionn.errors import (
    DeadObject,
    DeviceUnavailable,
    Error,
    ErrorStatus,
    ExecutionCancelled,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    ResourceExhausted,
    error_for_status,
    general_failure_of,
)
from aionn.fleet.connecting import GREET_S_MAX
from aionn.fleet.control import ControlConnection
from aionn.fleet.messages import (
    CLIENT_LIMITS,
    Argument,
    Hello,
    LaidOut,
    Layout,
    Outcome,
    Refused,
    Submit,
    Welcome,
    Withdraw,
    decode_from_node,
    framed,
)
from aionn.fleet.reported import report_here
from aionn.fleet.wire import Wire
from aionn.hal import (
    NO_TIMING,
    ExecutionResult,
    LaunchBase,
    Model,
    Operand,
    OperandType,
    Priority,
    is_extension_operand_type,
)
from aionn.hal.callers import ReservedFrame

__all__ = ["BoundArguments", "DataConnection", "DataState", "NodeLaunch"]

MEASURED_BYTES_MIN = 64 << 10
"""Smaller transfers measure the delay more than the rate."""


class DataState(enum.StrEnum):
    """The state of a data connection."""

    OPENING = "opening"
    IDLE = "idle"
    LAYING_OUT = "laying out"
    IN_FLIGHT = "in flight"
    LOST = "lost"


NEXT: dict[tuple[DataState, str], DataState] = {
    (DataState.OPENING, "welcome"): DataState.IDLE,
    (DataState.IDLE, "layout"): DataState.LAYING_OUT,
    (DataState.LAYING_OUT, "laid out"): DataState.IDLE,
    (DataState.IDLE, "submit"): DataState.IN_FLIGHT,
    (DataState.IN_FLIGHT, "outcome"): DataState.IDLE,
}
"""The permitted events; ``LOST`` follows on every state."""


class BoundArguments:
    """The arguments of an execution as a data connection sends them. May be used for many executions, one at a time, where they are
    plain.

    Args:
        model: The model.
        arguments: Bound to it.

    Attributes:
        arguments: See above.
        layout: Their sizes and shapes.
        size_bytes: Of all inputs together.
    """

    __slots__ = ("_body", "arguments", "layout", "size_bytes")

    def __init__(self, model: Model, arguments: Arguments) -> None:
        self.arguments = arguments
        arrays = arguments.inputs()
        self.layout = Layout(
            tuple(map(_argument, model.main.inputs, arrays)),
            tuple(Argument(area.buffer.nbytes, area.dimensions) for area in arguments.outputs),
        )
        self._body = _views(arrays) if arguments.is_plain else None
        self.size_bytes = sum(argument.length or 0 for argument in self.layout.inputs)

    def body(self) -> Sequence[memoryview]:
        """The bytes of the inputs as they are now. Raises as ``Arguments.inputs``."""
        return _views(self.arguments.inputs()) if self._body is None else self._body


def _argument(operand: Operand, array: npt.NDArray[Any] | None) -> Argument:
    if array is None:
        return Argument(None)
    # Only the extension or the vendor knows the shape of its values: the model states it.
    is_opaque = is_extension_operand_type(operand.type) or operand.type == OperandType.OEM
    return Argument(array.nbytes, () if is_opaque else array.shape)


def _views(arrays: Sequence[npt.NDArray[Any] | None]) -> list[memoryview]:
    return [a.reshape(-1).view(np.uint8).data for a in arrays if a is not None and a.nbytes]


class NodeLaunch(LaunchBase):
    """An execution at a node.

    Attributes:
        bound: Its arguments, which are settled when it ends.
        measure: Whether timings are wanted.
        deadline_ns: Absolute, on this machine's clock; None means no deadline.
        loop_timeout_ns: For every WHILE; None means the default.
        priority: Of this execution; None means the prepared model's.
        in_burst: See ``Submit``.
        frame: The frame of a reservation that it is; None for best effort.
        was_sent: Whether it may have begun.
        data connection: Where it is in flight.
    """

    def __init__(
        self,
        bound: BoundArguments,
        *,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        priority: Priority | None,
        in_burst: bool,
        frame: ReservedFrame | None = None,
        left: Callable[[NodeLaunch], None],
    ) -> None:
        self.bound = bound
        self.measure = measure
        self.deadline_ns = deadline_ns
        self.loop_timeout_ns = loop_timeout_ns
        self.priority = priority
        self.in_burst = in_burst
        self.frame = frame
        self.was_sent = False
        self.connection: DataConnection | None = None
        self._left = left
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, now: Callable[[], int]) -> None:
        """Sets the timer of its deadline."""
        if self.deadline_ns is not None and not self.is_done:
            left_ns = self.deadline_ns - now()
            if left_ns <= 0:
                self.missed()
            else:
                self._timer = asyncio.get_running_loop().call_later(left_ns / 1e9, self.watch, now)

    def missed(self) -> None:
        """Its deadline has passed."""
        words = "before the start" if not self.was_sent else "before the result was here"
        self.end(MissedDeadline(f"execution: the deadline passed {words}", transient=self.was_sent))

    def end(self, outcome: ExecutionResult | Error) -> None:
        """Ends it; ignored if it has ended. Its later messages are discarded."""
        if self.is_done:
            return
        if self._timer is not None:
            self._timer.cancel()
        try:
            if isinstance(outcome, ExecutionResult):
                self.bound.arguments.settle(
                    outcome.output_shapes, is_sufficient=outcome.output_sufficient_size
                )
            else:
                self.bound.arguments.fail()
        except Error as e:
            self.bound.arguments.fail()
            outcome = e
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abandoned(self)
        left, self._left = self._left, _nobody
        left(self)
        self.finish(outcome.with_traceback(None) if isinstance(outcome, Error) else outcome)

    def _ask_to_stop(self) -> None:
        if self.connection is None:
            self.end(ExecutionCancelled("execution: it was cancelled before it was sent"))
        else:
            self.connection.withdraw(self)


def _nobody(launch: NodeLaunch) -> None:
    """It has left already."""


class DataConnection:
    """One connection for executions.

    Args:
        control: The control connection.
        prepared: The handle of the prepared model at the node.
        on_idle: Called when it can take an execution.
        on_gone: Called with the reason when it is over, unless ``open`` reports that.

    Attributes:
        state: See ``DataState``.
    """

    def __init__(
        self,
        control: ControlConnection,
        prepared: int,
        on_idle: Callable[[DataConnection], None],
        on_gone: Callable[[DataConnection, str], None],
    ) -> None:
        self.state = DataState.OPENING
        self._control = control
        self._prepared = prepared
        self.on_heard = control.heard  # See ``WireOwner``.
        self._on_idle = on_idle
        self._on_gone = on_gone
        self._wire: Wire | None = None
        self._numbers = itertools.count(1)
        self._layout: Layout | None = None
        self._launch: NodeLaunch | None = None
        self._number = 0
        self._outcome: Outcome | None = None
        self._layout_error: Error | None = None
        self._welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._forget = control.when_lost(self._node_lost)

    def _go(self, event: str) -> None:
        state = NEXT.get((self.state, event))
        if state is None:
            raise InvalidArgument(f"connection: {event} does not follow on {self.state.value}")
        self.state = state

    async def open(self) -> None:
        """Connects and greets. To be called once.

        Raises:
            DeadObject: The node is lost.
            ResourceExhausted: The client, or those of its name, have as many connections as they may.
            DeviceUnavailable: The node refuses the connection for another reason.
        """
        control = self._control

        def make(sock: socket.socket | None) -> Wire:
            self._wire = wire = Wire(CLIENT_LIMITS, sock=sock)
            wire.owner = self
            return wire

        try:
            await self._connect(make)
            assert self._wire is not None, "a connection was made"
            hello = Hello("data", control.now(), control.welcome.secret, self._prepared)
            self._wire.send(framed(hello))
            with anyio.fail_after(GREET_S_MAX):
                await self._welcomed
        except TimeoutError:
            self._end("it was not greeted in time")
            raise DeadObject(
                f"node {control.address.text}: a data connection was not greeted in time"
            ) from None
        except BaseException:
            self._end("its greeting was not waited for")
            raise
        self._on_idle(self)

    async def _connect(self, make: Callable[[socket.socket | None], Wire]) -> None:
        try:
            await self._control.connector.connect(make)
        except DeviceUnavailable as e:
            raise DeadObject(
                str(e)
            ) from e  # The prepared model is at a node that cannot be reached any more.

    def submit(self, launch: NodeLaunch) -> None:
        """Sends an execution, after its layout where that is another one. Only where the connection is idle."""
        assert self.state is DataState.IDLE, "the owner sends to idle data connections alone"
        self._launch = launch
        launch.connection = self
        self._control.work_begins()
        if launch.bound.layout != self._layout:
            self._go("layout")
            self._layout = launch.bound.layout
            self._send(framed(launch.bound.layout))
        else:
            self._submit(launch)

    def _submit(self, launch: NodeLaunch) -> None:
        self._go("submit")
        control = self._control
        self._number = number = next(self._numbers)
        try:
            body = launch.bound.body()
        except Exception as e:  # Nothing was sent, and the next execution may succeed.
            self.state = DataState.IDLE
            self._over(e if isinstance(e, Error) else general_failure_of(e, "execution"))
            return
        now_ns = control.now()
        sent_ns, remaining_ns = 0, None
        if launch.deadline_ns is not None:
            sent_ns = control.clock.earliest_ns(now_ns, now_ns)
            remaining_ns = control.clock.duration_ns(max(0, launch.deadline_ns - now_ns))
        head = Submit(
            number,
            control.welcome.generation,
            now_ns,
            sent_ns,
            remaining_ns,
            launch.measure,
            launch.loop_timeout_ns,
            launch.priority,
            launch.in_burst,
            0 if launch.frame is None else launch.frame.reservation,
        )
        if launch.frame is not None:
            launch.frame.sent(now_ns)
        launch.was_sent = True
        assert self._wire is not None, "an idle connection is connected"
        self._wire.send(framed(head, launch.bound.size_bytes), body)

    def _send(self, head: bytes) -> None:
        assert self._wire is not None, "the connection is connected"
        self._wire.send(head)

    def withdraw(self, launch: NodeLaunch) -> None:
        """The result is not wanted any more; the node answers all the same."""
        if launch is self._launch and self.state is DataState.IN_FLIGHT:
            self._send(framed(Withdraw(self._number)))

    def abandoned(self, launch: NodeLaunch) -> None:
        """The launch has ended: its memory is not touched any more, and the node may stop."""
        if launch is not self._launch:
            return
        self._launch = None
        if self.state is DataState.IN_FLIGHT:
            assert self._wire is not None, "the connection is connected"
            self._wire.reader.discard()
            if self._outcome is None:
                self._send(framed(Withdraw(self._number)))

    # Messages of the node

    def on_head(self, head: bytes, body_bytes: int) -> Sequence[memoryview]:
        """See ``WireOwner``."""
        message = decode_from_node(head)
        if isinstance(message, Outcome):
            return self._outcome_begins(message, body_bytes)
        if body_bytes:
            raise InvalidArgument(f"connection: expected {type(message).__name__} without a body")
        match message:
            case LaidOut():
                self._go("laid out")
                if message.status != ErrorStatus.NONE:
                    self._layout = None
                    self._layout_error = error_for_status(message.status, message.message)
            case Welcome():
                self._go("welcome")
                self._welcomed.set_result(None)
            case Refused():
                if not self._welcomed.done():
                    words = f"node {self._control.address.text}: it refuses: {message.why}"
                    error = (
                        ResourceExhausted(words, transient=True)
                        if message.is_full
                        else DeviceUnavailable(words)
                    )
                    self._welcomed.set_exception(error)
                    self._welcomed.exception()  # It may not be waited for any more.
                self._end(f"it refuses: {message.why}")
            case _:
                raise InvalidArgument(
                    f"connection: {type(message).__name__} does not belong to a data connection"
                )
        return ()

    def _outcome_begins(self, message: Outcome, body_bytes: int) -> Sequence[memoryview]:
        expected = self._number, self._control.welcome.generation
        if self.state is not DataState.IN_FLIGHT or (message.number, message.generation) != expected:
            raise InvalidArgument(
                f"connection: a result of execution {message.number}, which is not in flight: it was replayed, or belongs to "
                "another connection"
            )
        lengths = message.lengths
        if sum(lengths) != body_bytes or (lengths and min(lengths) < 0):
            raise InvalidArgument("connection: the lengths of the outputs are not those of the body")
        self._outcome = message
        launch = self._launch
        if launch is None or not body_bytes:
            return [memoryview(bytearray(body_bytes))]
        areas = launch.bound.arguments.outputs
        places = [area.buffer.data[:length] for area, length in zip(areas, lengths, strict=False)]
        # A view has no more bytes than its area.
        if len(lengths) != len(areas) or sum([place.nbytes for place in places]) != body_bytes:
            raise InvalidArgument("connection: outputs that are larger than the request's")
        return places

    def on_body(self) -> None:
        """See ``WireOwner``."""
        outcome = self._outcome
        if outcome is not None:
            self._outcome = None
            self._go("outcome")
            self._received(outcome)
        elif self.state is DataState.IDLE and self._layout_error is not None:
            error, self._layout_error = self._layout_error, None
            self._over(error)
        elif self.state is DataState.IDLE and self._launch is not None:
            self._submit(self._launch)
        elif self.state is DataState.IDLE and self._layout is not None:
            self._over(None)  # It was abandoned while the node made room.

    def _received(self, outcome: Outcome) -> None:
        control, launch = self._control, self._launch
        now_ns = control.now()
        control.clock.exchange(outcome.stamp_ns, outcome.received_ns, outcome.replied_ns, now_ns)
        if launch is None:
            self._over(None)
            return
        if launch.frame is not None and outcome.report is not None:
            ahead_ns = control.clock.bounds_ns(now_ns)
            report = report_here(outcome.report, ahead_ns=ahead_ns, sent_ns=outcome.stamp_ns, read_ns=now_ns)
            launch.frame.reported(report, now_ns)
        control.way.measured(outcome.received_ns - control.clock.earliest_ns(outcome.stamp_ns, now_ns))
        size_bytes = launch.bound.size_bytes + sum(outcome.lengths)
        if size_bytes >= MEASURED_BYTES_MIN:
            travel_ns = (now_ns - outcome.stamp_ns) - (outcome.replied_ns - outcome.received_ns)
            control.round_trip.transferred(size_bytes, travel_ns)
        self._over(_result(outcome, launch, now_ns))

    def _over(self, outcome: ExecutionResult | Error | None) -> None:
        """The connection is idle again."""
        launch, self._launch = self._launch, None
        self._control.work_ends()
        if launch is not None and outcome is not None:
            launch.connection = None
            launch.end(outcome)
        if self.state is DataState.IDLE:
            self._on_idle(self)

    # The end

    def _node_lost(self, why: str) -> None:
        self._end(why)

    def on_lost(self, why: str) -> None:
        """See ``WireOwner``."""
        self._end(why)

    def _end(self, why: str) -> None:
        if self.state is DataState.LOST:
            return
        was_busy = self.state in (DataState.LAYING_OUT, DataState.IN_FLIGHT)
        was_open = self.state is not DataState.OPENING
        self.state = DataState.LOST
        self._forget()
        words = f"node {self._control.address.text}: {why}"
        if not self._welcomed.done():
            self._welcomed.set_exception(DeadObject(words))
            self._welcomed.exception()  # It may not be waited for any more.
        wire = self._wire
        if wire is not None:
            wire.reader.discard()
            wire.abort(why)
        if was_busy:
            self._over(DeadObject(words))
        if was_open:
            self._on_gone(self, why)

    async def aclose(self, why: str) -> None:
        """Ends the connection; an execution in flight ends with DEAD_OBJECT. Idempotent."""
        self._end(why)
        if self._wire is not None:
            await self._wire.ended()


def _result(outcome: Outcome, launch: NodeLaunch, now_ns: int) -> ExecutionResult | Error:
    """The result or the error of an outcome that has come now."""
    if launch.deadline_ns is not None and now_ns >= launch.deadline_ns:
        return MissedDeadline("execution: the deadline passed before the result was here")
    if outcome.status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE):
        return error_for_status(outcome.status, outcome.message)
    areas = launch.bound.arguments.outputs
    if len(outcome.shapes) != len(areas):
        return GeneralFailure(
            f"execution: expected {len(areas)} outputs, the node answered {len(outcome.shapes)}"
        )
    is_sufficient = outcome.status == ErrorStatus.NONE
    if is_sufficient and len(outcome.lengths) != len(areas):
        return GeneralFailure("execution: the node answered without the values of all outputs")
    return ExecutionResult(is_sufficient, outcome.shapes, outcome.timing if launch.measure else NO_TIMING)
