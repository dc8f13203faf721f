"""The wire format of Protocol Buffers: fields of a message, and messages from fields; pure.

Owns what the messages of one service need of it: numbers, texts, bytes, packed numbers. ``grpc_messages`` knows the messages. A
value that is bytes is a view of the message, not a copy.

The input is hostile: every length is checked against what is left, and the number of fields is bounded.

Source: protobuf.dev, "Encoding".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import aionn

__all__ = [
    "FIXED32",
    "FIXED64",
    "LENGTH",
    "VARINT",
    "double_field",
    "fields",
    "head",
    "number_field",
    "packed_field",
    "packed_varints",
    "signed",
    "text_of",
    "view_field",
]

VARINT: Final = 0
FIXED64: Final = 1
LENGTH: Final = 2
FIXED32: Final = 5

FIELDS_MAX: Final = 4096
"""Fields of one message. Real requests have less than 100; numbers of a tensor are packed into one field by every generated
encoder. So a message costs some milliseconds at most, whatever its size."""

VARINT_BYTES_MAX: Final = 10
"""64 bits in groups of seven."""

_FIXED = {FIXED64: 8, FIXED32: 4}

Value = int | memoryview


def fields(message: memoryview, where: str) -> Iterator[tuple[int, int, Value]]:
    """The fields of a message as ``(number, wire type, value)``: an int for a varint, else a view of the bytes.

    Raises:
        InvalidArgument: The bytes are not a message.
    """
    position, end = 0, len(message)
    for _ in range(FIELDS_MAX):
        if position == end:
            return
        key, position = _varint(message, position, where)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise aionn.InvalidArgument(f"{where}: expected a field from 1 on, got field 0")
        if wire == VARINT:
            value, position = _varint(message, position, where)
            yield number, wire, value
            continue
        if wire == LENGTH:
            length, position = _varint(message, position, where)
        elif (fixed := _FIXED.get(wire)) is not None:
            length = fixed
        else:
            raise aionn.InvalidArgument(f"{where}: field {number} has the unknown wire type {wire}")
        if length > end - position:
            raise aionn.InvalidArgument(
                f"{where}: field {number} has {length} bytes, but the message has {end - position} more"
            )
        yield number, wire, message[position : position + length]
        position += length
    if position != end:
        raise aionn.InvalidArgument(f"{where}: expected at most {FIELDS_MAX} fields; send numbers packed")


def _varint(message: memoryview, position: int, where: str) -> tuple[int, int]:
    value = shift = 0
    for at in range(position, min(position + VARINT_BYTES_MAX, len(message))):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + 1
        shift += 7
    raise aionn.InvalidArgument(f"{where}: a number at byte {position} does not end")


def signed(value: int) -> int:
    """The int64 that a varint stands for."""
    return value - (1 << 64) if value >> 63 else value


def text_of(value: Value, where: str, bytes_max: int) -> str:
    """The text of a field.

    Raises:
        InvalidArgument: It is not UTF-8, or longer than ``bytes_max``.
    """
    if isinstance(value, int):
        raise aionn.InvalidArgument(f"{where}: expected a text, got a number")
    if len(value) > bytes_max:
        raise aionn.InvalidArgument(
            f"{where}: expected a text of at most {bytes_max} bytes, got {len(value)}"
        )
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError:
        raise aionn.InvalidArgument(f"{where}: expected UTF-8") from None


def packed_varints(content: memoryview, where: str) -> npt.NDArray[np.uint64]:
    """The numbers of a packed field, as unsigned ones of 64 bits.

    Raises:
        InvalidArgument: A number does not end.
    """
    octets = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    if len(ends) == len(octets):
        return octets.astype(np.uint64)
    if len(ends) == 0 or ends[-1] != len(octets) - 1:
        raise aionn.InvalidArgument(f"{where}: the last packed number does not end")
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if int(lengths.max()) > VARINT_BYTES_MAX:
        raise aionn.InvalidArgument(f"{where}: a packed number does not end")
    places = (np.arange(len(octets)) - np.repeat(starts, lengths)).astype(np.uint64)
    parts = (octets & np.uint8(0x7F)).astype(np.uint64) << (np.uint64(7) * places)
    values: npt.NDArray[np.uint64] = np.add.reduceat(parts, starts)
    return values


def number_field(number: int, value: int) -> bytes:
    """A field with an integer or a truth value; negative ones as int64."""
    return _encoded(number << 3 | VARINT) + _encoded(value & 0xFFFF_FFFF_FFFF_FFFF)


def double_field(number: int, value: float) -> bytes:
    """A field with a double."""
    return _encoded(number << 3 | FIXED64) + struct.pack("<d", value)


def view_field(number: int, value: str | bytes | memoryview) -> list[Any]:
    """The pieces of a field with a text, bytes or a message; bytes are not copied."""
    content = value.encode() if isinstance(value, str) else value
    return [head(number, len(content)), content]


def head(number: int, length: int) -> bytes:
    """The beginning of a field whose ``length`` bytes follow."""
    return _encoded(number << 3 | LENGTH) + _encoded(length)


def packed_field(number: int, values: Iterable[int]) -> bytes:
    """A field with packed integers."""
    content = b"".join(_encoded(value & 0xFFFF_FFFF_FFFF_FFFF) for value in values)
    return head(number, len(content)) + content


def _encoded(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    octets = bytearray()
    while value >= 0x80:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)
