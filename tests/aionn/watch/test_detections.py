"""Boxes, labels and suppression, against the definition and against hostile outputs."""

from __future__ import annotations

import numpy as np
import pytest

from aionn.errors import InvalidArgument
from aionn.watch import (
    Finding,
    best_class,
    center_boxes,
    labelled,
    non_maximum_suppression,
    postprocessed_boxes,
)


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    wide = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    tall = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    return wide * tall / (sum(areas) - wide * tall)


def by_definition(boxes: np.ndarray, scores: np.ndarray, score_min: float, overlap_max: float) -> list[int]:
    kept: list[int] = []
    for i in sorted(range(len(boxes)), key=lambda i: -scores[i]):
        if scores[i] >= score_min and all(overlap(boxes[i], boxes[k]) <= overlap_max for k in kept):
            kept.append(i)
    return kept


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(5))
def test_suppression_is_its_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    corners = rng.random((120, 2))
    boxes = np.concatenate((corners, corners + rng.uniform(0.05, 0.5, (120, 2))), axis=1)
    scores = rng.random(120)
    for score_min, overlap_max in ((0.5, 0.5), (0.0, 0.2), (0.3, 0.9)):
        found = non_maximum_suppression(
            boxes, scores, score_min=score_min, overlap_max=overlap_max, boxes_max=1000
        )
        assert found.tolist() == by_definition(boxes, scores, score_min, overlap_max)


def test_suppression_leaves_at_most_the_wanted_number() -> None:
    boxes = np.array([[i, 0, i + 0.5, 1] for i in range(9)], np.float32)
    found = non_maximum_suppression(boxes, np.linspace(0.5, 1, 9), boxes_max=3)
    assert found.tolist() == [8, 7, 6]


def test_suppression_leaves_out_what_is_not_a_number() -> None:
    boxes = np.array([[0, 0, 1, 1], [np.nan, 0, 1, 1], [5, 5, np.inf, 6], [2, 2, 3, 3]], np.float32)
    scores = np.array([0.9, 0.9, 0.9, np.nan], np.float32)
    assert non_maximum_suppression(boxes, scores).tolist() == [0]
    assert non_maximum_suppression(np.zeros((0, 4)), np.zeros(0)).tolist() == []


@pytest.mark.parametrize(("boxes", "scores"), [((3, 5), 3), ((3, 4), 2), ((12,), 3)])
def test_suppression_refuses_other_shapes(boxes: tuple[int, ...], scores: int) -> None:
    with pytest.raises(InvalidArgument, match="non_maximum_suppression: expected"):
        non_maximum_suppression(np.zeros(boxes), np.zeros(scores))


def test_center_boxes_become_edges() -> None:
    assert center_boxes(np.array([[0.5, 0.4, 0.2, 0.4]])).tolist() == [pytest.approx([0.4, 0.2, 0.6, 0.6])]


def test_best_class_is_dequantised_and_named() -> None:
    scores = np.array([[-128, 127, 0]], np.int8)
    found = best_class(scores, ("a", "b"), scale=1 / 256, zero_point=-128)
    assert found == Finding("b", 255 / 256)
    assert best_class(np.array([0.0, 0.0, 0.7]), ("a",)).label == "class 2"
    assert len(best_class(np.array([1.0]), ("x" * 500,)).label) == 80
    with pytest.raises(InvalidArgument, match="empty"):
        best_class(np.zeros(0))


def test_labelled_boxes_stay_in_the_picture() -> None:
    (found,) = labelled(np.array([[-1, 0.25, 0.5, 9]]), np.array([0.5]), np.array([1.0]), ("a", "b"))
    assert found == Finding("b", 0.5, (0.0, 0.25, 0.5, 1.0))
    with pytest.raises(InvalidArgument, match="as many"):
        labelled(np.zeros((1, 4)), np.zeros(2), np.zeros(1))


def test_postprocessed_boxes_are_read_by_their_number_and_score() -> None:
    boxes = np.array([[[0.1, 0.2, 0.3, 0.4], [0, 0, 1, 1], [0, 0, 1, 1]]], np.float32)
    outputs = [boxes, np.array([[1.0, 0.0, 0.0]]), np.array([[0.9, 0.4, 0.9]]), np.array([2.0])]
    (found,) = postprocessed_boxes(outputs, ("a", "b"))
    assert found.label == "b" and found.box == pytest.approx((0.2, 0.1, 0.4, 0.3))


@pytest.mark.parametrize("count", [np.nan, np.inf, -5.0, 1e9])
def test_postprocessed_boxes_survive_any_number(count: float) -> None:
    boxes = np.full((1, 3, 4), np.nan, np.float32)
    classes, scores = np.full((1, 3), np.inf), np.full((1, 3), 1.0)
    assert postprocessed_boxes([boxes, classes, scores, np.array([count])]) == ()


def test_postprocessed_boxes_refuse_other_outputs() -> None:
    with pytest.raises(InvalidArgument, match="postprocessed_boxes: expected"):
        postprocessed_boxes([np.zeros((1, 3, 5)), np.zeros(3), np.zeros(3), np.zeros(1)])
