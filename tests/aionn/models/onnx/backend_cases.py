"""The test cases of the installed ``onnx`` package: models with inputs and the outputs that they should have.

Sources: the node tests, which the package generates; the folders ``simple``, ``pytorch-converted`` and ``pytorch-operator`` of its
test data; the networks of its folder ``light``, whose inputs are those of its own test runner.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from aionn.models.onnx.extension.narrow import NAMES
from aionn.models.onnx.schema import DataType, read_model

Array = np.ndarray[Any, Any]

RTOL, ATOL = 1e-3, 1e-7
"""The tolerances of cases that state none."""

MISSING = "the onnx package is not installed: pip install --group onnx"

FOLDERS = ("simple", "pytorch-converted", "pytorch-operator")

TIERS = {
    "0": {
        "BitCast", "BlackmanWindow", "Constant", "ConstantOfShape", "Dropout", "EyeLike", "HammingWindow", "HannWindow",
        "Identity", "Range", "Shape", "Size",
    },
    "1": {
        "Abs", "Add", "And", "ArgMax", "ArgMin", "AveragePool", "Cast", "CastLike", "Concat", "Conv", "ConvTranspose",
        "DepthToSpace", "DequantizeLinear", "Div", "Elu", "Equal", "Exp", "Expand", "Flatten", "Floor", "Gather", "Gemm",
        "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "Greater", "GreaterOrEqual", "HardSwish", "LRN", "LSTM",
        "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "LpNormalization", "LpPool", "MatMul", "MaxPool", "Mul", "Neg",
        "Not", "Or", "PRelu", "Pad", "Pow", "QLinearConv", "QLinearMatMul", "QuantizeLinear", "RNN", "ReduceMax", "ReduceMean",
        "ReduceMin", "ReduceProd", "ReduceSum", "Relu", "Reshape", "Resize", "Sigmoid", "Sin", "Slice", "Softmax",
        "SpaceToDepth", "Split", "Sqrt", "Squeeze", "Sub", "Tanh", "Tile", "TopK", "Transpose", "Unsqueeze", "Upsample",
        "Where", "Xor",
    },
    "2": {
        "BatchNormalization", "Ceil", "Celu", "CenterCropPad", "Clip", "Cos", "Cosh", "CumSum", "Erf", "GatherElements", "Gelu",
        "GroupNormalization", "HardSigmoid", "Hardmax", "InstanceNormalization", "IsInf", "IsNaN", "LayerNormalization", "Max",
        "Mean", "MeanVarianceNormalization", "Min", "Mish", "Mod", "OneHot", "RMSNormalization", "Reciprocal", "ReduceL1",
        "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare", "RoiAlign", "RotaryEmbedding", "Round", "Selu",
        "Shrink", "Sign", "Sinh", "Softplus", "Softsign", "Sum", "SwiGLU", "Swish", "Tan", "ThresholdedRelu", "Trilu",
    },
    "C": {"If", "Loop", "Scan"},
}  # fmt: skip
"""Operators that HAL operations express for the types and ranks that the HAL has: 0 as no operation, 1 as one of them, 2 as a
composition, C as control flow."""

HAL_TYPES = {"float32", "float16", "int32", "int64", "bool", "uint8", "int8"}
HAL_RANK_MAX = 4

BYTES_MOVED = {
    "Cast", "CastLike", "CenterCropPad", "Clip", "Concat", "ConstantOfShape", "DepthToSpace", "DequantizeLinear", "Dropout",
    "Equal", "Expand", "EyeLike", "Flatten", "Gather", "Identity", "Max", "MaxPool", "Min", "OneHot", "Pad", "QLinearConv",
    "QLinearMatMul", "QuantizeLinear", "Reshape", "Shape", "Size", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile",
    "Transpose", "Trilu", "Unsqueeze", "Where",
}  # fmt: skip
"""Operators that do no arithmetic on numbers of 8 bits, which wraps around in ONNX and ends at the largest number in the HAL."""


class Case(NamedTuple):
    name: str
    data: bytes
    inputs: list[Array]
    outputs: list[Array]
    rtol: float = RTOL
    atol: float = ATOL

    @property
    def is_plain(self) -> bool:
        """Whether the operator is not written as the function that defines it."""
        return "_expanded" not in self.name

    @property
    def tier(self) -> str:
        """The tier in ``TIERS``; empty where an operator is in none, or the HAL lacks a type or the rank."""
        graph = read_model(self.data).graph
        operators = {node.op_type if not node.domain else "" for node in graph.nodes}
        tiers = [name for name, listed in TIERS.items() if operators & listed]
        if not operators <= set().union(*TIERS.values()):
            return ""
        infos = (*graph.inputs, *graph.outputs)
        if any(info.kind != "tensor" for info in infos):
            return ""
        types = {NAMES.get(DataType(info.data_type), "") for info in infos}
        is_moved = operators <= BYTES_MOVED | {"Constant"}
        if not types <= HAL_TYPES or (types & {"uint8", "int8"} and not is_moved):
            return ""
        if max((array.ndim for array in (*self.inputs, *self.outputs)), default=0) > HAL_RANK_MAX:
            return ""
        return max(tiers)


def _array(value: Any) -> Array:
    """The array of a ``TensorProto`` or an array; sequences, maps and optional values are no arrays."""
    from onnx import numpy_helper

    return numpy_helper.to_array(value) if hasattr(value, "dims") else np.asarray(value)


def node_cases() -> list[Case]:
    """The node tests. Those whose inputs or outputs are no arrays have none."""
    pytest.importorskip("onnx", reason=MISSING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        found = []
        for case in collect_testcases(None):
            inputs, outputs = case.data_sets[0]
            try:
                arrays = [[_array(value) for value in values] for values in (inputs, outputs)]
            except (TypeError, ValueError):
                arrays = [[], []]
            found.append(Case(case.name, case.model.SerializeToString(), *arrays, case.rtol, case.atol))
    return found


def _data() -> Path:
    onnx = pytest.importorskip("onnx", reason=MISSING)
    return Path(onnx.__file__).parent / "backend" / "test" / "data"


def _read(path: Path) -> Array:
    import onnx

    tensor = onnx.TensorProto()
    tensor.ParseFromString(path.read_bytes())
    return _array(tensor)


def folder_cases(name: str) -> Iterator[Case]:
    """The cases of a folder of the test data. Those whose inputs or outputs are no arrays have none."""
    onnx = pytest.importorskip("onnx", reason=MISSING)
    for folder in sorted((_data() / name).iterdir()):
        if not (folder / "model.onnx").exists():
            continue
        data = (folder / "model.onnx").read_bytes()
        graph = onnx.ModelProto.FromString(data).graph
        is_known = all(value.type.HasField("tensor_type") for value in (*graph.input, *graph.output))
        for numbered in sorted(folder.glob("test_data_set_*")):
            arrays = [
                [_read(numbered / f"{kind}_{i}.pb") for i in range(len(list(numbered.glob(f"{kind}_*"))))]
                if is_known
                else []
                for kind in ("input", "output")
            ]
            yield Case(f"{folder.name}/{numbered.name[-1]}", data, *arrays)


def network_cases() -> Iterator[Case]:
    """The networks of the folder ``light``. Inputs are those of the package's runner: numbers from 0 to 1 in order."""
    import json

    import onnx

    for described in sorted((_data() / "real").glob("*/data.json")):
        told = json.loads(described.read_text())
        path = _data() / "light" / Path(told["url"]).name
        data = path.read_bytes()
        graph = onnx.ModelProto.FromString(data).graph
        constants = {tensor.name for tensor in graph.initializer}
        shapes = [
            tuple(extent.dim_value or 1 for extent in value.type.tensor_type.shape.dim)
            for value in graph.input
            if value.name not in constants
        ]
        sizes = [int(np.prod(shape)) for shape in shapes]
        inputs = [
            (np.arange(size).reshape(shape) / size).astype(np.float32)
            for size, shape in zip(sizes, shapes, strict=True)
        ]
        outputs = [_read(path.with_name(f"{path.stem}_output_{i}.pb")) for i in range(len(graph.output))]
        yield Case(path.stem, data, inputs, outputs, told["rtol"], told["atol"])
