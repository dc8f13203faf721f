"""The protocol holds in every interleaving, with every death, and the model would see if a step were missing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


@pytest.mark.sampled(8)
@pytest.mark.parametrize("may_die", [False, True], ids=["", "a process may die"])
@pytest.mark.parametrize("event_reader", [False, True], ids=["futex", "eventfd"])
@pytest.mark.parametrize("order", ["TSO", "RELAXED"])
@pytest.mark.thorough
def test_the_ring_loses_nothing_and_nobody_sleeps_for_ever(
    protocol: ModuleType, order: str, event_reader: bool, may_die: bool
) -> None:
    states = protocol.ring(protocol.Ring(event_reader=event_reader), order, may_die).explore()
    assert states > 1000


# RELAXED also drains a store buffer in the order of TSO: whatever that allows is among its states.
@pytest.mark.parametrize("order", [pytest.param("TSO", marks=pytest.mark.long), "RELAXED"])
@pytest.mark.thorough
def test_a_ring_of_two_slots_wraps(protocol: ModuleType, order: str) -> None:
    assert protocol.ring(protocol.Ring(capacity=2, messages=3), order, may_die=True).explore() > 10_000


@pytest.mark.long
@pytest.mark.parametrize("order", ["TSO", "RELAXED"])
@pytest.mark.parametrize(("capacity", "messages"), [(1, 4), (2, 4), (3, 4)])
def test_larger_rings(protocol: ModuleType, order: str, capacity: int, messages: int) -> None:
    protocol.ring(protocol.Ring(capacity, messages), order, may_die=True).explore()


@pytest.mark.parametrize("may_die", [False, True], ids=["", "a process may die"])
def test_event_flag_bits_are_taken_once_and_wake(protocol: ModuleType, may_die: bool) -> None:
    assert protocol.event_flag(protocol.Flag(), may_die).explore() > 50


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("capacity", "may_die"), [(1, False), (1, True), (2, False)])
@pytest.mark.parametrize("order", ["TSO", "RELAXED"])
def test_an_overwritten_element_is_never_accepted(
    protocol: ModuleType, order: str, capacity: int, may_die: bool
) -> None:
    claim = protocol.Claim(capacity=capacity, messages=capacity + 1)
    assert protocol.claim(claim, order, may_die).explore() > 500


@pytest.mark.parametrize("order", ["TSO", "RELAXED"])
@pytest.mark.parametrize(("calls", "holders"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.long)])
def test_a_slot_of_native_calls_has_one_holder_and_the_gate_is_notified_of_each_that_it_found(
    protocol: ModuleType, order: str, calls: int, holders: int
) -> None:
    slots = protocol.NativeSlots(calls=calls, holders=holders)
    assert protocol.native_slots(slots, order).explore() > 100


MUTATIONS = {
    "ring": [
        "no fence after publishing",
        "no fence after declaring sleep",
        "reader does not look again",
        "writer does not look again",
        "counter before data",
        "space freed before the data is read",
        "wake before publishing",
        "parking word cleared after the wake",
        "nobody wakes",
        "counter published without release",
        "counter read without acquire",
        "sleep whatever the word says",
    ],
    "flag": [
        "wake before the bit is set",
        "nobody is woken",
        "bits are not consumed",
        "sleep whatever the word says",
    ],
    "slots": [
        "a closed word is not seen",
        "looked at and taken in two steps",
        "given before the call",
        "the end of a call is not reported",
        "the gate does not adopt holders",
        "the gate does not wait for holders",
    ],
    "claim": [
        "no claim, the write counter is checked",
        "claim after the data",
        "no check after copying",
        "no barrier after the claim",
        "no barrier before the check",
        "counter read without acquire",
    ],
}


def mutants(protocol: ModuleType, part: str) -> dict[str, Any]:
    if part == "flag":
        return {name: protocol.event_flag(m) for name, m in protocol.FLAG_MUTATIONS.items()}
    if part == "slots":
        return {name: protocol.native_slots(m) for name, m in protocol.SLOTS_MUTATIONS.items()}
    if part == "ring":
        return {name: protocol.ring(m, order) for name, (m, order) in protocol.RING_MUTATIONS.items()}
    return {name: protocol.claim(m, order) for name, (m, order) in protocol.CLAIM_MUTATIONS.items()}


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part, names in MUTATIONS.items() for name in names]
)
def test_a_missing_step_is_caught(protocol: ModuleType, part: str, name: str) -> None:
    with pytest.raises(protocol.Violation):
        mutants(protocol, part)[name].explore()


@pytest.mark.parametrize("part", list(MUTATIONS))
def test_every_mutation_is_tried(protocol: ModuleType, part: str) -> None:
    assert sorted(mutants(protocol, part)) == sorted(MUTATIONS[part])
