"""A client's control connection to one node, and everything whose end depends on it.

Owns the calls and their answers, the time of the node, the watch for its silence, and the news of its end for the data connections.
Decisions are in ``clocks`` and ``liveness``.

Invariants:
1. When the node is lost, every call and every execution that waits for it ends with DEAD_OBJECT in the same turn of the loop.
2. While work is out, the node is looked for every ``HEARTBEAT_NS``; without work there is a probe from time to time alone.
3. The messages of one connection are never mixed: while a large call is sent, small ones wait behind it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import anyio

from aionn.errors import (
    DeadObject,
    DeviceUnavailable,
    Error,
    GeneralFailure,
    InvalidArgument,
    error_for_status,
    with_driver_traceback,
)
from aionn.fleet.addresses import NodeAddress
from aionn.fleet.carrying import carry, decoded, destinations, memories_for
from aionn.fleet.clocks import ClockOffset, RoundTrip
from aionn.fleet.connecting import GREET_S_MAX, Connector
from aionn.fleet.framing import FrameLimits
from aionn.fleet.liveness import HEARTBEAT_NS, ControlState, Liveness, next_state
from aionn.fleet.messages import (
    CLIENT_LIMITS,
    Carried,
    Figures,
    GetFigures,
    Heartbeat,
    Hello,
    Probe,
    ProbeReply,
    Refused,
    Welcome,
    check_parts,
    decode_from_node,
    framed,
)
from aionn.fleet.wire import Wire
from aionn.hal import Memory
from aionn.platform.loops import begin
from aionn.service.wire.protocol import (
    Call,
    CallBody,
    CancelCall,
    Failed,
    FreePreparedModel,
    PrepareModelReply,
    Reply,
    ReplyBody,
)
from aionn.service.wire.scheduling_messages import Release, ReserveReply, Room, Withdrawn

__all__ = ["ControlConnection"]

PROBES_AT_START = 8
"""Exchanges right after the greeting, one after the other: the least of eight round trips is close to what the path can do."""

PROBE_NS = 5_000_000_000
"""Interval of probes without work: bounds of the clock widen by a millisecond in that time, and a lost node is noticed."""

CHUNK_BYTES = 1 << 20
"""A large call is sent in pieces, between which the event loop does other things."""

REPLY_LIMITS = FrameLimits(CLIENT_LIMITS.head_bytes, 2 << 20)
"""The answer for each operation of a large model may be in a memory of its own; see ``aionn.service.wire.sizes``."""

CALLS_MAX = 1024
"""Calls that wait for an answer: an application prepares models one after the other."""

_R = TypeVar("_R", bound=ReplyBody)


class ControlConnection:
    """The control connection.

    Args:
        address: Of the node.
        connector: Makes the connection.
        now: The clock of deadlines, in nanoseconds.

    Attributes:
        address: See above.
        connector: See above; data connections use it as well.
        welcome: The node's answer to the greeting; assigned by ``open``.
        clock: The node's.
        round_trip: Of small messages.
        way: Of executions with their inputs, from here to the node.
        on_notice: Called with each notice about reservations, and with None when the node is lost; None if nothing is reserved.
        state: Of the connection.
        why_lost: The reason, once it is.
    """

    welcome: Welcome

    def __init__(self, address: NodeAddress, connector: Connector, now: Callable[[], int]) -> None:
        self.address = address
        self.connector = connector
        self.now = now
        self.clock = ClockOffset()
        self.round_trip = RoundTrip()
        self.way = RoundTrip()
        self.on_notice: Callable[[Withdrawn | Room | None], None] | None = None
        self.state = ControlState.CONNECTING
        self.why_lost = ""
        self._liveness = Liveness(max(1, address.silence_ms * 1_000_000 // HEARTBEAT_NS))
        self._wire = Wire(REPLY_LIMITS)
        self._wire.owner = self
        self._greeted: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._calls: dict[int, asyncio.Future[ReplyBody]] = {}
        self._withdrawn: set[int] = set()
        self._numbers = itertools.count(1)
        self._on_lost: dict[Callable[[str], None], None] = {}
        self._figures: list[asyncio.Future[Figures]] = []
        self._has_heard = False
        self._work = 0
        self._look_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._probes_left = PROBES_AT_START
        self._is_probing = False
        self._is_sending = anyio.Lock()
        self._waiting_heads: list[bytes] = []
        self._carried: tuple[bytes, list[Memory]] = b"", []

    async def open(self) -> None:
        """Connects and greets. To be called once.

        Raises:
            DeviceUnavailable: The node cannot be reached, refuses, or does not answer.
        """
        wire = self._wire
        try:
            await self.connector.connect(lambda sock: wire)
            wire.send(framed(Hello("control", self.now())))
            with anyio.fail_after(GREET_S_MAX):
                self.welcome = await self._greeted
        except TimeoutError:
            wire.abort("it did not greet in time")
            raise DeviceUnavailable(
                f"node {self.address.text}: it did not greet within {GREET_S_MAX:g} s"
            ) from None
        except BaseException:
            wire.abort("its greeting was not waited for")
            raise

    @property
    def channel(self) -> Self:
        """Carries calls about reservations; see ``aionn.service.client.reservations``."""
        return self

    @property
    def way_ns(self) -> int:
        """The longest time from here to the node that a frame is expected to take, by the clock of the node as it is known."""
        upper_ns = max(self.round_trip.upper_ns, self.way.upper_ns)
        return upper_ns + (self.clock.uncertainty_ns(self.now()) if self.clock.is_known else 0)

    @property
    def is_alive(self) -> bool:
        """Whether calls can be made."""
        return self.state is ControlState.CONNECTED

    # Calls

    async def call(self, body: CallBody, expected: type[_R]) -> _R:
        """Makes a call and waits for the answer. Cancelled, the call is withdrawn, and what it would have made is freed.

        Raises:
            DeadObject: The node is lost.
            Error: The failure of the call.
        """
        if len(self._calls) >= CALLS_MAX:
            raise InvalidArgument(f"node {self.address.text}: more than {CALLS_MAX} calls wait for an answer")
        self._check_alive()
        number = next(self._numbers)
        reply: asyncio.Future[ReplyBody] = asyncio.get_running_loop().create_future()
        self._calls[number] = reply
        self.work_begins()
        try:
            await self._send_call(Call(number, body))
            answer = await reply
        except BaseException:
            if self._calls.pop(number, None) is not None and self.is_alive:
                self._withdrawn.add(number)
                self.post(CancelCall(number))
            elif reply.done() and not reply.cancelled() and reply.exception() is None:
                self._give_back(reply.result())  # It came in the same turn of the loop.
            raise
        finally:
            self.work_ends()
        if isinstance(answer, Failed):
            raise with_driver_traceback(error_for_status(answer.status, answer.message), answer.traceback)
        if not isinstance(answer, expected):
            raise GeneralFailure(
                f"node {self.address.text}: expected {expected.__name__}, got {type(answer).__name__}"
            )
        return answer

    def post(self, body: CallBody) -> None:
        """Makes a call without waiting for its answer. Without effect where the node is lost."""
        if self.is_alive:
            begin(self._post(body), "aionn-fleet-post")

    async def _post(self, body: CallBody) -> None:
        try:
            await self._send_call(Call(next(self._numbers), body))
        except Error:
            pass  # The node is gone, and what it held with it.

    async def figures(self) -> Figures:
        """The load of the node. Raises ``DeadObject``: it is lost."""
        self._check_alive()
        future: asyncio.Future[Figures] = asyncio.get_running_loop().create_future()
        self._figures.append(future)
        self.work_begins()
        try:
            self._send(framed(GetFigures()))
            return await future
        finally:
            self.work_ends()

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise DeadObject(f"node {self.address.text}: {self.why_lost or 'not connected'}", transient=True)

    async def _send_call(self, call: Call) -> None:
        head, contents, keep = await carry(call, self)
        if not contents:
            self._send(head)
            return
        async with self._is_sending:
            self._wire.send(head)
            for part in contents:
                for start in range(0, part.nbytes, CHUNK_BYTES):
                    self._check_alive()
                    self._wire.send(b"", [part[start : start + CHUNK_BYTES]])
                    await self._wire.drain()
            del keep
        waiting, self._waiting_heads = self._waiting_heads, []
        for waiting_head in waiting:
            self._send(waiting_head)

    def _send(self, head: bytes) -> None:
        if self._is_sending.locked():
            self._waiting_heads.append(head)
        else:
            self._wire.send(head)

    # Work and silence

    def work_begins(self) -> None:
        """The node owes an answer."""
        self._work += 1
        if self._look_timer is None and self.is_alive:
            self._look_timer = asyncio.get_running_loop().call_later(HEARTBEAT_NS / 1e9, self._look)

    def work_ends(self) -> None:
        """It has answered, or the answer is not waited for."""
        self._work -= 1

    def _look(self) -> None:
        self._look_timer = None
        if not self.is_alive:
            return
        is_silent = self._liveness.look(is_work_out=self._work > 0, round_trip_ns=self.round_trip.upper_ns)
        if is_silent:
            self._lose(f"it was silent for {self.address.silence_ms} ms while work was out")
        elif self._work > 0:
            self._look_timer = asyncio.get_running_loop().call_later(HEARTBEAT_NS / 1e9, self._look)

    def heard(self) -> None:
        """Bytes came, on this connection or on a data connection."""
        self._liveness.heard()

    def on_heard(self) -> None:
        """See ``WireOwner``."""
        self._has_heard = True
        self._liveness.heard()

    def _probe(self) -> None:
        self._probe_timer = None
        if self.is_alive and not self._is_probing:
            self._is_probing = True
            self.work_begins()
            self._send(framed(Probe(self.now())))

    def _probed(self, reply: ProbeReply) -> None:
        now_ns = self.now()
        self._exchanged(reply.sent_ns, reply.received_ns, reply.replied_ns, now_ns)
        if not self._is_probing:
            return
        self._is_probing = False
        self.work_ends()
        if self._probes_left > 0:
            self._probes_left -= 1
            self._probe()
        else:
            self._probe_timer = asyncio.get_running_loop().call_later(PROBE_NS / 1e9, self._probe)

    def _exchanged(self, sent_ns: int, received_ns: int, replied_ns: int, returned_ns: int) -> None:
        self.clock.exchange(sent_ns, received_ns, replied_ns, returned_ns)
        self.round_trip.measured(max(1, (returned_ns - sent_ns) - (replied_ns - received_ns)))

    # The end

    def when_lost(self, notify: Callable[[str], None]) -> Callable[[], None]:
        """Has ``notify`` called with the reason when the node is lost; returns the function that undoes this."""
        self._on_lost[notify] = None

        def forget() -> None:
            self._on_lost.pop(notify, None)

        return forget

    def _lose(self, why: str, event: str = "lost") -> None:
        state = next_state(self.state, event)
        if state is self.state:
            return
        self.state, self.why_lost = state, why
        for timer in (self._look_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        self._look_timer = self._probe_timer = None
        on_notice, self.on_notice = self.on_notice, None
        if on_notice is not None:
            on_notice(None)  # First: frames that end with the node are those of reservations that have ended.
        words = f"node {self.address.text}: {why}"
        if not self._greeted.done():
            self._greeted.set_exception(DeviceUnavailable(words))
            self._greeted.exception()  # It may not be waited for.
        for call in self._calls.values():
            if not call.done():
                call.set_exception(DeadObject(words, transient=True))
        self._calls.clear()
        for figures in self._figures:
            if not figures.done():
                figures.set_exception(DeadObject(words, transient=True))
        self._figures.clear()
        self._close_carried()
        on_lost, self._on_lost = list(self._on_lost), {}
        for notify in on_lost:
            notify(why)
        # The node does not read any more.
        self._wire.abort(why)

    async def aclose(self) -> None:
        """Ends the connection; calls that wait raise DEAD_OBJECT. Idempotent."""
        self._lose("it was closed", "close")
        self._wire.abort("it was closed")
        await self._wire.ended()

    def on_lost(self, why: str) -> None:
        """See ``WireOwner``."""
        if not self._has_heard:
            hint = (
                "if it serves with TLS, write tls:// before the address"
                if not self.address.is_tls
                else "its file of --tls-clients may not have this client's certificate"
                if self.address.certificate
                else "if it demands a certificate of its clients, add certificate=FILE to the address"
            )
            why = f"{why} without a word; {hint}"
        self._lose(why)

    # Messages of the node

    def on_head(self, head: bytes, body_bytes: int) -> Sequence[memoryview]:
        """See ``WireOwner``."""
        message = decode_from_node(head)
        if isinstance(message, Carried):
            check_parts(message.parts, body_bytes)
            self._carried = message.payload, memories_for(message.parts)
            return destinations(self._carried[1])
        if body_bytes:
            raise InvalidArgument(f"connection: expected {type(message).__name__} without a body")
        match message:
            case Heartbeat():
                pass
            case ProbeReply():
                self._probed(message)
            case Figures():
                if self._figures and not (future := self._figures.pop(0)).done():
                    future.set_result(message)
            case Welcome():
                self._welcomed(message)
            case Withdrawn() | Room():
                if self.on_notice is not None:
                    self.on_notice(message)
            case Refused():
                self._lose(f"it refuses: {message.why}")
            case _:
                raise InvalidArgument(
                    f"connection: {type(message).__name__} does not belong to the control connection"
                )
        return ()

    def on_body(self) -> None:
        """See ``WireOwner``."""
        payload, memories = self._carried
        if payload:
            self._carried = b"", []
            begin(self._replied(payload, memories), "aionn-fleet-reply")

    def _close_carried(self) -> None:
        for memory in self._carried[1]:
            memory.close()
        self._carried = b"", []

    async def _replied(self, payload: bytes, memories: list[Memory]) -> None:
        try:
            message = await decoded(payload, memories, self)
            if not isinstance(message, Reply):
                raise InvalidArgument("connection: expected a reply of the node, got a call")
        except Exception as e:  # Its caller would wait without end.
            self._lose(f"its reply cannot be read: {e or type(e).__name__}")
            return
        finally:
            for memory in memories:
                memory.close()
        call = self._calls.pop(message.id, None)
        if call is not None and not call.done():
            call.set_result(message.body)
        elif message.id in self._withdrawn:
            self._withdrawn.discard(message.id)
            self._give_back(message.body)

    def _give_back(self, reply: ReplyBody) -> None:
        """Frees what a call has made whose caller has left."""
        if isinstance(reply, PrepareModelReply):
            self.post(FreePreparedModel(reply.prepared))
        elif isinstance(reply, ReserveReply) and reply.reserved is not None and reply.reserved.is_new:
            self.post(Release(reply.reserved.reservation))

    def _welcomed(self, message: Welcome) -> None:
        if self._greeted.done() or message.info is None:
            raise InvalidArgument("connection: expected one greeting with a device")
        self.state = next_state(self.state, "welcome")
        self._exchanged(message.sent_ns, message.received_ns, message.replied_ns, self.now())
        self._greeted.set_result(message)
        self._probe()
