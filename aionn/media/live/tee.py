"""One source for several consumers: each branch has its own queue, and the newest item wins in each.

Owns the task that reads the source, and the branches. Refuses to own the source, which the caller opens and closes, and the rule
of a queue (`aionn/media/pacing.py`).

Invariants:
1. A branch holds at most its capacity, and a tee at most `BRANCHES_MAX` branches: a consumer that is slow, has stopped or was
   cancelled loses items of its own branch, and changes nothing for other branches.
2. The source is read only while there is a branch; a branch that nothing refers to is forgotten.
3. Every branch gets the items in the order of the source, each at most once, and after the last one the end or the error of the
   source.
4. When ``async with`` has ended, by whatever way, the task has ended. The exception is a source that does not return within
   `CLOSE_S_MAX` when it is cancelled.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from types import TracebackType
from typing import Final, Generic, Literal, Self, TypeVar

import anyio
import msgspec

from aionn.errors import GeneralFailure, InvalidArgument, class_text
from aionn.media.live.changes import Expectation
from aionn.media.live.worker import outlast
from aionn.media.pacing import (
    OneConsumer,
    PresentationQueue,
    checked_keep,
    checked_queue_max,
    worthwhile_wait_ns,
)
from aionn.media.records import AudioWindow, Frame, SourceStatistics
from aionn.platform.process_bound import InThisProcess

__all__ = ["Branch", "Tee", "tee"]

T = TypeVar("T")

BRANCHES_MAX: Final = 64
"""Open branches of a tee: every item is put into each of them, which takes a microsecond, and more consumers than this of one
camera are a leak."""

GAPS_MAX: Final = 64
"""Gaps that are kept for a consumer that does not read, as in a live source; of more, the earliest are forgotten."""

CLOSE_S_MAX: Final = 3.0
"""Cancelling a source takes microseconds; the same limit as for closing a live source."""


def tee(source: AsyncIterable[T]) -> Tee[T]:
    """Lets several consumers read one source, each at its own pace: ``async with camera() as frames, tee(frames) as shared``.

    Inside, ``shared.branch()`` is an async iterator for one consumer, and goes wherever a source goes. The items are shared and
    not copied: a consumer must not write into their arrays.

    A live source converts every item for a tee, also one that no branch takes, so that each branch has the newest one.

    Args:
        source: An async iterable that is open; nothing else reads it. It stays the caller's to close. Leaving the tee cancels the
            read that is in progress: a source of this package loses nothing by that, an async generator ends.

    Raises:
        InvalidArgument: It is not an async iterable.
    """
    if not isinstance(source, AsyncIterable):
        raise InvalidArgument(
            f"aionn.media.tee: source: expected an async iterable, got {class_text(source)}"
        )
    return Tee(source)


class Tee(InThisProcess, Generic[T]):
    """Reads a source and puts each item into every branch. Made by `tee`; entered once."""

    INSTEAD = "open one in the other process; its items can be copied and pickled"

    def __init__(self, source: AsyncIterable[T]) -> None:
        self._source: AsyncIterable[T] = source
        self._items: AsyncIterator[T] | None = None
        self._state: Literal["new", "open", "closed"] = "new"
        # A consumer that was dropped in the middle of its loop closes nothing: its branch disappears with it.
        self._branches: weakref.WeakSet[Branch[T]] = weakref.WeakSet()
        self._failure: Exception | None = None
        self._has_ended = False
        self._opened: anyio.Event | None = None

    async def __aenter__(self) -> Self:
        """Begins to read the source as soon as there is a branch.

        Raises:
            InvalidArgument: It was entered before.
        """
        if self._state != "new":
            raise InvalidArgument(f"aionn.media.tee: can be entered once, this one is {self._state}")
        self._state = "open"
        # As in a live source: a task group of anyio must be left by the task that entered it.
        self._task = asyncio.get_running_loop().create_task(self._read(), name="aionn-tee")
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the task. Branches return the items that they hold, and then end."""
        if self._state != "open":
            return
        self._state = "closed"
        self._task.cancel()
        try:
            await outlast(self._task, CLOSE_S_MAX)
        finally:
            self._end()

    def __repr__(self) -> str:
        return f"<Tee {self._state}, {len(self._branches)} branches>"

    def branch(self, *, keep: Literal["latest", "oldest"] = "latest", queue_max: int = 4) -> Branch[T]:
        """An async iterator of the items that the source returns from now on, for one consumer.

        May be called before the tee is entered; then it gets the first item as well. After the source has ended it gets that end.

        Args:
            keep: Items for a slow consumer: ``"latest"`` the newest item; ``"oldest"`` what was queued first, newer ones are
                dropped while ``queue_max`` wait. ``"all"`` would let one consumer hold back all the rest, and is rejected.
            queue_max: See ``keep``.

        Raises:
            InvalidArgument: An argument is out of range, or `BRANCHES_MAX` branches are open.
        """
        where = "aionn.media.tee: branch"
        policy = checked_keep(keep, where)
        if policy == "all":
            raise InvalidArgument(
                f"{where}: keep: expected latest or oldest, got 'all', by which one consumer would hold back the rest"
            )
        if len(self._branches) >= BRANCHES_MAX:
            raise InvalidArgument(
                f"{where}: expected at most {BRANCHES_MAX} open branches, got another; close those that are not read"
            )
        queue: PresentationQueue[T] = PresentationQueue(
            policy, checked_queue_max(queue_max, "queue_max", where)
        )
        branch = Branch(queue, self._branches.discard, self._worthwhile_wait_ns)
        if self._has_ended:
            branch._end(self._failure)
            return branch
        self._branches.add(branch)
        if self._opened is not None:
            self._opened.set()
        return branch

    async def _read(self) -> None:
        try:
            items = self._items = aiter(self._source)
            while True:
                await self._until_wanted()
                self._share(await anext(items))
                # A source that never waits, such as a plain generator, would leave the loop no time for its consumers.
                await asyncio.sleep(0)
        except StopAsyncIteration:
            pass
        except Exception as e:  # Any error of a source belongs to its consumers.
            self._failure = e
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The source was cancelled by its own side: raised further it would seem to have ended well.
            self._failure = GeneralFailure(
                "aionn.media.tee: expected items of the source, got a cancellation"
            )
        finally:
            self._end()

    def _share(self, item: T) -> None:
        # A function of its own: a variable of the task would keep a branch, or an item, that its consumer has dropped.
        for branch in list(self._branches):
            branch._put(item)

    def _worthwhile_wait_ns(self) -> int:
        """The longest wait for a newer item that is worthwhile; 0 for sources that know no pace."""
        return worthwhile_wait_ns(self._items)

    async def _until_wanted(self) -> None:
        while not self._branches:
            self._opened = anyio.Event()
            await self._opened.wait()

    def _end(self) -> None:
        self._has_ended = True
        for branch in list(self._branches):
            branch._end(self._failure)
        self._branches.clear()


class Branch(InThisProcess, AsyncIterator[T]):
    """The items of a tee for one consumer. Made by `Tee.branch`.

    ``async with`` closes it at the end of the block. ``break`` alone leaves it open while something refers to it; it then holds
    its newest item.
    """

    INSTEAD = "call tee.branch() for another consumer; its items can be copied and pickled"

    def __init__(
        self,
        queue: PresentationQueue[T],
        forget: Callable[[Branch[T]], None],
        worthwhile_wait_ns: Callable[[], int],
    ) -> None:
        self._queue = queue
        self._forget = forget
        # A wait of its own: the source has its newest item some turns of the loop before this branch has it.
        self._expectation = Expectation()
        self._worthwhile_wait_ns = worthwhile_wait_ns
        self._changed: anyio.Event | None = None
        self._consumer = OneConsumer()
        self._failure: Exception | None = None
        self._has_ended = False
        # Indices of items that follow a gap, since the item that has the mark may be dropped.
        self._gaps: deque[int] = deque(maxlen=GAPS_MAX)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()

    def close(self) -> None:
        """Ends the branch; the items that it holds are dropped. Idempotent; never waits."""
        self._queue.drop_all()
        self._gaps.clear()
        self._forget(self)
        self._end(None)
        self._failure = None

    def __repr__(self) -> str:
        account = self._queue.statistics()
        state = "ended" if self._has_ended else "open"
        return f"<Branch {state}, presented {account.presented}, delivered {account.delivered}, dropped {account.dropped}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """The next item under the policy; waits until there is one.

        Cancelling loses nothing: an item is taken in the same step in which it is returned.

        Raises:
            InvalidArgument: Another consumer waits for the item.
            StopAsyncIteration: The source has ended, the tee was left, or the branch was closed.
            Exception: The error of the source, once; every branch gets the same object.
        """
        self._consumer.check("aionn.media.tee: branch")
        while not len(self._queue):
            if self._has_ended:
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
                raise StopAsyncIteration
            if self._changed is None or self._changed.is_set():
                self._changed = anyio.Event()
            with self._consumer:
                await self._changed.wait()
        return self._marked(self._queue.take())

    def newest_in_place_of(self, item: T) -> T:
        """The newest item in the place of the last one, which its consumer has not used and which then counts as dropped; the same
        one where none is newer, or ``keep`` is ``"oldest"``. Never waits."""
        newest = self._queue.exchange(item)
        if newest is item:
            return item
        if (
            isinstance(item, Frame | AudioWindow)
            and item.follows_gap
            and isinstance(newest, Frame | AudioWindow)
        ):
            self._gaps.appendleft(item.index)
        return self._marked(newest)

    def is_newer_due(self, then: Callable[[], object]) -> bool:
        """Whether a newer item than all is expected so soon that a slow consumer is better off with that one, by the pace of the
        source; False where ``keep`` is ``"oldest"``.

        Args:
            then: Called when this branch has the newer item, or that is later than expected, if this returns True.
        """
        if self._has_ended or not self._queue.keeps_latest:
            return False
        return self._expectation.begin(then, self.worthwhile_wait_ns())

    def worthwhile_wait_ns(self) -> int:
        """The longest wait for a newer item than all that is worthwhile for a slow consumer; 0 if none is expected soon."""
        return 0 if self._has_ended else self._worthwhile_wait_ns()

    def statistics(self) -> SourceStatistics:
        """Counts of this branch: items that it was offered, delivered, dropped."""
        return self._queue.statistics()

    def _put(self, item: T) -> None:
        if isinstance(item, Frame | AudioWindow) and item.follows_gap:
            self._gaps.append(item.index)
        self._queue.put(item)
        self._expectation.end()
        self._wake()

    def _marked(self, item: T) -> T:
        """The item; with ``follows_gap`` where an item was dropped before it that had this mark."""
        if not self._gaps or not isinstance(item, Frame | AudioWindow):
            return item
        follows_gap = False
        while self._gaps and self._gaps[0] <= item.index:
            self._gaps.popleft()
            follows_gap = True
        return msgspec.structs.replace(item, follows_gap=True) if follows_gap else item

    def _end(self, failure: Exception | None) -> None:
        if not self._has_ended:
            self._failure = failure
            self._has_ended = True
            self._expectation.end()
            self._wake()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
