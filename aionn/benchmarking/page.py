"""The report as one HTML page that needs nothing else: tables, and histograms as inline SVG.

Owns the page. Colours go with words, so that the page can be read without them; it follows the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from aionn.benchmarking.bench import BenchmarkReport, DeviceReport
from aionn.benchmarking.figures import Spread, figure_text
from aionn.benchmarking.loadgen import LOAD_HEADS, load_cells

__all__ = ["render_page"]

WIDTH, HEIGHT, LEFT, BELOW = 460, 150, 36, 22

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #667; --line: #d5d8dd; --bar: #2b6cb0; --paper: #fff; --good: #1a7f4b;
  --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa3ad; --line: #3a4048; --bar: #6ea8e0; --paper: #15181c;
  --good: #5fc28c; --bad: #f08a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto; max-width: 62rem;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } h3 { font-size: 1rem; margin: 0 0 .3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; } caption { text-align: left; color: var(--soft); }
.better { color: var(--good); } .worse, .failure { color: var(--bad); } .plots { display: flex; flex-wrap: wrap; gap: 1.5rem; }
.wide + .wide, .wide + .plots { margin-top: 1.2rem; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; } svg rect { fill: var(--bar); }
svg line { stroke: var(--line); } p.note { color: var(--soft); }
"""


def render_page(report: BenchmarkReport) -> str:
    """The whole page."""
    name = escape(report.model)
    against = (
        f"compared with {escape(report.baseline)}"
        if report.baseline
        else "without a baseline: LiteRT is not installed"
    )
    body = [
        f"<h1>{name}</h1>",
        f'<p class="note">{len(report.devices)} device(s), {against}.</p>',
        _overview(report),
    ]
    body += [_device(device) for device in report.devices]
    body.append(
        '<p class="note">A quantile is reported if at least five samples are beyond it. Histograms end at the 99th percentile; '
        "values beyond count in the last bar.</p>"
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{name}: benchmark</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _overview(report: BenchmarkReport) -> str:
    heads = ("device", "path", "p50 ms", "p90 ms", "p99 ms", "mean ms", "per s", "against the baseline")
    rows = []
    for device in report.devices:
        if device.failure is not None:
            failure = f'<td colspan="7" class="failure">{escape(device.failure)}</td>'
            rows.append(f"<tr><td>{escape(device.device)}</td>{failure}</tr>")
            continue
        for index, (path, spread) in enumerate(device.latency_ms.items()):
            cells = [
                device.device,
                path,
                *(figure_text(v, 3) for v in (spread.p50, spread.p90, spread.p99, spread.mean)),
            ]
            cells.append(figure_text(device.throughput, 1) if path == "burst" else "")
            told = device.compared or ""
            mark = f'<td class="{told}">{told}</td>' if index == 0 else "<td></td>"
            rows.append(f"<tr>{_cells(cells)}{mark}</tr>")
    return _table("Latency and throughput", heads, rows)


def _table(caption: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    """A table of rows that are HTML already."""
    head = "".join(f"<th>{text}</th>" for text in heads)
    return (
        f'<div class="wide"><table><caption>{caption}</caption><tr>{head}</tr>{"".join(rows)}</table></div>'
    )


def _cells(values: Sequence[object]) -> str:
    return "".join(f"<td>{escape(str(value))}</td>" for value in values)


def _device(device: DeviceReport) -> str:
    title = f"<h2>{escape(device.device)}</h2><p class='note'>driver version {escape(device.version)}</p>"
    if device.failure is not None:
        return title + f'<p class="failure">{escape(device.failure)}</p>'
    facts = []
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
        told = device.judged
        if told is not None:
            facts.append(("right answers against the baseline", f'<span class="{told}">{told}</span>'))
        for failure in device.evaluation.failures[:10]:
            facts.append(("beyond a limit", f'<span class="failure">{escape(failure)}</span>'))
    rows = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in facts)
    plots = "".join(_histogram(device.device, path, spread) for path, spread in device.latency_ms.items())
    tables = f'<div class="wide"><table>{rows}</table></div>{_load(device)}'
    return f'{title}{tables}<div class="plots">{plots}{_shares(device)}</div>'


def _load(device: DeviceReport) -> str:
    if not device.load:
        return ""
    rows = [f"<tr>{_cells(load_cells(report))}</tr>" for report in device.load.values()]
    return _table("LoadGen; latency counts from when a query was due", LOAD_HEADS, rows)


def _shares(device: DeviceReport) -> str:
    """A bar for each type of operation, the largest first."""
    if not device.shares:
        return ""
    shown, step, left = device.shares[:12], 18, 190
    high = step * len(shown)
    parts = []
    for index, share in enumerate(shown):
        y, width = index * step, (WIDTH - left - 60) * share.share / shown[0].share
        name = escape(f"{share.operation} x{share.count}")
        parts.append(f'<text x="{left - 6}" y="{y + 13}" text-anchor="end">{name}</text>')
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{max(width, 1):.1f}" height="{step - 6}"/>')
        parts.append(f'<text x="{left + max(width, 1) + 4:.1f}" y="{y + 13}">{share.share:.1%}</text>')
    words = escape(f"Share of each type of operation on {device.device}")
    return (
        '<figure style="margin:0"><h3>operations</h3>'
        f'<svg role="img" aria-label="{words}" viewBox="0 0 {WIDTH} {high}" width="{WIDTH}" height="{high}">{"".join(parts)}</svg>'
        "</figure>"
    )


def _histogram(device: str, path: str, spread: Spread) -> str:
    """Bars over milliseconds; the axes show least, limit and the fullest bar."""
    most = max(spread.histogram)
    step = (WIDTH - LEFT) / len(spread.histogram)
    bars = []
    for index, count in enumerate(spread.histogram):
        high = (HEIGHT - BELOW - 10) * count / most
        x, y = LEFT + index * step, HEIGHT - BELOW - high
        bars.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{step - 1:.1f}" height="{high:.1f}"/>')
    base = HEIGHT - BELOW
    words = escape(
        f"Histogram of {spread.count} latencies of {device} through {path}: mean {spread.mean:.3f} ms"
    )
    return (
        f'<figure style="margin:0"><h3>{escape(path)}</h3>'
        f'<svg role="img" aria-label="{words}" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH}" y2="{base}"/>{"".join(bars)}'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{spread.min:.3f} ms</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">{spread.limit:.3f} ms</text>'
        f'<text x="{LEFT - 4}" y="14" text-anchor="end">{most}</text></svg></figure>'
    )
