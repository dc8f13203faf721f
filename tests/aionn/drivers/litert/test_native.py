"""LiteRT without Python: the bytes of Python's executions, engines by slot, calls that outlive what Python forgets, a switch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio.lowlevel
import msgspec
import numpy as np
import pytest

import aionn
from aionn.conformance.requests import request_for
from aionn.conformance.suite import Settings
from aionn.conformance.workers import run_suite
from aionn.errors import DeviceUnavailable
from aionn.hal import Memory, Request
from aionn.models.tflite import load_tflite

pytest.importorskip("ai_edge_litert.interpreter", reason="LiteRT is not installed", exc_type=ImportError)


from aionn.drivers.kit.engines import native as native_calls
from aionn.drivers.kit.engines.bound import BOUND_MAX
from aionn.drivers.litert.driver import LitertDevice
from aionn.drivers.litert.in_place import is_known_version
from tests.aionn.burst.native_device import NativeBurst

MODELS = ("shapes_float.tflite", "shapes_int8.tflite")


@pytest.fixture(autouse=True)
def known() -> None:
    if not is_known_version():
        pytest.skip("the C interface of this version of LiteRT is not known")


@pytest.fixture
async def device(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LitertDevice]:
    monkeypatch.setenv("AIONN_NATIVE", "1")
    async with LitertDevice() as made:
        yield made


def drawn(model: Any, seed: int) -> list[np.ndarray[Any, Any]]:
    source = np.random.default_rng(seed)
    (operand,) = model.main.inputs
    if "FLOAT" in operand.type.name:
        return [source.random(operand.dimensions, dtype=np.float32)]
    return [source.integers(-128, 128, operand.dimensions).astype(np.int8)]


def output_bytes(request: Request) -> bytes:
    location = request.outputs[0].location
    pool = request.pools[location.pool_index]
    assert isinstance(pool, Memory)
    answer = pool.array[location.offset : location.offset + location.length].tobytes()
    pool.array[location.offset : location.offset + location.length] = 0xAA
    return answer


@pytest.mark.parametrize("file", MODELS)
async def test_native_calls_give_the_bytes_of_python_in_every_buffer(
    device: LitertDevice, example_data: Path, file: str
) -> None:
    model = load_tflite(example_data / file).model
    prepared = await device.prepare_model(model)
    requests = [request_for(model, drawn(model, seed)) for seed in range(3)]
    wanted = []
    for request in requests:
        await prepared.execute_synchronously(request)
        wanted.append(output_bytes(request))
    assert len(set(wanted)) == 3 or "int8" in file, "noise is of one class there"
    burst = NativeBurst(prepared)
    for _ in range(4):
        for number, request in enumerate(requests):
            await burst.execute(request, number)
            assert output_bytes(request) == wanted[number]
    assert burst.server._answers is not None and burst.server._answers.activity()[0] == 9
    # The values of this frame, by the native call.
    replaced = requests[0].pools[0]
    source = requests[1].pools[0]
    assert isinstance(replaced, Memory) and isinstance(source, Memory)
    replaced.array[:] = source.array
    await burst.execute(requests[0], 0)
    assert output_bytes(requests[0]) == wanted[1]
    await burst.controller.aclose()
    await prepared.aclose()


async def test_a_native_call_outlives_the_sets_that_python_forgets(
    device: LitertDevice, example_data: Path
) -> None:
    """Python drops LiteRT's objects of all sets of arguments when there are too many; a burst's calls have objects of their own."""
    model = load_tflite(example_data / "shapes_int8.tflite").model
    prepared = await device.prepare_model(model)
    request = request_for(model, drawn(model, 1))
    burst = NativeBurst(prepared)
    await burst.execute(request)
    wanted = output_bytes(request)
    engine = prepared._by_slot[0]
    before = len(engine._bound)
    values = drawn(model, 2)
    for _ in range(BOUND_MAX + 8):
        await prepared.execute_synchronously(request_for(model, values))
    assert len(engine._bound) < BOUND_MAX + before, "it has forgotten some"
    gc.collect()
    while device.gate._slots.held_count:  # A job is released after its answer.
        await anyio.lowlevel.checkpoint()
    for _ in range(3):
        await burst.execute(request)
        assert output_bytes(request) == wanted
    assert burst.server._answers is not None and burst.server._answers.activity()[0] == 3
    await burst.controller.aclose()
    await prepared.aclose()


async def test_a_closed_model_frees_its_engines_when_its_bursts_forget_it(
    device: LitertDevice, example_data: Path
) -> None:
    destroyed = []
    model = load_tflite(example_data / "shapes_int8.tflite").model
    prepared = await device.prepare_model(model)
    for engine in prepared._by_slot:
        weakref.finalize(engine, destroyed.append, 1)
    del engine
    request = request_for(model, drawn(model, 1))
    burst = NativeBurst(prepared)
    for _ in range(2):
        await burst.execute(request)
    await prepared.aclose()
    gc.collect()
    assert destroyed == [], "the burst has calls of them"
    with pytest.raises(aionn.Error, match="closed"):
        await burst.execute(request)
    await burst.controller.aclose()
    gc.collect()
    assert destroyed == [1] * device.info.slots


async def test_executions_of_python_use_the_engine_of_their_slot(
    device: LitertDevice, example_data: Path
) -> None:
    model = load_tflite(example_data / "shapes_int8.tflite").model
    prepared = await device.prepare_model(model)
    used: list[tuple[int, int]] = []
    for number, engine in enumerate(prepared._by_slot):
        run = engine.run

        def noting(*arguments: Any, run: Any = run, number: int = number) -> Any:
            (slot,) = [
                i for i, job in enumerate(device.gate._slots._holders) if job is device.gate._running.job
            ]
            used.append((slot, number))
            return run(*arguments)

        engine.run = noting  # type: ignore[method-assign]
    requests = [request_for(model, drawn(model, seed)) for seed in range(6)]
    launches = [prepared.launch(request) for request in requests]
    for launch in launches:
        await launch
    assert len(used) == 6 and all(slot == number for slot, number in used)
    await prepared.aclose()


@pytest.mark.parametrize("value", [None, "0"])
async def test_without_the_switch_there_is_no_native_call(
    monkeypatch: pytest.MonkeyPatch, example_data: Path, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("AIONN_NATIVE", raising=False)
    else:
        monkeypatch.setenv("AIONN_NATIVE", value)
    async with LitertDevice() as device:
        prepared = await device.prepare_model(load_tflite(example_data / "shapes_int8.tflite").model)
        assert prepared.native is None
        await prepared.aclose()


def test_a_switch_of_another_value_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIONN_NATIVE", "yes")
    with pytest.raises(DeviceUnavailable, match="AIONN_NATIVE: expected 0 or 1, got 'yes'"):
        LitertDevice()


async def test_values_that_are_copied_and_real_time_stay_in_python(
    device: LitertDevice, example_data: Path, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("native", ["0", "1"])
async def test_driver_processes_give_the_same_outputs(
    monkeypatch: pytest.MonkeyPatch, example_data: Path, native: str
) -> None:
    from aionn.drivers.litert.engine import Engine
    from aionn.drivers.litert.lowering import lower

    monkeypatch.setenv("AIONN_NATIVE", native)
    path = example_data / "shapes_int8.tflite"
    model = load_tflite(path).model
    engine = Engine(lower(model), 1, [tuple(o.dimensions) for o in model.main.outputs])
    async with aionn.open(drivers=["litert-cpu"], hang_after_s=20.0) as runtime:
        net = await runtime.compile(path)
        async with net.burst(slots=2) as burst:
            for seed in range(24):
                values = drawn(model, seed % 4)
                deadline = aionn.after(20) if seed % 3 else None
                result = await burst.execute(values, deadline=deadline)
                assert result.outputs[0].tobytes() == engine.compute(values)[0].tobytes()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family",
    [
        "depthwise_conv2d_per_channel",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("l2_pool_v1_2", "reduce_max")),
    ],
)
async def test_families_pass_in_bursts_without_python(
    monkeypatch: pytest.MonkeyPatch, shared: Path, family: str
) -> None:
    monkeypatch.setenv("AIONN_NATIVE", "1")
    report = await run_suite(
        "litert-cpu", shared / "cts", contains=family, settings=Settings("burst", ("general",), 30.0), jobs=1
    )
    assert [str(failure) for failure in report.failures] == []
    assert report.passed > 0
