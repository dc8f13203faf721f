"""Changes of element type: QUANTIZE, DEQUANTIZE, CAST.

Owns which types go into which. The arithmetic of quantisation is in ``fixed_point``.

Source: ``Quantize.cpp``, ``Dequantize.cpp``, ``Cast.cpp`` of the NN HAL's CPU operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aionn.hal import OperandType, OperationType, operand_dtype
from aionn.ops.numerics.fixed_point import dequantize, quantize
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, float_result

__all__ = ["OPERATIONS"]

_FLOATS = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)


def _same_shape(call: Call) -> Sequence[Shape]:
    return [call.array(0).shape]


def _validate_quantize(check: Check) -> None:
    check.counts(1)
    check.needs(3)
    check.input_type(0, _FLOATS)
    check.output_type(0, (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED))


def _quantize(call: Call) -> Sequence[Array]:
    return [quantize(call.array(0), call.outputs[0])]


_DEQUANTIZE_LEVELS = {
    OperandType.TENSOR_QUANT8_ASYMM: 1,
    OperandType.TENSOR_QUANT8_SYMM: 3,
    OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL: 3,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: 4,
}


def _validate_dequantize(check: Check) -> None:
    check.counts(1)
    check.input_type(0, _DEQUANTIZE_LEVELS)
    check.output_type(0, {OperandType.TENSOR_FLOAT32: 1, OperandType.TENSOR_FLOAT16: 3})
    check.input_rank_at_most(0, 4)


def _dequantize(call: Call) -> Sequence[Array]:
    data = call.tensor(0)
    if data.array.ndim > 4:
        call.refuse(f"input 0: expected rank of at most 4, got shape {list(data.shape)}")
    return [float_result(dequantize(data.array, data.operand), call.outputs[0])]


_CAST_LEVELS = {
    OperandType.TENSOR_FLOAT16: 3,
    OperandType.TENSOR_FLOAT32: 3,
    OperandType.TENSOR_INT32: 3,
    OperandType.TENSOR_QUANT8_ASYMM: 3,
}
_IDENTITY_LEVELS = {
    OperandType.TENSOR_BOOL8: 4,
    OperandType.TENSOR_QUANT16_ASYMM: 4,
    OperandType.TENSOR_QUANT16_SYMM: 4,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: 4,
    OperandType.TENSOR_QUANT8_SYMM: 4,
}


def _validate_cast(check: Check) -> None:
    check.counts(1)
    data_type = check.input_type(0, _CAST_LEVELS | _IDENTITY_LEVELS)
    check.output_type(0, _CAST_LEVELS if data_type in _CAST_LEVELS else (data_type,))
    given, result = check.inputs[0].dimensions, check.outputs[0].dimensions
    if given and result and 0 not in result:
        matches = len(given) == len(result) and all(a in (0, b) for a, b in zip(given, result, strict=True))
        check.require(matches, "output 0", f"shape {list(given)}", list(result))


def _cast(call: Call) -> Sequence[Array]:
    values = call.array(0)
    dtype = operand_dtype(call.outputs[0].type)
    if values.dtype == dtype:
        return [values.copy()]
    if dtype.kind == "f":
        return [values.astype(dtype)]
    info = np.iinfo(dtype.name)
    # float64 holds every bound of the integer types; C's conversion truncates, out of range it is ours to saturate.
    wide = np.trunc(np.nan_to_num(values.astype(np.float64), posinf=np.inf, neginf=-np.inf))
    return [np.clip(wide, info.min, info.max).astype(dtype)]


OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        OperationType.QUANTIZE,
        _validate_quantize,
        _same_shape,
        _quantize,
        """
out = round(in / scale) + zero point, clipped to the type's range; scale and zero point are those of the output, halves are rounded
away from zero.

Inputs: 0 a tensor of any rank, float32 or float16 (computed in float32).
Output: quant8 asymm or, from level 4, quant8 asymm signed, of the input's shape. Level 3.
A NaN becomes the largest value, as in AOSP; the spec does not define it.
Source: Quantize.cpp of the NN HAL.
""",
    ),
    OperationContract(
        OperationType.DEQUANTIZE,
        _validate_dequantize,
        _same_shape,
        _dequantize,
        """
out = (in - zero point) * scale; the scale is that of the channel for a per-channel input.

Inputs: 0 a tensor of rank 1 to 4: quant8 asymm; from level 3 quant8 symm and quant8 symm per channel; from level 4 quant8 asymm
signed.
Output: float32 or, from level 3, float16 (rounded once), of the input's shape.
Source: Dequantize.cpp of the NN HAL.
""",
    ),
    OperationContract(
        OperationType.CAST,
        _validate_cast,
        _same_shape,
        _cast,
        """
out = in, converted to the output's element type. Scale and zero point are not looked at.

Inputs: 0 a tensor of any rank: float16, float32, int32, quant8 asymm (level 3) become any of these; from level 4 bool8, quant16
asymm, quant16 symm, quant8 asymm signed and quant8 symm become themselves.
Output: of the input's shape.
Floats are truncated towards zero; values that do not fit saturate, a NaN becomes 0 (the spec leaves both open).
Source: Cast.cpp of the NN HAL.
""",
    ),
)
