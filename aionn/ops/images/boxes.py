"""Boxes in images: their quantisation, how predicted deltas change them, and how overlapping ones are suppressed.

Owns what the operations on regions and on detections share. A box is four coordinates x1, y1, x2, y2 (or y1, x1, y2, x2: what
is here does not mind which axis comes first, except ``transform_boxes``). Knows no operation.

Invariants:
1. Everything is computed in float32 whatever the operands' types, and converted once at the end.
2. Suppression is greedy: its loop is over the boxes kept, the overlap with all others is one array step. The order among equal
   scores is that of the spec's in-place algorithm while suppressing, and of the input where results are sorted.

Source: ``GenerateProposals`` and the conversions of ``CpuOperationUtils`` of the NN HAL's CPU operations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from aionn.hal import Operand, OperandType, operand_dtype
from aionn.ops.numerics.fixed_point import dequantize, saturating_round_cast
from aionn.ops.signature import Array, Call, Check, Shape, float_result

__all__ = [
    "BOX_LENGTH",
    "BOX_SCALE",
    "FLOAT_TENSORS",
    "QUANTIZED_TENSORS",
    "SCORE_LEVELS",
    "Float32Array",
    "IndexArray",
    "as_float32",
    "best_first",
    "boxes_type",
    "from_float32",
    "overlaps_of",
    "require_all",
    "require_box_quantization",
    "require_rank",
    "suppress",
    "suppress_by_class",
    "transform_boxes",
]

BOX_LENGTH = 4
"""Numbers a box."""

BOX_SCALE = 0.125
"""Coordinates are quantised in eighths of a pixel."""

QUANTIZED_TENSORS = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
FLOAT_TENSORS = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
SCORE_LEVELS = {
    OperandType.TENSOR_FLOAT32: 3,
    OperandType.TENSOR_FLOAT16: 3,
    OperandType.TENSOR_QUANT8_ASYMM: 3,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: 4,
}
"""The types of scores, feature maps and heatmaps, and their first feature levels."""

Float32Array = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]


def boxes_type(tensor_type: OperandType) -> OperandType:
    """The type of boxes beside scores or a feature map of the given type."""
    return OperandType.TENSOR_QUANT16_ASYMM if tensor_type in QUANTIZED_TENSORS else tensor_type


def require_box_quantization(check: Check, what: str, operand: Operand) -> None:
    """Coordinates are quantised in eighths of a pixel and start at 0."""
    if operand.type in (OperandType.TENSOR_QUANT16_ASYMM, OperandType.TENSOR_QUANT16_SYMM):
        check.require(
            operand.scale == BOX_SCALE and operand.zero_point == 0,
            what,
            f"scale {BOX_SCALE} and zero point 0",
            f"scale {operand.scale} and zero point {operand.zero_point}",
        )


def require_all(check: Check) -> None:
    """Demands that no input is left out."""
    for index in range(len(check.inputs)):
        check.require(not check.is_omitted(index), f"input {index}", "a value", "an operand that is left out")


def require_rank(call: Call, index: int, rank: int) -> Shape:
    """Demands a rank of a value. Returns its shape."""
    shape = call.tensor(index).shape
    if len(shape) != rank:
        call.refuse(f"input {index}: expected rank {rank}, got shape {list(shape)}")
    return shape


def as_float32(call: Call, index: int) -> Float32Array:
    """The real values of an input of any float or quantised type."""
    tensor = call.tensor(index)
    if tensor.type in FLOAT_TENSORS:
        return tensor.array.astype(np.float32, copy=False)
    return dequantize(tensor.array, tensor.operand)


def from_float32(values: Float32Array, output: Operand) -> Array:
    """To the output's type; quantised as round(x / scale + zero point), the sum in float32 before the rounding."""
    if output.type in FLOAT_TENSORS:
        return float_result(values, output)
    shifted = values / np.float32(output.scale) + np.float32(output.zero_point)
    return saturating_round_cast(shifted.astype(np.float64), operand_dtype(output.type))


def transform_boxes(boxes: Float32Array, deltas: Float32Array, image_sizes: Float32Array) -> Float32Array:
    """Moves, scales and clips boxes.

    Args:
        boxes: [n, 4], each x1, y1, x2, y2.
        deltas: [n, classes, 4], each dx, dy (of the box's side) and dw, dh (logarithms of factors).
        image_sizes: [n, 2], height and width of each box's image.

    Returns:
        [n, classes, 4].
    """
    half, zero = np.float32(0.5), np.float32(0)
    sides = (boxes[:, 2:] - boxes[:, :2])[:, None]
    centres = ((boxes[:, :2] + boxes[:, 2:]) * half)[:, None] + deltas[..., :2] * sides
    reach = np.exp(deltas[..., 2:]) * sides * half
    corners = np.concatenate([centres - reach, centres + reach], axis=-1)
    limits = image_sizes[:, [1, 0, 1, 0]][:, None]
    return np.asarray(np.minimum(np.maximum(corners, zero), limits), dtype=np.float32)


def overlaps_of(box: Float32Array, boxes: Float32Array) -> Float32Array:
    """Intersection over union of one box with each of [n, 4]; NaN where both are without area."""
    zero = np.float32(0)
    area = (box[2] - box[0]) * (box[3] - box[1])
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    width = np.maximum(np.minimum(box[2], boxes[:, 2]) - np.maximum(box[0], boxes[:, 0]), zero)
    height = np.maximum(np.minimum(box[3], boxes[:, 3]) - np.maximum(box[1], boxes[:, 1]), zero)
    common = width * height
    with np.errstate(all="ignore"):
        return np.asarray(common / (area + areas - common), dtype=np.float32)


def _keep(order: IndexArray, is_kept: npt.NDArray[np.bool_]) -> IndexArray:
    """Drops entries as the spec's in-place algorithm does: the last entry to keep takes the place of the first to drop."""
    count = int(np.count_nonzero(is_kept))
    result = order[:count].copy()
    result[~is_kept[:count]] = order[count:][is_kept[count:]][::-1]
    return result


def suppress(
    candidates: IndexArray,
    scores: Float32Array,
    boxes: Float32Array,
    count_max: int,
    decay: Callable[[Float32Array], Float32Array] | None,
    threshold: np.float32,
) -> IndexArray:
    """Keeps the best box, then drops or weakens those that overlap it, and so on.

    Args:
        candidates: Indexes of ``scores`` and ``boxes``.
        scores: Changed in place where boxes are weakened.
        boxes: [n, 4].
        count_max: Number of boxes to keep, negative for all.
        decay: The factor of a score for an overlap; None drops every box whose overlap is at least ``threshold``.
        threshold: With ``decay``, boxes whose score falls below it are dropped.

    Returns:
        The indexes kept, best first.
    """
    order = candidates.copy()
    kept: list[int] = []
    while order.size and (count_max < 0 or len(kept) < count_max):
        best = int(np.argmax(scores[order]))
        chosen = int(order[best])
        order[best] = order[0]
        order = order[1:]
        kept.append(chosen)
        overlaps = overlaps_of(boxes[chosen], boxes[order])
        # NaN, the overlap of boxes without area, is not at least any threshold: written so that it keeps the box.
        if decay is None:
            order = _keep(order, ~(overlaps >= threshold))
        else:
            scores[order] *= decay(overlaps)
            order = _keep(order, ~(scores[order] < threshold))
    return np.array(kept, dtype=np.int64)


def best_first(selected: IndexArray, scores: Float32Array, count_max: int) -> IndexArray:
    """Sorted by falling score, cut to ``count_max`` (negative for all)."""
    order = selected[np.argsort(-scores[selected], kind="stable")]
    return order if count_max < 0 else order[:count_max]


def suppress_by_class(
    scores: Float32Array,
    boxes: Float32Array,
    score_threshold: np.float32,
    count_max: int,
    class_count_max: int,
    decay: Callable[[Float32Array], Float32Array] | None,
    threshold: np.float32,
) -> IndexArray:
    """``suppress`` for each class but 0, the background; then the best of all.

    Args:
        scores: [n, classes], changed in place where boxes are weakened.
        boxes: [n, classes, 4].
        score_threshold: Only boxes with a score above it take part.
        count_max: Number of boxes in all, negative for no limit.
        class_count_max: Number of boxes a class, negative for no limit.
        decay: As ``suppress``.
        threshold: As ``suppress``.

    Returns:
        Indexes into the flat scores, best first.
    """
    box_count, class_count = scores.shape
    flat_scores, flat_boxes = scores.reshape(-1), boxes.reshape(-1, BOX_LENGTH)
    kept = [np.zeros(0, dtype=np.int64)]
    for label in range(1, class_count):
        indexes = np.arange(box_count, dtype=np.int64) * class_count + label
        candidates = indexes[flat_scores[indexes] > score_threshold]
        kept.append(suppress(candidates, flat_scores, flat_boxes, class_count_max, decay, threshold))
    return best_first(np.concatenate(kept), flat_scores, count_max)
