"""A backlog that does not end: such a process has its turns among the floods, and leaves the loop to others for longer."""

from __future__ import annotations

import random
import types

import pytest

from aionn.service.wire import peers as peers_module
from aionn.service.wire.load import Load
from aionn.service.wire.peers import (
    BACKLOG_NS,
    EXECUTION_NS,
    FLOOD_NS,
    FLOOD_NS_MAX,
    FLOOD_PAUSE,
    FLOOD_PAUSE_NS_MAX,
    FORGOTTEN_PART,
    NEWCOMER_NS,
    PAUSE,
    PAUSE_NS_MIN,
    Peer,
    Peers,
    Shares,
    Use,
)

MS = 1_000_000
S = 1000 * MS


def test_use_without_an_end_is_a_flood_soon() -> None:
    use, now_ns = Use(), S
    while not use.is_flood:
        use.has_backlog(now_ns)
        use.add(MS // 4)
        now_ns += (1 + PAUSE) * MS // 4
    assert now_ns - S <= (1 + PAUSE) * (FLOOD_NS + MS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(5))
def test_calls_that_are_sent_together_for_each_frame_are_never_a_flood(seed: int) -> None:
    """At 30 frames in a second, with up to eight calls of a third of a millisecond for each, for ten minutes."""
    draw, use = random.Random(seed), Use()
    for frame in range(30 * 600):
        now_ns = frame * S // 30
        for _ in range(draw.randint(1, 8)):
            use.has_backlog(now_ns)
            use.add(MS // 3)
            now_ns += MS // 3
            assert not use.is_flood


def test_flood_is_forgotten_in_the_time_without_a_backlog_alone() -> None:
    use, now_ns = Use(), S
    for _ in range(1000):
        use.has_backlog(now_ns)
        use.add(MS)
        now_ns += BACKLOG_NS  # A pause is no time without one.
        assert use.is_flood or now_ns < S + (FLOOD_NS // MS + 1) * BACKLOG_NS
    longest_ns = FORGOTTEN_PART * (FLOOD_NS_MAX - FLOOD_NS)
    use.has_backlog(now_ns + longest_ns - FORGOTTEN_PART)
    assert use.is_flood
    use.has_backlog(now_ns + longest_ns + BACKLOG_NS + FORGOTTEN_PART)
    assert not use.is_flood


def test_executions_that_succeed_are_never_a_flood_and_end_one() -> None:
    use = Use()
    for now_ns in range(S, 10 * S, MS):
        use.has_backlog(now_ns)
        use.add(EXECUTION_NS - EXECUTION_NS // 10)
        use.executed()
        assert not use.is_flood
    for _ in range(2 * FLOOD_NS // MS):
        use.add(MS)
    assert use.is_flood  # However many succeeded before.
    for _ in range(1 + (2 * FLOOD_NS - FLOOD_NS) // EXECUTION_NS):
        use.executed()
    assert not use.is_flood


@pytest.mark.parametrize("seed", range(10))
def test_floods_have_their_small_share_and_delay_no_other_backlog(seed: int) -> None:
    draw, shares = random.Random(seed), Shares()
    now_ns = used_ns = most_ns = 0
    while now_ns < 10 * S:
        shares.received("interactive", now_ns)
        assert shares.pause_ns(now_ns) == 0
        pause_ns = shares.pause_ns(now_ns, is_flood=True)
        if pause_ns:
            now_ns += pause_ns + draw.randrange(MS)
            continue
        message_ns = draw.randrange(1000, draw.choice([10_000, 200_000]))
        now_ns += message_ns
        used_ns += message_ns
        most_ns = max(most_ns, message_ns)
        shares.used(draw.choice("ABC"), message_ns, now_ns, is_flood=True)
    assert used_ns <= now_ns / (1 + FLOOD_PAUSE) + most_ns + PAUSE_NS_MIN


class Clock:
    def __init__(self) -> None:
        self.now_ns = S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(peers_module, "time", types.SimpleNamespace(monotonic_ns=lambda: clock.now_ns))
    return clock


def _flood(clock: Clock, process: Peer, total_ns: int) -> None:
    """Packets that had to be decoded, one after another."""
    for _ in range(total_ns // MS):
        clock.now_ns += MS
        process.pause_after_packet_ns(MS, clock.now_ns)


def _served(clock: Clock, process: Peer) -> None:
    """It has sent a call and waits for the answer."""
    process.received(has_waited=True)


def test_packet_that_had_to_be_decoded_is_followed_by_a_pause_beside_another_process(clock: Clock) -> None:
    peers = Peers()
    sender, other = peers.of(1), peers.of(2)
    assert sender.pause_after_packet_ns(MS, clock.now_ns) == 0
    _served(clock, other)
    assert sender.pause_after_packet_ns(MS, clock.now_ns) == PAUSE * MS
    _flood(clock, sender, 2 * FLOOD_NS)
    _served(clock, other)
    assert sender.pause_after_packet_ns(MS, clock.now_ns) == FLOOD_PAUSE_NS_MAX < FLOOD_PAUSE * MS
    assert Peer().pause_after_packet_ns(MS, clock.now_ns) == 0  # The only client of its device.


def test_packets_of_executions_that_succeed_are_never_a_flood(clock: Clock) -> None:
    peers = Peers()
    sender, other = peers.of(1), peers.of(2)
    for _ in range(4 * FLOOD_NS // MS):
        clock.now_ns += MS
        _served(clock, other)
        used_ns = EXECUTION_NS // 2
        pause_ns = sender.pause_after_packet_ns(used_ns, clock.now_ns)
        assert pause_ns == PAUSE * used_ns
        sender.executed()


def test_processes_that_came_a_short_time_ago_add_up(clock: Clock) -> None:
    """Each of them uses less than a flood, and ends."""
    peers = Peers()
    lasting, waiting = peers.of("lasting"), peers.of("waiting")
    clock.now_ns += NEWCOMER_NS
    for number in range(2 * FLOOD_NS // MS):
        _flood(clock, peers.of(number), MS)
    _served(clock, waiting)
    assert peers.of("new").pause_after_packet_ns(MS // 10, clock.now_ns) == FLOOD_PAUSE * MS // 10
    # One that has been there for longer is not taken for one of them, and does not count as one.
    assert lasting.pause_after_packet_ns(MS // 10, clock.now_ns) == PAUSE * MS // 10


def test_thread_that_works_for_a_flood_pauses_as_long_as_its_calls(clock: Clock) -> None:
    peers = Peers()
    sender, other = peers.of(1), peers.of(2)
    sender.loads.append(Load())
    for _ in range(2):
        sender.loads[0].begin(0, 0)
    _served(clock, other)
    assert sender.pause_after_ns(MS // 4, clock.now_ns) == PAUSE * MS // 4
    _flood(clock, sender, 2 * FLOOD_NS)
    _served(clock, other)
    assert sender.pause_after_ns(MS // 4, clock.now_ns) == FLOOD_PAUSE * MS // 4
