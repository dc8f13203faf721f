"""Blocks of an image moved between its rows and columns on one side and its depth or batch on the other.

Owns BATCH_TO_SPACE_ND, SPACE_TO_BATCH_ND, DEPTH_TO_SPACE and SPACE_TO_DEPTH.

Invariants:
1. Images are [batch, height, width, depth], or [batch, depth, height, width] with a layout flag.
2. Elements are moved and not changed; a quantised output has the scale and zero point of its input.
3. Each pair undoes the other, save for paddings.

Source: ``Reshape`` of the NN HAL's validators, ``depthToSpacePrepare`` and its like.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aionn.hal import OperandType, OperationType
from aionn.ops.numerics.axes import bounded_shape
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape

__all__ = ["OPERATIONS"]

T = OperandType
_QUANT8_TYPES = (T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED)


def _validate_image(
    check: Check, level: int, levels: Mapping[OperandType, int], arguments: tuple[OperandType, ...]
) -> OperandType:
    """An image, its arguments and an optional layout flag."""
    check.needs(level)
    plain = 1 + len(arguments)
    check.counts((plain, plain + 1))
    found = check.input_type(0, levels)
    check.input_types(*arguments, T.BOOL, start=1)
    if len(check.inputs) > plain:
        check.needs(3)
    check.output_types(found)
    if found in _QUANT8_TYPES:
        check.same_quantization("output 0", check.inputs[0], check.outputs[0])
    check.input_rank(0, 4)
    check.output_rank(0, 4)
    return found


def _levels(level: int) -> dict[OperandType, int]:
    return {
        T.TENSOR_FLOAT32: level,
        T.TENSOR_QUANT8_ASYMM: level,
        T.TENSOR_FLOAT16: 3,
        T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
    }


def _is_nchw(call: Call, index: int) -> bool:
    return len(call.inputs) > index and bool(call.scalar(index))


def _image(call: Call, layout_index: int) -> Array:
    """Input 0 as [batch, height, width, depth]."""
    array = call.array(0)
    if array.ndim != 4:
        call.refuse(f"input 0: expected rank 4, got shape {list(array.shape)}")
    return np.moveaxis(array, 1, 3) if _is_nchw(call, layout_index) else array


def _shape_of(call: Call, layout_index: int, shape: Shape) -> list[Shape]:
    """The shape [batch, height, width, depth] in the call's layout."""
    batch, height, width, depth = bounded_shape(call, "input 1", shape)
    return [(batch, depth, height, width) if _is_nchw(call, layout_index) else shape]


def _result(call: Call, layout_index: int, image: Array) -> list[Array]:
    """An image [batch, height, width, depth] in the call's layout."""
    if _is_nchw(call, layout_index):
        image = np.moveaxis(image, 3, 1)
    return [np.asarray(image, order="C")]


def _validate_depth_block(check: Check) -> None:
    _validate_image(check, 1, _levels(1), (T.INT32,))
    block = check.constant(1)
    if block is not None:
        value = int(block.reshape(()))
        check.require(value > 0, "input 1", "a positive block size", value)


def _depth_block(call: Call) -> int:
    block: int = call.scalar(1)
    if block <= 0:
        call.refuse(f"input 1: expected a positive block size, got {block}")
    return block


def _depth_to_space_shape(call: Call) -> list[Shape]:
    batch, height, width, depth = _image(call, 2).shape
    block = _depth_block(call)
    if depth % (block * block):
        call.refuse(f"input 1: expected a block size whose square divides the depth {depth}, got {block}")
    return _shape_of(call, 2, (batch, height * block, width * block, depth // (block * block)))


def _execute_depth_to_space(call: Call) -> list[Array]:
    _depth_to_space_shape(call)
    image, block = _image(call, 2), _depth_block(call)
    batch, height, width, depth = image.shape
    rest = depth // (block * block)
    blocks = image.reshape(batch, height, width, block, block, rest).transpose(0, 1, 3, 2, 4, 5)
    return _result(call, 2, blocks.reshape(batch, height * block, width * block, rest))


def _space_to_depth_shape(call: Call) -> list[Shape]:
    batch, height, width, depth = _image(call, 2).shape
    block = _depth_block(call)
    if height % block or width % block:
        call.refuse(f"input 1: expected a block size that divides {height} x {width}, got {block}")
    return _shape_of(call, 2, (batch, height // block, width // block, depth * block * block))


def _execute_space_to_depth(call: Call) -> list[Array]:
    _space_to_depth_shape(call)
    image, block = _image(call, 2), _depth_block(call)
    batch, height, width, depth = image.shape
    rows, columns = height // block, width // block
    blocks = image.reshape(batch, rows, block, columns, block, depth).transpose(0, 1, 3, 2, 4, 5)
    return _result(call, 2, blocks.reshape(batch, rows, columns, depth * block * block))


def _require_block_list(check: Check) -> None:
    check.input_rank(1, 1)
    check.extent("input 1", check.inputs[1], 0, 2)
    blocks = check.constant(1)
    if blocks is not None:
        check.require(bool(np.all(blocks > 0)), "input 1", "positive block sizes", blocks.tolist())


def _block_list(call: Call) -> tuple[int, int]:
    array = call.array(1)
    if array.shape != (2,) or not np.all(array > 0):
        call.refuse(f"input 1: expected two positive block sizes, got {array.tolist()}")
    return int(array[0]), int(array[1])


def _validate_batch_to_space(check: Check) -> None:
    _validate_image(check, 2, _levels(2), (T.TENSOR_INT32,))
    _require_block_list(check)


def _batch_to_space_shape(call: Call) -> list[Shape]:
    batch, height, width, depth = _image(call, 2).shape
    rows, columns = _block_list(call)
    if batch % (rows * columns):
        call.refuse(f"input 1: expected blocks whose size divides the batch {batch}, got {[rows, columns]}")
    return _shape_of(call, 2, (batch // (rows * columns), height * rows, width * columns, depth))


def _execute_batch_to_space(call: Call) -> list[Array]:
    _batch_to_space_shape(call)
    image, (rows, columns) = _image(call, 2), _block_list(call)
    batch, height, width, depth = image.shape
    rest = batch // (rows * columns)
    # The batch counts blocks' rows first, then their columns, then images.
    blocks = image.reshape(rows, columns, rest, height, width, depth).transpose(2, 3, 0, 4, 1, 5)
    return _result(call, 2, blocks.reshape(rest, height * rows, width * columns, depth))


def _validate_space_to_batch(check: Check) -> None:
    found = _validate_image(check, 2, _levels(2), (T.TENSOR_INT32, T.TENSOR_INT32))
    if found == T.TENSOR_QUANT8_ASYMM and check.inputs[0].zero_point != 0:
        check.needs(3)
    _require_block_list(check)
    check.input_rank(2, 2)
    check.extent("input 2", check.inputs[2], 0, 2)
    check.extent("input 2", check.inputs[2], 1, 2)
    paddings = check.constant(2)
    if paddings is not None:
        check.require(bool(np.all(paddings >= 0)), "input 2", "no negative padding", paddings.tolist())


def _space_paddings(call: Call) -> tuple[int, int, int, int]:
    """Top, bottom, left and right."""
    array = call.array(2)
    if array.shape != (2, 2) or np.any(array < 0):
        call.refuse(f"input 2: expected paddings [2, 2] of 0 or more, got {array.tolist()}")
    top, bottom, left, right = (int(value) for value in array.reshape(-1))
    return top, bottom, left, right


def _space_to_batch_shape(call: Call) -> list[Shape]:
    batch, height, width, depth = _image(call, 3).shape
    rows, columns = _block_list(call)
    top, bottom, left, right = _space_paddings(call)
    height, width = top + height + bottom, left + width + right
    if height % rows or width % columns:
        call.refuse(
            f"input 1: expected blocks that divide the padded {height} x {width}, got {[rows, columns]}"
        )
    return _shape_of(call, 3, (batch * rows * columns, height // rows, width // columns, depth))


def _execute_space_to_batch(call: Call) -> list[Array]:
    _space_to_batch_shape(call)
    image, (rows, columns) = _image(call, 3), _block_list(call)
    top, bottom, left, right = _space_paddings(call)
    batch, height, width, depth = image.shape
    padded = np.full(
        (batch, top + height + bottom, left + width + right, depth),
        call.outputs[0].zero_point,
        dtype=image.dtype,
    )
    padded[:, top : top + height, left : left + width] = image
    down, across = padded.shape[1] // rows, padded.shape[2] // columns
    blocks = padded.reshape(batch, down, rows, across, columns, depth).transpose(2, 4, 0, 1, 3, 5)
    return _result(call, 3, blocks.reshape(rows * columns * batch, down, across, depth))


_IMAGE = "tensor [batch, height, width, depth], or [batch, depth, height, width] by the layout flag"
_LAYOUT = "BOOL scalar, may be left away: true for the layout [batch, depth, height, width]"
_QUANTISATION = "Quantisation: the output has the scale and zero point of the input.\n"
_STRICTER = """Stricter than the spec: constant arguments that are illegal, and another quantisation of the output, are
refused with the model and not at the execution.
"""
_TYPES = """Types: TENSOR_FLOAT32, TENSOR_QUANT8_ASYMM from level {level}{condition};
TENSOR_FLOAT16 and the layout flag from 3; TENSOR_QUANT8_ASYMM_SIGNED from 4.
"""

OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        OperationType.BATCH_TO_SPACE_ND,
        _validate_batch_to_space,
        _batch_to_space_shape,
        _execute_batch_to_space,
        f"""output[b, h * rows + i, w * columns + j, d] = input0[(i * columns + j) * batch_out + b, h, w, d]
Inputs:
    0: {_IMAGE}.
    1: TENSOR_INT32 [2]: rows and columns of a block, positive; their product divides the batch.
    2: {_LAYOUT}.
Outputs:
    0: tensor of the same type [batch / (rows * columns), height * rows, width * columns, depth].
"""
        + _QUANTISATION
        + _TYPES.format(level=2, condition="")
        + _STRICTER
        + "Source: Reshape.cpp of the NN HAL.",
    ),
    OperationContract(
        OperationType.SPACE_TO_BATCH_ND,
        _validate_space_to_batch,
        _space_to_batch_shape,
        _execute_space_to_batch,
        f"""output[(i * columns + j) * batch + b, h, w, d] = padded[b, h * rows + i, w * columns + j, d]
Inputs:
    0: {_IMAGE}.
    1: TENSOR_INT32 [2]: rows and columns of a block, positive; they divide the padded height and width.
    2: TENSOR_INT32 [2, 2]: padding before and after height, before and after width, with zeros (quantised: zero points).
    3: {_LAYOUT}.
Outputs:
    0: tensor of the same type [batch * rows * columns, height / rows, width / columns, depth], of the padded extents.
"""
        + _QUANTISATION
        + _TYPES.format(level=2, condition=" (from 3 where the zero point is not 0)")
        + _STRICTER
        + "Source: Reshape.cpp of the NN HAL.",
    ),
    OperationContract(
        OperationType.DEPTH_TO_SPACE,
        _validate_depth_block,
        _depth_to_space_shape,
        _execute_depth_to_space,
        f"""output[b, h * block + i, w * block + j, d] = input0[b, h, w, (i * block + j) * depth_out + d]
Inputs:
    0: {_IMAGE}.
    1: INT32 scalar: rows and columns of a block, positive; its square divides the depth.
    2: {_LAYOUT}.
Outputs:
    0: tensor of the same type [batch, height * block, width * block, depth / block**2].
"""
        + _QUANTISATION
        + _TYPES.format(level=1, condition="")
        + _STRICTER
        + "Source: Reshape.cpp of the NN HAL.",
    ),
    OperationContract(
        OperationType.SPACE_TO_DEPTH,
        _validate_depth_block,
        _space_to_depth_shape,
        _execute_space_to_depth,
        f"""output[b, h, w, (i * block + j) * depth + d] = input0[b, h * block + i, w * block + j, d]
Inputs:
    0: {_IMAGE}.
    1: INT32 scalar: rows and columns of a block, positive; it divides height and width.
    2: {_LAYOUT}.
Outputs:
    0: tensor of the same type [batch, height / block, width / block, depth * block**2].
"""
        + _QUANTISATION
        + _TYPES.format(level=1, condition="")
        + _STRICTER
        + "Source: Reshape.cpp of the NN HAL.",
    ),
)
