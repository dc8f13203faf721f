"""Normalisations: L2_NORMALIZATION, LOCAL_RESPONSE_NORMALIZATION, INSTANCE_NORMALIZATION.

Owns the three operations and the fixed-point inverse square root that quantised L2 normalisation is made of.

Source: ``L2Normalization.cpp``, ``LocalResponseNormalization.cpp``, ``InstanceNormalization.cpp`` of the NN HAL's CPU operations;
``GetInvSqrtQuantizedMultiplierExp`` of TensorFlow Lite's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aionn.hal import OperandType, OperationType, operand_dtype
from aionn.ops.numerics.fixed_point import (
    Int64Array,
    multiply_by_quantized_multiplier,
    quantized_range,
    rounding_divide_by_pot,
    saturating_rounding_doubling_high_mul,
)
from aionn.ops.numerics.weighted_sums import QUANT8
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, float_result, scalar_type_for

__all__ = ["OPERATIONS"]

_EPSILON = np.float32(1e-6)
"""Least length that is divided by."""

_FLOAT_LEVELS = {OperandType.TENSOR_FLOAT32: 1, OperandType.TENSOR_FLOAT16: 3}


def _check_axis(check: Check, index: int) -> None:
    """The axis argument, if there is one, and the levels of its presence and of ranks other than 4."""
    rank = len(check.inputs[0].dimensions)
    if len(check.inputs) > index:
        check.needs(3)
        check.input_type(index, (OperandType.INT32,))
        axis = check.constant(index)
        if axis is not None and rank:
            value = int(axis.reshape(()))
            check.require(
                -rank <= value < rank, f"input {index}", f"an axis from {-rank} to {rank - 1}", value
            )
    elif rank != 4:
        check.needs(3)
    check.input_rank_at_most(0, 4)


def _axis(call: Call, index: int) -> int:
    rank = call.array(0).ndim
    axis: int = call.scalar(index) if call.has(index) else -1
    if rank > 4:
        call.refuse(f"input 0: expected rank of at most 4, got shape {list(call.array(0).shape)}")
    if not -rank <= axis < rank:
        call.refuse(f"input {index}: expected an axis from {-rank} to {rank - 1}, got {axis}")
    return axis % rank


def _same_shape(call: Call) -> Sequence[Shape]:
    return [call.array(0).shape]


# L2_NORMALIZATION


def _validate_l2_normalization(check: Check) -> None:
    check.counts((1, 2))
    data_type = check.input_type(
        0,
        _FLOAT_LEVELS | {OperandType.TENSOR_QUANT8_ASYMM: 3, OperandType.TENSOR_QUANT8_ASYMM_SIGNED: 4},
    )
    check.output_type(0, (data_type,))
    _check_axis(check, 1)
    if data_type in QUANT8:
        output = check.outputs[0]
        expected = 128 + quantized_range(data_type)[0]
        check.require(output.scale == 1 / 128, "output 0", "scale 1/128", output.scale)
        check.require(output.zero_point == expected, "output 0", f"zero point {expected}", output.zero_point)


def _l2_normalization(call: Call) -> Sequence[Array]:
    axis = _axis(call, 1)
    data, output = call.tensor(0), call.outputs[0]
    if data.type not in QUANT8:
        values = data.array.astype(np.float32, copy=False)
        lengths = np.sqrt(np.square(values).sum(axis=axis, keepdims=True))
        return [float_result(values / np.maximum(lengths, _EPSILON), output)]
    stored = data.array.astype(np.int64) - data.zero_point
    multiplier, shift = _inverse_square_root(np.square(stored).sum(axis=axis, keepdims=True))
    if data.type == OperandType.TENSOR_QUANT8_ASYMM:
        result = multiply_by_quantized_multiplier(stored * 128, multiplier, -shift)
    else:
        result = multiply_by_quantized_multiplier(stored, multiplier, 7 - shift)
    result = result + output.zero_point
    return [np.clip(result, *quantized_range(output.type)).astype(operand_dtype(output.type))]


def _inverse_square_root(squares: Int64Array) -> tuple[Int64Array, Int64Array]:
    """1 / sqrt of integers as multiplier and right shift: ``multiplier * 2**(-31 - shift)``; of 0 and 1 as nearly 1."""
    product = saturating_rounding_doubling_high_mul
    least, largest = -(1 << 31), (1 << 31) - 1
    values = np.maximum(squares, 2)
    shift = np.full(values.shape, 11, dtype=np.int64)
    while (too_large := values >= 1 << 29).any():
        values = np.where(too_large, values // 4, values)
        shift += too_large
    bits = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    pairs = (31 - bits) // 2 - 1
    shift -= pairs
    # Newton and Raphson on a number with 3 integer bits, from 1.
    number = (values << (2 * pairs)) >> 1
    half = rounding_divide_by_pot(number, 1)
    estimate = np.full(values.shape, 1 << 28, dtype=np.int64)
    for _ in range(5):
        cube = np.clip(product(product(estimate, estimate), estimate) << 6, least, largest)
        step = product((1 << 28) + (1 << 27), estimate) - product(half, cube)
        estimate = np.clip(step << 3, least, largest)
    half_sqrt_2 = 1518500250
    multiplier = product(estimate, half_sqrt_2)
    multiplier <<= np.maximum(-shift, 0)
    is_tiny = squares <= 1
    return np.where(is_tiny, largest, multiplier), np.where(is_tiny, 0, np.maximum(shift, 0))


# LOCAL_RESPONSE_NORMALIZATION


def _validate_local_response_normalization(check: Check) -> None:
    check.counts((5, 6))
    data_type = check.input_type(0, _FLOAT_LEVELS)
    check.output_type(0, (data_type,))
    scalar = scalar_type_for(data_type)
    check.input_types(OperandType.INT32, scalar, scalar, scalar, start=1)
    _check_axis(check, 5)
    radius = check.constant(1)
    if radius is not None:
        value = int(radius.reshape(()))
        check.require(value >= 0, "input 1", "a radius of at least 0", value)


def _local_response_normalization(call: Call) -> Sequence[Array]:
    axis = _axis(call, 5)
    radius = call.scalar(1)
    if radius < 0:
        call.refuse(f"input 1: expected a radius of at least 0, got {radius}")
    bias, alpha, beta = (np.float32(call.scalar(i)) for i in (2, 3, 4))
    values = np.moveaxis(call.array(0).astype(np.float32, copy=False), axis, -1)
    extent = values.shape[-1]
    # A window's sum is the difference of two running sums; in double precision the difference keeps float32's digits.
    running = np.zeros((*values.shape[:-1], extent + 1))
    np.cumsum(np.square(values, dtype=np.float64), axis=-1, out=running[..., 1:])
    positions = np.arange(extent)
    ends, starts = np.minimum(positions + radius + 1, extent), np.maximum(positions - radius, 0)
    sums = (running[..., ends] - running[..., starts]).astype(np.float32)
    result = values * np.power(bias + alpha * sums, -beta)
    return [float_result(np.ascontiguousarray(np.moveaxis(result, -1, axis)), call.outputs[0])]


# INSTANCE_NORMALIZATION


def _validate_instance_normalization(check: Check) -> None:
    check.counts(5)
    check.needs(3)
    data_type = check.input_type(0, _FLOAT_LEVELS)
    check.output_type(0, (data_type,))
    scalar = scalar_type_for(data_type)
    check.input_types(scalar, scalar, scalar, OperandType.BOOL, start=1)
    check.input_rank(0, 4)


def _image_shape(call: Call) -> Sequence[Shape]:
    if call.array(0).ndim != 4:
        call.refuse(f"input 0: expected rank 4, got shape {list(call.array(0).shape)}")
    return _same_shape(call)


def _instance_normalization(call: Call) -> Sequence[Array]:
    gamma, beta, epsilon = (np.float32(call.scalar(i)) for i in (1, 2, 3))
    pixels = (2, 3) if call.scalar(4) else (1, 2)
    values = call.array(0).astype(np.float32, copy=False)
    centred = values - values.mean(axis=pixels, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(axis=pixels, keepdims=True) + epsilon)
    return [float_result(centred * gamma / deviation + beta, call.outputs[0])]


OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        OperationType.L2_NORMALIZATION,
        _validate_l2_normalization,
        _same_shape,
        _l2_normalization,
        """
out[i] = in[i] / max(1e-6, sqrt(sum over j of in[j]**2)), along one axis.

Inputs: 0 a tensor of rank 1 to 4; optional 1 INT32 axis, negative from the end (level 3); the last where it is left out.
Output: of the input's shape and type.
Types: float32; from level 3 float16, quant8 asymm; from level 4 quant8 asymm signed. Without an axis a rank other than 4 needs
level 3.
Quantisation: the output has scale 1/128 and zero point 128 (signed: 0). The inverse square root is a 31-bit integer and a shift,
found by five steps of Newton and Raphson.
Source: L2Normalization.cpp of the NN HAL.
""",
    ),
    OperationContract(
        OperationType.LOCAL_RESPONSE_NORMALIZATION,
        _validate_local_response_normalization,
        _same_shape,
        _local_response_normalization,
        """
out[i] = in[i] / (bias + alpha * sum over j from i - radius to i + radius of in[j]**2)**beta, along one axis, inside of the tensor.

Inputs: 0 a tensor of rank 1 to 4; 1 INT32 radius of at least 0; 2 bias, 3 alpha, 4 beta, FLOAT32 (FLOAT16 for float16 data);
optional 5 INT32 axis, negative from the end (level 3); the last where it is left out.
Output: of the input's shape and type.
Types: float32; from level 3 float16. Without an axis a rank other than 4 needs level 3.
Source: LocalResponseNormalization.cpp of the NN HAL.
""",
    ),
    OperationContract(
        OperationType.INSTANCE_NORMALIZATION,
        _validate_instance_normalization,
        _image_shape,
        _instance_normalization,
        """
out = (in - mean) * gamma / sqrt(variance + epsilon) + beta; mean and variance are those of one image's one channel.

Inputs: 0 image [batch, height, width, depth] (NCHW: [batch, depth, height, width]); 1 gamma, 2 beta, 3 epsilon, FLOAT32 (FLOAT16
for float16 data); 4 BOOL true for NCHW.
Output: of the input's shape and type.
Types (level 3): float32, float16 (computed in float32, rounded once).
Source: InstanceNormalization.cpp of the NN HAL.
""",
    ),
)
