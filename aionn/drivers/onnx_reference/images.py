"""Images: changes of size, sampling at real coordinates, pools of regions.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aionn.drivers.onnx_reference.arrays import Array, check_room, numbers, wide
from aionn.drivers.onnx_reference.linear import convolved
from aionn.drivers.onnx_reference.resizing import resize, upsample
from aionn.errors import InvalidArgument
from aionn.models.onnx.extension.geometry import windows

__all__ = ["KERNELS"]


def _reflected(x: Array, low: float, high: float) -> Array:
    """Coordinates within borders, at which they are reflected as often as necessary."""
    extent = high - low
    if extent <= 0:
        return np.full_like(x, low)
    distance = np.mod(x - low, 2 * extent)
    return low + np.where(distance > extent, 2 * extent - distance, distance)


def _cubic(ratio: Array, a: float = -0.75) -> list[Array]:
    """The weights of four neighbours of a point between the second and the third."""

    def near(t: Array) -> Array:
        return ((a + 2) * t - (a + 3)) * t * t + 1

    def far(t: Array) -> Array:
        return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a

    return [far(ratio + 1), near(ratio), near(1 - ratio), far(2 - ratio)]


def grid_sample(
    x: Array, grid: Array, *, align_corners: int = 0, mode: str | None = None, padding_mode: str = "zeros"
) -> Array:
    kind = {"bilinear": "linear", "bicubic": "cubic"}.get(mode or "linear", mode or "linear")
    if kind not in ("linear", "cubic", "nearest") or padding_mode not in ("zeros", "border", "reflection"):
        raise InvalidArgument(
            f"GridSample: expected a known mode and padding, got {mode!r:.40} and {padding_mode!r:.40}"
        )
    spatial = x.shape[2:]
    places = []
    for axis, extent in enumerate(spatial):
        # The last coordinate of the grid belongs to the last axis but one of the image, and so on.
        n = grid[..., len(spatial) - 1 - axis].astype(np.float64)
        place = (n + 1) / 2 * (extent - 1) if align_corners else ((n + 1) * extent - 1) / 2
        if kind == "nearest":
            place = np.rint(place)
        if padding_mode == "border" and kind != "cubic":
            place = np.clip(place, 0, extent - 1)
        places.append(place)
    return _sampled(wide(x), places, kind, padding_mode, bool(align_corners))


def _sampled(x: Array, places: Sequence[Array], kind: str, padding: str, is_aligned: bool) -> Array:
    """The image at real coordinates, one array for each spatial axis with shape [batch, ...]."""
    choices = []
    for place, extent in zip(places, x.shape[2:], strict=True):
        low, high = (0.0, extent - 1.0) if is_aligned else (-0.5, extent - 0.5)
        if padding == "reflection":
            is_outside = (place < low) | (place > high)
            place = np.where(is_outside, _reflected(place, low, high), place)
        begin = np.floor(place)
        if kind == "nearest":
            choices.append([(np.rint(place), np.ones_like(place))])
        elif kind == "linear":
            ratio = place - begin
            choices.append([(begin, 1 - ratio), (begin + 1, ratio)])
        else:
            weights = _cubic(place - begin)
            choices.append([(begin - 1 + i, weight) for i, weight in enumerate(weights)])
    batch = np.arange(x.shape[0]).reshape((-1, *[1] * (places[0].ndim - 1)))
    total: Any = 0.0
    for corner in itertools.product(*choices):
        factor: Any = 1.0
        index = []
        for (place, weight), extent in zip(corner, x.shape[2:], strict=True):
            inside = (place >= 0) & (place < extent)
            if padding == "zeros":
                weight = np.where(inside, weight, 0)
            elif padding == "reflection":
                low, high = (0.0, extent - 1.0) if is_aligned else (-0.5, extent - 0.5)
                place = np.where(inside, place, _reflected(place, low, high))
            factor = factor * weight
            index.append(np.clip(np.nan_to_num(place), 0, extent - 1).astype(np.int64))
        values = np.moveaxis(x[(batch, slice(None), *index)], -1, 1)
        total = total + values * np.expand_dims(factor, 1)
    return np.asarray(total)


def affine_grid(theta: Array, size: Array, *, align_corners: int = 0) -> Array:
    spatial = numbers(size)[2:]
    check_room((theta.shape[0], *spatial, len(spatial) + 1))
    axes = [
        np.linspace(-1, 1, extent) if align_corners else (2 * np.arange(extent) + 1) / extent - 1
        for extent in spatial
    ]
    # The coordinates of a point begin with the last axis.
    points = np.stack([*reversed(np.meshgrid(*axes, indexing="ij")), np.ones(spatial)], -1)
    flat = points.reshape(-1, len(spatial) + 1)
    shape = (theta.shape[0], *spatial, len(spatial))
    return np.asarray(np.matmul(flat, theta.astype(np.float64).swapaxes(1, 2))).reshape(shape)


SAMPLES_MAX = 1 << 12
"""Most samples of RoiAlign on one axis of a bin; a larger number follows only from regions far larger than the image."""


def roi_align(
    x: Array,
    rois: Array,
    batches: Array,
    *,
    version: int,
    coordinate_transformation_mode: str | None = None,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Array:
    transformation = coordinate_transformation_mode or (
        "half_pixel" if version >= 16 else "output_half_pixel"
    )
    is_half = transformation == "half_pixel"
    sizes = (output_height, output_width)
    result = np.zeros(check_room((rois.shape[0], x.shape[1], *sizes), 4), np.float64)
    for place, batch in enumerate(numbers(batches)):
        if not 0 <= batch < x.shape[0]:
            raise InvalidArgument(f"RoiAlign: expected batches below {x.shape[0]}, got {batch}")
        edges = rois[place].astype(np.float64) * spatial_scale - (0.5 if is_half else 0)
        ways = []
        for axis, count in enumerate(sizes):
            begin, end = edges[1 - axis], edges[3 - axis]
            extent = end - begin if is_half else max(end - begin, 1.0)
            samples = sampling_ratio if sampling_ratio > 0 else math.ceil(extent / count)
            if not 0 <= samples <= SAMPLES_MAX:
                raise InvalidArgument(f"RoiAlign: expected at most {SAMPLES_MAX} samples, got {samples}")
            points = begin + extent / count * (
                np.arange(count)[:, None] + (np.arange(samples) + 0.5) / max(1, samples)
            )
            ways.append(_neighbours(points, x.shape[2 + axis]))
        result[place] = _pooled(x[batch].astype(np.float64), ways, mode)
    return result


def _neighbours(points: Array, extent: int) -> tuple[Array, Array, Array, Array]:
    """The two neighbours of points and their weights, 0 for points outside of the image: [bins, samples] each."""
    is_inside = (points >= -1) & (points <= extent)
    place = np.clip(points, 0, extent - 1)
    low = np.floor(place).astype(np.int64)
    high = np.minimum(low + 1, extent - 1)
    ratio = np.where(low >= extent - 1, 0, place - low)
    return low, high, np.where(is_inside, 1 - ratio, 0), np.where(is_inside, ratio, 0)


def _pooled(image: Array, ways: Sequence[tuple[Array, Array, Array, Array]], mode: str) -> Array:
    """The mean of the samples of each bin, or the largest weighted neighbour of any sample."""
    (y_low, y_high, y_first, y_second), (x_low, x_high, x_first, x_second) = ways
    parts = []
    for rows, y_weight in ((y_low, y_first), (y_high, y_second)):
        for columns, x_weight in ((x_low, x_first), (x_high, x_second)):
            # [channels, rows of bins, samples, columns of bins, samples]
            values = image[:, rows][..., columns]
            parts.append(values * y_weight[:, :, None, None] * x_weight)
    if not parts[0].shape[2] or not parts[0].shape[4]:
        return np.zeros((image.shape[0], y_low.shape[0], x_low.shape[0]))
    if mode.lower() == "avg":
        return np.asarray(sum(parts[1:], parts[0]).mean((2, 4)))
    return np.asarray(np.max(np.stack(parts), axis=(0, 3, 5)))


def deform_conv(
    x: Array,
    weights: Array,
    offset: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    offset_group: int = 1,
    pads: Any = None,
    strides: Any = None,
) -> Array:
    """A convolution whose elements are taken at real coordinates; elements outside of the image are 0."""
    if x.ndim != 4:
        raise InvalidArgument(f"DeformConv: expected images of four axes, got {x.ndim}")
    kernel = weights.shape[2:]
    attributes = {"dilations": dilations, "pads": pads, "strides": strides}
    w = windows(attributes, x.shape[2:], kernel)
    batch, channels = x.shape[:2]
    offsets = offset.reshape(batch, offset_group, *kernel, 2, *w.extents).astype(np.float64)
    factors = None if mask is None else mask.reshape(batch, offset_group, 1, *kernel, *w.extents)
    columns = np.zeros(check_room((batch, channels, *kernel, *w.extents)), np.float64)
    size = channels // offset_group
    for part in range(offset_group):
        places = []
        for axis in range(2):
            element = np.arange(kernel[axis]) * w.dilations[axis]
            element = element.reshape((-1, 1, 1, 1) if axis == 0 else (1, -1, 1, 1))
            window = np.arange(w.extents[axis]) * w.strides[axis] - w.begins[axis]
            window = window.reshape((1, 1, -1, 1) if axis == 0 else (1, 1, 1, -1))
            places.append(offsets[:, part, :, :, axis] + element + window)
        own = slice(part * size, (part + 1) * size)
        values = _sampled(x[:, own].astype(np.float64), places, "linear", "zeros", True)
        columns[:, own] = values if factors is None else values * factors[:, part]
    # The windows are laid side by side, so that each is read once.
    laid = columns.transpose(0, 1, 4, 2, 5, 3).reshape(
        batch, channels, w.extents[0] * kernel[0], w.extents[1] * kernel[1]
    )
    result = convolved(laid, weights.astype(np.float64), group, {"strides": list(kernel)})
    return result if bias is None else result + bias.reshape(-1, 1, 1)


def max_roi_pool(x: Array, rois: Array, *, pooled_shape: Any, spatial_scale: float = 1.0) -> Array:
    height, width = pooled_shape
    result = np.zeros(check_room((rois.shape[0], x.shape[1], height, width), 4), x.dtype)
    for place, roi in enumerate(rois):
        batch = int(roi[0])
        if not 0 <= batch < x.shape[0]:
            raise InvalidArgument(f"MaxRoiPool: expected batches below {x.shape[0]}, got {batch}")
        left, top, right, bottom = (int(np.floor(edge * spatial_scale + 0.5)) for edge in roi[1:])
        rows, columns = max(bottom - top + 1, 1) / height, max(right - left + 1, 1) / width
        for i, j in itertools.product(range(height), range(width)):
            y = slice(*np.clip([math.floor(i * rows) + top, math.ceil((i + 1) * rows) + top], 0, x.shape[2]))
            z = slice(
                *np.clip([math.floor(j * columns) + left, math.ceil((j + 1) * columns) + left], 0, x.shape[3])
            )
            area = x[batch, :, y, z].reshape(x.shape[1], -1)
            result[place, :, i, j] = area.max(1) if area.size else 0
    return result


KERNELS: dict[str, Callable[..., Any]] = {
    "AffineGrid": affine_grid,
    "DeformConv": deform_conv,
    "GridSample": grid_sample,
    "MaxRoiPool": max_roi_pool,
    "Resize": resize,
    "RoiAlign": roi_align,
    "Upsample": upsample,
}
"""The kernels by operator."""
