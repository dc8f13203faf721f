"""The end of a served device under streams of several applications: a drain loses no accepted frame, a death withdraws all."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.errors import DeadObject, DeviceUnavailable
from aionn.runtime.executions.stream import Item
from aionn.runtime.guarantees.arrivals import Measured
from aionn.runtime.guarantees.guarantee import StreamGuarantee
from tests.aionn.service.reservations.served_process import LIMIT_S, begun, serving, until_served
from tests.support.mortal_driver import doubled_model

pytestmark = pytest.mark.forked("any")

DRAINS = 200
DRAINS_OF_A_CASE = 20
"""Some minutes where the machine is busy: a case that was stopped is run again by its number."""

# The jitter is the time that this machine may take, and far more of the deadline is left than frames need on it.
TERMS: dict[str, Any] = {"guarantee": True, "period": 0.1, "deadline": 6.0, "jitter": 3.0}
RARE: dict[str, Any] = {"guarantee": True, "period": 5.0, "deadline": 10.0, "jitter": 5.0}


class Fates:
    """The fates of the frames of one stream: each has a result, or the error that it ended with."""

    def __init__(self) -> None:
        self.results: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self.delivered: list[int] = []

    def take(self, items: Iterable[Item]) -> None:
        for item in items:
            number = int(item.item[0])
            if item.result is not None:
                assert item.deadline_ns is not None and item.result.outputs[0][0] == 2 * number
                is_late = item.finished_ns > item.deadline_ns
                self.results[number] = "late" if is_late else "on_time"
            else:
                self.errors[number] = f"{type(item.error).__name__}: {item.error}"


async def drain_in_the_middle(folder: Path, seed: int) -> int:
    """SIGTERM while two applications stream: each frame that the device has begun has its result in its application, on time, and
    each other one has the reason. Returns the number of results.

    A stream delivers its results in their order, and ends with the error of the first rejected frame. Frames after that may have
    been accepted, since they come over other connections of the burst: so the frames are looked at before the stream ends.
    """
    folder.mkdir()
    last = random.Random(seed).randrange(4, 28)
    ended = anyio.Event()
    fates = {first: Fates() for first in (1, 1001)}
    with serving(folder) as server:
        path = await until_served(folder)

        async def values(first: int, step: float) -> AsyncIterator[Any]:
            for number in itertools.count(first):
                if number == last:
                    os.kill(server.pid, signal.SIGTERM)
                is_last = ended.is_set()
                yield np.full(1, number, np.float32)
                if is_last:
                    break
                await anyio.sleep(step)

        async def stream(first: int, step: float, admitted: anyio.Event, other: anyio.Event) -> None:
            own = fates[first]
            async with aionn.open(drivers=[], sockets=[path]) as runtime:
                net = await runtime.compile(doubled_model())
                async with net.burst(slots=61) as burst, burst.stream(values(first, step), **TERMS) as found:
                    admitted.set()
                    await other.wait()
                    pump = found._pump
                    while (item := await pump.first()) is not None and item.error is None:
                        result = await anext(found)
                        own.delivered.append(int(result.outputs[0][0]) // 2)
                        own.results[own.delivered[-1]] = result.status
                    await ended.wait()
                    while not all(item.is_finished for item in pump.items):
                        await anyio.sleep(0.002)
                    own.take(pump.items)
                    with pytest.raises((DeviceUnavailable, DeadObject)):
                        await anext(found)

        admitted = anyio.Event(), anyio.Event()
        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream, 1, 0.004, *admitted)
                tasks.start_soon(stream, 1001, 0.003, *reversed(admitted))
                status = await anyio.to_thread.run_sync(server.wait)
                ended.set()
    frames = begun(folder)
    said = f"seed {seed}, SIGTERM before {last}: status {status}, begun {frames}, " + ", ".join(
        f"results {own.results}, errors {own.errors}, delivered {own.delivered}" for own in fates.values()
    )
    results = {number: status for own in fates.values() for number, status in own.results.items()}
    assert status == 0, said
    assert len(frames) == len(set(frames)), f"a frame was executed twice; {said}"
    assert set(frames) == results.keys(), f"lost {set(frames) - results.keys()}; {said}"
    assert set(results.values()) == {"on_time"}, said
    for first, own in fates.items():
        assert own.delivered == list(range(first, min(own.errors))), said
    return len(results)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has streams count with a device time that no machine changes."""

    async def measured(self: StreamGuarantee) -> Measured:
        return Measured(5_000_000, 16)

    monkeypatch.setattr(StreamGuarantee, "_measured", measured)


async def drains(folder: Path, seeds: range) -> None:
    counts = [await drain_in_the_middle(folder / str(seed), seed) for seed in seeds]
    assert sum(map(bool, counts)) > len(seeds) // 2, f"most were not in the middle of a stream: {counts}"


@pytest.mark.slow
async def test_no_accepted_frame_is_lost_by_a_drain(tmp_path: Path, measured: None) -> None:
    await drains(tmp_path, range(3))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, DRAINS, DRAINS_OF_A_CASE))
async def test_no_accepted_frame_is_lost_by_two_hundred_drains(
    tmp_path: Path, measured: None, first: int
) -> None:
    await drains(tmp_path, range(first, first + DRAINS_OF_A_CASE))


@pytest.mark.thorough
async def test_death_of_the_device_withdraws_ten_reservations_of_two_applications(tmp_path: Path) -> None:
    async def silent() -> AsyncIterator[Any]:
        await anyio.sleep_forever()
        yield

    with serving(tmp_path) as server:
        path = await until_served(tmp_path)
        async with (
            aionn.open(drivers=[], sockets=[path]) as first,
            aionn.open(drivers=[], sockets=[path]) as second,
        ):
            streams: list[Any] = []
            bursts: list[Any] = []
            for runtime in (first, second):
                net = await runtime.compile(doubled_model(), recover=True)
                bursts.append(net.burst(slots=3))
                await bursts[-1].__aenter__()
                for number in range(5):
                    streams.append(bursts[-1].stream(silent(), name=f"stream {number}", **RARE))
                    await streams[-1].admit()
            assert [len(r.devices[0].reservations.lines()) for r in (first, second)] == [5, 5]
            server.kill()
            await anyio.to_thread.run_sync(server.wait)
            with anyio.fail_after(LIMIT_S):
                while not all(stream.reservation.end for stream in streams):
                    await anyio.sleep(0.002)
            assert {stream.reservation.end for stream in streams} == {"withdrawn"}
            assert [r.devices[0].reservations.count for r in (first, second)] == [0, 0]
            path.unlink()
            with serving(tmp_path):
                await until_served(tmp_path)
                with anyio.fail_after(LIMIT_S):
                    for stream in streams:
                        await stream.change()
                assert all(stream.reservation.end == "" for stream in streams)
                assert [r.devices[0].reservations.count for r in (first, second)] == [5, 5]
                for burst in bursts:
                    await burst.aclose()
