"""The common part of the two benchmarks of hostile peers: how much is measured, the rows of an attack, the command line.

An attack has a row for its median, and two for its 99th percentile: against blocks without an attack, where the goal is at most
twice that, and against the control, an attack that sends nothing to anyone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from aionn.benchmarking.figures import percentile
from benchmarks.rows import Options, Report, alternate, at_most, compare, options

__all__ = [
    "CONTROL",
    "CONTROLS",
    "NICE",
    "Blocks",
    "Sizes",
    "Wrong",
    "chosen_attacks",
    "main",
    "measure",
    "percentiles_ms",
    "sizes",
]

CONTROL = "spin"
CONTROLS = {CONTROL, "own_files"}
NICE = 19
GOAL = at_most(2.0)

Sizes = tuple[int, int]
"""Rounds, and the executions of a block: 2,000 executions a side unless it has to be quick."""


def sizes(chosen: Options) -> Sizes:
    return (2, 40) if chosen.quick else (10, 200)


class Wrong(Exception):
    """A party that behaves well got a wrong answer or an error."""


class Blocks(Protocol):
    """Blocks of executions without an attack and beside attacks; each returns its 99th percentile in ms.

    Attributes:
        medians_ms: Of each block, by the name of its attack; ``alone`` without one.
    """

    medians_ms: dict[str, list[float]]

    def alone(self) -> float: ...

    def beside(self, attack: str) -> float: ...


def percentiles_ms(latencies_ns: Sequence[int]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    return percentile(latencies_ns, 0.5) / 1e6, percentile(latencies_ns, 0.99) / 1e6


def chosen_attacks(asked: Sequence[str], there_are: Sequence[str]) -> Sequence[str]:
    """Those that were asked for; all where none was."""
    attacks = [name for name in there_are if name not in CONTROLS]
    unknown = [name for name in asked if name not in attacks]
    if unknown:
        raise SystemExit(f"expected attacks of {' '.join(attacks)}, got {' '.join(unknown)}")
    return asked or attacks


def measure(
    report: Report,
    blocks: Blocks,
    attack: str,
    rounds: int,
    *,
    label: str,
    beside: str,
    control: str = CONTROL,
) -> None:
    """The rows of an attack.

    Args:
        report: Takes them.
        blocks: The measured blocks.
        attack: Its name.
        rounds: Number of rounds of the three.
        label: The name of the attack in the rows.
        beside: The name of the control in them.
        control: The control.
    """
    blocks.medians_ms.clear()
    contenders: dict[str, Callable[[], float]] = {
        "alone": blocks.alone,
        attack: lambda: blocks.beside(attack),
        control: lambda: blocks.beside(control),
    }
    p99_ms = alternate(contenders, rounds)
    p50_ms = blocks.medians_ms
    report.add(
        compare(f"{label}, p50", "ms", p50_ms[attack], "alone", p50_ms["alone"]),
        compare(f"{label}, p99", "ms", p99_ms[attack], "alone", p99_ms["alone"], GOAL),
        compare(f"{label}, p99", "ms", p99_ms[attack], beside, p99_ms[control]),
    )


def main(
    run: Callable[[Report, Options, list[str]], None], description: str | None, well_behaved: str
) -> int:
    """Runs a benchmark with what the command line asks for, and prints it.

    Args:
        run: Measures the attacks that were asked for.
        description: The module's.
        well_behaved: The party that got a wrong answer.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("attacks", metavar="ATTACK", nargs="*", help="these attacks alone")
    parser.add_argument("--driver", action="store_true", help="an application beside hostile drivers")
    mine, _ = parser.parse_known_args()
    chosen = options(description, parser)
    try:
        run(Report(chosen), chosen, mine.attacks)
    except Wrong as e:
        print(f"{well_behaved}: {e}", file=sys.stderr)
        return 1
    return 0
