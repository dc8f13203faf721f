"""The elements of an ONNX file's constants, which may be stored in other files.

Owns the encoding of elements, the check of their number, and the places of other files: the model's own folder and its subfolders.

Invariants:
1. The number of elements is compared with the number of bytes before memory is allocated.
2. The path of another file is opened component by component and no component may be a link, so that no path leaves the folder;
   only a regular file with one name is read, and only the needed bytes of it.

Source: ``TensorProto`` of ONNX and its page "External Data"; openat(2) on O_NOFOLLOW.
"""

from __future__ import annotations

import math
import os
import stat
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidModel
from aionn.models.onnx.schema import DataType, SparseTensorProto, TensorProto

__all__ = ["DTYPES", "DTYPE_NAMES", "ConstantReader", "UnsupportedType"]

Array = npt.NDArray[Any]

ELEMENTS_MAX = 1 << 31
"""An operand of the HAL has fewer than 2**32 bytes, and its INT32 values cannot index more elements."""

DENSE_BYTES_MAX = 64 << 20
"""Largest sum of the sizes of sparse constants with their zeros, so that a small file cannot exhaust the memory."""

LOCATION_MAX = 4096
"""Longest path of another file: the kernel's limit."""

READS_MAX = 4
"""Times that the bytes of another file may be read into constants, on average. Those of real models are read once, while a
small file could describe any number of large constants that overlap.
"""

DTYPES = {
    DataType.FLOAT: "<f4",
    DataType.UINT8: "u1",
    DataType.INT8: "i1",
    DataType.UINT16: "<u2",
    DataType.INT16: "<i2",
    DataType.INT32: "<i4",
    DataType.INT64: "<i8",
    DataType.BOOL: "?",
    DataType.FLOAT16: "<f2",
    DataType.DOUBLE: "<f8",
    DataType.UINT32: "<u4",
    DataType.UINT64: "<u8",
    DataType.BFLOAT16: "<u2",
}
"""numpy's type of an element in the file. The bits of BFLOAT16 are the upper half of a float32's."""

DTYPE_NAMES = {
    DataType(number): np.dtype(text).name for number, text in DTYPES.items() if number != DataType.BFLOAT16
}
"""numpy's name by element type, for the types that numpy has."""

_STORED = {int(kind): (kind, np.dtype(text)) for kind, text in DTYPES.items()}
"""The element type and numpy's, by the number in the file."""

_IN_INT32S = {
    DataType.UINT8,
    DataType.INT8,
    DataType.UINT16,
    DataType.INT16,
    DataType.INT32,
    DataType.BOOL,
    DataType.FLOAT16,
    DataType.BFLOAT16,
}


class UnsupportedType(Exception):
    """A constant has an element type that cannot be read; the text is the type's name."""


class ConstantReader:
    """Reads the constants of one file.

    Args:
        folder: The folder of the model, in which other files may be; None if the model is given as bytes, which forbids other
            files.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = folder
        self._dense_bytes_left = DENSE_BYTES_MAX
        self._read: dict[tuple[str, int, int], bytes] = {}
        self._read_bytes: Counter[tuple[int, int]] = Counter()

    def array(self, proto: TensorProto) -> Array:
        """The array of a constant; numbers of BFLOAT16 are in float32, which carries all of its values.

        Raises:
            InvalidModel: The elements do not fit type and shape, or cannot be read.
            UnsupportedType: numpy has no such element type.
        """
        where = f"onnx, constant {proto.name!r}"
        if proto.data_type not in DTYPES:
            known = proto.data_type in DataType.__members__.values() and proto.data_type != DataType.UNDEFINED
            if not known:
                raise InvalidModel(f"{where}: expected an element type, got {proto.data_type}")
            raise UnsupportedType(DataType(proto.data_type).name)
        kind, dtype = _STORED[proto.data_type]
        count = math.prod(proto.dims)
        if max(count, *proto.dims, 0) > ELEMENTS_MAX:
            raise InvalidModel(
                f"{where}: expected at most {ELEMENTS_MAX} elements and extents, got {list(proto.dims)}"
            )
        raw = self._bytes(proto, kind, where, count * dtype.itemsize)
        if kind == DataType.BOOL:
            truth: Array = (np.frombuffer(raw, np.uint8) != 0).reshape(proto.dims)
            return truth
        values = np.frombuffer(raw, dtype)
        if kind == DataType.BFLOAT16:
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if not values.dtype.isnative:  # The file is little endian.
            values = values.astype(values.dtype.newbyteorder("="))
        whole: Array = values.reshape(proto.dims)
        return whole

    def _bytes(self, proto: TensorProto, kind: DataType, where: str, size_bytes: int) -> Any:
        if proto.raw and len(proto.raw) == size_bytes and _has_raw_alone(proto):
            return proto.raw
        lists = {
            "raw_data": proto.raw is not None and (len(proto.raw) or None),
            "float_data": len(proto.floats) or None,
            "double_data": len(proto.doubles) or None,
            "int32_data": None if proto.int32s is None else proto.int32s.size or None,
            "int64_data": None if proto.int64s is None else proto.int64s.size or None,
            "uint64_data": None if proto.uint64s is None else proto.uint64s.size or None,
            "string_data": proto.string_count or None,
            "external data": None if proto.external is None else 1,
        }
        sources = [name for name, held in lists.items() if held]
        if len(sources) > 1:
            raise InvalidModel(f"{where}: expected elements in one field, got {' and '.join(sources)}")
        source = sources[0] if sources else "raw_data"
        if source == "external data":
            return self._external(proto.external or {}, where, size_bytes)
        if source == "raw_data":
            raw: Any = b"" if proto.raw is None else proto.raw
        else:
            raw = _typed(proto, kind, source, where)
        if len(raw) != size_bytes:
            raise InvalidModel(
                f"{where}: expected {size_bytes} bytes of {kind.name} {list(proto.dims)}, got {len(raw)}"
            )
        return raw

    def sparse(self, proto: SparseTensorProto) -> Array:
        """The array of a sparse constant, with its zeros.

        Raises:
            InvalidModel: Values, indices and shape do not fit each other, or it is too large.
            UnsupportedType: numpy has no such element type.
        """
        where = f"onnx, sparse constant {proto.values.name!r}"
        values, indices = self.array(proto.values), self.array(proto.indices)
        size = math.prod(proto.dims)
        if max(proto.dims, default=0) > ELEMENTS_MAX:
            raise InvalidModel(f"{where}: expected extents up to {ELEMENTS_MAX}, got {list(proto.dims)}")
        self._dense_bytes_left -= size * values.dtype.itemsize
        if self._dense_bytes_left < 0:
            raise InvalidModel(
                f"{where}: expected at most {DENSE_BYTES_MAX} bytes in all sparse constants with their zeros, got more"
            )
        if values.ndim != 1 or indices.dtype != np.int64:
            raise InvalidModel(
                f"{where}: expected a list of values and INT64 indices, got shape {values.shape} and {indices.dtype}"
            )
        if indices.shape == (values.size, len(proto.dims)) and len(proto.dims) != 1:
            extents = np.array(proto.dims, np.int64)
            if ((indices < 0) | (indices >= extents)).any():
                raise InvalidModel(
                    f"{where}: expected indices within {list(proto.dims)}, got some outside of it"
                )
            strides = np.array(
                [math.prod(proto.dims[axis + 1 :]) for axis in range(len(proto.dims))], np.int64
            )
            indices = indices @ strides
        indices = indices.reshape(-1)
        if indices.size != values.size:
            raise InvalidModel(f"{where}: expected {values.size} indices, got {indices.size}")
        if ((indices < 0) | (indices >= size)).any():
            raise InvalidModel(f"{where}: expected indices within {size} elements, got some outside of them")
        dense = np.zeros(size, values.dtype)
        dense[indices] = values
        return dense.reshape(proto.dims)

    def _external(self, entries: dict[str, str], where: str, size_bytes: int) -> bytes:
        location = entries.get("location", "")
        if self._folder is None:
            raise InvalidModel(
                f"{where}: expected elements in the model itself, since it is given as bytes, got a reference to file {location!r}"
            )
        offset = _number(entries, "offset", where, 0)
        length = _number(entries, "length", where, size_bytes)
        if length != size_bytes:
            raise InvalidModel(f"{where}: expected {size_bytes} bytes, got a length of {length}")
        place = location, offset, length
        found = self._read.get(place)
        if found is not None:
            return found
        try:
            descriptor = _open_beneath(self._folder, location)
        except (OSError, ValueError) as e:
            reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
            raise InvalidModel(
                f"{where}: expected a file beneath the model's folder, got {location!r}: {reason}"
            ) from e
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise InvalidModel(
                    f"{where}: expected a regular file with one name, got {location!r}, which has another type or several links"
                )
            if offset + length > status.st_size:
                raise InvalidModel(
                    f"{where}: expected {length} bytes at {offset} of {location!r}, which has {status.st_size}"
                )
            file_id = status.st_dev, status.st_ino
            self._read_bytes[file_id] += length
            if self._read_bytes[file_id] > READS_MAX * status.st_size:
                raise InvalidModel(
                    f"{where}: expected constants that share no bytes, got more than {READS_MAX} times the bytes of {location!r}"
                )
            with open(descriptor, "rb", closefd=False) as file:
                file.seek(offset)
                data = file.read(length)
        finally:
            os.close(descriptor)
        if len(data) != length:
            raise InvalidModel(f"{where}: {location!r} became shorter while it was read")
        self._read[place] = data
        return data


def _has_raw_alone(proto: TensorProto) -> bool:
    """Whether no field but ``raw_data`` has elements, as in nearly all constants."""
    return (
        proto.int32s is proto.int64s is proto.uint64s is None
        and proto.external is None
        and not proto.floats
        and not proto.doubles
        and not proto.string_count
    )


def _typed(proto: TensorProto, kind: DataType, source: str, where: str) -> Any:
    """The bytes of elements that are stored in a list of numbers."""
    dtype = np.dtype(DTYPES[kind])
    expected = {
        DataType.FLOAT: "float_data",
        DataType.DOUBLE: "double_data",
        DataType.INT64: "int64_data",
        DataType.UINT32: "uint64_data",
        DataType.UINT64: "uint64_data",
    }.get(kind, "int32_data" if kind in _IN_INT32S else "nothing")
    if source != expected:
        raise InvalidModel(f"{where}: expected elements of {kind.name} in {expected}, got {source}")
    if source == "float_data":
        return proto.floats
    if source == "double_data":
        return proto.doubles
    numbers = {"int32_data": proto.int32s, "int64_data": proto.int64s, "uint64_data": proto.uint64s}[source]
    assert numbers is not None, "the caller excludes empty lists"
    if kind in (DataType.INT64, DataType.UINT64):
        return numbers.tobytes()
    if kind in (DataType.FLOAT16, DataType.BFLOAT16):
        dtype = np.dtype("<u2")
    if kind == DataType.BOOL:
        return (numbers != 0).tobytes()
    narrow = numbers.astype(dtype)
    if not np.array_equal(narrow.astype(np.int64), numbers):
        raise InvalidModel(f"{where}: expected numbers of {kind.name} in {source}, got some that do not fit")
    return narrow.tobytes()


def _number(entries: dict[str, str], key: str, where: str, default: int) -> int:
    text = entries.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidModel(f"{where}: expected a number of bytes as {key}, got {text[:40]!r}")
    return int(text)


def _open_beneath(folder: str | os.PathLike[str], location: str) -> int:
    """Opens a file in a folder or its subfolders without following links.

    Raises:
        ValueError: The path may leave the folder.
        OSError: A component is missing, or is a link.
    """
    parts = location.split("/")
    if not location or "\0" in location or any(part in ("", "..") for part in parts):
        raise ValueError("a relative path without '..' and empty parts is needed")
    if len(location) > LOCATION_MAX:
        raise ValueError(f"a path of at most {LOCATION_MAX} characters is needed")
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    current = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, flags | os.O_DIRECTORY, dir_fd=current)
            os.close(current)
            current = inner
        return os.open(parts[-1], flags, dir_fd=current)
    finally:
        os.close(current)
