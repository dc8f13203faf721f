"""Reductions along axes: logical, extrema, products, sums, means, and the places of extrema.

Owns REDUCE_ALL, REDUCE_ANY, REDUCE_MAX, REDUCE_MIN, REDUCE_PROD, REDUCE_SUM, MEAN, ARGMAX and ARGMIN.

Invariants:
1. A result is never of rank 0: where all axes go, the shape is [1].
2. Float sums, products and means are accumulated in float64 and rounded once.
3. Quantised MEAN equals TensorFlow Lite's reference kernel to the last bit.

Source: ``Reduce``, ``SimpleMath`` and ``ArgMinMax`` of the NN HAL's validators and CPU operations; ``QuantizedMeanOrSum`` of
TensorFlow Lite's reference kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from aionn.hal import OperandType, OperationType, operand_dtype
from aionn.ops.numerics.axes import axes_of, axis_of, known_rank, require_axes
from aionn.ops.numerics.fixed_point import (
    multiply_by_quantized_multiplier,
    quantize_multiplier,
    quantized_range,
)
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, float_result

__all__ = ["OPERATIONS"]

T = OperandType
_QUANT8_TYPES = (T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED)


def _validate_reduction(
    check: Check, level: int, levels: Mapping[OperandType, int], keep_type: OperandType
) -> OperandType:
    check.needs(level)
    check.counts(3)
    found = check.input_type(0, levels)
    check.input_types(T.TENSOR_INT32, keep_type, start=1)
    check.output_types(found)
    check.input_rank_at_most(0, 4)
    check.input_rank(1, 1)
    require_axes(check, 1, known_rank(check.inputs[0]))
    return found


def _reduced_shape(call: Call) -> list[Shape]:
    shape = call.tensor(0).shape
    axes = axes_of(call, 1, len(shape))
    # Input 2 is a BOOL for most, and for MEAN an INT32 that is true when positive.
    if call.scalar(2) > 0:
        return [tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))]
    return [tuple(extent for axis, extent in enumerate(shape) if axis not in axes) or (1,)]


def _validate_logical(check: Check) -> None:
    _validate_reduction(check, 3, {T.TENSOR_BOOL8: 3}, T.BOOL)


def _validate_extremum(check: Check) -> None:
    found = _validate_reduction(
        check,
        3,
        {
            T.TENSOR_FLOAT32: 3,
            T.TENSOR_FLOAT16: 3,
            T.TENSOR_QUANT8_ASYMM: 3,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
        },
        T.BOOL,
    )
    if found in _QUANT8_TYPES:
        check.same_quantization("output 0", check.inputs[0], check.outputs[0])


def _validate_sum(check: Check) -> None:
    _validate_reduction(check, 3, {T.TENSOR_FLOAT32: 3, T.TENSOR_FLOAT16: 3}, T.BOOL)


def _reduce(call: Call, function: Callable[[Array, tuple[int, ...]], Array]) -> list[Array]:
    array = call.array(0)
    (shape,) = _reduced_shape(call)
    axes = axes_of(call, 1, array.ndim)
    return [np.asarray(function(array, axes)).reshape(shape)]


def _execute_all(call: Call) -> list[Array]:
    return _reduce(call, lambda array, axes: np.all(array, axis=axes))


def _execute_any(call: Call) -> list[Array]:
    return _reduce(call, lambda array, axes: np.any(array, axis=axes))


def _execute_extremum(call: Call, choose: Callable[..., Any], initial: float) -> list[Array]:
    def function(array: Array, axes: tuple[int, ...]) -> Array:
        if math.prod(array.shape[axis] for axis in axes):
            # The extremum of infinities is an infinity, which a start with a finite number would hide.
            return np.asarray(choose(array, axis=axes), dtype=array.dtype)
        return np.asarray(choose(array, axis=axes, initial=initial), dtype=array.dtype)

    return _reduce(call, function)


def _finite_range(operand_type: int) -> tuple[float, float]:
    if operand_type in _QUANT8_TYPES:
        return quantized_range(operand_type)
    largest = float(
        np.finfo(np.float16).max if operand_type == T.TENSOR_FLOAT16 else np.finfo(np.float32).max
    )
    return -largest, largest


def _execute_max(call: Call) -> list[Array]:
    # Of no elements, the least value of the type.
    return _execute_extremum(call, np.max, _finite_range(call.tensor(0).type)[0])


def _execute_min(call: Call) -> list[Array]:
    return _execute_extremum(call, np.min, _finite_range(call.tensor(0).type)[1])


def _execute_prod(call: Call) -> list[Array]:
    def function(array: Array, axes: tuple[int, ...]) -> Array:
        product = np.asarray(np.prod(array, axis=axes, dtype=np.float64))
        # A factor of zero wins over an infinite one, which would make NaN.
        return float_result(np.where(np.any(array == 0, axis=axes), 0.0, product), call.outputs[0])

    return _reduce(call, function)


def _execute_sum(call: Call) -> list[Array]:
    return _reduce(
        call,
        lambda array, axes: float_result(
            np.asarray(np.sum(array, axis=axes, dtype=np.float64)), call.outputs[0]
        ),
    )


def _validate_mean(check: Check) -> None:
    _validate_reduction(
        check,
        2,
        {
            T.TENSOR_FLOAT32: 2,
            T.TENSOR_QUANT8_ASYMM: 2,
            T.TENSOR_FLOAT16: 3,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
        },
        T.INT32,
    )


def _quantized_mean(call: Call, array: Array, axes: tuple[int, ...], count: int) -> Array:
    source, output = call.tensor(0), call.outputs[0]
    total = np.sum(array, axis=axes, dtype=np.int64) - source.zero_point * count
    multiplier, shift = quantize_multiplier(source.scale / output.scale)
    # The division by the count joins the multiplier, which first takes as many more bits as the count has, up to what keeps
    # the product and the shift within 32 bits.
    extra = min(count.bit_length() - 1, 32, 31 + shift)
    multiplier = (multiplier << extra) // count
    raw = multiply_by_quantized_multiplier(total, multiplier, shift - extra) + output.zero_point
    low, high = quantized_range(output.type)
    return np.clip(raw, low, high).astype(operand_dtype(output.type))


def _execute_mean(call: Call) -> list[Array]:
    def function(array: Array, axes: tuple[int, ...]) -> Array:
        count = math.prod(array.shape[axis] for axis in axes)
        if count == 0:
            call.refuse(f"input 0: expected elements to take the mean of, got shape {list(array.shape)}")
        if call.tensor(0).type in _QUANT8_TYPES:
            return _quantized_mean(call, array, axes, count)
        return float_result(np.sum(array, axis=axes, dtype=np.float64) / count, call.outputs[0])

    return _reduce(call, function)


def _validate_arg(check: Check) -> None:
    check.needs(3)
    check.counts(2)
    check.input_type(0, (T.TENSOR_FLOAT32, T.TENSOR_FLOAT16, T.TENSOR_INT32, *_QUANT8_TYPES))
    check.input_types(T.INT32, start=1)
    check.output_types(T.TENSOR_INT32)
    require_axes(check, 1, known_rank(check.inputs[0]))


def _arg_shape(call: Call) -> list[Shape]:
    shape = call.tensor(0).shape
    axis = axis_of(call, 1, len(shape))
    if shape[axis] == 0:
        call.refuse(f"input 0: expected elements along axis {axis}, got shape {list(shape)}")
    return [shape[:axis] + shape[axis + 1 :] or (1,)]


def _execute_arg(call: Call, find: Callable[..., Array]) -> list[Array]:
    array = call.array(0)
    (shape,) = _arg_shape(call)
    return [np.asarray(find(array, axis=axis_of(call, 1, array.ndim)), dtype=np.int32).reshape(shape)]


def _execute_argmax(call: Call) -> list[Array]:
    return _execute_arg(call, np.argmax)


def _execute_argmin(call: Call) -> list[Array]:
    return _execute_arg(call, np.argmin)


_AXES_INPUTS = """\
Inputs:
    0: tensor of rank at most 4.
    1: TENSOR_INT32 of rank 1: the axes to reduce, from -rank to rank - 1; repetitions count once; none reduces nothing.
    2: {keep}.
Outputs:
    0: tensor of the same type. Its shape has extent 1 for each reduced axis, or lacks the axis; [1] where all axes go.
"""
_REDUCE_INPUTS = _AXES_INPUTS.format(keep="BOOL scalar: keep the reduced axes with extent 1")

_DEVIATIONS = """\
Stricter than the spec: constant axes out of range are refused with the model.
"""


def _float_or_bool(formula: str, types: str, notes: str = "") -> str:
    return (
        f"{formula}\n{_REDUCE_INPUTS}Quantisation: none.\nTypes: {types} from level 3.\n{_DEVIATIONS}{notes}"
        "Source: Reduce.cpp of the NN HAL."
    )


_EXTREMUM_NOTES = """\
Quantisation: the output has the scale and zero point of input 0.
Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_QUANT8_ASYMM from level 3; TENSOR_QUANT8_ASYMM_SIGNED from 4.
Stricter than the spec: constant axes out of range, and another scale or zero point of the output, are refused with the model.
Source: Reduce.cpp of the NN HAL.
"""

_ARG_NOTES = """\
Inputs:
    0: tensor.
    1: INT32 scalar: the axis, from -rank to rank - 1.
Outputs:
    0: TENSOR_INT32 without the axis; [1] for an input of rank 1. Of equal elements the first counts.
Quantisation: free; the order of quantised values is that of the real ones.
Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_INT32, TENSOR_QUANT8_ASYMM from level 3; TENSOR_QUANT8_ASYMM_SIGNED from 4.
Stricter than the spec: a constant axis out of range is refused with the model, an axis of no elements at the execution.
Source: ArgMinMax.cpp of the NN HAL.
"""

OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        OperationType.REDUCE_ALL,
        _validate_logical,
        _reduced_shape,
        _execute_all,
        _float_or_bool("output = logical and of the elements along the axes", "TENSOR_BOOL8"),
    ),
    OperationContract(
        OperationType.REDUCE_ANY,
        _validate_logical,
        _reduced_shape,
        _execute_any,
        _float_or_bool("output = logical or of the elements along the axes", "TENSOR_BOOL8"),
    ),
    OperationContract(
        OperationType.REDUCE_MAX,
        _validate_extremum,
        _reduced_shape,
        _execute_max,
        "output = largest element along the axes; of no elements, the type's least value\n"
        + _REDUCE_INPUTS
        + _EXTREMUM_NOTES,
    ),
    OperationContract(
        OperationType.REDUCE_MIN,
        _validate_extremum,
        _reduced_shape,
        _execute_min,
        "output = least element along the axes; of no elements, the type's largest value\n"
        + _REDUCE_INPUTS
        + _EXTREMUM_NOTES,
    ),
    OperationContract(
        OperationType.REDUCE_PROD,
        _validate_sum,
        _reduced_shape,
        _execute_prod,
        _float_or_bool(
            "output = product of the elements along the axes",
            "TENSOR_FLOAT32, TENSOR_FLOAT16",
            "A zero among the elements makes the product 0, even beside an infinity.\n",
        ),
    ),
    OperationContract(
        OperationType.REDUCE_SUM,
        _validate_sum,
        _reduced_shape,
        _execute_sum,
        _float_or_bool("output = sum of the elements along the axes", "TENSOR_FLOAT32, TENSOR_FLOAT16"),
    ),
    OperationContract(
        OperationType.MEAN,
        _validate_mean,
        _reduced_shape,
        _execute_mean,
        "output = sum of the elements along the axes / their number\n"
        + _AXES_INPUTS.format(keep="INT32 scalar: keep the reduced axes with extent 1 when positive")
        + """\
Quantisation: the sum less count * zero_point0 is multiplied by scale0 / (scale_out * count) with a 31-bit multiplier, rounded to
nearest; the output zero point and saturation follow.
Types: TENSOR_FLOAT32, TENSOR_QUANT8_ASYMM from level 2; TENSOR_FLOAT16 from 3; TENSOR_QUANT8_ASYMM_SIGNED from 4.
Looser than the spec: scale and zero point of the output may differ from the input's, as TensorFlow Lite's models need. Stricter:
constant axes out of range are refused with the model, a mean of no elements at the execution.
Source: SimpleMath.cpp of the NN HAL, which truncates the quotient where TensorFlow Lite's reference kernel rounds; we round.
""",
    ),
    OperationContract(
        OperationType.ARGMAX,
        _validate_arg,
        _arg_shape,
        _execute_argmax,
        "output = index of the largest element along the axis\n" + _ARG_NOTES,
    ),
    OperationContract(
        OperationType.ARGMIN,
        _validate_arg,
        _arg_shape,
        _execute_argmin,
        "output = index of the least element along the axis\n" + _ARG_NOTES,
    ),
)
