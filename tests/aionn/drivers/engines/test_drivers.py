"""What all drivers around engines have in common: what they take and refuse, what they are without the engine, and their caches."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest

import aionn
from aionn.conformance.expectations import driver_expectations
from aionn.drivers import registry
from aionn.drivers.kit import caching
from aionn.drivers.kit.arguments import OutputArea
from aionn.drivers.kit.caching import CacheContents
from aionn.drivers.kit.onnx import device as onnx_device
from aionn.drivers.kit.onnx.device import OnnxDevice
from aionn.drivers.onnxruntime import providers
from aionn.errors import DeviceUnavailable, GeneralFailure
from aionn.hal import (
    CacheFiles,
    DeviceStatus,
    FusedActivation,
    Memory,
    Model,
    OperandType,
    OperationType,
    Priority,
)
from aionn.interpreter import Interpreter, RunControl
from aionn.models.builder import GraphBuilder

WAIT_S = 60.0

HYPERBOLIC_TANGENT = 4
"""The HAL's number of the activation of recurrent layers."""


def chain_of(*steps: tuple[OperationType, Sequence[Any]], shape: Sequence[int] = (1, 4)) -> Model:
    """Float32 operations one after the other; a step's further arguments are constants."""
    graph = GraphBuilder()
    value = first = graph.input(OperandType.TENSOR_FLOAT32, shape)
    for kind, arguments in steps:
        value = graph.result(kind, [value, *(graph.constant(a) for a in arguments)], first, shape)
    return graph.build([value])


@pytest.fixture
def no_version_kept() -> Iterator[None]:
    """ONNX Runtime's version is looked up once for a process."""
    providers.installed_version.cache_clear()
    yield
    providers.installed_version.cache_clear()


# Without the engine


def test_missing_package_makes_the_device_unavailable(
    described: Any, monkeypatch: pytest.MonkeyPatch, no_version_kept: None
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    extra = described.folder.rpartition(".")[2]
    reason = rf"{described.distribution} is not installed; pip install 'aionn\[{extra}\]'"
    with pytest.raises(DeviceUnavailable, match=reason):
        registry.built_in_info(described.device, described.device)


def test_old_package_makes_the_device_unavailable(
    described: Any, monkeypatch: pytest.MonkeyPatch, no_version_kept: None
) -> None:
    def old(name: str) -> str:
        if name != described.distribution:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.4.0"

    monkeypatch.setattr(importlib.metadata, "version", old)
    with pytest.raises(DeviceUnavailable, match=r"expected version [\d.]+ or later, got 0\.4\.0"):
        described.make()


async def test_runtime_goes_on_without_it(
    described: Any, monkeypatch: pytest.MonkeyPatch, no_version_kept: None, small: Any
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    async with aionn.open(drivers=[described.device, "reference"], isolation="in_process") as runtime:
        assert [device.name for device in runtime.devices] == ["reference"]
        (left_out,) = runtime.unavailable
        assert left_out.name == described.device
        assert "not installed" in left_out.reason
        compilation = await runtime.compile(small.sum_model())
        assert compilation.devices == ("reference",)


async def test_engine_that_cannot_be_imported_makes_the_device_unavailable_when_a_model_comes(
    engine: Any, monkeypatch: pytest.MonkeyPatch, small: Any
) -> None:
    # A library that it needs is missing, for example.
    monkeypatch.delattr(f"{engine.folder}.engine", raising=False)
    monkeypatch.setitem(sys.modules, f"{engine.folder}.engine", None)
    async with engine.make() as device:
        with pytest.raises(
            DeviceUnavailable, match=f"{engine.device}: its engine is installed and cannot be"
        ):
            await device.prepare_model(small.sum_model())
    async with aionn.open(drivers=[engine.device, "reference"], isolation="in_process") as runtime:
        assert (await runtime.compile(small.sum_model())).devices == ("reference",)


async def test_engine_that_cannot_be_imported_is_reported_by_the_status(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine.make() as device:
        with monkeypatch.context() as broken:
            broken.delattr(f"{engine.folder}.engine", raising=False)
            broken.setitem(sys.modules, f"{engine.folder}.engine", None)
            for _ in range(2):
                with pytest.raises(
                    DeviceUnavailable,
                    match=f"{engine.device}: its engine is installed and cannot be imported",
                ):
                    await device.status()
        importlib.import_module(f"{engine.folder}.engine")
        assert await device.status() == DeviceStatus.AVAILABLE


async def test_status_does_not_wait_for_a_compilation(
    engine: Any, monkeypatch: pytest.MonkeyPatch, small: Any
) -> None:
    compiles, may_end = threading.Event(), threading.Event()
    async with engine.make() as device:
        make = device.make

        def slow(*arguments: Any) -> Any:
            compiles.set()
            assert may_end.wait(WAIT_S)
            return make(*arguments)

        monkeypatch.setattr(device, "make", slow)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(device.prepare_model, small.sum_model())
            try:
                assert await anyio.to_thread.run_sync(compiles.wait, WAIT_S)
                with anyio.fail_after(WAIT_S):
                    assert await device.status() == DeviceStatus.AVAILABLE
            finally:
                may_end.set()


@pytest.mark.thorough
def test_command_lists_an_engine_that_cannot_be_imported_as_unavailable(engine: Any, tmp_path: Path) -> None:
    package = engine.module.partition(".")[0]
    (tmp_path / f"{package}.py").write_text(
        "raise ImportError('libneeded.so.1: cannot open shared object file')\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.getcwd()))}
    command = [sys.executable, "-m", "aionn", "devices", "--json"]
    finished = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    report = json.loads(finished.stdout)
    assert engine.device not in [one["name"] for one in (*report["devices"], *report["on_request"])]
    (reason,) = [one["reason"] for one in report["unavailable"] if one["name"] == engine.device]
    assert "its engine is installed and cannot be imported: libneeded.so.1" in reason


@pytest.mark.sampled(3)
def test_client_imports_nothing_of_the_engine(engine: Any) -> None:
    package = engine.module.partition(".")[0]
    code = (
        f"import sys; from aionn.drivers import registry; registry.built_in_info({engine.device!r}, 'a');"
        f"sys.exit(any(name.partition('.')[0] == {package!r} for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("text", ["0", "-1", "two", "257", ""])
def test_senseless_thread_count_is_refused(engine: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(engine.threads_variable, text)
    with pytest.raises(DeviceUnavailable, match=f"{engine.threads_variable}: expected from 1 to 256"):
        engine.make()


# Promises


def test_version_names_the_engine_s(engine: Any) -> None:
    info = registry.built_in_info(engine.device, engine.device)
    assert info is not None
    assert importlib.metadata.version(engine.distribution) in info.version


def test_lists_reach_the_suites(described: Any) -> None:
    found = driver_expectations(described.device)
    assert dict(found.unsupported) == described.lists.UNSUPPORTED
    assert dict(found.expected_failures) == described.lists.EXPECTED_FAILURES


def test_every_operation_is_lowered_or_listed_with_a_reason(engine: Any) -> None:
    elsewhere = {"IF", "WHILE"} if engine.device == "litert-cpu" else {"FILL", "RANK"}
    known = engine.lowered_operations() | elsewhere
    everything = {kind.name for kind in OperationType} - {"OEM_OPERATION"}
    lists = engine.lists
    assert known | (lists.UNSUPPORTED.keys() & everything) == everything
    assert not known & lists.UNSUPPORTED.keys()
    assert not known & lists.EXPECTED_FAILURES.keys()


async def test_input_of_unknown_shape_is_not_supported(engine: Any) -> None:
    model = chain_of((OperationType.RELU, ()), shape=(0, 4))
    async with engine.make() as device:
        assert await device.supported_operations(model) == (False,)


async def test_model_is_kept_for_no_later_preparation(engine: Any) -> None:
    model = chain_of((OperationType.RELU, ()))
    async with engine.make() as device:
        assert await device.supported_operations(model) == (True,)
        assert device._found is None
        prepared = await device.prepare_model(model)
        assert device._found is None
        await prepared.aclose()


# Executions


async def test_float16_goes_in_and_out(engine: Any, small: Any) -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT16, (4,))
    none = graph.constant(int(FusedActivation.NONE))
    model = graph.build([graph.result(OperationType.MUL, [x, x, none], x, (4,))])
    value = np.array([0.5, -2, 3, 7.25], dtype=np.float16)
    async with engine.make() as device:
        prepared = await device.prepare_model(model)
        request = small.request([value], [(8, (4,))])
        await prepared.execute_synchronously(request)
        pool = request.pools[-1]
        assert isinstance(pool, Memory)
        assert np.frombuffer(pool.array.tobytes(), np.float16).tolist() == (value * value).tolist()
        await prepared.aclose()


async def test_output_that_no_input_decides_is_computed_beforehand(engine: Any, small: Any) -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (2,))
    none = graph.constant(int(FusedActivation.NONE))
    two = graph.constant(np.full(2, 2, np.float32), OperandType.TENSOR_FLOAT32)
    four = graph.result(OperationType.ADD, [two, two, none], x, (2,))
    doubled = graph.result(OperationType.ADD, [x, x, none], x, (2,))
    model = graph.build([four, doubled])
    async with engine.make() as device:
        prepared = await device.prepare_model(model)
        request = small.request([np.ones(2, np.float32)], [(8, (2,)), (8, (2,))])
        await prepared.execute_synchronously(request)
        assert small.output(request, 0).tolist() == [4, 4]
        assert small.output(request, 1).tolist() == [2, 2]
        await prepared.aclose()


@pytest.mark.sampled(3)
@pytest.mark.slow
async def test_lock_is_free_while_the_engine_computes(engine: Any, small: Any) -> None:
    size = 1024
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (1, size, size))
    no = graph.constant(False)
    value = a
    for _ in range(4):
        value = graph.result(OperationType.BATCH_MATMUL, [value, a, no, no], a, (1, size, size))
    model = graph.build([value])
    request = small.request(
        [np.zeros((1, size, size), dtype=np.float32)], [(4 * size * size, (1, size, size))]
    )
    turns = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0)

    async with engine.make() as device:
        prepared = await device.prepare_model(model)
        counter = threading.Thread(target=count)
        counter.start()
        try:
            before = turns
            result = await prepared.execute_synchronously(request, measure=True)
            during = turns - before
        finally:
            stop.set()
            counter.join()
        await prepared.aclose()
    # Held for the whole call, the lock would have let the counter run before and after it alone: a handful of turns.
    assert result.timing.time_on_device_ns > 0
    assert during > 100


# Caches


@pytest.fixture
def files(tmp_path: Path) -> Iterator[CacheFiles]:
    """Files for a compilation."""
    with (tmp_path / "model").open("w+b") as first, (tmp_path / "data").open("w+b") as second:
        yield CacheFiles([first.fileno()], [second.fileno()], bytes(32))


async def test_cached_compilation_is_not_lowered_again(
    engine: Any, files: CacheFiles, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ones = np.ones((2, 3), np.float32)
    async with engine.make() as device:
        await (await device.prepare_model(small.sum_model(), cache=files)).aclose()
        monkeypatch.setattr(type(device), "lower", None)
        restored = await device.prepare_model_from_cache(files)
        request = small.request([ones, ones], [(24, (2, 3))])
        await restored.execute_synchronously(request)
        assert set(small.output(request).tolist()) == {2.0}
        await restored.aclose()


async def test_cache_of_something_else_is_refused(engine: Any, files: CacheFiles, small: Any) -> None:
    async with engine.make() as device:
        prepared = await device.prepare_model(small.sum_model())
        whole = prepared.cached()
        await prepared.aclose()
        model, file = whole.model[0], whole.data[0]
        for wrong in ((b"", file), (b"\xc1", file), (model[:-1], file), (model, b"damaged" * 9)):
            caching.save(files, CacheContents([wrong[0]], [wrong[1]]), driver=device._driver)
            with pytest.raises(GeneralFailure, match="compilation cache"):
                await device.prepare_model_from_cache(files)


async def test_long_structure_is_neither_saved_nor_decoded(
    engine: Any, files: CacheFiles, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine.make() as device:
        await (await device.prepare_model(small.sum_model(), cache=files)).aclose()
        monkeypatch.setattr(caching, "STRUCTURE_BYTES_MAX", 1)
        with pytest.raises(GeneralFailure, match="structure of at most"):
            await device.prepare_model_from_cache(files)
        os.ftruncate(files.model[0], 0)
        await (await device.prepare_model(small.sum_model(), cache=files)).aclose()
        assert os.fstat(files.model[0]).st_size == 0


async def test_damaged_file_is_refused_before_the_engine_reads_it(
    engine: Any, tmp_path: Path, files: CacheFiles, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine.make() as device:
        await (await device.prepare_model(small.sum_model(), cache=files)).aclose()
        monkeypatch.setattr(type(device), "load", None)
        whole = (tmp_path / "data").read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            (tmp_path / "data").write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
            with pytest.raises(GeneralFailure):
                await device.prepare_model_from_cache(files)
        (tmp_path / "data").write_bytes(whole[:-1])
        with pytest.raises(GeneralFailure):
            await device.prepare_model_from_cache(files)


@pytest.mark.sampled(3)
async def test_cache_of_another_version_of_the_engine_is_refused_before_the_engine_reads_it(
    engine: Any, files: CacheFiles, small: Any, monkeypatch: pytest.MonkeyPatch, no_version_kept: None
) -> None:
    ones = np.ones((2, 3), np.float32)
    installed = importlib.metadata.version

    def later(name: str) -> str:
        return "9999.1" if name == engine.distribution else installed(name)

    with monkeypatch.context() as context:
        context.setattr(importlib.metadata, "version", later)
        providers.installed_version.cache_clear()
        async with engine.make() as device:
            assert "9999.1" in device.info.version
            await (await device.prepare_model(small.sum_model(), cache=files)).aclose()
    providers.installed_version.cache_clear()
    async with engine.make() as device:
        with monkeypatch.context() as context:
            context.setattr(type(device), "load", None)
            with pytest.raises(GeneralFailure, match="compilation cache"):
                await device.prepare_model_from_cache(files)
        # The model is compiled anew, as after every other failure of a cache.
        prepared = await device.prepare_model(small.sum_model(), cache=files)
        request = small.request([ones, ones], [(24, (2, 3))])
        await prepared.execute_synchronously(request)
        assert set(small.output(request).tolist()) == {2.0}
        await prepared.aclose()
        await (await device.prepare_model_from_cache(files)).aclose()


async def test_compilation_for_another_processor_is_refused(
    engine: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine.make() as device:
        if not isinstance(device, OnnxDevice):
            pytest.skip("its cache keeps a file for every processor")
        prepared: Any = await device.prepare_model(small.sum_model())
        kept = prepared.cached()
        await prepared.aclose()
        monkeypatch.setattr(onnx_device, "processor_digest", lambda: "another")
        with pytest.raises(GeneralFailure, match="another processor"):
            device.restore(kept, priority=Priority.MEDIUM, deadline_ns=None)


async def test_compilation_of_a_relaxed_model_is_restored_as_one(engine: Any) -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (1, 4))
    model = graph.build([graph.result(OperationType.RELU, [x], x, (1, 4))])
    model = msgspec.structs.replace(model, relax_computation_float32_to_float16=True)
    async with engine.make() as device:
        prepared: Any = await device.prepare_model(model)
        restored = device.restore(prepared.cached(), priority=Priority.MEDIUM, deadline_ns=None)
        assert restored.model.relax_computation_float32_to_float16
        await restored.aclose()
        await prepared.aclose()


async def test_recurrent_layers_are_equal_in_every_slot_and_after_a_restore(engine: Any) -> None:
    batch, time_steps, units = 2, 5, 4
    drawn = np.random.default_rng(2)
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (time_steps, batch, units))
    weights, recurrent = (drawn.standard_normal((units, units)).astype(np.float32) for _ in range(2))
    constants = [weights, recurrent, np.zeros(units, np.float32), np.zeros((batch, units), np.float32)]
    arguments = [
        *(graph.constant(array, OperandType.TENSOR_FLOAT32) for array in constants),
        *(graph.constant(number) for number in (HYPERBOLIC_TANGENT, 1)),
    ]
    y = graph.result(
        OperationType.UNIDIRECTIONAL_SEQUENCE_RNN, [x, *arguments], x, (time_steps, batch, units)
    )
    model = graph.build([y])
    value = drawn.standard_normal((time_steps, batch, units)).astype(np.float32)
    wanted = Interpreter(model).run([value], RunControl())[0]
    async with engine.make() as device:
        if not all(await device.supported_operations(model)):
            pytest.skip("it has no recurrent layers")
        prepared: Any = await device.prepare_model(model)
        restored = device.restore(prepared.cached(), priority=Priority.MEDIUM, deadline_ns=None)
        for one in (prepared, restored):
            for slot in one._idle:
                area = np.zeros(value.nbytes, np.uint8)
                slot.begin()
                slot.run([value], [OutputArea(model.main.outputs[0], value.shape, area)])
                np.testing.assert_allclose(area.view(np.float32).reshape(wanted.shape), wanted, atol=1e-5)
            await one.aclose()
