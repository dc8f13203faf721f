"""Logical operations on booleans, and the choice between two operands by a boolean.

Owns LOGICAL_AND, LOGICAL_OR, LOGICAL_NOT and SELECT.

Source: ``LogicalAndOr``, ``LogicalNot`` and ``Select`` of the NN HAL's validators and CPU operations.
"""

from __future__ import annotations

import numpy as np

from aionn.hal import OperandType, OperationType, combine_dimensions
from aionn.ops.numerics.broadcasting import broadcast_shape_rule, require_broadcast
from aionn.ops.numerics.fixed_point import requantize
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape

__all__ = ["OPERATIONS"]

T = OperandType
_QUANT8_TYPES = (T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED)


def _validate_pair(check: Check) -> None:
    check.needs(3)
    check.counts(2)
    check.input_types(T.TENSOR_BOOL8, T.TENSOR_BOOL8)
    check.output_types(T.TENSOR_BOOL8)
    require_broadcast(check)


def _execute_and(call: Call) -> list[Array]:
    return [np.asarray(np.logical_and(call.array(0), call.array(1)))]


def _execute_or(call: Call) -> list[Array]:
    return [np.asarray(np.logical_or(call.array(0), call.array(1)))]


def _validate_not(check: Check) -> None:
    check.needs(3)
    check.counts(1)
    check.input_types(T.TENSOR_BOOL8)
    check.output_types(T.TENSOR_BOOL8)


def _same_shape(call: Call) -> list[Shape]:
    return [call.tensor(0).shape]


def _execute_not(call: Call) -> list[Array]:
    return [np.asarray(np.logical_not(call.array(0)))]


def _validate_select(check: Check) -> None:
    check.needs(3)
    check.counts(3)
    found = check.input_type(1, (T.TENSOR_FLOAT32, T.TENSOR_FLOAT16, T.TENSOR_INT32, *_QUANT8_TYPES))
    check.input_types(T.TENSOR_BOOL8, found, found)
    check.output_types(found)
    shape = check.inputs[0].dimensions
    for index in (1, 2):
        got = check.inputs[index].dimensions
        combined = combine_dimensions(shape, got)
        if combined is None:
            check.refuse(f"input {index}", f"shape {list(shape)}", f"shape {list(got)}")
        shape = combined


def _select_shape(call: Call) -> list[Shape]:
    shape = call.tensor(0).shape
    for index in (1, 2):
        got = call.tensor(index).shape
        if got != shape:
            call.refuse(f"input {index}: expected the condition's shape {list(shape)}, got {list(got)}")
    return [shape]


def _execute_select(call: Call) -> list[Array]:
    condition, first, second, output = call.array(0), call.tensor(1), call.tensor(2), call.outputs[0]
    if first.type in _QUANT8_TYPES:
        return [
            np.where(
                condition,
                requantize(first.array, first.operand, output),
                requantize(second.array, second.operand, output),
            )
        ]
    return [np.where(condition, first.array, second.array)]


_PAIR_DOC = """
Inputs:
    0: TENSOR_BOOL8.
    1: TENSOR_BOOL8. The shapes broadcast: aligned at the last axis, extents equal or one of them 1.
Outputs:
    0: TENSOR_BOOL8 of the broadcast shape.
Quantisation: none.
Types: TENSOR_BOOL8 from level 3.
Stricter than the spec: shapes known not to broadcast are refused with the model.
Source: LogicalAndOr.cpp of the NN HAL.
"""

OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        OperationType.LOGICAL_AND,
        _validate_pair,
        broadcast_shape_rule,
        _execute_and,
        "output = input0 and input1" + _PAIR_DOC,
    ),
    OperationContract(
        OperationType.LOGICAL_OR,
        _validate_pair,
        broadcast_shape_rule,
        _execute_or,
        "output = input0 or input1" + _PAIR_DOC,
    ),
    OperationContract(
        OperationType.LOGICAL_NOT,
        _validate_not,
        _same_shape,
        _execute_not,
        """output = not input0
Inputs:
    0: TENSOR_BOOL8.
Outputs:
    0: TENSOR_BOOL8 of the same shape.
Quantisation: none.
Types: TENSOR_BOOL8 from level 3.
As strict as the spec.
Source: LogicalNot.cpp of the NN HAL.
""",
    ),
    OperationContract(
        OperationType.SELECT,
        _validate_select,
        _select_shape,
        _execute_select,
        """output = input1 where input0, else input2
Inputs:
    0: TENSOR_BOOL8: the condition.
    1: tensor of the condition's shape.
    2: tensor of the type of input 1 and of the condition's shape.
Outputs:
    0: tensor of the type of input 1 and of the condition's shape.
Quantisation: scales and zero points are free; both inputs are requantised to the output's.
Types of inputs 1 and 2: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_INT32, TENSOR_QUANT8_ASYMM from level 3;
TENSOR_QUANT8_ASYMM_SIGNED from 4.
Stricter than the spec: shapes known to differ are refused with the model.
Source: Select.cpp of the NN HAL.
""",
    ),
)
