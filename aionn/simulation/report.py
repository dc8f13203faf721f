"""The results of a run: counts by priority, latencies, use of the devices; as a record and as a page.

Owns the figures and the page that shows them. The page is one file: drawings are SVG inside of it, it loads nothing, and functions
without a network.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import msgspec

from aionn.hal import Priority
from aionn.simulation.engine import Engine
from aionn.simulation.workload import PRIORITIES

__all__ = ["ClassReport", "DeviceReport", "Report", "page", "report_of"]

QUANTILES = (0.5, 0.9, 0.99, 1.0)

BARS_MAX = 4000
"""Number of executions that the timeline shows: more would be thinner than a pixel."""

WIDTH = 1100
COLOURS = {Priority.HIGH: "#c0392b", Priority.MEDIUM: "#d68910", Priority.LOW: "#2471a3"}

LEGEND = (
    "<p>"
    + "".join(
        f'<span style="background:{COLOURS[priority]}">&emsp;</span> {priority.name.lower()}&emsp;'
        for priority in sorted(Priority, reverse=True)
    )
    + "pale: did not end on time</p>"
)


class ClassReport(msgspec.Struct, frozen=True):
    """The outcomes of the requests of one priority.

    Attributes:
        priority: ``high``, ``medium`` or ``low``.
        requests: How many came.
        on_time: How many ended by their deadline.
        late: How many ended after it.
        aborted: Number of aborted ones.
        refused: Number of those rejected on arrival.
        failed: How many failed with their device or with what they followed.
        latency_ms: Of those on time, by quantile: 0.5, 0.9, 0.99, 1.
    """

    priority: str
    requests: int
    on_time: int
    late: int
    aborted: int
    refused: int
    failed: int
    latency_ms: tuple[float, ...]


class DeviceReport(msgspec.Struct, frozen=True):
    """The use of a device.

    Attributes:
        name: Its name.
        busy_share: Busy time of its slots over the time of the run.
        energy_j: What it drew.
    """

    name: str
    busy_share: float
    energy_j: float


class Report(msgspec.Struct, frozen=True):
    """A run in figures.

    Attributes:
        workload: Its name.
        policy: Who decided.
        seed: Of arrivals, noise and faults.
        simulated_s: Until the last event.
        events: How many the simulation took.
        classes: By priority, HIGH first.
        devices: In the workload's order.
        wasted_share: Device time of jobs that did not end on time, over all device time used.
        reasons: How many were not on time, by reason.
        digest: SHA-256 of the record of events.
    """

    workload: str
    policy: str
    seed: int
    simulated_s: float
    events: int
    classes: tuple[ClassReport, ...]
    devices: tuple[DeviceReport, ...]
    wasted_share: float
    reasons: dict[str, int]
    digest: str


def report_of(engine: Engine) -> Report:
    """The figures of a run that has ended."""
    scenario = engine.scenario
    streams = scenario.workload.stream
    reasons: dict[str, int] = {}
    for outcome in engine.outcomes:
        if outcome is not None and outcome.why:
            reasons[outcome.why] = reasons.get(outcome.why, 0) + 1
    span_s = engine.core.now_ns / 1e9
    devices = []
    for index, device in enumerate(scenario.devices):
        busy_s = sum(engine.busy_ns[slot.index] for slot in engine.slots if slot.device == index) / 1e9
        share = busy_s / (span_s * device.slots) if span_s else 0.0
        # Slots share the device: it draws in proportion to how many of them are busy.
        energy_j = (
            device.power.idle_w * span_s + (device.power.busy_w - device.power.idle_w) * busy_s / device.slots
        )
        devices.append(DeviceReport(device.name, share, energy_j))
    used_ns = sum(engine.busy_ns)
    return Report(
        workload=scenario.workload.name,
        policy=engine.policy.name,
        seed=scenario.seed,
        simulated_s=span_s,
        events=engine.core.events,
        classes=tuple(
            _class_report(engine, priority, [PRIORITIES[stream.priority] == priority for stream in streams])
            for priority in sorted(Priority, reverse=True)
        ),
        devices=tuple(devices),
        wasted_share=engine.wasted_ns / used_ns if used_ns else 0.0,
        reasons=dict(sorted(reasons.items())),
        digest=engine.digest(),
    )


def _class_report(engine: Engine, priority: Priority, is_of_class: Sequence[bool]) -> ClassReport:
    counts = dict.fromkeys(("on_time", "late", "aborted", "refused", "failed"), 0)
    latencies = []
    for number, arrival in enumerate(engine.scenario.arrivals):
        outcome = engine.outcomes[number]
        if is_of_class[arrival.stream_index] and outcome is not None:
            counts[outcome.kind] += 1
            if outcome.kind == "on_time":
                latencies.append((outcome.at_ns - arrival.at_ns) / 1e6)
    latencies.sort()
    quantiles = [latencies[math.ceil(q * len(latencies)) - 1] if latencies else 0.0 for q in QUANTILES]
    return ClassReport(priority.name.lower(), sum(counts.values()), **counts, latency_ms=tuple(quantiles))


# --- The page -----------------------------------------------------------------------------------------------------------------


def page(engine: Engine) -> str:
    """The run as one HTML page: the timeline of each device, counts by priority, and latencies. The run must have been recorded."""
    report = report_of(engine)
    title = html.escape(f"{report.workload} under {report.policy}, seed {report.seed}")
    rows = "".join(
        f"<tr><td>{c.priority}</td><td>{c.requests}</td><td>{c.on_time}</td><td>{c.late}</td><td>{c.aborted}</td>"
        f"<td>{c.refused}</td><td>{c.failed}</td>"
        + "".join(f"<td>{value:.2f}</td>" for value in c.latency_ms)
        + "</tr>"
        for c in report.classes
    )
    used = "".join(
        f"<tr><td>{html.escape(d.name)}</td><td>{100 * d.busy_share:.1f} %</td><td>{d.energy_j:.3g}</td></tr>"
        for d in report.devices
    )
    why = "".join(
        f"<tr><td>{html.escape(text)}</td><td>{count}</td></tr>" for text, count in report.reasons.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px sans-serif; margin: 2em; max-width: {WIDTH + 160}px; }}
table {{ border-collapse: collapse; margin: 1em 0; }} td, th {{ padding: 2px 12px; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }} tr + tr {{ border-top: 1px solid #ddd; }}
svg text {{ font: 12px sans-serif; }}
</style></head><body>
<h1>{title}</h1>
<p>{report.simulated_s:.3f} s simulated in {report.events} events; {100 * report.wasted_share:.2f} % of the device time went to jobs
that did not end on time.</p>
<h2>On time, by priority</h2>{_counts(report)}
<table><tr><th>priority</th><th>requests</th><th>on time</th><th>late</th><th>aborted</th><th>refused</th><th>failed</th>
<th>p50 ms</th><th>p90</th><th>p99</th><th>max</th></tr>{rows}</table>
<h2>Devices</h2>{_timeline(engine)}
<table><tr><th>device</th><th>busy</th><th>joules</th></tr>{used}</table>
<h2>Latency of what ended on time</h2>{_latencies(engine)}
<h2>Why requests did not end on time</h2><table>{why or "<tr><td>all did</td></tr>"}</table>
<p>Record of events: {report.digest}</p>
</body></html>
"""


def _colour_of(engine: Engine, number: int) -> str:
    stream = engine.scenario.workload.stream[engine.scenario.arrivals[number].stream_index]
    return COLOURS[PRIORITIES[stream.priority]]


def _counts(report: Report) -> str:
    parts = []
    for row, c in enumerate(report.classes):
        share = c.on_time / c.requests if c.requests else 0.0
        told = f"{c.on_time} of {c.requests} ({100 * share:.1f} %)" if c.requests else "no requests"
        colour = COLOURS[PRIORITIES[c.priority]]
        y = row * 24
        parts.append(
            f'<text x="0" y="{y + 15}">{c.priority}</text>'
            f'<rect x="80" y="{y}" width="{WIDTH - 280}" height="18" fill="#eee"/>'
            f'<rect x="80" y="{y}" width="{share * (WIDTH - 280):.1f}" height="18" fill="{colour}"/>'
            f'<text x="{WIDTH - 190}" y="{y + 15}">{told}</text>'
        )
    return f'<svg role="img" width="{WIDTH}" height="{24 * len(report.classes)}">{"".join(parts)}</svg>'


def _timeline(engine: Engine) -> str:
    spans: list[tuple[int, int, int, int]] = []
    since: dict[int, tuple[int, int]] = {}
    for at_ns, kind, number, slot in engine.events:
        if kind == "start":
            since[slot] = (at_ns, number)
        elif kind in ("stop", "end", "lost") and slot in since:
            started_ns, who = since.pop(slot)
            spans.append((slot, started_ns, at_ns, who))
    shown = spans[:BARS_MAX]
    end_ns = max((span[2] for span in shown), default=1)
    parts = []
    for row in engine.slots:
        device = engine.scenario.devices[row.device]
        slot = sum(slot.device == row.device for slot in engine.slots[: row.index])
        name = html.escape(f"{device.name}, slot {slot + 1}" if device.slots > 1 else device.name)
        parts.append(f'<text x="0" y="{row.index * 26 + 16}">{name}</text>')
    for index, started_ns, ended_ns, number in shown:
        x = 140 + started_ns / end_ns * (WIDTH - 140)
        width = max(0.3, (ended_ns - started_ns) / end_ns * (WIDTH - 140))
        outcome = engine.outcomes[number]
        is_on_time = outcome is not None and outcome.kind == "on_time"
        label = f"{number}: {started_ns / 1e6:.3f} to {ended_ns / 1e6:.3f} ms{'' if is_on_time else ', not on time'}"
        parts.append(
            f'<rect x="{x:.2f}" y="{index * 26}" width="{width:.2f}" height="20" fill="{_colour_of(engine, number)}"'
            f' opacity="{1 if is_on_time else 0.35}"><title>{label}</title></rect>'
        )
    height = len(engine.slots) * 26 + 24
    parts.insert(0, _ticks(140, height - 24, end_ns / 1e6))
    told = f"<p>The first {BARS_MAX} of {len(spans)} executions.</p>" if len(spans) > BARS_MAX else ""
    return f'{told}{LEGEND}<svg role="img" width="{WIDTH}" height="{height}">{"".join(parts)}</svg>'


def _latencies(engine: Engine) -> str:
    by_priority: dict[Priority, list[float]] = {priority: [] for priority in Priority}
    streams = engine.scenario.workload.stream
    for number, arrival in enumerate(engine.scenario.arrivals):
        outcome = engine.outcomes[number]
        if outcome is not None and outcome.kind == "on_time":
            latency_ms = (outcome.at_ns - arrival.at_ns) / 1e6
            by_priority[PRIORITIES[streams[arrival.stream_index].priority]].append(latency_ms)
    longest_ms = max((max(values) for values in by_priority.values() if values), default=1.0)
    height = 220
    parts = [f'<rect x="40" y="0" width="{WIDTH - 40}" height="{height}" fill="none" stroke="#999"/>']
    for share in (0.0, 0.5, 1.0):
        y = height * (1 - share)
        parts.append(f'<text x="36" y="{min(height, max(12, y + 4)):.0f}" text-anchor="end">{share:g}</text>')
    for priority, values in by_priority.items():
        if not values:
            continue
        values.sort()
        # A quantile for every pixel is all that a line can show.
        points = []
        for step in range(201):
            value = values[max(0, math.ceil(step / 200 * len(values)) - 1)]
            points.append(f"{40 + value / longest_ms * (WIDTH - 40):.1f},{height * (1 - step / 200):.1f}")
        parts.append(
            f'<polyline fill="none" stroke-width="2" stroke="{COLOURS[priority]}" points="{" ".join(points)}"/>'
        )
    parts.insert(0, _ticks(40, height, longest_ms))
    told = "<p>From arrival to end; the line gives the share of a class that took no longer.</p>"
    return f'{told}<svg role="img" width="{WIDTH}" height="{height + 24}">{"".join(parts)}</svg>'


def _ticks(left: int, height: int, end_ms: float) -> str:
    """An axis of time below a drawing, from 0 at ``left`` to the right edge, with lines at round numbers."""
    step_ms = 10.0 ** math.floor(math.log10(end_ms))
    step_ms /= 5 if end_ms < 2 * step_ms else 2 if end_ms < 5 * step_ms else 1
    parts = []
    for number in range(math.floor(end_ms / step_ms) + 1):
        x = left + number * step_ms / end_ms * (WIDTH - left)
        # The last label ends where the drawing ends.
        anchor = "start" if number == 0 else "end" if x > WIDTH - 30 else "middle"
        parts.append(
            f'<path d="M{x:.1f} 0V{height + 4}" stroke="#ddd"/>'
            f'<text x="{x:.1f}" y="{height + 18}" text-anchor="{anchor}">{number * step_ms:g} ms</text>'
        )
    return "".join(parts)
