"""Streams over two nodes in processes of their own, one of which is killed."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.testing import models
from tests.aionn.fleet.conftest import START_S_MAX, serving

pytestmark = pytest.mark.forked("any")


async def frames(count: int, period_s: float) -> AsyncIterator[np.ndarray[Any, Any]]:
    for index in range(count):
        yield np.full(4, index, np.float32)
        await anyio.sleep(period_s)


@pytest.mark.thorough
async def test_a_killed_node_moves_its_streams(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --long, within a second by the clock; in the ordinary run whatever the machine does besides."""
    # Whatever the machine does while it measures: both nodes are alike, so that each gets a stream.
    monkeypatch.setattr("aionn.runtime.fleet.places.ALIKE", 1e9)
    monkeypatch.setattr("aionn.runtime.fleet.measured.LATENCY_STEP_NS", 10**10)
    is_long = request.config.getoption("--long")
    async with AsyncExitStack() as stack:
        nodes = {f"edge{n}": stack.enter_context(serving(name=f"edge{n}")) for n in (1, 2)}
        addresses = [f"{one.address}?silence_ms=30000" for one in nodes.values()]
        runtime = await stack.enter_async_context(aionn.open(drivers=[], fleet=addresses))
        fleet = await stack.enter_async_context(aionn.FleetStreams(runtime, models.identity((4,))))
        assert fleet.devices and set(fleet.devices) <= {"edge1/reference", "edge2/reference"}
        assert not fleet.unavailable, fleet.unavailable
        # Frames come quicker than promised, as best effort: what is reserved must fit on a machine with much else to do.
        streams = [
            fleet.stream(frames(40, 0.05), period=0.2, deadline=2.0, jitter=0.5, name=f"s{number}")
            for number in range(2)
        ]
        with anyio.fail_after(START_S_MAX):
            for one in streams:
                await one.admit()
        assert {one.device for one in streams} == {"edge1/reference", "edge2/reference"}
        seen: dict[str, list[tuple[int, str]]] = {"s0": [], "s1": []}
        lost = streams[0].device
        assert lost is not None

        async def read(stream: aionn.PlacedStream[Any]) -> None:
            async for result in stream:
                seen[stream.request.name].append((int(result.item[0]), result.status))
                if stream is streams[0] and len(seen["s0"]) == 10:
                    nodes[lost.partition("/")[0]].signal(signal.SIGKILL)

        with anyio.fail_after(START_S_MAX):
            async with anyio.create_task_group() as tasks:
                for one in streams:
                    tasks.start_soon(read, one)
        for name, results in seen.items():
            assert [index for index, _ in results] == list(range(40)), name
        assert [move.left for move in streams[0].moves] == [lost] and not streams[1].moves
        assert streams[0].device is None and lost in fleet.unavailable
        assert [status for _, status in seen["s0"]].count("lost") == streams[0].moves[0].lost
        if is_long:
            assert streams[0].moves[0].took_ns < 1_000_000_000


@pytest.mark.thorough
async def test_a_node_that_starts_later_joins_and_gets_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.runtime.fleet.places.ALIKE", 1e9)
    monkeypatch.setattr("aionn.runtime.fleet.measured.LATENCY_STEP_NS", 10**10)
    async with AsyncExitStack() as stack:
        first = stack.enter_context(serving(name="edge1"))
        fleet_of_one = [f"{first.address}?silence_ms=30000"]
        runtime = await stack.enter_async_context(aionn.open(drivers=["reference"], fleet=fleet_of_one))
        fleet = await stack.enter_async_context(aionn.FleetStreams(runtime, models.identity((4,))))
        streams = [
            fleet.stream(frames(5, 0.05), period=0.2, deadline=2.0, jitter=0.5, name=f"s{number}")
            for number in range(2)
        ]
        with anyio.fail_after(START_S_MAX):
            await streams[0].admit()
            second = stack.enter_context(serving(name="edge2"))
            assert await fleet.join(f"{second.address}?silence_ms=30000") == "edge2/reference"
            await streams[1].admit()
            assert [one.device for one in streams] == ["edge1/reference", "edge2/reference"]
            names = [device.name for device in runtime.devices]
            assert names == ["edge1/reference", "edge2/reference", "reference"]
            for stream in streams:
                assert len([result async for result in stream]) == 5
