"""The nodes that are tried first: walks over groups, and the proof that a node cannot take a stream."""

from __future__ import annotations

import random
from typing import Any

import pytest

from aionn.errors import NotAdmitted
from aionn.scheduler.fleet.candidates import Candidates, Group, Walk
from aionn.scheduler.fleet.plan import TESTS_MAX, FleetPlan, FleetStream
from aionn.scheduler.fleet.transfer import NodeLink, Way
from tests.aionn.scheduler.fleet.test_plan import node, stream

MS = 1_000_000


def passed(walk: Walk) -> list[str]:
    found = []
    while (free_ppm := walk.free_ppm) is not None:
        name = walk.next()
        assert name is not None
        found.append((free_ppm, name))
    assert walk.next() is None
    assert [free_ppm for free_ppm, _ in found] == sorted((free_ppm for free_ppm, _ in found), reverse=True)
    return [name for _, name in found]


@pytest.mark.parametrize("seed", range(10))
def test_a_walk_passes_each_node_that_is_offered_once_the_emptiest_first(seed: int) -> None:
    rng, candidates = random.Random(seed), Candidates()
    groups = [Group.of(kind, NodeLink(latency_ns=latency_ns)) for kind in "ab" for latency_ns in (0, 3 * MS)]
    offered: dict[str, tuple[Group, int]] = {}
    for _ in range(600):
        name = f"n{rng.randrange(40)}"
        if rng.random() < 0.7:
            offered[name] = rng.choice(groups), rng.randrange(50)
            candidates.offer(name, *offered[name])
        else:
            offered.pop(name, None)
            candidates.withdraw(name)
        assert len(candidates) == len(offered)
        assert set(candidates.groups) == {group for group, _ in offered.values()}
        if rng.random() < 0.2:
            for group in groups:
                expected = [one for one, (its, _) in offered.items() if its == group]
                assert sorted(passed(candidates.walk(group))) == sorted(expected)
                assert len(passed(candidates.walk(group))) == len(expected), "a walk takes nothing"


def test_entries_that_are_out_of_date_are_bounded() -> None:
    candidates, group = Candidates(), Group.of("npu", NodeLink())
    for number in range(10_000):
        candidates.offer(f"n{number % 10}", group, number)
    assert len(candidates._heaps[group]) < 200


def takes(held: Any, asked: FleetStream) -> bool:
    """Whether a node takes a stream, by the whole test of its link and slots."""
    way = Way.over(held.node.link, asked.up_bytes, asked.down_bytes)
    terms = way.terms(asked.terms)
    if terms is None or not held.load.has_room(way, terms):
        return False
    return held.ledger.slot_that_fits(terms, held.costs(asked)) is not None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_a_node_that_is_passed_over_has_no_room_by_the_whole_test(
    seed: int, request: pytest.FixtureRequest
) -> None:
    """Whatever a node holds: where a look finds no room, neither does the test of the link and of each slot; and no stream is
    refused that one of the nodes takes."""
    rng = random.Random(seed)
    nodes = [
        node(
            f"n{number}",
            rng.choice(("npu", "cpu")),
            slots=rng.choice((1, 2)),
            latency_ms=rng.choice((0, 0.3, 2, 9)),
            can_preempt=rng.random() < 0.6,
        )
        for number in range(6)
    ]
    plan = FleetPlan(nodes)
    passed_over = 0
    for number in range(2000 if request.config.getoption("--long") else 150):
        asked = stream(
            f"s{number}",
            duration_ms=rng.choice((0.5, 2, 5, 11)),
            period_ms=rng.choice((20, 33, 50, 100)),
            deadline_ms=rng.choice((15, 25, 40, 70)),
            up_bytes=rng.choice((0, 50_000, 300_000)),
        )
        takers = [name for name, held in plan._nodes.items() if takes(held, asked)]
        for name, held in plan._nodes.items():
            if not held.may_take(asked):
                passed_over += 1
                assert name not in takers
        try:
            plan.place(asked, now_ns=number)
        except NotAdmitted:
            assert not takers or plan.tests >= TESTS_MAX - 1, "no node is overlooked where all can be tested"
            if plan.places:
                plan.release(rng.choice(sorted(plan.places)))
    assert passed_over > 50
