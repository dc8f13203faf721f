"""Streams over simulated nodes in virtual time: losses, refusals, drains, returns."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.errors import DeviceUnavailable, InvalidArgument, NotAdmitted
from aionn.runtime.discovery import Discovery
from aionn.runtime.fleet.placed import PlacedStream
from aionn.runtime.fleet.streams import ALL_LOST_S_MAX, FleetStreams
from aionn.testing import run
from tests.aionn.fleet.conftest import Simulation, simulated
from tests.aionn.service.sums import sum_model

PERIOD_S = 0.05


class Fleet:
    """Simulated nodes, and streams over them.

    Attributes:
        nodes: By name.
        streams: The streams.
    """

    def __init__(self, nodes: dict[str, Simulation], streams: FleetStreams) -> None:
        self.nodes = nodes
        self.streams = streams

    def node_of(self, stream: PlacedStream[Any]) -> Simulation:
        assert stream.device is not None
        return self.nodes[stream.device.partition("/")[0]]


@asynccontextmanager
async def fleet(count: int = 2, duration_s: float = 0.005, **options: Any) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        nodes = {}
        for number in range(1, count + 1):
            found = simulated(
                address=f"127.0.0.1:{7463 + number}", name=f"edge{number}", latency_s=0.001, **options
            )
            nodes[f"edge{number}"] = one = await stack.enter_async_context(found)
            one.local.duration_s = duration_s
            await one.device.connect()
        runtime = aionn.open(devices=[one.device for one in nodes.values()])
        await stack.enter_async_context(runtime)
        names = [device.name for device in runtime.devices]
        streams = await stack.enter_async_context(FleetStreams(runtime, sum_model(), devices=names))
        yield Fleet(nodes, streams)


async def frames(count: int, closed: list[int] | None = None) -> AsyncIterator[dict[str, Any]]:
    """Numbers at a constant pace, whatever its reader does."""
    began_s = anyio.current_time()
    try:
        for index in range(count):
            await anyio.sleep_until(began_s + index * PERIOD_S)
            yield index
    finally:
        if closed is not None:
            closed.append(1)


def write(index: int, views: Any) -> None:
    for view in views.values():
        view[:] = index


def opened(
    there: Fleet, name: str, count: int, closed: list[int] | None = None, **terms: Any
) -> PlacedStream[Any]:
    terms = {"period": PERIOD_S, "deadline": 0.1, "jitter": 0.02, **terms}
    return there.streams.stream(frames(count, closed), into=write, name=name, **terms)


class Reader:
    """Reads a stream to its end.

    Attributes:
        indexes: Of its items.
        statuses: Of its results.
        times_s: At which they came.
        error: The end of it, if it was not that of the source.
    """

    def __init__(self, stream: PlacedStream[Any]) -> None:
        self.stream = stream
        self.indexes: list[int] = []
        self.statuses: list[str] = []
        self.times_s: list[float] = []
        self.error: Exception | None = None

    async def __call__(self) -> None:
        try:
            async for result in self.stream:
                self.indexes.append(result.item)
                self.statuses.append(result.status)
                self.times_s.append(anyio.current_time())
                if result.outputs:
                    assert (result.outputs[0] == 2 * result.item).all()
        except NotAdmitted as e:
            self.error = e

    @property
    def longest_gap_s(self) -> float:
        return max(b - a for a, b in itertools.pairwise(self.times_s))


def in_virtual_time(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(main)


async def read_all(readers: list[Reader], *events: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async with anyio.create_task_group() as tasks:
        for one in (*readers, *events):
            tasks.start_soon(one)


@pytest.mark.parametrize("way", ["cut", "silent"])
def test_streams_of_a_lost_node_go_on_elsewhere_within_a_second(way: str) -> None:
    async def main() -> None:
        async with fleet(3) as there:
            readers = [Reader(opened(there, f"s{number}", 60)) for number in range(4)]
            for reader in readers:
                await reader.stream.admit()
            before = {reader.stream.request.name: reader.stream.device for reader in readers}
            assert len(set(before.values())) == 3
            lost = readers[0].stream.device
            node = there.node_of(readers[0].stream)

            async def lose() -> None:
                await anyio.sleep(1)
                if way == "cut":
                    node.link.cut()
                node.link.is_partitioned = True

            await read_all(readers, lose)
            for reader in readers:
                stream = reader.stream
                assert reader.error is None
                assert reader.indexes == list(range(60)), "each item has a result, in order"
                # Frames that a silent node has may reach their deadlines before it counts as lost.
                assert set(reader.statuses) <= {"on_time", "lost", *(["dropped"] if way == "silent" else [])}
                assert reader.statuses.count("dropped") <= 6
                assert reader.longest_gap_s < 1
                moved = before[stream.request.name] == lost
                assert len(stream.moves) == moved
                assert stream.statistics().lost == reader.statuses.count("lost") <= (8 if moved else 0)
                for move in stream.moves:
                    assert move.left == lost and move.reached not in (lost, None)
                    assert move.lost == stream.statistics().lost
                    assert move.took_ns < 0.2e9
            assert lost in there.streams.unavailable
            assert lost not in there.streams.devices

    in_virtual_time(main)


def test_a_stream_that_fits_nowhere_else_is_told_why_and_its_source_is_closed() -> None:
    async def main() -> None:
        async with fleet(2, duration_s=0.02) as there:
            closed: list[int] = []
            readers = [Reader(opened(there, f"s{n}", 60, closed, deadline=PERIOD_S)) for n in range(2)]
            for reader in readers:
                await reader.stream.admit()
            with pytest.raises(NotAdmitted):
                await opened(there, "more", 1, deadline=PERIOD_S).admit()
            node, other = there.node_of(readers[0].stream), readers[1].stream.device

            async def lose() -> None:
                await anyio.sleep(1)
                node.link.cut()
                node.link.is_partitioned = True

            await read_all(readers, lose)
            assert readers[0].error is not None
            assert re_matches(str(readers[0].error), "s0", other)
            assert readers[0].indexes == list(range(len(readers[0].indexes)))
            assert len(readers[0].indexes) < 40
            assert readers[1].error is None and readers[1].indexes == list(range(60))
            assert set(readers[1].statuses) == {"on_time"}
            await anyio.sleep(0.1)
            assert len(closed) == 2
            assert dict(there.streams.places) == {}

    in_virtual_time(main)


def re_matches(message: str, stream: str, device: str | None) -> bool:
    return f'stream "{stream}" on {device}' in message


def test_a_node_drains_without_a_lost_frame() -> None:
    async def main() -> None:
        async with fleet(2) as there:
            readers = [Reader(opened(there, f"s{number}", 60)) for number in range(4)]
            for reader in readers:
                await reader.stream.admit()
            drained = readers[0].stream.device
            assert drained is not None
            on_it = {r.stream.request.name for r in readers if r.stream.device == drained}

            async def drain() -> None:
                await anyio.sleep(1)
                found = await there.streams.drain(drained)
                assert found.placed.keys() == on_it and not found.refused
                assert drained not in found.placed.values()

            await read_all(readers, drain)
            for reader in readers:
                assert reader.indexes == list(range(60)) and set(reader.statuses) == {"on_time"}
                moved = reader.stream.request.name in on_it
                assert [move.left for move in reader.stream.moves] == [drained] * moved
            late = opened(there, "late", 3)
            await late.admit()
            assert late.device != drained
            there.streams.restore(drained)
            later = opened(there, "later", 3)
            await later.admit()
            assert later.device == drained

    in_virtual_time(main)


def test_a_stream_without_another_place_stays_on_a_node_that_drains() -> None:
    async def main() -> None:
        async with fleet(1) as there:
            reader = Reader(opened(there, "gate", 40))
            await reader.stream.admit()
            device = reader.stream.device
            assert device is not None

            async def drain() -> None:
                await anyio.sleep(0.5)
                found = await there.streams.drain(device)
                assert not found.placed
                assert "no node is up" in str(found.refused["gate"])

            await read_all([reader], drain)
            assert set(reader.statuses) == {"on_time"} and not reader.stream.moves

    in_virtual_time(main)


def test_a_node_that_is_back_gets_streams_again() -> None:
    async def main() -> None:
        async with fleet(2) as there:
            reader = Reader(opened(there, "gate", 200))
            await reader.stream.admit()
            first = reader.stream.device
            node = there.node_of(reader.stream)

            async def lose() -> None:
                await anyio.sleep(0.5)
                node.link.cut()
                node.link.is_partitioned = True
                await anyio.sleep(1)
                node.link.is_partitioned = False
                await anyio.sleep(5)
                assert len(there.streams.devices) == 2
                second = reader.stream.device
                assert second is not None and second != first
                there.nodes[second.partition("/")[0]].link.cut()
                there.nodes[second.partition("/")[0]].link.is_partitioned = True

            await read_all([reader], lose)
            assert reader.error is None and reader.indexes == list(range(200))
            assert [move.reached for move in reader.stream.moves] == [reader.stream.moves[1].left, first]
            assert reader.longest_gap_s < 1

    in_virtual_time(main)


async def lose_all(there: Fleet) -> None:
    await anyio.sleep(1)
    for node in there.nodes.values():
        node.link.cut()
        node.link.is_partitioned = True


def test_where_all_nodes_are_lost_streams_wait_for_the_first_that_is_back() -> None:
    async def main() -> None:
        async with fleet(2) as there:
            readers = [Reader(opened(there, f"s{number}", 200)) for number in range(2)]
            for reader in readers:
                await reader.stream.admit()

            async def lose() -> None:
                await lose_all(there)
                await anyio.sleep(2)
                assert there.streams.devices == () and not there.streams.has_device
                there.nodes["edge2"].link.is_partitioned = False

            await read_all(readers, lose)
            for reader in readers:
                assert reader.error is None and reader.indexes == list(range(200))
                assert [move.reached for move in reader.stream.moves] == ["edge2/timed"]
                assert 2 < reader.longest_gap_s < ALL_LOST_S_MAX
            assert not there.streams._waiting

    in_virtual_time(main)


def test_where_all_nodes_stay_lost_streams_end_with_the_reasons_after_a_while() -> None:
    async def main() -> None:
        async with fleet(2) as there:
            closed: list[int] = []
            readers = [Reader(opened(there, f"s{number}", 60, closed)) for number in range(2)]
            for reader in readers:
                await reader.stream.admit()
            began_s = anyio.current_time()
            await read_all(readers, lambda: lose_all(there))
            assert ALL_LOST_S_MAX <= anyio.current_time() - began_s < ALL_LOST_S_MAX + 3
            for reader in readers:
                assert "all devices are lost, and none was back within 10 s" in str(reader.error)
                assert "edge1/timed: " in str(reader.error) and "edge2/timed: " in str(reader.error)
                assert reader.indexes == list(range(len(reader.indexes)))
                assert reader.times_s[-1] - began_s < 2, "items that were lost are reported before the wait"
            await anyio.sleep(0.1)
            assert len(closed) == 2

    in_virtual_time(main)


@pytest.mark.parametrize("is_all", [False, True])
def test_a_stream_that_is_cancelled_while_it_waits_for_a_device_ends_immediately(is_all: bool) -> None:
    async def main() -> None:
        async with fleet(1) as there:
            stream = opened(there, "gate", 60)
            await stream.admit()
            ended_s: list[float] = []

            async def read() -> None:
                with pytest.raises(InvalidArgument, match="has ended"):
                    async for _ in stream:
                        pass
                ended_s.append(anyio.current_time())

            async def cancel() -> None:
                await lose_all(there)
                await anyio.sleep(2)
                ended_s.append(anyio.current_time())
                if is_all:
                    await there.streams.aclose()
                else:
                    stream.cancel()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                tasks.start_soon(cancel)
            assert ended_s[1] - ended_s[0] < 0.01

    in_virtual_time(main)


def test_a_node_that_joins_later_gets_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        places = ("127.0.0.1:7470", "127.0.0.1:7471")
        async with AsyncExitStack() as stack:
            late = {
                place: await stack.enter_async_context(
                    simulated(address=place, name="edge9", latency_s=0.001)
                )
                for place in places
            }
            there = await stack.enter_async_context(fleet(1))

            async def reached(discovery: Discovery, source: Any, *_: Any) -> Any:
                await late[source.name].device.connect()
                return late[source.name].device

            monkeypatch.setattr(Discovery, "_make", reached)
            readers = [Reader(opened(there, "s0", 60))]
            await readers[0].stream.admit()
            assert await there.streams.join("127.0.0.1:7470") == "edge9/timed"
            assert there.streams.devices == ("edge1/timed", "edge9/timed")
            readers.append(Reader(opened(there, "s1", 60)))
            await readers[1].stream.admit()
            assert readers[1].stream.device == "edge9/timed"
            for name in there.streams.devices:
                with pytest.raises(InvalidArgument, match=f"{name} is used already"):
                    await there.streams.join(name)
            with pytest.raises(DeviceUnavailable, match="a device is called 'edge9/timed' already"):
                await there.streams.join("127.0.0.1:7471")
            with pytest.raises(InvalidArgument, match=r"FleetStreams\.join: "):
                await there.streams.join("edge8")
            await read_all(readers, lambda: lose_all(there))
            assert [reader.error for reader in readers] == [None, None]
            assert [len(reader.stream.moves) for reader in readers] == [1, 0]
            assert readers[0].stream.moves[0].reached == "edge9/timed"
        with pytest.raises(InvalidArgument, match="use it with async with"):
            await there.streams.join("127.0.0.1:7470")

    in_virtual_time(main)


def test_an_error_of_the_source_is_no_loss_of_the_node() -> None:
    async def main() -> None:
        async with fleet(2) as there:

            async def source() -> AsyncIterator[int]:
                yield 0
                raise aionn.DeadObject("the camera is gone")

            stream = there.streams.stream(source(), into=write, name="gate", period=PERIOD_S, deadline=0.1)
            assert (await anext(stream)).item == 0
            with pytest.raises(aionn.DeadObject, match="the camera is gone"):
                await anext(stream)
            assert len(there.streams.devices) == 2
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    in_virtual_time(main)


def test_mistakes_are_refused() -> None:
    async def main() -> None:
        async with fleet(1) as there:
            stream = opened(there, "gate", 3)
            with pytest.raises(InvalidArgument, match='"gate" already'):
                opened(there, "gate", 3)
            with pytest.raises(InvalidArgument, match="expected one of edge1/timed, got 'edge9/npu'"):
                await there.streams.drain("edge9/npu")
            with pytest.raises(InvalidArgument, match="period"):
                opened(there, "hall", 3, period=None)
            stream.cancel()
            with pytest.raises(InvalidArgument, match="has ended"):
                await stream.admit()
            opened(there, "gate", 3)
        with pytest.raises(InvalidArgument, match="use it with async with"):
            opened(there, "yard", 3)

    in_virtual_time(main)


def test_without_a_device_that_can_run_the_model_the_reasons_are_given() -> None:
    async def main() -> None:
        async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
            with pytest.raises(DeviceUnavailable, match="none is there"):
                async with FleetStreams(runtime, sum_model()):
                    pass

    in_virtual_time(main)


def test_a_stream_that_is_cancelled_while_it_reads_continues_without_a_lost_item() -> None:
    async def main() -> None:
        async with fleet(2) as there:
            stream = opened(there, "gate", 10)
            seen = []
            for _ in range(40):
                with anyio.move_on_after(0.02):
                    async for result in stream:
                        seen.append(result.item)
            assert seen == list(range(10))
            assert np.sum([stream.statistics().on_time]) == 10

    in_virtual_time(main)
