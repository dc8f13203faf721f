"""Plans for fleets of 100, 300 and 1,000 nodes with ten streams each: the time of a decision, its growth, and lost frames.

Streams ask for places one after the other, one node in twenty dies, and its streams are admitted elsewhere or rejected; then every
frame runs in virtual time, over links with jitter and in the slots of its node, under the application's policy. Decisions are timed
in processor time. The growth is the time of all decisions of a fleet over that of the smallest, as a ratio to n log n.
"""

from __future__ import annotations

import math
import time

from aionn.simulation.fleet import FleetRun, draw_fleet
from benchmarks.rows import Report, at_most, options, quiet_collector, single

SIZES = (100, 300, 1000)
QUICK_SIZES = (30, 100)
STREAMS_PER_NODE = 10
SPAN_NS = 1_000_000_000
NODES_PER_DEATH = 20
SEED = 1


def main() -> None:
    """Runs the benchmark."""
    chosen = options(__doc__)
    report = Report(chosen)
    sizes = QUICK_SIZES if chosen.quick else SIZES
    totals: dict[int, float] = {}
    for size in sizes:
        fleet = draw_fleet(size, size * STREAMS_PER_NODE, SEED)
        run = FleetRun(
            fleet, span_ns=SPAN_NS, seed=SEED, deaths=size // NODES_PER_DEATH, timer=time.thread_time_ns
        )
        with quiet_collector():
            run.run_plan()
        start = time.process_time()
        run.run_frames()
        frames_s = time.process_time() - start
        taken = sorted(run.decisions_ns)
        totals[size] = sum(taken) / 1e9
        placed = len(run.plan.places)
        report.note(
            f"{size} nodes: {len(taken)} decisions, p50 {taken[len(taken) // 2] / 1e6:.2f} ms, {placed} streams placed,"
            f" {run.moved} moved, at most {run.tests_max} nodes tested; {run.outcomes['on_time']} frames on time,"
            f" {run.outcomes['withdrawn']} withdrawn, {frames_s:.1f} s for all frames"
        )
        report.add(
            single(f"{size} nodes, decision, p99", "ms", [taken[int(0.99 * len(taken))] / 1e6], at_most(10))
        )
        report.add(
            single(f"{size} nodes, admitted frames lost", "frames", [run.outcomes["lost"]], at_most(0))
        )
        report.add(
            single(f"{size} nodes, frames not counted as reserved", "frames", [run.labelled], at_most(0))
        )
        if size != sizes[0]:
            first = sizes[0]
            growth = totals[size] / totals[first]
            allowed = size * math.log(size) / (first * math.log(first))
            report.note(
                f"{size} nodes: {growth:.2f} times the time of {first}, n log n is {allowed:.2f} times"
            )
            report.add(single(f"{size} nodes, growth over n log n", "ratio", [growth / allowed], at_most(1)))


if __name__ == "__main__":
    main()
