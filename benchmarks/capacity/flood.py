"""Admitted streams beside a best-effort flood on a real device, and refused sets that run all the same.

    python -m benchmarks.capacity.flood [--seconds 600] [--engine litert] [--trials 20] [--load 1.5]

Twelve streams of random periods ask for a guarantee on one slot; those that are admitted run while four tasks execute another
model as fast as they can, with real-time scheduling where the machine permits it. A frame is lost if it has no result at its
deadline. A label means that the scheduler did not cause it: the frame took longer than reserved, or came too early or too late.

Then random sets are drawn, with a load of half a slot to ``--load`` slots; each that is refused runs for some seconds as best
effort with the same deadlines. The share of those that lose a frame shows whether a refusal is justified.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import aionn
from benchmarks.capacity.contenders import ENGINES, Frame, missing, write
from benchmarks.engines.peers import ENGINES as NETWORKS
from fences import now_ns

__all__ = ["Kept", "admitted_beside_a_flood", "opened", "refused_and_run"]

PERIODS_S = (0.02, 0.025, 1 / 30, 0.04, 0.05, 0.1)
FLOOD_TASKS = 4
STREAMS_MAX = 12
TRIAL_S = 3.0
LOST_SHOWN_MAX = 40
"""Lost frames of a stream that are printed with their labels; those without one are printed all."""

DEVICES = {"litert": "litert-cpu", "ort": "ort-cpu", "openvino": "openvino-cpu"}


class Terms(NamedTuple):
    """A stream that is drawn.

    Attributes:
        model: The index of its model.
        period_s: Between two captures.
        deadline_s: From the capture.
    """

    model: int
    period_s: float
    deadline_s: float


class Kept(NamedTuple):
    """The fate of the frames of some streams.

    Attributes:
        streams: Number of streams.
        frames: Number of frames.
        lost: Of those, without a result at the deadline.
        labelled: Of the lost ones, by label.
        labels: Frames with a label, lost or not.
        flood: Best-effort executions beside them that ended.
        refusal: Why the last one was refused that was.
    """

    streams: int
    frames: int
    lost: int
    labelled: Counter[str]
    labels: Counter[str]
    flood: int
    refusal: str

    @property
    def unexplained(self) -> int:
        """Frames that were lost without a label."""
        return self.lost - self.labelled.total()


class Opened(NamedTuple):
    """A runtime with models.

    Attributes:
        runtime: The runtime.
        nets: The models, ready.
        frames: An input of each.
        frame_s: The time of an execution of each.
    """

    runtime: aionn.Runtime
    nets: Sequence[aionn.Compilation]
    frames: Sequence[Any]
    frame_s: Sequence[float]


@contextlib.asynccontextmanager
async def opened(engine: str, folder: Path) -> AsyncIterator[Opened]:
    """A device with one slot, and the models of the benchmark of engines that exist."""
    paths = [path for path in NETWORKS[DEVICES[engine]].models(folder).values() if path is not None]
    drivers = {DEVICES[engine]: f"benchmarks.capacity.devices:{engine}"}
    async with aionn.open(drivers=drivers, realtime="if_permitted") as runtime:
        nets = [await runtime.compile(path) for path in paths]
        frames = [np.zeros(net.inputs[0].dimensions, net.inputs[0].dtype) for net in nets]
        frame_s = []
        for net, frame in zip(nets, frames, strict=True):
            async with net.burst() as burst:
                times = []
                for _ in range(20):
                    began_ns = now_ns()
                    await burst.execute([frame])
                    times.append((now_ns() - began_ns) / 1e9)
                frame_s.append(sorted(times)[len(times) // 2])
        yield Opened(runtime, nets, frames, frame_s)


def draw(numbers: random.Random, models: int) -> Terms:
    """A stream."""
    period_s = numbers.choice(PERIODS_S)
    return Terms(numbers.randrange(models), period_s, period_s * numbers.uniform(0.6, 1.0))


async def camera(terms: Terms, data: Any, ends_ns: int, phase: float) -> AsyncIterator[Frame]:
    """Frames at equal gaps until a time; one that the source is too late for is left out."""
    period_ns = round(terms.period_s * 1e9)
    captured_ns = now_ns() + round(phase * period_ns)
    while captured_ns < ends_ns:
        left_ns = captured_ns - now_ns()
        if left_ns > 0:
            await asyncio.sleep(left_ns / 1e9)
        yield Frame(captured_ns, data)
        captured_ns += period_ns * max(1, (now_ns() - captured_ns) // period_ns)


async def counted(stream: Any, found: Counter[str]) -> None:
    """Reads a stream to its end."""
    is_guaranteed, lost = isinstance(stream, aionn.GuaranteedStream), 0
    async for result in stream:
        found["frames"] += 1
        label = result.label
        if label is not None:
            found[f"label {label}"] += 1
        if result.status != "on_time":
            found["lost"] += 1
            lost += 1
            if label is not None:
                found[f"lost {label}"] += 1
            if is_guaranteed and (label is None or lost <= LOST_SHOWN_MAX):
                late_ms = (result.finished_ns - result.item.captured_at_ns) / 1e6
                print(
                    f"lost, {label or 'without a label'}: {result.status} {late_ms:.1f} ms after its capture; {stream.explain()}",
                    file=sys.stderr,
                    flush=True,
                )


def parts(found: Counter[str], kind: str) -> Counter[str]:
    """The counts of one kind by label."""
    return Counter({key.partition(" ")[2]: n for key, n in found.items() if key.startswith(f"{kind} ")})


async def admitted_beside_a_flood(made: Opened, seconds: float, seed: int = 1) -> Kept:
    """Streams that are admitted, of ``STREAMS_MAX`` that ask, while best effort fills the device."""
    numbers, found, flood, refusal = random.Random(seed), Counter[str](), 0, ""
    begin_ns = 0
    async with contextlib.AsyncExitStack() as stack:
        streams = []

        async def source(terms: Terms, phase: float) -> AsyncIterator[Frame]:
            ends_ns = begin_ns + round(seconds * 1e9)
            async for frame in camera(terms, made.frames[terms.model], ends_ns, phase):
                yield frame

        for _ in range(STREAMS_MAX):
            terms = draw(numbers, len(made.nets))
            burst = await stack.enter_async_context(made.nets[terms.model].burst(slots=3))
            stream = burst.stream(
                source(terms, numbers.random()),
                into=write,
                guarantee=True,
                period=terms.period_s,
                deadline=terms.deadline_s,
                jitter=terms.deadline_s / 4,
                name=f"camera-{len(streams)}",
            )
            try:
                streams.append(await stack.enter_async_context(stream))
            except aionn.NotAdmitted as e:
                refusal = e.reason
        begin_ns = now_ns()

        async def flooded() -> None:
            nonlocal flood
            while True:
                try:
                    await made.nets[0].execute([made.frames[0]], priority="low")
                    flood += 1
                except aionn.ResourceExhausted:
                    await asyncio.sleep(0.001)

        flooding = [asyncio.create_task(flooded()) for _ in range(FLOOD_TASKS)]
        try:
            await asyncio.gather(*(counted(stream, found) for stream in streams))
        finally:
            for task in flooding:
                task.cancel()
            await asyncio.gather(*flooding, return_exceptions=True)
    return Kept(
        len(streams),
        found["frames"],
        found["lost"],
        parts(found, "lost"),
        parts(found, "label"),
        flood,
        refusal,
    )


async def refused_and_run(made: Opened, trials: int, seed: int = 1, load: float = 1.5) -> tuple[int, int]:
    """Draws sets until ``trials`` of them are refused, and runs each of those without a guarantee.

    Args:
        made: The device.
        trials: Sets that are refused.
        seed: Of the sets.
        load: The largest load of a set that is drawn, in slots; the smallest is 0.5.

    Returns:
        The number of refused sets, and of those that lost a frame.
    """
    numbers, refused, losing = random.Random(seed), 0, 0
    for _ in range(4 * trials):
        if refused >= trials:
            break
        wanted, chosen, share = numbers.uniform(0.5, load), list[Terms](), 0.0
        while share < wanted and len(chosen) < STREAMS_MAX:
            terms = draw(numbers, len(made.nets))
            chosen.append(terms)
            share += made.frame_s[terms.model] / terms.period_s
        async with contextlib.AsyncExitStack() as stack:
            bursts = [await stack.enter_async_context(made.nets[t.model].burst(slots=3)) for t in chosen]
            if await is_admitted(bursts, chosen):
                continue
            refused += 1
            found: Counter[str] = Counter()
            ends_ns = now_ns() + round(TRIAL_S * 1e9)
            await asyncio.gather(
                *(
                    counted(
                        burst.stream(
                            camera(terms, made.frames[terms.model], ends_ns, numbers.random()),
                            into=write,
                            deadline=lambda frame, terms=terms: (
                                frame.captured_at_ns + round(terms.deadline_s * 1e9)
                            ),
                        ),
                        found,
                    )
                    for burst, terms in zip(bursts, chosen, strict=True)
                )
            )
            losing += found["lost"] > 0
            print(
                f"refused: {len(chosen)} streams, load {share:.2f}: {found['lost']} of {found['frames']} lost",
                file=sys.stderr,
                flush=True,
            )
    return refused, losing


async def is_admitted(bursts: Sequence[aionn.Burst], chosen: Sequence[Terms]) -> bool:
    """Whether all streams of a set are admitted together; nothing stays reserved."""

    async def nothing() -> AsyncIterator[Frame]:
        return
        yield

    async with contextlib.AsyncExitStack() as stack:
        for burst, terms in zip(bursts, chosen, strict=True):
            stream = burst.stream(
                nothing(),
                into=write,
                guarantee="best",
                period=terms.period_s,
                deadline=terms.deadline_s,
                jitter=terms.deadline_s / 4,
            )
            await stack.enter_async_context(stream)
            if stream.refusal is not None:
                return False
    return True


async def run(engine: str, seconds: float, trials: int, seed: int, load: float) -> None:
    """Prints both results."""
    with tempfile.TemporaryDirectory(prefix="aionn-flood-") as folder:
        async with opened(engine, Path(folder)) as made:
            times = ", ".join(f"{1e3 * s:.2f} ms" for s in made.frame_s)
            print(f"{engine}: frames take {times}; real time: {await made.runtime.realtime()}", flush=True)
            began_s = time.monotonic()
            kept = await admitted_beside_a_flood(made, seconds, seed)
            print(
                f"{kept.streams} streams beside {kept.flood} best-effort executions for {time.monotonic() - began_s:.0f} s:"
                f" {kept.lost} of {kept.frames} frames lost, {kept.unexplained} without a label; lost {dict(kept.labelled)},"
                f" labels {dict(kept.labels)}; load {os.getloadavg()[0]:.1f}\nrefused: {kept.refusal}",
                flush=True,
            )
            if trials:
                refused, losing = await refused_and_run(made, trials, seed, load)
                print(
                    f"{losing} of {refused} refused sets lose a frame when they run all the same", flush=True
                )


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, default="litert")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=float, default=1.5)
    given = parser.parse_args()
    reason = missing("aionn", given.engine)
    if reason is not None:
        raise SystemExit(f"{given.engine}: {reason}")
    asyncio.run(run(given.engine, given.seconds, given.trials, given.seed, given.load))


if __name__ == "__main__":
    main()
