"""Clients that misuse reservations of a served device: others keep their frames, and nothing stays reserved."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from aionn.errors import DeadObject, NotAdmitted
from aionn.scheduler.ledger import Ledger
from aionn.service.host.admission import ClientLimits
from aionn.service.wire.scheduling_messages import AskedTime
from tests.aionn.service.reservations.held_device import LIMIT_S, HeldDevice
from tests.aionn.service.reservations.test_frames_of_clients import Application, Frame, ended

pytestmark = pytest.mark.forked("any")

MS = 1_000_000
SECOND = 1000 * MS
MOST = AskedTime(name="most", period_ns=10 * MS, deadline_ns=10 * MS, jitter_ns=0, duration_ns=6 * MS)

# With periods of a second the event loop has room for ten streams, however busy the machine is.
TEN_RESERVATIONS = """
    import os
    import sys
    import anyio
    import numpy as np
    import aionn
    from aionn.runtime.guarantees.arrivals import Measured
    from aionn.runtime.guarantees.guarantee import StreamGuarantee
    from aionn.testing.models import identity

    async def measured(self):
        return Measured(50_000_000, 16)

    StreamGuarantee._measured = measured

    async def camera():
        while True:
            yield np.ones(1, np.float32)
            await anyio.sleep(1)

    async def consume(stream):
        async for _ in stream:
            pass

    async def main():
        async with aionn.open(drivers=[], sockets=[sys.argv[1]]) as runtime, anyio.create_task_group() as tasks:
            net = await runtime.compile(identity())
            for number in range(10):
                burst = await net.burst(slots=4).__aenter__()
                stream = burst.stream(camera(), guarantee=True, period=1, deadline=1, jitter=0.3)
                await stream.admit()
                tasks.start_soon(consume, stream)
            os.write(1, b"held\\n")
            await anyio.sleep_forever()

    anyio.run(main)
"""


@pytest.fixture
def device() -> HeldDevice:
    return HeldDevice()


@pytest.fixture
async def served(serving: Any, device: HeldDevice) -> Any:
    return await serving(device, limits=ClientLimits(reserved_share=1.0, reserved_share_per_user=1.0))


async def reserve(client: Any, asked: AskedTime = MOST) -> Any:
    return await client.ledger.reserve(asked, slot_count=1)


async def until_admitted(client: Any, asked: AskedTime = MOST) -> Any:
    with anyio.fail_after(LIMIT_S):
        while True:
            try:
                return await reserve(client, asked)
            except NotAdmitted:
                await anyio.sleep(0.005)


async def test_reservations_of_a_process_that_is_killed_in_the_middle_of_ten_streams_are_free(
    served: Any, repository: Path
) -> None:
    client = served.client()
    await client.connect()
    command = [sys.executable, "-c", textwrap.dedent(TEN_RESERVATIONS), str(served.path)]
    async with await anyio.open_process(
        command, cwd=repository, stdin=subprocess.DEVNULL, stderr=None
    ) as other:
        assert other.stdout is not None
        with anyio.fail_after(LIMIT_S):
            assert await other.stdout.receive() == b"held\n"
        with pytest.raises(NotAdmitted, match=r"0\.500"):
            await reserve(client)
        other.kill()
        await until_admitted(client)
    await client.aclose()


async def test_client_that_closes_in_the_middle_of_its_admission_reserves_nothing(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, admit = threading.Event(), threading.Event(), Ledger.admit

    def slow(self: Ledger, *arguments: Any, **more: Any) -> Any:
        begun.set()
        assert goes_on.wait(LIMIT_S)
        return admit(self, *arguments, **more)

    first, second = served.client(), served.client()
    await first.connect()
    await second.connect()
    monkeypatch.setattr(Ledger, "admit", slow)

    async def ask() -> None:
        with pytest.raises(DeadObject):
            await reserve(first)

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.to_thread.run_sync(begun.wait)
            await first.aclose()
        await second.status()
        goes_on.set()
    await until_admitted(second)
    await second.aclose()


@pytest.mark.parametrize("count", [pytest.param(1000, marks=pytest.mark.long), 100])
async def test_client_that_changes_its_rate_without_end_holds_one_reservation_of_its_last_rate(
    served: Any, count: int
) -> None:
    first, second = served.client(), served.client()
    await first.connect()
    await second.connect()
    held = await reserve(first, msgspec.structs.replace(MOST, duration_ns=2 * MS))
    for number in range(count):
        # Each other rate demands more than the one before it: a new reservation, for which there is room beside the old one.
        period_ns = (20, 15)[number % 2] * MS
        asked = msgspec.structs.replace(MOST, period_ns=period_ns, duration_ns=2 * MS)
        found = await first.ledger.reserve(asked, held, slot_count=1)
        if found is not held:
            first.ledger.release(held)
            held = found
    with pytest.raises(NotAdmitted, match=r"0\.133"):
        await reserve(second, msgspec.structs.replace(MOST, duration_ns=9 * MS))
    await until_admitted(second)
    await first.aclose()
    await second.aclose()


async def test_client_that_sends_twice_as_fast_loses_its_order_for_the_frames_between_and_no_frame_of_others(
    serving: Any, device: HeldDevice, small: Any
) -> None:
    served = await serving(device, limits=ClientLimits(reserved_share=1.0, reserved_share_per_user=1.0))
    applications = []
    for _ in range(2):
        client = served.client()
        applications.append(Application(client, await client.prepare_model(small.sum_model()), small))
    fast, other = applications
    number = await fast.reserved(period_ns=10 * SECOND, deadline_ns=20 * SECOND, duration_ns=SECOND)
    theirs = await other.reserved(period_ns=40 * SECOND, deadline_ns=40 * SECOND, duration_ns=SECOND)
    device.hold(1)
    launches = [await fast.launch(1)]
    await device.has_begun(1)
    frames = [Frame(number) for _ in range(4)]
    for value, frame in enumerate(frames, 2):
        launches.append(await fast.launch(value, frame))
        await device.waits(len(launches) - 1)
    kept = Frame(theirs)
    launches.append(await other.launch(9, kept))
    await device.waits(len(launches) - 1)
    device.let_go(1)
    await ended(*launches)
    assert device.began[:3] == [1, 2, 9], "those between go after the frame of the other stream"
    assert [frame.labels for frame in frames] == [[], ["early"], ["early"], ["early"]] and kept.labels == []
    for application in applications:
        await application.aclose()
