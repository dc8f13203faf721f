"""Shape rules of the extension's operations that move elements.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aionn.models.onnx.extension.application import Application, Shape, Unknown
from aionn.models.onnx.extension.records import RANK_MAX

__all__ = [
    "center_crop_pad", "concat", "constant_of_shape", "depth_to_space", "expand", "flatten", "gather", "gather_nd", "one_hot",
    "pad", "range_", "reshape", "resize", "slice_", "space_to_depth", "split", "squeeze", "tile", "top_k", "transpose",
    "unsqueeze",
]  # fmt: skip

Shapes = Sequence[Shape | None]


def _numbers(a: Application, name: str, position: int) -> list[int] | None:
    """Whole numbers of an attribute in earlier versions, of an input in later ones; None where neither is given."""
    given = a.integers(name)
    return given if given is not None else a.numbers(position) if a.has(position) else None


def reshape(a: Application) -> Shapes:
    wanted = _numbers(a, "shape", 1)
    if wanted is None:
        raise Unknown
    if len(wanted) > RANK_MAX:
        a.refuse("shape", f"at most {RANK_MAX} extents", len(wanted))
    x = a.shape(0)
    shape = list(wanted)
    if not a.integer("allowzero", 0):
        shape = [x[axis] if extent == 0 else extent for axis, extent in enumerate(shape)]
    if -1 in shape:
        rest = math.prod(extent for extent in shape if extent != -1)
        shape[shape.index(-1)] = math.prod(x) // rest if rest else 0
    if math.prod(shape) != math.prod(x) or min(shape, default=0) < 0:
        a.refuse("shape", f"{math.prod(x)} elements", list(wanted))
    return [tuple(shape)]


def flatten(a: Application) -> Shapes:
    x = a.shape(0)
    axis = a.integer("axis", 1)
    if not -len(x) <= axis <= len(x):
        a.refuse("axis", f"an axis up to {len(x)}", axis)
    axis = axis + len(x) if axis < 0 else axis
    return [(math.prod(x[:axis]), math.prod(x[axis:]))]


def squeeze(a: Application) -> Shapes:
    x = a.shape(0)
    axes = _numbers(a, "axes", 1)
    gone = (
        {i for i, extent in enumerate(x) if extent == 1}
        if axes is None
        else {a.axis(i, len(x)) for i in axes}
    )
    return [tuple(extent for axis, extent in enumerate(x) if axis not in gone)]


def unsqueeze(a: Application) -> Shapes:
    axes = _numbers(a, "axes", 1) or []
    rank = a.rank(0) + len(axes)
    new = {a.axis(axis, rank) for axis in axes}
    if len(new) != len(axes):
        a.refuse("axes", "every axis once", axes)
    rest = iter(a.shape(0))
    return [tuple(1 if axis in new else next(rest) for axis in range(rank))]


def transpose(a: Application) -> Shapes:
    x = a.shape(0)
    order = a.integers("perm")
    if order is None:
        order = list(reversed(range(len(x))))
    if sorted(order) != list(range(len(x))):
        a.refuse("attribute 'perm'", f"every axis of {len(x)} once", order)
    return [tuple(x[axis] for axis in order)]


def concat(a: Application) -> Shapes:
    shapes = [a.shape(position) for position in range(len(a.inputs))]
    axis = a.axis(a.integer("axis", 1), len(shapes[0]))
    if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) != 1:
        a.refuse("inputs", "equal shapes but for one axis", [list(shape) for shape in shapes][:4])
    return [(*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])]


def split(a: Application) -> Shapes:
    x = a.shape(0)
    axis = a.axis(a.integer("axis", 0), len(x))
    parts = _numbers(a, "split", 1)
    if parts is None:
        size = -(-x[axis] // a.outputs)
        parts = [max(0, min(size, x[axis] - size * i)) for i in range(a.outputs)]
    return [(*x[:axis], part, *x[axis + 1 :]) for part in parts]


def slice_(a: Application) -> Shapes:
    x = a.shape(0)
    starts, ends = _numbers(a, "starts", 1) or [], _numbers(a, "ends", 2) or []
    axes = _numbers(a, "axes", 3)
    axes = list(range(len(starts))) if axes is None else axes
    steps = a.numbers(4) if a.has(4) else [1] * len(starts)
    shape = list(x)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        place = a.axis(axis, len(x))
        shape[place] = len(range(x[place])[start:end:step])
    return [tuple(shape)]


def expand(a: Application) -> Shapes:
    return [a.broadcast(a.shape(0), tuple(a.numbers(1)))]


def tile(a: Application) -> Shapes:
    x = a.shape(0)
    if a.has(2):
        times = [1] * len(x)
        times[a.axis(a.number(2), len(x))] = a.number(1)
    else:
        times = a.numbers(1)
    return [tuple(extent * count for extent, count in zip(x, times, strict=True))]


def pad(a: Application) -> Shapes:
    x = a.shape(0)
    pads = a.integers("pads") or a.integers("paddings")
    pads = a.numbers(1) if pads is None else pads
    axes = [a.axis(axis, len(x)) for axis in a.numbers(3)] if a.has(3) else list(range(len(x)))
    shape = list(x)
    for place, axis in enumerate(axes):
        shape[axis] += pads[place] + pads[place + len(axes)]
    return [tuple(shape)]


def center_crop_pad(a: Application) -> Shapes:
    x = list(a.shape(0))
    axes = a.integers("axes")
    for axis, extent in zip(range(len(x)) if axes is None else axes, a.numbers(1), strict=True):
        x[a.axis(axis, len(x))] = extent
    return [tuple(x)]


def gather(a: Application) -> Shapes:
    x = a.shape(0)
    axis = a.axis(a.integer("axis", 0), len(x))
    return [(*x[:axis], *a.shape(1), *x[axis + 1 :])]


def gather_nd(a: Application) -> Shapes:
    x, places = a.shape(0), a.shape(1)
    return [(*places[:-1], *x[a.integer("batch_dims", 0) + places[-1] :])]


def one_hot(a: Application) -> Shapes:
    places = a.shape(0)
    depth = int(a.real(1))
    axis = a.axis(a.integer("axis", -1), len(places) + 1)
    return [(*places[:axis], depth, *places[axis:])]


def top_k(a: Application) -> Shapes:
    x = a.shape(0)
    axis = a.axis(a.integer("axis", -1), len(x))
    k = a.number(1) if a.has(1) else a.integer("k", 1)
    return [(*x[:axis], k, *x[axis + 1 :])] * a.outputs


def depth_to_space(a: Application) -> Shapes:
    batch, channels, height, width = a.shape(0)
    size = a.integer("blocksize", 1)
    return [(batch, channels // size**2, height * size, width * size)]


def space_to_depth(a: Application) -> Shapes:
    batch, channels, height, width = a.shape(0)
    size = a.integer("blocksize", 1)
    return [(batch, channels * size**2, height // size, width // size)]


def constant_of_shape(a: Application) -> Shapes:
    return [tuple(a.numbers(0))]


def range_(a: Application) -> Shapes:
    (start,), (limit,), (step,) = a.reals(0), a.reals(1), a.reals(2)
    return [(max(0, math.ceil((limit - start) / step)),)]


def resize(a: Application) -> Shapes:
    """Also of Upsample, whose scales are an attribute or its second input."""
    x = a.shape(0)
    axes = [a.axis(axis, len(x)) for axis in a.integers("axes") or range(len(x))]
    shape = list(x)
    scales_at = 1 if a.op_type == "Upsample" or a.version < 11 else 2
    if a.op_type == "Resize" and a.has(3) and (a.inputs[3] is not None and a.inputs[3].shape != (0,)):
        if a.text("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise Unknown
        extents = a.numbers(3)
    else:
        scales = a.attributes.get("scales")
        scales = a.reals(scales_at) if scales is None else scales
        # Scales are float32 numbers, with which the extent is computed.
        extents = [
            int(np.floor(np.float32(x[axis]) * np.float32(scale)))
            for axis, scale in zip(axes, scales, strict=True)
        ]
    for axis, extent in zip(axes, extents, strict=True):
        shape[axis] = extent
    return [tuple(shape)]
