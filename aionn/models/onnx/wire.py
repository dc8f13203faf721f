"""Reads and writes the protobuf wire format. The bytes that are read may be damaged or hostile.

Owns fields, varints and packed numbers, without a schema: callers name the fields by number.

Invariants:
1. Every length is checked against the enclosing message before it is used; an error is one ``InvalidModel`` that names the field,
   the byte, the expected and the actual value.
2. Only numbers and texts are copied: bytes are returned as views of the file.
3. Python objects are counted, so that a file of empty messages cannot take many times its size in memory.
4. No function recurses; a caller that reads nested messages bounds the depth.

Source: "Encoding" of the protocol buffers documentation.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidModel

__all__ = ["Budget", "Field", "Message", "MessageWriter"]

OBJECTS_MAX = 4_000_000
"""Messages, texts and numbers outside of packed lists that one file may hold. The largest real graphs have some 100,000."""

VARINT_BYTES_MAX = 10
"""64 bits take ten bytes of seven."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

_WIRE_TYPES = {VARINT: "a varint", FIXED64: "64 bits", BYTES: "a length and bytes", FIXED32: "32 bits"}
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


class Budget:
    """The limit for the objects that are made of one file.

    Attributes:
        objects_left: Number of Python objects that may still be made.
    """

    __slots__ = ("objects_left",)

    def __init__(self) -> None:
        self.objects_left = OBJECTS_MAX

    def charge(self, where: str) -> None:
        """Counts one object.

        Raises:
            InvalidModel: The file has too many.
        """
        self.objects_left -= 1
        if self.objects_left < 0:
            raise InvalidModel(
                f"protobuf, {where}: expected at most {OBJECTS_MAX} messages and texts, got more"
            )


class Field:
    """One field of a message: its number, its value, and the conversions that the schema asks for.

    Attributes:
        number: Its number in the schema.
        position: Its first byte in the file.
    """

    __slots__ = ("_end", "_message", "_start", "_value", "_wire_type", "number", "position")

    def __init__(
        self, message: Message, number: int, wire_type: int, value: int, start: int, end: int, position: int
    ) -> None:
        self._message = message
        self.number = number
        self.position = position
        self._wire_type = wire_type
        self._value = value
        self._start = start
        self._end = end

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
        return self._message.data[self._start : self._end]

    def text(self) -> str:
        """A text in UTF-8."""
        self._message.budget.charge(self._message.name)
        try:
            return str(self.view(), "utf-8")
        except UnicodeDecodeError as e:
            self.refuse("UTF-8", f"another encoding at byte {self._start + e.start}")

    def message(self, name: str) -> Message:
        """A message within the message."""
        self._need(BYTES)
        self._message.budget.charge(name)
        return Message(self._message.data, self._start, self._end, name, self._message.budget)

    def integers(self) -> npt.NDArray[np.int64]:
        """Varints: a packed list, or the one number of a list that is not packed."""
        if self._wire_type == VARINT:
            self._message.budget.charge(self._message.name)
            return np.array([self._value], np.uint64).view(np.int64)
        raw = np.frombuffer(self.view(), np.uint8)
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
            self._message.budget.charge(self._message.name)
            return (_U32 if element_bytes == 4 else _U64).pack(self._value)
        raw = self.view()
        if len(raw) % element_bytes:
            self.refuse(f"a multiple of {element_bytes} bytes", len(raw))
        return raw


class Message:
    """A message of a file: an iteration returns its fields in order.

    Attributes:
        data: The whole file.
        name: The name of the message in errors.
        budget: The limit for the objects of the file.
    """

    __slots__ = ("_end", "_start", "budget", "data", "name")

    def __init__(self, data: memoryview, start: int, end: int, name: str, budget: Budget) -> None:
        self.data = data
        self._start = start
        self._end = end
        self.name = name
        self.budget = budget

    @classmethod
    def of_file(cls, data: bytes, name: str) -> Message:
        """The message that a whole file consists of."""
        return cls(memoryview(data), 0, len(data), name, Budget())

    def refuse(self, expected: str, got: object) -> NoReturn:
        """Rejects the file because of this message."""
        raise InvalidModel(f"protobuf, {self.name} at byte {self._start}: expected {expected}, got {got}")

    def _varint(self, position: int) -> tuple[int, int]:
        data, end = self.data, min(self._end, position + VARINT_BYTES_MAX)
        value = shift = 0
        while position < end:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, position
            shift += 7
        self.refuse("a varint that ends within the message", f"none at byte {position}")

    def __iter__(self) -> Iterator[Field]:
        position, data = self._start, self.data
        while position < self._end:
            begin = position
            tag, position = self._varint(position)
            number, wire_type = tag >> 3, tag & 7
            if number == 0 or number >= 1 << 29:
                self.refuse("field numbers from 1 to 2**29 - 1", f"{number} at byte {begin}")
            value, start = 0, position
            if wire_type == VARINT:
                value, position = self._varint(position)
            elif wire_type == BYTES:
                length, start = self._varint(position)
                position = start + length
            elif wire_type == FIXED32:
                position += 4
            elif wire_type == FIXED64:
                position += 8
            else:
                self.refuse("a known wire type", f"{wire_type} at byte {begin}")
            if position > self._end:
                self.refuse(f"at most {self._end - start} bytes in field {number}", f"{position - start}")
            if wire_type == FIXED32:
                value = _U32.unpack_from(data, start)[0]
            elif wire_type == FIXED64:
                value = _U64.unpack_from(data, start)[0]
            yield Field(self, number, wire_type, value, start, position, begin)


class MessageWriter:
    """Builds a message: fields are appended in the order of the calls."""

    __slots__ = ("_parts", "_size_bytes")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size_bytes = 0

    @staticmethod
    def _varint(value: int) -> bytes:
        value &= 0xFFFF_FFFF_FFFF_FFFF
        encoded = bytearray()
        while value >= 0x80:
            encoded.append(value & 0x7F | 0x80)
            value >>= 7
        encoded.append(value)
        return bytes(encoded)

    def _append(self, part: bytes) -> None:
        self._parts.append(part)
        self._size_bytes += len(part)

    def _tag(self, number: int, wire_type: int) -> None:
        self._append(self._varint(number << 3 | wire_type))

    def integer(self, number: int, value: int) -> None:
        """An int32, int64 or enumerator."""
        self._tag(number, VARINT)
        self._append(self._varint(value))

    def float32(self, number: int, value: float) -> None:
        """A number of 32 bits."""
        self._tag(number, FIXED32)
        self._append(struct.pack("<f", value))

    def view(self, number: int, value: Any) -> None:
        """Bytes."""
        self._tag(number, BYTES)
        self._append(self._varint(len(value)))
        self._append(bytes(value))

    def text(self, number: int, value: str) -> None:
        """A text in UTF-8."""
        self.view(number, value.encode())

    def message(self, number: int, value: MessageWriter) -> None:
        """A message within the message, as it is now. Its bytes are not copied before ``encoded``."""
        self._tag(number, BYTES)
        self._append(self._varint(value._size_bytes))
        self._parts += value._parts
        self._size_bytes += value._size_bytes

    def integers(self, number: int, values: Sequence[int]) -> None:
        """A packed list of varints; writes no field if the list is empty."""
        if values:
            self.view(number, b"".join(map(self._varint, values)))

    def floats(self, number: int, values: Sequence[float]) -> None:
        """A packed list of numbers of 32 bits; writes no field if the list is empty."""
        if values:
            self.view(number, struct.pack(f"<{len(values)}f", *values))

    def encoded(self) -> bytes:
        """The message so far."""
        return b"".join(self._parts)
