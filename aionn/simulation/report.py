"""The results of a run: counts by priority, latencies, use of the devices; as a record and as a page.

Owns the figures, and what the page shows of them; ``aionn.reports`` has the frame, the plots and the colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from aionn.hal import Priority
from aionn.reports.colours import OUTCOME_ROLES, device_roles
from aionn.reports.columns import counted
from aionn.reports.html_page import Html, document, element, key, swatch, table
from aionn.reports.plots import Bar, Mark, bars, lanes, lines
from aionn.scheduler.admission import SHARE_PPM
from aionn.scheduler.bandwidth import Label
from aionn.simulation.engine import Engine
from aionn.simulation.workload import PRIORITIES

__all__ = [
    "ClassReport",
    "DeviceReport",
    "Report",
    "ReservationReport",
    "latency_text",
    "page",
    "report_of",
    "reservation_rows",
    "RESERVATION_HEADS",
]

QUANTILES = (0.5, 0.9, 0.99, 1.0)

BARS_MAX = 4000
"""Number of executions that the timeline shows: more would be thinner than a pixel."""


class ClassReport(msgspec.Struct, frozen=True):
    """The outcomes of the requests of one priority.

    Attributes:
        priority: ``high``, ``medium`` or ``low``.
        requests: Number of requests.
        on_time: Number of those that ended by their deadline.
        late: Number of those that ended after it.
        aborted: Number of aborted ones.
        refused: Number of those rejected on arrival.
        failed: Number of those that failed with their device or with what they followed.
        latency_ms: Of those on time, by quantile: 0.5, 0.9, 0.99, 1; None where none is.
    """

    priority: str
    requests: int
    on_time: int
    late: int
    aborted: int
    refused: int
    failed: int
    latency_ms: tuple[float | None, ...]


class DeviceReport(msgspec.Struct, frozen=True):
    """The use of a device.

    Attributes:
        name: Its name.
        busy_share: Busy time of its slots over the time of the run.
        energy_j: The energy that it used.
    """

    name: str
    busy_share: float
    energy_j: float


class ReservationReport(msgspec.Struct, frozen=True):
    """A stream with a guarantee.

    Attributes:
        stream: Its name.
        slot: The slot that its reservation is on; None where it was not admitted.
        share: The share of the slot that it takes.
        slack_ms: The time that was left at the tightest time of the admission test.
        at_ms: That time.
        frames: Number of its requests.
        lost: Number of those that were not on time.
        labels: Number of those that were not guaranteed, by label.
        refusal: Why it was not admitted; empty where it was.
    """

    stream: str
    slot: str | None
    share: float
    slack_ms: float
    at_ms: float
    frames: int
    lost: int
    labels: dict[str, int]
    refusal: str


class Report(msgspec.Struct, frozen=True):
    """A run in figures.

    Attributes:
        workload: Its name.
        policy: The policy that decided.
        seed: Of arrivals, noise and faults.
        simulated_s: Until the last event.
        events: Number of events of the simulation.
        classes: By priority, HIGH first.
        devices: In the workload's order.
        wasted_share: Device time of jobs that did not end on time, over all device time used.
        reasons: Number of those that were not on time, by reason.
        digest: SHA-256 of the record of events.
        reservations: The streams with a guarantee, in the workload's order.
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
    reservations: tuple[ReservationReport, ...] = ()


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
        reservations=_reservations(engine),
    )


def _reservations(engine: Engine) -> tuple[ReservationReport, ...]:
    arrivals, admission = engine.scenario.arrivals, engine.admission
    found = []
    for index, stream in enumerate(engine.scenario.workload.stream):
        if not stream.guarantee:
            continue
        numbers = [number for number, arrival in enumerate(arrivals) if arrival.stream_index == index]
        outcomes = [engine.outcomes[number] for number in numbers]
        lost = sum(outcome is None or outcome.kind != "on_time" for outcome in outcomes)
        labels = dict.fromkeys((label.value for label in Label), 0)
        for number in numbers:
            frame = engine.frames.get(number)
            if frame is not None and frame.label is not None:
                labels[frame.label.value] += 1
        held = admission.reservations.get(index)
        found.append(
            ReservationReport(
                stream=stream.name,
                slot=None if held is None else held.slot_name,
                share=0.0 if held is None else held.demand.share_ppm / SHARE_PPM,
                slack_ms=0.0 if held is None else held.verdict.slack_ns / 1e6,
                at_ms=0.0 if held is None else held.verdict.at_ns / 1e6,
                frames=len(numbers),
                lost=lost,
                labels=labels,
                refusal=admission.refusals.get(index, ""),
            )
        )
    return tuple(found)


RESERVATION_HEADS: tuple[str, ...] = (
    "stream",
    "slot",
    "share %",
    "slack ms",
    "at ms",
    "frames",
    "lost",
    *(x.value for x in Label),
)


def reservation_rows(report: Report) -> list[tuple[str | int | float, ...]]:
    """The rows of a table of the streams with a guarantee, under ``RESERVATION_HEADS``."""
    return [
        (
            r.stream,
            r.slot or "not admitted",
            100 * r.share,
            r.slack_ms,
            r.at_ms,
            r.frames,
            r.lost,
            *r.labels.values(),
        )
        for r in report.reservations
    ]


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
    quantiles = [latencies[math.ceil(q * len(latencies)) - 1] if latencies else None for q in QUANTILES]
    return ClassReport(priority.name.lower(), sum(counts.values()), **counts, latency_ms=tuple(quantiles))


def latency_text(value: float | None) -> str:
    """A latency for people; a hyphen without one."""
    return "-" if value is None else f"{value:.2f}"


# --- The page -----------------------------------------------------------------------------------------------------------------


def page(engine: Engine) -> str:
    """The run as one HTML page: the timeline of each device, counts by priority, and latencies. The run must have been recorded."""
    report = report_of(engine)
    heads = ("priority", "requests", *OUTCOME_ROLES, "p50 ms", "p90 ms", "p99 ms", "max ms")
    classes = [
        (c.priority, c.requests, *_outcomes(c).values(), *map(latency_text, c.latency_ms))
        for c in report.classes
    ]
    roles = device_roles(device.name for device in report.devices)
    devices = [
        (swatch(roles[d.name], d.name), f"{100 * d.busy_share:.1f}", f"{d.energy_j:.3g}")
        for d in report.devices
    ]
    reasons = table(("reason", "requests"), list(report.reasons.items()))
    return document(
        f"{report.workload} under {report.policy}, seed {report.seed}",
        element(
            "p",
            f"{report.simulated_s:.3f} s simulated in {counted(report.events, 'event')}; "
            f"{100 * report.wasted_share:.2f} % of the device time went to jobs that did not end on time.",
        ),
        element("h2", "On time, by priority"),
        key([(role, outcome) for outcome, role in OUTCOME_ROLES.items()]),
        bars("Outcomes of the requests, by priority", [_outcome_bar(c) for c in report.classes]),
        table(heads, classes),
        *_reserved_part(report),
        element("h2", "Devices"),
        *_timeline(engine),
        table(("device", "busy %", "joules"), devices),
        element("h2", "Latency of the requests that ended on time"),
        element(
            "p", "From arrival to end; a line shows the share of a priority's requests that took no longer."
        ),
        key([(priority.name.lower(), priority.name.lower()) for priority in sorted(Priority, reverse=True)]),
        lines("Latency of the requests that ended on time, by priority", _latencies(engine), unit="ms"),
        element("h2", "Reasons of requests that did not end on time"),
        reasons if report.reasons else element("p", "All requests ended on time."),
        element("p", f"Record of events: {report.digest}"),
    )


def _reserved_part(report: Report) -> list[Html | None]:
    if not report.reservations:
        return []
    rows = [
        tuple(f"{cell:.2f}" if isinstance(cell, float) else cell for cell in row)
        for row in reservation_rows(report)
    ]
    refusals = [element("p", r.refusal) for r in report.reservations if r.refusal]
    return [element("h2", "Streams with a guarantee"), table(RESERVATION_HEADS, rows), *refusals]


def _outcomes(found: ClassReport) -> dict[str, int]:
    counts = (found.on_time, found.late, found.aborted, found.refused, found.failed)
    return dict(zip(OUTCOME_ROLES, counts, strict=True))


def _outcome_bar(found: ClassReport) -> Bar:
    count = found.requests
    share = f"{found.on_time} of {count} ({100 * found.on_time / count:.1f} %)" if count else "no requests"
    parts = [
        (number / max(1, count), OUTCOME_ROLES[outcome], f"{found.priority}, {outcome}: {number}")
        for outcome, number in _outcomes(found).items()
    ]
    return Bar(found.priority, share, parts)


def _timeline(engine: Engine) -> list[Html | None]:
    spans: list[tuple[int, int, int, int]] = []
    since: dict[int, tuple[int, int]] = {}
    for at_ns, kind, number, slot in engine.events:
        if kind == "start":
            since[slot] = (at_ns, number)
        elif kind in ("stop", "end", "lost") and slot in since:
            started_ns, who = since.pop(slot)
            spans.append((slot, started_ns, at_ns, who))
    shown = spans[:BARS_MAX]
    marks: list[list[Mark]] = [[] for _ in engine.slots]
    for index, started_ns, ended_ns, number in shown:
        outcome = engine.outcomes[number]
        is_on_time = outcome is not None and outcome.kind == "on_time"
        start, end = started_ns / 1e6, ended_ns / 1e6
        title = f"{number}: {start:.3f} to {end:.3f} ms{'' if is_on_time else ', not on time'}"
        stream = engine.scenario.workload.stream[engine.scenario.arrivals[number].stream_index]
        marks[index].append(Mark(start, end, stream.priority, title, not is_on_time))
    rows = []
    for row, found in zip(engine.slots, marks, strict=True):
        device = engine.scenario.devices[row.device]
        slot = sum(other.device == row.device for other in engine.slots[: row.index])
        rows.append((f"{device.name}, slot {slot + 1}" if device.slots > 1 else device.name, found))
    limited = f"The first {BARS_MAX} of {len(spans)} executions." if len(spans) > BARS_MAX else None
    entries = [(priority.name.lower(), priority.name.lower()) for priority in sorted(Priority, reverse=True)]
    end_ms = max((span[2] for span in shown), default=1) / 1e6
    return [
        element("p", limited) if limited else None,
        key(entries),
        element("p", "A flat bar is an execution that did not end on time.", class_="soft"),
        lanes("Executions on each device", rows, end_ms, unit="ms"),
    ]


def _latencies(engine: Engine) -> list[tuple[str, str, list[float]]]:
    by_priority: dict[str, list[float]] = {
        priority.name.lower(): [] for priority in sorted(Priority, reverse=True)
    }
    streams = engine.scenario.workload.stream
    for number, arrival in enumerate(engine.scenario.arrivals):
        outcome = engine.outcomes[number]
        if outcome is not None and outcome.kind == "on_time":
            by_priority[streams[arrival.stream_index].priority].append((outcome.at_ns - arrival.at_ns) / 1e6)
    return [(name, name, numbers) for name, numbers in by_priority.items()]
