"""Recorded items as bytes: the form of the file, and what a reader accepts.

Owns the form and its bounds. Refuses to own the writing (`recorder.py`) and the times of a replay (`replay.py`).

A file is a head, ``magic, version, kind``, and items one after the other. An item is a head, ``length of the description,
length of the values, their CRC-32, the CRC-32 of these three``, a description in msgpack, and the values as they are in
memory. Numbers are little-endian. There is no index and no end mark, so that every beginning of a file that ends with an item
is a whole recording.

Invariants:
1. ``ItemReader`` returns nothing whose check sums are wrong, and allocates no more than `VALUES_BYTES_MAX` for an item, nor more
   than the file has.
2. An item at the end that is not whole ends the reading and is noted; anything else that is wrong raises.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from io import BufferedReader
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np

from aionn.errors import InvalidArgument, class_text
from aionn.media.records import AudioWindow, Frame

__all__ = ["Item", "ItemReader", "Kind", "encoded_head", "encoded_item", "kind_of"]

Item = Frame | AudioWindow

Kind = Literal["frames", "windows"]
"""The items of a recording; a file holds one kind."""

MAGIC: Final = b"AIONNREC"
VERSION: Final = 1
KINDS: Final[dict[int, Kind]] = {1: "frames", 2: "windows"}

FILE_HEAD: Final = struct.Struct("<8sHH")
ITEM_HEAD: Final = struct.Struct("<IIII")

DESCRIPTION_BYTES_MAX: Final = 1024
"""Ten numbers and a word take less than a hundred bytes."""

VALUES_BYTES_MAX: Final = 128 << 20
"""Bytes of one item: a picture of 7680 x 4320 pixels (8K) has 100 MB, a minute of sound at 192 kHz has 46 MB."""

NUMBER_MAX: Final = 2**63 - 1
_Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]


class Description(msgspec.Struct, frozen=True, array_like=True):
    """An item without its values. The names are those of `Frame`; ``position_s`` is ``time_s`` or ``start_s``."""

    captured_at_ns: _Number
    index: _Number
    position_s: float
    clock: Annotated[str, msgspec.Meta(max_length=32)]
    uncertainty_ns: _Number
    lost_before: _Number
    follows_gap: bool
    shape: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)], ...], msgspec.Meta(max_length=3)
    ]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Description)


def kind_of(item: object) -> Kind:
    """The kind of an item.

    Raises:
        InvalidArgument: It is neither a `Frame` nor an `AudioWindow`, or its array has another form than theirs.
    """
    if isinstance(item, Frame):
        data = item.data
        if (
            isinstance(data, np.ndarray)
            and data.dtype == np.uint8
            and data.ndim == 3
            and data.shape[2] == 3
            and 0 < data.nbytes <= VALUES_BYTES_MAX
        ):
            return "frames"
        form = _form(data)
        expected = f"uint8 [height, width, 3] of at most {VALUES_BYTES_MAX} bytes"
    elif isinstance(item, AudioWindow):
        samples = item.samples
        if (
            isinstance(samples, np.ndarray)
            and samples.dtype == np.float32
            and samples.ndim == 1
            and 0 < samples.nbytes <= VALUES_BYTES_MAX
        ):
            return "windows"
        form = _form(samples)
        expected = f"float32 [samples] of at most {VALUES_BYTES_MAX} bytes"
    else:
        form, expected = class_text(item), "a Frame or an AudioWindow"
    raise InvalidArgument(f"aionn.media.record: expected {expected}, got {form}")


def _form(values: Any) -> str:
    return f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else class_text(values)


def encoded_head(kind: Kind) -> bytes:
    """The beginning of a file."""
    return FILE_HEAD.pack(MAGIC, VERSION, next(number for number, name in KINDS.items() if name == kind))


def encoded_item(item: Item) -> list[Any]:
    """The parts of an item, in the order in which they are written: head, description, values.

    Raises:
        InvalidArgument: Its description is one that a reader rejects, which would end every replay here.
    """
    if isinstance(item, Frame):
        array, position_s = np.ascontiguousarray(item.data), item.time_s
    else:
        array, position_s = np.ascontiguousarray(item.samples, "<f4"), item.start_s
    found = Description(
        item.captured_at_ns,
        item.index,
        position_s,
        item.clock,
        item.uncertainty_ns,
        item.lost_before,
        item.follows_gap,
        array.shape,
    )
    try:
        description = _encoder.encode(found)
        is_finite = math.isfinite(_decoder.decode(description).position_s)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as e:
        raise InvalidArgument(f"aionn.media.record: expected an item that can be replayed, got {e}") from e
    if not is_finite:
        raise InvalidArgument(
            f"aionn.media.record: expected an item that can be replayed, got position {position_s} s"
        )
    values = array.data.cast("B")
    head = ITEM_HEAD.pack(len(description), len(values), zlib.crc32(values, zlib.crc32(description)), 0)[:12]
    return [head + struct.pack("<I", zlib.crc32(head)), description, values]


class ItemReader:
    """Reads the items of a file.

    Args:
        file: At its beginning; it stays the caller's to close.
        name: Names the file in messages.

    Attributes:
        kind: The items.
        count: Number of items that were read.
        is_cut: Whether the file ends in the middle of an item.

    Raises:
        InvalidArgument: It is not a recording, or of another version.
    """

    def __init__(self, file: BufferedReader, name: str) -> None:
        self._file = file
        self._name = name
        self.count = 0
        self.is_cut = False
        head = self._read(FILE_HEAD.size)
        if len(head) < FILE_HEAD.size or not head.startswith(MAGIC):
            found = "an empty file" if not head else "another kind of file"
            raise InvalidArgument(f"{name}: expected a recording, got {found}")
        _, version, number = FILE_HEAD.unpack(head)
        if version != VERSION or number not in KINDS:
            raise InvalidArgument(
                f"{name}: expected a recording of version {VERSION}, got version {version} and kind {number}"
            )
        self.kind: Kind = KINDS[number]

    def read(self) -> Item | None:
        """The next item; None at the end. Its array is its own, and may be written.

        Raises:
            InvalidArgument: The file is damaged here.
        """
        head = self._read(ITEM_HEAD.size)
        if len(head) < ITEM_HEAD.size:
            self.is_cut = len(head) > 0
            return None
        description_bytes, values_bytes, check_sum, head_check_sum = ITEM_HEAD.unpack(head)
        if zlib.crc32(head[:12]) != head_check_sum:
            raise self._damaged("its head is not whole")
        if description_bytes > DESCRIPTION_BYTES_MAX or not 0 < values_bytes <= VALUES_BYTES_MAX:
            raise self._damaged(f"it has {description_bytes} and {values_bytes} bytes")
        if self._left() < description_bytes + values_bytes:
            self.is_cut = True
            return None
        encoded = self._read(description_bytes)
        values = np.empty(values_bytes, np.uint8)
        if self._fill(values) < values_bytes or len(encoded) < description_bytes:
            self.is_cut = True  # The file became shorter while it was read.
            return None
        if zlib.crc32(values.data, zlib.crc32(encoded)) != check_sum:
            raise self._damaged("its check sum is wrong")
        item = self._item(encoded, values)
        self.count += 1
        return item

    def _item(self, encoded: bytes, values: Any) -> Item:
        """The item of a description and its values, which agree, or `InvalidArgument`."""
        try:
            found = _decoder.decode(encoded)
        except msgspec.DecodeError as e:
            raise self._damaged(str(e)) from e
        rest = (found.clock, found.uncertainty_ns, found.lost_before, found.follows_gap)
        is_finite = math.isfinite(found.position_s)
        if self.kind == "frames":
            if not is_finite or found.shape[2:] != (3,) or math.prod(found.shape) != values.size:
                raise self._damaged(f"{values.size} bytes are not a picture of shape {list(found.shape)}")
            picture = values.reshape(found.shape)
            return Frame(picture, found.captured_at_ns, found.index, found.position_s, *rest)
        if not is_finite or len(found.shape) != 1 or found.shape[0] * 4 != values.size:
            raise self._damaged(f"{values.size} bytes are not samples of shape {list(found.shape)}")
        samples = values.view("<f4").astype(np.float32, copy=False)
        return AudioWindow(samples, found.captured_at_ns, found.index, found.position_s, *rest)

    def _damaged(self, problem: str) -> InvalidArgument:
        return InvalidArgument(f"{self._name}: expected item {self.count} to be whole, got damage: {problem}")

    def _left(self) -> int:
        """Bytes after the place of the reader; a file that is still written has more later."""
        return os.fstat(self._file.fileno()).st_size - self._file.tell()

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except OSError as e:
            raise InvalidArgument(f"{self._name}: cannot be read: {e.strerror}") from e

    def _fill(self, values: Any) -> int:
        try:
            return self._file.readinto(values.data)
        except OSError as e:
            raise InvalidArgument(f"{self._name}: cannot be read: {e.strerror}") from e
