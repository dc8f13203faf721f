"""The nodes that are tried first for a stream, without a look at all of them.

Owns the order. Nodes of one kind of device, whose links are alike to a factor of two, form a group; in it the node with the largest
free share, of a slot or of its link, whichever is scarcer, is next: load is spread, so that a lost node has few streams and each
frame much slack. Pure.

Invariants:
1. A step costs the logarithm of the number of nodes, and there are no more groups than kinds of devices times kinds of links,
   however many nodes there are.
2. A node that is not offered is not found; one is offered once until it is offered anew.
3. A look changes nothing: only a node whose free share has changed is offered anew.
"""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

from aionn.scheduler.fleet.transfer import NodeLink

__all__ = ["Candidates", "Group"]

STALE_MIN = 64
"""Entries of a group that are out of date before it is rebuilt, beside half as many as it has nodes: below that a rebuild costs
more than they do."""

_Entry = tuple[int, int, str]
"""The free share with its sign changed, a number, and the node."""


class Group(NamedTuple):
    """Nodes that are alike.

    Attributes:
        kind: The kind of their devices.
        latency_ns: None has a link with a smaller latency.
        bytes_per_s: None has one with a larger bandwidth; 0 means no limit.
    """

    kind: str
    latency_ns: int
    bytes_per_s: int

    @classmethod
    def of(cls, kind: str, link: NodeLink) -> Group:
        """The group of a node."""
        latency_ns, rate = link.latency_ns, link.bytes_per_s
        return cls(
            kind, 1 << latency_ns.bit_length() - 1 if latency_ns else 0, 1 << rate.bit_length() if rate else 0
        )

    def least_ns(self, up_bytes: int, down_bytes: int) -> int:
        """The least time of a frame on the way to a node of the group and back."""
        rate = self.bytes_per_s
        return 2 * self.latency_ns + ((up_bytes + down_bytes) * 10**9 // rate if rate else 0)


class Candidates:
    """The nodes of a fleet, by group and by free share."""

    def __init__(self) -> None:
        self._heaps: dict[Group, list[_Entry]] = {}
        self._slots: dict[Group, list[_Entry]] = {}
        self._current: dict[str, tuple[Group, _Entry, _Entry]] = {}
        self._sizes: dict[Group, int] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Number of nodes that are offered."""
        return len(self._current)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups with a node that is offered."""
        return tuple(group for group, size in self._sizes.items() if size)

    def offer(self, node: str, group: Group, free_ppm: int, slot_ppm: int | None = None) -> None:
        """A node can be found from now on.

        Args:
            node: Its name.
            group: Its group.
            free_ppm: The share that is free, of a slot or of its link, whichever is scarcer.
            slot_ppm: That of a slot; None means ``free_ppm``.
        """
        self.withdraw(node)
        number = next(self._numbers)
        by_free = -free_ppm, number, node
        by_slot = -(free_ppm if slot_ppm is None else slot_ppm), number, node
        self._current[node] = group, by_free, by_slot
        self._sizes[group] = size = self._sizes.get(group, 0) + 1
        for heaps, entry in ((self._heaps, by_free), (self._slots, by_slot)):
            heap = heaps.setdefault(group, [])
            heapq.heappush(heap, entry)
            if len(heap) > size + size // 2 + STALE_MIN:
                heap[:] = [held for held in heap if self._is_current(held)]
                heapq.heapify(heap)

    def withdraw(self, node: str) -> None:
        """A node is not found any more. Idempotent."""
        found = self._current.pop(node, None)
        if found is not None:
            self._sizes[found[0]] -= 1

    def emptiest(self, group: Group) -> str | None:
        """The node of a group with the largest free share; None in a group without a node."""
        heap = self._cleaned(self._heaps, group)
        return heap[0][2] if heap else None

    def slot_ppm(self, group: Group) -> int:
        """The largest free share of a slot in a group; 0 for a group without a node."""
        heap = self._cleaned(self._slots, group)
        return -heap[0][0] if heap else 0

    def _cleaned(self, heaps: dict[Group, list[_Entry]], group: Group) -> list[_Entry]:
        heap = heaps.get(group, [])
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap

    def _is_current(self, entry: _Entry) -> bool:
        found = self._current.get(entry[2])
        return found is not None and (found[1] is entry or found[2] is entry)
