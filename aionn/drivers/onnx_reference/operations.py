"""The operations of a model as calls of kernels, and the conversion of operands to ONNX's values and back.

Owns the check of an operation against its record and its contract.

Invariants:
1. Between operations a value has ONNX's element type and shape; only inputs, outputs and constants of the model have others.
2. A result that its operand cannot hold is an error, never a wrapped number.

Source: ``aionn.models.onnx.extension``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from aionn.drivers.kit.extensions import extension_code
from aionn.drivers.onnx_reference.arrays import Array
from aionn.drivers.onnx_reference.kernels import Kernel, kernel_for
from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Model, Operand, OperandLifeTime, Operation, constant_bytes, operand_dtype
from aionn.models.onnx.extension import (
    DTYPES,
    EXTENSION_NAME,
    ElementType,
    Record,
    ValueType,
    decode_record,
    op_type_of,
)
from aionn.models.onnx.extension.contracts import check_application
from aionn.models.onnx.extension.narrow import CARRIERS, NAMES, carrier_of
from aionn.models.onnx.schema import DataType

__all__ = ["Step", "called", "empty_value", "read_step", "stored", "value_of"]


class Step(NamedTuple):
    """An operation.

    Attributes:
        name: The operator's name with its index, for errors.
        kernel: Computes the results; None if the device has none for this form of the operator.
        inputs: Operand indexes; -1 for an omitted input.
        outputs: Operand indexes.
        record: The types and shapes of the values.
    """

    name: str
    kernel: Kernel | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    record: Record


def _operand_dtype(model: Model, operand: Operand) -> np.dtype[Any]:
    """numpy's type of the elements of an operand.

    Raises:
        InvalidModel: It is not a type of the spec or of the extension.
    """
    code = extension_code(model, operand.type)
    if code is None:
        try:
            return operand_dtype(operand.type)
        except KeyError as e:
            raise InvalidModel(f"operand: expected a type of the spec, got 0x{operand.type:x}") from e
    name, number = code
    if name != EXTENSION_NAME or number not in ElementType.__members__.values():
        raise InvalidModel(f"operand: expected a type of {EXTENSION_NAME}, got {number} of {name}")
    return DTYPES[ElementType(number)]


def read_step(model: Model, index: int, operation: Operation) -> Step | None:
    """An operation of the main subgraph; None if it is not one of the extension.

    Raises:
        InvalidModel: It breaks the extension's rules.
    """
    code = extension_code(model, operation.type)
    if code is None or code[0] != EXTENSION_NAME:
        return None
    where = f"operation {index}"
    try:
        op_type = op_type_of(code[1])
        where = f"operation {index} ({EXTENSION_NAME}.{op_type})"
        record = _record(model, operation)
        check_application(op_type, record)
        inputs = tuple(
            -1 if _is_omitted(model, i, value) else i
            for i, value in zip(operation.inputs[:-1], record.inputs, strict=True)
        )
        for position, value in zip(
            (*inputs, *operation.outputs), (*record.inputs, *record.outputs), strict=True
        ):
            if position >= 0 and value is not None:
                _check_type(model, model.main.operands[position], value)
    except InvalidModel as e:
        raise InvalidModel(f"{where}: {e}") from e
    return Step(where, kernel_for(op_type, record), inputs, operation.outputs, record)


def _record(model: Model, operation: Operation) -> Record:
    operands = model.main.operands
    last = operands[operation.inputs[-1]] if operation.inputs else None
    if last is None or not last.is_constant:
        raise InvalidModel("last input: expected constant attributes, got none")
    if extension_code(model, last.type) != (EXTENSION_NAME, ElementType.ATTRIBUTES):
        raise InvalidModel(f"last input: expected type ATTRIBUTES, got 0x{last.type:x}")
    record = decode_record(constant_bytes(model, last))
    if len(record.inputs) != len(operation.inputs) - 1 or len(record.outputs) != len(operation.outputs):
        raise InvalidModel(
            f"attributes: expected {len(operation.inputs) - 1} inputs and {len(operation.outputs)} outputs, "
            f"got {len(record.inputs)} and {len(record.outputs)}"
        )
    return record


def _is_omitted(model: Model, index: int, value: ValueType | None) -> bool:
    is_omitted = model.main.operands[index].lifetime == OperandLifeTime.NO_VALUE
    is_empty = value is not None and value.shape is not None and 0 in value.shape
    if is_omitted != (value is None) and not (is_omitted and is_empty):
        raise InvalidModel("attributes: expected a type for each input that is not omitted")
    return is_omitted


_HELD_IN = {
    "int32": {"int64", "uint64", "uint32", "int16", "uint16"}
    | {n for n, c in CARRIERS.items() if c != "float32"},
    "float32": {"float64"} | {n for n, c in CARRIERS.items() if c == "float32"},
}
"""ONNX's types that operands of another type may hold, by numpy's names."""


def _check_type(model: Model, operand: Operand, value: ValueType) -> None:
    own = _operand_dtype(model, operand).name
    wanted = NAMES.get(DataType(value.data_type))
    if wanted != own and wanted not in _HELD_IN.get(own, ()):
        raise InvalidModel(f"operand: expected one that holds {DataType(value.data_type).name}, got {own}")
    if value.shape is not None and value.is_known and all(operand.dimensions):
        elements = math.prod(operand.dimensions)
        if operand.dimensions and elements != math.prod(value.shape):
            raise InvalidModel(f"operand: expected shape {list(value.shape)}, got {list(operand.dimensions)}")


def value_of(model: Model, operand: Operand, array: Array, value: ValueType) -> Array:
    """An input or constant of the model as ONNX's value: its element type and shape.

    Args:
        model: The model.
        operand: The operand that the array belongs to.
        array: Of the operand's type and shape; bytes if it is a type of the extension.
        value: ONNX's type and shape.
    """
    dtype = _operand_dtype(model, operand)
    if array.dtype != dtype:
        array = np.frombuffer(array.tobytes(), dtype)
        if all(operand.dimensions):
            array = array.reshape(operand.dimensions)
    result = array.astype(carrier_of(value.data_type))
    if value.shape is not None and value.is_known:
        return result.reshape(value.shape)
    return result


def empty_value(value: ValueType) -> Array:
    """A value without elements, which has no operand."""
    return np.zeros(value.shape or (0,), carrier_of(value.data_type))


def stored(model: Model, operand: Operand, array: Array, value: ValueType | None, where: str) -> Array:
    """A result as its operand holds it.

    Args:
        model: The model.
        operand: The operand that the result is written to.
        array: ONNX's value.
        value: ONNX's type and shape; None if only the execution knows them.
        where: The place of the output, for errors.

    Raises:
        InvalidArgument: A number does not fit the operand's type, or the shape contradicts the operand's.
    """
    dtype = _operand_dtype(model, operand)
    result = array.astype(dtype)
    if dtype.kind in "iu" and (result != array).any():
        raise InvalidArgument(
            f"{where}: expected numbers that fit {dtype}, in which the model holds them, got others"
        )
    if not array.ndim:
        result = result.reshape(1)
    elif array.ndim > STORED_RANK_MAX and value is not None and value.is_known:
        result = result.reshape((-1, *array.shape[1 - STORED_RANK_MAX :]))
    expected = operand.dimensions
    if expected and (
        len(expected) != result.ndim
        or any(known not in (0, extent) for known, extent in zip(expected, result.shape, strict=True))
    ):
        raise InvalidArgument(f"{where}: expected shape {list(expected)}, got {list(result.shape)}")
    return result


STORED_RANK_MAX = 4
"""Most axes of an operand of the model; leading axes of values with more are merged."""


def called(step: Step, inputs: Sequence[Array | None]) -> Sequence[Array]:
    """The results of an operation.

    Raises:
        InvalidArgument: The kernel rejects the inputs.
    """
    assert step.kernel is not None, "the device supports the operation"
    try:
        with np.errstate(all="ignore"):
            return step.kernel(*inputs)
    except InvalidArgument as e:
        raise InvalidArgument(f"{step.name}: {e}") from e
    except (ArithmeticError, LookupError, TypeError, ValueError, np.linalg.LinAlgError, InvalidModel) as e:
        raise InvalidArgument(f"{step.name}: expected inputs that fit each other, got others: {e}") from e
