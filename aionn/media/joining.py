"""Two sources as one: pairs of items that belong together by their time.

Owns which items make a pair, and when an item without a partner is abandoned. Refuses to own the sources: the
caller opens and closes them, and their own rules decide what a slow consumer misses.

Invariants:
1. Pairs come in the order of the first source, each of its items at most once; an item of the second may be in several pairs.
2. The partner is the newest item of the second source that has arrived and whose time differs by at most the tolerance.
3. ``TimeJoin`` is pure: stamps and the time are its arguments. It keeps at most ``WAITING_MAX`` and ``KEPT_MAX`` items.

Source: ``ApproximateTimeSynchronizer`` of ROS, ``PacketSynchronizer`` of MediaPipe.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import anyio
import msgspec

from aionn.errors import InvalidArgument, class_text, general_failure_of
from aionn.media.arguments import checked_function
from aionn.media.live.worker import outlast
from aionn.media.pacing import OneConsumer
from aionn.platform.loops import is_cancelled
from aionn.platform.numbers import checked_seconds
from aionn.platform.process_bound import InThisProcess

__all__ = ["JoinStatistics", "Joined", "Pair", "TimeJoin", "joined"]

A = TypeVar("A")
B = TypeVar("B")

WAITING_MAX: Final = 4
"""Items of the first source that wait for a partner; the source is not read further then, and drops by its own rules."""

KEPT_MAX: Final = 256
"""Items of the second source that are kept as partners: within a tolerance, so seconds of a microphone's windows."""

TOLERANCE_S_MAX: Final = 60.0
"""Largest tolerance: items that are a minute apart do not belong together."""

CLOSE_S_MAX: Final = 3.0
"""Cancelling a source takes microseconds; the same limit as for leaving a tee."""


class Pair(msgspec.Struct, Generic[A, B], frozen=True):
    """Two items that belong together.

    Attributes:
        first: The item of the first source.
        second: The newest item of the second source within the tolerance.
        captured_at_ns: The time of the first.
        skew_ns: The time of the second minus that of the first.
    """

    first: A
    second: B
    captured_at_ns: int
    skew_ns: int


class JoinStatistics(msgspec.Struct, frozen=True):
    """Counts so far.

    Attributes:
        paired: Pairs that were returned.
        unmatched: Items of the first source without a partner in time.
    """

    paired: int
    unmatched: int


class TimeJoin(Generic[A, B]):
    """The rule, without time of its own.

    Args:
        tolerance_ns: The largest difference of the times of a pair.
        wait_ns: Time for which an item of the first source waits for a partner after it has arrived.
    """

    def __init__(self, tolerance_ns: int, wait_ns: int) -> None:
        self._tolerance_ns = tolerance_ns
        self._wait_ns = wait_ns
        self._waiting: deque[tuple[int, int, A]] = deque()  # Stamp, end of the wait, item.
        self._kept: deque[tuple[int, B]] = deque(maxlen=KEPT_MAX)
        self._last_ns: int | None = None
        self._has_second_ended = False
        self.paired = 0
        self.unmatched = 0

    @property
    def wants_first(self) -> bool:
        """Whether there is room for an item of the first source."""
        return len(self._waiting) < WAITING_MAX

    @property
    def wants_second(self) -> bool:
        """Whether an item of the second source could be a partner of one that has arrived: it is not read ahead of the first."""
        if not self._kept:
            return True
        return self._last_ns is not None and self._kept[-1][0] <= self._last_ns + self._tolerance_ns

    @property
    def is_waiting(self) -> bool:
        """Whether an item of the first source waits."""
        return bool(self._waiting)

    @property
    def expires_ns(self) -> int | None:
        """When the item that waits longest is abandoned; None where none waits."""
        return self._waiting[0][1] if self._waiting else None

    def add_first(self, item: A, stamp_ns: int, now_ns: int) -> None:
        """An item of the first source has arrived, while ``wants_first``."""
        self._waiting.append((stamp_ns, now_ns + self._wait_ns, item))
        self._last_ns = stamp_ns
        oldest_ns = self._waiting[0][0] - self._tolerance_ns
        while len(self._kept) > 1 and self._kept[0][0] < oldest_ns:
            self._kept.popleft()

    def add_second(self, item: B, stamp_ns: int) -> None:
        """An item of the second source has arrived."""
        self._kept.append((stamp_ns, item))

    def end_second(self) -> None:
        """The second source has ended: no item waits any more."""
        self._has_second_ended = True

    def take(self, now_ns: int) -> Pair[A, B] | None:
        """Returns the next pair; None while no item has a partner. Drops items without a partner in time."""
        while self._waiting:
            stamp_ns, expires_ns, item = self._waiting[0]
            partner = max(
                (kept for kept in self._kept if abs(kept[0] - stamp_ns) <= self._tolerance_ns),
                key=lambda kept: kept[0],
                default=None,
            )
            if partner is not None:
                self._waiting.popleft()
                self.paired += 1
                return Pair(item, partner[1], stamp_ns, partner[0] - stamp_ns)
            is_passed = bool(self._kept) and self._kept[-1][0] > stamp_ns + self._tolerance_ns
            if not (is_passed or self._has_second_ended or now_ns >= expires_ns):
                return None
            self._waiting.popleft()
            self.unmatched += 1
        return None


def _failure_of(cancelled: BaseException, source: str) -> Exception:
    """The failure of a source that lets a cancellation of its own out; raises the cancellation of this task."""
    if is_cancelled():
        raise cancelled
    return general_failure_of(cancelled, f"joined: the {source} source")


def _captured_at_ns(item: Any) -> int:
    stamp_ns: int = item.captured_at_ns
    return stamp_ns


def joined(
    first: AsyncIterable[A],
    second: AsyncIterable[B],
    *,
    tolerance_s: float,
    wait_s: float | None = None,
    stamp: Callable[[Any], int] = _captured_at_ns,
    now: Callable[[], int] = time.monotonic_ns,
) -> Joined[A, B]:
    """Joins two sources by time: each item of the first with the newest item of the second within a tolerance.

    Use it with ``async with``, inside of those of the sources, and give it to ``Burst.stream`` as the source.

    Args:
        first: Sets the pace.
        second: Gives the partners.
        tolerance_s: The largest difference of the times of a pair, in seconds.
        wait_s: Seconds for which an item of the first waits for a partner; then it is dropped and counted. None takes the
            tolerance.
        stamp: From an item of either source to its time in ns, on one clock; the times of a source never go back.
        now: The time in ns. It must agree with the event loop's clock.

    Raises:
        InvalidArgument: The tolerance or the wait is out of range, or a source is not an async iterable.
    """
    tolerance_s = checked_seconds(tolerance_s, "joined: tolerance_s", most=TOLERANCE_S_MAX)
    if wait_s is not None:
        wait_s = checked_seconds(wait_s, "joined: wait_s", most=TOLERANCE_S_MAX)
    for name, function in (("stamp", stamp), ("now", now)):
        checked_function(function, f"joined: {name}")
    for name, source in (("first", first), ("second", second)):
        if not isinstance(source, AsyncIterable):
            raise InvalidArgument(f"joined: {name}: expected an async iterable, got {class_text(source)}")
    tolerance_ns = round(tolerance_s * 1e9)
    wait_ns = tolerance_ns if wait_s is None else round(wait_s * 1e9)
    return Joined(first, second, TimeJoin(tolerance_ns, wait_ns), stamp, now)


class Joined(InThisProcess, AsyncIterator[Pair[A, B]]):
    """Pairs of two sources; made by ``joined``. Leaving it ends its tasks, and neither source: the reads that are in progress are
    cancelled, and one that does not return within ``CLOSE_S_MAX`` is left to itself.
    """

    INSTEAD = "open one in the other process; its items can be copied and pickled"

    def __init__(
        self,
        first: AsyncIterable[A],
        second: AsyncIterable[B],
        join: TimeJoin[A, B],
        stamp: Callable[[Any], int],
        now: Callable[[], int],
    ) -> None:
        self._first = first
        self._second = second
        self._join = join
        self._stamp = stamp
        self._now = now
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = anyio.Event()
        self._consumer = OneConsumer()
        self._has_first_ended = False
        self._error: Exception | None = None
        self._was_entered = False

    def __repr__(self) -> str:
        return f"<Joined {'entered' if self._was_entered else 'new'}, paired {self._join.paired}, unmatched {self._join.unmatched}>"

    def statistics(self) -> JoinStatistics:
        """Counts so far."""
        return JoinStatistics(self._join.paired, self._join.unmatched)

    async def __aenter__(self) -> Self:
        if self._was_entered:
            raise InvalidArgument("joined: can be entered once")
        self._was_entered = True
        # A task group of anyio must be left by the task that entered it, and puts the errors of its block into groups.
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(read, name="aionn-joined") for read in (self._read_first(), self._read_second())
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        try:
            await outlast(asyncio.gather(*tasks, return_exceptions=True), CLOSE_S_MAX)
        finally:
            # A consumer in another task does not wait for more.
            self._has_first_ended = True
            self._join.end_second()
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _until(self, is_wanted: Callable[[], bool]) -> None:
        while not is_wanted():
            await self._changed.wait()

    async def _read_first(self) -> None:
        try:
            async for item in self._first:
                self._join.add_first(item, self._stamp(item), self._now())
                self._notify()
                await self._until(lambda: self._join.wants_first)
        except Exception as e:
            self._error = self._error or e
        except anyio.get_cancelled_exc_class() as e:
            self._error = self._error or _failure_of(e, "first")
        self._has_first_ended = True
        self._notify()

    async def _read_second(self) -> None:
        try:
            async for item in self._second:
                self._join.add_second(item, self._stamp(item))
                self._notify()
                await self._until(lambda: self._join.wants_second)
        except Exception as e:
            self._error = self._error or e
        except anyio.get_cancelled_exc_class() as e:
            self._error = self._error or _failure_of(e, "second")
        self._join.end_second()
        self._notify()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Pair[A, B]:
        if not self._tasks:
            raise InvalidArgument("joined: it is not open; use it with async with")
        self._consumer.check("joined")
        while True:
            pair = self._join.take(self._now())
            self._notify()  # There may be room for the readers.
            if pair is not None:
                return pair
            if self._error is not None:
                raise self._error
            if self._has_first_ended and not self._join.is_waiting:
                raise StopAsyncIteration
            expires_ns = self._join.expires_ns
            wait_s = None if expires_ns is None else max(0, expires_ns - self._now()) / 1e9
            with self._consumer, anyio.move_on_after(wait_s):
                await self._changed.wait()
