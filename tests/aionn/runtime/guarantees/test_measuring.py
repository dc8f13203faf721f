"""Device times without the time in which the machine did not run the threads: of a warm-up, and of reserved frames."""

from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from aionn.drivers.simulated.profiles import Draw
from aionn.hal import Priority
from aionn.runtime.executions.results import Result
from aionn.runtime.guarantees.arrivals import FrameArrival, Measured
from aionn.runtime.guarantees.measuring import COLD_EXECUTIONS, WARM_UP_EXECUTIONS, measure, stalled_within
from aionn.runtime.guarantees.reservations import DeviceReservations
from aionn.scheduler.admission import StreamTerms
from aionn.scheduler.bandwidth import Label
from aionn.scheduler.dispatcher import Dispatcher
from aionn.scheduler.estimates import Estimates
from aionn.testing import VirtualClock
from aionn.testing import run as run_in_virtual_time
from tests.aionn.runtime.guarantees.trial import Trial, X, camera, gate, npu, read

MS = 1_000_000


class Stalled:
    """The stalls of one execution."""

    def __init__(self, stalled_ns: int) -> None:
        self.stalled_ns = stalled_ns
        self.looked_ns: int | None = None

    def look(self, now_ns: int) -> None:
        self.looked_ns = now_ns

    def since(self, then_ns: int, now_ns: int, began_ns: int | None = None) -> int:
        return self.stalled_ns if self.looked_ns == then_ns < now_ns else 0


def warmed_up(
    held_ms: list[float], stalled_ms: list[float], queued_ms: float = 0
) -> tuple[Measured, list[tuple[int, int]]]:
    """A warm-up of executions of these lengths, with stalls of these lengths, and the times that it reports."""
    clock, seen = VirtualClock(), list[tuple[int, int]]()

    async def main() -> Measured:
        held, stalled = iter(held_ms), iter(stalled_ms)

        async def execute() -> Result:
            whole_s = (next(held) + queued_ms) / 1e3
            await anyio.sleep(whole_s)
            return Result((), queued_ns=round(queued_ms * MS), total_ns=round(whole_s * 1e9))

        return await measure(
            execute, lambda: Stalled(round(next(stalled) * MS)), lambda *times: seen.append(times)
        )

    return run_in_virtual_time(main, clock=clock), seen


def test_rare_stalls_are_not_device_time() -> None:
    count = COLD_EXECUTIONS + WARM_UP_EXECUTIONS
    quiet, seen = warmed_up([1.0] * count, [0.0] * count)
    assert quiet.timings == len(seen) == WARM_UP_EXECUTIONS and not quiet.has_stalls
    delayed = [1.0] * count
    delayed[9] += 4.0
    stalled = warmed_up(delayed, [0.0] * 9 + [4.0] + [0.0] * 8)[0]
    assert stalled.duration_ns == pytest.approx(quiet.duration_ns, rel=1e-3)
    assert warmed_up(delayed, [0.0] * count)[0].duration_ns == pytest.approx(5 * quiet.duration_ns, rel=1e-3)


@pytest.mark.parametrize(("stalled", "are_rare"), [(1, True), (2, True), (3, False), (16, False)])
def test_stalls_count_where_other_programs_have_the_processors(stalled: int, are_rare: bool) -> None:
    """The device gives no more time than is left by them: streams that were admitted without them would all lose frames."""
    count = COLD_EXECUTIONS + WARM_UP_EXECUTIONS
    stalls_ms = [0.0] * (count - stalled) + [4.0] * stalled
    found = warmed_up([1.0 + each for each in stalls_ms], stalls_ms)[0]
    quiet = warmed_up([1.0] * count, [0.0] * count)[0]
    expected_ns = quiet.duration_ns * (1 if are_rare else 5)
    assert found.duration_ns == pytest.approx(expected_ns, rel=1e-3)


def test_threads_that_wait_for_microseconds_when_they_wake_are_not_stalled() -> None:
    count = COLD_EXECUTIONS + WARM_UP_EXECUTIONS
    stalls_ms = [0.05] * (count - 1) + [4.0]
    found = warmed_up([1.0 + each for each in stalls_ms], stalls_ms)[0]
    assert found.duration_ns < 1.1 * MS


def test_stall_counts_as_far_as_it_was_certainly_on_the_slot() -> None:
    assert stalled_within(5, 5, 9) == 5 and stalled_within(5, 7, 4) == 2 and stalled_within(5, 7, 1) == 0
    assert stalled_within(5, 4, 3) == 3
    count = COLD_EXECUTIONS + WARM_UP_EXECUTIONS
    stalls_ms = [0.0] * (count - 1) + [2.0]
    held_ms = [1.0 + each for each in stalls_ms]
    waited, seen = warmed_up(held_ms, stalls_ms, queued_ms=2.0)
    assert waited.duration_ns == pytest.approx(
        3 * warmed_up([1.0] * count, [0.0] * count)[0].duration_ns, rel=1e-3
    )
    assert max(stalled_ns for _, stalled_ns in seen) <= 1


# --- Of frames ---


class Slot:
    """A device with one slot and a stream of 5 ms every 100 ms."""

    def __init__(self) -> None:
        self.now = 0
        self.estimates = Estimates()
        self.dispatcher = Dispatcher(1, now=lambda: self.now, estimates=self.estimates)
        self.reservations = DeviceReservations("npu", 1, self.dispatcher, self.estimates)
        terms = StreamTerms(name="gate", period_ns=100 * MS, deadline_ns=100 * MS)
        self.held = self.reservations.admit(terms, Measured(5 * MS, 16), "m", now_ns=0)

    def run(self, took_ms: int, stalled_ms: int = 0) -> Label | None:
        """A frame that has the slot for a time, in a part of which the machine does not run its thread."""
        self.held.server.stalls = Stalled(stalled_ms * MS)
        arrival = FrameArrival(self.reservations, self.held)
        job = self.dispatcher.enter(
            priority=Priority.HIGH, deadline_ns=self.now + 100 * MS, model="m", declared_ns=1, server=arrival
        )
        self.now += took_ms * MS
        self.dispatcher.release(job)
        arrival.ended()
        self.now += (100 - took_ms) * MS
        return arrival.label(self.now)


def test_frames_are_learnt_without_what_the_machine_took_beyond_their_budget() -> None:
    slot = Slot()
    labels = [slot.run(4) for _ in range(16)] + [slot.run(30, 28)]
    assert labels == [None] * 16 + [Label.STALLED]
    learnt = slot.reservations.device_time("m", 16)
    assert learnt is not None and 4 * MS < learnt.duration_ns < 5 * MS and not learnt.has_stalls
    assert slot.run(9, 3) is Label.OVERRAN
    learnt = slot.reservations.device_time("m", 16)
    assert learnt is not None and 6 * MS < learnt.duration_ns < 7 * MS


def test_reservation_grows_by_what_its_frames_take_stalls_included() -> None:
    """If the machine regularly takes longer, the reservation has that time, where there is room."""
    slot = Slot()
    for _ in range(16):
        slot.run(30, 28)
    learnt = slot.reservations.learnt("m", 16)
    assert learnt is not None and learnt.duration_ns > 30 * MS and learnt.has_stalls


def test_device_time_of_a_model_that_is_forgotten_is_gone() -> None:
    slot = Slot()
    for _ in range(16):
        slot.reservations.observe("m", 2 * MS, 0)
    found = slot.reservations.device_time("m", 16)
    assert found is not None and 2 * MS < found.duration_ns < 3 * MS
    slot.reservations.forget_model("m")
    assert slot.reservations.device_time("m", 1) is None


# --- Before a refusal ---


@pytest.mark.parametrize(("factor", "warms_up"), [(1.0, False), (12.0, True)])
def test_stream_is_not_refused_for_a_stall_among_the_timings_of_best_effort(
    factor: float, warms_up: bool
) -> None:
    """Of 20 executions one takes long, which the machine may have caused: the stalls are measured in further ones."""

    def script() -> Iterator[Any]:
        yield from [Draw()] * 10
        yield Draw(factor=factor)
        while True:
            yield Draw()

    async def main(trial: Any) -> None:
        async with trial.net.burst(slots=3) as burst:
            for _ in range(20):
                await burst.execute([X])
            before = trial.device.statistics().started
            async with gate(burst, camera(3, 0.04)) as results:
                warm_up = COLD_EXECUTIONS + WARM_UP_EXECUTIONS
                assert trial.device.statistics().started - before == (warm_up if warms_up else 0)
                assert results.reservation.duration_ns < 4_400_000
                assert await read(results) == [("on_time", None)] * 3

    Trial(npu(script=script())).play(main)
