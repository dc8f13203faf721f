"""Files of one operator give the very bytes that LiteRT gives with the file itself; the exceptions are listed with reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from aionn.hal import Memory, Priority, operand_dtype
from aionn.interpreter import RunControl
from aionn.models.tflite import load_tflite

pytest.importorskip("ai_edge_litert.interpreter", reason="LiteRT is not installed", exc_type=ImportError)

from ai_edge_litert import interpreter as litert

from aionn.drivers.kit.arguments import OutputArea
from aionn.drivers.litert.driver import LitertDevice, LitertPreparedModel
from aionn.drivers.litert.engine import check
from aionn.drivers.litert.expectations import DIFFERENCES
from aionn.drivers.litert.flatbuffer_writer import FileWriter, Quantization
from aionn.drivers.litert.lowering import lower

Array = npt.NDArray[Any]

SHAPE = (2, 6, 5, 4)
OFFSET = {"int8": 0, "uint8": 128}
EXTREMES = (-0.0, 0.0, np.nan, np.inf, -np.inf, 0.5, -0.5, 1.5, 2.5, -1.5, -2.5, 1e30, 88.8, -100.0, 3e9)


def quantization(dtype: str, scale: float = 0.05, zero_point: int = 3) -> Quantization | None:
    return Quantization((scale,), zero_point + OFFSET[dtype]) if dtype in OFFSET else None


def drawn(dtype: str, shape: Sequence[int], generator: np.random.Generator) -> Array:
    """Numbers of every kind: floats begin with what rounds, overflows or is no number."""
    if dtype == "float32":
        x = (generator.standard_normal(shape) * 3).astype(np.float32)
        x.reshape(-1)[: len(EXTREMES)] = EXTREMES[: x.size]
        return x
    if dtype == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    if dtype == "int32":
        return (generator.integers(1, 300, shape) * generator.choice([-1, 1], shape)).astype(np.int32)
    bounds = np.iinfo(dtype)
    return generator.integers(bounds.min, bounds.max + 1, shape).astype(dtype)


class Argument(NamedTuple):
    """A tensor of a file: an input or an output, or a constant where it has a value."""

    dtype: str
    shape: tuple[int, ...]
    quantization: Quantization | None = None
    value: Array | None = None


class Case(NamedTuple):
    """A file of one operator."""

    name: str
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    options: str | None = None
    values: Mapping[str, Any] = MappingProxyType({})

    def file(self) -> bytes:
        writer = FileWriter()
        file = writer.subgraph()
        tensors = [file.tensor(*argument) for argument in self.inputs]
        results = [file.tensor(*argument) for argument in self.outputs]
        file.operator(self.name, tensors, results, self.options, dict(self.values))
        file.inputs = [t for t, a in zip(tensors, self.inputs, strict=True) if a.value is None]
        file.outputs = results
        return writer.finish()


def constant(*numbers: int) -> Argument:
    return Argument("int32", (len(numbers),), None, np.array(numbers, np.int32))


def real(shape: tuple[int, ...] = SHAPE) -> Argument:
    return Argument("float32", shape)


def stored(dtype: str, scale: float = 0.05, zero_point: int = 3, shape: tuple[int, ...] = SHAPE) -> Argument:
    return Argument(dtype, shape, quantization(dtype, scale, zero_point))


def weights(dtype: str, shape: tuple[int, ...], scale: float = 0.01, zero_point: int = 0) -> Argument:
    generator = np.random.default_rng(11)
    if dtype == "float32":
        value = (generator.standard_normal(shape) * 0.3).astype(np.float32)
        return Argument(dtype, shape, None, value)
    bounds = np.iinfo(dtype)
    value = generator.integers(max(bounds.min, -127), bounds.max + 1, shape).astype(dtype)
    return Argument(dtype, shape, quantization(dtype, scale, zero_point), value)


def _unary() -> dict[str, Case]:
    cases = {}
    names: dict[str, tuple[str | None, dict[str, Any]]] = {
        "RELU": (None, {}), "RELU6": (None, {}), "RELU_N1_TO_1": (None, {}), "RELU_0_TO_1": (None, {}),
        "TANH": (None, {}), "LOGISTIC": (None, {}), "HARD_SWISH": (None, {}), "ELU": (None, {}),
        "LEAKY_RELU": ("LeakyReluOptions", {"alpha": 0.2}), "GELU": ("GeluOptions", {"approximate": True}),
        "COS": (None, {}), "SIN": (None, {}), "EXP": (None, {}), "LOG": (None, {}), "SQRT": (None, {}),
        "RSQRT": (None, {}), "NEG": (None, {}), "ABS": (None, {}), "FLOOR": (None, {}), "CEIL": (None, {}),
        "ROUND": (None, {}), "SQUARE": (None, {}), "SIGN": ("SignOptions", {}),
        "SOFTMAX": ("SoftmaxOptions", {"beta": 0.5}), "LOG_SOFTMAX": ("LogSoftmaxOptions", {}),
        "L2_NORMALIZATION": ("L2NormOptions", {}),
    }  # fmt: skip
    for name, (options, values) in names.items():
        cases[name] = Case(name, (real(),), (real(),), options, values)
    fixed = {"TANH": (1 / 128, 0), "LOGISTIC": (1 / 256, -128), "SOFTMAX": (1 / 256, -128)}
    for dtype in OFFSET:
        for name in ("RELU", "RELU6", "RELU_N1_TO_1", "LEAKY_RELU", "HARD_SWISH", *fixed):
            # To 0.1 every second number is a half, which decides how it is rounded.
            for scale, zero_point in {fixed.get(name, other) for other in ((0.05, 3), (0.03, -9), (0.1, -9))}:
                options, values = names[name]
                pair = (stored(dtype),), (stored(dtype, scale, zero_point),)
                cases[f"{name} {dtype} to {scale:.3}"] = Case(name, *pair, options, values)
        steep = {"alpha": -0.3}
        cases[f"LEAKY_RELU {dtype} falling"] = Case(
            "LEAKY_RELU", (stored(dtype),), (stored(dtype),), "LeakyReluOptions", steep
        )
    return cases


def _binary() -> dict[str, Case]:
    cases = {}
    for name in ("ADD", "SUB", "MUL", "DIV"):
        options = f"{name.capitalize()}Options"
        for activation in range(4):
            values = {"fusedActivationFunction": activation}
            cases[f"{name} {activation}"] = Case(name, (real(), real()), (real(),), options, values)
            for dtype in OFFSET if name != "DIV" else ():
                ins, out = (stored(dtype), stored(dtype, 0.03, -9)), (stored(dtype, 0.1, 3),)
                cases[f"{name} {dtype} {activation}"] = Case(name, ins, out, options, values)
        cases[f"{name} repeated"] = Case(name, (real(), real((4,))), (real(),), options)
    for name, options in (
        ("MAXIMUM", "MaximumMinimumOptions"),
        ("SQUARED_DIFFERENCE", "SquaredDifferenceOptions"),
    ):
        cases[name] = Case(name, (real(), real()), (real(),), options)
    whole = Argument("int32", SHAPE)
    for name, options in (
        ("DIV", "DivOptions"),
        ("FLOOR_DIV", "FloorDivOptions"),
        ("FLOOR_MOD", "FloorModOptions"),
    ):
        cases[f"{name} int32"] = Case(name, (whole, whole), (whole,), options)
    for name in ("EQUAL", "LESS", "GREATER_EQUAL"):
        truth = (Argument("bool", SHAPE),)
        cases[name] = Case(name, (real(), real()), truth)
        for dtype in OFFSET:
            cases[f"{name} {dtype}"] = Case(name, (stored(dtype), stored(dtype)), truth)
    return cases


def _reductions() -> dict[str, Case]:
    cases = {}
    for name in ("MEAN", "SUM", "REDUCE_MAX", "REDUCE_PROD"):
        for axes in ((1, 2), (0,), (3,), (0, 1, 2, 3)):
            for keep in (True, False):
                out = tuple(1 if i in axes else e for i, e in enumerate(SHAPE) if keep or i not in axes)
                values = {"keepDims": keep}
                where = f"{name} {axes} {keep}"
                cases[where] = Case(name, (real(), constant(*axes)), (real(out),), "ReducerOptions", values)
                for dtype in OFFSET if name != "REDUCE_PROD" else ():
                    scale = 0.05 if name == "REDUCE_MAX" else 0.03
                    ends = (stored(dtype), constant(*axes)), (stored(dtype, scale, 3, out),)
                    cases[f"{where} {dtype}"] = Case(name, *ends, "ReducerOptions", values)
    # No power of two: here the importer's filter rounds otherwise, and has to be recognised.
    for extent in (3, 7, 13):
        for dtype in OFFSET:
            image, mean = stored(dtype, shape=(1, extent, extent, 16)), stored(dtype, 0.031, -40, (1, 16))
            cases[f"MEAN of {extent} x {extent} {dtype}"] = Case(
                "MEAN", (image, constant(1, 2)), (mean,), "ReducerOptions", {"keepDims": False}
            )
    return cases


def _layers() -> dict[str, Case]:
    cases = {}
    same = {"padding": 0, "strideW": 1, "strideH": 1, "dilationWFactor": 1, "dilationHFactor": 1}
    layers: tuple[tuple[str, str, dict[str, Any], tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = (
        ("CONV_2D", "Conv2DOptions", same, SHAPE, (8, 3, 3, 4), (2, 6, 5, 8)),
        ("DEPTHWISE_CONV_2D", "DepthwiseConv2DOptions", {**same, "depthMultiplier": 1}, SHAPE, (1, 3, 3, 4), SHAPE),
        ("FULLY_CONNECTED", "FullyConnectedOptions", {}, (3, 16), (9, 16), (3, 9)),
    )  # fmt: skip
    for name, options, values, shape, filter_, out in layers:
        depth = out[-1]
        ins = (real(shape), weights("float32", filter_), weights("float32", (depth,)))
        cases[name] = Case(name, ins, (real(out),), options, values)
        for dtype in OFFSET:
            bias = Argument(
                "int32", (depth,), Quantization((0.0005,)), np.arange(depth, dtype=np.int32) * 40 - 90
            )
            ins = (stored(dtype, shape=shape), weights(dtype, filter_), bias)
            cases[f"{name} {dtype}"] = Case(name, ins, (stored(dtype, 0.1, shape=out),), options, values)
    window = {"padding": 0, "strideW": 1, "strideH": 1, "filterWidth": 3, "filterHeight": 3}
    for name in ("AVERAGE_POOL_2D", "MAX_POOL_2D"):
        cases[name] = Case(name, (real(),), (real(),), "Pool2DOptions", window)
        for dtype in OFFSET:
            cases[f"{name} {dtype}"] = Case(name, (stored(dtype),), (stored(dtype),), "Pool2DOptions", window)
    for dtype in ("float32", *OFFSET):
        one = stored(dtype) if dtype in OFFSET else real()
        for name, options in (
            ("RESIZE_BILINEAR", "ResizeBilinearOptions"),
            ("RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighborOptions"),
        ):
            for flags in ({}, {"alignCorners": True}, {"halfPixelCenters": True}):
                result = one._replace(shape=(2, 12, 10, 4))
                cases[f"{name} {dtype} {flags}"] = Case(
                    name, (one, constant(12, 10)), (result,), options, flags
                )
        other = stored(dtype, 0.03, -9) if dtype == "uint8" else one
        joined = (one._replace(shape=(2, 6, 5, 8)),)
        cases[f"CONCATENATION {dtype}"] = Case(
            "CONCATENATION", (other, one), joined, "ConcatenationOptions", {"axis": 3}
        )
    for dtype in ("int32", *OFFSET):
        # Many of the numbers are equal.
        several = Argument(dtype, (2, 3, 600), quantization(dtype))
        best = several._replace(shape=(2, 3, 7)), Argument("int32", (2, 3, 7))
        count = Argument("int32", (), None, np.array(7, np.int32))
        cases[f"TOPK_V2 {dtype}"] = Case("TOPK_V2", (several, count), best, "TopKV2Options")
    for dtype in OFFSET:
        cases[f"DEQUANTIZE {dtype}"] = Case("DEQUANTIZE", (stored(dtype),), (real(),), "DequantizeOptions")
        cases[f"QUANTIZE {dtype}"] = Case("QUANTIZE", (real(),), (stored(dtype),), "QuantizeOptions")
        for scale in (0.03, 0.1):
            cases[f"QUANTIZE {dtype} to {scale}"] = Case(
                "QUANTIZE", (stored(dtype),), (stored(dtype, scale, -9),), "QuantizeOptions"
            )
    return cases


FAMILIES: dict[str, Callable[[], dict[str, Case]]] = {
    "unary": _unary, "binary": _binary, "reductions": _reductions, "layers": _layers,
}  # fmt: skip


class Peer:
    """LiteRT with a file."""

    def __init__(self, file: bytes) -> None:
        self._interpreter = litert.Interpreter(model_content=file, num_threads=1)
        self._interpreter.allocate_tensors()

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        for details, value in zip(self._interpreter.get_input_details(), inputs, strict=True):
            self._interpreter.set_tensor(details["index"], value)
        self._interpreter.invoke()
        return [
            np.asarray(self._interpreter.get_tensor(d["index"]))
            for d in self._interpreter.get_output_details()
        ]


def results(
    device: LitertDevice, path: Path, file: bytes, inputs: Sequence[Array]
) -> tuple[list[bytes], list[bytes]]:
    """What the driver gives with the imported file, and LiteRT with the file."""
    wanted = Peer(file).run(inputs)
    path.write_bytes(file)
    model = load_tflite(path).model
    lowered = lower(model)
    check(lowered)
    prepared = LitertPreparedModel(device, model, Priority.MEDIUM, lowered)
    operands = model.main.outputs
    buffers = [np.zeros(max(1, y.nbytes), np.uint8) for y in wanted]
    areas = [OutputArea(o, tuple(o.dimensions), b) for o, b in zip(operands, buffers, strict=True)]
    prepared.run(inputs, areas, RunControl())
    prepared.release()
    for pool in model.pools:
        assert isinstance(pool, Memory)
        pool.close()
    assert [operand_dtype(o.type) for o in operands] == [y.dtype for y in wanted]
    return [b[: y.nbytes].tobytes() for b, y in zip(buffers, wanted, strict=True)], [
        y.tobytes() for y in wanted
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
async def test_file_of_one_operator_gives_litert_s_bytes(tmp_path: Path, family: str) -> None:
    generator = np.random.default_rng(5)
    different = []
    async with LitertDevice() as device:
        for where, case in FAMILIES[family]().items():
            inputs = [drawn(a.dtype, a.shape, generator) for a in case.inputs if a.value is None]
            ours, theirs = results(device, tmp_path / "one.tflite", case.file(), inputs)
            if ours != theirs:
                different.append(where)
    assert different == []


def half_weights() -> bytes:
    """A convolution whose weights are float16 constants that a DEQUANTIZE makes floats."""
    writer = FileWriter()
    file = writer.subgraph()
    x, y = file.tensor("float32", SHAPE), file.tensor("float32", (2, 6, 5, 8))
    tensors = [x]
    for shape in ((8, 3, 3, 4), (8,)):
        value = weights("float32", shape).value
        assert value is not None
        half = file.tensor("float16", shape, None, value.astype(np.float16))
        tensors.append(file.tensor("float32", shape))
        file.operator("DEQUANTIZE", [half], [tensors[-1]], "DequantizeOptions", {})
    values = {"padding": 0, "strideW": 1, "strideH": 1, "dilationWFactor": 1, "dilationHFactor": 1}
    file.operator("CONV_2D", tensors, [y], "Conv2DOptions", values)
    file.inputs, file.outputs = [x], [y]
    return writer.finish()


async def test_float16_weights_give_litert_s_bytes_and_are_floats_beforehand(tmp_path: Path) -> None:
    file = half_weights()
    async with LitertDevice() as device:
        x = np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)
        ours, theirs = results(device, tmp_path / "half.tflite", file, [x])
        assert ours == theirs
        model = load_tflite(tmp_path / "half.tflite").model
        lowered = lower(model)
        assert operators(lowered.file) == operators(file)[-1:]


def operators(file: bytes) -> list[int]:
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(file, 0))
    return [model.operatorCodes[o.opcodeIndex].builtinCode for o in model.subgraphs[0].operators]


def _over_constants() -> bytes:
    writer = FileWriter()
    file = writer.subgraph()
    x = file.tensor("float32", (64,))
    known = file.tensor("float32", (64,), None, np.linspace(-5, 5, 64, dtype=np.float32))
    grown, y = file.tensor("float32", (64,)), file.tensor("float32", (64,))
    file.operator("LOGISTIC", [known], [grown], None, {})
    file.operator("ADD", [x, grown], [y], "AddOptions", {})
    file.inputs, file.outputs = [x], [y]
    return writer.finish()


def _dense(weight: str) -> bytes:
    inputs = (real((3, 16)), weights(weight, (9, 16)), weights("float32", (9,)))
    return Case("FULLY_CONNECTED", inputs, (real((3, 9)),), "FullyConnectedOptions").file()


def _enlarged() -> bytes:
    inputs = (stored("int8", shape=(1, 1, 167, 1)), constant(1, 516))
    outputs = (stored("int8", shape=(1, 1, 516, 1)),)
    return Case("RESIZE_NEAREST_NEIGHBOR", inputs, outputs, "ResizeNearestNeighborOptions").file()


def _compared() -> bytes:
    inputs = (stored("uint8", 0.0007, 0, (4096,)), stored("uint8", 0.0005, 0, (4096,)))
    return Case("LESS", inputs, (Argument("bool", (4096,)),)).file()


def _tiny() -> bytes:
    return Case("L2_NORMALIZATION", (real((1, 4)),), (real((1, 4)),), "L2NormOptions").file()


EXAMPLES: tuple[tuple[Callable[[], bytes], tuple[tuple[str, tuple[int, ...]], ...]], ...] = (
    (_tiny, (("tiny", (1, 4)),)),
    (lambda: _dense("int8"), (("float32", (3, 16)),)),
    (_compared, (("uint8", (4096,)), ("uint8", (4096,)))),
    (_enlarged, (("int8", (1, 1, 167, 1)),)),
    (_over_constants, (("zero", (64,)),)),
)
"""For each of the listed differences, a file that shows it, and its inputs."""


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
async def test_listed_difference_is_one(tmp_path: Path, index: int) -> None:
    build, arguments = EXAMPLES[index]
    generator = np.random.default_rng(8)
    tiny = np.array([[1e-40, 1, 2, 3]], np.float32)
    made = {"tiny": tiny, "zero": np.zeros(64, np.float32)}
    inputs = [made[d] if d in made else drawn(d, s, generator) for d, s in arguments]
    if "float32" in dict(arguments):
        inputs = [generator.standard_normal(s).astype(np.float32) for _, s in arguments]
    async with LitertDevice() as device:
        ours, theirs = results(device, tmp_path / "one.tflite", build(), inputs)
    assert ours != theirs


def test_differences_are_documented_and_shown() -> None:
    page = (Path(__file__).parents[4] / "docs" / "engines" / "litert.md").read_text()
    for what, why in DIFFERENCES.items():
        assert f"| {what} | {why} |" in page
    assert len(EXAMPLES) == len(DIFFERENCES)
