"""Matrix products: FULLY_CONNECTED, BATCH_MATMUL.

Owns which rows meet which columns; the rest of weighted sums is in ``weighted_sums``.

Invariants:
1. Quantised sums are exact before they are requantised.

Source: ``FullyConnected.cpp`` and ``BatchMatmul.cpp`` of the NN HAL's CPU operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aionn.hal import OperandType, OperationType, operand_dtype
from aionn.ops.numerics.fixed_point import Requantization, quantized_range
from aionn.ops.numerics.geometry import check_activation
from aionn.ops.numerics.weighted_sums import (
    Finish,
    check_bias,
    check_weighted,
    exact_float,
    finisher,
    weight_values,
)
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, float_result

__all__ = ["OPERATIONS"]


# FULLY_CONNECTED


def _validate_fully_connected(check: Check) -> None:
    check.counts(4)
    check_weighted(check, channel_dim=None)
    check.input_type(3, (OperandType.INT32,))
    check_activation(check, 3)
    check.input_rank(0, 2, 3, 4)
    check.input_rank(1, 2)
    check.input_rank(2, 1)
    check.output_rank(0, 2)
    data, weights = check.inputs[0].dimensions, check.inputs[1].dimensions
    if weights:
        units, size = weights
        if units:
            check.extent("input 2", check.inputs[2], 0, units)
            check.extent("output 0", check.outputs[0], 1, units)
        if size and data and 0 not in data:
            check.require(
                math.prod(data) % size == 0,
                "input 0",
                f"a multiple of {size} elements",
                f"shape {list(data)}",
            )


def _fully_connected_shapes(call: Call) -> Sequence[Shape]:
    data, weights = call.array(0), call.array(1)
    if weights.ndim != 2 or 0 in weights.shape:
        call.refuse(f"input 1: expected shape [units, size] without a 0, got {list(weights.shape)}")
    units, size = weights.shape
    if not 2 <= data.ndim <= 4 or data.size % size:
        call.refuse(
            f"input 0: expected rank 2 to 4 with a multiple of {size} elements, got {list(data.shape)}"
        )
    check_bias(call, units)
    return [(data.size // size, units)]


def _fully_connected(call: Call) -> Sequence[Array]:
    def prepare() -> tuple[Array, Finish]:
        values, totals = weight_values(call.tensor(0), call.tensor(1), (1,))
        return values.T, finisher(call, 3, totals, rounds_product=True, rounds_once=True)

    weights, finish = call.kept("weights", (1, 2, 3), prepare)
    rows = call.array(0).reshape(-1, len(weights)).astype(weights.dtype, copy=False)
    sums = np.matmul(rows, weights)
    dtype = operand_dtype(call.outputs[0].type)
    out = sums if sums.dtype == dtype else np.empty(sums.shape, dtype=dtype)
    finish(sums, out)
    return [out]


# BATCH_MATMUL

_BATCH_MATMUL_TYPES = (
    OperandType.TENSOR_FLOAT32,
    OperandType.TENSOR_FLOAT16,
    OperandType.TENSOR_INT32,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
)


def _validate_batch_matmul(check: Check) -> None:
    check.counts(4)
    check.needs(6)
    data_type = check.input_type(0, _BATCH_MATMUL_TYPES)
    check.input_types(data_type, OperandType.BOOL, OperandType.BOOL, start=1)
    check.output_types(data_type)
    left, right = (operand.dimensions for operand in check.inputs[:2])
    for index in (0, 1):
        check.input_rank(index, 2, 3, 4)
    if left and right:
        check.require(len(left) == len(right), "input 1", f"rank {len(left)}", f"shape {list(right)}")


def _batch_matmul_shapes(call: Call) -> Sequence[Shape]:
    left, right = _matrices(call)
    if left.ndim != right.ndim or not 2 <= left.ndim <= 4 or left.shape[:-2] != right.shape[:-2]:
        call.refuse(
            f"input 1: expected the rank (2 to 4) and batches of input 0, {list(call.array(0).shape)}, "
            f"got {list(call.array(1).shape)}"
        )
    if left.shape[-1] != right.shape[-2] or 0 in (*left.shape[-2:], *right.shape[-2:]):
        call.refuse(
            f"input 1: expected {left.shape[-1]} rows, got {right.shape[-2]} (shapes after transposition)"
        )
    return [(*left.shape[:-1], right.shape[-1])]


def _matrices(call: Call) -> tuple[Array, Array]:
    left, right = call.array(0), call.array(1)
    if left.ndim >= 2 and call.scalar(2):
        left = left.swapaxes(-1, -2)
    if right.ndim >= 2 and call.scalar(3):
        right = right.swapaxes(-1, -2)
    return left, right


def _batch_matmul(call: Call) -> Sequence[Array]:
    left, right = _matrices(call)
    output = call.outputs[0]
    if output.type == OperandType.TENSOR_INT32:
        return [np.matmul(left, right)]
    if output.type != OperandType.TENSOR_QUANT8_ASYMM_SIGNED:
        product = np.matmul(left.astype(np.float32, copy=False), right.astype(np.float32, copy=False))
        return [float_result(product, output)]
    tensors = call.tensor(0), call.tensor(1)
    low, high = quantized_range(output.type)
    dtype = exact_float((high - low) ** 2 * left.shape[-1])
    left, right = left.astype(dtype), right.astype(dtype)
    left -= tensors[0].zero_point
    right -= tensors[1].zero_point
    sums = np.matmul(left, right)
    real = float(np.float32(tensors[0].scale) * np.float32(tensors[1].scale)) / float(output.scale)
    requantize = Requantization(real, np.zeros(1, dtype=np.int64), output.zero_point, low, high)
    out = np.empty(sums.shape, dtype=np.int8)
    requantize(sums, out)
    return [out]


OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        OperationType.FULLY_CONNECTED,
        _validate_fully_connected,
        _fully_connected_shapes,
        _fully_connected,
        """
out[b, u] = activation(bias[u] + sum over s of in[b, s] * weights[u, s]).

Inputs: 0 data, rank 2 to 4, taken as [batch, size] with size from the weights; 1 weights [units, size]; 2 bias [units];
3 INT32 activation (0 NONE, 1 RELU, 2 RELU1, 3 RELU6).
Output: [batch, units].
Quantisation: as for CONV_2D, without per-channel weights; the product of the scales is rounded to float32, and the result is
rounded once, half up, as in LiteRT's reference kernel (AOSP rounds after the product too; that differs by one in some results).
Types: float32, quant8 asymm (output scale <= input scale * weights scale needs level 3); from level 3 float16; from level 4 quant8
asymm signed. Only the batch may be 0.
Source: FullyConnected.cpp of the NN HAL; FullyConnected of TensorFlow Lite's reference kernels.
""",
    ),
    OperationContract(
        OperationType.BATCH_MATMUL,
        _validate_batch_matmul,
        _batch_matmul_shapes,
        _batch_matmul,
        """
out[..., i, j] = sum over k of x[..., i, k] * y[..., k, j], where x and y are the inputs, transposed if their flag is set.

Inputs: 0 x, 1 y, of equal rank 2 to 4 and equal batches; 2 BOOL: x is transposed [..., k, i]; 3 BOOL: y is transposed [..., j, k].
Output: [..., i, j].
Quantisation: sums of (x - zx) * (y - zy) are exact; multiplied by x scale * y scale / output scale in fixed point.
Types (level 6): float32, float16, int32 (wraps), quant8 asymm signed.
Stricter than TensorFlow Lite: batches do not broadcast, as in AOSP.
Source: BatchMatmul.cpp of the NN HAL.
""",
    ),
)
