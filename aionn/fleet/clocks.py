"""The difference between the clocks of two machines, as bounds that hold.

Owns the filter. Pure: each time is an argument, in nanoseconds of the clock in its name.

Each exchange gives two bounds: a message that was sent at ``sent`` and received at ``received`` on the other clock cannot have
travelled for less than no time, so that the other clock is ahead by at most ``received - sent``; the answer gives the lower bound
in the same way. The intersection of all exchanges is kept, and widens by the greatest drift of two clocks while it is not renewed.
So the narrowest exchange counts for as long as it is worth something, and no window of exchanges is needed.

Invariants:
1. While the clocks drift by at most ``DRIFT_PPM``, the difference is within the bounds, whatever the network does: delays, jitter
   and directions of different speed only widen them.
2. Bounds that contradict each other belong to a clock that was changed, such as that of a machine that was suspended: the newest
   exchange alone counts from then on.

Source: NTP's clock filter (RFC 5905, section 10), and Marzullo's intersection of intervals in place of its minimum.
"""

from __future__ import annotations

__all__ = ["DRIFT_PPM", "ClockOffset", "RoundTrip"]

DRIFT_PPM = 200
"""Greatest drift of two clocks against each other: a quartz of an ordinary machine is within 100 parts in a million (RFC 5905
allows 500 for one that is disciplined at the same time)."""

SMOOTHING = 8
"""A new round trip counts for one part in so many (RFC 6298)."""


class ClockOffset:
    """Bounds of the difference: the time of the other clock minus that of the own clock."""

    __slots__ = ("_as_of_ns", "_high_ns", "_low_ns")

    def __init__(self) -> None:
        self._low_ns: int | None = None
        self._high_ns = 0
        self._as_of_ns = 0

    @property
    def is_known(self) -> bool:
        """Whether there was an exchange."""
        return self._low_ns is not None

    def exchange(self, sent_ns: int, received_ns: int, replied_ns: int, returned_ns: int) -> None:
        """Takes one exchange into account.

        Args:
            sent_ns: When the question was sent, on the own clock.
            received_ns: When it was received, on the other clock.
            replied_ns: When the answer was sent, on the other clock.
            returned_ns: When the answer was received, on the own clock.
        """
        low_ns, high_ns = replied_ns - returned_ns, received_ns - sent_ns
        if low_ns > high_ns:
            return  # No order of events has these times: the other end's clock was changed in between, or its answer is wrong.
        if self._low_ns is not None:
            known_low_ns, known_high_ns = self.bounds_ns(returned_ns)
            if known_low_ns <= high_ns and low_ns <= known_high_ns:
                # With few calls: each execution is an exchange.
                low_ns = known_low_ns if known_low_ns > low_ns else low_ns
                high_ns = known_high_ns if known_high_ns < high_ns else high_ns
        self._low_ns, self._high_ns, self._as_of_ns = low_ns, high_ns, returned_ns

    def bounds_ns(self, now_ns: int) -> tuple[int, int]:
        """The least and the greatest difference. Only where ``is_known``."""
        assert self._low_ns is not None, "there was no exchange"
        passed_ns = now_ns - self._as_of_ns
        drift_ns = -(-passed_ns * DRIFT_PPM // 1_000_000) if passed_ns > 0 else 0
        return self._low_ns - drift_ns, self._high_ns + drift_ns

    def uncertainty_ns(self, now_ns: int) -> int:
        """The width of the bounds: by so much a deadline on the other machine is early, at most. Only where ``is_known``."""
        low_ns, high_ns = self.bounds_ns(now_ns)
        return high_ns - low_ns

    def earliest_ns(self, own_ns: int, now_ns: int) -> int:
        """The time of the other clock at a time of the own clock, or before it: early by the uncertainty, and never late."""
        return own_ns + self.bounds_ns(now_ns)[0]

    @staticmethod
    def duration_ns(own_ns: int) -> int:
        """A duration on the other clock that is over when this one is, or before."""
        return own_ns - -(-own_ns * DRIFT_PPM // 1_000_000)


class RoundTrip:
    """The duration of exchanges of small messages, and of transfers of large ones.

    Attributes:
        mean_ns: The smoothed round trip; 0 before the first.
        deviation_ns: Its smoothed deviation.
        bytes_per_s: The smoothed rate of large transfers; 0 before the first.
    """

    __slots__ = ("bytes_per_s", "deviation_ns", "mean_ns")

    def __init__(self) -> None:
        self.mean_ns = self.deviation_ns = 0
        self.bytes_per_s = 0.0

    @property
    def upper_ns(self) -> int:
        """A round trip that is exceeded rarely: the retransmission time-out of RFC 6298 without its minimum."""
        return self.mean_ns + 4 * self.deviation_ns

    def measured(self, round_trip_ns: int) -> None:
        """An exchange of small messages took so long."""
        if not self.mean_ns:
            self.mean_ns, self.deviation_ns = round_trip_ns, round_trip_ns // 2
            return
        error_ns = round_trip_ns - self.mean_ns
        self.mean_ns += error_ns // SMOOTHING
        self.deviation_ns += (abs(error_ns) - self.deviation_ns) // 4

    def transferred(self, size_bytes: int, travel_ns: int) -> None:
        """A request and its answer of so many bytes together were under way for so long."""
        transfer_ns = max(1, travel_ns - self.mean_ns)
        rate = size_bytes * 1e9 / transfer_ns
        self.bytes_per_s += (rate - self.bytes_per_s) / SMOOTHING if self.bytes_per_s else rate
