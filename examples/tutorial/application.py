"""The application of docs/tutorial.md: a camera, a microphone and a heavy model, each with a deadline.

Run it from anywhere: ``python examples/tutorial/application.py --seconds 10``. ``--video 0`` is the first camera and
``--audio microphone`` the microphone; by default a clip and a recording replace them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt

import aionn
from aionn.hal import OperandType, OperationType
from aionn.media import (
    AudioWindow,
    Frame,
    SourceUnavailable,
    audio_file,
    camera,
    log_mel,
    microphone,
    video_file,
)
from aionn.models.builder import GraphBuilder

DATA = Path(__file__).resolve().parents[1] / "data"
FRAME_WITHIN_NS = 33_000_000  # The next frame comes then.
WINDOW_WITHIN_NS = 100_000_000  # So does the next window.
DESCRIBE_EVERY_S = 1.0
DESCRIBE_WITHIN_S = 1.0
CERTAIN = 0.5
"""A class counts as recognised above this probability."""


@dataclass
class Account:
    """Counts of the items of one stream by status, and of the classes that were recognised."""

    statuses: Counter[str] = field(default_factory=lambda: Counter[str]())
    classes: Counter[int] = field(default_factory=lambda: Counter[int]())
    latest: npt.NDArray[np.uint8] | None = None

    def add(self, status: str, scores: npt.NDArray[Any] | None) -> None:
        self.statuses[status] += 1
        if scores is not None and scores.max() > CERTAIN:
            self.classes[int(scores.argmax())] += 1

    def __str__(self) -> str:
        return ", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items())) or "nothing"


def real_values(output: aionn.TensorSpec, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The real numbers that the values of an output are."""
    return (values.astype(np.float32) - output.zero_point) * output.scale if output.scale else values


async def watch(net: aionn.Compilation, frames: AsyncIterable[Frame], seen: Account) -> None:
    """Recognises what each frame shows; one that cannot be answered before the next comes is dropped."""
    write = aionn.image_writer(net.inputs[0])

    def into(frame: Frame, view: npt.NDArray[Any]) -> None:
        write(frame.data, view)

    async with net.burst() as burst:
        stream = burst.stream(
            frames, into=into, deadline=lambda frame: frame.captured_at_ns + FRAME_WITHIN_NS
        )
        async with stream as results:
            async for result in results:
                scores = real_values(net.outputs[0], result.outputs[0]) if result.outputs else None
                seen.add(result.status, scores)
                seen.latest = result.item.data


async def listen(net: aionn.Compilation, windows: AsyncIterable[AudioWindow], heard: Account) -> None:
    """Recognises the digit in each window of sound."""
    write = aionn.value_writer(net.inputs[0])

    def into(window: AudioWindow, view: npt.NDArray[Any]) -> None:
        write(log_mel(window.samples), view)

    async with net.burst() as burst:
        stream = burst.stream(
            windows, into=into, deadline=lambda window: window.captured_at_ns + WINDOW_WITHIN_NS
        )
        async with stream as results:
            async for result in results:
                heard.add(
                    result.status, real_values(net.outputs[0], result.outputs[0]) if result.outputs else None
                )


async def describe(net: aionn.Compilation, seen: Account, described: Account) -> None:
    """Runs the heavy model on the latest frame once a second, where that can end in time."""
    while True:
        await anyio.sleep(DESCRIBE_EVERY_S)
        if seen.latest is None:
            continue
        picture = seen.latest.astype(np.float32)[np.newaxis] / 255.0
        try:
            await net.execute([picture], deadline=aionn.after(DESCRIBE_WITHIN_S))
            described.add("on_time", None)
        except aionn.MissedDeadline:
            described.add("missed", None)


def heavy_model(layers: int = 12, channels: int = 32) -> aionn.Model:
    """A deep convolutional network with random weights, in place of a large model of yours."""
    weights = np.random.default_rng(0)
    graph = GraphBuilder()
    value = graph.input(OperandType.TENSOR_FLOAT32, (1, 96, 96, 3))
    depth = 3
    for _ in range(layers):
        scale = np.float32((9 * depth) ** -0.5)
        kernel = graph.constant(scale * weights.standard_normal((channels, 3, 3, depth), np.float32))
        bias = graph.constant(np.zeros(channels, np.float32))
        # 1: padding SAME, strides 1 and 1, 1: fused activation RELU.
        value = graph.result(
            OperationType.CONV_2D, [value, kernel, bias, 1, 1, 1, 1], value, (1, 96, 96, channels)
        )
        depth = channels
    return graph.build([value])


async def run(
    runtime: aionn.Runtime,
    frames: AsyncIterable[Frame],
    windows: AsyncIterable[AudioWindow],
    seconds: float,
    heavy: aionn.Model | str | None = None,
) -> dict[str, Account]:
    """Runs everything concurrently for some seconds, or until an error; returns the accounts."""
    seeing = await runtime.compile(DATA / "shapes_int8.tflite", priority="high")
    hearing = await runtime.compile(DATA / "digits_int8.tflite", priority="high")
    describing = await runtime.compile(heavy_model() if heavy is None else heavy, priority="low")
    seen, heard, described = Account(), Account(), Account()
    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, seeing, frames, seen)
            tasks.start_soon(listen, hearing, windows, heard)
            tasks.start_soon(describe, describing, seen, described)
    return {"camera": seen, "microphone": heard, "heavy model": described}


async def main(video: str | None, audio: str | None, seconds: float, heavy: str | None) -> None:
    size = (96, 96)
    pictures = camera(video, size=size) if video else video_file(DATA / "shapes.mp4", size=size)
    sounds = (
        microphone(None if audio == "microphone" else audio) if audio else audio_file(DATA / "digits.wav")
    )
    shapes: list[str] = json.loads((DATA / "shapes.json").read_text())["classes"]
    digits: list[str] = json.loads((DATA / "digits.json").read_text())["classes"]
    async with aionn.open() as runtime, pictures as frames, sounds as windows:
        accounts = await run(runtime, frames, windows, seconds, heavy)
        dropped = f"{frames.statistics().dropped} frames and {windows.statistics().dropped} windows"
    for name, account in accounts.items():
        print(f"{name}: {account}")
    print("seen:", ", ".join(shapes[index] for index in sorted(accounts["camera"].classes)) or "nothing")
    print("heard:", ", ".join(digits[index] for index in sorted(accounts["microphone"].classes)) or "nothing")
    print(f"dropped by the sources: {dropped}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--video", help="a camera, such as 0 or /dev/video0; by default a clip")
    parser.add_argument("--audio", help="microphone, or the name of one; by default a recording")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long it runs; default 10")
    parser.add_argument(
        "--heavy", help="a .tflite or .onnx file for pictures of 96 x 96; by default a made one"
    )
    options = parser.parse_args()
    try:
        anyio.run(main, options.video, options.audio, options.seconds, options.heavy)
    except SourceUnavailable as e:
        sys.exit(f"{e}; without --video and --audio, a clip and a recording replace camera and microphone")
