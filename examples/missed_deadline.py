"""Catch a missed deadline: MissedDeadline is raised at the deadline, and the device takes the next request.

Checks its own result.
"""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import numpy as np

import aionn

DATA = Path(__file__).parent / "data"


async def main() -> None:
    async with aionn.open() as runtime:
        net = await runtime.compile(DATA / "shapes_float.tflite")
        picture = np.zeros(net.inputs[0].dimensions, dtype=np.float32)
        await net.execute([picture])

        try:
            await net.execute([picture], deadline=time.monotonic_ns() - 1)
        except aionn.MissedDeadline as error:
            print(f"in the past: {error} (transient: {error.transient})")
            assert not error.transient, "no device could have made it"

        # Fifty concurrent executions of one device share a deadline 20 ms from now: the last ones cannot make it.
        outcomes = {"in time": 0, "missed": 0}

        async def one(deadline: int) -> None:
            try:
                await net.execute([picture], deadline=deadline)
                outcomes["in time"] += 1
            except aionn.MissedDeadline as error:
                assert isinstance(error, TimeoutError)
                outcomes["missed"] += 1

        deadline = aionn.after(0.020)
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(one, deadline)
        print(f"fifty concurrently: {outcomes['in time']} in time, {outcomes['missed']} missed")
        assert outcomes["missed"] > 0

        result = await net.execute([picture], deadline=aionn.after(5.0))
        print(f"and the next request is served: class {int(result.outputs[0].argmax())}")


if __name__ == "__main__":
    anyio.run(main)
