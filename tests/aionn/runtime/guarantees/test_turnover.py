"""Streams that come and go: a reservation that has ended counts as long as frames that counted with it are in progress."""

import contextlib
import random

import anyio
import pytest

import aionn
from aionn.runtime.guarantees.arrivals import FrameArrival, Measured
from aionn.runtime.guarantees.reservations import DeviceReservations
from aionn.scheduler.admission import StreamTerms
from aionn.scheduler.dispatcher import Dispatcher
from aionn.scheduler.estimates import Estimates
from tests.aionn.runtime.guarantees.trial import Trial, X, camera, gate, npu, read

MS = 1_000_000


def of_one_device():
    estimates = Estimates()
    return DeviceReservations("npu", 1, Dispatcher(1, now=lambda: 0, estimates=estimates), estimates)


def test_ended_reservation_counts_until_its_slot_is_idle():
    reservations = of_one_device()
    terms = StreamTerms(name="gate", period_ns=10 * MS, deadline_ns=10 * MS)
    measured = Measured(5 * MS, 16)
    first = reservations.admit(terms, Measured(4 * MS, 16), "a", now_ns=0)
    second = reservations.admit(terms, measured, "b", now_ns=0)
    # The device has run a frame of the first, which the second one's has waited for and still needs its time.
    running, waiting = (FrameArrival(reservations, held) for held in (first, second))
    running.ended()
    reservations.end(first)
    assert (first.end, reservations.count) == ("released", 2)
    with pytest.raises(aionn.NotAdmitted):
        reservations.admit(terms, measured, "c", now_ns=5 * MS)
    waiting.ended()
    assert reservations.count == 1
    assert reservations.admit(terms, Measured(4 * MS, 16), "c", now_ns=9 * MS)


def test_ended_reservation_of_an_idle_slot_is_free_immediately():
    reservations = of_one_device()
    terms = StreamTerms(name="gate", period_ns=10 * MS, deadline_ns=10 * MS)
    held = reservations.admit(terms, Measured(4 * MS, 16), "a", now_ns=0)
    reservations.end(held)
    assert reservations.count == 0 and reservations.counts()["released"] == 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 60))])
@pytest.mark.thorough
def test_streams_that_come_and_go_lose_no_frame_without_a_label(seed):
    source = random.Random(seed)
    frames = []

    async def main(trial):
        async with contextlib.AsyncExitStack() as stack:
            bursts = [await stack.enter_async_context(trial.net.burst(slots=4)) for _ in range(8)]
            for _ in range(16):
                await bursts[0].execute([X])

            async def streams(burst):
                await anyio.sleep(source.uniform(0, 0.05))
                for _ in range(20):
                    period = source.choice((0.02, 0.03, 0.04))
                    deadline = period * source.uniform(0.3, 1)
                    items = camera(source.randrange(1, 4), period)
                    stream = gate(burst, items, period=period, deadline=deadline, jitter=0)
                    try:
                        async with stream as results:
                            frames.extend(await read(results))
                    except aionn.NotAdmitted:
                        await anyio.sleep(source.uniform(0, 0.02))

            async with anyio.create_task_group() as group:
                for burst in bursts:
                    group.start_soon(streams, burst)
        assert trial.reserved == (0, 0.0)

    Trial(npu(0.004)).play(main)
    assert [frame for frame in frames if frame[0] != "on_time" and frame[1] is None] == []
    assert len(frames) > 100
