"""Comparisons of two operands, element by element.

Owns EQUAL, NOT_EQUAL, LESS, LESS_EQUAL, GREATER and GREATER_EQUAL.

Invariants:
1. Quantised values are compared by what they stand for: as float32 of ``(value - zero_point) * scale``.
2. A NaN is not equal to, less than or greater than anything.

Source: ``Comparisons`` of the NN HAL's validators and CPU operations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aionn.hal import Operand, OperandType, OperationType
from aionn.ops.numerics.broadcasting import broadcast_shape_rule, byte_pairs, require_broadcast
from aionn.ops.numerics.fixed_point import dequantize
from aionn.ops.signature import Array, Call, Check, OperationContract

__all__ = ["OPERATIONS"]

T = OperandType
_QUANT8_TYPES = (T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED)


def _validate(check: Check) -> None:
    check.needs(3)
    check.counts(2)
    found = check.input_type(
        0, (T.TENSOR_BOOL8, T.TENSOR_FLOAT32, T.TENSOR_FLOAT16, T.TENSOR_INT32, *_QUANT8_TYPES)
    )
    check.input_types(found, start=1)
    check.output_types(T.TENSOR_BOOL8)
    require_broadcast(check)


def _contract(
    operation: OperationType, formula: str, compare: Callable[[Array, Array], Array]
) -> OperationContract:
    def execute(call: Call) -> list[Array]:
        first, second = call.tensor(0), call.tensor(1)
        if first.type not in _QUANT8_TYPES:
            return [np.asarray(compare(first.array, second.array))]
        operand_a: Operand = first.operand
        operand_b: Operand = second.operand
        return [byte_pairs(call, lambda a, b: compare(dequantize(a, operand_a), dequantize(b, operand_b)))]

    return OperationContract(operation, _validate, broadcast_shape_rule, execute, formula + _DOC)


_DOC = """
Inputs:
    0: tensor.
    1: tensor of the same type. The shapes broadcast: aligned at the last axis, extents equal or one of them 1.
Outputs:
    0: TENSOR_BOOL8 of the broadcast shape.
Quantisation: scales and zero points are free; the values compared are the real ones, in float32.
Types: TENSOR_BOOL8 (false is less than true), TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_INT32, TENSOR_QUANT8_ASYMM from level 3;
TENSOR_QUANT8_ASYMM_SIGNED from 4.
Stricter than the spec: shapes known not to broadcast are refused with the model.
Source: Comparisons.cpp of the NN HAL.
"""

OPERATIONS: tuple[OperationContract, ...] = (
    _contract(OperationType.EQUAL, "output = input0 == input1", np.equal),
    _contract(OperationType.NOT_EQUAL, "output = input0 != input1", np.not_equal),
    _contract(OperationType.LESS, "output = input0 < input1", np.less),
    _contract(OperationType.LESS_EQUAL, "output = input0 <= input1", np.less_equal),
    _contract(OperationType.GREATER, "output = input0 > input1", np.greater),
    _contract(OperationType.GREATER_EQUAL, "output = input0 >= input1", np.greater_equal),
)
