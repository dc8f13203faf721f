"""A suite that is cancelled closes what it has on the device, and ends its processes, before the cancellation is raised."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from aionn.conformance import workers
from aionn.conformance.computing import closing
from aionn.conformance.suite import DeviceUnderTest, Settings
from aionn.conformance.vts.case import status_of_call
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import Device
from tests.support.cancellation import NATIVE_COUNTS, SLEEPING, cancelled_natively, child_processes

every_count = pytest.mark.parametrize("count", NATIVE_COUNTS)


class Slow(ReferenceDevice):
    """Takes some turns of the loop to close."""

    is_closed = False

    async def aclose(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        await super().aclose()
        self.is_closed = True


@every_count
async def test_what_is_closed_at_the_end_of_a_block(count: int) -> None:
    device = Slow()

    async def use() -> None:
        async with closing(device):
            pass

    await cancelled_natively(use(), count)
    assert device.is_closed


@every_count
async def test_device_under_test(count: int) -> None:
    device = Slow()

    async def make() -> Device:
        return device

    subject = DeviceUnderTest(make)
    await subject.get()
    await cancelled_natively(subject.aclose(), count)
    assert device.is_closed


@every_count
async def test_what_a_call_returned(count: int) -> None:
    device = Slow()

    async def make() -> Device:
        return device

    await cancelled_natively(status_of_call(make()), count)
    assert device.is_closed


@every_count
@pytest.mark.parametrize("is_started", [False, True], ids=["starting", "started"])
async def test_worker_process(count: int, is_started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "python_command", lambda *_: SLEEPING)
    monkeypatch.setattr(workers, "SILENCE_S", 0.1)
    before = child_processes()
    job = workers._Job("reference", "in_process", Settings())
    worker = workers._Worker(job, deque([workers.Unit("", ("a",))]), lambda name: (), lambda outcome: None)
    task = asyncio.create_task(worker.run())
    while is_started and worker._process is None:
        assert not task.done(), "it ended before its process had started"
        await asyncio.sleep(0.001)
    await cancelled_natively(task, count)
    assert child_processes() == before
