"""The end of a served device under streams of several applications: a drain loses no accepted frame, a death withdraws all."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.errors import DeadObject, DeviceUnavailable
from aionn.runtime.guarantees.guarantee import StreamGuarantee
from aionn.runtime.guarantees.reservations import Measured
from tests.support.mortal_driver import doubled_model

pytestmark = pytest.mark.forked("any")

LIMIT_S = 60

# The jitter is the time that this machine may take, and far more of the deadline is left than frames need on it.
TERMS: dict[str, Any] = {"guarantee": True, "period": 0.1, "deadline": 6.0, "jitter": 3.0}
RARE: dict[str, Any] = {"guarantee": True, "period": 5.0, "deadline": 10.0, "jitter": 5.0}

COUNTING = """
import os
from aionn.drivers.skeleton import SkeletonDevice, SkeletonModel

class CountingModel(SkeletonModel):
    def run(self, inputs, outputs, control):
        os.write(self.device.begun, b"%d\\n" % inputs[0].flat[0])
        return super().run(inputs, outputs, control)

class CountingDevice(SkeletonDevice):
    def __init__(self, name):
        super().__init__(name)
        self.begun = os.open("begun", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def prepare(self, model, *, preference, priority, deadline_ns):
        return CountingModel(self, model, priority)
"""
"""A device that writes the first value of each execution that it begins into a file."""


@contextmanager
def serving(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``aionn serve`` of a counting device in a folder, at the socket ``s``."""
    (folder / "counting.py").write_text(COUNTING)
    command = [sys.executable, "-m", "aionn", "serve", "counting:CountingDevice", "--socket", "s", "--quiet"]
    paths = [str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    server = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    try:
        yield server
    finally:
        server.kill()
        server.wait()


async def until_served(folder: Path) -> Path:
    with anyio.fail_after(LIMIT_S):
        while not (folder / "s").exists():
            await anyio.sleep(0.005)
    return folder / "s"


async def drain_in_the_middle(folder: Path, seed: int) -> None:
    """SIGTERM while two applications stream: each frame that was accepted before the first rejected one of its stream has a result.

    A stream ends with the error of that one. Frames after it may have been accepted: they come over other connections of the burst.
    """
    folder.mkdir()
    last = random.Random(seed).randrange(4, 28)
    results: list[int] = []
    ends: list[str] = []
    with serving(folder) as server:
        path = await until_served(folder)

        async def values(first: int, step: float) -> AsyncIterator[Any]:
            for number in range(first, first + 100):
                if number == last:
                    os.kill(server.pid, signal.SIGTERM)
                yield np.full(1, number, np.float32)
                await anyio.sleep(step)

        async def stream(first: int, step: float, admitted: anyio.Event, other: anyio.Event) -> None:
            async with aionn.open(drivers=[], sockets=[path]) as runtime:
                net = await runtime.compile(doubled_model())
                async with net.burst(slots=61) as burst, burst.stream(values(first, step), **TERMS) as found:
                    admitted.set()
                    await other.wait()
                    with pytest.raises((DeviceUnavailable, DeadObject)) as e:
                        async for result in found:
                            assert result.status == "on_time", result
                            results.append(int(result.outputs[0][0]) // 2)
                    ends.append(f"{type(e.value).__name__}: {e.value}")

        admitted = anyio.Event(), anyio.Event()
        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream, 1, 0.004, *admitted)
                tasks.start_soon(stream, 1001, 0.003, *reversed(admitted))
            assert await anyio.to_thread.run_sync(server.wait) == 0
    begun = [int(line) for line in (folder / "begun").read_text().split()]
    frames = set(begun)
    for first in (1, 1001):
        own = sorted(result for result in results if first <= result < first + 1000)
        assert own == list(range(first, first + len(own))), f"seed {seed}: {own}, {ends}"
        rejected = first + len(own)
        assert rejected not in frames, f"seed {seed}: {rejected} was begun, and has no result: {ends}"
    assert results, f"seed {seed}: it was not in the middle: {ends}"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has streams count with a device time that no machine changes."""

    async def measured(self: StreamGuarantee) -> Measured:
        return Measured(5_000_000, 16)

    monkeypatch.setattr(StreamGuarantee, "_measured", measured)


@pytest.mark.slow
async def test_no_accepted_frame_is_lost_by_a_drain(tmp_path: Path, measured: None) -> None:
    for seed in range(3):
        await drain_in_the_middle(tmp_path / str(seed), seed)


@pytest.mark.long
async def test_no_accepted_frame_is_lost_by_two_hundred_drains(tmp_path: Path, measured: None) -> None:
    for seed in range(200):
        await drain_in_the_middle(tmp_path / str(seed), seed)


async def test_death_of_the_device_withdraws_ten_reservations_of_two_applications(tmp_path: Path) -> None:
    async def silent() -> AsyncIterator[Any]:
        await anyio.sleep_forever()
        yield

    with serving(tmp_path) as server:
        path = await until_served(tmp_path)
        async with (
            aionn.open(drivers=[], sockets=[path]) as first,
            aionn.open(drivers=[], sockets=[path]) as second,
        ):
            streams: list[Any] = []
            bursts: list[Any] = []
            for runtime in (first, second):
                net = await runtime.compile(doubled_model(), recover=True)
                bursts.append(net.burst(slots=3))
                await bursts[-1].__aenter__()
                for number in range(5):
                    streams.append(bursts[-1].stream(silent(), name=f"stream {number}", **RARE))
                    await streams[-1].admit()
            assert [len(r.devices[0].reservations.lines()) for r in (first, second)] == [5, 5]
            server.kill()
            await anyio.to_thread.run_sync(server.wait)
            with anyio.fail_after(LIMIT_S):
                while not all(stream.reservation.end for stream in streams):
                    await anyio.sleep(0.002)
            assert {stream.reservation.end for stream in streams} == {"withdrawn"}
            assert [r.devices[0].reservations.count for r in (first, second)] == [0, 0]
            path.unlink()
            with serving(tmp_path):
                await until_served(tmp_path)
                with anyio.fail_after(LIMIT_S):
                    for stream in streams:
                        await stream.change()
                assert all(stream.reservation.end == "" for stream in streams)
                assert [r.devices[0].reservations.count for r in (first, second)] == [5, 5]
                for burst in bursts:
                    await burst.aclose()
