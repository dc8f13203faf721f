"""Operators that only move elements: shapes, orders, slices, repetitions, padding.

Every conversion defines its movement as a numpy function. A constant is moved by that function. Other values are moved by the HAL's
operation if it accepts them, else by GATHER from the flattened value; its indices are computed by the same function.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from aionn.hal import OperandType, OperationType
from aionn.models.builder import Value
from aionn.models.onnx.formula import Formula, expanded
from aionn.models.onnx.operator import Operator
from aionn.models.onnx.schema import RANK_MAX as FILE_RANK_MAX
from aionn.models.onnx.tensors import (
    RANK_MAX,
    Array,
    Inexpressible,
    Order,
    Shape,
    Tensor,
    ordered,
    stored_shape,
)
from aionn.models.onnx.writer import GraphWriter

__all__ = ["center_crop_pad", "concat", "expand", "flatten", "moved", "pad", "reshape", "slice_", "split", "squeeze", "tile",
           "transpose", "transposed", "trilu", "unsqueeze"]  # fmt: skip

Move = Callable[[Array], Array]
MOVED_MAX = 1 << 24
"""Most elements that a GATHER moves one by one: 64 MB of indices. Real models move larger values only by ways that have an
operation."""


def moved(
    g: GraphWriter,
    x: Tensor,
    shape: Shape,
    move: Move,
    direct: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Write a movement of elements.

    Args:
        g: The writer.
        x: The value to move.
        shape: The result's shape.
        move: Moves the elements of an array of ``x``'s shape.
        direct: Writes the HAL's operation; raises ``Inexpressible`` if the operation does not accept the value. None means that
            there is no such operation.
    """
    if x.array is not None:
        g.charge(math.prod(shape) * x.array.itemsize)
        return g.constant(np.ascontiguousarray(move(x.array)), x.dtype)
    if 0 in shape:
        raise Inexpressible("a value without elements")
    reason = None
    if direct is not None:
        try:
            return direct()
        except Inexpressible as e:
            reason = e
    if max(x.size, math.prod(shape)) > MOVED_MAX:
        raise reason or Inexpressible(f"a movement of more than {MOVED_MAX} elements")
    g.charge(4 * (x.size + math.prod(shape)))
    places = move(np.arange(x.size, dtype=np.int32).reshape(x.shape))
    return g.tensor(g.taken(g.form(x), places), x.dtype, shape, limits=x.limits)


# Shapes


def _reshaped(g: GraphWriter, x: Tensor, shape: Shape) -> Tensor:
    if x.shape == shape:
        return x
    if x.array is not None:
        if not x.array.flags.c_contiguous:
            g.charge(x.array.nbytes)  # A view, such as one number repeated, is copied.
        return g.constant(x.array.reshape(shape), x.dtype)
    return g.tensor(g.reshaped(g.form(x), stored_shape(shape)), x.dtype, shape, limits=x.limits)


def reshape(g: GraphWriter, op: Operator) -> Tensor:
    x = op.input(0)
    wanted = op.numbers(1, "the shape") if op.version >= 5 else op.integers("shape") or []
    if len(wanted) > FILE_RANK_MAX:
        op.refuse("shape", f"at most {FILE_RANK_MAX} axes", len(wanted))
    keeps_zero = bool(op.integer("allowzero", 0))
    shape = list(wanted)
    for axis, extent in enumerate(wanted):
        if extent == 0 and not keeps_zero:
            if axis >= x.rank:
                op.refuse("shape", f"at most {x.rank} axes that stay", wanted)
            shape[axis] = x.shape[axis]
    rest = math.prod(extent for extent in shape if extent != -1)
    if shape.count(-1) == 1 and rest and x.size % rest == 0:
        shape[shape.index(-1)] = x.size // rest
    if any(extent < 0 for extent in shape) or math.prod(shape) != x.size:
        op.refuse("shape", f"{x.size} elements", wanted)
    return _reshaped(g, x, tuple(shape))


def flatten(g: GraphWriter, op: Operator) -> Tensor:
    x = op.input(0)
    axis = op.integer("axis", 1)
    if not -x.rank <= axis <= x.rank:
        op.refuse("axis", f"an axis from {-x.rank} to {x.rank}", axis)
    axis = axis + x.rank if axis < 0 else axis
    return _reshaped(g, x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def _axes(op: Operator, position: int, first_version: int) -> list[int] | None:
    """The axes, an input of newer versions and an attribute of older ones; None if they are omitted."""
    if op.version >= first_version:
        return op.numbers(position, "the axes") if op.has(position) else None
    return op.integers("axes")


def squeeze(g: GraphWriter, op: Operator) -> Tensor:
    x = op.input(0)
    given = _axes(op, 1, 13)
    axes = [a for a, extent in enumerate(x.shape) if extent == 1] if given is None else op.axes(given, x.rank)
    if any(x.shape[axis] != 1 for axis in axes):
        op.refuse("axes", "axes of extent 1", f"{given} of {list(x.shape)}")
    return _reshaped(g, x, tuple(extent for axis, extent in enumerate(x.shape) if axis not in axes))


def unsqueeze(g: GraphWriter, op: Operator) -> Tensor:
    x = op.input(0)
    given = _axes(op, 1, 13)
    if given is None:
        op.refuse("axes", "some", "none")
    rank = x.rank + len(given)
    axes = op.axes(given, rank)
    rest = iter(x.shape)
    return _reshaped(g, x, tuple(1 if axis in axes else next(rest) for axis in range(rank)))


def transpose(g: GraphWriter, op: Operator) -> Tensor:
    """Rename the order of the axes; an operation is written only when another operation needs a different form."""
    x = op.input(0)
    given = op.integers("perm")
    permutation = tuple(reversed(range(x.rank))) if given is None else tuple(given)
    if sorted(permutation) != list(range(x.rank)):
        op.refuse("attribute 'perm'", f"a permutation of {x.rank} axes", list(permutation))
    return transposed(g, x, permutation)


def transposed(g: GraphWriter, x: Tensor, permutation: Order) -> Tensor:
    """A tensor whose axis ``i`` is axis ``permutation[i]``."""
    if x.array is not None:
        return g.constant(x.array.transpose(permutation), x.dtype)

    def renamed(order: Order) -> Order:
        return tuple(permutation.index(axis) for axis in order)

    result = Tensor(x.dtype, ordered(x.shape, permutation), order=renamed(x.order), limits=x.limits)
    result.forms = {renamed(order): value for order, value in x.forms.items()}
    return result


# One axis


def _view(g: GraphWriter, x: Tensor, axis: int, order: Order) -> tuple[Value, int, Shape]:
    """A form, the position of an axis in it, and its shape: at most ``RANK_MAX`` axes, or merged to [outer, axis, inner]."""
    shape = ordered(x.shape, order)
    place = order.index(axis)
    value = g.form(x, order)
    if x.rank <= RANK_MAX:
        return value, place, shape
    merged = (math.prod(shape[:place]), shape[place], math.prod(shape[place + 1 :]))
    return g.reshaped(value, merged), 1, merged


def _from_view(g: GraphWriter, x: Tensor, value: Value, shape: Shape, order: Order) -> Tensor:
    whole = g.reshaped(value, stored_shape(ordered(shape, order)))
    return g.tensor(whole, x.dtype, shape, order=order, limits=x.limits)


def concat(g: GraphWriter, op: Operator) -> Tensor:
    given = op.given()
    first = given[0]
    axis = op.axis(op.integer("axis", 1 if op.version < 4 else None), first.rank)
    for tensor in given:
        rest = [(a, b) for i, (a, b) in enumerate(zip(tensor.shape, first.shape)) if i != axis]
        if tensor.rank != first.rank or tensor.dtype != first.dtype or any(a != b for a, b in rest):
            op.refuse(
                "inputs",
                f"values like {first.dtype} {list(first.shape)}",
                f"{tensor.dtype} {list(tensor.shape)}",
            )
    tensors = [t for t in given if t.shape[axis]] or given[:1]
    if len(tensors) == 1:
        return tensors[0]
    shape = (*first.shape[:axis], sum(t.shape[axis] for t in tensors), *first.shape[axis + 1 :])
    arrays = [t.array for t in tensors if t.array is not None]
    if len(arrays) == len(tensors):
        g.charge(math.prod(shape) * arrays[0].itemsize)
        return g.constant(np.concatenate(arrays, axis), first.dtype)
    low, high = min(t.limits[0] for t in tensors), max(t.limits[1] for t in tensors)
    order = next((t.order for t in tensors if t.array is None and not t.is_plain), tuple(range(first.rank)))
    views = [_view(g, t, axis, order) for t in tensors]
    for view in views:
        if (
            view[0].operand.scale != views[0][0].operand.scale
            or view[0].operand.zero_point != views[0][0].operand.zero_point
        ):
            raise Inexpressible("quantised values of different scales")
    value = joined(g, [view[0] for view in views], views[0][1])
    result = _from_view(g, first, value, shape, order)
    result.limits = (low, high)
    return result


def joined(g: GraphWriter, values: list[Value], axis: int) -> Value:
    """CONCATENATION; for whole numbers, which it does not accept, SELECT between values that are extended to the result's
    extent."""
    kind = values[0].operand.type
    if kind == OperandType.TENSOR_BOOL8:
        return g.as_truth(joined(g, [g.as_bytes(value) for value in values], axis))
    if kind != OperandType.TENSOR_INT32:
        return g.emit(OperationType.CONCATENATION, [*values, axis])
    extents = [value.operand.dimensions[axis] for value in values]
    total = sum(extents)
    dimensions = tuple(total if a == axis else e for a, e in enumerate(values[0].operand.dimensions))
    across = tuple(total if a == axis else 1 for a in range(len(dimensions)))
    start, whole = 0, None
    for value, extent in zip(values, extents, strict=True):
        numbers = g.counted(total)
        places = np.clip(numbers - start, 0, extent - 1).astype(np.int32)
        stretched = g.emit(OperationType.GATHER, [value, axis, g.constant_value(places)])
        if whole is None:
            whole = stretched
        else:
            mask = np.broadcast_to((numbers >= start).reshape(across), dimensions)
            whole = g.emit(
                OperationType.SELECT, [g.constant_value(mask), stretched, whole], stretched.operand
            )
        start += extent
    assert whole is not None, "there are at least two values"
    return whole


def sliced(g: GraphWriter, x: Tensor, axis: int, start: int, extent: int) -> Tensor:
    """``extent`` neighbouring elements along one axis from ``start`` on."""
    shape = (*x.shape[:axis], extent, *x.shape[axis + 1 :])
    if shape == x.shape:
        return x

    def direct() -> Tensor:
        value, place, view = _view(g, x, axis, x.order)
        starts = [start if a == place else 0 for a in range(len(view))]
        sizes = [extent if a == place else e for a, e in enumerate(view)]
        part = g.emit(OperationType.SLICE, [value, g.int32s(starts), g.int32s(sizes)])
        return _from_view(g, x, part, shape, x.order)

    index = (slice(None),) * axis + (slice(start, start + extent),)
    return moved(g, x, shape, lambda array: array[index], direct)


def split(g: GraphWriter, op: Operator) -> list[Tensor]:
    x = op.input(0)
    axis = op.axis(op.integer("axis", 0), x.rank)
    extent = x.shape[axis]
    if op.version >= 13:
        sizes = op.numbers(1, "the sizes") if op.has(1) else None
    else:
        sizes = op.integers("split")
    count = len(op.node.outputs)
    if op.version >= 18:
        count = op.integer("num_outputs", count)
    if count != len(op.node.outputs):
        op.refuse("number of outputs", count, len(op.node.outputs))
    if sizes is None:
        each = -(-extent // count)
        sizes = [each] * (count - 1) + [extent - each * (count - 1)]
    if sum(sizes) != extent or len(sizes) != count or min(sizes) < 0:
        op.refuse("sizes", f"{count} that give {extent}", sizes)
    if len(set(sizes)) == 1 and x.array is None and x.dtype != "bool":
        value, place, _ = _view(g, x, axis, x.order)
        parts = g.emit_all(OperationType.SPLIT, [value, place, count], [None] * count)
        shape = (*x.shape[:axis], sizes[0], *x.shape[axis + 1 :])
        return [_from_view(g, x, part, shape, x.order) for part in parts]
    results, start = [], 0
    for position, size in enumerate(sizes):
        # An omitted output may be empty, which a written value may not be.
        results.append(sliced(g, x, axis, start, size) if op.wants(position) else x)
        start += size
    return results


def slice_(g: GraphWriter, op: Operator) -> Tensor:
    x = op.input(0)
    if op.version < 10:
        starts, ends = op.integers("starts") or [], op.integers("ends") or []
        axes, steps = op.integers("axes"), None
    else:
        starts, ends = op.numbers(1, "the starts"), op.numbers(2, "the ends")
        axes = op.numbers(3, "the axes") if op.has(3) else None
        steps = op.numbers(4, "the steps") if op.has(4) else None
    axes = op.axes(list(range(len(starts))) if axes is None else axes, x.rank)
    steps = [1] * len(axes) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        op.refuse(
            "slices",
            "as many starts, ends, axes and steps, none of them 0",
            f"{starts}, {ends}, {axes}, {steps}",
        )
    index = [slice(None)] * x.rank
    ranges = [range(extent) for extent in x.shape]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index[axis] = slice(start, end, step)
        ranges[axis] = range(*index[axis].indices(x.shape[axis]))
        if not ranges[axis] and step < 0:
            index[axis] = slice(0, 0)
    shape = tuple(map(len, ranges))

    def direct() -> Tensor:
        view = [ranges[axis] for axis in x.order]
        if x.rank > RANK_MAX:
            raise Inexpressible("more than four axes")
        value = g.form(x, x.order)
        begins, extents = [r.start for r in view], list(map(len, view))
        if all(r.step == 1 for r in view):
            value = g.emit(OperationType.SLICE, [value, g.int32s(begins), g.int32s(extents)])
        elif all(r.step > 0 for r in view):
            limits = [r.start + (len(r) - 1) * r.step + 1 for r in view]
            lists = [g.int32s(begins), g.int32s(limits), g.int32s([r.step for r in view])]
            value = g.emit(OperationType.STRIDED_SLICE, [value, *lists, 0, 0, 0])
        else:
            raise Inexpressible("steps back")
        return g.tensor(value, x.dtype, shape, order=x.order, limits=x.limits)

    if shape == x.shape and all(r.step == 1 for r in ranges):
        return x
    return moved(g, x, shape, lambda array: array[tuple(index)], direct)


def pad(g: GraphWriter, op: Operator) -> Tensor:
    """PAD_V2, MIRROR_PAD, or GATHER of the repeated elements."""
    x = op.input(0)
    mode = op.text("mode", "constant")
    if op.version < 11:
        pads, fill = op.integers("pads") or op.integers("paddings") or [], op.real("value", 0.0)
        axes = list(range(x.rank))
    else:
        pads = op.numbers(1, "the padding")
        fill = op.single(2, "the value").item() if op.has(2) else 0
        axes = op.axes(op.numbers(3, "the axes"), x.rank) if op.has(3) else list(range(x.rank))
    if len(pads) != 2 * len(axes):
        op.refuse("padding", f"{2 * len(axes)} numbers", len(pads))
    before, after = [0] * x.rank, [0] * x.rank
    for position, axis in enumerate(axes):
        before[axis], after[axis] = pads[position], pads[position + len(axes)]
    for axis in range(x.rank):
        if before[axis] < 0 or after[axis] < 0:
            start = max(0, -before[axis])
            extent = x.shape[axis] - start - max(0, -after[axis])
            if extent <= 0:
                raise Inexpressible("a padding that removes a whole axis")
            x = sliced(g, x, axis, start, extent)
    widths = [(max(0, b), max(0, a)) for b, a in zip(before, after, strict=True)]
    shape = tuple(e + sum(w) for e, w in zip(x.shape, widths, strict=True))
    if shape == x.shape:
        return x
    if mode == "constant":
        return _padded(g, x, widths, shape, fill)
    modes = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}
    if mode not in modes:
        op.refuse("attribute 'mode'", "constant, edge, reflect or wrap", mode)

    def direct() -> Tensor:
        if mode != "reflect" or x.rank > RANK_MAX:
            raise Inexpressible(f"padding of mode {mode}")
        value = g.form(x, x.order)
        table = g.constant_value(np.array([widths[axis] for axis in x.order], np.int32))
        result = g.emit(OperationType.MIRROR_PAD, [value, table, 0])
        return g.tensor(result, x.dtype, shape, order=x.order, limits=x.limits)

    def move(array: Array) -> Array:
        return np.pad(array, widths, mode=modes[mode])  # type: ignore[call-overload,no-any-return]

    return moved(g, x, shape, move, direct)


def _padded(g: GraphWriter, x: Tensor, widths: list[tuple[int, int]], shape: Shape, fill: float) -> Tensor:
    if x.array is not None:
        g.charge(math.prod(shape) * x.array.itemsize)
        return g.constant(np.pad(x.array, widths, constant_values=fill), x.dtype)
    is_real = x.numpy_type.kind == "f"
    low, high = x.limits if is_real else (min(x.limits[0], int(fill)), max(x.limits[1], int(fill)))
    if x.rank <= RANK_MAX and (is_real or x.dtype in ("uint8", "int8")):
        value = g.form(x, x.order)
        table = g.constant_value(np.array([widths[axis] for axis in x.order], np.int32))
        number = g.scalar(fill, value) if is_real else int(fill)
        value = g.emit(OperationType.PAD_V2, [value, table, number])
        return g.tensor(value, x.dtype, shape, order=x.order)
    g.charge(9 * math.prod(shape))
    places = np.pad(np.arange(x.size, dtype=np.int32).reshape(x.shape), widths, constant_values=-1)
    inside = g.constant_value(places >= 0)
    value = g.taken(g.form(x), np.maximum(places, 0))
    if x.dtype == "bool":
        kind = OperationType.LOGICAL_OR if fill else OperationType.LOGICAL_AND
        sides = [value, g.constant_value(places < 0) if fill else inside]
        return g.tensor(g.emit(kind, sides), x.dtype, shape)
    f = Formula(g, value)
    return g.tensor(Formula(g, inside).where(f, fill, f).value, x.dtype, shape, limits=(low, high))


def tile(g: GraphWriter, op: Operator) -> Tensor:
    x = op.input(0)
    factors = op.numbers(1, "the repetitions")
    if len(factors) != x.rank or any(factor < 0 for factor in factors):
        op.refuse("repetitions", f"{x.rank} of 0 or more", factors)
    shape = tuple(e * f for e, f in zip(x.shape, factors, strict=True))
    if x.rank == 0 or shape == x.shape:
        return x

    def direct() -> Tensor:
        if x.rank > RANK_MAX:
            raise Inexpressible("more than four axes")
        value = g.emit(
            OperationType.TILE, [g.form(x, x.order), g.int32s([factors[axis] for axis in x.order])]
        )
        return g.tensor(value, x.dtype, shape, order=x.order, limits=x.limits)

    if x.array is not None:
        g.charge(math.prod(shape) * x.array.itemsize)
    return moved(g, x, shape, lambda array: np.tile(array, factors), direct)


def expand(g: GraphWriter, op: Operator) -> Tensor:
    x = op.input(0)
    try:
        shape = np.broadcast_shapes(x.shape, tuple(op.numbers(1, "the shape")))
    except ValueError:
        op.refuse("shape", f"one that {list(x.shape)} broadcasts to", op.numbers(1, "the shape"))
    if shape == x.shape:
        return x
    if x.array is not None:
        if math.prod(shape) * x.array.itemsize >= 2**32:
            op.refuse("shape", "less than 2**32 bytes", list(shape))
        # A view, which takes no memory until it is used.
        return g.constant(np.broadcast_to(x.array, shape), x.dtype)
    if 0 in shape:
        raise Inexpressible("a value without elements")
    order = x.order if x.rank == len(shape) else tuple(range(len(shape)))
    return g.tensor(expanded(g, x, shape, order), x.dtype, shape, order=order, limits=x.limits)


def trilu(g: GraphWriter, op: Operator) -> Tensor:
    """SELECT between the value and 0."""
    x = op.input(0)
    upper = bool(op.integer("upper", 1))
    k = int(op.single(1, "k")) if op.has(1) else 0
    if x.rank < 2:
        op.refuse("input 0", "matrices", list(x.shape))
    g.charge(x.size * x.numpy_type.itemsize)
    rows, columns = x.shape[-2:]
    stays = (
        np.triu(np.ones((rows, columns), bool), k) if upper else np.tril(np.ones((rows, columns), bool), k)
    )
    if x.array is not None:
        return g.constant(np.where(stays, x.array, np.zeros((), x.array.dtype)), x.dtype)
    if x.size == 0:
        raise Inexpressible("a value without elements")
    mask = g.constant_value(np.broadcast_to(stays, x.shape))
    if x.dtype == "bool":
        return g.tensor(g.emit(OperationType.LOGICAL_AND, [g.form(x), mask]), x.dtype, x.shape)
    f = Formula(g, g.form(x))
    limits = (min(0, x.limits[0]), max(0, x.limits[1]))
    return g.tensor(Formula(g, mask).where(f, 0, f).value, x.dtype, x.shape, limits=limits)


def center_crop_pad(g: GraphWriter, op: Operator) -> Tensor:
    """SLICE of the middle where an axis becomes shorter, zeros at both ends where it becomes longer."""
    x = op.input(0)
    wanted = op.numbers(1, "the shape")
    given = op.integers("axes")
    axes = list(range(x.rank)) if given is None else op.axes(given, x.rank)
    if len(axes) != len(wanted) or min(wanted, default=1) < 1:
        op.refuse("shape", f"{len(axes)} extents", wanted)
    widths = [(0, 0)] * x.rank
    for axis, extent in zip(axes, wanted, strict=True):
        have = x.shape[axis]
        if extent < have:
            x = sliced(g, x, axis, (have - extent) // 2, extent)
        else:
            widths[axis] = ((extent - have) // 2, extent - have - (extent - have) // 2)
    shape = tuple(e + sum(w) for e, w in zip(x.shape, widths, strict=True))
    return x if shape == x.shape else _padded(g, x, widths, shape, 0)
