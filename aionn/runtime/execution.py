"""One execution: wait for fences, then for each step wait for a slot and run on the device, finish a fence.

Owns the life of an execution from the call to its result, and the rule that a slot is held until the device has really finished.

Invariants:
1. The fence of an execution is finished exactly once; the first answer wins, a later one is thrown away.
2. The caller hears of a missed deadline at the deadline, not when the device is done.
3. A slot is given back exactly once, after the device answered or died, whoever cancelled meanwhile.

Source: execution model of the NN HAL 1.3; "late" is defined at the caller because no engine stops at once.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from aionn.errors import (
    Error,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    status_of,
)
from aionn.hal import NO_TIMING, Priority, Timing
from aionn.hal.tracing import section
from aionn.runtime.arguments import Array, RequestArea
from aionn.runtime.background import Background
from aionn.runtime.clock import now_ns
from aionn.runtime.fallback import may_fall_back
from aionn.scheduler.dispatcher import Dispatcher
from fences import FenceStatus, SyncFence, merge

__all__ = ["Execution", "ExecutionState", "Result", "Turn", "check_fences"]


class Result(msgspec.Struct, frozen=True):
    """What an execution gave.

    Attributes:
        outputs: One array per output. From ``execute`` they are the caller's own; from a stream they are read-only views of shared
            memory, valid until the next result is asked for.
        timing: What the device measured, None entries where it was not asked.
        status: NONE; a result of another status is an exception instead.
        device: Name of the device that ran it, or names, in the order of the steps.
        fallback: What ran on the reference device instead, and why; empty where nothing did.
        queued_ns: From the call until the device's slot was had, dependencies included.
        total_ns: From the call until the result was here.
    """

    outputs: tuple[Array, ...]
    timing: Timing = NO_TIMING
    status: ErrorStatus = ErrorStatus.NONE
    device: str = ""
    fallback: tuple[str, ...] = ()
    queued_ns: int = 0
    total_ns: int = 0


class ExecutionState(enum.Enum):
    """Where an execution is in its life."""

    WAITING_FOR_FENCES = "waiting for fences"
    WAITING_FOR_SLOT = "waiting for the device"
    RUNNING = "running"
    FINISHED = "finished"


class Turn(NamedTuple):
    """One step of an execution.

    Attributes:
        dispatcher: The slots of the device that runs it.
        run: Runs it there, on a slot that is had, and gives what the device measured. Takes the memory and the limit.
        fall_back: Runs it on the reference device after ``run`` has failed; None where that is not allowed. Gives a sentence too.
    """

    dispatcher: Dispatcher
    run: Callable[[RequestArea, int | None], Awaitable[Timing]]
    fall_back: Callable[[RequestArea, int | None, Error], Awaitable[tuple[Timing, str]]] | None = None


class Cancellable(Protocol):
    """What can be told to stop."""

    def cancel(self) -> object: ...


class Execution:
    """An execution under way. Awaiting it gives its ``Result`` or raises; cancelling an await leaves it as it is.

    Attributes:
        fence: Finished with the execution; others may wait for it.
        state: Where it is.
    """

    def __init__(
        self,
        prepare: Callable[[], RequestArea],
        turns: Sequence[Turn],
        outputs: Sequence[int],
        *,
        device: str,
        priority: Priority,
        deadline_ns: int | None,
        duration_ns: int | None = None,
        wait_for: Sequence[SyncFence] = (),
        copy: bool = True,
        rescue: Turn | None = None,
        report: Callable[[Execution], None] | None = None,
        finish: Callable[[RequestArea | None], None] = lambda area: None,
    ) -> None:
        self._prepare = prepare
        self._turns = turns
        self._outputs = outputs
        self._area: RequestArea | None = None
        self._device = device
        self._priority = priority
        self._deadline_ns = deadline_ns
        self._duration_ns = duration_ns
        self._wait_for = wait_for
        self._copy = copy
        self._rescue = rescue
        self._report = report
        self._finish = finish
        self._asked_ns = now_ns()
        self._queued_ns = 0
        self._fallback: list[str] = []
        self._background: Background
        self._task: Cancellable
        self._timer: Cancellable | None = None
        self._result: Result | None = None
        self.fence = SyncFence("execution")
        self.finished_ns = 0
        self.state = ExecutionState.WAITING_FOR_FENCES if wait_for else ExecutionState.WAITING_FOR_SLOT

    @property
    def deadline_ns(self) -> int | None:
        """Absolute limit: the deadline, or the allowance after the fences where that ends sooner; None for none."""
        return self._deadline_ns

    def start(self, background: Background) -> None:
        """Starts the work in the background, which outlives the caller."""
        self._background = background
        self._task = background.start_execution(self._run(), self._end)
        if self._deadline_ns is not None:
            self._limit_at(self._deadline_ns)

    def _limit_at(self, limit_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # A clock that is told in floats may ring a little early: the deadline has passed at the next nanosecond.
        self._timer = self._background.at(limit_ns, self._expire)

    def _expire(self) -> None:
        if self.fence.status == FenceStatus.PENDING:
            where = self.state.value
            self._fail(MissedDeadline(f"execution: the deadline passed while {where}", transient=True))
            self._stop_waiting()

    async def _run(self) -> None:
        try:
            with section("LR_PE", self._device):
                if self._wait_for:
                    await self._wait_for_fences()
                with section("LR_PIO", "inputs"):
                    self._area = self._prepare()
                timing = await self._take_turns(self._area)
                with section("LR_PR", "outputs"):
                    self._complete(self._area, timing)
        except Error as e:
            self.state = ExecutionState.FINISHED
            self._fail(e)
        except Exception as e:
            self.state = ExecutionState.FINISHED
            failure = GeneralFailure(f"execution: {type(e).__name__}: {e}")
            failure.__cause__ = e
            self._fail(failure)

    def _end(self, task: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.state = ExecutionState.FINISHED
        self._fail(GeneralFailure("execution: cancelled"))
        self._finish(self._area)
        if self._report is not None:
            self._report(self)

    def outcome(self) -> tuple[ErrorStatus, Result | None, int]:
        """Status, result and nanoseconds from the call to the end, of one that has ended."""
        status = ErrorStatus.NONE if self._result is not None else status_of(self._error())
        return status, self._result, self.finished_ns - self._asked_ns

    async def _wait_for_fences(self) -> None:
        try:
            await merge([*self._wait_for])
        except Exception as e:
            failure = GeneralFailure(f"execution: a fence that it waits for has failed: {e}")
            raise failure from e
        if self._duration_ns is not None:
            limit_ns = now_ns() + self._duration_ns
            if self._deadline_ns is None or limit_ns < self._deadline_ns:
                self._deadline_ns = limit_ns
                self._limit_at(limit_ns)

    async def _take_turns(self, area: RequestArea) -> Timing:
        try:
            return _sum_of([await self._take_turn(turn, area) for turn in self._turns])
        except Error as e:
            rescue = self._rescue
            if rescue is None or not may_fall_back(e) or self.fence.status != FenceStatus.PENDING:
                raise
            error = e
        timing = await self._take_turn(rescue, area)
        self._fallback.append(f"the whole model: {error}; ran on the reference device")
        return timing

    async def _take_turn(self, turn: Turn, area: RequestArea) -> Timing:
        if self.fence.status != FenceStatus.PENDING:
            raise GeneralFailure("execution: given up before its next step")
        self.state = ExecutionState.WAITING_FOR_SLOT
        work = await turn.dispatcher.acquire(priority=self._priority, deadline_ns=self._deadline_ns)
        try:
            if not self._queued_ns:
                self._queued_ns = now_ns() - self._asked_ns
            # From here on the device works: whoever gives up, nothing cancels this task, and the slot is held until the device
            # has answered.
            self.state = ExecutionState.RUNNING
            return await self._run_or_fall_back(turn, area)
        finally:
            turn.dispatcher.release(work)

    async def _run_or_fall_back(self, turn: Turn, area: RequestArea) -> Timing:
        try:
            return await turn.run(area, self._deadline_ns)
        except Error as e:
            if turn.fall_back is None or not may_fall_back(e) or self.fence.status != FenceStatus.PENDING:
                raise
            timing, told = await turn.fall_back(area, self._deadline_ns, e)
        self._fallback.append(told)
        return timing

    def _complete(self, area: RequestArea, timing: Timing) -> None:
        self.finished_ns = now_ns()
        self.state = ExecutionState.FINISHED  # Before the fence: who is woken by it may look.
        if self.fence.status != FenceStatus.PENDING:
            return
        outputs = area.outputs(self._outputs, copy=self._copy)
        self._result = Result(
            outputs,
            timing,
            ErrorStatus.NONE,
            self._device,
            tuple(self._fallback),
            self._queued_ns,
            self.finished_ns - self._asked_ns,
        )
        self.fence.try_signal()

    def _fail(self, error: Error) -> None:
        if self.fence.status == FenceStatus.PENDING:
            self.finished_ns = now_ns()
            self.fence.try_fail(error)

    def _stop_waiting(self) -> None:
        if self.state != ExecutionState.RUNNING:
            self._task.cancel()

    def cancel(self) -> None:
        """Gives the execution up: one that waits never runs; one that runs keeps its slot until the device is done, and its
        result is thrown away."""
        self._fail(GeneralFailure("execution: cancelled"))
        self._stop_waiting()

    async def wait(self) -> Result:
        """Waits for the result.

        Raises:
            Error: Why there is none.
        """
        try:
            await self.fence
        except Exception:
            raise self._error() from None
        assert self._result is not None, "a signalled execution has a result"
        return self._result

    def _error(self) -> Error:
        error = self.fence.error
        cause: BaseException | None = error.__cause__ if error is not None else None
        if isinstance(cause, Error):
            return cause
        return GeneralFailure(str(error))

    def __await__(self) -> Generator[Any, None, Result]:
        return self.wait().__await__()


def _sum_of(timings: Sequence[Timing]) -> Timing:
    """What all steps took; None where one was not measured."""
    on_device = [t.time_on_device_ns for t in timings if t.time_on_device_ns is not None]
    in_driver = [t.time_in_driver_ns for t in timings if t.time_in_driver_ns is not None]
    return Timing(
        sum(on_device) if len(on_device) == len(timings) else None,
        sum(in_driver) if len(in_driver) == len(timings) else None,
    )


def check_fences(wait_for: Sequence[SyncFence]) -> None:
    """Refuses fences that have failed already.

    Raises:
        InvalidArgument: One has, or is no fence.
    """
    for index, fence in enumerate(wait_for):
        if not isinstance(fence, SyncFence):
            raise InvalidArgument(
                f"wait_for, fence {index}: expected a SyncFence, got a {type(fence).__name__}"
            )
        if fence.status == FenceStatus.FAILED:
            raise InvalidArgument(f"wait_for, fence {index}: has failed already: {fence.error}")
