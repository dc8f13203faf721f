"""OpenVINO without Python: which models have calls, the end of what they use, and a second core in the process."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from aionn.conformance.requests import request_for
from aionn.hal import Model, OperandType, OperationType, Priority
from aionn.models.builder import GraphBuilder
from aionn.models.tflite import load_tflite

pytest.importorskip("openvino", reason="OpenVINO is not installed")

from aionn.drivers.openvino import engine, native
from aionn.drivers.openvino.driver import OpenvinoDevice
from tests.aionn.burst.native_device import NativeBurst
from tests.aionn.drivers.engines.indexes import gather
from tests.aionn.drivers.engines.native_calls import answered, drawn, output_bytes, python_bytes
from tests.aionn.drivers.openvino.test_neighbours import rotated

FLOAT = OperandType.TENSOR_FLOAT32
WAIT_S = 30.0
EXIT_S = 120.0


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is brief, however busy the machine is."""
    if not native.is_known_version():
        pytest.skip("the C interface of this version of OpenVINO is not known")
    monkeypatch.setenv("AIONN_NATIVE", "1")
    monkeypatch.setattr(engine, "BRIEF_NS", 60_000_000_000)
    monkeypatch.setattr(engine, "REHEARSAL_MS", 60_000)


@pytest.fixture
async def device() -> AsyncIterator[OpenvinoDevice]:
    async with OpenvinoDevice() as made:
        yield made


def products(count: int, size: int) -> Model:
    """Products of matrices one after the other."""
    graph = GraphBuilder()
    x = value = graph.input(FLOAT, (size, size))
    no = graph.constant(False)
    for _ in range(count):
        value = graph.result(OperationType.BATCH_MATMUL, [value, x, no, no], x, (size, size))
    return graph.build([value])


def has_calls(prepared: Any, model: Model) -> bool:
    """Whether a prepared model gives a call for arguments that could all be used in place."""
    arguments = prepared.bind(request_for(model, drawn(model, 3)))
    return prepared.native is not None and prepared.native(arguments) is not None


# Which models


async def test_model_from_the_cache_has_calls_as_well(device: OpenvinoDevice) -> None:
    model = products(2, 16)
    prepared: Any = await device.prepare_model(model)
    restored: Any = device.restore(prepared.cached(), priority=Priority.MEDIUM, deadline_ns=None)
    assert has_calls(prepared, model) and has_calls(restored, model)
    await prepared.aclose()
    await restored.aclose()


@pytest.mark.parametrize("name", ["BRIEF_NS", "REHEARSAL_MS", "BLOB_BYTES_MAX"])
async def test_model_that_is_not_brief_is_executed_by_python(
    device: OpenvinoDevice, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(engine, name, 0)
    model = products(100, 256)
    prepared = await device.prepare_model(model)
    request = request_for(model, [np.eye(256, dtype=np.float32)])
    burst = NativeBurst(prepared)
    for _ in range(3):
        await burst.execute(request)
        assert output_bytes(request) == np.eye(256, dtype=np.float32).tobytes()
    assert answered(burst) == 0
    await burst.controller.aclose()
    await prepared.aclose()


async def test_model_that_is_exported_wrongly_is_executed_by_python(device: OpenvinoDevice) -> None:
    model = rotated()
    prepared = await device.prepare_model(model)
    assert not has_calls(prepared, model)
    await prepared.aclose()


async def test_model_that_looks_at_indexes_is_executed_by_python(device: OpenvinoDevice) -> None:
    prepared: Any = await device.prepare_model(gather())
    values = [np.arange(6, dtype=np.float32).reshape(3, 2), np.array([0, 2], np.int32)]
    assert prepared.native is None or prepared.native(prepared.bind(request_for(gather(), values))) is None
    await prepared.aclose()


async def test_other_bytes_than_python_s_leave_a_model_to_python(
    device: OpenvinoDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = native.NativeModel.run

    def wrong(self: Any, call: Any) -> int:
        status: int = run(self, call)
        call._kept[1][-1].flat[0] += 1
        return status

    monkeypatch.setattr(native.NativeModel, "run", wrong)
    model = products(2, 16)
    prepared = await device.prepare_model(model)
    assert not has_calls(prepared, model)
    await prepared.aclose()


@pytest.mark.parametrize("versions", [(), ("2024.", "2025.")])
async def test_interface_of_another_version_is_not_called(
    device: OpenvinoDevice, monkeypatch: pytest.MonkeyPatch, versions: tuple[str, ...]
) -> None:
    monkeypatch.setattr(native, "VERSIONS_KNOWN", versions)
    model = products(2, 16)
    prepared = await device.prepare_model(model)
    assert not has_calls(prepared, model)
    await prepared.aclose()


async def test_real_time_leaves_a_model_to_python(
    device: OpenvinoDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "current", object)
    model = products(2, 16)
    prepared = await device.prepare_model(model)
    assert not has_calls(prepared, model)
    await prepared.aclose()


# Ends


async def test_closed_model_frees_its_objects_when_its_bursts_forget_it(device: OpenvinoDevice) -> None:
    freed: list[int] = []
    model = products(2, 16)
    prepared: Any = await device.prepare_model(model)
    for slot in prepared._by_slot:
        weakref.finalize(slot.native, freed.append, 1)
    del slot
    request = request_for(model, drawn(model, 1))
    burst = NativeBurst(prepared)
    for _ in range(2):
        await burst.execute(request)
    assert answered(burst) == 1
    await prepared.aclose()
    gc.collect()
    assert freed == [], "the burst has calls of them"
    await burst.controller.aclose()
    gc.collect()
    assert freed == [1] * device.info.slots


async def test_exported_bytes_live_as_long_as_the_models_that_read_them(
    device: OpenvinoDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO's C interface copies no constants: freed, they are whatever the process keeps there next."""
    exported: list[bytes] = []

    def noted(blob: bytes, *arguments: Any) -> Any:
        exported.append(blob)
        return native.native_models(blob, *arguments)

    monkeypatch.setattr(engine, "native_models", noted)
    model = products(2, 16)
    prepared: Any = await device.prepare_model(model)
    assert has_calls(prepared, model)
    blob = exported.pop()
    assert sys.getrefcount(blob) - 2 == device.info.slots
    await prepared.aclose()
    prepared.release()
    del prepared
    gc.collect()
    assert sys.getrefcount(blob) == 2


def test_request_ends_before_its_model_where_the_collector_finds_both() -> None:
    """The exported bytes end with the model, and a request that is left keeps OpenVINO's own model, which refers to them."""
    ended: list[str] = []

    class Functions:
        def ov_infer_request_free(self, request: ctypes.c_void_p) -> None:
            ended.append("request")

    class Compiled:
        functions = Functions()

    model: Any = Compiled()
    weakref.finalize(model, ended.append, "model")
    call = native.KeptCall(model, ctypes.c_void_p(1), [])
    cycle: list[Any] = [model, call]
    cycle.append(cycle)
    del model, call, cycle
    gc.collect()
    assert ended == ["request", "model"]


async def test_model_that_is_closed_during_a_call_gives_its_result(device: OpenvinoDevice) -> None:
    model = products(200, 192)
    prepared: Any = await device.prepare_model(model)
    ones = np.ones((192, 192), np.float32) / 192
    request = request_for(model, [ones])
    burst = NativeBurst(prepared)
    await burst.execute(request)
    wanted = output_bytes(request)
    async with anyio.create_task_group() as group:
        group.start_soon(burst.execute, request)
        with anyio.fail_after(WAIT_S):
            while burst.server.native_activity()[0] == 0:
                await anyio.lowlevel.checkpoint()
        group.start_soon(prepared.aclose)
        del prepared
        burst.server.free_slot(0)
        gc.collect()
    assert output_bytes(request) == wanted and answered(burst) == 1
    await burst.controller.aclose()


async def test_calls_and_python_together_give_the_same_bytes(
    device: OpenvinoDevice, example_data: Path
) -> None:
    """Two bursts and executions of Python share the slots of the device and one prepared model."""
    model = load_tflite(example_data / "shapes_float.tflite").model
    prepared = await device.prepare_model(model)
    requests = [request_for(model, drawn(model, seed)) for seed in range(3)]
    wanted = []
    for request in requests:
        wanted.append(await python_bytes(prepared, request))
    bursts = [NativeBurst(prepared) for _ in range(2)]

    async def by_burst(place: int) -> None:
        for _ in range(50):
            await bursts[place].execute(requests[place])
            assert output_bytes(requests[place]) == wanted[place]

    async def by_python() -> None:
        for _ in range(50):
            await prepared.execute_synchronously(requests[2])
            assert output_bytes(requests[2]) == wanted[2]

    async with anyio.create_task_group() as group:
        for place in range(2):
            group.start_soon(by_burst, place)
        group.start_soon(by_python)
    assert device.gate._slots.held_count <= device.info.slots
    assert sum(map(answered, bursts)) > 0
    for burst in bursts:
        await burst.controller.aclose()
    await prepared.aclose()


# A second core


SIGNALS = """
import asyncio, os, signal, threading
import numpy as np
from aionn.conformance.requests import request_for
from aionn.drivers.openvino import engine
from aionn.drivers.openvino.driver import OpenvinoDevice
from aionn.hal import OperandType, OperationType
from aionn.models.builder import GraphBuilder
from tests.support.processes.signal_stack import is_signal_stack_lost

engine.BRIEF_NS, engine.REHEARSAL_MS = 60_000_000_000, 60_000
graph = GraphBuilder()
x = graph.input(OperandType.TENSOR_FLOAT32, (4, 4))
model = graph.build([graph.result(OperationType.SIN, [x], x, (4, 4))])
came, lost, calls = [], [], []
signal.signal(signal.SIGALRM, lambda number, frame: came.append(number))
signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)

async def use():
    async with OpenvinoDevice() as device:
        prepared = await device.prepare_model(model)
        request = request_for(model, [np.ones((4, 4), np.float32)])
        await prepared.execute_synchronously(request)
        calls.append(prepared.native(prepared.bind(request)) is not None)
        await prepared.aclose()
    lost.append(is_signal_stack_lost())

for turn in range(2):
    threads = [threading.Thread(target=lambda: asyncio.run(use())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(use())
    os.kill(os.getpid(), signal.SIGTERM)
signal.setitimer(signal.ITIMER_REAL, 0, 0)
assert calls == [True] * 8, calls
assert lost == [False] * 8, lost
assert came.count(signal.SIGALRM) > 1 and came.count(signal.SIGTERM) >= 2, came
print("ended")
"""


@pytest.mark.slow
def test_signals_are_handled_after_two_cores_in_many_threads(repository: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", SIGNALS], cwd=repository, capture_output=True, text=True, timeout=EXIT_S
    )
    assert (found.returncode, found.stdout.strip()) == (0, "ended"), found.stderr
