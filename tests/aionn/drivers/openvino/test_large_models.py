"""Large models reach OpenVINO and come back by files in memory and in place, so that Python's lock is free meanwhile."""

from __future__ import annotations

import errno
import io
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.drivers.openvino import memory_files
from aionn.drivers.openvino.driver import OpenvinoDevice
from aionn.drivers.openvino.memory_files import MemoryFile
from aionn.errors import ResourceExhausted
from aionn.hal import Model, OperandType, OperationType, Priority
from aionn.models.builder import GraphBuilder

pytest.importorskip("openvino", reason="OpenVINO is not installed")

from aionn.drivers.openvino import engine

SIZE = 640
"""Extent of square matrices whose bytes are more than ``LARGE_BYTES``."""


def large() -> tuple[Model, Any]:
    """A product of matrices and one of elements, each with a large constant, and the numbers of the constants."""
    assert SIZE * SIZE * 4 > engine.LARGE_BYTES
    generator = np.random.default_rng(4)
    weights, factors = (generator.random((SIZE, SIZE), dtype=np.float32) for _ in range(2))
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (SIZE, SIZE))
    bias = graph.constant(np.zeros(SIZE, np.float32), OperandType.TENSOR_FLOAT32)
    constants = [graph.constant(values, OperandType.TENSOR_FLOAT32) for values in (weights, factors)]
    none = graph.constant(0)
    value = graph.result(OperationType.FULLY_CONNECTED, [x, constants[0], bias, none], x, (SIZE, SIZE))
    value = graph.result(OperationType.MUL, [value, constants[1], none], x, (SIZE, SIZE))
    return graph.build([value]), (weights, factors)


class Recorded:
    """OpenVINO's core, and the arguments that models come in."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.read: list[Any] = []
        self.imported: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def read_model(self, model: Any, *others: Any) -> Any:
        self.read.append(model)
        return self._core.read_model(model, *others)

    def import_model(self, blob: Any, *others: Any) -> Any:
        self.imported.append(blob)
        return self._core.import_model(blob, *others)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The recorded core of the engine."""
    found = Recorded(engine._core())
    monkeypatch.setattr(engine, "_core", lambda: found)
    return found


async def test_large_model_is_read_by_a_path_and_imported_in_place(core: Recorded, tmp_path: Path) -> None:
    model, (weights, factors) = large()
    x = np.random.default_rng(5).random((SIZE, SIZE), dtype=np.float32)
    wanted = (x.astype(np.float64) @ weights.T) * factors
    descriptors = len(os.listdir("/proc/self/fd"))
    async with OpenvinoDevice() as device, aionn.open(devices=[device], drivers=[]) as runtime:
        for is_kept in (False, True):
            # Both slots of the device are used, of which the second one is imported.
            async with await runtime.compile(model, cache_dir=tmp_path, cache_token=bytes(32)) as net:
                assert net.from_cache == is_kept
                for _ in range(2 * device.info.slots):
                    (got,) = (await net.execute([x])).outputs
                    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert core.read
    assert all(path.startswith("/proc/self/fd/") for path in core.read)
    assert len(core.imported) == 1 + 2
    assert all(type(blob) is bytes for blob in core.imported)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_each_slot_computes_the_same_of_a_large_model() -> None:
    model, _ = large()
    device = OpenvinoDevice()
    lowered = device.lower(model)
    compiled = engine.compiled_model(lowered, device.description, device._properties(False, Priority.MEDIUM))
    x = np.random.default_rng(6).random((SIZE, SIZE), dtype=np.float32)
    first, second = (np.array(one([x])[0]) for one in compiled._models)
    np.testing.assert_array_equal(first, second)


def test_exported_bytes_are_those_of_openvino() -> None:
    device = OpenvinoDevice()
    lowered = device.lower(large()[0])
    compiled = engine._compiled(lowered.file, "CPU", device._properties(False, Priority.MEDIUM))
    assert engine._exported(compiled) == compiled.export_model().getvalue()


def test_file_in_memory_is_a_stream() -> None:
    drawn, expected = random.Random(3), io.BytesIO()
    with MemoryFile() as stream:
        for _ in range(200):
            match drawn.randrange(4):
                case 0:
                    place = drawn.randrange(len(expected.getvalue()) + 1)
                    assert stream.seek(place) == expected.seek(place)
                case 1:
                    assert stream.seek(0, os.SEEK_END) == expected.seek(0, os.SEEK_END)
                case _:
                    data = drawn.randbytes(drawn.randrange(100))
                    assert stream.write(data) == expected.write(data)
            assert stream.seek(0, os.SEEK_CUR) == expected.tell()
        assert stream.content() == expected.getvalue()
        assert Path(stream.path).read_bytes() == expected.getvalue()
    with pytest.raises(ValueError, match="closed"):
        stream.getvalue()


def test_empty_file_in_memory_has_no_bytes() -> None:
    with MemoryFile() as stream:
        assert stream.content() == b""


async def test_memory_that_is_exhausted_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model, _ = large()
    async with OpenvinoDevice() as device:
        monkeypatch.setattr(memory_files, "write_all", fail)
        with pytest.raises(ResourceExhausted, match="OpenVINO has no memory or no thread left"):
            await device.prepare_model(model)
        monkeypatch.undo()
        await (await device.prepare_model(model)).aclose()


def test_export_that_had_no_memory_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device = OpenvinoDevice()
    lowered = device.lower(large()[0])
    compiled = engine._compiled(lowered.file, "CPU", device._properties(False, Priority.MEDIUM))

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory_files, "write_all", fail)
    with pytest.raises(ResourceExhausted, match="OpenVINO has no memory or no thread left"):
        engine._exported(compiled)
