"""`aionn bench`: what it measures, what it refuses, and the page it writes."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest

import aionn
from aionn.benchmarking.bench import BenchmarkReport, DeviceReport, Settings, benchmark
from aionn.benchmarking.figures import spread_of
from aionn.benchmarking.page import render_page
from aionn.benchmarking.paths import PATHS
from aionn.cli.main import main
from aionn.errors import DeviceUnavailable, InvalidArgument

QUICK = Settings(count=12, seconds=5.0, compilations=2, samples=3)


def small_report() -> BenchmarkReport:
    slow, fast = (
        spread_of([float(i % 7 + 5) for i in range(600)]),
        spread_of([float(i % 3 + 1) for i in range(60)]),
    )
    devices = (
        DeviceReport("litert-cpu", "1", latency_ms={"sync": fast, "burst": fast}, throughput=812.5),
        DeviceReport("reference", "1", latency_ms={"sync": slow, "burst": slow}, compared="worse"),
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
    assert len(plots) == 4
    for plot in plots:
        bars = list(ElementTree.fromstring(plot).iter("rect"))
        assert len(bars) == 32
        assert max(float(bar.attrib["height"]) for bar in bars) > 50
    assert "&lt;b&gt;odd&lt;/b&gt;" in page
    assert "<b>odd" not in page
    assert "broken &amp; gone" in page
    assert '<td class="worse">worse</td>' in page
    assert "812.5" in page
    # A page of its own: nothing is fetched.
    assert not re.search(r"https?://|<script|@import|url\(", page)


@pytest.mark.parametrize(
    "arguments", [["--count", "0"], ["--html", "/nowhere/at/all.html"], ["--seconds", "-1"]]
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
    assert page.read_text(encoding="utf-8").count("<svg") == 1
