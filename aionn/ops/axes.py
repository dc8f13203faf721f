"""Axes as arguments of operations: numbers that may count from the end.

Owns the rule that turns an axis from ``[-rank, rank)`` into one from ``[0, rank)``, and its check in a model and at run time.
Knows no operation.

Source: ``handleNegativeAxis`` of the NN HAL's CPU operations.
"""

from __future__ import annotations

from aionn.errors import InvalidArgument
from aionn.hal import Operand
from aionn.ops.signature import Call, Check

__all__ = ["axes_of", "axis_of", "known_rank", "require_axes", "resolve_axis"]


def resolve_axis(axis: int, rank: int, what: str) -> int:
    """The axis counted from the front.

    Args:
        axis: From ``-rank`` to ``rank - 1``; -1 is the last.
        rank: Of the tensor that the axis belongs to.
        what: Names the argument in the message, such as ``input 1``.

    Raises:
        InvalidArgument: The axis is out of range.
    """
    if not -rank <= axis < rank:
        raise InvalidArgument(f"{what}: expected an axis from {-rank} to {rank - 1}, got {axis}")
    return axis + rank if axis < 0 else axis


def axis_of(call: Call, index: int, rank: int) -> int:
    """The axis that a scalar input gives, counted from the front."""
    return resolve_axis(call.scalar(index), rank, f"input {index}")


def axes_of(call: Call, index: int, rank: int) -> tuple[int, ...]:
    """The axes that a tensor input lists, counted from the front, each once and in ascending order."""
    array = call.array(index)
    if array.ndim != 1:
        call.refuse(f"input {index}: expected a list of axes of rank 1, got shape {list(array.shape)}")
    return tuple(sorted({resolve_axis(int(axis), rank, f"input {index}") for axis in array}))


def known_rank(operand: Operand) -> int | None:
    """The rank of a tensor operand, or None where the model does not say it."""
    return len(operand.dimensions) or None


def require_axes(check: Check, index: int, rank: int | None) -> None:
    """Refuses a model whose constant axis, or constant list of axes, is out of range.

    Args:
        check: The operation.
        index: The input that gives the axis or axes; nothing is checked unless it is constant.
        rank: The rank that they refer to; None where it is not known.
    """
    axes = check.constant(index)
    if axes is None or rank is None:
        return
    for axis in axes.reshape(-1).tolist():
        check.require(-rank <= axis < rank, f"input {index}", f"an axis from {-rank} to {rank - 1}", axis)
