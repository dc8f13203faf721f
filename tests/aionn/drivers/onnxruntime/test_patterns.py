"""Operators that the importer composes become one node again, and its result is the composition's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.hal import Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.models.onnx import encode_model, load_onnx
from aionn.models.onnx.conversions import elementwise
from aionn.models.onnx.encoding import node, tensor
from aionn.models.onnx.schema import DataType, GraphProto, ModelProto, OpsetImport, ValueInfo, read_model

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

from aionn.drivers.kit.onnx.lowering import lower
from aionn.drivers.kit.onnx.patterns import ERF_ABOVE, ERF_BELOW
from aionn.drivers.onnxruntime.driver import OrtDevice
from aionn.drivers.reference import ReferenceDevice

Array = npt.NDArray[Any]

SHAPE = (2, 5, 16)
X = np.random.default_rng(3).normal(0, 2, SHAPE).astype(np.float32)
SCALE, BIAS = np.linspace(0.5, 2, 16, dtype=np.float32), np.linspace(-1, 1, 16, dtype=np.float32)


def imported(op_type: str, constants: dict[str, Array], **attributes: Any) -> Model:
    """The model of a file with one operator."""
    info = ValueInfo("x", DataType.FLOAT, SHAPE)
    one = node(op_type, ["x", *constants], ["y"], **attributes)
    initializers = tuple(tensor(name, value) for name, value in constants.items())
    graph = GraphProto((one,), (info,), (ValueInfo("y", DataType.FLOAT, SHAPE),), initializers, name="g")
    return load_onnx(encode_model(ModelProto(10, (OpsetImport("", 21),), graph))).model


def nodes_of(model: Model) -> Counter[str]:
    found = Counter(one.op_type for one in read_model(lower(model).file).graph.nodes)
    for name in ("Identity", "Reshape"):
        found.pop(name, None)
    return found


async def on(device: Any, model: Model) -> Array:
    async with device, aionn.open(devices=[device], drivers=[]) as runtime:
        net = await runtime.compile(model)
        shape = net.inputs[0].dimensions
        return (await net.execute([X.reshape(shape)])).outputs[0]


CASES: dict[str, tuple[Model, str]] = {
    "erf": (imported("Erf", {}), "Erf"),
    "gelu": (imported("Gelu", {}), "Gelu"),
    "gelu_tanh": (imported("Gelu", {}, approximate="tanh"), "Gelu"),
    "norm": (imported("LayerNormalization", {"s": SCALE, "b": BIAS}), "LayerNormalization"),
    "norm_epsilon": (imported("LayerNormalization", {"s": SCALE}, epsilon=0.1), "LayerNormalization"),
}


@pytest.mark.parametrize("name", CASES)
async def test_composition_is_one_node(name: str) -> None:
    model, op_type = CASES[name]
    assert nodes_of(model) == {op_type: 1}
    expected, got = await on(ReferenceDevice(), model), await on(OrtDevice(), model)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_coefficients_are_the_importer_s() -> None:
    assert (ERF_ABOVE, ERF_BELOW) == (elementwise._ERF_ABOVE, elementwise._ERF_BELOW)


@pytest.mark.parametrize("wrong", ["factor", "one", "source"])
def test_what_only_resembles_a_composition_is_written_as_it_is(wrong: str) -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, SHAPE)
    other = graph.input(OperandType.TENSOR_FLOAT32, SHAPE)
    none = graph.constant(0)

    def number(value: float) -> Any:
        return graph.constant(np.array([value], np.float32))

    def step(kind: OperationType, a: Any, b: Any) -> Any:
        return graph.result(kind, [a, b, none], x, SHAPE)

    cube = step(
        OperationType.MUL, step(OperationType.MUL, step(OperationType.MUL, x, x), x), number(0.044715)
    )
    argument = step(OperationType.MUL, step(OperationType.ADD, x, cube), number(np.sqrt(2 / np.pi)))
    curve = graph.result(OperationType.TANH, [argument], x, SHAPE)
    half = step(
        OperationType.MUL, other if wrong == "source" else x, number(0.6 if wrong == "factor" else 0.5)
    )
    more = step(OperationType.ADD, curve, number(2.0 if wrong == "one" else 1.0))
    assert "Gelu" not in nodes_of(graph.build([step(OperationType.MUL, half, more)]))


def test_part_of_a_composition_that_is_an_output_is_still_computed() -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (4, 8))
    none, keep = graph.constant(0), graph.constant(1)
    axes = graph.constant(np.array([1], np.int32))
    mean = graph.result(OperationType.MEAN, [x, axes, keep], x, (4, 1))
    centred = graph.result(OperationType.SUB, [x, mean, none], x, (4, 8))
    square = graph.result(OperationType.MUL, [centred, centred, none], x, (4, 8))
    variance = graph.result(OperationType.MEAN, [square, axes, keep], x, (4, 1))
    small, one = (graph.constant(np.array([n], np.float32)) for n in (1e-5, 1.0))
    spread = graph.result(OperationType.ADD, [variance, small, none], x, (4, 1))
    root = graph.result(OperationType.SQRT, [spread], x, (4, 1))
    inverse = graph.result(OperationType.DIV, [one, root, none], x, (4, 1))
    result = graph.result(OperationType.MUL, [centred, inverse, none], x, (4, 8))
    assert nodes_of(graph.build([result, mean])) == {"LayerNormalization": 1, "ReduceMean": 1}
