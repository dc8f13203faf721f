"""When a node counts as lost, and when it is called again."""

from __future__ import annotations

import itertools

import pytest

from aionn.fleet.liveness import (
    HEARTBEAT_NS,
    PAUSE_NS_MAX,
    PAUSE_NS_MIN,
    SILENT_LOOKS,
    ControlState,
    Liveness,
    Reconnection,
    next_state,
)


def test_silent_node_is_lost_after_the_looks_and_not_before() -> None:
    liveness = Liveness()
    answers = [liveness.look(is_work_out=True, round_trip_ns=0) for _ in range(SILENT_LOOKS)]
    assert answers == [False] * (SILENT_LOOKS - 1) + [True]


def test_silence_is_noticed_within_a_quarter_of_a_second() -> None:
    # The last byte came right after a look, and the work right after the last heartbeat.
    assert SILENT_LOOKS * HEARTBEAT_NS <= 200_000_000


def test_each_byte_begins_the_count_anew() -> None:
    liveness = Liveness()
    for _ in range(100):
        for _ in range(SILENT_LOOKS - 1):
            assert not liveness.look(is_work_out=True, round_trip_ns=0)
        liveness.heard()


def test_no_heartbeat_is_owed_without_work() -> None:
    liveness = Liveness()
    assert not any(liveness.look(is_work_out=False, round_trip_ns=0) for _ in range(100))
    assert not liveness.look(is_work_out=True, round_trip_ns=0)


def test_first_heartbeat_of_a_distant_node_is_waited_for() -> None:
    liveness = Liveness()
    looks = 0
    while not liveness.look(is_work_out=True, round_trip_ns=5 * HEARTBEAT_NS):
        looks += 1
    assert looks + 1 == SILENT_LOOKS + 5


def test_pauses_double_up_to_the_maximum_and_end_with_success() -> None:
    calls, now_ns, pauses = Reconnection(), 0, []
    for _ in range(12):
        calls.failed(now_ns)
        pauses.append(calls.pause_ns(now_ns))
        now_ns += pauses[-1]
        assert calls.pause_ns(now_ns) == 0
    assert pauses[0] == PAUSE_NS_MIN and pauses[-1] == PAUSE_NS_MAX
    assert all(a <= b <= 2 * a for a, b in itertools.pairwise(pauses))
    calls.failed(now_ns)
    calls.succeeded()
    assert calls.pause_ns(now_ns) == 0


@pytest.mark.parametrize("event", ["welcome", "lost", "close"])
def test_lost_generation_never_lives_again(event: str) -> None:
    for end in (ControlState.LOST, ControlState.CLOSED):
        assert next_state(end, event) is end
