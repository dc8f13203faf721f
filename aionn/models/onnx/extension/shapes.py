"""Shape rules of the extension's operations that compute, and of those with a fixed relation of shapes.

Each rule takes an application and returns the shapes of its outputs, -1 for an extent that only the execution knows. It raises
``Unknown`` if it needs a shape or constant that is not known.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from aionn.models.onnx.extension.application import Application, Shape, Unknown
from aionn.models.onnx.extension.geometry import transposed_pads, windows
from aionn.models.onnx.extension.movement_shapes import (
    center_crop_pad,
    concat,
    constant_of_shape,
    depth_to_space,
    expand,
    flatten,
    gather,
    gather_nd,
    one_hot,
    pad,
    range_,
    reshape,
    resize,
    slice_,
    space_to_depth,
    split,
    squeeze,
    tile,
    top_k,
    transpose,
    unsqueeze,
)

__all__ = [
    "affine_grid", "arg_extremum", "attention", "batch_normalization", "broadcast", "center_crop_pad", "col2im", "concat",
    "constant_of_shape", "conv", "conv_transpose", "depth_to_space", "det", "dft", "dynamic_quantize", "einsum", "expand",
    "flatten", "gather", "gather_nd", "gemm", "global_pool", "grid_sample", "layer_normalization", "like_first",
    "like_second", "loss", "matmul", "max_roi_pool", "max_unpool", "mel_weight_matrix", "non_max_suppression", "non_zero",
    "one_hot", "pad", "pool", "range_", "recurrent", "reduction", "reshape", "resize", "roi_align", "scalar", "shape_of",
    "slice_", "space_to_depth", "split", "squeeze", "stft", "tile", "top_k", "transpose", "unsqueeze", "window",
]  # fmt: skip

Shapes = Sequence[Shape | None]


def like_first(a: Application) -> Shapes:
    """Every output has the shape of the first input."""
    return [a.shape(0)] * a.outputs


def like_second(a: Application) -> Shapes:
    return [a.shape(1)]


def scalar(a: Application) -> Shapes:
    return [()]


def broadcast(a: Application) -> Shapes:
    if a.version < 7 and "broadcast" in a.attributes:
        return [a.shape(0)]
    return [a.broadcast(*(a.shape(position) for position in range(len(a.inputs))))]


def reduction(a: Application) -> Shapes:
    shape = a.shape(0)
    axes = a.integers("axes")
    if axes is None:
        axes = a.numbers(1) if a.has(1) else []
    if not axes and a.integer("noop_with_empty_axes", 0):
        return [shape]
    reduced = {a.axis(axis, len(shape)) for axis in axes} if axes else set(range(len(shape)))
    return [_without(shape, reduced, keeps=bool(a.integer("keepdims", 1)))]


def _without(shape: Shape, reduced: set[int], *, keeps: bool) -> Shape:
    if keeps:
        return tuple(1 if axis in reduced else extent for axis, extent in enumerate(shape))
    return tuple(extent for axis, extent in enumerate(shape) if axis not in reduced)


def arg_extremum(a: Application) -> Shapes:
    shape = a.shape(0)
    axis = a.axis(a.integer("axis", 0), len(shape))
    return [_without(shape, {axis}, keeps=bool(a.integer("keepdims", 1)))]


def matmul(a: Application) -> Shapes:
    """Also of QLinearMatMul, whose second matrix is its fourth input."""
    left, right = a.shape(0), a.shape(3 if a.op_type == "QLinearMatMul" else 1)
    if not left or not right or left[-1] != right[max(-2, -len(right))]:
        a.refuse("inputs", "matrices that fit each other", f"{list(left)} and {list(right)}")
    batch = a.broadcast(left[:-2], right[:-2])
    return [(*batch, *left[-2:-1], *(right[-1:] if len(right) > 1 else ()))]


def gemm(a: Application) -> Shapes:
    left, right = a.shape(0), a.shape(1)
    if len(left) != 2 or len(right) != 2:
        a.refuse("inputs", "two matrices", f"{list(left)} and {list(right)}")
    return [
        (left[1 if a.integer("transA", 0) else 0], right[0 if a.integer("transB", 0) else 1]),
    ]


def _spatial(a: Application, shape: Shape) -> Shape:
    if len(shape) < 3:
        a.refuse("input 0", "batch, channels and spatial axes", list(shape))
    return shape[2:]


def conv(a: Application) -> Shapes:
    """Also of QLinearConv, whose weights are its fourth input."""
    x, weights = a.shape(0), a.shape(3 if a.op_type == "QLinearConv" else 1)
    spatial = _spatial(a, x)
    if len(weights) != len(x):
        a.refuse("weights", f"{len(x)} axes", len(weights))
    return [(x[0], weights[0], *windows(a.attributes, spatial, weights[2:]).extents)]


def conv_transpose(a: Application) -> Shapes:
    x, weights = a.shape(0), a.shape(1)
    spatial = _spatial(a, x)
    if len(weights) != len(x):
        a.refuse("weights", f"{len(x)} axes", len(weights))
    extents = transposed_pads(a.attributes, spatial, weights[2:]).extents
    return [(x[0], weights[1] * a.integer("group", 1), *extents)]


def pool(a: Application) -> Shapes:
    x = a.shape(0)
    spatial = _spatial(a, x)
    kernel = a.integers("kernel_shape")
    if kernel is None or len(kernel) != len(spatial) or min(kernel) < 1:
        a.refuse("attribute 'kernel_shape'", f"{len(spatial)} extents", kernel)
    shape = (*x[:2], *windows(a.attributes, spatial, kernel, is_pool=True).extents)
    return [shape] * a.outputs


def global_pool(a: Application) -> Shapes:
    x = a.shape(0)
    return [(*x[:2], *[1] * len(_spatial(a, x)))]


def max_unpool(a: Application) -> Shapes:
    if a.has(2):
        return [tuple(a.numbers(2))]
    x = a.shape(0)
    kernel = a.integers("kernel_shape") or []
    strides = a.integers("strides") or [1] * len(kernel)
    pads = a.integers("pads") or [0] * 2 * len(kernel)
    count = len(kernel)
    extents = [(x[i + 2] - 1) * strides[i] - pads[i] - pads[count + i] + kernel[i] for i in range(count)]
    return [(*x[:2], *extents)]


def max_roi_pool(a: Application) -> Shapes:
    return [(a.shape(1)[0], a.shape(0)[1], *(a.integers("pooled_shape") or []))]


def roi_align(a: Application) -> Shapes:
    height, width = a.integer("output_height", 1), a.integer("output_width", 1)
    return [(a.shape(1)[0], a.shape(0)[1], height, width)]


def grid_sample(a: Application) -> Shapes:
    return [(*a.shape(0)[:2], *a.shape(1)[1:-1])]


def affine_grid(a: Application) -> Shapes:
    size = a.numbers(1)
    return [(size[0], *size[2:], len(size) - 2)]


def col2im(a: Application) -> Shapes:
    x, image, block = a.shape(0), a.numbers(1), a.numbers(2)
    return [(x[0], x[1] // math.prod(block), *image)]


def recurrent(a: Application) -> Shapes:
    x, weights = a.shape(0), a.shape(2)
    directions, units = weights[0], weights[-1]
    if a.integer("layout", 0):
        state = (x[0], directions, units)
        return [(x[0], x[1], directions, units), *[state] * (a.outputs - 1)]
    state = (directions, x[1], units)
    return [(x[0], directions, x[1], units), *[state] * (a.outputs - 1)]


def layer_normalization(a: Application) -> Shapes:
    x = a.shape(0)
    axis = a.axis(a.integer("axis", -1), len(x))
    statistics = (*x[:axis], *[1] * (len(x) - axis))
    return [x, *[statistics] * (a.outputs - 1)]


def batch_normalization(a: Application) -> Shapes:
    return [a.shape(0), *[a.shape(1)] * (a.outputs - 1)]


def dynamic_quantize(a: Application) -> Shapes:
    return [a.shape(0), (), ()][: a.outputs]


def attention(a: Application) -> Shapes:
    """The result has the form of the queries; keys and values may be joined to earlier ones."""
    q, k, v = a.shape(0), a.shape(1), a.shape(2)
    if len(q) == 4:
        batch, heads, length, _ = q
        kv_heads, kv_length, size, kv_size = k[1], k[2], k[3], v[3]
        first: Shape = (batch, heads, length, kv_size)
    else:
        batch, length, _ = q
        heads, kv_heads = a.integer("q_num_heads", 1), a.integer("kv_num_heads", 1)
        kv_length, size, kv_size = k[1], k[2] // kv_heads, v[2] // kv_heads
        first = (batch, length, heads * kv_size)
    total = kv_length + (a.shape(4)[2] if a.has(4) else 0)
    present = [(batch, kv_heads, total, size), (batch, kv_heads, total, kv_size)]
    return [first, *present, (batch, heads, length, total)][: a.outputs]


def det(a: Application) -> Shapes:
    return [a.shape(0)[:-2]]


def einsum(a: Application) -> Shapes:
    equation = a.text("equation", "").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(a.inputs):
        a.refuse("attribute 'equation'", f"{len(a.inputs)} terms", len(terms))
    extents: dict[str, int] = {}
    dots: Shape = ()
    for position, term in enumerate(terms):
        shape = a.shape(position)
        before, ellipsis, after = term.partition("...")
        if len(before) + len(after) > len(shape) or (not ellipsis and len(before) != len(shape)):
            a.refuse("attribute 'equation'", f"a term for {len(shape)} axes", term)
        for letter, extent in zip(before, shape, strict=False):
            extents[letter] = max(extent, extents.get(letter, 1))
        for letter, extent in zip(reversed(after), reversed(shape), strict=False):
            extents[letter] = max(extent, extents.get(letter, 1))
        if ellipsis:
            dots = a.broadcast(dots, shape[len(before) : len(shape) - len(after)])
    if not arrow:
        joined = left.replace(",", "").replace(".", "")
        once = sorted(letter for letter in set(joined) if joined.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    before, ellipsis, after = right.partition("...")
    return [
        (*(extents[letter] for letter in before), *(dots if ellipsis else ()), *(extents[c] for c in after))
    ]


def non_zero(a: Application) -> Shapes:
    return [(a.rank(0), -1)]


def non_max_suppression(a: Application) -> Shapes:
    return [(-1, 3)]


def shape_of(a: Application) -> Shapes:
    return [(len(range(a.rank(0))[a.integer("start", 0) : a.integer("end", 1 << 30)]),)]


def window(a: Application) -> Shapes:
    return [(a.number(0),)]


def mel_weight_matrix(a: Application) -> Shapes:
    return [(a.number(1) // 2 + 1, a.number(0))]


def loss(a: Application) -> Shapes:
    """NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss, whose second output is the logarithms of the probabilities."""
    x = a.shape(0)
    first = (x[0], *x[2:]) if a.text("reduction", "mean") == "none" else ()
    return [first, x][: a.outputs]


def dft(a: Application) -> Shapes:
    x = list(a.shape(0))
    axis = a.number(2) if a.has(2) else a.integer("axis", 1 if a.version < 20 else -2)
    axis = a.axis(axis, len(x))
    if a.has(1):
        x[axis] = a.number(1)
    one_sided, inverse = a.integer("onesided", 0), a.integer("inverse", 0)
    if one_sided and inverse:
        x[axis] = x[axis] if a.has(1) else 2 * (x[axis] - 1)
        return [(*x[:-1], 1)]
    if one_sided:
        x[axis] = x[axis] // 2 + 1
    return [(*x[:-1], 2)]


def stft(a: Application) -> Shapes:
    signal, step = a.shape(0), a.number(1)
    if a.has(3):
        length = a.number(3)
    elif a.has(2):
        length = a.shape(2)[0]
    else:
        raise Unknown
    frames = 1 + (signal[1] - length) // step
    return [(signal[0], frames, length // 2 + 1 if a.integer("onesided", 1) else length, 2)]
