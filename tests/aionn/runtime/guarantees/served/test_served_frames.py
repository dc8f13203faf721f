"""Frames of streams with a guarantee on a served device: its process orders and measures them, and applications get its labels."""

import datetime
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest

import aionn
from aionn.platform.stalls import NO_STALLS
from aionn.service.host.admission import ClientLimits
from aionn.service.host.process import listen
from aionn.testing.models import identity
from tests.aionn.service.reservations.held_device import LIMIT_S, HeldDevice

pytestmark = pytest.mark.forked("any")

OTHER_APPLICATION = """
    import sys
    import anyio
    import numpy as np
    import aionn
    from aionn.testing.models import identity

    async def main():
        async with aionn.open(drivers=[], sockets=[sys.argv[1]]) as runtime:
            net = await runtime.compile(identity())
            async with net.burst() as burst:
                await burst.execute([np.full(1, 7, np.float32)])
        print("ended", flush=True)

    anyio.run(main)
"""


@asynccontextmanager
async def served(path, device):
    started, serving = anyio.Event(), anyio.CancelScope()

    async def serve():
        with serving:
            await listen(
                device,
                path,
                limits=ClientLimits(reserved_share=1.0, reserved_share_per_user=1.0),
                started=started,
            )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        await started.wait()
        yield
        serving.cancel()
    await device.aclose()


@pytest.fixture
def measured_as(monkeypatch):
    """Has streams count with a device time that no machine changes."""
    from aionn.runtime.guarantees.arrivals import Measured
    from aionn.runtime.guarantees.guarantee import StreamGuarantee

    def measure(duration_s):
        async def measured(self):
            return Measured(round(duration_s * 1e9), 16)

        monkeypatch.setattr(StreamGuarantee, "_measured", measured)

    return measure


@pytest.fixture(autouse=True)
def machine_without_stalls(monkeypatch):
    """A stall of this machine would be the cause of a frame's loss, in place of the one that a test makes."""
    monkeypatch.setattr("aionn.runtime.guarantees.guarantee.stalls_of_loop", lambda: NO_STALLS)


async def camera(*values):
    for value in values:
        yield np.full(1, value, np.float32)


async def until(condition):
    with anyio.fail_after(LIMIT_S):
        while not condition():
            await anyio.sleep(0.002)


async def test_frame_that_another_application_blocks_is_explained_by_that(tmp_path, measured_as, repository):
    measured_as(0.005)
    device, path = HeldDevice(), tmp_path / "device.sock"
    device.hold(7)
    command = [sys.executable, "-c", textwrap.dedent(OTHER_APPLICATION), str(path)]
    async with served(path, device), aionn.open(drivers=[], sockets=[path]) as runtime:
        net = await runtime.compile(identity())
        async with net.burst() as burst:
            # The jitter is the time that this machine may take to the queue of the device.
            terms = {"guarantee": True, "period": 5.0, "deadline": 0.4, "jitter": 0.3}
            async with burst.stream(camera(3), **terms) as results:
                async with await anyio.open_process(
                    command, cwd=repository, stdin=subprocess.DEVNULL, stderr=None
                ) as other:
                    await device.has_begun(7)
                    assert [result.status async for result in results] == ["dropped"]
                    device.let_go(7)
                    await until(lambda: results.statistics().blocked)
                    assert await other.wait() == 0
                text = results.explain()
                assert "1 frames, 1 blocked (1 by executions of other applications)" in text, text
                assert device.began == [7]


async def test_frames_beyond_the_bursts_of_the_device_wait_in_its_queue(tmp_path, measured_as):
    measured_as(0.01)
    device, path = HeldDevice(), tmp_path / "device.sock"
    device.hold(1, 2, 3)  # The first one comes last, perhaps: its burst is asked for its memory.
    async with served(path, device), aionn.open(drivers=[], sockets=[path]) as runtime:
        net = await runtime.compile(identity())
        async with net.burst(slots=8) as burst:
            terms = {
                "guarantee": True,
                "period": 5.0,
                "deadline": datetime.timedelta(seconds=15),
                "jitter": 14.0,
            }
            async with burst.stream(camera(1, 2, 3), **terms) as results:
                statuses = []

                async def consume():
                    statuses.extend([result.status async for result in results])

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(consume)
                    await device.waits(2)
                    assert runtime.devices[0].explain().count("at the device") == 3
                    device.let_go(1, 2, 3)
                assert statuses == ["on_time"] * 3 and sorted(device.began) == [1, 2, 3]
                assert results.statistics().early == results.statistics().withdrawn == 0


async def test_overrun_is_what_the_device_has_measured(tmp_path, measured_as):
    measured_as(0.02)
    device, path = HeldDevice(), tmp_path / "device.sock"
    device.hold(1)
    async with served(path, device), aionn.open(drivers=[], sockets=[path]) as runtime:
        net = await runtime.compile(identity())
        async with net.burst(slots=8) as burst, net.burst() as best_effort:
            terms = {
                "guarantee": True,
                "period": 5.0,
                "deadline": datetime.timedelta(seconds=15),
                "jitter": 14.0,
            }
            async with burst.stream(camera(1), **terms) as long, burst.stream(camera(2), **terms) as waits:
                found = {}

                async def consume(name, results):
                    found[name] = [(result.status, result.label) async for result in results]

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(consume, "long", long)
                    await device.has_begun(1)
                    tasks.start_soon(consume, "waits", waits)
                    await device.waits(1)
                    await anyio.sleep(0.03)
                    device.let_go(1)
                # It has waited for longer than its duration, and has not had its slot for that.
                assert found["long"] == [("on_time", "overran")]
                assert found["waits"][0][0] == "on_time"
                assert long.statistics().overran == 1
                await best_effort.execute([np.ones(1, np.float32)])


async def test_reservations_of_two_devices_have_their_own_numbers(tmp_path, measured_as):
    measured_as(0.5)
    devices = [HeldDevice("first"), HeldDevice("second")]
    paths = [tmp_path / "first.sock", tmp_path / "second.sock"]
    async with (
        served(paths[0], devices[0]),
        served(paths[1], devices[1]),
        aionn.open(drivers=[], sockets=paths) as runtime,
    ):
        nets = [await runtime.compile(identity(), devices=device.name) for device in runtime.devices]
        terms = {"guarantee": True, "period": 5.0, "jitter": 0.5}
        async with nets[0].burst() as first, nets[1].burst() as second:
            async with first.stream(camera(1), name="gone", **terms) as results:
                assert [(r.status, r.label) async for r in results] == [("on_time", None)]
            streams = [burst.stream(camera(2), **terms) for burst in (first, second)]
            for stream in streams:
                async with stream as results:
                    assert [(r.status, r.label) async for r in results] == [("on_time", None)]
        assert [device.began for device in devices] == [[1, 2], [2]]
