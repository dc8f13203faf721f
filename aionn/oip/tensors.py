"""Values of tensors: the protocol's datatypes, raw bytes and typed contents as arrays, arrays as raw bytes; pure.

Invariants:
1. Nothing is converted before its number of bytes or elements agrees with a shape that the model has accepted.
2. Raw bytes are little-endian, row-major, without gaps, as the protocol has them; on a machine of the other order numpy converts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import aionn

__all__ = [
    "DATATYPES",
    "Array",
    "count_of",
    "datatype_of",
    "from_numbers",
    "from_raw",
    "raw_bytes",
]

Array = npt.NDArray[Any]

DATATYPES: Final = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
}
"""The protocol's datatypes with an element type of numpy. The others, BYTES and BF16, are types of no operand."""

_NAMES = {dtype: name for name, dtype in DATATYPES.items()}

IS_SWAPPED = sys.byteorder == "big"


def datatype_of(dtype: np.dtype[Any]) -> str:
    """The protocol's name of an element type.

    Raises:
        InvalidArgument: It has none.
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise aionn.InvalidArgument(f"the protocol has no datatype for {dtype}")
    return name


def count_of(shape: Sequence[int]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)


def from_raw(content: Any, dtype: np.dtype[Any], shape: Sequence[int], where: str) -> Array:
    """An array over raw bytes, without a copy where that is possible.

    Raises:
        InvalidArgument: The number of bytes is not that of the shape.
    """
    expected = count_of(shape) * dtype.itemsize
    if len(content) != expected:
        raise aionn.InvalidArgument(
            f"{where}: expected {expected} bytes for the shape {list(shape)} of {dtype}, got {len(content)}"
        )
    if dtype == np.bool_:
        # A byte above 1 would be a truth value that equals neither.
        truths: Array = np.frombuffer(content, np.uint8) != 0
        return truths.reshape(shape)
    array = np.frombuffer(content, dtype.newbyteorder("<") if IS_SWAPPED else dtype)
    return (array.astype(dtype) if IS_SWAPPED else array).reshape(shape)


def from_numbers(parts: Iterable[Array], dtype: np.dtype[Any], shape: Sequence[int], where: str) -> Array:
    """An array of typed contents, which have a wider type than the tensor.

    Args:
        parts: The numbers, in order.
        dtype: The element type of the tensor.
        shape: The shape of the tensor.
        where: Begins the message.

    Raises:
        InvalidArgument: The number of elements is not that of the shape, or a number exceeds the type.
    """
    found = list(parts)
    count = sum(len(part) for part in found)
    if count != count_of(shape):
        raise aionn.InvalidArgument(
            f"{where}: expected {count_of(shape)} numbers for the shape {list(shape)}, got {count}"
        )
    numbers = found[0] if len(found) == 1 else np.concatenate(found)
    if dtype.kind in "iu" and numbers.dtype != dtype:
        limits = np.iinfo(dtype)
        if int(numbers.min()) < limits.min or int(numbers.max()) > limits.max:
            raise aionn.InvalidArgument(
                f"{where}: expected numbers from {limits.min} to {limits.max}, got "
                f"{int(numbers.min())} to {int(numbers.max())}"
            )
    with np.errstate(
        over="ignore"
    ):  # A float that exceeds the type becomes an infinity, as in a message of that type.
        return numbers.astype(dtype, copy=False).reshape(shape)


def raw_bytes(array: Array) -> memoryview:
    """The raw bytes of an array, without a copy where they are in order."""
    plain = np.ascontiguousarray(array)
    if IS_SWAPPED:
        plain = plain.byteswap()
    return plain.reshape(-1).view(np.uint8).data
