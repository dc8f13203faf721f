"""The turns of a process's packets: one thread at a time, a common pause after each, and processes that wait in bursts."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator

import pytest

from aionn.service.wire import packet_turns as packet_turns_module
from aionn.service.wire import peers as peers_module
from aionn.service.wire.load import Load
from aionn.service.wire.packet_turns import FAILED_NS, PacketTurn, PacketTurns
from aionn.service.wire.peers import (
    BACKLOG_NS,
    COMPANY_NS,
    FLOOD_NS,
    LOOK_NS,
    PAUSE,
    WAITING_COMPANY_NS,
    WAITS_NS,
    Peer,
    Peers,
)

MS = 1_000_000
S = 1000 * MS
WAIT_S_MAX = 20.0
THREADS = 8


def _never() -> bool:
    return False


class Clock:
    """The time, which goes on where a test says so and where a thread waits for the end of a pause."""

    def __init__(self) -> None:
        self.now_ns = S

    def wait(self, condition: threading.Condition, timeout_s: float | None = None) -> bool:
        assert timeout_s is not None, "no thread is to wait for another one here"
        self.now_ns += round(timeout_s * 1e9)
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    time = types.SimpleNamespace(monotonic_ns=lambda: clock.now_ns)
    monkeypatch.setattr(peers_module, "time", time)
    monkeypatch.setattr(packet_turns_module, "time", time)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait", lambda *asked: clock.wait(*asked))
        yield clock


class Burst:
    def __init__(self) -> None:
        self.is_busy = False
        self.used_s = -1.0

    def was_used_since(self, since_s: float) -> bool:
        return self.is_busy or self.used_s >= since_s


def _turns_of(peer: Peer) -> PacketTurns:
    turns = peer.packet_turns()
    assert turns is not None
    return turns


def test_one_thread_of_a_process_has_the_turn_at_a_time() -> None:
    turn = PacketTurn()
    entered: list[int] = []
    most: list[int] = []

    def decode() -> None:
        for _ in range(50):
            assert turn.take(_never)
            entered.append(1)
            most.append(len(entered))
            entered.pop()
            turn.give_back(0)

    threads = [threading.Thread(target=decode) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S_MAX)
        assert not thread.is_alive()
    assert len(most) == 50 * THREADS and max(most) == 1


def test_threads_that_wait_continue_when_their_burst_ends() -> None:
    turn = PacketTurn()
    assert turn.take(_never)
    is_ending = threading.Event()
    taken: list[bool] = []
    threads = [
        threading.Thread(target=lambda: taken.append(turn.take(is_ending.is_set))) for _ in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    is_ending.set()
    turn.wake()
    for thread in threads:
        thread.join(WAIT_S_MAX)
    assert taken == [False] * THREADS
    turn.give_back(int(WAIT_S_MAX * 1e9))
    assert not turn.take(is_ending.is_set)  # Nor does it wait for the end of a pause.


@pytest.mark.parametrize("count", [1, 32])
def test_share_of_a_process_does_not_grow_with_its_number_of_bursts(count: int, clock: Clock) -> None:
    peers = Peers()
    sender, other = peers.of(1), peers.of(2)
    clock.now_ns += S  # Not a newcomer.
    bursts = [_turns_of(sender) for _ in range(count)]
    began_ns, used_ns = clock.now_ns, 0
    for number in range(200):
        other.received(has_waited=True)
        turns = bursts[number % count]
        if number % 2:
            assert turns.take(_never)
            clock.now_ns += MS
            turns.give_back(MS)
            used_ns += MS
        else:
            turns.failed(_never)
            used_ns += FAILED_NS
    assert used_ns < (clock.now_ns - began_ns) / (1 + PAUSE) + MS


def test_process_that_uses_only_bursts_is_company(clock: Clock) -> None:
    peers = Peers()
    sender, other = peers.of(1), peers.of(2)
    assert sender.pause_after_packet_ns(MS, clock.now_ns) == 0
    burst = Burst()
    other.bursts.add(burst)
    clock.now_ns += LOOK_NS
    burst.used_s = clock.now_ns / 1e9
    assert sender.pause_after_packet_ns(MS, clock.now_ns) == PAUSE * MS
    clock.now_ns += COMPANY_NS + LOOK_NS
    assert sender.pause_after_packet_ns(MS, clock.now_ns) == 0
    burst.is_busy = True  # For however long.
    for _ in range(4):
        clock.now_ns += COMPANY_NS
        assert sender.pause_after_packet_ns(MS // 10, clock.now_ns) == PAUSE * MS // 10
    assert other.pause_after_packet_ns(MS // 10, clock.now_ns) == 0  # Nobody else waits.


def test_process_that_waits_for_its_call_is_company_for_longer_than_a_message(clock: Clock) -> None:
    peers = Peers()
    sender, other = peers.of(1), peers.of(2)
    other.loads.append(Load())
    other.received(has_waited=True)
    other.loads[0].begin(0, 0)
    clock.now_ns += WAITING_COMPANY_NS - 1
    assert sender.pause_after_packet_ns(MS, clock.now_ns) == PAUSE * MS
    clock.now_ns += 1
    assert sender.pause_after_packet_ns(MS, clock.now_ns) == 0


def test_process_whose_backlog_does_not_end_is_no_company_by_its_bursts(clock: Clock) -> None:
    peers = Peers()
    sender, other = peers.of(1), peers.of(2)
    clock.now_ns += S  # None is a newcomer.
    burst = Burst()
    burst.is_busy = True
    other.bursts.add(burst)
    for _ in range(2 * FLOOD_NS // MS):
        other.pause_after_packet_ns(MS, clock.now_ns)
    assert not other.waits(clock.now_ns) and sender.pause_after_packet_ns(MS, clock.now_ns) == 0
    calling = peers.of(3)
    calling.bursts.add(burst)
    calling.loads.append(Load())
    for _ in range(2):
        calling.received(has_waited=True)
        calling.loads[0].begin(0, 0)
    calling.received(has_waited=True)
    for _ in range(2):
        calling.loads[0].end(0, 0)
    clock.now_ns += WAITS_NS - BACKLOG_NS
    assert not calling.waits(clock.now_ns)
    clock.now_ns += BACKLOG_NS
    assert calling.waits(clock.now_ns)
