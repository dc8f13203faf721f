"""The metrics of reservations: what was admitted, refused and ended, the promises that frames broke, the share that is sold."""

import random

import anyio.lowlevel
import pytest

import aionn
from aionn.errors import NotAdmitted
from aionn.hal import Priority
from aionn.runtime.guarantees import reservations as reservations_module
from aionn.runtime.guarantees.arrivals import FrameArrival, Measured
from aionn.runtime.guarantees.reservations import DeviceReservations
from aionn.runtime.metrics.exposed import FAMILIES, samples
from aionn.runtime.metrics.figures import RuntimeFigures
from aionn.scheduler import ledger as ledger_module
from aionn.scheduler.admission import StreamTerms
from aionn.scheduler.bandwidth import Label
from aionn.scheduler.dispatcher import Dispatcher
from aionn.scheduler.estimates import Estimates
from tests.aionn.runtime.guarantees.trial import Trial, X, camera, gate, npu, read

MS = 1_000_000


def values(trial):
    """The samples of the runtime's devices: the value by name and labels but the device."""
    found = {}
    for sample in samples(RuntimeFigures(lambda: 0), trial.runtime.devices):
        assert sample.name in FAMILIES and sample.labels["device"] == "npu"
        found[(sample.name, *[v for k, v in sample.labels.items() if k != "device"])] = sample.value
    return found


def test_admitted_refused_and_ended_streams_are_counted_with_the_share_that_is_sold():
    async def main(trial):
        assert not [key for key in values(trial) if "reserv" in key[0]], "no stream has asked"
        async with trial.net.burst(slots=3) as burst, gate(burst, camera(2, 0.04)) as results:
            found = values(trial)
            assert found["aionn_reserved_share", "0"] == pytest.approx(results.reservation.share, abs=1e-6)
            with pytest.raises(aionn.NotAdmitted):
                await gate(burst, camera(0, 1), deadline=0.004, jitter=0).admit()
            best = gate(burst, camera(0, 1), deadline=0.004, jitter=0, guarantee="best")
            assert await best.admit() is None
            best.cancel()
            await read(results)
        found = values(trial)
        assert (
            found["aionn_reservations_total", "admitted"]
            == found["aionn_reservations_total", "released"]
            == 1
        )
        assert found["aionn_reservations_total", "refused"] == 2
        assert found["aionn_reservations_refused_total", "no_time"] == 2
        assert found["aionn_reserved_share", "0"] == 0

    Trial(npu()).play(main)


def test_busy_slots_are_those_that_an_execution_has():
    async def main(trial):
        assert values(trial)["aionn_slots_busy",] == 0
        execution = trial.net.execute_fenced([X])
        while execution.state.name != "RUNNING":
            await anyio.lowlevel.checkpoint()
        assert values(trial)["aionn_slots_busy",] == 1
        await execution
        assert values(trial)["aionn_slots_busy",] == 0

    Trial(npu()).play(main)


def test_promises_that_frames_broke_are_counted_also_after_their_stream_has_ended():
    async def main(trial):
        for _ in range(2):
            async with trial.net.burst(slots=3) as burst, gate(burst, camera(6, 0.02), jitter=0) as results:
                labels = [label for _, label in await read(results)]
            assert labels.count("early") == 3
        assert values(trial)["aionn_reserved_frames_total", "early"] == 6
        assert values(trial)["aionn_reserved_frames_total", "overran"] == 0

    Trial(npu()).play(main)


# --- One device, without an event loop ---


def made(now=lambda: 0):
    estimates = Estimates()
    return DeviceReservations("npu", 1, Dispatcher(1, now=now, estimates=estimates), estimates)


def terms(period_ns=1000 * MS, name="s"):
    return StreamTerms(name=name, period_ns=period_ns, deadline_ns=period_ns, jitter_ns=0)


def test_refusals_have_their_reasons(monkeypatch):
    for module in (ledger_module, reservations_module):
        monkeypatch.setattr(module, "RESERVATIONS_MAX", 3)
    reservations, quick = made(), Measured(1, 16)
    with pytest.raises(NotAdmitted):
        reservations.admit(terms(MS), Measured(2 * MS, 16), "m", now_ns=0)
    for _ in range(3):
        reservations.admit(terms(), quick, "m", now_ns=0)
    with pytest.raises(NotAdmitted):
        reservations.admit(terms(), quick, "m", now_ns=0)
    reservations.withdraw()
    with pytest.raises(NotAdmitted):
        reservations.admit(terms(), quick, "m", now_ns=0)
    assert reservations.refusals == {"no_time": 1, "too_many": 1, "device_down": 1, "event_loop": 0}
    assert reservations.counts()["withdrawn"] == 3


@pytest.mark.parametrize("seed", range(5))
def test_labels_of_the_device_never_fall_and_are_those_of_all_streams_whatever_ends(seed):
    numbers, now_ns = random.Random(seed), 0
    reservations, held, ended, seen = made(), [], [], dict.fromkeys(Label, 0)
    for _ in range(400):
        now_ns += numbers.randrange(20 * MS)
        action = numbers.randrange(8)
        if action == 0 and len(held) < 4:
            held.append(reservations.admit(terms(40 * MS), Measured(2 * MS, 16), "m", now_ns=now_ns))
        elif action == 1 and held:
            old = held.pop(numbers.randrange(len(held)))
            reservations.end(old)
            ended.append(old)
        elif action == 2 and held:
            old = held[0]
            new = reservations.change(
                old, terms(numbers.choice([30, 40, 50]) * MS), Measured(2 * MS, 16), now_ns=now_ns
            )
            if new is not old:
                new.server.counts = old.server.counts  # As ``StreamGuarantee.change`` does.
                reservations.end(old)
                held[0] = new
        elif action == 3 and numbers.randrange(10) == 0:
            reservations.withdraw()
            reservations.restore()
        elif held or ended:
            arrival = FrameArrival(reservations, numbers.choice(held + ended))
            arrival.arrive(now_ns, None)
            arrival.ended()
        assert all(reservations.labels[label] >= seen[label] for label in Label)
        seen = dict(reservations.labels)
    counts = {id(each.server.counts): each.server.counts for each in held + ended}
    assert seen == {label: sum(count[label] for count in counts.values()) for label in Label}
    assert seen[Label.EARLY] and seen[Label.WITHDRAWN]


def test_frame_without_a_buffer_has_the_cause_of_lost_ones_that_are_in_progress_alone():
    def arrived():
        arrival = FrameArrival(reservations, held)
        arrival.arrive(0, None)
        return arrival

    reservations = made()
    held = reservations.admit(terms(), Measured(1, 16), "m", now_ns=0)
    lost, healthy = arrived(), arrived()
    lost.frame.start(0)
    lost.lost(5, 1)
    assert lost.frame.label is Label.OVERRAN
    during = FrameArrival(reservations, held)
    during.never_came(6)
    during.ended()
    assert during.frame.label is Label.OVERRAN
    lost.ended()
    after = FrameArrival(reservations, held)
    after.never_came(7)
    assert after.frame.label is Label.DELAYED and healthy.frame is not None
    ended = arrived()
    ended.ended()
    ended.lost(8, 1)
    ended = FrameArrival(reservations, held)
    ended.never_came(9)
    assert ended.frame.label is Label.DELAYED, "it was not in progress when it was lost"


def test_frame_behind_one_that_was_lost_without_a_cause_has_no_label():
    reservations = made()
    held = reservations.admit(terms(), Measured(100, 16), "m", now_ns=0)
    lost = FrameArrival(reservations, held)
    lost.arrive(0, None)
    lost.lost(60, 1)
    assert lost.frame.label is None
    follower = FrameArrival(reservations, held)
    follower.never_came(70)
    assert follower.frame.label is None


def test_refusal_that_ends_silent_reservations_ends_their_limits():
    estimates = Estimates()
    dispatcher = Dispatcher(1, now=lambda: 0, can_preempt=True, estimates=estimates)
    reservations = DeviceReservations("npu", 1, dispatcher, estimates)
    reservations.admit(terms(10 * MS), Measured(6 * MS, 16), "m", now_ns=0)
    assert reservations.count == 1
    with pytest.raises(NotAdmitted):
        reservations.admit(terms(MS), Measured(2 * MS, 16), "n", now_ns=60_000 * MS)
    assert reservations.count == 0
    job = dispatcher.enter(priority=Priority.LOW, deadline_ns=None, model="long", declared_ns=500 * MS)
    assert job.has_run
