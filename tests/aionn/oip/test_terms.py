"""Deadlines and priorities from parameters, without a clock."""

from __future__ import annotations

from typing import Any

import pytest

import aionn
from aionn.errors import ErrorStatus
from aionn.oip.refusals import NotServed, Unavailable, refusal_of
from aionn.oip.terms import DURATION_US_MAX, terms_of

NOW = 5_000_000_000


@pytest.mark.parametrize(
    ("parameters", "remaining_ns", "deadline_ns"),
    [
        ({}, None, None),
        ({}, 7_000, NOW + 7_000),
        ({"timeout": 5}, None, NOW + 5_000),
        ({"timeout": "5"}, None, NOW + 5_000),
        ({"timeout": 0}, None, None),
        ({"timeout": 5}, 4_000, NOW + 4_000),
        ({"timeout": 5}, 6_000, NOW + 5_000),
        ({"aionn_deadline_us": 33_000}, None, NOW + 33_000_000),
        ({"aionn_deadline_us": 33_000, "aionn_age_us": 13_000}, None, NOW + 20_000_000),
        ({"aionn_deadline_us": 33_000, "aionn_age_us": 40_000}, 1_000_000, NOW - 7_000_000),
        ({"aionn_deadline_us": 0, "aionn_age_us": DURATION_US_MAX}, None, 0),
        ({"aionn_deadline_us": 33_000, "timeout": 1}, 10_000_000, NOW + 1_000),
    ],
)
def test_first_of_the_durations_is_the_deadline(
    parameters: dict[str, Any], remaining_ns: int | None, deadline_ns: int | None
) -> None:
    assert terms_of(parameters, NOW, remaining_ns).deadline_ns == deadline_ns


@pytest.mark.parametrize(
    ("value", "priority"),
    [(0, "MEDIUM"), (1, "HIGH"), (2, "MEDIUM"), (3, "LOW"), (2**63, "LOW"), ("1", "HIGH"), (None, "MEDIUM")],
)
def test_levels_of_triton_are_priorities(value: Any, priority: str) -> None:
    assert terms_of({"priority": value}, NOW, None).priority is aionn.Priority[priority]


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"timeout": -1}, "timeout"),
        ({"timeout": 1.5}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"timeout": "9" * 5000}, "timeout"),
        ({"aionn_deadline_us": DURATION_US_MAX + 1}, "aionn_deadline_us"),
        ({"aionn_deadline_us": 1, "aionn_age_us": -5}, "aionn_age_us"),
        ({"aionn_age_us": 5}, "aionn_deadline_us"),
        ({"priority": -1}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"sequence_id": 4}, "sequence_id"),
        ({"sequence_start": True}, "sequence_start"),
    ],
)
def test_parameter_that_makes_no_sense_is_refused_by_name(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(aionn.InvalidArgument, match=f"parameter.*{named}"):
        terms_of(parameters, NOW, None)


def test_parameters_of_others_are_ignored() -> None:
    given = {"sequence_id": 0, "triton_enable_empty_final_response": True, "mine": "x"}
    assert terms_of(given, NOW, None).deadline_ns is None


def test_each_status_has_a_code_of_both_transports() -> None:
    for status in ErrorStatus:
        if status != ErrorStatus.NONE:
            refusal = refusal_of(aionn.errors.error_for_status(status, "text"))
            assert refusal.why == status.name
            assert 400 <= refusal.status < 600


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (aionn.InvalidArgument("a"), 3, 400),
        (aionn.InvalidModel("a"), 3, 400),
        (aionn.MissedDeadline("a"), 4, 504),
        (NotServed("a"), 5, 404),
        (aionn.ResourceExhausted("a"), 8, 429),
        (aionn.GeneralFailure("a"), 13, 500),
        (Unavailable("a"), 14, 503),
        (aionn.DeadObject("a"), 14, 503),
    ],
)
def test_errors_have_the_statuses_that_clients_expect(error: Exception, code: int, status: int) -> None:
    assert refusal_of(error)[:3] == (code, status, "a")


def test_text_of_a_foreign_error_stays_here_and_long_ones_are_cut() -> None:
    assert refusal_of(RuntimeError("a secret")).text == "internal error (RuntimeError)"
    for text, letters in (("x", 4096), ("\N{SNOWMAN}", 455), ("%", 1365)):
        assert refusal_of(aionn.InvalidArgument(text * 5000)).text == text * letters + "..."
        assert refusal_of(aionn.InvalidArgument(text * letters)).text == text * letters
    assert refusal_of(aionn.InvalidArgument("a\udcff")).text == "a\\udcff"
