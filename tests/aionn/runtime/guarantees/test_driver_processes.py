"""Streams with a guarantee on a driver process: the process dies, and nothing stays reserved."""

import contextlib
import os
import signal

import anyio
import numpy as np
import pytest

import aionn
from aionn.testing.models import identity

ONE = np.ones(1, np.float32)
LIMIT_S = 20


async def camera(count, pid=None):
    """Frames at 100 Hz; the driver process is killed before the third one."""
    for index in range(count):
        if index == 2 and pid is not None:
            os.kill(pid, signal.SIGKILL)
        yield ONE
        await anyio.sleep(0.01)


@pytest.mark.parametrize("recover", [False, True])
async def test_death_of_the_process_withdraws_the_reservation(recover):
    async with aionn.open(drivers=["reference"]) as runtime:
        device = runtime.devices[0]
        net = await runtime.compile(identity(), recover=recover)
        terms = {"guarantee": True, "period": 5.0, "jitter": 4.0}
        with anyio.fail_after(LIMIT_S):
            async with net.burst() as burst, burst.stream(camera(9, device.pid), **terms) as results:
                assert device.reservations.count == 1 and results.reservation.timings == 16
                seen = []
                with pytest.raises(aionn.DeadObject) if not recover else anyio.CancelScope():
                    async for result in results:
                        seen.append((result.status, result.label))
                assert seen[0][0] == "on_time"
                assert results.reservation.end == "withdrawn" and device.reservations.count == 0
                if recover:
                    assert "lost" in [status for status, _ in seen] and seen[-1][1] == "withdrawn"
            again = await runtime.compile(identity())
            async with again.burst() as burst, burst.stream(camera(2), **terms) as results:
                assert [result.status async for result in results] == ["on_time"] * 2
        assert device.reservations.count == 0
        assert device.explain() == "\n".join(f"slot {i}: free" for i in range(device.info.slots))


@pytest.mark.parametrize("recover", [False, True])
async def test_threads_that_execute_the_frames_are_those_of_the_driver_process(recover):
    """Also of the process that replaces a dead one."""
    async with aionn.open(drivers=["reference"]) as runtime:
        device = runtime.devices[0]
        net = await runtime.compile(identity(), recover=recover)
        with anyio.fail_after(LIMIT_S):
            async with net.burst(slots=device.info.slots) as burst:
                pids = []
                for _ in range(1 + recover):
                    await burst.execute([ONE])
                    found = burst._plans[-1].executing_threads()
                    pids.append(device.pid)
                    assert len(found) == device.info.slots
                    tasks = {int(name) for name in os.listdir(f"/proc/{device.pid}/task")}
                    assert set(found) <= tasks - {device.pid}
                    if recover and len(pids) == 1:
                        os.kill(device.pid, signal.SIGKILL)
                        while device.pid in (None, pids[0]):
                            with contextlib.suppress(aionn.DeadObject):
                                await burst.execute([ONE])
    assert len(set(pids)) == 1 + recover
