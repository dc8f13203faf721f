"""The time for which a slot was kept from reserved frames beyond what admission counted with.

Owns that time for each slot of a device, from the moment at which an execution exceeds what was counted with it until no reserved
frame waits: all frames in between are late by it. It decides nothing; a frame that is lost has the number, see ``Frame.lost``.
Pure.

Invariants:
1. Only measured time counts: that of a frame beyond its budget, and that of a best-effort execution, also of a frame that was
   never reserved, beyond the longest that admission allows.
2. While no frame with a reservation arrives, starts or ends, nothing is called.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from aionn.scheduler.bandwidth import Frame
from aionn.scheduler.job import DeviceSlot, Job

__all__ = ["Blocking"]


class Blocking:
    """The time by slot.

    Args:
        slots: Those of one device.

    Attributes:
        owners: By slot, the owner of the execution that exceeded last.
    """

    def __init__(self, slots: Sequence[DeviceSlot]) -> None:
        self._slots = slots
        self._excess_ns = [0] * len(slots)
        self.owners: list[Hashable] = [None] * len(slots)
        # By slot, the number of the best-effort job that frames wait for, or waited for last; the end that admission allows it; and
        # its owner.
        self._holder: list[tuple[int, int, Hashable] | None] = [None] * len(slots)
        self._is_counted = [True] * len(slots)

    def waits(self, frame: Frame, room_ns: int) -> None:
        """A reserved frame begins to wait, perhaps for a best-effort execution.

        Args:
            frame: The frame.
            room_ns: The longest best-effort execution that admission allows.
        """
        frame.has_waited = True
        slot = self._slots[frame.server.slot]
        running, before = slot.job, self._holder[slot.index]
        if running is None:
            # The slot is free: nothing keeps it from this frame any more.
            self._forget(slot)
        elif _is_best_effort(running) and (before is None or before[0] != running.number):
            # It began while no frame waited, and its start follows from the end that was expected then.
            began_ns = slot.ends_ns - running.durations_ns[slot.device]
            self._holder[slot.index] = running.number, began_ns + room_ns, running.owner
            self._is_counted[slot.index] = False
            self._excess_ns[slot.index] = 0

    def _forget(self, slot: DeviceSlot) -> None:
        self._excess_ns[slot.index] = 0
        self._holder[slot.index] = None
        self._is_counted[slot.index] = True

    def _until_ns(self, slot: DeviceSlot, now_ns: int) -> int:
        """The end that is allowed to the job that has the slot; now without one."""
        running, held = slot.job, self._holder[slot.index]
        until_ns = None
        if running is not None and running.frame is not None and running.frame.has_budget:
            until_ns = running.frame.exhausted_ns()
        elif running is not None and held is not None and held[0] == running.number:
            until_ns = held[1]
        elif running is None and held is not None and not self._is_counted[slot.index]:
            until_ns = min(held[1], now_ns)  # It has just left the slot.
        return now_ns if until_ns is None else until_ns

    def starts(self, frame: Frame, slot: DeviceSlot, now_ns: int) -> None:
        """A frame gets its slot."""
        held = self._holder[slot.index]
        if not frame.has_waited:
            self._excess_ns[slot.index] = 0
        elif held is not None and not self._is_counted[slot.index]:
            self._exceeded(slot, now_ns - held[1], held[2])
        self._is_counted[slot.index] = True
        self._holder[slot.index] = None
        frame.blocked_ns = self._excess_ns[slot.index]

    def rejects(
        self, frame: Frame, shortest_ns: int, deadline_ns: int, now_ns: int, *, ahead_ns: int
    ) -> None:
        """A reserved frame is rejected while it waits.

        Args:
            frame: The frame.
            shortest_ns: The least time that it takes.
            deadline_ns: Its own deadline.
            now_ns: The time.
            ahead_ns: The budgets of the frames that wait before it.
        """
        slot = self._slots[frame.server.slot]
        until_ns = self._until_ns(slot, now_ns)
        held = self._holder[slot.index]
        if now_ns > until_ns:
            self.owners[slot.index] = (
                held[2] if slot.job is None and held is not None else _owner_of(slot.job)
            )
        frame.blocked_ns = self._excess_ns[slot.index] + max(0, now_ns - until_ns)
        starts_ns = max(now_ns, until_ns) + ahead_ns
        frame.missing_ns = starts_ns + min(shortest_ns, frame.left_ns) - deadline_ns

    def ended(self, frame: Frame, slot: DeviceSlot, owner: Hashable = None) -> None:
        """A frame, of this owner, leaves its slot for good: those that wait are late by what it took beyond its budget, too."""
        if frame.has_budget:
            self._exceeded(slot, -frame.left_ns, owner)

    def _exceeded(self, slot: DeviceSlot, excess_ns: int, owner: Hashable) -> None:
        if excess_ns > 0:
            self._excess_ns[slot.index] += excess_ns
            self.owners[slot.index] = owner


def _owner_of(job: Job | None) -> Hashable:
    return None if job is None else job.owner


def _is_best_effort(job: Job) -> bool:
    return job.frame is None or not job.frame.has_budget
