"""Every page in a browser, on a phone and on a wide screen, light and dark: all of it can be read, and it fetches nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import aionn
from aionn.benchmarking.accuracy import Accuracy
from aionn.benchmarking.bench import BenchmarkReport, CompileTimes, DeviceReport, Settings
from aionn.benchmarking.evaluators import Evaluation
from aionn.benchmarking.figures import spread_of
from aionn.benchmarking.loadgen import LoadReport
from aionn.benchmarking.measures import OperationShare
from aionn.benchmarking.page import render_page
from aionn.conformance.suite import Counts
from aionn.conformance.vts.run import VtsFailure, VtsOutcome, VtsReport
from aionn.conformance.vts_report import html_report
from aionn.reports.html_page import document, element
from aionn.simulation.baselines import policy_named
from aionn.simulation.engine import Engine, prepare
from aionn.simulation.report import page as simulation_page
from aionn.simulation.workload import read_workload
from tests.support.browser import Browser, Window, find_browser, open_browser
from tests.support.split import SplitDevice

WIDTHS = (360, 800, 1400)
WINDOWS = [Window(width, is_dark=is_dark) for width in WIDTHS for is_dark in (False, True)]
WINDOWS_QUICK = [Window(360, is_dark=True), Window(800), Window(1400, is_dark=True)]
"""Each width, and both papers."""
PAPER = {False: [255, 255, 255], True: [20, 23, 27]}

PATH = "/very/long/path/to/something/that/has/no/blank/at/all/in/it/driver.so"
OPERATION = "com.example.vendor.SOME_EXTENSION_OPERATION"

needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium on PATH")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(params=["three windows", pytest.param("all windows", marks=pytest.mark.long)])
def windows(request: pytest.FixtureRequest) -> list[Window]:
    return WINDOWS_QUICK if request.param == "three windows" else WINDOWS


def benchmark_page() -> str:
    spread = spread_of([1.0 + (i * 7919 % 1000) / 250 for i in range(1200)])
    latencies = {"sync": spread, "async": spread, "fenced": spread, "burst": spread}
    shares = [("CONV_2D", 3, 0.61), (OPERATION, 12, 0.2), ("FULLY_CONNECTED", 1, 0.19)]
    devices = (
        DeviceReport(
            "litert-cpu",
            "LiteRT 2, XNNPACK",
            latency_ms=latencies,
            throughput=8123.4,
            compile_ms=CompileTimes(spread, spread, spread, 345678),
            memory_bytes=4_500_000,
        ),
        DeviceReport(
            "reference",
            "1",
            latency_ms=latencies,
            throughput=33.2,
            compared="worse",
            accuracy=Accuracy(20, 17, 1.2e-7, 0.003, 0.95),
            evaluation=Evaluation(
                "top-k", 900, {"top1": 0.75}, ("top-1: expected at least 0.944, got 0.75",)
            ),
            judged="worse",
            load={"server": LoadReport("server", False, True, 77, 123.4, 1.0, 2.0, 3.0, "short")},
            shares=tuple(OperationShare(*share) for share in shares),
        ),
        DeviceReport("accelerator-of-a-phone-number-698", "1", failure=f"GENERAL_FAILURE: signal 11; {PATH}"),
    )
    return render_page(BenchmarkReport("shapes_int8.tflite", Settings(), "litert-cpu", devices))


def driver_suite_page() -> str:
    failure = VtsFailure(
        "refusals/validate_request[inputs-too-many]",
        "mutation 17: operand 3 of ADD has the lifetime TEMPORARY_VARIABLE",
        "INVALID_ARGUMENT",
        f"status NONE; {PATH}",
    )
    longest = "refusals/conflict_dimensions_between_role_and_desc[tensor_quant8_asymm_signed]"
    outcomes = (
        VtsOutcome(failure.case, "failed", 0.3, "", failure),
        VtsOutcome(longest, "passed", 0.01),
        VtsOutcome("refusals/cache", "skipped", 0.0, "the driver caches nothing"),
        VtsOutcome("refusals/old", "expected_failure", 0.1, "it writes beyond its output"),
    )
    report = VtsReport(
        driver="litert-cpu",
        passed=1,
        failed=1,
        skipped=1,
        expected_failures=1,
        seconds=1.5,
        by_group={"refusals": Counts(1, 1, 1, 1)},
        failures=(failure,),
        skip_reasons={},
        outcomes=outcomes,
    )
    return html_report(report)


def check(browser: Browser, path: Path, windows: list[Window], plots: int) -> None:
    for window, page in zip(windows, browser.see(path, windows), strict=True):
        where = f"{window.width} pixels, {'dark' if window.is_dark else 'light'}"
        assert page.width <= window.width, f"{where}: the page is {page.width} wide"
        assert page.cut == [] and page.broken == [], where
        assert page.crossing == [] and page.pale == [], where
        assert page.console == [] and page.requests == [], where
        assert page.paper == PAPER[window.is_dark], where
        assert sum(marks > 0 for marks in page.plots) >= plots, where


@pytest.mark.sampled(2)
@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(("write", "plots"), [(benchmark_page, 9), (driver_suite_page, 0)])
def test_report_can_be_read(
    write: Callable[[], str], plots: int, tmp_path: Path, browser: Browser, windows: list[Window]
) -> None:
    path = tmp_path / "page.html"
    path.write_text(write(), encoding="utf-8")
    check(browser, path, windows, plots)


@pytest.mark.sampled(2)
@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(("name", "policy"), [("bursty", "edf"), ("mobile", "plan")])
def test_simulation_can_be_read(
    name: str, policy: str, tmp_path: Path, browser: Browser, windows: list[Window]
) -> None:
    workload = Path(__file__).parents[3] / "benchmarks" / "workloads" / f"{name}.toml"
    engine = Engine(
        prepare(read_workload(workload), 1, folder=workload.parent), policy_named(policy), record=True
    )
    engine.run()
    path = tmp_path / "page.html"
    path.write_text(simulation_page(engine), encoding="utf-8")
    check(browser, path, windows, 3)


@pytest.mark.slow
@needs_browser
async def test_compilation_can_be_read(
    example_data: Path, tmp_path: Path, browser: Browser, windows: list[Window]
) -> None:
    devices = [SplitDevice(index, 1) for index in range(3)]
    async with aionn.open(devices=devices, drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(example_data / "shapes_int8.tflite")
        path = tmp_path / "page.html"
        path.write_text(net.page(title="shapes_int8.tflite"), encoding="utf-8")
    check(browser, path, windows, 1)


@pytest.mark.thorough
@needs_browser
def test_faults_are_found(tmp_path: Path, browser: Browser) -> None:
    faults = element(
        "div",
        element("p", "too pale", style="color:#999"),
        element("p", "unbreakable", style="margin-left:340px;overflow-wrap:normal"),
        element("p", "brokenword", style="width:3em"),
        element(
            "svg",
            element("text", "one", x=20, y=20),
            element("text", "two", x=25, y=20),
            role="img",
            width=99,
        ),
    )
    path = tmp_path / "page.html"
    path.write_text(document("faults", faults), encoding="utf-8")
    (page,) = browser.see(path, [Window(360)])
    assert page.width > 360 and page.cut == ["unbreakable"] and page.broken == ["brokenword"]
    assert page.crossing == ["one and two"] and [text.split(":")[0] for text in page.pale] == ["too pale"]
