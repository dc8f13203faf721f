"""Boxes of detected objects: decoding, suppression of overlapping ones, proposals.

Owns AXIS_ALIGNED_BBOX_TRANSFORM, BOX_WITH_NMS_LIMIT, GENERATE_PROPOSALS and DETECTION_POSTPROCESSING: their contracts, shape rules
and kernels. How boxes are transformed and suppressed is in ``aionn.ops.images.boxes``.

Invariants:
1. BOX_WITH_NMS_LIMIT and GENERATE_PROPOSALS have no shape rule: the number of boxes is known only after computing.
2. Shapes are checked before a kernel looks at values.

Source: ``GenerateProposals`` of the NN HAL's CPU operations, which contains all four.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from aionn.hal import OperandType, OperationType
from aionn.ops.images.boxes import (
    BOX_LENGTH,
    FLOAT_TENSORS,
    QUANTIZED_TENSORS,
    SCORE_LEVELS,
    Float32Array,
    IndexArray,
    as_float32,
    best_first,
    boxes_type,
    from_float32,
    require_all,
    require_box_quantization,
    require_rank,
    suppress,
    suppress_by_class,
    transform_boxes,
)
from aionn.ops.signature import (
    Array,
    Call,
    Check,
    OperationContract,
    Shape,
    float_result,
    scalar_type_for,
)

__all__ = ["OPERATIONS"]


def _require_constant(check: Check, index: int, is_legal: Callable[[float], bool], expected: str) -> None:
    value = check.constant(index)
    if value is not None:
        check.require(is_legal(float(value)), f"input {index}", expected, float(value))


def _require_shape(call: Call, index: int, expected: Shape) -> None:
    shape = call.tensor(index).shape
    if shape != expected:
        call.refuse(f"input {index}: expected shape {list(expected)}, got {list(shape)}")


# --- AXIS_ALIGNED_BBOX_TRANSFORM


def _validate_transform(check: Check) -> None:
    check.needs(3)
    check.counts(4)
    require_all(check)
    roi_type = check.input_type(0, (*FLOAT_TENSORS, OperandType.TENSOR_QUANT16_ASYMM))
    if roi_type == OperandType.TENSOR_QUANT16_ASYMM:
        check.input_type(1, QUANTIZED_TENSORS)
    else:
        check.input_types(roi_type, start=1)
    check.input_types(OperandType.TENSOR_INT32, roi_type, start=2)
    check.output_types(roi_type)
    for index, rank in enumerate((2, 2, 1, 2)):
        check.input_rank(index, rank)
    check.output_rank(0, 2)
    check.extent("input 0", check.inputs[0], 1, BOX_LENGTH)
    check.extent("input 3", check.inputs[3], 1, 2)
    require_box_quantization(check, "input 0", check.inputs[0])
    require_box_quantization(check, "input 3", check.inputs[3])
    require_box_quantization(check, "output 0", check.outputs[0])


def _transform_shapes(call: Call) -> list[Shape]:
    box_count, _ = require_rank(call, 0, 2)
    _require_shape(call, 0, (box_count, BOX_LENGTH))
    deltas = require_rank(call, 1, 2)
    if deltas[0] != box_count or deltas[1] == 0 or deltas[1] % BOX_LENGTH:
        call.refuse(f"input 1: expected shape [{box_count}, 4 * classes], got {list(deltas)}")
    _require_shape(call, 2, (box_count,))
    image_count, _ = require_rank(call, 3, 2)
    _require_shape(call, 3, (image_count, 2))
    if image_count == 0:
        call.refuse("input 3: expected at least one image, got none")
    return [deltas]


def _execute_transform(call: Call) -> list[Array]:
    boxes, deltas, image_sizes = as_float32(call, 0), as_float32(call, 1), as_float32(call, 3)
    batches = call.array(2)
    is_legal = (
        (batches >= 0)
        & (batches < len(image_sizes))
        & (boxes[:, 0] <= boxes[:, 2])
        & (boxes[:, 1] <= boxes[:, 3])
    )
    if not is_legal.all():
        first = int(np.argmin(is_legal))
        call.refuse(
            f"box {first}: expected a batch below {len(image_sizes)}, x1 <= x2 and y1 <= y2, "
            f"got batch {int(batches[first])} and {boxes[first].tolist()}"
        )
    result = transform_boxes(
        boxes, deltas.reshape(len(boxes), deltas.shape[1] // BOX_LENGTH, BOX_LENGTH), image_sizes[batches]
    )
    return [from_float32(result.reshape(deltas.shape), call.outputs[0])]


# --- BOX_WITH_NMS_LIMIT


def _validate_nms(check: Check) -> None:
    check.needs(3)
    check.counts(9, 4)
    require_all(check)
    score_type = check.input_type(0, SCORE_LEVELS)
    scalar, box_type = scalar_type_for(score_type), boxes_type(score_type)
    check.input_types(box_type, OperandType.TENSOR_INT32, scalar, OperandType.INT32, start=1)
    check.input_types(OperandType.INT32, scalar, scalar, scalar, start=5)
    check.output_types(score_type, box_type, OperandType.TENSOR_INT32, OperandType.TENSOR_INT32)
    for index, rank in enumerate((2, 2, 1)):
        check.input_rank(index, rank)
    for index, rank in enumerate((1, 2, 1, 1)):
        check.output_rank(index, rank)
    check.extent("output 1", check.outputs[1], 1, BOX_LENGTH)
    require_box_quantization(check, "input 1", check.inputs[1])
    require_box_quantization(check, "output 1", check.outputs[1])
    if score_type in QUANTIZED_TENSORS:
        check.same_quantization("output 0", check.inputs[0], check.outputs[0])
    _require_constant(check, 5, lambda kernel: kernel in (0, 1, 2), "0 (hard), 1 (linear) or 2 (gaussian)")


def _nms_decay(call: Call) -> Callable[[Float32Array], Float32Array]:
    """The chosen kernel: what an overlap multiplies a score with."""
    one, zero = np.float32(1), np.float32(0)
    overlap_max, sigma = np.float32(call.scalar(6)), np.float32(call.scalar(7))
    match int(call.scalar(5)):
        case 0:
            return lambda overlap: np.where(overlap < overlap_max, one, zero)
        case 1:
            return lambda overlap: np.where(overlap < overlap_max, one, one - overlap)
        case 2:
            return lambda overlap: np.exp(-overlap * overlap / sigma)
        case other:
            call.refuse(f"input 5: expected 0 (hard), 1 (linear) or 2 (gaussian), got {other}")


def _check_nms_shapes(call: Call) -> None:
    box_count, class_count = require_rank(call, 0, 2)
    if class_count < 2:
        call.refuse(f"input 0: expected a background and at least one class, got {class_count} in all")
    _require_shape(call, 1, (box_count, class_count * BOX_LENGTH))
    _require_shape(call, 2, (box_count,))


def _execute_nms(call: Call) -> list[Array]:
    _check_nms_shapes(call)
    # A copy: soft suppression weakens scores in place.
    scores = np.array(as_float32(call, 0), dtype=np.float32)
    class_count = scores.shape[1]
    boxes = as_float32(call, 1).reshape(-1, class_count, BOX_LENGTH)
    batches = call.array(2)
    is_legal = ((boxes[..., :2] <= boxes[..., 2:]).all(axis=(1, 2))) & (batches >= 0)
    if not is_legal.all():
        first = int(np.argmin(is_legal))
        call.refuse(
            f"row {first}: expected a batch of at least 0, x1 <= x2 and y1 <= y2, "
            f"got batch {int(batches[first])} and boxes {boxes[first].tolist()}"
        )
    decay = _nms_decay(call)
    count_max = int(call.scalar(4))
    # Rows of one batch are adjacent: a group is a run of equal batches.
    edges = np.append(np.flatnonzero(np.diff(batches, prepend=-1)), len(batches))
    selected = [np.zeros(0, dtype=np.int64)]
    for start, end in itertools.pairwise(edges):
        kept = suppress_by_class(
            scores[start:end],
            boxes[start:end],
            np.float32(call.scalar(3)),
            count_max,
            count_max,
            decay,
            np.float32(call.scalar(8)),
        )
        # Best first within a class, classes in order.
        selected.append(kept[np.argsort(kept % class_count, kind="stable")] + start * class_count)
    chosen = np.concatenate(selected)
    return [
        from_float32(scores.reshape(-1)[chosen], call.outputs[0]),
        call.array(1).reshape(-1, BOX_LENGTH)[chosen],
        (chosen % class_count).astype(np.int32),
        batches[chosen // class_count],
    ]


# --- GENERATE_PROPOSALS


def _validate_proposals(check: Check) -> None:
    check.needs(3)
    check.counts(11, 3)
    require_all(check)
    score_type = check.input_type(0, SCORE_LEVELS)
    is_quantized = score_type in QUANTIZED_TENSORS
    scalar, box_type = scalar_type_for(score_type), boxes_type(score_type)
    anchors_type = OperandType.TENSOR_QUANT16_SYMM if is_quantized else score_type
    check.input_types(score_type, anchors_type, box_type, scalar, scalar, start=1)
    check.input_types(OperandType.INT32, OperandType.INT32, scalar, scalar, OperandType.BOOL, start=6)
    check.output_types(score_type, box_type, OperandType.TENSOR_INT32)
    for index, rank in enumerate((4, 4, 2, 2)):
        check.input_rank(index, rank)
    for index, rank in enumerate((1, 2, 1)):
        check.output_rank(index, rank)
    check.extent("input 2", check.inputs[2], 1, BOX_LENGTH)
    check.extent("input 3", check.inputs[3], 1, 2)
    check.extent("output 1", check.outputs[1], 1, BOX_LENGTH)
    for what, operand in (
        ("input 2", check.inputs[2]),
        ("input 3", check.inputs[3]),
        ("output 1", check.outputs[1]),
    ):
        require_box_quantization(check, what, operand)
    if is_quantized:
        check.same_quantization("output 0", check.inputs[0], check.outputs[0])


def _check_proposal_shapes(call: Call) -> None:
    scores = require_rank(call, 0, 4)
    if bool(call.scalar(10)):
        batch_count, anchor_count, height, width = scores
        deltas = (batch_count, anchor_count * BOX_LENGTH, height, width)
    else:
        batch_count, height, width, anchor_count = scores
        deltas = (batch_count, height, width, anchor_count * BOX_LENGTH)
    _require_shape(call, 1, deltas)
    _require_shape(call, 2, (anchor_count, BOX_LENGTH))
    _require_shape(call, 3, (batch_count, 2))


def _shifted_anchors(anchors: Float32Array, height: int, width: int, call: Call) -> Float32Array:
    """The anchors at every place of the feature map, in pixels of the image: [height * width * anchors, 4]."""
    shift_y = np.arange(height, dtype=np.float32) * np.float32(call.scalar(4))
    shift_x = np.arange(width, dtype=np.float32) * np.float32(call.scalar(5))
    shifts = np.zeros((height, width, 1, BOX_LENGTH), dtype=np.float32)
    shifts[..., 0::2] = shift_x[None, :, None, None]
    shifts[..., 1::2] = shift_y[:, None, None, None]
    return (anchors + shifts).reshape(-1, BOX_LENGTH)


def _is_usable(boxes: Float32Array, image_size: Float32Array, size_min: np.float32) -> npt.NDArray[np.bool_]:
    """Whether each box is larger than ``size_min`` on both sides and has its centre inside of the image."""
    sides = boxes[:, 2:] - boxes[:, :2]
    centres = boxes[:, :2] + sides / np.float32(2)
    return np.asarray((sides > size_min).all(axis=1) & (centres < image_size[::-1]).all(axis=1))


def _execute_proposals(call: Call) -> list[Array]:
    _check_proposal_shapes(call)
    scores, deltas, anchors, image_sizes = (as_float32(call, index) for index in range(4))
    if bool(call.scalar(10)):
        scores, deltas = scores.transpose(0, 2, 3, 1), deltas.transpose(0, 2, 3, 1)
    is_legal = (anchors[:, :2] <= anchors[:, 2:]).all(axis=1)
    if not is_legal.all():
        first = int(np.argmin(is_legal))
        call.refuse(f"input 2, anchor {first}: expected x1 <= x2 and y1 <= y2, got {anchors[first].tolist()}")
    places = _shifted_anchors(anchors, scores.shape[1], scores.shape[2], call)
    count_before, count_after = int(call.scalar(6)), int(call.scalar(7))
    out_scores = [np.zeros(0, dtype=np.float32)]
    out_boxes = [np.zeros((0, BOX_LENGTH), dtype=np.float32)]
    counts = []
    for batch in range(len(scores)):
        batch_scores = scores[batch].reshape(-1)
        batch_deltas = deltas[batch].reshape(-1, 1, BOX_LENGTH)
        sizes = np.broadcast_to(image_sizes[batch], (len(places), 2))
        boxes = transform_boxes(places, batch_deltas, sizes)[:, 0]
        candidates = np.arange(len(boxes), dtype=np.int64)
        if 0 < count_before < len(candidates):
            candidates = best_first(candidates, batch_scores, count_before)
        candidates = candidates[_is_usable(boxes[candidates], image_sizes[batch], np.float32(call.scalar(9)))]
        count_max = count_after if count_after > 0 else -1
        kept = suppress(candidates, batch_scores, boxes, count_max, None, np.float32(call.scalar(8)))
        out_scores.append(batch_scores[kept])
        out_boxes.append(boxes[kept])
        counts.append(len(kept))
    return [
        from_float32(np.concatenate(out_scores), call.outputs[0]),
        from_float32(np.concatenate(out_boxes), call.outputs[1]),
        np.repeat(np.arange(len(counts), dtype=np.int32), counts),
    ]


# --- DETECTION_POSTPROCESSING


def _validate_postprocessing(check: Check) -> None:
    check.needs(3)
    check.counts(14, 4)
    require_all(check)
    score_type = check.input_type(0, FLOAT_TENSORS)
    scalar = scalar_type_for(score_type)
    check.input_types(score_type, score_type, scalar, scalar, scalar, scalar, OperandType.BOOL, start=1)
    check.input_types(OperandType.INT32, OperandType.INT32, OperandType.INT32, start=8)
    check.input_types(scalar, scalar, OperandType.BOOL, start=11)
    check.output_types(score_type, score_type, OperandType.TENSOR_INT32, OperandType.TENSOR_INT32)
    for index, rank in enumerate((3, 3, 2)):
        check.input_rank(index, rank)
    for index, rank in enumerate((2, 3, 2, 1)):
        check.output_rank(index, rank)
    check.extent("input 2", check.inputs[2], 1, BOX_LENGTH)
    check.extent("output 1", check.outputs[1], 2, BOX_LENGTH)
    for index in (3, 4, 5, 6, 8):
        _require_constant(check, index, lambda value: value > 0, "a positive number")
    for index in (11, 12):
        _require_constant(check, index, lambda value: value >= 0, "a number of at least 0")


def _postprocessing_shapes(call: Call) -> list[Shape]:
    batch_count, anchor_count, class_count = require_rank(call, 0, 3)
    encoding_length = require_rank(call, 1, 3)[2]
    _require_shape(call, 1, (batch_count, anchor_count, encoding_length))
    _require_shape(call, 2, (anchor_count, BOX_LENGTH))
    if class_count < 2:
        call.refuse(f"input 0: expected a background and at least one class, got {class_count} in all")
    if encoding_length < BOX_LENGTH:
        call.refuse(f"input 1: expected at least 4 values a box, got {encoding_length}")
    positive = [3, 4, 5, 6, 8, 10 if bool(call.scalar(7)) else 9]
    for index in positive:
        if not call.scalar(index) > 0:
            call.refuse(f"input {index}: expected a positive number, got {call.scalar(index)}")
    for index in (11, 12):
        if not call.scalar(index) >= 0:
            call.refuse(f"input {index}: expected a number of at least 0, got {call.scalar(index)}")
    count = int(call.scalar(8))
    if not bool(call.scalar(7)):
        count *= int(call.scalar(9))
    return [(batch_count, count), (batch_count, count, BOX_LENGTH), (batch_count, count), (batch_count,)]


def _decoded_boxes(call: Call) -> Float32Array:
    """Anchors moved and scaled by the deltas: [batches, anchors, 4], each y1, x1, y2, x2. Not clipped."""
    deltas, anchors = as_float32(call, 1), as_float32(call, 2)
    scale_y, scale_x, scale_h, scale_w = (np.float32(call.scalar(index)) for index in range(3, 7))
    half = np.float32(0.5)
    centre_y = anchors[:, 0] + anchors[:, 2] * deltas[..., 0] / scale_y
    centre_x = anchors[:, 1] + anchors[:, 3] * deltas[..., 1] / scale_x
    reach_y = anchors[:, 2] * np.exp(deltas[..., 2] / scale_h) * half
    reach_x = anchors[:, 3] * np.exp(deltas[..., 3] / scale_w) * half
    corners = (centre_y - reach_y, centre_x - reach_x, centre_y + reach_y, centre_x + reach_x)
    return np.asarray(np.stack(corners, axis=-1), dtype=np.float32)


def _detect_by_class(call: Call, scores: Float32Array, boxes: Float32Array) -> tuple[IndexArray, IndexArray]:
    """Suppression within each class. Returns anchors and classes of one batch's detections."""
    class_count = scores.shape[1]
    selected = suppress_by_class(
        scores,
        np.repeat(boxes[:, None], class_count, axis=1),
        np.float32(call.scalar(11)),
        int(call.scalar(8)),
        int(call.scalar(10)),
        None,
        np.float32(call.scalar(12)),
    )
    return selected // class_count, selected % class_count


def _detect_by_best_class(
    call: Call, scores: Float32Array, boxes: Float32Array
) -> tuple[IndexArray, IndexArray]:
    """One suppression by each anchor's best score; an anchor that is kept reports its best classes."""
    best = scores[:, 1:].max(axis=1)
    candidates = np.flatnonzero(best > np.float32(call.scalar(11)))
    kept = suppress(candidates, best, boxes, int(call.scalar(8)), None, np.float32(call.scalar(12)))
    count = min(scores.shape[1] - 1, int(call.scalar(9)))
    labels = np.argsort(-scores[kept, 1:], axis=1, kind="stable")[:, :count] + 1
    return np.repeat(kept, count), labels.reshape(-1)


def _execute_postprocessing(call: Call) -> list[Array]:
    score_shape, box_shape, label_shape, count_shape = _postprocessing_shapes(call)
    scores, boxes = as_float32(call, 0), _decoded_boxes(call)
    out_scores = np.zeros(score_shape, dtype=np.float32)
    out_boxes = np.zeros(box_shape, dtype=np.float32)
    out_labels = np.zeros(label_shape, dtype=np.int32)
    out_counts = np.zeros(count_shape, dtype=np.int32)
    detect = _detect_by_class if bool(call.scalar(7)) else _detect_by_best_class
    label_of_first_class = 1 if bool(call.scalar(13)) else 0
    for batch in range(len(scores)):
        anchors, labels = detect(call, scores[batch], boxes[batch])
        count = len(anchors)
        out_scores[batch, :count] = scores[batch, anchors, labels]
        out_boxes[batch, :count] = boxes[batch, anchors]
        out_labels[batch, :count] = labels - 1 + label_of_first_class
        out_counts[batch] = count
    return [
        float_result(out_scores, call.outputs[0]),
        float_result(out_boxes, call.outputs[1]),
        out_labels,
        out_counts,
    ]


OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        type=OperationType.AXIS_ALIGNED_BBOX_TRANSFORM,
        validate=_validate_transform,
        shapes=_transform_shapes,
        execute=_execute_transform,
        doc="""Moves and scales boxes by predicted deltas and clips them to their image.

        Formula: centre' = centre + delta * side; side' = side * exp(delta); corners clipped to [0, image side].
        Inputs: 0: boxes [boxes, 4], each x1, y1, x2, y2; boxes may be 0. 1: deltas [boxes, classes * 4], each dx, dy, dw, dh.
            2: TENSOR_INT32 [boxes], each box's batch. 3: images [batches, 2], height and width.
        Outputs: 0: [boxes, classes * 4] of input 0's type.
        Quantisation: computed in float32. Boxes, images and output TENSOR_QUANT16_ASYMM, scale 0.125, zero point 0; deltas any.
        Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_QUANT16_ASYMM boxes with TENSOR_QUANT8_ASYMM deltas from level 3,
            TENSOR_QUANT8_ASYMM_SIGNED deltas from 4 (that type's own level).
        Stricter: known wrong ranks and quantisation are refused with the model.
        Source: NN HAL GenerateProposals.""",
    ),
    OperationContract(
        type=OperationType.BOX_WITH_NMS_LIMIT,
        validate=_validate_nms,
        shapes=None,
        execute=_execute_nms,
        doc="""Selects the best boxes of each class, suppressing those that overlap better ones.

        Formula: for each batch and each class but 0: among boxes with score > threshold the best is taken, the scores of the
            remaining ones are multiplied by a function of their overlap (intersection over union) with it, those that fall below
            the suppression threshold are dropped; and again. The best of all classes up to the limit remain. Kernel 0, hard: 0 if
            overlap >= overlap threshold, else 1. 1, linear: 1 - overlap there, else 1. 2, gaussian: exp(-overlap^2 / sigma).
        Inputs: 0: scores [boxes, classes], class 0 is background; boxes may be 0. 1: boxes [boxes, classes * 4], each x1, y1, x2,
            y2. 2: TENSOR_INT32 [boxes], each row's batch, rows of one batch together. 3: scalar score threshold. 4: INT32, limit
            for a batch, negative for none. 5: INT32, kernel. 6: scalar overlap threshold. 7: scalar sigma. 8: scalar suppression
            threshold. Scalars are FLOAT32, FLOAT16 for float16 scores.
        Outputs: 0: scores [selected]. 1: boxes [selected, 4]. 2: TENSOR_INT32 [selected], classes. 3: TENSOR_INT32 [selected],
            batches. Grouped by batch, then class, best first. Their number is known only after computing.
        Quantisation: computed in float32; boxes TENSOR_QUANT16_ASYMM, scale 0.125, zero point 0; output scores as input 0.
        Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_QUANT8_ASYMM from level 3, TENSOR_QUANT8_ASYMM_SIGNED from 4.
        Stricter: known wrong ranks, quantisation and an unknown constant kernel are refused with the model; all boxes must have
            their corners in order, not only the first of each row.
        Source: NN HAL GenerateProposals. With kernel 0 a suppressed box has score 0 and is dropped only where the suppression
            threshold is positive, as in the spec's kernel.""",
    ),
    OperationContract(
        type=OperationType.GENERATE_PROPOSALS,
        validate=_validate_proposals,
        shapes=None,
        execute=_execute_proposals,
        doc="""Proposes boxes from anchors' scores at every place of a feature map.

        Formula: anchors are shifted by place * stride and transformed by the deltas as in AXIS_ALIGNED_BBOX_TRANSFORM; the best by
            score continue; boxes not larger than the minimum or with their centre outside the image are dropped; hard suppression
            of overlaps of at least the threshold leaves the result.
        Inputs: 0: scores [batches, height, width, anchors], or [batches, anchors, height, width]. 1: deltas, as 0 with anchors * 4
            channels. 2: anchors [anchors, 4], each x1, y1, x2, y2. 3: images [batches, 2], height and width. 4, 5: scalar height
            and width strides. 6, 7: INT32, numbers of boxes before and after suppression, not positive for no limit. 8: scalar
            overlap threshold. 9: scalar minimum side. 10: BOOL, NCHW layout. Scalars are FLOAT32, FLOAT16 for float16 scores.
        Outputs: 0: scores [selected]. 1: boxes [selected, 4]. 2: TENSOR_INT32 [selected], batches. Grouped by batch, best first.
            Their number is known only after computing.
        Quantisation: computed in float32; anchors TENSOR_QUANT16_SYMM, images and boxes TENSOR_QUANT16_ASYMM, all of scale 0.125
            and zero point 0; output scores as input 0.
        Types: TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_QUANT8_ASYMM from level 3, TENSOR_QUANT8_ASYMM_SIGNED from 4.
        Stricter: known wrong ranks and quantisation are refused with the model.
        Looser: 0 boxes after suppression means no limit, as in the spec's text; its kernel returns none.
        Source: NN HAL GenerateProposals.""",
    ),
    OperationContract(
        type=OperationType.DETECTION_POSTPROCESSING,
        validate=_validate_postprocessing,
        shapes=_postprocessing_shapes,
        execute=_execute_postprocessing,
        doc="""Decodes boxes of a single-shot detector and suppresses overlapping ones.

        Formula: centre = anchor centre + anchor side * delta / scale; side = anchor side * exp(delta / scale). Then either hard
            suppression within each class, the best of all classes remaining; or one suppression by each anchor's best score, the
            kept anchors reporting their best classes.
        Inputs: 0: scores [batches, anchors, classes], class 0 is background. 1: deltas [batches, anchors, 4 or more], each dy, dx,
            dh, dw. 2: anchors [anchors, 4], each centre y, x, height, width. 3 to 6: scalar scales of dy, dx, dh, dw. 7: BOOL,
            suppression within each class. 8: INT32, limit of detections. 9: INT32, classes a detection, without 7. 10: INT32,
            limit within a class, with 7. 11: scalar score threshold. 12: scalar overlap threshold. 13: BOOL, labels count the
            background. Scalars are FLOAT32, FLOAT16 for float16 scores.
        Outputs, n being input 8 with 7, else input 8 * input 9: 0: scores [batches, n]. 1: boxes [batches, n, 4], each y1, x1, y2,
            x2. 2: TENSOR_INT32 [batches, n], labels. 3: TENSOR_INT32 [batches], numbers of detections. Values beyond are 0.
        Types: TENSOR_FLOAT32, TENSOR_FLOAT16 from level 3.
        Stricter: known wrong ranks and illegal constants are refused with the model.
        Source: NN HAL GenerateProposals.""",
    ),
)
