"""Deadlines while other programs are busy: the demo's two streams on litert-cpu, with and without real-time scheduling.

Each contender is a process of its own that runs the shapes model on 30 frames a second (HIGH) and the digits model on 10 windows
a second (MEDIUM), beside a load: nothing, four busy loops, or ``stress-ng --cpu 8 --io 2 --vm 2 --vm-bytes 1G`` (without stress-ng:
eight busy loops, two programs that write and wait for the disk, two that map and touch memory), or a program that takes memory
until the kernel reclaims pages. Contenders: aionn without and with ``realtime="if_permitted"``, and with it but
without any privilege, so that its ordinary threads have short slices and nothing more; the same models by LiteRT's
interpreters, each in a worker thread that asyncio awaits, without and with SCHED_RR set by hand on that thread and on the event
loop's; and, where it is installed, OpenVINO's AsyncInferQueue. "limit" is a thread under SCHED_RR that only sleeps until each frame
is due: no contender can be earlier than the kernel wakes it.

How each figure is taken:
- All contenders execute the same arrays, which are in memory: no camera and no decoder.
- Latency counts from the time at which a frame is due by a fixed schedule to its result in the event loop, so that a late wake of
  the event loop counts. Its timers have a grain of a millisecond.
- "on time": the share of HIGH frames whose latency is at most 10 ms. "aged": the number whose latency exceeds a period (33 ms).
- Contenders take turns in blocks (A B B A); a figure is over all frames of all blocks. A quantile that has fewer than five frames
  beyond it is left out.
- "LOW flood": two LOW executions of the shapes model are always under way, on the device of the streams or on another one, which is
  a process of its own.
- "round trip": executions of the digits model through a burst, each 5 ms after the one before.

The rows of a contender are printed after its last block. ``--load NAME`` measures beside one load alone, and idle before it; it may
be repeated.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.busy.contenders import PRIORITY
from benchmarks.busy.loads import LOADS, beside, has_stress_ng
from benchmarks.rows import Options, Report, Row, alternating, at_least, at_most, options, single

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_MS = 10.0
PERIOD_MS = 1e3 / 30
BLOCK_S, BLOCK_S_QUICK = 15.0, 5.0
ROUNDS, ROUNDS_QUICK = 4, 2
ON_TIME_MIN = 0.9999
RECLAIM_ON_TIME_MIN = FLOODED_ON_TIME_MIN = 0.999
P99_RATIO_MAX, P999_RATIO_MAX, ROUND_TRIP_RATIO_MAX = 1.2, 2.0, 1.5
BEYOND_MIN = 5
PR_CAPBSET_DROP = 24
CAPABILITIES = 64
"""All capabilities; the kernel rejects the numbers that it does not know."""

_libc = ctypes.CDLL(None)
BLOCK_S_MAX = 120.0
"""Longest wait for one block beside a load, its start included."""

UNPRIVILEGED = "aionn, no privilege"
STREAMS = ("aionn", "aionn real time", UNPRIVILEGED, "LiteRT thread", "LiteRT thread, SCHED_RR")
OPENVINO = ("OpenVINO AsyncInferQueue",)
LIMIT = "limit: timer, SCHED_RR"
BY_HAND = "SCHED_RR"
"""In the names of contenders that set the class of their threads themselves: they are left out where that is not permitted."""
FLOODS = (
    "aionn, LOW flood",
    "aionn real time, LOW flood",
    "aionn real time, LOW flood on another device",
)
ROUND_TRIPS = ("round trip", "round trip real time")
OURS = "aionn real time"


def _drop_privileges() -> None:
    """Leaves the program that this process executes next no capabilities, and no limits that permit more than the default."""
    for capability in range(CAPABILITIES):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    for kind in (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE):
        resource.setrlimit(kind, (0, 0))


def run_block(contender: str, seconds: float) -> dict[str, list[float]]:
    """The measurements of one contender in one block."""
    command = [sys.executable, "-m", "benchmarks.busy.contenders", contender, str(seconds)]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=BLOCK_S_MAX,
        preexec_fn=_drop_privileges if contender == UNPRIVILEGED else None,
    )
    found: dict[str, list[float]] = json.loads(ended.stdout)
    return found


def quantile(values: list[float], share: float) -> float | None:
    """A quantile, None if fewer than ``BEYOND_MIN`` values are beyond it."""
    ordered = sorted(values)
    place = int(share * len(ordered))
    return ordered[place] if len(ordered) - place > BEYOND_MIN else None


def permits_real_time() -> bool:
    """Whether this process may set SCHED_RR for a thread of its own; asked in one that ends with the question."""
    asked: list[bool] = []

    def ask() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
            asked.append(True)
        except PermissionError:
            asked.append(False)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return asked[0]


Found = dict[str, list[float]]
"""The measurements of one contender, by kind."""


def measure(chosen: Options, load: str) -> Iterator[tuple[str, Found]]:
    """The name of each contender and its frames of all blocks, beside one load, as soon as it has had its last block.

    Raises:
        ChildProcessError: A program of the load ended by itself.
    """
    seconds, rounds = (BLOCK_S_QUICK, ROUNDS_QUICK) if chosen.quick else (BLOCK_S, ROUNDS)
    others = OPENVINO if importlib.util.find_spec("openvino") else ()
    names = [*STREAMS, *others, LIMIT, *(FLOODS if load == "four busy loops" else ()), *ROUND_TRIPS]
    if not permits_real_time():
        names = [name for name in names if BY_HAND not in name]
    found: dict[str, Found] = {name: {"frames": [], "windows": [], "low": []} for name in names}
    turns = list(alternating(names, rounds))
    left = Counter(turns)
    with beside(load) as check:
        for name in turns:
            block = run_block(name, seconds)
            check()
            found[name]["frames"] += block["frames_ms"]
            found[name]["windows"] += block["windows_ms"]
            found[name]["low"].append(float(block["low_count"]) / seconds)  # type: ignore[arg-type]
            left[name] -= 1
            if not left[name]:
                yield name, found[name]


def rows_of(load: str, name: str, frames: list[float], idle: list[float]) -> list[Row]:
    """The figures of one contender beside one load."""
    is_ours, is_loaded = name.startswith(OURS), load != "idle"
    share = sum(each <= DEADLINE_MS for each in frames) / len(frames)
    least = (
        FLOODED_ON_TIME_MIN if "flood" in name else RECLAIM_ON_TIME_MIN if load == "reclaim" else ON_TIME_MIN
    )
    rows = [
        single(f"{load}: {name}, on time", "", [share], at_least(least) if is_ours and is_loaded else None)
    ]
    for label, at, ratio_max in (
        ("p50", 0.5, None),
        ("p99", 0.99, P99_RATIO_MAX),
        ("p99.9", 0.999, P999_RATIO_MAX),
    ):
        value, before = quantile(frames, at), quantile(idle, at)
        if value is None:
            continue
        goal = at_most(ratio_max) if ratio_max and name == OURS and is_loaded else None
        if is_loaded and before:
            ratio = value / before
            met = None if goal is None else goal.met(ratio, ratio)
            rows.append(
                Row(f"{load}: {name}, {label}", value, "ms", "idle", before, ratio, ratio, ratio, goal, met)
            )
        else:
            rows.append(single(f"{load}: {name}, {label}", "ms", [value]))
    rows.append(single(f"{load}: {name}, worst", "ms", [max(frames)]))
    rows.append(single(f"{load}: {name}, aged", "", [sum(each > PERIOD_MS for each in frames)]))
    return rows


def unprivileged_row(load: str, found: dict[str, Found]) -> Row:
    """aionn without any privilege against the best contender that uses none."""

    def on_time(name: str) -> float:
        frames = found[name]["frames"]
        return sum(each <= DEADLINE_MS for each in frames) / len(frames)

    peer = max((name for name in ("LiteRT thread", *OPENVINO) if name in found), key=on_time)
    ours, best = on_time(UNPRIVILEGED), on_time(peer)
    ratio, goal = ours / best if best else 1.0, at_least(1.0)
    name = f"{load}: {UNPRIVILEGED}, on time, against the best"
    return Row(name, ours, "", peer, best, ratio, ratio, ratio, goal, goal.met(ratio, ratio))


def round_trip_row(load: str, name: str, trips: list[float], idle: list[float]) -> Row:
    """The figure of the round trips of one contender beside one load."""
    value, usual = quantile(trips, 0.99), quantile(idle, 0.99)
    assert value is not None and usual is not None, "a block has hundreds of them"
    is_bounded = "real time" in name and load == "four busy loops"
    goal = at_most(ROUND_TRIP_RATIO_MAX) if is_bounded else None
    ratio = value / usual
    met = None if goal is None else goal.met(ratio, ratio)
    return Row(f"{load}: {name}, p99", value, "ms", "idle", usual, ratio, ratio, ratio, goal, met)


def report_loads(report: Report, chosen: Options, loads: Sequence[str]) -> None:
    """Measures beside each load and adds the rows of each contender as soon as they are known; idle is the first of the loads."""
    idle: dict[str, Found] = {}
    for load in loads:
        found: dict[str, Found] = {}
        for name, each in measure(chosen, load):
            found[name] = each
            if load == "idle":
                idle[name] = each
            usual = name if name in idle else OURS if "real time" in name else "aionn"
            before = idle[usual]["frames"]
            if name in ROUND_TRIPS:
                report.add(round_trip_row(load, name, each["frames"], before))
                continue
            report.add(*rows_of(load, name, each["frames"], before))
            if "flood" in name:
                report.add(single(f"{load}: {name}, LOW", "/s", each["low"]))
        if load != "idle":
            report.add(unprivileged_row(load, found))


def chosen_loads(named: Sequence[str], *, quick: bool) -> list[str]:
    """The loads to measure beside, idle first: those that were named, or all; a quick run without names leaves out reclaim, which
    disturbs all programs of the machine."""
    others = named or [load for load in LOADS if not (quick and load == "reclaim")]
    return ["idle", *(load for load in LOADS if load in others and load != "idle")]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--load", action="append", choices=list(LOADS), default=[], help="this load alone; may be repeated"
    )
    mine, _ = parser.parse_known_args()
    chosen = options(__doc__, parser)
    report = Report(chosen)
    report.note(
        f"{os.cpu_count()} processors, load of this machine before: {os.getloadavg()[0]:.1f}; "
        f"{'stress-ng' if has_stress_ng() else 'own programs in place of stress-ng'}"
        f"{'' if permits_real_time() else '; SCHED_RR is not permitted: its contenders are left out'}"
    )
    report_loads(report, chosen, chosen_loads(mine.load, quick=chosen.quick))


if __name__ == "__main__":
    main()
