"""Operators that reduce axes, and operators that find the largest or smallest elements.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from aionn.hal import OperandType, OperationType
from aionn.models.builder import Value
from aionn.models.onnx.conversions.elementwise import narrowed
from aionn.models.onnx.conversions.movement import transposed
from aionn.models.onnx.formula import Formula
from aionn.models.onnx.operator import Convert, Operator
from aionn.models.onnx.tensors import RANK_MAX, Inexpressible, Order, Shape, Tensor, ordered, stored_shape
from aionn.models.onnx.writer import GraphWriter

__all__ = ["arg_extremum", "cumulative_sum", "hardmax", "one_hot", "reduction", "top_k"]

Reduce = Callable[[Formula, list[int]], Formula]
FLOAT_MAX = {OperandType.TENSOR_FLOAT32: 3.4028234663852886e38, OperandType.TENSOR_FLOAT16: 65504.0}


def _view(g: GraphWriter, x: Tensor, axes: list[int]) -> tuple[Value, list[int]]:
    """A form of at most ``RANK_MAX`` axes, and the positions of the axes to reduce."""
    shape, flags = ordered(x.shape, x.order), [axis in axes for axis in x.order]
    value = g.form(x, x.order)
    if x.rank <= RANK_MAX:
        return value, [place for place, flag in enumerate(flags) if flag]
    merged: list[int] = []
    kinds: list[bool] = []
    for extent, flag in zip(shape, flags, strict=True):
        if kinds and kinds[-1] == flag:
            merged[-1] *= extent
        else:
            merged.append(extent)
            kinds.append(flag)
    if len(merged) > RANK_MAX:
        raise Inexpressible("axes that do not merge to four")
    return g.reshaped(value, tuple(merged)), [place for place, flag in enumerate(kinds) if flag]


def _result(
    g: GraphWriter,
    x: Tensor,
    value: Value,
    axes: list[int],
    *,
    keeps: bool,
    dtype: str,
    limits: tuple[int, int] | None = None,
) -> Tensor:
    """The tensor of a reduced value, in which the reduced axes have extent 1; they are removed unless ``keeps``."""
    kept = tuple(1 if axis in axes else extent for axis, extent in enumerate(x.shape))
    if keeps:
        return g.tensor(
            g.reshaped(value, stored_shape(ordered(kept, x.order))), dtype, kept, order=x.order, limits=limits
        )
    left = [axis for axis in range(x.rank) if axis not in axes]
    order: Order = tuple(left.index(axis) for axis in x.order if axis in left)
    shape: Shape = tuple(x.shape[axis] for axis in left)
    return g.tensor(
        g.reshaped(value, stored_shape(ordered(shape, order))), dtype, shape, order=order, limits=limits
    )


def _reduced_axes(op: Operator, x: Tensor, first_version: int) -> list[int] | None:
    """The axes to reduce; None if the operator reduces no axes."""
    if op.version >= first_version:
        given = op.numbers(1, "the axes") if op.has(1) else []
        is_noop = bool(op.integer("noop_with_empty_axes", 0))
        if is_noop and not given:
            return None
    else:
        given = op.integers("axes") or []
    return op.axes(given, x.rank) if given else list(range(x.rank))


def reduction(
    reduce: Reduce, first_version: int = 18, *, noop: Callable[[Formula], Formula] | None = None
) -> Convert:
    """A reduction of floats.

    Args:
        reduce: Writes the reduction for positions of axes, which keep extent 1.
        first_version: The first version in which the axes are an input.
        noop: Writes the operator if it reduces no axes; None means that its result is then the input.
    """

    def convert(g: GraphWriter, op: Operator) -> Tensor:
        x = op.input(0)
        keeps = bool(op.integer("keepdims", 1))
        axes = _reduced_axes(op, x, first_version)
        if axes is None:
            if noop is None:
                return x
            if x.dtype == "int64":
                raise Inexpressible(f"values of type {x.dtype}")
            return g.tensor(noop(Formula(g, g.form(x, x.order))).value, x.dtype, x.shape, order=x.order)
        if x.rank == 0:
            axes = []
        if x.size == 0:
            return _of_nothing(g, op, x, axes, keeps=keeps)
        limits = _limits(op, x, axes)
        value, places = _view(g, x, axes)
        if x.rank == 0:
            places = [0]
        result = reduce(Formula(g, value), places)
        return _result(g, x, result.value, axes, keeps=keeps, dtype=x.dtype, limits=limits)

    return convert


EMPTY: dict[str, float] = {
    "ReduceSum": 0.0, "ReduceProd": 1.0, "ReduceMax": -math.inf, "ReduceMin": math.inf, "ReduceL1": 0.0, "ReduceL2": 0.0,
    "ReduceSumSquare": 0.0, "ReduceLogSum": -math.inf, "ReduceLogSumExp": -math.inf,
}  # fmt: skip
"""The result of a reduction of no elements, by operator; the mean of none is not defined."""


def _of_nothing(g: GraphWriter, op: Operator, x: Tensor, axes: list[int], *, keeps: bool) -> Tensor:
    """The constant result of a reduction of a value without elements."""
    number = EMPTY.get(op.type)
    if number is None:
        raise Inexpressible("a reduction of no elements")
    kind = x.numpy_type
    if kind.kind == "b":
        number = number > 0
    elif kind.kind in "iu":
        number = int(np.clip(number, np.iinfo(kind).min, np.iinfo(kind).max))
    shape = tuple(
        1 if axis in axes else extent for axis, extent in enumerate(x.shape) if keeps or axis not in axes
    )
    g.charge(math.prod(shape) * kind.itemsize)
    return g.constant(np.full(shape, number, kind), x.dtype)


def _limits(op: Operator, x: Tensor, axes: list[int]) -> tuple[int, int]:
    """The bounds of a reduction of whole numbers.

    Raises:
        Inexpressible: Its type has 64 bits, and its bounds exceed 32 bits.
    """
    if op.type in ("ReduceMax", "ReduceMin") or x.is_float:
        return x.limits
    if x.dtype == "int64" and op.type != "ReduceSum":
        raise Inexpressible(f"values of type {x.dtype}")
    count = math.prod(x.shape[axis] for axis in axes)
    return narrowed(x, (min(x.limits[0], x.limits[0] * count), max(x.limits[1], x.limits[1] * count)))


def _by_kind(kind: OperationType) -> Reduce:
    def reduce(x: Formula, axes: list[int]) -> Formula:
        return _extremum(x, kind, axes)

    return reduce


def _extremum(x: Formula, kind: OperationType, axes: list[int]) -> Formula:
    operand = x.value.operand
    if operand.type == OperandType.TENSOR_BOOL8:
        names = {
            OperationType.REDUCE_MAX: OperationType.REDUCE_ANY,
            OperationType.REDUCE_MIN: OperationType.REDUCE_ALL,
        }
        kind = names.get(kind, kind)
    elif operand.type == OperandType.TENSOR_INT32:
        return _of_integers(x, kind, axes)
    return x.reduced(kind, axes)


def _of_integers(x: Formula, kind: OperationType, axes: list[int]) -> Formula:
    """A reduction of whole numbers by operations that accept them: TOPK_V2 finds the largest, a product with ones is the sum."""
    g, dimensions = x.g, x.value.operand.dimensions
    rest = [axis for axis in range(len(dimensions)) if axis not in axes]
    count = math.prod(dimensions[axis] for axis in axes)
    kept = tuple(1 if axis in axes else extent for axis, extent in enumerate(dimensions))
    order = (*rest, *axes)
    outer = math.prod(dimensions[axis] for axis in rest)
    rows = Formula(g, g.reshaped(g.transposed(x.value, dimensions, order), (outer, count)))
    if kind == OperationType.REDUCE_SUM:
        ones = g.like(1, rows.value, (count, 1))
        value = g.emit(OperationType.BATCH_MATMUL, [rows.value, ones, False, False])
    elif kind == OperationType.REDUCE_MAX:
        value = g.emit_all(OperationType.TOPK_V2, [rows.value, 1], [None, rows.value.operand])[0]
    elif kind == OperationType.REDUCE_MIN:
        # -1 - x reverses the order without an overflow, unlike -x.
        flipped = (-1) - rows
        value = g.emit_all(OperationType.TOPK_V2, [flipped.value, 1], [None, rows.value.operand])[0]
        value = ((-1) - Formula(g, value)).value
    else:
        raise Inexpressible("this reduction of whole numbers")
    return Formula(g, g.reshaped(value, kept))


def _norm1(x: Formula, axes: list[int]) -> Formula:
    return _extremum(abs(x), OperationType.REDUCE_SUM, axes)


def _sum_square(x: Formula, axes: list[int]) -> Formula:
    return _extremum(x * x, OperationType.REDUCE_SUM, axes)


def _norm2(x: Formula, axes: list[int]) -> Formula:
    return _sum_square(x, axes).sqrt()


def _log_sum(x: Formula, axes: list[int]) -> Formula:
    return x.reduced(OperationType.REDUCE_SUM, axes).log()


def _log_sum_exp(x: Formula, axes: list[int]) -> Formula:
    limit = FLOAT_MAX.get(OperandType(x.value.operand.type), 0.0)
    # The maximum is made finite, since the difference of two infinities is a NaN.
    top = x.reduced(OperationType.REDUCE_MAX, axes).maximum(-limit).minimum(limit)
    return (x - top).exp().reduced(OperationType.REDUCE_SUM, axes).log() + top


REDUCTIONS: dict[str, Reduce] = {
    "ReduceMean": _by_kind(OperationType.MEAN),
    "ReduceSum": _by_kind(OperationType.REDUCE_SUM),
    "ReduceMax": _by_kind(OperationType.REDUCE_MAX),
    "ReduceMin": _by_kind(OperationType.REDUCE_MIN),
    "ReduceProd": _by_kind(OperationType.REDUCE_PROD),
    "ReduceL1": _norm1,
    "ReduceL2": _norm2,
    "ReduceSumSquare": _sum_square,
    "ReduceLogSum": _log_sum,
    "ReduceLogSumExp": _log_sum_exp,
}
"""The function that writes a reduction, by operator."""

NOOPS: dict[str, Callable[[Formula], Formula]] = {
    "ReduceL1": lambda x: abs(x),
    "ReduceL2": lambda x: abs(x),
    "ReduceSumSquare": lambda x: x * x,
    "ReduceLogSum": lambda x: x.log(),
}
"""The function that writes a reduction of no axes, by operator; all other reductions then return their input."""


# Extremes


def arg_extremum(kind: OperationType) -> Convert:
    """ARGMAX or ARGMIN."""

    def convert(g: GraphWriter, op: Operator) -> Tensor:
        x = op.input(0)
        axis = op.axis(op.integer("axis", 0), x.rank)
        keeps = bool(op.integer("keepdims", 1))
        takes_last = bool(op.integer("select_last_index", 0))
        count = x.shape[axis]
        view, places = _view(g, x, [axis])
        place = places[0]
        if takes_last:
            view = g.emit(OperationType.REVERSE, [view, g.int32s([place])])
        result = Formula(g, g.emit(kind, [view, place], g.described("int32")))
        if takes_last:
            result = (count - 1) - result
        return _result(g, x, result.value, [axis], keeps=keeps, dtype="int64", limits=(0, count - 1))

    return convert


def top_k(g: GraphWriter, op: Operator) -> list[Tensor]:
    """TOPK_V2 of the reversed values, since ONNX chooses the first of equal values and the HAL the last."""
    x = op.input(0)
    axis = op.axis(op.integer("axis", -1), x.rank)
    largest = bool(op.integer("largest", 1)) if op.version >= 11 else True
    op.integer("sorted", 1)
    k = int(op.single(1, "k")) if op.version >= 10 else op.integer("k")
    count = x.shape[axis]
    if not 0 < k <= count:
        op.refuse("k", f"a number from 1 to {count}", k)
    # TOPK_V2 searches the last axis; the order of the remaining axes has no effect.
    order = (*(a for a in x.order if a != axis), axis)
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    rows = Formula(g, g.reshaped(g.form(x, order), (x.size // count, count)))
    if not x.is_float and x.dtype not in ("int32", "int64"):
        raise Inexpressible(f"values of type {x.dtype}")
    if not largest:
        rows = -rows if x.is_float else (-1) - rows
    backwards = g.emit(OperationType.REVERSE, [rows.value, g.int32s([1])])
    values, indices = g.emit_all(OperationType.TOPK_V2, [backwards, k], [None, g.described("int32")])
    found = Formula(g, values)
    if not largest:
        found = -found if x.is_float else (-1) - found
    places = (count - 1) - Formula(g, indices)
    dimensions = stored_shape(ordered(shape, order))
    return [
        g.tensor(g.reshaped(found.value, dimensions), x.dtype, shape, order=order, limits=x.limits),
        g.tensor(g.reshaped(places.value, dimensions), "int64", shape, order=order, limits=(0, count - 1)),
    ]


def hardmax(g: GraphWriter, op: Operator) -> Tensor:
    """1 at the first of the largest values, else 0."""
    x = op.input(0)
    axis = op.axis(op.integer("axis", -1 if op.version >= 13 else 1), x.rank)
    plain = transposed(g, x, (*(a for a in range(x.rank) if a != axis), axis)) if op.version >= 13 else x
    count = x.shape[axis] if op.version >= 13 else math.prod(x.shape[axis:])
    rows = g.reshaped(g.form(plain), (x.size // count, count))
    first = g.emit(OperationType.ARGMAX, [rows, 1], g.described("int32"))
    column = Formula(g, g.reshaped(first, (x.size // count, 1)))
    hit = column.equal(Formula(g, g.constant_value(g.counted(count).reshape(1, count))))
    value = g.reshaped(hit.where(1, 0, Formula(g, rows)).value, stored_shape(plain.shape))
    result = g.tensor(value, x.dtype, plain.shape)
    if op.version < 13:
        return result
    back = list(range(x.rank - 1))
    back.insert(axis, x.rank - 1)
    return transposed(g, result, tuple(back))


def one_hot(g: GraphWriter, op: Operator) -> Tensor:
    """EQUAL with the numbers of a range, then SELECT."""
    indices = op.input(0)
    depth = int(op.single(1, "the depth"))
    sides = op.array(2, "the values")
    axis = op.axis(op.integer("axis", -1), indices.rank + 1)
    if depth < 1 or sides.size != 2:
        op.refuse("depth and values", "a positive number and two values", f"{depth}, {sides.size}")
    if indices.is_float:
        value = g.emit(OperationType.CAST, [g.form(indices, indices.order)], g.described("int32"))
        indices = g.tensor(value, "int32", indices.shape, order=indices.order)
    if indices.dtype not in ("int32", "int64"):
        raise Inexpressible(f"indexes of type {indices.dtype}")
    shape = (*indices.shape[:axis], depth, *indices.shape[axis:])
    column = Formula(g, g.reshaped(g.form(indices), (indices.size, 1)))
    column = column.less(0).where(column + depth, column, column)
    hit = column.equal(Formula(g, g.constant_value(g.counted(depth).reshape(1, depth))))
    off, on = sides.reshape(-1).tolist()
    dtype = op.input(2).dtype
    like = g.described(dtype)
    value = g.selected(hit.value, like, on, off, (indices.size, depth))
    last = (*indices.shape, depth)
    limits = (int(min(on, off)), int(max(on, off))) if sides.dtype.kind in "iu" else None
    result = g.tensor(g.reshaped(value, stored_shape(last)), dtype, last, limits=limits)
    back = list(range(len(last) - 1))
    back.insert(axis, len(last) - 1)
    assert ordered(last, tuple(back)) == shape, "only the axis of the depth moves"
    return transposed(g, result, tuple(back))


def cumulative_sum(g: GraphWriter, op: Operator) -> Tensor:
    """A product with a triangle of ones."""
    x = op.input(0)
    axis = op.axis(int(op.single(1, "the axis")), x.rank)
    exclusive, backwards = bool(op.integer("exclusive", 0)), bool(op.integer("reverse", 0))
    if not x.is_float and x.dtype != "int32":
        raise Inexpressible(f"values of type {x.dtype}")
    count = x.shape[axis]
    g.charge(8 * count * count)
    ones = np.ones((count, count), x.numpy_type)
    triangle = np.tril(ones, -int(exclusive)) if backwards else np.triu(ones, int(exclusive))
    order = (*(a for a in x.order if a != axis), axis)
    rows = g.reshaped(g.form(x, order), (x.size // count, count))
    value = g.emit(OperationType.BATCH_MATMUL, [rows, g.constant_value(triangle), False, False])
    return g.tensor(g.reshaped(value, stored_shape(ordered(x.shape, order))), x.dtype, x.shape, order=order)
