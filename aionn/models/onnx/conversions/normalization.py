"""Normalisation and softmax.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aionn.hal import OperationType
from aionn.models.onnx.formula import Formula, activated, aligned, broadcasts_to, expanded
from aionn.models.onnx.operator import Convert, Operator
from aionn.models.onnx.tensors import RANK_MAX, Inexpressible, Tensor, ordered, stored_shape
from aionn.models.onnx.writer import GraphWriter

__all__ = ["batch_normalization", "group_normalization", "instance_normalization", "layer_normalization",
           "lp_normalization", "lrn", "mean_variance_normalization", "rms_normalization",
           "softmax"]  # fmt: skip

LAST = (0, 2, 3, 1)


def _need_float(x: Tensor) -> None:
    if not x.is_float:
        raise Inexpressible(f"values of type {x.dtype}")


def _channels(g: GraphWriter, op: Operator, x: Tensor, position: int) -> Tensor:
    """An input with a number for each channel, in a shape that broadcasts along axis 1."""
    tensor = op.input(position)
    if tensor.shape != (x.shape[1],):
        op.refuse(f"input {position}", [x.shape[1]], list(tensor.shape))
    shape = (x.shape[1], *(1,) * (x.rank - 2))
    if tensor.array is not None:
        return g.constant(tensor.array.reshape(shape), tensor.dtype)
    return g.tensor(g.reshaped(g.form(tensor), stored_shape(shape)), tensor.dtype, shape)


def batch_normalization(g: GraphWriter, op: Operator) -> Tensor | list[Tensor]:
    """Constants of the convolution before, or MUL and ADD with constants that are computed from scale, bias, mean and variance."""
    x = op.input(0)
    _need_float(x)
    epsilon, momentum = op.real("epsilon", 1e-5), op.real("momentum", 0.9)
    is_trained = op.version >= 7 or bool(op.integer("is_test", 0))
    trains, more = bool(op.integer("training_mode", 0)), any(map(op.wants, range(1, len(op.node.outputs))))
    if not is_trained or op.integer("spatial", 1) != 1 or (more and not trains):
        raise Inexpressible("training")
    if x.rank < 2:
        op.refuse("input 0", "at least two axes", list(x.shape))
    parts = [_channels(g, op, x, position) for position in range(1, 5)]
    if trains:
        return _batch_statistics(g, op, x, parts, epsilon, momentum)
    arrays = [part.array for part in parts]
    if all(array is not None for array in arrays):
        g.charge(8 * x.shape[1])
        scale, bias, mean, variance = (np.asarray(array, np.float64) for array in arrays)
        factor = scale / np.sqrt(variance + epsilon)
        if x.rescaled is not None and op.is_sole_reader:
            return x.rescaled(factor.reshape(-1), (bias - mean * factor).reshape(-1), op.activation)
        parts = [g.constant(a.astype(x.numpy_type)) for a in (factor, bias - mean * factor)]
        both = aligned(g, op, [x, *parts])
        f, factors, offsets = both.formulas()
        scaled = (f * factors).value
        return both.tensor(g.emit(OperationType.ADD, [scaled, offsets.value, int(op.activation)]), x.dtype)
    both = aligned(g, op, [x, *parts])
    f, scale_, bias_, mean_, variance_ = both.formulas()
    total = (f - mean_) * (scale_ / (variance_ + epsilon).sqrt()) + bias_
    return both.tensor(activated(g, total.value, op.activation), x.dtype)


def _batch_statistics(
    g: GraphWriter, op: Operator, x: Tensor, parts: list[Tensor], epsilon: float, momentum: float
) -> list[Tensor]:
    """The batch normalised by its own mean and variance, and the new running mean and variance. Float16 is computed in float32."""
    if x.dtype != "float32" or any(part.dtype != "float32" for part in parts):
        raise Inexpressible(f"training with values of type {x.dtype}")
    rank, channels = x.rank, x.shape[1]
    # Channels come first, so that one axis is left to reduce.
    order = (1, 0, *range(2, rank))
    rows = Formula(g, g.reshaped(g.form(x, order), (channels, x.size // channels)))
    columns = [Formula(g, g.reshaped(g.form(part), (channels, 1))) for part in parts]
    mean = rows.reduced(OperationType.MEAN, [1])
    centred = rows - mean
    variance = (centred * centred).reduced(OperationType.MEAN, [1])
    scale, bias, *running = columns
    result = centred / (variance + epsilon).sqrt() * scale + bias
    whole = activated(g, g.reshaped(result.value, stored_shape(ordered(x.shape, order))), op.activation)
    outputs = [g.tensor(whole, x.dtype, x.shape, order=order)]
    for own, current in zip(running, (mean, variance), strict=True):
        updated = own * momentum + current * (1 - momentum)
        outputs.append(g.tensor(g.reshaped(updated.value, (channels,)), x.dtype, (channels,)))
    return outputs


def _normalized(x: Formula, axes: Sequence[int], epsilon: float, *, keeps_mean: bool = False) -> Formula:
    centred = x if keeps_mean else x - x.reduced(OperationType.MEAN, axes)
    variance = (centred * centred).reduced(OperationType.MEAN, axes)
    return centred / (variance + epsilon).sqrt()


def _rows(g: GraphWriter, x: Tensor, axis: int) -> Formula:
    """The value as rows of all axes from ``axis`` on; float16 becomes float32, in which the specification computes."""
    inner = math.prod(x.shape[axis:])
    f = Formula(g, g.reshaped(g.form(x), (x.size // inner, inner)))
    return f.cast(g.described("float32")) if x.dtype == "float16" else f


def _from_rows(
    g: GraphWriter, x: Tensor, rows: Formula, factors: Sequence[Tensor | None], axis: int
) -> Tensor:
    """The rows multiplied by the first factor plus the second one; both broadcast to the inner axes."""
    inner = x.shape[axis:]
    if x.dtype == "float16":
        rows = rows.cast(g.described("float16"))
    for position, factor in enumerate(factors):
        if factor is None:
            continue
        if not broadcasts_to(factor.shape, inner):
            raise Inexpressible("a scale that does not broadcast to the normalised axes")
        value = g.form(factor) if factor.size == 1 else expanded(g, factor, inner)
        other = Formula(g, g.reshaped(value, (1 if factor.size == 1 else math.prod(inner),)))
        rows = rows * other if position == 0 else rows + other
    return g.tensor(g.reshaped(rows.value, stored_shape(x.shape)), x.dtype, x.shape)


def layer_normalization(g: GraphWriter, op: Operator) -> list[Tensor]:
    x = op.input(0)
    _need_float(x)
    axis = op.axis(op.integer("axis", -1), x.rank)
    epsilon = op.real("epsilon", 1e-5)
    op.ignore("stash_type")
    rows = _rows(g, x, axis)
    mean = rows.reduced(OperationType.MEAN, [1])
    centred = rows - mean
    inverse = 1 / ((centred * centred).reduced(OperationType.MEAN, [1]) + epsilon).sqrt()
    factors = [op.input(1), op.input(2) if op.has(2) else None]
    result = [_from_rows(g, x, centred * inverse, factors, axis)]
    shape = (*x.shape[:axis], *(1,) * (x.rank - axis))
    for position, statistic in ((1, mean), (2, inverse)):
        if op.wants(position):
            result.append(g.tensor(g.reshaped(statistic.value, stored_shape(shape)), "float32", shape))
        else:
            result.append(x)
    return result


def rms_normalization(g: GraphWriter, op: Operator) -> Tensor:
    x = op.input(0)
    _need_float(x)
    axis = op.axis(op.integer("axis", -1), x.rank)
    op.ignore("stash_type")
    rows = _normalized(_rows(g, x, axis), [1], op.real("epsilon", 1e-5), keeps_mean=True)
    return _from_rows(g, x, rows, [op.input(1)], axis)


def group_normalization(g: GraphWriter, op: Operator) -> Tensor:
    """Normalise each group of channels; scale and bias are given for each channel, before version 21 for each group."""
    x = op.input(0)
    _need_float(x)
    groups, epsilon = op.integer("num_groups"), op.real("epsilon", 1e-5)
    op.ignore("stash_type")
    n, c = x.shape[:2]
    if groups < 1 or c % groups:
        op.refuse("attribute 'num_groups'", f"a divisor of {c}", groups)
    f = Formula(g, g.reshaped(g.form(x), (n, groups, x.size // (n * groups))))
    f = f.cast(g.described("float32")) if x.dtype == "float16" else f
    f = _normalized(f, [2], epsilon)
    f = f.cast(g.described("float16")) if x.dtype == "float16" else f
    per_group = op.version < 21
    count = groups if per_group else c
    f = Formula(g, g.reshaped(f.value, (n, count, x.size // (n * count))))
    for position in (1, 2):
        factor = op.input(position)
        if factor.shape != (count,):
            op.refuse(f"input {position}", [count], list(factor.shape))
        other = Formula(g, g.reshaped(g.form(factor), (count, 1)))
        f = f * other if position == 1 else f + other
    return g.tensor(g.reshaped(f.value, stored_shape(x.shape)), x.dtype, x.shape)


def instance_normalization(g: GraphWriter, op: Operator) -> Tensor:
    """INSTANCE_NORMALIZATION for images, else the same as a formula; then scale and bias for each channel."""
    x = op.input(0)
    _need_float(x)
    epsilon = op.real("epsilon", 1e-5)
    op.ignore("consumed_inputs")
    if x.rank == 4:
        value = g.form(x, LAST)
        arguments = [g.scalar(number, value) for number in (1.0, 0.0, epsilon)]
        normal = g.tensor(
            g.emit(OperationType.INSTANCE_NORMALIZATION, [value, *arguments, False]),
            x.dtype,
            x.shape,
            order=LAST,
        )
    else:
        merged = (*x.shape[:2], math.prod(x.shape[2:]))
        f = _normalized(Formula(g, g.reshaped(g.form(x), merged)), [2], epsilon)
        normal = g.tensor(g.reshaped(f.value, stored_shape(x.shape)), x.dtype, x.shape)
    both = aligned(g, op, [normal, _channels(g, op, x, 1), _channels(g, op, x, 2)])
    f, scale, bias = both.formulas()
    return both.tensor(f * scale + bias, x.dtype)


def mean_variance_normalization(g: GraphWriter, op: Operator) -> Tensor:
    """(x - mean) / (deviation + 1e-9)."""
    x = op.input(0)
    _need_float(x)
    axes = op.axes(op.integers("axes") or [0, 2, 3], x.rank)
    if x.rank > RANK_MAX:
        raise Inexpressible("more than four axes")
    places = [place for place, axis in enumerate(x.order) if axis in axes]
    f = Formula(g, g.form(x, x.order))
    centred = f - f.reduced(OperationType.MEAN, places)
    deviation = (centred * centred).reduced(OperationType.MEAN, places).sqrt()
    return g.tensor((centred / (deviation + 1e-9)).value, x.dtype, x.shape, order=x.order)


def lrn(g: GraphWriter, op: Operator) -> Tensor:
    x, size = op.input(0), op.integer("size")
    if size < 1 or size % 2 == 0:
        raise Inexpressible(f"a window of {size} channels, which has no middle")
    alpha, beta, bias = op.real("alpha", 1e-4), op.real("beta", 0.75), op.real("bias", 1.0)
    if x.rank > RANK_MAX:
        raise Inexpressible("more than four axes")
    value = g.form(x, x.order)
    numbers = [g.scalar(number, value) for number in (bias, alpha / size, beta)]
    place = x.order.index(1)
    value = g.emit(OperationType.LOCAL_RESPONSE_NORMALIZATION, [value, (size - 1) // 2, *numbers, place])
    return g.tensor(value, x.dtype, x.shape, order=x.order)


def lp_normalization(g: GraphWriter, op: Operator) -> Tensor:
    """The value divided by its norm along an axis; the result is 0 where the norm is 0."""
    x = op.input(0)
    _need_float(x)
    axis, p = op.axis(op.integer("axis", -1), x.rank), op.integer("p", 2)
    if x.rank > RANK_MAX or p not in (1, 2):
        raise Inexpressible("more than four axes, or another norm than 1 and 2")
    place = x.order.index(axis)
    f = Formula(g, g.form(x, x.order))
    inner = abs(f) if p == 1 else f * f
    norm = inner.reduced(OperationType.REDUCE_SUM, [place])
    norm = norm if p == 1 else norm.sqrt()
    divisor = norm.equal(0).where(1, norm, norm)
    return g.tensor((f / divisor).value, x.dtype, x.shape, order=x.order)


def softmax(kind: OperationType) -> Convert:
    """SOFTMAX or LOG_SOFTMAX along an axis; before version 13 over all axes from one on."""

    def convert(g: GraphWriter, op: Operator) -> Tensor:
        x = op.input(0)
        _need_float(x)
        axis = op.axis(op.integer("axis", -1 if op.version >= 13 else 1), x.rank or 1)
        value = g.form(x, x.order)
        one = g.scalar(1.0, value)
        if op.version < 13 and axis != x.rank - 1:
            rows = g.reshaped(g.form(x), (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
            value = g.reshaped(g.emit(kind, [rows, one, 1]), stored_shape(x.shape))
            return g.tensor(value, x.dtype, x.shape)
        place = x.order.index(axis) if x.rank else 0
        if x.rank <= RANK_MAX:
            return g.tensor(g.emit(kind, [value, one, place]), x.dtype, x.shape, order=x.order)
        shape = ordered(x.shape, x.order)
        merged = (math.prod(shape[:place]), shape[place], math.prod(shape[place + 1 :]))
        value = g.emit(kind, [g.reshaped(value, merged), one, 1])
        return g.tensor(g.reshaped(value, stored_shape(shape)), x.dtype, x.shape, order=x.order)

    return convert
