"""The result of one operation's validator, for tests of the operations.

Owns making the validator's view of an operation from operands and a few constant values. Refuses to own models: an operation is
alone here, and nothing is executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from aionn.hal import Operand, OperationType
from aionn.ops import CONTRACTS, Check

__all__ = ["level_of"]


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
