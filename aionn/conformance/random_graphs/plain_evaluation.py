"""Evaluates models by the plain definitions: what the reference is judged by.

Owns the order of work and ``DEFINITIONS``, all of them together.

Source: see ``plain``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from aionn.conformance.random_graphs.plain import Array, Definition, PlainCall, stored_numbers
from aionn.conformance.random_graphs.plain_elementwise import DEFINITIONS as _ELEMENTWISE
from aionn.conformance.random_graphs.plain_layers import DEFINITIONS as _LAYERS
from aionn.conformance.random_graphs.plain_layout import DEFINITIONS as _LAYOUT
from aionn.errors import InvalidArgument
from aionn.hal import Model, Operand, OperationType, constant_array

__all__ = ["DEFINITIONS", "Disturb", "evaluate_plainly"]

DEFINITIONS: dict[OperationType, Definition] = {**_ELEMENTWISE, **_LAYERS, **_LAYOUT}
"""The plain definition of each operation that has one."""


Disturb = Callable[[PlainCall, Operand, Array], Array]
"""Given an operation with its inputs, the operand that it writes and the result: the result as another implementation might have
it."""


def evaluate_plainly(
    model: Model, inputs: Sequence[Array | None], *, disturb: Disturb | None = None
) -> list[Array]:
    """Runs a model without control flow.

    Args:
        model: A legal model.
        inputs: One array an argument; None for one that is left out.
        disturb: Changes each result before later operations take it; None leaves them as they are.

    Raises:
        InvalidArgument: The model has an operation without a definition here.
    """
    graph = model.main
    values: dict[int, Array | None] = {
        index: constant_array(model, operand)
        for index, operand in enumerate(graph.operands)
        if operand.is_constant
    }
    values.update(zip(graph.input_indexes, inputs, strict=True))
    with np.errstate(all="ignore"):
        for position, operation in enumerate(graph.operations):
            definition = DEFINITIONS.get(OperationType(operation.type))
            if definition is None:
                name = OperationType(operation.type).name
                raise InvalidArgument(f"operation {position}: {name} has no plain definition")
            outputs = [graph.operands[i] for i in operation.outputs]
            call = PlainCall(
                OperationType(operation.type),
                [graph.operands[i] for i in operation.inputs],
                [values.get(i) for i in operation.inputs],
                outputs,
            )
            results = definition(call)
            for index, operand, result in zip(operation.outputs, outputs, results, strict=True):
                stored = stored_numbers(result, operand)
                values[index] = stored if disturb is None else disturb(call, operand, stored)
    found = [values[index] for index in graph.output_indexes]
    return [array for array in found if array is not None]
