"""``aionn conformance --suite vts``: does a driver keep the contract?"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from aionn.cli import interrupts
from aionn.cli.output import check_writable, print_json, write_report
from aionn.conformance.nodes import expectations_of
from aionn.conformance.suite import Isolation
from aionn.conformance.vts.case import STEP_S
from aionn.conformance.vts.run import (
    Settings,
    VtsOutcome,
    VtsReport,
    chosen_cases,
    load_sample,
    report_of,
    run_vts,
)
from aionn.conformance.vts_report import html_report, junit_report
from aionn.reports.terminal import print_line, print_table, progress_bar

__all__ = ["run_driver_suite"]

FAILURES_SHOWN = 50
"""Number of failures that are printed; the reports have all of them."""


def run_driver_suite(
    device: str,
    *,
    data: Path | None,
    contains: str,
    isolation: Isolation,
    node: str,
    time_limit: float | None,
    everything: bool,
    junit: Path | None,
    html: Path | None,
    json: bool,
) -> int:
    """Runs the driver suite and prints or writes its report; the exit code, 1 for a failure. See ``conformance`` for the
    arguments.
    """
    chosen_cases(contains)
    check_writable(junit, html)
    lists = expectations_of(device, node)
    settings = Settings(
        step_s=STEP_S if time_limit is None else time_limit,
        unsupported={p: why for p, why in lists.unsupported.items() if "/" in p},
        expected_failures={p: why for p, why in lists.expected_failures.items() if "/" in p},
    )
    if everything:
        settings = msgspec.structs.replace(settings, mutants_max=None)
    tests = load_sample(data, per_operation=None if everything else 1)
    with progress_bar(f"vts on {device}", is_wanted=not json) as show:
        outcomes: list[VtsOutcome] = []
        began_s = time.monotonic()

        def progress(outcome: VtsOutcome, total: int) -> None:
            outcomes.append(outcome)
            if show is not None:
                failed = sum(each.verdict == "failed" for each in outcomes)
                show(f"vts on {device}: {len(outcomes)}/{total}, {failed} failed", len(outcomes), total)

        async def run() -> VtsReport:
            with interrupts.ends_early():
                return await run_vts(
                    device,
                    isolation=isolation,
                    node=node,
                    contains=contains,
                    tests=tests,
                    settings=settings,
                    progress=progress,
                )
            return report_of(device, outcomes, (), time.monotonic() - began_s)

        report = interrupts.run(run)
    if junit is not None:
        write_report(junit, junit_report(report))
    if html is not None:
        write_report(html, html_report(report))
    if json:
        print_json(msgspec.structs.replace(report, outcomes=()))
    else:
        _print(device, report, has_data=bool(tests))
    return 1 if report.failed else 0


def _print(device: str, report: VtsReport, *, has_data: bool) -> None:
    columns = ("", "passed", "failed", "skipped", "expected failures")
    rows = [(name, c.passed, c.failed, c.skipped, c.expected_failures) for name, c in report.by_group.items()]
    print_table(f"vts on {device}, by group", columns, rows, least=("expected failures", "skipped"))
    if not has_data:
        print_line("no conformance data were found: only the suite's own models were tried; see --data")
    for reason, count in report.skip_reasons.items():
        print_line(f"skipped {count}: {reason}")
    for failure in report.failures[:FAILURES_SHOWN]:
        print_line(f"FAILED {failure}")
    if len(report.failures) > FAILURES_SHOWN:
        print_line(
            f"and {len(report.failures) - FAILURES_SHOWN} more; --json, --junit and --html show all of them"
        )
    print_line(
        f"{report.passed} passed, {report.failed} failed, {report.skipped} skipped, "
        f"{report.expected_failures} failed as expected, in {report.seconds:.1f} s"
    )
