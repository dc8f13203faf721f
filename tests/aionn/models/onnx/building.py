"""Small ONNX files for tests, and what the reference interpreter makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aionn.hal import operand_dtype
from aionn.interpreter import Interpreter, RunControl
from aionn.models.onnx import OnnxModel, encode_model, load_onnx
from aionn.models.onnx.encoding import DATA_TYPES, tensor
from aionn.models.onnx.schema import FunctionProto, GraphProto, ModelProto, NodeProto, OpsetImport, ValueInfo
from aionn.validation import validate_model


def info(name: str, array: Any) -> ValueInfo:
    return ValueInfo(name, DATA_TYPES[np.asarray(array).dtype.name], np.asarray(array).shape)


def file(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfo],
    outputs: Sequence[str],
    constants: Mapping[str, Any] | None = None,
    *,
    opset: int = 21,
    functions: Sequence[FunctionProto] = (),
    opsets: Sequence[OpsetImport] = (),
) -> bytes:
    graph = GraphProto(
        tuple(nodes),
        tuple(inputs),
        tuple(ValueInfo(name) for name in outputs),
        tuple(tensor(name, value) for name, value in (constants or {}).items()),
        name="test",
    )
    return encode_model(ModelProto(10, (OpsetImport("", opset), *opsets), graph, tuple(functions)))


def run(model: OnnxModel, arrays: Mapping[str, Any]) -> list[np.ndarray]:
    """The outputs in ONNX's own types and shapes."""
    validate_model(model.model)
    given = [
        np.ascontiguousarray(np.asarray(arrays[a.name]).astype(operand_dtype(a.operand.type))).reshape(
            a.operand.dimensions
        )
        for a in model.inputs
    ]
    results = Interpreter(model.model).run(given, RunControl())
    return [r.astype(a.dtype).reshape(a.dimensions) for r, a in zip(results, model.outputs, strict=True)]


def evaluate(
    nodes: Sequence[NodeProto],
    arrays: Mapping[str, Any],
    outputs: Sequence[str],
    constants: Mapping[str, Any] | None = None,
    **more: Any,
) -> list[np.ndarray]:
    """The outputs of a graph whose inputs are these arrays."""
    data = file(nodes, [info(name, array) for name, array in arrays.items()], outputs, constants, **more)
    return run(load_onnx(data), arrays)


def operations(model: OnnxModel) -> list[str]:
    return [operation.type.name for operation in model.model.main.operations]
