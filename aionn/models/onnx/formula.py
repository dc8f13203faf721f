"""HAL operations written as formulas.

Owns Python's operators on HAL values, and the conversion of the values of an elementwise operator to one order of axes.

Source: the contracts in ``aionn.ops``; "Multidirectional Broadcasting" of ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aionn.hal import FusedActivation, Operand, OperandType, OperationType
from aionn.models.builder import Value
from aionn.models.onnx.operator import Operator
from aionn.models.onnx.tensors import RANK_MAX, Inexpressible, Order, Shape, Tensor, ordered, stored_shape
from aionn.models.onnx.writer import GraphWriter

__all__ = [
    "Aligned",
    "Formula",
    "activated",
    "aligned",
    "broadcast_shape",
    "broadcasts_to",
    "expanded",
    "tiled",
]


class Formula:
    """A HAL value with Python's operators; a number as the other operand becomes a constant of the same element type."""

    __slots__ = ("g", "value")

    def __init__(self, g: GraphWriter, value: Value) -> None:
        self.g = g
        self.value = value

    def _other(self, other: Formula | float) -> Value:
        self.g.check_plain(self.value)
        return other.value if isinstance(other, Formula) else self.g.like(other, self.value)

    def _unary(self, kind: OperationType) -> Formula:
        return Formula(self.g, self.g.emit(kind, [self.value]))

    def _binary(self, kind: OperationType, other: Formula | float, *, is_reversed: bool = False) -> Formula:
        pair = [self.value, self._other(other)]
        if is_reversed:
            pair.reverse()
        fused = [0] if kind in _FUSING else []
        return Formula(self.g, self.g.emit(kind, [*pair, *fused]))

    def _compared(self, kind: OperationType, other: Formula | float) -> Formula:
        return Formula(self.g, self.g.emit(kind, [self.value, self._other(other)], self.g.truth))

    def __add__(self, other: Formula | float) -> Formula:
        return self._binary(OperationType.ADD, other)

    __radd__ = __add__

    def __sub__(self, other: Formula | float) -> Formula:
        return self._binary(OperationType.SUB, other)

    def __rsub__(self, other: float) -> Formula:
        return self._binary(OperationType.SUB, other, is_reversed=True)

    def __mul__(self, other: Formula | float) -> Formula:
        return self._binary(OperationType.MUL, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Formula | float) -> Formula:
        return self._binary(OperationType.DIV, other)

    def __rtruediv__(self, other: float) -> Formula:
        return self._binary(OperationType.DIV, other, is_reversed=True)

    def __neg__(self) -> Formula:
        return self._unary(OperationType.NEG)

    def __abs__(self) -> Formula:
        return self._unary(OperationType.ABS)

    def power(self, other: Formula | float) -> Formula:
        return self._binary(OperationType.POW, other)

    def maximum(self, other: Formula | float) -> Formula:
        return self._binary(OperationType.MAXIMUM, other)

    def minimum(self, other: Formula | float) -> Formula:
        return self._binary(OperationType.MINIMUM, other)

    def exp(self) -> Formula:
        return self._unary(OperationType.EXP)

    def log(self) -> Formula:
        return self._unary(OperationType.LOG)

    def sqrt(self) -> Formula:
        return self._unary(OperationType.SQRT)

    def sin(self) -> Formula:
        return self._unary(OperationType.SIN)

    def floor(self) -> Formula:
        return self._unary(OperationType.FLOOR)

    def tanh(self) -> Formula:
        return self._unary(OperationType.TANH)

    def sigmoid(self) -> Formula:
        return self._unary(OperationType.LOGISTIC)

    def less(self, other: Formula | float) -> Formula:
        return self._compared(OperationType.LESS, other)

    def greater(self, other: Formula | float) -> Formula:
        return self._compared(OperationType.GREATER, other)

    def at_least(self, other: Formula | float) -> Formula:
        return self._compared(OperationType.GREATER_EQUAL, other)

    def equal(self, other: Formula | float) -> Formula:
        return self._compared(OperationType.EQUAL, other)

    def differs(self, other: Formula | float) -> Formula:
        return self._compared(OperationType.NOT_EQUAL, other)

    def both(self, other: Formula) -> Formula:
        """The logical AND of both truth values."""
        return Formula(self.g, self.g.emit(OperationType.LOGICAL_AND, [self.value, other.value]))

    def where(self, yes: Formula | float, no: Formula | float, like: Formula) -> Formula:
        """For each of these truth values one of two values; the result has ``like``'s type and this value's shape."""
        dimensions = self.value.operand.dimensions
        sides = [
            side.value if isinstance(side, Formula) else self.g.like(side, like.value, dimensions)
            for side in (yes, no)
        ]
        operand = like.value.operand
        described = Operand(operand.type, (), operand.scale, operand.zero_point)
        return Formula(self.g, self.g.emit(OperationType.SELECT, [self.value, *sides], described))

    def reduced(self, kind: OperationType, axes: Sequence[int], *, keeps: bool = True) -> Formula:
        """A reduction along axes of this value."""
        flag = int(keeps) if kind == OperationType.MEAN else keeps
        return Formula(self.g, self.g.emit(kind, [self.value, self.g.int32s(axes), flag]))

    def cast(self, like: Operand) -> Formula:
        """Converted to another element type."""
        return Formula(self.g, self.g.emit(OperationType.CAST, [self.value], like))


_FUSING = {OperationType.ADD, OperationType.SUB, OperationType.MUL, OperationType.DIV}


def broadcast_shape(op: Operator, tensors: Sequence[Tensor]) -> Shape:
    """The shape that all inputs broadcast to."""
    try:
        return np.broadcast_shapes(*(t.shape for t in tensors))
    except ValueError:
        op.refuse("shapes", "ones that broadcast", " and ".join(str(list(t.shape)) for t in tensors))


def broadcasts_to(shape: Shape, whole: Shape) -> bool:
    """Whether values of a shape can be repeated to another one: ONNX's unidirectional broadcasting."""
    lead = len(whole) - len(shape)
    return lead >= 0 and all(own in (1, extent) for own, extent in zip(shape, whole[lead:], strict=True))


class Aligned:
    """Values of one operator that can be combined elementwise; ``tensor`` converts their result to a tensor.

    Attributes:
        values: A value for each tensor; they broadcast to ``dimensions``.
        dimensions: The HAL's shape of the result.
        shape: ONNX's shape of the result.
        order: The order of the result's axes.
    """

    __slots__ = ("_g", "dimensions", "order", "shape", "values")

    def __init__(
        self, g: GraphWriter, values: list[Value], dimensions: Shape, shape: Shape, order: Order
    ) -> None:
        self._g = g
        self.values = values
        self.dimensions = dimensions
        self.shape = shape
        self.order = order

    def formulas(self) -> list[Formula]:
        return [Formula(self._g, value) for value in self.values]

    def tensor(self, result: Value | Formula, dtype: str, limits: tuple[int, int] | None = None) -> Tensor:
        """The tensor of a result of the common shape."""
        value = result.value if isinstance(result, Formula) else result
        whole = self._g.reshaped(value, stored_shape(ordered(self.shape, self.order)))
        return self._g.tensor(whole, dtype, self.shape, order=self.order, limits=limits)


def aligned(g: GraphWriter, op: Operator, tensors: Sequence[Tensor]) -> Aligned:
    """Values of tensors that broadcast, in one order of axes: the first order that differs from ONNX's, such as that of an
    image."""
    shape = broadcast_shape(op, tensors)
    rank = len(shape)
    order = next(
        (t.order for t in tensors if t.array is None and t.rank == rank and not t.is_plain),
        tuple(range(rank)),
    )
    values = [_in_order(g, t, rank, order) for t in tensors]
    for value in values:
        g.check_plain(value)
    if rank <= RANK_MAX:
        return Aligned(g, values, stored_shape(ordered(shape, order)), shape, order)
    fulls = [ordered((1,) * (rank - t.rank) + t.shape, order) for t in tensors]
    groups = _merged(ordered(shape, order), fulls)
    if len(groups) > RANK_MAX:
        values = [expanded(g, t, shape, order) for t in tensors]
        return Aligned(g, values, stored_shape(ordered(shape, order)), shape, order)
    values = [
        g.reshaped(value, tuple(math.prod(full[axis] for axis in group) for group in groups))
        for value, full in zip(values, fulls, strict=True)
    ]
    whole = ordered(shape, order)
    return Aligned(g, values, tuple(math.prod(whole[a] for a in group) for group in groups), shape, order)


def _merged(shape: Shape, fulls: Sequence[Shape]) -> list[list[int]]:
    """Groups of neighbouring axes that can be merged: along all axes of a group each tensor has the full extent, or is repeated."""
    groups: list[list[int]] = []
    patterns: list[tuple[bool, ...]] = []
    for axis, extent in enumerate(shape):
        pattern = tuple(full[axis] == extent for full in fulls)
        if extent == 1 and groups:
            groups[-1].append(axis)
        elif groups and (patterns[-1] == pattern or all(shape[a] == 1 for a in groups[-1])):
            groups[-1].append(axis)
            patterns[-1] = pattern
        else:
            groups.append([axis])
            patterns.append(pattern)
    return groups


def _in_order(g: GraphWriter, tensor: Tensor, rank: int, order: Order) -> Value:
    if tensor.rank == rank:
        return g.form(tensor, order)
    if order == tuple(range(rank)) and rank <= RANK_MAX:
        return g.form(tensor)
    full = (1,) * (rank - tensor.rank) + tensor.shape
    if tensor.array is not None:
        return g.constant_value(tensor.array.reshape(full).transpose(order), tensor.dtype)
    return g.transposed(g.reshaped(g.form(tensor), stored_shape(full)), full, order)


def expanded(g: GraphWriter, tensor: Tensor, shape: Shape, order: Order | None = None) -> Value:
    """A tensor repeated to a shape that it broadcasts to, its axes in an order."""
    rank = len(shape)
    order = tuple(range(rank)) if order is None else order
    full = (1,) * (rank - tensor.rank) + tensor.shape
    if full == shape:
        return _in_order(g, tensor, rank, order)
    if tensor.array is not None:
        g.charge(math.prod(shape) * tensor.array.itemsize)
        whole = np.broadcast_to(tensor.array.reshape(full), shape).transpose(order)
        return g.constant_value(np.ascontiguousarray(whole), tensor.dtype)
    if rank > RANK_MAX:
        g.charge(4 * math.prod(shape))
        places = g.counted(tensor.size).reshape(full)
        return g.taken(g.form(tensor), np.broadcast_to(places, shape).transpose(order))
    value = _in_order(g, tensor, rank, order)
    value = g.reshaped(value, stored_shape(ordered(full, order)))
    factors = [
        wide // narrow for wide, narrow in zip(ordered(shape, order), ordered(full, order), strict=True)
    ]
    return tiled(g, value, factors or [1])


def tiled(g: GraphWriter, value: Value, factors: Sequence[int]) -> Value:
    """A value repeated along its axes."""
    if value.operand.type == OperandType.TENSOR_BOOL8:
        return g.as_truth(tiled(g, g.as_bytes(value), factors))
    return g.emit(OperationType.TILE, [value, g.int32s(factors)])


def activated(g: GraphWriter, value: Value, activation: FusedActivation) -> Value:
    """The result of an activation as an operation of its own, after operations that have no fused activation."""
    if activation == FusedActivation.NONE:
        return value
    f = Formula(g, value)
    low, high = _RANGES[activation]
    if value.operand.type == OperandType.TENSOR_INT32:
        f = f.maximum(low)
        return (f if high is None else f.minimum(high)).value
    if value.operand.type not in (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16):
        raise Inexpressible("an activation of such values")
    return g.emit(_ACTIVATIONS[activation], [value])


_ACTIVATIONS = {
    FusedActivation.RELU: OperationType.RELU,
    FusedActivation.RELU1: OperationType.RELU1,
    FusedActivation.RELU6: OperationType.RELU6,
}
_RANGES: dict[FusedActivation, tuple[int, int | None]] = {
    FusedActivation.RELU: (0, None),
    FusedActivation.RELU1: (-1, 1),
    FusedActivation.RELU6: (0, 6),
}
