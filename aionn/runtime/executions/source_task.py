"""The task that reads the source of a stream: the application's code runs in it, and no scope of aionn's is open there.

A source may have scopes open while it gives an item: ``fail_after``, a task group, ``asyncio.timeout``. They belong to this task,
and so does their end: what cancels them arrives here, also while the stream waits for a buffer. So this is a plain task of
asyncio, which no task group owns, and a generator is closed in it.

Invariants:
1. A cancellation that the source caused is raised in the source, where the scope that it belongs to turns it into its own error.
2. A generator that gave an item is closed when the stream ends. Nothing that it raises then reaches other tasks.
3. A source that does not end is cancelled again and again, for a limited time: see ``Background.limit_reading``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

from aionn.errors import InvalidArgument, class_text
from aionn.runtime.background import Background, Cancelled, Task, is_running

__all__ = ["INTERRUPTS", "SourceTask", "check_source"]

INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""Exceptions that end the program, wherever they are raised."""


class SourceTask:
    """A source, and the task that reads it.

    Args:
        background: Waits for the task at the end.
        source: Gives the items.
    """

    def __init__(self, background: Background, source: AsyncIterable[Any]) -> None:
        self._background = background
        self._source = source
        self._items: AsyncIterator[Any] | None = None
        self._task: Task | None = None
        self._is_reading = False
        self._is_closing = False

    def start(self, work: Coroutine[Any, Any, None], on_end: Callable[[Task], None]) -> None:
        """Starts the task.

        Args:
            work: Calls ``next`` and ``aclose``, which are for this task alone.
            on_end: Called when it has ended, also when it was cancelled before it began.
        """
        self._task = self._background.start_reading(work)
        self._task.add_done_callback(on_end)

    async def next(self, cancelled: Cancelled | None) -> Any:
        """The next item.

        Args:
            cancelled: The cancellation that arrived in this task since the last item, which is raised in the source; None without.

        Raises:
            StopAsyncIteration: The source has ended.
            BaseException: That of the source.
        """
        self._is_reading = True
        try:
            if self._items is None:
                self._items = aiter(self._source)
            if cancelled is None:
                return await self._items.__anext__()
            if not isinstance(self._items, AsyncGenerator):
                raise cancelled
            return await self._items.athrow(cancelled)
        except BaseException:
            self._items = None  # A generator has ended with that.
            raise
        finally:
            self._is_reading = False
            del cancelled  # It refers to this frame.

    def newest_in_place_of(self, item: Any) -> Any:
        """The source's newest item in the place of the last one, which was not used; the same one for sources that keep none."""
        exchange = getattr(self._items, "newest_in_place_of", None)
        return item if exchange is None else exchange(item)

    def is_newer_due(self, then: Callable[[], object]) -> bool:
        """Whether the source has a newer item than all so soon that it is better waited for; ``then`` is called at the end of that
        wait. False for sources that know no pace."""
        ask = getattr(self._items, "is_newer_due", None)
        return ask is not None and bool(ask(then))

    async def aclose(self) -> None:
        """Closes a generator that has not ended. Idempotent. The application's other sources stay open: they are its own."""
        items, self._items = self._items, None
        if not isinstance(items, AsyncGenerator):
            return
        assert self._task is not None, "this is the task"
        self._is_closing = True
        self._background.limit_reading(self._task)
        try:
            await items.aclose()
        except INTERRUPTS:
            raise
        except BaseException:  # A task group raises GeneratorExit in a group. The stream ends all the same.
            return

    def end(self) -> None:
        """Has the task end: a source that is being waited for is cancelled. One that is being closed has a limited time."""
        task = self._task
        if task is None or task.done():
            return
        if self._is_reading or not (self._is_closing or is_running(task)):
            task.cancel()
        self._background.limit_reading(task)


def check_source(source: object) -> None:
    """Raises ``InvalidArgument`` for what is not an async iterable, with the remedy."""
    if isinstance(source, AsyncIterable):
        return
    advice = ""
    if callable(source):
        advice = "; call it, if it is an async generator function"
    elif isinstance(source, str | os.PathLike):
        advice = "; aionn.media.video_file and audio_file read files, and aionn.media.network an address"
    elif isinstance(source, Iterable):
        advice = "; make it one by an async generator (async def and yield), or by aionn.media.Source"
    raise InvalidArgument(f"stream: expected an async iterable, got {class_text(source)}{advice}")
