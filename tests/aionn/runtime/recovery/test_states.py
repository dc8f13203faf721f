"""The table: what follows a death, how often, and when it is abandoned."""

from __future__ import annotations

import itertools
import random

import pytest

from aionn.runtime.recovery.states import (
    _NEXT,
    PAUSE_NS_MIN,
    PREPARATIONS_MAX,
    WINDOW_NS,
    Recovery,
    RecoveryEvent,
    RecoveryState,
)

S = 1_000_000_000
NEVER = 2**63 - 1


def test_death_begins_a_preparation_immediately() -> None:
    recovery = Recovery()
    assert recovery.died(5 * S, NEVER) == 5 * S
    assert (recovery.state, recovery.deaths) == (RecoveryState.PREPARING, 1)
    assert recovery.prepared(6 * S)
    assert (recovery.state, recovery.ready_ns) == (RecoveryState.READY, 6 * S)


def test_further_reports_of_one_death_begin_nothing() -> None:
    recovery = Recovery()
    recovery.died(5 * S, NEVER)
    assert recovery.died(5 * S, NEVER) is None and recovery.deaths == 1
    recovery.prepared(6 * S)
    assert recovery.died(7 * S, launched_ns=6 * S - 1) is None, (
        "it was launched before the model was ready again"
    )
    assert recovery.state is RecoveryState.READY
    assert recovery.died(7 * S, launched_ns=6 * S) == 7 * S


def test_pauses_between_failures_double() -> None:
    recovery, now = Recovery(), 5 * S
    begun = recovery.died(now, NEVER)
    pauses = []
    for _ in range(PREPARATIONS_MAX - 1):
        assert begun is not None
        now = begun
        begun = recovery.failed(now, is_transient=True)
        assert begun is not None
        pauses.append(begun - now)
    assert pauses == [PAUSE_NS_MIN << n for n in range(PREPARATIONS_MAX - 1)]
    assert recovery.failed(begun, is_transient=True) is None
    assert recovery.state is RecoveryState.ABANDONED


def test_failure_that_would_repeat_itself_abandons_it() -> None:
    recovery = Recovery()
    recovery.died(0, NEVER)
    assert recovery.failed(1, is_transient=False) is None
    assert recovery.state is RecoveryState.ABANDONED
    assert recovery.died(2, NEVER) is None and recovery.deaths == 1


def test_seventh_death_in_a_minute_abandons_it_and_an_older_one_does_not_count() -> None:
    recovery = Recovery()
    for number in range(PREPARATIONS_MAX):
        assert recovery.died(number * S, NEVER) is not None
        recovery.prepared(number * S)
    later = Recovery()
    later.__dict__.update({**recovery.__dict__, "_began_ns": recovery._began_ns.copy()})
    assert recovery.died(WINDOW_NS - 1, NEVER) is None and recovery.state is RecoveryState.ABANDONED
    assert later.died(WINDOW_NS, NEVER) == WINDOW_NS


def test_closed_model_keeps_nothing_that_comes_too_late() -> None:
    recovery = Recovery()
    recovery.died(0, NEVER)
    recovery.close()
    assert not recovery.prepared(1)
    assert recovery.failed(2, is_transient=True) is None
    assert recovery.state is RecoveryState.CLOSED


@pytest.mark.parametrize("seed", range(20))
def test_no_history_begins_more_than_the_limit_in_any_window(seed: int) -> None:
    rng = random.Random(seed)
    recovery, now, begun = Recovery(), 0, list[int]()
    for _ in range(200):
        now += rng.choice((0, 1, S, 7 * S, 20 * S))
        begins = None
        match recovery.state:
            case RecoveryState.READY:
                begins = recovery.died(now, NEVER)
            case RecoveryState.PREPARING:
                if rng.random() < 0.6:
                    recovery.prepared(now)
                else:
                    begins = recovery.failed(now, is_transient=True)
            case _:
                assert recovery.died(now, NEVER) is None
        if begins is not None:
            assert begins >= now
            now = begins
            begun.append(begins)
    for first, last in zip(begun, begun[PREPARATIONS_MAX:], strict=False):
        assert last - first >= WINDOW_NS


def test_every_pair_that_can_occur_has_an_answer() -> None:
    ends = {RecoveryState.ABANDONED, RecoveryState.CLOSED}
    for state, event in itertools.product(RecoveryState, RecoveryEvent):
        follows = _NEXT.get((state, event))
        if state in ends and follows is not None:
            assert follows in ends
        if event in (RecoveryEvent.DIED, RecoveryEvent.CLOSED):
            assert follows is not None, "these come at any time"
