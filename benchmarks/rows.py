"""The common part of all benchmarks: alternating blocks, ratios with intervals, rows of figures, event loops, a quiet collector.

Method: the contenders take turns in blocks, forwards and then backwards (A B B A), so that a slow drift of the machine
falls on all alike. A block yields one number (usually its median). The value of a contender is the median of its
blocks; the ratio of two comes with a 95 % interval from resampling their blocks, and a goal counts as reached only if the worse end
of that interval meets it.

A benchmark is a module with `main()`, run as `python -m benchmarks.NAME [--json] [--quick]`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

__all__ = [
    "Goal",
    "Loop",
    "Options",
    "Report",
    "Row",
    "alternate",
    "alternating",
    "at_least",
    "at_most",
    "compare",
    "loops",
    "options",
    "quiet_collector",
    "single",
]

RESAMPLES = 1000

_T = TypeVar("_T")

Loop = Callable[[], asyncio.AbstractEventLoop]
"""Makes an event loop."""


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    json: bool
    quick: bool


def options(description: str | None, own: argparse.ArgumentParser | None = None) -> Options:
    """Parses `--json` and `--quick`; shows the first paragraph of `description` as help, and the options of a benchmark's own.

    Args:
        description: The benchmark's text.
        own: A parser without `--help`, which has parsed the benchmark's own options already.
    """
    parser = argparse.ArgumentParser(
        description=(description or "").split("\n\n")[0], parents=[own] if own is not None else []
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument(
        "--quick", action="store_true", help="fewer blocks: ends within a minute on two cores"
    )
    parsed = parser.parse_args()
    return Options(json=parsed.json, quick=parsed.quick)


@dataclass(frozen=True)
class Goal:
    """A bound on a ratio to the peer, or on the value where there is no peer."""

    bound: float
    at_most: bool

    def met(self, low: float, high: float) -> bool:
        """Whether the worse end of the interval from `low` to `high` meets the bound."""
        return high <= self.bound if self.at_most else low >= self.bound

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g}"


def at_most(bound: float) -> Goal:
    """The figure should not be larger than `bound`."""
    return Goal(bound, at_most=True)


def at_least(bound: float) -> Goal:
    """The figure should not be smaller than `bound`."""
    return Goal(bound, at_most=False)


@dataclass(frozen=True)
class Row:
    """One figure: ours, the peer's, their ratio (ours / peer's) with its 95 % interval, and the goal."""

    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    goal: Goal | None = None
    met: bool | None = None

    def as_json(self) -> str:
        """The row as one line of JSON."""
        return json.dumps(
            {
                "name": self.name,
                "value": self.value,
                "unit": self.unit,
                "peer": self.peer,
                "peer_value": self.peer_value,
                "ratio": self.ratio,
                "goal": None if self.goal is None else str(self.goal),
                "met": self.met,
            }
        )


def loops() -> dict[str, Loop]:
    """The event loops to measure on."""
    found: dict[str, Loop] = {"asyncio": asyncio.new_event_loop}
    try:
        import uvloop
    except ImportError:
        return found
    found["uvloop"] = uvloop.new_event_loop
    return found


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection in the middle of what is measured, for ours and the peers alike."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alternate(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs every contender `rounds` times, one block each, in the order A B .. B A ..

    Returns:
        The blocks' numbers by contender.
    """
    blocks: dict[str, list[float]] = {name: [] for name in contenders}
    for name in alternating(list(contenders), rounds):
        blocks[name].append(contenders[name]())
    return blocks


def alternating(contenders: Sequence[_T], rounds: int) -> Iterator[_T]:
    """Every contender `rounds` times, in the order A B .. B A .."""
    for turn in range(rounds):
        yield from contenders if turn % 2 == 0 else reversed(contenders)


def ratio_interval(ours: Sequence[float], peers: Sequence[float], seed: int = 1) -> tuple[float, float]:
    """The 95 % interval of the ratio of medians, by resampling blocks of both."""
    rng = random.Random(seed)
    ratios = sorted(
        statistics.median(rng.choices(ours, k=len(ours)))
        / statistics.median(rng.choices(peers, k=len(peers)))
        for _ in range(RESAMPLES)
    )
    return ratios[int(0.025 * RESAMPLES)], ratios[math.ceil(0.975 * RESAMPLES) - 1]


def compare(
    name: str, unit: str, ours: Sequence[float], peer: str, peers: Sequence[float], goal: Goal | None = None
) -> Row:
    """A row of ours against a peer, each given by the numbers of its blocks."""
    value, peer_value = statistics.median(ours), statistics.median(peers)
    low, high = ratio_interval(ours, peers)
    met = None if goal is None else goal.met(low, high)
    return Row(name, value, unit, peer, peer_value, value / peer_value, low, high, goal, met)


def single(name: str, unit: str, ours: Sequence[float], goal: Goal | None = None) -> Row:
    """A row without a peer; the goal is on the value itself."""
    value = statistics.median(ours)
    return Row(name, value, unit, goal=goal, met=None if goal is None else goal.met(value, value))


class Report:
    """Prints rows as they come: a table as wide as the terminal, or JSON lines."""

    def __init__(self, chosen: Options) -> None:
        self._json = chosen.json
        self._width = max(80, min(160, shutil.get_terminal_size((120, 24)).columns))
        self._started = False
        self.rows: list[Row] = []

    def add(self, *rows: Row) -> None:
        """Prints and keeps rows."""
        for row in rows:
            self.rows.append(row)
            if self._json:
                print(row.as_json(), flush=True)
            else:
                if not self._started:
                    self._line("figure", "ours", "unit", "peer's", "peer", "ratio [95 %]", "goal", "")
                    self._started = True
                self._print(row)

    def note(self, text: str) -> None:
        """Prints a remark: to standard error in JSON mode, so that the lines stay JSON."""
        print(text, file=sys.stderr if self._json else sys.stdout, flush=True)

    def _print(self, row: Row) -> None:
        ratio = ""
        if row.ratio is not None and row.low is not None and row.high is not None:
            ratio = f"{row.ratio:.3g} [{row.low:.3g}, {row.high:.3g}]"
        verdict = {None: "", True: "met", False: "NOT MET"}[row.met]
        self._line(
            row.name,
            _figure(row.value),
            row.unit,
            "" if row.peer_value is None else _figure(row.peer_value),
            row.peer or "",
            ratio,
            "" if row.goal is None else str(row.goal),
            verdict,
        )

    def _line(self, *cells: str) -> None:
        widths = [0, 9, 6, 9, 22, 22, 8, 7]
        widths[0] = max(24, self._width - sum(widths) - len(widths))
        aligned = [
            f"{cell:>{width}}" if index in (1, 3) else f"{cell:<{width}}"
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        print(" ".join(aligned).rstrip(), flush=True)


def _figure(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3e}"
