"""The driver's end of a burst: one listening thread that serves any executor.

Owns the loop: read a packet, learn unknown memories, execute, answer. Drivers never see a queue. Where the driver gives a call of
its engine (``PreparedModel.native``), packets whose bytes were answered before are answered by ``fmq.Answers``, without Python;
all others, and whatever is late, contended or failing, by the loop.

Invariants:
1. Every request that was read is answered by exactly one result, at worst by a short failed one.
2. A malformed request ends with GENERAL_FAILURE and the loop continues; a corrupt queue ends the burst, and its owner is notified.
3. After ``drain`` no request that is read is executed: each gets DEVICE_UNAVAILABLE with the reason, also one that is read while
   the thread ends. Each takes a turn as other failed ones do, for which the end of the thread never waits.
4. ``begin_stop`` ends the thread promptly unless the executor hangs or ``get_memories`` does not return; it need not be waited for.
   The thread closes both queues and then calls ``on_stopped``.
5. A bound request is kept for the bytes of its packet, until one of its memories is released: a stream sends the
   same packets for the same frame slots again and again. A native call is kept for them as long, or until ``drain``.
6. A packet of a frame of a reservation is never answered natively: the device's queue orders it by its reservation.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import fmq
from aionn.burst.packets import (
    BurstRequest,
    MalformedPacket,
    decode_request,
    encode_result,
    failed_result,
    limits_at,
    plain_limits,
    result_of,
    split_limits,
)
from aionn.burst.reports import encode_report, head_of_result
from aionn.burst.session import SlotCache
from aionn.errors import DeviceUnavailable, Error, ErrorStatus, InvalidArgument, status_of
from aionn.hal import NO_TIMING, ExecutionResult, GiveNativeCall, Memory, NativeCall, Request
from aionn.hal.callers import FrameReport
from aionn.observability.tracing import is_tracing, record

__all__ = ["Answer", "BurstServer", "Execute", "PacketTurns", "Reserving"]

_logger = logging.getLogger("aionn.burst")

REMEMBERED_REQUESTS_MAX = 256
"""Most requests kept by their packets' bytes: four for each slot of a burst of the runtime."""

REMEMBERED_BYTES_MAX = 1 << 20
"""About the most memory of those, so that a client of many bursts has some megabytes: 256 requests of ten arguments take half."""

ARGUMENT_BYTES = 256
"""Memory of an argument of a bound request: objects of CPython and, in a driver, an array. The reference device takes 160."""

Answer = Callable[[ExecutionResult], None]
"""Sends a result, once. May be called before the execution is cleaned up, so that the client continues sooner."""

Execute = Callable[[Any, bool, int | None, int | None, Answer], ExecutionResult]
"""Executes what ``bind`` gave: whether to measure, the deadline, the loop time-out, and how to answer before it returns. On the
burst's thread; may block."""


Reserving = Callable[[int], AbstractContextManager[Callable[[], FrameReport | None]]]
"""Makes the execution within a context a frame of the reservation with this number; it gives the report for the client, to be
called after the execution. Raises ``InvalidArgument``: the client never had that reservation."""


class PacketTurns(Protocol):
    """The turns of the packets that are decoded or have failed, of all bursts of a client together."""

    def take(self, is_ending: Callable[[], bool]) -> bool:
        """Blocks until the turn is this thread's; False without it when ``is_ending`` is true."""

    def give_back(self, used_ns: int) -> None:
        """Ends the turn, with the processor time that it took."""

    def failed(self, is_ending: Callable[[], bool]) -> None:
        """Blocks for a turn after a packet that failed."""

    def wake(self) -> None:
        """Has those that block ask ``is_ending`` again."""

    def executed(self) -> None:
        """An execution whose packet had to be decoded has succeeded."""


def _later(result: ExecutionResult) -> None:
    """Is answered later."""


class _Known(NamedTuple):
    """The bound request of a packet's bytes, or of those before its limits."""

    bound: Any
    measure: bool
    has_limits: bool


class BurstServer:
    """Serves one burst.

    Args:
        requests: Queue that the client writes; owned by this object from now on.
        results: Queue that the client reads; owned by this object from now on.
        execute: Executes a request on the calling thread and may block.
        get_memories: Asks the client for the memories of slots and may block.
        bind: Checks a request and makes it ready for ``execute``, which is given what this gives, any number of times; None where
            ``execute`` takes requests as they are.
        native: See ``PreparedModel``.
        reserving: See there; None where the device keeps no reservations.
        on_started: Called on the burst's thread before it listens; None calls nothing. It must not raise.
        turns: Of the client's packets, beside which others are served; None for a client that is served alone. No turn is held
            while the client is asked or a request executes.
        on_end: Called with the reason, on the burst's thread, when the burst ends without being stopped; ``stop`` must still be
            called.
        on_stopped: Called on the burst's thread when both queues are closed and nothing is executed or asked any more.
        name: Names the thread.
    """

    def __init__(
        self,
        requests: fmq.MessageQueue,
        results: fmq.MessageQueue,
        *,
        execute: Execute,
        get_memories: Callable[[Sequence[int]], Sequence[Memory]],
        bind: Callable[[Request], Any] | None = None,
        native: GiveNativeCall | None = None,
        reserving: Reserving | None = None,
        on_started: Callable[[], object] | None = None,
        turns: PacketTurns | None = None,
        on_end: Callable[[str], None] | None = None,
        on_stopped: Callable[[], object] | None = None,
        name: str,
    ) -> None:
        self._requests = requests
        self._results = results
        self._execute = execute
        self._get_memories = get_memories
        self._bind = bind
        self._native = native
        self._reserving = reserving
        self._report: Callable[[], FrameReport | None] | None = None
        self._answers = None if native is None else fmq.Answers(reports=is_tracing())
        self._learnt: tuple[bytes, int] | None = None
        self._on_started = on_started
        self._turns = turns
        self._on_end = on_end
        self._on_stopped = on_stopped
        self._name = name
        self._cache = SlotCache()
        self._lock = threading.Lock()
        self._remembered: dict[bytes, _Known] = {}
        self._remembered_bytes = 0
        self._generation = 0
        self._last_result = ExecutionResult()
        self._last_packet = encode_result(result_of(self._last_result))
        self._last_frame_result = self._last_result
        self._last_head = head_of_result(self._last_result)
        self._stopping = False
        self._has_answered = False
        self._has_decoded = False
        self._has_failed = False
        self._is_serving = False
        self._is_resting = False
        self._deadline_ns: int | None = None
        self._why_draining: str | None = None
        self._used_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts listening."""
        self._thread.start()

    @property
    def thread_id(self) -> int:
        """The thread that listens, by its number in the kernel; 0 before it is started."""
        return self._thread.native_id or 0

    def free_slot(self, slot: int) -> None:
        """Forgets a memory, from any thread; unknown slots are ignored."""
        with self._lock:
            self._cache.free(slot)
            self._forget_requests()

    def _forget_requests(self) -> None:
        """Remembered requests hold the memories of their slots."""
        self._forget_remembered()
        if self._answers is not None:
            self._answers.clear()
        self._generation += 1

    def _forget_remembered(self) -> None:
        self._remembered.clear()
        self._remembered_bytes = 0

    def rest(self, idle_s: float) -> bool:
        """Gives back every memory it knows if it was not used for so long, from any thread; the next request asks the client for
        its own again.

        Returns:
            Whether it did; False also while a request is being served, or if it rests already.
        """
        with self._lock:
            began_s, ended_s = self.native_activity()
            # In this order: the thread notes the end of a request before it serves none.
            if self._is_serving or self._is_resting or began_s > ended_s:
                return False
            if time.monotonic() - max(ended_s, self._used_s) < idle_s:
                return False
            self._cache = SlotCache()
            self._forget_requests()
            self._is_resting = True
            return True

    def drain(self, why: str) -> None:
        """Rejects every request that is read from now on, from any thread.

        Args:
            why: The reason, for the client.
        """
        with self._lock:
            self._why_draining = why
            if self._answers is not None:
                self._answers.clear()  # A call that was begun is under way; no other one begins.
        if self._turns is not None:
            self._turns.wake()

    def _is_ending(self) -> bool:
        return self._stopping or self._why_draining is not None

    def _is_stopping(self) -> bool:
        return self._stopping

    def under_way(self) -> tuple[bool, int | None]:
        """Whether a request is being served, and its deadline; None without one, or before it is known. From any thread."""
        with self._lock:
            is_native = self._answers is not None and self._answers.is_busy
            return self._is_serving or is_native, self._deadline_ns

    def was_used_since(self, since_s: float) -> bool:
        """Whether a request is being served, or was after this time of CLOCK_MONOTONIC. From any thread."""
        began_s, ended_s = self.native_activity()
        return self._is_serving or began_s > ended_s or max(ended_s, self._used_s) >= since_s

    def has_unread(self) -> bool:
        """Whether the client has not read a result yet. From any thread."""
        try:
            return self._results.available_to_read() > 0
        except fmq.Error:
            return False  # The queue is closed or corrupt.

    def native_activity(self) -> tuple[float, float]:
        """When the last native call began and when the last one ended, in seconds of CLOCK_MONOTONIC, 0 before the first; one runs
        while the first is later. From any thread."""
        if self._answers is None:
            return 0.0, 0.0
        _, began_ns, ended_ns = self._answers.activity()
        return began_ns / 1e9, ended_ns / 1e9

    def begin_stop(self) -> None:
        """Has the thread end after the request that it is serving. Idempotent; does not block."""
        self._stopping = True
        self._requests.interrupt()
        if self._turns is not None:
            self._turns.wake()

    def stop(self) -> None:
        """Ends the thread, which closes both queues. Idempotent. Blocks until a running execution has ended."""
        self.begin_stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._close_queues()  # Where no thread could be started.

    def _close_queues(self) -> None:
        self._requests.close()
        self._results.close()

    def _run(self) -> None:
        try:
            if self._on_started is not None:
                self._on_started()
            self._listen()
        finally:
            self._close_queues()
            self.rest(0.0)
            if self._on_stopped is not None:
                self._on_stopped()

    def _listen(self) -> None:
        read = self._requests.read_message_blocking
        answers = self._answers
        why = ""
        try:
            while not self._stopping:
                if self._has_failed:
                    self._pause_after_failure()
                if answers is not None and answers.count:
                    event = answers.serve(self._requests, self._results)
                    if event is not None:
                        self._end_native(*event)
                        continue
                payload = read(None)
                if payload is None or (self._stopping and self._why_draining is None):
                    break
                # Without the lock, in this order: ``drain`` gives its reason before it is asked what is under way.
                self._is_serving = True
                if self._why_draining is None:
                    self._serve(payload, self._remembered.get(payload))
                else:
                    why_rejected = DeviceUnavailable(self._why_draining)
                    self._send(encode_result(failed_result(ErrorStatus.DEVICE_UNAVAILABLE, why_rejected)))
                    self._has_failed = True
                self._deadline_ns = None
                self._is_resting = False
                self._used_s = time.monotonic()
                self._is_serving = False
        except fmq.InterruptedQueue:
            pass
        except fmq.Error as e:
            why = str(e)
        if why and not self._stopping:
            _logger.warning("%s ended: %s", self._name, why)
            if self._on_end is not None:
                self._on_end(why)

    def _pause_after_failure(self) -> None:
        self._has_failed = False
        if self._turns is not None:
            self._turns.failed(self._is_ending if self._why_draining is None else self._is_stopping)

    def _end_native(self, call: NativeCall, slot: int, status: int, began_ns: int, ended_ns: int) -> None:
        """A native call needs Python after its end: for its slot, its failure, or a trace."""
        if slot >= 0:
            call.release(slot)
        if is_tracing():
            record("LD_PE", call.name, began_ns, ended_ns)
        if status:
            self._has_failed = True
            error = call.failed(status)
            _logger.debug("request failed: %s", error)
            self._send(encode_result(failed_result(status_of(error), error)))

    def _offer(self, known: _Known, result: ExecutionResult) -> None:
        """Answers a packet natively from now on, if the driver can: it has just been learnt and executed."""
        assert self._native is not None and self._answers is not None and self._learnt is not None
        (payload, generation), self._learnt = self._learnt, None
        if known.measure or not result.output_sufficient_size or result.timing != NO_TIMING:
            return
        call = self._native(known.bound)
        if call is None or call.result != result:
            return
        times = limits_at(payload) if known.has_limits else ()
        packet = encode_result(result_of(result))
        with self._lock:
            # A memory that was freed since the request was read must not be kept.
            if generation != self._generation or self._why_draining is not None:
                return
            added = self._answers.add(
                payload, packet, call.function, call.words, call.permit, call, times=times
            )
            if not added:
                # There are too many: those that still come are learnt again.
                self._forget_remembered()
                self._answers.clear()

    def _send(self, packet: bytes) -> None:
        try:
            is_sent = self._results.write_message(packet)
        except fmq.InvalidArgument:
            is_sent = False
        if not is_sent:
            # The client would wait without end for a result that does not fit: it gets a short one with the error.
            self._results.write_message(encode_result(failed_result(ErrorStatus.GENERAL_FAILURE)))
        self._has_answered = True

    def _answer(self, result: ExecutionResult) -> None:
        if result != self._last_result:
            # Results without timings repeat: their packets are kept.
            self._last_packet = encode_result(result_of(result))
            self._last_result = result
        self._send(self._last_packet)

    def _answer_frame(self, result: ExecutionResult, report: FrameReport | None) -> None:
        """Answers a frame of a reservation."""
        if report is None:
            self._answer(result)
            return
        end = encode_report(report)
        if end is None:
            self._send(encode_result(result_of(result)._replace(report=report)))
            return
        if result != self._last_frame_result:
            self._last_head, self._last_frame_result = head_of_result(result), result
        self._send(self._last_head + end)

    def _serve(self, payload: bytes, known: _Known | None) -> None:
        self._has_answered = False
        deadline_ns = loop_timeout_ns = reservation = None
        try:
            if known is None or known.has_limits:
                known, deadline_ns, loop_timeout_ns, reservation = self._known(payload)
                self._deadline_ns = deadline_ns
            if reservation is None:
                result = self._execute(known.bound, known.measure, deadline_ns, loop_timeout_ns, self._answer)
                if not self._has_answered:
                    self._answer(result)
            else:
                result = self._execute_reserved(known, deadline_ns, loop_timeout_ns, reservation)
                self._answer_frame(result, self._reported())
        except fmq.Error:
            raise
        except MalformedPacket as e:
            _logger.debug("malformed request: %s", e)
            failed = failed_result(ErrorStatus.GENERAL_FAILURE, e)
        except Error as e:
            _logger.debug("request failed: %s", e)
            failed = failed_result(status_of(e), e)
        except BaseException as e:
            # The client waits: whatever an executor does, SystemExit included, there is an answer.
            _logger.exception("%s: a request failed", self._name)
            failed = failed_result(ErrorStatus.GENERAL_FAILURE, e)
        else:
            if self._has_decoded:
                self._first_succeeded(known, result)
            return
        self._has_failed = True
        self._has_decoded = False
        self._learnt = None
        if not self._has_answered:
            self._send(encode_result(failed._replace(report=self._reported())))

    def _execute_reserved(
        self, known: _Known, deadline_ns: int | None, loop_timeout_ns: int | None, reservation: int
    ) -> ExecutionResult:
        """Executes a frame of a reservation. It is answered when its slot has been given back: then its report is complete."""
        if self._reserving is None:
            raise InvalidArgument(
                f"burst: this device keeps no reservations, got a frame of reservation {reservation}"
            )
        with self._reserving(reservation) as self._report:
            return self._execute(known.bound, known.measure, deadline_ns, loop_timeout_ns, _later)

    def _reported(self) -> FrameReport | None:
        report, self._report = self._report, None
        return None if report is None else report()

    def _first_succeeded(self, known: _Known, result: ExecutionResult) -> None:
        """The first execution of a request that has just been learnt."""
        self._has_decoded = False
        if self._turns is not None:
            self._turns.executed()
        if self._learnt is None:
            return
        try:
            self._offer(known, result)
        except fmq.InvalidArgument as e:
            _logger.warning("%s: a native call was rejected: %s", self._name, e)
        except Exception:  # The request has its answer, and the next one is executed as this one was.
            _logger.exception("%s: a native call could not be made", self._name)

    def _known(self, payload: bytes) -> tuple[_Known, int | None, int | None, int | None]:
        """The request of a packet that is not remembered without limits: remembered by its beginning, or learnt now."""
        split = split_limits(payload)
        if split is not None:
            head, deadline_ns, loop_timeout_ns, reservation = split
            with self._lock:
                known = self._remembered.get(head)
            if known is not None and known.has_limits:
                return known, deadline_ns, loop_timeout_ns, reservation
        return self._learn(payload)

    def _learn(self, payload: bytes) -> tuple[_Known, int | None, int | None, int | None]:
        self._has_decoded = True
        with self._turn():
            asked = decode_request(payload)
            limits = asked.deadline_ns, asked.loop_timeout_ns, asked.reservation
            with self._lock:
                missing = self._cache.missing(asked.slots)
                self._deadline_ns = asked.deadline_ns  # The client may never answer.
            if not missing:
                return self._bound(payload, asked, (), ()), *limits
        memories = self._get_memories(missing)
        with self._turn():
            return self._bound(payload, asked, missing, memories), *limits

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One of the client's turns.

        Raises:
            DeviceUnavailable: The burst ends or drains.
        """
        turns = self._turns
        if turns is None:
            yield
            return
        if not turns.take(self._is_ending):
            raise DeviceUnavailable(self._why_draining or "burst: it has ended")
        began_ns = time.thread_time_ns()
        try:
            yield
        finally:
            turns.give_back(time.thread_time_ns() - began_ns)

    def _bound(
        self, payload: bytes, asked: BurstRequest, missing: Sequence[int], memories: Sequence[Memory]
    ) -> _Known:
        """The request with the memories of its slots, remembered from now on."""
        with self._lock:
            self._cache.learn(missing, memories)
            if self._cache.missing(asked.slots):
                raise InvalidArgument("burst: a memory of the request was freed while the request was read")
            request = Request(asked.inputs, asked.outputs, self._cache.pools(asked.slots))
            generation = self._generation
        known = _Known(
            request if self._bind is None else self._bind(request), asked.measure, asked.has_limits
        )
        split = split_limits(payload) if asked.has_limits else None
        # Limits in a shorter form of their numbers are legal, and not worth remembering.
        key = payload if not asked.has_limits else split[0] if split is not None else None
        if key is not None:
            if asked.reservation is not None:
                payload = plain_limits(key)  # Best effort with the same arguments may be answered natively.
            self._remember(payload, key, known, generation, len(asked.inputs) + len(asked.outputs))
        return known

    def _remember(
        self, payload: bytes, key: bytes, known: _Known, generation: int, argument_count: int
    ) -> None:
        size_bytes = len(key) + ARGUMENT_BYTES * argument_count
        with self._lock:
            if generation != self._generation:
                return
            if self._remembered_bytes + size_bytes > REMEMBERED_BYTES_MAX:
                self._forget_remembered()
                if self._answers is not None:
                    self._answers.clear()
            elif len(self._remembered) >= REMEMBERED_REQUESTS_MAX:
                self._forget_remembered()
            self._remembered[key] = known
            self._remembered_bytes += size_bytes
            if self._native is not None:
                self._learnt = payload, generation
