"""Vendor extensions from a driver's side: what a code means, and how large a value is.

Owns the translation between a model's prefixes and a device's extensions, and the sizes of their values. The driver defines an
extension's operations.

Invariants:
1. Prefixes are a model's own: the same code may mean different things in two models.
2. An operation that uses anything of an extension that the device does not have is unsupported, whatever the driver returns.

Source: extensions of the NN HAL 1.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import (
    EXTENSION_OPERATION_MIN,
    EXTENSION_TYPE_MIN,
    Extension,
    ExtensionOperandType,
    Model,
    Operand,
    Operation,
    is_extension_operand_type,
)

__all__ = [
    "check_extension_constants",
    "check_extension_size",
    "extension_code",
    "extension_types",
    "uses_known_extensions",
]


def extension_code(model: Model, code: int) -> tuple[str, int] | None:
    """The extension's name and the low 16 bits of an operand type or operation; None for one of the spec."""
    prefix, number = divmod(int(code), EXTENSION_TYPE_MIN)
    return next(((e.name, number) for e in model.extension_name_to_prefix if e.prefix == prefix), None)


def extension_types(model: Model, extensions: Sequence[Extension]) -> dict[int, ExtensionOperandType]:
    """The operand types that a model may use of a device's extensions, by the model's code."""
    by_name = {extension.name: extension for extension in extensions}
    return {
        entry.prefix * EXTENSION_TYPE_MIN + kind.type: kind
        for entry in model.extension_name_to_prefix
        if entry.name in by_name
        for kind in by_name[entry.name].operand_types
    }


def uses_known_extensions(model: Model, operation: Operation, extensions: Sequence[Extension]) -> bool:
    """Whether a device has every extension that an operation and its operands are of."""
    known = extension_types(model, extensions)
    if operation.type >= EXTENSION_OPERATION_MIN:
        code = extension_code(model, operation.type)
        if code is None or code[0] not in {extension.name for extension in extensions}:
            return False
    types = (model.main.operands[i].type for i in (*operation.inputs, *operation.outputs))
    return all(not is_extension_operand_type(kind) or kind in known for kind in types)


def check_extension_constants(model: Model, extensions: Sequence[Extension]) -> None:
    """Checks the constants of those extension types that a device knows.

    Raises:
        InvalidModel: A scalar has dimensions, or a constant's size is not that of its type and shape.
    """
    known = extension_types(model, extensions)
    for index, operand in enumerate(model.main.operands):
        kind = known.get(operand.type)
        if kind is None:
            continue
        if not kind.is_tensor and operand.dimensions:
            raise InvalidModel(
                f"operand {index} (0x{operand.type:x}): expected no dimensions for a scalar, got {list(operand.dimensions)}"
            )
        if operand.is_constant:
            expected = _size_bytes(kind, operand.dimensions)
            if expected != operand.location.length:
                raise InvalidModel(
                    f"operand {index} (0x{operand.type:x}), length: expected {expected} bytes, got {operand.location.length}"
                )


def check_extension_size(
    types: Mapping[int, ExtensionOperandType],
    operand: Operand,
    dimensions: tuple[int, ...],
    length: int,
    where: str,
) -> None:
    """Checks the size of an argument, if its type is a known extension's and its shape is known.

    Raises:
        InvalidArgument: Another size than the type's and the shape's.
    """
    kind = types.get(operand.type)
    if kind is None or (kind.is_tensor and (not dimensions or 0 in dimensions)):
        return
    expected = _size_bytes(kind, dimensions)
    if length != expected:
        raise InvalidArgument(f"{where}, length: expected {expected} bytes, got {length}")


def _size_bytes(kind: ExtensionOperandType, dimensions: tuple[int, ...]) -> int:
    return kind.byte_size * math.prod(dimensions) if kind.is_tensor else kind.byte_size
