"""Launches of work in the background of the runtime, and the asynchronous call of the HAL.

Owns the form that lets ``job`` treat such work like a launch of a device: it is done when the memory is no longer in use.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from aionn.errors import Error, ErrorStatus, ExecutionCancelled, error_for_status
from aionn.hal import ExecutionResult, LaunchBase, OutputShape, PreparedModel, Priority, Request, Timing
from aionn.platform.real_work import real_work
from aionn.runtime.background import Background
from aionn.runtime.placement.fallback import driver_error
from fences import SyncFence

__all__ = ["BackgroundLaunch", "execute_by_callback"]


class BackgroundLaunch(LaunchBase):
    """A coroutine that runs to its end whether or not its caller waits for it; only the closing of the runtime cancels it.

    Args:
        background: Where its task lives.
        work: The coroutine.
    """

    def __init__(self, background: Background, work: Coroutine[Any, Any, ExecutionResult]) -> None:
        self._outcome: ExecutionResult | Error = ExecutionCancelled("execution: the runtime was closed")
        background.start_execution(self._run(work), self._ended)

    async def _run(self, work: Coroutine[Any, Any, ExecutionResult]) -> None:
        try:
            self._outcome = await work
        except Exception as e:
            self._outcome = driver_error(e, "execution")

    def _ended(self, task: object) -> None:
        self.finish(self._outcome)
        del self._outcome  # An error refers to frames, and those to this object.


async def execute_by_callback(
    prepared: PreparedModel,
    request: Request,
    *,
    measure: bool,
    deadline_ns: int | None,
    loop_timeout_ns: int | None,
    priority: Priority | None,
) -> ExecutionResult:
    """The driver's asynchronous call, waited for. See ``PreparedModel.execute``."""
    done = SyncFence("launched execution")
    outcome: list[tuple[ErrorStatus, Sequence[OutputShape], Timing]] = []

    def callback(status: ErrorStatus, shapes: Sequence[OutputShape], timing: Timing) -> None:
        # From any thread; a second one is ignored.
        outcome.append((status, shapes, timing))
        done.try_signal()

    urgency: dict[str, Any] = {"priority": priority} if prepared.takes_priority else {}
    with real_work("a launched execution"):
        status = await prepared.execute(
            request,
            callback,
            measure=measure,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            **urgency,
        )
        if status != ErrorStatus.NONE:
            raise error_for_status(status, "execution: the device refused to launch it")
        await done
    status, shapes, timing = outcome[0]
    if status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE):
        raise error_for_status(status, "execution: the device reports that it failed")
    return ExecutionResult(status == ErrorStatus.NONE, tuple(shapes), timing)
