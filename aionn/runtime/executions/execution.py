"""One execution: wait for fences, then for each step wait for a slot and run on the device, finish a fence.

Owns the life of an execution from the call to its result, and the rule that a slot is held until the device has really finished.

Invariants:
1. The fence of an execution is finished exactly once; the first answer wins, a later one is discarded.
2. The caller gets MissedDeadline at the deadline, not when the device is done.
3. A slot is released exactly once, after the device answered or died, whichever task was cancelled before.

Source: execution model of the NN HAL 1.3; "late" is defined at the caller because no engine stops immediately.
"""

from __future__ import annotations

import enum
import logging
import weakref
from collections.abc import Awaitable, Callable, Generator, Hashable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import anyio
import msgspec

from aionn.errors import (
    Error,
    ErrorStatus,
    ExecutionCancelled,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    status_of,
)
from aionn.hal import NO_TIMING, TIME_MAX_NS, Priority, Timing
from aionn.observability.tracing import section
from aionn.runtime.background import Background
from aionn.runtime.clock import now_ns
from aionn.runtime.executions.failures import clear_frames, own_error
from aionn.runtime.memory.arguments import Array, RequestArea
from aionn.runtime.placement.fallback import driver_error, may_fall_back
from aionn.scheduler.dispatcher import Dispatcher, Outcome
from aionn.scheduler.job import NEVER_NS, Job
from fences import FenceStatus, SyncFence, leaves, merge

__all__ = [
    "PRIORITY",
    "UNDER_WAY",
    "Execution",
    "ExecutionFence",
    "ExecutionState",
    "Result",
    "Turn",
    "failing",
    "is_told",
    "priority_of",
    "result_of",
    "sum_of",
    "tell_end",
]

_logger = logging.getLogger("aionn.execution")

FALLBACKS_TOLD_MAX = 64
"""Most fallbacks that a result reports, each once: a loop may fall back in every round."""


class Result(msgspec.Struct, frozen=True):
    """The result of an execution.

    Attributes:
        outputs: One array per output. From ``execute`` they are the caller's own; from a stream they are read-only views of shared
            memory, valid until the next result is asked for.
        timing: What was measured, counted from the launch: time in the driver has the wait for dependencies in it, which is the
            runtime's doing, but not the wait for the device's slot, see ``queued_ns``. None entries where nothing was measured.
        status: NONE; a result of another status is an exception instead.
        device: Name of the device that ran it, or names, in the order of the steps.
        fallback: What ran on the reference device instead, and why; empty where nothing did.
        queued_ns: From the call until a device slot was acquired, dependencies included.
        total_ns: From the call until the result was here.
        valid_until: What ends the validity of ``outputs``; empty where they are the caller's own, for good.
        dependencies_ns: From the call until this process saw that the last fence of ``wait_for`` had signalled; 0 where none had
            to be waited for.
    """

    outputs: tuple[Array, ...]
    timing: Timing = NO_TIMING
    status: ErrorStatus = ErrorStatus.NONE
    device: str = ""
    fallback: tuple[str, ...] = ()
    queued_ns: int = 0
    total_ns: int = 0
    valid_until: str = ""
    dependencies_ns: int = 0

    @property
    def fenced(self) -> Timing:
        """As ``timing``, counted from the moment that the last dependency signalled; equal to it without dependencies.

        Never more than ``timing``. Source: ``timingLaunched`` and ``timingFenced`` of the NN HAL 1.3.
        """
        in_driver_ns = self.timing.time_in_driver_ns
        if in_driver_ns is None or not self.dependencies_ns:
            return self.timing
        return Timing(self.timing.time_on_device_ns, in_driver_ns - self.dependencies_ns)


def priority_of(value: str | Priority) -> Priority:
    """A priority by name or value.

    Raises:
        InvalidArgument: There is no such priority.
    """
    try:
        return Priority[value.upper()] if isinstance(value, str) else Priority(value)
    except (KeyError, ValueError):
        names = ", ".join(p.name.lower() for p in Priority)
        raise InvalidArgument(f"priority: expected one of {names}, got {value!r}") from None


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
        run: Runs it there, on a slot that the caller holds, and returns the device's timing. Takes the memory and the limit.
        fall_back: Runs it on the reference device after ``run`` has failed; None where that is not allowed. Gives a sentence too.
        model: What its duration on the device is learnt by; None to learn nothing.
        declared_ns: The duration that the driver declares; None if it declares none.
    """

    dispatcher: Dispatcher
    run: Callable[[RequestArea, int | None], Awaitable[Timing]]
    fall_back: Callable[[RequestArea, int | None, Error], Awaitable[tuple[Timing, str]]] | None = None
    model: Hashable = None
    declared_ns: int | None = None

    def least_ns(self) -> int:
        """Its least duration, as far as is known."""
        return self.dispatcher.least_ns(self.model, self.declared_ns)

    def expected_ns(self) -> int:
        """Its expected duration."""
        return self.dispatcher.expected_ns(self.model, self.declared_ns)


class Cancellable(Protocol):
    """An object that can be requested to stop."""

    def cancel(self) -> object: ...


class Execution:
    """An execution under way. Awaiting it gives its ``Result`` or raises; cancelling an await leaves it as it is.

    Attributes:
        fence: Finished with the execution; others may wait for it.
        state: Where it is.
    """

    def __init__(
        self,
        prepare: Callable[[], RequestArea | Awaitable[RequestArea]],
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
        self._dependencies_ns = 0
        self._fallback: list[str] = []
        self._background: Background
        self._task: Cancellable | None = None
        self._turn: tuple[Turn, Job] | None = None
        self._lent_priority = Priority.LOW
        self._lent_urgent_ns = NEVER_NS
        self._timer: Cancellable | None = None
        self._result: Result | None = None
        self.fence: SyncFence = ExecutionFence(self)
        self.finished_ns = 0
        self.state = ExecutionState.WAITING_FOR_FENCES if wait_for else ExecutionState.WAITING_FOR_SLOT

    @property
    def deadline_ns(self) -> int | None:
        """Absolute limit: the deadline, or the end of the allowance if that is sooner; None means no limit."""
        return self._deadline_ns

    def start(self, background: Background) -> None:
        """Starts the work in the background, which outlives the caller."""
        self._background = background
        if self._wait_for:
            self._lend()
        else:
            self._begin_allowance(self._asked_ns)
        self._task = background.start_execution(self._run(), self._end)
        if self._deadline_ns is not None and self._timer is None:
            self._limit_at(self._deadline_ns)

    def _limit_at(self, limit_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Loop timers are floats and may fire a few ns early; the deadline then counts as passed.
        self._timer = self._background.at(limit_ns, self._expire)

    def _expire(self) -> None:
        if self.fence.status == FenceStatus.PENDING:
            where = self.state.value
            try:
                self._fail(MissedDeadline(f"execution: the deadline passed while {where}", transient=True))
            finally:  # A callback of the fence may interrupt the program.
                self._stop_waiting()

    async def _run(self) -> None:
        UNDER_WAY.set(weakref.ref(self))
        try:
            with section("LR_PE", self._device):
                if self._wait_for:
                    self._check_time()
                    await self._wait_for_fences()
                if len(self._turns) > 1:
                    self._check_time()
                with section("LR_PIO", "inputs"):
                    area = self._prepare()
                    self._area = area if isinstance(area, RequestArea) else await area
                timing = await self._take_turns(self._area)
                with section("LR_PR", "outputs"):
                    self._complete(self._area, timing)
        except Error as e:
            self.state = ExecutionState.FINISHED
            clear_frames(e)
            self._fail(e)
        except (anyio.get_cancelled_exc_class(), KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:
            self.state = ExecutionState.FINISHED
            clear_frames(e)
            self._fail(driver_error(e, "execution"))

    def _tell(self) -> None:
        status, _, took_ns = self.outcome()
        tell_end(self._device, self._priority, status, self._queued_ns, took_ns)
        for reason in self._fallback:
            _logger.debug("fallback: %s", reason)

    def _end(self, task: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._task = (
            None  # One that was cancelled refers to the frames that it ended in, and those to this object.
        )
        self.state = ExecutionState.FINISHED
        self._fail(ExecutionCancelled("execution: cancelled"))
        if self._result is None:
            clear_frames(self._error())
        self._finish(self._area)
        if self._report is not None:
            self._report(self)
        if is_told():
            self._tell()

    def outcome(self) -> tuple[ErrorStatus, Result | None, int]:
        """Status, result and nanoseconds from the call to the end, of one that has ended."""
        status = ErrorStatus.NONE if self._result is not None else status_of(self._error())
        return status, self._result, self.finished_ns - self._asked_ns

    async def _wait_for_fences(self) -> None:
        is_ready = all(fence.status != FenceStatus.PENDING for fence in self._wait_for)
        try:
            await merge([*self._wait_for])
        except Exception as e:
            failure = GeneralFailure(f"execution: a fence that it waits for has failed: {e}")
            raise failure from e
        ready_ns = now_ns()
        if not is_ready:
            self._dependencies_ns = ready_ns - self._asked_ns
        self._begin_allowance(ready_ns)

    def _begin_allowance(self, start_ns: int) -> None:
        """Counts the allowance from ``start_ns``; where it ends sooner than the deadline, its end is the deadline from now on."""
        if self._duration_ns is not None:
            limit_ns = min(start_ns + self._duration_ns, TIME_MAX_NS)
            if self._deadline_ns is None or limit_ns < self._deadline_ns:
                self._deadline_ns = limit_ns
                self._limit_at(limit_ns)

    def _check_time(self) -> None:
        """Refuses what all of its steps together cannot end in time, before anything is waited for.

        Raises:
            MissedDeadline: Even idle devices would need longer (persistent).
        """
        if self._deadline_ns is None:
            return
        least_ns = sum(turn.least_ns() for turn in self._turns)
        left_ns = self._deadline_ns - now_ns()
        if left_ns < least_ns:
            told = f"execution: even idle devices would need {least_ns} ns, and {max(0, left_ns)} ns are left"
            raise MissedDeadline(told, transient=False)

    def _lend(self) -> None:
        """Lends priority and urgency to what this waits for, and to what that waits for: a chain is as urgent as its end."""
        urgent_ns = min(self._lent_urgent_ns, NEVER_NS if self._deadline_ns is None else self._deadline_ns)
        chain = [(self, self._rank, urgent_ns)]
        for _ in range(LENT_MAX):
            if not chain:
                return
            follower, priority, urgent_ns = chain.pop(0)
            if urgent_ns != NEVER_NS:
                # Executions that it waits for must be done early enough to leave it its own time.
                urgent_ns = max(0, urgent_ns - sum(turn.expected_ns() for turn in follower._turns))
            for fence in follower._wait_for:
                for part in leaves(fence):
                    leader = part.execution() if isinstance(part, ExecutionFence) else None
                    if leader is not None and leader._borrow(priority, urgent_ns):
                        chain.append((leader, leader._rank, leader._lent_urgent_ns))

    def _borrow(self, priority: Priority, urgent_ns: int) -> bool:
        """Takes over what one that waits for this lends; whether that is more than it had."""
        if self.fence.status != FenceStatus.PENDING or (
            priority <= self._rank and urgent_ns >= self._lent_urgent_ns
        ):
            return False
        self._lent_priority = max(priority, self._lent_priority)
        self._lent_urgent_ns = min(urgent_ns, self._lent_urgent_ns)
        if self._turn is not None:
            turn, work = self._turn
            turn.dispatcher.hasten(work, self._lent_priority, self._lent_urgent_ns)
        return True

    @property
    def _rank(self) -> Priority:
        """Its class, or that of one that waits for it where that is higher."""
        return max(self._priority, self._lent_priority)

    def change_priority(self, priority: str | Priority) -> bool:
        """Changes the class of an execution that does not run yet; False if it runs or has ended.

        Raises:
            InvalidArgument: There is no such priority.
        """
        wanted = priority_of(priority)
        if self.state in (ExecutionState.RUNNING, ExecutionState.FINISHED):
            return False
        self._priority = wanted
        self._lend()
        return self._turn is None or self._turn[0].dispatcher.change_priority(self._turn[1], self._rank)

    def explain(self) -> str:
        """Why it is where it is, in some lines."""
        told = f"{self.state.value}, priority {self._rank.name}, deadline {self._deadline_ns}"
        return told if self._turn is None else f"{told}\n{self._turn[0].dispatcher.explain(self._turn[1])}"

    async def _take_turns(self, area: RequestArea) -> Timing:
        try:
            return sum_of([await self.take_turn(turn, area) for turn in self._turns])
        except Error as e:
            rescue = self._rescue
            if rescue is None or not may_fall_back(e) or self.fence.status != FenceStatus.PENDING:
                raise
            told = f"the whole model: {e}; ran on the reference device"
        timing = await self.take_turn(rescue, area)
        self._fallback.append(told)
        return timing

    async def take_turn(self, turn: Turn, area: RequestArea) -> Timing:
        """Waits for a slot and runs a step; steps of a control flow that is interpreted take their turns within its own.

        Raises:
            Error: The execution was cancelled before, or the step failed.
        """
        if self.fence.status != FenceStatus.PENDING:
            raise GeneralFailure("execution: cancelled before its next step")
        self.state = ExecutionState.WAITING_FOR_SLOT
        dispatcher = turn.dispatcher
        work = dispatcher.enter(
            priority=self._rank,
            deadline_ns=self._deadline_ns,
            model=turn.model,
            declared_ns=turn.declared_ns,
            urgent_ns=self._lent_urgent_ns,
        )
        self._turn = turn, work
        outcome: Outcome = "failed"
        try:
            await dispatcher.wait(work)
        except BaseException:
            self._turn = None
            raise
        try:
            if not self._queued_ns:
                self._queued_ns = now_ns() - self._asked_ns
            # From here on the device works: no caller's cancellation cancels this task, and the slot is held until the device has
            # answered.
            self.state = ExecutionState.RUNNING
            PRIORITY.set(self._rank)
            timing = await turn.run(area, self._deadline_ns)
            outcome = "ended"
            return timing
        except Exception as e:
            error = driver_error(e, "execution")
            try:
                if isinstance(error, MissedDeadline) and error.transient:
                    outcome = "late"  # Persistent: it was never begun.
                return await self._fall_back(turn, area, error)
            finally:
                del error  # It refers to this frame, and this frame to the execution.
        finally:
            self._turn = None
            dispatcher.release(work, outcome=outcome)

    async def _fall_back(self, turn: Turn, area: RequestArea, error: Error) -> Timing:
        """Runs a step elsewhere that failed, where that is allowed; raises why it failed otherwise."""
        try:
            if turn.fall_back is None or not may_fall_back(error) or self.fence.status != FenceStatus.PENDING:
                raise error from error.__cause__
            timing, told = await turn.fall_back(area, self._deadline_ns, error)
        finally:
            del error
        if told not in self._fallback and len(self._fallback) < FALLBACKS_TOLD_MAX:
            self._fallback.append(told)
        return timing

    def _complete(self, area: RequestArea, timing: Timing) -> None:
        self.state = ExecutionState.FINISHED  # Set before the fence signals, since a waiter may read it.
        if self.fence.status != FenceStatus.PENDING:
            return  # The caller has been notified already, and the time of that is kept.
        self.finished_ns = now_ns()
        outputs = area.outputs(self._outputs, copy=self._copy)
        # The devices' clocks began when nothing had to be waited for any more.
        if timing.time_in_driver_ns is not None:
            timing = Timing(timing.time_on_device_ns, timing.time_in_driver_ns + self._dependencies_ns)
        self._result = Result(
            outputs,
            timing,
            ErrorStatus.NONE,
            self._device,
            tuple(self._fallback),
            self._queued_ns,
            self.finished_ns - self._asked_ns,
            dependencies_ns=self._dependencies_ns,
        )
        self.fence.try_signal()

    def _fail(self, error: Error) -> None:
        if self.fence.status == FenceStatus.PENDING:
            self.finished_ns = now_ns()
            self.fence.try_fail(error)

    def _stop_waiting(self) -> None:
        if self.state != ExecutionState.RUNNING and self._task is not None:
            self._task.cancel()

    def cancel(self) -> None:
        """Gives the execution up: one that waits never runs; one that runs keeps its slot until the device is done, and its
        result is discarded. Awaiting the execution raises ``ExecutionCancelled``."""
        try:
            self._fail(ExecutionCancelled("execution: cancelled"))
        finally:
            self._stop_waiting()

    async def wait(self) -> Result:
        """Waits for the result.

        Raises:
            Error: The reason for the missing result.
        """
        try:
            await self.fence
        except Exception:
            raise own_error(self._error()) from None
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


UNDER_WAY: ContextVar[weakref.ref[Execution]] = ContextVar("execution under way")
"""The execution whose task this is. Weak: a task that is started here inherits the context, and may live as long as the runtime."""


PRIORITY: ContextVar[Priority | None] = ContextVar("priority of the execution under way", default=None)
"""The class that a driver shall give to what this task executes; None for that of its prepared model."""

LENT_MAX = 64
"""Number of executions of a chain whose urgency is raised immediately: each new link visits its whole chain again."""


class ExecutionFence(SyncFence):
    """The fence of an execution, which knows it, so that who waits for the one can hasten the other."""

    __slots__ = ("execution",)

    def __init__(self, execution: Execution) -> None:
        super().__init__("execution")
        # Weak: the two would otherwise live until the garbage collector comes.
        self.execution: weakref.ref[Execution] = weakref.ref(execution)


async def result_of(execution: Execution) -> Result:
    """Waits for an execution that has no other user; cancelled, it cancels the execution."""
    try:
        return await execution
    except BaseException:
        execution.cancel()
        raise


def failing(error: Error) -> Callable[[RequestArea, int | None], Awaitable[Timing]]:
    """A step that raises its earlier failure, so that an execution continues with the fallback."""

    async def run(area: RequestArea, deadline_ns: int | None) -> Timing:
        raise error

    return run


def is_told() -> bool:
    """Whether the ends of executions are logged."""
    return _logger.isEnabledFor(logging.DEBUG)


def tell_end(device: str, priority: Priority, status: ErrorStatus, queued_ns: int, took_ns: int) -> None:
    """Logs how an execution ended."""
    told = (device, priority.name, status.name, queued_ns, took_ns)
    _logger.debug("on %s, priority %s: %s, %d ns until its turn, %d ns in all", *told)


def sum_of(timings: Sequence[Timing]) -> Timing:
    """The timing of all steps; None where one was not measured."""
    on_device = [t.time_on_device_ns for t in timings if t.time_on_device_ns is not None]
    in_driver = [t.time_in_driver_ns for t in timings if t.time_in_driver_ns is not None]
    return Timing(
        sum(on_device) if len(on_device) == len(timings) else None,
        sum(in_driver) if len(in_driver) == len(timings) else None,
    )
