"""A second definition of the operations, to judge the first by: real arithmetic in float64, each result rounded once.

Owns what a definition sees (``PlainCall``), what values stand for as real numbers, and how results become the operands' types. The
definitions themselves are in ``plain_elementwise``, ``plain_layout`` and ``plain_layers``, the evaluation of a model in
``plain_evaluation``. They share nothing with the kernels of ``aionn.ops`` and are written for being obviously right, not fast.

Invariants:
1. Quantised values are real numbers in every definition; an operation on the stored numbers declares that (``Stored``).
2. Every output is rounded to its operand's type before another operation reads it: half away from zero and saturating where
   quantised; 32-bit integers wrap.
3. Values that the reference must compute in float32, because they decide which element is read, are computed in float32 here too.

Source: the operations' contracts; the idea of judging quantised results by real ones from the NN HAL's random graph tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.hal import OPERAND_TYPE_PROPERTIES, Operand, OperandType, OperationType, operand_dtype

__all__ = ["Array", "Definition", "PlainCall", "Stored", "activated", "stored_numbers"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """A result that is the stored numbers themselves, not the real numbers that they stand for."""

    array: Array


class PlainCall:
    """One operation with its inputs.

    Attributes:
        operation: The operation.
        real: The inputs as real numbers: float64 for float and quantised types, int64 for integers, bool; None where left out.
        stored: The inputs as they are stored.
        operands: The input operands.
        outputs: The output operands.
    """

    __slots__ = ("operands", "operation", "outputs", "real", "stored")

    def __init__(
        self,
        operation: OperationType,
        operands: Sequence[Operand],
        stored: Sequence[Array | None],
        outputs: Sequence[Operand],
    ) -> None:
        self.operation = operation
        self.operands = tuple(operands)
        self.stored = tuple(stored)
        self.real = tuple(
            None if array is None else real_numbers(array, operand)
            for array, operand in zip(stored, operands, strict=True)
        )
        self.outputs = tuple(outputs)

    def __len__(self) -> int:
        return len(self.operands)

    def tensor(self, index: int) -> Array:
        """The real numbers of an input that is there."""
        array = self.real[index]
        assert array is not None, f"input {index} is left out"
        return array

    def has(self, index: int) -> bool:
        """Whether an input is there."""
        return index < len(self.real) and self.real[index] is not None

    def integer(self, index: int) -> int:
        """An integer or boolean scalar."""
        return int(self.tensor(index).item())

    def number(self, index: int) -> float:
        """A real scalar."""
        return float(self.tensor(index).item())

    def flag(self, index: int) -> bool:
        """A boolean scalar; False where there is no such input."""
        return index < len(self.real) and bool(self.tensor(index).item())

    def integers(self, index: int) -> list[int]:
        """A list of integers."""
        return [int(v) for v in self.tensor(index).reshape(-1)]


Definition = Callable[[PlainCall], "Sequence[Array | Stored]"]


def real_numbers(array: Array, operand: Operand) -> Array:
    """The real numbers that stored values stand for."""
    properties = OPERAND_TYPE_PROPERTIES[OperandType(operand.type)]
    if operand.channel_quant is not None:
        shape = [1] * array.ndim
        shape[operand.channel_quant.channel_dim] = -1
        scales = np.array(operand.channel_quant.scales, dtype=np.float64).reshape(shape)
        return array.astype(np.float64) * scales
    if properties.is_quantized:
        return (array.astype(np.float64) - operand.zero_point) * operand.scale
    if array.dtype == np.bool_:
        return array
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def stored_numbers(result: Array | Stored, operand: Operand) -> Array:
    """A result in its operand's type."""
    dtype = operand_dtype(operand.type)
    if isinstance(result, Stored):
        return result.array.astype(dtype)
    if OPERAND_TYPE_PROPERTIES[OperandType(operand.type)].is_quantized:
        scaled = result / operand.scale
        rounded = np.sign(scaled) * np.floor(np.abs(scaled) + 0.5) + operand.zero_point
        info = np.iinfo(np.dtype(dtype.name))
        saturated = np.clip(np.nan_to_num(rounded, nan=operand.zero_point), info.min, info.max)
        return np.asarray(saturated.astype(dtype))
    return np.asarray(result).astype(dtype)


def activated(values: Array, activation: int) -> Array:
    """Applies a fused activation."""
    match activation:
        case 1:
            return np.asarray(np.maximum(values, 0))
        case 2:
            return np.clip(values, -1, 1)
        case 3:
            return np.clip(values, 0, 6)
    return values
