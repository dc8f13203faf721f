"""The event loop's shell around a waiting room: wait for a slot of a device, hold it, give it back.

Invariants:
1. No more than ``slot_count`` slots are held at once.
2. A waiter whose deadline passes is told at that time, not when its turn comes.
3. A cancelled waiter leaves the room; a cancelled holder gives its slot back only by ``release``.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from aionn.errors import MissedDeadline
from aionn.hal import Priority
from aionn.scheduler.queue import Entry, WaitingRoom, WaitingRoomStatistics

__all__ = ["Dispatcher"]


class Dispatcher:
    """The slots of one device, for the tasks of one event loop.

    Args:
        slot_count: How many executions the device can run at once.
        now: The clock of the deadlines, the same as the loop's.
    """

    def __init__(self, slot_count: int, *, now: Callable[[], int]) -> None:
        self._free = slot_count
        self._now = now
        self._room: WaitingRoom[anyio.Event] = WaitingRoom()

    async def acquire(self, *, priority: Priority, deadline_ns: int | None) -> None:
        """Waits for a slot. The caller must give it back with ``release``.

        Raises:
            MissedDeadline: The deadline had passed at the call (persistent) or passed while waiting (transient).
            ResourceExhausted: Too many wait already.
        """
        now_ns = self._now()
        if deadline_ns is not None and deadline_ns <= now_ns:
            raise MissedDeadline(
                "scheduler: the deadline had passed before the execution was asked for", transient=False
            )
        if self._free > 0 and not len(self._room):
            self._free -= 1
            return
        turn = anyio.Event()
        entry = self._room.enter(turn, priority=priority, deadline_ns=deadline_ns)
        try:
            if deadline_ns is None:
                await turn.wait()
            else:
                with anyio.move_on_after(max(0.0, (deadline_ns - now_ns) / 1e9)):
                    await turn.wait()
        except BaseException:
            self._leave(entry, turn)
            raise
        if not turn.is_set():
            self._room.expire(self._now())
            self._room.remove(entry)
            raise MissedDeadline(
                "scheduler: the deadline passed while waiting for the device", transient=True
            )

    def _leave(self, entry: Entry[anyio.Event], turn: anyio.Event) -> None:
        # The turn may have come in the same loop turn as the cancellation: then the slot is this caller's to give back.
        if turn.is_set() and not self._room.remove(entry):
            self.release()
        else:
            self._room.remove(entry)

    def release(self) -> None:
        """Gives a slot back; the next in the order gets it."""
        self._free += 1
        now_ns = self._now()
        self._room.expire(now_ns)
        while self._free > 0:
            entry = self._room.take(now_ns)
            if entry is None:
                break
            self._free -= 1
            entry.item.set()

    def statistics(self) -> WaitingRoomStatistics:
        """Counts of the waiting room."""
        return self._room.statistics()
