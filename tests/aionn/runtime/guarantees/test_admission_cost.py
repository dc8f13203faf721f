"""The reservations of one device without an event loop: an admission tests each slot a few times, however many streams it has."""

from aionn.runtime.guarantees.arrivals import Measured
from aionn.runtime.guarantees.reservations import DeviceReservations
from aionn.scheduler.admission import SlotTest, StreamTerms
from aionn.scheduler.dispatcher import Dispatcher
from aionn.scheduler.estimates import Estimates

MS = 1_000_000


def made(now=lambda: 0):
    estimates = Estimates()
    return DeviceReservations("npu", 1, Dispatcher(1, now=now, estimates=estimates), estimates)


def terms(period_ns=1000 * MS, name="s"):
    return StreamTerms(name=name, period_ns=period_ns, deadline_ns=period_ns, jitter_ns=0)


def test_number_of_tests_of_an_admission_does_not_grow_with_the_streams(monkeypatch):
    reservations, count = made(), 0
    verdict = SlotTest.verdict

    def counted(self, new=None):
        nonlocal count
        count += 1
        return verdict(self, new)

    monkeypatch.setattr(SlotTest, "verdict", counted)
    counts = []
    for _ in range(12):
        before = count
        reservations.admit(terms(), Measured(MS, 16), "m", now_ns=0)
        counts.append(count - before)
    assert counts == [counts[0]] * 12 and counts[0] <= 3


def test_frames_that_are_not_reserved_may_run_as_the_ledger_says():
    reservations, held = made(), []
    for period_ms, duration_ms in ((10, 6), (40, 3)):
        terms_of_it = StreamTerms(name="s", period_ns=period_ms * MS, deadline_ns=period_ms * MS, jitter_ns=0)
        held.append(reservations.admit(terms_of_it, Measured(duration_ms * MS, 16), "m", now_ns=0))
        for each in held:
            assert each.server.may_run_lower == reservations.ledger.may_run_lower(each.reservation.number)
    assert {each.server.may_run_lower for each in held} == {True, False}
