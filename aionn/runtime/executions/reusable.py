"""Executions that keep their memory, to be computed again and again.

Owns one request area for the life of the execution, and the rule that one computation is under way at a time.

Invariants:
1. A computation that was given up still counts while the device works on it: its memory is in use.

Source: reusable executions of the NN HAL's runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from aionn.errors import InvalidArgument
from aionn.hal import Priority, check_deadline_ns, dimensions_are_known
from aionn.runtime.clock import to_ns
from aionn.runtime.executions.execution import Execution, ExecutionState, Result, priority_of
from aionn.runtime.memory.arguments import Array, RequestArea
from fences import FenceStatus

if TYPE_CHECKING:
    from aionn.runtime.compilation import Compilation

__all__ = ["ReusableExecution"]


class ReusableExecution:
    """The same execution again and again, one computation at a time, without a copy. Made by ``Compilation.reusable``.

    Attributes:
        inputs: Views of the inputs; what they hold is what the next computation reads.
        outputs: Views of the outputs as the last computation left them; empty before the first.
    """

    def __init__(self, compilation: Compilation, measure: bool, loop_timeout: float | None) -> None:
        for spec in compilation.inputs:
            if not dimensions_are_known(spec.type, spec.dimensions):
                raise InvalidArgument(f"reusable execution: expected known input shapes, got {spec}")
        self._compilation = compilation
        self._measure = measure
        self._loop_timeout_ns = None if loop_timeout is None else to_ns(loop_timeout, what="loop_timeout")
        plan = compilation._plan
        self._area = RequestArea(plan.values([spec.dimensions for spec in plan.inputs], compilation._sizes))
        self.inputs = tuple(self._area.view(key) for key in plan.model.main.input_indexes)
        self.outputs: tuple[Array, ...] = ()
        self._running: Execution | None = None

    async def execute(self, *, deadline: int | None = None, priority: str | Priority | None = None) -> Result:
        """Computes once. The result's arrays are views that the next computation overwrites.

        Raises:
            InvalidArgument: A computation is under way.
            Error: As for ``Compilation.execute``.
        """
        compilation = self._compilation
        compilation._check_open()
        check_deadline_ns(deadline, where="execute")
        running = self._running
        if running is not None and (
            running.fence.status == FenceStatus.PENDING or running.state is ExecutionState.RUNNING
        ):
            raise InvalidArgument("reusable execution: a computation is under way")
        plan = compilation._plan
        execution = self._running = Execution(
            lambda: self._area,
            [
                compilation._turn(index, self._measure, self._loop_timeout_ns)
                for index in range(len(plan.steps))
            ],
            plan.model.main.output_indexes,
            device=plan.device_names,
            priority=compilation._priority if priority is None else priority_of(priority),
            deadline_ns=deadline,
            copy=False,
            rescue=plan.rescue(self._measure, self._loop_timeout_ns),
            report=compilation._report,
            finish=self._forget,
        )
        execution.start(compilation._runtime.background)
        try:
            result = msgspec.structs.replace(await execution, valid_until="the next computation")
        except BaseException:
            execution.cancel()
            raise
        self.outputs = result.outputs
        return result

    def _forget(self, area: RequestArea | None) -> None:
        # An execution refers to this object: without the garbage collector the two would keep their memory for ever.
        if self._running is not None and self._running.state is ExecutionState.FINISHED:
            self._running = None
