"""The client's end of a burst: launches over two queues.

Owns the waiting; ``packets`` defines the messages, ``session`` the permitted transitions.

Invariants:
1. A request that was sent is never sent again, on no path: the work may have run.
2. One request is in flight. The one after a cancelled one is sent when the result of that was read.
3. A result has one reader: the task that awaits the launch, which then has it in the turn of the loop in which it comes; or, once a
   launch was cancelled or its fence was asked for, a task of this end.
4. When the driver dies, the pending launches are done immediately: with the result, where it was written, else with DEAD_OBJECT.
5. A request that a packet cannot express, with a device memory or too large, goes through the prepared model instead.
6. A launch that was sent is done when its result was read, when the driver's end has ended, or when its process has: never because
   the caller closed this end, nor because reading failed. The device may use its memory until then.
7. A slot means another memory only after the driver has confirmed that it forgot the first one. A driver that cannot is broken,
   and the burst is dead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import anyio

import fmq
from aionn.burst.launches import BurstLaunch, KeptPacket
from aionn.burst.outcomes import FrameOutcomes, outcome_of_packet
from aionn.burst.packets import (
    PACKET_BYTES_MAX,
    encode_limits,
    encode_request,
    encode_reserved_limits,
    fits_packets,
)
from aionn.burst.polling import Polling
from aionn.burst.session import BurstState, MemorySlots, next_state
from aionn.errors import (
    DeadObject,
    Error,
    ExecutionCancelled,
    GeneralFailure,
    InvalidArgument,
    ResourceExhausted,
    general_failure_of,
)
from aionn.hal import (
    TIME_MAX_NS,
    BufferToken,
    BurstByLaunch,
    BurstDefaults,
    ExecutionResult,
    Launch,
    Memory,
    PreparedModel,
    Request,
    ask_to_stop,
    check_deadline_ns,
    check_duration_ns,
    passed_before_start,
)
from aionn.hal.callers import ReservedFrame, frame_of_launch
from aionn.platform.loops import begin, finish
from aionn.validation import check_field_types, check_memory_identifiers

__all__ = ["QUEUE_BYTES", "BurstController"]

_logger = logging.getLogger("aionn.burst")

QUEUE_BYTES = 1 << 16
"""Capacity of each queue: the 1,024 datums of the spec's users, at some 20 bytes each, fit three times."""

HEADER_BYTES = 8
"""Length of a message's header in a queue."""

PACKETS_KEPT_MAX = 64
"""Packets kept: more than the slots that a burst of the runtime has."""

END_S_MAX = 1.0
"""Limit of the wait for the driver when a burst is closed; the driver first lets a running execution end. After it the queues stay
open as long as an execution may run."""

assert QUEUE_BYTES <= PACKET_BYTES_MAX

_IDLE, _IN_FLIGHT = BurstState.IDLE, BurstState.IN_FLIGHT
assert next_state(_IDLE, "send") is _IN_FLIGHT and next_state(_IN_FLIGHT, "result") is _IDLE


UNWATCHED_S = 0.01
"""Interval between looks for a result while the event loop has no room to watch the queue, or no memory."""


class BurstController(BurstByLaunch, BurstDefaults):
    """The client's end of one burst.

    Args:
        requests: Queue that the driver reads; owned by this object from now on.
        results: Queue that the driver writes; owned by this object from now on. It spins for ``polling_ns``.
        free_slot: Notifies the driver that a memory slot is free, and returns when the driver has forgotten it.
        end: Notifies the driver that the burst has ended, and returns when the driver's end has ended: its execution is over then.
            Raises DeadObject when the process is gone.
        is_hanging: Whether the driver has left so much unanswered that closing does not wait for that.
        model: Executes requests that packets cannot express, and is kept alive as long as this end is: a driver ends the bursts of
            a prepared model that is freed. With None such requests fail.
        polling_ns: Time in which an execution may look for its result before it sleeps. The event loop is blocked in the window;
            after executions that took longer, more and more of the next ones are not polled for.
        thread_id: See ``Burst``.

    Attributes:
        thread_id: See above.
    """

    def __init__(
        self,
        requests: fmq.MessageQueue,
        results: fmq.MessageQueue,
        *,
        free_slot: Callable[[int], Awaitable[None]],
        end: Callable[[], Awaitable[None]],
        is_hanging: Callable[[], bool] = lambda: False,
        model: PreparedModel | None = None,
        polling_ns: int = 0,
        thread_id: int | None = None,
    ) -> None:
        self.thread_id = thread_id
        self._requests = requests
        self._results = results
        self._free_slot = free_slot
        self._end = end
        self._is_hanging = is_hanging
        self._ended = anyio.Event()
        self._model = model
        self._packet_bytes_max = min(PACKET_BYTES_MAX, requests.count - HEADER_BYTES)
        self._polling = Polling(results, polling_ns) if polling_ns else None
        self._slots = MemorySlots()
        self._state = BurstState.IDLE  # Or dead, or closed.
        self._launch: Launch | None = None  # The last one, until it is done.
        self._sent: BurstLaunch | None = None
        self._waiting: BurstLaunch | None = None
        self._has_reader = False
        self._reader: fmq.aio.MessageReader | None = None
        self._packets: dict[tuple[int, bool, bool, tuple[int, ...]], KeptPacket] = {}
        self._last_payload = b""
        self._last_result = ExecutionResult()
        self._frames = FrameOutcomes()
        self._why_dead = ""

    @property
    def state(self) -> BurstState:
        """The state of this end. A cancelled execution does not count as in flight."""
        return _IN_FLIGHT if self._state is _IDLE and self._is_busy() else self._state

    def _is_busy(self) -> bool:
        launch = self._launch
        return launch is not None and not launch.is_done and not launch.is_cancelled

    def in_flight(self) -> Launch | None:
        """See ``aionn.hal.Burst``."""
        launch = self._launch
        return None if launch is None or launch.is_done else launch

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
        """See ``aionn.hal.Burst``. Cancellation asks the device to stop; it keeps its slot until it has."""
        is_limited = deadline_ns is not None or loop_timeout_ns is not None
        kept = self._packets.get((id(request), measure, is_limited, tuple(memory_identifiers)))
        if kept is None or self._launch is not None or self._sent is not None or self._state is not _IDLE:
            return await super().execute_synchronously(
                request,
                memory_identifiers,
                measure=measure,
                deadline_ns=deadline_ns,
                loop_timeout_ns=loop_timeout_ns,
            )
        # A stream's executions, with as few calls as possible: after each wait their code is no longer in the processor's cache.
        packet = kept.payload + _limits(deadline_ns, loop_timeout_ns) if is_limited else kept.payload
        launch, kept.launch = kept.launch, None
        if launch is None:
            launch = BurstLaunch(self, packet, request)
        elif is_limited:
            launch.packet = packet
        try:
            is_written = self._requests.write_message(packet)
        except fmq.Error:
            is_written = False
        if is_written:
            self._sent = launch
        else:
            self._send(launch)  # It raises the reason.
        self._launch = launch
        payload: bytes | None = None
        self._has_reader = True
        try:
            try:
                polling = self._polling
                if polling is not None:
                    payload = await polling.look_after_turn() if polling.is_turn_due else polling.look()
                if payload is None:
                    payload = await (self._reader or self._new_reader())
            except (fmq.Error, OSError, MemoryError):
                pass  # ``received`` meets it again, and handles it.
            finally:
                self._has_reader = False
            if payload == self._last_payload and launch is self._sent and launch._fence is None:
                # No other task waits for the launch, so it need not be finished, and serves the next execution.
                self._sent = self._launch = None
                kept.launch = launch
                return self._last_result
            return await self.received(launch, payload)
        except BaseException:
            ask_to_stop(launch)
            raise
        finally:
            del launch  # An error refers to this frame.

    def launch(
        self,
        request: Request,
        memory_identifiers: Sequence[int],
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> Launch:
        """See ``aionn.hal.Burst``."""
        frame = frame_of_launch.get()
        is_limited = deadline_ns is not None or loop_timeout_ns is not None or frame is not None
        limits = _limits(deadline_ns, loop_timeout_ns, frame) if is_limited else b""
        if self._state is not _IDLE or (self._launch is not None and self._is_busy()):
            self._refuse()
        kept = self._packets.get((id(request), measure, is_limited, tuple(memory_identifiers)))
        if kept is not None:
            launch = BurstLaunch(self, kept.payload + limits if limits else kept.payload, request)
        else:
            check_field_types(request, Request, "request")
            check_memory_identifiers(request, memory_identifiers)
            encoded = self._encoded(request, memory_identifiers, measure, limits)
            if encoded is None:
                self._launch = by_model = self._launch_by_model(
                    request, memory_identifiers, measure, deadline_ns, loop_timeout_ns
                )
                return by_model
            launch = encoded
        if frame is not None:
            launch.frame = frame
        if self._sent is None:
            self._send(launch)
        else:
            self._waiting = launch
        self._launch = launch
        return launch

    def _refuse(self) -> None:
        if self._state is BurstState.DEAD:
            raise DeadObject(f"burst: {self._why_dead}")
        next_state(self.state, "send")
        raise AssertionError("only an idle burst sends")

    def _launch_by_model(
        self,
        request: Request,
        memory_identifiers: Sequence[int],
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
    ) -> Launch:
        """Launches a request that no packet can express. The memories are those that its identifiers stand for."""
        if self._model is None:
            raise InvalidArgument("burst: a request with a device memory must go through the prepared model")
        pools = tuple(
            pool if isinstance(pool, BufferToken) or identifier == -1 else self._slots.named(identifier, pool)
            for pool, identifier in zip(request.pools, memory_identifiers, strict=True)
        )
        return self._model.launch(
            Request(request.inputs, request.outputs, pools),
            measure=measure,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
        )

    def _encoded(
        self, request: Request, memory_identifiers: Sequence[int], measure: bool, limits: bytes
    ) -> BurstLaunch | None:
        """A launch of a request whose packet was not kept, as those of a stream are; None if no packet can express it."""
        if any(isinstance(pool, BufferToken) for pool in request.pools):
            return None
        if self._model is not None and not fits_packets(request):
            return None
        slots: list[int] = []
        temporary: list[int] = []
        try:
            for pool, identifier in zip(request.pools, memory_identifiers, strict=True):
                assert isinstance(pool, Memory), "device memories take the other way"
                if identifier == -1:
                    slots.append(self._slots.temporary_slot(pool))
                    temporary.append(slots[-1])
                else:
                    slots.append(self._slots.slot(identifier, pool))
            payload = encode_request(request, slots, measure=measure, with_limits=bool(limits))
        except BaseException as e:
            self._unused(temporary)
            if isinstance(e, OverflowError):
                raise InvalidArgument(f"request: expected whole numbers of 64 bits: {e}") from e
            raise
        if self._model is not None and len(payload) + len(limits) > self._packet_bytes_max:
            self._unused(temporary)
            return None
        if not temporary:
            if len(self._packets) >= PACKETS_KEPT_MAX:
                self._packets.clear()
            key = (id(request), measure, bool(limits), tuple(memory_identifiers))
            self._packets[key] = KeptPacket(request, payload)
        launch = BurstLaunch(self, payload + limits, request)
        launch.temporary = temporary
        return launch

    def _unused(self, temporary: Sequence[int]) -> None:
        """Frees slots that were never sent: the driver does not know them."""
        for slot in temporary:
            self._slots.free_slot(slot)

    def _send(self, launch: BurstLaunch) -> None:
        try:
            now_ns = 0 if launch.frame is None else time.monotonic_ns()
            if not self._requests.write_message(launch.packet):
                raise ResourceExhausted("burst: the request queue is full", transient=True)
            if launch.frame is not None:
                launch.frame.sent(now_ns)
        except fmq.Error as e:
            self._unused(launch.temporary)
            raise ResourceExhausted(f"burst: the request does not fit the queue: {e}", transient=False) from e
        except BaseException:
            self._unused(launch.temporary)
            raise
        self._sent = launch

    def cancelled(self, launch: BurstLaunch) -> None:
        """The result of a launch is not wanted any more. One that waits is never sent, one that was sent is read."""
        if launch is self._waiting:
            self._waiting = None
            self._unused(launch.temporary)
            launch.finish(ExecutionCancelled("burst: the execution was cancelled before it was sent"))
        else:
            self.read_on()

    async def received(
        self, launch: BurstLaunch, payload: bytes | None = None, *, in_task: bool = False
    ) -> ExecutionResult:
        """Waits for a launch and returns its outcome. Reads the results itself if no task does; cancelled, it has lost nothing.

        With a polling window it looks before it waits: one task does that, and the loop is blocked during the window.

        Args:
            launch: The one that was sent, or waits.
            payload: Its result, if that was read; else None.
            in_task: A task of this end calls, and reads for launches that have no waiter.
        """
        try:
            if not in_task and (self._has_reader or launch is not self._sent):
                if not launch.is_done:
                    await launch.done
                return launch.outcome()
            self._has_reader = True
            try:
                polling = self._polling
                if payload is None and polling is not None and not in_task:
                    payload = await polling.look_after_turn() if polling.is_turn_due else polling.look()
                outcome = launch.received  # Of a reader that was cancelled while it freed slots.
                while outcome is None:
                    try:
                        if payload is None:
                            payload = await (self._reader or self._new_reader())
                        # Results without timings repeat to the byte; a decoded one is immutable.
                        is_same = payload == self._last_payload
                        outcome = self._last_result if is_same else self._outcome_of(payload, launch)
                    except fmq.InterruptedQueue:
                        outcome = DeadObject(f"burst: {self._why_dead}")
                    except fmq.Error as e:
                        outcome = GeneralFailure(f"burst: the result cannot be read: {e}")
                    except (OSError, MemoryError):
                        # The event loop has no room to watch the results, and the device is at work.
                        await anyio.sleep(UNWATCHED_S)
                if launch.temporary:
                    launch.received = outcome
                    await self._free_temporary(launch)
                    launch.received = None  # An error that is raised refers to the launch.
                if launch is self._sent:  # It may have ended by the driver's death.
                    self._sent = launch.request = None
                    if launch is self._launch:
                        self._launch = None
                    launch.finish(outcome)
                    if self._waiting is not None:
                        self._send_waiting()
                    if isinstance(outcome, ExecutionResult):
                        return outcome
            finally:
                self._has_reader = False
                if self._sent is not None and not in_task:
                    self.read_on()
            return launch.outcome()
        finally:
            outcome = None  # An error refers to this frame, which would refer to it.
            del launch

    def _new_reader(self) -> fmq.aio.MessageReader:
        """The reader of results, made when the first one is awaited. Raises as ``fmq.aio.message_reader``."""
        self._reader = reader = fmq.aio.message_reader(self._results)
        return reader

    def read_on(self) -> None:
        """Reads what is in flight, in a task of this end, unless another task does."""
        if not self._has_reader and self._sent is not None:
            self._has_reader = begin(self._read_on(), "aionn-burst-results")

    async def _read_on(self) -> None:
        is_logged = False
        try:
            while self._sent is not None:
                try:
                    await self.received(self._sent, in_task=True)
                except Error:
                    pass  # It is the launch's outcome.
                except Exception:
                    # The launch must not end without its result: the device may be at work.
                    if not is_logged:
                        _logger.exception("burst: reading a result failed, and is tried again")
                    is_logged = self._has_reader = True
                    await anyio.sleep(UNWATCHED_S)
        finally:
            self._has_reader = False

    async def _free_temporary(self, launch: BurstLaunch) -> None:
        while launch.temporary:
            await self._free(launch.temporary[-1])
            launch.temporary = launch.temporary[:-1]

    async def _free(self, slot: int) -> None:
        """Frees a slot at the driver, then here. Raises nothing."""
        if self._state is _IDLE:
            try:
                await self._free_slot(slot)
            except Exception as e:
                # The driver may still take the slot for this memory. Slots that are never used again would fill the tables of both
                # ends, with their memories, so the burst ends here, where the reason is known. Results that were read stay valid.
                if self._state is _IDLE:
                    self.peer_died(f"the driver cannot free a memory slot: {e or type(e).__name__}")
        self._slots.free_slot(slot)  # The driver has forgotten it, or no other request names it.

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        assert waiting is not None
        try:
            self._send(waiting)
        except Error as e:
            waiting.finish(e.with_traceback(None))
        except Exception as e:  # A launch that was not sent and has no end would be waited for without end.
            waiting.finish(general_failure_of(e, "burst").with_traceback(None))

    def _outcome_of(self, payload: bytes, launch: BurstLaunch) -> ExecutionResult | Error:
        if launch.frame is not None:
            return self._frames.outcome(payload, launch.frame, time.monotonic_ns())
        outcome, _ = outcome_of_packet(payload)
        if isinstance(outcome, ExecutionResult):
            self._last_result, self._last_payload = outcome, payload
        return outcome

    def peer_died(self, why: str) -> None:
        """Ends the pending call, and every later one, with DEAD_OBJECT. Call it in the event loop's thread."""
        self._why_dead = why
        self._state = next_state(self._state, "peer died")
        if self._state is BurstState.CLOSED:
            self._release(f"burst: {why}")
            return
        self._end_launches(f"burst: {why}")
        self._results.interrupt()

    def _end_launches(self, why: str) -> None:
        """Ends what is in flight or waits: the driver is done with it. Its result counts where it was read or written before."""
        sent, self._sent = self._sent, None
        self._launch = None  # A launch refers to this end, and so do those that packets keep.
        self._packets.clear()
        if sent is not None:
            self._end_launch(sent, sent.received or self._last_outcome(sent) or DeadObject(why))
        self._end_waiting(why)

    def _end_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._end_launch(waiting, DeadObject(why))

    def _end_launch(self, launch: BurstLaunch, outcome: ExecutionResult | Error) -> None:
        self._unused(launch.temporary)
        launch.temporary = ()
        launch.request = launch.received = None
        launch.finish(outcome)

    def _last_outcome(self, launch: BurstLaunch) -> ExecutionResult | Error | None:
        """The outcome that the driver has written, although the news of its end came first."""
        try:
            payload = self._results.read_message()
        except fmq.Error:
            return None
        return None if payload is None else self._outcome_of(payload, launch)

    async def release_memory_resource(self, memory_identifier: int) -> None:
        """See ``aionn.hal.Burst``."""
        if memory_identifier < -1:
            raise InvalidArgument(
                f"burst: expected a memory identifier of at least -1, got {memory_identifier}"
            )
        self._packets.clear()
        slot = self._slots.release(memory_identifier)
        if slot is not None:
            try:
                await self._free(slot)
            except BaseException:
                begin(self._free(slot), "aionn-burst-free-slot")  # Freed twice is freed.
                raise

    async def aclose(self) -> None:
        """Ends the burst and closes both queues; these later where an execution may still run after ``END_S_MAX``. Idempotent."""
        if self._state is BurstState.CLOSED:
            return
        self._state = next_state(self._state, "close")
        self._end_waiting("burst: it was closed")
        self.read_on()  # The launch ends with its result, whatever the driver answers.
        if begin(self._await_end(), "aionn-burst-end"):
            await finish(self._wait_for_end())

    async def _wait_for_end(self) -> None:
        # A driver that hangs does not answer; its process is ended by its parent.
        with anyio.move_on_after(0 if self._is_hanging() else END_S_MAX):
            await self._ended.wait()
        if self._sent is None:
            self._release("burst: it was closed")  # There is nothing to wait for.

    async def _await_end(self) -> None:
        """Waits for the driver's end as long as the process lives."""
        try:
            await self._end()
        except DeadObject:
            pass  # The process is gone, and the burst with it.
        except Exception:
            _logger.exception("burst: the driver cannot end it")
            if self._sent is not None:
                await self._sent.done  # Its result, or the process's end.
        finally:
            self._release("burst: it was closed")

    def _release(self, why: str) -> None:
        """Nothing is executed any more: ends what is in flight, and closes both queues. Idempotent."""
        self._end_launches(why)
        self._requests.close()
        self._results.close()
        self._ended.set()


def _limits(
    deadline_ns: int | None, loop_timeout_ns: int | None, frame: ReservedFrame | None = None
) -> bytes:
    """The limits of a packet. Raises where one is not valid, or the deadline has passed."""
    is_plain = loop_timeout_ns is None and frame is None and type(deadline_ns) is int
    if is_plain and time.monotonic_ns() < deadline_ns <= TIME_MAX_NS:  # type: ignore[operator]
        return encode_limits(
            deadline_ns, None
        )  # With few calls: each frame of a stream with deadlines has them.
    check_deadline_ns(deadline_ns, where="burst")
    check_duration_ns(loop_timeout_ns, where="burst, loop time-out")
    if deadline_ns is not None and (now_ns := time.monotonic_ns()) >= deadline_ns:
        raise passed_before_start("burst", now_ns - deadline_ns)
    if frame is not None:
        return encode_reserved_limits(deadline_ns, loop_timeout_ns, frame.reservation)
    return encode_limits(deadline_ns, loop_timeout_ns)
