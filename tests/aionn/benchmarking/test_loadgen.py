"""MLPerf's LoadGen against slots that answer in a known way."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest

from aionn.benchmarking.loadgen import (
    SCENARIOS,
    LoadReport,
    LoadSettings,
    Scenario,
    find_largest_rate,
    run_load,
)
from aionn.errors import GeneralFailure, InvalidArgument

WATCHDOG_S = 30
QUICK = LoadSettings("server", seconds=0.2, rate_per_s=200, bound_ms=2000, samples=4)


@pytest.fixture
def loadgen() -> None:
    pytest.importorskip(
        "mlperf_loadgen", reason="MLPerf LoadGen is not installed: pip install 'aionn[loadgen]'"
    )


def scenario(name: Scenario, **changes: float) -> LoadSettings:
    return LoadSettings(
        name, **({"seconds": 0.2, "rate_per_s": 200, "bound_ms": 2000, "samples": 4} | changes)
    )  # type: ignore[arg-type]


@pytest.mark.usefixtures("loadgen")
@pytest.mark.parametrize("name", SCENARIOS)
async def test_every_scenario_is_answered_sample_by_sample(name: Scenario) -> None:
    seen: Counter[int] = Counter()

    async def answer(index: int) -> None:
        await anyio.sleep(0.001)
        seen[index] += 1

    with anyio.fail_after(WATCHDOG_S):
        report = await run_load([answer, answer], scenario(name))
    assert report.scenario == name
    assert set(seen) == {0, 1, 2, 3}
    assert report.samples_per_s > 0
    assert report.is_within_bound
    per_query = 8 if name == "multi-stream" else 1
    if name == "offline":
        assert report.queries == 1
        assert report.p99_ms is None
    else:
        assert sum(seen.values()) == report.queries * per_query
        assert report.p50_ms is not None
        assert report.p50_ms >= 1.0
        assert report.p99_ms is not None
        assert report.p99_ms >= report.p50_ms


@pytest.mark.usefixtures("loadgen")
async def test_latency_counts_from_when_a_query_was_due() -> None:
    """One slot that takes 20 ms at 200 queries per second falls behind, and cannot hide it."""

    async def slow(_: int) -> None:
        await anyio.sleep(0.02)

    with anyio.fail_after(WATCHDOG_S):
        report = await run_load([slow], scenario("server", bound_ms=30))
    assert not report.is_within_bound
    assert report.p99_ms is not None
    assert report.p99_ms > 100


@pytest.mark.usefixtures("loadgen")
async def test_failing_sample_ends_the_run_with_its_error() -> None:
    async def broken(index: int) -> None:
        raise GeneralFailure(f"sample {index} cannot be answered")

    with anyio.fail_after(WATCHDOG_S), pytest.raises(GeneralFailure, match="cannot be answered"):
        await run_load([broken], QUICK)


@pytest.mark.usefixtures("loadgen")
async def test_cancelled_run_ends_long_before_its_time() -> None:
    async def never(_: int) -> None:
        await anyio.sleep_forever()

    with anyio.fail_after(WATCHDOG_S), anyio.move_on_after(0.1) as scope:
        # Single-stream waits for each answer before it issues the next query: only draining lets it end.
        await run_load([never], scenario("single-stream", seconds=0.5))
    assert scope.cancelled_caught


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (LoadSettings("everything"), "load, scenario: expected one of single-stream"),  # type: ignore[arg-type]
        (LoadSettings("server", seconds=0), "load, seconds: expected more than 0"),
        (LoadSettings("server", rate_per_s=float("nan")), "load, rate: expected more than 0"),
        (LoadSettings("server", bound_ms=-1), "load, bound: expected more than 0"),
        (LoadSettings("server", samples=0), "load, samples: expected from 1"),
    ],
)
async def test_senseless_settings_are_refused(settings: LoadSettings, match: str) -> None:
    async def answer(_: int) -> None:
        raise AssertionError("nothing may be asked")

    with pytest.raises(InvalidArgument, match=match):
        await run_load([answer], settings)


async def test_largest_rate_is_found_by_halving() -> None:
    async def run(rate: float) -> LoadReport:
        return LoadReport("server", False, rate <= 130, 1, rate, None, None, None)

    rate, reports = await find_largest_rate(run, 10, 1000, steps=8)
    assert 125 < rate <= 130
    assert len(reports) == 9
    assert (await find_largest_rate(run, 500, 1000))[0] == 0
