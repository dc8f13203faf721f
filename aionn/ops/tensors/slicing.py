"""Parts of a tensor, and tensors joined or repeated.

Owns SLICE, STRIDED_SLICE, SPLIT, CONCATENATION, PACK and TILE.

Invariants:
1. Elements are moved and not changed; only CONCATENATION requantises, where an input's quantisation is not the output's.
2. Results may be views of the input: neither is written.

Source: the operations' validators and CPU operations of the NN HAL, one file of the same name each.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from aionn.hal import Operand, OperandType, OperationType, combine_dimensions, operand_dtype
from aionn.ops.numerics.axes import axis_of, bounded_shape, known_rank, require_axes
from aionn.ops.numerics.fixed_point import quantized_range
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape

__all__ = ["OPERATIONS"]

T = OperandType
_QUANT8_TYPES = (T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED)
_LEVELS_FROM_3 = {
    T.TENSOR_FLOAT32: 3,
    T.TENSOR_FLOAT16: 3,
    T.TENSOR_INT32: 3,
    T.TENSOR_QUANT8_ASYMM: 3,
    T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
}


def _validate_part(check: Check, level: int, levels: Mapping[OperandType, int]) -> OperandType:
    """Type of input 0 and of every output, which keep its quantisation."""
    check.needs(level)
    found = check.input_type(0, levels)
    check.output_types(*(found for _ in check.outputs))
    if found in _QUANT8_TYPES:
        for index, output in enumerate(check.outputs):
            check.same_quantization(f"output {index}", check.inputs[0], output)
    return found


def _per_axis(call: Call, index: int) -> list[int]:
    """A list with one number for each axis of input 0."""
    rank, array = call.array(0).ndim, call.array(index)
    if array.shape != (rank,):
        call.refuse(
            f"input {index}: expected one number for each of {rank} axes, got shape {list(array.shape)}"
        )
    return [int(value) for value in array]


def _require_per_axis(check: Check, index: int) -> None:
    check.input_rank(index, 1)
    rank = known_rank(check.inputs[0])
    if rank is not None:
        check.extent(f"input {index}", check.inputs[index], 0, rank)


def _validate_slice(check: Check) -> None:
    check.counts(3)
    _validate_part(check, 3, _LEVELS_FROM_3)
    check.input_types(T.TENSOR_INT32, T.TENSOR_INT32, start=1)
    _require_per_axis(check, 1)
    _require_per_axis(check, 2)
    begins, sizes = check.constant(1), check.constant(2)
    if begins is not None:
        check.require(bool(np.all(begins >= 0)), "input 1", "no negative begin", begins.tolist())
    if sizes is not None:
        check.require(bool(np.all(sizes >= -1)), "input 2", "sizes of -1 or more", sizes.tolist())


def _slice_ranges(call: Call) -> list[tuple[int, int]]:
    """First index and size along each axis."""
    ranges = []
    shape = call.tensor(0).shape
    if not shape:
        call.refuse("input 0: expected a rank of 1 or more, got 0")
    for axis, (extent, begin, size) in enumerate(
        zip(shape, _per_axis(call, 1), _per_axis(call, 2), strict=True)
    ):
        count = extent - begin if size == -1 else size
        if begin < 0 or count < 0 or begin + count > extent:
            call.refuse(
                f"inputs 1 and 2: expected a part of the {extent} elements along axis {axis}, "
                f"got begin {begin}, size {size}"
            )
        ranges.append((begin, count))
    return ranges


def _sliced(call: Call) -> list[Shape]:
    return [tuple(count for _, count in _slice_ranges(call))]


def _execute_slice(call: Call) -> list[Array]:
    return [call.array(0)[tuple(slice(begin, begin + count) for begin, count in _slice_ranges(call))]]


def _validate_strided_slice(check: Check) -> None:
    check.counts(7)
    _validate_part(
        check,
        2,
        {
            T.TENSOR_FLOAT32: 2,
            T.TENSOR_QUANT8_ASYMM: 2,
            T.TENSOR_FLOAT16: 3,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
        },
    )
    check.input_types(*[T.TENSOR_INT32] * 3, *[T.INT32] * 3, start=1)
    check.input_rank_at_most(0, 4)
    for index in (1, 2, 3):
        _require_per_axis(check, index)
    strides = check.constant(3)
    if strides is not None:
        check.require(bool(np.all(strides != 0)), "input 3", "no stride of 0", strides.tolist())


def _strided_ranges(call: Call) -> list[tuple[range, bool]]:
    """The indexes taken along each axis, and whether the axis goes."""
    begins, ends, strides = (_per_axis(call, index) for index in (1, 2, 3))
    begin_mask, end_mask, shrink_mask = (call.scalar(index) for index in (4, 5, 6))
    ranges = []
    for axis, extent in enumerate(call.tensor(0).shape):
        bit, stride = 1 << axis, strides[axis]
        if stride == 0:
            call.refuse(f"input 3: expected no stride of 0, got {strides}")
        # A bound counts from the end when negative and is clamped to the axis, as in Python's slices; a masked one is open.
        begin = None if begin_mask & bit else begins[axis]
        end = None if end_mask & bit else ends[axis]
        shrinks = bool(shrink_mask & bit)
        if shrinks and begin is not None and end == begin + 1 == 0:
            end = None  # From -1 to 0 is the last element, where 0 would count from the front.
        indexes = range(*slice(begin, end, stride).indices(extent))
        if shrinks and (stride < 0 or len(indexes) != 1):
            call.refuse(
                f"input 6: expected one element with a positive stride on the removed axis {axis}, "
                f"got {len(indexes)} with stride {stride}"
            )
        ranges.append((indexes, shrinks))
    return ranges


def _strided(call: Call) -> list[Shape]:
    return [tuple(len(indexes) for indexes, shrinks in _strided_ranges(call) if not shrinks) or (1,)]


def _execute_strided_slice(call: Call) -> list[Array]:
    parts = []
    for indexes, _ in _strided_ranges(call):
        # The stop of a range that runs down to the first element is -1, which a slice would count from the end.
        stop = None if indexes.stop < 0 else indexes.stop
        parts.append(slice(indexes.start, stop, indexes.step) if indexes else slice(0, 0))
    return [call.array(0)[tuple(parts)].reshape(_strided(call)[0])]


def _validate_split(check: Check) -> None:
    check.needs(3)
    check.require(len(check.inputs) == 3, "number of inputs", 3, len(check.inputs))
    check.require(len(check.outputs) >= 1, "number of outputs", "at least 1", 0)
    _validate_part(check, 3, _LEVELS_FROM_3)
    check.input_types(T.INT32, T.INT32, start=1)
    require_axes(check, 1, known_rank(check.inputs[0]))
    count = check.constant(2)
    if count is not None:
        check.require(int(count.reshape(())) == len(check.outputs), "input 2", len(check.outputs), int(count))


def _split_axis(call: Call) -> int:
    shape, count = call.tensor(0).shape, call.scalar(2)
    axis = axis_of(call, 1, len(shape))
    if count != len(call.outputs):
        call.refuse(f"input 2: expected the number of outputs, {len(call.outputs)}, got {count}")
    if shape[axis] % count:
        call.refuse(f"input 2: expected a divisor of the extent {shape[axis]} on axis {axis}, got {count}")
    return axis


def _split(call: Call) -> list[Shape]:
    shape, axis, count = call.tensor(0).shape, _split_axis(call), len(call.outputs)
    return [(*shape[:axis], shape[axis] // count, *shape[axis + 1 :])] * count


def _execute_split(call: Call) -> list[Array]:
    return list(np.split(call.array(0), len(call.outputs), axis=_split_axis(call)))


def _validate_concatenation(check: Check) -> None:
    check.counts_at_least(2, 1)
    check.require(len(check.outputs) == 1, "number of outputs", 1, len(check.outputs))
    tensors, output = check.inputs[:-1], check.outputs[0]
    found = check.input_type(
        0,
        {
            T.TENSOR_FLOAT32: 1,
            T.TENSOR_QUANT8_ASYMM: 1,
            T.TENSOR_FLOAT16: 3,
            T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
        },
    )
    check.input_types(*(found for _ in tensors), T.INT32)
    check.output_types(found)
    if found == T.TENSOR_QUANT8_ASYMM and any(
        t.scale != output.scale or t.zero_point != output.zero_point for t in tensors
    ):
        check.needs(3)
    axis = check.constant(len(tensors))
    joined = None if axis is None else int(axis.reshape(()))
    shape: Shape = ()
    for index, tensor in enumerate(tensors):
        check.input_rank_at_most(index, 4)
        got = tensor.dimensions
        if joined is not None and got:
            check.require(
                0 <= joined < len(got), f"input {len(tensors)}", f"an axis from 0 to {len(got) - 1}", joined
            )
            got = (*got[:joined], 0, *got[joined + 1 :])
            combined = combine_dimensions(shape, got)
            if combined is None:
                check.refuse(
                    f"input {index}", f"shape {list(shape)} but for axis {joined}", list(tensor.dimensions)
                )
            shape = combined


def _joined(call: Call) -> list[Shape]:
    last = len(call.inputs) - 1
    first = call.tensor(0).shape
    axis = call.scalar(last)
    if not 0 <= axis < len(first):
        call.refuse(f"input {last}: expected an axis from 0 to {len(first) - 1}, got {axis}")
    total = 0
    for index in range(last):
        shape = call.tensor(index).shape
        if len(shape) != len(first) or shape[:axis] + shape[axis + 1 :] != first[:axis] + first[axis + 1 :]:
            call.refuse(f"input {index}: expected shape {list(first)} but for axis {axis}, got {list(shape)}")
        total += shape[axis]
    return [(*first[:axis], total, *first[axis + 1 :])]


def _requantization_table(source: Operand, output: Operand) -> Array:
    """All 256 values of an input in the output's quantisation: scale and bias in float32, rounded half away from zero."""
    # In unsigned values, where the kernel rescales; zero points move along.
    low, high = quantized_range(output.type)
    scale = np.float32(source.scale) * (np.float32(1) / np.float32(output.scale))
    bias = np.float32(low - source.zero_point) * scale
    real = np.arange(256, dtype=np.float32) * scale + bias
    # Half an ulp below 0.5 the sum with 0.5 would round up in float32, so the rounding is in float64.
    rounded = np.copysign(np.floor(np.abs(real.astype(np.float64)) + 0.5), real) + output.zero_point
    table: Array = np.clip(rounded, low, high).astype(operand_dtype(output.type))
    return table


def _execute_concatenation(call: Call) -> list[Array]:
    (shape,) = _joined(call)
    output = call.outputs[0]
    arrays = []
    for index in range(len(call.inputs) - 1):
        tensor = call.tensor(index)
        array = tensor.array
        if tensor.type in _QUANT8_TYPES and (
            tensor.scale != output.scale or tensor.zero_point != output.zero_point
        ):
            source = tensor.operand
            table = call.kept(f"input {index}", (), partial(_requantization_table, source, output))
            offset = quantized_range(source.type)[0]
            array = table[array.astype(np.int16) - offset]
        arrays.append(array)
    return [np.concatenate(arrays, axis=call.scalar(len(call.inputs) - 1)).reshape(shape)]


def _validate_pack(check: Check) -> None:
    check.needs(6)
    check.counts_at_least(2, 1)
    check.require(len(check.outputs) == 1, "number of outputs", 1, len(check.outputs))
    check.input_types(T.INT32)
    found = check.output_type(0, (T.TENSOR_FLOAT32, T.TENSOR_FLOAT16, T.TENSOR_INT32, *_QUANT8_TYPES))
    output = check.outputs[0]
    rank = len(output.dimensions) - 1 if output.dimensions else None
    shape: Shape = ()
    for index, tensor in enumerate(check.inputs[1:], 1):
        check.input_type(index, (found,))
        if found in _QUANT8_TYPES:
            check.same_quantization(f"input {index}", output, tensor)
        if tensor.dimensions and rank is not None:
            check.input_rank(index, rank)
        combined = combine_dimensions(shape, tensor.dimensions)
        if combined is None:
            check.refuse(f"input {index}", f"shape {list(shape)}", f"shape {list(tensor.dimensions)}")
        shape = combined
    axis = check.constant(0)
    if axis is not None and shape:
        value = int(axis.reshape(()))
        check.require(0 <= value <= len(shape), "input 0", f"an axis from 0 to {len(shape)}", value)


def _packed(call: Call) -> list[Shape]:
    axis, first = call.scalar(0), call.tensor(1).shape
    if not 0 <= axis <= len(first):
        call.refuse(f"input 0: expected an axis from 0 to {len(first)}, got {axis}")
    for index in range(2, len(call.inputs)):
        shape = call.tensor(index).shape
        if shape != first:
            call.refuse(f"input {index}: expected the shape {list(first)} of input 1, got {list(shape)}")
    return [(*first[:axis], len(call.inputs) - 1, *first[axis:])]


def _execute_pack(call: Call) -> list[Array]:
    arrays = [call.array(index) for index in range(1, len(call.inputs))]
    return [np.stack(arrays, axis=call.scalar(0))]


def _validate_tile(check: Check) -> None:
    check.counts(2)
    _validate_part(check, 3, _LEVELS_FROM_3)
    check.input_types(T.TENSOR_INT32, start=1)
    _require_per_axis(check, 1)
    multiples = check.constant(1)
    if multiples is not None:
        check.require(bool(np.all(multiples >= 0)), "input 1", "no negative multiple", multiples.tolist())


def _tiled(call: Call) -> list[Shape]:
    multiples = _per_axis(call, 1)
    if any(multiple < 0 for multiple in multiples):
        call.refuse(f"input 1: expected multiples of 0 or more, got {multiples}")
    shape = tuple(extent * m for extent, m in zip(call.tensor(0).shape, multiples, strict=True))
    return [bounded_shape(call, "input 1", shape)]


def _execute_tile(call: Call) -> list[Array]:
    _tiled(call)
    return [np.tile(call.array(0), _per_axis(call, 1))]


_SAME_QUANTISATION = "Quantisation: outputs have the scale and zero point of the input.\n"
_TYPES_FROM_3 = """Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_INT32, TENSOR_QUANT8_ASYMM from level 3;
TENSOR_QUANT8_ASYMM_SIGNED from 4.
"""
_STRICTER = """Stricter than the spec: constant arguments that are illegal, and another quantisation of an output, are refused
with the model and not at the execution.
"""

OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        OperationType.SLICE,
        _validate_slice,
        _sliced,
        _execute_slice,
        """output[i, j, ..] = input0[i + input1[0], j + input1[1], ..]
Inputs:
    0: tensor of rank 1 or more.
    1: TENSOR_INT32 [rank]: the first index along each axis, 0 or more.
    2: TENSOR_INT32 [rank]: the size along each axis; -1 reaches to the end.
Outputs:
    0: tensor of the same type and of the given sizes, which may be 0.
"""
        + _SAME_QUANTISATION
        + _TYPES_FROM_3
        + _STRICTER
        + "Source: Slice.cpp of the NN HAL.",
    ),
    OperationContract(
        OperationType.STRIDED_SLICE,
        _validate_strided_slice,
        _strided,
        _execute_strided_slice,
        """output[i, ..] = input0[input1[0] + i * input3[0], ..]
Inputs:
    0: tensor of rank at most 4.
    1: TENSOR_INT32 [rank]: begin along each axis; negative ones count from the end; clamped to the axis.
    2: TENSOR_INT32 [rank]: end along each axis, excluded; as input 1.
    3: TENSOR_INT32 [rank]: stride along each axis, not 0.
    4: INT32 scalar: begin mask: a set bit opens the begin of the axis of its number.
    5: INT32 scalar: end mask, likewise.
    6: INT32 scalar: shrink mask: the axis goes; its stride is positive and it has one element.
Outputs:
    0: tensor of the same type; [1] where all axes go.
"""
        + _SAME_QUANTISATION
        + """Types: TENSOR_FLOAT32, TENSOR_QUANT8_ASYMM from level 2; TENSOR_FLOAT16 from 3;
TENSOR_QUANT8_ASYMM_SIGNED from 4.
"""
        + _STRICTER
        + """Looser: on a removed axis, begin -1 with end 0 is the last element, as TensorFlow Lite's models write it.
Source: StridedSlice.cpp of the NN HAL.""",
    ),
    OperationContract(
        OperationType.SPLIT,
        _validate_split,
        _split,
        _execute_split,
        """outputs = input0 cut into equal parts along an axis
Inputs:
    0: tensor.
    1: INT32 scalar: the axis, from -rank to rank - 1.
    2: INT32 scalar: the number of outputs, which divides the extent of the axis.
Outputs:
    0 and on: tensors of the same type.
"""
        + _SAME_QUANTISATION
        + _TYPES_FROM_3
        + _STRICTER
        + "Source: Split.cpp of the NN HAL.",
    ),
    OperationContract(
        OperationType.CONCATENATION,
        _validate_concatenation,
        _joined,
        _execute_concatenation,
        """output = the inputs one after another along an axis
Inputs:
    0 to n - 2: tensors of one type, of the same rank of at most 4 and the same shape but for the axis; extents of 0 are legal.
    n - 1: INT32 scalar: the axis, from 0 to rank - 1.
Outputs:
    0: tensor of the same type.
Quantisation: scales and zero points are free from level 3; values are rescaled to the output's in float32, with
scale_in * (1 / scale_out), rounded half away from zero and saturated.
Types: TENSOR_FLOAT32 from level 1; TENSOR_QUANT8_ASYMM from 1, from 3 where an input's quantisation is not the output's;
TENSOR_FLOAT16 from 3; TENSOR_QUANT8_ASYMM_SIGNED from 4.
Stricter than the spec: a constant axis out of range, and shapes known not to fit, are refused with the model.
Source: Concatenation.cpp of the NN HAL.""",
    ),
    OperationContract(
        OperationType.PACK,
        _validate_pack,
        _packed,
        _execute_pack,
        """output = the inputs beside each other along a new axis
Inputs:
    0: INT32 scalar: the place of the new axis in the output, from 0 to the inputs' rank.
    1 and on: tensors of one type and shape.
Outputs:
    0: tensor of the same type, of one more axis, whose extent is the number of tensors.
Quantisation: all inputs and the output have the same scale and zero point.
Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_INT32, TENSOR_QUANT8_ASYMM, TENSOR_QUANT8_ASYMM_SIGNED from level 6.
Stricter than the spec: a constant axis out of range, and shapes known to differ, are refused with the model.
Source: Pack.cpp of the NN HAL.""",
    ),
    OperationContract(
        OperationType.TILE,
        _validate_tile,
        _tiled,
        _execute_tile,
        """output[i, ..] = input0[i % shape[0], ..], for i below shape[0] * input1[0]
Inputs:
    0: tensor.
    1: TENSOR_INT32 [rank]: number of repetitions of the tensor along each axis, 0 or more.
Outputs:
    0: tensor of the same type.
"""
        + _SAME_QUANTISATION
        + _TYPES_FROM_3
        + _STRICTER
        + "Source: Tile.cpp of the NN HAL.",
    ),
)
