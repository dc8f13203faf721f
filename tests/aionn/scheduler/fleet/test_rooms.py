"""A look at the room of all slots: it passes over no node that takes a stream, and finds few others."""

from __future__ import annotations

import random
from typing import Any

import pytest

from aionn.errors import NotAdmitted
from aionn.scheduler.admission import SlotCost
from aionn.scheduler.fleet import rooms
from aionn.scheduler.fleet.plan import TESTS_MAX, FleetPlan, FleetStream
from aionn.scheduler.fleet.transfer import Way
from tests.aionn.scheduler.fleet.test_plan import drawn_nodes, node, stream


def takes(held: Any, asked: FleetStream) -> bool:
    """Whether a node takes a stream, by the whole test of its link and slots."""
    way = Way.over(held.node.link, asked.up_bytes, asked.down_bytes)
    terms = way.terms(asked.terms)
    if terms is None or not held.load.has_room(way, terms):
        return False
    return held.ledger.slot_that_fits(terms, held.costs(asked)) is not None


def found_by_a_look(plan: FleetPlan, asked: FleetStream) -> set[str]:
    ranks = {held.group: 0 for held in plan._in_order}
    found = list(plan._rooms.look(asked.terms, asked.costs, (asked.up_bytes, asked.down_bytes), ranks))
    assert [one.free_ppm for one in found] == sorted((one.free_ppm for one in found), reverse=True)
    return {plan._in_order[one.node].node.name for one in found}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_each_node_that_the_whole_test_takes_is_found(seed: int, request: pytest.FixtureRequest) -> None:
    """Whatever a node holds: where a look finds no room, neither does the test of the link and of each slot; nearly all nodes that
    it finds have room; and no stream is refused that one of the nodes takes."""
    rng = random.Random(seed)
    nodes = drawn_nodes(rng, 6, 0.6)
    plan = FleetPlan(nodes)
    passed_over, found_in_vain, taken = 0, 0, 0
    for number in range(2000 if request.config.getoption("--long") else 150):
        asked = stream(
            f"s{number}",
            duration_ms=rng.choice((0.5, 2, 5, 11)),
            period_ms=rng.choice((20, 33, 50, 100)),
            deadline_ms=rng.choice((15, 25, 40, 70)),
            up_bytes=rng.choice((0, 50_000, 300_000)),
        )
        takers = [name for name, held in plan._nodes.items() if takes(held, asked)]
        found = found_by_a_look(plan, asked)
        assert set(takers) <= found
        passed_over += len(nodes) - len(found)
        found_in_vain += len(found) - len(takers)
        taken += len(takers)
        try:
            plan.place(asked, now_ns=number)
        except NotAdmitted:
            assert not takers or plan.tests >= TESTS_MAX - 1, "no node is overlooked where all can be tested"
            if plan.places:
                plan.release(rng.choice(sorted(plan.places)))
    assert passed_over > 50 and taken > 50
    assert 10 * found_in_vain < taken


def test_nodes_that_are_not_up_or_are_not_looked_at_are_not_found() -> None:
    plan = FleetPlan([node("a"), node("b", "cpu"), node("c", slots=3)])
    asked = stream("gate")
    assert found_by_a_look(plan, asked) == {"a", "b", "c"}
    plan.lose("a", now_ns=0)
    plan.drain("c", now_ns=0)
    assert found_by_a_look(plan, asked) == {"b"}
    plan.restore("c")
    assert found_by_a_look(plan, asked) == {"b", "c"}
    cpu = plan._nodes["b"].group
    found = plan._rooms.look(asked.terms, asked.costs, (0, 0), {cpu: 4})
    assert [(one.rank, one.node) for one in found] == [(4, 1)]
    only_npu = FleetStream(terms=asked.terms, costs={"npu": asked.costs["npu"]})
    assert found_by_a_look(plan, only_npu) == {"c"}


def test_nodes_are_given_in_the_same_order_however_many_are_looked_at_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def order_of(rows: int) -> list[rooms.Found]:
        monkeypatch.setattr(rooms, "ROWS_AT_FIRST", rows)
        rng = random.Random(5)
        plan = FleetPlan([node(f"n{number}", rng.choice(("npu", "cpu")), slots=2) for number in range(20)])
        for number in range(60):
            plan.place(stream(f"s{number}", duration_ms=rng.choice((1, 3, 6))), now_ns=0)
        asked = stream("gate", duration_ms=9)
        ranks = {held.group: rank for rank, held in enumerate(plan._in_order)}
        found = list(plan._rooms.look(asked.terms, asked.costs, (0, 0), ranks))
        assert plan._rooms.found == len(found)
        return found

    assert order_of(1) == order_of(3) == order_of(1000) != []


def test_slots_with_more_streams_than_deadlines_are_kept_of_are_found_by_their_share() -> None:
    plan = FleetPlan([node("a", cap_ppm=700_000)])
    small = {"npu": SlotCost(duration_ns=400_000, piece_ns=0)}
    for number in range(rooms.POINTS_MAX + 1):
        plan.place(stream(f"s{number}", costs=small, up_bytes=0, down_bytes=0), now_ns=0)
    asked = stream("gate", duration_ms=1, up_bytes=0, down_bytes=0)
    assert found_by_a_look(plan, asked) == {"a"} and takes(plan._nodes["a"], asked)
    assert found_by_a_look(plan, stream("yard", duration_ms=3, up_bytes=0, down_bytes=0)) == set()


def test_looks_at_a_large_fleet_cover_a_part_of_it_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "ROWS_MAX", 4)
    plan = FleetPlan([node(f"n{number}") for number in range(10)])
    asked = stream("gate")
    parts = [sorted(found_by_a_look(plan, asked)) for _ in range(4)]
    assert parts[:3] == [["n0", "n1", "n2", "n3"], ["n4", "n5", "n6", "n7"], ["n8", "n9"]]
    assert parts[3] == parts[0]
