"""The cost of the way to the LiteRT driver: models through a burst to the driver process, against LiteRT's own interpreter.

Peer, in the same run: LiteRT's `Interpreter` with the same file and one thread, in this process: `set_tensor`, `invoke`,
`get_tensor`.

How each figure is taken:
- Latency: the time of one `await burst.execute([x])`, and of the peer's three calls. A block is a stretch of executions, and
  yields its median and its 90th percentile.
- Added cost: the difference of the medians of both, block by block.
- Polling: the same with polling windows, as an application sets them that wants the least latency and has a processor to spare.
- Bare process: the same for `benchmarks.bare_process`, which is all that a model in another process can do without: the limit.
- Streaming: 300 uint8 frames from memory through `burst.stream` with two slots, and through the peer in a plain loop that
  converts each frame first. A block is one such stream, and yields frames per second.
- Server: the largest rate of LoadGen's Server scenario at which 99 % of the queries are answered within 33 ms of when they were
  due, for mobilenet in float32: through two bursts to the driver process, and with two interpreters on two threads of this
  process. A block is one search by halving. Left out where LoadGen is not installed.
- Capabilities (`--capabilities`): the least time of one execution, over the reference device's, both in this process and on one
  thread. `aionn.drivers.litert.driver` has them as constants; this run shows their right values.
- The loop's holds: how long the event loop is busy between two looks at what is ready, while mobilenet runs through a burst and a
  timer of 1 ms ticks beside it. The frame's copy into shared memory is among them. How late that timer fires is shown too: there
  the kernel may have put the model on the loop's processor; "at work" is the loop thread's processor time alone.
  Python's collector is kept out of it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import selectors
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
import numpy.typing as npt

import aionn
from aionn.benchmarking.figures import percentile
from aionn.benchmarking.loadgen import (
    Answer,
    LoadReport,
    LoadSettings,
    find_largest_rate,
    load_bindings,
    run_load,
)
from benchmarks.bare_process import BareProcess
from benchmarks.engine import Engine
from benchmarks.rows import (
    Goal,
    Report,
    alternating,
    at_least,
    at_most,
    compare,
    options,
    quiet_collector,
    single,
)

ROOT = Path(__file__).resolve().parents[1]

MOBILENET = "mobilenet_v2_1.0_224"
SHAPES = "shapes"
RATIO_MAX = 1.02
ADDED_US_MAX = 25.0
THROUGHPUT_MIN = 1.0
STALL_MS_MAX = 1.0
SERVER_MIN = 0.97
SERVER_BOUND_MS = 33.0
SERVER_LOW_PER_S, SERVER_HIGH_PER_S = 50.0, 1600.0
SERVER_STEPS = 7

POLLING_US = {"burst_controller_polling_us": 200, "burst_server_polling_us": 500}

THREADS = "OPENBLAS_NUM_THREADS"

FRAMES = 300
TICK_S = 0.001

Array = npt.NDArray[Any]
Call = Callable[[Array], Awaitable[Array]]


def converted(peer: Engine, frame: Array) -> Array:
    """A uint8 picture as the model's input, as plain code does it."""
    return peer.quantised(frame[np.newaxis].astype(np.float32) / np.float32(255))


def draw(peer: Engine) -> Array:
    generator = np.random.default_rng(3)
    if peer.input["dtype"] == np.float32:
        return generator.random(peer.input_shape, dtype=np.float32)
    info = np.iinfo(peer.input["dtype"])
    return generator.integers(info.min, info.max + 1, peer.input_shape).astype(peer.input["dtype"])


async def latency(
    report: Report, call: Call, peer: Engine, name: str, *, has_goal: bool, rounds: int, executions: int
) -> None:
    """Rows for p50 and p90, and for what is added. ``name`` begins with the model's."""
    x = draw(peer)
    ours: list[list[float]] = []
    theirs: list[list[float]] = []

    async def our_block() -> None:
        times = []
        for _ in range(executions):
            start = time.perf_counter()
            await call(x)
            times.append(time.perf_counter() - start)
        ours.append(times)

    async def peer_block() -> None:
        times = []
        for _ in range(executions):
            start = time.perf_counter()
            peer(x)
            times.append(time.perf_counter() - start)
        theirs.append(times)

    if (await call(x)).tobytes() != peer(x).tobytes():
        raise SystemExit(f"{name}: the driver's bytes are not LiteRT's")
    for block in alternating([our_block, peer_block], rounds):
        await block()
    for label, share in (("p50", 0.5), ("p90", 0.9)):
        goal: Goal | None = at_most(RATIO_MAX) if has_goal and name.startswith(MOBILENET) else None
        a, b = ([1e3 * percentile(times, share) for times in blocks] for blocks in (ours, theirs))
        report.add(compare(f"{name}: {label}", "ms", a, "LiteRT, in process", b, goal))
    added = [1e6 * (statistics.median(a) - statistics.median(b)) for a, b in zip(ours, theirs, strict=True)]
    goal = at_most(ADDED_US_MAX) if has_goal and name.startswith(SHAPES) else None
    report.add(single(f"{name}: added to the p50", "us", added, goal))


def through(burst: aionn.Burst) -> Call:
    """Executes through a burst."""

    async def call(x: Array) -> Array:
        return (await burst.execute([x])).outputs[0]

    return call


def through_bare(process: BareProcess) -> Call:
    """Executes in a process without any runtime."""

    async def call(x: Array) -> Array:
        return process(x)

    return call


async def streaming(report: Report, net: aionn.Compilation, peer: Engine, name: str, *, rounds: int) -> None:
    """The row for frames per second, conversion included."""
    generator = np.random.default_rng(4)
    frames = [generator.integers(0, 256, peer.input_shape[1:]).astype(np.uint8) for _ in range(16)]
    write = aionn.image_writer(net.inputs[0])

    async def source() -> AsyncIterator[Array]:
        for index in range(FRAMES):
            yield frames[index % len(frames)]

    async def our_block() -> float:
        async with net.burst(slots=2) as burst:
            await burst.execute([converted(peer, frames[0])])
            start = time.perf_counter()
            count = 0
            async for _ in burst.stream(source(), into=write):
                count += 1
            assert count == FRAMES
            return FRAMES / (time.perf_counter() - start)

    async def peer_block() -> float:
        start = time.perf_counter()
        for index in range(FRAMES):
            peer(converted(peer, frames[index % len(frames)]))
        return FRAMES / (time.perf_counter() - start)

    blocks: dict[str, list[float]] = {"ours": [], "peer": []}
    for key in alternating(["ours", "peer"], rounds):
        blocks[key].append(await (our_block if key == "ours" else peer_block)())
    report.add(
        compare(
            f"{name}: stream of {FRAMES} frames, 2 slots",
            "1/s",
            blocks["ours"],
            "LiteRT, plain loop",
            blocks["peer"],
            at_least(THROUGHPUT_MIN),
        )
    )


class WatchedSelector(selectors.DefaultSelector):
    """Notes how long the loop was busy each time between two looks at what is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.held_ms: list[float] = []
        self.worked_ms: list[float] = []
        self._since_s = time.perf_counter()
        self._worked_s = time.thread_time()

    def select(self, timeout: float | None = None) -> Any:
        self.held_ms.append(1e3 * (time.perf_counter() - self._since_s))
        self.worked_ms.append(1e3 * (time.thread_time() - self._worked_s))
        ready = super().select(timeout)
        self._since_s = time.perf_counter()
        self._worked_s = time.thread_time()
        return ready


async def stall(
    report: Report, burst: aionn.Burst, peer: Engine, name: str, selector: WatchedSelector, *, executions: int
) -> None:
    """The rows for how long the event loop was held while the model ran."""
    x = draw(peer)
    late_ms: list[float] = []
    loop = asyncio.get_running_loop()

    handles: list[asyncio.TimerHandle] = []

    def tick(due: float) -> None:
        late_ms.append(1e3 * (loop.time() - due))
        set_timer()

    def set_timer() -> None:
        due = loop.time() + TICK_S
        handles[:] = [loop.call_at(due, tick, due)]

    set_timer()
    with quiet_collector():
        # Twice: the collection, and the forgetting of what all measurements before have noted, are long turns of their own.
        for _ in range(2):
            selector.held_ms.clear()
            selector.worked_ms.clear()
            await burst.execute([x])
        selector.held_ms.clear()
        selector.worked_ms.clear()
        for _ in range(executions):
            await burst.execute([x])
        held_ms, worked_ms = sorted(selector.held_ms), sorted(selector.worked_ms)
    handles[0].cancel()
    report.add(single(f"{name}: loop held, p99.9", "ms", [percentile(held_ms, 0.999)], at_most(STALL_MS_MAX)))
    report.add(single(f"{name}: loop held, at most", "ms", held_ms[-1:]))
    report.add(single(f"{name}: loop at work, at most", "ms", worked_ms[-1:], at_most(STALL_MS_MAX)))
    report.add(single(f"{name}: a 1 ms timer late by, p99", "ms", [percentile(late_ms, 0.99)]))


async def server(report: Report, net: aionn.Compilation, path: Path, name: str, *, quick: bool) -> None:
    """The row for the largest rate of a server."""
    try:
        load_bindings()
    except aionn.DeviceUnavailable as e:
        report.note(f"{name}: server: {e}")
        return
    peers = [Engine(path), Engine(path)]
    x = draw(peers[0])

    def in_process(peer: Engine) -> Answer:
        async def answer(_: int) -> None:
            await anyio.to_thread.run_sync(peer, x)

        return answer

    def in_driver(burst: aionn.Burst) -> Answer:
        async def answer(_: int) -> None:
            await burst.execute([x])

        return answer

    async def largest(answers: Sequence[Answer]) -> float:
        async def run(rate: float) -> LoadReport:
            seconds = 2.0 if quick else 5.0
            return await run_load(answers, LoadSettings("server", seconds, rate, SERVER_BOUND_MS))

        return (await find_largest_rate(run, SERVER_LOW_PER_S, SERVER_HIGH_PER_S, SERVER_STEPS))[0]

    blocks: dict[str, list[float]] = {"ours": [], "peer": []}
    async with net.burst() as first, net.burst() as second:
        answers = {
            "ours": [in_driver(first), in_driver(second)],
            "peer": [in_process(peer) for peer in peers],
        }
        for key in alternating(["ours", "peer"], 2 if quick else 4):
            blocks[key].append(await largest(answers[key]))
    goal = at_least(SERVER_MIN)
    label = f"{name}: server within {SERVER_BOUND_MS:g} ms"
    report.add(compare(label, "1/s", blocks["ours"], "LiteRT, two threads", blocks["peer"], goal))


def find_model(name: str) -> Path | None:
    """A model, in the shared data or the examples'."""
    for folder in (ROOT.parent / "shared" / "models", ROOT / "examples" / "data"):
        if (path := folder / f"{name}.tflite").is_file():
            return path
    return None


async def measure(report: Report, quick: bool, only: str, selector: WatchedSelector) -> None:
    async with (
        aionn.open(drivers=["litert-cpu"]) as runtime,
        aionn.open(drivers=["litert-cpu"], **POLLING_US) as polling,
    ):
        for missing in runtime.unavailable:
            raise SystemExit(f"{missing.name}: {missing.reason}")
        for kind in (MOBILENET, SHAPES):
            for form in ("float", "int8"):
                name = f"{kind}_{form}"
                path = find_model(name)
                if path is None or only not in name:
                    report.note(f"{name}: left out")
                    continue
                peer = Engine(path)
                rounds = 8 if quick else 24
                executions = (10 if quick else 30) if kind == MOBILENET else (200 if quick else 500)
                net = await runtime.compile(path)
                async with net.burst(slots=2) as burst:
                    call = through(burst)
                    await latency(
                        report, call, peer, name, has_goal=True, rounds=rounds, executions=executions
                    )
                    if kind == MOBILENET:
                        await stall(report, burst, peer, name, selector, executions=5 * executions)
                async with await polling.compile(path) as sooner, sooner.burst(slots=2) as burst:
                    call, label = through(burst), f"{name}, polling"
                    await latency(
                        report, call, peer, label, has_goal=True, rounds=rounds, executions=executions
                    )
                with BareProcess(path, (peer.input, peer.output)) as process:
                    call, label = through_bare(process), f"{name}, bare process"
                    await latency(
                        report, call, peer, label, has_goal=False, rounds=rounds, executions=executions
                    )
                await streaming(report, net, peer, name, rounds=3 if quick else 8)
                if name == f"{MOBILENET}_float":
                    await server(report, net, path, name, quick=quick)
                await net.aclose()


async def capabilities(report: Report, rounds: int) -> None:
    """Rows for the speed that `aionn.drivers.litert.driver` declares."""
    async with aionn.open(drivers=["litert-cpu", "reference"], isolation="in_process") as runtime:
        for form in ("float", "int8"):
            path = find_model(f"{MOBILENET}_{form}")
            if path is None:
                raise SystemExit(f"{MOBILENET}_{form}: not found")
            x = draw(Engine(path))
            nets = [await runtime.compile(path, devices=name) for name in ("litert-cpu", "reference")]
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(rounds):
                for net, found in zip(nets, times, strict=True):
                    result = await net.execute([x], measure=True)
                    assert result.timing.time_on_device_ns is not None
                    found.append(result.timing.time_on_device_ns / 1e6)
            report.add(
                single(f"{path.stem}: time over the reference's", "1", [min(times[0]) / min(times[1])])
            )


def main() -> None:
    if "--capabilities" in sys.argv and os.environ.get(THREADS) != "1":
        # The reference device's matrix library reads this when it is loaded, which has happened: begin again.
        os.environ[THREADS] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.models", *sys.argv[1:]])
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", default="", help="models whose names have this part")
    parser.add_argument(
        "--capabilities", action="store_true", help="the times that the driver declares, alone"
    )
    chosen_models, _ = parser.parse_known_args()
    chosen = options(__doc__, parser)
    report = Report(chosen)
    if chosen_models.capabilities:
        asyncio.run(capabilities(report, 5 if chosen.quick else 20))
        return
    selector = WatchedSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(measure(report, chosen.quick, chosen_models.only, selector))


if __name__ == "__main__":
    main()
