"""A step that fails, or cannot be closed: what that says of its device, and what becomes of the other steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aionn
from aionn.drivers.reference import ReferencePreparedModel
from aionn.hal import Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.scheduler.dispatcher import Dispatcher
from aionn.testing.models import chain
from tests.support.split import PickyDevice

LONG_S = 60.0

X = np.array([1.5, -2.25, 3.0], np.float32)
FLOAT, BOOL = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_BOOL8


def broken() -> None:
    raise aionn.GeneralFailure("planted")


def rounds() -> Any:
    """WHILE the sum is below 0: the value and 1."""
    condition = GraphBuilder()
    value = condition.input(FLOAT, (3,))
    axis = condition.constant(np.zeros(1, np.int32))
    total = condition.result(OperationType.REDUCE_SUM, [value, axis, True], value, (1,))
    holds = condition.variable(BOOL, (1,))
    condition.operation(OperationType.LESS, [total, condition.constant(np.zeros(1, np.float32))], [holds])
    body = GraphBuilder()
    value = body.input(FLOAT, (3,))
    body.finish([body.result(OperationType.ADD, [value, body.constant(np.ones(1, np.float32)), 0], value)])
    graph = GraphBuilder()
    value = graph.input(FLOAT, (3,))
    inner = [graph.graph(condition.finish([holds])), graph.graph(body)]
    return graph.build([graph.result(OperationType.WHILE, [*inner, value], value)])


class Outcomes:
    """How the time that each slot was held counts, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._told: list[tuple[Dispatcher, str]] = []
        release = Dispatcher.release

        def noting(dispatcher: Dispatcher, work: Any, *, outcome: Any = "ended") -> int:
            self._told.append((dispatcher, outcome))
            return release(dispatcher, work, outcome=outcome)

        monkeypatch.setattr(Dispatcher, "release", noting)

    def of(self, runtime: aionn.Runtime, device: str) -> list[str]:
        (dispatcher,) = [d.dispatcher for d in runtime.devices if d.name == device]
        return [outcome for of, outcome in self._told if of is dispatcher]


async def test_rounds_that_ran_elsewhere_teach_nothing_of_the_device_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fails in each round, and that is told once."""
    outcomes, npu = Outcomes(monkeypatch), PickyDevice("npu", {OperationType.ADD}, fail=broken)
    async with aionn.open(devices=[npu], drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(rounds(), allow_fallback=True)
        result = await net.execute([np.array([-2.5, -2.5, 0], np.float32)])
        np.testing.assert_array_equal(result.outputs[0], np.array([-0.5, -0.5, 2], np.float32))
        assert len(result.fallback) == 1
        assert outcomes.of(runtime, "npu") == ["failed", "failed"]


async def test_deadline_that_passes_elsewhere_teaches_nothing_of_the_device_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = ReferencePreparedModel.run

    def late(self: ReferencePreparedModel, *arguments: Any) -> Any:
        if self.device.info.name == "reference":
            raise aionn.MissedDeadline("planted", transient=True)
        return run(self, *arguments)

    monkeypatch.setattr(ReferencePreparedModel, "run", late)
    outcomes, npu = Outcomes(monkeypatch), PickyDevice("npu", {OperationType.FLOOR}, fail=broken)
    async with aionn.open(devices=[npu], drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(chain([OperationType.FLOOR], (3,)), allow_fallback=True)
        with pytest.raises(aionn.MissedDeadline, match="planted"):
            await net.execute([X], deadline=aionn.after(LONG_S))
        assert outcomes.of(runtime, "npu") == ["failed"]


async def test_device_that_breaks_off_at_its_own_deadline_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def late() -> None:
        raise aionn.MissedDeadline("planted", transient=True)

    outcomes, npu = Outcomes(monkeypatch), PickyDevice("npu", {OperationType.FLOOR}, fail=late)
    async with aionn.open(devices=[npu], drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(chain([OperationType.FLOOR], (3,)), allow_fallback=True)
        with pytest.raises(aionn.MissedDeadline, match="planted"):
            await net.execute([X], deadline=aionn.after(LONG_S))
        assert outcomes.of(runtime, "npu") == ["late"]


async def test_step_that_cannot_be_closed_does_not_keep_the_others() -> None:
    closed: list[str] = []

    class Odd(PickyDevice):
        async def prepare_model(self, model: Model, **options: Any) -> Any:
            prepared = await super().prepare_model(model, **options)
            close = prepared.aclose

            async def aclose() -> None:
                await close()
                closed.append(self.info.name)
                if self.info.name == "a":
                    raise aionn.GeneralFailure("planted")

            prepared.aclose = aclose  # type: ignore[method-assign]
            return prepared

    devices = [Odd("a", {OperationType.FLOOR}), Odd("b", {OperationType.TANH})]
    async with aionn.open(devices=devices, isolation="in_process") as runtime:
        model = chain([OperationType.FLOOR, OperationType.TANH, OperationType.FLOOR], (3,))
        net = await runtime.compile(model)
        with pytest.raises(aionn.GeneralFailure, match="planted"):
            await net.aclose()
        assert closed == ["a", "b", "a"]
