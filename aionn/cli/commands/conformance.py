"""``aionn conformance``: whether a device keeps the specification."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from aionn.cli import interrupts
from aionn.cli.driver_module import find_driver_module
from aionn.cli.driver_suite import run_driver_suite
from aionn.cli.numbers import numbers
from aionn.cli.output import print_json
from aionn.conformance.computing import Mode
from aionn.conformance.cts.run import CHECKS, Check
from aionn.conformance.nodes import expectations_of
from aionn.conformance.random_graphs.suite import NUMBER_MAX, RandomSettings, chosen_sets
from aionn.conformance.suite import TIME_LIMIT_S, Isolation, Report, Settings, Tally
from aionn.conformance.vts.models import DATA_VARIABLE, default_data
from aionn.conformance.workers import run_random_suite, run_suite
from aionn.errors import InvalidArgument
from aionn.fleet.addresses import parse_node
from aionn.reports.terminal import print_line, print_table, progress_bar
from aionn.runtime.settings import settings_from

__all__ = ["conformance"]

Suite = Literal["cts", "vts", "random"]

_SUITES_OF: dict[str, tuple[Suite, ...]] = {
    "--mode": ("cts", "random"),
    "--jobs": ("cts", "random"),
    "--check": ("cts",),
    "--data": ("cts", "vts"),
    "--all": ("vts",),
    "--junit": ("vts",),
    "--html": ("vts",),
    "--seeds": ("random",),
    "--first": ("random",),
    "--keep": ("random",),
}
"""The suites that have an option."""

SEEDS_DEFAULT = 1000
"""Random graphs of a run: some ten seconds."""

SEEDS_MAX = 10_000_000
"""Most random graphs of one run: a day's work."""

FIRST_DRAWN_MAX = 1_000_000_000
"""The first number is drawn below this: nine digits can be copied by hand."""

Run = Callable[..., Awaitable[Report]]
"""A suite that takes ``progress``."""

JOBS_MAX = 256
"""Most worker processes of one call; each may have a driver process beside it."""

TIME_LIMIT_S_MAX = 3600
"""Longest time of one check, an hour."""

LEAST = ("expected failures", "skipped")
"""The columns that a narrow terminal loses; the last line of the output has their sums."""

FAILURES_SHOWN = 50
"""Number of failures that are printed; ``--json`` has all of them."""


def conformance(
    device: str,
    /,
    *,
    data: Path | None = None,
    suite: Suite = "cts",
    filter: Annotated[str, Parameter(name=["--filter", "-k"])] = "",
    mode: Mode | None = None,
    check: list[Check] | None = None,
    isolation: Isolation = "process",
    fleet: str | None = None,
    jobs: Annotated[int | None, numbers(1, JOBS_MAX)] = None,
    time_limit: Annotated[float | None, numbers(0, TIME_LIMIT_S_MAX, "s", is_open=True)] = None,
    everything: Annotated[bool, Parameter(name="--all", negative=())] = False,
    junit: Path | None = None,
    html: Path | None = None,
    seeds: Annotated[int | None, numbers(1, SEEDS_MAX)] = None,
    first: Annotated[int | None, numbers(0, NUMBER_MAX)] = None,
    keep: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Compare a device's results with the specification, or test whether its driver keeps the contract.

    Exit code 1 means that a test failed.

    Args:
        device: Registered name of a driver, or MODULE:CLASS, in the working directory too; with --fleet NODE/DEVICE.
        data: The folder of the data; by default the one that AIONN_CONFORMANCE_DATA names.
        suite: cts is the models and values of the Android CTS, vts is the driver contract, hostile callers included, random is
            random graphs, compared with the reference device, which itself is compared with plain definitions.
        filter: Only tests, or sets of random graphs, with this text in their names.
        mode: The way models are executed, by default sync; cts and random.
        check: A check of each test; may be repeated; by default all that apply; cts alone.
        isolation: Run the driver in a process of its own, or in the process that runs the tests.
        fleet: Address of the node (aionn serve --listen) whose device is tested, such as 127.0.0.1:7463.
        jobs: Number of processes that share the tests; by default the number of usable cores; cts and random.
        time_limit: Seconds that one check or one random graph's execution, or one call of vts, may take; by default 30 and 10.
        everything: Try every mutation of every model of the data instead of a sample; vts alone.
        junit: Write a report as JUnit's XML; vts alone.
        html: Write a report as one HTML file; vts alone.
        seeds: Number of random graphs, by default 1000; random alone.
        first: The number of the first graph, by default a random one; a graph's number determines all of it; random alone.
        keep: A folder for the graphs that failed, shrunk; random alone.
        json: Print one JSON object.
    """
    settings_from()  # Here, before the processes that read the variables as well.
    node = _node(device, fleet, isolation)
    count = min(JOBS_MAX, len(os.sched_getaffinity(0))) if jobs is None else jobs
    options = {
        "--mode": mode, "--jobs": jobs, "--check": check, "--data": data, "--all": everything or None, "--junit": junit,
        "--html": html, "--seeds": seeds, "--first": first, "--keep": keep,
    }  # fmt: skip
    _check_options(suite, options)
    if suite == "vts":
        return run_driver_suite(
            device,
            data=data,
            contains=filter,
            isolation=isolation,
            node=node,
            time_limit=time_limit,
            everything=everything,
            junit=junit,
            html=html,
            json=json,
        )
    limit_s = TIME_LIMIT_S if time_limit is None else time_limit
    if suite == "random":
        graphs = _numbers(SEEDS_DEFAULT if seeds is None else seeds, first)
        chosen_sets(filter)
        expectations_of(device, node)  # There is such a driver.
        chosen = RandomSettings(mode or "sync", filter, limit_s, keep=_folder(keep))
        if not json:
            # Before they run: a run that is cut short can be repeated too.
            print_line(f"graphs {graphs.start} to {graphs.stop - 1}")
        run: Run = partial(
            run_random_suite, device, graphs, isolation=isolation, node=node, settings=chosen, jobs=count
        )
    else:
        checks = tuple(c for c in CHECKS if check is None or c in check)
        settings = Settings(mode or "sync", checks, limit_s)
        folder = _data_folder(data)
        run = partial(
            run_suite,
            device,
            folder,
            contains=filter,
            isolation=isolation,
            node=node,
            settings=settings,
            jobs=count,
        )
    return _report(device, suite, mode or "sync", run, json=json)


def _node(device: str, fleet: str | None, isolation: Isolation) -> str:
    """The address of the node that has the device; empty for a driver of this machine, whose module can be found then."""
    if fleet is None:
        if "/" in device:
            raise InvalidArgument(f"{device}: the device of a node is tested with --fleet ADDRESS")
        find_driver_module(device)
        return ""
    parse_node(fleet, "--fleet")
    node, slash, name = device.partition("/")
    if not (node and slash and name):
        raise InvalidArgument(
            f"--fleet: expected a device NODE/DEVICE, as aionn fleet shows it, got {device!r}"
        )
    if isolation != "process":
        raise InvalidArgument("--isolation: the device of a node runs in processes of that node")
    return fleet


def _check_options(suite: Suite, options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if value is not None and suite not in _SUITES_OF[name]:
            suites = " or ".join(_SUITES_OF[name])
            raise InvalidArgument(f"{name}: expected only with --suite {suites}, got with --suite {suite}")


def _data_folder(data: Path | None) -> Path:
    folder = data or default_data()
    if folder is None:
        raise InvalidArgument(
            f"--data: expected the folder of the conformance data, here or in {DATA_VARIABLE}; aionn does not bring them, "
            "docs/how-to/conformance-data.md describes them; --suite vts and --suite random need none"
        )
    return folder


def _numbers(seeds: int, first: int | None) -> range:
    if first is None:
        first = secrets.randbelow(FIRST_DRAWN_MAX)
    if first > NUMBER_MAX - seeds:
        raise InvalidArgument(f"--first: expected from 0 to {NUMBER_MAX - seeds}, got {first}")
    return range(first, first + seeds)


def _folder(keep: Path | None) -> str | None:
    if keep is None:
        return None
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InvalidArgument(
            f"--keep: expected a folder that can be written to, got {keep}: {e.strerror}"
        ) from e
    return str(keep.resolve())


def _report(
    device: str,
    suite: Suite,
    mode: Mode,
    run: Run,
    *,
    json: bool,
) -> int:
    """Runs a suite beside a bar of progress and prints its report; the exit code, 1 for a failure."""
    with progress_bar(f"{suite} on {device}", is_wanted=not json) as show:
        done, latest, began_s = 0, Tally(), time.monotonic()

        def progress(tally: Tally, total: int) -> None:
            nonlocal done, latest
            done, latest = done + 1, tally
            if show is not None:
                show(f"{suite} on {device}: {done}/{total}, {tally.counts.failed} failed", done, total)

        async def run_until_interrupted() -> Report:
            with interrupts.ends_early():
                return await run(progress=progress)
            return latest.report(time.monotonic() - began_s)

        report = interrupts.run(run_until_interrupted)
    if json:
        print_json(report)
    else:
        _print(device, suite, mode, report)
    return 1 if report.failed else 0


def _print(device: str, suite: str, mode: str, report: Report) -> None:
    columns = ("", "passed", "failed", "skipped", "expected failures")
    for title, table in (("by operation", report.by_operation), ("by check", report.by_check)):
        if not table:
            continue
        rows = [(name, c.passed, c.failed, c.skipped, c.expected_failures) for name, c in table.items()]
        print_table(f"{suite} on {device}, {mode}, {title}", columns, rows, least=LEAST)
    for reason, count in report.skip_reasons.items():
        print_line(f"skipped {count}: {reason}")
    for failure in report.failures[:FAILURES_SHOWN]:
        print_line(f"FAILED {failure}")
    if len(report.failures) > FAILURES_SHOWN:
        print_line(f"and {len(report.failures) - FAILURES_SHOWN} more; --json shows all of them")
    print_line(
        f"{report.passed} passed, {report.failed} failed, {report.skipped} skipped, "
        f"{report.expected_failures} failed as expected, in {report.seconds:.1f} s"
    )
