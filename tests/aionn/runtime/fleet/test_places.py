"""The device of each stream: searches, refusals by the ledgers of devices, losses, drains. Pure."""

from __future__ import annotations

import random

import pytest

from aionn.errors import NotAdmitted
from aionn.runtime.fleet.measured import DeviceTime
from aionn.runtime.fleet.places import StreamPlaces
from aionn.runtime.guarantees.arrivals import Measured
from aionn.scheduler.admission import SlotCost, StreamTerms
from aionn.scheduler.fleet.plan import NodeState
from aionn.scheduler.fleet.transfer import NodeLink

MS = 1_000_000


def joined(*names: str, duration_ms: int = 8) -> StreamPlaces:
    places = StreamPlaces()
    for name in names:
        join(places, name, duration_ms)
    return places


NEAR = NodeLink(latency_ns=MS, jitter_ns=MS)


def join(places: StreamPlaces, name: str, duration_ms: int = 8, link: NodeLink = NEAR) -> None:
    cost = SlotCost(duration_ns=duration_ms * MS, piece_ns=duration_ms * MS)
    time = DeviceTime(Measured(cost.duration_ns, 16), cost, link)
    places.join(name, time, slots=1, sizes=(1000, 10))


def ask(places: StreamPlaces, name: str, period_ms: int = 40) -> str:
    places.begin(StreamTerms(name=name, period_ns=period_ms * MS, deadline_ns=period_ms * MS))
    return places.next(name, 0)


def test_streams_are_spread_and_keep_their_places() -> None:
    places = joined("a", "b")
    assert {ask(places, "gate"), ask(places, "hall")} == {"a", "b"}
    first = dict(places.devices)
    assert ask(places, "gate") == first["gate"]
    assert dict(places.devices) == first


def test_a_device_whose_ledger_refuses_is_not_asked_again_in_that_search() -> None:
    places = joined("a", "b", "c")
    asked = []
    for number in range(3):
        device = ask(places, "gate") if not number else places.next("gate", 0)
        asked.append(device)
        places.refused("gate", NotAdmitted(f"others hold the time of {device}"))
    assert sorted(asked) == ["a", "b", "c"]
    with pytest.raises(NotAdmitted, match=f"others hold the time of {asked[-1]}"):
        places.next("gate", 0)
    assert places.device_of("gate") is None
    assert ask(places, "gate") in asked, "a new search asks all of them"


def test_a_refusal_of_a_ledger_leaves_the_time_to_other_streams() -> None:
    places = joined("a")
    ask(places, "gate", period_ms=16)
    places.refused("gate", NotAdmitted("no"))
    assert ask(places, "hall", period_ms=16) == "a"


def test_streams_of_a_lost_device_move_together_and_each_that_stays_without_has_a_reason() -> None:
    places = joined("a", "b")
    for number in range(4):
        ask(places, f"s{number}", period_ms=20)  # Two on each, which is all that fits.
    before = dict(places.devices)
    on_a = [name for name, device in before.items() if device == "a"]
    places.lose("a", 0)
    places.lose("a", 0)
    assert places.state("a") is NodeState.LOST
    for name in on_a:
        if (device := places.device_of(name)) is not None:
            assert device == "b"
            continue
        places.begin(StreamTerms(name=name, period_ns=20 * MS, deadline_ns=20 * MS))
        with pytest.raises(NotAdmitted, match=f'stream "{name}" on b'):
            places.next(name, 0)


def test_a_device_that_joins_later_is_open_to_streams_of_before() -> None:
    places = joined("a")
    ask(places, "gate")
    join(places, "b")
    places.lose("a", 0)
    assert places.device_of("gate") == "b"
    join(places, "a")
    places.lose("b", 0)
    assert places.device_of("gate") == "a"


@pytest.mark.parametrize(
    "link",
    [
        NodeLink(latency_ns=18 * MS, jitter_ns=MS),
        NodeLink(latency_ns=MS, jitter_ns=19 * MS),
        NodeLink(latency_ns=MS, jitter_ns=MS, bytes_per_s=20_000, wait_ns=5 * MS),
    ],
    ids=["latency", "jitter", "bandwidth"],
)
def test_a_device_that_is_back_is_placed_by_the_network_of_now(link: NodeLink) -> None:
    places = joined("a")
    assert ask(places, "gate") == "a"
    places.lose("a", 0)
    join(places, "a", link=link)
    with pytest.raises(NotAdmitted, match=r"network|link|slot|needs"):
        ask(places, "gate")
    join(places, "b")
    assert ask(places, "gate") == "b"
    places.lose("a", 0)
    join(places, "a")
    places.lose("b", 0)
    assert places.device_of("gate") == "a", "it is near again"


def test_a_device_that_is_back_and_slower_is_tried_after_the_quicker_ones() -> None:
    places = joined("a", "b")
    places.lose("a", 0)
    join(places, "a", duration_ms=20)
    assert [ask(places, f"s{number}", period_ms=100) for number in range(3)] == ["b"] * 3


def test_a_reason_of_before_does_not_count_where_there_is_room_again() -> None:
    places = joined("a")
    ask(places, "gate", period_ms=12)
    places.lose("a", 0)
    join(places, "b")
    assert ask(places, "gate", period_ms=12) == "b", "the device has come since it was refused"
    join(places, "a")
    ask(places, "hall", period_ms=12)
    places.lose("b", 0)
    assert places.device_of("gate") is None, "there is room for one"
    places.release("hall")
    assert ask(places, "gate", period_ms=12) == "a", "the other stream has ended since"


def test_a_drained_device_gets_nothing_until_it_is_restored() -> None:
    places = joined("a", "b")
    while len(places.devices) < 2:
        ask(places, f"s{len(places.devices)}")
    drained = places.drain("a", 0)
    assert list(drained.placed.values()) == ["b"] and not drained.refused
    assert ask(places, "late") == "b"
    assert places.drain("b", 0).refused.keys() == {"s0", "s1", "late"}, "no other device is up"
    with pytest.raises(NotAdmitted):
        ask(places, "later")
    places.restore("a")
    assert ask(places, "latest") == "a"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_stream_has_a_place_on_a_device_that_is_up_or_an_answer(seed: int) -> None:
    rng = random.Random(seed)
    names = ["a", "b", "c", "d"]
    places = joined(*names)
    streams = [f"s{number}" for number in range(12)]
    for step in range(200):
        event, device, stream = rng.randrange(6), rng.choice(names), rng.choice(streams)
        if event == 0:
            places.lose(device, step)
        elif event == 1:
            join(places, device)
        elif event == 2:
            places.drain(device, step)
        elif event == 3:
            places.release(stream)
        else:
            places.begin(StreamTerms(name=stream, period_ns=30 * MS, deadline_ns=rng.randrange(20, 40) * MS))
            answers = 0
            while True:
                answers += 1
                assert answers <= len(names) + 1, "each device is asked once"
                try:
                    found = places.next(stream, step)
                except NotAdmitted:
                    assert places.device_of(stream) is None
                    break
                assert places.device_of(stream) == found
                if rng.random() < 0.6:
                    break
                places.refused(stream, NotAdmitted(f"{found} refuses"))
        for found in places.devices.values():
            assert places.state(found) is not NodeState.LOST
