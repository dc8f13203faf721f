"""The node's end of a data connection: values come into a pool of this machine, and a burst of the local device computes them
there.

Owns the states of the connection, the pool, and the deadline on this machine's clock.

Invariants:
1. One execution is in progress. Before its answer a client may send a notice that it does not want it; any other message ends
   the connection.
2. The inputs of an execution have exactly the length in its layout; nothing of another length is read.
3. A deadline is the time that the client has left, from the earliest time at which it can have sent that: never later than
   the client's.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Hashable, Sequence
from typing import Protocol

from aionn.errors import Error, ErrorStatus, GeneralFailure, InvalidArgument, general_failure_of, status_of
from aionn.fleet.carrying import beside_loop
from aionn.fleet.messages import (
    DATA_BYTES_MAX,
    DATA_LIMITS,
    Argument,
    LaidOut,
    Layout,
    Outcome,
    Submit,
    Welcome,
    Withdraw,
    decode_from_client,
    framed,
)
from aionn.fleet.node.quotas import ClientAccount
from aionn.fleet.node.reservations import NodeFrame
from aionn.fleet.wire import Wire
from aionn.hal import (
    NO_TIMING,
    Burst,
    DataLocation,
    ExecutionResult,
    Launch,
    Memory,
    Operand,
    OutputShape,
    PreparedModel,
    Request,
    RequestArgument,
    ask_to_stop,
    dimensions_are_known,
    is_extension_operand_type,
    operand_size_bytes,
)
from aionn.hal.callers import frame_of_launch
from aionn.hal.pooled_request import place_values
from aionn.platform.loops import finish
from aionn.service.wire.sizes import ARGUMENTS_MAX, TEXT_CHARACTERS_MAX

__all__ = ["DataOwner", "DataConnection", "ServedModel"]

IN_LOOP_BYTES_MAX = 1 << 20
"""Larger pools are allocated in a thread: the kernel clears a megabyte in a fraction of a millisecond."""


class ServedModel:
    """A prepared model of a client.

    Attributes:
        prepared: At the local device.
        outputs: The operands of its outputs.
        contents_bytes: The memory that counts until it is closed.
        data_connections: Its data connections.
    """

    def __init__(self, prepared: PreparedModel, outputs: Sequence[Operand], contents_bytes: int = 0) -> None:
        self.prepared = prepared
        self.contents_bytes = contents_bytes
        self.outputs = tuple(outputs)
        self.connections: set[DataConnection] = set()


class DataOwner(Hashable, Protocol):
    """The client that a data connection belongs to."""

    generation: int
    account: ClientAccount

    def now(self) -> int:
        """The node's clock, in nanoseconds."""
        ...

    def heard(self) -> None:
        """Bytes of the client came."""
        ...

    def frame(self, reservation: int) -> NodeFrame | None:
        """A frame of a reservation of the client; None where that has ended. Raises ``InvalidArgument``: it never had it."""
        ...


class DataState(enum.StrEnum):
    """The state of a data connection."""

    OPENING = "opening"
    READY = "ready"
    LAYING_OUT = "making room"
    RECEIVING = "receiving inputs"
    EXECUTING = "executing"
    LOST = "lost"


NEXT: dict[tuple[DataState, str], DataState] = {
    (DataState.OPENING, "opened"): DataState.READY,
    (DataState.READY, "layout"): DataState.LAYING_OUT,
    (DataState.LAYING_OUT, "laid out"): DataState.READY,
    (DataState.READY, "submit"): DataState.RECEIVING,
    (DataState.RECEIVING, "received"): DataState.EXECUTING,
    (DataState.EXECUTING, "answered"): DataState.READY,
}
"""The permitted events; ``LOST`` follows on every state."""


class DataConnection:
    """One connection for executions of one prepared model.

    Args:
        owner: The client.
        wire: The connection, on which the client has sent Hello.
        model: The model that is executed.
        greeting: When Hello was sent, on the client's clock, and when it came, on this one.
    """

    def __init__(self, owner: DataOwner, wire: Wire, model: ServedModel, greeting: tuple[int, int]) -> None:
        self.state = DataState.OPENING
        self._owner = owner
        self._wire = wire
        self._model = model
        self._greeting = greeting
        self._layout: Layout | None = None
        self._pool: Memory | None = None
        self._pool_bytes = 0
        self._identifier = -1
        self._request = Request((), (), ())
        self._inputs: list[memoryview] = []
        self._outputs: tuple[tuple[OutputShape, ...], list[memoryview]] | None = None
        self._input_bytes = 0
        self._submit: Submit | None = None
        self._received_ns = 0
        self._burst: Burst | None = None
        self._launch: Launch | None = None
        self._counts = False  # Whether an execution of this connection counts in the account of the client.
        self._frame: NodeFrame | None = None
        self._error: Error = GeneralFailure("node: nothing was launched")
        self._wake: asyncio.Future[None] | None = None
        self.on_heard = owner.heard  # See ``WireOwner``.
        wire.owner = self
        wire.reader.limits = DATA_LIMITS
        model.connections.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether the client waits for an answer, or sends inputs."""
        return self._wire.reader.is_within or self.state not in (DataState.READY, DataState.LOST)

    def _go(self, event: str) -> None:
        state = NEXT.get((self.state, event))
        if state is None:
            raise InvalidArgument(f"data connection: {event} does not follow on {self.state.value}")
        self.state = state

    async def run(self) -> None:
        """Serves the connection until it is over, then frees what it holds."""
        burst: Burst | None = None
        try:
            self._burst = burst = await self._model.prepared.configure_execution_burst()
            if self.state is DataState.LOST:
                return
            self._go("opened")
            sent_ns, received_ns = self._greeting
            now_ns = self._owner.now()
            self._wire.send(framed(Welcome(sent_ns, received_ns, now_ns, self._owner.generation)))
            while await self._woken():
                if self.state is DataState.LAYING_OUT:
                    await self._lay_out(burst)
                elif self.state is DataState.EXECUTING:
                    await self._execute()
        except Error as e:
            self._wire.close(str(e), with_reason=True)
        finally:
            self._model.connections.discard(self)
            self._uncount()
            if burst is not None:
                await finish(burst.aclose())
            self._free_pool()

    async def _woken(self) -> bool:
        """Waits until there is something to do; False when the connection is over."""
        if self.state is DataState.READY or self.state is DataState.RECEIVING:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return self.state is not DataState.LOST

    def _wake_up(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)

    # Layouts

    async def _lay_out(self, burst: Burst) -> None:
        layout = self._layout
        assert layout is not None, "it has come"
        reply = LaidOut()
        try:
            await self._make_pool(layout, burst)
        except Error as e:
            self._layout = None
            reply = LaidOut(status_of(e), str(e)[:TEXT_CHARACTERS_MAX])
        if self.state is DataState.LAYING_OUT:
            self._go("laid out")
            self._wire.send(framed(reply))

    async def _make_pool(self, layout: Layout, burst: Burst) -> None:
        arguments = (*layout.inputs, *layout.outputs)
        lengths = [argument.length or 0 for argument in arguments]
        if len(arguments) > 2 * ARGUMENTS_MAX or any(length < 0 for length in lengths):
            raise InvalidArgument(
                f"data connection: expected up to {2 * ARGUMENTS_MAX} arguments with their sizes"
            )
        if sum(lengths) > DATA_BYTES_MAX:
            raise InvalidArgument(
                f"data connection: expected at most {DATA_BYTES_MAX} bytes of values, got {sum(lengths)} bytes announced"
            )
        locations, size_bytes = place_values(lengths)
        old = self._identifier
        self._free_pool()
        if old >= 0:
            await burst.release_memory_resource(old)
        self._owner.account.take("memory_bytes", size_bytes)
        self._pool_bytes = size_bytes
        if size_bytes <= IN_LOOP_BYTES_MAX:
            pool = Memory.create(size_bytes, name="aionn-frames")
        else:
            pool = await beside_loop(self._owner, lambda: Memory.create(size_bytes, name="aionn-frames"))
        self._pool = pool
        self._identifier = old + 1
        placed = [
            _placed(argument, location) for argument, location in zip(arguments, locations, strict=True)
        ]
        count = len(layout.inputs)
        self._request = Request(tuple(placed[:count]), tuple(placed[count:]), (pool,))
        self._inputs = [
            pool.array.data[place.offset : place.offset + place.length]
            for place in locations[:count]
            if place.length
        ]
        self._input_bytes = sum(lengths[:count])

    def _free_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        self._inputs = []
        self._outputs = None
        self._request = Request((), (), ())
        self._owner.account.give_back("memory_bytes", self._pool_bytes)
        self._pool_bytes = 0

    # Executions

    async def _execute(self) -> None:
        submit, launch = self._submit, self._launch
        assert submit is not None, "it has come"
        result: ExecutionResult | Error
        try:
            result = self._error if launch is None else await launch
        except Error as e:
            result = e
        except Exception as e:
            result = general_failure_of(e, "node")
        finally:
            self._launch = None
            self._uncount()
        if self.state is DataState.LOST:
            return
        self._submit = None
        self._answer(submit, result)
        # The part that did not fit into the socket was copied, and nothing is read before it was sent: see ``Wire``.
        self._go("answered")

    def _begin(self) -> None:
        """Launches an execution whose inputs are there, in the turn of the event loop in which they came."""
        assert self._submit is not None, "it has come"
        try:
            self._launch = self._launched(self._submit)
        except Error as e:
            self._error = e
        except Exception as e:
            self._error = general_failure_of(e, "node")

    def _uncount(self) -> None:
        if self._counts:
            self._counts = False
            self._owner.account.give_back("executions")

    def _launched(self, submit: Submit) -> Launch:
        self._owner.account.take("executions")
        self._counts = True
        deadline_ns = None
        if submit.remaining_ns is not None:
            # A client's estimate of this clock may be too early, and never too late. So a time to come is a mistake of the client.
            deadline_ns = max(0, min(self._owner.now(), submit.sent_ns) + submit.remaining_ns)
        self._frame = None
        if submit.reservation:
            self._frame = self._owner.frame(submit.reservation)
        token = None if self._frame is None else frame_of_launch.set(self._frame)
        try:
            return self._launched_by(submit, deadline_ns)
        finally:
            if token is not None:
                frame_of_launch.reset(token)

    def _launched_by(self, submit: Submit, deadline_ns: int | None) -> Launch:
        if submit.in_burst:
            assert self._burst is not None, "opened before the greeting was answered"
            return self._burst.launch(
                self._request,
                (self._identifier,),
                measure=submit.measure,
                deadline_ns=deadline_ns,
                loop_timeout_ns=submit.loop_timeout_ns,
            )
        prepared = self._model.prepared
        return prepared.launch(
            self._request,
            measure=submit.measure,
            deadline_ns=deadline_ns,
            loop_timeout_ns=submit.loop_timeout_ns,
            priority=submit.priority if prepared.takes_priority else None,
        )

    def _answer(self, submit: Submit, result: ExecutionResult | Error) -> None:
        body: list[memoryview] = []
        status, message = ErrorStatus.NONE, ""
        shapes: tuple[OutputShape, ...] = ()
        timing = NO_TIMING
        if isinstance(result, Error):
            status, message = status_of(result), str(result)[:TEXT_CHARACTERS_MAX]
        else:
            shapes, timing = result.output_shapes, result.timing
            if result.output_sufficient_size:
                body = self._outputs_of(shapes)
            else:
                status = ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
        outcome = Outcome(
            submit.number,
            submit.generation,
            submit.stamp_ns,
            self._received_ns,
            self._owner.now(),
            status,
            message,
            shapes,
            timing,
            tuple(part.nbytes for part in body),
            None if self._frame is None else self._frame.report,
        )
        self._wire.send(framed(outcome, sum(outcome.lengths)), body)

    def _outputs_of(self, shapes: tuple[OutputShape, ...]) -> list[memoryview]:
        """The bytes of the outputs: of each as many as its shape has, where the node knows that."""
        # A burst answers with the same shapes again.
        if self._outputs is None or self._outputs[0] is not shapes:
            self._outputs = shapes, self._located(shapes)
        return self._outputs[1]

    def _located(self, shapes: Sequence[OutputShape]) -> list[memoryview]:
        assert self._pool is not None, "executed on it"
        data = self._pool.array.data
        parts = []
        for index, argument in enumerate(self._request.outputs):
            length = argument.location.length
            if index < len(shapes) and index < len(self._model.outputs):
                operand, shape = self._model.outputs[index], shapes[index].dimensions
                if not is_extension_operand_type(operand.type) and dimensions_are_known(operand.type, shape):
                    length = min(length, operand_size_bytes(operand.type, shape) or length)
            parts.append(data[argument.location.offset : argument.location.offset + length])
        return parts

    # Messages of the client

    def on_head(self, head: bytes, body_bytes: int) -> Sequence[memoryview]:
        """See ``WireOwner``."""
        message = decode_from_client(head)
        if isinstance(message, Submit):
            return self._submitted(message, body_bytes)
        if body_bytes:
            raise InvalidArgument(f"data connection: expected {type(message).__name__} without a body")
        if isinstance(message, Layout):
            self._go("layout")
            self._layout = message
        elif isinstance(message, Withdraw):
            if (
                self._launch is not None
                and self._submit is not None
                and message.number == self._submit.number
            ):
                ask_to_stop(self._launch)
        else:
            raise InvalidArgument(
                f"data connection: {type(message).__name__} does not belong to a data connection"
            )
        return ()

    def _submitted(self, message: Submit, body_bytes: int) -> Sequence[memoryview]:
        if self._layout is None:
            raise InvalidArgument("data connection: an execution before its layout")
        if message.generation != self._owner.generation:
            raise InvalidArgument("data connection: an execution of another connection: it was replayed")
        self._go("submit")
        if body_bytes != self._input_bytes:
            raise InvalidArgument(
                f"data connection: expected inputs of {self._input_bytes} bytes, as in the layout, got {body_bytes} announced"
            )
        self._submit = message
        return self._inputs

    def on_body(self) -> None:
        """See ``WireOwner``."""
        if self.state is DataState.RECEIVING:
            self._received_ns = self._owner.now()
            self._go("received")
            self._begin()
        if self.state in (DataState.LAYING_OUT, DataState.EXECUTING):
            self._wake_up()

    def on_lost(self, why: str) -> None:
        """See ``WireOwner``. Its execution is cancelled."""
        self.state = DataState.LOST
        if self._launch is not None:
            ask_to_stop(self._launch)
        self._wake_up()

    def close(self, why: str) -> None:
        """Ends the connection."""
        self._wire.close(why, with_reason=True)


def _placed(argument: Argument, location: DataLocation) -> RequestArgument:
    if argument.length is None:
        return RequestArgument(True)
    return RequestArgument(False, location, argument.dimensions)
