"""Parts of a model: what is left when some operations are taken out.

Owns the cut: values that a removed operation wrote become inputs, values that one read become outputs. A driver of an older version
is asked about the slice that its version can express, and its answers are carried back to the operations of the whole.

Invariants:
1. The slice is a valid model if the whole is; its operations keep their order.
2. Operands that no operation of the slice uses are gone; constants stay where they are.

Source: model slicing of the NN HAL's runtime.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from aionn.hal.model import Model, Subgraph
from aionn.hal.operand import DataLocation, Operand, OperandLifeTime

__all__ = ["Slice", "slice_model"]

_COMPUTED = (OperandLifeTime.TEMPORARY_VARIABLE, OperandLifeTime.SUBGRAPH_OUTPUT)


class Slice(NamedTuple):
    """A part of a model.

    Attributes:
        model: The part; None when no operation is left.
        operation_indexes: For each of its operations, the index in the whole.
    """

    model: Model | None
    operation_indexes: tuple[int, ...]


def slice_model(model: Model, removed: Collection[int]) -> Slice:
    """The main subgraph without some of its operations.

    Args:
        model: A valid model.
        removed: Indexes of operations.
    """
    gone = set(removed)
    main = model.main
    kept = tuple(index for index in range(len(main.operations)) if index not in gone)
    if not kept:
        return Slice(None, ())
    operations = [main.operations[index] for index in kept]
    used = {i for operation in operations for i in (*operation.inputs, *operation.outputs)}
    written = {i for operation in operations for i in operation.outputs}
    read_outside = {i for index in gone for i in main.operations[index].inputs}
    read_inside = {i for operation in operations for i in operation.inputs}
    order = sorted(used)
    place = {old: new for new, old in enumerate(order)}
    inputs = [i for i in main.input_indexes if i in used]
    outputs = [i for i in main.output_indexes if i in written]
    operands: list[Operand] = []
    for index in order:
        operand = main.operands[index]
        lifetime = operand.lifetime
        if lifetime in _COMPUTED and index not in written:
            lifetime = OperandLifeTime.SUBGRAPH_INPUT
            inputs.append(index)
        elif lifetime == OperandLifeTime.TEMPORARY_VARIABLE and (
            index in read_outside or index not in read_inside
        ):
            lifetime = OperandLifeTime.SUBGRAPH_OUTPUT
            outputs.append(index)
        location = operand.location if lifetime == operand.lifetime else DataLocation()
        operands.append(
            msgspec.structs.replace(operand, lifetime=lifetime, location=location, consumer_count=None)
        )
    sliced = Subgraph(
        tuple(operands),
        tuple(
            msgspec.structs.replace(
                operation,
                inputs=tuple(place[i] for i in operation.inputs),
                outputs=tuple(place[i] for i in operation.outputs),
            )
            for operation in operations
        ),
        tuple(place[i] for i in inputs),
        tuple(place[i] for i in outputs),
    )
    uses_subgraphs = any(operand.lifetime == OperandLifeTime.SUBGRAPH for operand in operands)
    return Slice(
        msgspec.structs.replace(model, main=sliced, referenced=model.referenced if uses_subgraphs else ()),
        kept,
    )
