"""The pauses of threads that work for a process: one that does not wait for its answers gets a small part of the interpreter."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest

from aionn.service.wire import peers as peers_module
from aionn.service.wire.load import Load
from aionn.service.wire.peers import (
    BACKLOG_NS,
    COMPANY_NS,
    FLOOD_NS,
    FLOOD_PAUSE,
    NEWCOMER_NS,
    PAUSE,
    PAUSE_NS_MAX,
    PIECE_NS,
    Peer,
    Peers,
)

MS = 1_000_000


class Clock:
    """The time, and the time for which a thread has used the interpreter. They go on where a test says so, and the first by
    sleeping.
    """

    def __init__(self) -> None:
        self.now_ns = self.thread_ns = self.slept_ns = 0

    def works(self, used_ns: int) -> None:
        self.thread_ns += used_ns
        self.now_ns += used_ns

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


def _working(
    clock: Clock, piece_ns: int, total_ns: int, process: Peer, on_piece: Callable[[float], None] | None = None
) -> int:
    """For how long a thread sleeps that works for a process."""
    pace = process.pace(on_piece)
    assert pace is not None
    pace()
    for _ in range(total_ns // piece_ns):
        clock.works(piece_ns)
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
    paced.works(PIECE_NS - 1)
    pace()
    assert paced.slept_ns == 0
    paced.works(1)
    pace()
    assert paced.slept_ns == PAUSE * PIECE_NS
    paced.works(1000 * MS)
    other.received(has_waited=True)
    pace()
    assert paced.slept_ns == PAUSE * PIECE_NS + PAUSE_NS_MAX
    del other


def test_processor_time_is_not_read_before_a_piece_can_have_passed(
    paced: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile, other = _peers_of_whom_one_waits()
    pace = hostile.pace()
    assert pace is not None
    pace()
    read: list[int] = []
    monkeypatch.setattr(peers_module.time, "thread_time_ns", lambda: read.append(1) or paced.thread_ns)
    for _ in range(100):
        paced.works(PIECE_NS // 100)
        pace()
    assert len(read) == 2, "before the pause and after it"
    assert paced.slept_ns == PAUSE * PIECE_NS
    paced.now_ns += PIECE_NS // 2  # Others had the processor.
    for _ in range(50):
        paced.works(PIECE_NS // 100)
        pace()
    assert len(read) == 3
    assert paced.slept_ns == PAUSE * PIECE_NS
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


def _flooding(flood: Peer) -> Peer:
    """The process, of which the backlog does not end from now on."""
    flood.connects_or_leaves()
    flood.pause_after_packet_ns(FLOOD_NS + 1, 0)
    assert flood.pause_after_ns(PIECE_NS, 0) == FLOOD_PAUSE * PIECE_NS
    return flood


def _paused(process: Peer) -> int:
    return process.pause_while_preparing_ns(PIECE_NS, 0)


def test_thread_does_not_sleep_while_a_process_that_would_not_pause_waits_for_it(paced: Clock) -> None:
    peers = Peers()
    other, waiting = peers.of(1), peers.of(2)
    other.received(has_waited=True)
    flood = _flooding(peers.of(3))
    with flood.preparing(), flood.preparing():
        assert _paused(flood) == FLOOD_PAUSE * PIECE_NS
        with waiting.preparing():
            with waiting.preparing():
                assert _paused(flood) == 0
            assert _paused(flood) == 0
            assert _working(paced, PIECE_NS, 10 * MS, flood) == 0
        assert _paused(flood) == FLOOD_PAUSE * PIECE_NS


def test_thread_sleeps_no_longer_than_it_would_for_a_process_that_waits_for_it(paced: Clock) -> None:
    paced.now_ns = -NEWCOMER_NS  # They came so long ago that each has its own use.
    peers = Peers()
    other, several = peers.of(1), peers.of(2)
    floods = peers.of(3), peers.of(4)
    paced.now_ns = 0
    other.received(has_waited=True)
    flood, flood_too = (_flooding(each) for each in floods)
    several.loads.append(Load())
    for _ in range(2):
        several.loads[0].begin(0, 0)
    with flood.preparing(), flood_too.preparing():
        assert _paused(flood) == FLOOD_PAUSE * PIECE_NS
        with several.preparing():
            assert _paused(flood) == PAUSE * PIECE_NS
            assert _paused(several) == PAUSE * PIECE_NS
    assert _paused(flood) == FLOOD_PAUSE * PIECE_NS


def test_each_piece_is_reported_with_the_pause_after_it(paced: Clock) -> None:
    reported: list[float] = []
    hostile, other = _peers_of_whom_one_waits()
    slept_ns = _working(paced, PIECE_NS, 10 * MS, hostile, reported.append)
    assert len(reported) == 10 * MS // PIECE_NS
    assert sum(reported) == pytest.approx(slept_ns / 1e9)
    reported.clear()
    _working(paced, PIECE_NS, 10 * MS, other, reported.append)
    assert reported == [0.0] * (10 * MS // PIECE_NS)
