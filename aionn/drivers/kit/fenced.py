"""Fenced execution for blocking drivers: wait for fences, take a slot, run, finish one fence.

Owns the life of one launch, and the alarm thread that fails a fence on time while its dependencies are still pending.

Invariants:
1. The launch's fence is finished exactly once; the first event (result, failed dependency, deadline, allowance) wins.
2. Nothing runs on an event loop: dependencies call back, and the gate's threads run.

Source: ``executeFenced`` and ``IFencedExecutionCallback`` of the NN HAL 1.3.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aionn.errors import Error, ErrorStatus, GeneralFailure, MissedDeadline, status_of
from aionn.hal import NO_TIMING, ExecutionResult, FencedTiming, Timing
from aionn.platform.real_work import begin_real_work
from aionn.platform.threads import start_thread
from fences import FenceStatus, SyncFence, merge

if TYPE_CHECKING:
    from aionn.drivers.kit.arguments import Arguments
    from aionn.drivers.kit.prepared import BlockingPreparedModel

__all__ = ["Alarm", "FencedLaunch"]


class Alarm:
    """Calls functions at given times, on one thread that is started when first needed.

    The functions must be quick and must not raise.
    """

    def __init__(self, now: Callable[[], int], *, name: str) -> None:
        self._now = now
        self._name = name
        self._condition = threading.Condition()
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def call_at(self, time_ns: int, function: Callable[[], None]) -> None:
        """Calls ``function`` once ``time_ns`` has come.

        Raises:
            ResourceExhausted: The thread cannot be started.
        """
        with self._condition:
            if self._closed:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                start_thread(thread, self._name)
                self._thread = thread
            heapq.heappush(self._heap, (time_ns, next(self._sequence), function))
            self._condition.notify()

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._closed and (not self._heap or self._heap[0][0] > self._now()):
                    left_s = (self._heap[0][0] - self._now()) / 1e9 if self._heap else None
                    self._condition.wait(None if left_s is None else max(0.0, min(left_s, 3600.0)))
                if self._closed:
                    return
                function = heapq.heappop(self._heap)[2]
            function()

    def close(self) -> None:
        """Forgets what was to come and joins the thread. Idempotent."""
        with self._condition:
            self._closed = True
            self._heap.clear()
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()


class FencedLaunch:
    """One fenced execution.

    Args:
        prepared: What runs.
        arguments: As ``bind_fenced`` gave them.
        measure: Whether timings are wanted.
        deadline_ns: Absolute; None means no deadline.
        loop_timeout_ns: For every WHILE; None for the default.
        duration_ns: Allowance after the last dependency; None means no limit.

    Attributes:
        fence: Finished with the execution.
    """

    def __init__(
        self,
        prepared: BlockingPreparedModel,
        arguments: Arguments,
        *,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        duration_ns: int | None,
    ) -> None:
        self._prepared = prepared
        # Let go when the launch is over: alarms and errors keep it for longer than memories may be kept.
        self._arguments: Arguments | None = arguments
        self._measure = measure
        self._deadline_ns = deadline_ns
        self._loop_timeout_ns = loop_timeout_ns
        self._duration_ns = duration_ns
        self._launched_ns = prepared.device.now()
        self._ready_ns = self._launched_ns
        self._outcome: tuple[ErrorStatus, FencedTiming] = (ErrorStatus.GENERAL_FAILURE, FencedTiming())
        self._lock = threading.Lock()
        self._is_over = False
        self.fence = SyncFence("fenced execution")

    def begin(self, wait_for: Sequence[SyncFence]) -> None:
        """Starts when all of ``wait_for`` have signalled; immediately if they have."""
        device = self._prepared.device
        if self._deadline_ns is not None:
            device.alarm.call_at(self._deadline_ns, lambda: self._expire("deadline"))
        merge([*wait_for]).add_callback(self._on_ready) if wait_for else self._on_ready(SyncFence.signalled())

    def _on_ready(self, fence: SyncFence) -> None:
        if fence.status == FenceStatus.FAILED:
            error = fence.error
            assert error is not None
            self._finish(error, ErrorStatus.GENERAL_FAILURE)
            return
        device = self._prepared.device
        self._ready_ns = device.now()
        limit_ns = self._deadline_ns
        if self._duration_ns is not None:
            allowance_ns = self._ready_ns + self._duration_ns
            limit_ns = allowance_ns if limit_ns is None else min(limit_ns, allowance_ns)
            try:
                device.alarm.call_at(allowance_ns, lambda: self._expire("allowance after its fences"))
            except Error as e:
                self._finish(e, status_of(e))
                return
        end = begin_real_work(f"fenced execution on {device.gate}")

        def job() -> None:
            try:
                self._run(limit_ns)
            finally:
                end()

        try:
            device.gate.submit(
                self._prepared.priority,
                limit_ns,
                job,
                owner=self._prepared.owner,
                model=self._prepared.identity,
            )
        except Error as e:
            end()
            self._finish(e, status_of(e))

    def _run(self, limit_ns: int | None) -> None:
        arguments = self._arguments
        if arguments is None or self.fence.status != FenceStatus.PENDING:
            return
        try:
            result = self._prepared.run_bound(
                arguments,
                measure=self._measure,
                deadline_ns=limit_ns,
                loop_timeout_ns=self._loop_timeout_ns,
                is_cancelled=lambda: self.fence.status != FenceStatus.PENDING,
            )
            if not result.output_sufficient_size:
                raise GeneralFailure("fenced execution: an output does not fit its buffer")
        except Error as e:
            # The fence keeps the error, the error its frames, and they what was computed with.
            traceback.clear_frames(e.__traceback__)
            self._finish(e, status_of(e))
            return
        if self._end((ErrorStatus.NONE, self._timing(result))):
            self._arguments = None
            self.fence.try_signal()
        else:
            arguments.fail()  # It was cancelled while it ran to its end.

    def _timing(self, result: ExecutionResult) -> FencedTiming:
        if not self._measure:
            return FencedTiming()
        end_ns = self._prepared.device.now()
        on_device_ns = result.timing.time_on_device_ns
        return FencedTiming(
            launched=Timing(on_device_ns, end_ns - self._launched_ns),
            fenced=Timing(on_device_ns, end_ns - self._ready_ns),
        )

    def _expire(self, what: str) -> None:
        error = MissedDeadline(f"fenced execution: its {what} passed", transient=True)
        self._finish(error, error.status)

    def _finish(self, error: BaseException, status: ErrorStatus) -> None:
        if self._end((status, FencedTiming(NO_TIMING, NO_TIMING))):
            arguments, self._arguments = self._arguments, None
            if arguments is not None:
                arguments.fail()
            self.fence.try_fail(error)

    def _end(self, outcome: tuple[ErrorStatus, FencedTiming]) -> bool:
        """Whether the caller is the first to end the launch, and so the one to finish its fence, in agreement with the outcome."""
        with self._lock:
            if self._is_over:
                return False
            self._is_over = True
            # The information is set first: code that sees the finished fence may query it.
            self._outcome = outcome
            return True

    async def get_execution_info(self) -> tuple[ErrorStatus, FencedTiming]:
        """Status and timings; GENERAL_FAILURE before completion."""
        if self.fence.status == FenceStatus.PENDING:
            return ErrorStatus.GENERAL_FAILURE, FencedTiming()
        return self._outcome
