"""``aionn bench``: how fast is a model on a device, and are its answers LiteRT's?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Annotated

from cyclopts import Parameter

import aionn
from aionn.benchmarking.bench import (
    BASELINE,
    COMPILATIONS_MAX,
    COUNT_MAX,
    SAMPLES_MAX,
    SECONDS_MAX,
    BenchmarkReport,
    DeviceReport,
    Settings,
    benchmark,
)
from aionn.benchmarking.evaluators import Evaluator
from aionn.benchmarking.figures import figure_text
from aionn.benchmarking.loadgen import BOUND_MS_MAX, LOAD_HEADS, RATE_MAX, Scenario, load_cells
from aionn.benchmarking.loadgen import SECONDS_MAX as LOAD_SECONDS_MAX
from aionn.benchmarking.measures import KnownData, Load
from aionn.benchmarking.page import render_page
from aionn.benchmarking.paths import PATHS, Path
from aionn.cli import interrupts
from aionn.cli.importing import Dimensions, InputShapes, Values, import_options
from aionn.cli.numbers import SEED_MAX, numbers
from aionn.cli.output import check_writable, print_json, write_report
from aionn.cli.realtime import RealtimeOption
from aionn.drivers import registry
from aionn.errors import DeviceUnavailable
from aionn.reports.terminal import print_line, print_table, progress_bar

__all__ = ["bench"]

PIXEL_MAX = 1e6
"""The largest magnitude of the darkest and the lightest pixel."""

FAILURES_SHOWN = 5
SHARES_SHOWN = 6


def bench(
    model: FilePath,
    /,
    *,
    device: list[str] | None = None,
    path: list[Path] | None = None,
    count: Annotated[int, numbers(1, COUNT_MAX)] = 1000,
    seconds: Annotated[float, numbers(0, SECONDS_MAX, "s", is_open=True)] = 10.0,
    samples: Annotated[int, numbers(1, SAMPLES_MAX)] = 20,
    compilations: Annotated[int, numbers(1, COMPILATIONS_MAX)] = 5,
    seed: Annotated[int, numbers(0, SEED_MAX)] = 0,
    data: FilePath | None = None,
    evaluator: Evaluator = "top-k",
    pixels: Annotated[tuple[float, float], numbers(-PIXEL_MAX, PIXEL_MAX)] = (0.0, 1.0),
    expected_top1: Annotated[float | None, numbers(0, 1)] = None,
    scenario: list[Scenario] | None = None,
    load_seconds: Annotated[float, numbers(0, LOAD_SECONDS_MAX, "s", is_open=True)] = 5.0,
    rate: Annotated[float | None, numbers(0, RATE_MAX, "queries per second", is_open=True)] = None,
    bound_ms: Annotated[float, numbers(0, BOUND_MS_MAX, "ms", is_open=True)] = 33.0,
    html: FilePath | None = None,
    dimension: Dimensions = None,
    input_shape: InputShapes = None,
    value: Values = None,
    realtime: RealtimeOption = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Measure latency, throughput, compilation, memory and accuracy of a model.

    Exit code 1 means that a device failed, or that its answers on labelled data are beyond a limit.

    Args:
        model: A .tflite or .onnx file.
        device: A device; may be repeated; by default all devices.
        path: A way to start executions; may be repeated; by default all four.
        count: Executions on each path.
        seconds: Limit for one path.
        samples: Random inputs whose answers are compared with LiteRT's.
        compilations: Number of compilations.
        seed: Seed of the inputs.
        data: A folder of labelled pictures, sounds or arrays: one folder in it for each class; or NAME.npy with NAME.expected.npy.
        evaluator: The evaluator of labelled data: top-k for classes, mel-cepstral for speech, phone-error for phones.
        pixels: The values of the darkest and the lightest pixel of a picture.
        expected_top1: The share of right first choices that the model is known for; more than 5 points under it is a failure.
        scenario: A scenario of MLPerf's LoadGen; may be repeated.
        load_seconds: Duration for which each scenario issues queries.
        rate: Queries per second of the server scenario; by default the largest rate that keeps the bound is searched for.
        bound_ms: Time within which 99 % of a server's queries must be answered.
        html: A file to write a page with plots to.
        dimension: NAME=EXTENT for an open extent of an .onnx file; may be repeated.
        input_shape: NAME=EXTENT,... for the shape of an input of an .onnx file; may be repeated.
        value: NAME=FILE.npy or NAME=NUMBER,... for an input of an .onnx file that becomes a constant; may be repeated.
        realtime: Real-time scheduling: required, used if the machine permits it, or off; by default AIONN_REALTIME, or off.
        json: Print one JSON object.
    """
    paths = tuple(p for p in PATHS if path is None or p in path)
    known = None if data is None else KnownData(str(data), evaluator, pixels, expected_top1)
    load = Load(tuple(scenario or ()), load_seconds, rate, bound_ms)
    settings = Settings(count, seconds, paths, compilations, samples, seed, known, load)
    settings.check()
    imports = import_options(dimension, input_shape, value)
    check_writable(html)
    with progress_bar("bench", is_wanted=not json) as show:

        def progress(step: str, share: float) -> None:
            if show is not None:
                show(step, share, 1.0)

        async def run() -> BenchmarkReport:
            async with aionn.open(drivers=_opened_drivers(device), realtime=realtime) as runtime:
                names = device or [found.name for found in runtime.devices]
                return await benchmark(runtime, model, names, settings, progress, imports)

        report = interrupts.run(run)
    if html is not None:
        write_report(html, render_page(report))
    if json:
        print_json(report)
    else:
        _print(report)
    return 1 if any(_is_bad(found) for found in report.devices) else 0


def _opened_drivers(devices: Sequence[str] | None) -> list[str] | None:
    """The drivers to open for the named devices, as ``aionn.open`` takes them: with the baseline's, if that can be used."""
    drivers = registry.drivers_for(devices)
    if drivers is None or BASELINE in drivers:
        return drivers
    try:
        registry.built_in_info(BASELINE, BASELINE)
    except DeviceUnavailable:
        return drivers
    return [BASELINE, *drivers]


def _is_bad(found: DeviceReport) -> bool:
    return found.failure is not None or (found.evaluation is not None and bool(found.evaluation.failures))


def _print(report: BenchmarkReport) -> None:
    rows = []
    for found in report.devices:
        for path, s in found.latency_ms.items():
            cells = (figure_text(value, 3) for value in (s.p50, s.p90, s.p99))
            rate = figure_text(found.throughput, 3) if path == "burst" else ""
            rows.append((found.device, path, s.count, *cells, rate, found.compared or ""))
    heads = ("device", "path", "executions", "p50 ms", "p90 ms", "p99 ms", "per s", "against LiteRT")
    print_table(f"{report.model}, latency", heads, rows, least=("executions", "p90 ms", "p99 ms"))
    for found in report.devices:
        if found.failure is not None:
            print_line(f"{found.device}: FAILED {found.failure}")
            continue
        parts = []
        if found.compile_ms is not None:
            parts.append(f"compiled in {found.compile_ms.fresh.mean:.1f} ms")
            if found.compile_ms.loading is not None:
                parts.append(f"from cache in {found.compile_ms.loading.mean:.1f} ms")
        if found.memory_bytes is not None:
            parts.append(f"{found.memory_bytes / 1e6:.1f} MB")
        if found.accuracy is not None:
            a = found.accuracy
            parts.append(
                f"{a.identical} of {a.samples} answers LiteRT's, largest error {a.largest_error:.3g}"
            )
        print_line(f"{found.device}: {'; '.join(parts)}")
        _print_measures(found)
    if report.baseline is None:
        print_line("answers are not compared: LiteRT cannot run the model or is not installed")


def _print_measures(found: DeviceReport) -> None:
    if found.evaluation is not None:
        values = ", ".join(f"{name} {value:.4g}" for name, value in found.evaluation.values.items())
        judged = "" if found.judged is None else f" ({found.judged})"
        samples = found.evaluation.samples
        print_line(f"{found.device}: right answers on {samples} samples: {values}{judged}")
        for failure in found.evaluation.failures[:FAILURES_SHOWN]:
            print_line(f"{found.device}: {failure}")
    if found.load:
        rows = [load_cells(report) for report in found.load.values()]
        print_table(f"{found.device}, LoadGen", LOAD_HEADS, rows, least=("p90 ms", "p50 ms", "queries"))
    if found.shares is not None:
        shares = ", ".join(f"{s.operation} {s.share:.0%}" for s in found.shares[:SHARES_SHOWN])
        print_line(f"{found.device}: operations: {shares}")
