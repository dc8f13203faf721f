"""A model made ready on one device or several, and the ways to execute it.

Owns request memory that is used again, the choice of the path (plain, fenced, burst), and the growth of outputs whose size only the
device knows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import anyio.to_thread
import msgspec

from aionn.errors import Error, InvalidArgument
from aionn.hal import (
    Model,
    PreparedModel,
    Priority,
    Timing,
    check_deadline_ns,
    check_fences,
)
from aionn.hal.real_work import real_work
from aionn.runtime.arguments import (
    Array,
    Binding,
    RequestArea,
    TensorSpec,
    Value,
    check_inputs,
    input_value,
    output_target,
    result_value,
)
from aionn.runtime.burst import Burst
from aionn.runtime.clock import to_ns
from aionn.runtime.execution import Execution, Result, Turn
from aionn.runtime.fallback import Fallback, in_ordinary_memory
from aionn.runtime.memory import OwnMemory, bind, image_view
from aionn.runtime.stepping import execute_step
from fences import SyncFence

if TYPE_CHECKING:
    from aionn.runtime.control_flow import InterpretedModel
    from aionn.runtime.reusable import ReusableExecution
    from aionn.runtime.runtime import Runtime, RuntimeDevice

__all__ = ["Compilation", "Placement", "Plan", "PreparedStep", "priority_of"]

AREAS_KEPT_MAX = 8
"""Request memories that a compilation keeps for the next execution; more are given back."""

NEW_BYTES_IN_LOOP_MAX = 1 << 18
"""Largest request memory that is made on the event loop: the kernel gives some 2 bytes a nanosecond at first use."""

COPIED_BYTES_IN_LOOP_MAX = 1 << 21
"""Most bytes of inputs that are copied on the event loop: at some 10 bytes a nanosecond, a fifth of a millisecond."""


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

    async def aclose(self) -> None:
        """Frees its steps at their devices, and what fell back."""
        for step in self.steps:
            await step.prepared.aclose()
        if self.fallback is not None:
            await self.fallback.aclose()


def declared_ns(prepared: PreparedModel) -> int | None:
    """What a driver says that an execution takes, in ns; None where it says nothing."""
    declared: int | None = getattr(prepared, "expected_duration_ns", None)
    return declared


async def _on_thread(fill: Callable[[], RequestArea]) -> RequestArea:
    with real_work("filling request memory"):
        return await anyio.to_thread.run_sync(fill)


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
        polling: Mapping[str, int] | None = None,
        report: Callable[[Execution], None] | None = None,
        on_close: Callable[[Compilation], None],
    ) -> None:
        self._polling = polling or {}
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
            outputs: One entry per output: a memory that it is written to in place, an array (or writable buffer, or DLPack object)
                that it is copied to, or None for an array of its own; None for those alone. In the result, a shared memory's output
                is a view of it, a device memory's an empty array, and a given array that array.
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
        check_fences(wait_for, where="wait_for")
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
        bound, plain, targets = self._bindings(inputs, outputs)
        values = check_inputs(self.inputs, plain)
        loop_timeout_ns = None if loop_timeout is None else to_ns(loop_timeout, what="loop_timeout")

        def prepare() -> RequestArea | Awaitable[RequestArea]:
            return self._area(values, bound, targets)

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
    ) -> tuple[dict[int, Binding], Sequence[Any], dict[int, Array]]:
        """What lies in memories of the application's own, by key; the other inputs; arrays that outputs are copied to, by key."""
        if outputs is None and not any(isinstance(value, OwnMemory) for value in inputs):
            return {}, inputs, {}
        main = self.model.main
        targets: dict[int, Array] = {}
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
            if isinstance(value, OwnMemory):
                bound[main.output_indexes[index]] = bind(self, True, index, value, f"output {index}")
            elif value is not None:
                targets[main.output_indexes[index]] = output_target(index, self.outputs[index], value)
        return bound, plain, targets

    def _turn(self, index: int, measure: bool, loop_timeout_ns: int | None) -> Turn:
        step = self._plan.steps[index]

        async def run(area: RequestArea, deadline_ns: int | None) -> Timing:
            return await execute_step(step, area, self._sizes, measure, deadline_ns, loop_timeout_ns)

        fall_back = self._plan.fall_back(index, measure, loop_timeout_ns)
        return Turn(
            step.device.dispatcher, run, fall_back, self._learnt_by[index], declared_ns(step.prepared)
        )

    def _area(
        self, arrays: Sequence[Array | None], bound: Mapping[int, Binding], targets: Mapping[int, Array]
    ) -> RequestArea | Awaitable[RequestArea]:
        """Memory that holds the inputs; to be awaited where filling it takes longer than the loop may be held."""
        shapes = tuple([None if array is None else array.shape for array in arrays])
        values = self._values(shapes, bound.keys())
        for index, area in enumerate(self._areas):
            if area.is_for(values):
                del self._areas[index]
                break
        else:
            self._areas.clear()  # What was kept is for other shapes or sizes.
            area = None

        def filled() -> RequestArea:
            filling = RequestArea(values) if area is None else area
            filling.bind(bound, targets)
            filling.write(self.model.main.input_indexes, arrays)
            return filling

        if area is None:
            is_quick = sum(value.size_bytes for value in values) <= NEW_BYTES_IN_LOOP_MAX
        else:
            is_quick = sum([a.nbytes for a in arrays if a is not None]) <= COPIED_BYTES_IN_LOOP_MAX
        return filled() if is_quick else _on_thread(filled)

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
            polling=self._polling,
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
        await self._plan.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"on {self._plan.device_names}"
        return f"<Compilation of {len(self.model.main.operations)} operations, {state}>"
