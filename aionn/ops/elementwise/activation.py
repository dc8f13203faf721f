"""Activations, element by element: RELU, RELU1, RELU6, LOGISTIC, TANH, HARD_SWISH, ELU, PRELU.

Owns the functions. Quantised functions of one value are tables with an entry for each of the 256 stored values.

Source: ``Activation.cpp``, ``Elu.cpp``, ``PRelu.cpp`` of the NN HAL's CPU operations; quantised LOGISTIC and TANH as LiteRT's
reference kernels tabulate them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from aionn.hal import FusedActivation, Operand, OperandType, OperationType, operand_dtype
from aionn.ops.numerics.fixed_point import (
    Int64Array,
    activation_range,
    float_activation,
    multiply_by_quantized_multiplier,
    quantize_multiplier,
    quantized_range,
    rounding_divide_by_pot,
)
from aionn.ops.numerics.weighted_sums import DATA_LEVELS, QUANT8
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, float_result, scalar_type_for

__all__ = ["OPERATIONS"]

_FLOATS = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)


def _same_shape(call: Call) -> Sequence[Shape]:
    return [call.array(0).shape]


def _rank_at_most_4(call: Call) -> Sequence[Shape]:
    if call.array(0).ndim > 4:
        call.refuse(f"input 0: expected rank of at most 4, got shape {list(call.array(0).shape)}")
    return _same_shape(call)


def _lookup(call: Call, make: Callable[[Operand, Operand], Array]) -> Sequence[Array]:
    """The table's entry of each stored value. ``make`` gives the entries of 0 to 255 (signed: 0 to 127, then -128 to -1)."""
    table = call.kept("table", (), lambda: make(call.tensor(0).operand, call.outputs[0]))
    return [table[call.array(0).view(np.uint8)]]


def _stored_values(operand: Operand) -> Int64Array:
    """All stored values of a quantised 8-bit type, in the order of their bytes, the zero point taken out."""
    return (
        np.arange(256).astype(np.uint8).view(operand_dtype(operand.type)).astype(np.int64)
        - operand.zero_point
    )


# RELU, RELU1, RELU6


def _validate_relu(check: Check) -> None:
    check.counts(1)
    data_type = check.input_type(0, DATA_LEVELS)
    check.output_type(0, (data_type,))
    check.input_rank_at_most(0, 4)
    if data_type in QUANT8:
        check.same_quantization("output 0", check.inputs[0], check.outputs[0])


def _relu(activation: FusedActivation) -> Callable[[Call], Sequence[Array]]:
    def execute(call: Call) -> Sequence[Array]:
        values = call.array(0)
        if call.tensor(0).type not in QUANT8:
            return [float_activation(values, activation)]
        low, high = activation_range(activation, call.tensor(0).operand)
        return [values.clip(low, high)]

    return execute


# LOGISTIC and TANH


def _validate_sigmoid(levels: dict[OperandType, int], steps: int, zero_point: int) -> Callable[[Check], None]:
    """Args: levels by type; the output has scale 1 / ``steps`` and, unsigned, the zero point."""

    def validate(check: Check) -> None:
        check.counts(1)
        data_type = check.input_type(0, levels)
        check.output_type(0, (data_type,))
        check.input_rank_at_most(0, 4)
        if data_type in QUANT8:
            output = check.outputs[0]
            expected = zero_point + quantized_range(data_type)[0]
            check.require(output.scale == 1 / steps, "output 0", f"scale 1/{steps}", output.scale)
            check.require(
                output.zero_point == expected, "output 0", f"zero point {expected}", output.zero_point
            )

    return validate


def _sigmoid(function: Callable[[Array], Array]) -> Callable[[Call], Sequence[Array]]:
    def table(data: Operand, output: Operand) -> Array:
        real = function(_stored_values(data) * float(data.scale)) / float(output.scale)
        rounded = np.trunc(real + np.copysign(0.5, real)) + output.zero_point
        low, high = quantized_range(output.type)
        clipped: Array = rounded.clip(low, high)
        return clipped.astype(operand_dtype(output.type))

    def execute(call: Call) -> Sequence[Array]:
        if call.tensor(0).type in QUANT8:
            return _lookup(call, table)
        return [float_result(function(call.array(0).astype(np.float32, copy=False)), call.outputs[0])]

    return execute


def _logistic(values: Array) -> Array:
    result: Array = np.exp(-values)
    result += 1
    return np.divide(1, result, out=result)


# HARD_SWISH


def _validate_hard_swish(check: Check) -> None:
    check.counts(1)
    check.needs(4)
    data_type = check.input_type(0, DATA_LEVELS)
    check.output_type(0, (data_type,))


def _hard_swish(call: Call) -> Sequence[Array]:
    if call.tensor(0).type in QUANT8:
        return _lookup(call, _hard_swish_table)
    values = call.array(0).astype(np.float32, copy=False)
    return [float_result(values * np.clip(values + 3, 0, 6) / np.float32(6), call.outputs[0])]


def _hard_swish_table(data: Operand, output: Operand) -> Array:
    """x * relu6(x + 3) / 6 in 16-bit fixed point: x with 7 more bits, the other factor as a fraction of 2**15."""
    fine_scale = np.float32(1 / 128) * np.float32(data.scale)
    output_multiplier, output_shift = _multiplier_16(float(fine_scale / np.float32(output.scale)))
    slope, slope_shift = _multiplier_16(float(fine_scale / np.float32(3 / 32768)))
    fine = _stored_values(data) << 7
    scaled = (fine * output_multiplier + (1 << 14)) >> 15
    # The factor (x + 3) / 6 is half of 1 + x / 3, saturated to 16 bits on the way.
    factor = _saturate_16(fine << max(slope_shift - 1, 0))
    factor = (factor * slope + (1 << 14)) >> 15
    if slope_shift > 0:
        factor = _saturate_16(factor << 1)
    factor = rounding_divide_by_pot(factor, max(-slope_shift, 0))
    factor = (factor + (1 << 15)) >> 1
    product = factor * scaled
    product = np.where(product < 0, -((-product) >> 15), product >> 15)
    result = rounding_divide_by_pot(product, max(-output_shift, 0)) << max(output_shift, 0)
    low, high = quantized_range(output.type)
    clipped: Array = (result + output.zero_point).clip(low, high)
    return clipped.astype(operand_dtype(output.type))


def _multiplier_16(real: float) -> tuple[int, int]:
    multiplier, shift = quantize_multiplier(real)
    return min((multiplier + (1 << 15)) >> 16, (1 << 15) - 1), shift


def _saturate_16(values: Int64Array) -> Int64Array:
    return np.clip(values, -(1 << 15), (1 << 15) - 1)


# ELU


def _validate_elu(check: Check) -> None:
    check.counts(2)
    check.needs(4)
    data_type = check.input_type(0, _FLOATS)
    check.input_type(1, (scalar_type_for(data_type),))
    check.output_type(0, (data_type,))


def _elu(call: Call) -> Sequence[Array]:
    values = call.array(0).astype(np.float32, copy=False)
    alpha = np.float32(call.scalar(1))
    return [float_result(np.maximum(values, 0) + np.minimum(alpha * np.expm1(values), 0), call.outputs[0])]


# PRELU


def _validate_prelu(check: Check) -> None:
    check.counts(2)
    check.needs(3)
    data_type = check.input_type(0, DATA_LEVELS)
    check.input_type(1, (data_type,))
    check.output_type(0, (data_type,))


def _prelu_shapes(call: Call) -> Sequence[Shape]:
    shapes = [call.array(0).shape, call.array(1).shape]
    try:
        return [np.broadcast_shapes(*shapes)]
    except ValueError:
        call.refuse(
            f"input 1: expected a shape that broadcasts with {list(shapes[0])}, got {list(shapes[1])}"
        )


def _prelu(call: Call) -> Sequence[Array]:
    data, slopes, output = call.tensor(0), call.tensor(1), call.outputs[0]
    if data.type not in QUANT8:
        values, alphas = (t.array.astype(np.float32, copy=False) for t in (data, slopes))
        return [float_result(np.where(values >= 0, values, values * alphas), output)]
    scale, output_scale = np.float32(data.scale), np.float32(output.scale)
    stored = data.array.astype(np.int64) - data.zero_point
    products = stored * (slopes.array.astype(np.int64) - slopes.zero_point)
    positive = multiply_by_quantized_multiplier(stored, *quantize_multiplier(float(scale / output_scale)))
    real = float(scale * np.float32(slopes.scale) / output_scale)
    negative = multiply_by_quantized_multiplier(products, *quantize_multiplier(real))
    result = np.where(stored >= 0, positive, negative) + output.zero_point
    return [np.clip(result, *quantized_range(output.type)).astype(operand_dtype(output.type))]


# Contracts

_ELEMENT_TYPES = """
Inputs: 0 a tensor of {rank}.
Output: of the input's shape and type.
Types: {types}. Float16 is computed in float32 and rounded once.
"""

_ALL_TYPES = "float32, quant8 asymm; from level 3 float16; from level 4 quant8 asymm signed"


def _relu_contract(operation: OperationType, activation: FusedActivation, formula: str) -> OperationContract:
    return OperationContract(
        operation,
        _validate_relu,
        _rank_at_most_4,
        _relu(activation),
        f"\nout = {formula}.\n"
        + _ELEMENT_TYPES.format(rank="rank 1 to 4", types=_ALL_TYPES)
        + """Quantisation: the output has the input's scale and zero point; stored values are clipped.
Stricter than AOSP: the equal quantisation that the spec demands is checked.
Source: Activation.cpp of the NN HAL.
""",
    )


def _sigmoid_contract(
    operation: OperationType,
    levels: dict[OperandType, int],
    function: Callable[[Array], Array],
    steps: int,
    zero_point: int,
    doc: tuple[str, str],
) -> OperationContract:
    formula, types = doc
    return OperationContract(
        operation,
        _validate_sigmoid(levels, steps, zero_point),
        _rank_at_most_4,
        _sigmoid(function),
        f"\nout = {formula}.\n"
        + _ELEMENT_TYPES.format(rank="rank 1 to 4", types=types)
        + f"""Quantisation: the output has scale 1/{steps} and zero point {zero_point} (signed: {zero_point - 128}). Results are the
real function's values rounded to nearest, half away from zero, as in LiteRT's reference kernel; some differ by one from AOSP's
fixed-point form.
Source: Activation.cpp of the NN HAL.
""",
    )


OPERATIONS: tuple[OperationContract, ...] = (
    _relu_contract(OperationType.RELU, FusedActivation.RELU, "max(0, in)"),
    _relu_contract(OperationType.RELU1, FusedActivation.RELU1, "min(1, max(-1, in))"),
    _relu_contract(OperationType.RELU6, FusedActivation.RELU6, "min(6, max(0, in))"),
    _sigmoid_contract(
        OperationType.LOGISTIC, DATA_LEVELS, _logistic, 256, 0, ("1 / (1 + exp(-in))", _ALL_TYPES)
    ),
    _sigmoid_contract(
        OperationType.TANH,
        {**DATA_LEVELS, OperandType.TENSOR_QUANT8_ASYMM: 3},
        np.tanh,
        128,
        128,
        ("tanh(in)", "float32; from level 3 float16, quant8 asymm; from level 4 quant8 asymm signed"),
    ),
    OperationContract(
        OperationType.HARD_SWISH,
        _validate_hard_swish,
        _same_shape,
        _hard_swish,
        "\nout = in * min(6, max(0, in + 3)) / 6.\n"
        + _ELEMENT_TYPES.format(
            rank="any rank", types="float32, float16, quant8 asymm, quant8 asymm signed (level 4)"
        )
        + """Quantisation: any output scale and zero point; 16-bit fixed-point arithmetic, with the rounding of each of its steps.
Source: Activation.cpp of the NN HAL; HardSwish of TensorFlow Lite's reference kernels.
""",
    ),
    OperationContract(
        OperationType.ELU,
        _validate_elu,
        _same_shape,
        _elu,
        """
out = max(0, in) + min(0, alpha * (exp(in) - 1)).

Inputs: 0 a tensor of any rank; 1 alpha, FLOAT32 (FLOAT16 for float16 data).
Output: of the input's shape and type.
Types (level 4): float32, float16.
Source: Elu.cpp of the NN HAL.
""",
    ),
    OperationContract(
        OperationType.PRELU,
        _validate_prelu,
        _prelu_shapes,
        _prelu,
        """
out = in where in >= 0, else alpha * in; the shapes broadcast.

Inputs: 0 a tensor; 1 alpha, of the same type.
Output: of the broadcast shape.
Types: float32, float16, quant8 asymm (level 3); quant8 asymm signed (level 4).
Quantisation: two fixed-point multipliers, scale in / scale out and scale in * scale alpha / scale out in float32.
Source: PRelu.cpp of the NN HAL; Prelu of TensorFlow Lite's reference kernels.
""",
    ),
)
