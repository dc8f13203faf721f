"""Chain three fenced executions over two devices: each starts when the fence of the one before has signalled.

Nothing is awaited in between: the whole chain is started, then its end is awaited. Checks its own result.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np

import aionn

DATA = Path(__file__).parent / "data"


async def main() -> None:
    # Two devices of the same driver, each in a process of its own.
    async with aionn.open(drivers={"left": "reference", "right": "reference"}) as runtime:
        seeing = await runtime.compile(DATA / "shapes_float.tflite", devices="left")
        hearing = await runtime.compile(DATA / "digits_float.tflite", devices="right")

        picture = np.zeros(seeing.inputs[0].dimensions, dtype=np.float32)
        sound = np.full(hearing.inputs[0].dimensions, np.log(1e-6), dtype=np.float32)
        first = seeing.execute_fenced([picture])
        second = hearing.execute_fenced([sound], wait_for=[first.fence])
        third = seeing.execute_fenced(
            [picture], wait_for=[first.fence, second.fence], deadline=aionn.after(10.0), duration=5.0
        )

        result = await third
        assert first.fence.signal_time_ns is not None and second.fence.signal_time_ns is not None
        assert first.fence.signal_time_ns <= second.fence.signal_time_ns, "each link waits for the one before"
        print(f"seen: class {int(result.outputs[0].argmax())}; the chain took {result.total_ns / 1e6:.1f} ms")
        print(f"processes: {[device.pid for device in runtime.devices]}")
        assert np.isclose(float(result.outputs[0].sum()), 1.0, atol=1e-3), "probabilities add up to 1"


if __name__ == "__main__":
    anyio.run(main)
