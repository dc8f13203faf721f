"""The contract between the shell of live sources and a device or connection that is open.

Owns the protocol, the record of what was captured and the error of a source that cannot be used. Refuses to own any device.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import msgspec

from aionn.errors import DeviceUnavailable
from aionn.media.live.clock import CaptureTime, MediaClock

__all__ = ["Arrivals", "Capture", "CorruptItem", "Grab", "Opener", "SourceUnavailable"]

SEQUENCE_MASK = 0xFFFF_FFFF

LOST_MAX = 1_000_000
"""A gap in the numbers of a device that is larger, or goes backwards, is a counter that was set: nothing is counted then."""

T_co = TypeVar("T_co", covariant=True)


class SourceUnavailable(DeviceUnavailable):
    """A live source cannot be opened, or was lost.

    Attributes:
        is_permanent: Whether a later attempt cannot succeed either, unless something else is changed first.
    """

    def __init__(self, message: str, *, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent


class CorruptItem(Exception):
    """The data of one item are incomplete or damaged: it is counted and left out. Never raised to users."""


class Grab(msgspec.Struct):
    """One captured item that is not converted yet.

    Attributes:
        slot: The buffer that it occupies until it is requeued.
        captured: When it was captured.
        sequence: The device's number of the item, 32 bits; None if the device does not count. A gap shows how many the device lost.
        is_corrupt: Whether the device marks it as incomplete.
        content: Belongs to the capture.
        index: Number in the source; the shell sets it, and the following.
        time_s: Seconds since the source's first item.
        lost_before: Items that were lost before this one since the last.
        follows_gap: Whether the source was lost before it, or its clock was set.
        is_last: Whether the capture knows that none waits behind it, so that it need not be asked.
    """

    slot: int
    captured: CaptureTime
    sequence: int | None = None
    is_corrupt: bool = False
    content: Any = None
    index: int = 0
    time_s: float = 0.0
    lost_before: int = 0
    follows_gap: bool = False
    is_last: bool = False

    def lost_since(self, last: int | None) -> int:
        """Items that the device lost since the one with the number ``last``; 0 if either has none, or if the counter was set."""
        if last is None or self.sequence is None:
            return 0
        gap = (self.sequence - last - 1) & SEQUENCE_MASK
        return gap if gap < LOST_MAX else 0


class Capture(Protocol[T_co]):
    """A device or connection that is open and fills buffers.

    ``fileno``, ``dequeue`` and ``requeue`` are called on the event loop's thread and never wait; ``convert`` and ``close`` are
    called in the source's worker thread, one at a time. ``close`` is called once, after the last ``convert``.
    """

    @property
    def name(self) -> str:
        """Names the source in messages; it holds no password."""

    @property
    def depth(self) -> int:
        """Number of its buffers."""

    @property
    def period_ns(self) -> int | None:
        """Time between two items; None if it is not known."""

    @property
    def clock(self) -> MediaClock | None:
        """The clock of its medium; None if items have stamps of our own clock."""

    @property
    def is_immediate(self) -> bool:
        """Whether ``convert`` takes so little that it may run on the event loop's thread."""

    def fileno(self) -> int:
        """The descriptor that is readable when ``dequeue`` has something to return."""

    def dequeue(self, now_ns: int) -> Grab | None:
        """Returns the next filled buffer, None if none waits.

        Raises:
            SourceUnavailable: The device or connection is lost.
        """

    def requeue(self, grab: Grab) -> None:
        """Gives the buffer back to be filled again. It raises nothing: a lost source is noticed by ``dequeue``."""

    def convert(self, grab: Grab) -> T_co:
        """Makes the item that users get. The result shares no memory with the buffer.

        Raises:
            CorruptItem: The data cannot be decoded.
        """

    def close(self) -> None:
        """Frees everything. It raises nothing."""


class Opener(Protocol[T_co]):
    """Opens a source, any number of times."""

    @property
    def limit_s(self) -> float:
        """An opening that takes longer has failed."""

    def open(self) -> Capture[T_co]:
        """Opens the source; called in the worker thread, and may wait. Frees everything if it fails.

        Raises:
            SourceUnavailable: It cannot be opened.
            InvalidArgument: It is not what the caller claims.
        """

    def cancel(self) -> None:
        """Makes an opening that is under way fail soon, where that is possible; no other one follows. Called in the loop's
        thread."""


class Arrivals(Protocol):
    """Watches for devices that come, so that an attempt to open one need not wait for its time."""

    def fileno(self) -> int:
        """Readable when something has changed."""

    def news(self) -> bool:
        """Reads what has changed; returns whether an attempt may succeed now. It never waits."""

    def close(self) -> None:
        """Ends the watch."""
