"""Claims about the logical operations and SELECT that the conformance data leave open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandType, OperationType

T = OperandType
O = OperationType  # noqa: E741
F32 = Operand(T.TENSOR_FLOAT32)
B8 = Operand(T.TENSOR_BOOL8)
FLAGS = np.array([False, True])


def test_truth_tables(bench: Any) -> None:
    column = FLAGS[:, None]
    assert bench.run(O.LOGICAL_AND, [(B8, column), (B8, FLAGS)], B8).tolist() == [
        [False, False],
        [False, True],
    ]
    assert bench.run(O.LOGICAL_OR, [(B8, column), (B8, FLAGS)], B8).tolist() == [[False, True], [True, True]]
    assert bench.run(O.LOGICAL_NOT, [(B8, FLAGS)], B8).tolist() == [True, False]


@pytest.mark.parametrize(("operation", "count"), [(O.LOGICAL_AND, 2), (O.LOGICAL_OR, 2), (O.LOGICAL_NOT, 1)])
def test_logic_takes_booleans_only(bench: Any, operation: OperationType, count: int) -> None:
    assert bench.level(operation, [B8] * count, [B8]) == 3
    with pytest.raises(InvalidModel, match=f"input {count - 1}: expected TENSOR_BOOL8, got TENSOR_FLOAT32"):
        bench.level(operation, [B8] * (count - 1) + [F32], [B8])
    with pytest.raises(InvalidModel, match=f"number of inputs: expected {count}, got 3"):
        bench.level(operation, [B8] * 3, [B8])


def test_select_requantises_both_inputs(bench: Any) -> None:
    a, b = (
        Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 1.0, 0),
        Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 0.5, 10),
    )
    output = Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 0.25, -3)
    condition = np.array([True, False, True, False])
    got = bench.run(
        O.SELECT, [(B8, condition), (a, np.int8([2, 0, 100, 0])), (b, np.int8([0, 12, 0, -128]))], output
    )
    assert got.dtype == np.int8
    assert got.tolist() == [5, 1, 127, -128]


def test_select_does_not_broadcast(bench: Any) -> None:
    values = np.zeros((2, 2), np.float32)
    with pytest.raises(InvalidArgument, match=r"input 2: expected the condition's shape \[2, 2\], got \[2\]"):
        bench.run(O.SELECT, [(B8, np.zeros((2, 2), bool)), (F32, values), (F32, values[0])], F32)
    shapes = [
        Operand(T.TENSOR_BOOL8, (0, 2)),
        Operand(T.TENSOR_FLOAT32, (3, 0)),
        Operand(T.TENSOR_FLOAT32, (3, 1)),
    ]
    with pytest.raises(InvalidModel, match=r"input 2: expected shape \[3, 2\], got shape \[3, 1\]"):
        bench.level(O.SELECT, shapes, [F32])


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        (T.TENSOR_FLOAT32, 3),
        (T.TENSOR_FLOAT16, 3),
        (T.TENSOR_INT32, 3),
        (T.TENSOR_QUANT8_ASYMM, 3),
        (T.TENSOR_QUANT8_ASYMM_SIGNED, 4),
    ],
)
def test_select_level_follows_its_values(bench: Any, kind: OperandType, level: int) -> None:
    value = Operand(kind, (2,))
    assert bench.level(O.SELECT, [B8, value, value], [value]) == level


def test_select_takes_no_boolean_values(bench: Any) -> None:
    with pytest.raises(InvalidModel, match=r"input 1: expected TENSOR_FLOAT32 or .*, got TENSOR_BOOL8"):
        bench.level(O.SELECT, [B8, B8, B8], [B8])
