"""The cost of the way to an engine: each device of aionn against its engine alone, called on memory that is bound beforehand.

Peers, in the same run, in this process and on one thread: the engine's call on bound memory (`benchmarks.engines.peers`), the same
call in a thread of a pool, the creation of the engine's session, a time of one operation.

How each figure is taken:
- Burst: the time of one `await burst.execute([x])`, to a driver process. A block is a stretch of executions, and yields its median.
  "Added" is the difference of the medians of both, block by block; the last rows compare it between engines. "Native" is a burst to
  another driver process, with `AIONN_NATIVE=1`; every other runtime has 0.
- In process: the time of one `await net.execute([x])` of a runtime without driver processes, against the bound call by
  `loop.run_in_executor`: a thread hop is the least that keeps an event loop free.
- Import and compile: `runtime.compile` of a path and its end, with a driver process that has compiled the model before, against the
  creation of the engine's session from the same file.
- Cache: `runtime.compile` of a model that was imported beforehand, in process: from the files of a compilation cache, against one
  without.
- Reader: `read_model` of the 14 MB file alone.
- Stop: in process, the time from the cancellation of an execution, and from its deadline, to the end of the launch, for a chain of
  equal products of matrices, against the time of one product.

`--only litert,openvino` measures the devices with these names alone.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import aionn
from aionn.conformance.requests import request_for
from aionn.drivers.kit.engines.installed import NATIVE_VARIABLE
from aionn.errors import Error
from aionn.hal import CancelCapability, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.models.onnx import load_onnx
from aionn.models.onnx.schema import read_model
from aionn.models.tflite import load_tflite
from benchmarks.engines.peers import ENGINES, Engine, Peer
from benchmarks.rows import Report, alternating, at_most, compare, options, quiet_collector, single
from fences import now_ns

IN_PROCESS_MAX = 1.5
COMPILE_MAX = 2.0
CACHED_MAX = 0.5
READ_MS_MAX = 50.0
STOP_MAX = 2.0
LARGE = "mobilenet_v2"

WAYS = {"burst": "burst", "native": "native burst"}
"""The bursts that are measured, as the rows have them."""

CHAIN_LENGTH, CHAIN_SIZE = 200, 512

Block = Callable[[], Awaitable[float]]


@contextlib.asynccontextmanager
async def _opened(driver: str, isolation: Any, *, native: str) -> AsyncIterator[aionn.Runtime]:
    """A runtime whose driver process, or device, was made with this value of ``AIONN_NATIVE``."""
    before = os.environ.get(NATIVE_VARIABLE)
    os.environ[NATIVE_VARIABLE] = native
    try:
        runtime = aionn.open(drivers=[driver], isolation=isolation)
        await runtime.__aenter__()
        for device in runtime.devices:
            await device.hal.status()
    finally:
        if before is None:
            del os.environ[NATIVE_VARIABLE]
        else:
            os.environ[NATIVE_VARIABLE] = before
    try:
        yield runtime
    finally:
        await runtime.aclose()


async def _median_us(call: Callable[[], Awaitable[object]], count: int) -> float:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        await call()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


async def _blocks(contenders: dict[str, Block], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in contenders}
    with quiet_collector():
        for name in alternating(list(contenders), rounds):
            found[name].append(await contenders[name]())
    return found


class Measurement:
    """The rows of one device.

    Args:
        report: Where they go.
        driver: The name of aionn's driver.
        engine: Its entry in the table.
        quick: Whether there is little time.

    Attributes:
        added_us: By model and way (plain, or native), what a burst adds to the bound call, for each block.
    """

    def __init__(self, report: Report, driver: str, engine: Engine, *, quick: bool) -> None:
        self._report = report
        self._driver = driver
        self._engine = engine
        self._quick = quick
        self.added_us: dict[tuple[str, str], list[float]] = {}

    async def run(self, folder: Path) -> None:
        """All rows."""
        paths = self._engine.models(folder)
        async with contextlib.AsyncExitStack() as stack:
            runtime, here, natively = [
                await stack.enter_async_context(_opened(self._driver, isolation, native=native))
                for isolation, native in (("process", "0"), ("in_process", "0"), ("process", "1"))
            ]
            for missing in runtime.unavailable:
                self._report.note(f"{self._driver}: left out: {missing.reason}")
                return
            for name, path in paths.items():
                if path is None:
                    self._report.note(f"{self._driver}, {name}: left out: the file is missing")
                    continue
                await self._latency(runtime, here, natively, name, path)
                await self._compile(runtime, name, path)
                await self._cached(here, name, path, folder / f"{self._driver}-{name}")
            await self._stop(here)

    def _counts(self, name: str) -> tuple[int, int]:
        """Blocks, and executions of one block."""
        if self._quick:
            return 6, 10 if name == LARGE else 150
        return 20, 25 if name == LARGE else 400

    async def _latency(
        self, runtime: aionn.Runtime, here: aionn.Runtime, natively: aionn.Runtime, name: str, path: Path
    ) -> None:
        peer = self._engine.peer(path)
        rounds, count = self._counts(name)
        loop = asyncio.get_running_loop()

        async def bound() -> None:
            peer()

        net, beside = await runtime.compile(path), await here.compile(path)
        other = await natively.compile(path)
        async with net, beside, other, net.burst() as burst, other.burst() as native:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                await self._check([burst.execute, beside.execute, native.execute], peer, name)
                calls: dict[str, Callable[[], Awaitable[object]]] = {
                    "burst": lambda: burst.execute([peer.x]),
                    "native": lambda: native.execute([peer.x]),
                    "bound": bound,
                    "here": lambda: beside.execute([peer.x]),
                    "hop": lambda: loop.run_in_executor(pool, peer),
                }
                found = await _blocks(
                    {key: lambda call=call: _median_us(call, count) for key, call in calls.items()},  # type: ignore[misc]
                    rounds,
                )
        where = f"{self._driver}, {name}"
        for way, label in WAYS.items():
            self._report.add(compare(f"{where}: {label}", "us", found[way], "bound call", found["bound"]))
            added = [a - b for a, b in zip(found[way], found["bound"], strict=True)]
            self.added_us[name, way] = added
            self._report.add(single(f"{where}: added by the {label}", "us", added))
        self._report.add(
            compare(
                f"{where}: net.execute in process",
                "us",
                found["here"],
                "bound call in a thread",
                found["hop"],
                at_most(IN_PROCESS_MAX),
            )
        )

    async def _check(
        self, ways: Sequence[Callable[[list[Any]], Awaitable[aionn.Result]]], peer: Peer, name: str
    ) -> None:
        peer()
        wanted = peer.y()
        for execute in (*ways, *ways):  # Only the second one may be native.
            result = await execute([peer.x])
            difference = np.abs(result.outputs[0].reshape(wanted.shape) - wanted).max()
            if difference > self._engine.tolerance * max(1.0, float(np.abs(wanted).max())):
                raise SystemExit(
                    f"{self._driver}, {name}: results differ from the engine's by {difference:g}"
                )

    async def _compile(self, runtime: aionn.Runtime, name: str, path: Path) -> None:
        async def compiled() -> float:
            started = time.perf_counter()
            async with await runtime.compile(path):
                return 1e3 * (time.perf_counter() - started)

        async def created() -> float:
            started = time.perf_counter()
            self._engine.peer(path)
            return 1e3 * (time.perf_counter() - started)

        await compiled()
        found = await _blocks({"ours": compiled, "peer": created}, 4 if self._quick else 12)
        goal = at_most(COMPILE_MAX) if name == LARGE else None
        self._report.add(
            compare(
                f"{self._driver}, {name}: import and compile",
                "ms",
                found["ours"],
                "session alone",
                found["peer"],
                goal,
            )
        )

    async def _cached(self, here: aionn.Runtime, name: str, path: Path, cache: Path) -> None:
        model = load_tflite(path).model if path.suffix == ".tflite" else load_onnx(path).model

        async def ms(is_kept: bool) -> float:
            options = {"cache_dir": cache, "cache_token": bytes(32)} if is_kept else {}
            started = time.perf_counter()
            async with await here.compile(model, **options) as net:
                took = 1e3 * (time.perf_counter() - started)
            assert net.from_cache == is_kept
            return took

        async with await here.compile(model, cache_dir=cache, cache_token=bytes(32)):
            pass
        found = await _blocks({"kept": lambda: ms(True), "anew": lambda: ms(False)}, 4 if self._quick else 12)
        label = f"{self._driver}, {name}: compile from the cache"
        self._report.add(compare(label, "ms", found["kept"], "compile", found["anew"], at_most(CACHED_MAX)))

    async def _stop(self, here: aionn.Runtime) -> None:
        device = here.devices[0]
        if device.hal.info.cancel == CancelCapability.NONE:
            self._report.note(f"{self._driver}: stop: left out: the device stops no execution")
            return
        model, one = products(CHAIN_LENGTH), products(1)
        x = np.zeros((CHAIN_SIZE, CHAIN_SIZE), np.float32)
        try:
            chain, single_product = await here.compile(model), await here.compile(one)
        except Error as e:
            self._report.note(f"{self._driver}: stop: left out: {e}")
            return
        async with chain, single_product:

            async def product() -> float:
                return await _median_us(lambda: single_product.execute([x]), 5) / 1e3

            await product()
            prepared = await device.hal.prepare_model(model)
            request = request_for(model, [x])

            async def cancelled() -> float:
                launch = prepared.launch(request)
                await asyncio.sleep(0.05)
                started = time.perf_counter()
                launch.cancel()
                await asyncio.wait([asyncio.ensure_future(_ended(launch))])
                return 1e3 * (time.perf_counter() - started)

            async def late() -> float:
                deadline_ns = now_ns() + 50_000_000
                launch = prepared.launch(request, deadline_ns=deadline_ns)
                await asyncio.wait([asyncio.ensure_future(_ended(launch))])
                return (now_ns() - deadline_ns) / 1e6

            found = await _blocks(
                {"one": product, "cancel": cancelled, "late": late}, 4 if self._quick else 12
            )
            await prepared.aclose()
        for key, label in (
            ("cancel", "stopped after a cancellation"),
            ("late", "stopped after its deadline"),
        ):
            self._report.add(
                compare(
                    f"{self._driver}: {label}",
                    "ms",
                    found[key],
                    "one of 200 operations",
                    found["one"],
                    at_most(STOP_MAX),
                )
            )


async def _ended(launch: Awaitable[object]) -> None:
    try:
        await launch
    except Error:
        return
    raise SystemExit("the execution was done before it was stopped")


def products(count: int) -> Model:
    """A chain of products of matrices."""
    graph = GraphBuilder()
    shape = (CHAIN_SIZE, CHAIN_SIZE)
    first = value = graph.input(OperandType.TENSOR_FLOAT32, shape)
    no = graph.constant(False)
    for _ in range(count):
        value = graph.result(OperationType.BATCH_MATMUL, [value, first, no, no], first, shape)
    return graph.build([value])


def reader(report: Report, path: Path, rounds: int) -> None:
    """The row for the reader alone."""
    data = path.read_bytes()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        read_model(data)
        times.append(1e3 * (time.perf_counter() - started))
    report.add(single(f"reader, {len(data) / 1e6:.0f} MB", "ms", times, at_most(READ_MS_MAX)))


async def measure(report: Report, only: str, *, quick: bool) -> None:
    """All rows of the devices whose names have one of the parts of ``only``, with commas between them."""
    found: dict[str, Measurement] = {}
    with tempfile.TemporaryDirectory(prefix="aionn-engines-") as name:
        folder = Path(name)
        for driver, engine in ENGINES.items():
            if not any(part in driver for part in only.split(",")):
                continue
            if not engine.is_installed():
                report.note(f"{driver}: left out: {engine.module} is not installed")
                continue
            found[driver] = Measurement(report, driver, engine, quick=quick)
            await found[driver].run(folder)
        path = ENGINES["ort-cpu"].models(folder)[LARGE]
        assert path is not None, "it is written"
        reader(report, path, 5 if quick else 20)
    first = found.get("litert-cpu")
    for driver, measurement in found.items():
        for key, added in measurement.added_us.items():
            if first is not None and measurement is not first and key in first.added_us:
                model, way = key
                name = f"{driver}, {model}: added by the {WAYS[way]}"
                report.add(
                    compare(name, "us", added, "that of litert-cpu", first.added_us[key], at_most(1.0))
                )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--only", default="", help="devices whose names have one of these parts, such as litert,ort"
    )
    mine, _ = parser.parse_known_args()
    chosen = options(__doc__, parser)
    asyncio.run(measure(Report(chosen), mine.only, quick=chosen.quick))


if __name__ == "__main__":
    main()
