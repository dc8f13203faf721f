"""Small models for tests: legal, with results that are known beforehand, of as many operations as a test needs boundaries.

Owns a few shapes of graphs. Models with a meaning are built with ``aionn.models.builder`` or read from files.
"""

from __future__ import annotations

from collections.abc import Sequence

from aionn.errors import InvalidArgument
from aionn.hal import Model, Operand, OperandLifeTime, OperandType, Operation, OperationType, Subgraph

__all__ = ["chain", "identity"]


def identity(shape: Sequence[int] = (1,), *, operations: int = 1) -> Model:
    """A float32 model whose output is its input, rounded down: FLOOR after FLOOR.

    Args:
        shape: Extents of input and output, all known.
        operations: Number of operations in a chain; a device can stop between two of them.

    Raises:
        InvalidArgument: An extent or the number of operations is below 1.
    """
    return chain([OperationType.FLOOR] * operations, shape)


def chain(types: Sequence[OperationType], shape: Sequence[int] = (1,)) -> Model:
    """A float32 model of operations with one input and one output of the same shape, one after the other.

    Args:
        types: Operations such as FLOOR, RELU, ABS or TANH, in their order.
        shape: Extents of every value, all known.

    Raises:
        InvalidArgument: There is no operation, or an extent is below 1.
    """
    if not types or not shape or min(shape) < 1:
        raise InvalidArgument(
            f"model: expected one operation or more and extents of 1 or more, got {len(types)} and {list(shape)}"
        )
    last = len(types)
    lifetimes = {0: OperandLifeTime.SUBGRAPH_INPUT, last: OperandLifeTime.SUBGRAPH_OUTPUT}
    operands = tuple(
        Operand(
            OperandType.TENSOR_FLOAT32,
            tuple(shape),
            lifetime=lifetimes.get(index, OperandLifeTime.TEMPORARY_VARIABLE),
        )
        for index in range(last + 1)
    )
    operations = tuple(Operation(kind, (index,), (index + 1,)) for index, kind in enumerate(types))
    return Model(Subgraph(operands, operations, (0,), (last,)))
