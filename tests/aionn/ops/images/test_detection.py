"""Claims about the operations on detected boxes that the conformance data leave open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandLifeTime, OperandType, OperationType
from aionn.ops.images.boxes import overlaps_of, suppress
from aionn.ops.images.detection import OPERATIONS
from aionn.ops.signature import Array, Call, Tensor
from tests.support.contracts import level_of

T = OperandType
F32, F16, I32 = T.TENSOR_FLOAT32, T.TENSOR_FLOAT16, T.TENSOR_INT32
Q8, Q8S, Q16 = T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED, T.TENSOR_QUANT16_ASYMM
TRANSFORM = OperationType.AXIS_ALIGNED_BBOX_TRANSFORM
NMS = OperationType.BOX_WITH_NMS_LIMIT
PROPOSALS = OperationType.GENERATE_PROPOSALS
POST = OperationType.DETECTION_POSTPROCESSING
CONTRACTS = {contract.type: contract for contract in OPERATIONS}
EIGHTH = 0.125


def operands_of(operation: OperationType, kind: OperandType) -> tuple[list[Operand], list[Operand]]:
    """Operands of a legal model of unknown extents; ``kind`` is the type of scores or deltas."""
    is_quantized = kind in (Q8, Q8S)
    scores = Operand(kind, (), 0.5 if is_quantized else 0.0)
    boxes = Operand(Q16, (), EIGHTH) if is_quantized else Operand(kind)
    anchors = Operand(T.TENSOR_QUANT16_SYMM, (), EIGHTH) if is_quantized else Operand(kind)
    real = Operand(T.FLOAT16 if kind == F16 else T.FLOAT32)
    integer, flag, indexes = Operand(T.INT32), Operand(T.BOOL), Operand(I32)
    match operation:
        case OperationType.AXIS_ALIGNED_BBOX_TRANSFORM:
            return [boxes, scores, indexes, boxes], [boxes]
        case OperationType.BOX_WITH_NMS_LIMIT:
            scalars = [real, integer, integer, real, real, real]
            return [scores, boxes, indexes, *scalars], [scores, boxes, indexes, indexes]
        case OperationType.GENERATE_PROPOSALS:
            scalars = [real, real, integer, integer, real, real, flag]
            return [scores, scores, anchors, boxes, *scalars], [scores, boxes, indexes]
    scalars = [real, real, real, real, flag, integer, integer, integer, real, real, flag]
    return [scores, scores, boxes, *scalars], [scores, boxes, indexes, indexes]


def run(operation: OperationType, kind: OperandType, *values: Any) -> list[Array]:
    inputs, outputs = operands_of(operation, kind)
    call = Call([Tensor(o, np.asarray(v)) for o, v in zip(inputs, values, strict=True)], outputs)
    contract = CONTRACTS[operation]
    arrays = list(contract.execute(call))
    if contract.shapes is not None:
        assert [a.shape for a in arrays] == [tuple(s) for s in contract.shapes(call)]
    return arrays


def floats(*values: object) -> Array:
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize("operation", [TRANSFORM, NMS, PROPOSALS])
@pytest.mark.parametrize(("kind", "level"), [(F32, 3), (F16, 3), (Q8, 3), (Q8S, 4)])
def test_level_follows_the_type(operation: OperationType, kind: OperandType, level: int) -> None:
    assert level_of(operation, *operands_of(operation, kind)) == level


@pytest.mark.parametrize(("kind", "is_legal"), [(F32, True), (F16, True), (Q8, False)])
def test_postprocessing_takes_floats_only(kind: OperandType, is_legal: bool) -> None:
    if is_legal:
        assert level_of(POST, *operands_of(POST, kind)) == 3
    else:
        with pytest.raises(InvalidModel, match="input 0: expected TENSOR_FLOAT32 or TENSOR_FLOAT16"):
            level_of(POST, *operands_of(POST, kind))


@pytest.mark.parametrize(("operation", "index"), [(TRANSFORM, 3), (NMS, 1), (PROPOSALS, 2), (PROPOSALS, 3)])
def test_boxes_of_another_scale_are_refused(operation: OperationType, index: int) -> None:
    inputs, outputs = operands_of(operation, Q8)
    inputs[index] = Operand(inputs[index].type, (), 0.25)
    with pytest.raises(InvalidModel, match=rf"input {index}: expected scale 0\.125 and zero point 0"):
        level_of(operation, inputs, outputs)


@pytest.mark.parametrize("operation", [NMS, PROPOSALS])
def test_scores_of_another_quantization_are_refused(operation: OperationType) -> None:
    inputs, outputs = operands_of(operation, Q8)
    outputs[0] = Operand(Q8, (), 0.5, 1)
    with pytest.raises(InvalidModel, match=r"output 0: expected scale 0\.5 and zero point 0"):
        level_of(operation, inputs, outputs)


@pytest.mark.parametrize("operation", [TRANSFORM, NMS, PROPOSALS, POST])
def test_omitted_inputs_are_refused(operation: OperationType) -> None:
    inputs, outputs = operands_of(operation, F32)
    inputs[2] = Operand(inputs[2].type, lifetime=OperandLifeTime.NO_VALUE)
    with pytest.raises(InvalidModel, match="input 2: expected a value"):
        level_of(operation, inputs, outputs)


@pytest.mark.parametrize("operation", [TRANSFORM, NMS, PROPOSALS, POST])
def test_wrong_ranks_are_refused_where_they_are_known(operation: OperationType) -> None:
    inputs, outputs = operands_of(operation, F32)
    inputs[0] = Operand(F32, (2, 2, 2, 2, 2))
    with pytest.raises(InvalidModel, match="input 0: expected rank"):
        level_of(operation, inputs, outputs)


@pytest.mark.parametrize(
    ("operation", "index", "value"), [(NMS, 5, 3), (POST, 3, 0.0), (POST, 8, 0), (POST, 11, -0.5)]
)
def test_illegal_constants_are_refused_with_the_model(
    operation: OperationType, index: int, value: float
) -> None:
    with pytest.raises(InvalidModel, match=f"input {index}: expected"):
        level_of(operation, *operands_of(operation, F32), {index: value})


def test_transform_moves_scales_and_clips() -> None:
    boxes = floats([10, 10, 20, 30])
    deltas = floats([0.5, -0.25, 0, np.log(2), 100, 100, 0, 0])
    (got,) = run(TRANSFORM, F32, boxes, deltas, [0], floats([40, 22]))
    # Moved to the centre (20, 15), 10 wide and 40 high, in an image 22 wide and 40 high; the other far out.
    assert np.allclose(got, [[15, 0, 22, 35, 22, 40, 22, 40]], atol=1e-5)


def test_transform_of_no_boxes_is_empty() -> None:
    (got,) = run(TRANSFORM, F32, np.zeros((0, 4)), np.zeros((0, 8)), np.zeros(0, np.int32), floats([4, 4]))
    assert got.shape == (0, 8)
    assert got.dtype == np.float32


@pytest.mark.parametrize(
    ("box", "batch"), [([2, 0, 1, 1], 0), ([0, 2, 1, 1], 0), ([0, 0, 1, 1], 1), ([0, 0, 1, 1], -1)]
)
def test_transform_refuses_illegal_boxes(box: list[int], batch: int) -> None:
    with pytest.raises(InvalidArgument, match="box 0: expected a batch below 1"):
        run(TRANSFORM, F32, floats(box), np.zeros((1, 4), np.float32), [batch], floats([4, 4]))


def nms(scores: Array, boxes: Array, batches: object, **arguments: Any) -> list[Array]:
    given = {"least": 0.0, "limit": -1, "kernel": 0, "overlap": 0.5, "sigma": 0.5, "drop": 0.1, **arguments}
    return run(NMS, F32, scores, boxes, batches, *given.values())


PAIR = floats([0, 0, 4, 4, 0, 0, 4, 4], [0, 0, 4, 3, 0, 0, 4, 3])
"""Two boxes with an overlap of 3/4, the same for background and class 1."""


def test_hard_suppression_drops_what_overlaps() -> None:
    scores, boxes, classes, batches = nms(floats([0, 0.9], [0, 0.8]), PAIR, [0, 0])
    assert (scores.tolist(), boxes.tolist()) == (floats(0.9).tolist(), [[0, 0, 4, 4]])
    assert (classes.tolist(), batches.tolist()) == ([1], [0])


def test_soft_suppression_weakens_what_overlaps() -> None:
    scores = floats([0, 0.9], [0, 0.8])
    assert np.allclose(nms(scores, PAIR, [0, 0], kernel=1)[0], [0.9, 0.8 * 0.25])
    gaussian = nms(scores, PAIR, [0, 0], kernel=2, sigma=0.75)[0]
    assert np.allclose(gaussian, [0.9, 0.8 * np.exp(-(0.75**2) / 0.75)])
    assert scores.tolist() == floats([0, 0.9], [0, 0.8]).tolist(), "the input stays as it was"


def test_batches_are_suppressed_apart() -> None:
    scores, _, _, batches = nms(floats([0, 0.8], [0, 0.9]), PAIR, [3, 5])
    assert np.allclose(scores, [0.8, 0.9])
    assert batches.tolist() == [3, 5]


def test_limit_holds_for_each_batch_over_all_classes() -> None:
    rng = np.random.default_rng(1)
    corner = rng.uniform(0, 1000, (10, 3, 2)).astype(np.float32)
    boxes = np.concatenate([corner, corner + 1], axis=2).reshape(10, 12)
    scores = rng.uniform(0.2, 1, (10, 3)).astype(np.float32)
    got, _, classes, batches = nms(scores, boxes, [0] * 5 + [1] * 5, limit=3)
    assert batches.tolist() == [0, 0, 0, 1, 1, 1]
    for batch in (0, 1):
        best = np.sort(scores[batch * 5 : batch * 5 + 5, 1:].reshape(-1))[-3:]
        assert np.array_equal(np.sort(got[batches == batch]), best)
        assert (np.diff(classes[batches == batch]) >= 0).all(), "grouped by class"


def test_nothing_above_the_threshold_gives_no_boxes() -> None:
    scores, boxes, classes, batches = nms(floats([1, 0.1], [1, 0.2]), PAIR, [0, 0], least=0.2)
    assert [a.shape for a in (scores, boxes, classes, batches)] == [(0,), (0, 4), (0,), (0,)]


def test_no_boxes_in_give_no_boxes_out() -> None:
    empty = nms(np.zeros((0, 2), np.float32), np.zeros((0, 8), np.float32), np.zeros(0, np.int32))
    assert [a.shape for a in empty] == [(0,), (0, 4), (0,), (0,)]


def test_scores_without_a_class_beside_the_background_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="expected a background and at least one class"):
        nms(floats([0.5]), floats([0, 0, 1, 1]), [0])


def test_unknown_kernel_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"input 5: expected 0 \(hard\).*got 7"):
        nms(floats([0, 0.9]), PAIR[:1], [0], kernel=7)


def plain_overlap(a: Array, b: Array) -> float:
    width = max(min(a[2], b[2]) - max(a[0], b[0]), 0)
    height = max(min(a[3], b[3]) - max(a[1], b[1]), 0)
    both = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return float(width * height / both)


@pytest.mark.parametrize("seed", range(6))
def test_hard_suppression_equals_a_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, 10, (30, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(1, 8, (30, 2))], axis=1).astype(np.float32)
    scores = rng.permutation(30).astype(np.float32)
    got = suppress(np.arange(30), scores, boxes, -1, None, np.float32(0.4))
    kept: list[int] = []
    for index in np.argsort(-scores):
        if all(plain_overlap(boxes[index], boxes[other]) < 0.4 for other in kept):
            kept.append(int(index))
    assert got.tolist() == kept


def test_order_among_equal_scores_is_that_of_exchanges_in_place() -> None:
    boxes = floats([0, 0, 1, 1], [0, 0, 1, 1], [5, 5, 6, 6], [7, 7, 8, 8])
    scores = floats(0.5, 0.5, 0.5, 0.5)
    # The second box falls; the last one takes its place and so comes before the third.
    assert suppress(np.arange(4), scores, boxes, -1, None, np.float32(0.5)).tolist() == [0, 3, 2]


def test_overlap_of_boxes_without_area_keeps_both() -> None:
    point = floats(1, 1, 1, 1)
    assert np.isnan(overlaps_of(point, point[None])).all()
    kept = suppress(np.arange(2), floats(2, 1), np.stack([point, point]), -1, None, np.float32(0.5))
    assert kept.tolist() == [0, 1]


def proposals(scores: Array, **arguments: Any) -> list[Array]:
    given = {"before": -1, "after": -1, "overlap": 0.5, "least": 0.0, **arguments}
    batches, height, width, anchors = scores.shape
    deltas = np.zeros((batches, height, width, anchors * 4), np.float32)
    shapes = np.tile(floats([0, 0, 4, 4]), (anchors, 1))
    sizes = np.tile(floats([100, 100]), (batches, 1))
    return run(PROPOSALS, F32, scores, deltas, shapes, sizes, 10.0, 20.0, *given.values(), False)


def test_anchors_are_shifted_by_the_strides() -> None:
    scores, boxes, batches = proposals(np.array([0.3, 0.1, 0.2, 0.4], np.float32).reshape(1, 2, 2, 1))
    assert np.allclose(scores, [0.4, 0.3, 0.2, 0.1])
    assert boxes.tolist() == [[20, 10, 24, 14], [0, 0, 4, 4], [0, 10, 4, 14], [20, 0, 24, 4]]
    assert batches.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("before", "after", "count"), [(2, -1, 2), (-1, 3, 3), (0, 0, 4), (3, 1, 1)])
def test_numbers_that_are_not_positive_set_no_limit(before: int, after: int, count: int) -> None:
    scores = np.array([0.3, 0.1, 0.2, 0.4], np.float32).reshape(1, 2, 2, 1)
    assert len(proposals(scores, before=before, after=after)[0]) == count


def test_small_boxes_are_not_proposed() -> None:
    assert len(proposals(np.ones((2, 2, 2, 1), np.float32), least=4.0)[0]) == 0
    _, boxes, batches = proposals(np.ones((2, 2, 2, 1), np.float32), least=3.9)
    assert len(boxes) == 8
    assert batches.tolist() == [0] * 4 + [1] * 4


def test_deltas_must_fit_the_scores() -> None:
    values = [np.zeros((1, 2, 2, 3)), np.zeros((1, 2, 2, 11)), np.zeros((3, 4)), floats([9, 9])]
    with pytest.raises(InvalidArgument, match=r"input 1: expected shape \[1, 2, 2, 12\]"):
        run(PROPOSALS, F32, *values, 1.0, 1.0, 0, 0, 0.5, 0.0, False)


def postprocess(scores: Array, **arguments: Any) -> list[Array]:
    given = {
        "regular": True,
        "limit": 3,
        "classes": 1,
        "limit_in_class": 2,
        "least": 0.0,
        "overlap": 0.5,
        "background": False,
        **arguments,
    }
    count = scores.shape[1]
    anchors = np.array([[5 * i, 5 * i, 2, 4] for i in range(count)], np.float32)
    deltas = np.zeros((len(scores), count, 6), np.float32)
    return run(POST, F32, scores, deltas, anchors, 1.0, 1.0, 1.0, 1.0, *given.values())


def test_detections_beyond_the_number_are_zero() -> None:
    scores, boxes, labels, counts = postprocess(floats([[0, 0.5, 0.4]]), limit=4)
    assert counts.tolist() == [2]
    assert np.allclose(scores, [[0.5, 0.4, 0, 0]])
    assert labels.tolist() == [[0, 1, 0, 0]]
    assert boxes[0].tolist() == [[-1, -2, 1, 2], [-1, -2, 1, 2], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_background_in_the_labels_shifts_them() -> None:
    scores = floats([[0, 0.5, 0.4]])
    assert postprocess(scores, background=True)[2].tolist() == [[1, 2, 0]]
    assert postprocess(scores, regular=False, classes=2, background=True)[2][0, :2].tolist() == [1, 2]


def test_limit_within_a_class_holds() -> None:
    scores, _, _, counts = postprocess(floats([[0, 0.9], [0, 0.8], [0, 0.7]]), limit_in_class=2)
    assert counts.tolist() == [2]
    assert np.allclose(scores, [[0.9, 0.8, 0]])


def test_kept_anchor_reports_its_best_classes() -> None:
    values = floats([[0.9, 0.1, 0.5, 0.3], [0.9, 0.2, 0.1, 0.6]])
    scores, _, labels, counts = postprocess(values, regular=False, limit=2, classes=2)
    assert counts.tolist() == [4]
    assert np.allclose(scores, [[0.6, 0.2, 0.5, 0.3]])
    assert labels.tolist() == [[2, 0, 1, 2]]


@pytest.mark.parametrize("arguments", [{"limit": 0}, {"limit_in_class": 0}, {"regular": False, "classes": 0}])
def test_limits_that_are_not_positive_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="expected a positive number, got 0"):
        postprocess(floats([[0, 0.5]]), **arguments)
