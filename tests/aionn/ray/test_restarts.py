"""When the process of a node is started again: pure, in virtual time."""

from __future__ import annotations

import itertools
import random

import pytest

from aionn.ray.restarts import FAILURES_MAX, PAUSE_NS_MAX, PAUSE_NS_MIN, STEADY_NS, NodeState, Restarts


def test_a_process_that_dies_is_started_again_after_pauses_that_double() -> None:
    restarts, now_ns, pauses = Restarts(), 0, []
    for _ in range(FAILURES_MAX):
        restarts.serves(now_ns)
        pause_ns = restarts.died(now_ns)
        assert pause_ns is not None and restarts.state is NodeState.PAUSED
        pauses.append(pause_ns)
        now_ns += pause_ns
        assert restarts.start() and restarts.state is NodeState.STARTING
    assert pauses[0] == PAUSE_NS_MIN
    assert all(b == min(2 * a, PAUSE_NS_MAX) for a, b in itertools.pairwise(pauses))
    assert restarts.died(now_ns) is None
    assert restarts.state is NodeState.FAILED and not restarts.start()


def test_service_for_a_while_clears_failures() -> None:
    restarts, now_ns = Restarts(), 0
    for _ in range(3 * FAILURES_MAX):
        restarts.serves(now_ns)
        now_ns += STEADY_NS
        assert restarts.died(now_ns) == PAUSE_NS_MIN
        assert restarts.start()


def test_a_start_that_never_served_counts_as_a_failure() -> None:
    restarts = Restarts()
    for count in itertools.count(1):
        if restarts.died(count * 100 * STEADY_NS) is None:
            break
        restarts.start()
    assert count == FAILURES_MAX + 1


@pytest.mark.parametrize("state", ["starting", "serving", "paused"])
def test_a_node_that_ends_is_not_started_again(state: str) -> None:
    restarts = Restarts()
    if state != "starting":
        restarts.serves(0)
    if state == "paused":
        restarts.died(0)
    assert restarts.end() == (state != "paused"), "whether a process has to be told"
    assert restarts.died(1) is None
    assert restarts.state is NodeState.ENDED and not restarts.start()


@pytest.mark.parametrize("seed", range(10))
def test_no_order_of_events_starts_two_processes_or_one_after_the_end(seed: int) -> None:
    rng, restarts, running, is_over = random.Random(seed), Restarts(), True, False
    for now_ns in range(0, 300 * 10**9, 10**9):
        event = rng.choice(
            ["serves", "died", "start", "end"] if rng.random() < 0.1 else ["serves", "died", "start"]
        )
        if event == "serves" and running:
            restarts.serves(now_ns)
        elif event == "died" and running:
            running = False
            is_over |= restarts.died(now_ns) is None
        elif event == "start":
            if restarts.start():
                assert not running and not is_over
                running = True
        elif event == "end":
            restarts.end()
            is_over = True
        assert (restarts.state in (NodeState.ENDED, NodeState.FAILED)) <= (not running)
