"""Streams with a guarantee on a served device: applications in several processes compete for its time."""

import datetime
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

import aionn
from aionn.drivers.reference import ReferenceDevice
from aionn.service.host.admission import ClientLimits
from aionn.service.host.process import listen
from aionn.testing.models import identity

pytestmark = pytest.mark.forked("any")

ONE = np.ones(1, np.float32)
LIMIT_S = 60

TERMS = {"guarantee": True, "period": 5.0, "jitter": 0.05}

APPLICATION = """
    import sys
    import anyio
    import numpy as np
    import aionn
    from aionn.runtime.guarantees.guarantee import StreamGuarantee
    from aionn.runtime.guarantees.arrivals import Measured
    from aionn.testing.models import identity

    async def long(self):
        return Measured(3_000_000_000, 16)

    StreamGuarantee._measured = long

    async def camera():
        yield np.ones(1, np.float32)
        await anyio.sleep_forever()

    async def command():
        assert await anyio.to_thread.run_sync(sys.stdin.readline)

    async def admitted(burst):
        while True:  # The reservation that others have released may still be there.
            stream = burst.stream(camera(), guarantee=True, period=5.0, jitter=0.05, name="theirs")
            try:
                await stream.admit()
            except aionn.NotAdmitted:
                await anyio.sleep(0.01)
            else:
                return stream

    async def main():
        async with aionn.open(drivers=[], sockets=[sys.argv[1]]) as runtime:
            net = await runtime.compile(identity())
            async with net.burst() as burst:
                for _ in range(2):
                    async with await admitted(burst) as results:
                        async for result in results:
                            print(result.status, flush=True)
                            break
                        await command()
                    print("ended", flush=True)
                    await command()

    anyio.run(main)
"""


async def camera(count=1):
    for _ in range(count):
        yield ONE


@asynccontextmanager
async def served(folder, share=1.0):
    """The socket of a device with one slot, of which each process may reserve a share; and the scope that serves it."""
    device = ReferenceDevice()
    device.info = msgspec.structs.replace(device.info, slots=1)
    path, started, serving = folder / "device.sock", anyio.Event(), anyio.CancelScope()

    async def serve():
        with serving:
            await listen(
                device,
                path,
                limits=ClientLimits(reserved_share=share, reserved_share_per_user=1.0),
                started=started,
            )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        await started.wait()
        yield path, serving
        serving.cancel()
    await device.aclose()


@pytest.fixture
def measured_as(monkeypatch):
    """Has streams count with a device time that no machine changes, and with no time of the event loop."""
    from aionn.runtime.guarantees.arrivals import Measured
    from aionn.runtime.guarantees.guarantee import StreamGuarantee

    def measure(duration_s):
        async def measured(self):
            return Measured(round(duration_s * 1e9), 16)

        monkeypatch.setattr(StreamGuarantee, "_measured", measured)
        monkeypatch.setattr("aionn.runtime.guarantees.guarantee.loop_ledger", lambda: None)

    return measure


async def admitted(burst):
    """Whether a stream is admitted now; it ends then."""
    try:
        async with burst.stream(camera(), name="ours", **TERMS) as results:
            assert [result.status async for result in results] == ["on_time"]
    except aionn.NotAdmitted:
        return False
    return True


async def until_admitted(burst):
    with anyio.fail_after(LIMIT_S):
        while not await admitted(burst):
            await anyio.sleep(0.01)


async def reserved(burst, **terms):
    """A stream that is admitted as soon as there is room for it."""
    with anyio.fail_after(LIMIT_S):
        while True:
            stream = burst.stream(camera(), **TERMS | terms)
            try:
                await stream.admit()
            except aionn.NotAdmitted:
                await anyio.sleep(0.01)
            else:
                return stream


async def test_second_application_is_admitted_when_the_first_releases_or_is_killed(
    tmp_path, measured_as, repository: Path
):
    measured_as(1.9)
    async with served(tmp_path) as (path, _):
        await compete(path, repository)


async def compete(path, repository):
    command = [sys.executable, "-c", textwrap.dedent(APPLICATION), str(path)]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    other = await anyio.open_process(command, env=environment, stdin=subprocess.PIPE, stderr=None)

    lines = BufferedByteReceiveStream(other.stdout)

    async def line():
        with anyio.fail_after(LIMIT_S):
            return await lines.receive_until(b"\n", 80)

    try:
        async with aionn.open(drivers=[], sockets=[path]) as runtime:
            net = await runtime.compile(identity())
            async with net.burst() as burst:
                assert await line() == b"on_time"
                with pytest.raises(aionn.NotAdmitted) as e:
                    await burst.stream(camera(), name="ours", **TERMS).admit()
                assert e.value.would_fit.period_ns is not None and "theirs" not in str(e.value)
                assert runtime.devices[0].reservations.count == 0
                best = burst.stream(camera(), **{**TERMS, "guarantee": "best"})
                async with best as results:
                    assert results.reservation is None and results.refusal is not None
                await other.stdin.send(b"\n")
                assert await line() == b"ended"
                await until_admitted(burst)
                await other.stdin.send(b"\n")
                assert await line() == b"on_time"
                assert not await admitted(burst)
                other.send_signal(signal.SIGKILL)
                await other.wait()
                await until_admitted(burst)
    finally:
        if other.returncode is None:
            other.kill()
        await other.aclose()


async def test_streams_of_two_runtimes_share_the_ledger(tmp_path, measured_as):
    measured_as(3.0)
    async with (
        served(tmp_path) as (path, _),
        aionn.open(drivers=[], sockets=[path]) as first,
        aionn.open(drivers=[], sockets=[path]) as second,
    ):
        nets = [await runtime.compile(identity()) for runtime in (first, second)]
        async with nets[0].burst() as mine, nets[1].burst() as theirs:
            async with mine.stream(camera(), **TERMS) as results:
                assert (
                    results.reservation.slack_ns == 1_949_000_000
                )  # The way to the device takes 1 ms at most.
                assert not await admitted(theirs)
                measured_as(1.0)
                await results.change()  # Terms that demand less replace the old ones.
                await until_admitted(theirs)
                measured_as(3.0)
                async with await reserved(theirs, period=datetime.timedelta(seconds=20)):
                    with pytest.raises(aionn.NotAdmitted):
                        await results.change()
                assert results.reservation.duration_ns == 1_000_000_000
                measured_as(2.0)
                with anyio.fail_after(LIMIT_S):
                    while results.reservation.duration_ns != 2_000_000_000:
                        try:
                            await results.change(deadline=4.0)
                        except aionn.NotAdmitted:
                            await anyio.sleep(0.01)
                assert first.devices[0].reservations.count == 1
            assert first.devices[0].reservations.count == 0
            measured_as(4.5)
            await until_admitted(theirs)


async def test_end_of_the_server_withdraws_the_reservations(tmp_path, measured_as):
    measured_as(0.5)
    async with served(tmp_path) as (path, serving), aionn.open(drivers=[], sockets=[path]) as runtime:
        net = await runtime.compile(identity())
        async with net.burst() as burst, burst.stream(camera(), **TERMS) as results:
            assert results.reservation.end == ""
            serving.cancel()
            with anyio.fail_after(LIMIT_S):
                while not results.reservation.end:
                    await anyio.sleep(0.002)
                assert results.reservation.end == "withdrawn"
                assert runtime.devices[0].reservations.count == 0
