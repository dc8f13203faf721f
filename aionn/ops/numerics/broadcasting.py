"""Broadcasting of two operands of different shapes.

Owns the broadcast rule of the spec, as a question about known shapes at run time and about partly known shapes in a model, and
the table by which an operation of two 8-bit operands is computed. Knows no operation.

Invariants:
1. Shapes are aligned at their last axis; the extents of an axis must be equal, or one of them 1, which yields to the other. So 1
   beside 0 gives 0: a zero-sized operand makes a zero-sized result, as in numpy.
2. A rank that is unknown, or an extent of 0 in a model, is compatible with everything.

Source: ``calculateBroadcastedShape`` of the NN HAL's CPU operations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aionn.errors import InvalidArgument
from aionn.ops.signature import Array, Call, Check, Shape

__all__ = ["broadcast_shape", "broadcast_shape_rule", "byte_pairs", "require_broadcast"]

_TABLE_ELEMENTS_MIN = 4096
"""Outputs from this size on go through a table: below, computing costs less than half of what the table of 65,536 does."""


def broadcast_shape(a: Shape, b: Shape) -> Shape:
    """The shape of the result.

    Raises:
        InvalidArgument: The shapes cannot be broadcast together.
    """
    rank = max(len(a), len(b))
    shape = []
    for x, y in zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True):
        if x != y and x != 1 and y != 1:
            raise InvalidArgument(
                f"input 1: expected a shape that broadcasts with {list(a)}, got shape {list(b)}"
            )
        shape.append(y if x == 1 else x)
    return tuple(shape)


def broadcast_shape_rule(call: Call) -> list[Shape]:
    """The shape rule of an operation that broadcasts its inputs 0 and 1."""
    return [broadcast_shape(call.tensor(0).shape, call.tensor(1).shape)]


def require_broadcast(check: Check, first: int = 0, second: int = 1) -> None:
    """Refuses a model whose two inputs cannot be broadcast together, as far as their shapes are known.

    Raises:
        InvalidModel: Two known extents of an axis differ and neither is 1.
    """
    a, b = check.inputs[first].dimensions, check.inputs[second].dimensions
    for x, y in zip(reversed(a), reversed(b), strict=False):
        if x != y and 0 not in (x, y) and 1 not in (x, y):
            check.refuse(f"input {second}", f"a shape that broadcasts with {list(a)}", f"shape {list(b)}")


def byte_pairs(
    call: Call, compute: Callable[[Array, Array], Array], *, elements_min: int = _TABLE_ELEMENTS_MIN
) -> Array:
    """Computes an operation of two 8-bit inputs, which depends on nothing but the two values and the model.

    There are only 65,536 pairs of values: large outputs are looked up in a table, which a prepared model keeps.

    Args:
        call: Inputs 0 and 1 are the operands.
        compute: The operation on broadcast arrays of the inputs' element type. A pure function of its elements.
        elements_min: Outputs of fewer elements are computed directly.
    """
    a, b = call.array(0), call.array(1)
    size = int(np.prod(broadcast_shape(a.shape, b.shape), dtype=np.int64))
    if size < elements_min:
        return compute(a, b)

    def table() -> Array:
        values = np.arange(256, dtype=np.uint8).view(a.dtype)
        return compute(values[:, None], values[None, :]).reshape(-1)

    pairs = (a.view(np.uint8).astype(np.uint16) << 8) | b.view(np.uint8)
    result: Array = call.kept("byte pairs", (), table)[pairs]
    return result
