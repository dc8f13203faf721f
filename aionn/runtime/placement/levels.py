"""The part of a model that a device of a lower feature level can be queried about and can prepare. Pure: no device is asked here.

Owns the level of each operation, the slice of a model that a level can express, and how a model is expressed at a level.

Invariants:
1. A device is never shown an operation, an operand type or a property of the model that its level does not know.
2. Answers about a slice are reported with the operation indexes of the whole model.

Source: ``MetaModel`` of the NN HAL's common code.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aionn.hal import (
    EXTENSION_OPERATION_MIN,
    OPERAND_TYPE_PROPERTIES,
    FeatureLevel,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    is_extension_operand_type,
)
from aionn.hal.slicing import Slice, slice_model
from aionn.ops import validate_operation
from aionn.runtime.placement.partition import is_unknown, referenced_subgraphs

__all__ = ["expressed_at", "expressible_part", "operation_levels"]


def operation_levels(model: Model) -> tuple[int, ...]:
    """The least feature level that can express each operation of the main subgraph; the model must be valid."""
    return tuple(_level(model, model.main, operation) for operation in model.main.operations)


def _level(model: Model, subgraph: Subgraph, operation: Operation) -> int:
    used = [subgraph.operands[index] for index in (*operation.inputs, *operation.outputs)]
    level = max(_operand_level(operand) for operand in used)
    if operation.type >= EXTENSION_OPERATION_MIN:
        level = max(level, FeatureLevel.LEVEL_3)
    elif operation.type != OperationType.OEM_OPERATION:
        level = max(level, validate_operation(model, subgraph.operands, operation, where="operation"))
    for referenced in referenced_subgraphs(model, used):
        level = max(
            level, FeatureLevel.LEVEL_4, *(_level(model, referenced, o) for o in referenced.operations)
        )
    return level


def _operand_level(operand: Operand) -> int:
    if is_extension_operand_type(operand.type):
        return FeatureLevel.LEVEL_3
    level = OPERAND_TYPE_PROPERTIES[OperandType(operand.type)].feature_level
    # A value whose size only the execution knows: drivers below level 3 cannot report it.
    return max(level, FeatureLevel.LEVEL_3) if is_unknown(operand) else level


def expressed_at(model: Model, level: int) -> Model:
    """The model for a device of a level, without what the level has no words for and what changes no answer."""
    if level < FeatureLevel.LEVEL_2 and model.relax_computation_float32_to_float16:
        # The relaxed-precision flag: a device that does not know it computes in full precision, which is allowed.
        model = msgspec.structs.replace(model, relax_computation_float32_to_float16=False)
    if level < FeatureLevel.LEVEL_3 and model.extension_name_to_prefix:
        model = msgspec.structs.replace(model, extension_name_to_prefix=())
    return model


def expressible_part(model: Model, levels: Sequence[int], level: int) -> Slice | None:
    """The part that a device of a level can be queried about; None if that is nothing.

    Args:
        model: The whole model.
        levels: From ``operation_levels``.
        level: The device's.
    """
    part = slice_model(model, [index for index, needed in enumerate(levels) if needed <= level])
    return None if part is None else part._replace(model=expressed_at(part.model, level))
