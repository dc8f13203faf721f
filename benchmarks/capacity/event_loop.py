"""The streams of 30 frames/s that one event loop is admitted with, the share of their frames on time, and the number that it
could serve.

    python -m benchmarks.capacity.event_loop [--seconds 5] [--streams 16,24,32,40,48,56]

The shapes model on litert-cpu with one slot, deadline one period after the capture, with real-time scheduling if the machine
permits it. The first line is of the streams that are admitted, and no others. The others are of runs whose admission does not
count with the event loop: so many streams run all the same, also those that are refused otherwise. The loop could serve the
largest number of which 99.5 % of the frames are on time. The processor time of the loop's thread for a frame is measured over
each run; ``counted`` is that of admission.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

import aionn
from benchmarks.capacity.__main__ import paths_of
from benchmarks.capacity.cameras import KEPT, PERIOD_NS, Camera, make_cameras
from benchmarks.capacity.contenders import (
    BURST_STREAMS_MAX,
    LEAD_NS,
    SLOTS_PER_STREAM,
    WARM_NS,
    Frame,
    frames_of,
    missing,
    on_time_count,
    write,
)
from fences import now_ns

__all__ = ["Served", "served"]

STREAMS_MAX = 63


class Served(NamedTuple):
    """The result of one run.

    Attributes:
        admitted: Number of streams.
        share: Of their frames, those on time.
        labels: Number of frames with each label.
        counted_us: The time of the loop for a frame as admission counts it; 0 where it does not.
        loop_us: The same as measured over the run.
        refusal: Why the next one was refused; empty if none was.
    """

    admitted: int
    share: float
    labels: Counter[str]
    counted_us: float
    loop_us: float
    refusal: str


async def served(path: Path, streams: int, seconds: float) -> Served:
    """Admits up to so many streams, until one is refused, and runs those that were admitted."""
    drivers = {"litert-cpu": "benchmarks.capacity.devices:litert"}
    cameras: list[Camera] = []
    refusal = ""
    async with contextlib.AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(aionn.open(drivers=drivers, realtime="if_permitted"))
        net = await runtime.compile(path)
        data = np.zeros(net.inputs[0].dimensions, net.inputs[0].dtype)
        admitted: list[aionn.GuaranteedStream[Frame]] = []
        for number in range(streams):
            if number % BURST_STREAMS_MAX == 0:
                size = SLOTS_PER_STREAM * min(BURST_STREAMS_MAX, streams - number)
                burst = await stack.enter_async_context(net.burst(slots=size))
            source = frames_of(cameras, number, data)
            stream = burst.stream(
                source, into=write, guarantee=True, period=PERIOD_NS / 1e9, name=f"camera-{number}"
            )
            try:
                admitted.append(await stack.enter_async_context(stream))
            except aionn.NotAdmitted as e:
                refusal = str(e)
                break
        reservation = admitted[0].reservation
        assert reservation is not None, "it was admitted"
        cameras += make_cameras(len(admitted), 1, now_ns() + LEAD_NS, warm_ns=WARM_NS, seconds=seconds)
        ran_ns = time.thread_time_ns()
        counts = await asyncio.gather(*map(on_time_count, admitted, cameras))
        ran_ns = time.thread_time_ns() - ran_ns
        frames = sum((camera.end_ns - camera.begin_ns) // PERIOD_NS for camera in cameras)
        labels: Counter[str] = Counter()
        for stream in admitted:
            found = stream.statistics()
            labels.update({name: getattr(found, name) for name in found.__struct_fields__[4:]})
    due = sum(camera.counted() for camera in cameras)
    counted_us = (reservation.loop_before_ns + reservation.loop_after_ns) / 1e3
    return Served(len(admitted), sum(counts) / due, +labels, counted_us, ran_ns / frames / 1e3, refusal)


def shown(title: str, found: Served) -> None:
    """Prints a run."""
    print(
        f"{title}: {found.admitted} streams, {100 * found.share:.2f} % on time; loop {found.loop_us:.0f} us a frame, counted"
        f" {found.counted_us:.0f} us; labels {dict(found.labels)}; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--streams", default="16,24,32,40,48,56")
    given = parser.parse_args()
    reason = missing("aionn", "litert")
    if reason is not None:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(prefix="aionn-loop-") as folder:
        paths = paths_of("litert", "shapes", Path(folder))
        if paths is None:
            raise SystemExit("the model's file is missing")
        found = asyncio.run(served(paths[0], STREAMS_MAX, given.seconds))
        shown("admitted", found)
        print(f"refused: {found.refusal or 'none'}", flush=True)
        most = 0
        for streams in map(int, given.streams.split(",")):
            with mock.patch("aionn.runtime.guarantees.guarantee.loop_ledger", lambda: None):
                forced = asyncio.run(served(paths[0], streams, given.seconds))
            shown("all the same", forced)
            most = max(most, forced.admitted) if forced.share >= KEPT else most
        print(f"admitted {found.admitted}, could serve {most} of those that were tried", flush=True)


if __name__ == "__main__":
    main()
