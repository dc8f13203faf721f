"""Names and versions that break the specification, or that it leaves to the reader: a right answer or one sentence."""

import numpy as np
import pytest

from aionn.errors import InvalidModel, ResourceExhausted
from aionn.models.onnx import UnsupportedOperators, encode_model, load_onnx
from aionn.models.onnx.encoding import node, tensor
from aionn.models.onnx.schema import (
    FunctionProto,
    GraphProto,
    ModelProto,
    OpsetImport,
    SparseTensorProto,
    TensorProto,
    ValueInfo,
)
from tests.aionn.models.onnx.building import evaluate, file, info, run

ARRAY = np.array([[1, -2, 3], [4, 5, -6]], np.float32)
X = info("x", ARRAY)
OWN = OpsetImport("own", 1)
MAIN = OpsetImport("", 21)


def model_of(nodes, inputs=(X,), outputs=("y",), constants=(), opsets=(MAIN,), ir_version=10):
    infos = tuple(ValueInfo(name) for name in outputs)
    graph = GraphProto(tuple(nodes), tuple(inputs), infos, tuple(constants))
    return encode_model(ModelProto(ir_version, tuple(opsets), graph))


def function(nodes, *, opset=21):
    opsets = (OpsetImport("", opset), OWN) if opset else (OWN,)
    return FunctionProto("F", "own", "", ("a",), ("b",), (), (), tuple(nodes), opsets)


def call(value, result):
    return node("F", [value], [result], domain="own")


@pytest.mark.parametrize("second", [X, ValueInfo("x", 1, (7,))])
def test_inputs_of_one_name_are_refused(second):
    with pytest.raises(InvalidModel, match="every name once, got 'x' again"):
        load_onnx(model_of([node("Neg", ["x"], ["y"])], [X, second]))


def test_inputs_without_a_name_are_refused():
    with pytest.raises(InvalidModel, match="every name once, got an empty name"):
        load_onnx(model_of([node("Neg", ["x"], ["y"])], [X, ValueInfo("", 1, (2,))]))


def test_inputs_of_one_name_in_a_loop_are_refused():
    inputs = [ValueInfo("i"), ValueInfo("on"), ValueInfo("v"), ValueInfo("v")]
    body = GraphProto((node("Neg", ["v"], ["w"]),), tuple(inputs), (ValueInfo("on"), *[ValueInfo("w")] * 2))
    nodes = [node("Loop", ["m", "", "x", "x"], ["y", "z"], body=body)]
    with pytest.raises(InvalidModel, match="every name once, got 'v' again"):
        load_onnx(file(nodes, [X], ["y", "z"], {"m": np.array(2)}))


def test_operators_without_a_version_are_refused():
    """Else they would mean those of the first version, whose Softmax normalises other axes, for example."""
    nodes = [node("Softmax", ["x"], ["y"])]
    for opsets in ((), (OWN,)):
        with pytest.raises(
            InvalidModel, match=r"node 0 Softmax: expected a version of operator set ai\.onnx"
        ):
            load_onnx(model_of(nodes, opsets=opsets))
    with pytest.raises(InvalidModel, match="expected a version of operator set"):
        load_onnx(file([call("x", "y")], [X], ["y"], functions=[function(nodes, opset=0)], opsets=[OWN]))


def test_files_of_a_time_before_operator_sets_mean_the_first():
    cube = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    data = model_of([node("Softmax", ["x"], ["y"])], [info("x", cube)], opsets=(), ir_version=2)
    (y,) = run(load_onnx(data), {"x": cube})
    np.testing.assert_allclose(y.sum((1, 2)), np.ones(2), rtol=1e-6)


def test_graphs_within_a_function_have_the_versions_of_the_function():
    """The axes that Softmax normalises without an attribute differ between 11 and 21."""
    branch = GraphProto((node("Softmax", ["a"], ["r"]),), (), (ValueInfo("r"),))
    nodes = [node("If", ["yes"], ["b"], then_branch=branch, else_branch=branch)]
    constant = node("Constant", [], ["yes"], value=tensor("", np.array(True)))
    cube = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for opset, axes in ((11, (1, 2)), (21, (2,))):
        leaf = function([constant, *nodes], opset=opset)
        (y,) = evaluate([call("x", "y")], {"x": cube}, ["y"], functions=[leaf], opsets=[OWN])
        np.testing.assert_allclose(y.sum(axes), np.ones(y.sum(axes).shape), rtol=1e-5)


@pytest.mark.parametrize("decision", [True, False])
def test_functions_are_inlined_in_graphs_within_nodes(decision):
    leaf = function([node("Neg", ["a"], ["t"]), node("Exp", ["t"], ["b"])])
    yes = GraphProto((call("x", "r"),), (), (ValueInfo("r"),))
    no = GraphProto((call("x", "h"), call("h", "s")), (), (ValueInfo("s"),))
    nodes = [node("If", ["c"], ["y"], then_branch=yes, else_branch=no)]
    arrays = {"x": ARRAY, "c": np.array(decision)}
    (y,) = evaluate(nodes, arrays, ["y"], functions=[leaf], opsets=[OWN])
    once = np.exp(-ARRAY)
    np.testing.assert_allclose(y, once if decision else np.exp(-once), rtol=1e-5)


def test_functions_that_call_themselves_in_a_branch_are_refused():
    again = GraphProto((call("a", "r"),), (), (ValueInfo("r"),))
    end = GraphProto((node("Neg", ["a"], ["r"]),), (), (ValueInfo("r"),))
    constant = node("Constant", [], ["yes"], value=tensor("", np.array(True)))
    leaf = function([constant, node("If", ["yes"], ["b"], then_branch=again, else_branch=end)])
    with pytest.raises(InvalidModel, match="nest at most 32 deep"):
        load_onnx(file([call("x", "y")], [X], ["y"], functions=[leaf], opsets=[OWN]))


EMPTY = {
    "a constant": ((TensorProto("c", 1, (0, 2**62, 2**62), raw=b""),), ()),
    "a sparse constant": (
        (),
        (
            SparseTensorProto(
                tensor("c", np.ones(0, np.float32)), tensor("", np.zeros((0, 3), np.int64)), (0, 2**62, 2**62)
            ),
        ),
    ),
    "a constant of an unknown type": ((TensorProto("c", 77, (1,), raw=b""),), ()),
}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("place", ["input", "bound of an activation", "output"])
def test_constants_of_no_elements_beside_huge_extents_are_refused(kind, place):
    dense, sparse = EMPTY[kind]
    nodes = {
        "input": [node("Add", ["x", "c"], ["y"])],
        "bound of an activation": [node("Add", ["x", "x"], ["h"]), node("Clip", ["h", "c"], ["y"])],
        "output": [node("Neg", ["x"], ["y"])],
    }[place]
    outputs = (ValueInfo("y"), ValueInfo("c")) if place == "output" else (ValueInfo("y"),)
    graph = GraphProto(tuple(nodes), (X,), outputs, dense, sparse)
    with pytest.raises(InvalidModel, match="constant 'c': expected"):
        load_onnx(encode_model(ModelProto(10, (OpsetImport("", 21),), graph)))


@pytest.mark.parametrize("location", ["weights", "."])
@pytest.mark.parametrize("place", ["input", "output"])
def test_folders_as_external_data_are_refused(tmp_path, location, place):
    (tmp_path / "weights").mkdir()
    constant = TensorProto("c", 1, (2, 3), external={"location": location})
    nodes = [node("Add", ["x", "c"], ["y"])] if place == "input" else [node("Neg", ["x"], ["y"])]
    outputs = ("y",) if place == "input" else ("y", "c")
    path = tmp_path / "m.onnx"
    path.write_bytes(model_of(nodes, outputs=outputs, constants=[constant]))
    with pytest.raises(InvalidModel, match="regular file"):
        load_onnx(path)


def test_paths_of_external_data_have_a_limit(tmp_path):
    location = "./" * 2048 + "c.bin"
    path = tmp_path / "m.onnx"
    constant = TensorProto("c", 1, (2, 3), external={"location": location})
    path.write_bytes(model_of([node("Add", ["x", "c"], ["y"])], constants=[constant]))
    with pytest.raises(InvalidModel, match="at most 4096 characters"):
        load_onnx(path)


def overlapping(count, step):
    """A chain of sums with constants of 1,000 numbers, each ``step`` bytes behind the one before in a file of 8,000 bytes."""
    constants = [
        TensorProto(f"c{i}", 1, (1000,), external={"location": "c.bin", "offset": str(i * step)})
        for i in range(count)
    ]
    nodes = [node("Add", [f"v{i}", f"c{i}"], [f"v{i + 1}"]) for i in range(count)]
    return model_of(nodes, [ValueInfo("v0", 1, (1000,))], [f"v{count}"], constants)


@pytest.mark.parametrize("step", [0, 100])
def test_external_data_is_not_read_many_times_its_size(tmp_path, step):
    (tmp_path / "c.bin").write_bytes(np.arange(2000, dtype="<f4").tobytes())
    path = tmp_path / "m.onnx"
    path.write_bytes(overlapping(20, step))
    if step:
        with pytest.raises(InvalidModel, match="share no bytes, got more than 4 times"):
            load_onnx(path)
    else:
        (y,) = run(load_onnx(path), {"v0": np.zeros(1000, np.float32)})
        np.testing.assert_array_equal(y, 20 * np.arange(1000, dtype=np.float32))


def test_constants_that_do_not_fit_into_memory_are_a_shortage(tmp_path, monkeypatch):
    def read(*arguments):
        raise MemoryError

    monkeypatch.setattr("aionn.models.onnx.constants.ConstantReader._external", read)
    path = tmp_path / "m.onnx"
    path.write_bytes(overlapping(1, 0))
    with pytest.raises(ResourceExhausted, match="fit into memory"):
        load_onnx(path)


def test_errors_repeat_no_more_than_a_part_of_a_long_name():
    for nodes, outputs in (
        ([node("Neg", ["n" * 100_000], ["y"])], ["y"]),
        ([node("Neg", ["x"], ["y"], name="n" * 100_000), node("Neg", ["y"], ["y"])], ["y"]),
        ([node("Strange" * 10_000, ["x"], ["y"], domain="own")], ["y"]),
    ):
        with pytest.raises(InvalidModel) as caught:
            load_onnx(file(nodes, [X], outputs))
        assert len(str(caught.value)) < 2000


def test_error_about_many_kinds_of_operators_shows_some_and_has_all():
    nodes = [node(f"Strange{i}", ["x"], [f"t{i}"], domain="own") for i in range(500)]
    nodes.append(node("Sum", [f"t{i}" for i in range(500)], ["y"]))
    with pytest.raises(UnsupportedOperators, match=r"got 500 that it cannot.*400 further kinds") as caught:
        load_onnx(file(nodes, [X], ["y"]))
    assert len(caught.value.operators) == 500
