"""A stream that runs on one of several devices, and continues elsewhere.

Owns the order of results over a move, and the account of what a lost device had: each of those items is a result with the status
``lost``, and none is executed again.

Invariants:
1. Results come in the order of the source, also over moves, and each item that was read has one.
2. A stream whose device is lost has its next place, or the reason of the refusal, before its consumer gets another result; where
   all devices are lost, after the items that were lost.
3. A stream that leaves a device which drains gets the results of that device first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

import anyio
import msgspec

from aionn.errors import DeadObject, DeviceUnavailable, Error, InvalidArgument
from aionn.hal import NO_TIMING
from aionn.platform.process_bound import InThisProcess
from aionn.runtime.background import Background
from aionn.runtime.clock import now_ns
from aionn.runtime.executions.burst import Burst
from aionn.runtime.executions.results import StreamResult, StreamStatistics
from aionn.runtime.executions.source_task import check_source
from aionn.runtime.executions.writing import ViewsWriter
from aionn.runtime.fleet.relay import Feed, Relay
from aionn.runtime.guarantees.guarantee import StreamReservation
from aionn.runtime.guarantees.stream import GuaranteedStream
from aionn.runtime.guarantees.terms import Seconds, in_progress_max, stated_terms
from aionn.runtime.memory.real_values import Writer

__all__ = ["Leg", "Move", "PlacedStream", "StreamRequest"]

_T = TypeVar("_T")

MOVES_MAX = 64
"""Moves that a stream remembers: the newest, of a fleet whose devices come and go."""


class StreamRequest:
    """The arguments of a stream, as for ``Burst.stream``, checked.

    Attributes:
        terms: Its terms.
        buffers: Number of buffers that it needs.
    """

    def __init__(
        self,
        source: AsyncIterable[Any],
        into: Writer | ViewsWriter | None,
        period: Seconds,
        deadline: Seconds | None,
        jitter: Seconds | None,
        name: str,
        *,
        on_late: Literal["drop", "deliver"],
        measure: bool,
    ) -> None:
        check_source(source)
        self.source = source
        self.into = into
        self.period = period
        self.deadline = deadline
        self.jitter = jitter
        self.name = name
        self.on_late = on_late
        self.measure = measure
        self.terms = stated_terms(name, period, deadline, jitter)
        self.buffers = in_progress_max(self.terms) + 1


class Leg(NamedTuple):
    """The part of a stream on one device.

    Attributes:
        device: The device's name.
        burst: Its burst there.
        stream: Its results there.
        feed: Its items.
        left: To be called when the burst is closed.
        lost: To be called with the error when the device is lost.
    """

    device: str
    burst: Burst
    stream: GuaranteedStream[Any]
    feed: Feed
    left: Callable[[], None]
    lost: Callable[[Error], None]


class Fleet(Protocol):
    """The devices of a stream."""

    @property
    def background(self) -> Background: ...

    @property
    def has_device(self) -> bool:
        """Whether not all devices are lost."""
        ...

    async def begin(self, stream: PlacedStream[Any], *, waits: bool = True) -> Leg:
        """See ``FleetStreams.begin``."""
        ...

    async def end(self, leg: Leg) -> None: ...

    def end_soon(self, leg: Leg) -> None: ...

    def forget(self, stream: PlacedStream[Any]) -> None: ...


class Move(msgspec.Struct, frozen=True):
    """A stream has gone on elsewhere.

    Attributes:
        left: The device that it ran on.
        reached: The one that it runs on since.
        reason: Why it has left.
        lost: Number of items that the device had, and that have no result.
        took_ns: From the loss, as it was noticed, until the next device was ready.
    """

    left: str
    reached: str
    reason: str
    lost: int
    took_ns: int


class PlacedStream(InThisProcess, AsyncIterator[StreamResult[_T]]):
    """The results of a stream on one of several devices; made by ``FleetStreams.stream``. One task at a time reads it.

    It is admitted by ``async with``, or when the first result is requested. Where its device is lost, the items that this had are
    results with the status ``lost``, and the stream continues elsewhere; ``NotAdmitted`` is raised where no device has room,
    and where all are lost and none is back within ten seconds.
    """

    INSTEAD = "its results can be, and each process has streams of its own"

    def __init__(self, fleet: Fleet, request: StreamRequest) -> None:
        self._fleet = fleet
        self.request = request
        self.relay = Relay(fleet.background, request.source)
        self._leg: Leg | None = None
        self._next_leg: Leg | None = None
        self._lost: deque[StreamResult[_T]] = deque()
        self._failure: Error | None = None
        self._left: tuple[str, str, int, int] | None = None
        self._is_asked = False
        self._is_over = False
        self._ended = StreamStatistics(0, 0, 0)
        self._moves: deque[Move] = deque(maxlen=MOVES_MAX)
        self._beginning = anyio.Lock()

    def __repr__(self) -> str:
        where = "ended" if self._is_over else f"on {self.device}" if self._leg is not None else "not admitted"
        return f'<PlacedStream "{self.request.name}" {where}>'

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._is_over

    @property
    def device(self) -> str | None:
        """The device that it runs on; None before the admission and after the end."""
        return None if self._leg is None else self._leg.device

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves so far, the newest ``MOVES_MAX`` of them."""
        return tuple(self._moves)

    @property
    def reservation(self) -> StreamReservation | None:
        """The reserved time; None before the admission and after the end."""
        return None if self._leg is None else self._leg.stream.reservation

    def statistics(self) -> StreamStatistics:
        """Counts so far, on all devices; those of items that a lost device had are in ``lost``."""
        if self._leg is None:
            return self._ended
        return _sum(self._ended, self._leg.stream.statistics())

    async def admit(self) -> StreamReservation | None:
        """Asks for a place, as ``async with`` does. Idempotent.

        Raises:
            NotAdmitted: No device has room. The stream has ended.
            InvalidArgument: It has ended already.
            Error: No device could be asked. The stream has ended.
        """
        await self._admit(waits=True)
        return self.reservation

    async def _admit(self, *, waits: bool) -> None:
        """As ``admit``. Where all devices are lost it waits, or leaves it to a later call."""
        async with self._beginning:
            if self._is_over:
                raise InvalidArgument("stream: has ended")
            if self._leg is None:
                try:
                    leg = await self._fleet.begin(self, waits=waits)
                except Error:
                    if not (waits or self._fleet.has_device or self._is_over):
                        return
                    self.cancel()
                    raise
                if self.is_over:  # It was cancelled while it waited.
                    await self._fleet.end(leg)
                    raise InvalidArgument("stream: has ended")
                self._reach(leg)

    async def __aenter__(self) -> Self:
        await self.admit()
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamResult[_T]:
        if self._is_asked:
            raise InvalidArgument("stream: expected one consumer, but another task waits for the next result")
        self._is_asked = True
        try:
            return await self._next()
        finally:
            self._is_asked = False

    async def _next(self) -> StreamResult[_T]:
        while True:
            if self._lost:
                return self._lost.popleft()
            failure, self._failure = self._failure, None
            if failure is not None:
                self.cancel()
                raise failure
            if self._is_over:
                raise StopAsyncIteration
            leg = self._leg
            if leg is None:
                await self.admit()
                continue
            try:
                result = await leg.stream.__anext__()
            except StopAsyncIteration:
                if not leg.feed.is_cut or self._is_over:
                    self.cancel()
                    raise
                self._go_over(leg)
                continue
            except (DeadObject, DeviceUnavailable) as e:
                if e is self.relay.raised:
                    self.cancel()
                    raise
                await self._go_on(leg, e)
                continue
            except BaseException as e:
                if isinstance(e, Exception):
                    self.cancel()
                raise
            if result.status == "lost":
                await self._go_on(leg, DeadObject(f"{leg.device} is lost"))
                continue
            leg.feed.taken.popleft()
            return result

    async def _go_on(self, leg: Leg, error: Error) -> None:
        """The device is lost: its items are, and the stream begins elsewhere."""
        lost_ns = now_ns()
        for item, taken_ns in leg.feed.taken:
            deadline_ns = _captured_ns(item, taken_ns) + self.request.terms.deadline_ns
            self._lost.append(StreamResult(item, (), "lost", lost_ns, deadline_ns, NO_TIMING))
        leg.lost(error)
        self._leave(leg, str(error), len(leg.feed.taken))
        following, self._next_leg = self._next_leg, None
        if following is not None:
            self._reach(following)
        elif not self._is_over:
            try:
                await self._admit(waits=False)  # Its consumer gets the items that were lost before a wait.
            except Error as e:
                self._failure = e

    def _go_over(self, leg: Leg) -> None:
        """The device drains, and has given all results."""
        self._leave(leg, "it drains", 0)
        following, self._next_leg = self._next_leg, None
        if following is not None:
            self._reach(following)

    def _leave(self, leg: Leg, reason: str, lost: int) -> None:
        # A result of the status ``lost`` is in the count of the stream there already, an error is not.
        before = leg.stream.statistics()
        self._ended = _sum(self._ended, msgspec.structs.replace(before, lost=lost))
        self._left = leg.device, reason, lost, now_ns()
        self._leg = None
        self._fleet.end_soon(leg)

    def _reach(self, leg: Leg) -> None:
        self._leg = leg
        if self._left is not None:
            device, reason, lost, left_ns = self._left
            self._left = None
            self._moves.append(Move(device, leg.device, reason, lost, now_ns() - left_ns))

    async def move(self) -> str:
        """Begins elsewhere, where its new place is; it leaves the present device at its next result. Returns the device.

        Raises:
            NotAdmitted: No device has room; the stream stays.
        """
        async with self._beginning:
            leg = self._leg
            following = await self._fleet.begin(self)
            if self._is_over or leg is None or self._leg is not leg or self._next_leg is not None:
                await self._fleet.end(following)  # It has ended, was lost, or moves, in the meantime.
            else:
                self._next_leg = following
                leg.feed.cut()
            return following.device

    def cancel(self) -> None:
        """Ends the stream: no further item is taken, nothing more is delivered. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        self.relay.end()
        for leg in (self._leg, self._next_leg):
            if leg is not None:
                self._ended = _sum(self._ended, leg.stream.statistics())
                self._fleet.end_soon(leg)
        self._leg = self._next_leg = None
        self._fleet.forget(self)

    async def aclose(self) -> None:
        """As ``cancel``."""
        self.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()


def _captured_ns(item: Any, taken_ns: int) -> int:
    try:
        return int(item.captured_at_ns)
    except AttributeError:
        return taken_ns  # An array, or anything else that is not a frame of ``aionn.media``.


def _sum(one: StreamStatistics, other: StreamStatistics) -> StreamStatistics:
    return StreamStatistics(
        **{field: getattr(one, field) + getattr(other, field) for field in StreamStatistics.__struct_fields__}
    )
