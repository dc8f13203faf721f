"""A writer of TensorFlow Lite files for tests, made of the field numbers that the importer reads by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flatbuffers
import numpy as np
import pytest

from aionn.models.tflite_schema import FIELDS, OPTIONS, Field, TensorType

_TYPES = {
    "float32": TensorType.FLOAT32,
    "float16": TensorType.FLOAT16,
    "int32": TensorType.INT32,
    "int64": TensorType.INT64,
    "uint8": TensorType.UINT8,
    "int8": TensorType.INT8,
    "int16": TensorType.INT16,
    "bool": TensorType.BOOL,
}


_PEER_OPTIONS = {
    "SplitOptions": (35, {"num_splits": Field(0, "int32")}),
    "ArgMaxOptions": (40, {"output_type": Field(0, "int8")}),
    "ShapeOptions": (55, {"out_type": Field(0, "int8")}),
    "ArgMinOptions": (57, {"output_type": Field(0, "int8")}),
    "PackOptions": (59, {"values_count": Field(0, "int32"), "axis": Field(1, "int32")}),
    "SplitVOptions": (79, {"num_splits": Field(0, "int32")}),
}
"""Options that the importer has no need of, but LiteRT has."""


class T(NamedTuple):
    """A tensor to write: a constant where it has a value."""

    dtype: str
    shape: tuple[int, ...] = ()
    value: Any = None
    scale: Any = None
    zero_point: Any = 0
    axis: int = 0
    signature: tuple[int, ...] | None = None
    is_variable: bool = False


class Op(NamedTuple):
    """An operator to write: code, options table and options, tensor indexes."""

    code: int
    inputs: Iterable[int]
    outputs: Iterable[int]
    options: str | None = None
    values: dict[str, Any] = {}  # noqa: RUF012
    custom: str = ""
    version: int = 1


class Graph(NamedTuple):
    """A subgraph to write."""

    tensors: list[T]
    operators: list[Op]
    inputs: list[int]
    outputs: list[int]


class _Writer:
    def __init__(self) -> None:
        self.b = flatbuffers.Builder(1024)
        self.buffers: list[bytes] = [b""]
        self.codes: list[tuple[int, str, int]] = []

    def table(self, slots: dict[int, tuple[str, Any]]) -> int:
        self.b.StartObject(max(slots, default=-1) + 1)
        for slot, (kind, value) in slots.items():
            if kind == "offset":
                self.b.PrependUOffsetTRelativeSlot(slot, value, 0)
                continue
            add = {
                "int8": self.b.PrependInt8,
                "uint8": self.b.PrependUint8,
                "bool": self.b.PrependBool,
                "int32": self.b.PrependInt32,
                "uint32": self.b.PrependUint32,
                "float32": self.b.PrependFloat32,
            }[kind]
            add(value)
            self.b.Slot(slot)
        return int(self.b.EndObject())

    def offsets(self, items: list[int]) -> int:
        self.b.StartVector(4, len(items), 4)
        for item in reversed(items):
            self.b.PrependUOffsetTRelative(item)
        return int(self.b.EndVector())

    def array(self, values: Iterable[Any], dtype: str) -> int:
        return int(self.b.CreateNumpyVector(np.array(list(values), dtype=dtype)))

    def tensor(self, tensor: T, index: int) -> int:
        names = FIELDS["Tensor"]
        buffer = 0
        if tensor.value is not None:
            buffer = len(self.buffers)
            self.buffers.append(np.ascontiguousarray(tensor.value, dtype=tensor.dtype).tobytes())
        slots: dict[int, tuple[str, Any]] = {}
        if tensor.scale is not None:
            scales = np.atleast_1d(tensor.scale)
            points = np.broadcast_to(tensor.zero_point, scales.shape)
            q = FIELDS["QuantizationParameters"]
            parts = self.array(scales, "float32"), self.array(points, "int64")
            quant = self.table(
                {
                    q["scale"]: ("offset", parts[0]),
                    q["zero_point"]: ("offset", parts[1]),
                    q["quantized_dimension"]: ("int32", tensor.axis),
                }
            )
            slots[names["quantization"]] = ("offset", quant)
        shape = np.shape(tensor.value) if tensor.value is not None else tensor.shape
        slots[names["shape"]] = ("offset", self.array(shape, "int32"))
        if tensor.signature is not None:
            slots[names["shape_signature"]] = ("offset", self.array(tensor.signature, "int32"))
        slots[names["name"]] = ("offset", self.b.CreateString(f"t{index}"))
        slots[names["type"]] = ("int8", _TYPES[tensor.dtype])
        slots[names["buffer"]] = ("uint32", buffer)
        slots[names["is_variable"]] = ("bool", tensor.is_variable)
        return self.table(slots)

    def operator(self, op: Op) -> int:
        names = FIELDS["Operator"]
        key = (op.code, op.custom, op.version)
        if key not in self.codes:
            self.codes.append(key)
        slots = {
            names["inputs"]: ("offset", self.array(op.inputs, "int32")),
            names["outputs"]: ("offset", self.array(op.outputs, "int32")),
        }
        if op.options is not None:
            code, fields = (OPTIONS | _PEER_OPTIONS)[op.options]
            options = self.table({fields[n].number: (fields[n].kind, v) for n, v in op.values.items()})
            slots[names["builtin_options_type"]] = ("uint8", code)
            slots[names["builtin_options"]] = ("offset", options)
        slots[names["opcode_index"]] = ("uint32", self.codes.index(key))
        return self.table(slots)

    def graph(self, graph: Graph) -> int:
        names = FIELDS["SubGraph"]
        tensors = self.offsets([self.tensor(t, i) for i, t in enumerate(graph.tensors)])
        operators = self.offsets([self.operator(o) for o in graph.operators])
        return self.table(
            {
                names["tensors"]: ("offset", tensors),
                names["inputs"]: ("offset", self.array(graph.inputs, "int32")),
                names["outputs"]: ("offset", self.array(graph.outputs, "int32")),
                names["operators"]: ("offset", operators),
            }
        )

    def operator_code(self, code: int, custom: str, version: int) -> int:
        names = FIELDS["OperatorCode"]
        slots: dict[int, tuple[str, Any]] = {}
        if custom:
            slots[names["custom_code"]] = ("offset", self.b.CreateString(custom))
        slots[names["deprecated_builtin_code"]] = ("int8", min(code, 127))
        slots[names["version"]] = ("int32", version)
        slots[names["builtin_code"]] = ("int32", code)
        return self.table(slots)

    def buffer(self, data: bytes) -> int:
        if not data:
            return self.table({})
        return self.table({FIELDS["Buffer"]["data"]: ("offset", self.b.CreateByteVector(data))})

    def file(self, graphs: tuple[Graph, ...]) -> bytes:
        names = FIELDS["Model"]
        subgraphs = self.offsets([self.graph(g) for g in graphs])
        codes = self.offsets([self.operator_code(*c) for c in self.codes])
        buffers = self.offsets([self.buffer(d) for d in self.buffers])
        model = self.table(
            {
                names["version"]: ("uint32", 3),
                names["operator_codes"]: ("offset", codes),
                names["subgraphs"]: ("offset", subgraphs),
                names["buffers"]: ("offset", buffers),
            }
        )
        self.b.Finish(model, file_identifier=b"TFL3")
        return bytes(self.b.Output())


class Tflite(NamedTuple):
    """What tests write files with."""

    T: type[T]
    Op: type[Op]
    Graph: type[Graph]
    write: Callable[..., bytes]


@pytest.fixture(scope="session")
def tflite() -> Tflite:
    """Writes TensorFlow Lite files: ``tflite.write(tflite.Graph(...), ...)``."""
    return Tflite(T, Op, Graph, lambda *graphs: _Writer().file(graphs))
