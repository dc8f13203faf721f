"""The messages of ONNX as small structures with the fields that the importer needs.

Owns field numbers, limits of counts and of nesting, and the rules for a single message. It interprets no operator and opens no
file.

Invariants:
1. Fields that are not needed are skipped. A second occurrence of a field that may occur once is rejected, except for numbers and
   texts, of which the last one is used.
2. Graphs nest at most ``DEPTH_MAX`` deep.
3. The elements of tensors stay in the file until ``tensors`` asks for them.

Source: ``onnx.proto`` of ONNX, versions 3 to 14 of its intermediate representation.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidModel
from aionn.models.onnx.wire import Field, Message

__all__ = [
    "Attribute",
    "AttributeType",
    "DataType",
    "FunctionProto",
    "GraphProto",
    "ModelProto",
    "NodeProto",
    "OpsetImport",
    "SparseTensorProto",
    "TensorProto",
    "ValueInfo",
    "read_model",
]

DEPTH_MAX = 32
"""Largest depth of nested graphs. Real models have two or three levels, and Python's own stack permits some hundred."""

RANK_MAX = 32
"""Most axes of a tensor: numpy permits 64, real models have at most eight."""

LIST_MAX = 1 << 20
"""Most numbers of a list that becomes Python objects, such as an attribute's."""


class DataType(enum.IntEnum):
    """Element types with ONNX's numbers."""

    UNDEFINED = 0
    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    STRING = 8
    BOOL = 9
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BFLOAT16 = 16
    FLOAT8E4M3FN = 17
    FLOAT8E4M3FNUZ = 18
    FLOAT8E5M2 = 19
    FLOAT8E5M2FNUZ = 20
    UINT4 = 21
    INT4 = 22
    FLOAT4E2M1 = 23
    FLOAT8E8M0 = 24
    UINT2 = 25
    INT2 = 26
    FLOAT6E2M3 = 27
    FLOAT6E3M2 = 28


class AttributeType(enum.IntEnum):
    """Kinds of attributes with ONNX's numbers."""

    UNDEFINED = 0
    FLOAT = 1
    INT = 2
    STRING = 3
    TENSOR = 4
    GRAPH = 5
    FLOATS = 6
    INTS = 7
    STRINGS = 8
    TENSORS = 9
    GRAPHS = 10
    SPARSE_TENSOR = 11
    SPARSE_TENSORS = 12
    TYPE_PROTO = 13
    TYPE_PROTOS = 14


class TensorProto(msgspec.Struct, frozen=True, eq=False):
    """A constant.

    Attributes:
        name: The name of the value.
        data_type: A ``DataType``, or an unknown number.
        dims: Its shape.
        raw: The elements in little endian; None if one of the typed lists holds them.
        floats: ``float_data`` as bytes.
        doubles: ``double_data`` as bytes.
        int32s: ``int32_data``, which holds everything of at most 32 bits.
        int64s: ``int64_data``.
        uint64s: ``uint64_data``, in two's complement.
        string_count: Number of elements of ``string_data``.
        external: ``external_data`` if the elements are stored in another file, else None.
    """

    name: str = ""
    data_type: int = 0
    dims: tuple[int, ...] = ()
    raw: bytes | memoryview | None = None
    floats: bytes = b""
    doubles: bytes = b""
    int32s: npt.NDArray[np.int64] | None = None
    int64s: npt.NDArray[np.int64] | None = None
    uint64s: npt.NDArray[np.int64] | None = None
    string_count: int = 0
    external: dict[str, str] | None = None


class SparseTensorProto(msgspec.Struct, frozen=True, eq=False):
    """A constant of mostly zeros: its other values, their indices, its shape. ``values`` has the name."""

    values: TensorProto = TensorProto()
    indices: TensorProto = TensorProto()
    dims: tuple[int, ...] = ()


class ValueInfo(msgspec.Struct, frozen=True):
    """The declared type of a value.

    Attributes:
        name: The name of the value.
        data_type: A ``DataType``; 0 if it is not declared.
        shape: For each axis its extent, the name of its extent, or None if neither is declared; None if even the rank is not
            declared.
        kind: ``tensor``, or another kind of value such as ``sequence``.
    """

    name: str = ""
    data_type: int = 0
    shape: tuple[int | str | None, ...] | None = None
    kind: str = "tensor"


class Attribute(msgspec.Struct, frozen=True, eq=False):
    """An attribute of a node.

    Attributes:
        name: Its name.
        type: The declared ``AttributeType``, or that of the present field in files without a declaration.
        value: float, int, bytes, a message, or a tuple of these, by the type.
        reference: The attribute of the enclosing function that has the value; empty if the attribute has its own value.
    """

    name: str = ""
    type: int = 0
    value: Any = None
    reference: str = ""


class NodeProto(msgspec.Struct, frozen=True, eq=False):
    """An application of an operator. An empty name among the inputs or outputs means an omitted one."""

    op_type: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    name: str = ""
    domain: str = ""
    overload: str = ""


class GraphProto(msgspec.Struct, frozen=True, eq=False):
    """Nodes with their constants."""

    nodes: tuple[NodeProto, ...] = ()
    inputs: tuple[ValueInfo, ...] = ()
    outputs: tuple[ValueInfo, ...] = ()
    initializers: tuple[TensorProto, ...] = ()
    sparse_initializers: tuple[SparseTensorProto, ...] = ()
    value_infos: tuple[ValueInfo, ...] = ()
    name: str = ""


class OpsetImport(msgspec.Struct, frozen=True):
    """The version of an operator set."""

    domain: str = ""
    version: int = 0


class FunctionProto(msgspec.Struct, frozen=True, eq=False):
    """An operator that the file defines itself. ``defaults`` are the attributes that a call may omit."""

    name: str = ""
    domain: str = ""
    overload: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    defaults: tuple[Attribute, ...] = ()
    nodes: tuple[NodeProto, ...] = ()
    opsets: tuple[OpsetImport, ...] = ()


class ModelProto(msgspec.Struct, frozen=True, eq=False):
    """A file."""

    ir_version: int = 0
    opsets: tuple[OpsetImport, ...] = ()
    graph: GraphProto = GraphProto()
    functions: tuple[FunctionProto, ...] = ()
    producer_name: str = ""
    producer_version: str = ""


def read_model(data: bytes) -> ModelProto:
    """The messages of a file.

    Raises:
        InvalidModel: The bytes are not an ONNX model, or exceed a limit.
    """
    if not data:
        raise InvalidModel("not an ONNX file (it is empty)")
    graph: GraphProto | None = None
    opsets, functions = [], []
    values: dict[int, Any] = {1: 0, 2: "", 3: ""}
    for field in Message.of_file(data, "ModelProto"):
        match field.number:
            case 1:
                values[1] = field.integer()
            case 2 | 3:
                values[field.number] = field.text()
            case 7:
                if graph is not None:
                    field.refuse("one graph", "a second one")
                graph = _graph(field.message("GraphProto"), 1)
            case 8:
                opsets.append(_opset(field.message("OperatorSetIdProto")))
            case 25:
                functions.append(_function(field.message("FunctionProto")))
    if graph is None:
        raise InvalidModel("not an ONNX file (expected a graph, got none)")
    return ModelProto(values[1], tuple(opsets), graph, tuple(functions), values[2], values[3])


def _opset(message: Message) -> OpsetImport:
    domain, version = "", 0
    for field in message:
        if field.number == 1:
            domain = field.text()
        elif field.number == 2:
            version = field.integer()
    return OpsetImport(domain, version)


def _function(message: Message) -> FunctionProto:
    texts: dict[int, str] = {1: "", 10: "", 13: ""}
    lists: dict[int, list[str]] = {4: [], 5: [], 6: []}
    nodes, opsets, defaults = [], [], []
    for field in message:
        match field.number:
            case 1 | 10 | 13:
                texts[field.number] = field.text()
            case 4 | 5 | 6:
                lists[field.number].append(field.text())
            case 7:
                nodes.append(_node(field.message("NodeProto"), 1))
            case 9:
                opsets.append(_opset(field.message("OperatorSetIdProto")))
            case 11:
                defaults.append(_attribute(field.message("AttributeProto"), 1))
    return FunctionProto(
        texts[1],
        texts[10],
        texts[13],
        tuple(lists[4]),
        tuple(lists[5]),
        tuple(lists[6]),
        tuple(defaults),
        tuple(nodes),
        tuple(opsets),
    )


def _graph(message: Message, depth: int) -> GraphProto:
    if depth > DEPTH_MAX:
        message.refuse(f"graphs that nest at most {DEPTH_MAX} deep", "deeper ones")
    lists: dict[int, list[Any]] = {number: [] for number in (1, 5, 11, 12, 13, 15)}
    name = ""
    for field in message:
        match field.number:
            case 1:
                lists[1].append(_node(field.message("NodeProto"), depth))
            case 2:
                name = field.text()
            case 5:
                lists[5].append(_tensor(field.message("TensorProto")))
            case 11 | 12 | 13:
                lists[field.number].append(_value_info(field.message("ValueInfoProto")))
            case 15:
                lists[15].append(_sparse(field.message("SparseTensorProto")))
    nodes, inputs, outputs, dense, sparse, infos = (tuple(lists[number]) for number in (1, 11, 12, 5, 15, 13))
    return GraphProto(nodes, inputs, outputs, dense, sparse, infos, name)


def _node(message: Message, depth: int) -> NodeProto:
    inputs, outputs, attributes = [], [], []
    texts: dict[int, str] = {3: "", 4: "", 7: "", 8: ""}
    for field in message:
        match field.number:
            case 1:
                inputs.append(field.text())
            case 2:
                outputs.append(field.text())
            case 3 | 4 | 7 | 8:
                texts[field.number] = field.text()
            case 5:
                attributes.append(_attribute(field.message("AttributeProto"), depth))
    return NodeProto(texts[4], tuple(inputs), tuple(outputs), tuple(attributes), texts[3], texts[7], texts[8])


KNOWN_MAX = 1024
"""Attributes of a file that are kept. Those of large networks are some dozens, and each has a hundred bytes or two."""


def _attribute(message: Message, depth: int) -> Attribute:
    """An attribute. One of plain values is read once; its fields count each time."""
    budget, key = message.budget, message.short()
    if key is not None and key in budget.known:
        known: Attribute
        known, count = budget.known[key]
        budget.fields_left -= count
        if budget.fields_left < 0:
            budget.refuse(message.name)
        return known
    left = budget.fields_left
    read = _read_attribute(message, depth)
    if key is not None and read.type in _PLAIN and len(budget.known) < KNOWN_MAX:
        budget.known[key] = read, left - budget.fields_left
    return read


def _read_attribute(message: Message, depth: int) -> Attribute:
    name = reference = ""
    stated: int | None = None
    found: dict[AttributeType, list[Any]] = {}
    for field in message:
        number = field.number
        if number == 1:
            name = field.text()
        elif number == 21:
            reference = field.text()
        elif number == 20:
            stated = field.integer()
        elif number in _ATTRIBUTE_FIELDS:
            kind, read = _ATTRIBUTE_FIELDS[number]
            values = read(field, depth)
            if kind in found:
                found[kind] += values
            else:
                found[kind] = values
    if stated is None and len(found) == 1:
        stated = next(iter(found))  # The first versions of the format had no field for the type.
    if stated is None and not reference:
        message.refuse("a type of the attribute", f"none for {name!r}")
    kind = _ATTRIBUTE_TYPES.get(stated or 0, AttributeType.UNDEFINED)
    others = [other.name for other in found if other != kind]
    if others:
        message.refuse(f"attribute {name!r} with a value of its type {kind.name}", ", ".join(others))
    values = found.get(kind, [])
    if kind in _LISTS:
        return Attribute(name, kind, tuple(values), reference)
    if len(values) > 1 and kind in (AttributeType.TENSOR, AttributeType.GRAPH, AttributeType.SPARSE_TENSOR):
        message.refuse(f"one value of attribute {name!r}", len(values))
    return Attribute(name, kind, values[-1] if values else _DEFAULTS.get(kind), reference)


_ATTRIBUTE_TYPES = {kind.value: kind for kind in AttributeType}
_LISTS = {
    AttributeType.FLOATS,
    AttributeType.INTS,
    AttributeType.STRINGS,
    AttributeType.TENSORS,
    AttributeType.GRAPHS,
    AttributeType.SPARSE_TENSORS,
    AttributeType.TYPE_PROTOS,
}
_PLAIN = {
    AttributeType.FLOAT,
    AttributeType.INT,
    AttributeType.STRING,
    AttributeType.FLOATS,
    AttributeType.INTS,
    AttributeType.STRINGS,
}
_DEFAULTS: dict[AttributeType, Any] = {
    AttributeType.INT: 0,
    AttributeType.FLOAT: 0.0,
    AttributeType.STRING: b"",
}

_Read = Callable[[Field, int], list[Any]]
_ATTRIBUTE_FIELDS: dict[int, tuple[AttributeType, _Read]] = {
    2: (AttributeType.FLOAT, lambda field, depth: [field.float32()]),
    3: (AttributeType.INT, lambda field, depth: [field.integer()]),
    4: (AttributeType.STRING, lambda field, depth: [bytes(field.view())]),
    5: (AttributeType.TENSOR, lambda field, depth: [_tensor(field.message("TensorProto"))]),
    6: (AttributeType.GRAPH, lambda field, depth: [_graph(field.message("GraphProto"), depth + 1)]),
    7: (AttributeType.FLOATS, lambda field, depth: _floats(field)),
    8: (AttributeType.INTS, lambda field, depth: field.numbers(LIST_MAX)),
    9: (AttributeType.STRINGS, lambda field, depth: [bytes(field.view())]),
    10: (AttributeType.TENSORS, lambda field, depth: [_tensor(field.message("TensorProto"))]),
    11: (AttributeType.GRAPHS, lambda field, depth: [_graph(field.message("GraphProto"), depth + 1)]),
    14: (AttributeType.TYPE_PROTO, lambda field, depth: [field.number]),
    15: (AttributeType.TYPE_PROTOS, lambda field, depth: [field.number]),
    22: (AttributeType.SPARSE_TENSOR, lambda field, depth: [_sparse(field.message("SparseTensorProto"))]),
    23: (AttributeType.SPARSE_TENSORS, lambda field, depth: [_sparse(field.message("SparseTensorProto"))]),
}
"""By the number of a field, its type, and the values that one occurrence of it has."""


def _floats(field: Field) -> list[float]:
    values = np.frombuffer(field.fixed(4), "<f4")
    if values.size > LIST_MAX:
        field.refuse(f"at most {LIST_MAX} numbers", values.size)
    listed: list[float] = values.tolist()
    return listed


def _dims(fields: list[int], message: Message) -> tuple[int, ...]:
    if len(fields) > RANK_MAX:
        message.refuse(f"at most {RANK_MAX} axes", len(fields))
    for extent in fields:
        if extent < 0:
            message.refuse("extents of 0 or more", extent)
    return tuple(fields)


def _tensor(message: Message) -> TensorProto:
    name, data_type, location, string_count = "", 0, 0, 0
    raw: memoryview | None = None
    dims: list[int] = []
    fixed: dict[int, list[bytes | memoryview]] = {}
    integers: dict[int, list[npt.NDArray[np.int64]]] = {}
    external: dict[str, str] = {}
    for field in message:
        match field.number:
            case 1:
                dims += field.numbers(LIST_MAX)
            case 2:
                data_type = field.integer()
            case 4 | 10:
                fixed.setdefault(field.number, []).append(field.fixed(4 if field.number == 4 else 8))
            case 5 | 7 | 11:
                integers.setdefault(field.number, []).append(field.integers())
            case 6:
                string_count += 1
            case 8:
                name = field.text()
            case 9:
                raw = field.view()
            case 13:
                key, value = _entry(field.message("StringStringEntryProto"))
                if key in external:
                    field.refuse("every key once", f"{key!r} again")
                external[key] = value
            case 14:
                location = field.integer()
    if location not in (0, 1):
        message.refuse("a data location of 0 or 1", location)
    lists = {number: np.concatenate(parts) for number, parts in integers.items()}
    return TensorProto(
        name,
        data_type,
        _dims(dims, message),
        raw,
        b"".join(fixed.get(4, ())),
        b"".join(fixed.get(10, ())),
        lists.get(5),
        lists.get(7),
        lists.get(11),
        string_count,
        external if location == 1 else None,
    )


def _entry(message: Message) -> tuple[str, str]:
    texts = {1: "", 2: ""}
    for field in message:
        if field.number in texts:
            texts[field.number] = field.text()
    return texts[1], texts[2]


def _sparse(message: Message) -> SparseTensorProto:
    tensors = {1: TensorProto(), 2: TensorProto()}
    dims: list[int] = []
    for field in message:
        if field.number in tensors:
            tensors[field.number] = _tensor(field.message("TensorProto"))
        elif field.number == 3:
            dims += field.numbers(LIST_MAX)
    return SparseTensorProto(tensors[1], tensors[2], _dims(dims, message))


_KINDS = {4: "sequence", 5: "map", 7: "opaque", 8: "sparse tensor", 9: "optional"}


def _value_info(message: Message) -> ValueInfo:
    name, data_type, kind = "", 0, "tensor"
    shape: tuple[int | str | None, ...] | None = None
    for field in message:
        if field.number == 1:
            name = field.text()
        elif field.number == 2:
            for part in field.message("TypeProto"):
                if part.number == 1:
                    data_type, shape = _tensor_type(part.message("TypeProto.Tensor"))
                elif part.number in _KINDS:
                    kind = _KINDS[part.number]
    return ValueInfo(name, data_type, shape, kind)


def _tensor_type(message: Message) -> tuple[int, tuple[int | str | None, ...] | None]:
    data_type = 0
    shape: tuple[int | str | None, ...] | None = None
    for field in message:
        if field.number == 1:
            data_type = field.integer()
        elif field.number == 2:
            dims = [
                _dimension(dim.message("Dimension"))
                for dim in field.message("TensorShapeProto")
                if dim.number == 1
            ]
            if len(dims) > RANK_MAX:
                field.refuse(f"at most {RANK_MAX} axes", len(dims))
            shape = tuple(dims)
    return data_type, shape


def _dimension(message: Message) -> int | str | None:
    extent: int | str | None = None
    for field in message:
        if field.number == 1:
            extent = field.integer()
            if extent < 0:
                extent = None  # Some exporters write -1 for an extent that is open.
        elif field.number == 2:
            extent = field.text() or None
    return extent
