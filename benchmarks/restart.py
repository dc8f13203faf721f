"""The cost of the death of a driver process: until the application has the error, and until it has the next answer.

Both contenders are runtimes with the reference driver, open in one application, one with spare processes and one without. In turns
the driver process of one is killed while a burst executes the shipped digits model.

How each figure is taken:
- "error": from the kill until the pending execution raises DEAD_OBJECT. The kernel needs most of it: it takes the process's memory
  back before it closes the socket. "hang-up" is that part: until a thread that only waits for it has seen it.
- "answer": from the kill until the model is compiled again and an execution of it has been answered. It asks immediately.
- Before each kill the device has served for longer than what counts as a short life, and its spare process is ready. How long a
  device must have served before it gets one is shortened, so that thirty deaths take minutes.
- p99 of thirty deaths is the worst.
- "memory": the pages of the spare process alone (Private_Clean and Private_Dirty of smaps_rollup); "start" is the processor
  time that it took until it was ready.
"""

from __future__ import annotations

import os
import select
import signal
import statistics
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import numpy as np

import aionn
from aionn.service.client import spare
from aionn.service.client.device import RemoteDevice
from benchmarks.rows import Options, Report, alternating, at_most, compare, options, single

MODEL = Path(__file__).resolve().parents[1] / "examples" / "data" / "digits_float.tflite"
DEATHS, DEATHS_QUICK = 30, 6
LIFE_S = 1.2
"""Time for which a process serves before it is killed: longer than a short life."""

READY_S_MAX = 120.0
ANSWER_MS_MAX = 300.0


class HangUp:
    """A thread that waits for nothing but the end of a driver process's socket."""

    def __init__(self, device: RemoteDevice) -> None:
        assert device._connection is not None
        self._sock = device._connection.peer.socket.dup()
        self._seen_s = 0.0
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLRDHUP)
        poller.poll()
        self._seen_s = time.perf_counter()

    def seen_s(self) -> float:
        self._thread.join()
        self._sock.close()
        return self._seen_s


class Contender:
    """A runtime whose driver process is killed again and again."""

    def __init__(self, runtime: aionn.Runtime, has_spares: bool) -> None:
        device = runtime.devices[0].hal
        assert isinstance(device, RemoteDevice)
        self._runtime, self._device, self._has_spares = runtime, device, has_spares
        self._value = np.zeros((1, 49, 40, 1), np.float32)
        self.errors_ms: list[float] = []
        self.answers_ms: list[float] = []
        self.hang_ups_ms: list[float] = []
        self.memories_mb: list[float] = []
        self.starts_ms: list[float] = []

    async def die(self) -> None:
        net = await self._runtime.compile(MODEL)
        await anyio.sleep(LIFE_S)
        await self._have_spare()
        errors_s: list[float] = []
        hang_up = HangUp(self._device)
        async with net.burst() as burst, anyio.create_task_group() as tasks:

            async def execute() -> None:
                try:
                    while True:
                        await burst.execute([self._value])
                except aionn.DeadObject:
                    errors_s.append(time.perf_counter())

            tasks.start_soon(execute)
            await anyio.sleep(0.05)
            pid = self._device.pid
            assert pid is not None
            killed_s = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
        await (await self._runtime.compile(MODEL)).execute([self._value])
        self.answers_ms.append(1e3 * (time.perf_counter() - killed_s))
        self.errors_ms.append(1e3 * (errors_s[0] - killed_s))
        self.hang_ups_ms.append(1e3 * (hang_up.seen_s() - killed_s))

    async def _have_spare(self) -> None:
        if not self._has_spares:
            return
        with anyio.fail_after(READY_S_MAX):
            while (pid := self._device.spare_pid) is None:
                await anyio.sleep(0.02)
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        self.memories_mb.append(
            sum(int(line.split()[1]) for line in rollup if line.startswith("Private_")) / 1024
        )
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        self.starts_ms.append(1e3 * sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"))


async def measure(report: Report, chosen: Options) -> None:
    spare.SERVED_S, spare.QUIET_S_MAX = 0.1, 0.1
    async with AsyncExitStack() as stack:
        contenders = []
        for has_spares in (True, False):
            runtime = aionn.open(drivers=["reference"], spare_processes=has_spares)
            contenders.append(Contender(await stack.enter_async_context(runtime), has_spares))
        for contender in alternating(contenders, DEATHS_QUICK if chosen.quick else DEATHS):
            await contender.die()
    ours, peers = contenders
    report.add(
        compare("death to error, p50", "ms", ours.errors_ms, "without spare", peers.errors_ms),
        single("death to hang-up, p50", "ms", ours.hang_ups_ms + peers.hang_ups_ms),
        compare("death to error, p99", "ms", [max(ours.errors_ms)], "without spare", [max(peers.errors_ms)]),
        compare("death to answer, p50", "ms", ours.answers_ms, "without spare", peers.answers_ms),
        compare(
            "death to answer, p99", "ms", [max(ours.answers_ms)], "without spare", [max(peers.answers_ms)]
        ),
        single("death to answer, p50", "ms", [statistics.median(ours.answers_ms)], at_most(ANSWER_MS_MAX)),
        single("spare process: memory", "MB", ours.memories_mb),
        single("spare process: start", "ms", ours.starts_ms),
    )


def main() -> None:
    chosen = options(__doc__)
    report = Report(chosen)
    anyio.run(measure, report, chosen)


if __name__ == "__main__":
    main()
