"""Statistics: what one endpoint has done, as a frozen record."""

from __future__ import annotations

import msgspec

__all__ = ["Statistics"]


class Statistics(msgspec.Struct, frozen=True):
    """Counts of one endpoint since it was made, and its present view of the queue.

    Attributes:
        written_count: Elements published by this endpoint.
        read_count: Elements taken by it.
        lost_count: Elements an unsynchronized reader was too slow for.
        overflow_count: Number of times that this happened.
        wake_count: Number of times that this endpoint found the peer asleep and woke it (each a system call).
        park_count: Number of times that it went to sleep itself.
        spin_count: Number of times that it began a wait by spinning.
        available_to_read: Elements ready for it now.
        available_to_write: Elements it could write now without loss.
    """

    written_count: int
    read_count: int
    lost_count: int
    overflow_count: int
    wake_count: int
    park_count: int
    spin_count: int
    available_to_read: int
    available_to_write: int
