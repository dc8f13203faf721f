"""The device time of a frame and the network between, from measured executions."""

from __future__ import annotations

import random

import pytest

from aionn.runtime.fleet.measured import RATE_MAX, Execution, device_time
from aionn.scheduler.admission import StreamTerms
from aionn.scheduler.fleet.transfer import WAIT_NS, Way

MS = 1_000_000


def test_the_driver_measures_the_device_and_the_rest_is_the_way() -> None:
    found = device_time([Execution(10 * MS, 7 * MS)] * 16, up_bytes=0, down_bytes=0, bytes_per_s=0)
    assert 7 * MS <= found.cost.duration_ns < 8 * MS
    assert 10 * MS <= found.measured.duration_ns < 11 * MS
    assert found.link.latency_ns == 3 * MS // 2
    assert found.link.jitter_ns == found.measured.duration_ns - found.cost.duration_ns - 3 * MS


def test_equal_machines_of_one_network_are_alike_for_the_plan() -> None:
    found = [
        device_time([Execution(total, 7 * MS)] * 16, up_bytes=100_000, down_bytes=10, bytes_per_s=rate)
        for total, rate in ((7 * MS + 400_000, 3_000_000_000), (7 * MS + 700_000, 9_000_000_000))
    ]
    assert {(one.link.latency_ns, one.link.bytes_per_s) for one in found} == {(0, RATE_MAX)}


def test_a_driver_that_measures_nothing_counts_with_the_whole() -> None:
    found = device_time([Execution(5 * MS, None)] * 4, up_bytes=0, down_bytes=0, bytes_per_s=0)
    assert found.cost.duration_ns == found.measured.duration_ns
    assert found.link.latency_ns == found.link.jitter_ns == found.link.wait_ns == 0


@pytest.mark.parametrize("seed", range(8))
def test_the_way_of_the_plan_is_no_shorter_than_any_that_was_measured(seed: int) -> None:
    """On the way there and back together: a frame that is on time by the plan has that much time."""
    rng = random.Random(seed)
    rate = rng.choice([0, 1_000_000, 125_000_000, 10_000_000_000])
    up, down = rng.randrange(1_000_000), rng.randrange(10_000)
    executions = [
        Execution(there + rng.randrange(10 * MS), there)
        for there in (rng.randrange(1, 20 * MS) for _ in range(rng.randrange(1, 17)))
    ]
    found = device_time(executions, up_bytes=up, down_bytes=down, bytes_per_s=rate)
    way = Way.over(found.link, up, down)
    terms = way.terms(StreamTerms(name="s", period_ns=10**10, deadline_ns=10**10))
    assert terms is not None
    longest_ns = max(total - there for total, there in executions if there is not None)
    assert 10**10 - terms.deadline_ns + terms.jitter_ns >= longest_ns - 2  # Two roundings down.
    assert found.link.wait_ns <= WAIT_NS
    assert found.cost.duration_ns >= max(there for _, there in executions if there is not None)
