"""Products: matrices, convolutions, pools.

A convolution is a product of matrices over a view of all its windows.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import as_strided

from aionn.drivers.onnx_reference.arrays import Array, check_room, numbers, wide
from aionn.errors import InvalidArgument
from aionn.models.onnx.extension.geometry import Windows, transposed_pads, windows

__all__ = ["KERNELS", "convolved", "windowed"]


def matmul(a: Array, b: Array) -> Array:
    return np.asarray(np.matmul(wide(a), wide(b)))


def gemm(
    a: Array,
    b: Array,
    c: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    broadcast: int = 0,
) -> Array:
    product = wide(a.T if transA else a) @ wide(b.T if transB else b)
    if a.dtype.kind == "f":
        product = np.float32(alpha).astype(product.dtype) * product
        return np.asarray(
            product if c is None else product + np.float32(beta).astype(product.dtype) * wide(c)
        )
    product = (alpha * product).astype(a.dtype)
    return product if c is None else product + (beta * c).astype(a.dtype)


EINSUM_BYTES_MAX = 1 << 31
"""Most bytes of an intermediate result of Einsum."""


def einsum(*inputs: Array, equation: str) -> Array:
    text = equation.replace(" ", "")
    if not set(text) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ,.->"):
        raise InvalidArgument(
            f"attribute 'equation': expected letters, commas and an arrow, got {equation!r:.80}"
        )
    return np.asarray(np.einsum(text, *inputs, optimize=len(inputs) > 2))


def det(x: Array) -> Array:
    return np.asarray(np.linalg.det(wide(x)))


def windowed(x: Array, w: Windows, fill: float) -> Array:
    """A view of all windows: [batch, channels, windows on each axis, elements of a window on each axis]."""
    count = len(w.kernel)
    # The last window of a pool may end outside of the padding.
    reaches = [
        (w.extents[i] - 1) * w.strides[i] + (w.kernel[i] - 1) * w.dilations[i] + 1 for i in range(count)
    ]
    over = [max(0, reaches[i] - x.shape[i + 2] - w.begins[i] - w.ends[i]) for i in range(count)]
    widths = [(0, 0), (0, 0), *((w.begins[i], w.ends[i] + over[i]) for i in range(count))]
    check_room([extent + sum(width) for extent, width in zip(x.shape, widths, strict=True)], x.itemsize)
    padded = np.pad(x, widths, constant_values=fill)
    strides = padded.strides[2:]
    return as_strided(
        padded,
        (*x.shape[:2], *w.extents, *w.kernel),
        (
            *padded.strides[:2],
            *(strides[i] * w.strides[i] for i in range(count)),
            *(strides[i] * w.dilations[i] for i in range(count)),
        ),
        writeable=False,
    )


def convolved(x: Array, weights: Array, group: int, attributes: dict[str, Any]) -> Array:
    """A convolution without bias, in the element type of both inputs."""
    spatial, kernel = x.shape[2:], weights.shape[2:]
    if x.ndim != weights.ndim or weights.shape[1] * group != x.shape[1] or weights.shape[0] % group:
        raise InvalidArgument(f"Conv: expected weights for {x.shape[1]} channels, got {list(weights.shape)}")
    w = windows(attributes, spatial, kernel)
    parts = windowed(x, w, 0)
    count = len(kernel)
    check_room((*x.shape[:2], *w.extents, *kernel), x.itemsize)
    channels, filters = x.shape[1] // group, weights.shape[0] // group
    outputs = []
    for part in range(group):
        own = parts[:, part * channels : (part + 1) * channels]
        # [batch, windows, channels and elements]
        order = (0, *range(2, 2 + count), 1, *range(2 + count, 2 + 2 * count))
        rows = own.transpose(order).reshape(x.shape[0], math.prod(w.extents), channels * math.prod(kernel))
        matrix = weights[part * filters : (part + 1) * filters].reshape(filters, -1)
        outputs.append(np.matmul(rows, matrix.T).transpose(0, 2, 1))
    return np.concatenate(outputs, 1).reshape(x.shape[0], weights.shape[0], *w.extents)


def _per_channel(values: Array, rank: int) -> Array:
    return values.reshape((-1, *[1] * (rank - 2)))


def conv(
    x: Array,
    weights: Array,
    bias: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Array:
    attributes = {"auto_pad": auto_pad, "dilations": dilations, "pads": pads, "strides": strides}
    result = convolved(wide(x), wide(weights), group, attributes)
    return result if bias is None else result + _per_channel(wide(bias), x.ndim)


def conv_transpose(
    x: Array,
    weights: Array,
    bias: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    output_padding: Any = None,
    output_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Array:
    attributes = {
        "auto_pad": auto_pad, "dilations": dilations, "pads": pads, "strides": strides, "output_padding": output_padding,
        "output_shape": output_shape,
    }  # fmt: skip
    kernel = weights.shape[2:]
    w = transposed_pads(attributes, x.shape[2:], kernel)
    channels, filters = x.shape[1] // group, weights.shape[1]
    full = [
        max(
            w.begins[i] + w.extents[i],
            (x.shape[i + 2] - 1) * w.strides[i] + (kernel[i] - 1) * w.dilations[i] + 1,
        )
        for i in range(len(kernel))
    ]
    result = np.zeros(check_room((x.shape[0], filters * group, *full), 4), wide(x).dtype)
    for part in range(group):
        own = wide(x)[:, part * channels : (part + 1) * channels]
        into = result[:, part * filters : (part + 1) * filters]
        for place in itertools.product(*map(range, kernel)):
            index: tuple[Any, ...] = (slice(part * channels, (part + 1) * channels), slice(None), *place)
            matrix = wide(weights)[index]
            area = tuple(
                slice(p * d, p * d + (n - 1) * s + 1, s)
                for p, d, n, s in zip(place, w.dilations, x.shape[2:], w.strides, strict=True)
            )
            into[(slice(None), slice(None), *area)] += np.moveaxis(np.tensordot(own, matrix, (1, 0)), -1, 1)
    cut = tuple(slice(begin, begin + extent) for begin, extent in zip(w.begins, w.extents, strict=True))
    result = result[(slice(None), slice(None), *cut)]
    return result if bias is None else result + _per_channel(wide(bias), x.ndim)


def average_pool(
    x: Array,
    *,
    kernel_shape: Any,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Array:
    attributes = {
        "auto_pad": auto_pad,
        "ceil_mode": ceil_mode,
        "dilations": dilations,
        "pads": pads,
        "strides": strides,
    }
    w = windows(attributes, x.shape[2:], kernel_shape, is_pool=True)
    axes = tuple(range(2 + len(kernel_shape), 2 + 2 * len(kernel_shape)))
    totals = windowed(wide(x), w, 0).sum(axes)
    counted = np.ones((1, 1, *x.shape[2:]), np.float32)
    if count_include_pad:
        # Padding counts as elements, but elements beyond it do not.
        sides = [(0, 0), (0, 0), *zip(w.begins, w.ends, strict=True)]
        counted = np.pad(counted, sides, constant_values=1)
        w = w._replace(begins=(0,) * len(w.begins), ends=(0,) * len(w.ends))
    return np.asarray(totals / windowed(counted, w, 0).sum(axes))


def max_pool(
    x: Array,
    *,
    count: int,
    kernel_shape: Any,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Any = None,
    pads: Any = None,
    storage_order: int = 0,
    strides: Any = None,
) -> tuple[Array, ...]:
    attributes = {
        "auto_pad": auto_pad,
        "ceil_mode": ceil_mode,
        "dilations": dilations,
        "pads": pads,
        "strides": strides,
    }
    spatial = x.shape[2:]
    w = windows(attributes, spatial, kernel_shape, is_pool=True)
    least: Any = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    parts = windowed(x, w, least)
    rows = parts.reshape((*parts.shape[: 2 + len(spatial)], -1))
    best = np.argmax(rows, -1)
    values = np.take_along_axis(rows, best[..., None], -1)[..., 0]
    if count < 2:
        return (values,)
    order: Literal["F", "C"] = "F" if storage_order else "C"
    places = np.arange(math.prod(spatial)).reshape(tuple(spatial), order=order)
    inside = windowed(places[None, None], w, -1)
    flat = inside.reshape((*inside.shape[: 2 + len(spatial)], -1))
    picked = np.take_along_axis(np.broadcast_to(flat, rows.shape), best[..., None], -1)[..., 0]
    planes = np.arange(x.shape[0] * x.shape[1]).reshape((*x.shape[:2], *[1] * len(spatial)))
    return values, (picked + planes * math.prod(spatial)).astype(np.int64)


def lp_pool(
    x: Array,
    *,
    kernel_shape: Any,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Any = None,
    p: float = 2,
    pads: Any = None,
    strides: Any = None,
) -> Array:
    attributes = {
        "auto_pad": auto_pad,
        "ceil_mode": ceil_mode,
        "dilations": dilations,
        "pads": pads,
        "strides": strides,
    }
    w = windows(attributes, x.shape[2:], kernel_shape, is_pool=True)
    axes = tuple(range(2 + len(kernel_shape), 2 + 2 * len(kernel_shape)))
    return np.asarray((windowed(np.abs(wide(x)) ** p, w, 0).sum(axes)) ** (1 / p))


def global_pool(function: Callable[..., Any]) -> Callable[..., Array]:
    def kernel(x: Array) -> Array:
        return np.asarray(function(wide(x), axis=tuple(range(2, x.ndim)), keepdims=True))

    return kernel


def global_lp_pool(x: Array, *, p: float = 2) -> Array:
    return np.asarray(np.sum(np.abs(wide(x)) ** p, tuple(range(2, x.ndim)), keepdims=True) ** (1 / p))


def max_unpool(
    x: Array,
    indices: Array,
    shape: Array | None = None,
    *,
    kernel_shape: Any,
    pads: Any = None,
    strides: Any = None,
) -> Array:
    count = len(kernel_shape)
    steps, around = strides or [1] * count, pads or [0] * 2 * count
    inferred = (
        *x.shape[:2],
        *(
            (x.shape[i + 2] - 1) * steps[i] - around[i] - around[count + i] + kernel_shape[i]
            for i in range(count)
        ),
    )
    result = np.zeros(math.prod(check_room(inferred, x.itemsize)), x.dtype)
    places = indices.reshape(-1)
    if ((places < 0) | (places >= result.size)).any():
        raise InvalidArgument(f"MaxUnpool: expected indices below {result.size}, got others")
    result[places] = x.reshape(-1)
    result = result.reshape(inferred)
    if shape is not None:
        wanted = check_room(numbers(shape), x.itemsize)
        sides = [(0, extent - own) for extent, own in zip(wanted, inferred, strict=True)]
        result = np.pad(result, sides)
    return result


def col2im(
    x: Array, image: Array, block: Array, *, dilations: Any = None, pads: Any = None, strides: Any = None
) -> Array:
    spatial, kernel = numbers(image), numbers(block)
    attributes = {"dilations": dilations, "pads": pads, "strides": strides}
    w = windows(attributes, spatial, kernel)
    channels = x.shape[1] // math.prod(kernel)
    parts = x.reshape((x.shape[0], channels, *kernel, *w.extents))
    padded = [extent + b + e for extent, b, e in zip(spatial, w.begins, w.ends, strict=True)]
    result = np.zeros(check_room((x.shape[0], channels, *padded), 8), x.dtype)
    for place in itertools.product(*map(range, kernel)):
        area = tuple(
            slice(p * d, p * d + (n - 1) * s + 1, s)
            for p, d, n, s in zip(place, w.dilations, w.extents, w.strides, strict=True)
        )
        index: tuple[Any, ...] = (slice(None), slice(None), *place)
        result[(slice(None), slice(None), *area)] += parts[index]
    cut = tuple(slice(begin, begin + extent) for begin, extent in zip(w.begins, spatial, strict=True))
    return result[(slice(None), slice(None), *cut)]


KERNELS: dict[str, Callable[..., Any]] = {
    "AveragePool": average_pool,
    "Col2Im": col2im,
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "Det": det,
    "Einsum": einsum,
    "Gemm": gemm,
    "GlobalAveragePool": global_pool(np.mean),
    "GlobalLpPool": global_lp_pool,
    "GlobalMaxPool": global_pool(np.max),
    "LpPool": lp_pool,
    "MatMul": matmul,
    "MaxPool": max_pool,
    "MaxUnpool": max_unpool,
}
"""The kernels by operator."""
