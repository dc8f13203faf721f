"""Imported files run wholly on `litert-cpu`, with the very bytes that LiteRT gives when it runs the file itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aionn.drivers.litert.driver import THREADS_VARIABLE, LitertDevice
from aionn.hal import Memory, Model, Request
from aionn.models.tflite import load_tflite

litert = pytest.importorskip(
    "ai_edge_litert.interpreter", reason="LiteRT is not installed", exc_type=ImportError
)

Array = npt.NDArray[Any]

SMALL = [f"{kind}_{form}" for kind in ("shapes", "digits") for form in ("float", "int8", "uint8")]
LARGE = [
    *(f"kws_dscnn_{form}" for form in ("float", "int8")),
    *(f"mobilenet_v1_0.25_128_{form}" for form in ("float", "int8")),
    *(f"mobilenet_v2_1.0_224_{form}" for form in ("float", "int8")),
    "lstm_asr_float",
]
DRAWN_COUNT = 4
SEED = 5


def drawn(details: dict[str, Any], generator: np.random.Generator) -> Array:
    dtype, shape = details["dtype"], details["shape"]
    if dtype == np.float32:
        return generator.standard_normal(shape).astype(np.float32)
    bounds = np.iinfo(dtype)
    return generator.integers(bounds.min, bounds.max + 1, shape).astype(dtype)


class Peer:
    """LiteRT with the file itself."""

    def __init__(self, path: Path, thread_count: int) -> None:
        self._interpreter = litert.Interpreter(model_path=str(path), num_threads=thread_count)
        self._interpreter.allocate_tensors()
        self.inputs = self._interpreter.get_input_details()
        self.outputs = self._interpreter.get_output_details()

    def run(self, values: list[Array]) -> list[Array]:
        for details, value in zip(self.inputs, values, strict=True):
            self._interpreter.set_tensor(details["index"], value)
        self._interpreter.invoke()
        return [self._interpreter.get_tensor(details["index"]) for details in self.outputs]


def output_bytes(request: Request, index: int) -> bytes:
    location = request.outputs[index].location
    pool = request.pools[location.pool_index]
    assert isinstance(pool, Memory)
    return pool.array[location.offset : location.offset + location.length].tobytes()


def close_pools(holder: Model | Request) -> None:
    for pool in holder.pools:
        assert isinstance(pool, Memory)
        pool.close()


async def compare(path: Path, small: Any, thread_count: int = 1) -> None:
    peer = Peer(path, thread_count)
    generator = np.random.default_rng(SEED)
    model = load_tflite(path).model
    async with LitertDevice() as device:
        assert all(await device.supported_operations(model))
        prepared = await device.prepare_model(model)
        for _ in range(DRAWN_COUNT):
            values = [drawn(details, generator) for details in peer.inputs]
            wanted = peer.run(values)
            request = small.request(values, [(y.nbytes, y.shape) for y in wanted])
            result = await prepared.execute_synchronously(request)
            assert [s.dimensions for s in result.output_shapes] == [y.shape for y in wanted]
            for index, y in enumerate(wanted):
                assert output_bytes(request, index) == y.tobytes()
            close_pools(request)
        await prepared.aclose()
    close_pools(model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SMALL)
async def test_small_model_gives_litert_s_bytes(example_data: Path, small: Any, name: str) -> None:
    await compare(example_data / f"{name}.tflite", small)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", LARGE)
async def test_large_model_gives_litert_s_bytes(shared: Path, small: Any, name: str) -> None:
    await compare(shared / "models" / f"{name}.tflite", small)


async def test_bytes_are_litert_s_with_two_threads(
    example_data: Path, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, "2")
    await compare(example_data / "shapes_float.tflite", small, thread_count=2)
