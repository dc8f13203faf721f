"""``aionn stress``: does a device survive hours of work, many clients, and clients that die?"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import msgspec
from cyclopts import Parameter

import aionn
from aionn.benchmarking.stress.bodies import BODIES, TestName
from aionn.benchmarking.stress.run import TEST_S_MAX, StressResult, suited_model
from aionn.benchmarking.stress.run import stress as run_stress
from aionn.benchmarking.stress.slopes import SECONDS_PER_HOUR, Slope
from aionn.benchmarking.stress.soak import GROWTH_S_MIN, SOAK_S_MAX, SoakProgress, SoakReport
from aionn.benchmarking.stress.soak import soak as run_soak
from aionn.cli import interrupts
from aionn.cli.example_data import example_data
from aionn.cli.importing import Dimensions, InputShapes, import_options
from aionn.cli.numbers import SEED_MAX, numbers
from aionn.cli.output import print_json
from aionn.drivers import registry
from aionn.errors import InvalidArgument
from aionn.models.importing import is_onnx
from aionn.reports.terminal import print_line, print_table, progress_bar, report_line
from aionn.runtime.settings import settings_from

__all__ = ["stress"]

MINUTES_MAX = TEST_S_MAX / 60
"""Longest run of all tests of a device, a day: also what one test may take."""

LINE_S = 60.0
"""Time between two lines about a soak's progress where no bar is shown: it may take days."""

MODELS = ("shapes_int8.tflite", "shapes_float.tflite")
"""The models of aionn's own that the tests take: the first one whose operations the device supports. Some devices have no quantised
convolutions."""

HOURS_MAX = SOAK_S_MAX / SECONDS_PER_HOUR
"""Longest soak."""


def stress(
    *,
    device: list[str] | None = None,
    minutes: Annotated[float, numbers(0, MINUTES_MAX, "minutes", is_open=True)] = 5.0,
    test: list[TestName] | None = None,
    model: Path | None = None,
    dimension: Dimensions = None,
    input_shape: InputShapes = None,
    seed: Annotated[int, numbers(0, SEED_MAX)] = 0,
    soak: Annotated[float | None, numbers(0, HOURS_MAX, "hours", is_open=True)] = None,
    in_process: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Load a device for long, with many clients and clients that die.

    Each test ends as SUCCESS, FAILURE, HANG or CRASH. Exit code 1 means that a test did not end as SUCCESS.

    With --soak one run on all devices together replaces the tests: their processes are killed and stopped throughout, every answer
    is checked, and exit code 1 means that an answer was wrong or never came, or that a resource grows.

    Args:
        device: A device; may be repeated; by default all that can be used here and support the models.
        minutes: Duration of all tests of a device together.
        test: A test; may be repeated; by default all.
        model: A .tflite or .onnx file; by default one that aionn brings and the device supports.
        dimension: NAME=EXTENT for an open extent of an .onnx file; may be repeated.
        input_shape: NAME=EXTENT,... for the shape of an input of an .onnx file; may be repeated.
        seed: Seed of everything that is random.
        soak: Hours that the run takes; growth is judged from ten minutes (0.17) on.
        in_process: Run the drivers of the soak in this process, where nothing is killed.
        json: Print one JSON object.
    """
    settings_from()  # Here, before the processes that read the variables as well.
    tests = tuple(BODIES) if test is None else tuple(test)
    devices = interrupts.run(_usable_devices) if device is None else tuple(device)
    known = (*registry.driver_names(), *registry.names_on_request())
    for name in devices:
        if name not in known and not registry.is_of_family(name):
            raise InvalidArgument(f"--device: expected one of {', '.join(known)}, got {name!r}")
    if soak is not None:
        if test is not None or model is not None:
            raise InvalidArgument(
                "--soak: expected neither --test nor --model; a soak has episodes and models of its own"
            )
        return _soak(devices, soak, seed, "in_process" if in_process else "process", json=json)
    files = [model] if model else [example_data("--model") / each for each in MODELS]
    imports = import_options(dimension, input_shape)
    if imports.names and not is_onnx(files[0]):
        raise InvalidArgument(
            f"--model {files[0]}: expected an .onnx file with --dimension or --input-shape, got a .tflite file"
        )
    seconds = minutes * 60 / max(1, len(tests))
    report: dict[str, tuple[StressResult, ...]] = {}
    for name in devices:

        def progress(running: str, index: int, name: str = name) -> None:
            if not json:
                step = f"{name}: {running} ({index + 1} of {len(tests)}, {seconds:.0f} s)"
                report_line(step, stream=sys.stderr)

        ended: list[StressResult] = []

        async def run(name: str = name, done: Callable[[StressResult], None] = ended.append) -> None:
            with interrupts.ends_early():
                file = files[0] if len(files) == 1 else await suited_model(name, files)
                if file != files[0] and not json:
                    report_line(
                        f"{name}: {file.name}, since it does not support {files[0].name}", stream=sys.stderr
                    )
                await run_stress(
                    name, file, tests, seconds, seed=seed, progress=progress, imports=imports, done=done
                )

        interrupts.run(run)
        report[name] = tuple(ended)
        if interrupts.is_ending():
            break
    if json:
        print_json(report)
    else:
        for name, results in report.items():
            rows = [(r.test, r.result, r.count, r.seconds) for r in results]
            print_table(f"stress on {name}", ("test", "result", "done", "s"), rows)
            for r in results:
                if r.message:
                    print_line(f"{r.test}: {r.message}")
    return 0 if all(r.result == "SUCCESS" for results in report.values() for r in results) else 1


async def _usable_devices() -> tuple[str, ...]:
    """The devices that are used by default. A line names each other device, with the reason."""
    async with aionn.open() as runtime:
        left_out = {missing.name: missing.reason for missing in runtime.unavailable}
        registered = registry.driver_names()
        found = [device for device in runtime.devices if device.driver in registered]
        for device in found:
            if device.driver in registry.EXTENSIONS_ONLY:
                left_out[device.name] = (
                    "it supports only operations of extensions, and the models here have none"
                )
        for name, reason in left_out.items():
            report_line(f"{name} is left out: {reason}", stream=sys.stderr)
        return tuple(device.name for device in found if device.name not in left_out)


def _soak(
    drivers: Sequence[str],
    hours: float,
    seed: int,
    isolation: Literal["process", "in_process"],
    *,
    json: bool,
) -> int:
    # Every killed process is worth a warning elsewhere; here it is the purpose of the run.
    logging.getLogger("aionn").addHandler(logging.NullHandler())
    with progress_bar("soak", is_wanted=not json, line_s=LINE_S) as show:

        def progress(state: SoakProgress) -> None:
            sentence = (
                f"{state.counts['kills']} kills, {state.counts['right']} right, {state.failures} failed, "
                f"{state.rss_kb / 1024:.1f} MB, {state.objects} objects"
            )
            if show is not None:
                show(f"soak: {sentence}", state.seconds, hours * SECONDS_PER_HOUR)

        async def run() -> SoakReport:
            with interrupts.is_polled():
                return await run_soak(
                    drivers,
                    hours * SECONDS_PER_HOUR,
                    seed=seed,
                    isolation=isolation,
                    growth_s_min=GROWTH_S_MIN,
                    progress=progress,
                    on_stuck=_end_stuck,
                    is_ending=interrupts.is_ending,
                )

        report = interrupts.run(run)
    if json:
        print_json({**msgspec.to_builtins(report), "success": report.is_success})
    else:
        _print_soak(report)
    return 0 if report.is_success else 1


def _end_stuck(message: str) -> NoReturn:
    """Ends the process from a thread, since the event loop may be blocked, or a task may ignore cancellation."""
    report_line(message, wraps=False, stream=sys.stderr)
    os._exit(1)


def _print_soak(report: SoakReport) -> None:
    counts = ", ".join(f"{count} {name}" for name, count in report.counts.items())
    print_table(
        f"soak of {', '.join(report.drivers)}, {report.seconds:.0f} s, seed {report.seed}",
        ("held", "first", "last", "per hour", "95 %", "steady"),
        [_slope_cells(slope, report.is_growth_judged) for slope in report.slopes],
        least=("95 %", "first"),
    )
    print_line(f"{counts}; {report.kills_per_hour:.0f} kills an hour")
    for text in (*report.failures, *report.hangs):
        print_line(text)
    if not report.is_growth_judged:
        print_line(
            f"growth is not judged: that takes {GROWTH_S_MIN / 60:g} minutes, since a shorter run is all warm-up",
        )
    if not report.is_success and report.growth:
        print_line(f"objects that became more since the warm-up: {', '.join(report.growth)}")
    print_line("SUCCESS" if report.is_success else f"FAILURE: {'; '.join(report.reasons)}")


def _slope_cells(slope: Slope, is_judged: bool) -> tuple[object, ...]:
    if slope.per_hour is None:
        growth, interval = "", "too few samples"
    else:
        growth, interval = f"{slope.per_hour:+.0f}", f"{slope.low:+.0f} to {slope.high:+.0f}"
    return (
        slope.quantity,
        round(slope.first),
        round(slope.last),
        growth,
        interval,
        "" if not is_judged else "yes" if slope.is_steady else "NO",
    )
