"""The turns of one process's packets that have to be decoded or have failed, whatever the number of its bursts.

Owns the order of the burst threads that wait, and the time before which the next one does not continue. The thread of a burst that
answers a remembered packet never comes here.

Invariants:
1. At most one thread of a process has the turn, and they have it in the order in which they asked.
2. The pause after a turn holds for the next turn of every thread, so that the share of the interpreter that a process's packets get
   does not grow with its number of bursts.
3. A thread whose burst ends, or begins to drain, is not kept waiting after ``wake``.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

__all__ = ["FAILED_NS", "PacketTurn", "PacketTurns"]

FAILED_NS = 150_000
"""Time of the interpreter for the answer to a packet that failed, beside its decoding and its execution: the error, its traceback
and the packet with both."""


class PacketTurn:
    """The one turn of a process, and the threads that wait for it."""

    __slots__ = ("_free_ns", "_is_taken", "_lock", "_waiting")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: collections.deque[threading.Condition] = collections.deque()
        self._is_taken = False
        self._free_ns = 0

    def take(self, is_ending: Callable[[], bool]) -> bool:
        """Waits for the turn and takes it. False without it where ``is_ending`` is true, before or after ``wake``."""
        own = threading.Condition(self._lock)
        with self._lock:
            self._waiting.append(own)
            try:
                while not is_ending():
                    if self._is_taken or self._waiting[0] is not own:
                        own.wait()
                    elif (left_ns := self._free_ns - time.monotonic_ns()) > 0:
                        own.wait(left_ns / 1e9)
                    else:
                        self._is_taken = True
                        return True
                return False
            finally:
                self._waiting.remove(own)
                self._wake_next()

    def give_back(self, pause_ns: int) -> None:
        """Ends the turn; the next one begins after the pause."""
        with self._lock:
            self._is_taken = False
            self._free_ns = time.monotonic_ns() + pause_ns
            self._wake_next()

    def wake(self) -> None:
        """Has every waiting thread look whether its burst is ending; from any thread."""
        with self._lock:
            for waiting in self._waiting:
                waiting.notify()

    def _wake_next(self) -> None:
        if self._waiting and not self._is_taken:
            self._waiting[0].notify()


class PacketTurns:
    """The turns of a process, for its bursts.

    Args:
        turn: The process's.
        pause_after: The length of the pause after a turn that used the interpreter for so long until now, both in nanoseconds.
            Called by the thread that has the turn.
        executed: Called after an execution whose packet had to be decoded has succeeded.
    """

    __slots__ = ("_pause_after", "_turn", "executed", "take", "wake")

    def __init__(
        self, turn: PacketTurn, pause_after: Callable[[int, int], int], executed: Callable[[], None]
    ) -> None:
        self._turn = turn
        self._pause_after = pause_after
        self.take = turn.take
        self.wake = turn.wake
        self.executed = executed

    def give_back(self, used_ns: int) -> None:
        """Ends the turn, which used the interpreter for so long."""
        self._turn.give_back(self._pause_after(used_ns, time.monotonic_ns()))

    def failed(self, is_ending: Callable[[], bool]) -> None:
        """Waits for a turn of its own after the answer to a packet that failed."""
        if self.take(is_ending):
            self.give_back(FAILED_NS)
