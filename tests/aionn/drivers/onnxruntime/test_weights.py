"""ONNX Runtime reads large constants in the memory of the model, where that is sealed, and each of them is just a number."""

from __future__ import annotations

import fcntl
import gc
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from aionn.conformance.requests import request_for
from aionn.hal import CacheFiles, Memory, MemoryKind, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.models.onnx.schema import read_model

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.onnx.lowered import Lowered
from aionn.drivers.kit.onnx.lowering import lower
from aionn.drivers.onnxruntime.driver import OrtDevice
from aionn.drivers.onnxruntime.engine import Loading, compile_session
from aionn.drivers.onnxruntime.providers import provider_named

FLOAT = OperandType.TENSOR_FLOAT32
WEIGHTS = np.random.default_rng(5).normal(size=(48, 32)).astype(np.float32)
X = np.random.default_rng(6).normal(size=(4, 32)).astype(np.float32)


def dense(weights: Any = WEIGHTS) -> Model:
    graph = GraphBuilder()
    x = graph.input(FLOAT, X.shape)
    bias = graph.constant(np.zeros(len(weights), np.float32))
    y = graph.result(
        OperationType.FULLY_CONNECTED, [x, graph.constant(weights), bias, 0], x, (4, len(weights))
    )
    return graph.build([y])


def lowered(model: Model) -> Lowered:
    return lower(model, OrtDevice().dialect)


async def results(prepared: Any, model: Model) -> Any:
    request = request_for(model, [X])
    await prepared.execute_synchronously(request)
    output = request.outputs[0].location
    return request.pools[output.pool_index].array[output.offset :][: output.length].view(np.float32).copy()


def test_sealed_weights_are_not_copied() -> None:
    model = dense()
    (pool,) = model.pools
    (beside,) = lowered(model).weights
    assert beside.raw is not None and np.shares_memory(np.frombuffer(beside.raw, np.uint8), pool.array)


def test_memory_that_may_change_is_copied() -> None:
    model = dense()
    open_pool = Memory.create(model.pools[0].size_bytes)
    open_pool.array[:] = model.pools[0].array
    changed = msgspec.structs.replace(model, pools=(open_pool,))
    assert not lowered(changed).weights
    assert WEIGHTS.tobytes() in lowered(changed).file
    open_pool.close()


def test_memory_that_may_shrink_is_copied() -> None:
    """Reading pages that are cut off ends a process."""
    model = dense()
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.write(fd, model.pools[0].array)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    pool = Memory.from_fd(fd, kind=MemoryKind.MMAP_FD, writable=False)
    assert not pool.is_unchanging
    assert not lowered(msgspec.structs.replace(model, pools=(pool,))).weights
    pool.close()
    os.close(fd)


def test_constants_that_are_compared_are_copied() -> None:
    """Numbers that change during a comparison or a search could be used in two ways."""
    graph = GraphBuilder()
    x = graph.input(FLOAT, WEIGHTS.shape)
    less = graph.variable(OperandType.TENSOR_BOOL8, WEIGHTS.shape)
    graph.operation(OperationType.LESS, [x, graph.constant(WEIGHTS)], [less])
    assert not lowered(graph.build([less])).weights


def test_whole_file_has_the_weights() -> None:
    model = dense()
    beside = lowered(model)
    assert WEIGHTS.tobytes() not in beside.file and len(beside.file) < WEIGHTS.nbytes
    assert beside.whole_file() == msgspec.structs.replace(lower(model)).file


def test_file_without_its_weights_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other file is read in place of weights that are missing."""
    file = msgspec.structs.replace(lowered(dense()), weights=())
    (constant,) = (one for one in read_model(file.file).graph.initializers if one.external is not None)
    assert constant.external is not None
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="name too long"):
        Path(constant.external["location"]).write_bytes(WEIGHTS.tobytes())
    with pytest.raises(Unsupported):
        compile_session(file, Loading(provider_named("ort-cpu"), 1))


async def test_weights_live_as_long_as_the_prepared_model() -> None:
    async with OrtDevice() as device:
        model = dense()
        prepared = await device.prepare_model(model)
        shape = dense()
        model.pools[0].close()
        del model
        gc.collect()
        spread = [np.ones(1 << 20, np.float32) for _ in range(8)]  # Freed memory would be used again.
        np.testing.assert_allclose(
            await results(prepared, shape), (X @ WEIGHTS.T).reshape(-1), rtol=1e-4, atol=1e-4
        )
        del spread
        await prepared.aclose()


async def test_cached_model_has_its_weights(tmp_path: Path) -> None:
    model = dense()
    with open(tmp_path / "model", "w+b") as first, open(tmp_path / "data", "w+b") as second:
        files = CacheFiles((first.fileno(),), (second.fileno(),), bytes(32))
        async with OrtDevice() as device:
            await (await device.prepare_model(model, cache=files)).aclose()
        async with OrtDevice() as device:
            restored = await device.prepare_model_from_cache(files)
            np.testing.assert_allclose(
                await results(restored, model), (X @ WEIGHTS.T).reshape(-1), rtol=1e-4, atol=1e-4
            )
            await restored.aclose()
