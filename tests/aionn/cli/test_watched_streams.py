"""The live table of a stream keeps its height while its figures change, at every usual width; addresses of the page."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aionn.cli.commands import demo, stream, watch
from aionn.cli.output import print_json
from aionn.cli.watched_streams import _lines, latency_of, parsed_address, show_live, watch_address
from aionn.errors import InvalidArgument
from aionn.runtime.clock import now_ns
from aionn.testing import run as run_in_virtual_time
from aionn.watch import Collector, Finding

MS = 1_000_000


def collected(labels: tuple[str, ...], count: int, label: int, probability: float) -> Collector:
    collector = Collector("aionn demo on litert-cpu, driver process 1234    12.3 s")
    for name in ("video", "audio"):
        stream = collector.add_stream(name)
        for item in range(count):
            latency_ns = int((1 + count / 10) * MS)
            found = [Finding(labels[label], probability)]
            stream.figures.add("on_time", item * 33 * MS, item * 33 * MS + latency_ns, findings=found)
    return collector


@pytest.mark.parametrize("width", [60, 80, 120])
def test_live_table_keeps_its_height(width: int) -> None:
    heights = set()
    for count in (0, 9, 99, 600):
        for label, probability in ((0, 0.07), (1, 1.0)):
            collector = collected(("nothing", "triangle"), count, label, probability)
            lines = _lines(collector.title, collector, width)
            assert all(len(line) <= width for line in lines)
            heights.add(len(lines))
    assert len(heights) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("127.0.0.1", 8470)),
        (":0", ("127.0.0.1", 0)),
        ("9000", ("127.0.0.1", 9000)),
        ("0.0.0.0", ("0.0.0.0", 8470)),
        ("localhost:1", ("localhost", 1)),
        ("[::1]", ("[::1]", 8470)),
        ("[::1]:80", ("[::1]", 80)),
    ],
)
def test_address_of_the_page_is_parsed(text: str, expected: tuple[str, int]) -> None:
    assert parsed_address(text) == expected


@pytest.mark.parametrize("text", ["::1", "a:b", "localhost:-1", "localhost:١", "[::1", "1:2:3", "x:999999"])
def test_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--watch-at: expected HOST:PORT"):
        watch_address(True, text)


def test_page_is_served_where_it_is_asked_for() -> None:
    assert watch_address(False, None) is None
    assert watch_address(True, None) == ""
    assert watch_address(False, ":0") == ":0"


@pytest.mark.parametrize("command", ["stream", "watch", "demo"])
def test_latency_of_no_answer_is_a_hyphen_and_null(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    collector = collected(("nothing",), 0, 0, 0.5)
    streams = {name: collector.add_stream(name) for name in ("eyes", "ears")}
    latency = latency_of(streams["eyes"])
    if command == "demo":
        answers = [demo._Answers(found) for found in streams.values()]
        truth = (demo.Shapes(30.0, (), ()), demo.Digits((), ()))
        report: Any = demo.DemoReport(
            demo._video_report(answers[0], truth[0]), demo._audio_report(answers[1], truth[1]), (), "npu"
        )
        demo._print_summary(report)
        expected = "accuracy -; latency p50 -, p99 -"
    else:
        report = {
            "source": "pattern:",
            "items": 29,
            "on_time": 0,
            "late": 0,
            "dropped": 29,
            "latency_ms": latency,
        }
        report |= {"model": "m", "device": "npu", "per_second": 0.0, "realtime": "", "recognised": []}
        (stream._print if command == "stream" else watch._print)(report)
        expected = "p50 -, p99 -"
    assert expected in capsys.readouterr().out
    print_json(report)
    found = json.loads(capsys.readouterr().out)
    assert found.get("video", found)["latency_ms"] == {"p50": None, "p99": None, "max": None}


def test_stream_in_a_pipe_reports_each_minute(capsys: pytest.CaptureFixture[str]) -> None:
    collector = collected(("nothing",), 9, 0, 0.5)

    async def main() -> None:
        began_ns = now_ns()
        await show_live(collector, finished=lambda: now_ns() - began_ns > 130 * 10**9)

    run_in_virtual_time(main)
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix(f"{collector.title}, ").split()[0] for line in lines] == ["1", "60", "120"]
    assert "9 on time, 0 late, 0 dropped, p50 1.9 ms" in lines[1]
