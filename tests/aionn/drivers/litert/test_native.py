"""LiteRT without Python: engines by slot, and calls that outlive what Python forgets."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

import aionn
from aionn.conformance.requests import request_for
from aionn.models.tflite import load_tflite

pytest.importorskip("ai_edge_litert.interpreter", reason="LiteRT is not installed", exc_type=ImportError)


from aionn.drivers.kit.engines.bound import BOUND_MAX
from aionn.drivers.litert.driver import LitertDevice
from aionn.drivers.litert.in_place import is_known_version
from tests.aionn.burst.native_device import NativeBurst
from tests.aionn.drivers.engines.native_calls import drawn, output_bytes


@pytest.fixture(autouse=True)
def known() -> None:
    if not is_known_version():
        pytest.skip("the C interface of this version of LiteRT is not known")


@pytest.fixture
async def device(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LitertDevice]:
    monkeypatch.setenv("AIONN_NATIVE", "1")
    async with LitertDevice() as made:
        yield made


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
