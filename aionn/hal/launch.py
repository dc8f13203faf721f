"""One way to execute: a launch, which ends when the device no longer uses the memory of its request.

Owns the verb from which all forms of execution of the contract are made, the classes that drivers and their clients report
launches with, and the native call, which is an execution without a launch. ``aionn.hal.device`` lists where a launch comes from:
``PreparedModel.launch`` and ``Burst.launch``.

Invariants:
1. A launch is done once, however its execution ended: with a result, with an error, cancelled, or by the death of its process.
2. A launch that is done has an outcome. It never changes, but an error is raised as itself once, and later as one that is equal:
   an error refers to the frames through which it was raised, and these refer to the launch and its memory.
3. Cancelling the task that awaits a launch changes nothing about the launch.

Source: semaphores of IREE's HAL, on which everything hangs that must outlive a caller; ``IPreparedModel`` for the outcomes.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, NamedTuple, Protocol

from aionn.errors import Error, GeneralFailure, class_text, error_for_status, general_failure_of
from aionn.hal.qos import Priority
from aionn.hal.request import ExecutionResult, Request
from fences import SyncFence
from fmq import Permit

__all__ = [
    "BurstByLaunch",
    "GiveNativeCall",
    "Launch",
    "LaunchBase",
    "NativeCall",
    "PreparedModelByLaunch",
    "TaskLaunch",
    "ask_to_stop",
    "check_launch",
    "outcome_of",
]

_logger = logging.getLogger("aionn.driver")


class Launch(Protocol):
    """An execution that a device has accepted. It runs to its end even if no caller keeps this object.

    ``await launch`` waits until it is done and returns or raises its outcome; a task that is cancelled there has only stopped
    waiting. This is the cheap way to wait: ``done`` costs a fence, and is for those who do not wait themselves.

    Attributes:
        done: Signalled when the device no longer uses the request's memory, however the execution ended; never fails. Made when
            it is first asked for.
        is_done: Whether ``done`` is signalled, or would be.
        is_cancelled: Whether ``cancel`` was called before it was done.
    """

    @property
    def done(self) -> SyncFence: ...

    @property
    def is_done(self) -> bool: ...

    @property
    def is_cancelled(self) -> bool: ...

    def outcome(self) -> ExecutionResult:
        """Returns the result of a launch that is done.

        Raises:
            Error: The execution failed. After ``cancel`` this may be any error, or there is a result.
            RuntimeError: It is not done.
        """
        ...

    def cancel(self) -> None:
        """Asks the device to stop; the outcome is not wanted any more. A device that cannot stop ignores it. Idempotent."""
        ...

    def __await__(self) -> Generator[Any, None, ExecutionResult]:
        """Waits for ``done``. Raises as ``outcome``."""
        ...


class LaunchBase:
    """A launch whose end is reported by ``finish``, in the thread of the event loop.

    A subclass that is finished in other threads creates ``_fence`` before it can be finished.
    """

    is_done = False  # An attribute, and not a property: a burst asks its last launch before each execution.
    is_cancelled = False
    _fence: SyncFence | None = None
    _waiter: asyncio.Future[None] | None = None
    _result: ExecutionResult | None = None
    _error: Error | None = None

    @property
    def done(self) -> SyncFence:
        """See ``Launch``."""
        fence = self._fence
        if fence is None:
            fence = self._fence = SyncFence("execution")
            if self.is_done:
                fence.signal()
        return fence

    def finish(self, outcome: ExecutionResult | Error) -> None:
        """Ends it and wakes its waiters; ignored if it has ended. An outcome of another type ends it with ``GeneralFailure``."""
        if self.is_done:
            return
        if isinstance(outcome, ExecutionResult):
            self._result = outcome
        else:
            if not isinstance(outcome, Error):
                outcome = GeneralFailure(f"execution: expected an ExecutionResult, got {outcome!r:.80}")
            if self.is_cancelled:
                traceback.clear_frames(outcome.__traceback__)  # The error may never be raised again.
            self._error = outcome
        self.is_done = True
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
        if self._fence is not None:
            self._fence.signal()

    def outcome(self) -> ExecutionResult:
        """See ``Launch``."""
        result, error = self._result, self._error
        if result is not None:
            return result
        if error is None:
            raise RuntimeError("launch: it has no outcome before it is done")
        self._error = error_for_status(error.status, str(error))
        self._error.__cause__ = error.__cause__
        try:
            raise error
        finally:
            del error, self

    def cancel(self) -> None:
        """See ``Launch``. A subclass asks the device in ``_ask_to_stop``."""
        if not self.is_cancelled and not self.is_done:
            self.is_cancelled = True
            self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        """Ignored."""

    def __await__(self) -> Generator[Any, None, ExecutionResult]:
        return self._wait().__await__()

    async def _wait(self) -> ExecutionResult:
        try:
            if not self.is_done:
                if self._fence is None and self._waiter is None:
                    # One waiter as a rule: a fence that is made for it would cost more than the wait.
                    self._waiter = waiter = asyncio.get_running_loop().create_future()
                    try:
                        await waiter
                    finally:
                        self._waiter = None
                else:
                    await self.done
            return self.outcome()
        finally:
            del self  # An error refers to this frame.


class TaskLaunch(LaunchBase):
    """A call of a driver that has no launches of its own, in a task that only the end of its event loop cancels.

    Args:
        call: The coroutine of the driver's ``execute_synchronously``.
        name: Names the task.
    """

    def __init__(self, call: Coroutine[Any, Any, ExecutionResult], name: str) -> None:
        task = asyncio.get_running_loop().create_task(call, name=name)
        _tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[ExecutionResult]) -> None:
        _tasks.discard(task)
        if task.cancelled():
            self.finish(GeneralFailure("execution: the event loop ended before it"))
            return
        error = task.exception()
        if error is None:
            self.finish(task.result())
        elif isinstance(error, Error):
            self.finish(error)
        else:
            self.finish(general_failure_of(error, "execution"))


_tasks: set[asyncio.Task[ExecutionResult]] = set()
"""An event loop has only weak references to its tasks."""


async def outcome_of(launch: Launch) -> ExecutionResult:
    """``execute_synchronously``, for a device that launches: waits for the outcome. Cancelled, it cancels the launch.

    Raises:
        Error: See ``Launch.outcome``.
    """
    try:
        return await launch
    except BaseException:
        ask_to_stop(launch)
        raise
    finally:
        del launch  # An error refers to this frame.


class PreparedModelByLaunch:
    """``execute_synchronously`` of a ``PreparedModel`` that launches: inherit it before the other base classes, and define
    ``launch``.

    ``PreparedModelDefaults`` has the opposite, ``launch`` from ``execute_synchronously``: without a ``launch`` of the class the two
    would call each other.
    """

    launch: Callable[..., Launch]

    async def execute_synchronously(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        priority: Priority | None = None,
    ) -> ExecutionResult:
        """See ``PreparedModel``. Cancellation asks the device to stop; it keeps its slot until it has."""
        return await outcome_of(
            self.launch(
                request,
                measure=measure,
                deadline_ns=deadline_ns,
                loop_timeout_ns=loop_timeout_ns,
                priority=priority,
            )
        )


class BurstByLaunch:
    """``execute_synchronously`` of a ``Burst`` that launches: as ``PreparedModelByLaunch``."""

    launch: Callable[..., Launch]

    async def execute_synchronously(
        self,
        request: Request,
        memory_identifiers: Sequence[int],
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> ExecutionResult:
        """See ``Burst``. Cancellation asks the device to stop; it keeps its slot until it has."""
        return await outcome_of(
            self.launch(
                request,
                memory_identifiers,
                measure=measure,
                deadline_ns=deadline_ns,
                loop_timeout_ns=loop_timeout_ns,
            )
        )


_MEMBERS = ("done", "is_done", "is_cancelled", "outcome", "cancel", "__await__")


def check_launch(made: object, where: str) -> None:
    """Checks that what a driver has launched can be waited for, before anything depends on it.

    Args:
        made: The object that the driver's ``launch`` returned.
        where: Names the driver in the message.

    Raises:
        GeneralFailure: Members are missing: it is a coroutine, for example.
    """
    if isinstance(made, LaunchBase):
        return
    missing = [name for name in _MEMBERS if not hasattr(made, name)]
    if missing:
        raise GeneralFailure(
            f"{where}: expected a Launch from the driver's launch, got {class_text(made)}, which lacks {', '.join(missing)}"
        )


def ask_to_stop(launch: Launch) -> None:
    """Cancels a launch. An exception of the driver is logged: the caller has left, and has an exception of its own."""
    try:
        launch.cancel()
    except Exception:
        _logger.exception("execution: a launch of the driver cannot be cancelled")


class NativeCall(NamedTuple):
    """An execution of bound arguments as a call of a C function, without Python and without the interpreter's lock.

    Attributes:
        function: The address of ``int f(uintptr_t, ..6)``, which computes in any thread and returns 0 for success. It must not
            call Python, and ends as ``execute_bound`` does: it is not interrupted.
        words: Its arguments, for each slot of the device: at most 6.
        permit: Names the device's slots, of which the call takes one for itself, and can be withdrawn.
        result: The result of each successful execution.
        release: Gives back the slot of this index: other jobs of the device have arrived during the call.
        failed: The error of a call that returned this number, as ``execute_bound`` raises it.
        name: Names the device and this way in traces.
        kept: All that the words point to.
    """

    function: int
    words: tuple[tuple[int, ...], ...]
    permit: Permit
    result: ExecutionResult
    release: Callable[[int], None]
    failed: Callable[[int], Error]
    name: str
    kept: object


GiveNativeCall = Callable[[Any], NativeCall | None]
"""Gives the native call of what ``PreparedModel.bind`` gave, after ``execute_bound`` has succeeded with it; None where it has none.
The call does what ``execute_bound`` does without measuring, and gives the same bytes."""
