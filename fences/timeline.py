"""``Timeline``: a 64-bit counter that only grows, with fences at its points.

Owns: the counter, the fences at points not reached yet, the failure of the whole line. Refuses to own: waiting, descriptors (the
fences at its points are ordinary ones), what the points mean.

After IREE's semaphores and the kernel's fence chains: holding a point is holding an integer, and only requested points that are
still ahead cost anything.

Invariants:
1. The value never falls, and a point once reached stays reached, also when the timeline fails later.
2. State is kept for pending points that have a fence, and for at most as many that were closed: a million points passed leave one
   integer.
3. A failure is final and reaches every fence at a point ahead of the value, those made later too.
4. No lock is held while waiters of the fences run.
"""

from __future__ import annotations

import heapq
import threading
from typing import TYPE_CHECKING, NoReturn

from fences.clock import checked_int, checked_time, now_ns
from fences.fence import SyncFence
from fences.running import finish_together
from fences.state import Failure, FenceError, FenceStateError, Outcome, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable

POINT_MAX = 2**64 - 1
"""The last point: the counter has 64 bits, as the kernel's and IREE's have."""


class Timeline:
    """A monotonic counter: fences at points ahead are signalled when the counter reaches them.

    Args:
        name: Its name in errors; None for a name made from its address.
        value: Where it starts, 0..2**64-1.
        clock: Where signal times come from if ``advance`` and ``fail`` are given none; None for the clock of all fences.
    """

    __slots__ = (
        "__weakref__",
        "_advanced_at_ns",
        "_clock",
        "_failure",
        "_heap",
        "_lock",
        "_name",
        "_pending",
        "_value",
    )

    def __init__(
        self, name: str | None = None, value: int = 0, clock: Callable[[], int] | None = None
    ) -> None:
        self._name = name
        self._value = _checked_point(value)
        self._clock = now_ns if clock is None else clock
        self._lock = threading.RLock()
        self._advanced_at_ns: int | None = self._clock()  # None while a chain is moving it.
        self._failure: Failure | None = None
        self._pending: dict[int, PointFence] = {}
        self._heap: list[int] = []  # The keys of `_pending`, and at most as many points that were forgotten.

    def __reduce__(self) -> NoReturn:
        """Refuses to be copied, or pickled as an argument of a process: no code would advance the copy."""
        raise TypeError(
            f"{type(self).__name__}: a timeline cannot be copied or pickled; fences.send_fence sends its fences to a process"
        )

    @property
    def name(self) -> str:
        """The name of this timeline in errors."""
        return self._name if self._name is not None else f"Timeline {id(self):#x}"

    @property
    def value(self) -> int:
        """The point reached last."""
        return self._value

    @property
    def error(self) -> FenceError | None:
        """The reason of its failure, as a new exception; None unless it has."""
        return None if self._failure is None else self._failure.error()

    @property
    def pending_count(self) -> int:
        """Number of points ahead that have a fence."""
        return len(self._pending)

    def __repr__(self) -> str:
        state = (
            "" if self._failure is None else f", failed at {self._failure.origin!r}: {self._failure.message}"
        )
        return f"<{self.name}: at {self._value}, {len(self._pending)} points pending{state}>"

    def fence(self, point: int) -> SyncFence:
        """The fence at a point: while that is ahead, the same one for all who ask.

        For a point that was reached it is a signalled one. Its time is that of the latest advance: the time of each point passed is
        not kept, and the point was reached no later than that. A query about the past is not an error, since it may race with an
        advance.

        Raises:
            ValueError: the point is not in 0..2**64-1.
        """
        _checked_point(point)
        with self._lock:
            if point <= self._value:
                return SyncFence.signalled(self._advanced_at_ns, self._name)
            if self._failure is not None:
                return SyncFence.finished(self._failure, self._name)
            fence = self._pending.get(point)
            if fence is None:
                fence = self._pending[point] = PointFence(self, point)
                heapq.heappush(self._heap, point)
        if point <= self._value:  # Reached just now by a chain, which takes no lock to move on.
            self._reach(point)
        return fence

    def advance(self, point: int, at_ns: int | None = None) -> None:
        """Move to a point ahead and signal the fences up to it, in the order of their points.

        Args:
            point: More than the value; points between may be skipped.
            at_ns: The time to record, in ns; None means now.

        Raises:
            FenceStateError: the point is not ahead of the value, or the timeline has failed; nothing is changed.
            ValueError: the point is not in 0..2**64-1.
        """
        _checked_point(point)
        time_ns = self._clock() if at_ns is None else checked_time(at_ns)
        with self._lock:
            if self._failure is not None:
                raise FenceStateError(
                    f"cannot advance {self.name} to {point}: it has failed: {self._failure.message}"
                )
            if point <= self._value:
                raise FenceStateError(
                    f"cannot advance {self.name} to {point}: expected more than its value, {self._value}"
                )
            self._value = point
            self._advanced_at_ns = time_ns
        self._reach(point, time_ns)

    def fail(
        self, cause: BaseException | str, *, origin: str | None = None, at_ns: int | None = None
    ) -> None:
        """Fail all points ahead of the value, permanently. Arguments as those of :meth:`SyncFence.fail`; the origin is this
        timeline.

        Raises:
            FenceStateError: it has failed already; nothing is changed.
        """
        self._fail_with(
            failure_of(cause, self.name, origin, self._clock() if at_ns is None else checked_time(at_ns))
        )

    def _reach(self, point: int, at_ns: int | None = None) -> None:
        """Move to a point, unless further already, and signal the fences up to it."""
        reached: list[SyncFence] = []
        with self._lock:
            self._value = max(self._value, point)
            while self._heap and self._heap[0] <= point:
                fence = self._pending.pop(heapq.heappop(self._heap), None)
                if fence is not None:
                    reached.append(fence)
            self._drop_forgotten()
        if reached:
            finish_together(reached, self._clock() if at_ns is None else at_ns)

    def _fail_with(self, failure: Failure) -> None:
        with self._lock:
            if self._failure is not None:
                raise FenceStateError(f"cannot fail {self.name} twice: {self._failure.message}")
            self._failure = failure
            ahead: list[SyncFence] = [self._pending[point] for point in sorted(self._pending)]
            self._pending.clear()
            self._heap.clear()
        if ahead:
            finish_together(ahead, failure)

    def _forget(self, fence: PointFence) -> None:
        with self._lock:
            if self._pending.get(fence.point) is fence:
                del self._pending[fence.point]
                self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        """Drop the points that were forgotten, once they are half of the heap: not each by itself, which would search it."""
        if len(self._heap) > 2 * len(self._pending):
            self._heap = sorted(self._pending)


class PointFence(SyncFence):
    """The fence at a point of a timeline; made by :meth:`Timeline.fence`, finished by its timeline alone.

    Attributes:
        timeline: Whose point it is.
        point: The value at which it is signalled.
    """

    __slots__ = ("point", "timeline")

    _finisher = "it is finished by its timeline"

    def __init__(self, timeline: Timeline, point: int) -> None:
        super().__init__()
        self.timeline = timeline
        self.point = point

    @property
    def name(self) -> str:
        return f"{self.timeline.name} at {self.point}"

    def _finish(self, outcome: Outcome) -> bool:
        if not super()._finish(outcome):
            return False
        self.timeline._forget(self)  # Only `close` leaves it there to be forgotten.
        return True


def _checked_point(point: int) -> int:
    if not 0 <= checked_int(point, "point") <= POINT_MAX:
        raise ValueError(f"point: expected 0..{POINT_MAX}, got {point}")
    return point
