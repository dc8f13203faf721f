"""Regions of interest: ROI_ALIGN, ROI_POOLING and HEATMAP_MAX_KEYPOINT.

Owns the three operations' contracts, shape rules and kernels. The loop of a kernel is over regions, each with its own sampling
grid; pixels, channels and output bins of a region are handled as whole arrays.

Invariants:
1. Coordinates are float32 and computed in the order of the spec's kernels: floor, ceil and round of them choose pixels.
2. Every region is checked before anything is computed: batch in range, corners in order, inside of the image.

Source: ``RoiAlign``, ``RoiPooling`` and ``HeatmapMaxKeypoint`` of the NN HAL's CPU operations.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from aionn.hal import Operand, OperandType, OperationType, operand_dtype
from aionn.ops.images.boxes import (
    BOX_LENGTH,
    BOX_SCALE,
    QUANTIZED_TENSORS,
    SCORE_LEVELS,
    Float32Array,
    as_float32,
    boxes_type,
    from_float32,
    require_all,
    require_box_quantization,
    require_rank,
)
from aionn.ops.numerics.fixed_point import (
    dequantize,
    multiply_by_quantized_multiplier,
    quantize_multiplier,
    quantized_range,
    saturating_round_cast,
)
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, scalar_type_for

__all__ = ["OPERATIONS"]

Int64Array = npt.NDArray[np.int64]


def _require_constant_at_least(check: Check, index: int, least: int) -> None:
    value = check.constant(index)
    if value is not None:
        check.require(int(value) >= least, f"input {index}", f"at least {least}", int(value))


def _require_constant_positive(check: Check, index: int) -> None:
    value = check.constant(index)
    if value is not None:
        check.require(float(value) > 0, f"input {index}", "a positive number", float(value))


def _as_nhwc(shape: Shape, is_nchw: bool) -> Shape:
    return (shape[0], shape[2], shape[3], shape[1]) if is_nchw else shape


def _image(call: Call, is_nchw: bool) -> Array:
    """Input 0 as [batches, height, width, depth]."""
    return call.array(0).transpose(0, 2, 3, 1) if is_nchw else call.array(0)


def _require_extent(call: Call, index: int, axis: int, expected: int) -> None:
    shape = call.tensor(index).shape
    if shape[axis] != expected:
        call.refuse(f"input {index}: expected extent {expected} on axis {axis}, got shape {list(shape)}")


# --- ROI_ALIGN and ROI_POOLING


def _validate_pooling_arguments(check: Check, sampling: int) -> OperandType:
    """The common part of ROI_ALIGN and ROI_POOLING; ``sampling`` arguments are before the last."""
    check.needs(3)
    check.counts(8 + sampling)
    require_all(check)
    tensor_type = check.input_type(0, SCORE_LEVELS)
    scalar = scalar_type_for(tensor_type)
    check.input_types(
        boxes_type(tensor_type),
        OperandType.TENSOR_INT32,
        OperandType.INT32,
        OperandType.INT32,
        scalar,
        scalar,
        *[OperandType.INT32] * sampling,
        OperandType.BOOL,
        start=1,
    )
    check.output_types(tensor_type)
    check.input_rank(0, 4)
    check.input_rank(1, 2)
    check.extent("input 1", check.inputs[1], 1, BOX_LENGTH)
    check.input_rank(2, 1)
    check.output_rank(0, 4)
    require_box_quantization(check, "input 1", check.inputs[1])
    for index in (3, 4):
        _require_constant_at_least(check, index, 1)
    for index in (5, 6):
        _require_constant_positive(check, index)
    for index in range(7, 7 + sampling):
        _require_constant_at_least(check, index, 0)
    return tensor_type


def _validate_align(check: Check) -> None:
    _validate_pooling_arguments(check, sampling=2)


def _validate_pooling(check: Check) -> None:
    tensor_type = _validate_pooling_arguments(check, sampling=0)
    if tensor_type in QUANTIZED_TENSORS:
        check.same_quantization("output 0", check.inputs[0], check.outputs[0])


def _pooled_shapes(call: Call, layout_index: int) -> list[Shape]:
    is_nchw = bool(call.scalar(layout_index))
    shape = _as_nhwc(require_rank(call, 0, 4), is_nchw)
    if min(shape) == 0:
        call.refuse(f"input 0: expected no extent of 0, got shape {list(call.tensor(0).shape)}")
    (roi_count, _) = require_rank(call, 1, 2)
    _require_extent(call, 1, 1, BOX_LENGTH)
    require_rank(call, 2, 1)
    _require_extent(call, 2, 0, roi_count)
    height, width = int(call.scalar(3)), int(call.scalar(4))
    for index, extent in ((3, height), (4, width)):
        if extent <= 0:
            call.refuse(f"input {index}: expected an output extent of at least 1, got {extent}")
    for index in (5, 6):
        if not float(call.scalar(index)) > 0:
            call.refuse(f"input {index}: expected a positive stride, got {call.scalar(index)}")
    for index in range(7, layout_index):
        if int(call.scalar(index)) < 0:
            call.refuse(f"input {index}: expected a number of samples or 0, got {call.scalar(index)}")
    depth = shape[3]
    return [(roi_count, depth, height, width) if is_nchw else (roi_count, height, width, depth)]


def _align_shapes(call: Call) -> list[Shape]:
    return _pooled_shapes(call, 9)


def _pooling_shapes(call: Call) -> list[Shape]:
    return _pooled_shapes(call, 7)


def _mapped_regions(call: Call, height: int, width: int) -> Float32Array:
    """Input 1 in pixels of the feature map, [rois, (x1, y1, x2, y2)], checked together with the batches of input 2."""
    boxes = call.tensor(1)
    # 1 / stride in float32 and then a product: the spec's order decides the last bit.
    scales = np.array([1, 1, 1, 1], dtype=np.float32)
    scales[0::2] = np.float32(1) / np.float32(call.scalar(6))
    scales[1::2] = np.float32(1) / np.float32(call.scalar(5))
    if boxes.type == OperandType.TENSOR_QUANT16_ASYMM:
        if call.tensor(0).type in QUANTIZED_TENSORS and len(call.inputs) == 10:
            regions = boxes.array.astype(np.float32) * scales * np.float32(BOX_SCALE)
        else:
            regions = dequantize(boxes.array, boxes.operand) * scales
    else:
        regions = boxes.array.astype(np.float32) * scales
    batches = call.array(2)
    batch_count = call.tensor(0).shape[0]
    limits = np.array([width, height, width, height], dtype=np.float32)
    is_legal = (
        (batches >= 0)
        & (batches < batch_count)
        & ((regions >= 0) & (regions <= limits)).all(axis=1)
        & (regions[:, 0] <= regions[:, 2])
        & (regions[:, 1] <= regions[:, 3])
    )
    if not is_legal.all():
        first = int(np.argmin(is_legal))
        call.refuse(
            f"region {first}: expected a batch below {batch_count} and 0 <= x1 <= x2 <= {width}, 0 <= y1 <= y2 <= {height} "
            f"in the feature map, got batch {int(batches[first])} and {regions[first].tolist()}"
        )
    return regions.astype(np.float32)


def _samples(
    start: np.float32, end: np.float32, out_extent: int, ratio: int, in_extent: int
) -> tuple[Int64Array, Int64Array, Float32Array, int]:
    """Where one axis of a region is sampled.

    Returns:
        The two pixels of each sample, the weight of the second, and the number of samples a bin. Samples are ordered by bin.
    """
    length = np.maximum(end - start, np.float32(1))
    step = length / np.float32(out_extent)
    count = ratio if ratio > 0 else math.ceil(float(step))
    bin_size = step / np.float32(count)
    starts = step * np.arange(out_extent, dtype=np.float32) + start
    inside = bin_size * np.arange(count, dtype=np.float32)
    position = ((starts + bin_size / np.float32(2))[:, None] + inside).reshape(-1)
    lower = np.floor(position).astype(np.int64)
    weight = position - lower.astype(np.float32)
    is_outside = lower >= in_extent - 1
    weight[is_outside] = 0
    lower[is_outside] = in_extent - 1
    upper = np.minimum(lower + 1, in_extent - 1)
    return lower, upper, weight, count


def _execute_align(call: Call) -> list[Array]:
    is_nchw = bool(call.scalar(9))
    (shape,) = _align_shapes(call)
    roi_count, out_height, out_width, depth = _as_nhwc(shape, is_nchw)
    image = _image(call, is_nchw)
    regions = _mapped_regions(call, image.shape[1], image.shape[2])
    tensor = call.tensor(0)
    is_quantized = tensor.type in QUANTIZED_TENSORS
    result = np.empty((roi_count, out_height, out_width, depth), dtype=operand_dtype(tensor.type))
    for roi in range(roi_count):
        x1, y1, x2, y2 = regions[roi]
        rows = _samples(y1, y2, out_height, int(call.scalar(7)), image.shape[1])
        columns = _samples(x1, x2, out_width, int(call.scalar(8)), image.shape[2])
        source = image[int(call.array(2)[roi])]
        if is_quantized:
            result[roi] = _align_quantized(source, rows, columns, tensor.operand, call.outputs[0])
        else:
            result[roi] = _align_float(source.astype(np.float32, copy=False), rows, columns)
    return [np.ascontiguousarray(result.transpose(0, 3, 1, 2)) if is_nchw else result]


_AxisSamples = tuple[Int64Array, Int64Array, Float32Array, int]


def _corners(source: Array, rows: _AxisSamples, columns: _AxisSamples) -> list[tuple[Array, Float32Array]]:
    """The four pixels around each sample, each with its weight [rows, columns, 1]."""
    top, bottom, dy1, _ = rows
    left, right, dx1, _ = columns
    dx2, dy2 = np.float32(1) - dx1, np.float32(1) - dy1
    high, low = source[top], source[bottom]
    return [
        (high[:, left], (dx2 * dy2[:, None])[:, :, None]),
        (high[:, right], (dx1 * dy2[:, None])[:, :, None]),
        (low[:, left], (dx2 * dy1[:, None])[:, :, None]),
        (low[:, right], (dx1 * dy1[:, None])[:, :, None]),
    ]


def _sum_bins(samples: Array, row_count: int, column_count: int) -> Array:
    """Adds up the samples of each bin: [bins, rows, bins, columns, depth] over rows and columns."""
    height, width, depth = samples.shape
    bins = samples.reshape(height // row_count, row_count, width // column_count, column_count, depth)
    return np.asarray(bins.sum(axis=(1, 3)))


def _align_float(source: Float32Array, rows: _AxisSamples, columns: _AxisSamples) -> Float32Array:
    corners = _corners(source, rows, columns)
    samples = sum(weight * pixels for pixels, weight in corners)
    total = _sum_bins(np.asarray(samples), rows[3], columns[3])
    return np.asarray(total / np.float32(rows[3] * columns[3]), dtype=np.float32)


def _align_quantized(
    source: Array, rows: _AxisSamples, columns: _AxisSamples, operand: Operand, output: Operand
) -> Array:
    """Weights are quantised to 1/255; the sum is scaled by an integer multiplier."""
    weight_scale = np.float32(1) / np.float32(255)
    samples = np.zeros((len(rows[0]), len(columns[0]), source.shape[2]), dtype=np.int64)
    for pixels, weight in _corners(source, rows, columns):
        quantized_weight = saturating_round_cast(weight / weight_scale, np.int32).astype(np.int64)
        samples += quantized_weight * (pixels.astype(np.int64) - operand.zero_point)
    total = _sum_bins(samples, rows[3], columns[3])
    real = (
        np.float32(operand.scale) * weight_scale / np.float32(output.scale) / np.float32(rows[3] * columns[3])
    )
    multiplier, shift = quantize_multiplier(float(real))
    raw = multiply_by_quantized_multiplier(total, multiplier, shift) + output.zero_point
    return np.clip(raw, *quantized_range(output.type)).astype(operand_dtype(output.type))


def _c_round(values: Float32Array) -> Float32Array:
    """C's ``round`` of numbers that are not negative: half goes up; the addition is exact in float64."""
    return np.floor(values.astype(np.float64) + 0.5).astype(np.float32)


def _bins(
    start: np.float32, end: np.float32, out_extent: int, in_extent: int
) -> tuple[Int64Array, Int64Array]:
    """First pixel and the one after the last of each bin on one axis; bins may overlap, and be empty at the image's edge."""
    step = np.maximum(end - start + np.float32(1), np.float32(1)) / np.float32(out_extent)
    index = np.arange(out_extent + 1, dtype=np.float32)
    edges = step * index + start
    first = np.floor(edges[:-1]).astype(np.int64)
    past = np.ceil(edges[1:]).astype(np.int64)
    return np.minimum(first, in_extent), np.minimum(past, in_extent)


def _maxima(values: Array, first: Int64Array, past: Int64Array) -> Array:
    """The maximum of values[first[i] : past[i]] for each i along axis 0; undefined where that is empty."""
    # reduceat reduces from each index to the next and must not begin at the end: one more row, and every second result.
    padded = np.concatenate([values, values[-1:]])
    pairs = np.stack([first, past], axis=1).reshape(-1)
    return np.asarray(np.maximum.reduceat(padded, pairs, axis=0)[::2])


def _execute_pooling(call: Call) -> list[Array]:
    is_nchw = bool(call.scalar(7))
    (shape,) = _pooling_shapes(call)
    roi_count, out_height, out_width, depth = _as_nhwc(shape, is_nchw)
    image = _image(call, is_nchw)
    regions = _c_round(_mapped_regions(call, image.shape[1], image.shape[2]))
    result = np.empty((roi_count, out_height, out_width, depth), dtype=image.dtype)
    for roi in range(roi_count):
        x1, y1, x2, y2 = regions[roi]
        rows = _bins(y1, y2, out_height, image.shape[1])
        columns = _bins(x1, x2, out_width, image.shape[2])
        source = image[int(call.array(2)[roi])]
        by_row = _maxima(source, *rows)
        by_bin = _maxima(by_row.transpose(1, 0, 2), *columns).transpose(1, 0, 2)
        is_empty = (rows[0] >= rows[1])[:, None] | (columns[0] >= columns[1])[None, :]
        result[roi] = np.where(is_empty[:, :, None], image.dtype.type(call.tensor(0).zero_point), by_bin)
    return [np.ascontiguousarray(result.transpose(0, 3, 1, 2)) if is_nchw else result]


# --- HEATMAP_MAX_KEYPOINT


def _validate_heatmap(check: Check) -> None:
    check.needs(3)
    check.counts(3, 2)
    require_all(check)
    tensor_type = check.input_type(0, SCORE_LEVELS)
    check.input_types(boxes_type(tensor_type), OperandType.BOOL, start=1)
    check.output_types(tensor_type, boxes_type(tensor_type))
    check.input_rank(0, 4)
    check.input_rank(1, 2)
    check.extent("input 1", check.inputs[1], 1, BOX_LENGTH)
    check.output_rank(0, 2)
    check.output_rank(1, 3)
    check.extent("output 1", check.outputs[1], 2, 2)
    require_box_quantization(check, "input 1", check.inputs[1])
    require_box_quantization(check, "output 1", check.outputs[1])


def _heatmap_shapes(call: Call) -> list[Shape]:
    is_nchw = bool(call.scalar(2))
    shape = require_rank(call, 0, 4)
    box_count, height, width, keypoint_count = _as_nhwc(shape, is_nchw)
    if height != width or height < 2:
        call.refuse(f"input 0: expected square heatmaps of at least 2 pixels, got shape {list(shape)}")
    require_rank(call, 1, 2)
    _require_extent(call, 1, 0, box_count)
    _require_extent(call, 1, 1, BOX_LENGTH)
    return [(box_count, keypoint_count), (box_count, keypoint_count, 2)]


def _refine(grid: Float32Array, tolerance: np.float32) -> tuple[Float32Array, Float32Array, Float32Array]:
    """The top of the parabola through 3x3 scores.

    Args:
        grid: [..., 3, 3] scores around the maximum, rows first.
        tolerance: Below this determinant, absolute and relative, the parabola has no top and the maximum stays.

    Returns:
        Offset in x, offset in y (each at most 1.5), score there.
    """
    half, two, quarter = np.float32(0.5), np.float32(2), np.float32(0.25)
    centre = grid[..., 1, 1]
    # b is the negative gradient, a the Hessian: a x = b.
    b0 = -(grid[..., 1, 2] - grid[..., 1, 0]) * half
    b1 = -(grid[..., 2, 1] - grid[..., 0, 1]) * half
    a00 = grid[..., 1, 0] - two * centre + grid[..., 1, 2]
    a01 = (grid[..., 2, 2] - grid[..., 2, 0] - grid[..., 0, 2] + grid[..., 0, 0]) * quarter
    a11 = grid[..., 0, 1] - two * centre + grid[..., 2, 1]
    determinant = a00 * a11 - a01 * a01
    is_flat = np.abs(determinant) < tolerance + tolerance * (a00 * a11)
    divisor = np.where(is_flat, np.float32(1), determinant)
    x = (a11 * b0 - a01 * b1) / divisor
    y = (a00 * b1 - a01 * b0) / divisor
    largest = np.maximum(np.abs(x), np.abs(y))
    is_far = largest > np.float32(1.5)
    shrink = np.where(is_far, np.float32(1.5) / np.where(is_far, largest, np.float32(1)), np.float32(1))
    x, y = x * shrink, y * shrink
    score = centre - b0 * x - b1 * y + ((a00 * x + a01 * y) * x + (a01 * x + a11 * y) * y) / two
    zero = np.float32(0)
    return np.where(is_flat, zero, x), np.where(is_flat, zero, y), np.where(is_flat, centre, score)


def _execute_heatmap(call: Call) -> list[Array]:
    heatmap = as_float32(call, 0)
    if bool(call.scalar(2)):
        heatmap = heatmap.transpose(0, 2, 3, 1)
    box_count, size, _, keypoint_count = heatmap.shape
    boxes = as_float32(call, 1)
    is_legal = (boxes[:, 0] <= boxes[:, 2]) & (boxes[:, 1] <= boxes[:, 3])
    if not is_legal.all():
        first = int(np.argmin(is_legal))
        call.refuse(f"input 1, box {first}: expected x1 <= x2 and y1 <= y2, got {boxes[first].tolist()}")
    best = heatmap.reshape(box_count, size * size, keypoint_count).argmax(axis=1)
    row, column = best // size, best % size
    # Neighbours outside of the heatmap are mirrored at its outermost pixels: -1 is 1, size is size - 2.
    offsets = np.array([-1, 0, 1])
    rows = row[:, :, None] + offsets
    rows = np.where(rows < 0, 1, np.where(rows >= size, size - 2, rows))
    columns = column[:, :, None] + offsets
    columns = np.where(columns < 0, 1, np.where(columns >= size, size - 2, columns))
    box_index = np.arange(box_count)[:, None, None, None]
    keypoint_index = np.arange(keypoint_count)[None, :, None, None]
    grid = heatmap[box_index, rows[:, :, :, None], columns[:, :, None, :], keypoint_index]
    is_half = call.tensor(0).type == OperandType.TENSOR_FLOAT16
    x, y, score = _refine(grid, np.float32(1e-3 if is_half else 1e-5))
    half, extent = np.float32(0.5), np.float32(size)
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    keypoints = np.stack(
        [
            (column.astype(np.float32) + x + half) / extent * width[:, None] + boxes[:, 0:1],
            (row.astype(np.float32) + y + half) / extent * height[:, None] + boxes[:, 1:2],
        ],
        axis=-1,
    )
    return [from_float32(score, call.outputs[0]), from_float32(keypoints, call.outputs[1])]


_REGION_INPUTS = """Inputs: 0: feature map [batches, height, width, depth], or [batches, depth, height, width].
            1: regions [rois, 4], each x1, y1, x2, y2 in pixels of the original image; rois may be 0. 2: TENSOR_INT32 [rois], each
            region's batch. 3, 4: INT32, output height and width. 5, 6: scalar of the float type, height and width of the original
            image in feature map pixels (strides)."""

OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        type=OperationType.ROI_ALIGN,
        validate=_validate_align,
        shapes=_align_shapes,
        execute=_execute_align,
        doc=f"""Averages bilinear samples of regions of a feature map.

        Formula: a region is divided by its strides and not rounded; its sides are at least 1. It is cut into height x width bins;
            a bin's value is the mean of equally spaced samples, each interpolated between four pixels; samples beyond the last
            pixel take the last pixel.
        {_REGION_INPUTS}
            7, 8: INT32, samples per bin in y and x, 0 for ceil(region / output). 9: BOOL, NCHW layout.
        Outputs: 0: [rois, height, width, depth], or [rois, depth, height, width], of input 0's type.
        Quantisation: regions TENSOR_QUANT16_ASYMM with scale 0.125 and zero point 0. Weights are rounded to 1/255, the sum is
            scaled by a fixed-point multiplier; the output may have its own scale and zero point.
        Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_QUANT8_ASYMM from level 3, TENSOR_QUANT8_ASYMM_SIGNED from 4. Float scalars
            are FLOAT16 for a float16 feature map.
        Stricter: known wrong ranks, illegal constants and the regions' quantisation are refused with the model.
        Looser: an output scale below the product of input scale and weight scale is computed, not refused.
        Source: NN HAL RoiAlign.""",
    ),
    OperationContract(
        type=OperationType.ROI_POOLING,
        validate=_validate_pooling,
        shapes=_pooling_shapes,
        execute=_execute_pooling,
        doc=f"""Takes maxima of regions of a feature map.

        Formula: a region's corners are divided by the strides and rounded, both corner pixels belong to it. It is cut into
            height x width bins from floor(start) to ceil(end), the end not included; a bin's value is its maximum, or zero if it is
            wholly beyond the image's edge.
        {_REGION_INPUTS}
            7: BOOL, NCHW layout.
        Outputs: 0: [rois, height, width, depth], or [rois, depth, height, width], of input 0's type.
        Quantisation: regions TENSOR_QUANT16_ASYMM with scale 0.125 and zero point 0; output as input 0.
        Types: as ROI_ALIGN.
        Stricter: as ROI_ALIGN; an output of another quantisation is refused.
        Looser: no regions at all gives an empty output.
        Source: NN HAL RoiPooling.""",
    ),
    OperationContract(
        type=OperationType.HEATMAP_MAX_KEYPOINT,
        validate=_validate_heatmap,
        shapes=_heatmap_shapes,
        execute=_execute_heatmap,
        doc="""Finds the keypoint of each heatmap, finer than its pixels.

        Formula: the first maximum of the heatmap; a parabola through the 3x3 scores around it (mirrored at the border) gives an
            offset of at most 1.5 pixels and the score there; where its Hessian is near singular the maximum itself is taken.
            keypoint = (index + offset + 0.5) / size * box side + box corner.
        Inputs: 0: heatmaps [boxes, size, size, keypoints], or [boxes, keypoints, size, size]; size is at least 2.
            1: boxes [boxes, 4], each x1, y1, x2, y2. 2: BOOL, NCHW layout.
        Outputs: 0: scores [boxes, keypoints] of input 0's type. 1: keypoints [boxes, keypoints, 2], x then y, of input 1's type.
        Quantisation: computed in float32. Boxes and keypoints TENSOR_QUANT16_ASYMM with scale 0.125 and zero point 0; scores may
            have their own scale and zero point.
        Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_QUANT8_ASYMM from level 3, TENSOR_QUANT8_ASYMM_SIGNED from 4; boxes have
            input 0's type where it is float.
        Stricter: known wrong ranks and the boxes' quantisation are refused with the model.
        Looser: no boxes at all gives empty outputs.
        Source: NN HAL HeatmapMaxKeypoint. The spec's text gives the boxes zero point -128 beside signed heatmaps, which their
            type cannot have; 0 is meant.""",
    ),
)
