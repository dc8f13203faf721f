"""A model made ready on one device or several, and the ways to execute it.

Owns request memory that is used again, the choice of the path (plain, fenced, burst), and the growth of outputs whose size only the
device knows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from aionn.errors import Error, ErrorStatus, InvalidArgument, OutputInsufficientSize, error_for_status
from aionn.hal import (
    ExecutionResult,
    Model,
    OutputShape,
    PreparedModel,
    Priority,
    Request,
    Timing,
    check_deadline_ns,
)
from aionn.hal.real_work import real_work
from aionn.hal.tracing import section
from aionn.runtime.arguments import (
    Array,
    Binding,
    RequestArea,
    TensorSpec,
    Value,
    check_inputs,
    input_value,
    result_value,
)
from aionn.runtime.burst import Burst
from aionn.runtime.clock import to_ns
from aionn.runtime.execution import PRIORITY, Execution, Result, Turn, check_fences
from aionn.runtime.fallback import Fallback, in_ordinary_memory
from aionn.runtime.memory import OwnMemory, bind, image_view
from aionn.validation import check_execution_result
from fences import SyncFence

if TYPE_CHECKING:
    from aionn.runtime.control_flow import InterpretedModel
    from aionn.runtime.reusable import ReusableExecution
    from aionn.runtime.runtime import Runtime, RuntimeDevice

__all__ = ["Compilation", "Placement", "Plan", "PreparedStep", "priority_of"]

AREAS_KEPT_MAX = 8
"""Request memories that a compilation keeps for the next execution; more are given back."""

GROWTH_TRIES_MAX = 8
"""How often an execution is repeated with larger outputs; each try at least doubles those that were too small."""


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


def priority_of(value: str | Priority) -> Priority:
    """A priority by name or value.

    Raises:
        InvalidArgument: There is no such priority.
    """
    try:
        return Priority[value.upper()] if isinstance(value, str) else Priority(value)
    except (KeyError, ValueError):
        names = ", ".join(p.name.lower() for p in Priority)
        raise InvalidArgument(f"priority: expected one of {names}, got {value!r}") from None


class PreparedStep(NamedTuple):
    """A step of the plan, made ready on its device.

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
    interpreted: InterpretedModel | None = None


class Plan(NamedTuple):
    """All that a compilation executes, or all of a subgraph that is placed on its own.

    Attributes:
        model: The whole model.
        inputs: What it takes, by description.
        outputs: What it gives, by description.
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

    def fall_back(
        self, index: int, measure: bool, loop_timeout_ns: int | None = None
    ) -> Callable[[RequestArea, int | None, Error], Awaitable[tuple[Timing, str]]] | None:
        """How a step runs on the reference device after it has failed on its own."""
        fallback, step = self.fallback, self.steps[index]
        if fallback is None or step.device is fallback.device:
            return None

        async def run(area: RequestArea, deadline_ns: int | None, error: Error) -> tuple[Timing, str]:
            elsewhere = step._replace(
                device=fallback.device, prepared=await fallback.prepared(index), interpreted=None
            )
            async with in_ordinary_memory(area, step.inputs, step.outputs):
                timing = await execute_step(elsewhere, area, {}, measure, deadline_ns, loop_timeout_ns)
            inside = f"subgraph {self.number}, " if self.number else ""
            told = f"{inside}step {index} of {len(self.steps)}: {step.device.name} failed ({error}); ran on {fallback.device.name}"
            return timing, told

        return run

    def rescue(self, measure: bool, loop_timeout_ns: int | None = None) -> Turn | None:
        """How the whole model runs on the reference device when a step has failed there as well, or cannot run at all."""
        fallback = self.fallback
        if fallback is None or len(self.steps) == 1:
            return None
        main = self.model.main

        async def run(area: RequestArea, deadline_ns: int | None) -> Timing:
            step = PreparedStep(
                fallback.device,
                await fallback.prepared(len(self.steps)),
                self.model,
                main.input_indexes,
                main.output_indexes,
                (),
            )
            async with in_ordinary_memory(area, step.inputs, step.outputs):
                return await execute_step(step, area, {}, measure, deadline_ns, loop_timeout_ns)

        return Turn(fallback.device.dispatcher, run)

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
        """Where a value is met: ``(step, whether it writes, which argument)``.

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
        """All values of an execution; ``sizes`` says what is known from earlier ones."""
        main = self.model.main
        inputs = [
            input_value(key, spec, shape)
            for key, spec, shape in zip(main.input_indexes, self.inputs, input_shapes, strict=True)
        ]
        results = {**dict(zip(main.output_indexes, self.outputs, strict=True)), **self.temporaries}
        return (*inputs, *(result_value(key, spec, sizes.get(key)) for key, spec in results.items()))


def declared_ns(prepared: PreparedModel) -> int | None:
    """What a driver says that an execution takes, in ns; None where it says nothing."""
    declared: int | None = getattr(prepared, "expected_duration_ns", None)
    return declared


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
        deadline_ns: Absolute; None for none.
        loop_timeout_ns: For every WHILE; None for the default.
    """
    urgency: dict[str, Any] = {}
    if getattr(step.prepared, "takes_priority", False):
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


class Compilation:
    """A model made ready. Close it with ``aclose`` or ``async with``; the runtime closes what is left.

    Attributes:
        model: The model.
        inputs: What it takes.
        outputs: What it gives.
        devices: Names of the devices that it runs on.
        placement: Which operation runs where, and why.
        from_cache: Whether every step came from the cache; the constants' memory (``model.pools``) may then be missing.
    """

    def __init__(
        self,
        runtime: Runtime,
        plan: Plan,
        priority: Priority,
        *,
        from_cache: bool = False,
        report: Callable[[Execution], None] | None = None,
        on_close: Callable[[Compilation], None],
    ) -> None:
        self._report = report
        self._runtime = runtime
        self._plan = plan
        self._priority = priority
        self._on_close = on_close
        self._areas: list[RequestArea] = []
        self._sizes: dict[int, int] = {}
        self._last_values: tuple[object, tuple[Value, ...]] | None = None
        self._bursts: set[Burst] = set()
        self._closed = False
        # Durations are learnt by these, which nothing else is equal to, however often an address is used again.
        self._learnt_by = [object() for _ in plan.steps]
        self.model = plan.model
        self.inputs = plan.inputs
        self.outputs = plan.outputs
        self.devices = tuple(device.name for device in plan.devices)
        self.placement = plan.placement
        self.from_cache = from_cache

    async def execute(
        self,
        inputs: Sequence[Any],
        *,
        outputs: Sequence[Any] | None = None,
        deadline: int | None = None,
        priority: str | Priority | None = None,
        measure: bool = False,
        loop_timeout: float | None = None,
    ) -> Result:
        """Executes the model once.

        Args:
            inputs: One array (or buffer, or DLPack object, or memory) per input; None for an optional input that is left out.
            outputs: One entry per output: a memory that it is written to in place, or None for an array; None for arrays alone.
                In the result, a shared memory's output is a view of it, a device memory's an empty array.
            deadline: Absolute nanoseconds, see ``aionn.after``; None for none.
            priority: Against other executions; None takes the compilation's.
            measure: Whether ``timing`` is wanted.
            loop_timeout: Seconds for every WHILE; None for the default.

        Returns:
            The result, with arrays of the caller's own.

        Raises:
            InvalidArgument: An input does not fit; nothing was sent.
            MissedDeadline: The deadline passed, before or while running. The device may still be busy with it.
            DeadObject: The driver process is gone.
            Error: Any other failure.

        Cancelled while waiting: the execution never runs. Cancelled while running: the device keeps its slot until it is done.
        """
        execution = self._start(inputs, outputs, deadline, priority, measure, loop_timeout)
        try:
            return await execution
        except BaseException:
            execution.cancel()
            raise

    def execute_fenced(
        self,
        inputs: Sequence[Any],
        *,
        outputs: Sequence[Any] | None = None,
        wait_for: Sequence[SyncFence] = (),
        deadline: int | None = None,
        duration: float | None = None,
        priority: str | Priority | None = None,
        measure: bool = False,
        loop_timeout: float | None = None,
    ) -> Execution:
        """Starts an execution that begins when all fences have signalled, and returns at once.

        The inputs are read when the fences have signalled, so they may be filled by the executions that are waited for.

        Args:
            inputs: As for ``execute``.
            outputs: As for ``execute``.
            wait_for: Fences to wait for; one that fails later fails this execution.
            deadline: As for ``execute``.
            duration: Seconds allowed from the moment that the last fence signals; None for no limit.
            priority: As for ``execute``.
            measure: As for ``execute``.
            loop_timeout: As for ``execute``.

        Returns:
            The execution: ``.fence`` for others to wait for, awaitable for the result.

        Raises:
            InvalidArgument: An input does not fit, or a fence has failed already.
        """
        check_fences(wait_for)
        duration_ns = None if duration is None else to_ns(duration, what="duration")
        return self._start(inputs, outputs, deadline, priority, measure, loop_timeout, wait_for, duration_ns)

    def _start(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any] | None,
        deadline: int | None,
        priority: str | Priority | None,
        measure: bool,
        loop_timeout: float | None,
        wait_for: Sequence[SyncFence] = (),
        duration_ns: int | None = None,
    ) -> Execution:
        self._check_open()
        check_deadline_ns(deadline, where="execute")
        bound, plain = self._bindings(inputs, outputs)
        values = check_inputs(self.inputs, plain)
        loop_timeout_ns = None if loop_timeout is None else to_ns(loop_timeout, what="loop_timeout")

        def prepare() -> RequestArea:
            area = self._area(values, bound)
            area.write(self.model.main.input_indexes, values)
            return area

        execution = Execution(
            prepare,
            [self._turn(index, measure, loop_timeout_ns) for index in range(len(self._plan.steps))],
            self.model.main.output_indexes,
            device=self._plan.device_names,
            priority=self._priority if priority is None else priority_of(priority),
            deadline_ns=deadline,
            duration_ns=duration_ns,
            wait_for=wait_for,
            rescue=self._plan.rescue(measure, loop_timeout_ns),
            report=self._report,
            finish=self._give_back,
        )
        execution.start(self._runtime.background)
        return execution

    def _bindings(
        self, inputs: Sequence[Any], outputs: Sequence[Any] | None
    ) -> tuple[dict[int, Binding], Sequence[Any]]:
        """What lies in memories of the application's own, by key; and the other inputs."""
        if outputs is None and not any(isinstance(value, OwnMemory) for value in inputs):
            return {}, inputs
        main = self.model.main
        bound: dict[int, Binding] = {}
        plain = list(inputs)
        for index, value in enumerate(plain[: len(self.inputs)]):
            pixels = image_view(self, index, value, f"input {index}")
            if pixels is not None:
                plain[index] = pixels
            elif isinstance(value, OwnMemory):
                bound[main.input_indexes[index]] = bind(self, False, index, value, f"input {index}")
                plain[index] = None
        if outputs is not None and len(outputs) != len(self.outputs):
            raise InvalidArgument(f"outputs: expected {len(self.outputs)} entries, got {len(outputs)}")
        for index, value in enumerate(outputs or ()):
            if value is not None:
                bound[main.output_indexes[index]] = bind(self, True, index, value, f"output {index}")
        return bound, plain

    def _turn(self, index: int, measure: bool, loop_timeout_ns: int | None) -> Turn:
        step = self._plan.steps[index]

        async def run(area: RequestArea, deadline_ns: int | None) -> Timing:
            return await execute_step(step, area, self._sizes, measure, deadline_ns, loop_timeout_ns)

        fall_back = self._plan.fall_back(index, measure, loop_timeout_ns)
        return Turn(
            step.device.dispatcher, run, fall_back, self._learnt_by[index], declared_ns(step.prepared)
        )

    def _area(self, arrays: Sequence[Array | None], bound: Mapping[int, Binding]) -> RequestArea:
        shapes = tuple([None if array is None else array.shape for array in arrays])
        values = self._values(shapes, bound.keys())
        for index, area in enumerate(self._areas):
            if area.is_for(values):
                del self._areas[index]
                break
        else:
            self._areas.clear()  # What was kept is for other shapes or sizes.
            area = RequestArea(values)
        area.bind(bound)
        return area

    def _values(
        self, shapes: tuple[tuple[int, ...] | None, ...], bound: Collection[int]
    ) -> tuple[Value, ...]:
        known = (shapes, dict(self._sizes), set(bound))
        if self._last_values is None or self._last_values[0] != known:
            values = self._plan.values(shapes, self._sizes)
            if bound:
                values = tuple(
                    msgspec.structs.replace(v, size_bytes=0) if v.key in bound else v for v in values
                )
            self._last_values = known, values
        return self._last_values[1]

    def _give_back(self, area: RequestArea | None) -> None:
        # One that had to grow has its values scattered; the next execution starts with one memory of the right size.
        keep = area is not None and len(area.memories) == 1 and not self._closed
        if area is not None:
            area.bind({})
        if area is not None and keep and len(self._areas) < AREAS_KEPT_MAX:
            self._areas.append(area)

    def burst(self, *, slots: int = 2) -> Burst:
        """Repeated executions at low cost; use it with ``async with``.

        Args:
            slots: How many requests' memory the burst has: while one runs, the others can be filled.

        Raises:
            InvalidArgument: The model's inputs or outputs have unknown shapes, or ``slots`` is below 1.
        """
        self._check_open()
        burst = Burst(
            self._runtime,
            self._plan,
            self._priority,
            slots,
            report=self._report,
            on_close=self._bursts.discard,
        )
        self._bursts.add(burst)
        return burst

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("compilation: closed")

    @property
    def steps(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Device and operations of each step, in the order in which they run."""
        return tuple((step.device.name, step.operations) for step in self._plan.steps)

    def page(self, *, title: str = "compilation") -> str:
        """One self-contained HTML page that draws the model, each device's operations in a colour of their own.

        Raises:
            InvalidArgument: The model is too large to be drawn.
        """
        from aionn.runtime.page import compilation_page

        return compilation_page(self, title=title)

    def reusable(self, *, measure: bool = False, loop_timeout: float | None = None) -> ReusableExecution:
        """An execution whose memory is kept: inputs are written into ``inputs``, results read from the result's views.

        Raises:
            InvalidArgument: An input has an unknown shape.
        """
        from aionn.runtime.reusable import ReusableExecution

        self._check_open()
        return ReusableExecution(self, measure, loop_timeout)

    async def aclose(self) -> None:
        """Ends its bursts and frees it at the device. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._on_close(self)
        for burst in list(self._bursts):
            await burst.aclose()
        self._areas.clear()
        for step in self._plan.steps:
            await step.prepared.aclose()
        if self._plan.fallback is not None:
            await self._plan.fallback.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"on {self._plan.device_names}"
        return f"<Compilation of {len(self.model.main.operations)} operations, {state}>"
