"""The scalar arguments of an import: each number is made once, and numbers of other types stay others."""

import itertools
from collections import Counter

import numpy as np
import pytest

from aionn.hal import OperandType, OperationType, constant_array
from aionn.models.builder import GraphBuilder
from aionn.models.onnx import load_onnx
from aionn.models.onnx.encoding import node
from aionn.models.onnx.schema import DataType, ValueInfo
from tests.aionn.models.onnx.building import file

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
