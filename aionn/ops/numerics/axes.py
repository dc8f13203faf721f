"""Axes and extents as arguments of operations: axes may count from the end, extents must leave a tensor that can exist.

Owns the rule that turns an axis from ``[-rank, rank)`` into one from ``[0, rank)``, with its check in a model and at run time, and
the bound on shapes that come of run-time values. Knows no operation.

Source: ``handleNegativeAxis`` and the 32-bit sizes of operands of the NN HAL's CPU operations.
"""

from __future__ import annotations

import math

from aionn.errors import InvalidArgument
from aionn.hal import Operand, operand_dtype
from aionn.ops.signature import Call, Check, Shape

__all__ = ["axes_of", "axis_of", "bounded_shape", "known_rank", "require_axes", "resolve_axis"]

_OPERAND_BYTES_MAX = 2**32 - 1
"""Sizes of operands have 32 bits in the HAL."""


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
    return tuple(sorted({resolve_axis(axis, rank, f"input {index}") for axis in call.numbers(index)}))


def bounded_shape(call: Call, what: str, shape: Shape) -> Shape:
    """The shape of output 0, when it can exist: computed from run-time values, it may be nonsense of any size.

    Args:
        call: The execution.
        what: Names the arguments that the shape comes of, such as ``input 1``.
        shape: The extents that result.

    Raises:
        InvalidArgument: An extent is negative, or the tensor's size in bytes does not fit 32 bits.
    """
    # An extent of 0 does not excuse the other ones: numpy cannot make such an array either.
    size_bytes = math.prod(extent or 1 for extent in shape) * operand_dtype(call.outputs[0].type).itemsize
    if any(extent < 0 for extent in shape) or size_bytes > _OPERAND_BYTES_MAX:
        call.refuse(
            f"{what}: expected an output of no negative extent and at most {_OPERAND_BYTES_MAX} bytes, "
            f"got shape {list(shape)}"
        )
    return shape


def known_rank(operand: Operand) -> int | None:
    """The rank of a tensor operand, or None if the model does not give it."""
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
