"""What a burst costs: the round trip of a tiny execution, a camera frame through it, and two bursts at once.

Peers, in the same run and on the same event loop: a bare eventfd echo (a process that answers every write to one eventfd by a write
to another: by way of the kernel nothing between two processes can be quicker), a `multiprocessing.Queue` pair that carries a small
message there and back, and the same engine (the reference interpreter) called in this process without anything around it.

How each figure is taken:
- A round trip is one `execute_synchronously` of a burst to a driver process that adds two vectors of four numbers; of "runtime",
  one `execute` of a burst opened by `aionn.open`, which checks, copies and schedules. A block is 400 round trips; its number is
  their p50.
- The frame: MobileNet v2 (224x224x3 floats, 600 KB a frame) where the models are at hand, else the shipped model for shapes. Both
  ways begin with the frame in an array and end with the result in one. A block's number is the p90 of its executions.
- Two bursts: executions a second of two clients, each a task with a driver process of its own or both with bursts of one driver,
  against one client.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import numpy as np

import aionn
from aionn.hal import (
    DataLocation,
    Memory,
    Model,
    OperandType,
    OperationType,
    Request,
    RequestArgument,
    operand_size_bytes,
)
from aionn.interpreter import Interpreter, RunControl
from aionn.models.builder import GraphBuilder
from aionn.models.tflite import load_tflite
from aionn.service.client import RemoteDevice
from benchmarks.rows import Options, Report, at_most, compare, options

ROUND_TRIPS = 400
WARM_UP = 200
ROOT = Path(__file__).resolve().parents[1]
MODELS = (
    ROOT.parent / "shared" / "models" / "mobilenet_v2_1.0_224_float.tflite",
    ROOT / "examples" / "data" / "shapes_float.tflite",
)

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Loop = Callable[[], asyncio.AbstractEventLoop]
Trip = Callable[[], Awaitable[object]]


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


# Peers


def eventfd_echo(ask_fd: int, answer_fd: int) -> None:
    """The other process of the bare echo."""
    gc.disable()
    while os.eventfd_read(ask_fd) < 1 << 32:
        os.eventfd_write(answer_fd, 1)


class Echo:
    """A process that answers every write to one eventfd by a write to another."""

    def __init__(self) -> None:
        self.ask_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.answer_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        command = [sys.executable, "-m", "benchmarks.burst", "--echo", str(self.ask_fd), str(self.answer_fd)]
        self.process = subprocess.Popen(command, pass_fds=(self.ask_fd, self.answer_fd), cwd=ROOT)
        self._woken: asyncio.Future[None] | None = None

    def attach(self) -> None:
        asyncio.get_running_loop().add_reader(self.answer_fd, self._ready)

    def detach(self) -> None:
        asyncio.get_running_loop().remove_reader(self.answer_fd)

    def _ready(self) -> None:
        os.eventfd_read(self.answer_fd)
        assert self._woken is not None
        self._woken.set_result(None)

    async def trip(self) -> None:
        self._woken = asyncio.get_running_loop().create_future()
        os.eventfd_write(self.ask_fd, 1)
        await self._woken

    def close(self) -> None:
        os.eventfd_write(self.ask_fd, 1 << 32)
        self.process.wait(10)
        os.close(self.ask_fd)
        os.close(self.answer_fd)


def queue_echo(asks: multiprocessing.Queue[bytes | None], answers: multiprocessing.Queue[bytes]) -> None:
    """The other process of the queues."""
    while (message := asks.get()) is not None:
        answers.put(message)


class Queues:
    """A process at the other end of two queues."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.asks: multiprocessing.Queue[bytes | None] = context.Queue()
        self.answers: multiprocessing.Queue[bytes] = context.Queue()
        self.process = context.Process(target=queue_echo, args=(self.asks, self.answers))
        self.process.start()

    def p50_us(self) -> float:
        times = []
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            self.asks.put(b"sixteen bytes...")
            self.answers.get(timeout=10)
            times.append(time.perf_counter() - start)
        return 1e6 * statistics.median(times)

    def close(self) -> None:
        self.asks.put(None)
        self.process.join(10)


# Ours


def addition() -> Model:
    """A model of one operation."""
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_FLOAT32, (1, 4))
    return g.build([g.result(OperationType.ADD, [x, g.constant(np.ones(4, np.float32)), 0], x)])


class Pools:
    """Request memory of one execution: one pool, the input first."""

    def __init__(self, model: Model) -> None:
        (given,), (result,) = model.main.inputs, model.main.outputs
        size = operand_size_bytes(given.type, given.dimensions)
        result_size = operand_size_bytes(result.type, result.dimensions)
        offset = -(-size // 64) * 64
        self.memory = Memory.create(offset + result_size)
        self.input = self.memory.array[:size].view(np.float32).reshape(given.dimensions)
        self.output = (
            self.memory.array[offset : offset + result_size].view(np.float32).reshape(result.dimensions)
        )
        self.request = Request(
            (RequestArgument(location=DataLocation(0, 0, size)),),
            (RequestArgument(location=DataLocation(0, offset, result_size)),),
            (self.memory,),
        )


@asynccontextmanager
async def opened_burst(model: Model, *, count: int = 1, devices: int = 1) -> AsyncIterator[list[Trip]]:
    """Bursts of the model in driver processes, as calls of one execution each."""
    async with anyio.create_task_group() as tasks:
        trips: list[Trip] = []
        opened = [RemoteDevice("reference", "reference", tasks) for _ in range(devices)]
        try:
            for device in opened:
                await device.connect()
                prepared = await device.prepare_model(model)
                for _ in range(count):
                    burst = await prepared.configure_execution_burst()
                    request = Pools(model).request
                    trips.append(
                        lambda burst=burst, request=request: burst.execute_synchronously(request, (0,))
                    )
            yield trips
        finally:
            for device in opened:
                await device.aclose()


async def p50_us(trip: Trip) -> float:
    """The median of a block of round trips."""
    times = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        await trip()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def round_trips(report: Report, kind: str, new_loop: Loop, rounds: int) -> None:
    model = addition()
    echo, queues = Echo(), Queues()
    try:
        with quiet_collector(), asyncio.Runner(loop_factory=new_loop) as runner:
            blocks = runner.run(_round_trip_blocks(model, echo, queues, rounds))
    finally:
        queues.close()
        echo.close()
    for name, ours in (("burst", "burst"), ("burst by the runtime", "runtime")):
        is_goal = ours == "burst"
        report.add(
            compare(
                f"{name}, one operation, p50, {kind}",
                "us",
                blocks[ours],
                "eventfd echo",
                blocks["echo"],
                at_most(2) if is_goal else None,
            ),
            compare(
                f"{name}, one operation, p50, {kind}",
                "us",
                blocks[ours],
                "multiprocessing.Queue",
                blocks["queue"],
                at_most(1),
            ),
        )


async def _round_trip_blocks(model: Model, echo: Echo, queues: Queues, rounds: int) -> dict[str, list[float]]:
    blocks: dict[str, list[float]] = {"burst": [], "runtime": [], "echo": [], "queue": []}
    value = np.zeros((1, 4), np.float32)
    echo.attach()
    async with (
        opened_burst(model) as (burst,),
        aionn.open(drivers=["reference"]) as runtime,
    ):
        net = await runtime.compile(model, devices="reference")
        async with net.burst() as ours:

            async def queue() -> float:
                return queues.p50_us()

            contenders: dict[str, Callable[[], Awaitable[float]]] = {
                "burst": lambda: p50_us(burst),
                "runtime": lambda: p50_us(lambda: ours.execute([value])),
                "echo": lambda: p50_us(echo.trip),
                "queue": queue,
            }
            for _ in range(WARM_UP):
                await burst()
                await ours.execute([value])
                await echo.trip()
            queues.p50_us()
            names = list(contenders)
            for turn in range(rounds):
                for name in names if turn % 2 == 0 else reversed(names):
                    blocks[name].append(await contenders[name]())
    echo.detach()
    return blocks


# Frames


def frame_model() -> tuple[str, Model]:
    """The model that frames go through, and what it is called."""
    for path in MODELS:
        if path.exists():
            return path.stem, load_tflite(path).model
    raise SystemExit(f"expected one of {', '.join(map(str, MODELS))}")


def frames(report: Report, kind: str, new_loop: Loop, chosen: Options) -> None:
    name, model = frame_model()
    (given,) = model.main.inputs
    frame = np.random.default_rng(1).random(given.dimensions, np.float32)
    interpreter = Interpreter(model)
    start = time.perf_counter()
    interpreter.run([frame], RunControl())
    took_s = time.perf_counter() - start
    per_block = max(6, min(30, int(1.0 / took_s)))
    rounds = 4 if chosen.quick else 10

    def p90_ms(times: list[float]) -> float:
        return 1e3 * statistics.quantiles(times, n=10)[-1]

    def in_process() -> float:
        times = []
        for _ in range(per_block):
            start = time.perf_counter()
            (result,) = interpreter.run([frame], RunControl())
            np.array(result)
            times.append(time.perf_counter() - start)
        return p90_ms(times)

    async def measure() -> tuple[list[float], list[float]]:
        async with anyio.create_task_group() as tasks:
            device = RemoteDevice("reference", "reference", tasks)
            try:
                await device.connect()
                prepared = await device.prepare_model(model)
                burst = await prepared.configure_execution_burst()
                pools = Pools(model)

                async def through_burst() -> float:
                    times = []
                    for _ in range(per_block):
                        start = time.perf_counter()
                        pools.input[...] = frame
                        await burst.execute_synchronously(pools.request, (0,))
                        np.array(pools.output)
                        times.append(time.perf_counter() - start)
                    return p90_ms(times)

                await through_burst()
                in_process()
                ours, peers = [], []
                for turn in range(rounds):
                    if turn % 2:
                        ours.append(await through_burst())
                        peers.append(in_process())
                    else:
                        peers.append(in_process())
                        ours.append(await through_burst())
                return ours, peers
            finally:
                await device.aclose()

    with quiet_collector(), asyncio.Runner(loop_factory=new_loop) as runner:
        ours, peers = runner.run(measure())
    report.add(
        compare(f"{name} frame, p90, {kind}", "ms", ours, "same engine in-process", peers, at_most(1.02))
    )


# Two at once


async def _rate(trips: list[Trip]) -> float:
    """Executions a second of all clients together."""

    async def client(trip: Trip) -> None:
        for _ in range(ROUND_TRIPS):
            await trip()

    start = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for trip in trips:
            tasks.start_soon(client, trip)
    return len(trips) * ROUND_TRIPS / (time.perf_counter() - start)


def two_bursts(report: Report, kind: str, new_loop: Loop, rounds: int) -> None:
    model = addition()
    for name, count, devices in (("one driver", 2, 1), ("two drivers", 1, 2)):
        with quiet_collector(), asyncio.Runner(loop_factory=new_loop) as runner:

            async def measure(count: int = count, devices: int = devices) -> tuple[list[float], list[float]]:
                async with opened_burst(model, count=count, devices=devices) as trips:
                    await _rate(trips)
                    blocks: dict[str, list[float]] = {"two": [], "one": []}
                    for turn in range(rounds):
                        for which in ("two", "one") if turn % 2 else ("one", "two"):
                            blocks[which].append(await _rate(trips if which == "two" else trips[:1]))
                    return blocks["two"], blocks["one"]

            two, one = runner.run(measure())
        report.add(compare(f"two bursts of {name}, executions, {kind}", "1/s", two, "one burst", one))


def measure(chosen: Options) -> Report:
    """All figures; about half a minute with `quick`."""
    report = Report(chosen)
    rounds = 6 if chosen.quick else 20
    for kind, new_loop in loops().items():
        round_trips(report, kind, new_loop, rounds)
        two_bursts(report, kind, new_loop, rounds)
    frames(report, "asyncio", asyncio.new_event_loop, chosen)
    return report


def main() -> None:
    """Print the figures."""
    if sys.argv[1:2] == ["--echo"]:
        eventfd_echo(int(sys.argv[2]), int(sys.argv[3]))
        return
    if any(os.environ.get(variable) != "1" for variable in THREAD_VARIABLES):
        # Read when numpy is imported: as in a driver process, so that both engines have one thread.
        environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.burst", *sys.argv[1:]], environment)
    measure(options(__doc__))


if __name__ == "__main__":
    main()
