"""Normalisation, softmax and resizing.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aionn.hal import OperationType
from aionn.models.onnx.formula import Formula, activated, aligned, broadcasts_to, expanded
from aionn.models.onnx.operator import Convert, Operator
from aionn.models.onnx.tensors import RANK_MAX, Array, Inexpressible, Tensor, ordered, stored_shape
from aionn.models.onnx.writer import GraphWriter

__all__ = ["batch_normalization", "group_normalization", "instance_normalization", "layer_normalization",
           "lp_normalization", "lrn", "mean_variance_normalization", "resize", "rms_normalization",
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


def batch_normalization(g: GraphWriter, op: Operator) -> Tensor:
    """Constants of the convolution before, or MUL and ADD with constants that are computed from scale, bias, mean and variance."""
    x = op.input(0)
    _need_float(x)
    epsilon = op.real("epsilon", 1e-5)
    op.ignore("momentum")
    is_trained = op.version >= 7 or bool(op.integer("is_test", 0))
    if (
        not is_trained
        or op.integer("spatial", 1) != 1
        or op.integer("training_mode", 0)
        or any(op.wants(p) for p in range(1, len(op.node.outputs)))
    ):
        raise Inexpressible("training")
    if x.rank < 2:
        op.refuse("input 0", "at least two axes", list(x.shape))
    parts = [_channels(g, op, x, position) for position in range(1, 5)]
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


# Resizing


def resize(g: GraphWriter, op: Operator) -> Tensor:
    """RESIZE_BILINEAR of images where its result equals that of ONNX, else for each axis GATHER or a product with a constant
    matrix."""
    x = op.input(0)
    is_old = op.type == "Upsample" or op.version < 11
    mode = op.text("mode", "nearest")
    coordinates = op.text("coordinate_transformation_mode", "asymmetric" if is_old else "half_pixel")
    nearest = op.text("nearest_mode", "floor" if is_old else "round_prefer_floor")
    op.ignore("extrapolation_value")
    coefficient = op.real("cubic_coeff_a", -0.75)
    excludes = bool(op.integer("exclude_outside", 0))
    if op.integer("antialias", 0):
        raise Inexpressible("smoothing before shrinking (antialias)")
    given = op.integers("axes")
    axes = list(range(x.rank)) if given is None else op.axes(given, x.rank)
    scales, sizes = _targets(op, x, axes)
    op.ignore("keep_aspect_ratio_policy")
    if coordinates == "tf_crop_and_resize" or mode not in ("nearest", "linear", "cubic"):
        raise Inexpressible(f"mode {mode} {coordinates}")
    result = x
    images = _bilinear(g, x, scales, sizes, coordinates) if mode == "linear" else None
    if images is not None:
        return images
    for axis in range(x.rank):
        if sizes[axis] == x.shape[axis] and scales[axis] == 1:
            continue
        places = _coordinates(g, op, coordinates, sizes[axis], x.shape[axis], scales[axis])
        if mode == "nearest":
            result = _nearest(g, result, axis, places, nearest)
        else:
            result = _weighted(
                g, result, axis, places, coefficient if mode == "cubic" else None, excludes=excludes
            )
    return result


def _targets(op: Operator, x: Tensor, axes: list[int]) -> tuple[list[float], list[int]]:
    """For every axis its scale and its new extent."""
    scales, sizes = [1.0] * x.rank, list(x.shape)
    position = 1 if op.version < 11 or op.type == "Upsample" else 2
    if op.version < 9 and op.type == "Upsample":
        listed = op.reals("scales") or []
        array: Array | None = np.array(listed)
    else:
        array = op.array(position, "the scales") if op.has(position) else None
    if op.has(3) and (array is None or not array.size):
        wanted = op.numbers(3, "the sizes")
        if len(wanted) != len(axes) or min(wanted, default=1) < 1:
            op.refuse("sizes", f"{len(axes)} extents", wanted)
        policy = op.text("keep_aspect_ratio_policy", "stretch")
        ratios = [extent / x.shape[axis] for axis, extent in zip(axes, wanted, strict=True)]
        if policy != "stretch":
            if policy not in ("not_larger", "not_smaller"):
                op.refuse("attribute 'keep_aspect_ratio_policy'", "one that is known", policy)
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            ratios = [ratio] * len(axes)
            wanted = [math.floor(ratio * x.shape[axis] + 0.5) for axis in axes]
        for axis, extent, ratio in zip(axes, wanted, ratios, strict=True):
            sizes[axis], scales[axis] = extent, ratio
        return scales, sizes
    if array is None or array.size != len(axes) or not (array > 0).all():
        op.refuse("scales", f"{len(axes)} positive numbers", array)
    for axis, scale in zip(axes, array.tolist(), strict=True):
        scales[axis], sizes[axis] = scale, math.floor(x.shape[axis] * scale)
        if not 0 < sizes[axis] < 2**31:
            op.refuse("scales", "results of some size", scale)
    return scales, sizes


def _coordinates(g: GraphWriter, op: Operator, mode: str, size: int, extent: int, scale: float) -> Array:
    """The coordinate in the input of each output."""
    places = g.counted(size).astype(np.float64)
    if mode == "half_pixel":
        return (places + 0.5) / scale - 0.5
    if mode == "asymmetric":
        return places / scale
    if mode == "align_corners":
        # The specification uses the exact length, which need not be whole; if sizes are given, it is the new extent.
        length = scale * extent
        return places * ((extent - 1) / (length - 1) if size > 1 else 0)
    if mode == "pytorch_half_pixel":
        return (places + 0.5) / scale - 0.5 if size > 1 else places * 0
    if mode == "half_pixel_symmetric":
        adjustment = size / (scale * extent)
        return extent / 2 * (1 - adjustment) + (places + 0.5) / scale - 0.5
    if mode == "tf_half_pixel_for_nn":
        return (places + 0.5) / scale
    op.refuse("attribute 'coordinate_transformation_mode'", "one that is known", mode)


def _nearest(g: GraphWriter, x: Tensor, axis: int, places: Array, mode: str) -> Tensor:
    """The nearest elements along an axis, by GATHER."""
    extent = x.shape[axis]
    rounded = {
        "floor": np.floor(places),
        "ceil": np.ceil(places),
        "round_prefer_floor": np.ceil(places - 0.5),
        "round_prefer_ceil": np.floor(places + 0.5),
    }.get(mode)
    if rounded is None:
        raise Inexpressible(f"nearest mode {mode}")
    if x.rank > RANK_MAX:
        raise Inexpressible("more than four axes")
    indices = np.clip(rounded, 0, extent - 1).astype(np.int32)
    shape = (*x.shape[:axis], places.size, *x.shape[axis + 1 :])
    value = g.emit(OperationType.GATHER, [g.form(x, x.order), x.order.index(axis), g.constant_value(indices)])
    return g.tensor(value, x.dtype, shape, order=x.order, limits=x.limits)


def _shares(places: Array, coefficient: float | None) -> list[tuple[int, Array]]:
    """The weight of each element around a coordinate, by its offset from the element below: linear, or cubic with a coefficient."""
    t = places - np.floor(places)
    if coefficient is None:
        return [(0, 1 - t), (1, t)]
    a = coefficient

    def far(s: Array) -> Array:
        return ((a * s - 5 * a) * s + 8 * a) * s - 4 * a

    def near(s: Array) -> Array:
        return ((a + 2) * s - (a + 3)) * s * s + 1

    return [(-1, far(t + 1)), (0, near(t)), (1, near(1 - t)), (2, far(2 - t))]


def _weighted(
    g: GraphWriter, x: Tensor, axis: int, places: Array, coefficient: float | None, *, excludes: bool
) -> Tensor:
    """Weighted sums of the elements around each coordinate along an axis: a product with a constant matrix."""
    extent, size = x.shape[axis], places.size
    _need_float(x)
    g.charge(8 * extent * size)
    below = np.floor(places)
    weights = np.zeros((extent, size))
    columns = np.arange(size)
    for offset, share in _shares(places, coefficient):
        inside = np.clip(below + offset, 0, extent - 1)
        if excludes:
            share = np.where(inside == below + offset, share, 0)
        np.add.at(weights, (inside.astype(np.int64), columns), share)
    if excludes:
        weights /= weights.sum(0)
    # With the axis last, a product with the matrix of weights gives the new elements.
    rest = (*(a for a in x.order if a != axis), axis)
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    rows = g.reshaped(g.form(x, rest), (x.size // extent, extent))
    matrix = g.constant_value(np.ascontiguousarray(weights.T.astype(x.numpy_type)))
    value = g.emit(OperationType.FULLY_CONNECTED, [rows, matrix, g.like(0.0, rows, (size,)), 0])
    return g.tensor(g.reshaped(value, stored_shape(ordered(shape, rest))), x.dtype, shape, order=rest)


def _bilinear(
    g: GraphWriter, x: Tensor, scales: list[float], sizes: list[int], coordinates: str
) -> Tensor | None:
    """RESIZE_BILINEAR of images if the HAL uses the same coordinates, else None."""
    if x.rank != 4 or not x.is_float or sizes[:2] != list(x.shape[:2]):
        return None
    if any(
        abs(size - scale * extent) > 1e-6 * size
        for size, scale, extent in zip(sizes, scales, x.shape, strict=True)
    ):
        return None
    if coordinates == "pytorch_half_pixel" and min(sizes[2:]) > 1:
        coordinates = "half_pixel"
    if coordinates == "align_corners" and min(sizes[2:]) < 2:
        return None
    flags = {"half_pixel": (False, True), "asymmetric": (False, False), "align_corners": (True, False)}.get(
        coordinates
    )
    if flags is None:
        return None
    value = g.emit(OperationType.RESIZE_BILINEAR, [g.form(x, LAST), sizes[3], sizes[2], False, *flags])
    return g.tensor(value, x.dtype, tuple(sizes), order=LAST)
