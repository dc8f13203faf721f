"""``aionn simulate``: a workload on described devices, in no time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from aionn.cli.numbers import SEED_MAX, numbers
from aionn.cli.output import check_writable, print_json, write_report
from aionn.reports.terminal import print_line, print_table
from aionn.simulation.baselines import PolicyName, policy_named
from aionn.simulation.bound import on_time_bound, requests_of
from aionn.simulation.checkers import breaches
from aionn.simulation.engine import Engine, prepare
from aionn.simulation.report import RESERVATION_HEADS, latency_text, page, report_of, reservation_rows
from aionn.simulation.workload import read_workload

__all__ = ["simulate"]


def simulate(
    workload: Path,
    *,
    policy: PolicyName = "plan",
    seed: Annotated[int, numbers(0, SEED_MAX)] = 1,
    folder: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    html: Path | None = None,
    bound: Annotated[bool, Parameter(negative=())] = False,
    check: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Run a workload's requests through a scheduler on simulated devices, and report the requests that ended on time.

    Args:
        workload: A TOML file: streams of requests, models and devices.
        policy: The policy; plan is aionn's own.
        seed: Of arrivals, noise and faults; the same seed gives the same run.
        folder: The folder of the files that the workload names (traces, models, devices); by default the workload's own.
        json: Print one JSON object instead of tables.
        html: Write a page with timelines and distributions to this file.
        bound: Also report the number of requests that could have ended on time if everything had been known beforehand; needs
            scipy, and exact durations.
        check: Also check the record of events against the rules that every schedule must keep; breaches make the exit code 1.
    """
    chosen = policy_named(policy)
    described = read_workload(workload)
    engine = Engine(prepare(described, seed, folder=folder or workload.parent), chosen, record=True)
    check_writable(html)
    engine.run()
    report = report_of(engine)
    if html is not None:
        write_report(html, page(engine))
    most = None
    if bound:
        slots = [device.slots for device in engine.scenario.devices]
        by_priority = on_time_bound(requests_of(engine.scenario), slots).by_priority
        most = {priority.name.lower(): count for priority, count in by_priority.items()}
    broken = breaches(engine, ages=policy == "plan") if check else []
    if json:
        print_json({**msgspec.to_builtins(report), "bound": most, "breaches": broken if check else None})
        return 1 if broken else 0
    columns = ("priority", "requests", "on time", "late", "aborted", "refused", "failed", "p50 ms", "p99 ms")
    rows = [
        (
            c.priority,
            c.requests,
            c.on_time,
            c.late,
            c.aborted,
            c.refused,
            c.failed,
            latency_text(c.latency_ms[0]),
            latency_text(c.latency_ms[2]),
        )
        for c in report.classes
    ]
    title = f"{report.workload}, policy {report.policy}, seed {seed}"
    print_table(title, columns, rows, least=("p50 ms", "requests"))
    print_table(
        "devices",
        ("device", "busy %", "joules"),
        [(d.name, 100 * d.busy_share, d.energy_j) for d in report.devices],
    )
    if report.reservations:
        print_table("streams with a guarantee", RESERVATION_HEADS, reservation_rows(report))
        for refused in report.reservations:
            if refused.refusal:
                print_line(refused.refusal)
    if most is not None:
        print_table("could have ended on time", ("priority", "requests"), list(most.items()))
    for breach in broken:
        print_line(f"breach: {breach}")
    print_line(f"{report.simulated_s:.3f} s in {report.events} events; record {report.digest[:16]}")
    return 1 if broken else 0
