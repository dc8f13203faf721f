"""The distance of a device's answers from the baseline's.

Owns the comparison of outputs in real numbers: mean square and largest error, and how often the largest output is the same one.

Source: the accuracy figures of MLTS, the HAL's own benchmark suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.hal import Operand

__all__ = ["Accuracy", "Array", "compare_outputs", "to_real"]

Array = npt.NDArray[Any]


class Accuracy(msgspec.Struct, frozen=True):
    """The distance of answers from the baseline's.

    Attributes:
        samples: Number of inputs that were compared.
        identical: Number of samples whose outputs all equal the baseline's, byte for byte.
        mean_square_error: Over all elements of all outputs, as real numbers.
        largest_error: The largest difference of an element, likewise; infinite where one side alone is NaN.
        top1_agreement: Share of samples whose first output has its largest element at the same place; None where it has one alone.
    """

    samples: int
    identical: int
    mean_square_error: float
    largest_error: float
    top1_agreement: float | None


def compare_outputs(
    ours: Sequence[Sequence[Array]], theirs: Sequence[Sequence[Array]], operands: Sequence[Operand]
) -> Accuracy:
    """Compares the outputs for each sample; the operands give the meaning of stored numbers."""
    identical = 0
    squares, elements, largest = 0.0, 0, 0.0
    agreed = 0
    for mine, wanted in zip(ours, theirs, strict=True):
        identical += all(a.tobytes() == b.tobytes() for a, b in zip(mine, wanted, strict=True))
        for a, b, operand in zip(mine, wanted, operands, strict=True):
            with np.errstate(invalid="ignore"):
                difference = np.abs(to_real(a, operand) - to_real(b, operand))
            # Infinities of one sign and missing numbers on both sides are equal, and differ from everything else.
            same = (a == b) | ((a != a) & (b != b))
            difference = np.where(same, 0.0, np.where(np.isfinite(difference), difference, np.inf))
            squares += float(np.sum(difference**2))
            elements += difference.size
            largest = max(largest, float(difference.max(initial=0.0)))
        agreed += int(np.argmax(mine[0])) == int(np.argmax(wanted[0]))
    has_choice = theirs[0][0].size > 1
    return Accuracy(
        samples=len(theirs),
        identical=identical,
        mean_square_error=squares / max(1, elements),
        largest_error=largest,
        top1_agreement=agreed / len(theirs) if has_choice else None,
    )


def to_real(array: Array, operand: Operand) -> Array:
    """Real numbers that stored ones mean, float64."""
    real = array.astype(np.float64)
    return (real - operand.zero_point) * operand.scale if operand.scale else real
