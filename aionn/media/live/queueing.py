"""Captured items that wait for the consumer, under one of three policies.

Owns the order and what is dropped. Refuses to own the buffers of what it drops: it returns them to its caller, who requeues them.

Invariants:
1. Items leave in the order in which they entered.
2. At most the capacity is held; ``put`` into a full ``keep="all"`` queue is our own mistake.
"""

from __future__ import annotations

import collections

from aionn.media.live.capture import Grab
from aionn.media.pacing import Keep

__all__ = ["GrabQueue", "is_stale"]

STALE_PERIODS = 2
"""A frame that is older than so many periods was not the newest when it was taken."""


STALE_NS_DEFAULT = 200_000_000
"""The same for a source whose period is not known: two periods of a camera in the dark."""


def is_stale(age_ns: int, period_ns: int | None, was_starved: bool) -> bool:
    """Whether newer frames than this one were lost because no buffer was free, so that a fresh one is nearer than this one.

    Args:
        age_ns: Time since its capture.
        period_ns: Time between two frames; None if it is not known.
        was_starved: Whether the device had no buffer left to fill when this frame was taken.
    """
    limit_ns = STALE_NS_DEFAULT if period_ns is None else STALE_PERIODS * period_ns
    return was_starved and age_ns > limit_ns


class GrabQueue:
    """``"latest"`` holds one item, the newest; ``"oldest"`` drops what comes while it is full; ``"all"`` must not be given more."""

    def __init__(self, keep: Keep, capacity: int) -> None:
        assert capacity >= 1
        self._keep = keep
        self._capacity = 1 if keep == "latest" else capacity
        self._grabs: collections.deque[Grab] = collections.deque()

    def __len__(self) -> int:
        return len(self._grabs)

    @property
    def must_wait(self) -> bool:
        """Whether nothing may be put in now."""
        return self._keep == "all" and len(self._grabs) >= self._capacity

    def holds_back(self, ready: int) -> bool:
        """Whether nothing is to be taken now, since the consumer has to take items first.

        Args:
            ready: Number of items that have left the queue, and wait for the consumer.
        """
        return self.must_wait or (self._keep == "all" and ready >= self._capacity)

    @property
    def capacity(self) -> int:
        """The most items that are held."""
        return self._capacity

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is dropped."""
        return self._keep == "all"

    @property
    def keeps_latest(self) -> bool:
        """Whether a newer item replaces an older one."""
        return self._keep == "latest"

    def put(self, grab: Grab) -> Grab | None:
        """Takes an item; returns the one that is dropped for it, which may be the same."""
        assert not self.must_wait
        if len(self._grabs) < self._capacity:
            self._grabs.append(grab)
            return None
        if self._keep == "oldest":
            return grab
        self._grabs.append(grab)
        return self._grabs.popleft()

    def take(self) -> Grab:
        """Removes and returns the first. The queue must not be empty."""
        return self._grabs.popleft()
