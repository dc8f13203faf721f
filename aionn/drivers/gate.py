"""Who runs next on a device's slots, inside of its driver.

Owns the waiting order (priority, then earliest deadline, then arrival), the slots, and the threads that run work. A burst's
listener thread takes a slot and runs on itself; other work is run by the gate's own threads. Both wait in one queue.

Invariants:
1. No more than ``slot_count`` pieces of work run at once.
2. A slot that becomes free goes to the first in the order; nobody overtakes by being on another path.
3. The queue is bounded: more than ``WAITING_MAX`` entries are refused with RESOURCE_EXHAUSTED.

The queue of the scheduler (``aionn.scheduler``) orders the work of one application; this one orders what several clients sent.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from aionn.errors import DeviceUnavailable, Error, GeneralFailure, ResourceExhausted
from aionn.hal import TIME_MAX_NS, Priority
from aionn.hal.real_work import real_work
from fences import SyncFence

__all__ = ["WAITING_MAX", "SlotGate", "run_on_gate"]

_T = TypeVar("_T")

WAITING_MAX = 1 << 17
"""Most entries that may wait at one device: a flood of 10^5 executions still fits, at some 100 bytes each."""


class SlotGate:
    """A device's slots.

    Args:
        slot_count: How many pieces of work may run at once.
        name: Names the threads.
    """

    def __init__(self, slot_count: int, *, name: str) -> None:
        self._lock = threading.Lock()
        self._free = slot_count
        self._slot_count = slot_count
        self._name = name
        self._heap: list[tuple[int, int, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __str__(self) -> str:
        return self._name

    def _enter(self, priority: Priority, deadline_ns: int | None, start: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise DeviceUnavailable(f"{self._name}: the device is closed")
            if len(self._heap) >= WAITING_MAX:
                raise ResourceExhausted(
                    f"{self._name}: {WAITING_MAX} executions wait already", transient=True
                )
            key = (-priority, TIME_MAX_NS if deadline_ns is None else deadline_ns, next(self._sequence))
            heapq.heappush(self._heap, (*key, start))
            self._dispatch()

    def _dispatch(self) -> None:
        while self._free > 0 and self._heap:
            self._free -= 1
            heapq.heappop(self._heap)[3]()

    def _enter_at_once(self) -> bool:
        """Takes a slot that is free while nobody waits; False where there is none."""
        with self._lock:
            if self._closed or self._free <= 0 or self._heap:
                return False
            self._free -= 1
            return True

    def _release(self) -> None:
        with self._lock:
            self._free += 1
            if self._heap:
                self._dispatch()

    def slot(self, priority: Priority, deadline_ns: int | None) -> _Slot:
        """A slot for the calling thread, as a context manager; entering blocks until it is this caller's turn."""
        return _Slot(self, priority, deadline_ns)

    def submit(self, priority: Priority, deadline_ns: int | None, job: Callable[[], None]) -> None:
        """Runs ``job`` on one of the gate's threads when its turn comes. It must not raise.

        Raises:
            ResourceExhausted: Too much waits already.
            DeviceUnavailable: The gate is closed.
        """
        self._start_threads()
        self._enter(priority, deadline_ns, lambda: self._jobs.put(job))

    def _start_threads(self) -> None:
        with self._lock:
            missing = 0 if self._closed else self._slot_count - len(self._threads)
            for _ in range(missing):
                thread = threading.Thread(target=self._work, name=f"aionn-{self._name}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                del job  # It holds arguments and results; this thread may wait for the next one for ever.
                self._release()

    def close(self) -> None:
        """Refuses new work, lets running work end, and joins the threads. What still waits is run first. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for _ in self._threads:
            # The end mark queues behind the work that has its slot; work that waits for a slot is started by _release before.
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


class _Slot:
    """The calling thread's turn."""

    __slots__ = ("_deadline_ns", "_gate", "_priority")

    def __init__(self, gate: SlotGate, priority: Priority, deadline_ns: int | None) -> None:
        self._gate = gate
        self._priority = priority
        self._deadline_ns = deadline_ns

    def __enter__(self) -> None:
        if self._gate._enter_at_once():
            return
        turn = threading.Lock()
        turn.acquire()
        self._gate._enter(self._priority, self._deadline_ns, turn.release)
        turn.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._gate._release()


async def run_on_gate(
    gate: SlotGate, priority: Priority, deadline_ns: int | None, call: Callable[[Callable[[], bool]], _T]
) -> _T:
    """Runs ``call`` on a thread of the gate and returns what it returns. Cancelled: ``call``'s argument turns True."""
    cancelled = threading.Event()
    outcome: list[_T | BaseException] = []

    def job() -> None:
        try:
            outcome.append(call(cancelled.is_set))
        except Error as e:
            outcome.append(e)
        except Exception as e:
            failure = GeneralFailure(f"{gate}: {type(e).__name__}: {e}")
            failure.__cause__ = e
            outcome.append(failure)
        done.signal()

    done = SyncFence("execution")
    try:
        with real_work(f"work on {gate}"):
            gate.submit(priority, deadline_ns, job)
            await done
    except BaseException:
        cancelled.set()
        raise
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    return result
