"""Fenced execution: wait for fences, launch, finish one fence.

Owns the life of one fenced execution, for blocking drivers and for those on the event loop alike. The device launches.

Invariants:
1. The fence is finished exactly once; the first event (result, failed dependency, deadline, allowance, end of the device) wins.
2. Nothing waits here: dependencies call back, timers call, and the end of the launch calls.
3. A launch whose fence has finished otherwise is cancelled.

Source: ``executeFenced`` and ``IFencedExecutionCallback`` of the NN HAL 1.3.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from aionn.drivers.kit.arguments import Arguments
from aionn.errors import (
    DeviceUnavailable,
    Error,
    ErrorStatus,
    GeneralFailure,
    MissedDeadline,
    general_failure_of,
    status_of,
)
from aionn.hal import FencedTiming, Launch, Timing
from fences import FenceStatus, SyncFence, merge

__all__ = ["FencedLaunch", "Timers"]


class Timers(Protocol):
    """A device's clock, and the thread in which its launches begin and end."""

    @property
    def now(self) -> Callable[[], int]:
        """The clock of its deadlines."""
        ...

    def call_at(self, time_ns: int, function: Callable[[], None]) -> Callable[[], None]:
        """Calls a function once ``time_ns`` has come; returns what prevents that. Raises ``ResourceExhausted``."""
        ...

    def call(self, function: Callable[[], None]) -> None:
        """Calls a function in a thread in which the device can launch; immediately if this is one."""
        ...


class FencedLaunch:
    """One fenced execution.

    Args:
        timers: The device.
        launch: Launches the bound request with the given deadline.
        arguments: As ``bind_fenced`` gave them.
        measure: Whether timings are wanted.
        deadline_ns: Absolute; None means no deadline.
        duration_ns: Allowance after the last dependency; None means no limit.

    Attributes:
        fence: Finished with the execution.
    """

    def __init__(
        self,
        timers: Timers,
        launch: Callable[[int | None], Launch],
        arguments: Arguments,
        *,
        measure: bool,
        deadline_ns: int | None,
        duration_ns: int | None,
    ) -> None:
        self._timers = timers
        # Dropped when it is over: timers and errors keep this object for longer than memories may be kept.
        self._launch: Callable[[int | None], Launch] | None = launch
        self._arguments: Arguments | None = arguments
        self._measure = measure
        self._deadline_ns = deadline_ns
        self._duration_ns = duration_ns
        self._launched_ns = timers.now()
        self._ready_ns = self._launched_ns
        self._outcome: tuple[ErrorStatus, FencedTiming] = (ErrorStatus.GENERAL_FAILURE, FencedTiming())
        self._lock = threading.Lock()
        self._is_over = False
        self._stops: list[Callable[[], None]] = []
        self.fence = SyncFence("fenced execution")

    def begin(self, wait_for: Sequence[SyncFence]) -> None:
        """Launches when all of ``wait_for`` have signalled; immediately if they have."""
        if self._deadline_ns is not None:
            self._expire_at(self._deadline_ns, "deadline")
        ready = merge([*wait_for]) if wait_for else SyncFence.signalled()
        # The wait is closed if the launch is over first: a fence that never signals would keep this object without a limit.
        self._stop_with(ready.close)
        ready.add_callback(lambda ready: self._timers.call(lambda: self._on_ready(ready)))

    def close(self) -> None:
        """Its device is closed. A launch of it ends with the device."""
        error = DeviceUnavailable("fenced execution: the device was closed")
        self._timers.call(lambda: self._fail(error, error.status))

    def _expire_at(self, time_ns: int, what: str) -> None:
        def expire() -> None:
            error = MissedDeadline(f"fenced execution: its {what} passed", transient=True)
            self._fail(error, error.status)

        self._stop_with(self._timers.call_at(time_ns, expire))

    def _stop_with(self, stop: Callable[[], None]) -> None:
        """Has ``stop`` called when it is over: now, where another thread has ended it already."""
        with self._lock:
            if not self._is_over:
                self._stops.append(stop)
                return
        stop()

    def _on_ready(self, ready: SyncFence) -> None:
        if ready.status == FenceStatus.FAILED:
            error = ready.error
            assert error is not None
            failure = GeneralFailure(f"fenced execution: a fence that it waits for has failed: {error}")
            failure.__cause__ = error
            self._fail(failure, failure.status, origin=error.origin)
            return
        arguments, launch = self._arguments, self._launch
        if arguments is None or launch is None:
            return  # It is over.
        self._ready_ns = self._timers.now()
        limit_ns = self._deadline_ns
        try:
            if self._duration_ns is not None:
                allowance_ns = self._ready_ns + self._duration_ns
                limit_ns = allowance_ns if limit_ns is None else min(limit_ns, allowance_ns)
                self._expire_at(allowance_ns, "allowance after its fences")
            launched = launch(limit_ns)
        except BaseException as e:
            self._fail_with(e)
            return
        launched.done.add_callback(functools.partial(self._on_done, launched, arguments))
        self.fence.add_callback(lambda _: self._timers.call(launched.cancel))

    def _on_done(self, launched: Launch, arguments: Arguments, _: SyncFence) -> None:
        try:
            result = launched.outcome()
            if not result.output_sufficient_size:
                raise GeneralFailure("fenced execution: an output does not fit its buffer")
        except BaseException as e:
            # The fence keeps the error, the error its frames, and the frames the arguments.
            traceback.clear_frames(e.__traceback__)
            self._fail_with(e)
            return
        if self._end((ErrorStatus.NONE, self._timing(result.timing))):
            self.fence.try_signal()
        else:
            arguments.fail()  # It was cancelled while it ran to its end.

    def _fail_with(self, raised: BaseException) -> None:
        """Ends it with whatever the device raised: its fence has waiters."""
        bare = raised.with_traceback(None)
        error = bare if isinstance(bare, Error) else general_failure_of(bare, "fenced execution")
        self._fail(error, status_of(error))

    def _timing(self, timing: Timing) -> FencedTiming:
        if not self._measure:
            return FencedTiming()
        end_ns, on_device_ns = self._timers.now(), timing.time_on_device_ns
        return FencedTiming(
            launched=Timing(on_device_ns, end_ns - self._launched_ns),
            fenced=Timing(on_device_ns, end_ns - self._ready_ns),
        )

    def _fail(self, error: BaseException, status: ErrorStatus, *, origin: str | None = None) -> None:
        arguments = self._arguments
        if self._end((status, FencedTiming())):
            if arguments is not None:
                arguments.fail()
            self.fence.try_fail(error, origin=origin)

    def _end(self, outcome: tuple[ErrorStatus, FencedTiming]) -> bool:
        """Whether the caller is the first to end it, and so the one to finish its fence, in agreement with the outcome."""
        with self._lock:
            if self._is_over:
                return False
            self._is_over = True
            # The information is set first: code that sees the finished fence may query it.
            self._outcome = outcome
            stops, self._stops = self._stops, []
        self._arguments = self._launch = None
        for stop in stops:
            stop()
        return True

    async def get_execution_info(self) -> tuple[ErrorStatus, FencedTiming]:
        """Status and timings; GENERAL_FAILURE before completion."""
        if self.fence.status == FenceStatus.PENDING:
            return ErrorStatus.GENERAL_FAILURE, FencedTiming()
        return self._outcome
