"""If, Loop and Scan: their graphs become part of the model where constants decide their course, else the reason is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.models.onnx import load_onnx
from aionn.models.onnx.conversions.control_flow import UNROLLED_NODES_MAX
from aionn.models.onnx.encoding import node, tensor
from aionn.models.onnx.schema import DataType, GraphProto, NodeProto, ValueInfo
from tests.aionn.models.onnx.building import evaluate, file, info, operations

X = np.arange(6, dtype=np.float32).reshape(2, 3)
NUMBER = ValueInfo("i", DataType.INT64, ())
GOES_ON = ValueInfo("on", DataType.BOOL, ())


def graph(
    nodes: list[NodeProto], inputs: list[str | ValueInfo], outputs: list[str], **constants: Any
) -> GraphProto:
    return GraphProto(
        tuple(nodes),
        tuple(ValueInfo(one) if isinstance(one, str) else one for one in inputs),
        tuple(ValueInfo(name) for name in outputs),
        tuple(tensor(name, np.asarray(value)) for name, value in constants.items()),
        name="body",
    )


def counted(count: int, **constants: Any) -> tuple[list[NodeProto], dict[str, Any]]:
    """``v = 2 v + i`` for each number ``i``, and all values of ``v``."""
    body = graph(
        [
            node("Cast", ["i"], ["real"], to=int(DataType.FLOAT)),
            node("Mul", ["v", "two"], ["doubled"]),
            node("Add", ["doubled", "real"], ["next"]),
            node("Identity", ["on"], ["goes"]),
            node("Identity", ["next"], ["seen"]),
        ],
        [NUMBER, GOES_ON, "v"],
        ["goes", "next", "seen"],
        two=np.float32(2),
    )
    return [node("Loop", ["m", "", "x"], ["last", "all"], body=body)], {"m": np.array(count), **constants}


@pytest.mark.parametrize("count", [1, 3])
def test_loop_of_a_constant_count_is_unrolled(count: int) -> None:
    nodes, constants = counted(count)
    last, every = evaluate(nodes, {"x": X}, ["last", "all"], constants)
    expected, value = [], X
    for i in range(count):
        value = 2 * value + i
        expected.append(value)
    np.testing.assert_array_equal(last, expected[-1])
    np.testing.assert_array_equal(every, expected)


def test_loop_ends_when_its_constants_say_so() -> None:
    body = graph(
        [
            node("Add", ["v", "v"], ["next"]),
            node("Add", ["c", "one"], ["counted"]),
            node("Less", ["counted", "limit"], ["goes"]),
        ],
        [NUMBER, GOES_ON, "v", "c"],
        ["goes", "next", "counted"],
        one=np.array(1),
        limit=np.array(3),
    )
    nodes = [node("Loop", ["", "yes", "x", "zero"], ["y", "count"], body=body)]
    constants = {"yes": np.array(True), "zero": np.array(0)}
    (y,) = evaluate(nodes, {"x": X}, ["y"], constants)
    np.testing.assert_array_equal(y, 8 * X)


def test_loop_in_a_loop_reads_values_from_outside_of_both() -> None:
    inner = graph(
        [node("Add", ["v", "x"], ["sum"]), node("Identity", ["on"], ["goes"])],
        [ValueInfo("j", DataType.INT64, ()), GOES_ON, "v"],
        ["goes", "sum"],
    )
    outer = graph(
        [node("Loop", ["m", "", "w"], ["w2"], body=inner), node("Identity", ["on2"], ["goes2"])],
        [NUMBER, ValueInfo("on2", DataType.BOOL, ()), "w"],
        ["goes2", "w2"],
    )
    nodes = [node("Neg", ["x"], ["n"]), node("Loop", ["m", "", "n"], ["y"], body=outer)]
    (y,) = evaluate(nodes, {"x": X}, ["y"], {"m": np.array(3)})
    np.testing.assert_array_equal(y, 8 * X)


def test_constants_of_a_body_are_one_constant_for_all_iterations() -> None:
    nodes, constants = counted(4)
    model = load_onnx(file(nodes, [info("x", X)], ["last"], constants))
    doubles = [o for o in model.model.main.operations if o.type.name == "MUL"]
    assert len(doubles) == 4 and len({o.inputs[1] for o in doubles}) == 1


def scan_body() -> GraphProto:
    return graph(
        [node("Add", ["s", "e"], ["s2"]), node("Mul", ["s2", "s2"], ["o"])],
        ["s", "e"],
        ["s2", "o"],
    )


@pytest.mark.parametrize("is_back", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_scan_goes_along_an_axis_in_both_directions(axis: int, is_back: int) -> None:
    start = np.zeros(X.shape[1 - axis], np.float32)
    one = node(
        "Scan", ["start", "x"], ["end", "y"], body=scan_body(), num_scan_inputs=1, scan_input_axes=[axis],
        scan_input_directions=[is_back], scan_output_axes=[axis - 2], scan_output_directions=[is_back],
    )  # fmt: skip
    end, y = evaluate([one], {"start": start, "x": X}, ["end", "y"])
    ordered = np.flip(X, axis) if is_back else X
    sums = np.cumsum(ordered, axis=axis)
    np.testing.assert_array_equal(end, np.take(sums, -1, axis))
    np.testing.assert_array_equal(y, np.square(np.flip(sums, axis) if is_back else sums))


def test_scan_of_version_8_goes_through_each_batch() -> None:
    start, x = np.zeros((2, 3), np.float32), np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    one = node("Scan", ["", "start", "x"], ["end", "y"], body=scan_body(), num_scan_inputs=1)
    end, y = evaluate([one], {"start": start, "x": x}, ["end", "y"], opset=8)
    np.testing.assert_array_equal(end, x.sum(axis=1))
    np.testing.assert_array_equal(y, np.square(np.cumsum(x, axis=1)))


def refused(nodes: list[NodeProto], *words: str, **constants: Any) -> None:
    inputs = [info("x", X), ValueInfo("n", DataType.INT64, ()), ValueInfo("b", DataType.BOOL, ())]
    with pytest.raises(InvalidModel) as caught:
        load_onnx(file(nodes, inputs, ["y"], constants))
    assert "unforeseen" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def doubling(condition: list[NodeProto], name: str) -> GraphProto:
    return graph([node("Add", ["v", "v"], ["next"]), *condition], [NUMBER, GOES_ON, "v"], [name, "next"])


def test_course_that_no_constant_decides_is_rejected_with_the_reason() -> None:
    same = doubling([node("Identity", ["on"], ["goes"])], "goes")
    refused([node("Loop", ["n", "", "x"], ["y"], body=same)], "1 x Loop: a trip count that is not a constant")
    refused([node("Loop", ["", "b", "x"], ["y"], body=same)], "1 x Loop: a condition that is not a constant")
    computed = doubling(
        [node("ReduceMax", ["next"], ["top"], keepdims=0), node("Less", ["top", "v0"], ["goes"])], "goes"
    )
    refused(
        [node("Loop", ["", "", "x"], ["y"], body=computed)],
        "a condition of an iteration that is not a constant",
        v0=np.float32(9),
    )
    twice, same_again = (
        graph([node("Add", ["x", "x"], ["t"])], [], ["t"]),
        graph([node("Neg", ["x"], ["e"])], [], ["e"]),
    )
    refused(
        [node("If", ["b"], ["y"], then_branch=twice, else_branch=same_again)],
        "1 x If: a condition that is not a constant",
    )


def test_loop_that_does_not_end_is_rejected() -> None:
    same = doubling([node("Identity", ["on"], ["goes"])], "goes")
    refused([node("Loop", ["", "", "x"], ["y"], body=same)], f"at most {UNROLLED_NODES_MAX} nodes")


def test_loops_in_loops_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.models.onnx.load.UNROLLED_NODES_MAX", 500)
    body = graph([node("Identity", ["on"], ["goes"])], [NUMBER, GOES_ON, "v"], ["goes", "v"])
    for depth in range(8):
        nodes = [
            node("Loop", ["m", "", f"v{depth}"], [f"w{depth}"], body=body),
            node("Identity", ["on"], [f"goes{depth}"]),
        ]
        body = graph(nodes, [NUMBER, GOES_ON, f"v{depth}"], [f"goes{depth}", f"w{depth}"])
    limit = np.array(np.iinfo(np.int64).max)
    refused([node("Loop", ["m", "", "x"], ["y"], body=body)], "at most 500 nodes", m=limit)


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(["i"], ["on"]), ([NUMBER, GOES_ON, "v", "more"], ["on", "v"]), ([NUMBER, GOES_ON, "v"], ["on"])],
)
def test_body_of_other_inputs_and_outputs_is_rejected(inputs: list[Any], outputs: list[str]) -> None:
    names = [one if isinstance(one, str) else one.name for one in inputs]
    written = [node("Identity", [names[0]], [f"{name}2"]) for name in outputs]
    body = graph(written, inputs, [f"{name}2" for name in outputs])
    refused([node("Loop", ["m", "", "x"], ["y"], body=body)], "attribute 'body'", m=np.array(2))


def test_unrolled_loop_has_no_operation_of_control_flow() -> None:
    nodes, constants = counted(2)
    assert operations(load_onnx(file(nodes, [info("x", X)], ["last"], constants))) == ["MUL", "ADD"] * 2


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


def test_constants_are_scattered_at_import() -> None:
    nodes = [
        node("ScatterND", ["c", "places", "values"], ["a"]),
        node("ScatterElements", ["a", "rows", "more"], ["b"], axis=0, reduction="add"),
        node("Add", ["x", "b"], ["y"]),
    ]
    constants = {
        "c": np.zeros((2, 3), np.float32),
        "places": np.array([[0, 1], [-1, 2]]),
        "values": np.float32([5, 7]),
        "rows": np.array([[1, 1, -2]]),
        "more": np.float32([[1, 2, 3]]),
    }
    (y,) = evaluate(nodes, {"x": X}, ["y"], constants)
    np.testing.assert_array_equal(y, X + np.float32([[0, 5, 3], [1, 2, 7]]))


@pytest.mark.parametrize("op_type", ["ScatterND", "ScatterElements"])
@pytest.mark.parametrize(
    "places", [np.array([[2, 0]]), np.array([[-3, 0]]), np.array([[0.0, 0.0]]), np.array(0)]
)
def test_constants_are_scattered_within_their_shape(op_type: str, places: Any) -> None:
    nodes = [node(op_type, ["c", "places", "values"], ["a"]), node("Add", ["x", "a"], ["y"])]
    values = np.zeros(1 if op_type == "ScatterND" else places.shape, np.float32)
    refused(nodes, op_type, c=np.zeros((2, 3), np.float32), places=places, values=values)
