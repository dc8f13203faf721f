"""``aionn conformance``: does a device compute what the spec says?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import anyio
from cyclopts import Parameter

from aionn.cli.driver_suite import run_driver_suite
from aionn.cli.output import console, print_json, print_table, suite_progress
from aionn.conformance.computing import Mode
from aionn.conformance.cts_run import CHECKS, Check
from aionn.conformance.suite import TIME_LIMIT_S, Isolation, Report, Settings, Tally
from aionn.conformance.vts_models import DATA_VARIABLE, default_data
from aionn.conformance.workers import run_suite
from aionn.errors import InvalidArgument

__all__ = ["conformance"]

JOBS_MAX = 256
"""Most worker processes of one call; each may have a driver process beside it."""

FAILURES_SHOWN = 50
"""How many failures are told to people; ``--json`` has all of them."""


def conformance(
    device: str,
    /,
    *,
    data: Path | None = None,
    suite: Literal["cts", "vts"] = "cts",
    filter: Annotated[str, Parameter(name=["--filter", "-k"])] = "",
    mode: Mode | None = None,
    check: list[Check] | None = None,
    isolation: Isolation = "process",
    jobs: int | None = None,
    time_limit: float | None = None,
    everything: Annotated[bool, Parameter(name="--all", negative=())] = False,
    junit: Path | None = None,
    html: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Compare a device's results with the public conformance data, or see whether its driver keeps the contract.

    Exit code 1 says that something failed.

    Args:
        device: Registered name of a driver.
        data: The folder of the data; by default what AIONN_CONFORMANCE_DATA names.
        suite: cts is the models and values of the Android CTS, vts what a driver must do, hostile callers included.
        filter: Only tests with this text in their names.
        mode: How models are executed, by default sync; cts alone.
        check: What is made of each test, given once for each; by default all that applies; cts alone.
        isolation: Run the driver in a process of its own, or in the process that runs the tests.
        jobs: How many processes share the tests; by default as many as there are cores to use; cts alone.
        time_limit: Seconds that one check, or one call of vts, may take; by default 30 and 10.
        everything: Try every mutation of every model of the data instead of a sample; vts alone.
        junit: Write a report as JUnit's XML; vts alone.
        html: Write a report as one HTML file; vts alone.
        json: Print one JSON object.
    """
    count = len(os.sched_getaffinity(0)) if jobs is None else jobs
    if not 1 <= count <= JOBS_MAX:
        raise InvalidArgument(f"--jobs: expected from 1 to {JOBS_MAX}, got {count}")
    if time_limit is not None and not 0 < time_limit <= 3600:
        raise InvalidArgument(f"--time-limit: expected more than 0 and at most 3600 s, got {time_limit:g}")
    of_other_suite = (
        {"--mode": mode, "--check": check, "--jobs": jobs}
        if suite == "vts"
        else {"--all": everything or None, "--junit": junit, "--html": html}
    )
    for name, value in of_other_suite.items():
        if value is not None:
            raise InvalidArgument(f"{name}: expected without --suite {suite}, which has no use for it")
    if suite == "vts":
        return run_driver_suite(
            device,
            data=data,
            contains=filter,
            isolation=isolation,
            time_limit=time_limit,
            everything=everything,
            junit=junit,
            html=html,
            json=json,
        )
    folder = data or default_data()
    if folder is None:
        raise InvalidArgument(
            f"--data: expected the folder of the conformance data, here or in {DATA_VARIABLE}"
        )
    checks = tuple(c for c in CHECKS if check is None or c in check)
    mode = mode or "sync"
    settings = Settings(mode, checks, TIME_LIMIT_S if time_limit is None else time_limit)
    shown = sys.stdout.isatty() and not json
    with suite_progress(disable=not shown) as bar:
        task = bar.add_task(f"{suite} on {device}", total=None, failed=0)

        def progress(tally: Tally, total: int) -> None:
            bar.update(task, advance=1, total=total, failed=tally.counts.failed)

        report = anyio.run(_run, device, folder, filter, isolation, settings, count, progress)
    if json:
        print_json(report)
    else:
        _print(device, suite, mode, report)
    return 1 if report.failed else 0


async def _run(
    device: str,
    data: Path,
    contains: str,
    isolation: Isolation,
    settings: Settings,
    jobs: int,
    progress: Callable[[Tally, int], None],
) -> Report:
    return await run_suite(
        device,
        data,
        contains=contains,
        isolation=isolation,
        settings=settings,
        jobs=jobs,
        progress=progress,
    )


def _print(device: str, suite: str, mode: str, report: Report) -> None:
    columns = ("", "passed", "failed", "skipped", "expected failures")
    for title, table in (("by operation", report.by_operation), ("by check", report.by_check)):
        rows = [(name, c.passed, c.failed, c.skipped, c.expected_failures) for name, c in table.items()]
        print_table(f"{suite} on {device}, {mode}, {title}", columns, rows)
    screen = console()
    for reason, count in report.skip_reasons.items():
        screen.print(f"skipped {count}: {reason}", markup=False)
    for failure in report.failures[:FAILURES_SHOWN]:
        screen.print(f"FAILED {failure}", markup=False)
    if len(report.failures) > FAILURES_SHOWN:
        screen.print(f"and {len(report.failures) - FAILURES_SHOWN} more; --json shows all of them")
    screen.print(
        f"{report.passed} passed, {report.failed} failed, {report.skipped} skipped, "
        f"{report.expected_failures} failed as expected, in {report.seconds:.1f} s"
    )
