"""The event loop's time in an application: measured at admission, shared by its devices, released with each end of a stream."""

import asyncio
import importlib.util

import anyio
import pytest

import aionn
from aionn.errors import NotAdmitted
from aionn.platform.stalls import NO_STALLS
from aionn.runtime.guarantees import loop_time
from aionn.runtime.guarantees.arrivals import Measured
from aionn.runtime.guarantees.granted import LOOP_ALLOWANCE_NS, loop_allowance_ns
from aionn.runtime.guarantees.guarantee import StreamReservation
from aionn.runtime.guarantees.loop_time import BodyTime, LoopParts, loop_ledger
from aionn.runtime.guarantees.reservations import DeviceReservations
from aionn.scheduler.admission import StreamTerms
from aionn.scheduler.dispatcher import Dispatcher
from aionn.scheduler.estimates import Estimates
from aionn.scheduler.reservations.event_loop import (
    FACTOR,
    NO_LOOP_COST,
    USUAL_LOOP_COST,
    LoopCost,
    LoopLedger,
)
from tests.aionn.runtime.guarantees.trial import Trial, camera, gate, npu, read

MS = 1_000_000


def device(loop, name="npu", slots=1):
    estimates = Estimates()
    dispatcher = Dispatcher(slots, now=lambda: 0, can_preempt=False, estimates=estimates)
    found = DeviceReservations(name, slots, dispatcher, estimates)
    found.loop = loop
    return found


def terms(period_ms=33, **values):
    values.setdefault("deadline_ns", period_ms * MS)
    return StreamTerms(name="gate", period_ns=period_ms * MS, **values)


COST = Measured(MS, 16, loop=LoopCost(round(250_000 / FACTOR), round(250_000 / FACTOR)))
"""With the factor of streams, half a millisecond of the loop."""


def filled(reservations, **values):
    held = []
    with pytest.raises(NotAdmitted) as caught:
        while True:
            held.append(reservations.admit(terms(**values), COST, "m", now_ns=0))
    return held, caught.value


# --- The reservations of devices ---


def test_devices_of_a_loop_share_it_and_count_the_refusal():
    loop = LoopLedger()
    first, second = device(loop), device(loop, "gpu")
    held, refusal = filled(first)
    assert len(held) == 20 and loop.count == 20 and "event loop" in refusal.reason
    others, late = filled(second)  # The first one has room for half a millisecond, twice.
    assert len(others) == second.count == 2 and "streams on npu/0 would be late" in late.reason
    assert first.refusals["event_loop"] == second.refusals["event_loop"] == 1
    assert first.refusals["no_time"] == 0
    assert "and 500 us of the event loop every 33 ms" in first.lines()[0]


def test_refusal_by_a_server_does_not_count_as_one_by_the_loop_that_came_meanwhile():
    loop = LoopLedger()
    reservations = device(loop)
    with pytest.raises(NotAdmitted), reservations.refusals_counted():
        assert filled(device(loop, "gpu"))[1].is_by_event_loop
        raise NotAdmitted("the served device has no room")
    assert reservations.refusals["no_time"] == 1 and reservations.refusals["event_loop"] == 0


def test_admission_counts_with_what_frames_take_by_now():
    """A stream of a device keeps what was measured of its executions, of which frames take more later."""
    loop = LoopLedger()
    reservations = device(loop)
    reservations.admit(terms(), COST, "m", now_ns=0)
    loop.factor = 2 * FACTOR
    reservations.admit(terms(), COST, "m", now_ns=0)
    assert loop.burst_ns == pytest.approx(2 * MS, rel=1e-4)


def test_slots_are_filled_evenly():
    """Filled one after the other, the first would have no room for the loop's parts of the others."""
    reservations = device(LoopLedger(), slots=2)
    held, _ = filled(reservations)
    slots = [one.reservation.slot for one in held]
    assert len(slots) == 30 and slots.count(0) == slots.count(
        1
    )  # 15 of 1 ms, and 30 times half a millisecond.


@pytest.mark.parametrize("end", ["end", "withdraw", "silent", "by_server", "change"])
def test_each_end_of_a_reservation_gives_the_loop_back(end):
    loop = LoopLedger()
    reservations = device(loop)
    held, _ = filled(reservations)
    if end == "end":
        for one in held:
            reservations.end(one)
    elif end == "withdraw":
        reservations.withdraw()
        reservations.restore()
    elif end == "by_server":
        for one in held:
            reservations._ended_by_server(one, "silent")
    elif end == "change":
        longer = reservations.change(held[0], terms(66), COST, now_ns=0)
        assert longer is held[0] and loop.count == 20
        assert loop.share == pytest.approx(0.0005 * (19 / 0.033 + 1 / 0.066), rel=1e-4)
        for one in held:
            reservations.end(one)
    else:
        assert len(filled(reservations)[0]) == 0
        reservations.admit(terms(), COST, "m", now_ns=60_000 * MS)
        assert loop.count == 1
        return
    assert loop.count == 0 and loop.share == 0
    assert len(filled(reservations)[0]) == 20


def test_end_under_a_frame_gives_the_loop_back_with_the_slot():
    loop = LoopLedger()
    reservations = device(loop)
    held = reservations.admit(terms(), COST, "m", now_ns=0)
    held.in_progress += 1
    reservations.end(held)
    assert loop.count == 1
    held.in_progress -= 1
    reservations.frame_ended(held)
    assert loop.count == 0


def test_duration_that_grows_holds_the_loop_once():
    loop = LoopLedger()
    reservations = device(loop)
    held = reservations.admit(terms(), COST, "m", now_ns=0)
    grown = reservations.change(held, terms(), COST._replace(duration_ns=2 * MS), now_ns=0)
    assert grown is not held and loop.count == 1
    reservations.end(held)
    assert loop.count == 1
    reservations.end(grown)
    assert loop.count == 0


def test_terms_that_demand_more_are_admitted_beside_the_old_ones():
    loop = LoopLedger()
    reservations = device(loop)
    held = reservations.admit(terms(33), COST, "m", now_ns=0)
    quicker = reservations.change(held, terms(20), COST, now_ns=0)
    assert loop.count == 2
    reservations.end(held)
    assert loop.count == 1 and loop.share == pytest.approx(0.5 / 20, rel=1e-4)
    reservations.end(quicker)


def test_way_through_the_loop_is_jitter_to_a_served_device():
    reservations = device(LoopLedger())
    asked = reservations.asked(terms(jitter_ns=MS), COST, "m", now_ns=0, chooses_phase=False)
    assert asked.jitter_ns == MS + loop_allowance_ns(terms(jitter_ns=MS)) == 5 * MS
    assert loop_allowance_ns(terms(5000)) == LOOP_ALLOWANCE_NS
    reservations.loop = None
    assert reservations.asked(terms(), COST, "m", now_ns=0, chooses_phase=False).jitter_ns == 0


# --- The measurement ---


class Thread:
    """A thread whose processor time tests decide."""

    def __init__(self):
        self.ran_ns = 0

    def __call__(self):
        return self.ran_ns

    async def executes(self, before_ns, after_ns, error=None):
        self.ran_ns += before_ns
        await asyncio.sleep(0)
        self.ran_ns += after_ns
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return "done"


async def test_parts_of_executions_are_measured_and_the_first_and_other_work_left_out():
    thread = Thread()
    parts = LoopParts(thread)
    for before, after in [(5000, 5000), *[(100, 200)] * 4, *[(100, 1200)] * 6]:
        assert await parts.measured(thread.executes(before, after)) == "done"
    assert parts.cost(1) == LoopCost(100, 200)
    assert LoopParts(thread).cost(0) == NO_LOOP_COST


async def test_execution_that_fails_or_never_waits_passes_through_its_measurement():
    thread = Thread()
    parts = LoopParts(thread)

    async def immediate():
        thread.ran_ns += 30
        return 7

    assert await parts.measured(immediate()) == 7 and parts.cost(0) == LoopCost(30, 0)
    with pytest.raises(aionn.DeadObject):
        await parts.measured(thread.executes(1, 1, aionn.DeadObject("gone")))


async def test_cancelled_measurement_cancels_the_execution():
    seen = []

    async def waits():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0)
            raise

    task = asyncio.create_task(LoopParts(Thread()).measured(waits()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]


async def test_body_that_waits_is_no_callback(monkeypatch):
    thread, loop, seen = Thread(), LoopLedger(), []
    monkeypatch.setattr(loop_time, "loop_ran_ns", thread)
    monkeypatch.setattr(loop, "blocked", seen.append)
    body = BodyTime(loop, asyncio.get_running_loop().call_soon)
    body.end()
    body.begin()
    thread.ran_ns += 3 * MS
    body.end()
    body.begin()
    await asyncio.sleep(0)
    body.end()
    assert seen == [3 * MS]
    nothing = BodyTime(None, lambda call: None)
    nothing.begin()
    nothing.end()


async def test_loop_has_one_ledger_for_all_runtimes():
    assert loop_ledger() is loop_ledger() is not None


def test_virtual_time_counts_no_loop():
    async def main(trial):
        async with trial.net.burst() as burst, gate(burst, camera(2, 0.04)) as results:
            assert trial.held.loop is None and results.reservation.loop_before_ns == 0
            assert "event loop" not in str(results.reservation)
            assert await read(results) == [("on_time", None)] * 2

    Trial(npu()).play(main)


def test_reservation_tells_the_time_of_the_loop():
    found = StreamReservation(
        "npu/0", MS, 16, MS, 0.1, MS, MS, 0, 0, 0, loop_before_ns=200, loop_after_ns=300
    )
    assert str(found).endswith(", 500 ns of the event loop")


async def test_real_stream_is_measured_on_the_loop_and_gives_it_back(shared_runtime, monkeypatch):
    from aionn.testing import models

    monkeypatch.setattr("aionn.runtime.guarantees.guarantee.stalls_of_loop", lambda: NO_STALLS)
    net = await shared_runtime.compile(models.identity((4,)))
    with anyio.fail_after(60):
        async with (
            net.burst(slots=4) as burst,
            gate(burst, camera(3, 0.01), period=0.5, deadline=1.0) as results,
        ):
            found = results.reservation
            assert found.loop_before_ns > 0 and found.loop_after_ns >= 0
            assert found.loop_before_ns + found.loop_after_ns != USUAL_LOOP_COST.times(FACTOR).total_ns
            assert loop_ledger().count == 1
            assert len(await read(results)) == 3
        assert loop_ledger().count == 0


@pytest.mark.thorough
async def test_admitted_streams_of_a_full_loop_are_on_time(tmp_path):
    """A share of the frames alone is asserted: this machine has other work."""
    if importlib.util.find_spec("ai_edge_litert") is None:
        pytest.skip("ai_edge_litert is not installed")
    from benchmarks.capacity.__main__ import paths_of
    from benchmarks.capacity.event_loop import STREAMS_MAX, served

    paths = paths_of("litert", "shapes", tmp_path)
    if paths is None:
        pytest.skip("the model's file is missing")
    with anyio.fail_after(120):
        found = await served(paths[0], STREAMS_MAX, 1.0)
    assert 0 < found.admitted < STREAMS_MAX and "event loop" in found.refusal
    assert found.counted_us > 0 and found.share > 0.5
