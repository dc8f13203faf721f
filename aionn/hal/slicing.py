"""Parts of a model: some of its operations as a model of their own.

Owns the cut: values that come from other operations become inputs, values that others read become outputs. Each step of a divided
model is a part, and a device that can express only a part of a model is asked about that part; its answers are reported with the
operation indexes of the whole.

Invariants:
1. The part is a valid model if the whole is and the part has an input and an output; its operations keep their order.
2. Operands that no operation of the part uses are gone; constants stay where they are: the part shares the whole model's memory.

Source: model slicing of the NN HAL's runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from aionn.hal.model import Model, Subgraph
from aionn.hal.operand import EXTENSION_TYPE_MIN, DataLocation, Operand, OperandLifeTime
from aionn.hal.operation import Operation

__all__ = ["Slice", "cut_model", "read_from_outside", "read_outside", "slice_model", "without_unused"]

_HELD = (OperandLifeTime.TEMPORARY_VARIABLE, OperandLifeTime.SUBGRAPH_INPUT, OperandLifeTime.SUBGRAPH_OUTPUT)


class Slice(NamedTuple):
    """A part of a model.

    Attributes:
        model: The part, a model of its own.
        operation_indexes: For each of its operations, the index in the whole.
    """

    model: Model
    operation_indexes: tuple[int, ...]


def read_from_outside(subgraph: Subgraph, operations: Sequence[int]) -> tuple[int, ...]:
    """The values that operations read and none of them writes, by operand index in rising order: the inputs of a part."""
    written = {index for i in operations for index in subgraph.operations[i].outputs}
    read = {index for i in operations for index in subgraph.operations[i].inputs}
    return tuple(sorted(i for i in read - written if subgraph.operands[i].lifetime in _HELD))


def read_outside(subgraph: Subgraph, operations: Sequence[int]) -> tuple[int, ...]:
    """The values that operations write and others read, or that are outputs, in rising order: the outputs of a part."""
    inside = set(operations)
    read = {index for i, other in enumerate(subgraph.operations) if i not in inside for index in other.inputs}
    read.update(subgraph.output_indexes)
    return tuple(sorted({index for i in operations for index in subgraph.operations[i].outputs} & read))


def slice_model(model: Model, operations: Sequence[int]) -> Slice | None:
    """The part with some operations of the main subgraph; values that other operations write or read become inputs and outputs.

    Args:
        model: A valid model.
        operations: Indexes in the main subgraph, in rising order.

    Returns:
        None if the part would have no input or no output, which no driver can be given.
    """
    inputs, outputs = read_from_outside(model.main, operations), read_outside(model.main, operations)
    if not (inputs and outputs):
        return None
    return Slice(cut_model(model, operations, inputs, outputs), tuple(operations))


def cut_model(
    model: Model, operations: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]
) -> Model:
    """The model of some operations of the main subgraph.

    Args:
        model: A valid model.
        operations: Indexes in the main subgraph, in an order in which they can run.
        inputs: The operands of the main subgraph that are the part's inputs, in its order.
        outputs: Likewise its outputs.
    """
    main = model.main
    used: dict[int, int] = {}
    extensions = tuple(
        entry for entry in model.extension_name_to_prefix if _uses(main, operations, entry.prefix)
    )
    for index in (*inputs, *outputs):
        used.setdefault(index, len(used))
    for i in operations:
        for index in (*main.operations[i].inputs, *main.operations[i].outputs):
            used.setdefault(index, len(used))
    lifetimes: Mapping[int, OperandLifeTime] = {
        **dict.fromkeys(inputs, OperandLifeTime.SUBGRAPH_INPUT),
        **dict.fromkeys(outputs, OperandLifeTime.SUBGRAPH_OUTPUT),
    }
    subgraph = Subgraph(
        tuple(_part_operand(main.operands[index], lifetimes.get(index)) for index in used),
        tuple(
            Operation(
                main.operations[i].type,
                tuple(used[index] for index in main.operations[i].inputs),
                tuple(used[index] for index in main.operations[i].outputs),
            )
            for i in operations
        ),
        tuple(used[i] for i in inputs),
        tuple(used[i] for i in outputs),
    )
    part = without_unused(msgspec.structs.replace(model, main=subgraph))
    return part if part.referenced else msgspec.structs.replace(part, extension_name_to_prefix=extensions)


def _part_operand(operand: Operand, lifetime: OperandLifeTime | None) -> Operand:
    # The number of operations that read an operand changes with the cut; drivers of the HIDL kind count anew, so nothing is claimed
    # here.
    if lifetime is None:
        return msgspec.structs.replace(operand, consumer_count=None)
    # Only values change their lifetime, and those have no location: see aionn.validation.
    return msgspec.structs.replace(operand, lifetime=lifetime, consumer_count=None)


def without_unused(model: Model) -> Model:
    """The model without subgraphs that nothing refers to: a device must not be refused for what it will not run."""
    needed: set[int] = set()
    found = _references(model.main)
    while found:
        needed |= found
        found = set().union(*(_references(model.referenced[index]) for index in found)) - needed
    if len(needed) == len(model.referenced):
        return model
    place = {old: new for new, old in enumerate(sorted(needed))}
    main, *referenced = (
        _renumbered(subgraph, place) for subgraph in (model.main, *(model.referenced[i] for i in place))
    )
    return msgspec.structs.replace(model, main=main, referenced=tuple(referenced))


def _references(subgraph: Subgraph) -> set[int]:
    return {o.location.offset for o in subgraph.operands if o.lifetime == OperandLifeTime.SUBGRAPH}


def _renumbered(subgraph: Subgraph, place: Mapping[int, int]) -> Subgraph:
    if not _references(subgraph):
        return subgraph
    operands = tuple(
        msgspec.structs.replace(o, location=DataLocation(0, place[o.location.offset], 0))
        if o.lifetime == OperandLifeTime.SUBGRAPH
        else o
        for o in subgraph.operands
    )
    return msgspec.structs.replace(subgraph, operands=operands)


def _uses(main: Subgraph, operations: Sequence[int], prefix: int) -> bool:
    """Whether operations use an extension, by their own types or their operands'."""
    codes = [main.operations[i].type for i in operations]
    codes += [
        main.operands[index].type
        for i in operations
        for index in (*main.operations[i].inputs, *main.operations[i].outputs)
    ]
    return any(code // EXTENSION_TYPE_MIN == prefix for code in codes)
