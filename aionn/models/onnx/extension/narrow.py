"""Element types that numpy lacks: BFLOAT16, floats of 8 and 4 bits, whole numbers of 4 and 2 bits.

Owns their names, which are those of the package ``ml_dtypes``, the wider types that carry their values exactly, and the rounding to
them.

Source: "Float stored in 8 bits" and the operator Cast of ONNX.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aionn.models.onnx.constants import DTYPE_NAMES
from aionn.models.onnx.schema import DataType

__all__ = ["CARRIERS", "KINDS", "NAMES", "NARROW", "ROUNDING_BYTES", "Narrow", "carrier_of", "rounded"]

ROUNDING_BYTES = 48
"""Memory for each element that is rounded to a type that numpy lacks: float64 numbers, their exponents and quanta."""

Array = npt.NDArray[Any]


class Narrow(NamedTuple):
    """A type.

    Attributes:
        name: numpy's name of it where ``ml_dtypes`` is imported.
        carrier: numpy's name of the type that carries its values.
        digits: Bits of the mantissa of a float; all bits of a whole number.
        least_exponent: The exponent of the least normal float; 0 for whole numbers.
        largest: The largest finite number.
        has_infinity: Whether numbers beyond the largest one become an infinity; otherwise they become NaN.
    """

    name: str
    carrier: str
    digits: int
    least_exponent: int
    largest: float
    has_infinity: bool = False


NARROW = {
    DataType.BFLOAT16: Narrow("bfloat16", "float32", 7, -126, 3.3895313892515355e38, True),
    DataType.FLOAT8E4M3FN: Narrow("float8_e4m3fn", "float32", 3, -6, 448.0),
    DataType.FLOAT8E4M3FNUZ: Narrow("float8_e4m3fnuz", "float32", 3, -7, 240.0),
    DataType.FLOAT8E5M2: Narrow("float8_e5m2", "float32", 2, -14, 57344.0, True),
    DataType.FLOAT8E5M2FNUZ: Narrow("float8_e5m2fnuz", "float32", 2, -15, 57344.0),
    DataType.FLOAT4E2M1: Narrow("float4_e2m1fn", "float32", 1, 0, 6.0),
    DataType.UINT4: Narrow("uint4", "uint8", 4, 0, 15),
    DataType.INT4: Narrow("int4", "int8", 4, 0, 7),
    DataType.UINT2: Narrow("uint2", "uint8", 2, 0, 3),
    DataType.INT2: Narrow("int2", "int8", 2, 0, 1),
}
"""The types by ONNX's number."""

NAMES: dict[DataType, str] = DTYPE_NAMES | {kind: narrow.name for kind, narrow in NARROW.items()}
"""The name of each type that the extension has values of."""

CARRIERS = {narrow.name: narrow.carrier for narrow in NARROW.values()}
"""The type that carries the values, by name."""

KINDS = {narrow.name: kind for kind, narrow in NARROW.items()}
"""ONNX's number of each type in ``NARROW``, by name."""


def carrier_of(data_type: int) -> np.dtype[Any]:
    """numpy's type in which values of an element type are computed.

    Raises:
        KeyError: The extension has no values of the type.
    """
    name = NAMES[DataType(data_type)]
    return np.dtype(CARRIERS.get(name, name))


def rounded(array: Array, data_type: int, *, saturates: bool = False) -> Array:
    """Numbers rounded to a type, half to even, in its carrier; whole numbers of the type are cut to its bits.

    Args:
        array: Numbers of any type.
        data_type: ONNX's number of a type in ``NARROW``.
        saturates: Whether numbers beyond the largest one become that, instead of an infinity or NaN.
    """
    narrow = NARROW[DataType(data_type)]
    carrier = np.dtype(narrow.carrier)
    if carrier.kind != "f":
        bits = array.astype(np.int64) & ((1 << narrow.digits) - 1)
        if carrier.kind == "i":
            bits = np.where(bits > narrow.largest, bits - (1 << narrow.digits), bits)
        return bits.astype(carrier)
    values = array.astype(np.float64)
    _, exponents = np.frexp(values)
    quantum = np.exp2(np.maximum(exponents - 1, narrow.least_exponent).astype(np.float64) - narrow.digits)
    result = np.where(np.isfinite(values), np.rint(values / quantum) * quantum, values)
    is_beyond = np.abs(result) > narrow.largest
    if saturates or data_type == DataType.FLOAT4E2M1:
        beyond = np.copysign(narrow.largest, result)
    else:
        beyond = np.copysign(np.inf, result) if narrow.has_infinity else np.full_like(result, np.nan)
    return np.where(is_beyond, beyond, result).astype(carrier)
