"""The waiting room of a device: who is next, who has expired. Pure: no clock, no waiting.

Invariants:
1. The order is priority, then earliest deadline, then arrival; no deadline counts as the latest.
2. Expired entries are taken out before the order is looked at: late work never becomes the most urgent.
3. The room is bounded.

Source: the order that the NN HAL's quality of service leaves to the runtime; ties by arrival, as in a queue of requests.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

import msgspec

from aionn.errors import ResourceExhausted
from aionn.hal import TIME_MAX_NS, Priority

__all__ = ["WAITING_MAX", "Entry", "WaitingRoom", "WaitingRoomStatistics"]

WAITING_MAX = 1 << 17
"""Most entries that may wait for one device: a flood of 10^5 executions still fits, at some 300 bytes each."""

_T = TypeVar("_T")


class Entry(Generic[_T]):
    """One execution that waits.

    Attributes:
        item: What the caller put in.
        priority: Its class.
        deadline_ns: Absolute; None for none.
        is_waiting: False once it was taken, expired or removed.
    """

    __slots__ = ("deadline_ns", "is_waiting", "item", "priority", "sequence")

    def __init__(self, item: _T, priority: Priority, deadline_ns: int | None, sequence: int) -> None:
        self.item = item
        self.priority = priority
        self.deadline_ns = deadline_ns
        self.sequence = sequence
        self.is_waiting = True

    def __lt__(self, other: Entry[_T]) -> bool:
        return self._key() < other._key()

    def _key(self) -> tuple[int, int, int]:
        deadline_ns = TIME_MAX_NS if self.deadline_ns is None else self.deadline_ns
        return -self.priority, deadline_ns, self.sequence


class WaitingRoomStatistics(msgspec.Struct, frozen=True):
    """What has gone through a waiting room."""

    waiting: int
    entered: int
    taken: int
    expired: int
    removed: int


class WaitingRoom(Generic[_T]):
    """Executions that wait for one device."""

    def __init__(self, *, waiting_max: int = WAITING_MAX) -> None:
        self._heap: list[Entry[_T]] = []
        self._deadlines: list[tuple[int, int, Entry[_T]]] = []
        self._sequence = itertools.count()
        self._waiting_max = waiting_max
        self._entered = self._taken = self._expired = self._removed = 0

    def __len__(self) -> int:
        return self._entered - self._taken - self._expired - self._removed

    def enter(self, item: _T, *, priority: Priority, deadline_ns: int | None) -> Entry[_T]:
        """Adds an entry.

        Raises:
            ResourceExhausted: The room is full.
        """
        if len(self) >= self._waiting_max:
            raise ResourceExhausted(f"scheduler: {self._waiting_max} executions wait already", transient=True)
        entry = Entry(item, priority, deadline_ns, next(self._sequence))
        heapq.heappush(self._heap, entry)
        if deadline_ns is not None:
            heapq.heappush(self._deadlines, (deadline_ns, entry.sequence, entry))
        self._entered += 1
        return entry

    def remove(self, entry: Entry[_T]) -> bool:
        """Takes an entry out whose caller gave up; False if it is not waiting any more."""
        if not entry.is_waiting:
            return False
        entry.is_waiting = False
        self._removed += 1
        return True

    def expire(self, now_ns: int) -> list[Entry[_T]]:
        """Takes out every entry whose deadline has come, the earliest first."""
        expired = []
        while self._deadlines and (self._deadlines[0][0] <= now_ns or not self._deadlines[0][2].is_waiting):
            entry = heapq.heappop(self._deadlines)[2]
            if entry.is_waiting:
                entry.is_waiting = False
                expired.append(entry)
        self._expired += len(expired)
        return expired

    def take(self, now_ns: int) -> Entry[_T] | None:
        """Takes the next entry; None when nobody waits. Call ``expire`` first: expired work is never taken.

        Raises:
            AssertionError: An entry has expired and was not taken out.
        """
        while self._heap:
            entry = heapq.heappop(self._heap)
            if entry.is_waiting:
                assert entry.deadline_ns is None or entry.deadline_ns > now_ns, "expire() comes before take()"
                entry.is_waiting = False
                self._taken += 1
                return entry
        return None

    def next_deadline_ns(self) -> int | None:
        """The nearest deadline of those who wait; None when none has one."""
        while self._deadlines and not self._deadlines[0][2].is_waiting:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def statistics(self) -> WaitingRoomStatistics:
        """Counts since the beginning."""
        return WaitingRoomStatistics(len(self), self._entered, self._taken, self._expired, self._removed)
