"""One step of a plan on its device: the driver's call, the check of its answer, and growth of outputs.

Owns the record of such a step, which of the driver's calls is taken and how often one is repeated. ``execution`` orders the steps.

Invariants:
1. An answer that breaks the contract is refused before anything believes it.
2. An output that did not fit has at least twice the room at the next try, and tries are counted.

Source: ``StepExecutor`` of the NN HAL's runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from aionn.errors import ErrorStatus, OutputInsufficientSize, error_for_status
from aionn.hal import ExecutionResult, Model, OutputShape, PreparedModel, Request, Timing
from aionn.observability.tracing import section
from aionn.platform.real_work import real_work
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.executions.execution import PRIORITY
from aionn.runtime.memory.arguments import RequestArea
from aionn.validation import check_execution_result
from fences import SyncFence

__all__ = ["Interpreted", "PreparedStep", "execute_step"]

GROWTH_TRIES_MAX = 8
"""Number of times that an execution is repeated with larger outputs; each try at least doubles those that were too small."""


class Interpreted(Protocol):
    """An IF or WHILE that the runtime itself runs, as the plan sees it that has it as a step."""

    @property
    def devices(self) -> tuple[RuntimeDevice, ...]:
        """The devices that its subgraphs go to."""
        ...

    def uses(self, argument: int, *, is_output: bool) -> list[tuple[PreparedStep, bool, int]] | None:
        """The steps inside that read or write an argument in place; None if the runtime itself does."""
        ...


class PreparedStep(NamedTuple):
    """A step of a plan, made ready on its device.

    Attributes:
        device: Where it runs.
        prepared: The device's prepared model.
        model: What was prepared.
        inputs: Keys of the values that it reads, in the order of its model's inputs.
        outputs: Keys of the values that it writes, in the order of its model's outputs.
        operations: Which of the whole model's operations it has.
        interpreted: The IF or WHILE that the runtime itself runs, which is what ``prepared`` is then; None for all other steps.
    """

    device: RuntimeDevice
    prepared: PreparedModel
    model: Model
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operations: tuple[int, ...]
    interpreted: Interpreted | None = None


async def execute_step(
    step: PreparedStep,
    area: RequestArea,
    sizes: dict[int, int],
    measure: bool,
    deadline_ns: int | None,
    loop_timeout_ns: int | None,
) -> Timing:
    """Executes a step on its device, with more room for outputs whose size only the device knows.

    Args:
        step: What to execute.
        area: Holds the values; grows with them.
        sizes: Takes up what was learnt about sizes, for the next execution.
        measure: Whether timings are wanted.
        deadline_ns: Absolute; None means no deadline.
        loop_timeout_ns: For every WHILE; None for the default.
    """
    urgency: dict[str, Any] = {}
    if step.prepared.takes_priority:
        urgency["priority"] = PRIORITY.get()
    for _ in range(GROWTH_TRIES_MAX):
        request = area.request(step.inputs, step.outputs)
        with section("LI_PE", step.device.name):
            if step.device.is_asynchronous:
                result = await _launch(step.prepared, request, measure, deadline_ns, loop_timeout_ns, urgency)
            else:
                result = await step.prepared.execute_synchronously(
                    request,
                    measure=measure,
                    deadline_ns=deadline_ns,
                    loop_timeout_ns=loop_timeout_ns,
                    **urgency,
                )
        check_execution_result(step.model.main, result, measure=measure)
        area.note(step.outputs, result.output_shapes)
        if result.output_sufficient_size:
            return result.timing
        sizes.update(area.grow(step.outputs, result.output_shapes))
    raise OutputInsufficientSize(
        f"execute: the outputs did not fit after {GROWTH_TRIES_MAX} tries",
        [(s.dimensions, s.is_sufficient) for s in result.output_shapes],
    )


async def _launch(
    prepared: PreparedModel,
    request: Request,
    measure: bool,
    deadline_ns: int | None,
    loop_timeout_ns: int | None,
    urgency: Mapping[str, Any],
) -> ExecutionResult:
    """The driver's asynchronous call, waited for."""
    done = SyncFence("launched execution")
    outcome: list[tuple[ErrorStatus, Sequence[OutputShape], Timing]] = []

    def callback(status: ErrorStatus, shapes: Sequence[OutputShape], timing: Timing) -> None:
        # From any thread; a second one is ignored.
        outcome.append((status, shapes, timing))
        done.try_signal()

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
