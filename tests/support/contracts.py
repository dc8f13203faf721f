"""Operands with their values, and the result of one operation's validator, for tests of the operations.

Owns making the validator's view of an operation from operands and a few constant values. Refuses to own models: an operation is
alone here, and nothing is executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from aionn.hal import Operand, OperandType, OperationType
from aionn.ops import CONTRACTS, Check

__all__ = ["F32", "I32", "INT", "ints", "level_of", "level_with_outputs", "scalar", "shaped"]

F32 = Operand(OperandType.TENSOR_FLOAT32)
I32 = Operand(OperandType.TENSOR_INT32)
INT = Operand(OperandType.INT32)


def ints(*values: int) -> tuple[Operand, np.ndarray]:
    """A list of whole numbers, as an input."""
    return I32, np.array(values, dtype=np.int32)


def scalar(value: int) -> tuple[Operand, np.ndarray]:
    """A whole number, as an input."""
    return INT, np.array(value, dtype=np.int32)


def shaped(*shape: int, kind: OperandType = OperandType.TENSOR_FLOAT32) -> Operand:
    """An operand of this shape."""
    return Operand(kind, shape)


def level_of(
    operation: OperationType,
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    constants: Mapping[int, object] | None = None,
) -> int:
    """The feature level that an operation needs by its validator.

    Args:
        operation: Its type.
        inputs: Its inputs; one that is left out has the lifetime NO_VALUE.
        outputs: Its outputs.
        constants: Values that are known when the model is validated, by input.

    Raises:
        InvalidModel: The operation is not legal.
    """
    # The validator is asked for constants by identity, and equal operands may be one object.
    copies = [msgspec.structs.replace(operand) for operand in inputs]
    values = {id(copies[index]): np.asarray(value) for index, value in (constants or {}).items()}
    check = Check(operation, copies, outputs, where="operation 0", constant=lambda o: values.get(id(o)))
    CONTRACTS[operation].validate(check)
    return check.level


def level_with_outputs(
    operation: OperationType,
    inputs: Sequence[Operand],
    count: int,
    constants: Mapping[int, object] | None = None,
    output: Operand | None = None,
) -> int:
    """``level_of`` with this number of equal outputs; by default they have the type of the first input."""
    return level_of(operation, inputs, [output or Operand(inputs[0].type)] * count, constants)
