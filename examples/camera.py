"""Watch the first camera through a burst; without a camera, the test picture.

Run it from anywhere: ``python examples/camera.py``. ``aionn stream MODEL --source NAME`` does this for any source.
"""

from __future__ import annotations

import time
from pathlib import Path

import anyio

import aionn
from aionn.media import list_cameras, named_source

DATA = Path(__file__).parent / "data"
FRAMES = 30


async def main() -> None:
    cameras = [camera for camera in await list_cameras() if not camera.problem]
    name = cameras[0].path if cameras else "pattern:"
    print(f"source: {name}" + ("" if cameras else " (this machine has no camera)"))
    ages_ms = []
    async with aionn.open() as runtime:
        net = await runtime.compile(DATA / "shapes_int8.tflite", priority="high")
        write = aionn.image_writer(net.inputs[0])
        async with net.burst() as burst, named_source(name, size=(96, 96)) as frames:
            results = burst.stream(
                frames,
                into=lambda frame, view: write(frame.data, view),
                deadline=lambda frame: frame.captured_at_ns + 100_000_000,
                on_late="deliver",
            )
            async for result in results:
                ages_ms.append((time.monotonic_ns() - result.item.captured_at_ns) / 1e6)
                if len(ages_ms) == FRAMES:
                    break
            counts = frames.statistics()
    ages_ms.sort()
    print(f"age of an answer: median {ages_ms[FRAMES // 2]:.1f} ms, at most {ages_ms[-1]:.1f} ms")
    print(f"{counts.presented} frames, {counts.dropped} dropped")
    assert ages_ms[0] >= 0, "no frame is older than its answer"
    assert counts.presented >= FRAMES


if __name__ == "__main__":
    anyio.run(main)
