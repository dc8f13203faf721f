"""The numbers of an import: each scalar argument is made once, and numbers keep their types."""

import itertools
from collections import Counter

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import OperandType, OperationType, constant_array
from aionn.models.builder import GraphBuilder
from aionn.models.onnx import OnnxModel, UnsupportedOperators, encode_model, load_onnx
from aionn.models.onnx.encoding import node, tensor
from aionn.models.onnx.schema import (
    DataType,
    GraphProto,
    ModelProto,
    NodeProto,
    OpsetImport,
    SparseTensorProto,
    TensorProto,
    ValueInfo,
)
from tests.aionn.models.onnx.building import file, operations, run

IMAGE = ValueInfo("x", DataType.FLOAT, (1, 2, 8, 8))
LAYERS = 3
CONVOLUTION_ARGUMENTS = {OperandType.INT32: {0, 1, 2}, OperandType.BOOL: {False}}


def convolutions() -> bytes:
    names = ["x", *(f"v{i}" for i in range(LAYERS))]
    nodes = [
        node("Conv", [before, "w"], [after], pads=[2] * 4, dilations=[2, 2])
        for before, after in itertools.pairwise(names)
    ]
    return file(nodes, [IMAGE], [names[-1]], {"w": np.ones((2, 2, 3, 3), np.float32)})


def test_each_number_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[tuple[str, object]] = Counter()
    constant = GraphBuilder.constant

    def counted(self: GraphBuilder, value: object, *given: object, **more: object) -> object:
        if isinstance(value, int):
            made[type(value).__name__, value] += 1
        return constant(self, value, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(GraphBuilder, "constant", counted)
    load_onnx(convolutions())
    assert set(made.values()) == {1} and {("int", 0), ("int", 1), ("int", 2), ("bool", False)} <= set(made)


def test_false_and_0_stay_different() -> None:
    model = load_onnx(convolutions()).model
    found: dict[int, set[object]] = {}
    for operation in model.main.operations:
        if operation.type != OperationType.CONV_2D:
            continue
        for index in operation.inputs[3:]:
            operand = model.main.operands[index]
            found.setdefault(operand.type, set()).add(constant_array(model, operand).item())
    assert found == CONVOLUTION_ARGUMENTS


X = np.array([[1.5, -2.0], [3.25, 1e30]], np.float32)
WEIGHTS = np.array([[1.0078125, -3.0], [0.5, 2.0]], np.float32)
"""BFLOAT16 has all of them. It has no square of the first: 1.01568603515625, beside which it has 1.015625."""


def narrow(name: str, values: np.ndarray) -> TensorProto:
    """A constant of BFLOAT16."""
    bits = values.astype(np.float32).view(np.uint32) >> 16
    return TensorProto(name, DataType.BFLOAT16, values.shape, raw=bits.astype("<u2").tobytes())


def with_weights(
    nodes: list[NodeProto], kind: DataType = DataType.FLOAT, *, opset: int = 21, **constants: object
) -> OnnxModel:
    """A file with an input ``x`` of a type, a constant ``w`` of BFLOAT16, and an output ``y``."""
    graph = GraphProto(
        tuple(nodes),
        (ValueInfo("x", kind, X.shape),),
        (ValueInfo("y"),),
        (narrow("w", WEIGHTS), *(tensor(name, np.array(value)) for name, value in constants.items())),
    )
    return load_onnx(encode_model(ModelProto(10, (OpsetImport("", opset),), graph)))


def widened(name: str) -> list[NodeProto]:
    """Adds a value of BFLOAT16 as float32 to ``x``."""
    return [node("Cast", [name], ["wide"], to=int(DataType.FLOAT)), node("Add", ["x", "wide"], ["y"])]


def test_weights_of_bfloat16_are_widened_without_an_operation() -> None:
    model = with_weights(widened("w"))
    assert operations(model) == ["ADD"]
    np.testing.assert_array_equal(run(model, {"x": X})[0], X + WEIGHTS)


@pytest.mark.parametrize(
    ("nodes", "constants", "expected"),
    [
        ([node("Mul", ["w", "w"], ["v"])], {}, [[1.015625, 9], [0.25, 4]]),
        ([node("Cast", ["wide0"], ["v"], to=int(DataType.BFLOAT16))], {"wide0": np.float32([1.004])}, [1.0078125]),
        ([node("CastLike", ["wide0", "w"], ["v"])], {"wide0": np.float32([1.00390625])}, [1.0]),
        ([node("Transpose", ["w"], ["v"])], {}, WEIGHTS.T),
        (
            [node("Concat", ["w", "w"], ["two"], axis=0), node("Slice", ["two", "at", "to"], ["v"])],
            {"at": [1], "to": [3]},
            WEIGHTS[::-1],
        ),
        ([node("Where", ["truth", "w", "w"], ["v"])], {"truth": [True]}, WEIGHTS),
        ([node("Pad", ["w", "pads", "", "axes"], ["v"])], {"pads": [0, 0], "axes": [0]}, WEIGHTS),
    ],
)  # fmt: skip
def test_constants_of_bfloat16_are_computed_in_bfloat16(
    nodes: list[NodeProto], constants: dict[str, object], expected: object
) -> None:
    model = with_weights([*nodes, *widened("v")], **constants)
    assert operations(model) == ["ADD"]
    np.testing.assert_array_equal(run(model, {"x": X})[0], X + np.array(expected, np.float32))


def test_moved_values_of_bfloat16_need_no_extension() -> None:
    nodes = [
        node("Gather", ["w", "i"], ["rows"]),
        node("Pad", ["rows", "pads", "fill"], ["y"]),
    ]
    graph = GraphProto(
        tuple(nodes),
        (ValueInfo("i", DataType.INT32, (1,)),),
        (ValueInfo("y"),),
        (narrow("w", WEIGHTS), narrow("fill", np.array(np.inf)), tensor("pads", np.array([0, 1, 0, 0]))),
    )
    model = load_onnx(encode_model(ModelProto(10, (OpsetImport("", 21),), graph)), extensions="none")
    (output,) = model.outputs
    assert (output.dtype, output.operand.type) == ("bfloat16", OperandType.TENSOR_FLOAT32)


def test_arithmetic_on_bfloat16_is_rounded_by_operations_of_the_extension() -> None:
    model = with_weights([node("MatMul", ["x", "w"], ["m"]), node("Relu", ["m"], ["y"])], DataType.BFLOAT16)
    assert {name.split()[0] for name in model.operation_names} == {"ai.onnx.MatMul", "ai.onnx.Relu"}
    assert model.outputs[0].dtype == "bfloat16"


def test_sparse_constants_and_attributes_of_bfloat16_keep_their_type() -> None:
    values = TensorProto("s", DataType.BFLOAT16, (1,), raw=b"\x80\x3f")
    places = TensorProto("", DataType.INT64, (1,), int64s=np.array([2]))
    for constant in (
        node("Constant", [], ["v"], sparse_value=SparseTensorProto(values, places, (2, 2))),
        node("Constant", [], ["v"], value=narrow("", np.array([[0, 0], [1, 0]]))),
    ):
        model = with_weights([constant, *widened("v")])
        np.testing.assert_array_equal(run(model, {"x": X})[0], X + np.float32([[0, 0], [1, 0]]))
    filled = node("ConstantOfShape", ["shape"], ["v"], value=narrow("", np.array([0.5])))
    model = with_weights([filled, node("Mul", ["v", "w"], ["p"]), *widened("p")], shape=[2, 2])
    np.testing.assert_array_equal(run(model, {"x": X})[0], X + WEIGHTS / 2)


@pytest.mark.parametrize(
    ("op_type", "constants"),
    [("Add", "w"), ("MatMul", "w"), ("Gemm", "w"), ("Where", "w"), ("Sub", "wide"), ("Div", "half"), ("PRelu", "w")],
)  # fmt: skip
def test_values_of_two_types_are_rejected(op_type: str, constants: str) -> None:
    """ONNX Runtime rejects them as well, although float32 could hold both."""
    inputs = ["truth", "x", constants] if op_type == "Where" else ["x", constants]
    with pytest.raises(InvalidModel, match="expected values of one element type, got float32 and"):
        with_weights(
            [node(op_type, inputs, ["y"])], truth=[True], wide=np.zeros(2), half=np.zeros(2, np.float16)
        )


def test_whole_numbers_of_two_widths_are_rejected() -> None:
    with pytest.raises(InvalidModel, match="expected values of one element type, got int32 and int64"):
        with_weights([node("Add", ["x", "c"], ["y"])], DataType.INT32, c=[1])


def test_constants_of_other_narrow_types_are_rejected_by_name() -> None:
    eighth = TensorProto("c", DataType.FLOAT8E4M3FN, (2, 2), raw=bytes(4))
    graph = GraphProto(
        (node("Cast", ["c"], ["v"], to=1), node("Add", ["x", "v"], ["y"])),
        (ValueInfo("x", DataType.FLOAT, X.shape),),
        (ValueInfo("y"),),
        (eighth,),
    )
    with pytest.raises(UnsupportedOperators, match="a constant of type FLOAT8E4M3FN"):
        load_onnx(encode_model(ModelProto(10, (OpsetImport("", 21),), graph)))


def test_given_values_of_bfloat16_are_rounded() -> None:
    graph = GraphProto(
        tuple(widened("v")),
        (ValueInfo("x", DataType.FLOAT, X.shape), ValueInfo("v", DataType.BFLOAT16, (1,))),
        (ValueInfo("y"),),
    )
    data = encode_model(ModelProto(10, (OpsetImport("", 21),), graph))
    (y,) = run(load_onnx(data, values={"v": np.float32([1.004])}), {"x": X})
    np.testing.assert_array_equal(y, X + np.float32(1.0078125))
    with pytest.raises(InvalidArgument, match="expected bfloat16"):
        load_onnx(data, values={"v": np.float64([1.004])})


def test_one_hot_values_of_bfloat16_keep_their_type() -> None:
    graph = GraphProto(
        (node("OneHot", ["i", "depth", "sides"], ["y"]),),
        (ValueInfo("i", DataType.INT32, (2,)),),
        (ValueInfo("y"),),
        (tensor("depth", np.array(3)), narrow("sides", np.array([1.0078125, -3.0]))),
    )
    model = load_onnx(encode_model(ModelProto(10, (OpsetImport("", 21),), graph)), extensions="none")
    (output,) = model.outputs
    assert (output.dtype, output.operand.type) == ("bfloat16", OperandType.TENSOR_FLOAT32)
