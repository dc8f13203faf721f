"""The speed of simulated time, and whether it passes the same way every time.

The same model is written once for each engine: timeouts (many processes that sleep again and again), and jobs that wait for a
resource by priority. SimPy and an asyncio loop with a virtual clock are the peers; the engines take turns in blocks within one
process. Time is the process's own: all of it is computing, and what else the machine does should not count. The phone mix runs
through the scheduler itself. The hash of its record of events is compared over repeats, hash seeds and interpreters (those named in
AIONN_PYTHONS, paths separated by colons, beside this one).
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import os
import random
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec

from aionn.scheduler.planning_policy import PlanPolicy
from aionn.simulation.core import Core
from aionn.simulation.engine import Engine, prepare
from aionn.simulation.workload import read_workload
from benchmarks.rows import Report, alternate, at_least, at_most, compare, options, single

WORKLOADS = Path(__file__).parent / "workloads"
PROCESSES = 100
SLOTS = 4
REPEATS = 100
HASHED_S = 2.0


def timed(run: Callable[[], int]) -> float:
    """Number per second of the things that ``run`` counts, over its real time."""
    gc.collect()
    start = time.process_time()
    count = run()
    return count / (time.process_time() - start)


# --- Timeouts -----------------------------------------------------------------------------------------------------------------


def delays(index: int) -> int:
    """A process's delay in ns: all differ, so that events interleave."""
    return 1_000_000 + index * 7_919


def our_timeouts(events: int) -> int:
    """Timeouts on our core."""
    core = Core()
    rounds = events // PROCESSES

    class Process:
        __slots__ = ("delay", "left")

        def __init__(self, delay: int) -> None:
            self.delay = delay
            self.left = rounds

        def step(self, _: Any) -> None:
            self.left -= 1
            if self.left:
                core.after(self.delay, self.step)

    for index in range(PROCESSES):
        core.after(delays(index), Process(delays(index)).step)
    return core.run()


def simpy_timeouts(events: int) -> int:
    """Timeouts on SimPy."""
    import simpy  # Not above: other interpreters import this module for the hash alone.

    environment = simpy.Environment()
    rounds = events // PROCESSES

    def process(delay: int) -> Generator[Any, Any, None]:
        for _ in range(rounds):
            yield environment.timeout(delay)

    for index in range(PROCESSES):
        environment.process(process(delays(index)))
    environment.run()
    return rounds * PROCESSES


class VirtualLoop(asyncio.SelectorEventLoop):
    """The least that lets asyncio run in virtual time: instead of waiting, the clock advances."""

    class _Selector(selectors.SelectSelector):
        loop: VirtualLoop

        def select(self, timeout: float | None = None) -> list[Any]:
            if timeout:
                self.loop.virtual_s += timeout
            return []

    def __init__(self) -> None:
        self.virtual_s = 0.0
        selector = self._Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """The virtual time."""
        return self.virtual_s


def asyncio_timeouts(events: int) -> int:
    """Timeouts on an asyncio loop with a virtual clock."""
    rounds = events // PROCESSES

    async def process(delay: int) -> None:
        for _ in range(rounds):
            await asyncio.sleep(delay / 1e9)

    async def all_processes() -> None:
        async with asyncio.TaskGroup() as tasks:
            for index in range(PROCESSES):
                tasks.create_task(process(delays(index)))

    loop = VirtualLoop()
    try:
        loop.run_until_complete(all_processes())
    finally:
        loop.close()
    return rounds * PROCESSES


# --- Jobs for a resource by priority ------------------------------------------------------------------------------------------


def jobs_of(count: int) -> list[tuple[int, int, int]]:
    """``(gap, priority, duration)`` of each job, at a load of 0.9."""
    source = random.Random(1)
    mean_ns = 1_000_000
    return [
        (
            int(source.expovariate(1.0) * mean_ns / (0.9 * SLOTS)),
            source.randrange(3),
            int(source.expovariate(1.0) * mean_ns),
        )
        for _ in range(count)
    ]


def our_jobs(jobs: list[tuple[int, int, int]]) -> int:
    """Jobs on our core: a heap of those that wait."""
    core = Core()
    waiting: list[tuple[int, int, int]] = []
    free = SLOTS
    done = 0

    def arrive(index: int) -> None:
        nonlocal free
        if index + 1 < len(jobs):
            core.after(jobs[index + 1][0], arrive, index + 1)
        _, priority, duration = jobs[index]
        if free:
            free -= 1
            core.after(duration, end)
        else:
            heapq.heappush(waiting, (priority, index, duration))

    def end(_: Any) -> None:
        nonlocal free, done
        done += 1
        if waiting:
            core.after(heapq.heappop(waiting)[2], end)
        else:
            free += 1

    core.after(jobs[0][0], arrive, 0)
    core.run()
    return done


def simpy_jobs(jobs: list[tuple[int, int, int]]) -> int:
    """Jobs on SimPy's PriorityResource."""
    import simpy

    environment = simpy.Environment()
    resource = simpy.PriorityResource(environment, capacity=SLOTS)
    done = 0

    def job(priority: int, duration: int) -> Generator[Any, Any, None]:
        nonlocal done
        with resource.request(priority=priority) as request:
            yield request
            yield environment.timeout(duration)
        done += 1

    def source() -> Generator[Any, Any, None]:
        for gap, priority, duration in jobs:
            yield environment.timeout(gap)
            environment.process(job(priority, duration))

    environment.process(source())
    environment.run()
    return done


# --- The phone mix ------------------------------------------------------------------------------------------------------------


def phone_mix(seconds: float) -> float:
    """Simulated seconds per real second of the phone's streams under our policy."""
    workload = msgspec.structs.replace(read_workload(WORKLOADS / "mobile.toml"), duration_s=seconds)
    scenario = prepare(workload, 1)
    phone_warm_up = Engine(
        prepare(read_workload(WORKLOADS / "mobile.toml"), 1), PlanPolicy(), is_clock_held=True
    )
    phone_warm_up.run()
    gc.collect()
    start = time.process_time()
    engine = Engine(scenario, PlanPolicy(), is_clock_held=True)
    engine.run()
    return engine.core.now_ns / 1e9 / (time.process_time() - start)


def digest(seed: int) -> str:
    """The hash of the record of one run with noise, faults and a rising clock."""
    workload = msgspec.structs.replace(read_workload(WORKLOADS / "mobile.toml"), duration_s=HASHED_S)
    scenario = prepare(workload, seed)
    devices = tuple(msgspec.structs.replace(device, noise=0.1) for device in scenario.devices)
    engine = Engine(msgspec.structs.replace(scenario, devices=devices), PlanPolicy(), record=True)
    engine.run()
    return engine.digest()


def digests_elsewhere() -> list[str]:
    """The hash as other processes find it: other interpreters, other hash seeds."""
    found = []
    pythons = [sys.executable, *filter(None, os.environ.get("AIONN_PYTHONS", "").split(":"))]
    program = "from benchmarks.simulation import digest; print(digest(1))"
    for python in pythons:
        for hash_seed in ("0", "1", "random"):
            environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
            done = subprocess.run(
                [python, "-c", program],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            found.append(done.stdout.strip())
    return found


def main() -> None:
    """Runs the benchmark."""
    chosen = options(__doc__)
    report = Report(chosen)
    events, rounds = (50_000, 5) if chosen.quick else (200_000, 11)
    blocks = alternate(
        {
            "core": lambda: timed(lambda: our_timeouts(events)),
            "simpy": lambda: timed(lambda: simpy_timeouts(events)),
            "asyncio": lambda: timed(lambda: asyncio_timeouts(events // 4)),
        },
        rounds,
    )
    report.add(compare("timeouts", "/s", blocks["core"], "simpy", blocks["simpy"], at_least(1.0)))
    report.add(
        compare("timeouts", "/s", blocks["core"], "asyncio, virtual", blocks["asyncio"], at_least(3.0))
    )
    jobs = jobs_of(events // 4)
    blocks = alternate(
        {"core": lambda: timed(lambda: our_jobs(jobs)), "simpy": lambda: timed(lambda: simpy_jobs(jobs))},
        rounds,
    )
    report.add(compare("priority jobs", "/s", blocks["core"], "simpy", blocks["simpy"], at_least(1.5)))
    rates = [phone_mix(10.0 if chosen.quick else 60.0) for _ in range(3 if chosen.quick else 5)]
    report.add(single("phone mix, simulated time", "s/s", rates, at_least(500)))
    hashes = {digest(1) for _ in range(10 if chosen.quick else REPEATS)} | set(digests_elsewhere())
    report.add(single("different hashes of one run's record", "", [len(hashes)], at_most(1)))


if __name__ == "__main__":
    main()
