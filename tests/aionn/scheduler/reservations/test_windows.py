"""The server of a reservation with a phase: windows, labels, and the phase of the source."""

import random

import pytest

from aionn.errors import InvalidArgument, NotAdmitted
from aionn.scheduler.admission import SlotCost, StreamTerms
from aionn.scheduler.bandwidth import BandwidthServer, Label
from aionn.scheduler.ledger import Ledger, ReservableSlot
from aionn.scheduler.reservations.windows import (
    DRIFT_PPM,
    REVIEW_FRAMES,
    REVIEW_NS,
    PhasedServer,
    phase_tolerance_ns,
)

MS = 1_000_000
PERIOD, DEADLINE, JITTER, TOLERANCE = 40 * MS, 30 * MS, 2 * MS, MS
PHASE = 7 * MS


def server(**changes):
    values = {
        "slot": 0,
        "period_ns": PERIOD,
        "deadline_ns": DEADLINE,
        "jitter_ns": JITTER,
        "duration_ns": 4 * MS,
        "piece_ns": 4 * MS,
        "phase_ns": PHASE,
        "tolerance_ns": TOLERANCE,
    }
    return PhasedServer(1, **{**values, **changes})


def come(found, number, *, capture=0.0, late=0.0):
    """Frame ``number``, captured some ms after its time, that arrives some ms later: its label, and whether it is reserved."""
    captured_ns = PHASE + number * PERIOD + round(capture * MS)
    now_ns = captured_ns + round(late * MS)
    found.look(now_ns, captured_ns + DEADLINE)
    frame = found.arrive(now_ns, captured_ns + DEADLINE)
    return frame.label, frame.is_reserved


def test_frames_in_their_windows_are_reserved_with_the_deadline_of_the_window():
    found = server()
    for number in range(20):
        capture, late = (-1, 3) if number % 2 else (1, 2)
        assert come(found, number, capture=capture, late=late) == (None, True)
    now_ns = PHASE + 20 * PERIOD
    assert found.arrive(now_ns, now_ns + DEADLINE).urgent_ns == now_ns - TOLERANCE + DEADLINE


@pytest.mark.parametrize(
    "capture, late, expected",
    [
        (-1.1, 0.0, (Label.EARLY, False)),  # Before the window opens.
        (-1.1, 1.0, (Label.DELAYED, True)),  # Within it, but its deadline is nearer.
        (0.0, 3.1, (Label.DELAYED, False)),  # After it.
        (1.0, 2.1, (Label.DELAYED, False)),
        (1.1, 2.0, (Label.EARLY, False)),  # Captured too late for this window.
        (20.0, 0.0, (Label.EARLY, False)),
    ],
)
def test_frame_outside_of_its_window_is_labelled(capture, late, expected):
    found = server()
    assert come(found, 0) == (None, True)
    assert come(found, 1, capture=capture, late=late) == expected
    assert come(found, 2) == (None, True)


def test_window_has_one_reserved_frame():
    found = server()
    assert come(found, 0) == (None, True)
    assert come(found, 0, capture=0.5, late=0.5) == (Label.EARLY, False)
    assert come(found, 1) == (None, True)


def test_late_frame_that_takes_the_next_window_is_paid_for_there():
    found = server()
    assert come(found, 0) == (None, True)
    assert come(found, 1, late=39.5) == (Label.DELAYED, True)
    assert come(found, 2) == (Label.DELAYED, False)
    assert come(found, 3) == (None, True)


def test_overrun_is_paid_for_by_a_later_frame():
    found = server()
    captured_ns = PHASE
    frame = found.arrive(captured_ns, captured_ns + DEADLINE)
    frame.start(captured_ns)
    frame.stop(captured_ns + 9 * MS, can_preempt=False)
    assert frame.label is Label.OVERRAN and found.debt_ns == 5 * MS
    assert come(found, 1) == (Label.OVERRAN, False)
    assert come(found, 2) == (None, True)


def test_ended_reservation_covers_no_frame():
    found = server()
    found.is_withdrawn = True
    assert come(found, 0) == (Label.WITHDRAWN, False)


@pytest.mark.parametrize("seed", range(20))
def test_reserved_frames_of_any_source_are_a_sequence_that_was_tested(seed):
    source = random.Random(seed)
    found, now_ns = server(), 0
    opened = []
    for _ in range(300):
        now_ns += source.choice((source.randrange(1, 3 * MS), source.randrange(1, 80 * MS)))
        deadline_ns = source.choice((None, now_ns + DEADLINE - source.randrange(10 * MS)))
        frame = found.arrive(now_ns, deadline_ns)
        if frame.is_reserved:
            opens_ns = frame.urgent_ns - DEADLINE
            assert (opens_ns - PHASE + TOLERANCE) % PERIOD == 0
            assert 0 <= now_ns - opens_ns <= JITTER + 2 * TOLERANCE
            assert deadline_ns is None or frame.label or deadline_ns >= frame.urgent_ns
            opened.append(opens_ns)
    assert len(set(opened)) == len(opened) > 10


# --- The phase of the source --------------------------------------------------------------------------------------------------


def test_source_that_keeps_its_phase_wants_no_other():
    found = server()
    source = random.Random(1)
    for number in range(200):
        come(found, number, late=source.uniform(0, 2))
        assert found.wanted_ns is None


def test_first_frame_elsewhere_shows_the_phase_immediately():
    found = server()
    come(found, 0, capture=13.0)
    assert found.wanted_ns == PHASE + 13 * MS and found.is_astray
    found.move(found.wanted_ns)
    assert found.wanted_ns is None and not found.is_astray
    assert come(found, 1, capture=13.0) == (None, True)


def test_drift_is_seen_before_frames_leave_their_windows():
    """A source that is as fast as the tolerance allows for stays unlabelled, if each wish is granted."""
    tolerance_ns = phase_tolerance_ns(PERIOD, JITTER)
    for sign in (1, -1):
        found = server(tolerance_ns=tolerance_ns)
        moves = 0
        for number in range(3000):
            drift = sign * number * PERIOD * DRIFT_PPM / 1e6 / MS
            assert come(found, number, capture=drift, late=number % 3 * 0.6) == (None, True), number
            if found.wanted_ns is not None:
                assert not found.is_astray
                found.move(found.wanted_ns)
                moves += 1
        assert 50 < moves < 3000 * PERIOD / REVIEW_NS


def test_review_takes_some_frames_and_some_time():
    found = server()
    numbers = range(1 + REVIEW_NS // PERIOD)
    for number in numbers:
        come(found, number, capture=0.6 if number else 0.0)
        assert (found.wanted_ns is not None) == (number == numbers[-1])
    slow = server(period_ns=3 * REVIEW_NS)
    for number in range(REVIEW_FRAMES + 1):
        captured_ns = PHASE + number * 3 * REVIEW_NS + (MS // 2 if number else 0)
        slow.look(captured_ns, captured_ns + DEADLINE)
        assert (slow.wanted_ns is not None) == (number == REVIEW_FRAMES)


def test_distance_is_counted_to_the_nearest_capture():
    found = server()
    for off in (-19, -3, 0, 3, 19):
        assert found.off_ns(PHASE + 5 * PERIOD + off * MS) == off * MS


# --- In the ledger ------------------------------------------------------------------------------------------------------------


def terms(name, phase, *, deadline=11.0, period=100 / 3):
    return StreamTerms(
        name=name, period_ns=int(period * MS), deadline_ns=int(deadline * MS), phase_ns=int(phase * MS)
    )


COSTS = {0: SlotCost(duration_ns=4 * MS, piece_ns=4 * MS)}


def ledger():
    return Ledger([ReservableSlot("npu/0", can_preempt=False)])


def test_ledger_chooses_phases_and_their_servers_keep_them():
    found = ledger()
    held = [found.admit(terms(f"c{i}", 0), COSTS, now_ns=0, chooses_phase=True) for i in range(7)]
    phases = sorted(r.terms.phase_ns % r.terms.period_ns for r in held)
    assert len(set(phases)) == 7
    servers = [r.server() for r in held]
    assert all(isinstance(s, PhasedServer) for s in servers)
    assert [s.phase_ns for s in servers] == [r.terms.phase_ns for r in held]
    with pytest.raises(NotAdmitted, match="may be reserved"):
        found.admit(terms("c7", 0), COSTS, now_ns=0, chooses_phase=True)


def test_refused_phase_is_offered_another_that_fits():
    found = ledger()
    for i in range(3):
        found.admit(terms(f"c{i}", 0), COSTS, now_ns=0, chooses_phase=True)
    first = found.reservations()[0].terms.phase_ns / MS + 1
    # One millisecond after another one has begun, the deadline is too near for both.
    with pytest.raises(NotAdmitted) as caught:
        found.admit(terms("door", first, deadline=6.5), COSTS, now_ns=0)
    shift_ns = caught.value.would_fit.shift_ns
    assert shift_ns is not None and "with captures" in str(caught.value)
    moved = terms("door", first + shift_ns / MS, deadline=6.5)
    assert found.admit(moved, COSTS, now_ns=0).terms.phase_ns == moved.phase_ns


def test_reservation_moves_where_there_is_room_and_nowhere_else():
    found = ledger()
    held = [found.admit(terms(f"c{i}", i * 8.0, deadline=7.0), COSTS, now_ns=0) for i in range(3)]
    before = found.reservations()
    assert found.move(held[0].number, 7 * MS + MS // 2) is None
    assert found.reservations() == before
    moved = found.move(held[0].number, 24 * MS)
    assert moved.terms.phase_ns == 24 * MS and found.reservations()[0] == moved
    # The place that it has left is free.
    assert found.admit(terms("new", 0.0, deadline=7.0), COSTS, now_ns=0)


def test_only_reservations_with_phases_move():
    found = ledger()
    plain = StreamTerms(name="plain", period_ns=PERIOD, deadline_ns=DEADLINE)
    number = found.admit(plain, COSTS, now_ns=0).number
    assert type(found.reservations()[0].server()) is BandwidthServer
    with pytest.raises(InvalidArgument, match="has no phase"):
        found.move(number, 0)


def test_change_of_phase_is_a_new_admission_and_less_demand_at_it_is_none():
    found = ledger()
    old = found.admit(terms("c", 0, deadline=20), COSTS, now_ns=0)
    same = found.change(old.number, terms("c", 33.0, deadline=21), COSTS, now_ns=1)
    assert same.number != old.number, "33 ms is not a whole period"
    found.release(same.number)
    again = found.change(old.number, terms("c", 0, deadline=21), COSTS, now_ns=1)
    assert again.number == old.number
    other = found.change(old.number, terms("c", 12, deadline=21), COSTS, now_ns=1)
    assert other.number != old.number and len(found.reservations()) == 2


def test_source_that_went_astray_counts_as_withdrawn():
    found = ledger()
    number = found.admit(terms("c", 0), COSTS, now_ns=0).number
    assert found.lose(number).number == number and found.lose(number) is None
    assert (found.counts()["withdrawn"], found.counts()["released"]) == (1, 0)
