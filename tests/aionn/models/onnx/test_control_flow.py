"""If, Loop and Scan: their graphs become part of the model where constants decide their course, else nested graphs of an IF or
WHILE; where that is not possible the reason is reported.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

import aionn
from aionn.errors import InvalidModel
from aionn.models.onnx import load_onnx
from aionn.models.onnx.conversions.control_flow import UNROLLED_NODES_MAX
from aionn.models.onnx.encoding import node, tensor
from aionn.models.onnx.schema import DataType, GraphProto, NodeProto, ValueInfo
from tests.aionn.models.onnx.building import evaluate, file, info, operations, run

X = np.arange(6, dtype=np.float32).reshape(2, 3)
NUMBER = ValueInfo("i", DataType.INT64, ())
GOES_ON = ValueInfo("on", DataType.BOOL, ())


YES_OR_NO = [np.array(True), np.array(False)]


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


def choice(then: GraphProto, other: GraphProto, *outputs: str, condition: str = "b") -> NodeProto:
    return node("If", [condition], list(outputs or ("y",)), then_branch=then, else_branch=other)


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


def three_rounds() -> Any:
    """The body of a Loop that doubles a value, and counts to three in constants."""
    return graph(
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


def test_loop_ends_when_its_constants_say_so() -> None:
    nodes = [node("Loop", ["", "yes", "x", "zero"], ["y", "count"], body=three_rounds())]
    constants = {"yes": np.array(True), "zero": np.array(0)}
    (y,) = evaluate(nodes, {"x": X}, ["y"], constants)
    np.testing.assert_array_equal(y, 8 * X)


def test_loop_whose_condition_changes_is_unrolled_whatever_its_count() -> None:
    nodes = [node("Loop", ["m", "yes", "x", "zero"], ["y", ""], body=three_rounds())]
    constants = {"m": np.array(2**31 - 1), "yes": np.array(True), "zero": np.array(0)}
    model = load_onnx(file(nodes, [info("x", X)], ["y"], constants))
    assert operations(model) == ["ADD"] * 3


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


def test_results_of_all_iterations_need_a_course_that_constants_decide() -> None:
    def keeping(condition: list[NodeProto], name: str) -> GraphProto:
        nodes = [node("Add", ["v", "v"], ["next"]), *condition, node("Neg", ["next"], ["seen"])]
        return graph(nodes, [NUMBER, GOES_ON, "v"], [name, "next", "seen"])

    same = keeping([node("Identity", ["on"], ["goes"])], "goes")
    ending = ", with results of all iterations"
    refused(
        [node("Loop", ["n", "", "x"], ["", "y"], body=same)],
        "1 x Loop: a trip count that is not a constant" + ending,
    )
    refused(
        [node("Loop", ["", "b", "x"], ["", "y"], body=same)],
        "1 x Loop: a condition that is not a constant" + ending,
    )
    computed = keeping(
        [node("ReduceMax", ["next"], ["top"], keepdims=0), node("Less", ["top", "v0"], ["goes"])], "goes"
    )
    refused(
        [node("Loop", ["", "", "x"], ["", "y"], body=computed)],
        "a condition of an iteration that is not a constant" + ending,
        v0=np.float32(9),
    )


@pytest.mark.parametrize("count", [-3, 0, 1, 4])
def test_computed_trip_count_becomes_an_operation_with_two_graphs(count: int) -> None:
    body = graph(
        [
            node("Cast", ["i"], ["real"], to=int(DataType.FLOAT)),
            node("Mul", ["v", "two"], ["doubled"]),
            node("Add", ["doubled", "e"], ["moved"]),
            node("Add", ["moved", "real"], ["next"]),
            node("Identity", ["on"], ["goes"]),
        ],
        [NUMBER, GOES_ON, "v"],
        ["goes", "next"],
        two=np.float32(2),
    )
    nodes = [
        node("Exp", ["x"], ["e"]),
        node("Loop", ["n", "", "x"], ["w"], body=body),
        node("Neg", ["w"], ["y"]),
    ]
    data = file(nodes, [info("x", X), ValueInfo("n", DataType.INT64, ())], ["y"])
    model = load_onnx(data)
    assert operations(model) == ["EXP", "WHILE", "NEG"] and len(model.model.referenced) == 2
    (y,) = run(model, {"x": X, "n": np.array(count)})
    expected = X
    for i in range(count):
        expected = expected * 2 + np.exp(X) + np.float32(i)
    np.testing.assert_allclose(y, -expected, rtol=1e-5)


@pytest.mark.parametrize("starts", YES_OR_NO)
@pytest.mark.parametrize("limit", [None, 2, np.iinfo(np.int64).max])
def test_computed_condition_of_an_iteration_ends_the_loop(limit: int | None, starts: Any) -> None:
    until = doubling([node("ReduceMax", ["next"], ["top"]), node("Less", ["top", "most"], ["goes"])], "goes")
    nodes = [node("Loop", ["" if limit is None else "m", "b", "x"], ["y"], body=until)]
    constants = {"most": np.float32([[30]])} | ({} if limit is None else {"m": np.array(limit)})
    data = file(nodes, [info("x", X), info("b", starts)], ["y"], constants)
    (y,) = run(load_onnx(data), {"x": X, "b": starts})
    np.testing.assert_array_equal(y, X * (1 if not starts else 4 if limit == 2 else 8))


@pytest.mark.parametrize("decision", YES_OR_NO)
def test_values_of_a_loop_may_be_constants_at_first_and_choices_later(decision: Any) -> None:
    chosen = choice(
        graph([node("Add", ["v", "x"], ["t"])], [], ["t"]),
        graph([node("Sub", ["v", "x"], ["e"])], [], ["e"]),
        "next",
    )
    body = graph([chosen, node("Identity", ["on"], ["goes"])], [NUMBER, GOES_ON, "v"], ["goes", "next"])
    nodes = [node("Loop", ["n", "", "zeros"], ["y"], body=body)]
    inputs = [info("x", X), info("b", decision), ValueInfo("n", DataType.INT64, ())]
    model = load_onnx(file(nodes, inputs, ["y"], {"zeros": np.zeros_like(X)}))
    (y,) = run(model, {"x": X, "b": decision, "n": np.array(3)})
    np.testing.assert_array_equal(y, 3 * X if decision else -3 * X)


def test_iterations_that_do_not_agree_are_rejected_with_the_reason() -> None:
    goes = node("Identity", ["on"], ["goes"])
    for one, words in (
        (node("Concat", ["v", "v"], ["next"], axis=0), "iterations whose results differ in shape"),
        (node("Greater", ["v", "v"], ["next"]), "expected a result of type float32, got bool"),
        (node("NonZero", ["v"], ["next"]), "a sequence, or a value of unknown extents"),
        (node("Strange", ["v"], ["next"], domain="my.ops"), "1 x my.ops.Strange"),
    ):
        body = graph([one, goes], [NUMBER, GOES_ON, "v"], ["goes", "next"])
        refused([node("Loop", ["n", "", "x"], ["y"], body=body)], words)
    refused(
        [node("Loop", ["x", "", "x"], ["y"], body=doubling([goes], "goes"))],
        "expected one whole number, got 6",
    )


async def test_runtime_divides_graphs_within_an_operation_between_devices() -> None:
    """An Atan of a branch, and an addition of 64 bits in a loop, are operations of the extension."""
    branches = [graph([node(kind, ["x"], [kind])], [], [kind]) for kind in ("Atan", "Neg")]
    body = graph(
        [node("Add", ["c", "step"], ["next"]), node("Identity", ["on"], ["goes"])],
        [NUMBER, GOES_ON, ValueInfo("c", DataType.INT64, (1,))],
        ["goes", "next"],
    )
    nodes = [choice(*branches), node("Loop", ["n", "", "c0"], ["c9"], body=body)]
    inputs = [
        info("x", X),
        info("b", np.array(True)),
        *(info(n, np.zeros(1, np.int64)) for n in ("n", "c0", "step")),
    ]
    model = load_onnx(file(nodes, inputs, ["y", "c9"]))
    async with (
        aionn.open(drivers=["reference", "onnx-reference"], isolation="in_process") as runtime,
        await runtime.compile(model.model) as net,
    ):
        assert {"interpreter", "onnx-reference"} <= {placement.device for placement in net.placement}
        one = np.array([True])
        for decision in (one, ~one):
            given = [X, decision, *(np.array([n], np.int32) for n in (4, 10, -3))]
            y, c = (await net.execute(given)).outputs
            np.testing.assert_allclose(y, np.arctan(X) if decision else -X, rtol=1e-6)
            assert c.tolist() == [-2]


@pytest.mark.parametrize("decision", YES_OR_NO)
def test_computed_condition_becomes_an_operation_with_two_graphs(decision: Any) -> None:
    then = graph([node("Add", ["x", "n"], ["t"]), node("Mul", ["t", "half"], ["u"])], [], ["t", "u"])
    other = graph(
        [node("Neg", ["x"], ["e"]), node("Sub", ["e", "own"], ["f"])], [], ["e", "f"], own=np.float32(7)
    )
    nodes = [node("Exp", ["x"], ["n"]), choice(then, other, "a", "c"), node("Add", ["a", "c"], ["y"])]
    data = file(nodes, [info("x", X), info("b", decision)], ["y", "c"], {"half": np.float32(0.5)})
    model = load_onnx(data)
    assert operations(model) == ["EXP", "IF", "ADD"] and len(model.model.referenced) == 2
    y, c = run(model, {"x": X, "b": decision})
    expected = ((X + np.exp(X)) * 0.5 if decision else -X - 7).astype(np.float32)
    np.testing.assert_allclose(c, expected, rtol=1e-6)
    np.testing.assert_allclose(y, (X + np.exp(X) if decision else -X) + expected, rtol=1e-6)


@pytest.mark.parametrize("decision", YES_OR_NO)
def test_branches_may_return_values_from_outside_constants_and_one_value_twice(decision: Any) -> None:
    then = graph([], [], ["x", "x", "i"])
    other = graph(
        [node("Identity", ["five"], ["five2"])], [], ["five2", "x", "five3"], five3=np.array([3, 4], np.int32)
    )
    data = file(
        [choice(then, other, "p", "q", "r")],
        [info("x", X), info("b", decision), info("i", np.zeros(2, np.int32))],
        ["p", "q", "r"],
        {"five": np.full((2, 3), 5, np.float32)},
    )
    p, q, r = run(load_onnx(data), {"x": X, "b": decision, "i": np.array([1, 2])})
    np.testing.assert_array_equal(p, X if decision else np.full_like(X, 5))
    np.testing.assert_array_equal(q, X)
    np.testing.assert_array_equal(r, [1, 2] if decision else [3, 4])


@pytest.mark.parametrize("decision", YES_OR_NO)
def test_condition_may_be_computed_from_values_and_have_an_axis(decision: Any) -> None:
    nodes = [
        node("ReduceMax", ["x"], ["top"], keepdims=0),
        node("Unsqueeze", ["top", "zero"], ["top1"]),
        node("Greater", ["top1", "limit"], ["big"]),
        choice(
            graph([node("Neg", ["top1"], ["t"])], [], ["t"]),
            graph([node("Add", ["top1", "top1"], ["e"])], [], ["e"]),
            condition="big",
        ),
    ]
    constants = {"limit": np.float32([4 if decision else 6]), "zero": np.array([0])}
    (y,) = evaluate(nodes, {"x": X}, ["y"], constants)
    np.testing.assert_array_equal(y, [-5 if decision else 10])


def test_images_are_not_turned_at_the_edges_of_branches() -> None:
    """Both branches take and return images with their channels last; one turn is at the input, and one at the output."""
    weights = np.random.default_rng(1).normal(size=(4, 4, 3, 3)).astype(np.float32)
    image = np.random.default_rng(2).normal(size=(1, 4, 6, 6)).astype(np.float32)

    def convolution(x: str, w: str, y: str) -> NodeProto:
        return node("Conv", [x, w], [y], pads=[1, 1, 1, 1], kernel_shape=[3, 3])

    branches = [graph([convolution("h", w, f"o{w}")], [], [f"o{w}"]) for w in ("w1", "w2")]
    nodes = [convolution("x", "w0", "h"), choice(*branches, "c"), convolution("c", "w0", "y")]
    constants = {"w0": weights, "w1": weights * 2, "w2": weights * 3}
    data = file(nodes, [info("x", image), info("b", np.array(True))], ["y"], constants)
    model = load_onnx(data)
    assert operations(model) == ["TRANSPOSE", "CONV_2D", "IF", "CONV_2D", "TRANSPOSE"]
    (double,), (triple,) = (run(model, {"x": image, "b": np.array(b)}) for b in (True, False))
    np.testing.assert_allclose(triple, double * 1.5, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("outer", "inner"), [(a, b) for a in YES_OR_NO for b in YES_OR_NO])
def test_branches_within_branches_and_within_loops_read_values_from_outside_of_all(
    outer: Any, inner: Any
) -> None:
    deep = choice(
        graph([node("Add", ["v", "x"], ["t"])], [], ["t"]), graph([node("Sub", ["v", "n"], ["e"])], [], ["e"]),
        "d", condition="c",
    )  # fmt: skip
    wide = choice(graph([deep], [], ["d"]), graph([node("Mul", ["v", "two"], ["m"])], [], ["m"]), "w")
    body = graph([wide, node("Identity", ["on"], ["goes"])], [NUMBER, GOES_ON, "v"], ["goes", "w"])
    nodes = [node("Neg", ["x"], ["n"]), node("Loop", ["count", "", "x"], ["y"], body=body)]
    constants = {"count": np.array(2), "two": np.float32(2)}
    (y,) = evaluate(nodes, {"x": X, "b": outer, "c": inner}, ["y"], constants)
    np.testing.assert_array_equal(y, 3 * X if outer else 4 * X)


def test_value_from_outside_is_not_changed_by_the_branches_that_read_it() -> None:
    """A constant has forms of its own in each graph."""
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    uses = [node("MatMul", ["x", "m"], [f"u{i}"]) for i in range(3)]
    nodes = [choice(graph([uses[0]], [], ["u0"]), graph([uses[1]], [], ["u1"]), "c"), uses[2]]
    (c, u) = evaluate(nodes, {"x": X, "b": np.array(True)}, ["c", "u2"], {"m": matrix})
    np.testing.assert_allclose(c, X @ matrix)
    np.testing.assert_allclose(u, X @ matrix)


def test_branches_that_do_not_agree_are_rejected_with_the_reason() -> None:
    same = graph([node("Neg", ["x"], ["t"])], [], ["t"])
    cases = [
        (
            graph([node("Concat", ["x", "x"], ["e"], axis=0)], [], ["e"]),
            "1 x If: branches whose results differ in shape",
        ),
        (
            graph([node("Greater", ["x", "x"], ["e"])], [], ["e"]),
            "expected results of one type, got float32 and bool",
        ),
        (
            graph([node("SequenceConstruct", ["x"], ["e"])], [], ["e"]),
            "1 x If: a sequence, or a value of unknown extents",
        ),
        (
            graph([node("NonZero", ["x"], ["e"])], [], ["e"]),
            "1 x If: a sequence, or a value of unknown extents",
        ),
        (graph([], [], ["q"]), "differ in quantisation"),
    ]
    for other, words in cases:
        quantised = [node("QuantizeLinear", ["x", "scale"], [name]) for name in ("q", "q3")]
        then = (
            same
            if "quantisation" not in words
            else graph([node("QuantizeLinear", ["x", "finer"], ["t"])], [], ["t"])
        )
        refused([quantised[0], choice(then, other)], words, scale=np.float32(0.5), finer=np.float32(0.25))
    refused([choice(same, same, condition="n")], "expected one truth value, got 1 of type int64")
    one = graph([node("Neg", ["x"], ["t"])], ["x0"], ["t"])
    refused([choice(same, one)], "attribute 'else_branch'")


def test_operators_of_both_branches_that_cannot_be_expressed_are_listed_at_once() -> None:
    sides = [graph([node(f"Strange{i}", ["x"], [f"t{i}"], domain="my.ops")], [], [f"t{i}"]) for i in (1, 2)]
    refused([choice(*sides)], "got 2 that it cannot", "1 x my.ops.Strange1", "1 x my.ops.Strange2")


def test_loop_of_more_iterations_than_there_is_room_for_is_not_unrolled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aionn.models.onnx.load.UNROLLED_NODES_MAX", 60)
    (loop,), constants = counted(8)
    data = file([loop], [info("x", X)], ["last", "all"], constants)
    assert "WHILE" not in operations(load_onnx(data))
    for count in (9, 40):
        (loop,), constants = counted(count)
        data = file([msgspec.structs.replace(loop, outputs=("last",))], [info("x", X)], ["last"], constants)
        model = load_onnx(data)
        assert operations(model) == ["WHILE"]
        (last,) = run(model, {"x": X})
        expected = X
        for i in range(count):
            expected = 2 * expected + np.float32(i)
        np.testing.assert_array_equal(last, expected)
    # Results of all iterations need each of them.
    (loop,), constants = counted(40)
    with pytest.raises(InvalidModel, match="at most 60 nodes"):
        load_onnx(file([loop], [info("x", X)], ["last", "all"], constants))


@pytest.mark.parametrize("limit", [5_000, pytest.param(UNROLLED_NODES_MAX, marks=pytest.mark.long)])
def test_loop_that_does_not_end_is_rejected(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.models.onnx.load.UNROLLED_NODES_MAX", limit)
    same = doubling([node("Identity", ["on"], ["goes"])], "goes")
    refused([node("Loop", ["", "", "x"], ["y"], body=same)], f"at most {limit} nodes")


def test_values_that_nested_graphs_read_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node of a branch reads many values, again in each iteration of an unrolled loop."""
    monkeypatch.setattr("aionn.models.onnx.load.UNROLLED_NODES_MAX", 500)
    names = [f"c{i}" for i in range(40)]
    then = graph([node("Concat", ["v", *names], ["t"], axis=0)], [], ["t"])
    other = graph([node("Concat", [*names, "v"], ["e"], axis=0)], [], ["e"])
    nodes = [
        choice(then, other, "w"),
        node("Gather", ["w", "i0"], ["next"]),
        node("Identity", ["on"], ["goes"]),
    ]
    body = graph(nodes, [NUMBER, GOES_ON, "v"], ["goes", "next"], i0=np.array([0, 1]))
    constants = {name: np.float32([[i, i, i]]) for i, name in enumerate(names)}
    loop = node("Loop", ["m", "", "x"], ["y"], body=body)
    refused([loop], "at most 500 nodes", m=np.array(20), **constants)
    inputs = [info("x", X), info("b", np.array(True))]
    load_onnx(file([loop], inputs, ["y"], {"m": np.array(5), **constants}))


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
