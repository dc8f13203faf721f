"""Tensors made larger at their edges, by a value or by mirroring.

Owns PAD, PAD_V2 and MIRROR_PAD. The implicit padding of windows is in ``geometry``.

Invariants:
1. Elements are moved and not changed; a quantised output has the scale and zero point of its input.
2. No padding is negative: nothing is cropped.

Source: ``Reshape`` and ``MirrorPad`` of the NN HAL's validators and CPU operations; ``padPrepare``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aionn.hal import OperandType, OperationType
from aionn.ops.numerics.axes import bounded_shape, known_rank
from aionn.ops.numerics.fixed_point import quantized_range
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, scalar_type_for

__all__ = ["OPERATIONS"]

T = OperandType
_QUANT8_TYPES = (T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED)
_REFLECT, _SYMMETRIC = 0, 1


def _validate_padded(check: Check, level: int, levels: Mapping[OperandType, int], count: int) -> OperandType:
    check.needs(level)
    check.counts(count)
    found = check.input_type(0, levels)
    check.input_types(T.TENSOR_INT32, start=1)
    check.output_types(found)
    if found in _QUANT8_TYPES:
        check.same_quantization("output 0", check.inputs[0], check.outputs[0])
    check.input_rank(1, 2)
    check.extent("input 1", check.inputs[1], 1, 2)
    rank = known_rank(check.inputs[0])
    if rank is not None:
        check.extent("input 1", check.inputs[1], 0, rank)
        check.output_rank(0, rank)
    paddings = check.constant(1)
    if paddings is not None:
        check.require(bool(np.all(paddings >= 0)), "input 1", "no negative padding", paddings.tolist())
    return found


def _paddings(call: Call) -> list[tuple[int, int]]:
    """Before and after each axis."""
    rank, array = call.array(0).ndim, call.array(1)
    if array.shape != (rank, 2):
        call.refuse(f"input 1: expected shape {[rank, 2]}, got {list(array.shape)}")
    pairs = [(int(before), int(after)) for before, after in array]
    if any(before < 0 or after < 0 for before, after in pairs):
        call.refuse(f"input 1: expected no negative padding, got {array.tolist()}")
    return pairs


def _padded(call: Call) -> list[Shape]:
    shape = tuple(
        before + extent + after
        for extent, (before, after) in zip(call.tensor(0).shape, _paddings(call), strict=True)
    )
    return [bounded_shape(call, "input 1", shape)]


def _pad(call: Call, value: float) -> list[Array]:
    array = call.array(0)
    (shape,) = _padded(call)
    output = np.full(shape, value, dtype=array.dtype)
    output[
        tuple(
            slice(before, before + extent)
            for extent, (before, _) in zip(array.shape, _paddings(call), strict=True)
        )
    ] = array
    return [output]


def _validate_pad(check: Check) -> None:
    found = _validate_padded(
        check,
        2,
        {
            T.TENSOR_FLOAT32: 2,
            T.TENSOR_QUANT8_ASYMM: 2,
            T.TENSOR_FLOAT16: 3,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
        },
        2,
    )
    check.input_rank_at_most(0, 4)
    if found == T.TENSOR_QUANT8_ASYMM and check.inputs[0].zero_point != 0:
        check.needs(3)


def _execute_pad(call: Call) -> list[Array]:
    return _pad(call, call.outputs[0].zero_point)


def _validate_pad_v2(check: Check) -> None:
    found = _validate_padded(
        check,
        3,
        {
            T.TENSOR_FLOAT32: 3,
            T.TENSOR_FLOAT16: 3,
            T.TENSOR_QUANT8_ASYMM: 3,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
        },
        3,
    )
    check.input_types(T.INT32 if found in _QUANT8_TYPES else scalar_type_for(found), start=2)
    check.input_rank_at_most(0, 4)
    value = check.constant(2)
    if value is not None and found in _QUANT8_TYPES:
        low, high = quantized_range(found)
        got = int(value.reshape(()))
        check.require(low <= got <= high, "input 2", f"a value from {low} to {high}", got)


def _execute_pad_v2(call: Call) -> list[Array]:
    value, kind = call.scalar(2), call.tensor(0).type
    if kind in _QUANT8_TYPES:
        low, high = quantized_range(kind)
        if not low <= value <= high:
            call.refuse(f"input 2: expected a value from {low} to {high}, got {value}")
    return _pad(call, value)


def _validate_mirror_pad(check: Check) -> None:
    _validate_padded(
        check,
        7,
        {
            T.TENSOR_FLOAT32: 7,
            T.TENSOR_FLOAT16: 7,
            T.TENSOR_QUANT8_ASYMM: 7,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 7,
            T.TENSOR_INT32: 7,
        },
        3,
    )
    check.input_types(T.INT32, start=2)
    mode = check.constant(2)
    if mode is not None:
        value = int(mode.reshape(()))
        check.require(value in (_REFLECT, _SYMMETRIC), "input 2", "mode 0 (REFLECT) or 1 (SYMMETRIC)", value)


def _mirrored(call: Call) -> list[Shape]:
    mode = call.scalar(2)
    if mode not in (_REFLECT, _SYMMETRIC):
        call.refuse(f"input 2: expected mode 0 (REFLECT) or 1 (SYMMETRIC), got {mode}")
    shape = call.tensor(0).shape
    if not shape:
        call.refuse("input 0: expected a rank of 1 or more, got 0")
    for axis, (extent, pair) in enumerate(zip(shape, _paddings(call), strict=True)):
        padding_max = extent - 1 if mode == _REFLECT else extent
        if max(pair) > padding_max:
            call.refuse(f"input 1: expected at most {padding_max} on axis {axis}, got {list(pair)}")
    return _padded(call)


def _execute_mirror_pad(call: Call) -> list[Array]:
    _mirrored(call)
    array = call.array(0)
    for axis, (before, after) in enumerate(_paddings(call)):
        extent = array.shape[axis]
        indexes = np.arange(-before, extent + after)
        # Reflection leaves the edge out, so the mirror is at the middle of the edge and not behind it.
        edge = 0 if call.scalar(2) == _REFLECT else 1
        indexes = np.where(indexes < 0, -indexes - edge, indexes)
        indexes = np.where(indexes >= extent, 2 * (extent - 1) + edge - indexes, indexes)
        array = np.take(array, indexes, axis=axis)
    return [array]


_INPUTS = """\
Inputs:
    0: tensor{rank}.
    1: TENSOR_INT32 [rank, 2]: how many elements go before and after each axis, 0 or more.
"""
_OUTPUTS = """\
Outputs:
    0: tensor of the same type and rank.
Quantisation: the output has the scale and zero point of the input.
"""
_STRICTER = """Stricter than the spec: constant arguments that are illegal, and another quantisation of the output, are
refused with the model and not at the execution.
"""

OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        OperationType.PAD,
        _validate_pad,
        _padded,
        _execute_pad,
        "output = input0 amid zeros (quantised: amid zero points)\n"
        + _INPUTS.format(rank=" of rank at most 4")
        + _OUTPUTS
        + """Types: TENSOR_FLOAT32 from level 2; TENSOR_QUANT8_ASYMM from 2 where the zero point is 0, else from 3;
TENSOR_FLOAT16 from 3; TENSOR_QUANT8_ASYMM_SIGNED from 4.
"""
        + _STRICTER
        + "Source: Reshape.cpp of the NN HAL.",
    ),
    OperationContract(
        OperationType.PAD_V2,
        _validate_pad_v2,
        _padded,
        _execute_pad_v2,
        "output = input0 amid elements of value input2\n"
        + _INPUTS.format(rank=" of rank at most 4")
        + """    2: scalar: FLOAT32 or FLOAT16 as the tensor; for quantised tensors INT32, the quantised value.
"""
        + _OUTPUTS
        + """Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_QUANT8_ASYMM from level 3; TENSOR_QUANT8_ASYMM_SIGNED from 4.
"""
        + _STRICTER
        + """Stricter too: a quantised value that the type cannot hold is refused, where the spec's kernel takes its low byte.
Source: Reshape.cpp of the NN HAL.""",
    ),
    OperationContract(
        OperationType.MIRROR_PAD,
        _validate_mirror_pad,
        _mirrored,
        _execute_mirror_pad,
        "output = input0 continued by its mirror image, axis by axis\n"
        + _INPUTS.format(rank=" of rank 1 or more")
        + """    2: INT32 scalar: mode. 0, REFLECT, mirrors at the last element and does not repeat it: paddings are less than the
       extent. 1, SYMMETRIC, mirrors behind the last element: paddings are at most the extent.
"""
        + _OUTPUTS
        + """Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_INT32, TENSOR_QUANT8_ASYMM, TENSOR_QUANT8_ASYMM_SIGNED from level 7.
"""
        + _STRICTER
        + "Source: MirrorPad.cpp of the NN HAL.",
    ),
)
