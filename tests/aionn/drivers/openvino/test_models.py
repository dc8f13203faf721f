"""Model files give on `openvino-cpu` what OpenVINO gives for the files themselves: floats closely, integers within a step.

Integers are compared layer by layer, and whole networks where they do not amplify: a quotient within two units of float32 of a half
is rounded as the HAL rounds halves by the one, as IEEE 754 does by the other, and some networks make tens of steps of one such
step. A layer of `digits_int8` has one such number in 33,280.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.drivers.kit.engines.support import single_operation_model
from aionn.drivers.kit.onnx.graph import Graph
from aionn.drivers.kit.onnx.value import Value
from aionn.drivers.litert.lowering import lower as lower_to_tflite
from aionn.drivers.onnx_reference.driver import OnnxReferenceDevice
from aionn.drivers.openvino.driver import OpenvinoDevice
from aionn.drivers.openvino.hardware import saturates
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import Model, constant_array, operand_dtype
from aionn.hal.slicing import read_from_outside
from aionn.interpreter import Interpreter, RunControl
from aionn.models.onnx.schema import read_model
from aionn.models.tflite import load_tflite
from tests.support.torch_files import CASES, FOLDER, Array, check, drawn, options_of

ov = pytest.importorskip("openvino", reason="OpenVINO is not installed")

FLOAT_MAX = 1e-4
"""Largest difference of float results, relative to the largest result."""

STEPS_MAX = 1
"""Largest difference of quantised results."""

SMALL = ["shapes_float", "shapes_int8", "shapes_uint8", "digits_float"]
LARGE = [
    *(f"kws_dscnn_{form}" for form in ("float", "int8")),
    "mobilenet_v1_0.25_128_float",
    pytest.param("mobilenet_v2_1.0_224_float", marks=pytest.mark.long),
    "lstm_asr_float",
]
INTEGERS = [
    *(f"{kind}_{form}" for kind in ("shapes", "digits") for form in ("int8", "uint8")),
    "kws_dscnn_int8",
    "mobilenet_v1_0.25_128_int8",
    "mobilenet_v2_1.0_224_int8",
]
LONG_TO_COMPILE = (
    *("conformer", "deeplab_v3", "distilbert_open", "distilbert_program", "efficientnet_b0", "mobilenet_v3"),
    *("mobilenet_v3_int8", "mobilevit", "shufflenet_v2", "vit_int8", "vit_program", "wav2vec2"),
    *("distilbert", "swin", "whisper_encoder", "yolo", "yolo_program"),
)
"""Exported networks that OpenVINO compiles for half a second and more, twice each: only in the long run. The others have one of
every kind: convolutions, attention, integers, recurrence, control flow and open extents. The ordinary run takes one in three of
them."""

EXPORTED = [
    pytest.param(name, marks=pytest.mark.long) if name in LONG_TO_COMPILE else name for name in sorted(CASES)
]

EXPORTED_STEPS_MAX = 2.01
"""The same for networks that PyTorch exported, in steps of the scale of their results: `resnet18_int8` needs two."""

SUM_ERROR = 1e-4
"""Largest error of a quotient whose 27 products are added in float32, in steps."""

DRAWN_COUNT = 4
CLIPS = 16
SEED = 5

PROPERTIES = {
    "INFERENCE_PRECISION_HINT": "f32",
    "EXECUTION_MODE_HINT": "ACCURACY",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "NUM_STREAMS": "1",
    "INFERENCE_NUM_THREADS": "1",
    # By itself OpenVINO's sums saturate on such a processor, each in the order of its own graph.
    **({"LP_TRANSFORMS_MODE": "NO"} if saturates() else {}),
}


def drawn_for(port: Any, generator: np.random.Generator) -> Array:
    dtype = port.get_element_type().to_dtype()
    if dtype == np.float32:
        return generator.standard_normal(tuple(port.shape)).astype(np.float32)
    bounds = np.iinfo(dtype)
    return generator.integers(bounds.min, bounds.max + 1, tuple(port.shape)).astype(dtype)


@functools.cache
def peer_core() -> Any:
    """One for the process: each core gives the thread that loads its plugin a signal stack, and unmaps it when it ends. Of two
    whose ends are not nested, one leaves an address behind where the next signal ends the process."""
    return ov.Core()


def assert_close(got: Array, wanted: Array, steps: int = STEPS_MAX) -> None:
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    if wanted.dtype.kind == "f":
        most = FLOAT_MAX * float(np.abs(wanted).max(initial=0))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=most)
    else:
        assert np.abs(got.astype(int) - wanted.astype(int)).max(initial=0) <= steps


async def compare(path: Path, steps: int = STEPS_MAX) -> None:
    compiled = peer_core().compile_model(str(path), "CPU", PROPERTIES)
    generator = np.random.default_rng(SEED)
    async with (
        OpenvinoDevice() as device,
        ReferenceDevice() as reference,  # It takes the operations inside of a WHILE that OpenVINO does not support.
        aionn.open(devices=[device, reference], drivers=[]) as runtime,
        await runtime.compile(path) as net,
    ):
        assert "openvino-cpu" in net.devices
        for _ in range(DRAWN_COUNT):
            values = [drawn_for(port, generator) for port in compiled.inputs]
            wanted = list(compiled(values).values())
            result = await net.execute(values)
            for got, want in zip(result.outputs, wanted, strict=True):
                assert_close(got, want, steps)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SMALL)
async def test_small_model_gives_openvino_s_results(example_data: Path, name: str) -> None:
    await compare(example_data / f"{name}.tflite")


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LARGE)
async def test_large_model_gives_openvino_s_results(shared: Path, name: str) -> None:
    await compare(shared / "models" / f"{name}.tflite")


def with_halves_to_even(g: Graph, name: str, like: Value) -> str:
    """As ``Graph.quantized``, with halves as OpenVINO has them."""
    scale, zero_point = g.constant(like.scale, "float32"), g.constant(like.zero_point, like.dtype)
    return g.emit("QuantizeLinear", [name, scale, zero_point])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("mobilenet_v1_0.25_128_int8", STEPS_MAX),
        # Each of its layers differs by a step at most (see below), and its scores, in steps of 1/256, by two: those of LiteRT with
        # its two sets of kernels do as well.
        pytest.param("mobilenet_v2_1.0_224_int8", 2, marks=pytest.mark.long),
    ],
)
async def test_network_that_amplifies_a_step_gives_openvino_s_results_with_its_halves(
    shared: Path, monkeypatch: pytest.MonkeyPatch, name: str, steps: int
) -> None:
    monkeypatch.setattr(Graph, "quantized", with_halves_to_even)
    await compare(shared / "models" / f"{name}.tflite", steps)


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["int8", "uint8"])
async def test_spoken_digits_give_openvino_s_results(shared: Path, form: str) -> None:
    path = shared / "models" / f"digits_{form}.tflite"
    compiled = peer_core().compile_model(str(path), "CPU", PROPERTIES)
    clips = np.load(shared / "models" / "digits_test.npz")["x"][:CLIPS].astype(np.float32)
    (operand,) = load_tflite(path).model.main.inputs
    bounds = np.iinfo(operand_dtype(operand.type).name)
    async with (
        OpenvinoDevice() as device,
        aionn.open(devices=[device], drivers=[]) as runtime,
        await runtime.compile(path) as net,
    ):
        for clip in clips:
            numbers = np.round(clip.reshape(operand.dimensions) / operand.scale) + operand.zero_point
            value = np.clip(numbers, bounds.min, bounds.max).astype(bounds.dtype)
            result = await net.execute([value])
            assert_close(result.outputs[0], next(iter(compiled([value]).values())))


async def compare_layers(path: Path, folder: Path, count: int, step: int = 1) -> int:
    """Each ``step``-th operation of a network by itself, on the numbers that come to it; the number of those operations."""
    model = load_tflite(path).model
    generator = np.random.default_rng(SEED)
    (first,) = model.main.input_indexes
    operand = model.main.operands[first]
    bounds = np.iinfo(operand_dtype(operand.type).name)
    known: list[dict[int, Array]] = [
        {first: generator.integers(bounds.min, bounds.max + 1, operand.dimensions).astype(bounds.dtype)}
        for _ in range(count)
    ]
    compared = range(0, len(model.main.operations), step)
    async with OpenvinoDevice() as device, aionn.open(devices=[device], drivers=[]) as runtime:
        for index, operation in enumerate(model.main.operations):
            part = single_operation_model(model, index)
            for values in known:
                given = [values[i] for i in read_from_outside(model.main, (index,))]
                wanted = Interpreter(part).run(given, RunControl())
                values.update(zip(operation.outputs, wanted, strict=True))
            if index not in compared:
                continue
            (folder / "layer.tflite").write_bytes(lower_to_tflite(part).file)
            compiled = peer_core().compile_model(str(folder / "layer.tflite"), "CPU", PROPERTIES)
            async with await runtime.compile(part) as net:
                for values in known:
                    given = [values[i] for i in read_from_outside(model.main, (index,))]
                    result = await net.execute(given)
                    for got, want in zip(result.outputs, compiled(given).values(), strict=True):
                        assert_close(got, want)
    return len(compared)


def quotients(model: Model, image: Array) -> Array:
    """The exact quotients of the first layer of a network, a convolution with 3 x 3 windows and the stride 2."""
    operation, operands = model.main.operations[0], model.main.operands
    given, filter_, bias, result = (
        operands[index] for index in (*operation.inputs[:3], operation.outputs[0])
    )
    assert filter_.channel_quant is not None
    weights = constant_array(model, filter_).astype(np.float64)  # Sums of products of bytes are exact.
    padded = np.pad(image[0].astype(np.float64) - given.zero_point, ((0, 1), (0, 1), (0, 0)))
    sums = np.zeros(result.dimensions[1:]) + constant_array(model, bias)
    for row, column in itertools.product(range(3), range(3)):
        part = padded[row : row + 2 * sums.shape[0] : 2, column : column + 2 * sums.shape[1] : 2]
        sums += part @ weights[:, row, column].T
    scales = np.array([float(np.float32(scale)) for scale in filter_.channel_quant.scales])
    return sums * float(np.float32(given.scale)) * scales / float(np.float32(result.scale))


@pytest.mark.slow
async def test_numbers_of_a_layer_are_exact_but_where_a_sum_of_floats_cannot_distinguish_a_quotient_from_a_half(
    shared: Path, tmp_path: Path
) -> None:
    # A network makes steps of one such number: MobileNet v2 two, which OpenVINO and the driver round differently.
    model = load_tflite(shared / "models" / "mobilenet_v2_1.0_224_int8.tflite").model
    part = single_operation_model(model, 0)
    image = np.random.default_rng(SEED).integers(-128, 128, part.main.inputs[0].dimensions).astype(np.int8)
    exact = quotients(model, image)
    rounded = np.floor(np.abs(exact) + 0.5) * np.sign(exact) + part.main.outputs[0].zero_point
    is_near = np.abs(np.abs(exact) % 1 - 0.5) <= SUM_ERROR
    (tmp_path / "layer.tflite").write_bytes(lower_to_tflite(part).file)
    compiled = peer_core().compile_model(str(tmp_path / "layer.tflite"), "CPU", PROPERTIES)
    async with (
        OpenvinoDevice() as device,
        aionn.open(devices=[device], drivers=[]) as runtime,
        await runtime.compile(part) as net,
    ):
        got = (await net.execute([image])).outputs[0]
    (alone,) = compiled([image]).values()
    assert is_near.sum() < 1e-3 * exact.size
    for found in (got, alone):
        np.testing.assert_array_equal(found[0][~is_near], rounded.clip(-128, 127)[~is_near])
        assert_close(found[0], rounded.clip(-128, 127).astype(np.int8))


@pytest.mark.thorough
async def test_layers_of_a_network_of_integers_gives_openvino_s_results(
    example_data: Path, tmp_path: Path
) -> None:
    assert await compare_layers(example_data / "digits_int8.tflite", tmp_path, 1, step=3) > 6


@pytest.mark.long
@pytest.mark.parametrize("name", INTEGERS)
async def test_each_layer_of_every_network_of_integers_gives_openvino_s_results(
    shared: Path, tmp_path: Path, name: str
) -> None:
    assert await compare_layers(shared / "models" / f"{name}.tflite", tmp_path, 2) > 5


def peer_results(name: str, values: Sequence[Array]) -> list[Array]:
    """OpenVINO's results for a file."""
    core = peer_core()
    model = core.read_model(FOLDER / f"{name}.onnx")
    model.reshape(
        {port.get_any_name(): value.shape for port, value in zip(model.inputs, values, strict=True)}
    )
    compiled = core.compile_model(model, "CPU", PROPERTIES)
    return [np.array(value) for value in compiled(list(values)).values()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.thorough
async def test_exported_file_gives_openvino_s_results(name: str) -> None:
    values = drawn(name)
    names = [one.name for one in read_model((FOLDER / f"{name}.onnx").read_bytes()).graph.inputs]
    given = dict(zip(names, values, strict=True))
    async with (
        OpenvinoDevice() as device,
        ReferenceDevice() as reference,
        OnnxReferenceDevice() as extension,
        aionn.open(devices=[device, reference, extension], drivers=[]) as runtime,
        await runtime.compile(FOLDER / f"{name}.onnx", **options_of(name, values)) as net,
    ):
        assert "openvino-cpu" in net.devices
        result = await net.execute([given[spec.name] for spec in net.inputs])
        check(name, peer_results(name, values), list(result.outputs), steps=EXPORTED_STEPS_MAX)
