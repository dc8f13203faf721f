"""The device `ort-cuda`, on machines with a GPU of CUDA and the package `onnxruntime-gpu`; skipped on others.

``AIONN_ORT_PROVIDERS=ort-cuda=CPUExecutionProvider`` runs these tests on the CPU. ONNX's node tests are those of
``tests/aionn/models/onnx/test_backend.py -k ort-cuda``, all of them with ``--long``.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.drivers import registry
from aionn.drivers.onnxruntime.driver import OrtDevice
from aionn.drivers.onnxruntime.providers import provider_named
from benchmarks.engines.networks import mobilenet_v2

IMAGES = 8
FRAMES = 90
PERIOD_NS = 33_333_333
LATENCY_S_MAX = 5.0
"""Far beyond what a frame takes: the claim is that each has its own result."""

TOLERANCE = 1e-4
"""Largest difference as a share of the largest score: that of float32. With 10 bits of the mantissa it is 0.007."""

Image = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def _needs_cuda(lack_of_cuda: str | None) -> None:
    if lack_of_cuda is not None:
        pytest.skip(f"CUDAExecutionProvider cannot be used: {lack_of_cuda}")


@pytest.fixture(scope="module")
def images() -> list[Image]:
    draws = np.random.default_rng(0)
    return [draws.random((1, 3, 224, 224), np.float32) for _ in range(IMAGES)]


@pytest.fixture(scope="module")
def expected(images: list[Image]) -> list[Any]:
    """The scores that ONNX Runtime computes on the CPU, without aionn."""
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    session = ort.InferenceSession(mobilenet_v2(), providers=["CPUExecutionProvider"])
    return [session.run(None, {"x": image})[0] for image in images]


@pytest.fixture
def network(tmp_path: Path) -> Path:
    path = tmp_path / "mobilenet.onnx"
    path.write_bytes(mobilenet_v2())
    return path


def difference(scores: Any, wanted: Any) -> float:
    return float(np.abs(scores - wanted).max() / wanted.max())


async def test_device_is_available_and_its_sessions_are_on_its_provider(small: Any) -> None:
    assert provider_named("ort-cuda").name in registry.built_in_info("ort-cuda", "ort-cuda").version
    async with OrtDevice("gpu", "ort-cuda") as device:
        prepared = await device.prepare_model(small.sum_model())
        assert prepared.compiled.session.get_providers()[0] == provider_named("ort-cuda").name
        await prepared.aclose()


@pytest.mark.slow
async def test_frames_of_a_stream_have_their_own_results(
    network: Path, images: list[Image], expected: list[Any]
) -> None:
    """30 images of 224 x 224 a second through a burst, whose slots come again and again."""
    captured: dict[int, int] = {}

    async def camera() -> AsyncIterator[int]:
        begin_ns = time.monotonic_ns()
        for index in range(FRAMES):
            await anyio.sleep(max(0, begin_ns + index * PERIOD_NS - time.monotonic_ns()) * 1e-9)
            captured[index] = time.monotonic_ns()
            yield index

    def write(index: int, view: npt.NDArray[Any]) -> None:
        view[...] = images[index % IMAGES]

    latencies, worst, statuses = [], 0.0, set()
    async with aionn.open(drivers=["ort-cuda"]) as runtime, await runtime.compile(network) as net:
        assert {placement.device for placement in net.placement} == {"ort-cuda"}
        async with net.burst(slots=3) as burst:
            results = burst.stream(
                camera(), into=write, deadline=lambda index: captured[index] + int(LATENCY_S_MAX * 1e9)
            )
            async for result in results:
                statuses.add(result.status)
                worst = max(worst, difference(result.outputs[0], expected[result.item % IMAGES]))
                latencies.append(result.finished_ns - captured[result.item])
    latencies.sort()
    print(
        f"ort-cuda: {len(latencies)} images, p50 {latencies[len(latencies) // 2] / 1e6:.2f} ms, "
        f"longest {latencies[-1] / 1e6:.2f} ms, difference {worst:.1e}"
    )
    assert statuses == {"on_time"} and len(latencies) == FRAMES
    assert worst < TOLERANCE


@pytest.mark.slow
async def test_restored_compilation_computes_the_same(
    network: Path, images: list[Image], expected: list[Any], tmp_path: Path
) -> None:
    for _ in range(2):
        async with (
            aionn.open(drivers=["ort-cuda"]) as runtime,
            await runtime.compile(network, cache_dir=tmp_path / "cache") as net,
        ):
            result = await net.execute([images[0]])
            assert difference(result.outputs[0], expected[0]) < TOLERANCE
