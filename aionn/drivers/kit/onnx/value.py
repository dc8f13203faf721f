"""An operand of the HAL as an ONNX value: its type, shape and quantisation, and the forms of it that are written so far.

Owns the orders of axes of a form, and signed 8-bit numbers as unsigned ones. ``graph`` makes the forms.
"""

from __future__ import annotations

import numpy as np

from aionn.drivers.kit.arguments import Array
from aionn.drivers.kit.engines.known import Shape
from aionn.hal import ChannelQuant

__all__ = ["QUANTIZED", "Order", "Value", "moved"]

Order = tuple[int, ...]
"""The axes of a form: its axis i is the value's axis ``order[i]``."""

QUANTIZED = ("uint8", "int8")
"""The element types of quantised values."""


class Value:
    """A tensor.

    Attributes:
        dtype: Its element type's name.
        shape: Its shape.
        scale: Of quantised numbers; 0 for others.
        zero_point: Of quantised numbers.
        channels: The scales of each channel, where it has several.
        constant: Its value, where it is known.
        forms: The names of the ONNX values that it is, by the order of axes.
        reals: The same for the real numbers that quantised ones stand for.
        is_moved: Whether the HAL's numbers are signed, and these by 128 higher; see ``moved``.
    """

    __slots__ = (
        "channels", "constant", "dtype", "forms", "is_moved", "reals", "scale", "shape", "zero_point",
    )  # fmt: skip

    def __init__(
        self,
        dtype: str,
        shape: Shape,
        *,
        scale: float = 0.0,
        zero_point: int = 0,
        channels: ChannelQuant | None = None,
        constant: Array | None = None,
        is_moved: bool = False,
    ) -> None:
        self.dtype = dtype
        self.is_moved = is_moved
        self.shape = shape
        self.scale = scale
        self.zero_point = zero_point
        self.channels = channels
        self.constant = constant
        self.forms: dict[Order, str] = {}
        self.reals: dict[Order, str] = {}

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_quantized(self) -> bool:
        """Whether its numbers are quantised to 8 bits."""
        return self.dtype in QUANTIZED

    @property
    def plain(self) -> Order:
        """The order of axes that the HAL has."""
        return tuple(range(len(self.shape)))

    def has_quantization_of(self, other: Value) -> bool:
        """Whether the same stored numbers stand for the same real ones."""
        mine = (self.dtype, self.scale, self.zero_point, self.channels)
        return mine == (other.dtype, other.scale, other.zero_point, other.channels)


def moved(array: Array) -> Array:
    """Signed 8-bit numbers as unsigned ones, each by 128 higher, and the other way round.

    Signed tensors are computed as such: ONNX Runtime's quantised layers are an order of magnitude faster with unsigned data.
    """
    other = np.uint8 if array.dtype == np.int8 else np.int8
    result: Array = (np.ascontiguousarray(array).view(np.uint8) ^ 0x80).view(other)
    return result
