"""``aionn bench``: how fast is a model on a device, and are its answers LiteRT's?"""

from __future__ import annotations

import os
import sys
from pathlib import Path as FilePath
from typing import Annotated

import anyio
from cyclopts import Parameter
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import aionn
from aionn.benchmarking.bench import BenchmarkReport, Settings, benchmark
from aionn.benchmarking.page import render_page
from aionn.benchmarking.paths import PATHS, Path
from aionn.cli.output import console, print_json, print_table
from aionn.errors import InvalidArgument

__all__ = ["bench"]


def bench(
    model: FilePath,
    /,
    *,
    device: list[str] | None = None,
    path: list[Path] | None = None,
    count: int = 1000,
    seconds: float = 10.0,
    samples: int = 20,
    compilations: int = 5,
    seed: int = 0,
    html: FilePath | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Measure latency, throughput, compilation, memory and accuracy of a model. Exit code 1 says that a device failed.

    Args:
        model: A .tflite file.
        device: Which device, given once for each; by default all that there are.
        path: How executions are started, given once for each; by default all four.
        count: Executions on each path.
        seconds: Time that one path may take.
        samples: Random inputs whose answers are compared with LiteRT's.
        compilations: How often the model is compiled.
        seed: Seed of the inputs.
        html: A file to write a page with plots to.
        json: Print one JSON object.
    """
    paths = tuple(p for p in PATHS if path is None or p in path)
    settings = Settings(count, seconds, paths, compilations, samples, seed)
    settings.check()
    if html is not None:
        _check_writable(html)
    shown = sys.stdout.isatty() and not json
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(), transient=True, disable=not shown) as bar:
        task = bar.add_task("bench", total=1.0)

        def progress(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share)

        async def run() -> BenchmarkReport:
            async with aionn.open() as runtime:
                names = device or [found.name for found in runtime.devices]
                return await benchmark(runtime, model, names, settings, progress)

        report = anyio.run(run)
    if html is not None:
        _write(html, render_page(report))
    if json:
        print_json(report)
    else:
        _print(report)
    return 1 if any(found.failure for found in report.devices) else 0


def _check_writable(path: FilePath) -> None:
    """Demands a file that can be written, before anything is measured."""
    target = path if path.exists() else path.parent
    if path.is_dir() or not target.exists() or not os.access(target, os.W_OK):
        raise InvalidArgument(f"--html {path}: expected a file that can be written")


def _write(path: FilePath, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as e:
        raise InvalidArgument(f"--html {path}: {e.strerror}") from e


def _print(report: BenchmarkReport) -> None:
    rows = []
    for found in report.devices:
        for path, s in found.latency_ms.items():
            cells = (_number(value) for value in (s.p50, s.p90, s.p99))
            rate = _number(found.throughput) if path == "burst" else ""
            rows.append((found.device, path, s.count, *cells, rate, found.compared or ""))
    heads = ("device", "path", "executions", "p50 ms", "p90 ms", "p99 ms", "per s", "against LiteRT")
    print_table(f"{report.model}, latency", heads, rows)
    screen = console()
    for found in report.devices:
        if found.failure is not None:
            screen.print(f"{found.device}: FAILED {found.failure}", markup=False)
            continue
        told = []
        if found.compile_ms is not None:
            told.append(f"compiled in {found.compile_ms.fresh.mean:.1f} ms")
            if found.compile_ms.loading is not None:
                told.append(f"from cache in {found.compile_ms.loading.mean:.1f} ms")
        if found.memory_bytes is not None:
            told.append(f"{found.memory_bytes / 1e6:.1f} MB")
        if found.accuracy is not None:
            a = found.accuracy
            told.append(f"{a.identical} of {a.samples} answers LiteRT's, largest error {a.largest_error:.3g}")
        screen.print(f"{found.device}: {'; '.join(told)}", markup=False)
    if report.baseline is None:
        screen.print("answers are not compared: LiteRT cannot run the model or is not installed")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
