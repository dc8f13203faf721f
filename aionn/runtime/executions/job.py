"""The one way to execute: ``run_job`` waits for fences, fills memory, runs each step on a slot of its device, gives the result.

``Compilation.execute``, ``Burst.execute``, reusable executions and the workers of a stream await it in their own task;
``execution`` starts a task for it where others wait for the end. ``ExecutionJob`` is an execution as the runtime sees it, and not
the job that a device's dispatcher schedules: an execution has one of those for each of its steps.

Owns the rule that a device's slot and the memory of an execution stay taken until the device is done, whether or not a caller
still waits: ``_landed`` releases them, and ``_launch`` where nothing was launched.

Invariants:
1. A slot is released exactly once: when its launch is done, or immediately where the launch was rejected.
2. The caller gets MissedDeadline at the deadline, not when the device is done.
3. A caller that leaves, cancelled or late, leaves nothing that waits; a launch on a device runs to its end without a task.
4. An exception of the driver is an ``Error`` for the caller, and falls back only where that is allowed.

Source: execution model of the NN HAL 1.3; "late" is defined at the caller because no engine stops immediately.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import anyio
import msgspec

from aionn.errors import (
    DeadObject,
    DeviceUnavailable,
    Error,
    ErrorStatus,
    ExecutionCancelled,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    general_failure_of,
    status_of,
)
from aionn.hal import (
    TIME_MAX_NS,
    ExecutionResult,
    Launch,
    LaunchBase,
    Priority,
    Timing,
    ask_to_stop,
    duration_text,
    passed_before_start,
)
from aionn.hal.callers import ReservedFrame
from aionn.observability.tracing import section
from aionn.platform.loops import is_cancelled
from aionn.runtime.background import Background, Cancelled
from aionn.runtime.clock import now_ns
from aionn.runtime.executions.background_launch import BackgroundLaunch
from aionn.runtime.executions.results import ExecutionState, Result, sum_of
from aionn.runtime.executions.stepping import GROWTH_TRIES_MAX, Step, output_too_small
from aionn.runtime.memory.arguments import RequestArea
from aionn.runtime.metrics.figures import ExecutionFigures
from aionn.runtime.placement.fallback import driver_error, may_fall_back
from aionn.runtime.recovery.prepared import RecoveringPreparedModel
from aionn.scheduler.bandwidth import Arrivals
from aionn.scheduler.dispatcher import Dispatcher, Outcome, TaskJob
from aionn.scheduler.job import NEVER_NS, JobState
from fences import FenceError, FenceStatus, SyncFence, merge

__all__ = ["ExecutionJob", "JobOwner", "ended", "outcome_of_end", "run_direct", "run_job", "run_step"]

_logger = logging.getLogger("aionn.execution")

FALLBACK_MESSAGES_MAX = 64
"""Most fallbacks that a result reports, each once: a loop may fall back in every round."""


class JobOwner(NamedTuple):
    """The common part of all executions of one compilation or burst.

    Attributes:
        background: Where the runtime's tasks live.
        outputs: Keys of what they give.
        device: Names of the devices, as results give them.
        rescue: The whole model on the reference device, for where one of several steps has failed there as well; None where that
            is not allowed, and for one step, whose own fallback is the same.
        report: Called at the end of each with its status, its result and nanoseconds since the call; None without listeners.
        figures: Counts them; None without metrics.
    """

    background: Background
    outputs: Sequence[int]
    device: str
    rescue: Step | None = None
    report: Callable[[ErrorStatus, Result | None, int], None] | None = None
    figures: ExecutionFigures | None = None


class ExecutionJob(msgspec.Struct, eq=False):
    """One execution: what was asked for, and how far it is. ``run_job`` runs it once.

    Attributes:
        owner: The part that it has in common with others.
        steps: In their order.
        finish: Called once, when neither the execution nor a device uses its memory any more.
        priority: Its class.
        area: Its memory; None until ``fill`` has filled it.
        fill: Fills memory with the inputs, where ``area`` is None: gives it immediately, or is awaited where that takes long.
        deadline_ns: Absolute limit: the deadline, or the end of the allowance if that is sooner; None means no limit.
        duration_ns: Allowance, counted from the last fence; None means no allowance.
        wait_for: Fences that it waits for.
        measure: Whether timings are wanted.
        loop_timeout_ns: For every WHILE; None for the default.
        server: Decides about it as a frame of a reserved stream; None for best effort.
        served: See ``Conditions``.
        copy: Whether the outputs are copied out of the memory; False gives read-only views.
        state: Where it is. RUNNING also after its caller has left, until the device is done.
        asked_ns: When it was asked for.
        queued_ns: From the call until the first slot was acquired; 0 before that.
        dependencies_ns: From the call until its last fence had signalled; 0 where none had to be waited for.
        landed_ns: When a device was done with its last step so far.
        fallbacks: Parts that ran on the reference device, with the reason.
        lent_priority: The highest class of those that wait for it.
        urgent_ns: When it must be done for those that wait for it; ``NEVER_NS`` for no matter when.
        dispatcher: Of the slot that it waits for, or has.
        work: Its place there; None where it has none.
        launched: A launch that began before ``run_job`` and has ended, in place of the first one; None otherwise.
        left_count: Number of launches that ``run_job`` has left to devices that are not done with them.
        has_left: Whether ``run_job`` is over.
        deferred: To be called when no launch is left.
    """

    owner: JobOwner
    steps: Sequence[Step]
    finish: Callable[[ExecutionJob], None]
    priority: Priority
    area: RequestArea | None = None
    fill: Callable[[], RequestArea | Awaitable[RequestArea]] | None = None
    deadline_ns: int | None = None
    duration_ns: int | None = None
    wait_for: Sequence[SyncFence] = ()
    measure: bool = False
    loop_timeout_ns: int | None = None
    copy: bool = True
    server: Arrivals | None = None
    served: ReservedFrame | None = None
    state: ExecutionState = ExecutionState.WAITING_FOR_SLOT
    asked_ns: int = msgspec.field(default_factory=now_ns)
    queued_ns: int = 0
    dependencies_ns: int = 0
    landed_ns: int = 0
    fallbacks: tuple[str, ...] = ()
    lent_priority: Priority = Priority.LOW
    urgent_ns: int = NEVER_NS
    dispatcher: Dispatcher | None = None
    work: TaskJob | None = None
    launched: Launch | None = None
    left_count: int = 0
    has_left: bool = False
    deferred: list[Callable[[], None]] | None = None

    @property
    def background(self) -> Background:
        """Where the runtime's tasks live."""
        return self.owner.background

    @property
    def rank(self) -> Priority:
        """Its class, or that of one that waits for it where that is higher."""
        return max(self.priority, self.lent_priority)

    def run(self, step: Step, area: RequestArea) -> Awaitable[Timing]:
        """``run_step``, for a step inside of another one."""
        return run_step(self, step, area)

    def when_unused(self, call: Callable[[], None]) -> None:
        """Calls when no device uses its memory any more; immediately if none does."""
        if not self.left_count:
            call()
        elif self.deferred is None:
            self.deferred = [call]
        else:
            self.deferred.append(call)

    def begin_allowance(self, start_ns: int) -> None:
        """Counts the allowance from ``start_ns``; where it ends sooner than the deadline, its end is the deadline from now on."""
        if self.duration_ns is not None:
            limit_ns = min(start_ns + self.duration_ns, TIME_MAX_NS)
            if self.deadline_ns is None or limit_ns < self.deadline_ns:
                self.deadline_ns = limit_ns

    def passed(self) -> str:
        """The message for a deadline that passes now."""
        return f"execution: the deadline passed while {self.state.value}"

    def leave(self) -> None:
        """``run_job`` is over: frees the memory, now or when the device is done with it."""
        self.has_left = True
        if not self.left_count:
            self.state = ExecutionState.FINISHED
            self.finish(self)

    def unused(self) -> None:
        """A device is done with a launch that was left to it."""
        self.left_count -= 1
        if not self.left_count:
            if self.deferred:
                calls, self.deferred = self.deferred, None
                for call in calls:
                    call()
            if self.has_left:
                self.leave()

    def note_end(self, status: ErrorStatus, result: Result | None, *, is_cancelled: bool = False) -> None:
        """Counts its end, and reports it to listeners and to the log."""
        figures = self.owner.figures
        if figures is not None:
            if result is not None:
                figures.ended(self, result, self.landed_ns - self.asked_ns)
            else:
                figures.failed(self, status, is_cancelled=is_cancelled)
        if self.owner.report is None and not _logger.isEnabledFor(logging.DEBUG):
            return
        ended_ns = self.landed_ns if result is not None else now_ns()
        took_ns = ended_ns - self.asked_ns
        message = "on %s, priority %s: %s, %d ns until its turn, %d ns in all"
        _logger.debug(message, self.owner.device, self.priority.name, status.name, self.queued_ns, took_ns)
        for reason in self.fallbacks:
            _logger.debug("fallback: %s", reason)
        if self.owner.report is not None:
            self.owner.report(status, result, took_ns)


async def run_job(job: ExecutionJob) -> Result:
    """Runs an execution to its end, in the task that awaits it.

    Raises:
        MissedDeadline: The deadline passed; the device may still be busy.
        Error: Why there is no result.

    Cancelled while it waits: the execution never runs. Cancelled while it runs: the device is asked to stop, and keeps its slot and
    the memory until it is done.
    """
    try:
        with section("LR_PE", job.owner.device):
            if job.wait_for:
                _check_time(job)
                await _wait_for_fences(job)
            steps = job.steps
            if len(steps) > 1:
                _check_time(job)
            area = job.area
            if area is None:
                with section("LR_PIO", "inputs"):
                    area = await _filled(job)
            if len(steps) == 1:
                timing = await run_step(job, steps[0], area)
            else:
                timing = await _run_steps(job, area)
            with section("LR_PR", "outputs"):
                result = _result(job, area, timing)
    except Exception as e:
        error = driver_error(e, "execution")
        job.note_end(status_of(error), None)
        try:
            if error is e:
                raise
            raise error from e
        finally:
            del error  # It refers to this frame, and this frame to the memory.
    except BaseException:
        job.note_end(ExecutionCancelled("execution: cancelled").status, None, is_cancelled=True)
        raise
    finally:
        job.leave()
    job.note_end(ErrorStatus.NONE, result)
    return result


def _result(job: ExecutionJob, area: RequestArea, timing: Timing) -> Result:
    if not job.landed_ns:
        job.landed_ns = now_ns()  # It consists of control flow without a step.
    # The devices' clocks began when nothing had to be waited for any more.
    if job.dependencies_ns and timing.time_in_driver_ns is not None:
        timing = Timing(timing.time_on_device_ns, timing.time_in_driver_ns + job.dependencies_ns)
    return Result(
        area.outputs(job.owner.outputs, copy=job.copy),
        timing,
        device=job.owner.device,
        fallback=job.fallbacks,
        queued_ns=job.queued_ns,
        total_ns=job.landed_ns - job.asked_ns,
        dependencies_ns=job.dependencies_ns,
    )


def _check_time(job: ExecutionJob) -> None:
    """Rejects what all of its steps together cannot end in time, before anything is waited for.

    Raises:
        MissedDeadline: Even idle devices would need longer (persistent).
    """
    if job.deadline_ns is None:
        return
    least_ns = sum(step.least_ns() for step in job.steps)
    left_ns = job.deadline_ns - now_ns()
    if left_ns < least_ns:
        if left_ns <= 0:
            raise passed_before_start("execution", -left_ns)
        needed, left = duration_text(least_ns), duration_text(left_ns)
        message = f"execution: even idle devices need {needed}, and {left} are left before the deadline"
        message += f": too late by {duration_text(least_ns - left_ns)}"
        raise MissedDeadline(message, transient=False)


async def _wait_for_fences(job: ExecutionJob) -> None:
    is_ready = all(fence.status != FenceStatus.PENDING for fence in job.wait_for)
    ready = merge([*job.wait_for])
    try:
        await job.owner.background.in_time(job.deadline_ns, ready, job.passed)
    except FenceError as e:
        raise GeneralFailure(f"execution: a fence that it waits for has failed: {e}") from e
    finally:
        ready.close()  # Otherwise a fence that never signals would keep it for each execution that has left.
    job.state = ExecutionState.WAITING_FOR_SLOT
    ready_ns = now_ns()
    if not is_ready:
        job.dependencies_ns = ready_ns - job.asked_ns
    job.begin_allowance(ready_ns)


async def _filled(job: ExecutionJob) -> RequestArea:
    """The memory with the inputs in it."""
    assert job.fill is not None, "an execution without memory knows how to get it"
    made = job.fill()
    job.fill = None  # It refers to the application's arrays.
    if isinstance(made, RequestArea):
        job.area = made
        return made

    async def fill() -> ExecutionResult:
        job.area = await made
        return ExecutionResult()

    await _landed(job, BackgroundLaunch(job.owner.background, fill()))
    assert job.area is not None, "filled or raised"
    return job.area


async def _run_steps(job: ExecutionJob, area: RequestArea) -> Timing:
    try:
        return sum_of([await run_step(job, step, area) for step in job.steps])
    except Error as e:
        rescue = job.owner.rescue
        if rescue is None or not may_fall_back(e):
            raise
        message = f"the whole model: {e}; ran on the reference device"
    timing = await run_step(job, rescue, area)
    job.fallbacks += (message,)
    return timing


async def run_step(job: ExecutionJob, step: Step, area: RequestArea) -> Timing:
    """Runs a step when it gets a slot of its device, again with more memory where an output did not fit.

    Raises:
        MissedDeadline: The deadline passed, or will certainly be missed.
        Error: The step failed, also on the reference device where that is allowed.
    """
    for _ in range(GROWTH_TRIES_MAX):
        # A rejection by the scheduler does not fall back: nothing has failed.
        launched, job.launched = job.launched, None
        work = None if step.interpreted is not None or launched is not None else _enter(job, step)
        if work is not None and work.state is not JobState.RUNNING:
            await _wait_for_slot(job, work)
        try:
            if launched is not None:
                result = await _landed(job, launched)
            elif work is None:
                result = await step.interpret(area, job)
            else:
                with section("LI_PE", step.prepared_step.device.name):
                    result = await _landed(job, _launch(job, step, area, work), step.dispatcher, work)
            if step.accept(area, result, job):
                return result.timing
        except Exception as e:
            return await _fall_back(job, step, area, driver_error(e, "execution"))
    raise output_too_small(result)


async def run_direct(job: ExecutionJob, launch: Launch | None, work: TaskJob, error: BaseException) -> Result:
    """Continues a direct execution that was cancelled or has failed, by the job that it has done without.

    Args:
        job: The job, with its memory.
        launch: Its launch, if the device has not ended it.
        work: Its place at the dispatcher of its step, which has a slot.
        error: The error, or the cancellation, which is raised.

    Raises:
        As ``run_job``.
    """
    job.state = ExecutionState.RUNNING
    dispatcher = job.steps[0].dispatcher
    try:
        if launch is not None:
            _leave_to_device(job, launch, dispatcher, work)
            if not isinstance(error, MissedDeadline):
                ask_to_stop(launch)
        else:
            _release(job, dispatcher, work, outcome_of_end(error))
        if not isinstance(error, Exception) and (not isinstance(error, Cancelled) or is_cancelled()):
            job.note_end(ExecutionCancelled("execution: cancelled").status, None, is_cancelled=True)
            job.leave()
            raise error
        job.launched = ended(driver_error(error, "execution"))
    finally:
        del error  # It refers to this frame.
    return await run_job(job)


def ended(outcome: ExecutionResult | Error) -> Launch:
    """A launch that has ended, for a job whose step was executed without it."""
    launch = LaunchBase()
    launch.finish(outcome)
    return launch


def _enter(job: ExecutionJob, step: Step) -> TaskJob:
    """Asks for a slot. Where it runs now, the caller has the slot and must launch on it; otherwise it waits for it."""
    dispatcher = step.dispatcher
    job.state = ExecutionState.WAITING_FOR_SLOT
    work = dispatcher.enter(
        priority=job.rank,
        deadline_ns=job.deadline_ns,
        model=step.key,
        declared_ns=step.prepared_step.prepared.expected_duration_ns,
        urgent_ns=job.urgent_ns,
        server=job.server,
    )
    job.dispatcher = dispatcher
    job.work = work
    return work


async def _wait_for_slot(job: ExecutionJob, work: TaskJob) -> None:
    assert job.dispatcher is not None, "it was asked for the slot"
    try:
        await job.dispatcher.wait(work)
    except BaseException:
        job.work = None
        raise


def _launch(job: ExecutionJob, step: Step, area: RequestArea, work: TaskJob) -> Launch:
    """Launches a step on a slot; releases the slot where the launch is rejected."""
    if not job.queued_ns:
        job.queued_ns = work.started_ns - job.asked_ns
    job.state = ExecutionState.RUNNING
    try:
        return step.launch(area, job)
    except BaseException:
        job.work = None
        step.dispatcher.release(work, outcome="failed")
        raise


async def _landed(
    job: ExecutionJob, launch: Launch, dispatcher: Dispatcher | None = None, work: TaskJob | None = None
) -> ExecutionResult:
    """Waits until a device is done with a launch, or until the deadline of the execution.

    Slot and memory are released when the device is done: here, or by a callback where this is left before.

    Raises:
        MissedDeadline: The deadline passed before.
        Error: The launch failed.

    Cancelled, it asks the device to stop.
    """
    try:
        try:
            if job.deadline_ns is None:
                result = await launch
            else:
                result = await job.owner.background.in_time(job.deadline_ns, launch, job.passed)
        except anyio.get_cancelled_exc_class() as e:
            if is_cancelled():
                raise
            raise general_failure_of(e, "execution") from e  # The driver raised it.
    except BaseException as e:
        if launch.is_done:
            _release(job, dispatcher, work, outcome_of_end(e))
        else:
            _leave_to_device(job, launch, dispatcher, work)
            if not isinstance(e, MissedDeadline):
                ask_to_stop(launch)  # A device that misses the deadline knows that itself.
        raise
    _release(job, dispatcher, work, outcome_of_end(result))
    return result


def _leave_to_device(
    job: ExecutionJob, launch: Launch, dispatcher: Dispatcher | None, work: TaskJob | None
) -> None:
    """Has slot and memory released when the device is done with a launch for which nothing waits any more."""
    job.left_count += 1

    def release(done: SyncFence) -> None:
        # In-process drivers finish launches in threads of their own.
        job.owner.background.run_in_loop(released)

    def released() -> None:
        try:
            outcome = outcome_of_end(launch.outcome())
        except BaseException as e:  # SystemExit too: the slot is free.
            # Its traceback refers to the frames that report the launch, and those to the error.
            outcome = outcome_of_end(e.with_traceback(None))
        _release(job, dispatcher, work, outcome)
        job.unused()

    launch.done.add_callback(release)


def _release(
    job: ExecutionJob, dispatcher: Dispatcher | None, work: TaskJob | None, outcome: Outcome
) -> None:
    if dispatcher is not None and work is not None:
        job.work = None
        job.landed_ns = dispatcher.release(work, outcome=outcome)


def outcome_of_end(end: ExecutionResult | BaseException) -> Outcome:
    """The outcome that the scheduler learns from."""
    if isinstance(end, ExecutionResult):
        return "ended" if end.output_sufficient_size else "failed"
    # A persistent one was never begun.
    return "late" if isinstance(end, MissedDeadline) and end.transient else "failed"


async def _fall_back(job: ExecutionJob, step: Step, area: RequestArea, error: Error) -> Timing:
    """Runs a step on the reference device that failed on its own, where that is allowed; raises why it failed otherwise."""
    prepared = step.prepared_step.prepared
    if isinstance(error, DeadObject) and step.is_closed:
        closed = InvalidArgument("burst: closed while an execution used it")
        closed.__cause__ = error  # Its driver has not died: nothing is prepared again.
        error = closed
    if isinstance(prepared, RecoveringPreparedModel):
        if isinstance(error, DeadObject):
            error.transient = prepared.lost(error, job.asked_ns)
        elif isinstance(error, DeviceUnavailable) and prepared.lost(error, job.asked_ns):
            # A server that is ending rejected it: for the caller the same as a driver that has died, and the next one succeeds.
            error = DeadObject(str(error), transient=True)
    try:
        if step.fallback is None or not may_fall_back(error):
            raise error from error.__cause__
        message = step.fallback_message(error)
    finally:
        del error
    job.server = job.served = None  # Its time is reserved on the device that failed.
    timing = await run_step(job, step.fallback, area)
    if message not in job.fallbacks and len(job.fallbacks) < FALLBACK_MESSAGES_MAX:
        job.fallbacks += (message,)
    return timing
