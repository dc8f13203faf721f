"""The cost of fences: chains, awaits, memory, merging, and the way from a signal in one process to a task in another.

Peers, in the same run and on the same event loop: awaiting fresh futures one after the other (what a runtime without fences
does between executions), awaiting a finished future, and a bare eventfd with `add_reader`.

How each figure is taken:
- The chain that the goal is for is `Chain`, whose executions wait as entries of a queue; one fence object for each link,
  as `then` makes, is shown beside it.
- A slope is the least-squares line through the times for several N, so what a run costs once does not count. "made and run"
  includes making the executions; "run" starts with the signal at the root. Both end when the task that awaits the last
  fence runs.
- A turn is one pass of the event loop between the signal and that task; the largest over all N is shown.
- Signal to wake: two processes; the time is read before the signal in one and when the awaiting task runs in the other.
  The signalling process waits until the other has gone to sleep.
- A merge of m fences on t timelines is compared, per unit of m + t log2 t, with one a hundredth of its size.
"""

from __future__ import annotations

import asyncio
import gc
import math
import mmap
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any

import fences
from benchmarks.rows import (
    Loop,
    Options,
    Report,
    alternate,
    at_most,
    compare,
    loops,
    options,
    quiet_collector,
    single,
)

CHAIN_LENGTHS = (10, 100, 1000, 5000)
TURN_LENGTHS = (1, 10, 1000, 100_000)
NOTICE_NS = 60_000
"""Time for which the signalling process waits after its start signal: several times what the other needs to fall asleep."""

Measured = Callable[[int], Coroutine[Any, Any, float]]


# Chains


def null() -> None:
    """An execution that does nothing."""


async def fresh_futures(count: int) -> float:
    loop = asyncio.get_running_loop()
    start = time.perf_counter()
    for _ in range(count):
        future = loop.create_future()
        loop.call_soon(future.set_result, None)
        await future
    return time.perf_counter() - start


async def chain_made_and_run(count: int) -> float:
    start = time.perf_counter()
    root = fences.SyncFence()
    chain = fences.Chain(root)
    append = chain.append
    for _ in range(count):
        point = append(null)
    asyncio.get_running_loop().call_soon(root.signal)
    await chain.fence(point)
    return time.perf_counter() - start


async def then_made_and_run(count: int) -> float:
    start = time.perf_counter()
    root = fence = fences.SyncFence()
    for _ in range(count):
        fence = fence.then(null)
    asyncio.get_running_loop().call_soon(root.signal)
    await fence
    return time.perf_counter() - start


async def then_run(count: int) -> float:
    root = fence = fences.SyncFence()
    for _ in range(count):
        fence = fence.then(null)
    start = time.perf_counter()
    asyncio.get_running_loop().call_soon(root.signal)
    await fence
    return time.perf_counter() - start


def slope_ns(new_loop: Loop, measured: Measured) -> float:
    """Least-squares slope of the time over the length, in ns for each execution; the best of three for each length."""
    with quiet_collector(), asyncio.Runner(loop_factory=new_loop) as runner:
        times = [min(runner.run(measured(count)) for _ in range(3)) for count in CHAIN_LENGTHS]
    mean_length, mean_time = statistics.mean(CHAIN_LENGTHS), statistics.mean(times)
    above = sum(
        (length - mean_length) * (each - mean_time) for length, each in zip(CHAIN_LENGTHS, times, strict=True)
    )
    return 1e9 * above / sum((length - mean_length) ** 2 for length in CHAIN_LENGTHS)


def chains(report: Report, kind: str, new_loop: Loop, rounds: int) -> None:
    contenders = {
        "peer": fresh_futures,
        "chain": chain_made_and_run,
        "then made": then_made_and_run,
        "then": then_run,
    }
    blocks = alternate(
        {
            name: lambda measured=measured: slope_ns(new_loop, measured)
            for name, measured in contenders.items()
        },
        rounds,
    )
    peer = "await fresh future"
    report.add(
        compare(f"Chain, made and run, {kind}", "ns", blocks["chain"], peer, blocks["peer"], at_most(0.10)),
        compare(f"then() chain, run, {kind}", "ns", blocks["then"], peer, blocks["peer"]),
        compare(f"then() chain, made and run, {kind}", "ns", blocks["then made"], peer, blocks["peer"]),
    )


async def turns(make: Callable[[fences.SyncFence, int], fences.SyncFence], count: int) -> int:
    """Turns of the loop from the signal at the root until the task that awaits the last fence is done."""
    root = fences.SyncFence()
    last = make(root, count)

    async def wait() -> None:
        await last

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    turn_count = 0

    def turn() -> None:
        nonlocal turn_count
        turn_count += 1
        if not task.done():
            loop.call_soon(turn)

    root.signal()
    loop.call_soon(turn)
    await task
    return turn_count


def make_then(root: fences.SyncFence, count: int) -> fences.SyncFence:
    for _ in range(count):
        root = root.then(null)
    return root


def make_chain(root: fences.SyncFence, count: int) -> fences.SyncFence:
    chain = fences.Chain(root)
    for _ in range(count):
        point = chain.append(null)
    return chain.fence(point)


def chain_turns(report: Report, kind: str, new_loop: Loop) -> None:
    for name, make in (("Chain", make_chain), ("then() chain", make_then)):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            most = max(runner.run(turns(make, count)) for count in TURN_LENGTHS)
        report.add(single(f"{name}, turns for any N to 1e5, {kind}", "turns", [most], at_most(3)))


# Awaits and memory


async def await_many(what: Any, count: int) -> float:
    """ns for each await: the best of ten stretches, each short enough to fit between two interruptions."""
    best = math.inf
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(count):
            await what
        best = min(best, time.perf_counter() - start)
    return 1e9 * best / count


def awaits(report: Report, kind: str, new_loop: Loop, rounds: int) -> None:
    with quiet_collector(), asyncio.Runner(loop_factory=new_loop) as runner:
        future = runner.get_loop().create_future()
        future.set_result(None)
        fence = fences.SyncFence.signalled()
        blocks = alternate(
            {
                "ours": lambda: runner.run(await_many(fence, 5000)),
                "peer": lambda: runner.run(await_many(future, 5000)),
            },
            rounds,
        )
    report.add(
        compare(
            f"await of a signalled fence, {kind}",
            "ns",
            blocks["ours"],
            "await done future",
            blocks["peer"],
            at_most(3),
        )
    )


def memory(report: Report) -> None:
    count = 20_000

    def size_of(fill: Callable[[list[Any]], None]) -> float:
        row: list[Any] = [None] * count
        gc.collect()
        tracemalloc.start()
        fill(row)
        size_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size_bytes / count

    def plain(row: list[Any]) -> None:
        for index in range(count):
            row[index] = fences.SyncFence()

    def linked(row: list[Any]) -> None:
        fence = fences.SyncFence()
        for index in range(count):
            row[index] = fence = fence.then(null)

    before = len(os.listdir("/proc/self/fd"))
    report.add(
        single("pending fence", "bytes", [size_of(plain)], at_most(200)),
        single("pending link of a then() chain", "bytes", [size_of(linked)], at_most(200)),
    )
    kept = [fences.SyncFence() for _ in range(count)]
    report.add(
        single(
            f"descriptors of {len(kept)} fences", "", [len(os.listdir("/proc/self/fd")) - before], at_most(0)
        )
    )

    timeline = fences.Timeline()
    timeline.advance(1)
    gc.collect()
    tracemalloc.start()
    for point in range(2, 1_000_002, 10):
        timeline.fence(point)
        timeline.advance(point, 0)
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    report.add(single("timeline after 1e6 points, growth", "bytes", [size_bytes], at_most(1024)))


# Merging


def merging(report: Report, rounds: int) -> None:
    def unit_ns(fence_count: int, timeline_count: int) -> Callable[[], float]:
        timelines = [fences.Timeline() for _ in range(timeline_count)]
        row = [timelines[index % timeline_count].fence(1 + index) for index in range(fence_count)]
        units = fence_count + timeline_count * math.log2(timeline_count)
        repeats = max(6, 100_000 // fence_count)

        def block() -> float:
            times = []
            with quiet_collector():
                for _ in range(repeats):
                    start = time.perf_counter()
                    merged = fences.merge(row)
                    times.append(time.perf_counter() - start)
                    merged.close()
            return 1e9 * min(times) / units

        return block

    for small, large in (((1000, 10), (100_000, 1000)), ((1000, 500), (100_000, 50_000))):
        blocks = alternate({"ours": unit_ns(*large), "peer": unit_ns(*small)}, rounds)
        report.add(
            compare(
                f"merge of {large[0]} on {large[1]} timelines, a unit",
                "ns",
                blocks["ours"],
                f"{small[0]} on {small[1]}",
                blocks["peer"],
                at_most(2),
            )
        )


# Crossing


def signaller(control_fd: int, memory_fd: int, event_fd: int) -> None:
    """The other process: makes fences, and signals one, or the eventfd, for every byte it is sent."""
    control = socket.socket(fileno=control_fd)
    shared = mmap.mmap(memory_fd, mmap.PAGESIZE)
    kept: list[fences.SyncFence] = []
    gc.disable()
    while command := control.recv(1):
        if command == b"m":
            fence = fences.SyncFence()
            fences.send_fence(control, fence)
            kept.append(fence)
            continue
        fence = kept.pop(0) if command == b"f" else fences.SyncFence()
        until = time.monotonic_ns() + NOTICE_NS
        while time.monotonic_ns() < until:
            pass
        struct.pack_into("<Q", shared, 0, time.monotonic_ns())
        if command == b"f":
            fence.signal()
        else:
            os.eventfd_write(event_fd, 1)
    shared.close()
    control.close()


class Crossing:
    """This side of the two processes, in one event loop."""

    def __init__(self, new_loop: Loop) -> None:
        self.runner = asyncio.Runner(loop_factory=new_loop)
        self.memory_fd = os.memfd_create("times")
        os.ftruncate(self.memory_fd, mmap.PAGESIZE)
        self.shared = mmap.mmap(self.memory_fd, mmap.PAGESIZE)
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.control, theirs = socket.socketpair()
        given = (theirs.fileno(), self.memory_fd, self.event_fd)
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from benchmarks.fences import signaller; signaller{given}"],
            pass_fds=given,
        )
        theirs.close()

    def close(self) -> None:
        self.control.close()
        self.process.wait(10)
        self.runner.close()
        self.shared.close()
        os.close(self.memory_fd)
        os.close(self.event_fd)

    def elapsed_us(self, now_ns: int) -> float:
        return (now_ns - struct.unpack_from("<Q", self.shared)[0]) / 1000

    async def by_fence(self, count: int) -> float:
        row = []
        for _ in range(count):
            self.control.send(b"m")
            row.append(fences.recv_fence(self.control))
        times = []
        for fence in row:
            self.control.send(b"f")
            await fence
            times.append(self.elapsed_us(time.monotonic_ns()))
        await asyncio.sleep(0)
        return statistics.median(times)

    async def by_eventfd(self, count: int) -> float:
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None]

        def ready() -> None:
            os.eventfd_read(self.event_fd)
            woken.set_result(None)

        loop.add_reader(self.event_fd, ready)
        times = []
        for _ in range(count):
            woken = loop.create_future()
            self.control.send(b"e")
            await woken
            times.append(self.elapsed_us(time.monotonic_ns()))
        loop.remove_reader(self.event_fd)
        return statistics.median(times)


def crossing(report: Report, kind: str, new_loop: Loop, rounds: int) -> None:
    pair = Crossing(new_loop)
    try:
        run = pair.runner.run
        with quiet_collector():
            run(pair.by_fence(200))
            run(pair.by_eventfd(200))
            blocks = alternate(
                {"ours": lambda: run(pair.by_fence(200)), "peer": lambda: run(pair.by_eventfd(200))}, rounds
            )
    finally:
        pair.close()
    report.add(
        compare(
            f"signal to wake across processes, p50, {kind}",
            "us",
            blocks["ours"],
            "bare eventfd",
            blocks["peer"],
            at_most(1.25),
        )
    )


def measure(chosen: Options) -> Report:
    """All figures; about a quarter of a minute with `quick`."""
    report = Report(chosen)
    rounds = 8 if chosen.quick else 20
    for kind, new_loop in loops().items():
        chains(report, kind, new_loop, rounds)
        chain_turns(report, kind, new_loop)
        awaits(report, kind, new_loop, rounds)
        crossing(report, kind, new_loop, rounds)
    if len(loops()) == 1:
        report.note("uvloop is not installed: its figures are left out")
    memory(report)
    merging(report, rounds)
    return report


def main() -> None:
    """Print the figures."""
    measure(options(__doc__))


if __name__ == "__main__":
    main()
