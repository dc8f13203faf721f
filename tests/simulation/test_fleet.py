"""A fleet in virtual time: no admitted frame is lost, whatever dies, and a run repeats."""

import pytest

from aionn.errors import NotAdmitted
from aionn.scheduler.admission import Demand, SlotCost, SlotTest
from aionn.scheduler.fleet.plan import TESTS_MAX, FleetNode, FleetPlan, FleetStream
from aionn.scheduler.fleet.transfer import LinkLoad, NodeLink, Way
from aionn.simulation.fleet import FleetRun, draw_fleet

MS = 1_000_000


def test_no_admitted_frame_is_lost_when_nodes_die_and_each_stream_goes_on_or_has_a_reason():
    fleet = draw_fleet(20, 160, seed=3)
    run = FleetRun(fleet, span_ns=500 * MS, seed=3, deaths=4)
    run.run()
    assert run.outcomes["lost"] == 0 and run.labelled == 0
    assert run.outcomes["on_time"] > 400 and run.outcomes["withdrawn"] > 0 and run.moved > 0
    names = {stream.terms.name for stream in fleet.streams}
    assert {*run.plan.places, *run.refused} == names
    assert not run.plan.places.keys() & run.refused.keys()
    assert run.tests_max <= TESTS_MAX


def test_a_run_repeats():
    outcomes = []
    for _ in range(2):
        run = FleetRun(draw_fleet(8, 60, seed=1), span_ns=300 * MS, seed=1, deaths=1)
        run.run()
        outcomes.append((run.outcomes, [(name, place.node) for name, place in run.plan.places.items()]))
    assert outcomes[0] == outcomes[1]


def test_a_plan_that_takes_the_network_for_quicker_than_it_is_loses_frames():
    fleet = draw_fleet(8, 80, seed=2)
    slow = [NodeLink(latency_ns=18 * MS, jitter_ns=9 * MS, bytes_per_s=20_000_000)] * len(fleet.nodes)
    run = FleetRun(fleet, span_ns=300 * MS, seed=2)
    run.run_plan()
    run.delay_links(slow)
    run.run_frames()
    assert run.outcomes["lost"] > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_no_admitted_frame_is_lost_in_large_fleets(seed: int):
    run = FleetRun(draw_fleet(100, 1000, seed), span_ns=1000 * MS, seed=seed, deaths=10)
    run.run()
    assert run.outcomes["lost"] == 0 and run.labelled == 0


def overlooked(nodes: int, seed: int) -> tuple[int, int, int]:
    """Numbers of streams, of refusals, and of those refusals for which a look at every node finds a place."""
    fleet = draw_fleet(nodes, 10 * nodes, seed)
    plan, refused, wrong = FleetPlan(fleet.nodes), 0, 0
    for stream in fleet.streams:
        try:
            plan.place(stream, now_ns=0)
        except NotAdmitted:
            refused += 1
            wrong += any(has_room(plan, node, stream) for node in fleet.nodes)
    return len(fleet.streams), refused, wrong


def has_room(plan: FleetPlan, node: FleetNode, stream: FleetStream) -> bool:
    """Whether a node takes a stream beside those that it has, by a plan of this node alone."""
    if node.kind not in stream.costs:
        return False
    held = [plan.places[name] for name in plan.streams(node.name)]
    load = LinkLoad(node.link)
    for place in held:
        load.add(place.way, place.reservation.terms)
    way = Way.over(node.link, stream.up_bytes, stream.down_bytes)
    terms = way.terms(stream.terms)
    if terms is None or not load.has_room(way, terms):
        return False
    cost = stream.costs[node.kind]
    if not node.can_preempt:
        cost = SlotCost(duration_ns=cost.duration_ns, piece_ns=cost.duration_ns)
    return any(
        SlotTest(
            [place.reservation.demand for place in held if place.reservation.slot == slot],
            cap_ppm=node.cap_ppm,
        ).fits(Demand(terms, cost))
        for slot in range(node.slots)
    )


@pytest.mark.parametrize(
    ("nodes", "seed"), [(10, 0), (10, 1), (40, 2), pytest.param(300, 1, marks=pytest.mark.long)]
)
@pytest.mark.thorough
def test_hardly_a_refusal_of_a_fleet_overlooks_a_node_with_room(nodes: int, seed: int):
    streams, refused, wrong = overlooked(nodes, seed)
    assert refused > 0
    assert 100 * wrong <= refused, f"{wrong} of {refused} refusals, of {streams} streams"
