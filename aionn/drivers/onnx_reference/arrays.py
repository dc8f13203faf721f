"""Arrays of the kernels: their axes, their numbers, and the limit of a result's size.

Owns the checks of numbers that come from an execution's inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument

__all__ = ["Array", "axis_of", "check_room", "numbers", "single", "wide"]

Array = npt.NDArray[Any]

RESULT_BYTES_MAX = 2**32 - 1
"""Most bytes of one result: sizes are unsigned 32-bit numbers on the HAL's wire."""


def check_room(shape: Sequence[int], itemsize: int = 8) -> tuple[int, ...]:
    """The shape of a result, checked before memory is allocated.

    Raises:
        InvalidArgument: An extent is negative, or the result is too large.
    """
    if any(extent < 0 for extent in shape) or math.prod(shape) * itemsize > RESULT_BYTES_MAX:
        raise InvalidArgument(
            f"result: expected a shape of at most {RESULT_BYTES_MAX} bytes, got {list(shape)}"
        )
    return tuple(int(extent) for extent in shape)


def axis_of(axis: int, rank: int) -> int:
    """The axis from 0 to ``rank`` - 1 for a number that may count from the end.

    Raises:
        InvalidArgument: There is no such axis.
    """
    axis = int(axis)
    if not -rank <= axis < rank:
        raise InvalidArgument(f"axis: expected {-rank} to {rank - 1}, got {axis}")
    return axis % rank


def numbers(array: Array) -> list[int]:
    """The whole numbers of an array, in row-major order."""
    if array.dtype.kind not in "iu":
        raise InvalidArgument(f"expected whole numbers, got {array.dtype}")
    return [int(number) for number in array.reshape(-1)]


def single(array: Array, what: str) -> Any:
    """The number of an array with one element.

    Raises:
        InvalidArgument: It has another number of elements.
    """
    if array.size != 1:
        raise InvalidArgument(f"{what}: expected one number, got {array.size} numbers")
    return array.reshape(-1)[0]


def wide(array: Array) -> Array:
    """Floats in at least 32 bits, in which sums and functions are computed."""
    return array.astype(np.float32) if array.dtype == np.float16 else array
