"""What `openvino-cpu` takes and refuses, how it uses the client's memory, and what happens when OpenVINO fails or hangs."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.conformance.requests import request_for
from aionn.drivers import registry
from aionn.drivers.kit.arguments import OutputArea
from aionn.drivers.openvino import driver, hardware
from aionn.drivers.openvino.driver import OpenvinoDevice
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import (
    DeadObject,
    DeviceUnavailable,
    Error,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    ResourceExhausted,
)
from aionn.hal import FusedActivation, Memory, Model, Operand, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.models.onnx.schema import read_model

pytest.importorskip("openvino", reason="OpenVINO is not installed")

from aionn.drivers.openvino import engine
from tests.aionn.drivers.engines.indexes import check_index_out_of_range, gather

ov = pytest.importorskip("openvino")

FLOAT = OperandType.TENSOR_FLOAT32
WAIT_S = 60.0


def sines(shape: Sequence[int] = (16, 64)) -> Model:
    graph = GraphBuilder()
    x = graph.input(FLOAT, shape)
    return graph.build([graph.result(OperationType.SIN, [x], x, shape)])


# What there is


def test_package_without_the_plugin_makes_the_device_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    record = "openvino/libs/libopenvino_intel_cpu_plugin.so,sha256=a,1\nopenvino/libs/plugin.so,,\n"
    monkeypatch.setattr(importlib.metadata.PathDistribution, "read_text", lambda self, name: record)
    monkeypatch.setattr(driver, "version_of", lambda distribution: "2026.4.1")
    assert registry.built_in_info("openvino-cpu", "a") is not None
    with pytest.raises(
        DeviceUnavailable, match=r"lacks libopenvino_intel_npu_plugin\.so, the plugin for NPU"
    ):
        registry.built_in_info("openvino-npu", "a")


async def test_device_that_openvino_does_not_find_is_unavailable_with_the_reason(small: Any) -> None:
    async with aionn.open(drivers=["openvino-npu", "reference"]) as runtime:
        assert [device.name for device in runtime.devices] == ["reference"]
        (missing,) = runtime.unavailable
        assert "finds no NPU, but CPU: this machine has none, or its driver" in missing.reason
        assert (await runtime.compile(small.sum_model())).devices == ("reference",)


@pytest.mark.thorough
@pytest.mark.forked("any")
def test_command_lists_the_devices_that_are_used_only_where_they_are_named(
    aionn_here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "class" / "accel" / "accel0" / "device"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(
        "0x8086\n"
    )  # A machine with an NPU, whose libraries are not installed here.
    monkeypatch.setattr(hardware.found_names, "__defaults__", (tmp_path,))
    monkeypatch.setattr(registry, "SUPERSEDED", {"openvino-cpu": "json"})
    finished = aionn_here("devices", "--json")
    assert (finished.returncode, finished.stderr) == (0, "")
    report = json.loads(finished.stdout)
    assert [(d["name"], d["status"]) for d in report["on_request"]] == [("openvino-cpu", "available")]
    assert "openvino-cpu" not in [d["name"] for d in report["devices"]]
    reasons = {missing["name"]: missing["reason"] for missing in report["unavailable"]}
    assert "finds no NPU, but CPU: this machine has none, or its driver" in reasons["openvino-npu"]


@pytest.mark.slow
def test_command_runs_a_model_on_a_device_that_is_used_only_where_it_is_named(
    aionn_here: Any, example_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "SUPERSEDED", {"openvino-cpu": "json"})
    finished = aionn_here("run", example_data / "digits_float.tflite", "--device", "openvino-cpu", "--json")
    assert (finished.returncode, finished.stderr) == (0, "")
    assert json.loads(finished.stdout)["device"] == "openvino-cpu"


@pytest.mark.parametrize("command", ["run", "inspect"])
def test_command_tells_why_a_named_device_cannot_be_used(
    aionn_here: Any, example_data: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(driver, "version_of", lambda distribution: None)
    finished = aionn_here(command, example_data / "digits_float.tflite", "--device", "openvino-gpu")
    assert finished.returncode == 2
    assert "device 'openvino-gpu' is unavailable: openvino is not installed" in finished.stderr


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("openvino-gpu7", r"which aionn\.open\(drivers=\['openvino-gpu7'\]\) adds where it can be used"),
        ("openvino", r"did you mean openvino-cpu\?"),
    ],
)
async def test_error_for_an_unknown_device_tells_of_those_that_are_used_only_where_they_are_named(
    small: Any, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    monkeypatch.setattr(registry, "SUPERSEDED", {"openvino-cpu": "json"})
    async with aionn.open(drivers=["reference"]) as runtime:
        with pytest.raises(InvalidArgument, match=hint):
            await runtime.compile(small.sum_model(), devices=name)


async def test_error_for_a_device_that_is_used_only_where_it_is_named_tells_how(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "SUPERSEDED", {"openvino-cpu": "json"})
    async with aionn.open(drivers=["reference"]) as runtime:
        with pytest.raises(InvalidArgument, match=r"which aionn\.open\(drivers=\['openvino-cpu'\]\) adds"):
            await runtime.compile(small.sum_model(), devices="openvino-cpu")


def test_processor_is_described() -> None:
    description = engine.describe("CPU")
    assert "FP32" in description.capabilities
    assert {"NUM_STREAMS", "INFERENCE_PRECISION_HINT", "ENABLE_CPU_PINNING"} <= description.writable


@pytest.mark.sampled(2)
@pytest.mark.parametrize("isolation", ["in_process", "process"])
@pytest.mark.thorough
def test_use_is_not_reported_to_the_makers_of_openvino(tmp_path: Path, isolation: str) -> None:
    code = (
        "import anyio, aionn, sys, threading\n"
        "from aionn.testing.models import identity\n"
        "async def main():\n"
        f"    async with aionn.open(drivers=['openvino-cpu'], isolation={isolation!r}) as runtime:\n"
        "        await runtime.compile(identity())\n"
        "if __name__ == '__main__':\n"
        "    anyio.run(main)\n"
        "    assert not [name for name in sys.modules if name.startswith('openvino_telemetry')]\n"
    )
    (tmp_path / "program.py").write_text(code)
    # OpenVINO does not report from a machine for continuous integration.
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH")}
    command = [sys.executable, str(tmp_path / "program.py")]
    subprocess.run(command, env=environment | {"HOME": str(tmp_path)}, check=True, timeout=60)
    assert not (tmp_path / "intel").exists()


# Support


async def test_support_is_answered_per_operation_by_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = GraphBuilder()
    x = graph.input(FLOAT, (1, 4))
    value = graph.result(OperationType.RELU, [x], x, (1, 4))
    value = graph.result(OperationType.ELU, [value, graph.constant(-1.0)], x, (1, 4))
    model = graph.build([graph.result(OperationType.TANH, [value], x, (1, 4))])
    asked = []
    ask = engine.rejected_operations

    def counted(*arguments: Any) -> Any:
        asked.append(arguments)
        return ask(*arguments)

    monkeypatch.setattr(engine, "rejected_operations", counted)
    async with OpenvinoDevice() as device:
        assert await device.supported_operations(model) == (True, False, True)
        assert len(asked) == 1
        with pytest.raises(InvalidArgument, match="openvino-cpu does not support ELU"):
            await device.prepare_model(model)
        assert len(asked) == 1


async def test_operation_that_openvino_has_no_kernel_for_is_not_supported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = GraphBuilder()
    x = graph.input(FLOAT, (1, 4))
    value = graph.result(OperationType.RELU, [x], x, (1, 4))
    model = graph.build([graph.result(OperationType.TANH, [value], x, (1, 4))])
    monkeypatch.setattr(engine, "rejected_operations", lambda *arguments: frozenset((1,)))
    async with OpenvinoDevice() as device:
        assert await device.supported_operations(model) == (True, False)


@pytest.mark.parametrize("name", ["DIV", "BATCH_MATMUL"])
async def test_integers_that_would_be_computed_as_floats_are_not_supported(name: str) -> None:
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_INT32, (1, 2, 2))
    constants = [graph.constant(0)] if name == "DIV" else [graph.constant(False), graph.constant(False)]
    model = graph.build([graph.result(OperationType[name], [a, a, *constants], a, (1, 2, 2))])
    async with OpenvinoDevice() as device:
        assert await device.supported_operations(model) == (False,)


INTEGERS = np.array(
    [
        0,
        1,
        -1,
        2**24,
        2**24 + 1,
        -(2**24) - 1,
        2**31 - 2,
        2**31 - 1,
        -(2**31),
        2**30 + 7,
        33554433,
        -987654321,
    ],
    np.int32,
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["ADD", "SUB", "MUL", "MAXIMUM", "MINIMUM", "EQUAL", "NOT_EQUAL"])
async def test_integers_are_exact(name: str) -> None:
    a, b = np.repeat(INTEGERS, len(INTEGERS)), np.tile(INTEGERS, len(INTEGERS))
    graph = GraphBuilder()
    first, second = (graph.input(OperandType.TENSOR_INT32, (len(a),)) for _ in range(2))
    is_fused = name in ("ADD", "SUB", "MUL")
    is_comparison = name not in ("ADD", "SUB", "MUL", "MAXIMUM", "MINIMUM")
    kind = OperandType.TENSOR_BOOL8 if is_comparison else OperandType.TENSOR_INT32
    result = graph.variable(kind, (len(a),))
    graph.operation(
        OperationType[name], [first, second, *([graph.constant(0)] if is_fused else [])], [result]
    )
    model = graph.build([result])
    found = []
    for make in (ReferenceDevice, OpenvinoDevice):
        async with make() as device:
            prepared = await device.prepare_model(model)
            request = request_for(model, [a, b])
            await prepared.execute_synchronously(request)
            location = request.outputs[0].location
            pool = request.pools[location.pool_index]
            assert isinstance(pool, Memory)
            found.append(pool.array[location.offset : location.offset + location.length].tobytes())
            await prepared.aclose()
    assert found[0] == found[1]


# Memory


def slot_for(device: OpenvinoDevice, model: Model) -> engine.Slot:
    lowered = device.lower(model)
    properties = device._properties(False, aionn.hal.Priority.MEDIUM)
    slot = engine.compiled_model(lowered, device.description, properties).make_slots(lowered, 1)[0]
    assert isinstance(slot, engine.Slot)
    return slot


async def test_slots_of_a_burst_are_used_in_place_and_known_again() -> None:
    pool = Memory.create(16384)
    async with OpenvinoDevice() as device:
        slot = slot_for(device, sines())
        x = pool.array[:4096].view(np.float32).reshape(16, 64)
        y = pool.array[8192 : 8192 + 4096]
        areas = [OutputArea(Operand(type=FLOAT, dimensions=(16, 64)), (16, 64), y)]
        for seed in range(3):
            x[...] = np.random.default_rng(seed).random((16, 64), dtype=np.float32)
            (shape,) = slot.run([x], areas)
            assert shape.dimensions == (16, 64)
            np.testing.assert_allclose(y.view(np.float32).reshape(16, 64), np.sin(x), atol=1e-6)
        (bound,) = slot._bound.values()
        assert (bound.copied_in, bound.copied_out) == ([], [])
        tensors = bound.arguments
        assert [one.data.ctypes.data for one in tensors] == [x.ctypes.data, y.ctypes.data]


async def test_input_in_memory_that_cannot_be_written_is_used_in_place(tmp_path: Path) -> None:
    values = np.random.default_rng(1).random((16, 64), dtype=np.float32)
    (tmp_path / "pool").write_bytes(values.tobytes() + bytes(4096))
    with open(tmp_path / "pool", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        x: Any = np.frombuffer(mapped, np.uint8)[:4096].view(np.float32).reshape(16, 64)
        out = np.zeros(8192, np.uint8)
        start = -out.ctypes.data % 64
        areas = [OutputArea(Operand(type=FLOAT, dimensions=(16, 64)), (16, 64), out[start : start + 4096])]
        async with OpenvinoDevice() as device:
            slot = slot_for(device, sines())
            slot.run([x], areas)  # A write would end the process.
            (bound,) = slot._bound.values()
            assert bound.copied_in == []
            np.testing.assert_allclose(
                areas[0].buffer.view(np.float32).reshape(16, 64), np.sin(values), atol=1e-6
            )
        del x


@pytest.mark.parametrize("index", [3, -1, 2**31 - 1, -(2**31)])
async def test_index_out_of_range_is_an_error_and_the_model_goes_on(small: Any, index: int) -> None:
    async with OpenvinoDevice() as device:
        await check_index_out_of_range(device, small, index, match="an index is out of range")


async def test_indexes_are_looked_at_after_a_restore_as_well(small: Any) -> None:
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    async with OpenvinoDevice() as device:
        prepared = await device.prepare_model(gather())
        kept = prepared.cached()
        await prepared.aclose()
        restored = device.restore(kept, priority=aionn.hal.Priority.MEDIUM, deadline_ns=None)
        request = small.request([values, np.array([0, 7], dtype=np.int32)], [(16, (2, 2))])
        with pytest.raises(InvalidArgument, match="an index is out of range"):
            await restored.execute_synchronously(request)
        await restored.aclose()


def test_value_that_is_broadcast_to_a_higher_rank_is_given_it_before() -> None:
    # OpenVINO removes operations with a constant that change no number, and the broadcasting with them.
    graph = GraphBuilder()
    x = graph.input(FLOAT, (1, 1))
    constant = graph.constant(np.zeros((1, 1, 1), np.float32), FLOAT)
    none = graph.constant(int(FusedActivation.NONE))
    model = graph.build([graph.result(OperationType.ADD, [x, constant, none], x, (1, 1, 1))])
    nodes = read_model(OpenvinoDevice().lower(model).file).graph.nodes
    assert [node.op_type for node in nodes] == ["Reshape", "Add", "Identity"]


# Failures


@pytest.mark.parametrize(
    ("text", "kind"),
    [("Exception from src/inference: /home/a/b.cpp", GeneralFailure), ("std::bad_alloc", ResourceExhausted)],
)
async def test_texts_of_openvino_are_logged_and_not_shown(
    small: Any, caplog: pytest.LogCaptureFixture, text: str, kind: type[Error]
) -> None:
    ones = np.ones((2, 3), np.float32)
    async with OpenvinoDevice() as device:
        prepared = await device.prepare_model(small.sum_model())
        slot: Any = prepared._idle[-1]
        wait = slot._wait

        def fail() -> None:
            wait()
            raise RuntimeError(text)

        slot._wait = fail
        with caplog.at_level(logging.WARNING, "aionn.driver"), pytest.raises(kind) as raised:
            await prepared.execute_synchronously(small.request([ones, ones], [(24, (2, 3))]))
        assert text not in str(raised.value)
        assert text in caplog.text
        slot._wait = wait
        await prepared.execute_synchronously(small.request([ones, ones], [(24, (2, 3))]))
        await prepared.aclose()


@pytest.mark.parametrize("is_brief", [False, True])
@pytest.mark.parametrize("is_stopped", [False, True])
async def test_brief_executions_alone_are_computed_without_another_thread(
    monkeypatch: pytest.MonkeyPatch, is_brief: bool, is_stopped: bool
) -> None:
    x = np.random.default_rng(4).random((16, 64), dtype=np.float32)
    out = np.zeros(4096, np.uint8)
    areas = [OutputArea(Operand(type=FLOAT, dimensions=(16, 64)), (16, 64), out)]
    calls: list[str] = []
    (base,) = {one for one in ov.InferRequest.__mro__ if "infer" in vars(one)} - {ov.InferRequest}
    infer, start_async = base.infer, ov.InferRequest.start_async

    def noted_infer(*arguments: Any) -> Any:
        calls.append("infer")
        return infer(*arguments)

    def noted_start(request: Any) -> None:
        calls.append("start_async")
        start_async(request)

    async with OpenvinoDevice() as device:
        slot = slot_for(device, sines())
        slot.run([x], areas)
        monkeypatch.setattr(base, "infer", noted_infer)
        monkeypatch.setattr(ov.InferRequest, "start_async", noted_start)
        out[:] = 0
        slot.begin()
        slot.is_brief = is_brief
        if is_stopped:
            slot.stop()
        try:
            slot.run([x], areas)
        except GeneralFailure:
            assert is_stopped
        else:
            np.testing.assert_allclose(out.view(np.float32).reshape(16, 64), np.sin(x), atol=1e-6)
        assert calls == ["infer" if is_brief and not is_stopped else "start_async"]


@pytest.mark.parametrize("is_brief", [False, True])
async def test_executions_that_are_not_brief_alone_can_be_stopped(
    monkeypatch: pytest.MonkeyPatch, small: Any, is_brief: bool
) -> None:
    ones = np.ones((2, 3), np.float32)
    async with OpenvinoDevice() as device:
        prepared: Any = await device.prepare_model(small.sum_model())
        watched: list[Any] = []
        interruptible = prepared.interruptible

        def noted(*arguments: Any) -> Any:
            watched.append(arguments)
            return interruptible(*arguments)

        monkeypatch.setattr(prepared, "interruptible", noted)
        for slot in prepared._idle:
            slot.is_brief = is_brief
        request = small.request([ones, ones], [(24, (2, 3))])
        await prepared.execute_synchronously(request)
        assert set(small.output(request).tolist()) == {2.0}
        assert len(watched) == (not is_brief)
        await prepared.aclose()


@pytest.mark.slow
async def test_compilation_that_takes_a_minute_is_answered_at_its_deadline(small: Any) -> None:
    drivers = {"slow": "tests.aionn.drivers.openvino.hanging_devices:SlowDevice"}
    async with aionn.open(drivers=drivers, partition="without_fallback") as runtime:
        await runtime.supported_operations(small.sum_model())  # The process and OpenVINO have started.
        started_s = time.monotonic()
        with pytest.raises(MissedDeadline):
            await runtime.compile(small.sum_model(), devices="slow", deadline=aionn.after(1.0))
    # Nor does the end of the runtime wait for the compilation.
    assert time.monotonic() - started_s < 30


@pytest.mark.thorough
async def test_request_that_never_comes_back_is_answered_at_its_deadline_and_its_process_ended(
    small: Any, capfd: Any
) -> None:
    ones = np.ones((2, 3), np.float32)
    drivers = {"hanging": "tests.aionn.drivers.openvino.hanging_devices:HangingDevice"}
    async with aionn.open(drivers=drivers, hang_after_s=2) as runtime:
        net = await runtime.compile(small.sum_model(), devices="hanging")
        pid = runtime.device("hanging").pid
        with pytest.raises(MissedDeadline), anyio.fail_after(WAIT_S):
            await net.execute([ones, ones], deadline=aionn.after(0.3))
        # The request keeps its slot and the client's memory, until the process that hangs is ended.
        with pytest.raises(DeadObject), anyio.fail_after(WAIT_S):
            await net.execute([ones, ones])
            await net.execute([ones, ones])
        await runtime.compile(small.sum_model(), devices="hanging")
        assert runtime.device("hanging").pid not in (None, pid)
