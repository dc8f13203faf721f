"""When an item is due, and what happens to it when the consumer is slow.

Owns the arithmetic of presenting and the queue between a source and its consumer. Refuses to own the clock, the tasks and the
waiting: everything here is synchronous and takes the time as an argument (`source.py` is the shell around it).

Invariants:
1. Items leave the queue in the order in which they entered; none leaves twice.
2. The queue never holds more than its capacity; ``put`` on a full ``keep="all"`` queue is our own mistake, not the caller's.
3. ``presented == delivered + dropped + queued``.
"""

from __future__ import annotations

import collections
from typing import Generic, Literal, TypeVar, get_args

from aionn.errors import InvalidArgument
from aionn.media.arguments import checked_whole, one_of
from aionn.media.records import SourceStatistics

__all__ = [
    "Keep",
    "OneConsumer",
    "PresentationQueue",
    "captured_at_ns",
    "checked_keep",
    "checked_queue_max",
    "worthwhile_wait_ns",
]

Keep = Literal["all", "latest", "oldest"]

# A deeper queue only hides a consumer that cannot keep up, and 1,024 frames of 1080p are 6 GiB.
QUEUE_MAX = 1024

# Event loops wait in whole milliseconds, rounded up (epoll_wait takes nothing finer): so late may an idle loop's timer be.
TIMER_GRAIN_NS = 1_000_000

T = TypeVar("T")


def checked_keep(keep: str, where: str) -> Keep:
    """Returns ``keep`` if it is one of the three policies, else raises `InvalidArgument`."""
    policy: Keep = one_of(keep, get_args(Keep), f"{where}: keep")
    return policy


def checked_queue_max(queue_max: int, name: str, where: str) -> int:
    """Returns ``queue_max`` if it is a whole number between 1 and `QUEUE_MAX`, else raises `InvalidArgument`."""
    return checked_whole(queue_max, 1, QUEUE_MAX, f"{where}: {name}")


def captured_at_ns(due_ns: int, handed_out_ns: int, ready_ns: int, held_until_ns: int) -> int:
    """The moment that an item counts as presented.

    The value is the time of its delivery, at most `TIMER_GRAIN_NS` after it was due: the delay by a busy event loop is part of
    the latency that a consumer measures, since a camera would not wait either. It is later only if the item did not exist yet, or
    if the source was held back.

    Args:
        due_ns: When the item is due by its place in the medium.
        handed_out_ns: When it is handed out.
        ready_ns: When it was decoded.
        held_until_ns: When the queue last had room again after holding this item or an earlier one; 0 when it never did.
    """
    return max(min(handed_out_ns, due_ns + TIMER_GRAIN_NS), ready_ns, held_until_ns)


class OneConsumer:
    """The one consumer that waits for the next item: the block of ``with`` is its wait."""

    __slots__ = ("_is_waiting",)

    def __init__(self) -> None:
        self._is_waiting = False

    def check(self, where: str) -> None:
        """Raises `InvalidArgument` for a second consumer: the two would divide the items at random."""
        if self._is_waiting:
            raise InvalidArgument(
                f"{where}: expected one consumer, a second one asks for the next item while the first waits for it; "
                "aionn.media.tee(source) gives several consumers a branch() each"
            )

    def __enter__(self) -> None:
        self._is_waiting = True

    def __exit__(self, *_: object) -> None:
        self._is_waiting = False


class PresentationQueue(Generic[T]):
    """Items that were presented and not yet taken, under one of three policies.

    ``"latest"`` holds one item, the newest; a newer one takes its place. ``"oldest"`` holds up to ``capacity`` items and drops
    those that come while it is full. ``"all"`` drops nothing: while it is full, the source must wait.
    """

    def __init__(self, keep: Keep, capacity: int) -> None:
        assert capacity >= 1
        self._keep = keep
        self._capacity = 1 if keep == "latest" else capacity
        self._items: collections.deque[T] = collections.deque()
        self._presented = self._delivered = self._dropped = self._held_back = self._late = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def must_wait(self) -> bool:
        """True while the source may present nothing."""
        return self._keep == "all" and len(self._items) >= self._capacity

    @property
    def keeps_latest(self) -> bool:
        """Whether a newer item replaces an older one."""
        return self._keep == "latest"

    def put(self, item: T, *, held_back: bool = False, late: bool = False) -> None:
        """Presents an item; drops one if the policy requires it."""
        assert not self.must_wait
        self._presented += 1
        self._held_back += held_back
        self._late += late
        if len(self._items) >= self._capacity:
            self._dropped += 1
            if self._keep == "oldest":
                return
            self._items.popleft()
        self._items.append(item)

    def take(self) -> T:
        """Removes and returns the item that was presented first. The queue must not be empty."""
        item = self._items.popleft()
        self._delivered += 1
        return item

    def exchange(self, item: T) -> T:
        """The newest item in the place of one that was taken and not used, which is dropped; the same one if the policy keeps
        others, or none is newer."""
        if self._keep != "latest" or not self._items:
            return item
        self._dropped += 1
        return self._items.popleft()

    def drop_all(self) -> None:
        """Drops what waits."""
        self._dropped += len(self._items)
        self._items.clear()

    def statistics(self) -> SourceStatistics:
        """The account so far."""
        return SourceStatistics(
            presented=self._presented,
            delivered=self._delivered,
            dropped=self._dropped,
            queued=len(self._items),
            held_back=self._held_back,
            late=self._late,
        )


def worthwhile_wait_ns(items: object) -> int:
    """The longest wait for a newer item of a source that is worthwhile for a slow consumer; 0 for sources that know no pace."""
    ask = getattr(items, "worthwhile_wait_ns", None)
    return 0 if ask is None else int(ask())
