"""Models for which OpenVINO has no memory or which it cannot copy, damaged ones, and threads that ask for its core concurrently.

The texts are those of OpenVINO's plugins for GPUs and NPUs, and of the C++ library.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.openvino.driver import OpenvinoDevice
from aionn.errors import DeviceUnavailable, GeneralFailure, ResourceExhausted
from aionn.hal import Model, OperandType, OperationType, Priority
from aionn.models.builder import GraphBuilder

pytest.importorskip("openvino", reason="OpenVINO is not installed")

from aionn.drivers.openvino import engine

ov = pytest.importorskip("openvino")

DAMAGED_COUNT = 40
WAIT_S = 20.0
TOGETHER_S = 0.2
"""How long one thread waits for another one that must not come."""

SHORTAGES = [
    RuntimeError(
        "[GPU] Exceeded max size of memory object allocation: requested 4831838208 bytes, but max alloc size supported by device "
        "is 1073741824 bytes."
    ),
    RuntimeError("[GPU] CL_OUT_OF_RESOURCES exception."),
    RuntimeError("[GPU] clEnqueueNDRangeKernel, error: CL_MEM_OBJECT_ALLOCATION_FAILURE"),
    RuntimeError("L0 zeMemAllocHost result: ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY, code 0x70000003"),
    MemoryError("std::bad_alloc"),
    RuntimeError("Exception from src/inference/src/dev/plugin.cpp:54: Resource temporarily unavailable"),
]


class Failing:
    """OpenVINO's core, or one of its compiled models, of which one call fails."""

    def __init__(self, whole: Any, call: str, error: Exception) -> None:
        self._whole = whole
        self._call = call
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return self._fail if name == self._call else getattr(self._whole, name)

    def _fail(self, *arguments: Any) -> Any:
        raise self._error

    def compile_model(self, *arguments: Any) -> Any:
        if self._call == "compile_model":
            self._fail()
        return Failing(self._whole.compile_model(*arguments), self._call, self._error)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Exception], None]:
    """Has a call of OpenVINO fail."""
    core = engine._core()

    def fail(call: str, error: Exception) -> None:
        failing = Failing(core, call, error)
        monkeypatch.setattr(engine, "_core", lambda: failing)

    return fail


def sines() -> Model:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (1, 4))
    return graph.build([graph.result(OperationType.SIN, [x], x, (1, 4))])


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: str(error)[:24])
@pytest.mark.parametrize("call", ["read_model", "query_model", "compile_model", "create_infer_request"])
async def test_model_for_which_there_is_no_memory_or_thread_is_no_unsupported_one(
    failing: Any, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    async with OpenvinoDevice() as device:
        failing(call, error)
        with pytest.raises(ResourceExhausted, match="OpenVINO has no memory or no thread left"):
            await device.prepare_model(sines())
        monkeypatch.undo()
        await (await device.prepare_model(sines())).aclose()


@pytest.mark.parametrize("call", ["read_model", "query_model", "compile_model"])
async def test_model_that_openvino_refuses_for_another_reason_is_not_supported(
    failing: Any, call: str
) -> None:
    device = OpenvinoDevice()
    failing(call, RuntimeError("Check 'false' failed at src/core/src/node.cpp"))
    with pytest.raises(Unsupported, match="OpenVINO rejects it: Check 'false' failed"):
        lowered = device.lower(sines())
        device.check(lowered)
        device.compile(lowered, is_relaxed=False, priority=Priority.MEDIUM, deadline_ns=None)


async def test_request_that_is_not_made_is_a_failure_whose_text_is_logged(
    failing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with OpenvinoDevice() as device:
        failing("create_infer_request", RuntimeError("Exception from /home/a/b.cpp"))
        with pytest.raises(GeneralFailure, match="the log has its message") as raised:
            await device.prepare_model(sines())
    assert "/home/a/b.cpp" not in str(raised.value)
    assert "/home/a/b.cpp" in caplog.text


async def test_plugin_that_cannot_be_loaded_is_reported_by_the_status(failing: Any) -> None:
    # A library that it needs is missing, for example.
    async with OpenvinoDevice() as device:
        failing(
            "get_property",
            RuntimeError("Cannot load library 'libopenvino_intel_cpu_plugin.so': libtbb.so.12"),
        )
        for _ in range(2):
            with pytest.raises(
                DeviceUnavailable, match=r"CPU: OpenVINO cannot describe it: .*libtbb\.so\.12"
            ):
                await device.status()


@pytest.mark.parametrize("call", ["export_model", "import_model"])
async def test_model_that_cannot_be_copied_is_compiled_for_each_slot(
    failing: Any, small: Any, call: str
) -> None:
    ones = np.ones((2, 3), np.float32)
    async with OpenvinoDevice() as device:
        failing(call, RuntimeError("Check 'false' failed"))
        prepared: Any = await device.prepare_model(small.sum_model())
        models = prepared.compiled._models
        assert len({id(model) for model in models}) == device.info.slots
        # The cache keeps the lowered model.
        assert prepared.compiled.kept()[0] == "onnx"
        restored = device.restore(prepared.cached(), priority=Priority.MEDIUM, deadline_ns=None)
        for one in (prepared, restored):
            for _ in range(device.info.slots):
                request = small.request([ones, ones], [(24, (2, 3))])
                await one.execute_synchronously(request)
                assert set(small.output(request).tolist()) == {2.0}
            await one.aclose()


def test_compiled_model_of_another_version_or_damaged_ends_nothing_but_itself() -> None:
    # The digests of the cache keep these away; a client of a served device could still write the digests of its own files.
    device, drawn = OpenvinoDevice(), random.Random(6)
    lowered = device.lower(sines())
    properties = device._properties(False, Priority.MEDIUM)
    blob = engine._exported(engine._compiled(lowered.file, "CPU", properties))
    for wrong in (blob.replace(b"ov=20", b"ov=19"), b"", bytes(100), blob[:50], blob[: len(blob) // 2]):
        with pytest.raises(Unsupported, match="OpenVINO rejects it"):
            engine.loaded_model(wrong, "blob", device.description, properties)
    refused = 0
    for _ in range(DAMAGED_COUNT):
        place = drawn.randrange(len(blob))
        try:
            engine.loaded_model(
                blob[:place] + drawn.randbytes(4) + blob[place + 4 :], "blob", device.description, properties
            )
        except (Unsupported, GeneralFailure, ResourceExhausted):
            refused += 1
    assert refused > DAMAGED_COUNT / 2


def test_threads_that_come_together_get_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    # Devices of one process prepare in threads of their own, and of two cores one would unmap what a signal needs.
    both = threading.Barrier(2)

    def make() -> object:
        try:
            both.wait(TOGETHER_S)
        except threading.BrokenBarrierError:
            pass  # The other one waits for this one's core.
        return object()

    monkeypatch.setattr(engine, "_cores", [])
    monkeypatch.setattr(ov, "Core", make)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(engine._core())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(found) == 2
    assert found[0] is found[1]
