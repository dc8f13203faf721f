"""Random instances of the operations that move, select or reduce elements.

Owns ``SIGNATURES`` of the reshaping, slicing, padding, lookup and reduction operations, as data with one builder function a form.

Source: the operation signatures of the NN HAL's random graph generator, and the operations' contracts for what came later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from aionn.conformance.random_graphs.extents import Extent
from aionn.conformance.random_graphs.signatures import (
    BOOL8,
    F16,
    F32,
    FLOATS,
    I32,
    Q8,
    Q8S,
    Draft,
    Role,
    Signature,
    Value,
    by_level,
)
from aionn.hal import OperandType, OperationType

__all__ = ["SIGNATURES"]

_UP_TO_4 = (1, 2, 3, 4)
_UP_TO_5 = (1, 2, 3, 4, 5)


def _image(draft: Draft, is_nchw: bool) -> tuple[list[Extent], list[Extent]]:
    """Four unknown extents as (batch, height, width, depth), and in the layout's order."""
    extents = draft.frees(4)
    return extents, _in_layout(extents, is_nchw)


def _in_layout(extents: Sequence[Extent], is_nchw: bool) -> list[Extent]:
    batch, height, width, depth = extents
    return [batch, depth, height, width] if is_nchw else [batch, height, width, depth]


# --- shapes


def _reshape(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    shape = draft.frees()
    draft.extents.require_equal(draft.extents.product(shape), draft.extents.product(x.dimensions))
    draft.integers(draft.rank, lambda: [extent.value for extent in shape])
    draft.output(shape, like=x)


def _squeeze(draft: Draft) -> None:
    # Axes may repeat, which is legal.
    axes = [draft.integer(0, draft.rank - 1) for _ in range(draft.integer(1, draft.rank))]
    shape = [draft.extents.extent(1) if axis in axes else draft.free() for axis in range(draft.rank)]
    x = draft.tensor(shape)
    draft.integers(len(axes), axes)
    draft.output([extent for axis, extent in enumerate(shape) if axis not in axes], like=x)


def _squeeze_all(draft: Draft) -> None:
    is_one = [draft.chance(0.5) for _ in range(draft.rank)]
    shape = [draft.extents.extent(1) if one else draft.free(low=2) for one in is_one]
    x = draft.tensor(shape)
    draft.omitted(I32)
    draft.output([extent for extent, one in zip(shape, is_one, strict=True) if not one], like=x)


def _expand_dims(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    axis = draft.axis(draft.rank + 1)
    draft.scalar(OperandType.INT32, axis)
    shape = list(x.dimensions)
    shape.insert(axis if axis >= 0 else axis + draft.rank + 1, draft.extents.extent(1))
    draft.output(shape, like=x)


def _transpose(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    order = [int(axis) for axis in draft.rng.permutation(draft.rank)]
    draft.integers(draft.rank, order)
    draft.output([x.dimensions[axis] for axis in order], like=x)


def _transpose_reversed(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    draft.omitted(I32)
    draft.output(x.dimensions[::-1], like=x)


def _channel_shuffle(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    groups = draft.integer_scalar(1, 5)
    axis = draft.axis()
    draft.scalar(OperandType.INT32, axis)
    draft.extents.divided_exactly(x.dimensions[axis], groups)
    draft.output(x.dimensions, like=x)


def _reverse(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    draft.integers(1, [draft.integer(0, draft.rank - 1)])
    draft.output(x.dimensions, like=x)


def _fill(draft: Draft) -> None:
    shape = draft.frees()
    draft.integers(draft.rank, lambda: [extent.value for extent in shape])
    if draft.type == I32:
        draft.integer_scalar(0, 255)
    else:
        draft.real_scalar_between(-2, 2)
    # A model needs an argument, and this operation has no other.
    draft.inputs[-1].role = Role.INPUT
    draft.inputs[-1].is_linkable = False
    draft.output(shape)


def _rank(draft: Draft) -> None:
    draft.tensor(draft.frees())
    draft.output([], OperandType.INT32)


def _depth_to_space(draft: Draft, *, has_layout: bool) -> None:
    block = draft.integer(1, 3)
    is_nchw = has_layout and draft.chance(0.5)
    (batch, height, width, depth), shape = _image(draft, is_nchw)
    x = draft.tensor(shape)
    draft.scalar(OperandType.INT32, block)
    if has_layout:
        draft.scalar(OperandType.BOOL, is_nchw)
    out_depth = draft.extents.divided_exactly(depth, block * block)
    draft.output(_in_layout((batch, height * block, width * block, out_depth), is_nchw), like=x)


def _space_to_depth(draft: Draft, *, has_layout: bool) -> None:
    block = draft.integer(1, 5)
    is_nchw = has_layout and draft.chance(0.5)
    (batch, height, width, depth), shape = _image(draft, is_nchw)
    x = draft.tensor(shape)
    draft.scalar(OperandType.INT32, block)
    if has_layout:
        draft.scalar(OperandType.BOOL, is_nchw)
    out_height = draft.extents.divided_exactly(height, block)
    out_width = draft.extents.divided_exactly(width, block)
    draft.output(_in_layout((batch, out_height, out_width, depth * (block * block)), is_nchw), like=x)


def _batch_to_space(draft: Draft, *, has_layout: bool) -> None:
    blocks = [draft.integer(1, 3), draft.integer(1, 3)]
    is_nchw = has_layout and draft.chance(0.5)
    (batch, height, width, depth), shape = _image(draft, is_nchw)
    x = draft.tensor(shape)
    draft.integers(2, blocks)
    if has_layout:
        draft.scalar(OperandType.BOOL, is_nchw)
    out_batch = draft.extents.divided_exactly(batch, blocks[0] * blocks[1])
    out = (out_batch, height * blocks[0], width * blocks[1], depth)
    draft.output(_in_layout(out, is_nchw), like=x)


def _padded_tensor(draft: Draft, shape: Sequence[Extent]) -> Value:
    """An input that will be padded with real 0: before level 3 this must be quantised as 0."""
    x = draft.tensor(shape)
    if draft.level < 3:
        x.zero_point = 0
    return x


def _space_to_batch(draft: Draft, *, has_layout: bool) -> None:
    blocks = [draft.integer(1, 5), draft.integer(1, 5)]
    pads = [draft.integer(0, 10) for _ in range(4)]
    is_nchw = has_layout and draft.chance(0.5)
    (batch, height, width, depth), shape = _image(draft, is_nchw)
    x = _padded_tensor(draft, shape)
    draft.integers(2, blocks)
    draft.integers(draft.known(2, 2), pads)
    if has_layout:
        draft.scalar(OperandType.BOOL, is_nchw)
    out_height = draft.extents.divided_exactly(height + (pads[0] + pads[1]), blocks[0])
    out_width = draft.extents.divided_exactly(width + (pads[2] + pads[3]), blocks[1])
    out = (batch * (blocks[0] * blocks[1]), out_height, out_width, depth)
    draft.output(_in_layout(out, is_nchw), like=x)


def _with_layout(build: Callable[..., None], has_layout: bool) -> Callable[[Draft], None]:
    def built(draft: Draft) -> None:
        build(draft, has_layout=has_layout)

    return built


# --- padding, joining, cutting


def _pad(draft: Draft) -> None:
    x = _padded_tensor(draft, draft.frees())
    pads = [(draft.integer(0, 5), draft.integer(0, 5)) for _ in range(draft.rank)]
    draft.integers(draft.known(draft.rank, 2), [n for pair in pads for n in pair])
    if draft.signature.operation == OperationType.PAD_V2:
        if draft.is_quantized:
            low = -128 if draft.type == Q8S else 0
            draft.integer_scalar(low, low + 255)
        else:
            draft.real_scalar_between(-10, 10)
    shape = [extent + sum(pair) for extent, pair in zip(x.dimensions, pads, strict=True)]
    draft.output(shape, like=x)


def _mirror_pad(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    mode = draft.integer(0, 1)
    pads = [(draft.integer(0, 3), draft.integer(0, 3)) for _ in range(draft.rank)]
    for extent, pair in zip(x.dimensions, pads, strict=True):
        # Reflection (mode 0) leaves out the border itself.
        draft.extents.require_at_least(extent, max(pair) + (1 if mode == 0 else 0))
    draft.integers(draft.known(draft.rank, 2), [n for pair in pads for n in pair])
    draft.scalar(OperandType.INT32, mode)
    shape = [extent + sum(pair) for extent, pair in zip(x.dimensions, pads, strict=True)]
    draft.output(shape, like=x)


def _concatenation(draft: Draft) -> None:
    axis = draft.integer(0, draft.rank - 1)
    shape = draft.frees()
    first = draft.tensor(shape)
    # One quantisation for all before level 3.
    like = first if draft.level < 3 else None
    total = shape[axis]
    for _ in range(draft.integer(1, 2)):
        extent = draft.free()
        draft.tensor([*shape[:axis], extent, *shape[axis + 1 :]], like=like)
        total = total + extent
    draft.scalar(OperandType.INT32, axis)
    draft.output([*shape[:axis], total, *shape[axis + 1 :]], like=like)


def _pack(draft: Draft) -> None:
    axis = draft.integer(0, draft.rank)
    draft.scalar(OperandType.INT32, axis)
    shape = draft.frees()
    first = draft.tensor(shape)
    count = draft.integer(1, 3)
    for _ in range(count - 1):
        draft.tensor(shape, like=first)
    draft.output([*shape[:axis], draft.extents.extent(count), *shape[axis:]], like=first)


def _split(draft: Draft) -> None:
    count = draft.integer(2, 3)
    axis = draft.axis()
    x = draft.tensor(draft.frees())
    draft.scalar(OperandType.INT32, axis)
    draft.scalar(OperandType.INT32, count)
    shape = list(x.dimensions)
    shape[axis] = draft.extents.divided_exactly(shape[axis], count)
    for _ in range(count):
        draft.output(shape, like=x)


def _tile(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    multiples = [draft.integer(1, 5) for _ in range(draft.rank)]
    draft.integers(draft.rank, multiples)
    draft.output([extent * n for extent, n in zip(x.dimensions, multiples, strict=True)], like=x)


def _slice(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    shape = draft.frees()
    for outer, inner in zip(x.dimensions, shape, strict=True):
        draft.extents.require_at_least(outer, inner)

    def begins() -> list[int]:
        return [
            draft.integer(0, outer.value - inner.value)
            for outer, inner in zip(x.dimensions, shape, strict=True)
        ]

    draft.integers(draft.rank, begins)
    draft.integers(draft.rank, lambda: [extent.value for extent in shape])
    draft.output(shape, like=x)


class _Cut:
    """The arguments of one STRIDED_SLICE, made when the extents are known."""

    def __init__(self, draft: Draft, shape: Sequence[Extent]) -> None:
        self.draft = draft
        self.shape = shape
        self.strides = [draft.integer(1, 3) for _ in shape]
        self.is_shrunk = [draft.chance(0.2) for _ in shape]
        self.begin_mask = self.end_mask = 0
        self.output: list[Extent] = []
        for extent, stride, is_shrunk in zip(shape, self.strides, self.is_shrunk, strict=True):
            if not is_shrunk:
                self.output.append(draft.free())
                draft.extents.require_at_least((extent + (stride - 1)) // stride, self.output[-1])

    def make(self) -> None:
        """Draws begins and ends that give the output's extents; some masked, some backwards."""
        draft = self.draft
        self.begins, self.ends = [], []
        output = iter(self.output)
        for axis, extent in enumerate(self.shape):
            size = extent.value
            if self.is_shrunk[axis]:
                begin = draft.integer(0, size - 1)
                self.begins.append(begin)
                self.ends.append(begin + 1)
                self.strides[axis] = 1
                continue
            count, stride = next(output).value, self.strides[axis]
            begin = draft.integer(0, size - (count - 1) * stride - 1)
            end = draft.integer(begin + (count - 1) * stride + 1, min(begin + count * stride, size))
            is_begin_masked = begin == 0 and draft.chance(0.2)
            is_end_masked = end == size and draft.chance(0.2)
            if draft.chance(0.2):
                # Backwards from the last element that was taken to the one before the first.
                last = begin + (count - 1) * stride
                self.strides[axis] = -stride
                begin, end = last, begin - 1
                is_begin_masked = last == size - 1 and draft.chance(0.2)
                # An end of -1 would mean the last element.
                is_end_masked = end < 0
            if is_begin_masked:
                begin = draft.integer(-size, size - 1)
                self.begin_mask |= 1 << axis
            if is_end_masked:
                end = draft.integer(-size, size - 1)
                self.end_mask |= 1 << axis
            self.begins.append(begin)
            self.ends.append(end)


def _strided_slice(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    cut = _Cut(draft, x.dimensions)

    def begins() -> list[int]:
        # The first argument that is filled makes all of them.
        cut.make()
        return cut.begins

    draft.integers(draft.rank, begins)
    draft.integers(draft.rank, lambda: cut.ends)
    draft.integers(draft.rank, lambda: cut.strides)
    draft.scalar_from(lambda: cut.begin_mask)
    draft.scalar_from(lambda: cut.end_mask)
    draft.scalar(OperandType.INT32, sum(1 << axis for axis, shrunk in enumerate(cut.is_shrunk) if shrunk))
    draft.output(cut.output, like=x)


# --- lookup


def _gather(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    axis = draft.axis()
    draft.scalar(OperandType.INT32, axis)
    axis %= draft.rank
    indexes = draft.frees(draft.integer(1, 5))

    def fill() -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return draft.rng.integers(0, x.dimensions[axis].value, [extent.value for extent in indexes])

    draft.integers(indexes, fill)
    draft.output([*x.dimensions[:axis], *indexes, *x.dimensions[axis + 1 :]], like=x)


def _embedding_lookup(draft: Draft) -> None:
    count, shape = draft.free(), draft.frees()
    draft.integers([count], lambda: draft.rng.integers(0, shape[0].value, count.value))
    x = draft.tensor(shape)
    draft.output([count, *shape[1:]], like=x)


def _hashtable_lookup(draft: Draft) -> None:
    count, shape = draft.free(), draft.frees()
    draft.integers([count], lambda: draft.rng.integers(0, 2 * shape[0].value + 2, count.value))
    # Keys rise, some numbers between them missing.
    draft.integers([shape[0]], lambda: np.cumsum(draft.rng.integers(1, 3, shape[0].value)))
    values = draft.tensor(shape)
    draft.output([count, *shape[1:]], like=values)
    draft.output([count], Q8, quantization=(1.0, 0))


def _topk(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    count = draft.free()
    draft.extents.require_at_least(x.dimensions[-1], count)
    draft.scalar_extent(count)
    draft.output([*x.dimensions[:-1], count], like=x)
    # Equal elements may come in any order, so their places are not checked.
    draft.output([*x.dimensions[:-1], count], I32, is_linkable=False, is_checked=False)


# --- reduction


def _reduce(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    axes = [draft.axis() for _ in range(draft.integer(1, draft.rank))]
    draft.integers(len(axes), axes)
    if draft.signature.operation == OperationType.MEAN:
        keeps = draft.chance(0.5)
        draft.scalar(OperandType.INT32, 100 if keeps else -100)
    else:
        keeps = draft.flag()
    reduced = {axis % draft.rank for axis in axes}
    shape = []
    for axis, extent in enumerate(x.dimensions):
        if axis not in reduced:
            shape.append(extent)
        elif keeps:
            shape.append(draft.extents.extent(1))
    # A product may be infinite: nothing is linked to it.
    is_linkable = draft.signature.operation != OperationType.REDUCE_PROD
    draft.output(shape, like=x, is_linkable=is_linkable)


def _argument(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    axis = draft.axis()
    draft.scalar(OperandType.INT32, axis)
    axis %= draft.rank
    draft.output([*x.dimensions[:axis], *x.dimensions[axis + 1 :]], I32)


_MOVED = {1: (F32, Q8), 3: (F16,), 4: (Q8S,)}
_MOVED_2 = {2: (F32, Q8), 3: (F16,), 4: (Q8S,)}
_LAYOUT = {3: (F32, Q8, F16), 4: (Q8S,)}
_TYPES_3 = {3: (F32, F16, I32, Q8), 4: (Q8S,)}
_REDUCED = {3: (F32, F16, Q8), 4: (Q8S,)}
_LATE = (F32, F16, Q8, Q8S, I32)

O = OperationType  # noqa: E741 - the table below has one on every line

SIGNATURES: tuple[Signature, ...] = (
    *by_level(O.RESHAPE, {**_MOVED, 6: (I32,)}, _UP_TO_4, _reshape),
    *by_level(O.SQUEEZE, _MOVED_2, _UP_TO_4, _squeeze),
    *by_level(O.SQUEEZE, _MOVED_2, _UP_TO_4, _squeeze_all, "all"),
    *by_level(O.EXPAND_DIMS, _TYPES_3, _UP_TO_5, _expand_dims),
    *by_level(O.TRANSPOSE, _MOVED_2, _UP_TO_4, _transpose),
    *by_level(O.TRANSPOSE, _MOVED_2, (2,), _transpose_reversed, "reversed"),
    *by_level(O.CHANNEL_SHUFFLE, {3: (F32, Q8, F16), 4: (Q8S,)}, _UP_TO_4, _channel_shuffle),
    *by_level(O.REVERSE, {7: _LATE}, _UP_TO_4, _reverse),
    *by_level(O.FILL, {4: (*FLOATS, I32)}, _UP_TO_5, _fill),
    *by_level(O.RANK, {4: (F32, F16, I32, Q8, BOOL8)}, _UP_TO_5, _rank),
    *by_level(O.DEPTH_TO_SPACE, _MOVED, (4,), _with_layout(_depth_to_space, False)),
    *by_level(O.DEPTH_TO_SPACE, _LAYOUT, (4,), _with_layout(_depth_to_space, True), "layout"),
    *by_level(O.SPACE_TO_DEPTH, _MOVED, (4,), _with_layout(_space_to_depth, False)),
    *by_level(O.SPACE_TO_DEPTH, _LAYOUT, (4,), _with_layout(_space_to_depth, True), "layout"),
    *by_level(O.BATCH_TO_SPACE_ND, _MOVED_2, (4,), _with_layout(_batch_to_space, False)),
    *by_level(O.BATCH_TO_SPACE_ND, _LAYOUT, (4,), _with_layout(_batch_to_space, True), "layout"),
    *by_level(O.SPACE_TO_BATCH_ND, _MOVED_2, (4,), _with_layout(_space_to_batch, False)),
    *by_level(O.SPACE_TO_BATCH_ND, _LAYOUT, (4,), _with_layout(_space_to_batch, True), "layout"),
    *by_level(O.PAD, _MOVED_2, _UP_TO_4, _pad),
    *by_level(O.PAD_V2, {3: (F32, Q8, F16), 4: (Q8S,)}, _UP_TO_4, _pad),
    *by_level(O.MIRROR_PAD, {7: _LATE}, _UP_TO_4, _mirror_pad),
    *by_level(O.CONCATENATION, {1: (F32, Q8), 3: (F16, Q8), 4: (Q8S,)}, _UP_TO_4, _concatenation),
    *by_level(O.PACK, {6: _LATE}, _UP_TO_4, _pack),
    *by_level(O.SPLIT, _TYPES_3, _UP_TO_4, _split),
    *by_level(O.TILE, _TYPES_3, _UP_TO_5, _tile),
    *by_level(O.SLICE, _TYPES_3, _UP_TO_4, _slice),
    *by_level(O.STRIDED_SLICE, _MOVED_2, _UP_TO_4, _strided_slice),
    *by_level(O.GATHER, _TYPES_3, _UP_TO_5, _gather),
    *by_level(O.EMBEDDING_LOOKUP, {1: (F32,), 3: (I32, Q8), 4: (Q8S, F16)}, (2, 3, 4), _embedding_lookup),
    *by_level(O.HASHTABLE_LOOKUP, {1: (F32, I32, Q8)}, (2, 3, 4), _hashtable_lookup),
    *by_level(O.TOPK_V2, _TYPES_3, _UP_TO_4, _topk),
    *by_level(O.MEAN, _MOVED_2, _UP_TO_4, _reduce),
    *by_level(O.REDUCE_ALL, {3: (BOOL8,)}, _UP_TO_4, _reduce),
    *by_level(O.REDUCE_ANY, {3: (BOOL8,)}, _UP_TO_4, _reduce),
    *by_level(O.REDUCE_MAX, _REDUCED, _UP_TO_4, _reduce),
    *by_level(O.REDUCE_MIN, _REDUCED, _UP_TO_4, _reduce),
    *by_level(O.REDUCE_PROD, {3: FLOATS}, _UP_TO_4, _reduce),
    *by_level(O.REDUCE_SUM, {3: FLOATS}, _UP_TO_4, _reduce),
    *by_level(O.ARGMAX, _TYPES_3, _UP_TO_5, _argument),
    *by_level(O.ARGMIN, _TYPES_3, _UP_TO_5, _argument),
)
