"""Simulated time: a heap of callbacks, in the order of their times.

Owns the clock of a simulation and the order of its events. Knows nothing of devices or requests.

Invariants:
1. Time never goes back; events of one time run in the order in which they were asked for.
2. Nothing here depends on a real clock, a hash seed or an address: the same calls give the same run.

Source: discrete-event simulation with callbacks instead of coroutines, which costs a third of the time per event.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

__all__ = ["Core"]


class Core:
    """A simulation's clock and the events to come.

    Attributes:
        now_ns: The time.
        events: Number of events that have run.
    """

    __slots__ = ("_heap", "_next", "events", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self.events = 0
        self._heap: list[tuple[int, int, Callable[[Any], object], Any]] = []
        self._next = count().__next__

    def at(self, time_ns: int, callback: Callable[[Any], object], argument: Any = None) -> None:
        """Calls ``callback(argument)`` at a time; one that has passed counts as now."""
        if time_ns < self.now_ns:
            time_ns = self.now_ns
        heappush(self._heap, (time_ns, self._next(), callback, argument))

    def after(self, delay_ns: int, callback: Callable[[Any], object], argument: Any = None) -> None:
        """Calls ``callback(argument)`` after a delay of at least 0."""
        heappush(self._heap, (self.now_ns + delay_ns, self._next(), callback, argument))

    def run(self, until_ns: int | None = None) -> int:
        """Runs all events, or all up to a time; returns the number that ran.

        With ``until_ns`` the clock is there afterwards.
        """
        heap = self._heap
        events = 0
        if until_ns is None:
            while heap:
                self.now_ns, _, callback, argument = heappop(heap)
                callback(argument)
                events += 1
        else:
            while heap and heap[0][0] <= until_ns:
                self.now_ns, _, callback, argument = heappop(heap)
                callback(argument)
                events += 1
            self.now_ns = max(self.now_ns, until_ns)
        self.events += events
        return events
