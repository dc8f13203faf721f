"""Sums of products of values with weights, plus bias, activation and requantisation: what convolution and matmul share.

Owns the operand rules of input, weights and bias, the conversion of weights so that float products sum exactly, and the way from
sums to outputs. The operation pairs values with weights.

Invariants:
1. Quantised sums are exact: they are computed in float32 where no partial sum can reach 2**24, else in float64.
2. Values enter as they are stored; ``Sums.finish`` takes the input's zero point out, so padding must be filled with ``fill``.

Source: the NN HAL's CPU operations; multipliers of signed and per-channel types as TensorFlow Lite's reference kernels have them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aionn.errors import InvalidArgument
from aionn.hal import Operand, OperandType
from aionn.ops.numerics.fixed_point import Requantization, activation_range, quantized_range
from aionn.ops.signature import Array, Call, Check, Tensor

__all__ = [
    "DATA_LEVELS",
    "QUANT8",
    "SCRATCH_ROW",
    "check_bias",
    "check_weighted",
    "exact_float",
    "finisher",
    "row_repeats",
    "weight_values",
]

DATA_LEVELS = {
    OperandType.TENSOR_FLOAT32: 1,
    OperandType.TENSOR_FLOAT16: 3,
    OperandType.TENSOR_QUANT8_ASYMM: 1,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: 4,
}
"""The types of data that are weighted, with their first levels."""

QUANT8 = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)

SCRATCH_ROW = 1024
"""Elements of a row that is long enough: numpy's cost per row is then small, and a row's parameters stay in the nearest cache."""

_EXACT_FLOAT32 = 1 << 24

Finish = Callable[[Array, Array], None]


def check_weighted(check: Check, *, channel_dim: int | None) -> OperandType:
    """Checks the types of input 0 (data), 1 (weights), 2 (bias) and of output 0, and the bias' scale.

    Args:
        check: The operation.
        channel_dim: The axis that per-channel scales of the weights must belong to; None where they are not allowed.

    Returns:
        The type of the data.
    """
    data, weights, bias = check.inputs[:3]
    data_type = check.input_type(0, DATA_LEVELS)
    check.output_type(0, (data_type,))
    if data_type not in QUANT8:
        check.input_types(data_type, data_type, start=1)
        return data_type
    per_channel = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
    weights_type = check.input_type(1, (data_type,) if channel_dim is None else (data_type, per_channel))
    check.input_type(2, (OperandType.TENSOR_INT32,))
    check.require(bias.zero_point == 0, "input 2", "zero point 0", bias.zero_point)
    if weights_type == per_channel:
        quant = weights.channel_quant
        if quant is None or quant.channel_dim != channel_dim:
            check.refuse("input 1", f"per-channel scales on axis {channel_dim}", quant)
        return data_type
    product = float(np.float32(data.scale) * np.float32(weights.scale))
    check.require(
        abs(product - bias.scale) <= 1e-6 * min(product, bias.scale),
        "input 2",
        f"scale {product} of input times weights",
        bias.scale,
    )
    if data_type == OperandType.TENSOR_QUANT8_ASYMM and not check.outputs[0].scale > product:
        check.needs(3)
    return data_type


def exact_float(bound: float) -> type[np.float32] | type[np.float64]:
    """The float type in which integers up to ``bound`` in magnitude, and all partial sums on the way, are exact."""
    return np.float32 if bound < _EXACT_FLOAT32 else np.float64


def weight_values(
    data: Tensor, weights: Tensor, reduced: tuple[int, ...], *, spans_zero_point: bool = False
) -> tuple[Array, Array]:
    """Weights as floats, their zero point taken out, in a type in which the operation's sums are exact.

    Args:
        data: The values to weight; their type bounds the sums.
        weights: As stored.
        reduced: The axes that are summed over.
        spans_zero_point: Whether the data's zero point is taken out before they are weighted, which widens their range.

    Returns:
        The values, and their sum per remaining index in float64 (zero for float types).
    """
    if data.type not in QUANT8:
        values = weights.array.astype(np.float32, copy=False)
        return values, np.zeros(1)
    values = weights.array.astype(np.float32)
    if weights.zero_point:
        values -= np.float32(weights.zero_point)
    low, high = quantized_range(data.type)
    largest = high - low if spans_zero_point else max(-low, high)
    bound = largest * np.abs(values).sum(axis=reduced, dtype=np.float64).max(initial=0)
    return values.astype(exact_float(bound), copy=False), values.sum(axis=reduced, dtype=np.float64)


def row_repeats(width: int, channels: int) -> int:
    """Number of pixels of a row of ``width`` that are treated as one: a divisor of it, ``SCRATCH_ROW`` elements at most."""
    best = 1
    for divisor in range(1, min(width, max(SCRATCH_ROW // max(channels, 1), 1)) + 1):
        if width % divisor == 0:
            best = divisor
    return best


def finisher(
    call: Call,
    activation: int,
    totals: Array,
    *,
    repeats: int = 1,
    rounds_product: bool = False,
    rounds_once: bool = False,
    keeps_zero_point: bool = True,
) -> Finish:
    """The conversion of sums to outputs: ``finish(sums, out)`` with the channels (times ``repeats``) on the last axis.

    Args:
        call: Input 0 is the data, 1 the weights, 2 the bias; output 0 the result.
        activation: The index of the fused activation.
        totals: The sum of each channel's weights.
        repeats: Number of repetitions of the channels in a row.
        rounds_product: Whether the product of two single scales is rounded to float32, as it is for unsigned data anyway.
        rounds_once: Whether results are rounded once, half up, instead of after product and shift.
        keeps_zero_point: Whether the data were weighted as stored, its zero point not taken out.

    Raises:
        InvalidArgument: The bias does not fit, or the activation is invalid.
    """
    data, weights, bias = call.tensor(0), call.tensor(1), call.tensor(2)
    code = call.scalar(activation)
    if not 0 <= code <= 3:
        call.refuse(f"input {activation}: expected a fused activation from 0 to 3, got {code}")
    output = call.outputs[0]
    if data.type not in QUANT8:
        return _FloatFinish(bias.array, code, repeats)
    constant = bias.array.astype(np.int64)
    if keeps_zero_point:
        constant -= totals.astype(np.int64) * data.zero_point
    low, high = activation_range(code, output)
    reals = _real_multipliers(data, weights, output, rounds_product)
    return Requantization(
        reals, constant, output.zero_point, low, high, repeats=repeats, rounds_once=rounds_once
    )


def _real_multipliers(data: Tensor, weights: Tensor, output: Operand, rounds_product: bool) -> Array:
    if weights.operand.channel_quant is not None:
        scales = np.asarray(weights.operand.channel_quant.scales, dtype=np.float64)
        return float(data.scale) * scales / float(output.scale)
    if rounds_product or data.type == OperandType.TENSOR_QUANT8_ASYMM:
        return np.asarray(float(np.float32(data.scale) * np.float32(weights.scale)) / float(output.scale))
    return np.asarray(float(data.scale) * float(weights.scale) / float(output.scale))


class _FloatFinish:
    """Adds the bias, applies the activation and rounds to the output's type."""

    __slots__ = ("_activation", "_bias")

    def __init__(self, bias: Array, activation: int, repeats: int) -> None:
        self._bias = np.tile(bias.astype(np.float32), repeats)
        self._activation = activation

    def __call__(self, sums: Array, out: Array) -> None:
        sums += self._bias
        match self._activation:
            case 1:
                np.maximum(sums, np.float32(0), out=sums)
            case 2:
                np.clip(sums, np.float32(-1), np.float32(1), out=sums)
            case 3:
                np.clip(sums, np.float32(0), np.float32(6), out=sums)
        if out is not sums:
            np.copyto(out, sums, casting="unsafe")


def check_bias(call: Call, channels: int) -> None:
    """Demands one bias per channel."""
    shape = call.array(2).shape
    if shape != (channels,):
        raise InvalidArgument(f"input 2: expected shape [{channels}], got {list(shape)}")
