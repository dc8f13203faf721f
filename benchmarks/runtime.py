"""The cost of the runtime beside that of a driver: one execution of a tiny model, and compiling a large one from the cache.

How each figure is taken:
- One execution: `await net.execute([x])` of a model with one operation, the driver in this process. Its peer is the lower bound
  for a runtime: the driver's own call with a request that is made once, on a thread of a pool, awaited by the loop. A block is 300
  executions; its number is their p50.
- From the cache: `runtime.compile(path, cache_dir=..., cache_token=...)` of MobileNet v2 where the models are at hand, else of the
  shipped model for shapes. Its peer is the same compilation anew. The file of the model, and what the cache keeps, are in the page
  cache, as they are where a cache is of use. The reference device lowers nothing, so that there is next to nothing to save: the
  goal is for devices that do.
- Beyond reading: what such a compilation takes beyond reading the cache's files, in milliseconds.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

import aionn
from aionn.drivers.kit.blocking import BlockingPreparedModel
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import OperationType
from aionn.runtime.memory.arguments import RequestArea
from aionn.testing.models import chain
from benchmarks.rows import (
    Goal,
    Options,
    Report,
    alternating,
    at_most,
    compare,
    options,
    quiet_collector,
    single,
)

EXECUTIONS = 300
WARM_UP = 100
TOKEN = bytes(range(32))
ROOT = Path(__file__).resolve().parents[1]
MODELS = (
    ROOT.parent / "shared" / "models" / "mobilenet_v2_1.0_224_float.tflite",
    ROOT / "examples" / "data" / "shapes_float.tflite",
)


async def p50_us(call: Callable[[], Awaitable[object]], count: int) -> float:
    """The median of so many calls, in microseconds."""
    taken = []
    for _ in range(count):
        before = time.perf_counter_ns()
        await call()
        taken.append(time.perf_counter_ns() - before)
    return statistics.median(taken) / 1e3


async def executions(report: Report, chosen: Options) -> None:
    """One execution against the driver's own call and a thread hop."""
    value = np.array([-1.0, 2.0, -3.0, 4.0], np.float32)
    async with aionn.open(devices=[ReferenceDevice("reference")]) as runtime:
        net = await runtime.compile(chain([OperationType.RELU], (4,)))
        (step,) = net._plan.steps
        prepared = step.prepared
        assert isinstance(prepared, BlockingPreparedModel)
        area = RequestArea(net._plan.values([(4,)], {}))
        area.write(step.inputs, [value])
        request = area.request(step.inputs, step.outputs)
        loop = asyncio.get_running_loop()
        ours: list[float] = []
        peers: list[float] = []
        with concurrent.futures.ThreadPoolExecutor(1) as pool:

            def execute() -> None:
                prepared.execute_bound(prepared.bind(request))

            async def through_runtime() -> None:
                await net.execute([value])

            async def through_thread() -> None:
                await loop.run_in_executor(pool, execute)

            for call in (through_runtime, through_thread):
                await p50_us(call, WARM_UP)
            with quiet_collector():
                both = [(through_runtime, ours), (through_thread, peers)]
                for call, blocks in alternating(both, 8 if chosen.quick else 24):
                    blocks.append(await p50_us(call, EXECUTIONS))
    report.add(
        compare("execute, one operation", "us", ours, "call + thread hop", peers, at_most(1.5)),
    )


def read_ms(folder: Path) -> float:
    """Reading every file of a folder, in milliseconds."""
    before = time.perf_counter_ns()
    for path in folder.iterdir():
        path.read_bytes()
    return (time.perf_counter_ns() - before) / 1e6


async def compile_ms(runtime: aionn.Runtime, model: Path, cache: Path | None) -> tuple[float, bool]:
    """Milliseconds of a compilation, and whether it came from the cache."""
    before = time.perf_counter_ns()
    net = await runtime.compile(model, cache_dir=cache, cache_token=None if cache is None else TOKEN)
    took_ns = time.perf_counter_ns() - before
    await net.aclose()
    return took_ns / 1e6, net.from_cache


async def compilations(report: Report, chosen: Options, driver: str, goal: Goal | None) -> None:
    """Compiling from the cache against compiling anew, the driver in a process of its own."""
    model = next(path for path in MODELS if path.exists())
    anew: list[float] = []
    cached: list[float] = []
    reading: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        async with aionn.open(drivers=[driver]) as runtime:
            for _ in range(2):
                await compile_ms(runtime, model, Path(name))
            for _ in range(3 if chosen.quick else 9):
                took, from_cache = await compile_ms(runtime, model, None)
                assert not from_cache
                anew.append(took)
                took, from_cache = await compile_ms(runtime, model, Path(name))
                assert from_cache, "the cache is used"
                cached.append(took)
                reading.append(read_ms(Path(name)))
    beyond = [whole - read for whole, read in zip(cached, reading, strict=True)]
    report.add(
        compare(f"from cache, {driver}", "ms", cached, "anew", anew, goal),
        single(f"beyond reading, {driver}", "ms", beyond, at_most(50)),
    )


def main() -> None:
    """Prints the figures."""
    chosen = options(__doc__)
    report = Report(chosen)
    asyncio.run(executions(report, chosen))
    asyncio.run(compilations(report, chosen, "reference", None))
    if importlib.util.find_spec("ai_edge_litert") is not None:
        asyncio.run(compilations(report, chosen, "litert-cpu", at_most(0.5)))


if __name__ == "__main__":
    main()
