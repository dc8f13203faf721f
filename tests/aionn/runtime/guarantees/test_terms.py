"""The terms of a stream with a guarantee: seconds as floats, and the mistakes that are named."""

import datetime
import itertools
import math

import pytest

from aionn.errors import InvalidArgument
from aionn.runtime.guarantees.terms import (
    at_phase,
    changed_terms,
    check_guarantee,
    in_progress_max,
    stated_terms,
)
from aionn.scheduler.reservations.windows import phase_tolerance_ns

MS = 1_000_000


def test_deadline_is_the_period_and_jitter_a_tenth_unless_stated():
    terms = stated_terms("gate", 0.040, None, None)
    assert (terms.period_ns, terms.deadline_ns, terms.jitter_ns) == (40 * MS, 40 * MS, 4 * MS)
    assert stated_terms("gate", 0.040, 0.010, None).jitter_ns == MS
    assert stated_terms("gate", 0.040, 0.010, 0).jitter_ns == 0


def test_period_of_a_rate_is_not_longer_than_the_gaps_of_rounded_times():
    for rate in (24, 25, 30, 50, 60, 90, 120):
        terms = stated_terms("gate", 1 / rate, None, None)
        times = [round(index * 1e9 / rate) for index in range(1000)]
        assert terms.period_ns <= min(b - a for a, b in itertools.pairwise(times))


def test_offer_in_seconds_is_not_shorter_than_in_nanoseconds():
    for offer_ns in range(10 * MS, 1000 * MS, 1_010_000):
        assert stated_terms("gate", offer_ns / 1e9, None, 0).period_ns == offer_ns


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((None, None, None), "a guarantee needs the least seconds"),
        ((0.0, None, None), "expected a number of seconds above 0"),
        ((-1.0, None, None), "expected a number of seconds above 0"),
        ((math.nan, None, None), "expected a number of seconds above 0"),
        ((math.inf, None, None), "expected a number of seconds above 0"),
        ((True, None, None), "expected a number of seconds above 0"),
        (("0.03", None, None), "expected a number of seconds above 0"),
        ((33_333_333, None, None), "did you mean 0.0333333\\?"),
        ((0.033, 30_000_000.0, None), "deadline: .*did you mean 0.03\\?"),
        ((100_000.0, None, None), r"at most 86400 \(a day\)"),
        ((0.033, 100_000.0, None), r"deadline: .*at most 86400 \(a day\)"),
        ((0.033, 0.0, None), "deadline: expected a number of seconds above 0"),
        ((0.033, -0.03, None), "deadline: expected a number of seconds above 0"),
        ((0.033, 0.03, 100_000.0), r"jitter: .*at most 86400 \(a day\)"),
        ((1e-10, None, None), "expected a number of seconds above 0"),  # Less than a nanosecond.
        ((10**400, None, None), r"period: .* at most 86400 \(a day\)"),
        ((-(10**5000), None, None), r"period: .* at most 86400 \(a day\)"),
        ((0.033, 33.0e6, None), "deadline: .*did you mean 0.033\\?"),
        ((0.033, lambda item: 1, None), "got a function"),
        ((0.033, 0.03, 0.03), "less than the deadline"),
        ((0.033, 0.03, -0.001), "jitter: expected a number of seconds of at least 0"),
        ((0.033, 0.03, 4_000_000), "jitter: .*nanoseconds"),
        ((30, None, None), r"30 looks like a rate \(period=1/30\) or milliseconds \(period=0.03\)"),
        (
            (33.3, None, None),
            r"milliseconds \(period=0.0333\); write period=datetime.timedelta\(seconds=33.3\)",
        ),
        ((0.033, 30, None), r"deadline: .* 30 looks like milliseconds \(deadline=0.03\); write"),
        ((datetime.timedelta(days=2), None, None), r"period: .*at most 86400 \(a day\)"),
        ((datetime.timedelta(0), None, None), "period: expected a number of seconds above 0"),
    ],
)
def test_mistakes_are_named(values, said):
    with pytest.raises(InvalidArgument, match=said):
        stated_terms("gate", *values)


def test_long_terms_that_are_meant_have_their_unit():
    assert stated_terms("gate", 10, None, None).period_ns == 10_000 * MS
    terms = stated_terms("gate", datetime.timedelta(minutes=1), datetime.timedelta(seconds=30), 0.5)
    assert (terms.period_ns, terms.deadline_ns, terms.jitter_ns) == (60_000 * MS, 30_000 * MS, 500 * MS)
    assert stated_terms("gate", datetime.timedelta(milliseconds=40), None, 0).period_ns == 40 * MS
    with pytest.raises(InvalidArgument, match="looks like a rate"):
        changed_terms(terms, 25, None, None)


def test_name_is_a_short_text():
    for name in ("", "x" * 81, 7):
        with pytest.raises(InvalidArgument, match="name"):
            stated_terms(name, 0.033, None, None)


def test_change_keeps_what_is_not_stated():
    old = stated_terms("gate", 0.040, 0.030, 0.002)
    assert changed_terms(old, None, None, None) == old
    new = changed_terms(old, 0.020, None, None)
    assert (new.period_ns, new.deadline_ns, new.jitter_ns) == (20 * MS, 30 * MS, 2 * MS)
    with pytest.raises(InvalidArgument, match="less than the deadline"):
        changed_terms(old, None, 0.001, None)


@pytest.mark.parametrize("guarantee", [1, 0, "spread", "yes", None, 0.5])
def test_guarantee_is_true_false_best_or_phased(guarantee):
    for fine in (True, False, "best", "phased"):
        check_guarantee(fine)
    with pytest.raises(InvalidArgument, match='expected True, False, "best" or "phased"'):
        check_guarantee(guarantee)


def test_phase_has_a_tolerance_for_drift_and_a_part_of_the_jitter():
    terms = at_phase(stated_terms("gate", 0.040, 0.030, 0.002), 5)
    assert (terms.phase_ns, terms.tolerance_ns) == (5, phase_tolerance_ns(40 * MS, 2 * MS))
    assert 0.2 * MS + 0.5 * MS < terms.tolerance_ns < 0.25 * MS + 0.5 * MS
    assert changed_terms(terms, None, None, None) == terms
    assert changed_terms(terms, None, None, 0.0).tolerance_ns < 0.25 * MS


def test_frames_in_progress_are_those_between_capture_and_deadline():
    assert in_progress_max(stated_terms("a", 0.033, 0.033, 0)) == 1
    assert in_progress_max(stated_terms("a", 0.033, 0.034, 0)) == 2
    assert in_progress_max(stated_terms("a", 0.010, 0.100, 0)) == 10
