"""A runtime with one simulated device in virtual time, and streams with a guarantee on it."""

import anyio
import numpy as np

import aionn
from aionn.testing import SimulatedDevice, VirtualClock, models, run

X = np.array([1.5, -2.5, 3.0, 4.0], np.float32)


def npu(run_time_s=0.004, **options):
    options.setdefault("results", "zeros")
    return SimulatedDevice("npu", run_time_s=run_time_s, **options)


class Frame:
    def __init__(self, clock, late_s=0.0):
        self.captured_at_ns = clock.now_ns - round(late_s * 1e9)


async def camera(count, period_s, *, first_s=0.0):
    """Arrays at equal gaps, from ``first_s`` on."""
    start_s = anyio.current_time() + first_s
    for index in range(count):
        await anyio.sleep_until(start_s + index * period_s)
        yield X


class Trial:
    """A runtime with one device, in virtual time."""

    def __init__(self, device, *, operations=1):
        self.device = device
        self.operations = operations
        self.clock = VirtualClock()

    def play(self, main):
        async def all_of_it():
            async with aionn.open(devices=[self.device]) as self.runtime:
                self.net = await self.runtime.compile(models.identity((4,), operations=self.operations))
                await main(self)

        run(all_of_it, clock=self.clock)

    @property
    def held(self):
        """The device's reservations, as the room knows them."""
        return self.runtime.devices[0].reservations

    @property
    def reserved(self):
        return self.held.count, round(self.held.share(0), 3)


async def read(stream):
    """All results of a stream: status and label."""
    return [(result.status, result.label) async for result in stream]


def gate(burst, source, *, period=0.040, deadline=0.030, **options):
    options.setdefault("guarantee", True)
    return burst.stream(source, period=period, deadline=deadline, **options)
