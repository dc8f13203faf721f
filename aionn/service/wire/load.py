"""The present load of one end of a connection for its peer, that of a process over all its connections, and their limits.

Owns the limits; pure. ``channel`` stops to read where one is reached.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Held", "Load"]

CALLS_AT_ONCE_MAX = 4096
"""Concurrent calls of one peer that are in progress, or whose answers it has not read: more than any client of aionn has, and a
bound for all peers. An end stops reading there: with a low bound two busy ends could wait for each other.
"""

BYTES_AT_ONCE_MAX = 32 << 20
"""Size of large calls that are handled concurrently: one of any size, or several smaller ones. Of models of 4,000 operations these
are 30, which wait for each other: they are read and decoded faster than they are checked."""

HELD_MAX = 512
"""Descriptors of one process, over all its connections, that are not closed yet and beyond which it is not read: two messages with
as many as fit. The thread that closes shares the interpreter with the loop, so a process can send more than it closes."""

HELD_PART = 4
"""One of so many descriptors that this process may have is for those of all processes that are not closed yet. Beyond a quarter of
these, only a process without any, which is not suspect, is read: the one that has waited longest."""

STARVED_NS_MAX = 50_000_000
"""Time for which a process without descriptors here, which is not suspect, waits for those of others, until messages that keep
many are rejected."""

REJECTED_CLOSING_NS = 10_000_000
"""Time until further ones are rejected: those of the first are closed by then as a rule."""

INLINE_BYTES_AT_ONCE_MAX = 4 << 20
"""Size of all other calls that are handled concurrently: a kilobyte for each, several times what one takes as a rule."""

OWED_BYTES_MAX = 4 << 20
"""Size of answers that the peer has not read, beyond what the socket holds: a kilobyte for each; one takes a tenth of that."""


class Load:
    """The present load of this end for its peer.

    Attributes:
        worked_on: Calls without an answer yet.
        large_bytes: Size of those that were in memory of their own.
        inline_bytes: Size of their datagrams.
        owed: Answers that have not left.
        owed_bytes: Their size.
    """

    __slots__ = ("inline_bytes", "large_bytes", "owed", "owed_bytes", "worked_on")

    def __init__(self) -> None:
        self.worked_on = self.large_bytes = self.inline_bytes = self.owed = self.owed_bytes = 0

    def has_room(self) -> bool:
        """Whether one more call may be taken."""
        return (
            self.worked_on + self.owed < CALLS_AT_ONCE_MAX
            and self.inline_bytes < INLINE_BYTES_AT_ONCE_MAX
            and self.owed_bytes < OWED_BYTES_MAX
        )

    def has_room_for_large(self, size_bytes: int) -> bool:
        """Whether a message of that size in memory of its own may be read."""
        return not self.large_bytes or self.large_bytes + size_bytes <= BYTES_AT_ONCE_MAX

    def begin(self, large_bytes: int, inline_bytes: int) -> None:
        """A call is worked on: its size in a memory of its own, and that of its datagram."""
        self.worked_on += 1
        self.large_bytes += large_bytes
        self.inline_bytes += inline_bytes

    def end(self, large_bytes: int, inline_bytes: int) -> None:
        """Undoes ``begin``."""
        self.worked_on -= 1
        self.large_bytes -= large_bytes
        self.inline_bytes -= inline_bytes

    def owe(self, size_bytes: int) -> None:
        """An answer of that size waits to leave; the same below zero when it has left."""
        self.owed += 1 if size_bytes > 0 else -1
        self.owed_bytes += size_bytes


class Held:
    """The descriptors that a process has sent, from their arrival until they are closed. Those that a memory or a fence keeps are
    others, which count by ``quotas``.

    Args:
        of_all: Those of all processes, among which these count as well; None without.
        most: Number of those of all processes beyond which none is received.
    """

    __slots__ = ("_closed", "_closing_until_ns", "_count", "_kept", "_most", "_of_all", "_waiting")

    def __init__(self, of_all: Held | None = None, most: int = 0) -> None:
        self._most = most
        self._count = 0
        self._closed: collections.deque[int] = collections.deque()
        self._of_all = of_all
        self._kept: dict[Callable[[], object], int] = {} if of_all is None else of_all._kept
        # The processes that could be read but for others' descriptors, with the times at which they began to wait, in that order.
        self._waiting: dict[Held, int] = {} if of_all is None else of_all._waiting
        self._closing_until_ns = 0

    @contextmanager
    def keeping(self, count: int, reject: Callable[[], object]) -> Iterator[None]:
        """The time in which a message keeps so many, which may be long. In the event loop.

        Args:
            count: Their number.
            reject: Called once by ``waits``: the message is to be rejected.
        """
        self._kept[reject] = count
        try:
            yield
        finally:
            self._kept.pop(reject, None)

    def waits(self, now_ns: int, *, is_suspect: bool) -> None:
        """The process still waits for ``has_room``; to be called again and again until ``waits_no_more``. In the event loop.

        Where only others' descriptors keep it waiting, it is served in the order in which such waits began. The first of these
        processes has messages rejected when it has waited for ``STARVED_NS_MAX``.

        Args:
            now_ns: The time.
            is_suspect: See ``has_room``.
        """
        if is_suspect or self.count:
            self._waiting.pop(self, None)
            return
        since_ns = self._waiting.setdefault(self, now_ns)
        if self._is_next and now_ns - since_ns > STARVED_NS_MAX:
            (self if self._of_all is None else self._of_all)._reject(now_ns)

    def waits_no_more(self) -> None:
        """The wait is over."""
        self._waiting.pop(self, None)

    @property
    def _is_next(self) -> bool:
        return next(iter(self._waiting), self) is self

    def _reject(self, now_ns: int) -> None:
        """Has the messages rejected that keep most, until a quarter of the limit is left."""
        if now_ns < self._closing_until_ns:
            return
        left = self.count
        for reject, count in sorted(self._kept.items(), key=lambda kept: kept[1], reverse=True):
            if left <= self._most // 4:
                break
            left -= count
            del self._kept[reject]
            self._closing_until_ns = now_ns + REJECTED_CLOSING_NS
            reject()

    def add(self, count: int) -> None:
        """So many have come. In the event loop."""
        self._count += count
        if self._of_all is not None:
            self._of_all.add(count)

    def closed(self, count: int) -> None:
        """So many are closed. From any thread."""
        self._closed.append(count)
        if self._of_all is not None:
            self._of_all.closed(count)

    @property
    def count(self) -> int:
        """Their number. In the event loop."""
        while self._closed:
            self._count -= self._closed.popleft()
        return self._count

    def has_room(self, *, is_suspect: bool) -> bool:
        """Whether a further message may be received, with any number of descriptors.

        Args:
            is_suspect: Whether the process has come just now, floods, or had a message rejected because of its descriptors.
        """
        if self.count > HELD_MAX:
            return False
        if self._of_all is None:
            return True
        count, most = self._of_all.count, self._of_all._most
        if count <= most // 4:
            return True
        return count <= most and self._is_next and not self._count and not is_suspect
