"""Streams with a guarantee in virtual time: admitted and kept, or refused with an offer that fits; and nothing is left behind."""

import asyncio
import contextlib
import gc

import anyio
import anyio.lowlevel
import pytest

import aionn
from aionn.drivers.simulated.profiles import Draw, Fault
from aionn.runtime.executions.results import StreamStatistics
from aionn.runtime.guarantees.measuring import COLD_EXECUTIONS, WARM_UP_EXECUTIONS
from aionn.testing import models
from tests.aionn.runtime.guarantees.trial import Frame, Trial, X, camera, gate, npu, read

WARM_UP = COLD_EXECUTIONS + WARM_UP_EXECUTIONS


def test_reservation_is_known_before_the_first_frame():
    async def main(trial):
        async with trial.net.burst() as burst, gate(burst, camera(3, 0.04), jitter=0.002) as results:
            found = results.reservation
            assert (found.slot, found.timings, found.end) == ("npu/0", WARM_UP_EXECUTIONS, "")
            assert 4_000_000 < found.duration_ns < 4_400_000 == pytest.approx(found.duration_ns, rel=0.1)
            assert found.piece_ns == found.duration_ns
            assert found.share == pytest.approx(found.duration_ns / 40e6, rel=1e-4)
            assert found.at_ns == 28_000_000 and found.slack_ns == 28_000_000 - found.duration_ns
            assert trial.device.statistics().started == WARM_UP
            assert "npu/0" in str(found) and "slack" in str(found)
            assert await read(results) == [("on_time", None)] * 3
            assert results.statistics() == StreamStatistics(3, 0, 0)

    Trial(npu()).play(main)


def test_learnt_durations_need_no_warm_up():
    async def main(trial):
        async with trial.net.burst() as burst:
            for _ in range(20):
                await burst.execute([X])
            async with gate(burst, camera(1, 0.04)) as results:
                assert trial.device.statistics().started == 20
                assert results.reservation.timings == 20

    Trial(npu()).play(main)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(
    "preemption", ["none", pytest.param("between_operations", marks=pytest.mark.thorough)]
)
def test_admitted_streams_beside_a_flood_lose_no_frame(slots, preemption):
    """Best effort of all classes fills the device; every reserved frame is on time, without a label."""

    async def main(trial):
        seen = []
        other = await trial.runtime.compile(models.identity((4,), operations=4), priority="high")

        async def flood(priority, deadline_s):
            while True:
                with contextlib.suppress(aionn.Error):
                    await other.execute([X], priority=priority, deadline=trial.clock.after(deadline_s))
                await anyio.sleep(0.002)

        async def watch(index, period, deadline):
            async with (
                trial.net.burst(slots=3) as burst,
                gate(
                    burst,
                    camera(40, period, first_s=0.003 * index),
                    period=period,
                    deadline=deadline,
                    jitter=0,
                    name=f"gate-{index}",
                ) as results,
            ):
                seen.extend(await read(results))

        await other.execute([X])
        async with anyio.create_task_group() as floods:
            for priority in ("low", "medium", "high"):
                for _ in range(4):
                    floods.start_soon(flood, priority, 0.05)
            async with anyio.create_task_group() as streams:
                for index, terms in enumerate([(0.040, 0.040), (0.050, 0.030), (0.033, 0.033)]):
                    streams.start_soon(watch, index, *terms)
            floods.cancel_scope.cancel()
        assert seen == [("on_time", None)] * 120
        assert trial.device.statistics().finished > 300
        assert trial.reserved == (0, 0.0)

    Trial(npu(slots=slots, preemption=preemption), operations=4).play(main)


def test_refused_stream_is_told_what_would_fit_and_that_is_admitted():
    async def main(trial):
        async with trial.net.burst(slots=4) as burst, contextlib.AsyncExitStack() as stack:
            for index in range(3):
                await stack.enter_async_context(
                    gate(burst, camera(0, 1), deadline=0.040, name=f"gate-{index}")
                )
            refused = gate(burst, camera(0, 1), deadline=0.006, jitter=0.001, name="door")
            with pytest.raises(aionn.NotAdmitted) as caught:
                await refused.admit()
            error = caught.value
            assert 'stream "door" on npu/0: at t = 5 ms' in error.reason and error.reason in str(error)
            assert burst.statistics().streams == 3, "the refused one has ended"
            assert trial.held.count == 3
            deadline = error.would_fit.deadline_ns / 1e9
            async with gate(burst, camera(0, 1), deadline=deadline, jitter=0.001):
                assert trial.held.count == 4
            with pytest.raises(aionn.NotAdmitted):
                await gate(burst, camera(0, 1), deadline=deadline - 0.001, jitter=0.001).admit()
        assert trial.reserved == (0, 0.0)

    Trial(npu()).play(main)


def test_period_that_is_offered_is_admitted():
    async def main(trial):
        async with trial.net.burst(slots=8) as burst, gate(burst, camera(0, 1), period=0.008, deadline=0.020):
            with pytest.raises(aionn.NotAdmitted) as caught:
                await gate(burst, camera(0, 1), period=0.008, deadline=0.040).admit()
            period = caught.value.would_fit.period_ns / 1e9
            async with gate(burst, camera(0, 1), period=period, deadline=0.040) as results:
                assert results.reservation.end == ""

    Trial(npu()).play(main)


def test_best_runs_without_a_reservation_where_there_is_no_room():
    async def main(trial):
        async with (
            trial.net.burst(slots=8) as burst,
            gate(burst, camera(0, 1), period=0.0047, deadline=0.024),
        ):
            results = gate(burst, camera(3, 0.04), guarantee="best")
            async with results:
                assert results.reservation is None
                assert "0.950 may be reserved" in results.refusal.reason
                assert "best effort" in results.explain()
                assert await read(results) == [("on_time", None)] * 3
            assert trial.reserved[0] == 1

    Trial(npu()).play(main)


def test_stream_is_admitted_by_its_first_result_without_async_with():
    async def main(trial):
        async with trial.net.burst() as burst:
            results = gate(burst, camera(2, 0.04))
            assert results.reservation is None
            assert await read(results) == [("on_time", None)] * 2
            assert results.reservation.end == "released"

    Trial(npu()).play(main)


def test_frames_that_come_too_early_are_counted_and_told():
    async def main(trial):
        async with trial.net.burst(slots=3) as burst, gate(burst, camera(20, 0.020), jitter=0) as results:
            seen = await read(results)
        assert seen == [("on_time", None), ("on_time", "early")] * 10
        assert results.statistics().early == 10
        assert "20 frames, 10 early" in results.explain()

    Trial(npu()).play(main)


def test_frames_that_were_captured_long_before_are_delayed():
    async def frames(clock):
        for _ in range(3):
            yield Frame(clock, late_s=0.010)
            await anyio.sleep(0.04)

    async def main(trial):
        async with trial.net.burst() as burst:
            stream = gate(burst, frames(trial.clock), jitter=0.002, into=lambda item, view: None)
            async with stream as results:
                async for result in results:
                    assert result.deadline_ns == result.item.captured_at_ns + 30_000_000
                    assert result.label == "delayed"
            assert results.statistics().delayed == 3

    Trial(npu()).play(main)


def test_frames_that_take_longer_overran_and_are_labelled_also_where_they_are_dropped():
    def script():
        yield from [Draw()] * WARM_UP
        while True:
            yield Draw(factor=10.0)
            yield Draw()

    async def main(trial):
        async with trial.net.burst(slots=3) as burst, gate(burst, camera(4, 0.1), period=0.1) as results:
            seen = await read(results)
            assert seen[0] == ("dropped", "overran")
            assert all(label == "overran" for status, label in seen if status != "on_time")
            assert results.statistics().overran >= 1

    Trial(npu(script=script())).play(main)


def test_best_effort_that_is_too_long_is_rejected_while_time_is_reserved():
    async def main(trial):
        long = await trial.runtime.compile(models.identity((4,), operations=4))
        async with trial.net.burst() as burst:
            async with gate(burst, camera(0, 1), period=0.040, deadline=0.006, jitter=0):
                with pytest.raises(
                    aionn.ResourceExhausted, match="longer than the reserved frames"
                ) as caught:
                    await long.execute([X])
                assert caught.value.transient
            await long.execute([X])

    Trial(npu()).play(main)


def test_stream_that_is_too_long_to_be_measured_is_admitted_by_what_its_driver_declares():
    async def main(trial):
        async with (
            trial.net.burst() as burst,
            trial.net.burst() as other,
            gate(burst, camera(0, 1), deadline=0.006, jitter=0),
            gate(other, camera(2, 0.04), deadline=0.006, jitter=0) as results,
        ):
            found = results.reservation
            assert (found.slot, found.timings, found.duration_ns) == ("npu/1", 0, 5_200_000)
            assert await read(results) == [("on_time", None)] * 2
            with pytest.raises(aionn.NotAdmitted, match="npu/") as caught:
                async with trial.net.burst() as third:
                    await gate(third, camera(0, 1), deadline=0.005, jitter=0).admit()
            assert caught.value.would_fit.deadline_ns is None
        assert trial.reserved == (0, 0.0)

    Trial(npu(slots=2)).play(main)


def test_models_that_ran_count_as_blocking_and_go_on():
    async def main(trial):
        other = await trial.runtime.compile(models.identity((4,), operations=7))
        await other.execute([X])
        async with trial.net.burst() as burst:
            with pytest.raises(aionn.NotAdmitted, match='"a model of 7 operations" may occupy'):
                async with gate(burst, camera(0, 1), period=0.040, deadline=0.007, jitter=0):
                    pass
            async with gate(burst, camera(0, 1), period=0.040, deadline=0.011, jitter=0):
                await other.execute([X])

    Trial(npu()).play(main)


def test_models_of_bursts_that_are_closed_do_not_count_as_blocking():
    async def main(trial):
        other = await trial.runtime.compile(models.identity((4,), operations=7))
        async with other.burst() as closed:
            await closed.execute([X])
        async with (
            trial.net.burst() as burst,
            gate(burst, camera(0, 1), period=0.040, deadline=0.007, jitter=0),
        ):
            pass
        assert closed is not None

    Trial(npu()).play(main)


# --- Changes ----------------------------------------------------------------------------------------------------------------------


def test_change_is_admitted_before_the_old_reservation_ends():
    async def main(trial):
        async with trial.net.burst(slots=4) as burst, gate(burst, camera(4, 0.04)) as results:
            first = await results.__anext__()
            assert first.status == "on_time"
            faster = await results.change(period=0.020, deadline=0.020)
            assert faster.period_ns == 20_000_000 and trial.held.count == 1
            assert trial.held.share(0) == pytest.approx(faster.share, abs=1e-5)
            slower = await results.change(period=0.040)
            assert slower.share < faster.share and trial.held.count == 1
            assert await read(results) == [("on_time", None)] * 3
        assert trial.reserved == (0, 0.0)

    Trial(npu()).play(main)


def test_change_that_does_not_fit_leaves_the_old_terms():
    async def main(trial):
        async with trial.net.burst(slots=4) as burst, gate(burst, camera(2, 0.04)) as results:
            before = results.reservation
            with pytest.raises(aionn.NotAdmitted):
                await results.change(period=0.0045, deadline=0.0045)
            with pytest.raises(aionn.InvalidArgument, match="period"):
                await results.change(period=20_000_000)
            with pytest.raises(aionn.InvalidArgument, match="slots or more"):
                await results.change(deadline=1.0)
            assert results.reservation == before
            assert await read(results) == [("on_time", None)] * 2
            with pytest.raises(aionn.InvalidArgument, match="ended"):
                await results.change(period=0.05)

    Trial(npu()).play(main)


# --- Ends -------------------------------------------------------------------------------------------------------------------------


async def failing(count):
    async for item in camera(count, 0.04):
        yield item
    raise OSError("the camera is gone")


@pytest.mark.parametrize("way", ["read", "left", "cancelled", "twice", "dropped", "raised", "burst", "net"])
def test_nothing_stays_reserved(way):
    async def main(trial):
        burst = await trial.net.burst().__aenter__()
        source = failing(2) if way == "raised" else camera(3, 0.04)
        stream = gate(burst, source)
        if way == "raised":
            with pytest.raises(OSError, match="gone"):
                await read(stream)
        elif way == "read":
            await read(stream)
        elif way == "left":
            async with stream:
                await stream.__anext__()
        elif way in ("cancelled", "twice"):
            await stream.admit()

            async def consume():
                async with stream:
                    await read(stream)

            task = asyncio.ensure_future(consume())
            await anyio.sleep(0.042)
            for _ in range(1 if way == "cancelled" else 2):
                task.cancel()
                await anyio.lowlevel.checkpoint()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
        elif way == "dropped":
            await stream.__anext__()
            del stream
            gc.collect()
        elif way == "burst":
            await stream.__anext__()
            await burst.aclose()
        else:
            await stream.__anext__()
            await trial.net.aclose()
        await anyio.sleep(0.1)
        assert trial.reserved == (0, 0.0)
        assert trial.held.counts()["released"] == trial.held.counts()["admitted"] == 1
        assert trial.runtime.devices[0].dispatcher.explain() == "slot 0: free"
        await burst.aclose()

    Trial(npu()).play(main)


def test_time_of_a_stream_is_free_when_the_device_is_done_with_its_last_frame():
    async def main(trial):
        async with trial.net.burst() as burst:
            stream = gate(burst, camera(3, 0.04))
            await stream.admit()
            with anyio.move_on_after(0.002):
                await stream.__anext__()
            stream.cancel()
            assert trial.held.count == 1, "the device still has a frame"
            await anyio.sleep(0.004)
            assert trial.reserved == (0, 0.0)

    Trial(npu()).play(main)


def test_admission_that_is_cancelled_reserves_nothing():
    async def main(trial):
        async with trial.net.burst() as burst:
            stream = gate(burst, camera(3, 0.04))
            with anyio.move_on_after(0.010):
                await stream.admit()
            assert trial.reserved == (0, 0.0)
            await stream.admit()
            assert trial.reserved[0] == 1
            stream.cancel()
            assert trial.reserved == (0, 0.0)
            with pytest.raises(aionn.InvalidArgument, match="ended"):
                await stream.admit()

    Trial(npu()).play(main)


def test_stream_that_ends_while_it_is_measured_reserves_nothing():
    async def main(trial):
        async with trial.net.burst() as burst, anyio.create_task_group() as tasks:
            stream = gate(burst, camera(3, 0.04))

            async def admit():
                with pytest.raises(aionn.InvalidArgument, match="ended"):
                    await stream.admit()

            tasks.start_soon(admit)
            await anyio.sleep(0.010)
            stream.cancel()
        assert trial.reserved == (0, 0.0)

    Trial(npu()).play(main)


def test_device_that_dies_withdraws_all_reservations_and_is_measured_again():
    def script():
        yield from [Draw()] * (WARM_UP + 3)
        yield Draw(fault=Fault.DEATH, at_share=0.5)
        while True:
            yield Draw()

    async def main(trial):
        async with trial.net.burst() as first, trial.net.burst() as second:
            other = gate(second, camera(0, 1))
            async with gate(first, camera(9, 0.04)) as results:
                with pytest.raises(aionn.DeadObject):
                    await read(results)
                assert results.statistics().withdrawn == 1
                assert results.reservation.end == "withdrawn"
                assert "withdrawn" in results.explain()
                assert trial.reserved == (0, 0.0) and trial.held.counts()["withdrawn"] == 1
                with pytest.raises(aionn.DeadObject):
                    await other.admit()
            again = await trial.runtime.compile(models.identity((4,)))
            async with again.burst() as burst, gate(burst, camera(2, 0.04)) as results:
                assert await read(results) == [("on_time", None)] * 2
        assert trial.reserved == (0, 0.0)

    Trial(npu(script=script())).play(main)


def test_client_that_sends_nothing_keeps_nobody_out():
    async def main(trial):
        async with (
            trial.net.burst(slots=4) as burst,
            gate(burst, camera(9, 0.006), period=0.006, deadline=0.006) as idle,
        ):
            with pytest.raises(aionn.NotAdmitted):
                await gate(burst, camera(2, 0.04)).admit()
            await anyio.sleep(31)
            async with gate(burst, camera(2, 0.04)) as results:
                assert idle.reservation.end == "silent"
                assert await read(results) == [("on_time", None)] * 2
            assert (await idle.__anext__()).label == "withdrawn"
            assert (await idle.change()).end == ""
        assert trial.reserved == (0, 0.0)

    Trial(npu()).play(main)


# --- What is refused --------------------------------------------------------------------------------------------------------------


def test_model_of_a_reserved_stream_is_not_replaced_while_it_runs():
    async def main(trial):
        model = models.identity((4,), operations=2)
        async with trial.net.burst() as burst:
            async with gate(burst, camera(5, 0.04)) as results:
                with pytest.raises(aionn.InvalidArgument, match="a stream with a guarantee"):
                    await trial.net.replace(model)
                assert await read(results) == [("on_time", None)] * 5
            await trial.net.replace(model)
            assert await read(burst.stream(camera(2, 0.04))) == [("on_time", None)] * 2

    Trial(npu()).play(main)


def test_stream_of_a_burst_that_is_not_open_is_refused():
    async def main(trial):
        with pytest.raises(aionn.InvalidArgument, match="async with"):
            gate(trial.net.burst(), camera(1, 0.04))

    Trial(npu()).play(main)


def test_arguments_that_make_no_guarantee_are_refused():
    async def main(trial):
        async with trial.net.burst() as burst:
            with pytest.raises(aionn.InvalidArgument, match="guarantee=True"):
                burst.stream(camera(1, 1), period=0.04)
            with pytest.raises(aionn.InvalidArgument, match="expected a function"):
                burst.stream(camera(1, 1), deadline=0.03)
            with pytest.raises(aionn.InvalidArgument, match='True, False, "best" or "phased"'):
                burst.stream(camera(1, 1), guarantee="spread", period=0.04)
            with pytest.raises(aionn.InvalidArgument, match="expected a burst with 4 slots or more, got 2"):
                gate(burst, camera(1, 1), deadline=0.1)
            assert burst.statistics().streams == 0

    Trial(npu()).play(main)
