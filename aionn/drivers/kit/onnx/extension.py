"""Lowering of operations of the extension ``ai.onnx``: ONNX's operators with ONNX's types and shapes.

Owns the conversion between the HAL's operands and ONNX's values at the edges of such operations; between two of them values stay
ONNX's, with their types and with shapes that only the execution knows.

Invariant: a whole number that does not fit the HAL's 32 bits ends the execution; see ``narrowed``.

Source: ``aionn.models.onnx.extension``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aionn.drivers.kit.arguments import Array
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.onnx.graph import WIDE, Graph, Native
from aionn.drivers.kit.onnx.operator_sets import Application, needed_version, upgraded
from aionn.drivers.kit.onnx.value import moved
from aionn.errors import InvalidModel
from aionn.hal import OperandLifeTime, Operation, constant_bytes
from aionn.models.onnx.constants import DTYPE_NAMES
from aionn.models.onnx.encoding import DATA_TYPES, tensor
from aionn.models.onnx.extension import (
    AttributeTensor,
    Record,
    ValueType,
    decode_record,
    op_type_of,
)
from aionn.models.onnx.extension.contracts import check_application
from aionn.models.onnx.extension.geometry import windows
from aionn.models.onnx.schema import DataType

__all__ = ["narrowed", "write_extension"]

_NEVER = frozenset(
    (
        "Bernoulli", "ConcatFromSequence", "If", "ImageDecoder", "Loop", "Multinomial", "Optional", "OptionalGetElement",
        "OptionalHasElement", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "RegexFullMatch", "Scan",
        "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap",
        "SplitToSequence", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer",
    )
)  # fmt: skip
"""Operators with graphs, sequences, texts or random numbers, which a record cannot describe or no two devices compute alike."""

_BOUNDED = frozenset(
    (
        "ArgMax",
        "ArgMin",
        "Compress",
        "GatherND",
        "MaxPool",
        "NonMaxSuppression",
        "NonZero",
        "Shape",
        "Size",
        "TopK",
        "Unique",
    )
)
"""Operators whose 64-bit results are indexes or extents, which fit 32 bits."""


_INDEXED = {
    "Gather": 1, "GatherElements": 1, "GatherND": 1, "MaxUnpool": 1, "OneHot": 0, "ReverseSequence": 1, "Scatter": 1,
    "ScatterElements": 1, "ScatterND": 1, "TensorScatter": 2,
}  # fmt: skip
"""Operators with indexes among their inputs, and which input it is."""

_MOVERS = frozenset(
    (
        "Cast", "CenterCropPad", "Compress", "Concat", "ConstantOfShape", "DepthToSpace", "DequantizeLinear", "Expand",
        "EyeLike", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "NonZero", "Pad", "Reshape", "ReverseSequence",
        "Scatter", "ScatterElements", "ScatterND", "Shape", "Size", "Slice", "SpaceToDepth", "Split", "Squeeze", "TensorScatter",
        "Tile", "Transpose", "Trilu", "Unsqueeze", "Where",
    )
)  # fmt: skip
"""Operators that move numbers or make floats of them; the other inputs of some are axes and extents."""

_CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3}
"""Convolutions, and which input has the weights."""


def write_extension(g: Graph, op: Operation, number: int) -> None:
    """Writes one operation.

    Raises:
        Unsupported: The engine cannot be given it.
    """
    try:
        op_type = op_type_of(number)
        record = decode_record(_record_bytes(g, op))
        check_application(op_type, record)
    except InvalidModel as e:
        raise Unsupported(str(e)) from e
    if op_type in _NEVER:
        raise Unsupported(f"{op_type}: an operator with graphs, sequences, texts or random numbers")
    given = op.inputs[:-1]
    if len(record.inputs) != len(given) or len(record.outputs) != len(op.outputs):
        raise Unsupported(f"{op_type}: a record of other values")
    is_fmod = record.attributes.get("fmod", 0)
    if (
        op_type == "Mod"
        and not is_fmod
        and any(k is not None and _dtype(k).startswith("float") for k in record.inputs)
    ):
        raise Unsupported("Mod: engines have floats in the manner of C alone")
    _check_dialect(g, op, op_type, record)
    dtypes = [None if kind is None else _dtype(kind) for kind in record.outputs]
    names = [_input(g, index, kind) for index, kind in zip(given, record.inputs, strict=True)]
    application = upgraded(
        Application(op_type, record.attributes, names), record.version, len(op.outputs), g.constant
    )
    g.require_version(needed_version(application.op_type, application.attributes))
    attributes: dict[str, Any] = {
        name: tensor("", value.array) if isinstance(value, AttributeTensor) else value
        for name, value in application.attributes.items()
    }
    outputs = g.emit_all(application.op_type, application.inputs, len(op.outputs), **attributes)
    for index, name, dtype, kind in zip(op.outputs, outputs, dtypes, record.outputs, strict=True):
        if kind is not None and dtype is not None:
            _set_output(g, index, Native(name, dtype, kind.shape), op_type)


def _constant(g: Graph, index: int) -> Array | None:
    return (
        None if g.model.main.operands[index].lifetime == OperandLifeTime.NO_VALUE else g.value(index).constant
    )


def _check_dialect(g: Graph, op: Operation, op_type: str, record: Record) -> None:
    """Checks that an engine computes an operator of the extension rightly, by its ``Dialect``.

    Raises:
        Unsupported: It does not.
    """
    dialect = g.dialect
    if not dialect.has_wide_numbers:
        _check_narrow(g, op, op_type, record)
    if not dialect.has_all_windows and op_type in _CONVOLUTIONS:
        _check_windows(op_type, record)
    if not dialect.has_computed_slopes and op_type == "PRelu" and _constant(g, op.inputs[1]) is None:
        raise Unsupported("PRelu: slopes that are computed")
    if not dialect.has_joined_vectors and op_type == "Concat":
        _check_joined(g, op, record)
    if not dialect.has_exact_integers:
        _check_integers(op_type, record)
    if not dialect.has_products_in_turn and op_type == "ReduceProd":
        _check_product(record)
    gap = dialect.gap_of(op_type, record, lambda place: _constant(g, op.inputs[place]))
    if gap is not None:
        raise Unsupported(f"{op_type}: {gap}")


def _check_integers(op_type: str, record: Record) -> None:
    """Checks that an engine without ``Dialect.has_exact_integers`` only moves integers. Raises as ``_check_dialect``."""
    computed = [kind for place, kind in enumerate(record.inputs) if place != _INDEXED.get(op_type)]
    is_mover = op_type in _MOVERS and record.attributes.get("reduction", "none") == "none"
    if not is_mover and any(kind is not None and _dtype(kind) == "int32" for kind in computed):
        raise Unsupported(f"{op_type}: integers, which the engine may compute as floats")


def _check_product(record: Record) -> None:
    """Checks that an engine without ``Dialect.has_products_in_turn`` computes a ReduceProd. Raises as ``_check_dialect``."""
    kind = record.inputs[0]
    if kind is not None and _dtype(kind).startswith("float"):
        raise Unsupported("ReduceProd: floats, whose product may overflow in parts")


def _check_joined(g: Graph, op: Operation, record: Record) -> None:
    """Checks that an engine without ``Dialect.has_joined_vectors`` computes a Concat. Raises as ``_check_dialect``."""
    result, main = record.outputs[0], g.model.main
    if result is None or (result.shape is not None and len(result.shape) != 1):
        return
    readers = [*(index for other in main.operations for index in set(other.inputs)), *main.output_indexes]
    if readers.count(op.outputs[0]) > 1:
        raise Unsupported("Concat: vectors that several operations read")


def _check_narrow(g: Graph, op: Operation, op_type: str, record: Record) -> None:
    """Checks that an operation means the same where numbers of 64 bits are computed in 32, and no index is looked at.

    Raises:
        Unsupported: It does not.
    """
    if any(k is not None and _dtype(k) == "float64" for k in (*record.inputs, *record.outputs)):
        raise Unsupported(f"{op_type}: float64, which the engine computes in 32 bits")
    wide = [k for k in record.outputs if k is not None and _dtype(k) in WIDE]
    if wide and op_type not in _BOUNDED:
        raise Unsupported(f"{op_type}: {_dtype(wide[0])}, which the engine computes in 32 bits")
    place = _INDEXED.get(op_type)
    if place is not None and not g.model.main.operands[op.inputs[place]].is_constant:
        raise Unsupported(f"{op_type}: indexes that the engine does not look at")


def _check_windows(op_type: str, record: Record) -> None:
    """Checks that an engine without ``Dialect.has_all_windows`` computes a convolution.

    Raises:
        Unsupported: It does not, or an extent is not known.
    """
    kinds = [record.inputs[place] for place in (0, _CONVOLUTIONS[op_type])]
    shapes = [() if kind is None or kind.shape is None else kind.shape[2:] for kind in kinds]
    if not all(shapes) or any(-1 in shape for shape in shapes):
        raise Unsupported(f"{op_type}: windows over an image whose extents are not known")
    if op_type != "Conv" and record.attributes.get("group", 1) != 1:
        raise Unsupported(f"{op_type}: groups of 8-bit numbers")
    image, kernel = shapes
    found = windows(record.attributes, image, kernel)
    for axis, extent in enumerate(image):
        if (kernel[axis] - 1) * found.dilations[axis] + 1 > extent:
            raise Unsupported(f"{op_type}: a window that does not fit into the image")
        if found.extents[axis] == 1 and found.strides[axis] > 1:
            raise Unsupported(f"{op_type}: a stride along an axis with one window")


def _record_bytes(g: Graph, op: Operation) -> memoryview:
    if not op.inputs or not g.model.main.operands[op.inputs[-1]].is_constant:
        raise Unsupported("an operation without a constant record")
    return constant_bytes(g.model, g.model.main.operands[op.inputs[-1]])


def _dtype(kind: ValueType) -> str:
    """numpy's name of a value's element type."""
    name = DTYPE_NAMES.get(DataType(kind.data_type))
    if name is None or name not in DATA_TYPES:
        raise Unsupported(f"values of type {DataType(kind.data_type).name}")
    return name


def _input(g: Graph, index: int, kind: ValueType | None) -> str:
    """The name of an input with ONNX's type and shape; empty for an omitted one."""
    if kind is None:
        return ""
    dtype = _dtype(kind)
    operand = g.model.main.operands[index]
    if operand.lifetime == OperandLifeTime.NO_VALUE:
        if kind.shape is None or 0 not in kind.shape or not kind.is_known:
            return ""
        return g.constant(np.zeros(kind.shape, dtype))
    native = g.natives.get(index)
    if native is not None and native.dtype == dtype and native.shape == kind.shape:
        return native.name
    value = g.value(index)
    if value.constant is not None:
        array = moved(value.constant) if value.is_moved else value.constant
        return g.constant(_shaped(array.astype(dtype), kind))
    name = g.name(value)
    if value.is_moved:
        name = g.signed(name)
    if dtype != ("int8" if value.is_moved else value.dtype):
        name = g.cast(name, dtype)
    if kind.shape is not None and kind.is_known and kind.shape != value.shape:
        name = g.reshaped(name, kind.shape)
    return name


def _shaped(array: Array, kind: ValueType) -> Array:
    return array if kind.shape is None or not kind.is_known else array.reshape(kind.shape)


def _set_output(g: Graph, index: int, native: Native, op_type: str) -> None:
    """States an output: ONNX's value for operations of the extension, and the HAL's for others; one of both is dropped later."""
    g.types[native.name] = native.dtype
    g.natives[index] = native
    if g.known.shapes[index] is None:
        return
    value = g.value(index)
    name = native.name
    if value.is_moved:
        name = g.unsigned(name)
    elif native.dtype != value.dtype:
        name = g.cast(name, value.dtype) if op_type in _BOUNDED else narrowed(g, native, value.dtype)
    if native.shape != value.shape:
        name = g.reshaped(name, value.shape)
    g.set(value, name)


def narrowed(g: Graph, native: Native, dtype: str) -> str:
    """A value in the HAL's element type. Whole numbers that do not fit end the execution: the sum of a list's only element, at an
    index that is legal where all numbers fit.
    """
    name = g.cast(native.name, dtype)
    if dtype != "int32" or np.can_cast(native.dtype, dtype):
        return name
    same = g.emit("Equal", [g.cast(name, native.dtype), native.name])
    fits = g.emit("ReduceMin", [g.cast(g.reshaped(same, (-1,)), "int32")], keepdims=0)
    index = g.emit("Sub", [g.constant(1, "int32"), fits])
    nothing = g.emit("Gather", [g.constant([0], "int32"), index], axis=0)
    return g.emit("Add", [name, nothing])
