"""Functions of one operand, element by element.

Owns ABS, EXP, FLOOR, LOG, NEG, RSQRT, SIN and SQRT. Activations have a family of their own.

Invariants:
1. float16 is computed in float32 and rounded once.
2. Outside of a function's domain the result is that of IEEE 754: NaN, or an infinity of the right sign.

Source: ``Elementwise`` and ``Neg`` of the NN HAL's validators and CPU operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from aionn.hal import OperandType, OperationType
from aionn.ops.numerics.fixed_point import dequantize, quantize
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, float_result

__all__ = ["OPERATIONS"]

T = OperandType
_FLOAT_LEVELS = {T.TENSOR_FLOAT32: 3, T.TENSOR_FLOAT16: 3}


def _validate(check: Check, level: int, levels: Mapping[OperandType, int]) -> None:
    check.needs(level)
    check.counts(1)
    check.output_types(check.input_type(0, levels))


def _same_shape(call: Call) -> list[Shape]:
    return [call.tensor(0).shape]


def _on_float(call: Call, function: Callable[[Array], Array]) -> list[Array]:
    array = call.array(0).astype(np.float32, copy=False)
    return [float_result(function(array), call.outputs[0])]


def _validate_float(check: Check) -> None:
    _validate(check, 3, _FLOAT_LEVELS)


def _validate_abs(check: Check) -> None:
    _validate(check, 3, {**_FLOAT_LEVELS, T.TENSOR_INT32: 4})


def _execute_abs(call: Call) -> list[Array]:
    return [np.asarray(np.abs(call.array(0)))]


def _execute_exp(call: Call) -> list[Array]:
    return _on_float(call, np.exp)


def _validate_floor(check: Check) -> None:
    _validate(check, 1, {T.TENSOR_FLOAT32: 1, T.TENSOR_FLOAT16: 3})
    check.input_rank_at_most(0, 4)


def _execute_floor(call: Call) -> list[Array]:
    return [np.asarray(np.floor(call.array(0)))]


def _execute_log(call: Call) -> list[Array]:
    return _on_float(call, np.log)


def _validate_neg(check: Check) -> None:
    _validate(check, 3, {**_FLOAT_LEVELS, T.TENSOR_INT32: 3})


def _execute_neg(call: Call) -> list[Array]:
    return [np.asarray(np.negative(call.array(0)))]


def _validate_rsqrt(check: Check) -> None:
    _validate(check, 3, {**_FLOAT_LEVELS, T.TENSOR_QUANT8_ASYMM: 7, T.TENSOR_QUANT8_ASYMM_SIGNED: 7})


def _reciprocal_root(array: Array) -> Array:
    return np.float32(1) / np.sqrt(array)


def _execute_rsqrt(call: Call) -> list[Array]:
    source, output = call.tensor(0), call.outputs[0]
    if source.type in _FLOAT_LEVELS:
        return _on_float(call, _reciprocal_root)

    def table() -> Array:
        values = np.arange(256, dtype=np.uint8).view(source.array.dtype)
        roots = _reciprocal_root(dequantize(values, source.operand))
        # The root of a negative number has no quantised value; the spec's kernel gives the largest one.
        return quantize(np.where(np.isnan(roots), np.float32(np.inf), roots), output)

    return [call.kept("table", (), table)[source.array.view(np.uint8)]]


def _execute_sin(call: Call) -> list[Array]:
    return _on_float(call, np.sin)


def _execute_sqrt(call: Call) -> list[Array]:
    return _on_float(call, np.sqrt)


_IN_AND_OUT = """\
Inputs:
    0: tensor{rank}.
Outputs:
    0: tensor of the same type and shape.
"""
_FLOAT_DOC = (
    _IN_AND_OUT.format(rank="")
    + """Quantisation: none.
Types: TENSOR_FLOAT32, TENSOR_FLOAT16 from level 3.
As strict as the spec.
Source: Elementwise.cpp of the NN HAL.
"""
)

OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        OperationType.ABS,
        _validate_abs,
        _same_shape,
        _execute_abs,
        "output = |input0|\n"
        + _IN_AND_OUT.format(rank="")
        + """Quantisation: none.
Types: TENSOR_FLOAT32, TENSOR_FLOAT16 from level 3; TENSOR_INT32 from 4, where -2**31 stays what it is.
As strict as the spec.
Source: Elementwise.cpp of the NN HAL.
""",
    ),
    OperationContract(
        OperationType.EXP, _validate_float, _same_shape, _execute_exp, "output = e ** input0\n" + _FLOAT_DOC
    ),
    OperationContract(
        OperationType.FLOOR,
        _validate_floor,
        _same_shape,
        _execute_floor,
        "output = the largest integer that is not above input0\n"
        + _IN_AND_OUT.format(rank=" of rank at most 4")
        + """Quantisation: none.
Types: TENSOR_FLOAT32 from level 1, TENSOR_FLOAT16 from 3.
As strict as the spec.
Source: Elementwise.cpp of the NN HAL.
""",
    ),
    OperationContract(
        OperationType.LOG,
        _validate_float,
        _same_shape,
        _execute_log,
        "output = natural logarithm of input0; -infinity for 0, NaN for negative numbers\n" + _FLOAT_DOC,
    ),
    OperationContract(
        OperationType.NEG,
        _validate_neg,
        _same_shape,
        _execute_neg,
        "output = -input0\n"
        + _IN_AND_OUT.format(rank="")
        + """Quantisation: none.
Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_INT32 (-2**31 stays what it is) from level 3.
As strict as the spec.
Source: Neg.cpp of the NN HAL.
""",
    ),
    OperationContract(
        OperationType.RSQRT,
        _validate_rsqrt,
        _same_shape,
        _execute_rsqrt,
        "output = 1 / sqrt(input0); infinity for 0, NaN for negative numbers\n"
        + _IN_AND_OUT.format(rank="")
        + """Quantisation: scales and zero points are free. The dequantised value's reciprocal root is quantised; infinity and
NaN give the largest value.
Types: TENSOR_FLOAT32, TENSOR_FLOAT16 from level 3; TENSOR_QUANT8_ASYMM, TENSOR_QUANT8_ASYMM_SIGNED from 7.
As strict as the spec.
Source: Elementwise.cpp of the NN HAL.
""",
    ),
    OperationContract(
        OperationType.SIN, _validate_float, _same_shape, _execute_sin, "output = sin(input0)\n" + _FLOAT_DOC
    ),
    OperationContract(
        OperationType.SQRT,
        _validate_float,
        _same_shape,
        _execute_sqrt,
        "output = sqrt(input0); NaN for negative numbers\n" + _FLOAT_DOC,
    ),
)
