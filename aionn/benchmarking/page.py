"""The report as one HTML page that needs nothing else: tables, and histograms as inline SVG.

Owns what the page shows; ``aionn.reports`` has the frame, the style and the plots. Colours go with words, so that the page can be
read without them.
"""

from __future__ import annotations

from aionn.benchmarking.bench import BenchmarkReport, DeviceReport
from aionn.benchmarking.figures import Spread, figure_text
from aionn.benchmarking.loadgen import LOAD_HEADS, load_cells
from aionn.reports.colours import device_roles
from aionn.reports.columns import counted
from aionn.reports.html_page import Html, document, element, joined, marked, swatch, table
from aionn.reports.plots import Bar, bars, histogram

__all__ = ["render_page"]

SHARES_SHOWN = 12
"""Types of operations that are drawn, the largest first: all others together are a few percent."""

FAILURES_SHOWN = 10

_KINDS = {"better": "good", "same": "soft", "worse": "bad"}
"""The colour of each verdict."""


def render_page(report: BenchmarkReport) -> str:
    """The whole page."""
    against = (
        f"compared with {report.baseline}"
        if report.baseline
        else "without a baseline: LiteRT is not installed"
    )
    roles = device_roles(device.device for device in report.devices)
    return document(
        report.model,
        element("p", f"{counted(len(report.devices), 'device')}, {against}.", class_="soft"),
        _overview(report, roles),
        *(_device(device, roles[device.device]) for device in report.devices),
        element(
            "p",
            "A quantile is reported if at least five samples are beyond it. Histograms end at the 99th percentile; "
            "values beyond count in the last bar.",
            class_="soft",
        ),
        title=f"{report.model}: benchmark",
    )


def _overview(report: BenchmarkReport, roles: dict[str, str]) -> Html:
    heads = ("device", "path", "p50 ms", "p90 ms", "p99 ms", "mean ms", "per s", "against the baseline")
    rows: list[tuple[object, ...]] = []
    for device in report.devices:
        name = swatch(roles[device.device], device.device)
        if device.failure is not None:
            rows.append((name, marked(device.failure, "bad")))
            continue
        for index, (path, spread) in enumerate(device.latency_ms.items()):
            figures = (figure_text(v, 3) for v in (spread.p50, spread.p90, spread.p99, spread.mean))
            rate = figure_text(device.throughput, 1) if path == "burst" else ""
            rows.append((name, path, *figures, rate, _verdict(device.compared) if index == 0 else ""))
    return table(heads, rows, caption="Latency and throughput")


def _verdict(verdict: str | None) -> object:
    return "" if verdict is None else marked(verdict, _KINDS.get(verdict, "soft"))


def _device(device: DeviceReport, role: str) -> Html:
    head = joined(
        element("h2", swatch(role, device.device)),
        element("p", f"driver version {device.version}", class_="soft"),
    )
    if device.failure is not None:
        return joined(head, element("p", marked(device.failure, "bad")))
    caption = "LoadGen; latency counts from when a query was due"
    load = table(LOAD_HEADS, [load_cells(found) for found in device.load.values()], caption=caption)
    plots = [_histogram(device.device, path, spread, role) for path, spread in device.latency_ms.items()]
    return joined(
        head,
        table((), _facts(device)),
        load if device.load else None,
        element("div", *plots, _shares(device, role), class_="plots"),
    )


def _facts(device: DeviceReport) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = []
    compiled = device.compile_ms
    if compiled is not None:
        facts.append(("compilation", f"{compiled.fresh.mean:.1f} ms"))
        if compiled.saving is not None and compiled.loading is not None:
            facts.append(("compilation with saving", f"{compiled.saving.mean:.1f} ms"))
            facts.append(("compilation from cache", f"{compiled.loading.mean:.1f} ms"))
            facts.append(("cache files", f"{(compiled.cache_bytes or 0) / 1e6:.2f} MB"))
    if device.memory_bytes is not None:
        facts.append(("driver process grew by", f"{device.memory_bytes / 1e6:.1f} MB"))
    if device.accuracy is not None:
        a = device.accuracy
        facts.append(("answers the same, byte for byte", f"{a.identical} of {a.samples}"))
        facts.append(("mean square error", f"{a.mean_square_error:.3g}"))
        facts.append(("largest error", f"{a.largest_error:.3g}"))
        if a.top1_agreement is not None:
            facts.append(("same largest output", f"{a.top1_agreement:.1%}"))
    if device.evaluation is not None:
        for name, value in device.evaluation.values.items():
            facts.append((f"right answers: {name}", f"{value:.4g}"))
        if device.judged is not None:
            facts.append(("right answers against the baseline", _verdict(device.judged)))
        for failure in device.evaluation.failures[:FAILURES_SHOWN]:
            facts.append(("beyond a limit", marked(failure, "bad")))
    return facts


def _shares(device: DeviceReport, role: str) -> Html | None:
    """A bar for each type of operation, the largest first; the largest one is as wide as the plot."""
    if not device.shares:
        return None
    shown = device.shares[:SHARES_SHOWN]
    rows = [
        Bar(
            f"{s.operation} x{s.count}",
            f"{s.share:.1%}",
            [(s.share / (shown[0].share or 1.0), role, f"{s.operation}: {s.share:.1%}")],
        )
        for s in shown
    ]
    title = f"Share of each type of operation on {device.device}"
    return element("figure", element("h3", "operations"), bars(title, rows))


def _histogram(device: str, path: str, spread: Spread, role: str) -> Html:
    title = f"Histogram of {spread.count} latencies of {device} through {path}: mean {spread.mean:.3f} ms"
    ends = f"{counted(spread.count, 'execution')}, {spread.min:.3f} ms to {spread.limit:.3f} ms"
    return element(
        "figure",
        element("h3", path),
        histogram(title, spread.histogram, spread.min, spread.limit, unit="ms", role=role),
        element("figcaption", ends),
    )
