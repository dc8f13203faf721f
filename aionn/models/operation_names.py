"""The name of an operation of a model, also of one of the extension ``ai.onnx``."""

from __future__ import annotations

from aionn.hal import EXTENSION_OPERATION_MIN, Model, operation_type_name
from aionn.models.onnx.extension import EXTENSION_NAME, OPERATORS

__all__ = ["operation_name"]


def operation_name(model: Model, code: int) -> str:
    """The spec's name of an operation, ``ai.onnx.Erf`` for one of that extension, else the code in hexadecimal."""
    prefix, number = divmod(int(code), EXTENSION_OPERATION_MIN)
    is_known = any(
        entry.prefix == prefix and entry.name == EXTENSION_NAME for entry in model.extension_name_to_prefix
    )
    if is_known and number < len(OPERATORS):
        return f"{EXTENSION_NAME}.{OPERATORS[number]}"
    return operation_type_name(code)
