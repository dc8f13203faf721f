"""The client's end of a burst: an awaitable execution over two queues.

Owns the waiting; ``packets`` defines the messages, ``session`` the permitted transitions.

Invariants:
1. A request that was sent is never sent again, on no path: the work may have run.
2. If the caller is cancelled while a request is in flight, its result is read and discarded before the next request is sent.
3. When the driver's death is reported, the pending call ends immediately with DEAD_OBJECT.
4. A request with a device memory, which a packet cannot express, goes through the prepared model instead, before anything is sent.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import anyio
import anyio.lowlevel

import fmq
from aionn.burst.packets import (
    PACKET_BYTES_MAX,
    BurstResult,
    MalformedPacket,
    decode_result,
    encode_limits,
    encode_request,
)
from aionn.burst.session import BurstState, MemorySlots, next_state
from aionn.errors import (
    DeadObject,
    Error,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    ResourceExhausted,
    error_for_status,
)
from aionn.hal import (
    BufferToken,
    BurstDefaults,
    ExecutionResult,
    Memory,
    PreparedModel,
    Request,
    check_deadline_ns,
    check_duration_ns,
)
from aionn.platform.loops import finish
from aionn.validation import check_memory_identifiers

__all__ = ["QUEUE_BYTES", "BurstController"]

QUEUE_BYTES = 1 << 16
"""Capacity of each queue: the 1,024 datums of the spec's users, at some 20 bytes each, fit three times."""

PACKETS_KEPT_MAX = 64
"""Packets kept: more than the slots that a burst of the runtime has."""

POLLED_MAX = 8
"""Most results in a row that are found by looking for them: then other tasks of the loop have a turn."""

POLLING_PAUSE_MAX = 64
"""Most executions that are not looked for after one that took longer than the polling window: 1 after the first, twice as many
after each further one. So one that was disturbed costs the next ones little, and a model that is too long costs the loop little."""

END_S_MAX = 1.0
"""Limit of the wait for the driver at the end of a burst; the driver first lets a running execution end."""

assert QUEUE_BYTES <= PACKET_BYTES_MAX

_IDLE, _IN_FLIGHT = BurstState.IDLE, BurstState.IN_FLIGHT
assert next_state(_IDLE, "send") is _IN_FLIGHT and next_state(_IN_FLIGHT, "result") is _IDLE


class _Packet(NamedTuple):
    """A request's packet, without its limits. The request is kept too: as long as it lives nothing else has its identity."""

    request: Request
    payload: bytes


class BurstController(BurstDefaults):
    """The client's end of one burst.

    Args:
        requests: Queue that the driver reads; owned by this object from now on.
        results: Queue that the driver writes; owned by this object from now on. It spins for ``polling_ns``.
        free_slot: Notifies the driver that a memory slot is free.
        end: Notifies the driver that the burst has ended.
        model: Executes requests that packets cannot express, and is kept alive as long as this end is: a driver ends the bursts of
            a prepared model that is freed. None refuses such requests.
        polling_ns: How long an execution may look for its result before it sleeps. The event loop is blocked during the window;
            after executions that took longer, more and more of the next ones are not polled for.
    """

    def __init__(
        self,
        requests: fmq.MessageQueue,
        results: fmq.MessageQueue,
        *,
        free_slot: Callable[[int], Awaitable[None]],
        end: Callable[[], Awaitable[None]],
        model: PreparedModel | None = None,
        polling_ns: int = 0,
    ) -> None:
        self._requests = requests
        self._results = results
        self._free_slot = free_slot
        self._end = end
        self._model = model
        self._polling_ns = polling_ns
        self._polling_pause = 0
        self._next_pause = 1
        self._polled_count = 0
        self._slots = MemorySlots()
        self._state = BurstState.IDLE
        self._unread_count = 0
        self._temporary: list[int] = []
        self._packets: dict[tuple[int, bool, bool, tuple[int, ...]], _Packet] = {}
        self._last_payload = b""
        self._last_result = ExecutionResult()
        self._why_dead = ""

    @property
    def state(self) -> BurstState:
        """The state of this end."""
        return self._state

    def memories(self, slots: Sequence[int]) -> list[Memory]:
        """Answers the driver's question for memories. Raises as ``MemorySlots.memories``."""
        return self._slots.memories(slots)

    async def execute_synchronously(
        self,
        request: Request,
        memory_identifiers: Sequence[int],
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> ExecutionResult:
        """See ``aionn.hal.Burst``."""
        limits = b""
        if deadline_ns is not None or loop_timeout_ns is not None:
            check_deadline_ns(deadline_ns, where="burst")
            check_duration_ns(loop_timeout_ns, where="burst, loop time-out")
            if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
                raise MissedDeadline("burst: the deadline had passed before the start", transient=False)
            limits = encode_limits(deadline_ns, loop_timeout_ns)
        self._begin()
        try:
            if self._unread_count or self._temporary:
                await self._settle()
            kept = self._packets.get((id(request), measure, bool(limits), tuple(memory_identifiers)))
            if kept is not None:
                return await self._exchange(kept.payload + limits if limits else kept.payload)
            check_memory_identifiers(request, memory_identifiers)
            if any(isinstance(pool, BufferToken) for pool in request.pools):
                return await self._execute_by_model(
                    request, memory_identifiers, measure, deadline_ns, loop_timeout_ns
                )
            packet = self._packet(request, memory_identifiers, measure, bool(limits))
            result = await self._exchange(packet + limits)
            if self._temporary:
                await self._settle()
            return result
        finally:
            if self._state is _IN_FLIGHT:
                self._state = _IDLE

    def _begin(self) -> None:
        """From idle to in flight. Fast path of the table of states, which is used for all other transitions."""
        if self._state is _IDLE:
            self._state = _IN_FLIGHT
        elif self._state is BurstState.DEAD:
            raise DeadObject(f"burst: {self._why_dead}")
        else:
            self._state = next_state(self._state, "send")

    async def _execute_by_model(
        self,
        request: Request,
        memory_identifiers: Sequence[int],
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
    ) -> ExecutionResult:
        """Executes a request that no packet can express. The memories are those that its identifiers stand for."""
        if self._model is None:
            raise InvalidArgument("burst: a request with a device memory must go through the prepared model")
        pools = tuple(
            pool if isinstance(pool, BufferToken) or identifier == -1 else self._slots.named(identifier, pool)
            for pool, identifier in zip(request.pools, memory_identifiers, strict=True)
        )
        return await self._model.execute_synchronously(
            Request(request.inputs, request.outputs, pools),
            measure=measure,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
        )

    def _packet(
        self, request: Request, memory_identifiers: Sequence[int], measure: bool, with_limits: bool
    ) -> bytes:
        """The request's packet. A stream sends the same few requests again and again: their packets are kept."""
        slots = self._request_slots(request, memory_identifiers)
        payload = encode_request(request, slots, measure=measure, with_limits=with_limits)
        if not self._temporary:
            if len(self._packets) >= PACKETS_KEPT_MAX:
                self._packets.clear()
            key = (id(request), measure, with_limits, tuple(memory_identifiers))
            self._packets[key] = _Packet(request, payload)
        return payload

    async def settle(self) -> None:
        """Waits until the device is done with what a cancelled caller left in flight. One at a time, as executions.

        Raises:
            DeadObject: The driver died.
            InvalidArgument: An execution is in flight, or the burst is closed.
        """
        self._begin()
        try:
            await self._settle()
        finally:
            if self._state is _IN_FLIGHT:
                self._state = _IDLE

    async def _settle(self) -> None:
        """Reads what a cancelled caller left in flight, then gives back the slots that were for one execution alone."""
        while self._unread_count:
            await self._read()
        while self._temporary:
            # The driver forgets the slot before it can mean another memory.
            await self._free_slot(self._temporary[-1])
            self._slots.free_slot(self._temporary.pop())

    def _request_slots(self, request: Request, memory_identifiers: Sequence[int]) -> list[int]:
        slots: list[int] = []
        for pool, identifier in zip(request.pools, memory_identifiers, strict=True):
            assert isinstance(pool, Memory), "device memories take the other way"
            if identifier == -1:
                slots.append(self._slots.temporary_slot(pool))
                self._temporary.append(slots[-1])
            else:
                slots.append(self._slots.slot(identifier, pool))
        return slots

    async def _exchange(self, packet: bytes) -> ExecutionResult:
        if self._polled_count >= POLLED_MAX:
            self._polled_count = 0
            await anyio.lowlevel.checkpoint()
        try:
            sent = self._requests.write_message(packet)
        except fmq.Error as e:
            raise ResourceExhausted(f"burst: the request does not fit the queue: {e}", transient=False) from e
        if not sent:
            raise ResourceExhausted("burst: the request queue is full", transient=True)
        self._unread_count += 1
        payload = self._polled() if self._polling_ns else None
        if payload is None:
            self._polled_count = 0
            payload = await self._read()
        # Results without timings repeat to the byte; a decoded one is immutable.
        if payload != self._last_payload:
            try:
                result = decode_result(payload)
            except MalformedPacket as e:
                raise GeneralFailure(f"burst: the result cannot be read: {e}") from e
            self._last_result = _execution_result(result)
            self._last_payload = payload
        return self._last_result

    def _polled(self) -> bytes | None:
        """The result if it is here within the polling window; None immediately if the execution before took longer."""
        if self._polling_pause:
            self._polling_pause -= 1
            return None
        try:
            payload = self._results.read_message_blocking(self._polling_ns)
        except fmq.Error:
            return None  # Reading reports the reason.
        if payload is None:
            self._polling_pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, POLLING_PAUSE_MAX)
        else:
            self._next_pause = 1
            self._polled_count += 1
            self._unread_count -= 1
        return payload

    async def _read(self) -> bytes:
        """One result packet.

        Raises:
            DeadObject: The driver died.
        """
        try:
            payload = await fmq.aio.read_message(self._results)
        except fmq.InterruptedQueue:
            raise DeadObject(f"burst: {self._why_dead}") from None
        except fmq.Error as e:
            raise GeneralFailure(f"burst: the result cannot be read: {e}") from e
        except OSError as e:
            raise ResourceExhausted(
                f"burst: the event loop cannot watch the results: {e.strerror}", transient=True
            ) from e
        self._unread_count -= 1
        return payload

    def peer_died(self, why: str) -> None:
        """Ends the pending call, and every later one, with DEAD_OBJECT. Call it in the event loop's thread."""
        self._why_dead = why
        self._state = next_state(self._state, "peer died")
        if self._state == BurstState.DEAD:
            self._results.interrupt()

    async def release_memory_resource(self, memory_identifier: int) -> None:
        """See ``aionn.hal.Burst``."""
        if memory_identifier < -1:
            raise InvalidArgument(
                f"burst: expected a memory identifier of at least -1, got {memory_identifier}"
            )
        self._packets.clear()
        slot = self._slots.release(memory_identifier)
        if slot is not None and self._state not in (BurstState.DEAD, BurstState.CLOSED):
            await self._free_slot(slot)

    async def aclose(self) -> None:
        """Ends the burst and closes both queues. Idempotent."""
        if self._state == BurstState.CLOSED:
            return
        was_dead = self._state == BurstState.DEAD
        self._state = next_state(self._state, "close")
        await finish(self._close(was_dead))

    async def _close(self, was_dead: bool) -> None:
        try:
            if not was_dead:
                # A driver that hangs does not answer; its process is ended by its parent.
                with anyio.move_on_after(END_S_MAX):
                    await self._end()
        except Error:
            pass  # The driver ended during the call, so the burst has ended too.
        finally:
            self._requests.close()
            self._results.close()


def _execution_result(result: BurstResult) -> ExecutionResult:
    if result.status == ErrorStatus.NONE:
        return ExecutionResult(True, result.output_shapes, result.timing)
    if result.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
        return ExecutionResult(False, result.output_shapes)
    raise error_for_status(result.status, f"burst: the driver answered {result.status.name}")
