"""Plain definitions of the operations that move, select or reduce elements.

Owns ``DEFINITIONS`` of these operations; see ``plain``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from aionn.conformance.random_graphs.plain import Array, Definition, PlainCall, Stored
from aionn.hal import OperationType

__all__ = ["DEFINITIONS"]


def _reshape(call: PlainCall) -> list[Array]:
    return [call.tensor(0).reshape(call.integers(1))]


def _squeeze(call: PlainCall) -> list[Array]:
    x = call.tensor(0)
    axes = set(call.integers(1)) if call.has(1) else {i for i, n in enumerate(x.shape) if n == 1}
    return [x.reshape([n for axis, n in enumerate(x.shape) if axis not in axes] or [1])]


def _expand_dims(call: PlainCall) -> list[Array]:
    return [np.expand_dims(call.tensor(0), call.integer(1))]


def _transpose(call: PlainCall) -> list[Array]:
    return [np.transpose(call.tensor(0), call.integers(1) if call.has(1) else None)]


def _channel_shuffle(call: PlainCall) -> list[Array]:
    """Channel g * size + i comes from group i % groups ... written as the list of sources."""
    x, groups, axis = call.tensor(0), call.integer(1), call.integer(2)
    size = x.shape[axis] // groups
    sources = [group * size + place for place in range(size) for group in range(groups)]
    return [np.take(x, sources, axis=axis)]


def _reverse(call: PlainCall) -> list[Array]:
    return [np.flip(call.tensor(0), axis=call.integers(1)[0])]


def _fill(call: PlainCall) -> list[Array]:
    return [np.full(call.integers(0), call.tensor(1).item())]


def _rank(call: PlainCall) -> list[Array]:
    return [np.array(call.tensor(0).ndim)]


def _in_nhwc(layout_index: int, definition: Callable[[PlainCall, Array], Array]) -> Definition:
    """Turns an image to [batch, height, width, depth] and the result back."""

    def defined(call: PlainCall) -> list[Array]:
        is_nchw = call.flag(layout_index)
        x = np.moveaxis(call.tensor(0), 1, -1) if is_nchw else call.tensor(0)
        result = definition(call, x)
        return [np.moveaxis(result, -1, 1) if is_nchw else result]

    return defined


def _depth_to_space(call: PlainCall, x: Array) -> Array:
    block = call.integer(1)
    batch, height, width, depth = x.shape
    result = np.empty((batch, height * block, width * block, depth // block**2), dtype=x.dtype)
    for row in range(block):
        for column in range(block):
            start = (row * block + column) * result.shape[3]
            result[:, row::block, column::block] = x[..., start : start + result.shape[3]]
    return result


def _space_to_depth(call: PlainCall, x: Array) -> Array:
    block = call.integer(1)
    parts = [x[:, row::block, column::block] for row in range(block) for column in range(block)]
    return np.concatenate(parts, axis=3)


def _batch_to_space(call: PlainCall, x: Array) -> Array:
    rows, columns = call.integers(1)
    batch, height, width, depth = x.shape
    count = batch // (rows * columns)
    result = np.empty((count, height * rows, width * columns, depth), dtype=x.dtype)
    for row in range(rows):
        for column in range(columns):
            start = (row * columns + column) * count
            result[:, row::rows, column::columns] = x[start : start + count]
    return result


def _space_to_batch(call: PlainCall, x: Array) -> Array:
    rows, columns = call.integers(1)
    top, bottom, left, right = call.integers(2)
    padded = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)))
    parts = [padded[:, row::rows, column::columns] for row in range(rows) for column in range(columns)]
    return np.concatenate(parts, axis=0)


def _pairs(values: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(values[0::2], values[1::2], strict=True))


def _pad(call: PlainCall) -> list[Array]:
    return [np.pad(call.tensor(0), _pairs(call.integers(1)))]


def _pad_with(call: PlainCall) -> list[Array]:
    """The value to pad with is a stored number."""
    operand, value = call.operands[0], call.tensor(2).item()
    real = (value - operand.zero_point) * operand.scale if operand.scale else value
    return [np.pad(call.tensor(0), _pairs(call.integers(1)), constant_values=real)]


def _mirror_pad(call: PlainCall) -> list[Array]:
    x, pads = call.tensor(0), _pairs(call.integers(1))
    return [np.pad(x, pads, mode="symmetric" if call.integer(2) == 1 else "reflect")]


def _concatenation(call: PlainCall) -> list[Array]:
    count = len(call) - 1
    return [np.concatenate([call.tensor(i) for i in range(count)], axis=call.integer(count))]


def _pack(call: PlainCall) -> list[Array]:
    return [np.stack([call.tensor(i) for i in range(1, len(call))], axis=call.integer(0))]


def _split(call: PlainCall) -> list[Array]:
    return list(np.split(call.tensor(0), call.integer(2), axis=call.integer(1)))


def _tile(call: PlainCall) -> list[Array]:
    return [np.tile(call.tensor(0), call.integers(1))]


def _slice(call: PlainCall) -> list[Array]:
    x = call.tensor(0)
    for axis, (begin, size) in enumerate(zip(call.integers(1), call.integers(2), strict=True)):
        x = np.take(x, range(begin, begin + size if size >= 0 else x.shape[axis]), axis=axis)
    return [x]


def _strided_slice(call: PlainCall) -> list[Array]:
    x = call.tensor(0)
    begin_mask, end_mask, shrink_mask = (call.integer(index) for index in (4, 5, 6))
    bounds = zip(call.integers(1), call.integers(2), call.integers(3), strict=True)
    dropped = []
    for axis, (begin, end, stride) in enumerate(bounds):
        size = x.shape[axis]
        if shrink_mask >> axis & 1:
            dropped.append(axis)
            x = np.take(x, [begin % size], axis=axis)
            continue
        first: int | None = None if begin_mask >> axis & 1 else begin
        last: int | None = None if end_mask >> axis & 1 else end
        x = np.take(x, range(size)[first:last:stride], axis=axis)
    return [x.reshape([n for axis, n in enumerate(x.shape) if axis not in dropped] or [1])]


def _gather(call: PlainCall) -> list[Array]:
    return [np.take(call.tensor(0), call.tensor(2), axis=call.integer(1))]


def _embedding_lookup(call: PlainCall) -> list[Array]:
    return [np.stack([call.tensor(1)[index] for index in call.integers(0)])]


def _hashtable_lookup(call: PlainCall) -> list[Array | Stored]:
    """A key that is not found gives the stored number 0, whatever the zero point."""
    values = call.stored[2]
    assert values is not None
    places = {key: place for place, key in enumerate(call.integers(1))}
    found = [places.get(key) for key in call.integers(0)]
    rows = [np.zeros_like(values[0]) if place is None else values[place] for place in found]
    return [Stored(np.stack(rows)), Stored(np.array([place is not None for place in found]))]


def _topk(call: PlainCall) -> list[Array]:
    x, count = call.tensor(0), call.integer(1)
    # A NaN counts as larger than infinity.
    is_nan = np.isnan(x) if x.dtype.kind == "f" else np.zeros(x.shape, bool)
    order = np.lexsort((-np.where(is_nan, 0, x), ~is_nan), axis=-1)[..., :count]
    return [np.take_along_axis(x, order, axis=-1), order]


def _reduced(function: Callable[..., Array]) -> Definition:
    def defined(call: PlainCall) -> list[Array]:
        x = call.tensor(0)
        axes = tuple({axis % x.ndim for axis in call.integers(1)})
        result = np.asarray(function(x, axis=axes, keepdims=call.integer(2) > 0))
        return [result if result.ndim else result.reshape(1)]

    return defined


def _argument(function: Callable[..., Array]) -> Definition:
    def defined(call: PlainCall) -> list[Array]:
        result = np.asarray(function(call.tensor(0), axis=call.integer(1)))
        return [result if result.ndim else result.reshape(1)]

    return defined


O = OperationType  # noqa: E741 - the table below has one on every line

DEFINITIONS: dict[OperationType, Definition] = {
    O.RESHAPE: _reshape,
    O.SQUEEZE: _squeeze,
    O.EXPAND_DIMS: _expand_dims,
    O.TRANSPOSE: _transpose,
    O.CHANNEL_SHUFFLE: _channel_shuffle,
    O.REVERSE: _reverse,
    O.FILL: _fill,
    O.RANK: _rank,
    O.DEPTH_TO_SPACE: _in_nhwc(2, _depth_to_space),
    O.SPACE_TO_DEPTH: _in_nhwc(2, _space_to_depth),
    O.BATCH_TO_SPACE_ND: _in_nhwc(2, _batch_to_space),
    O.SPACE_TO_BATCH_ND: _in_nhwc(3, _space_to_batch),
    O.PAD: _pad,
    O.PAD_V2: _pad_with,
    O.MIRROR_PAD: _mirror_pad,
    O.CONCATENATION: _concatenation,
    O.PACK: _pack,
    O.SPLIT: _split,
    O.TILE: _tile,
    O.SLICE: _slice,
    O.STRIDED_SLICE: _strided_slice,
    O.GATHER: _gather,
    O.EMBEDDING_LOOKUP: _embedding_lookup,
    O.HASHTABLE_LOOKUP: _hashtable_lookup,
    O.TOPK_V2: _topk,
    O.MEAN: _reduced(np.mean),
    O.REDUCE_ALL: _reduced(np.all),
    O.REDUCE_ANY: _reduced(np.any),
    O.REDUCE_MAX: _reduced(np.max),
    O.REDUCE_MIN: _reduced(np.min),
    O.REDUCE_PROD: _reduced(np.prod),
    O.REDUCE_SUM: _reduced(np.sum),
    O.ARGMAX: _argument(np.argmax),
    O.ARGMIN: _argument(np.argmin),
}
