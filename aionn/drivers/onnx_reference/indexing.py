"""Operators with indices: gather, scatter, selection, order.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aionn.drivers.onnx_reference.arrays import Array, axis_of, check_room, numbers, single
from aionn.errors import InvalidArgument

__all__ = ["KERNELS", "checked_indices"]


def checked_indices(indices: Array, extent: int) -> Array:
    """Indices from 0 to ``extent`` - 1 for indices that may count from the end.

    Raises:
        InvalidArgument: One is outside of that.
    """
    places = indices.astype(np.int64)
    if ((places < -extent) | (places >= extent)).any():
        raise InvalidArgument(f"indices: expected numbers from {-extent} to {extent - 1}, got others")
    return np.where(places < 0, places + extent, places)


def gather(x: Array, indices: Array, *, axis: int = 0) -> Array:
    axis = axis_of(axis, x.ndim)
    places = checked_indices(indices, x.shape[axis])
    check_room((*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]), x.itemsize)
    return np.take(x, places, axis)


def gather_elements(x: Array, indices: Array, *, axis: int = 0) -> Array:
    axis = axis_of(axis, x.ndim)
    places = checked_indices(indices, x.shape[axis])
    return x[_grid(places, axis, x.shape)]


def _grid(places: Array, axis: int, shape: tuple[int, ...]) -> tuple[Array, ...]:
    """For each element of ``places`` the index in an array of ``shape`` that differs on one axis only."""
    if places.ndim != len(shape) or any(
        extent > most for i, (extent, most) in enumerate(zip(places.shape, shape, strict=True)) if i != axis
    ):
        raise InvalidArgument(f"indices: expected a shape within {list(shape)}, got {list(places.shape)}")
    grid: list[Array] = list(np.indices(places.shape, sparse=True))
    grid[axis] = places
    return tuple(grid)


def gather_nd(x: Array, indices: Array, *, batch_dims: int = 0) -> Array:
    batch = x.shape[:batch_dims]
    if indices.shape[:batch_dims] != batch:
        raise InvalidArgument(
            f"GatherND: expected batches {list(batch)}, got {list(indices.shape[:batch_dims])}"
        )
    lead = np.indices(batch).reshape(batch_dims, *batch, *[1] * (indices.ndim - 1 - batch_dims))
    parts = [checked_indices(indices[..., i], x.shape[batch_dims + i]) for i in range(indices.shape[-1])]
    return np.asarray(x[(*lead, *parts)])


_REDUCTIONS: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _scattered(result: Array, places: tuple[Array, ...], updates: Array, reduction: str) -> Array:
    if reduction == "none":
        result[places] = updates
    elif reduction in _REDUCTIONS:
        _REDUCTIONS[reduction].at(result, places, updates)
    else:
        raise InvalidArgument(
            f"attribute 'reduction': expected none, add, mul, max or min, got {reduction!r:.40}"
        )
    return result


def scatter_elements(
    x: Array, indices: Array, updates: Array, *, axis: int = 0, reduction: str = "none"
) -> Array:
    axis = axis_of(axis, x.ndim)
    places = checked_indices(indices, x.shape[axis])
    grid = tuple(np.broadcast_arrays(*_grid(places, axis, x.shape)))
    return _scattered(x.copy(), grid, updates, reduction)


def scatter_nd(x: Array, indices: Array, updates: Array, *, reduction: str = "none") -> Array:
    parts = [checked_indices(indices[..., i], x.shape[i]) for i in range(indices.shape[-1])]
    return _scattered(x.copy(), tuple(parts), updates, reduction)


def tensor_scatter(
    past: Array, update: Array, places: Array | None = None, *, axis: int = -2, mode: str = "linear"
) -> Array:
    result, axis = past.copy(), axis_of(axis, past.ndim)
    starts = [0] * past.shape[0] if places is None else numbers(places)
    size, count = past.shape[axis], update.shape[axis]
    for batch, start in enumerate(starts):
        target = np.arange(start, start + count)
        if mode == "circular":
            target %= size
        elif start < 0 or start + count > size:
            raise InvalidArgument(f"TensorScatter: expected places below {size}, got {start + count - 1}")
        into = np.moveaxis(result[batch], axis - 1, 0)
        into[target] = np.moveaxis(update[batch], axis - 1, 0)
    return result


def one_hot(indices: Array, depth: Array, values: Array, *, axis: int = -1) -> Array:
    count = int(single(depth, "OneHot, depth"))
    axis = axis_of(axis, indices.ndim + 1)
    check_room((*indices.shape, count), values.itemsize)
    places = indices.astype(np.int64)
    places = np.where(places < 0, places + count, places)
    shape = [1] * (indices.ndim + 1)
    shape[axis] = count
    is_on = np.expand_dims(places, axis) == np.arange(count).reshape(shape)
    return np.asarray(np.where(is_on, values[1], values[0]))


def non_zero(x: Array) -> Array:
    # np.nonzero does not accept rank 0, whose result has no rows.
    if x.ndim == 0:
        return np.zeros((0, int(bool(x))), np.int64)
    return np.array(np.nonzero(x), np.int64).reshape(x.ndim, -1)


def compress(x: Array, condition: Array, *, axis: int | None = None) -> Array:
    return np.compress(condition.reshape(-1), x, axis)


def unique(x: Array, *, count: int, axis: int | None = None, sorted: int = 1) -> tuple[Array, ...]:
    source = x.reshape(-1) if axis is None else x
    along = 0 if axis is None else axis_of(axis, x.ndim)
    values, first, inverse, counts = np.unique(
        source, return_index=True, return_inverse=True, return_counts=True, axis=along
    )
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        rank = np.argsort(order)
        values, first, inverse, counts = values.take(order, along), first[order], rank[inverse], counts[order]
    return (values, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64))[:count]


def top_k(
    x: Array, k_input: Array | None = None, *, count: int, k: int | None = None, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Array, ...]:  # fmt: skip
    """Of equal values the one with the lower index comes first."""
    axis = axis_of(axis, x.ndim)
    wanted = k if k is not None else numbers(k_input)[0] if k_input is not None else 1
    if not 0 <= wanted <= x.shape[axis]:
        raise InvalidArgument(f"TopK: expected at most {x.shape[axis]} elements, got {wanted}")
    if largest:
        # A stable sort of the reversed array, read from its end, keeps the lower index of equals first.
        order = np.flip(x.shape[axis] - 1 - np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
    else:
        order = np.argsort(x, axis, kind="stable")
    places = np.take(order, range(wanted), axis)
    return (np.take_along_axis(x, places, axis), places.astype(np.int64))[:count]


def arg_extremum(function: Callable[..., Any]) -> Callable[..., Array]:
    def kernel(x: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Array:
        axis = axis_of(axis, x.ndim)
        if select_last_index:
            found = x.shape[axis] - 1 - function(np.flip(x, axis), axis=axis, keepdims=bool(keepdims))
        else:
            found = function(x, axis=axis, keepdims=bool(keepdims))
        return np.asarray(found, np.int64)

    return kernel


def hardmax(x: Array, *, axis: int | None = None, version: int) -> Array:
    if version < 13:
        # Before version 13 the axes from ``axis`` on are one.
        rows = x.reshape(int(np.prod(x.shape[: 1 if axis is None else axis_of(axis, x.ndim)])), -1)
        return hardmax(rows, axis=1, version=13).reshape(x.shape)
    along = axis_of(-1 if axis is None else axis, x.ndim)
    places = np.expand_dims(np.argmax(x, along), along)
    result = np.zeros_like(x)
    np.put_along_axis(result, places, 1, along)
    return result


NMS_BOXES_MAX = 1 << 20
"""Most boxes of one image: each selected box is compared with every other one."""


def non_max_suppression(
    boxes: Array,
    scores: Array,
    most: Array | None = None,
    overlap: Array | None = None,
    threshold: Array | None = None,
    *,
    center_point_box: int = 0,
) -> Array:
    limit = 0 if most is None else int(single(most, "max_output_boxes_per_class"))
    overlap_max = 0.0 if overlap is None else float(single(overlap, "iou_threshold"))
    score_min = None if threshold is None else float(single(threshold, "score_threshold"))
    if boxes.shape[1] > NMS_BOXES_MAX:
        raise InvalidArgument(
            f"NonMaxSuppression: expected at most {NMS_BOXES_MAX} boxes, got {boxes.shape[1]}"
        )
    selected: list[tuple[int, int, int]] = []
    for batch in range(scores.shape[0]):
        edges = _edges(boxes[batch].astype(np.float64), center_point_box)
        areas = (edges[:, 2] - edges[:, 0]) * (edges[:, 3] - edges[:, 1])
        for kind in range(scores.shape[1]):
            values = scores[batch, kind]
            order = np.argsort(-values, kind="stable")
            if score_min is not None:
                order = order[values[order] > score_min]
            taken = 0
            while order.size and taken < limit:
                best, order = int(order[0]), order[1:]
                selected.append((batch, kind, best))
                taken += 1
                order = order[_overlap(edges, areas, best, order) <= overlap_max]
    return np.array(selected, np.int64).reshape(-1, 3)


def _edges(boxes: Array, is_centred: int) -> Array:
    """The least and the largest coordinates of boxes: y, x, y, x."""
    if is_centred:
        x, y, width, height = boxes.T
        return np.stack([y - height / 2, x - width / 2, y + height / 2, x + width / 2], 1)
    return np.concatenate([np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])], 1)


def _overlap(edges: Array, areas: Array, best: int, others: Array) -> Array:
    """Intersection over union of a box with others."""
    low = np.maximum(edges[best, :2], edges[others, :2])
    high = np.minimum(edges[best, 2:], edges[others, 2:])
    common = np.prod(np.maximum(high - low, 0), 1)
    union = areas[best] + areas[others] - common
    return np.where(union > 0, common / np.where(union > 0, union, 1), 0.0)


KERNELS: dict[str, Callable[..., Any]] = {
    "ArgMax": arg_extremum(np.argmax),
    "ArgMin": arg_extremum(np.argmin),
    "Compress": compress,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "Hardmax": hardmax,
    "NonMaxSuppression": non_max_suppression,
    "NonZero": non_zero,
    "OneHot": one_hot,
    "Scatter": scatter_elements,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    "TensorScatter": tensor_scatter,
    "TopK": top_k,
    "Unique": unique,
}
"""The kernels by operator."""
