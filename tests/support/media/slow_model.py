"""A model that takes half of what a live source delivers, and how old its answers are, minute by minute.

The device is a simulated one, which takes its time on the event loop's clock.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aionn
from aionn.media import Frame, LiveSource
from aionn.runtime.clock import now_ns
from aionn.testing import SimulatedDevice

__all__ = ["AnswerAges", "slow_answers"]

MODEL = Path(__file__).resolve().parents[3] / "examples/data/shapes_int8.tflite"


class AnswerAges:
    """Ages of answers, from the sending or the capture of an item to its result.

    Args:
        seconds: The length of the stream; it is divided into parts of a minute, or into six where it is shorter than that.
    """

    def __init__(self, seconds: float) -> None:
        self._part_s = min(60.0, seconds / 6)
        self._begun_ns = now_ns()
        self.parts: list[list[float]] = []

    def add(self, age_s: float) -> None:
        """Counts the age of an answer that is here now."""
        part = int((now_ns() - self._begun_ns) / 1e9 / self._part_s)
        while len(self.parts) <= part:
            self.parts.append([])
        self.parts[part].append(age_s)

    def medians(self) -> list[float]:
        """The median of each part; infinite for one without an answer."""
        return [statistics.median(part) if part else float("inf") for part in self.parts]

    def quantile(self, share: float, first: int = 0) -> float:
        """The age that this share of all answers does not exceed, from a part on."""
        ages = sorted(age for part in self.parts[first:] for age in part)
        return ages[min(int(len(ages) * share), len(ages) - 1)]

    def growth_s(self) -> float:
        """How much older the answers of the last three whole parts are than those of the first three, by the median."""
        whole = self.parts[: max(6, len(self.parts) - 1)]
        early = [age for part in whole[:3] for age in part]
        late = [age for part in whole[-3:] for age in part]
        return statistics.median(late) - statistics.median(early)

    def __str__(self) -> str:
        medians = " ".join(f"{median * 1e3:.0f}" for median in self.medians())
        return f"{sum(map(len, self.parts))} answers, median age in ms by {self._part_s:g} s: {medians}"


@contextlib.asynccontextmanager
async def slow_answers(
    source: LiveSource[Frame], run_s: float
) -> AsyncIterator[AsyncIterator[aionn.StreamResult[Frame]]]:
    """The answers to the pictures of a source, of 96 x 96 pixels, by a model that takes ``run_s`` for each."""
    device = SimulatedDevice("npu", run_time_s=run_s, results="zeros")
    async with aionn.open(devices=[device]) as runtime, await runtime.compile(MODEL) as net:
        write = aionn.image_writer(net.inputs[0])

        def into(frame: Frame, view: Any) -> None:
            write(frame.data, view)

        async with net.burst() as burst, burst.stream(source, into=into) as results:
            yield results
