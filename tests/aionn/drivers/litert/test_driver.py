"""What `litert-cpu` takes and refuses, what it says of itself, and that it never holds Python's lock for long."""

from __future__ import annotations

import importlib.metadata
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aionn.conformance.expectations import driver_expectations
from aionn.drivers.kit import caching
from aionn.drivers.kit.caching import CacheContents
from aionn.drivers.litert.driver import (
    EXPECTED_FAILURES,
    THREADS_VARIABLE,
    UNSUPPORTED,
    LitertDevice,
    info_for,
)
from aionn.errors import DeviceUnavailable, GeneralFailure, InvalidArgument
from aionn.hal import CacheFiles, FusedActivation, Memory, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.models.tflite import load_tflite


def chain_of(*steps: tuple[OperationType, Sequence[Any]], shape: Sequence[int] = (1, 4)) -> Model:
    """Float32 operations one after the other; a step's further arguments are constants."""
    graph = GraphBuilder()
    value = first = graph.input(OperandType.TENSOR_FLOAT32, shape)
    for kind, arguments in steps:
        value = graph.result(kind, [value, *(graph.constant(a) for a in arguments)], first, shape)
    return graph.build([value])


litert = pytest.importorskip(
    "ai_edge_litert.interpreter", reason="LiteRT is not installed", exc_type=ImportError
)

from aionn.drivers.litert import lowering  # noqa: E402 - it needs LiteRT, whose absence skips what follows


def test_version_names_litert_s() -> None:
    assert importlib.metadata.version("ai-edge-litert") in info_for("litert-cpu").version


@pytest.mark.parametrize("text", ["0", "-1", "two", "257", ""])
def test_senseless_thread_count_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, text)
    with pytest.raises(DeviceUnavailable, match=f"{THREADS_VARIABLE}: expected from 1 to 256"):
        LitertDevice()


def test_lists_reach_the_suites() -> None:
    found = driver_expectations("litert-cpu")
    assert dict(found.unsupported) == UNSUPPORTED
    assert dict(found.expected_failures) == EXPECTED_FAILURES


def test_every_operation_is_lowered_or_listed_with_a_reason() -> None:
    from aionn.drivers.litert.lowering import RULES

    known = {kind.name for kind in RULES} | {"IF", "WHILE"}
    everything = {kind.name for kind in OperationType} - {"OEM_OPERATION"}
    assert known | (UNSUPPORTED.keys() & everything) == everything
    assert not known & UNSUPPORTED.keys()


async def test_support_is_answered_per_operation() -> None:
    model = chain_of(
        (OperationType.RELU, ()), (OperationType.LOG_SOFTMAX, (1.0, 1)), (OperationType.RELU6, ())
    )
    graph = GraphBuilder()
    image = graph.input(OperandType.TENSOR_FLOAT32, (1, 4, 4, 1))
    numbers = [graph.constant(n) for n in (2, 0, 0, 0, 1, 1, 3, 3, 0)]
    pooled = graph.result(OperationType.AVERAGE_POOL_2D, [image, *numbers], image, (1, 2, 4, 1))
    odd = graph.build([graph.result(OperationType.RELU, [pooled], pooled, (1, 2, 4, 1))])
    async with LitertDevice() as device:
        assert await device.supported_operations(model) == (True, True, True)
        # Padding on one side alone is neither SAME nor VALID.
        assert await device.supported_operations(odd) == (False, True)
        with pytest.raises(InvalidArgument, match="litert-cpu does not support AVERAGE_POOL_2D"):
            await device.prepare_model(odd)


async def test_model_is_lowered_once_for_a_preparation_and_kept_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, lowered, lower = chain_of((OperationType.RELU, ())), [], lowering.lower

    def counted(part: Model) -> lowering.Lowered:
        lowered.append(part)
        return lower(part)

    monkeypatch.setattr(lowering, "lower", counted)
    async with LitertDevice() as device:
        assert await device.supported_operations(model) == (True,)
        assert device._found is None
        assert len(lowered) == 1
        prepared = await device.prepare_model(model)
        assert len(lowered) == 2
        assert device._found is None
        await prepared.aclose()


async def test_input_of_unknown_shape_is_not_supported() -> None:
    model = chain_of((OperationType.RELU, ()), shape=(0, 4))
    async with LitertDevice() as device:
        assert await device.supported_operations(model) == (False,)


async def test_failure_in_litert_is_an_error_and_the_model_goes_on(small: Any) -> None:
    graph = GraphBuilder()
    table = graph.input(OperandType.TENSOR_FLOAT32, (3, 2))
    rows = graph.input(OperandType.TENSOR_INT32, (2,))
    result = graph.result(OperationType.GATHER, [table, graph.constant(0), rows], table, (2, 2))
    model = graph.build([result])
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    async with LitertDevice() as device:
        prepared = await device.prepare_model(model)
        for index, works in ((2, True), (3, False), (1, True)):
            request = small.request([values, np.array([0, index], dtype=np.int32)], [(16, (2, 2))])
            if works:
                await prepared.execute_synchronously(request)
                assert small.output(request).tolist() == [*values[0], *values[index]]
            else:
                with pytest.raises(GeneralFailure, match="litert-cpu: RuntimeError"):
                    await prepared.execute_synchronously(request)
        await prepared.aclose()


async def test_float16_goes_in_and_out(small: Any) -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT16, (4,))
    none = graph.constant(int(FusedActivation.NONE))
    model = graph.build([graph.result(OperationType.MUL, [x, x, none], x, (4,))])
    value = np.array([0.5, -2, 3, 7.25], dtype=np.float16)
    async with LitertDevice() as device:
        prepared = await device.prepare_model(model)
        request = small.request([value], [(8, (4,))])
        await prepared.execute_synchronously(request)
        pool = request.pools[-1]
        assert isinstance(pool, Memory)
        assert np.frombuffer(pool.array.tobytes(), np.float16).tolist() == (value * value).tolist()
        await prepared.aclose()


def test_imported_mean_and_matrix_become_what_they_were(example_data: Path) -> None:
    from ai_edge_litert import schema_py_generated as schema

    from aionn.drivers.litert.lowering import lower

    def operators(file: bytes) -> list[int]:
        model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(file, 0))
        return [model.operatorCodes[o.opcodeIndex].builtinCode for o in model.subgraphs[0].operators]

    path = example_data / "shapes_uint8.tflite"
    assert operators(lower(load_tflite(path).model).file) == operators(path.read_bytes())


async def test_lock_is_free_while_litert_computes(small: Any) -> None:
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

    async with LitertDevice() as device:
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


async def test_cached_compilation_is_not_lowered_again(
    tmp_path: Path, example_data: Path, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [(tmp_path / name).open("w+b") for name in ("model", "data")]
    cache = CacheFiles([files[0].fileno()], [files[1].fileno()], bytes(32))
    model = load_tflite(example_data / "digits_int8.tflite").model
    value = np.random.default_rng(2).integers(-128, 128, (1, 49, 40, 1)).astype(np.int8)
    answers = []
    async with LitertDevice() as device:
        first = await device.prepare_model(model, cache=cache)
        monkeypatch.setattr(lowering, "lower", None)
        second = await device.prepare_model_from_cache(cache)
        for prepared in (first, second):
            request = small.request([value], [(11, (1, 11))])
            await prepared.execute_synchronously(request)
            pool = request.pools[-1]
            assert isinstance(pool, Memory)
            answers.append(pool.array.tobytes())
            await prepared.aclose()
    assert answers[0] == answers[1]
    assert any(answers[0])
    for file in files:
        file.close()


async def test_cache_of_something_else_is_refused(tmp_path: Path) -> None:
    files = [(tmp_path / name).open("w+b") for name in ("model", "data")]
    cache = CacheFiles([files[0].fileno()], [files[1].fileno()], bytes(32))
    async with LitertDevice() as device:
        prepared = await device.prepare_model(chain_of((OperationType.RELU6, ())))
        model, file = prepared.cached().model[0], prepared.cached().data[0]
        for wrong in ((b"", file), (b"\xc1", file), (model[:-1], file), (model, b""), (model, b"TFL3" * 9)):
            caching.save(cache, CacheContents([wrong[0]], [wrong[1]]), driver=device._driver)
            with pytest.raises(GeneralFailure, match="compilation cache"):
                await device.prepare_model_from_cache(cache)
        await prepared.aclose()
    for file in files:
        file.close()
