"""The demand of streams with phases: against its definition on small numbers, and in the admission test."""

import itertools
import random

import numpy as np
import pytest

from aionn.errors import InvalidArgument
from aionn.scheduler.admission import (
    CAP_PPM,
    SHARE_PPM,
    Demand,
    Piece,
    SlotCost,
    SlotTest,
    StreamTerms,
)
from aionn.scheduler.reservations import phases
from aionn.scheduler.reservations.offers import counter_offers, fitting_phase, offers_text
from aionn.scheduler.reservations.phases import Windows, bound_of, grouped, phases_to_try

MS = 1_000_000
CAMERA_MS = 100 / 3


def stream(name, duration, period, deadline=None, *, phase=None, jitter=0.0, tolerance=0.0, piece=None):
    """A stream whose times are given in milliseconds; its frames are one piece unless stated otherwise."""
    terms = StreamTerms(
        name=name,
        period_ns=int(period * MS),
        deadline_ns=int((period if deadline is None else deadline) * MS),
        jitter_ns=int(jitter * MS),
        phase_ns=None if phase is None else int(phase * MS),
        tolerance_ns=0 if phase is None else int(tolerance * MS),
    )
    duration_ns = int(duration * MS)
    return Demand(
        terms,
        SlotCost(duration_ns=duration_ns, piece_ns=duration_ns if piece is None else int(piece * MS)),
    )


def without_phase(demand):
    terms = demand.terms
    same = StreamTerms(
        name=terms.name,
        period_ns=terms.period_ns,
        deadline_ns=terms.deadline_ns,
        jitter_ns=terms.width_ns,
    )
    return Demand(same, demand.cost)


def drawn(source, count):
    """Some windows of a common period, in numbers that can be examined one by one."""
    period = source.choice((8, 12))
    found = []
    for _ in range(count):
        own = period // source.choice((1, 1, 2))
        deadline = source.randrange(2, 2 * period)
        width = source.randrange(min(own, deadline, 4))
        duration = source.randrange(1, 4)
        found.append(
            Windows(source.randrange(own), own, width, deadline, duration, source.randrange(duration + 1))
        )
    return found


def frames_of(group, until):
    return [(s, s.opens_ns + number * s.period_ns) for s in group for number in range(until // s.period_ns)]


def by_definition(group, length, period):
    """The greatest demand of an interval of a length, and that with a piece in the way, over all times at which it begins."""
    begin = 4 * period
    frames = frames_of(group, 12 * period)
    most = most_blocked = 0
    for start in range(begin, begin + period):
        end = start + length
        inside = [(s, c) for s, c in frames if c + s.width_ns >= start and c + s.deadline_ns <= end]
        pieces = [s.piece_ns for s, c in frames if c < start and c + s.deadline_ns > end]
        demand = sum(s.duration_ns for s, _ in inside)
        most = max(most, demand)
        if inside:
            most_blocked = max(most_blocked, demand + max(pieces, default=0))
    return most, most_blocked


def test_bound_is_the_greatest_demand_of_any_interval():
    source = random.Random(5)
    for _ in range(60):
        group = drawn(source, source.randrange(2, 5))
        period = max(s.period_ns for s in group)
        found = bound_of(group)
        lengths = np.arange(1, 5 * period, dtype=np.int64)
        demand, blocked = found.at(lengths)
        for length, most, with_piece in zip(lengths.tolist(), demand, blocked, strict=True):
            expected, expected_blocked = by_definition(group, length, period)
            assert most == expected, (group, length)
            assert with_piece >= max(expected, expected_blocked), (group, length)


def test_bound_is_never_above_that_of_any_phase():
    source = random.Random(6)
    for _ in range(200):
        group = drawn(source, source.randrange(2, 6))
        found = bound_of(group)
        lengths = np.arange(1, 60, dtype=np.int64)
        demand, blocked = found.at(lengths)
        for length, most, with_piece in zip(lengths.tolist(), demand, blocked, strict=True):
            own = pieces = 0
            for s in group:
                first = s.deadline_ns - s.width_ns
                own += max(0, (length - first) // s.period_ns + 1) * s.duration_ns
                pieces = max(pieces, s.piece_ns if first > length else 0)
            assert most <= own and with_piece <= own + pieces, (group, length)


def test_bound_grows_at_its_points_alone():
    source = random.Random(8)
    for _ in range(40):
        group = drawn(source, 3)
        found = bound_of(group)
        until = 100
        points = set(found.points(until).tolist())
        demand, _ = found.at(np.arange(until + 1, dtype=np.int64))
        grows = {length for length in range(1, until + 1) if demand[length] > demand[length - 1]}
        assert grows <= points and max(points) <= until
        assert len(points) <= found.count(until)


@pytest.mark.parametrize(
    "duration, deadline, count", [(4, 50 / 3, 8), (4, 11, 8), (7, 50 / 3, 4), (7, 11, 4), (11, 50 / 3, 3)]
)
def test_as_many_cameras_fit_as_fit_if_their_phases_are_spread(duration, deadline, count):
    held = []
    while (
        placed := fitting_phase(
            SlotTest(held, cap_ppm=SHARE_PPM),
            new := stream(f"c{len(held)}", duration, CAMERA_MS, deadline, phase=0),
        )
    ) is not None:
        held.append(Demand(placed, new.cost))
    assert len(held) == count
    assert not SlotTest([without_phase(d) for d in held], cap_ppm=SHARE_PPM).verdict().fits
    assert SlotTest(held, cap_ppm=SHARE_PPM).verdict().fits


def test_streams_that_fit_in_all_phases_fit_with_any():
    source = random.Random(9)
    fitted = more = 0
    for number in range(150):
        demands = random_set(source, phased=0.7)
        lower = [Piece("low", source.choice((0, MS)))]
        plain = SlotTest([without_phase(d) for d in demands], cap_ppm=SHARE_PPM, lower=lower).verdict()
        with_phases = SlotTest(demands, cap_ppm=SHARE_PPM, lower=lower).verdict()
        assert with_phases.fits >= plain.fits, number
        if with_phases.limit == plain.limit == "demand":
            assert with_phases.slack_ns >= plain.slack_ns and with_phases.room_ns >= plain.room_ns
        fitted += plain.fits
        more += with_phases.fits - plain.fits
    assert fitted > 20 and more > 10


def random_set(source, *, phased=1.0):
    """Streams of which most have one period, with drawn phases."""
    period = source.choice((20, 40))
    found = []
    for index in range(source.randrange(2, 7)):
        own = period * source.choice((1, 1, 1, 2)) if source.random() < 0.8 else 33
        duration = own * source.uniform(0.08, 0.2)
        deadline = max(duration * 1.2, own * source.uniform(0.25, 0.7))
        has_phase = source.random() < phased
        tolerance = min(0.3, deadline / 10) if has_phase else 0.0
        jitter = min(own, deadline) * source.choice((0.0, 0.1))
        found.append(
            stream(
                f"s{index}",
                duration,
                own,
                deadline,
                phase=source.uniform(0, own) if has_phase else None,
                jitter=jitter,
                tolerance=tolerance,
                piece=duration * source.random(),
            )
        )
    return found


def test_order_and_a_common_shift_of_all_phases_do_not_matter():
    source = random.Random(3)
    for _ in range(30):
        demands = random_set(source)
        first = SlotTest(demands[:-1], cap_ppm=SHARE_PPM).verdict(demands[-1])
        shift = source.randrange(40 * MS)
        moved = [shifted(demand, shift) for demand in demands]
        source.shuffle(moved)
        again = SlotTest(moved[:-1], cap_ppm=SHARE_PPM).verdict(moved[-1])
        assert (again.fits, again.slack_ns, again.at_ns) == (first.fits, first.slack_ns, first.at_ns)


def shifted(demand, shift_ns):
    terms = demand.terms
    return Demand(
        StreamTerms(
            name=terms.name,
            period_ns=terms.period_ns,
            deadline_ns=terms.deadline_ns,
            jitter_ns=terms.jitter_ns,
            phase_ns=terms.phase_ns + shift_ns,
            tolerance_ns=terms.tolerance_ns,
        ),
        demand.cost,
    )


def test_plain_stream_counts_with_its_worst_phase():
    apart = [stream("a", 4, 20, 8, phase=0), stream("b", 4, 20, 8, phase=10)]
    assert SlotTest(apart).verdict().fits
    # Two such streams fit in all phases; a third one without a phase may come with any of them, and blocks it.
    assert SlotTest(apart).verdict(stream("c", 3, 20, 12)).fits
    assert not SlotTest(apart).verdict(stream("c", 5, 20, 12)).fits
    assert not SlotTest(apart).verdict(stream("c", 4.1, 20, 8)).fits


def test_phases_of_unequal_periods_do_not_help():
    a, b = stream("a", 4, 20, 8, phase=0), stream("b", 4.1, 33, 8, phase=10)
    assert not SlotTest([a]).verdict(b).fits
    assert SlotTest([a]).verdict(stream("b", 4.1, 20, 8, phase=10)).fits
    assert SlotTest([a]).verdict(stream("b", 4.1, 40, 8, phase=10)).fits
    # The slower one's frames always come with every second one of the other.
    assert not SlotTest([a]).verdict(stream("b", 4.1, 40, 8, phase=20)).fits


def test_groups_have_short_common_multiples():
    found = grouped([Windows(0, period, 0, 5, 1, 1) for period in (20, 33, 40, 10, 66)])
    assert sorted(map(sorted, found)) == [[0, 2, 3], [1, 4]]


def test_too_many_deadlines_are_not_examined(monkeypatch):
    demands = [stream(f"c{i}", 4, CAMERA_MS, 11, phase=i * CAMERA_MS / 6) for i in range(6)]
    assert SlotTest(demands).verdict().fits
    monkeypatch.setattr(phases, "EVENTS_MAX", 30)
    assert not SlotTest(demands).verdict().fits, "as in all phases"


def test_long_deadlines_of_many_streams_are_decided_in_time():
    demands = [stream(f"c{i}", 0.01, 1, 86_000, phase=i / 50, piece=0) for i in range(50)]
    test = SlotTest(demands, lower=[Piece("low", 86_399 * 1000 * MS)])
    assert not test.verdict().fits


@pytest.mark.parametrize("piece", [5.9, 6.1])
def test_best_effort_blocks_streams_with_phases(piece):
    apart = [stream("a", 4, 20, 10, phase=0), stream("b", 4, 20, 10, phase=10)]
    verdict = SlotTest(apart, lower=[Piece("low", int(piece * MS))]).verdict()
    assert verdict.fits == (piece < 6) and verdict.blocker == "low"
    assert verdict.room_ns == 6 * MS


def test_result_says_what_the_new_stream_adds():
    held = [stream(f"c{i}", 6, CAMERA_MS, 11, phase=i * CAMERA_MS / 3) for i in range(3)]
    new = stream("new", 6, CAMERA_MS, 11, phase=0)
    found = SlotTest(held).verdict(new)
    assert not found.fits and found.own_ns == found.held_ns == 6 * MS
    assert (found.at_ns, found.slack_ns) == (11 * MS, -MS)
    offers = counter_offers(SlotTest(held), new, found)
    assert offers.shift_ns is not None and "with captures" in offers_text(offers)
    moved = shifted(new, offers.shift_ns)
    assert SlotTest(held).verdict(moved).fits
    assert offers.period_ns is None
    longer = stream("new", 6, CAMERA_MS, offers.deadline_ns / MS, phase=0)
    assert SlotTest(held).verdict(longer).fits


def test_curve_of_phases_has_the_tightest_time():
    held = [stream(f"c{i}", 4, CAMERA_MS, 11, phase=i * CAMERA_MS / 6, tolerance=0.2) for i in range(6)]
    test = SlotTest(held)
    found, curve = test.verdict(), test.curve()
    assert [t for t, _, _ in curve] == sorted(t for t, _, _ in curve)
    assert min(t - demand - blocking for t, demand, blocking in curve) == found.slack_ns


def test_phases_that_are_tried_are_few_and_within_the_period():
    held = [Windows(7 * index, 100, 0, 20, 3, 3) for index in range(14)]
    found = phases_to_try(held, Windows(0, 100, 0, 20, 3, 3))
    assert len(found) == len(set(found)) <= phases.PHASES_TRIED_MAX
    assert all(0 <= time < 100 for time in found)
    assert found[0] == 95, "amid the longest idle time, from 94 to 100"
    assert phases_to_try([], held[3]) == [21]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"phase_ns": -1}, "a time of the monotonic clock"),
        ({"phase_ns": 1.5}, "an integer of nanoseconds"),
        ({"phase_ns": True}, "an integer of nanoseconds"),
        ({"phase_ns": 1 << 80}, "a time of the monotonic clock"),
        ({"tolerance_ns": 5}, "0 without a phase"),
        ({"phase_ns": 0, "tolerance_ns": -1}, "tolerance_ns: expected from 0"),
        ({"phase_ns": 0, "tolerance_ns": 10 * MS}, "the shorter of period and deadline"),
        ({"phase_ns": 0, "jitter_ns": 9 * MS, "tolerance_ns": MS // 2}, "the shorter of period and deadline"),
    ],
)
def test_mistakes_in_phases_are_named(settings, message):
    with pytest.raises(InvalidArgument, match=message):
        StreamTerms(name="s", period_ns=20 * MS, deadline_ns=10 * MS, **settings)


def test_share_is_limited_with_phases_too():
    held = [stream(f"c{i}", 4.1, CAMERA_MS, 11, phase=i * CAMERA_MS / 8) for i in range(8)]
    for count in itertools.count(1):
        verdict = SlotTest(held[: count - 1], cap_ppm=CAP_PPM).verdict(held[count - 1])
        if not verdict.fits:
            break
    assert (count, verdict.limit) == (8, "share")
