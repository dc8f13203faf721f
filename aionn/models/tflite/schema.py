"""The part of the TensorFlow Lite file schema that the importer reads, and the file as plain records.

Owns enumerations and the checks that need no more than one record: indexes in range, valid shapes and quantisation, constants of
the length of their shape. ``operators`` defines the meaning of operators.

Invariants:
1. After ``read_file`` every index in the records is in range and every constant's bytes are inside the file.
2. An extent that the file leaves open (-1 in the shape signature) is 0, as in the HAL.
3. A table or field that is not listed in ``tables`` is not looked at.

Source: the public schema, version 3 (file identifier TFL3), of TensorFlow Lite.
"""

from __future__ import annotations

import enum
import math

import msgspec

from aionn.errors import InvalidModel
from aionn.models.flatbuffer import FlatBuffer, Table
from aionn.models.tflite.tables import FIELDS, OPTIONS, Field

__all__ = [
    "FIELDS",
    "OPTIONS",
    "ActivationFunctionType",
    "Field",
    "Signature",
    "Tensor",
    "TensorType",
    "TfliteFile",
    "TfliteOperator",
    "TfliteSubgraph",
    "read_file",
]

FILE_IDENTIFIER = b"TFL3"
RANK_MAX = 32
"""More than any operator takes; keeps a damaged shape from growing numbers without bound."""

EXTENT_MAX = 2**31 - 1


class TensorType(enum.IntEnum):
    """Element types of the file."""

    FLOAT32 = 0
    FLOAT16 = 1
    INT32 = 2
    UINT8 = 3
    INT64 = 4
    STRING = 5
    BOOL = 6
    INT16 = 7
    COMPLEX64 = 8
    INT8 = 9
    FLOAT64 = 10
    COMPLEX128 = 11
    UINT64 = 12
    RESOURCE = 13
    VARIANT = 14
    UINT32 = 15
    UINT16 = 16
    INT4 = 17
    BFLOAT16 = 18
    INT2 = 19
    UINT4 = 20
    FLOAT8_E4M3FN = 21
    FLOAT8_E5M2 = 22


ELEMENT_BYTES = {
    TensorType.FLOAT32: 4,
    TensorType.FLOAT16: 2,
    TensorType.INT32: 4,
    TensorType.UINT8: 1,
    TensorType.INT64: 8,
    TensorType.BOOL: 1,
    TensorType.INT16: 2,
    TensorType.COMPLEX64: 8,
    TensorType.INT8: 1,
    TensorType.FLOAT64: 8,
    TensorType.COMPLEX128: 16,
    TensorType.UINT64: 8,
    TensorType.UINT32: 4,
    TensorType.UINT16: 2,
    TensorType.BFLOAT16: 2,
}
"""Element sizes of the types whose constants are checked for length; other types are packed or have no fixed size."""


class ActivationFunctionType(enum.IntEnum):
    """Fused activations of the file. The first four have the HAL's numbers."""

    NONE = 0
    RELU = 1
    RELU_N1_TO_1 = 2
    RELU6 = 3
    TANH = 4
    SIGN_BIT = 5


class Tensor(msgspec.Struct, frozen=True):
    """A tensor of the file.

    Attributes:
        name: As the file calls it.
        type: Element type.
        shape: Extents as the file states them for its default input shapes.
        dimensions: As ``shape``, but 0 where the shape signature leaves the extent open.
        data_offset: First byte of a constant's value in the file.
        data_bytes: Length of a constant's value; 0 if the tensor is not a constant.
        scales: Quantisation scales; empty where the tensor has none.
        zero_points: As many as scales.
        quantized_dimension: The axis that several scales belong to.
        is_variable: Whether it keeps its value between executions.
        is_sparse: Whether its constant is stored in a sparse form.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    dimensions: tuple[int, ...]
    data_offset: int = 0
    data_bytes: int = 0
    scales: tuple[float, ...] = ()
    zero_points: tuple[int, ...] = ()
    quantized_dimension: int = 0
    is_variable: bool = False
    is_sparse: bool = False

    @property
    def is_constant(self) -> bool:
        return self.data_bytes > 0


class TfliteOperator(msgspec.Struct, frozen=True):
    """An operator of the file.

    Attributes:
        code: The builtin operator's code.
        custom_code: Name of a custom operator, else empty.
        inputs: Tensor indexes; -1 for one that is left out.
        outputs: Tensor indexes.
        options_type: Code of the options table's type; 0 without one.
        options: The options table.
        where: Begins messages: ``subgraph 0, operator 4``.
        replaced: Options that the importer gives instead of the table's.
    """

    code: int
    custom_code: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options_type: int
    options: Table | None
    where: str
    replaced: tuple[tuple[str, float], ...] = ()

    def option(self, table: str, name: str) -> float:
        """An option's value, its default where it is absent.

        Raises:
            InvalidModel: The operator has options of another kind, or the value is not a finite number.
        """
        for given, number in self.replaced:
            if given == name:
                return number
        code, fields = OPTIONS[table]
        field = fields[name]
        if self.options is None or self.options_type == 0:
            return field.default
        if self.options_type != code:
            raise InvalidModel(
                f"{self.where}: expected options of type {code} ({table}), got type {self.options_type}"
            )
        value = self.options.scalar(field.number, field.kind, field.default, name)
        if not math.isfinite(value):
            raise InvalidModel(f"{self.where}: expected a finite option {name}, got {value}")
        return value

    def integer(self, table: str, name: str) -> int:
        """As ``option``, for whole numbers and flags."""
        return int(self.option(table, name))


class TfliteSubgraph(msgspec.Struct, frozen=True):
    """A subgraph of the file."""

    name: str
    tensors: tuple[Tensor, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operators: tuple[TfliteOperator, ...]


class Signature(msgspec.Struct, frozen=True):
    """A signature of the file: names for the inputs and outputs of a subgraph, by tensor index."""

    key: str
    subgraph_index: int
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]


class TfliteFile(msgspec.Struct, frozen=True):
    """A whole file."""

    data: bytes
    subgraphs: tuple[TfliteSubgraph, ...]
    signatures: tuple[Signature, ...]


def read_file(data: bytes) -> TfliteFile:
    """Reads a file.

    Args:
        data: All of its bytes.

    Raises:
        InvalidModel: It is damaged, cut off, or no TensorFlow Lite file.
    """
    buffer = FlatBuffer(data)
    model = buffer.root(FILE_IDENTIFIER, "model", ".tflite")
    fields = FIELDS["Model"]
    version = model.integer(fields["version"], "uint32", 0, "version")
    if version != 3:
        model.refuse("version", "3", version)
    codes = [_read_operator_code(t) for t in model.tables(fields["operator_codes"], "operator_codes")]
    values = [_read_buffer(t, len(data)) for t in model.tables(fields["buffers"], "buffers")]
    tables = model.tables(fields["subgraphs"], "subgraphs")
    subgraphs = tuple(_read_subgraph(t, i, codes, values) for i, t in enumerate(tables))
    if not subgraphs:
        model.refuse("subgraphs", "at least one subgraph", "none")
    signatures = tuple(
        _read_signature(t, subgraphs) for t in model.tables(fields["signature_defs"], "signature_defs")
    )
    return TfliteFile(data, subgraphs, signatures)


def _read_operator_code(table: Table) -> tuple[int, str]:
    fields = FIELDS["OperatorCode"]
    # Codes above 127 do not fit the first field, which old readers look at: the larger of the two holds.
    old = table.integer(fields["deprecated_builtin_code"], "int8", 0, "deprecated_builtin_code")
    new = table.integer(fields["builtin_code"], "int32", 0, "builtin_code")
    return max(old, new), table.text(fields["custom_code"], "custom_code")


def _read_buffer(table: Table, file_bytes: int) -> tuple[int, int]:
    fields = FIELDS["Buffer"]
    offset = table.integer(fields["offset"], "uint64", 0, "offset")
    size = table.integer(fields["size"], "uint64", 0, "size")
    if offset > 1:
        # Large models keep their constants behind the flatbuffer; 1 is the writer's mark for "none".
        if offset + size > file_bytes:
            table.refuse(
                "offset", f"{size} bytes inside of the file of {file_bytes} bytes", f"offset {offset}"
            )
        return offset, size
    return table.byte_range(fields["data"], "data")


def _read_subgraph(
    table: Table, index: int, codes: list[tuple[int, str]], values: list[tuple[int, int]]
) -> TfliteSubgraph:
    fields = FIELDS["SubGraph"]
    tensors = tuple(_read_tensor(t, values) for t in table.tables(fields["tensors"], "tensors"))
    lists = []
    for what in ("inputs", "outputs"):
        indexes = table.int32s(fields[what], what)
        for i in indexes:
            if not 0 <= i < len(tensors):
                table.refuse(what, f"tensor indexes below {len(tensors)}", i)
        lists.append(indexes)
    if len(set(lists[0])) != len(lists[0]):
        table.refuse("inputs", "every tensor once", list(lists[0]))
    operators = tuple(
        _read_operator(t, f"subgraph {index}, operator {i}", codes, len(tensors))
        for i, t in enumerate(table.tables(fields["operators"], "operators"))
    )
    return TfliteSubgraph(table.text(fields["name"], "name"), tensors, lists[0], lists[1], operators)


def _read_operator(
    table: Table, where: str, codes: list[tuple[int, str]], tensor_count: int
) -> TfliteOperator:
    fields = FIELDS["Operator"]
    code_index = table.integer(fields["opcode_index"], "uint32", 0, "opcode_index")
    if code_index >= len(codes):
        table.refuse("opcode_index", f"an index below {len(codes)}", code_index)
    inputs = table.int32s(fields["inputs"], "inputs")
    outputs = table.int32s(fields["outputs"], "outputs")
    for what, indexes, least in (("inputs", inputs, -1), ("outputs", outputs, 0)):
        for i in indexes:
            if not least <= i < tensor_count:
                table.refuse(what, f"tensor indexes from {least} to {tensor_count - 1}", i)
    code, custom_code = codes[code_index]
    return TfliteOperator(
        code=code,
        custom_code=custom_code,
        inputs=inputs,
        outputs=outputs,
        options_type=table.integer(fields["builtin_options_type"], "uint8", 0, "builtin_options_type"),
        options=table.table(fields["builtin_options"], "builtin_options"),
        where=where,
    )


def _read_tensor(table: Table, values: list[tuple[int, int]]) -> Tensor:
    fields = FIELDS["Tensor"]
    shape = table.int32s(fields["shape"], "shape")
    if len(shape) > RANK_MAX or any(extent < 0 for extent in shape):
        table.refuse("shape", f"up to {RANK_MAX} extents, none negative", list(shape[: RANK_MAX + 1]))
    signature = table.int32s(fields["shape_signature"], "shape_signature")
    dimensions = shape
    if signature:
        if len(signature) != len(shape):
            table.refuse("shape_signature", f"{len(shape)} extents", list(signature[: RANK_MAX + 1]))
        dimensions = tuple(0 if s < 0 else extent for s, extent in zip(signature, shape, strict=True))
    code = table.integer(fields["type"], "int8", 0, "type")
    if code not in _TENSOR_TYPES:
        table.refuse("type", "a tensor type", code)
    kind = TensorType(code)
    buffer_index = table.integer(fields["buffer"], "uint32", 0, "buffer")
    # Buffer 0 is the writer's mark for "no value"; a file without buffers has no constants at all.
    if buffer_index and buffer_index >= len(values):
        table.refuse("buffer", f"an index below {len(values)}", buffer_index)
    offset, length = values[buffer_index] if buffer_index < len(values) else (0, 0)
    is_sparse = table.has(fields["sparsity"])
    if length and kind in ELEMENT_BYTES and not is_sparse:
        expected = math.prod(shape) * ELEMENT_BYTES[kind]
        if length != expected:
            table.refuse("buffer", f"{expected} bytes for shape {list(shape)} of {kind.name}", length)
    scales, zero_points, axis = _read_quantization(table, shape, kind)
    return Tensor(
        name=table.text(fields["name"], "name"),
        type=kind,
        shape=shape,
        dimensions=dimensions,
        data_offset=offset,
        data_bytes=length,
        scales=scales,
        zero_points=zero_points,
        quantized_dimension=axis,
        is_variable=bool(table.integer(fields["is_variable"], "bool", 0, "is_variable")),
        is_sparse=is_sparse,
    )


_TENSOR_TYPES = frozenset(int(t) for t in TensorType)
_ZERO_POINTS = {TensorType.UINT8: (0, 255), TensorType.INT8: (-128, 127), TensorType.INT16: (0, 0)}


def _read_quantization(
    tensor: Table, shape: tuple[int, ...], kind: TensorType
) -> tuple[tuple[float, ...], tuple[int, ...], int]:
    table = tensor.table(FIELDS["Tensor"]["quantization"], "quantization")
    if table is None:
        return (), (), 0
    fields = FIELDS["QuantizationParameters"]
    scales = table.float32s(fields["scale"], "scale")
    zero_points = table.int64s(fields["zero_point"], "zero_point")
    axis = table.integer(fields["quantized_dimension"], "int32", 0, "quantized_dimension")
    if not scales:
        return (), (), 0
    if not all(math.isfinite(s) and s >= 0 for s in scales):
        table.refuse("scale", "finite scales that are not negative", [s for s in scales if not s >= 0][:4])
    if len(scales) > 1 and (not 0 <= axis < len(shape) or shape[axis] != len(scales)):
        table.refuse(
            "scale",
            f"one scale, or one per index of axis {axis} of shape {list(shape)}",
            f"{len(scales)} scales",
        )
    if not zero_points:
        zero_points = (0,) * len(scales)
    if len(zero_points) == 1:
        zero_points *= len(scales)
    if len(zero_points) != len(scales):
        table.refuse("zero_point", f"{len(scales)} zero points", len(zero_points))
    low, high = _ZERO_POINTS.get(kind, (-(2**31), 2**31 - 1))
    wrong = [z for z in zero_points if not low <= z <= high]
    if wrong:
        table.refuse("zero_point", f"{low} to {high} for {kind.name}", wrong[0])
    return scales, zero_points, axis


def _read_signature(table: Table, subgraphs: tuple[TfliteSubgraph, ...]) -> Signature:
    fields = FIELDS["SignatureDef"]
    index = table.integer(fields["subgraph_index"], "uint32", 0, "subgraph_index")
    if index >= len(subgraphs):
        table.refuse("subgraph_index", f"an index below {len(subgraphs)}", index)
    names = []
    for what in ("inputs", "outputs"):
        entries = []
        for entry in table.tables(fields[what], what):
            tensor = entry.integer(FIELDS["TensorMap"]["tensor_index"], "uint32", 0, "tensor_index")
            if tensor >= len(subgraphs[index].tensors):
                entry.refuse("tensor_index", f"an index below {len(subgraphs[index].tensors)}", tensor)
            entries.append((entry.text(FIELDS["TensorMap"]["name"], "name"), tensor))
        names.append(tuple(entries))
    return Signature(table.text(fields["signature_key"], "signature_key"), index, names[0], names[1])
