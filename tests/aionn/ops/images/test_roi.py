"""Claims about the operations on regions of interest that the conformance data leave open."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandLifeTime, OperandType, OperationType
from aionn.ops.images.roi import OPERATIONS
from aionn.ops.signature import Array, Call, Tensor
from tests.support.contracts import level_of

T = OperandType
F32 = T.TENSOR_FLOAT32
Q8, Q8S, Q16 = T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED, T.TENSOR_QUANT16_ASYMM
ALIGN, POOLING, HEATMAP = (
    OperationType.ROI_ALIGN,
    OperationType.ROI_POOLING,
    OperationType.HEATMAP_MAX_KEYPOINT,
)
CONTRACTS = {contract.type: contract for contract in OPERATIONS}


def operands_of(operation: OperationType, kind: OperandType) -> tuple[list[Operand], list[Operand]]:
    """Operands of a legal model; the extents are known."""
    boxes = Operand(Q16, (3, 4), 0.125) if kind in (Q8, Q8S) else Operand(kind, (3, 4))
    scale = 0.5 if kind in (Q8, Q8S) else 0.0
    scalar = T.FLOAT16 if kind == T.TENSOR_FLOAT16 else T.FLOAT32
    if operation == HEATMAP:
        keypoints = Operand(boxes.type, (3, 2, 2), boxes.scale)
        return [Operand(kind, (3, 5, 5, 2), scale), boxes, Operand(T.BOOL)], [
            Operand(kind, (3, 2), scale),
            keypoints,
        ]
    integers = [Operand(T.INT32)] * (2 if operation == ALIGN else 0)
    inputs = [
        Operand(kind, (1, 5, 5, 2), scale),
        boxes,
        Operand(T.TENSOR_INT32, (3,)),
        *[Operand(T.INT32), Operand(T.INT32), Operand(scalar), Operand(scalar)],
        *integers,
        Operand(T.BOOL),
    ]
    return inputs, [Operand(kind, (3, 2, 2, 2), scale)]


def run(operation: OperationType, kind: OperandType, *values: Any, zero_point: int = 0) -> list[Array]:
    inputs, outputs = operands_of(operation, kind)
    tensors: list[Tensor | None] = []
    for index, (operand, value) in enumerate(zip(inputs, values, strict=True)):
        point = zero_point if index == 0 else operand.zero_point
        tensors.append(Tensor(Operand(operand.type, (), operand.scale, point), np.asarray(value)))
    results = [Operand(o.type, (), o.scale, zero_point if i == 0 else 0) for i, o in enumerate(outputs)]
    contract = CONTRACTS[operation]
    call = Call(tensors, results)
    assert contract.shapes is not None
    shapes = contract.shapes(call)
    arrays = contract.execute(call)
    assert [a.shape for a in arrays] == [tuple(s) for s in shapes]
    return list(arrays)


def regions_in(rng: np.random.Generator, count: int, width: float, height: float) -> Array:
    x = np.sort(rng.uniform(0, width, (count, 2)), axis=1)
    y = np.sort(rng.uniform(0, height, (count, 2)), axis=1)
    return np.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], axis=1).astype(np.float32)


@pytest.mark.parametrize("operation", [ALIGN, POOLING, HEATMAP])
@pytest.mark.parametrize(("kind", "level"), [(F32, 3), (T.TENSOR_FLOAT16, 3), (Q8, 3), (Q8S, 4)])
def test_level_follows_the_type(operation: OperationType, kind: OperandType, level: int) -> None:
    assert level_of(operation, *operands_of(operation, kind)) == level


@pytest.mark.parametrize("operation", [ALIGN, POOLING, HEATMAP])
def test_boxes_of_another_scale_are_refused(operation: OperationType) -> None:
    inputs, outputs = operands_of(operation, Q8)
    inputs[1] = Operand(Q16, (3, 4), 0.25)
    with pytest.raises(
        InvalidModel, match=r"input 1: expected scale 0\.125 and zero point 0, got scale 0\.25"
    ):
        level_of(operation, inputs, outputs)


@pytest.mark.parametrize("operation", [ALIGN, POOLING, HEATMAP])
def test_boxes_that_do_not_have_four_coordinates_are_refused(operation: OperationType) -> None:
    inputs, outputs = operands_of(operation, F32)
    inputs[1] = Operand(F32, (3, 5))
    with pytest.raises(InvalidModel, match="input 1: expected extent 4 on axis 1"):
        level_of(operation, inputs, outputs)


@pytest.mark.parametrize("operation", [ALIGN, POOLING, HEATMAP])
def test_omitted_inputs_are_refused(operation: OperationType) -> None:
    inputs, outputs = operands_of(operation, F32)
    inputs[-1] = Operand(T.BOOL, lifetime=OperandLifeTime.NO_VALUE)
    with pytest.raises(InvalidModel, match=f"input {len(inputs) - 1}: expected a value"):
        level_of(operation, inputs, outputs)


def test_stride_of_another_float_type_is_refused() -> None:
    inputs, outputs = operands_of(ALIGN, T.TENSOR_FLOAT16)
    inputs[5] = Operand(T.FLOAT32)
    with pytest.raises(InvalidModel, match="input 5: expected FLOAT16, got FLOAT32"):
        level_of(ALIGN, inputs, outputs)


@pytest.mark.parametrize(("index", "value"), [(3, 0), (4, -1), (5, 0.0), (6, -1.0), (7, -1), (8, -2)])
def test_illegal_constants_are_refused_with_the_model(index: int, value: float) -> None:
    with pytest.raises(InvalidModel, match=f"input {index}: expected"):
        level_of(ALIGN, *operands_of(ALIGN, F32), {index: value})


def test_only_pooling_keeps_the_quantization() -> None:
    inputs, _ = operands_of(POOLING, Q8)
    other = [Operand(Q8, (3, 2, 2, 2), 0.25, 3)]
    with pytest.raises(InvalidModel, match="output 0: expected scale"):
        level_of(POOLING, inputs, other)
    assert level_of(ALIGN, operands_of(ALIGN, Q8)[0], other) == 3


@pytest.mark.parametrize(
    "box", [[-1, 0, 2, 2], [0, 0, 6, 2], [0, 0, 2, 5.5], [3, 0, 2, 2], [0, 3, 2, 2], [math.nan, 0, 1, 1]]
)
@pytest.mark.parametrize("operation", [ALIGN, POOLING])
def test_regions_outside_of_the_image_are_refused(operation: OperationType, box: list[float]) -> None:
    boxes = np.array([[0, 0, 1, 1], box], np.float32)
    sampling = (0, 0) if operation == ALIGN else ()
    image = np.zeros((1, 5, 5, 1), np.float32)
    with pytest.raises(InvalidArgument, match="region 1: expected a batch below 1"):
        run(operation, F32, image, boxes, [0, 0], 2, 2, 1.0, 1.0, *sampling, False)


@pytest.mark.parametrize("batch", [-1, 2])
def test_batch_out_of_range_is_refused(batch: int) -> None:
    boxes = np.array([[0, 0, 1, 1]], np.float32)
    with pytest.raises(InvalidArgument, match=f"region 0: expected a batch below 2.*got batch {batch}"):
        run(POOLING, F32, np.zeros((2, 5, 5, 1), np.float32), boxes, [batch], 2, 2, 1.0, 1.0, False)


def test_no_regions_give_an_empty_output() -> None:
    none = np.zeros((0, 4), np.float32)
    batches = np.zeros(0, np.int32)
    image = np.zeros((1, 5, 5, 3), np.float32)
    assert run(ALIGN, F32, image, none, batches, 2, 4, 1.0, 1.0, 0, 0, False)[0].shape == (0, 2, 4, 3)
    assert run(POOLING, F32, image, none, batches, 2, 4, 1.0, 1.0, False)[0].shape == (0, 2, 4, 3)
    assert run(HEATMAP, F32, image[:0], none, False)[1].shape == (0, 3, 2)


@pytest.mark.parametrize("seed", range(8))
def test_align_equals_a_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width = (int(n) for n in rng.integers(1, 9, 2))
    out_height, out_width = (int(n) for n in rng.integers(1, 4, 2))
    ratios = [int(n) for n in rng.integers(0, 4, 2)]
    image = rng.normal(size=(2, height, width, 3)).astype(np.float32)
    boxes = regions_in(rng, 4, width * 2.0, height * 4.0)
    batches = np.array([0, 0, 1, 1], np.int32)
    (got,) = run(ALIGN, F32, image, boxes, batches, out_height, out_width, 4.0, 2.0, *ratios, False)

    def value(batch: int, y: float, x: float) -> Array:
        y, x = min(y, height - 1), min(x, width - 1)
        y0, x0 = int(y), int(x)
        y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
        top = image[batch, y0, x0] * (1 - (x - x0)) + image[batch, y0, x1] * (x - x0)
        low = image[batch, y1, x0] * (1 - (x - x0)) + image[batch, y1, x1] * (x - x0)
        return np.asarray(top * (1 - (y - y0)) + low * (y - y0))

    for roi in range(4):
        x1, y1, x2, y2 = (float(v) for v in boxes[roi] / np.array([2, 4, 2, 4], np.float32))
        step_y, step_x = max(y2 - y1, 1) / out_height, max(x2 - x1, 1) / out_width
        count_y, count_x = ratios[0] or math.ceil(step_y), ratios[1] or math.ceil(step_x)
        for i in range(out_height):
            for j in range(out_width):
                samples = [
                    value(
                        int(batches[roi]),
                        y1 + step_y * (i + (a + 0.5) / count_y),
                        x1 + step_x * (j + (b + 0.5) / count_x),
                    )
                    for a in range(count_y)
                    for b in range(count_x)
                ]
                assert np.allclose(got[roi, i, j], np.mean(samples, axis=0), atol=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_pooling_equals_a_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width = (int(n) for n in rng.integers(1, 12, 2))
    out_height, out_width = (int(n) for n in rng.integers(1, 6, 2))
    image = rng.integers(0, 255, (1, height, width, 2), dtype=np.uint8)
    # Eighths are exact in float32, so the plain definition and the kernel round the same numbers.
    boxes = np.round(regions_in(rng, 5, width, height) * 8).astype(np.uint16)
    batches = np.zeros(5, np.int32)
    (got,) = run(POOLING, Q8, image, boxes, batches, out_height, out_width, 1.0, 1.0, False, zero_point=9)
    for roi in range(5):
        x1, y1, x2, y2 = (math.floor(v / 8 + 0.5) for v in boxes[roi].tolist())
        step_y = np.float32(y2 - y1 + 1) / np.float32(out_height)
        step_x = np.float32(x2 - x1 + 1) / np.float32(out_width)
        for i in range(out_height):
            for j in range(out_width):
                rows = slice(
                    math.floor(step_y * np.float32(i) + y1), math.ceil(step_y * np.float32(i + 1) + y1)
                )
                columns = slice(
                    math.floor(step_x * np.float32(j) + x1), math.ceil(step_x * np.float32(j + 1) + x1)
                )
                part = image[0, rows, columns].reshape(-1, 2)
                expected = part.max(axis=0) if len(part) else np.array([9, 9])
                assert got[roi, i, j].tolist() == expected.tolist()


@pytest.mark.parametrize("operation", [ALIGN, POOLING])
def test_layouts_agree(operation: OperationType) -> None:
    rng = np.random.default_rng(3)
    image = rng.normal(size=(2, 6, 5, 3)).astype(np.float32)
    rest = (regions_in(rng, 4, 5, 6), [0, 1, 1, 1], 3, 2, 1.0, 1.0, *((2, 0) if operation == ALIGN else ()))
    (last,) = run(operation, F32, image, *rest, False)
    (first,) = run(operation, F32, image.transpose(0, 3, 1, 2), *rest, True)
    assert np.array_equal(first.transpose(0, 2, 3, 1), last)


@pytest.mark.parametrize(("kind", "dtype", "zero_point"), [(Q8, np.uint8, 100), (Q8S, np.int8, -28)])
def test_quantized_align_is_close_to_float_align(
    kind: OperandType, dtype: type[np.integer[Any]], zero_point: int
) -> None:
    rng = np.random.default_rng(4)
    low = int(np.iinfo(dtype).min)
    image = rng.integers(low, low + 255, (1, 6, 6, 2)).astype(dtype)
    boxes = np.round(regions_in(rng, 6, 6, 6) * 8).astype(np.uint16)
    rest = (np.zeros(6, np.int32), 2, 2, 1.0, 1.0, 2, 2, False)
    (got,) = run(ALIGN, kind, image, boxes, *rest, zero_point=zero_point)
    real = (image.astype(np.float32) - zero_point) * np.float32(0.5)
    (expected,) = run(ALIGN, F32, real, boxes.astype(np.float32) / 8, *rest)
    assert np.abs((got.astype(np.float32) - zero_point) * 0.5 - expected).max() <= 1.0


def test_keypoint_of_a_parabola_is_its_top() -> None:
    y, x = np.mgrid[0:7, 0:7].astype(np.float32)
    heat = 2 - (x - 3.25) ** 2 - 2 * (y - 2.625) ** 2
    boxes = np.array([[10, 20, 24, 34]], np.float32)
    score, keypoint = run(HEATMAP, F32, heat[None, :, :, None], boxes, False)
    assert np.allclose(score, 2, atol=1e-5)
    assert np.allclose(keypoint, [[[10 + 3.75 * 2, 20 + 3.125 * 2]]], atol=1e-4)


def test_flat_heatmap_has_its_keypoint_in_the_first_pixel() -> None:
    heat = np.full((1, 4, 4, 1), 0.5, np.float32)
    score, keypoint = run(HEATMAP, F32, heat, np.array([[0, 0, 4, 4]], np.float32), False)
    assert score.tolist() == [[0.5]]
    assert keypoint.tolist() == [[[0.5, 0.5]]]


def test_keypoint_moves_by_one_and_a_half_pixels_at_most() -> None:
    y, x = np.mgrid[-2:3, -2:3].astype(np.float32)
    # A ridge along (2, 1) whose top lies 4 to the right and 2 down, while the highest pixel is the centre.
    along = 2 * x + y
    heat = 0.2 * along - 0.01 * along**2 - (x - 2 * y) ** 2
    heat[(np.abs(x) > 1) | (np.abs(y) > 1)] = -9
    _, keypoint = run(HEATMAP, F32, heat[None, :, :, None], np.array([[0, 0, 5, 5]], np.float32), False)
    assert np.allclose(keypoint, [[[2 + 1.5 + 0.5, 2 + 0.75 + 0.5]]], atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 4, 5, 1), (1, 1, 1, 1)])
def test_heatmap_must_be_square_and_of_two_pixels_at_least(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="expected square heatmaps of at least 2 pixels"):
        run(HEATMAP, F32, np.zeros(shape, np.float32), np.zeros((1, 4), np.float32), False)


def test_heatmap_box_with_corners_out_of_order_is_refused() -> None:
    boxes = np.array([[0, 0, 1, 1], [2, 0, 1, 1]], np.float32)
    with pytest.raises(InvalidArgument, match="input 1, box 1: expected x1 <= x2"):
        run(HEATMAP, F32, np.zeros((2, 3, 3, 1), np.float32), boxes, False)


def test_heatmap_layouts_agree() -> None:
    rng = np.random.default_rng(6)
    heat = rng.normal(size=(3, 5, 5, 2)).astype(np.float32)
    boxes = regions_in(rng, 3, 9, 9)
    last = run(HEATMAP, F32, heat, boxes, False)
    first = run(HEATMAP, F32, heat.transpose(0, 3, 1, 2), boxes, True)
    assert all(np.array_equal(a, b) for a, b in zip(first, last, strict=True))
