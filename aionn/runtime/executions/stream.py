"""Streams: every item of a source through a burst, with the results in the source's order.

Owns the order of results, what happens to frames that are late, and the tasks between a source and its consumer. One task reads
the source, so that a source may have scopes and task groups of its own, and writes items into slots. Without a deadline and without
listeners, a few workers execute the slots directly; otherwise each is an ``Execution``, which can end at its deadline before the
device is done. Refuses to own slots and the device's bursts: those are ``Burst``'s.

Invariants:
1. Results come in the order of the source; an error of the source comes after the results of what was before it.
2. There are never more items between source and consumer than slots; the source is not read until one is free.
3. An item's slot is used again only when the device is done with it and the consumer has asked for the next result. Before the
   consumer has seen the result at all, an execution that waits for a slot gets that one: the outputs are copied.
4. A stream that was ended, dropped or read to its end has no task, and no slot but those that the device still has.
5. A consumer that is cancelled while it waits loses no result: the next call gives it.
6. An exception of a source, a writer or a deadline's function ends this stream alone, and is raised to its consumer.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Self, TypeVar

import anyio
import msgspec

from aionn.errors import Error, GeneralFailure, InvalidArgument, MissedDeadline
from aionn.hal import NO_TIMING, Priority, Timing, check_deadline_ns
from aionn.runtime.background import Background, Waiter
from aionn.runtime.clock import now_ns
from aionn.runtime.executions.execution import Execution
from aionn.runtime.memory.arguments import Array, Writer
from fences import FenceStatus

if TYPE_CHECKING:
    from aionn.runtime.executions.burst import Burst, Slot

__all__ = ["Frames", "SlotClaim", "Stream", "StreamResult", "StreamStatistics", "frames_of"]

_T = TypeVar("_T")

_Status = Literal["on_time", "late", "dropped"]

INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""Exceptions that end the program, wherever they are raised."""


class SlotClaim(NamedTuple):
    """One that waits for a slot of a burst.

    Attributes:
        wants: Whether it has a use for one now; otherwise the next in the order gets it.
        take: Takes one over immediately: called by the task that leaves it.
    """

    wants: Callable[[], bool]
    take: Callable[[Slot], None]


class StreamResult(msgspec.Struct, Generic[_T], frozen=True):
    """The result of one item of a stream.

    Attributes:
        item: The item.
        outputs: Read-only views of shared memory, valid until the next result is asked for; copy to keep. Empty when dropped.
        status: ``on_time``, ``late`` (executed, but after its deadline) or ``dropped`` (not there at its deadline).
        finished_ns: When its result was here, or when it was dropped.
        deadline_ns: Its deadline; None means no deadline.
        timing: What the device measured.
    """

    item: _T
    outputs: tuple[Array, ...]
    status: _Status
    finished_ns: int
    deadline_ns: int | None
    timing: Timing

    @property
    def valid_until(self) -> str:
        """The end of the validity of ``outputs``: they are views of a slot that is used again."""
        return "the next result is asked for, or the stream ends"


class StreamStatistics(msgspec.Struct, frozen=True):
    """Counts of a stream's items so far."""

    on_time: int
    late: int
    dropped: int


class _Entry:
    """An item on its way from the source to the consumer, or the error that ended the source."""

    __slots__ = (
        "deadline_ns",
        "error",
        "execution",
        "finished_ns",
        "is_here",
        "item",
        "outputs",
        "slot",
        "timing",
    )

    def __init__(self, item: Any, error: BaseException | None = None) -> None:
        self.item = item
        # None until it has one, and again when its outputs had to be copied.
        self.slot: Slot | None = None
        self.error = error
        # Whether the consumer can continue with it: for an execution from the beginning, as that can be awaited.
        self.is_here = error is not None
        self.execution: Execution | None = None
        self.deadline_ns: int | None = None
        self.outputs: tuple[Array, ...] = ()
        self.timing: Timing = NO_TIMING
        self.finished_ns = 0


class Frames(abc.ABC):
    """Pumps items from a source to results. Holds no reference to the consumer, so that a dropped consumer can be collected.

    Attributes:
        entries: What is on its way, in the source's order.
        is_fed: Whether no entry is added any more.
        is_over: Whether it was ended.
    """

    def __init__(
        self, burst: Burst, source: AsyncIterable[Any], write: Writer, priority: Priority, measure: bool
    ) -> None:
        self._burst = burst
        self.home = burst._background.home
        self._source = source
        self._write = write
        self._priority = priority
        self._measure = measure
        self._scope = anyio.CancelScope()
        self._started = False
        self._has_failed = False
        (self._key,) = burst._input_indexes
        self._held: Slot | None = None
        self._consumer: Waiter | None = None
        self._reader: Waiter | None = None
        self.entries: deque[_Entry] = deque()
        self.is_fed = False
        self.is_over = False

    @property
    def background(self) -> Background:
        """Where its tasks live."""
        return self._burst._background

    @abc.abstractmethod
    async def _feed(self) -> None:
        """Reads the source until everything was begun that it gave."""

    def _admit(self, entry: _Entry) -> int | None:
        """Until when an item may wait for a slot, absolute; None means no limit."""
        return None

    @abc.abstractmethod
    def _begin(self, entry: _Entry, slot: Slot) -> None:
        """Has an item that is in its slot executed."""

    @abc.abstractmethod
    def _take_results(self, entry: _Entry) -> bool:
        """Has an entry keep what its execution gave, as views; False where that has not ended."""

    async def _run(self) -> None:
        try:
            with self._scope:
                await self._feed()
        except BaseException:
            self.cancel()
            raise
        finally:
            # It refers to its task; that, cancelled, to the frames that it ended in; and those to this object.
            self._scope = anyio.CancelScope()
        self.is_fed = True
        self._tell()

    def _is_ending(self) -> bool:
        """Whether a cancellation that arrives is meant for the stream: it was ended, or the runtime closes."""
        return self.is_over or self._burst._background.tasks.cancel_scope.cancel_called

    def _is_meant_for_us(self, error: BaseException) -> bool:
        """Whether an exception propagates to the code that runs this task, since there is no consumer to raise it to."""
        return isinstance(error, (anyio.get_cancelled_exc_class(), *INTERRUPTS)) and self._is_ending()

    async def _read(self) -> None:
        """Takes items and has them put into slots. An exception of the source becomes the last entry."""
        burst = self._burst
        try:
            async for item in self._source:
                if self.is_over:
                    return  # The source does not let itself be cancelled.
                entry = _Entry(item)
                limit_ns = self._admit(entry)
                slot = None if self._is_full() else burst._take_unused()
                if slot is None:
                    await self._place_next(entry, limit_ns)
                else:
                    self._place(entry, slot)
                if self._has_failed:
                    return
        except BaseException as e:
            if self._is_meant_for_us(e):
                raise
            self._end_with(e)

    def _is_full(self) -> bool:
        """Whether there are as many items on their way to the consumer as there may be."""
        return len(self.entries) + (self._held is not None) >= self._burst._slot_count

    async def _place_next(self, entry: _Entry, limit_ns: int | None) -> None:
        """Waits until an item is in the next slot. The task that leaves the slot (usually the consumer) writes the item into it,
        which saves a turn of the loop.

        One that waits until its limit is dropped.
        """
        woken = self.background.waiter()
        is_placed = False

        def take(slot: Slot) -> None:
            nonlocal is_placed
            is_placed = True
            woken.wake()
            self._place(entry, slot)

        claim = SlotClaim(self._wants_slot, take)
        timer = None if limit_ns is None else self.background.at(limit_ns, woken.wake)
        self._burst._wait_for_slot(claim)
        try:
            await woken.future
        finally:
            self._burst._stop_waiting(claim)
            if timer is not None:
                timer.cancel()
        if not is_placed:
            await self._drop(entry)

    def _wants_slot(self) -> bool:
        return not self.is_over and not self._is_full()

    async def _drop(self, entry: _Entry) -> None:
        """Reports a dropped item to the consumer, as soon as there is room for that."""
        entry.finished_ns = now_ns()
        entry.is_here = True
        while self._is_full():
            self._reader = self.background.waiter()
            try:
                await self._reader.future
            finally:
                self._reader = None
        self.entries.append(entry)
        self._tell()

    def _place(self, entry: _Entry, slot: Slot) -> None:
        """Writes an item into its slot and has it executed. An exception becomes the last entry."""
        if self.is_over:
            self._burst._leave(slot)
            return
        entry.slot = slot
        try:
            self._write(entry.item, slot.area.view(self._key).view())
            self._begin(entry, slot)
        except BaseException as e:
            self._burst._leave(slot)
            self._end_with(e)
        else:
            self.entries.append(entry)

    def _end_with(self, error: BaseException) -> None:
        self._has_failed = True
        self.entries.append(_Entry(None, _raisable(error)))
        self._tell()

    def spare(self) -> bool:
        """Releases the slot of one result that was not requested yet, by copying it; False without one."""
        for entry in reversed(self.entries):
            slot = entry.slot
            if slot is not None and self._take_results(entry):
                entry.outputs = tuple(_kept(array) for array in entry.outputs)
                entry.slot = None
                self._burst._leave(slot)
                return True
        return False

    def _tell(self) -> None:
        """Wakes the consumer if it waits."""
        if self._consumer is not None:
            self._consumer.wake()

    async def first(self) -> _Entry | None:
        """Waits for the first in the order, which stays there; None when none comes any more."""
        if not self._started:
            self._started = True
            if not self.is_over:
                self._burst._background.tasks.start_soon(self._run)
        while True:
            if self.entries:
                if self.entries[0].is_here:
                    return self.entries[0]
            elif self.is_fed or self.is_over:
                return None
            self._consumer = self.background.waiter()
            try:
                await self._consumer.future
            finally:
                self._consumer = None

    def hold(self, entry: _Entry) -> None:
        """Takes the first from the order; its slot stays until it is released."""
        assert self._held is None, "one at a time"
        self.entries.popleft()
        self._held = entry.slot
        if entry.slot is None:
            self._make_room()

    def let_go(self) -> None:
        """The consumer is done with what it got last."""
        slot, self._held = self._held, None
        if slot is not None:
            if self._reader is not None:
                self._reader.wake()
            self._burst._leave(slot)

    def _make_room(self) -> None:
        """One item less is on its way, and it had no slot that could be left to the next."""
        if self._reader is not None:
            self._reader.wake()
        self._burst._offer_unused()

    def cancel(self) -> None:
        """Ends it: no further item is taken, nothing more is delivered. Idempotent."""
        if self.is_over:
            return
        self.is_over = True
        self._scope.cancel()
        self.let_go()
        while self.entries:
            entry = self.entries.popleft()
            if entry.execution is not None:
                entry.execution.cancel()
            if entry.slot is not None:
                self._burst._leave(entry.slot)
        self._burst._streams.discard(self)
        self._tell()


class _ExecutedFrames(Frames):
    """Each item is an execution of its own, which ends at its deadline if late items are dropped."""

    def __init__(
        self, *arguments: Any, deadline: Callable[[Any], int] | None, on_late: Literal["drop", "deliver"]
    ) -> None:
        super().__init__(*arguments)
        self._deadline = deadline
        self._drop_late = on_late == "drop"

    async def _feed(self) -> None:
        await self._read()

    def _admit(self, entry: _Entry) -> int | None:
        if self._deadline is not None:
            entry.deadline_ns = self._deadline(entry.item)
            check_deadline_ns(entry.deadline_ns, where="stream")
        return entry.deadline_ns if self._drop_late else None

    def _begin(self, entry: _Entry, slot: Slot) -> None:
        limit_ns = entry.deadline_ns if self._drop_late else None
        entry.execution = self._burst._begin(slot, limit_ns, self._priority, self._measure, copy=False)
        entry.is_here = True
        self._tell()

    def _take_results(self, entry: _Entry) -> bool:
        execution = entry.execution
        if execution is None or execution.fence.status == FenceStatus.PENDING:
            return False
        _, result, _ = execution.outcome()
        if result is not None:
            entry.outputs, entry.timing = result.outputs, result.timing
        return True


class _DirectFrames(Frames):
    """Workers, as many as the device can use, each with one execution at a time in its own task."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ready: deque[tuple[_Entry, Slot]] = deque()
        self._idle: list[Waiter] = []

    async def _feed(self) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in self._burst._lines[0]:
                tasks.start_soon(self._work_until_cancelled)
            await self._read()
            self.is_fed = True
            for worker in self._idle:
                worker.wake()

    def _begin(self, entry: _Entry, slot: Slot) -> None:
        self._ready.append((entry, slot))
        if self._idle:
            self._idle.pop().wake()

    async def _work_until_cancelled(self) -> None:
        try:
            await self._work()
        except anyio.get_cancelled_exc_class():
            # Not raised further when the stream ends: a cancelled task of a group keeps its frames, and those this object, until
            # the garbage collector comes.
            if not self._is_ending():
                raise

    async def _work(self) -> None:
        """Executes what is ready, until nothing will be any more."""
        while not self.is_over:  # A ready entry may have lost its slot.
            if self._ready:
                await self._execute(*self._ready.popleft())
            elif self.is_fed:
                return
            else:
                waiter = self.background.waiter()
                self._idle.append(waiter)
                await waiter.future

    async def _execute(self, entry: _Entry, slot: Slot) -> None:
        burst = self._burst
        slot.users += 1
        try:
            result = await burst._execute_directly(slot, self._priority, self._measure, copy=False)
            entry.outputs, entry.timing = result.outputs, result.timing
        except BaseException as e:
            if self._is_meant_for_us(e):
                burst._leave(slot)
                raise
            entry.error = _raisable(e)
        entry.finished_ns = now_ns()
        entry.is_here = True
        burst._leave(slot)  # Now it can be spared.
        if self.entries and self.entries[0] is entry:
            self._tell()

    def _take_results(self, entry: _Entry) -> bool:
        return entry.is_here


def _raisable(error: BaseException) -> BaseException:
    """The exception for the consumer: the error, unless its class has a meaning for the consumer's own task."""
    if not isinstance(
        error, (anyio.get_cancelled_exc_class(), GeneratorExit, StopIteration, StopAsyncIteration)
    ):
        return error
    failure = GeneralFailure(
        f"stream: the source, or what was called for an item, raised {type(error).__name__}"
    )
    failure.__cause__ = error
    return failure


def _kept(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def frames_of(
    burst: Burst,
    source: AsyncIterable[Any],
    write: Writer,
    deadline: Callable[[Any], int] | None,
    on_late: Literal["drop", "deliver"],
    priority: Priority,
    measure: bool,
) -> Frames:
    """Makes the pump of a stream; see ``Burst.stream`` for the arguments. Starts nothing until ``first`` is called."""
    if deadline is None and burst._is_alone():
        return _DirectFrames(burst, source, write, priority, measure)
    return _ExecutedFrames(burst, source, write, priority, measure, deadline=deadline, on_late=on_late)


class Stream(AsyncIterator[StreamResult[_T]]):
    """The results of a stream; made by ``Burst.stream``. A stream that is dropped ends.

    One that is broken off, by ``break`` or by a cancellation, and still referred to (by a name, or by the traceback of a kept
    exception) keeps the slot of its last result, and continues where it was when the next result is requested. Its other
    slots go to executions that wait for one. ``async with`` and ``aclose`` end it at a known time.
    """

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._home = frames.home
        self._asked = False
        self._counts = {"on_time": 0, "late": 0, "dropped": 0}

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamResult[_T]:
        self._home.check("stream")
        if self._asked:
            raise InvalidArgument("stream: expected one consumer, but another task waits for the next result")
        frames = self._frames
        frames.let_go()
        self._asked = True
        try:
            entry = await frames.first()
            if entry is not None and entry.execution is not None:
                await self._finish(entry, entry.execution)
        finally:
            self._asked = False
        if entry is None or frames.is_over:
            frames.cancel()
            raise StopAsyncIteration
        frames.hold(entry)
        if entry.error is not None:
            frames.cancel()
            raise entry.error
        deadline_ns, finished_ns = entry.deadline_ns, entry.finished_ns
        status: _Status = "on_time"
        if deadline_ns is not None:
            status = "dropped" if not entry.outputs else "late" if finished_ns > deadline_ns else "on_time"
        self._counts[status] += 1
        return StreamResult(entry.item, entry.outputs, status, finished_ns, deadline_ns, entry.timing)

    async def _finish(self, entry: _Entry, execution: Execution) -> None:
        try:
            result = await execution
            if entry.slot is not None:  # Otherwise they were copied.
                entry.outputs, entry.timing = result.outputs, result.timing
        except MissedDeadline as e:
            if entry.deadline_ns is None:
                entry.error = e
        except Error as e:
            entry.error = e
        entry.finished_ns = execution.finished_ns

    def cancel(self) -> None:
        """Ends the stream: no further item is taken, nothing more is delivered. Idempotent."""
        self._frames.cancel()

    async def aclose(self) -> None:
        """As ``cancel``."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def statistics(self) -> StreamStatistics:
        """Counts so far."""
        return StreamStatistics(**self._counts)

    def __del__(self) -> None:
        frames = self._frames
        if not frames.is_over:
            # Wherever the collector runs, and whatever it interrupts: the stream's tasks are ended by the loop.
            frames.background.call_soon(frames.cancel)
