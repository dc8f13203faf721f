"""A consumer that is slower than its source waits for an item that is about to come, rather than begin with one that is as old."""

import asyncio
import contextlib

import anyio
import numpy as np
import pytest

import aionn
from aionn.media import Frame, record, tee
from aionn.media.live.changes import Expectation
from aionn.media.live.silence import Silence
from aionn.media.live.source import LiveSource
from aionn.testing import SimulatedDevice, VirtualClock, run
from aionn.testing.models import identity
from tests.aionn.media.live.test_slow_consumer import Device, Opener

MS = 1_000_000
PERIOD_NS = 16 * MS


def at_pace(pauses_ms):
    silence = Silence(0)
    now_ns = 0
    silence.end(now_ns, None)
    for pause_ms in pauses_ms:
        now_ns += pause_ms * MS
        silence.end(now_ns, None)
    return silence, now_ns


@pytest.mark.parametrize(
    ("after_ms", "wait_ms"), [(0, 0), (8, 0), (11, 0), (12, 6), (14, 4), (15, 3), (16, 0), (17, 0), (100, 0)]
)
def test_item_is_worth_a_wait_in_the_last_quarter_of_a_period(after_ms, wait_ms):
    silence, last_ns = at_pace([16] * 8)
    assert silence.worthwhile_ns(last_ns + after_ms * MS) == wait_ms * MS


def test_pace_is_that_of_most_of_the_last_items():
    silence, last_ns = at_pace([16, 16, 90, 16, 2, 16, 16, 16])
    assert silence.worthwhile_ns(last_ns + 14 * MS) == 4 * MS


@pytest.mark.parametrize("count", [0, 1, 7])
def test_nothing_is_expected_before_the_pace_is_known(count):
    silence, last_ns = at_pace([16] * count)
    assert not silence.worthwhile_ns(last_ns + 14 * MS)
    assert not Silence(0).worthwhile_ns(1)


def test_wait_ends_with_the_item_or_at_its_limit_and_calls_once():
    async def body():
        expectation, calls = Expectation(), []
        assert not expectation.begin(lambda: calls.append("none"), 0)
        assert expectation.begin(lambda: calls.append("replaced"), 10 * MS)
        assert expectation.begin(lambda: calls.append("item"), 0)
        expectation.end()
        assert calls == []
        await anyio.sleep(0.02)
        assert calls == ["item"]
        assert expectation.begin(lambda: calls.append("limit"), 10 * MS)
        await anyio.sleep(0.02)
        expectation.end()
        await anyio.sleep(0.02)
        assert calls == ["item", "limit"]

    run(body, clock=VirtualClock())


class Pictures(Device):
    """A device whose pictures have their index."""

    period_ns = PERIOD_NS

    def convert(self, grab):
        return Frame(np.full(1, grab.index, np.float32), grab.captured.at_ns, grab.index, grab.time_s)


@contextlib.asynccontextmanager
async def directly(source):
    yield source


@contextlib.asynccontextmanager
async def behind_tee(source):
    async with tee(source) as shared:
        yield shared.branch()


@contextlib.asynccontextmanager
async def behind_two_tees(source):
    async with tee(source) as shared, tee(shared.branch()) as again:
        yield again.branch()


def streamed(run_ns, stops_after=None, seconds=3.0, way=directly):
    """Ages of the pictures when their executions begin, in periods, and the number of results."""
    clock = VirtualClock(pin_descriptors=False, stuck_s=60)
    begun = []

    def write(frame, view):
        begun.append((clock.now_ns - frame.captured_at_ns) / PERIOD_NS)
        view[:] = frame.data

    async def film(device):
        count = 0
        while stops_after is None or count < stops_after:
            await anyio.sleep(PERIOD_NS / 1e9)
            device.fill()
            count += 1

    async def main():
        device = Pictures(clock)
        source = LiveSource(Opener(device), name="test", reconnect=None, now=lambda: clock.now_ns)
        with clock.pin("opening"):
            await source.__aenter__()
        results = 0
        npu = SimulatedDevice("npu", run_time_s=run_ns / 1e9)
        async with aionn.open(devices=[npu]) as runtime, anyio.create_task_group() as tasks:
            net = await runtime.compile(identity())
            async with (
                net.burst(slots=1) as burst,
                way(source) as items,
                burst.stream(items, into=write) as stream,
            ):
                tasks.start_soon(film, device)
                with anyio.move_on_after(seconds):
                    async for _ in stream:
                        results += 1
            tasks.cancel_scope.cancel()
        with clock.pin("closing"):
            await source.__aexit__(None, None, None)
        return results

    return run(main, clock=clock), begun


@pytest.mark.parametrize("way", [directly, behind_tee, behind_two_tees])
def test_results_of_a_slow_device_are_of_pictures_that_have_just_come(way):
    # Without a wait the device would be free 0.8 periods after a picture, as often as at any other time.
    results, begun = streamed(int(1.8 * PERIOD_NS), way=way)
    steady = begun[12:]
    assert len(steady) > 70
    assert max(steady) < 0.1
    assert results >= 3.0 / (2 * PERIOD_NS / 1e9) - 15


def test_device_that_is_free_early_in_a_period_does_not_wait():
    results, begun = streamed(int(1.5 * PERIOD_NS))
    steady = begun[12:]
    assert max(steady) < 0.76
    assert results > 0.9 * 3.0 / (1.6 * PERIOD_NS / 1e9) - 15


@pytest.mark.parametrize("way", [directly, behind_tee])
def test_picture_that_does_not_come_is_waited_for_for_a_part_of_a_period_only(way):
    results, begun = streamed(int(1.8 * PERIOD_NS), stops_after=20, seconds=1.0, way=way)
    assert results == len(begun)
    assert begun[-1] <= 1.2


class Paced:
    """A source that expects its next item soon."""

    def __init__(self):
        self.items = asyncio.Queue()

    def __aiter__(self):
        return self

    async def __anext__(self):
        return await self.items.get()

    def worthwhile_wait_ns(self):
        return 10 * MS


def picture(index):
    return Frame(np.zeros((1, 1, 3), np.uint8), index, index, index / 30)


def test_each_branch_of_a_tee_waits_until_it_has_the_item_itself(tmp_path):
    async def body():
        source, calls = Paced(), []
        async with tee(source) as shared:
            one, two = shared.branch(), shared.branch()
            oldest = shared.branch(keep="oldest")
            recorded = record(tmp_path / "a.rec").through(two)
            assert not one.is_newer_due(calls.append), "the tee has not begun to read"
            source.items.put_nowait(picture(0))
            taken = [await anext(one), await anext(two)]

            def exchange(branch, name, item):
                return lambda: calls.append((name, branch.newest_in_place_of(item).index))

            assert one.is_newer_due(exchange(one, "one", taken[0]))
            assert recorded.is_newer_due(exchange(two, "two", taken[1]))
            assert recorded.worthwhile_wait_ns() == 10 * MS
            assert not oldest.is_newer_due(calls.append)
            source.items.put_nowait(picture(1))
            await anyio.sleep(0.001)
            assert sorted(calls) == [("one", 1), ("two", 1)]
            # A wait that nothing ends but its limit, or the end of its branch.
            calls.clear()
            assert one.is_newer_due(lambda: calls.append("limit"))
            assert two.is_newer_due(lambda: calls.append("closed"))
            two.close()
            assert not two.is_newer_due(calls.append)
            await anyio.sleep(0.001)
            assert calls == ["closed"]
            await anyio.sleep(0.01)
            assert calls == ["closed", "limit"]
        assert not one.is_newer_due(calls.append), "the tee has ended"

    run(body, clock=VirtualClock())


def test_tee_of_a_source_without_a_pace_expects_nothing():
    async def items():
        yield picture(0)
        await anyio.sleep(1)

    async def body():
        async with tee(items()) as shared:
            branch = shared.branch()
            await anext(branch)
            assert branch.worthwhile_wait_ns() == 0
            assert not branch.is_newer_due(lambda: None)

    run(body, clock=VirtualClock())
