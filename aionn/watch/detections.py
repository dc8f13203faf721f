"""A model's answer in words and boxes: the best class, boxes of detectors, non-maximum suppression, labels; pure.

Owns the arithmetic of the usual output layouts. Refuses to own models: the caller knows which layout an output has.

Boxes are rows of float32 ``[left, top, right, bottom]`` in shares of the picture: 0 is its left or upper edge, 1 the right or lower
one. So they need no knowledge of the size at which a picture is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument

__all__ = [
    "Finding",
    "best_class",
    "center_boxes",
    "labelled",
    "plain_findings",
    "non_maximum_suppression",
    "postprocessed_boxes",
]

Array = npt.NDArray[Any]

CANDIDATES_MAX = 1000
"""Boxes that take part in the suppression, the most certain ones: it takes time by the square of their number."""

LETTERS_MAX = 80
"""Letters of a label; a longer one would cover the picture."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that a model found.

    Attributes:
        label: Its class.
        score: Its certainty, usually from 0 to 1.
        box: Its place, see above; None for the whole picture.
    """

    label: str
    score: float
    box: tuple[float, float, float, float] | None = None


def plain_findings(findings: Sequence[Finding], most: int) -> tuple[Finding, ...]:
    """The first findings with numbers that JSON has: a score that is not finite becomes 0, and a box with such an edge is left out.

    Args:
        findings: As an application made them, also of numpy's numbers.
        most: The most that are returned.
    """
    found = []
    for finding in findings[:most]:
        score = float(finding.score)
        box = None
        if finding.box is not None:
            left, top, right, bottom = (float(edge) for edge in finding.box)
            box = left, top, right, bottom
        is_whole = box is not None and all(map(math.isfinite, box))
        label = str(finding.label)[:LETTERS_MAX]
        found.append(Finding(label, score if math.isfinite(score) else 0.0, box if is_whole else None))
    return tuple(found)


def _label(index: int, labels: Sequence[str]) -> str:
    name = labels[index] if 0 <= index < len(labels) else f"class {index}"
    return name if len(name) <= LETTERS_MAX else name[: LETTERS_MAX - 1] + "…"


def best_class(
    scores: Array, labels: Sequence[str] = (), *, scale: float = 0.0, zero_point: int = 0
) -> Finding:
    """The class with the highest score.

    Args:
        scores: One for each class, of any shape.
        labels: Names of the classes; one without a name is called by its number.
        scale: Quantisation scale of the scores; 0 for scores that are real numbers.
        zero_point: Quantisation zero point.

    Raises:
        InvalidArgument: There are no scores.
    """
    if not scores.size:
        raise InvalidArgument("best_class: expected scores, got an empty array")
    flat = scores.reshape(-1)
    index = int(flat.argmax())
    score = float(flat[index])
    return Finding(_label(index, labels), (score - zero_point) * scale if scale else score)


def center_boxes(boxes: Array) -> npt.NDArray[np.float32]:
    """Boxes ``[x of the centre, y of the centre, width, height]``, as the YOLO family returns, by their edges.

    Args:
        boxes: ``[boxes, 4]``.

    Raises:
        InvalidArgument: The shape is another one.
    """
    _check_boxes(boxes, "center_boxes")
    half = boxes[:, 2:] / 2
    return np.concatenate((boxes[:, :2] - half, boxes[:, :2] + half), axis=1).astype(np.float32)


def non_maximum_suppression(
    boxes: Array,
    scores: Array,
    *,
    score_min: float = 0.5,
    overlap_max: float = 0.5,
    boxes_max: int = 50,
) -> npt.NDArray[np.intp]:
    """The indexes of the boxes that are left when each one that overlaps a more certain one is left out.

    Args:
        boxes: ``[boxes, 4]`` by their edges.
        scores: ``[boxes]``. Boxes of different classes that must not suppress each other are given in separate calls.
        score_min: Boxes with a lower score are left out.
        overlap_max: Two boxes whose intersection over union is greater are the same thing.
        boxes_max: The most that are left.

    Returns:
        The indexes, the most certain box first.

    Raises:
        InvalidArgument: The shapes do not fit.
    """
    _check_boxes(boxes, "non_maximum_suppression")
    if scores.shape != boxes.shape[:1]:
        raise InvalidArgument(
            f"non_maximum_suppression: expected {len(boxes)} scores, got shape {list(scores.shape)}"
        )
    # Comparisons with a NaN are false: a damaged box or score is left out.
    usable = (scores >= score_min) & np.isfinite(boxes).all(axis=1)
    order = np.flatnonzero(usable)
    order = order[np.argsort(-scores[order].astype(np.float64), kind="stable")][:CANDIDATES_MAX]
    left, top, right, bottom = boxes[order].astype(np.float64).T
    areas = np.maximum(right - left, 0) * np.maximum(bottom - top, 0)
    is_left = np.ones(len(order), bool)
    kept: list[int] = []
    for i in range(len(order)):
        if not is_left[i]:
            continue
        kept.append(i)
        if len(kept) == boxes_max:
            break
        wide = np.minimum(right[i], right) - np.maximum(left[i], left)
        tall = np.minimum(bottom[i], bottom) - np.maximum(top[i], top)
        shared = np.maximum(wide, 0) * np.maximum(tall, 0)
        is_left &= shared <= overlap_max * (areas[i] + areas - shared)
    return order[kept]


def labelled(boxes: Array, scores: Array, classes: Array, labels: Sequence[str] = ()) -> tuple[Finding, ...]:
    """The findings of some boxes, in their order; edges beyond the picture are moved to its edge.

    Args:
        boxes: ``[boxes, 4]`` by their edges.
        scores: ``[boxes]``.
        classes: ``[boxes]``, numbers of classes.
        labels: Names of the classes.

    Raises:
        InvalidArgument: The shapes do not fit.
    """
    _check_boxes(boxes, "labelled")
    if not len(boxes) == len(scores) == len(classes):
        raise InvalidArgument(
            f"labelled: expected as many scores and classes as boxes, got {len(boxes)}, {len(scores)} and {len(classes)}"
        )
    found = []
    for box, score, number in zip(np.clip(boxes, 0, 1), scores, classes):
        left, top, right, bottom = (float(edge) for edge in box)
        found.append(Finding(_label(int(number), labels), float(score), (left, top, right, bottom)))
    return tuple(found)


def postprocessed_boxes(
    outputs: Sequence[Array], labels: Sequence[str] = (), *, score_min: float = 0.5
) -> tuple[Finding, ...]:
    """The findings of a detector that ends in TensorFlow Lite's ``TFLite_Detection_PostProcess``.

    Args:
        outputs: Boxes ``[1, n, 4]`` as top, left, bottom, right; classes ``[1, n]``; scores ``[1, n]``; their number ``[1]``.
        labels: Names of the classes.
        score_min: Findings with a lower score are left out.

    Raises:
        InvalidArgument: The outputs have other shapes.
    """
    shapes = [output.shape for output in outputs]
    if len(outputs) != 4 or len(shapes[0]) != 3 or shapes[0][::2] != (1, 4) or outputs[3].size != 1:
        raise InvalidArgument(
            f"postprocessed_boxes: expected [1, n, 4], [1, n], [1, n] and [1], got {shapes}"
        )
    limit = float(outputs[3].reshape(-1)[0])
    count = int(np.clip(np.nan_to_num(limit), 0, shapes[0][1]))
    top, left, bottom, right = outputs[0][0, :count].T
    classes, scores = outputs[1].reshape(-1)[:count], outputs[2].reshape(-1)[:count]
    boxes = np.stack((left, top, right, bottom), axis=1)
    kept = np.flatnonzero((scores >= score_min) & np.isfinite(boxes).all(axis=1) & np.isfinite(classes))
    return labelled(boxes[kept], scores[kept], classes[kept], labels)


def _check_boxes(boxes: Array, where: str) -> None:
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise InvalidArgument(f"{where}: expected boxes of shape [boxes, 4], got {list(boxes.shape)}")
