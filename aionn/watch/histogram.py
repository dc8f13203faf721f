"""Quantiles of any number of durations in bounded memory; pure.

Owns the buckets. A bucket is 1 % wide, so a quantile is exact within 0.5 %, which is less than two runs of a stream differ.
"""

from __future__ import annotations

import math
from collections import Counter

import msgspec

__all__ = ["Histogram", "Quantiles", "Recent", "bucket_of"]

_PER_E = 1 / math.log(1.01)
"""Buckets for each factor of e: 1 % wide."""

LONGEST_NS = 1 << 62
"""Longer durations count as this one: there are at most 4,320 buckets."""


class Quantiles(msgspec.Struct, frozen=True):
    """Durations in milliseconds; None without a sample.

    Attributes:
        p50: The median.
        p99: The 99th percentile.
        max: The longest.
    """

    p50: float | None = None
    p99: float | None = None
    max: float | None = None


def bucket_of(duration_ns: int) -> int:
    """The bucket of a duration; one below a nanosecond counts as one."""
    return int(math.log(min(max(duration_ns, 1), LONGEST_NS)) * _PER_E)


class Histogram:
    """Counts of durations.

    Attributes:
        count: Number of durations.
        longest_ns: The longest one.
    """

    __slots__ = ("_counts", "count", "longest_ns")

    def __init__(self) -> None:
        self.count = 0
        self.longest_ns = 0
        self._counts: dict[int, int] = {}

    def add(self, duration_ns: int, bucket: int | None = None) -> None:
        """Counts a duration.

        Args:
            duration_ns: It.
            bucket: Its bucket, where several histograms count the same duration; None computes it.
        """
        if bucket is None:
            bucket = bucket_of(duration_ns)
        counts = self._counts
        counts[bucket] = counts.get(bucket, 0) + 1
        self.count += 1
        if duration_ns > self.longest_ns:
            self.longest_ns = duration_ns

    def quantiles(self) -> Quantiles:
        """The median, the 99th percentile and the longest."""
        if not self.count:
            return Quantiles()
        ordered = sorted(self._counts.items())
        return Quantiles(self._ms(ordered, 0.5), self._ms(ordered, 0.99), round(self.longest_ns / 1e6, 3))

    def merged(self, other: Histogram) -> Histogram:
        """The durations of both."""
        both = Histogram()
        both._counts = dict(Counter(self._counts) + Counter(other._counts))
        both.count = self.count + other.count
        both.longest_ns = max(self.longest_ns, other.longest_ns)
        return both

    def _ms(self, ordered: list[tuple[int, int]], share: float) -> float:
        # The rank of the smallest duration that the share does not exceed.
        rank = max(1, math.ceil(share * self.count))
        passed = 0
        for bucket, count in ordered:
            passed += count
            if passed >= rank:
                middle_ns = math.exp((bucket + 0.5) / _PER_E)
                return round(min(middle_ns, self.longest_ns) / 1e6, 3)
        raise AssertionError("the counts add up to the count")


class Recent:
    """The durations of the last one to two periods.

    Args:
        period_ns: After this time the older half is forgotten.
    """

    __slots__ = ("_before", "_now", "_period_ns", "_since_ns")

    def __init__(self, period_ns: int) -> None:
        self._period_ns = period_ns
        self._since_ns = 0
        self._before = Histogram()
        self._now = Histogram()

    def add(self, duration_ns: int, now_ns: int, bucket: int | None = None) -> None:
        """Counts a duration; see ``Histogram.add``."""
        self._turn(now_ns)
        self._now.add(duration_ns, bucket)

    def quantiles(self, now_ns: int) -> Quantiles:
        """The quantiles of what is remembered."""
        self._turn(now_ns)
        return self._before.merged(self._now).quantiles()

    def _turn(self, now_ns: int) -> None:
        passed_ns = now_ns - self._since_ns
        if passed_ns < self._period_ns:
            return
        # After two periods without a call nothing of both halves is recent.
        self._before = self._now if passed_ns < 2 * self._period_ns else Histogram()
        self._now = Histogram()
        self._since_ns = now_ns
