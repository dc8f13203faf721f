"""The cost of the Open Inference Protocol: a model behind gRPC, a bare gRPC echo, and a burst of the same model.

The model copies its input, so that next to nothing is computed. A process serves it by `aionn.oip`, its device is the reference
driver in a process of its own. Another process answers the same bytes by `grpc.aio` without looking at them. In alternating blocks
the client, one channel of `grpc.aio` to each, sends the same request to both; and a burst of this process executes it.

How each figure is taken:
- "unary" is the time from the call to the answer, one call after the other; "echo" the same for the bare server.
- "burst" is the time of `Burst.execute` in this process, whose device is a driver process of the same kind.
- "stream" is a request by `ModelStreamInfer`, written and answered one after the other.
- "freed" is the time from the client's DEADLINE_EXCEEDED to the free place at the server, with both in this process.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import grpc
import grpc.aio
import numpy as np

import aionn
from aionn.oip import protobuf as pb
from aionn.oip.door import Door
from aionn.oip.grpc_server import SERVICE, GrpcServer
from aionn.oip.models import ServedModel
from aionn.platform.python_process import python_environment
from aionn.testing import models
from benchmarks.rows import Options, Report, alternating, at_most, compare, options, single

SIZES = (256, 20_000, 150_000)
BLOCKS, BLOCKS_QUICK = 16, 6
CALLS = 60
DEADLINES, DEADLINES_QUICK = 50, 10
START_S_MAX = 60.0

SERVER = """
import sys, anyio, aionn
from aionn.oip.models import ServedModel
from aionn.oip.process import serving
from aionn.testing import models
async def main():
    async with aionn.open(drivers=["reference"]) as runtime:
        net = await runtime.compile(models.identity((int(sys.argv[1]) // 4,)))
        async with net.burst(slots=64) as burst:
            async with serving({"copy": ServedModel("copy", net, "test", burst)}) as (_, port, _):
                print(port, flush=True)
                await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
anyio.run(main)
"""

ECHO = """
import sys, asyncio, grpc, grpc.aio
answer = bytes(int(sys.argv[1]) + 64)
async def echo(message, context):
    return answer
async def main():
    server = grpc.aio.server()
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)
asyncio.run(main())
"""


def infer_message(values: np.ndarray[Any, Any], model: str = "copy", name: str = "input0") -> bytes:
    """A `ModelInferRequest`."""
    tensor = [*pb.view_field(1, name), *pb.view_field(2, "FP32"), pb.packed_field(3, values.shape)]
    pieces = [
        *pb.view_field(1, model),
        *pb.view_field(5, b"".join(tensor)),
        *pb.view_field(7, values.tobytes()),
    ]
    return b"".join(pieces)


@contextmanager
def process(code: str, size_bytes: int) -> Iterator[int]:
    """A server; gives its port."""
    running = subprocess.Popen(
        [sys.executable, "-c", code, str(size_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=python_environment(),
    )
    assert running.stdin is not None and running.stdout is not None
    try:
        yield int(running.stdout.readline())
    finally:
        running.stdin.close()
        running.wait(START_S_MAX)
        running.stdout.close()


class Contender:
    """One way, and the medians of its blocks."""

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        self._call = call
        self.medians_us: list[float] = []

    async def block(self) -> None:
        times_us = []
        for _ in range(CALLS):
            began_ns = time.perf_counter_ns()
            await self._call()
            times_us.append((time.perf_counter_ns() - began_ns) / 1e3)
        self.medians_us.append(statistics.median(times_us))


async def measure_size(report: Report, chosen: Options, size_bytes: int) -> None:
    values = np.ones(size_bytes // 4, np.float32)
    message = infer_message(values)
    with process(SERVER, size_bytes) as port, process(ECHO, size_bytes) as echo_port:
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{echo_port}") as echo_channel,
            aionn.open(drivers=["reference"]) as runtime,
        ):
            net = await runtime.compile(models.identity(values.shape))
            async with net.burst() as burst:
                unary = channel.unary_unary(f"/{SERVICE}/ModelInfer")
                echo = echo_channel.unary_unary(f"/{SERVICE}/ModelInfer")
                stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()

                async def streamed() -> None:
                    await stream.write(message)
                    await stream.read()

                contenders = [
                    Contender(lambda: unary(message)),
                    Contender(lambda: echo(message)),
                    Contender(streamed),
                    Contender(lambda: burst.execute([values])),
                ]
                for contender in contenders:
                    await contender.block()
                    contender.medians_us.clear()
                for contender in alternating(contenders, BLOCKS_QUICK if chosen.quick else BLOCKS):
                    await contender.block()
                stream.cancel()
    ours, bare, by_stream, by_burst = (contender.medians_us for contender in contenders)
    goal = at_most(1.25) if size_bytes == 256 else None
    report.add(
        compare(f"{size_bytes} B: unary, p50", "us", ours, "echo", bare, goal),
        compare(f"{size_bytes} B: unary, p50", "us", ours, "burst", by_burst),
        single(f"{size_bytes} B: stream, p50", "us", by_stream),
    )


class Endless:
    """A model that never ends."""

    inputs = outputs = (aionn.TensorSpec("x", int(aionn.hal.OperandType.TENSOR_FLOAT32), (64,)),)

    async def execute(self, inputs: Any, **more: Any) -> Any:
        await anyio.sleep_forever()
        return SimpleNamespace(outputs=inputs)


async def freed_ms(report: Report, chosen: Options) -> None:
    net: Any = Endless()
    door = Door({"endless": ServedModel("endless", net, "test")})
    server = GrpcServer(door, "127.0.0.1:0")
    port = await server.start()
    times_ms = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        message = infer_message(np.ones(64, np.float32), "endless", "x")
        for _ in range(DEADLINES_QUICK if chosen.quick else DEADLINES):
            try:
                await infer(message, timeout=0.05)
            except grpc.aio.AioRpcError:
                began_ns = time.perf_counter_ns()
            while door.under_way:
                await anyio.lowlevel.checkpoint()
            times_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
    await server.stop()
    report.add(single("deadline of the client to the free place, p50", "ms", times_ms, at_most(5.0)))


async def measure(report: Report, chosen: Options) -> None:
    for size_bytes in SIZES:
        await measure_size(report, chosen, size_bytes)
    await freed_ms(report, chosen)


def main() -> None:
    chosen = options(__doc__)
    report = Report(chosen)
    anyio.run(measure, report, chosen)


if __name__ == "__main__":
    main()
