"""Histograms, the figures of a stream, a collector's snapshot and its forms for notebooks and metrics; no clock runs."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from aionn.errors import InvalidArgument
from aionn.media import Frame, Health, LiveStatistics, SourceStatistics
from aionn.watch import Collector, Finding, metrics_text
from aionn.watch.collector import STREAMS_MAX, Snapshot
from aionn.watch.figures import FINDINGS_MAX, LABELS_MAX, WINDOW_S, StreamFigures
from aionn.watch.histogram import Histogram, Quantiles, Recent

MS, S = 1_000_000, 1_000_000_000


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_those_of_the_numbers_within_one_per_cent(seed: int) -> None:
    rng = random.Random(seed)
    numbers = [int(rng.lognormvariate(15, 2)) + 1 for _ in range(2000)]
    histogram = Histogram()
    for number in numbers:
        histogram.add(number)
    found = histogram.quantiles()
    ordered = sorted(numbers)
    for value, share in ((found.p50, 0.5), (found.p99, 0.99)):
        assert value == pytest.approx(ordered[int(share * len(ordered)) - 1] / MS, rel=0.01, abs=0.001)
    assert found.max == pytest.approx(ordered[-1] / MS, abs=0.001)


def test_histogram_takes_any_number_and_stays_bounded() -> None:
    histogram = Histogram()
    for number in (-5, 0, 1, 1 << 80, *range(1, 200_000, 7)):
        histogram.add(number)
    assert len(histogram._counts) < 4_400
    found = histogram.quantiles()
    assert found.p50 is not None and found.p99 is not None and found.p50 <= found.p99


def test_histogram_without_a_sample_has_no_quantiles() -> None:
    assert Histogram().quantiles() == Quantiles(None, None, None)


def test_recent_forgets_what_is_older_than_two_periods() -> None:
    recent = Recent(S)
    recent.add(5 * MS, 10 * S)
    assert recent.quantiles(10 * S + S // 2).max == 5.0
    recent.add(1 * MS, 11 * S + S // 2)
    assert recent.quantiles(11 * S + S // 2).max == 5.0, "the older half still counts"
    assert recent.quantiles(12 * S + S // 2).max == 1.0
    assert recent.quantiles(20 * S).max is None


def test_figures_count_each_item_once_and_in_its_second() -> None:
    figures = StreamFigures("video", within_ns=33 * MS)
    for second, status in ((1, "on_time"), (1, "on_time"), (2, "late"), (4, "dropped"), (4, "lost")):
        figures.add(status, second * S, second * S + 5 * MS)  # type: ignore[arg-type]
    seen = figures.snapshot(5 * S)
    assert (seen.on_time, seen.late, seen.dropped, seen.lost) == (2, 1, 1, 1)
    assert [(s.ago_s, s.on_time, s.late, s.dropped) for s in seen.seconds] == [
        (4, 2, 0, 0),
        (3, 0, 1, 0),
        (1, 0, 0, 2),
    ]
    assert seen.seconds[-1].p50 is None and seen.seconds[0].p50 == pytest.approx(5, rel=0.01)
    assert seen.within_ms == 33 and seen.status == "lost" and seen.age_ms == 1000


def test_figures_have_stages_only_where_they_are_measured() -> None:
    figures = StreamFigures("video")
    figures.add("on_time", 0, 10 * MS)
    assert figures.snapshot(S).stages == {}
    figures.add("on_time", S, S + 10 * MS, placed_ns=S + 2 * MS, device_ns=5 * MS)
    stages = figures.snapshot(S + 20 * MS).stages
    assert {name: quantiles.p50 for name, quantiles in stages.items()} == {
        "wait": pytest.approx(2, rel=0.01),
        "device": pytest.approx(5, rel=0.01),
        "rest": pytest.approx(3, rel=0.01),
    }


def test_figures_stay_bounded_however_long_a_stream_runs() -> None:
    figures = StreamFigures("video")
    many = [Finding(f"class {i}", 0.5) for i in range(2 * FINDINGS_MAX)]
    for item in range(LABELS_MAX + 200):
        figures.add("on_time", item * S, item * S + MS, findings=[Finding(f"label {item}", 1.0), *many])
    assert len(figures.labels) == LABELS_MAX
    assert len(figures.findings) == FINDINGS_MAX
    seen = figures.snapshot((LABELS_MAX + 200) * S)
    assert len(seen.seconds) < WINDOW_S
    assert len(msgspec.json.encode(seen)) < 20_000


def test_rate_counts_the_intervals_between_captures() -> None:
    figures = StreamFigures("video")
    assert figures.per_second == 0
    for item in range(31):
        figures.add("on_time", item * S // 30, item * S // 30 + MS)
    assert figures.per_second == pytest.approx(30)


class _Camera:
    """A live source's counts and health."""

    def statistics(self) -> SourceStatistics:
        return LiveStatistics(
            presented=10,
            delivered=7,
            dropped=2,
            queued=1,
            held_back=0,
            late=0,
            lost=3,
            corrupt=1,
            reconnections=4,
        )

    def health(self) -> Health:
        return Health("waiting", 2 * S, 'unplugged "here"\n<b>', 1, 4)


def collected() -> tuple[Collector, Any]:
    collector = Collector("a title")
    stream = collector.add_stream('a "camera"', within_ns=33 * MS, source=_Camera())
    frame = Frame(np.zeros((4, 4, 3), np.uint8), S, 0, 0.0)
    stream.add_item(frame, "on_time", S + 5 * MS, [Finding("<i>cat</i>", 0.9)])
    return collector, stream


def test_snapshot_has_the_source_with_its_health() -> None:
    source = collected()[0].snapshot(5 * S).streams[0].source
    assert source is not None
    assert (source.state, source.since_s, source.lost, source.dropped, source.reconnections) == (
        "waiting",
        3.0,
        3,
        2,
        4,
    )


def test_snapshot_survives_json() -> None:
    seen = collected()[0].snapshot(5 * S)
    assert msgspec.json.decode(msgspec.json.encode(seen), type=Snapshot) == seen


def test_snapshot_escapes_names_in_a_notebook() -> None:
    html = collected()[0].snapshot(5 * S)._repr_html_()
    assert "&lt;i&gt;cat&lt;/i&gt; 90%" in html and "<i>cat" not in html


def test_metrics_have_one_type_for_each_name_and_escape_labels() -> None:
    text = metrics_text(collected()[0].snapshot(5 * S))
    lines = text.splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert 'aionn_stream_items_total{stream="a \\"camera\\"",number="0",outcome="on_time"} 1' in lines
    assert 'aionn_source_live{stream="a \\"camera\\"",number="0"} 0' in lines
    assert all(line.startswith(("# ", "aionn_")) for line in lines) and text.endswith("\n")


def test_picture_is_given_once_and_only_when_it_is_asked_for() -> None:
    _, stream = collected()
    frame = Frame(np.full((1300, 700, 3), 7, np.uint8), 9 * S, 5, 0.0)
    got: list[Any] = []
    stream.add_item(frame, "late", 9 * S + MS)
    stream.request_picture(lambda pixels, shot: got.append((pixels.shape, shot)))
    for _ in range(3):
        stream.add_item(frame, "late", 9 * S + MS)
    ((shape, shot),) = got
    assert shape == (434, 234, 3), "every third pixel"
    assert (shot.index, shot.status, shot.captured_ns, shot.latency_ms) == (5, "late", 9 * S, 1.0)


def test_items_without_pixels_have_no_picture() -> None:
    collector = Collector()
    stream = collector.add_stream("sound")

    class Item:
        captured_at_ns = S
        data = np.zeros((4, 4), np.uint8)

    stream.request_picture(lambda pixels, shot: pytest.fail("it has none"))
    stream.add_item(Item(), "on_time", S)
    assert not collector.snapshot(S).streams[0].has_pictures


def test_collector_refuses_more_streams_than_a_page_can_show() -> None:
    collector = Collector()
    streams = [collector.add_stream("x" * 1000) for _ in range(STREAMS_MAX)]
    with pytest.raises(InvalidArgument, match=f"at most {STREAMS_MAX}"):
        collector.add_stream("y")
    collector.remove_stream(streams[0])
    collector.add_stream("y")
    assert max(len(stream.name) for stream in streams) < 200


def test_numbers_that_json_lacks_do_not_reach_the_page() -> None:
    collector = Collector()
    stream = collector.add_stream("camera")
    shots: list[Any] = []
    stream.request_picture(lambda pixels, shot: shots.append(shot))
    nan, one = np.float32("nan"), np.float32(1)
    found: list[Any] = [
        Finding("a", nan, (one, nan, one, one)),  # type: ignore[arg-type]
        Finding("b" * 500, one, (np.float64(0.5),) * 4),  # type: ignore[arg-type]
        Finding("c", np.inf),
    ]
    frame = Frame(np.zeros((4, 4, 3), np.uint8), np.int64(S), np.int64(3), 0.0)  # type: ignore[arg-type]
    stream.add_item(frame, "on_time", S + MS, found)
    seen = msgspec.json.decode(
        msgspec.json.encode((collector.snapshot(2 * S), shots[0])), type=tuple[Snapshot, Any]
    )
    plain = (Finding("a", 0.0), Finding("b" * 80, 1.0, (0.5,) * 4), Finding("c", 0.0))
    assert seen[0].streams[0].findings == shots[0].findings == plain


def test_figures_of_a_file_whose_name_is_not_text_can_be_sent() -> None:
    collector = Collector("aionn watch replay:we\udcffird")
    collector.add_stream("we\udcffird" * 100)
    sent = msgspec.json.decode(msgspec.json.encode(collector.snapshot()))
    assert sent["title"] == "aionn watch replay:we\\udcffird"
