"""Normalised exponentials: SOFTMAX, LOG_SOFTMAX.

Owns the two operations; the fixed-point exponential and reciprocal are in ``fixed_point``.

Invariants:
1. The quantised form is integer arithmetic throughout, so every driver that follows the spec gives the same bytes.

Source: ``Softmax.cpp`` and ``LogSoftmax.cpp`` of the NN HAL's CPU operations; ``Softmax`` of TensorFlow Lite's reference kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aionn.hal import OperandType, OperationType
from aionn.ops.numerics.fixed_point import (
    Int64Array,
    exp_on_negative_values,
    one_over_one_plus_x,
    quantize_multiplier,
    quantized_range,
    rounding_divide_by_pot,
    saturating_rounding_doubling_high_mul,
)
from aionn.ops.numerics.weighted_sums import DATA_LEVELS, QUANT8
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, float_result, scalar_type_for

__all__ = ["OPERATIONS"]

_DIFFERENCE_BITS = 5
"""Integer bits of a scaled difference: exp(-32) is nothing."""

_SUM_BITS = 12
"""Integer bits of a sum of exponentials."""


def _validate_softmax(check: Check) -> None:
    check.counts((2, 3))
    data_type = check.input_type(0, DATA_LEVELS)
    check.output_type(0, (data_type,))
    check.input_type(1, (scalar_type_for(data_type),))
    check.input_rank_at_most(0, 4)
    if len(check.inputs) == 3:
        check.needs(3)
        check.input_type(2, (OperandType.INT32,))
        _check_axis(check, 2)
    elif len(check.inputs[0].dimensions) not in (0, 2, 4):
        check.needs(3)
    _check_beta(check)
    if data_type in QUANT8:
        output = check.outputs[0]
        zero_point, _ = quantized_range(data_type)
        check.require(output.scale == 1 / 256, "output 0", "scale 1/256", output.scale)
        check.require(
            output.zero_point == zero_point, "output 0", f"zero point {zero_point}", output.zero_point
        )


def _validate_log_softmax(check: Check) -> None:
    check.counts(3)
    check.needs(3)
    data_type = check.input_type(0, (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16))
    check.output_type(0, (data_type,))
    check.input_type(1, (scalar_type_for(data_type),))
    check.input_type(2, (OperandType.INT32,))
    _check_beta(check)
    _check_axis(check, 2)


def _check_beta(check: Check) -> None:
    beta = check.constant(1)
    if beta is not None:
        value = float(beta.reshape(()))
        check.require(value > 0, "input 1", "a positive beta", value)


def _check_axis(check: Check, index: int) -> None:
    axis = check.constant(index)
    rank = len(check.inputs[0].dimensions)
    if axis is not None and rank:
        value = int(axis.reshape(()))
        check.require(-rank <= value < rank, f"input {index}", f"an axis from {-rank} to {rank - 1}", value)


def _shapes(call: Call) -> Sequence[Shape]:
    return [call.array(0).shape]


def _arguments(call: Call) -> tuple[float, int]:
    """Beta and the axis."""
    rank = call.array(0).ndim
    beta, axis = call.scalar(1), call.scalar(2) if call.has(2) else -1
    if not beta > 0:
        call.refuse(f"input 1: expected a positive beta, got {beta}")
    if not -rank <= axis < rank:
        call.refuse(f"input 2: expected an axis from {-rank} to {rank - 1}, got {axis}")
    return beta, axis


def _softmax(call: Call) -> Sequence[Array]:
    data = call.tensor(0)
    if data.array.ndim > 4:
        call.refuse(f"input 0: expected rank of at most 4, got shape {list(data.shape)}")
    beta, axis = _arguments(call)
    if data.array.size == 0:
        return [data.array.copy()]
    if data.type in QUANT8:
        return [_softmax_quantized(call, data.array, beta, axis)]
    scaled = _below_largest(data.array, beta, axis)
    np.exp(scaled, out=scaled)
    scaled /= scaled.sum(axis=axis, keepdims=True)
    return [float_result(scaled, call.outputs[0])]


def _below_largest(array: Array, beta: float, axis: int) -> Array:
    values = array.astype(np.float32)
    values -= values.max(axis=axis, keepdims=True)
    values *= np.float32(beta)
    return values


def _softmax_quantized(call: Call, values: Array, beta: float, axis: int) -> Array:
    exponentials = call.kept("exponentials", (1,), lambda: _exponentials(beta, call.tensor(0).scale))
    differences = values.max(axis=axis, keepdims=True).astype(np.int64) - values
    powers = exponentials[differences]
    totals = rounding_divide_by_pot(powers, _SUM_BITS).sum(axis=axis, keepdims=True)
    # The sum as 2**bits * (1 + x) with x in [0, 1): then its reciprocal is a shift and 1 / (1 + x).
    headroom = 32 - np.frexp(totals.astype(np.float64))[1].astype(np.int64)
    reciprocals = one_over_one_plus_x((totals << headroom) - (1 << 31))
    products = saturating_rounding_doubling_high_mul(reciprocals, powers)
    low, high = quantized_range(call.outputs[0].type)
    results = rounding_divide_by_pot(products, _SUM_BITS - headroom + 31 - 8) + low
    return np.minimum(results, high).astype(values.dtype)


def _exponentials(beta: float, scale: float) -> Int64Array:
    """exp(-difference * scale * beta) for the 256 differences of stored values, 31 fractional bits; 0 where it is too small."""
    real = min(float(beta) * float(scale) * (1 << (31 - _DIFFERENCE_BITS)), (1 << 31) - 1.0)
    multiplier, shift = quantize_multiplier(real)
    differences = -np.arange(256, dtype=np.int64)
    shift = max(shift, 0)
    radius = math.floor(((1 << _DIFFERENCE_BITS) - 1) * (1 << (31 - _DIFFERENCE_BITS)) / (1 << shift))
    scaled = saturating_rounding_doubling_high_mul(np.maximum(differences, -radius) << shift, multiplier)
    return np.where(differences >= -radius, exp_on_negative_values(scaled, _DIFFERENCE_BITS), 0)


def _log_softmax(call: Call) -> Sequence[Array]:
    beta, axis = _arguments(call)
    if call.array(0).size == 0:
        return [call.array(0).copy()]
    scaled = _below_largest(call.array(0), beta, axis)
    scaled -= np.log(np.exp(scaled).sum(axis=axis, keepdims=True))
    return [float_result(scaled, call.outputs[0])]


OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        OperationType.SOFTMAX,
        _validate_softmax,
        _shapes,
        _softmax,
        """
out[i] = exp((in[i] - max) * beta) / sum over j of exp((in[j] - max) * beta), along one axis.

Inputs: 0 a tensor of rank 1 to 4; 1 beta > 0, FLOAT32 (FLOAT16 for float16 data); optional 2 INT32 axis, negative from the end
(level 3); the last where it is left out.
Output: of the input's shape.
Types: float32, quant8 asymm; from level 3 float16; from level 4 quant8 asymm signed. Rank 1 or 3 without an axis needs level 3.
Quantisation: the output has scale 1/256 and zero point 0 (signed: -128). Differences from the largest value are scaled to
fixed-point numbers with 5 integer bits; exponentials have 31 fractional bits, their sum 12 integer bits; differences beyond 31
count as nothing.
Stricter than AOSP: output quantisation, beta and axis are checked when the model is validated, where it fixes them.
Source: Softmax.cpp of the NN HAL.
""",
    ),
    OperationContract(
        OperationType.LOG_SOFTMAX,
        _validate_log_softmax,
        _shapes,
        _log_softmax,
        """
out[i] = (in[i] - max) * beta - log(sum over j of exp((in[j] - max) * beta)), along one axis.

Inputs: 0 a tensor of any rank; 1 beta > 0, FLOAT32 (FLOAT16 for float16 data); 2 INT32 axis, negative from the end.
Output: of the input's shape.
Types (level 3): float32, float16.
Source: LogSoftmax.cpp of the NN HAL.
""",
    ),
)
