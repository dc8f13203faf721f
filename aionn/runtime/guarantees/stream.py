"""The results of a stream with a guarantee: as those of any stream, with the reservation and the label of each frame.

Owns the admission before the first frame, deadlines by the frames' captures, and the way of a label from the dispatcher to the
consumer.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, Self, TypeVar

import msgspec

from aionn.errors import InvalidArgument, NotAdmitted
from aionn.runtime.clock import now_ns
from aionn.runtime.executions.results import StreamResult, StreamStatistics
from aionn.runtime.executions.slot_pool import FrameBuffer
from aionn.runtime.executions.stream import Item, Stream, StreamPump
from aionn.runtime.guarantees.arrivals import FrameArrival, Measured
from aionn.runtime.guarantees.guarantee import StreamGuarantee, StreamReservation
from aionn.runtime.guarantees.loop_time import BodyTime
from aionn.runtime.guarantees.terms import Seconds, changed_terms
from aionn.scheduler.bandwidth import Label

__all__ = ["GuaranteedStream", "ReservedPump", "capture_deadline"]

_T = TypeVar("_T")


def capture_deadline(guarantee: StreamGuarantee) -> Callable[[Any], int]:
    """From an item to its absolute deadline: counted from ``item.captured_at_ns`` where it has that, otherwise from now.

    The deadline raises ``InvalidArgument`` where that is not an integer.
    """

    def deadline_ns(item: Any) -> int:
        try:
            captured_ns: int = item.captured_at_ns
        except AttributeError:
            captured_ns = now_ns()  # An array, or anything else that is not a frame of ``aionn.media``.
        if not isinstance(captured_ns, Integral):
            raise InvalidArgument(
                f"stream: expected captured_at_ns of an item in nanoseconds on the monotonic clock, got {captured_ns!r}"
            )
        return captured_ns + guarantee.terms.deadline_ns

    return deadline_ns


class ReservedPump(StreamPump):
    """A pump whose items are frames of a reservation. See ``StreamPump``.

    Args:
        guarantee: Executes the buffers.

    Attributes:
        guarantee: See above.
        held_arrival: The arrival of the result that the consumer has; None where it never arrived.
    """

    def __init__(self, *args: Any, guarantee: StreamGuarantee, **options: Any) -> None:
        self.guarantee = guarantee
        self.held_arrival: FrameArrival | None = None
        self._arrivals: dict[Item, FrameArrival] = {}
        super().__init__(*args, **options)

    async def _execute_item(self, item: Item, buffer: FrameBuffer) -> None:
        await super()._execute_item(item, buffer)
        arrival = self.guarantee.arrivals.pop(buffer.identifier, None)
        if arrival is not None and not self.is_over:
            if item.deadline_ns is not None and item.error is None:
                late_ns = item.finished_ns - item.deadline_ns
                if item.result is None or late_ns > 0:
                    arrival.lost(item.finished_ns, late_ns)
            self._arrivals[item] = arrival

    def _drop(self, item: Item) -> None:
        arrival = self.guarantee.never_came()
        if arrival is not None and not self.is_over:
            self._arrivals[item] = arrival
        super()._drop(item)

    def _renew(self, item: Item) -> None:
        """Keeps the item: each frame of a reservation is reported."""

    def _is_newer_due(self) -> bool:
        return False

    def hold(self, item: Item) -> None:
        """See ``StreamPump.hold``."""
        super().hold(item)
        self.held_arrival = self._arrivals.pop(item, None)

    def cancel(self) -> None:
        """See ``StreamPump.cancel``."""
        super().cancel()
        self._arrivals.clear()
        self.guarantee.end()


class GuaranteedStream(Stream[_T]):
    """The results of a stream with a guarantee; made by ``Burst.stream``.

    It is admitted before the source is read: by ``async with``, by ``admit``, or when the first result is requested. Its
    reservation ends with the stream.
    """

    def __init__(self, pump: ReservedPump) -> None:
        super().__init__(pump)
        self._guarantee = pump.guarantee
        self._reserved_pump = pump
        self._body = BodyTime(pump.guarantee.loop, pump.background.in_next_turn)

    @property
    def reservation(self) -> StreamReservation | None:
        """The reserved time; None before the admission, and where ``guarantee="best"`` was refused."""
        return self._guarantee.reservation()

    @property
    def refusal(self) -> NotAdmitted | None:
        """The reason why a stream with ``guarantee="best"`` has no reservation; None where it has one, or was not asked."""
        return self._guarantee.refusal

    def measured_before(self, measured: Measured) -> None:
        """The device time by another burst of the same model on the same device: nothing is executed before the admission."""
        self._guarantee.known = measured

    async def admit(self) -> StreamReservation | None:
        """Asks for the reservation, as ``async with`` does. Idempotent.

        Executes up to eighteen times, within some seconds, where the model was not timed before in this burst.

        Returns:
            The reservation; None where ``guarantee="best"`` was refused.

        Raises:
            NotAdmitted: There is no room; with ``reason`` and ``would_fit``. The stream has ended.
            InvalidArgument: It has ended already.
            Error: The device could not be measured. The stream has ended.
        """
        self._home.check("stream")
        if self._pump.is_over:
            raise InvalidArgument("stream: has ended")
        try:
            await self._guarantee.admit()
        except Exception:
            self.cancel()
            raise
        return self.reservation

    async def change(
        self, *, period: Seconds | None = None, deadline: Seconds | None = None, jitter: Seconds | None = None
    ) -> StreamReservation | None:
        """Asks for other terms: a new admission, before the old reservation ends. Also after a reservation was withdrawn.

        Args:
            period: Least seconds between two frames from now on; None as before.
            deadline: Seconds from a capture to its result; None as before.
            jitter: Longest time in seconds from a capture to its arrival; None as before.

        Returns:
            The reservation.

        Raises:
            NotAdmitted: There is no room; the stream continues with the old terms.
            InvalidArgument: A value is illegal, the burst has too few buffers, or the stream has ended.
            Error: The device could not be measured.
        """
        self._home.check("stream")
        if self._pump.is_over:
            raise InvalidArgument("stream: has ended")
        await self._guarantee.change(changed_terms(self._guarantee.terms, period, deadline, jitter))
        return self.reservation

    async def __aenter__(self) -> Self:
        await self.admit()
        return self

    async def __anext__(self) -> StreamResult[_T]:
        if not self._guarantee.is_asked and not self._pump.is_over:
            await self.admit()
        self._body.end()
        result = await super().__anext__()
        self._body.begin()
        arrival = self._reserved_pump.held_arrival
        label = None if arrival is None else arrival.label(now_ns())
        if label is None:
            return result
        assert arrival is not None, "it has the label"
        if arrival.has_overrun:
            self._guarantee.overran()
        return msgspec.structs.replace(result, label=label.value)

    def statistics(self) -> StreamStatistics:
        """Counts so far, with those of the frames that broke a promise."""
        counts = self._guarantee.counts()
        return msgspec.structs.replace(
            super().statistics(),
            early=counts[Label.EARLY],
            delayed=counts[Label.DELAYED],
            overran=counts[Label.OVERRAN],
            withdrawn=counts[Label.WITHDRAWN],
            stalled=counts[Label.STALLED],
            blocked=counts[Label.BLOCKED],
            unserved=counts[Label.UNSERVED],
            unread=counts[Label.UNREAD],
        )

    def explain(self) -> str:
        """The reservation with the counts of its frames, or the refusal, in a line of text."""
        return self._guarantee.explain()
