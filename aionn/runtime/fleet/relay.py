"""A source that several streams read, one after the other: when one of them ends with its device, the next one continues.

Owns the task that reads the source, which outlives each of the streams, and the account of the items that a stream has taken.

Invariants:
1. The source is read only when an item is wanted: nothing ages here, and nothing is read ahead.
2. An item is given once. One that was read for a feed which does not want it any more is given to the next feed.
3. A source is closed once, when the relay ends, by the rules of ``SourceTask``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from aionn.errors import GeneralFailure
from aionn.runtime.background import Background, Cancelled, Task, Waiter, failure_of
from aionn.runtime.clock import now_ns
from aionn.runtime.executions.source_task import INTERRUPTS, SourceTask

__all__ = ["Feed", "Relay"]

UNTAKEN_MAX = 16
"""Items that a source may give while none is taken: one, and one more for each of its scopes that ends in the meantime."""


class Relay:
    """See the module.

    Args:
        background: Where the task lives.
        source: Gives the items.

    Attributes:
        raised: The exception that the source has ended with; None without one.
    """

    def __init__(self, background: Background, source: AsyncIterable[Any]) -> None:
        self._background = background
        self._source = SourceTask(background, source)
        self._items: deque[Any] = deque()
        self._is_wanted = False
        self._reader: Waiter | None = None
        self._taker: Waiter | None = None
        self.raised: BaseException | None = None
        self._failure: BaseException | None = None
        self._was_started = False
        self._has_ended = False
        self._is_over = False

    async def take(self, feed: Feed) -> Any:
        """The next item.

        Raises:
            StopAsyncIteration: The source has ended, or the feed was cut.
            BaseException: That of the source, once.
        """
        if not self._was_started and not self._is_over:
            self._was_started = True
            self._source.start(self._read(), self._reader_ended)
        while not self._items:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            if self._has_ended or self._is_over or feed.is_cut:
                raise StopAsyncIteration
            self._is_wanted = True
            if self._reader is not None:
                self._reader.wake()
            self._taker = self._background.waiter()
            try:
                await self._taker.future
            finally:
                self._taker = None
        if feed.is_cut:
            raise StopAsyncIteration
        return self._items.popleft()

    def wake(self) -> None:
        """The feed that takes has to look again."""
        if self._taker is not None:
            self._taker.wake()

    async def _read(self) -> None:
        """Reads the source until it ends or the relay does, and closes it."""
        failure: BaseException | None = None
        try:
            failure = await self._read_items()
            await self._source.aclose()
            if isinstance(failure, INTERRUPTS) and self._is_over:
                raise failure
            self._failure = self.raised = failure
        finally:
            del failure  # It refers to this frame.
            self._has_ended = True
            self.wake()

    async def _read_items(self) -> BaseException | None:
        cancelled: Cancelled | None = None
        try:
            while not self._is_over:
                if cancelled is None:
                    cancelled = await self._until_wanted()
                    if self._is_over:
                        return None
                try:
                    self._items.append(await self._source.next(cancelled))
                except StopAsyncIteration:
                    return None
                cancelled = None
                self._is_wanted = False
                if len(self._items) > UNTAKEN_MAX:
                    raise GeneralFailure(
                        f"stream: the source gave {len(self._items)} items after cancellations of its own scopes, and none was"
                        " taken"
                    )
                self.wake()
        except BaseException as e:
            return e
        finally:
            del cancelled  # It refers to this frame.
        return None

    async def _until_wanted(self) -> Cancelled | None:
        """Waits until an item is wanted; returns the cancellation that came before, for the source."""
        while not (self._is_wanted or self._is_over):
            self._reader = self._background.waiter()
            try:
                await self._reader.future
            except Cancelled as e:
                return e
            finally:
                self._reader = None
        return None

    def _reader_ended(self, task: Task) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._failure = self.raised = failure_of(task)
            self.wake()

    def end(self) -> None:
        """Ends it: no further item is read. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._source.end()
            self._items.clear()
            self.wake()


class Feed(AsyncIterator[Any]):
    """The items of a relay for one stream.

    Attributes:
        taken: Those that it has taken, each with the time, and whose results its reader has not had. The reader removes them.
        is_cut: Whether it ends before its source.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        # As many as the stream has buffers, and one that waits for one.
        self.taken: deque[tuple[Any, int]] = deque()
        self.is_cut = False

    async def __anext__(self) -> Any:
        item = await self._relay.take(self)
        self.taken.append((item, now_ns()))
        return item

    def cut(self) -> None:
        """Ends it; the next feed continues with the source."""
        self.is_cut = True
        self._relay.wake()
