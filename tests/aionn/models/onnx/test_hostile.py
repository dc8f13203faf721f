"""Files that mean harm: each is refused with one sentence, quickly, and without much memory."""

import os
import random
import tracemalloc

import msgspec
import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.models.onnx import encode_model, load_onnx
from aionn.models.onnx.encoding import attribute, node, tensor
from aionn.models.onnx.graph import NODES_MAX
from aionn.models.onnx.schema import (
    Attribute,
    AttributeType,
    DataType,
    FunctionProto,
    GraphProto,
    ModelProto,
    OpsetImport,
    SparseTensorProto,
    TensorProto,
    ValueInfo,
)
from aionn.models.onnx.wire import MessageWriter
from tests.aionn.models.onnx.building import file, info, run

X = info("x", np.zeros((2, 3), np.float32))
ADD = node("Add", ["x", "c"], ["y"])


def with_constant(proto: TensorProto, nodes=(ADD,)) -> bytes:
    graph = GraphProto(tuple(nodes), (X,), (ValueInfo("y"),), (proto,))
    return encode_model(ModelProto(10, (OpsetImport("", 21),), graph))


def external(location: str, **more: object) -> TensorProto:
    entries = {"location": location, **{key: str(value) for key, value in more.items()}}
    return TensorProto("c", DataType.FLOAT, (2, 3), external=entries)


def refused(data, *words, **more):
    with pytest.raises(InvalidModel) as caught:
        load_onnx(data, **more)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    inside = tmp_path / "model"
    (inside / "weights").mkdir(parents=True)
    values = np.arange(6, dtype="<f4").tobytes()
    (inside / "weights" / "c.bin").write_bytes(b"\0" * 8 + values)
    (tmp_path / "secret.bin").write_bytes(values)
    return inside


def load_in(folder, proto):
    path = folder / "model.onnx"
    path.write_bytes(with_constant(proto))
    return load_onnx(path)


def test_external_data_beneath_the_folder_is_read(folder):
    model = load_in(folder, external("weights/c.bin", offset=8, length=24))
    (y,) = run(model, {"x": np.ones((2, 3), np.float32)})
    np.testing.assert_array_equal(y, np.arange(6, dtype=np.float32).reshape(2, 3) + 1)


@pytest.mark.parametrize(
    "location", ["../secret.bin", "weights/../../secret.bin", "", "a//b", "weights/", "a\0b", ".."]
)
def test_external_data_outside_of_the_folder_is_refused(folder, location):
    with pytest.raises(InvalidModel, match="beneath the model's folder"):
        load_in(folder, external(location))


def test_external_data_at_an_absolute_path_is_refused(folder):
    with pytest.raises(InvalidModel, match="beneath the model's folder"):
        load_in(folder, external(str(folder.parent / "secret.bin")))


def test_external_data_behind_a_link_is_refused(folder):
    (folder / "link.bin").symlink_to(folder.parent / "secret.bin")
    (folder / "up").symlink_to(folder.parent)
    for location in ("link.bin", "up/secret.bin"):
        with pytest.raises(InvalidModel, match="beneath the model's folder"):
            load_in(folder, external(location))


def test_external_data_of_a_second_name_is_refused(folder):
    os.link(folder.parent / "secret.bin", folder / "hard.bin")
    with pytest.raises(InvalidModel, match="one name"):
        load_in(folder, external("hard.bin"))


def test_external_data_in_a_pipe_is_refused(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(InvalidModel, match="regular file"):
        load_in(folder, external("pipe"))


@pytest.mark.parametrize(
    "more",
    [
        {"offset": 12},
        {"offset": 2**40},
        {"length": 4},
        {"offset": -1},
        {"length": "1e9"},
        {"offset": "9" * 30},
    ],
)
def test_external_data_out_of_bounds_is_refused(folder, more):
    with pytest.raises(InvalidModel, match="expected"):
        load_in(folder, external("weights/c.bin", **more))


def test_external_data_of_bytes_is_refused_unless_a_folder_is_given(folder):
    data = with_constant(external("weights/c.bin", offset=8))
    refused(data, "given as bytes")
    assert load_onnx(data, external_data=folder).outputs[0].dimensions == (2, 3)


def test_addresses_as_external_data_are_refused(folder):
    with pytest.raises(InvalidModel, match="beneath the model's folder"):
        load_in(folder, external("*/_ORT_MEM_ADDR_/*", offset=140000000000, length=24))


@pytest.mark.parametrize("key", ["__class__", "basepath", "_folder", "checksum"])
def test_unknown_keys_of_external_data_mean_nothing(folder, key):
    entries = {"offset": 8, "length": 24, key: str(folder.parent / "secret.bin")}
    model = load_in(folder, external("weights/c.bin", **entries))
    (y,) = run(model, {"x": np.zeros((2, 3), np.float32)})
    np.testing.assert_array_equal(y, np.arange(6, dtype=np.float32).reshape(2, 3))


def test_the_key_of_external_data_stands_once():
    w = MessageWriter()
    w.integer(14, 1)
    for location in ("a", "b"):
        entry = MessageWriter()
        entry.text(1, "location")
        entry.text(2, location)
        w.message(13, entry)
    graph, model = MessageWriter(), MessageWriter()
    graph.message(5, w)
    model.message(7, graph)
    refused(model.encoded(), "every key once")


def test_graphs_that_nest_too_deep_are_refused():
    graph = GraphProto((ADD,), (), (ValueInfo("y"),))
    for _ in range(40):
        inner = node("If", ["x"], ["y"], then_branch=graph, else_branch=GraphProto())
        graph = GraphProto((inner,), (X,), (ValueInfo("y"),))
    refused(encode_model(ModelProto(10, (OpsetImport("", 21),), graph)), "nest at most 32 deep")


@pytest.mark.parametrize("dims", [(2, 4), (2**20, 2**20), (2**62, 2**62, 2**62), ()])
def test_shapes_that_do_not_fit_their_bytes_are_refused(dims):
    proto = TensorProto("c", DataType.FLOAT, dims, raw=np.zeros(6, "<f4").tobytes())
    tracemalloc.start()
    refused(with_constant(proto), "expected")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_negative_extents_are_refused():
    refused(
        with_constant(TensorProto("c", DataType.FLOAT, (-2, -3), raw=np.zeros(6, "<f4").tobytes())),
        "0 or more",
    )


@pytest.mark.parametrize(
    "proto",
    [
        TensorProto("c", DataType.FLOAT, (2,), raw=bytes(8), floats=bytes(8)),
        TensorProto("c", DataType.FLOAT, (2,), int64s=np.zeros(2, np.int64)),
        TensorProto("c", DataType.INT64, (2,), int32s=np.zeros(2, np.int64) + 1),
        TensorProto("c", DataType.UINT8, (1,), int32s=np.array([256])),
        TensorProto("c", DataType.FLOAT16, (1,), int32s=np.array([1 << 16])),
        TensorProto("c", 77, (1,), raw=bytes(4)),
        TensorProto("c", 0, (1,), raw=bytes(4)),
    ],
)
def test_elements_of_the_wrong_kind_are_refused(proto):
    refused(with_constant(proto), "expected")


@pytest.mark.parametrize(
    ("kind", "numbers", "expected"),
    [
        (DataType.FLOAT16, [0x3C00, 0xC000], np.array([1, -2], np.float16)),
        (DataType.BOOL, [0, 3], np.array([False, True])),
        (DataType.INT8, [-1, 5], np.array([-1, 5], np.int8)),
        (DataType.BFLOAT16, [0x3F80, 0xC000], np.array([1, -2], np.float32)),
    ],
)
def test_small_elements_lie_in_int32_data(kind, numbers, expected):
    from aionn.models.onnx.constants import ConstantReader

    found = ConstantReader().array(TensorProto("c", kind, (2,), int32s=np.array(numbers)))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "nodes",
    [
        [node("ConstantOfShape", ["big"], ["h"]), node("Add", ["x", "h"], ["y"])],
        [
            node("ConstantOfShape", ["bigger"], ["h"]),
            node("Reshape", ["h", "flat"], ["r"]),
            node("Gather", ["r", "zero"], ["f"]),
            node("Add", ["x", "f"], ["y"]),
        ],
        [
            node("ConstantOfShape", ["bigger"], ["h"]),
            node("NonZero", ["h"], ["r"]),
            node("Cast", ["r"], ["f"], to=1),
            node("Add", ["x", "f"], ["y"]),
        ],
        [node("Expand", ["one", "big"], ["h"]), node("Add", ["x", "h"], ["y"])],
        [
            node("Tile", ["vector", "times"], ["h"]),
            node("ReduceSum", ["h"], ["s"]),
            node("Add", ["x", "s"], ["y"]),
        ],
        [
            node("Range", ["zero", "far", "step"], ["h"]),
            node("ReduceSum", ["h"], ["s"]),
            node("Add", ["x", "s"], ["y"]),
        ],
        [
            node("Mul", ["column", "row"], ["h"]),
            node("ReduceSum", ["h"], ["s"]),
            node("Add", ["x", "s"], ["y"]),
        ],
        [
            node("Pad", ["vector", "wide"], ["h"]),
            node("ReduceSum", ["h"], ["s"]),
            node("Add", ["x", "s"], ["y"]),
        ],
        [node("Trilu", ["square"], ["y"])],
        [node("CumSum", ["long", "zero"], ["y"])],
    ],
)
def test_small_files_do_not_become_huge(nodes):
    constants = {
        "big": np.array([2**17, 2**16], np.int64),
        "one": np.float32(1),
        "bigger": np.array([2**15, 2**14], np.int64),
        "flat": np.array([-1], np.int64),
        "vector": np.ones(1000, np.float32),
        "times": np.array([10**7], np.int64),
        "wide": np.array([0, 2**40], np.int64),
        "zero": np.int64(0),
        "far": np.int64(2**40),
        "step": np.int64(1),
        "column": np.ones((20000, 1), np.float32),
        "row": np.ones((1, 20000), np.float32),
    }
    inputs = [
        X,
        ValueInfo("square", DataType.FLOAT, (60000, 60000)),
        ValueInfo("long", DataType.FLOAT, (60000,)),
    ]
    tracemalloc.start()
    refused(file(nodes, inputs, ["y"], constants))
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_sparse_constants_do_not_become_huge():
    sparse = SparseTensorProto(
        tensor("c", np.ones(1, np.float32)), tensor("", np.zeros(1, np.int64)), (2**20, 2**20)
    )
    graph = GraphProto((ADD,), (X,), (ValueInfo("y"),), (), (sparse,))
    refused(encode_model(ModelProto(10, (OpsetImport("", 21),), graph)), "sparse constants")


def test_sparse_constants_have_places_inside_of_their_shape():
    for places in ([6], [-1], [[0, 3]], [0, 1]):
        sparse = SparseTensorProto(tensor("c", np.ones(1, np.float32)), tensor("", np.array(places)), (2, 3))
        graph = GraphProto((ADD,), (X,), (ValueInfo("y"),), (), (sparse,))
        refused(encode_model(ModelProto(10, (OpsetImport("", 21),), graph)), "indices")


def test_nodes_out_of_order_are_sorted():
    nodes = [node("Mul", ["h", "c"], ["y"]), node("Add", ["x", "c"], ["h"])]
    model = load_onnx(file(nodes, [X], ["y"], {"c": np.float32(3)}))
    (y,) = run(model, {"x": np.ones((2, 3), np.float32)})
    assert (y == 12).all()


def test_circles_are_refused():
    nodes = [node("Add", ["x", "b"], ["a"]), node("Add", ["x", "a"], ["b"]), node("Add", ["a", "b"], ["y"])]
    refused(file(nodes, [X], ["y"]), "cycle")


def test_names_that_are_written_twice_are_refused():
    for nodes in ([ADD, ADD], [node("Add", ["x", "c"], ["x"]), ADD], [node("Add", ["x", "x"], ["c"]), ADD]):
        refused(file(nodes, [X], ["y"], {"c": np.float32(3)}), "written once")


def test_names_that_nobody_writes_are_refused():
    refused(file([node("Add", ["x", "nobody"], ["y"])], [X], ["y"]), "nobody")
    refused(file([ADD], [X], ["other"], {"c": np.float32(3)}), "other")


def test_empty_bytes_are_no_model():
    refused(b"", "empty")
    refused(b"\x08\x0a", "a graph")


def test_functions_that_call_themselves_are_refused():
    again = FunctionProto(
        "Again", "own", "", ("a",), ("b",), (), (), (node("Again", ["a"], ["b"], domain="own"),)
    )
    data = file([node("Again", ["x"], ["y"], domain="own")], [X], ["y"], functions=[again])
    refused(data, "nest at most")


@pytest.mark.parametrize("nodes_max", [5_000, pytest.param(NODES_MAX, marks=pytest.mark.long)])
def test_functions_that_unfold_without_end_are_refused(nodes_max: int, monkeypatch: pytest.MonkeyPatch):
    """At the product's limit with ``--long``: the ordinary run has a lower one, since reaching it takes seconds."""
    monkeypatch.setattr("aionn.models.onnx.graph.NODES_MAX", nodes_max)
    functions = []
    for level in range(30):
        inner = f"F{level + 1}"
        nodes = (node(inner, ["a"], ["m"], domain="own"), node(inner, ["m"], ["b"], domain="own"))
        functions.append(FunctionProto(f"F{level}", "own", "", ("a",), ("b",), (), (), nodes))
    data = file([node("F0", ["x"], ["y"], domain="own")], [X], ["y"], functions=functions)
    refused(data, f"at most {nodes_max} nodes with functions inlined")


def test_native_code_is_never_loaded_from_a_model():
    nodes = [
        node("EPContext", ["x"], ["h"], domain="com.microsoft", ep_cache_context="../evil.so", embed_mode=0),
        node("Custom", ["h"], ["y"], domain="my.ops", library="/tmp/evil.so"),
    ]
    refused(file(nodes, [X], ["y"]), "com.microsoft.EPContext", "got")


def test_all_unknown_operators_are_told_at_once_with_their_counts():
    nodes = [
        node("Strange", ["x"], ["a"], domain="my.ops"),
        node("Strange", ["x"], ["b"], domain="my.ops"),
        node("NonMaxSuppression", ["x", "x"], ["c"]),
        node("Sum", ["a", "b", "x"], ["s"]),
        node("Relu", ["s"], ["y"]),
    ]
    said = refused(file([*nodes, node("Identity", ["c"], ["z"])], [X], ["y", "z"]), extensions="none")
    assert "got 3 that it cannot" in said and "2 x my.ops.Strange" in said and "1 x NonMaxSuppression" in said


def test_a_model_newer_than_the_table_is_refused():
    refused(file([ADD], [X], ["y"], {"c": np.float32(3)}, opset=99), "newer")


def test_operators_of_constants_have_their_number_of_inputs():
    for inputs in (["c"], ["c", "c", "c"]):
        refused(
            file(
                [node("Pow", inputs, ["h"]), node("Add", ["x", "h"], ["y"])], [X], ["y"], {"c": np.float32(3)}
            ),
            "Pow",
        )


def test_unknown_attributes_are_refused():
    refused(file([node("Relu", ["x"], ["y"], leak=0.5)], [X], ["y"]), "attribute leak")


def test_graphs_are_given_once():
    data = file([ADD], [X], ["y"], {"c": np.float32(3)})
    refused(data + data, "second")


def small_file() -> bytes:
    nodes = [
        node("Conv", ["img", "w", "b"], ["h"], pads=[1, 1, 1, 1], kernel_shape=[3, 3], name="conv"),
        node("Relu", ["h"], ["r"]),
        node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Reshape", ["p", "shape"], ["f"]),
        node("Gemm", ["f", "g"], ["o"], transB=1),
        node("Softmax", ["o"], ["y"], axis=-1),
    ]
    constants = {
        "w": np.ones((4, 2, 3, 3), np.float32),
        "b": np.zeros(4, np.float32),
        "shape": np.array([1, -1], np.int64),
        "g": np.ones((3, 36), np.float32),
    }
    return file(nodes, [ValueInfo("img", DataType.FLOAT, (1, 2, 6, 6))], ["y"], constants)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_are_read_or_refused(seed):
    source = random.Random(seed)
    whole = small_file()
    load_onnx(whole)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(source.randrange(1, 4)):
            place = source.randrange(len(damaged))
            match source.randrange(4):
                case 0:
                    damaged[place] = source.randrange(256)
                case 1:
                    damaged[place] ^= 1 << source.randrange(8)
                case 2:
                    del damaged[place : place + source.randrange(1, 8)]
                case 3:
                    damaged[place:place] = source.randbytes(source.randrange(1, 8))
        try:
            load_onnx(bytes(damaged))
        except ValueError as e:
            assert isinstance(e, InvalidModel) or "input" in str(e)


def test_cut_files_are_refused():
    whole = small_file()
    for length in range(0, len(whole) - 1, 37):
        with pytest.raises(ValueError):
            load_onnx(whole[:length])


def test_attributes_hold_their_type_alone():
    bad = msgspec.structs.replace(ADD, attributes=(attribute("axis", 3),))
    w = MessageWriter()
    w.text(1, "axis")
    w.integer(20, 1)
    w.integer(3, 3)
    assert bad.attributes[0].value == 3
    one, graph, model = MessageWriter(), MessageWriter(), MessageWriter()
    one.message(5, w)
    graph.message(1, one)
    model.message(7, graph)
    refused(model.encoded(), "its type")


@pytest.mark.parametrize(
    ("op_type", "name", "kind"),
    [
        ("Constant", "value", AttributeType.TENSOR),
        ("Constant", "sparse_value", AttributeType.SPARSE_TENSOR),
        ("ConstantOfShape", "value", AttributeType.TENSOR),
        ("If", "else_branch", AttributeType.GRAPH),
        ("Loop", "body", AttributeType.GRAPH),
    ],
)
def test_attributes_of_messages_have_a_value(op_type, name, kind):
    inputs = {"Constant": [], "ConstantOfShape": ["shape"], "If": ["yes"], "Loop": ["", ""]}[op_type]
    bad = msgspec.structs.replace(node(op_type, inputs, ["c"]), attributes=(Attribute(name, kind, None),))
    constants = {"shape": np.array([2, 3], np.int64), "yes": np.array(True)}
    refused(file([bad, node("Add", ["x", "c"], ["y"])], [X], ["y"], constants), f"attribute '{name}'")


def test_nodes_have_no_more_outputs_than_their_operators():
    body = GraphProto(
        (node("Identity", ["on"], ["goes"]), node("Neg", ["v"], ["w"])),
        (ValueInfo("i"), ValueInfo("on"), ValueInfo("v")),
        (ValueInfo("goes"), ValueInfo("w")),
    )
    constants = {"m": np.array(2), "c": np.zeros((2, 3), np.float32)}
    for bad in (
        node("Loop", ["m", "", "x"], ["y", "z"], body=body),
        node("SequenceEmpty", [], ["y", "z"]),
        node("Add", ["c", "c"], ["y", "z"]),
    ):
        more = [node("Add", ["x", "x"], ["sum"])]
        refused(file([bad, *more], [X], ["sum", "z"], constants), "at most 1 outputs, got 2")
