"""What the validators of IF and WHILE refuse without looking at the subgraphs."""

from __future__ import annotations

import pytest

from aionn.errors import InvalidModel
from aionn.hal import Operand, OperandLifeTime, OperandType, OperationType
from aionn.ops.control_flow import OPERATIONS
from aionn.ops.signature import Call, Check

CONTRACTS = {contract.type: contract for contract in OPERATIONS}
BRANCH = Operand(OperandType.SUBGRAPH, lifetime=OperandLifeTime.SUBGRAPH)
CONDITION = Operand(OperandType.TENSOR_BOOL8, (1,))
VALUE = Operand(OperandType.TENSOR_FLOAT32, (2,))


def level_of(operation: OperationType, inputs: list[Operand], outputs: list[Operand]) -> int:
    check = Check(operation, inputs, outputs, where="subgraph 0, operation 0")
    CONTRACTS[operation].validate(check)
    return check.level


def test_if_and_while_need_level_4() -> None:
    assert level_of(OperationType.IF, [CONDITION, BRANCH, BRANCH, VALUE], [VALUE]) == 4
    assert level_of(OperationType.WHILE, [BRANCH, BRANCH, VALUE], [VALUE]) == 4


def test_if_may_pass_nothing_to_its_branches() -> None:
    assert level_of(OperationType.IF, [CONDITION, BRANCH, BRANCH], [VALUE]) == 4


def test_condition_of_unknown_shape_is_left_to_the_execution() -> None:
    for dimensions in ((), (0,)):
        condition = Operand(OperandType.TENSOR_BOOL8, dimensions)
        assert level_of(OperationType.IF, [condition, BRANCH, BRANCH], [VALUE]) == 4


@pytest.mark.parametrize(
    ("operation", "inputs", "outputs", "message"),
    [
        (OperationType.IF, [CONDITION, BRANCH], [VALUE], "number of inputs: expected at least 3, got 2"),
        (OperationType.IF, [CONDITION, BRANCH, BRANCH], [], "number of outputs: expected at least 1, got 0"),
        (OperationType.IF, [VALUE, BRANCH, BRANCH], [VALUE], "input 0: expected TENSOR_BOOL8"),
        (OperationType.IF, [Operand(OperandType.BOOL), BRANCH, BRANCH], [VALUE], "input 0: expected TENSOR_"),
        (
            OperationType.IF,
            [Operand(OperandType.TENSOR_BOOL8, (2,)), BRANCH, BRANCH],
            [VALUE],
            "input 0: expected extent 1",
        ),
        (
            OperationType.IF,
            [Operand(OperandType.TENSOR_BOOL8, (1, 1)), BRANCH, BRANCH],
            [VALUE],
            "input 0: expected rank 1",
        ),
        (
            OperationType.IF,
            [
                Operand(OperandType.TENSOR_BOOL8, (1,), lifetime=OperandLifeTime.NO_VALUE),
                BRANCH,
                BRANCH,
            ],
            [VALUE],
            "input 0: expected a condition",
        ),
        (OperationType.IF, [CONDITION, VALUE, BRANCH], [VALUE], "input 1: expected SUBGRAPH"),
        (OperationType.IF, [CONDITION, BRANCH, VALUE], [VALUE], "input 2: expected SUBGRAPH"),
        (OperationType.IF, [CONDITION, BRANCH, BRANCH, BRANCH], [VALUE], "input 3: expected a value"),
        (OperationType.IF, [CONDITION, BRANCH, BRANCH], [BRANCH], "output 0: expected a value"),
        (
            OperationType.IF,
            [CONDITION, Operand(OperandType.SUBGRAPH, lifetime=OperandLifeTime.SUBGRAPH_INPUT), BRANCH],
            [VALUE],
            "input 1: expected lifetime SUBGRAPH",
        ),
        (OperationType.WHILE, [BRANCH, BRANCH], [VALUE], "number of inputs: expected at least 3, got 2"),
        (OperationType.WHILE, [CONDITION, BRANCH, VALUE], [VALUE], "input 0: expected SUBGRAPH"),
        (OperationType.WHILE, [BRANCH, VALUE, VALUE], [VALUE], "input 1: expected SUBGRAPH"),
        (OperationType.WHILE, [BRANCH, BRANCH, BRANCH], [VALUE], "input 2: expected a value"),
        (
            OperationType.WHILE,
            [BRANCH, BRANCH, VALUE],
            [VALUE, VALUE],
            "number of outputs: expected at most 1",
        ),
    ],
)
def test_illegal_use_is_refused_with_its_place(
    operation: OperationType, inputs: list[Operand], outputs: list[Operand], message: str
) -> None:
    with pytest.raises(InvalidModel) as caught:
        level_of(operation, inputs, outputs)
    assert str(caught.value).startswith(f"subgraph 0, operation 0 ({operation.name}), {message}")


def test_kernels_are_never_to_be_called() -> None:
    for contract in OPERATIONS:
        with pytest.raises(AssertionError, match="executor"):
            contract.execute(Call([], []))
