"""A check or a shape that is remembered is the one that would be found, and nothing is remembered that a key does not decide."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from aionn.conformance.random_graphs.graphs import draw_plan, make_case
from aionn.conformance.random_graphs.sets import TESTS
from aionn.errors import InvalidModel
from aionn.hal import (
    ChannelQuant,
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    OperationType,
    constant_array,
)
from aionn.models.builder import GraphBuilder
from aionn.ops import CONTRACTS, Array, Call, Tensor, remembered, stand_in
from aionn.ops.remembered import checked_level, checked_shapes, described, key_of
from aionn.validation import validate_model

F32, I32 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32
CONSTANT = OperandLifeTime.CONSTANT_COPY


def nothing(operand: Operand) -> Array | None:
    return None


def mean_of(axes: list[int]) -> Model:
    graph = GraphBuilder()
    x = graph.input(F32, (2, 3, 4))
    listed, y = graph.constant(np.asarray(axes, np.int32)), graph.variable(F32, (2, 1, 4))
    graph.operation(OperationType.MEAN, [x, listed, 1], [y], is_checked=True)
    return graph.build([y])


@pytest.mark.parametrize("count", [1, 16, 17, 40])
def test_a_list_with_another_value_is_checked_again(count):
    """Long lists are not part of a key, short ones are."""
    model = mean_of([1] * count)
    assert validate_model(model) == validate_model(model)
    with pytest.raises(InvalidModel, match=r"subgraph 0, operation 0 \(MEAN\)"):
        validate_model(mean_of([1] * (count - 1) + [7]))


def test_an_error_names_its_own_place_each_time():
    contract, x = CONTRACTS[OperationType.RELU], Operand(F32, (2,))
    for where in ("first", "second"):
        with pytest.raises(InvalidModel, match=where):
            checked_level(contract, [x, x], [x], nothing, where=where, parts={})


PLAIN = Operand(OperandType.TENSOR_QUANT8_ASYMM, (2, 3), 0.5, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"type": OperandType.TENSOR_QUANT8_ASYMM_SIGNED},
        {"dimensions": (3, 2)},
        {"dimensions": (2, 3, 1)},
        {"scale": 0.25},
        {"zero_point": 4},
        {"lifetime": OperandLifeTime.NO_VALUE},
    ],
)
def test_operands_that_differ_have_other_parts(change):
    other = msgspec.structs.replace(PLAIN, **change)
    assert described(PLAIN, nothing) == described(msgspec.structs.replace(PLAIN), nothing)
    assert described(PLAIN, nothing) != described(other, nothing)


def test_a_value_is_part_of_a_key_unless_it_belongs_to_large_weights():
    def part(kind: OperandType, value: Array | None) -> bytes | None:
        return described(Operand(kind, (17,), lifetime=CONSTANT), lambda _: value)

    assert part(F32, np.zeros(16)) != part(F32, np.ones(16)) != part(F32, None)
    assert part(F32, np.zeros(17)) == part(F32, np.ones(17)) != part(F32, None)
    assert part(I32, np.zeros(17, np.int32)) is None


@pytest.mark.parametrize(
    "operand",
    [
        Operand(OperandType.TENSOR_OEM_BYTE, (4,), lifetime=CONSTANT),
        Operand(OperandType.OEM, (), lifetime=CONSTANT),
        Operand(OperandType.SUBGRAPH, (), lifetime=OperandLifeTime.SUBGRAPH),
        Operand(1 << 16 | 1, (4,), lifetime=CONSTANT),
        Operand(OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, (2,), channel_quant=ChannelQuant((1.0, 2.0), 0)),
        Operand(F32, (1 << 80,)),
    ],
)
def test_other_operands_are_not_described(operand):
    def fails(operand: Operand) -> Array | None:
        raise AssertionError("the size of the value is not checked")

    assert described(operand, nothing if operand.type == F32 else fails) is None
    assert key_of(0, [b"x", None], [b"x"]) is None


def test_inputs_and_outputs_are_told_apart():
    a, b = described(PLAIN, nothing), described(Operand(F32, (1,)), nothing)
    assert key_of(0, [a, b], [b]) != key_of(0, [a], [b, b]) != key_of(1, [a], [b, b])
    assert key_of(0, [a], [b], is_relaxed=True) != key_of(0, [a], [b])


def test_room_is_bounded(monkeypatch):
    monkeypatch.setattr(remembered, "ENTRIES_MAX", 3)
    results = remembered.Results[int]()
    for number in range(10):
        results.keep(bytes([number]), number)
        assert results.get(bytes([number])) == number
        assert len(results._results) <= 3
    assert key_of(0, [bytes(600)] * 2, []) is None


def test_checked_shapes_are_the_same_the_second_time():
    contract = CONTRACTS[OperationType.ADD]
    x, y, activation = Operand(F32, (2, 1)), Operand(F32, (3,)), Operand(OperandType.INT32, lifetime=CONSTANT)
    zero = np.zeros((), np.int32)
    for _ in range(2):
        found = checked_shapes(
            contract,
            [x, y, activation],
            [Operand(F32)],
            lambda o: zero if o is activation else None,
            parts={},
        )
        assert found == ((2, 3),)


def test_shape_rules_do_not_read_the_values_of_large_weights():
    seen = set()
    for test in TESTS.values():
        case = make_case(draw_plan(test, 1))
        assert case is not None
        operands = case.model.main.operands
        for operation in case.model.main.operations:
            shapes = CONTRACTS[OperationType(operation.type)].shapes
            if shapes is None or any(
                operands[i].lifetime == OperandLifeTime.NO_VALUE for i in operation.inputs
            ):
                continue
            given: list[list[Tensor]] = [[], []]
            for operand in (operands[i] for i in operation.inputs):
                value = constant_array(case.model, operand) if operand.is_constant else None
                zeros = stand_in(operand, operand.dimensions if value is None else value.shape)
                real = zeros if value is None else Tensor(operand, value, is_constant=True)
                is_large = value is not None and value.size > 16 and operand.type != I32
                seen |= {operation.type} if is_large else set()
                given[0].append(real)
                given[1].append(zeros if is_large else real)
            outputs = [operands[i] for i in operation.outputs]
            first, second = (list(map(tuple, shapes(Call(tensors, outputs)))) for tensors in given)
            assert first == second, operation
    assert len(seen) > 10
