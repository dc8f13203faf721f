"""Resizing images: RESIZE_BILINEAR and RESIZE_NEAREST_NEIGHBOR.

Owns the two operations' contracts, shape rule and kernels. A kernel first maps each output row and column to source rows and
columns (one small vector an axis), then gathers whole images in one step.

Invariants:
1. The source coordinate of an output index depends on that axis alone, so an image is never walked pixel by pixel.
2. Sizes and coordinates are computed in float32 as the spec's kernels do: floor and round of them decide which pixel is read.

Source: ``ResizeImageOps`` of the NN HAL's CPU operations; ``ResizeBilinear`` of TensorFlow Lite's reference kernels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aionn.hal import OperandType, OperationType
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, float_result

__all__ = ["OPERATIONS"]

_INPUT_LEVELS = {
    OperandType.TENSOR_FLOAT32: 1,
    OperandType.TENSOR_FLOAT16: 3,
    OperandType.TENSOR_QUANT8_ASYMM: 3,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: 4,
}
_QUANTIZED = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
_FRACTION_BITS = 10
_ONE = 1 << _FRACTION_BITS
Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]


def _validate(check: Check, *, counts: tuple[int, ...]) -> None:
    check.counts(counts)
    tensor_type = check.input_type(0, _INPUT_LEVELS)
    check.input_rank(0, 4)
    for index in range(1, len(check.inputs)):
        check.require(not check.is_omitted(index), f"input {index}", "a value", "an operand that is left out")
    ratio = OperandType.FLOAT16 if tensor_type == OperandType.TENSOR_FLOAT16 else OperandType.FLOAT32
    size_type = check.input_type(1, {OperandType.INT32: 1, ratio: 3})
    check.input_types(size_type, OperandType.BOOL, OperandType.BOOL, OperandType.BOOL, start=2)
    # Sizes and scale factors must be positive; where they are constant this is known now.
    for index in (1, 2):
        size = check.constant(index)
        if size is not None:
            check.require(float(size) > 0, f"input {index}", "a positive number", float(size))
    if len(check.inputs) > 3:
        check.needs(3)
    if len(check.inputs) > 4:
        check.needs(4)
    if len(check.inputs) > 5:
        align, half = check.constant(4), check.constant(5)
        if align is not None and half is not None:
            both = bool(align) and bool(half)
            check.require(not both, "inputs 4 and 5", "at most one of them true", "both true")
    check.output_types(tensor_type)
    check.output_rank(0, 4)
    if tensor_type in _QUANTIZED:
        check.same_quantization("output 0", check.inputs[0], check.outputs[0])


def _validate_bilinear(check: Check) -> None:
    _validate(check, counts=(3, 4, 5, 6))


def _validate_nearest(check: Check) -> None:
    # The operation is of level 3, where the layout argument is not optional.
    check.needs(3)
    _validate(check, counts=(4, 5, 6))


def _flag(call: Call, index: int) -> bool:
    return call.has(index) and bool(call.scalar(index))


def _output_extent(call: Call, index: int, input_extent: int) -> int:
    """The output height or width that input ``index`` asks for: a size, or a factor on the input's extent."""
    tensor = call.tensor(index)
    if tensor.type == OperandType.INT32:
        extent = int(call.scalar(index))
    else:
        product = np.float32(input_extent) * np.float32(call.scalar(index))
        if not np.isfinite(product):
            call.refuse(f"input {index}: expected a finite scale factor, got {call.scalar(index)}")
        extent = int(np.floor(product))
    if extent <= 0:
        call.refuse(f"input {index}: expected an output extent of at least 1, got {extent}")
    return extent


def _shapes(call: Call) -> list[Shape]:
    shape = call.tensor(0).shape
    if len(shape) != 4:
        call.refuse(f"input 0: expected rank 4, got shape {list(shape)}")
    if _flag(call, 4) and _flag(call, 5):
        call.refuse("inputs 4 and 5: expected at most one of them true, got both")
    is_nchw = _flag(call, 3)
    batches, height, width, depth = _as_nhwc(shape, is_nchw)
    if min(height, width, depth) == 0:
        call.refuse(f"input 0: expected no extent of 0 but the batch, got shape {list(shape)}")
    out_width = _output_extent(call, 1, width)
    out_height = _output_extent(call, 2, height)
    return [(batches, depth, out_height, out_width) if is_nchw else (batches, out_height, out_width, depth)]


def _as_nhwc(shape: Shape, is_nchw: bool) -> Shape:
    return (shape[0], shape[2], shape[3], shape[1]) if is_nchw else shape


def _scale(in_extent: int, out_extent: int, align_corners: bool) -> np.float32:
    """Number of input pixels that one output pixel covers; with aligned corners the outer pixels' centres coincide."""
    if align_corners and out_extent > 1:
        return np.float32(in_extent - 1) / np.float32(out_extent - 1)
    return np.float32(in_extent) / np.float32(out_extent)


def _nearest_indexes(in_extent: int, out_extent: int, align_corners: bool, half_pixel: bool) -> Int64Array:
    """The source index of each output index on one axis."""
    position = np.arange(out_extent, dtype=np.float32)
    if half_pixel:
        position += np.float32(0.5)
    position = position * _scale(in_extent, out_extent, align_corners)
    # C's roundf for numbers that are not negative: half goes up. The addition is exact in float64.
    source = np.floor(position.astype(np.float64) + 0.5) if align_corners else np.floor(position)
    return np.clip(source.astype(np.int64), 0, in_extent - 1)


def _float_corners(
    in_extent: int, out_extent: int, align_corners: bool, half_pixel: bool
) -> tuple[Int64Array, Int64Array, Float32Array]:
    """The two source indexes of each output index on one axis, and the weight of the second."""
    position = np.arange(out_extent, dtype=np.float32)
    scale = _scale(in_extent, out_extent, align_corners)
    if half_pixel:
        source = (position + np.float32(0.5)) * scale - np.float32(0.5)
    else:
        source = position * scale
    # Rounding of the scale may carry the last coordinate past the last pixel.
    lower = np.clip(np.floor(source).astype(np.int64), 0, in_extent - 1)
    upper = np.clip(np.ceil(source).astype(np.int64), 0, in_extent - 1)
    return lower, upper, (source - lower.astype(np.float32)).astype(np.float32)


def _fixed_corners(
    in_extent: int, out_extent: int, align_corners: bool, half_pixel: bool
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """As ``_float_corners`` with coordinates and weights in units of 1/1024."""
    if align_corners and out_extent > 1:
        scale = (_ONE * (in_extent - 1) + (out_extent - 1) // 2) // (out_extent - 1)
    else:
        scale = (_ONE * in_extent + out_extent // 2) // out_extent
    source = np.arange(out_extent, dtype=np.int64) * scale
    if half_pixel:
        source = source + scale // 2 - _ONE // 2
    lower = np.clip(source // _ONE, 0, in_extent - 1)
    upper = np.clip((source + _ONE - 1) // _ONE, 0, in_extent - 1)
    return lower, upper, source - lower * _ONE


def _corner_images(
    image: Array, rows: tuple[Int64Array, Int64Array], columns: tuple[Int64Array, Int64Array]
) -> tuple[Array, Array, Array, Array]:
    """The input gathered at (lower, lower), (upper, lower), (lower, upper), (upper, upper) row and column."""
    low, high = image[:, rows[0]], image[:, rows[1]]
    return low[:, :, columns[0]], high[:, :, columns[0]], low[:, :, columns[1]], high[:, :, columns[1]]


def _bilinear(call: Call, image: Array, height: int, width: int) -> Array:
    align, half = _flag(call, 4), _flag(call, 5)
    in_height, in_width = image.shape[1:3]
    operand_type = call.tensor(0).type
    if operand_type == OperandType.TENSOR_QUANT8_ASYMM_SIGNED:
        top, bottom, fixed_y = _fixed_corners(in_height, height, align, half)
        left, right, fixed_x = _fixed_corners(in_width, width, align, half)
        dy, dx = fixed_y[:, None, None], fixed_x[:, None]
        a, b, c, d = _corner_images(image.astype(np.int64), (top, bottom), (left, right))
        total = a * (_ONE - dy) * (_ONE - dx) + b * dy * (_ONE - dx) + c * (_ONE - dy) * dx + d * dy * dx
        # Half away from zero: C's division truncates, so round the magnitude.
        magnitude = (np.abs(total) + (1 << (2 * _FRACTION_BITS - 1))) >> (2 * _FRACTION_BITS)
        signed: Array = np.where(total < 0, -magnitude, magnitude).astype(np.int8)
        return signed
    top, bottom, float_y = _float_corners(in_height, height, align, half)
    left, right, float_x = _float_corners(in_width, width, align, half)
    y, x = float_y[:, None, None], float_x[:, None]
    a, b, c, d = _corner_images(image.astype(np.float32, copy=False), (top, bottom), (left, right))
    # The order of these products and sums is that of the spec: a uint8 result is truncated.
    result: Array = a * (1 - y) * (1 - x) + b * y * (1 - x) + c * (1 - y) * x + d * y * x
    if operand_type == OperandType.TENSOR_QUANT8_ASYMM:
        return np.asarray(result, dtype=np.uint8)
    return float_result(result, call.outputs[0])


def _nearest(call: Call, image: Array, height: int, width: int) -> Array:
    align, half = _flag(call, 4), _flag(call, 5)
    rows = _nearest_indexes(image.shape[1], height, align, half)
    columns = _nearest_indexes(image.shape[2], width, align, half)
    return image[:, rows][:, :, columns]


def _execute(call: Call, *, bilinear: bool) -> list[Array]:
    is_nchw = _flag(call, 3)
    (shape,) = _shapes(call)
    _, height, width, _ = _as_nhwc(shape, is_nchw)
    image = call.array(0).transpose(0, 2, 3, 1) if is_nchw else call.array(0)
    result = _bilinear(call, image, height, width) if bilinear else _nearest(call, image, height, width)
    return [np.ascontiguousarray(result.transpose(0, 3, 1, 2)) if is_nchw else result]


def _execute_bilinear(call: Call) -> list[Array]:
    return _execute(call, bilinear=True)


def _execute_nearest(call: Call) -> list[Array]:
    return _execute(call, bilinear=False)


OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        type=OperationType.RESIZE_BILINEAR,
        validate=_validate_bilinear,
        shapes=_shapes,
        execute=_execute_bilinear,
        doc="""Resizes images by bilinear interpolation.

        Formula: source = index * scale, or (index + 0.5) * scale - 0.5 with half-pixel centres; scale = in / out, or
            (in - 1) / (out - 1) with aligned corners and out > 1. The result is the mean of the four pixels around the source
            weighted by their closeness, the coordinates clamped to the image.
        Inputs: 0: tensor [batches, height, width, depth], or [batches, depth, height, width]; only batches may be 0.
            1: scalar output width: INT32 size, or FLOAT32 (FLOAT16 for a float16 tensor) factor, floor(width * factor).
            2: scalar output height, same type. 3: optional BOOL, NCHW layout. 4: optional BOOL, align corners.
            5: optional BOOL, half-pixel centres; not together with 4.
        Outputs: 0: tensor of input 0's type and layout.
        Quantisation: output as input 0. Signed values: scale and weights in units of 1/1024, result rounded half away from zero.
            Unsigned values: weights in float32, result truncated. The two differ in the spec's kernels: the rounding of the scale
            adds up from pixel to pixel, to an eighth of a pixel from 33 to 257.
        Types: TENSOR_FLOAT32 from level 1; TENSOR_FLOAT16, TENSOR_QUANT8_ASYMM from 3; TENSOR_QUANT8_ASYMM_SIGNED from 4.
            Factors and input 3 from level 3, inputs 4 and 5 from level 4.
        Stricter: a known wrong rank, an output of another quantisation and illegal constants are refused with the model, not
            at the execution.
        Source: NN HAL ResizeImageOps; TensorFlow Lite reference ResizeBilinear.""",
    ),
    OperationContract(
        type=OperationType.RESIZE_NEAREST_NEIGHBOR,
        validate=_validate_nearest,
        shapes=_shapes,
        execute=_execute_nearest,
        doc="""Resizes images by taking the nearest pixel.

        Formula: source = floor(index * scale), or floor((index + 0.5) * scale) with half-pixel centres; with aligned corners
            round (half up) instead of floor; scale as in RESIZE_BILINEAR; clamped to the image.
        Inputs: as RESIZE_BILINEAR, input 3 not optional.
        Outputs: 0: tensor of input 0's type and layout.
        Quantisation: output as input 0.
        Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_QUANT8_ASYMM from level 3; TENSOR_QUANT8_ASYMM_SIGNED and inputs 4 and 5
            from level 4.
        Stricter: as RESIZE_BILINEAR.
        Source: NN HAL ResizeImageOps.""",
    ),
)
