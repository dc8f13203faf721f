"""A model is not handed to and fro between two devices where one of them does as well."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from aionn.hal import (
    ExecutionPreference,
    FusedActivation,
    Model,
    OperandType,
    OperationType,
    uniform_capabilities,
)
from aionn.models.builder import GraphBuilder
from aionn.runtime.placement.handovers import HANDOVER_US, OPERATION_US, reference_us, spare_handovers
from aionn.runtime.placement.partition import Candidate, Choice, choose_devices, make_steps

FAST = ExecutionPreference.FAST_SINGLE_ANSWER


def alternating(count: int, size: int = 4) -> Model:
    """RELU and TANH in turn."""
    graph = GraphBuilder()
    value = first = graph.input(OperandType.TENSOR_FLOAT32, (1, size))
    for index in range(count):
        kind = OperationType.TANH if index % 2 else OperationType.RELU
        value = graph.result(kind, [value], first, (1, size))
    return graph.build([value])


def candidate(name: str, supported: Sequence[bool], time: float, *, is_reference: bool = False) -> Candidate:
    return Candidate(name, uniform_capabilities(time, time), tuple(supported), is_reference)


def spared(model: Model, candidates: Sequence[Candidate]) -> tuple[Choice, ...]:
    return spare_handovers(model, candidates, choose_devices(model, candidates, FAST))


def devices(choices: Sequence[Choice]) -> list[int]:
    return [choice.candidate for choice in choices]


def test_model_of_two_devices_in_turn_stays_on_the_one_that_has_everything() -> None:
    model = alternating(24)
    quick = candidate("quick", [True, False] * 12, 0.2)
    whole = candidate("whole", [True] * 24, 0.3)
    reference = candidate("reference", [True] * 24, 1.0, is_reference=True)
    candidates = [quick, whole, reference]
    assert devices(choose_devices(model, candidates, FAST)) == [0, 1] * 12
    choices = spared(model, candidates)
    assert devices(choices) == [1] * 24
    assert len(make_steps(model, choices)) == 1
    assert choices[0].reason == "spares a hand-over (whole 0.3, quick 0.2)"


def test_device_keeps_what_takes_much_longer_elsewhere() -> None:
    # 4 million elements: the hand-overs cost less than the difference.
    model = alternating(3, size=4_000_000)
    quick = candidate("quick", [True, False, True], 0.2)
    whole = candidate("whole", [True] * 3, 0.9)
    assert devices(spared(model, [quick, whole])) == [0, 1, 0]


def test_nothing_moves_to_the_reference_device_or_to_one_that_does_not_support_it() -> None:
    model = alternating(6)
    quick = candidate("quick", [True, False] * 3, 0.2)
    reference = candidate("reference", [True] * 6, 1.0, is_reference=True)
    other = candidate("other", [False, True] * 3, 0.5)
    assert devices(spared(model, [quick, reference])) == [0, 1] * 3
    assert devices(spared(model, [quick, other])) == [0, 1] * 3


def test_choices_of_one_device_stay_what_they_are() -> None:
    model = alternating(4)
    choices = choose_devices(model, [candidate("a", [True] * 4, 0.5)], FAST)
    assert spare_handovers(model, [candidate("a", [True] * 4, 0.5)], choices) is choices


@pytest.mark.parametrize("share", range(1, 8))
def test_estimate_never_rises(share: int) -> None:
    model = alternating(32)
    first = candidate("first", [index % (share + 1) != 0 for index in range(32)], 0.3)
    second = candidate("second", [True] * 32, 0.4)
    before = choose_devices(model, [first, second], FAST)
    after = spare_handovers(model, [first, second], before)

    def total(choices: Sequence[Choice]) -> float:
        works = [reference_us(model, operation) or 0.0 for operation in model.main.operations]
        each = [work * (c.scores[c.candidate] or 0.0) for c, work in zip(choices, works, strict=True)]
        return HANDOVER_US * len(make_steps(model, choices)) + sum(each)

    assert total(after) < total(before)


def test_estimate_counts_the_products_of_layers_with_weights() -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (8, 128))
    weights = graph.input(OperandType.TENSOR_FLOAT32, (64, 128))
    bias = graph.input(OperandType.TENSOR_FLOAT32, (64,))
    none = graph.constant(int(FusedActivation.NONE))
    dense = graph.result(OperationType.FULLY_CONNECTED, [x, weights, bias, none], x, (8, 64))
    no = graph.constant(False)
    product = graph.result(OperationType.BATCH_MATMUL, [dense, weights, no, no], x, (8, 128))
    relu = graph.result(OperationType.RELU, [product], x, (8, 128))
    model = graph.build([relu])
    found = [reference_us(model, operation) or 0.0 for operation in model.main.operations]
    assert all(value > OPERATION_US for value in found)
    # Both layers have 8 x 64 x 128 products, which exceeds everything else of them.
    assert found[0] == pytest.approx(found[1], rel=0.1)
    assert found[0] > found[2] + 8 * 64 * 128 * 0.0004


def test_duration_of_values_of_unknown_size_is_not_estimated() -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (0, 4))
    model = graph.build([graph.result(OperationType.RELU, [x], x, (0, 4))])
    assert reference_us(model, model.main.operations[0]) is None
