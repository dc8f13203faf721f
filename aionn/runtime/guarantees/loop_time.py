"""The processor time of the event loop's thread, for the streams of one loop: one ledger for each, and the clock of its thread.

Owns the step from the running loop to its ledger, and the measurement of an execution's two parts on the thread. The clock is that
of the thread's processor time: it stops while the machine does not run the thread, so that no stall is in it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator
from statistics import median_low
from typing import Any, Generic, TypeVar

import anyio.lowlevel

from aionn.runtime.guarantees.stalls import is_virtual
from aionn.scheduler.reservations.event_loop import NO_LOOP_COST, LoopCost, LoopLedger

__all__ = ["BodyTime", "LoopParts", "loop_ledger", "loop_ran_ns"]

_T = TypeVar("_T")

_of_loop: anyio.lowlevel.RunVar[LoopLedger] = anyio.lowlevel.RunVar("aionn-loop-ledger")


def loop_ledger() -> LoopLedger | None:
    """The ledger of the running event loop, for all runtimes on it; None under a virtual clock, where no code takes time."""
    if is_virtual():
        return None
    try:
        return _of_loop.get()
    except LookupError:
        found = LoopLedger()
        _of_loop.set(found)
        return found


def loop_ran_ns() -> int:
    """The processor time of the calling thread, which runs the event loop."""
    return time.thread_time_ns()


class LoopParts:
    """The time of the loop's thread for executions, one after the other.

    Args:
        ran: Reads the processor time of the thread.
    """

    def __init__(self, ran: Callable[[], int] = loop_ran_ns) -> None:
        self._ran = ran
        self._befores: list[int] = []
        self._totals: list[int] = []

    async def measured(self, work: Awaitable[_T]) -> _T:
        """Awaits an execution, and takes its parts: until its first wait, and after that."""
        first = _FirstStep(work, self._ran)
        began_ns = self._ran()
        result = await first
        self._befores.append(first.took_ns)
        self._totals.append(self._ran() - began_ns)
        return result

    def cost(self, skipped: int) -> LoopCost:
        """The parts of a usual execution but for the first ones.

        Other work of the loop may come between an execution and its end, and is in its time then. So the lower quartile counts: a
        loop that is half full leaves one execution in four alone.

        Args:
            skipped: Executions that do not count.
        """
        totals = sorted(self._totals[skipped:])
        if not totals:
            return NO_LOOP_COST
        before_ns = median_low(self._befores[skipped:])
        return LoopCost(before_ns, max(0, totals[len(totals) // 4] - before_ns))


class _FirstStep(Generic[_T]):
    """An awaitable that measures the processor time until its first wait."""

    def __init__(self, work: Awaitable[_T], ran: Callable[[], int]) -> None:
        self._work = work
        self._ran = ran
        self.took_ns = 0

    def __await__(self) -> Generator[Any, Any, _T]:
        began_ns = self._ran()
        inner = self._work.__await__()
        try:
            waited_for = next(inner)
        except StopIteration as e:
            result: _T = e.value
            return result
        finally:
            self.took_ns = self._ran() - began_ns
        # The first wait is this generator's own: what it gets there is passed on.
        try:
            sent = yield waited_for
        except BaseException as e:
            try:
                waited_for = inner.throw(e)
            except StopIteration as stop:
                result = stop.value
                return result
            result = yield from _going_on(inner, waited_for)
            return result
        assert sent is None, "asyncio sends nothing"
        result = yield from inner
        return result


def _going_on(inner: Any, waited_for: Any) -> Generator[Any, Any, Any]:
    yield waited_for
    return (yield from inner)


class BodyTime:
    """The processor time of the body of ``async for``, where it does not wait: then it is one callback of the loop.

    Args:
        ledger: Gets the times; None where they do not count.
        call_soon: Calls a function in the loop's next turn.
    """

    def __init__(
        self, ledger: LoopLedger | None, call_soon: Callable[[Callable[[], object]], object]
    ) -> None:
        self._ledger = ledger
        self._call_soon = call_soon
        self._since_ns: int | None = None

    def begin(self) -> None:
        """The consumer gets a result."""
        if self._ledger is None:
            return
        self._since_ns = loop_ran_ns()
        self._call_soon(self._waited)

    def _waited(self) -> None:
        self._since_ns = None

    def end(self) -> None:
        """The consumer asks for the next one."""
        since_ns, self._since_ns = self._since_ns, None
        if since_ns is not None and self._ledger is not None:
            self._ledger.blocked(loop_ran_ns() - since_ns)
