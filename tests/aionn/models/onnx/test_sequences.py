"""Sequences within a graph become their values; where that is not possible the reason is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.models.onnx.encoding import node
from aionn.models.onnx.schema import NodeProto
from tests.aionn.models.onnx.building import evaluate
from tests.aionn.models.onnx.test_control_flow import X, refused


def test_sequences_within_a_graph_become_their_values() -> None:
    nodes = [
        node("SequenceEmpty", [], ["s0"]),
        node("SequenceInsert", ["s0", "x"], ["s1"]),
        node("Neg", ["x"], ["n"]),
        node("SequenceInsert", ["s1", "n", "zero"], ["s2"]),
        node("SequenceLength", ["s2"], ["count"]),
        node("Range", ["zero", "count", "one"], ["numbers"]),
        node("ConcatFromSequence", ["s2"], ["joined"], axis=1),
        node("ConcatFromSequence", ["s2"], ["stacked"], axis=-1, new_axis=1),
        node("SequenceErase", ["s2", "zero"], ["s3"]),
        node("SequenceAt", ["s3", "last"], ["kept"]),
        node("Gather", ["x", "numbers"], ["rows"]),
    ]
    constants = {"zero": np.array(0), "one": np.array(1), "last": np.array(-1)}
    found = evaluate(nodes, {"x": X}, ["joined", "stacked", "kept", "rows"], constants)
    for got, expected in zip(found, [np.hstack([-X, X]), np.stack([-X, X], -1), X, X], strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("position", "expected"), [(None, "abx"), (0, "xab"), (1, "axb"), (2, "abx"), (-1, "axb"), (-2, "xab")]
)
def test_position_in_a_sequence_counts_from_both_ends(position: int | None, expected: str) -> None:
    nodes = [
        node("Neg", ["x"], ["a"]),
        node("Abs", ["x"], ["b"]),
        node("SequenceConstruct", ["a", "b"], ["s0"]),
        node("SequenceInsert", ["s0", "x", "" if position is None else "at"], ["s1"]),
        node("ConcatFromSequence", ["s1"], ["y"], axis=0),
        *(node("SequenceAt", ["s1", f"p{i}"], [f"y{i}"]) for i in range(-3, 3)),
    ]
    constants = {f"p{i}": np.array(i) for i in range(-3, 3)}
    if position is not None:
        constants["at"] = np.array(position)
    y, *single = evaluate(nodes, {"x": X - 2}, ["y", *(f"y{i}" for i in range(-3, 3))], constants)
    values = [{"a": 2 - X, "b": np.abs(X - 2), "x": X - 2}[letter] for letter in expected]
    np.testing.assert_array_equal(y, np.concatenate(values))
    np.testing.assert_array_equal(single, values * 2)


@pytest.mark.parametrize(
    ("sizes", "keeps"), [(None, 0), (None, 1), (np.array(2), 1), (np.array([1, 2]), 1), (np.array([3]), 1)]
)
def test_split_to_a_sequence_has_the_sizes_that_it_states(sizes: Any, keeps: int) -> None:
    names = ["x"] if sizes is None else ["x", "sizes"]
    nodes = [
        node("SplitToSequence", names, ["s"], axis=1, keepdims=keeps),
        node("SequenceAt", ["s", "last"], ["part"]),
        node("Relu", ["part"], ["y"]),
    ]
    constants = {"last": np.array(-1)} | ({} if sizes is None else {"sizes": sizes})
    (y,) = evaluate(nodes, {"x": X}, ["y"], constants)
    expected = {None: X[:, 2:], 2: X[:, 2:]}.get(
        None if sizes is None else int(np.max(sizes)) if sizes.ndim == 0 else -1
    )
    if sizes is not None and sizes.ndim:
        expected = X[:, -int(sizes[-1]) :]
    np.testing.assert_array_equal(y, expected if keeps else X[:, 2])


@pytest.mark.parametrize(
    ("nodes", "word"),
    [
        (
            [node("SequenceEmpty", [], ["s"]), node("SequenceAt", ["s", "m"], ["y"])],
            "a sequence with elements",
        ),
        ([node("SequenceConstruct", ["x"], ["s"]), node("SequenceAt", ["s", "m"], ["y"])], "position"),
        (
            [node("SequenceConstruct", ["x"], ["s"]), node("SequenceAt", ["s", "n"], ["y"])],
            "position in a sequence that is not",
        ),
        ([node("SequenceConstruct", ["x"], ["y"])], "1 x output: a sequence"),
        ([node("SequenceConstruct", ["x"], ["s"]), node("Neg", ["s"], ["y"])], "1 x Neg: a sequence"),
        ([node("SequenceAt", ["x", "m"], ["y"])], "expected a sequence"),
        (
            [node("SequenceEmpty", [], ["s"]), node("ConcatFromSequence", ["s"], ["y"], axis=0)],
            "without elements",
        ),
    ],
)
def test_sequence_that_is_misused_is_rejected_with_the_reason(nodes: list[NodeProto], word: str) -> None:
    refused(nodes, word, m=np.array(3))
