"""Values at the edges of their types, for the sets of random graphs that are judged by them.

Owns which values these are, and which operations get them. Half of a tensor's elements keep the usual values, so that an edge is
beside usual ones.

Invariants:
1. Integers are drawn from the whole range only where the operation is exact for them. A bias stays small: no accumulator overflows.
2. Infinities, NaN, -0.0 and numbers near the largest one are drawn only for operations whose contract gives the result for them.
   The effect of a NaN on an extremum over many elements is open, so these get no NaN. Sums and products of many elements get none
   of these numbers.
3. Numbers below the least normal one are not drawn: engines may count them as 0.

Source: the operations' contracts in ``aionn.ops``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.conformance.random_graphs.plain_elementwise import DEFINITIONS as ELEMENTWISE
from aionn.conformance.random_graphs.plain_layout import DEFINITIONS as LAYOUT
from aionn.hal import OperationType

__all__ = ["edges_of_floats", "edges_of_integers"]

Array = npt.NDArray[Any]

O = OperationType  # noqa: E741 - the tables below have it everywhere

_EXTREMA = frozenset((O.REDUCE_MAX, O.REDUCE_MIN, O.ARGMAX, O.ARGMIN))
_SUMS = frozenset((O.REDUCE_SUM, O.REDUCE_PROD, O.MEAN))
_DEFINED = frozenset((*ELEMENTWISE, *LAYOUT)) - _SUMS
"""The operations whose results for infinities and large numbers are given; without ``_EXTREMA``, for NaN too."""

_USUAL = (0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 2.5, -2.5)
"""Numbers that every operation takes: zeros, halves and whole numbers, which decide how a result is rounded."""

_FAR = (3.0, 6.0, 88.0, -88.0, 127.5, -128.5, 255.5, 1e4, -1e4, np.inf, -np.inf)
"""The ends of activations, of 8 bits, and of EXP; the infinities."""


def edges_of_floats(operation: OperationType, dtype: np.dtype[Any]) -> Array:
    """The edges of a float type for the inputs of an operation."""
    values = [*_USUAL]
    if operation in _DEFINED:
        info = np.finfo(dtype)
        # The first number beyond which there are no odd ones, which truncation and FLOOR leave as it is.
        whole = 2.0 ** (info.nmant + 1)
        values += [*_FAR, float(info.max), float(info.min), float(info.tiny), whole, -whole]
        if operation not in _EXTREMA:
            values.append(np.nan)
    return np.array(values, dtype)


def edges_of_integers(dtype: np.dtype[Any], zero_point: int) -> Array:
    """The edges of an integer type: its ends, and the zero point."""
    info = np.iinfo(dtype.name)
    ends = (info.min, info.min + 1, zero_point, info.max - 1, info.max)
    # Float32 has no number 2**24 + 1, and the square of 46341 does not fit 32 bits.
    odd = (-1, 1, (1 << 24) + 1, -46341) if info.bits == 32 and info.min < 0 else ()
    return np.array((*ends, *odd), np.int64)
