"""The plan that a compilation executes: its prepared steps, and the steps that read or write each value.

Owns the record, the ways in which a step or the whole model runs on the reference device instead, and the freeing of what was made
ready. Plans are made in ``planning`` and run in ``compilation``, ``burst`` and ``control_flow``.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from aionn.hal import ExecutionResult, Launch, Model, PreparedModel, PreparedModelDefaults
from aionn.platform.loops import finish_all
from aionn.runtime.executions.background_launch import BackgroundLaunch
from aionn.runtime.executions.stepping import Conditions, PreparedStep, Step, execute_step
from aionn.runtime.memory.arguments import RequestArea, TensorSpec, Value, input_value, result_value
from aionn.runtime.placement.fallback import Fallback, in_ordinary_memory

if TYPE_CHECKING:
    from aionn.runtime.devices import RuntimeDevice

__all__ = ["LastValues", "Placement", "Plan", "learnt_by"]


class Placement(msgspec.Struct, frozen=True):
    """Where one operation runs.

    Attributes:
        operation: Its index in its subgraph.
        type: Its name.
        device: The device's name; ``interpreter`` for an IF or WHILE whose subgraphs are placed on their own.
        reason: Why there.
        subgraph: 0 for the main one, ``i + 1`` for ``model.referenced[i]``, where that is placed on its own.
    """

    operation: int
    type: str
    device: str
    reason: str
    subgraph: int = 0


class Plan(NamedTuple):
    """All that a compilation executes, or all of a subgraph that is placed on its own.

    Attributes:
        model: The whole model.
        inputs: The inputs, by description.
        outputs: The outputs, by description.
        temporaries: Values that go from one step to another, by key.
        steps: In the order in which they run.
        placement: Which operation runs where, and why.
        fallback: The reference device for steps that fail; None where that is not allowed.
        number: Of the subgraph; 0 for the main one.
    """

    model: Model
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    temporaries: Mapping[int, TensorSpec]
    steps: tuple[PreparedStep, ...]
    placement: tuple[Placement, ...]
    fallback: Fallback | None = None
    number: int = 0

    def step_name(self, index: int) -> str:
        """Names a step where a fallback is reported."""
        inside = f"subgraph {self.number}, " if self.number else ""
        return f"{inside}step {index} of {len(self.steps)}"

    def step(self, index: int, *, key: Hashable = None, sizes: dict[int, int] | None = None) -> Step:
        """A step as executions run it; see ``Step`` for the arguments."""
        fallback = self.fallback_step(index)
        return Step(self.steps[index], key=key, sizes=sizes, fallback=fallback, name=self.step_name(index))

    def fallback_step(self, index: int) -> Step | None:
        """The form of a step on the reference device, for failures on its own device; None where that is not allowed."""
        fallback, step = self.fallback, self.steps[index]
        if fallback is None or step.device is fallback.device:
            return None
        return _ReferenceStep(fallback, index, step)

    def rescue_step(self) -> Step | None:
        """The form of the whole model on the reference device, for where a step has failed there as well, or cannot run."""
        fallback = self.fallback
        if fallback is None or len(self.steps) == 1:
            return None
        main, last = self.model.main, self.steps[-1]
        whole = last._replace(model=self.model, inputs=main.input_indexes, outputs=main.output_indexes)
        return _ReferenceStep(fallback, len(self.steps), whole)

    @property
    def devices(self) -> tuple[RuntimeDevice, ...]:
        """The devices in the order of the steps, each once, those inside of control flow included."""
        found: dict[RuntimeDevice, None] = {}
        for step in self.steps:
            inside = (step.device,) if step.interpreted is None else step.interpreted.devices
            found.update(dict.fromkeys(inside))
        return tuple(found)

    @property
    def device_names(self) -> str:
        """The devices' names in the order of the steps, each once."""
        return ", ".join(device.name for device in self.devices)

    def uses(self, key: int) -> list[tuple[PreparedStep, bool, int]]:
        """The uses of a value: ``(step, whether it writes, which argument)``.

        Of an IF or WHILE that is interpreted, the steps inside that read or write the very memory, and the IF or WHILE itself where
        the runtime does.
        """
        found: list[tuple[PreparedStep, bool, int]] = []
        for step in self.steps:
            for writes, keys in ((False, step.inputs), (True, step.outputs)):
                if key in keys:
                    argument = keys.index(key)
                    inside = None
                    if step.interpreted is not None:
                        inside = step.interpreted.uses(argument, is_output=writes)
                    found += [(step, writes, argument)] if inside is None else inside
        return found

    def values(
        self, input_shapes: Sequence[tuple[int, ...] | None], sizes: Mapping[int, int]
    ) -> tuple[Value, ...]:
        """All values of an execution; ``sizes`` has those known from earlier ones."""
        main = self.model.main
        inputs = [
            input_value(key, spec, shape)
            for key, spec, shape in zip(main.input_indexes, self.inputs, input_shapes, strict=True)
        ]
        results = {**dict(zip(main.output_indexes, self.outputs, strict=True)), **self.temporaries}
        return (*inputs, *(result_value(key, spec, sizes.get(key)) for key, spec in results.items()))

    async def aclose(self) -> None:
        """Frees its steps at their devices, and what fell back."""
        closings = [step.prepared.aclose for step in self.steps]
        await finish_all(closings if self.fallback is None else [*closings, self.fallback.aclose])


class _ReferenceStep(Step):
    """A step on the reference device, which is prepared when it is first needed."""

    __slots__ = ("_fallback", "_index")

    def __init__(self, fallback: Fallback, index: int, step: PreparedStep) -> None:
        unprepared = cast(PreparedModel, PreparedModelDefaults())
        super().__init__(
            step._replace(device=fallback.device, prepared=unprepared, operations=(), interpreted=None)
        )
        self._fallback = fallback
        self._index = index

    def launch(self, area: RequestArea, job: Conditions) -> Launch:
        return BackgroundLaunch(job.background, self._execute(area, job))

    async def _execute(self, area: RequestArea, job: Conditions) -> ExecutionResult:
        step = self.prepared_step
        prepared = Step(step._replace(prepared=await self._fallback.prepared(self._index)))
        async with in_ordinary_memory(area, step.inputs, step.outputs):
            return await execute_step(prepared, area, job)

    def accept(self, area: RequestArea, result: ExecutionResult, job: Conditions) -> bool:
        return True  # ``execute_step`` has accepted it.


class LastValues:
    """The values of a plan for the shapes, sizes and places of the last execution: the same tuple until one of them changes."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: object = None
        self._values: tuple[Value, ...] = ()

    def of(
        self, shapes: Sequence[tuple[int, ...] | None], sizes: Mapping[int, int], bound: Collection[int]
    ) -> tuple[Value, ...]:
        """As ``Plan.values``; those of ``bound`` are in other memories and take no room."""
        known = (tuple(shapes), dict(sizes), frozenset(bound))
        if self._known != known:
            self._values = tuple(
                msgspec.structs.replace(value, size_bytes=0) if value.key in bound else value
                for value in self._plan.values(shapes, sizes)
            )
            self._known = known
        return self._values


def learnt_by(plan: Plan, owner: object) -> list[Hashable]:
    """Keys by which the dispatchers learn how long the steps take: equal to nothing else, and forgotten with their owner."""
    keys: list[Hashable] = [object() for _ in plan.steps]
    for step, key in zip(plan.steps, keys, strict=True):
        # Not when it is closed: an execution may end after that, and be learnt from, as long as its owner lives.
        weakref.finalize(owner, step.device.forget, key).atexit = False
        if step.interpreted is None:
            name = f"a model of {len(step.model.main.operations)} operations"
            step.device.reservations.add_model(key, name)
    return keys
