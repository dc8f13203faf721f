"""``Chain``: executions one after the other, submitted ahead, on a timeline of their own.

Owns: the works not run yet, who runs them. Refuses to own: the fences at its points (``timeline``), threads: a piece of work is a
plain call in the thread that made it possible.

The cheap form of ``fence.then(a).then(b)...``: an execution that waits is one reference in a queue, its fence an
integer, and only the requested points become objects (the invocation model of IREE).

Invariants:
1. Work k runs when the point k-1 is reached, and reaches the point k; never two concurrently, never out of order.
2. Once a piece of work, the fence it returned or the fence before the chain fails, all points ahead fail with that origin, and
   no later work runs.
3. One thread at a time runs works. The one that finds another running leaves its work to it, and that one looks again
   before it stops.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from fences.fence import SyncFence
from fences.state import Failure, FenceStateError, failure_of
from fences.timeline import Timeline


class Chain(Timeline):
    """Works in order, each when the one before it is done; ``fence(k)`` is signalled when the work at point k is.

    Args:
        after: The fence that the first work waits for; None starts immediately.
        name: Its name in errors; None for a name made from its address.
        clock: Where signal times come from; None for the clock of all fences.

    Raises:
        TypeError: ``after`` is something else.
    """

    __slots__ = ("_appended", "_open", "_runner", "_works")

    def __init__(
        self, after: SyncFence | None = None, name: str | None = None, clock: Callable[[], int] | None = None
    ) -> None:
        if after is not None and not isinstance(after, SyncFence):
            advice = "; its name is Chain(name=...)" if isinstance(after, str) else ""
            raise TypeError(f"after: expected a SyncFence or None, got {type(after).__name__}{advice}")
        super().__init__(name, 0, clock)
        self._works: deque[Callable[[], SyncFence | None]] = deque()
        self._appended = 0
        self._runner = threading.Lock()
        # Nothing is before the next call: no fence is waited for, nothing has failed.
        self._open = after is None
        if after is not None:
            after._follow_with(self._proceed)

    @property
    def appended(self) -> int:
        """The point of the work appended last, 0 before the first."""
        return self._appended

    def append(self, work: Callable[[], SyncFence | None]) -> int:
        """Submit a piece of work; returns its point. It is called immediately if nothing is before it.

        Appending is for one thread at a time, since the order of the works is that of the calls. To a chain that has
        failed a point is given too: its fence has failed.

        Args:
            work: Called at most once, as a plain call; must not block. It is done when it returns None, or when the
            fence that it returns is signalled. It fails if it raises, or if that fence fails.
        """
        self._appended = point = self._appended + 1
        self._works.append(work)
        if self._open:
            self._run_works()
        elif self._failure is not None:
            self._works.clear()
        return point

    def advance(self, point: int, at_ns: int | None = None) -> None:
        """Refused: a chain is advanced by its works alone."""
        raise FenceStateError(f"cannot advance {self.name} to {point}: it is advanced by its works")

    def fail(
        self, cause: BaseException | str, *, origin: str | None = None, at_ns: int | None = None
    ) -> None:
        """Fail all points ahead; the works that have not begun are dropped. Otherwise as :meth:`Timeline.fail`."""
        self._open = False
        super().fail(cause, origin=origin, at_ns=at_ns)
        self._works.clear()

    def _proceed(self, before: SyncFence) -> None:
        """The fence that the next call waited for has finished: the one before the chain, or one that a call returned."""
        outcome = before._outcome
        if isinstance(outcome, Failure):
            self._give_up(outcome)
        elif self._failure is None:
            self._open = True
            self._run_works()

    def _proceed_from_work(self, before: SyncFence) -> None:
        if not isinstance(before._outcome, Failure) and self._failure is None:
            self._reach(self._value + 1)
        self._proceed(before)

    def _give_up(self, failure: Failure) -> None:
        self._open = False
        self._works.clear()
        try:
            self._fail_with(failure)
        except FenceStateError:  # Failed before: the first failure stays.
            pass

    def _run_works(self) -> None:
        while self._open and self._works and self._runner.acquire(blocking=False):
            try:
                self._run_as_runner()
            finally:
                self._runner.release()

    def _run_as_runner(self) -> None:
        take = self._works.popleft
        heap = self._heap
        value = self._value
        # During an advance: the caller of a reached point gets the time of the call.
        self._advanced_at_ns = None
        try:
            while self._open:
                try:
                    work = take()
                except IndexError:
                    break
                result = work()
                if self._failure is not None:  # While the work ran: it is too late for its point.
                    break
                if result is not None:
                    if not isinstance(result, SyncFence):
                        raise TypeError(f"work of {self.name}: expected None or a SyncFence, got {result!r}")
                    self._open = False
                    result._follow_with(self._proceed_from_work)
                    value = self._value
                    continue
                # The value first, then the look at the heap; `fence` does it the other way round, so one sees the other.
                self._value = value = value + 1
                if heap and heap[0] <= value:
                    self._reach(value)
        except BaseException as error:
            self._give_up(failure_of(error, f"{self.name} at {self._value + 1}", None, self._clock()))
            if not isinstance(error, Exception):
                raise
        finally:
            self._advanced_at_ns = self._clock()
