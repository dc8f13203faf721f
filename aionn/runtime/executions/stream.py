"""Streams: every item of a source through a burst, with the results in the source's order.

Owns the order of results, what happens to items that are late, and the tasks between a source and its consumer. One task reads
the source (``source_task``), so that a source may have scopes and task groups of its own, and writes items into buffers. Workers
execute the buffers: as many as the devices can use at a time, or one for each buffer where items have deadlines, since the
scheduler can drop only what it knows. ``slot_pool`` owns the buffers, ``burst`` how one is executed.

An item with a deadline is ``dropped`` by the wait for a buffer (``_place_waiting``), or because its execution raises
MissedDeadline, here, in the scheduler or at the device: docs/architecture.md, "Where to look", lists the places.

Invariants:
1. Results come in the order of the source; an error of the source comes after the results of what was before it.
2. There are never more items between source and consumer than buffers, and one that waits for a buffer. When that one gets it, a
   newer item of a source that keeps the newest takes its place; it gets none before a device can execute it.
3. An item's buffer is used again only when the device is done with it and the consumer has asked for the next result. Before the
   consumer has seen the result at all, an execution that waits for a buffer gets that one: the outputs are copied.
4. A stream that was ended, dropped or read to its end has no task, and no buffer but those that the device still has.
5. A consumer that is cancelled while it waits loses no result: the next call gives it.
6. An exception of a source, a writer or a deadline's function ends this stream alone, and is raised to its consumer. So is a
   failure of the stream's own tasks: they are plain tasks, and no failure of theirs ends other tasks.
7. A stream ends without an error only where its source ended, or its consumer ended it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from aionn.errors import DeadObject, GeneralFailure, InvalidArgument, MissedDeadline
from aionn.hal import NO_TIMING
from aionn.platform.loops import running_loop
from aionn.platform.process_bound import InThisProcess
from aionn.runtime.background import Background, Cancelled, Task, Waiter, failure_of
from aionn.runtime.clock import check_deadline, now_ns
from aionn.runtime.executions.failures import raisable
from aionn.runtime.executions.results import Result, Status, StreamResult, StreamStatistics, with_own_outputs
from aionn.runtime.executions.slot_pool import FrameBuffer, SlotPool
from aionn.runtime.executions.source_task import INTERRUPTS, SourceTask
from aionn.runtime.metrics.figures import StreamFigures

__all__ = ["Stream", "StreamPump"]

_T = TypeVar("_T")

UNPLACED_MAX = 16
"""Items that a source may give while none of them gets a buffer: one, and one more for each of its scopes that ends."""

WRITE_SHARE = 8
"""Part of the time between two results that writing an item may add to it, the price of a wait for a newer item as well."""


class Execute(Protocol):
    """Executes what is in a buffer; the result has views of it."""

    def __call__(self, buffer: FrameBuffer, deadline_ns: int | None) -> Coroutine[Any, Any, Result]: ...


class Item:
    """An item on its way from the source to the consumer, or the error that ended the source.

    Attributes:
        item: The source's item.
        error: Raised to the consumer instead of a result.
        buffer: None until it has one, and again when its outputs had to be copied.
        deadline_ns: Absolute; None means no deadline.
        result: The device's result; None before, and for a dropped item.
        finished_ns: When its result was here, or when it was dropped.
        is_finished: Whether the consumer can have it.
        is_lost: Whether its driver died while it ran, and the next one may succeed.
    """

    __slots__ = ("buffer", "deadline_ns", "error", "finished_ns", "is_finished", "is_lost", "item", "result")

    def __init__(self, item: Any, error: BaseException | None = None) -> None:
        self.item = item
        self.buffer: FrameBuffer | None = None
        self.error = error
        self.deadline_ns: int | None = None
        self.result: Result | None = None
        self.finished_ns = 0
        self.is_finished = error is not None
        self.is_lost = False


class StreamPump:
    """Pumps items from a source to results. Holds no reference to the consumer, so that a dropped consumer can be collected.

    Starts nothing until ``first`` is called.

    Args:
        pool: The buffers.
        background: Where its tasks live.
        source: Gives the items.
        execute: Executes a buffer.
        write: Writes an item into the memory of its inputs.
        deadline: From an item to its absolute deadline in nanoseconds; None means no deadlines.
        drops_late: Whether late items are dropped; otherwise they are executed, and marked late.
        device_slots: Number of executions that its devices can run at a time, all together.
        on_end: Called with this object when it was ended.
        figures: Counts the items; None without metrics.

    Attributes:
        items: Items on their way, in the source's order.
        is_fed: Whether no item is added any more.
        is_over: Whether it was ended.
        figures: See above.
    """

    def __init__(
        self,
        pool: SlotPool,
        background: Background,
        source: AsyncIterable[Any],
        execute: Execute,
        *,
        write: Callable[[Any, FrameBuffer], object],
        deadline: Callable[[Any], int] | None,
        drops_late: bool,
        device_slots: int,
        on_end: Callable[[StreamPump], None],
        figures: StreamFigures | None = None,
    ) -> None:
        self.figures = figures
        self._pool = pool
        self.background = background
        self.home = background.home
        self._source = SourceTask(background, source)
        self._execute = execute
        self._write = write
        self._deadline = deadline
        self._drops_late = drops_late
        self._worker_count = pool.slots if deadline is not None else min(pool.slots, device_slots)
        self._device_slots = device_slots
        # Known once the source has exchanged an item; without that nothing is measured.
        self._keeps_newest = False
        self._unfinished = self._write_ns = self._finished_ns = self._interval_ns = 0
        self._on_end = on_end
        self._workers: list[Task] = []
        self._unplaced: deque[Item] = deque(maxlen=UNPLACED_MAX)
        self._is_closer: Callable[[], bool] | None = None
        self._failure: BaseException | None = None
        self._started = False
        self._has_failed = False
        self._held: FrameBuffer | None = None
        self._consumer: Waiter | None = None
        self._reader: Waiter | None = None
        self._placed: Waiter  # The reader awaits it while an item waits for a buffer.
        self._ready: deque[tuple[Item, FrameBuffer]] = deque()
        self._idle: list[Waiter] = []
        self.items: deque[Item] = deque()
        self.is_fed = False
        self.is_over = False
        pool.lenders.add(self)

    # Tasks

    def _start(self) -> None:
        self._source.start(self._read(), self._reader_ended)
        self._workers = [
            self.background.start_execution(self._work_until_ended(), self._worker_ended)
            for _ in range(self._worker_count)
        ]

    async def _work_until_ended(self) -> None:
        try:
            await self._work()
        except Cancelled:
            # Not raised further when the stream ends: a cancelled task keeps its frames, and those this object, until the garbage
            # collector comes.
            if not self.is_over:
                raise

    def _worker_ended(self, task: Task) -> None:
        failure = failure_of(task)
        if failure is not None and not self.is_over:
            self._fail(failure)

    def _reader_ended(self, task: Task) -> None:
        if not (self.is_fed or self.is_over):
            self._fail(failure_of(task))

    def _fail(self, failure: BaseException | None) -> None:
        """Ends it with an error for every consumer."""
        self._failure = failure
        self.cancel()

    async def _work(self) -> None:
        """Executes what is ready, until nothing will be any more."""
        while not self.is_over:  # A ready item may have lost its buffer.
            if self._ready:
                await self._execute_item(*self._ready.popleft())
            elif self.is_fed:
                return
            else:
                waiter = self.background.waiter()
                self._idle.append(waiter)
                await waiter.future

    async def _execute_item(self, item: Item, buffer: FrameBuffer) -> None:
        try:
            item.result = await self._execute(buffer, item.deadline_ns if self._drops_late else None)
        except MissedDeadline as e:
            if item.deadline_ns is None:
                item.error = e
        except DeadObject as e:
            item.is_lost = e.transient
            if not e.transient:
                item.error = e
        except BaseException as e:
            if self.is_over and isinstance(e, (Cancelled, *INTERRUPTS)):
                raise
            item.error = raisable(e)
        item.finished_ns = now_ns()
        item.is_finished = True
        self._unfinished -= 1
        self._pool.note_spare()
        if self.items and self.items[0] is item:
            self._wake_consumer()
        if self._keeps_newest:
            self._interval_ns = item.finished_ns - self._finished_ns
            self._finished_ns = item.finished_ns
            self._pool.offer_free()
        del item  # Its error refers to this frame.

    # From the source to the buffers

    async def _read(self) -> None:
        """Reads the source until it ends or the stream does, and closes it. An exception of the source becomes the last item."""
        error: BaseException | None = None
        try:
            error = await self._take_items()
            await self._source.aclose()
            if isinstance(error, INTERRUPTS) and self.is_over:
                raise error  # There is no consumer to raise it to.
            error = await self._place_waiting() or error
            if error is not None and not self._has_ended():
                self._end_with(error)
        finally:
            del error  # It refers to this frame.
        self.is_fed = True
        for worker in self._idle:
            worker.wake()
        self._wake_consumer()

    async def _take_items(self) -> BaseException | None:
        """Takes items and has them put into buffers. Returns what the source raised, or the function of the deadline."""
        cancelled: Cancelled | None = None
        try:
            while not self._has_ended():
                try:
                    value = await self._source.next(cancelled)
                except StopAsyncIteration:
                    return None
                if self.is_over:
                    return None  # The source does not let itself be cancelled.
                item = Item(value)
                if self._deadline is not None:
                    item.deadline_ns = check_deadline(self._deadline(value), where="stream")
                waits = self._unplaced or self._is_full() or (self._keeps_newest and self._is_early())
                buffer = None if waits else self._pool.take_free()
                if buffer is not None:
                    cancelled = None
                    self._place(item, buffer)
                    continue
                if len(self._unplaced) == UNPLACED_MAX:
                    raise GeneralFailure(
                        f"stream: the source gave {UNPLACED_MAX} items after cancellations of its own scopes, and its consumer "
                        "took none of them"
                    )
                self._unplaced.append(item)
                cancelled = await self._place_waiting()
        except BaseException as e:
            return e
        finally:
            del cancelled  # It refers to this frame.
        return None

    def _has_ended(self) -> bool:
        """Whether no further item is wanted."""
        return self.is_over or self._has_failed

    async def _place_waiting(self) -> Cancelled | None:
        """Waits until the items that were taken are in buffers or dropped. The task that leaves a buffer (usually the consumer)
        writes the next item into it, which saves a turn of the loop.

        An item that waits until its deadline is dropped, where late items are.

        Returns:
            The cancellation that came before: of a scope that the source has open in this task, or of the stream's end.
        """
        try:
            while self._unplaced and not self._has_ended():
                item = self._unplaced[0]
                if item.is_finished:
                    await self._add_dropped(item)
                    continue
                self._placed = woken = self.background.waiter()
                limit_ns = item.deadline_ns if self._drops_late else None
                timer = None if limit_ns is None else self.background.at(limit_ns, woken.wake)
                self._pool.wait(self)
                try:
                    await woken.future
                finally:
                    self._pool.stop_waiting(self)
                    if timer is not None:
                        timer.cancel()
                if self._unplaced and self._unplaced[0] is item:
                    self._drop(item)
        except Cancelled as e:
            return e
        return None

    def _is_full(self) -> bool:
        """Whether there are as many items on their way to the consumer as there may be."""
        return len(self.items) + (self._held is not None) >= self._pool.slots

    async def _add_dropped(self, item: Item) -> None:
        """Waits until there is room for an item that was dropped, and adds it. Cancelled, it can be called again."""
        while self._is_full():
            self._reader = self.background.waiter()
            try:
                await self._reader.future
            finally:
                self._reader = None
        self._unplaced.popleft()
        self.items.append(item)
        self._wake_consumer()

    def wants(self) -> bool:
        """Whether the item that waits can have a buffer now: see ``Waiting``."""
        return not (self.is_over or self._is_full() or self._is_early() or self._is_newer_due())

    def _is_early(self) -> bool:
        """Whether an item would wait in its buffer for the device, and age, while its source gets newer ones."""
        return (
            self._keeps_newest
            and self._unfinished >= self._device_slots
            and self._write_ns * WRITE_SHARE <= self._interval_ns
        )

    def _is_newer_due(self) -> bool:
        """Whether a newer item than the one that waits is about to come; the pool then offers its buffer again."""
        return self._source.is_newer_due(self._pool.offer_free)

    def take(self, buffer: FrameBuffer) -> None:
        """Puts the item that waits, or a newer one, into a buffer."""
        self._placed.wake()
        item = self._unplaced.popleft()
        try:
            if not self._unplaced:
                self._renew(item)
        except BaseException as e:
            self._pool.leave(buffer)
            self._end_with(e)
            return
        self._place(item, buffer)

    def _renew(self, item: Item) -> None:
        """Exchanges an item that has waited, and aged, for the newest of its source, where that keeps the newest."""
        newest = self._source.newest_in_place_of(item.item)
        if newest is not item.item:
            self._keeps_newest = True
            item.item = newest
            if self._deadline is not None:
                item.deadline_ns = check_deadline(self._deadline(newest), where="stream")

    def _drop(self, item: Item) -> None:
        """Marks an item as dropped; it is reported to the consumer as soon as there is room for that."""
        item.finished_ns = now_ns()
        item.is_finished = True

    def _place(self, item: Item, buffer: FrameBuffer) -> None:
        """Writes an item into its buffer and has it executed. An exception becomes the last item."""
        if self.is_over:
            self._pool.leave(buffer)
            return
        item.buffer = buffer
        begun_ns = now_ns() if self._keeps_newest else 0
        try:
            self._write(item.item, buffer)
        except BaseException as e:
            self._pool.leave(buffer)
            self._end_with(e)
            return
        if self.is_over:  # The writer ended the stream.
            item.buffer = None
            self._pool.leave(buffer)
            return
        if begun_ns:
            self._write_ns = now_ns() - begun_ns
        self._unfinished += 1
        self.items.append(item)
        self._ready.append((item, buffer))
        if self._idle:
            self._idle.pop().wake()

    def _end_with(self, error: BaseException) -> None:
        self._has_failed = True
        self.items.append(Item(None, raisable(error)))
        self._wake_consumer()

    # To the consumer

    def spare(self) -> bool:
        """Leaves the buffer of one result that was not requested yet, by copying it; False without one."""
        for item in reversed(self.items):
            buffer = item.buffer
            if buffer is not None and item.is_finished:
                if item.result is not None:
                    item.result = with_own_outputs(item.result)
                item.buffer = None
                self._pool.leave(buffer)
                return True
        return False

    def _wake_consumer(self) -> None:
        if self._consumer is not None:
            self._consumer.wake()

    async def first(self) -> Item | None:
        """Waits for the first in the order, which stays there; None when none comes any more."""
        if not self._started:
            self._started = True
            if not self.is_over:
                self._start()
        while True:
            if self.items:
                if self.items[0].is_finished:
                    return self.items[0]
            elif self.is_fed or self.is_over:
                return None
            self._consumer = self.background.waiter()
            try:
                await self._consumer.future
            finally:
                self._consumer = None

    def hold(self, item: Item) -> None:
        """Takes the first from the order; its buffer stays until it is released."""
        assert self._held is None, "one at a time"
        self.items.popleft()
        self._held = item.buffer
        if item.buffer is None:
            self._make_room()

    def let_go(self) -> None:
        """The consumer is done with what it got last."""
        buffer, self._held = self._held, None
        if buffer is not None:
            if self._reader is not None:
                self._reader.wake()
            self._pool.leave(buffer)

    def _make_room(self) -> None:
        """One item less is on its way, and it had no buffer that could be left to the next."""
        if self._reader is not None:
            self._reader.wake()
        self._pool.offer_free()

    def cancel(self) -> None:
        """Ends it: no further item is taken, nothing more is delivered. Idempotent."""
        if self.is_over:
            return
        self.is_over = True
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.cancel()
        self._source.end()
        self._unplaced.clear()
        self.let_go()
        while self.items:
            item = self.items.popleft()
            if item.buffer is not None:
                self._pool.leave(item.buffer)
        self._pool.lenders.discard(self)
        self._on_end(self)
        self._wake_consumer()

    def close(self) -> None:
        """Ends it, since its burst is being closed: an error for every task but the running one. Idempotent."""
        if not self.is_over:
            self._is_closer = self.background.is_this_task()
            self.cancel()

    def check_end(self) -> None:
        """Raises the error of a stream that ended otherwise than by its source or its consumer.

        Raises:
            InvalidArgument: Another task closed its burst.
            GeneralFailure: A task of its own has failed, or was cancelled by others.
        """
        if self._failure is not None:
            raise GeneralFailure(f"stream: a task of its own ended with {self._failure!r}") from self._failure
        if self._is_closer is not None and not self._is_closer():
            raise InvalidArgument("stream: its burst was closed, and results are missing")


class Stream(InThisProcess, AsyncIterator[StreamResult[_T]]):
    """The results of a stream; made by ``Burst.stream``. A stream that is dropped ends.

    One that is broken off, by ``break`` or by a cancellation, and still referred to (by a name, or by the traceback of a kept
    exception) keeps the slot of its last result, and continues where it was when the next result is requested. Its other
    slots go to executions that wait for one. ``async with`` and ``aclose`` end it at a known time.
    """

    INSTEAD = "its results can be, and each process streams in a burst of its own"

    def __init__(self, pump: StreamPump) -> None:
        self._pump = pump
        self._home = pump.home
        self._asked = False
        self._counts = {"on_time": 0, "late": 0, "dropped": 0, "lost": 0}

    def __repr__(self) -> str:
        state = "ended" if self._pump.is_over else "open"
        return (
            f"<{type(self).__name__} {state}, {', '.join(f'{kind} {n}' for kind, n in self._counts.items())}>"
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamResult[_T]:
        if running_loop() is not self._home.loop:
            self._home.check("stream")
        if self._asked:
            raise InvalidArgument("stream: expected one consumer, but another task waits for the next result")
        pump = self._pump
        pump.let_go()
        self._asked = True
        try:
            item = await pump.first()
        finally:
            self._asked = False
        if item is None or pump.is_over:
            pump.cancel()
            pump.check_end()
            raise StopAsyncIteration
        pump.hold(item)
        if item.error is not None:
            pump.cancel()
            error, item.error = item.error, None
            try:
                raise error
            finally:
                del error  # It refers to this frame.
        result, deadline_ns, finished_ns = item.result, item.deadline_ns, item.finished_ns
        status: Status = "on_time"
        if result is None:
            status = "lost" if item.is_lost else "dropped"
        elif deadline_ns is not None and finished_ns > deadline_ns:
            status = "late"
        self._counts[status] += 1
        figures = pump.figures
        if figures is not None:
            if result is not None:
                figures.delivered(item.item, finished_ns, deadline_ns)
            else:
                figures.lost("lost" if item.is_lost else "deadline")
        if result is None:
            return StreamResult(item.item, (), status, finished_ns, deadline_ns, NO_TIMING)
        return StreamResult(item.item, result.outputs, status, finished_ns, deadline_ns, result.timing)

    def cancel(self) -> None:
        """Ends the stream: no further item is taken, nothing more is delivered. Idempotent.

        Raises:
            InvalidArgument: Called in another thread, or from another event loop.
        """
        self._home.check("stream")
        self._pump.cancel()

    async def aclose(self) -> None:
        """As ``cancel``."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if (
            value is None or self._home.is_here
        ):  # A forked child leaves with an error of its own: that counts.
            self.cancel()

    def statistics(self) -> StreamStatistics:
        """Counts so far."""
        return StreamStatistics(**self._counts)

    def __del__(self) -> None:
        pump = self._pump
        if not pump.is_over:
            # Wherever the collector runs, and whatever it interrupts: the stream's tasks are ended by the loop.
            pump.background.call_soon(pump.cancel)
