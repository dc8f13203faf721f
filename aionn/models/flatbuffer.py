"""Reads untrusted flatbuffers.

Owns the binary form alone: tables, vtables, vectors and strings. Knows no schema: callers name the fields by number.

Invariants:
1. Every offset, length and string is checked against the file before it is used; any fault is one ``InvalidModel`` with the item,
   the byte, the expected and the actual value.
2. Reading costs no more than a small multiple of the file's size: what is handed out is charged to a budget, so that a file whose
   vectors share bytes cannot stand for more than it holds.
3. Nothing is written, nothing recurses, and the bytes do not change while they are read (the caller gives a private snapshot).

Source: the flatbuffers binary format ("FlatBuffer Internals" of its documentation).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NoReturn

from aionn.errors import InvalidModel

__all__ = ["FlatBuffer", "Table"]

_BUDGET_FACTOR = 2
"""Number of times that the bytes of a file may be handed out. Once is enough but for strings, which some writers share."""

_BUDGET_EXTRA_BYTES = 1 << 16

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")

_SCALARS = {
    "bool": struct.Struct("<?"),
    "int8": struct.Struct("<b"),
    "uint8": struct.Struct("<B"),
    "int32": struct.Struct("<i"),
    "uint32": struct.Struct("<I"),
    "int64": struct.Struct("<q"),
    "uint64": struct.Struct("<Q"),
    "float32": struct.Struct("<f"),
}


class FlatBuffer:
    """A file in memory.

    Attributes:
        data: All of its bytes.
    """

    __slots__ = ("_budget_bytes", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._budget_bytes = _BUDGET_FACTOR * len(data) + _BUDGET_EXTRA_BYTES

    def root(self, identifier: bytes, name: str, kind: str) -> Table:
        """The root table.

        Args:
            identifier: The four bytes that the file must carry at byte 4.
            name: The name of the table in messages.
            kind: The name of such a file in messages.

        Raises:
            InvalidModel: The file is too short, of another kind, or its root is outside of it.
        """
        if len(self.data) < 8:
            raise InvalidModel(f"not a {kind} file (expected at least 8 bytes, got {len(self.data)})")
        found = self.data[4:8]
        if found != identifier:
            text = found.decode("latin-1")
            got = text if text.isascii() and text.isprintable() else f"0x{found.hex()}"
            raise InvalidModel(
                f"not a {kind} file (expected the file identifier {identifier.decode()}, got {got})"
            )
        return Table(self, self.uint32(0, name), name)

    def refuse(self, where: str, position: int, expected: str, got: object) -> NoReturn:
        """Refuses the file."""
        raise InvalidModel(f"flatbuffer, {where} at byte {position}: expected {expected}, got {got}")

    def check(self, where: str, position: int, length: int) -> None:
        """Checks that a range is inside the file."""
        if position < 0 or position + length > len(self.data):
            raise InvalidModel(
                f"the file is cut short or damaged (expected {length} bytes of {where} at byte {position}, "
                f"the file has {len(self.data)} bytes)"
            )

    def charge(self, where: str, position: int, length: int) -> None:
        """Takes the bytes of something that is handed out from the budget."""
        self._budget_bytes -= length
        if self._budget_bytes < 0:
            self.refuse(
                where,
                position,
                "parts that do not share their bytes",
                "a file that unfolds to many times its size",
            )

    def uint32(self, position: int, where: str) -> int:
        """An unsigned 32-bit number at a place."""
        self.check(where, position, 4)
        value: int = _U32.unpack_from(self.data, position)[0]
        return value


class Table:
    """A table of the file: fields by number, each of them may be absent.

    Attributes:
        position: Its first byte.
        name: Its name in messages.
    """

    __slots__ = ("_buffer", "_inline_bytes", "_vtable", "_vtable_bytes", "name", "position")

    def __init__(self, buffer: FlatBuffer, position: int, name: str) -> None:
        self._buffer = buffer
        self.position = position
        self.name = name
        buffer.check(name, position, 4)
        self._vtable = position - _I32.unpack_from(buffer.data, position)[0]
        buffer.check(f"{name}: vtable", self._vtable, 4)
        self._vtable_bytes, self._inline_bytes = struct.unpack_from("<HH", buffer.data, self._vtable)
        if self._vtable_bytes < 4 or self._vtable_bytes % 2:
            buffer.refuse(f"{name}: vtable", self._vtable, "an even size of at least 4", self._vtable_bytes)
        buffer.check(f"{name}: vtable", self._vtable, self._vtable_bytes)
        if self._inline_bytes < 4:
            buffer.refuse(f"{name}: table", position, "a size of at least 4", self._inline_bytes)
        buffer.check(name, position, self._inline_bytes)
        buffer.charge(name, position, self._inline_bytes)

    def _field(self, field: int, length: int, what: str) -> int:
        """Position of a field's inline bytes, 0 where the field is absent."""
        entry = 4 + 2 * field
        if entry + 2 > self._vtable_bytes:
            return 0
        offset: int = _U16.unpack_from(self._buffer.data, self._vtable + entry)[0]
        if offset == 0:
            return 0
        if offset < 4 or offset + length > self._inline_bytes:
            self._buffer.refuse(
                f"{self.name}.{what}",
                self._vtable + entry,
                f"{length} bytes inside of the table's {self._inline_bytes}",
                f"offset {offset}",
            )
        return self.position + offset

    def has(self, field: int) -> bool:
        """Whether the field is there."""
        return self._field(field, 0, f"field {field}") != 0

    def scalar(self, field: int, kind: str, default: float, what: str) -> float:
        """A number of one of the kinds of this module; ``default`` where it is absent."""
        form = _SCALARS[kind]
        position = self._field(field, form.size, what)
        if position == 0:
            return default
        value: float = form.unpack_from(self._buffer.data, position)[0]
        return value

    def integer(self, field: int, kind: str, default: int, what: str) -> int:
        """As ``scalar``, for whole numbers."""
        return int(self.scalar(field, kind, default, what))

    def _target(self, field: int, what: str) -> int:
        position = self._field(field, 4, what)
        if position == 0:
            return 0
        target: int = position + _U32.unpack_from(self._buffer.data, position)[0]
        self._buffer.check(f"{self.name}.{what}", target, 4)
        return target

    def table(self, field: int, what: str) -> Table | None:
        """The table that a field refers to; None where the field is absent."""
        target = self._target(field, what)
        return Table(self._buffer, target, f"{self.name}.{what}") if target else None

    def _vector(self, field: int, element_bytes: int, what: str) -> tuple[int, int]:
        """First byte and number of elements; (0, 0) where the field is absent."""
        target = self._target(field, what)
        if target == 0:
            return 0, 0
        count: int = _U32.unpack_from(self._buffer.data, target)[0]
        where = f"{self.name}.{what}"
        self._buffer.check(f"{where}: {count} elements", target + 4, count * element_bytes)
        self._buffer.charge(where, target, 4 + count * element_bytes)
        return target + 4, count

    def text(self, field: int, what: str) -> str:
        """A string, empty where it is absent; bytes that are not UTF-8 appear as escapes."""
        start, count = self._vector(field, 1, what)
        return self._buffer.data[start : start + count].decode("utf-8", errors="backslashreplace")

    def int32s(self, field: int, what: str) -> tuple[int, ...]:
        """A vector of 32-bit integers, empty where it is absent."""
        start, count = self._vector(field, 4, what)
        return struct.unpack_from(f"<{count}i", self._buffer.data, start)

    def int64s(self, field: int, what: str) -> tuple[int, ...]:
        """A vector of 64-bit integers, empty where it is absent."""
        start, count = self._vector(field, 8, what)
        return struct.unpack_from(f"<{count}q", self._buffer.data, start)

    def float32s(self, field: int, what: str) -> tuple[float, ...]:
        """A vector of floats, empty where it is absent."""
        start, count = self._vector(field, 4, what)
        return struct.unpack_from(f"<{count}f", self._buffer.data, start)

    def byte_range(self, field: int, what: str) -> tuple[int, int]:
        """The place of a vector of bytes: first byte and length; (0, 0) where it is absent. Costs no budget: nothing is read."""
        target = self._target(field, what)
        if target == 0:
            return 0, 0
        count: int = _U32.unpack_from(self._buffer.data, target)[0]
        self._buffer.check(f"{self.name}.{what}: {count} bytes", target + 4, count)
        return target + 4, count

    def tables(self, field: int, what: str) -> Iterator[Table]:
        """The tables of a vector, none where it is absent."""
        start, count = self._vector(field, 4, what)
        for index in range(count):
            position = start + 4 * index
            where = f"{self.name}.{what}[{index}]"
            yield Table(self._buffer, position + self._buffer.uint32(position, where), where)

    def refuse(self, what: str, expected: str, got: object) -> NoReturn:
        """Refuses the file for a field of this table."""
        self._buffer.refuse(f"{self.name}.{what}", self.position, expected, got)
