"""`aionn bench`: what it measures, what it refuses, and the page it writes."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import numpy as np
import pytest

import aionn
from aionn.benchmarking.bench import BenchmarkReport, DeviceReport, Settings, benchmark
from aionn.benchmarking.evaluators import Evaluation
from aionn.benchmarking.figures import judgement, spread_of
from aionn.benchmarking.loadgen import LoadReport
from aionn.benchmarking.measures import KnownData, Load, OperationShare, operation_shares
from aionn.benchmarking.page import render_page
from aionn.benchmarking.paths import PATHS
from aionn.cli.main import main
from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.models.tflite import load_tflite
from tests.support.browser import BrowserError, find_browser, see_page

QUICK = Settings(count=12, seconds=5.0, compilations=2, samples=3)


def small_report() -> BenchmarkReport:
    slow, fast = (
        spread_of([float(i % 7 + 5) for i in range(600)]),
        spread_of([float(i % 3 + 1) for i in range(60)]),
    )
    devices = (
        DeviceReport("litert-cpu", "1", latency_ms={"sync": fast, "burst": fast}, throughput=812.5),
        DeviceReport(
            "reference",
            "1",
            latency_ms={"sync": slow, "burst": slow},
            compared="worse",
            evaluation=Evaluation("top-k", 9, {"top1": 0.75}, ("top-1 is <low>",)),
            judged="worse",
            load={"server": LoadReport("server", False, True, 77, 123.4, 1.0, 2.0, 3.0, "short")},
            shares=(OperationShare("CONV_2D", 3, 0.8), OperationShare("SOFTMAX", 1, 0.2)),
        ),
        DeviceReport("<b>odd</b>", "1", failure="broken & gone"),
    )
    return BenchmarkReport("net.tflite", QUICK, "litert-cpu", devices)


async def test_reference_is_measured_on_every_path(example_data: Path) -> None:
    told: list[float] = []
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        report = await benchmark(
            runtime,
            example_data / "digits_int8.tflite",
            ["reference"],
            QUICK,
            lambda _, share: told.append(share),
        )
    (device,) = report.devices
    assert report.baseline is None
    assert device.failure is None
    assert device.accuracy is None
    assert set(device.latency_ms) == set(PATHS)
    assert all(spread.count == 12 and spread.min > 0 for spread in device.latency_ms.values())
    assert device.throughput is not None
    assert device.throughput > 0
    assert device.compile_ms is not None
    assert device.compile_ms.fresh.count == 2
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert msgspec.json.decode(msgspec.json.encode(report), type=BenchmarkReport) == report


@pytest.mark.thorough
async def test_answers_are_compared_with_litert_s(example_data: Path) -> None:
    pytest.importorskip("ai_edge_litert", reason="LiteRT is not installed")
    async with aionn.open(drivers=["litert-cpu", "reference"], isolation="in_process") as runtime:
        path = example_data / "digits_int8.tflite"
        report = await benchmark(runtime, path, ["reference", "litert-cpu"], QUICK)
    reference, litert = report.devices
    assert report.baseline == "litert-cpu"
    assert litert.accuracy is None
    assert litert.compared is None
    assert reference.accuracy is not None
    assert reference.accuracy.samples == 3
    assert reference.accuracy.largest_error < 0.05
    assert reference.compared in ("better", "same", "worse")


async def test_time_ends_a_path_before_the_count(example_data: Path) -> None:
    settings = msgspec.structs.replace(QUICK, count=1_000_000, seconds=0.05, paths=("sync",))
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        report = await benchmark(runtime, example_data / "digits_int8.tflite", ["reference"], settings)
    assert 1 <= report.devices[0].latency_ms["sync"].count < 1_000_000


async def test_unknown_device_is_refused(example_data: Path) -> None:
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        with pytest.raises((InvalidArgument, DeviceUnavailable), match="expected one of reference"):
            await benchmark(runtime, example_data / "digits_int8.tflite", ["gpu"], QUICK)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"count": 0}, "bench, count: expected from 1"),
        ({"samples": 0}, "bench, samples: expected from 1"),
        ({"compilations": 0}, "bench, compilations: expected from 1"),
        ({"seconds": 0.0}, "bench, seconds: expected more than 0"),
        ({"seconds": float("nan")}, "bench, seconds: expected more than 0"),
        ({"paths": ()}, "bench, paths: expected some of sync, async, fenced, burst, got none"),
    ],
)
def test_senseless_settings_are_refused(change: dict[str, object], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        msgspec.structs.replace(QUICK, **change).check()


def test_page_has_a_plot_per_device_and_path_and_needs_no_network() -> None:
    page = render_page(small_report())
    plots = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(plots) == 5
    for plot in plots[:4]:
        bars = list(ElementTree.fromstring(plot).iter("rect"))
        assert len(bars) == 32
        assert max(float(bar.attrib["height"]) for bar in bars) > 50
    assert "&lt;b&gt;odd&lt;/b&gt;" in page
    assert "<b>odd" not in page
    assert "broken &amp; gone" in page
    assert '<td data-head="against the baseline"><span class="bad">worse</span></td>' in page
    assert "812.5" in page
    assert "123.4" in page
    assert "top-1 is &lt;low&gt;" in page
    assert "CONV_2D x3" in plots[4]
    # A page of its own: nothing is fetched.
    assert not re.search(r"https?://|<script|@import|url\(", page)


@pytest.mark.thorough
def test_browser_shows_the_plots_and_has_nothing_to_complain_about(tmp_path: Path) -> None:
    if find_browser() is None:
        pytest.skip("no Chromium on PATH")
    path = tmp_path / "page.html"
    path.write_text(render_page(small_report()), encoding="utf-8")
    page = see_page(path)
    assert page.console == []
    assert page.requests == []
    assert page.title == "net.tflite: benchmark"
    # Buckets in which nothing fell have bars of no height; the last plot has a bar for each operation.
    assert len(page.plots) == 5
    assert min(page.plots[:4]) >= 3
    assert page.plots[4] == 2
    assert "top-1 is <low>" in page.text
    assert page.width <= 1200


@pytest.mark.thorough
def test_browser_tells_a_page_s_errors(tmp_path: Path) -> None:
    if find_browser() is None:
        pytest.skip("no Chromium on PATH")
    path = tmp_path / "page.html"
    path.write_text(
        "<title>bad</title><svg></svg><img src='missing.png'><script>console.error('spoilt'); nowhere()</script>"
    )
    page = see_page(path)
    assert page.plots == [0]
    assert any("spoilt" in line for line in page.console)
    assert any(line.startswith("exception") for line in page.console)
    assert [Path(request).name for request in page.requests] == ["missing.png"]


def test_browser_that_ends_or_says_nothing_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<p>")
    with pytest.raises(BrowserError, match=r"the browser (ended|is gone)"):
        see_page(page, browser="true")
    silent = tmp_path / "silent"
    silent.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import time; time.sleep(60)'\n")
    silent.chmod(0o700)
    with pytest.raises(BrowserError, match="no answer from the browser in time"):
        see_page(page, timeout_s=0.2, browser=str(silent))


@pytest.mark.thorough
async def test_labelled_arrays_are_judged(example_data: Path, tmp_path: Path) -> None:
    """Each clip is filed under what the model itself says of it, and then one under another class."""
    model = load_tflite(example_data / "digits_int8.tflite").model
    shape = model.main.inputs[0].dimensions
    generator = np.random.default_rng(3)
    clips = [generator.normal(-5, 4, shape).astype(np.float32) for _ in range(4)]
    data = tmp_path / "clips"
    (data / "0").mkdir(parents=True)
    for index, clip in enumerate(clips):
        np.save(data / "0" / f"{index}.npy", clip)
    settings = msgspec.structs.replace(QUICK, paths=("sync",), known=KnownData(str(data)))
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        path = example_data / "digits_int8.tflite"
        first = await benchmark(runtime, path, ["reference"], settings)
        share = first.devices[0].evaluation.values["top1"]  # type: ignore[union-attr]
        (data / "labels.txt").write_text(
            "\n".join(f"class {i}" for i in range(model.main.outputs[0].dimensions[1]))
        )
        for index in range(len(clips)):
            for label in range(11):
                folder = data / f"class {label}"
                folder.mkdir(exist_ok=True)
                np.save(folder / f"{index}.npy", clips[index])
        # Every clip is now in each class once, and in class 0 twice.
        second = await benchmark(runtime, path, ["reference"], settings)
    found = second.devices[0].evaluation
    assert found is not None
    assert found.samples == 4 * 12
    assert found.values["top1"] == pytest.approx((4 + 4 * share) / 48)
    assert found.values["top5"] >= (4 * 5) / 48


async def test_damaged_data_are_told_before_anything_is_measured(example_data: Path, tmp_path: Path) -> None:
    model = example_data / "digits_int8.tflite"
    shape = load_tflite(model).model.main.inputs[0].dimensions
    (tmp_path / "0").mkdir()
    np.save(tmp_path / "0" / "0.npy", np.zeros(shape, np.float32))
    np.save(tmp_path / "0" / "1.npy", np.zeros((2, 2), np.float32))
    steps: list[str] = []
    settings = msgspec.structs.replace(QUICK, known=KnownData(str(tmp_path)))
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        with pytest.raises(InvalidArgument, match=r"1\.npy: expected an array of shape .*, got \[2, 2\]"):
            await benchmark(runtime, model, ["reference"], settings, lambda what, _: steps.append(what))
    assert steps == []


def test_judgement_has_a_point_of_grace() -> None:
    assert judgement(0.9, 0.905, higher_is_better=True) == "same"
    assert judgement(0.9, 0.92, higher_is_better=True) == "worse"
    assert judgement(0.9, 0.92, higher_is_better=False) == "better"
    assert judgement(float("nan"), 0.5, higher_is_better=True) == "worse"


def test_shares_of_operations_add_up(example_data: Path) -> None:
    model = load_tflite(example_data / "digits_int8.tflite").model
    inputs = [np.zeros(o.dimensions, dtype=np.int8) for o in model.main.inputs]
    shares = operation_shares(model, inputs)
    assert shares is not None
    assert sum(share.share for share in shares) == pytest.approx(1.0)
    assert sum(share.count for share in shares) == len(model.main.operations)
    assert [s.share for s in shares] == sorted((s.share for s in shares), reverse=True)


async def test_scenarios_are_run_through_bursts(example_data: Path) -> None:
    pytest.importorskip(
        "mlperf_loadgen", reason="MLPerf LoadGen is not installed: pip install 'aionn[loadgen]'"
    )
    load = Load(("single-stream", "server"), seconds=0.1, rate_per_s=50.0, bound_ms=5000.0)
    settings = msgspec.structs.replace(QUICK, paths=("sync",), load=load)
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        report = await benchmark(runtime, example_data / "digits_int8.tflite", ["reference"], settings)
    found = report.devices[0].load
    assert list(found) == ["single-stream", "server"]
    assert all(load.queries >= 1 and load.samples_per_s > 0 for load in found.values())
    assert found["server"].is_within_bound


@pytest.mark.parametrize(
    "arguments",
    [
        ["--count", "0"],
        ["--html", "/nowhere/at/all.html"],
        ["--seconds", "-1"],
        ["--data", "/nowhere"],
        ["--expected-top1", "2", "--data", "."],
        ["--scenario", "server", "--rate", "-1"],
        ["--pixels", "1", "1", "--data", "."],
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    example_data: Path,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be opened")

    monkeypatch.setattr(aionn, "open", never, raising=False)
    with pytest.raises(SystemExit) as end:
        main(["bench", str(example_data / "digits_int8.tflite"), *arguments])
    assert end.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_command_prints_one_json_object_and_writes_a_page(
    example_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    model = str(example_data / "digits_int8.tflite")
    options: list[str] = ["--device", "reference", "--path", "burst", "--count", "5", "--samples", "1"]
    with pytest.raises(SystemExit) as end:
        main(["bench", model, *options, "--compilations", "1", "--html", str(page), "--json"])
    assert end.value.code == 0
    report = json.loads(capsys.readouterr().out)
    (device,) = report["devices"]
    assert device["device"] == "reference"
    assert device["latency_ms"]["burst"]["count"] == 5
    assert device["memory_bytes"] is not None
    assert page.read_text(encoding="utf-8").count("<svg") == 2  # latencies, and the share of each operation
