"""Operands: the typed values that flow between operations.

Owns operand types with their numbers, element sizes and levels, lifetimes, locations and quantisation parameters. Knows no
rule that needs more than one operand (see ``aionn.validation``).

Invariants:
1. ``OPERAND_TYPE_PROPERTIES`` has exactly one entry per member of ``OperandType``.
2. ``dimensions`` is ``()`` for a scalar and for a tensor of unknown rank; an extent of 0 is unknown.

Source: ``OperandType``, ``OperandLifeTime``, ``DataLocation``, ``Operand`` of the NN HAL 1.3 and its AIDL successor.
"""

from __future__ import annotations

import enum
import math
from typing import Annotated

import msgspec
import numpy as np

__all__ = [
    "EXTENSION_TYPE_MIN",
    "OPERAND_TYPE_PROPERTIES",
    "RANK_MAX",
    "ChannelQuant",
    "DataLocation",
    "Dimensions",
    "Operand",
    "OperandLifeTime",
    "OperandType",
    "OperandTypeProperties",
    "combine_dimensions",
    "dimensions_are_known",
    "is_extension_operand_type",
    "is_scalar_type",
    "operand_dtype",
    "operand_size_bytes",
    "operand_type_name",
]

EXTENSION_TYPE_MIN = 0x10000
"""Type codes from here on belong to vendor extensions: the prefix in the high bits, the type in the low 16."""

RANK_MAX = 64
"""Most dimensions of a value: numpy's own limit. The product of a million extents takes hours, in one call that keeps the
interpreter's lock."""

SCALES_MAX = 1 << 19
"""Most scales of a message's operand: those of an embedding of half a million rows, some 10 ms to decode."""

Dimensions = Annotated[tuple[int, ...], msgspec.Meta(max_length=RANK_MAX)]
"""Extents. A decoder rejects more of them before it reads the first one."""


class OperandType(enum.IntEnum):
    """Operand types with the spec's numbers."""

    FLOAT32 = 0
    INT32 = 1
    UINT32 = 2
    TENSOR_FLOAT32 = 3
    TENSOR_INT32 = 4
    TENSOR_QUANT8_ASYMM = 5
    BOOL = 6
    TENSOR_QUANT16_SYMM = 7
    TENSOR_FLOAT16 = 8
    TENSOR_BOOL8 = 9
    FLOAT16 = 10
    TENSOR_QUANT8_SYMM_PER_CHANNEL = 11
    TENSOR_QUANT16_ASYMM = 12
    TENSOR_QUANT8_SYMM = 13
    TENSOR_QUANT8_ASYMM_SIGNED = 14
    SUBGRAPH = 15
    OEM = 10000
    TENSOR_OEM_BYTE = 10001


class OperandTypeProperties(msgspec.Struct, frozen=True):
    """The fixed properties of an operand type.

    Attributes:
        dtype: numpy's name of the element type.
        element_bytes: Size of one element; 0 where the type has no size of its own (OEM, SUBGRAPH).
        is_scalar: True for types whose operands have no dimensions.
        feature_level: First level that knows the type.
        zero_point_min: Least legal zero point.
        zero_point_max: Largest legal zero point.
        is_quantized: True where ``scale`` must be positive.
    """

    dtype: str
    element_bytes: int
    is_scalar: bool
    feature_level: int
    zero_point_min: int = 0
    zero_point_max: int = 0
    is_quantized: bool = False


OPERAND_TYPE_PROPERTIES: dict[OperandType, OperandTypeProperties] = {
    OperandType.FLOAT32: OperandTypeProperties("float32", 4, True, 1),
    OperandType.INT32: OperandTypeProperties("int32", 4, True, 1),
    OperandType.UINT32: OperandTypeProperties("uint32", 4, True, 1),
    OperandType.TENSOR_FLOAT32: OperandTypeProperties("float32", 4, False, 1),
    OperandType.TENSOR_INT32: OperandTypeProperties("int32", 4, False, 1),
    OperandType.TENSOR_QUANT8_ASYMM: OperandTypeProperties("uint8", 1, False, 1, 0, 255, True),
    OperandType.BOOL: OperandTypeProperties("bool", 1, True, 3),
    OperandType.TENSOR_QUANT16_SYMM: OperandTypeProperties("int16", 2, False, 3, is_quantized=True),
    OperandType.TENSOR_FLOAT16: OperandTypeProperties("float16", 2, False, 3),
    OperandType.TENSOR_BOOL8: OperandTypeProperties("bool", 1, False, 3),
    OperandType.FLOAT16: OperandTypeProperties("float16", 2, True, 3),
    # Its scales are in extra_params, so its own scale is 0 and it does not count as is_quantized here.
    OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL: OperandTypeProperties("int8", 1, False, 3),
    OperandType.TENSOR_QUANT16_ASYMM: OperandTypeProperties("uint16", 2, False, 3, 0, 65535, True),
    OperandType.TENSOR_QUANT8_SYMM: OperandTypeProperties("int8", 1, False, 3, is_quantized=True),
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: OperandTypeProperties("int8", 1, False, 4, -128, 127, True),
    OperandType.SUBGRAPH: OperandTypeProperties("uint32", 0, True, 4),
    OperandType.OEM: OperandTypeProperties("uint8", 0, True, 1),
    OperandType.TENSOR_OEM_BYTE: OperandTypeProperties("uint8", 1, False, 1),
}


class OperandLifeTime(enum.IntEnum):
    """Where an operand's value comes from, with the spec's numbers. AIDL calls 4 ``CONSTANT_POOL``."""

    TEMPORARY_VARIABLE = 0
    SUBGRAPH_INPUT = 1
    SUBGRAPH_OUTPUT = 2
    CONSTANT_COPY = 3
    CONSTANT_REFERENCE = 4
    NO_VALUE = 5
    SUBGRAPH = 6


class DataLocation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A place in a pool. All zero where the operand's lifetime needs none.

    Attributes:
        pool_index: Index into the pools of the model or request.
        offset: First byte. For lifetime SUBGRAPH: index into the model's referenced subgraphs.
        length: Size in bytes, padding not counted.
        padding: Bytes after the value that may be read or written without harm; 0 in models.
    """

    pool_index: int = 0
    offset: int = 0
    length: int = 0
    padding: int = 0


class ChannelQuant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Scales of a per-channel quantised tensor.

    Attributes:
        scales: One positive scale per index along ``channel_dim``.
        channel_dim: The axis that the scales belong to.
    """

    scales: Annotated[tuple[float, ...], msgspec.Meta(max_length=SCALES_MAX)]
    channel_dim: int


class Operand(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One value of a subgraph: its type, shape, quantisation and place.

    Attributes:
        type: An ``OperandType``, or an extension's type code (an int of ``EXTENSION_TYPE_MIN`` or more).
        dimensions: Extents; ``()`` for scalars and for tensors of unknown rank, 0 for an unknown extent.
        scale: ``real = (quantised - zero_point) * scale``; 0 where unused.
        zero_point: See ``scale``.
        lifetime: Where the value comes from.
        location: The place of a constant.
        channel_quant: Scales of TENSOR_QUANT8_SYMM_PER_CHANNEL, None for every other type.
        extension_data: Raw parameters of an extension operand, None for every other type.
        consumer_count: The HIDL interfaces' ``numberOfConsumers``; None where not stated. Checked when stated.
    """

    type: int
    dimensions: Dimensions = ()
    scale: float = 0.0
    zero_point: int = 0
    lifetime: OperandLifeTime = OperandLifeTime.TEMPORARY_VARIABLE
    location: DataLocation = DataLocation()
    channel_quant: ChannelQuant | None = None
    extension_data: bytes | None = None
    consumer_count: int | None = None

    def __post_init__(self) -> None:
        # A code read from the wire becomes the enumerator, so that reprs and errors name it; an unknown code stays a plain
        # int for the validator to refuse.
        if type(self.type) is int and self.type < EXTENSION_TYPE_MIN and self.type in _TYPE_BY_CODE:
            msgspec.structs.force_setattr(self, "type", _TYPE_BY_CODE[self.type])

    @property
    def is_constant(self) -> bool:
        """True when the value is part of the model."""
        return self.lifetime in (OperandLifeTime.CONSTANT_COPY, OperandLifeTime.CONSTANT_REFERENCE)


_TYPE_BY_CODE = {int(member): member for member in OperandType}
_DTYPE_BY_CODE = {int(member): np.dtype(p.dtype) for member, p in OPERAND_TYPE_PROPERTIES.items()}


def is_extension_operand_type(code: int) -> bool:
    """True for a vendor extension's operand type."""
    return code >= EXTENSION_TYPE_MIN


def operand_type_name(code: int) -> str:
    """The spec's name of an operand type, or the code itself in hexadecimal."""
    member = _TYPE_BY_CODE.get(int(code))
    return member.name if member is not None else f"0x{code:x}"


def operand_dtype(code: int) -> np.dtype[np.generic]:
    """The numpy element type of an operand type that does not belong to an extension.

    Raises:
        KeyError: ``code`` is not a base type.
    """
    return _DTYPE_BY_CODE[int(code)]


def is_scalar_type(code: int) -> bool:
    """True for base types without dimensions.

    Raises:
        KeyError: ``code`` is not a base type.
    """
    return OPERAND_TYPE_PROPERTIES[_TYPE_BY_CODE[int(code)]].is_scalar


def dimensions_are_known(code: int, dimensions: tuple[int, ...]) -> bool:
    """True when rank and every extent are known. A scalar's always are."""
    if not is_extension_operand_type(code) and is_scalar_type(code):
        return True
    return len(dimensions) > 0 and all(extent > 0 for extent in dimensions)


def operand_size_bytes(code: int, dimensions: tuple[int, ...]) -> int:
    """Size of a value without padding; 0 stands for unknown (unknown rank or an extent of 0).

    Python's integers do not overflow: callers that store the result in 32 bits check it.

    Raises:
        KeyError: ``code`` is not a base type.
    """
    properties = OPERAND_TYPE_PROPERTIES[_TYPE_BY_CODE[int(code)]]
    if properties.is_scalar:
        return properties.element_bytes
    if not dimensions:
        return 0
    return properties.element_bytes * math.prod(dimensions)


def combine_dimensions(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that satisfies both, or None when they conflict.

    An empty shape is unknown and yields to the other; an extent of 0 yields to that of the other.

    Source: ``combineDimensions`` of the NN HAL's support code.
    """
    if not a or not b:
        return a or b
    if len(a) != len(b):
        return None
    combined = []
    for extent_a, extent_b in zip(a, b, strict=True):
        if extent_a and extent_b and extent_a != extent_b:
            return None
        combined.append(extent_a or extent_b)
    return tuple(combined)
