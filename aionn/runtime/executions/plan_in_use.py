"""A plan as the executions of a compilation use it: until it is closed, or replaced by the plan of another model.

Owns the request memory that is used again, and the end of a plan that was replaced: when the last execution ends that uses it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import anyio.to_thread

from aionn.errors import Error, ErrorStatus, InvalidArgument
from aionn.hal import Model, Priority
from aionn.platform.loops import finish_all
from aionn.platform.real_work import real_work
from aionn.runtime.background import Background
from aionn.runtime.dropping import close_when_dropped
from aionn.runtime.executions.job import ExecutionJob, JobOwner
from aionn.runtime.executions.opened_plan import OpenedPlan
from aionn.runtime.executions.results import Result
from aionn.runtime.memory.arguments import AREAS_KEPT_MAX, Array, Binding, RequestArea, TensorSpec
from aionn.runtime.metrics.figures import CompilationFigures
from aionn.runtime.placement.plan import LastValues, Plan, learnt_by
from aionn.validation import needed_inputs

if TYPE_CHECKING:
    from aionn.runtime.recovery.prepared import Recoverer

__all__ = ["Asked", "MakeReady", "PlanInUse", "Ready", "check_same_signature", "close_plans", "free_unused"]

NEW_BYTES_IN_LOOP_MAX = 1 << 18
"""Largest request memory that is made on the event loop: the kernel gives some 2 bytes a nanosecond at first use."""

COPIED_BYTES_IN_LOOP_MAX = 1 << 21
"""Most bytes of inputs that are copied on the event loop: at some 10 bytes a nanosecond, a fifth of a millisecond."""


class Asked(NamedTuple):
    """The checked arguments of an execution's caller.

    Attributes:
        plan: The plan that is executed.
        inputs: Arrays by input; None for values that are left out or bound.
        bound: Values in memories of the application's own, by key.
        targets: Arrays that outputs are copied to, by key.
        deadline_ns: Absolute; None means no deadline.
        priority: Against others.
        loop_timeout_ns: For every WHILE; None for the default.
    """

    plan: PlanInUse
    inputs: Sequence[Array | None]
    bound: Mapping[int, Binding]
    targets: Mapping[int, Array]
    deadline_ns: int | None
    priority: Priority
    loop_timeout_ns: int | None


async def _on_thread(fill: Callable[[], RequestArea]) -> RequestArea:
    with real_work("filling request memory"):
        return await anyio.to_thread.run_sync(fill)


class Ready(NamedTuple):
    """A model that is ready to be executed.

    Attributes:
        plan: Its plan.
        from_cache: Whether every step came from the cache.
        recoverer: Makes the steps recover; None if they do not.
        report: See ``JobOwner``.
        figures: See ``JobOwner``, and those of its streams.
    """

    plan: Plan
    from_cache: bool = False
    recoverer: Recoverer | None = None
    report: Callable[[ErrorStatus, Result | None, int], None] | None = None
    figures: CompilationFigures | None = None

    def owner(self, background: Background) -> JobOwner:
        """The common part of its executions."""
        plan = self.plan
        return JobOwner(
            background,
            plan.model.main.output_indexes,
            plan.device_names,
            plan.rescue_step(),
            self.report,
            None if self.figures is None else self.figures.executions,
        )


MakeReady = Callable[[Model | str | os.PathLike[str], int | None, bytes | None], Awaitable[Ready]]
"""Makes a model ready with the options of a compilation: from the model or its file, the deadline, and the cache's token."""


class PlanInUse:
    """A plan as the executions of a compilation use it.

    Attributes:
        plan: It.
        steps: Its steps.
        owner: The common part of its executions.
        sizes: Sizes that executions have learnt, by key.
        areas: Request memories for the next executions.
        users: Number of executions that have not ended, and of bursts that still use it after it was replaced.
        needed: Which inputs must be given.
    """

    def __init__(self, background: Background, ready: Ready) -> None:
        plan = self.plan = ready.plan
        self.sizes: dict[int, int] = {}
        self.areas: list[RequestArea] = []
        self.users = 0
        self.owner = ready.owner(background)
        self.steps = [
            plan.step(index, key=key, sizes=self.sizes) for index, key in enumerate(learnt_by(plan, self))
        ]
        self.needed = functools.cache(functools.partial(needed_inputs, plan.model))
        self._background = background
        self._values = LastValues(plan)
        self._plans: list[PlanInUse] | None = None
        self._closed = False
        self._finalizer = close_when_dropped(self, background, plan.aclose)

    def area(self, asked: Asked) -> RequestArea | Awaitable[RequestArea]:
        """Memory that holds the inputs; to be awaited where filling it takes longer than the loop may be held."""
        arrays, bound, targets = asked.inputs, asked.bound, asked.targets
        shapes = tuple([None if array is None else array.shape for array in arrays])
        values = self._values.of(shapes, self.sizes, bound.keys())
        for index, area in enumerate(self.areas):
            if area.is_for(values):
                del self.areas[index]
                break
        else:
            self.areas.clear()  # The kept area is for other shapes or sizes.
            area = None

        def filled() -> RequestArea:
            filling = RequestArea(values) if area is None else area
            filling.bind(bound, targets)
            filling.write(self.plan.model.main.input_indexes, arrays)
            return filling

        if area is None:
            is_quick = sum(value.size_bytes for value in values) <= NEW_BYTES_IN_LOOP_MAX
        else:
            is_quick = sum([a.nbytes for a in arrays if a is not None]) <= COPIED_BYTES_IN_LOOP_MAX
        return filled() if is_quick else _on_thread(filled)

    def give_back(self, job: ExecutionJob) -> None:
        """An execution has ended, and its memory can be used again."""
        area = job.area
        if area is not None:
            area.bind({})
            # One that had to grow has its values scattered; the next execution starts with one memory of the right size.
            is_kept = len(area.memories) == 1 and not self._closed and self._plans is None
            if is_kept and len(self.areas) < AREAS_KEPT_MAX:
                self.areas.append(area)
        self.unused(job)

    def unused(self, job: object = None) -> None:
        """An execution has ended; one that is reusable keeps its memory."""
        self.users -= 1
        if not self.users and self._plans is not None:
            self._background.close_soon(self._end)

    def retire(self, plans: list[PlanInUse]) -> None:
        """Has the plan freed at its devices when the last execution ends that uses it: it was replaced."""
        self._plans = plans
        self.areas.clear()
        self.users += 1
        self.unused()

    async def _end(self) -> None:
        try:
            await self.aclose()
        except Error:
            pass  # The driver is gone, and with it everything that this would have freed.
        if self._plans is not None and self in self._plans:
            self._plans.remove(self)

    async def aclose(self) -> None:
        """Frees it at its devices. Idempotent."""
        self._closed = True
        self.areas.clear()
        await self.plan.aclose()
        self._finalizer.detach()  # Not before: a closing that failed is tried again when this object is dropped.


async def close_plans(plans: Sequence[PlanInUse]) -> None:
    await finish_all([each.aclose for each in plans])


async def free_unused(plan: Plan, opened: Iterable[OpenedPlan | None]) -> None:
    """Frees what was prepared and is not wanted."""
    try:
        await finish_all([each.aclose for each in opened if each is not None])
    finally:
        await plan.aclose()


def check_same_signature(present: Sequence[TensorSpec], new: Sequence[TensorSpec], what: str) -> None:
    """Checks that a model can replace another one.

    Raises:
        InvalidArgument: The number of inputs or outputs differs, or the description of one.
    """
    if len(present) != len(new):
        raise InvalidArgument(f"replace: expected {len(present)} {what}s, got {len(new)}")
    for index, (expected, got) in enumerate(zip(present, new, strict=True)):
        if expected != got:
            raise InvalidArgument(f"replace, {what} {index}: expected {expected}, got {got}")
