"""Graphs as a whole: layout, folding, dimensions, functions, branches."""

import msgspec
import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import OperandType
from aionn.models.onnx import load_onnx
from aionn.models.onnx.encoding import attribute, node, tensor
from aionn.models.onnx.operators import document
from aionn.models.onnx.schema import Attribute, DataType, FunctionProto, GraphProto, OpsetImport, ValueInfo
from tests.aionn.models.onnx.building import evaluate, file, info, operations, run

RANDOM = np.random.default_rng(3)
IMAGE = RANDOM.standard_normal((1, 3, 8, 8)).astype(np.float32)


def weights(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def test_the_documented_table_is_the_importers(repository):
    assert (repository / "docs" / "engines" / "onnx-operators.md").read_text() == document()


def test_an_image_is_turned_once_for_a_whole_network():
    nodes = [
        node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "v"], ["c"], group=4, pads=[1, 1, 1, 1]),
        node("Add", ["c", "b"], ["d"]),
        node("Mul", ["d", "scale"], ["e"]),
        node("Concat", ["e", "b"], ["f"], axis=1),
        node("MaxPool", ["f"], ["g"], kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", ["g"], ["h"]),
        node("Flatten", ["h"], ["i"]),
        node("Gemm", ["i", "m", "n"], ["y"]),
    ]
    constants = {
        "w": weights(4, 3, 3, 3),
        "v": weights(4, 1, 3, 3),
        "scale": weights(4, 1, 1),
        "m": weights(8, 2),
        "n": weights(2),
    }
    model = load_onnx(file(nodes, [info("x", IMAGE)], ["y"], constants))
    assert operations(model) == [
        "TRANSPOSE",
        "CONV_2D",
        "DEPTHWISE_CONV_2D",
        "ADD",
        "MUL",
        "CONCATENATION",
        "MAX_POOL_2D",
        "MEAN",
        "RESHAPE",
        "FULLY_CONNECTED",
    ]
    assert model.inputs[0].operand.dimensions == (1, 3, 8, 8)
    assert model.operation_names[1] == "CONV_2D of node 0 Conv"


def test_transposes_of_the_file_cancel():
    nodes = [
        node("Transpose", ["x"], ["a"], perm=[0, 2, 3, 1]),
        node("Relu", ["a"], ["b"]),
        node("Transpose", ["b"], ["y"], perm=[0, 3, 1, 2]),
    ]
    assert operations(load_onnx(file(nodes, [info("x", IMAGE)], ["y"]))) == ["RELU"]


def test_a_transposed_factor_becomes_a_flag():
    a, b = weights(2, 3, 4), weights(2, 5, 4)
    nodes = [node("Transpose", ["b"], ["t"], perm=[0, 2, 1]), node("MatMul", ["a", "t"], ["y"])]
    assert operations(load_onnx(file(nodes, [info("a", a), info("b", b)], ["y"]))) == ["BATCH_MATMUL"]
    (y,) = evaluate(nodes, {"a": a, "b": b}, ["y"])
    np.testing.assert_allclose(y, a @ b.transpose(0, 2, 1), rtol=1e-4, atol=1e-5)


def test_activations_are_fused_where_nobody_else_reads():
    nodes = [node("Add", ["x", "x"], ["a"]), node("Clip", ["a", "low", "high"], ["y"])]
    constants = {"low": np.float32(0), "high": np.float32(6)}
    data = file(nodes, [info("x", IMAGE)], ["y"], constants)
    assert operations(load_onnx(data)) == ["ADD"]
    data = file(nodes, [info("x", IMAGE)], ["y", "a"], constants)
    assert operations(load_onnx(data)) == ["ADD", "RELU6"]
    (y,) = evaluate(nodes, {"x": IMAGE}, ["y"], constants)
    np.testing.assert_array_equal(y, np.clip(IMAGE + IMAGE, 0, 6))


@pytest.mark.parametrize("is_read", [False, True])
def test_normalisation_goes_into_the_convolution_before(is_read):
    nodes = [
        node("Conv", ["x", "w", "c"], ["a"], group=3),
        node("BatchNormalization", ["a", "s", "b", "m", "v"], ["n"]),
        node("Relu", ["n"], ["y"]),
    ]
    constants = {name: np.abs(weights(6)) for name in "csbmv"} | {"w": weights(6, 1, 3, 3)}
    outputs = ["y", "a"] if is_read else ["y"]
    model = load_onnx(file(nodes, [info("x", IMAGE)], outputs, constants))
    kinds = ["TRANSPOSE", "DEPTHWISE_CONV_2D", "TRANSPOSE"]
    assert operations(model) == (
        kinds if not is_read else [*kinds[:2], "MUL", "ADD", "TRANSPOSE", "TRANSPOSE"]
    )
    y = run(model, {"x": IMAGE})[0]
    a = run(load_onnx(file(nodes, [info("x", IMAGE)], ["a"], constants)), {"x": IMAGE})[0]
    s, b, m, v = (constants[name][:, None, None] for name in "sbmv")
    np.testing.assert_allclose(y, np.maximum((a - m) / np.sqrt(v + 1e-5) * s + b, 0), rtol=1e-3, atol=1e-4)


def test_the_arithmetic_of_shapes_leaves_no_operation():
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "axis"], ["u"]),
        node("Concat", ["u", "rest"], ["t"], axis=0),
        node("Reshape", ["x", "t"], ["y"]),
    ]
    constants = {"zero": np.array(0), "axis": np.array([0]), "rest": np.array([-1])}
    x = [ValueInfo("x", DataType.FLOAT, ("batch", 3, None, 8))]
    data = file(nodes, x, ["y"], constants)
    model = load_onnx(data, dimensions={"batch": 2}, input_shapes={"x": (2, 3, 5, 8)})
    assert operations(model) == ["RESHAPE"] and model.outputs[0].dimensions == (2, 120)


def test_open_dimensions_are_asked_for():
    x = [ValueInfo("x", DataType.FLOAT, ("batch", None))]
    data = file([node("Relu", ["x"], ["y"])], x, ["y"])
    with pytest.raises(InvalidArgument, match=r"dimensions=\{'batch'"):
        load_onnx(data)
    with pytest.raises(InvalidArgument, match=r"input_shapes=\{'x'"):
        load_onnx(data, dimensions={"batch": 1})
    with pytest.raises(InvalidArgument, match="expected names among"):
        load_onnx(data, dimensions={"bach": 1})
    with pytest.raises(InvalidArgument, match="expected 1 on axis 0"):
        load_onnx(data, dimensions={"batch": 1}, input_shapes={"x": (2, 3)})
    assert load_onnx(data, dimensions={"batch": 1}, input_shapes={"x": (1, 3)}).outputs[0].dimensions == (
        1,
        3,
    )


def test_inputs_can_be_constants():
    nodes = [node("Reshape", ["x", "shape"], ["y"])]
    data = file(nodes, [info("x", IMAGE), ValueInfo("shape", DataType.INT64, (2,))], ["y"])
    with pytest.raises(InvalidModel, match="must be a constant"):
        load_onnx(data, extensions="none")
    model = load_onnx(data, values={"shape": np.array([3, 64])})
    assert [a.name for a in model.inputs] == ["x"] and model.outputs[0].dimensions == (3, 64)
    with pytest.raises(InvalidArgument, match="expected int64"):
        load_onnx(data, values={"shape": np.array([3.0, 64.0])})


def test_whole_numbers_of_64_bits_travel_in_32():
    ids = np.array([2, 0, -1], np.int64)
    table = weights(4, 5)
    model = load_onnx(file([node("Gather", ["t", "ids"], ["y"])], [info("ids", ids)], ["y"], {"t": table}))
    assert model.inputs[0].dtype == "int64" and model.inputs[0].operand.type == OperandType.TENSOR_INT32
    np.testing.assert_array_equal(run(model, {"ids": ids})[0], table[ids])


def test_constants_that_are_inputs_too_are_constants():
    data = file(
        [node("Add", ["x", "c"], ["y"])],
        [info("x", IMAGE), info("c", np.float32(1))],
        ["y"],
        {"c": np.float32(1)},
    )
    assert [a.name for a in load_onnx(data).inputs] == ["x"]


def test_functions_are_inlined_with_their_attributes():
    inner = node("Elu", ["a"], ["b"])
    inner = msgspec.structs.replace(inner, attributes=(Attribute("alpha", 1, None, "slope"),))
    leaf = FunctionProto("Bend", "own", "", ("a",), ("b",), ("slope",), (), (inner,), (OpsetImport("", 20),))
    call = node("Bend", ["v"], ["m"], domain="own", slope=2.0)
    outer = FunctionProto(
        "Twice",
        "own",
        "",
        ("v",),
        ("w",),
        (),
        (),
        (call, node("Bend", ["m"], ["w"], domain="own")),
        (OpsetImport("own", 1),),
    )
    leaf = msgspec.structs.replace(leaf, defaults=(attribute("slope", 0.5),))
    nodes = [node("Twice", ["x"], ["y"], domain="own")]
    (y,) = evaluate(nodes, {"x": IMAGE}, ["y"], functions=[leaf, outer], opsets=[OpsetImport("own", 1)])
    once = np.where(IMAGE > 0, IMAGE, 2 * np.expm1(IMAGE))
    np.testing.assert_allclose(y, np.where(once > 0, once, 0.5 * np.expm1(once)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("taken", [True, False])
def test_branches_of_a_constant_condition_are_inlined(taken):
    yes = GraphProto((node("Add", ["x", "k"], ["r"]),), (), (ValueInfo("r"),), (tensor("k", np.float32(5)),))
    no = GraphProto((node("Neg", ["x"], ["s"]),), (), (ValueInfo("s"),))
    nodes = [
        node("If", ["c"], ["h"], then_branch=yes, else_branch=no),
        node("Add", ["h", "k"], ["y"]),
    ]
    (y,) = evaluate(nodes, {"x": IMAGE}, ["y"], {"c": np.array(taken), "k": np.float32(1)})
    np.testing.assert_allclose(y, (IMAGE + 5 if taken else -IMAGE) + 1, rtol=1e-6)


def test_outputs_may_be_inputs_constants_or_stand_twice():
    nodes = [node("Relu", ["x"], ["a"]), node("Identity", ["a"], ["b"]), node("Identity", ["x"], ["c"])]
    a, b, c, k = evaluate(nodes, {"x": IMAGE}, ["a", "b", "c", "k"], {"k": weights(2, 3)})
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(c, IMAGE)
    assert k.shape == (2, 3)


def test_nodes_that_no_output_needs_are_left_out():
    nodes = [node("NonMaxSuppression", ["x", "x"], ["z"]), node("Relu", ["x"], ["y"])]
    model = load_onnx(file(nodes, [info("x", IMAGE), info("u", IMAGE)], ["y"]))
    assert operations(model) == ["RELU"] and model.unused_inputs == ("u",)


def test_a_file_in_which_nothing_is_computed_is_refused():
    with pytest.raises(InvalidModel, match="outputs"):
        load_onnx(file([node("Relu", ["x"], ["y"])], [info("x", IMAGE)], []))
