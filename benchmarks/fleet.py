"""The cost of a network: an execution on a device of a node on loopback, a burst of the same device, and a bare TCP connection.

One process of `aionn serve` has a Unix socket and a port of loopback. In alternating blocks the same request is executed by a burst
over the port, by a burst over the socket, and its bytes are exchanged with a process that answers as many bytes as the result has.

How each figure is taken:
- "remote" is the burst over the port, "local" the burst over the socket: one request after the other, from the call to the result.
- "bare" is the bytes of the request sent by an asyncio protocol to one in another process, which sends as many bytes back as the
  result has.
- The goal compares the median of "remote" with the sum of the medians of "local" and "bare".
- "Ray actor" is a call of an asynchronous actor with the same bytes, "Ray graph" an execution of a compiled graph of one actor;
  both where Ray is installed (extra `ray`), for the size that has a goal.
- "silence" is the time from SIGSTOP of all processes of the server to the error of the last of three pending executions.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.abc
import numpy as np

from aionn.errors import DeadObject
from aionn.fleet.addresses import parse_node
from aionn.fleet.device import NodeDevice
from aionn.hal import Model, OperandType, OperationType
from aionn.hal.pooled_request import PooledRequest
from aionn.models.builder import GraphBuilder
from aionn.platform.python_process import python_command, python_environment
from aionn.service.client.device import RemoteDevice
from benchmarks.rows import Options, Report, alternating, at_most, compare, options, single

SIZES = (256, 20_000, 150_000, 600_000)
RESULT_BYTES = 256
GOAL_BYTES = 150_000
BLOCKS, BLOCKS_QUICK = 12, 4
CALLS = 60
SILENCES, SILENCES_QUICK = 10, 3
START_S_MAX = 60.0

ECHO = """
import asyncio, sys
size, answer = int(sys.argv[1]), bytes(int(sys.argv[2]))
class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.count = transport, 0
    def data_received(self, data):
        self.count += len(data)
        if self.count >= size:
            self.count -= size
            self.transport.write(answer)
async def main():
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


class Server(NamedTuple):
    """A running server: its process, its socket and its address."""

    process: subprocess.Popen[str]
    socket: Path
    address: str


@contextmanager
def serving() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "device"
        command = python_command(
            "aionn.cli.main", "serve", "reference", "--socket", str(path), "--listen", "127.0.0.1:0"
        )
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=python_environment())
        assert process.stdout is not None
        try:
            select.select([process.stdout], [], [], START_S_MAX)
            yield Server(process, path, process.stdout.readline().partition(";")[0].split(" and ")[-1])
        finally:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGINT)
            process.wait()
            process.stdout.close()


def slice_model(size_bytes: int) -> Model:
    """The first bytes of a vector: next to nothing to compute."""
    graph = GraphBuilder()
    values = graph.input(OperandType.TENSOR_QUANT8_ASYMM, (size_bytes,), scale=1.0)
    begin, size = graph.constant(np.zeros(1, np.int32)), graph.constant(np.full(1, RESULT_BYTES, np.int32))
    result = graph.variable(OperandType.TENSOR_QUANT8_ASYMM, (RESULT_BYTES,), scale=1.0)
    return graph.build([graph.result(OperationType.SLICE, [values, begin, size], result)])


class Bare(asyncio.Protocol):
    """Exchanges bytes with a process that does nothing else."""

    def __init__(self, size_bytes: int) -> None:
        self._request = bytes(size_bytes)
        self._count = 0
        self._answered: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._count += len(data)
        if self._count >= RESULT_BYTES and self._answered is not None:
            self._count -= RESULT_BYTES
            self._answered.set_result(None)

    async def exchange(self) -> None:
        assert self.transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self.transport.write(self._request)
        await self._answered


class Contender:
    """One way, and its times."""

    def __init__(self, name: str, call: Callable[[], Awaitable[object]]) -> None:
        self.name = name
        self._call = call
        self.medians_us: list[float] = []

    async def block(self) -> None:
        times_us = []
        for _ in range(CALLS):
            began_ns = time.perf_counter_ns()
            await self._call()
            times_us.append((time.perf_counter_ns() - began_ns) / 1e3)
        self.medians_us.append(statistics.median(times_us))


class Answers:
    """An actor of Ray that answers as many bytes as the result has."""

    async def answer(self, request: bytes) -> bytes:
        return bytes(RESULT_BYTES)


class GraphAnswers:
    """The same for a compiled graph, whose actors have no event loop."""

    def answer(self, request: bytes) -> bytes:
        return bytes(RESULT_BYTES)


@contextmanager
def ray_contenders(size_bytes: int) -> Iterator[list[Contender]]:
    """The ways of Ray; none where it is not installed."""
    if find_spec("ray") is None:
        yield []
        return
    import ray
    from ray.dag import InputNode

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    try:
        request = bytes(size_bytes)
        actor, behind = ray.remote(Answers).remote(), ray.remote(GraphAnswers).remote()
        with InputNode() as given:
            graph: Any = behind.answer.bind(given).experimental_compile(enable_asyncio=True)

        async def execute() -> None:
            await (await graph.execute_async(request))

        yield [
            Contender("Ray actor", lambda: actor.answer.remote(request)),
            Contender("Ray graph", execute),
        ]
        graph.teardown()
    finally:
        ray.shutdown()


async def measure_size(report: Report, chosen: Options, server: Server, size_bytes: int) -> None:
    echo = subprocess.Popen(
        [sys.executable, "-c", ECHO, str(size_bytes), str(RESULT_BYTES)], stdout=subprocess.PIPE, text=True
    )
    assert echo.stdout is not None
    port = int(echo.stdout.readline())
    remote = NodeDevice(parse_node(f"{server.address}?silence_ms=60000"))
    model = slice_model(size_bytes)
    try:
        async with anyio.create_task_group() as tasks:
            local = RemoteDevice("reference", "local", tasks, path=server.socket)
            bare = Bare(size_bytes)
            await asyncio.get_running_loop().create_connection(lambda: bare, "127.0.0.1", port)
            bursts = []
            for device in (remote, local):
                prepared = await device.prepare_model(model)
                bursts.append(await prepared.configure_execution_burst())
            peers = ray_contenders(size_bytes) if size_bytes == GOAL_BYTES else nullcontext([])
            with PooledRequest(model) as request, peers as others:
                contenders = [
                    Contender("remote", lambda: bursts[0].execute_synchronously(request.request, [0])),
                    Contender("local", lambda: bursts[1].execute_synchronously(request.request, [0])),
                    Contender("bare", bare.exchange),
                    *others,
                ]
                for contender in contenders:
                    await contender.block()
                    contender.medians_us.clear()
                for contender in alternating(contenders, BLOCKS_QUICK if chosen.quick else BLOCKS):
                    await contender.block()
            assert bare.transport is not None
            bare.transport.close()
            await local.aclose()
    finally:
        await remote.aclose()
        echo.kill()
        echo.wait()
        echo.stdout.close()
    ours, here, net, *peers_us = (contender.medians_us for contender in contenders)
    total = [a + b for a, b in zip(here, net, strict=True)]
    goal = at_most(1.3) if size_bytes == GOAL_BYTES else None
    report.add(
        compare(f"{size_bytes} B: remote, p50", "us", ours, "local + bare", total, goal),
        single(f"{size_bytes} B: local, p50", "us", here),
        single(f"{size_bytes} B: bare, p50", "us", net),
    )
    for contender, bound, theirs in zip(contenders[3:], (0.15, 0.5), peers_us):
        name = f"{size_bytes} B: remote beside {contender.name}, p50"
        report.add(compare(name, "us", ours, contender.name, theirs, at_most(bound)))


async def silence_ms(server: Server) -> float:
    """The time from SIGSTOP of all processes to the last error."""
    device = NodeDevice(parse_node(server.address))
    threads = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    children = [child for file in threads for child in file.read_text().split()]
    pids = [server.process.pid, *map(int, children)]
    ended_s: list[float] = []
    try:
        prepared = await device.prepare_model(slice_model(20_000))

        async def execute() -> None:
            with PooledRequest(prepared.model) as request:
                try:
                    while True:
                        await prepared.execute_synchronously(request.request)
                except DeadObject:
                    ended_s.append(time.perf_counter())

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(execute)
            await anyio.sleep(0.3)
            stopped_s = time.perf_counter()
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        await device.aclose()
    return 1e3 * (max(ended_s) - stopped_s)


async def measure(report: Report, chosen: Options) -> None:
    with serving() as server:
        for size_bytes in SIZES:
            await measure_size(report, chosen, server, size_bytes)
        silences = [await silence_ms(server) for _ in range(SILENCES_QUICK if chosen.quick else SILENCES)]
    report.add(
        single("SIGSTOP to the last error, p50", "ms", silences),
        single("SIGSTOP to the last error, worst", "ms", [max(silences)], at_most(250.0)),
    )


def main() -> None:
    chosen = options(__doc__)
    report = Report(chosen)
    anyio.run(measure, report, chosen)


if __name__ == "__main__":
    main()
