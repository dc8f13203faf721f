"""Parts of an interpreted IF or WHILE: what a condition may be, and memory that is used again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aionn
from aionn.hal import BufferToken, DataLocation, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.runtime.memory.arguments import Binding, RequestArea
from aionn.runtime.placement import control_flow
from aionn.runtime.placement.control_flow import _truth
from aionn.testing.split import PickyDevice

X = np.array([1.5, -2.25, 3.0], np.float32)


def test_condition_is_one_boolean() -> None:
    def held(*values: bool) -> Binding:
        array = np.array(values)
        return Binding(BufferToken(1), DataLocation(), array.shape, array)

    assert _truth(held(True), "input 0") and not _truth(held(False), "input 0")
    for condition, got in (
        (None, "none"),
        (held(True, True), r"shape \[2\]"),
        (held(True)._replace(array=None), r"shape \[1\]"),
    ):
        with pytest.raises(aionn.InvalidArgument, match=f"input 0: expected one boolean, got {got}"):
            _truth(condition, "input 0")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What memory was made for."""
    found = []

    class Counted(RequestArea):
        def __init__(self, values: Any) -> None:
            found.append(values)
            super().__init__(values)

    monkeypatch.setattr(control_flow, "RequestArea", Counted)
    return found


def choice() -> Model:
    """IF the first input: the magnitude of the second, else its floor."""
    graph = GraphBuilder()
    condition = graph.input(OperandType.TENSOR_BOOL8, (1,))
    value = graph.input(OperandType.TENSOR_FLOAT32, (3,))
    branches = []
    for kind in (OperationType.ABS, OperationType.FLOOR):
        inner = GraphBuilder()
        given = inner.input(OperandType.TENSOR_FLOAT32, (3,))
        branches.append(graph.graph(inner.finish([inner.result(kind, [given], given)])))
    return graph.build([graph.result(OperationType.IF, [condition, *branches, value], value)])


async def test_memory_of_a_branch_is_used_again(made: list[Any]) -> None:
    async with aionn.open(devices=[PickyDevice("npu")]) as runtime:
        net = await runtime.compile(choice())
        for holds in (True, False, True, False, True):
            (got,) = (await net.execute([np.array([holds]), X])).outputs
            np.testing.assert_array_equal(got, np.abs(X) if holds else np.floor(X))
    assert len(made) == 2, "one of each branch"


async def test_memory_of_few_executions_at_once_is_kept(made: list[Any]) -> None:
    at_once = 2 * control_flow.AREAS_KEPT_MAX + 1
    async with aionn.open(devices=[PickyDevice("npu")]) as runtime:
        net = await runtime.compile(choice())
        for wave in (1, 2):
            executions = [net.execute_fenced([np.array([True]), X]) for _ in range(at_once)]
            for execution in executions:
                await execution
            assert len(made) == wave * at_once - (wave - 1) * control_flow.AREAS_KEPT_MAX


class NotingBursts(PickyDevice):
    """Notes the limits that executions of its bursts are given."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.limits: list[dict[str, Any]] = []

    def prepare(self, model: Model, **options: Any) -> Any:
        prepared = super().prepare(model, **options)
        open_burst = prepared.configure_execution_burst

        async def noting(**polling: int) -> Any:
            burst = await open_burst(**polling)
            launch = burst.launch

            def launch_and_note(*arguments: Any, **limits: Any) -> Any:
                self.limits.append(limits)
                return launch(*arguments, **limits)

            burst.launch = launch_and_note
            return burst

        prepared.configure_execution_burst = noting
        return prepared


async def test_steps_inside_of_a_burst_are_given_its_limits() -> None:
    npu = NotingBursts("npu")
    deadline_ns = aionn.after(60)
    async with aionn.open(devices=[npu]) as runtime:
        net = await runtime.compile(choice())
        async with net.burst() as burst:
            await burst.execute([np.array([True]), X], deadline=deadline_ns, measure=True)
    assert len(npu.limits) == 1
    assert {limits["deadline_ns"] for limits in npu.limits} == {deadline_ns}
    assert {limits["measure"] for limits in npu.limits} == {True}


async def test_loop_whose_state_was_left_out_has_no_result() -> None:
    """One output of two: no round is run, and what was given comes out where there is something."""
    condition = GraphBuilder()
    given = [condition.input(OperandType.TENSOR_FLOAT32, (3,)) for _ in range(2)]
    axis, zero = condition.constant(np.zeros(1, np.int32)), condition.constant(np.zeros(1, np.float32))
    total = condition.result(OperationType.REDUCE_SUM, [given[0], axis, True], given[0], (1,))
    holds = condition.variable(OperandType.TENSOR_BOOL8, (1,))
    condition.operation(OperationType.LESS, [total, zero], [holds])
    body = GraphBuilder()
    given = [body.input(OperandType.TENSOR_FLOAT32, (3,)) for _ in range(2)]
    body.finish([body.result(OperationType.FLOOR, [value], value) for value in given])
    graph = GraphBuilder()
    given = [graph.input(OperandType.TENSOR_FLOAT32, (3,)) for _ in range(2)]
    results = [graph.variable(OperandType.TENSOR_FLOAT32, (3,)) for _ in range(2)]
    inner = [graph.graph(condition.finish([holds])), graph.graph(body)]
    graph.operation(OperationType.WHILE, [*inner, *given], results)
    kinds = {OperationType.REDUCE_SUM, OperationType.LESS, OperationType.FLOOR}
    async with aionn.open(devices=[PickyDevice("npu", kinds)]) as runtime:
        net = await runtime.compile(graph.build(results))
        assert net.placement[0].device == "interpreter"
        np.testing.assert_array_equal((await net.execute([X, -X])).outputs[1], -X)
        with pytest.raises(aionn.InvalidArgument, match="a value that is left out cannot be an output"):
            await net.execute([X, None])
