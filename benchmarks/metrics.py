"""The cost of metrics: a scrape of 1,000 series, the time for which it holds the event loop, and the same with `prometheus_client`.

Peer, in the same run: the package `prometheus_client`, which offers counters and histograms of its own, the text, and a server.
aionn does not depend on it; without it the rows have no peer.

How each figure is taken:
- Counting: one duration into a histogram, by `Durations.add`, and by `observe` of a child that was looked up beforehand, with the
  same buckets. A block is the mean of some ten thousand.
- Text: 1,000 series (histograms and counters with three labels) as bytes, from figures that were copied, and by `generate_latest`
  of a registry whose histograms have counted the same.
- Copy: the time in which the event loop copies the figures of these series, which is all that it does for a scrape.
- Scrape: from the connection to the last byte, over HTTP, while the loop ticks every 1 ms. The longest hold is the longest time
  between two ticks beyond that, in the same blocks and in blocks without a scrape.
- Import: processor time and resident memory that the package adds to a process that has imported the runtime, of which ours is a
  part. A block is a process.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aionn.observability.durations import EXPOSED_NS, Durations
from aionn.observability.exposition import Family, Sample, exposition_parts
from aionn.observability.scraping import MetricsServer, Source
from benchmarks.rows import Report, alternate, at_most, compare, options, quiet_collector, single

ROOT = Path(__file__).resolve().parents[1]

SERIES = 1000
HISTOGRAM_SERIES = len(EXPOSED_NS) + 3
"""The buckets, the infinite one, the sum and the count."""

COUNTS = 20_000
TICK_S = 0.001
SCRAPE_MS_MAX = 5.0
HAS_PEER = importlib.util.find_spec("prometheus_client") is not None

FAMILIES = {
    "aionn_execution_seconds": Family("histogram", "From the call to the result."),
    "aionn_executions_total": Family("counter", "Executions by outcome."),
}

IMPORT = """
import json, sys, time
import aionn.runtime.runtime
def kib():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4
before, began = kib(), time.process_time()
__import__(sys.argv[1])
print(json.dumps([1e3 * (time.process_time() - began), kib() - before]))
"""


def figures() -> list[tuple[dict[str, str], Durations]]:
    """Histograms with some counts, enough for half of the series; the other half are counters."""
    found = []
    for number in range(SERIES // (2 * HISTOGRAM_SERIES) + 1):
        durations = Durations()
        for index in range(200):
            durations.add(50_000 + 37_000 * index * (number + 1))
        found.append(({"device": "npu", "model": f"m{number}", "class": "high"}, durations))
    return found


class Figures:
    """The figures of a program with about 1,000 series."""

    def __init__(self) -> None:
        self._histograms = figures()
        rest = SERIES - HISTOGRAM_SERIES * len(self._histograms)
        self._counters = [
            {"device": "npu", "model": f"m{number // 7}", "class": "high", "outcome": f"o{number % 7}"}
            for number in range(rest)
        ]

    def samples(self) -> Iterator[Sample]:
        """The samples, with copies of all counts."""
        for labels, durations in self._histograms:
            yield Sample("aionn_execution_seconds", labels, durations.copy())
        for number, labels in enumerate(self._counters):
            yield Sample("aionn_executions_total", labels, number)

    def text(self, samples: list[Sample]) -> bytes:
        """Their text."""
        return "".join(exposition_parts(FAMILIES, samples)).encode()

    def registry(self) -> Any:
        """The same in the peer's registry."""
        from prometheus_client import CollectorRegistry, Counter, Histogram

        registry = CollectorRegistry()
        buckets = [bound_ns / 1e9 for bound_ns in EXPOSED_NS]
        histogram = Histogram(
            "aionn_execution_seconds", "From the call to the result.", ["device", "model", "class"],
            registry=registry, buckets=buckets,
        )  # fmt: skip
        for labels, durations in self._histograms:
            child = histogram.labels(**labels)
            for _ in range(durations.count):
                child.observe(durations.total_ns / durations.count / 1e9)
        names = ["device", "model", "class", "outcome"]
        counter = Counter("aionn_executions", "Executions by outcome.", names, registry=registry)
        for number, labels in enumerate(self._counters):
            counter.labels(**labels).inc(number)
        return registry


def mean_us(call: Callable[[], object], count: int) -> float:
    """The mean time of a call."""
    began = time.perf_counter()
    for _ in range(count):
        call()
    return 1e6 * (time.perf_counter() - began) / count


def counting_and_text(report: Report, made: Figures, rounds: int) -> None:
    """The rows of what happens in this process."""
    durations, samples = Durations(), list(made.samples())
    ours = {
        "count": lambda: mean_us(lambda: durations.add(1_234_567), COUNTS),
        "text": lambda: mean_us(lambda: made.text(samples), 3) / 1e3,
    }
    peers: dict[str, Callable[[], float]] = {}
    if HAS_PEER:
        from prometheus_client import Histogram, generate_latest

        histogram = Histogram(
            "h", "Time.", ["device"], registry=None, buckets=[bound_ns / 1e9 for bound_ns in EXPOSED_NS]
        )
        child, registry = histogram.labels(device="npu"), made.registry()
        peers = {
            "count": lambda: mean_us(lambda: child.observe(0.001234567), COUNTS),
            "text": lambda: mean_us(lambda: generate_latest(registry), 3) / 1e3,
        }
    lines = [line for line in made.text(samples).splitlines() if not line.startswith(b"#")]
    for key, name, unit in (
        ("count", "a duration counted", "us"),
        ("text", f"text of {len(lines)} series", "ms"),
    ):
        contenders = {"ours": ours[key]} | ({"peer": peers[key]} if peers else {})
        with quiet_collector():
            blocks = alternate(contenders, rounds)
        if peers:
            report.add(compare(name, unit, blocks["ours"], "prometheus_client", blocks["peer"], at_most(1.0)))
        else:
            report.add(single(name, unit, blocks["ours"]))
    with quiet_collector():
        copies = [mean_us(lambda: list(made.samples()), 3) for _ in range(rounds)]
    report.add(single(f"copy of {len(lines)} series, on the loop", "us", copies))


async def scraping(report: Report, made: Figures, rounds: int) -> None:
    """The rows of a scrape while the loop ticks."""
    loop = asyncio.get_running_loop()
    source = Source(FAMILIES, made.samples, loop.call_soon_threadsafe, lambda: True)
    server = MetricsServer("127.0.0.1:0", source)
    held_ms = 0.0

    async def tick() -> None:
        nonlocal held_ms
        while True:
            began = loop.time()
            await asyncio.sleep(TICK_S)
            held_ms = max(held_ms, 1e3 * (loop.time() - began - TICK_S))

    def scrape() -> float:
        began = time.perf_counter()
        with urllib.request.urlopen(server.url, timeout=10) as answer:
            assert len(answer.read()) > 10_000
        return 1e3 * (time.perf_counter() - began)

    ticking = asyncio.create_task(tick())
    times: list[float] = []
    held: dict[str, list[float]] = {"scraped": [], "idle": []}
    try:
        await asyncio.to_thread(scrape)
        gc.collect()
        for number in range(rounds):
            for kind in ("scraped", "idle") if number % 2 else ("idle", "scraped"):
                held_ms = 0.0
                if kind == "scraped":
                    times.append(await asyncio.to_thread(scrape))
                else:
                    await asyncio.sleep(0.02)
                await asyncio.sleep(2 * TICK_S)
                held[kind].append(held_ms)
    finally:
        ticking.cancel()
        await asyncio.to_thread(server.close)
    report.add(single("scrape over HTTP", "ms", times, at_most(SCRAPE_MS_MAX)))
    report.add(compare("longest hold of the loop", "ms", held["scraped"], "without a scrape", held["idle"]))


def imports(report: Report, rounds: int) -> None:
    """The rows of what an import adds."""

    def added(module: str, which: int) -> float:
        done = subprocess.run(
            [sys.executable, "-c", IMPORT, module], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return float(json.loads(done.stdout)[which])

    if not HAS_PEER:
        report.note("prometheus_client: left out: it is not installed")
        return
    for which, name, unit in ((0, "processor time", "ms"), (1, "memory", "KiB")):
        blocks = [added("prometheus_client", which) for _ in range(rounds)]
        report.add(single(f"import of prometheus_client, {name}", unit, blocks))


def main() -> None:
    """Runs the benchmark."""
    chosen = options(__doc__)
    report = Report(chosen)
    made = Figures()
    rounds = 6 if chosen.quick else 30
    counting_and_text(report, made, rounds)
    asyncio.run(scraping(report, made, rounds))
    imports(report, 3 if chosen.quick else 10)


if __name__ == "__main__":
    main()
