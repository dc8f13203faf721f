"""An execution that others may wait for: a handle on a task that runs it, and a fence.

Owns the fence, its cancellation, and the priority that executions lend to those that they wait for. ``job`` owns the execution.

Invariants:
1. The fence of an execution is finished exactly once; the first answer wins, a later one is discarded.
2. The fence fails at the deadline, not when the device is done.
3. A failure that no code asks for is reported when the fence is dropped, as asyncio does for tasks; not one by closing the runtime.
4. A chain of executions fails with the origin of the first failure, named once: each link passes on the same failure.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol

from aionn.errors import Error, ErrorStatus, ExecutionCancelled, GeneralFailure
from aionn.hal import Priority, duration_text
from aionn.platform.process_bound import InThisProcess
from aionn.runtime.clock import now_ns
from aionn.runtime.executions.failures import clear_frames, own_error
from aionn.runtime.executions.job import ExecutionJob, run_job
from aionn.runtime.executions.results import ExecutionState, PriorityName, Result, priority_of
from aionn.runtime.placement.fallback import driver_error
from aionn.scheduler.job import NEVER_NS, deadline_text
from fences import FenceError, FenceState, FenceStatus, SyncFence, leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from aionn.runtime.background import Background

__all__ = ["Execution", "ExecutionFence", "ExecutionState", "Result", "start"]

LENT_MAX = 64
"""Number of executions of a chain whose urgency is raised immediately: each new link visits its whole chain again."""


class Cancellable(Protocol):
    """An object that can be requested to stop."""

    def cancel(self) -> object: ...


class Execution(InThisProcess):
    """An execution under way. Awaiting it gives its ``Result`` or raises; cancelling an await leaves it as it is.

    Attributes:
        fence: Finished with the execution; others may wait for it.
        finished_ns: When that was; 0 before.
    """

    def __init__(self, job: ExecutionJob) -> None:
        self._job = job
        self._task: Cancellable | None = None
        self._result: Result | None = None
        self._failure: Error | None = None
        self._fence = ExecutionFence(self, job.background)
        self.fence: SyncFence = self._fence
        self.finished_ns = 0
        if job.wait_for:
            job.state = ExecutionState.WAITING_FOR_FENCES
            self._lend()
        else:
            job.begin_allowance(job.asked_ns)
        self._has_begun = False
        job.background.starting_count += 1
        self._task = job.background.start_execution(self._run(), self._end)

    def __repr__(self) -> str:
        state = self.state.name.lower()
        return (
            f"<Execution {state}>"
            if self._failure is None
            else f"<Execution {state}: {type(self._failure).__name__}>"
        )

    @property
    def state(self) -> ExecutionState:
        """Where it is. One that was cancelled, or missed its deadline, runs until its device is done."""
        return self._job.state

    @property
    def deadline_ns(self) -> int | None:
        """Absolute limit: the deadline, or the end of the allowance if that is sooner; None means no limit."""
        return self._job.deadline_ns

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._job.background.starting_count -= 1

    async def _run(self) -> None:
        self._begin()
        try:
            result = await run_job(self._job)
        except Exception as e:
            clear_frames(e)
            self._fail(driver_error(e, "execution"))
        else:
            if self.fence.status == FenceStatus.PENDING:
                self.finished_ns = self._job.asked_ns + result.total_ns
                self._result = result
                self.fence.try_signal()

    def _end(self, task: object) -> None:
        # A task that was cancelled refers to the frames that it ended in, and those to this object.
        self._task = None
        self._begin()  # It may have been cancelled before its first step.
        job = self._job
        if not job.has_left:
            job.note_end(ErrorStatus.GENERAL_FAILURE, None, is_cancelled=True)
            job.leave()
        self._fail(ExecutionCancelled("execution: cancelled"))
        if self._result is None:
            clear_frames(self._error())

    def _fail(self, error: Error) -> None:
        if self.fence.status == FenceStatus.PENDING:
            self.finished_ns = now_ns()
            self._failure = error
            # An execution that ends because its runtime is closed has not failed: the application has closed it.
            if not isinstance(error, ExecutionCancelled) and self._job.background.is_open:
                self._fence.failure = error
            cause = error.__cause__
            if isinstance(cause, FenceError):
                self.fence.try_fail(cause)  # The same failure, one link later.
            else:
                self.fence.try_fail(error, origin=f"execution on {self._job.owner.device}")

    def cancel(self) -> None:
        """Cancels the execution: one that waits never runs; one that runs keeps its slot until the device is done, and its
        result is discarded. Awaiting the execution raises ``ExecutionCancelled``. From any thread, as a callback of a fence is."""
        try:
            self._fail(ExecutionCancelled("execution: cancelled"))
        finally:  # A callback of the fence may interrupt the program.
            task = self._task
            if task is not None:
                self._job.background.run_in_loop(task.cancel)

    async def wait(self) -> Result:
        """Waits for the result.

        Raises:
            Error: The reason for the missing result.
        """
        try:
            await self.fence
        except Exception:
            error = self._error()
            try:
                raise own_error(error) from error.__cause__
            finally:
                del error  # It refers to this frame.
        assert self._result is not None, "a signalled execution has a result"
        return self._result

    def __await__(self) -> Generator[Any, None, Result]:
        return self.wait().__await__()

    def _error(self) -> Error:
        if self._failure is not None:
            return self._failure
        return GeneralFailure(str(self.fence.error))  # It was failed by the application.

    # Priority

    def change_priority(self, priority: PriorityName | Priority) -> bool:
        """Changes the class of an execution that does not run yet; False if it runs or has ended.

        Raises:
            InvalidArgument: There is no such priority, or this is another thread or event loop.
        """
        wanted, job = priority_of(priority), self._job
        job.background.home.check("change_priority")
        if job.state in (ExecutionState.RUNNING, ExecutionState.FINISHED):
            return False
        job.priority = wanted
        self._lend()
        if job.work is None or job.dispatcher is None:
            return True
        return job.dispatcher.change_priority(job.work, job.rank)

    def explain(self) -> str:
        """The reasons of its present state, in some lines."""
        job = self._job
        raised = f", raised to {job.rank.name} by one that waits for it" if job.rank > job.priority else ""
        message = f"{job.state.value}, priority {job.priority.name}{raised}, {deadline_text(job.deadline_ns, now_ns())}"
        if job.duration_ns is not None:
            message += f", at most {duration_text(job.duration_ns)} from its last fence on"
        if job.work is None or job.dispatcher is None:
            return message
        return f"{message}\n{job.dispatcher.explain(job.work)}"

    def _lend(self) -> None:
        """Lends priority and urgency to what this waits for, and to what that waits for: a chain is as urgent as its end."""
        job = self._job
        urgent_ns = min(job.urgent_ns, NEVER_NS if job.deadline_ns is None else job.deadline_ns)
        chain = [(job, job.rank, urgent_ns)]
        for _ in range(LENT_MAX):
            if not chain:
                return
            follower, priority, urgent_ns = chain.pop(0)
            if urgent_ns != NEVER_NS:
                # Executions that it waits for must be done early enough to leave it its own time.
                urgent_ns = max(0, urgent_ns - sum(step.expected_ns() for step in follower.steps))
            for fence in follower.wait_for:
                for part in leaves(fence):
                    leader = part.execution() if isinstance(part, ExecutionFence) else None
                    if leader is not None and leader._borrow(priority, urgent_ns):
                        chain.append((leader._job, leader._job.rank, leader._job.urgent_ns))

    def _borrow(self, priority: Priority, urgent_ns: int) -> bool:
        """Inherits priority and urgency of one that waits for it. Returns whether either was raised."""
        job = self._job
        if self.fence.status != FenceStatus.PENDING or (priority <= job.rank and urgent_ns >= job.urgent_ns):
            return False
        job.lent_priority = max(priority, job.lent_priority)
        job.urgent_ns = min(urgent_ns, job.urgent_ns)
        if job.work is not None and job.dispatcher is not None:
            job.dispatcher.hasten(job.work, job.lent_priority, job.urgent_ns)
        return True


class ExecutionFence(SyncFence):
    """The fence of an execution. It refers to the execution, so that one that waits for the fence can hasten it."""

    __slots__ = ("_background", "_is_asked_for", "execution", "failure")

    def __init__(self, execution: Execution, background: Background) -> None:
        super().__init__("execution")
        # A weak reference: the two would otherwise live until the garbage collector comes.
        self.execution: weakref.ref[Execution] = weakref.ref(execution)
        self.failure: Error | None = None
        self._background = background
        self._is_asked_for = False

    @property
    def error(self) -> FenceError | None:
        """See ``SyncFence``."""
        self._is_asked_for = True
        return super().error

    def __await__(self) -> Generator[Any, None, None]:
        self._is_asked_for = True
        return super().__await__()

    def wait(self, timeout_ns: int | None = None) -> bool:
        """See ``SyncFence``."""
        self._is_asked_for = True
        return super().wait(timeout_ns)

    def export(self) -> tuple[FenceState, int | None]:
        """See ``SyncFence``."""
        self._is_asked_for = True
        return super().export()

    def _attach(self, waiter: Callable[[Any], object]) -> bool:
        self._is_asked_for = True
        return super()._attach(waiter)

    def __del__(self) -> None:
        if self.failure is not None and not self._is_asked_for:
            self._background.report(
                "an execution failed, and neither it nor its fence was awaited: await it, or wait for its fence",
                self.failure,
            )


def start(job: ExecutionJob) -> Execution:
    """Starts an execution in a task of its own, which outlives its caller."""
    return Execution(job)
