"""Operations over constants alone are computed when a model is lowered, by the reference's kernels.

Owns which operations those are. Weights that a file stores in fewer bits (float16, or 8 bits beside float activations) become
constants again, which LiteRT packs once instead of converting them in every execution; and an output that depends on no input is
known before the first execution, where LiteRT has no place to write it.

Invariants:
1. An operation is folded whole or not at all. An operation that its kernel rejects is left to the execution, which reports it.
2. No result is larger than ``FOLDED_BYTES_MAX``.

Source: the contracts in ``aionn.ops``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from aionn.drivers.litert.flatbuffer_writer import Array
from aionn.errors import Error
from aionn.hal import (
    Model,
    OperandLifeTime,
    Operation,
    OperationType,
    Subgraph,
    constant_array,
    is_extension_operand_type,
    operand_dtype,
)
from aionn.hal.pieces import between_pieces
from aionn.ops import CONTRACTS, Call, Tensor

__all__ = ["FOLDED_BYTES_MAX", "Folded", "fold"]

FOLDED_BYTES_MAX = 1 << 28
"""Largest result that is computed beforehand: the weights of the largest layers in use, and far less than what a file may have."""

_NEVER = (OperationType.IF, OperationType.WHILE, OperationType.RANDOM_MULTINOMIAL)
"""Other subgraphs are not looked into, and a sample is drawn in each execution."""


class Folded(NamedTuple):
    """The results computed beforehand.

    Attributes:
        values: Results by operand.
        operations: Indexes of the operations that are no longer needed.
    """

    values: Mapping[int, Array]
    operations: frozenset[int]


def fold(model: Model, subgraph: Subgraph, *, with_outputs: bool) -> Folded:
    """Computes the operations of a subgraph whose inputs are constants or results of such operations.

    Args:
        model: The model.
        subgraph: One of its subgraphs.
        with_outputs: Whether also those that write outputs of the subgraph.
    """
    values: dict[int, Array] = {}
    operations: set[int] = set()
    for position, operation in enumerate(subgraph.operations):
        if not with_outputs and any(i in subgraph.output_indexes for i in operation.outputs):
            continue
        results = _results(model, subgraph, operation, values)
        if results is not None:
            values.update(zip(operation.outputs, results, strict=True))
            operations.add(position)
        between_pieces()
    return Folded(values, frozenset(operations))


def _results(
    model: Model, subgraph: Subgraph, operation: Operation, values: Mapping[int, Array]
) -> list[Array] | None:
    """The results of an operation over constants; None if an input is not a constant, or the results cannot be computed
    beforehand.
    """
    contract = CONTRACTS.get(operation.type)  # type: ignore[call-overload]
    if contract is None or contract.shapes is None or operation.type in _NEVER:
        return None
    inputs: list[Tensor | None] = []
    for index in operation.inputs:
        operand = subgraph.operands[index]
        if operand.lifetime == OperandLifeTime.NO_VALUE:
            inputs.append(None)
        elif index in values:
            inputs.append(Tensor(operand, values[index], is_constant=True))
        elif operand.is_constant and not is_extension_operand_type(operand.type):
            inputs.append(Tensor(operand, constant_array(model, operand), is_constant=True))
        else:
            return None
    outputs = [subgraph.operands[index] for index in operation.outputs]
    call = Call(inputs, outputs, is_relaxed=model.relax_computation_float32_to_float16)
    try:
        with np.errstate(all="ignore"):
            for operand, shape in zip(outputs, contract.shapes(call), strict=True):
                if math.prod(shape) * operand_dtype(operand.type).itemsize > FOLDED_BYTES_MAX:
                    return None
            results: list[Array] = contract.execute(call)
    except (Error, ArithmeticError, ValueError, TypeError, IndexError, MemoryError):
        return None
    for operand, result in zip(outputs, results, strict=True):
        known = operand.dimensions
        if known and any(n not in (0, m) for n, m in zip(known, result.shape, strict=False)):
            return None
        if len(known) not in (0, result.ndim) or 0 in result.shape:
            return None
    return results
