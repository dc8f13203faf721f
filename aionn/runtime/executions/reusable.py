"""Executions that keep their memory, to be computed again and again.

Owns one request area for the life of the execution, and the rule that one computation is under way at a time.

Invariants:
1. A cancelled computation counts as running until the device is done with its memory.

Source: reusable executions of the NN HAL's runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import anyio.lowlevel
import msgspec

from aionn.errors import InvalidArgument
from aionn.hal import Priority, dimensions_are_known
from aionn.platform.process_bound import InThisProcess
from aionn.runtime.background import Background
from aionn.runtime.clock import check_deadline, duration_to_ns
from aionn.runtime.executions.job import ExecutionJob, run_job
from aionn.runtime.executions.results import ExecutionState, PriorityName, Result
from aionn.runtime.memory.arguments import Array, RequestArea
from aionn.runtime.placement.plan import Plan

__all__ = ["ReusableExecution"]

MakeJob = Callable[[RequestArea, bool, int | None, int | None, PriorityName | Priority | None], ExecutionJob]
"""Makes an execution of all steps over an area, of which the result gives views: from the area, whether to measure, the loop
time-out, the deadline and the priority."""


class ReusableExecution(InThisProcess):
    """The same execution again and again, one computation at a time, without a copy. Made by ``Compilation.reusable``.

    Args:
        plan: The plan that is executed.
        sizes: Sizes that executions have learnt, by key.
        check_open: Raises where the compilation is closed.
        make_job: Makes a computation.
        background: Where the runtime's tasks live.

    Attributes:
        inputs: Views of the inputs; the next computation reads their values.
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
        make_job: MakeJob,
        background: Background,
    ) -> None:
        for spec in plan.inputs:
            if not dimensions_are_known(spec.type, spec.dimensions):
                raise InvalidArgument(f"reusable execution: expected known input shapes, got {spec}")
        self._check_open = check_open
        self._make_job = make_job
        self._background = background
        self._measure = measure
        self._loop_timeout_ns = (
            None if loop_timeout is None else duration_to_ns(loop_timeout, what="loop_timeout")
        )
        self._area = RequestArea(plan.values([spec.dimensions for spec in plan.inputs], sizes))
        self.inputs = tuple(self._area.view(key) for key in plan.model.main.input_indexes)
        self.outputs: tuple[Array, ...] = ()
        self._job: ExecutionJob | None = None

    def __repr__(self) -> str:
        state = "not executed" if self._job is None else self._job.state.name.lower()
        return f"<ReusableExecution {state}, {', '.join(str(list(view.shape)) for view in self.inputs)}>"

    async def execute(
        self, *, deadline: int | None = None, priority: PriorityName | Priority | None = None
    ) -> Result:
        """Computes once. The result's arrays are views that the next computation overwrites.

        Raises:
            InvalidArgument: A computation is under way.
            Error: As for ``Compilation.execute``.
        """
        self._check_open()
        deadline = check_deadline(deadline, where="execute")
        if self._background.starting_count:
            await anyio.lowlevel.checkpoint()
        if self._job is not None and self._job.state is not ExecutionState.FINISHED:
            raise InvalidArgument("reusable execution: a computation is under way")
        job = self._make_job(self._area, self._measure, self._loop_timeout_ns, deadline, priority)
        self._job = job
        result = msgspec.structs.replace(await run_job(job), valid_until="the next computation")
        self.outputs = result.outputs
        return result
