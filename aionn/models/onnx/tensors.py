"""Values of an ONNX graph during its conversion to a model of the HAL.

Owns the description of a value: its ONNX type and shape, its array if it is a constant, the bounds of whole numbers, and its
forms. A form is a HAL value that holds the elements with the axes in a certain order.

Invariants:
1. ``shape`` and ``array`` have ONNX's order of axes; only forms have other orders.
2. A form's value has the shape that ``stored_shape`` returns; its elements are in row-major order of the ordered axes.
3. Whole numbers of 64 bits are held in 32 bits, and only if ``limits`` prove that they fit.

Source: "Operand" of the NN HAL; the element types of ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aionn.hal import FusedActivation, OperandType
from aionn.models.builder import Value
from aionn.models.onnx.extension import DTYPES, ElementType
from aionn.models.onnx.extension.narrow import CARRIERS

__all__ = [
    "ELEMENT_TYPES",
    "INT32",
    "OPERAND_TYPES",
    "RANK_MAX",
    "Array",
    "EXTENSION_STORED",
    "Inexpressible",
    "OpenTensor",
    "Order",
    "Shape",
    "Tensor",
    "distinct",
    "fits_int32",
    "is_finite_in",
    "ordered",
    "stored_shape",
]

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Order = tuple[int, ...]

ELEMENT_TYPES = {dtype.name: kind for kind, dtype in reversed(DTYPES.items()) if kind != ElementType.BFLOAT16}
"""The extension's operand type by numpy's name of the element type."""

RANK_MAX = 4
"""Most axes that the HAL's operations take."""

INT32 = (-(2**31), 2**31 - 1)
"""The least and the largest number of TENSOR_INT32."""

OPERAND_TYPES = {
    "float32": OperandType.TENSOR_FLOAT32,
    "float16": OperandType.TENSOR_FLOAT16,
    "float64": OperandType.TENSOR_FLOAT32,
    "bfloat16": OperandType.TENSOR_FLOAT32,
    "int32": OperandType.TENSOR_INT32,
    "int64": OperandType.TENSOR_INT32,
    "bool": OperandType.TENSOR_BOOL8,
    "uint8": OperandType.TENSOR_QUANT8_ASYMM,
    "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
}
"""The HAL's type by the name of ONNX's. Unquantised numbers of 8 bits have scale 1 and zero point 0."""

EXTENSION_STORED = {
    **OPERAND_TYPES,
    **dict.fromkeys(("uint16", "int16", "uint32", "uint64"), OperandType.TENSOR_INT32),
    **{
        name: OperandType.TENSOR_FLOAT32 if carrier == "float32" else OperandType.TENSOR_INT32
        for name, carrier in CARRIERS.items()
    },
}
"""The HAL's type by the name of ONNX's, for the values of extension operations that are not constant."""


class OpenTensor(NamedTuple):
    """A value whose extents only the execution knows. Only extension operations can read it.

    Attributes:
        dtype: numpy's name of ONNX's element type.
        shape: Extents, -1 where unknown; None means an unknown rank.
        value: The HAL value.
    """

    dtype: str
    shape: Shape | None
    value: Value


class Inexpressible(Exception):
    """The HAL's operations cannot express an operator; the text gives the reason without the operator's name."""


def stored_shape(shape: Sequence[int]) -> Shape:
    """The shape of a HAL value: [1] for rank 0, and the leading axes merged where there are more than ``RANK_MAX``."""
    if not shape:
        return (1,)
    if len(shape) <= RANK_MAX:
        return tuple(shape)
    cut = len(shape) - RANK_MAX + 1
    return (math.prod(shape[:cut]), *shape[cut:])


def ordered(shape: Sequence[int], order: Order) -> Shape:
    """A shape with its axes in an order: axis ``i`` of the result is axis ``order[i]``."""
    return tuple(shape[axis] for axis in order)


def distinct(array: Array) -> Array:
    """The elements of a constant, without those that a view repeats: some bytes of a file may describe gigabytes of them."""
    return array[tuple(slice(1) if stride == 0 else slice(None) for stride in array.strides)]


class Tensor:
    """A value.

    Attributes:
        dtype: ONNX's element type by numpy's name.
        shape: ONNX's shape.
        array: The value of a constant, of that shape and of the type ``numpy_type``; None if the value is known only during an
            execution. It is never changed.
        order: The order of the axes in the first form: axis ``i`` of the form is axis ``order[i]``.
        forms: HAL values by the order of their axes.
        rescaled: Writes the operator of this value again, with a factor and an offset for each channel and an activation; None if
            the operator has no constants that could contain them. The first value is then not part of the model, unless it is read
            elsewhere.
    """

    __slots__ = ("_limits", "array", "dtype", "forms", "order", "rescaled", "shape")

    def __init__(
        self,
        dtype: str,
        shape: Shape,
        *,
        array: Array | None = None,
        order: Order | None = None,
        limits: tuple[int, int] | None = None,
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.array = array
        self.order: Order = tuple(range(len(shape))) if order is None else order
        self.forms: dict[Order, Value] = {}
        self.rescaled: Callable[[Array, Array, FusedActivation], Tensor] | None = None
        self._limits = limits

    def __repr__(self) -> str:
        constant = "" if self.array is None else " constant"
        return f"<Tensor {self.dtype} {list(self.shape)} {list(self.order)}{constant}>"

    @property
    def limits(self) -> tuple[int, int]:
        """Least and largest possible number, for whole numbers. Those of a constant are looked for when they are first asked for:
        a file may have thousands of forms of a large one."""
        if self._limits is None:
            self._limits = INT32
            if self.array is not None and self.array.dtype.kind in "iu":
                least = distinct(self.array)
                self._limits = (int(least.min()), int(least.max())) if self.array.size else (0, 0)
        return self._limits

    @limits.setter
    def limits(self, limits: tuple[int, int]) -> None:
        self._limits = limits

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype in ("float32", "float16", "float64")

    @property
    def is_plain(self) -> bool:
        """Whether the axes of the first form are in ONNX's order."""
        return self.order == tuple(range(len(self.shape)))

    @property
    def numpy_type(self) -> np.dtype[Any]:
        """numpy's type of the elements, or of numbers that carry them where numpy lacks the type."""
        return np.dtype(CARRIERS.get(self.dtype, self.dtype))


def is_finite_in(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether all finite numbers are finite in a narrower float type."""
    with np.errstate(over="ignore"):
        return bool((np.isfinite(array.astype(dtype)) == np.isfinite(array)).all())


def fits_int32(array: Array) -> bool:
    """Whether all whole numbers are in the range of int32."""
    return array.size == 0 or (int(array.min()) >= INT32[0] and int(array.max()) <= INT32[1])
