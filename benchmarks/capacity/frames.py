"""The processor time of a frame of a reservation beside best effort, on a served device: in the application, and in its process.

``python -m benchmarks.capacity.frames [--driver litert-cpu] [--model FILE] [--frames 100] [--blocks 9] [--json] [--quick]`` starts
a server twice, with and without ``AIONN_NATIVE``, and executes one model by a burst, a frame at a time: best effort and frames of a
reservation in alternating blocks, with the same deadlines.

Columns: where it runs natively, kind; processor time of a frame in the application's thread and in all threads of the device's
process, and the wall time, in microseconds, as medians of the blocks. Native calls are made for best effort alone: frames of a
reservation are judged and measured by the queue of the device, and each has a report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np

import aionn
from aionn.hal.callers import FrameReport, frame_of_launch
from aionn.service.wire.scheduling_messages import AskedTime

MS = 1_000_000
START_S_MAX = 60.0
"""Start of a server on a busy machine."""

TERMS = AskedTime(
    name="frames", period_ns=3 * MS, deadline_ns=9000 * MS, jitter_ns=8000 * MS, duration_ns=2 * MS
)
"""Jitter for some thousand frames without a pause: each comes as promised."""

KINDS = ("best effort", "reserved")


class Frame:
    """A frame of the reservation; counts the labels of all."""

    def __init__(self, reservation: int, labels: dict[str, int]) -> None:
        self.reservation = reservation
        self._labels = labels

    def sent(self, now_ns: int) -> None:
        pass

    def reported(self, report: FrameReport, now_ns: int) -> None:
        self._labels[report.label] = self._labels.get(report.label, 0) + 1


def processor_ns(pid: int) -> int:
    """The processor time of all threads of a process."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += int((task / "schedstat").read_text().split()[0])
    return found


async def measured(
    driver: str, model: str, frames: int, blocks: int, *, native: bool
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        command = [sys.executable, "-P", "-m", "aionn", "serve", driver, "--socket", str(path), "--quiet"]
        environment = {**os.environ, "AIONN_NATIVE": str(int(native))}
        server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            with anyio.fail_after(START_S_MAX):
                while not path.exists():
                    if server.poll() is not None:
                        raise RuntimeError(f"the server ended with {server.returncode}")
                    await anyio.sleep(0.01)
            return await alternating(path, server.pid, model, frames, blocks, native=native)
        finally:
            server.kill()
            server.wait()


async def alternating(
    path: Path, pid: int, model: str, frames: int, blocks: int, *, native: bool
) -> list[dict[str, Any]]:
    labels: dict[str, int] = {}
    times: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    async with aionn.open(drivers=[], sockets=[path]) as runtime:
        net = await runtime.compile(model)
        async with net.burst() as burst:
            inputs = [np.zeros(spec.dimensions, spec.dtype) for spec in net.inputs]
            for _ in range(20):
                await burst.execute(inputs)
            reservations = runtime.devices[0].reservations
            assert reservations.shared is not None, "a served device"
            found = await reservations.shared.reserve(TERMS, slot_count=reservations.slot_count)
            plan, buffer = burst._plans[-1], burst._pool.take_free()
            step = plan.plan.steps[0]
            request = buffer.area.request(step.inputs, step.outputs)

            async def execute(frame: Frame | None) -> None:
                token = frame_of_launch.set(frame)
                try:
                    deadline_ns = time.monotonic_ns() + TERMS.deadline_ns
                    launch = plan.opened[0][0].hal.launch(
                        request, buffer.identifiers, deadline_ns=deadline_ns
                    )
                finally:
                    frame_of_launch.reset(token)
                await launch

            for block in range(2 * blocks):
                kind = KINDS[block % 2]
                frame = Frame(found.reserved.reservation, labels) if kind == "reserved" else None
                for _ in range(5):
                    await execute(frame)
                began = time.thread_time_ns(), processor_ns(pid), time.monotonic_ns()
                for _ in range(frames):
                    await execute(frame)
                ended = time.thread_time_ns(), processor_ns(pid), time.monotonic_ns()
                per_frame = [(b - a) / frames / 1e3 for a, b in zip(began, ended, strict=True)]
                times[kind].append((per_frame[0], per_frame[1], per_frame[2]))
    rows = []
    for kind in KINDS:
        client_us, driver_us, wall_us = (
            statistics.median(column) for column in zip(*times[kind], strict=True)
        )
        rows.append(
            {
                "native": native,
                "kind": kind,
                "client_us": client_us,
                "driver_us": driver_us,
                "wall_us": wall_us,
            }
        )
    rows[-1]["labels"] = {label: count for label, count in labels.items() if label}
    return rows


async def main(given: argparse.Namespace) -> None:
    blocks = 3 if given.quick else given.blocks
    rows = []
    for native in (True, False):
        rows += await measured(given.driver, given.model, given.frames, blocks, native=native)
    if given.json:
        for row in rows:
            print(json.dumps(row))
        return
    print("native  kind         client us  driver us   wall us")
    for row in rows:
        print(
            f"{'yes' if row['native'] else 'no':7} {row['kind']:12} {row['client_us']:9.1f} {row['driver_us']:10.1f}"
            f" {row['wall_us']:9.1f}  {row.get('labels') or ''}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--driver", default="litert-cpu")
    parser.add_argument("--model", default="examples/data/digits_float.tflite")
    parser.add_argument("--frames", type=int, default=100, help="of a block")
    parser.add_argument("--blocks", type=int, default=9, help="of each kind")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--quick", action="store_true", help="three blocks of each kind")
    print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    anyio.run(main, parser.parse_args())
