"""Devices of several engines under one runtime, each with a stream: every result is right, whatever runs beside it."""

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
from aionn.models.tflite import load_tflite
from tests.aionn.drivers.engines.conftest import ENGINES, MISSING

Array = npt.NDArray[Any]

MODELS = ("digits_float", "digits_int8")
ITEMS = 8
"""Different inputs of a model, over and over."""

ROUNDS_MIN = 3
LIMIT_S = 60.0


def values_of(path: Path) -> list[Array]:
    """Seeded inputs of a model."""
    generator = np.random.default_rng(7)
    (operand,) = load_tflite(path).model.main.inputs
    shape = operand.dimensions
    if "float" in path.name:
        return [generator.random(shape, dtype=np.float32) for _ in range(ITEMS)]
    return [generator.integers(-128, 128, shape).astype(np.int8) for _ in range(ITEMS)]


async def _items(values: list[Array], end_s: float) -> AsyncIterator[Array]:
    """Whole rounds of the values until a time, at least ``ROUNDS_MIN``."""
    rounds = 0
    while rounds < ROUNDS_MIN or time.monotonic() < end_s:
        rounds += 1
        for value in values:
            yield value


async def _streams(folder: Path, seconds: float) -> dict[str, int]:
    """Streams of every model on every engine for a time. Returns the number of the items of each."""
    names = [engine.device for engine in ENGINES if engine.device not in MISSING]
    counts: dict[str, int] = {}

    async def run(runtime: aionn.Runtime, device: str, path: Path) -> None:
        values = values_of(path)
        async with await runtime.compile(path, devices=device) as net, net.burst() as burst:
            alone = [(await burst.execute([value])).outputs[0].copy() for value in values]
            seen = 0
            async for result in burst.stream(_items(values, time.monotonic() + seconds)):
                # The same kernels, whatever runs beside them.
                np.testing.assert_array_equal(result.outputs[0], alone[seen % ITEMS])
                seen += 1
            counts[f"{device} {path.stem}"] = seen

    async with aionn.open(drivers=[*names, "reference"]) as runtime:
        async with anyio.create_task_group() as group:
            for device in names:
                for model in MODELS:
                    group.start_soon(run, runtime, device, folder / f"{model}.tflite")
        assert {device.name for device in runtime.devices} >= set(names)
    return counts


def check(counts: dict[str, int]) -> None:
    engines = [engine.device for engine in ENGINES if engine.device not in MISSING]
    assert len(counts) == len(engines) * len(MODELS)
    assert all(count >= ROUNDS_MIN * ITEMS and count % ITEMS == 0 for count in counts.values())


@pytest.mark.thorough
async def test_streams_on_all_engines_give_the_results_of_each_alone(example_data: Path) -> None:
    with anyio.fail_after(LIMIT_S):
        check(await _streams(example_data, 0.1))


@pytest.mark.long
async def test_streams_on_all_engines_for_ten_minutes_give_the_results_of_each_alone(
    example_data: Path,
) -> None:
    with anyio.fail_after(600 + LIMIT_S):
        check(await _streams(example_data, 600))
