"""What `litert-cpu` takes and refuses, and what its cache keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aionn.drivers.litert.driver import (
    LitertDevice,
)
from aionn.errors import GeneralFailure, InvalidArgument
from aionn.hal import CacheFiles, Memory, Model, OperandType, OperationType
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


async def test_model_is_lowered_once_for_a_question_and_the_preparation_that_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, lowered, lower = chain_of((OperationType.RELU, ())), [], lowering.lower

    def counted(part: Model) -> lowering.Lowered:
        lowered.append(part)
        return lower(part)

    monkeypatch.setattr(lowering, "lower", counted)
    async with LitertDevice() as device:
        assert await device.supported_operations(model) == (True,)
        prepared = await device.prepare_model(model)
        assert len(lowered) == 1
        assert device._found is None
        await prepared.aclose()


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


def test_imported_mean_and_matrix_become_what_they_were(example_data: Path) -> None:
    from ai_edge_litert import schema_py_generated as schema

    from aionn.drivers.litert.lowering import lower

    def operators(file: bytes) -> list[int]:
        model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(file, 0))
        return [model.operatorCodes[o.opcodeIndex].builtinCode for o in model.subgraphs[0].operators]

    path = example_data / "shapes_uint8.tflite"
    assert operators(lower(load_tflite(path).model).file) == operators(path.read_bytes())


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
