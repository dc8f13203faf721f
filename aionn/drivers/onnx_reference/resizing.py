"""Resize and Upsample: each axis is interpolated by itself, as a product with a matrix of weights.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from aionn.drivers.onnx_reference.arrays import Array, axis_of, check_room, numbers
from aionn.errors import InvalidArgument

__all__ = ["resize", "upsample"]


class _Way(NamedTuple):
    """The interpolation of an axis."""

    mode: str
    coordinates: str
    nearest: str = "round_prefer_floor"
    cubic_a: float = -0.75
    antialias: bool = False
    exclude_outside: bool = False
    extrapolation: float = 0.0


def _coordinates(way: _Way, extent: int, result: int, scale: float, region: tuple[float, float]) -> Array:
    """The place in the input of each element of the result."""
    x = np.arange(result, dtype=np.float64)
    length = scale * extent
    match way.coordinates:
        case "align_corners":
            return np.zeros_like(x) if length == 1 else x * (extent - 1) / (length - 1)
        case "asymmetric":
            return x / scale
        case "pytorch_half_pixel":
            return np.full_like(x, -0.5) if length == 1 else (x + 0.5) / scale - 0.5
        case "half_pixel":
            return (x + 0.5) / scale - 0.5
        case "half_pixel_symmetric":
            return extent / 2 * (1 - result / length) + (x + 0.5) / scale - 0.5
        case "tf_half_pixel_for_nn":
            return (x + 0.5) / scale
        case "tf_crop_and_resize":
            begin, end = region
            if length == 1:
                return np.full_like(x, (begin + end) * (extent - 1) / 2)
            return begin * (extent - 1) + x * (end - begin) * (extent - 1) / (length - 1)
    raise InvalidArgument(
        f"attribute 'coordinate_transformation_mode': expected a known mode, got {way.coordinates!r:.40}"
    )


def _cubic(distance: Array, a: float) -> Array:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _weights(way: _Way, places: Array, extent: int, scale: float) -> tuple[Array, Array]:
    """The neighbours of each place and their weights: [results, neighbours] each."""
    # A neighbour's weight depends on its distance; the place of an element is its own neighbour on the right.
    base = np.ceil(places) - 1
    ratio = (places - base)[:, None]
    if way.mode == "nearest":
        chosen = {
            "round_prefer_floor": ratio <= 0.5,
            "round_prefer_ceil": ratio < 0.5,
            "floor": ratio < 1,
            "ceil": ratio <= 0,
        }.get(way.nearest)
        if chosen is None:
            raise InvalidArgument(f"attribute 'nearest_mode': expected a known mode, got {way.nearest!r:.40}")
        return base[:, None] + np.array([0, 1]), np.concatenate([chosen, ~chosen], 1).astype(np.float64)
    shrink = min(scale, 1.0) if way.antialias else 1.0
    reach = 1 if way.mode == "linear" else 2
    first = int(np.floor(-reach / shrink)) + 1
    steps = np.arange(first, 2 - first)
    distance = np.abs(steps - ratio) * shrink
    weights = np.maximum(0, 1 - distance) if way.mode == "linear" else _cubic(distance, way.cubic_a)
    if way.antialias:
        weights = weights / weights.sum(1, keepdims=True)
    return base[:, None] + steps, weights


def _interpolated(
    x: Array, axis: int, way: _Way, result: int, scale: float, region: tuple[float, float]
) -> Array:
    extent = x.shape[axis]
    places = _coordinates(way, extent, result, scale, region)
    neighbours, weights = _weights(way, places, extent, scale)
    if way.exclude_outside:
        weights = np.where((neighbours < 0) | (neighbours >= extent), 0, weights)
        weights = weights / weights.sum(1, keepdims=True)
    index = np.clip(neighbours, 0, extent - 1).astype(np.int64)
    source = np.moveaxis(x, axis, 0)
    if way.mode == "nearest":
        picked = source[np.where(weights[:, 0] != 0, index[:, 0], index[:, 1])]
    else:
        check_room((result, extent))
        matrix = np.zeros((result, extent))
        np.add.at(matrix, (np.arange(result)[:, None], index), weights)
        picked = np.tensordot(matrix, source, (1, 0))
    if way.coordinates == "tf_crop_and_resize":
        picked[(places < 0) | (places > extent - 1)] = way.extrapolation
    return np.moveaxis(picked, 0, axis)


def resize(
    x: Array,
    roi: Array | None = None,
    scales: Array | None = None,
    sizes: Array | None = None,
    *,
    version: int,
    antialias: int = 0,
    axes: Any = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Array:
    if version < 11:
        return upsample(x, roi, mode=mode)
    along = [axis_of(axis, x.ndim) for axis in axes] if axes is not None else list(range(x.ndim))
    if sizes is not None and sizes.size:
        results, factors = _sized(x, along, numbers(sizes), keep_aspect_ratio_policy)
    elif scales is not None and scales.size == len(along):
        factors = [float(scale) for scale in scales]
        results = [
            int(np.floor(np.float32(x.shape[a]) * np.float32(f))) for a, f in zip(along, factors, strict=True)
        ]
    else:
        raise InvalidArgument(f"Resize: expected {len(along)} scales or sizes, got none")
    is_crop = coordinate_transformation_mode == "tf_crop_and_resize"
    regions = [(0.0, 1.0)] * len(along)
    if is_crop and roi is not None:
        regions = [(float(roi[i]), float(roi[i + len(along)])) for i in range(len(along))]
    way = _Way(
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        cubic_coeff_a,
        bool(antialias),
        bool(exclude_outside),
        extrapolation_value,
    )
    return _resized(x, along, results, factors, regions, way)


def _sized(
    x: Array, along: Sequence[int], sizes: Sequence[int], policy: str
) -> tuple[list[int], list[float]]:
    """The extents of the result and the scales for given sizes."""
    factors = [size / x.shape[axis] for size, axis in zip(sizes, along, strict=True)]
    if policy == "stretch":
        return list(sizes), factors
    if policy not in ("not_larger", "not_smaller"):
        raise InvalidArgument(
            f"attribute 'keep_aspect_ratio_policy': expected a known one, got {policy!r:.40}"
        )
    factor = min(factors) if policy == "not_larger" else max(factors)
    return [int(factor * x.shape[axis] + 0.5) for axis in along], [factor] * len(along)


def _resized(
    x: Array,
    along: Sequence[int],
    results: Sequence[int],
    factors: Sequence[float],
    regions: Sequence[tuple[float, float]],
    way: _Way,
) -> Array:
    if way.mode not in ("nearest", "linear", "cubic"):
        raise InvalidArgument(f"attribute 'mode': expected nearest, linear or cubic, got {way.mode!r:.40}")
    if any(not factor > 0 for factor in factors):
        raise InvalidArgument(f"scales: expected positive numbers, got {list(factors)}")
    shape = list(x.shape)
    value = x if way.mode == "nearest" else x.astype(np.float64)
    for axis, result, factor, region in zip(along, results, factors, regions, strict=True):
        is_same = result == x.shape[axis] and factor == 1 and way.coordinates != "tf_crop_and_resize"
        if is_same:
            continue
        shape[axis] = result
        check_room(shape)
        value = _interpolated(value, axis, way, result, factor, region)
    if way.mode != "nearest" and x.dtype.kind in "iu":
        info = np.iinfo(x.dtype)
        value = np.clip(np.rint(value), info.min, info.max)
    return value


def upsample(
    x: Array, scales_input: Array | None = None, *, mode: str = "nearest", scales: Any = None
) -> Array:
    """Also Resize before version 11."""
    factors = scales if scales is not None else [] if scales_input is None else scales_input.tolist()
    if len(factors) != x.ndim:
        raise InvalidArgument(f"scales: expected {x.ndim} numbers, got {len(factors)}")
    results = [int(np.floor(np.float32(e) * np.float32(f))) for e, f in zip(x.shape, factors, strict=True)]
    kind = {"bilinear": "linear"}.get(mode, mode)
    regions = [(0.0, 1.0)] * x.ndim
    return _resized(x, range(x.ndim), results, factors, regions, _Way(kind, "asymmetric", "floor"))
