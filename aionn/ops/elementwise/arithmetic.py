"""Sums, differences, products, quotients, powers and extrema of two operands.

Owns ADD, SUB, MUL, DIV, POW, MAXIMUM and MINIMUM. How shapes meet is in ``broadcasting``, integer multipliers in ``fixed_point``.

Invariants:
1. float16 is computed in float32 and rounded once, after the fused activation.
2. Quantised ADD, SUB and MUL equal the spec's fixed-point kernels to the last bit.
3. TENSOR_INT32 wraps around modulo 2**32.

Source: ``Broadcast``, ``MaximumMinimum`` and ``Pow`` of the NN HAL's validators and CPU operations, and the TensorFlow Lite
reference kernels that they call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from aionn.hal import FusedActivation, OperandType, OperationType, operand_dtype
from aionn.ops.numerics.broadcasting import broadcast_shape_rule, byte_pairs, require_broadcast
from aionn.ops.numerics.fixed_point import (
    activation_range,
    float_activation,
    multiply_by_quantized_multiplier,
    quantize_multiplier,
    requantize,
)
from aionn.ops.signature import Array, Call, Check, OperationContract, float_result

__all__ = ["OPERATIONS"]

T = OperandType
_FLOAT_TYPES = (T.TENSOR_FLOAT32, T.TENSOR_FLOAT16)
_QUANT8_TYPES = (T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED)
_SUM_SHIFT = 20
"""Bits that the addends of a quantised sum are shifted left, so that rescaling them loses less than the result can show."""

FloatFunction = Callable[[Array, Array], Array]
QuantizedFunction = Callable[[Call, int], Callable[[Array, Array], Array]]


def _activation(call: Call) -> FusedActivation:
    value = call.scalar(2)
    try:
        return FusedActivation(value)
    except ValueError:
        call.refuse(f"input 2: expected a fused activation from 0 to 3, got {value}")


def _validate_fused(check: Check, levels: Mapping[OperandType, int]) -> OperandType:
    """The common part of ADD, SUB, MUL and DIV."""
    check.counts(3)
    found = check.input_type(0, levels)
    check.input_types(found, T.INT32, start=1)
    check.output_types(found)
    check.input_rank_at_most(0, 4)
    check.input_rank_at_most(1, 4)
    require_broadcast(check)
    activation = check.constant(2)
    if activation is not None:
        legal = (0,) if found == T.TENSOR_INT32 else tuple(FusedActivation)
        value = int(activation.reshape(()))
        check.require(value in legal, "input 2", f"a fused activation of {[int(v) for v in legal]}", value)
    return found


def _execute_fused(
    call: Call, on_float: FloatFunction, on_int32: FloatFunction, on_quant8: QuantizedFunction | None
) -> list[Array]:
    """ADD, SUB, MUL and DIV by element type."""
    a, b = call.array(0), call.array(1)
    activation = call.kept("activation", (2,), lambda: _activation(call))
    output = call.outputs[0]
    kind = call.tensor(0).type
    if kind in _FLOAT_TYPES:
        result = on_float(a.astype(np.float32, copy=False), b.astype(np.float32, copy=False))
        return [float_result(float_activation(result, activation) if activation else result, output)]
    if kind == T.TENSOR_INT32:
        if activation != FusedActivation.NONE:
            call.refuse(f"input 2: expected no fused activation (0) for TENSOR_INT32, got {int(activation)}")
        return [np.asarray(on_int32(a, b), dtype=np.int32)]
    assert on_quant8 is not None, "the validator admits quantised types only where there is a kernel"
    # The table of pairs depends on the activation, so only a constant one may be kept with the model.
    if call.tensor(2).is_constant:
        return [byte_pairs(call, on_quant8(call, activation))]
    return [on_quant8(call, activation)(a, b)]


def _smaller_than_one(call: Call, name: str, real: float) -> tuple[int, int]:
    if not 0.0 < real < 1.0:
        call.refuse(f"quantisation: expected a {name} multiplier between 0 and 1, got {real:g}")
    return quantize_multiplier(real)


def _quantized_sum(sign: int) -> QuantizedFunction:
    def prepare(call: Call, activation: int) -> Callable[[Array, Array], Array]:
        first, second, output = call.tensor(0), call.tensor(1), call.outputs[0]
        twice_max_scale = 2.0 * max(first.scale, second.scale)
        multiplier_a, shift_a = quantize_multiplier(first.scale / twice_max_scale)
        multiplier_b, shift_b = quantize_multiplier(second.scale / twice_max_scale)
        multiplier, shift = _smaller_than_one(
            call, "output", twice_max_scale / ((1 << _SUM_SHIFT) * output.scale)
        )
        low, high = activation_range(activation, output)

        def compute(a: Array, b: Array) -> Array:
            shifted_a = (a.astype(np.int64) - first.zero_point) << _SUM_SHIFT
            shifted_b = (b.astype(np.int64) - second.zero_point) << _SUM_SHIFT
            # A difference negates the multiplier and not the value: rounding is not symmetric about zero.
            total = multiply_by_quantized_multiplier(
                shifted_a, multiplier_a, shift_a
            ) + multiply_by_quantized_multiplier(shifted_b, sign * multiplier_b, shift_b)
            raw = multiply_by_quantized_multiplier(total, multiplier, shift) + output.zero_point
            return np.clip(raw, low, high).astype(operand_dtype(output.type))

        return compute

    return prepare


def _quantized_product(call: Call, activation: int) -> Callable[[Array, Array], Array]:
    first, second, output = call.tensor(0), call.tensor(1), call.outputs[0]
    # The product and the quotient of the scales are rounded to float32, as the reference kernels' C does.
    real = np.float32(first.scale) * np.float32(second.scale) / np.float32(output.scale)
    multiplier, shift = quantize_multiplier(float(real))
    low, high = activation_range(activation, output)

    def compute(a: Array, b: Array) -> Array:
        product = (a.astype(np.int64) - first.zero_point) * (b.astype(np.int64) - second.zero_point)
        raw = multiply_by_quantized_multiplier(product, multiplier, shift) + output.zero_point
        return np.clip(raw, low, high).astype(operand_dtype(output.type))

    return compute


def _floor_divide(a: Array, b: Array) -> Array:
    # In 64 bits, since -2**31 / -1 does not fit 32. Division by zero is undefined in the spec; it gives 0 and must not trap.
    wide, divisor = a.astype(np.int64), b.astype(np.int64)
    quotient = np.floor_divide(wide, np.where(divisor == 0, 1, divisor))
    return np.where(divisor == 0, 0, quotient).astype(np.int32)


def _validate_add(check: Check) -> None:
    _validate_fused(
        check,
        {
            T.TENSOR_FLOAT32: 1,
            T.TENSOR_QUANT8_ASYMM: 1,
            T.TENSOR_FLOAT16: 3,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
            T.TENSOR_INT32: 4,
        },
    )


def _execute_add(call: Call) -> list[Array]:
    return _execute_fused(call, np.add, np.add, _quantized_sum(1))


def _validate_sub(check: Check) -> None:
    check.needs(2)
    _validate_fused(
        check,
        {
            T.TENSOR_FLOAT32: 2,
            T.TENSOR_FLOAT16: 3,
            T.TENSOR_QUANT8_ASYMM: 3,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
            T.TENSOR_INT32: 4,
        },
    )


def _execute_sub(call: Call) -> list[Array]:
    return _execute_fused(call, np.subtract, np.subtract, _quantized_sum(-1))


def _validate_mul(check: Check) -> None:
    found = _validate_fused(
        check,
        {
            T.TENSOR_FLOAT32: 1,
            T.TENSOR_QUANT8_ASYMM: 1,
            T.TENSOR_FLOAT16: 3,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
            T.TENSOR_INT32: 4,
        },
    )
    if found in _QUANT8_TYPES:
        product = float(np.float32(check.inputs[0].scale) * np.float32(check.inputs[1].scale))
        scale = check.outputs[0].scale
        check.require(
            scale > product, "output 0", f"a scale above the product {product:g} of the inputs' scales", scale
        )


def _execute_mul(call: Call) -> list[Array]:
    return _execute_fused(call, np.multiply, np.multiply, _quantized_product)


def _validate_div(check: Check) -> None:
    check.needs(2)
    _validate_fused(check, {T.TENSOR_FLOAT32: 2, T.TENSOR_FLOAT16: 3, T.TENSOR_INT32: 4})


def _execute_div(call: Call) -> list[Array]:
    return _execute_fused(call, np.divide, _floor_divide, None)


def _validate_pow(check: Check) -> None:
    check.needs(3)
    check.counts(2)
    found = check.input_type(0, _FLOAT_TYPES)
    check.input_types(found, start=1)
    check.output_types(found)
    require_broadcast(check)


def _execute_pow(call: Call) -> list[Array]:
    # In float64, where the power's last bits do not reach float32's.
    base, exponent = call.array(0).astype(np.float64), call.array(1).astype(np.float64)
    return [float_result(np.power(base, exponent), call.outputs[0])]


def _validate_extremum(check: Check) -> None:
    check.needs(3)
    check.counts(2)
    found = check.input_type(0, (*_FLOAT_TYPES, T.TENSOR_INT32, *_QUANT8_TYPES))
    check.input_types(found, start=1)
    check.output_types(found)
    require_broadcast(check)


def _execute_extremum(call: Call, choose: FloatFunction) -> list[Array]:
    first, second, output = call.tensor(0), call.tensor(1), call.outputs[0]
    if first.type not in _QUANT8_TYPES:
        return [np.asarray(choose(first.array, second.array))]
    return [
        byte_pairs(
            call,
            lambda a, b: choose(requantize(a, first.operand, output), requantize(b, second.operand, output)),
        )
    ]


def _execute_maximum(call: Call) -> list[Array]:
    return _execute_extremum(call, np.maximum)


def _execute_minimum(call: Call) -> list[Array]:
    return _execute_extremum(call, np.minimum)


_FUSED_INPUTS = """\
Inputs:
    0: tensor of rank at most 4.
    1: tensor of the same type. The shapes broadcast: aligned at the last axis, extents equal or one of them 1.
    2: INT32 scalar: fused activation, 0 none, 1 RELU, 2 RELU1, 3 RELU6.
Outputs:
    0: tensor of the same type and of the broadcast shape.
"""

_EXTREMUM_RULES = """\
Quantisation: scales and zero points are free; each input is requantised to the output's, in float64, rounded half away from zero
and saturated, before the comparison.
Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_INT32, TENSOR_QUANT8_ASYMM from level 3; TENSOR_QUANT8_ASYMM_SIGNED from 4.
Stricter than the spec: shapes known not to broadcast are refused with the model. A NaN on either side gives NaN.
Source: MaximumMinimum.cpp of the NN HAL.
"""

_PAIR_INPUTS = """\
Inputs:
    0: tensor.
    1: tensor of the same type. The shapes broadcast: aligned at the last axis, extents equal or one of them 1.
Outputs:
    0: tensor of the same type and of the broadcast shape.
"""

_FUSED_DEVIATIONS = """\
Stricter than the spec: a constant activation outside of 0 to 3, and one other than 0 for TENSOR_INT32, is refused with the model
and not at the execution; so are shapes known not to broadcast. Looser: zero-sized inputs are legal at every level.
"""

_SUM_QUANTISATION = """\
Quantisation: scales and zero points are free, save that 2 * max(scale0, scale1) < 2**20 * scale_out. Both inputs, less their zero
points, are shifted left by 20 bits and multiplied by scale / (2 * max(scale0, scale1)); the result is multiplied by
2 * max(scale0, scale1) / (2**20 * scale_out), and output zero point and clamping to the activation's range follow.
"""

OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        OperationType.ADD,
        _validate_add,
        broadcast_shape_rule,
        _execute_add,
        "output = activation(input0 + input1)\n"
        + _FUSED_INPUTS
        + _SUM_QUANTISATION
        + """\
Types: TENSOR_FLOAT32, TENSOR_QUANT8_ASYMM from level 1; TENSOR_FLOAT16 from 3; TENSOR_QUANT8_ASYMM_SIGNED, TENSOR_INT32 (wraps
around, no activation) from 4.
"""
        + _FUSED_DEVIATIONS
        + "Source: Broadcast.cpp of the NN HAL; ArithmeticParams kernels of TensorFlow Lite.",
    ),
    OperationContract(
        OperationType.SUB,
        _validate_sub,
        broadcast_shape_rule,
        _execute_sub,
        "output = activation(input0 - input1)\n"
        + _FUSED_INPUTS
        + _SUM_QUANTISATION
        + """\
Types: TENSOR_FLOAT32 from level 2; TENSOR_FLOAT16, TENSOR_QUANT8_ASYMM from 3; TENSOR_QUANT8_ASYMM_SIGNED, TENSOR_INT32 (wraps
around, no activation) from 4.
"""
        + _FUSED_DEVIATIONS
        + "Source: Broadcast.cpp of the NN HAL; ArithmeticParams kernels of TensorFlow Lite.",
    ),
    OperationContract(
        OperationType.MUL,
        _validate_mul,
        broadcast_shape_rule,
        _execute_mul,
        "output = activation(input0 * input1)\n"
        + _FUSED_INPUTS
        + """\
Quantisation: scale_out > scale0 * scale1 (product in float32); zero points are free. The product of both inputs, less their zero
points, is multiplied by scale0 * scale1 / scale_out (computed in float32); output zero point and clamping follow.
Types: TENSOR_FLOAT32, TENSOR_QUANT8_ASYMM from level 1; TENSOR_FLOAT16 from 3; TENSOR_QUANT8_ASYMM_SIGNED, TENSOR_INT32 (wraps
around, no activation) from 4.
"""
        + _FUSED_DEVIATIONS
        + """\
Source: Broadcast.cpp of the NN HAL; where it divides the scales in float64 and TensorFlow Lite in float32, we follow the latter.
""",
    ),
    OperationContract(
        OperationType.DIV,
        _validate_div,
        broadcast_shape_rule,
        _execute_div,
        "output = activation(input0 / input1)\n"
        + _FUSED_INPUTS
        + """\
Quantisation: none.
Types: TENSOR_FLOAT32 from level 2; TENSOR_FLOAT16 from 3; TENSOR_INT32 (rounded towards minus infinity, no activation) from 4.
Division by zero gives infinity or NaN in float, and 0 in TENSOR_INT32, where the spec leaves it undefined.
"""
        + _FUSED_DEVIATIONS
        + "Source: Broadcast.cpp of the NN HAL.",
    ),
    OperationContract(
        OperationType.POW,
        _validate_pow,
        broadcast_shape_rule,
        _execute_pow,
        "output = input0 ** input1\n"
        + _PAIR_INPUTS
        + """\
Quantisation: none.
Types: TENSOR_FLOAT32, TENSOR_FLOAT16 from level 3. A negative base with a fractional exponent gives NaN.
Stricter than the spec: shapes known not to broadcast are refused with the model.
Source: Pow.cpp of the NN HAL.
""",
    ),
    OperationContract(
        OperationType.MAXIMUM,
        _validate_extremum,
        broadcast_shape_rule,
        _execute_maximum,
        "output = max(input0, input1)\n" + _PAIR_INPUTS + _EXTREMUM_RULES,
    ),
    OperationContract(
        OperationType.MINIMUM,
        _validate_extremum,
        broadcast_shape_rule,
        _execute_minimum,
        "output = min(input0, input1)\n" + _PAIR_INPUTS + _EXTREMUM_RULES,
    ),
)
