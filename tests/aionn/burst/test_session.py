"""Memory slots and the states of a burst's client end."""

from __future__ import annotations

import itertools

import pytest

from aionn.burst.session import _TRANSITIONS, SLOTS_MAX, BurstState, MemorySlots, SlotCache, next_state
from aionn.errors import InvalidArgument, ResourceExhausted
from aionn.hal import Memory


@pytest.fixture
def memory() -> Memory:
    return Memory.create(64)


def test_identifier_keeps_its_slot_until_released(memory: Memory) -> None:
    slots = MemorySlots()
    first, second = slots.slot(10, memory), slots.slot(11, memory)
    assert (first, second) == (0, 1)
    assert slots.slot(10, memory) == first
    assert slots.release(10) == first
    assert slots.release(10) is None


def test_freed_slots_are_used_again_last_in_first_out(memory: Memory) -> None:
    slots = MemorySlots()
    for identifier in range(3):
        slots.slot(identifier, memory)
    for identifier in (0, 2):
        slot = slots.release(identifier)
        assert slot is not None and slots.memories([slot]) == [memory], "the driver may still ask for it"
        slots.free_slot(slot)
    assert [slots.slot(7, memory), slots.slot(8, memory), slots.slot(9, memory)] == [2, 0, 3]


def test_unknown_slot_gives_no_memory_at_all(memory: Memory) -> None:
    slots = MemorySlots()
    known = slots.slot(0, memory)
    assert slots.memories([known]) == [memory]
    with pytest.raises(InvalidArgument, match=r"unknown memory slots \[5\]"):
        slots.memories([known, 5])


def test_slots_are_bounded(memory: Memory) -> None:
    slots = MemorySlots()
    for identifier in range(SLOTS_MAX):
        slots.slot(identifier, memory)
    with pytest.raises(ResourceExhausted):
        slots.slot(SLOTS_MAX, memory)


def test_cache_asks_once_and_relearns_after_a_free(memory: Memory) -> None:
    cache = SlotCache()
    assert cache.missing([4, 2, 4]) == [2, 4]
    cache.learn([2, 4], [memory, memory])
    assert cache.missing([4, 2]) == []
    assert cache.free(4)
    assert not cache.free(4)
    assert cache.missing([4, 2]) == [4]
    with pytest.raises(InvalidArgument, match="asked for 1 memories, got 2"):
        cache.learn([4], [memory, memory])


def test_states_follow_the_table_and_nothing_else() -> None:
    events = {event for _, event in _TRANSITIONS}
    for state, event in itertools.product(BurstState, events):
        if (state, event) in _TRANSITIONS:
            assert next_state(state, event) == _TRANSITIONS[state, event]
        else:
            with pytest.raises(InvalidArgument, match="cannot"):
                next_state(state, event)
    assert next_state(BurstState.IN_FLIGHT, "result") == BurstState.IDLE
