"""``aionn doctor``: what on this machine is against deadlines, and what to do about it."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from aionn.cli.numbers import DEADLINE_MS_MAX, numbers
from aionn.cli.output import console, print_json, print_table
from aionn.realtime.checks import check
from aionn.realtime.findings import Measured, judge
from aionn.realtime.machine import read_machine
from aionn.realtime.measuring import measure as measured_for
from aionn.realtime.permission import ask

__all__ = ["doctor"]

MEASURE_S_MAX = 900.0
"""Longest measurement: as many timers as are kept."""


def doctor(
    *,
    deadline: Annotated[float, numbers(0, DEADLINE_MS_MAX, "milliseconds", is_open=True)] = 10.0,
    measure: Annotated[float | None, numbers(0, MEASURE_S_MAX, "seconds", is_open=True)] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Say what on this machine is against deadlines, with what to do about it.

    Exit code 1 says that deadlines of this length cannot be expected here.

    Args:
        deadline: Milliseconds between a frame and its answer, beyond what the model takes.
        measure: Seconds for which timers, wakes across processors and gaps are measured.
        json: Print one JSON object instead of tables.
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
        width = max(len(each.name) for each in findings)
        for each in findings:
            remedy = f" -> {each.remedy}" if each.remedy else ""
            # A line each: a remedy can be copied from it.
            console().print(f"{each.severity:7}  {each.name:{width}}  {each.sentence}{remedy}", markup=False)
        if measured is not None:
            print_measured(measured)
        console().print(verdict.sentence, markup=False)
    return 0 if verdict.expected else 1


def print_measured(measured: Measured) -> None:
    """A table of what was measured, in microseconds."""
    rows: list[tuple[object, ...]] = [
        (name, times.count, times.median_us, times.p99_us, times.max_us)
        for name, times in (("timer is late by", measured.timers), ("wake across processors", measured.wakes))
        if times is not None
    ]
    gaps = measured.gaps
    rows.append((f"gaps over {gaps.floor_us:g} us", gaps.count, "", "", gaps.longest_us))
    print_table(
        f"measured for {measured.seconds:g} s, {measured.scheduling}",
        ("what", "count", "median us", "p99 us", "max us"),
        rows,
    )
    if measured.steal is not None:
        console().print(
            f"meanwhile the hypervisor took {100 * measured.steal:.2g} % of the time, "
            f"gaps are {100 * gaps.share:.2g} %",
            markup=False,
        )
