"""Random sets of streams: no frame of an admitted one is lost, whatever else the device is asked for."""

import contextlib
import random

import anyio
import pytest

import aionn
from aionn.testing import models
from tests.aionn.runtime.guarantees.trial import Frame, Trial, X, npu

PERIODS_MS = (10, 16, 20, 33, 40, 50, 66, 100)
SET_MS = 600


async def admitted_and_lost(trial, source):
    """Asks for eight random streams of three models, and plays the admitted ones beside floods. Returns the number of these streams
    and of their frames, and the frames that were lost or labelled.
    """
    nets = [trial.net, *[await trial.runtime.compile(models.identity((4,), operations=n)) for n in (2, 3)]]
    best_effort = await trial.runtime.compile(models.identity((4,), operations=4))
    for net in (best_effort, best_effort):
        await net.execute([X])
    results, frames = [], []
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            period = source.choice(PERIODS_MS) / 1e3
            deadline = period * source.uniform(0.4, 1.0)
            jitter = deadline * source.choice((0.0, 0.2))
            burst = await stack.enter_async_context(source.choice(nets).burst(slots=3))
            count, first_s = int(SET_MS / 1e3 / period), source.uniform(0, period)
            cameras = jittery(trial, count, period, first_s, jitter, source.random())
            stream = burst.stream(
                cameras,
                guarantee=True,
                period=period,
                deadline=deadline,
                jitter=jitter,
                into=lambda i, v: None,
            )
            with contextlib.suppress(aionn.NotAdmitted):
                await stack.enter_async_context(stream)
                results.append(stream)

        async def flood(priority):
            while True:
                with contextlib.suppress(aionn.Error):
                    await best_effort.execute([X], priority=priority, deadline=trial.clock.after(0.05))
                await anyio.sleep(0.003)

        async def watch(stream):
            frames.extend([(result.status, result.label) async for result in stream])

        async with anyio.create_task_group() as floods:
            for priority in ("low", "high", "high"):
                floods.start_soon(flood, priority)
            async with anyio.create_task_group() as streams:
                for stream in results:
                    streams.start_soon(watch, stream)
            floods.cancel_scope.cancel()
    return len(results), len(frames), [frame for frame in frames if frame != ("on_time", None)]


async def jittery(trial, count, period, first_s, jitter, seed):
    """Frames that come up to the jitter after their captures."""
    source = random.Random(seed)
    start_s = anyio.current_time() + first_s
    for index in range(count):
        captured_s = start_s + index * period
        await anyio.sleep_until(captured_s + source.uniform(0, jitter))
        frame = Frame(trial.clock)
        frame.captured_at_ns = round(captured_s * 1e9)
        yield frame


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3, None))])
def test_no_frame_of_random_admitted_sets_is_lost(seed):
    admitted = 0
    for number in range(200) if seed is None else [seed]:
        source = random.Random(number)
        device = npu(
            source.choice((0.0015, 0.004, 0.007)),
            slots=source.choice((1, 1, 2)),
            preemption=source.choice(("none", "between_operations")),
        )

        async def main(trial, source=source, number=number):
            nonlocal admitted
            streams, frames, lost = await admitted_and_lost(trial, source)
            assert not lost, (number, lost[:5])
            assert trial.reserved == (0, 0.0)
            assert frames or not streams
            admitted += streams

        Trial(device).play(main)
    assert admitted
