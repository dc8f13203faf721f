"""``aionn plan``: how many streams with a guarantee some devices take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from aionn.cli.numbers import SEED_MAX, numbers
from aionn.cli.output import check_writable, print_json, write_report
from aionn.reports.terminal import print_line, print_table
from aionn.simulation.capacity import (
    FIT_HEADS,
    PHASE_HEADS,
    SLOT_HEADS,
    VERIFICATION_HEADS,
    capacity_page,
    fit_rows,
    phase_rows,
    plan_capacity,
    slot_rows,
)
from aionn.simulation.capacity import (
    verify as verify_plan,
)
from aionn.simulation.scenario import Scenario
from aionn.simulation.workload import devices_of, durations_of, read_workload

__all__ = ["plan"]


def plan(
    workload: Path,
    *,
    fps: Annotated[float | None, numbers(0.001, 1e6)] = None,
    deadline: Annotated[float | None, numbers(1e-6, 86_400)] = None,
    verify: Annotated[bool, Parameter(negative=())] = False,
    seed: Annotated[int, numbers(0, SEED_MAX)] = 1,
    folder: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    html: Path | None = None,
) -> int:
    """Find how many streams with a guarantee fit on described devices, what limits that, and the cheapest change.

    Exit code 1 means that a stream does not fit, or that the check in virtual time lost a frame.

    Args:
        workload: A TOML file as for aionn simulate, in which streams have guarantee = true, or "phased".
        fps: Frames per second of all these streams, instead of their own.
        deadline: Their deadline in seconds, instead of their own.
        verify: Also run the plan in virtual time, over phases that are as unkind as the streams allow.
        seed: Of the phases that are drawn.
        folder: The folder of the files that the workload names (models, devices); by default the workload's own.
        json: Print one JSON object instead of tables.
        html: Write a page with the demand over time to this file.
    """
    described = read_workload(workload)
    streams = tuple(
        msgspec.structs.replace(
            stream,
            rate_per_s=stream.rate_per_s if fps is None else fps,
            period_s=stream.period_s if fps is None else 1 / fps,
            deadline_s=stream.deadline_s if deadline is None else deadline,
        )
        if stream.guarantee
        else stream
        for stream in described.stream
    )
    described = msgspec.structs.replace(described, stream=streams)
    where = folder or workload.parent
    devices = devices_of(described, folder=where)
    scenario = Scenario(described, devices, [], durations_of(described, devices, folder=where), seed)
    check_writable(html)
    found = plan_capacity(scenario)
    checked = verify_plan(scenario, found, seed=seed) if verify else []
    if html is not None:
        write_report(html, capacity_page(described.name, found, checked))
    code = 1 if found.refusals or any(run.unexplained for run in checked) else 0
    if json:
        print_json(
            {
                "fits": found.fits,
                "slots": found.slots,
                "phases": [dict(zip(PHASE_HEADS, row, strict=True)) for row in phase_rows(found)],
                "refusals": found.refusals,
                "decided_ms": found.decided_ms,
                "verified": checked if verify else None,
            }
        )
        return code
    print_table(f"{described.name}: slots", SLOT_HEADS, slot_rows(found))
    if phases := phase_rows(found):
        print_table("phases", PHASE_HEADS, phases)
    print_table("streams of one kind on an empty slot", FIT_HEADS, fit_rows(found))
    for refusal in found.refusals:
        print_line(f"{refusal.reason}.")
        change = (
            f"cheapest change: {refusal.cheapest}"
            if refusal.cheapest
            else "no single change would make it fit"
        )
        print_line(change, lead="  ")
    if checked:
        rows = [(run.phasing, run.frames, run.lost, run.labelled, run.unexplained) for run in checked]
        print_table("in virtual time", VERIFICATION_HEADS, rows)
    placed = sum(len(slot.streams) for slot in found.slots)
    print_line(
        f"{placed} of {placed + len(found.refusals)} streams fit; decided in {found.decided_ms:.0f} ms"
    )
    return code
