"""``aionn doctor``: the settings of this machine that delay frames, and their remedies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from aionn.cli.numbers import DEADLINE_MS_MAX, numbers
from aionn.cli.output import print_json
from aionn.realtime.checks import check
from aionn.realtime.findings import Finding, Measured, judge
from aionn.realtime.machine import read_machine
from aionn.realtime.measuring import measure as measured_for
from aionn.realtime.permission import ask
from aionn.reports.terminal import print_line, print_table

__all__ = ["doctor"]

MEASURE_S_MAX = 900.0
"""Longest measurement: longer ones would exceed the number of timers that are kept."""


def doctor(
    *,
    deadline: Annotated[float, numbers(0, DEADLINE_MS_MAX, "milliseconds", is_open=True)] = 10.0,
    measure: Annotated[float | None, numbers(0, MEASURE_S_MAX, "seconds", is_open=True)] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Check the settings of this machine that delay frames, and print the remedies.

    Exit code 1 means that this machine cannot keep deadlines of this length when it is busy.

    Args:
        deadline: Milliseconds between a frame and its result, beyond the time that the model takes.
        measure: Seconds for which delays of timers, wake-ups across processors and gaps are measured.
        json: Print one JSON object instead of text.
    """
    permission = ask()
    findings = check(read_machine(permission))
    measured = None if measure is None else measured_for(measure, permission)
    verdict = judge(findings, deadline, measured)
    if json:
        print_json(
            {
                "deadline_ms": deadline,
                "expected": verdict.expected,
                "verdict": verdict.sentence,
                "permission": permission,
                "findings": findings,
                "measured": measured,
            }
        )
    else:
        print_findings(findings)
        if measured is not None:
            print_measured(measured)
        print_line(f"verdict: {verdict.sentence}")
    return 0 if verdict.expected else 1


def print_findings(findings: Sequence[Finding]) -> None:
    """A line for each finding, and a line for each remedy; on a terminal the findings are wrapped between words."""
    size = max(len(each.name) for each in findings)
    indent = " " * (9 + size + 2)
    for each in findings:
        delay = f" (may delay a frame by {each.late_ms:g} ms)" if each.late_ms else ""
        print_line(f"{each.severity:7}  {each.name:{size}}  {each.sentence}{delay}", indent=indent)
        if each.remedy:
            print_line(f"{indent}remedy: {each.remedy}", wraps=False)


def print_measured(measured: Measured) -> None:
    """A table of the measured delays, in microseconds."""
    rows: list[tuple[object, ...]] = [
        (name, times.count, times.median_us, times.p99_us, times.max_us)
        for name, times in (
            ("delay of a timer", measured.timers),
            ("wake-up across processors", measured.wakes),
        )
        if times is not None
    ]
    gaps = measured.gaps
    rows.append((f"gap over {gaps.floor_us:g} us", gaps.count, "", "", gaps.longest_us))
    print_table(
        f"measured for {measured.seconds:g} s under {measured.scheduling} scheduling",
        ("delay", "count", "median us", "p99 us", "max us"),
        rows,
    )
    share = f"gaps took {100 * gaps.share:.2g} % of the measured time"
    if measured.steal is not None:
        share += f"; the hypervisor reports that it took {100 * measured.steal:.2g} %"
    print_line(share)
