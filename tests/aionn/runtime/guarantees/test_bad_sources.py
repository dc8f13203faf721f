"""Sources and devices that break their promises: the stream itself pays, is told so, and no other stream loses a frame."""

import contextlib

import anyio
import pytest

import aionn
from aionn.drivers.simulated.profiles import Draw, Fault
from aionn.runtime.guarantees.guarantee import RENEWAL_FRAMES
from aionn.runtime.guarantees.measuring import COLD_EXECUTIONS, WARM_UP_EXECUTIONS
from aionn.testing import models
from tests.aionn.runtime.guarantees.trial import Trial, X, camera, gate, npu, read

WARM_UP = COLD_EXECUTIONS + WARM_UP_EXECUTIONS

GOOD = [("on_time", None)]


async def bursts_of_frames(count, size, period_s):
    """Frames that come ``size`` at a time, at their mean rate."""
    start_s = anyio.current_time()
    for index in range(count):
        await anyio.sleep_until(start_s + index // size * size * period_s)
        yield X


async def played_beside(trial, source, *, slots=4):
    """A bad source beside a good camera that has the rest of the slot: the results of both, and the statistics of the bad one."""
    seen = {}
    async with trial.net.burst(slots=slots) as bad_burst, trial.net.burst(slots=3) as good_burst:
        bad = gate(bad_burst, source, period=0.010, deadline=0.010, jitter=0, name="bad")
        good = gate(good_burst, camera(40, 0.010, first_s=0.0001), period=0.010, deadline=0.010, name="good")
        async with bad, good, anyio.create_task_group() as tasks:

            async def consume(name, stream):
                seen[name] = await read(stream)

            tasks.start_soon(consume, "bad", bad)
            tasks.start_soon(consume, "good", good)
        return seen, bad.statistics()


def test_source_that_is_twice_as_fast_keeps_every_second_frame_and_harms_no_other_stream():
    async def main(trial):
        seen, statistics = await played_beside(trial, camera(80, 0.005))
        assert seen["good"] == GOOD * 40
        assert statistics.early == 40
        assert [status for status, label in seen["bad"] if label is None] == ["on_time"] * 40

    Trial(npu()).play(main)


@pytest.mark.parametrize("captured_at_ns", [None, "12", float("nan")])
def test_frame_without_a_time_ends_its_stream_with_a_sentence(captured_at_ns):
    class Item:
        pass

    async def items():
        item = Item()
        item.captured_at_ns = captured_at_ns
        yield item

    async def main(trial):
        async with trial.net.burst(slots=3) as burst:
            stream = burst.stream(items(), into=lambda item, view: None, guarantee=True, period=0.010)
            with pytest.raises(aionn.InvalidArgument, match=r"^stream: .*expected .*nanoseconds"):
                await anext(stream)

    Trial(npu()).play(main)


@pytest.mark.parametrize("size", [2, 5])
def test_source_that_is_bursty_is_early_but_for_one_frame_of_each_burst_and_harms_no_other_stream(size):
    async def main(trial):
        seen, statistics = await played_beside(trial, bursts_of_frames(40, size, 0.010), slots=size + 2)
        assert seen["good"] == GOOD * 40
        assert statistics.early == 40 - 40 // size
        assert [status for status, label in seen["bad"] if label is None] == ["on_time"] * (40 // size)

    Trial(npu()).play(main)


def test_durations_that_were_measured_on_a_cold_device_do_not_count():
    def script():
        yield from [Draw(factor=5.0)] * COLD_EXECUTIONS
        while True:
            yield Draw()

    async def main(trial):
        async with trial.net.burst(slots=3) as burst, gate(burst, camera(3, 0.04)) as results:
            assert results.reservation.duration_ns < 4_400_000
            assert await read(results) == GOOD * 3

    Trial(npu(script=script())).play(main)


def test_learnt_durations_and_those_of_best_effort_are_those_of_a_warm_device():
    def script():
        for warm_count in (21, 0):
            yield from [Draw(factor=5.0)] * COLD_EXECUTIONS
            yield from [Draw()] * warm_count
        while True:
            yield Draw()

    async def main(trial):
        other = await trial.runtime.compile(models.identity((4,)))
        async with trial.net.burst(slots=3) as burst:
            for _ in range(20):
                await burst.execute([X])
            async with gate(burst, camera(3, 0.04)) as results:
                assert results.reservation.duration_ns < 4_400_000 and results.reservation.timings == 20
                assert await read(results) == GOOD * 3
            for _ in range(3):
                await other.execute([X])
            async with gate(burst, camera(3, 0.04), deadline=0.012, jitter=0) as results:
                assert await read(results) == GOOD * 3

    Trial(npu(script=script())).play(main)


def slower(factor):
    """A device that takes longer from the first frame on than while it was measured."""
    yield from [Draw()] * WARM_UP
    while True:
        yield Draw(factor=factor)


def test_device_that_becomes_slower_is_told_frame_by_frame_until_its_duration_is_learnt():
    async def main(trial):
        async with trial.net.burst(slots=3) as burst, gate(burst, camera(80, 0.04)) as results:
            before = results.reservation
            seen = await read(results)
            after = results.reservation
        first = [label for _, label in seen[:RENEWAL_FRAMES]]
        assert set(first) == {"overran"}
        assert seen[-16:] == GOOD * 16
        assert after.duration_ns >= 6_000_000 > before.duration_ns and after.end == "released"
        assert results.statistics().overran == sum(label is not None for _, label in seen) >= RENEWAL_FRAMES
        assert trial.reserved == (0, 0.0)

    Trial(npu(script=slower(1.5))).play(main)


def test_reservation_that_cannot_grow_stays_and_no_other_stream_loses_a_frame():
    async def main(trial):
        before, after, seen = {}, {}, {}
        async with trial.net.burst(slots=9) as burst:
            slow = gate(burst, camera(60, 0.02), period=0.020, deadline=0.020, name="slow")
            other = gate(burst, camera(60, 0.02, first_s=0.010), period=0.020, deadline=0.020, name="other")
            third = gate(burst, camera(0, 1), period=0.020, deadline=0.020, name="third")
            async with slow, other, third, anyio.create_task_group() as tasks:
                for name, stream in (("slow", slow), ("other", other)):
                    before[name] = stream.reservation

                async def consume(name, stream):
                    seen[name] = await read(stream)
                    after[name] = stream.reservation

                tasks.start_soon(consume, "slow", slow)
                tasks.start_soon(consume, "other", other)
        for name in ("slow", "other"):
            assert after[name].duration_ns == before[name].duration_ns
            assert {label for _, label in seen[name]} == {"overran"}
            assert [status for status, _ in seen[name]] == ["on_time"] * 60

    Trial(npu(script=slower(1.6))).play(main)


def test_lane_that_dies_withdraws_all_of_its_ten_reservations():
    def script():
        yield from [Draw()] * (WARM_UP + 25)
        yield Draw(fault=Fault.DEATH, at_share=0.5)
        while True:
            yield Draw()

    async def main(trial):
        ends, errors = [], []
        async with contextlib.AsyncExitStack() as stack:
            burst = await stack.enter_async_context(trial.net.burst(slots=30))
            streams = [
                await stack.enter_async_context(
                    gate(burst, camera(9, 0.1), period=0.1, deadline=0.1, name=f"{number}")
                )
                for number in range(10)
            ]
            assert trial.held.count == 10

            async def consume(stream):
                try:
                    await read(stream)
                except aionn.DeadObject as e:
                    errors.append(e)
                ends.append(stream.reservation.end)

            async with anyio.create_task_group() as tasks:
                for stream in streams:
                    tasks.start_soon(consume, stream)
        assert ends == ["withdrawn"] * 10 and len(errors) == 10
        assert trial.reserved == (0, 0.0) and trial.held.counts()["withdrawn"] == 10

    Trial(npu(script=script())).play(main)


def test_client_that_reserves_everything_and_sends_nothing_keeps_no_other_out():
    async def silent():
        await anyio.sleep(1000)
        yield X

    async def main(trial):
        async with contextlib.AsyncExitStack() as stack:
            burst = await stack.enter_async_context(trial.net.burst(slots=4))
            greedy = []
            with pytest.raises(aionn.NotAdmitted):
                while True:
                    stream = gate(burst, silent(), period=0.012, deadline=0.012, name="greedy")
                    await stack.enter_async_context(stream)
                    greedy.append(stream)
            other = gate(burst, camera(3, 0.012), period=0.012, deadline=0.012)
            with pytest.raises(aionn.NotAdmitted):
                await other.admit()
            await anyio.sleep(31)
            async with gate(burst, camera(3, 0.012), period=0.012, deadline=0.012) as results:
                assert await read(results) == GOOD * 3
            assert greedy and {stream.reservation.end for stream in greedy} == {"silent"}

    Trial(npu()).play(main)
