"""Executions that keep their memory, to be computed again and again.

Owns one request area for the life of the execution, and the rule that one computation is under way at a time.

Invariants:
1. A cancelled computation counts as running until the device is done with its memory.

Source: reusable executions of the NN HAL's runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from aionn.errors import InvalidArgument
from aionn.hal import Priority, check_deadline_ns, dimensions_are_known
from aionn.runtime.clock import to_ns
from aionn.runtime.executions.execution import Execution, ExecutionState, Result
from aionn.runtime.memory.arguments import Array, RequestArea
from aionn.runtime.placement.plan import Plan
from fences import FenceStatus

__all__ = ["ReusableExecution", "Start"]


class Start(Protocol):
    """Starts a computation of all steps over an area, of which the result gives views; ``finish`` is called when it has ended."""

    def __call__(
        self,
        area: RequestArea,
        *,
        measure: bool,
        loop_timeout_ns: int | None,
        deadline_ns: int | None,
        priority: str | Priority | None,
        finish: Callable[[RequestArea | None], None],
    ) -> Execution: ...


class ReusableExecution:
    """The same execution again and again, one computation at a time, without a copy. Made by ``Compilation.reusable``.

    Args:
        plan: What is computed.
        sizes: What executions have learnt about sizes, by key.
        check_open: Raises where the compilation is closed.
        start: Starts a computation.

    Attributes:
        inputs: Views of the inputs; what they hold is what the next computation reads.
        outputs: Views of the outputs as the last computation left them; empty before the first.
    """

    def __init__(
        self,
        plan: Plan,
        sizes: Mapping[int, int],
        measure: bool,
        loop_timeout: float | None,
        *,
        check_open: Callable[[], None],
        start: Start,
    ) -> None:
        for spec in plan.inputs:
            if not dimensions_are_known(spec.type, spec.dimensions):
                raise InvalidArgument(f"reusable execution: expected known input shapes, got {spec}")
        self._check_open = check_open
        self._start = start
        self._measure = measure
        self._loop_timeout_ns = None if loop_timeout is None else to_ns(loop_timeout, what="loop_timeout")
        self._area = RequestArea(plan.values([spec.dimensions for spec in plan.inputs], sizes))
        self.inputs = tuple(self._area.view(key) for key in plan.model.main.input_indexes)
        self.outputs: tuple[Array, ...] = ()
        self._running: Execution | None = None

    async def execute(self, *, deadline: int | None = None, priority: str | Priority | None = None) -> Result:
        """Computes once. The result's arrays are views that the next computation overwrites.

        Raises:
            InvalidArgument: A computation is under way.
            Error: As for ``Compilation.execute``.
        """
        self._check_open()
        check_deadline_ns(deadline, where="execute")
        running = self._running
        if running is not None and (
            running.fence.status == FenceStatus.PENDING or running.state is ExecutionState.RUNNING
        ):
            raise InvalidArgument("reusable execution: a computation is under way")
        execution = self._running = self._start(
            self._area,
            measure=self._measure,
            loop_timeout_ns=self._loop_timeout_ns,
            deadline_ns=deadline,
            priority=priority,
            finish=self._forget,
        )
        try:
            result = msgspec.structs.replace(await execution, valid_until="the next computation")
        except BaseException:
            execution.cancel()
            raise
        self.outputs = result.outputs
        return result

    def _forget(self, area: RequestArea | None) -> None:
        # An execution refers to this object: without the garbage collector the two would never free their memory.
        if self._running is not None and self._running.state is ExecutionState.FINISHED:
            self._running = None
