"""The share of the possible work that is done on time: our policy against the offline bound and other policies.

Every workload of `benchmarks/workloads` runs on two sets of devices, at several loads, under several seeds, in virtual time with
exact durations. The load is work per time over what the devices can do at best; HIGH streams keep their rates, other ones are
scaled. The bound is the linear program of `aionn.simulation.bound`: all arrivals known beforehand, free migration, HIGH first, then
MEDIUM, then LOW. All policies see the same arrivals; ratios are paired by seed. No wall clock is involved but for the cost of a
decision and the real device at the beginning, so the figures are the same on every run. Plans and preemptions are checked
at every decision.

The bound of an instance is not solved for where our policy serves every request that a device could serve at all: it is reached.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np

import aionn
from aionn.hal import Priority
from aionn.scheduler.estimates import Estimates
from aionn.scheduler.job import Action, DeviceSlot
from aionn.scheduler.planning_policy import PlanPolicy
from aionn.simulation.baselines import POLICIES
from aionn.simulation.bound import fluid_rate, on_time_bound, requests_of, total_bound
from aionn.simulation.checkers import Watched
from aionn.simulation.engine import Engine, Scenario, prepare
from aionn.simulation.workload import (
    PRIORITIES,
    Stream,
    Workload,
    devices_of,
    durations_of,
    read_workload,
)
from benchmarks.rows import Options, Report, at_least, at_most, options, single

WORKLOADS = Path(__file__).parent / "workloads"
EXAMPLE_MODEL = Path(__file__).parents[1] / "examples" / "data" / "shapes_int8.tflite"
TRACES = Path(__file__).parents[2] / "shared" / "traces"
NAMES = ("mobile", "bursty", "trace-code", "trace-conv", "realtime", "chains")
DEVICE_SETS = ("phone", "edge")
LOADS = (0.5, 0.8, 1.0, 1.2, 1.6, 2.0)
SEEDS = 30
QUICK_LOADS = (0.8, 1.2, 2.0)
QUICK_SEEDS = 2
REQUESTS = 180
"""Per instance, on average: the program of the bound grows faster than the requests."""

NOISE = 0.1


def scaled(name: str, devices: str, load: float) -> Workload:
    """A workload at a load: everything but HIGH chains is scaled."""
    workload = msgspec.structs.replace(read_workload(WORKLOADS / f"{name}.toml"), devices=devices)
    profiles = devices_of(workload)
    table = durations_of(workload, profiles, folder=TRACES)
    whole = [tuple(None if d is None else sum(d) for d in row) for row in table]
    roots: dict[str, Stream] = {}
    for stream in workload.stream:
        roots[stream.name] = stream if stream.after is None else roots[stream.after]
    fixed, others = [], []
    for stream, durations in zip(workload.stream, whole, strict=True):
        root = roots[stream.name]
        (fixed if root.priority == "high" else others).append((root.rate_per_s, durations))
    factor = fluid_rate(fixed, others, [profile.slots for profile in profiles], load)
    streams = tuple(
        stream
        if roots[stream.name].priority == "high" or stream.after is not None
        else msgspec.structs.replace(stream, rate_per_s=stream.rate_per_s * factor)
        for stream in workload.stream
    )
    rate = sum(rate for rate, _ in fixed) + factor * sum(rate for rate, _ in others)
    return msgspec.structs.replace(workload, stream=streams, duration_s=REQUESTS / rate)


def on_time(engine: Engine) -> dict[Priority, int]:
    """Number of those that ended on time, by priority."""
    counts = dict.fromkeys(Priority, 0)
    streams = engine.scenario.workload.stream
    for outcome in engine.outcomes:
        if outcome is not None and outcome.kind == "on_time":
            arrival = engine.scenario.arrivals[outcome.number]
            counts[PRIORITIES[streams[arrival.stream_index].priority]] += 1
    return counts


@dataclass
class Instance:
    """The result of one instance."""

    case: tuple[str, str, float, int]
    counts: dict[str, dict[Priority, int]] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    bound: dict[Priority, int] = field(default_factory=dict)
    keeping: int | None = None
    wasted_ns: int = 0
    busy_ns: int = 0
    decisions: int = 0
    breaches: int = 0
    noisy_late: int = 0
    noisy_kept: int = 0

    def total(self, policy: str) -> int:
        """On time under a policy, of all priorities."""
        return sum(self.counts[policy].values())


def run_instance(case: tuple[str, str, float, int]) -> Instance:
    """Every policy and the bound on one workload, device set, load and seed."""
    name, devices, load, seed = case
    scenario = prepare(scaled(name, devices, load), seed, folder=TRACES)
    found = Instance(case)
    for policy_name, policy in POLICIES.items():
        is_ours = policy_name == "plan"
        watched = Watched(policy) if is_ours else policy
        engine = Engine(scenario, watched, is_clock_held=True)
        engine.run()
        found.counts[policy_name] = on_time(engine)
        found.late[policy_name] = sum(o is not None and o.kind == "late" for o in engine.outcomes)
        if is_ours and isinstance(watched, Watched):
            found.wasted_ns, found.busy_ns = engine.wasted_ns, sum(engine.busy_ns)
            found.decisions, found.breaches = watched.decisions, len(watched.breaches)
    noisy = tuple(msgspec.structs.replace(device, noise=NOISE) for device in scenario.devices)
    engine = Engine(
        msgspec.structs.replace(scenario, devices=noisy),
        PlanPolicy(),
        estimates=Estimates(),
        is_clock_held=True,
    )
    engine.run()
    for outcome in engine.outcomes:
        if outcome is not None and outcome.kind in ("on_time", "late"):
            found.noisy_kept += 1
            found.noisy_late += outcome.kind == "late"
        elif outcome is not None and "past its deadline" in outcome.why:
            found.noisy_kept += 1
            found.noisy_late += 1
    found.bound = _bound(scenario, found)
    ours = found.counts["plan"]
    if found.total("plan") < found.total("edf-abort"):
        slots = [device.slots for device in scenario.devices]
        least = {priority: ours[priority] for priority in (Priority.HIGH, Priority.MEDIUM)}
        found.keeping = total_bound(requests_of(scenario), slots, least=least)
    return found


def _bound(scenario: Scenario, found: Instance) -> dict[Priority, int]:
    requests = requests_of(scenario)
    possible = dict.fromkeys(Priority, 0)
    for request in requests:
        window_ns = request.deadline_ns - request.release_ns
        possible[request.priority] += any(p is not None and p <= window_ns for p in request.durations_ns)
    if found.counts["plan"] == possible:
        return possible
    return dict(on_time_bound(requests, [device.slots for device in scenario.devices]).by_priority)


def run_all(chosen: Options) -> list[Instance]:
    """All instances, on as many processes as there are cores."""
    names = [name for name in NAMES if not name.startswith("trace") or TRACES.is_dir()]
    seeds = range(1, (QUICK_SEEDS if chosen.quick else SEEDS) + 1)
    cases = [
        (name, devices, load, seed)
        for name in names
        for devices in DEVICE_SETS
        for load in (QUICK_LOADS if chosen.quick else LOADS)
        for seed in seeds
    ]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(run_instance, cases, chunksize=2))


def add_ratios(report: Report, instances: Sequence[Instance]) -> None:
    """On-time counts over the bound: by load, by workload, by policy."""
    by_load: dict[float, list[Instance]] = defaultdict(list)
    by_name: dict[str, list[Instance]] = defaultdict(list)
    for instance in instances:
        if sum(instance.bound.values()):
            by_load[instance.case[2]].append(instance)
            by_name[instance.case[0]].append(instance)

    def ratios(group: Sequence[Instance], policy: str) -> list[float]:
        return [i.total(policy) / sum(i.bound.values()) for i in group]

    for load, group in sorted(by_load.items()):
        goal = at_least(0.97 if load <= 1.2 else 0.95)
        ours = ratios(group, "plan")
        report.add(single(f"on time / bound, load {load:g}, mean", "ratio", [statistics.fmean(ours)], goal))
        report.add(single(f"on time / bound, load {load:g}, worst seed", "ratio", [min(ours)]))
    for name, group in by_name.items():
        report.add(
            single(f"on time / bound, {name}, mean", "ratio", [statistics.fmean(ratios(group, "plan"))])
        )
    for policy in POLICIES:
        value = statistics.fmean(ratios(instances, policy))
        report.add(single(f"on time / bound, all, {policy}", "ratio", [value]))


def add_comparisons(report: Report, instances: Sequence[Instance]) -> None:
    """Against EDF with early abort, seed by seed; and the classes that EDF sacrifices where it ends more.

    EDF knows no classes. No policy that keeps them, or that lets HIGH wait for one operation alone, is above it on every run:
    ``tests/simulation/test_limits.py`` plays the smallest of them. The last row is the loss of EDF itself by the second rule.
    """
    order = sorted(Priority, reverse=True)
    count = f"/{len(instances)}"
    for peer in ("edf-abort", "edf-abort-priority"):
        below = [i for i in instances if i.total("plan") < i.total(peer)]
        least = min(i.total("plan") / max(1, i.total(peer)) for i in instances)
        report.add(single(f"on time / {peer}, worst seed", "ratio", [least], at_least(1.0)))
        report.add(single(f"instances below {peer}", count, [len(below)], at_most(0)))
        gives_up: dict[Priority | None, int] = defaultdict(int)
        for i in below:
            differing = [p for p in order if i.counts[peer][p] != i.counts["plan"][p]]
            gives_up[
                differing[0] if i.counts[peer][differing[0]] < i.counts["plan"][differing[0]] else None
            ] += 1
        part = f"/{len(below)}"
        report.add(single("  it ends fewer HIGH ones", part, [gives_up[Priority.HIGH]]))
        report.add(single("  it ends fewer MEDIUM ones, HIGH being equal", part, [gives_up[Priority.MEDIUM]]))
        report.add(single("  it ends no fewer of both", part, [gives_up[None]]))
        if peer == "edf-abort":
            beyond = [i for i in below if i.keeping is not None and i.total(peer) > i.keeping]
            report.add(single("  more than any schedule with our HIGH and MEDIUM", part, [len(beyond)]))
    lower = [
        i
        for i in instances
        if [i.counts["plan"][p] for p in order] < [i.counts["edf-abort"][p] for p in order]
    ]
    report.add(single("instances below edf-abort, HIGH first", count, [len(lower)], at_most(0)))
    held = [i for i in instances if i.total("edf-abort-high") < i.total("edf-abort")]
    report.add(single("edf-abort with HIGH first below edf-abort", count, [len(held)]))


def add_guarantees(report: Report, instances: Sequence[Instance]) -> None:
    """HIGH, LOW, waste, kept promises, bounded inversion."""
    high = [
        i.counts["plan"][Priority.HIGH] / i.bound[Priority.HIGH] for i in instances if i.bound[Priority.HIGH]
    ]
    report.add(single("HIGH on time / its bound, mean", "ratio", [statistics.fmean(high)], at_least(0.99)))
    report.add(single("HIGH on time / its bound, worst seed", "ratio", [min(high)], at_least(0.99)))
    low = sum(i.counts["plan"][Priority.LOW] for i in instances) / sum(
        i.bound[Priority.LOW] for i in instances
    )
    report.add(single("LOW on time / its bound", "ratio", [low], at_least(0.90)))
    wasted = sum(i.wasted_ns for i in instances) / sum(i.busy_ns for i in instances)
    report.add(single("device time for work not on time", "share", [wasted], at_most(0.01)))
    worst = max(i.wasted_ns / max(1, i.busy_ns) for i in instances)
    report.add(single("device time for work not on time, worst", "share", [worst]))
    kept = sum(i.total("plan") for i in instances)
    late = sum(i.late["plan"] for i in instances)
    report.add(single("accepted, not aborted: on time", "share", [kept / (kept + late)], at_least(1.0)))
    noisy = sum(i.noisy_kept for i in instances)
    share = 1 - sum(i.noisy_late for i in instances) / max(1, noisy)
    report.add(single("the same with 10 % noise", "share", [share], at_least(0.999)))
    decisions = sum(i.decisions for i in instances)
    breaches = sum(i.breaches for i in instances)
    report.add(single("HIGH behind more than one lower operation", f"/{decisions}", [breaches], at_most(0)))


class Timed:
    """Our policy, with the time of every decision: taking a request in, and deciding."""

    name = "plan"

    def __init__(self) -> None:
        self._policy = PlanPolicy()
        self.queue: Any = None
        self.costs_ns: list[int] = []
        self._add_ns = 0

    def make_queue(self, slots: Sequence[DeviceSlot]) -> Any:
        """The policy's queue, its ``add`` timed."""
        self.queue = self._policy.make_queue(slots)
        add = self.queue.add

        def timed_add(*arguments: Any) -> Any:
            start_ns = time.thread_time_ns()
            try:
                return add(*arguments)
            finally:
                self._add_ns = time.thread_time_ns() - start_ns

        self.queue.add = timed_add
        return self.queue

    def decide(self, now_ns: int, queue: Any, slots: Sequence[DeviceSlot]) -> list[Action]:
        """The policy's decision, timed together with the ``add`` before it."""
        waiting = len(queue)
        start_ns = time.thread_time_ns()
        actions = self._policy.decide(now_ns, queue, slots)
        if waiting >= 1000:
            self.costs_ns.append(time.thread_time_ns() - start_ns + self._add_ns)
        self._add_ns = 0
        return actions


def add_cost(report: Report) -> None:
    """The cost of a decision while 1,000 or more wait: a crowd with far deadlines, and the phone's streams on top."""
    mobile = read_workload(WORKLOADS / "mobile.toml")
    crowd = [
        Stream(
            name=f"crowd{index}",
            model=model,
            priority=priority,
            rate_per_s=0.001,
            burst=700,
            deadline_s=30.0 + index,
        )
        for index, (model, priority) in enumerate(
            [("segment-int8", "medium"), ("enhance-float16", "low"), ("text-float", "low")]
        )
    ]
    # One arrival of each crowd, within the first second of the thousand that its period lasts.
    crowd = [msgspec.structs.replace(stream, rate_per_s=1.0, end_s=1.0) for stream in crowd]
    workload = msgspec.structs.replace(mobile, stream=(*crowd, *mobile.stream), duration_s=4.0)
    timed = Timed()
    engine = Engine(prepare(workload, 1), timed, is_clock_held=True)
    engine.run()
    costs_us = sorted(cost / 1e3 for cost in timed.costs_ns)
    report.add(single("decision with 1,000 waiting, p50", "us", [costs_us[len(costs_us) // 2]], at_most(20)))
    report.add(single("decision with 1,000 waiting, p99", "us", [costs_us[len(costs_us) * 99 // 100]]))
    spent_s = sum(timed.costs_ns) / 1e9
    share = spent_s / (engine.core.now_ns / 1e9)
    report.add(single("decisions with 1,000 waiting / simulated time", "share", [share], at_most(0.02)))


async def real_scenario(seconds: float) -> dict[str, list[int]]:
    """Video and audio at HIGH beside a LOW flood on the reference device, in real time: ``[on time, lost]`` by stream."""
    counts = {"video": [0, 0], "audio": [0, 0], "flood": [0, 0]}
    async with aionn.open(drivers=["reference"]) as runtime:
        net = await runtime.compile(EXAMPLE_MODEL, devices="reference")
        inputs = [np.zeros(spec.dimensions, spec.dtype) for spec in net.inputs]
        await net.execute(inputs)
        end_s = anyio.current_time() + seconds

        async def one(name: str, deadline_s: float, priority: str) -> None:
            try:
                await net.execute(inputs, deadline=aionn.after(deadline_s), priority=priority)
                counts[name][0] += 1
            except aionn.MissedDeadline:
                counts[name][1] += 1

        async with anyio.create_task_group() as tasks:

            async def periodic(name: str, period_s: float) -> None:
                begin_s, number = anyio.current_time(), 0
                while anyio.current_time() < end_s:
                    tasks.start_soon(one, name, period_s, "high")
                    number += 1
                    await anyio.sleep(max(0.0, begin_s + number * period_s - anyio.current_time()))

            async def flood() -> None:
                while anyio.current_time() < end_s:
                    await one("flood", 1.0, "low")

            tasks.start_soon(periodic, "video", 1 / 30)
            tasks.start_soon(periodic, "audio", 0.01)
            for _ in range(4):
                tasks.start_soon(flood)
    return counts


def add_real(report: Report, chosen: Options) -> None:
    """The scheduler under a real device."""
    counts = anyio.run(real_scenario, 3.0 if chosen.quick else 20.0)
    kept = sum(counts[name][0] for name in ("video", "audio"))
    lost = sum(counts[name][1] for name in ("video", "audio"))
    report.add(single("real device: HIGH deadlines lost", "share", [lost / (kept + lost)], at_most(0.01)))
    report.add(single("real device: LOW on time beside it", "", [counts["flood"][0]], at_least(1)))


def main() -> None:
    """Runs the benchmark."""
    chosen = options(__doc__)
    report = Report(chosen)
    if not TRACES.is_dir():
        report.note("the traces are not beside the repository: their workloads are left out")
    add_cost(report)
    add_real(report, chosen)
    instances = run_all(chosen)
    report.note(f"{len(instances)} instances of some {REQUESTS} requests")
    add_ratios(report, instances)
    add_comparisons(report, instances)
    add_guarantees(report, instances)


if __name__ == "__main__":
    main()
