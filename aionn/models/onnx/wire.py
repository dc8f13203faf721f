"""Reads and writes the protobuf wire format. The bytes that are read may be damaged or hostile.

Owns fields, varints and packed numbers, without a schema: callers name the fields by number.

Invariants:
1. Every length is checked against the enclosing message before it is used; an error is one ``InvalidModel`` that names the field,
   the byte, the expected and the actual value.
2. Only numbers and texts are copied: bytes are returned as views of the file.
3. Fields are counted, so that a file of empty messages cannot take many times its size in memory, nor one of unknown fields
   minutes.
4. No function recurses; a caller that reads nested messages bounds the depth.

Source: "Encoding" of the protocol buffers documentation.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidModel
from aionn.platform.joining import joined

__all__ = ["PART_BYTES_MIN", "Budget", "Field", "Message", "MessageWriter"]

FIELDS_MAX = 1_500_000
"""Fields that one file may have in all of its messages, known ones or not. Those of 20,000 nodes, as the largest exported language
models have, are some 500,000."""

VARINT_BYTES_MAX = 10
"""64 bits take ten bytes of seven."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

SHORT_BYTES = 64
"""Largest packed list that is read byte by byte, which takes less time than vectors up to about this size, and largest
message whose meaning is kept."""

PART_BYTES_MIN = 4 << 10
"""Smallest value that a writer refers to until the message is encoded; smaller ones are copied into the bytes around them."""

_WIRE_TYPES = {VARINT: "a varint", FIXED64: "64 bits", BYTES: "a length and bytes", FIXED32: "32 bits"}
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_U64_MAX = 0xFFFF_FFFF_FFFF_FFFF


class Budget:
    """The limit for the fields of one file.

    Attributes:
        fields_left: Number of fields that may still be read.
        known: The values of short messages of one kind, by their bytes, with the number of their fields: nodes repeat attributes.
    """

    __slots__ = ("fields_left", "known")

    def __init__(self) -> None:
        self.fields_left = FIELDS_MAX
        self.known: dict[bytes, tuple[Any, int]] = {}

    def refuse(self, where: str) -> NoReturn:
        """Rejects the file, which has too many."""
        raise InvalidModel(
            f"protobuf, {where}: expected at most {FIELDS_MAX} fields in all messages, got more"
        )


class Field(msgspec.Struct, eq=False, gc=False):
    """One field of a message: its number, its value, and the conversions that the schema asks for.

    Attributes:
        number: Its number in the schema.
        position: Its first byte in the file.
    """

    _message: Message
    number: int
    _wire_type: int
    _value: int
    _start: int
    _end: int
    position: int

    def refuse(self, expected: str, got: object) -> NoReturn:
        """Rejects the file because of this field."""
        raise InvalidModel(
            f"protobuf, {self._message.name}, field {self.number} at byte {self.position}: expected {expected}, got {got}"
        )

    def _need(self, wire_type: int) -> None:
        if self._wire_type != wire_type:
            self.refuse(_WIRE_TYPES[wire_type], _WIRE_TYPES[self._wire_type])

    def unsigned(self) -> int:
        """A varint of 64 bits without a sign."""
        self._need(VARINT)
        return self._value

    def integer(self) -> int:
        """A varint of 64 bits in two's complement: int32 and int64 alike."""
        value = self.unsigned()
        return value - (1 << 64) if value >> 63 else value

    def float32(self) -> float:
        """A number of 32 bits."""
        self._need(FIXED32)
        value: float = struct.unpack("<f", _U32.pack(self._value))[0]
        return value

    def view(self) -> memoryview:
        """The bytes, a view of the file."""
        self._need(BYTES)
        return memoryview(self._message.data)[self._start : self._end]

    def text(self) -> str:
        """A text in UTF-8."""
        if self._wire_type != BYTES:
            self._need(BYTES)
        try:
            return str(self._message.data[self._start : self._end], "utf-8")
        except UnicodeDecodeError as e:
            self.refuse("UTF-8", f"another encoding at byte {self._start + e.start}")

    def message(self, name: str) -> Message:
        """A message within the message."""
        if self._wire_type != BYTES:
            self._need(BYTES)
        message = self._message
        return Message(message.data, self._start, self._end, name, message.budget)

    def numbers(self, count_max: int) -> list[int]:
        """The same as ``integers``, as Python's numbers, of which there may be ``count_max``."""
        if self._wire_type == BYTES and self._end - self._start <= min(SHORT_BYTES, count_max):
            short = _short_integers(self._message.data[self._start : self._end])
            if short is not None:
                return [value - (1 << 64) if value >> 63 else value for value in short]
        values = self.integers()
        if values.size > count_max:
            self.refuse(f"at most {count_max} numbers", values.size)
        listed: list[int] = values.tolist()
        return listed

    def integers(self) -> npt.NDArray[np.int64]:
        """Varints: a packed list, or the one number of a list that is not packed."""
        if self._wire_type == VARINT:
            return np.array([self._value], np.uint64).view(np.int64)
        packed = self.view()
        short = _short_integers(packed) if len(packed) <= SHORT_BYTES else None
        if short is not None:
            return np.array(short, np.uint64).view(np.int64)
        raw = np.frombuffer(packed, np.uint8)
        ends = np.flatnonzero(raw < 0x80)
        if raw.size and (not ends.size or ends[-1] != raw.size - 1):
            self.refuse("varints that end within the list", "one that does not")
        starts = np.concatenate([np.zeros(1, ends.dtype), ends[:-1] + 1]) if ends.size else ends
        lengths = ends - starts + 1
        longest = int(lengths.max()) if lengths.size else 0
        if longest > VARINT_BYTES_MAX:
            self.refuse(f"varints of at most {VARINT_BYTES_MAX} bytes", f"one of {longest}")
        values = np.zeros(ends.size, np.uint64)
        for step in range(longest):
            reach = lengths > step
            values[reach] |= (raw[starts[reach] + step].astype(np.uint64) & np.uint64(0x7F)) << np.uint64(
                7 * step
            )
        return values.view(np.int64)

    def fixed(self, element_bytes: int) -> bytes | memoryview:
        """Numbers of 4 or 8 bytes as bytes: a packed list, or the one number of a list that is not packed."""
        single = FIXED32 if element_bytes == 4 else FIXED64
        if self._wire_type == single:
            return (_U32 if element_bytes == 4 else _U64).pack(self._value)
        raw = self.view()
        if len(raw) % element_bytes:
            self.refuse(f"a multiple of {element_bytes} bytes", len(raw))
        return raw


def _short_integers(packed: bytes | memoryview) -> list[int] | None:
    """The varints of a short list without their signs; None if a varint does not end, or is too long."""
    values: list[int] = []
    value = shift = 0
    for byte in packed:
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            values.append(value & _U64_MAX)
            value = shift = 0
        else:
            shift += 7
            if shift == 7 * VARINT_BYTES_MAX:
                return None
    return None if shift else values


class Message:
    """A message of a file: an iteration returns its fields in order.

    Attributes:
        data: The whole file.
        name: The name of the message in errors.
        budget: The limit for the fields of the file.
    """

    __slots__ = ("_end", "_start", "budget", "data", "name")

    def __init__(self, data: bytes, start: int, end: int, name: str, budget: Budget) -> None:
        self.data = data
        self._start = start
        self._end = end
        self.name = name
        self.budget = budget

    @classmethod
    def of_file(cls, data: bytes, name: str) -> Message:
        """The message that a whole file consists of."""
        return cls(data, 0, len(data), name, Budget())

    def short(self) -> bytes | None:
        """The bytes of a short message; None for a longer one."""
        start, end = self._start, self._end
        return self.data[start:end] if end - start <= SHORT_BYTES else None

    def refuse(self, expected: str, got: object) -> NoReturn:
        """Rejects the file because of this message."""
        kind = "" if self._start else "not an ONNX file, or a damaged one: "
        raise InvalidModel(
            f"{kind}protobuf, {self.name} at byte {self._start}: expected {expected}, got {got}"
        )

    def _varint(self, position: int) -> tuple[int, int]:
        data, end = self.data, min(self._end, position + VARINT_BYTES_MAX)
        value = shift = 0
        while position < end:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & _U64_MAX, position
            shift += 7
        self.refuse("a varint that ends within the message", f"none at byte {position}")

    def __iter__(self) -> Iterator[Field]:
        position, data, end, budget = self._start, self.data, self._end, self.budget
        while position < end:
            begin = position
            budget.fields_left -= 1
            if budget.fields_left < 0:
                budget.refuse(self.name)
            # Nearly all tags and lengths have one byte.
            tag = data[position]
            position += 1
            if tag >= 0x80:
                tag, position = self._varint(begin)
            number, wire_type = tag >> 3, tag & 7
            if number == 0 or number >= 1 << 29:
                self.refuse("field numbers from 1 to 2**29 - 1", f"{number} at byte {begin}")
            value, start = 0, position
            if wire_type == VARINT:
                value = data[position] if position < end else 0x80
                if value < 0x80:
                    position += 1
                else:
                    value, position = self._varint(position)
            elif wire_type == BYTES:
                length = data[position] if position < end else 0x80
                start = position + 1
                if length >= 0x80:
                    length, start = self._varint(position)
                position = start + length
            elif wire_type == FIXED32:
                position += 4
            elif wire_type == FIXED64:
                position += 8
            else:
                self.refuse("a known wire type", f"{wire_type} at byte {begin}")
            if position > end:
                self.refuse(f"at most {end - start} bytes in field {number}", f"{position - start}")
            if wire_type == FIXED32:
                value = _U32.unpack_from(data, start)[0]
            elif wire_type == FIXED64:
                value = _U64.unpack_from(data, start)[0]
            yield Field(self, number, wire_type, value, start, position, begin)


def _encoded_varint(value: int) -> bytes:
    if 0 <= value < SHORT_VARINTS:
        return _SHORT_VARINTS[value]
    return _encoded_in_full(value)


def _encoded_in_full(value: int) -> bytes:
    value &= _U64_MAX
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


SHORT_VARINTS = 512
"""Varints below this number are looked up: the tags of all fields, whose numbers are below 64, and nearly all lengths, extents and
other numbers."""

_SHORT_VARINTS = tuple(map(_encoded_in_full, range(SHORT_VARINTS)))


class MessageWriter:
    """Builds a message: fields are appended in the order of the calls."""

    __slots__ = ("_end", "_parts", "_parts_bytes")

    def __init__(self) -> None:
        # The message is the parts, and behind them the bytes that are being appended to.
        self._parts: list[bytes | bytearray | memoryview] = []
        self._parts_bytes = 0
        self._end = bytearray()

    def integer(self, number: int, value: int) -> None:
        """An int32, int64 or enumerator."""
        self._end += _SHORT_VARINTS[number << 3 | VARINT]
        self._end += _encoded_varint(value)

    def float32(self, number: int, value: float) -> None:
        """A number of 32 bits."""
        self._end += _SHORT_VARINTS[number << 3 | FIXED32]
        self._end += struct.pack("<f", value)

    def view(self, number: int, value: bytes | bytearray | memoryview) -> None:
        """Bytes. Large ones must not change before ``encoded``, which copies them."""
        size_bytes = len(value)
        self._end += _SHORT_VARINTS[number << 3 | BYTES]
        self._end += _encoded_varint(size_bytes)
        if size_bytes < PART_BYTES_MIN:
            self._end += value
        else:
            self._close_part()
            self._parts.append(value)
            self._parts_bytes += size_bytes

    def _close_part(self) -> None:
        self._parts.append(self._end)
        self._parts_bytes += len(self._end)
        self._end = bytearray()

    def text(self, number: int, value: str) -> None:
        """A text in UTF-8."""
        encoded = value.encode()
        if len(encoded) >= SHORT_VARINTS:
            self.view(number, encoded)
            return
        self._end += _SHORT_VARINTS[number << 3 | BYTES]
        self._end += _SHORT_VARINTS[len(encoded)]
        self._end += encoded

    def message(self, number: int, value: MessageWriter) -> None:
        """A message within the message, as it is now. Its large values are not copied before ``encoded``."""
        self._end += _SHORT_VARINTS[number << 3 | BYTES]
        self._end += _encoded_varint(value._parts_bytes + len(value._end))
        if value._parts:
            self._close_part()
            self._parts += value._parts
            self._parts_bytes += value._parts_bytes
        self._end += value._end

    def integers(self, number: int, values: Sequence[int]) -> None:
        """A packed list of varints; writes no field if the list is empty."""
        if values:
            self.view(number, b"".join(map(_encoded_varint, values)))

    def floats(self, number: int, values: Sequence[float]) -> None:
        """A packed list of numbers of 32 bits; writes no field if the list is empty."""
        if values:
            self.view(number, struct.pack(f"<{len(values)}f", *values))

    def encoded(self) -> bytes:
        """The message so far."""
        return joined((*self._parts, self._end))
