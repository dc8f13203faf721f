"""The live table of a stream keeps its height while its figures change, at every usual width; addresses of the page."""

from __future__ import annotations

import pytest

from aionn.cli.watched_streams import _lines, parsed_address, watch_address
from aionn.errors import InvalidArgument
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
