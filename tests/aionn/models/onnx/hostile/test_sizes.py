"""Files of kilobytes that would take gigabytes or hours if the importer repeated a part of them for each other part."""

import itertools
import tracemalloc

import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.models.onnx import load_onnx, tensors
from aionn.models.onnx.encoding import attribute, node
from aionn.models.onnx.schema import FunctionProto, GraphProto, OpsetImport, TensorProto, ValueInfo
from tests.aionn.models.onnx.building import file, info, operations

X = info("x", np.zeros((2, 3), np.float32))
LONG = "n" * 100_000
OWN = OpsetImport("own", 1)
COUNT = 300
"""Times that a long name is repeated: 30 MB."""

PEAK_BYTES_MAX = 8 << 20


def function(nodes, inputs=("a",), defaults=()):
    opsets = (OpsetImport("", 21),)
    return FunctionProto("F", "own", "", tuple(inputs), ("b",), (), tuple(defaults), tuple(nodes), opsets)


def calls(count):
    return [node("F", [f"v{i}"], [f"v{i + 1}"], domain="own") for i in range(count)]


def chain(count, first, last, kind="Neg"):
    names = [first, *(f"t{i}" for i in range(count - 1)), last]
    return [node(kind, [a], [b]) for a, b in itertools.pairwise(names)]


LONG_NAMES = {
    "of a node that becomes many operations": ([node("Sum", ["x"] * COUNT, ["y"], name=LONG)], None),
    "of a call": (
        [node("F", ["x"], ["y"], domain="own", name=LONG)],
        function(chain(COUNT, "a", "b")),
    ),
    "of a value in a function": (
        [*calls(COUNT), node("Neg", [f"v{COUNT}"], ["y"])],
        function([node("Neg", ["a"], [LONG]), node("Neg", [LONG], ["b"])]),
    ),
    "of a value in a graph in a function": (
        [*calls(COUNT), node("Neg", [f"v{COUNT}"], ["y"])],
        function(
            [
                node("Constant", [], ["one"], value_int=1),
                node("Cast", ["one"], ["yes"], to=9),
                node(
                    "If",
                    ["yes"],
                    ["b"],
                    then_branch=GraphProto((node("Neg", ["a"], [LONG]),), (), (ValueInfo(LONG),)),
                    else_branch=GraphProto((node("Exp", ["a"], ["e"]),), (), (ValueInfo("e"),)),
                ),
            ]
        ),
    ),
}


@pytest.mark.parametrize("kind", LONG_NAMES)
def test_long_name_is_not_repeated(kind):
    nodes, leaf = LONG_NAMES[kind]
    first = "x" if nodes[0].inputs[0] == "x" else "v0"
    inputs = [ValueInfo(first, 1, (2, 3))]
    data = file(nodes, inputs, ["y"], functions=[] if leaf is None else [leaf], opsets=[OWN])
    tracemalloc.start()
    try:
        model = load_onnx(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(operations(model)) >= COUNT - 1
    assert peak_bytes < PEAK_BYTES_MAX


WIDE = {
    "inputs": function([node("Neg", ["a"], ["b"])], ["a", *(f"a{i}" for i in range(100))]),
    "defaults": function([node("Neg", ["a"], ["b"])], defaults=[attribute(f"d{i}", i) for i in range(100)]),
    "a node": function([node("Sum", ["a"] * 100, ["b"])]),
    "a graph": function(
        [
            node(
                "If",
                ["a"],
                ["b"],
                then_branch=GraphProto(tuple(chain(50, "a", "r")), (), (ValueInfo("r"),)),
                else_branch=GraphProto((), (), (ValueInfo("a"),)),
            )
        ]
    ),
}


@pytest.mark.parametrize("kind", WIDE)
def test_wide_functions_are_not_called_without_end(kind, monkeypatch):
    monkeypatch.setattr("aionn.models.onnx.graph.RENAMED_MAX", 1000)
    data = file(calls(20), [ValueInfo("v0", 1, (2, 3))], ["v20"], functions=[WIDE[kind]], opsets=[OWN])
    with pytest.raises(InvalidModel, match="at most 1000 names and attributes in all calls of functions"):
        load_onnx(data)


def test_constants_of_a_body_are_counted_for_each_iteration(monkeypatch):
    monkeypatch.setattr("aionn.models.onnx.load.UNROLLED_NODES_MAX", 100)
    constants = tuple(TensorProto(f"k{i}", 1, (1,), raw=bytes(4)) for i in range(2000))
    inputs = (ValueInfo("i"), ValueInfo("on"), ValueInfo("v"))
    outputs = (ValueInfo("on"), ValueInfo("w"), ValueInfo("w"))
    body = GraphProto((node("Neg", ["v"], ["w"]),), inputs, outputs, constants)
    nodes = [node("Loop", ["m", "", "x"], ["last", "y"], body=body)]
    with pytest.raises(InvalidModel, match="at most 100 nodes in all iterations"):
        load_onnx(file(nodes, [X], ["y"], {"m": np.array(10)}))


def test_bounds_of_a_constant_are_not_looked_for_in_each_form_of_it(monkeypatch):
    looked_at = []
    monkeypatch.setattr(tensors, "distinct", lambda array: looked_at.append(array) or array)
    nodes = [node("Reshape", [f"v{i}", f"s{i % 2}"], [f"v{i + 1}"]) for i in range(100)]
    nodes += [node("Gather", ["v100", "i"], ["g"]), node("Add", ["x", "g"], ["y"])]
    constants = {"s0": np.array([2, 500]), "s1": np.array([500, 2]), "i": np.array([[0, 1]])}
    data = file(nodes, [info("x", np.zeros(1, np.int64))], ["y"], constants | {"v0": np.arange(1000)})
    load_onnx(data)
    assert sum(array.size == 1000 for array in looked_at) <= 2


def test_constants_that_the_file_does_not_align_are_copied_once(monkeypatch):
    """numpy copies such an array whole to take one element of it."""
    taken = []
    take = np.take
    monkeypatch.setattr(np, "take", lambda array, *more: taken.append(array) or take(array, *more))
    names = ["c" * length for length in range(1, 9)]
    nodes = [node("Gather", [name, "i"], [f"g{name}{i}"]) for name in names for i in range(2)]
    nodes.append(node("Sum", ["x", *(each.outputs[0] for each in nodes)], ["y"]))
    constants = {name: np.arange(2000, dtype=np.float32) for name in names} | {"i": np.array([1])}
    load_onnx(file(nodes, [X], ["y"], constants))
    assert len(taken) == 16 and all(array.flags.aligned for array in taken)
    assert all(first is second for first, second in zip(taken[::2], taken[1::2], strict=True))
