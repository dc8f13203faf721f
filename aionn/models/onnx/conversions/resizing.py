"""Resizing: RESIZE_BILINEAR where its result equals ONNX's, else each axis by itself, by GATHER or a product with weights.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math

import numpy as np

from aionn.hal import OperationType
from aionn.models.onnx.operator import Operator
from aionn.models.onnx.tensors import RANK_MAX, Array, Inexpressible, Tensor, ordered, stored_shape
from aionn.models.onnx.writer import GraphWriter

__all__ = ["resize"]

LAST = (0, 2, 3, 1)

WHOLE = (0.0, 1.0)
"""The region that is a whole axis."""

REGION_MAX = 1 << 16
"""The largest share of an axis at which a region may begin or end; a region that is useful has numbers of about 0 to 1."""

STEP_BYTES = 64
"""Memory for each weight of each coordinate: its distance, share and place, and what these are computed from."""


def resize(g: GraphWriter, op: Operator) -> Tensor:
    """RESIZE_BILINEAR of images where its result equals that of ONNX, else for each axis GATHER or a product with a constant
    matrix."""
    x = op.input(0)
    is_old = op.type == "Upsample" or op.version < 11
    mode = op.text("mode", "nearest")
    coordinates = op.text("coordinate_transformation_mode", "asymmetric" if is_old else "half_pixel")
    nearest = op.text("nearest_mode", "floor" if is_old else "round_prefer_floor")
    is_crop = coordinates == "tf_crop_and_resize"
    outside = op.real("extrapolation_value", 0.0)
    coefficient = op.real("cubic_coeff_a", -0.75)
    excludes = bool(op.integer("exclude_outside", 0))
    smooths = bool(op.integer("antialias", 0)) and mode != "nearest"
    given = op.integers("axes")
    axes = list(range(x.rank)) if given is None else op.axes(given, x.rank)
    scales, sizes = _targets(op, x, axes)
    op.ignore("keep_aspect_ratio_policy")
    if mode not in ("nearest", "linear", "cubic"):
        raise Inexpressible(f"mode {mode}")
    regions = _regions(op, x, axes) if is_crop else [WHOLE] * x.rank
    result = x
    is_plain = mode == "linear" and not smooths
    images = _bilinear(g, x, scales, sizes, coordinates) if is_plain else None
    if images is not None:
        return images
    for axis in range(x.rank):
        if sizes[axis] == x.shape[axis] and scales[axis] == 1 and regions[axis] == WHOLE:
            continue
        places = _coordinates(g, op, coordinates, sizes[axis], x.shape[axis], scales[axis], regions[axis])
        beyond = is_crop & ((places < 0) | (places > x.shape[axis] - 1))
        if mode == "nearest":
            if beyond.any():
                raise Inexpressible("the nearest elements of a region beyond the image")
            result = _nearest(g, result, axis, places, nearest)
            continue
        shrinks = min(scales[axis], 1.0) if smooths else 1.0
        weights = _weights(
            g, places, x.shape[axis], coefficient if mode == "cubic" else None, shrinks, excludes=excludes
        )
        result = _weighted(g, result, axis, np.where(beyond, 0, weights), np.where(beyond, outside, 0))
    return result


def _regions(op: Operator, x: Tensor, axes: list[int]) -> list[tuple[float, float]]:
    """For every axis the begin and the end of the region that is resized, as shares of its length."""
    numbers = op.array(1, "the region").reshape(-1)
    if numbers.size != 2 * len(axes):
        op.refuse("region", f"{2 * len(axes)} numbers", numbers.size)
    regions = [WHOLE] * x.rank
    for position, axis in enumerate(axes):
        begin, end = float(numbers[position]), float(numbers[position + len(axes)])
        if not max(abs(begin), abs(end)) < REGION_MAX:
            op.refuse("region", f"numbers below {REGION_MAX}", f"{begin} to {end}")
        regions[axis] = begin, end
    return regions


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


def _coordinates(
    g: GraphWriter,
    op: Operator,
    mode: str,
    size: int,
    extent: int,
    scale: float,
    region: tuple[float, float],
) -> Array:
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
    if mode == "tf_crop_and_resize":
        begin, end = region
        if size == 1:
            return places * 0 + (begin + end) * (extent - 1) / 2
        return begin * (extent - 1) + places * (end - begin) * (extent - 1) / (scale * extent - 1)
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


def _weights(
    g: GraphWriter, places: Array, extent: int, coefficient: float | None, shrinks: float, *, excludes: bool
) -> Array:
    """The weight of each element for each coordinate, [elements, coordinates].

    Args:
        g: The writer.
        places: The coordinates.
        extent: Number of elements.
        coefficient: That of cubic weights; None means linear ones.
        shrinks: Less than 1 makes the weights wider, so that shrinking leaves no element out.
        excludes: Whether elements beyond the ends count nothing; otherwise they are copies of the ends.
    """
    first = math.floor(-(1 if coefficient is None else 2) / shrinks) + 1
    steps = np.arange(first, 2 - first)[:, None]
    g.charge(8 * extent * places.size + STEP_BYTES * steps.size * places.size)
    below = np.floor(places)
    distances = np.abs(steps - (places - below)) * shrinks
    shares = np.maximum(0, 1 - distances) if coefficient is None else _cubic(distances, coefficient)
    if shrinks < 1:
        shares = shares / shares.sum(0)
    wanted = below + steps
    inside = np.clip(wanted, 0, extent - 1)
    if excludes:
        shares = np.where(inside == wanted, shares, 0)
        shares = shares / shares.sum(0)
    weights = np.zeros((extent, places.size))
    columns = np.broadcast_to(np.arange(places.size), inside.shape)
    np.add.at(weights, (inside.astype(np.int64), columns), shares)
    return weights


def _cubic(distances: Array, a: float) -> Array:
    near = ((a + 2) * distances - (a + 3)) * distances**2 + 1
    far = ((a * distances - 5 * a) * distances + 8 * a) * distances - 4 * a
    return np.where(distances <= 1, near, np.where(distances < 2, far, 0))


def _weighted(g: GraphWriter, x: Tensor, axis: int, weights: Array, offsets: Array) -> Tensor:
    """Weighted sums of the elements along an axis, plus an offset for each: a product with a constant matrix."""
    if not x.is_float:
        raise Inexpressible(f"values of type {x.dtype}")
    extent, size = weights.shape
    # With the axis last, a product with the matrix of weights gives the new elements.
    rest = (*(a for a in x.order if a != axis), axis)
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    rows = g.reshaped(g.form(x, rest), (x.size // extent, extent))
    matrix = g.constant_value(np.ascontiguousarray(weights.T.astype(x.numpy_type)), x.dtype)
    bias = g.constant_value(offsets.astype(x.numpy_type), x.dtype)
    value = g.emit(OperationType.FULLY_CONNECTED, [rows, matrix, bias, 0])
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
