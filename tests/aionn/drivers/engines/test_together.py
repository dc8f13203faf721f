"""Devices of several engines under one runtime, each with a stream: every result is right, whatever runs beside it, and an item
takes no more of a driver's time than alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

LONG_S = 600.0
ALONE_S = 30.0
"""Time of each engine's streams by themselves, in the long form."""

FLAT_OUT_S = 20.0
PACE_S = 1 / 30
"""Between two items of a camera."""

SHARED_MAX = 2.0
"""Most processor time of an item, over that of the engine alone: cores share caches, and two threads of one core its units. Engines
that hindered each other, by pools that spin or that are bound to one core, would take many times as much."""

NAMES = [engine.device for engine in ENGINES if engine.device not in MISSING]


class Seen(NamedTuple):
    """What streams have shown.

    Attributes:
        counts: The items of each.
        processor_us: By device, the processor time of its process for an item.
    """

    counts: dict[str, int]
    processor_us: dict[str, float]


def values_of(path: Path) -> list[Array]:
    """Seeded inputs of a model."""
    generator = np.random.default_rng(7)
    (operand,) = load_tflite(path).model.main.inputs
    shape = operand.dimensions
    if "float" in path.name:
        return [generator.random(shape, dtype=np.float32) for _ in range(ITEMS)]
    return [generator.integers(-128, 128, shape).astype(np.int8) for _ in range(ITEMS)]


async def _items(values: list[Array], end_s: float, pace_s: float) -> AsyncIterator[Array]:
    """Whole rounds of the values until a time, at least ``ROUNDS_MIN``, at a pace; 0 means as quickly as they are taken."""
    rounds, next_s = 0, time.monotonic()
    while rounds < ROUNDS_MIN or time.monotonic() < end_s:
        rounds += 1
        for value in values:
            yield value
            next_s += pace_s
            if pace_s:
                await anyio.sleep(max(0.0, next_s - time.monotonic()))


def _processor_s(pid: int | None) -> float:
    """The processor time of a process."""
    assert pid is not None
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


async def _streams(
    folder: Path, seconds: float, names: Sequence[str] = NAMES, *, pace_s: float = 0.0
) -> Seen:
    """Streams of every model on every engine for a time."""
    counts: dict[str, int] = {}
    before: dict[str, float] = {}

    async def run(runtime: aionn.Runtime, device: str, path: Path) -> None:
        values = values_of(path)
        async with await runtime.compile(path, devices=device) as net, net.burst() as burst:
            alone = [(await burst.execute([value])).outputs[0].copy() for value in values]
            before.setdefault(device, _processor_s(runtime.device(device).pid))
            seen = 0
            async for result in burst.stream(_items(values, time.monotonic() + seconds, pace_s)):
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
        taken = {name: _processor_s(runtime.device(name).pid) - before[name] for name in names}
    items = {name: sum(counts[f"{name} {model}"] for model in MODELS) for name in names}
    return Seen(counts, {name: 1e6 * taken[name] / items[name] for name in names})


def check(counts: dict[str, int]) -> None:
    assert len(counts) == len(NAMES) * len(MODELS)
    assert all(count >= ROUNDS_MIN * ITEMS and count % ITEMS == 0 for count in counts.values())


@pytest.mark.thorough
async def test_streams_on_all_engines_give_the_results_of_each_alone(example_data: Path) -> None:
    with anyio.fail_after(LIMIT_S):
        check((await _streams(example_data, 0.1)).counts)


@pytest.mark.long
@pytest.mark.parametrize(
    ("seconds", "pace_s"), [(FLAT_OUT_S, 0.0), (LONG_S, PACE_S)], ids=["flat out", "paced"]
)
async def test_streams_on_all_engines_for_minutes_give_the_results_and_take_the_time_of_each_alone(
    example_data: Path, seconds: float, pace_s: float
) -> None:
    alone_s = min(seconds, ALONE_S)
    with anyio.fail_after(seconds + len(NAMES) * alone_s + LIMIT_S):
        alone: dict[str, float] = {}
        for name in NAMES:
            alone |= (await _streams(example_data, alone_s, [name], pace_s=pace_s)).processor_us
        seen = await _streams(example_data, seconds, pace_s=pace_s)
    print(f"alone {alone}, together {seen}")
    check(seen.counts)
    for name in NAMES:
        assert seen.processor_us[name] <= SHARED_MAX * alone[name], name
