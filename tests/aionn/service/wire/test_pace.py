"""The pauses of threads that work for a process: one that does not wait for its answers gets a small part of the interpreter."""

from __future__ import annotations

import types

import pytest

from aionn.service.wire import peers as peers_module
from aionn.service.wire.load import Load
from aionn.service.wire.peers import BACKLOG_NS, COMPANY_NS, PAUSE, PAUSE_NS_MAX, PIECE_NS, Peer, Peers

MS = 1_000_000


class Clock:
    """The time, and the time for which a thread has used the interpreter. They go on where a test says so, and the first by
    sleeping.
    """

    def __init__(self) -> None:
        self.now_ns = self.thread_ns = self.slept_ns = 0

    def sleep(self, delay_s: float) -> None:
        self.now_ns += round(delay_s * 1e9)
        self.slept_ns += round(delay_s * 1e9)


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    time = types.SimpleNamespace(
        monotonic_ns=lambda: clock.now_ns, thread_time_ns=lambda: clock.thread_ns, sleep=clock.sleep
    )
    monkeypatch.setattr(peers_module, "time", time)
    return clock


def _working(clock: Clock, piece_ns: int, total_ns: int, process: Peer) -> int:
    """For how long a thread sleeps that works for a process."""
    pace = process.pace()
    assert pace is not None
    pace()
    for _ in range(total_ns // piece_ns):
        clock.thread_ns += piece_ns
        clock.now_ns += piece_ns
        pace()
    return clock.slept_ns


def _peers_of_whom_one_waits() -> tuple[Peer, Peer]:
    """One with two calls in progress, and another one that has sent a message."""
    peers = Peers()
    hostile, other = peers.of(1), peers.of(2)
    hostile.loads.append(Load())
    for _ in range(2):
        hostile.loads[0].begin(0, 0)
    other.received(has_waited=True)
    return hostile, other


@pytest.mark.parametrize("piece_ns", [10_000, PIECE_NS, MS])
def test_thread_that_works_for_a_process_with_a_backlog_uses_a_part_of_the_interpreter(
    paced: Clock, piece_ns: int
) -> None:
    hostile, other = _peers_of_whom_one_waits()
    total_ns = 10 * MS
    slept_ns = _working(paced, piece_ns, total_ns, hostile)
    assert PAUSE * (total_ns - PIECE_NS) <= slept_ns <= PAUSE * total_ns
    del other


def test_thread_sleeps_after_every_piece_and_never_for_longer_than_the_bound(paced: Clock) -> None:
    hostile, other = _peers_of_whom_one_waits()
    pace = hostile.pace()
    assert pace is not None
    pace()
    paced.thread_ns += PIECE_NS - 1
    pace()
    assert paced.slept_ns == 0
    paced.thread_ns += 1
    pace()
    assert paced.slept_ns == PAUSE * PIECE_NS
    paced.thread_ns += 1000 * MS
    pace()
    assert paced.slept_ns == PAUSE * PIECE_NS + PAUSE_NS_MAX
    del other


def test_pace_that_another_thread_takes_over_begins_anew(paced: Clock) -> None:
    hostile, other = _peers_of_whom_one_waits()
    pace = hostile.pace()
    assert pace is not None
    paced.thread_ns = 100 * MS
    pace()
    paced.thread_ns = 10 * MS  # Of a thread that has done less.
    pace()
    assert paced.slept_ns == 0
    del other


def test_thread_does_not_sleep_for_a_process_that_waits_or_is_served_alone(paced: Clock) -> None:
    peers = Peers()
    waiting, other = peers.of(1), peers.of(2)
    other.received(has_waited=True)
    assert _working(paced, PIECE_NS, 10 * MS, waiting) == 0
    hostile, other = _peers_of_whom_one_waits()
    paced.now_ns += COMPANY_NS  # The other one has gone.
    assert _working(paced, PIECE_NS, 10 * MS, hostile) == 0
    assert Peer().pace() is None
    del other


def test_process_with_several_calls_in_progress_is_paced_however_long_its_message_is(paced: Clock) -> None:
    """The parts of a large message are decoded for longer than a backlog lasts after the message came."""
    hostile, other = _peers_of_whom_one_waits()
    paced.now_ns = 5 * BACKLOG_NS
    other.received(has_waited=True)
    assert hostile.takes_turns
    hostile.loads[0].end(0, 0)
    assert not hostile.takes_turns
