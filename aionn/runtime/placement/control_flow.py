"""IF and WHILE that no device takes: the runtime reads the condition, and runs the subgraphs over the devices as it runs a model.

Such an operation is a step of a pseudo-device, the interpreter, and is executed like any other prepared model. So
it works on every path that steps have: plain, fenced, asynchronous, in bursts, and with what falls back.

Owns the loop, its time-out, and the memory of the subgraphs' values. ``division`` chooses the operations that are interpreted.

Invariants:
1. A subgraph reads its inputs in place, without a copy; of the results only those of the operation itself are copied.
2. The values of a loop are stored alternately in two memories: a round reads the one that the round before has written, and writes
   the other.
3. Steps inside take turns at their devices like all others: with the execution's priority and deadline, and never after it was
   cancelled. The interpreter itself has unlimited slots.
4. The time-out of a loop runs from its start, and is looked at after a condition that holds, before the body.

Source: ``IfStep``, ``WhileStep`` and ``GotoStep`` of the NN HAL's runtime (``ExecutionPlan``).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import cast

import anyio.lowlevel
import numpy as np

from aionn.errors import GeneralFailure, InvalidArgument, MissedDeadline
from aionn.hal import (
    NO_TIMING,
    BufferToken,
    DataLocation,
    ExecutionResult,
    Launch,
    Memory,
    Model,
    Operand,
    OperandLifeTime,
    OperationType,
    OutputShape,
    PreparedModel,
    PreparedModelDefaults,
    Request,
    RequestArgument,
    Timing,
    combine_dimensions,
    constant_array,
    effective_loop_timeout_ns,
    is_scalar_type,
    operand_dtype,
    operand_size_bytes,
)
from aionn.platform.loops import finish, finish_all
from aionn.runtime.clock import now_ns
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.executions.results import sum_of
from aionn.runtime.executions.stepping import (
    Conditions,
    DeviceBurst,
    InterpretedBurst,
    PreparedStep,
    Step,
)
from aionn.runtime.memory.arguments import AREAS_KEPT_MAX, Binding, RequestArea, Value
from aionn.runtime.placement import partition
from aionn.runtime.placement.interpreter_device import interpreter_device
from aionn.runtime.placement.plan import LastValues, Plan

__all__ = ["InterpretedModel", "interpreted_step"]

MEMORIES_REMEMBERED_MAX = 64
"""Memories that a burst inside of a loop lets its device remember; more are sent with each request."""

Held = Binding | None
"""The place of a value; None for one that is left out."""


def interpreted_step(model: Model, step: partition.Step, plans: Sequence[Plan]) -> PreparedStep:
    """The step of one IF or WHILE.

    Args:
        model: The step's model, whose only operation it is.
        step: Its inputs and outputs.
        plans: Of then and else, or of condition and body.
    """
    first, second = (_Subgraph(plan) for plan in plans)
    interpreted = InterpretedModel(model, first, second)
    # Steps are executed, put into bursts and closed; the other calls of a prepared model are made of devices alone.
    prepared = cast(PreparedModel, interpreted)
    return PreparedStep(
        interpreter_device(), prepared, model, step.inputs, step.outputs, step.operations, interpreted
    )


class _Subgraph:
    """A subgraph that is placed on its own, and memory for its values.

    Attributes:
        plan: Its plan.
        sizes: Sizes that executions have learnt.
        steps: The plan's steps, as executions run them.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sizes: dict[int, int] = {}
        self.steps = [plan.step(index, sizes=self.sizes) for index in range(len(plan.steps))]
        self._areas: list[RequestArea] = []
        self._last_values = LastValues(plan)

    def values(self, is_left_out: Sequence[bool], bound: frozenset[int]) -> tuple[Value, ...]:
        """Its values; bound ones take no room. The same tuple as long as nothing has changed."""
        shapes = [
            None if out else spec.dimensions for spec, out in zip(self.plan.inputs, is_left_out, strict=True)
        ]
        return self._last_values.of(shapes, self.sizes, bound)

    def take(self, values: tuple[Value, ...]) -> RequestArea:
        """Memory for one run."""
        for index, area in enumerate(self._areas):
            if area.is_for(values):
                return self._areas.pop(index)
        self._areas.clear()  # The kept memory is for other sizes.
        return RequestArea(values)

    def give_back(self, area: RequestArea) -> None:
        """Keeps the memory for the next run, unless it had to grow."""
        area.bind({})
        if len(area.memories) == 1 and len(self._areas) < AREAS_KEPT_MAX:
            self._areas.append(area)

    async def aclose(self) -> None:
        """Frees its steps. Idempotent."""
        self._areas.clear()
        await self.plan.aclose()


class _Frame:
    """A subgraph's values, for one run after the other."""

    def __init__(self, subgraph: _Subgraph) -> None:
        self._subgraph = subgraph
        self._area: RequestArea | None = None
        self._inputs: Sequence[Held] = ()
        self._values: tuple[Value, ...] = ()
        self._results: list[Binding] = []

    async def run(
        self, job: Conditions, steps: Sequence[Step], inputs: Sequence[Held], outputs: Sequence[Held] = ()
    ) -> tuple[list[Binding], list[Timing]]:
        """Runs the subgraph over values in place.

        Args:
            job: The execution.
            steps: Those of the subgraph.
            inputs: One per input.
            outputs: One per output: where to write it in place, or None; empty for nowhere.

        Returns:
            The places of the outputs until the next run, and the measured timing.
        """
        area = self._enter(inputs, outputs)
        timings = [await job.run(step, area) for step in steps]
        results = [area.binding(key) for key in self._subgraph.plan.model.main.output_indexes]
        # Equal ones stay the same objects, by which the next reader sees that nothing has moved.
        kept = self._results if len(self._results) == len(results) else results
        self._results = [old if old[:3] == new[:3] else new for old, new in zip(kept, results, strict=True)]
        return self._results, timings

    def _enter(self, inputs: Sequence[Held], outputs: Sequence[Held]) -> RequestArea:
        if self._area is not None and not outputs and _are_same(inputs, self._inputs):
            return self._area
        main = self._subgraph.plan.model.main
        bound = {key: held for key, held in zip(main.input_indexes, inputs, strict=True) if held is not None}
        bound.update(
            (key, held) for key, held in zip(main.output_indexes, outputs, strict=False) if held is not None
        )
        is_left_out = [held is None for held in inputs]
        if self._area is None or is_left_out != [held is None for held in self._inputs]:
            self.leave()
            self._area = self._subgraph.take(self._subgraph.values(is_left_out, frozenset(bound)))
        self._area.bind(bound)
        self._inputs = tuple(inputs)
        return self._area

    def leave(self) -> None:
        """Gives the memory back."""
        area, self._area, self._results = self._area, None, []
        if area is not None:
            self._subgraph.give_back(area)


def _are_same(left: Sequence[Held], right: Sequence[Held]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


class InterpretedModel(PreparedModelDefaults):
    """An IF or WHILE as a prepared model of the interpreter.

    Args:
        model: Whose only operation it is.
        first: Then, or the condition.
        second: Else, or the body.
    """

    def __init__(self, model: Model, first: _Subgraph, second: _Subgraph) -> None:
        self._model = model
        self._subgraphs = (first, second)
        (self._operation,) = model.main.operations
        self._is_if = self._operation.type == OperationType.IF
        self._passed = self._operation.inputs[3:] if self._is_if else self._operation.inputs[2:]
        self._constants = _constants_of(model, (*self._operation.inputs[:1], *self._passed))

    @property
    def devices(self) -> tuple[RuntimeDevice, ...]:
        """The devices that its subgraphs go to."""
        return tuple(
            dict.fromkeys(device for subgraph in self._subgraphs for device in subgraph.plan.devices)
        )

    def uses(self, argument: int, *, is_output: bool) -> list[tuple[PreparedStep, bool, int]] | None:
        """The steps inside that read or write an argument in place; None if the runtime itself does."""
        main = self._model.main
        index = (main.output_indexes if is_output else main.input_indexes)[argument]
        if is_output:
            if not self._is_if:
                return None  # The last round is known when it is over.
            return self._uses_inside([p for p, i in enumerate(self._operation.outputs) if i == index], True)
        if self._is_if and index == self._operation.inputs[0]:
            return None
        positions = [position for position, i in enumerate(self._passed) if i == index]
        if not self._is_if and any(position < len(self._operation.outputs) for position in positions):
            return None  # A loop without a round gives what it was given.
        return self._uses_inside(positions, False)

    def _uses_inside(self, positions: Sequence[int], is_output: bool) -> list[tuple[PreparedStep, bool, int]]:
        found: list[tuple[PreparedStep, bool, int]] = []
        for subgraph in self._subgraphs:
            main = subgraph.plan.model.main
            keys = main.output_indexes if is_output else main.input_indexes
            for position in positions:
                found += subgraph.plan.uses(keys[position])
        return found

    async def interpret(
        self, request: Request, job: Conditions, burst: InterpretedBurst | None = None
    ) -> ExecutionResult:
        """See ``Interpreted``: executes the request's operation.

        Raises:
            InvalidArgument: The condition is not one boolean.
            MissedDeadline: The loop took longer than its time-out.
            Error: A step failed.
        """
        assert burst is None or isinstance(burst, _BurstInside), "one that it has opened"
        run = _Run(job, burst)
        held: dict[int, Held] = dict(self._constants)
        main = self._model.main
        for index, argument in zip(main.input_indexes, request.inputs, strict=True):
            held[index] = _held(request, argument, main.operands[index])
        passed = [held[index] for index in self._passed]
        if self._is_if:
            results, frames = await self._run_if(request, run, held[self._operation.inputs[0]], passed)
        else:
            results, frames = await self._run_while(run, passed)
        try:
            shapes = self._write(request, results)
        finally:
            for frame in frames:
                frame.leave()
        is_sufficient = all(shape.is_sufficient for shape in shapes)
        timing = sum_of(run.timings) if is_sufficient and job.measure and run.timings else NO_TIMING
        return ExecutionResult(is_sufficient, shapes, timing)

    async def _run_if(
        self, request: Request, run: _Run, condition: Held, passed: Sequence[Held]
    ) -> tuple[Sequence[Held], list[_Frame]]:
        holds = _truth(condition, "input 0")
        subgraph = self._subgraphs[0 if holds else 1]
        frame = _Frame(subgraph)
        # A device's memory is written by the device; other memory is copied, since its room may not be enough.
        place = dict(zip(self._model.main.output_indexes, request.outputs, strict=True))
        outputs = [self._in_place(request, place.get(index), index) for index in self._operation.outputs]
        try:
            in_place = outputs if any(outputs) else ()
            results, timings = await frame.run(run.job, run.steps(subgraph), passed, in_place)
        except BaseException:
            run.job.when_unused(frame.leave)
            raise
        run.timings += timings
        return results, [frame]

    def _in_place(self, request: Request, argument: RequestArgument | None, index: int) -> Held:
        if argument is None or not isinstance(request.pools[argument.location.pool_index], BufferToken):
            return None
        return _held(request, argument, self._model.main.operands[index])

    async def _run_while(self, run: _Run, passed: Sequence[Held]) -> tuple[Sequence[Held], list[_Frame]]:
        condition, body = self._subgraphs
        conditions, bodies = [_Frame(condition), _Frame(condition)], [_Frame(body), _Frame(body)]
        frames = [*conditions, *bodies]
        limit_ns = effective_loop_timeout_ns(run.job.loop_timeout_ns)
        started_ns = now_ns()
        job, condition_steps, body_steps = run.job, run.steps(condition), run.steps(body)
        state = list(passed)
        try:
            for round_number in itertools.count():
                (holds,), timings = await conditions[round_number % 2].run(job, condition_steps, state)
                run.add(timings)
                if not _truth(holds, "condition"):
                    break
                if now_ns() - started_ns >= limit_ns:
                    raise MissedDeadline(
                        f"the loop took longer than its time-out of {limit_ns / 1e9:g} s", transient=True
                    )
                results, timings = await bodies[round_number % 2].run(job, body_steps, state)
                run.add(timings)
                # State beyond the body's outputs is constant through the loop.
                state[: len(results)] = results
                # A device that answers immediately leaves the loop no turn otherwise.
                await anyio.lowlevel.checkpoint()
        except BaseException:
            for frame in frames:
                job.when_unused(frame.leave)
            raise
        results_kept = state[: len(self._operation.outputs)]
        if any(held is None for held in results_kept):
            raise InvalidArgument("state: a value that is left out cannot be an output")
        return results_kept, frames

    def _write(self, request: Request, results: Sequence[Held]) -> tuple[OutputShape, ...]:
        """Copies results to where the request wants them."""
        main = self._model.main
        result_of = dict(zip(self._operation.outputs, results, strict=True))
        shapes = []
        for index, argument in zip(main.output_indexes, request.outputs, strict=True):
            held, declared = result_of[index], main.operands[index].dimensions
            assert held is not None, "checked where it was made"
            if combine_dimensions(declared, held.shape) is None:
                raise GeneralFailure(
                    f"{'IF' if self._is_if else 'WHILE'}: the model has shape {list(declared)}, got {list(held.shape)}"
                )
            location = argument.location
            pool = request.pools[location.pool_index]
            if isinstance(pool, BufferToken):
                shapes.append(OutputShape(held.shape))
                continue
            assert held.array is not None, "values that the runtime copies are in ordinary memory"
            size_bytes = held.array.nbytes
            shapes.append(OutputShape(held.shape, size_bytes <= location.length))
            if size_bytes <= location.length:
                room = pool.array[location.offset : location.offset + size_bytes]
                np.copyto(room.view(held.array.dtype), held.array.reshape(-1))
        return tuple(shapes)

    async def open_burst(self, polling: Mapping[str, int]) -> InterpretedBurst:
        """See ``Interpreted``."""
        burst = _BurstInside()
        try:
            for subgraph in self._subgraphs:
                await burst.open(subgraph, polling)
        except BaseException:
            await finish(burst.aclose())
            raise
        return burst

    async def aclose(self) -> None:
        """See ``PreparedModel``."""
        await finish_all(subgraph.aclose for subgraph in self._subgraphs)


class _Run:
    """One execution of an IF or WHILE.

    Attributes:
        job: The execution that it is a step of.
        timings: The measurements so far.
    """

    def __init__(self, job: Conditions, burst: _BurstInside | None) -> None:
        self.job = job
        self.timings: list[Timing] = []
        self._burst = burst

    def add(self, timings: Sequence[Timing]) -> None:
        """Adds what a round has measured, if that is wanted: a loop's rounds are not kept one by one."""
        if self.job.measure:
            self.timings = [sum_of([*self.timings, *timings])]

    def steps(self, subgraph: _Subgraph) -> Sequence[Step]:
        """The steps of a subgraph."""
        return subgraph.steps if self._burst is None else self._burst.steps(subgraph)


class _StepInside(Step):
    """A step inside of an IF or WHILE, launched through a burst."""

    __slots__ = ("_burst", "_identifiers")

    def __init__(
        self,
        subgraph: _Subgraph,
        index: int,
        burst: DeviceBurst | InterpretedBurst,
        identifiers: _Identifiers,
    ) -> None:
        plan = subgraph.plan
        fallback, name = plan.fallback_step(index), plan.step_name(index)
        super().__init__(plan.steps[index], sizes=subgraph.sizes, fallback=fallback, name=name)
        self._burst = burst
        self._identifiers = identifiers

    @property
    def is_closed(self) -> bool:
        return isinstance(self._burst, DeviceBurst) and self._burst.is_closed

    def launch(self, area: RequestArea, job: Conditions) -> Launch:
        burst, step = self._burst, self.prepared_step
        request = area.request(step.inputs, step.outputs)
        identifiers = self._identifiers.of(request)
        if identifiers is None or not isinstance(burst, DeviceBurst) or not burst.is_free:
            return super().launch(area, job)
        return burst.launch(request, identifiers, job)

    async def interpret(self, area: RequestArea, job: Conditions) -> ExecutionResult:
        assert self.interpreted is not None and not isinstance(self._burst, DeviceBurst)
        step = self.prepared_step
        return await self.interpreted.interpret(area.request(step.inputs, step.outputs), job, self._burst)


class _Identifiers:
    """The identifiers of memories for the bursts inside of an IF or WHILE."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Memory, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count(1)

    def of(self, request: Request) -> list[int] | None:
        """The identifiers of a request's memories; None for a request that no burst can take."""
        identifiers = []
        for pool in request.pools:
            if isinstance(pool, BufferToken):
                return None
            if pool not in self._of and len(self._of) < MEMORIES_REMEMBERED_MAX:
                self._of[pool] = next(self._numbers)
            identifiers.append(self._of.get(pool, -1))
        return identifiers


class _BurstInside:
    """The bursts of the steps inside of an IF or WHILE, and these steps, launched through them."""

    def __init__(self) -> None:
        self._opened: list[DeviceBurst | InterpretedBurst] = []
        self._steps: dict[int, list[Step]] = {}
        self._identifiers = _Identifiers()

    async def open(self, subgraph: _Subgraph, polling: Mapping[str, int]) -> None:
        """Opens the bursts of a subgraph's steps. Raises as ``configure_execution_burst``."""
        steps = self._steps[id(subgraph)] = []
        for index, step in enumerate(subgraph.plan.steps):
            burst: DeviceBurst | InterpretedBurst
            if step.interpreted is not None:
                burst = await step.interpreted.open_burst(polling)
            else:
                burst = DeviceBurst(await step.prepared.configure_execution_burst(**polling))
            self._opened.append(burst)
            steps.append(_StepInside(subgraph, index, burst, self._identifiers))

    def steps(self, subgraph: _Subgraph) -> Sequence[Step]:
        """The steps of a subgraph that was opened."""
        return self._steps[id(subgraph)]

    @property
    def bursts(self) -> list[DeviceBurst]:
        """See ``InterpretedBurst``."""
        found: list[DeviceBurst] = []
        for burst in self._opened:
            found += [burst] if isinstance(burst, DeviceBurst) else burst.bursts
        return found

    async def aclose(self) -> None:
        """See ``InterpretedBurst``."""
        while self._opened:
            burst = self._opened.pop()
            await burst.aclose()


def _constants_of(model: Model, indexes: Sequence[int]) -> dict[int, Held]:
    """The constants among an operation's inputs, in memory that devices can read; and what is left out for good."""
    constants: dict[int, Held] = {}
    for index in dict.fromkeys(indexes):
        operand = model.main.operands[index]
        if operand.lifetime == OperandLifeTime.NO_VALUE:
            constants[index] = None
        elif operand.is_constant:
            array = constant_array(model, operand)
            memory = Memory.create(max(array.nbytes, 1), name="aionn-constant")
            view = memory.array[: array.nbytes].view(array.dtype).reshape(array.shape)
            view[...] = array
            constants[index] = Binding(memory, DataLocation(0, 0, array.nbytes), array.shape, view)
    return constants


def _held(request: Request, argument: RequestArgument, operand: Operand) -> Held:
    """The place of a request's argument."""
    if argument.has_no_value:
        return None
    location = argument.location
    pool = request.pools[location.pool_index]
    shape = () if is_scalar_type(operand.type) else argument.dimensions or operand.dimensions
    if isinstance(pool, BufferToken) or pool.image is not None:
        return Binding(pool, location, shape, None)
    size_bytes = operand_size_bytes(operand.type, shape)
    place = DataLocation(0, location.offset, size_bytes)
    array = pool.array[location.offset : location.offset + size_bytes]
    return Binding(pool, place, shape, array.view(operand_dtype(operand.type)).reshape(shape))


def _truth(condition: Held, where: str) -> bool:
    """The value of a condition.

    Raises:
        InvalidArgument: It is not one boolean.
    """
    if condition is None or condition.array is None or condition.array.size != 1:
        got = "none" if condition is None else f"shape {list(condition.shape)}"
        raise InvalidArgument(f"{where}: expected one boolean, got {got}")
    return bool(condition.array.reshape(()))
