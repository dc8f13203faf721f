"""The record of an extension operation: the operator's version and attributes, and ONNX's types and shapes of its values.

A record is MessagePack: ``{"a": attributes, "i": inputs, "o": outputs, "v": version}`` with the keys of all maps sorted, so that
equal operations have equal bytes. An attribute is a whole number, a real number, a text, a list of one of these, or a tensor. An
input or output is ``[element type, extents]``, or null for an omitted one; null instead of extents means an unknown rank.

Invariants:
1. Sizes are checked before memory is allocated: bytes, numbers of values, extents, lists, elements of tensors.
2. For any bytes, reading returns a record or raises ``InvalidModel``.

Source: "Attributes" of the ONNX IR specification; MessagePack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidModel
from aionn.hal.pieces import between_pieces
from aionn.models.onnx.constants import DTYPE_NAMES
from aionn.models.onnx.schema import DataType

__all__ = [
    "AttributeTensor",
    "Record",
    "ValueType",
    "decode_attributes",
    "decode_record",
    "encode_attributes",
]

RECORD_BYTES_MAX = 16 << 20
"""Most bytes of a record. The largest attributes of real operators are the tables of TfIdfVectorizer, some megabytes."""

VALUES_MAX = 1024
"""Most inputs or outputs of an operation. Concat and Split of exported models have up to some hundred."""

RANK_MAX = 32
"""Most axes of a value, the same as the importer's limit."""

EXTENT_MAX = (1 << 31) - 1
"""The largest extent: the HAL's arguments hold extents as INT32 numbers."""

VERSION_MAX = 1 << 16
"""The largest version; operator sets have numbers below 100."""

NAME_CHARACTERS_MAX = 64
"""Most characters of an attribute's name; ONNX's longest one has 31."""

ATTRIBUTES_MAX = 64
"""Most attributes of an operation; ONNX's operators have at most 15."""

ITEMS_MAX = 1 << 20
"""Most items of a list: the largest tables. Some hundredths of a second to decode, in which no other thread has the interpreter."""


class AttributeTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as the value of an attribute.

    Attributes:
        data_type: ONNX's number of the element type.
        dims: Extents.
        data: The elements in row-major order and little endian.
    """

    data_type: int
    dims: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> AttributeTensor:
        """The tensor of an array."""
        kinds = {name: kind for kind, name in DTYPE_NAMES.items()}
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return cls(int(kinds[array.dtype.name]), array.shape, little.tobytes())

    @property
    def array(self) -> npt.NDArray[Any]:
        """The elements as an array."""
        dtype = np.dtype(DTYPE_NAMES[DataType(self.data_type)]).newbyteorder("<")
        return np.frombuffer(self.data, dtype).reshape(self.dims)


class ValueType(msgspec.Struct, frozen=True, array_like=True):
    """ONNX's description of a value.

    Attributes:
        data_type: ONNX's number of the element type.
        shape: Extents, -1 where unknown, ``()`` for rank 0; None means an unknown rank.
    """

    data_type: int
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=RANK_MAX)] | None = None

    @property
    def is_known(self) -> bool:
        """Whether rank and extents are known."""
        return self.shape is not None and all(extent >= 0 for extent in self.shape)


class Record(msgspec.Struct, frozen=True):
    """The content of a record.

    Attributes:
        version: The version of the operator set.
        attributes: By name: int, float, str, a list of one of these, or an ``AttributeTensor``.
        inputs: One for each input, None for an omitted one.
        outputs: One for each output, None for an omitted one.
    """

    version: int
    attributes: dict[str, Any]
    inputs: tuple[ValueType | None, ...]
    outputs: tuple[ValueType | None, ...]


class _Wire(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    a: Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=ATTRIBUTES_MAX)]
    i: Annotated[tuple[ValueType | None, ...], msgspec.Meta(max_length=VALUES_MAX)] = ()
    o: Annotated[tuple[ValueType | None, ...], msgspec.Meta(max_length=VALUES_MAX)] = ()


_Item = int | float | str
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(_Wire)
_attribute_decoder = msgspec.msgpack.Decoder(
    _Item | Annotated[list[_Item], msgspec.Meta(max_length=ITEMS_MAX)]
)
_tensor_decoder = msgspec.msgpack.Decoder(
    tuple[str, int, Annotated[list[int], msgspec.Meta(max_length=RANK_MAX)], bytes]
)
_TENSOR = b"\x94\xa1t"
"""The first bytes of a tensor: a list of four items, of which the first is the text "t"."""

_SMALL_NUMBER_MAX = 0x7F
"""Largest first byte of a whole number below 128, such as the element type of a tensor. The first byte of a text is larger."""


def encode_attributes(
    version: int,
    attributes: Mapping[str, Any],
    inputs: Sequence[ValueType | None] = (),
    outputs: Sequence[ValueType | None] = (),
) -> bytes:
    """The bytes of a record.

    Args:
        version: The version of the operator set.
        attributes: By name: int, float, str, a list of one of these, an ``AttributeTensor`` or an array.
        inputs: Type and shape of each input, None for an omitted one.
        outputs: Type and shape of each output, None for an omitted one.

    Raises:
        InvalidModel: A value cannot be written, or the record is too large to be read.
    """
    written = {}
    for name, value in attributes.items():
        if isinstance(value, np.ndarray):
            value = AttributeTensor.of(value)
        written[name] = (
            ["t", *msgspec.structs.astuple(value)] if isinstance(value, AttributeTensor) else value
        )
    wire = {"a": written, "i": list(inputs), "o": list(outputs), "v": version}
    try:
        data = _encoder.encode(wire)
    except (TypeError, ValueError, OverflowError) as e:
        raise InvalidModel(f"attributes: expected numbers, texts and tensors, got others: {e}") from e
    decode_record(data)
    return data


def decode_attributes(data: bytes | bytearray | memoryview) -> tuple[int, dict[str, Any]]:
    """The version and the attributes of a record.

    Raises:
        InvalidModel: The bytes are not a record.
    """
    record = decode_record(data)
    return record.version, record.attributes


def decode_record(data: bytes | bytearray | memoryview) -> Record:
    """The content of a record.

    Raises:
        InvalidModel: The bytes are not a record.
    """
    if len(data) > RECORD_BYTES_MAX:
        raise InvalidModel(f"attributes: expected at most {RECORD_BYTES_MAX} bytes, got {len(data)}")
    try:
        wire = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise InvalidModel(f"attributes: expected a record in MessagePack, got other bytes: {e}") from e
    if not 0 < wire.v <= VERSION_MAX:
        raise InvalidModel(f"attributes, version: expected 1 to {VERSION_MAX}, got {wire.v}")
    for what, values in (("inputs", wire.i), ("outputs", wire.o)):
        for position, value in enumerate(values):
            if value is not None:
                _check_value(value, f"attributes, {what} {position}")
    attributes = {name: _attribute(name, raw) for name, raw in wire.a.items()}
    return Record(wire.v, attributes, wire.i, wire.o)


def _check_value(value: ValueType, where: str) -> None:
    if not _is_data_type(value.data_type):
        raise InvalidModel(f"{where}: expected an element type of ONNX, got {value.data_type}")
    shape = value.shape or ()
    if any(not -1 <= extent <= EXTENT_MAX for extent in shape):
        raise InvalidModel(f"{where}: expected extents from -1 to {EXTENT_MAX}, got {list(shape)}")


def _is_data_type(number: int) -> bool:
    return number in DataType.__members__.values() and number != DataType.UNDEFINED


def _attribute(name: str, raw: msgspec.Raw) -> Any:
    where = f"attribute {name[:NAME_CHARACTERS_MAX]!r}"
    if not 0 < len(name) <= NAME_CHARACTERS_MAX:
        raise InvalidModel(
            f"{where}: expected a name of 1 to {NAME_CHARACTERS_MAX} characters, got {len(name)}"
        )
    between_pieces()
    try:
        begin = bytes(memoryview(raw)[: len(_TENSOR) + 1])
        if begin[:-1] == _TENSOR and begin[-1] <= _SMALL_NUMBER_MAX:
            return _tensor(where, *_tensor_decoder.decode(raw)[1:])
        value = _attribute_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise InvalidModel(f"{where}: expected a number, a text, a list of these or a tensor: {e}") from e
    if isinstance(value, list) and len(set(map(type, value))) > 1:
        raise InvalidModel(f"{where}: expected a list of items of one type, got several")
    return value


def _tensor(where: str, data_type: Any, dims: list[Any], data: Any) -> AttributeTensor:
    if not (
        type(data_type) is int
        and _is_data_type(data_type)
        and DataType(data_type) in DTYPE_NAMES
        and len(dims) <= RANK_MAX
        and all(type(extent) is int and 0 <= extent <= EXTENT_MAX for extent in dims)
        and isinstance(data, bytes)
    ):
        raise InvalidModel(f"{where}: expected element type, extents and bytes of a tensor, got others")
    expected = math.prod(dims) * np.dtype(DTYPE_NAMES[DataType(data_type)]).itemsize
    if len(data) != expected:
        raise InvalidModel(f"{where}: expected {expected} bytes of a tensor, got {len(data)}")
    return AttributeTensor(data_type, tuple(dims), data)
