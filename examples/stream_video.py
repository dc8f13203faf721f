"""Stream a video through a burst: frames go straight into shared memory, answers come with a deadline.

Run it from anywhere: ``python examples/stream_video.py``. Needs the extra ``media`` (PyAV); checks its own result.
"""

from __future__ import annotations

import json
from pathlib import Path

import anyio

import aionn
from aionn.media import video_file

DATA = Path(__file__).parent / "data"
FRAMES = 90


async def main() -> None:
    truth = json.loads((DATA / "shapes.json").read_text())
    right = answered = late = 0
    async with aionn.open() as runtime:
        net = await runtime.compile(DATA / "shapes_int8.tflite", priority="high")
        write = aionn.image_writer(net.inputs[0])
        async with net.burst() as burst, video_file(DATA / "shapes.mp4", size=(96, 96)) as frames:
            results = burst.stream(
                frames,
                into=lambda frame, view: write(frame.data, view),
                deadline=lambda frame: frame.captured_at_ns + 33_000_000,
                on_late="deliver",
            )
            async for result in results:
                seen = truth["classes"][int(result.outputs[0].argmax())]
                answered += 1
                late += result.status == "late"
                right += seen == truth["labels"][result.item.index]
                if result.item.index >= FRAMES - 1:
                    break
    print(f"{answered} frames, {right} right, {late} late")
    assert right >= 0.99 * answered, "the model recognises the shapes of this video"


if __name__ == "__main__":
    anyio.run(main)
