"""One model on one device after the other: what is measured, and in which order.

Owns the settings, the run, and the report. How a number is summarised is in ``figures``, how a model is executed in ``paths``.

Invariants:
1. Settings are checked before anything is started, and labelled data before anything is measured.
2. Every loop ends: by its number of samples, or by its time.
3. A device that fails has a report with the reason; all other devices are still measured.

Source: the scoring mode of MLTS, the HAL's own benchmark suite.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path as FilePath

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from aionn.benchmarking.accuracy import Accuracy, Array, compare_outputs
from aionn.benchmarking.evaluators import Evaluation
from aionn.benchmarking.figures import Spread, Verdict, judgement, spread_of, verdict
from aionn.benchmarking.loadgen import LoadReport, Scenario
from aionn.benchmarking.measures import (
    KnownData,
    Load,
    OperationShare,
    check_known,
    evaluate,
    operation_shares,
    run_scenarios,
)
from aionn.benchmarking.paths import PATHS, Path, draw_inputs, opened
from aionn.errors import Error, InvalidArgument
from aionn.hal import CACHE_TOKEN_BYTES, CacheFileCounts, CacheFiles, Model, PreparedModel
from aionn.hal.pooled_request import PooledRequest
from aionn.models.importing import NO_OPTIONS, ImportOptions, load_file
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.runtime import Runtime

__all__ = ["BASELINE", "BenchmarkReport", "CompileTimes", "DeviceReport", "Progress", "Settings", "benchmark"]

BASELINE = "litert-cpu"
"""The device whose answers and times are the baseline of the comparison: LiteRT's own on the CPU."""

REFERENCE = "reference"
"""The device whose operations can be timed one by one: its kernels run here as well."""

COUNT_MAX = 1_000_000
SECONDS_MAX = 3600.0
COMPILATIONS_MAX = 1000
SAMPLES_MAX = 100_000
WARM_UP_COUNT = 3

Progress = Callable[[str, float], None]
"""Is notified of the current step, and of the share of a device's work that is done."""


class Settings(msgspec.Struct, frozen=True):
    """The measures.

    Attributes:
        count: Executions on each path; the time may end it before.
        seconds: Limit of one path.
        paths: Which ways to execute.
        compilations: Number of compilations without a cache, into one, and from it.
        samples: Number of random inputs that are compared with the baseline's answers.
        seed: Seed of the inputs.
        known: Data whose right answers are known; None means no such data.
        load: LoadGen's scenarios.
    """

    count: int = 1000
    seconds: float = 10.0
    paths: tuple[Path, ...] = PATHS
    compilations: int = 5
    samples: int = 20
    seed: int = 0
    known: KnownData | None = None
    load: Load = Load()

    def check(self) -> None:
        """Demands settings that measure something.

        Raises:
            InvalidArgument: One of them does not.
        """
        for name, value, low, high in (
            ("count", self.count, 1, COUNT_MAX),
            ("compilations", self.compilations, 1, COMPILATIONS_MAX),
            ("samples", self.samples, 1, SAMPLES_MAX),
        ):
            if not low <= value <= high:
                raise InvalidArgument(f"bench, {name}: expected from {low} to {high}, got {value}")
        if not 0 < self.seconds <= SECONDS_MAX:
            raise InvalidArgument(
                f"bench, seconds: expected more than 0 and at most {SECONDS_MAX:g}, got {self.seconds:g}"
            )
        if not self.paths or not set(self.paths) <= set(PATHS):
            raise InvalidArgument(
                f"bench, paths: expected some of {', '.join(PATHS)}, got {', '.join(self.paths) or 'none'}"
            )
        if self.known is not None:
            self.known.check()
        self.load.check()


class CompileTimes(msgspec.Struct, frozen=True):
    """Duration of a compilation, in milliseconds.

    Attributes:
        fresh: Without a cache.
        saving: Into cache files; None for a device that does not cache, as the next two.
        loading: From cache files.
        cache_bytes: Size of the cache files.
    """

    fresh: Spread
    saving: Spread | None = None
    loading: Spread | None = None
    cache_bytes: int | None = None


class DeviceReport(msgspec.Struct, frozen=True):
    """The measurements of one device.

    Attributes:
        device: Its name.
        version: Its driver's version.
        failure: Why there is nothing more; None where all went well.
        compile_ms: Duration of compilations.
        memory_bytes: Growth of the driver process by one compilation and its executions; None without such a process.
        latency_ms: By path.
        throughput: Executions per second with all slots busy through bursts; None where bursts were not asked for.
        compared: The median on the first path against the baseline's.
        accuracy: Against the baseline's answers; None for the baseline itself, and without a baseline.
        evaluation: On data whose right answers are known; None without such data.
        judged: Its first figure against the baseline's, within a point; None where one of them is missing.
        load: LoadGen's results in each scenario.
        shares: The time of each type of operation; known for the reference kernels only, and None elsewhere.
    """

    device: str
    version: str
    failure: str | None = None
    compile_ms: CompileTimes | None = None
    memory_bytes: int | None = None
    latency_ms: dict[str, Spread] = {}
    throughput: float | None = None
    compared: Verdict | None = None
    accuracy: Accuracy | None = None
    evaluation: Evaluation | None = None
    judged: Verdict | None = None
    load: dict[Scenario, LoadReport] = {}
    shares: tuple[OperationShare, ...] | None = None


class BenchmarkReport(msgspec.Struct, frozen=True):
    """A model on several devices.

    Attributes:
        model: The file's name.
        settings: The settings of the caller.
        baseline: The device of the baseline; None where LiteRT is not installed.
        devices: In the order asked for.
    """

    model: str
    settings: Settings
    baseline: str | None
    devices: tuple[DeviceReport, ...]


async def benchmark(
    runtime: Runtime,
    path: FilePath,
    devices: Sequence[str],
    settings: Settings,
    progress: Progress = lambda _what, _share: None,
    imports: ImportOptions = NO_OPTIONS,
) -> BenchmarkReport:
    """Measures a model on devices of a runtime, one after the other.

    Raises:
        InvalidArgument: The settings, the file, a device's name or a file of the labelled data is wrong.
        DeviceUnavailable: There are pictures or sounds among the labelled data, and PyAV is missing.
    """
    settings.check()
    found = [runtime.device(name) for name in devices]
    if not found or len(set(devices)) != len(devices):
        raise InvalidArgument(f"bench: expected different devices, at least one, got {list(devices)}")
    loaded = await anyio.to_thread.run_sync(load_file, path, imports)
    model = loaded.model
    if settings.known is not None:
        await check_known(model, settings.known)
    generator = np.random.default_rng(settings.seed)
    inputs = [draw_inputs(model, generator) for _ in range(settings.samples)]
    baseline = next((device for device in runtime.devices if device.name == BASELINE), None)
    wanted = None if baseline is None else await _answers(baseline, model, inputs)
    reports: list[DeviceReport] = []
    for device in found:
        measured = _Measured(device, model, settings, progress)
        reports.append(await measured.run(inputs, None if device is baseline else wanted))
    return BenchmarkReport(
        model=path.name,
        settings=settings,
        baseline=None if wanted is None else BASELINE,
        devices=tuple(_compared(report, reports) for report in reports),
    )


def _compared(report: DeviceReport, reports: Sequence[DeviceReport]) -> DeviceReport:
    baseline = next((r for r in reports if r.device == BASELINE), None)
    if baseline is None or report is baseline or report.failure or baseline.failure:
        return report
    path = next(iter(baseline.latency_ms))
    compared = verdict(_middle(report.latency_ms[path]), _middle(baseline.latency_ms[path]))
    judged = None
    if report.evaluation is not None and baseline.evaluation is not None:
        ours, theirs = (next(iter(r.values.values())) for r in (report.evaluation, baseline.evaluation))
        judged = judgement(ours, theirs, higher_is_better=report.evaluation.evaluator == "top-k")
    return msgspec.structs.replace(report, compared=compared, judged=judged)


def _middle(spread: Spread) -> float:
    return spread.mean if spread.p50 is None else spread.p50


Answers = list[list[Array]]


async def _answers(device: RuntimeDevice, model: Model, inputs: Sequence[Sequence[Array]]) -> Answers | None:
    """The baseline's outputs for each sample; None where it cannot run the model."""
    try:
        prepared = await device.hal.prepare_model(model)
    except Error:
        return None
    try:
        return await _outputs(prepared, model, inputs)
    finally:
        await prepared.aclose()


async def _outputs(prepared: PreparedModel, model: Model, inputs: Sequence[Sequence[Array]]) -> Answers:
    found: Answers = []
    with PooledRequest(model) as arguments:
        async with opened(prepared, arguments.request, "sync") as call:
            for values in inputs:
                arguments.write(values)
                await call()
                found.append(arguments.outputs())
    return found


class _Measured:
    """The work on one device."""

    def __init__(self, device: RuntimeDevice, model: Model, settings: Settings, progress: Progress) -> None:
        self._device = device
        self._model = model
        self._settings = settings
        self._done = 0
        self._steps = 3 + len(settings.paths) + (settings.known is not None) + bool(settings.load.scenarios)
        self._progress = progress

    def _step(self, what: str) -> None:
        self._progress(f"{self._device.name}: {what}", self._done / self._steps)
        self._done += 1

    async def run(self, inputs: Sequence[Sequence[Array]], wanted: Answers | None) -> DeviceReport:
        name, version = self._device.name, self._device.version
        try:
            self._step("compiling")
            compile_ms = await self._compile_times()
            before = _resident_bytes(self._device.pid)
            prepared = await self._device.hal.prepare_model(self._model)
            try:
                latencies: dict[str, Spread] = {}
                with PooledRequest(self._model) as arguments:
                    arguments.write(inputs[0])
                    for path in self._settings.paths:
                        self._step(path)
                        latencies[path] = await self._latency(prepared, arguments, path)
                after = _resident_bytes(self._device.pid)
                self._step("throughput")
                is_wanted = "burst" in self._settings.paths
                throughput = await self._throughput(prepared, inputs[0]) if is_wanted else None
                self._step("accuracy")
                outputs = await _outputs(prepared, self._model, inputs) if wanted is not None else []
                evaluation = await self._evaluation(prepared)
                load = await self._load(prepared, inputs, throughput)
            finally:
                await prepared.aclose()
        except Error as e:
            return DeviceReport(name, version, failure=str(e))
        self._progress(name, 1.0)
        return DeviceReport(
            name,
            version,
            compile_ms=compile_ms,
            memory_bytes=None if before is None or after is None else max(0, after - before),
            latency_ms=latencies,
            throughput=throughput,
            accuracy=None if wanted is None else compare_outputs(outputs, wanted, self._model.main.outputs),
            evaluation=evaluation,
            load=load,
            shares=await self._shares(inputs[0]),
        )

    async def _evaluation(self, prepared: PreparedModel) -> Evaluation | None:
        if self._settings.known is None:
            return None
        self._step("right answers")
        return await evaluate(prepared, self._model, self._settings.known)

    async def _load(
        self, prepared: PreparedModel, inputs: Sequence[Sequence[Array]], throughput: float | None
    ) -> dict[Scenario, LoadReport]:
        load = self._settings.load
        if not load.scenarios:
            return {}
        self._step("LoadGen")
        if throughput is None:
            throughput = await self._throughput(prepared, inputs[0])
        return await run_scenarios(
            prepared,
            self._model,
            inputs,
            load,
            slots=self._device.info.slots,
            throughput=throughput,
            seed=self._settings.seed,
        )

    async def _shares(self, inputs: Sequence[Array]) -> tuple[OperationShare, ...] | None:
        if self._device.name != REFERENCE:
            return None
        return await anyio.to_thread.run_sync(operation_shares, self._model, inputs)

    async def _compile_times(self) -> CompileTimes:
        hal = self._device.hal
        fresh = [
            await _timed_ms(lambda: hal.prepare_model(self._model))
            for _ in range(self._settings.compilations)
        ]
        counts = self._device.info.cache_files
        if counts == CacheFileCounts():
            return CompileTimes(spread_of(fresh))
        saving, loading = [], []
        with tempfile.TemporaryDirectory(prefix="aionn-bench-") as folder:
            for turn in range(self._settings.compilations):
                fds = [
                    os.open(FilePath(folder) / f"{turn}.{i}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                    for i in range(counts.model + counts.data)
                ]
                try:
                    cache = CacheFiles(fds[: counts.model], fds[counts.model :], bytes(CACHE_TOKEN_BYTES))
                    saving.append(await _timed_ms(lambda c=cache: hal.prepare_model(self._model, cache=c)))  # type: ignore[misc]
                    loading.append(await _timed_ms(lambda c=cache: hal.prepare_model_from_cache(c)))  # type: ignore[misc]
                    size = sum(os.fstat(fd).st_size for fd in fds)
                finally:
                    for fd in fds:
                        os.close(fd)
        return CompileTimes(spread_of(fresh), spread_of(saving), spread_of(loading), size)

    async def _latency(self, prepared: PreparedModel, arguments: PooledRequest, path: Path) -> Spread:
        times_ms: list[float] = []
        async with opened(prepared, arguments.request, path) as call:
            for _ in range(WARM_UP_COUNT):
                await call()
            end_s = time.perf_counter() + self._settings.seconds
            while len(times_ms) < self._settings.count:
                start_s = time.perf_counter()
                await call()
                now_s = time.perf_counter()
                times_ms.append((now_s - start_s) * 1e3)
                if now_s >= end_s:
                    break
        return spread_of(times_ms)

    async def _throughput(self, prepared: PreparedModel, inputs: Sequence[Array]) -> float:
        """Executions per second with one burst per slot, each with the next request as soon as one is done."""
        slots = self._device.info.slots
        count = 0
        started_s = time.perf_counter()
        end_s = started_s + min(self._settings.seconds, 2.0)

        async def work() -> None:
            nonlocal count
            with PooledRequest(self._model) as arguments:
                arguments.write(inputs)
                async with opened(prepared, arguments.request, "burst") as call:
                    for _ in range(self._settings.count):
                        await call()
                        count += 1
                        if time.perf_counter() >= end_s:
                            break

        async with anyio.create_task_group() as tasks:
            for _ in range(slots):
                tasks.start_soon(work)
        return count / (time.perf_counter() - started_s)


async def _timed_ms(prepare: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    prepared = await prepare()  # type: ignore[misc]
    took_ms = (time.perf_counter() - start_s) * 1e3
    await prepared.aclose()
    return took_ms


def _resident_bytes(pid: int | None) -> int | None:
    """Memory of a process that is its own; None without a process."""
    if pid is None:
        return None
    try:
        fields = FilePath(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return None
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
