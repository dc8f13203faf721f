"""Engines without Python: the bytes of Python's executions in every buffer, a switch, and what stays in Python."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import aionn
from aionn.conformance.requests import request_for
from aionn.conformance.suite import Settings
from aionn.conformance.workers import run_suite
from aionn.drivers.kit.engines import native as native_calls
from aionn.errors import DeviceUnavailable, GeneralFailure
from aionn.hal import Memory
from aionn.models.tflite import load_tflite
from tests.aionn.burst.native_device import NativeBurst
from tests.aionn.drivers.engines.native_calls import answered, drawn, output_bytes, python_bytes

INTERFACES = {
    "litert-cpu": "aionn.drivers.litert.in_place",
    "openvino-cpu": "aionn.drivers.openvino.native",
    "ort-cpu": "aionn.drivers.onnxruntime.c_interface",
}
"""By device, the module of the engine's C interface."""

CASES = (
    pytest.param("shapes_float.tflite", None),
    pytest.param("shapes_int8.tflite", None),
    pytest.param("digits_uint8.tflite", None, marks=pytest.mark.thorough),
    pytest.param("kws_dscnn_int8.tflite", "models", marks=pytest.mark.thorough),
    pytest.param("kws_dscnn_float.tflite", "models", marks=pytest.mark.long),
    pytest.param("mobilenet_v1_0.25_128_float.tflite", "models", marks=pytest.mark.long),
)


@pytest.fixture
def native_engine(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver whose engine can be called without Python, however long a machine that is busy takes for it."""
    if engine.device not in INTERFACES:
        pytest.skip("this engine is not called without Python")
    if not importlib.import_module(INTERFACES[engine.device]).is_known_version():
        pytest.skip("the C interface of this version of the engine is not known")
    if engine.device == "openvino-cpu":
        module = importlib.import_module(f"{engine.folder}.engine")
        monkeypatch.setattr(module, "BRIEF_NS", 60_000_000_000)
        monkeypatch.setattr(module, "REHEARSAL_MS", 60_000)
    elif engine.device == "ort-cpu":
        module = importlib.import_module(f"{engine.folder}.native")
        monkeypatch.setattr(module, "BRIEF_NS", 60_000_000_000)
        monkeypatch.setattr(module, "TRIED_NS", 60_000_000_000)
    return engine


@pytest.fixture
async def device(native_engine: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setenv("AIONN_NATIVE", "1")
    async with native_engine.make() as made:
        yield made


@pytest.mark.parametrize(("file", "folder"), CASES)
async def test_native_calls_give_the_bytes_of_python_in_every_buffer(
    device: Any, request: pytest.FixtureRequest, file: str, folder: str | None
) -> None:
    data: Path = request.getfixturevalue("example_data" if folder is None else "shared")
    model = load_tflite((data if folder is None else data / folder) / file).model
    prepared = await device.prepare_model(model)
    requests = [request_for(model, drawn(model, seed)) for seed in range(3)]
    wanted = []
    for asked in requests:
        wanted.append(await python_bytes(prepared, asked))
    assert len(set(wanted)) == 3 or "float" not in file, "noise is of one class there"
    burst = NativeBurst(prepared)
    for _ in range(4):
        for number, asked in enumerate(requests):
            await burst.execute(asked, number)
            assert output_bytes(asked) == wanted[number]
    assert answered(burst) == 9
    # The values of this frame, by the native call.
    replaced, source = requests[0].pools[0], requests[1].pools[0]
    assert isinstance(replaced, Memory) and isinstance(source, Memory)
    replaced.array[:] = source.array
    await burst.execute(requests[0], 0)
    assert output_bytes(requests[0]) == wanted[1] and answered(burst) == 10
    await burst.controller.aclose()
    await prepared.aclose()


async def test_each_slot_has_a_call_of_its_own(device: Any, example_data: Path) -> None:
    model = load_tflite(example_data / "shapes_int8.tflite").model
    prepared = await device.prepare_model(model)
    request = request_for(model, drawn(model, 1))
    assert prepared.native is not None
    calls = [prepared.native(prepared.bind(request)) for _ in range(3)]
    given = [words for call in calls if call is not None for words in call.words]
    assert all(call is not None and len(call.words) == device.info.slots for call in calls)
    assert len(set(given)) >= device.info.slots, "two calls at one time never have the same objects"
    await prepared.aclose()


async def test_a_closed_model_fails_in_its_bursts(device: Any, example_data: Path) -> None:
    model = load_tflite(example_data / "shapes_int8.tflite").model
    prepared = await device.prepare_model(model)
    request = request_for(model, drawn(model, 1))
    burst = NativeBurst(prepared)
    for _ in range(2):
        await burst.execute(request)
    assert answered(burst) == 1
    await prepared.aclose()
    with pytest.raises(aionn.Error, match="closed"):
        await burst.execute(request)
    assert answered(burst) == 1
    await burst.controller.aclose()


@pytest.mark.parametrize("value", [None, "0"])
async def test_without_the_switch_there_is_no_native_call(
    native_engine: Any, monkeypatch: pytest.MonkeyPatch, example_data: Path, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("AIONN_NATIVE", raising=False)
    else:
        monkeypatch.setenv("AIONN_NATIVE", value)
    async with native_engine.make() as device:
        prepared = await device.prepare_model(load_tflite(example_data / "shapes_int8.tflite").model)
        assert prepared.native is None
        await prepared.aclose()


def test_a_switch_of_another_value_is_rejected(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIONN_NATIVE", "yes")
    with pytest.raises(DeviceUnavailable, match="AIONN_NATIVE: expected 0 or 1, got 'yes'"):
        engine.make()


async def test_values_that_are_copied_and_real_time_stay_in_python(
    device: Any, example_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tflite(example_data / "shapes_int8.tflite").model
    prepared = await device.prepare_model(model)
    request = request_for(model, drawn(model, 1))
    arguments = prepared.bind(request)
    assert prepared.native is not None and prepared.native(arguments) is not None
    location = request.inputs[0].location
    pool = Memory.create(request.pools[0].size_bytes + 4096)
    at = msgspec.structs.replace
    shifted = at(request.inputs[0], location=at(location, offset=1))
    moved = [at(o, location=at(o.location, offset=location.length + 4032)) for o in request.outputs]
    odd = at(request, inputs=(shifted,), outputs=tuple(moved), pools=(pool,) * len(request.pools))
    assert prepared.native(prepared.bind(odd)) is None, "not aligned"
    monkeypatch.setattr(native_calls, "current", object)
    assert prepared.native(arguments) is None, "real time gives each execution a class"
    await prepared.aclose()


async def test_a_call_that_fails_fails_its_execution_alone(device: Any, example_data: Path) -> None:
    if device.info.name == "ort-cpu":
        pytest.skip("this engine does not check its objects; a test of its own has a call that fails")
    model = load_tflite(example_data / "shapes_int8.tflite").model
    prepared = await device.prepare_model(model)
    request = request_for(model, drawn(model, 1))
    wanted = await python_bytes(prepared, request)
    give, spoiled = prepared.native, []

    def native(arguments: Any) -> Any:
        call = give(arguments)
        if call is None or spoiled:
            return call
        spoiled.append(1)
        # No object of the engine: each of them rejects that.
        return call._replace(words=tuple((0,) * len(words) for words in call.words))

    burst = NativeBurst(prepared)
    burst.server._native = native
    await burst.execute(request, 0)
    with pytest.raises(GeneralFailure):
        await burst.execute(request, 0)
    assert answered(burst) == 0 and spoiled
    burst.server.free_slot(0)
    for _ in range(2):
        await burst.execute(request, 1)
        assert output_bytes(request) == wanted
    assert answered(burst) == 1
    await burst.controller.aclose()
    await prepared.aclose()


@pytest.mark.thorough
@pytest.mark.parametrize("native", ["0", "1"])
async def test_driver_processes_give_the_same_outputs(
    native_engine: Any, monkeypatch: pytest.MonkeyPatch, example_data: Path, native: str
) -> None:
    path = example_data / "shapes_int8.tflite"
    model = load_tflite(path).model
    inputs = [drawn(model, seed) for seed in range(4)]
    monkeypatch.setenv("AIONN_NATIVE", "0")
    async with native_engine.make() as device:
        prepared = await device.prepare_model(model)
        wanted = []
        for values in inputs:
            request = request_for(model, values)
            await prepared.execute_synchronously(request)
            wanted.append(output_bytes(request))
        await prepared.aclose()
    monkeypatch.setenv("AIONN_NATIVE", native)
    async with aionn.open(drivers=[native_engine.device], hang_after_s=20.0) as runtime:
        net = await runtime.compile(path)
        async with net.burst(slots=2) as burst:
            for seed in range(24):
                deadline = aionn.after(20) if seed % 3 else None
                result = await burst.execute(inputs[seed % 4], deadline=deadline)
                assert result.outputs[0].tobytes() == wanted[seed % 4]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family",
    [
        "depthwise_conv2d_per_channel",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("l2_pool_v1_2", "reduce_max")),
    ],
)
async def test_families_pass_in_bursts_without_python(
    native_engine: Any, monkeypatch: pytest.MonkeyPatch, shared: Path, family: str
) -> None:
    monkeypatch.setenv("AIONN_NATIVE", "1")
    report = await run_suite(
        native_engine.device,
        shared / "cts",
        contains=family,
        settings=Settings("burst", ("general",), 30.0),
        jobs=1,
    )
    assert [str(failure) for failure in report.failures] == []
    assert report.passed > 0
