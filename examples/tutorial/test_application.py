"""The deadlines of the application, tested in virtual time on a simulated device: exact, and without waiting."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import application
import numpy as np
import pytest

import aionn
from aionn.drivers.simulated.profiles import DeviceProfile
from aionn.media import AudioWindow, Frame
from aionn.testing import SimulatedDevice

pytestmark = [pytest.mark.asyncio, pytest.mark.aionn(virtual_time=True)]
SECONDS = 4.0


async def pictures() -> AsyncIterator[Frame]:
    """A camera with 30 frames/s."""
    picture, index = np.zeros((96, 96, 3), np.uint8), 0
    while True:
        yield Frame(picture, aionn.now_ns(), index, index / 30)
        index += 1
        await anyio.sleep(1 / 30)


async def sounds() -> AsyncIterator[AudioWindow]:
    """A microphone: a window of one second every 100 ms."""
    silence, index = np.zeros(16_000, np.float32), 0
    while True:
        yield AudioWindow(silence, aionn.now_ns(), index, index / 10)
        index += 1
        await anyio.sleep(0.1)


def device(preemption: str) -> SimulatedDevice:
    """An accelerator with one slot, on which the heavy model takes 190 ms."""
    profile = DeviceProfile(
        name="npu",
        type="accelerator",
        rates={"float32": 10e9, "int8": 100e9},
        memory_bandwidth=20e9,
        preemption=preemption,
    )
    return SimulatedDevice(profile, results="zeros")


async def run_on(npu: SimulatedDevice) -> dict[str, application.Account]:
    async with aionn.open(devices=[npu], drivers=[]) as runtime:
        return await application.run(runtime, pictures(), sounds(), SECONDS)


async def test_heavy_model_delays_no_frame_where_the_device_can_stop_between_operations() -> None:
    accounts = await run_on(device("between_operations"))
    assert accounts["camera"].statuses.keys() == {"on_time"}
    assert accounts["microphone"].statuses.keys() == {"on_time"}
    assert accounts["heavy model"].statuses["on_time"] >= 2


async def test_frames_are_dropped_where_the_device_cannot_stop() -> None:
    accounts = await run_on(device("none"))
    assert accounts["camera"].statuses["dropped"] > 0
    assert accounts["heavy model"].statuses["on_time"] >= 2
