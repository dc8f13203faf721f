"""The life of a connection: every transition of the table, the delays, and what is refused."""

import itertools

import pytest

from aionn.errors import InvalidArgument
from aionn.media import Reconnection
from aionn.media.live.reconnection import TRANSITIONS, Connection, ConnectionEvent, ConnectionState

S = 1_000_000_000
CALLS = {
    ConnectionEvent.OPENED: lambda c, now: c.opened(now),
    ConnectionEvent.FAILED: lambda c, now: c.failed(now, "absent", is_permanent=False),
    ConnectionEvent.LOST: lambda c, now: c.lost(now, "unplugged"),
    ConnectionEvent.DUE: lambda c, now: c.due(now),
    ConnectionEvent.ENDED: lambda c, now: c.ended(now),
}
WAYS = {
    ConnectionState.OPENING: [],
    ConnectionState.LIVE: [ConnectionEvent.OPENED],
    ConnectionState.WAITING: [ConnectionEvent.OPENED, ConnectionEvent.LOST],
    ConnectionState.ENDED: [ConnectionEvent.ENDED],
}


def connection(policy=Reconnection(), random=0.5):  # noqa: B008
    return Connection(policy, 0, lambda: random)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(ConnectionState, ConnectionEvent)), ids=lambda x: x.value
)
def test_only_the_transitions_of_the_table_happen(state, event):
    one = connection(Reconnection(from_start=True))
    for step in WAYS[state]:
        CALLS[step](one, 0)
    assert one.state is state
    after = TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(AssertionError):
            CALLS[event](one, S)
        assert one.state is state
    else:
        CALLS[event](one, S)
        assert one.state is after


def delays(one, count, now=0):
    found = []
    for _ in range(count):
        found.append(one.wake_ns - now)
        now = one.wake_ns
        one.due(now)
        one.failed(now, "absent", is_permanent=False)
    return found


def test_delays_double_up_to_the_longest_and_stay_there():
    one = connection(Reconnection(first_s=0.25, most_s=10))
    one.opened(0)
    one.lost(0, "unplugged")
    assert [delay / S for delay in delays(one, 8)] == [0.25, 0.5, 1, 2, 4, 8, 10, 10]


def test_delay_is_bounded_after_any_number_of_failures():
    policy = Reconnection(most_s=10)
    for failures in (0, 1, 64, 65, 10**9):
        for random in (0.0, 0.5, 0.999):
            assert 0.2 * S <= policy.delay_ns(failures, random) <= 12 * S


def test_random_part_spreads_the_attempts_by_a_fifth():
    policy = Reconnection(first_s=1)
    assert policy.delay_ns(0, 0.0) == pytest.approx(0.8 * S)
    assert policy.delay_ns(0, 1.0) == pytest.approx(1.2 * S)


def test_calm_connection_begins_with_the_shortest_delay_again_and_a_flapping_one_does_not():
    one = connection(Reconnection(first_s=1, calm_s=5))
    now = 0
    one.opened(now)
    found = []
    for live_s in (1, 1, 1, 6, 1):
        now += live_s * S
        one.lost(now, "unplugged")
        found.append((one.wake_ns - now) // S)
        now = one.wake_ns
        one.due(now)
        one.opened(now)
    assert found == [1, 2, 4, 1, 2]
    assert one.reconnections == 5


def test_first_failure_ends_it_unless_the_policy_repeats_from_the_start():
    for policy, state in (
        (Reconnection(), ConnectionState.ENDED),
        (None, ConnectionState.ENDED),
        (Reconnection(from_start=True), ConnectionState.WAITING),
    ):
        one = connection(policy)
        one.failed(0, "absent", is_permanent=False)
        assert one.state is state


def test_permanent_failure_ends_it_also_later():
    one = connection(Reconnection(from_start=True))
    one.opened(0)
    one.lost(S, "unplugged")
    one.due(one.wake_ns)
    one.failed(2 * S, "not permitted", is_permanent=True)
    health = one.health()
    assert (health.state, health.reason, health.failures) == ("ended", "not permitted", 1)


def test_without_a_policy_a_loss_ends_it():
    one = connection(None)
    one.opened(0)
    one.lost(S, "unplugged")
    assert one.state is ConnectionState.ENDED


def test_it_ends_when_it_was_lost_for_too_long():
    one = connection(Reconnection(first_s=1, end_after_s=4))
    one.opened(0)
    one.lost(10 * S, "unplugged")
    attempts = 0
    while one.state is not ConnectionState.ENDED:
        now = one.wake_ns
        one.due(now)
        one.failed(now, "absent", is_permanent=False)
        attempts += 1
    assert attempts == 3  # After 1, 3 and 7 seconds.
    assert one.health().since_ns == 17 * S


def test_loss_and_return_are_logged_once_each_however_many_attempts_failed(caplog):
    one = connection()
    one.opened(0)
    assert not caplog.records
    one.lost(10 * S, "camera 0: unplugged")
    for second in (11, 12, 13):
        one.due(second * S)
        one.failed(second * S, "camera 0: absent", is_permanent=False)
    one.due(14 * S)
    one.opened(14 * S)
    assert [record.getMessage() for record in caplog.records] == [
        "camera 0: unplugged; it is being opened again",
        "a source is open again, after 4.0 s; camera 0: unplugged",
    ]
    # Closed or ended by an error, which its consumer gets, it says nothing.
    one.lost(20 * S, "camera 0: not permitted", is_permanent=True)
    one.ended(20 * S)
    assert len(caplog.records) == 2


def test_source_that_is_awaited_from_the_start_is_logged_once(caplog):
    one = connection(Reconnection(from_start=True))
    for second in (1, 2, 3):
        one.failed(second * S, "camera 0: absent", is_permanent=False)
        one.due(second * S)
    one.opened(4 * S)
    assert [record.getMessage() for record in caplog.records] == [
        "camera 0: absent; attempts to open it continue"
    ]


def test_reason_of_a_live_source_is_that_of_its_loss_and_not_that_of_a_failed_attempt():
    one = connection()
    one.opened(0)
    one.lost(S, "unplugged")
    one.due(2 * S)
    one.failed(2 * S, "absent", is_permanent=False)
    assert one.health().reason == "absent"
    one.due(3 * S)
    one.opened(3 * S)
    assert one.health().reason == "unplugged"


def test_health_shows_since_when_and_why():
    one = connection()
    one.opened(S)
    assert one.health().since_ns == S
    one.lost(3 * S, "unplugged")
    health = one.health()
    assert (health.state, health.since_ns, health.reason, health.reconnections) == (
        "waiting",
        3 * S,
        "unplugged",
        0,
    )


@pytest.mark.parametrize(
    "numbers",
    [
        {"first_s": 0},
        {"first_s": -1},
        {"first_s": float("nan")},
        {"first_s": 20},
        {"most_s": float("inf")},
        {"most_s": 1e9},
        {"calm_s": -1},
        {"calm_s": float("nan")},
        {"end_after_s": -1},
        {"end_after_s": float("inf")},
    ],
    ids=str,
)
def test_impossible_policy_is_rejected(numbers):
    with pytest.raises(InvalidArgument, match="Reconnection"):
        Reconnection(**numbers)
