"""The present load of one end of a connection for its peer, and its limits.

Owns the limits; pure. ``channel`` stops to read where one is reached.
"""

from __future__ import annotations

__all__ = ["Load"]

CALLS_AT_ONCE_MAX = 4096
"""Concurrent calls of one peer that are in progress, or whose answers it has not read: more than any client of aionn has, and a
bound for all peers. An end stops reading there: with a low bound two busy ends could wait for each other.
"""

BYTES_AT_ONCE_MAX = 32 << 20
"""Size of large calls that are handled concurrently: one of any size, or several smaller ones. Of models of 4,000 operations these
are 30, which wait for each other: they are read and decoded faster than they are checked."""

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
