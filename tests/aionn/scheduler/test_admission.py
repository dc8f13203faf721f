"""The admission test: pure, so each claim is a set of streams and a verdict."""

import random

import msgspec
import pytest

from aionn.errors import ErrorStatus, InvalidArgument, NotAdmitted, ResourceExhausted, status_of
from aionn.scheduler import admission
from aionn.scheduler.admission import (
    DAY_NS,
    SHARE_PPM,
    Demand,
    Piece,
    SlotCost,
    SlotTest,
    StreamTerms,
)
from aionn.scheduler.reservations.offers import counter_offers, offers_text, reason_text

MS = 1_000_000


def stream(name, duration, period, deadline=None, *, jitter=0.0, piece=0.0):
    """A stream whose times are given in milliseconds."""
    terms = StreamTerms(
        name=name,
        period_ns=int(period * MS),
        deadline_ns=int((period if deadline is None else deadline) * MS),
        jitter_ns=int(jitter * MS),
    )
    return Demand(terms, SlotCost(duration_ns=int(duration * MS), piece_ns=int(piece * MS)))


def verdict(*streams, cap_ppm=SHARE_PPM, lower=()):
    return SlotTest(streams[:-1], cap_ppm=cap_ppm, lower=lower).verdict(streams[-1])


def drawn(source, count=4):
    found = []
    for index in range(count):
        period = source.choice((10, 16, 20, 33, 50, 100))
        duration = period * source.uniform(0.02, 0.6 / count + 0.1)
        deadline = max(duration * 1.1, period * source.uniform(0.4, 1.2))
        jitter = deadline * source.choice((0, 0, 0.3))
        piece = duration * source.random()
        found.append(stream(f"s{index}", duration, period, deadline, jitter=jitter, piece=piece))
    return found


def slack_by_definition(streams, lower_ns=0, until_ns=500 * MS):
    """The least slack over all times at which a deadline can come, by the formula as it is written."""
    found = None
    points = {
        d.first_ns + k * d.terms.period_ns for d in streams for k in range(until_ns // d.terms.period_ns)
    }
    for t in sorted(points):
        if t > until_ns:
            break
        demand = sum(
            ((t - d.first_ns) // d.terms.period_ns + 1) * d.cost.duration_ns
            for d in streams
            if d.first_ns <= t
        )
        blocking = max([lower_ns, *(d.cost.piece_ns for d in streams if d.first_ns > t)])
        slack = t - demand - blocking
        found = slack if found is None else min(found, slack)
    return found


@pytest.mark.parametrize(
    "duration, deadline, count",
    [(4, 100 / 3, 8), (4, 50 / 3, 4), (4, 11, 2), (7, 50 / 3, 2), (7, 11, 1), (11, 50 / 3, 1)],
)
def test_as_many_equal_cameras_fit_as_end_together_in_time(duration, deadline, count):
    held = []
    while (
        SlotTest(held, cap_ppm=SHARE_PPM)
        .verdict(new := stream(f"c{len(held)}", duration, 100 / 3, deadline))
        .fits
    ):
        held.append(new)
    assert len(held) == count


def test_verdict_is_that_of_the_formula():
    source = random.Random(7)
    results = []
    for _ in range(150):
        streams = drawn(source)
        lower = source.choice((0, 2 * MS))
        found = verdict(*streams, lower=[Piece("other", lower)])
        if found.limit != "demand":
            assert sum(d.cost.duration_ns / d.terms.period_ns for d in streams) > 0.999
            continue
        least = slack_by_definition(streams, lower)
        assert found.slack_ns == least and found.fits == (least >= 0)
        results.append(found.fits)
    assert 20 < sum(results) < len(results) - 20


def test_order_of_the_streams_does_not_matter():
    source = random.Random(3)
    for _ in range(30):
        streams = drawn(source)
        first = verdict(*streams)
        source.shuffle(streams)
        again = verdict(*streams)
        assert (again.fits, again.slack_ns, again.at_ns) == (first.fits, first.slack_ns, first.at_ns)


def test_less_demand_never_fits_worse():
    source = random.Random(11)
    for _ in range(60):
        *held, new = drawn(source)
        test = SlotTest(held, cap_ppm=SHARE_PPM, lower=[Piece("other", MS)])
        before = test.verdict(new).fits
        terms, cost = new.terms, new.cost
        for changed in (
            {"period_ns": terms.period_ns + source.randrange(20 * MS)},
            {"deadline_ns": terms.deadline_ns + source.randrange(20 * MS)},
            {"jitter_ns": source.randrange(terms.jitter_ns + 1)},
        ):
            easier = StreamTerms(
                **{
                    "name": "new",
                    **{k: getattr(terms, k) for k in ("period_ns", "deadline_ns", "jitter_ns")},
                    **changed,
                }
            )
            assert test.verdict(Demand(easier, cost)).fits >= before
        shorter = SlotCost(duration_ns=cost.duration_ns, piece_ns=source.randrange(cost.piece_ns + 1))
        assert test.verdict(Demand(terms, shorter)).fits >= before


def test_blocking_counts_streams_with_later_deadlines_alone():
    short = stream("short", 4, 20, 10, piece=1)
    assert verdict(short, stream("long", 20, 100, piece=6)).fits
    found = verdict(short, stream("long", 20, 100, piece=7))
    assert not found.fits and (found.blocker, found.blocking_ns, found.slack_ns) == ("long", 7 * MS, -MS)
    # A long piece of the stream with the earlier deadline blocks nothing: it is part of the demand.
    assert verdict(stream("first", 8, 40, 10, piece=8), stream("second", 8, 40, 20, piece=1)).fits


def test_lower_jobs_block_at_every_time():
    streams = [stream("a", 5, 20, 10), stream("b", 5, 20, 20)]
    assert verdict(*streams, lower=[Piece("flood", 5 * MS)]).fits
    found = verdict(*streams, lower=[Piece("flood", 6 * MS)])
    assert (found.fits, found.blocker, found.at_ns) == (False, "flood", 10 * MS)


def test_jitter_shortens_the_first_deadline():
    assert verdict(stream("a", 5, 20, 10, jitter=5)).fits
    assert not verdict(stream("a", 5, 20, 10, jitter=5.1)).fits


def test_share_above_the_cap_is_refused_before_anything_else():
    found = verdict(stream("a", 10, 20), stream("b", 10, 20), cap_ppm=950_000)
    assert (found.fits, found.limit, found.share_ppm) == (False, "share", SHARE_PPM)
    assert verdict(stream("a", 10, 20), stream("b", 10, 20)).fits


def test_full_share_with_blocking_ends_without_a_result_and_does_not_fit():
    found = verdict(stream("a", 10, 20, 30, piece=1), stream("b", 10, 20, 40), lower=[Piece("x", MS)])
    assert not found.fits


def test_too_many_points_do_not_fit_and_take_no_time():
    found = verdict(stream("fast", 0.0009, 0.001), stream("slow", 90, 1000, 500))
    assert (found.fits, found.limit) == (False, "points")


def test_periods_of_a_day_beside_ones_of_a_millisecond_are_decided():
    found = verdict(stream("fast", 0.4, 1), stream("slow", 1000, 86_400_000, piece=0.1))
    assert found.fits


def test_slot_without_streams_fits():
    assert SlotTest([]).verdict().fits and SlotTest([]).curve() == []


def test_curve_has_the_tightest_time():
    streams = [stream("a", 4, 20, 10, piece=1), stream("b", 8, 40, 30, piece=2)]
    curve = SlotTest(streams).curve()
    found = SlotTest(streams).verdict()
    assert [t for t, _, _ in curve] == sorted(t for t, _, _ in curve)
    assert min(t - demand - blocking for t, demand, blocking in curve) == found.slack_ns


@pytest.mark.parametrize("seed", range(4))
def test_each_counter_offer_fits_and_less_does_not(seed):
    source = random.Random(seed)
    checked = 0
    while checked < 8:
        *held, new = drawn(source, 5)
        test = SlotTest(held, lower=[Piece("other", MS)])
        found = test.verdict(new)
        if found.fits or not test.verdict().fits:
            continue
        checked += 1
        offers = counter_offers(test, new, found)

        def fits(new=new, test=test, **changed):
            names = ("name", "period_ns", "deadline_ns", "jitter_ns")
            terms = StreamTerms(**{**{name: getattr(new.terms, name) for name in names}, **changed})
            return test.verdict(Demand(terms, new.cost)).fits

        if offers.deadline_ns is not None:
            assert fits(deadline_ns=offers.deadline_ns)
            assert not fits(deadline_ns=max(new.terms.deadline_ns, int(offers.deadline_ns * 0.98)))
        if offers.period_ns is not None:
            assert fits(period_ns=offers.period_ns)
            assert not fits(period_ns=max(new.terms.period_ns, int(offers.period_ns * 0.98)))
        if offers.blocker is not None and offers.blocker != new.terms.name:
            assert test.with_piece(offers.blocker, offers.piece_ns).verdict(new).fits


def test_refusal_names_the_time_the_demand_the_blocker_and_what_would_fit():
    test = SlotTest([stream("held", 40, 100, 45)], lower=[Piece("enhance", 2 * MS)])
    new = stream("gate-3", 8.2, 33, 50)
    found = test.verdict(new)
    assert reason_text(new.terms, "npu/0", found) == (
        'stream "gate-3" on npu/0: at t = 50 ms the reserved streams need 40 ms, this one 8.2 ms more, and an operation of'
        ' "enhance" may occupy the device for 2 ms: 200 us too much'
    )
    offers = counter_offers(test, new, found)
    assert offers_text(offers._replace(slots=("gpu/0",))) == (
        'It would fit with deadline >= 0.0502 s, or on gpu/0, or if "enhance" had operations of 1.8 ms'
    )


def test_delay_of_the_machine_counts_at_every_time_and_is_named():
    held, new = stream("held", 4, 20, 10), stream("new", 4, 20, 10)
    assert SlotTest([held], delay_ns=2 * MS).verdict(new).fits
    found = SlotTest([held], delay_ns=int(2.5 * MS)).verdict(new)
    assert (found.fits, found.slack_ns, found.blocking_ns, found.delay_ns) == (
        False,
        -MS // 2,
        0,
        5 * MS // 2,
    )
    assert reason_text(new.terms, "npu/0", found) == (
        'stream "new" on npu/0: at t = 10 ms the reserved streams need 4 ms, this one 4 ms more, and the machine may delay it by'
        " 2.5 ms: 500 us too much"
    )
    offers = counter_offers(SlotTest([held], delay_ns=int(2.5 * MS)), new, found)
    assert offers.deadline_ns == int(10.5 * MS) and offers.blocker is None


def test_slack_and_room_are_less_by_the_delay():
    source = random.Random(31)
    for _ in range(40):
        streams = drawn(source)
        without, found = SlotTest(streams).verdict(), SlotTest(streams, delay_ns=MS).verdict()
        if without.fits:
            assert found.fits == (without.slack_ns >= MS)
        if found.fits:
            assert (found.slack_ns, found.room_ns) == (without.slack_ns - MS, without.room_ns - MS)


def test_delay_counts_with_phases_too():
    def at(phase_ms):
        found = stream(f"at {phase_ms}", 4, 20, 5)
        return Demand(msgspec.structs.replace(found.terms, phase_ns=phase_ms * MS), found.cost)

    for delay_ns, fits in ((0, True), (MS, True), (MS + 1, False)):
        test = SlotTest([at(0)], delay_ns=delay_ns)
        found = test.verdict(at(10))
        assert (found.fits, test.fits(at(10)), found.slack_ns) == (fits, fits, MS - delay_ns)
        assert found.room_ns == max(0, MS - delay_ns) and found.blocking_ns == 0
        assert min(t - demand - blocking for t, demand, blocking in test.curve(at(10))) == MS - delay_ns


def test_refusal_for_the_share_says_how_much_is_left():
    test = SlotTest([stream("held", 90, 100)])
    new = stream("new", 1, 10)
    found = test.verdict(new)
    assert "at most 0.950 may be reserved" in reason_text(new.terms, "npu/0", found)
    offers = counter_offers(test, new, found)
    assert offers.deadline_ns is None and offers.period_ns == 20 * MS
    nothing = counter_offers(
        SlotTest([stream("held", 95, 100)]), new, verdict(stream("held", 95, 100), new, cap_ppm=950_000)
    )
    assert offers_text(nothing) == "No change of one of its terms would make it fit"


@pytest.mark.parametrize("field", ["period_ns", "deadline_ns", "jitter_ns"])
@pytest.mark.parametrize(
    "value", [-1, DAY_NS + 1, 0.033, 33_000_000.0, "1", None, True, float("nan"), float("inf")]
)
def test_times_that_are_no_times_are_refused(field, value):
    terms = {"name": "s", "period_ns": MS, "deadline_ns": MS, "jitter_ns": 0, field: value}
    with pytest.raises(InvalidArgument, match=field):
        StreamTerms(**terms)


def test_float_of_seconds_is_named_as_such():
    with pytest.raises(InvalidArgument, match=r"0.033 looks like seconds, which are 33000000 ns"):
        StreamTerms(name="s", period_ns=0.033, deadline_ns=MS)


@pytest.mark.parametrize("field", ["period_ns", "deadline_ns"])
def test_zero_is_no_period_and_no_deadline(field):
    with pytest.raises(InvalidArgument, match=f"{field}: expected from 1"):
        StreamTerms(**{"name": "s", "period_ns": MS, "deadline_ns": MS, field: 0})


def test_jitter_that_leaves_nothing_of_the_deadline_is_refused():
    with pytest.raises(InvalidArgument, match="jitter_ns: expected less than the deadline"):
        StreamTerms(name="s", period_ns=MS, deadline_ns=MS, jitter_ns=MS)


@pytest.mark.parametrize(
    "cost",
    [
        {"duration_ns": 0, "piece_ns": 0},
        {"duration_ns": 5, "piece_ns": 6},
        {"duration_ns": 0.01, "piece_ns": 0},
    ],
)
def test_costs_that_are_no_costs_are_refused(cost):
    with pytest.raises(InvalidArgument):
        SlotCost(**cost)


def test_not_admitted_is_persistent_and_a_shortage():
    error = NotAdmitted("no room")
    assert isinstance(error, ResourceExhausted) and not error.transient and error.reason == "no room"
    assert status_of(error) is ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT


def test_bounds_are_named_constants():
    assert admission.POINTS_MAX * DAY_NS < 2**63, "sums of durations stay within 64 bits"
