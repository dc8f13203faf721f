"""The driver's end of a burst: one listening thread that serves any executor.

Owns the loop: read a packet, learn unknown memories, execute, answer. Drivers never see a queue.

Invariants:
1. Every request that was read is answered by exactly one result, at worst by a short failed one.
2. A malformed request ends with GENERAL_FAILURE and the loop goes on; a corrupt queue ends the burst.
3. ``stop`` ends the thread promptly unless the executor itself hangs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import fmq
from aionn.burst.packets import (
    BurstRequest,
    BurstResult,
    MalformedPacket,
    decode_request,
    encode_result,
    failed_result,
    result_of,
)
from aionn.burst.session import SlotCache
from aionn.errors import Error, ErrorStatus, InvalidArgument, status_of
from aionn.hal import ExecutionResult, Memory, Request

__all__ = ["BurstServer"]

_logger = logging.getLogger("aionn.burst")

REMEMBERED_REQUESTS_MAX = 256
"""Most decoded packets kept: a stream sends the same packet for the same frame slot again and again."""


class BurstServer:
    """Serves one burst.

    Args:
        requests: Queue that the client writes; owned by this object from now on.
        results: Queue that the client reads; owned by this object from now on.
        execute: Executes a request on the calling thread and may block.
        get_memories: Asks the client for the memories of slots and may block.
        name: Names the thread.
    """

    def __init__(
        self,
        requests: fmq.MessageQueue,
        results: fmq.MessageQueue,
        *,
        execute: Callable[[Request, bool], ExecutionResult],
        get_memories: Callable[[Sequence[int]], Sequence[Memory]],
        name: str,
    ) -> None:
        self._requests = requests
        self._results = results
        self._execute = execute
        self._get_memories = get_memories
        self._cache = SlotCache()
        self._lock = threading.Lock()
        self._remembered: dict[bytes, tuple[BurstRequest, Request]] = {}
        self._stopping = False
        self._is_serving = False
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)

    def start(self) -> None:
        """Starts listening."""
        self._thread.start()

    def free_slot(self, slot: int) -> None:
        """Forgets a memory, from any thread; unknown slots are ignored."""
        with self._lock:
            self._cache.free(slot)
            # A remembered request holds the memories of its slots.
            self._remembered.clear()

    def forget_memories(self) -> bool:
        """Gives back every memory it knows, from any thread; the next request asks the client for its own again.

        Returns:
            False, and nothing happened, while a request is being served.
        """
        with self._lock:
            if self._is_serving:
                return False
            self._cache = SlotCache()
            self._remembered.clear()
            return True

    def stop(self) -> None:
        """Ends the thread and closes both queues. Idempotent. Blocks until a running execution has ended."""
        self._stopping = True
        self._requests.interrupt()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._requests.close()
        self._results.close()

    def _listen(self) -> None:
        try:
            while not self._stopping:
                payload = self._requests.read_message_blocking(None)
                if payload is None or self._stopping:
                    break
                with self._lock:
                    self._is_serving = True
                result = self._serve(payload)
                with self._lock:
                    self._is_serving = False
                self._answer(result)
                # Not kept while waiting for the next request: they hold memories.
                del payload, result
        except fmq.InterruptedQueue:
            pass
        except fmq.Error as e:
            _logger.warning("burst ended: %s", e)

    def _serve(self, payload: bytes) -> BurstResult:
        try:
            with self._lock:
                known = self._remembered.get(payload)
            burst_request, request = known if known is not None else self._learn(payload)
            return result_of(self._execute(request, burst_request.measure))
        except MalformedPacket as e:
            _logger.debug("malformed request: %s", e)
            return failed_result(ErrorStatus.GENERAL_FAILURE)
        except Error as e:
            _logger.debug("request failed: %s", e)
            return failed_result(status_of(e))

    def _learn(self, payload: bytes) -> tuple[BurstRequest, Request]:
        burst_request = decode_request(payload)
        with self._lock:
            missing = self._cache.missing(burst_request.slots)
        memories = self._get_memories(missing) if missing else ()
        with self._lock:
            self._cache.learn(missing, memories)
            if self._cache.missing(burst_request.slots):
                raise InvalidArgument("burst: a memory of the request was freed while the request was read")
            pools = self._cache.pools(burst_request.slots)
            request = Request(burst_request.inputs, burst_request.outputs, pools)
            if len(self._remembered) >= REMEMBERED_REQUESTS_MAX:
                self._remembered.clear()
            self._remembered[payload] = (burst_request, request)
        return burst_request, request

    def _answer(self, result: BurstResult) -> None:
        try:
            fits = self._results.write_message(encode_result(result))
        except fmq.CorruptQueue:
            raise
        except fmq.Error:
            fits = False
        if not fits:
            # The client would wait for ever for a result that does not fit: a short one says so.
            self._results.write_message(encode_result(failed_result(ErrorStatus.GENERAL_FAILURE)))
