"""Plots of pages as inline SVG: histograms, bars, lanes over time, and lines; pure.

Owns axes and ticks. Along x all positions are shares of the width, so that a plot fills a phone and a wide screen with text of the
same size: nothing is scaled. Every plot has a title for readers who do not see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aionn.reports.html_page import Html, element, joined

__all__ = ["Bar", "Mark", "bars", "curves", "histogram", "lanes", "lines", "ticks"]

HEIGHT = 150
"""Height of a histogram in pixels."""

LINES_HEIGHT = 240

TICKS_MAX = 5
"""Intervals of an axis of time: six labels fit the width of a phone."""

LETTERS_MAX = 34
"""Letters of a bar's label that fit beside its value on a phone; the title has all of them."""

LANE_HEIGHT, THIN_HEIGHT = 20, 7
"""Heights of the spans of a lane in pixels."""

SHARE_MIN = 0.0003
"""Least width of a span, as a share of the plot's: a third of a pixel of a wide screen."""

POINTS = 200
"""Points of a line: one for about every third pixel of a wide screen."""

_AXIS = 22
"""Room for the labels of an axis below a plot."""

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


class Bar(NamedTuple):
    """A row of ``bars``: a label, a value, and parts ``(share of the width, role, title)`` one after the other."""

    label: str
    value: str
    parts: Sequence[tuple[float, str, str]]


class Mark(NamedTuple):
    """A span of time in a lane: thin if ``is_thin``, in the colour of a role."""

    start: float
    end: float
    role: str
    title: str
    is_thin: bool = False


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most one more than ``TICKS_MAX``; for no span the number itself."""
    if not high > low:
        return [low]
    least = (high - low) / TICKS_MAX
    power = 10.0 ** math.floor(math.log10(least))
    step = next((power * s for s in _STEPS if power * s >= least * (1 - 1e-9)), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Multiplied, not added up: the tenth tick of 0.1 is 1.
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def histogram(title: str, counts: Sequence[int], low: float, high: float, *, unit: str, role: str) -> Html:
    """A bar for each of the equal parts from ``low`` to ``high``, and the axes of both."""
    most = max(counts, default=0) or 1
    base, step = HEIGHT - _AXIS, 100 / max(1, len(counts))
    shapes = [*_levels([(0, "0"), (most, f"{most:,}")], most, base), *_axis(low, high, base, unit)]
    for index, count in enumerate(counts):
        tall = (base - 10) * count / most
        shapes.append(
            element("rect", x=_at(index * step), y=f"{base - tall:.1f}", width=_at(step * 0.9), height=f"{tall:.1f}",
                    fill=f"var(--{role})")
        )  # fmt: skip
    return _drawing(title, HEIGHT, shapes)


def bars(title: str, rows: Sequence[Bar]) -> Html:
    """One row for each, below its label: parts from left to right, and the rest of the width empty."""
    shapes = []
    for index, row in enumerate(rows):
        y = 36 * index
        shapes.append(element("text", _cut(row.label), x=0, y=y + 12, class_="label"))
        shapes.append(element("text", row.value, x="100%", y=y + 12, text_anchor="end"))
        shapes.append(element("line", x1=0, y1=y + 30, x2="100%", y2=y + 30))
        left = 0.0
        for share, role, part in row.parts:
            if share > 0:
                shapes.append(_part(left, share, y + 17, 12, role, part))
                left += share
    return _drawing(title, 36 * len(rows), shapes, is_wide=True)


def lanes(title: str, rows: Sequence[tuple[str, Iterable[Mark]]], end: float, *, unit: str) -> Html:
    """Spans over time from 0 to ``end``, in a lane for each row, below its label."""
    base = 42 * len(rows)
    shapes = _axis(0.0, end, base, unit)
    for index, (label, marks) in enumerate(rows):
        y = 42 * index
        shapes.append(element("text", label, x=0, y=y + 12, class_="label"))
        for mark in marks:
            tall = THIN_HEIGHT if mark.is_thin else LANE_HEIGHT
            share = max(SHARE_MIN, (mark.end - mark.start) / end)
            shapes.append(_part(mark.start / end, share, y + 37 - tall, tall, mark.role, mark.title))
    return _drawing(title, base + _AXIS, shapes, is_wide=True)


def lines(title: str, series: Sequence[tuple[str, str, Sequence[float]]], *, unit: str) -> Html:
    """For each ``(name, role, numbers)`` the share of the numbers that are at most x, by quantile; numbers need not be sorted."""
    end = max((max(numbers) for _, _, numbers in series if numbers), default=1.0) or 1.0
    base = LINES_HEIGHT - _AXIS
    levels = [(share, f"{100 * share:g} %") for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    shapes = [*_levels(levels, 1.0, base), *_axis(0.0, end, base, unit)]
    drawn = []
    for name, role, numbers in series:
        if numbers:
            ordered = sorted(numbers)
            points = (
                (
                    ordered[max(0, math.ceil(step / POINTS * len(ordered)) - 1)] / end,
                    1 - step / POINTS,
                )
                for step in range(POINTS + 1)
            )
            text = " ".join(f"{1000 * x:.1f},{(base - 10) * y + 10:.1f}" for x, y in points)
            line = element("polyline", points=text, stroke=f"var(--{role})")
            drawn.append(element("g", element("title", name), line))
    # A drawing of its own, which is stretched to the width; its lines keep their thickness.
    inner = element(
        "svg", *drawn, width="100%", height=base, viewBox=f"0 0 1000 {base}", preserveAspectRatio="none"
    )
    return _drawing(title, LINES_HEIGHT, [*shapes, inner])


def curves(
    title: str, series: Sequence[tuple[str, str, Sequence[tuple[float, float]]]], *, unit: str
) -> Html:
    """For each ``(name, role, points)`` a line through points ``(x, y)`` from 0 on; both axes have the same unit."""
    end = max((x for _, _, points in series for x, _ in points), default=1.0) or 1.0
    most = max((y for _, _, points in series for _, y in points), default=1.0) or 1.0
    base = LINES_HEIGHT - _AXIS
    levels = [(value, f"{value:g}") for value in ticks(0.0, most)]
    shapes = [*_levels(levels, most, base), *_axis(0.0, end, base, unit)]
    drawn = []
    for name, role, points in series:
        text = " ".join(f"{1000 * x / end:.1f},{base - (base - 10) * y / most:.1f}" for x, y in points)
        line = element("polyline", points=text, stroke=f"var(--{role})")
        drawn.append(element("g", element("title", name), line))
    inner = element(
        "svg", *drawn, width="100%", height=base, viewBox=f"0 0 1000 {base}", preserveAspectRatio="none"
    )
    return _drawing(title, LINES_HEIGHT, [*shapes, inner])


def _part(left: float, share: float, y: int, height: int, role: str, title: str) -> Html:
    """A rectangle with a title of its own; ``left`` and ``share`` are shares of the width."""
    shape = element(
        "rect", x=_at(100 * left), y=y, width=_at(100 * share), height=height, fill=f"var(--{role})"
    )
    return element("g", element("title", title), shape)


def _levels(levels: Sequence[tuple[float, str]], most: float, base: int) -> list[Html]:
    """The axis along y: a line across at each level, and its label at the left."""
    shapes = []
    for level, label in levels:
        y = base - (base - 10) * level / most
        shapes.append(element("line", x1=0, y1=f"{y:.1f}", x2="100%", y2=f"{y:.1f}"))
        shapes.append(element("text", label, x=-6, y=f"{y + 4:.1f}", text_anchor="end"))
    return shapes


def _axis(low: float, high: float, base: int, unit: str) -> list[Html]:
    """The axis along x: a line at each round number, its label below, the first one with the unit."""
    shapes = [element("line", x1=0, y1=base, x2="100%", y2=base)]
    marks = ticks(low, high)
    span = (high - low) or 1.0
    for index, value in enumerate(marks):
        share = 100 * (value - low) / span
        anchor = "start" if share < 4 else "end" if share > 96 else "middle"
        shapes.append(element("line", x1=_at(share), y1=0, x2=_at(share), y2=base + 4))
        label = f"{value:g} {unit}" if index == len(marks) - 1 else f"{value:g}"
        shapes.append(element("text", label, x=_at(share), y=base + 17, text_anchor=anchor))
    return shapes


def _drawing(title: str, height: int, shapes: Sequence[Html], *, is_wide: bool = False) -> Html:
    drawing = element(
        "svg",
        element("title", title),
        joined(*shapes),
        role="img",
        aria_label=title,
        width="100%",
        height=height,
    )
    return element("div", drawing, class_="plot wide" if is_wide else "plot")


def _at(percent: float) -> str:
    return f"{percent:.3f}".rstrip("0").rstrip(".") + "%"


def _cut(text: str) -> Html:
    """The label without its middle where it is too long: names of operations differ at their ends."""
    if len(text) <= LETTERS_MAX:
        return joined(text)
    half = LETTERS_MAX // 2
    return joined(element("title", text), f"{text[: half - 1]}…{text[-half:]}")
