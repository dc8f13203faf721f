"""The element type and shape that a model's file declares, where the HAL's operands have others.

Owns the checked conversion of inputs to the operand's type, and of results back to the declared one.

Invariant: a number that the operand's type cannot hold is rejected, so that no result depends on a wrapped number.

Source: ``OnnxArgument``: INT64 values are TENSOR_INT32 and DOUBLE ones TENSOR_FLOAT32, values of rank 0 have shape [1], leading
axes beyond four are merged.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument

__all__ = ["Declared", "in_declared", "number_of", "stored_as"]

Array = npt.NDArray[Any]


class Declared(msgspec.Struct, frozen=True):
    """The element type and shape that a model's file declares for an input or output.

    Attributes:
        dtype: numpy's name of the element type.
        dimensions: Extents; ``()`` for rank 0. None for an output whose extents only the execution knows: those of the operand.
    """

    dtype: str
    dimensions: tuple[int, ...] | None

    def __str__(self) -> str:
        if self.dimensions is None:
            return self.dtype
        return f"{self.dtype} {'x'.join(map(str, self.dimensions)) or 'of rank 0'}"


def number_of(value: bool | int | float, dtype: str, where: str) -> Array:
    """An array of rank 0 with a number of Python.

    Raises:
        InvalidArgument: The type cannot hold the number.
    """
    wanted = np.dtype(dtype)
    if not _holds(wanted, value):
        # Python refuses to write numbers of more than 4,300 digits.
        bits = value.bit_length() if isinstance(value, int) else 0
        got = f"a number of {bits} bits" if bits > 256 else repr(value)
        raise InvalidArgument(f"{where}: expected a number of type {dtype}, got {got}")
    return np.array(value, wanted)


def _holds(dtype: np.dtype[Any], value: bool | int | float) -> bool:
    if dtype.kind == "b":
        return value in (0, 1)
    if dtype.kind in "iu":
        return isinstance(value, int) and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    is_finite = -math.inf < value < math.inf
    return dtype.kind != "f" or not is_finite or abs(value) <= float(np.finfo(dtype).max)


def stored_as(
    value: Array, dtype: np.dtype[Any], dimensions: tuple[int, ...], declared: Declared, where: str
) -> Array:
    """An array of the declared type and shape as one of the operand's; other arrays are returned as they are.

    Raises:
        InvalidArgument: A number does not fit the operand's type; names its index.
    """
    assert declared.dimensions is not None, "the extents of an input are known"
    if value.shape == declared.dimensions and value.shape != dimensions:
        value = value.reshape(dimensions)
    if value.dtype.name not in (declared.dtype, dtype.name):
        known = " or ".join(dict.fromkeys((declared.dtype, dtype.name)))
        raise InvalidArgument(f"{where}: expected element type {known}, got {value.dtype}")
    if value.shape != dimensions:
        raise InvalidArgument(f"{where}: expected shape {list(declared.dimensions)}, got {list(value.shape)}")
    if value.dtype == dtype:
        return value
    with np.errstate(over="ignore"):
        stored: Array = value.astype(dtype)
    is_wrong = stored != value if dtype.kind in "iu" else np.isinf(stored) & ~np.isinf(value)
    if is_wrong.any():
        index = int(np.flatnonzero(is_wrong)[0])
        place = [int(i) for i in np.unravel_index(index, declared.dimensions)]
        limits = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
        raise InvalidArgument(
            f"{where}, element {place}: expected a number from {limits.min} to {limits.max}, since the device computes with "
            f"{dtype}; got {value.reshape(-1)[index]}"
        )
    return stored


def in_declared(view: Array, declared: Declared, *, copy: bool) -> Array:
    """A result in the declared type and shape; without ``copy`` a view where the type is that of the operand."""
    shape = view.shape if declared.dimensions is None else declared.dimensions
    try:
        dtype = np.dtype(declared.dtype)
    except TypeError:
        # Types such as bfloat16 exist where a package has added them to numpy; else the result has the operand's type.
        dtype = view.dtype
    return view.reshape(shape).astype(dtype, copy=copy)
