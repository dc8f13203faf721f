"""An execution that only its caller awaits, in the caller's own task.

Owns the order of things around one step that has neither deadline nor fence: its turn on the device, the run, the result. Refuses
to own executions that others may wait for, that have several steps, or that end at a deadline: those are ``Execution``'s.

Invariants:
1. The device's slot is given back exactly once: here, or, if the caller was cancelled before, by the task that takes over in
   ``abandon``.
2. An exception of the driver is an ``Error`` for the caller, and falls back only where that is allowed.

A task, a fence and two turns of the loop cost as much as a small model takes; that is why this exists.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aionn.errors import Error, ErrorStatus, status_of
from aionn.hal import Priority
from aionn.observability.tracing import section
from aionn.runtime.executions.execution import Result, Turn, is_told, tell_end
from aionn.runtime.memory.arguments import RequestArea
from aionn.runtime.placement.fallback import driver_error, may_fall_back
from aionn.scheduler.job import Job

__all__ = ["execute_directly", "hold"]


async def execute_directly(
    turn: Turn,
    area: RequestArea,
    outputs: Sequence[int],
    *,
    device: str,
    priority: Priority,
    copy: bool = True,
    abandon: Callable[[Job], None],
    recover: Callable[[Error], Awaitable[Result]],
) -> Result:
    """Executes a step whose inputs are in ``area``.

    Args:
        turn: The only step.
        area: Its memory.
        outputs: Keys of what it gives.
        device: Names it in the result.
        priority: Against others.
        copy: Whether the outputs are copied out of the memory; False gives read-only views.
        abandon: Called when the caller is cancelled while the device works: keeps memory and slot until it has answered.
        recover: Executes on the reference device after a failure for which ``turn`` allows that.

    Raises:
        Error: Why there is no result.
    """
    dispatcher = turn.dispatcher
    work = dispatcher.enter(
        priority=priority, deadline_ns=None, model=turn.model, declared_ns=turn.declared_ns
    )
    await dispatcher.wait(work)
    queued_ns = dispatcher.queued_ns(work)
    try:
        timing = await turn.run(area, None)
    except Exception as e:
        ended_ns = dispatcher.release(work, outcome="failed")
        error = driver_error(e, "execution")
        if is_told():
            tell_end(device, priority, status_of(error), queued_ns, ended_ns - work.arrival_ns)
        if turn.fall_back is None or not may_fall_back(error):
            try:
                raise error from error.__cause__
            finally:
                del error  # It refers to this frame, and this frame to the memory.
    except BaseException:
        abandon(work)
        raise
    else:
        ended_ns = dispatcher.release(work)
        with section("LR_PR", "outputs"):
            results = area.outputs(outputs, copy=copy)
        total_ns = ended_ns - work.arrival_ns
        if is_told():
            tell_end(device, priority, ErrorStatus.NONE, queued_ns, total_ns)
        return Result(results, timing, device=device, queued_ns=queued_ns, total_ns=total_ns)
    try:
        return await recover(error)
    finally:
        del error


async def hold(settle: Callable[[], Awaitable[Any]], turn: Turn, work: Job) -> None:
    """Keeps the device's slot of an abandoned execution until the device has answered."""
    try:
        await settle()
    except Error:
        pass  # It died, or was closed: nothing of it runs any more.
    finally:
        turn.dispatcher.release(work, outcome="failed")
