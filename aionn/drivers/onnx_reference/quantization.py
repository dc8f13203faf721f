"""Quantised numbers: conversions, and products of them.

Source: the ONNX operators' specifications. Halves are rounded to even.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aionn.drivers.onnx_reference.arrays import Array, axis_of
from aionn.drivers.onnx_reference.elementwise import converted
from aionn.drivers.onnx_reference.linear import convolved
from aionn.errors import InvalidArgument
from aionn.models.onnx.constants import DTYPE_NAMES
from aionn.models.onnx.extension.narrow import NARROW, carrier_of
from aionn.models.onnx.schema import DataType

__all__ = ["KERNELS"]


def _spread(values: Array, x: Array, axis: int, block_size: int) -> Array:
    """A scale or zero point for each element: one for all, one for each place of an axis, or one for each block of an axis."""
    if values.size == 1:
        return values.reshape(())
    axis = axis_of(axis, x.ndim)
    if block_size:
        return np.take(np.repeat(values, block_size, axis), range(x.shape[axis]), axis)
    if values.ndim != 1 or values.size != x.shape[axis]:
        raise InvalidArgument(
            f"scale: expected one number or {x.shape[axis]}, got shape {list(values.shape)}"
        )
    shape = [1] * x.ndim
    shape[axis] = -1
    return values.reshape(shape)


def _in_range(values: Array, dtype: np.dtype[Any]) -> Array:
    info = np.iinfo(dtype)
    return np.clip(values, info.min, info.max).astype(dtype)


def quantize(
    x: Array,
    scale: Array,
    zero_point: Array | None = None,
    *,
    kind: DataType,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Array:
    factor = _spread(scale, x, axis, block_size)
    if precision:
        wide = DTYPE_NAMES[DataType(precision)]
        scaled = x.astype(wide) / factor.astype(wide)
    else:
        scaled = x / factor
    if carrier_of(kind).kind == "f":
        return converted(scaled, kind, saturates=bool(saturate))
    result = np.rint(scaled.astype(np.float64))
    if zero_point is not None:
        result = result + _spread(zero_point, x, axis, block_size).astype(np.float64)
    if kind in NARROW:
        largest = NARROW[kind].largest
        return np.asarray(np.clip(result, -largest - 1 if carrier_of(kind).kind == "i" else 0, largest))
    return _in_range(result, carrier_of(kind))


def dequantize(
    x: Array,
    scale: Array,
    zero_point: Array | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Array:
    values = x.astype(np.float32)
    if zero_point is not None:
        values = values - _spread(zero_point, x, axis, block_size).astype(np.float32)
    return values * _spread(scale, x, axis, block_size)


def dynamic_quantize(x: Array) -> tuple[Array, Array, Array]:
    low, high = np.float32(min(0, x.min())), np.float32(max(0, x.max()))
    scale = np.asarray(np.float32(1 if high == low else high - low) / np.float32(255))
    zero_point = np.asarray(np.rint(np.clip(-low / scale, 0, 255)))
    return (
        np.clip(np.rint(x / scale) + zero_point, 0, 255).astype(np.uint8),
        scale,
        zero_point.astype(np.uint8),
    )


def _shifted(x: Array, zero_point: Array | None, axis: int | None = None) -> Array:
    """The numbers without their zero point, which may differ by the place on an axis."""
    values = x.astype(np.int32)
    if zero_point is None:
        return values
    zero = zero_point.astype(np.int32)
    if zero.ndim == 1 and zero.size > 1 and axis is not None:
        shape = [1] * x.ndim
        shape[axis] = -1
        zero = zero.reshape(shape)
    return values - (zero.reshape(()) if zero.size == 1 else zero)


def matmul_integer(a: Array, b: Array, a_zero: Array | None = None, b_zero: Array | None = None) -> Array:
    left = _shifted(a, a_zero, -2 if a.ndim > 1 else None)
    return np.asarray(np.matmul(left, _shifted(b, b_zero, -1)))


def conv_integer(
    x: Array,
    weights: Array,
    x_zero: Array | None = None,
    w_zero: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Array:
    attributes = {"auto_pad": auto_pad, "dilations": dilations, "pads": pads, "strides": strides}
    return convolved(_shifted(x, x_zero), _shifted(weights, w_zero, 0), group, attributes)


def qlinear_matmul(
    a: Array,
    a_scale: Array,
    a_zero: Array,
    b: Array,
    b_scale: Array,
    b_zero: Array,
    y_scale: Array,
    y_zero: Array,
) -> Array:
    product = matmul_integer(a, b, a_zero, b_zero)
    left = a_scale.reshape(-1, 1) if a_scale.size > 1 else a_scale.reshape(())
    factor = left * (b_scale if b_scale.size > 1 else b_scale.reshape(())) / y_scale
    return _in_range(np.rint(product * factor) + y_zero, y_zero.dtype)


def qlinear_conv(
    x: Array,
    x_scale: Array,
    x_zero: Array,
    weights: Array,
    w_scale: Array,
    w_zero: Array,
    y_scale: Array,
    y_zero: Array,
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
    total = convolved(_shifted(x, x_zero), _shifted(weights, w_zero, 0), group, attributes)
    shape = (-1, *[1] * (x.ndim - 2))
    if bias is not None:
        total = total + bias.reshape(shape)
    factor = x_scale.reshape(()) * w_scale.reshape(shape) / y_scale.reshape(())
    return _in_range(np.rint(total * factor) + y_zero.reshape(()), y_zero.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "ConvInteger": conv_integer,
    "DequantizeLinear": dequantize,
    "DynamicQuantizeLinear": dynamic_quantize,
    "MatMulInteger": matmul_integer,
    "QLinearConv": qlinear_conv,
    "QLinearMatMul": qlinear_matmul,
    "QuantizeLinear": quantize,
}
"""The kernels by operator."""
