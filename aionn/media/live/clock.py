"""Times of capture, in nanoseconds of CLOCK_MONOTONIC, from the clocks that live sources have.

Owns the conversion, and the estimate of a clock's drift. Refuses to read a clock: everything here takes the time as an argument.

Invariants:
1. A time of capture is never after the moment at which the item arrived.
2. At most `BUCKETS_MAX` numbers are kept, however long a source runs.

Sources: the kernel's documentation of ``v4l2_buffer`` (flags of the time stamp); the smallest delay of a window as the offset
    is the
method of RTP receivers and of NTP's clock filter.
"""

from __future__ import annotations

import collections
from typing import Literal

import msgspec

__all__ = ["CaptureClock", "CaptureTime", "MediaClock", "driver_time", "sender_time"]

CaptureClock = Literal["presented", "driver", "arrival", "sender"]
"""Origin of a time of capture: the pace of a file; the driver's stamp of the frame; the arrival of the data, smoothed; the clock
of the sender of a network stream."""

STAMP_AGE_NS_MAX = 10_000_000_000
"""A stamp of a driver or of a sender that is older belongs to another clock: neither holds a frame for 10 s."""

STAMP_AHEAD_NS_MAX = 1_000_000_000
"""A stamp may be ahead of the clock by so much, as those of virtual machines are; it is then set back to the arrival."""

BUCKET_NS = 1_000_000_000
"""The smallest delay of each second is kept: longer than the pause between two frames of all but still pictures."""

BUCKETS_MAX = 30
"""Seconds that are kept: within 30 s a clock that is wrong by 100 ppm drifts by 3 ms, less than the jitter of a network."""

DRIFT_BUCKETS_MIN = 10
"""Seconds before a drift is estimated: with fewer the jitter of a network is more than a usual drift."""

JUMP_NS = 1_000_000_000
"""Data that arrive so much earlier than their clock announces show that the clock was set: no jitter is negative."""


class CaptureTime(msgspec.Struct, frozen=True):
    """When an item was captured.

    Attributes:
        at_ns: CLOCK_MONOTONIC.
        clock: See `CaptureClock`.
        uncertainty_ns: The item may have been captured so much earlier or later, as far as the clock shows. A constant delay
            before the data arrive is not in it, as it cannot be observed here.
    """

    at_ns: int
    clock: CaptureClock
    uncertainty_ns: int


def driver_time(stamp_ns: int, is_monotonic: bool, now_ns: int) -> CaptureTime:
    """Time of capture of a frame that a driver has stamped.

    Args:
        stamp_ns: The driver's stamp.
        is_monotonic: Whether the driver declares that it is of CLOCK_MONOTONIC.
        now_ns: When the frame was taken from the driver; it is used where the stamp cannot be.
    """
    if not is_monotonic or not now_ns - STAMP_AGE_NS_MAX <= stamp_ns <= now_ns + STAMP_AHEAD_NS_MAX:
        return CaptureTime(now_ns, "arrival", 0)
    return CaptureTime(min(stamp_ns, now_ns), "driver", max(0, stamp_ns - now_ns))


def sender_time(stamp_ns: int, arrived: CaptureTime, arrival_ns: int) -> CaptureTime:
    """Time of capture of an item by the clock of its sender, which the sender's reports relate to the item.

    The difference of the two clocks cannot be observed here. If the sender's clock is right, the time is exact; else it is wrong
    by as much as that clock. The uncertainty is the distance to the arrival: the item was certainly not captured later than
    that.

    Args:
        stamp_ns: The sender's time of the item, converted to CLOCK_MONOTONIC by this machine's clocks.
        arrived: The time by the arrival, which is returned where the sender's clock cannot be right: more than 10 s before the
            arrival, or more than 1 s after it.
        arrival_ns: When the item arrived.
    """
    if not arrival_ns - STAMP_AGE_NS_MAX <= stamp_ns <= arrival_ns + STAMP_AHEAD_NS_MAX:
        return arrived
    return CaptureTime(min(stamp_ns, arrival_ns), "sender", abs(arrival_ns - stamp_ns))


class MediaClock:
    """Times of capture from the time stamps of a medium and the arrival of its data.

    The difference of the two is the offset of the clocks and a delay, which varies. The smallest difference of the last
    seconds is taken for the offset. The clock is anchored again when the medium's clock was set.
    """

    def __init__(self) -> None:
        # The smallest difference of each second: (second of arrival, time of arrival, difference).
        self._buckets: collections.deque[tuple[int, int, int]] = collections.deque(maxlen=BUCKETS_MAX)
        self._media_ns: int | None = None
        self._delay_ns = 0
        self._anchorings = 0

    @property
    def delay_ns(self) -> int:
        """Delay of the last item's arrival, against the fastest of the last seconds."""
        return self._delay_ns

    @property
    def anchorings(self) -> int:
        """Number of times that the medium's clock was set, or stepped."""
        return self._anchorings

    def observe(self, media_ns: int, arrival_ns: int) -> CaptureTime:
        """Takes the next item's stamp and arrival; returns its time of capture."""
        difference_ns = arrival_ns - media_ns
        goes_back = self._media_ns is not None and media_ns < self._media_ns
        if self._buckets and (goes_back or difference_ns < self._offset_ns() - JUMP_NS):
            self._buckets.clear()
            self._anchorings += 1
        self._media_ns = media_ns
        self._keep(arrival_ns, difference_ns)
        at_ns = min(arrival_ns, media_ns + self._offset_ns())
        self._delay_ns = arrival_ns - at_ns
        return CaptureTime(at_ns, "arrival", self._delay_ns)

    def drift_ppm(self) -> float | None:
        """Slowness of the medium's clock against ours, in millionths, by least squares; None before `DRIFT_BUCKETS_MIN` s."""
        count = len(self._buckets)
        if count < DRIFT_BUCKETS_MIN:
            return None
        origin_ns, base_ns = self._buckets[0][1], self._buckets[0][2]
        times = [(arrival - origin_ns) / 1e9 for _, arrival, _ in self._buckets]
        offsets = [(difference - base_ns) / 1e3 for _, _, difference in self._buckets]
        mean_time, mean_offset = sum(times) / count, sum(offsets) / count
        spread = sum((time - mean_time) ** 2 for time in times)
        covariance = sum((t - mean_time) * (o - mean_offset) for t, o in zip(times, offsets))
        return covariance / spread if spread > 0 else None

    def _offset_ns(self) -> int:
        return min(difference for _, _, difference in self._buckets)

    def _keep(self, arrival_ns: int, difference_ns: int) -> None:
        second = arrival_ns // BUCKET_NS
        if not self._buckets or self._buckets[-1][0] != second:
            self._buckets.append((second, arrival_ns, difference_ns))
        elif difference_ns < self._buckets[-1][2]:
            self._buckets[-1] = (second, arrival_ns, difference_ns)
        # After a pause the kept seconds may be older than the window.
        while self._buckets[0][0] <= second - BUCKETS_MAX:
            self._buckets.popleft()
