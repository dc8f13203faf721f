"""CONV_3D: convolutions over three axes, by the HAL's over two.

Owns how the depth becomes channels: for each tap of the filter's depth the slices that it meets, one behind the other in the
channels of one CONV_2D. The sums are the same, in another order.

Source: the TensorFlow Lite operators' documentation and reference kernels; CONV_2D of the NN HAL.
"""

from __future__ import annotations

import math

import numpy as np

from aionn.hal import OperandType, OperationType, Padding
from aionn.hal.windows import same_padding
from aionn.models.tflite.conversions.layers import slide, window_of
from aionn.models.tflite.graph import Inexpressible, Shape, SubgraphWriter, is_known, stored_shape
from aionn.models.tflite.schema import TfliteOperator

__all__ = ["conv_3d"]

_TABLE = "Conv3DOptions"
TAPS_MAX = 64
"""Deepest filter: each tap is an operation."""


def conv_3d(g: SubgraphWriter, op: TfliteOperator) -> None:
    """PAD over the depth, GATHER of the slices of each tap, CONCATENATION, and one CONV_2D over all of them."""
    data, filter_ = g.input_tensor(op, 0), g.input_tensor(op, 1)
    weights = g.value_of(op, 1)
    if len(data.dimensions) != 5 or len(filter_.dimensions) != 5:
        g.refuse(op, "inputs", "rank 5", [list(data.dimensions), list(filter_.dimensions)])
    if (
        weights is None
        or weights.dtype != np.float32
        or g.type_of(g.input(op, 0)) != OperandType.TENSOR_FLOAT32
    ):
        raise Inexpressible("a convolution over volumes of floats with constant weights alone")
    shape, taps = data.dimensions, weights.shape
    if not is_known(shape) or taps[3] != shape[4] or not 0 < taps[0] <= TAPS_MAX or 0 in taps:
        raise Inexpressible(f"shape {list(shape)} with filters of shape {list(taps)}")
    window = window_of(g, op, _TABLE)
    numbers = [op.integer(_TABLE, name) for name in ("stride_d", "dilation_d_factor")]
    if min(numbers) < 1:
        g.refuse(op, "options", "strides and dilations of at least 1", numbers)
    rows, depth = _taps(g, op, shape, taps[0], window.scheme == Padding.SAME)
    joined = g.temporary(OperandType.TENSOR_FLOAT32, (*g.dimensions(rows[0])[:3], taps[0] * taps[3]))
    if len(rows) == 1:
        joined = rows[0]
    else:
        g.emit(OperationType.CONCATENATION, [*rows, g.int32(3)], [joined])
    g.model.check_budget(weights.nbytes)
    # [depth, height, width, in, out] becomes [out, height, width, depth times in].
    flat = weights.transpose(4, 1, 2, 0, 3).reshape(taps[4], taps[1], taps[2], -1)
    kernel = g.constant(OperandType.TENSOR_FLOAT32, flat)
    has_bias = g.has(op, 2)
    bias = g.input(op, 2) if has_bias else g.zeros(OperandType.TENSOR_FLOAT32, (taps[4],))
    output = g.output(op)
    result = g.output_tensor(op).dimensions
    if len(result) != 5 or not is_known(result) or result[:2] != (shape[0], depth):
        raise Inexpressible(f"a result of shape {list(result)} with {depth} slices")
    assert g.dimensions(output) == stored_shape(result), "the leading axes are merged"
    slide(g, op, _TABLE, OperationType.CONV_2D, [joined, kernel, bias], window, output)


def _taps(
    g: SubgraphWriter, op: TfliteOperator, shape: Shape, count: int, is_same: bool
) -> tuple[list[int], int]:
    """For each tap of the filter's depth its slices, ``[batches * depth, height, width, channels]``, and the result's depth."""
    stride, dilation = (op.integer(_TABLE, name) for name in ("stride_d", "dilation_d_factor"))
    batches, extent, *rest = shape
    reach = (count - 1) * dilation + 1
    before, after = same_padding(extent, count, stride, dilation) if is_same else (0, 0)
    missing = before + after
    depth = (missing + extent - reach) // stride + 1
    if depth < 1:
        g.refuse(op, "input 1 (filters)", f"a depth within {extent} slices", reach)
    g.model.check_budget(8 * batches * depth)
    rows = g.input(op, 0)
    if missing:
        apart = g.reshaped(rows, (batches, extent, math.prod(rest)))
        padded = g.like(apart, (batches, extent + missing, math.prod(rest)))
        paddings = g.int32s(np.array([[0, 0], [before, after], [0, 0]]))
        g.emit(OperationType.PAD, [apart, paddings], [padded])
        rows = g.reshaped(padded, (batches * (extent + missing), *rest))
    firsts = np.arange(batches)[:, None] * (extent + missing) + np.arange(depth) * stride
    taps = []
    for tap in range(count):
        taps.append(g.like(rows, (batches * depth, *rest)))
        places = g.int32s((firsts + tap * dilation).reshape(-1))
        g.emit(OperationType.GATHER, [rows, g.int32(0), places], [taps[-1]])
    return taps, depth
