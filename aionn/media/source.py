"""The source: an async iterator that presents what a generator makes, at the pace of the medium.

Owns two tasks and the order of their end: one runs the generator ahead of time (in a worker thread if it blocks), one presents each
item when it is due. Refuses to own how items are made (a plain generator does that: `video.py`, `audio.py`, `synthetic.py`, or
yours) and what is due or dropped (`pacing.py`).

Invariants:
1. The generator runs in one thread at a time, and never on the event loop's unless it was declared not to block.
2. At most `AHEAD_MAX` made items wait to come due, and at most the queue's capacity wait for the consumer.
3. When ``async with`` has ended, by whatever way, the generator has been closed, both tasks have ended, and no thread runs for us.
4. An error in the generator reaches the consumer after everything presented before it.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Generic, Literal, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from aionn.errors import GeneralFailure, InvalidArgument, ResourceExhausted, shortages_raised, shown
from aionn.media.arguments import checked_flag, checked_function, checked_text
from aionn.media.pacing import (
    Keep,
    OneConsumer,
    PresentationQueue,
    captured_at_ns,
    checked_keep,
    checked_queue_max,
)
from aionn.media.records import AudioWindow, Frame, SourceStatistics
from aionn.platform.process_bound import InThisProcess

__all__ = ["Source"]

# Enough to ride out a slow key frame at 30 frames/s, and 25 MB of 1080p.
AHEAD_MAX = 4
# A shorter sleep would not advance a floating-point clock that has run for weeks.
SLEEP_NS_MIN = 1_000

T = TypeVar("T", Frame, AudioWindow)
Made = tuple[int, T, int]  # when due, counted from the start; the item; when it was ready


class Source(InThisProcess, Generic[T]):
    """Presents items of a medium at its natural pace: ``async with source as items: async for item in items``.

    The clock starts with the first item, when ``async with`` is entered. A source is entered once, and read by one consumer at a
    time.
    """

    INSTEAD = "open one in the other process; its items can be copied and pickled"

    def __init__(
        self,
        items: Generator[tuple[int, T], None, None],
        *,
        name: str,
        pace: bool = True,
        keep: Keep = "latest",
        queue_max: int = 4,
        now: Callable[[], int] = time.monotonic_ns,
        blocking: bool = True,
    ) -> None:
        """Makes a source; opens nothing yet.

        Args:
            items: Makes the items; yields ``(offset_ns, item)``, when the item is due after the start of the medium, in order.
                Its first step opens what it needs, and its ``finally`` or ``with`` closes it. ``captured_at_ns`` of the items is
                filled in here.
            name: Shown in messages and in the `repr`.
            pace: False presents items as fast as they are made and taken; nothing is dropped then, whatever ``keep`` is.
            keep: Items for a slow consumer: ``"latest"`` the newest item, older ones are dropped; ``"oldest"`` what was queued
                first, newer ones are dropped while ``queue_max`` wait; ``"all"`` everything: the source is held back while
                ``queue_max`` wait.
            queue_max: See ``keep``.
            now: The time in ns. It must agree with the event loop's clock, by which this source sleeps.
            blocking: False runs the generator on the event loop's thread; only for generators of which a step takes well below a
                millisecond.

        Raises:
            InvalidArgument: An argument has another type, or is out of range.
        """
        checked_text(name, "aionn.media.Source: name")
        if not isinstance(items, Generator):
            raise InvalidArgument(f"{name}: items: expected a generator, got {shown(items)}")
        self._pace = pace = checked_flag(pace, f"{name}: pace")
        self._now = checked_function(now, f"{name}: now")
        self._blocking = checked_flag(blocking, f"{name}: blocking")
        self._name = name
        self._items: Generator[tuple[int, T], None, None] = items
        policy, capacity = checked_keep(keep, name), checked_queue_max(queue_max, "queue_max", name)
        self._queue: PresentationQueue[T] = PresentationQueue(policy if pace else "all", capacity)
        self._turn = threading.Lock()
        self._consumer = OneConsumer()
        self._failure: Exception | None = None
        self._ended = False
        self._state: Literal["new", "open", "closed"] = "new"

    async def __aenter__(self) -> Source[T]:
        """Opens the medium and starts to present it.

        Raises:
            InvalidArgument: The medium cannot be read, or the source has been entered before.
            DeviceUnavailable: A library that is needed to read it is not installed.
            ResourceExhausted: No thread, memory or descriptor is left for it (transient).
        """
        if self._state != "new":
            raise InvalidArgument(
                f"{self._name}: expected a source that was not used before, this one is {self._state}; make another"
            )
        self._state = "open"
        self._changed = anyio.Event()
        self._limiter = anyio.CapacityLimiter(1)
        try:
            first = await self._make()
        except BaseException:
            self._state = "closed"
            await self._close_items()
            raise
        begun = anyio.Event()
        # A task group of this task would have to be left by it; an async generator around a source may be closed by another one.
        self._task = asyncio.get_running_loop().create_task(
            self._run(first, begun), name=f"aionn-{self._name}"
        )
        try:
            # A task that has not begun when its loop is stopped leaves a coroutine that was never awaited.
            await begun.wait()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends both tasks and closes the medium; items that were presented and not taken are dropped."""
        if self._state != "open":
            return
        self._state = "closed"
        self._task.cancel()
        try:
            await _outlast(self._task)
        finally:
            await self._close_items()

    def __del__(self) -> None:
        if getattr(self, "_state", "closed") == "open":
            warnings.warn(
                f"{self!r} was dropped open; use `async with`", ResourceWarning, stacklevel=2, source=self
            )

    def __repr__(self) -> str:
        account = self._queue.statistics()
        return (
            f"<Source {self._name} {self._state}, presented {account.presented}, delivered {account.delivered}, "
            f"dropped {account.dropped}>"
        )

    def __aiter__(self) -> Source[T]:
        return self

    async def __anext__(self) -> T:
        """The next item under the policy; waits until there is one.

        Cancelling loses nothing: an item is taken in the same step in which it is returned.

        Raises:
            StopAsyncIteration: The medium has ended.
            InvalidArgument: The source is not open, another consumer waits for the item, or the medium is damaged here.
        """
        if self._state != "open":
            raise InvalidArgument(
                f"{self._name}: expected to be iterated inside its `async with`, the source is {self._state}"
                f"{'; write async with source as items' if self._state == 'new' else ''}"
            )
        self._consumer.check(self._name)
        while not len(self._queue):
            if self._ended:
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
                raise StopAsyncIteration
            with self._consumer:
                await self._changed.wait()
        item = self._queue.take()
        self._announce_change()
        return item

    def newest_in_place_of(self, item: T) -> T:
        """The newest item in the place of the last one, which its consumer has not used and which then counts as dropped; the same
        one where ``keep`` is not ``"latest"``, or none is newer. Never waits."""
        newest = self._queue.exchange(item)
        if newest is not item:
            self._announce_change()
        return newest

    def statistics(self) -> SourceStatistics:
        """Counts of presented, delivered and dropped items so far; also after the end."""
        return self._queue.statistics()

    # One event for both directions: the presenter waits for room, the consumer for an item or the end. An anyio event cannot be
    # cleared, so each change uses one up.
    def _announce_change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _step(self) -> Made[T] | None:
        # The lock matters only when a task was cancelled past anyio's shield (asyncio does that at its shutdown): the thread
        # is then still in here while the generator is being closed. A closed generator has simply ended.
        with self._turn:
            try:
                offset_ns, item = next(self._items)
            except StopIteration:
                return None
            except asyncio.CancelledError as e:
                # Raised further it would end the task that made the step, and the medium would seem to have ended.
                raise GeneralFailure(f"{self._name}: expected items from the generator, got {e!r}") from e
            return offset_ns, item, self._now()

    async def _make(self) -> Made[T] | None:
        if self._blocking:
            with shortages_raised(self._name):
                return await anyio.to_thread.run_sync(self._step, limiter=self._limiter)
        return self._step()

    def _close_step(self) -> None:
        with self._turn:
            self._items.close()

    async def _close_items(self) -> None:
        if not self._blocking:
            self._close_step()
            return
        # A limiter of its own: closing must not queue behind a step that was abandoned past the shield.
        try:
            # The shield alone is not enough, see below.
            with anyio.CancelScope(shield=True), shortages_raised(self._name):
                await anyio.to_thread.run_sync(self._close_step, limiter=anyio.CapacityLimiter(1))
        except ResourceExhausted:
            self._close_step()  # No thread can be started.
        except BaseException:
            # A second cancellation by asyncio passes the shield. Closing twice is harmless, not closing is not; this waits for
            # one step at the most.
            self._close_step()
            raise

    async def _run(self, first: Made[T] | None, begun: anyio.Event) -> None:
        send, receive = anyio.create_memory_object_stream[Made[T]](AHEAD_MAX)
        try:
            with send, receive:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._make_ahead, first, send)
                    await self._present(receive, begun)
        finally:
            # Also when the end of the loop has cancelled this: a consumer does not wait for more.
            self._ended = True
            self._announce_change()

    async def _make_ahead(self, first: Made[T] | None, send: MemoryObjectSendStream[Made[T]]) -> None:
        with send:
            made = first
            try:
                while made is not None:
                    await send.send(made)
                    made = await self._make()
            except Exception as failure:  # Any error of a generator belongs to the consumer.
                self._failure = failure

    async def _present(self, receive: MemoryObjectReceiveStream[Made[T]], begun: anyio.Event) -> None:
        await anyio.lowlevel.checkpoint()  # The other task begins.
        begun.set()
        start_ns = presented_ns = self._now()
        held_until_ns = 0
        with receive:
            async for offset_ns, item, ready_ns in receive:
                due_ns = start_ns + offset_ns if self._pace else self._now()
                await self._sleep_until(due_ns)
                while self._queue.must_wait:
                    await self._changed.wait()
                    held_until_ns = self._now()
                moment = captured_at_ns(due_ns, self._now(), ready_ns, held_until_ns)
                self._queue.put(
                    msgspec.structs.replace(item, captured_at_ns=moment),
                    held_back=self._pace and held_until_ns > due_ns,
                    # Not late if it only waited for its predecessor, which was held back.
                    late=self._pace and ready_ns > max(due_ns, presented_ns),
                )
                presented_ns = self._now()
                self._announce_change()

    async def _sleep_until(self, due_ns: int) -> None:
        # A loop, because timers may fire early: uvloop counts in whole milliseconds.
        while (left_ns := due_ns - self._now()) > 0:
            await anyio.sleep(max(left_ns, SLEEP_NS_MIN) / 1e9)


async def _outlast(task: asyncio.Task[None]) -> None:
    """Waits for the end of a task that was cancelled, however often the caller is cancelled during the wait.

    Raises:
        asyncio.CancelledError: The caller was cancelled; the task has ended.
        BaseException: That of the task, if it ended otherwise.
    """
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as e:
                cancelled = e
    if cancelled is not None:
        raise cancelled
    if not task.cancelled():
        task.result()
