"""Claims about the comparisons that the conformance data leave open."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandType, OperationType

T = OperandType
O = OperationType  # noqa: E741
F32 = Operand(T.TENSOR_FLOAT32)
B8 = Operand(T.TENSOR_BOOL8)
DEFINITIONS = {
    O.EQUAL: operator.eq,
    O.NOT_EQUAL: operator.ne,
    O.LESS: operator.lt,
    O.LESS_EQUAL: operator.le,
    O.GREATER: operator.gt,
    O.GREATER_EQUAL: operator.ge,
}


@pytest.mark.parametrize("operation", DEFINITIONS)
@pytest.mark.parametrize("size", [40, 5000])
def test_quantised_values_are_compared_by_what_they_stand_for(
    bench: Any, operation: OperationType, size: int
) -> None:
    a, b = Operand(T.TENSOR_QUANT8_ASYMM, (), 0.5, 3), Operand(T.TENSOR_QUANT8_ASYMM, (), 0.25, 90)
    rng = np.random.default_rng(size)
    x, y = rng.integers(0, 256, (2, size)).astype(np.uint8)
    got = bench.run(operation, [(a, x), (b, y)], B8)
    expected = [
        DEFINITIONS[operation]((p - 3) * 0.5, (q - 90) * 0.25)
        for p, q in zip(x.tolist(), y.tolist(), strict=True)
    ]
    assert got.dtype == np.bool_
    assert got.tolist() == expected


@pytest.mark.parametrize("operation", DEFINITIONS)
def test_nan_differs_from_everything(bench: Any, operation: OperationType) -> None:
    nan = np.float32([np.nan])
    assert bench.run(operation, [(F32, nan), (F32, nan)], B8).tolist() == [operation == O.NOT_EQUAL]


@pytest.mark.parametrize("operation", DEFINITIONS)
def test_false_is_less_than_true(bench: Any, operation: OperationType) -> None:
    a, b = np.array([[False], [True]]), np.array([False, True])
    got = bench.run(operation, [(B8, a), (B8, b)], B8)
    assert got.tolist() == [[DEFINITIONS[operation](x, y) for y in (0, 1)] for x in (0, 1)]


def test_zero_sized_operand_gives_a_zero_sized_result(bench: Any) -> None:
    a, b = np.zeros((0, 1), np.float32), np.zeros((1, 4), np.float32)
    assert bench.run(O.LESS, [(F32, a), (F32, b)], B8).shape == (0, 4)


def test_shapes_that_do_not_fit_end_the_execution(bench: Any) -> None:
    with pytest.raises(InvalidArgument, match="input 1: expected a shape that broadcasts"):
        bench.run(O.LESS, [(F32, np.zeros(2, np.float32)), (F32, np.zeros(3, np.float32))], B8)


@pytest.mark.parametrize("operation", DEFINITIONS)
def test_types_and_levels(bench: Any, operation: OperationType) -> None:
    levels = {
        T.TENSOR_BOOL8: 3,
        T.TENSOR_FLOAT32: 3,
        T.TENSOR_FLOAT16: 3,
        T.TENSOR_INT32: 3,
        T.TENSOR_QUANT8_ASYMM: 3,
        T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
    }
    for kind in (t for t in T if t.name.startswith("TENSOR_")):
        tensor = Operand(kind, (2,))
        if kind in levels:
            assert bench.level(operation, [tensor, tensor], [B8]) == levels[kind]
        else:
            with pytest.raises(InvalidModel, match="input 0: expected TENSOR_BOOL8 or "):
                bench.level(operation, [tensor, tensor], [B8])
    with pytest.raises(InvalidModel, match="output 0: expected TENSOR_BOOL8, got TENSOR_FLOAT32"):
        bench.level(operation, [F32, F32], [F32])
