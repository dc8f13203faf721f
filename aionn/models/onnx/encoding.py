"""Writes the messages of ONNX.

Owns the encoding of the structures of ``schema``: the inverse of ``schema.read_model``.

Source: ``onnx.proto`` of ONNX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.models.onnx.schema import (
    Attribute,
    AttributeType,
    DataType,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OpsetImport,
    SparseTensorProto,
    TensorProto,
    ValueInfo,
)
from aionn.models.onnx.wire import PART_BYTES_MIN, MessageWriter

__all__ = ["DATA_TYPES", "attribute", "encode_model", "node", "tensor"]

DATA_TYPES = {
    "float32": DataType.FLOAT,
    "float64": DataType.DOUBLE,
    "float16": DataType.FLOAT16,
    "bool": DataType.BOOL,
    "int8": DataType.INT8,
    "int16": DataType.INT16,
    "int32": DataType.INT32,
    "int64": DataType.INT64,
    "uint8": DataType.UINT8,
    "uint16": DataType.UINT16,
    "uint32": DataType.UINT32,
    "uint64": DataType.UINT64,
}
"""ONNX's element type by numpy's name."""


_BY_DTYPE = {np.dtype(name).newbyteorder("<"): kind for name, kind in DATA_TYPES.items()}


_INT, _INTS = AttributeType.INT, AttributeType.INTS


def tensor(name: str, value: npt.ArrayLike) -> TensorProto:
    """A constant whose elements are stored in the file itself. A large array must not change before the file is encoded, which
    copies it.
    """
    array = np.asarray(value)
    little = array if array.dtype in _BY_DTYPE else array.astype(array.dtype.newbyteorder("<"))
    raw: bytes | memoryview
    if little.nbytes < PART_BYTES_MIN:
        raw = little.tobytes()
    else:
        raw = np.ascontiguousarray(little).reshape(-1).view(np.uint8).data
    return TensorProto(name, _BY_DTYPE[little.dtype], array.shape, raw=raw)


def attribute(name: str, value: Any) -> Attribute:
    """An attribute whose type follows from a Python value."""
    if isinstance(value, tuple | list):
        if all(type(item) is int for item in value):
            return Attribute(name, _INTS, tuple(value))
        items = tuple(attribute(name, item) for item in value)
        kind = AttributeType(items[0].type + 5)
        return Attribute(name, kind, tuple(item.value for item in items))
    if isinstance(value, bool | int | np.integer):
        return Attribute(name, _INT, int(value))
    if isinstance(value, float | np.floating):
        return Attribute(name, AttributeType.FLOAT, float(value))
    if isinstance(value, str):
        return Attribute(name, AttributeType.STRING, value.encode())
    if isinstance(value, GraphProto):
        return Attribute(name, AttributeType.GRAPH, value)
    if isinstance(value, SparseTensorProto):
        return Attribute(name, AttributeType.SPARSE_TENSOR, value)
    return Attribute(
        name, AttributeType.TENSOR, value if isinstance(value, TensorProto) else tensor("", value)
    )


def node(
    op_type: str,
    inputs: list[str],
    outputs: list[str],
    *,
    domain: str = "",
    name: str = "",
    **attributes: Any,
) -> NodeProto:
    """A node; its attributes' types follow from their values."""
    listed = tuple(attribute(key, value) for key, value in attributes.items())
    return NodeProto(op_type, tuple(inputs), tuple(outputs), listed, name, domain)


def encode_model(model: ModelProto) -> bytes:
    """The bytes of a file."""
    w = MessageWriter()
    w.integer(1, model.ir_version)
    if model.producer_name:
        w.text(2, model.producer_name)
    if model.producer_version:
        w.text(3, model.producer_version)
    w.message(7, _graph(model.graph))
    for opset in model.opsets:
        w.message(8, _opset(opset))
    for function in model.functions:
        w.message(25, _function(function))
    return w.encoded()


def _opset(opset: OpsetImport) -> MessageWriter:
    w = MessageWriter()
    w.text(1, opset.domain)
    w.integer(2, opset.version)
    return w


def _graph(graph: GraphProto) -> MessageWriter:
    w = MessageWriter()
    for one in graph.nodes:
        w.message(1, _node(one))
    w.text(2, graph.name)
    for constant in graph.initializers:
        w.message(5, _tensor(constant))
    for number, infos in ((11, graph.inputs), (12, graph.outputs), (13, graph.value_infos)):
        for info in infos:
            w.message(number, _value_info(info))
    for sparse in graph.sparse_initializers:
        w.message(15, _sparse(sparse))
    return w


def _node(one: NodeProto) -> MessageWriter:
    w = MessageWriter()
    for name in one.inputs:
        w.text(1, name)
    for name in one.outputs:
        w.text(2, name)
    for number, text in ((3, one.name), (4, one.op_type), (7, one.domain), (8, one.overload)):
        if text:
            w.text(number, text)
    for value in one.attributes:
        w.message(5, _attribute(value))
    return w


def _attribute(value: Attribute) -> MessageWriter:
    w = MessageWriter()
    w.text(1, value.name)
    w.integer(20, value.type)
    if value.reference:
        w.text(21, value.reference)
        return w
    if value.type in _PLAIN:
        _PLAIN[value.type](w, value.value)
    elif value.type in _MESSAGES and value.value is not None:
        number, encode = _MESSAGES[value.type]
        items = value.value if isinstance(value.value, tuple) else (value.value,)
        for item in items:
            w.message(number, encode(item))
    return w


def _tensor(value: TensorProto) -> MessageWriter:
    w = MessageWriter()
    w.integers(1, value.dims)
    w.integer(2, value.data_type)
    for number, fixed in ((4, value.floats), (10, value.doubles)):
        if fixed:
            w.view(number, fixed)
    for number, values in ((5, value.int32s), (7, value.int64s), (11, value.uint64s)):
        if values is not None:
            w.integers(number, values.tolist())
    w.text(8, value.name)
    if value.raw is not None:
        w.view(9, value.raw)
    for key, text in (value.external or {}).items():
        entry = MessageWriter()
        entry.text(1, key)
        entry.text(2, text)
        w.message(13, entry)
    if value.external is not None:
        w.integer(14, 1)
    return w


def _sparse(value: SparseTensorProto) -> MessageWriter:
    w = MessageWriter()
    w.message(1, _tensor(value.values))
    w.message(2, _tensor(value.indices))
    w.integers(3, value.dims)
    return w


def _strings(w: MessageWriter, values: Sequence[bytes]) -> None:
    for value in values:
        w.view(9, value)


_PLAIN: dict[int, Callable[[MessageWriter, Any], None]] = {
    AttributeType.FLOAT: lambda w, value: w.float32(2, value),
    AttributeType.INT: lambda w, value: w.integer(3, value),
    AttributeType.FLOATS: lambda w, value: w.floats(7, value),
    AttributeType.INTS: lambda w, value: w.integers(8, value),
    AttributeType.STRING: lambda w, value: w.view(4, value),
    AttributeType.STRINGS: _strings,
}
"""By type, the writing of numbers and texts."""

_MESSAGES: dict[int, tuple[int, Callable[[Any], MessageWriter]]] = {
    AttributeType.TENSOR: (5, _tensor),
    AttributeType.TENSORS: (10, _tensor),
    AttributeType.GRAPH: (6, _graph),
    AttributeType.GRAPHS: (11, _graph),
    AttributeType.SPARSE_TENSOR: (22, _sparse),
    AttributeType.SPARSE_TENSORS: (23, _sparse),
}


def _value_info(info: ValueInfo) -> MessageWriter:
    kind, inner, shape = MessageWriter(), MessageWriter(), MessageWriter()
    inner.integer(1, info.data_type)
    for extent in info.shape or ():
        dimension = MessageWriter()
        if isinstance(extent, str):
            dimension.text(2, extent)
        elif extent is not None:
            dimension.integer(1, extent)
        shape.message(1, dimension)
    if info.shape is not None:
        inner.message(2, shape)
    kind.message(1, inner)
    w = MessageWriter()
    w.text(1, info.name)
    w.message(2, kind)
    return w


def _function(function: FunctionProto) -> MessageWriter:
    w = MessageWriter()
    w.text(1, function.name)
    for number, names in ((4, function.inputs), (5, function.outputs), (6, function.attributes)):
        for name in names:
            w.text(number, name)
    for one in function.nodes:
        w.message(7, _node(one))
    for opset in function.opsets:
        w.message(9, _opset(opset))
    w.text(10, function.domain)
    for default in function.defaults:
        w.message(11, _attribute(default))
    if function.overload:
        w.text(13, function.overload)
    return w
