"""MLPerf's LoadGen against anything that answers samples: SingleStream, MultiStream, Server and Offline.

Owns the bridge between LoadGen's thread and the event loop, the settings, and the reading of LoadGen's own log. LoadGen owns the
schedule and the clock: latency counts from when a query was due, so a system that falls behind cannot hide it.

Invariants:
1. A run ends: LoadGen is given a longest duration, and once a sample failed or the run was cancelled every further one is answered
   immediately and without work, since LoadGen can only be ended by answers.
2. No number here is measured by us: LoadGen writes latencies, rates and validity.

Source: MLPerf inference rules (scenarios, percentiles, latency from the scheduled time) and the bindings of mlcommons-loadgen 6.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import anyio
import anyio.to_thread
import msgspec

from aionn.benchmarking.figures import figure_text
from aionn.errors import DeviceUnavailable, GeneralFailure, InvalidArgument

__all__ = [
    "LOAD_HEADS",
    "SCENARIOS",
    "Answer",
    "LoadReport",
    "LoadSettings",
    "Scenario",
    "find_largest_rate",
    "load_bindings",
    "load_cells",
    "run_load",
]

Scenario = Literal["single-stream", "multi-stream", "server", "offline"]
SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)
_NAMES = {
    "single-stream": "SingleStream",
    "multi-stream": "MultiStream",
    "server": "Server",
    "offline": "Offline",
}

Answer = Callable[[int], Awaitable[None]]
"""Answers the sample with that index; raises where it cannot."""

SECONDS_MAX = 3600.0
RATE_MAX = 1e6
BOUND_MS_MAX = 1e6
LONGEST = 4.0
"""A run that has not got enough queries after that many times its duration ends."""
MULTI_STREAM_SAMPLES = 8


class LoadSettings(msgspec.Struct, frozen=True):
    """The options of LoadGen.

    Attributes:
        scenario: Which one.
        seconds: Time for which queries are issued, at least.
        rate_per_s: Samples per second that are due (server), or are thought possible (all other scenarios, which make their queries
            beforehand; offline sizes its one query by it).
        bound_ms: Within which 99 % of a server's queries must be answered.
        samples: Number of different samples.
        seed: Of the schedule and of the order of samples.
    """

    scenario: Scenario
    seconds: float = 10.0
    rate_per_s: float = 100.0
    bound_ms: float = 33.0
    samples: int = 1
    seed: int = 0

    def check(self) -> None:
        """Demands settings that measure something.

        Raises:
            InvalidArgument: One of them does not.
        """
        if self.scenario not in SCENARIOS:
            raise InvalidArgument(
                f"load, scenario: expected one of {', '.join(SCENARIOS)}, got {self.scenario!r}"
            )
        for name, value, high in (
            ("seconds", self.seconds, SECONDS_MAX),
            ("rate", self.rate_per_s, RATE_MAX),
            ("bound", self.bound_ms, BOUND_MS_MAX),
        ):
            if not 0 < value <= high:
                raise InvalidArgument(
                    f"load, {name}: expected more than 0 and at most {high:g}, got {value:g}"
                )
        if not 1 <= self.samples <= 1_000_000:
            raise InvalidArgument(f"load, samples: expected from 1 to 1000000, got {self.samples}")


class LoadReport(msgspec.Struct, frozen=True):
    """The result of LoadGen.

    Attributes:
        scenario: Which one.
        is_valid: LoadGen's verdict by MLPerf's rules; a short run is seldom valid, since the rules want many queries.
        is_within_bound: A server: whether 99 % came within the bound; other scenarios: True.
        queries: Number of queries that were issued.
        samples_per_s: Answered.
        p50_ms: Latency of a query from when it was due; None for offline, where there is one query.
        p90_ms: Likewise; the figure that judges single-stream.
        p99_ms: Likewise; the figure that judges multi-stream and server.
        reason: Why it is not valid, in LoadGen's words; empty if it is.
    """

    scenario: Scenario
    is_valid: bool
    is_within_bound: bool
    queries: int
    samples_per_s: float
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    reason: str = ""


LOAD_HEADS = ("scenario", "queries", "per s", "p50 ms", "p90 ms", "p99 ms", "bound held", "valid")
"""The heads of ``load_cells``."""


def load_cells(report: LoadReport) -> tuple[object, ...]:
    """A report for people, as a row of a table under ``LOAD_HEADS``."""
    return (
        report.scenario,
        report.queries,
        figure_text(report.samples_per_s, 1),
        *(figure_text(value, 3) for value in (report.p50_ms, report.p90_ms, report.p99_ms)),
        "yes" if report.is_within_bound else "no",
        "yes" if report.is_valid else "no",
    )


def load_bindings() -> Any:
    """LoadGen's module.

    Raises:
        DeviceUnavailable: It is not installed.
    """
    try:
        import mlperf_loadgen
    except ImportError as e:
        raise DeviceUnavailable(
            f"load: needs MLPerf LoadGen, which cannot be loaded here ({e}): pip install 'aionn[loadgen]'"
        ) from e
    return mlperf_loadgen


async def run_load(answers: Sequence[Answer], settings: LoadSettings) -> LoadReport:
    """Runs a scenario.

    Args:
        answers: One for each slot that works at a time; a slot takes the next sample when it is done with one.
        settings: The settings of the test.

    Raises:
        InvalidArgument: The settings measure nothing, or there is no slot.
        DeviceUnavailable: LoadGen is not installed.
        Error: The exception of the first failing sample.
    """
    settings.check()
    if not answers:
        raise InvalidArgument("load: expected at least one slot, got none")
    bindings = load_bindings()
    run = _Run(bindings, asyncio.get_running_loop())
    ended = anyio.Event()
    with tempfile.TemporaryDirectory(prefix="aionn-loadgen-") as folder:

        async def issue() -> None:
            # Not abandoned when cancelled: LoadGen's thread ends by itself once everything is answered, see invariant 1.
            await anyio.to_thread.run_sync(_issue, bindings, run.take_query, settings, folder)
            ended.set()

        try:
            async with anyio.create_task_group() as tasks:
                for answer in answers:
                    tasks.start_soon(run.work, answer)
                tasks.start_soon(issue)
                try:
                    await ended.wait()
                finally:
                    run.end()
                tasks.cancel_scope.cancel()
        finally:
            run.close()
        if run.failure is not None:
            raise run.failure
        return _read_log(Path(folder), settings)


class _Run:
    """Samples on their way from LoadGen's thread to the slots, and back."""

    def __init__(self, bindings: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._bindings = bindings
        self._loop = loop
        # Bounded by LoadGen: it issues what is due, and the offline query is sized by the settings.
        self._put, self._waiting = anyio.create_memory_object_stream[Any](math.inf)
        self._is_over = False
        self.failure: Exception | None = None

    def take_query(self, samples: Sequence[Any]) -> None:
        """Called in LoadGen's thread."""
        self._loop.call_soon_threadsafe(self._accept, list(samples))

    def _accept(self, samples: list[Any]) -> None:
        if self._is_over:
            self._complete(samples)
        else:
            for sample in samples:
                self._put.send_nowait(sample)

    def _complete(self, samples: Sequence[Any]) -> None:
        self._bindings.QuerySamplesComplete([self._bindings.QuerySampleResponse(s.id, 0, 0) for s in samples])

    async def work(self, answer: Answer) -> None:
        """One slot."""
        while True:
            sample = await self._waiting.receive()
            try:
                await answer(sample.index)
            except Exception as e:
                self.failure = self.failure or e
                self.end()
            finally:
                self._complete([sample])

    def close(self) -> None:
        """Closes the streams, when LoadGen's thread has ended."""
        self._put.close()
        self._waiting.close()

    def end(self) -> None:
        """Answers what waits, and from now on whatever comes, without work."""
        self._is_over = True
        with contextlib.suppress(anyio.WouldBlock):
            while True:
                self._complete([self._waiting.receive_nowait()])


def _issue(
    bindings: Any, take_query: Callable[[Sequence[Any]], None], settings: LoadSettings, folder: str
) -> None:
    """LoadGen from beginning to end, in a thread of its own."""
    wanted = bindings.TestSettings()
    wanted.scenario = getattr(bindings.TestScenario, _NAMES[settings.scenario])
    wanted.mode = bindings.TestMode.PerformanceOnly
    wanted.min_duration_ms = max(1, round(settings.seconds * 1e3))
    wanted.max_duration_ms = round(settings.seconds * LONGEST * 1e3)
    wanted.min_query_count = 1
    wanted.multi_stream_samples_per_query = MULTI_STREAM_SAMPLES
    # LoadGen makes its queries beforehand, as many as would fit; a guess that is too slow would end the run early.
    wanted.single_stream_expected_latency_ns = max(1, round(1e9 / settings.rate_per_s / 4))
    wanted.multi_stream_expected_latency_ns = max(
        1, round(1e9 / settings.rate_per_s / 4) * MULTI_STREAM_SAMPLES
    )
    wanted.server_target_qps = settings.rate_per_s
    wanted.server_target_latency_ns = round(settings.bound_ms * 1e6)
    wanted.server_target_latency_percentile = 0.99
    wanted.offline_expected_qps = settings.rate_per_s
    wanted.qsl_rng_seed = wanted.sample_index_rng_seed = wanted.schedule_rng_seed = settings.seed
    log = bindings.LogSettings()
    log.log_output.outdir = folder
    log.log_output.copy_summary_to_stdout = False
    log.enable_trace = False
    system = bindings.ConstructSUT(take_query, lambda: None)
    library = bindings.ConstructQSL(settings.samples, settings.samples, lambda _: None, lambda _: None)
    try:
        bindings.StartTestWithLogSettings(system, library, wanted, log, "")
    finally:
        bindings.DestroyQSL(library)
        bindings.DestroySUT(system)


def _read_log(folder: Path, settings: LoadSettings) -> LoadReport:
    values: dict[str, Any] = {}
    for line in (folder / "mlperf_log_detail.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(":::MLLOG "):
            entry = json.loads(line.removeprefix(":::MLLOG "))
            values[entry["key"]] = entry["value"]
    if "result_validity" not in values:
        raise GeneralFailure(
            f"load: LoadGen reported no result: {values.get('error_runtime', 'no reason in its log')}"
        )

    def ms(name: str) -> float | None:
        value = values.get(name)
        return None if value is None or settings.scenario == "offline" else value / 1e6

    prefix = (
        "result_{}_percentile_per_query_latency_ns"
        if settings.scenario == "multi-stream"
        else ("result_{}_percentile_latency_ns")
    )
    rates = {
        "single-stream": "result_qps_without_loadgen_overhead",
        "multi-stream": "",
        "server": "result_completed_samples_per_sec",
        "offline": "result_samples_per_second",
    }
    p50, p90, p99 = (ms(prefix.format(share)) for share in ("50.00", "90.00", "99.00"))
    rate = values.get(rates[settings.scenario])
    if rate is None:
        mean_ns = values.get("result_mean_query_latency_ns") or values.get("result_mean_latency_ns") or 0
        rate = MULTI_STREAM_SAMPLES * 1e9 / mean_ns if mean_ns else 0.0
    is_valid = values["result_validity"] == "VALID"
    reasons = [str(values.get(name, "")) for name in ("result_invalid_reason", "early_stopping_result")]
    return LoadReport(
        scenario=settings.scenario,
        is_valid=is_valid,
        is_within_bound=settings.scenario != "server" or (p99 is not None and p99 <= settings.bound_ms),
        queries=int(values.get("result_query_count", values.get("generated_query_count", 0))),
        samples_per_s=float(rate),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        reason="" if is_valid else " ".join(" ".join(text.split()) for text in reasons if text),
    )


async def find_largest_rate(
    run: Callable[[float], Awaitable[LoadReport]], low_per_s: float, high_per_s: float, steps: int = 6
) -> tuple[float, list[LoadReport]]:
    """The largest rate of a server whose run stays within its bound, by halving the logarithmic distance.

    Args:
        run: One run at a rate.
        low_per_s: Where to begin; if not even this holds, 0 is the answer.
        high_per_s: A rate that is not exceeded.
        steps: Number of runs after the first; each halves what is unknown.

    Returns:
        The rate in samples per second, 0 for none, and all runs in their order.
    """
    if not 0 < low_per_s < high_per_s or steps < 1:
        raise InvalidArgument(
            f"load: expected 0 < low < high and a step, got {low_per_s}, {high_per_s}, {steps}"
        )
    reports = [await run(low_per_s)]
    if not reports[0].is_within_bound:
        return 0.0, reports
    for _ in range(steps):
        middle = (low_per_s * high_per_s) ** 0.5
        reports.append(await run(middle))
        if reports[-1].is_within_bound:
            low_per_s = middle
        else:
            high_per_s = middle
    return low_per_s, reports
