"""The cost of a burst: the round trip of a tiny execution, a camera frame through it, and two bursts concurrently.

Peers, in the same run and on the same event loop: a bare eventfd echo (a process that answers every write to one eventfd by a write
to another: by way of the kernel nothing between two processes can be quicker), a `multiprocessing.Queue` pair that carries a small
message there and back, and the same engine (the reference interpreter) called in this process without anything around it.

How each figure is taken:
- A round trip is one `execute_synchronously` of a burst to a driver process that adds two vectors of four numbers; of "runtime",
  one `execute` of a burst opened by `aionn.open`, which checks, copies and schedules. A block is 400 round trips; its number is
  their p50.
- Where the two ends run decides as much as what they do: to wake a process on a processor that sleeps costs several times what it
  costs on one's own. So a round trip is taken where the kernel puts the processes, with both ends on one processor, and with one
  on each; the echo's ends are always placed as ours. "polling": both ends look for packets for 50 us before they sleep.
- "native": the same operation on `litert-cpu`, whose driver answers the packets of a burst without Python; left out where LiteRT is
  not installed.
- The limits of a round trip, of which ours can be no less: "packets alone", the same bytes over the same queues to a process that
  computes nothing; and "operation alone", what the driver does to execute bound arguments, called in this process.
- The frame: MobileNet v2 (224x224x3 floats, 600 KB a frame) where the models are at hand, else the shipped model for shapes. Both
  ways begin with the frame in an array and end with the result in one. A block's number is the p90 of its executions.
- Two bursts: executions a second of two clients, each a task with a driver process of its own or both with bursts of one driver,
  against one client.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import numpy as np

import aionn
import fmq
from aionn.benchmarking.figures import percentile
from aionn.burst.controller import QUEUE_BYTES
from aionn.burst.packets import encode_request, encode_result, result_of
from aionn.drivers.kit.engines.installed import NATIVE_VARIABLE
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import (
    DataLocation,
    ExecutionResult,
    Memory,
    Model,
    OperandType,
    OperationType,
    OutputShape,
    Request,
    RequestArgument,
    operand_size_bytes,
)
from aionn.interpreter import Interpreter, RunControl
from aionn.models.builder import GraphBuilder
from aionn.models.tflite import load_tflite
from aionn.service.client.device import RemoteDevice
from benchmarks.rows import (
    Goal,
    Loop,
    Options,
    Report,
    alternating,
    at_most,
    compare,
    loops,
    options,
    quiet_collector,
)

ROUND_TRIPS = 400
ROOT = Path(__file__).resolve().parents[1]
MODELS = (
    ROOT.parent / "shared" / "models" / "mobilenet_v2_1.0_224_float.tflite",
    ROOT / "examples" / "data" / "shapes_float.tflite",
)

ALL_PROCESSORS = os.sched_getaffinity(0)
POLLING_US = 50

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Trip = Callable[[], Awaitable[object]]


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


def packet_echo(requests: str, results: str, fds: list[str]) -> None:
    """The other process of the bare queues: answers every packet by a result's bytes."""
    gc.disable()
    numbers = [int(fd) for fd in fds]
    half = len(numbers) // 2
    reader = fmq.MessageQueue.attach(fmq.MQDescriptor.from_bytes(bytes.fromhex(requests)), numbers[:half])
    writer = fmq.MessageQueue.attach(fmq.MQDescriptor.from_bytes(bytes.fromhex(results)), numbers[half:])
    answer = encode_result(result_of(ExecutionResult(True, (OutputShape((1, 4)),))))
    with reader, writer:
        while reader.read_message_blocking(None) != b"end":
            writer.write_message(answer)


class Packets:
    """The queues of a burst without a burst: a process that answers every packet."""

    def __init__(self, request: Request) -> None:
        self.requests = fmq.MessageQueue.create(1, QUEUE_BYTES)
        self.results = fmq.MessageQueue.create(1, QUEUE_BYTES)
        self.packet = encode_request(request, [0], measure=False)
        fds = (*self.requests.fds, *self.results.fds)
        described = [queue.descriptor.to_bytes().hex() for queue in (self.requests, self.results)]
        command = [sys.executable, "-m", "benchmarks.burst", "--packets", *described, *map(str, fds)]
        self.process = subprocess.Popen(command, pass_fds=fds, cwd=ROOT)

    async def trip(self) -> None:
        self.requests.write_message(self.packet)
        await fmq.aio.read_message(self.results)

    def close(self) -> None:
        self.requests.write_message(b"end")
        self.process.wait(10)
        self.requests.close()
        self.results.close()


PLACES: dict[str, tuple[set[int], set[int]] | None] = {"": None}
if len(os.sched_getaffinity(0)) > 1:
    _first, _second, *_ = sorted(os.sched_getaffinity(0))
    PLACES |= {
        ", one processor": ({_first}, {_first}),
        ", a processor each": ({_first}, {_second}),
    }
"""Processors of our end and of the other end; None where the kernel puts them."""


NATIVE_MAX = {
    ", one processor": (at_most(0.6), at_most(1.0)),
    ", a processor each": (at_most(1.0), at_most(1.2)),
}
"""By place, the goals of a native burst without and with the runtime."""


def place(where: str, pids: Iterable[int]) -> None:
    """Moves this process and all threads of the other ones."""
    ours, theirs = PLACES[where] or (ALL_PROCESSORS, ALL_PROCESSORS)
    os.sched_setaffinity(0, ours)
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), theirs)


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


def has_litert() -> bool:
    """Whether the device of native round trips can be opened."""
    return importlib.util.find_spec("ai_edge_litert") is not None


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
async def opened_burst(
    model: Model,
    *,
    count: int = 1,
    devices: int = 1,
    pids: set[int] | None = None,
    polling_us: int = 0,
    driver: str = "reference",
) -> AsyncIterator[list[Trip]]:
    """Bursts of the model in driver processes, as calls of one execution each; ``pids`` gets the numbers of the processes."""
    async with anyio.create_task_group() as tasks:
        trips: list[Trip] = []
        opened = [RemoteDevice(driver, driver, tasks) for _ in range(devices)]
        try:
            for device in opened:
                await device.connect()
                if pids is not None and device.pid is not None:
                    pids.add(device.pid)
                prepared = await device.prepare_model(model)
                for _ in range(count):
                    burst = await prepared.configure_execution_burst(
                        controller_polling_us=polling_us, server_polling_us=polling_us
                    )
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


def _p50_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def round_trips(report: Report, kind: str, new_loop: Loop, rounds: int) -> None:
    model = addition()
    echo, queues, packets = Echo(), Queues(), Packets(Pools(model).request)
    try:
        with quiet_collector(), asyncio.Runner(loop_factory=new_loop) as runner:
            blocks = runner.run(_round_trip_blocks(model, echo, queues, packets, rounds))
    finally:
        os.sched_setaffinity(0, ALL_PROCESSORS)
        queues.close()
        echo.close()
        packets.close()
    for where in PLACES:

        def row(name: str, ours: str, peer: str, goal: Goal | None = None, where: str = where) -> None:
            name = f"{name}, p50, {kind}{where}"
            report.add(compare(name, "us", blocks[where, ours], peer, blocks[where, peer], goal))

        row("burst, one operation", "burst", "eventfd echo", at_most(2))
        row("burst, one operation", "burst", "multiprocessing.Queue", at_most(1))
        row("burst, polling", "polling", "eventfd echo", at_most(2) if "each" in where else None)
        row("burst by the runtime", "runtime", "eventfd echo")
        row("burst by the runtime", "runtime", "multiprocessing.Queue", at_most(1))
        if (where, "native") in blocks:
            most, by_runtime = NATIVE_MAX.get(where, (None, None))
            row("native burst", "native", "eventfd echo", most)
            row("native burst by the runtime", "native runtime", "eventfd echo", by_runtime)
        row("limit: packets alone", "packets", "eventfd echo")
        row("limit: operation alone", "operation", "eventfd echo")


async def _round_trip_blocks(
    model: Model, echo: Echo, queues: Queues, packets: Packets, rounds: int
) -> dict[tuple[str, str], list[float]]:
    value = np.zeros((1, 4), np.float32)
    pids = {echo.process.pid, packets.process.pid}
    assert queues.process.pid is not None
    pids.add(queues.process.pid)
    alone = await ReferenceDevice().prepare_model(model)
    arguments = alone.bind(Pools(model).request)
    echo.attach()
    async with (
        opened_burst(model, pids=pids) as (burst,),
        opened_burst(model, pids=pids, polling_us=POLLING_US) as (polling,),
        aionn.open(drivers=["reference"]) as runtime,
    ):
        net = await runtime.compile(model, devices="reference")
        pids.update(
            device.hal.pid
            for device in runtime.devices
            if isinstance(device.hal, RemoteDevice) and device.hal.pid
        )
        async with net.burst() as ours, AsyncExitStack() as stack:

            async def queue() -> float:
                return queues.p50_us()

            async def operation() -> float:
                return _p50_us(lambda: alone.execute_bound(arguments))

            contenders: dict[str, Callable[[], Awaitable[float]]] = {
                "burst": lambda: p50_us(burst),
                "polling": lambda: p50_us(polling),
                "runtime": lambda: p50_us(lambda: ours.execute([value])),
                "eventfd echo": lambda: p50_us(echo.trip),
                "packets": lambda: p50_us(packets.trip),
                "operation": operation,
                "multiprocessing.Queue": queue,
            }
            if has_litert():
                os.environ[NATIVE_VARIABLE] = "1"
                (native,) = await stack.enter_async_context(
                    opened_burst(model, pids=pids, driver="litert-cpu")
                )
                by_litert = await stack.enter_async_context(aionn.open(drivers=["litert-cpu"]))
                compiled = await by_litert.compile(model, devices="litert-cpu")
                pids.update(pid for device in by_litert.devices if (pid := device.pid))
                natively = await stack.enter_async_context(compiled.burst())
                contenders["native"] = lambda: p50_us(native)
                contenders["native runtime"] = lambda: p50_us(lambda: natively.execute([value]))
            names = list(contenders)
            blocks: dict[tuple[str, str], list[float]] = {(w, name): [] for w in PLACES for name in names}
            for where in PLACES:
                place(where, pids)
                for name in names:
                    await contenders[name]()
                for name in alternating(names, rounds):
                    blocks[where, name].append(await contenders[name]())
            place("", pids)
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
        return 1e3 * percentile(times, 0.9)

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


# Two concurrently


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
    if sys.argv[1:2] == ["--packets"]:
        packet_echo(sys.argv[2], sys.argv[3], sys.argv[4:])
        return
    if any(os.environ.get(variable) != "1" for variable in THREAD_VARIABLES):
        # Read when numpy is imported: as in a driver process, so that both engines have one thread.
        environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.burst", *sys.argv[1:]], environment)
    measure(options(__doc__))


if __name__ == "__main__":
    main()
