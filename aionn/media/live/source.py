"""The shell of live sources: an async iterator over what a capture dequeues, opened again when it is lost.

Owns the task that reads the capture and lives through its losses, and the order of the end. Refuses to own what is captured
(`Capture`), what is kept (`queueing.py`), and when a lost source is opened again (`reconnection.py`).

An item is converted when the consumer asks for it: until then its buffer waits in the queue, and under ``keep="latest"`` a
newer one replaces it, so that nothing is converted in vain.

Invariants:
1. The event loop's thread never waits: what may block runs in the worker thread, and has a limit.
2. When ``async with`` has ended, by whatever way, the capture is closed and no thread runs for us. The exception is a call of
   the system that has not returned within `CLOSE_S_MAX`: the thread closes the capture when it returns.
3. The error that ends the source reaches the consumer after every item that was kept.
4. ``presented == delivered + dropped + queued`` in the statistics, at any time.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
import warnings
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Literal, TypeVar

import anyio
import msgspec

from aionn.errors import Error, InvalidArgument, named, shortage_of, shortages_raised, shown
from aionn.media.arguments import checked_function, checked_text
from aionn.media.live.attempts import until_attempt
from aionn.media.live.capture import Arrivals, Capture, CorruptItem, Grab, Opener, SourceUnavailable
from aionn.media.live.changes import Changes, Expectation
from aionn.media.live.queueing import GrabQueue, is_stale
from aionn.media.live.readable import while_readable
from aionn.media.live.reconnection import Connection, ConnectionState, Health, Reconnection
from aionn.media.live.silence import Silence
from aionn.media.live.statistics import LiveStatistics
from aionn.media.live.worker import Call, Worker, outlast
from aionn.media.pacing import Keep, OneConsumer, checked_keep, checked_queue_max
from aionn.media.records import AudioWindow, Frame
from aionn.platform.process_bound import InThisProcess

__all__ = ["LiveSource"]

GAPS_MAX = 64
"""Gaps that are kept for a consumer that does not read; of more, the earliest are forgotten."""

CLOSE_S_MAX = 3.0
"""Closing takes milliseconds; a driver whose device was unplugged may wait for a transfer's time-out of 1 to 2 s."""

SPURIOUS_S = 0.005
"""Pause after a descriptor was readable and had nothing: a driver that reports an error in this way must not keep a core busy."""

HELD_S = 0.005
"""Pause while the consumer holds every buffer of a device that fills memory of the application: a fraction of any camera's
period."""

CONVERT_S_MAX = 5.0
"""A conversion takes milliseconds; one that takes so long will not end, and the source is opened again."""

PREPARED_NS_MAX = 2_000_000
"""A conversion that takes no longer, 6 % of a camera's period, is made for each new item while the consumer exchanges items: it has
no time to wait for one then."""

UNEXCHANGED_MAX = 8
"""Items that were used without an exchange, after which the consumer is no longer slower than the source."""

CORRUPT_MAX = 60
"""So many damaged items in a row, 2 s of a usual camera, and the source is opened again."""

T = TypeVar("T", Frame, AudioWindow)


class LiveSource(InThisProcess, Generic[T]):
    """Items of a camera, a microphone or a network stream: ``async with source as items: async for item in items``.

    A source is entered once, and read by one consumer at a time. While it is lost the iterator waits; the first item afterwards has
    ``follows_gap``.
    """

    INSTEAD = "open one in the other process; its items can be copied and pickled"

    def __init__(
        self,
        opener: Opener[T],
        *,
        name: str,
        keep: Keep = "latest",
        queue_max: int = 4,
        reconnect: Reconnection | None,
        unused: Callable[[T], object] | None = None,
        is_held: Callable[[], bool] | None = None,
        arrivals: Callable[[], Arrivals | None] | None = None,
        now: Callable[[], int] = time.monotonic_ns,
        rng: Callable[[], float] = random.random,
    ) -> None:
        """Makes a source; opens nothing yet.

        Args:
            opener: Opens the capture.
            name: Shown in messages and in the `repr`.
            keep: Items for a slow consumer: ``"latest"`` the newest item; ``"oldest"`` what was queued first; ``"all"``
                everything: the source is held back while ``queue_max`` wait, and a device that cannot be held back loses items,
                which are counted.
            queue_max: See ``keep``.
            reconnect: When it is opened again after a loss; None ends it with the error.
            unused: Called with each item that was converted and is dropped; None where that needs nothing.
            is_held: Whether the consumer holds all memory of the device, which then is silent and not lost; None
                where that cannot be.
            arrivals: Begins to watch for devices that come, while the source waits for the next attempt; None where nothing reports
                them.
            now: The time in ns of CLOCK_MONOTONIC.
            rng: Numbers of [0, 1), for the delays.

        Raises:
            InvalidArgument: An argument has another type, or is out of range.
        """
        checked_text(name, "aionn.media.LiveSource: name")
        if not (reconnect is None or isinstance(reconnect, Reconnection)):
            raise InvalidArgument(
                f"{name}: reconnect: expected None or an aionn.media.Reconnection, got {shown(reconnect)}"
            )
        optional = {"unused": unused, "is_held": is_held, "arrivals": arrivals}
        given = {argument: function for argument, function in optional.items() if function is not None}
        for argument, function in {**given, "now": now, "rng": rng}.items():
            checked_function(function, f"{name}: {argument}")
        for ability in ("open", "cancel"):
            checked_function(getattr(opener, ability, None), f"{name}: opener: {ability}")
        self._state: Literal["new", "open", "closed"] = "new"
        self._name = name
        self._opener: Opener[T] = opener
        self._queue = GrabQueue(checked_keep(keep, name), checked_queue_max(queue_max, "queue_max", name))
        self._policy = reconnect
        self._unused: Callable[[T], object] | None = unused
        self._is_held = is_held or (lambda: False)
        self._arrivals = arrivals
        self._now = now
        self._rng = rng
        self._connection = Connection(reconnect, now(), rng)
        self._worker = Worker(f"aionn-{name}")
        self._capture: Capture[T] | None = None
        self._converting: Call[T] | None = None
        self._ready: deque[T] = deque()
        self._changed = Changes()
        self._expectation = Expectation()
        self._silence = Silence(now())
        self._consumer = OneConsumer()
        self._failure: Exception | None = None
        self._has_ended = False
        self._index = 0
        self._first_ns: int | None = None
        self._last_sequence: int | None = None
        self._has_gap = False
        # The items before which the source was lost, that were not delivered yet: one that is dropped leaves its gap to the next.
        self._gaps: deque[int] = deque(maxlen=GAPS_MAX)
        self._damaged_row = self._undecodable_row = 0
        self._had_nothing = False
        self._broken: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        self._convert_ns = self._conversion_ns = 0
        self._unexchanged = UNEXCHANGED_MAX
        self._presented = self._delivered = self._dropped = self._lost = self._corrupt = self._late = 0

    async def __aenter__(self) -> LiveSource[T]:
        """Opens the source and starts to read it.

        Raises:
            SourceUnavailable: It cannot be opened, and ``reconnect`` does not repeat the first attempt.
            ResourceExhausted: No thread, memory or descriptor is left for it (transient).
            InvalidArgument: The source has been entered before, or is not what the arguments claim.
        """
        if self._state != "new":
            raise InvalidArgument(
                f"{self._name}: expected a source that was not used before, this one is {self._state}; make another"
            )
        self._state = "open"
        self._connection = Connection(self._policy, self._now(), self._rng)
        try:
            await self._try_to_open()
            failure, self._failure = self._failure, None
            if self._connection.state is ConnectionState.ENDED:
                assert failure is not None
                raise failure
        except BaseException:
            self._state = "closed"
            await self._close_all()
            raise
        # Not a task group of anyio: that leaves a coroutine behind, with a warning, when the loop ends before the task's first
        # step; and it must be left by the task that entered it, which fixtures of tests do not do.
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"aionn-{self._name}")
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the task and closes the source; items that were not taken are dropped."""
        if self._state != "open":
            return
        self._state = "closed"
        # Its cancellation refers to the frames in which it was raised, and those to this object, whose memory may be a user's.
        task, self._task = self._task, None
        assert task is not None
        task.cancel()
        try:
            await outlast(task, CLOSE_S_MAX)
        finally:
            del task
            self._connection.ended(self._now())
            await self._close_all()

    def __del__(self) -> None:
        if getattr(self, "_state", "closed") == "open":
            warnings.warn(
                f"{self!r} was dropped open; use `async with`", ResourceWarning, stacklevel=2, source=self
            )

    def __repr__(self) -> str:
        return (
            f"<LiveSource {self._name} {self._connection.state.value}, presented {self._presented}, "
            f"delivered {self._delivered}, dropped {self._dropped}, lost {self._lost}>"
        )

    def __aiter__(self) -> LiveSource[T]:
        return self

    async def __anext__(self) -> T:
        """The next item under the policy; waits until there is one, also while the source is lost.

        Cancelling loses nothing under ``"all"`` and ``"oldest"``; under ``"latest"`` a newer item may replace the one that was
        being converted.

        Raises:
            StopAsyncIteration: The source has ended, and its error was raised before.
            SourceUnavailable: The source was lost and is not opened again.
            InvalidArgument: The source is not open, or another consumer waits for the item.
        """
        if self._state != "open":
            raise InvalidArgument(
                f"{self._name}: expected to be iterated inside its `async with`, the source is {self._state}"
                f"{'; write async with source as items' if self._state == 'new' else ''}"
            )
        self._consumer.check(self._name)
        if self._queue.keeps_latest and self._ready and len(self._queue):
            # Converted for a consumer that was cancelled; a newer one is here.
            self._drop_ready()
        while not self._ready:
            self._convert_next()
            if self._ready:
                break
            if self._has_ended and self._converting is None and not len(self._queue):
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
                raise StopAsyncIteration
            with self._consumer:
                await self._changed.wait()
        self._delivered += 1
        self._unexchanged = min(self._unexchanged + 1, UNEXCHANGED_MAX)
        return self._take_ready(follows_gap=False)

    def newest_in_place_of(self, item: T) -> T:
        """The newest item in the place of the last one, which its consumer has not used and which then counts as dropped; the same
        one where ``keep`` is not ``"latest"``, or none is newer. Never waits: an item that is converted in the worker thread is
        there a moment after it came, from the second call on, where the conversion is short."""
        if self._state != "open" or not self._queue.keeps_latest:
            return item
        self._unexchanged = 0
        capture = self._capture
        if len(self._queue) and capture is not None and capture.is_immediate:
            self._drop_ready()
            self._convert_next()
        if not self._ready:
            return item
        self._dropped += 1
        if self._unused is not None:
            self._unused(item)
        return self._take_ready(follows_gap=item.follows_gap)

    def is_newer_due(self, then: Callable[[], object]) -> bool:
        """Whether a newer item than all is expected so soon that a slow consumer is better off with that one: its results are
        younger then, by three quarters of a period at most, at the price of an eighth of them at most.

        Args:
            then: Called when the newer item is here, or is later than expected, if this returns True.
        """
        if not self._queue.keeps_latest:
            return False
        return self._expectation.begin(then, self.worthwhile_wait_ns())

    def worthwhile_wait_ns(self) -> int:
        """The longest wait for a newer item than all that is worthwhile for a slow consumer, by the pace of the source; 0 if no
        newer one is expected soon."""
        return self._silence.worthwhile_ns(self._now())

    def _take_ready(self, *, follows_gap: bool) -> T:
        """The item that was converted first, marked if it follows a gap."""
        item = self._ready.popleft()
        self._changed.announce()
        while self._gaps and self._gaps[0] <= item.index:
            self._gaps.popleft()
            follows_gap = True
        if follows_gap != item.follows_gap:
            item = msgspec.structs.replace(item, follows_gap=follows_gap)
        return item

    def statistics(self) -> LiveStatistics:
        """Counts so far; also after the end."""
        clock = None if self._capture is None else self._capture.clock
        return LiveStatistics(
            presented=self._presented,
            delivered=self._delivered,
            dropped=self._dropped,
            queued=self._presented - self._delivered - self._dropped,
            held_back=0,
            late=self._late,
            lost=self._lost,
            corrupt=self._corrupt,
            reconnections=self._connection.reconnections,
            delay_ns=0 if clock is None else clock.delay_ns,
            drift_ppm=None if clock is None else clock.drift_ppm(),
        )

    def health(self) -> Health:
        """State of the connection: since when, and why it was last lost."""
        return self._connection.health()

    def _drop_ready(self) -> None:
        """Drops the items that were converted and not delivered."""
        self._dropped += len(self._ready)
        while self._ready:
            item = self._ready.popleft()
            if self._unused is not None:
                self._unused(item)

    # Opening and closing

    async def _try_to_open(self) -> None:
        """One attempt: changes the connection's state, and sets ``_capture`` or ``_failure``."""
        try:
            # A shortage of descriptors or of memory passes; it must not end a source that waits for its device.
            with shortages_raised(self._name):
                capture: Capture[T] = await self._worker.run(
                    self._opener.open,
                    limit_s=self._opener.limit_s,
                    what=self._name,
                    discard=lambda capture: capture.close(),
                )
        except Error as e:
            is_permanent = (
                e.is_permanent if isinstance(e, SourceUnavailable) else isinstance(e, InvalidArgument)
            )
            self._failure = e
            self._connection.failed(self._now(), str(e), is_permanent=is_permanent)
            return
        self._capture = capture
        self._last_sequence = None
        self._damaged_row = self._undecodable_row = 0
        self._broken = None
        self._connection.opened(self._now())

    async def _close_all(self) -> None:
        """Closes whatever is open and ends the thread, in bounded time, however often the caller is cancelled."""
        while len(self._queue):
            self._queue.take()
            self._dropped += 1
        self._drop_ready()
        self._expectation.end()
        capture, self._capture = self._capture, None
        self._converting = None
        self._opener.cancel()
        await self._worker.aclose((lambda: None) if capture is None else capture.close, CLOSE_S_MAX)
        # A conversion that was under way has ended before, and its item is lost.
        self._dropped = self._presented - self._delivered

    async def _leave(self, capture: Capture[T]) -> None:
        """Converts what is kept of a lost capture, since its buffers end with it, and closes it."""
        if self._queue.keeps_latest and len(self._queue):
            self._drop_ready()
        # Under ``"all"`` nothing is dropped; the ready items stay bounded, since nothing is read while a capacity of it waits.
        most = self._queue.capacity * (2 if self._queue.keeps_all else 1)
        with anyio.move_on_after(CLOSE_S_MAX):
            while len(self._ready) < most and (len(self._queue) or self._converting is not None):
                self._convert_next()
                if self._converting is not None:
                    await self._changed.wait()
        while len(self._queue):
            self._queue.take()
            self._dropped += 1
        self._dropped += self._converting is not None
        self._converting = None
        self._capture = None
        await self._worker.run(capture.close, limit_s=CLOSE_S_MAX, what=self._name)

    # The task

    async def _run(self) -> None:
        try:
            while self._connection.state is not ConnectionState.ENDED:
                if self._connection.state is ConnectionState.LIVE:
                    await self._read_until_lost()
                elif self._connection.state is ConnectionState.WAITING:
                    await until_attempt(self._connection.wake_ns, self._now, self._arrivals)
                    self._connection.due(self._now())
                else:
                    await self._try_to_open()
        except Exception as e:  # A bug; the consumer gets it.
            self._failure = e
        finally:
            self._has_ended = True
            self._changed.announce()

    async def _read_until_lost(self) -> None:
        capture = self._capture
        assert capture is not None
        try:
            await self._read(capture)
        except SourceUnavailable as e:
            self._failure = e
            self._has_gap = True
            self._connection.lost(self._now(), str(e), is_permanent=e.is_permanent)
        try:
            await self._leave(capture)
        except SourceUnavailable as e:
            # The system has not closed it in time; the thread will, and attempts fail until it has.
            self._capture = None
            if self._connection.state is ConnectionState.ENDED and self._failure is None:
                self._failure = e

    async def _read(self, capture: Capture[T]) -> None:
        """Reads until the capture is lost, which it raises."""
        silence = self._silence = Silence(self._now())
        while True:
            self._check_items(capture)
            if self._queue.holds_back(len(self._ready)):
                await self._changed.wait()
                silence.excuse(self._now())
                continue
            if self._is_held():
                await anyio.sleep(HELD_S)
                silence.excuse(self._now())
                continue
            left_ns = silence.left_ns(self._now())
            if left_ns <= 0:
                raise SourceUnavailable(
                    f"{capture.name}: expected an item within {silence.limit_ns / 1e9:g} s, got none; the device or "
                    "the server is silent"
                )
            read = functools.partial(self._take, capture, silence)
            if await while_readable(capture.fileno(), read, left_ns / 1e9) and self._had_nothing:
                await anyio.sleep(SPURIOUS_S)

    def _take(self, capture: Capture[T], silence: Silence) -> bool:
        """Takes what the capture has; returns whether the next wait is only for more of it."""
        self._had_nothing = not self._drain(capture)
        if self._had_nothing:
            return False
        silence.end(self._now(), capture.period_ns)
        self._check_items(capture)
        return not (self._queue.holds_back(len(self._ready)) or self._is_held())

    def _drain(self, capture: Capture[T]) -> int:
        """Takes what the capture has, at most as much as it has buffers; returns how many items that were."""
        count = 0
        was_starved = False
        grabs: list[Grab] = []
        depth, queued = capture.depth, len(self._queue)
        # Under ``"all"`` none is dequeued that the queue cannot take.
        room = (self._queue.capacity if self._queue.keeps_all else depth + 1) - queued
        try:
            while count < depth and len(grabs) < room:
                grab = capture.dequeue(self._now())
                if grab is None:
                    break
                count += 1
                if self._is_good(capture, grab):
                    grabs.append(grab)
                if grab.is_last:
                    break
            was_starved = count >= depth - queued - (self._converting is not None)
        finally:
            if grabs:
                self._keep(capture, grabs, was_starved)
        return count

    def _is_good(self, capture: Capture[T], grab: Grab) -> bool:
        """Counts an item's losses and numbers it; requeues a damaged one."""
        grab.lost_before += grab.lost_since(self._last_sequence)
        self._last_sequence = grab.sequence
        self._lost += grab.lost_before
        self._index += grab.lost_before
        if grab.is_corrupt:
            capture.requeue(grab)
            self._corrupt += 1
            self._damaged_row += 1
            return False
        self._damaged_row = 0
        if self._first_ns is None:
            self._first_ns = grab.captured.at_ns
        grab.index = self._index
        self._index += 1
        grab.time_s = (grab.captured.at_ns - self._first_ns) / 1e9
        if grab.follows_gap or self._has_gap:
            self._gaps.append(grab.index)
        self._has_gap = False
        return True

    def _check_items(self, capture: Capture[T]) -> None:
        """Raises what makes it useless to read further."""
        broken, self._broken = self._broken, None
        if broken is not None:
            # Memory may be there for the next connection; any other error of a conversion is a bug, and comes again.
            is_permanent = shortage_of(broken, capture.name) is None
            raise SourceUnavailable(f"{capture.name}: {named(broken)}", is_permanent=is_permanent) from broken
        if self._converting is not None and self._now() - self._convert_ns > CONVERT_S_MAX * 1e9:
            raise SourceUnavailable(
                f"{capture.name}: expected to be converted within {CONVERT_S_MAX:g} s; the decoder is at fault"
            )
        if max(self._damaged_row, self._undecodable_row) >= CORRUPT_MAX:
            raise SourceUnavailable(
                f"{capture.name}: expected whole items, got {CORRUPT_MAX} damaged ones in a row; the device, its "
                f"cable or the server "
                "is at fault"
            )

    def _keep(self, capture: Capture[T], grabs: list[Grab], was_starved: bool) -> None:
        """Puts items into the queue, and gives the buffers of those that are dropped back."""
        are_stale = False
        if self._queue.keeps_latest:
            age_ns = self._now() - grabs[-1].captured.at_ns
            are_stale = is_stale(age_ns, capture.period_ns, was_starved)
        for grab in grabs:
            self._presented += 1
            dropped = grab if are_stale else self._queue.put(grab)
            if dropped is not None:
                self._dropped += 1
                capture.requeue(dropped)
        if capture.is_immediate:
            self._expectation.end()
        elif self._unexchanged < UNEXCHANGED_MAX and self._conversion_ns <= PREPARED_NS_MAX:
            self._prepare()
        self._changed.announce()

    # Conversion

    def _prepare(self) -> None:
        """Begins to convert the newest item for the next exchange."""
        if len(self._queue) and self._converting is None:
            self._convert_next()

    def _convert_next(self) -> None:
        """Begins to convert the first of the queue, unless one is being converted."""
        capture = self._capture
        if capture is None or self._converting is not None or not len(self._queue):
            return
        grab = self._queue.take()
        self._changed.announce()  # There is room.
        if capture.is_immediate:
            try:
                self._ready.append(capture.convert(grab))
            except Exception as e:  # As in the thread.
                self._dropped += 1
                self._broken = e
            capture.requeue(grab)
            return
        call = self._worker.submit(functools.partial(capture.convert, grab))
        self._converting = call
        self._convert_ns = self._now()
        call.future.add_done_callback(functools.partial(self._take_converted, call, capture, grab))

    def _take_converted(self, call: Call[T], capture: Capture[T], grab: Grab, future: object) -> None:
        error = None if call.future.cancelled() else call.future.exception()
        if self._converting is not call:
            return  # The capture was closed.
        self._converting = None
        self._conversion_ns = self._now() - self._convert_ns
        capture.requeue(grab)
        if isinstance(error, CorruptItem):
            self._corrupt += 1
            self._undecodable_row += 1
            self._presented -= 1
        elif error is not None:
            self._dropped += 1
            self._broken = error
        else:
            self._undecodable_row = 0
            if self._queue.keeps_latest:
                self._drop_ready()  # No exchange has used it.
            self._ready.append(call.future.result())
            self._expectation.end()
        self._changed.announce()
