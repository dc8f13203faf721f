"""The plan of a fleet: the node of each stream, moves, refusals, and the bound of a decision."""

from __future__ import annotations

import random

import pytest

from aionn.errors import InvalidArgument, NotAdmitted
from aionn.scheduler.admission import Piece, SlotCost, SlotTest, StreamTerms
from aionn.scheduler.fleet.plan import TESTS_MAX, FleetNode, FleetPlan, FleetStream, NodeState
from aionn.scheduler.fleet.transfer import NodeLink

MS = 1_000_000


def node(name: str, kind: str = "npu", *, latency_ms: float = 0.2, **more: object) -> FleetNode:
    return FleetNode(
        name=name,
        kind=kind,
        link=NodeLink(latency_ns=round(latency_ms * MS), jitter_ns=MS // 10, bytes_per_s=125_000_000),
        **more,  # type: ignore[arg-type]
    )


def stream(
    name: str, *, duration_ms: float = 8.0, period_ms: float = 40.0, deadline_ms: float = 60.0, **more: object
) -> FleetStream:
    npu = SlotCost(duration_ns=round(duration_ms * MS), piece_ns=MS // 2)
    cpu = SlotCost(duration_ns=round(2 * duration_ms * MS), piece_ns=MS // 2)
    terms = StreamTerms(name=name, period_ns=round(period_ms * MS), deadline_ns=round(deadline_ms * MS))
    values = {"costs": {"npu": npu, "cpu": cpu}, "up_bytes": 50_000, "down_bytes": 2_000, **more}
    return FleetStream(terms=terms, **values)  # type: ignore[arg-type]


def check(plan: FleetPlan, nodes: list[FleetNode]) -> None:
    """The streams of each slot pass the test of admission, and each stream is where the plan says."""
    placed = 0
    for one in nodes:
        held = [plan.places[name].reservation for name in plan.streams(one.name)]
        placed += len(held)
        for slot in range(one.slots):
            demands = [reservation.demand for reservation in held if reservation.slot == slot]
            assert SlotTest(demands, cap_ppm=one.cap_ppm, lower=one.lower).verdict().fits
    assert placed == len(plan.places)


def test_the_quickest_node_that_is_near_gets_the_stream():
    plan = FleetPlan([node("slow", "cpu"), node("far", latency_ms=12), node("near")])
    assert plan.place(stream("gate"), now_ns=5).node == "near"
    place = plan.places["gate"]
    assert place.reservation.admitted_ns == 5
    assert place.reservation.slot_name == "near/0"
    assert place.reservation.terms.deadline_ns == 60 * MS - place.way.constant_ns
    assert place.way.constant_ns > 5 * MS  # Both latencies, and the wait for the link on the way back.


def test_equal_nodes_get_equal_numbers():
    plan = FleetPlan([node(f"n{i}") for i in range(5)])
    for number in range(15):
        plan.place(stream(f"s{number}"), now_ns=0)
    assert {len(plan.streams(f"n{i}")) for i in range(5)} == {3}


def test_the_emptiest_slot_of_a_node_gets_the_stream():
    plan = FleetPlan([node("a", slots=3)])
    slots = [plan.place(stream(f"s{number}"), now_ns=0).reservation.slot for number in range(6)]
    assert sorted(slots) == [0, 0, 1, 1, 2, 2]


def test_a_full_kind_leaves_the_others_to_streams():
    plan = FleetPlan([node("quick"), node("slow", "cpu")])
    places = [plan.place(stream(f"s{number}"), now_ns=0).node for number in range(5)]
    assert places == ["quick"] * 4 + ["slow"]


def test_a_stream_that_fits_nowhere_learns_why_and_what_would_fit():
    plan = FleetPlan([node("a")])
    for number in range(4):
        plan.place(stream(f"s{number}"), now_ns=0)
    with pytest.raises(
        NotAdmitted, match=r'stream "gate" on a/0: .*; 1 of 1 nodes were tested\.$'
    ) as refused:
        plan.place(stream("gate"), now_ns=0)
    offered = refused.value.would_fit
    assert offered.period_ns is not None
    assert plan.place(stream("gate", period_ms=offered.period_ns / MS), now_ns=0).node == "a"


def test_an_offered_deadline_includes_the_network():
    plan = FleetPlan([node("a", latency_ms=4)])
    plan.place(stream("s", deadline_ms=40), now_ns=0)
    with pytest.raises(NotAdmitted) as refused:
        plan.place(stream("gate", deadline_ms=26), now_ns=0)
    offered_ns = refused.value.would_fit.deadline_ns
    assert offered_ns is not None
    assert plan.place(stream("gate", deadline_ms=offered_ns / MS), now_ns=0).node == "a"


@pytest.mark.parametrize(
    ("nodes", "asked", "message"),
    [
        ([node("a", "gpu")], stream("gate"), r"no node is up whose device can run it \(cpu, npu\)"),
        ([], stream("gate"), "no node is up"),
        (
            [node("a", latency_ms=40)],
            stream("gate"),
            "a frame takes at least .* with its way over the network, and its deadline is 60 ms",
        ),
        (
            [node("a", latency_ms=12)],
            stream("gate", deadline_ms=32),
            r"on a: its way over the network may take .* the whole deadline of 32 ms; 1 of 1 nodes were tested",
        ),
        (
            [node("a")],
            stream("gate", up_bytes=700_000),
            "on a: the link has no room: with this stream a frame may wait longer than 5 ms",
        ),
    ],
)
def test_a_refusal_names_its_cause(nodes: list[FleetNode], asked: FleetStream, message: str):
    with pytest.raises(NotAdmitted, match=message):
        FleetPlan(nodes).place(asked, now_ns=0)


def test_a_refusal_changes_nothing():
    plan = FleetPlan([node("a"), node("b", "cpu")])
    for _ in range(3):
        with pytest.raises(NotAdmitted):
            plan.place(stream("gate", duration_ms=39), now_ns=0)
    assert not plan.places
    assert plan.place(stream("gate"), now_ns=0).node == "a"


def test_best_effort_of_a_node_counts():
    quick = stream("gate", duration_ms=8, deadline_ms=20)
    assert FleetPlan([node("a")]).place(quick, now_ns=0).node == "a"
    with pytest.raises(NotAdmitted, match='"search" may occupy the device'):
        FleetPlan([node("a", lower=(Piece("search", 6 * MS),))]).place(quick, now_ns=0)


def test_streams_of_a_lost_node_are_admitted_elsewhere_or_learn_why_not():
    nodes = [node(f"n{i}") for i in range(3)]
    plan = FleetPlan(nodes)
    for number in range(10):
        plan.place(stream(f"s{number}"), now_ns=0)
    lost = plan.streams("n0")
    moves = plan.lose("n0", now_ns=7)
    assert {*moves.placed, *moves.refused} == set(lost)
    assert len(moves.placed) == 2 and len(moves.refused) == len(lost) - 2  # Four fit on a node.
    assert all(plan.places[name] is place and place.node != "n0" for name, place in moves.placed.items())
    assert all(place.reservation.admitted_ns == 7 for place in moves.placed.values())
    assert all("too much" in str(e) or "may be reserved" in str(e) for e in moves.refused.values())
    assert plan.streams("n0") == ()
    check(plan, nodes)
    plan.restore("n0")
    for name in moves.refused:
        assert plan.place(stream(name), now_ns=8).node == "n0"


def test_the_largest_streams_of_a_lost_node_are_placed_first():
    plan = FleetPlan([node("n0"), node("n1")])
    for name, duration_ms in (("small", 2), ("large", 20), ("middle", 8)):
        plan.place(stream(name, duration_ms=duration_ms), now_ns=0)
    home = plan.places["large"].node
    moves = plan.lose(home, now_ns=1)
    assert next(iter(moves.placed)) == "large"


def test_streams_leave_a_node_that_drains_and_stay_where_nothing_else_takes_them():
    nodes = [node("n0"), node("n1")]
    plan = FleetPlan(nodes)
    for number in range(6):
        plan.place(stream(f"s{number}"), now_ns=0)
    moves = plan.drain("n0", now_ns=1)
    assert len(moves.placed) == 1 and len(moves.refused) == 2
    assert set(plan.streams("n0")) == set(moves.refused)
    check(plan, nodes)
    plan.release(plan.streams("n1")[0])
    assert plan.place(stream("new"), now_ns=2).node == "n1"
    assert plan.lose("n0", now_ns=3).placed == {}


TABLE = [
    ("up", "restore", "up"),
    ("up", "drain", "draining"),
    ("up", "lose", "lost"),
    ("draining", "drain", "draining"),
    ("draining", "lose", "lost"),
    ("draining", "restore", "up"),
    ("lost", "lose", "lost"),
    ("lost", "drain", "lost"),
    ("lost", "restore", "up"),
]


@pytest.mark.parametrize(("state", "event", "after"), TABLE)
def test_states_of_a_node(state: str, event: str, after: str):
    plan = FleetPlan([node("a")])
    events = {"lose": plan.lose, "drain": plan.drain, "restore": lambda name, now_ns: plan.restore(name)}
    if state != "up":
        events["lose" if state == "lost" else "drain"]("a", now_ns=0)
    events[event]("a", now_ns=1)
    assert plan.state("a") is NodeState(after)
    if after == "up":
        assert plan.place(stream("gate"), now_ns=2).node == "a"
    else:
        with pytest.raises(NotAdmitted, match="no node is up"):
            plan.place(stream("gate"), now_ns=2)


def test_mistakes_are_rejected():
    plan = FleetPlan([node("a")])
    plan.place(stream("gate"), now_ns=0)
    with pytest.raises(InvalidArgument, match='stream "gate" has a place on a'):
        plan.place(stream("gate"), now_ns=0)
    with pytest.raises(InvalidArgument, match="expected different names of nodes, got 'a' again"):
        plan.add(node("a"))
    with pytest.raises(InvalidArgument, match="there is no node 'b'"):
        plan.lose("b", now_ns=0)
    with pytest.raises(InvalidArgument, match="expected 1 to 64 slots, got 0"):
        plan.add(node("b", slots=0))
    phased = StreamTerms(name="p", period_ns=40 * MS, deadline_ns=40 * MS, phase_ns=0)
    with pytest.raises(InvalidArgument, match="expected no phase"):
        plan.place(FleetStream(terms=phased, costs={}), now_ns=0)
    assert plan.release("nobody") is None


def drawn_nodes(source: random.Random, count: int, preempting: float) -> list[FleetNode]:
    """Nodes of several kinds, slots and distances; the last argument is the share of those that can preempt."""
    return [
        node(
            f"n{i}",
            source.choice(("npu", "cpu")),
            slots=source.choice((1, 2)),
            latency_ms=source.choice((0, 0.3, 2, 9)),
            can_preempt=source.random() < preempting,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 6))]
)
def test_any_sequence_of_events_keeps_the_promises_and_the_bound(seed: int):
    source = random.Random(seed)
    nodes = drawn_nodes(source, 12, 0.7)
    plan = FleetPlan(nodes)
    asked = 0
    for now_ns in range(120):
        draw, name = source.random(), source.choice(nodes).name
        if draw < 0.7:
            asked += 1
            new = stream(
                f"s{asked}",
                duration_ms=source.choice((2, 5, 11)),
                period_ms=source.choice((33, 50, 100)),
                deadline_ms=source.choice((25, 40, 70)),
            )
            try:
                plan.place(new, now_ns=now_ns)
            except NotAdmitted:
                pass
            assert 0 <= plan.tests <= TESTS_MAX
        elif draw < 0.8 and plan.places:
            plan.release(source.choice(sorted(plan.places)))
        elif draw < 0.87:
            plan.lose(name, now_ns=now_ns)
        elif draw < 0.92:
            plan.drain(name, now_ns=now_ns)
        else:
            plan.restore(name)
    check(plan, nodes)
    assert len(plan.places) > 5


def test_nodes_whose_links_are_full_do_not_hide_one_with_room():
    large = {"duration_ms": 1, "up_bytes": 500_000}  # 4 of the 5 ms that a frame may wait for the link.
    plan = FleetPlan([node(f"n{i}") for i in range(60)])
    for number in range(60):
        plan.place(stream(f"large{number}", **large), now_ns=0)
    plan.add(node("last"))
    plan.place(stream("load", duration_ms=24), now_ns=0)
    assert plan.places["load"].node == "last"  # Its device has less room than the others, its link has more.
    assert plan.place(stream("gate", **large), now_ns=0).node == "last"


def test_many_kinds_of_links_without_room_do_not_hide_a_node_with_room():
    near = [node(f"n{i}-{j}", latency_ms=0.01 * 2**i) for i in range(8) for j in range(4)]
    plan = FleetPlan([*near, node("far", latency_ms=4)])
    for number in range(len(near)):
        plan.place(stream(f"s{number}", duration_ms=20, deadline_ms=34), now_ns=0)
    assert plan.streams("far") == ()
    # 40 % of each near device is free, but not in time.
    assert plan.place(stream("gate", duration_ms=12, deadline_ms=40), now_ns=0).node == "far"


@pytest.mark.parametrize("count", [10, 300])
@pytest.mark.thorough
def test_a_decision_looks_at_few_nodes_however_many_there_are(count: int):
    plan = FleetPlan([node(f"n{i}") for i in range(count)])
    tested = []
    for number in range(4 * count):
        plan.place(stream(f"s{number}"), now_ns=0)
        tested.append(plan.tests)
    assert max(tested) == 1  # They are alike: the emptiest takes it.
    with pytest.raises(NotAdmitted):
        plan.place(stream("one more"), now_ns=0)
    assert plan.tests <= TESTS_MAX
