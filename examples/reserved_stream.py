"""Reserve device time for a stream: it is admitted before its first frame, or refused with an offer that fits.

Run it from anywhere: ``python examples/reserved_stream.py``. Needs no extra; checks its own result.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import numpy as np
import numpy.typing as npt

import aionn

MODEL = Path(__file__).parent / "data" / "digits_float.tflite"
FRAMES = 6
PERIOD_S = 0.2


async def camera() -> AsyncIterator[npt.NDArray[np.float32]]:
    for index in range(FRAMES):
        yield np.full((1, 49, 40, 1), index, np.float32)
        await anyio.sleep(PERIOD_S)


async def main() -> None:
    async with aionn.open(drivers=["reference"]) as runtime:
        net = await runtime.compile(MODEL)
        async with net.burst(slots=3) as burst:
            try:
                await burst.stream(camera(), guarantee=True, period=1e-6, name="impossible").admit()
            except aionn.NotAdmitted as e:
                print(e)
            else:
                raise AssertionError("a million frames/s fit on no device")
            results = burst.stream(
                camera(), guarantee=True, period=PERIOD_S, deadline=2 * PERIOD_S, jitter=0.02, name="gate"
            )
            async with results:
                print("reserved:", results.reservation)
                seen = [(result.status, result.label) async for result in results]
                print(results.explain())
    assert len(seen) == FRAMES and results.reservation.end == "released"


if __name__ == "__main__":
    anyio.run(main)
