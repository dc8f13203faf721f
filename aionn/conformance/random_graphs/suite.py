"""Random graphs on a device: which graph a number means, what the device is asked, and what a difference is called.

Owns the numbering of the graphs and the verdict on one. ``graphs`` defines graphs and shrinks them, ``suite`` owns
the device and the counts, ``workers`` the processes.

Invariants:
1. A number and a filter determine a graph. Even numbers are graphs of several operations, odd ones single operations, as far as the
   filter leaves both.
2. Operations that the device does not support are removed from a graph before it runs; the rest is unchanged.
3. A difference that another legal rounding of intermediate results would make as well is not a failure, and is counted.
4. A graph that the reference device rejects, since an operation of it needs more memory than one may use there, is skipped.
5. A device that does not answer in time is replaced, and its graph is not made smaller.

Source: the random graph tests of the NN HAL's VTS, which run each set with 50 seeds.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec
import numpy.typing as npt

from aionn.conformance.accuracy import Difference
from aionn.conformance.computing import Breach, Mode, closing, computing
from aionn.conformance.cts.run import Failure
from aionn.conformance.expectations import Expectations, Subject
from aionn.conformance.random_graphs.graphs import (
    Case,
    Executor,
    Plan,
    compare,
    draw_case,
    interpret,
    make_case,
    shrink,
    without,
)
from aionn.conformance.random_graphs.graphs import Failure as GraphFailure
from aionn.conformance.random_graphs.plain_evaluation import evaluate_plainly
from aionn.conformance.random_graphs.sets import (
    CHAIN_TESTS,
    EDGE_TESTS,
    GRAPH_TESTS,
    SIGNATURES,
    TESTS,
    GraphTest,
)
from aionn.conformance.suite import DeviceUnderTest, Outcome
from aionn.errors import DeadObject, ErrorStatus, InvalidArgument, ResourceExhausted, error_for_status
from aionn.hal import Model
from aionn.hal.pooled_request import PooledRequest
from aionn.platform.files import read_regular

__all__ = [
    "NUMBER_MAX",
    "RandomSettings",
    "chosen_sets",
    "graph_name",
    "load_plan",
    "locate",
    "operations_of",
    "run_graph",
    "run_plan",
]

NUMBER_MAX = 1 << 40
"""Numbers of graphs are below this: far more than can be run, and exact wherever numbers are read as floats."""

UNDETERMINED = (
    "rounding decides: the reference's own result changes when it and those before it are rounded differently"
)

TOO_LARGE = "an operation of it needs more memory than the reference device gives to one"

DEATHS_MAX = 20
"""Trials of making a graph smaller on which the driver process dies: each costs the start of a process."""

PLAN_BYTES_MAX = 1 << 20
"""Size of a file with a plan; one of 40 operations has 3 KB."""

_GRAPHS = (*CHAIN_TESTS, *GRAPH_TESTS, *EDGE_TESTS)
_SINGLE = tuple(test for test in TESTS.values() if test.operation is not None)
_OPERATION_OF = {signature.name: signature.operation.name for signature in SIGNATURES}

Array = npt.NDArray[Any]
_T = TypeVar("_T")


class RandomSettings(msgspec.Struct, frozen=True, tag="random"):
    """Options of random graphs.

    Attributes:
        mode: The mode of executions.
        contains: Only sets with this in their names; empty for all.
        time_limit_s: Time that one execution may take.
        expectations: The driver's declarations.
        is_reference: Whether the device is the reference: it is compared with the plain definitions then.
        keep: The folder in which a plan that failed is kept, made as small as it gets; None keeps none.
    """

    mode: Mode = "sync"
    contains: str = ""
    time_limit_s: float = 30.0
    expectations: Expectations = Expectations()
    is_reference: bool = False
    keep: str | None = None


def chosen_sets(contains: str) -> tuple[tuple[GraphTest, ...], tuple[GraphTest, ...]]:
    """The sets whose names contain a text: those of several operations, and those of one.

    Raises:
        InvalidArgument: No set has the text in its name.
    """
    graphs = tuple(test for test in _GRAPHS if contains in test.name)
    single = tuple(test for test in _SINGLE if contains in test.name)
    if not graphs and not single:
        sets = dict.fromkeys(test.name.rstrip("0123456789").rstrip("_") for test in (*_GRAPHS, *_SINGLE))
        raise InvalidArgument(
            f"random graphs: expected a part of a set's name, got {contains!r}; there are {', '.join(sets)}"
        )
    return graphs, single


def locate(number: int, contains: str = "") -> tuple[GraphTest, int]:
    """The set and the seed of a graph.

    Args:
        number: From 0 to ``NUMBER_MAX`` - 1.
        contains: The filter; the numbers count within the sets that it leaves.
    """
    if not 0 <= number < NUMBER_MAX:
        raise InvalidArgument(f"random graphs: expected a number from 0 to {NUMBER_MAX - 1}, got {number}")
    graphs, single = chosen_sets(contains)
    if graphs and single:
        sets, number = (single, number // 2) if number % 2 else (graphs, number // 2)
    else:
        sets = graphs or single
    return sets[number % len(sets)], number // len(sets)


def operations_of(plan: Plan) -> tuple[str, ...]:
    """The names of the operations that occur in a plan."""
    return tuple(sorted({_OPERATION_OF[operation.signature] for operation in plan.operations}))


def graph_name(plan: Plan) -> str:
    """The names that a driver's list of expected differences is compared with: signatures and types, in execution order.

    One with values at the edges of their types begins with ``edges/``, so that a list can name it alone.
    """
    prefix = "edges/" if TESTS[plan.test].has_edges else ""
    return prefix + "+".join(f"{o.signature}.{o.type.name}" for o in plan.operations)


def load_plan(path: Path) -> Plan:
    """Reads a plan that was kept.

    Raises:
        InvalidArgument: The file cannot be read, or is not a plan of existing sets and signatures.
    """
    try:
        plan = msgspec.json.decode(read_regular(path, "plan", PLAN_BYTES_MAX), type=Plan)
    except (msgspec.DecodeError, RecursionError) as e:
        raise InvalidArgument(f"{path}: expected a plan of a random graph: {e}") from e
    unknown = [o.signature for o in plan.operations if o.signature not in _OPERATION_OF]
    if plan.test not in TESTS or unknown or not plan.operations:
        raise InvalidArgument(f"{path}: expected a set and signatures that exist, got {plan.test} {unknown}")
    return plan


async def run_graph(device: DeviceUnderTest, number: int, settings: RandomSettings) -> Outcome:
    """Runs one graph on a device and compares it with the reference.

    Args:
        device: Is asked, and replaced if it does not answer.
        number: Which graph; see ``locate``.
        settings: Its settings.
    """
    test, seed = locate(number, settings.contains)
    contains = f" --filter {settings.contains}" if settings.contains else ""
    name = f"graph {number}{contains} ({test.name}, seed {seed})"
    case = draw_case(test, seed)
    return await _run_case(device, name, case.plan, case, settings, kept_as=f"{test.name}-{seed}.json")


async def run_plan(
    device: DeviceUnderTest, name: str, plan: Plan, settings: RandomSettings, *, kept_as: str | None = None
) -> Outcome:
    """As ``run_graph``, of a plan that was drawn or kept.

    Args:
        device: Is asked, and replaced if it does not answer.
        name: Its name in the outcome.
        plan: The graph.
        settings: Its settings.
        kept_as: The file's name in the folder ``settings.keep`` if it fails; None keeps nothing.
    """
    return await _run_case(device, name, plan, make_case(plan), settings, kept_as=kept_as)


async def _run_case(
    device: DeviceUnderTest,
    name: str,
    plan: Plan,
    case: Case | None,
    settings: RandomSettings,
    *,
    kept_as: str | None,
) -> Outcome:
    """As ``run_plan``, of a plan and what ``make_case`` made of it."""
    runner = _Runner(device, settings)
    try:
        supported = None if case is None else await runner.supported(case)
    except Exception as e:
        error = f"supported operations: {type(e).__name__}: {e}"
        return _failed(name, GraphFailure(plan, None, error), settings, kept_as)
    if supported is None:
        return Outcome(name, operations_of(plan), "skipped", reason="the device supports no operation of it")
    # In a thread of its own: interpreting a graph would hold the loop that the device's connection needs.
    failure = await anyio.to_thread.run_sync(runner.judged, supported)
    operations = operations_of(supported.plan)
    if failure is None and runner.is_too_large:
        return Outcome(name, operations, "skipped", reason=TOO_LARGE)
    if failure is None and runner.undetermined:
        return Outcome(name, operations, "expected_failure", reason=UNDETERMINED)
    if failure is None:
        return Outcome(name, operations, "passed")
    reason = settings.expectations.why_different(
        Subject(graph_name(failure.plan), frozenset(operations_of(failure.plan)), frozenset())
    )
    if reason is not None:
        return Outcome(name, operations, "expected_failure", reason=reason)
    return _failed(name, failure, settings, kept_as)


def _failed(name: str, failure: GraphFailure, settings: RandomSettings, kept_as: str | None) -> Outcome:
    operations = operations_of(failure.plan)
    difference = failure.difference
    where = graph_name(failure.plan)
    if kept_as is not None and settings.keep is not None:
        path = os.path.join(settings.keep, kept_as)
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(failure.plan), indent=1) + b"\n")
        where += f", kept as {path}"
    if difference is None:
        detail = Failure(name, "random", settings.mode, where, None, (), "success", failure.error or "")
    else:
        expected = (
            difference.expected
            if difference.what == "element"
            else f"{difference.what} {difference.expected}"
        )
        detail = Failure(
            name,
            "random",
            settings.mode,
            where,
            difference.output,
            difference.index,
            expected,
            difference.got,
        )
    return Outcome(name, operations, "failed", failure=detail)


class _NoAnswer(Exception):
    """The device did not answer in time."""


class _Runner:
    """One graph on one device; ``judged`` runs in a worker thread, the rest in the loop."""

    def __init__(self, device: DeviceUnderTest, settings: RandomSettings) -> None:
        self._device = device
        self._settings = settings
        self._deaths = 0
        self.undetermined: list[Difference] = []
        self.is_too_large = False

    async def supported(self, case: Case) -> Case | None:
        """The case without the operations that the device does not support; None where nothing is left."""
        plan = case.plan
        while True:
            device = await self._device.get()
            answers = await self._within(device.supported_operations(case.model))
            missing = {
                operation.key
                for operation, is_supported in zip(plan.operations, answers, strict=True)
                if not is_supported
            }
            if not missing:
                return case
            plan = without(plan, missing)
            smaller = make_case(plan) if plan.operations else None
            if smaller is None:
                return None  # Its extents may have had a solution only together with what was taken out.
            case = smaller

    def judged(self, case: Case) -> GraphFailure | None:
        """The smallest failure of a case that the device supports; None without one."""
        expected: Executor = self._unless_too_large(interpret)
        execute: Executor = self._execute
        smaller: Executor = self._execute_smaller
        if self._settings.is_reference:
            expected = evaluate_plainly
            execute, smaller = self._unless_too_large(execute), self._unless_too_large(smaller)
        failure = compare(case, expected, execute, undetermined=self.undetermined)
        if failure is None or (failure.error or "").startswith(_NoAnswer.__name__):
            return failure
        return shrink(failure, expected, smaller, determined=True)

    def _unless_too_large(self, executor: Executor) -> Executor:
        """An executor by the reference's operations, which gives None for a graph that they reject for the memory it needs."""

        def execute(model: Model, inputs: Sequence[Array | None]) -> list[Array] | None:
            try:
                return executor(model, inputs)
            except ResourceExhausted as e:
                if e.transient:
                    raise
                self.is_too_large = True
                return None

        return execute

    def _execute(self, model: Model, inputs: Sequence[Array | None]) -> list[Array]:
        return anyio.from_thread.run(self._run, model, [array for array in inputs if array is not None])

    def _execute_smaller(self, model: Model, inputs: Sequence[Array | None]) -> list[Array] | None:
        if self._deaths >= DEATHS_MAX:
            return None
        try:
            # A smaller graph may be one that the device does not support: another way to fail than the one looked for.
            return self._execute(model, inputs) if anyio.from_thread.run(self._supports, model) else None
        except DeadObject:
            self._deaths += 1
            raise

    async def _supports(self, model: Model) -> bool:
        device = await self._device.get()
        return all(await self._within(device.supported_operations(model)))

    async def _run(self, model: Model, inputs: Sequence[Array]) -> list[Array]:
        device = await self._device.get()
        prepared = await self._within(device.prepare_model(model))
        async with closing(prepared):
            with PooledRequest(model, [array.shape for array in inputs]) as pooled:
                pooled.write(inputs)
                async with computing(prepared, pooled.request, self._settings.mode) as compute:
                    answer = await self._within(compute())
                if answer.status != ErrorStatus.NONE:
                    raise error_for_status(answer.status, answer.message)
                stated = [operand.dimensions for operand in model.main.outputs]
                reported = [shape.dimensions for shape in answer.shapes] or stated
                if reported != stated:
                    raise Breach(f"outputs of the shapes {stated}", f"{reported}")
                return pooled.outputs()

    async def _within(self, call: Awaitable[_T]) -> _T:
        try:
            with anyio.fail_after(self._settings.time_limit_s):
                return await call
        except TimeoutError:
            await self._device.give_up()
            raise _NoAnswer(f"within {self._settings.time_limit_s:g} s") from None
