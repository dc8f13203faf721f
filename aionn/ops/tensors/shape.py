"""Operations on the shape of a tensor: another shape for the same elements, another order of axes, rank, fill.

Owns RESHAPE, SQUEEZE, EXPAND_DIMS, TRANSPOSE, RANK, REVERSE, FILL and CHANNEL_SHUFFLE. None of them computes with elements.

Invariants:
1. A quantised output has the scale and zero point of its input.
2. Results may be views of the input: neither is written.

Source: the operations' validators and CPU operations of the NN HAL, one file of the same name each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from aionn.hal import (
    OPERAND_TYPE_PROPERTIES,
    OperandType,
    OperationType,
    dimensions_are_known,
    operand_dtype,
)
from aionn.ops.numerics.axes import axes_of, axis_of, bounded_shape, known_rank, require_axes
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape

__all__ = ["OPERATIONS"]

T = OperandType
_QUANT8_TYPES = (T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED)


def _validate_moved(check: Check, levels: Mapping[OperandType, int]) -> OperandType:
    """The common part of operations that only move elements: type and quantisation of input 0 and output 0."""
    found = check.input_type(0, levels)
    check.output_types(found)
    if found in _QUANT8_TYPES:
        check.same_quantization("output 0", check.inputs[0], check.outputs[0])
    return found


def _list_of(call: Call, index: int) -> list[int]:
    array = call.array(index)
    if array.ndim != 1:
        call.refuse(f"input {index}: expected a list of rank 1, got shape {list(array.shape)}")
    return call.numbers(index)


def _validate_reshape(check: Check) -> None:
    check.counts(2)
    _validate_moved(
        check,
        {
            T.TENSOR_FLOAT32: 1,
            T.TENSOR_QUANT8_ASYMM: 1,
            T.TENSOR_FLOAT16: 3,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
            T.TENSOR_INT32: 6,
        },
    )
    check.input_types(T.TENSOR_INT32, start=1)
    check.input_rank_at_most(0, 4)
    target = check.constant(1)
    if target is not None:
        extents = target.reshape(-1).tolist()
        check.require(
            min(extents) >= -1 and extents.count(-1) <= 1,
            "input 1",
            "extents, at most one of them -1",
            extents,
        )
        shape = check.inputs[0].dimensions
        if dimensions_are_known(check.inputs[0].type, shape):
            known = math.prod(extent for extent in extents if extent != -1)
            if -1 in extents:
                fits = known > 0 and math.prod(shape) % known == 0
            else:
                fits = known == math.prod(shape)
            check.require(fits, "input 1", f"extents for the elements of shape {list(shape)}", extents)


def _reshaped(call: Call) -> list[Shape]:
    shape = call.tensor(0).shape
    # The spec's kernel takes the list's elements in whatever shape they come.
    target = call.numbers(1)
    if any(extent < -1 for extent in target) or target.count(-1) > 1:
        call.refuse(f"input 1: expected extents, at most one of them -1, got {target}")
    count = math.prod(shape)
    if -1 in target:
        known = math.prod(extent for extent in target if extent != -1)
        if known == 0 or count % known:
            call.refuse(f"input 1: expected extents that {count} elements fill, got {target}")
        target[target.index(-1)] = count // known
    if math.prod(target) != count:
        call.refuse(f"input 1: expected extents of {count} elements, got {target}")
    return [bounded_shape(call, "input 1", tuple(target))]


def _execute_reshape(call: Call) -> list[Array]:
    return [call.array(0).reshape(_reshaped(call)[0])]


def _validate_squeeze(check: Check) -> None:
    check.needs(2)
    check.counts(2)
    _validate_moved(
        check,
        {
            T.TENSOR_FLOAT32: 2,
            T.TENSOR_QUANT8_ASYMM: 2,
            T.TENSOR_FLOAT16: 3,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
        },
    )
    check.input_types(T.TENSOR_INT32, start=1)
    check.input_rank_at_most(0, 4)
    if not check.is_omitted(1):
        check.input_rank(1, 1)
        require_axes(check, 1, known_rank(check.inputs[0]))


def _squeezed(call: Call) -> list[Shape]:
    shape = call.tensor(0).shape
    if call.has(1):
        axes = axes_of(call, 1, len(shape))
        for axis in axes:
            if shape[axis] != 1:
                call.refuse(f"input 1: expected axes of extent 1, got axis {axis} of shape {list(shape)}")
    else:
        axes = tuple(axis for axis, extent in enumerate(shape) if extent == 1)
    return [tuple(extent for axis, extent in enumerate(shape) if axis not in axes) or (1,)]


def _execute_squeeze(call: Call) -> list[Array]:
    return [call.array(0).reshape(_squeezed(call)[0])]


def _validate_expand_dims(check: Check) -> None:
    check.needs(3)
    check.counts(2)
    _validate_moved(
        check,
        {
            T.TENSOR_FLOAT32: 3,
            T.TENSOR_FLOAT16: 3,
            T.TENSOR_INT32: 3,
            T.TENSOR_QUANT8_ASYMM: 3,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
        },
    )
    check.input_types(T.INT32, start=1)
    rank = known_rank(check.inputs[0])
    require_axes(check, 1, None if rank is None else rank + 1)


def _expanded(call: Call) -> list[Shape]:
    shape = call.tensor(0).shape
    axis = axis_of(call, 1, len(shape) + 1)
    return [(*shape[:axis], 1, *shape[axis:])]


def _execute_expand_dims(call: Call) -> list[Array]:
    return [call.array(0).reshape(_expanded(call)[0])]


def _validate_transpose(check: Check) -> None:
    check.needs(2)
    check.counts(2)
    _validate_moved(
        check,
        {
            T.TENSOR_FLOAT32: 2,
            T.TENSOR_QUANT8_ASYMM: 2,
            T.TENSOR_FLOAT16: 3,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
        },
    )
    check.input_types(T.TENSOR_INT32, start=1)
    check.input_rank_at_most(0, 4)
    rank = known_rank(check.inputs[0])
    if check.is_omitted(1):
        check.input_rank(0, 2)
        return
    check.input_rank(1, 1)
    order = check.constant(1)
    if order is not None and rank is not None:
        axes = order.reshape(-1).tolist()
        check.require(sorted(axes) == list(range(rank)), "input 1", f"a permutation of {rank} axes", axes)


def _order(call: Call) -> tuple[int, ...]:
    rank = call.array(0).ndim
    if not call.has(1):
        if rank != 2:
            call.refuse(f"input 0: expected rank 2 where no order is given, got rank {rank}")
        return (1, 0)
    order = _list_of(call, 1)
    if sorted(order) != list(range(rank)):
        call.refuse(f"input 1: expected a permutation of {rank} axes, got {order}")
    return tuple(order)


def _transposed(call: Call) -> list[Shape]:
    shape = call.tensor(0).shape
    return [tuple(shape[axis] for axis in _order(call))]


def _execute_transpose(call: Call) -> list[Array]:
    return [np.asarray(call.array(0).transpose(_order(call)), order="C")]


def _validate_rank(check: Check) -> None:
    check.needs(4)
    check.counts(1)
    check.input_type(
        0,
        [
            t
            for t, properties in OPERAND_TYPE_PROPERTIES.items()
            if not properties.is_scalar and t != T.TENSOR_OEM_BYTE
        ],
    )
    check.output_types(T.INT32)


def _rank_shape(call: Call) -> list[Shape]:
    return [()]


def _execute_rank(call: Call) -> list[Array]:
    return [np.array(call.array(0).ndim, dtype=np.int32)]


def _validate_reverse(check: Check) -> None:
    check.needs(7)
    check.counts(2)
    _validate_moved(
        check,
        {
            T.TENSOR_FLOAT32: 7,
            T.TENSOR_FLOAT16: 7,
            T.TENSOR_QUANT8_ASYMM: 7,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 7,
            T.TENSOR_INT32: 7,
        },
    )
    check.input_types(T.TENSOR_INT32, start=1)
    check.input_rank(1, 1)
    check.extent("input 1", check.inputs[1], 0, 1)
    check.input_rank_at_most(0, 8)
    rank = known_rank(check.inputs[0])
    if rank is None:
        return
    check.output_rank(0, rank)
    axis = check.constant(1)
    if axis is not None:
        value = int(axis.reshape(()))
        check.require(0 <= value < rank, "input 1", f"an axis from 0 to {rank - 1}", value)


def _reverse_axis(call: Call) -> int:
    rank = call.array(0).ndim
    if not 1 <= rank <= 8:
        call.refuse(f"input 0: expected rank 1 to 8, got {rank}")
    axes = _list_of(call, 1)
    if len(axes) != 1 or not 0 <= axes[0] < rank:
        call.refuse(f"input 1: expected one axis from 0 to {rank - 1}, got {axes}")
    return axes[0]


def _reversed(call: Call) -> list[Shape]:
    _reverse_axis(call)
    return [call.tensor(0).shape]


def _execute_reverse(call: Call) -> list[Array]:
    return [np.asarray(np.flip(call.array(0), _reverse_axis(call)), order="C")]


_FILL_SCALARS = {
    T.TENSOR_FLOAT32: T.FLOAT32,
    T.TENSOR_FLOAT16: T.FLOAT16,
    T.TENSOR_INT32: T.INT32,
}


def _validate_fill(check: Check) -> None:
    check.needs(4)
    check.counts(2)
    found = check.output_type(0, tuple(_FILL_SCALARS))
    check.input_types(T.TENSOR_INT32, _FILL_SCALARS[found])
    check.input_rank(0, 1)
    extents = check.constant(0)
    if extents is not None:
        values = extents.reshape(-1).tolist()
        check.require(min(values) >= 0, "input 0", "extents of 0 or more", values)


def _filled(call: Call) -> list[Shape]:
    return [bounded_shape(call, "input 0", tuple(_list_of(call, 0)))]


def _execute_fill(call: Call) -> list[Array]:
    return [np.full(_filled(call)[0], call.scalar(1), dtype=operand_dtype(call.outputs[0].type))]


def _validate_channel_shuffle(check: Check) -> None:
    check.needs(3)
    check.counts(3)
    _validate_moved(
        check,
        {
            T.TENSOR_FLOAT32: 3,
            T.TENSOR_FLOAT16: 3,
            T.TENSOR_QUANT8_ASYMM: 3,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
        },
    )
    check.input_types(T.INT32, T.INT32, start=1)
    check.input_rank_at_most(0, 4)
    dimensions = check.inputs[0].dimensions
    require_axes(check, 2, known_rank(check.inputs[0]))
    groups, axis = check.constant(1), check.constant(2)
    if groups is not None:
        count = int(groups.reshape(()))
        check.require(count > 0, "input 1", "a positive number of groups", count)
        if axis is not None and dimensions:
            extent = dimensions[int(axis.reshape(()))]
            check.require(extent % count == 0, "input 1", f"groups that divide {extent} channels", count)


def _groups_and_axis(call: Call) -> tuple[int, int]:
    shape = call.tensor(0).shape
    axis = axis_of(call, 2, len(shape))
    groups = call.scalar(1)
    if groups <= 0 or shape[axis] % groups:
        call.refuse(f"input 1: expected groups that divide {shape[axis]} channels, got {groups}")
    return groups, axis


def _shuffled(call: Call) -> list[Shape]:
    _groups_and_axis(call)
    return [call.tensor(0).shape]


def _execute_channel_shuffle(call: Call) -> list[Array]:
    groups, axis = _groups_and_axis(call)
    array = call.array(0)
    shape = array.shape
    # Channel [group, member] moves to [member, group].
    split = array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
    return [np.swapaxes(split, axis, axis + 1).reshape(shape)]


_SAME_QUANTISATION = "Quantisation: the output has the scale and zero point of the input.\n"
_TYPES_FROM_2 = """Types: TENSOR_FLOAT32, TENSOR_QUANT8_ASYMM from level 2; TENSOR_FLOAT16 from 3;
TENSOR_QUANT8_ASYMM_SIGNED from 4.
"""
_STRICTER = (
    "Stricter than the spec: constant arguments that are illegal, and another quantisation of the output, are refused with the\n"
    "model and not at the execution.\n"
)

OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        OperationType.RESHAPE,
        _validate_reshape,
        _reshaped,
        _execute_reshape,
        """output = the elements of input0 in the same order, in another shape
Inputs:
    0: tensor of rank at most 4.
    1: TENSOR_INT32: the extents of the output, of as many elements; one may be -1 and then takes what remains.
Outputs:
    0: tensor of the same type.
"""
        + _SAME_QUANTISATION
        + """Types: TENSOR_FLOAT32, TENSOR_QUANT8_ASYMM from level 1; TENSOR_FLOAT16 from 3; TENSOR_QUANT8_ASYMM_SIGNED from 4;
TENSOR_INT32 from 6.
"""
        + _STRICTER
        + "Source: Reshape.cpp and reshapePrepare of the NN HAL.",
    ),
    OperationContract(
        OperationType.SQUEEZE,
        _validate_squeeze,
        _squeezed,
        _execute_squeeze,
        """output = input0 without axes of extent 1
Inputs:
    0: tensor of rank at most 4.
    1: TENSOR_INT32 of rank 1: the axes to remove, from -rank to rank - 1, each of extent 1. Left out: all of extent 1.
Outputs:
    0: tensor of the same type; [1] where all axes go.
"""
        + _SAME_QUANTISATION
        + _TYPES_FROM_2
        + _STRICTER
        + "Source: Squeeze.cpp of the NN HAL.",
    ),
    OperationContract(
        OperationType.EXPAND_DIMS,
        _validate_expand_dims,
        _expanded,
        _execute_expand_dims,
        """output = input0 with one more axis, of extent 1
Inputs:
    0: tensor of rank n.
    1: INT32 scalar: place of the axis in the output, from -(n + 1) to n.
Outputs:
    0: tensor of the same type and of rank n + 1.
"""
        + _SAME_QUANTISATION
        + """Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_INT32, TENSOR_QUANT8_ASYMM from level 3;
TENSOR_QUANT8_ASYMM_SIGNED from 4.
"""
        + _STRICTER
        + "Source: ExpandDims.cpp of the NN HAL.",
    ),
    OperationContract(
        OperationType.TRANSPOSE,
        _validate_transpose,
        _transposed,
        _execute_transpose,
        """output[i] = input0 with its axes in another order: axis k of the output is axis input1[k] of the input
Inputs:
    0: tensor of rank at most 4.
    1: TENSOR_INT32 of rank 1: a permutation of the axes. Left out: input 0 is a matrix, and rows become columns.
Outputs:
    0: tensor of the same type.
"""
        + _SAME_QUANTISATION
        + _TYPES_FROM_2
        + """Stricter than the spec, which checks the range of each axis: a list that names an axis twice is refused. Constant
arguments that are illegal, and another quantisation of the output, are refused with the model.
Source: Transpose.cpp of the NN HAL.""",
    ),
    OperationContract(
        OperationType.RANK,
        _validate_rank,
        _rank_shape,
        _execute_rank,
        """output = number of axes of input0
Inputs:
    0: tensor.
Outputs:
    0: INT32 scalar.
Quantisation: none.
Types: every tensor type but TENSOR_OEM_BYTE, from level 4.
Source: Rank.cpp of the NN HAL.""",
    ),
    OperationContract(
        OperationType.REVERSE,
        _validate_reverse,
        _reversed,
        _execute_reverse,
        """output = input0 with the elements along one axis in reverse order
Inputs:
    0: tensor of rank 1 to 8.
    1: TENSOR_INT32 [1]: the axis, from 0 to rank - 1.
Outputs:
    0: tensor of the same type and shape.
"""
        + _SAME_QUANTISATION
        + """Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_INT32, TENSOR_QUANT8_ASYMM, TENSOR_QUANT8_ASYMM_SIGNED from level 7.
"""
        + _STRICTER
        + "Source: Reverse.cpp of the NN HAL.",
    ),
    OperationContract(
        OperationType.FILL,
        _validate_fill,
        _filled,
        _execute_fill,
        """output = input1 everywhere
Inputs:
    0: TENSOR_INT32 of rank 1: the extents of the output, 0 or more.
    1: scalar of the output's element type: FLOAT32, FLOAT16 or INT32.
Outputs:
    0: tensor.
Quantisation: none.
Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_INT32 from level 4, by the output.
Stricter than the spec: negative extents are refused, constant ones with the model.
Source: Fill.cpp of the NN HAL.""",
    ),
    OperationContract(
        OperationType.CHANNEL_SHUFFLE,
        _validate_channel_shuffle,
        _shuffled,
        _execute_channel_shuffle,
        """output[.., member * groups + group, ..] = input0[.., group * (channels / groups) + member, ..]
Inputs:
    0: tensor of rank at most 4.
    1: INT32 scalar: the number of groups, which divides the number of channels.
    2: INT32 scalar: the axis of the channels, from -rank to rank - 1.
Outputs:
    0: tensor of the same type and shape.
"""
        + _SAME_QUANTISATION
        + """Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_QUANT8_ASYMM from level 3; TENSOR_QUANT8_ASYMM_SIGNED from 4.
"""
        + _STRICTER
        + "Source: ChannelShuffle.cpp of the NN HAL.",
    ),
)
