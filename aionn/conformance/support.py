"""The words of both suites for a model that a device does not support: operations, types, and the reason that can be seen."""

from __future__ import annotations

from collections.abc import Sequence

from aionn.errors import InvalidArgument
from aionn.hal import FeatureLevel, Model, Operation, operand_type_name
from aionn.models.operation_names import operation_name
from aionn.runtime.placement.levels import operation_levels
from aionn.runtime.placement.partition import is_unknown

__all__ = ["NAMED_MAX", "unsupported_reason"]

NAMED_MAX = 3
"""Most operations that a reason names: each kind once, and the rest as a number."""


def unsupported_reason(model: Model, supported: Sequence[bool], level: FeatureLevel | int) -> str:
    """The reason why a model is skipped; empty where all of its main subgraph is supported.

    The same for all models with the same operations and types, so that reports can count it: it has no shapes.

    Args:
        model: The model.
        supported: The device's answer, one for each operation of the main subgraph.
        level: The device's feature level.
    """
    needed: Sequence[int] = ()
    try:
        needed = operation_levels(model)
    except InvalidArgument:
        pass  # The model breaks a rule on purpose, and has no level.
    found: dict[str, None] = {}
    for index, (operation, is_supported) in enumerate(zip(model.main.operations, supported, strict=True)):
        if not is_supported:
            found[_described(model, operation, needed[index] if needed else 0, level)] = None
    if not found:
        return ""
    named = sorted(found)
    more = f", and {len(named) - NAMED_MAX} more" if len(named) > NAMED_MAX else ""
    return f"the device does not support {', '.join(named[:NAMED_MAX])}{more}"


def _described(model: Model, operation: Operation, needed: int, level: int) -> str:
    operands = [model.main.operands[index] for index in operation.inputs]
    types = dict.fromkeys(operand_type_name(operand.type) for operand in operands)
    words = operation_name(model, operation.type)
    if types:
        words += f" of {' and '.join(types)}"
    used = [*operands, *(model.main.operands[index] for index in operation.outputs)]
    if needed > level:
        return f"{words} (it needs feature level {needed}, the device has {int(level)})"
    if any(is_unknown(operand) for operand in used):
        return f"{words} (with extents that the model leaves open)"
    return words
