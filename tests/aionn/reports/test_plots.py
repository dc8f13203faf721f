"""Plots: round ticks, positions within the width, and titles."""

from __future__ import annotations

import itertools
import math
import random
import xml.etree.ElementTree as ElementTree

import pytest

from aionn.reports.html_page import Html
from aionn.reports.plots import (
    LETTERS_MAX,
    POINTS,
    TICKS_MAX,
    Bar,
    Mark,
    bars,
    histogram,
    lanes,
    lines,
    ticks,
)


def drawn(plot: Html) -> ElementTree.Element:
    root = ElementTree.fromstring(plot)
    (svg,) = root.findall("svg")
    assert svg.get("role") == "img" and svg.findtext("title") == svg.get("aria-label") != ""
    return svg


def share(element: ElementTree.Element, name: str) -> float:
    """A position or an extent as a share of the width."""
    text = element.attrib[name]
    assert text.endswith("%") or text == "0"
    return float(text.removesuffix("%")) / 100


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(200))
def test_ticks_are_few_round_and_within(seed: int) -> None:
    chosen = random.Random(seed)
    low = chosen.choice([0.0, 10 ** chosen.uniform(-6, 6)])
    high = low + 10 ** chosen.uniform(-3, 6) * (low or 1.0)
    marks = ticks(low, high)
    slack = 1e-6 * (high - low)
    assert 1 <= len(marks) <= TICKS_MAX + 1
    assert marks == sorted(set(marks))
    assert all(low - slack <= mark <= high + slack for mark in marks)
    steps = [b - a for a, b in itertools.pairwise(marks)]
    for step in steps:
        assert step == pytest.approx(steps[0], rel=1e-6)
        digits = step / 10 ** math.floor(math.log10(step) + 1e-9)
        assert min(abs(digits - round_) for round_ in (1, 2, 2.5, 5, 10)) < 1e-6


def test_ticks_of_no_span_are_one() -> None:
    assert ticks(3.0, 3.0) == [3.0]
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]


def test_histogram_has_a_bar_for_each_part_and_both_axes() -> None:
    svg = drawn(histogram("latencies", [1, 0, 4, 2], 0.0, 8.0, unit="ms", role="late"))
    rects = list(svg.iter("rect"))
    assert [share(rect, "x") for rect in rects] == [0.0, 0.25, 0.5, 0.75]
    heights = [float(rect.attrib["height"]) for rect in rects]
    assert heights[1] == 0 and heights[2] == 2 * heights[3] == 4 * heights[0]
    assert {rect.get("fill") for rect in rects} == {"var(--late)"}
    assert [text.text for text in svg.iter("text")] == ["0", "4", "0", "2", "4", "6", "8 ms"]


def test_histogram_of_equal_numbers_is_drawn() -> None:
    svg = drawn(histogram("all the same", [3, 0], 5.0, 5.0, unit="ms", role="late"))
    assert [text.text for text in svg.iter("text")] == ["0", "3", "5 ms"]
    drawn(histogram("nothing", [], 0.0, 0.0, unit="ms", role="late"))


def test_parts_of_a_bar_follow_one_another() -> None:
    svg = drawn(
        bars(
            "outcomes",
            [Bar("high", "3 of 4", [(0.75, "on-time", "3"), (0.0, "late", "0"), (0.25, "dropped", "1")])],
        )
    )
    found = [(share(r, "x"), share(r, "width"), r.get("fill")) for r in svg.iter("rect")]
    assert found == [(0.0, 0.75, "var(--on-time)"), (0.75, 0.25, "var(--dropped)")]
    assert [text.text for text in svg.iter("text")] == ["high", "3 of 4"]


def test_long_label_keeps_both_ends_and_its_title() -> None:
    name = "com.example.vendor.SOME_EXTENSION_OPERATION x12"
    (label, _) = drawn(bars("shares", [Bar(name, "1 %", [])])).iter("text")
    title = label.find("title")
    assert title is not None and title.text == name
    text = title.tail or ""
    assert len(text) == LETTERS_MAX and text.startswith("com.example") and text.endswith("OPERATION x12")


def test_spans_of_a_lane_are_where_they_were() -> None:
    marks = [
        Mark(0.0, 2.0, "high", "first"),
        Mark(5.0, 10.0, "low", "second", True),
        Mark(3.0, 3.0, "low", "none"),
    ]
    svg = drawn(lanes("timeline", [("cpu", marks), ("npu", [])], 10.0, unit="ms"))
    first, second, nothing = svg.iter("rect")
    assert (share(first, "x"), share(first, "width")) == (0.0, 0.2)
    assert (share(second, "x"), share(second, "width")) == (0.5, 0.5)
    assert 0 < share(nothing, "width") < 0.001, "it is seen"
    assert int(second.attrib["height"]) < int(first.attrib["height"])
    assert [title.text for title in svg.iter("title")] == ["timeline", "first", "second", "none"]


def test_line_rises_from_the_least_to_the_largest() -> None:
    numbers = [float(number) for number in range(1, 101)]
    svg = drawn(lines("latencies", [("high", "high", numbers), ("low", "low", [])], unit="ms"))
    (line,) = svg.iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) == POINTS + 1
    assert points == sorted(points, key=lambda point: (point[0], -point[1]))
    assert points[0][0] == 10.0 and points[-1] == (1000.0, 10.0)
    assert points[POINTS // 2][0] == 500.0


def test_lines_of_nothing_are_an_empty_plot() -> None:
    assert not list(drawn(lines("latencies", [("high", "high", [])], unit="ms")).iter("polyline"))
