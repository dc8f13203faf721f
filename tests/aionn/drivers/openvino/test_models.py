"""Model files give on `openvino-cpu` what OpenVINO gives for the files themselves: floats closely, integers within a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.drivers.onnx_reference.driver import OnnxReferenceDevice
from aionn.drivers.openvino.driver import OpenvinoDevice
from aionn.drivers.reference import ReferenceDevice
from aionn.models.onnx.schema import read_model
from tests.support.torch_files import CASES, FOLDER, Array, check, drawn, options_of

ov = pytest.importorskip("openvino", reason="OpenVINO is not installed")

FLOAT_MAX = 1e-4
"""Largest difference of float results, relative to the largest result."""

STEPS_MAX = 2
"""Largest difference of quantised results. The layers of both differ by a step, and networks amplify it."""

SMALL = ["shapes_float", "shapes_int8", "shapes_uint8", "digits_float"]
LARGE = [
    *(f"kws_dscnn_{form}" for form in ("float", "int8")),
    "mobilenet_v1_0.25_128_float",
    *(f"mobilenet_v2_1.0_224_{form}" for form in ("float", "int8")),
    "lstm_asr_float",
]
"""Without two quantised networks that amplify a step of noise to tens of steps, in OpenVINO alone as well: digits, mobilenet_v1."""
DRAWN_COUNT = 4
SEED = 5

PROPERTIES = {
    "INFERENCE_PRECISION_HINT": "f32",
    "EXECUTION_MODE_HINT": "ACCURACY",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "NUM_STREAMS": "1",
    "INFERENCE_NUM_THREADS": "1",
}


def drawn_for(port: Any, generator: np.random.Generator) -> Array:
    dtype = port.get_element_type().to_dtype()
    if dtype == np.float32:
        return generator.standard_normal(tuple(port.shape)).astype(np.float32)
    bounds = np.iinfo(dtype)
    return generator.integers(bounds.min, bounds.max + 1, tuple(port.shape)).astype(dtype)


def assert_close(got: Array, wanted: Array) -> None:
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    if wanted.dtype.kind == "f":
        most = FLOAT_MAX * float(np.abs(wanted).max(initial=0))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=most)
    else:
        assert np.abs(got.astype(int) - wanted.astype(int)).max(initial=0) <= STEPS_MAX


async def compare(path: Path) -> None:
    compiled = ov.Core().compile_model(str(path), "CPU", PROPERTIES)
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
                assert_close(got, want)


@pytest.mark.parametrize("name", SMALL)
async def test_small_model_gives_openvino_s_results(example_data: Path, name: str) -> None:
    await compare(example_data / f"{name}.tflite")


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
async def test_large_model_gives_openvino_s_results(shared: Path, name: str) -> None:
    await compare(shared / "models" / f"{name}.tflite")


def peer_results(name: str, values: Sequence[Array]) -> list[Array]:
    """OpenVINO's results for a file."""
    core = ov.Core()
    model = core.read_model(FOLDER / f"{name}.onnx")
    model.reshape(
        {port.get_any_name(): value.shape for port, value in zip(model.inputs, values, strict=True)}
    )
    compiled = core.compile_model(model, "CPU", PROPERTIES)
    return [np.array(value) for value in compiled(list(values)).values()]


@pytest.mark.parametrize("name", sorted(CASES))
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
        check(name, peer_results(name, values), list(result.outputs), steps=STEPS_MAX + 0.01)
