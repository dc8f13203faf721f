"""Values of an ONNX graph on their way into a model of the HAL.

Owns what is known of a value: its ONNX type and shape, its number where it is a constant, the bounds of whole numbers, and the HAL
values that hold its elements, each in some order of the axes.

Invariants:
1. ``shape`` and ``array`` are ONNX's; the order of the axes in memory is a form's matter alone.
2. A form's value has the shape ``stored_shape`` gives; its elements stand in row-major order of the ordered axes.
3. Whole numbers of 64 bits are held in 32 bits, and only where ``limits`` prove that they fit.

Source: "Operand" of the NN HAL; the element types of ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.hal import FusedActivation, OperandType
from aionn.models.builder import Value

__all__ = [
    "INT32",
    "OPERAND_TYPES",
    "RANK_MAX",
    "Array",
    "Inexpressible",
    "Order",
    "Shape",
    "Tensor",
    "ordered",
    "stored_shape",
]

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Order = tuple[int, ...]

RANK_MAX = 4
"""Most axes that the HAL's operations take."""

INT32 = (-(2**31), 2**31 - 1)
"""The least and the largest number of TENSOR_INT32."""

OPERAND_TYPES = {
    "float32": OperandType.TENSOR_FLOAT32,
    "float16": OperandType.TENSOR_FLOAT16,
    "int32": OperandType.TENSOR_INT32,
    "int64": OperandType.TENSOR_INT32,
    "bool": OperandType.TENSOR_BOOL8,
    "uint8": OperandType.TENSOR_QUANT8_ASYMM,
    "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
}
"""The HAL's type by the name of ONNX's. Plain numbers of 8 bits have scale 1 and zero point 0."""


class Inexpressible(Exception):
    """The HAL's operations cannot say an operator; the text says why, without naming it."""


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


class Tensor:
    """A value.

    Attributes:
        dtype: ONNX's element type by numpy's name.
        shape: ONNX's shape.
        array: The value of a constant, of that type and shape; None for what only an execution tells. Never written.
        order: The order of the axes in the form that was made first: form axis ``i`` is axis ``order[i]``.
        forms: HAL values by the order of their axes.
        limits: Least and largest number that can occur, for whole numbers.
        rescaled: Where the operator behind it can take them in: writes the value once more, times a factor and plus an offset for
            each channel, and with an activation. The value itself then falls away, unless somebody else reads it.
    """

    __slots__ = ("array", "dtype", "forms", "limits", "order", "rescaled", "shape")

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
        self.limits = INT32 if limits is None else limits
        if array is not None and limits is None and array.dtype.kind in "iu":
            self.limits = (int(array.min()), int(array.max())) if array.size else (0, 0)

    def __repr__(self) -> str:
        constant = "" if self.array is None else " constant"
        return f"<Tensor {self.dtype} {list(self.shape)} {list(self.order)}{constant}>"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype in ("float32", "float16")

    @property
    def is_plain(self) -> bool:
        """Whether the axes stand in ONNX's order."""
        return self.order == tuple(range(len(self.shape)))

    @property
    def numpy_type(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)
