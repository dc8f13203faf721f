"""Operators that cut: SLICE, STRIDED_SLICE.

Owns what their masks mean, and how a part is cut from types that the HAL's STRIDED_SLICE does not take, and from more axes.

Source: the TensorFlow Lite operators' documentation and reference kernels; the contracts in ``aionn.ops``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from aionn.hal import OperandType, OperationType
from aionn.models.tflite.graph import (
    OPERAND_RANK_MAX,
    Inexpressible,
    Shape,
    SubgraphWriter,
    is_known,
)
from aionn.models.tflite.schema import TfliteOperator

__all__ = ["slice_", "strided_slice"]

_TABLE = "StridedSliceOptions"


def slice_(g: SubgraphWriter, op: TfliteOperator) -> None:
    """SLICE; of more than four axes with constant places."""
    shape = g.input_tensor(op, 0).dimensions
    if len(shape) <= OPERAND_RANK_MAX:
        g.emit_to(op, OperationType.SLICE, [g.input(op, position) for position in range(3)])
        return
    begins, sizes = (g.integers_of(op, p, what) for p, what in ((1, "begins"), (2, "sizes")))
    if len(begins) != len(shape) or len(sizes) != len(shape) or not is_known(shape):
        g.refuse(op, "inputs 1 and 2", f"{len(shape)} numbers", [len(begins), len(sizes)])
    ranges = []
    for axis, (extent, begin, size) in enumerate(zip(shape, begins, sizes, strict=True)):
        end = extent if size == -1 else begin + size
        if not 0 <= begin < end <= extent:
            g.refuse(op, f"axis {axis}", "a slice with elements", f"{begin} to {end} of {extent}")
        ranges.append(range(begin, end))
    part = cut(g, g.input(op, 0), shape, ranges)
    g.bind(op, 0, g.reshaped(part, g.describe_output(op).dimensions))


class _Axis(NamedTuple):
    """An axis of a strided slice: one of the input's, or with ``is_new`` one that the result has in addition."""

    begin: int | None
    end: int | None
    stride: int
    is_shrunk: bool
    is_new: bool


def strided_slice(g: SubgraphWriter, op: TfliteOperator) -> None:
    """STRIDED_SLICE; SLICE or GATHER, and RESHAPE, where the HAL's takes the type, the rank or the mask not."""
    if op.integer(_TABLE, "offset"):
        raise Inexpressible("option offset")
    data = g.input(op, 0)
    shape = g.input_tensor(op, 0).dimensions
    rank = len(shape)
    if rank <= OPERAND_RANK_MAX:
        shape = g.dimensions(data)
    masks = [op.integer(_TABLE, name) for name in ("begin_mask", "end_mask", "shrink_axis_mask")]
    is_plain = not op.integer(_TABLE, "ellipsis_mask") and not op.integer(_TABLE, "new_axis_mask")
    every_axis = (1 << len(shape)) - 1
    if (
        is_plain
        and rank <= OPERAND_RANK_MAX
        and g.type_of(data) != OperandType.TENSOR_INT32
        and masks[2] & every_axis != every_axis
    ):
        arguments = [g.input(op, position) for position in (1, 2, 3)]
        g.emit_to(op, OperationType.STRIDED_SLICE, [data, *arguments, *map(g.int32, masks)])
        return
    axes = _axes(g, op, len(shape), masks)
    if not is_known(shape):
        _open_slice(g, op, data, shape, [axis for axis in axes if not axis.is_new])
        return
    ranges = _ranges(g, op, shape, [axis for axis in axes if not axis.is_new])
    part = cut(g, data, shape, ranges)
    wanted = g.describe_output(op).dimensions
    if is_known(wanted):
        g.bind(op, 0, g.reshaped(part, wanted))
    else:
        g.reshape(part, g.output(op))


def _open_slice(
    g: SubgraphWriter, op: TfliteOperator, data: int, shape: Shape, axes: Sequence[_Axis]
) -> None:
    """A SLICE of integers with unknown extents, of which it takes the whole."""
    begins, sizes = [], []
    for axis, (extent, one) in enumerate(zip(shape, axes, strict=True)):
        if one.is_shrunk and one.begin is not None and one.begin >= 0:
            begins.append(one.begin)
            sizes.append(1)
        elif one.begin in (None, 0) and one.end is None and one.stride == 1 and not one.is_shrunk:
            begins.append(0)
            sizes.append(-1)
        else:
            raise Inexpressible(f"a part of axis {axis}, whose extent is {extent or 'unknown'}, of integers")
    part = g.like(data, tuple(0 if size == -1 else size for size in sizes))
    g.emit(OperationType.SLICE, [data, g.int32s(begins), g.int32s(sizes)], [part])
    g.reshape(part, g.output(op))


def _axes(g: SubgraphWriter, op: TfliteOperator, rank: int, masks: Sequence[int]) -> list[_Axis]:
    """The constant lists and the masks as one record per axis, the ellipsis written out."""
    lists = [g.integers_of(op, p, what) for p, what in ((1, "begins"), (2, "ends"), (3, "strides"))]
    if len({len(values) for values in lists}) != 1:
        g.refuse(op, "inputs 1 to 3", "lists of one length", [len(values) for values in lists])
    ellipsis, new_axis = (op.integer(_TABLE, name) for name in ("ellipsis_mask", "new_axis_mask"))
    count = len(lists[0])
    # The ellipsis goes before a new axis, and both before a removed one; only the first ellipsis counts.
    first = next((i for i in range(count) if ellipsis >> i & 1), None)
    new = [i for i in range(count) if new_axis >> i & 1 and i != first]
    own = count - len(new) - (first is not None)
    if own > rank:
        g.refuse(op, "input 1", f"at most {rank} axes", own)
    whole = _Axis(None, None, 1, False, False)
    axes: list[_Axis] = []
    for i, (begin, end, stride) in enumerate(zip(*lists, strict=True)):
        if i == first:
            axes += [whole] * (rank - own)
        elif i in new:
            axes.append(_Axis(None, None, 1, False, True))
        else:
            is_shrunk = bool(masks[2] >> i & 1)
            axes.append(
                _Axis(
                    None if masks[0] >> i & 1 else begin,
                    None if masks[1] >> i & 1 else end,
                    stride,
                    is_shrunk,
                    False,
                )
            )
    return axes + [whole] * (rank - sum(not axis.is_new for axis in axes))


def _ranges(g: SubgraphWriter, op: TfliteOperator, shape: Shape, axes: Sequence[_Axis]) -> list[range]:
    ranges = []
    for number, (extent, axis) in enumerate(zip(shape, axes, strict=True)):
        if axis.is_shrunk:
            begin = 0 if axis.begin is None else axis.begin
            first = begin % extent if -extent <= begin < extent else -1
            taken = range(first, first + 1) if first >= 0 else range(0)
        elif axis.stride == 0:
            g.refuse(op, "input 3 (strides)", "no stride of 0", 0)
        else:
            taken = range(*slice(axis.begin, axis.end, axis.stride).indices(extent))
        if not taken:
            got = f"{axis.begin} to {axis.end} of {extent}"
            g.refuse(op, f"axis {number}", "a slice with elements", got)
        ranges.append(taken)
    return ranges


def _cut_one_by_one(g: SubgraphWriter, data: int, shape: Shape, ranges: Sequence[range]) -> int:
    """As ``cut``, an axis at a time, with the axes before and behind it merged to one each."""
    left = list(shape)
    for axis, taken in enumerate(ranges):
        if taken != range(left[axis]):
            before, behind = math.prod(left[:axis]), math.prod(left[axis + 1 :])
            data = cut(g, data, (before, left[axis], behind), (range(before), taken, range(behind)))
            left[axis] = len(taken)
    return data


def cut(g: SubgraphWriter, data: int, shape: Shape, ranges: Sequence[range]) -> int:
    """The part of each axis that the ranges take; ``shape`` is the tensor's own, of any rank, and the result has merged axes beyond
    four.
    """
    groups: list[tuple[int, range]] = []
    last_is_whole = False
    for extent, taken in zip(shape, ranges, strict=True):
        is_whole = taken == range(extent)
        if is_whole and last_is_whole:
            before = groups.pop()[0]
            groups.append((before * extent, range(before * extent)))
        else:
            groups.append((extent, taken))
        last_is_whole = is_whole
    if len(groups) > OPERAND_RANK_MAX:
        return _cut_one_by_one(g, data, shape, ranges)
    value = g.reshaped(data, tuple(extent for extent, _ in groups))
    if any(taken.step == 1 and taken != range(extent) for extent, taken in groups):
        begins = [taken.start if taken.step == 1 else 0 for _, taken in groups]
        sizes = [len(taken) if taken.step == 1 else extent for extent, taken in groups]
        part = g.like(value, tuple(sizes))
        g.emit(OperationType.SLICE, [value, g.int32s(begins), g.int32s(sizes)], [part])
        value = part
    for axis, (_, taken) in enumerate(groups):
        if taken.step != 1:
            g.model.check_budget(8 * len(taken))
            have = g.dimensions(value)
            part = g.like(value, (*have[:axis], len(taken), *have[axis + 1 :]))
            g.emit(OperationType.GATHER, [value, g.int32(axis), g.int32s(list(taken))], [part])
            value = part
    assert math.prod(g.dimensions(value)) == math.prod(len(taken) for taken in ranges), "nothing is lost"
    return value
