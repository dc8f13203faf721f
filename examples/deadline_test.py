"""A test of deadlines as you would write it: exact, and done in milliseconds. Run it with pytest, or as a script."""

import subprocess
import sys

import numpy as np
import pytest

import aionn
from aionn.testing import SimulatedDevice, models

pytestmark = [pytest.mark.asyncio, pytest.mark.aionn(virtual_time=True)]


async def test_urgent_job_overtakes_and_late_job_is_reported(virtual_clock):
    x = np.arange(4, dtype=np.float32)
    async with aionn.open(devices=[SimulatedDevice("npu", run_time_s=0.020)]) as runtime:
        net = await runtime.compile(models.identity((4,)))
        running, waiting = net.execute_fenced([x]), net.execute_fenced([x], priority="low")
        await net.execute([x], priority="high", deadline=virtual_clock.after(0.045))
        assert virtual_clock.now == 0.040
        with pytest.raises(aionn.MissedDeadline):
            await net.execute([x], deadline=virtual_clock.after(0.010))
        assert virtual_clock.now <= 0.050
        assert [(await e).total_ns for e in (running, waiting)] == [20_000_000, 60_000_000]


if __name__ == "__main__":
    raise SystemExit(subprocess.call([sys.executable, "-m", "pytest", "-q", __file__]))
