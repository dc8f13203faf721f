"""The states of a burst's two ends, without I/O: memory slots, and one execution in flight.

Owns which memory has which slot (client), which memory a slot stands for (server), and when an execution may begin.

Invariants:
1. Client: a slot is unique among live memories; freed slots are used again last-in first-out.
2. Server: a slot stands for the memory that the client gave when it was asked first, until the client frees it.
3. At most one execution is in flight.

Source: memory slots and flow control of the NN HAL 1.2 burst protocol.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

from aionn.errors import InvalidArgument, ResourceExhausted
from aionn.hal import Memory

__all__ = ["POLLING_US_MAX", "SLOTS_MAX", "BurstState", "MemorySlots", "SlotCache", "next_state"]

SLOTS_MAX = 4096
"""Most memories that one burst remembers: each is a mapping in the driver, and a process may have some 65,000."""


POLLING_US_MAX = 500
"""Longest polling window. The client's holds its event loop, which nothing of ours may do for as long as a millisecond."""


class BurstState(enum.Enum):
    """The state of the client's end of a burst."""

    IDLE = "idle"
    IN_FLIGHT = "in flight"
    DEAD = "dead"
    CLOSED = "closed"


_TRANSITIONS: Mapping[tuple[BurstState, str], BurstState] = {
    (BurstState.IDLE, "send"): BurstState.IN_FLIGHT,
    (BurstState.IN_FLIGHT, "result"): BurstState.IDLE,
    (BurstState.IDLE, "peer died"): BurstState.DEAD,
    (BurstState.IN_FLIGHT, "peer died"): BurstState.DEAD,
    (BurstState.DEAD, "peer died"): BurstState.DEAD,
    (BurstState.IDLE, "close"): BurstState.CLOSED,
    (BurstState.IN_FLIGHT, "close"): BurstState.CLOSED,
    (BurstState.DEAD, "close"): BurstState.CLOSED,
    (BurstState.CLOSED, "close"): BurstState.CLOSED,
    (BurstState.CLOSED, "peer died"): BurstState.CLOSED,
}


def next_state(state: BurstState, event: str) -> BurstState:
    """The state after an event.

    Raises:
        InvalidArgument: The event is illegal in that state; nothing changes.
    """
    try:
        return _TRANSITIONS[state, event]
    except KeyError:
        raise InvalidArgument(f"burst: cannot {event} while {state.value}") from None


class MemorySlots:
    """The client's table: which memory has which slot."""

    def __init__(self) -> None:
        self._slot_by_identifier: dict[int, int] = {}
        self._memory_by_slot: dict[int, Memory] = {}
        self._free: list[int] = []

    def slot(self, identifier: int, memory: Memory) -> int:
        """The slot of a memory that the caller names by ``identifier``; the memory that came first stays.

        Raises:
            ResourceExhausted: The burst remembers ``SLOTS_MAX`` memories already.
        """
        slot = self._slot_by_identifier.get(identifier)
        if slot is None:
            slot = self._allocate(memory)
            self._slot_by_identifier[identifier] = slot
        return slot

    def named(self, identifier: int, memory: Memory) -> Memory:
        """The memory that came first under ``identifier``. Raises as ``slot``."""
        return self._memory_by_slot[self.slot(identifier, memory)]

    def temporary_slot(self, memory: Memory) -> int:
        """A slot for one execution; give it back with ``free_slot``."""
        return self._allocate(memory)

    def _allocate(self, memory: Memory) -> int:
        if not self._free and len(self._memory_by_slot) >= SLOTS_MAX:
            raise ResourceExhausted(f"burst: {SLOTS_MAX} memories are remembered already", transient=False)
        slot = self._free.pop() if self._free else len(self._memory_by_slot)
        self._memory_by_slot[slot] = memory
        return slot

    def release(self, identifier: int) -> int | None:
        """Forgets a name; returns its slot, which keeps its memory until ``free_slot``; None if the name was unknown."""
        return self._slot_by_identifier.pop(identifier, None)

    def free_slot(self, slot: int) -> None:
        """Makes a slot free to be used again; ignored if it is."""
        if self._memory_by_slot.pop(slot, None) is not None:
            self._free.append(slot)

    def memories(self, slots: Sequence[int]) -> list[Memory]:
        """The slots that the server requests.

        Raises:
            InvalidArgument: A slot is unknown; nothing is given then.
        """
        unknown = [slot for slot in slots if slot not in self._memory_by_slot]
        if unknown:
            raise InvalidArgument(f"burst: the driver asked for unknown memory slots {unknown}")
        return [self._memory_by_slot[slot] for slot in slots]


class SlotCache:
    """The server's table: what a slot stands for."""

    def __init__(self) -> None:
        self._memory_by_slot: dict[int, Memory] = {}

    def missing(self, slots: Iterable[int]) -> list[int]:
        """The slots to ask for: unknown, sorted, unique."""
        return sorted({slot for slot in slots if slot not in self._memory_by_slot})

    def learn(self, slots: Sequence[int], memories: Sequence[Memory]) -> None:
        """Stores what the client gave.

        Raises:
            InvalidArgument: The numbers differ.
            ResourceExhausted: Too many memories.
        """
        if len(slots) != len(memories):
            raise InvalidArgument(f"burst: asked for {len(slots)} memories, got {len(memories)}")
        if len(self._memory_by_slot) + len(slots) > SLOTS_MAX:
            raise ResourceExhausted(f"burst: more than {SLOTS_MAX} memories", transient=False)
        self._memory_by_slot.update(zip(slots, memories, strict=True))

    def free(self, slot: int) -> bool:
        """Forgets a slot; False if it was unknown, which is not an error."""
        return self._memory_by_slot.pop(slot, None) is not None

    def pools(self, slots: Sequence[int]) -> tuple[Memory, ...]:
        """The memories of slots that are all known."""
        return tuple(self._memory_by_slot[slot] for slot in slots)

    def __len__(self) -> int:
        return len(self._memory_by_slot)
