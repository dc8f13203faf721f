"""The errors of a queue, by the step that the caller should take.

Owns the exception types of the package. They are independent of the way a fault was found: each raise site gives the place, the
expected and the actual value.

Expected conditions are not exceptions: a queue that is full or empty answers False or None.
"""

from __future__ import annotations

__all__ = [
    "ClosedQueue",
    "CorruptQueue",
    "Error",
    "InterruptedQueue",
    "InvalidArgument",
    "InvalidDescriptor",
    "Overflow",
]


class Error(Exception):
    """Any failure reported by this package."""


class InvalidArgument(Error, ValueError):
    """The call can never succeed as it was made: fix the call."""


class InvalidDescriptor(InvalidArgument):
    """A descriptor, or the memory that came with it, does not describe a queue: refuse the peer that sent it."""


class ClosedQueue(Error):
    """The endpoint was closed, or belongs to the process this one was forked from: attach a new one."""


class InterruptedQueue(Error):
    """`interrupt()` was called: the endpoint no longer waits, but its non-blocking calls still work."""


class CorruptQueue(Error):
    """The shared counters or a message header hold what no correct peer writes: drop the queue and the peer.

    The endpoint stays unusable. Nothing outside of the ring has been read or written.
    """


class Overflow(Error):
    """An unsynchronized reader was overtaken by the writer and has lost data; the next read starts at newer data.

    Attributes:
        lost_count: Elements skipped by this overflow, according to the counters.
    """

    def __init__(self, message: str, lost_count: int = 0) -> None:
        super().__init__(message)
        self.lost_count = lost_count
