"""What the connections of one peer process share: a turn of the event loop.

Owns who of them is next. A peer with many connections would have as many turns where another has one: the time that a message takes
would be multiplied by their number before another peer's message is looked at.

Invariant: while a process has more than one connection, one message of them all, or one part of a large one, is taken in each turn
of the loop, and its connections take turns in the order in which they came.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import anyio
import anyio.lowlevel

__all__ = ["Peer", "Peers"]


class Peer:
    """A process at the other end of connections.

    Attributes:
        connections: How many there are.
    """

    __slots__ = ("__weakref__", "_turn", "connections")

    def __init__(self) -> None:
        self.connections = 0
        self._turn = anyio.Lock(fast_acquire=True)

    @property
    def shares_turns(self) -> bool:
        """Whether there are several connections."""
        return self.connections > 1

    async def next_turn(self) -> None:
        """Lets other tasks of the loop go first, and other connections of this process before them."""
        async with self._turn:
            await anyio.lowlevel.checkpoint()


class Peers:
    """The processes at the other ends of a socket's connections."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[Hashable, Peer] = weakref.WeakValueDictionary()

    def of(self, process: Hashable) -> Peer:
        """A process, by its number; forgotten with its last connection."""
        peer = self._known.get(process)
        if peer is None:
            peer = self._known[process] = Peer()
        return peer
