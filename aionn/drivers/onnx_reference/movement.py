"""Operators that move elements: shapes, orders, slices, padding.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aionn.drivers.onnx_reference.arrays import Array, axis_of, check_room, numbers, single
from aionn.errors import InvalidArgument

__all__ = ["KERNELS"]


def _given(attribute: Sequence[int] | None, array: Array | None) -> list[int] | None:
    """Whole numbers of an attribute in earlier versions, of an input in later ones."""
    return list(attribute) if attribute is not None else None if array is None else numbers(array)


def reshape(
    x: Array,
    shape_input: Array | None = None,
    *,
    shape: Any = None,
    allowzero: int = 0,
    consumed_inputs: Any = None,
) -> Array:
    wanted = _given(shape, shape_input) or []
    if not allowzero:
        if any(extent == 0 and axis >= x.ndim for axis, extent in enumerate(wanted)):
            raise InvalidArgument(f"Reshape: expected zeros for axes of the input alone, got {wanted}")
        wanted = [x.shape[axis] if extent == 0 else extent for axis, extent in enumerate(wanted)]
    return x.reshape(wanted)


def flatten(x: Array, *, axis: int = 1) -> Array:
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape((math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def squeeze(x: Array, axes_input: Array | None = None, *, axes: Any = None) -> Array:
    given = _given(axes, axes_input)
    return np.squeeze(x, None if given is None else tuple(given))


def unsqueeze(x: Array, axes_input: Array | None = None, *, axes: Any = None) -> Array:
    return np.expand_dims(x, tuple(_given(axes, axes_input) or ()))


def transpose(x: Array, *, perm: Any = None) -> Array:
    return np.transpose(x, perm)


def concat(*inputs: Array, axis: int = 1) -> Array:
    return np.concatenate(inputs, axis)


def split(
    x: Array, split_input: Array | None = None, *, count: int, axis: int = 0, num_outputs: int | None = None, split: Any = None
) -> tuple[Array, ...]:  # fmt: skip
    parts = _given(split, split_input)
    axis = axis_of(axis, x.ndim)
    extent = x.shape[axis]
    if parts is None:
        pieces = num_outputs or count
        size = -(-extent // pieces)
        parts = [max(0, min(size, extent - size * i)) for i in range(pieces)]
    if sum(parts) != extent or min(parts) < 0 or len(parts) < count:
        raise InvalidArgument(f"Split: expected {count} parts of {extent} elements, got {parts[:20]}")
    return tuple(np.split(x, np.cumsum(parts)[:-1], axis))


def slice_(
    x: Array,
    starts_input: Array | None = None,
    ends_input: Array | None = None,
    axes_input: Array | None = None,
    steps_input: Array | None = None,
    *,
    starts: Any = None,
    ends: Any = None,
    axes: Any = None,
) -> Array:
    begins, stops = _given(starts, starts_input) or [], _given(ends, ends_input) or []
    along = _given(axes, axes_input)
    along = list(range(len(begins))) if along is None else along
    steps = [1] * len(begins) if steps_input is None else numbers(steps_input)
    if not len(begins) == len(stops) == len(along) == len(steps) or 0 in steps:
        raise InvalidArgument("Slice: expected as many starts as ends, axes and steps, and no step of 0")
    index: list[slice] = [slice(None)] * x.ndim
    for start, stop, axis, step in zip(begins, stops, along, steps, strict=True):
        place = axis_of(axis, x.ndim)
        first, last, _ = slice(start, stop, step).indices(x.shape[place])
        # A negative last index means that the slice reaches the first element, which None expresses.
        index[place] = slice(first, None if last < 0 else last, step)
    return x[tuple(index)]


def expand(x: Array, shape: Array) -> Array:
    target = np.broadcast_shapes(x.shape, check_room(numbers(shape), x.itemsize))
    return np.broadcast_to(x, check_room(target, x.itemsize))


def tile(x: Array, repeats: Array, axis: Array | None = None) -> Array:
    if axis is not None:
        times = [1] * x.ndim
        times[axis_of(int(axis.reshape(())), x.ndim)] = int(repeats.reshape(()))
    else:
        times = numbers(repeats)
    if len(times) != x.ndim or min(times, default=0) < 0:
        raise InvalidArgument(f"Tile: expected {x.ndim} repetitions, got {times[:20]}")
    check_room([extent * count for extent, count in zip(x.shape, times, strict=True)], x.itemsize)
    return np.tile(x, times)


def pad(
    x: Array,
    pads_input: Array | None = None,
    value_input: Array | None = None,
    axes: Array | None = None,
    *,
    mode: str = "constant",
    pads: Any = None,
    paddings: Any = None,
    value: float = 0.0,
) -> Array:
    amounts = _given(pads if pads is not None else paddings, pads_input) or []
    along = [axis_of(a, x.ndim) for a in numbers(axes)] if axes is not None else list(range(x.ndim))
    if len(amounts) != 2 * len(along):
        raise InvalidArgument(f"Pad: expected {2 * len(along)} numbers of padding, got {len(amounts)}")
    number = value if value_input is None else single(value_input, "Pad, value")
    widths = [(0, 0)] * x.ndim
    for place, axis in enumerate(along):
        begin, end = amounts[place], amounts[place + len(along)]
        # Negative padding removes elements.
        index: list[slice] = [slice(None)] * x.ndim
        index[axis] = slice(max(0, -begin), x.shape[axis] - max(0, -end))
        x = x[tuple(index)]
        widths[axis] = (max(0, begin), max(0, end))
    check_room([extent + sum(width) for extent, width in zip(x.shape, widths, strict=True)], x.itemsize)
    if mode == "constant":
        return np.pad(x, widths, constant_values=np.asarray(number).astype(x.dtype))
    modes = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}
    if mode not in modes:
        raise InvalidArgument(f"attribute 'mode': expected a kind of padding, got {mode!r:.40}")
    how: Any = modes[mode]
    return np.pad(x, widths, how)


def center_crop_pad(x: Array, shape: Array, *, axes: Any = None) -> Array:
    along = range(x.ndim) if axes is None else axes
    for axis, extent in zip(along, check_room(numbers(shape)), strict=True):
        axis = axis_of(axis, x.ndim)
        more = extent - x.shape[axis]
        if more < 0:
            begin = -more // 2
            x = np.take(x, range(begin, begin + extent), axis)
        elif more > 0:
            widths = [(0, 0)] * x.ndim
            widths[axis] = (more // 2, more - more // 2)
            x = np.pad(x, widths)
    return x


def depth_to_space(x: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    batch, channels, height, width = x.shape
    depth = channels // blocksize**2
    if mode == "DCR":
        parts = x.reshape(batch, blocksize, blocksize, depth, height, width).transpose(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(batch, depth, blocksize, blocksize, height, width).transpose(0, 1, 4, 2, 5, 3)
    return parts.reshape(batch, depth, height * blocksize, width * blocksize)


def space_to_depth(x: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, channels, height // blocksize, blocksize, width // blocksize, blocksize)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    shape = (batch, channels * blocksize**2, height // blocksize, width // blocksize)
    return parts.transpose(order).reshape(shape)


def trilu(x: Array, k: Array | None = None, *, upper: int = 1) -> Array:
    diagonal = 0 if k is None else int(k.reshape(()))
    # Beyond the extents every diagonal is the same, and numpy takes only small numbers.
    diagonal = max(-x.shape[-2] - 1, min(x.shape[-1] + 1, diagonal))
    return np.triu(x, diagonal) if upper else np.tril(x, diagonal)


def eye_like(x: Array, *, out: np.dtype[Any], dtype: int | None = None, k: int = 0) -> Array:
    rows, columns = x.shape
    return np.eye(rows, columns, k, out)


def reverse_sequence(x: Array, lengths: Array, *, batch_axis: int = 1, time_axis: int = 0) -> Array:
    result = x.copy()
    moved, source = (
        np.moveaxis(result, (batch_axis, time_axis), (0, 1)),
        np.moveaxis(x, (batch_axis, time_axis), (0, 1)),
    )
    for place, length in enumerate(numbers(lengths)):
        if not 0 <= length <= source.shape[1]:
            raise InvalidArgument(f"ReverseSequence: expected lengths up to {source.shape[1]}, got {length}")
        moved[place, :length] = source[place, :length][::-1]
    return result


KERNELS: dict[str, Callable[..., Any]] = {
    "CenterCropPad": center_crop_pad,
    "Concat": concat,
    "DepthToSpace": depth_to_space,
    "Expand": expand,
    "EyeLike": eye_like,
    "Flatten": flatten,
    "Pad": pad,
    "Reshape": reshape,
    "ReverseSequence": reverse_sequence,
    "Slice": slice_,
    "SpaceToDepth": space_to_depth,
    "Split": split,
    "Squeeze": squeeze,
    "Tile": tile,
    "Transpose": transpose,
    "Trilu": trilu,
    "Unsqueeze": unsqueeze,
}
"""The kernels by operator."""
